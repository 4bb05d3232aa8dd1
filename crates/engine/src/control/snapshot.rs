//! Snapshots: the image is brought to one cut of the volume and left alone there while the backend takes a snapshot of it.
//!
//! The volume goes on meanwhile, and nobody waits: what is written after the cut is in the open group, which grows until
//! the snapshot is there, and copies that it supersedes are frozen until the image has them. First the backlog is drained
//! as usual, so that this is short.

use crate::api::{BackendOp, ControlError, IoError, Mode, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mutation::mutated;
use crate::blocks::index::ObjectFlags;
use crate::control::volume::{DirtyObject, Task, Volume};
use crate::drain::group::GROUP_BLOCKS_MAX;
use crate::engine::Engine;

/// How often what has become dirty during the drain is drained before the cut, if it is more than a group.
const PASSES_MAX: u32 = 4;

/// What a snapshot is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The drain of the backlog.
    Backlog { sequence: u64, pass: u32 },
    /// That no group is closed, so that everything dirty can be.
    Cut,
    /// The image.
    Image,
    /// The backend.
    Taking,
}

impl Volume {
    /// The image is as the snapshot is to find it.
    pub(crate) fn image_is_held(&self) -> bool {
        match self.task {
            Task::Snapshot { step: Step::Taking, .. } => !mutated!(SnapshotUnderWrites),
            Task::Snapshot { step: Step::Image, .. } => self.groups.is_none(),
            _ => false,
        }
    }

    /// What the cut needs and nobody is bringing to the image is drained next.
    fn queue_cut(&mut self, now: Nanos) {
        let Some(cut) = self.ledger.cut_index() else { return };
        let objects: Vec<u32> = cut.objects(0).collect();
        let closed = self.groups.as_ref().and_then(|groups| groups.closed.as_ref());
        let sequence = closed.expect("a cut is a closed group").sequence;
        for dirty in
            self.dirty_objects.iter_mut().filter(|dirty| objects.binary_search(&dirty.object).is_ok())
        {
            dirty.drain_from = dirty.drain_from.min(sequence);
        }
        self.drain_cursor = 0;
        for object in objects {
            if !self.ledger.flags(object).intersects(ObjectFlags::QUEUED | ObjectFlags::DRAINING) {
                self.requeue_dirty(DirtyObject {
                    object,
                    first_sequence: sequence,
                    since: now,
                    drain_from: sequence,
                    wait_for: sequence,
                    then_first: sequence,
                });
            }
        }
    }

    /// Nothing is on its way to the image: of what clients send past the cache, nothing from before the mode was changed.
    fn image_is_quiet(&self) -> bool {
        self.drains.is_empty()
            && (self.goes_direct() || self.direct_in_flight == 0)
            && self.unflushed.is_empty()
            && self.flushing.is_empty()
            && !self.backend.is_flushing()
    }
}

impl Engine {
    /// Has the backend take a snapshot ([`BackendOp::Snapshot`]) of the image as the volume is at a moment after this call:
    /// with every write that was acknowledged before, exactly at a point of the acknowledged order where the drain goes by
    /// groups. Requests go on. [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when it is there.
    pub fn snapshot(&mut self, _now: Nanos, id: VolumeId, control: u64) {
        self.ground.base.out.stir();
        let Some(volume) = self.controllable(id, control, false) else { return };
        let error = match () {
            () if !volume.attached => Some(ControlError::Detached),
            () if volume.mode == Mode::WriteBack && volume.groups.is_none() && !volume.spec.read_only => {
                Some(ControlError::Unordered)
            }
            () => volume.loss(),
        };
        if let Some(error) = error {
            return self.ground.base.out.control_done(control, Err(error));
        }
        let sequence = volume.log.built();
        volume.drain_all_until = volume.drain_all_until.max(sequence);
        volume.task = Task::Snapshot { control, step: Step::Backlog { sequence, pass: 1 } };
    }

    pub(crate) fn pump_snapshot(&mut self, now: Nanos, id: VolumeId, control: u64, step: Step) {
        let dead = self.ground.base.dead;
        let (volume, space) = self.ground.volume_and_space(id);
        let error = match () {
            () if step == Step::Taking => return,
            () if volume.fenced => Some(ControlError::Backend(IoError::Fenced)),
            () if dead => Some(ControlError::Device),
            () => volume.loss(),
        };
        if let Some(error) = error {
            return self.end_snapshot(id, control, Err(error));
        }
        let next = match step {
            Step::Backlog { sequence, .. } if volume.progress.drained() < sequence => None,
            Step::Backlog { pass, .. } if volume.ledger.held() > GROUP_BLOCKS_MAX && pass < PASSES_MAX => {
                let sequence = volume.log.built();
                volume.drain_all_until = volume.drain_all_until.max(sequence);
                Some(Step::Backlog { sequence, pass: pass + 1 })
            }
            Step::Backlog { .. } => Some(Step::Cut),
            Step::Cut if volume.groups.is_none() => Some(Step::Image),
            Step::Cut if volume.groups.as_ref().is_some_and(|groups| groups.closed.is_some()) => None,
            Step::Cut => {
                volume.close_whole(space, now);
                Some(Step::Image)
            }
            Step::Image => match &volume.groups {
                None => volume.image_is_quiet().then_some(Step::Taking),
                Some(_) if volume.ledger.cut_index().is_none() || !volume.image_is_quiet() => None,
                Some(_) if volume.ledger.cut_is_reached() => Some(Step::Taking),
                Some(_) => {
                    volume.queue_cut(now);
                    None
                }
            },
            Step::Taking => None,
        };
        let Some(step) = next else { return };
        volume.task = Task::Snapshot { control, step };
        self.ground.base.out.stir();
        if step == Step::Taking {
            self.ground.backend(Io::Snapshot { volume: id }, id, BackendOp::Snapshot { control });
        }
    }

    pub(crate) fn snapshot_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_fence(now, id, result);
        let Task::Snapshot { control, .. } = self.ground.volume(id).task else {
            unreachable!("a snapshot was being taken")
        };
        self.end_snapshot(id, control, result.map_err(ControlError::Backend));
    }

    fn end_snapshot(&mut self, id: VolumeId, control: u64, result: Result<(), ControlError>) {
        let (volume, space) = self.ground.volume_and_space(id);
        volume.task = Task::None;
        if volume.ledger.cut_index().is_some() {
            volume.groups.as_mut().expect("a cut is one of its groups").closed = None;
            volume.ledger.thaw(space);
        }
        if let Some(closed) = volume.groups.as_mut().and_then(|groups| groups.closed.as_mut()) {
            // It goes on as any other.
            closed.whole = false;
        }
        // Their objects are not brought to the cut any more.
        for i in 0..self.ground.volume(id).drains.len() {
            let d = self.ground.volume(id).drains[i];
            self.drains[d].cut = false;
        }
        self.ground.volume_mut(id).recheck = true;
        self.ground.base.out.stir();
        self.ground.base.out.control_done(control, result);
    }
}
