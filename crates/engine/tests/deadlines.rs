//! What waits for nothing but time goes on at a deadline that the core names, without any other
//! event.

use crate::common::*;
use tidepool_engine::api::*;

const MS: Nanos = 1_000_000;
const SECOND: Nanos = 1_000_000_000;
const WRITE: Op = Op::Write { fua: false };

#[test]
fn g8_each_of_several_volumes_is_drained_when_its_data_is_old_enough() {
    let specs = ["a", "b", "c"].map(|name| spec(name, 16 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    (0..3).for_each(|v| w.flush(v));
    for round in 0..7 {
        for v in 0..3 {
            w.write(v, 0, &pattern(round, 4096));
            // Whose turn it is depends on how often there was something to do.
            (0..round % 3).for_each(|_| w.pass(1));
            w.follow_deadlines(1500 * MS);
            assert!(
                w.images[v as usize][..4096] == pattern(round, 4096),
                "volume {v}, round {round}"
            );
        }
    }
}

#[test]
fn g8_what_became_due_while_the_driver_did_other_things_is_due_still() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    let due = w.engine.next_deadline().expect("the write is to be drained");
    // The driver comes back late, with nothing new for the core.
    w.now = due + 10 * SECOND;
    w.run();
    assert_eq!(w.engine.next_deadline(), Some(due));
    w.engine.handle(w.now, Event::Tick);
    w.run();
    w.follow_deadlines(5 * SECOND);
    assert!(w.images[0][..4096] == pattern(1, 4096), "and it is done");
}

#[test]
fn zeroes_whose_log_is_stable_are_drained_when_they_are_old_enough() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    w.flush(0);
    w.follow_deadlines(1500 * MS);
    assert!(w.images[0][..MIB as usize].iter().all(|&b| b == 0));
}

#[test]
fn g8_a_backend_that_has_failed_is_given_what_is_dirty_again_half_a_second_later() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_result = Err(IoError::Errno(5));
    w.follow_deadlines(1200 * MS);
    assert_eq!(w.status(0).backend_error, Some(IoError::Errno(5)));
    w.backend_result = Ok(());
    w.follow_deadlines(500 * MS);
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn g8_a_write_past_the_cache_that_found_no_room_is_tried_again_half_a_second_later() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.backend_result = Err(IoError::Full);
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    w.backend_result = Ok(());
    w.follow_deadlines(499 * MS);
    assert_eq!(w.replies.get(&id), None);
    w.follow_deadlines(MS);
    assert_eq!(w.replies.get(&id), Some(&Ok(())));
}

#[test]
fn g8_a_record_that_could_not_be_changed_is_changed_half_a_second_later() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.device_result = Err(IoError::Errno(5));
    w.backend_result = Err(IoError::Errno(5));
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    assert!(w.engine.device_status().failed && w.disowned.is_empty());
    w.backend_result = Ok(());
    w.follow_deadlines(500 * MS);
    assert_eq!((w.disowned.len(), w.replies.get(&id)), (1, Some(&Ok(()))));
}

#[test]
fn what_is_held_back_is_released_and_what_waited_for_its_blocks_goes_on() {
    let quota = 4 * MIB;
    let mut w = World::new(
        64 * MIB,
        &[VolumeSpec { dirty_bytes_max: quota, ..spec("a", 32 * MIB, Mode::WriteBack) }],
    );
    w.flush(0);
    // The drain has been seen to be slow.
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 256 << 10));
    w.pass(2 * SECOND);
    w.holds = |_| false;
    w.run();
    w.pass(100 * MS);
    w.write(0, 0, &pattern(2, 256 << 10));
    w.drain(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for at in (0..quota * 3 / 4).step_by(256 << 10) {
        w.submit(0, WRITE, at, 256 << 10, Some(&pattern(at, 256 << 10)));
    }
    w.run();
    let (first, _) = w.request(0, WRITE, 512, 512, Some(&pattern(3, 512)));
    let (second, _) = w.request(0, WRITE, 1024, 512, Some(&pattern(4, 512)));
    assert!(!w.replies.contains_key(&first) && !w.replies.contains_key(&second));
    w.follow_deadlines(2 * SECOND);
    assert_eq!((w.replies.get(&first), w.replies.get(&second)), (Some(&Ok(())), Some(&Ok(()))));
    assert!(w.read(0, 512, 1024) == [pattern(3, 512), pattern(4, 512)].concat());
}

#[test]
fn g3_a_shutdown_needs_no_tick_to_flush_a_backend() {
    let mut w = unflushed();
    w.engine.shutdown(w.now, 1);
    w.run();
    assert_eq!(w.controls.remove(&1), Some(Ok(())));
    assert!(w.stable.as_ref().expect("set")[0][..4096] == pattern(1, 4096));
}

#[test]
fn g8_a_shutdown_waits_for_a_stopped_backend_until_a_deadline() {
    let mut w = unflushed();
    w.backend_stopped = true;
    w.engine.shutdown(w.now, 1);
    w.run();
    w.follow_deadlines(4999 * MS);
    assert_eq!(w.controls.get(&1), None);
    w.follow_deadlines(MS);
    assert_eq!(w.controls.remove(&1), Some(Ok(())));
}

#[test]
fn g3_a_shutdown_flushes_a_backend_again_that_has_failed() {
    let mut w = unflushed();
    w.stable = None;
    w.flushes_to_fail = 1;
    let before = w.backend_flushes;
    w.engine.shutdown(w.now, 1);
    w.run();
    assert_eq!((w.controls.get(&1), w.backend_flushes), (None, before + 1));
    w.follow_deadlines(500 * MS);
    assert_eq!((w.controls.remove(&1), w.backend_flushes), (Some(Ok(())), before + 2));
}

#[test]
fn g8_a_shutdown_does_not_wait_for_an_image_that_another_owner_has() {
    let mut w = unflushed();
    w.backend_result = Err(IoError::Fenced);
    assert_eq!(w.try_read(0, MIB, 4096), Err(RequestError::Io));
    let before = w.now;
    w.engine.shutdown(w.now, 1);
    w.run();
    assert_eq!((w.controls.remove(&1), w.now), (Some(Ok(())), before));
}

#[test]
fn a_dead_cache_device_asks_for_no_ticks() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.device_result = Err(IoError::Errno(5));
    w.request(0, WRITE, MIB, 4096, Some(&pattern(2, 4096)));
    w.follow_deadlines(10 * SECOND);
    assert!(w.images[0][..4096] == pattern(1, 4096));
    assert_eq!(w.engine.next_deadline(), None);
}

#[test]
fn zeroes_whose_log_is_not_stable_are_drained_without_another_event() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    w.flush(0);
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    let control = w.fresh();
    w.engine.drain(w.now, VolumeId(0), control);
    w.run();
    w.follow_deadlines(9 * SECOND);
    assert_eq!(w.controls.get(&control), Some(&Ok(())));
}
