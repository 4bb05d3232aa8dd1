//! What is known about each block of the cache device itself: its checksum, whether the index
//! points to it, whether its content is missing in the backend, and how often it was hit.
//!
//! 4.5 bytes for each block. The memory comes zeroed from the system and is touched only where the
//! device is in use.

use crate::blocks::index::Position;
use std::ops::Range;

/// Bits of a reference counter.
const REFS_BITS: u32 = 2;
/// Highest value of a reference counter.
pub const REFS_MAX: u8 = (1 << REFS_BITS) - 1;
/// Reference counters of one word.
const REFS_PER_WORD: u32 = u64::BITS / REFS_BITS;

/// Per-block marks of a cache device.
pub struct Marks {
    crcs: Vec<u32>,
    live: Bits,
    dirty: Bits,
    refs: Vec<u64>,
}

impl Marks {
    /// Marks for a device of this many blocks: nothing live, nothing dirty.
    ///
    /// # Panics
    /// If the device has more blocks than there are positions.
    pub fn new(blocks: usize) -> Marks {
        let blocks = u32::try_from(blocks).expect("a device of less than 2^32 blocks");
        Marks {
            crcs: vec![0; blocks as usize],
            live: Bits::new(blocks),
            dirty: Bits::new(blocks),
            refs: vec![0; blocks.div_ceil(REFS_PER_WORD) as usize],
        }
    }

    /// The CRC-32C that the block's content must have.
    pub fn crc(&self, position: Position) -> u32 {
        self.crcs[position as usize]
    }

    /// Sets the block's expected CRC-32C.
    pub fn set_crc(&mut self, position: Position, crc: u32) {
        self.crcs[position as usize] = crc;
    }

    /// The expected CRC-32Cs of a stretch of blocks.
    pub fn crcs(&self, range: Range<Position>) -> &[u32] {
        &self.crcs[range.start as usize..range.end as usize]
    }

    /// Which blocks the index points to.
    pub fn live(&self) -> &Bits {
        &self.live
    }

    /// Which blocks hold what the backend does not.
    pub fn dirty(&self) -> &Bits {
        &self.dirty
    }

    /// The index points to the block.
    pub fn is_live(&self, position: Position) -> bool {
        self.live.get(position)
    }

    /// Marks the block live; tells whether it was not.
    pub fn set_live(&mut self, position: Position) -> bool {
        self.live.set(position)
    }

    /// Marks the block not live; tells whether it was.
    pub fn clear_live(&mut self, position: Position) -> bool {
        self.live.clear(position)
    }

    /// The block holds what the backend does not.
    pub fn is_dirty(&self, position: Position) -> bool {
        self.dirty.get(position)
    }

    /// Marks the block dirty; tells whether it was not.
    pub fn set_dirty(&mut self, position: Position) -> bool {
        self.dirty.set(position)
    }

    /// Marks the block clean; tells whether it was dirty.
    pub fn clear_dirty(&mut self, position: Position) -> bool {
        self.dirty.clear(position)
    }

    /// Counts a hit of the block, up to [`REFS_MAX`]. Most hits find the counter there already and
    /// then write nothing.
    pub fn touch(&mut self, position: Position) {
        let word = &mut self.refs[(position / REFS_PER_WORD) as usize];
        let shift = position % REFS_PER_WORD * REFS_BITS;
        if *word >> shift & u64::from(REFS_MAX) != u64::from(REFS_MAX) {
            *word += 1 << shift;
        }
    }

    /// Hits of the block that were counted.
    pub fn refs(&self, position: Position) -> u8 {
        let word = self.refs[(position / REFS_PER_WORD) as usize];
        (word >> (position % REFS_PER_WORD * REFS_BITS)) as u8 & REFS_MAX
    }

    /// Sets the block's counter, to no more than [`REFS_MAX`].
    pub fn set_refs(&mut self, position: Position, refs: u8) {
        let word = &mut self.refs[(position / REFS_PER_WORD) as usize];
        let shift = position % REFS_PER_WORD * REFS_BITS;
        *word = *word & !(u64::from(REFS_MAX) << shift) | u64::from(refs.min(REFS_MAX)) << shift;
    }

    /// Sets the block's counter to zero.
    pub fn clear_refs(&mut self, position: Position) {
        self.set_refs(position, 0);
    }

    /// Forgets everything about a stretch of blocks but their checksums: its segment is free again.
    pub fn clear(&mut self, range: Range<Position>) {
        self.live.clear_range(range.clone());
        self.dirty.clear_range(range.clone());
        let bits = u64::from(REFS_BITS);
        for (word, mask) in masks(u64::from(range.start) * bits..u64::from(range.end) * bits) {
            self.refs[word] &= !mask;
        }
    }

    /// Bytes of memory, as if all of it were in use.
    pub fn memory_bytes(&self) -> usize {
        self.crcs.len() * 4 + (self.live.words.len() + self.dirty.words.len() + self.refs.len()) * 8
    }
}

/// One bit for each block of the device.
pub struct Bits {
    words: Vec<u64>,
    blocks: u32,
}

impl Bits {
    fn new(blocks: u32) -> Bits {
        Bits { words: vec![0; blocks.div_ceil(u64::BITS) as usize], blocks }
    }

    /// The bit of a block.
    pub fn get(&self, position: Position) -> bool {
        debug_assert!(position < self.blocks);
        self.words[(position / u64::BITS) as usize] >> (position % u64::BITS) & 1 != 0
    }

    /// Sets the bit of a block; tells whether that changed it.
    pub fn set(&mut self, position: Position) -> bool {
        debug_assert!(position < self.blocks);
        let (word, bit) =
            (&mut self.words[(position / u64::BITS) as usize], 1 << (position % u64::BITS));
        let changed = *word & bit == 0;
        *word |= bit;
        changed
    }

    /// Clears the bit of a block; tells whether that changed it.
    pub fn clear(&mut self, position: Position) -> bool {
        debug_assert!(position < self.blocks);
        let (word, bit) =
            (&mut self.words[(position / u64::BITS) as usize], 1 << (position % u64::BITS));
        let changed = *word & bit != 0;
        *word &= !bit;
        changed
    }

    /// Sets the bits of a stretch; returns how many were not set.
    pub fn set_range(&mut self, range: Range<Position>) -> u32 {
        self.check(&range);
        bit_masks(range)
            .map(|(word, mask)| {
                let changed = mask & !self.words[word];
                self.words[word] |= mask;
                changed.count_ones()
            })
            .sum()
    }

    /// Clears the bits of a stretch; returns how many were set.
    pub fn clear_range(&mut self, range: Range<Position>) -> u32 {
        self.check(&range);
        bit_masks(range)
            .map(|(word, mask)| {
                let changed = mask & self.words[word];
                self.words[word] &= !mask;
                changed.count_ones()
            })
            .sum()
    }

    /// How many bits of a stretch are set.
    pub fn count(&self, range: Range<Position>) -> u32 {
        self.check(&range);
        bit_masks(range).map(|(word, mask)| (self.words[word] & mask).count_ones()).sum()
    }

    /// The blocks of a stretch whose bits are set, in order.
    pub fn iter(&self, range: Range<Position>) -> impl Iterator<Item = Position> + '_ {
        self.check(&range);
        bit_masks(range).flat_map(|(word, mask)| {
            let mut left = self.words[word] & mask;
            std::iter::from_fn(move || {
                (left != 0).then(|| {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    word as Position * u64::BITS + bit
                })
            })
        })
    }

    /// Copies the bits of a stretch out: the first block is the lowest bit of the first byte; the
    /// bits after the last block are zero.
    ///
    /// # Panics
    /// If `out` is not exactly as long as that takes.
    pub fn copy_out(&self, range: Range<Position>, out: &mut [u8]) {
        self.check(&range);
        assert_eq!(out.len(), range.len().div_ceil(8), "a byte for each eight blocks");
        for (chunk, start) in out.chunks_mut(8).zip(range.clone().step_by(64)) {
            let bits = self.word_at(start, (range.end - start).min(64));
            chunk.copy_from_slice(&bits.to_le_bytes()[..chunk.len()]);
        }
    }

    /// Sets the bits of a stretch from bytes as [`Bits::copy_out`] writes them; the bits after the
    /// last block are ignored.
    ///
    /// # Panics
    /// If `bytes` is not exactly as long as that takes.
    pub fn copy_in(&mut self, range: Range<Position>, bytes: &[u8]) {
        self.check(&range);
        assert_eq!(bytes.len(), range.len().div_ceil(8), "a byte for each eight blocks");
        self.clear_range(range.clone());
        for (chunk, start) in bytes.chunks(8).zip(range.clone().step_by(64)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let n = (range.end - start).min(64);
            let bits = u64::from_le_bytes(word) & u64::MAX >> (64 - n);
            let (at, shift) = ((start / 64) as usize, start % 64);
            self.words[at] |= bits << shift;
            if shift + n > 64 {
                self.words[at + 1] |= bits >> (64 - shift);
            }
        }
    }

    /// The bits of `n` (1 to 64) blocks from `start`, in the lowest bits.
    fn word_at(&self, start: Position, n: u32) -> u64 {
        let (at, shift) = ((start / 64) as usize, start % 64);
        let mut bits = self.words[at] >> shift;
        if shift + n > 64 {
            bits |= self.words[at + 1] << (64 - shift);
        }
        bits & u64::MAX >> (64 - n)
    }

    fn check(&self, range: &Range<Position>) {
        assert!(
            range.start <= range.end && range.end <= self.blocks,
            "blocks {range:?} of {}",
            self.blocks
        );
    }
}

/// The words that the bits of a stretch of blocks are in, each with the mask of those bits.
fn bit_masks(range: Range<Position>) -> impl Iterator<Item = (usize, u64)> {
    masks(range.start.into()..range.end.into())
}

/// The words that a stretch of bits touches, each with the mask of those bits.
fn masks(bits: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = if bits.is_empty() { 0..0 } else { bits.start / 64..bits.end.div_ceil(64) };
    words.map(move |word| {
        let first = bits.start.max(word * 64) - word * 64;
        let end = (bits.end - word * 64).min(64);
        (word as usize, u64::MAX >> (64 - (end - first)) << first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCKS: u32 = 700;

    fn range() -> impl Strategy<Value = Range<u32>> {
        (0..=BLOCKS, 0..=BLOCKS).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    #[test]
    fn counters_stay_at_their_highest_value() {
        let mut marks = Marks::new(100);
        for expected in [1, 2, 3, 3, 3] {
            marks.touch(33);
            assert_eq!(marks.refs(33), expected);
        }
        assert_eq!((marks.refs(32), marks.refs(34)), (0, 0));
        marks.set_refs(34, 2);
        marks.clear_refs(33);
        assert_eq!((marks.refs(33), marks.refs(34)), (0, 2));
        marks.set_refs(34, 200);
        assert_eq!((marks.refs(33), marks.refs(34), marks.refs(35)), (0, 3, 0));
    }

    #[test]
    fn each_block_of_a_larger_device_has_marks_of_its_own() {
        let mut marks = Marks::new(9000);
        for position in 0..9000 {
            marks.set_live(position);
            (0..position % 4).for_each(|_| marks.touch(position));
        }
        assert!((0..9000).all(|position| u32::from(marks.refs(position)) == position % 4));
        marks.clear(6000..7001);
        for position in 0..9000 {
            let inside = (6000..7001).contains(&position);
            assert_eq!(marks.is_live(position), !inside);
            assert_eq!(u32::from(marks.refs(position)), if inside { 0 } else { position % 4 });
        }
        assert_eq!(
            (marks.live().count(5990..6010), marks.live().iter(0..9000).count()),
            (10, 7999)
        );
    }

    #[test]
    fn changes_are_told_once() {
        let mut marks = Marks::new(65);
        assert!(marks.set_live(64) && !marks.set_live(64) && marks.is_live(64));
        assert!(
            marks.set_dirty(0) && !marks.set_dirty(0) && marks.is_dirty(0) && !marks.is_dirty(64)
        );
        assert!(marks.clear_live(64) && !marks.clear_live(64) && !marks.is_live(64));
        assert!(marks.clear_dirty(0) && !marks.clear_dirty(0));
        marks.set_crc(64, 7);
        assert_eq!((marks.crc(64), marks.crcs(63..65)), (7, &[0, 7][..]));
    }

    #[test]
    fn a_block_of_the_device_costs_four_and_a_half_bytes() {
        assert_eq!(Marks::new(1 << 20).memory_bytes(), (1 << 20) * 9 / 2);
    }

    #[test]
    #[should_panic(expected = "of 700")]
    fn a_stretch_behind_the_last_block_is_noticed() {
        Bits::new(BLOCKS).count(BLOCKS - 1..BLOCKS + 1);
    }

    proptest! {
        #[test]
        fn bits_behave_like_a_list_of_booleans(steps in prop::collection::vec((0u8..6, range(), any::<u64>()), 1..60)) {
            let mut bits = Bits::new(BLOCKS);
            let mut model = vec![false; BLOCKS as usize];
            for (what, range, seed) in steps {
                let span = range.start as usize..range.end as usize;
                match what {
                    0 => {
                        let unset = model[span.clone()].iter().filter(|b| !**b).count();
                        prop_assert_eq!(bits.set_range(range) as usize, unset);
                        model[span].fill(true);
                    }
                    1 => {
                        let set = model[span.clone()].iter().filter(|b| **b).count();
                        prop_assert_eq!(bits.clear_range(range) as usize, set);
                        model[span].fill(false);
                    }
                    2 if range.start < BLOCKS => {
                        prop_assert_eq!(bits.set(range.start), !model[range.start as usize]);
                        model[range.start as usize] = true;
                    }
                    3 if range.start < BLOCKS => {
                        prop_assert_eq!(bits.clear(range.start), model[range.start as usize]);
                        model[range.start as usize] = false;
                    }
                    4 => {
                        let bytes: Vec<u8> = (0..span.len().div_ceil(8)).map(|i| (seed >> (i % 8 * 7)) as u8).collect();
                        bits.copy_in(range, &bytes);
                        for (i, bit) in model[span].iter_mut().enumerate() {
                            *bit = bytes[i / 8] >> (i % 8) & 1 != 0;
                        }
                    }
                    _ => {
                        let mut out = vec![0xaa; span.len().div_ceil(8)];
                        bits.copy_out(range.clone(), &mut out);
                        let mut expected = vec![0u8; out.len()];
                        for (i, _) in model[span.clone()].iter().enumerate().filter(|(_, b)| **b) {
                            expected[i / 8] |= 1 << (i % 8);
                        }
                        prop_assert_eq!(out, expected);
                        let set: Vec<u32> = range.clone().filter(|&p| model[p as usize]).collect();
                        prop_assert_eq!(bits.count(range.clone()) as usize, set.len());
                        prop_assert_eq!(bits.iter(range).collect::<Vec<_>>(), set);
                    }
                }
                prop_assert!((0..BLOCKS).all(|p| bits.get(p) == model[p as usize]));
            }
        }

        #[test]
        fn a_cleared_stretch_keeps_only_its_checksums(range in range()) {
            let mut marks = Marks::new(BLOCKS as usize);
            for position in 0..BLOCKS {
                marks.set_live(position);
                marks.set_dirty(position);
                marks.set_refs(position, 1 + (position % 3) as u8);
                marks.set_crc(position, position);
            }
            marks.clear(range.clone());
            for position in 0..BLOCKS {
                let inside = range.contains(&position);
                prop_assert_eq!(marks.is_live(position), !inside);
                prop_assert_eq!(marks.is_dirty(position), !inside);
                prop_assert_eq!(marks.refs(position), if inside { 0 } else { 1 + (position % 3) as u8 });
                prop_assert_eq!(marks.crc(position), position);
            }
        }
    }
}
