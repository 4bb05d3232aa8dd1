//! The commands that would carry out a plan. Nothing here runs a command, and no command names a
//! drive that is in use.

use super::inventory::{Drive, Inventory, State};
use super::layout::{Placed, Share};
use super::node::{Node, node};
use super::verdict::{HostCopies, Placement};

/// Type of a partition with a journal, by which Ceph's own tools recognise it.
const JOURNAL_TYPE: &str = "45b0969e-9b03-4f30-b4c6-b4b80ceff106";

/// The file with the settings that bcache loses at every boot.
const BCACHE_RULES: &str = "/etc/udev/rules.d/99-bcache-no-bypass.rules";

/// The node of a drive, if commands may name it: the drive is free and its path is known.
fn free(drive: &Drive) -> Option<&str> {
    drive.path.as_deref().filter(|_| drive.state == State::Free)
}

/// The first command for an SSD without a grade.
fn qualify(drive: &Drive, path: &str) -> Option<String> {
    let wanted = drive.product.grade().is_none();
    wanted.then(|| format!("tidepool lab qualify {path} --long 10m --yes-destroy"))
}

/// Commands for a cache for a hypervisor's volumes.
pub(super) fn host_cache(drive: &Drive, copies: HostCopies) -> Vec<String> {
    let Some(path) = free(drive) else { return Vec::new() };
    let how = match copies {
        HostCopies::One(loss) => format!(" --accept-loss {loss}"),
        HostCopies::Two => {
            " --peer tls://HOST:10810 --peer-listen tls://0.0.0.0:10810 --peer-tls DIRECTORY".into()
        }
        HostCopies::None => String::new(),
    };
    let mut commands = Vec::from_iter(qualify(drive, path));
    commands.push(format!("tidepool cache format {path}"));
    commands.push(format!("tidepool serve --cache {path} --volume NAME=rbd:POOL/IMAGE{how}"));
    commands
}

/// Commands for the parts of an SSD for the OSDs of its host.
pub(super) fn under_osds(inventory: &Inventory, ssd: &Drive, placed: &Placed) -> Vec<String> {
    let Some(path) = free(ssd) else { return Vec::new() };
    let can_attach = inventory.cluster.ceph.is_none_or(|release| release.major >= 16);
    let makes = match placed {
        Placed { cache_bytes, .. } if *cache_bytes > 0 => with_bcache(path, placed),
        Placed { placement: Placement::DbWal, .. } if can_batch(path, &placed.osds) => {
            batch(path, placed)
        }
        _ => parts(path, placed, can_attach),
    };
    if makes.is_empty() {
        return makes;
    }
    qualify(ssd, path).into_iter().chain(makes).collect()
}

/// One `batch` command makes all OSDs of the SSD: the OSDs are new and alike, and on whole drives,
/// because `batch` takes no others.
fn can_batch(ssd: &str, osds: &[Share]) -> bool {
    let whole = |path: &str| node(path) == Node::Drive;
    let new = |osd: &Share| {
        osd.path.as_deref().is_some_and(whole) && osd.part_bytes == osds[0].part_bytes
    };
    whole(ssd) && osds.iter().all(new)
}

fn batch(path: &str, placed: &Placed) -> Vec<String> {
    let data: Vec<&str> = placed.osds.iter().filter_map(|osd| osd.path.as_deref()).collect();
    let part = kind(placed);
    let command = |report: &str| {
        format!(
            "ceph-volume lvm batch {report}--bluestore {} --{part}-devices {path} --block-{part}-size {}",
            data.join(" "),
            size(placed.osds[0].part_bytes)
        )
    };
    vec![command("--report "), command("")]
}

/// Kind of the parts of an SSD, as `ceph-volume` calls it.
fn kind(placed: &Placed) -> &'static str {
    match placed {
        Placed { placement: Placement::Journal, .. } => "journal",
        Placed { wal_only: true, .. } => "wal",
        _ => "db",
    }
}

/// How a device is divided into parts that commands make one by one.
struct Divided<'a> {
    path: &'a str,
    node: Node,
    /// The volume group, where LVM divides the device.
    group: String,
}

/// A part of a device: the command that makes it, if one is needed, and its node.
struct Part {
    make: Option<String>,
    node: String,
}

impl<'a> Divided<'a> {
    /// Divides a whole drive by its partition table if `by_partitions` is set, otherwise by LVM. A
    /// device that is not a whole drive keeps its table.
    fn new(path: &'a str, what: &str, by_partitions: bool) -> Divided<'a> {
        let node = match node(path) {
            Node::Drive if !by_partitions => Node::Partition,
            other => other,
        };
        Divided { path, node, group: format!("ceph-{what}-{}", name(path)) }
    }

    /// The commands before those for the parts.
    fn begin(&self) -> Vec<String> {
        match self.node {
            Node::Partition => vec![format!("vgcreate {} {}", self.group, self.path)],
            Node::Drive | Node::Volume => Vec::new(),
        }
    }

    /// The part with this number. `kind` is the type of the part in the partition table, if the
    /// device gets a partition table.
    fn part(&self, number: usize, name: &str, bytes: u64, kind: Option<&str>) -> Part {
        let Divided { path, group, .. } = self;
        match self.node {
            Node::Volume => Part { make: None, node: path.to_string() },
            Node::Partition => Part {
                make: Some(format!("lvcreate -L {} -n {name} {group}", size(bytes))),
                node: format!("{group}/{name}"),
            },
            Node::Drive => {
                let kind = kind.map(|kind| format!(" -t {number}:{kind}")).unwrap_or_default();
                let make = format!(
                    "sgdisk -n {number}:0:+{}{kind} -c {number}:{name} {path}",
                    size(bytes)
                );
                Part { make: Some(make), node: partition(path, number) }
            }
        }
    }
}

/// Commands for one part of the SSD for each OSD.
fn parts(path: &str, placed: &Placed, can_attach: bool) -> Vec<String> {
    let what = kind(placed);
    let journals = placed.placement == Placement::Journal;
    let divided = Divided::new(path, what, journals);
    let mut commands = divided.begin();
    for (number, osd) in (1..).zip(&placed.osds) {
        let part = divided.part(
            number,
            &format!("{what}-{number}"),
            osd.part_bytes,
            journals.then_some(JOURNAL_TYPE),
        );
        let target = part.node;
        commands.extend(part.make);
        match &osd.path {
            Some(data) if journals => {
                commands.push(format!(
                    "ceph-volume lvm create --filestore --data {data} --journal {target}"
                ));
            }
            Some(data) => commands.push(format!(
                "ceph-volume lvm create --bluestore --data {data} --block.{what} {target}"
            )),
            None if osd.exists && journals => commands.extend(move_journal(number, &target)),
            None if osd.exists && can_attach => commands.extend(attach(what, number, &target)),
            None => {}
        }
    }
    commands
}

/// Commands that give an existing OSD a volume. If the volume is for a database, the database data
/// of the OSD moves to it.
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

/// Commands that move the journal of an existing OSD to a partition or a logical volume.
fn move_journal(number: usize, target: &str) -> Vec<String> {
    // A logical volume keeps its name; the name of a partition can change at a boot.
    let link = match target.strip_prefix("/dev/") {
        None => format!("/dev/{target}"),
        Some(_) if node(target) == Node::Volume => target.to_string(),
        Some(_) => format!("/dev/disk/by-partuuid/$(blkid -o value -s PARTUUID {target})"),
    };
    vec![
        format!("systemctl stop ceph-osd@ID_{number}"),
        format!("ceph-osd -i ID_{number} --flush-journal"),
        format!("ln -sfn {link} /var/lib/ceph/osd/ceph-ID_{number}/journal"),
        format!("ceph-osd -i ID_{number} --mkjournal"),
        format!("systemctl start ceph-osd@ID_{number}"),
    ]
}

/// Commands for databases and a cache on one SSD. Only free disks can become bcache devices,
/// because bcache writes its own label to them.
fn with_bcache(path: &str, placed: &Placed) -> Vec<String> {
    let numbered = (1..).zip(&placed.osds);
    let disks: Vec<(usize, &str)> = numbered
        .filter_map(|(number, osd)| {
            osd.path.as_deref().and_then(kernel_name).map(|disk| (number, disk))
        })
        .collect();
    if disks.is_empty() {
        return Vec::new();
    }
    let what = kind(placed);
    let divided = Divided::new(path, what, true);
    let mut commands = divided.begin();
    let mut parts = Vec::new();
    for (number, osd) in (1..).zip(&placed.osds) {
        let part = divided.part(number, &format!("{what}-{number}"), osd.part_bytes, None);
        commands.extend(part.make);
        parts.push(part.node);
    }
    let cache = divided.part(placed.osds.len() + 1, "cache", placed.cache_bytes, None);
    commands.extend(cache.make);
    let backing: Vec<String> = disks.iter().map(|(_, disk)| format!("/dev/{disk}")).collect();
    let cache =
        if cache.node.starts_with("/dev/") { cache.node } else { format!("/dev/{}", cache.node) };
    commands.extend(bcache_settings());
    // bcache keeps the mode in the label of each disk. The udev rule sets what the label does not
    // keep.
    commands.push(format!("make-bcache --writeback -C {cache} -B {}", backing.join(" ")));
    commands.push("udevadm settle".into());
    commands.push("udevadm trigger --settle --action=change --sysname-match='bcache[0-9]*'".into());
    for (number, disk) in disks {
        let group = format!("ceph-block-{disk}");
        commands.extend([
            format!("vgcreate {group} /dev/$(basename $(readlink -f /sys/class/block/{disk}/bcache/dev))"),
            format!("lvcreate -l 100%FREE -n block {group}"),
            // The kernel reports that bcache does not rotate, so the device class has to be given.
            format!(
                "ceph-volume lvm create --bluestore --data {group}/block --block.{what} {} --crush-device-class hdd",
                parts[number - 1]
            ),
        ]);
    }
    commands.push(
        "grep . /sys/block/bcache*/bcache/sequential_cutoff /sys/fs/bcache/*/congested_*_threshold_us".into(),
    );
    commands
}

/// Commands for the settings that bcache loses at every boot, as a udev rule.
fn bcache_settings() -> [String; 2] {
    let zero = |attribute: &str| format!("ATTR{{bcache/{attribute}}}=\"0\"");
    let rule = [
        "ACTION==\"add|change\"".to_string(),
        "SUBSYSTEM==\"block\"".to_string(),
        "KERNEL==\"bcache*\"".to_string(),
        zero("sequential_cutoff"),
        zero("cache/congested_read_threshold_us"),
        zero("cache/congested_write_threshold_us"),
    ];
    [
        format!("printf '%s\\n' '{}' > {BCACHE_RULES}", rule.join(", ")),
        "udevadm control --reload".into(),
    ]
}

/// The last part of a path, as an LVM name.
fn name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).replace(':', "_")
}

/// The kernel's name of a device; `None` for a link.
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

/// A size for sgdisk, LVM and ceph-volume: in GiB if it is a whole number of GiB, otherwise in MiB.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 30) {
        format!("{}G", bytes >> 30)
    } else {
        format!("{}M", bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan_of;
    use super::*;

    /// The commands of a host with two disks and an NVMe.
    fn commands(cluster: &str, workload: &str, disks: &str) -> Vec<String> {
        commands_on("/dev/nvme0n1", cluster, workload, disks)
    }

    /// The commands of a host with two disks, and with an SSD at `node`.
    fn commands_on(node: &str, cluster: &str, workload: &str, disks: &str) -> Vec<String> {
        let plan = plan_of(&format!(
            "[cluster]\n{cluster}\n[workload]\n{workload}\n[[host]]\nname = \"a\"\nrole = \"osd\"\n\
             [[host.drive]]\nkind = \"hdd\"\nsize = \"8TB\"\npaths = [\"/dev/sdb\", \"/dev/sdc\"]\nuse = \"{disks}\"\n\
             [[host.drive]]\nkind = \"nvme\"\nsize = \"1.92TB\"\npaths = [\"{node}\"]\nuse = \"free\"\n\
             power-loss-protection = true\ngrade = \"good\"\n"
        ));
        plan.hosts[0].placed[0].commands.clone()
    }

    const JOURNALS: (&str, &str) = ("ceph = \"jewel\"", "block-size = \"4KiB\"\nread-percent = 0");
    const BCACHE: (&str, &str) =
        ("ceph = \"16.2.15\"\nreplicas = 3", "block-size = \"256KiB\"\nread-percent = 70");
    const DATABASES: (&str, &str) = ("ceph = \"18.2.7\"", "");

    #[test]
    fn what_is_a_partition_or_a_logical_volume_gets_no_partition_table() {
        for node in ["/dev/sda5", "/dev/nvme0n1p3", "/dev/vg/lv", "/dev/disk/by-id/wwn-0x5-part2"] {
            for (cluster, workload) in [JOURNALS, BCACHE, DATABASES] {
                for disks in ["free", "osd"] {
                    let commands = commands_on(node, cluster, workload, disks);
                    assert!(
                        commands.iter().all(|command| !command.starts_with("sgdisk")),
                        "{commands:#?}"
                    );
                    let batch = |command: &String| command.contains(" batch ");
                    assert!(!commands.iter().any(batch), "batch takes whole drives: {commands:#?}");
                }
            }
        }
    }

    #[test]
    fn a_partition_is_divided_by_lvm_and_a_logical_volume_is_used_whole() {
        let of = |node, (cluster, workload)| commands_on(node, cluster, workload, "free");
        assert_eq!(
            of("/dev/sda5", JOURNALS)[..3],
            [
                "vgcreate ceph-journal-sda5 /dev/sda5",
                "lvcreate -L 5G -n journal-1 ceph-journal-sda5",
                "ceph-volume lvm create --filestore --data /dev/sdb --journal ceph-journal-sda5/journal-1",
            ]
        );
        assert!(of("/dev/sda5", BCACHE).contains(
            &"make-bcache --writeback -C /dev/ceph-db-sda5/cache -B /dev/sdb /dev/sdc".to_string()
        ));
        assert_eq!(
            of("/dev/vg/lv", DATABASES),
            ["ceph-volume lvm create --bluestore --data /dev/sdb --block.db /dev/vg/lv"]
        );
        let plan = plan_of(
            "[[host]]\nname = \"a\"\nrole = \"osd\"\n[[host.drive]]\nkind = \"hdd\"\nsize = \"8TB\"\ncount = 2\nuse = \"osd\"\n\
             [[host.drive]]\nkind = \"nvme\"\nsize = \"1.92TB\"\npaths = [\"/dev/vg/lv\"]\nuse = \"free\"\n\
             power-loss-protection = true\ngrade = \"good\"\n",
        );
        let placed = &plan.hosts[0].placed[0];
        assert!(placed.advice.iter().any(|advice| advice.rules == ["not-divided"]), "{placed:?}");
        assert_eq!(placed.osds.len(), 1);
    }

    #[test]
    fn new_osds_that_are_alike_are_made_by_one_command_which_shows_first_what_it_would_do() {
        assert_eq!(
            commands(DATABASES.0, DATABASES.1, "free"),
            [
                "ceph-volume lvm batch --report --bluestore /dev/sdb /dev/sdc --db-devices /dev/nvme0n1 --block-db-size 150G",
                "ceph-volume lvm batch --bluestore /dev/sdb /dev/sdc --db-devices /dev/nvme0n1 --block-db-size 150G",
            ]
        );
    }

    #[test]
    fn osds_that_exist_get_a_database_without_their_drives_being_named() {
        let commands = commands(DATABASES.0, DATABASES.1, "osd");
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
        let of = |disks| commands(BCACHE.0, BCACHE.1, disks);
        let commands = of("free");
        for part in [
            "make-bcache --writeback -C /dev/nvme0n1p3 -B /dev/sdb /dev/sdc",
            "--data ceph-block-sdb/block --block.db /dev/nvme0n1p1 --crush-device-class hdd",
        ] {
            assert!(commands.iter().any(|command| command.contains(part)), "{part}: {commands:#?}");
        }
        assert_eq!(of("osd"), Vec::<String>::new(), "disks with OSDs are not made bcache's");
        // Settings that are written by hand are lost at the next boot.
        assert!(commands.iter().all(|command| !command.starts_with("echo")), "{commands:#?}");
        let rule =
            commands.iter().position(|command| command.contains("> /etc/udev/rules.d/99-bcache"));
        let made = commands.iter().position(|command| command.starts_with("make-bcache"));
        assert!(
            rule.is_some() && rule < made,
            "the rule is there when the devices come: {commands:#?}"
        );
        let rule = &commands[rule.expect("just asserted")];
        for attribute in [
            "sequential_cutoff",
            "cache/congested_read_threshold_us",
            "cache/congested_write_threshold_us",
        ] {
            assert!(rule.contains(&format!("ATTR{{bcache/{attribute}}}=\"0\"")), "{rule}");
        }
    }

    #[test]
    fn journals_are_partitions_of_the_default_size() {
        let commands = commands(JOURNALS.0, JOURNALS.1, "free");
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
