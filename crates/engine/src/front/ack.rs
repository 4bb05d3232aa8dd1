//! Acknowledgements: when a change or a flush may be answered.
//!
//! Stable media first (flush, FUA, *until-flush*), then the backend for write-through, then
//! back-pressure, which holds answers back so that the dirty level meets the drain smoothly.

use crate::api::{BLOCK_BYTES, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::control::volume::Stage;
use crate::engine::Engine;

/// Longest that one acknowledgement is held back.
const HOLD_MAX_NS: Nanos = 1_000_000_000;

impl Engine {
    /// Whether the copy at the peer has what the operation has left in the log; if not, it waits until then.
    pub(crate) fn has_copy(&mut self, id: OpId) -> bool {
        let op = &self.ops[id];
        self.ground.has_copy(op.request.volume, id, op.sequence, op.needs_stable())
    }

    /// The log has what an operation needs: the copy at the peer has to have it too, then it goes on.
    pub(crate) fn go_on(&mut self, now: Nanos, id: OpId) {
        if !self.has_copy(id) {
            return;
        }
        let op = &mut self.ops[id];
        if op.request.op == Op::Flush {
            self.flush_stable(id);
        } else if op.direct && op.stage == Stage::InLog {
            op.invalidated = true;
            op.stage = Stage::Whole;
            let vid = op.request.volume;
            self.park(vid, id);
        } else {
            self.ack(now, id);
        }
    }

    /// Begins a flush: everything completed before it becomes stable.
    pub(crate) fn start_flush(&mut self, now: Nanos, id: OpId) {
        let vid = self.ops[id].request.volume;
        self.drain.cut(&mut self.ground, now, vid, true);
        let volume = self.ground.volume_mut(vid);
        volume.flushes = true;
        let (built, durable) = (volume.log.built(), volume.log.durable());
        self.ops[id].sequence = built;
        if durable == built || mutated!(FlushWithoutSync) {
            self.go_on(now, id);
        } else if self.ground.base.dead {
            self.ack_when_drained(id);
        } else {
            self.ground.log.wait_all_stable(id);
            self.pump_sync(now);
        }
    }

    /// What is published may never become stable on a dead device: the backend must have it, and its record
    /// must no longer name the device.
    pub(crate) fn ack_when_drained(&mut self, id: OpId) {
        let vid = self.ops[id].request.volume;
        if self.ground.volume(vid).is_refusing() {
            return self.complete(id, Err(RequestError::Io));
        }
        self.ops[id].sequence = self.ground.volume(vid).log.published();
        self.ops[id].stage = Stage::Acking;
        self.ground.volume_mut(vid).through.push_back(id);
        self.pump_through(vid);
    }

    /// The log is stable for a flush; what went past it may still need the backend's flush.
    fn flush_stable(&mut self, id: OpId) {
        let volume = self.ground.volume_mut(self.ops[id].request.volume);
        if volume.backend.is_dirty() {
            self.flush_backend_for(id);
        } else if volume.backend.take_lost() {
            self.complete(id, Err(RequestError::Io));
        } else {
            self.complete(id, Ok(()));
        }
    }

    /// Releases who need not wait any longer, and issues the next sync when somebody must.
    pub(crate) fn pump_sync(&mut self, now: Nanos) {
        let dead = self.ground.base.dead;
        let mut look = self.ground.log.look();
        while let Some(part) = self.ground.log.next_stable_part(&mut look, dead) {
            self.drain.stable(&mut self.ground, part);
        }
        while let Some(op) = self.ground.log.next_stable_op(&mut look) {
            self.go_on(now, op);
        }
        self.ground.sync(look);
    }

    pub(crate) fn sync_done(&mut self, now: Nanos, result: Result<(), IoError>) {
        if self.ground.sync_done(result).is_err() {
            return self.device_failed();
        }
        for volume in self.ground.volumes.iter_mut().flatten() {
            volume.recheck = true;
        }
        self.pump_sync(now);
    }

    /// Acknowledges a change as soon as mode and dirty level allow.
    pub(crate) fn ack(&mut self, now: Nanos, id: OpId) {
        self.ops[id].stage = Stage::Acking;
        let op = self.ops[id];
        if op.incoming.is_some() {
            return self.complete(id, Ok(()));
        }
        let volume = self.ground.volumes[op.request.volume.0 as usize].as_mut().expect("it has an operation");
        if volume.is_refusing() {
            return self.complete(id, Err(RequestError::Io));
        }
        if volume.mode != Mode::WriteBack && op.sequence > volume.progress.safe() {
            if op.sequence <= volume.backlog.sequence() || !volume.backlog.take_credit(op.request.len) {
                let at = volume.through.iter().rposition(|&o| self.ops[o].sequence <= op.sequence);
                volume.through.insert(at.map_or(0, |i| i + 1), id);
                return;
            }
        } else if volume.mode == Mode::WriteBack {
            // Zeroes take no room: only data is held back.
            let len = if matches!(op.request.op, Op::Write { .. }) { op.request.len } else { 0 };
            let hold_ns = self.hold_ns(now, op.request.volume, len);
            if hold_ns > 0 {
                self.ground.volume_mut(op.request.volume).held.push_back(id);
                self.ops[id].held_since = now;
                return;
            }
        }
        self.answer(id);
    }

    /// Answers a change that is as safe as the mode wants it. FUA covers what was completed before it, and that may have
    /// gone past the cache.
    fn answer(&mut self, id: OpId) {
        // It may have waited for something else since before the copy counted.
        if !self.has_copy(id) {
            return;
        }
        let request = &self.ops[id].request;
        if request.op.is_fua() && self.ground.volume(request.volume).backend.is_dirty() {
            self.flush_backend_for(id);
        } else {
            self.complete(id, Ok(()));
        }
    }

    /// How long the acknowledgement of `len` bytes is to be spread: nothing below half of the quota,
    /// above it so that the client comes down to the drain's speed as the quota is reached.
    fn hold_ns(&self, now: Nanos, id: VolumeId, len: u64) -> Nanos {
        let volume = self.ground.volume(id);
        let max = self.ground.dirty_bytes_max(id) as f64;
        let dirty = ((volume.ledger.held() + volume.unpublished_blocks) * BLOCK_BYTES as u64) as f64;
        let low = max / 2.0;
        if dirty <= low || volume.backend.rate().is_stale(now) {
            return 0;
        }
        let pressure = ((dirty - low) / (max - low)).min(1.0);
        let ns = len as f64 * pressure / volume.backend.rate().bytes_per_s() * 1e9;
        ns.min(HOLD_MAX_NS as f64) as Nanos
    }

    /// When the oldest acknowledgement that is held back is to be released, as dirty level and drain are now: the others wait their
    /// turn after it, but none longer than [`HOLD_MAX_NS`].
    pub(crate) fn held_due(&self, now: Nanos, id: VolumeId) -> Option<Nanos> {
        let volume = self.ground.volume(id);
        let op = &self.ops[*volume.held.front()?];
        if volume.mode != Mode::WriteBack || volume.closing {
            return Some(now);
        }
        let hold_ns = self.hold_ns(now, id, op.request.len);
        if hold_ns == 0 {
            return Some(now);
        }
        let due = volume.released_at.max(op.held_since) + hold_ns;
        Some(due.min(op.held_since + HOLD_MAX_NS))
    }

    /// Releases held acknowledgements whose time has come, or whose reason is gone.
    pub(crate) fn pump_held(&mut self, now: Nanos) {
        for i in 0..self.ground.volumes.len() {
            let id = VolumeId(i as u16);
            while self.ground.volumes[i].is_some()
                && let Some(due) = self.held_due(now, id).filter(|&due| due <= now)
            {
                let volume = self.ground.volumes[i].as_mut().expect("looked at just now");
                let op = volume.held.pop_front().expect("the one that is due");
                volume.released_at = due;
                volume.count.held_ns += now.saturating_sub(self.ops[op].held_since);
                self.answer(op);
            }
            if self.ground.base.dead
                && self.ground.volumes[i]
                    .as_ref()
                    .is_some_and(|v| !v.backend.is_disowned() && !v.through.is_empty())
            {
                self.disown(now, id);
            }
            self.pump_through(id);
        }
    }

    /// Acknowledges write-through changes that the backend has.
    pub(crate) fn pump_through(&mut self, id: VolumeId) {
        while let Some(volume) = &mut self.ground.volumes[id.0 as usize] {
            let Some(&front) = volume.through.front() else { return };
            if self.ground.base.dead && !volume.backend.is_disowned() {
                return; // A restart might find something older on the device and drain it over this.
            }
            let op = &self.ops[front];
            // Where the drain is grouped, what was not acknowledged before the mode became write-back may stand in the
            // image out of order: it is acknowledged with its group.
            let ordered = !volume.progress.is_grouped() && volume.mode == Mode::WriteBack;
            let drained = op.sequence <= volume.progress.safe() || ordered;
            if !drained {
                if !volume.backlog.take_credit(op.request.len) {
                    return;
                }
            }
            volume.through.pop_front();
            if self.ops[front].request.op == Op::Flush {
                self.flush_stable(front);
            } else {
                self.answer(front);
            }
        }
    }
}
