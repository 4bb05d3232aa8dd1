//! Memory for the run tables of an index: slots of a few sizes, each size kept dense.
//!
//! A general-purpose heap strands the small chunks that tables leave behind as they all grow. Here
//! a freed slot is filled with the last one of its size, so that a size never holds more than one
//! partly used page; and its first pages are small, so that many small volumes do not waste much
//! either. The price is that a table moves when another one of its size is freed; the slab
//! therefore knows the owner of every slot and says whose slot has moved.

use zerocopy::{FromBytes, IntoBytes};

/// Words of one page: eight of the largest slots, about 32 KiB.
const PAGE_WORDS: usize = 8 * LARGEST_WORDS;
/// Pages of each size that are small.
const SMALL_PAGES: u32 = 32;
/// A small page is this part of a page.
const SMALL_SHARE: u32 = 16;
/// Words of the largest slot: the owner and one position for each block of an object.
const LARGEST_WORDS: usize = 1 + super::OBJECT_BLOCKS;
/// Bits of a slot number that tell its place in its page.
const PLACE_BITS: u32 = 12;
/// Bytes that the heap spends on a page besides its content.
const HEAP_OVERHEAD_BYTES: usize = 16;

/// Number of sizes, the flat one included.
pub(super) const SIZES: usize = SIZE_TABLE.len();
/// The size whose slots hold a position for every block of an object, without keys.
pub(super) const FLAT: u8 = (SIZES - 1) as u8;

/// What a slot of one size looks like.
#[derive(Clone, Copy)]
struct Size {
    /// Runs that fit; the positions of all blocks in the flat size.
    runs: u16,
    /// Words: the owner, a position for each run, half a word of key for each run.
    words: u16,
    /// Slots of one page.
    per_page: u16,
}

impl Size {
    /// Slots of one small page.
    fn per_small_page(&self) -> u32 {
        (u32::from(self.per_page) / SMALL_SHARE).max(1)
    }

    /// The number of the slot at `rank` among the slots of this size.
    fn slot_at(&self, rank: u32) -> u32 {
        let (small, full) = (self.per_small_page(), u32::from(self.per_page));
        let (page, place) = match rank.checked_sub(SMALL_PAGES * small) {
            None => (rank / small, rank % small),
            Some(rank) => (SMALL_PAGES + rank / full, rank % full),
        };
        (page << PLACE_BITS) | place
    }
}

/// The sizes: about a sixteenth more runs each time, then rounded up to what fills a page.
const SIZE_TABLE: [Size; count_sizes()] = sizes();

const fn size_of_runs(want: usize) -> Size {
    let per_page = PAGE_WORDS / (1 + want + want / 2);
    let words = PAGE_WORDS / per_page;
    let runs = (words - 1) * 2 / 3 / 2 * 2;
    Size { runs: runs as u16, words: (1 + runs + runs / 2) as u16, per_page: per_page as u16 }
}

const fn next_want(runs: usize) -> usize {
    let step = runs / 16 / 2 * 2;
    runs + if step < 2 { 2 } else { step }
}

/// Runs above which the flat form takes no more room.
const RUNS_MAX: usize = 680;

const fn count_sizes() -> usize {
    let (mut n, mut want) = (0, 2);
    while want <= RUNS_MAX {
        want = next_want(size_of_runs(want).runs as usize);
        n += 1;
    }
    n + 1
}

const fn sizes() -> [Size; count_sizes()] {
    let flat = Size { runs: super::OBJECT_BLOCKS as u16, words: LARGEST_WORDS as u16, per_page: 8 };
    let mut table = [flat; count_sizes()];
    let (mut n, mut want) = (0, 2);
    while want <= RUNS_MAX {
        table[n] = size_of_runs(want);
        want = next_want(table[n].runs as usize);
        n += 1;
    }
    table
}

type Page = Box<[u32]>;

/// All slots of one size: the first `len` places of its pages are in use.
#[derive(Default)]
struct Store {
    pages: Vec<Page>,
    len: u32,
}

/// The slots of all sizes.
pub(super) struct Slab {
    stores: [Store; SIZES],
    /// Kept for reuse, so that a size at the edge of a page does not go to the heap every time.
    spare: Option<Page>,
}

/// The page of a slot, and its words there.
fn place(slot: u32, size: u8) -> (usize, std::ops::Range<usize>) {
    let words = SIZE_TABLE[size as usize].words as usize;
    let first = (slot & ((1 << PLACE_BITS) - 1)) as usize * words;
    ((slot >> PLACE_BITS) as usize, first..first + words)
}

/// The positions and keys in the words of a slot.
fn parts(words: &[u32], size: u8) -> (&[u32], &[u16]) {
    let (positions, keys) = words[1..].split_at(Slab::capacity(size));
    (positions, <[u16]>::ref_from_bytes(keys.as_bytes()).expect("words are aligned for keys"))
}

fn parts_mut(words: &mut [u32], size: u8) -> (&mut [u32], &mut [u16]) {
    let (positions, keys) = words[1..].split_at_mut(Slab::capacity(size));
    (positions, <[u16]>::mut_from_bytes(keys.as_mut_bytes()).expect("words are aligned for keys"))
}

impl Slab {
    pub(super) fn new() -> Slab {
        Slab { stores: std::array::from_fn(|_| Store::default()), spare: None }
    }

    /// Runs that fit into a slot of a size.
    pub(super) fn capacity(size: u8) -> usize {
        SIZE_TABLE[size as usize].runs as usize
    }

    /// The smallest size that holds this many runs; the flat one when no other does.
    pub(super) fn size_for(runs: usize) -> u8 {
        SIZE_TABLE[..SIZES - 1].partition_point(|s| (s.runs as usize) < runs) as u8
    }

    /// A slot for `owner`. Its content is whatever was there before.
    pub(super) fn alloc(&mut self, size: u8, owner: u32) -> u32 {
        let store = &mut self.stores[size as usize];
        let shape = &SIZE_TABLE[size as usize];
        let slot = shape.slot_at(store.len);
        let (page, range) = place(slot, size);
        if page == store.pages.len() {
            let fresh = if page < SMALL_PAGES as usize {
                vec![0; shape.per_small_page() as usize * shape.words as usize].into_boxed_slice()
            } else {
                self.spare.take().unwrap_or_else(|| vec![0; PAGE_WORDS].into_boxed_slice())
            };
            store.pages.push(fresh);
        }
        store.len += 1;
        store.pages[page][range.start] = owner;
        slot
    }

    /// Frees a slot. The last slot of its size takes its place: its owner is returned, unless it
    /// was the freed one itself.
    pub(super) fn free(&mut self, size: u8, slot: u32) -> Option<u32> {
        let store = &mut self.stores[size as usize];
        store.len -= 1;
        let last = SIZE_TABLE[size as usize].slot_at(store.len);
        let (to_page, to) = place(slot, size);
        let (from_page, from) = place(last, size);
        let mut moved = None;
        if last != slot {
            moved = Some(store.pages[from_page][from.start]);
            if from_page == to_page {
                store.pages[to_page].copy_within(from.clone(), to.start);
            } else {
                let [target, source] = store
                    .pages
                    .get_disjoint_mut([to_page, from_page])
                    .expect("two pages of the store");
                target[to].copy_from_slice(&source[from.clone()]);
            }
        }
        if from.start == 0 {
            let page = store.pages.pop().expect("the page of the last slot");
            if page.len() == PAGE_WORDS {
                self.spare = Some(page);
            }
            if store.pages.is_empty() {
                store.pages = Vec::new();
            }
        }
        moved
    }

    /// The positions and keys of a slot, all that fit. A flat slot has no keys.
    pub(super) fn table(&self, size: u8, slot: u32) -> (&[u32], &[u16]) {
        let (page, range) = place(slot, size);
        parts(&self.stores[size as usize].pages[page][range], size)
    }

    /// The positions and keys of a slot, to change.
    pub(super) fn table_mut(&mut self, size: u8, slot: u32) -> (&mut [u32], &mut [u16]) {
        let (page, range) = place(slot, size);
        parts_mut(&mut self.stores[size as usize].pages[page][range], size)
    }

    /// Copies the first `runs` runs of a slot's table to a slot of another size.
    pub(super) fn copy(&mut self, from: (u8, u32), to: (u8, u32), runs: usize) {
        let stores = self.stores.get_disjoint_mut([from.0 as usize, to.0 as usize]);
        let [source, target] = stores.expect("a table moves between sizes");
        let (page, range) = place(from.1, from.0);
        let (from_positions, from_keys) = parts(&source.pages[page][range], from.0);
        let (page, range) = place(to.1, to.0);
        let (positions, keys) = parts_mut(&mut target.pages[page][range], to.0);
        positions[..runs].copy_from_slice(&from_positions[..runs]);
        keys[..runs].copy_from_slice(&from_keys[..runs]);
    }

    /// Bytes of memory in use.
    pub(super) fn memory_bytes(&self) -> usize {
        let pages = self.stores.iter().flat_map(|s| &s.pages).chain(&self.spare);
        let tables = self
            .stores
            .iter()
            .map(|s| s.pages.capacity() * size_of::<Page>() + HEAP_OVERHEAD_BYTES);
        pages.map(|p| p.len() * 4 + HEAP_OVERHEAD_BYTES).sum::<usize>() + tables.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_by_small_steps_and_fill_their_pages() {
        for (i, size) in SIZE_TABLE.iter().enumerate() {
            let used = size.words as usize * size.per_page as usize;
            assert!(
                used <= PAGE_WORDS && used * 100 >= PAGE_WORDS * 97,
                "size {i} wastes its pages"
            );
            assert!((size.per_page as usize) < 1 << PLACE_BITS && size.per_small_page() > 0);
            if i > 0 && i + 1 < SIZES {
                let before = SIZE_TABLE[i - 1].runs as usize;
                assert!(
                    size.runs as usize > before
                        && size.runs as usize <= before + (before / 7).max(2)
                );
            }
        }
        assert!(SIZE_TABLE[SIZES - 2].words <= SIZE_TABLE[SIZES - 1].words);
        assert_eq!(Slab::capacity(FLAT), super::super::OBJECT_BLOCKS);
    }

    #[test]
    fn a_freed_slot_is_filled_with_the_last_one() {
        let mut slab = Slab::new();
        for size in 0..SIZES as u8 {
            let shape = SIZE_TABLE[size as usize];
            let n = SMALL_PAGES * shape.per_small_page() + u32::from(shape.per_page) * 2 + 1;
            let slots: Vec<u32> = (0..n).map(|owner| slab.alloc(size, owner)).collect();
            for (owner, &slot) in slots.iter().enumerate() {
                slab.table_mut(size, slot).0.fill(owner as u32);
            }
            assert_eq!(slab.free(size, slots[0]), Some(n - 1));
            assert!(slab.table(size, slots[0]).0.iter().all(|&p| p == n - 1));
            assert_eq!(slab.free(size, slots[n as usize - 2]), None);
            for &slot in slots[..n as usize - 2].iter().rev() {
                slab.free(size, slot);
            }
            assert_eq!(slab.stores[size as usize].len, 0);
            assert!(slab.stores[size as usize].pages.is_empty());
        }
    }
}
