//! One volume: its index, its place in the log, and the requests that wait for something.

use crate::api::{
    BLOCK_BYTES, Begin, ControlError, Degraded, DrainOrder, Mode, Nanos, Request, RequestError, VolumeId,
    VolumeSpec,
};
use crate::backend::Backend;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::blocks::index::{ObjectFlags, Position};
use crate::blocks::ledger::{Ledger, dirty_objects, objects_of};
use crate::blocks::own::OwnObjects;
use crate::blocks::space::Space;
use crate::control::check_spec;
use crate::control::resize::Resize;
use crate::control::snapshot::Step;
use crate::drain::group::Groups;
use crate::drain::progress::Progress;
use crate::format::{COUNTER_MAX, VolumeItem};
use crate::log::copy::SecondCopy;
use crate::log::sequences::Sequences;
use crate::peers::follower::{Incoming, Replica};
use crate::status::VolumeCounters;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use zerocopy::FromZeros;

/// Entries of the queue of dirty objects for which memory is kept.
const QUEUE_ROOM_KEPT: usize = 4096;

/// An edge block of an unaligned write: the client's part of it and the block's old content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Edge {
    pub(crate) block: u64,
    /// One block of the edge pool.
    pub(crate) buf: Buf,
    /// First and one past the last byte of the block that the client writes.
    pub(crate) from: u16,
    pub(crate) to: u16,
}

/// Where a client's change stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Waits for a lock, its barrier or an edge buffer.
    Waiting,
    /// Old content of its edge blocks is being read.
    Edges,
    /// All its blocks are whole.
    Whole,
    /// In the log (for a direct change: its invalidation).
    InLog,
    /// In the backend's hands.
    Direct,
    /// Waits for its acknowledgement.
    Acking,
}

/// A client's request on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientOp {
    pub(crate) request: Request,
    /// Covering blocks of the request.
    pub(crate) first_block: u64,
    pub(crate) blocks: u64,
    /// Whole blocks without edges (for zeroes).
    pub(crate) edges: [Option<Edge>; 2],
    pub(crate) stage: Stage,
    pub(crate) error: Option<RequestError>,
    /// Device and backend operations in flight for it.
    pub(crate) waiting: u32,
    /// Entries of it that are in records.
    pub(crate) logged: u32,
    /// Records with parts of it that are not published.
    pub(crate) unpublished: u32,
    /// Sequence of its last record.
    pub(crate) sequence: u64,
    /// Holds a lock on its blocks.
    pub(crate) locked: bool,
    /// Goes past the cache (write-around, off, dead cache device).
    pub(crate) direct: bool,
    /// For a direct write: the cached copies are void already.
    pub(crate) invalidated: bool,
    /// Operations of the volume that entered the log before it and must be published first.
    pub(crate) barrier: u64,
    /// The reply needs stable media.
    pub(crate) durable: bool,
    /// When it was last held back, for the counters.
    pub(crate) held_since: Nanos,
    /// For a replica: the record that it brings.
    pub(crate) incoming: Option<Incoming>,
}

/// Blocks that only one operation may change for now.
#[derive(Debug)]
pub(crate) struct Lock {
    pub(crate) end: u64,
    pub(crate) op: OpId,
    /// Operations that wait for it.
    pub(crate) waiting: VecDeque<OpId>,
}

/// An object with something to drain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DirtyObject {
    pub(crate) object: u32,
    /// Oldest record that may have dirtied it.
    pub(crate) first_sequence: u64,
    pub(crate) since: Nanos,
    /// Nothing of it can be drained before everything up to this sequence is committed (grouped drain).
    pub(crate) drain_from: u64,
    /// When everything up to this sequence is committed, `first_sequence` becomes `then_first`.
    pub(crate) wait_for: u64,
    /// Older content than this of what a drain has left out is superseded in the redo then.
    pub(crate) then_first: u64,
}

/// A control operation that waits for the volume's drain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrainWaiter {
    pub(crate) control: u64,
    pub(crate) sequence: u64,
}

/// What is being done to the volume as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Nothing.
    None,
    /// Draining, then dropping all blocks (to mode off, or attached in it).
    Purge { control: u64, attaching: bool },
    /// Draining, verifying, then leaving the device.
    Remove { control: u64, verify: bool },
    /// Leaving the device with what is dirty.
    GiveUp { control: u64 },
    /// Bringing the image to a cut, for a snapshot of it.
    Snapshot { control: u64, step: Step },
    /// Taking another size.
    Resize(Resize),
    /// Letting go of the backend, if that has come about by `until`: with `stopping` nothing is sent to it any more.
    Detach { control: u64, stopping: bool, until: Nanos },
    /// Throwing away what a replica holds, to begin with the record after `base`.
    Begin { control: u64, begin: Begin },
}

/// A volume.
pub(crate) struct Volume {
    pub(crate) spec: VolumeSpec,
    pub(crate) mode: Mode,
    /// See [`Engine::set_degraded`](crate::Engine::set_degraded).
    pub(crate) degraded: Degraded,
    pub(crate) attached: bool,
    pub(crate) failed: bool,
    pub(crate) fenced: bool,
    /// New requests are refused.
    pub(crate) closing: bool,
    pub(crate) task: Task,
    pub(crate) ledger: Ledger,

    pub(crate) log: Sequences,
    pub(crate) progress: Progress,
    /// Newest record of an acknowledged change.
    pub(crate) sequence_acknowledged: u64,
    /// A client has flushed: writes no longer wait for stable media.
    pub(crate) flushes: bool,

    /// Operations that are ready for the log, in log order.
    pub(crate) pending: VecDeque<OpId>,
    /// Operations that ever entered `pending`, and of these the published ones.
    pub(crate) entered: u64,
    pub(crate) published: u64,
    /// By their first blocks; no two of them overlap.
    pub(crate) locks: BTreeMap<u64, Lock>,
    /// Locked operations that wait for their barrier or for an edge buffer, as they came.
    pub(crate) edgeless: VecDeque<OpId>,
    /// Locked operations that wait for the content of their edges, for their barrier, or for clean blocks.
    pub(crate) parked: Vec<OpId>,
    /// Something has changed for them.
    pub(crate) recheck: bool,
    /// Edge buffers that operations of the volume hold.
    pub(crate) edge_buffers: usize,
    /// Acknowledgements held back by back-pressure, in their order.
    pub(crate) held: VecDeque<OpId>,
    /// Acknowledgements that wait for the drain (write-through), by sequence.
    pub(crate) through: VecDeque<OpId>,
    /// Bytes that may be acknowledged ahead of the drain while a backlog from write-back is being drained.
    pub(crate) credit_bytes: u64,
    /// Sequence up to which the backlog reaches.
    pub(crate) backlog_sequence: u64,

    /// What is committed to the backend in groups; `None` where the drain is unordered.
    pub(crate) groups: Option<Box<Groups>>,
    /// Groups that this generation has committed.
    pub(crate) groups_made: u64,
    /// Blocks in records that are not published.
    pub(crate) unpublished_blocks: u64,
    /// When the last held acknowledgement was released.
    pub(crate) released_at: Nanos,
    /// By their first sequence.
    pub(crate) dirty_objects: VecDeque<DirtyObject>,
    /// Entries before this one cannot be drained for now.
    pub(crate) drain_cursor: usize,
    /// Drains in flight (indices of the engine's slab).
    pub(crate) drains: Vec<u32>,
    /// The one that has more to issue, and what is in flight for all.
    pub(crate) drain_open: Option<u32>,
    pub(crate) drain_in_flight: usize,
    /// Of these, what the backend has been given.
    pub(crate) drain_writes: u32,
    /// Drained objects that wait for the backend's flush.
    pub(crate) unflushed: Vec<u32>,
    pub(crate) flushing: Vec<u32>,
    pub(crate) drain_waiters: Vec<DrainWaiter>,
    pub(crate) drain_all_until: u64,
    /// Direct operations and backend reads in flight.
    pub(crate) direct_in_flight: u32,
    /// Something was dropped from the index without a record that says so. Until the checkpoint of this
    /// number is durable, a crash would bring it back.
    pub(crate) forgotten_until: u64,
    /// Requests of clients that are not replied to.
    pub(crate) requests: u32,

    pub(crate) drain_rate: DrainRate,
    pub(crate) backend: Backend,
    /// Sequence at which a wait for the quota was last counted.
    pub(crate) quota_wait_noted: u64,
    /// The volume of the image's parent, if this one reads through it.
    pub(crate) parent: Option<VolumeId>,
    /// Objects of the image that have been written to, or are known to be there.
    pub(crate) own: OwnObjects,
    /// It was looked at what the image had when it was opened.
    pub(crate) own_known: bool,
    pub(crate) count: VolumeCounters,
    /// Its second copy, at another host.
    pub(crate) copy: Option<Box<SecondCopy>>,
    /// It is itself the second copy of another host's volume.
    pub(crate) replica: Option<Box<Replica>>,
}

impl Volume {
    pub(crate) fn new(spec: VolumeSpec) -> Volume {
        let mode = spec.mode;
        let own = OwnObjects::none(spec.size_bytes);
        Volume {
            spec,
            mode,
            degraded: Degraded::No,
            attached: false,
            failed: false,
            fenced: false,
            closing: false,
            task: Task::None,
            ledger: Ledger::new(),
            log: Sequences::default(),
            progress: Progress::default(),
            sequence_acknowledged: 0,
            flushes: false,
            pending: VecDeque::with_capacity(256),
            entered: 0,
            published: 0,
            locks: BTreeMap::new(),
            edgeless: VecDeque::new(),
            parked: Vec::new(),
            recheck: false,
            edge_buffers: 0,
            held: VecDeque::new(),
            through: VecDeque::new(),
            credit_bytes: 0,
            backlog_sequence: 0,
            groups: None,
            groups_made: 0,
            unpublished_blocks: 0,
            released_at: 0,
            dirty_objects: VecDeque::new(),
            drain_cursor: 0,
            drains: Vec::new(),
            drain_open: None,
            drain_in_flight: 0,
            drain_writes: 0,
            unflushed: Vec::new(),
            flushing: Vec::new(),
            drain_waiters: Vec::new(),
            drain_all_until: 0,
            direct_in_flight: 0,
            forgotten_until: 0,
            requests: 0,
            drain_rate: DrainRate::default(),
            backend: Backend::new(),
            quota_wait_noted: u64::MAX,
            parent: None,
            own,
            own_known: false,
            count: VolumeCounters::default(),
            copy: None,
            replica: None,
        }
    }

    /// Blocks of the volume; the last one may be cut by the size.
    pub(crate) fn blocks(&self) -> u64 {
        self.spec.size_bytes.div_ceil(BLOCK_BYTES as u64)
    }

    /// As a checkpoint holds it.
    pub(crate) fn to_item(&self, covered_blocks: u64) -> VolumeItem {
        let spec = &self.spec;
        let mut item = VolumeItem::new_zeroed();
        item.size_bytes.set(self.size_held());
        item.generation.set(spec.generation);
        item.sequence.set(self.log.published());
        item.chain.set(self.log.chain_published());
        item.mode = mode_number(spec.mode);
        item.read_only = u8::from(spec.read_only);
        item.failed = u8::from(self.failed);
        item.unordered = u8::from(spec.drain == DrainOrder::Unordered);
        item.sequence_drained.set(self.progress.drained());
        item.dirty_bytes_max.set(spec.dirty_bytes_max);
        item.dirty_blocks.set(self.ledger.dirty());
        item.covered_blocks.set(covered_blocks);
        item.name_len.set(spec.name.len() as u16);
        item.backend_len.set(spec.backend.len() as u16);
        item.attachment_len.set(spec.attachment.len() as u16);
        item.replica = u8::from(self.replica.is_some());
        item.promised.set(self.replica.as_ref().map_or(0, |replica| replica.promised));
        item.name[..spec.name.len()].copy_from_slice(spec.name.as_bytes());
        item.backend[..spec.backend.len()].copy_from_slice(spec.backend.as_bytes());
        item.attachment[..spec.attachment.len()].copy_from_slice(&spec.attachment);
        item
    }

    /// From a checkpoint; `None` if the item makes no sense.
    pub(crate) fn from_item(item: &VolumeItem) -> Option<Volume> {
        let text =
            |bytes: &[u8], len: u16| Some(std::str::from_utf8(bytes.get(..len as usize)?).ok()?.to_owned());
        let spec = VolumeSpec {
            name: text(&item.name, item.name_len.get())?,
            backend: text(&item.backend, item.backend_len.get())?,
            size_bytes: item.size_bytes.get(),
            mode: *MODES.get(usize::from(item.mode))?,
            drain: if item.unordered == 0 { DrainOrder::Grouped } else { DrainOrder::Unordered },
            dirty_bytes_max: item.dirty_bytes_max.get(),
            read_only: item.read_only == 1,
            generation: item.generation.get(),
            attachment: item.attachment.get(..usize::from(item.attachment_len.get()))?.to_vec(),
        };
        check_spec(&spec).ok()?;
        if item.sequence.get().max(item.sequence_drained.get()) > COUNTER_MAX {
            return None;
        }
        let mut volume = Volume::new(spec);
        volume.failed = item.failed == 1;
        if item.replica == 1 {
            let promised = item.promised.get();
            volume.replica = Some(Box::new(Replica::new(promised)));
        }
        volume.set_sequence(item.sequence.get(), item.chain.get());
        volume.progress.restore_drained(item.sequence_drained.get());
        Some(volume)
    }

    /// Everything up to `sequence` is known and durable.
    pub(crate) fn set_sequence(&mut self, sequence: u64, chain: u32) {
        self.log.restore(sequence, chain);
        self.progress.restore_sent(sequence);
        self.sequence_acknowledged = sequence;
        if let Some(replica) = &mut self.replica {
            replica.taken = sequence;
        }
    }

    /// No request is served any more: another owner has the image, or data is lost that cannot be named.
    pub(crate) fn is_refusing(&self) -> bool {
        self.fenced || self.failed
    }

    /// What the image will never get from the cache.
    pub(crate) fn loss(&self) -> Option<ControlError> {
        match self.ledger.blocks().lost {
            0 => self.failed.then_some(ControlError::Failed),
            lost => Some(ControlError::Lost(lost)),
        }
    }

    /// The backend has everything up to here.
    pub(crate) fn sequence_whole(&self) -> u64 {
        if self.has_loss() { self.progress.whole() } else { self.progress.drained() }
    }

    /// Something is lost, or was since its copy began.
    pub(crate) fn has_loss(&self) -> bool {
        let lost = self.loss().is_some() || self.copy.as_ref().is_some_and(|copy| copy.has_lost());
        lost && !mutated!(LossForgotten)
    }

    /// Something of the volume is not in the backend.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty_objects.is_empty()
            || !self.drains.is_empty()
            || !self.unflushed.is_empty()
            || !self.flushing.is_empty()
            || self.ledger.is_uncommitted()
    }

    /// Changes go past the cache.
    pub(crate) fn goes_direct(&self) -> bool {
        matches!(self.mode, Mode::WriteAround | Mode::Off)
    }

    /// The first block of a lock on any of these blocks, other than `op`'s own.
    pub(crate) fn locked_by(&self, first: u64, end: u64, op: OpId) -> Option<u64> {
        // They do not overlap: their ends are in the order of their beginnings.
        let before = self.locks.range(..end).rev().take_while(|(_, lock)| lock.end > first);
        before.filter(|(_, lock)| lock.op != op).map(|(first, _)| *first).next()
    }

    /// Something has changed for operations that are parked.
    pub(crate) fn has_to_recheck(&self) -> bool {
        self.recheck && !(self.parked.is_empty() && self.edgeless.is_empty())
    }

    /// Notes that `object` has something to drain since the record `sequence`.
    pub(crate) fn note_dirty(&mut self, object: u32, sequence: u64, now: Nanos) {
        if !self.ledger.flags(object).contains(ObjectFlags::QUEUED) {
            self.ledger.mark(object, ObjectFlags::QUEUED);
            let wait_for = if self.groups.is_some() { sequence } else { 0 };
            self.dirty_objects.push_back(DirtyObject {
                object,
                first_sequence: sequence,
                since: now,
                drain_from: wait_for,
                wait_for,
                then_first: sequence,
            });
        }
    }

    /// A block becomes the current, dirty copy at `position`.
    pub(crate) fn write_block(&mut self, space: &mut Space, now: Nanos, place: (u64, Position), crc: u32) {
        self.ledger.write(space, now, place, std::iter::once(crc));
    }

    /// A range reads as zero from the record `sequence` on; see [`Ledger::zero`].
    pub(crate) fn zero(
        &mut self,
        space: &mut Space,
        now: Nanos,
        range: Range<u64>,
        keep: bool,
        sequence: u64,
    ) {
        self.ledger.zero(space, now, range.clone(), keep);
        for object in objects_of(range) {
            self.note_dirty(object, sequence, now);
        }
    }

    /// Marks the objects that have dirty blocks or zeroes for the drain (after recovery).
    pub(crate) fn queue_dirty_objects(&mut self, space: &Space, now: Nanos) {
        // Replay has queued some with the sequence of their zeroes; what else is dirty in them may be older.
        for queued in std::mem::take(&mut self.dirty_objects) {
            self.ledger.unmark(queued.object, ObjectFlags::QUEUED);
        }
        for object in dirty_objects(&self.ledger, space) {
            let sequence = self.progress.drained() + 1;
            self.note_dirty(object, sequence, now);
        }
    }

    /// Nothing that is queued can be drained before everything up to the newest record is committed.
    pub(crate) fn hold_dirty_objects(&mut self) {
        let sequence = self.log.published();
        for dirty in &mut self.dirty_objects {
            (dirty.drain_from, dirty.wait_for) = (sequence, sequence);
        }
    }

    /// Takes an object out of the queue. A queue that was long once, as after a discard of the whole volume, gives its memory back.
    pub(crate) fn take_dirty(&mut self, at: usize) -> DirtyObject {
        let taken = self.dirty_objects.remove(at).expect("it was found in the queue");
        let (len, room) = (self.dirty_objects.len(), self.dirty_objects.capacity());
        if room > QUEUE_ROOM_KEPT && len < room / 4 {
            self.dirty_objects.shrink_to((2 * len).max(QUEUE_ROOM_KEPT));
        }
        taken
    }

    /// Puts an object back into the queue at the place of its sequence (a failed or partial drain).
    pub(crate) fn requeue_dirty(&mut self, mut entry: DirtyObject) {
        if self.ledger.flags(entry.object).contains(ObjectFlags::QUEUED) {
            let at = self.dirty_objects.iter().position(|d| d.object == entry.object);
            let queued = self.take_dirty(at.expect("an object with the flag is in the queue"));
            let (wait_for, then_first) = match () {
                // What is newer than the promise of the one does not touch it.
                () if queued.first_sequence >= entry.then_first => (entry.wait_for, entry.then_first),
                () if entry.first_sequence >= queued.then_first => (queued.wait_for, queued.then_first),
                () => (entry.wait_for.max(queued.wait_for), entry.then_first.min(queued.then_first)),
            };
            (entry.wait_for, entry.then_first) = (wait_for, then_first);
            let older = entry.first_sequence.min(queued.first_sequence);
            entry.first_sequence = if mutated!(RequeuedAsNewer) { queued.first_sequence } else { older };
            entry.since = entry.since.min(queued.since);
            entry.drain_from = entry.drain_from.min(queued.drain_from);
        }
        self.ledger.mark(entry.object, ObjectFlags::QUEUED);
        let at = self.dirty_objects.partition_point(|d| d.first_sequence < entry.first_sequence);
        self.dirty_objects.insert(at, entry);
        self.drain_cursor = self.drain_cursor.min(at);
    }

    /// Something dirty of an object stands at another place now.
    pub(crate) fn note_moved(&mut self, object: u32, now: Nanos) {
        let flags = self.ledger.flags(object);
        let queued = flags.contains(ObjectFlags::QUEUED);
        // A drain under way knows the old position only: it will not make this copy clean.
        if queued && flags.contains(ObjectFlags::DRAINING) {
            self.drain_again(object);
        }
        if !queued && !mutated!(MovedWhileDrained) {
            let first_sequence = self.progress.drained() + 1;
            self.requeue_dirty(DirtyObject {
                object,
                first_sequence,
                since: now,
                drain_from: 0,
                wait_for: 0,
                then_first: first_sequence,
            });
        }
    }

    /// Something of a queued object can be drained at once, whatever the rest waits for.
    pub(crate) fn drain_again(&mut self, object: u32) {
        let at = self.dirty_objects.iter().position(|dirty| dirty.object == object);
        let at = at.expect("an object with the flag is in the queue");
        self.dirty_objects[at].drain_from = 0;
        self.drain_cursor = self.drain_cursor.min(at);
    }

    /// Everything up to `sequence` is committed: what waited for that can be drained.
    pub(crate) fn commit_objects(&mut self, sequence: u64) {
        let mut moved = false;
        for dirty in &mut self.dirty_objects {
            if dirty.wait_for <= sequence && dirty.first_sequence < dirty.then_first {
                dirty.first_sequence = dirty.then_first;
                moved = true;
            }
        }
        if moved {
            self.dirty_objects.make_contiguous().sort_by_key(|dirty| dirty.first_sequence);
        }
        self.drain_cursor = 0;
    }
}

/// Modes by their number on the device.
const MODES: [Mode; 4] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];

fn mode_number(mode: Mode) -> u8 {
    MODES.iter().position(|&m| m == mode).expect("all modes are listed") as u8
}

/// How fast the drain has been while it was at work, as a decaying mean; for back-pressure.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DrainRate {
    bytes_per_s: f64,
    /// Since when the drain has been at work without a pause.
    busy_since: Nanos,
    /// For how long it was before, and what it has moved, since the rate was last taken.
    busy_ns: Nanos,
    bytes: u64,
    /// When it last moved something.
    last: Nanos,
}

/// Work over which the drain's rate is taken.
const RATE_WINDOW_NS: Nanos = 250_000_000;
/// A drain without progress for this long counts as stopped.
const STALE_NS: Nanos = 2_000_000_000;

impl DrainRate {
    /// The drain, which had nothing in flight, goes on.
    pub(crate) fn begin(&mut self, now: Nanos) {
        self.busy_ns += self.last.saturating_sub(self.busy_since);
        self.busy_since = now;
    }

    /// It has moved something.
    pub(crate) fn note(&mut self, now: Nanos, bytes: u64) {
        // What completes together counts together: the rate is taken up to the last time that something did.
        let busy_ns = self.busy_ns + self.last.saturating_sub(self.busy_since);
        if now > self.last && busy_ns >= RATE_WINDOW_NS {
            let rate = self.bytes as f64 * 1e9 / busy_ns as f64;
            let keep = if busy_ns > 8 * RATE_WINDOW_NS || self.bytes_per_s == 0.0 { 0.0 } else { 0.7 };
            self.bytes_per_s = keep * self.bytes_per_s + (1.0 - keep) * rate;
            (self.busy_since, self.busy_ns, self.bytes) = (self.last.max(self.busy_since), 0, 0);
        }
        self.bytes += bytes;
        self.last = now;
    }

    /// Nothing has been drained for so long that the rate says nothing about now.
    pub(crate) fn is_stale(&self, now: Nanos) -> bool {
        self.bytes_per_s == 0.0 || now.saturating_sub(self.last) > STALE_NS
    }

    /// Bytes per second; never below 64 KiB so that a hold always ends.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.bytes_per_s.max(65536.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drains_rate_is_that_of_its_work_however_long_it_pauses() {
        const MIB: u64 = 1 << 20;
        let mut rate = DrainRate::default();
        let mut now = 0;
        for _ in 0..100 {
            // A hundredth of a second at 100 MiB a second, then a pause.
            rate.begin(now);
            now += 10_000_000;
            rate.note(now, MIB);
            now += 1_500_000_000;
            assert!(rate.bytes_per_s == 0.0 || (rate.bytes_per_s / MIB as f64 - 100.0).abs() < 1.0);
        }
        assert!(rate.bytes_per_s > 0.0 && !rate.is_stale(now));
        assert!(rate.is_stale(now + STALE_NS));
    }

    fn volume() -> Volume {
        let spec = VolumeSpec {
            name: "a".into(),
            backend: "b".into(),
            size_bytes: 1 << 30,
            mode: Mode::WriteBack,
            drain: DrainOrder::Grouped,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 1,
            attachment: Vec::new(),
        };
        Volume::new(spec)
    }

    #[test]
    fn a_queue_of_dirty_objects_gives_back_the_memory_of_its_longest_days() {
        let mut volume = volume();
        (0..1_000_000).for_each(|object| volume.note_dirty(object, 1, 0));
        let longest = volume.dirty_objects.capacity();
        for object in 0..999_000 {
            assert_eq!(volume.take_dirty(0).object, object);
        }
        let room = volume.dirty_objects.capacity();
        assert!(room < longest / 64, "room for {room} objects of which 1000 are left");
        assert_eq!(volume.take_dirty(999).object, 999_999);
    }

    #[test]
    fn a_sequence_that_no_volume_can_have_is_refused() {
        let with = |change: fn(&mut VolumeItem)| {
            let mut item = volume().to_item(0);
            change(&mut item);
            Volume::from_item(&item).map(|volume| (volume.log.published(), volume.progress.drained()))
        };
        assert_eq!(with(|item| item.sequence.set(COUNTER_MAX)), Some((COUNTER_MAX, 0)));
        assert_eq!(with(|item| item.sequence_drained.set(COUNTER_MAX)), Some((0, COUNTER_MAX)));
        assert_eq!(with(|item| item.sequence.set(COUNTER_MAX + 1)), None);
        assert_eq!(with(|item| item.sequence_drained.set(COUNTER_MAX + 1)), None);
    }

    fn dirty(object: u32, first_sequence: u64, wait_for: u64, then_first: u64) -> DirtyObject {
        DirtyObject { object, first_sequence, since: 0, drain_from: 0, wait_for, then_first }
    }

    /// Since which record an object that is alone in the queue is dirty when everything up to `sequence` is committed.
    fn first_at(queued: &[DirtyObject], sequence: u64) -> u64 {
        let mut volume = volume();
        queued.iter().for_each(|&entry| volume.requeue_dirty(entry));
        volume.commit_objects(sequence);
        assert_eq!(volume.dirty_objects.len(), 1);
        volume.dirty_objects[0].first_sequence
    }

    #[test]
    fn an_object_that_comes_back_from_the_drain_waits_for_what_either_needs_and_for_no_more() {
        let mut entries = Vec::new();
        for (first, wait_for) in [(1, 3), (1, 5), (2, 3), (2, 5), (3, 4), (4, 5)] {
            entries.extend((first..6).map(|then_first| dirty(5, first, wait_for, then_first)));
        }
        for &came_back in &entries {
            for &queued in &entries {
                let apart = |sequence| first_at(&[came_back], sequence).min(first_at(&[queued], sequence));
                let touched = queued.first_sequence < came_back.then_first
                    && came_back.first_sequence < queued.then_first;
                for sequence in 2..7 {
                    let first = first_at(&[queued, came_back], sequence);
                    let exact = !touched || sequence == 2 || sequence == 6;
                    assert!(first <= apart(sequence), "{came_back:?} with {queued:?} at {sequence}");
                    assert!(
                        !exact || first == apart(sequence),
                        "{came_back:?} with {queued:?} at {sequence}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_object_that_is_dirty_for_longest_stands_first() {
        let mut volume = volume();
        for (object, first) in [(0, 5), (1, 9), (2, 2), (3, 7), (4, 1), (5, 12), (6, 7)] {
            volume.requeue_dirty(dirty(object, first, 20, 30 - first));
            assert!(volume.dirty_objects.iter().is_sorted_by_key(|entry| entry.first_sequence));
        }
        volume.commit_objects(19);
        assert_eq!(volume.dirty_objects[0].first_sequence, 1);
        volume.commit_objects(20);
        assert!(volume.dirty_objects.iter().is_sorted_by_key(|entry| entry.first_sequence));
        assert_eq!(volume.dirty_objects[0].first_sequence, 18);
        assert_eq!(volume.dirty_objects.len(), 7);
    }
}
