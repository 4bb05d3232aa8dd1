//! How a block device is reached. The lock and the record of a device are on this host, so only the
//! operator can keep another host away from a disk in a network.

use super::same::in_sys;
use std::fs;
use std::path::Path;

/// Most layers of devices that are examined.
const LAYERS_MAX: u32 = 8;

/// How a device is reached, if other hosts may reach it in this way too: the device itself, or one
/// of the disks that it consists of.
pub(super) fn may_be_shared(device: u64) -> Option<&'static str> {
    of_disk(&in_sys(device), LAYERS_MAX)
}

/// As [`may_be_shared`], for a device by its directory in sysfs.
fn of_disk(sys: &Path, layers: u32) -> Option<&'static str> {
    let resolved = sys.canonicalize().ok()?;
    let disk = match resolved.join("partition").exists() {
        true => resolved.parent()?,
        false => &resolved,
    };
    if let Some(way) = of_path(disk).or_else(|| of_nvme(disk)) {
        return Some(way);
    }
    let below = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
    below.filter(|_| layers > 0).find_map(|one| of_disk(&one.path(), layers - 1))
}

/// How a disk is reached, by the names of its parents in sysfs: the kernel puts a disk below the
/// adapter or session through which it was found.
fn of_path(disk: &Path) -> Option<&'static str> {
    const PARENTS: [(&str, &str); 4] = [
        ("session", "iSCSI"),
        ("rport-", "Fibre Channel"),
        ("end_device-", "SAS"),
        ("vport-", "Fibre Channel"),
    ];
    const NAMES: [(&str, &str); 3] = [("nbd", "NBD"), ("rbd", "RBD"), ("drbd", "DRBD")];
    let kind_of = |name: &str, kinds: &[(&str, &'static str)]| {
        kinds.iter().find(|(kind, _)| is_numbered(name, kind)).map(|(_, way)| *way)
    };
    let name = disk.file_name()?.to_string_lossy();
    let parents = disk.parent()?.components();
    let mut parents = parents.map(|part| part.as_os_str().to_string_lossy());
    kind_of(&name, &NAMES).or_else(|| parents.find_map(|part| kind_of(&part, &PARENTS)))
}

/// Whether a kernel's name is `kind` followed by a number, as in `ata1`.
pub(super) fn is_numbered(name: &str, kind: &str) -> bool {
    name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// How an NVMe disk is reached, by the transport of its controllers, of which it may have several.
fn of_nvme(disk: &Path) -> Option<&'static str> {
    const WAYS: [(&str, &str); 3] =
        [("tcp", "NVMe over TCP"), ("rdma", "NVMe over RDMA"), ("fc", "NVMe over Fibre Channel")];
    let device = disk.join("device");
    let controllers = fs::read_dir(&device).into_iter().flatten().flatten().map(|one| one.path());
    let mut transports = controllers
        .chain([device])
        .filter_map(|one| fs::read_to_string(one.join("transport")).ok());
    transports
        .find_map(|told| WAYS.iter().find(|(way, _)| told.trim() == *way).map(|(_, way)| *way))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A tree like sysfs with these directories. An entry with `=` is a file; its content follows
    /// the `=`.
    fn tree(entries: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for entry in entries {
            match entry.split_once('=') {
                Some((path, content)) => {
                    let path = root.path().join(path);
                    fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
                    fs::write(path, content).expect("a file");
                }
                None => fs::create_dir_all(root.path().join(entry)).expect("a directory"),
            }
        }
        root
    }

    fn way(disk: &str, entries: &[&str]) -> Option<&'static str> {
        let root = tree(entries);
        fs::create_dir_all(root.path().join(disk)).expect("a directory");
        of_disk(&root.path().join(disk), LAYERS_MAX)
    }

    #[test]
    fn a_disk_in_a_network_is_told_by_where_the_kernel_has_found_it() {
        for (disk, told) in [
            ("platform/host3/session1/target3:0:0/3:0:0:1/block/sdb", Some("iSCSI")),
            ("pci0/host5/rport-5:0-3/target5:0:3/5:0:3:1/block/sdc", Some("Fibre Channel")),
            (
                "pci0/host5/vport-5:0-1/host6/rport-6:0-2/target6:0:0/6:0:0:0/block/sdd",
                Some("Fibre Channel"),
            ),
            ("pci0/host0/port-0:0/end_device-0:0/target0:0:0/0:0:0:0/block/sda", Some("SAS")),
            ("virtual/block/nbd3", Some("NBD")),
            ("rbd/0/block/rbd0", Some("RBD")),
            ("virtual/block/drbd1", Some("DRBD")),
            ("pci0/ata1/host0/target0:0:0/0:0:0:0/block/sda", None),
            ("pci0/virtio2/block/vdb", None),
            ("virtual/block/loop3", None),
            ("virtual/block/zram0", None),
        ] {
            assert_eq!(way(disk, &[]), told, "{disk}");
        }
        assert_eq!(
            way("session1/block/sdb/sdb1", &["session1/block/sdb/sdb1/partition=1"]),
            Some("iSCSI")
        );
    }

    #[test]
    fn an_nvme_disk_is_told_by_its_controllers() {
        for (transport, told) in [("pcie", None), ("loop", None), ("tcp", Some("NVMe over TCP"))] {
            let one = format!("ctl/nvme0/transport={transport}\n");
            let root = tree(&[&one, "ctl/nvme0/nvme0n1", "subsystem/nvme-subsys0/nvme0n1"]);
            let under = |path: &str| root.path().join(path);
            symlink(under("ctl/nvme0"), under("ctl/nvme0/nvme0n1/device")).expect("a link");
            assert_eq!(of_disk(&under("ctl/nvme0/nvme0n1"), LAYERS_MAX), told, "{transport}");
            // A disk that the kernel reaches over several paths is below none of its controllers.
            symlink(under("ctl/nvme0"), under("subsystem/nvme-subsys0/nvme0")).expect("a link");
            symlink(
                under("subsystem/nvme-subsys0"),
                under("subsystem/nvme-subsys0/nvme0n1/device"),
            )
            .expect("a link");
            assert_eq!(
                of_disk(&under("subsystem/nvme-subsys0/nvme0n1"), LAYERS_MAX),
                told,
                "{transport}"
            );
        }
    }

    #[test]
    fn a_device_is_what_the_disks_below_it_are() {
        let root = tree(&[
            "virtual/block/dm-1/slaves",
            "virtual/block/dm-0/slaves",
            "host3/session1/block/sdb",
            "ata1/block/sda",
        ]);
        let under = |path: &str| root.path().join(path);
        symlink(under("virtual/block/dm-0"), under("virtual/block/dm-1/slaves/dm-0"))
            .expect("a link");
        symlink(under("ata1/block/sda"), under("virtual/block/dm-0/slaves/sda")).expect("a link");
        assert_eq!(of_disk(&under("virtual/block/dm-1"), LAYERS_MAX), None);
        symlink(under("host3/session1/block/sdb"), under("virtual/block/dm-0/slaves/sdb"))
            .expect("a link");
        assert_eq!(of_disk(&under("virtual/block/dm-1"), LAYERS_MAX), Some("iSCSI"));
    }
}
