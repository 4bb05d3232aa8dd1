//! Groups: the grouped drain's cuts, and the redo that brings them to the backend whole.
//!
//! A group is a contiguous range of the volume's log. Inside of it the last write of a block wins,
//! across it nothing is coalesced. What a group has changed is written beside the image, as its
//! *redo*, and committed by one atomic change of the redo's header. From then on image and redo
//! together are the volume as it was at the group's end, whatever happens to this cache. Only then
//! do the group's blocks go to the image, in any order, and when they are there the redo is trimmed
//! (`docs/rfcs/0005-groups.md`).
//!
//! Two groups of a volume are not committed at any time: the *open* one, which grows, and the
//! *closed* one, whose redo is being written. A copy that the open group supersedes while the
//! closed one still needs it is *frozen*: the index has forgotten it, its place on the device is
//! not free.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mutation::mutated;
use crate::blocks::ledger::Uncommitted;
use crate::drain::Drain;
use crate::drain::frame::Frame;
use crate::ground::Ground;
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

/// A group whose redo is being written, or that the image is being brought to. The ledger has what
/// is in it.
pub(super) struct Closed {
    pub(super) group: u64,
    /// Sequence of the last record that it contains.
    sequence: u64,
    cut_at: Nanos,
    /// Frames begun.
    pub(super) frames: u32,
    pub(super) in_flight: u32,
    /// Frames that the backend did not take.
    pub(super) again: Vec<Frame>,
    committing: bool,
    /// It holds everything dirty, and stays when it is committed until the image has it: the image
    /// then is this cut.
    whole: bool,
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

/// The groups of a volume. How far they are committed stands in the volume's
/// [`Progress`](crate::base::progress::Progress).
pub(super) struct Groups {
    pub(super) closed: Option<Closed>,
    /// The header may still name groups of an earlier generation, until something else is committed
    /// or trimmed.
    old_redo: bool,
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
            kept: VecDeque::new(),
            trimming: None,
            noted_at: 0,
            noting: false,
        }
    }

    /// Something of the redo is on its way to the backend.
    pub(super) fn is_in_flight(&self) -> bool {
        let closed =
            self.closed.as_ref().is_some_and(|closed| closed.in_flight > 0 || closed.committing);
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

    /// Blocks of the redo that is kept.
    fn kept_blocks(&self) -> u64 {
        self.kept.iter().map(|kept| kept.blocks).sum()
    }
}

impl Drain {
    /// The volume's dirty data as one group: after a restart nothing else is known of what is
    /// committed, and this contains it all. `old_redo`: an earlier generation may have left some.
    pub(crate) fn begin_groups(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        old_redo: bool,
    ) {
        let (volume, space) = ground.volume_and_space(id);
        volume.ledger_mut().begin_groups(space, now);
        let part = self.volumes.of_mut(id);
        part.queue.hold(volume.log().published());
        let drained = volume.progress().drained();
        volume.progress_mut().advance_committed(drained);
        if volume.ledger().is_uncommitted() {
            let published = volume.log().published();
            volume.progress_mut().uncommit(published);
        }
        part.groups = Some(Box::new(Groups::new(old_redo)));
        self.note_redo(ground, id);
    }

    /// Closes one group with what the image lacks at this moment, for a snapshot.
    pub(crate) fn close_whole(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId) {
        let (volume, space) = ground.volume_and_space(id);
        volume.ledger_mut().cut_whole(space, now);
        let sequence = volume.log().published();
        volume.progress_mut().uncommit(sequence);
        volume.count_mut().groups += 1;
        let part = self.volumes.of_mut(id);
        part.queue.hold(sequence);
        let closed = Closed { whole: true, ..Closed::new(part.groups_made + 1, sequence, now) };
        part.groups.as_mut().expect("a volume with groups").closed = Some(closed);
        self.note_redo(ground, id);
    }

    /// A snapshot is over: its cut, if there is one still, is like any other group.
    pub(crate) fn end_cut(&mut self, ground: &mut Ground, id: VolumeId) {
        let (volume, space) = ground.volume_and_space(id);
        let mut groups = self.volumes.of_mut(id).groups.as_mut();
        if volume.ledger().cut_index().is_some() {
            groups.as_mut().expect("a cut is one of its groups").closed = None;
            volume.ledger_mut().thaw(space);
        }
        if let Some(closed) = groups.and_then(|groups| groups.closed.as_mut()) {
            closed.whole = false;
        }
        self.forget_cut(id);
        self.note_redo(ground, id);
    }

    /// A group is closed.
    pub(crate) fn has_closed(&self, id: VolumeId) -> bool {
        self.volumes.of(id).groups.as_ref().is_some_and(|groups| groups.closed.is_some())
    }

    /// What the cut needs and nobody is bringing to the image is drained next.
    pub(crate) fn hurry_cut(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId) {
        let volume = ground.volume_mut(id);
        let Some(cut) = volume.ledger().cut_index() else { return };
        let objects: Vec<u32> = cut.objects(0).collect();
        let part = self.volumes.of_mut(id);
        let closed = part.groups.as_ref().and_then(|groups| groups.closed.as_ref());
        let sequence = closed.expect("a cut is a closed group").sequence;
        part.queue.hurry(volume.ledger_mut(), &objects, sequence, now);
    }

    /// Tells whether the backend has more than the image, or gets it.
    fn note_redo(&self, ground: &mut Ground, id: VolumeId) {
        let groups = self.volumes.of(id).groups.as_ref();
        ground.volume_mut(id).note_redo(groups.is_some_and(|groups| groups.is_busy()));
    }

    fn end_groups(&mut self, ground: &mut Ground, id: VolumeId) {
        let part = self.volumes.of_mut(id);
        part.groups = None;
        part.queue.look_again();
        let volume = ground.volume_mut(id);
        volume.ledger_mut().end_groups();
        volume.progress_mut().end_groups();
        volume.recheck();
        volume.note_redo(false);
    }

    /// Whether blocks from `block` on must stay out of the image for now, and how many of the next
    /// `n` are like it. Tells up to which sequence everything must be committed first.
    pub(super) fn uncommitted(
        &self,
        ground: &Ground,
        id: VolumeId,
        block: u64,
        n: u32,
    ) -> (Option<u64>, u32) {
        let (group, n) = ground.volume(id).ledger().uncommitted(block, n);
        (group.map(|group| self.sequence_of(ground, id, group)), n)
    }

    /// Sequence of the last record of a group that is not committed.
    pub(super) fn sequence_of(&self, ground: &Ground, id: VolumeId, group: Uncommitted) -> u64 {
        let groups = self.volumes.of(id).groups.as_ref();
        let closed = groups.and_then(|groups| groups.closed.as_ref());
        match group {
            Uncommitted::Open => ground.volume(id).log().published(),
            Uncommitted::Closed => closed.expect("a group is closed").sequence,
        }
    }

    /// Ends the open group at what is published, if it is time to.
    pub(crate) fn cut(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId, flush: bool) {
        let Some(due) = self.cut_is_due(ground, now, id, flush) else { return };
        let volume = ground.volume_mut(id);
        volume.count_mut().groups_early += u64::from(due == Due::Early);
        volume.count_mut().groups += 1;
        volume.ledger_mut().cut();
        let part = self.volumes.of_mut(id);
        let closed = Closed::new(part.groups_made + 1, volume.log().published(), now);
        part.groups.as_mut().expect("a group is due").closed = Some(closed);
        self.note_redo(ground, id);
    }

    fn cut_is_due(&self, ground: &Ground, now: Nanos, id: VolumeId, flush: bool) -> Option<Due> {
        let volume = ground.volume(id);
        let groups = self.volumes.of(id).groups.as_ref()?;
        let since = volume.ledger().open_since()?;
        if groups.closed.is_some()
            || volume.is_failed()
            || volume.is_fenced()
            || volume.is_to_be_cut()
        {
            // A group without a block that is lost would be no state that the volume ever had.
            return None;
        }
        let age = now.saturating_sub(since);
        let blocks = volume.ledger().open_blocks();
        let kept = groups.kept_blocks();
        let long = kept > 0 && kept + blocks > kept_blocks_max(ground, id)
            || groups.kept.len() >= KEPT_MAX;
        if long && self.has_work(ground, id) {
            return None;
        }
        let committed = volume.progress().committed().expect("a volume with groups");
        let waited_for = volume.mode() != Mode::WriteBack
            || volume.is_waited_for()
            || volume.progress().wanted() > committed
            || volume.is_to_be_empty()
            || ground.is_dead();
        if waited_for || age >= GROUP_NS_MAX || flush && age >= GROUP_NS_MIN {
            return Some(Due::Now);
        }
        let early =
            blocks >= GROUP_BLOCKS_MAX || age >= GROUP_NS_URGENT && self.is_urgent(ground, id);
        early.then_some(Due::Early)
    }

    /// The image is to catch up with its redo before more is written there.
    pub(super) fn redo_is_long(&self, ground: &Ground, id: VolumeId) -> bool {
        let groups = self.volumes.of(id).groups.as_ref();
        groups.is_some_and(|groups| groups.kept_blocks() > kept_blocks_max(ground, id) / 2)
    }

    /// Something of the volume can go to the image now.
    fn has_work(&self, ground: &Ground, id: VolumeId) -> bool {
        let drainable = ground.volume(id).progress().drainable();
        let part = self.volumes.of(id);
        !part.objects.is_empty() || part.queue.iter().any(|dirty| dirty.drain_from <= drainable)
    }

    /// Cuts groups, commits what is written, trims what the image has.
    pub(crate) fn group_step(&mut self, ground: &mut Ground, now: Nanos) {
        if self.paused {
            return;
        }
        for id in ground.places() {
            let Some(volume) = ground.get(id) else { continue };
            let may_send =
                volume.is_attached() && !volume.is_leaving() && volume.backend().may_send(now);
            if self.volumes.of(id).groups.is_none() || !may_send {
                continue;
            }
            if volume.groups_end() && !volume.has_redo() {
                self.end_groups(ground, id);
                ground.stir();
                continue;
            }
            self.skip_nothing(ground, id);
            self.cut(ground, now, id, false);
            self.commit(ground, now, id);
            self.trim(ground, id);
            self.note_progress(ground, now, id);
        }
    }

    /// Where all that would have to be committed is lost, nothing waits for a commit.
    fn skip_nothing(&mut self, ground: &mut Ground, id: VolumeId) {
        let volume = ground.volume_mut(id);
        let sequence = volume.log().published();
        if volume.ledger().is_uncommitted()
            || volume.progress().committed().is_none_or(|at| at >= sequence)
        {
            return;
        }
        volume.progress_mut().advance_committed(sequence);
        self.volumes.of_mut(id).queue.commit(sequence);
        self.update(ground, id);
        ground.stir();
    }

    /// Changes the redo's header once all frames of the closed group are written.
    fn commit(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId) {
        let volume = ground.volume(id);
        let Some(groups) = self.volumes.of_mut(id).groups.as_mut() else { return };
        let (busy, old_redo) = (groups.trimming.is_some(), groups.old_redo);
        let first = groups.kept.front().map(|kept| kept.group);
        let Some(closed) = &mut groups.closed else { return };
        let written =
            volume.ledger().is_gathered() && closed.in_flight == 0 && closed.again.is_empty();
        let is_cut = volume.ledger().cut_index().is_some();
        if !written || closed.committing || is_cut || busy || volume.is_failed() {
            return;
        }
        closed.committing = true;
        let (group, frames, sequence, cut_at) =
            (closed.group, closed.frames, closed.sequence, closed.cut_at);
        if frames == 0 && !old_redo || mutated!(RedoWithoutHeader) {
            // All of it is lost.
            return self.committed(ground, now, id, Ok(()));
        }
        let first = first.unwrap_or(group);
        let cut_at = if mutated!(CutTimeForgotten) { 0 } else { cut_at };
        let op = BackendOp::RedoCommit { first, group, frames, sequence, cut_at };
        ground.backend(Io::RedoCommit { volume: id }, id, op);
    }

    /// The backend has answered a change of the redo's header.
    pub(crate) fn commit_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        result: Result<(), IoError>,
    ) {
        ground.note_backend_result(now, id, result);
        self.committed(ground, now, id, result);
    }

    fn committed(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        result: Result<(), IoError>,
    ) {
        let (volume, space) = ground.volume_and_space(id);
        let part = self.volumes.of_mut(id);
        let groups = part.groups.as_mut().expect("a volume with groups");
        if result.is_err() {
            groups.closed.as_mut().expect("a group is committed").committing = false;
            return;
        }
        let mut closed = groups.closed.take().expect("a group is committed");
        groups.old_redo = false;
        groups.noted_at = now;
        if closed.frames > 0 {
            let blocks = volume.ledger().closed_blocks();
            groups.kept.push_back(Kept { group: closed.group, sequence: closed.sequence, blocks });
        }
        volume.progress_mut().advance_committed(closed.sequence);
        part.groups_made = closed.group;
        part.queue.commit(closed.sequence);
        if closed.whole {
            closed.committing = false;
            groups.closed = Some(closed);
            volume.ledger_mut().keep_as_cut();
        } else {
            volume.ledger_mut().thaw(space);
        }
        self.update(ground, id);
        self.note_redo(ground, id);
        ground.volume_mut(id).recheck();
        ground.stir();
    }

    /// Takes groups out of the header that are in the image.
    fn trim(&mut self, ground: &mut Ground, id: VolumeId) {
        let volume = ground.volume(id);
        let part = self.volumes.of_mut(id);
        let Some(groups) = part.groups.as_mut() else { return };
        let committing = groups.closed.as_ref().is_some_and(|closed| closed.committing);
        let drained = volume.progress().drained();
        let is_in_image = |kept: &&Kept| kept.sequence <= drained || mutated!(TrimBeforeApplied);
        let done = groups.kept.iter().take_while(is_in_image).count();
        let old = groups.old_redo && !volume.ledger().is_uncommitted();
        if done == 0 && !old || groups.trimming.is_some() || committing {
            return;
        }
        let first = if done > 0 { groups.kept[done - 1].group + 1 } else { part.groups_made + 1 };
        groups.trimming = Some(first);
        self.note_redo(ground, id);
        ground.backend(Io::RedoTrim { volume: id }, id, BackendOp::RedoTrim { first });
    }

    /// The backend has answered that groups were taken out of the header.
    pub(crate) fn trim_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        result: Result<(), IoError>,
    ) {
        ground.note_backend_result(now, id, result);
        ground.volume_mut(id).recheck();
        let groups = self.volumes.of_mut(id).groups.as_mut().expect("a volume with groups");
        let first = groups.trimming.take().expect("the redo is trimmed");
        if result.is_ok() {
            groups.kept.retain(|kept| kept.group >= first);
            groups.old_redo = false;
        }
        self.note_redo(ground, id);
        ground.stir();
    }

    /// Records beside the image how far the volume is, so that the size of a loss is known without
    /// its host.
    fn note_progress(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId) {
        let volume = ground.volume(id);
        let Some(groups) = self.volumes.of_mut(id).groups.as_mut() else { return };
        if groups.noting || now < groups.noted_at + NOTE_NS || !volume.ledger().is_uncommitted() {
            return;
        }
        groups.noting = true;
        groups.noted_at = now;
        let op = BackendOp::RedoNote {
            sequence: volume.log().published(),
            durable: volume.log().durable(),
            bytes: volume.ledger().uncommitted_blocks() * BLOCK_BYTES as u64,
            bytes_max: ground.dirty_bytes_max(id),
        };
        self.note_redo(ground, id);
        ground.backend(Io::RedoNote { volume: id }, id, op);
    }

    /// A note that could not be made is made the next time.
    pub(crate) fn note_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: VolumeId,
        result: Result<(), IoError>,
    ) {
        ground.note_fence(now, id, result);
        ground.volume_mut(id).recheck();
        self.volumes.of_mut(id).groups.as_mut().expect("a volume with groups").noting = false;
        self.note_redo(ground, id);
        ground.stir();
    }

    /// When a group is due or the progress is to be noted, if nothing else happens.
    pub(crate) fn group_deadline(&self, ground: &Ground, now: Nanos) -> Option<Nanos> {
        let due = |id: VolumeId| {
            let volume = ground.volume(id);
            let groups = self.volumes.of(id).groups.as_ref()?;
            if !volume.is_attached() || volume.is_leaving() || !volume.ledger().is_uncommitted() {
                return None;
            }
            let open_since = volume.ledger().open_since().filter(|_| groups.closed.is_none());
            let ages =
                [GROUP_NS_URGENT, GROUP_NS_MAX].map(|age| open_since.map(|since| since + age));
            let note = (!groups.noting).then_some(groups.noted_at + NOTE_NS);
            ages.into_iter().flatten().chain(note).filter(|&at| at > now).min()
        };
        ground.ids().filter(|_| !self.paused).filter_map(due).min()
    }
}

/// Blocks of redo that may be kept while the image can catch up.
fn kept_blocks_max(ground: &Ground, id: VolumeId) -> u64 {
    (ground.dirty_bytes_max(id) / BLOCK_BYTES as u64).max(2 * GROUP_BLOCKS_MAX)
}
