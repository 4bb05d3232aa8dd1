//! What the core tells about itself: plain numbers, cheap to copy, for status and metrics.

use crate::api::{IoError, Mode, Nanos, VolumeId, VolumeSpec};
use crate::format::Geometry;

/// Counters of one volume since the core was opened, and its state now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VolumeStatus {
    /// Which.
    pub id: VolumeId,
    /// As it was added or last changed.
    pub spec: VolumeSpec,
    /// The mode that is in force; differs from the spec's during a change or after a fault.
    pub mode: Mode,
    /// What it is doing.
    pub state: VolumeState,
    /// Something of the volume is not in the backend, be it data or zeroes. Known without a
    /// backend, too.
    pub dirty: bool,
    /// Bytes of data not yet in the backend, older content that a group still needs included.
    pub dirty_bytes: u64,
    /// Bytes that were discarded or zeroed and are not yet so in the backend; they take no room.
    pub dirty_zero_bytes: u64,
    /// The most of them that is allowed: what was asked for, or less where all volumes together ask
    /// for more than the cache holds.
    pub dirty_bytes_max: u64,
    /// Age of the oldest dirty byte; 0 when there is none.
    pub dirty_age_ns: Nanos,
    /// Bytes, of data and zeroes, that neither the image nor its redo has: what the loss of the
    /// cache would cost.
    pub exposed_bytes: u64,
    /// Age of the oldest of them; 0 when there is none.
    pub exposed_age_ns: Nanos,
    /// Bytes in the cache, dirty and clean.
    pub cached_bytes: u64,
    /// Blocks that read EIO because no good copy is left.
    pub lost_blocks: u64,
    /// Sequence of the newest record that is acknowledged.
    pub sequence: u64,
    /// Everything up to this sequence is in the backend.
    pub sequence_drained: u64,
    /// The last error of the backend, until an operation succeeds again.
    pub backend_error: Option<IoError>,
    /// The client has sent a flush (else every write waits for stable media).
    pub flushes: bool,
    /// Writes and zeroes of the drain that the backend has not answered.
    pub drain_writes_in_flight: u64,
    /// Writes went past the cache that no flush of the backend has covered yet. Still set when a
    /// shutdown is complete: the backend could not be flushed in
    /// [`crate::EngineConfig::stop_flush_ns_max`].
    pub backend_unflushed: bool,
    /// Counters.
    pub count: VolumeCounters,
}

/// What a volume is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VolumeState {
    /// Recovered from the cache device; no backend attached yet.
    Detached,
    /// The copy of another host's volume; nothing is served.
    Replica,
    /// Serving.
    Serving,
    /// Draining on request (mode change, removal).
    Draining,
    /// Writes wait: the dirty quota is reached.
    Full,
    /// Another owner has it: nothing is served any more.
    Fenced,
    /// Data is lost that cannot be named block by block, or that the dead cache device cannot
    /// record: every request fails.
    Failed,
}

/// Monotonic counters of one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct VolumeCounters {
    /// Read requests completed.
    pub reads: u64,
    /// Write requests completed.
    pub writes: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Discards and write-zeroes completed.
    pub discards: u64,
    /// Bytes that clients read.
    pub read_bytes: u64,
    /// Bytes that clients wrote.
    pub written_bytes: u64,
    /// Blocks of reads found in the cache.
    pub hit_blocks: u64,
    /// Blocks of reads fetched from the backend.
    pub miss_blocks: u64,
    /// Blocks of reads that neither the image nor a parent of it has: zeroes, for which nothing was
    /// asked.
    pub hole_blocks: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks of reads that came through the parent's volume.
    pub parent_blocks: u64,
    /// Blocks admitted to the read cache.
    pub admitted_blocks: u64,
    /// Clean blocks that left the cache for want of room.
    pub evicted_blocks: u64,
    /// Miss blocks that were not admitted because a write, discard or fill overtook them.
    pub bypass_overtaken_blocks: u64,
    /// Miss blocks that were not admitted because segments were short.
    pub bypass_no_room_blocks: u64,
    /// Blocks that went past the cache because of the mode.
    pub bypass_mode_blocks: u64,
    /// Read operations sent to the backend.
    pub backend_reads: u64,
    /// Bytes of them.
    pub backend_read_bytes: u64,
    /// Write operations (drain and bypass) sent to the backend.
    pub backend_writes: u64,
    /// Bytes of them.
    pub backend_written_bytes: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Groups that were ended.
    pub groups: u64,
    /// Bytes of redo written.
    pub redo_bytes: u64,
    /// Groups that ended before their time because they were large or room was short.
    pub groups_early: u64,
    /// Dirty blocks drained.
    pub drained_blocks: u64,
    /// Cached blocks whose checksum did not match.
    pub corrupt_blocks: u64,
    /// Dirty ones among them that came back from the peer.
    pub repaired_blocks: u64,
    /// Writes that waited because the quota was reached.
    pub quota_waits: u64,
    /// Nanoseconds for which acknowledgements were held back (back-pressure).
    pub held_ns: u64,
}

/// State and counters of the cache device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DeviceStatus {
    /// The device has failed: nothing is written to it any more.
    pub failed: bool,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Volumes that it has places for.
    pub volumes_max: u32,
    /// Bytes of one segment.
    pub segment_bytes: u64,
    /// Segments in all.
    pub segments: u64,
    /// Segments that hold nothing.
    pub segments_free: u64,
    /// Segments that hold dirty blocks.
    pub segments_dirty: u64,
    /// The dirty quota of a volume that is still to come, if none is asked for.
    pub dirty_share_bytes: u64,
    /// A segment is being reclaimed.
    pub reclaiming: bool,
    /// A checkpoint is being written.
    pub checkpointing: bool,
    /// Records written.
    pub records: u64,
    /// Device writes (each one or more records).
    pub appends: u64,
    /// Bytes written to the device, headers and moves included.
    pub appended_bytes: u64,
    /// Syncs of the device.
    pub syncs: u64,
    /// Checkpoints completed.
    pub checkpoints: u64,
    /// Segments reclaimed.
    pub reclaims: u64,
    /// Blocks that reclaim moved because they were dirty or hot.
    pub moved_blocks: u64,
    /// Bytes of memory that the index uses, checksums and marks included.
    pub index_bytes: u64,
    /// Blocks cached, all volumes.
    pub cached_blocks: u64,
    /// Bytes of the arena in use.
    pub arena_used_bytes: u64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
}

/// Number of blocks of each kind in an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexBlocks {
    /// On the cache device.
    pub at: u64,
    /// Known to read as zero.
    pub zero: u64,
    /// Lost.
    pub lost: u64,
}

/// What opening found, for logs and `cache inspect`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RecoveryReport {
    /// Number of the checkpoint that recovery started from.
    pub checkpoint: u64,
    /// Segments in use at that checkpoint.
    pub segments: u64,
    /// Segments whose summary was unreadable and whose records were read instead.
    pub summaries_rebuilt: u64,
    /// Records replayed.
    pub records_replayed: u64,
    /// Blocks of them.
    pub blocks_replayed: u64,
    /// Records behind a torn tail, which were not acknowledged as durable and are dropped.
    pub records_cut: u64,
    /// Blocks that are lost.
    pub blocks_lost: u64,
    /// Volumes with losses that cannot be named.
    pub volumes_failed: u64,
}

/// What a cache device holds, without changing it.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Identity and layout.
    pub geometry: Geometry,
    /// The format's version that the device is of.
    pub format_version: u16,
    /// State as of now, tail included.
    pub device: DeviceStatus,
    /// The volumes.
    pub volumes: Vec<VolumeStatus>,
    /// What opening it would find.
    pub recovery: RecoveryReport,
}

/// A stretch of a volume of which the device knows something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch<'a> {
    /// First byte in the volume.
    pub offset: u64,
    /// Bytes; whole blocks, but for the last one of a volume whose size is none.
    pub len: u64,
    /// The backend does not have it. Zeroes count as dirty as long as some in their object are.
    pub dirty: bool,
    /// What stands there.
    pub content: Content<'a>,
}

/// What stands in a [`Stretch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// These bytes, which have been verified.
    Data(&'a [u8]),
    /// Zeroes that take no room on the device.
    Zero,
    /// What is on the device cannot be read or does not verify.
    Damaged,
    /// It is known to be lost.
    Lost,
}
