//! Buffers that the core uses itself, set aside when it is opened.

use crate::api::{BLOCK_BYTES, VOLUMES_MAX};
use crate::base::mem::{Arena, Buf};
use crate::base::shared::EngineConfig;
use crate::format::SUMMARY_BLOCKS_MAX;

/// Append buffers that only reclaim's moves may use, so that it always gets on.
pub(crate) const BUFFERS_FOR_MOVES: usize = 1;
/// Blocks of one transfer to the backend.
pub(crate) const PIECE_BLOCKS: usize = 64;
/// Blocks that reclaim moves at once.
pub(crate) const MOVE_BLOCKS: usize = 64;
/// Append buffers of the two read-cache streams, for bursts of misses.
const BUFFERS_FOR_FILLS: usize = 8;
/// Buffers for summaries that are being written.
const SUMMARY_BUFFERS: usize = 2;
/// Largest summary in bytes.
const SUMMARY_BYTES: usize = SUMMARY_BLOCKS_MAX as usize * BLOCK_BYTES;
/// Buffers for edge blocks of unaligned changes that only volumes may take that hold none: a
/// stopped backend keeps the buffers of those that wait for it.
pub(crate) const EDGE_BUFFERS_RESERVED: usize = 2 * VOLUMES_MAX;
/// Buffers for edge blocks of unaligned changes.
const EDGE_BUFFERS: usize = EDGE_BUFFERS_RESERVED + 128;
/// Buffers for checkpoint pages.
const CHECKPOINT_BUFFERS: usize = 2;

/// What a buffer is for, of which there are several. Those for one thing have one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// An append of any stream.
    Append,
    /// The summary of a segment.
    Summary,
    /// A transfer of the drain.
    Drain,
    /// An edge block of an unaligned change.
    Edge,
    /// Pages of a checkpoint.
    Checkpoint,
    /// A segment of the log, as it is written.
    Mirror,
}

/// Buffers of one size.
struct Pool {
    free: Vec<Buf>,
}

impl Pool {
    /// Parts of `bytes` each of memory that was set aside.
    fn of(memory: Buf, bytes: usize) -> Pool {
        let count = memory.len as usize / bytes;
        Pool { free: (0..count).rev().map(|at| memory.slice(at * bytes, bytes)).collect() }
    }

    fn new(arena: &mut Arena, count: usize, bytes: usize) -> Pool {
        let free = (0..count)
            .map(|_| arena.alloc(bytes).expect("the arena holds the core's buffers"))
            .collect();
        Pool { free }
    }
}

/// All buffers that the core uses itself.
pub(crate) struct Pools {
    /// By [`For`].
    pools: [Pool; 6],
    reclaim_summary: Buf,
    reclaim_data: Buf,
    repair: Buf,
}

impl Pools {
    /// The buffers that the configuration asks for; `mirror` is memory for segments of the log.
    pub(crate) fn new(
        arena: &mut Arena,
        config: &EngineConfig,
        (mirror, segment_bytes): (Buf, usize),
    ) -> Pools {
        let appends = config.appends_in_flight + BUFFERS_FOR_FILLS + BUFFERS_FOR_MOVES;
        let mut one = |bytes| arena.alloc(bytes).expect("the arena holds the core's buffers");
        let (reclaim_summary, reclaim_data) = (one(SUMMARY_BYTES), one(MOVE_BLOCKS * BLOCK_BYTES));
        let repair = one(BLOCK_BYTES);
        let pools = [
            (appends, config.append_bytes.max(256 << 10)),
            (SUMMARY_BUFFERS, SUMMARY_BYTES),
            (config.drain_buffers, PIECE_BLOCKS * BLOCK_BYTES),
            (EDGE_BUFFERS, BLOCK_BYTES),
            (CHECKPOINT_BUFFERS, 256 << 10),
        ];
        let [append, summary, drain, edge, checkpoint] =
            pools.map(|(count, bytes)| Pool::new(arena, count, bytes));
        let mirror = Pool::of(mirror, segment_bytes);
        Pools {
            pools: [append, summary, drain, edge, checkpoint, mirror],
            reclaim_summary,
            reclaim_data,
            repair,
        }
    }

    /// How many buffers for something are left.
    pub(crate) fn left(&self, of: For) -> usize {
        self.pools[of as usize].free.len()
    }

    /// Takes a buffer for something, if one is left.
    pub(crate) fn take(&mut self, of: For) -> Option<Buf> {
        self.pools[of as usize].free.pop()
    }

    /// Gives back a buffer for something.
    pub(crate) fn give(&mut self, of: For, buf: Buf) {
        let free = &mut self.pools[of as usize].free;
        debug_assert!(!free.contains(&buf));
        free.push(buf);
    }

    /// The buffer for the summary of the segment that is reclaimed.
    pub(crate) fn reclaim_summary(&self) -> Buf {
        self.reclaim_summary
    }

    /// The buffer for blocks that reclaim moves.
    pub(crate) fn reclaim_data(&self) -> Buf {
        self.reclaim_data
    }

    /// The buffer for the good copy of a block that is repaired.
    pub(crate) fn repair(&self) -> Buf {
        self.repair
    }
}
