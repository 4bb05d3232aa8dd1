//! The grouped drain: what is left when the cache is lost.

use crate::common::*;
use tidepool_engine::api::*;

const KIB: usize = 1024;
const SECOND: Nanos = 1_000_000_000;

fn grouped(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, size_bytes, Mode::WriteBack) }
}

/// A volume whose backend takes redo, but nothing for the image.
fn world() -> World {
    World::new(64 * MIB, &[grouped("a", 16 * MIB)])
}

#[test]
fn g5_image_and_redo_are_the_volume_at_the_last_cut() {
    let mut w = world();
    w.images[0].fill(0x11);
    let mut model = w.images[0].clone();
    let mut cuts = vec![model.clone()];
    for step in 0..200u64 {
        let offset = step * 37 % 60 * 64 * 1024;
        let data = pattern(step + 1, (4 * KIB) << (step % 5));
        w.write(0, offset, &data);
        model[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
        cuts.push(model.clone());
        if step % 7 == 0 {
            w.op(0, Op::Discard { fua: false }, offset + 4096, 8192).expect("discard");
            model[offset as usize + 4096..offset as usize + 12288].fill(0);
            cuts.push(model.clone());
        }
        w.pass(SECOND / 8);
        let cut = w.cut(0);
        let at = cuts.iter().position(|state| *state == cut);
        let at = at.unwrap_or_else(|| panic!("step {step}: no state that the volume ever had"));
        // Cuts go forward only.
        cuts.drain(..at);
    }
    assert!(w.status(0).count.groups > 5, "several groups were committed");
    w.flush(0);
    w.pass(5 * SECOND);
    assert!(w.cut(0) == model, "nothing is left uncommitted");
    assert_eq!(w.status(0).exposed_bytes, 0);
    w.drain(0);
    assert!(w.images[0] == model);
    w.pass(SECOND);
    assert!(w.committed[&0].1.is_empty(), "the redo is trimmed when the image has it all");
}

#[test]
fn g5_a_group_holds_what_was_there_at_its_cut_and_not_what_came_after() {
    let mut w = world();
    w.write(0, 0, &pattern(1, 256 * KIB));
    w.backend_stopped = true;
    w.pass(3 * SECOND);
    // The group is cut and its redo on its way; now the same blocks change, and reclaim is hungry
    // for room.
    for seed in 2..60 {
        w.write(0, 0, &pattern(seed, 256 * KIB));
    }
    w.backend_stopped = false;
    w.run();
    w.backend_stopped = true;
    let cut = w.cut(0);
    let first = (1..60).find(|&seed| cut[..256 * KIB] == pattern(seed, 256 * KIB)[..]);
    assert!(first.is_some_and(|seed| seed < 59), "an old state as a whole, not {first:?}");
    w.backend_stopped = false;
    w.drain(0);
    assert_eq!(w.images[0][..256 * KIB], pattern(59, 256 * KIB));
}

#[test]
fn g5_the_redo_is_read_from_the_device_as_it_was_logged() {
    let mut w = world();
    let blocks = 48u64;
    for i in 0..blocks {
        let (block, data) = (i * 29 % blocks * 3, pattern(i + 1, 4 * KIB));
        w.submit(0, Op::Write { fua: false }, block * 4096, 4096, Some(&data));
    }
    w.run();
    let before = w.device_reads;
    w.pass(5 * SECOND);
    let cut = w.cut(0);
    for i in 0..blocks {
        let at = (i * 29 % blocks * 3 * 4096) as usize;
        assert!(cut[at..at + 4 * KIB] == pattern(i + 1, 4 * KIB)[..], "block {i} is in the redo");
    }
    // The image wants each block on its own.
    assert_eq!(w.status(0).dirty_bytes, 0);
    let reads = w.device_reads - before - blocks;
    assert!(reads < blocks / 4, "{reads} reads for the redo");
}

#[test]
fn g5_nothing_goes_to_the_image_before_its_group_is_committed() {
    let mut w = world();
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 4 * MIB, MIB).expect("zeroes");
    let before = w.images[0].clone();
    for _ in 0..40 {
        w.pass(SECOND / 10);
        let committed = w.committed.get(&0).is_some_and(|(_, groups)| !groups.is_empty());
        assert!(committed || w.images[0] == before || w.status(0).dirty_bytes == 0);
    }
    assert!(w.images[0] != before);
}

#[test]
fn g8_a_full_cache_and_a_group_that_never_ends_do_not_block_each_other() {
    let mut w = World::new(64 * MIB, &[grouped("a", 60 * MIB), grouped("b", 16 * MIB)]);
    w.stopped.push(VolumeId(0));
    // As much as fits, again and again over the same blocks, while the first group cannot be
    // committed.
    let mut sent = Vec::new();
    for round in 0..6u64 {
        for chunk in 0..120u64 {
            let data = pattern(round * 1000 + chunk + 1, 128 * KIB);
            let (id, buf) = w.request(
                0,
                Op::Write { fua: false },
                chunk * 128 * 1024,
                data.len() as u64,
                Some(&data),
            );
            w.pass(SECOND / 50);
            if !w.replies.contains_key(&id) {
                sent.push(id);
                break;
            }
            w.engine.arena_mut().free(buf.expect("a write has a buffer"));
        }
        if !sent.is_empty() {
            break;
        }
    }
    assert!(!sent.is_empty(), "the quota is reached");
    // The neighbour goes on all the same.
    for i in 0..200u64 {
        w.write(1, i % 60 * 65536, &pattern(i + 7, 64 * KIB));
        w.pass(SECOND / 100);
    }
    w.stopped.clear();
    w.run();
    w.pass(10 * SECOND);
    assert!(sent.iter().all(|id| w.replies.get(id) == Some(&Ok(()))), "what waited is answered");
    w.drain(0);
    w.drain(1);
    assert_eq!((w.status(0).dirty_bytes, w.status(1).dirty_bytes), (0, 0));
}

#[test]
fn g5_a_restart_takes_everything_dirty_into_its_first_group() {
    let mut w = world();
    let mut model = w.images[0].clone();
    for step in 0..30u64 {
        let data = pattern(step + 1, 64 * KIB);
        w.write(0, step % 11 * 128 * 1024, &data);
        let at = (step % 11 * 128 * 1024) as usize;
        model[at..at + data.len()].copy_from_slice(&data);
        w.pass(SECOND / 5);
    }
    w.flush(0);
    w.restart(true);
    assert!(w.read(0, 0, 64 << 10) == model[..64 * KIB]);
    w.pass(4 * SECOND);
    assert!(w.cut(0) == model);
    w.drain(0);
    assert!(w.images[0] == model);
}

#[test]
fn g5_a_change_of_the_mode_ends_the_groups_and_begins_them_again() {
    let mut w = world();
    for round in 0..4u64 {
        w.write(0, 0, &pattern(10 * round + 1, 64 * KIB));
        w.write(0, MIB, &pattern(10 * round + 2, 4 * KIB));
        w.pass(SECOND / 3);
        for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
            w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("a mode");
            let data = pattern(10 * round + 3 + mode as u64, 16 * KIB);
            w.write(0, 8192, &data);
            assert!(
                w.committed.get(&0).is_none_or(|(_, groups)| groups.is_empty()),
                "{mode:?}: no redo is kept"
            );
            assert_eq!(
                w.images[0][8192..8192 + data.len()],
                data,
                "{mode:?}: acknowledged is in the image"
            );
            assert_eq!(
                w.cut(0)[MIB as usize..MIB as usize + 4 * KIB],
                pattern(10 * round + 2, 4 * KIB)
            );
        }
        w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c))
            .expect("write-back");
    }
}

#[test]
fn g7_a_group_goes_on_without_a_block_that_is_lost() {
    let mut w = world();
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.corrupt(&pattern(1, 64 * KIB)[8192..12288]);
    w.pass(4 * SECOND);
    assert_eq!(w.status(0).lost_blocks, 1);
    assert_eq!(w.try_read(0, 8192, 4096), Err(RequestError::Io));
    let cut = w.cut(0);
    assert_eq!(cut[..8192], pattern(1, 64 * KIB)[..8192]);
    assert_eq!(cut[12288..64 * KIB], pattern(1, 64 * KIB)[12288..]);
}

#[test]
fn g8_a_group_of_which_everything_is_lost_holds_nothing_up() {
    let mut w = world();
    w.write(0, 0, &pattern(1, 4 * KIB));
    w.corrupt(&pattern(1, 4 * KIB));
    assert_eq!(
        w.try_read(0, 0, 4096),
        Err(RequestError::Io),
        "its only copy is lost before its group is cut"
    );
    assert_eq!(w.control(|e, now, c| e.drain(now, VolumeId(0), c)), Err(ControlError::Lost(1)));
    w.write(0, 0, &pattern(2, 4 * KIB));
    w.drain(0);
    assert_eq!(w.images[0][..4 * KIB], pattern(2, 4 * KIB));
}

#[test]
fn g8_a_write_that_went_past_the_cache_does_not_wait_for_a_log_that_goes_on() {
    let mut w = world();
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c))
        .expect("write-around");
    w.write(0, 0, &pattern(1, 4 * KIB));
    w.backend_result = Err(IoError::Full);
    let (id, _) = w.request(0, Op::Write { fua: false }, 0, 4096, Some(&pattern(2, 4 * KIB)));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    w.write(0, MIB, &pattern(3, 4 * KIB));
    w.pass(3 * SECOND);
    assert_eq!(w.replies.get(&id), Some(&Ok(())), "the log takes it");
    w.backend_result = Ok(());
    w.drain(0);
    assert_eq!(w.images[0][..4 * KIB], pattern(2, 4 * KIB));
}

#[test]
fn g5_what_is_on_its_way_when_groups_begin_belongs_to_the_first() {
    let mut w = world();
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("write-through");
    w.backend_stopped = true;
    let (first, _) = w.request(0, Op::Write { fua: false }, 0, 4096, Some(&pattern(1, 4 * KIB)));
    w.pass(SECOND / 10);
    assert!(!w.replies.contains_key(&first), "the image does not have it");
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    w.write(0, MIB, &pattern(2, 4 * KIB));
    // What the image was sent never arrives; only the redo is taken.
    w.lose_image_writes();
    w.backend_stopped = false;
    w.run();
    w.pass(3 * SECOND);
    let cut = w.cut(0);
    assert_eq!(
        cut[MIB as usize..MIB as usize + 4 * KIB],
        pattern(2, 4 * KIB),
        "the second is committed"
    );
    assert_eq!(cut[..4 * KIB], pattern(1, 4 * KIB), "so is the first");
}

#[test]
fn g5_what_is_committed_goes_to_the_image_although_nothing_more_can_be() {
    let commits = |op: &BackendOp| matches!(op, BackendOp::RedoCommit { .. });
    let all = |op: &BackendOp| matches!(op, BackendOp::RedoCommit { .. } | BackendOp::Write { .. });
    let mut w = World::new(64 * MIB, &[grouped("a", 48 * MIB)]);
    // The drain is busy with other objects when it comes to the first, which has something of each
    // group.
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for at in (8..40).rev() {
        w.write(0, at * MIB, &pattern(at, 256 * KIB));
    }
    w.write(0, 0, &pattern(1, 4 * KIB));
    w.pass(3 * SECOND);
    w.holds = all;
    w.write(0, 4096, &pattern(2, 4 * KIB));
    w.pass(3 * SECOND);
    w.write(0, 8192, &pattern(3, 4 * KIB));
    w.holds = commits;
    w.run();
    w.pass(SECOND);
    let holds = |w: &World, n: usize| {
        w.images[0][(n - 1) * 4 * KIB..][..4 * KIB] == pattern(n as u64, 4 * KIB)
    };
    assert_eq!([1, 2, 3].map(|n| holds(&w, n)), [true, false, false]);
    // One more group is committed, and then there is no room for another.
    w.holds = |_| false;
    w.run();
    w.holds = commits;
    w.pass(5 * SECOND);
    assert_eq!([1, 2, 3].map(|n| holds(&w, n)), [true, true, false]);
}

#[test]
fn g5_an_object_that_is_written_all_the_time_does_not_keep_the_redo() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    let mut kept_max = 0;
    w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
    w.write(0, 0, &pattern(100, 4 * KIB));
    w.pass(SECOND * 11 / 5);
    w.write(0, 64 * 1024, &pattern(101, 4 * KIB));
    for i in 0..60u64 {
        w.pass(SECOND * 11 / 5);
        // A group is committed and the next one closed at once; when the drain can look at the
        // object again, something of it is in the closed group and something in the open one.
        w.holds = |op| matches!(op, BackendOp::RedoWrite { .. });
        w.run();
        w.write(0, i % 2 * 64 * 1024, &pattern(i, 4 * KIB));
        w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
        w.run();
        kept_max = kept_max.max(w.committed.get(&0).map_or(0, |(_, groups)| groups.len()));
    }
    assert!(w.status(0).count.groups >= 50, "{} groups", w.status(0).count.groups);
    assert!(kept_max <= 4, "{kept_max} groups were kept");
}
