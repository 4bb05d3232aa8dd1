//! Large aligned memory is mapped as it is asked for. The system's heap zeroes it by writing to all
//! of it, and most of a core's arena is never looked at here: cores are opened several times for
//! each input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

/// What the heap fills with zeroes, above this size.
const LARGE_BYTES: usize = 1 << 20;

struct Mapping;

#[global_allocator]
static MEMORY: Mapping = Mapping;

fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE_BYTES && layout.align() > 16
}

/// The bytes of a mapping: whole pages.
fn pages(layout: Layout) -> usize {
    layout.size().next_multiple_of(4096)
}

/// Zeroed memory, aligned by giving back what stands before and behind it.
fn map(layout: Layout) -> *mut u8 {
    let (len, align) = (pages(layout), layout.align().max(4096));
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping of no file is nobody's but ours.
    let mapped = unsafe { libc::mmap(null_mut(), len + align, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return null_mut();
    }
    let mapped = mapped.cast::<u8>();
    let before = mapped.align_offset(align);
    // SAFETY: both parts are inside of the mapping, in whole pages, and outside of what is handed
    // out.
    unsafe {
        if before > 0 {
            libc::munmap(mapped.cast(), before);
        }
        if before < align {
            libc::munmap(mapped.add(before + len).cast(), align - before);
        }
        mapped.add(before)
    }
}

// SAFETY: memory is either the system allocator's or a mapping of its own, by its layout alone;
// both fulfil the contract.
unsafe impl GlobalAlloc for Mapping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map(layout);
        }
        // SAFETY: as the caller vouches.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map(layout);
        }
        // SAFETY: as the caller vouches.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if is_large(layout) {
            // SAFETY: `map` has made it with this layout.
            unsafe { libc::munmap(memory.cast(), pages(layout)) };
            return;
        }
        // SAFETY: as the caller vouches.
        unsafe { System.dealloc(memory, layout) }
    }
}
