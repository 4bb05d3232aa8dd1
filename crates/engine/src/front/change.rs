//! Changes: writes, discards and write-zeroes, from the request to the log.
//!
//! The usual way is short: [`Front::start_change`] puts the operation into the volume's queue, the
//! next append takes it along, publishing acknowledges it. Two kinds take a longer way under a lock
//! on their blocks: unaligned changes first read the old content of their edge blocks, and direct
//! changes (write-around, off) go to the backend instead, after cached copies were made void.

use crate::api::{BLOCK_BYTES, Nanos, Op, RequestError, VolumeId};
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::base::pools::{EDGE_BUFFERS_RESERVED, For};
use crate::front::Front;
use crate::front::op::{ClientOp, Lock, Stage};
use crate::ground::Ground;
use std::collections::VecDeque;

/// Most changes that are begun when a lock is given back, before the others wait for the one that
/// blocks the next.
const WOKEN_MAX: usize = 32;

impl Front {
    /// An operation is tried again when something has changed for it.
    pub(super) fn park(&mut self, ground: &mut Ground, id: OpId) {
        let vid = self.volume_of(id);
        self.volumes.of_mut(vid).parked.push(id);
        ground.volume_mut(vid).recheck();
    }

    /// Begins a write, discard or write-zeroes.
    pub(crate) fn start_change(&mut self, ground: &mut Ground, id: OpId) {
        let op = &mut self.ops[id];
        let vid = op.request.volume;
        let clients = self.volumes.of_mut(vid);
        let (first, end) = op.range();
        if let Some(lock) =
            clients.locked_by(first, end, id).and_then(|at| clients.locks.get_mut(&at))
        {
            lock.waiting.push_back(id);
            return;
        }
        let direct = ground.is_dead() || ground.volume(vid).goes_direct();
        let edges = op.edges();
        let until_flush = !clients.flushes && !mutated!(UnsafeUntilFlush);
        let aligned = edges.iter().all(Option::is_none);
        op.durable |= until_flush;
        if !direct && aligned {
            clients.enter_log(id);
            op.stage = Stage::InLog;
            return;
        }
        clients.locks.insert(first, Lock { end, op: id, waiting: VecDeque::new() });
        match aligned {
            true => clients.parked.push(id),
            false => clients.edgeless.push_back(id),
        }
        op.locked = true;
        op.direct = direct;
        op.barrier = clients.entered;
        op.edges = edges;
        op.stage = if aligned { Stage::Whole } else { Stage::Waiting };
        ground.volume_mut(vid).recheck();
    }

    /// Begins changes that have waited for a lock. Many may have waited for one block, of which the
    /// first one locks it: the work for each lock that is given back is bounded.
    pub(super) fn wake(&mut self, ground: &mut Ground, vid: VolumeId, mut waiting: VecDeque<OpId>) {
        for number in 1.. {
            let Some(&next) = waiting.front() else { return };
            let (first, end) = self.ops[next].range();
            let clients = self.volumes.of_mut(vid);
            if number > WOKEN_MAX
                && let Some(at) = clients.locked_by(first, end, next)
                && let Some(lock) = clients.locks.get_mut(&at)
            {
                lock.waiting.append(&mut waiting);
                return;
            }
            waiting.pop_front();
            self.start_change(ground, next);
        }
    }

    /// Buffers for edge blocks that have become free are something new for all volumes.
    pub(crate) fn begin_round(&mut self, ground: &mut Ground) {
        if std::mem::take(&mut self.edge_freed) {
            ground.recheck_all();
        }
    }

    /// Tries the parked operations again of every volume in which something has changed for them.
    pub(crate) fn recheck(&mut self, ground: &mut Ground, now: Nanos) {
        for vid in ground.places() {
            while let Some(volume) = ground.get_mut(vid) {
                let is_wanted = volume.take_recheck() && self.volumes.of(vid).has_parked();
                if !is_wanted {
                    break;
                }
                self.read_edges_of(ground, vid);
                let clients = self.volumes.of_mut(vid);
                std::mem::swap(&mut clients.parked, &mut self.parked_scratch);
                for n in 0..self.parked_scratch.len() {
                    let op = self.parked_scratch[n];
                    if !self.advance(ground, now, op) {
                        self.volumes.of_mut(vid).parked.push(op);
                    }
                }
                self.parked_scratch.clear();
            }
        }
    }

    /// Takes a parked operation as far as it goes; true when it is no longer parked.
    fn advance(&mut self, ground: &mut Ground, now: Nanos, id: OpId) -> bool {
        loop {
            let op = &mut self.ops[id];
            let vid = op.request.volume;
            if op.waiting > 0 {
                return false;
            }
            if ground.volume(vid).is_refusing() {
                self.complete(ground, id, Err(RequestError::Io));
                return true;
            }
            if self.volumes.of(vid).published < op.barrier {
                return false;
            }
            match op.stage {
                Stage::Edges => {
                    if let Some(error) = op.error {
                        self.complete(ground, id, Err(error));
                        return true;
                    }
                    self.merge_edges(ground, id);
                }
                Stage::Whole if ground.is_dead() && !op.direct => op.direct = true,
                Stage::Whole if !op.direct => {
                    self.enter_log(id);
                    return true;
                }
                Stage::Whole => return self.advance_direct(ground, now, id),
                Stage::Waiting | Stage::InLog | Stage::Direct | Stage::Acking => {
                    unreachable!("{:?} is not parked", op.stage)
                }
            }
        }
    }

    /// An operation whose blocks are whole is ready for the log.
    pub(super) fn enter_log(&mut self, id: OpId) {
        let op = &mut self.ops[id];
        op.stage = Stage::InLog;
        op.logged = 0;
        self.volumes.of_mut(op.request.volume).enter_log(id);
    }

    /// Reads the edges of locked changes, one after the other, as long as there are buffers.
    fn read_edges_of(&mut self, ground: &mut Ground, vid: VolumeId) {
        while let Some(&id) = self.volumes.of(vid).edgeless.front() {
            let is_over = ground.volume(vid).is_refusing();
            // Those behind it came later: they wait for the barrier, too.
            let waits = self.volumes.of(vid).published < self.ops[id].barrier;
            if !is_over && (waits || !self.read_edges(ground, id)) {
                return;
            }
            self.volumes.of_mut(vid).edgeless.pop_front();
            match is_over {
                true => self.complete(ground, id, Err(RequestError::Io)),
                false => self.volumes.of_mut(vid).parked.push(id),
            }
        }
    }

    /// Starts reading the old content of edge blocks; false while there is no buffer for it.
    fn read_edges(&mut self, ground: &mut Ground, id: OpId) -> bool {
        let wanted = self.ops[id].edges.iter().flatten().count();
        let clients = self.volumes.of_mut(self.ops[id].request.volume);
        let left = ground.pools().left(For::Edge);
        let reserved = if clients.edge_buffers > 0 { EDGE_BUFFERS_RESERVED } else { 0 };
        if left < wanted + reserved {
            return false;
        }
        clients.edge_buffers += wanted;
        self.ops[id].stage = Stage::Edges;
        for side in 0..2 {
            let Some(mut edge) = self.ops[id].edges[side] else { continue };
            edge.buf = ground.pools_mut().take(For::Edge).expect("counted above");
            self.ops[id].edges[side] = Some(edge);
            self.read_blocks(ground, id, edge.block, edge.buf);
        }
        true
    }

    /// All edge blocks are read: makes the change whole.
    fn merge_edges(&mut self, ground: &mut Ground, id: OpId) {
        let op = self.ops[id];
        let arena = ground.arena_mut();
        let write = matches!(op.request.op, Op::Write { .. });
        for edge in op.edges.into_iter().flatten() {
            let (from, to) = (usize::from(edge.from), usize::from(edge.to));
            if !write {
                arena.bytes_mut(edge.buf)[from..to].fill(0);
                continue;
            }
            let buf = op.request.buf.expect("a write has a buffer");
            let whole =
                buf.slice((edge.block - op.first_block) as usize * BLOCK_BYTES, BLOCK_BYTES);
            for (start, end) in [(0, from), (to, BLOCK_BYTES)] {
                if start < end {
                    arena.copy(edge.buf.slice(start, end - start), whole.slice(start, end - start));
                }
            }
        }
        if write {
            self.release_edges(ground, id);
        }
        self.ops[id].stage = Stage::Whole;
    }

    /// An operation needs its edge buffers no more.
    pub(super) fn release_edges(&mut self, ground: &mut Ground, id: OpId) {
        let op: &mut ClientOp = &mut self.ops[id];
        for edge in op.edges.iter_mut().filter_map(Option::take).filter(|edge| edge.buf.len > 0) {
            ground.pools_mut().give(For::Edge, edge.buf);
            self.volumes.of_mut(op.request.volume).edge_buffers -= 1;
            self.edge_freed = true;
        }
    }
}
