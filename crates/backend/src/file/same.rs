//! Which file or device an image is. A path and a kernel's name are anybody's by tomorrow; what a cache holds belongs to one only.
//!
//! Several things tell one from others, and each of them may be missing: a number that the kernel gives no second disk while it runs,
//! and names that stay from boot to boot. Two looks at what has a name in common that differs are looks at different images. They are
//! looks at one image where the kernel's number or a lasting name says so, and else nobody knows.

use crate::record::boot_id;
use rustix::fs::{FileType, Mode, OFlags};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Longest name that is kept as it is; a longer one is told by its digest.
const NAME_BYTES_MAX: usize = 256;

/// What tells an image from others.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct ImageId {
    /// What it was called when it was seen: for people.
    #[serde(default)]
    pub(crate) name: String,
    /// Boot of the host in which `sequence` counts; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    boot_id: String,
    /// What the kernel calls it and, while it runs, nothing else: the number of a disk (`diskseq`), or a file's file system and handle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sequence: Option<String>,
    /// The partition of its disk: number, and where it begins, in sectors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partition: Option<(u32, u64)>,
    /// Names that stay from boot to boot, by where they are found.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    lasting: BTreeMap<String, String>,
}

/// What two looks at images say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sameness {
    /// Both are of one image.
    Same,
    /// They are of two.
    Different,
    /// Nothing tells.
    Unknown,
}

impl ImageId {
    /// That of an opened file or device, as it is called at this moment.
    pub(crate) fn of(path: &Path, file: &OwnedFd) -> std::io::Result<ImageId> {
        let stat = rustix::fs::fstat(file)?;
        let mut identity = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => of_device(&in_sys(stat.st_rdev)),
            _ => {
                let (sequence, lasting) = of_file(file, stat.st_dev);
                ImageId { name: path.display().to_string(), sequence, lasting, ..ImageId::default() }
            }
        };
        identity.boot_id = boot_id();
        identity.name = identity.name.replace(char::is_control, "?");
        identity.lasting.values_mut().for_each(|name| *name = short(name));
        Ok(identity)
    }

    /// Whether `now`, seen later, is what this was.
    pub(crate) fn compare(&self, now: &ImageId) -> Sameness {
        let both = self.lasting.iter().filter_map(|(kind, name)| Some((name, now.lasting.get(kind)?)));
        let equal: Vec<bool> = both.map(|(then, now)| then == now).collect();
        if self.partition != now.partition || equal.contains(&false) {
            return Sameness::Different;
        }
        let one_boot = !self.boot_id.is_empty() && self.boot_id == now.boot_id;
        let sequence = one_boot && self.sequence.is_some() && self.sequence == now.sequence;
        match sequence || !equal.is_empty() {
            true => Sameness::Same,
            false => Sameness::Unknown,
        }
    }

    /// It is a device's: a file's name is a path.
    pub(crate) fn is_of_device(&self) -> bool {
        !self.name.starts_with('/')
    }

    /// It can be told from others after a reboot, too.
    pub(crate) fn lasts(&self) -> bool {
        !self.lasting.is_empty()
    }

    /// The names that tell it from others, on one line.
    pub(crate) fn names(&self) -> String {
        let partition =
            self.partition.map(|(number, start)| format!("partition {number} from sector {start}"));
        let lasting = self.lasting.iter().map(|(kind, name)| format!("{kind} {name}"));
        let names: Vec<String> = lasting.chain(partition).collect();
        if names.is_empty() { "no lasting name".into() } else { names.join(", ") }
    }

    /// Texts of it, which stand in messages.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &String> {
        [&self.name, &self.boot_id]
            .into_iter()
            .chain(&self.sequence)
            .chain(self.lasting.iter().flat_map(|(kind, name)| [kind, name]))
    }
}

/// A name that is too long is told by its digest, so that no two become one.
fn short(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control) {
        return name.to_owned();
    }
    hex(&Sha256::digest(name.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The directory of a block device in the kernel's tree.
pub(super) fn in_sys(device: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device)).into()
}

/// What a small file of the kernel says; `None` where there is none.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
}

/// What it says, if that is a name: not empty, and not all zeros.
fn read_name(path: &Path) -> Option<String> {
    read(path).filter(|text| text.chars().any(|c| c.is_alphanumeric() && c != '0'))
}

/// The identity of a block device by its directory in the kernel's tree.
fn of_device(sys: &Path) -> ImageId {
    let mut identity = ImageId::default();
    let resolved = sys.canonicalize().unwrap_or_else(|_| sys.to_owned());
    identity.name = resolved.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let number = |file: &str| read(&sys.join(file))?.parse::<u64>().ok();
    let mut disk = resolved.clone();
    if let Some(partition) = number("partition") {
        identity.partition = Some((partition as u32, number("start").unwrap_or(0)));
        disk = resolved.parent().map_or(disk, Path::to_owned);
        // Where the kernel has read it from the partition table.
        let uuid = read(&sys.join("uevent"))
            .and_then(|text| text.lines().find_map(|line| line.strip_prefix("PARTUUID=").map(str::to_owned)));
        identity.lasting.extend(uuid.map(|uuid| ("partition uuid".to_owned(), uuid)));
    }
    identity.sequence = read_name(&disk.join("diskseq"));
    let kinds: [(&str, &[&str]); 5] = [
        ("wwid", &["wwid", "device/wwid"]),
        ("serial", &["serial", "device/serial"]),
        ("dm uuid", &["dm/uuid"]),
        ("md uuid", &["md/uuid"]),
        ("bcache uuid", &["bcache/backing_dev_uuid"]),
    ];
    for (kind, files) in kinds {
        let found = files.iter().find_map(|file| read_name(&disk.join(file)));
        identity.lasting.extend(found.map(|name| (kind.to_owned(), name)));
    }
    identity.lasting.extend(of_loop(&disk).map(|name| ("loop".to_owned(), name)));
    identity.lasting.extend(of_mapped_image(&disk).map(|name| ("rbd".to_owned(), name)));
    identity
}

/// A loop device: its file, and which part of it.
fn of_loop(disk: &Path) -> Option<String> {
    let of = |file: &str| read(&disk.join("loop").join(file));
    let (path, offset, limit) = (of("backing_file")?, of("offset")?, of("sizelimit")?);
    let file =
        rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    // A device under a loop device has names of its own.
    let below = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => {
            let below = of_device(&in_sys(stat.st_rdev));
            below.lasts().then(|| below.names())?
        }
        _ => of_file(&file, stat.st_dev).1.into_values().next()?,
    };
    Some(format!("{below} from {offset} to {limit}"))
}

/// An RBD image that the kernel has mapped.
fn of_mapped_image(disk: &Path) -> Option<String> {
    let of = |file: &str| read(&disk.join("device").join(file));
    let (fsid, pool, image) = (of("cluster_fsid")?, of("pool_id")?, of("image_id")?);
    let (namespace, snapshot) = (of("pool_ns").unwrap_or_default(), of("snap_id").unwrap_or_default());
    Some(format!("{fsid}/{pool}/{namespace}/{image}@{snapshot}"))
}

/// A file: what it is called while this boot lasts, and for ever. The kernel's handle has the number of its inode and how often that
/// was used; which file system is meant is told by its uuid for ever, and by its device only as long as it is mounted.
fn of_file(file: impl AsFd, device: u64) -> (Option<String>, BTreeMap<String, String>) {
    let Some(handle) = handle(&file) else { return (None, BTreeMap::new()) };
    let lasting =
        file_system(&file).map(|uuid| ("file".to_owned(), format!("{handle} of file system {uuid}")));
    (Some(format!("{handle} of device {device}")), lasting.into_iter().collect())
}

/// The kernel's handle of an open file, as text.
fn handle(file: impl AsFd) -> Option<String> {
    /// Longest handle (`MAX_HANDLE_SZ`).
    const BYTES_MAX: usize = 128;
    #[repr(C)]
    struct Handle {
        bytes: libc::c_uint,
        kind: libc::c_int,
        content: [u8; BYTES_MAX],
    }
    let mut handle = Handle { bytes: BYTES_MAX as libc::c_uint, kind: 0, content: [0; BYTES_MAX] };
    let mut mount: libc::c_int = 0;
    // SAFETY: an open file; a handle of the kernel's layout with room for as many bytes as it says; a valid out pointer.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let content = handle.content.get(..handle.bytes as usize).filter(|_| result == 0)?;
    Some(format!("{}-{}", handle.kind, hex(content)))
}

/// The uuid of the file system of an open file, where it has one that it tells.
fn file_system(file: impl AsFd) -> Option<String> {
    /// `FS_IOC_GETFSUUID`: a length and sixteen bytes; since Linux 6.9.
    const UUID: u64 = 0x8011_1500;
    /// `XFS_IOC_FSGEOMETRY_V1`: 112 bytes, of which the uuid is at 64.
    const XFS_GEOMETRY: u64 = 0x8070_5864;
    const XFS_GEOMETRY_BYTES: usize = 112;
    let raw = file.as_fd().as_raw_fd();
    let text = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0).then(|| hex(bytes));
    let mut uuid = [0u8; 17];
    // SAFETY: an open file, and room for what the request fills.
    let told = unsafe { libc::ioctl(raw, UUID as libc::Ioctl, uuid.as_mut_ptr()) } == 0;
    if let Some(uuid) = uuid.get(1..=usize::from(uuid[0])).filter(|_| told).and_then(text) {
        return Some(uuid);
    }
    let stat = rustix::fs::fstatfs(&file).ok()?;
    match stat.f_type {
        libc::XFS_SUPER_MAGIC => {
            let mut geometry = [0u64; XFS_GEOMETRY_BYTES / 8];
            // SAFETY: as above.
            let result = unsafe { libc::ioctl(raw, XFS_GEOMETRY as libc::Ioctl, geometry.as_mut_ptr()) };
            let uuid: Vec<u8> = geometry[8..10].iter().flat_map(|word| word.to_ne_bytes()).collect();
            (result == 0).then(|| text(&uuid))?
        }
        // Theirs is made of the file system's uuid.
        libc::EXT4_SUPER_MAGIC | libc::BTRFS_SUPER_MAGIC => {
            // SAFETY: a structure of two numbers, as which the kernel fills it.
            let id: [i32; 2] = unsafe { std::mem::transmute(stat.f_fsid) };
            text(&id.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A disk as the kernel shows it, with what it has of names; `boot` and `sequence` are of the look.
    fn look(number: u64, has: u8, boot: &str, sequence: Option<u64>) -> ImageId {
        let kinds = ["wwid", "serial", "dm uuid"];
        let names = kinds.iter().enumerate().filter(|(at, _)| has & 1 << at != 0);
        ImageId {
            name: "sda".into(),
            boot_id: boot.into(),
            sequence: sequence.map(|sequence| sequence.to_string()),
            partition: (has & 8 != 0).then_some((1, 2048)),
            lasting: names.map(|(_, kind)| ((*kind).to_owned(), format!("{kind}-{number}"))).collect(),
        }
    }

    proptest! {
        #[test]
        fn no_two_disks_are_one_and_none_is_two(
            disks in proptest::collection::vec((0u8..16, any::<bool>()), 2..8),
            same_boot in any::<bool>(),
        ) {
            let looks = |boot: &str, first: u64| -> Vec<ImageId> {
                let sequence = |at: usize, told: bool| told.then_some(first + at as u64);
                disks.iter().enumerate().map(|(at, (has, told))| look(at as u64, *has, boot, sequence(at, *told))).collect()
            };
            // After a reboot the numbers begin anew, and may be another disk's.
            let then = looks("first", 10);
            let now = if same_boot { looks("first", 10) } else { looks("second", 11) };
            for (a, before) in then.iter().enumerate() {
                for (b, after) in now.iter().enumerate() {
                    let found = before.compare(after);
                    if a == b {
                        prop_assert_ne!(found, Sameness::Different);
                        prop_assert_eq!(found == Sameness::Unknown, before.lasting.is_empty() && (!same_boot || before.sequence.is_none()));
                    } else {
                        prop_assert_ne!(found, Sameness::Same, "{:?} and {:?}", before, after);
                    }
                }
            }
        }

        #[test]
        fn long_names_stay_different(one in "[ -~]{200,600}", other in "[ -~]{200,600}") {
            prop_assert_eq!(short(&one) == short(&other), one == other);
            prop_assert!(short(&one).len() <= NAME_BYTES_MAX);
        }
    }

    #[test]
    fn a_name_of_nothing_but_zeros_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("wwid");
        for (text, name) in [("", None), ("\n", None), ("0000-00\n", None), (" naa.5 \n", Some("naa.5"))] {
            fs::write(&path, text).expect("a file");
            assert_eq!(read_name(&path).as_deref(), name, "{text:?}");
        }
    }
}
