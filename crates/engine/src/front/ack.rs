//! Acknowledgements: when a change or a flush may be answered.
//!
//! Stable media first (flush, FUA, *until-flush*), then the backend for write-through, then
//! back-pressure, which holds answers back so that the dirty level meets the drain smoothly.

use crate::api::{BLOCK_BYTES, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::mutation::mutated;
use crate::control::volume::{OpId, Stage};
use crate::engine::{Engine, Io};
use crate::format::Stream;

/// Longest that one acknowledgement is held back.
const HOLD_MAX_NS: Nanos = 1_000_000_000;

/// The sync of the cache device that is in flight, and who waits for one.
#[derive(Default)]
pub(crate) struct Sync {
    /// Number of the newest log append that it covers.
    pub(crate) in_flight: Option<u64>,
    /// Operations and the log append that must be stable for them.
    pub(crate) waiters: Vec<(u64, OpId)>,
    /// Parts of the drain and the log append that must be stable before they go to the backend.
    pub(crate) drains: Vec<(u64, Waiting)>,
    /// Somebody waits for everything published to be stable.
    pub(crate) wanted: bool,
}

/// A part of the drain that waits for stable media.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    pub(crate) volume: VolumeId,
    /// It has nothing of a later record of the volume.
    pub(crate) sequence: u64,
    pub(crate) part: Deferred,
}

/// What the drain sends to the backend as soon as the log is stable.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deferred {
    /// A piece that has been read.
    Piece(u32),
    /// Zeroes of a drain: first block and number.
    Zeroes(u32, u64, u32),
    /// A frame of a group's redo that is complete.
    Frame(u32),
}

impl Engine {
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
        let issued = self.log.streams[Stream::Log as usize].issued;
        self.cut_group(now, vid, true);
        let volume = self.volume_mut(vid);
        volume.flushes = true;
        let (built, durable) = (volume.log.built(), volume.log.durable());
        self.ops[id].sequence = built;
        if durable == built || mutated!(FlushWithoutSync) {
            self.go_on(now, id);
        } else if self.dead {
            self.ack_when_drained(id);
        } else {
            self.sync.waiters.push((issued, id));
            self.pump_sync(now);
        }
    }

    /// What is published may never become stable on a dead device: the backend must have it, and its record
    /// must no longer name the device.
    pub(crate) fn ack_when_drained(&mut self, id: OpId) {
        let vid = self.ops[id].request.volume;
        if self.volume(vid).is_refusing() {
            return self.complete(id, Err(RequestError::Io));
        }
        self.ops[id].sequence = self.volume(vid).log.published();
        self.ops[id].stage = Stage::Acking;
        self.volume_mut(vid).through.push_back(id);
        self.pump_through(vid);
    }

    /// The log is stable for a flush; what went past it may still need the backend's flush.
    fn flush_stable(&mut self, id: OpId) {
        let volume = self.volume_mut(self.ops[id].request.volume);
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
        let log = &self.log.streams[Stream::Log as usize];
        let (stable, published, issued) = (log.stable, log.published, log.issued);
        let mut wanted = std::mem::take(&mut self.sync.wanted) && stable < published;
        let mut i = 0;
        while let Some(&(append, waiting)) = self.sync.drains.get(i) {
            if append <= stable || self.dead {
                self.sync.drains.swap_remove(i);
                self.drain_stable(waiting);
            } else {
                wanted |= append <= published;
                i += 1;
            }
        }
        let mut i = 0;
        while let Some(&(append, op)) = self.sync.waiters.get(i) {
            if append <= stable {
                self.sync.waiters.remove(i);
                self.go_on(now, op);
            } else {
                wanted |= append <= published;
                i += 1;
            }
        }
        if wanted && self.sync.in_flight.is_some() {
            self.sync.wanted = true;
        }
        if wanted && self.sync.in_flight.is_none() && !self.dead {
            self.sync.in_flight = Some(if mutated!(SyncCoversIssued) { issued } else { published });
            for volume in self.volumes.iter_mut().flatten() {
                volume.log.begin_sync();
            }
            self.device.syncs += 1;
            self.out.sync(Io::Sync);
        }
    }

    pub(crate) fn sync_done(&mut self, now: Nanos, result: Result<(), IoError>) {
        let covered = self.sync.in_flight.take().expect("a sync was in flight");
        if result.is_err() && !mutated!(FailedSyncCounts) {
            return self.device_failed();
        }
        let log = self.log.stream(Stream::Log);
        log.stable = log.stable.max(covered);
        for volume in self.volumes.iter_mut().flatten() {
            volume.log.end_sync();
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
        let volume = self.volumes[op.request.volume.0 as usize].as_mut().expect("it has an operation");
        if volume.is_refusing() {
            return self.complete(id, Err(RequestError::Io));
        }
        if volume.mode != Mode::WriteBack && op.sequence > volume.sequence_safe() {
            if volume.credit_bytes >= op.request.len && op.sequence > volume.backlog_sequence {
                volume.credit_bytes -= op.request.len;
            } else {
                let at = volume.through.iter().rposition(|&o| self.ops[o].sequence <= op.sequence);
                volume.through.insert(at.map_or(0, |i| i + 1), id);
                return;
            }
        } else if volume.mode == Mode::WriteBack {
            // Zeroes take no room: only data is held back.
            let len = if matches!(op.request.op, Op::Write { .. }) { op.request.len } else { 0 };
            let hold_ns = self.hold_ns(now, op.request.volume, len);
            if hold_ns > 0 {
                self.volume_mut(op.request.volume).held.push_back(id);
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
        if request.op.is_fua() && self.volume(request.volume).backend.is_dirty() {
            self.flush_backend_for(id);
        } else {
            self.complete(id, Ok(()));
        }
    }

    /// How long the acknowledgement of `len` bytes is to be spread: nothing below half of the quota,
    /// above it so that the client comes down to the drain's speed as the quota is reached.
    fn hold_ns(&self, now: Nanos, id: VolumeId, len: u64) -> Nanos {
        let volume = self.volume(id);
        let max = self.dirty_bytes_max(id) as f64;
        let dirty = ((volume.ledger.held() + volume.unpublished_blocks) * BLOCK_BYTES as u64) as f64;
        let low = max / 2.0;
        if dirty <= low || volume.drain_rate.is_stale(now) {
            return 0;
        }
        let pressure = ((dirty - low) / (max - low)).min(1.0);
        let ns = len as f64 * pressure / volume.drain_rate.bytes_per_s() * 1e9;
        ns.min(HOLD_MAX_NS as f64) as Nanos
    }

    /// When the oldest acknowledgement that is held back is to be released, as dirty level and drain are now: the others wait their
    /// turn after it, but none longer than [`HOLD_MAX_NS`].
    pub(crate) fn held_due(&self, now: Nanos, id: VolumeId) -> Option<Nanos> {
        let volume = self.volume(id);
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
        for i in 0..self.volumes.len() {
            let id = VolumeId(i as u16);
            while self.volumes[i].is_some()
                && let Some(due) = self.held_due(now, id).filter(|&due| due <= now)
            {
                let volume = self.volumes[i].as_mut().expect("looked at just now");
                let op = volume.held.pop_front().expect("the one that is due");
                volume.released_at = due;
                volume.count.held_ns += now.saturating_sub(self.ops[op].held_since);
                self.answer(op);
            }
            if self.dead
                && self.volumes[i].as_ref().is_some_and(|v| !v.backend.is_disowned() && !v.through.is_empty())
            {
                self.disown(now, id);
            }
            self.pump_through(id);
        }
    }

    /// Acknowledges write-through changes that the backend has.
    pub(crate) fn pump_through(&mut self, id: VolumeId) {
        while let Some(volume) = &mut self.volumes[id.0 as usize] {
            let Some(&front) = volume.through.front() else { return };
            if self.dead && !volume.backend.is_disowned() {
                return; // A restart might find something older on the device and drain it over this.
            }
            let op = &self.ops[front];
            // Where the drain is grouped, what was not acknowledged before the mode became write-back may stand in the
            // image out of order: it is acknowledged with its group.
            let ordered = volume.groups.is_none() && volume.mode == Mode::WriteBack;
            let drained = op.sequence <= volume.sequence_safe() || ordered;
            if !drained {
                if volume.credit_bytes < op.request.len {
                    return;
                }
                volume.credit_bytes -= op.request.len;
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
