//! Finding the ownership record of a file or device, and what the record says about the image as it
//! is now.
//!
//! The record of a file stands beside the image as `PATH.tidepool` (symbolic links resolved first).
//! The record of a block device stands in [`sidecar::state_dir`] under a random name. To which
//! device it belongs is said in the record itself ([`ImageId`]), because names of devices change.

use super::counted;
use super::replaced;
use super::same::{self, in_sys};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{Continuity, ImageId, ImageStamp, OwnerState, Ownership, Sameness};
use crate::sidecar::{self, Lock, SUFFIX, Sidecar};
use rustix::fs::{AtFlags, FileType, StatxAttributes, StatxFlags};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Time stamps of files advance in steps of at most this much.
const TIMESTAMP_STEP: Duration = Duration::from_millis(20);

/// Beginning of the names of records of block devices; a random uuid and [`SUFFIX`] follow.
const DEVICE_PREFIX: &str = "device-";
/// Name of the lock that is held while the record of a device is looked for and taken.
const TURN: &str = "devices";

/// Where the record of an opened image stands, and what distinguishes the image from others.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) sidecar: Sidecar,
    /// The record, if there is one.
    pub(crate) record: Option<Ownership>,
    pub(crate) identity: ImageId,
    /// Records that are not clean and of which it is not known whether they are of this device.
    perhaps: Vec<(Sidecar, Ownership)>,
    /// Records that are not clean and are of devices with other names than this device.
    others: Vec<(Sidecar, Ownership)>,
}

impl Located {
    /// Finds the record of an opened image.
    pub(crate) fn of(
        path: &Path,
        file: &OwnedFd,
        state_dir: Option<&Path>,
    ) -> Result<Located, BackendError> {
        let what = path.display();
        let failed = |e: rustix::io::Errno| BackendError::io(&what, "stat", e);
        let stat = rustix::fs::fstat(file).map_err(failed)?;
        let by_name = rustix::fs::stat(path).map_err(failed)?;
        let identity = same::observe(path, file).map_err(|e| BackendError::io(&what, "stat", e))?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let is_still_there = match is_device {
            true => by_name.st_rdev == stat.st_rdev,
            false => (by_name.st_dev, by_name.st_ino) == (stat.st_dev, stat.st_ino),
        };
        if !is_still_there {
            return Err(replaced(&what.to_string()));
        }
        if is_device {
            let dir = sidecar::state_dir(state_dir);
            return of_device(&what.to_string(), identity, dir, &earlier_name(stat.st_rdev));
        }
        let image = fs::canonicalize(path).map_err(|e| BackendError::io(&what, "resolve", e))?;
        let sidecar = Sidecar::of_image(image);
        if stat.st_nlink > 1 && !sidecar.path().exists() {
            let why = format!(
                "the file has {} names (hard links), and its ownership record may stand beside another one; use that name, or \
                 leave the file only this one",
                stat.st_nlink
            );
            return Err(BackendError::Unsupported { what: what.to_string(), why });
        }
        if !sidecar.path().exists()
            && let Some(source) = mounted_by_itself(file)
        {
            let why = format!(
                "this one file is mounted here from another place ({source}), and its ownership record may stand beside it there; \
                 use that name, or mount the whole directory"
            );
            return Err(BackendError::Unsupported { what: what.to_string(), why });
        }
        let (perhaps, others) = (Vec::new(), Vec::new());
        Ok(Located { record: sidecar.read()?, sidecar, identity, perhaps, others })
    }

    /// Finds the record, and for a device also takes the lock that keeps other processes from
    /// looking for a device's record meanwhile: two processes that reach one device would each make
    /// a record of their own.
    pub(crate) fn in_turn(
        path: &Path,
        file: &OwnedFd,
        state_dir: Option<&Path>,
    ) -> Result<(Located, Option<Lock>), BackendError> {
        let what = path.display();
        let stat = rustix::fs::fstat(file).map_err(|e| BackendError::io(&what, "stat", e))?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let turn = || Sidecar::within(sidecar::state_dir(state_dir), TURN).wait_for_lock();
        let turn = is_device.then(turn).transpose()?;
        Ok((Located::of(path, file, state_dir)?, turn))
    }

    /// Fails if an open could not take the lock under which the record of a device is looked for.
    /// Changes nothing.
    pub(super) fn check_turn(&self, state_dir: Option<&Path>) -> Result<(), BackendError> {
        match self.sidecar.is_among_others() {
            true => Sidecar::within(sidecar::state_dir(state_dir), TURN).check_lock_file(),
            false => Ok(()),
        }
    }

    /// Warns that a device without a record may be the one for which another cache holds data.
    pub(crate) fn warn_of_others(&self, what: &str, cache_uuid: Uuid) {
        if self.record.is_some() {
            return;
        }
        for (sidecar, record) in
            self.perhaps.iter().filter(|(_, record)| record.cache_uuid != cache_uuid)
        {
            tracing::warn!(
                image = %what,
                "nothing tells whether this is the device for which cache {} on host {} holds data that is not drained ({})",
                record.cache_uuid, record.host, sidecar.path().display()
            );
        }
    }

    /// Refuses a device without a record if the cache has dirty data for it, and a record of this
    /// cache may be the device's: a record that is not clean and whose device is not being served.
    /// Its names may even differ. Without dirty data the device is served as one that no cache has
    /// had.
    pub(crate) fn check_recognised(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        if self.record.is_some() {
            return Ok(());
        }
        // A record whose lock is held belongs to a device that is being served.
        let is_free = |sidecar: &Sidecar| !sidecar.is_locked(what);
        let own = |records: &[(Sidecar, Ownership)]| -> Vec<String> {
            let own = records.iter().filter(|(_, record)| record.is_by(options.cache_uuid));
            own.filter(|(sidecar, _)| is_free(sidecar))
                .map(|(one, _)| one.path().display().to_string())
                .collect()
        };
        let (perhaps, others) = (own(&self.perhaps), own(&self.others));
        if !options.dirty {
            if !perhaps.is_empty() {
                let records = perhaps.join(", ");
                tracing::warn!(image = %what, "served as a device that no cache has had: nothing tells whether {records} is its record");
            }
            return Ok(());
        }
        let (says, records) = match (&perhaps[..], &others[..]) {
            ([], []) => return Ok(()),
            ([], others) => ("its names are not those of", others),
            (perhaps, _) => ("nothing tells whether this is", perhaps),
        };
        let why = format!(
            "{says} the device for which the cache holds data that is not drained ({}); if it is that device, say so: \
             tidepool confirm file:{what} --record {}",
            self.identity.names(),
            records.join(", or --record ")
        );
        Err(BackendError::Unrecognised { what: what.into(), why })
    }

    /// Makes a record that may be the image's the record of this image.
    pub(super) fn confirm(
        self,
        what: &str,
        file: &OwnedFd,
        record: Option<&Path>,
    ) -> Result<Ownership, BackendError> {
        let Located { sidecar, record: own, identity, mut perhaps, others } = self;
        let refused = |why: String| Err(BackendError::Unsupported { what: what.into(), why });
        if let Some(own) = own {
            let now = stamp_now(file).map_err(|e| BackendError::io(what, "stat", e))?;
            let is_as_it_was = displaced(&own, &identity, now.as_ref()).is_none();
            if sameness(&own, &identity) != Sameness::Different && is_as_it_was {
                return refused(format!(
                    "there is nothing to confirm: its record is {}",
                    sidecar.path().display()
                ));
            }
            perhaps.push((sidecar, own));
        }
        let listed = || {
            let paths =
                perhaps.iter().chain(&others).map(|(one, _)| one.path().display().to_string());
            paths.collect::<Vec<_>>().join(", ")
        };
        let (chosen, found) = match (record, &perhaps[..]) {
            (_, []) if others.is_empty() => {
                return refused(
                    "no record comes into question for it: no cache holds anything of it".into(),
                );
            }
            (None, []) => {
                let why = format!(
                    "no record has a name in common with it ({}); if it is the device of one of these, say which (--record): {}",
                    identity.names(),
                    listed()
                );
                return refused(why);
            }
            // A new enclosure or partition table gives a device other names: a user who names the
            // record knows that.
            (Some(path), several) => {
                match several.iter().chain(&others).find(|(one, _)| one.path() == path) {
                    Some(one) => one,
                    None => {
                        return refused(format!(
                            "{} does not come into question for it; there is {}",
                            path.display(),
                            listed()
                        ));
                    }
                }
            }
            (None, [one]) => one,
            (None, _) => {
                return refused(format!(
                    "several records come into question for it, say which (--record): {}",
                    listed()
                ));
            }
        };
        let _lock = chosen.lock(what, false)?;
        // The record may have changed before the lock was free.
        let Some(found) = chosen.read()?.filter(|now| now.is_of(found)) else {
            return refused(format!(
                "{} has changed meanwhile; try again",
                chosen.path().display()
            ));
        };
        let now = stamp(file).map_err(|e| BackendError::io(what, "stat", e))?;
        // A user who vouches for the image vouches for its content, so its present state counts.
        let record = Ownership {
            image: Some(identity),
            stamp: found.stamp.as_ref().and(now.clone()),
            taken_at: found.taken_at.as_ref().and(now),
            ..found.renewed()
        };
        chosen.write(&record)?;
        Ok(record)
    }

    /// Present name of the image: a path, or the kernel's name of a device.
    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }

    /// A warning that a device cannot be recognised after a reboot; `None` where it can be, and for
    /// a file, whose record stands beside it.
    pub(crate) fn forgets(&self) -> Option<String> {
        let forgets = self.sidecar.is_among_others() && !self.identity.lasts();
        forgets.then(|| {
            format!(
                "{} has no name that it keeps over a reboot (a WWID, a serial number, a uuid): after one, data of a cache that is \
                 not drained waits until tidepool confirm says that it is the same",
                self.identity.name
            )
        })
    }
}

/// The source of a file that is mounted by itself, as `mount --bind` does with a single file;
/// `None` for any other file.
fn mounted_by_itself(file: &OwnedFd) -> Option<String> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return None;
    }
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let id = stat.stx_mnt_id.to_string();
    let source = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let is_it = fields.next() == Some(&id);
        // Parent and device come before the path below the file system's root; type and name follow
        // a dash.
        let path = fields.nth(2).filter(|_| is_it)?;
        let device = fields.skip_while(|field| *field != "-").nth(2)?;
        Some(format!("{path} on {device}"))
    });
    Some(source.unwrap_or_else(|| "the mount table does not tell which".into()))
}

/// Finds the record of a device. `earlier` is the name that an earlier release gave the record.
fn of_device(
    what: &str,
    identity: ImageId,
    dir: &Path,
    earlier: &Earlier,
) -> Result<Located, BackendError> {
    let (mut same, mut perhaps, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for (sidecar, record) in device_records(dir)? {
        match sameness(&record, &identity) {
            Sameness::Same => same.push((sidecar, record)),
            Sameness::Unknown if record.state != OwnerState::Clean => {
                perhaps.push((sidecar, record))
            }
            Sameness::Different if record.state != OwnerState::Clean => {
                others.push((sidecar, record))
            }
            Sameness::Unknown | Sameness::Different => {}
        }
    }
    let by_name = Sidecar::within(dir, &earlier.name);
    if same.is_empty()
        && let Some(record) = by_name.read()?
        && record.image.is_none()
    {
        match earlier.lasts {
            true => same.push((by_name, record)),
            false if record.state != OwnerState::Clean => perhaps.push((by_name, record)),
            false => {}
        }
    }
    if let [(one, _), (other, _), ..] = &same[..] {
        let why = format!(
            "{} and {} both say that they are of this device; move one of them away",
            one.path().display(),
            other.path().display()
        );
        return Err(BackendError::Unsupported { what: what.into(), why });
    }
    let fresh = || Sidecar::within(dir, &format!("{DEVICE_PREFIX}{}", Uuid::new_v4()));
    let (sidecar, record) = match same.pop() {
        Some((sidecar, record)) => (sidecar, Some(record)),
        None => (fresh(), None),
    };
    Ok(Located { sidecar, record, identity, perhaps, others })
}

/// Whether a record is of the image with this identity.
fn sameness(record: &Ownership, identity: &ImageId) -> Sameness {
    record.image.as_ref().map_or(Sameness::Unknown, |image| image.compare(identity))
}

/// The records in a directory that say to which device they belong, also those that still have the
/// name which an earlier release gave them.
fn device_records(dir: &Path) -> Result<Vec<(Sidecar, Ownership)>, BackendError> {
    let mut found = Vec::new();
    for path in sidecar::files(dir, "list the ownership records of devices")? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if !name.ends_with(&format!(".{SUFFIX}")) {
            continue;
        }
        let is_new = name.starts_with(DEVICE_PREFIX);
        let sidecar = Sidecar::among_others(path);
        match sidecar.read() {
            Ok(Some(record))
                if is_new || record.image.as_ref().is_some_and(ImageId::is_of_device) =>
            {
                found.push((sidecar, record));
            }
            // Nothing is known about other files there.
            Ok(_) => {}
            Err(error) if is_new => return Err(error),
            Err(_) => {}
        }
    }
    found.sort_by(|(a, _), (b, _)| a.path().cmp(b.path()));
    Ok(found)
}

/// The name that an earlier release gave the record of a device.
struct Earlier {
    name: String,
    /// The name was made of something that only this device has.
    lasts: bool,
}

/// Makes the name as the earlier release did: of the first of several sources that exists.
fn earlier_name(device: u64) -> Earlier {
    const CHARS_MAX: usize = 200;
    let sys = in_sys(device);
    let disk = match fs::read_to_string(sys.join("partition")) {
        Ok(_) => sys
            .canonicalize()
            .ok()
            .and_then(|p| p.parent().map(Path::to_owned))
            .unwrap_or(sys.clone()),
        Err(_) => sys.clone(),
    };
    let of = |files: &[&str]| {
        let texts = files.iter().filter_map(|file| fs::read_to_string(disk.join(file)).ok());
        texts.map(|text| text.trim().to_owned()).find(|text| !text.is_empty())
    };
    let lasting = of(&["wwid", "device/wwid", "dm/uuid", "md/uuid"]);
    let lasts = lasting.as_ref().is_some_and(|name| name.len() < CHARS_MAX);
    let mut name = lasting
        .or_else(|| of(&["loop/backing_file"]))
        .or_else(|| disk.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned))
        .unwrap_or_else(|| format!("{}-{}", rustix::fs::major(device), rustix::fs::minor(device)));
    if let Ok(partition) = fs::read_to_string(sys.join("partition")) {
        name.push_str("-part");
        name.push_str(partition.trim());
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    Earlier { name: name.chars().map(plain).take(CHARS_MAX).collect(), lasts }
}

/// The attributes that change when a file is written; `None` for a device, which has none.
pub(super) fn stamp(file: &OwnedFd) -> io::Result<Option<ImageStamp>> {
    let mut stamp = stamp_now(file)?;
    if let Some(ImageStamp::File { mtime_ns, .. }) = &stamp {
        // A write in the same step of the clock as our own last write would leave no trace, so wait
        // until the step is over.
        let now_ns =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
        if (now_ns - mtime_ns).unsigned_abs() < TIMESTAMP_STEP.as_nanos() {
            std::thread::sleep(TIMESTAMP_STEP);
            stamp = stamp_now(file)?;
        }
    }
    Ok(stamp)
}

/// As [`stamp`], without the wait for the end of the clock's step.
pub(super) fn stamp_now(file: &OwnedFd) -> io::Result<Option<ImageStamp>> {
    let stat = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Ok(None);
    }
    Ok(Some(ImageStamp::File {
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        inode: stat.st_ino,
        mtime_ns: i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec),
    }))
}

/// Why a file as it is now is not as the cache has had it; `None` if nothing indicates that.
fn displaced(
    record: &Ownership,
    identity: &ImageId,
    now: Option<&ImageStamp>,
) -> Option<&'static str> {
    let Some(ImageStamp::File { mtime_ns: then_ns, inode: then_inode, .. }) = &record.taken_at
    else {
        return None;
    };
    let Some(ImageStamp::File { mtime_ns: now_ns, inode: now_inode, .. }) = now else {
        return None;
    };
    if record.image.is_some()
        && sameness(record, identity) == Sameness::Unknown
        && then_inode != now_inode
    {
        return Some("it is another file than this cache has had");
    }
    let why = "it was last written before this cache took it, so that somebody has put it back";
    (now_ns < then_ns).then_some(why)
}

/// Reasons for a released device, if nothing tells whether it was written.
const FREE_TO_WRITE: &str = "others were free to write to the device since this cache's release";
const UNTOLD: &str = "a released device tells nothing about the writes of others";

/// Whether another client has written since the record was made.
pub(crate) fn continuity(located: &Located, cache_uuid: Uuid, file: &OwnedFd) -> Continuity {
    let record = located.record.as_ref();
    if let Some(known) = Continuity::of_record(record, cache_uuid) {
        return known;
    }
    let Some(record) = record else {
        return Continuity::unproven("the image has no ownership record");
    };
    if let Some(then) =
        record.image.as_ref().filter(|_| sameness(record, &located.identity) == Sameness::Different)
    {
        tracing::debug!(then = %then.names(), now = %located.identity.names(), "another image");
        let path = &located.identity.name;
        return Continuity::overwritten(format!(
            "it is another file than this cache has had (if it was only moved: tidepool confirm file:{path})"
        ));
    }
    let now = stamp_now(file);
    if let Some(why) =
        displaced(record, &located.identity, now.as_ref().ok().and_then(Option::as_ref))
    {
        let path = &located.identity.name;
        return Continuity::overwritten(format!(
            "{why} (if it is as it was: tidepool confirm file:{path})"
        ));
    }
    match (&record.taken_from, &record.stamp) {
        (None, _) if record.state == OwnerState::Open => {
            return Continuity::proven(
                "this cache still owns the image, as it did when it was killed",
            );
        }
        // A file without a stamp was served until it was taken over. A device never has a stamp, so
        // nothing is known.
        (Some(host), None) if matches!(now, Ok(Some(_))) => {
            return Continuity::proven(format!("the image is taken over from host {host}"));
        }
        _ => {}
    }
    if let Some(then) = &record.counted {
        // What others have written through the kernel's page cache is counted when it reaches the
        // device.
        let counted = rustix::fs::fdatasync(file).and_then(|()| rustix::fs::fstat(file)).ok();
        return match counted.and_then(|stat| counted::now(stat.st_rdev)) {
            Some(now) if now == *then => Continuity::proven(
                "the kernel has counted no write to the device since this cache's release",
            ),
            Some(now) if now.goes_on_from(then) && !now.has_header_of(then) => {
                Continuity::overwritten(
                    "another client has had the mapped image since this cache's release",
                )
            }
            Some(now) if now.goes_on_from(then) => Continuity::overwritten(
                "the kernel has counted writes to the device since this cache's release",
            ),
            _ if record.state == OwnerState::Clean => Continuity::overwritten(FREE_TO_WRITE),
            _ => Continuity::unproven(UNTOLD),
        };
    }
    match (&record.stamp, now) {
        (Some(then), Ok(Some(now))) if *then == now => {
            Continuity::proven("size and modification time are those of this cache's release")
        }
        (Some(_), Ok(Some(_))) => {
            Continuity::overwritten("size or modification time changed since this cache's release")
        }
        _ if record.state == OwnerState::Clean => Continuity::overwritten(FREE_TO_WRITE),
        _ => Continuity::unproven(UNTOLD),
    }
}
