//! Groups: the grouped drain's cuts, and the redo that brings them to the backend whole.
//!
//! A group is a contiguous range of the volume's log. Inside of it the last write of a block wins, across it nothing is
//! coalesced. What a group has changed is written beside the image, as its *redo*, and committed by one atomic change
//! of the redo's header. From then on image and redo together are the volume as it was at the group's end, whatever
//! happens to this cache. Only then do the group's blocks go to the image, in any order, and when they are there the
//! redo is trimmed (`docs/rfcs/0005-groups.md`).
//!
//! Two groups of a volume are not committed at any time: the *open* one, which grows, and the *closed* one, whose redo is
//! being written. A copy that the open group supersedes while the closed one still needs it is *frozen*: the index has
//! forgotten it, its place on the device is not free.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mutation::mutated;
use crate::blocks::ledger::Uncommitted;
use crate::blocks::space::Space;
use crate::control::snapshot::Step;
use crate::control::volume::{Task, Volume};
use crate::drain::frame::Frame;
use crate::engine::Engine;
use std::collections::VecDeque;

/// A group ends with a flush of a client when it is this old.
const GROUP_NS_MIN: Nanos = 1_000_000_000;
/// A group ends when it is this old.
const GROUP_NS_MAX: Nanos = 2_000_000_000;
/// With much dirty data a group ends when it is this old: only what is committed can be drained.
const GROUP_NS_URGENT: Nanos = 250_000_000;
/// A group ends when it has changed so many blocks.
pub(crate) const GROUP_BLOCKS_MAX: u64 = (64 << 20) / BLOCK_BYTES as u64;
/// Groups whose redo may be kept while the image can catch up: the header names each of them.
const KEPT_MAX: usize = 4096;
/// How often the owner records how far it is.
const NOTE_NS: Nanos = 1_000_000_000;

/// A group whose redo is being written, or that the image is being brought to. The ledger has what is in it.
pub(crate) struct Closed {
    pub(crate) group: u64,
    /// Sequence of the last record that it contains.
    pub(crate) sequence: u64,
    cut_at: Nanos,
    /// Frames begun.
    pub(crate) frames: u32,
    pub(crate) in_flight: u32,
    /// Frames that the backend did not take.
    pub(crate) again: Vec<Frame>,
    committing: bool,
    /// It holds everything dirty, and stays when it is committed until the image has it: the image then is this cut.
    pub(crate) whole: bool,
}

/// Why a group ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// It is old enough, or somebody waits for it.
    Now,
    /// There is too much in it, or too little room beside it.
    Early,
}

/// A committed group whose redo is kept.
#[derive(Debug, Clone, Copy)]
struct Kept {
    group: u64,
    sequence: u64,
    blocks: u64,
}

/// The groups of a volume.
pub(crate) struct Groups {
    pub(crate) closed: Option<Closed>,
    /// The header may still name groups of an earlier generation, until something else is committed or trimmed.
    old_redo: bool,
    /// Everything up to this sequence is in the image or its redo.
    pub(crate) sequence: u64,
    kept: VecDeque<Kept>,
    /// The header is being changed so that it names only groups from this one on.
    trimming: Option<u64>,
    /// When the owner last recorded how far it is, and whether it is doing so now.
    noted_at: Nanos,
    noting: bool,
}

impl Closed {
    fn new(group: u64, sequence: u64, now: Nanos) -> Closed {
        Closed {
            group,
            sequence,
            cut_at: now,
            frames: 0,
            in_flight: 0,
            again: Vec::new(),
            committing: false,
            whole: false,
        }
    }
}

impl Groups {
    /// `old_redo`: an earlier generation may have left some.
    fn new(old_redo: bool) -> Groups {
        Groups {
            closed: None,
            old_redo,
            sequence: 0,
            kept: VecDeque::new(),
            trimming: None,
            noted_at: 0,
            noting: false,
        }
    }

    /// Something of the redo is on its way to the backend.
    pub(crate) fn is_in_flight(&self) -> bool {
        let closed = self.closed.as_ref().is_some_and(|closed| closed.in_flight > 0 || closed.committing);
        closed || self.trimming.is_some() || self.noting
    }

    /// The backend has more than the image, or gets it.
    fn is_busy(&self) -> bool {
        self.closed.is_some()
            || !self.kept.is_empty()
            || self.old_redo
            || self.trimming.is_some()
            || self.noting
    }

    /// A group that ends with `sequence` is not committed, even if one was that ended with the same: nothing came into the log since.
    fn uncommit(&mut self, sequence: u64) {
        self.sequence = self.sequence.min(sequence.saturating_sub(1));
    }

    /// Blocks of the redo that is kept.
    fn kept_blocks(&self) -> u64 {
        self.kept.iter().map(|kept| kept.blocks).sum()
    }
}

impl Volume {
    /// The volume's dirty data as one group: after a restart nothing else is known of what is committed, and this contains
    /// it all. `old_redo`: an earlier generation may have left some.
    pub(crate) fn begin_groups(&mut self, space: &Space, now: Nanos, old_redo: bool) {
        self.ledger.begin_groups(space, now);
        self.hold_dirty_objects();
        let mut groups = Groups::new(old_redo);
        groups.sequence = self.progress.drained();
        if self.ledger.is_uncommitted() {
            groups.uncommit(self.log.published());
        }
        self.groups = Some(Box::new(groups));
    }

    /// The same in the middle of its life, as the closed group: what the image lacks at this moment.
    pub(crate) fn close_whole(&mut self, space: &Space, now: Nanos) {
        self.ledger.cut_whole(space, now);
        self.hold_dirty_objects();
        let (group, sequence) = (self.groups_made + 1, self.log.published());
        let groups = self.groups.as_mut().expect("a volume with groups");
        groups.uncommit(sequence);
        groups.closed = Some(Closed { whole: true, ..Closed::new(group, sequence, now) });
        self.count.groups += 1;
    }

    /// The image is to have everything that is acknowledged, and what was left from another mode is there. Groups are of
    /// no use any more; nothing is logged until the last one is in the image, since a redo would take the image back
    /// behind what goes there without one.
    pub(crate) fn groups_end(&self) -> bool {
        let backlog = self.mode == Mode::WriteThrough && self.progress.drained() < self.backlog_sequence;
        self.groups.is_some() && self.mode != Mode::WriteBack && !backlog
    }

    fn end_groups(&mut self) {
        self.groups = None;
        self.ledger.end_groups();
        self.drain_cursor = 0;
        self.recheck = true;
    }

    /// Up to this sequence a loss of the cache costs nothing.
    pub(crate) fn sequence_safe(&self) -> u64 {
        let committed = self.groups.as_ref().map_or(0, |groups| groups.sequence);
        committed.max(self.progress.drained())
    }

    /// Up to this sequence blocks may go to the image.
    pub(crate) fn sequence_drainable(&self) -> u64 {
        self.groups.as_ref().map_or(u64::MAX, |groups| groups.sequence)
    }

    /// Whether blocks from `block` on must stay out of the image for now, and how many of the next `n` are like it. Tells up to
    /// which sequence everything must be committed first.
    pub(crate) fn uncommitted(&self, block: u64, n: u32) -> (Option<u64>, u32) {
        let (group, n) = self.ledger.uncommitted(block, n);
        (group.map(|group| self.sequence_of(group)), n)
    }

    /// Sequence of the last record of a group that is not committed.
    pub(crate) fn sequence_of(&self, group: Uncommitted) -> u64 {
        let closed = self.groups.as_ref().and_then(|groups| groups.closed.as_ref());
        match group {
            Uncommitted::Open => self.log.published(),
            Uncommitted::Closed => closed.expect("a group is closed").sequence,
        }
    }

    /// The backend has, or needs, more than the image.
    pub(crate) fn has_redo(&self) -> bool {
        self.ledger.is_uncommitted() || self.groups.as_ref().is_some_and(|groups| groups.is_busy())
    }
}

impl Engine {
    /// Ends the open group at what is published, if it is time to.
    pub(crate) fn cut_group(&mut self, now: Nanos, id: VolumeId, flush: bool) {
        let Some(due) = self.cut_is_due(now, id, flush) else { return };
        let volume = self.ground.volume_mut(id);
        volume.count.groups_early += u64::from(due == Due::Early);
        let sequence = volume.log.published();
        volume.ledger.cut();
        let groups = volume.groups.as_mut().expect("a group is due");
        groups.closed = Some(Closed::new(volume.groups_made + 1, sequence, now));
        volume.count.groups += 1;
    }

    fn cut_is_due(&self, now: Nanos, id: VolumeId, flush: bool) -> Option<Due> {
        let volume = self.ground.volume(id);
        let groups = volume.groups.as_ref()?;
        let reserved = matches!(volume.task, Task::Snapshot { step: Step::Cut, .. });
        let since = volume.ledger.open_since()?;
        if groups.closed.is_some() || volume.failed || volume.fenced || reserved {
            // A group without a block that is lost would be no state that the volume ever had.
            return None;
        }
        let age = now.saturating_sub(since);
        let blocks = volume.ledger.open_blocks();
        let kept = groups.kept_blocks();
        let long = kept > 0 && kept + blocks > self.kept_blocks_max(id) || groups.kept.len() >= KEPT_MAX;
        if long && self.drain_has_work(id) {
            return None;
        }
        let waited_for = volume.mode != Mode::WriteBack
            || !volume.through.is_empty()
            || volume.drain_all_until > groups.sequence
            || matches!(volume.task, Task::Purge { .. } | Task::Remove { .. })
            || self.ground.base.dead;
        if waited_for || age >= GROUP_NS_MAX || flush && age >= GROUP_NS_MIN {
            return Some(Due::Now);
        }
        let early = blocks >= GROUP_BLOCKS_MAX || age >= GROUP_NS_URGENT && self.drain_is_urgent(id);
        early.then_some(Due::Early)
    }

    /// Blocks of redo that may be kept while the image can catch up.
    fn kept_blocks_max(&self, id: VolumeId) -> u64 {
        (self.ground.dirty_bytes_max(id) / BLOCK_BYTES as u64).max(2 * GROUP_BLOCKS_MAX)
    }

    /// The image is to catch up with its redo before more is written there.
    pub(crate) fn redo_is_long(&self, id: VolumeId) -> bool {
        let groups = self.ground.volume(id).groups.as_ref();
        groups.is_some_and(|groups| groups.kept_blocks() > self.kept_blocks_max(id) / 2)
    }

    /// Something of the volume can go to the image now.
    fn drain_has_work(&self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        let drainable = volume.sequence_drainable();
        !volume.drains.is_empty()
            || !volume.unflushed.is_empty()
            || !volume.flushing.is_empty()
            || volume.dirty_objects.iter().any(|dirty| dirty.drain_from <= drainable)
    }

    /// Cuts groups, commits what is written, trims what the image has.
    pub(crate) fn pump_groups(&mut self, now: Nanos) {
        for i in 0..self.ground.volumes.len() {
            let id = VolumeId(i as u16);
            let Some(volume) = &self.ground.volumes[i] else { continue };
            if volume.groups.is_none()
                || !volume.attached
                || volume.is_leaving()
                || !volume.backend.may_send(now)
            {
                continue;
            }
            if volume.groups_end() && !volume.has_redo() {
                self.ground.volume_mut(id).end_groups();
                self.ground.base.out.stir();
                continue;
            }
            self.skip_nothing(id);
            self.cut_group(now, id, false);
            self.commit_group(now, id);
            self.trim_redo(id);
            self.note_progress(now, id);
        }
    }

    /// Where all that would have to be committed is lost, nothing waits for a commit.
    fn skip_nothing(&mut self, id: VolumeId) {
        let volume = self.ground.volume_mut(id);
        let (sequence, uncommitted) = (volume.log.published(), volume.ledger.is_uncommitted());
        let Some(groups) = volume.groups.as_mut() else { return };
        if !uncommitted && groups.sequence < sequence {
            groups.sequence = sequence;
            volume.commit_objects(sequence);
            self.update_drained(id);
            self.ground.base.out.stir();
        }
    }

    /// Changes the redo's header once all frames of the closed group are written.
    fn commit_group(&mut self, now: Nanos, id: VolumeId) {
        let volume = self.ground.volume_mut(id);
        let failed = volume.failed;
        let (gathered, is_cut) = (volume.ledger.is_gathered(), volume.ledger.cut_index().is_some());
        let Some(groups) = volume.groups.as_mut() else { return };
        let (busy, old_redo) = (groups.trimming.is_some(), groups.old_redo);
        let first = groups.kept.front().map(|kept| kept.group);
        let Some(closed) = &mut groups.closed else { return };
        let written = gathered && closed.in_flight == 0 && closed.again.is_empty();
        if !written || closed.committing || is_cut || busy || failed {
            return;
        }
        closed.committing = true;
        let (group, frames, sequence, cut_at) = (closed.group, closed.frames, closed.sequence, closed.cut_at);
        if frames == 0 && !old_redo || mutated!(RedoWithoutHeader) {
            // All of it is lost.
            return self.group_committed(now, id, Ok(()));
        }
        let first = first.unwrap_or(group);
        let cut_at = if mutated!(CutTimeForgotten) { 0 } else { cut_at };
        self.ground.backend(
            Io::RedoCommit { volume: id },
            id,
            BackendOp::RedoCommit { first, group, frames, sequence, cut_at },
        );
    }

    pub(crate) fn redo_commit_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_backend_result(now, id, result);
        self.group_committed(now, id, result);
    }

    fn group_committed(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        let (volume, space) = self.ground.volume_and_space(id);
        let groups = volume.groups.as_mut().expect("a volume with groups");
        if result.is_err() {
            groups.closed.as_mut().expect("a group is committed").committing = false;
            return;
        }
        let mut closed = groups.closed.take().expect("a group is committed");
        groups.old_redo = false;
        groups.sequence = closed.sequence;
        groups.noted_at = now;
        if closed.frames > 0 {
            let blocks = volume.ledger.closed_blocks();
            groups.kept.push_back(Kept { group: closed.group, sequence: closed.sequence, blocks });
        }
        volume.groups_made = closed.group;
        volume.commit_objects(closed.sequence);
        if closed.whole {
            closed.committing = false;
            volume.groups.as_mut().expect("as above").closed = Some(closed);
            volume.ledger.keep_as_cut();
        } else {
            volume.ledger.thaw(space);
        }
        self.update_drained(id);
        self.ground.volume_mut(id).recheck = true;
        self.ground.base.out.stir();
    }

    /// Takes groups out of the header that are in the image.
    fn trim_redo(&mut self, id: VolumeId) {
        let volume = self.ground.volume_mut(id);
        let (drained, uncommitted) = (volume.progress.drained(), volume.ledger.is_uncommitted());
        let Some(groups) = volume.groups.as_mut() else { return };
        let committing = groups.closed.as_ref().is_some_and(|closed| closed.committing);
        let done = groups
            .kept
            .iter()
            .take_while(|kept| kept.sequence <= drained || mutated!(TrimBeforeApplied))
            .count();
        let old = groups.old_redo && !uncommitted;
        if done == 0 && !old || groups.trimming.is_some() || committing {
            return;
        }
        let first = if done > 0 { groups.kept[done - 1].group + 1 } else { volume.groups_made + 1 };
        groups.trimming = Some(first);
        self.ground.backend(Io::RedoTrim { volume: id }, id, BackendOp::RedoTrim { first });
    }

    pub(crate) fn redo_trim_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_backend_result(now, id, result);
        let volume = self.ground.volume_mut(id);
        volume.recheck = true;
        let groups = volume.groups.as_mut().expect("a volume with groups");
        let first = groups.trimming.take().expect("the redo is trimmed");
        if result.is_ok() {
            groups.kept.retain(|kept| kept.group >= first);
            groups.old_redo = false;
        }
        self.ground.base.out.stir();
    }

    /// Records beside the image how far the volume is, so that the size of a loss is known without its host.
    fn note_progress(&mut self, now: Nanos, id: VolumeId) {
        let bytes_max = self.ground.dirty_bytes_max(id);
        let volume = self.ground.volume_mut(id);
        let (sequence, durable) = (volume.log.published(), volume.log.durable());
        let uncommitted = volume.ledger.is_uncommitted();
        let bytes = volume.ledger.uncommitted_blocks() * BLOCK_BYTES as u64;
        let Some(groups) = volume.groups.as_mut() else { return };
        if groups.noting || now < groups.noted_at + NOTE_NS || !uncommitted {
            return;
        }
        groups.noting = true;
        groups.noted_at = now;
        self.ground.backend(
            Io::RedoNote { volume: id },
            id,
            BackendOp::RedoNote { sequence, durable, bytes, bytes_max },
        );
    }

    /// A note that could not be made is made the next time.
    pub(crate) fn redo_note_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.ground.note_fence(now, id, result);
        let volume = self.ground.volume_mut(id);
        volume.recheck = true;
        volume.groups.as_mut().expect("a volume with groups").noting = false;
        self.ground.base.out.stir();
    }

    /// When a group is due or the progress is to be noted, if nothing else happens.
    pub(crate) fn group_deadline(&self, now: Nanos) -> Option<Nanos> {
        let volumes = self.ground.volumes.iter().flatten().filter(|v| v.attached && !v.is_leaving());
        let times = volumes.filter_map(|volume| {
            let groups = volume.groups.as_ref().filter(|_| volume.ledger.is_uncommitted())?;
            let open_since = volume.ledger.open_since().filter(|_| groups.closed.is_none());
            let ages = [GROUP_NS_URGENT, GROUP_NS_MAX].map(|age| open_since.map(|since| since + age));
            let note = (!groups.noting).then_some(groups.noted_at + NOTE_NS);
            ages.into_iter().flatten().chain(note).filter(|&at| at > now).min()
        });
        times.min()
    }
}
