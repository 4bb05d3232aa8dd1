//! What stays in the cache: what is wanted again, longer than what is read or written once.

use crate::common::*;
use crate::reclaim::{cached, read_once, world};
use tidepool_engine::api::*;

const PIECE: u64 = 64 << 10;
const SECOND: Nanos = 1_000_000_000;

#[test]
fn what_is_wanted_again_stays_and_what_is_read_once_goes() {
    let mut w = world(DrainOrder::Unordered);
    let flushes = w.backend_flushes;
    for round in 0..24 {
        read_once(&mut w, 0, 2 * MIB);
        read_once(&mut w, (8 + round * 4) * MIB, 4 * MIB);
    }
    w.pass(SECOND);
    assert_eq!(cached(&w, 0, 2 * MIB), 512, "everything that was read in every round");
    assert_eq!(cached(&w, 8 * MIB, 16 * MIB), 0, "nothing of the oldest that was read once");
    let before = w.backend_reads;
    read_once(&mut w, 0, 2 * MIB);
    assert_eq!(w.backend_reads, before);
    assert!(w.engine.device_status().moved_blocks > 0);
    assert_eq!(
        (w.backend_flushes, w.status(0).dirty),
        (flushes, false),
        "what moves is no dirtier than before"
    );
}

#[test]
fn what_comes_back_soon_after_it_was_dropped_is_kept_for_longer_than_a_stranger() {
    let mut w = world(DrainOrder::Unordered);
    read_once(&mut w, 0, 4 * MIB);
    read_once(&mut w, 8 * MIB, 62 * MIB);
    w.pass(SECOND);
    assert_eq!(cached(&w, 0, 4 * MIB), 0);
    // Most of the one is remembered, the other is not.
    read_once(&mut w, 0, 4 * MIB);
    read_once(&mut w, 100 * MIB, 4 * MIB);
    read_once(&mut w, 128 * MIB, 96 * MIB);
    w.pass(SECOND);
    assert!(cached(&w, 0, 4 * MIB) > 400, "{} of what came back", cached(&w, 0, 4 * MIB));
    assert!(
        cached(&w, 100 * MIB, 4 * MIB) < 100,
        "{} of the stranger",
        cached(&w, 100 * MIB, 4 * MIB)
    );
}

#[test]
fn what_was_written_and_what_is_wanted_again_outlive_a_stretch_that_is_read_once() {
    let mut w = world(DrainOrder::Unordered);
    let data = pattern(1, PIECE as usize);
    for i in 0..256 {
        w.write(0, i * PIECE, &data);
    }
    w.drain(0);
    read_once(&mut w, 64 * MIB, 128 * MIB);
    assert_eq!(cached(&w, 0, 16 * MIB), 4096, "newcomers leave first");
}

#[test]
fn what_is_wanted_again_outlives_what_is_written_once() {
    let mut w = world(DrainOrder::Unordered);
    for round in 0..16 {
        read_once(&mut w, 0, 8 * MIB);
        read_once(&mut w, (16 + round * 8) * MIB, 8 * MIB);
    }
    let wanted = cached(&w, 0, 8 * MIB);
    assert!(wanted > 1900, "{wanted} blocks");
    let data = pattern(1, PIECE as usize);
    for i in 0..1536 {
        w.write(0, 128 * MIB + i * PIECE, &data);
        if i % 64 == 63 {
            w.drain(0);
        }
    }
    assert!(cached(&w, 0, 8 * MIB) > wanted * 9 / 10, "{} of them", cached(&w, 0, 8 * MIB));
    assert!(cached(&w, 128 * MIB, 32 * MIB) < 100, "what was written first is gone");
}

/// A fifth of all requests writes again what is read, in a cache that was full of something else.
#[test]
fn what_is_wanted_again_stays_while_it_is_written_again() {
    const SET_BYTES: u64 = 24 * MIB;
    let mut w = world(DrainOrder::Unordered);
    let data = pattern(1, PIECE as usize);
    for i in 0..1024 {
        w.write(0, 128 * MIB + i * PIECE, &data);
        if i % 64 == 63 {
            w.drain(0);
        }
    }
    (0..3).for_each(|_| read_once(&mut w, 0, SET_BYTES));
    let (mut random, block) = (7u64, pattern(2, BLOCK_BYTES));
    let mut round = |w: &mut World| {
        let before = w.status(0).count.miss_blocks;
        for request in 0..40_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) % (SET_BYTES / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
            if request % 5 == 0 {
                w.write(0, at, &block);
            } else {
                w.read(0, at, BLOCK_BYTES as u64);
            }
            if request % 500 == 0 {
                w.drain(0);
            }
        }
        w.status(0).count.miss_blocks - before
    };
    let misses: Vec<u64> = (0..4).map(|_| round(&mut w)).collect();
    println!("blocks that were not there, of 32,000 reads: {misses:?}");
    assert!(misses[3] < 64, "{misses:?}");
}

/// Blocks of two volumes are wanted in turn, so that each would need a record of its own where they
/// are moved.
#[test]
fn what_is_packed_once_is_not_packed_again() {
    const SET_BYTES: u64 = 24 * MIB;
    let volume = |name| spec(name, 1024 * MIB, Mode::WriteBack);
    let mut w = World::new(256 * MIB, &[volume("a"), volume("b")]);
    for round in 0..6 {
        for at in (0..SET_BYTES).step_by(BLOCK_BYTES) {
            (0..2).for_each(|of| drop(w.read(of, at, BLOCK_BYTES as u64)));
        }
        read_once(&mut w, (64 + round * 128) * MIB, 128 * MIB);
    }
    let moved = w.engine.device_status().moved_blocks;
    println!("{moved} blocks moved");
    let wanted = 2 * SET_BYTES / BLOCK_BYTES as u64;
    assert!(
        (wanted / 2..wanted * 4).contains(&moved),
        "{moved} blocks moved of {wanted} that are wanted"
    );
}

#[test]
fn the_cache_follows_when_something_else_is_wanted_all_the_time() {
    let mut w = world(DrainOrder::Unordered);
    for round in 0..4 {
        read_once(&mut w, 0, 48 * MIB);
        read_once(&mut w, (64 + round * 12) * MIB, 12 * MIB);
    }
    for _ in 0..8 {
        read_once(&mut w, 128 * MIB, 16 * MIB);
    }
    w.pass(SECOND);
    let now = cached(&w, 128 * MIB, 16 * MIB);
    assert_eq!(now, 4096, "all of it");
}

#[test]
fn what_was_used_again_is_kept_when_its_segment_is_emptied_up_to_half_of_it() {
    let mut w = world(DrainOrder::Unordered);
    for _ in 0..2 {
        read_once(&mut w, 0, 2 * MIB);
    }
    read_once(&mut w, 8 * MIB, 64 * MIB);
    w.pass(SECOND);
    let kept = cached(&w, 0, 2 * MIB);
    assert!((200..400).contains(&kept), "{kept} of 512 blocks");
}
