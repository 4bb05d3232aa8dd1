//! Snapshots: the image is brought to one cut of the volume and left alone there while the backend
//! takes a snapshot of it.
//!
//! The volume goes on meanwhile, and nobody waits: what is written after the cut is in the open
//! group, which grows until the snapshot is there, and copies that it supersedes are frozen until
//! the image has them. First the backlog is drained as usual, so that this is short.

use crate::api::{BackendOp, ControlError, IoError, Mode, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::drain::GROUP_BLOCKS_MAX;
use crate::engine::Engine;
use crate::ground::task::Step;
use crate::ground::task::Task;

/// How often what has become dirty during the drain is drained before the cut, if it is more than a
/// group.
const PASSES_MAX: u32 = 4;

impl Engine {
    /// Has the backend take a snapshot ([`BackendOp::Snapshot`]) of the image as the volume is at a
    /// moment after this call: with every write that was acknowledged before, exactly at a point of
    /// the acknowledged order where the drain goes by groups. Requests go on.
    /// [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when it is there.
    pub fn snapshot(&mut self, _now: Nanos, id: VolumeId, control: u64) {
        self.ground.stir();
        let Some(volume) = self.controllable(id, control, false) else { return };
        let error = match () {
            () if !volume.is_attached() => Some(ControlError::Detached),
            () if volume.mode() == Mode::WriteBack
                && !volume.progress().is_grouped()
                && !volume.spec().read_only =>
            {
                Some(ControlError::Unordered)
            }
            () => volume.loss(),
        };
        if let Some(error) = error {
            return self.ground.control_done(control, Err(error));
        }
        let sequence = volume.log().built();
        volume.progress_mut().want(sequence);
        volume.begin(Task::Snapshot { control, step: Step::Backlog { sequence, pass: 1 } });
    }

    pub(crate) fn pump_snapshot(&mut self, now: Nanos, id: VolumeId, control: u64, step: Step) {
        let dead = self.ground.is_dead();
        let volume = self.ground.volume(id);
        let error = match () {
            () if step == Step::Taking => return,
            () if volume.is_fenced() => Some(ControlError::Backend(IoError::Fenced)),
            () if dead => Some(ControlError::Device),
            () => volume.loss(),
        };
        if let Some(error) = error {
            return self.end_snapshot(id, control, Err(error));
        }
        let Some(step) = self.next_step(now, id, step) else { return };
        let volume = self.ground.volume_mut(id);
        volume.begin(Task::Snapshot { control, step });
        self.ground.stir();
        if step == Step::Taking {
            self.ground.backend(Io::Snapshot { volume: id }, id, BackendOp::Snapshot { control });
        }
    }

    /// The step that follows, if the one at hand is over.
    fn next_step(&mut self, now: Nanos, id: VolumeId, step: Step) -> Option<Step> {
        let quiet = self.image_is_quiet(id);
        let volume = self.ground.volume_mut(id);
        let grouped = volume.progress().is_grouped();
        match step {
            Step::Backlog { sequence, .. } if volume.progress().drained() < sequence => None,
            Step::Backlog { pass, .. }
                if volume.ledger().held() > GROUP_BLOCKS_MAX && pass < PASSES_MAX =>
            {
                let sequence = volume.log().built();
                volume.progress_mut().want(sequence);
                Some(Step::Backlog { sequence, pass: pass + 1 })
            }
            Step::Backlog { .. } => Some(Step::Cut),
            Step::Cut if !grouped => Some(Step::Image),
            Step::Cut if self.drain.has_closed(id) => None,
            Step::Cut => {
                self.drain.close_whole(&mut self.ground, now, id);
                Some(Step::Image)
            }
            Step::Image if !grouped => quiet.then_some(Step::Taking),
            Step::Image if volume.ledger().cut_index().is_none() || !quiet => None,
            Step::Image if volume.ledger().cut_is_reached() => Some(Step::Taking),
            Step::Image => {
                self.drain.hurry_cut(&mut self.ground, now, id);
                None
            }
            Step::Taking => None,
        }
    }

    /// Nothing is on its way to the image: of what clients send past the cache, nothing from before
    /// the mode was changed.
    fn image_is_quiet(&self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        let direct = volume.goes_direct() || !self.front.is_direct(id);
        self.drain.is_quiet(id) && direct && !volume.backend().is_flushing()
    }

    pub(crate) fn snapshot_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_fence(now, id, result);
        let Task::Snapshot { control, .. } = self.ground.volume(id).task() else {
            unreachable!("a snapshot was being taken")
        };
        self.end_snapshot(id, control, result.map_err(ControlError::Backend));
    }

    fn end_snapshot(&mut self, id: VolumeId, control: u64, result: Result<(), ControlError>) {
        self.ground.volume_mut(id).end_task();
        self.drain.end_cut(&mut self.ground, id);
        self.ground.volume_mut(id).recheck();
        self.ground.stir();
        self.ground.control_done(control, result);
    }
}
