//! Back-pressure: acknowledgements are held back while there is a reason to, and no longer.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

const MS: Nanos = 1_000_000;
/// Dirty quota.
const QUOTA: u64 = 8 * MIB;
const PIECE: u64 = 256 * 1024;

/// A volume whose drain has been seen to move about `QUOTA / 4` bytes in a second.
fn world() -> World {
    let mut w = World::new(
        64 * MIB,
        &[VolumeSpec { dirty_bytes_max: QUOTA, ..spec("a", 32 * MIB, Mode::WriteBack) }],
    );
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for at in (0..QUOTA / 2).step_by(PIECE as usize) {
        w.write(0, at, &pattern(at, PIECE as usize));
    }
    w.pass(2000 * MS);
    w.holds = |_| false;
    w.run();
    w.pass(100 * MS);
    w.write(0, 0, &pattern(1, PIECE as usize));
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0);
    w
}

/// Writes as much as the quota takes, with a drain that stands still; returns who is not answered.
fn burst(w: &mut World) -> Vec<RequestId> {
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    let data = pattern(3, PIECE as usize);
    let writes: Vec<_> = (0..QUOTA)
        .step_by(PIECE as usize)
        .map(|at| w.submit(0, Op::Write { fua: false }, at, PIECE, Some(&data)).0)
        .collect();
    w.run();
    writes.into_iter().filter(|id| !w.replies.contains_key(id)).collect()
}

#[test]
fn what_is_held_back_is_released_as_soon_as_there_is_room() {
    let mut w = world();
    let held = burst(&mut w);
    assert!(held.len() >= 4, "above half of the quota they are held back");
    w.holds = |_| false;
    w.pass(MS);
    assert!(w.status(0).dirty_bytes < QUOTA / 2);
    assert!(held.iter().all(|id| w.replies.contains_key(id)), "nothing is in their way any more");
    assert!(w.status(0).count.held_ns < held.len() as u64 * 2 * MS);
}

#[test]
fn nobody_is_held_back_for_longer_than_a_second_however_many_there_are() {
    let mut w = world();
    let held = burst(&mut w);
    w.pass(1000 * MS);
    assert!(held.iter().all(|id| w.replies.contains_key(id)), "{} are left", held.len());
}

#[test]
fn below_half_of_the_quota_nothing_is_held_back_and_what_is_on_its_way_counts() {
    let mut w = world();
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    let write = |w: &mut World, at: u64, len: u64| {
        w.submit(0, Op::Write { fua: false }, at, len, Some(&pattern(at, len as usize))).0
    };
    let below: Vec<_> =
        (0..QUOTA / 2 - PIECE).step_by(PIECE as usize).map(|at| write(&mut w, at, PIECE)).collect();
    w.run();
    assert!(below.iter().all(|id| w.replies.contains_key(id)));
    w.hold_device_writes = true;
    let above: Vec<_> = (0..12).map(|i| write(&mut w, QUOTA + i * (64 << 10), 64 << 10)).collect();
    w.run();
    w.release_device_writes();
    assert!(above.iter().all(|id| !w.replies.contains_key(id)));
}

#[test]
fn zeroes_are_not_held_back_nor_is_anything_once_there_is_another_reason_to_answer() {
    let mode: fn(&mut tidepool_engine::Engine, Nanos, u64) =
        |e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c);
    for operation in [mode, |e, now, c| e.remove(now, VolumeId(0), false, c)] {
        let mut w = world();
        let held = burst(&mut w);
        let (id, _) = w.request(0, Op::Discard { fua: false }, 16 * MIB, MIB, None);
        assert_eq!(w.replies.get(&id), Some(&Ok(())));
        assert!(held.len() >= 4 && held.iter().all(|id| !w.replies.contains_key(id)));
        let control = w.fresh();
        operation(&mut w.engine, w.now, control);
        w.run();
        assert!(held.iter().all(|id| w.replies.contains_key(id)));
    }
}

#[test]
fn the_time_for_which_answers_are_held_back_is_counted() {
    let mut w = world();
    let held = burst(&mut w);
    let mut expected = 0;
    while held.iter().any(|id| !w.replies.contains_key(id)) {
        expected += held.iter().filter(|id| !w.replies.contains_key(id)).count() as u64 * MS;
        w.pass(MS);
    }
    let counted = w.status(0).count.held_ns;
    assert!(
        (expected - held.len() as u64 * MS..=expected).contains(&counted),
        "{counted} of {expected}"
    );
}

#[test]
fn what_is_held_back_comes_at_the_drains_pace() {
    let mut w = world();
    let held = burst(&mut w);
    w.pass(20 * MS);
    let first = held.iter().filter(|id| w.replies.contains_key(id)).count();
    w.pass(200 * MS);
    let then = held.iter().filter(|id| w.replies.contains_key(id)).count();
    assert!(first < then && then < held.len(), "{first}, then {then} of {}", held.len());
}

#[test]
fn the_fuller_the_quota_the_longer_an_acknowledgement_is_held_up_to_the_drains_speed() {
    let mut w = world();
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    let data = pattern(4, PIECE as usize);
    let mut held_ms = Vec::new();
    for at in (0..QUOTA).step_by(PIECE as usize) {
        let id = w.request(0, Op::Write { fua: false }, at, PIECE, Some(&data)).0;
        let began = w.now;
        while !w.replies.contains_key(&id) {
            w.pass(MS);
        }
        held_ms.push((w.now - began) / MS);
    }
    let half = held_ms.len() / 2;
    assert!(
        held_ms[..half].iter().all(|&ms| ms == 0),
        "nothing is held below half of the quota: {held_ms:?}"
    );
    let (longest, steps) = (held_ms[held_ms.len() - 1], half as u64);
    assert!(
        (55..=75).contains(&longest),
        "what the drain was seen to take for as much: {held_ms:?}"
    );
    for (i, &ms) in held_ms[half..].iter().enumerate() {
        assert!(ms.abs_diff(longest * (i as u64 + 1) / steps) <= 1, "in proportion: {held_ms:?}");
    }
}

/// Lets the image have what is not held, and as much time as that takes.
fn image_takes(w: &mut World, holds: fn(&BackendOp) -> bool) {
    w.holds = holds;
    w.pass(3000 * MS);
}

#[test]
fn write_through_with_a_backlog_acknowledges_half_of_what_is_drained_of_it_and_no_more() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for object in 0..3 {
        w.write(0, object * 4 * MIB, &pattern(object, PIECE as usize));
    }
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c)).expect("the mode");
    assert_eq!(w.status(0).state, VolumeState::Draining);
    let data = pattern(9, PIECE as usize / 4);
    let ids: Vec<_> = (0..5)
        .map(|i| w.request(0, Op::Write { fua: false }, (32 + i) * MIB, PIECE / 4, Some(&data)).0)
        .collect();
    let answered = |w: &World| ids.iter().filter(|id| w.replies.contains_key(id)).count();
    w.pass(1000 * MS);
    assert_eq!(answered(&w), 0, "nothing of the backlog is drained");
    image_takes(&mut w, |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 4 * MIB));
    assert_eq!(answered(&w), 2);
    image_takes(&mut w, |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 8 * MIB));
    assert_eq!(answered(&w), 4);
    assert_eq!(w.status(0).state, VolumeState::Draining);
    image_takes(&mut w, |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 12 * MIB));
    assert_eq!(answered(&w), 4, "with the backlog ends what may be answered ahead of the image");
    assert_eq!(w.status(0).state, VolumeState::Serving);
    let late = w.request(0, Op::Write { fua: false }, 40 * MIB, 4096, Some(&pattern(8, 4096))).0;
    w.pass(1000 * MS);
    assert!(!w.replies.contains_key(&late));
    image_takes(&mut w, |_| false);
    assert_eq!(answered(&w), 5);
    assert!(w.replies.contains_key(&late));
}
