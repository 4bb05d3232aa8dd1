//! A client's request on its way through the core.

use crate::api::{BLOCK_BYTES, Nanos, Op, Request, RequestError};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::format::EntryKind;
use crate::log::copy::Incoming;
use std::collections::VecDeque;

/// An edge block of an unaligned write: the client's part of it and the block's old content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Edge {
    pub(super) block: u64,
    /// One block of the edge pool.
    pub(super) buf: Buf,
    /// First and one past the last byte of the block that the client writes.
    pub(super) from: u16,
    pub(super) to: u16,
}

/// Where a client's change stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for a lock, its barrier or an edge buffer.
    Waiting,
    /// Old content of its edge blocks is being read.
    Edges,
    /// All its blocks are whole.
    Whole,
    /// In the log (for a direct change: its invalidation).
    InLog,
    /// In the backend's hands.
    Direct,
    /// Waits for its acknowledgement.
    Acking,
}

/// A client's request on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientOp {
    pub(super) request: Request,
    /// Covering blocks of the request.
    pub(super) first_block: u64,
    pub(super) blocks: u64,
    /// Whole blocks without edges (for zeroes).
    pub(super) edges: [Option<Edge>; 2],
    pub(super) stage: Stage,
    pub(super) error: Option<RequestError>,
    /// Device and backend operations in flight for it.
    pub(super) waiting: u32,
    /// Entries of it that are in records.
    pub(super) logged: u32,
    /// Records with parts of it that are not published.
    pub(super) unpublished: u32,
    /// Sequence of its last record.
    pub(super) sequence: u64,
    /// Holds a lock on its blocks.
    pub(super) locked: bool,
    /// Goes past the cache (write-around, off, dead cache device).
    pub(super) direct: bool,
    /// For a direct write: the cached copies are void already.
    pub(super) invalidated: bool,
    /// Operations of the volume that entered the log before it and must be published first.
    pub(super) barrier: u64,
    /// The reply needs stable media.
    pub(super) durable: bool,
    /// When it was last held back, for the counters.
    pub(super) held_since: Nanos,
    /// For a replica: the record that it brings.
    pub(super) incoming: Option<Incoming>,
}

/// Blocks that only one operation may change for now.
#[derive(Debug)]
pub(super) struct Lock {
    pub(super) end: u64,
    pub(super) op: OpId,
    /// Operations that wait for it.
    pub(super) waiting: VecDeque<OpId>,
}

/// The parts that a change leaves in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// A data block, from a buffer of one block.
    Data(u64, Buf),
    /// A range without data.
    Range(EntryKind, u64, u32),
}

impl ClientOp {
    /// A request that has just come.
    pub(super) fn new(now: Nanos, request: Request, incoming: Option<Incoming>) -> ClientOp {
        let block = BLOCK_BYTES as u64;
        let first_block = request.offset / block;
        ClientOp {
            request,
            first_block,
            blocks: (request.offset + request.len).div_ceil(block) - first_block,
            edges: [None, None],
            stage: Stage::Waiting,
            error: None,
            waiting: 0,
            logged: 0,
            unpublished: 0,
            sequence: 0,
            locked: false,
            direct: false,
            invalidated: false,
            barrier: 0,
            durable: request.op.is_fua(),
            held_since: now,
            incoming,
        }
    }

    /// First block, and the first one behind it.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.first_block, self.first_block + self.blocks)
    }

    /// What it leaves in the log has to be on stable media before it goes on.
    pub(super) fn needs_stable(&self) -> bool {
        self.durable || self.direct || self.request.op == Op::Flush
    }

    /// The newest record that its reply acknowledges; none for a flush, which follows the replies
    /// that it is about, nor for what is in the backend's hands alone.
    pub(super) fn acknowledges(&self) -> u64 {
        if self.request.op == Op::Flush || self.direct { 0 } else { self.sequence }
    }

    /// Part number `n` of what the log gets for this change; `None` past the last.
    pub(super) fn part(&self, n: u32) -> Option<Part> {
        if self.direct {
            let range = Part::Range(EntryKind::Invalidate, self.first_block, self.blocks as u32);
            return (n == 0).then_some(range);
        }
        match self.request.op {
            Op::Write { .. } => {
                let buf = self.request.buf.expect("a write has a buffer");
                (u64::from(n) < self.blocks).then(|| {
                    let part = buf.slice(n as usize * BLOCK_BYTES, BLOCK_BYTES);
                    Part::Data(self.first_block + u64::from(n), part)
                })
            }
            op => {
                let (first, blocks) = self.middle();
                let kind = match op {
                    Op::WriteZeroes { no_hole: true, .. } => EntryKind::WriteZeroes,
                    _ => EntryKind::Discard,
                };
                let edges = self.edges.iter().flatten().map(|e| Part::Data(e.block, e.buf));
                let middle = (blocks > 0).then_some(Part::Range(kind, first, blocks as u32));
                edges.chain(middle).nth(n as usize)
            }
        }
    }

    /// Data blocks and ranges of zeroes that its next record has at least.
    pub(super) fn needs_room(&self) -> (u64, u64) {
        match self.part(self.logged) {
            Some(Part::Data(..)) => (1, 0),
            Some(Part::Range(kind, ..)) if kind != EntryKind::Invalidate => (0, 1),
            _ => (0, 0),
        }
    }

    /// The whole blocks between the edges: first and number.
    fn middle(&self) -> (u64, u64) {
        let edge_at = |block| self.edges.iter().flatten().any(|e| e.block == block);
        let first = self.first_block + u64::from(edge_at(self.first_block));
        let end = self.first_block + self.blocks;
        let end = end - u64::from(end > first && edge_at(end - 1));
        (first, end - first)
    }

    /// Its edge blocks: those that it covers only in part. They have no buffers yet.
    pub(super) fn edges(&self) -> [Option<Edge>; 2] {
        let block = BLOCK_BYTES as u64;
        let (start, end) = (self.request.offset, self.request.offset + self.request.len);
        let edge = |at: u64| {
            let from = start.max(at * block) - at * block;
            let to = end.min((at + 1) * block) - at * block;
            let buf = Buf { offset: 0, len: 0 };
            (from > 0 || to < block).then_some(Edge {
                block: at,
                buf,
                from: from as u16,
                to: to as u16,
            })
        };
        let first = edge(self.first_block);
        let last = if self.blocks > 1 { edge(self.first_block + self.blocks - 1) } else { None };
        [first, last]
    }
}
