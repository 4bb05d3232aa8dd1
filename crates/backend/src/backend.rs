//! What every backend does, and how it is opened.

use crate::file::{self, Caching};
use crate::record::{Ownership, Peer};
use crate::snapshot::SnapshotChange;
use crate::{BackendError, BackendUri, given_up, nbd, paced, rbd, recover};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::IoError;

/// Most transfers that one backend has in flight; [`Backend::submit`] panics beyond it.
pub const INFLIGHT_MAX: usize = 1024;

/// One operation on a backend.
///
/// Memory of reads and writes is aligned to 4 KiB. Offsets and lengths are multiples of 512 bytes
/// and usually of 4 KiB; less than 4 KiB fails with `EINVAL` where the storage takes no less. A range may reach past the end of the image: what is read there is zero,
/// what is written there is dropped, so that the caller can always work in whole blocks even when the
/// size of the image is no multiple of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Read `len` bytes at `offset` to `ptr`.
    Read {
        /// Byte offset in the image.
        offset: u64,
        /// Where to.
        ptr: *mut u8,
        /// Bytes.
        len: usize,
    },
    /// Write `len` bytes from `ptr` at `offset`.
    Write {
        /// Byte offset in the image.
        offset: u64,
        /// Where from.
        ptr: *const u8,
        /// Bytes.
        len: usize,
    },
    /// Make the range read as zero, giving space back where that is possible.
    Discard {
        /// Byte offset in the image.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make the range read as zero, keeping it allocated where the backend can.
    WriteZeroes {
        /// Byte offset in the image.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make everything that was completed before durable. When it fails, nothing that has completed since the
    /// last successful one is known to be durable, whatever a later one reports.
    Flush,
    /// Write a frame of a group's redo beside the image; see [`tidepool_engine::redo`].
    RedoWrite {
        /// The group.
        group: u64,
        /// Number of the frame in it.
        frame: u32,
        /// Where from.
        ptr: *const u8,
        /// Bytes.
        len: usize,
    },
    /// All frames of a group were written: it counts from now on, and those before `first` do not any more.
    RedoCommit {
        /// Oldest group that counts.
        first: u64,
        /// The group.
        group: u64,
        /// Its frames.
        frames: u32,
        /// Sequence of its last record.
        sequence: u64,
        /// How long ago it ended.
        age: Duration,
    },
    /// Groups before `first` do not count any more.
    RedoTrim {
        /// Oldest group that counts.
        first: u64,
    },
    /// Write down how far the volume is.
    RedoNote {
        /// Newest acknowledged sequence.
        sequence: u64,
        /// Newest sequence on the cache's stable media.
        durable: u64,
        /// Bytes in no committed group.
        bytes: u64,
        /// The most that they may become.
        bytes_max: u64,
    },
    /// Give the image another size; [`Backend::size_bytes`] is the new one when it is done.
    Resize {
        /// Bytes.
        size_bytes: u64,
    },
    /// Take a snapshot of the image, which nobody writes meanwhile.
    Snapshot {
        /// Where its name is, in UTF-8.
        ptr: *const u8,
        /// Bytes of the name; 0 for a snapshot that mirroring names and sends to another cluster.
        len: usize,
    },
    /// Write down that the cache's content is no longer to be trusted, because the image is about to be
    /// changed without it: from then on no open keeps or drains what is cached. The image stays owned and
    /// locked. A handle without ownership has nothing to write down.
    Disown,
}

impl Transfer {
    /// The transfer without what lies beyond the image, which reads as zero and is not written.
    ///
    /// # Safety
    /// As for [`Backend::submit`].
    pub(crate) unsafe fn clip(self, size_bytes: u64) -> Transfer {
        let inside = |offset: u64, len: u64| len.min(size_bytes.saturating_sub(offset));
        match self {
            Transfer::Read { offset, ptr, len } => {
                let kept = inside(offset, len as u64) as usize;
                // SAFETY: the caller vouches for `len` bytes at `ptr`; `kept` is at most `len`.
                unsafe { std::ptr::write_bytes(ptr.add(kept), 0, len - kept) };
                Transfer::Read { offset, ptr, len: kept }
            }
            Transfer::Write { offset, ptr, len } => {
                Transfer::Write { offset, ptr, len: inside(offset, len as u64) as usize }
            }
            Transfer::Discard { offset, len } => Transfer::Discard { offset, len: inside(offset, len) },
            Transfer::WriteZeroes { offset, len } => {
                Transfer::WriteZeroes { offset, len: inside(offset, len) }
            }
            other => other,
        }
    }

    /// It is for what is kept beside the image, not for the image.
    pub(crate) fn is_redo(&self) -> bool {
        matches!(
            self,
            Transfer::RedoWrite { .. }
                | Transfer::RedoCommit { .. }
                | Transfer::RedoTrim { .. }
                | Transfer::RedoNote { .. }
        )
    }
}

/// An open backend. It belongs to one thread at a time (the reactor's); nothing but [`Backend::close`]
/// blocks.
pub trait Backend: Send {
    /// Size of the image in bytes; a multiple of 512.
    fn size_bytes(&self) -> u64;

    /// Only reads are accepted; other transfers complete with `EROFS`.
    fn read_only(&self) -> bool;

    /// Starts a transfer. Its outcome comes through [`Backend::completions`], never from within this
    /// call, exactly once. Transfers complete in any order; two that overlap must not be in flight
    /// together unless both read.
    ///
    /// # Safety
    /// The memory that the transfer names stays valid until its token comes back: for a read nobody
    /// else touches it, for a write nobody changes it.
    ///
    /// # Panics
    /// If [`INFLIGHT_MAX`] transfers are in flight already.
    unsafe fn submit(&mut self, token: u64, transfer: Transfer);

    /// Has the ownership record name the cache that holds the other copy, or none. Completes like a transfer (through
    /// [`Backend::completions`], exactly once, never from within): `Ok` when the record durably says so, also if it said
    /// so already; `Fenced` when the record is not this owner's any more (another generation or cache), and then nothing
    /// was changed; any other error when it may or may not have been changed: try again. `EINVAL` is for a peer that
    /// cannot stand there, and `EROFS` for a handle without ownership. One at a time, beside [`INFLIGHT_MAX`] transfers.
    fn set_peer(&mut self, token: u64, peer: Option<Peer>);

    /// Does something with a snapshot that the image has. Its outcome comes as that of a transfer, unless the backend is closed before.
    /// One at a time, beside [`INFLIGHT_MAX`] transfers.
    ///
    /// # Errors
    /// The image has no snapshots, or may not be changed; nothing comes through [`Backend::completions`] then.
    fn change_snapshot(&mut self, token: u64, name: &str, change: SnapshotChange) -> Result<(), IoError> {
        let _ = (token, name, change);
        Err(IoError::Errno(libc::ENOTSUP))
    }

    /// A descriptor that polls readable while completions wait. It may be an eventfd or an epoll
    /// descriptor: poll it, do not read it; [`Backend::completions`] resets it.
    fn event_fd(&self) -> RawFd;

    /// Reports what has completed: the token and the outcome of each. `Fenced` means that another
    /// owner has the image and nothing that is sent arrives any more; `Full` that the backend is out
    /// of space and the transfer may be tried again later.
    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>));

    /// What the next [`open`] needs to take the image back after this process was killed; opaque, at
    /// most [`tidepool_engine::api::ATTACHMENT_BYTES_MAX`] bytes. Keep it on the cache device.
    fn attachment(&self) -> Vec<u8>;

    /// Waits for what is in flight, writes down whether dirty data stays behind, releases the image.
    /// Blocks, for as long as the image is out of reach: a process that cannot wait may simply exit, which
    /// leaves lock, record and guard in place, and the next [`open`] takes the image back as after a kill.
    /// A backend that is only dropped waits too, and keeps the record and the guard. Completions that were not
    /// fetched before are lost.
    ///
    /// # Errors
    /// When the image could not be released or the ownership record not be changed.
    fn close(self: Box<Self>, how: Release) -> Result<(), BackendError>;
}

/// How a backend is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The image holds everything: any other client, or another cache, may use it from now on. If not,
    /// dirty data stays in this cache and only this cache may open the image again.
    pub clean: bool,
    /// The cache device has failed: if the image holds everything, nothing on that device counts any more.
    pub cache_failed: bool,
}

/// How a backend is opened.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Uuid of the cache device. A process that opens a backend with it holds the lock on that device: this
    /// is what proves that an earlier owner with the same uuid is dead.
    pub cache_uuid: [u8; 16],
    /// [`Backend::attachment`] of the last time, if this cache had the image before.
    pub attachment: Option<Vec<u8>>,
    /// Generation of the ownership that the cache device has on record for its content. If the image's own
    /// record is another, an earlier open was cut short before the cache could act on what it was told,
    /// and nothing is proven. `None` does not look at that.
    pub generation: Option<u64>,
    /// Only read: no exclusive lock and no ownership is taken.
    pub read_only: bool,
    /// The cache holds data of the image that is not drained: the image is refused, and nothing is changed,
    /// if that data might go over the writes of somebody else.
    pub dirty: bool,
    /// What the cache writes to the image goes by groups with a redo. If not, a redo that is there is removed.
    pub grouped: bool,
    /// Sequence of the newest record that the cache holds of the image. It is refused if the image has got more from it.
    pub sequence: Option<u64>,
    /// Generation of the record for which it is known that this cache's log has everything although the record names a
    /// peer and this is another boot of the host: the peer was asked, or the loss is accepted.
    pub whole_as_of: Option<u64>,
    /// The cache named above is lost, and this is no process that holds its lock: an owner that is alive is not disturbed.
    pub recover: bool,
    /// The image is rolled back to this snapshot before it is used: nothing that the cache holds of it counts then. It must hold nothing
    /// dirty. An attempt that was cut short is finished so. `rbd:` images only.
    pub roll_back: Option<String>,
    /// Directory of the ownership records of block devices and exports; `None` for `/var/lib/tidepool`.
    pub state_dir: Option<PathBuf>,
    /// The image is refused if another cache had it last, also one that has released it.
    pub unless_elsewhere: bool,
    /// What was made ready for this image; else it is done now.
    pub prepared: Prepared,
    /// The image is another cache's, which is gone or is to be, and is taken over first; see [`take_over`]. It is this one's from
    /// then on, also if opening it fails. One that is this cache's already stays so.
    pub take_over: Option<TakeOver>,
}

/// The slow part of opening an image, done before: the way to its storage, and the look at what may be done there. Nothing is
/// taken with it, and nothing is known of the image's state. With `rbd:` it is a client of the cluster, which the backend keeps
/// that is opened with it: it serves for one image. Where there is nothing to be made ready it is empty.
#[derive(Clone, Default)]
pub struct Prepared(Option<rbd::Way>);

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Prepared" } else { "Prepared(nothing)" })
    }
}

impl Prepared {
    pub(crate) fn way(&self) -> Option<&rbd::Way> {
        self.0.as_ref()
    }
}

/// Makes ready what opening an image for writing needs. Blocks.
///
/// # Errors
/// The storage is out of reach, or what is needed may not be done there.
pub fn prepare(uri: &BackendUri) -> Result<Prepared, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::prepare(uri).map(|way| Prepared(Some(way))),
        BackendUri::File { .. } | BackendUri::Nbd(_) => Ok(Prepared::default()),
    }
}

/// An opened backend.
pub struct Opened {
    /// The backend.
    pub backend: Box<dyn Backend>,
    /// The ownership's generation: higher than that of any earlier owner. 0 when read-only.
    pub generation: u64,
    /// There is proof that nobody else has written to the image since this cache had it last. Without
    /// it, clean cached data must be dropped.
    pub keep_clean: bool,
    /// Why that is so, in one line for the log.
    pub reason: String,
    /// What is known of what the image has.
    pub layout: Layout,
    /// Which snapshot it is, if it is one: the name that a clone of it finds in [`Parent::name`].
    pub snapshot: Option<String>,
    /// What a user of the volume is to know of its image although nothing is wrong, a line each.
    pub notes: Vec<String>,
}

/// What an image has, when it is opened.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// Its own objects, where they could be found out cheaply and nobody else changes them as long as the backend is open.
    pub own: Option<OwnObjects>,
    /// The snapshot of which it is a clone, if it is one, can be shared with other clones, and what it has of its own is known.
    pub parent: Option<Parent>,
}

/// The snapshot of which an image is a clone.
#[derive(Debug, Clone)]
pub struct Parent {
    /// A name that no other snapshot has, and that volumes cannot be given: it begins with `@`.
    pub name: String,
    /// Where it is.
    pub uri: BackendUri,
}

/// Opens a backend: checks the ownership, takes the lock, writes the ownership down. Blocks.
///
/// # Errors
/// One line that says what is wrong and what to do; the image is left as it was.
pub fn open(uri: &BackendUri, options: OpenOptions) -> Result<Opened, BackendError> {
    if let (Some(how), BackendUri::File { .. } | BackendUri::Nbd(_)) = (&options.take_over, uri)
        && !ownership(uri, how.state_dir.as_deref())?.is_some_and(|record| record.is_by(how.cache_uuid))
    {
        take_over(uri, how)?;
    }
    let is_image = matches!(uri, BackendUri::Rbd { snapshot: None, .. }) && !options.read_only;
    if options.roll_back.is_some() && !is_image {
        let why = "only an image in a Ceph pool that may be written can be rolled back".to_owned();
        return Err(BackendError::Unsupported { what: uri.to_string(), why });
    }
    match uri {
        BackendUri::File { path, emulate: None, gate: None } => {
            file::open(path, &options, Caching::Direct, |_| Ok(())).map(|(opened, ())| opened)
        }
        BackendUri::File { path, emulate, gate } => {
            let caching = if emulate.is_some() { Caching::Played } else { Caching::Direct };
            let (opened, clock) = file::open(path, &options, caching, |event_fd| {
                // SAFETY: it is the descriptor of the backend that is being opened.
                let clock = unsafe { paced::Clock::new(event_fd) };
                clock.map_err(|e| BackendError::io(path.display(), "set up its timer", e))
            })?;
            let backend = paced::wrap(opened.backend, clock, *emulate, gate.clone());
            Ok(Opened { backend, ..opened })
        }
        BackendUri::Rbd { .. } => rbd::open(uri, &options),
        BackendUri::Nbd(uri) => nbd::open(uri, &options),
    }
}

/// Who owns an image. Reads the record and changes nothing, also while its owner has it open. Blocks.
///
/// # Errors
/// When the image cannot be found, or its record not be read.
pub fn ownership(uri: &BackendUri, state_dir: Option<&Path>) -> Result<Option<Ownership>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::record(uri, None),
        _ => recover::look(uri, state_dir).map(|(_, record, _)| record),
    }
}

/// The same with what was made ready for this image.
///
/// # Errors
/// As above.
pub fn ownership_by(uri: &BackendUri, prepared: &Prepared) -> Result<Option<Ownership>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::record(uri, prepared.way()),
        _ => ownership(uri, None),
    }
}

/// How a peer makes an image its own; see [`take_over`].
#[derive(Debug, Clone, Default)]
pub struct TakeOver {
    /// Uuid of the peer's cache device, whose lock the caller holds. Its host's boot must be the one in the record.
    pub cache_uuid: [u8; 16],
    /// The record must have exactly this generation.
    pub generation: u64,
    /// Its host may have been restarted: what it had not flushed then is given up.
    pub accept_loss: bool,
    /// As in [`OpenOptions::state_dir`].
    pub state_dir: Option<PathBuf>,
}

/// Makes an image the peer's whose owner is gone, or is to be: changes the record, if it names this peer, and nothing else.
/// An [`open`] by the same cache has to follow, which fences the owner, even if it is alive, before it takes the image; it
/// follows from the record alone, also after a crash in between. `file:` and `nbd:` have no fence: their owner must be
/// gone. Returns the new record. Blocks.
///
/// # Errors
/// `NotPeer` if the record says something else, `Locked` if somebody else has the image or is changing the record, and as
/// for [`open`]: the record is as it was then. Only after `Io` it may have been changed.
pub fn take_over(uri: &BackendUri, how: &TakeOver) -> Result<Ownership, BackendError> {
    match uri {
        BackendUri::File { path, .. } => file::take_over(path, how),
        BackendUri::Rbd { .. } => rbd::take_over(uri, how),
        BackendUri::Nbd(uri) => nbd::take_over(uri, how),
    }
}

/// Writes down that a file or device is the one of an ownership record, where nothing else tells: a device without a name that lasts, after
/// a reboot; a file that was copied while a cache held its newest data. The caller vouches for that. `record` is the record's file,
/// and may be left out where only one comes into question. Returns the record. Blocks.
///
/// # Errors
/// When it is told already, no record or more than one comes into question, and as for [`open`].
pub fn confirm(
    uri: &BackendUri,
    state_dir: Option<&Path>,
    record: Option<&Path>,
) -> Result<Ownership, BackendError> {
    match uri {
        BackendUri::File { path, .. } => file::confirm(path, state_dir, record),
        BackendUri::Rbd { .. } | BackendUri::Nbd(_) => Err(BackendError::Unsupported {
            what: uri.to_string(),
            why: "there is nothing to confirm: only a file or a device may be taken for another one".into(),
        }),
    }
}

/// Gives up what a lost cache holds: the image becomes clean as it is, without the data that the cache
/// had not drained. For caches that are lost for good; the owner must not be running. Returns the
/// ownership record as it was, `None` when there was nothing to give up. Blocks.
///
/// # Errors
/// When the owner is still there, and as for [`open`].
pub fn abandon(uri: &BackendUri, state_dir: Option<&Path>) -> Result<Option<Ownership>, BackendError> {
    let before = match uri {
        BackendUri::File { path, .. } => file::abandon(path, state_dir),
        BackendUri::Rbd { .. } => rbd::abandon(uri),
        BackendUri::Nbd(uri) => nbd::abandon(uri, state_dir),
    }?;
    if let Some(before) = &before {
        given_up::forget(before, state_dir);
    }
    Ok(before)
}
