//! What the core does when a part of it is gone: the cache device, or the right to the image.

use crate::api::*;
use crate::engine::{Engine, Io};
use crate::format::Stream;
use crate::volume::{OpId, Stage};

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
            self.effects.push_back(Effect::ControlDone { control, result });
        }
        self.fills = crate::read::Fills::new();
        self.unpublished_blocks = 0;
        // Published changes whose stability cannot be known any more are acknowledged by the backend.
        for (_, id) in std::mem::take(&mut self.sync.waiters) {
            if self.ops[id].direct {
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
            volume.sequence_built = volume.sequence;
            volume.backlog_sequence = volume.sequence;
            volume.drain_all_until = u64::MAX;
            volume.mode = Mode::WriteAround;
            volume.recheck = true;
        }
        for id in unpublished {
            self.redirect(id);
        }
        for i in 0..self.volumes.len() {
            if self.volumes[i].is_some() {
                self.update_drained(VolumeId(i as u16));
            }
        }
        // Whatever of the streams and of reclaim comes back from the device now is of no interest.
        for stream in Stream::ALL {
            self.log.stream(stream).in_flight.clear();
        }
        self.reclaim.abandon();
        self.stir();
    }

    /// A change that the log did not take goes to the backend.
    fn redirect(&mut self, id: OpId) {
        let op = &mut self.ops[id];
        op.direct = true;
        op.invalidated = false;
        op.logged = 0;
        op.unpublished = 0;
        op.barrier = 0;
        op.stage = Stage::Whole;
        let (vid, first, end, locked) =
            (op.request.volume, op.first_block, op.first_block + op.blocks, op.locked);
        op.locked = true;
        let volume = self.volume_mut(vid);
        if !locked {
            volume.locks.push(crate::volume::Lock { first, end, op: id });
        }
        self.park(vid, id);
    }

    /// Before anything goes past a dead cache device, the image must no longer name it: a restart
    /// would otherwise find the old content on it and believe it.
    pub(crate) fn disown(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if volume.disowning {
            return;
        }
        volume.disowning = true;
        let token = self.start_io(Io::Disown { volume: id });
        self.backend(token, id, BackendOp::Disown);
    }

    pub(crate) fn disown_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.note_backend_result(now, id, result);
        let volume = self.volume_mut(id);
        volume.disowning = false;
        volume.disowned = result.is_ok();
        volume.recheck = true;
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    pub(crate) fn fence(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if volume.fenced {
            return;
        }
        volume.fenced = true;
        // Parked operations see it themselves, and those in flight when they come back.
        let mut waiting: Vec<OpId> = volume
            .through
            .drain(..)
            .chain(volume.held.drain(..).map(|(_, op)| op))
            .chain(volume.blocked.drain(..))
            .collect();
        let pending = std::mem::take(&mut volume.pending);
        for op in pending {
            if self.ops[op].unpublished > 0 {
                self.ops[op].error = Some(RequestError::Io);
            } else {
                waiting.push(op);
                self.volume_mut(id).published += 1;
            }
        }
        let volume = self.volume_mut(id);
        for waiter in std::mem::take(&mut volume.drain_waiters) {
            let result = Err(ControlError::Backend(IoError::Fenced));
            self.effects.push_back(Effect::ControlDone { control: waiter.control, result });
        }
        for op in waiting {
            self.complete(op, Err(RequestError::Io));
        }
        self.volume_mut(id).recheck = true;
    }
}

fn changes(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. })
}
