//! The machine's own block devices, as `lsblk` reports them.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde::{Deserialize, Serialize};

/// The columns that `lsblk` is asked for.
const COLUMNS: &str = "PATH,TYPE,SIZE,ROTA,RO,RM,TRAN,MODEL,FSTYPE,PTTYPE,MOUNTPOINTS,ZONED";
/// The first release with all of these columns.
const LSBLK_MIN: &str = "util-linux 2.37";
/// Devices that the kernel calls disks and that are no drives of the machine: the begin of the
/// name, and what the device is.
const NO_DRIVES: [(&str, &str); 10] = [
    ("rbd", "a mapped RBD image"),
    ("nbd", "a network block device"),
    ("drbd", "a DRBD resource"),
    ("ublkb", "a device of a program (ublk)"),
    ("loop", "a file (loop device)"),
    ("zd", "a ZFS volume"),
    ("zram", "memory (zram)"),
    ("ram", "memory (RAM disk)"),
    ("fd", "a floppy disk"),
    ("mmcblk", "a memory card"),
];

/// A block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Real {
    /// The device node, such as `/dev/sda`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether the media is rotational; true if the kernel does not report it.
    pub rotational: bool,
    /// How the device is attached: `sata`, `nvme`, `virtio`.
    pub transport: Option<String>,
    /// The model's name.
    pub model: Option<String>,
    /// What the device is if it is no drive of this machine: a mapped image, memory, a USB stick.
    pub no_drive: Option<String>,
    /// Why nothing can be put on the device, whatever it holds: it is read-only or zoned.
    pub unfit: Option<String>,
    /// What speaks against writing to the device; `None` when nothing does.
    pub in_use: Option<String>,
}

impl Real {
    /// Why nothing may be written to the device; `None` when it is free.
    pub fn refusal(&self) -> Option<&str> {
        self.unfit.as_deref().or(self.in_use.as_deref())
    }
}

/// Why the devices could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum RealError {
    /// `lsblk` could not be run.
    #[error("cannot run lsblk: {0}; on Debian: apt-get install util-linux")]
    NotRun(std::io::Error),
    /// `lsblk` lacks an option or a column.
    #[error("lsblk is too old ({0}): install {LSBLK_MIN} or later")]
    TooOld(String),
    /// `lsblk` failed, or its output was not understood.
    #[error("lsblk failed: {0}")]
    Failed(String),
}

/// All devices with a medium: disks and loop devices without their partitions, and multipath maps
/// in place of their paths.
///
/// # Errors
/// When `lsblk` cannot be run, is too old, or fails.
pub fn all() -> Result<Vec<Real>, RealError> {
    let mut command = Command::new("lsblk");
    command.args(["--json", "--bytes", "--output", COLUMNS]).stdin(Stdio::null());
    let output = command.output().map_err(RealError::NotRun)?;
    if !output.status.success() {
        return Err(failure(&String::from_utf8_lossy(&output.stderr)));
    }
    let mut devices = parse(&output.stdout)?;
    for device in devices.iter_mut().filter(|device| device.in_use.is_none()) {
        device.in_use = taken(&device.path);
    }
    Ok(devices)
}

/// The error that a message of `lsblk` stands for.
fn failure(stderr: &str) -> RealError {
    let line =
        stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it says nothing");
    let line = line.strip_prefix("lsblk: ").unwrap_or(line).to_string();
    let old = ["unknown column", "unrecognized option", "invalid option"];
    if old.iter().any(|part| line.contains(part)) {
        RealError::TooOld(line)
    } else {
        RealError::Failed(line)
    }
}

/// Parses the output of `lsblk --json --bytes` with the columns that [`all`] asks for. A device of
/// unknown size, or without a medium, is left out.
///
/// # Errors
/// When the output is something else, or lacks a column.
pub fn parse(json: &[u8]) -> Result<Vec<Real>, RealError> {
    let listing: Listing = serde_json::from_slice(json).map_err(|error| {
        let why = error.to_string();
        if why.contains("missing field") { RealError::TooOld(why) } else { RealError::Failed(why) }
    })?;
    let mut devices: Vec<Real> = Vec::new();
    for node in
        listing.blockdevices.iter().filter(|node| ["disk", "loop"].contains(&node.kind.as_str()))
    {
        let map = node.children.iter().find(|child| child.kind == MULTIPATH);
        let found = map.map_or_else(|| node.device(node), |map| map.device(node));
        // Each path of a multipath device has the map as a child.
        devices
            .extend(found.filter(|found| devices.iter().all(|device| device.path != found.path)));
    }
    Ok(devices)
}

/// Whether the write cache of a SATA or SAS disk is on; `None` when that is not known, or when
/// `hdparm` is not installed.
pub fn write_cache(path: &Path) -> Option<bool> {
    let output = hdparm("-W", path).ok()?;
    match String::from_utf8_lossy(&output.stdout)
        .split_once("write-caching =")?
        .1
        .trim()
        .chars()
        .next()?
    {
        '1' => Some(true),
        '0' => Some(false),
        _ => None,
    }
}

/// Turns the write cache of a SATA or SAS disk on or off. If this process ends while the cache is
/// off, the cache stays off, and an operator has to turn it on with `hdparm -W1`.
///
/// # Errors
/// When the disk does not accept the setting.
pub fn set_write_cache(path: &Path, on: bool) -> io::Result<()> {
    hdparm(if on { "-W1" } else { "-W0" }, path)?;
    if write_cache(path) == Some(on) { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn hdparm(option: &str, path: &Path) -> io::Result<Output> {
    let output = Command::new("hdparm").arg(option).arg(path).stdin(Stdio::null()).output()?;
    if output.status.success() { Ok(output) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// The message that a program has the device for itself; `None` if none has. Only a failed
/// exclusive open shows that.
fn taken(path: &str) -> Option<String> {
    let open = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    let busy = open.is_err_and(|e| e.kind() == std::io::ErrorKind::ResourceBusy);
    busy.then(|| "in use by a program".to_string())
}

/// lsblk's type of a multipath map, a device that is reached by several paths.
const MULTIPATH: &str = "mpath";

#[derive(Debug, Deserialize)]
struct Listing {
    blockdevices: Vec<Node>,
}

/// A node of the tree that `lsblk` prints. A value that the kernel does not report is null; a
/// missing column is an error.
#[derive(Debug, Deserialize)]
struct Node {
    path: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "Option::deserialize")]
    size: Option<u64>,
    #[serde(deserialize_with = "Option::deserialize")]
    rota: Option<bool>,
    #[serde(deserialize_with = "Option::deserialize")]
    ro: Option<bool>,
    #[serde(deserialize_with = "Option::deserialize")]
    rm: Option<bool>,
    tran: Option<String>,
    model: Option<String>,
    fstype: Option<String>,
    pttype: Option<String>,
    mountpoints: Vec<Option<String>>,
    #[serde(deserialize_with = "Option::deserialize")]
    zoned: Option<String>,
    #[serde(default)]
    children: Vec<Node>,
}

impl Node {
    /// The node as a device; `None` without a size. `hardware` is the node that has how the device
    /// is attached.
    fn device(&self, hardware: &Node) -> Option<Real> {
        let bytes = self.size.filter(|&bytes| bytes > 0)?;
        let model = hardware.model.as_deref().map(str::trim).filter(|model| !model.is_empty());
        Some(Real {
            path: self.path.clone(),
            bytes,
            rotational: hardware.rota.unwrap_or(true),
            transport: hardware.tran.clone(),
            model: model.map(str::to_string),
            no_drive: hardware.no_drive().map(str::to_string),
            unfit: self.unfit(hardware),
            in_use: self.in_use(),
        })
    }

    fn no_drive(&self) -> Option<&'static str> {
        let name = self.path.strip_prefix("/dev/").unwrap_or(&self.path);
        let numbered = |prefix: &str| {
            name.strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let named = NO_DRIVES.iter().find(|(prefix, _)| numbered(prefix)).map(|(_, what)| *what);
        named.or(match self.tran.as_deref() {
            Some("usb") => Some("a USB drive"),
            Some("iscsi") => Some("a disk of another machine (iSCSI)"),
            _ => (self.rm == Some(true)).then_some("a removable drive"),
        })
    }

    fn unfit(&self, hardware: &Node) -> Option<String> {
        if self.ro == Some(true) || hardware.ro == Some(true) {
            return Some("read-only".into());
        }
        let zoned = hardware.zoned.as_deref().filter(|zoned| *zoned != "none")?;
        Some(format!("zoned ({zoned}): it takes writes in order only"))
    }

    /// The strongest reason not to write to the device: a mount of the device, or of something on
    /// it, comes before what it holds.
    fn in_use(&self) -> Option<String> {
        if let Some(path) = self.mounted() {
            return Some(format!("mounted at {path}"));
        }
        if let Some(child) = self.children.first() {
            return Some(format!("holds {} {}", child.kind, child.path));
        }
        let content = self.fstype.as_ref().or(self.pttype.as_ref());
        content.map(|content| format!("holds {content}"))
    }

    fn mounted(&self) -> Option<&String> {
        self.mountpoints
            .iter()
            .flatten()
            .next()
            .or_else(|| self.children.iter().find_map(Node::mounted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices of many kinds, in the form in which `lsblk` of util-linux 2.38 prints them.
    const LISTING: &str = include_str!("lsblk.json");

    fn found() -> Vec<Real> {
        parse(LISTING.as_bytes()).expect("a listing")
    }

    fn one(path: &str) -> Real {
        found().into_iter().find(|device| device.path == path).unwrap_or_else(|| panic!("{path}"))
    }

    #[test]
    fn what_is_mounted_or_holds_data_is_in_use() {
        for (path, why) in [
            ("/dev/sda", Some("mounted at /")),
            ("/dev/sdb", Some("holds LVM2_member")),
            ("/dev/sdc", Some("holds part /dev/sdc1")),
            ("/dev/nvme0n1", None),
        ] {
            assert_eq!(one(path).in_use.as_deref(), why, "{path}");
        }
        assert_eq!(one("/dev/sda").model.as_deref(), Some("ST8000NM000A"));
        assert!(found().iter().all(|device| device.path != "/dev/sr0"), "a CD drive is no disk");
    }

    #[test]
    fn mapped_images_memory_and_what_can_be_pulled_out_are_no_drives() {
        for (path, what) in [
            ("/dev/rbd0", "RBD"),
            ("/dev/nbd3", "network"),
            ("/dev/drbd1", "DRBD"),
            ("/dev/ublkb0", "ublk"),
            ("/dev/loop0", "file"),
            ("/dev/zd0", "ZFS"),
            ("/dev/zram0", "zram"),
            ("/dev/ram0", "RAM disk"),
            ("/dev/fd0", "floppy"),
            ("/dev/mmcblk0", "card"),
            ("/dev/sdd", "USB"),
            ("/dev/sde", "removable"),
            ("/dev/sdi", "iSCSI"),
        ] {
            let no_drive = one(path).no_drive.unwrap_or_else(|| panic!("{path} counts as a drive"));
            assert!(no_drive.contains(what), "{path}: {no_drive}");
        }
        for path in ["/dev/sda", "/dev/nvme0n1", "/dev/vda", "/dev/mapper/mpatha"] {
            assert_eq!(one(path).no_drive, None, "{path}");
        }
    }

    #[test]
    fn a_device_of_unknown_size_hides_no_other() {
        assert!(LISTING.contains("\"/dev/sdj\"") && LISTING.contains("\"/dev/nvme1n1\""));
        assert!(
            found()
                .iter()
                .all(|device| !["/dev/sdj", "/dev/nvme1n1"].contains(&device.path.as_str()))
        );
        assert_eq!(one("/dev/nvme2n1").bytes, 1_920_383_410_176);
    }

    #[test]
    fn a_multipath_device_counts_once_by_its_map() {
        let paths: Vec<String> = found().into_iter().map(|device| device.path).collect();
        let count = |wanted: &str| paths.iter().filter(|path| *path == wanted).count();
        assert_eq!((count("/dev/mapper/mpatha"), count("/dev/sdf"), count("/dev/sdg")), (1, 0, 0));
        let map = one("/dev/mapper/mpatha");
        assert_eq!((map.transport.as_deref(), map.in_use), (Some("fc"), None));
        assert_eq!(map.model.as_deref(), Some("MZILT1T9HBJR"));
    }

    #[test]
    fn zoned_and_read_only_devices_are_told() {
        assert_eq!(
            one("/dev/sdh").refusal(),
            Some("zoned (host-managed): it takes writes in order only")
        );
        assert_eq!(one("/dev/nvme3n1").refusal(), Some("read-only"));
        assert_eq!(one("/dev/nvme0n1").refusal(), None);
    }

    #[test]
    fn an_old_lsblk_is_told_on_one_line() {
        for stderr in [
            "lsblk: unknown column: MOUNTPOINTS\n",
            "lsblk: unrecognized option '--json'\n\nUsage:\n lsblk [options] [<device> ...]\n",
        ] {
            let error = failure(stderr).to_string();
            assert!(
                error.starts_with("lsblk is too old (un") && error.ends_with("2.37 or later"),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1);
        }
        let without = LISTING.replace("\"zoned\"", "\"other\"");
        let error = parse(without.as_bytes()).expect_err("a column is missing").to_string();
        assert!(error.starts_with("lsblk is too old (missing field `zoned`"), "{error}");
        assert_eq!(
            failure("lsblk: /sys: no such file\n").to_string(),
            "lsblk failed: /sys: no such file"
        );
        assert!(parse(b"{}").is_err() && parse(b"").is_err());
    }
}
