//! A removal that compares: whatever is cached is compared, wherever it stands, and the answer
//! names the place.

use crate::common::*;
use tidepool_engine::api::*;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECOND: Nanos = 1_000_000_000;

/// Where something is cached: several objects, stretches longer than what is read at once, the end
/// in the middle of a block.
const STRETCHES: [(u64, u64); 5] = [
    (0, 4096),
    (2 * MIB, 3 * MIB),
    (12 * MIB - 4096, 8192),
    (15 * MIB, 256 << 10),
    (16 * MIB - 8192, 8704),
];

fn world() -> World {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB + 512, Mode::WriteBack)]);
    for (offset, len) in STRETCHES {
        for at in (offset..offset + len).step_by(128 << 10) {
            let n = (offset + len - at).min(128 << 10);
            w.write(0, at, &pattern(at, n as usize));
        }
    }
    w.drain(0);
    w
}

fn remove(w: &mut World) -> Result<(), ControlError> {
    w.control(|e, now, c| e.remove(now, VolumeId(0), true, c))
}

#[test]
fn every_cached_block_is_compared_with_the_image_and_nothing_else() {
    let mut w = world();
    let whole = w.images[0].clone();
    for (offset, len) in STRETCHES {
        for at in [offset, offset + len / 2, offset + len - 1] {
            w.images[0][at as usize] ^= 1;
            assert_eq!(remove(&mut w), Err(ControlError::Differs(at / BLOCK * BLOCK)));
            w.images[0].copy_from_slice(&whole);
        }
    }
    for at in [4096, 2 * MIB - 1, 5 * MIB, 12 * MIB + 4096, 15 * MIB - 1] {
        w.images[0][at as usize] ^= 1;
    }
    w.backend_reads = 0;
    assert_eq!(remove(&mut w), Ok(()));
    assert!(w.engine.volumes().is_empty());
    // Each cached byte once, in few reads of at most 256 KiB.
    let least: u64 = STRETCHES.iter().map(|(_, len)| len.div_ceil(256 << 10)).sum();
    assert!((least..=4 * least).contains(&w.backend_reads), "{} reads", w.backend_reads);
}

#[test]
fn a_comparison_that_cannot_be_made_leaves_the_volume_as_it_was() {
    let mut w = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let control = w.fresh();
    w.engine.remove(w.now, VolumeId(0), true, control);
    w.run();
    assert!(!w.controls.contains_key(&control));
    w.fail_reads(VolumeId(0));
    w.run();
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Backend(IoError::Errno(5)))));
    w.holds = |_| false;
    w.pass(10_000_000_000);
    assert!(w.read(0, 0, BLOCK) == pattern(0, 4096));
    w.write(0, 0, &pattern(5, 4096));
    assert_eq!(remove(&mut w), Ok(()));
    assert!(w.images[0][..4096] == pattern(5, 4096));
}

#[test]
fn a_comparison_misses_no_cached_block_when_reclaim_makes_room_meanwhile() {
    let mut w = World::new(
        64 * MIB,
        &[spec("a", 192 * MIB, Mode::WriteBack), spec("b", 16 * MIB, Mode::WriteBack)],
    );
    // One object, in newcomers' segments, read in this order.
    for at in (0..4 * MIB).step_by(64 << 10) {
        w.read(1, at, 64 << 10);
        w.pass(SECOND / 20);
    }
    let cached = w.status(1).cached_bytes;
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("set");
    // The first reads are on their way; meanwhile others need room, and the oldest are evicted.
    w.stopped.push(VolumeId(1));
    let control = w.fresh();
    w.engine.remove(w.now, VolumeId(1), true, control);
    w.run();
    let mut at = 0;
    while w.status(1).cached_bytes > cached / 2 {
        w.read(0, at, 128 << 10);
        at += 128 << 10;
    }
    let left = w.status(1).cached_bytes;
    let mut out = Vec::new();
    w.engine.block_status(VolumeId(1), 0, 4 * MIB, 64, &mut out);
    // A block differs that is still cached, not far behind what was evicted.
    assert!(left > cached / 4 && !out[0].cached && out[1].cached);
    w.images[1][out[0].len as usize + 65536] ^= 1;
    w.stopped.clear();
    w.run();
    w.pass(SECOND);
    let result = w.controls.remove(&control);
    assert!(matches!(result, Some(Err(ControlError::Differs(_)))), "{result:?}");
}
