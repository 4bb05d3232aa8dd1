//! Volumes become larger and smaller while they are served.

use crate::common::*;
use tidepool_engine::api::*;

const KIB: usize = 1024;
const SECOND: Nanos = 1_000_000_000;

fn world(drain: DrainOrder) -> World {
    let spec = VolumeSpec { drain, ..spec("a", 16 * MIB, Mode::WriteBack) };
    World::new(64 * MIB, &[spec])
}

fn resize(w: &mut World, size_bytes: u64) -> Result<(), ControlError> {
    w.control(|e, now, c| e.resize(now, VolumeId(0), size_bytes, c))
}

fn is_zero(data: &[u8]) -> bool {
    data.iter().all(|&b| b == 0)
}

#[test]
fn a_grown_volume_has_zeroes_behind_its_old_end_and_takes_writes_there() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = world(drain);
        w.write(0, 16 * MIB - 4096, &pattern(1, 4 * KIB));
        let beyond = w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 16 * MIB, 4096);
        assert_eq!(beyond, Err(RequestError::Invalid));
        resize(&mut w, 24 * MIB).expect("it grows");
        assert_eq!(w.images[0].len() as u64, 24 * MIB);
        assert!(is_zero(&w.read(0, 16 * MIB, 128 * 1024)));
        w.write(0, 23 * MIB, &pattern(2, 64 * KIB));
        w.restart(true);
        assert_eq!(w.status(0).spec.size_bytes, 24 * MIB);
        assert_eq!(w.read(0, 23 * MIB, 64 * 1024), pattern(2, 64 * KIB));
        w.drain(0);
        assert_eq!(w.images[0][(23 * MIB) as usize..][..64 * KIB], pattern(2, 64 * KIB));
        assert_eq!(w.images[0][(16 * MIB) as usize - 4096..][..4 * KIB], pattern(1, 4 * KIB));
    }
}

#[test]
fn a_shrunk_volume_loses_what_is_beyond_its_end_and_nothing_else() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = world(drain);
        w.write(0, 0, &pattern(1, 128 * KIB));
        w.write(0, 10 * MIB, &pattern(2, 128 * KIB));
        w.pass(3 * SECOND);
        // Dirty on both sides of the new end, in one object too, and zeroes.
        w.write(0, 5 * MIB - 32 * 1024, &pattern(3, 64 * KIB));
        w.write(0, 12 * MIB, &pattern(4, 128 * KIB));
        w.op(0, Op::Discard { fua: false }, 14 * MIB, MIB).expect("a discard");
        resize(&mut w, 5 * MIB).expect("it shrinks");
        assert_eq!(w.images[0].len() as u64, 5 * MIB);
        assert_eq!(w.try_read(0, 5 * MIB, 4096), Err(RequestError::Invalid));
        w.drain(0);
        let status = w.status(0);
        assert_eq!((status.dirty_bytes, status.dirty_zero_bytes), (0, 0));
        assert_eq!(w.images[0][..128 * KIB], pattern(1, 128 * KIB));
        let tail = &w.images[0][(5 * MIB) as usize - 32 * KIB..];
        assert_eq!(tail, &pattern(3, 64 * KIB)[..32 * KIB]);
        // What was there does not come back, neither by growing nor by a restart.
        resize(&mut w, 16 * MIB).expect("it grows");
        assert!(
            is_zero(&w.read(0, 5 * MIB, 128 * 1024)) && is_zero(&w.read(0, 12 * MIB, 128 * 1024))
        );
        w.restart(true);
        assert!(
            is_zero(&w.read(0, 5 * MIB, 128 * 1024)) && is_zero(&w.read(0, 12 * MIB, 128 * 1024))
        );
        assert_eq!(w.read(0, 0, 128 * 1024), pattern(1, 128 * KIB));
    }
}

#[test]
fn frozen_copies_beyond_the_end_are_given_back() {
    let mut w = world(DrainOrder::Grouped);
    w.write(0, 12 * MIB, &pattern(1, 128 * KIB));
    w.backend_stopped = true;
    w.pass(3 * SECOND);
    // The group is closed; its copies are frozen by these.
    w.write(0, 12 * MIB, &pattern(2, 128 * KIB));
    assert_eq!(w.status(0).dirty_bytes, 256 * 1024, "both are held");
    let control = w.fresh();
    w.engine.resize(w.now, VolumeId(0), 4 * MIB, control);
    w.pass(SECOND);
    assert_eq!(w.status(0).dirty_bytes, 0, "nothing beyond the end is held");
    assert!(!w.controls.contains_key(&control), "it waits for the backend");
    w.write(0, 0, &pattern(3, 64 * KIB));
    w.backend_stopped = false;
    w.pass(5 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.drain(0);
    assert_eq!(w.images[0][..64 * KIB], pattern(3, 64 * KIB));
    assert_eq!(w.images[0].len() as u64, 4 * MIB);
}

#[test]
fn a_size_that_cannot_be_had_changes_nothing() {
    let mut w = world(DrainOrder::Grouped);
    w.write(0, 0, &pattern(1, 64 * KIB));
    for size in [0, 4095, 16 * MIB + 512, (1 << 50) + 4096] {
        assert_eq!(resize(&mut w, size), Err(ControlError::Size(size)));
    }
    w.resize_result = Err(IoError::Full);
    for size in [24 * MIB, 8 * MIB, 1 << 50] {
        assert_eq!(resize(&mut w, size), Err(ControlError::Backend(IoError::Full)));
        assert_eq!(w.status(0).spec.size_bytes, 16 * MIB);
    }
    assert_eq!(w.read(0, 0, 64 * 1024), pattern(1, 64 * KIB));
    w.write(0, 15 * MIB, &pattern(2, 64 * KIB));
    w.drain(0);
}

#[test]
fn g1_what_is_written_beyond_an_end_that_the_image_did_not_get_outlives_a_kill() {
    let mut w = world(DrainOrder::Grouped);
    w.flush(0);
    w.resize_result = Err(IoError::Full);
    assert_eq!(resize(&mut w, 8 * MIB), Err(ControlError::Backend(IoError::Full)));
    w.write(0, 15 * MIB, &pattern(2, 64 * KIB));
    w.restart(true);
    assert_eq!(w.status(0).spec.size_bytes, 16 * MIB);
    assert!(w.read(0, 15 * MIB, 65536) == pattern(2, 64 * KIB));
}

#[test]
fn g1_nobody_writes_beyond_an_end_that_a_restart_would_not_know() {
    for (size_bytes, result) in [(24 * MIB, Ok(())), (8 * MIB, Err(IoError::Full))] {
        let mut w = world(DrainOrder::Grouped);
        w.resize_result = result;
        let control = w.fresh();
        w.engine.resize(w.now, VolumeId(0), size_bytes, control);
        let zero = Op::WriteZeroes { fua: false, no_hole: false };
        let mut refused = 0;
        while !w.controls.contains_key(&control) {
            let (id, _) = w.submit(0, zero, size_bytes.max(16 * MIB) - 4096, 4096, None);
            for _ in 0..3 {
                w.step();
            }
            refused += u32::from(w.replies.get(&id) == Some(&Err(RequestError::Invalid)));
            assert!(w.replies.get(&id) != Some(&Ok(())));
        }
        assert!(refused > 3, "{refused}");
        w.op(0, zero, size_bytes.max(16 * MIB) - 4096, 4096).expect("the end is recorded");
    }
}

/// Begins a change of size that cannot be complete at once.
fn begin(w: &mut World, size_bytes: u64) -> u64 {
    let control = w.fresh();
    w.engine.resize(w.now, VolumeId(0), size_bytes, control);
    w.pass(SECOND);
    control
}

#[test]
fn a_volume_becomes_smaller_when_the_requests_beyond_its_new_end_are_answered_and_no_others() {
    let other = spec("b", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack), other]);
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let across = w.request(0, Op::Read, 8 * MIB - 4096, 8192, None);
    let below = w.request(0, Op::Read, 8 * MIB - 32768, 16384, None);
    let up_to = w.request(0, Op::Read, 8 * MIB - 16384, 12288, None);
    let elsewhere = w.request(1, Op::Read, 12 * MIB, 4096, None);
    let control = begin(&mut w, 8 * MIB);
    assert_eq!(w.images[0].len() as u64, 16 * MIB, "a read is on its way there");
    w.holds = |op| matches!(op, BackendOp::Read { offset, .. } if *offset != 8 * MIB - 4096);
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.holds = |_| false;
    w.pass(SECOND);
    for (id, buf) in [across, below, up_to, elsewhere] {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
    // As above, up to the very last block.
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let (last, buf) = w.request(0, Op::Read, 4 * MIB - 8192, 8192, None);
    let control = begin(&mut w, 4 * MIB);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.replies.remove(&last), Some(Ok(())));
    w.engine.arena_mut().free(buf.expect("it has a buffer"));
}

#[test]
fn g2_until_everything_that_goes_beyond_the_new_end_is_at_rest_a_restart_finds_the_old_size() {
    let other = spec("b", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack), other]);
    w.write(0, 12 * MIB, &pattern(1, 64 * KIB));
    w.write(0, 2 * MIB, &pattern(2, 64 * KIB));
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset == 12 * MIB);
    w.pass(3 * SECOND);
    let control = begin(&mut w, 4 * MIB);
    // A checkpoint in the middle of it.
    w.control(|e, now, c| e.set_attachment(now, VolumeId(1), vec![7], c)).expect("recorded");
    assert!(!w.controls.contains_key(&control));
    w.holds = |_| false;
    w.restart(true);
    assert_eq!(w.status(0).spec.size_bytes, 16 * MIB);
    assert!(w.read(0, 12 * MIB, 65536) == pattern(1, 64 * KIB));
    w.drain(0);
    assert!(w.images[0][(12 * MIB) as usize..][..64 * KIB] == pattern(1, 64 * KIB));
}

#[test]
fn the_object_that_the_new_end_cuts_may_be_written_all_the_time() {
    fn first_half(op: &BackendOp) -> bool {
        matches!(op, BackendOp::Write { offset, .. } if *offset < 5 * MIB)
    }
    fn second_half(op: &BackendOp) -> bool {
        matches!(op, BackendOp::Write { offset, .. } if *offset >= 5 * MIB)
    }
    let mut w = world(DrainOrder::Unordered);
    w.flush(0);
    w.holds = first_half;
    w.write(0, 4 * MIB, &pattern(0, 4096));
    w.pass(3 * SECOND);
    let control = begin(&mut w, 6 * MIB);
    for i in 1.. {
        // It is dirty again before a drain of it ends.
        let at = if i % 2 == 1 { 5 * MIB } else { 4 * MIB };
        w.write(0, at, &pattern(i, 4096));
        w.holds = if i % 2 == 1 { second_half } else { first_half };
        w.run();
        if w.images[0].len() as u64 == 6 * MIB {
            break;
        }
        assert!(i < 20, "drain follows drain");
    }
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.drain(0);
}

#[test]
fn an_image_becomes_smaller_when_its_redo_has_nothing_beyond_the_new_end() {
    let mut w = world(DrainOrder::Grouped);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset < 4 * MIB);
    w.write(0, MIB, &pattern(1, 64 * KIB));
    w.write(0, 12 * MIB, &pattern(2, 64 * KIB));
    w.pass(5 * SECOND);
    assert!(w.images[0][(12 * MIB) as usize..][..64 * KIB] == pattern(2, 64 * KIB));
    let control = begin(&mut w, 8 * MIB);
    assert_eq!(w.images[0].len() as u64, 16 * MIB, "the redo cannot be trimmed yet");
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
}

#[test]
fn a_restart_would_find_nothing_beyond_the_new_end_when_the_image_becomes_smaller() {
    let mut w = world(DrainOrder::Unordered);
    w.write(0, 12 * MIB, &pattern(1, 64 * KIB));
    w.drain(0);
    w.pass(20 * SECOND);
    let control = w.fresh();
    w.engine.resize(w.now, VolumeId(0), 8 * MIB, control);
    let before = w.engine.device_status().checkpoints;
    while w.images[0].len() as u64 > 8 * MIB {
        assert!(w.step() && !w.controls.contains_key(&control));
    }
    assert_eq!(w.engine.device_status().checkpoints, before + 1);
    w.run();
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
}

#[test]
fn a_change_of_size_that_waits_for_a_drain_is_given_up_when_the_drain_has_an_end() {
    for fenced in [true, false] {
        let mut w = world(DrainOrder::Grouped);
        w.flush(0);
        w.write(0, 0, &pattern(1, 64 * KIB));
        w.backend_stopped = true;
        let control = begin(&mut w, 8 * MIB);
        assert!(!w.controls.contains_key(&control));
        let error = end_of_drain(&mut w, fenced);
        w.pass(3 * SECOND);
        assert_eq!(w.controls.remove(&control), Some(Err(error)));
        assert_eq!(w.status(0).spec.size_bytes, 16 * MIB);
    }
}

#[test]
fn g1_what_was_being_cached_beyond_the_new_end_does_not_come_back() {
    let mut w = world(DrainOrder::Unordered);
    w.images[0].fill(0x11);
    let reads: Vec<_> =
        (0..3).map(|i| w.submit(0, Op::Read, (9 + i) * MIB, 16 * 1024, None)).collect();
    while w.replies.len() < reads.len() {
        assert!(w.step());
    }
    resize(&mut w, 8 * MIB).expect("it shrinks");
    resize(&mut w, 16 * MIB).expect("it grows");
    for (i, (_, buf)) in (0..).zip(reads) {
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
        assert!(is_zero(&w.read(0, (9 + i) * MIB, 16 * 1024)));
    }
}

#[test]
fn what_a_group_has_beyond_the_new_end_is_not_missed_after_a_restart() {
    let mut w = world(DrainOrder::Grouped);
    w.flush(0);
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.write(0, 12 * MIB, &pattern(2, 128 * KIB));
    w.backend_stopped = true;
    w.pass(3 * SECOND);
    let control = begin(&mut w, 4 * MIB);
    assert_eq!(w.status(0).dirty_bytes, 64 * 1024);
    w.backend_stopped = false;
    w.pass(5 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.restart(true);
    assert!(w.read(0, 0, 65536) == pattern(1, 64 * KIB));
    w.write(0, MIB, &pattern(3, 64 * KIB));
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0);
}
