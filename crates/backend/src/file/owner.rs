//! The ownership record of a file or device: a small file that is replaced atomically under the lock.
//!
//! For a file it stands beside the image as `PATH.tidepool` (symbolic links resolved first). For a
//! block device it stands in [`STATE_DIR`], under a name made of the device's own identity where it
//! has one (WWID, device-mapper uuid, the file of a loop device), else of its kernel name: device
//! nodes come and go.

use crate::TakeOver;
use crate::changes::Change;
use crate::error::BackendError;
use crate::record::{Continuity, ImageStamp, OwnerState, Ownership, RECORD_BYTES_MAX};
use rustix::fs::FileType;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Where the records of block devices are, unless the options say otherwise.
pub(crate) const STATE_DIR: &str = "/var/lib/tidepool";

/// Time stamps of files move in steps of at most this much.
const TIMESTAMP_STEP: Duration = Duration::from_millis(20);

/// The place of an ownership record.
#[derive(Debug, Clone)]
pub(crate) struct Sidecar {
    path: PathBuf,
    /// May be created: the common place for devices, but never a directory of images.
    create_dir: bool,
}

impl Sidecar {
    /// The place for an opened image.
    pub(crate) fn of(path: &Path, file: &OwnedFd, state_dir: Option<&Path>) -> Result<Sidecar, BackendError> {
        let what = path.display();
        let stat = rustix::fs::fstat(file).map_err(|e| BackendError::io(what.to_string(), "stat", e))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            let dir = state_dir.unwrap_or(Path::new(STATE_DIR));
            let name = device_identity(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            return Ok(Sidecar::within(dir, &name));
        }
        let mut name =
            fs::canonicalize(path).map_err(|e| BackendError::io(what, "resolve", e))?.into_os_string();
        name.push(".tidepool");
        Ok(Sidecar { path: name.into(), create_dir: false })
    }

    /// The place in a directory of records, for what has no directory of its own.
    pub(crate) fn within(dir: &Path, name: &str) -> Sidecar {
        Sidecar { path: dir.join(format!("{name}.tidepool")), create_dir: true }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A place beside the record.
    pub(super) fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(suffix);
        name.into()
    }

    /// Makes the record's directory, if it may be made.
    pub(crate) fn make_dir(&self) -> Result<(), BackendError> {
        match self.path.parent() {
            Some(dir) if self.create_dir => fs::create_dir_all(dir).map_err(|e| self.write_error(e)),
            _ => Ok(()),
        }
    }

    /// The record, if there is one.
    pub(crate) fn read(&self) -> Result<Option<Ownership>, BackendError> {
        let what = self.path.display().to_string();
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(BackendError::io(what, "open the ownership record", e)),
        };
        let mut bytes = Vec::new();
        let read = file.take(RECORD_BYTES_MAX as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|e| BackendError::io(&what, "read the ownership record", e))?;
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(BackendError::Record {
                what,
                why: "is too long to be one; move that file away".into(),
            });
        }
        Ownership::from_json(&what, &bytes).map(Some)
    }

    /// Whether the record could be replaced, without doing it.
    pub(crate) fn check_writable(&self) -> Result<(), BackendError> {
        let mut dir = self.directory();
        while self.create_dir && !dir.exists() {
            dir = dir.parent().unwrap_or(Path::new("/"));
        }
        rustix::fs::access(dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|e| self.write_error(e.into()))
    }

    /// Replaces the record; when this returns, the new one is on stable media.
    pub(crate) fn write(&self, record: &Ownership) -> Result<(), BackendError> {
        self.replace(&self.path, &record.to_json()).map_err(|e| self.write_error(e))
    }

    /// Changes the record of the owner, who holds the image's lock. With `unsure` it may be changed already and not on
    /// stable media. Returns it as it is then.
    pub(crate) fn change(
        &self,
        record: &Ownership,
        change: Change,
        unsure: bool,
    ) -> Result<Ownership, BackendError> {
        let changed = match change {
            Change::Disown => record.disowned(),
            Change::Peer(peer) => {
                let found = self.read_own(record)?;
                found.check_peer(&self.path.display().to_string(), peer.as_ref())?;
                if found.peer == peer && !unsure {
                    return Ok(found);
                }
                found.with_peer(peer)
            }
        };
        self.write(&changed).map(|()| changed)
    }

    /// The record, if it is still the owner's.
    pub(crate) fn read_own(&self, record: &Ownership) -> Result<Ownership, BackendError> {
        let fenced = || BackendError::Fenced { what: self.path.display().to_string() };
        self.read()?.filter(|found| found.is_of(record)).ok_or_else(fenced)
    }

    /// Makes the record the peer's who holds the image's lock, see [`crate::take_over`].
    pub(crate) fn take_over(&self, what: &str, how: &TakeOver) -> Result<Ownership, BackendError> {
        let none = || BackendError::NotPeer { what: what.into(), why: "it has no ownership record".into() };
        let record = self.read()?.ok_or_else(none)?.taken_over(what, how)?;
        self.write(&record).map(|()| record)
    }

    fn write_error(&self, e: io::Error) -> BackendError {
        match e.kind() {
            io::ErrorKind::PermissionDenied => BackendError::Denied {
                what: self.path.display().to_string(),
                why: "the ownership record cannot be written there; make its directory writable".into(),
            },
            _ => BackendError::io(self.path.display(), "write the ownership record", e),
        }
    }

    /// Replaces a file beside the record, or the record; when this returns, the new content is on stable media.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if self.create_dir {
            fs::create_dir_all(self.directory())?;
        }
        let mut temporary = path.to_owned().into_os_string();
        temporary.push(".new");
        let temporary = PathBuf::from(temporary);
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        self.sync_directory()
    }

    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// What was created or removed beside the record is on stable media.
    pub(super) fn sync_directory(&self) -> io::Result<()> {
        File::open(self.directory())?.sync_all()
    }
}

/// A name for a block device that survives a reboot where the device offers one.
fn device_identity(major: u32, minor: u32) -> String {
    let sys = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let disk = match fs::read_to_string(sys.join("partition")) {
        Ok(_) => sys.canonicalize().ok().and_then(|p| p.parent().map(Path::to_owned)).unwrap_or(sys.clone()),
        Err(_) => sys.clone(),
    };
    let mut name = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "loop/backing_file"]
        .iter()
        .filter_map(|file| fs::read_to_string(disk.join(file)).ok())
        .map(|text| text.trim().to_owned())
        .find(|text| !text.is_empty())
        .or_else(|| disk.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned))
        .unwrap_or_else(|| format!("{major}-{minor}"));
    if let Ok(partition) = fs::read_to_string(sys.join("partition")) {
        name.push_str("-part");
        name.push_str(partition.trim());
    }
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
        .take(200)
        .collect()
}

/// The attributes that change when somebody writes to a file; `None` for a device, which has none.
pub(super) fn stamp(file: &OwnedFd) -> io::Result<Option<ImageStamp>> {
    let mut stamp = stamp_now(file)?;
    if let Some(ImageStamp::File { mtime_ns, .. }) = &stamp {
        // A write in the same step of the clock as our own last one would leave no trace: let it pass.
        let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
        if (now_ns - mtime_ns).unsigned_abs() < TIMESTAMP_STEP.as_nanos() {
            std::thread::sleep(TIMESTAMP_STEP);
            stamp = stamp_now(file)?;
        }
    }
    Ok(stamp)
}

fn stamp_now(file: &OwnedFd) -> io::Result<Option<ImageStamp>> {
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

/// Whether somebody else wrote since the record was made.
pub(crate) fn continuity(record: Option<&Ownership>, cache_uuid: Uuid, file: &OwnedFd) -> Continuity {
    if let Some(known) = Continuity::of_record(record, cache_uuid) {
        return known;
    }
    let Some(record) = record else { return Continuity::unproven("the image has no ownership record") };
    let now = stamp_now(file);
    match (&record.taken_from, &record.stamp) {
        (None, _) if record.state == OwnerState::Open => {
            return Continuity::proven("this cache still owns the image, as it did when it was killed");
        }
        // It was served to the end. Of a device nobody knows whether it was.
        (Some(host), None) if matches!(now, Ok(Some(_))) => {
            return Continuity::proven(format!("the image is taken over from host {host}"));
        }
        _ => {}
    }
    match (&record.stamp, now) {
        (Some(then), Ok(Some(now))) if *then == now => {
            Continuity::proven("size and modification time are those of this cache's release")
        }
        (Some(_), Ok(Some(_))) => {
            Continuity::overwritten("size or modification time changed since this cache's release")
        }
        _ if record.state == OwnerState::Clean => {
            Continuity::overwritten("others were free to write to the device since this cache's release")
        }
        _ => Continuity::unproven("a released device tells nothing about the writes of others"),
    }
}
