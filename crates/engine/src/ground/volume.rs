//! One volume, as all rooms know it: what is true of it, where its blocks are, and how far its log and its drain are.

use crate::api::{BLOCK_BYTES, ControlError, Degraded, DrainOrder, Mode, VolumeId, VolumeSpec};
use crate::backend::Backend;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::base::progress::{Backlog, Progress};
use crate::blocks::budget::Reserve;
use crate::blocks::ledger::Ledger;
use crate::blocks::ledger::object_of;
use crate::blocks::own::OwnObjects;
use crate::blocks::own::Source;
use crate::format::{COUNTER_MAX, VolumeItem};
use crate::ground::task::{Resize, Stage, Step, Task};
use crate::log::copy::RecordRoom;
use crate::log::copy::SecondCopy;
use crate::log::sequences::Sequences;
use crate::status::VolumeCounters;
use std::collections::VecDeque;
use zerocopy::FromZeros;

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

    /// Something has changed for operations that wait in the front.
    pub(crate) recheck: bool,
    /// The backend has more than the image, or gets it.
    pub(crate) redo_is_kept: bool,
    /// Acknowledgements that wait for the drain (write-through), by sequence.
    pub(crate) through: VecDeque<OpId>,
    pub(crate) backlog: Backlog,

    /// Blocks in records that are not published.
    pub(crate) unpublished_blocks: u64,
    /// Something was dropped from the index without a record that says so. Until the checkpoint of this
    /// number is durable, a crash would bring it back.
    pub(crate) forgotten_until: u64,

    pub(crate) backend: Backend,
    /// The volume of the image's parent, if this one reads through it.
    pub(crate) parent: Option<VolumeId>,
    /// Objects of the image that have been written to, or are known to be there.
    pub(crate) own: OwnObjects,
    /// It was looked at what the image had when it was opened.
    pub(crate) own_known: bool,
    pub(crate) count: VolumeCounters,
    /// Its second copy, at another host.
    pub(crate) copy: Option<Box<SecondCopy>>,
    /// It is itself the second copy of another host's volume, which takes nothing of an owner before this generation.
    pub(crate) promised: Option<u64>,
    /// What that owner was told that it may send.
    pub(crate) reserve: Reserve,
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
            recheck: false,
            redo_is_kept: false,
            through: VecDeque::new(),
            backlog: Backlog::default(),
            unpublished_blocks: 0,
            forgotten_until: 0,
            backend: Backend::new(),
            parent: None,
            own,
            own_known: false,
            count: VolumeCounters::default(),
            copy: None,
            promised: None,
            reserve: Reserve::default(),
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
        item.replica = u8::from(self.is_copy());
        item.promised.set(self.promised.unwrap_or(0));
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
        spec.check().ok()?;
        if item.sequence.get().max(item.sequence_drained.get()) > COUNTER_MAX {
            return None;
        }
        let mut volume = Volume::new(spec);
        volume.failed = item.failed == 1;
        volume.promised = (item.replica == 1).then_some(item.promised.get());
        volume.set_sequence(item.sequence.get(), item.chain.get());
        volume.progress.restore_drained(item.sequence_drained.get());
        Some(volume)
    }

    /// Everything up to `sequence` is known and durable.
    pub(crate) fn set_sequence(&mut self, sequence: u64, chain: u32) {
        self.log.restore(sequence, chain);
        self.progress.restore_sent(sequence);
    }

    /// It is the second copy of another host's volume.
    pub(crate) fn is_copy(&self) -> bool {
        self.promised.is_some()
    }

    /// What its next record may have; see [`SecondCopy::record_room`]. `None` if there is to be no record now.
    pub(crate) fn record_room(&self) -> Option<RecordRoom> {
        if self.is_stopped() {
            return None;
        }
        self.copy.as_ref().map_or(Some(RecordRoom::UNBOUNDED), |copy| copy.record_room())
    }

    /// Changes wait until there is a second copy that counts.
    pub(crate) fn is_stopped(&self) -> bool {
        // What is about to change or to go waits for what has come before.
        let idle = !self.closing && matches!(self.task, Task::None | Task::Snapshot { .. });
        // Nothing can have a copy before what is lost is overwritten.
        let whole = self.loss().is_none();
        self.degraded == Degraded::Stopped && self.spec.mode == Mode::WriteBack && idle && whole
    }

    /// The peer gets every record, and may have what is bad here.
    pub(crate) fn is_sending(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.sends())
    }

    /// Where the image has a block from, and how many of the next `n` are like it.
    pub(crate) fn source(&self, block: u64, n: u32) -> (Source, u32) {
        if !self.own_known {
            return (Source::Own, n);
        }
        let (source, bytes) = self.own.source(block * BLOCK_BYTES as u64, u64::from(n) * BLOCK_BYTES as u64);
        (source, bytes.div_ceil(BLOCK_BYTES as u64) as u32)
    }

    /// Bytes of which the cache may hold something, and a checkpoint has to: more than there are while the size changes.
    pub(crate) fn size_held(&self) -> u64 {
        match self.task {
            Task::Resize(Resize { stage: Stage::Requests | Stage::Drains, old_bytes, .. }) => old_bytes,
            Task::Resize(resize @ Resize { stage: Stage::Recorded { result, .. }, .. }) => {
                resize.last_bytes(result)
            }
            _ => self.spec.size_bytes,
        }
    }

    /// The same in blocks.
    pub(crate) fn blocks_held(&self) -> u64 {
        self.size_held().div_ceil(BLOCK_BYTES as u64)
    }

    /// No drain of this object or a later one is to begin.
    pub(crate) fn drain_end(&self) -> u32 {
        match self.task {
            Task::Resize(Resize { stage: Stage::Drains, .. }) => object_of(self.blocks()),
            _ => u32::MAX,
        }
    }

    /// The image is as the snapshot is to find it.
    pub(crate) fn image_is_held(&self) -> bool {
        match self.task {
            Task::Snapshot { step: Step::Taking, .. } => !mutated!(SnapshotUnderWrites),
            Task::Snapshot { step: Step::Image, .. } => !self.progress.is_grouped(),
            _ => false,
        }
    }

    /// There is a peer, and its copy does not count, or not any more.
    pub(crate) fn is_half_paired(&self) -> bool {
        !self.fenced && self.copy.as_ref().is_some_and(|copy| !copy.is_whole())
    }

    /// Nothing is begun any more that takes the backend.
    pub(crate) fn is_leaving(&self) -> bool {
        self.fenced || matches!(self.task, Task::Detach { stopping: true, .. })
    }

    /// As it would be recovered: what it holds, and nothing of what was being done with it.
    pub(crate) fn let_go(&mut self) {
        let mut left = Volume::new(self.spec.clone());
        left.failed = self.failed;
        left.ledger = self.ledger.take_restarted();
        left.set_sequence(self.log.published(), self.log.chain_published());
        left.progress.restore_drained(self.progress.drained());
        left.forgotten_until = self.forgotten_until;
        left.count = std::mem::take(&mut self.count);
        *self = left;
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

    /// The backend has, or needs, more than the image.
    pub(crate) fn has_redo(&self) -> bool {
        self.ledger.is_uncommitted() || self.redo_is_kept
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
