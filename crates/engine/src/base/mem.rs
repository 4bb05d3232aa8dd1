//! The memory that requests, log appends and drains travel in: one aligned arena, allocated once,
//! handed out by a buddy allocator without touching the heap. The driver registers it with the
//! kernel.

use crate::api::BLOCK_BYTES;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

pub use super::slab::Slab;
pub use crate::api::Buf;

/// Heap memory aligned to a block, for O_DIRECT transfers outside of the hot path.
pub struct AlignedBuf {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: AlignedBuf owns its memory alone, like a Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references give only shared access to the bytes, like a Box<[u8]>.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes, aligned to [`BLOCK_BYTES`]; `len` must not be zero.
    pub fn zeroed(len: usize) -> AlignedBuf {
        assert!(len > 0, "an aligned buffer has at least one byte");
        let layout = Layout::from_size_align(len, BLOCK_BYTES).expect("a buffer size within isize");
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        AlignedBuf { ptr, len }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.len, BLOCK_BYTES).expect("checked at allocation");
        // SAFETY: allocated in `zeroed` with the same layout and freed only here.
        unsafe { dealloc(self.ptr, layout) }
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: ptr is valid for len initialised bytes while self lives.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and self is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

/// Smallest allocation: one block.
const ORDER_MIN: u32 = BLOCK_BYTES.trailing_zeros();
/// Largest allocation: 2 MiB, which holds the largest log append.
const ORDER_MAX: u32 = 21;
/// Number of size classes.
const ORDERS: usize = (ORDER_MAX - ORDER_MIN + 1) as usize;
/// End mark of a free list.
const NONE: u32 = u32::MAX;

/// The arena and its buddy allocator. Blocks of 4 KiB to 2 MiB; every operation is O(log n) and
/// allocates nothing.
pub struct Arena {
    memory: *mut u8,
    len: usize,
    /// What the allocator gave; `memory` is the first aligned byte in it.
    allocated: (*mut u8, Layout),
    /// Per size class, the first free chunk (in blocks), linked through `next` and `prev`.
    heads: [u32; ORDERS],
    next: Vec<u32>,
    prev: Vec<u32>,
    /// Per block: order of the chunk that starts here, with [`FREE`] while it is free; 0 inside a
    /// chunk.
    state: Vec<u8>,
    free_bytes: usize,
}

/// Mark in [`Arena::state`] of a free chunk.
const FREE: u8 = 0x80;

// SAFETY: the arena owns its memory; access goes through &self / &mut self.
unsafe impl Send for Arena {}

impl Arena {
    /// An arena of `len` bytes, rounded up to 2 MiB.
    pub fn new(len: usize) -> Arena {
        let chunk = 1usize << ORDER_MAX;
        let len = len.div_ceil(chunk).max(1) * chunk;
        assert!(len <= u32::MAX as usize, "an arena is smaller than 4 GiB");
        // With a larger alignment the allocator would write the zeroes itself; so the kernel has
        // them, where they are used.
        let layout = Layout::from_size_align(len + chunk, 1).expect("an arena size within isize");
        // SAFETY: the layout has a non-zero size.
        let allocated = unsafe { alloc_zeroed(layout) };
        if allocated.is_null() {
            handle_alloc_error(layout);
        }
        let before = (allocated as usize).next_multiple_of(chunk) - allocated as usize;
        // SAFETY: `before` is less than `chunk`, and `len` bytes are left behind it.
        let memory = unsafe { allocated.add(before) };
        let blocks = len >> ORDER_MIN;
        let mut arena = Arena {
            memory,
            len,
            allocated: (allocated, layout),
            heads: [NONE; ORDERS],
            next: vec![NONE; blocks],
            prev: vec![NONE; blocks],
            state: vec![0; blocks],
            free_bytes: 0,
        };
        for start in (0..blocks as u32).step_by(chunk >> ORDER_MIN).rev() {
            arena.push(start, ORDER_MAX);
        }
        arena.free_bytes = len;
        arena
    }

    /// First byte of the arena, for registration with the kernel. The memory does not move.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory
    }

    /// Size of the arena in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// Bytes not handed out.
    pub fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// A buffer of `len` bytes (its first byte block-aligned), or `None` when there is no room or
    /// `len` is zero or above 2 MiB. The content is whatever was there before.
    pub fn alloc(&mut self, len: usize) -> Option<Buf> {
        if len == 0 || len > 1 << ORDER_MAX {
            return None;
        }
        let order = order_of(len);
        let mut from = order;
        while from <= ORDER_MAX && self.heads[(from - ORDER_MIN) as usize] == NONE {
            from += 1;
        }
        if from > ORDER_MAX {
            return None;
        }
        let start = self.heads[(from - ORDER_MIN) as usize];
        self.unlink(start, from);
        while from > order {
            from -= 1;
            self.push(start + (1 << (from - ORDER_MIN)), from);
        }
        self.state[start as usize] = order as u8;
        self.free_bytes -= 1 << order;
        Some(Buf { offset: start << ORDER_MIN, len: len as u32 })
    }

    /// A buffer of any size that is never given back. Nothing was handed out before it.
    pub(crate) fn set_aside(&mut self, len: usize) -> Buf {
        assert_eq!(self.free_bytes, self.len, "what is set aside comes first");
        let chunk = 1 << ORDER_MAX;
        for at in 0..len.div_ceil(chunk) {
            let part = self.alloc(chunk).expect("the arena holds what is set aside");
            assert_eq!(part.offset as usize, at * chunk, "chunks are handed out in their order");
        }
        Buf { offset: 0, len: len as u32 }
    }

    /// Gives back a buffer that [`Arena::alloc`] returned (with its original offset; the length may
    /// have been cut).
    ///
    /// # Panics
    /// If the buffer is not handed out: a double free would hand the same bytes to two owners.
    pub fn free(&mut self, buf: Buf) {
        let mut start = buf.offset >> ORDER_MIN;
        let mut order = u32::from(self.state[start as usize]);
        assert!(
            (ORDER_MIN..=ORDER_MAX).contains(&order) && buf.offset.trailing_zeros() >= ORDER_MIN,
            "free of a buffer that is not handed out: {buf:?}"
        );
        self.free_bytes += 1 << order;
        self.state[start as usize] = 0;
        while order < ORDER_MAX {
            let buddy = start ^ (1 << (order - ORDER_MIN));
            if self.state[buddy as usize] != order as u8 | FREE {
                break;
            }
            self.unlink(buddy, order);
            start = start.min(buddy);
            order += 1;
        }
        self.push(start, order);
    }

    /// The bytes of a buffer.
    pub fn bytes(&self, buf: Buf) -> &[u8] {
        self.check(buf);
        // SAFETY: in bounds by `check`, initialised at allocation, and borrowed from self.
        unsafe {
            std::slice::from_raw_parts(self.memory.add(buf.offset as usize), buf.len as usize)
        }
    }

    /// The bytes of a buffer, to change.
    pub fn bytes_mut(&mut self, buf: Buf) -> &mut [u8] {
        self.check(buf);
        // SAFETY: in bounds by `check`, initialised at allocation, and self is borrowed
        // exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.add(buf.offset as usize), buf.len as usize)
        }
    }

    /// Copies `from` to `to`; the two have the same length and do not overlap.
    pub fn copy(&mut self, from: Buf, to: Buf) {
        self.check(from);
        self.check(to);
        assert_eq!(from.len, to.len, "copy between buffers of one length");
        assert!(
            from.offset + from.len <= to.offset || to.offset + to.len <= from.offset,
            "copy between buffers that do not overlap"
        );
        // SAFETY: both in bounds by `check`, disjoint by the assertion above.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.memory.add(from.offset as usize),
                self.memory.add(to.offset as usize),
                from.len as usize,
            );
        }
    }

    fn check(&self, buf: Buf) {
        assert!(
            buf.offset as usize + buf.len as usize <= self.len,
            "{buf:?} is outside of the arena"
        );
    }

    fn push(&mut self, start: u32, order: u32) {
        let class = (order - ORDER_MIN) as usize;
        let head = self.heads[class];
        self.next[start as usize] = head;
        self.prev[start as usize] = NONE;
        if head != NONE {
            self.prev[head as usize] = start;
        }
        self.heads[class] = start;
        self.state[start as usize] = order as u8 | FREE;
    }

    fn unlink(&mut self, start: u32, order: u32) {
        let (prev, next) = (self.prev[start as usize], self.next[start as usize]);
        if prev == NONE {
            self.heads[(order - ORDER_MIN) as usize] = next;
        } else {
            self.next[prev as usize] = next;
        }
        if next != NONE {
            self.prev[next as usize] = prev;
        }
        self.state[start as usize] = 0;
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let (allocated, layout) = self.allocated;
        // SAFETY: allocated in `new` with this layout and freed only here.
        unsafe { dealloc(allocated, layout) }
    }
}

/// Size class of an allocation.
fn order_of(len: usize) -> u32 {
    len.next_power_of_two().trailing_zeros().max(ORDER_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn everything_freed_is_one_piece_again() {
        let mut arena = Arena::new(4 << 20);
        let all: Vec<Buf> = std::iter::from_fn(|| arena.alloc(5000)).collect();
        assert_eq!(all.len(), (4 << 20) / 8192);
        assert_eq!(arena.free_bytes(), 0);
        all.into_iter().for_each(|b| arena.free(b));
        assert!(arena.alloc(2 << 20).is_some() && arena.alloc(2 << 20).is_some());
        assert!(arena.alloc(1).is_none());
    }

    #[test]
    #[should_panic(expected = "not handed out")]
    fn a_double_free_is_noticed() {
        let mut arena = Arena::new(2 << 20);
        let buf = arena.alloc(4096).expect("room");
        arena.free(buf);
        arena.free(buf);
    }

    #[test]
    #[should_panic(expected = "is outside of the arena")]
    fn a_buffer_of_another_arena_is_noticed() {
        let (large, small) = (Arena::new(8 << 20), Arena::new(2 << 20));
        let mut large = large;
        let buf = std::iter::from_fn(|| large.alloc(4096))
            .find(|buf| buf.offset >= 2 << 20)
            .expect("room");
        small.bytes(buf);
    }

    #[test]
    fn no_buffer_is_empty_or_larger_than_the_largest_chunk() {
        let mut arena = Arena::new(4 << 20);
        assert_eq!(arena.alloc(0), None);
        assert_eq!(arena.alloc((2 << 20) + 1), None);
        assert_eq!(arena.alloc(2 << 20).map(|buf| buf.len), Some(2 << 20));
    }

    proptest! {
        #[test]
        fn live_buffers_never_overlap(steps in prop::collection::vec((1usize..300_000, any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
            let mut arena = Arena::new(8 << 20);
            let mut live: Vec<Buf> = Vec::new();
            for (len, which, alloc) in steps {
                if alloc || live.is_empty() {
                    if let Some(buf) = arena.alloc(len) {
                        prop_assert_eq!(buf.offset as usize % BLOCK_BYTES, 0);
                        for other in &live {
                            prop_assert!(buf.offset + buf.len <= other.offset || other.offset + other.len <= buf.offset);
                        }
                        live.push(buf);
                    }
                } else {
                    let buf = live.swap_remove(which.index(live.len()));
                    arena.free(buf);
                }
            }
            live.drain(..).for_each(|b| arena.free(b));
            prop_assert_eq!(arena.free_bytes(), arena.len_bytes());
        }
    }
}
