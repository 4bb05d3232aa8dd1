//! The newest segments of the log as they were written, in memory: what was just written need not be
//! read from the device.
//!
//! An append is built at the place that it will have in its segment, so nothing is copied. A
//! segment leaves the mirror when a newer one needs the room. The mirror is no cache with a policy:
//! it has the newest segments of the log, no others. After a start it is empty, and the segment in
//! which the log goes on is not in it.

use crate::api::BLOCK_BYTES;
use crate::base::mem::Buf;
use std::collections::VecDeque;

/// A segment in memory.
struct Slot {
    segment: u32,
    buf: Buf,
}

/// The segments that are in memory, the oldest first.
#[derive(Default)]
pub(super) struct Mirror {
    slots: VecDeque<Slot>,
}

impl Mirror {
    /// A segment begins, and is written through `buf`, which is as large as a segment.
    pub(super) fn open(&mut self, segment: u32, buf: Buf) {
        debug_assert!(self.of(segment).is_none());
        self.slots.push_back(Slot { segment, buf });
    }

    /// Takes out the oldest segment that is not `in_use`; returns its memory.
    pub(super) fn evict(&mut self, in_use: impl Fn(u32) -> bool) -> Option<Buf> {
        let at = self.slots.iter().position(|slot| !in_use(slot.segment))?;
        self.slots.remove(at).map(|slot| slot.buf)
    }

    /// Something else will be in the segment; returns the memory that it had.
    pub(super) fn forget(&mut self, segment: u32) -> Option<Buf> {
        let at = self.slots.iter().position(|slot| slot.segment == segment)?;
        self.slots.remove(at).map(|slot| slot.buf)
    }

    /// Memory for blocks of a segment from `block` on, up to its end.
    pub(super) fn rest(&self, segment: u32, block: u32) -> Option<Buf> {
        let slot = self.of(segment)?;
        let at = block as usize * BLOCK_BYTES;
        Some(slot.buf.slice(at, slot.buf.len as usize - at))
    }

    /// `n` blocks of a segment from `block` on, as they were written.
    pub(super) fn blocks(&self, segment: u32, block: u32, n: usize) -> Option<Buf> {
        let slot = self.of(segment)?;
        Some(slot.buf.slice(block as usize * BLOCK_BYTES, n * BLOCK_BYTES))
    }

    /// The newest are looked at first: the drain is seldom far behind.
    fn of(&self, segment: u32) -> Option<&Slot> {
        self.slots.iter().rev().find(|slot| slot.segment == segment)
    }
}
