//! A volume lets go of its backend: what is left of it is as a restart would find it.

use crate::api::*;
use crate::base::mutation::mutated;
use crate::base::out::EIO;
use crate::engine::Engine;
use crate::ground::task::Task;

const ETIMEDOUT: i32 = 110;

impl Engine {
    /// Takes a volume's backend away, also a fenced one's. New requests are refused from now on;
    /// those under way are answered first. [`Effect::ControlDone`] tells when nothing of the volume
    /// is on its way to the backend any more, and what it has logged and sent there is on stable
    /// media (of a fenced one: what it has logged), also at a peer whose copy counts. If that takes
    /// longer than `patience_ns`, or there is no such copy any more, the volume goes on as before.
    /// It is then as a restart would find it: what is dirty stays dirty, and it can be attached
    /// again, or begin as the copy of another host's.
    pub fn detach(&mut self, now: Nanos, id: VolumeId, patience_ns: Nanos, control: u64) {
        self.ground.stir();
        let is_parent = self.is_parent(id);
        let error = match self.ground.get(id) {
            None => Some(ControlError::Gone),
            Some(_) if self.ground.is_dead() => Some(ControlError::Device),
            Some(v) if v.task() != Task::None => Some(ControlError::Busy),
            Some(v) if !v.is_attached() => Some(ControlError::Detached),
            Some(v) if v.is_half_paired() => Some(ControlError::Paired),
            Some(_) if is_parent => Some(ControlError::IsParent),
            Some(_) => None,
        };
        if let Some(error) = error {
            return self.ground.control_done(control, Err(error));
        }
        let volume = self.ground.volume_mut(id);
        volume.close();
        let until = now.saturating_add(patience_ns);
        volume.begin(Task::Detach { control, stopping: false, until });
    }

    pub(crate) fn pump_detach(
        &mut self,
        now: Nanos,
        id: VolumeId,
        (control, stopping, until): (u64, bool, Nanos),
    ) {
        let dead = self.ground.is_dead().then_some(ControlError::Device);
        let parted = self.ground.volume(id).is_half_paired().then_some(ControlError::Paired);
        let late = (now >= until).then_some(ControlError::Backend(IoError::Errno(ETIMEDOUT)));
        // The next flush has to hear of it.
        let volume = self.ground.volume(id);
        let lost = volume.backend().has_lost() && !volume.is_fenced();
        let lost = lost.then_some(ControlError::Backend(IoError::Errno(EIO)));
        if let Some(error) = dead.or(parted).or(lost).or(late) {
            // It goes on as if nothing had been asked.
            self.ground.volume_mut(id).open_again();
            self.ground.stir();
            return self.ground.control_done(control, Err(error));
        }
        if !stopping {
            if !self.front.is_idle(id) {
                return;
            }
            self.ground.volume_mut(id).begin(Task::Detach { control, stopping: true, until });
            self.stop_drain(id);
        }
        if self.is_at_rest(id) || mutated!(DetachedInFlight) {
            let (volume, space) = self.ground.volume_and_space(id);
            volume.ledger_mut().thaw(space);
            volume.let_go();
            // Which group its dirty objects wait for is known again when there are groups again.
            self.drain.let_go(id);
            self.front.add(id, self.ground.volume(id).log().published());
            self.peers.add(id);
            self.ground.count_quotas();
            self.ground.budget_mut().note_extents_changed();
            self.ground.stir();
            self.ground.control_done(control, Ok(()));
        }
    }

    /// When a volume that lets go has to be looked at again, if nothing else happens.
    pub(crate) fn detach_deadline(&self, now: Nanos) -> Option<Nanos> {
        let times = self.ground.ids().flat_map(|id| {
            let volume = self.ground.volume(id);
            let Task::Detach { until, .. } = volume.task() else { return [None, None] };
            let flush = volume.backend().wants_flush() || self.drain.waits_for_flush(id);
            [Some(until), flush.then_some(volume.backend().retry_at())]
        });
        times.flatten().filter(|&at| at > now).min()
    }

    /// What the drain has not brought to the image is dirty again, as soon as it comes back.
    fn stop_drain(&mut self, id: VolumeId) {
        self.drain.stop(&mut self.ground, id);
        for control in self.drain.take_waiters(id) {
            self.ground.control_done(control, Err(ControlError::Detached));
        }
    }

    /// Nothing of the volume is on its way to the backend, or will get into its index, and its log
    /// is stable.
    fn is_at_rest(&mut self, id: VolumeId) -> bool {
        let syncs = self.ground.log().is_syncing() || self.ground.log().is_stable();
        let repairs = self.ground.bad().are_of(id);
        let volume = self.ground.volume_mut(id);
        // What went past the cache is to outlive the handle that wrote it.
        let asks = !volume.is_fenced() && volume.backend().is_dirty();
        let asks = asks && !volume.backend().is_flushing() && !volume.backend().wants_flush();
        if asks {
            volume.backend_mut().want_flush();
        }
        let unflushed =
            volume.backend().wants_flush() && !volume.is_fenced() || volume.backend().is_flushing();
        let drains = self.drain.is_in_flight(id);
        let in_flight =
            repairs || drains || volume.backend().is_disowning() || self.front.is_direct(id);
        let sequence = volume.log().published();
        let unstable = volume.log().durable() < sequence;
        if unstable {
            self.ground.log_mut().want_stable();
        }
        if asks || unstable && !syncs {
            self.ground.stir();
        }
        let volume = self.ground.volume(id);
        let copied =
            volume.is_fenced() || volume.copy().is_none_or(|copy| copy.has(sequence, true));
        if !copied {
            self.ground.stabilise_copy(id, sequence);
        }
        let at_rest = !in_flight && !unflushed && !unstable && copied;
        // What is on its way into the cache is of no use when it arrives.
        if at_rest && self.ground.overtake(id, 0, u64::MAX / 2) > 0 {
            self.ground.note_forgotten(id);
        }
        at_rest
    }
}
