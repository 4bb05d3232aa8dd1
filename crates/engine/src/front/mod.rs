//! Clients: requests come, go through the log, the cache or past it, and are answered.
//!
//! | file | what it is about |
//! |---|---|
//! | `ack` | when a change or a flush is answered |
//! | `build` | What clients have for the log goes into appends |
//! | `change` | changes on their way into the log: admission, locks, edges of blocks |
//! | `device_reads` | Reads of clients that wait for the cache device, or are in flight to it |
//! | `direct` | changes that go past the log to the image |
//! | `op` | A client's request on its way through the core |
//! | `read` | reads: stretches from the device, zeroes, and what the backend has |

mod ack;
mod build;
mod change;
mod device_reads;
mod direct;
mod op;
mod read;

pub(crate) use read::BadRead;

use crate::api::*;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::base::table::Table;
use crate::base::util::Slab;
use crate::front::device_reads::DeviceReads;
use crate::front::op::{ClientOp, Lock, Stage};
use crate::front::read::MissRead;
use crate::ground::Ground;
use crate::log::copy::Incoming;
use crate::status::VolumeCounters;
use std::collections::{BTreeMap, VecDeque};

/// The requests of all clients.
pub(crate) struct Front {
    ops: Slab<ClientOp>,
    volumes: Table<Clients>,
    /// Reads of the cache device.
    reads: DeviceReads,
    /// Reads of images in flight for requests.
    misses: Slab<MissRead>,
    /// Bad blocks of a read whose repair or loss is to be decided.
    bad: VecDeque<BadRead>,
    /// Buffers for edge blocks have become free.
    edge_freed: bool,
    parked_scratch: Vec<OpId>,
    /// The volume that may log first the next time.
    next_volume: usize,
}

/// The requests of the clients of one volume.
#[derive(Default)]
struct Clients {
    /// Operations that are ready for the log, in log order.
    pending: VecDeque<OpId>,
    /// Operations that ever entered `pending`, and of these the published ones.
    entered: u64,
    published: u64,
    /// By their first blocks; no two of them overlap.
    locks: BTreeMap<u64, Lock>,
    /// Locked operations that wait for their barrier or for an edge buffer, as they came.
    edgeless: VecDeque<OpId>,
    /// Locked operations that wait for the content of their edges, for their barrier, or for clean
    /// blocks.
    parked: Vec<OpId>,
    /// Edge buffers that operations of the volume hold.
    edge_buffers: usize,
    /// Acknowledgements held back by back-pressure, in their order.
    held: VecDeque<OpId>,
    /// When the last held acknowledgement was released.
    released_at: Nanos,
    /// Direct operations in flight.
    direct_in_flight: u32,
    /// Requests of clients that are not replied to.
    requests: u32,
    /// A client has flushed: writes no longer wait for stable media.
    flushes: bool,
    /// Newest record of an acknowledged change.
    acknowledged: u64,
    /// Sequence at which a wait for the quota was last counted.
    quota_wait_noted: Option<u64>,
}

impl Clients {
    /// The first block of a lock on any of these blocks, other than `op`'s own.
    fn locked_by(&self, first: u64, end: u64, op: OpId) -> Option<u64> {
        // They do not overlap: their ends are in the order of their beginnings.
        let before = self.locks.range(..end).rev().take_while(|(_, lock)| lock.end > first);
        before.filter(|(_, lock)| lock.op != op).map(|(first, _)| *first).next()
    }

    /// Operations wait for something to change.
    fn has_parked(&self) -> bool {
        !(self.parked.is_empty() && self.edgeless.is_empty())
    }

    /// A change is acknowledged whose newest record is `sequence`, of a log that is built up to
    /// `built`.
    fn advance_acknowledged(&mut self, sequence: u64, built: u64) {
        assert!(sequence <= built, "record {sequence} is acknowledged before it is built");
        self.acknowledged = self.acknowledged.max(sequence);
    }

    fn enter_log(&mut self, op: OpId) {
        self.pending.push_back(op);
        self.entered += 1;
    }
}

impl Front {
    pub(crate) fn new() -> Front {
        Front {
            ops: Slab::with_capacity(1024),
            volumes: Table::new(),
            reads: DeviceReads::new(),
            misses: Slab::with_capacity(256),
            bad: VecDeque::new(),
            edge_freed: false,
            parked_scratch: Vec::with_capacity(256),
            next_volume: 0,
        }
    }

    /// A volume has come, or begins anew: its log goes on behind the record `acknowledged`.
    pub(crate) fn add(&mut self, id: VolumeId, acknowledged: u64) {
        self.volumes.add(id);
        self.volumes.of_mut(id).acknowledged = acknowledged;
    }

    /// A volume is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) {
        self.volumes.remove(id);
    }

    /// The log of a copy begins anew behind a record.
    pub(crate) fn restore(&mut self, id: VolumeId, acknowledged: u64) {
        self.volumes.of_mut(id).acknowledged = acknowledged;
    }

    /// A volume has got its backend: what an owner has flushed to its copy says nothing about
    /// clients that are still to come.
    pub(crate) fn attach(&mut self, id: VolumeId) {
        self.volumes.of_mut(id).flushes = false;
    }

    /// Takes a request in, which may be begun. The operation it becomes is to be started next.
    pub(crate) fn admit(
        &mut self,
        now: Nanos,
        request: Request,
        incoming: Option<Incoming>,
    ) -> OpId {
        let clients = self.volumes.of_mut(request.volume);
        clients.requests += 1;
        clients.flushes |= request.op.is_fua();
        self.reads.note_request(request.volume);
        self.ops.insert(ClientOp::new(now, request, incoming))
    }

    /// The volume of an operation.
    pub(crate) fn volume_of(&self, op: OpId) -> VolumeId {
        self.ops[op].request.volume
    }

    /// A record of an owner's is on its way into the log.
    pub(crate) fn log_record(&mut self, id: OpId, incoming: Incoming) {
        let op = &mut self.ops[id];
        op.stage = Stage::InLog;
        op.sequence = incoming.sequence();
        self.volumes.of_mut(op.request.volume).enter_log(id);
    }

    /// Every operation of a volume that entered the log is published.
    pub(crate) fn is_published(&self, id: VolumeId) -> bool {
        let clients = self.volumes.of(id);
        clients.published == clients.entered
    }

    /// Every request of a volume is answered.
    pub(crate) fn is_answered(&self, id: VolumeId) -> bool {
        self.volumes.of(id).requests == 0
    }

    /// Every request of a volume is answered, and what entered the log is published.
    pub(crate) fn is_idle(&self, id: VolumeId) -> bool {
        self.is_answered(id) && self.is_published(id)
    }

    /// Direct operations of a volume are in flight.
    pub(crate) fn is_direct(&self, id: VolumeId) -> bool {
        self.volumes.of(id).direct_in_flight > 0
    }

    /// An operation of a volume reaches beyond block `end`.
    pub(crate) fn reaches_beyond(&mut self, id: VolumeId, end: u64) -> bool {
        let beyond = |op: &ClientOp| {
            let blocks = if mutated!(ShrinkMissesStraddler) { 0 } else { op.blocks };
            op.request.volume == id && op.first_block + blocks > end
        };
        self.ops.iter_mut().any(|(_, op)| beyond(op))
    }

    /// Newest record of an acknowledged change of a volume.
    pub(crate) fn acknowledged(&self, id: VolumeId) -> u64 {
        self.volumes.of(id).acknowledged
    }

    /// A client of a volume has flushed.
    pub(crate) fn flushes(&self, id: VolumeId) -> bool {
        self.volumes.of(id).flushes
    }

    /// Something of a volume waits for the log.
    pub(crate) fn has_pending(&self, id: VolumeId) -> bool {
        !self.volumes.of(id).pending.is_empty()
    }

    /// Takes out what waits for the log and is in no append: it will not be logged.
    pub(crate) fn take_pending(&mut self, id: VolumeId) -> VecDeque<OpId> {
        let clients = self.volumes.of_mut(id);
        let pending = std::mem::take(&mut clients.pending);
        clients.published += pending.len() as u64;
        pending
    }

    /// Whether the next change of a volume waits for room at its peer.
    pub(crate) fn is_held_up(&self, ground: &Ground, id: VolumeId) -> bool {
        let volume = ground.volume(id);
        let pending = &self.volumes.of(id).pending;
        let Some(&front) = pending.front().filter(|_| !volume.is_stopped()) else { return false };
        let room = volume.record_room();
        let (blocks, ranges) = self.ops[front].needs_room();
        room.is_none_or(|room| room.blocks() < blocks || room.ranges() < ranges)
    }

    /// Some acknowledgement is held back.
    pub(crate) fn holds_back(&self, id: VolumeId) -> bool {
        !self.volumes.of(id).held.is_empty()
    }

    /// Something has changed for operations of a volume that are parked.
    pub(crate) fn has_to_recheck(&self, ground: &Ground, id: VolumeId) -> bool {
        ground.volume(id).is_to_be_rechecked() && self.volumes.of(id).has_parked()
    }

    /// Operations of some volume can go on: something has changed for them.
    pub(crate) fn wants_round(&self, ground: &Ground) -> bool {
        ground.arriving().wakes() || ground.ids().any(|id| self.has_to_recheck(ground, id))
    }

    /// What waits in a volume that serves nothing any more, apart from operations that are parked,
    /// which see it themselves, and those in flight, which see it when they come back.
    pub(crate) fn take_waiting(&mut self, ground: &mut Ground, id: VolumeId) -> Vec<OpId> {
        let clients = self.volumes.of_mut(id);
        let volume = ground.volume_mut(id);
        let mut waiting: Vec<OpId> =
            volume.take_through().into_iter().chain(clients.held.drain(..)).collect();
        clients.locks.values_mut().for_each(|lock| waiting.extend(lock.waiting.drain(..)));
        if let Some(copy) = volume.copy_mut() {
            waiting.extend(copy.take_waiting_ops());
        }
        for op in std::mem::take(&mut clients.pending) {
            if self.ops[op].unpublished > 0 {
                self.ops[op].error = Some(RequestError::Io);
            } else {
                waiting.push(op);
                clients.published += 1;
            }
        }
        waiting
    }

    /// The device has failed: what is not published never will be. Returns the changes that the log
    /// did not take.
    pub(crate) fn abandon_log(&mut self, ground: &Ground) -> Vec<OpId> {
        for id in ground.ids() {
            let clients = self.volumes.of_mut(id);
            clients.pending.clear();
            clients.published = clients.entered;
        }
        let unpublished = |op: &ClientOp| {
            let changes = matches!(
                op.request.op,
                Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } | Op::Record { .. }
            );
            op.stage == Stage::InLog && changes
        };
        self.ops.iter_mut().filter(|(_, op)| unpublished(op)).map(|(id, _)| id).collect()
    }

    /// A change that the log did not take goes to the backend. The log kept changes of the same
    /// blocks apart; from now on a lock has to.
    pub(crate) fn redirect(&mut self, ground: &mut Ground, id: OpId) {
        let op = &mut self.ops[id];
        if op.incoming.is_some() {
            return self.complete(ground, id, Err(RequestError::Io));
        }
        (op.logged, op.unpublished, op.barrier) = (0, 0, 0);
        if !op.locked {
            return self.start_change(ground, id);
        }
        (op.direct, op.invalidated, op.stage) = (true, false, Stage::Whole);
        self.park(ground, id);
    }

    /// An operation that has waited for stable media, or for its copy, when the device failed: the
    /// backend has to acknowledge it.
    pub(crate) fn go_past_device(&mut self, ground: &mut Ground, id: OpId) {
        let op = &self.ops[id];
        if ground.volume(op.request.volume).is_copy() {
            self.complete(ground, id, Err(RequestError::Io));
        } else if op.direct {
            self.redirect(ground, id);
        } else {
            self.ack_when_drained(ground, id);
        }
    }

    /// Completes an operation and wakes what waited for its lock.
    pub(crate) fn complete(
        &mut self,
        ground: &mut Ground,
        id: OpId,
        result: Result<(), RequestError>,
    ) {
        self.release_edges(ground, id);
        let op = self.ops.remove(id);
        let vid = op.request.volume;
        let volume = ground.volume(vid);
        let built = volume.log().built();
        let result = if volume.is_refusing() { Err(RequestError::Io) } else { result };
        ground.out_mut().reply(op.request.id, result);
        note_reply(ground.volume_mut(vid).count_mut(), &op.request, result);
        let clients = self.volumes.of_mut(vid);
        clients.requests -= 1;
        if result.is_ok() {
            clients.advance_acknowledged(op.acknowledges(), built);
        }
        if op.locked {
            let lock = clients.locks.remove(&op.first_block).expect("it is locked");
            debug_assert_eq!(lock.op, id);
            self.wake(ground, vid, lock.waiting);
        }
    }
}

/// A client's request is answered.
fn note_reply(count: &mut VolumeCounters, request: &Request, result: Result<(), RequestError>) {
    match (result, request.op) {
        (Err(_), _) => count.errors += 1,
        (_, Op::Read) => {
            count.reads += 1;
            count.read_bytes += if mutated!(CounterDead) { 0 } else { request.len };
        }
        (_, Op::Write { .. }) => {
            count.writes += 1;
            count.written_bytes += request.len;
        }
        (_, Op::Flush) => count.flushes += 1,
        (_, Op::Discard { .. } | Op::WriteZeroes { .. }) => count.discards += 1,
        (_, Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. }) => {}
    }
}
