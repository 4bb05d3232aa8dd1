//! What the core does when a part of it is gone: the cache device, or the right to the image.

use crate::api::*;
use crate::base::mutation::mutated;
use crate::control::volume::{OpId, Stage};
use crate::engine::{Engine, Io};
use crate::format::Stream;

impl Engine {
    /// A write or sync of the cache device failed. It is never tried again: what the device holds
    /// after that is unknown. What still verifies is drained; from then on requests go past the cache.
    pub(crate) fn device_failed(&mut self) {
        if self.dead {
            return;
        }
        self.dead = true;
        self.device.failed = true;
        for waiter in self.abandon_checkpoint() {
            let (control, result) = (waiter.control, waiter.on_failure);
            self.out.control_done(control, result);
            if let Some(id) = waiter.added {
                // No request has been sent to it: nothing of it is in flight.
                self.volumes[id.0 as usize] = None;
            }
        }
        self.count_quotas();
        self.fills.abandon();
        self.budget.abandon();
        // Published changes whose stability cannot be known any more are acknowledged by the backend.
        let waiting = std::mem::take(&mut self.sync.waiters).into_iter().map(|(_, id)| id);
        let waiting: Vec<OpId> = waiting.chain(self.all_waiting_for_peers()).collect();
        for id in waiting {
            if self.volume(self.ops[id].request.volume).replica.is_some() {
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
        for volume in self.volumes.iter_mut().flatten() {
            volume.pending.clear();
            volume.published = volume.entered;
            volume.unpublished_blocks = 0;
            volume.log.abandon();
            volume.backlog_sequence = volume.log.published();
            for waiter in &mut volume.drain_waiters {
                // What the log did not take never will be drained from it.
                waiter.sequence = waiter.sequence.min(volume.log.published());
            }
            volume.drain_all_until = u64::MAX;
            volume.mode = Mode::WriteAround;
            volume.recheck = true;
        }
        for id in unpublished {
            self.redirect(id);
        }
        for i in 0..self.volumes.len() {
            let id = VolumeId(i as u16);
            let Some(volume) = &self.volumes[i] else { continue };
            if volume.ledger.blocks().lost > 0 {
                self.fail_volume(id);
            }
            self.update_drained(id);
        }
        // Whatever of the streams and of reclaim comes back from the device now is of no interest.
        for stream in Stream::ALL {
            self.log.stream(stream).in_flight.clear();
        }
        (0..self.volumes.len()).for_each(|i| self.forget_pending_room(VolumeId(i as u16)));
        self.reclaim.abandon();
        self.out.stir();
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
        let volume = self.volume_mut(id);
        if volume.backend.is_disowning()
            || volume.is_dirty() && !mutated!(DisownedWhileDirty)
            || volume.has_redo()
            || volume.failed
            || volume.peer.is_some() && !mutated!(DisownedWhilePaired)
            || !volume.backend.may_send(now)
        {
            return;
        }
        volume.backend.begin_disown();
        self.backend(Io::Disown { volume: id }, id, BackendOp::Disown);
    }

    pub(crate) fn disown_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.note_backend_result(now, id, result);
        let volume = self.volume_mut(id);
        volume.backend.end_disown(result.is_ok());
        volume.recheck = true;
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn fence(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if volume.fenced || !volume.attached {
            return;
        }
        volume.fenced = true;
        self.answer_waiting(id, ControlError::Backend(IoError::Fenced));
    }

    /// A dirty block has no good copy left and the cache device cannot record that. The volume answers
    /// nothing any more: what the image holds is older than what its clients have seen. It keeps its place in
    /// the image's record (see [`Engine::disown`]), so that a restart does not serve the image either.
    pub(crate) fn fail_volume(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if volume.failed {
            return;
        }
        volume.failed = true;
        let lost = volume.ledger.blocks().lost;
        self.answer_waiting(id, ControlError::Lost(lost));
    }

    /// Answers what waits in a volume that serves nothing any more.
    fn answer_waiting(&mut self, id: VolumeId, error: ControlError) {
        let volume = self.volume_mut(id);
        // Parked operations see it themselves, and those in flight when they come back.
        let mut waiting: Vec<OpId> = volume.through.drain(..).chain(volume.held.drain(..)).collect();
        volume.locks.values_mut().for_each(|lock| waiting.extend(lock.waiting.drain(..)));
        let peer = volume.peer.as_mut();
        let (ops, parts) = peer.map(|peer| peer.take_waiting()).unwrap_or_default();
        waiting.extend(ops);
        let pending = std::mem::take(&mut volume.pending);
        for op in pending {
            if self.ops[op].unpublished > 0 {
                self.ops[op].error = Some(RequestError::Io);
            } else {
                waiting.push(op);
                self.volume_mut(id).published += 1;
            }
        }
        self.forget_pending_room(id);
        let volume = self.volume_mut(id);
        for waiter in std::mem::take(&mut volume.drain_waiters) {
            self.out.control_done(waiter.control, Err(error));
        }
        for op in waiting {
            self.complete(op, Err(RequestError::Io));
        }
        parts.into_iter().for_each(|part| self.drain_stable(part));
        self.volume_mut(id).recheck = true;
    }
}

fn changes(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } | Op::Record { .. })
}
