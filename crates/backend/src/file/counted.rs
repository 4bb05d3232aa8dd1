//! The kernel's counters of a block device: whether anything has written to the device since its
//! cache released it.
//!
//! The counters tell something only where every write goes through this kernel and is counted: on a
//! whole disk of this machine alone. They tell nothing on a partition, on a device that consists of
//! others or is used by others, on a disk in a network or in an enclosure that two hosts share, or
//! on a hypervisor's virtual disk. For an RBD image that the kernel has mapped, the image's header
//! tells what the counters do not. A command that bypasses the kernel's queue (`nvme format`,
//! SG_IO) is not counted. The counters of memory disks are not reliable.

use super::mapped;
use super::same::{self, in_sys};
use super::transport::is_numbered;
use crate::record::{Counted, boot_id};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel's trees are.
struct Kernel<'a> {
    /// Directory of the disk in sysfs, without links.
    disk: PathBuf,
    /// `/sys/module`.
    modules: &'a Path,
    /// The machine is virtual.
    virtual_machine: bool,
}

/// The counters of a device now; `None` where they tell nothing.
pub(super) fn now(device: u64) -> Option<Counted> {
    let disk = in_sys(device).canonicalize().ok()?;
    let processors = fs::read_to_string("/proc/cpuinfo").ok()?;
    // Only x86-64 processors report a hypervisor.
    let virtual_machine = !cfg!(target_arch = "x86_64")
        || processors.split_whitespace().any(|flag| flag == "hypervisor");
    let kernel = Kernel { disk, modules: Path::new("/sys/module"), virtual_machine };
    // Read before the counters: whatever this kernel writes from here on is in the counters, and
    // another client that gets the image from here on changes the version.
    let header = match mapped::header_version(&kernel.disk) {
        Some(Ok(version)) => Some(version),
        Some(Err(why)) => {
            tracing::info!(
                "{}: nobody knows whether other clients write: {why}",
                kernel.disk.display()
            );
            return None;
        }
        None => None,
    };
    kernel.counted(boot_id(), header)
}

impl Kernel<'_> {
    fn read(&self, file: &str) -> Option<String> {
        same::read(&self.disk.join(file))
    }

    fn counted(&self, boot_id: String, header: Option<u64>) -> Option<Counted> {
        let is_alone = |directory: &str| {
            fs::read_dir(self.disk.join(directory))
                .is_ok_and(|mut entries| entries.next().is_none())
        };
        let is_whole =
            !self.disk.join("partition").exists() && is_alone("slaves") && is_alone("holders");
        let is_told = header.is_some() || self.is_of_this_machine();
        if !is_whole || !is_told || self.read("queue/iostats")? != "1" {
            return None;
        }
        // Documentation/block/stat.rst of the kernel.
        let numbers: Option<Vec<u64>> =
            self.read("stat")?.split_whitespace().map(|number| number.parse().ok()).collect();
        let numbers = numbers?;
        let at = |index: usize| numbers.get(index).copied();
        // A request in flight is counted when it is done.
        if at(8)? != 0 || boot_id.is_empty() {
            return None;
        }
        let (written, discarded) = (at(6)?, at(13)?);
        Some(Counted { boot_id, sequence: self.read("diskseq")?, written, discarded, header })
    }

    /// Whether no other machine can reach the disk: a SATA or NVMe disk with one path to it, in a
    /// machine that is not virtual.
    fn is_of_this_machine(&self) -> bool {
        let names: Vec<String> =
            self.disk.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let Some((_, parents)) = names.split_last() else { return false };
        let on = |kind: &str| parents.iter().any(|parent| is_numbered(parent, kind));
        // With this parameter on, a disk that has several controllers is not found below one of
        // them.
        let multipath = same::read(&self.modules.join("nvme_core/parameters/multipath"));
        let one_way = multipath.as_deref() == Some("Y");
        let of_one_controller =
            on("nvme") && one_way && self.read("device/transport").as_deref() == Some("pcie");
        !self.virtual_machine && (on("ata") || of_one_controller)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "  10 0 80 5   7 1 56 9   0 12 14   3 0 24 1   2 1\n";

    /// The counters of a disk at a place in sysfs; `files` are added to the usual files, or replace
    /// them.
    fn counted(place: &str, files: &[(&str, &str)], virtual_machine: bool) -> Option<Counted> {
        counted_with(place, files, virtual_machine, None)
    }

    /// As [`counted`], for a disk whose image has a known header version.
    fn counted_with(
        place: &str,
        files: &[(&str, &str)],
        virtual_machine: bool,
        header: Option<u64>,
    ) -> Option<Counted> {
        let root = tempfile::tempdir().expect("a directory");
        let disk = root.path().join("sys/devices").join(place);
        let usual = [
            ("stat", STAT),
            ("diskseq", "5\n"),
            ("queue/iostats", "1\n"),
            ("device/transport", "pcie\n"),
            ("multipath", "Y\n"),
        ];
        let modules = root.path().join("module");
        for (file, content) in usual.iter().chain(files) {
            let path = match *file {
                "multipath" => modules.join("nvme_core/parameters/multipath"),
                file => disk.join(file),
            };
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            fs::write(path, content).expect("a file");
        }
        for directory in ["slaves", "holders"] {
            fs::create_dir_all(disk.join(directory)).expect("a directory");
        }
        Kernel { disk, modules: &modules, virtual_machine }.counted("boot".into(), header)
    }

    #[test]
    fn writes_and_discards_of_a_disk_of_this_machine_are_counted() {
        let found = Counted {
            boot_id: "boot".into(),
            sequence: "5".into(),
            written: 56,
            discarded: 24,
            header: None,
        };
        for place in [
            "pci0/ata1/host0/target0:0:0/0:0:0:0/block/sda",
            "pci0/0000:01:00.0/nvme/nvme0/nvme0n1",
        ] {
            assert_eq!(counted(place, &[], false).as_ref(), Some(&found), "{place}");
        }
        let again = Counted { sequence: "6".into(), ..found.clone() };
        assert!(
            found.goes_on_from(&found) && !again.goes_on_from(&found),
            "a disk that was found anew"
        );
    }

    #[test]
    fn a_mapped_image_is_counted_where_its_header_is_known() {
        const RBD: &str = "rbd/0/block/rbd0";
        let found =
            counted_with(RBD, &[], true, Some(7)).expect("counted, in a virtual machine, too");
        let later = Counted { header: Some(8), ..found.clone() };
        assert!(later != found && later.goes_on_from(&found) && !later.has_header_of(&found));
        assert_eq!(counted_with(RBD, &[("holders/dm-0", "")], true, Some(7)), None);
        assert_eq!(counted_with(RBD, &[("queue/iostats", "0\n")], true, Some(7)), None);
    }

    #[test]
    fn where_others_may_write_or_not_all_is_counted_the_counters_tell_nothing() {
        const ATA: &str = "pci0/ata1/host0/target0:0:0/0:0:0:0/block/sda";
        const NVME: &str = "pci0/0000:01:00.0/nvme/nvme0/nvme0n1";
        for (place, files, virtual_machine) in [
            (ATA, &[][..], true),
            (NVME, &[], true),
            (ATA, &[("partition", "1\n")], false),
            (ATA, &[("holders/dm-0", "")], false),
            (ATA, &[("slaves/sdb", "")], false),
            (ATA, &[("queue/iostats", "0\n")], false),
            (ATA, &[("stat", "1 2 3\n")], false),
            (ATA, &[("stat", "10 0 80 5 7 1 56 9 1 12 14 3 0 24 1 2 1\n")], false),
            (NVME, &[("multipath", "N\n")], false),
            (NVME, &[("device/transport", "tcp\n")], false),
            ("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", &[], false),
            ("virtual/block/loop0", &[], false),
            // Discards of these disks are not counted, and a reset starts the counters anew under
            // the same disk number.
            ("virtual/block/zram0", &[], false),
            ("virtual/block/ram0", &[], false),
            ("virtual/block/nbd0", &[], false),
            ("virtual/block/dm-0", &[], false),
            ("rbd/0/block/rbd0", &[], false),
            ("pci0/host3/session1/target3:0:0/3:0:0:1/block/sdb", &[], false),
            ("pci0/host0/port-0:0/end_device-0:0/target0:0:0/0:0:0:0/block/sda", &[], false),
            ("pci0/host0/target0:2:0/0:2:0:0/block/sda", &[], false),
            ("pci0/virtio2/block/vdb", &[], false),
        ] {
            assert_eq!(counted(place, files, virtual_machine), None, "{place} {files:?}");
        }
    }
}
