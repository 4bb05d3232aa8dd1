//! Resizing: a volume becomes larger after its image has, and smaller before it does.

use crate::api::{
    BLOCK_BYTES, BackendOp, ControlError, IoError, Nanos, VOLUME_BYTES_MAX, VolumeId,
};
use crate::base::flight::Io;
use crate::blocks::index::OBJECT_BLOCKS;
use crate::blocks::ledger::object_of;
use crate::engine::Engine;
use crate::ground::task::Task;
use crate::ground::task::{Resize, Stage};

impl Engine {
    /// Changes the size of a volume and of its image. A smaller one loses what lies beyond its end,
    /// dirty or not. [`Effect::ControlDone`](crate::api::Effect::ControlDone) comes when both have
    /// the new size and a restart will find it. When the backend refuses, the volume has its old
    /// size; what the cache held beyond the new end is lost all the same.
    pub fn resize(&mut self, _now: Nanos, id: VolumeId, size_bytes: u64, control: u64) {
        self.ground.stir();
        let Some(volume) = self.controllable(id, control, false) else { return };
        let whole = size_bytes.is_multiple_of(BLOCK_BYTES as u64);
        let error = match () {
            () if !volume.is_attached() => Some(ControlError::Detached),
            () if volume.spec().read_only => Some(ControlError::ReadOnly),
            () if volume.copy().is_some() => Some(ControlError::Paired),
            () if size_bytes == 0 || size_bytes > VOLUME_BYTES_MAX || !whole => {
                Some(ControlError::Size(size_bytes))
            }
            () => volume.loss(),
        };
        if let Some(error) = error {
            return self.ground.control_done(control, Err(error));
        }
        volume.begin_resize(control, size_bytes);
        if matches!(volume.task(), Task::Resize(resize) if resize.stage() == Stage::Backend) {
            self.resize_image(id, size_bytes);
        }
    }

    pub(crate) fn pump_resize(&mut self, id: VolumeId, resize: Resize) {
        let dead = self.ground.is_dead();
        let volume = self.ground.volume_mut(id);
        let stage = match resize.stage() {
            Stage::Backend => return,
            Stage::Recorded { number, result } => {
                if self.ground.checkpoints().durable() >= number {
                    self.end_resize(id, result);
                } else if dead {
                    self.end_resize(id, result.and(Err(ControlError::Device)));
                }
                return;
            }
            _ if volume.is_fenced() => {
                return self.end_resize(id, Err(ControlError::Backend(IoError::Fenced)));
            }
            _ if dead => return self.end_resize(id, Err(ControlError::Device)),
            Stage::Requests => {
                let end = volume.blocks();
                if self.front.reaches_beyond(id, end) {
                    return;
                }
                Stage::Drains
            }
            Stage::Drains => {
                let first = object_of(volume.blocks());
                if self.drain.is_draining_from(id, first) {
                    return;
                }
                self.truncate(id);
                let volume = self.ground.volume_mut(id);
                let sequence = volume.log().built();
                volume.progress_mut().want(sequence);
                Stage::Drain { sequence }
            }
            Stage::Drain { sequence } => {
                if volume.progress().drained() < sequence {
                    return;
                }
                self.ground.checkpoints_mut().want();
                Stage::Checkpoint { number: self.ground.checkpoints().next() }
            }
            Stage::Checkpoint { number } if self.ground.checkpoints().durable() < number => return,
            Stage::Checkpoint { .. } => Stage::Backend,
        };
        self.ground.volume_mut(id).go_on_with_resize(stage);
        self.ground.stir();
        if stage == Stage::Backend {
            self.resize_image(id, resize.size_bytes());
        }
    }

    fn resize_image(&mut self, id: VolumeId, size_bytes: u64) {
        self.ground.backend(Io::Resize { volume: id }, id, BackendOp::Resize { size_bytes });
    }

    pub(crate) fn resize_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_fence(now, id, result);
        let result = result.map_err(ControlError::Backend);
        let number = self.ground.checkpoints().next();
        self.ground.volume_mut(id).go_on_with_resize(Stage::Recorded { number, result });
        self.ground.checkpoints_mut().want();
        self.ground.stir();
    }

    fn end_resize(&mut self, id: VolumeId, result: Result<(), ControlError>) {
        let control = self.ground.volume_mut(id).end_resize(result);
        // The drain goes back to what it has left out.
        self.drain.look_again(id);
        self.ground.control_done(control, result);
    }

    /// Drops everything beyond the end.
    fn truncate(&mut self, id: VolumeId) {
        self.ground.note_forgotten(id);
        let end = self.ground.volume(id).blocks();
        self.ground.overtake(id, end, u64::MAX / 2);
        self.drain.truncate(&mut self.ground, id, end, end.div_ceil(OBJECT_BLOCKS as u64) as u32);
        self.cache.forget_evicted();
        self.drain.update(&mut self.ground, id);
    }
}
