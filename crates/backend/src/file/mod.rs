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
mod image;
mod mapped;
mod owner;
mod ring;
mod same;
mod transport;

use crate::api::{Backend, Layout, OpenOptions, Opened, Peer, Release, TakeOver, Transfer};
use crate::changes::{Change, Changes};
use crate::error::BackendError;
use crate::record::{Continuity, OwnerState, Ownership};
use crate::redo::{self as group_redo, Remains, Shelf, Writer};
use crate::sidecar::{FileShelf, Lock, Sidecar};
use crate::{flock, mailbox};
use image::{Image, replaced, set_size};
use owner::Located;
use ring::Ring;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use tidepool_engine::api::IoError;
use uuid::Uuid;

pub(crate) use check::check;
pub(crate) use image::Caching;

/// How long a close waits before it looks again whether anything is in flight, in milliseconds: an
/// event may be lost.
const QUIESCE_POLL_MS: u32 = 20;

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
        ring: Ring::new(file, size_bytes)
            .map_err(|e| BackendError::io(&what, "set up io_uring", e))?,
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
    flock::lock(&backend.what, backend.ring.file(), options.read_only)?;
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
fn take(
    what: &str,
    file: &OwnedFd,
    path: &Path,
    options: &OpenOptions,
) -> Result<Taken, BackendError> {
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
    let record =
        Ownership { image: Some(identity), taken_at, ..Ownership::taken(record.as_ref(), options) };
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
    let continuity =
        owner::continuity(located, cache_uuid, file).of_generation(record.as_ref(), options);
    continuity.check_dirty(what, options)?;
    if let (Some(sequence), Some(record)) = (options.sequence, record.as_ref())
        && record.cache_uuid == cache_uuid
    {
        group_redo::check_cache(what, &FileShelf::new(sidecar), record, sequence)?;
    }
    Ok(continuity)
}

/// Gives up what a lost cache holds; see [`crate::abandon`].
pub(crate) fn abandon(
    path: &Path,
    state_dir: Option<&Path>,
) -> Result<Option<Ownership>, BackendError> {
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

impl FileBackend {
    /// Starts the writer of the redo, or removes a redo where the cache does not drain in groups.
    fn start_redo(&mut self, options: &OpenOptions) -> Result<(), BackendError> {
        let Some((sidecar, record)) = &self.ownership else { return Ok(()) };
        let shelf: Arc<dyn Shelf> = Arc::new(FileShelf::new(sidecar));
        if !options.grouped {
            return group_redo::clear(&self.what, &*shelf, record.generation);
        }
        let event = self.ring.event().map_err(|e| BackendError::io(&self.what, "open", e))?;
        let wake = move || mailbox::signal(&event);
        self.redo = Some(Writer::start(&self.what, shelf, record, options.dirty, wake)?);
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
            let (sidecar, record, unsure) =
                (sidecar.clone(), record.clone(), self.changes.is_unsure());
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
        flock::unlock(self.ring.file());
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
            Transfer::Snapshot { .. } => {
                self.ring.complete(token, Err(IoError::Errno(libc::ENOTSUP)))
            }
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
        let stamp =
            owner::stamp(self.ring.file()).map_err(|e| BackendError::io(&self.what, "stat", e))?;
        let mut released = record.released(how, stamp);
        if released.superseded.is_none() && released.stamp.is_none() {
            let device = rustix::fs::fstat(file)
                .map_err(|e| BackendError::io(&self.what, "stat", e))?
                .st_rdev;
            released.counted = counted::now(device);
        }
        // The lock is released with the backend, after the record says how the image was left.
        sidecar.write(&released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
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
            let options = OpenOptions {
                cache_uuid,
                grouped: true,
                generation,
                dirty,
                ..OpenOptions::default()
            };
            open(&path, &options, Caching::Direct, |_| Ok(())).map(|(opened, ())| opened)
        };
        let state =
            || Ownership::from_json("x", &fs::read(&record).expect("a record")).expect("valid");
        // No header can be written while a directory has the name of its spare file.
        let obstacle = dir.path().join("image.tidepool-redo.new");
        let obstruct = || {
            let _ = fs::remove_file(&obstacle);
            fs::create_dir(&obstacle).expect("a directory");
        };
        let clear = || fs::remove_dir(&obstacle).expect("removed");
        obstruct();
        let told =
            open(ours, None, false).map(drop).expect_err("the redo has no header").to_string();
        assert!(told.contains("write the header of its redo"), "{told}");
        assert_eq!(state().state, OwnerState::Clean, "nobody owns it");
        clear();
        let opened = open(other, None, false).expect("another cache may have it");
        opened.backend.close(Release { clean: true, cache_failed: false }).expect("closed");
        obstruct();
        assert!(open(ours, None, false).is_err());
        let released = state();
        assert_eq!(
            (released.state, released.generation),
            (OwnerState::Clean, 3),
            "a use without a write"
        );
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
            let (opened, ()) =
                open(&path, &options, Caching::Direct, |_| Ok(())).expect("it opens");
            opened.notes
        };
        for (of_directory, of_image, is_named) in [
            (0o755, 0o644, true),
            (0o755, 0o600, false),
            (0o700, 0o666, false),
            (0o710, 0o640, true),
        ] {
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
        let image = |path: &Path| {
            fs::File::create(path).expect("an image").set_len(1 << 20).expect("a size")
        };
        image(&path);
        let options = OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() };
        let replaced = open(&path, &options, Caching::Direct, |_| {
            image(&dir.join("other"));
            fs::rename(dir.join("other"), &path).expect("replaced");
            Ok(())
        });
        let told = replaced.map(drop).expect_err("it is another file").to_string();
        assert!(
            told.contains("replaced while it was being opened") && !told.contains('\n'),
            "{told}"
        );
        assert!(!dir.join("image.tidepool").exists(), "nobody owns it");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
