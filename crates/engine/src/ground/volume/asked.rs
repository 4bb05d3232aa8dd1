//! What follows from what is true of a volume, as rooms ask for it.

use crate::api::{BLOCK_BYTES, ControlError, Degraded, Mode};
use crate::base::mutation::mutated;
use crate::blocks::ledger::object_of;
use crate::blocks::own::Source;
use crate::ground::task::{Stage, Step, Task};
use crate::ground::volume::Volume;
use crate::log::copy::RecordRoom;

impl Volume {
    /// It is the second copy of another host's volume.
    pub(crate) fn is_copy(&self) -> bool {
        self.follower.promised.is_some()
    }

    /// What its next record may have; see [`SecondCopy::record_room`]. `None` if there is to be no
    /// record now.
    pub(crate) fn record_room(&self) -> Option<RecordRoom> {
        if self.is_stopped() {
            return None;
        }
        self.copy.as_ref().map_or(Some(RecordRoom::UNBOUNDED), |copy| copy.record_room())
    }

    /// Changes wait until there is a second copy that counts.
    pub(crate) fn is_stopped(&self) -> bool {
        // What is about to change or to go waits for what has come before.
        let idle =
            !self.facts.closing && matches!(self.facts.task, Task::None | Task::Snapshot { .. });
        // Nothing can have a copy before what is lost is overwritten.
        let whole = self.loss().is_none();
        self.facts.degraded == Degraded::Stopped
            && self.spec.mode == Mode::WriteBack
            && idle
            && whole
    }

    /// The peer gets every record, and may have what is bad here.
    pub(crate) fn is_sending(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.sends())
    }

    /// Where the image has a block from, and how many of the next `n` are like it.
    pub(crate) fn source(&self, block: u64, n: u32) -> (Source, u32) {
        self.image.source(block, n)
    }

    /// Bytes of which the cache may hold something, and a checkpoint has to: more than there are
    /// while the size changes.
    pub(crate) fn size_held(&self) -> u64 {
        match self.facts.task {
            Task::Resize(resize) => resize.held_bytes().unwrap_or(self.spec.size_bytes),
            _ => self.spec.size_bytes,
        }
    }

    /// [`Volume::size_held`] in blocks.
    pub(crate) fn blocks_held(&self) -> u64 {
        self.size_held().div_ceil(BLOCK_BYTES as u64)
    }

    /// No drain of this object or a later one is to begin.
    pub(crate) fn drain_end(&self) -> u32 {
        match self.facts.task {
            Task::Resize(resize) if resize.stage() == Stage::Drains => object_of(self.blocks()),
            _ => u32::MAX,
        }
    }

    /// The image is as the snapshot is to find it.
    pub(crate) fn image_is_held(&self) -> bool {
        match self.facts.task {
            Task::Snapshot { step: Step::Taking, .. } => !mutated!(SnapshotUnderWrites),
            Task::Snapshot { step: Step::Image, .. } => !self.progress.is_grouped(),
            _ => false,
        }
    }

    /// There is a peer, and its copy does not count, or not any more.
    pub(crate) fn is_half_paired(&self) -> bool {
        !self.facts.fenced && self.copy.as_ref().is_some_and(|copy| !copy.is_whole())
    }

    /// Nothing is begun any more that takes the backend.
    pub(crate) fn is_leaving(&self) -> bool {
        self.facts.fenced || matches!(self.facts.task, Task::Detach { stopping: true, .. })
    }

    /// No request is served any more: another owner has the image, or data is lost that cannot be
    /// named.
    pub(crate) fn is_refusing(&self) -> bool {
        self.facts.fenced || self.facts.failed
    }

    /// What the image will never get from the cache.
    pub(crate) fn loss(&self) -> Option<ControlError> {
        match self.ledger.blocks().lost {
            0 => self.facts.failed.then_some(ControlError::Failed),
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
        self.facts.task != Task::None
    }

    /// Its next group is to be the cut of a snapshot.
    pub(crate) fn is_to_be_cut(&self) -> bool {
        matches!(self.facts.task, Task::Snapshot { step: Step::Cut, .. })
    }

    /// Nothing of it is to be left in the cache.
    pub(crate) fn is_to_be_empty(&self) -> bool {
        matches!(self.facts.task, Task::Purge { .. } | Task::Remove { .. })
    }

    /// Acknowledgements wait for the drain.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.through.is_empty()
    }

    /// Groups of write-back are left, and the mode is another one by now, whose image has
    /// everything that is acknowledged. The backlog of write-back is in the image. Nothing is
    /// logged until the last group is in the image, too: an older redo that is applied later would
    /// undo what went to the image without one.
    pub(crate) fn groups_end(&self) -> bool {
        let backlog = self.facts.mode == Mode::WriteThrough
            && self.progress.drained() < self.backlog.sequence();
        self.progress.is_grouped() && self.facts.mode != Mode::WriteBack && !backlog
    }

    /// Changes go past the cache.
    pub(crate) fn goes_direct(&self) -> bool {
        matches!(self.facts.mode, Mode::WriteAround | Mode::Off)
    }
}
