//! What a volume is added and attached with is what it has afterwards, and what cannot be is
//! refused.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{AddError, Attach};

fn attach(w: &mut World, attach: &Attach) {
    w.control(|e, now, c| e.attach(now, VolumeId(0), attach.clone(), c).expect("attach"))
        .expect("attached");
}

/// Stops the daemon in good order, and starts it again.
fn stop(w: &mut World) {
    w.control(|e, now, c| e.shutdown(now, c)).expect("shutdown");
    w.reopen();
}

#[test]
fn an_attachment_replaces_all_that_it_names_and_keeps_the_rest_also_over_a_restart() {
    let old = spec("a", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 << 20, std::slice::from_ref(&old));
    w.reopen();
    assert_eq!(w.status(0).state, VolumeState::Detached);
    let new = VolumeSpec {
        size_bytes: 17 * MIB,
        mode: Mode::WriteThrough,
        drain: DrainOrder::Grouped,
        dirty_bytes_max: 3 * MIB,
        read_only: true,
        generation: 7,
        attachment: vec![9; 100],
        ..old
    };
    w.images[0].resize(17 << 20, 0);
    attach(&mut w, &Attach { generation: 7, ..Attach::again(&new, true) });
    let status = w.status(0);
    assert_eq!(
        (&status.spec, status.mode, status.state),
        (&new, Mode::WriteThrough, VolumeState::Serving)
    );
    assert_eq!(status.dirty_bytes_max, 0, "who only reads dirties nothing");
    w.reopen();
    assert_eq!(w.engine.volumes(), [(VolumeId(0), new.clone())]);
    attach(&mut w, &Attach { read_only: false, ..Attach::again(&new, true) });
    assert_eq!(w.status(0).dirty_bytes_max, 3 * MIB);
}

#[test]
fn an_image_that_has_shrunk_is_attached_unless_something_newer_lay_behind_its_new_end() {
    let old = spec("a", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 << 20, std::slice::from_ref(&old));
    w.backend_stopped = true;
    w.write(0, 8 * MIB, &pattern(1, 4096));
    w.reopen();
    let smaller = |size_bytes| Attach { size_bytes, ..Attach::again(&old, true) };
    for size in [4 * MIB, 8 * MIB] {
        let refused = w.engine.attach(w.now, VolumeId(0), smaller(size), 1);
        assert_eq!(refused, Err(AddError::Shrunk(size)));
        assert_eq!((w.status(0).state, w.status(0).spec), (VolumeState::Detached, old.clone()));
    }
    // The block is the last one of what is left.
    w.backend_stopped = false;
    w.images[0].truncate((8 << 20) + 4096);
    attach(&mut w, &smaller(8 * MIB + 4096));
    assert_eq!(w.status(0).state, VolumeState::Serving);
    w.drain(0);
    assert!(w.images[0][8 << 20..] == pattern(1, 4096));
}

#[test]
fn clean_blocks_behind_the_new_end_of_an_image_are_not_there_when_it_grows_again() {
    let old = spec("a", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 << 20, std::slice::from_ref(&old));
    for at in [4 * MIB - 4096, 4 * MIB, 12 * MIB] {
        w.write(0, at, &pattern(at, 4096));
    }
    w.drain(0);
    stop(&mut w);
    w.images[0].truncate(4 << 20);
    attach(&mut w, &Attach { size_bytes: 4 * MIB, ..Attach::again(&old, true) });
    assert_eq!(w.status(0).cached_bytes, 4096);
    w.reopen();
    w.images[0].resize(16 << 20, 0);
    attach(&mut w, &Attach { generation: 3, ..Attach::again(&old, true) });
    assert!(w.read(0, 4 * MIB - 4096, 4096) == pattern(4 * MIB - 4096, 4096));
    assert!(w.read(0, 4 * MIB, 4096) == vec![0; 4096]);
    assert!(w.read(0, 12 * MIB, 4096) == vec![0; 4096]);
}

#[test]
fn only_a_recovered_volume_can_be_attached_and_only_once() {
    let old = spec("a", 16 * MIB, Mode::WriteBack);
    let mut w = World::new(64 << 20, std::slice::from_ref(&old));
    let refused = Err(AddError::NotDetached);
    assert_eq!(w.engine.attach(w.now, VolumeId(0), Attach::again(&old, true), 1), refused);
    assert_eq!(w.engine.attach(w.now, VolumeId(1), Attach::again(&old, true), 1), refused);
    w.reopen();
    attach(&mut w, &Attach::again(&old, true));
    assert_eq!(w.engine.attach(w.now, VolumeId(0), Attach::again(&old, true), 1), refused);
}

#[test]
fn a_volume_that_cannot_be_served_is_refused_and_the_largest_that_can_be_is_not() {
    let mut w = World::new(64 << 20, &[]);
    let good = spec("a", MIB, Mode::WriteBack);
    let mut add = |spec: VolumeSpec| w.engine.add_volume(0, spec, 1);
    let name = |name: &str| VolumeSpec { name: name.into(), ..good.clone() };
    for bad in ["", "a/b", "a b", "ä", &"n".repeat(65)] {
        assert_eq!(add(name(bad)), Err(AddError::Name(bad.into())));
    }
    for size_bytes in [0, 511, 513, (1 << 50) + 512] {
        assert_eq!(add(VolumeSpec { size_bytes, ..good.clone() }), Err(AddError::Size(size_bytes)));
    }
    assert_eq!(
        add(VolumeSpec { backend: "b".repeat(1025), ..good.clone() }),
        Err(AddError::TooLong("URI"))
    );
    let attachment = vec![0; ATTACHMENT_BYTES_MAX + 1];
    assert_eq!(
        add(VolumeSpec { attachment, ..good.clone() }),
        Err(AddError::TooLong("attachment"))
    );

    let longest = VolumeSpec {
        name: format!("{}._-@", "n".repeat(60)),
        backend: "b".repeat(1024),
        size_bytes: 1 << 50,
        attachment: vec![0; ATTACHMENT_BYTES_MAX],
        ..good.clone()
    };
    assert_eq!(add(longest.clone()), Ok(VolumeId(0)));
    assert_eq!(add(longest.clone()), Err(AddError::Exists(longest.name.clone())));
    let smallest = VolumeSpec { size_bytes: 512, ..name("s") };
    assert_eq!(add(smallest.clone()), Ok(VolumeId(1)));
    w.pass(1_000_000_000);
    w.reopen();
    assert_eq!(w.engine.volumes(), [(VolumeId(0), longest), (VolumeId(1), smallest)]);
}

#[test]
fn an_attachment_that_is_too_long_or_cannot_be_recorded_is_refused() {
    let mut w = World::new(64 << 20, &[spec("a", MIB, Mode::WriteBack)]);
    let set = |w: &mut World, id, bytes: usize| {
        w.control(|e, now, c| e.set_attachment(now, VolumeId(id), vec![5; bytes], c))
    };
    assert_eq!(set(&mut w, 0, ATTACHMENT_BYTES_MAX), Ok(()));
    assert_eq!(set(&mut w, 0, ATTACHMENT_BYTES_MAX + 1), Err(ControlError::TooLong));
    assert_eq!(set(&mut w, 1, 1), Err(ControlError::Gone));
    assert_eq!(w.status(0).spec.attachment, vec![5; ATTACHMENT_BYTES_MAX]);
    w.device_result = Err(IoError::Errno(5));
    assert_eq!(set(&mut w, 0, 1), Err(ControlError::Device), "the device fails");
    assert_eq!(set(&mut w, 0, 2), Err(ControlError::Device), "the device has failed");
    assert_eq!(w.status(0).spec.attachment, vec![5; 1], "a dead device is asked for nothing");
}

#[test]
fn a_volume_without_a_backend_leaves_only_if_nothing_of_it_is_needed() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 4096));
    w.drain(0);
    stop(&mut w);
    let remove = |verify| {
        move |e: &mut tidepool_engine::Engine, now, c| e.remove(now, VolumeId(0), verify, c)
    };
    assert_eq!(
        w.control(remove(true)),
        Err(ControlError::Detached),
        "there is nothing to compare with"
    );
    assert_eq!(w.control(remove(false)), Ok(()));
    assert_eq!(w.engine.volumes(), []);
}
