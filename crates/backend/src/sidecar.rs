//! An ownership record as a file of this host. It is replaced atomically, by the process that holds
//! the image's lock. The redo of an image stands beside it.

mod shelf;

use crate::api::TakeOver;
use crate::changes::Change;
use crate::error::BackendError;
use crate::flock;
use crate::private::open_private;
use crate::record::{OwnerState, Ownership, RECORD_BYTES_MAX};
use crate::report::Seen;
use rustix::fs::{CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub(crate) use shelf::FileShelf;

/// Extensions of the names of records and of their locks.
pub(crate) const SUFFIX: &str = "tidepool";
const LOCK_SUFFIX: &str = "lock";

/// Directory of the records of block devices and exports, unless the options name another one.
const STATE_DIR: &str = "/var/lib/tidepool";

/// The directory of the records of block devices and exports.
pub(crate) fn state_dir(asked: Option<&Path>) -> &Path {
    asked.unwrap_or(Path::new(STATE_DIR))
}

/// The entries of a directory; none if it does not exist. `what` names the action in errors.
pub(crate) fn files(dir: &Path, what: &'static str) -> Result<Vec<PathBuf>, BackendError> {
    let failed = |e| BackendError::io(dir.display(), what, e);
    match fs::read_dir(dir) {
        Ok(entries) => {
            entries.map(|entry| entry.map(|entry| entry.path()).map_err(failed)).collect()
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
    }
}

/// Suffix of the file that holds the next record until it replaces the last one.
const SPARE: &str = ".new";

/// How the file of a lock is opened.
const LOCK_ACCESS: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Space that is reserved for the next record, in bytes: one block of a file system.
const ROOM_BYTES: u64 = 4096;

/// The place of an ownership record.
#[derive(Debug, Clone)]
pub(crate) struct Sidecar {
    path: PathBuf,
    /// It is in the common directory for devices and exports, which may be created; a directory of
    /// images is never created.
    common: bool,
}

/// The lock that goes with an image's record. It is released when it is dropped.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

impl Drop for Lock {
    fn drop(&mut self) {
        flock::unlock(&self.0);
    }
}

impl Sidecar {
    /// The place of a record in the common directory, for an image that has no directory of its
    /// own.
    pub(crate) fn within(dir: &Path, name: &str) -> Sidecar {
        Sidecar::among_others(dir.join(format!("{name}.{SUFFIX}")))
    }

    /// The place of the file at `path` in the common directory.
    pub(crate) fn among_others(path: PathBuf) -> Sidecar {
        Sidecar { path, common: true }
    }

    /// The place beside an image.
    pub(crate) fn of_image(image: PathBuf) -> Sidecar {
        let mut path = image.into_os_string();
        path.push(".");
        path.push(SUFFIX);
        Sidecar { path: path.into(), common: false }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is in the common directory, and not beside the image.
    pub(crate) fn is_among_others(&self) -> bool {
        self.common
    }

    /// Takes the lock that goes with a record in the common directory: shared to read, exclusive to
    /// write. `what` names the image, which may be reached in several ways. A reader that can
    /// neither open nor create the lock's file continues without a lock: it could not see the lock
    /// of a writer either. A record beside its image has no lock, because the image's own lock
    /// suffices.
    pub(crate) fn lock(&self, what: &str, read_only: bool) -> Result<Option<Lock>, BackendError> {
        if !self.common {
            return Ok(None);
        }
        match self.lock_file(!read_only) {
            Ok(file) => flock::lock(what, &file, read_only).map(|()| Some(Lock(file))),
            Err(_) if read_only => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Checks whether the lock is free, and leaves no trace. Fails where [`Sidecar::lock`] would.
    pub(crate) fn check_lock(&self, what: &str, read_only: bool) -> Result<Seen, BackendError> {
        if !self.common {
            return Ok(Seen::Free);
        }
        match rustix::fs::open(self.lock_path(), LOCK_ACCESS, Mode::empty()) {
            Ok(file) => {
                flock::lock(what, &file, read_only).map(|()| drop(Lock(file))).map(|()| Seen::Free)
            }
            // An open makes the file.
            Err(Errno::NOENT) => Ok(Seen::Free),
            Err(e) if read_only => Ok(Seen::Nothing(format!(
                "not known: {} cannot be opened ({e}); it is read without a lock, also while another process writes",
                self.lock_path().display()
            ))),
            Err(e) => Err(self.lock_error(e)),
        }
    }

    /// Fails if the lock's file could not be opened.
    pub(crate) fn check_lock_file(&self) -> Result<(), BackendError> {
        match rustix::fs::open(self.lock_path(), LOCK_ACCESS, Mode::empty()) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(self.lock_error(e)),
        }
    }

    /// Whether another process is seen to hold the lock.
    pub(crate) fn is_locked(&self, what: &str) -> bool {
        matches!(self.check_lock(what, false), Err(BackendError::Locked { .. }))
    }

    /// Takes the lock when its holder releases it. For locks that are held for a moment only.
    pub(crate) fn wait_for_lock(&self) -> Result<Lock, BackendError> {
        let file = self.lock_file(true)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(|e| BackendError::io(self.lock_path().display(), "lock", e))?;
        Ok(Lock(file))
    }

    fn lock_path(&self) -> PathBuf {
        self.path.with_extension(LOCK_SUFFIX)
    }

    fn lock_file(&self, make_dir: bool) -> Result<OwnedFd, BackendError> {
        if make_dir {
            self.make_dir()?;
        }
        let path = self.lock_path();
        // A process that can read the file could hold the lock, so only its owner may read it. The
        // file is not replaced, because a process may hold its lock.
        let own = Mode::RUSR | Mode::WUSR;
        let open = || rustix::fs::open(&path, LOCK_ACCESS, Mode::empty());
        let make = || rustix::fs::open(&path, LOCK_ACCESS | OFlags::CREATE | OFlags::EXCL, own);
        let file = match open() {
            Err(Errno::NOENT) => match make() {
                Err(Errno::EXIST) => open(),
                made => made,
            },
            found => found.inspect(|file| {
                // An earlier release has made the file readable for all users. This fails if the
                // file is another user's.
                let _ = rustix::fs::fchmod(file, own);
            }),
        };
        file.map_err(|e| self.lock_error(e))
    }

    fn lock_error(&self, e: Errno) -> BackendError {
        BackendError::io(self.lock_path().display(), "open the lock file", e)
    }

    /// A path beside the record: that of the record with a suffix.
    pub(crate) fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(suffix);
        name.into()
    }

    /// Creates the record's directory, if it may be created.
    pub(crate) fn make_dir(&self) -> Result<(), BackendError> {
        match self.path.parent() {
            Some(dir) if self.common => fs::create_dir_all(dir).map_err(|e| self.write_error(e)),
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
        while self.common && !dir.exists() {
            dir = dir.parent().unwrap_or(Path::new("/"));
        }
        rustix::fs::access(dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|e| self.write_error(e.into()))
    }

    /// Replaces the record; when this returns, the new one is on stable media.
    pub(crate) fn write(&self, record: &Ownership) -> Result<(), BackendError> {
        self.replace(&self.path, &record.to_json()).map_err(|e| self.write_error(e))?;
        if record.state == OwnerState::Clean {
            // The image has no owner now: only the files that it needs are left there.
            let _ = fs::remove_file(self.beside(SPARE));
        }
        Ok(())
    }

    /// Changes the record of the owner, which holds the image's lock. With `unsure` the record may
    /// have this change already, but not on stable media. Returns the record as it is afterwards.
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

    /// Makes the record the peer's. The caller holds the image's lock; see [`crate::take_over`].
    pub(crate) fn take_over(&self, what: &str, how: &TakeOver) -> Result<Ownership, BackendError> {
        let none = || BackendError::NotPeer {
            what: what.into(),
            why: "it has no ownership record".into(),
        };
        let record = self.read()?.ok_or_else(none)?.taken_over(what, how)?;
        self.write(&record).map(|()| record)
    }

    fn write_error(&self, e: io::Error) -> BackendError {
        match e.kind() {
            io::ErrorKind::PermissionDenied => BackendError::Denied {
                what: self.path.display().to_string(),
                why: "the ownership record cannot be written there; make its directory writable"
                    .into(),
            },
            _ => BackendError::io(self.path.display(), "write the ownership record", e),
        }
    }

    /// Replaces a file beside the record, or the record; when this returns, the new content is on
    /// stable media.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if self.common {
            fs::create_dir_all(self.directory())?;
        }
        let mut spare = path.to_owned().into_os_string();
        spare.push(SPARE);
        let spare = PathBuf::from(spare);
        // The spare file stays, with the space that it occupies: a full file system would have none
        // for the next record.
        let mut file = open_private(&spare)?;
        file.write_all(bytes)?;
        file.set_len(bytes.len() as u64)?;
        file.sync_all()?;
        if renameat_with(CWD, &spare, CWD, path, RenameFlags::EXCHANGE).is_err() {
            // There is no record yet, or this file system cannot exchange files.
            fs::rename(&spare, path)?;
            keep_room(&spare);
        }
        self.sync_directory()
    }

    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// What is in the record's directory.
    pub(crate) fn entries(&self) -> io::Result<fs::ReadDir> {
        fs::read_dir(self.directory())
    }

    /// Makes durable what was created or removed beside the record.
    pub(crate) fn sync_directory(&self) -> io::Result<()> {
        File::open(self.directory())?.sync_all()
    }
}

/// Reserves space for the next record, if there is any.
fn keep_room(spare: &Path) {
    let taken = open_private(spare).and_then(|file| {
        file.set_len(0)?;
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, ROOM_BYTES)?;
        file.sync_all()
    });
    if let Err(error) = taken {
        tracing::debug!(spare = %spare.display(), %error, "no room is kept for the next record");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_nobody_can_see_is_not_told_to_be_free() {
        let dir = tempfile::tempdir().expect("a directory");
        let sidecar = Sidecar::within(dir.path(), "x");
        assert_eq!(sidecar.check_lock("x", false).expect("no file"), Seen::Free);
        assert!(!sidecar.lock_path().exists(), "a check leaves no trace");
        let held = sidecar.lock("x", false).expect("free");
        assert!(matches!(sidecar.check_lock("x", false), Err(BackendError::Locked { .. })));
        assert!(sidecar.is_locked("x"));
        drop(held);
        assert_eq!(sidecar.check_lock("x", false).expect("free again"), Seen::Free);
        // Root may open every file, but nobody follows a link there.
        fs::remove_file(sidecar.lock_path()).expect("removed");
        std::os::unix::fs::symlink("elsewhere", sidecar.lock_path()).expect("a link");
        let told = sidecar.check_lock("x", false).expect_err("an open fails, too").to_string();
        assert!(told.contains("open the lock file"), "{told}");
        assert_eq!(sidecar.lock("x", false).map(drop).expect_err("it does").to_string(), told);
        assert!(!sidecar.is_locked("x"), "nobody is seen to hold it");
        let Ok(Seen::Nothing(why)) = sidecar.check_lock("x", true) else {
            panic!("a reader sees nothing")
        };
        assert!(why.contains("not known") && why.contains("x.lock"), "{why}");
        assert!(sidecar.lock("x", true).expect("it reads nevertheless").is_none());
    }
}
