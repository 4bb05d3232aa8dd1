//! The drain: dirty blocks and zeroes go to the backend, oldest object first.
//!
//! Within and across objects the newest content wins, and the image between two drains is no point of the
//! volume's history; where the drain is grouped, only what a redo beside the image holds already goes
//! there (see `group`). Correctness rests on three rules: an object is drained by one drain at a time; a
//! block becomes clean only when the backend's flush has covered it and the index still has the very copy
//! that was written; an object that changes meanwhile is queued again.

pub(crate) mod frame;
pub(crate) mod group;
pub(crate) mod progress;

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, VolumeId};
use crate::base::consequences::Consequence;
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::PIECE_BLOCKS;
use crate::base::util::runs;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags, Position};
use crate::blocks::ledger::{Cleaned, object_of};
use crate::blocks::space::Space;
use crate::control::volume::{DirtyObject, Task, Volume};
use crate::engine::Engine;
use crate::format::{byte, crc32c};
use crate::log::stable::{Deferred, Waiting};

/// A dirty object is left alone for this long in write-back: it may be written again.
const DRAIN_DELAY_NS: Nanos = 1_000_000_000;
/// Pieces in flight for one volume while there is no hurry.
const PIECES_RELAXED: usize = 8;
/// Pieces in flight to the image while its volume is being written and the redo has what is committed: the more is
/// dirty, the nearer they come to [`PIECES_RELAXED`].
const PIECES_GENTLE: usize = 1;
/// Objects of one volume that are being drained or wait for the backend's flush.
const DRAINS_MAX: usize = 1024;
/// Zero ranges of one object in flight.
const ZEROES_IN_FLIGHT: u32 = 16;

/// An object on its way to the backend.
pub(crate) struct Drain {
    pub(crate) volume: VolumeId,
    pub(crate) entry: DirtyObject,
    /// Next block of the object to look at.
    cursor: u32,
    /// Zeroes of the object are drained too.
    zeroes: bool,
    pub(crate) in_flight: u32,
    failed: bool,
    /// Something was left out that is in no committed group.
    left_out: Option<LeftOut>,
    /// What was committed when the drain began.
    committed: u64,
    /// It brings the object to the cut of a snapshot: what is newer is left out for what the cut has.
    pub(crate) cut: bool,
    /// What the backend has got.
    written: Vec<Written>,
}

/// A block that the backend has got.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    block: u64,
    position: Position,
    /// See [`Piece::opened`].
    opened: u64,
}

/// What was left out of an object: up to which sequence everything must be committed before some of it, and before all of it,
/// can be drained.
#[derive(Debug, Clone, Copy)]
struct LeftOut {
    some: u64,
    all: u64,
}

impl LeftOut {
    /// Something more cannot be drained before everything up to `until` is committed.
    fn with(before: Option<LeftOut>, until: u64) -> Option<LeftOut> {
        let LeftOut { some, all } = before.unwrap_or(LeftOut { some: until, all: until });
        Some(LeftOut { some: some.min(until), all: all.max(until) })
    }
}

/// Blocks that follow each other in the volume, on their way from the cache device to the backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    drain: u32,
    buf: Buf,
    first: u64,
    blocks: u32,
    positions: [Position; PIECE_BLOCKS],
    /// Number of the first segment that was opened after these positions were looked up: in that one or a later one they
    /// are other places.
    opened: u64,
    reads: u32,
    bad: bool,
    /// Bad blocks have been read a second time.
    again: bool,
    /// The blocks are the cut's, newer ones have superseded them.
    frozen: bool,
}

impl Volume {
    /// Where the drain reads a block: its dirty copy, or with `frozen` the older one that a cut needs. `None` if it has none
    /// to bring to the image now.
    fn copy_to_drain(&self, space: &Space, block: u64, frozen: bool) -> Option<Position> {
        let newer = self.uncommitted(block, 1).0.is_some();
        let found = match (frozen, newer) {
            (false, false) => self.ledger.index().lookup(block),
            (true, true) => self.ledger.cut_index()?.lookup(block),
            _ => return None,
        };
        let Lookup::At(position) = found else { return None };
        space.marks.is_dirty(position).then_some(position)
    }
}

impl Engine {
    /// Starts as much of the drain as is due.
    pub(crate) fn pump_drain(&mut self, now: Nanos) {
        // Stopped backends keep what they have: some buffers are for volumes that have none.
        let without =
            self.ground.volumes.iter().flatten().filter(|v| v.attached && v.drain_in_flight == 0).count();
        let reserved = without.min(self.ground.base.config.drain_buffers / 2);
        for i in 0..self.ground.volumes.len() {
            let id = VolumeId(((self.next_drain + i) % self.ground.volumes.len()) as u16);
            if self.ground.volumes[id.0 as usize].is_some() {
                self.drain_volume(now, id, reserved);
            }
        }
        self.next_drain = (self.next_drain + 1) % self.ground.volumes.len().max(1);
    }

    /// `reserved`: buffers that are only for volumes with nothing in flight.
    fn drain_volume(&mut self, now: Nanos, id: VolumeId, reserved: usize) {
        loop {
            let volume = self.ground.volume(id);
            if !volume.attached
                || volume.is_leaving()
                || !volume.backend.may_send(now)
                || volume.spec.read_only
            {
                return;
            }
            if self.ground.bad.are_of(id) {
                // What is bad would be found bad again.
                return;
            }
            let in_flight = volume.drain_in_flight;
            let urgent = self.drain_is_urgent(id);
            // A volume may use as many buffers as are left for the others: a stopped backend cannot
            // take them all.
            let reserved = if in_flight > 0 { reserved } else { 0 };
            let left = self.ground.base.pools.drain.available().saturating_sub(reserved);
            let limit = if urgent { left } else { PIECES_RELAXED };
            if in_flight >= 4 && in_flight >= limit || left == 0 {
                return;
            }
            // The redo first: nothing else can go to the image before it is committed. Not where the backend is full: what is
            // committed may take no room there, and its redo can be removed then.
            let full = volume.backend.error() == Some(IoError::Full);
            let (open, may_start) = (volume.drain_open, volume.drains.len() < DRAINS_MAX);
            let gentle = !urgent && in_flight >= self.pieces_gentle(id);
            let more = !full && self.redo_next(id)
                || !gentle
                    && match open {
                        Some(drain) => self.drain_next(id, drain),
                        None => may_start && self.start_drain(now, id, urgent),
                    }
                || full && self.redo_next(id);
            if !more {
                return;
            }
            if in_flight == 0 {
                self.ground.volume_mut(id).drain_rate.begin(now);
            }
        }
    }

    /// Transfers of one volume in flight from which on none to the image is added. What a redo holds is in no hurry to reach the image, and
    /// would take from the writes at hand what they need of the backend, and of this machine.
    fn pieces_gentle(&self, id: VolumeId) -> usize {
        let volume = self.ground.volume(id);
        if !volume.ledger.is_uncommitted() {
            return PIECES_RELAXED;
        }
        let (dirty, max) = (volume.ledger.held(), self.ground.dirty_bytes_max(id) / BLOCK_BYTES as u64);
        // Half of what may be dirty is urgent.
        let more = dirty * 2 * (PIECES_RELAXED - PIECES_GENTLE) as u64 / max.max(1);
        (PIECES_GENTLE + more as usize).min(PIECES_RELAXED)
    }

    /// Whether the volume's drain is to run as fast as it can.
    pub(crate) fn drain_is_urgent(&self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        volume.mode != Mode::WriteBack
            || volume.task != Task::None
            || volume.drain_all_until > volume.progress.drained()
            || volume.ledger.held() * BLOCK_BYTES as u64 > self.ground.dirty_bytes_max(id) / 2
            || self.redo_is_long(id)
            || volume.peer_is_short()
            || self.ground.space.dirty_blocks() > self.ground.space.dirty_blocks_max() / 2
            || self.ground.budget.extents() > self.ground.base.geo.extents_max() / 4
            || self.ground.base.dead
    }

    fn start_drain(&mut self, now: Nanos, id: VolumeId, urgent: bool) -> bool {
        let volume = self.ground.volume_mut(id);
        let drainable = volume.sequence_drainable();
        let (drainable_end, ledger) = (volume.drain_end(), &volume.ledger);
        let free = |d: &DirtyObject| {
            d.drain_from <= drainable
                && d.object < drainable_end
                && !ledger.flags(d.object).contains(ObjectFlags::DRAINING)
        };
        if volume.image_is_held() {
            return false;
        }
        let from = volume.drain_cursor.min(volume.dirty_objects.len());
        let at = volume.dirty_objects.range(from..).position(free).map(|n| from + n);
        volume.drain_cursor = at.unwrap_or(volume.dirty_objects.len());
        let Some(at) = at else { return false };
        // In groups everything has waited long enough.
        let young = volume.groups.is_none() && volume.dirty_objects[at].since + DRAIN_DELAY_NS > now;
        if !urgent && young {
            return false;
        }
        let entry = volume.take_dirty(at);
        volume.ledger.unmark(entry.object, ObjectFlags::QUEUED);
        volume.ledger.mark(entry.object, ObjectFlags::DRAINING);
        let zeroes = volume.ledger.flags(entry.object).contains(ObjectFlags::ZERO_DIRTY);
        let cut = volume.ledger.cut_index().is_some();
        let written = self.spare_written.pop().unwrap_or_default();
        let drain = Drain {
            volume: id,
            entry,
            cursor: 0,
            zeroes,
            in_flight: 0,
            failed: false,
            left_out: None,
            committed: if drainable == u64::MAX { 0 } else { drainable },
            cut,
            written,
        };
        let drain = self.drains.insert(drain);
        let volume = self.ground.volume_mut(id);
        volume.drains.push(drain);
        volume.drain_open = Some(drain);
        true
    }

    /// Issues the next piece of a drain; false when it must wait.
    fn drain_next(&mut self, id: VolumeId, d: u32) -> bool {
        let drain = &self.drains[d];
        let object = u64::from(drain.entry.object) * OBJECT_BLOCKS as u64;
        let end = (object + OBJECT_BLOCKS as u64).min(self.ground.volume(id).blocks_held().max(object));
        let mut at = object + u64::from(drain.cursor);
        while at < end {
            let volume = self.ground.volume(id);
            let (found, n) = volume.ledger.index().lookup_run(at, (end - at) as u32);
            let (uncommitted, n) = match found {
                Lookup::At(_) | Lookup::Zero => volume.uncommitted(at, n),
                Lookup::Absent | Lookup::Lost => (None, n),
            };
            let (mut found, mut n) = (found, n);
            if let Some(until) = uncommitted {
                let cut = volume.ledger.cut_index().filter(|_| self.drains[d].cut);
                (found, n) = cut.map_or((Lookup::Absent, n), |cut| cut.lookup_run(at, n));
                self.drains[d].left_out = LeftOut::with(self.drains[d].left_out, until);
            }
            match found {
                Lookup::Zero
                    if (self.drains[d].zeroes || uncommitted.is_some())
                        && !mutated!(ZeroesStayInTheCache) =>
                {
                    if self.drains[d].in_flight >= ZEROES_IN_FLIGHT {
                        return false;
                    }
                    self.drains[d].cursor = (at + u64::from(n) - object) as u32;
                    self.drain_issued(id, d);
                    self.when_stable(id, Deferred::Zeroes(d, at, n));
                    return true;
                }
                Lookup::At(position) => {
                    let dirty = (position..position + n).position(|p| self.ground.space.marks.is_dirty(p));
                    if let Some(skip) = dirty {
                        return self.drain_blocks(id, d, at + skip as u64, end, uncommitted.is_some());
                    }
                }
                _ => {}
            }
            at += u64::from(n);
            self.drains[d].cursor = (at - object) as u32;
        }
        self.close_drain(id, d);
        self.drain_progress(d);
        true
    }

    /// The drain has nothing more to issue.
    fn close_drain(&mut self, id: VolumeId, d: u32) {
        self.drains[d].cursor = OBJECT_BLOCKS as u32;
        let volume = self.ground.volume_mut(id);
        if volume.drain_open == Some(d) {
            volume.drain_open = None;
        }
    }

    fn drain_issued(&mut self, id: VolumeId, d: u32) {
        self.drains[d].in_flight += 1;
        self.ground.volume_mut(id).drain_in_flight += 1;
    }

    /// Only what a power loss would leave in the log may reach the backend: else the image could hold
    /// a write whose predecessors are lost.
    pub(crate) fn when_stable(&mut self, volume: VolumeId, part: Deferred) {
        let waiting = Waiting::new(volume, self.ground.volume(volume).log.published(), part);
        if !self.ground.log.is_stable() && !self.ground.base.dead {
            self.ground.log.defer(waiting);
            // The part that issues syncs may have had its turn already.
            self.ground.base.out.stir();
        } else {
            self.drain_stable(waiting);
        }
    }

    /// Our log has it on stable media; so must a copy that could take over.
    pub(crate) fn drain_stable(&mut self, waiting: Waiting) {
        if self.ground.volume(waiting.volume()).is_leaving() {
            // The host that has the image now may not have this.
            self.give_back(waiting.part());
        } else if self.ground.has_drained_copy(waiting) {
            self.send_to_backend(waiting.part());
        }
    }

    /// Does not send a part of the drain.
    fn give_back(&mut self, part: Deferred) {
        match part {
            Deferred::Piece(index) => self.release_piece(index, false),
            Deferred::Zeroes(drain, ..) => self.drain_returned(drain, false),
            Deferred::Frame(index) => self.give_back_frame(index),
        }
    }

    pub(crate) fn send_to_backend(&mut self, deferred: Deferred) {
        let block = BLOCK_BYTES as u64;
        let (drain, io, op) = match deferred {
            Deferred::Frame(index) => return self.send_frame(index),
            Deferred::Piece(index) => {
                let piece = &self.pieces[index];
                let buf = piece.buf.slice(0, piece.blocks as usize * BLOCK_BYTES);
                let op = BackendOp::Write { offset: piece.first * block, buf };
                (piece.drain, Io::DrainWrite { piece: index }, op)
            }
            Deferred::Zeroes(drain, first, n) => {
                let (offset, len) = (first * block, u64::from(n) * block);
                let volume = self.ground.volume(self.drains[drain].volume);
                let keep = volume.ledger.flags(object_of(first)).contains(ObjectFlags::ZERO_KEEP);
                let op = match keep {
                    true => BackendOp::WriteZeroes { offset, len },
                    false => BackendOp::Discard { offset, len },
                };
                (drain, Io::DrainZeroes { drain }, op)
            }
        };
        let volume = self.drains[drain].volume;
        self.ground.volume_mut(volume).drain_writes += 1;
        self.ground.backend(io, volume, op);
    }

    /// Reads the dirty blocks that follow each other from `first` into one piece.
    fn drain_blocks(&mut self, id: VolumeId, d: u32, first: u64, end: u64, frozen: bool) -> bool {
        let Some(buf) = self.ground.base.pools.drain.take() else { return false };
        let mut piece = Piece {
            drain: d,
            buf,
            first,
            blocks: 0,
            positions: [0; PIECE_BLOCKS],
            opened: self.ground.space.next_sequence,
            reads: 0,
            bad: false,
            again: false,
            frozen,
        };
        while (piece.blocks as usize) < PIECE_BLOCKS && first + u64::from(piece.blocks) < end {
            let block = first + u64::from(piece.blocks);
            let copy = self.ground.volume(id).copy_to_drain(&self.ground.space, block, frozen);
            let Some(p) = copy else { break };
            piece.positions[piece.blocks as usize] = p;
            piece.blocks += 1;
        }
        debug_assert!(piece.blocks > 0);
        let object = u64::from(self.drains[d].entry.object) * OBJECT_BLOCKS as u64;
        self.drains[d].cursor = (first + u64::from(piece.blocks) - object) as u32;
        self.drain_issued(id, d);
        let index = self.pieces.insert(piece);
        self.read_piece(index);
        true
    }

    /// Reads a piece's blocks from the cache device, those that follow each other there at once.
    fn read_piece(&mut self, index: u32) {
        let piece = self.pieces[index];
        for (start, end) in runs(piece.blocks as usize, |i| piece.positions[i]) {
            let position = piece.positions[start];
            self.ground.space.pin(position);
            self.pieces[index].reads += 1;
            let buf = piece.buf.slice(start * BLOCK_BYTES, (end - start) * BLOCK_BYTES);
            self.ground.base.out.read(
                Io::DrainRead { piece: index, start: start as u16, end: end as u16 },
                byte(position),
                buf,
            );
        }
    }

    pub(crate) fn drain_read_done(&mut self, index: u32, start: u16, end: u16, result: Result<(), IoError>) {
        let piece = self.pieces[index];
        self.ground.space.unpin(piece.positions[usize::from(start)]);
        let id = self.drains[piece.drain].volume;
        for i in usize::from(start)..usize::from(end) {
            let bytes = self.ground.base.arena.bytes(piece.buf.slice(i * BLOCK_BYTES, BLOCK_BYTES));
            let crc = self.ground.space.marks.crc(piece.positions[i]);
            if result.is_ok() && (mutated!(SkipDrainCrc) || crc32c(bytes) == crc) {
                continue;
            }
            self.pieces[index].bad = true;
            if piece.again {
                self.ground.note_corrupt(id, piece.positions[i]);
                self.lose_drained(id, &piece, i);
            }
        }
        self.pieces[index].reads -= 1;
        let piece = self.pieces[index];
        if piece.reads > 0 {
            return;
        }
        if !piece.bad {
            self.when_stable(id, Deferred::Piece(index));
        } else if !piece.again && self.is_still_there(&piece) {
            self.pieces[index].again = true;
            self.pieces[index].bad = false;
            self.read_piece(index);
        } else {
            // What is lost is marked; the rest of the object is drained without it.
            self.release_piece(index, false);
        }
    }

    /// A block of a piece has no good copy.
    fn lose_drained(&mut self, id: VolumeId, piece: &Piece, i: usize) {
        let (block, position) = (piece.first + i as u64, piece.positions[i]);
        self.ground.bad.report(match piece.frozen {
            true => BadCopy::of_anybody(id, block, position),
            false => BadCopy::current(id, block, position),
        });
    }

    /// Whether all blocks of a piece are where they were: what has been moved meanwhile has left its place to others.
    fn is_still_there(&self, piece: &Piece) -> bool {
        let volume = self.ground.volume(self.drains[piece.drain].volume);
        let current = Some(volume.ledger.index());
        let Some(index) = (if piece.frozen { volume.ledger.cut_index() } else { current }) else {
            return false;
        };
        let positions = piece.positions[..piece.blocks as usize].iter();
        let is_there = |position, block| {
            index.lookup(block) == Lookup::At(position) && self.ground.space.life_of(position) < piece.opened
        };
        positions.zip(piece.first..).all(|(&position, block)| is_there(position, block))
    }

    pub(crate) fn drain_write_done(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let piece = self.pieces[index];
        let id = self.drains[piece.drain].volume;
        self.ground.volume_mut(id).drain_writes -= 1;
        self.ground.note_backend_result(now, id, result);
        if result.is_ok() {
            let bytes = u64::from(piece.blocks) * BLOCK_BYTES as u64;
            self.ground.volume_mut(id).drain_rate.note(now, bytes);
            let written = &mut self.drains[piece.drain].written;
            let positions = piece.positions[..piece.blocks as usize].iter();
            written.extend((piece.first..).zip(positions).map(|(block, &position)| Written {
                block,
                position,
                opened: piece.opened,
            }));
        }
        self.release_piece(index, result.is_ok());
    }

    fn release_piece(&mut self, index: u32, written: bool) {
        let piece = self.pieces.remove(index);
        self.ground.base.pools.drain.give(piece.buf);
        self.drain_returned(piece.drain, written);
    }

    fn drain_returned(&mut self, d: u32, written: bool) {
        let drain = &mut self.drains[d];
        drain.in_flight -= 1;
        drain.failed |= !written;
        let id = drain.volume;
        self.ground.volume_mut(id).drain_in_flight -= 1;
        self.drain_progress(d);
    }

    pub(crate) fn drain_zeroes_done(&mut self, now: Nanos, d: u32, result: Result<(), IoError>) {
        let id = self.drains[d].volume;
        self.ground.volume_mut(id).drain_writes -= 1;
        self.ground.note_backend_result(now, id, result);
        self.drain_returned(d, result.is_ok());
    }

    /// A drain that has nothing left to send waits for the backend's flush.
    pub(crate) fn drain_progress(&mut self, d: u32) {
        let drain = &self.drains[d];
        if drain.in_flight > 0 || (drain.wants_more() && !drain.failed) {
            return;
        }
        let (id, failed) = (drain.volume, drain.failed);
        self.close_drain(id, d);
        if failed || mutated!(CleanBeforeFlush) {
            self.finish_drain(d, !failed);
            self.update_drained(id);
        } else {
            self.ground.volume_mut(id).unflushed.push(d);
        }
    }

    /// Sends a backend flush where drained objects or direct writes wait for one.
    pub(crate) fn pump_backend_flush(&mut self, now: Nanos) {
        for i in 0..self.ground.volumes.len() {
            let Some(volume) = &mut self.ground.volumes[i] else { continue };
            let wanted = !volume.unflushed.is_empty() || volume.backend.wants_flush();
            if volume.backend.is_flushing() || !wanted || !volume.backend.may_send(now) {
                continue;
            }
            let covers = volume.backend.begin_flush();
            std::mem::swap(&mut volume.flushing, &mut volume.unflushed);
            let id = VolumeId(i as u16);
            self.ground.backend(Io::DrainFlush { volume: id, covers }, id, BackendOp::Flush);
        }
    }

    pub(crate) fn drain_flush_done(
        &mut self,
        now: Nanos,
        id: VolumeId,
        covers: u64,
        result: Result<(), IoError>,
    ) {
        self.ground.note_backend_result(now, id, result);
        let volume = self.ground.volume_mut(id);
        volume.backend.end_flush(covers, result.is_ok(), volume.mode == Mode::WriteBack);
        if result.is_err() {
            self.distrust_backend(id);
        }
        let mut flushed = std::mem::take(&mut self.ground.volume_mut(id).flushing);
        for d in flushed.drain(..) {
            let failed = self.drains[d].failed;
            self.finish_drain(d, result.is_ok() && !failed);
        }
        self.ground.volume_mut(id).flushing = flushed;
        self.update_drained(id);
    }

    /// A backend flush has failed: whatever the backend completed since its last good one may be gone, and no later
    /// flush brings it back (a server that was restarted, a device that has dropped its cache). What the
    /// drain gave it since, also of objects that are half way or not in this flush, is sent again.
    pub(crate) fn distrust_backend(&mut self, id: VolumeId) {
        for i in 0..self.ground.volume(id).drains.len() {
            let d = self.ground.volume(id).drains[i];
            self.drains[d].failed = true;
        }
        let mut unflushed = std::mem::take(&mut self.ground.volume_mut(id).unflushed);
        for d in unflushed.drain(..) {
            self.finish_drain(d, false);
        }
        self.ground.volume_mut(id).unflushed = unflushed;
    }

    /// The object is in the backend (or could not be brought there).
    fn finish_drain(&mut self, d: u32, flushed: bool) {
        let mut drain = self.drains.remove(d);
        let object = drain.entry.object;
        let checkpoint = self.ground.base.checkpoints.next();
        let (volume, space) = self.ground.volume_and_space(drain.volume);
        volume.drains.retain(|&x| x != d);
        volume.ledger.unmark(object, ObjectFlags::DRAINING);
        if flushed {
            let mut drained = 0;
            for &Written { block, position, opened } in &drain.written {
                match volume.ledger.clean(space, block, position, opened) {
                    Cleaned::Superseded => {}
                    // The groups began while it was on its way: theirs has to hold it all the same.
                    Cleaned::Needed(group) => {
                        drain.left_out = LeftOut::with(drain.left_out, volume.sequence_of(group));
                    }
                    Cleaned::Clean { was_dirty } => drained += u64::from(was_dirty),
                }
            }
            let first_sequence = match drain.cut && volume.ledger.cut_has_zeroes(object) {
                true => drain.entry.first_sequence.max(drain.committed + 1),
                false => drain.entry.first_sequence,
            };
            volume.count.drained_blocks += drained;
            if volume.sequence_safe() < volume.backlog_sequence {
                volume.credit_bytes += drained * BLOCK_BYTES as u64 / 2;
            }
            let flags = volume.ledger.flags(object);
            let queued = flags.contains(ObjectFlags::QUEUED);
            if queued {
                volume.drain_cursor = 0;
            }
            if let Some(left_out) = drain.left_out {
                // What was left out counts as newer than what is committed, also where its group ends with the same record.
                let then_first = (drain.committed + 1).min(left_out.some);
                let entry = DirtyObject { first_sequence, drain_from: left_out.some, ..drain.entry };
                let entry = match entry.then_first > entry.first_sequence {
                    // What an earlier drain has left out is still on its way, and its promise stands: to wait for what this one has
                    // left out instead would let an object that is written all the time keep the redo for ever.
                    true if entry.wait_for > volume.sequence_drainable() => entry,
                    earlier => DirtyObject {
                        first_sequence: if earlier { entry.then_first } else { entry.first_sequence },
                        wait_for: left_out.all,
                        then_first,
                        ..entry
                    },
                };
                volume.requeue_dirty(entry);
            } else if drain.zeroes && (mutated!(NewZeroesTakenForDrained) || !queued) {
                volume.ledger.forget_zeroes(object);
                volume.forgotten_until = checkpoint;
            }
        } else {
            volume.requeue_dirty(drain.entry);
        }
        volume.recheck = true;
        let clean = !volume.is_dirty();
        if flushed && clean && !self.ground.base.dead {
            self.ground.base.checkpoints.note_drained();
        }
        if drain.zeroes {
            self.ground.budget.note_extents_changed();
        }
        drain.written.clear();
        self.spare_written.push(drain.written);
    }

    /// Finds out up to which sequence everything is in the backend, and tells those who wait for it.
    pub(crate) fn update_drained(&mut self, id: VolumeId) {
        let volume = self.ground.volume(id);
        let queued = volume.dirty_objects.front().map(|d| d.first_sequence);
        let busy = volume.drains.iter().map(|&d| self.drains[d].entry.first_sequence).min();
        let oldest = queued.into_iter().chain(busy).min();
        let volume = self.ground.volume_mut(id);
        let before = if mutated!(DrainedOneTooFar) { 0 } else { 1 };
        let drained = oldest.map_or(volume.log.published(), |s| s.saturating_sub(before));
        volume.progress.note_drained(drained, volume.log.published(), volume.has_loss());
        if volume.sequence_safe() >= volume.backlog_sequence {
            volume.credit_bytes = 0;
        }
        let drained = volume.progress.drained();
        let mut done = Vec::new();
        volume.drain_waiters.retain(|w| {
            let waits = w.sequence > drained;
            if !waits {
                done.push(w.control);
            }
            waits
        });
        let result = volume.loss().map_or(Ok(()), Err);
        for control in done {
            self.ground.base.out.control_done(control, result);
        }
        self.ground.base.consequences.push(Consequence::Drained(id));
    }

    /// Asks for a range to be drained soon.
    pub(crate) fn hurry_drain(&mut self, id: VolumeId, first: u64, end: u64) {
        let volume = self.ground.volume_mut(id);
        debug_assert!(first < end && object_of(end - 1) >= object_of(first));
        volume.drain_all_until = volume.drain_all_until.max(volume.log.published());
    }

    /// When the drain has something to do next, if nothing else happens.
    pub(crate) fn drain_deadline(&self, now: Nanos) -> Option<Nanos> {
        let due =
            self.ground.volumes.iter().flatten().filter(|v| v.attached && !v.is_leaving()).filter_map(|v| {
                if !v.backend.may_send(now) {
                    return Some(v.backend.retry_at());
                }
                let next = v.dirty_objects.get(v.drain_cursor).filter(|_| v.groups.is_none());
                next.map(|d| d.since + DRAIN_DELAY_NS)
            });
        due.filter(|&at| at > now).min().into_iter().chain(self.detach_deadline(now)).min()
    }
}

impl Drain {
    fn wants_more(&self) -> bool {
        self.cursor < OBJECT_BLOCKS as u32
    }
}
