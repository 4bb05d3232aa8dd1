//! Back-pressure: acknowledgements are held back while there is a reason to, and no longer.

mod common;
use common::*;
use tidepool_engine::api::*;

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
fn what_is_held_back_comes_at_the_drains_pace() {
    let mut w = world();
    let held = burst(&mut w);
    w.pass(20 * MS);
    let first = held.iter().filter(|id| w.replies.contains_key(id)).count();
    w.pass(200 * MS);
    let then = held.iter().filter(|id| w.replies.contains_key(id)).count();
    assert!(first < then && then < held.len(), "{first}, then {then} of {}", held.len());
}
