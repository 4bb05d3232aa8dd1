//! One volume: its index, its place in the log, and the requests that wait for something.

use crate::api::{
    BLOCK_BYTES, Begin, ControlError, Degraded, DrainOrder, Mode, Nanos, Request, RequestError, VolumeId,
    VolumeSpec,
};
use crate::backend::Backend;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::progress::{Backlog, Progress};
use crate::blocks::ledger::Ledger;
use crate::blocks::own::OwnObjects;
use crate::control::check_spec;
use crate::control::resize::Resize;
use crate::control::snapshot::Step;
use crate::format::{COUNTER_MAX, VolumeItem};
use crate::log::copy::SecondCopy;
use crate::log::sequences::Sequences;
use crate::peers::follower::{Incoming, Replica};
use crate::status::VolumeCounters;
use std::collections::{BTreeMap, VecDeque};
use zerocopy::FromZeros;

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
    pub(crate) backlog: Backlog,

    /// Blocks in records that are not published.
    pub(crate) unpublished_blocks: u64,
    /// When the last held acknowledgement was released.
    pub(crate) released_at: Nanos,
    /// Direct operations and backend reads in flight.
    pub(crate) direct_in_flight: u32,
    /// Something was dropped from the index without a record that says so. Until the checkpoint of this
    /// number is durable, a crash would bring it back.
    pub(crate) forgotten_until: u64,
    /// Requests of clients that are not replied to.
    pub(crate) requests: u32,

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
            backlog: Backlog::default(),
            unpublished_blocks: 0,
            released_at: 0,
            direct_in_flight: 0,
            forgotten_until: 0,
            requests: 0,
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
        self.ledger.is_dirty()
    }

    /// Something is being done to the volume as a whole.
    pub(crate) fn is_busy(&self) -> bool {
        self.task != Task::None
    }

    /// Its next group is to be the cut of a snapshot.
    pub(crate) fn is_to_be_cut(&self) -> bool {
        matches!(self.task, Task::Snapshot { step: Step::Cut, .. })
    }

    /// Nothing of it is to be left in the cache.
    pub(crate) fn is_to_be_empty(&self) -> bool {
        matches!(self.task, Task::Purge { .. } | Task::Remove { .. })
    }

    /// Acknowledgements wait for the drain.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.through.is_empty()
    }

    /// The image is to have everything that is acknowledged, and what was left from another mode is there. Groups are of
    /// no use any more; nothing is logged until the last one is in the image, since a redo would take the image back
    /// behind what goes there without one.
    pub(crate) fn groups_end(&self) -> bool {
        let backlog = self.mode == Mode::WriteThrough && self.progress.drained() < self.backlog.sequence();
        self.progress.is_grouped() && self.mode != Mode::WriteBack && !backlog
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
}

/// Modes by their number on the device.
const MODES: [Mode; 4] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];

fn mode_number(mode: Mode) -> u8 {
    MODES.iter().position(|&m| m == mode).expect("all modes are listed") as u8
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
