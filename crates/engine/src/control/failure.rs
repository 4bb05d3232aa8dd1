//! What the core does when a part of it is gone: the cache device, or the right to the image.

use crate::api::*;
use crate::base::consequences::Consequence;
use crate::base::flight::Io;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::Lookup;
use crate::control::volume::Stage;
use crate::engine::Engine;

impl Engine {
    /// A write or sync of the cache device failed. It is never tried again: what the device holds
    /// after that is unknown. What still verifies is drained; from then on requests go past the cache.
    pub(crate) fn device_failed(&mut self) {
        if self.ground.base.dead {
            return;
        }
        self.ground.base.dead = true;
        self.ground.base.device.failed = true;
        for waiter in self.checkpoint.abandon(&mut self.ground.base.checkpoints) {
            let (control, result) = (waiter.control, waiter.on_failure);
            self.ground.base.out.control_done(control, result);
            if let Some(id) = waiter.added {
                // No request has been sent to it: nothing of it is in flight.
                self.ground.volumes[id.0 as usize] = None;
                self.drain.remove(id);
            }
        }
        self.ground.count_quotas();
        self.cache.abandon_fills(&mut self.ground);
        self.ground.budget.abandon();
        // Published changes whose stability cannot be known any more are acknowledged by the backend.
        let waiting = self.ground.log.take_waiting_ops();
        let waiting: Vec<OpId> = waiting.chain(self.all_waiting_for_peers()).collect();
        for id in waiting {
            if self.ground.volume(self.ops[id].request.volume).replica.is_some() {
                self.complete(id, Err(RequestError::Io));
            } else if self.ops[id].direct {
                self.redirect(id);
            } else {
                self.ack_when_drained(id);
            }
        }
        // What is not published goes past the cache.
        let unpublished: Vec<OpId> = self
            .ops
            .iter_mut()
            .filter(|(_, op)| op.stage == Stage::InLog && changes(op.request.op))
            .map(|(id, _)| id)
            .collect();
        for i in 0..self.ground.volumes.len() {
            let Some(volume) = &mut self.ground.volumes[i] else { continue };
            volume.pending.clear();
            volume.published = volume.entered;
            volume.unpublished_blocks = 0;
            volume.log.abandon();
            volume.backlog.extend(volume.log.published());
            self.drain.wait_no_longer(VolumeId(i as u16), volume.log.published());
            volume.progress.want(u64::MAX);
            volume.mode = Mode::WriteAround;
            volume.recheck = true;
        }
        for id in unpublished {
            self.redirect(id);
        }
        for i in 0..self.ground.volumes.len() {
            let id = VolumeId(i as u16);
            let Some(volume) = &self.ground.volumes[i] else { continue };
            if volume.ledger.blocks().lost > 0 {
                self.ground.fail(id);
            }
            self.drain.update(&mut self.ground, id);
        }
        // Whatever of the streams and of reclaim comes back from the device now is of no interest.
        self.ground.log.abandon();
        (0..self.ground.volumes.len()).for_each(|i| self.forget_pending_room(VolumeId(i as u16)));
        self.cache.abandon_reclaim(&mut self.ground);
        self.ground.base.out.stir();
    }

    /// A change that the log did not take goes to the backend. The log kept changes of the same blocks apart; from
    /// now on a lock has to.
    fn redirect(&mut self, id: OpId) {
        let op = &mut self.ops[id];
        if op.incoming.is_some() {
            return self.complete(id, Err(RequestError::Io));
        }
        (op.logged, op.unpublished, op.barrier) = (0, 0, 0);
        if !op.locked {
            return self.start_change(id);
        }
        (op.direct, op.invalidated, op.stage) = (true, false, Stage::Whole);
        let vid = op.request.volume;
        self.park(vid, id);
    }

    /// Before anything goes past a dead cache device, the image must no longer name it: a restart
    /// would otherwise find the old content on it and believe it. As long as something of the volume is not in
    /// the image, or is lost, the image must name it: a restart would otherwise serve something older.
    pub(crate) fn disown(&mut self, now: Nanos, id: VolumeId) {
        let has_redo = self.drain.has_redo(&self.ground, id);
        let volume = self.ground.volume_mut(id);
        if volume.backend.is_disowning()
            || volume.is_dirty() && !mutated!(DisownedWhileDirty)
            || has_redo
            || volume.failed
            || volume.copy.is_some() && !mutated!(DisownedWhilePaired)
            || !volume.backend.may_send(now)
        {
            return;
        }
        volume.backend.begin_disown();
        self.ground.backend(Io::Disown { volume: id }, id, BackendOp::Disown);
    }

    pub(crate) fn disown_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_backend_result(now, id, result);
        let volume = self.ground.volume_mut(id);
        volume.backend.end_disown(result.is_ok());
        volume.recheck = true;
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn fence(&mut self, id: VolumeId) {
        self.ground.fence(id);
        self.settle();
    }

    /// Acts on what rooms have found out, until there is nothing more.
    pub(crate) fn settle(&mut self) {
        loop {
            if let Some(bad) = self.ground.bad.next_found() {
                self.repair_or_lose(bad);
                continue;
            }
            match self.ground.base.consequences.pop() {
                Some(Consequence::Fenced(id)) => {
                    self.answer_waiting(id, ControlError::Backend(IoError::Fenced));
                }
                Some(Consequence::Failed(id)) => {
                    let lost = self.ground.volume(id).ledger.blocks().lost;
                    self.answer_waiting(id, ControlError::Lost(lost));
                }
                Some(Consequence::Drained(id)) => self.pump_through(id),
                None => return,
            }
        }
    }

    /// A dirty copy has no good content. With none at the peer either the block is lost; if only a group needed the copy, the block's
    /// newer content goes on without the older.
    fn repair_or_lose(&mut self, bad: BadCopy) {
        let (id, block, position) = (bad.volume(), bad.block(), bad.position());
        if self.ground.volume(id).ledger.index().lookup(block) == Lookup::At(position) {
            if !self.repair(id, block, position) {
                self.ground.lose_for_good(id, block, position);
            }
            return;
        }
        let (volume, space) = self.ground.volume_and_space(id);
        if !bad.is_current_only()
            && volume.ledger.lose_frozen(space, block, position)
            && self.ground.base.dead
        {
            // Its group would be no state that the volume ever had.
            self.ground.fail(id);
        }
    }

    /// Answers what waits in a volume that serves nothing any more.
    fn answer_waiting(&mut self, id: VolumeId, error: ControlError) {
        let volume = self.ground.volume_mut(id);
        // Parked operations see it themselves, and those in flight when they come back.
        let mut waiting: Vec<OpId> = volume.through.drain(..).chain(volume.held.drain(..)).collect();
        volume.locks.values_mut().for_each(|lock| waiting.extend(lock.waiting.drain(..)));
        let copy = volume.copy.as_mut();
        let (ops, parts) = copy.map(|copy| copy.take_waiting()).unwrap_or_default();
        waiting.extend(ops);
        let pending = std::mem::take(&mut volume.pending);
        for op in pending {
            if self.ops[op].unpublished > 0 {
                self.ops[op].error = Some(RequestError::Io);
            } else {
                waiting.push(op);
                self.ground.volume_mut(id).published += 1;
            }
        }
        self.forget_pending_room(id);
        for control in self.drain.take_waiters(id) {
            self.ground.base.out.control_done(control, Err(error));
        }
        for op in waiting {
            self.complete(op, Err(RequestError::Io));
        }
        parts.into_iter().for_each(|part| self.drain.stable(&mut self.ground, part));
        self.ground.volume_mut(id).recheck = true;
    }
}

fn changes(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } | Op::Record { .. })
}
