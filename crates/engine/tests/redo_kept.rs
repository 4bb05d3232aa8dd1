//! How long the redo of a group is kept: until the image can do without it, and no longer.

use crate::common::*;
use tidepool_engine::api::*;

const SECOND: Nanos = 1_000_000_000;

fn grouped() -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 48 * MIB, Mode::WriteBack) }
}

#[test]
fn g5_redo_is_kept_while_only_it_has_the_last_committed_content_of_a_block() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.flush(0);
    // The drain is busy with other objects when it comes to the first, of which two blocks are then
    // in later groups.
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for at in (8..40).rev() {
        w.write(0, at * MIB, &pattern(at, 256 << 10));
    }
    (0..3).for_each(|block| w.write(0, block * 4096, &pattern(block, 4096)));
    w.pass(3 * SECOND);
    w.holds = |op| matches!(op, BackendOp::RedoCommit { .. } | BackendOp::Write { .. });
    w.write(0, 4096, &pattern(11, 4096));
    w.pass(3 * SECOND);
    w.write(0, 8192, &pattern(12, 4096));
    let check = |w: &World, step: &str| {
        let cut = w.cut(0);
        for block in 0..3u64 {
            let is = |seed| cut[block as usize * 4096..][..4096] == pattern(seed, 4096);
            assert!(is(block) || is(10 + block), "{step}: block {block}");
        }
    };
    check(&w, "two groups");
    w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
    w.run();
    w.pass(SECOND / 10);
    check(&w, "the image has what is committed");
    w.holds = |_| false;
    w.run();
    w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
    check(&w, "the second is committed");
    w.pass(5 * SECOND);
    check(&w, "the image has that, too");
    w.holds = |_| false;
    w.pass(5 * SECOND);
    check(&w, "all are committed");
    assert!(w.committed[&0].1.is_empty() && w.images[0][8192..12288] == pattern(12, 4096));
}

#[test]
fn g5_an_object_that_is_written_all_the_time_does_not_keep_the_redo_for_ever() {
    // Pieces in turn, from the end of the object on.
    let offset = |round: u64| (63 - round) * 8192;
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.flush(0);
    // Whenever a group is committed, what was committed before it is on its way to the image.
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    for round in 0..24 {
        w.write(0, offset(round), &pattern(round, 4096));
        match round % 2 {
            _ if round < 2 => {}
            0 => {
                w.holds =
                    |op| matches!(op, BackendOp::Write { offset, .. } if offset / 8192 % 2 == 0)
            }
            _ => {
                w.holds =
                    |op| matches!(op, BackendOp::Write { offset, .. } if offset / 8192 % 2 == 1)
            }
        }
        w.pass(3 * SECOND);
        let kept = &w.committed[&0].1;
        assert!(kept.len() <= 4, "round {round}: {kept:?}");
        let cut = w.cut(0);
        for n in 0..=round {
            assert!(cut[offset(n) as usize..][..4096] == pattern(n, 4096), "{n} of {round}");
        }
    }
    assert_eq!(w.status(0).count.groups, 24);
}
