//! The commands that would do what a plan says. Nothing here runs one, and no drive that is in use stands in one.

use super::inventory::{Drive, Inventory, State};
use super::layout::{Placed, Share};
use super::quantity::Millis;
use super::verdict::Placement;

/// Type of a partition with a journal, by which Ceph's own tools know it.
const JOURNAL_TYPE: &str = "45b0969e-9b03-4f30-b4c6-b4b80ceff106";

/// The node of a drive that may stand in a command.
fn free(drive: &Drive) -> Option<&str> {
    drive.path.as_deref().filter(|_| drive.state == State::Free)
}

/// What is done first with an SSD that nobody has graded.
fn qualify(drive: &Drive, path: &str) -> Option<String> {
    let wanted = drive.product.grade().is_none();
    wanted.then(|| format!("tidepool lab qualify {path} --long 10m --yes-destroy"))
}

/// A cache for a hypervisor's volumes.
pub(super) fn host_cache(drive: &Drive, loss: Option<Millis>) -> Vec<String> {
    let Some(path) = free(drive) else { return Vec::new() };
    let loss = loss.map(|loss| format!(" --accept-loss {loss}")).unwrap_or_default();
    let mut commands = Vec::from_iter(qualify(drive, path));
    commands.push(format!("tidepool cache format {path}"));
    commands.push(format!("tidepool serve --cache {path} --volume NAME=rbd:POOL/IMAGE{loss}"));
    commands
}

/// Parts of an SSD for the OSDs of its host.
pub(super) fn under_osds(inventory: &Inventory, ssd: &Drive, placed: &Placed) -> Vec<String> {
    let Some(path) = free(ssd) else { return Vec::new() };
    let can_attach = inventory.cluster.ceph.is_none_or(|release| release.major >= 16);
    let makes = match placed {
        Placed { placement: Placement::Journal, .. } => journals(path, &placed.osds),
        Placed { cache_bytes, .. } if *cache_bytes > 0 => with_bcache(path, placed),
        Placed { osds, .. } if can_batch(osds) => batch(path, placed),
        _ => volumes(path, placed, can_attach),
    };
    if makes.is_empty() {
        return makes;
    }
    qualify(ssd, path).into_iter().chain(makes).collect()
}

/// One command makes all OSDs of the SSD: they are new and alike.
fn can_batch(osds: &[Share]) -> bool {
    osds.iter().all(|osd| osd.path.is_some() && osd.part_bytes == osds[0].part_bytes)
}

fn batch(path: &str, placed: &Placed) -> Vec<String> {
    let data: Vec<&str> = placed.osds.iter().filter_map(|osd| osd.path.as_deref()).collect();
    let part = if placed.wal_only { "wal" } else { "db" };
    let command = |report: &str| {
        format!(
            "ceph-volume lvm batch {report}--bluestore {} --{part}-devices {path} --block-{part}-size {}",
            data.join(" "),
            size(placed.osds[0].part_bytes)
        )
    };
    vec![command("--report "), command("")]
}

fn volumes(path: &str, placed: &Placed, can_attach: bool) -> Vec<String> {
    let part = if placed.wal_only { "wal" } else { "db" };
    let group = format!("ceph-{part}-{}", name(path));
    let mut commands = vec![format!("vgcreate {group} {path}")];
    for (index, osd) in placed.osds.iter().enumerate() {
        let number = index + 1;
        let volume = format!("{part}-{number}");
        commands.push(format!("lvcreate -L {} -n {volume} {group}", size(osd.part_bytes)));
        match &osd.path {
            Some(data) => commands.push(format!(
                "ceph-volume lvm create --bluestore --data {data} --block.{part} {group}/{volume}"
            )),
            None if osd.exists && can_attach => {
                commands.extend(attach(part, number, &format!("{group}/{volume}")));
            }
            None => {}
        }
    }
    commands
}

/// Gives an OSD that exists a volume; what it has of a database moves there.
fn attach(part: &str, number: usize, volume: &str) -> Vec<String> {
    let osd = format!("--osd-id ID_{number} --osd-fsid FSID_{number}");
    let mut commands = vec![
        format!("systemctl stop ceph-osd@ID_{number}"),
        format!("ceph-volume lvm new-{part} {osd} --target {volume}"),
    ];
    if part == "db" {
        commands.push(format!("ceph-volume lvm migrate {osd} --from data --target {volume}"));
    }
    commands.push(format!("systemctl start ceph-osd@ID_{number}"));
    commands
}

fn journals(path: &str, osds: &[Share]) -> Vec<String> {
    let mut commands = Vec::new();
    for (index, osd) in osds.iter().enumerate() {
        let number = index + 1;
        let part = partition(path, number);
        commands.push(format!(
            "sgdisk -n {number}:0:+{} -t {number}:{JOURNAL_TYPE} -c {number}:\"ceph journal\" {path}",
            size(osd.part_bytes)
        ));
        match &osd.path {
            Some(data) => {
                commands.push(format!("ceph-volume lvm create --filestore --data {data} --journal {part}"));
            }
            None if osd.exists => commands.extend([
                format!("systemctl stop ceph-osd@ID_{number}"),
                format!("ceph-osd -i ID_{number} --flush-journal"),
                format!(
                    "ln -sfn /dev/disk/by-partuuid/$(blkid -o value -s PARTUUID {part}) /var/lib/ceph/osd/ceph-ID_{number}/journal"
                ),
                format!("ceph-osd -i ID_{number} --mkjournal"),
                format!("systemctl start ceph-osd@ID_{number}"),
            ]),
            None => {}
        }
    }
    commands
}

/// Databases and a cache on one SSD. Only disks that are free can become bcache's: it writes its own label on them.
fn with_bcache(path: &str, placed: &Placed) -> Vec<String> {
    let numbered = placed.osds.iter().enumerate();
    let disks: Vec<(usize, &str)> = numbered
        .filter_map(|(index, osd)| osd.path.as_deref().and_then(kernel_name).map(|disk| (index + 1, disk)))
        .collect();
    if disks.is_empty() {
        return Vec::new();
    }
    let part = if placed.wal_only { "wal" } else { "db" };
    let mut commands: Vec<String> = Vec::new();
    for (index, osd) in placed.osds.iter().enumerate() {
        let number = index + 1;
        commands.push(format!(
            "sgdisk -n {number}:0:+{} -c {number}:{part}-{number} {path}",
            size(osd.part_bytes)
        ));
    }
    let last = placed.osds.len() + 1;
    commands.push(format!("sgdisk -n {last}:0:+{} -c {last}:cache {path}", size(placed.cache_bytes)));
    let backing: Vec<String> = disks.iter().map(|(_, disk)| format!("/dev/{disk}")).collect();
    commands.push(format!("make-bcache --writeback -C {} -B {}", partition(path, last), backing.join(" ")));
    for (number, disk) in disks {
        let group = format!("ceph-block-{disk}");
        commands.extend([
            format!("echo writeback > /sys/block/{disk}/bcache/cache_mode"),
            format!("echo 0 > /sys/block/{disk}/bcache/sequential_cutoff"),
            format!("vgcreate {group} /dev/$(basename $(readlink -f /sys/block/{disk}/bcache/dev))"),
            format!("lvcreate -l 100%FREE -n block {group}"),
            // The kernel says of bcache that it does not turn, so the class has to be told.
            format!(
                "ceph-volume lvm create --bluestore --data {group}/block --block.{part} {} --crush-device-class hdd",
                partition(path, number)
            ),
        ]);
    }
    commands.push("for f in /sys/fs/bcache/*/congested_*_threshold_us; do echo 0 > $f; done".into());
    commands
}

/// The last part of a path, as a name of LVM's.
fn name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).replace(':', "_")
}

/// The name by which the kernel knows a device; `None` for a link to it.
fn kernel_name(path: &str) -> Option<&str> {
    path.strip_prefix("/dev/").filter(|name| !name.contains('/'))
}

/// The node of a partition.
fn partition(path: &str, number: usize) -> String {
    match kernel_name(path) {
        None => format!("{path}-part{number}"),
        Some(name) if name.ends_with(|c: char| c.is_ascii_digit()) => format!("{path}p{number}"),
        Some(_) => format!("{path}{number}"),
    }
}

/// A size as sgdisk, LVM and ceph-volume read it: powers of two.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 30) { format!("{}G", bytes >> 30) } else { format!("{}M", bytes >> 20) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan_of;
    use super::*;

    /// The commands of a host with two disks and an NVMe.
    fn commands(cluster: &str, workload: &str, disks: &str) -> Vec<String> {
        let plan = plan_of(&format!(
            "[cluster]\n{cluster}\n[workload]\n{workload}\n[[host]]\nname = \"a\"\nrole = \"osd\"\n\
             [[host.drive]]\nkind = \"hdd\"\nsize = \"8TB\"\npaths = [\"/dev/sdb\", \"/dev/sdc\"]\nuse = \"{disks}\"\n\
             [[host.drive]]\nkind = \"nvme\"\nsize = \"1.92TB\"\npaths = [\"/dev/nvme0n1\"]\nuse = \"free\"\n\
             power-loss-protection = true\ngrade = \"good\"\n"
        ));
        plan.hosts[0].placed[0].commands.clone()
    }

    #[test]
    fn new_osds_that_are_alike_are_made_by_one_command_which_shows_first_what_it_would_do() {
        assert_eq!(
            commands("ceph = \"18.2.7\"", "", "free"),
            [
                "ceph-volume lvm batch --report --bluestore /dev/sdb /dev/sdc --db-devices /dev/nvme0n1 --block-db-size 150G",
                "ceph-volume lvm batch --bluestore /dev/sdb /dev/sdc --db-devices /dev/nvme0n1 --block-db-size 150G",
            ]
        );
    }

    #[test]
    fn osds_that_exist_get_a_database_without_their_drives_being_named() {
        let commands = commands("ceph = \"18.2.7\"", "", "osd");
        assert_eq!(commands[0], "vgcreate ceph-db-nvme0n1 /dev/nvme0n1");
        assert!(
            commands.contains(
                &"ceph-volume lvm new-db --osd-id ID_2 --osd-fsid FSID_2 --target ceph-db-nvme0n1/db-2"
                    .into()
            ),
            "{commands:?}"
        );
        assert!(commands.iter().all(|command| !command.contains("/dev/sd")), "{commands:?}");
    }

    #[test]
    fn bcache_is_told_to_let_nothing_past() {
        let workload = "block-size = \"256KiB\"\nread-percent = 30";
        let of = |disks| commands("ceph = \"16.2.15\"\nreplicas = 3", workload, disks);
        let commands = of("free");
        for part in [
            "make-bcache --writeback -C /dev/nvme0n1p3 -B /dev/sdb /dev/sdc",
            "echo writeback > /sys/block/sdb/bcache/cache_mode",
            "echo 0 > /sys/block/sdc/bcache/sequential_cutoff",
            "--data ceph-block-sdb/block --block.db /dev/nvme0n1p1 --crush-device-class hdd",
        ] {
            assert!(commands.iter().any(|command| command.contains(part)), "{part}: {commands:#?}");
        }
        assert_eq!(of("osd"), Vec::<String>::new(), "disks with OSDs are not made bcache's");
    }

    #[test]
    fn journals_are_partitions_of_the_default_size() {
        let commands = commands("ceph = \"jewel\"", "block-size = \"4KiB\"\nread-percent = 0", "free");
        assert!(commands[0].starts_with("sgdisk -n 1:0:+5G -t 1:"), "{commands:?}");
        assert_eq!(
            commands[1],
            "ceph-volume lvm create --filestore --data /dev/sdb --journal /dev/nvme0n1p1"
        );
    }

    #[test]
    fn partitions_are_named_as_the_kernel_and_udev_do() {
        for (path, name) in [
            ("/dev/sda", "/dev/sda2"),
            ("/dev/nvme0n1", "/dev/nvme0n1p2"),
            ("/dev/disk/by-id/wwn-0x5", "/dev/disk/by-id/wwn-0x5-part2"),
        ] {
            assert_eq!(partition(path, 2), name);
        }
        assert_eq!(name("/dev/disk/by-path/pci-0000:01"), "pci-0000_01");
    }
}
