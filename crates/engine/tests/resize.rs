//! Volumes become larger and smaller while they are served.

mod common;
use common::*;
use tidepool_engine::api::*;

const KIB: usize = 1024;
const SECOND: Nanos = 1_000_000_000;

fn world(drain: DrainOrder) -> World {
    let spec = VolumeSpec { drain, ..spec("a", 16 * MIB, Mode::WriteBack) };
    World::new(64 * MIB, &[spec])
}

fn resize(w: &mut World, size_bytes: u64) -> Result<(), ControlError> {
    w.control(|e, now, c| e.resize(now, VolumeId(0), size_bytes, c))
}

fn is_zero(data: &[u8]) -> bool {
    data.iter().all(|&b| b == 0)
}

#[test]
fn a_grown_volume_has_zeroes_behind_its_old_end_and_takes_writes_there() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = world(drain);
        w.write(0, 16 * MIB - 4096, &pattern(1, 4 * KIB));
        let beyond = w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 16 * MIB, 4096);
        assert_eq!(beyond, Err(RequestError::Invalid));
        resize(&mut w, 24 * MIB).expect("it grows");
        assert_eq!(w.images[0].len() as u64, 24 * MIB);
        assert!(is_zero(&w.read(0, 16 * MIB, 128 * 1024)));
        w.write(0, 23 * MIB, &pattern(2, 64 * KIB));
        w.restart(true);
        assert_eq!(w.status(0).spec.size_bytes, 24 * MIB);
        assert_eq!(w.read(0, 23 * MIB, 64 * 1024), pattern(2, 64 * KIB));
        w.drain(0);
        assert_eq!(w.images[0][(23 * MIB) as usize..][..64 * KIB], pattern(2, 64 * KIB));
        assert_eq!(w.images[0][(16 * MIB) as usize - 4096..][..4 * KIB], pattern(1, 4 * KIB));
    }
}

#[test]
fn a_shrunk_volume_loses_what_is_beyond_its_end_and_nothing_else() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = world(drain);
        w.write(0, 0, &pattern(1, 128 * KIB));
        w.write(0, 10 * MIB, &pattern(2, 128 * KIB));
        w.pass(3 * SECOND);
        // Dirty on both sides of the new end, in one object too, and zeroes.
        w.write(0, 5 * MIB - 32 * 1024, &pattern(3, 64 * KIB));
        w.write(0, 12 * MIB, &pattern(4, 128 * KIB));
        w.op(0, Op::Discard { fua: false }, 14 * MIB, MIB).expect("a discard");
        resize(&mut w, 5 * MIB).expect("it shrinks");
        assert_eq!(w.images[0].len() as u64, 5 * MIB);
        assert_eq!(w.try_read(0, 5 * MIB, 4096), Err(RequestError::Invalid));
        w.drain(0);
        let status = w.status(0);
        assert_eq!((status.dirty_bytes, status.dirty_zero_bytes), (0, 0));
        assert_eq!(w.images[0][..128 * KIB], pattern(1, 128 * KIB));
        let tail = &w.images[0][(5 * MIB) as usize - 32 * KIB..];
        assert_eq!(tail, &pattern(3, 64 * KIB)[..32 * KIB]);
        // What was there does not come back, neither by growing nor by a restart.
        resize(&mut w, 16 * MIB).expect("it grows");
        assert!(is_zero(&w.read(0, 5 * MIB, 128 * 1024)) && is_zero(&w.read(0, 12 * MIB, 128 * 1024)));
        w.restart(true);
        assert!(is_zero(&w.read(0, 5 * MIB, 128 * 1024)) && is_zero(&w.read(0, 12 * MIB, 128 * 1024)));
        assert_eq!(w.read(0, 0, 128 * 1024), pattern(1, 128 * KIB));
    }
}

#[test]
fn frozen_copies_beyond_the_end_are_given_back() {
    let mut w = world(DrainOrder::Grouped);
    w.write(0, 12 * MIB, &pattern(1, 128 * KIB));
    w.backend_stopped = true;
    w.pass(3 * SECOND);
    // The group is closed; its copies are frozen by these.
    w.write(0, 12 * MIB, &pattern(2, 128 * KIB));
    assert_eq!(w.status(0).dirty_bytes, 256 * 1024, "both are held");
    let control = w.fresh();
    w.engine.resize(w.now, VolumeId(0), 4 * MIB, control);
    w.pass(SECOND);
    assert_eq!(w.status(0).dirty_bytes, 0, "nothing beyond the end is held");
    assert!(!w.controls.contains_key(&control), "it waits for the backend");
    w.write(0, 0, &pattern(3, 64 * KIB));
    w.backend_stopped = false;
    w.pass(5 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.drain(0);
    assert_eq!(w.images[0][..64 * KIB], pattern(3, 64 * KIB));
    assert_eq!(w.images[0].len() as u64, 4 * MIB);
}

#[test]
fn a_size_that_cannot_be_had_changes_nothing() {
    let mut w = world(DrainOrder::Grouped);
    w.write(0, 0, &pattern(1, 64 * KIB));
    for size in [0, 4095, 16 * MIB + 512, (1 << 50) + 4096] {
        assert_eq!(resize(&mut w, size), Err(ControlError::Size(size)));
    }
    w.resize_result = Err(IoError::Full);
    for size in [24 * MIB, 8 * MIB] {
        assert_eq!(resize(&mut w, size), Err(ControlError::Backend(IoError::Full)));
        assert_eq!(w.status(0).spec.size_bytes, 16 * MIB);
    }
    assert_eq!(w.read(0, 0, 64 * 1024), pattern(1, 64 * KIB));
    w.write(0, 15 * MIB, &pattern(2, 64 * KIB));
    w.drain(0);
}
