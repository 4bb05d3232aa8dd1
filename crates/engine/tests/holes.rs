//! Where an image has nothing, nothing is asked of it, and clients are told.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::{Attach, OwnObjects};

const KIB: usize = 1024;
/// Size of the image.
const SIZE: u64 = 64 * MIB;
/// Bytes of an object.
const OBJECT: u64 = 4 * MIB;

/// A volume whose image has its third object and nothing else.
fn world(mode: Mode) -> World {
    let mut w = World::new(64 * MIB, &[spec("sparse", SIZE, mode)]);
    w.images[0][2 * OBJECT as usize..][..OBJECT as usize].copy_from_slice(&there());
    tell(&mut w);
    w
}

fn there() -> Vec<u8> {
    pattern(3, OBJECT as usize)
}

fn tell(w: &mut World) {
    let mut own = OwnObjects::none(SIZE);
    own.insert(2 * OBJECT, OBJECT);
    w.engine.set_own(VolumeId(0), &own).expect("a volume");
}

/// The stretches of the volume: bytes, and whether they read as zero.
fn extents(w: &World) -> Vec<(u64, bool)> {
    let mut out = Vec::new();
    w.engine.block_status(VolumeId(0), 0, SIZE, 64, &mut out);
    out.iter().map(|extent| (extent.len, extent.zero)).collect()
}

#[test]
fn a_hole_is_read_without_the_image_and_told_to_clients() {
    let mut w = world(Mode::WriteBack);
    assert_eq!(extents(&w), [(2 * OBJECT, true), (OBJECT, false), (SIZE - 3 * OBJECT, true)]);
    // What the image has there nobody looks at.
    w.images[0][..OBJECT as usize].fill(9);
    assert!(w.read(0, 0, 256 * 1024) == vec![0; 256 * KIB]);
    assert!(w.read(0, 2 * OBJECT - 8192, 16384)[..8192] == [0; 8192], "to the end of the hole");
    assert!(w.read(0, 2 * OBJECT, 8192) == there()[..8192]);
    assert!(w.read(0, SIZE - 4096, 4096) == vec![0; 4096]);
    let count = w.status(0).count;
    assert_eq!((count.hole_blocks, count.miss_blocks), (64 + 2 + 1, 2));
    assert_eq!(count.backend_read_bytes, 8192);
}

#[test]
fn the_rest_of_a_block_that_is_written_in_part_comes_from_the_hole() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        let mut w = world(mode);
        w.write(0, 1024, &pattern(1, 512));
        let mut expected = vec![0; 4096];
        expected[1024..1536].copy_from_slice(&pattern(1, 512));
        assert!(w.read(0, 0, 4096) == expected, "{mode:?}");
        assert_eq!(
            w.status(0).count.miss_blocks,
            if mode == Mode::WriteAround { 1 } else { 0 },
            "{mode:?}"
        );
        w.drain(0);
        assert!(w.images[0][..4096] == expected, "{mode:?}");
    }
}

#[test]
fn g1_what_has_been_written_is_no_hole_any_more_whatever_has_become_of_it_in_the_cache() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        let mut w = world(mode);
        w.write(0, 5 * OBJECT + 8192, &pattern(5, 4096));
        w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 7 * OBJECT, 4096).expect("zeroes");
        w.op(0, Op::Discard { fua: false }, 9 * OBJECT, 4096).expect("a discard");
        w.drain(0);
        // The cache forgets all of it.
        w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::Off, c)).expect("off");
        assert!(w.read(0, 5 * OBJECT + 8192, 4096) == pattern(5, 4096), "{mode:?}");
        let data = |w: &World, object: u64| {
            let mut out = Vec::new();
            w.engine.block_status(VolumeId(0), object * OBJECT, OBJECT, 4, &mut out);
            out == [Extent { len: OBJECT, cached: false, dirty: false, zero: false }]
        };
        for object in 0..SIZE / OBJECT {
            assert_eq!(
                data(&w, object),
                [2, 5, 7, 9].contains(&object),
                "{mode:?}, object {object}"
            );
        }
    }
}

#[test]
fn g1_what_is_told_late_does_not_undo_what_was_written_before() {
    let mut w = World::new(64 * MIB, &[spec("sparse", SIZE, Mode::WriteAround)]);
    assert_eq!(extents(&w), [(SIZE, false)], "nothing is known yet");
    w.write(0, OBJECT, &pattern(1, 4096));
    tell(&mut w);
    assert!(w.read(0, OBJECT, 4096) == pattern(1, 4096));
    assert_eq!(extents(&w), [(OBJECT, true), (2 * OBJECT, false), (SIZE - 3 * OBJECT, true)]);
}

#[test]
fn what_an_image_has_is_found_out_anew_when_it_is_opened() {
    let mut w = world(Mode::WriteBack);
    w.restart(true);
    assert_eq!(extents(&w), [(SIZE, false)]);
    w.images[0][..4096].copy_from_slice(&pattern(8, 4096));
    assert!(w.read(0, 0, 4096) == pattern(8, 4096), "somebody has written it meanwhile");
}

#[test]
fn g1_what_is_cut_off_is_no_hole_when_the_image_grows_again() {
    let mut w = world(Mode::WriteBack);
    w.write(0, 10 * OBJECT, &pattern(1, 4096));
    for size_bytes in [6 * OBJECT + 4096, SIZE] {
        w.control(|e, now, c| e.resize(now, VolumeId(0), size_bytes, c)).expect("resized");
        w.images[0].resize(size_bytes as usize, 0);
    }
    assert_eq!(
        extents(&w),
        [(2 * OBJECT, true), (OBJECT, false), (3 * OBJECT, true), (SIZE - 6 * OBJECT, false)]
    );
    assert!(w.read(0, 10 * OBJECT, 4096) == vec![0; 4096]);
}

#[test]
fn a_clone_has_the_holes_of_its_parent_and_its_own_beyond_it() {
    let parent = VolumeSpec { read_only: true, ..spec("@parent", 4 * OBJECT, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[spec("clone", SIZE, Mode::WriteBack), parent]);
    w.images[1][..OBJECT as usize].copy_from_slice(&there());
    let mut own = OwnObjects::none(SIZE).inheriting(4 * OBJECT);
    own.insert(OBJECT, 1);
    w.engine.set_own(VolumeId(0), &own).expect("a volume");
    assert_eq!(
        extents(&w),
        [(4 * OBJECT, false), (SIZE - 4 * OBJECT, true)],
        "of the parent nothing is known"
    );
    w.engine.set_parent(VolumeId(0), VolumeId(1)).expect("a parent");
    assert_eq!(extents(&w), [(4 * OBJECT, false), (SIZE - 4 * OBJECT, true)]);
    let mut own = OwnObjects::none(4 * OBJECT);
    own.insert(0, 1);
    w.engine.set_own(VolumeId(1), &own).expect("a volume");
    assert_eq!(extents(&w), [(2 * OBJECT, false), (SIZE - 2 * OBJECT, true)]);
    assert!(w.read(0, 0, 4096) == there()[..4096]);
    assert!(w.read(0, 3 * OBJECT, 4096) == vec![0; 4096]);
    assert_eq!(w.status(0).count.hole_blocks, 1);
}

#[test]
fn one_answer_covers_gigabytes_of_holes_and_looks_at_a_bounded_number_of_cached_blocks() {
    let size = 1 << 40;
    let mut w = World::new(64 * MIB, &[spec("large", MIB, Mode::WriteBack)]);
    let mut out = Vec::new();
    for at in (0..MIB).step_by(256 * KIB) {
        w.write(0, at, &pattern(1, 256 * KIB));
    }
    w.flush(0);
    w.reopen();
    let attach = Attach { size_bytes: size, ..Attach::again(&w.status(0).spec, true) };
    w.control(|e, now, c| e.attach(now, VolumeId(0), attach, c).expect("attach"))
        .expect("attached");
    w.engine.set_own(VolumeId(0), &OwnObjects::none(size)).expect("a volume");
    w.engine.block_status(VolumeId(0), 0, size, 2, &mut out);
    let told: Vec<_> = out.iter().map(|extent| (extent.len, extent.zero)).collect();
    assert_eq!(told[0], (MIB, false));
    assert!(told[1].0 >= 4 << 30 && told[1].1, "{told:?}");
    assert!(w.engine.set_own(VolumeId(5), &OwnObjects::none(0)) == Err(ControlError::Gone));
}
