//! Changes that go past the cache: what they must not overtake, and what must not come back over
//! them.

use crate::common::*;
use tidepool_engine::api::*;

const SECOND: Nanos = 1_000_000_000;
const WRITE: Op = Op::Write { fua: false };

fn set_mode(w: &mut World, mode: Mode) {
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("the mode");
}

#[test]
fn g3_a_write_past_the_cache_waits_until_the_log_before_it_is_stable() {
    let quota = 12 * MIB;
    let mut w = World::new(
        64 * MIB,
        &[VolumeSpec { dirty_bytes_max: quota, ..spec("a", 64 * MIB, Mode::WriteBack) }],
    );
    w.flush(0);
    // The image takes nothing but the last write, so that all that the drain can have in flight is,
    // and it asks for no sync.
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset != 60 * MIB);
    w.write(0, 0, &pattern(1, 4096));
    w.corrupt(&pattern(1, 4096));
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    for at in (8 * MIB..18 * MIB).step_by(256 << 10) {
        w.write(0, at, &pattern(at, 256 << 10));
    }
    set_mode(&mut w, Mode::WriteAround);
    w.pass(SECOND);
    // It takes the place of what is lost in the log, and nothing has made that stable.
    let (logged, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(2, 4096)));
    assert_eq!(w.replies.get(&logged), None, "the image does not have it");
    let syncs = w.device_syncs;
    let (past, _) = w.submit(0, WRITE, 60 * MIB, 4096, Some(&pattern(3, 4096)));
    while w.images[0][60 << 20..][..4096] != pattern(3, 4096) {
        assert!(w.step(), "nothing asks for a sync");
    }
    assert!(
        w.device_syncs > syncs,
        "the image has what comes after something that a power loss would take"
    );
    w.run();
    assert_eq!(w.replies.get(&past), Some(&Ok(())));
}

#[test]
fn g1_a_write_past_the_cache_waits_for_the_drain_of_what_it_covers() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 4096));
    set_mode(&mut w, Mode::WriteAround);
    w.request(0, WRITE, 0, 4096, Some(&pattern(2, 4096)));
    w.pass(SECOND);
    // Neither has reached the image.
    w.restart(true);
    assert!(w.read(0, 0, 4096) == pattern(1, 4096), "what was acknowledged is there");
}

#[test]
fn g1_a_write_past_the_cache_waits_for_the_drain_of_zeroes_that_it_covers() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.images[0].fill(0x11);
    w.holds = |op| matches!(op, BackendOp::Discard { .. });
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    set_mode(&mut w, Mode::WriteAround);
    let (id, _) = w.request(0, WRITE, 8192, 4096, Some(&pattern(2, 4096)));
    w.pass(SECOND);
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.replies.get(&id), Some(&Ok(())));
    assert!(w.read(0, 8192, 4096) == pattern(2, 4096), "no older zeroes have come over it");
}

#[test]
fn g5_a_write_past_the_cache_waits_until_no_redo_would_take_it_back() {
    let mut w = World::new(
        64 * MIB,
        &[VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) }],
    );
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::RedoTrim { .. });
    w.write(0, 0, &pattern(1, 4096));
    w.pass(5 * SECOND);
    assert!(w.images[0][..4096] == pattern(1, 4096) && !w.committed[&0].1.is_empty());
    // The redo knows the block, and the cache does not.
    w.corrupt(&pattern(1, 4096)[..]);
    w.refuses = |op| matches!(op, BackendOp::Read { .. }).then_some(IoError::Errno(5));
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    w.refuses = |_| None;
    set_mode(&mut w, Mode::WriteAround);
    w.pass(SECOND);
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(2, 4096)));
    w.pass(SECOND);
    assert!(!w.replies.contains_key(&id) || w.cut(0)[..4096] == pattern(2, 4096));
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.replies.get(&id), Some(&Ok(())));
    assert!(w.cut(0)[..4096] == pattern(2, 4096));
}

/// A block that is being copied into the cache: the copy is on its way to the device.
fn filling() -> World {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.images[0].fill(0x11);
    w.flush(0);
    w.read(0, MIB, 4096);
    w.hold_device_writes = true;
    w.pass(SECOND / 10);
    w.hold_device_writes = false;
    w
}

#[test]
fn g1_a_copy_that_was_on_its_way_into_the_cache_does_not_come_back_over_a_write_past_it() {
    let mut w = filling();
    w.write(0, MIB, &pattern(1, 4096));
    w.die_with_device_writes();
    w.attach(true);
    assert!(w.read(0, MIB, 4096) == pattern(1, 4096));
}

#[test]
fn g1_a_copy_that_was_on_its_way_when_the_cache_was_switched_off_does_not_come_back() {
    let mut w = filling();
    let control = w.fresh();
    w.engine.set_mode(w.now, VolumeId(0), Mode::Off, control);
    w.run();
    w.write(0, MIB, &pattern(1, 4096));
    w.die_with_device_writes();
    for (id, spec) in w.engine.volumes() {
        let again = tidepool_engine::Attach::again(&spec, true);
        let attach = tidepool_engine::Attach { mode: Mode::WriteAround, ..again };
        w.control(|e, now, c| e.attach(now, id, attach, c).expect("attach")).expect("attached");
    }
    assert!(w.read(0, MIB, 4096) == pattern(1, 4096));
}

#[test]
fn what_is_being_read_when_the_cache_is_switched_off_is_not_kept() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let (read, _) = w.request(0, Op::Read, MIB, 4096, None);
    set_mode(&mut w, Mode::Off);
    w.backend_stopped = false;
    w.run();
    w.pass(SECOND);
    assert_eq!((w.replies.get(&read), w.status(0).cached_bytes), (Some(&Ok(())), 0));
}

#[test]
fn the_cache_is_off_when_what_was_on_its_way_into_it_is_drained() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.hold_device_writes = true;
    let (write, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    w.hold_device_writes = false;
    let control = w.fresh();
    w.engine.set_mode(w.now, VolumeId(0), Mode::Off, control);
    w.pass(SECOND);
    assert_eq!((w.replies.get(&write), w.controls.get(&control)), (None, None));
    w.release_device_writes();
    w.pass(SECOND);
    assert_eq!((w.replies.get(&write), w.controls.get(&control)), (Some(&Ok(())), Some(&Ok(()))));
    assert_eq!(w.status(0).cached_bytes, 0);
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn what_was_forgotten_costs_a_write_past_the_cache_one_record_and_no_more() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    set_mode(&mut w, Mode::WriteAround);
    w.pass(SECOND / 2);
    let before = w.engine.device_status().records;
    w.write(0, 0, &pattern(1, 4096));
    assert_eq!(w.engine.device_status().records - before, 1);
}

#[test]
fn g7_a_write_past_the_cache_that_is_on_its_way_uncovers_nothing_older_under_a_lost_block() {
    let lost = 4 * MIB + 4096;
    for first in [lost, lost - 4096] {
        let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
        w.flush(0);
        w.images[0].fill(0x44);
        w.holds = |op| matches!(op, BackendOp::Write { .. });
        w.write(0, lost, &pattern(1, 4096));
        w.corrupt(&pattern(1, 4096));
        assert_eq!(w.try_read(0, lost, 4096), Err(RequestError::Io));
        set_mode(&mut w, Mode::WriteAround);
        let data = pattern(2, (lost + 4096 - first) as usize);
        w.request(0, WRITE, first, data.len() as u64, Some(&data));
        w.pass(SECOND);
        assert_ne!(w.try_read(0, lost, 4096), Ok(vec![0x44; 4096]), "while it is on its way");
        w.restart(true);
        assert_ne!(w.try_read(0, lost, 4096), Ok(vec![0x44; 4096]), "after a restart");
    }
}

#[test]
fn g3_a_flush_behind_a_dead_cache_device_covers_what_went_past_it() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.device_result = Err(IoError::Errno(5));
    w.request(0, WRITE, MIB, 4096, Some(&pattern(2, 4096)));
    w.pass(2 * SECOND);
    w.stable = Some(w.images.clone());
    w.write(0, 2 * MIB, &pattern(3, 4096));
    w.flush(0);
    assert!(w.stable.as_ref().expect("set")[0][2 << 20..][..4096] == pattern(3, 4096));
}

#[test]
fn g3_after_a_restart_a_flush_covers_what_went_past_the_cache_before_and_after_it() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.stable = Some(w.images.clone());
    w.write(0, 0, &pattern(1, 4096));
    w.holds = |op| matches!(op, BackendOp::Flush);
    w.restart(true);
    let (flush, _) = w.request(0, Op::Flush, 0, 0, None);
    assert_eq!(
        w.replies.get(&flush),
        None,
        "a write of the daemon before it may still be in the backend's cache"
    );
    w.holds = |_| false;
    w.run();
    assert_eq!(w.replies.get(&flush), Some(&Ok(())));
    assert!(w.stable.as_ref().expect("set")[0][..4096] == pattern(1, 4096));
    w.write(0, MIB, &pattern(2, 4096));
    assert!(w.status(0).backend_unflushed);
    w.flush(0);
    assert!(w.stable.as_ref().expect("set")[0][1 << 20..][..4096] == pattern(2, 4096));
}
