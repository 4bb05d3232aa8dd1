//! On the way of a request through the reactor nothing is allocated.

mod door;

use door::{Door, memory};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use tidepool_nbd::Command;

/// Counts what the watched thread takes from the heap.
struct Counting;

static WATCHED: AtomicI32 = AtomicI32::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);

fn count() {
    let watched = WATCHED.load(Relaxed);
    // SAFETY: gettid takes and returns nothing but a number.
    if watched != 0 && unsafe { libc::gettid() } == watched {
        COUNT.fetch_add(1, Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller vouches.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller vouches.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller vouches.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The reactor's thread, by its name.
fn reactor() -> i32 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("our own threads");
    tasks
        .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
        .find(|id: &i32| {
            std::fs::read_to_string(format!("/proc/self/task/{id}/comm"))
                .is_ok_and(|name| name.trim() == "reactor")
        })
        .expect("the reactor runs")
}

/// A mixed load with many requests in flight, of every kind that clients send all the time.
fn load(door: &Door, rounds: u64) {
    let mut client = door.client();
    let mut tag = 0;
    let data = vec![3; 300_000];
    for round in 0..rounds {
        for n in 0..8 {
            let at = (round * 8 + n) % 500;
            client.submit_write(tag, at * 4096, &data[..4096], false).expect("queued");
            client.submit_read(tag + 1, (499 - at) * 4096, vec![0; 4096]).expect("queued");
            tag += 2;
        }
        client.submit_write(tag, 4096 * 17, &data, true).expect("queued");
        client.submit_read(tag + 1, 512 * 3, vec![0; 600_000]).expect("queued");
        client.submit(tag + 2, Command::Flush, 0, 0).expect("queued");
        client.submit(tag + 3, Command::Trim { fua: false }, 3 << 20, 1 << 16).expect("queued");
        let zeroes = Command::WriteZeroes { fua: false, no_hole: false, fast_zero: false };
        client.submit(tag + 4, zeroes, 2 << 20, 1 << 16).expect("queued");
        tag += 5;
        while client.in_flight() > 0 {
            client.receive().expect("an answer").result.expect("success");
        }
    }
}

#[test]
fn the_way_of_a_request_allocates_nothing() {
    let door = Door::open(4 << 20, memory());
    // Connections and tables take their memory when they come into being.
    load(&door, 20);
    let mut client = door.client();
    client.write(0, &[1; 4096]).expect("the connection is up");
    let settled = door.status().reactor.requests;
    WATCHED.store(reactor(), Relaxed);
    for round in 0..2000u64 {
        client.write(round % 900 * 4096, &[1; 4096]).expect("written");
        client.read(round % 900 * 4096, &mut [0; 4096]).expect("read");
        client.flush().expect("flushed");
    }
    WATCHED.store(0, Relaxed);
    assert_eq!(COUNT.load(Relaxed), 0, "allocations on the way of single requests");
    // The same with many in flight; the second connection's own tables are what may be counted.
    WATCHED.store(reactor(), Relaxed);
    load(&door, 1);
    let connecting = COUNT.swap(0, Relaxed);
    load(&door, 200);
    WATCHED.store(0, Relaxed);
    let counted = COUNT.load(Relaxed);
    assert!(
        counted <= connecting,
        "{counted} allocations, of which {connecting} are for a connection"
    );
    assert!(door.status().reactor.requests - settled > 10_000, "the load was real");
}
