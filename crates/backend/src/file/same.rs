//! The identity of a file or device. A path or a kernel's name may mean another image later; what a
//! cache holds belongs to one image only.
//!
//! [`ImageId`] says what distinguishes an image from others. Here it is observed.

use super::mapped;
use crate::record::{ImageId, PARTITION_UUID, boot_id};
use rustix::fs::{FileType, Mode, OFlags};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Longest name that is kept as it is, in bytes; a longer one is replaced by its digest.
const NAME_BYTES_MAX: usize = 256;

/// The identity of an opened file or device, with its present name.
pub(super) fn observe(path: &Path, file: &OwnedFd) -> std::io::Result<ImageId> {
    let stat = rustix::fs::fstat(file)?;
    let mut identity = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => {
            let identity = of_device(&in_sys(stat.st_rdev));
            // By now the device number may belong to another disk.
            let told = sequence(file);
            if told.is_some() && identity.sequence.is_some() && told != identity.sequence {
                return Err(rustix::io::Errno::NODEV.into());
            }
            identity
        }
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

/// The name, or its digest if it is too long or has control characters: different names stay
/// different.
fn short(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control) {
        return name.to_owned();
    }
    hex(&Sha256::digest(name.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The directory of a block device in sysfs.
pub(super) fn in_sys(device: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device)).into()
}

/// Content of a small file of the kernel; `None` where there is none.
pub(super) fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
}

/// Content of such a file if it is a name: not empty, and not only zeros after the prefix of its
/// kind.
fn read_name(path: &Path) -> Option<String> {
    const KINDS: [&str; 5] = ["0x", "naa.", "eui.", "uuid.", "nvme."];
    read(path).filter(|text| {
        let name = KINDS.iter().find_map(|kind| text.strip_prefix(kind)).unwrap_or(text);
        name.chars().any(|c| c.is_alphanumeric() && c != '0')
    })
}

/// The number (`diskseq`) of the disk of an open device. The kernel gives this number to no other
/// disk until the host is restarted.
fn sequence(device: impl AsFd) -> Option<String> {
    /// `BLKGETDISKSEQ`; since Linux 5.15.
    const SEQUENCE: u64 = 0x8008_1280;
    let mut number = 0u64;
    // SAFETY: an open file, and room for the number that the request fills.
    let result = unsafe {
        libc::ioctl(device.as_fd().as_raw_fd(), SEQUENCE as libc::Ioctl, &raw mut number)
    };
    (result == 0).then(|| number.to_string())
}

/// The identity of a block device, by its directory in sysfs.
fn of_device(sys: &Path) -> ImageId {
    let mut identity = ImageId::default();
    let resolved = sys.canonicalize().unwrap_or_else(|_| sys.to_owned());
    identity.name =
        resolved.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let number = |file: &str| read(&sys.join(file))?.parse::<u64>().ok();
    let mut disk = resolved.clone();
    if let Some(partition) = number("partition") {
        identity.partition = Some((partition as u32, number("start").unwrap_or(0)));
        disk = resolved.parent().map_or(disk, Path::to_owned);
        // The uuid that the kernel has read from the partition table.
        let uuid = read(&sys.join("uevent")).and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("PARTUUID=").map(str::to_owned))
        });
        identity.lasting.extend(uuid.map(|uuid| (PARTITION_UUID.to_owned(), uuid)));
    }
    identity.sequence = read_name(&disk.join("diskseq"));
    identity.setup = setup(&disk);
    let found = |kind: &str, files: &[&str]| {
        Some((kind.to_owned(), files.iter().find_map(|file| read_name(&disk.join(file)))?))
    };
    identity.lasting.extend(found("md uuid", &["md/uuid"]));
    identity.lasting.extend(found("bcache uuid", &["bcache/backing_dev_uuid"]));
    identity
        .lasting
        .extend(found("dm uuid", &["dm/uuid"]).filter(|(_, uuid)| !is_only_a_name(uuid)));
    for (kind, files) in [("wwid", WWID_FILES), (SERIAL, SERIAL_FILES)] {
        let Some((kind, name)) = found(kind, &files) else { continue };
        if is_made_of_serial(&kind, &name) && is_of_several(&disk, &files, &name) {
            identity.shared.insert(kind.clone());
        }
        identity.lasting.insert(kind, name);
    }
    if let Some(below) = of_loop(&disk) {
        identity.lasting.extend(below.lasting);
        identity.shared.extend(below.shared);
    }
    identity.lasting.extend(mapped::name(&disk).map(|name| ("rbd".to_owned(), name)));
    identity
}

const WWID_FILES: [&str; 2] = ["wwid", "device/wwid"];
const SERIAL: &str = "serial";
/// Files with the serial number. With NVMe it is the number of the controller, which may have
/// several disks.
const SERIAL_FILES: [&str; 2] = ["serial", "device/serial"];

/// Whether a name is no better than the serial number. This is so for a WWID that the kernel makes
/// because the disk has no other.
fn is_made_of_serial(kind: &str, name: &str) -> bool {
    kind == SERIAL || ["t10.", "nvme."].iter().any(|made| name.starts_with(made))
}

/// Whether another disk of the host has this name, as cheap or virtual disks do.
fn is_of_several(disk: &Path, files: &[&str], name: &str) -> bool {
    let Ok(disks) = fs::read_dir("/sys/block") else { return false };
    let others = disks
        .filter_map(|other| other.ok()?.path().canonicalize().ok())
        .filter(|other| other != disk);
    // The single paths of a disk that the kernel combines by itself are hidden.
    let mut visible =
        others.filter(|other| read(&other.join("hidden")).is_none_or(|hidden| hidden == "0"));
    visible.any(|other| {
        files
            .iter()
            .find_map(|file| read_name(&other.join(file)))
            .is_some_and(|found| found == name)
    })
}

/// Whether a device-mapper uuid consists of the given name only: cryptsetup makes such a uuid for a
/// device that has no uuid of its own.
fn is_only_a_name(dm_uuid: &str) -> bool {
    const UUID_DIGITS: usize = 32;
    let is_uuid =
        |part: &str| part.len() == UUID_DIGITS && part.chars().all(|c| c.is_ascii_hexdigit());
    dm_uuid.starts_with("CRYPT-") && !dm_uuid.split('-').any(is_uuid)
}

/// What may change while a disk keeps its number.
fn setup(disk: &Path) -> Option<String> {
    if disk.join("dm").exists() {
        let below = fs::read_dir(disk.join("slaves")).ok()?;
        let mut numbers: Vec<String> =
            below.filter_map(|one| read(&one.ok()?.path().join("dev"))).collect();
        numbers.sort();
        return Some(format!("over {}", numbers.join(" ")));
    }
    let server = || read(&disk.join("pid")).map(|pid| format!("connected by process {pid}"));
    let memory = || read(&disk.join("disksize")).map(|bytes| format!("of {bytes} bytes"));
    server().or_else(memory)
}

/// The lasting names of a loop device: those of its file, or of the device below, and which part of
/// that it is.
fn of_loop(disk: &Path) -> Option<ImageId> {
    let of = |file: &str| read(&disk.join("loop").join(file));
    let (path, offset, limit) = (of("backing_file")?, of("offset")?, of("sizelimit")?);
    let file =
        rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    let below = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => of_device(&in_sys(stat.st_rdev)),
        _ => ImageId { lasting: of_file(&file, stat.st_dev).1, ..ImageId::default() },
    };
    let partition =
        below.partition.map(|(number, start)| format!(" partition {number} at {start}"));
    let part = format!("{} from {offset} for {limit}", partition.unwrap_or_default());
    let kind = |kind: String| format!("loop {kind}");
    Some(ImageId {
        lasting: below.lasting.into_iter().map(|(of, name)| (kind(of), name + &part)).collect(),
        shared: below.shared.into_iter().map(kind).collect(),
        ..ImageId::default()
    })
}

/// The names of a file: one for this boot, and those that last. The kernel's handle contains the
/// number of the inode and how often that number was used. The file system is identified by its
/// uuid for ever, and by its device number only as long as it is mounted.
fn of_file(file: impl AsFd, device: u64) -> (Option<String>, BTreeMap<String, String>) {
    let Some(handle) = handle(&file) else { return (None, BTreeMap::new()) };
    let of =
        |kind: &str, name: String| (kind.to_owned(), format!("{handle} of file system {name}"));
    let uuid = file_system_uuid(&file).map(|uuid| of("file by uuid", uuid));
    let number = file_system_number(&file).map(|number| of("file by number", number));
    (Some(format!("{handle} of device {device}")), uuid.into_iter().chain(number).collect())
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
    // SAFETY: an open file; a handle of the kernel's layout with room for as many bytes as it says;
    // a valid out pointer.
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

fn hex_name(bytes: &[u8]) -> Option<String> {
    bytes.iter().any(|byte| *byte != 0).then(|| hex(bytes))
}

/// The uuid of the file system of an open file, where this kernel reports it.
fn file_system_uuid(file: impl AsFd) -> Option<String> {
    /// `FS_IOC_GETFSUUID`: a length and sixteen bytes; since Linux 6.9.
    const UUID: u64 = 0x8011_1500;
    /// `XFS_IOC_FSGEOMETRY_V1`: 112 bytes, of which the uuid is at 64.
    const XFS_GEOMETRY: u64 = 0x8070_5864;
    const XFS_GEOMETRY_BYTES: usize = 112;
    let raw = file.as_fd().as_raw_fd();
    let mut uuid = [0u8; 17];
    // SAFETY: an open file, and room for what the request fills.
    let told = unsafe { libc::ioctl(raw, UUID as libc::Ioctl, uuid.as_mut_ptr()) } == 0;
    if let Some(uuid) = uuid.get(1..=usize::from(uuid[0])).filter(|_| told).and_then(hex_name) {
        return Some(uuid);
    }
    if rustix::fs::fstatfs(&file).ok()?.f_type != libc::XFS_SUPER_MAGIC {
        return None;
    }
    let mut geometry = [0u64; XFS_GEOMETRY_BYTES / 8];
    // SAFETY: as above.
    let result = unsafe { libc::ioctl(raw, XFS_GEOMETRY as libc::Ioctl, geometry.as_mut_ptr()) };
    let uuid: Vec<u8> = geometry[8..10].iter().flat_map(|word| word.to_ne_bytes()).collect();
    (result == 0).then(|| hex_name(&uuid))?
}

/// The number that `statfs` reports for the file system of an open file, where it is made of the
/// file system's uuid. Kernels that do not report the uuid report this number.
fn file_system_number(file: impl AsFd) -> Option<String> {
    let stat = rustix::fs::fstatfs(&file).ok()?;
    if ![libc::EXT4_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC].contains(&stat.f_type) {
        return None;
    }
    // SAFETY: the structure consists of two numbers, as the kernel fills it.
    let id: [i32; 2] = unsafe { std::mem::transmute(stat.f_fsid) };
    hex_name(&id.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Sameness;
    use proptest::prelude::*;

    /// An observation of a disk. The bits of `has` select which names the disk has; `boot` and
    /// `sequence` are of the observation. All serial numbers are equal, and so are all names of
    /// partition tables.
    fn look(number: u64, has: u8, boot: &str, sequence: Option<u64>) -> ImageId {
        let kinds = [("wwid", number), (SERIAL, 0), ("dm uuid", number), (PARTITION_UUID, 0)];
        let names = kinds.iter().enumerate().filter(|(at, _)| has & 1 << at != 0);
        ImageId {
            name: "sda".into(),
            boot_id: boot.into(),
            sequence: sequence.map(|sequence| sequence.to_string()),
            setup: (has & 4 != 0).then(|| format!("over {number}")),
            partition: (has & 8 != 0).then_some((1, 2048)),
            lasting: names
                .map(|(_, (kind, of))| ((*kind).to_owned(), format!("{kind}-{of}")))
                .collect(),
            shared: (has & 2 != 0).then(|| SERIAL.to_owned()).into_iter().collect(),
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
            // After a reboot the numbers start anew, and a number may be another disk's.
            let then = looks("first", 10);
            let now = if same_boot { looks("first", 10) } else { looks("second", 11) };
            for (a, before) in then.iter().enumerate() {
                for (b, after) in now.iter().enumerate() {
                    let found = before.compare(after);
                    if a == b {
                        prop_assert_ne!(found, Sameness::Different);
                        prop_assert_eq!(found == Sameness::Unknown, !before.lasts() && (!same_boot || before.sequence.is_none()));
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
        for (text, name) in [
            ("", None),
            ("\n", None),
            ("0000-00\n", None),
            ("0x0000000000000000", None),
            ("naa.0000", None),
            ("eui.0000000000000000", None),
            (" naa.5 \n", Some("naa.5")),
        ] {
            fs::write(&path, text).expect("a file");
            assert_eq!(read_name(&path).as_deref(), name, "{text:?}");
        }
    }

    /// Compares two observations of a disk; `change` makes the second one from the first.
    fn compared(lasting: &[(&str, &str)], change: impl FnOnce(&mut ImageId)) -> Sameness {
        let names = lasting.iter().map(|(kind, name)| ((*kind).to_owned(), (*name).to_owned()));
        let then = ImageId {
            boot_id: "a".into(),
            sequence: Some("7".into()),
            lasting: names.collect(),
            ..ImageId::default()
        };
        let mut now = then.clone();
        change(&mut now);
        then.compare(&now)
    }

    #[test]
    fn a_name_that_copies_have_too_tells_images_apart_and_never_makes_them_one() {
        let next_boot =
            |now: &mut ImageId| (now.boot_id, now.sequence) = ("b".into(), Some("7".into()));
        let next_number = |now: &mut ImageId| now.sequence = Some("8".into());
        for kind in [PARTITION_UUID, "loop partition uuid"] {
            assert_eq!(compared(&[(kind, "x")], |_| ()), Sameness::Same);
            assert_eq!(compared(&[(kind, "x")], next_boot), Sameness::Unknown);
            assert_eq!(compared(&[(kind, "x")], next_number), Sameness::Unknown);
            assert_eq!(compared(&[(kind, "x"), ("wwid", "1")], next_boot), Sameness::Same);
            let other = |now: &mut ImageId| drop(now.lasting.insert(kind.into(), "y".into()));
            assert_eq!(compared(&[(kind, "x"), ("wwid", "1")], other), Sameness::Different);
        }
        // A second disk with the same serial number has come, or has gone.
        let shared = |now: &mut ImageId| {
            next_boot(now);
            now.shared.insert(SERIAL.into());
        };
        assert_eq!(compared(&[(SERIAL, "1")], next_boot), Sameness::Same);
        assert_eq!(compared(&[(SERIAL, "1")], shared), Sameness::Unknown);
    }

    #[test]
    fn a_disk_that_was_set_up_anew_under_its_number_is_known_by_lasting_names_only() {
        let over = |setup: &'static str| move |now: &mut ImageId| now.setup = Some(setup.into());
        let first = |now: &mut ImageId| over("over 8:0")(now);
        let then =
            ImageId { boot_id: "a".into(), sequence: Some("7".into()), ..ImageId::default() };
        let (mut one, mut other, mut named) = (then.clone(), then.clone(), then.clone());
        first(&mut one);
        over("over 8:16")(&mut other);
        assert_eq!(one.compare(&one), Sameness::Same);
        assert_eq!(one.compare(&other), Sameness::Unknown);
        assert_eq!(
            then.compare(&other),
            Sameness::Same,
            "an earlier record does not say how it was set up"
        );
        named.lasting.insert("dm uuid".into(), "LVM-1".into());
        let mut moved = named.clone();
        over("over 8:16")(&mut moved);
        assert_eq!(named.compare(&moved), Sameness::Same);
    }

    #[test]
    fn a_mapped_disk_that_is_told_by_the_name_it_was_given_has_none() {
        for (uuid, only) in [
            ("CRYPT-PLAIN-vm1", true),
            ("CRYPT-TEMP-temporary-cryptsetup-1234", true),
            ("CRYPT-LUKS2-0123456789abcdef0123456789abcdef-vm1", false),
            ("LVM-abc", false),
            ("mpath-3600", false),
        ] {
            assert_eq!(is_only_a_name(uuid), only, "{uuid}");
        }
    }
}
