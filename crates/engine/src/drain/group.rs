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
use crate::engine::{Engine, Io};
use crate::drain::frame::Frame;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags, Position, VolumeIndex};
use crate::base::mutation::mutated;
use crate::control::snapshot::Step;
use crate::blocks::space::Space;
use crate::control::volume::{Task, Volume};
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
/// A delta keeps as many runs, and twice as many as it has blocks, before it looks which are of use.
const RUNS_MIN: usize = 4096;
/// How often the owner records how far it is.
const NOTE_NS: Nanos = 1_000_000_000;

/// What a range of the log has changed: for each block its last content.
pub(crate) struct Delta {
    pub(crate) index: VolumeIndex,
    /// Where `index` has its data blocks, in the order in which they came into the log, and where it had them.
    runs: Vec<Run>,
    /// When the first change came.
    since: Nanos,
}

/// Blocks that follow each other in the volume and on the device.
#[derive(Debug, Clone, Copy)]
struct Run {
    block: u64,
    position: Position,
    n: u32,
}

/// What of a closed group is in frames.
#[derive(Debug)]
struct Cursor {
    /// Next run of the data, and block of it.
    run: usize,
    block: u32,
    /// Next object, and block of it, whose zeroes are to be put into a frame; `None` when all are.
    zeroes: Option<(u32, u32)>,
}

/// A group whose redo is being written.
pub(crate) struct Closed {
    pub(crate) delta: Delta,
    pub(crate) group: u64,
    /// Sequence of the last record that it contains.
    pub(crate) sequence: u64,
    cut_at: Nanos,
    cursor: Cursor,
    /// Frames begun.
    pub(crate) frames: u32,
    pub(crate) in_flight: u32,
    /// Frames that the backend did not take.
    pub(crate) again: Vec<Frame>,
    committing: bool,
    /// It holds everything dirty, and stays when it is committed until the image has it: the image then is this cut.
    pub(crate) whole: bool,
    pub(crate) committed: bool,
    /// Blocks with frozen copies.
    frozen: Vec<u64>,
}

/// Why a group ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// It is old enough, or somebody waits for it.
    Now,
    /// There is too much in it, or too little room beside it.
    Early,
}

/// A group that is not committed.
#[derive(Debug, Clone, Copy)]
enum Uncommitted {
    Open,
    /// With its last sequence.
    Closed(u64),
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
    pub(crate) open: Delta,
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

impl Delta {
    fn new() -> Delta {
        Delta { index: VolumeIndex::new(), runs: Vec::new(), since: 0 }
    }

    /// Data blocks have become current at `position` and those that follow.
    fn insert(&mut self, block: u64, n: u32, position: Position) {
        self.index.insert(block, n, position, &mut |_, _, _| ());
        self.push(Run { block, position, n });
    }

    fn push(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last)
                if (last.block + u64::from(last.n), last.position + last.n) == (run.block, run.position) =>
            {
                last.n += run.n;
            }
            _ => self.runs.push(run),
        }
        if self.runs.len() > RUNS_MIN && self.runs.len() as u64 > 2 * self.index.blocks().at {
            let index = &self.index;
            let current = |run: &Run| {
                (0..run.n).any(|i| index.lookup(run.block + u64::from(i)) == Lookup::At(run.position + i))
            };
            self.runs.retain(current);
        }
    }

    /// Nothing has changed.
    pub(crate) fn is_empty(&self) -> bool {
        let blocks = self.index.blocks();
        blocks.at + blocks.zero == 0
    }

    /// Takes in that blocks have changed.
    fn note(&mut self, now: Nanos) {
        if self.is_empty() {
            self.since = now;
        }
    }
}

impl Closed {
    fn new(delta: Delta, group: u64, sequence: u64, now: Nanos) -> Closed {
        Closed {
            delta,
            group,
            sequence,
            cut_at: now,
            cursor: Cursor { run: 0, block: 0, zeroes: Some((0, 0)) },
            frames: 0,
            in_flight: 0,
            again: Vec::new(),
            committing: false,
            whole: false,
            committed: false,
            frozen: Vec::new(),
        }
    }

    /// Everything is in frames.
    pub(crate) fn is_gathered(&self) -> bool {
        self.cursor.run == self.delta.runs.len() && self.cursor.zeroes.is_none()
    }

    /// Takes at most `max` data blocks that are in no frame, in the order of the log: most of them are read from the device in
    /// one go.
    pub(crate) fn gather_blocks(&mut self, max: usize, take: &mut impl FnMut(u64, Position)) {
        let cursor = &mut self.cursor;
        let mut left = max as u32;
        while let Some(run) = self.delta.runs.get(cursor.run).filter(|_| left > 0) {
            if cursor.block == run.n {
                (cursor.run, cursor.block) = (cursor.run + 1, 0);
                continue;
            }
            let (block, position) = (run.block + u64::from(cursor.block), run.position + cursor.block);
            let (found, n) = self.delta.index.lookup_run(block, run.n - cursor.block);
            let n = if found == Lookup::At(position) { n.min(left) } else { n };
            if found == Lookup::At(position) {
                (0..n).for_each(|i| take(block + u64::from(i), position + i));
                left -= n;
            }
            cursor.block += n;
        }
    }

    /// Takes at most `max` stretches of zeroes below block `end` that are in no frame, once all data is.
    pub(crate) fn gather_zeroes(&mut self, max: usize, end: u64, take: &mut impl FnMut(u32, u64, u32)) {
        const OBJECT: u32 = OBJECT_BLOCKS as u32;
        if self.cursor.run < self.delta.runs.len() {
            return;
        }
        let mut left = max;
        while let Some((object, done)) = self.cursor.zeroes.filter(|_| left > 0) {
            let found = if done > 0 { Some(object) } else { self.delta.index.objects(object).next() };
            self.cursor.zeroes = found.map(|object| (object + 1, 0));
            let Some(object) = found else { return };
            let first = u64::from(object) * u64::from(OBJECT);
            let (at, end) = (first + u64::from(done), end.min(first + u64::from(OBJECT)));
            if at >= end {
                continue;
            }
            let (found, n) = self.delta.index.lookup_run(at, (end - at) as u32);
            if found == Lookup::Zero {
                take(object, at, n);
                left -= 1;
            }
            if done + n < OBJECT {
                self.cursor.zeroes = Some((object, done + n));
            }
        }
    }
}

impl Groups {
    /// `old_redo`: an earlier generation may have left some.
    fn new(open: Delta, old_redo: bool) -> Groups {
        Groups {
            open,
            closed: None,
            old_redo,
            sequence: 0,
            kept: VecDeque::new(),
            trimming: None,
            noted_at: 0,
            noting: false,
        }
    }

    /// Data blocks have become current at `position` and those that follow.
    pub(crate) fn insert(&mut self, now: Nanos, block: u64, n: u32, position: Position) {
        self.open.note(now);
        self.open.insert(block, n, position);
    }

    /// Blocks read as zero.
    pub(crate) fn set_zero(&mut self, now: Nanos, block: u64, n: u64) {
        self.open.note(now);
        self.open.index.set_zero(block, n, &mut |_, _, _| ());
    }

    /// What has to be committed before the blocks from `block` on may go to the image, and how many of the next `n` are like it.
    fn uncommitted(&self, block: u64, n: u32) -> (Option<Uncommitted>, u32) {
        let open = std::iter::once((&self.open.index, Uncommitted::Open));
        let closed = self.pending().map(|c| (&c.delta.index, Uncommitted::Closed(c.sequence)));
        let mut n = n;
        for (index, group) in open.chain(closed) {
            let (found, len) = index.lookup_run(block, n);
            if found != Lookup::Absent {
                return (Some(group), len);
            }
            n = n.min(len);
        }
        (None, n)
    }

    /// Something of the redo is on its way to the backend.
    pub(crate) fn is_in_flight(&self) -> bool {
        let closed = self.closed.as_ref().is_some_and(|closed| closed.in_flight > 0 || closed.committing);
        closed || self.trimming.is_some() || self.noting
    }

    /// The closed group, as long as it is not committed.
    fn pending(&self) -> Option<&Closed> {
        self.closed.as_ref().filter(|closed| !closed.committed)
    }

    /// The committed group to which the image is being brought.
    pub(crate) fn cut(&self) -> Option<&Closed> {
        self.closed.as_ref().filter(|closed| closed.committed)
    }

    /// What the closed group has changed.
    pub(crate) fn closed_index(&self) -> Option<&VolumeIndex> {
        self.closed.as_ref().map(|closed| &closed.delta.index)
    }

    /// Whether the closed group needs the copy at `position`.
    pub(crate) fn closed_has(&self, block: u64, position: Position) -> bool {
        self.closed.as_ref().is_some_and(|c| c.delta.index.lookup(block) == Lookup::At(position))
    }

    /// A copy has been moved.
    pub(crate) fn moved(&mut self, block: u64, old: Position, new: Position) {
        let run = Run { block, position: new, n: 1 };
        if self.open.index.replace_if(block, old, new) {
            self.open.push(run);
        }
        if let Some(closed) = &mut self.closed
            && closed.delta.index.replace_if(block, old, new)
            && closed.cursor.run < closed.delta.runs.len()
        {
            // It may be in a frame already: then it comes twice.
            closed.delta.runs.push(run);
        }
    }

    /// The volume has become smaller; `dropped` is told where the closed group's copies were.
    pub(crate) fn truncate(&mut self, blocks: u64, dropped: &mut impl FnMut(Position)) {
        self.open.index.truncate(blocks, &mut |_, _, _| ());
        if let Some(closed) = &mut self.closed {
            closed.delta.index.truncate(blocks, &mut |_, n, was| {
                if let Lookup::At(position) = was {
                    (position..position + n).for_each(&mut *dropped);
                }
            });
        }
    }

    /// A copy is lost: no group can bring it to the backend.
    pub(crate) fn forget(&mut self, block: u64, position: Position) {
        self.open.index.remove_if(block, position);
        if let Some(closed) = &mut self.closed {
            closed.delta.index.remove_if(block, position);
        }
    }

    /// The frozen copy of a block.
    pub(crate) fn note_frozen(&mut self, block: u64) {
        self.closed.as_mut().expect("a closed group needs it").frozen.push(block);
    }

    /// Something is not committed.
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.pending().is_some() || !self.open.is_empty()
    }

    /// The backend has, or needs, more than the image.
    pub(crate) fn is_busy(&self) -> bool {
        self.closed.is_some()
            || self.is_uncommitted()
            || !self.kept.is_empty()
            || self.old_redo
            || self.trimming.is_some()
            || self.noting
    }

    /// A group that ends with `sequence` is not committed, even if one was that ended with the same: nothing came into the log since.
    fn uncommit(&mut self, sequence: u64) {
        self.sequence = self.sequence.min(sequence.saturating_sub(1));
    }

    /// Blocks that the loss of the cache would cost, at most.
    pub(crate) fn uncommitted_blocks(&self) -> u64 {
        let of = |delta: &Delta| delta.index.blocks().at + delta.index.blocks().zero;
        of(&self.open) + self.pending().map_or(0, |closed| of(&closed.delta))
    }

    /// When the oldest change came that the loss of the cache would cost.
    pub(crate) fn uncommitted_since(&self) -> Option<Nanos> {
        let closed = self.pending().map(|closed| closed.delta.since);
        closed.or((!self.open.is_empty()).then_some(self.open.since))
    }

    /// Blocks of the redo that is kept.
    fn kept_blocks(&self) -> u64 {
        self.kept.iter().map(|kept| kept.blocks).sum()
    }
}

impl Volume {
    /// The volume's dirty data as one group: after a restart nothing else is known of what is committed, and this contains
    /// it all.
    pub(crate) fn begin_groups(&mut self, space: &Space, now: Nanos, old_redo: bool) {
        let open = self.dirty_delta(space, now);
        let whole = !open.is_empty();
        let mut groups = Groups::new(open, old_redo);
        groups.sequence = self.sequence_drained;
        if whole {
            groups.uncommit(self.sequence);
        }
        self.groups = Some(Box::new(groups));
    }

    /// The same in the middle of its life, as the closed group: what the image lacks at this moment.
    pub(crate) fn close_whole(&mut self, space: &Space, now: Nanos) {
        let delta = self.dirty_delta(space, now);
        let (group, sequence) = (self.groups_made + 1, self.sequence);
        let groups = self.groups.as_mut().expect("a volume with groups");
        assert!(groups.closed.is_none(), "one group is closed at a time");
        let open = std::mem::replace(&mut groups.open, Delta::new());
        groups.uncommit(sequence);
        let since = if open.is_empty() { now } else { open.since };
        let delta = Delta { since, ..delta };
        groups.closed = Some(Closed { whole: true, ..Closed::new(delta, group, sequence, now) });
        self.count.groups += 1;
    }

    /// What is dirty. Nothing of it is drained before it is committed.
    fn dirty_delta(&mut self, space: &Space, now: Nanos) -> Delta {
        let mut open = Delta::new();
        // What is being drained may never arrive, or arrive out of order: it belongs to the group, too.
        let marks = ObjectFlags::QUEUED | ObjectFlags::DRAINING;
        for object in self.index.objects(0).filter(|&object| self.index.flags(object).intersects(marks)) {
            let zeroes = self.index.flags(object).contains(ObjectFlags::ZERO_DIRTY);
            for (block, n, found) in self.index.runs(object) {
                match found {
                    Lookup::At(position) => {
                        for i in (0..n).filter(|i| space.marks.is_dirty(position + i)) {
                            open.note(now);
                            open.insert(block + u64::from(i), 1, position + i);
                        }
                    }
                    Lookup::Zero if zeroes => {
                        open.note(now);
                        open.index.set_zero(block, u64::from(n), &mut |_, _, _| ());
                    }
                    _ => {}
                }
            }
        }
        open.runs.sort_unstable_by_key(|run| run.position);
        let sequence = self.sequence;
        for dirty in &mut self.dirty_objects {
            (dirty.drain_from, dirty.wait_for) = (sequence, sequence);
        }
        open
    }

    /// The image is to have everything that is acknowledged, and what was left from another mode is there. Groups are of
    /// no use any more; nothing is logged until the last one is in the image, since a redo would take the image back
    /// behind what goes there without one.
    pub(crate) fn groups_end(&self) -> bool {
        let backlog = self.mode == Mode::WriteThrough && self.sequence_drained < self.backlog_sequence;
        self.groups.is_some() && self.mode != Mode::WriteBack && !backlog
    }

    /// Nothing needs a group's frozen copies any more.
    pub(crate) fn thaw(&mut self, space: &mut Space, closed: &Closed) {
        for &block in &closed.frozen {
            let Lookup::At(position) = closed.delta.index.lookup(block) else { continue };
            if !space.marks.is_live(position) && space.clean(position) {
                self.frozen_blocks -= 1;
            }
        }
    }

    fn end_groups(&mut self) {
        self.groups = None;
        self.drain_cursor = 0;
        self.recheck = true;
    }

    /// Up to this sequence a loss of the cache costs nothing.
    pub(crate) fn sequence_safe(&self) -> u64 {
        let committed = self.groups.as_ref().map_or(0, |groups| groups.sequence);
        committed.max(self.sequence_drained)
    }

    /// Up to this sequence blocks may go to the image.
    pub(crate) fn sequence_drainable(&self) -> u64 {
        self.groups.as_ref().map_or(u64::MAX, |groups| groups.sequence)
    }

    /// Whether blocks from `block` on must stay out of the image for now, and how many of the next `n` are like it. Tells up to
    /// which sequence everything must be committed first.
    pub(crate) fn uncommitted(&self, block: u64, n: u32) -> (Option<u64>, u32) {
        let Some(groups) = &self.groups else { return (None, n) };
        let (group, n) = groups.uncommitted(block, n);
        let until = group.map(|group| match group {
            Uncommitted::Open => self.sequence,
            Uncommitted::Closed(sequence) => sequence,
        });
        (until, n)
    }

    /// The backend has, or needs, more than the image.
    pub(crate) fn has_redo(&self) -> bool {
        self.groups.as_ref().is_some_and(|groups| groups.is_busy())
    }
}

impl Engine {
    /// Ends the open group at what is published, if it is time to.
    pub(crate) fn cut_group(&mut self, now: Nanos, id: VolumeId, flush: bool) {
        let Some(due) = self.cut_is_due(now, id, flush) else { return };
        let volume = self.volume_mut(id);
        volume.count.groups_early += u64::from(due == Due::Early);
        let sequence = volume.sequence;
        let groups = volume.groups.as_mut().expect("a group is due");
        let delta = std::mem::replace(&mut groups.open, Delta::new());
        groups.closed = Some(Closed::new(delta, volume.groups_made + 1, sequence, now));
        volume.count.groups += 1;
    }

    fn cut_is_due(&self, now: Nanos, id: VolumeId, flush: bool) -> Option<Due> {
        let volume = self.volume(id);
        let groups = volume.groups.as_ref()?;
        let reserved = matches!(volume.task, Task::Snapshot { step: Step::Cut, .. });
        if groups.closed.is_some() || groups.open.is_empty() || volume.failed || volume.fenced || reserved {
            // A group without a block that is lost would be no state that the volume ever had.
            return None;
        }
        let age = now.saturating_sub(groups.open.since);
        let blocks = groups.open.index.blocks().at;
        let kept = groups.kept_blocks();
        let long = kept > 0 && kept + blocks > self.kept_blocks_max(id) || groups.kept.len() >= KEPT_MAX;
        if long && self.drain_has_work(id) {
            return None;
        }
        let waited_for = volume.mode != Mode::WriteBack
            || !volume.through.is_empty()
            || volume.drain_all_until > groups.sequence
            || matches!(volume.task, Task::Purge { .. } | Task::Remove { .. })
            || self.dead;
        if waited_for || age >= GROUP_NS_MAX || flush && age >= GROUP_NS_MIN {
            return Some(Due::Now);
        }
        let early = blocks >= GROUP_BLOCKS_MAX || age >= GROUP_NS_URGENT && self.drain_is_urgent(id);
        early.then_some(Due::Early)
    }

    /// Blocks of redo that may be kept while the image can catch up.
    fn kept_blocks_max(&self, id: VolumeId) -> u64 {
        (self.dirty_bytes_max(id) / BLOCK_BYTES as u64).max(2 * GROUP_BLOCKS_MAX)
    }

    /// The image is to catch up with its redo before more is written there.
    pub(crate) fn redo_is_long(&self, id: VolumeId) -> bool {
        let groups = self.volume(id).groups.as_ref();
        groups.is_some_and(|groups| groups.kept_blocks() > self.kept_blocks_max(id) / 2)
    }

    /// Something of the volume can go to the image now.
    fn drain_has_work(&self, id: VolumeId) -> bool {
        let volume = self.volume(id);
        let drainable = volume.sequence_drainable();
        !volume.drains.is_empty()
            || !volume.unflushed.is_empty()
            || !volume.flushing.is_empty()
            || volume.dirty_objects.iter().any(|dirty| dirty.drain_from <= drainable)
    }

    /// Cuts groups, commits what is written, trims what the image has.
    pub(crate) fn pump_groups(&mut self, now: Nanos) {
        for i in 0..self.volumes.len() {
            let id = VolumeId(i as u16);
            let Some(volume) = &self.volumes[i] else { continue };
            if volume.groups.is_none() || !volume.attached || volume.is_leaving() || volume.retry_at > now {
                continue;
            }
            if volume.groups_end() && !volume.has_redo() {
                self.volume_mut(id).end_groups();
                self.out.stir();
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
        let volume = self.volume_mut(id);
        let sequence = volume.sequence;
        let Some(groups) = volume.groups.as_mut() else { return };
        if !groups.is_uncommitted() && groups.sequence < sequence {
            groups.sequence = sequence;
            volume.commit_objects(sequence);
            self.update_drained(id);
            self.out.stir();
        }
    }

    /// Changes the redo's header once all frames of the closed group are written.
    fn commit_group(&mut self, now: Nanos, id: VolumeId) {
        let volume = self.volume_mut(id);
        let failed = volume.failed;
        let Some(groups) = volume.groups.as_mut() else { return };
        let (busy, old_redo) = (groups.trimming.is_some(), groups.old_redo);
        let first = groups.kept.front().map(|kept| kept.group);
        let Some(closed) = &mut groups.closed else { return };
        let written = closed.is_gathered() && closed.in_flight == 0 && closed.again.is_empty();
        if !written || closed.committing || closed.committed || busy || failed {
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
        self.backend(Io::RedoCommit { volume: id }, id, BackendOp::RedoCommit { first, group, frames, sequence, cut_at });
    }

    pub(crate) fn redo_commit_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.note_backend_result(now, id, result);
        self.group_committed(now, id, result);
    }

    fn group_committed(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        let (volume, space) = self.volume_and_space(id);
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
            let blocks = closed.delta.index.blocks().at;
            groups.kept.push_back(Kept { group: closed.group, sequence: closed.sequence, blocks });
        }
        volume.groups_made = closed.group;
        volume.commit_objects(closed.sequence);
        if closed.whole {
            (closed.committing, closed.committed) = (false, true);
            volume.groups.as_mut().expect("as above").closed = Some(closed);
        } else {
            volume.thaw(space, &closed);
        }
        self.update_drained(id);
        self.volume_mut(id).recheck = true;
        self.out.stir();
    }

    /// Takes groups out of the header that are in the image.
    fn trim_redo(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        let drained = volume.sequence_drained;
        let Some(groups) = volume.groups.as_mut() else { return };
        let committing = groups.closed.as_ref().is_some_and(|closed| closed.committing);
        let done = groups
            .kept
            .iter()
            .take_while(|kept| kept.sequence <= drained || mutated!(TrimBeforeApplied))
            .count();
        let old = groups.old_redo && !groups.is_uncommitted();
        if done == 0 && !old || groups.trimming.is_some() || committing {
            return;
        }
        let first = if done > 0 { groups.kept[done - 1].group + 1 } else { volume.groups_made + 1 };
        groups.trimming = Some(first);
        self.backend(Io::RedoTrim { volume: id }, id, BackendOp::RedoTrim { first });
    }

    pub(crate) fn redo_trim_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.note_backend_result(now, id, result);
        let volume = self.volume_mut(id);
        volume.recheck = true;
        let groups = volume.groups.as_mut().expect("a volume with groups");
        let first = groups.trimming.take().expect("the redo is trimmed");
        if result.is_ok() {
            groups.kept.retain(|kept| kept.group >= first);
            groups.old_redo = false;
        }
        self.out.stir();
    }

    /// Records beside the image how far the volume is, so that the size of a loss is known without its host.
    fn note_progress(&mut self, now: Nanos, id: VolumeId) {
        let bytes_max = self.dirty_bytes_max(id);
        let volume = self.volume_mut(id);
        let (sequence, durable) = (volume.sequence, volume.sequence_durable);
        let Some(groups) = volume.groups.as_mut() else { return };
        if groups.noting || now < groups.noted_at + NOTE_NS || !groups.is_uncommitted() {
            return;
        }
        groups.noting = true;
        groups.noted_at = now;
        let bytes = groups.uncommitted_blocks() * BLOCK_BYTES as u64;
        self.backend(Io::RedoNote { volume: id }, id, BackendOp::RedoNote { sequence, durable, bytes, bytes_max });
    }

    /// A note that could not be made is made the next time.
    pub(crate) fn redo_note_done(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        self.note_fence(now, id, result);
        let volume = self.volume_mut(id);
        volume.recheck = true;
        volume.groups.as_mut().expect("a volume with groups").noting = false;
        self.out.stir();
    }

    /// When a group is due or the progress is to be noted, if nothing else happens.
    pub(crate) fn group_deadline(&self, now: Nanos) -> Option<Nanos> {
        let volumes = self.volumes.iter().flatten().filter(|v| v.attached && !v.is_leaving());
        let times = volumes.filter_map(|volume| {
            let groups = volume.groups.as_ref().filter(|groups| groups.is_uncommitted())?;
            let open = groups.closed.is_none() && !groups.open.is_empty();
            let ages = [GROUP_NS_URGENT, GROUP_NS_MAX].map(|age| groups.open.since + age);
            let note = (!groups.noting).then_some(groups.noted_at + NOTE_NS);
            ages.into_iter().filter(|_| open).chain(note).filter(|&at| at > now).min()
        });
        times.min()
    }
}

/// Copies that were current are not any more. Frozen ones keep their place; returns how many dirty ones are gone.
pub(crate) fn supersede(
    groups: Option<&mut Box<Groups>>,
    space: &mut Space,
    frozen: &mut u64,
    block: u64,
    n: u32,
    was: Lookup,
) -> u64 {
    let Lookup::At(position) = was else { return 0 };
    let Some(groups) = groups.filter(|groups| groups.closed.is_some()) else {
        return (position..position + n).filter(|&p| space.kill(p)).count() as u64;
    };
    let mut gone = 0;
    for i in 0..n {
        let (block, position) = (block + u64::from(i), position + i);
        if space.marks.is_dirty(position) && groups.closed_has(block, position) {
            space.freeze(position);
            groups.note_frozen(block);
            *frozen += 1;
            gone += 1;
        } else {
            gone += u64::from(space.kill(position));
        }
    }
    gone
}

#[cfg(test)]
mod tests;
