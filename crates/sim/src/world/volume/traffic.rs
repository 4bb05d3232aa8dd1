//! What the clients of a volume, and others, have sent.

use super::Vol;
use tidepool_engine::api::Op;

/// What was sent to a volume.
pub(in crate::world) struct Traffic {
    /// A flush or FUA was sent since the cache was opened.
    flushed: bool,
    /// Changes that were ever sent.
    changes: u64,
    /// Changes in flight.
    changing: u64,
    /// Writes that each slot has ever sent.
    slot_writes: Vec<u64>,
    /// Writes of others to its image.
    foreign_writes: u64,
    /// Slots that have nothing in flight and no event that wakes them.
    idle_slots: Vec<usize>,
    /// Place of a sequential stream, in bytes.
    cursor: u64,
}

impl Traffic {
    pub(super) fn new(slots: usize) -> Traffic {
        Traffic {
            flushed: false,
            changes: 0,
            changing: 0,
            slot_writes: vec![0; slots],
            foreign_writes: 0,
            idle_slots: Vec::new(),
            cursor: 0,
        }
    }

    /// A request is sent.
    pub(in crate::world) fn send(&mut self, op: Op) {
        self.flushed |= op.is_fua() || op == Op::Flush;
    }

    /// A change is sent. Returns the value that it leaves: that of the slot's next write, or zero.
    pub(in crate::world) fn begin_change(&mut self, writer: Option<usize>) -> u64 {
        self.changes += 1;
        self.changing += 1;
        writer.map_or(0, |slot| {
            self.slot_writes[slot] += 1;
            Vol::value(Some(slot), self.slot_writes[slot])
        })
    }

    /// A change is answered.
    pub(in crate::world) fn end_change(&mut self) {
        self.changing -= 1;
    }

    /// The value that the next write of others leaves.
    pub(in crate::world) fn foreign_value(&mut self) -> u64 {
        self.foreign_writes += 1;
        Vol::value(None, self.foreign_writes)
    }

    /// A flush or FUA was sent since the cache was opened.
    pub(in crate::world) fn has_flushed(&self) -> bool {
        self.flushed
    }

    /// Changes that were ever sent.
    pub(in crate::world) fn changes(&self) -> u64 {
        self.changes
    }

    /// No changes are in flight.
    pub(in crate::world) fn is_quiet(&self) -> bool {
        self.changing == 0
    }

    /// A slot has nothing in flight, and nothing wakes it.
    pub(in crate::world) fn rest(&mut self, slot: usize) {
        self.idle_slots.push(slot);
    }

    /// The slots that nothing wakes; somebody does now.
    pub(in crate::world) fn take_idle(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.idle_slots)
    }

    /// The sequential stream begins anew.
    pub(super) fn begin_stream(&mut self) {
        self.cursor = 0;
    }

    /// The offset of the next request of the sequential stream, a multiple of `unit`.
    pub(in crate::world) fn go_on(&mut self, len: u64, unit: u64, size_bytes: u64) -> u64 {
        let cursor = self.cursor / unit * unit;
        let offset = if cursor + len > size_bytes { 0 } else { cursor };
        self.cursor = offset + len;
        offset
    }

    pub(super) fn forget_life(&mut self) {
        (self.flushed, self.changing) = (false, 0);
    }
}
