//! The index: which blocks of a volume are on the cache device, and where.
//!
//! Two levels. A directory finds the entry of a 4 MiB object; the entry finds the object's table,
//! which holds sorted runs (blocks contiguous in the volume and on the device) of 6 bytes each, or,
//! where that would take more room, one position for each block. Tables live in a [`slab::Slab`].
//! Stretches of the directory in which no object has a table cost nothing, so that the memory
//! follows what is cached and not the size of the volume.

mod slab;
mod table;
#[cfg(test)]
mod tests;

use crate::base::mutation::mutated;
use slab::{FLAT, Slab};
use table::{ABSENT, LOST, RUN_BLOCKS_MAX, Run, Splice, Table, ZERO, stretches};

pub use crate::status::IndexBlocks;

/// Number of a 4 KiB block on the cache device.
pub type Position = u32;

/// Positions are smaller than this.
pub const POSITION_END: Position = u32::MAX - 15;
/// Blocks of one object.
pub const OBJECT_BLOCKS: usize = 1024;
/// Block numbers are smaller than this (volumes of up to 1 PiB).
pub const BLOCKS_MAX: u64 = 1 << 38;

/// Blocks of one object, as a count.
const OBJECT: u64 = OBJECT_BLOCKS as u64;
/// Objects of one leaf of the directory.
const LEAF_OBJECTS: usize = 512;
/// Blocks of one leaf.
const LEAF: u64 = LEAF_OBJECTS as u64 * OBJECT;
/// A flat table is looked at after this many changes: perhaps runs have become the shorter form.
const FLAT_CHECK_CHANGES: u16 = 128;
/// A flat table becomes runs again when there are at most this many.
const FLAT_LEAVE_RUNS: usize = 512;
/// A table of one kind of run that covers its object has at most this many runs.
const UNIFORM_RUNS_MAX: usize = 2 * OBJECT_BLOCKS / RUN_BLOCKS_MAX as usize + 1;

/// What the index knows about a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lookup {
    /// Nothing: the backend has it.
    Absent,
    /// It reads as zero.
    Zero,
    /// Its only copy is lost: it cannot be read until it is overwritten.
    Lost,
    /// It is on the cache device. Of a stretch, the position of the first block.
    At(Position),
}

/// Marks that an object carries for the drain. They do not influence what is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObjectFlags(u8);

impl ObjectFlags {
    /// None of them.
    pub const NONE: ObjectFlags = ObjectFlags(0);
    /// The object waits in the drain's queue.
    pub const QUEUED: ObjectFlags = ObjectFlags(1);
    /// The object is being drained.
    pub const DRAINING: ObjectFlags = ObjectFlags(2);
    /// The object has blocks that read as zero here and not yet in the backend.
    pub const ZERO_DIRTY: ObjectFlags = ObjectFlags(4);
    /// Some of these zeroes are to keep their space in the backend.
    pub const ZERO_KEEP: ObjectFlags = ObjectFlags(8);

    /// All of `other` are set.
    pub fn contains(self, other: ObjectFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Some of `other` are set.
    pub fn intersects(self, other: ObjectFlags) -> bool {
        self.0 & other.0 != 0
    }
}

impl std::ops::BitOr for ObjectFlags {
    type Output = ObjectFlags;
    fn bitor(self, other: ObjectFlags) -> ObjectFlags {
        ObjectFlags(self.0 | other.0)
    }
}

/// [`Entry::size`] of an object without a table.
const NO_TABLE: u8 = u8::MAX;
/// Bit of [`Entry::flags`] beside the public ones: blocks in no run read as zero.
const GAP_ZERO: u8 = 0x80;

/// What the directory holds for one object.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    slot: u32,
    /// Runs in the table; in the flat form, changes since it was last looked at.
    count: u16,
    size: u8,
    flags: u8,
}

const EMPTY: Entry = Entry { slot: 0, count: 0, size: NO_TABLE, flags: 0 };

impl Entry {
    fn gap(self) -> u32 {
        if self.flags & GAP_ZERO != 0 { ZERO } else { ABSENT }
    }

    fn set_gap(&mut self, gap: u32) {
        self.flags = self.flags & !GAP_ZERO | if gap == ZERO { GAP_ZERO } else { 0 };
    }

    fn drop_table(&mut self) {
        *self = Entry { flags: self.flags, ..EMPTY };
    }
}

/// A stretch of [`LEAF_OBJECTS`] objects in the directory.
enum Leaf {
    /// All of them are like this one, which has no table.
    Uniform(Entry),
    /// Each has its entry.
    Each(Box<[Entry; LEAF_OBJECTS]>),
}

/// The index of one volume.
pub struct VolumeIndex {
    leaves: Vec<Leaf>,
    slab: Slab,
    blocks: IndexBlocks,
}

impl Default for VolumeIndex {
    fn default() -> Self {
        VolumeIndex::new()
    }
}

impl VolumeIndex {
    /// An index in which every block is absent.
    pub fn new() -> VolumeIndex {
        VolumeIndex { leaves: Vec::new(), slab: Slab::new(), blocks: IndexBlocks::default() }
    }

    /// What is known about one block.
    pub fn lookup(&self, block: u64) -> Lookup {
        let entry = self.entry((block / OBJECT) as usize);
        let value = match entry.size {
            NO_TABLE => entry.gap(),
            _ => self.table(&entry).value((block % OBJECT) as u32),
        };
        table::decode(value)
    }

    /// What is known about a stretch that begins with `block`, and for how many blocks: at most
    /// `max`, and on the device they follow each other. A stretch ends with its object at the
    /// latest, but where whole parts of the volume are absent or zero it may be longer. It may go
    /// on with another call.
    pub fn lookup_run(&self, block: u64, max: u32) -> (Lookup, u32) {
        let at = (block % OBJECT) as u32;
        match self.leaves.get((block / LEAF) as usize) {
            None => (Lookup::Absent, max),
            Some(Leaf::Uniform(entry)) => {
                (table::decode(entry.gap()), u64::from(max).min(LEAF - block % LEAF) as u32)
            }
            Some(Leaf::Each(entries)) => {
                let table = self.table(&entries[(block % LEAF / OBJECT) as usize]);
                let limit = u64::from(at) + u64::from(max);
                let mut i = table.first_ending_after(at);
                let run = table.stretch(&mut i, at, limit.min(OBJECT) as u32);
                (table::decode(run.value), run.blocks)
            }
        }
    }

    /// Blocks `block..block + n` are now at `position..position + n`. What was known about them
    /// before (unless absent) is reported to `replaced`, as stretches of (first block, blocks,
    /// first value).
    ///
    /// # Panics
    /// If a block number reaches [`BLOCKS_MAX`] or a position [`POSITION_END`].
    pub fn insert(
        &mut self,
        block: u64,
        n: u32,
        position: Position,
        replaced: &mut impl FnMut(u64, u32, Lookup),
    ) {
        assert!(
            u64::from(position) + u64::from(n) <= u64::from(POSITION_END),
            "position {position}+{n} is beyond the largest cache device"
        );
        self.assign(block, u64::from(n), position, replaced);
    }

    /// Blocks `block..block + n` now read as zero. Costs no more than a step for each object.
    ///
    /// # Panics
    /// If a block number reaches [`BLOCKS_MAX`].
    pub fn set_zero(&mut self, block: u64, n: u64, replaced: &mut impl FnMut(u64, u32, Lookup)) {
        self.assign(block, n, ZERO, replaced);
    }

    /// Blocks `block..block + n` now are lost.
    ///
    /// # Panics
    /// If a block number reaches [`BLOCKS_MAX`].
    pub fn set_lost(&mut self, block: u64, n: u64, replaced: &mut impl FnMut(u64, u32, Lookup)) {
        self.assign(block, n, LOST, replaced);
    }

    /// Blocks `block..block + n` now are absent.
    ///
    /// # Panics
    /// If a block number reaches [`BLOCKS_MAX`].
    pub fn remove(&mut self, block: u64, n: u64, replaced: &mut impl FnMut(u64, u32, Lookup)) {
        self.assign(block, n, ABSENT, replaced);
    }

    /// Makes a block absent if it is at `position`; tells whether it was.
    pub fn remove_if(&mut self, block: u64, position: Position) -> bool {
        let same = self.lookup(block) == Lookup::At(position);
        if same {
            self.assign(block, 1, ABSENT, &mut |_, _, _| ());
        }
        same
    }

    /// Moves a block to position `new` if it is at `old`; tells whether it was.
    ///
    /// # Panics
    /// If `new` reaches [`POSITION_END`].
    pub fn replace_if(&mut self, block: u64, old: Position, new: Position) -> bool {
        let same = self.lookup(block) == Lookup::At(old);
        if same {
            self.insert(block, 1, new, &mut |_, _, _| ());
        }
        same
    }

    /// Forgets everything about the blocks from `blocks` on, flags of whole objects included: the
    /// volume has become smaller.
    pub fn truncate(&mut self, blocks: u64, replaced: &mut impl FnMut(u64, u32, Lookup)) {
        let end = self.leaves.len() as u64 * LEAF;
        if blocks >= end {
            return;
        }
        self.remove(blocks, end - blocks, replaced);
        self.leaves.truncate(blocks.div_ceil(LEAF) as usize);
        let first = blocks.div_ceil(OBJECT) as usize;
        let last =
            if mutated!(TruncateKeepsFlags) { first } else { self.leaves.len() * LEAF_OBJECTS };
        for object in first..last {
            self.clear_flags(object as u32, ObjectFlags(!GAP_ZERO));
        }
    }

    /// Forgets which blocks of an object read as zero: they become absent. Where the backend has
    /// those zeroes too, this is an eviction; it frees memory where zero, absent and cached blocks
    /// are mixed.
    pub fn forget_zeroes(&mut self, object: u32) {
        let first = u64::from(object) * OBJECT;
        let mut at = 0;
        while at < OBJECT_BLOCKS as u32 {
            let (found, n) = self.lookup_run(first + u64::from(at), OBJECT_BLOCKS as u32 - at);
            if found == Lookup::Zero {
                self.remove(first + u64::from(at), u64::from(n), &mut |_, _, _| ());
            }
            at += n;
        }
    }

    /// Flags of an object.
    pub fn flags(&self, object: u32) -> ObjectFlags {
        ObjectFlags(self.entry(object as usize).flags & !GAP_ZERO)
    }

    /// Sets flags of an object.
    ///
    /// # Panics
    /// If the object's blocks reach [`BLOCKS_MAX`].
    pub fn set_flags(&mut self, object: u32, flags: ObjectFlags) {
        if !self.flags(object).contains(flags) {
            self.entry_mut(object as usize).flags |= flags.0;
            self.unify(object as usize / LEAF_OBJECTS);
        }
    }

    /// Clears flags of an object.
    pub fn clear_flags(&mut self, object: u32, flags: ObjectFlags) {
        if self.flags(object).intersects(flags) {
            self.entry_mut(object as usize).flags &= !flags.0;
            self.unify(object as usize / LEAF_OBJECTS);
        }
    }

    /// The objects from number `from` on in which something is known about a block, in order.
    pub fn objects(&self, from: u32) -> impl Iterator<Item = u32> + '_ {
        let first = from as usize / LEAF_OBJECTS;
        self.leaves
            .iter()
            .enumerate()
            .skip(first)
            .flat_map(move |(l, leaf)| {
                let range = match leaf {
                    Leaf::Uniform(entry) if entry.gap() == ABSENT => 0..0,
                    _ => {
                        (from as usize).saturating_sub(l * LEAF_OBJECTS).min(LEAF_OBJECTS)
                            ..LEAF_OBJECTS
                    }
                };
                range.map(move |i| l * LEAF_OBJECTS + i)
            })
            .filter(|&object| {
                let entry = self.entry(object);
                entry.size != NO_TABLE || entry.gap() == ZERO
            })
            .map(|object| object as u32)
    }

    /// What is known about the blocks of an object: stretches of (first block, blocks, first value)
    /// in order, without the absent ones.
    pub fn runs(&self, object: u32) -> impl Iterator<Item = (u64, u32, Lookup)> + '_ {
        let table = self.table_of(object as usize);
        let first = u64::from(object) * OBJECT;
        stretches(table)
            .filter(|run| run.value != ABSENT)
            .map(move |run| (first + u64::from(run.start), run.blocks, table::decode(run.value)))
    }

    /// Number of runs that the index keeps for an object: what it costs, in units of 6 bytes.
    pub fn runs_len(&self, object: u32) -> usize {
        self.table_of(object as usize).len()
    }

    /// How many blocks of each kind there are.
    pub fn blocks(&self) -> IndexBlocks {
        self.blocks
    }

    /// Bytes of memory in use, those that the heap spends on it included.
    pub fn memory_bytes(&self) -> usize {
        let each = self.leaves.iter().filter(|l| matches!(l, Leaf::Each(_))).count();
        size_of::<VolumeIndex>()
            + self.leaves.capacity() * size_of::<Leaf>()
            + each * (size_of::<[Entry; LEAF_OBJECTS]>() + 16)
            + self.slab.memory_bytes()
    }

    fn entry(&self, object: usize) -> Entry {
        match self.leaves.get(object / LEAF_OBJECTS) {
            None => EMPTY,
            Some(Leaf::Uniform(entry)) => *entry,
            Some(Leaf::Each(entries)) => entries[object % LEAF_OBJECTS],
        }
    }

    fn entry_mut(&mut self, object: usize) -> &mut Entry {
        let l = object / LEAF_OBJECTS;
        self.grow(l + 1);
        let leaf = &mut self.leaves[l];
        if let Leaf::Uniform(entry) = *leaf {
            *leaf = Leaf::Each(Box::new([entry; LEAF_OBJECTS]));
        }
        match leaf {
            Leaf::Each(entries) => &mut entries[object % LEAF_OBJECTS],
            Leaf::Uniform(_) => unreachable!("made to entries above"),
        }
    }

    fn grow(&mut self, leaves: usize) {
        assert!(leaves as u64 <= BLOCKS_MAX / LEAF, "a block number is beyond the largest volume");
        if self.leaves.len() < leaves {
            self.leaves.resize_with(leaves, || Leaf::Uniform(EMPTY));
        }
    }

    /// Gives up the entries of a leaf when they all are the same. The comparison of the ends comes
    /// first so that this costs next to nothing when called for each object in turn.
    fn unify(&mut self, l: usize) {
        if let Leaf::Each(entries) = &self.leaves[l] {
            let first = entries[0];
            if first.size == NO_TABLE
                && entries[LEAF_OBJECTS - 1] == first
                && entries.iter().all(|e| *e == first)
            {
                self.leaves[l] = Leaf::Uniform(first);
            }
        }
    }

    fn table(&self, entry: &Entry) -> Table<'_> {
        match entry.size {
            NO_TABLE => Table::Runs { positions: &[], keys: &[], gap: entry.gap() },
            FLAT => Table::Flat(self.slab.table(FLAT, entry.slot).0),
            size => {
                let (positions, keys) = self.slab.table(size, entry.slot);
                let count = entry.count as usize;
                Table::Runs {
                    positions: &positions[..count],
                    keys: &keys[..count],
                    gap: entry.gap(),
                }
            }
        }
    }

    fn table_of(&self, object: usize) -> Table<'_> {
        match self.leaves.get(object / LEAF_OBJECTS) {
            None => self.table(&EMPTY),
            Some(Leaf::Uniform(entry)) => self.table(entry),
            Some(Leaf::Each(entries)) => self.table(&entries[object % LEAF_OBJECTS]),
        }
    }

    /// Gives blocks `block..block + n` the value, counted up from block to block if it is a
    /// position.
    fn assign(
        &mut self,
        block: u64,
        n: u64,
        value: u32,
        replaced: &mut impl FnMut(u64, u32, Lookup),
    ) {
        let mut end = block
            .checked_add(n)
            .filter(|&end| end <= BLOCKS_MAX)
            .expect("a block number within BLOCKS_MAX");
        if value == ABSENT {
            // Nothing is known beyond the directory, so there is nothing to forget.
            end = end.min(self.leaves.len() as u64 * LEAF);
        }
        let mut at = block;
        while at < end {
            let here = table::advance(value, (at - block) as u32);
            let (object, start) = ((at / OBJECT) as usize, (at % OBJECT) as u32);
            let n = (end - at).min(OBJECT - u64::from(start)) as u32;
            if start == 0 && n as usize == OBJECT_BLOCKS && (value == ZERO || value == ABSENT) {
                at += self.assign_whole(object, end - at, value, replaced);
            } else {
                self.assign_part(object, start, start + n, here, replaced);
                at += u64::from(n);
            }
        }
    }

    /// Gives all blocks of an object (of a whole leaf, when `n` reaches that far) the value zero or
    /// absent; returns the number of blocks.
    fn assign_whole(
        &mut self,
        object: usize,
        n: u64,
        value: u32,
        replaced: &mut impl FnMut(u64, u32, Lookup),
    ) -> u64 {
        let l = object / LEAF_OBJECTS;
        self.grow(l + 1);
        if let Leaf::Uniform(entry) = &mut self.leaves[l]
            && object.is_multiple_of(LEAF_OBJECTS)
            && n >= LEAF
        {
            let before = entry.gap();
            entry.set_gap(value);
            self.blocks.count(LEAF as u32, before, value);
            if before != ABSENT {
                replaced(object as u64 * OBJECT, LEAF as u32, table::decode(before));
            }
            return LEAF;
        }
        self.report(object, 0, OBJECT_BLOCKS as u32, value, replaced);
        let entry = self.entry(object);
        if entry.size != NO_TABLE || entry.gap() != value {
            self.free_table(object);
            self.entry_mut(object).set_gap(value);
            self.unify(l);
        }
        OBJECT
    }

    fn assign_part(
        &mut self,
        object: usize,
        start: u32,
        end: u32,
        value: u32,
        replaced: &mut impl FnMut(u64, u32, Lookup),
    ) {
        let first = self.report(object, start, end, value, replaced);
        let entry = self.entry(object);
        if entry.size == NO_TABLE && entry.gap() == value {
            return;
        }
        if entry.size == FLAT {
            self.assign_flat(object, start, end, value);
            return;
        }
        let table = self.table(&entry);
        let count = table.len();
        let splice = Splice::plan(&table, first, entry.gap(), start..end, value);
        let after = count - (splice.to - splice.from) + splice.runs().len();
        if after == 0 {
            self.free_table(object);
            self.unify(object / LEAF_OBJECTS);
            return;
        }
        let fits = entry.size != NO_TABLE && after <= Slab::capacity(entry.size);
        if !fits && Slab::size_for(after) == FLAT {
            self.make_flat(object);
            self.assign_flat(object, start, end, value);
            return;
        }
        if !fits {
            self.resize(object, Slab::size_for(after));
        }
        let entry = self.entry_mut(object);
        entry.count = after as u16;
        let (size, slot) = (entry.size, entry.slot);
        let (positions, keys) = self.slab.table_mut(size, slot);
        splice.apply(positions, keys, count);
        if after < count {
            self.shrink(object);
        }
        if value == ZERO || value == ABSENT {
            self.swap_gap(object);
        }
    }

    /// Changes a flat table.
    fn assign_flat(&mut self, object: usize, start: u32, end: u32, value: u32) {
        let entry = self.entry_mut(object);
        entry.count += (1 + (end - start) / 8) as u16;
        let (slot, check) = (entry.slot, entry.count >= FLAT_CHECK_CHANGES);
        let values = &mut self.slab.table_mut(FLAT, slot).0[start as usize..end as usize];
        for (i, v) in values.iter_mut().enumerate() {
            *v = table::advance(value, i as u32);
        }
        if check {
            self.leave_flat(object);
        }
    }

    /// Turns an object's run table into a flat one.
    fn make_flat(&mut self, object: usize) {
        let mut values = [ABSENT; OBJECT_BLOCKS];
        for run in stretches(self.table_of(object)) {
            for (i, v) in values[run.start as usize..run.end() as usize].iter_mut().enumerate() {
                *v = table::advance(run.value, i as u32);
            }
        }
        self.free_table(object);
        let slot = self.slab.alloc(FLAT, object as u32);
        self.slab.table_mut(FLAT, slot).0.copy_from_slice(&values);
        let entry = self.entry_mut(object);
        *entry = Entry { slot, count: 0, size: FLAT, flags: entry.flags };
        entry.set_gap(ABSENT);
    }

    /// Turns a flat table into runs if that saves enough memory.
    fn leave_flat(&mut self, object: usize) {
        let (mut zero, mut absent, mut others) = (0, 0, 0);
        for run in stretches(self.table_of(object)) {
            let runs = run.blocks.div_ceil(RUN_BLOCKS_MAX) as usize;
            match run.value {
                ZERO => zero += runs,
                ABSENT => absent += runs,
                _ => others += runs,
            }
        }
        self.entry_mut(object).count = 0;
        let gap = if zero > absent { ZERO } else { ABSENT };
        let count = others + zero.min(absent);
        if count > FLAT_LEAVE_RUNS {
            return;
        }
        let (mut positions, mut keys) = ([0; FLAT_LEAVE_RUNS], [0; FLAT_LEAVE_RUNS]);
        let runs = stretches(self.table_of(object)).filter(|run| run.value != gap);
        table::write_runs(&mut positions, &mut keys, runs.flat_map(Run::chunks));
        self.free_table(object);
        let mut entry = self.entry(object);
        entry.set_gap(gap);
        if count > 0 {
            let size = Slab::size_for(count);
            let slot = self.slab.alloc(size, object as u32);
            let (to_positions, to_keys) = self.slab.table_mut(size, slot);
            to_positions[..count].copy_from_slice(&positions[..count]);
            to_keys[..count].copy_from_slice(&keys[..count]);
            entry = Entry { slot, count: count as u16, size, flags: entry.flags };
        }
        *self.entry_mut(object) = entry;
        self.unify(object / LEAF_OBJECTS);
    }

    /// Tells what `start..end` of an object held before it becomes `value`, and counts. Returns the
    /// index of the first run that ends after `start`.
    fn report(
        &mut self,
        object: usize,
        start: u32,
        end: u32,
        value: u32,
        replaced: &mut impl FnMut(u64, u32, Lookup),
    ) -> usize {
        let first_block = object as u64 * OBJECT;
        let mut blocks = self.blocks;
        let table = self.table_of(object);
        let first = table.first_ending_after(start);
        let (mut i, mut at) = (first, start);
        while at < end {
            let run = table.stretch(&mut i, at, end);
            blocks.count(run.blocks, run.value, value);
            if run.value != ABSENT {
                replaced(first_block + u64::from(at), run.blocks, table::decode(run.value));
            }
            at = run.end();
        }
        self.blocks = blocks;
        first
    }

    /// Moves an object's table to a slot of another size that has room for its runs.
    fn resize(&mut self, object: usize, size: u8) {
        let before = self.entry(object);
        let slot = self.slab.alloc(size, object as u32);
        if before.size != NO_TABLE {
            self.slab.copy((before.size, before.slot), (size, slot), before.count as usize);
            self.free_table(object);
        }
        *self.entry_mut(object) = Entry { slot, size, ..before };
    }

    /// Moves a table that has become short to a smaller slot, with enough distance from the next
    /// growth that it does not go back and forth.
    fn shrink(&mut self, object: usize) {
        let entry = self.entry(object);
        if entry.size == 0 {
            return;
        }
        let below = Slab::capacity(entry.size - 1);
        if (entry.count as usize) < below - below / 32 {
            self.resize(object, Slab::size_for(entry.count as usize));
        }
    }

    /// Gives an object's slot back.
    fn free_table(&mut self, object: usize) {
        let entry = self.entry(object);
        if entry.size == NO_TABLE {
            return;
        }
        if let Some(owner) = self.slab.free(entry.size, entry.slot) {
            self.entry_mut(owner as usize).slot = entry.slot;
        }
        self.entry_mut(object).drop_table();
    }

    /// Drops a table that says nothing but zero (or nothing but absent): that is what gaps are for.
    fn swap_gap(&mut self, object: usize) {
        let entry = self.entry(object);
        if entry.count as usize > UNIFORM_RUNS_MAX {
            return;
        }
        let all = self.table(&entry).stretch(&mut 0, 0, OBJECT_BLOCKS as u32);
        if all.blocks as usize == OBJECT_BLOCKS && (all.value == ZERO || all.value == ABSENT) {
            self.free_table(object);
            self.entry_mut(object).set_gap(all.value);
            self.unify(object / LEAF_OBJECTS);
        }
    }
}

impl IndexBlocks {
    /// `n` blocks of one value become another.
    fn count(&mut self, n: u32, before: u32, after: u32) {
        if let Some(kind) = self.kind(before) {
            *kind -= u64::from(n);
        }
        if let Some(kind) = self.kind(after) {
            *kind += u64::from(n);
        }
    }

    fn kind(&mut self, value: u32) -> Option<&mut u64> {
        match value {
            ABSENT => None,
            ZERO => Some(&mut self.zero),
            LOST => Some(&mut self.lost),
            _ => Some(&mut self.at),
        }
    }
}
