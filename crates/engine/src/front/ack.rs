//! Acknowledgements: when a change or a flush may be answered.
//!
//! Stable media first (flush, FUA, *until-flush*), then the backend for write-through, then
//! back-pressure, which holds answers back so that the dirty level meets the drain smoothly.

use crate::api::{BLOCK_BYTES, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::consequences::Consequence;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::front::Front;
use crate::front::op::Stage;
use crate::ground::Ground;

/// Longest that one acknowledgement is held back.
const HOLD_MAX_NS: Nanos = 1_000_000_000;

impl Front {
    /// Whether the copy at the peer has what the operation has left in the log; if not, it waits
    /// until then.
    pub(super) fn has_copy(&self, ground: &mut Ground, id: OpId) -> bool {
        let op = &self.ops[id];
        ground.has_copy(op.request.volume, id, op.sequence, op.needs_stable())
    }

    /// The log has what an operation needs: the copy at the peer has to have it too, then it goes
    /// on.
    pub(crate) fn go_on(&mut self, ground: &mut Ground, now: Nanos, id: OpId) {
        if !self.has_copy(ground, id) {
            return;
        }
        let op = &mut self.ops[id];
        if op.request.op == Op::Flush {
            self.flush_stable(ground, id);
        } else if op.direct && op.stage == Stage::InLog {
            op.invalidated = true;
            op.stage = Stage::Whole;
            self.park(ground, id);
        } else {
            self.ack(ground, now, id);
        }
    }

    /// Begins a flush: everything completed before it becomes stable. Tells whether it waits for
    /// that.
    pub(crate) fn start_flush(&mut self, ground: &mut Ground, now: Nanos, id: OpId) -> bool {
        let vid = self.ops[id].request.volume;
        self.volumes.of_mut(vid).flushes = true;
        let volume = ground.volume(vid);
        let (built, durable) = (volume.log().built(), volume.log().durable());
        self.ops[id].sequence = built;
        if durable == built || mutated!(FlushWithoutSync) {
            self.go_on(ground, now, id);
        } else if ground.is_dead() {
            self.ack_when_drained(ground, id);
        } else {
            ground.log_mut().wait_all_stable(id);
            return true;
        }
        false
    }

    /// What is published may never become stable on a dead device: the backend must have it, and
    /// its record must no longer name the device.
    pub(super) fn ack_when_drained(&mut self, ground: &mut Ground, id: OpId) {
        let vid = self.ops[id].request.volume;
        let volume = ground.volume_mut(vid);
        if volume.is_refusing() {
            return self.complete(ground, id, Err(RequestError::Io));
        }
        self.ops[id].sequence = volume.log().published();
        self.ops[id].stage = Stage::Acking;
        volume.wait_for_all_drained(id);
        self.release_drained(ground, vid);
    }

    /// The log is stable for a flush; what went past it may still need the backend's flush.
    fn flush_stable(&mut self, ground: &mut Ground, id: OpId) {
        let backend = ground.volume_mut(self.ops[id].request.volume).backend_mut();
        if backend.is_dirty() {
            self.flush_backend_for(ground, id);
        } else if backend.take_lost() {
            self.complete(ground, id, Err(RequestError::Io));
        } else {
            self.complete(ground, id, Ok(()));
        }
    }

    /// Acknowledges a change as soon as mode and dirty level allow.
    fn ack(&mut self, ground: &mut Ground, now: Nanos, id: OpId) {
        self.ops[id].stage = Stage::Acking;
        let op = &self.ops[id];
        let (vid, len) = (op.request.volume, op.request.len);
        if op.incoming.is_some() {
            return self.complete(ground, id, Ok(()));
        }
        let volume = ground.volume_mut(vid);
        if volume.is_refusing() {
            return self.complete(ground, id, Err(RequestError::Io));
        }
        if volume.mode() != Mode::WriteBack && op.sequence > volume.progress().safe() {
            if op.sequence <= volume.backlog() || !volume.take_credit(len) {
                volume.wait_for_drain(id, |other| self.ops[other].sequence <= op.sequence);
                return;
            }
        } else if volume.mode() == Mode::WriteBack {
            // Zeroes take no room: only data is held back.
            let len = if matches!(op.request.op, Op::Write { .. }) { len } else { 0 };
            if hold_ns(ground, now, vid, len) > 0 {
                self.volumes.of_mut(vid).held.push_back(id);
                self.ops[id].held_since = now;
                return;
            }
        }
        self.answer(ground, id);
    }

    /// Answers a change that is as safe as the mode wants it. FUA covers what was completed before
    /// it, and that may have gone past the cache.
    fn answer(&mut self, ground: &mut Ground, id: OpId) {
        // It may have waited for something else since before the copy counted.
        if !self.has_copy(ground, id) {
            return;
        }
        let request = &self.ops[id].request;
        if request.op.is_fua() && ground.volume(request.volume).backend().is_dirty() {
            self.flush_backend_for(ground, id);
        } else {
            self.complete(ground, id, Ok(()));
        }
    }

    /// When the oldest acknowledgement of a volume that is held back is to be released, as dirty
    /// level and drain are now: the others wait their turn after it, but none longer than
    /// [`HOLD_MAX_NS`].
    fn held_due(&self, ground: &Ground, now: Nanos, id: VolumeId) -> Option<Nanos> {
        let clients = self.volumes.of(id);
        let op = &self.ops[*clients.held.front()?];
        let volume = ground.volume(id);
        if volume.mode() != Mode::WriteBack || volume.is_closing() {
            return Some(now);
        }
        let hold_ns = hold_ns(ground, now, id, op.request.len);
        if hold_ns == 0 {
            return Some(now);
        }
        let due = clients.released_at.max(op.held_since) + hold_ns;
        Some(due.min(op.held_since + HOLD_MAX_NS))
    }

    /// When an acknowledgement that is held back is to be released, if nothing else happens.
    pub(crate) fn deadline(&self, ground: &Ground, now: Nanos) -> Option<Nanos> {
        ground.ids().filter_map(|id| self.held_due(ground, now, id)).min()
    }

    /// Releases held acknowledgements whose time has come, or whose reason is gone, and those that
    /// wait for the drain.
    pub(crate) fn release(&mut self, ground: &mut Ground, now: Nanos) {
        for id in ground.places() {
            while ground.get(id).is_some()
                && let Some(due) = self.held_due(ground, now, id).filter(|&due| due <= now)
            {
                let clients = self.volumes.of_mut(id);
                let op = clients.held.pop_front().expect("the one that is due");
                clients.released_at = due;
                let held_ns = now.saturating_sub(self.ops[op].held_since);
                ground.volume_mut(id).count_mut().held_ns += held_ns;
                self.answer(ground, op);
            }
            let Some(volume) = ground.get(id) else { continue };
            if ground.is_dead() && !volume.backend().is_disowned() && volume.is_waited_for() {
                ground.tell(Consequence::Disown(id));
            }
            self.release_drained(ground, id);
        }
    }

    /// Acknowledges write-through changes that the image or a committed group has, and some ahead
    /// of that while a backlog of write-back drains.
    pub(crate) fn release_drained(&mut self, ground: &mut Ground, id: VolumeId) {
        let dead = ground.is_dead();
        while let Some(volume) = ground.get_mut(id) {
            let Some(front) = volume.next_through() else { return };
            if dead && !volume.backend().is_disowned() {
                return; // A restart might find something older on the device and drain it over this.
            }
            let op = &self.ops[front];
            // Where the drain is grouped, what was not acknowledged before the mode became
            // write-back may stand in the image out of order: it is acknowledged with its group.
            let ordered = !volume.progress().is_grouped() && volume.mode() == Mode::WriteBack;
            let drained = op.sequence <= volume.progress().safe() || ordered;
            if !drained && !volume.take_credit(op.request.len) {
                return;
            }
            volume.end_through();
            if op.request.op == Op::Flush {
                self.flush_stable(ground, front);
            } else {
                self.answer(ground, front);
            }
        }
    }
}

/// How long the acknowledgement of `len` bytes is to be spread: nothing below half of the quota,
/// above it so that the client comes down to the drain's speed as the quota is reached.
fn hold_ns(ground: &Ground, now: Nanos, id: VolumeId, len: u64) -> Nanos {
    let volume = ground.volume(id);
    let max = ground.dirty_bytes_max(id) as f64;
    let dirty = (volume.blocks_used() * BLOCK_BYTES as u64) as f64;
    let low = max / 2.0;
    if dirty <= low || volume.backend().rate().is_stale(now) {
        return 0;
    }
    let pressure = ((dirty - low) / (max - low)).min(1.0);
    let ns = len as f64 * pressure / volume.backend().rate().bytes_per_s() * 1e9;
    ns.min(HOLD_MAX_NS as f64) as Nanos
}
