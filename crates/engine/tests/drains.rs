//! The drain: what it may send when, and that nothing is forgotten on the way.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::{Engine, EngineConfig};

const SECOND: Nanos = 1_000_000_000;
const OBJECT: u64 = 4 * MIB;
const WRITE: Op = Op::Write { fua: false };
const DISCARD: Op = Op::Discard { fua: false };

fn set_mode(w: &mut World, mode: Mode) {
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("the mode");
}

fn grouped() -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 32 * MIB, Mode::WriteBack) }
}

#[test]
fn g8_a_write_through_that_the_image_has_waits_for_no_later_one() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteThrough)]);
    w.flush(0);
    w.backend_stopped = true;
    let ids = [0, 1, 2].map(|i| w.request(0, WRITE, i * OBJECT, 4096, Some(&pattern(i, 4096))).0);
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= OBJECT);
    w.backend_stopped = false;
    w.pass(SECOND);
    assert_eq!(ids.map(|id| w.replies.contains_key(&id)), [true, false, false]);
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 2 * OBJECT);
    w.pass(SECOND);
    assert_eq!(ids.map(|id| w.replies.contains_key(&id)), [true, true, false]);
}

#[test]
fn write_through_with_a_backlog_acknowledges_half_of_what_the_drain_has_brought_to_the_image() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    for at in [0, OBJECT] {
        (0..4).for_each(|i| w.write(0, at + i * (256 << 10), &pattern(i, 256 << 10)));
    }
    set_mode(&mut w, Mode::WriteThrough);
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= OBJECT);
    w.backend_stopped = false;
    w.pass(SECOND);
    assert_eq!(w.status(0).count.drained_blocks, 256);
    let ids: Vec<_> = (0..16)
        .map(|i| {
            w.request(0, WRITE, 2 * OBJECT + i * (64 << 10), 64 << 10, Some(&pattern(i, 64 << 10)))
                .0
        })
        .collect();
    w.pass(SECOND);
    let answered: Vec<_> = ids.iter().map(|id| w.replies.contains_key(id)).collect();
    assert_eq!(answered, [vec![true; 8], vec![false; 8]].concat());
    w.holds = |_| false;
    w.pass(SECOND);
    assert!(ids.iter().all(|id| w.replies.get(id) == Some(&Ok(()))));
}

#[test]
fn g3_the_image_gets_nothing_before_the_log_is_stable() {
    for discard in [false, true] {
        let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
        w.images[0].fill(0x11);
        w.flush(0);
        match discard {
            true => w.op(0, DISCARD, 0, 4096).expect("discard"),
            false => w.write(0, 0, &pattern(1, 4096)),
        }
        let syncs = w.device_syncs;
        w.now += 2 * SECOND;
        w.engine.handle(w.now, Event::Tick);
        while w.images[0][..4096] == [0x11; 4096] {
            if !w.step() {
                w.now += SECOND;
                assert!(w.now < 9 * SECOND, "it is not drained");
                w.engine.handle(w.now, Event::Tick);
            }
        }
        assert!(w.device_syncs > syncs);
    }
}

#[test]
fn every_one_of_many_zero_ranges_reaches_the_image() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let config = EngineConfig { drain_buffers: 64, ..EngineConfig::small() };
    w.engine = Engine::open(&mut w.device, config, w.now).expect("open").0;
    w.attach(true);
    w.images[0].fill(0x11);
    w.flush(0);
    w.backend_stopped = true;
    (0..40).for_each(|i| w.op(0, DISCARD, OBJECT + i * 65536, 4096).expect("discard"));
    w.flush(0);
    let control = w.fresh();
    w.engine.drain(w.now, VolumeId(0), control);
    w.pass(2 * SECOND);
    w.backend_stopped = false;
    w.pass(2 * SECOND);
    assert_eq!(w.controls.get(&control), Some(&Ok(())));
    for i in 0..40 {
        let at = (OBJECT + i * 65536) as usize;
        assert!(
            w.images[0][at..at + 4096] == [0; 4096] && w.images[0][at + 4096] == 0x11,
            "range {i}"
        );
    }
}

#[test]
fn g1_a_transfer_of_one_object_does_not_overwrite_what_was_drained_of_the_next() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    for object in [1, 2] {
        let end = object * OBJECT;
        w.holds = match object {
            1 => |op| matches!(op, BackendOp::Write { offset, .. } if *offset < OBJECT),
            _ => |op| matches!(op, BackendOp::Write { offset, .. } if *offset < 2 * OBJECT),
        };
        w.write(0, end - 4096, &pattern(1, 8192));
        w.pass(2 * SECOND);
        w.write(0, end, &pattern(2, 4096));
        w.pass(2 * SECOND);
        w.holds = |_| false;
        w.drain(0);
        assert!(w.images[0][end as usize..][..4096] == pattern(2, 4096), "object {object}");
    }
}

#[test]
fn g2_what_a_backend_loses_between_a_drain_and_its_flush_is_drained_again() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.stable = Some(w.images.clone());
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset == 0);
    w.write(0, 0, &pattern(1, 4096));
    set_mode(&mut w, Mode::WriteAround);
    w.write(0, 8 * MIB, &pattern(2, 4096));
    // The client's flush is on its way before the drain has its own; it fails, and the drain's
    // succeeds.
    w.holds = |op| {
        matches!(op, BackendOp::Flush)
            || matches!(op, BackendOp::Write { offset, .. } if *offset == 0)
    };
    let (flush, _) = w.request(0, Op::Flush, 0, 0, None);
    w.holds = |op| matches!(op, BackendOp::Flush);
    w.run();
    w.flushes_to_fail = 1;
    w.holds = |_| false;
    w.pass(2 * SECOND);
    assert_eq!(w.replies.get(&flush), Some(&Err(RequestError::Io)));
    w.drain(0);
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn g8_a_full_backend_gets_what_is_committed_before_more_redo() {
    let full = |op: &BackendOp| matches!(op, BackendOp::RedoWrite { .. }).then_some(IoError::Full);
    let write = |w: &mut World, from: u64| {
        for at in (from..from + 6 * MIB).step_by(256 << 10) {
            w.write(0, at, &pattern(at + 1, 256 << 10));
        }
        w.pass(4 * SECOND);
    };
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.flush(0);
    w.refuses = |op| matches!(op, BackendOp::Write { .. }).then_some(IoError::Full);
    write(&mut w, 0);
    assert_eq!(w.committed[&0].1.len(), 1);
    w.refuses = |op| {
        matches!(op, BackendOp::Write { .. } | BackendOp::RedoWrite { .. }).then_some(IoError::Full)
    };
    write(&mut w, 16 * MIB);
    assert_eq!(w.status(0).backend_error, Some(IoError::Full));
    // What is in the image already takes no more room there.
    w.refuses = full;
    w.pass(20 * SECOND);
    for at in (0..6 * MIB).step_by(256 << 10) {
        assert!(w.images[0][at as usize..][..256 << 10] == pattern(at + 1, 256 << 10), "{at}");
    }
    w.refuses = |_| None;
    w.drain(0);
}

#[test]
fn zero_ranges_that_wait_for_room_in_checkpoints_go_on_as_soon_as_some_are_drained() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let ids: Vec<_> = (0..8000).map(|i| w.submit(0, DISCARD, i * 8192, 4096, None).0).collect();
    w.run();
    let answered = |w: &World| ids.iter().filter(|id| w.replies.contains_key(id)).count();
    let before = answered(&w);
    let half = half_of_a_checkpoint();
    assert!(
        (half..half + 240).contains(&before),
        "{before} ranges, of which the last record has some more than {half}"
    );
    // With them in it, and some more, a checkpoint can be taken.
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("it is recorded");
    w.pass(11 * SECOND);
    assert_eq!(answered(&w), before);
    w.holds = |op| matches!(op, BackendOp::Discard { offset, .. } if *offset >= OBJECT);
    w.backend_stopped = false;
    w.run();
    assert!(answered(&w) >= before + 300, "{} of {before} before", answered(&w));
}

/// Ranges that may be in the log at once.
fn half_of_a_checkpoint() -> usize {
    let geometry = tidepool_engine::format::Geometry::new([9; 16], 64 * MIB, Some(256 << 10));
    geometry.expect("a valid size").extents_max() / 2
}

#[test]
fn zero_ranges_count_while_they_are_on_their_way_to_the_log() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let half = half_of_a_checkpoint();
    let discard = |w: &mut World, n: usize| w.submit(0, DISCARD, n as u64 * 8192, 4096, None).0;
    let mut ids: Vec<_> = (0..half - 32).map(|n| discard(&mut w, n)).collect();
    w.run();
    w.hold_device_writes = true;
    ids.extend((half - 32..half + 2000).map(|n| discard(&mut w, n)));
    w.run();
    w.release_device_writes();
    let answered = ids.iter().filter(|id| w.replies.contains_key(id)).count();
    assert!((half..half + 240).contains(&answered), "{answered} ranges");
}

#[test]
fn zero_ranges_that_come_one_by_one_fill_half_of_a_checkpoint() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let ids: Vec<_> = (0..3000).map(|i| w.request(0, DISCARD, i * 8192, 4096, None).0).collect();
    let answered = ids.iter().filter(|id| w.replies.contains_key(id)).count();
    assert_eq!(answered, half_of_a_checkpoint());
}

#[test]
fn a_volume_whose_quota_is_used_leaves_nothing_in_the_log_while_others_write() {
    let full = VolumeSpec { dirty_bytes_max: 64 << 10, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[full, spec("b", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.flush(1);
    w.stopped.push(VolumeId(0));
    let (id, _) = w.request(0, WRITE, 0, 128 << 10, Some(&pattern(1, 128 << 10)));
    w.write(1, 0, &pattern(2, 4096));
    let before = (w.engine.device_status().records, w.status(0).sequence);
    (1..=10).for_each(|i| w.write(1, i * 8192, &pattern(i, 4096)));
    assert_eq!((w.engine.device_status().records, w.status(0).sequence), (before.0 + 10, before.1));
    w.stopped.clear();
    w.pass(3 * SECOND);
    assert_eq!(w.replies.get(&id), Some(&Ok(())));
}

#[test]
fn g8_zeroes_with_edges_that_were_in_the_log_when_its_device_failed_keep_no_buffers() {
    let mut w = World::new(64 * MIB, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.images[0].fill(0x11);
    w.hold_device_writes = true;
    let unaligned = |w: &mut World, i: u64| w.submit(0, DISCARD, i * 65536 + 512, 16384, None).0;
    let mut ids: Vec<_> = (0..100).map(|i| unaligned(&mut w, i)).collect();
    w.run();
    w.device_result = Err(IoError::Errno(5));
    w.release_device_writes();
    w.pass(SECOND);
    ids.extend((100..300).map(|i| unaligned(&mut w, i)));
    w.pass(SECOND);
    assert!(ids.iter().all(|id| w.replies.get(id) == Some(&Ok(()))));
    for i in 0..300 {
        let at = i * 65536;
        assert!(w.images[0][at..at + 512] == [0x11; 512] && w.images[0][at + 512] == 0);
    }
}

#[test]
fn g6_a_write_of_which_only_a_part_was_in_the_log_when_its_volume_was_fenced_fails_once() {
    let small = VolumeSpec { dirty_bytes_max: 64 << 10, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[small]);
    w.flush(0);
    w.hold_device_writes = true;
    let (id, _) = w.request(0, WRITE, 0, 128 << 10, Some(&pattern(1, 128 << 10)));
    w.backend_result = Err(IoError::Fenced);
    assert_eq!(w.try_read(0, MIB, 4096), Err(RequestError::Io));
    w.release_device_writes();
    w.pass(SECOND);
    assert_eq!(w.replies.remove(&id), Some(Err(RequestError::Io)));
    assert_eq!(w.status(0).count.errors, 2);
}

#[test]
fn g5_a_clean_volume_that_is_attached_again_is_drained_in_groups() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.write(0, 0, &pattern(1, 4096));
    w.drain(0);
    w.control(|e, now, c| e.shutdown(now, c)).expect("shutdown");
    w.restart(true);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(2, 4096));
    w.pass(3 * SECOND);
    assert!(w.cut(0)[..4096] == pattern(2, 4096), "the redo has it");
}

#[test]
fn g5_a_backlog_that_is_attached_in_write_through_comes_to_the_image_in_groups() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.flush(0);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    w.write(0, 2 * OBJECT, &pattern(2, 4096));
    w.reopen();
    w.backend_stopped = false;
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset < OBJECT);
    let again = tidepool_engine::Attach::again(&w.status(0).spec, true);
    let attach = tidepool_engine::Attach { mode: Mode::WriteThrough, ..again };
    w.control(|e, now, c| e.attach(now, VolumeId(0), attach, c).expect("attach"))
        .expect("attached");
    w.pass(3 * SECOND);
    let cut = w.cut(0);
    assert!(cut[2 * OBJECT as usize..][..4096] == pattern(2, 4096));
    assert!(
        cut[..4096] == pattern(1, 4096),
        "the later without the earlier was no state of the volume"
    );
}

#[test]
fn an_unordered_drain_has_no_groups_whatever_is_done_to_its_volume() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let write = |w: &mut World, n| {
        w.write(0, n * 4096, &pattern(n, 4096));
        w.pass(3 * SECOND);
        assert_eq!(w.status(0).count.groups, 0);
    };
    write(&mut w, 1);
    set_mode(&mut w, Mode::WriteThrough);
    write(&mut w, 2);
    set_mode(&mut w, Mode::WriteBack);
    write(&mut w, 3);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(4, 4096));
    w.restart(true);
    w.backend_stopped = false;
    write(&mut w, 5);
    assert!(!w.committed.contains_key(&0));
}

#[test]
fn g5_a_snapshot_has_the_zeroes_that_were_written_while_its_backlog_was_drained() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.images[0].fill(0x11);
    w.flush(0);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.run();
    w.op(0, DISCARD, OBJECT, 65536).expect("discard");
    w.backend_stopped = false;
    w.pass(20 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    let taken = &w.snapshots[&control];
    assert!(taken[..4096] == pattern(1, 4096));
    assert!(taken[OBJECT as usize..][..65536].iter().all(|&b| b == 0));
}

#[test]
fn a_snapshot_that_is_refused_says_nothing_of_the_backend_unless_another_owner_has_the_image() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    let snapshot = |w: &mut World| w.control(|e, now, c| e.snapshot(now, VolumeId(0), c));
    w.snapshot_result = Err(IoError::Errno(5));
    assert_eq!(snapshot(&mut w), Err(ControlError::Backend(IoError::Errno(5))));
    assert_eq!((w.status(0).backend_error, w.status(0).count.backend_errors), (None, 0));
    w.snapshot_result = Err(IoError::Fenced);
    assert_eq!(snapshot(&mut w), Err(ControlError::Backend(IoError::Fenced)));
    assert_eq!(w.status(0).state, tidepool_engine::status::VolumeState::Fenced);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
}

#[test]
fn g1_zeroes_of_one_object_do_not_overwrite_what_was_drained_of_the_next() {
    const OBJECTS: u64 = 512;
    let mut w = World::new(64 * MIB, &[spec("a", OBJECTS * OBJECT, Mode::WriteBack)]);
    w.flush(0);
    // All of them are being drained when the second one begins, and are the same to the index.
    w.op(0, DISCARD, 0, OBJECT).expect("discard");
    w.op(0, DISCARD, 2 * OBJECT, (OBJECTS - 2) * OBJECT).expect("discard");
    w.op(0, DISCARD, OBJECT, OBJECT).expect("discard");
    w.holds = |op| {
        matches!(op, BackendOp::Flush) || matches!(op, BackendOp::Discard { offset: OBJECT, .. })
    };
    w.pass(2 * SECOND);
    w.holds = |op| matches!(op, BackendOp::Discard { offset: OBJECT, .. });
    w.pass(2 * SECOND);
    w.write(0, 2 * OBJECT, &pattern(1, 4096));
    w.pass(2 * SECOND);
    let at = 2 * OBJECT as usize;
    assert!(w.images[0][at..][..4096] == pattern(1, 4096));
    w.holds = |_| false;
    w.drain(0);
    assert!(w.images[0][at..][..4096] == pattern(1, 4096));
}

#[test]
fn g1_a_piece_is_not_read_again_where_its_blocks_are_not_any_more() {
    let volume = VolumeSpec { dirty_bytes_max: 8 * MIB, ..spec("a", 128 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[volume]);
    w.images[0][MIB as usize..].fill(0x11);
    w.flush(0);
    // Two blocks of one piece, in different segments.
    w.write(0, 0, &pattern(1, 4096));
    w.write(0, OBJECT, &pattern(9, 256 << 10));
    w.write(0, 4096, &pattern(2, 4096));
    let place = |w: &World, seed| {
        let found =
            w.device.0.chunks_exact(BLOCK_BYTES).position(|block| block == pattern(seed, 4096));
        found.expect("it is on the device") as u64 * BLOCK_BYTES as u64
    };
    let (first, second) = (place(&w, 1), place(&w, 2));
    w.hold_device_reads = second..second + 1;
    w.pass(2 * SECOND);
    assert!(w.images[0][OBJECT as usize..][..256 << 10] == pattern(9, 256 << 10));
    // The first block has been read. It is written again, like all else in its segment, which gets
    // something else.
    w.write(0, 0, &pattern(3, 4096));
    w.write(0, OBJECT, &pattern(9, 256 << 10));
    for at in (8 * MIB..120 * MIB).step_by(128 << 10) {
        w.read(0, at, 128 << 10);
    }
    assert!(w.device.0[first as usize..][..4096] == [0x11; 4096]);
    assert_eq!(w.fail_device_reads(), 1);
    while w.step() {
        let image = &w.images[0][..4096];
        assert!(
            [pattern(1, 4096), pattern(3, 4096), vec![0; 4096]].iter().any(|known| known == image)
        );
    }
    w.drain(0);
    assert!(w.images[0][..8192] == [pattern(3, 4096), pattern(2, 4096)].concat());
    assert_eq!((w.status(0).lost_blocks, w.status(0).count.corrupt_blocks), (0, 0));
}

#[test]
fn g1_a_block_that_is_written_to_the_place_of_the_copy_that_is_on_its_way_stays_dirty() {
    const AT: u64 = 8 * MIB;
    for drain in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let written = VolumeSpec { drain, ..spec("a", 16 * MIB, Mode::WriteBack) };
        let volumes = [written, spec("b", 4 * MIB, Mode::WriteBack)];
        let mut w = World::with_segments(64 * MIB, 256 << 10, &volumes);
        w.flush(0);
        w.flush(1);
        w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= AT);
        // Writes the block, and tells where to.
        let place = |w: &mut World, n: u64| {
            w.hold_device_writes = true;
            let data = pattern(n, 4096);
            let (id, buf) = w.request(0, WRITE, AT, 4096, Some(&data));
            let at = w
                .held_device_writes()
                .iter()
                .find(|(_, bytes)| bytes.ends_with(&data))
                .expect("its append")
                .0;
            w.release_device_writes();
            w.run();
            assert_eq!(w.replies.remove(&id), Some(Ok(())));
            w.engine.arena_mut().free(buf.expect("a write has one"));
            at
        };
        // This fills what is left of a segment: after some rounds the block has the same place in
        // each.
        let round = |w: &mut World, n: u64| {
            w.write(1, 0, &pattern(n, 59 * 4096));
            place(w, n)
        };
        for n in 1..200 {
            round(&mut w, n);
        }
        let first = round(&mut w, 200);
        w.pass(3 * SECOND);
        let newest = (201..900).find(|&n| round(&mut w, n) == first).expect("the log goes round");
        w.holds = |_| false;
        w.pass(20 * SECOND);
        assert!(
            w.images[0][AT as usize..][..4096] == pattern(newest, 4096),
            "{drain:?}: after {newest} writes"
        );
    }
}
