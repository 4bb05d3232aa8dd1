//! Changes: writes, discards and write-zeroes, from the request to the log.
//!
//! The usual way is short: [`Engine::start_change`] puts the operation into the volume's queue, the next
//! append takes it along, publishing acknowledges it. Two kinds take a longer way under a lock on their
//! blocks: unaligned changes first read the old content of their edge blocks, and direct changes
//! (write-around, off) go to the backend instead, after cached copies were made void.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::flight::Io;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::{BUFFERS_FOR_MOVES, EDGE_BUFFERS_RESERVED};
use crate::base::shared::LAST_CHECKPOINT;
use crate::blocks::index::Lookup;
use crate::control::volume::{ClientOp, Edge, Lock, Stage};
use crate::engine::Engine;
use crate::format::{EntryKind, RecordKind, Stream};
use crate::log::Want;
use crate::log::build::Builder;
use crate::log::build::RecordFields;
use crate::log::build::copy_block;
use crate::log::copy::RecordRoom;
use std::collections::VecDeque;

/// Most changes that are begun when a lock is given back, before the others wait for the one that blocks the next.
const WOKEN_MAX: usize = 32;

/// The parts that a change leaves in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// A data block, from a buffer of one block.
    Data(u64, Buf),
    /// A range without data.
    Range(EntryKind, u64, u32),
}

/// What the log is to be given next.
struct Pending {
    volume: usize,
    /// Its first operation waits for stable media.
    durable: bool,
    /// Data blocks and entries that an append must have room for.
    least: (u32, usize),
}

impl ClientOp {
    /// What it leaves in the log has to be on stable media before it goes on.
    pub(crate) fn needs_stable(&self) -> bool {
        self.durable || self.direct || self.request.op == Op::Flush
    }

    /// The newest record that its reply acknowledges; none for a flush, which follows the replies that it is about, nor for
    /// what is in the backend's hands alone.
    fn acknowledges(&self) -> u64 {
        if self.request.op == Op::Flush || self.direct { 0 } else { self.sequence }
    }

    /// Part number `n` of what the log gets for this change; `None` past the last.
    fn part(&self, n: u32) -> Option<Part> {
        if self.direct {
            return (n == 0).then_some(Part::Range(
                EntryKind::Invalidate,
                self.first_block,
                self.blocks as u32,
            ));
        }
        match self.request.op {
            Op::Write { .. } => {
                let buf = self.request.buf.expect("a write has a buffer");
                (u64::from(n) < self.blocks).then(|| {
                    let part = buf.slice(n as usize * BLOCK_BYTES, BLOCK_BYTES);
                    Part::Data(self.first_block + u64::from(n), part)
                })
            }
            op => {
                let (first, blocks) = self.middle();
                let kind = match op {
                    Op::WriteZeroes { no_hole: true, .. } => EntryKind::WriteZeroes,
                    _ => EntryKind::Discard,
                };
                let edges = self.edges.iter().flatten().map(|e| Part::Data(e.block, e.buf));
                let middle = (blocks > 0).then_some(Part::Range(kind, first, blocks as u32));
                edges.chain(middle).nth(n as usize)
            }
        }
    }

    /// Data blocks and ranges of zeroes that its next record has at least.
    pub(crate) fn needs_room(&self) -> (u64, u64) {
        match self.part(self.logged) {
            Some(Part::Data(..)) => (1, 0),
            Some(Part::Range(kind, ..)) if kind != EntryKind::Invalidate => (0, 1),
            _ => (0, 0),
        }
    }

    /// The whole blocks between the edges: first and number.
    fn middle(&self) -> (u64, u64) {
        let edge_at = |block| self.edges.iter().flatten().any(|e| e.block == block);
        let first = self.first_block + u64::from(edge_at(self.first_block));
        let end = self.first_block + self.blocks;
        let end = end - u64::from(end > first && edge_at(end - 1));
        (first, end - first)
    }
}

impl Engine {
    pub(crate) fn park(&mut self, volume: VolumeId, id: OpId) {
        let volume = self.ground.volume_mut(volume);
        volume.parked.push(id);
        volume.recheck = true;
    }

    /// Begins a write, discard or write-zeroes.
    pub(crate) fn start_change(&mut self, id: OpId) {
        let op = self.ops[id];
        let dead = self.ground.base.dead;
        let volume = self.ground.volume_mut(op.request.volume);
        let (first, end) = (op.first_block, op.first_block + op.blocks);
        if let Some(lock) = volume.locked_by(first, end, id).and_then(|at| volume.locks.get_mut(&at)) {
            lock.waiting.push_back(id);
            return;
        }
        let direct = dead || volume.goes_direct();
        let edges = edges_of(&op);
        let until_flush = !volume.flushes && !mutated!(UnsafeUntilFlush);
        let aligned = edges.iter().all(Option::is_none);
        if !direct && aligned {
            volume.pending.push_back(id);
            volume.entered += 1;
            let op = &mut self.ops[id];
            op.stage = Stage::InLog;
            op.durable |= until_flush;
            return;
        }
        volume.locks.insert(first, Lock { end, op: id, waiting: VecDeque::new() });
        match aligned {
            true => volume.parked.push(id),
            false => volume.edgeless.push_back(id),
        }
        let barrier = volume.entered;
        let op = &mut self.ops[id];
        op.locked = true;
        op.direct = direct;
        op.barrier = barrier;
        op.edges = edges;
        op.durable |= until_flush;
        op.stage = if aligned { Stage::Whole } else { Stage::Waiting };
        let vid = op.request.volume;
        self.ground.volume_mut(vid).recheck = true;
    }

    /// Tries the parked operations again of every volume in which something has changed for them.
    pub(crate) fn pump_parked(&mut self, now: Nanos) {
        for i in 0..self.ground.volumes.len() {
            while let Some(volume) = &mut self.ground.volumes[i] {
                let is_wanted = volume.has_to_recheck();
                volume.recheck = false;
                if !is_wanted {
                    break;
                }
                self.read_edges_of(VolumeId(i as u16));
                let Some(volume) = &mut self.ground.volumes[i] else { break };
                std::mem::swap(&mut volume.parked, &mut self.parked_scratch);
                for n in 0..self.parked_scratch.len() {
                    let op = self.parked_scratch[n];
                    if !self.advance(now, op) {
                        self.ground.volume_mut(VolumeId(i as u16)).parked.push(op);
                    }
                }
                self.parked_scratch.clear();
            }
        }
    }

    /// Takes a parked operation as far as it goes; true when it is no longer parked.
    fn advance(&mut self, now: Nanos, id: OpId) -> bool {
        loop {
            let op = self.ops[id];
            let volume = self.ground.volume(op.request.volume);
            if op.waiting > 0 {
                return false;
            }
            if volume.is_refusing() {
                self.complete(id, Err(RequestError::Io));
                return true;
            }
            if volume.published < op.barrier {
                return false;
            }
            match op.stage {
                Stage::Edges => {
                    if let Some(error) = op.error {
                        self.complete(id, Err(error));
                        return true;
                    }
                    self.merge_edges(id);
                }
                Stage::Whole if self.ground.base.dead && !op.direct => self.ops[id].direct = true,
                Stage::Whole if !op.direct => {
                    self.enter_log(id);
                    return true;
                }
                Stage::Whole => return self.advance_direct(now, id),
                Stage::Waiting | Stage::InLog | Stage::Direct | Stage::Acking => {
                    unreachable!("{:?} is not parked", op.stage)
                }
            }
        }
    }

    /// Reads the edges of locked changes, one after the other, as long as there are buffers.
    fn read_edges_of(&mut self, vid: VolumeId) {
        while let Some(&id) = self.ground.volume(vid).edgeless.front() {
            let volume = self.ground.volume(vid);
            let is_over = volume.is_refusing();
            // Those behind it came later: they wait for the barrier, too.
            if !is_over && (volume.published < self.ops[id].barrier || !self.read_edges(id)) {
                return;
            }
            self.ground.volume_mut(vid).edgeless.pop_front();
            match is_over {
                true => self.complete(id, Err(RequestError::Io)),
                false => self.ground.volume_mut(vid).parked.push(id),
            }
        }
    }

    fn enter_log(&mut self, id: OpId) {
        let op = &mut self.ops[id];
        op.stage = Stage::InLog;
        op.logged = 0;
        let volume = op.request.volume;
        let volume = self.ground.volume_mut(volume);
        volume.pending.push_back(id);
        volume.entered += 1;
    }

    /// Starts reading the old content of edge blocks; false while there is no buffer for it.
    fn read_edges(&mut self, id: OpId) -> bool {
        let wanted = self.ops[id].edges.iter().flatten().count();
        let vid = self.ops[id].request.volume;
        let left = self.ground.base.pools.edge.available();
        let reserved = if self.ground.volume(vid).edge_buffers > 0 { EDGE_BUFFERS_RESERVED } else { 0 };
        if left < wanted + reserved {
            return false;
        }
        self.ground.volume_mut(vid).edge_buffers += wanted;
        self.ops[id].stage = Stage::Edges;
        for side in 0..2 {
            let Some(mut edge) = self.ops[id].edges[side] else { continue };
            edge.buf = self.ground.base.pools.edge.take().expect("counted above");
            self.ops[id].edges[side] = Some(edge);
            self.read_blocks(id, edge.block, 1, edge.buf);
        }
        true
    }

    /// All edge blocks are read: makes the change whole.
    fn merge_edges(&mut self, id: OpId) {
        let op = self.ops[id];
        let write = matches!(op.request.op, Op::Write { .. });
        for edge in op.edges.into_iter().flatten() {
            let (from, to) = (usize::from(edge.from), usize::from(edge.to));
            if !write {
                self.ground.base.arena.bytes_mut(edge.buf)[from..to].fill(0);
                continue;
            }
            let buf = op.request.buf.expect("a write has a buffer");
            let whole = buf.slice((edge.block - op.first_block) as usize * BLOCK_BYTES, BLOCK_BYTES);
            for (start, end) in [(0, from), (to, BLOCK_BYTES)] {
                if start < end {
                    self.ground
                        .base
                        .arena
                        .copy(edge.buf.slice(start, end - start), whole.slice(start, end - start));
                }
            }
        }
        if write {
            self.release_edges(id);
        }
        self.ops[id].stage = Stage::Whole;
    }

    fn release_edges(&mut self, id: OpId) {
        for side in 0..2 {
            if let Some(edge) = self.ops[id].edges[side].take()
                && edge.buf.len > 0
            {
                self.ground.base.pools.edge.give(edge.buf);
                let vid = self.ops[id].request.volume;
                self.ground.volume_mut(vid).edge_buffers -= 1;
                self.edge_freed = true;
            }
        }
    }

    /// A direct change whose blocks are whole: void cached copies, then the backend.
    fn advance_direct(&mut self, now: Nanos, id: OpId) -> bool {
        let op = self.ops[id];
        let vid = op.request.volume;
        let (first, end) = (op.first_block, op.first_block + op.blocks);
        if !self.ground.base.dead && !self.ground.volume(vid).goes_direct() {
            // The mode has changed while it waited: in front of a log that goes on it might wait for ever.
            self.ops[id].direct = false;
            self.enter_log(id);
            return true;
        }
        if self.has_lost(vid, first, end) && !self.ground.base.dead {
            // The image holds something older. Were the write to fail on its way there, that would be read:
            // the log takes the place of what is lost at once, and the drain brings it to the image.
            self.ops[id].direct = false;
            self.enter_log(id);
            return true;
        }
        if self.has_dirty(vid, first, end)
            || !mutated!(DirectBesideRedo) && self.drain.has_redo(&self.ground, vid)
        {
            // A redo that is kept would take the image back behind this change if it were needed.
            let volume = self.ground.volume_mut(vid);
            volume.progress.want(volume.log.published());
            return false;
        }
        let volume = self.ground.volume(vid);
        if !volume.backend.may_send(now) || self.ground.base.stopping == Some(LAST_CHECKPOINT) {
            return false; // After the last flush of a shutdown nothing more is sent, nor answered.
        }
        if self.ground.base.dead && !volume.backend.is_disowned() {
            self.disown(now, vid);
            return false;
        }
        if volume.log.durable() < volume.log.published() && !self.ground.base.dead {
            // The backend must not get ahead of what a power loss would leave in the log.
            self.ground.log.want_stable();
            return false;
        }
        let overtaken = self.ground.overtake(vid, first, end - first);
        let forgotten = self.ground.volume(vid).forgotten_until > self.ground.base.checkpoints.durable();
        // The peer may still hold what we have evicted.
        let copied = self.ground.volume(vid).copy.is_some() && !mutated!(PeerNotTold);
        if !op.invalidated && (overtaken > 0 || forgotten || copied || self.is_known(vid, first, end)) {
            if self.ground.base.dead {
                self.ground.forget_blocks(vid, first, end - first);
            } else {
                self.enter_log(id);
                return true;
            }
        }
        self.ops[id].stage = Stage::Direct;
        self.ground.volume_mut(vid).direct_in_flight += 1;
        let mut n = 0;
        let mut op = op;
        op.direct = false; // The parts are those of the change itself now, not of its invalidation.
        if matches!(op.request.op, Op::Write { .. }) {
            let offset = first * BLOCK_BYTES as u64;
            let buf = op.request.buf.expect("a write has a buffer");
            self.direct_io(id, BackendOp::Write { offset, buf });
            n = u32::MAX;
        }
        while let Some(part) = if n == u32::MAX { None } else { op.part(n) } {
            let block = BLOCK_BYTES as u64;
            self.direct_io(
                id,
                match part {
                    Part::Data(at, buf) => BackendOp::Write { offset: at * block, buf },
                    Part::Range(EntryKind::WriteZeroes, at, len) => {
                        BackendOp::WriteZeroes { offset: at * block, len: u64::from(len) * block }
                    }
                    Part::Range(_, at, len) => {
                        BackendOp::Discard { offset: at * block, len: u64::from(len) * block }
                    }
                },
            );
            n += 1;
        }
        true
    }

    fn direct_io(&mut self, id: OpId, op: BackendOp) {
        let volume = self.ops[id].request.volume;
        self.ops[id].waiting += 1;
        let blocks = self.ops[id].blocks;
        self.ground.volume_mut(volume).count.bypass_mode_blocks += blocks;
        self.ground.backend(Io::Direct { op: id }, volume, op);
    }

    pub(crate) fn direct_done(&mut self, now: Nanos, id: OpId, result: Result<(), IoError>) {
        let vid = self.ops[id].request.volume;
        self.ground.note_backend_result(now, vid, result);
        let op = &mut self.ops[id];
        op.waiting -= 1;
        if let Err(error) = result {
            op.error = Some(RequestError::Io);
            if error == IoError::Full {
                op.barrier = u64::MAX; // Marks that it is to be tried again.
            }
        }
        if op.waiting > 0 {
            return;
        }
        let full = std::mem::replace(&mut op.barrier, 0) == u64::MAX;
        let volume = self.ground.volume_mut(vid);
        volume.direct_in_flight -= 1;
        volume.backend.note_written();
        if full {
            // A full backend makes writes wait; it does not fail them.
            self.ops[id].error = None;
            self.ops[id].stage = Stage::Whole;
            self.park(vid, id);
            return;
        }
        match self.ops[id].error {
            Some(error) => self.complete(id, Err(error)),
            None if self.ops[id].durable => self.flush_backend_for(id),
            None => self.complete(id, Ok(())),
        }
    }

    /// Sends the volume's backend flush for an operation (a flush or a FUA change).
    pub(crate) fn flush_backend_for(&mut self, id: OpId) {
        let volume = self.ops[id].request.volume;
        self.ops[id].stage = Stage::Acking;
        let covers = self.ground.volume(volume).backend.covers();
        self.ground.backend(Io::DirectFlush { op: id, covers }, volume, BackendOp::Flush);
    }

    pub(crate) fn direct_flush_done(
        &mut self,
        now: Nanos,
        id: OpId,
        covers: u64,
        result: Result<(), IoError>,
    ) {
        let vid = self.ops[id].request.volume;
        let asked = self.ops[id].request.op == Op::Flush;
        self.ground.note_backend_result(now, vid, result);
        let volume = self.ground.volume_mut(vid);
        if result.is_ok() {
            volume.backend.note_flushed(covers);
        } else {
            volume.backend.note_flush_failed(volume.mode == Mode::WriteBack);
            self.drain.distrust(&mut self.ground, vid);
            self.drain.update(&mut self.ground, vid);
        }
        let logged = !asked && !self.ops[id].direct;
        if result.is_ok() && logged && !self.has_copy(id) {
            return; // The peer has gone meanwhile.
        }
        // The client that flushes is told of a flush of ours that failed before, once.
        let lost = asked && self.ground.volume_mut(vid).backend.take_lost();
        self.complete(id, if lost { Err(RequestError::Io) } else { result.map_err(|_| RequestError::Io) });
    }

    /// Builds and issues appends while there is something to log and room for it.
    pub(crate) fn pump_log(&mut self) {
        if self.ground.base.stopping == Some(LAST_CHECKPOINT) {
            // What is not in the last checkpoint may be lost with the power, and must not be answered.
            return;
        }
        let in_flight_max = self.ground.base.config.appends_in_flight;
        while self.ground.log.in_flight(Stream::Log) < in_flight_max {
            let Some(Pending { volume: first, durable, least }) = self.volume_with_pending() else { return };
            let in_flight = self.ground.log.in_flight(Stream::Log);
            if durable && in_flight > 0 {
                // One append that is stable by itself is cheaper than several and a sync.
                return;
            }
            if self.ground.base.pools.append.available() <= BUFFERS_FOR_MOVES {
                return;
            }
            let Some(buf) = self.ground.base.pools.append.take() else { return };
            let mut builder =
                match self.ground.begin_append(Want { stream: Stream::Log, least, moves: false }, buf) {
                    Ok(builder) => builder,
                    Err(buf) => return self.ground.base.pools.append.give(buf),
                };
            let volumes = self.ground.volumes.len();
            for i in 0..volumes {
                self.take_pending(&mut builder, VolumeId(((first + i) % volumes) as u16));
            }
            self.next_volume = (first + 1) % volumes;
            let durable = builder.ops().iter().any(|&op| self.ops[op].durable || self.ops[op].direct);
            let alone = in_flight == 0 && self.ground.log.is_stable();
            let dsync = durable && (alone || mutated!(FuaCoversWhatIsBefore));
            // The peer before the device: the way is longer, and until the device's turn comes nobody changes the buffer.
            let ops = &self.ops;
            let waits = |id, sequence| {
                let waits = |&op: &OpId| {
                    let op = &ops[op];
                    (op.request.volume, op.sequence) == (id, sequence) && op.needs_stable()
                };
                builder.ops().iter().any(waits)
            };
            self.ground.send_records(&builder, waits);
            self.ground.log.issue(&mut self.ground.base, builder, dsync);
        }
    }

    /// The next volume (in turn) that has something to log.
    fn volume_with_pending(&mut self) -> Option<Pending> {
        let volumes = self.ground.volumes.len();
        for i in 0..volumes {
            let at = (self.next_volume + i) % volumes;
            let Some(volume) = &self.ground.volumes[at] else { continue };
            let Some(room) = volume.record_room().filter(|_| !volume.groups_end()) else { continue };
            let Some(&front) = volume.pending.front() else { continue };
            let op = &self.ops[front];
            let durable = op.durable || op.direct;
            let sequence = volume.log.built();
            let (data, zeroes, least) = match (op.incoming, op.part(op.logged)) {
                // Room was reserved for it.
                (Some(r), _) => (false, false, (u32::from(r.blocks), usize::from(r.entries))),
                (_, Some(Part::Data(..))) => (true, false, (1, 1)),
                (_, Some(Part::Range(kind, ..))) => (false, kind != EntryKind::Invalidate, (1, 1)),
                (_, None) => (false, false, (1, 1)),
            };
            if data && room.blocks() == 0 || zeroes && room.ranges() == 0 {
                continue;
            }
            let full = data && self.quota_left(VolumeId(at as u16)) == 0;
            let wait = full || zeroes && self.ground.extents_are_full();
            if !wait {
                return Some(Pending { volume: at, durable, least });
            }
            let volume = self.ground.volumes[at].as_mut().expect("looked at just now");
            if volume.quota_wait_noted != sequence {
                volume.quota_wait_noted = sequence;
                volume.count.quota_waits += 1;
            }
        }
        None
    }

    /// Blocks that the volume may still dirty.
    pub(crate) fn quota_left(&self, id: VolumeId) -> u64 {
        let volume = self.ground.volume(id);
        let used = volume.ledger.held() + volume.unpublished_blocks + volume.reserved_blocks();
        let own = (self.ground.dirty_bytes_max(id) / BLOCK_BYTES as u64).saturating_sub(used);
        own.min(self.blocks_left())
    }

    /// Blocks that all volumes together may still dirty, beside what owners of replicas were told.
    pub(crate) fn blocks_left(&self) -> u64 {
        self.ground.budget.blocks_left(&self.ground.space)
    }

    /// Moves what fits of a volume's pending operations into the append.
    fn take_pending(&mut self, builder: &mut Builder, id: VolumeId) {
        if self.ground.volumes[id.0 as usize].as_ref().is_none_or(|volume| volume.groups_end()) {
            return;
        }
        let mut quota = self.quota_left(id);
        loop {
            let volume = self.ground.volumes[id.0 as usize].as_ref().expect("checked above");
            let Some(&front) = volume.pending.front() else { return };
            if let Some(incoming) = self.ops[front].incoming {
                if !self.take_record(builder, front, incoming) {
                    return;
                }
                continue;
            }
            let Some(room) = volume.record_room().filter(|_| builder.has_room_for_record()) else { return };
            let first = self.ops[front].part(self.ops[front].logged);
            match first {
                Some(Part::Data(..)) if quota == 0 || room.blocks() == 0 => return,
                Some(Part::Range(kind, ..))
                    if kind != EntryKind::Invalidate
                        && (self.ground.ranges_left() == 0 || room.ranges() == 0) =>
                {
                    return;
                }
                _ => {}
            }
            builder.begin_record(id, RecordKind::Write);
            self.fill_record(builder, id, &mut quota, room);
            let volume = self.ground.volumes[id.0 as usize].as_mut().expect("checked above");
            let sequence = volume.log.built() + 1;
            let fields = RecordFields::next(volume.spec.generation, sequence, &volume.log);
            let chain = builder.end_record(&mut self.ground.base, &self.ground.space, fields);
            volume.log.build(sequence, chain);
            self.ground.note_built(builder);
        }
    }

    fn fill_record(&mut self, builder: &mut Builder, id: VolumeId, quota: &mut u64, room: RecordRoom) {
        let volume = self.ground.volumes[id.0 as usize].as_mut().expect("checked by the caller");
        let sequence = volume.log.built() + 1;
        let (mut blocks, mut ranges) = (room.blocks(), room.ranges());
        while let Some(&front) = volume.pending.front() {
            let op = &mut self.ops[front];
            let before = op.logged;
            while let Some(part) = op.part(op.logged) {
                let full = match part {
                    Part::Data(..) => *quota == 0 || blocks == 0,
                    Part::Range(kind, ..) => kind != EntryKind::Invalidate && ranges == 0,
                };
                if full || !builder.has_room_for_entry() {
                    break;
                }
                match part {
                    Part::Data(block, from) => {
                        // The CRC is computed over the copy, which is what is written.
                        let to = builder.push_data(&self.ground.space, block, 0, 0);
                        let crc = copy_block(&mut self.ground.base.arena, from, to);
                        builder.set_last_crc(crc);
                        *quota -= 1;
                        blocks -= 1;
                        volume.unpublished_blocks += 1;
                        self.ground.budget.note_built(1);
                    }
                    Part::Range(kind, block, len) => {
                        builder.push_range(kind, block, len);
                        if kind != EntryKind::Invalidate {
                            self.ground.budget.add_extents(1);
                            ranges -= 1;
                        }
                    }
                }
                op.logged += 1;
            }
            if op.logged == before {
                return;
            }
            op.sequence = sequence;
            if builder.push_op(front) {
                op.unpublished += 1;
            }
            if op.part(op.logged).is_some() {
                return;
            }
            volume.pending.pop_front();
        }
    }

    /// Every part of the operation that was in an append is published.
    pub(crate) fn op_published(&mut self, now: Nanos, id: OpId, append: u64) {
        let op = &mut self.ops[id];
        op.unpublished -= 1;
        // With an error (fenced) what is not in the log yet will never be.
        if op.unpublished > 0 || op.error.is_none() && op.part(op.logged).is_some() {
            return;
        }
        let vid = op.request.volume;
        self.ground.volume_mut(vid).published += 1;
        if let Some(incoming) = self.ops[id].incoming {
            self.record_published(vid, incoming);
        }
        let op = &self.ops[id];
        if op.needs_stable() {
            self.ground.log.wait_stable(append, id);
        } else {
            self.go_on(now, id);
        }
        self.ground.volume_mut(vid).recheck = true;
    }

    /// Whether any of the blocks is dirty. What is on its way to the image stays so until it is flushed there, and zeroes are
    /// forgotten then.
    pub(crate) fn has_dirty(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let volume = self.ground.volume(id);
        if volume.ledger.dirty() == 0 && !volume.is_dirty() {
            return false;
        }
        let mut at = first;
        while at < end {
            let (found, n) = volume.ledger.index().lookup_run(at, (end - at).min(1 << 20) as u32);
            let dirty = match found {
                Lookup::At(position) => (position..position + n).any(|p| self.ground.space.marks.is_dirty(p)),
                Lookup::Zero => true,
                Lookup::Absent | Lookup::Lost => false,
            };
            if dirty {
                return true;
            }
            at += u64::from(n);
        }
        false
    }

    /// Whether the only copy of any of the blocks is lost.
    fn has_lost(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let index = self.ground.volume(id).ledger.index();
        let mut at = if index.blocks().lost == 0 { end } else { first };
        while at < end {
            let (found, n) = index.lookup_run(at, (end - at).min(1 << 20) as u32);
            if found == Lookup::Lost {
                return true;
            }
            at += u64::from(n);
        }
        false
    }

    /// Whether the index knows anything about the blocks.
    fn is_known(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let index = self.ground.volume(id).ledger.index();
        let mut at = first;
        while at < end {
            let (found, n) = index.lookup_run(at, (end - at).min(1 << 20) as u32);
            if found != Lookup::Absent {
                return true;
            }
            at += u64::from(n);
        }
        false
    }

    /// Completes an operation and wakes what waited for its lock.
    pub(crate) fn complete(&mut self, id: OpId, result: Result<(), RequestError>) {
        self.release_edges(id);
        let op = self.ops.remove(id);
        let vid = op.request.volume;
        let result = if self.ground.volume(vid).is_refusing() { Err(RequestError::Io) } else { result };
        self.ground.base.out.reply(op.request.id, result);
        let volume = self.ground.volume_mut(vid);
        volume.requests -= 1;
        if result.is_ok() {
            volume.sequence_acknowledged = volume.sequence_acknowledged.max(op.acknowledges());
        }
        let count = &mut volume.count;
        match (result, op.request.op) {
            (Err(_), _) => count.errors += 1,
            (_, Op::Read) => {
                count.reads += 1;
                count.read_bytes += if mutated!(CounterDead) { 0 } else { op.request.len };
            }
            (_, Op::Write { .. }) => {
                count.writes += 1;
                count.written_bytes += op.request.len;
            }
            (_, Op::Flush) => count.flushes += 1,
            (_, Op::Discard { .. } | Op::WriteZeroes { .. }) => count.discards += 1,
            (_, Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. }) => {}
        }
        if op.locked {
            let lock = volume.locks.remove(&op.first_block).expect("it is locked");
            debug_assert_eq!(lock.op, id);
            self.wake(vid, lock.waiting);
        }
    }

    /// Begins changes that have waited for a lock. Many may have waited for one block, of which the first one locks it: the work for
    /// each lock that is given back is bounded.
    fn wake(&mut self, vid: VolumeId, mut waiting: VecDeque<OpId>) {
        for number in 1.. {
            let Some(&next) = waiting.front() else { return };
            let ClientOp { first_block, blocks, .. } = self.ops[next];
            let volume = self.ground.volume_mut(vid);
            if number > WOKEN_MAX
                && let Some(at) = volume.locked_by(first_block, first_block + blocks, next)
                && let Some(lock) = volume.locks.get_mut(&at)
            {
                lock.waiting.append(&mut waiting);
                return;
            }
            waiting.pop_front();
            self.start_change(next);
        }
    }
}

/// The edge blocks of a change: those that it covers only in part.
fn edges_of(op: &ClientOp) -> [Option<Edge>; 2] {
    let block = BLOCK_BYTES as u64;
    let (start, end) = (op.request.offset, op.request.offset + op.request.len);
    let edge = |at: u64| {
        let from = start.max(at * block) - at * block;
        let to = end.min((at + 1) * block) - at * block;
        let buf = Buf { offset: 0, len: 0 };
        (from > 0 || to < block).then_some(Edge { block: at, buf, from: from as u16, to: to as u16 })
    };
    let first = edge(op.first_block);
    let last = if op.blocks > 1 { edge(op.first_block + op.blocks - 1) } else { None };
    [first, last]
}
