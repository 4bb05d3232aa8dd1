//! Buffers that the core uses itself, set aside when it is opened.

use crate::api::{BLOCK_BYTES, VOLUMES_MAX};
use crate::base::mem::{Arena, Buf};
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
/// Buffers for edge blocks of unaligned changes that only volumes may take that hold none: a stopped
/// backend keeps the buffers of those that wait for it.
pub(crate) const EDGE_BUFFERS_RESERVED: usize = 2 * VOLUMES_MAX;
/// Buffers for edge blocks of unaligned changes.
const EDGE_BUFFERS: usize = EDGE_BUFFERS_RESERVED + 128;
/// Buffers for checkpoint pages.
const CHECKPOINT_BUFFERS: usize = 2;

/// Buffers of one size.
pub(crate) struct Pool {
    free: Vec<Buf>,
}

impl Pool {
    fn new(arena: &mut Arena, count: usize, bytes: usize) -> Pool {
        let free =
            (0..count).map(|_| arena.alloc(bytes).expect("the arena holds the core's buffers")).collect();
        Pool { free }
    }

    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn take(&mut self) -> Option<Buf> {
        self.free.pop()
    }

    pub(crate) fn give(&mut self, buf: Buf) {
        debug_assert!(!self.free.contains(&buf));
        self.free.push(buf);
    }
}

/// All buffers that the core uses itself.
pub(crate) struct Pools {
    pub(crate) append: Pool,
    pub(crate) summary: Pool,
    pub(crate) drain: Pool,
    pub(crate) edge: Pool,
    pub(crate) checkpoint: Pool,
    pub(crate) reclaim_summary: Buf,
    pub(crate) reclaim_data: Buf,
    pub(crate) repair: Buf,
}

impl Pools {
    /// Buffers for appends of `append_bytes`, so many of which are in flight at once, and for so many transfers of the drain.
    pub(crate) fn new(
        arena: &mut Arena,
        append_bytes: usize,
        appends_in_flight: usize,
        drain_buffers: usize,
    ) -> Pools {
        let appends = appends_in_flight + BUFFERS_FOR_FILLS + BUFFERS_FOR_MOVES;
        let mut one = |bytes| arena.alloc(bytes).expect("the arena holds the core's buffers");
        let (reclaim_summary, reclaim_data) = (one(SUMMARY_BYTES), one(MOVE_BLOCKS * BLOCK_BYTES));
        let repair = one(BLOCK_BYTES);
        Pools {
            append: Pool::new(arena, appends, append_bytes.max(256 << 10)),
            summary: Pool::new(arena, SUMMARY_BUFFERS, SUMMARY_BYTES),
            drain: Pool::new(arena, drain_buffers, PIECE_BLOCKS * BLOCK_BYTES),
            edge: Pool::new(arena, EDGE_BUFFERS, BLOCK_BYTES),
            checkpoint: Pool::new(arena, CHECKPOINT_BUFFERS, 256 << 10),
            reclaim_summary,
            reclaim_data,
            repair,
        }
    }
}
