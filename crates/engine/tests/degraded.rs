//! A volume in write-back that is to have a second copy, and has none.

use crate::common::{MIB, World, pattern, spec};
use tidepool_engine::api::*;

const WRITE: Op = Op::Write { fua: false };
const V: VolumeId = VolumeId(0);

fn grouped() -> World {
    let volume = VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[volume]);
    w.flush(0);
    w
}

fn degrade(w: &mut World, degraded: Degraded) {
    w.engine.set_degraded(w.now, V, degraded);
    w.run();
}

#[test]
fn g4_without_a_copy_nothing_is_acknowledged_that_the_image_lacks() {
    let mut w = grouped();
    degrade(&mut w, Degraded::WriteThrough);
    let status = w.status(0);
    assert_eq!((status.mode, status.spec.mode), (Mode::WriteThrough, Mode::WriteBack));
    w.backend_stopped = true;
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    w.pass(1_000_000_000);
    assert_eq!(w.replies.get(&id), None, "it is in one log only");
    w.backend_stopped = false;
    w.pass(1_000_000_000);
    assert_eq!(w.replies.remove(&id), Some(Ok(())));
    assert!(w.cut(0)[..4096] == pattern(1, 4096), "image and redo have it");
    // With a copy that counts it is write-back again.
    degrade(&mut w, Degraded::No);
    w.backend_stopped = true;
    w.write(0, 8192, &pattern(2, 4096));
    assert_eq!(w.status(0).mode, Mode::WriteBack);
    w.backend_stopped = false;
}

#[test]
fn a_volume_that_stops_without_a_copy_takes_no_changes_and_answers_reads() {
    let mut w = grouped();
    w.write(0, 0, &pattern(1, 4096));
    degrade(&mut w, Degraded::Stopped);
    let before = w.log().logged;
    let (id, _) = w.request(0, WRITE, 4096, 4096, Some(&pattern(2, 4096)));
    w.pass(5_000_000_000);
    assert_eq!((w.replies.get(&id), w.log().logged), (None, before));
    assert_eq!(w.read(0, 0, 4096), pattern(1, 4096));
    assert!(!w.log().held_up, "it is not a peer that it waits for");
    degrade(&mut w, Degraded::No);
    w.pass(100_000_000);
    assert_eq!(w.replies.remove(&id), Some(Ok(())));
}

#[test]
fn what_a_stopped_volume_has_taken_in_is_in_nobody_s_way_who_removes_it() {
    let mut w = grouped();
    degrade(&mut w, Degraded::Stopped);
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    w.control(|e, now, c| e.remove(now, V, true, c)).expect("it is removed");
    assert_eq!(w.replies.remove(&id), Some(Ok(())));
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn other_modes_and_an_attachment_know_nothing_of_it() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    degrade(&mut w, Degraded::Stopped);
    w.write(0, 0, &pattern(1, 4096));
    assert_eq!(w.status(0).mode, Mode::WriteAround);
    w.control(|e, now, c| e.set_mode(now, V, Mode::WriteBack, c)).expect("another mode");
    assert_eq!(w.status(0).mode, Mode::WriteThrough, "from now on it counts");
    w.restart(true);
    assert_eq!(w.status(0).mode, Mode::WriteBack, "it has to be said again");
}

#[test]
fn a_copy_that_nothing_can_be_read_with_does_not_begin() {
    let mut w = grouped();
    let room = Room { bytes: 1 << 20, ranges: 4 };
    let good = Begin { generation: 9, size_bytes: 16 * MIB, base: 5, room };
    for bad in [
        Begin { size_bytes: 0, ..good },
        Begin { size_bytes: 4097, ..good },
        Begin { size_bytes: 1 << 51, ..good },
        Begin { base: u64::MAX, ..good },
        Begin { generation: u64::MAX, ..good },
    ] {
        let volume = VolumeSpec {
            generation: bad.generation,
            size_bytes: bad.size_bytes,
            ..spec("copy", 16 * MIB, Mode::WriteBack)
        };
        let control = w.fresh();
        assert!(w.engine.add_replica(volume, bad.base, bad.room, control).is_err(), "{bad:?}");
    }
    w.reopen();
    let size = w.status(0).spec.size_bytes;
    let begun = w.control(|e, _, c| {
        e.begin_replica(V, Begin { size_bytes: 4097, ..good }, c);
    });
    assert_eq!((begun, w.status(0).spec.size_bytes), (Err(ControlError::Size(4097)), size));
}
