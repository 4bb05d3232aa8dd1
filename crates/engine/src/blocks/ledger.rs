//! The ledger of a volume: where each of its blocks is, what of that is not in the image, and what
//! its groups have changed. Index, marks, counts and deltas change together, and nowhere else.

use crate::api::Nanos;
use crate::base::mutation::mutated;
use crate::blocks::delta::{Closed, Delta, Deltas};
use crate::blocks::index::{
    IndexBlocks, Lookup, OBJECT_BLOCKS, ObjectFlags, Position, VolumeIndex,
};
use crate::blocks::space::Space;
use crate::blocks::superseded::{inherit_refs, kill, supersede};
use std::ops::Range;

/// Object of a block.
pub(crate) fn object_of(block: u64) -> u32 {
    (block / OBJECT_BLOCKS as u64) as u32
}

/// Objects of a range of blocks, which is not empty.
pub(crate) fn objects_of(range: Range<u64>) -> impl Iterator<Item = u32> {
    object_of(range.start)..=object_of(range.end - 1)
}

/// A place in the log stream: life of a segment, and block in it.
pub(crate) type Place = (u64, u32);

/// A group that is not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uncommitted {
    /// The one that grows.
    Open,
    /// The one whose redo is being written.
    Closed,
}

/// What a move has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Nobody needs the copy any more.
    Gone,
    /// A group needs it, and has it at its new place.
    Frozen,
    /// It is the current one.
    Current {
        /// It is not in the image.
        dirty: bool,
    },
}

/// What has become of a copy that the image has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cleaned {
    /// It is not the current one any more.
    Superseded,
    /// A group that is not committed needs it still.
    Needed(Uncommitted),
    /// It is clean; it was dirty before, or not.
    Clean {
        /// It was dirty before.
        was_dirty: bool,
    },
}

/// The ledger of one volume.
pub(crate) struct Ledger {
    index: VolumeIndex,
    /// Current blocks that are not in the image.
    dirty: u64,
    /// Superseded ones that a group needs.
    frozen: u64,
    /// Blocks that recovery has found inside of the checkpoint's zero extents.
    covered: u64,
    /// Objects that the drain has marked.
    marked: u64,
    /// `None` where the drain is unordered.
    deltas: Option<Box<Deltas>>,
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        Ledger {
            index: VolumeIndex::new(),
            dirty: 0,
            frozen: 0,
            covered: 0,
            marked: 0,
            deltas: None,
        }
    }

    /// Where the blocks are.
    pub(crate) fn index(&self) -> &VolumeIndex {
        &self.index
    }

    /// How many blocks of each kind there are.
    pub(crate) fn blocks(&self) -> IndexBlocks {
        self.index.blocks()
    }

    /// Current blocks that are not in the image.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty
    }

    /// Superseded blocks that a group needs.
    pub(crate) fn frozen(&self) -> u64 {
        self.frozen
    }

    /// Blocks that take room on the device until they are drained.
    pub(crate) fn held(&self) -> u64 {
        self.dirty + self.frozen
    }

    /// Blocks that recovery has found inside of the checkpoint's zero extents.
    pub(crate) fn covered(&self) -> u64 {
        self.covered
    }

    /// Marks of an object.
    pub(crate) fn flags(&self, object: u32) -> ObjectFlags {
        self.index.flags(object)
    }

    /// Puts marks on an object; of the drain alone.
    pub(crate) fn mark(&mut self, object: u32, marks: ObjectFlags) {
        debug_assert!(!marks.intersects(ObjectFlags::ZERO_DIRTY | ObjectFlags::ZERO_KEEP));
        self.marked += u64::from(!self.is_marked(object));
        self.index.set_flags(object, marks);
    }

    /// Takes marks from an object; of the drain alone.
    pub(crate) fn unmark(&mut self, object: u32, marks: ObjectFlags) {
        debug_assert!(!marks.intersects(ObjectFlags::ZERO_DIRTY | ObjectFlags::ZERO_KEEP));
        let was_marked = self.is_marked(object);
        self.index.clear_flags(object, marks);
        self.marked -= u64::from(was_marked && !self.is_marked(object));
    }

    /// So many marked objects are none of the volume's any more.
    pub(crate) fn drop_marked(&mut self, objects: u64) {
        self.marked -= objects;
    }

    fn is_marked(&self, object: u32) -> bool {
        self.index.flags(object).intersects(ObjectFlags::QUEUED | ObjectFlags::DRAINING)
    }

    /// Something is not in the backend.
    pub(crate) fn is_dirty(&self) -> bool {
        self.marked > 0 || self.is_uncommitted()
    }

    // Records take effect.

    /// Data blocks that follow each other, with these checksums, become the current, dirty copies
    /// at `position` and behind.
    pub(crate) fn write(
        &mut self,
        space: &mut Space,
        now: Nanos,
        (block, position): (u64, Position),
        crcs: impl ExactSizeIterator<Item = u32>,
    ) {
        let n = crcs.len() as u32;
        let (mut cleaned, mut frozen) = (0, 0);
        let deltas = &mut self.deltas;
        self.index.insert(block, n, position, &mut |at, n, was| {
            inherit_refs(space, was, n, position + (at - block) as u32);
            let gone = supersede(deltas, space, at, n, was);
            (cleaned, frozen) = (cleaned + gone.cleaned, frozen + gone.frozen);
        });
        if let Some(deltas) = deltas {
            deltas.open.note(now);
            deltas.open.insert(block, n, position);
        }
        for (position, crc) in (position..).zip(crcs) {
            space.place(position, crc, true);
        }
        self.dirty = self.dirty + u64::from(n) - cleaned;
        self.frozen += frozen;
    }

    /// A range reads as zero from now on; with `keep`, the backend is to keep its space. That is
    /// remembered for whole objects: zeroes that might give space back keep it beside others that
    /// must.
    pub(crate) fn zero(&mut self, space: &mut Space, now: Nanos, range: Range<u64>, keep: bool) {
        let (mut cleaned, mut frozen) = (0, 0);
        let blocks = range.end - range.start;
        let deltas = &mut self.deltas;
        self.index.set_zero(range.start, blocks, &mut |block, n, was| {
            let gone = supersede(deltas, space, block, n, was);
            (cleaned, frozen) = (cleaned + gone.cleaned, frozen + gone.frozen);
        });
        if let Some(deltas) = deltas {
            deltas.open.note(now);
            deltas.open.index.set_zero(range.start, blocks, &mut |_, _, _| ());
        }
        self.dirty -= cleaned;
        self.frozen += frozen;
        for object in objects_of(range.clone()) {
            let first = u64::from(object) * OBJECT_BLOCKS as u64;
            if keep {
                self.index.set_flags(object, ObjectFlags::ZERO_DIRTY | ObjectFlags::ZERO_KEEP);
            } else {
                if range.start <= first && first + OBJECT_BLOCKS as u64 <= range.end {
                    self.index.clear_flags(object, ObjectFlags::ZERO_KEEP);
                }
                self.index.set_flags(object, ObjectFlags::ZERO_DIRTY);
            }
        }
    }

    /// A block of the image, which is in no index, is on the device as well.
    pub(crate) fn fill(&mut self, space: &mut Space, block: u64, position: Position, crc: u32) {
        debug_assert_eq!(self.index.lookup(block), Lookup::Absent);
        self.index.insert(block, 1, position, &mut |_, _, _| ());
        space.place(position, crc, false);
    }

    /// A copy stands at `new` as well as at `old`. With `keeps_refs` it is as much wanted there;
    /// else only if it is dirty.
    pub(crate) fn moved(
        &mut self,
        space: &mut Space,
        block: u64,
        (old, new): (Position, Position),
        crc: u32,
        keeps_refs: bool,
    ) -> Moved {
        let current = self.index.lookup(block) == Lookup::At(old);
        let frozen = !current && space.marks.is_dirty(old) && self.closed_has(block, old);
        if !current && !frozen {
            return Moved::Gone;
        }
        if let Some(deltas) = &mut self.deltas {
            deltas.open.moved(block, old, new);
            if let Some(closed) = &mut deltas.closed {
                closed.moved(block, old, new);
            }
        }
        if frozen {
            space.clean(old);
            space.place(new, crc, true);
            space.freeze(new);
            return Moved::Frozen;
        }
        self.index.insert(block, 1, new, &mut |_, _, _| ());
        let stays = keeps_refs || space.marks.is_dirty(old);
        space.marks.set_refs(new, if stays { space.marks.refs(old) } else { 0 });
        let dirty = space.kill(old) && !mutated!(MovedBlockIsClean);
        space.place(new, crc, dirty);
        Moved::Current { dirty }
    }

    // Copies are in the image, or of no use any more.

    /// The image has got the copy that stood at `position` before segment number `opened` was
    /// opened.
    pub(crate) fn clean(
        &mut self,
        space: &mut Space,
        block: u64,
        position: Position,
        opened: u64,
    ) -> Cleaned {
        if space.life_of(position) >= opened {
            // The log has been round meanwhile: what stands there now is newer.
            return Cleaned::Superseded;
        }
        let in_cut = self.cut_mut().is_some_and(|cut| cut.delta.index.remove_if(block, position));
        if self.index.lookup(block) != Lookup::At(position) {
            if in_cut && space.clean(position) {
                self.frozen -= 1;
            }
            return Cleaned::Superseded;
        }
        if let Some(group) = self.uncommitted(block, 1).0 {
            return Cleaned::Needed(group);
        }
        let was_dirty = space.clean(position);
        self.dirty -= u64::from(was_dirty);
        Cleaned::Clean { was_dirty }
    }

    /// The image has got the zeroes of an object. Tells whether it has everything of it that its
    /// cut needs.
    pub(crate) fn cut_has_zeroes(&mut self, object: u32) -> bool {
        let Some(cut) = self.cut_mut() else { return false };
        let runs: Vec<_> = cut.delta.index.runs(object).collect();
        for &(block, n, found) in &runs {
            if found == Lookup::Zero {
                cut.delta.index.remove(block, u64::from(n), &mut |_, _, _| ());
            }
        }
        !runs.iter().any(|(_, _, found)| matches!(found, Lookup::At(_)))
    }

    /// The image has all zeroes of an object: they need not be remembered.
    pub(crate) fn forget_zeroes(&mut self, object: u32) {
        self.index.clear_flags(object, ObjectFlags::ZERO_DIRTY | ObjectFlags::ZERO_KEEP);
        self.index.forget_zeroes(object);
    }

    /// The image has what stands in the log before `place`, as far as it is of one object. Tells
    /// how many blocks got clean, and whether others of the object are dirty.
    pub(crate) fn clean_before(
        &mut self,
        space: &mut Space,
        object: u32,
        place: Place,
    ) -> (u64, bool) {
        let (mut cleaned, mut left) = (0, false);
        for (_, n, found) in self.index.runs(object) {
            let Lookup::At(position) = found else { continue };
            for position in position..position + n {
                if !space.marks.is_dirty(position) {
                    continue;
                }
                if space.place_of(position) < place {
                    space.clean(position);
                    cleaned += 1;
                } else {
                    left = true;
                }
            }
        }
        self.dirty -= cleaned;
        (cleaned, left)
    }

    /// Drops what is known of a range, dirty or not.
    pub(crate) fn forget(&mut self, space: &mut Space, first: u64, blocks: u64) {
        let mut cleaned = 0;
        self.index.remove(first, blocks, &mut |_, n, was| cleaned += kill(space, n, was));
        self.dirty -= cleaned;
    }

    /// Drops all that is clean.
    pub(crate) fn forget_clean(&mut self, space: &mut Space) {
        let objects: Vec<u32> = self.index.objects(0).collect();
        for object in objects {
            let runs: Vec<_> = self.index.runs(object).collect();
            for (block, n, found) in runs {
                let Lookup::At(position) = found else { continue };
                for i in 0..n {
                    if !space.marks.is_dirty(position + i) {
                        self.index.remove(block + u64::from(i), 1, &mut |_, _, _| ());
                        space.kill(position + i);
                    }
                }
            }
        }
    }

    /// Everything that it had is gone, and forgotten.
    pub(crate) fn reset(&mut self) {
        debug_assert_eq!(self.dirty, 0);
        self.index = VolumeIndex::new();
        self.marked = 0;
    }

    /// The volume has become smaller: nothing is known beyond block `end`.
    pub(crate) fn truncate(&mut self, space: &mut Space, end: u64) {
        if let Some(deltas) = &mut self.deltas {
            deltas.open.index.truncate(end, &mut |_, _, _| ());
            if let Some(closed) = &mut deltas.closed {
                closed.delta.index.truncate(end, &mut |_, n, was| {
                    let Lookup::At(position) = was else { return };
                    for position in position..position + n {
                        // Frozen copies; what is current goes with the index.
                        if !space.marks.is_live(position) && space.clean(position) {
                            self.frozen -= 1;
                        }
                    }
                });
            }
        }
        let mut cleaned = 0;
        self.index.truncate(end, &mut |_, n, was| cleaned += kill(space, n, was));
        self.dirty -= cleaned;
    }

    // Copies have no good content.

    /// The only copy of a block, which is the current one at `position`, is lost: it cannot be read
    /// until it is overwritten.
    pub(crate) fn lose(&mut self, space: &mut Space, block: u64, position: Position) {
        debug_assert_eq!(self.index.lookup(block), Lookup::At(position));
        self.index.set_lost(block, 1, &mut |_, _, _| ());
        self.forget_in_groups(block, position);
        if space.kill(position) {
            self.dirty -= 1;
        }
    }

    /// A range is lost, whatever is known of it.
    pub(crate) fn lose_range(&mut self, space: &mut Space, block: u64, blocks: u64) {
        let mut cleaned = 0;
        self.index.set_lost(block, blocks, &mut |_, n, was| cleaned += kill(space, n, was));
        self.dirty -= cleaned;
    }

    /// A copy that only the closed group needs is lost: the block's newer content goes on without
    /// it. Tells whether the group needed it.
    pub(crate) fn lose_frozen(
        &mut self,
        space: &mut Space,
        block: u64,
        position: Position,
    ) -> bool {
        if !self.closed_has(block, position) || !space.marks.is_dirty(position) {
            return false;
        }
        self.forget_in_groups(block, position);
        space.clean(position);
        self.frozen -= 1;
        true
    }

    fn forget_in_groups(&mut self, block: u64, position: Position) {
        if let Some(deltas) = &mut self.deltas {
            deltas.open.index.remove_if(block, position);
            if let Some(closed) = &mut deltas.closed {
                closed.delta.index.remove_if(block, position);
            }
        }
    }

    // Groups.

    /// Changes go into groups from now on. What is dirty in objects that wait for the drain, or are
    /// in it, is the first one.
    pub(crate) fn begin_groups(&mut self, space: &Space, now: Nanos) {
        let open = self.dirty_delta(space, now);
        self.deltas = Some(Box::new(Deltas { open, closed: None }));
    }

    /// Changes go into no group any more.
    pub(crate) fn end_groups(&mut self) {
        self.deltas = None;
    }

    /// The open group ends here.
    ///
    /// # Panics
    /// If there are no groups, or one is closed.
    pub(crate) fn cut(&mut self) {
        let deltas = self.deltas.as_mut().expect("a volume with groups");
        assert!(deltas.closed.is_none(), "one group is closed at a time");
        let delta = std::mem::replace(&mut deltas.open, Delta::new());
        deltas.closed = Some(Closed::new(delta));
    }

    /// What the image lacks at this moment becomes the closed group.
    ///
    /// # Panics
    /// If there are no groups, or one is closed.
    pub(crate) fn cut_whole(&mut self, space: &Space, now: Nanos) {
        let mut delta = self.dirty_delta(space, now);
        let deltas = self.deltas.as_mut().expect("a volume with groups");
        assert!(deltas.closed.is_none(), "one group is closed at a time");
        let open = std::mem::replace(&mut deltas.open, Delta::new());
        delta.since = if open.is_empty() { now } else { open.since };
        deltas.closed = Some(Closed::new(delta));
    }

    /// What is dirty in objects that wait for the drain, or are in it.
    fn dirty_delta(&self, space: &Space, now: Nanos) -> Delta {
        let mut open = Delta::new();
        // What is being drained may never arrive, or arrive out of order: it belongs to the group,
        // too.
        let marks = ObjectFlags::QUEUED | ObjectFlags::DRAINING;
        for object in
            self.index.objects(0).filter(|&object| self.index.flags(object).intersects(marks))
        {
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
        open.sort();
        open
    }

    /// The closed group is committed, and stays until the image has it: it is the cut that the
    /// image is brought to.
    pub(crate) fn keep_as_cut(&mut self) {
        self.deltas
            .as_mut()
            .and_then(|deltas| deltas.closed.as_mut())
            .expect("a group is closed")
            .is_cut = true;
    }

    /// Nothing needs the closed group, if there is one, and its frozen copies any more.
    pub(crate) fn thaw(&mut self, space: &mut Space) {
        let Some(closed) = self.deltas.as_mut().and_then(|deltas| deltas.closed.take()) else {
            return;
        };
        for &block in &closed.frozen {
            let Lookup::At(position) = closed.delta.index.lookup(block) else { continue };
            if !space.marks.is_live(position) && space.clean(position) {
                self.frozen -= 1;
            }
        }
    }

    /// Something is in a group that is not committed.
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.pending().is_some() || self.open().is_some_and(|open| !open.is_empty())
    }

    /// Blocks in groups that are not committed.
    pub(crate) fn uncommitted_blocks(&self) -> u64 {
        self.open().map_or(0, Delta::blocks)
            + self.pending().map_or(0, |closed| closed.delta.blocks())
    }

    /// When the oldest change came that is in a group that is not committed.
    pub(crate) fn uncommitted_since(&self) -> Option<Nanos> {
        let closed = self.pending().map(|closed| closed.delta.since);
        closed.or(self.open_since())
    }

    /// When the first change came into the open group; `None` if it is empty.
    pub(crate) fn open_since(&self) -> Option<Nanos> {
        self.open().filter(|open| !open.is_empty()).map(|open| open.since)
    }

    /// Data blocks of the open group.
    pub(crate) fn open_blocks(&self) -> u64 {
        self.open().map_or(0, |open| open.index.blocks().at)
    }

    /// Data blocks of the closed group.
    pub(crate) fn closed_blocks(&self) -> u64 {
        self.closed().map_or(0, |closed| closed.delta.index.blocks().at)
    }

    /// Where the closed group has its blocks.
    pub(crate) fn closed_index(&self) -> Option<&VolumeIndex> {
        self.closed().map(|closed| &closed.delta.index)
    }

    /// Whether the closed group needs the copy at `position`.
    pub(crate) fn closed_has(&self, block: u64, position: Position) -> bool {
        self.closed().is_some_and(|closed| closed.delta.index.lookup(block) == Lookup::At(position))
    }

    /// Where the cut that the image is being brought to has its blocks.
    pub(crate) fn cut_index(&self) -> Option<&VolumeIndex> {
        self.closed().filter(|closed| closed.is_cut).map(|closed| &closed.delta.index)
    }

    /// The image has everything of its cut.
    pub(crate) fn cut_is_reached(&self) -> bool {
        self.closed().is_some_and(|closed| closed.is_cut && closed.delta.is_empty())
    }

    /// Which group has to be committed before the blocks from `block` on may go to the image, and
    /// how many of the next `n` are like it.
    pub(crate) fn uncommitted(&self, block: u64, n: u32) -> (Option<Uncommitted>, u32) {
        let open = self.open().map(|open| (&open.index, Uncommitted::Open));
        let closed = self.pending().map(|closed| (&closed.delta.index, Uncommitted::Closed));
        let mut n = n;
        for (index, group) in open.into_iter().chain(closed) {
            let (found, len) = index.lookup_run(block, n);
            if found != Lookup::Absent {
                return (Some(group), len);
            }
            n = n.min(len);
        }
        (None, n)
    }

    /// All of the closed group has been gathered.
    pub(crate) fn is_gathered(&self) -> bool {
        self.closed().is_none_or(Closed::is_gathered)
    }

    /// Gathers at most `max` data blocks of the closed group.
    pub(crate) fn gather_blocks(&mut self, max: usize, take: &mut impl FnMut(u64, Position)) {
        let Ledger { index, deltas, .. } = self;
        let closed =
            deltas.as_mut().and_then(|deltas| deltas.closed.as_mut()).expect("a group is closed");
        closed.gather_blocks(max, &mut |block, position| match index.lookup(block) {
            Lookup::At(newest) if mutated!(CoalesceAcrossCut) => take(block, newest),
            _ => take(block, position),
        });
    }

    /// Gathers at most `max` stretches of zeroes of the closed group below block `end`: first
    /// block, blocks, whether the backend is to keep their space.
    pub(crate) fn gather_zeroes(
        &mut self,
        max: usize,
        end: u64,
        take: &mut impl FnMut(u64, u32, bool),
    ) {
        let Ledger { index, deltas, .. } = self;
        let closed =
            deltas.as_mut().and_then(|deltas| deltas.closed.as_mut()).expect("a group is closed");
        closed.gather_zeroes(max, end, &mut |object, block, n| {
            take(block, n, index.flags(object).contains(ObjectFlags::ZERO_KEEP));
        });
    }

    fn open(&self) -> Option<&Delta> {
        self.deltas.as_ref().map(|deltas| &deltas.open)
    }

    fn closed(&self) -> Option<&Closed> {
        self.deltas.as_ref()?.closed.as_ref()
    }

    /// The closed group, as long as it is not committed.
    fn pending(&self) -> Option<&Closed> {
        self.closed().filter(|closed| !closed.is_cut)
    }

    fn cut_mut(&mut self) -> Option<&mut Closed> {
        self.deltas.as_mut()?.closed.as_mut().filter(|closed| closed.is_cut)
    }

    // A start.

    /// A range of the checkpoint reads as zero, which the image does not know.
    pub(crate) fn restore_zero(&mut self, range: Range<u64>, keep: bool) {
        self.index.set_zero(range.start, range.end - range.start, &mut |_, _, _| ());
        let keep = if keep { ObjectFlags::ZERO_KEEP } else { ObjectFlags::NONE };
        for object in objects_of(range) {
            self.index.set_flags(object, ObjectFlags::ZERO_DIRTY | keep);
        }
    }

    /// A range of the checkpoint is lost.
    pub(crate) fn restore_lost(&mut self, range: Range<u64>) {
        self.index.set_lost(range.start, range.end - range.start, &mut |_, _, _| ());
    }

    /// A block that the checkpoint says is live, and dirty or not.
    pub(crate) fn restore(
        &mut self,
        space: &mut Space,
        (block, position): (u64, Position),
        crc: u32,
        dirty: bool,
    ) {
        let (mut cleaned, mut covered) = (0, 0);
        self.index.insert(block, 1, position, &mut |_, n, was| match was {
            Lookup::Zero => covered += 1,
            was => cleaned += kill(space, n, was),
        });
        self.covered += covered;
        space.place(position, crc, dirty);
        self.dirty = self.dirty + u64::from(dirty) - cleaned;
    }

    /// As a restart would find it: what it holds, and no groups. It is empty afterwards.
    ///
    /// # Panics
    /// In a debug build, if a group has frozen copies.
    pub(crate) fn take_restarted(&mut self) -> Ledger {
        debug_assert_eq!(self.frozen, 0);
        let Ledger { index, dirty, marked, .. } = std::mem::replace(self, Ledger::new());
        Ledger { index, dirty, marked, ..Ledger::new() }
    }
}

/// Objects with something that is not in the image.
pub(crate) fn dirty_objects(ledger: &Ledger, space: &Space) -> Vec<u32> {
    let is_dirty = |&object: &u32| {
        debug_assert!(u64::from(object) < u64::MAX / OBJECT_BLOCKS as u64);
        ledger.flags(object).contains(ObjectFlags::ZERO_DIRTY)
            || ledger.index.runs(object).any(|(_, n, found)| match found {
                Lookup::At(position) => (position..position + n).any(|p| space.marks.is_dirty(p)),
                _ => false,
            })
    };
    ledger.index.objects(0).filter(is_dirty).collect()
}
