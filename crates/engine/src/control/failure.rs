//! What the core does when a part of it is gone: the cache device, or the right to the image.

use crate::api::*;
use crate::base::flight::Io;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::engine::Engine;
use crate::ground::volume::Volume;

impl Engine {
    /// A write or sync of the cache device failed. It is never tried again: what the device holds
    /// after that is unknown. What still verifies is drained; from then on requests go past the
    /// cache.
    pub(crate) fn device_failed(&mut self) {
        if self.ground.is_dead() {
            return;
        }
        self.ground.die();
        for waiter in self.checkpoint.abandon(self.ground.checkpoints_mut()) {
            self.ground.control_done(waiter.control(), waiter.on_failure());
            if let Some(id) = waiter.added() {
                // No request has been sent to it: nothing of it is in flight.
                self.forget_volume(id);
            }
        }
        self.ground.count_quotas();
        self.cache.abandon_fills(&mut self.ground);
        self.ground.budget_mut().abandon();
        // Published changes whose stability cannot be known any more are acknowledged by the
        // backend.
        let mut waiting: Vec<OpId> = self.ground.log_mut().take_waiting_ops().collect();
        let copies = self.ground.volumes_mut().filter_map(Volume::copy_mut);
        waiting.extend(copies.flat_map(|copy| copy.take_waiting_ops()));
        for op in waiting {
            self.front.go_past_device(&mut self.ground, op);
        }
        // What is not published goes past the cache.
        let unpublished = self.front.abandon_log(&self.ground);
        let ids: Vec<VolumeId> = self.ground.ids().collect();
        for &id in &ids {
            let volume = self.ground.volume_mut(id);
            volume.go_past_device();
            self.drain.wait_no_longer(id, volume.log().published());
        }
        for op in unpublished {
            self.front.redirect(&mut self.ground, op);
        }
        for &id in &ids {
            if self.ground.volume(id).ledger().blocks().lost > 0 {
                self.ground.fail(id);
            }
            self.drain.update(&mut self.ground, id);
        }
        // Whatever of the streams and of reclaim comes back from the device now is of no interest.
        self.ground.log_mut().abandon();
        ids.iter().for_each(|&id| self.ground.forget_pending_room(id));
        self.cache.abandon_reclaim(&mut self.ground);
        self.ground.stir();
    }

    /// A volume is gone.
    pub(crate) fn forget_volume(&mut self, id: VolumeId) {
        self.ground.remove(id);
        self.front.remove(id);
        self.drain.remove(id);
        self.peers.remove(id);
    }

    /// Before anything goes past a dead cache device, the image must no longer name it: a restart
    /// would otherwise find the old content on it and believe it. As long as something of the
    /// volume is not in the image, or is lost, the image must name it: a restart would otherwise
    /// serve something older.
    pub(crate) fn disown(&mut self, now: Nanos, id: VolumeId) {
        let volume = self.ground.volume_mut(id);
        if volume.backend().is_disowning()
            || volume.is_dirty() && !mutated!(DisownedWhileDirty)
            || volume.has_redo()
            || volume.is_failed()
            || volume.copy().is_some() && !mutated!(DisownedWhilePaired)
            || !volume.backend().may_send(now)
        {
            return;
        }
        volume.backend_mut().begin_disown();
        self.ground.backend(Io::Disown { volume: id }, id, BackendOp::Disown);
    }

    pub(crate) fn disown_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_backend_result(now, id, result);
        let volume = self.ground.volume_mut(id);
        volume.backend_mut().end_disown(result.is_ok());
        volume.recheck();
    }

    /// Answers what waits in a volume that serves nothing any more.
    pub(crate) fn answer_waiting(&mut self, id: VolumeId, error: ControlError) {
        let waiting = self.front.take_waiting(&mut self.ground, id);
        self.ground.forget_pending_room(id);
        for control in self.drain.take_waiters(id) {
            self.ground.control_done(control, Err(error));
        }
        for op in waiting {
            self.front.complete(&mut self.ground, op, Err(RequestError::Io));
        }
        let copy = self.ground.volume_mut(id).copy_mut();
        let (_, parts) = copy.map(|copy| copy.take_waiting()).unwrap_or_default();
        parts.into_iter().for_each(|part| self.drain.stable(&mut self.ground, part));
        self.ground.volume_mut(id).recheck();
    }
}
