//! The figures that users see are what has happened, no more and no less.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::status::{VolumeCounters, VolumeState};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECOND: Nanos = 1_000_000_000;

#[test]
fn the_quota_is_never_exceeded_however_many_writes_come_at_once() {
    let quota = 2 * MIB;
    let mut w = World::new(
        64 << 20,
        &[VolumeSpec { dirty_bytes_max: quota, ..spec("a", 16 * MIB, Mode::WriteBack) }],
    );
    w.flush(0);
    w.backend_stopped = true;
    let data = pattern(1, 64 << 10);
    for at in (0..8 * MIB).step_by(64 << 10) {
        w.submit(0, Op::Write { fua: false }, at, 64 << 10, Some(&data));
    }
    while w.step() {
        assert!(w.status(0).dirty_bytes <= quota);
    }
    w.pass(SECOND);
    assert_eq!(w.status(0).dirty_bytes, quota, "and it is used");
    assert_eq!(w.status(0).state, VolumeState::Full);
    assert_eq!(
        w.status(0).count.quota_waits,
        1,
        "the first that does not fit waits, and the others behind it"
    );
}

#[test]
fn what_is_overwritten_takes_no_more_of_the_quota() {
    let quota = 256 << 10;
    let mut w = World::new(
        64 << 20,
        &[VolumeSpec { dirty_bytes_max: quota, ..spec("a", 16 * MIB, Mode::WriteBack) }],
    );
    w.flush(0);
    w.backend_stopped = true;
    // More than the device holds.
    for i in 0..16_000 {
        w.write(0, i % 4 * BLOCK, &[i as u8; BLOCK_BYTES]);
    }
    assert_eq!((w.status(0).dirty_bytes, w.status(0).count.quota_waits), (4 * BLOCK, 0));
}

#[test]
fn requests_and_their_bytes_are_counted() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 8192));
    w.write(0, 512, &pattern(2, 1024));
    w.read(0, 0, 8192);
    w.read(0, MIB, 4096);
    w.flush(0);
    w.op(0, Op::Discard { fua: false }, 4 * MIB, 2 * MIB).expect("discard");
    w.drain(0);
    let count = w.status(0).count;
    let expected = VolumeCounters {
        reads: 2,
        writes: 2,
        flushes: 1,
        discards: 1,
        read_bytes: 8192 + 4096,
        written_bytes: 8192 + 1024,
        // The edges of the unaligned write are read, too.
        hit_blocks: 3,
        miss_blocks: 1,
        backend_reads: 1,
        backend_read_bytes: BLOCK,
        ..count
    };
    assert_eq!(count, expected);
    assert_eq!(
        (count.errors, count.backend_errors, count.evicted_blocks, count.held_ns),
        (0, 0, 0, 0)
    );
    assert_eq!(w.backend_reads, count.backend_reads);
}

#[test]
fn what_goes_past_the_cache_is_counted_in_blocks() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 8192));
    w.write(0, MIB, &pattern(1, 4096));
    let count = w.status(0).count;
    assert_eq!(count.bypass_mode_blocks, 3);
    assert_eq!((count.backend_writes, count.backend_written_bytes), (2, 3 * BLOCK));
    assert!(w.status(0).backend_unflushed);
    w.flush(0);
    assert!(!w.status(0).backend_unflushed);
}

#[test]
fn syncs_of_the_device_are_counted() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    w.pass(SECOND);
    let before = w.engine.device_status().syncs;
    let mut expected = before;
    for i in 1..4 {
        w.write(0, i * MIB, &pattern(1, 4096));
        let syncs = w.device_syncs;
        w.flush(0);
        expected += w.device_syncs - syncs;
    }
    assert!(expected > before);
    assert_eq!(w.engine.device_status().syncs, expected);
}

#[test]
fn a_volume_tells_what_is_dirty_what_is_exposed_and_for_how_long() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let status = w.status(0);
    assert_eq!((status.state, status.dirty, status.flushes), (VolumeState::Serving, false, false));
    assert_eq!((status.dirty_age_ns, status.exposed_age_ns, status.sequence), (0, 0, 0));
    w.backend_stopped = true;
    w.pass(SECOND);
    w.write(0, 0, &pattern(1, 3 * 4096));
    w.flush(0);
    w.pass(2 * SECOND);
    w.op(0, Op::Discard { fua: false }, 8 * MIB, 2 * MIB).expect("discard");
    let status = w.status(0);
    assert!(status.dirty && status.flushes && status.state == VolumeState::Serving);
    assert_eq!((status.dirty_bytes, status.dirty_zero_bytes), (3 * BLOCK, 2 * MIB));
    assert_eq!((status.exposed_bytes, status.cached_bytes), (3 * BLOCK + 2 * MIB, 3 * BLOCK));
    assert_eq!((status.dirty_age_ns, status.exposed_age_ns), (2 * SECOND, 2 * SECOND));
    assert_eq!((status.sequence, status.sequence_drained, status.lost_blocks), (2, 0, 0));

    let control = w.fresh();
    w.engine.drain(w.now, VolumeId(0), control);
    assert_eq!(w.status(0).state, VolumeState::Draining);
    w.backend_stopped = false;
    w.run();
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    let status = w.status(0);
    assert_eq!((status.state, status.dirty), (VolumeState::Serving, false));
    assert_eq!((status.dirty_bytes, status.dirty_zero_bytes, status.exposed_bytes), (0, 0, 0));
    assert_eq!((status.dirty_age_ns, status.exposed_age_ns), (0, 0));
    assert_eq!((status.sequence, status.sequence_drained), (2, 2));
    assert_eq!((status.cached_bytes, status.count.drained_blocks), (3 * BLOCK, 3));
}

#[test]
fn what_a_group_has_committed_is_dirty_and_not_exposed() {
    let grouped = VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 << 20, &[grouped]);
    w.flush(0);
    w.pass(10 * SECOND);
    w.holds = |op| matches!(op, BackendOp::Write { .. } | BackendOp::RedoWrite { .. });
    w.write(0, 0, &pattern(1, 3 * 4096));
    w.pass(SECOND / 100);
    let status = w.status(0);
    assert_eq!((status.dirty_bytes, status.exposed_bytes), (3 * BLOCK, 3 * BLOCK));
    assert_eq!((status.dirty_age_ns, status.exposed_age_ns), (SECOND / 100, SECOND / 100));
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.pass(10 * SECOND);
    let status = w.status(0);
    assert_eq!(
        (status.dirty_bytes, status.exposed_bytes, status.exposed_age_ns),
        (3 * BLOCK, 0, 0)
    );
    assert_eq!(status.dirty_age_ns, 10 * SECOND + SECOND / 100);
    assert_eq!((status.count.groups, status.count.redo_bytes), (1, 4 * BLOCK));
    w.write(0, 0, &pattern(2, 4096));
    let status = w.status(0);
    assert_eq!((status.dirty_bytes, status.exposed_bytes), (3 * BLOCK, BLOCK));
}

#[test]
fn what_is_exposed_is_what_no_group_that_is_committed_has_with_its_zeroes() {
    let grouped = VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 << 20, &[grouped]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::RedoWrite { .. });
    let exposed = |w: &World| (w.status(0).exposed_bytes, w.status(0).count.groups);
    w.write(0, 0, &pattern(1, 3 * 4096));
    w.op(0, Op::Discard { fua: false }, 4 * MIB, MIB).expect("discard");
    assert_eq!(exposed(&w), (3 * BLOCK + MIB, 0));
    w.pass(3 * SECOND);
    assert_eq!(exposed(&w), (3 * BLOCK + MIB, 1));
    w.write(0, 0, &pattern(2, 4096));
    w.op(0, Op::Discard { fua: false }, 8 * MIB, MIB).expect("discard");
    assert_eq!(exposed(&w), (4 * BLOCK + 2 * MIB, 1));
    w.holds = |_| false;
    w.pass(5 * SECOND);
    assert_eq!(exposed(&w), (0, 2));
}

#[test]
fn what_the_cut_of_a_snapshot_has_is_exposed_since_it_was_written() {
    let grouped = VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 << 20, &[grouped]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 4096));
    let snapshot = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), snapshot);
    w.run();
    w.write(0, 8 * MIB, &pattern(2, 4096));
    w.pass(SECOND / 10);
    assert_eq!((w.status(0).count.groups, w.status(0).exposed_age_ns), (1, SECOND / 10));
    // The image has what was there before: the cut is made.
    w.holds = |op| matches!(op, BackendOp::RedoWrite { .. });
    w.run();
    let status = w.status(0);
    assert_eq!((status.count.groups, status.count.groups_early), (2, 0));
    assert_eq!((status.exposed_bytes, status.exposed_age_ns), (BLOCK, SECOND / 10));
    w.holds = |_| false;
    w.run();
    assert_eq!(w.controls.remove(&snapshot), Some(Ok(())));
    assert_eq!(w.status(0).exposed_age_ns, 0);
}

#[test]
fn the_device_tells_its_size_and_what_is_in_use() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let before = w.engine.device_status();
    assert!(!before.failed && !before.reclaiming && !before.checkpointing);
    assert_eq!((before.size_bytes, before.segment_bytes), (64 * MIB, 256 << 10));
    assert_eq!((before.segments_dirty, before.cached_blocks), (0, 0));
    assert!(before.segments > 200 && before.segments * before.segment_bytes < before.size_bytes);
    assert!(before.arena_used_bytes > 0 && before.arena_used_bytes < before.arena_bytes);
    w.backend_stopped = true;
    w.flush(0);
    for at in (0..MIB).step_by(256 << 10) {
        w.write(0, at, &pattern(at, 256 << 10));
    }
    let after = w.engine.device_status();
    assert_eq!(after.cached_blocks, 256);
    let used = before.segments_free - after.segments_free;
    assert!(
        (4..8).contains(&used) && (4..=used).contains(&after.segments_dirty),
        "{used} segments"
    );
    assert!(after.index_bytes > before.index_bytes);
    let (records, appends) = (after.records - before.records, after.appends - before.appends);
    assert!(
        (4..32).contains(&records) && (4..=records).contains(&appends),
        "{records} in {appends}"
    );
    assert_eq!(after.arena_bytes, before.arena_bytes);
    let appended = after.appended_bytes - before.appended_bytes;
    assert!((MIB..MIB + 64 * BLOCK).contains(&appended), "{appended} bytes");
    w.backend_stopped = false;
    w.drain(0);
    let clean = w.engine.device_status();
    assert_eq!((clean.segments_dirty, clean.cached_blocks), (0, 256));
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, 0, 4096, Some(&pattern(3, 4096)));
    w.run();
    assert!(w.engine.device_status().failed);
}

#[test]
fn the_status_of_blocks_names_every_stretch_as_it_is() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB + 512, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 2 * MIB, &pattern(1, 8192));
    w.drain(0);
    w.holds = |op| !matches!(op, BackendOp::Read { .. });
    w.write(0, 2 * MIB + 8192, &pattern(2, 4096));
    w.op(0, Op::Discard { fua: false }, 4 * MIB, 6 * MIB).expect("discard");
    w.write(0, 16 * MIB, &pattern(3, 512));
    let status = |offset, len, extents_max| {
        let mut out = vec![Extent { len: 1, dirty: false, zero: false, cached: false }];
        w.engine.block_status(VolumeId(0), offset, len, extents_max, &mut out);
        out.iter().map(|e| (e.len, (e.dirty, e.zero, e.cached))).collect::<Vec<_>>()
    };
    let (absent, clean) = ((false, false, false), (false, false, true));
    let (dirty, zeroed) = ((true, false, true), (true, true, true));
    let all = [
        (2 * MIB, absent),
        (8192, clean),
        (4096, dirty),
        (2 * MIB - 12288, absent),
        (6 * MIB, zeroed),
        (6 * MIB, absent),
        (512, dirty),
    ];
    assert_eq!(status(0, 64 * MIB, 16), all, "no longer than the volume");
    assert_eq!(status(0, u64::MAX, 7), all);
    assert_eq!(status(0, 64 * MIB, 3), all[..3]);
    assert_eq!(status(2 * MIB + 512, 8192, 16), [(7680, clean), (512, dirty)]);
    assert_eq!(status(5 * MIB + 1024, 512, 16), [(512, zeroed)]);
    assert_eq!(status(10 * MIB - 4096, 8192, 16), [(4096, zeroed), (4096, absent)]);
    assert_eq!(status(16 * MIB + 512, 512, 16), []);
}

#[test]
fn the_status_of_blocks_has_no_empty_stretch_wherever_it_begins_and_ends() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images.push(Vec::new());
    let large = spec("b", 8 << 30, Mode::WriteBack);
    w.control(|e, now, c| drop(e.add_volume(now, large, c))).expect("add");
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 0, 8 * MIB).expect("discard");
    let status = |volume, offset, end| {
        let mut out = Vec::new();
        w.engine.block_status(VolumeId(volume), offset, end - offset, 16, &mut out);
        out.iter().map(|e| (e.len, e.zero)).collect::<Vec<_>>()
    };
    for (offset, end) in [(0, 4096), (512, 2 * MIB), (1024, 4096), (1024, 8 * MIB), (2048, 8 * MIB)]
    {
        assert_eq!(status(0, offset, end), [(end - offset, true)], "{offset}..{end}");
    }
    assert_eq!(status(1, 512, 8 << 30), [((8 << 30) - 512, false)]);
}

#[test]
fn zeroes_alone_make_a_volume_dirty_and_none_are_in_flight_when_they_are_drained() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    w.op(0, Op::Discard { fua: false }, 2 * MIB, MIB).expect("discard");
    w.flush(0);
    w.pass(2 * SECOND);
    let status = w.status(0);
    assert_eq!((status.dirty, status.dirty_bytes, status.drain_writes_in_flight), (true, 0, 2));
    w.backend_stopped = false;
    w.drain(0);
    let status = w.status(0);
    assert_eq!((status.dirty, status.drain_writes_in_flight), (false, 0));
}

#[test]
fn what_the_drain_finds_damaged_is_counted() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 4096));
    w.write(0, 8192, &pattern(2, 4096));
    w.corrupt(&pattern(1, 4096));
    w.corrupt(&pattern(2, 4096));
    assert_eq!(w.control(|e, now, c| e.drain(now, VolumeId(0), c)), Err(ControlError::Lost(2)));
    assert_eq!(w.status(0).count.corrupt_blocks, 2);
}

#[test]
fn the_device_tells_what_is_taken_of_the_arena_and_when_reclaim_is_at_work() {
    let mut w = World::new(64 << 20, &[spec("a", 128 * MIB, Mode::WriteBack)]);
    let before = w.engine.device_status();
    // 16,384 blocks, for each of which the marks and the ghost have a few bytes.
    assert!((64 << 10..4 * MIB).contains(&before.index_bytes), "{} bytes", before.index_bytes);
    let buf = w.engine.arena_mut().alloc(64 << 10).expect("room");
    assert_eq!(w.engine.device_status().arena_used_bytes - before.arena_used_bytes, 64 << 10);
    w.engine.arena_mut().free(buf);
    let mut seen = false;
    for at in (0..96 * MIB).step_by(256 << 10) {
        let (_, buf) = w.submit(0, Op::Read, at, 256 << 10, None);
        while w.step() {
            seen |= w.engine.device_status().reclaiming;
        }
        w.engine.arena_mut().free(buf.expect("a read has a buffer"));
    }
    let after = w.engine.device_status();
    assert!(seen && after.reclaims > 0 && !after.reclaiming);
    assert_eq!(after.arena_used_bytes, before.arena_used_bytes);
}

#[test]
fn what_fails_is_counted_and_told_until_something_succeeds() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_result = Err(IoError::Errno(5));
    for n in 1..=2 {
        assert_eq!(w.try_read(0, n * MIB, 4096), Err(RequestError::Io));
        let status = w.status(0);
        assert_eq!((status.count.errors, status.count.backend_errors), (n, n));
        assert_eq!((status.count.reads, status.backend_error), (0, Some(IoError::Errno(5))));
    }
    w.backend_result = Ok(());
    w.pass(10 * SECOND);
    w.read(0, MIB, 4096);
    let status = w.status(0);
    assert_eq!((status.count.reads, status.count.errors, status.backend_error), (1, 2, None));
}

#[test]
fn a_block_that_does_not_verify_is_counted_and_fetched_again() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let (block, other) = (pattern(1, 4096), pattern(2, 4096));
    w.write(0, 0, &block);
    w.write(0, 4096, &other);
    w.drain(0);
    for n in 1..=2 {
        w.corrupt(&block);
        assert!(w.read(0, 0, 8192) == [&block[..], &other].concat());
        w.pass(SECOND);
        assert_eq!(w.status(0).count.corrupt_blocks, n);
    }
    assert_eq!(w.status(0).cached_bytes, 2 * BLOCK);
}

#[test]
fn every_block_that_was_admitted_is_cached_until_it_is_evicted() {
    let mut w = World::new(64 << 20, &[spec("a", 128 * MIB, Mode::WriteBack)]);
    for at in (0..96 * MIB).step_by(128 << 10) {
        w.read(0, at, 128 << 10);
        // The first ones are wanted again and again.
        w.read(0, at % (2 * MIB), 4096);
    }
    w.pass(SECOND);
    let (status, device) = (w.status(0), w.engine.device_status());
    let count = status.count;
    assert!(
        count.admitted_blocks > 16_000 && count.evicted_blocks > 4_000 && device.reclaims > 100
    );
    assert_eq!(count.admitted_blocks - count.evicted_blocks, status.cached_bytes / BLOCK);
    assert_eq!(device.cached_blocks, status.cached_bytes / BLOCK);
    assert!(device.moved_blocks > 0);
    assert_eq!(count.hit_blocks + count.miss_blocks, 96 * 256 + 96 * 8);
    assert_eq!(count.backend_read_bytes, count.miss_blocks * BLOCK);
    assert_eq!(count.miss_blocks, count.admitted_blocks + count.bypass_no_room_blocks);
    assert_eq!((count.bypass_overtaken_blocks, device.segments_dirty), (0, 0));
}

#[test]
fn each_control_operation_that_is_recorded_takes_a_checkpoint() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let before = w.engine.device_status().checkpoints;
    for n in 1..=3 {
        w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("set");
        assert_eq!(w.engine.device_status().checkpoints, before + n);
    }
}

#[test]
fn what_is_written_to_the_device_is_counted() {
    let mut w = World::new(64 << 20, &["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack)));
    w.flush(0);
    w.flush(1);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    let before = w.engine.device_status();
    w.submit(0, Op::Write { fua: false }, 0, 2 * BLOCK, Some(&pattern(2, 8192)));
    w.submit(1, Op::Write { fua: false }, 0, BLOCK, Some(&pattern(3, 4096)));
    w.run();
    w.write(1, MIB, &pattern(4, 4096));
    let after = w.engine.device_status();
    // Two volumes in the first append; every record has a header.
    assert_eq!((after.appends - before.appends, after.records - before.records), (2, 3));
    assert_eq!(after.appended_bytes - before.appended_bytes, (3 + 4) * BLOCK);
}

#[test]
fn a_checkpoint_is_taken_some_time_after_something_was_logged_and_none_where_nothing_was() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let before = w.engine.device_status().checkpoints;
    let taken = |w: &World| w.engine.device_status().checkpoints - before;
    w.write(0, 0, &pattern(1, 4096));
    w.pass(9 * SECOND);
    assert_eq!(taken(&w), 0);
    w.pass(2 * SECOND);
    assert_eq!(taken(&w), 1);
    w.pass(30 * SECOND);
    assert_eq!(taken(&w), 1);
}
