//! What a volume does with writes: the mode that is asked for, and the one in force.

use crate::api::{Degraded, Mode, Nanos, VolumeId};
use crate::engine::Engine;
use crate::ground::task::Task;

impl Engine {
    /// Changes the mode. [`Effect::ControlDone`](crate::api::Effect::ControlDone) comes when it is
    /// in force: for `Off` when the volume is drained and its blocks are dropped; for the others
    /// when it is recorded. Going to write-through with a backlog, writes are acknowledged at half
    /// of the drain's speed until the backlog is gone.
    pub fn set_mode(&mut self, now: Nanos, id: VolumeId, mode: Mode, control: u64) {
        self.ground.stir();
        if self.controllable(id, control, false).is_none() {
            return;
        }
        self.ground.volume_mut(id).ask_for_mode(mode);
        self.enter_mode(now, id);
        let volume = self.ground.volume_mut(id);
        if mode == Mode::Off {
            volume.begin(Task::Purge { control, attaching: false });
        } else {
            self.persist(control);
        }
    }

    /// Says what a volume in write-back does for now, while it is to have a second copy and none
    /// counts (RFC 9). Nothing of that is recorded: with every [`Engine::attach`] it is the
    /// caller's to say again, before the first request.
    pub fn set_degraded(&mut self, now: Nanos, id: VolumeId, degraded: Degraded) {
        let dead = self.ground.is_dead();
        let volume = self.ground.get_mut(id);
        if !volume.is_some_and(|volume| volume.degrade(degraded)) {
            return;
        }
        self.ground.stir();
        let volume = self.ground.volume_mut(id);
        if volume.spec().mode == Mode::WriteBack && !dead {
            self.enter_mode(now, id);
        }
    }

    /// Puts the mode that the volume is to have in force.
    fn enter_mode(&mut self, now: Nanos, id: VolumeId) {
        let volume = self.ground.volume_mut(id);
        volume.enter_mode();
        if volume.groups_begin() {
            self.drain.begin_groups(&mut self.ground, now, id, false);
        }
    }
}
