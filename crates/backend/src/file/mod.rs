//! `file:`: a file or a block device.
//!
//! The image is opened once. The exclusive `flock` is on the open file description that does the
//! I/O. A process that is killed keeps this lock until the kernel has finished its requests, so
//! that no late write of a former owner arrives after the next owner has the lock.
//!
//! O_DIRECT is used where 512-byte transfers work with it. Otherwise the page cache is used (tmpfs,
//! devices with 4 KiB sectors).

mod check;
mod counted;
mod holes;
mod mapped;
mod owner;
mod redo;
mod ring;
mod same;
mod sidecar;
mod transport;

use crate::backend::{Backend, Layout, OpenOptions, Opened, Release, TakeOver, Transfer};
use crate::changes::{Change, Changes};
use crate::error::BackendError;
use crate::mailbox;
use crate::record::{Continuity, OwnerState, Ownership, Peer};
use crate::recover::Remains;
use crate::redo::{self as group_redo, Shelf, Writer};
use owner::Located;
pub(crate) use redo::FileShelf;
use ring::Ring;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use tidepool_engine::api::{IoError, SECTOR_BYTES};
use tidepool_engine::mem::AlignedBuf;
use uuid::Uuid;

pub(crate) use check::{check, describe};
pub(crate) use counted::Counted;
pub(crate) use same::ImageId;
pub(crate) use sidecar::{Lock, Seen, Sidecar, files, state_dir};

/// Longest wait of an open for a lock holder that has died with requests in flight.
const DYING_WAIT: Duration = Duration::from_secs(30);
/// Longest wait of an open for a lock holder that the system does not list, and for a busy device.
const UNLISTED_WAIT: Duration = Duration::from_secs(1);
/// How long a close waits before it looks again whether anything is in flight, in milliseconds: an
/// event may be lost.
const QUIESCE_POLL_MS: u32 = 20;
/// Pause before a lock or a device is tried again.
const DYING_POLL: Duration = Duration::from_millis(20);

/// How a file is accessed, beside [`OpenOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caching {
    /// Without the page cache where possible; a flush reaches stable media.
    Direct,
    /// With the page cache, and a flush completes at once: the file plays a pool whose writes are
    /// durable when they complete.
    Played,
}

struct FileBackend {
    what: String,
    ring: Ring,
    size_bytes: u64,
    read_only: bool,
    caching: Caching,
    /// The record, which is written again at the release; `None` when read-only.
    ownership: Option<(Sidecar, Ownership)>,
    changes: Changes,
    /// Receives the outcome of a change of the record. The change is made on a thread of its own,
    /// because it waits for stable media.
    changing: Option<Receiver<Result<Ownership, BackendError>>>,
    resizing: Option<Resizing>,
    /// Writes the redo; `None` where the cache does not drain in groups.
    redo: Option<Writer>,
    /// Dropped last: it also excludes processes that reach the image in another way.
    record_lock: Option<Lock>,
}

/// A change of the size; it also is made on a thread of its own.
struct Resizing {
    token: u64,
    size_bytes: u64,
    outcome: Receiver<io::Result<()>>,
}

/// Opens a file or block device. `prepare` makes what the caller needs besides the backend, given
/// the backend's event descriptor. The ownership is taken after `prepare` and after the lock, so
/// that their failure leaves no ownership behind. Only the redo is set up or removed after that; if
/// that fails, an image that was free is free again.
pub(crate) fn open<T>(
    path: &Path,
    options: &OpenOptions,
    caching: Caching,
    prepare: impl FnOnce(RawFd) -> Result<T, BackendError>,
) -> Result<(Opened, T), BackendError> {
    let image = Image::open(path, options.read_only, caching)?;
    let notes = image.open_to_others(path).into_iter().collect();
    let Image { what, file, size_bytes, .. } = image;
    let mut backend = FileBackend {
        ring: Ring::new(file, size_bytes).map_err(|e| BackendError::io(&what, "set up io_uring", e))?,
        what,
        size_bytes,
        read_only: options.read_only,
        caching,
        ownership: None,
        changes: Changes::default(),
        changing: None,
        resizing: None,
        redo: None,
        record_lock: None,
    };
    let prepared = prepare(backend.ring.event_fd())?;
    // Dropping the backend releases the lock.
    lock(&backend.what, backend.ring.file(), options.read_only)?;
    let Taken { ownership, generation, continuity, lock, was_free } =
        take(&backend.what, backend.ring.file(), path, options)?;
    backend.record_lock = lock;
    backend.ownership = ownership;
    if let Err(error) = backend.start_redo(options) {
        // What this cache has of an image that was its own stays its own.
        if was_free && !options.dirty {
            backend.give_back();
        }
        return Err(error);
    }
    // Where the image is opened for reading only, other processes may write what is a hole now.
    let own = match options.read_only {
        true => None,
        false => holes::own_objects(backend.ring.file(), size_bytes, caching),
    };
    let opened = Opened {
        backend: Box::new(backend),
        generation,
        keep_clean: continuity.proven,
        reason: continuity.reason,
        layout: Layout { own, parent: None },
        snapshot: None,
        notes,
    };
    Ok((opened, prepared))
}

/// A locked image whose ownership was taken; without ownership when read-only.
struct Taken {
    ownership: Option<(Sidecar, Ownership)>,
    generation: u64,
    continuity: Continuity,
    lock: Option<Lock>,
    /// No cache had anything of the image that the image lacked.
    was_free: bool,
}

/// Checks and takes the ownership of a locked image.
fn take(what: &str, file: &OwnedFd, path: &Path, options: &OpenOptions) -> Result<Taken, BackendError> {
    let (located, _turn) = match options.read_only {
        true => (Located::of(path, file, options.state_dir.as_deref())?, None),
        false => Located::in_turn(path, file, options.state_dir.as_deref())?,
    };
    let Located { sidecar, record, .. } = &located;
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    located.check_recognised(what, options)?;
    // The lock is taken before the record is relied on: without the lock the record may change.
    let lock = match record.is_none() && options.read_only {
        true => None,
        false => sidecar.lock(what, options.read_only)?,
    };
    let continuity = check_located(what, &located, file, options)?;
    if options.read_only {
        let continuity = Continuity::unproven("the image is opened read-only, without ownership");
        return Ok(Taken { ownership: None, generation: 0, continuity, lock, was_free: false });
    }
    located.warn_of_others(what, cache_uuid);
    let Located { sidecar, record, identity, .. } = located;
    let was_free = record.as_ref().is_none_or(|record| record.state == OwnerState::Clean);
    let taken_at = owner::stamp_now(file).map_err(|e| BackendError::io(what, "stat", e))?;
    let record = Ownership { image: Some(identity), taken_at, ..Ownership::taken(record.as_ref(), options) };
    // A kill may have come before the last exchange of files was on stable media: the file that is
    // overwritten next must not be the record.
    let _ = sidecar.sync_directory();
    sidecar.write(&record)?;
    let generation = record.generation;
    Ok(Taken { ownership: Some((sidecar, record)), generation, continuity, lock, was_free })
}

/// Refuses an open by what the record, the redo and the state of the image say against it. Returns
/// what is known about writes of others. The check of an image asks no less.
fn check_located(
    what: &str,
    located: &Located,
    file: &OwnedFd,
    options: &OpenOptions,
) -> Result<Continuity, BackendError> {
    let Located { sidecar, record, .. } = located;
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    if let Some(record) = record {
        record.check(what, options)?;
    }
    if !options.read_only {
        group_redo::check_version(what, &FileShelf::new(sidecar))?;
    }
    let continuity = owner::continuity(located, cache_uuid, file).of_generation(record.as_ref(), options);
    continuity.check_dirty(what, options)?;
    if let (Some(sequence), Some(record)) = (options.sequence, record.as_ref())
        && record.cache_uuid == cache_uuid
    {
        group_redo::check_cache(what, &FileShelf::new(sidecar), record, sequence)?;
    }
    Ok(continuity)
}

/// Gives up what a lost cache holds; see [`crate::abandon`].
pub(crate) fn abandon(path: &Path, state_dir: Option<&Path>) -> Result<Option<Ownership>, BackendError> {
    let image = Image::open(path, false, Caching::Direct)?;
    image.lock(false)?;
    let (Located { sidecar, record, .. }, _turn) = Located::in_turn(path, &image.file, state_dir)?;
    let Some(before) = record.filter(|record| record.state != OwnerState::Clean) else {
        return Ok(None);
    };
    let _lock = sidecar.lock(&image.what, false)?;
    group_redo::clear(&image.what, &FileShelf::new(&sidecar), before.generation)?;
    sidecar.write(&before.abandoned())?;
    image.unlock();
    Ok(Some(before))
}

/// Records which record belongs to the image; see [`crate::confirm`].
pub(crate) fn confirm(
    path: &Path,
    state_dir: Option<&Path>,
    record: Option<&Path>,
) -> Result<Ownership, BackendError> {
    let image = Image::open(path, false, Caching::Direct)?;
    image.lock(false)?;
    let confirmed = Located::in_turn(path, &image.file, state_dir)
        .and_then(|(located, _turn)| located.confirm(&image.what, &image.file, record));
    image.unlock();
    confirmed
}

/// Makes an image the peer's; see [`crate::take_over`]. A lock is no fence: the owner must have
/// released it.
pub(crate) fn take_over(path: &Path, how: &TakeOver) -> Result<Ownership, BackendError> {
    let image = Image::open(path, false, Caching::Direct)?;
    image.lock(false)?;
    let located = Located::in_turn(path, &image.file, how.state_dir.as_deref());
    let taken = located.and_then(|(Located { sidecar, .. }, _turn)| {
        let _lock = sidecar.lock(&image.what, false)?;
        group_redo::check_version(&image.what, &FileShelf::new(&sidecar))?;
        sidecar.take_over(&image.what, how)
    });
    image.unlock();
    taken
}

/// An image's name in messages, its ownership record, and the place of its redo.
pub(crate) fn look(path: &Path, state_dir: Option<&Path>) -> Result<Remains, BackendError> {
    let image = Image::open(path, true, Caching::Direct)?;
    let Located { sidecar, record, .. } = Located::of(path, &image.file, state_dir)?;
    Ok((image.what, record, Box::new(FileShelf::new(&sidecar))))
}

/// An opened image before it is used as a backend.
pub(crate) struct Image {
    pub(crate) what: String,
    pub(crate) file: OwnedFd,
    pub(crate) size_bytes: u64,
    /// Opened with O_DIRECT.
    pub(crate) direct: bool,
}

impl Image {
    /// What users of this host other than the file's owner could do with the image, in one line.
    /// `None` if they cannot open the file, or cannot enter its directory.
    fn open_to_others(&self, path: &Path) -> Option<String> {
        let stat = rustix::fs::fstat(&self.file).ok()?;
        let (is_file, mode) = (
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
            Mode::from_raw_mode(stat.st_mode),
        );
        let directory = path.parent().and_then(|directory| rustix::fs::stat(directory).ok())?;
        let is_entered = Mode::from_raw_mode(directory.st_mode).intersects(Mode::XGRP | Mode::XOTH);
        let others = Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        (is_file && is_entered && mode.intersects(others)).then(|| {
            format!(
                "other users may open {} (mode {:03o}): they can read it, and keep it from being served by taking its lock; chmod 600",
                self.what,
                mode.as_raw_mode() & 0o777
            )
        })
    }

    /// Opens the image and checks that it can be served.
    pub(crate) fn open(path: &Path, read_only: bool, caching: Caching) -> Result<Image, BackendError> {
        let what = path.display().to_string();
        let failed = |e: rustix::io::Errno| open_error(&what, path, read_only, e.into());
        // The kind decides the flags; opening a FIFO or a tape would have effects of its own.
        let kind = FileType::from_raw_mode(rustix::fs::stat(path).map_err(failed)?.st_mode);
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let exclusive = match kind {
            FileType::RegularFile => OFlags::empty(),
            // On a device, O_EXCL fails if the device is mounted or claimed.
            FileType::BlockDevice if read_only => OFlags::empty(),
            FileType::BlockDevice => OFlags::EXCL,
            FileType::Directory => return Err(unfit(&what, "a directory; name a file or a block device")),
            _ => return Err(unfit(&what, "neither a file nor a block device")),
        };
        let flags = access | exclusive | OFlags::CLOEXEC;
        let direct = || match caching {
            Caching::Direct => open_direct(path, flags),
            Caching::Played => None,
        };
        let open = || match direct() {
            Some(file) => Ok((file, true)),
            None => rustix::fs::open(path, flags, Mode::empty()).map(|file| (file, false)),
        };
        let start = Instant::now();
        let (file, direct) = loop {
            match open() {
                // The kernel releases a device a moment after the process that used it has ended or
                // closed it.
                Err(rustix::io::Errno::BUSY) if start.elapsed() < UNLISTED_WAIT => {
                    std::thread::sleep(DYING_POLL);
                }
                outcome => break outcome.map_err(failed)?,
            }
        };
        if !rustix::fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == kind) {
            return Err(replaced(&what));
        }
        let size_bytes =
            size_of(&file, kind).map_err(|e| BackendError::io(&what, "read the size of the image", e))?;
        if size_bytes == 0 {
            return Err(unfit(&what, "empty; give it a size first (truncate -s SIZE)"));
        }
        if !size_bytes.is_multiple_of(SECTOR_BYTES as u64) {
            let why = format!(
                "its size of {size_bytes} bytes is no multiple of {SECTOR_BYTES}; enlarge it with truncate"
            );
            return Err(BackendError::Unsupported { what, why });
        }
        Ok(Image { what, file, size_bytes, direct })
    }

    /// Takes the lock, see [`lock`].
    pub(crate) fn lock(&self, read_only: bool) -> Result<(), BackendError> {
        lock(&self.what, &self.file, read_only)
    }

    /// Releases the lock. Closing the file would do that only if nothing else, not even the kernel
    /// for a moment, refers to the same open file description.
    pub(crate) fn unlock(&self) {
        unlock(&self.file);
    }
}

/// Takes the lock: shared to read, exclusive to write. Waits for a holder that has died.
pub(crate) fn lock(what: &str, file: &OwnedFd, read_only: bool) -> Result<(), BackendError> {
    let start = Instant::now();
    loop {
        let holder = match try_lock(what, file, read_only)? {
            None => return Ok(()),
            Some(holder) => holder,
        };
        let (dying, wait) = match holder {
            Some(pid) => (!Path::new(&format!("/proc/{pid}")).exists(), DYING_WAIT),
            // A holder that is not listed may just have released the lock.
            None => (true, UNLISTED_WAIT),
        };
        if !dying || start.elapsed() > wait {
            let who = match holder {
                Some(pid) if dying => format!("process {pid} died and its last requests do not complete"),
                Some(pid) => format!("process {pid}{} holds its lock; stop that first", command_of(pid)),
                None => "another process holds its lock; stop that first".into(),
            };
            return Err(BackendError::Locked { what: what.into(), holder: who });
        }
        std::thread::sleep(DYING_POLL);
    }
}

/// `None` when the lock was taken, otherwise the process that holds it, as far as known.
fn try_lock(what: &str, file: &OwnedFd, read_only: bool) -> Result<Option<Option<u32>>, BackendError> {
    let operation = match read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(Some(lock_holder(file))),
        Err(e) => Err(BackendError::io(what, "lock", e)),
    }
}

/// Releases the lock, see [`Image::unlock`].
pub(crate) fn unlock(file: &OwnedFd) {
    // Without a lock there is nothing to release.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// The error for an image that has been replaced since it was opened.
fn replaced(what: &str) -> BackendError {
    let why = "it was replaced while it was being opened; try again".into();
    BackendError::Unavailable { what: what.into(), why }
}

fn unfit(what: &str, why: &str) -> BackendError {
    BackendError::Unsupported { what: what.into(), why: why.into() }
}

fn open_error(what: &str, path: &Path, read_only: bool, e: io::Error) -> BackendError {
    let what = what.to_owned();
    match e.raw_os_error() {
        Some(libc::ENOENT) => {
            let why = "no such file; create it first (truncate -s SIZE)".into();
            BackendError::NotFound { what, why }
        }
        Some(libc::EACCES | libc::EPERM) => {
            let right = if read_only { "read" } else { "read and write" };
            let user = rustix::process::geteuid().as_raw();
            BackendError::Denied {
                what,
                why: format!("user id {user} may not {right} it; change its owner or mode"),
            }
        }
        Some(libc::EBUSY) => {
            let holder = "the device is mounted or used by the kernel (see lsblk); release it first".into();
            BackendError::Locked { what, holder }
        }
        Some(libc::EROFS) => {
            BackendError::Denied { what, why: "its file system or device is read-only".into() }
        }
        _ => BackendError::io(path.display(), "open", e),
    }
}

/// Opens with O_DIRECT and proves with a read that 512-byte transfers work; `None` when they do
/// not.
fn open_direct(path: &Path, flags: OFlags) -> Option<OwnedFd> {
    let file = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()).ok()?;
    let mut probe = AlignedBuf::zeroed(2 * SECTOR_BYTES);
    rustix::io::pread(&file, &mut probe[SECTOR_BYTES..], SECTOR_BYTES as u64).ok()?;
    Some(file)
}

/// Sets the size of a file. The size of a device is not changed here: an operator may have changed
/// it before. `ENOSPC` if the device is smaller than `size_bytes`.
fn set_size(file: &OwnedFd, size_bytes: u64) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    if kind == FileType::RegularFile {
        rustix::fs::ftruncate(file, size_bytes)?;
        return Ok(rustix::fs::fsync(file)?);
    }
    match size_of(file, kind)? < size_bytes {
        true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        false => Ok(()),
    }
}

fn size_of(file: &OwnedFd, kind: FileType) -> io::Result<u64> {
    if kind == FileType::BlockDevice {
        return Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}

/// The process that holds a conflicting flock, from `/proc/locks`.
fn lock_holder(file: &OwnedFd) -> Option<u32> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let inode = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip_while(|field| *field != "FLOCK").skip(3);
        let pid = fields.next()?.parse().ok()?;
        (fields.next()? == inode && !line.contains("->")).then_some(pid)
    })
}

fn command_of(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!(" ({})", name.trim()),
        Err(_) => String::new(),
    }
}

impl FileBackend {
    /// Starts the writer of the redo, or removes a redo where the cache does not drain in groups.
    fn start_redo(&mut self, options: &OpenOptions) -> Result<(), BackendError> {
        let Some((sidecar, record)) = &self.ownership else { return Ok(()) };
        let (shelf, generation): (Arc<dyn Shelf>, u64) =
            (Arc::new(FileShelf::new(sidecar)), record.generation);
        if !options.grouped {
            return group_redo::clear(&self.what, &*shelf, generation);
        }
        let event = self.ring.event().map_err(|e| BackendError::io(&self.what, "open", e))?;
        let wake = move || mailbox::signal(&event);
        let uuid = record.cache_uuid;
        self.redo = Some(Writer::start(&self.what, shelf, generation, uuid, options.dirty, wake)?);
        Ok(())
    }

    /// Releases an image that was free before this open, of which the cache has nothing. If that
    /// fails, the image stays this cache's, as after a kill: the next open by this cache takes it.
    fn give_back(self) {
        let what = self.what.clone();
        if let Err(error) = Box::new(self).close(Release { clean: true, cache_failed: false }) {
            tracing::warn!(
                image = %what,
                "it is this cache's although it could not be opened: {error}; open it with this cache again, or free it: tidepool \
                 recover URI --accept-loss"
            );
        }
    }

    /// Queues a change of the record, and starts it if no other change is being made.
    fn order_change(&mut self, token: u64, change: Change) {
        self.changes.order(token, change);
        self.start_change();
    }

    /// Starts the next change of the record, if none is being made.
    fn start_change(&mut self) {
        let Some((sidecar, record)) = &self.ownership else { return };
        if let Some(change) = self.changes.start(record) {
            let (sidecar, record, unsure) = (sidecar.clone(), record.clone(), self.changes.is_unsure());
            let (sender, outcome) = sync_channel(1);
            let started = self.ring.event().and_then(|event| {
                let work = move || {
                    // The receiver stays until this is sent: dropping the backend waits for it.
                    let _ = sender.send(sidecar.change(&record, change, unsure));
                    mailbox::signal(&event);
                };
                std::thread::Builder::new().name("record".into()).spawn(work)
            });
            match started {
                Ok(_) => self.changing = Some(outcome),
                Err(_) => self.changes.finish(Err(IoError::Errno(libc::EAGAIN)), false),
            }
        }
        if self.changes.has_ended() {
            self.ring.wake();
        }
    }

    /// Takes the outcome of a change of the record, if there is one, and reports the changes that
    /// have ended.
    fn changed(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let outcome = self.changing.as_ref().and_then(|changing| changing.try_recv().ok());
        if let Some(outcome) = outcome {
            self.changing = None;
            let result = outcome.map_err(|error| {
                tracing::warn!("{error}");
                error.errno()
            });
            let result = result.map(|record| {
                self.ownership = self.ownership.take().map(|(sidecar, _)| (sidecar, record));
            });
            self.changes.finish(result, true);
        }
        self.changes.completions(done);
        if !self.changes.is_idle() && !self.changes.is_running() {
            self.start_change();
        }
    }

    /// Gives the image another size, on a thread of its own: the calling thread does not wait for
    /// the file system.
    fn resize(&mut self, token: u64, size_bytes: u64) {
        let (sender, outcome) = sync_channel(1);
        let started = self.ring.event().and_then(|event| {
            let file = self.ring.file().try_clone()?;
            let work = move || {
                // The receiver stays until this is sent: dropping the backend waits for it.
                let _ = sender.send(set_size(&file, size_bytes));
                mailbox::signal(&event);
            };
            std::thread::Builder::new().name("resize".into()).spawn(work)
        });
        match started {
            Ok(_) => self.resizing = Some(Resizing { token, size_bytes, outcome }),
            Err(_) => self.ring.complete(token, Err(IoError::Errno(libc::EAGAIN))),
        }
    }

    /// Takes the outcome of a resize, if there is one.
    fn resized(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let Some(resizing) = &self.resizing else { return };
        let Ok(result) = resizing.outcome.try_recv() else { return };
        let (token, size_bytes) = (resizing.token, resizing.size_bytes);
        self.resizing = None;
        if result.is_ok() {
            self.size_bytes = size_bytes;
            self.ring.set_size(size_bytes);
        }
        done(token, result.map_err(|e| IoError::Errno(e.raw_os_error().unwrap_or(libc::EIO))));
    }

    /// Waits until nothing is in flight, and drops the outcomes.
    fn quiesce(&mut self) {
        self.ring.quiesce();
        while !self.changes.is_idle()
            || self.resizing.is_some()
            || self.redo.as_ref().is_some_and(|redo| redo.in_flight() > 0)
        {
            self.completions(&mut |_, _| {});
            mailbox::wait_readable(self.ring.event_fd(), QUIESCE_POLL_MS);
        }
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        // The lock must be held until a change of the record has ended.
        self.quiesce();
        unlock(self.ring.file());
    }
}

impl Backend for FileBackend {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        match transfer {
            Transfer::Disown if self.ownership.is_none() => self.ring.complete(token, Ok(())),
            Transfer::Disown => self.order_change(token, Change::Disown),
            Transfer::Resize { .. } if self.read_only => {
                self.ring.complete(token, Err(IoError::Errno(libc::EROFS)));
            }
            Transfer::Resize { size_bytes } => self.resize(token, size_bytes),
            // Files have no snapshots.
            Transfer::Snapshot { .. } => self.ring.complete(token, Err(IoError::Errno(libc::ENOTSUP))),
            _ if transfer.is_redo() => match &mut self.redo {
                Some(redo) => redo.submit(token, transfer),
                None => self.ring.complete(token, Err(IoError::Errno(libc::ENOTSUP))),
            },
            Transfer::Flush if self.read_only || self.caching == Caching::Played => {
                self.ring.complete(token, Ok(()))
            }
            Transfer::Write { .. } | Transfer::Discard { .. } | Transfer::WriteZeroes { .. }
                if self.read_only =>
            {
                self.ring.complete(token, Err(IoError::Errno(libc::EROFS)));
            }
            // SAFETY: the caller's promise is passed on.
            _ => unsafe { self.ring.submit(token, transfer) },
        }
    }

    fn set_peer(&mut self, token: u64, peer: Option<Peer>) {
        if self.ownership.is_some() {
            return self.order_change(token, Change::Peer(peer));
        }
        self.changes.refuse(token, IoError::Errno(libc::EROFS));
        self.ring.wake();
    }

    fn event_fd(&self) -> RawFd {
        self.ring.event_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        self.ring.completions(done);
        self.changed(done);
        self.resized(done);
        if let Some(redo) = &mut self.redo {
            redo.completions(done);
        }
    }

    fn attachment(&self) -> Vec<u8> {
        Vec::new()
    }

    fn close(mut self: Box<Self>, how: Release) -> Result<(), BackendError> {
        self.quiesce();
        let Some((sidecar, mut record)) = self.ownership.take() else { return Ok(()) };
        if self.changes.is_unsure()
            && let Some(found) = sidecar.read()?.filter(|found| found.is_of(&record))
        {
            record = record.with_peer(found.peer);
        }
        let file = self.ring.file().as_fd();
        rustix::fs::fdatasync(file).map_err(|e| BackendError::io(&self.what, "flush", e))?;
        self.redo = None;
        if how.clean {
            group_redo::clear(&self.what, &FileShelf::new(&sidecar), record.generation)?;
        }
        let stamp = owner::stamp(self.ring.file()).map_err(|e| BackendError::io(&self.what, "stat", e))?;
        let mut released = record.released(how, stamp);
        if released.superseded.is_none() && released.stamp.is_none() {
            let device =
                rustix::fs::fstat(file).map_err(|e| BackendError::io(&self.what, "stat", e))?.st_rdev;
            released.counted = counted::now(device);
        }
        // The lock is released with the backend, after the record says how the image was left.
        sidecar.write(&released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_open_that_fails_for_want_of_resources_leaves_the_image_as_it_was() {
        let dir = std::env::temp_dir().join(format!("tidepool-open-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let (path, record) = (dir.join("image"), dir.join("image.tidepool"));
        fs::File::create(&path).expect("an image").set_len(1 << 20).expect("a size");
        let options = OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() };
        let open_and = |fails: bool| {
            open(&path, &options, Caching::Direct, |_| match fails {
                true => Err(BackendError::io("x", "set up its timer", rustix::io::Errno::MFILE)),
                false => Ok(()),
            })
        };
        assert!(open_and(true).is_err());
        assert!(!record.exists(), "nobody owns it");
        let (opened, ()) = open_and(false).expect("the lock is free");
        opened.backend.close(Release { clean: true, cache_failed: false }).expect("closed");
        let before = fs::read(&record).expect("a record");
        assert!(open_and(true).is_err());
        assert_eq!(fs::read(&record).expect("a record"), before);
        assert!(open_and(false).is_ok());
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn an_image_that_was_free_is_free_again_if_its_redo_cannot_be_set_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, record) = (dir.path().join("image"), dir.path().join("image.tidepool"));
        fs::File::create(&path).expect("an image").set_len(1 << 20).expect("a size");
        let (ours, other) = ([7; 16], [8; 16]);
        let open = |cache_uuid, generation, dirty| {
            let options =
                OpenOptions { cache_uuid, grouped: true, generation, dirty, ..OpenOptions::default() };
            open(&path, &options, Caching::Direct, |_| Ok(())).map(|(opened, ())| opened)
        };
        let state = || Ownership::from_json("x", &fs::read(&record).expect("a record")).expect("valid");
        // No header can be written while a directory has the name of its spare file.
        let obstacle = dir.path().join("image.tidepool-redo.new");
        let obstruct = || {
            let _ = fs::remove_file(&obstacle);
            fs::create_dir(&obstacle).expect("a directory");
        };
        let clear = || fs::remove_dir(&obstacle).expect("removed");
        obstruct();
        let told = open(ours, None, false).map(drop).expect_err("the redo has no header").to_string();
        assert!(told.contains("write the header of its redo"), "{told}");
        assert_eq!(state().state, OwnerState::Clean, "nobody owns it");
        clear();
        let opened = open(other, None, false).expect("another cache may have it");
        opened.backend.close(Release { clean: true, cache_failed: false }).expect("closed");
        obstruct();
        assert!(open(ours, None, false).is_err());
        let released = state();
        assert_eq!((released.state, released.generation), (OwnerState::Clean, 3), "a use without a write");
        clear();
        // An image that is this cache's already stays so: it may have what the image lacks.
        let opened = open(ours, None, false).expect("it opens");
        let generation = opened.generation;
        drop(opened);
        obstruct();
        assert!(open(ours, Some(generation), false).is_err());
        assert_eq!((state().state, state().is_by(ours)), (OwnerState::Open, true));
        clear();
        let told = open(other, None, false).map(drop).expect_err("it is not its own").to_string();
        assert!(told.contains("its newest data is in cache"), "{told}");
        let opened = open(ours, Some(generation), false).expect("the next open takes it back");
        opened.backend.close(Release { clean: true, cache_failed: false }).expect("closed");
        assert_eq!(state().state, OwnerState::Clean);
    }

    #[test]
    fn an_image_that_others_may_open_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("image");
        fs::File::create(&path).expect("an image").set_len(1 << 20).expect("a size");
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its own file");
        };
        let notes = || {
            let options = OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() };
            let (opened, ()) = open(&path, &options, Caching::Direct, |_| Ok(())).expect("it opens");
            opened.notes
        };
        for (of_directory, of_image, is_named) in
            [(0o755, 0o644, true), (0o755, 0o600, false), (0o700, 0o666, false), (0o710, 0o640, true)]
        {
            set(dir.path(), of_directory);
            set(&path, of_image);
            let notes = notes();
            let told = format!("other users may open {} (mode {of_image:03o})", path.display());
            assert_eq!(notes.iter().any(|note| note.contains(&told)), is_named, "{notes:?}");
        }
    }

    #[test]
    fn an_image_that_is_replaced_while_it_is_opened_is_not_taken() {
        let dir = std::env::temp_dir().join(format!("tidepool-replaced-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join("image");
        let image = |path: &Path| fs::File::create(path).expect("an image").set_len(1 << 20).expect("a size");
        image(&path);
        let options = OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() };
        let replaced = open(&path, &options, Caching::Direct, |_| {
            image(&dir.join("other"));
            fs::rename(dir.join("other"), &path).expect("replaced");
            Ok(())
        });
        let told = replaced.map(drop).expect_err("it is another file").to_string();
        assert!(told.contains("replaced while it was being opened") && !told.contains('\n'), "{told}");
        assert!(!dir.join("image.tidepool").exists(), "nobody owns it");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
