//! The newest segments in memory: the drain takes from there what it finds, and only that.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::{Engine, EngineConfig};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECOND: Nanos = 1_000_000_000;
const SEGMENT: u64 = 256 << 10;

/// A volume with memory for so many segments of the log; the backend is stopped.
fn world(segments: u64, drain: DrainOrder) -> World {
    let volume = VolumeSpec { drain, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::with_segments(64 * MIB, SEGMENT as u32, &[volume]);
    mirror(&mut w, segments);
    w.images[0].fill(0x11);
    w.flush(0);
    w.backend_stopped = true;
    w
}

/// The daemon dies and is started again with a mirror.
fn mirror(w: &mut World, segments: u64) {
    let mirror_bytes = (segments * SEGMENT) as usize;
    let config = EngineConfig { mirror_bytes, ..EngineConfig::small() };
    w.engine = Engine::open(&mut w.device, config, w.now).expect("open").0;
    w.attach(true);
}

/// Writes so many single blocks, no two of which follow each other; returns the image that they
/// make of this one.
fn write(w: &mut World, image: &[u8], blocks: std::ops::Range<u64>) -> Vec<u8> {
    let mut image = image.to_vec();
    for at in blocks {
        let offset = at * 37 % 4_096 * BLOCK;
        let data = pattern(at + 1, BLOCK_BYTES);
        w.write(0, offset, &data);
        image[offset as usize..][..BLOCK_BYTES].copy_from_slice(&data);
    }
    image
}

/// Lets everything go to the image; returns how many reads of the device that took.
fn drain(w: &mut World) -> u64 {
    let before = w.device_reads;
    w.backend_stopped = false;
    w.drain(0);
    w.device_reads - before
}

#[test]
fn what_was_just_written_is_drained_without_a_read_of_the_device() {
    for order in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let mut w = world(16, order);
        let before = w.images[0].clone();
        let wanted = write(&mut w, &before, 0..200);
        assert_eq!(drain(&mut w), 0, "{order:?}");
        assert!(w.images[0] == wanted, "{order:?}");
    }
}

#[test]
fn a_client_reads_what_was_just_written_without_a_read_of_the_device() {
    let mut w = world(16, DrainOrder::Grouped);
    let before = w.images[0].clone();
    let wanted = write(&mut w, &before, 0..200);
    let reads = w.device_reads;
    for at in 0..200 {
        let offset = (at * 37 % 4_096 * BLOCK) as usize;
        assert!(w.read(0, offset as u64, BLOCK) == wanted[offset..][..BLOCK_BYTES]);
    }
    assert_eq!(w.device_reads, reads);
    // What does not verify there is read from the device, and is no loss.
    let mirror = Buf { offset: 0, len: (16 * SEGMENT) as u32 };
    w.engine.arena_mut().bytes_mut(mirror).fill(0xee);
    assert!(w.read(0, 37 * BLOCK, BLOCK) == wanted[37 * BLOCK_BYTES..][..BLOCK_BYTES]);
    assert_eq!((w.device_reads, w.status(0).count.corrupt_blocks), (reads + 1, 0));
}

#[test]
fn g1_what_is_in_memory_no_more_is_read_from_the_device() {
    for order in [DrainOrder::Unordered, DrainOrder::Grouped] {
        for segments in [1, 2, 6] {
            let mut w = world(segments, order);
            let before = w.images[0].clone();
            let wanted = write(&mut w, &before, 0..800);
            let reads = drain(&mut w);
            assert!(reads > 0 && reads < 1_600, "{order:?} {segments}: {reads} reads");
            assert!(w.images[0] == wanted, "{order:?} {segments}");
        }
    }
}

#[test]
fn g1_a_log_that_goes_on_in_an_open_segment_has_what_was_before_on_the_device_only() {
    for order in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let mut w = world(16, order);
        let before = w.images[0].clone();
        let some = write(&mut w, &before, 0..10);
        mirror(&mut w, 16);
        let wanted = write(&mut w, &some, 10..20);
        assert!(drain(&mut w) > 0, "{order:?}");
        assert!(w.images[0] == wanted, "{order:?}");
    }
}

#[test]
fn g1_a_segment_that_is_used_again_has_nothing_of_before_in_memory() {
    let mut w = world(4, DrainOrder::Grouped);
    let mut image = w.images[0].clone();
    // Several times what the cache holds.
    for round in 0..30 {
        image = write(&mut w, &image, round * 900..round * 900 + 900);
        w.backend_stopped = false;
        w.pass(3 * SECOND);
        w.backend_stopped = true;
    }
    drain(&mut w);
    assert!(w.images[0] == image);
}

#[test]
fn g7_what_does_not_verify_in_memory_is_read_from_the_device() {
    for order in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let mut w = world(16, order);
        let before = w.images[0].clone();
        let wanted = write(&mut w, &before, 0..50);
        // The mirror is the first memory that the core sets aside.
        let mirror = Buf { offset: 0, len: (16 * SEGMENT) as u32 };
        w.engine.arena_mut().bytes_mut(mirror).fill(0xee);
        assert!(drain(&mut w) > 0, "{order:?}");
        assert!(w.images[0] == wanted, "{order:?}");
        assert_eq!(w.status(0).count.corrupt_blocks, 0, "{order:?}");
    }
}
