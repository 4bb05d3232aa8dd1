//! The second copy of a volume's log at its peer, as the owner knows it (RFC 9): how far it is,
//! what it has room for, and who waits for it.
//!
//! Who the peer is, when its copy is whole, and what the ownership record says is not decided here.

use crate::api::{BLOCK_BYTES, Have, Pairing, RECORD_BLOCKS_MAX, Room};
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::format::{Entry, EntryKind};
use crate::log::stable::Waiting;
use std::collections::VecDeque;

/// Bytes of records that the peer has not confirmed, of one volume; at more, its log waits. A peer
/// that does not read stops acknowledgements of its volume, not memory and not the other volumes.
pub(crate) const WINDOW_BYTES: u64 = 8 << 20;
/// With room for fewer ranges of zeroes than this at the peer the drain is in a hurry.
const RANGES_SHORT: u64 = 8;

/// The copy of one volume at its peer.
#[derive(Default)]
pub(crate) struct SecondCopy {
    /// Records are sent.
    sends: bool,
    /// Acknowledgements and drain wait for it.
    counts: bool,
    /// Newest record in its log, and on its stable media.
    logged: u64,
    stable: u64,
    /// What it was asked to bring to stable media, and what it will be asked for when it has done
    /// so.
    asked: u64,
    wanted: u64,
    /// Records that it has not confirmed, with the room that they take, and their sum.
    in_flight: VecDeque<(u64, Room)>,
    on_the_way: Room,
    /// What it has room for behind what it has confirmed.
    room: Room,
    /// Changes and flushes that wait for it.
    ops: Vec<OpId>,
    /// Parts of the drain that wait for its stable media.
    parts: Vec<Waiting>,
    /// Something was lost here that it may have.
    lost: bool,
}

/// What one record may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordRoom {
    blocks: u64,
    ranges: u64,
}

impl RecordRoom {
    /// No peer bounds it.
    pub(crate) const UNBOUNDED: RecordRoom = RecordRoom { blocks: u64::MAX, ranges: u64::MAX };

    /// Data blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Ranges of zeroes.
    pub(crate) fn ranges(&self) -> u64 {
        self.ranges
    }
}

impl SecondCopy {
    /// What it counts for from now on. It gets the records behind `built` if it got none before.
    /// Tells whether it gets records, or its records, anew.
    pub(crate) fn set_pairing(&mut self, pairing: Pairing, built: u64) {
        let begins = !self.sends;
        self.sends = matches!(pairing, Pairing::Filling | Pairing::Paired);
        self.counts = matches!(pairing, Pairing::Paired | Pairing::Parting);
        if self.sends && begins {
            (self.logged, self.stable, self.asked, self.wanted) = (built, built, built, built);
        }
        if begins || !self.sends {
            self.in_flight.clear();
            (self.on_the_way, self.room) = (Room::default(), Room::default());
        }
    }

    /// The peer says how far it is. Returns what it is to be asked for now, see
    /// [`SecondCopy::ask`].
    pub(crate) fn confirm(&mut self, have: Have) -> Option<u64> {
        self.logged = self.logged.max(have.logged);
        self.stable = self.stable.max(have.stable);
        self.room = have.room;
        let confirmed = |&&(sequence, _): &&(u64, Room)| sequence <= have.logged;
        while let Some(&(_, room)) = self.in_flight.front().filter(confirmed) {
            self.in_flight.pop_front();
            self.on_the_way -= room;
        }
        let wanted = std::mem::take(&mut self.wanted);
        self.ask(wanted)
    }

    /// Everything up to `sequence` is to be on the peer's stable media. Returns what it is to be
    /// asked for, if not that has been asked for already: what is wanted while it is being asked is
    /// asked for together.
    pub(crate) fn ask(&mut self, sequence: u64) -> Option<u64> {
        if !self.sends || sequence <= self.asked.max(self.stable) {
            return None;
        }
        if self.asked > self.stable {
            self.wanted = self.wanted.max(sequence);
            return None;
        }
        self.asked = sequence;
        Some(sequence)
    }

    /// The record `sequence` is sent with the wish that it becomes stable.
    pub(crate) fn note_asked(&mut self, sequence: u64) {
        self.asked = sequence;
    }

    /// A record is built, which takes so much room there.
    pub(crate) fn note_built(&mut self, sequence: u64, room: Room) {
        if self.sends {
            self.in_flight.push_back((sequence, room));
            self.on_the_way += room;
        }
    }

    /// What the next record may have, so that the peer keeps up and has room for all that is sent:
    /// without that rule it might be full of what gets clean only by what it has no room for.
    /// `None` if there is to be no record now.
    pub(crate) fn record_room(&self) -> Option<RecordRoom> {
        if !self.sends {
            return Some(RecordRoom::UNBOUNDED);
        }
        if mutated!(RoomIgnored) {
            return Some(RecordRoom { blocks: RECORD_BLOCKS_MAX as u64, ranges: u64::MAX });
        }
        let left = self.room.bytes.min(WINDOW_BYTES).saturating_sub(self.on_the_way.bytes);
        let blocks = (left / BLOCK_BYTES as u64).checked_sub(1)?;
        let ranges = self.room.ranges.saturating_sub(self.on_the_way.ranges);
        Some(RecordRoom { blocks: blocks.min(RECORD_BLOCKS_MAX as u64), ranges })
    }

    /// The peer will soon have no room any more.
    pub(crate) fn is_short(&self) -> bool {
        self.sends && (self.room.bytes < WINDOW_BYTES || self.room.ranges < RANGES_SHORT)
    }

    /// The peer gets every record.
    pub(crate) fn sends(&self) -> bool {
        self.sends
    }

    /// Whatever is acknowledged is in it.
    pub(crate) fn is_whole(&self) -> bool {
        self.counts && self.sends
    }

    /// It is being parted with: whatever was acknowledged has to be stable when the record says
    /// that the peer is gone.
    pub(crate) fn is_parting(&self) -> bool {
        self.counts && !self.sends
    }

    /// Whether the copy goes as far as it has to.
    pub(crate) fn has(&self, sequence: u64, stable: bool) -> bool {
        !self.counts || sequence <= if stable { self.stable } else { self.logged }
    }

    /// The newest record in its log, whatever that counts for.
    pub(crate) fn logged(&self) -> u64 {
        self.logged
    }

    /// The newest record on its stable media.
    pub(crate) fn stable(&self) -> u64 {
        self.stable
    }

    /// The newest record that it was asked to bring to stable media.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// The operation goes on when the copy has what it has left in the log.
    pub(crate) fn wait(&mut self, op: OpId) {
        self.ops.push(op);
    }

    /// The part of the drain goes on when the copy has on stable media what it takes to the
    /// backend.
    pub(crate) fn defer(&mut self, part: Waiting) {
        self.parts.push(part);
    }

    /// Takes out what waits for it.
    pub(crate) fn take_waiting(&mut self) -> (Vec<OpId>, Vec<Waiting>) {
        (self.take_waiting_ops(), std::mem::take(&mut self.parts))
    }

    /// Takes out the operations that wait for it.
    pub(crate) fn take_waiting_ops(&mut self) -> Vec<OpId> {
        std::mem::take(&mut self.ops)
    }

    /// Something was lost here that it may have.
    pub(crate) fn note_lost(&mut self) {
        self.lost = true;
    }

    /// See [`SecondCopy::note_lost`].
    pub(crate) fn has_lost(&self) -> bool {
        self.lost
    }
}

/// A record of an owner's log on its way into the log of its copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incoming {
    sequence: u64,
    entries: u16,
    blocks: u16,
    ranges: u16,
}

impl Incoming {
    /// The record `sequence` with these entries.
    pub(crate) fn new(sequence: u64, entries: &[Entry]) -> Incoming {
        Incoming {
            sequence,
            entries: entries.len() as u16,
            blocks: entries.iter().filter(|entry| entry.has_data()).count() as u16,
            ranges: entries.iter().filter(|entry| is_zeroes(entry.kind())).count() as u16,
        }
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Data blocks and entries.
    pub(crate) fn size(&self) -> (u32, usize) {
        (u32::from(self.blocks), usize::from(self.entries))
    }

    /// What it takes of what its owner was told.
    pub(crate) fn room(&self) -> Room {
        Room {
            bytes: (1 + u64::from(self.blocks)) * BLOCK_BYTES as u64,
            ranges: u64::from(self.ranges),
        }
    }
}

/// The room that a record with these entries takes at the peer.
pub(crate) fn room_of(entries: impl Iterator<Item = Entry>) -> Room {
    let (mut blocks, mut ranges) = (1, 0);
    for entry in entries {
        blocks += u64::from(entry.has_data());
        ranges += u64::from(is_zeroes(entry.kind()));
    }
    Room { bytes: blocks * BLOCK_BYTES as u64, ranges }
}

/// An entry of this kind is a range of zeroes, which a checkpoint must have room for.
pub(crate) fn is_zeroes(kind: Option<EntryKind>) -> bool {
    matches!(kind, Some(EntryKind::Discard | EntryKind::WriteZeroes))
}
