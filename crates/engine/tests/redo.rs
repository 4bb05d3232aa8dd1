//! What is written beside the image: all of a group and nothing else, when it is time to, and no
//! longer than it is needed.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

const KIB: usize = 1024;
const BLOCK: usize = BLOCK_BYTES;
const SECOND: Nanos = 1_000_000_000;
const WRITE: Op = Op::Write { fua: false };

fn grouped(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, size_bytes, Mode::WriteBack) }
}

/// A volume with an image of which nothing is zero, and which takes nothing.
fn world() -> World {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.images[0].fill(0x11);
    w.flush(0);
    w.holds = image;
    w
}

fn image(op: &BackendOp) -> bool {
    matches!(
        op,
        BackendOp::Write { .. } | BackendOp::Discard { .. } | BackendOp::WriteZeroes { .. }
    )
}

fn redo(op: &BackendOp) -> bool {
    image(op) || matches!(op, BackendOp::RedoWrite { .. })
}

fn commits(op: &BackendOp) -> bool {
    image(op) || matches!(op, BackendOp::RedoCommit { .. })
}

/// The groups that the header names.
fn named(w: &World) -> Vec<u64> {
    w.committed
        .get(&0)
        .map_or(Vec::new(), |(_, groups)| groups.iter().map(|&(group, _)| group).collect())
}

/// What waits for the backend fails.
fn fail(w: &mut World, error: IoError) {
    w.backend_result = Err(error);
    w.holds = |_| false;
    w.run();
    w.backend_result = Ok(());
}

/// Goes from one deadline to the next until something is so.
fn until(w: &mut World, is_so: impl Fn(&World) -> bool) {
    while !is_so(w) {
        let next = w.engine.next_deadline().expect("there is something to wait for");
        w.now = next.max(w.now + 1);
        w.engine.handle(w.now, Event::Tick);
        w.run();
    }
}

fn put(model: &mut [u8], offset: u64, data: &[u8]) {
    model[offset as usize..offset as usize + data.len()].copy_from_slice(data);
}

#[test]
fn g5_blocks_that_are_logged_in_any_order_are_all_in_the_redo() {
    let mut w = world();
    let mut model = w.images[0].clone();
    let backwards = (0..10).rev().map(|block| (block, 1));
    for (block, n) in backwards.chain([(100, 4), (400, 2), (402, 1), (399, 1)]) {
        let data = pattern(block + 1, n * BLOCK);
        w.submit(0, WRITE, block * BLOCK as u64, data.len() as u64, Some(&data));
        put(&mut model, block * BLOCK as u64, &data);
    }
    w.run();
    w.pass(3 * SECOND);
    assert!(w.cut(0) == model);
    w.restart(true);
    w.pass(3 * SECOND);
    assert_eq!(w.committed[&0].0, 2, "the new owner has committed a group");
    assert!(w.cut(0) == model);
}

#[test]
fn g5_a_group_of_zeroes_alone_has_a_redo() {
    let mut w = world();
    w.op(0, Op::Discard { fua: false }, 4 * MIB, MIB).expect("discard");
    let mut model = w.images[0].clone();
    model[4 << 20..5 << 20].fill(0);
    w.pass(3 * SECOND);
    assert!(w.cut(0) == model);
}

#[test]
fn g5_more_zeroes_than_a_frame_can_name_are_all_in_the_redo() {
    let mut w = world();
    let mut model = w.images[0].clone();
    for i in 0..20 {
        let data = pattern(i + 1, BLOCK);
        w.write(0, i * 8192, &data);
        put(&mut model, i * 8192, &data);
    }
    for i in 0..600 {
        w.op(0, Op::Discard { fua: false }, 4 * MIB + i * 8192, 4096).expect("discard");
        put(&mut model, 4 * MIB + i * 8192, &[0; BLOCK]);
    }
    w.pass(3 * SECOND);
    assert!(w.cut(0) == model);
}

#[test]
fn g5_what_changes_before_its_group_is_read_is_in_the_redo_as_it_was() {
    let mut w = world();
    let mut model = w.images[0].clone();
    // More than the drain has buffers for.
    for at in (0..6 * MIB).step_by(256 * KIB) {
        let data = pattern(at + 1, 256 * KIB);
        w.write(0, at, &data);
        put(&mut model, at, &data);
    }
    w.holds = redo;
    w.pass(2 * SECOND);
    for at in (0..6 * MIB).step_by(256 * KIB) {
        w.write(0, at, &pattern(at + 2, 256 * KIB));
    }
    assert_eq!((w.status(0).count.groups, named(&w).len()), (1, 0));
    w.holds = image;
    w.run();
    assert_eq!((w.status(0).count.groups, named(&w).len()), (1, 1));
    assert!(w.cut(0) == model);
}

#[test]
fn g5_a_frame_that_the_backend_did_not_take_is_made_again_whole() {
    let mut w =
        World::new(64 * MIB, &[grouped("a", 16 * MIB), spec("b", 16 * MIB, Mode::WriteBack)]);
    w.flush(1);
    w.holds = redo;
    let (a, b) = (pattern(1, 64 * KIB), pattern(2, 128 * KIB));
    w.write(0, 0, &a);
    w.pass(2 * SECOND);
    assert_eq!(w.status(0).drain_writes_in_flight, 1);
    fail(&mut w, IoError::Errno(5));
    assert_eq!(w.status(0).drain_writes_in_flight, 0);
    // Until it is tried again, its buffer serves another volume.
    w.holds = image;
    w.write(1, 0, &b);
    let drain = w.fresh();
    w.engine.drain(w.now, VolumeId(1), drain);
    w.run();
    w.pass(SECOND);
    assert_eq!(named(&w), [1]);
    assert!(w.cut(0)[..a.len()] == a);
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&drain), Some(Ok(())));
    assert!(w.images[1][..b.len()] == b);
    assert_eq!(w.status(0).drain_writes_in_flight, 0);
}

#[test]
fn g7_what_does_not_verify_is_not_in_the_redo_and_is_counted_once() {
    let mut w = world();
    let data = pattern(1, 64 * KIB);
    w.write(0, 0, &data);
    w.corrupt(&data[8192..12288]);
    w.pass(4 * SECOND);
    let cut = w.cut(0);
    assert!(cut[..8192] == data[..8192] && cut[12288..64 * KIB] == data[12288..]);
    assert!(cut[8192..12288].iter().all(|&byte| byte == 0x11), "the image's own");
    assert_eq!((w.status(0).lost_blocks, w.status(0).count.corrupt_blocks), (1, 1));
}

#[test]
fn g7_an_older_copy_that_is_lost_before_its_redo_is_written_leaves_nothing_behind() {
    let mut w = world();
    let (old, new) = (pattern(1, BLOCK), pattern(2, BLOCK));
    w.write(0, 0, &old);
    w.write(0, 4096, &pattern(3, BLOCK));
    w.holds = redo;
    w.pass(2 * SECOND);
    w.write(0, 0, &new);
    assert_eq!(w.status(0).dirty_bytes, 3 * BLOCK as u64, "with the older copy");
    w.corrupt(&old);
    fail(&mut w, IoError::Errno(5));
    w.holds = image;
    w.pass(SECOND);
    assert_eq!((named(&w), w.status(0).dirty_bytes), (vec![1], 2 * BLOCK as u64));
    w.pass(3 * SECOND);
    assert!(w.cut(0)[..BLOCK] == new);
    w.holds = |_| false;
    w.drain(0);
    assert_eq!((w.status(0).dirty_bytes, w.status(0).lost_blocks), (0, 0));
    assert!(w.images[0][..BLOCK] == new);
}

#[test]
fn g5_a_group_of_which_nothing_is_left_when_it_is_read_is_not_named() {
    let mut w = world();
    let data = pattern(1, BLOCK);
    w.write(0, 0, &data);
    w.pass(SECOND * 6 / 5);
    // The backend rests for a moment: the group is cut, and not read.
    w.backend_result = Err(IoError::Errno(5));
    assert_eq!(w.try_read(0, 8 * MIB, 4096), Err(RequestError::Io));
    w.backend_result = Ok(());
    w.flush(0);
    assert_eq!(w.status(0).count.groups, 1);
    w.corrupt(&data);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    w.pass(3 * SECOND);
    assert_eq!((w.status(0).exposed_bytes, named(&w)), (0, vec![]));
}

#[test]
fn a_group_ends_with_a_flush_after_one_second_and_without_after_two() {
    let mut w = world();
    let groups = |w: &World| w.status(0).count.groups;
    w.pass(10 * SECOND);
    w.write(0, 0, &pattern(1, BLOCK));
    w.pass(SECOND / 2);
    w.flush(0);
    w.pass(SECOND * 6 / 10);
    assert_eq!(groups(&w), 0);
    w.flush(0);
    assert_eq!(groups(&w), 1);
    let began = w.now;
    w.write(0, 0, &pattern(2, BLOCK));
    until(&mut w, |w| groups(w) > 1);
    assert_eq!((w.now, groups(&w)), (began + 2 * SECOND, 2));
    assert_eq!(w.status(0).count.groups_early, 0);
}

#[test]
fn with_much_that_is_dirty_a_group_ends_early() {
    let mut w =
        World::new(64 * MIB, &[VolumeSpec { dirty_bytes_max: MIB, ..grouped("a", 16 * MIB) }]);
    w.flush(0);
    w.holds = image;
    w.pass(10 * SECOND);
    let began = w.now;
    for at in [0, MIB, 2 * MIB] {
        w.write(0, at, &pattern(at, 256 * KIB));
    }
    until(&mut w, |w| w.status(0).count.groups > 0);
    assert_eq!((w.now, w.status(0).count.groups_early), (began + SECOND / 4, 1));
}

#[test]
fn who_waits_for_a_group_does_not_wait_until_it_is_old() {
    let mut w = world();
    w.holds = |_| false;
    w.pass(10 * SECOND);
    let began = w.now;
    w.write(0, 0, &pattern(1, BLOCK));
    w.drain(0);
    assert!(w.images[0][..BLOCK] == pattern(1, BLOCK));
    w.write(0, 0, &pattern(2, BLOCK));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("write-through");
    assert!(w.images[0][..BLOCK] == pattern(2, BLOCK));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    w.write(0, 0, &pattern(3, BLOCK));
    w.control(|e, now, c| e.remove(now, VolumeId(0), false, c)).expect("removed");
    assert!(w.images[0][..BLOCK] == pattern(3, BLOCK));
    assert_eq!(w.now, began);
}

#[test]
fn the_redo_becomes_no_longer_than_it_may_while_the_image_can_catch_up() {
    let mut w = world();
    w.holds = |op| matches!(op, BackendOp::Flush);
    w.write(0, 0, &pattern(1, BLOCK));
    w.pass(SECOND * 21 / 10);
    let mut data = pattern(2, 4 << 20);
    for round in 0..40 {
        data[0] = round;
        for (i, part) in data.chunks(256 * KIB).enumerate() {
            w.write(0, (i * 256 * KIB) as u64, part);
        }
        w.pass(SECOND * 21 / 10);
    }
    // 128 MiB: the quota is less than that.
    assert_eq!(named(&w).len(), 1 + 31);
    // The image gets what it can, but all that is left has a newer content that is in no group yet.
    w.write(0, 8 * MIB, &pattern(3, BLOCK));
    w.holds = |_| false;
    w.drain(0);
    assert!(w.images[0][..4 << 20] == data);
    w.pass(SECOND);
    assert_eq!(named(&w).len(), 0);
}

#[test]
fn the_redo_becomes_no_longer_than_it_may_while_the_image_refuses_what_it_is_sent() {
    let mut w = world();
    // As long as the image does not have this, all that comes after it is kept.
    w.write(0, 8 * MIB, &pattern(2, BLOCK));
    let data = pattern(1, 4 << 20);
    for _ in 0..40 {
        for (i, part) in data.chunks(256 * KIB).enumerate() {
            w.write(0, (i * 256 * KIB) as u64, part);
        }
        for _ in 0..4 {
            w.pass(SECOND * 6 / 10);
            w.lose_image_writes();
            w.run();
        }
    }
    assert_eq!(named(&w).len(), 31);
    w.holds = |_| false;
    w.drain(0);
    assert!(w.images[0][..4 << 20] == data);
}

#[test]
fn g5_what_the_cut_of_a_snapshot_has_is_not_drained_before_it_is_committed() {
    let mut w = world();
    w.write(0, 0, &pattern(1, BLOCK));
    w.pass(3 * SECOND);
    let snapshot = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), snapshot);
    w.write(0, 8 * MIB, &pattern(2, BLOCK));
    w.pass(SECOND / 2);
    assert_eq!(named(&w), [1, 2]);
    // The cut is of the same moment as the second group, which is on its way to the image.
    w.holds = |op| match op {
        BackendOp::Write { offset, .. } => *offset >= 8 * MIB,
        op => matches!(op, BackendOp::RedoWrite { .. }),
    };
    w.run();
    assert_eq!(w.status(0).count.groups, 3);
    let before = w.backend_flushes;
    w.holds = |op| matches!(op, BackendOp::RedoWrite { .. });
    w.run();
    w.pass(SECOND);
    assert!(w.backend_flushes <= before + 1, "{} flushes", w.backend_flushes - before);
    assert!(w.status(0).dirty && !w.snapshots.contains_key(&snapshot));
    w.holds = |_| false;
    w.run();
    assert_eq!(w.controls.remove(&snapshot), Some(Ok(())));
    assert!(w.snapshots[&snapshot][8 << 20..][..BLOCK] == pattern(2, BLOCK));
}

#[test]
fn g5_the_redo_is_trimmed_group_by_group() {
    let mut w = world();
    let mut model = w.images[0].clone();
    for (i, at) in [0, 8 * MIB, 12 * MIB].into_iter().enumerate() {
        let data = pattern(at + 1, 64 * KIB);
        w.write(0, at, &data);
        put(&mut model, at, &data);
        w.pass(3 * SECOND);
        assert_eq!(named(&w).len(), i + 1);
    }
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 12 * MIB);
    w.pass(SECOND);
    assert_eq!(named(&w), [3]);
    assert!(w.cut(0) == model);
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(named(&w).len(), 0);
    assert!(w.images[0] == model);
}

#[test]
fn g5_the_redo_of_an_earlier_owner_stays_until_another_is_committed() {
    let mut w = world();
    let data = pattern(1, 64 * KIB);
    w.write(0, 0, &data);
    w.pass(3 * SECOND);
    w.holds = redo;
    w.restart(true);
    w.pass(3 * SECOND);
    assert_eq!(w.committed[&0].0, 1);
    assert!(w.cut(0)[..data.len()] == data);
    w.holds = image;
    w.pass(SECOND);
    assert_eq!(w.committed[&0].0, 2);
    assert!(w.cut(0)[..data.len()] == data);
}

#[test]
fn the_redo_of_an_earlier_owner_goes_when_nothing_is_left_that_would_replace_it() {
    let mut w = world();
    let data = pattern(1, BLOCK);
    w.write(0, 0, &data);
    w.pass(3 * SECOND);
    w.restart(true);
    assert_eq!(named(&w), [1]);
    w.corrupt(&data);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    w.pass(SECOND);
    assert_eq!(w.committed[&0], (2, vec![]));
}

#[test]
fn a_commit_that_has_failed_is_tried_again_after_half_a_second() {
    let mut w = world();
    w.holds = commits;
    w.write(0, 0, &pattern(1, BLOCK));
    w.pass(2 * SECOND);
    let began = w.now;
    fail(&mut w, IoError::Errno(5));
    w.holds = image;
    assert_eq!((w.status(0).count.backend_errors, named(&w).len()), (1, 0));
    until(&mut w, |w| !named(w).is_empty());
    assert_eq!(w.now, began + SECOND / 2);
}

#[test]
fn g6_a_fenced_volume_commits_nothing() {
    let mut w = world();
    w.holds = redo;
    w.write(0, 0, &pattern(1, BLOCK));
    w.pass(2 * SECOND);
    w.backend_result = Err(IoError::Fenced);
    assert_eq!(w.try_read(0, 8 * MIB, 4096), Err(RequestError::Io));
    w.backend_result = Ok(());
    w.holds = |_| false;
    w.run();
    w.pass(5 * SECOND);
    assert_eq!((w.status(0).state, named(&w)), (VolumeState::Fenced, vec![]));
}

#[test]
fn g5_a_change_of_the_mode_brings_nothing_to_the_image_that_is_not_committed() {
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        let mut w = world();
        let before = w.images[0].clone();
        w.write(0, 0, &pattern(1, 64 * KIB));
        w.holds = |op| matches!(op, BackendOp::RedoWrite { .. });
        let control = w.fresh();
        w.engine.set_mode(w.now, VolumeId(0), mode, control);
        w.run();
        w.pass(SECOND);
        assert!(w.images[0] == before, "{mode:?}");
        w.holds = |_| false;
        w.pass(SECOND);
        assert!(w.images[0][..64 * KIB] == pattern(1, 64 * KIB), "{mode:?}");
    }
}

#[test]
fn g5_write_through_acknowledges_nothing_that_only_a_redo_has() {
    let mut w = world();
    w.write(0, 0, &pattern(1, BLOCK));
    w.holds = |_| false;
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("write-through");
    w.pass(SECOND);
    w.holds = image;
    let (write, _) = w.request(0, WRITE, MIB, 4096, Some(&pattern(2, BLOCK)));
    w.pass(5 * SECOND);
    assert_eq!((w.replies.get(&write), named(&w)), (None, vec![]));
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.replies.get(&write), Some(&Ok(())));
    assert!(w.images[0][1 << 20..][..BLOCK] == pattern(2, BLOCK));
}

#[test]
fn on_the_way_to_write_through_writes_are_acknowledged_with_their_group() {
    let mut w = world();
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("write-through");
    w.holds = commits;
    let (write, _) = w.request(0, WRITE, MIB, 4096, Some(&pattern(2, BLOCK)));
    w.pass(3 * SECOND);
    assert_eq!(w.replies.get(&write), None);
    w.holds = image;
    w.pass(3 * SECOND);
    assert_eq!(w.replies.get(&write), Some(&Ok(())));
    assert!(w.cut(0)[1 << 20..][..BLOCK] == pattern(2, BLOCK));
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!((w.status(0).state, named(&w)), (VolumeState::Serving, vec![]));
}

#[test]
fn what_is_in_no_group_is_noted_beside_the_image_every_second() {
    let mut w = world();
    w.holds = redo;
    w.pass(10 * SECOND);
    assert_eq!(w.notes, [], "everything is in the image");
    w.write(0, 0, &pattern(1, 2 * BLOCK));
    w.op(0, Op::Discard { fua: false }, 4 * MIB, MIB).expect("discard");
    let bytes_max = w.status(0).dirty_bytes_max;
    let note =
        |sequence, bytes| BackendOp::RedoNote { sequence, durable: sequence, bytes, bytes_max };
    w.notes.clear();
    w.flush(0);
    for _ in 0..4 {
        let (began, before) = (w.now, w.notes.len());
        until(&mut w, |w| w.notes.len() > before);
        assert!(w.now <= began + SECOND && w.notes.len() == before + 1);
        assert_eq!(w.notes.last(), Some(&note(2, 8192 + MIB)));
    }
    // What is in the closed group counts as well as what is in the open one, and only one note is
    // on its way.
    w.holds = |op| redo(op) || matches!(op, BackendOp::RedoNote { .. });
    w.write(0, MIB, &pattern(2, BLOCK));
    w.flush(0);
    w.pass(SECOND * 7 / 2);
    let before = w.notes.len();
    w.holds = redo;
    w.run();
    assert!((1..=2).contains(&(w.notes.len() - before)));
    assert_eq!(w.notes.last(), Some(&note(3, 12288 + MIB)));
    // One that fails is made the next time.
    w.backend_result = Err(IoError::Errno(5));
    w.pass(2 * SECOND);
    w.backend_result = Ok(());
    let before = w.notes.len();
    w.pass(SECOND);
    assert_eq!(w.notes.len(), before + 1);
    w.holds = |_| false;
    w.pass(5 * SECOND);
    let before = w.notes.len();
    w.pass(5 * SECOND);
    assert_eq!(w.notes.len(), before, "everything is in the image");
}
