//! An object on its way to the backend: what of it is issued next, and what becomes of it when all
//! of it has come back.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mutation::mutated;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags, Position};
use crate::blocks::ledger::{Cleaned, object_of};
use crate::drain::queue::DirtyObject;
use crate::drain::{DELAY_NS, Drain};
use crate::ground::Ground;
use crate::log::stable::Deferred;

/// Zero ranges of one object in flight.
const ZEROES_IN_FLIGHT: u32 = 16;

/// An object on its way to the backend.
pub(super) struct ObjectDrain {
    pub(super) volume: VolumeId,
    entry: DirtyObject,
    /// Next block of the object to look at.
    cursor: u32,
    /// Zeroes of the object are drained too.
    zeroes: bool,
    in_flight: u32,
    failed: bool,
    /// Something was left out that is in no committed group.
    left_out: Option<LeftOut>,
    /// What was committed when the drain began.
    committed: u64,
    /// It brings the object to the cut of a snapshot: what is newer is left out for what the cut
    /// has.
    cut: bool,
    /// What the backend has got.
    written: Vec<Written>,
}

/// A block that the backend has got.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub(super) block: u64,
    pub(super) position: Position,
    /// See [`Piece`](super::piece::Piece).
    pub(super) opened: u64,
}

/// What was left out of an object: up to which sequence everything must be committed before some of
/// it, and before all of it, can be drained.
#[derive(Debug, Clone, Copy)]
struct LeftOut {
    some: u64,
    all: u64,
}

impl LeftOut {
    /// Something more cannot be drained before everything up to `until` is committed.
    fn with(before: Option<LeftOut>, until: u64) -> Option<LeftOut> {
        let LeftOut { some, all } = before.unwrap_or(LeftOut { some: until, all: until });
        Some(LeftOut { some: some.min(until), all: all.max(until) })
    }
}

impl ObjectDrain {
    pub(super) fn object(&self) -> u32 {
        self.entry.object
    }

    /// The oldest record that may have dirtied it.
    pub(super) fn first_sequence(&self) -> u64 {
        self.entry.first_sequence
    }

    /// Since when it is dirty.
    pub(super) fn since(&self) -> Nanos {
        self.entry.since
    }

    fn first_block(&self) -> u64 {
        u64::from(self.entry.object) * OBJECT_BLOCKS as u64
    }

    fn wants_more(&self) -> bool {
        self.cursor < OBJECT_BLOCKS as u32
    }

    /// Everything before this block is issued.
    pub(super) fn go_on_at(&mut self, block: u64) {
        self.cursor = (block - self.first_block()) as u32;
    }

    /// The backend has got blocks.
    pub(super) fn note_written(&mut self, written: impl Iterator<Item = Written>) {
        self.written.extend(written);
    }
}

impl Drain {
    /// Begins to drain the next object that may be; false if none may.
    pub(super) fn start_object(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        urgent: bool,
    ) -> bool {
        let (volume, _) = ground.volume_and_space(id);
        if volume.image_is_held() {
            return false;
        }
        let drainable = volume.progress().drainable();
        let (end, ledger) = (volume.drain_end(), volume.ledger());
        let free = |d: &DirtyObject| {
            d.drain_from <= drainable
                && d.object < end
                && !ledger.flags(d.object).contains(ObjectFlags::DRAINING)
        };
        let part = self.volumes.of_mut(id);
        let Some((at, since)) = part.queue.find(free) else { return false };
        // In groups everything has waited long enough.
        let young = !volume.progress().is_grouped() && since + DELAY_NS > now;
        if !urgent && young {
            return false;
        }
        let entry = part.queue.begin(volume.ledger_mut(), at);
        let drain = ObjectDrain {
            volume: id,
            entry,
            cursor: 0,
            zeroes: volume.ledger().flags(entry.object).contains(ObjectFlags::ZERO_DIRTY),
            in_flight: 0,
            failed: false,
            left_out: None,
            committed: if drainable == u64::MAX { 0 } else { drainable },
            cut: volume.ledger().cut_index().is_some(),
            written: self.spare_written.pop().unwrap_or_default(),
        };
        let drain = self.objects.insert(drain);
        part.objects.push(drain);
        part.open = Some(drain);
        true
    }

    /// Issues the next piece of a drain; false when it must wait.
    pub(super) fn issue_next(&mut self, ground: &mut Ground, id: VolumeId, d: u32) -> bool {
        let object = self.objects[d].first_block();
        let end = (object + OBJECT_BLOCKS as u64).min(ground.volume(id).blocks_held().max(object));
        let mut at = object + u64::from(self.objects[d].cursor);
        while at < end {
            let ledger = ground.volume(id).ledger();
            let (found, n) = ledger.index().lookup_run(at, (end - at) as u32);
            let (uncommitted, n) = match found {
                Lookup::At(_) | Lookup::Zero => self.uncommitted(ground, id, at, n),
                Lookup::Absent | Lookup::Lost => (None, n),
            };
            let (mut found, mut n) = (found, n);
            let drain = &mut self.objects[d];
            if let Some(until) = uncommitted {
                let cut = ledger.cut_index().filter(|_| drain.cut);
                (found, n) = cut.map_or((Lookup::Absent, n), |cut| cut.lookup_run(at, n));
                drain.left_out = LeftOut::with(drain.left_out, until);
            }
            match found {
                Lookup::Zero
                    if (drain.zeroes || uncommitted.is_some())
                        && !mutated!(ZeroesStayInTheCache) =>
                {
                    if drain.in_flight >= ZEROES_IN_FLIGHT {
                        return false;
                    }
                    drain.go_on_at(at + u64::from(n));
                    self.issued(id, d);
                    self.when_stable(ground, id, Deferred::Zeroes(d, at, n));
                    return true;
                }
                Lookup::At(position) => {
                    let dirty = (position..position + n).position(|p| ground.marks().is_dirty(p));
                    if let Some(skip) = dirty {
                        return self.read_blocks(
                            ground,
                            d,
                            at + skip as u64..end,
                            uncommitted.is_some(),
                        );
                    }
                }
                _ => {}
            }
            at += u64::from(n);
            self.objects[d].go_on_at(at);
        }
        self.close_object(d);
        self.progress(ground, d);
        true
    }

    /// The drain of an object has nothing more to issue.
    fn close_object(&mut self, d: u32) {
        let drain = &mut self.objects[d];
        drain.cursor = OBJECT_BLOCKS as u32;
        let part = self.volumes.of_mut(drain.volume);
        if part.open == Some(d) {
            part.open = None;
        }
    }

    /// Something of an object is in flight.
    pub(super) fn issued(&mut self, id: VolumeId, d: u32) {
        self.objects[d].in_flight += 1;
        self.volumes.of_mut(id).in_flight += 1;
    }

    /// Something of an object has come back: the backend has it, or has not.
    pub(super) fn returned(&mut self, ground: &mut Ground, d: u32, written: bool) {
        let drain = &mut self.objects[d];
        drain.in_flight -= 1;
        drain.failed |= !written;
        self.volumes.of_mut(drain.volume).in_flight -= 1;
        self.progress(ground, d);
    }

    /// Sends zeroes of an object to the backend.
    pub(super) fn send_zeroes(&mut self, ground: &mut Ground, d: u32, first: u64, n: u32) {
        let block = BLOCK_BYTES as u64;
        let id = self.objects[d].volume;
        let (offset, len) = (first * block, u64::from(n) * block);
        let keep =
            ground.volume(id).ledger().flags(object_of(first)).contains(ObjectFlags::ZERO_KEEP);
        let op = match keep {
            true => BackendOp::WriteZeroes { offset, len },
            false => BackendOp::Discard { offset, len },
        };
        self.volumes.of_mut(id).writes += 1;
        ground.backend(Io::DrainZeroes { drain: d }, id, op);
    }

    /// The backend has answered zeroes of an object.
    pub(crate) fn zeroes_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        d: u32,
        result: Result<(), IoError>,
    ) {
        let id = self.objects[d].volume;
        self.volumes.of_mut(id).writes -= 1;
        ground.note_backend_result(now, id, result);
        self.returned(ground, d, result.is_ok());
    }

    /// A drain that has nothing left to send waits for the backend's flush.
    fn progress(&mut self, ground: &mut Ground, d: u32) {
        let drain = &self.objects[d];
        if drain.in_flight > 0 || (drain.wants_more() && !drain.failed) {
            return;
        }
        let (id, failed) = (drain.volume, drain.failed);
        self.close_object(d);
        if failed || mutated!(CleanBeforeFlush) {
            self.finish(ground, d, !failed);
            self.update(ground, id);
        } else {
            self.volumes.of_mut(id).unflushed.push(d);
        }
    }

    /// The backend may have lost what it got of the objects that are being drained: they are
    /// drained again.
    pub(super) fn distrust_objects(&mut self, id: VolumeId) {
        for &d in &self.volumes.of(id).objects {
            self.objects[d].failed = true;
        }
    }

    /// Objects are not brought to a cut any more.
    pub(super) fn forget_cut(&mut self, id: VolumeId) {
        for &d in &self.volumes.of(id).objects {
            self.objects[d].cut = false;
        }
    }

    /// A flush of the backend has covered an object, or has failed.
    pub(super) fn finish_flushed(&mut self, ground: &mut Ground, d: u32, flushed: bool) {
        let failed = self.objects[d].failed;
        self.finish(ground, d, flushed && !failed);
    }

    /// The object that has more to issue is given up, if nothing of it is in flight.
    pub(super) fn give_up_open(&mut self, ground: &mut Ground, id: VolumeId) {
        if let Some(d) = self.volumes.of(id).open
            && self.objects[d].in_flight == 0
        {
            self.progress(ground, d);
        }
    }

    /// The object is in the backend (or could not be brought there).
    pub(super) fn finish(&mut self, ground: &mut Ground, d: u32, flushed: bool) {
        let mut drain = self.objects.remove(d);
        let (id, object) = (drain.volume, drain.entry.object);
        self.volumes.of_mut(id).objects.retain(|&x| x != d);
        ground.volume_mut(id).ledger_mut().unmark(object, ObjectFlags::DRAINING);
        if flushed {
            self.finish_written(ground, &mut drain);
        } else {
            self.volumes.of_mut(id).queue.requeue(ground.volume_mut(id).ledger_mut(), drain.entry);
        }
        let volume = ground.volume_mut(id);
        volume.recheck();
        if flushed && !volume.is_dirty() && !ground.is_dead() {
            ground.checkpoints_mut().note_drained();
        }
        if drain.zeroes {
            ground.budget_mut().note_extents_changed();
        }
        drain.written.clear();
        self.spare_written.push(drain.written);
    }

    /// The backend has on stable media what the drain has written of the object: it is clean, as
    /// far as it was not changed meanwhile.
    fn finish_written(&mut self, ground: &mut Ground, drain: &mut ObjectDrain) {
        let (id, object) = (drain.volume, drain.entry.object);
        let mut drained = 0;
        for &Written { block, position, opened } in &drain.written {
            let (ledger, space) = ground.ledger_and_space(id);
            match ledger.clean(space, block, position, opened) {
                Cleaned::Superseded => {}
                // The groups began while it was on its way: theirs has to hold it all the same.
                Cleaned::Needed(group) => {
                    drain.left_out =
                        LeftOut::with(drain.left_out, self.sequence_of(ground, id, group));
                }
                Cleaned::Clean { was_dirty } => drained += u64::from(was_dirty),
            }
        }
        let checkpoint = ground.checkpoints().next();
        let volume = ground.volume_mut(id);
        let first_sequence = match drain.cut && volume.ledger_mut().cut_has_zeroes(object) {
            true => drain.entry.first_sequence.max(drain.committed + 1),
            false => drain.entry.first_sequence,
        };
        volume.note_blocks_drained(drained);
        let queue = &mut self.volumes.of_mut(id).queue;
        let queued = volume.ledger().flags(object).contains(ObjectFlags::QUEUED);
        if queued {
            queue.look_again();
        }
        if let Some(left_out) = drain.left_out {
            // What was left out counts as newer than what is committed, also where its group ends
            // with the same record.
            let then_first = (drain.committed + 1).min(left_out.some);
            let entry = DirtyObject { first_sequence, drain_from: left_out.some, ..drain.entry };
            let entry = match entry.then_first > entry.first_sequence {
                // What an earlier drain has left out is still on its way, and its promise stands:
                // to wait for what this one has left out instead would let an object that is
                // written all the time keep the redo for ever.
                true if entry.wait_for > volume.progress().drainable() => entry,
                earlier => DirtyObject {
                    first_sequence: if earlier { entry.then_first } else { entry.first_sequence },
                    wait_for: left_out.all,
                    then_first,
                    ..entry
                },
            };
            queue.requeue(volume.ledger_mut(), entry);
        } else if drain.zeroes && (mutated!(NewZeroesTakenForDrained) || !queued) {
            volume.ledger_mut().forget_zeroes(object);
            volume.forget_until(checkpoint);
        }
    }
}
