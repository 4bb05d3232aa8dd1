//! The interface of every backend: a transfer, an open backend, and how a backend is opened, closed
//! and taken over.

use crate::error::BackendError;
use crate::snapshot::SnapshotChange;
use crate::uri::BackendUri;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::IoError;
use uuid::Uuid;

/// Most transfers that one backend may have in flight; [`Backend::submit`] panics if there are
/// more.
pub const INFLIGHT_MAX: usize = 1024;

/// Longest text about a peer in bytes.
const PEER_TEXT_BYTES_MAX: usize = 255;

/// One operation on a backend.
///
/// Memory of reads and writes is aligned to 4 KiB. Offsets and lengths are multiples of 512 bytes,
/// and usually of 4 KiB. A transfer in smaller units than the storage takes fails with `EINVAL`. A
/// range may reach past the end of the image: reads return zeroes there, and writes there are
/// dropped. So the caller can always work in whole blocks, even when the size of the image is no
/// multiple of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Read `len` bytes at `offset` to `ptr`.
    Read {
        /// Byte offset in the image.
        offset: u64,
        /// Destination.
        ptr: *mut u8,
        /// Length in bytes.
        len: usize,
    },
    /// Write `len` bytes from `ptr` at `offset`.
    Write {
        /// Byte offset in the image.
        offset: u64,
        /// Source.
        ptr: *const u8,
        /// Length in bytes.
        len: usize,
    },
    /// Make the range read as zero, and free its space where the storage can do that.
    Discard {
        /// Byte offset in the image.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Make the range read as zero, and keep its space allocated where the storage can do that.
    WriteZeroes {
        /// Byte offset in the image.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Make every transfer that completed before this one durable. When a flush fails, no transfer
    /// that has completed since the last successful flush is known to be durable, whatever a later
    /// flush reports.
    Flush,
    /// Write a frame of a group's redo beside the image; see [`tidepool_engine::redo`].
    RedoWrite {
        /// Number of the group.
        group: u64,
        /// Number of the frame in its group, from 0.
        frame: u32,
        /// Source.
        ptr: *const u8,
        /// Length in bytes.
        len: usize,
    },
    /// Commit a group whose frames are all written: the redo contains this group from now on, and
    /// no longer contains groups before `first`.
    RedoCommit {
        /// Oldest group that stays in the redo.
        first: u64,
        /// Number of the group.
        group: u64,
        /// Number of its frames.
        frames: u32,
        /// Sequence of the last record in the group.
        sequence: u64,
        /// Time since the group ended.
        age: Duration,
    },
    /// Remove the groups before `first` from the redo.
    RedoTrim {
        /// Oldest group that stays in the redo.
        first: u64,
    },
    /// Write a note beside the image that says how far the volume is, so that the loss is known if
    /// the cache is lost.
    RedoNote {
        /// Newest acknowledged sequence.
        sequence: u64,
        /// Newest sequence on the cache's stable media.
        durable: u64,
        /// Bytes that are in no committed group, zeroes included.
        bytes: u64,
        /// Most bytes of data that may be in no committed group: the volume's dirty quota.
        bytes_max: u64,
    },
    /// Give the image another size. [`Backend::size_bytes`] returns the new size once this has
    /// completed.
    Resize {
        /// New size in bytes.
        size_bytes: u64,
    },
    /// Take a snapshot of the image. Nothing is written to the image meanwhile.
    Snapshot {
        /// The snapshot's name, in UTF-8.
        ptr: *const u8,
        /// Length of the name in bytes; 0 for a snapshot that mirroring names and sends to another
        /// cluster.
        len: usize,
    },
    /// Record that the cache's content is no longer to be trusted, because the image is about to be
    /// changed without the cache. From then on no open keeps or drains what is cached. The image
    /// stays owned and locked. On a handle without ownership this does nothing.
    Disown,
}

impl Transfer {
    /// The part of the transfer that lies inside of the image. The rest of a read is filled with
    /// zeroes; the rest of a write is dropped.
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
            Transfer::Discard { offset, len } => {
                Transfer::Discard { offset, len: inside(offset, len) }
            }
            Transfer::WriteZeroes { offset, len } => {
                Transfer::WriteZeroes { offset, len: inside(offset, len) }
            }
            other => other,
        }
    }

    /// Whether the transfer is for the redo beside the image, not for the image itself.
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

/// The cache that holds the second copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Uuid of the cache device.
    pub cache_uuid: Uuid,
    /// Boot id of its host, see [`crate::boot_id`]: data that was not on stable media is lost with
    /// the next boot.
    pub boot_id: String,
    /// Name of its host, for messages.
    pub host: String,
    /// The owner's cache device has failed: when it comes back, it may have less data than this
    /// copy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

impl Peer {
    /// Whether a record of the owner with this uuid can name this peer, and be read again.
    pub(crate) fn is_sound(&self, owner: Uuid) -> bool {
        let texts = [&self.boot_id, &self.host].into_iter();
        let mut foreign = texts
            .filter(|text| text.len() > PEER_TEXT_BYTES_MAX || text.contains(char::is_control));
        foreign.next().is_none() && !self.cache_uuid.is_nil() && self.cache_uuid != owner
    }
}

/// An open backend. One thread at a time uses it (the reactor's). No method except
/// [`Backend::close`] blocks.
pub trait Backend: Send {
    /// Size of the image in bytes; a multiple of 512.
    fn size_bytes(&self) -> u64;

    /// Whether the image was opened for reading only. Writes, discards and zeroes then complete
    /// with `EROFS`.
    fn read_only(&self) -> bool;

    /// Starts a transfer. Its outcome comes through [`Backend::completions`], exactly once and
    /// never from within this call. Transfers complete in any order. Two transfers that overlap
    /// must not be in flight together unless both read.
    ///
    /// # Safety
    /// The memory that the transfer names stays valid until its token comes back. Until then
    /// nothing else accesses the memory of a read, and nothing changes the memory of a write.
    ///
    /// # Panics
    /// If [`INFLIGHT_MAX`] transfers are in flight already.
    unsafe fn submit(&mut self, token: u64, transfer: Transfer);

    /// Makes the ownership record name the cache that holds the second copy, or no cache. The
    /// outcome comes through [`Backend::completions`], exactly once and never from within this
    /// call:
    ///
    /// - `Ok`: the record durably names this peer, also if it did so before.
    /// - `Fenced`: the record is no longer this owner's (another generation or cache). Nothing was
    ///   changed.
    /// - `EINVAL`: the record cannot name this peer.
    /// - `EROFS`: the handle has no ownership.
    /// - Any other error: the record may or may not have been changed; try again.
    ///
    /// One such change may be in flight at a time, beside [`INFLIGHT_MAX`] transfers.
    fn set_peer(&mut self, token: u64, peer: Option<Peer>);

    /// Removes, protects or unprotects a snapshot of the image. The outcome comes through
    /// [`Backend::completions`] as that of a transfer does, unless the backend is closed before.
    /// One such change may be in flight at a time, beside [`INFLIGHT_MAX`] transfers.
    ///
    /// # Errors
    /// The backend has no snapshots, or the image may not be changed; then no outcome comes through
    /// [`Backend::completions`].
    fn change_snapshot(
        &mut self,
        token: u64,
        name: &str,
        change: SnapshotChange,
    ) -> Result<(), IoError> {
        let _ = (token, name, change);
        Err(IoError::Errno(libc::ENOTSUP))
    }

    /// A descriptor that polls readable while completions wait. It may be an eventfd or an epoll
    /// descriptor: poll it, do not read it. [`Backend::completions`] resets it.
    fn event_fd(&self) -> RawFd;

    /// Reports the transfers that have completed: the token and the outcome of each. `Fenced` means
    /// that another owner has the image, and that nothing that this backend sends reaches the image
    /// any more. `Full` means that the storage has no space left; the transfer may be tried again
    /// later.
    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>));

    /// Opaque bytes that the next [`open`](fn@crate::open) needs to take the image back after this
    /// process was killed; at most [`tidepool_engine::api::ATTACHMENT_BYTES_MAX`] bytes. The caller
    /// keeps them on the cache device.
    fn attachment(&self) -> Vec<u8>;

    /// Waits for the transfers in flight, records whether dirty data stays in the cache, and
    /// releases the image. May block for as long as the image is out of reach. A process that
    /// cannot wait may exit instead: lock, record and guard then stay in place, and the next
    /// [`open`](fn@crate::open) takes the image back as after a kill. Dropping a backend waits for
    /// the transfers too, and leaves the record and the guard as they are. Completions that were
    /// not fetched before are lost.
    ///
    /// # Errors
    /// The image could not be released, or the ownership record could not be changed.
    fn close(self: Box<Self>, how: Release) -> Result<(), BackendError>;
}

/// How a backend is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The image holds everything: any other client, or another cache, may use it from now on.
    /// Otherwise dirty data stays in this cache, and only this cache, or the peer that the record
    /// names, may take the image.
    pub clean: bool,
    /// The cache device has failed. If the image holds everything, nothing on that device may be
    /// used any more.
    pub cache_failed: bool,
}

/// How a backend is opened.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Uuid of the cache device. The process that opens a backend holds the lock on that device.
    /// This lock proves that an earlier owner with the same uuid is dead.
    pub cache_uuid: [u8; 16],
    /// [`Backend::attachment`] of the last open, if this cache had the image before.
    pub attachment: Option<Vec<u8>>,
    /// Generation of the ownership that the cache device has on record for its content. It is
    /// compared with the image's record. If the record has another generation, clean data is not
    /// kept: an earlier open was cut short before the cache could act on its result, or the image
    /// was used since. Dirty data is refused if the image was used and released clean since, or if
    /// an older state of the image was put back. A cache that has lost later content is refused.
    /// `None` skips the comparison.
    pub generation: Option<u64>,
    /// Open for reading only: no exclusive lock and no ownership is taken.
    pub read_only: bool,
    /// The cache holds data of the image that is not drained. The image is refused, and nothing is
    /// changed, if that data might overwrite the writes of another client.
    pub dirty: bool,
    /// The cache drains in groups with a redo. If not, a redo beside the image is removed.
    pub grouped: bool,
    /// Sequence of the newest record that the cache holds of the image. The image is refused if its
    /// redo or note names a later record of this cache.
    pub sequence: Option<u64>,
    /// Generation of the record for which this cache's log is known to be complete, although the
    /// record names a peer and this is another boot of the host: the peer was asked, or the loss is
    /// accepted.
    pub whole_as_of: Option<u64>,
    /// The cache with the uuid `cache_uuid` is lost, and this process does not hold the lock on its
    /// device. An image whose owner is alive is refused.
    pub recover: bool,
    /// Name of a snapshot to which the image is rolled back before it is used. Nothing that the
    /// cache holds of the image is valid afterwards, and the cache must hold no dirty data of it.
    /// This also finishes a rollback that was cut short. `rbd:` images only.
    pub roll_back: Option<String>,
    /// Directory of the ownership records of block devices and exports; `None` for
    /// `/var/lib/tidepool`.
    pub state_dir: Option<PathBuf>,
    /// The image is refused if another cache had it last, even if that cache has released it.
    pub unless_elsewhere: bool,
    /// What [`crate::prepare`] has made ready for this image. If it is empty, the open does that
    /// work itself.
    pub prepared: Prepared,
    /// The image is another cache's, which is gone or is to be replaced: it is taken over first;
    /// see [`crate::take_over`]. Once the record is changed the image is this cache's, even if the
    /// open fails afterwards. An image that already is this cache's is opened as it is.
    pub take_over: Option<TakeOver>,
}

/// The slow part of opening an image, done in advance: connecting to its storage, and checking the
/// rights there. It takes no lock and no ownership, and says nothing about the image's state. For
/// `rbd:` it holds a client of the cluster; the backend that is opened with it keeps that client,
/// so it serves for one image. For `file:` and `nbd:` it is empty.
#[derive(Clone, Default)]
pub struct Prepared(Option<Arc<dyn Any + Send + Sync>>);

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Prepared" } else { "Prepared(nothing)" })
    }
}

impl Prepared {
    /// What a backend has made ready. Only that backend knows what it is.
    pub(crate) fn of(made: impl Any + Send + Sync) -> Prepared {
        Prepared(Some(Arc::new(made)))
    }

    /// What a backend has made ready, if it is of this type.
    pub(crate) fn made<T: Any>(&self) -> Option<&T> {
        self.0.as_deref()?.downcast_ref()
    }
}

/// An opened backend.
pub struct Opened {
    /// The backend.
    pub backend: Box<dyn Backend>,
    /// Generation of the ownership: higher than that of any earlier owner. 0 when read-only.
    pub generation: u64,
    /// There is proof that no other client has written to the image since this cache had it last.
    /// Without that proof, clean cached data must be dropped.
    pub keep_clean: bool,
    /// The reason for `keep_clean`, in one line for the log.
    pub reason: String,
    /// Which objects the image has of its own, and which snapshot is its parent.
    pub layout: Layout,
    /// Name of the snapshot, if a snapshot was opened: the same name as [`Parent::name`] of its
    /// clones.
    pub snapshot: Option<String>,
    /// What the user of the volume should know about its image although nothing is wrong, one line
    /// each.
    pub notes: Vec<String>,
}

/// Layout of an image when it is opened.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// The image's own objects; `None` if they could not be found cheaply, or if another client may
    /// change them while the backend is open.
    pub own: Option<OwnObjects>,
    /// The snapshot of which the image is a clone. `None` if the image is no clone, if cached data
    /// of the snapshot cannot be shared with other clones, or if `own` is not known.
    pub parent: Option<Parent>,
}

/// The snapshot of which an image is a clone.
#[derive(Debug, Clone)]
pub struct Parent {
    /// A name that no other snapshot has. It begins with `@`, with which no volume name can begin.
    pub name: String,
    /// URI of the snapshot.
    pub uri: BackendUri,
}

/// How a peer takes an image over; see [`crate::take_over`].
#[derive(Debug, Clone, Default)]
pub struct TakeOver {
    /// Uuid of the peer's cache device, whose lock the caller holds. The peer's boot in the record
    /// must be the host's present boot, unless `accept_loss` is set.
    pub cache_uuid: [u8; 16],
    /// Generation that the record must have.
    pub generation: u64,
    /// Take over even if the peer's host may have been restarted since: what the peer had not
    /// flushed by then is lost.
    pub accept_loss: bool,
    /// As in [`OpenOptions::state_dir`].
    pub state_dir: Option<PathBuf>,
}
