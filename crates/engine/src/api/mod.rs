//! What goes into the core and what comes out of it.
//!
//! The core performs no I/O. Its driver (the daemon's reactor or the simulator) calls
//! [`crate::Engine::handle`] with an [`Event`], then executes every [`Effect`] that
//! [`crate::Engine::next_effect`] returns, and reports the outcome of each effect that carries a
//! [`Token`] with [`Event::Done`], exactly once. Effects may complete in any order.

mod volume;

pub use volume::{
    ATTACHMENT_BYTES_MAX, AddError, Attach, DrainOrder, Mode, VOLUME_BYTES_MAX, VolumeSpec, is_size,
};

/// Cache and volume block size in bytes; the unit of the index and of every checksum.
pub const BLOCK_BYTES: usize = 4096;
/// Smallest addressable unit of a client request in bytes.
pub const SECTOR_BYTES: usize = 512;
/// Largest buffer of one request in bytes. A front door splits larger requests at multiples of
/// this.
pub const REQUEST_BYTES_MAX: usize = 256 * 1024;
/// Data blocks of one record that a peer is sent: what its log finds room for whatever the sizes of
/// its appends and segments.
pub const RECORD_BLOCKS_MAX: usize = 32;
/// Longest discard or write-zeroes in bytes; longer ones are refused as invalid.
pub const RANGE_BYTES_MAX: u64 = 1 << 40;
/// Most volumes that one cache device serves.
pub const VOLUMES_MAX: usize = 256;

/// Monotonic time in nanoseconds; the origin is the driver's choice.
pub type Nanos = u64;

/// Index of a volume on its cache device; stable until the volume is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(pub u16);

/// A front door's name for one request; returned unchanged in [`Effect::Reply`].
pub type RequestId = u64;

/// The core's name for one effect in flight; opaque, returned unchanged in [`Event::Done`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What a client asks of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read `len` bytes into the request's buffer.
    Read,
    /// Write the request's buffer; `fua` asks for stable media before the reply.
    Write {
        /// Reply only when this write and everything completed before it is on stable media.
        fua: bool,
    },
    /// Everything completed before is on stable media when the reply comes.
    Flush,
    /// The range reads as zero from the reply on; space in the backend may be given back.
    Discard {
        /// As for a write.
        fua: bool,
    },
    /// The range reads as zero from the reply on.
    WriteZeroes {
        /// As for a write.
        fua: bool,
        /// The backend must keep the space allocated.
        no_hole: bool,
    },
    /// Bring the range into the cache; no data is returned.
    Prefetch,
    /// Read the one block at the request's offset of a replica, which has this CRC-32C (RFC 9); if
    /// it has not, or is not here, [`RequestError::Invalid`].
    Block {
        /// That of the block that the owner has lost.
        crc: u32,
    },
    /// Read a record of a replica's log as it stands there, header block and data blocks, into the
    /// beginning of a buffer of [`FETCH_BYTES`](crate::FETCH_BYTES); offset and length are zero.
    /// [`RequestError::Invalid`] if it is not where it was logged any more.
    Fetch {
        /// Its sequence.
        sequence: u64,
    },
    /// A record of the owner's log, for a replica of the volume (RFC 9). The request's buffer holds
    /// it as it stands in the owner's log, header block and data blocks; offset and length are
    /// zero. The reply says that it is in the log, or that it is not the next record of this copy
    /// ([`RequestError::Invalid`]).
    Record {
        /// Reply only when it is on stable media, and everything before it.
        durable: bool,
    },
}

impl Op {
    /// A change that is stable, with everything completed before it, when the reply comes.
    pub fn is_fua(self) -> bool {
        matches!(
            self,
            Op::Write { fua: true }
                | Op::Discard { fua: true }
                | Op::WriteZeroes { fua: true, .. }
                | Op::Record { durable: true }
        )
    }
}

/// One request of a client. Offsets and lengths are multiples of [`SECTOR_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The front door's name for it.
    pub id: RequestId,
    /// The volume it is for.
    pub volume: VolumeId,
    /// What to do.
    pub op: Op,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes. With a buffer at most what the buffer holds; zero for a flush.
    pub len: u64,
    /// For `Read`, `Write` (and `Prefetch`, as scratch space): a buffer of the core's arena of
    /// exactly [`buffer_bytes`]`(offset, len)` bytes. The byte at volume offset `o` stands at `o -
    /// round_down(offset, BLOCK_BYTES)`. It belongs to the core from the request to its reply.
    pub buf: Option<Buf>,
}

/// Size of the buffer that a read or write of `len` bytes at `offset` needs: the covering blocks.
pub fn buffer_bytes(offset: u64, len: u64) -> usize {
    let block = BLOCK_BYTES as u64;
    ((offset + len).div_ceil(block) * block - offset / block * block) as usize
}

/// Why an effect failed, as far as the core must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoError {
    /// The device or backend reported an error; the errno, positive.
    Errno(i32),
    /// The backend has no space left, or its quota is reached.
    Full,
    /// Another owner has fenced us: nothing that we send reaches the backend any more.
    Fenced,
}

/// Why a request failed. Front doors translate it to their protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestError {
    /// Range outside of the volume, or not sector-aligned.
    Invalid,
    /// The volume is read-only.
    ReadOnly,
    /// Data could not be read or written.
    Io,
    /// The volume is gone or shutting down.
    Shutdown,
}

/// What the driver tells the core.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A client's request.
    Request(Request),
    /// An effect has completed.
    Done {
        /// The effect's token.
        token: Token,
        /// Its outcome. A short read or write counts as `Errno(EIO)`.
        result: Result<(), IoError>,
    },
    /// Nothing but time has passed: [`crate::Engine::next_deadline`] has come.
    Tick,
}

/// Size and operation of a transfer with a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendOp {
    /// Read `buf.len` bytes at `offset` into `buf`.
    Read {
        /// Byte offset in the image.
        offset: u64,
        /// Where to.
        buf: Buf,
    },
    /// Write `buf` at `offset`.
    Write {
        /// Byte offset in the image.
        offset: u64,
        /// Where from.
        buf: Buf,
    },
    /// Make the range read as zero, giving space back where that costs nothing.
    Discard {
        /// Byte offset in the image.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make the range read as zero, keeping it allocated.
    WriteZeroes {
        /// Byte offset in the image.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make all completed writes durable.
    Flush,
    /// Write a frame of a group's redo (see [`crate::format::redo`]) beside the image. Frames come
    /// in any order, and may come again with other content after an error.
    RedoWrite {
        /// Number of the group in this generation.
        group: u64,
        /// Number of the frame in its group, from 0.
        frame: u32,
        /// The frame: at most [`crate::format::redo::FRAME_BYTES_MAX`].
        buf: Buf,
    },
    /// All frames of a group were written: from now on image and redo together are the volume as it
    /// was at the group's end. Atomic; durable when complete, as are the frames. The first commit
    /// of a generation replaces whatever an earlier one has left.
    RedoCommit {
        /// Oldest group whose redo is still needed.
        first: u64,
        /// The group.
        group: u64,
        /// Number of its frames.
        frames: u32,
        /// Sequence of the last record that it contains.
        sequence: u64,
        /// When it ended: nothing later is in it, everything acknowledged before is.
        cut_at: Nanos,
    },
    /// The image durably has what groups before `first` hold: their redo is not needed any more.
    RedoTrim {
        /// Oldest group whose redo is still needed; the next one to come when none is.
        first: u64,
    },
    /// Take a snapshot of the image, which is the volume at a cut and is not written meanwhile.
    Snapshot {
        /// The operation that it is for.
        control: u64,
    },
    /// Give the image this size.
    Resize {
        /// Bytes.
        size_bytes: u64,
    },
    /// Record beside the image how far the volume is, so that a loss of the cache can be told in
    /// figures.
    RedoNote {
        /// Newest acknowledged sequence.
        sequence: u64,
        /// Newest sequence on stable media: a cache whose log ends before it has lost what it
        /// promised to keep.
        durable: u64,
        /// Bytes that are in no committed group, zeroes included.
        bytes: u64,
        /// The most data that they may become.
        bytes_max: u64,
    },
    /// Record with the image that this cache's content is no longer to be trusted (the cache device
    /// has failed, and the image is about to be changed without it).
    Disown,
}

/// What the peer that holds the second copy of a volume is to be sent (RFC 9), in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerOp {
    /// The next record.
    Record {
        /// Its number in the volume's log.
        sequence: u64,
        /// Header block and data blocks. They stay as they are until the next effect is taken from
        /// the core.
        buf: Buf,
        /// Somebody waits until it is on the peer's stable media.
        durable: bool,
    },
    /// Somebody waits until everything up to this record is on the peer's stable media.
    Stabilise {
        /// Its number in the volume's log.
        sequence: u64,
    },
    /// The only copy of this block that is here is bad:
    /// [`Engine::peer_block`](crate::Engine::peer_block) is to be told what the peer has of it.
    Block {
        /// Block of the volume.
        block: u64,
        /// CRC-32C that its content has.
        crc: u32,
    },
}

/// What the second copy of a volume counts for (RFC 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// There is none.
    Alone,
    /// Records are sent, and nothing waits for the peer.
    Filling,
    /// Changes are acknowledged when the peer has them, flushes when it has them on stable media,
    /// and only what it has on stable media goes to the backend.
    Paired,
    /// The peer is gone: nothing is sent any more, and nothing acknowledged.
    Parting,
}

/// What a volume in write-back does while it is to have a second copy, and none counts (RFC 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Degraded {
    /// It goes on: there is a copy that counts, or the loss of what one copy holds is accepted.
    #[default]
    No,
    /// It works as write-through.
    WriteThrough,
    /// Changes wait until there is one, reads go on.
    Stopped,
}

/// Records that a replica has room for, whatever else its cache takes meanwhile (RFC 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Room {
    /// Bytes of records: header blocks and data blocks.
    pub bytes: u64,
    /// Ranges that become zero.
    pub ranges: u64,
}

impl std::ops::AddAssign for Room {
    fn add_assign(&mut self, other: Room) {
        self.bytes += other.bytes;
        self.ranges += other.ranges;
    }
}

impl std::ops::SubAssign for Room {
    fn sub_assign(&mut self, other: Room) {
        self.bytes -= other.bytes;
        self.ranges -= other.ranges;
    }
}

/// What a replica that begins anew is told (RFC 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Begin {
    /// Of the owner.
    pub generation: u64,
    /// Of the volume.
    pub size_bytes: u64,
    /// Newest record that it does not get.
    pub base: u64,
    /// What the owner takes for certain that there is room for (see
    /// [`Engine::room_to_begin`](crate::Engine::room_to_begin)).
    pub room: Room,
}

/// How far a replica goes, in numbers of its owner's records, and how much more it has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Have {
    /// Newest record in its log.
    pub logged: u64,
    /// Newest record on its stable media.
    pub stable: u64,
    /// Room for what comes after `logged`.
    pub room: Room,
}

/// How far a volume's log, image and acknowledgements are, in numbers of its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogStatus {
    /// The newest record, perhaps still on its way to the cache device.
    pub logged: u64,
    /// The newest one that the cache device has.
    pub published: u64,
    /// The newest one on stable media.
    pub stable: u64,
    /// Something of everything up to here may have been sent to the backend.
    pub sent: u64,
    /// Everything up to here is in the backend. With something lost it stays what it was before:
    /// the peer may have that.
    pub drained: u64,
    /// Everything up to here may have been acknowledged.
    pub acknowledged: u64,
    /// The cache device has failed: nothing more becomes stable on it.
    pub failed: bool,
    /// Changes wait for room at the peer.
    pub held_up: bool,
    /// The newest record that the peer was asked to bring to stable media, and the newest one that
    /// it has there. 0 without a peer.
    pub peer_asked: u64,
    /// See [`LogStatus::peer_asked`].
    pub peer_stable: u64,
    /// Another host has the image: nothing reaches it any more.
    pub fenced: bool,
}

/// What the driver does for the core. Device offsets are bytes, block-aligned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effect {
    /// Read `buf.len` bytes of the cache device.
    DeviceRead {
        /// To be returned.
        token: Token,
        /// Byte offset on the device.
        offset: u64,
        /// Where to.
        buf: Buf,
    },
    /// Write `buf` to the cache device.
    DeviceWrite {
        /// To be returned.
        token: Token,
        /// Byte offset on the device.
        offset: u64,
        /// Where from.
        buf: Buf,
        /// The write itself must be on stable media when it completes (as O_DSYNC).
        dsync: bool,
    },
    /// Make all completed device writes stable (as fdatasync).
    DeviceSync {
        /// To be returned.
        token: Token,
    },
    /// Do something with a volume's backend.
    Backend {
        /// To be returned.
        token: Token,
        /// Whose backend.
        volume: VolumeId,
        /// What to do.
        op: BackendOp,
    },
    /// Send something to the volume's peer.
    Peer {
        /// Whose.
        volume: VolumeId,
        /// What.
        op: PeerOp,
    },
    /// A client's request is complete; its buffer belongs to the front door again.
    Reply {
        /// The front door's name for the request.
        id: RequestId,
        /// The outcome.
        result: Result<(), RequestError>,
    },
    /// A control operation (drain, mode change, removal, shutdown) is complete.
    ControlDone {
        /// The number that the caller gave.
        control: u64,
        /// The outcome.
        result: Result<(), ControlError>,
    },
}

/// Why a control operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Hash)]
pub enum ControlError {
    /// The cache device failed.
    #[error("the cache device failed")]
    Device,
    /// The backend failed.
    #[error("the backend failed: {0:?}")]
    Backend(IoError),
    /// The backend does not hold what the cache holds.
    #[error("the image differs from the cache at byte {0}")]
    Differs(u64),
    /// Blocks whose only copy is lost stand in the way.
    #[error("{0} blocks of the volume are lost")]
    Lost(u64),
    /// Blocks are lost that cannot be named.
    #[error("data of the volume is lost, and it is not known which")]
    Failed,
    /// There is no such volume.
    #[error("there is no such volume")]
    Gone,
    /// Another control operation on the volume is still under way.
    #[error("another operation on the volume is under way")]
    Busy,
    /// It takes the volume's backend, and none is attached.
    #[error(
        "the volume's backend is not attached: the volume cannot be drained or compared with its image"
    )]
    Detached,
    /// Its backend has to be taken away first.
    #[error("the volume's backend is attached")]
    Attached,
    /// A snapshot of an image that is written in any order would be no state of the volume.
    #[error(
        "its drain is unordered: between two writes of it the image is no state that the volume ever had; \
         attach the volume with a grouped drain, or set it to write-through first"
    )]
    Unordered,
    /// The volume serves only reads.
    #[error("it is read-only")]
    ReadOnly,
    /// The volume is not read-only, or a clone of its own clone.
    #[error("it cannot be the parent of the volume")]
    NotParent,
    /// Clones read through the volume.
    #[error("other volumes are clones of it and read through it; remove them first")]
    IsParent,
    /// No size that a volume can be given.
    #[error(
        "a size of {0} bytes cannot be had: it must be a multiple of {BLOCK_BYTES} up to 1 PiB"
    )]
    Size(u64),
    /// It serves, or has served, clients of its own.
    #[error("it is not the copy of another host's volume")]
    NotReplica,
    /// There is a second copy, which the operation would not be done to.
    #[error("the volume has a second copy at another host, which must be parted with first")]
    Paired,
    /// The cache cannot hold as much as the owner of a copy was told.
    #[error("the cache has no room for a copy of the volume now")]
    NoRoom,
    /// The attachment has more than [`ATTACHMENT_BYTES_MAX`] bytes.
    #[error("an attachment has at most {ATTACHMENT_BYTES_MAX} bytes")]
    TooLong,
}

/// One stretch of [`crate::Engine::block_status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Held in the cache and not yet in the backend.
    pub dirty: bool,
    /// Known to read as zero.
    pub zero: bool,
    /// Held in the cache (always so when dirty).
    pub cached: bool,
}

/// One read of a batch, for [`Device::read`](crate::device::Device::read).
pub struct DeviceRead<'a> {
    /// Byte offset on the device; block-aligned.
    pub offset: u64,
    /// Where to; block-aligned in memory (see [`crate::mem::AlignedBuf`]) and in length.
    pub buf: &'a mut [u8],
    /// Set by the device.
    pub result: Result<(), IoError>,
}

/// A stretch of the arena: `offset` and `len` in bytes. It is a name, not a reference; its holder
/// has the right to use those bytes until it is given back with
/// [`Arena::free`](crate::mem::Arena::free).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buf {
    /// First byte in the arena; block-aligned when returned by
    /// [`Arena::alloc`](crate::mem::Arena::alloc).
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

impl Buf {
    /// The part of this buffer from `start`, `len` bytes long.
    ///
    /// # Panics
    /// If the part is not inside the buffer.
    pub fn slice(self, start: usize, len: usize) -> Buf {
        assert!(
            start + len <= self.len as usize,
            "slice {start}+{len} of a {} byte buffer",
            self.len
        );
        Buf { offset: self.offset + start as u32, len: len as u32 }
    }
}
