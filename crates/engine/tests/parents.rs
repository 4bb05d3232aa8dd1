//! Clones read what they have from their parent through its volume.

use crate::common::*;
use std::sync::LazyLock;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::*;

const KIB: usize = 1024;
/// Size of the parent and of its clones.
const SIZE: u64 = 16 * MIB;
/// Bytes of an object.
const OBJECT: u64 = 4 * MIB;

/// Volume 0 is the parent of volumes 1 and 2, which have nothing of their own.
fn world(mode: Mode) -> World {
    let parent = VolumeSpec { read_only: true, ..spec("@parent", SIZE, Mode::WriteBack) };
    let clone = |name| VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, SIZE, mode) };
    let mut w = World::new(64 * MIB, &[parent, clone("a"), clone("b")]);
    w.images = vec![golden().to_vec(); 3];
    adopt(&mut w);
    w
}

fn adopt(w: &mut World) {
    for clone in [1, 2] {
        w.engine
            .set_own(VolumeId(clone), &OwnObjects::none(SIZE).inheriting(SIZE))
            .expect("a volume");
        w.engine.set_parent(VolumeId(clone), VolumeId(0)).expect("a parent");
    }
}

fn golden() -> &'static [u8] {
    static GOLDEN: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(7, SIZE as usize));
    &GOLDEN
}

fn expected(at: u64, len: u64) -> Vec<u8> {
    golden()[at as usize..][..len as usize].to_vec()
}

#[test]
fn what_one_clone_has_read_the_others_find_in_the_cache() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        let mut w = world(mode);
        for at in (0..SIZE).step_by(256 * KIB) {
            assert_eq!(w.read(1, at, 256 * 1024), expected(at, 256 * 1024));
            w.pass(30_000_000);
        }
        let reads = w.backend_reads;
        for at in (0..SIZE).step_by(64 * KIB) {
            assert_eq!(w.read(2, at, 64 * 1024), expected(at, 64 * 1024));
        }
        assert_eq!(w.backend_reads, reads, "{mode:?}");
        assert_eq!(w.status(0).count.backend_reads, reads);
        assert_eq!(w.status(2).count.hit_blocks, SIZE / 4096);
        assert_eq!(w.status(2).count.parent_blocks, SIZE / 4096);
    }
}

#[test]
fn clones_that_read_the_same_at_once_fetch_it_once() {
    let mut w = world(Mode::WriteBack);
    w.backend_stopped = true;
    let mut sent = Vec::new();
    for at in [0u64, 64, 96, 32] {
        for clone in [1, 2] {
            let at = at * 1024;
            let (id, buf) = w.request(clone, Op::Read, at, 128 * 1024, None);
            sent.push((id, buf.expect("a buffer"), at));
        }
    }
    w.backend_stopped = false;
    w.run();
    w.pass(50_000_000);
    for (id, buf, at) in sent {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        assert_eq!(w.engine.arena().bytes(buf), expected(at, 128 * 1024));
    }
    assert_eq!(w.status(0).count.backend_read_bytes, 224 * 1024);
    assert_eq!(w.status(1).count.backend_reads + w.status(2).count.backend_reads, 0);
}

#[test]
fn an_object_that_a_clone_has_written_comes_from_its_own_image() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        let mut w = world(mode);
        w.read(2, 0, 256 * 1024);
        w.pass(30_000_000);
        // Not whole blocks: the rest of them comes from the parent.
        w.write(1, 8 * 1024 + 512, &pattern(1, 5 * KIB));
        w.op(1, Op::Discard { fua: false }, 64 * 1024, 128 * 1024).expect("a discard");
        w.op(1, Op::WriteZeroes { fua: false, no_hole: true }, OBJECT, 4096).expect("zeroes");
        let mut now = expected(0, SIZE);
        now[8 * KIB + 512..][..5 * KIB].copy_from_slice(&pattern(1, 5 * KIB));
        now[64 * KIB..192 * KIB].fill(0);
        now[OBJECT as usize..][..4096].fill(0);
        for drained in [false, true, true] {
            for at in [0, OBJECT, 2 * OBJECT] {
                assert_eq!(w.read(1, at, 256 * 1024), now[at as usize..][..256 * KIB], "{mode:?}");
                assert_eq!(w.read(2, at, 256 * 1024), expected(at, 256 * 1024), "{mode:?}");
            }
            w.drain(1);
            w.pass(1_000_000_000);
            if drained {
                assert_eq!(w.images[1][..(2 * OBJECT) as usize], now[..(2 * OBJECT) as usize]);
                // A parent that is not the same any more would be seen.
                w.images[0][..2 * OBJECT as usize].fill(9);
                w.images[1][3 * OBJECT as usize..].fill(9);
                w.restart(false);
                let mut own = OwnObjects::none(SIZE).inheriting(SIZE);
                own.insert(0, OBJECT + 1);
                w.engine.set_own(VolumeId(1), &own).expect("a volume");
                w.engine.set_parent(VolumeId(1), VolumeId(0)).expect("a parent");
                // Of what the image of the other one has nothing is known: it has everything
                // itself.
                w.engine.set_parent(VolumeId(2), VolumeId(0)).expect("a parent");
                assert_eq!(w.read(1, 3 * OBJECT, 4096), expected(3 * OBJECT, 4096));
            }
        }
    }
}

#[test]
fn g1_what_a_clone_has_written_past_the_cache_does_not_come_from_its_parent() {
    let mut w = world(Mode::WriteAround);
    w.read(2, 0, 64 * 1024);
    w.pass(30_000_000);
    w.write(1, 8192, &pattern(1, 4 * KIB));
    assert!(w.read(1, 8192, 4096) == pattern(1, 4 * KIB));
    assert!(w.read(1, 0, 8192) == expected(0, 8192));
    assert!(w.read(2, 8192, 4096) == expected(8192, 4096));
}

#[test]
fn what_is_cut_off_a_clone_does_not_come_back_from_its_parent() {
    let mut w = world(Mode::WriteBack);
    let resize = |w: &mut World, bytes| {
        w.control(|e, now, c| e.resize(now, VolumeId(1), bytes, c)).expect("another size");
    };
    resize(&mut w, OBJECT + 8192);
    resize(&mut w, 2 * SIZE);
    assert_eq!(w.read(1, OBJECT, 8192), expected(OBJECT, 8192));
    for at in [OBJECT + 8192, 2 * OBJECT, SIZE - 4096, SIZE] {
        assert!(w.read(1, at, 4096).iter().all(|&b| b == 0), "{at}");
    }
    assert_eq!(w.read(1, 0, 8192), expected(0, 8192));
}

#[test]
fn a_clone_goes_on_without_its_parents_image() {
    let mut w = world(Mode::WriteBack);
    w.backend_stopped = true;
    let (id, buf) = w.request(1, Op::Read, 0, 64 * 1024, None);
    let (waiting, other) = w.request(2, Op::Read, 0, 64 * 1024, None);
    w.fail_reads(VolumeId(0));
    w.backend_stopped = false;
    w.run();
    w.pass(50_000_000);
    for (id, buf) in [(id, buf), (waiting, other)] {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        assert_eq!(w.engine.arena().bytes(buf.expect("a buffer")), expected(0, 64 * 1024));
    }
    assert!(w.status(1).count.backend_reads > 0);
}

#[test]
fn a_damaged_block_of_a_parent_is_fetched_again() {
    let mut w = world(Mode::WriteBack);
    w.read(1, 0, 4096);
    w.pass(30_000_000);
    w.corrupt(&expected(0, 4096));
    assert_eq!(w.read(2, 0, 4096), expected(0, 4096));
    assert_eq!(w.status(0).count.corrupt_blocks, 1);
}

#[test]
fn only_a_read_only_volume_is_a_parent_and_it_stays_as_long_as_it_has_clones() {
    let mut w = world(Mode::WriteBack);
    let set = |w: &mut World, id, parent| w.engine.set_parent(VolumeId(id), VolumeId(parent));
    assert_eq!(set(&mut w, 1, 2), Err(ControlError::NotParent));
    assert_eq!(set(&mut w, 0, 0), Err(ControlError::NotParent));
    assert_eq!(set(&mut w, 1, 9), Err(ControlError::Gone));
    let remove = |w: &mut World, id| w.control(|e, now, c| e.remove(now, VolumeId(id), true, c));
    assert_eq!(remove(&mut w, 0), Err(ControlError::IsParent));
    w.read(1, 0, 8192);
    remove(&mut w, 1).expect("a clone");
    assert_eq!(remove(&mut w, 0), Err(ControlError::IsParent));
    remove(&mut w, 2).expect("a clone");
    remove(&mut w, 0).expect("a volume like others");
    w.reopen();
    assert!(w.engine.volumes().is_empty());
}

#[test]
fn reads_that_wait_for_others_go_on_when_the_cache_device_dies() {
    let mut w = world(Mode::WriteBack);
    w.backend_stopped = true;
    let sent: Vec<_> = [1, 2].map(|clone| w.request(clone, Op::Read, 0, 64 * 1024, None)).into();
    w.device_result = Err(IoError::Errno(5));
    w.request(1, Op::Write { fua: false }, OBJECT, 4096, Some(&pattern(3, 4096)));
    w.backend_stopped = false;
    w.run();
    w.pass(50_000_000);
    for (id, buf) in sent {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        assert_eq!(w.engine.arena().bytes(buf.expect("a buffer")), expected(0, 64 * 1024));
    }
}

#[test]
fn g1_a_read_over_the_end_of_an_object_takes_each_side_from_where_it_is() {
    let mut w = world(Mode::WriteBack);
    // Every other object is the clone's own.
    let mut own = OwnObjects::none(SIZE).inheriting(SIZE);
    for object in [1, 3] {
        w.images[1][(object * OBJECT) as usize..][..MIB as usize]
            .copy_from_slice(&pattern(object, 1 << 20));
        own.insert(object * OBJECT, OBJECT);
    }
    // What it does not have itself is never asked of its image.
    w.images[1][..OBJECT as usize].fill(9);
    w.images[1][2 * OBJECT as usize..3 * OBJECT as usize].fill(9);
    w.restart(false);
    for clone in [1, 2] {
        w.engine.set_own(VolumeId(clone), &own).expect("a volume");
        w.engine.set_parent(VolumeId(clone), VolumeId(0)).expect("a parent");
    }
    let near = 64 * KIB;
    let mut content = w.images[1].clone();
    content[..OBJECT as usize].copy_from_slice(&expected(0, OBJECT));
    content[2 * OBJECT as usize..3 * OBJECT as usize]
        .copy_from_slice(&expected(2 * OBJECT, OBJECT));
    for _ in 0..2 {
        for end in [OBJECT, 2 * OBJECT, 3 * OBJECT] {
            let at = end as usize - near;
            assert!(w.read(1, at as u64, 2 * near as u64) == content[at..at + 2 * near], "{end}");
            w.pass(30_000_000);
        }
    }
}

#[test]
fn what_is_read_from_a_parents_image_is_counted_as_the_parents() {
    let mut w = world(Mode::WriteBack);
    w.read(1, 0, 12 * 1024);
    w.read(1, OBJECT, 8 * 1024);
    w.write(1, 2 * OBJECT, &pattern(1, 4 * KIB));
    w.drain(1);
    w.read(1, 2 * OBJECT + MIB, 4 * 1024);
    let count = w.status(1).count;
    assert_eq!((count.miss_blocks, count.parent_blocks), (6, 5));
    assert_eq!(w.status(0).count.parent_blocks, 0);
    w.pass(30_000_000);
    w.read(1, 0, 12 * 1024);
    let count = w.status(1).count;
    assert_eq!((count.hit_blocks, count.parent_blocks), (3, 8));
}

#[test]
fn a_volume_without_a_backend_or_on_its_way_out_is_no_ones_parent_and_has_none() {
    let mut w = world(Mode::WriteBack);
    let set = |w: &mut World, id, parent| w.engine.set_parent(VolumeId(id), VolumeId(parent));
    w.backend_stopped = true;
    w.write(1, 0, &pattern(1, 4 * KIB));
    w.engine.remove(w.now, VolumeId(1), false, 77);
    assert_eq!(set(&mut w, 1, 0), Err(ControlError::Detached), "it is being removed");
    assert_eq!(set(&mut w, 2, 0), Ok(()));
    w.backend_stopped = false;
    w.reopen();
    assert_eq!(set(&mut w, 2, 0), Err(ControlError::Detached));
    let spec = w.status(2).spec;
    let attach = tidepool_engine::Attach::again(&spec, true);
    w.control(|e, now, c| e.attach(now, VolumeId(2), attach, c).expect("attach"))
        .expect("attached");
    assert_eq!(set(&mut w, 2, 0), Err(ControlError::Detached), "the parent has no backend");
}
