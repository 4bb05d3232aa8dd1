//! What of the log is on stable media, and who waits for that.

use crate::api::VolumeId;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::format::Stream;
use crate::log::Log;

/// A part of the drain that waits for stable media.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    /// It is of this volume.
    volume: VolumeId,
    /// It has nothing of a later record of the volume.
    sequence: u64,
    part: Deferred,
}

/// What the drain sends to the backend as soon as the log is stable.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deferred {
    /// A piece that has been read.
    Piece(u32),
    /// Zeroes of a drain: first block and number.
    Zeroes(u32, u64, u32),
    /// A frame of a group's redo that is complete.
    Frame(u32),
}

impl Waiting {
    pub(crate) fn new(volume: VolumeId, sequence: u64, part: Deferred) -> Waiting {
        Waiting { volume, sequence, part }
    }

    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// It has nothing of a later record of the volume.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn part(&self) -> Deferred {
        self.part
    }
}

/// The sync of the cache device that is in flight, and who waits for one.
#[derive(Default)]
pub(super) struct Stable {
    /// Number of the newest log append that it covers.
    in_flight: Option<u64>,
    /// Operations and the log append that must be stable for them.
    ops: Vec<(u64, OpId)>,
    /// Parts of the drain and the log append that must be stable before they go to the backend.
    parts: Vec<(u64, Waiting)>,
    /// Somebody waits for everything published to be stable.
    wanted: bool,
}

/// A look at who need not wait any longer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    stable: u64,
    published: u64,
    issued: u64,
    /// Somebody waits for what a sync that begins now would cover.
    wanted: bool,
    part: usize,
    op: usize,
}

impl Log {
    /// Everything that has taken effect is on stable media.
    pub(crate) fn is_stable(&self) -> bool {
        let log = &self.streams[Stream::Log as usize];
        log.stable >= log.published
    }

    /// A sync is in flight.
    pub(crate) fn is_syncing(&self) -> bool {
        self.stable.in_flight.is_some()
    }

    /// Everything that has taken effect is to be stable soon.
    pub(crate) fn want_stable(&mut self) {
        self.stable.wanted = true;
    }

    /// The operation goes on when the append `number` is stable.
    pub(crate) fn wait_stable(&mut self, number: u64, op: OpId) {
        self.stable.ops.push((number, op));
    }

    /// The operation goes on when everything that was issued is stable.
    pub(crate) fn wait_all_stable(&mut self, op: OpId) {
        let issued = self.streams[Stream::Log as usize].issued;
        self.stable.ops.push((issued, op));
    }

    /// The part of the drain goes on when everything that has taken effect is stable.
    pub(crate) fn defer(&mut self, part: Waiting) {
        let published = self.streams[Stream::Log as usize].published;
        self.stable.parts.push((published, part));
    }

    /// Takes out all operations that wait: the device has failed.
    pub(crate) fn take_waiting_ops(&mut self) -> impl Iterator<Item = OpId> + use<> {
        std::mem::take(&mut self.stable.ops).into_iter().map(|(_, op)| op)
    }

    /// Begins a look at who need not wait any longer: first at parts of the drain, then at
    /// operations.
    pub(crate) fn look(&mut self) -> Look {
        let log = &self.streams[Stream::Log as usize];
        let (stable, published, issued) = (log.stable, log.published, log.issued);
        let wanted = std::mem::take(&mut self.stable.wanted) && stable < published;
        Look { stable, published, issued, wanted, part: 0, op: 0 }
    }

    /// Takes out the next part of the drain that need not wait; none does when the device is
    /// `dead`.
    pub(crate) fn next_stable_part(&mut self, look: &mut Look, dead: bool) -> Option<Waiting> {
        while let Some(&(append, part)) = self.stable.parts.get(look.part) {
            if append <= look.stable || dead {
                self.stable.parts.swap_remove(look.part);
                return Some(part);
            }
            look.wanted |= append <= look.published;
            look.part += 1;
        }
        None
    }

    /// Takes out the next operation that need not wait.
    pub(crate) fn next_stable_op(&mut self, look: &mut Look) -> Option<OpId> {
        while let Some(&(append, op)) = self.stable.ops.get(look.op) {
            if append <= look.stable {
                self.stable.ops.remove(look.op);
                return Some(op);
            }
            look.wanted |= append <= look.published;
            look.op += 1;
        }
        None
    }

    /// Ends a look. Tells whether a sync is to begin, which covers what has taken effect; no other
    /// one is in flight then.
    pub(crate) fn end_look(&mut self, look: Look, dead: bool) -> bool {
        if look.wanted && self.stable.in_flight.is_some() {
            self.stable.wanted = true;
        }
        let begins = look.wanted && self.stable.in_flight.is_none() && !dead;
        if begins {
            let covers = if mutated!(SyncCoversIssued) { look.issued } else { look.published };
            self.stable.in_flight = Some(covers);
        }
        begins
    }

    /// The sync in flight has completed, or failed: then it covers nothing.
    pub(crate) fn end_sync(&mut self, succeeded: bool) {
        let covered = self.stable.in_flight.take().expect("a sync was in flight");
        if succeeded {
            self.note_stable(covered);
        }
    }

    /// Everything up to the append `number` is stable.
    pub(crate) fn note_stable(&mut self, number: u64) {
        let log = self.stream(Stream::Log);
        log.stable = log.stable.max(number);
    }
}
