//! What each effect in flight is for: a name for what the room that has begun it keeps about it.

use crate::api::VolumeId;
use crate::base::mem::Buf;

/// Index of a client's operation in the core's slab.
pub(crate) type OpId = u32;

/// The cache device has failed: what it holds is not known any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceFailed;

/// What an effect in flight is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Io {
    Append(u32),
    Seal { segment: u32, buf: Buf },
    Sync,
    Cached(u32),
    Fetch(u32),
    Miss(u32),
    Direct { op: OpId },
    DirectFlush { op: OpId, covers: u64 },
    DrainRead { piece: u32, start: u16, end: u16 },
    DrainWrite { piece: u32 },
    DrainZeroes { drain: u32 },
    DrainFlush { volume: VolumeId, covers: u64 },
    ReclaimSummary,
    ReclaimRead { start: u16, end: u16 },
    CheckpointWrite { buf: Buf },
    CheckpointSync,
    Verify { volume: VolumeId, block: u64, blocks: u32, buf: Buf },
    Disown { volume: VolumeId },
    FrameRead { frame: u32, start: u16, end: u16 },
    FrameWrite { frame: u32 },
    RedoCommit { volume: VolumeId },
    RedoTrim { volume: VolumeId },
    RedoNote { volume: VolumeId },
    Snapshot { volume: VolumeId },
    Resize { volume: VolumeId },
}
