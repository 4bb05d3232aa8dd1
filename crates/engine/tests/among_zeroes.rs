//! Making room where clean blocks stand among zeroes that the backend does not take: each that is
//! dropped splits a range of them.

use crate::common::*;
use crate::reclaim::{answered, cached, hold_what_is_kept, read_once, writes_find_room};
use tidepool_engine::api::*;

const PIECE: u64 = 64 << 10;
const SECOND: Nanos = 1_000_000_000;

/// Clean blocks of the first of two volumes, each between zeroes that its backend does not take;
/// they stand in 40 MiB.
fn among_zeroes(segment_bytes: u32) -> World {
    let specs = ["a", "b"].map(|name| spec(name, 256 * MIB, Mode::WriteBack));
    let mut w = World::with_segments(64 * MIB, segment_bytes, &specs);
    w.flush(0);
    w.flush(1);
    read_once(&mut w, 0, 40 * MIB);
    w.pass(SECOND);
    w.holds = |op| matches!(op, BackendOp::Discard { .. });
    for at in (0..40 * MIB).step_by(2 * BLOCK_BYTES) {
        w.submit(0, Op::Discard { fua: false }, at, BLOCK_BYTES as u64, None);
        w.run();
    }
    assert!(w.replies.values().all(|&result| result == Ok(())) && w.replies.len() == 5120);
    w
}

/// Blocks of the first volume that are not in the cache any more.
fn dropped(w: &World) -> u64 {
    (0..40).map(|at| MIB / BLOCK_BYTES as u64 - cached(w, at * MIB, MIB)).sum()
}

#[test]
fn g8_a_backend_that_takes_no_discards_holds_up_no_other_volume_when_what_is_cached_between_them_is_dropped()
 {
    let mut w = among_zeroes(256 << 10);
    let data = pattern(1, PIECE as usize);
    // Many at once, so that reclaim is late.
    for round in 0..10u64 {
        let write = |i: u64| {
            w.submit(1, Op::Write { fua: false }, (round * 160 + i) * PIECE, PIECE, Some(&data))
        };
        let sent: Vec<_> = (0..160).map(write).collect();
        w.run();
        // Of its own backend it may have to wait for the drain.
        w.drain(1);
        answered(&mut w, sent);
    }
    assert!(dropped(&w) < 3100, "{} of 4,048 that a checkpoint has room for", dropped(&w));
}

#[test]
fn what_is_cached_between_zeroes_is_dropped_as_long_as_checkpoints_have_room_for_what_it_splits() {
    for segment_bytes in [256 << 10, 2 << 20] {
        let mut w = among_zeroes(segment_bytes);
        for at in (0..128 * MIB).step_by(2 * PIECE as usize) {
            w.read(1, at, 2 * PIECE);
        }
        // Three quarters of what a checkpoint has room for.
        assert!((3036..3036 + 31).contains(&dropped(&w)), "{}", dropped(&w));
        let moved = w.engine.device_status().moved_blocks;
        assert!((2000..2200).contains(&moved), "{moved} blocks have been moved, once");
    }
}

#[test]
fn g8_what_has_to_stay_is_moved_although_writes_have_taken_the_room_for_it() {
    let mut w = among_zeroes(256 << 10);
    let (mut read, mut written) = (0, 192 * MIB);
    while w.engine.device_status().moved_blocks == 0 {
        w.read(1, read, PIECE);
        read += PIECE;
    }
    for _ in 0..4 {
        read = hold_what_is_kept(&mut w, 1, read);
        written = writes_find_room(&mut w, 1, written);
        w.drain(1);
    }
    assert!((3036..3036 + 31).contains(&dropped(&w)), "{}", dropped(&w));
}

/// Every object has zeroes in one place that are not in the image, and its other blocks are wanted.
fn reclaim_comes_to_its_end(zeroes: u64) {
    let mut w = among_zeroes(256 << 10);
    for object in (40 * MIB..256 * MIB).step_by(4 << 20) {
        w.op(0, Op::Discard { fua: false }, object + zeroes, BLOCK_BYTES as u64)
            .expect("a discard");
    }
    for at in (44 * MIB..240 * MIB).step_by(2 * PIECE as usize) {
        let sent = w.submit(0, Op::Read, at, 2 * PIECE, None);
        let steps = (0..10_000).take_while(|_| w.step()).count();
        assert!(steps < 10_000, "reading {} MiB", at / MIB);
        answered(&mut w, [sent]);
    }
}

#[test]
fn g8_reclaim_comes_to_its_end_where_objects_begin_with_zeroes_that_are_not_in_the_image() {
    reclaim_comes_to_its_end(0);
}

#[test]
fn g8_reclaim_comes_to_its_end_where_objects_end_with_zeroes_that_are_not_in_the_image() {
    reclaim_comes_to_its_end((4 << 20) - BLOCK_BYTES as u64);
}
