//! Rollbacks of an image to a snapshot, also those that are cut short.

use super::*;

/// Writes a block at this offset.
fn write_at(backend: &mut RbdBackend, offset: u64, byte: u8) {
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(byte);
    let mut outcome = None;
    // SAFETY: the data lives unchanged until the outcome is there.
    unsafe { backend.submit(1, Transfer::Write { offset, ptr: data.as_ptr(), len: 4096 }) };
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| outcome = Some(result));
    }
    assert_eq!(outcome, Some(Ok(())));
}

/// Options of an open that rolls the image back, for a cache that knows the image as this
/// generation.
fn back_to(snapshot: &str, generation: u64) -> OpenOptions {
    OpenOptions { roll_back: Some(snapshot.into()), generation: Some(generation), ..options() }
}

/// An image with a snapshot, which was changed since then: one object was changed, one was removed,
/// and one is new. Returns the generation that the image's cache knows.
fn changed_since_snapshot(place: &Place) -> u64 {
    const OBJECT: u64 = 4 << 20;
    let (mut backend, generation, _) = open_place(place.clone(), &options()).expect("opened");
    let snapshot_objects = [(0, 1), (OBJECT, 2)];
    snapshot_objects.into_iter().for_each(|(offset, byte)| write_at(&mut backend, offset, byte));
    take_snapshot(&mut backend, "then").expect("a snapshot");
    write_at(&mut backend, 0, 3);
    // SAFETY: a discard names no memory.
    unsafe { backend.submit(1, Transfer::Discard { offset: OBJECT, len: OBJECT }) };
    let mut discarded = false;
    while !discarded {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| discarded = result == Ok(()));
    }
    write_at(&mut backend, 2 * OBJECT, 4);
    close(backend, false);
    generation
}

fn large_place(lab: &Lab, image: &str) -> Place {
    lab.rbd_create(image, 16 << 20).expect("an image");
    Place::of(&lab.uri(image).parse().expect("a URI")).expect("an rbd: URI")
}

/// Whether every reader sees the image as it was at the snapshot.
fn is_then(lab: &Lab, image: &str) -> bool {
    let sum = |what: &str| lab.rbd_checksum(what).expect("a checksum");
    sum(image) == sum(&format!("{image}@then"))
}

pub(super) fn a_rollback_that_is_cut_short_is_told_and_finished(lab: &Lab) {
    let place = large_place(lab, "rolled-back");
    let mut known = changed_since_snapshot(&place);
    assert!(!is_then(lab, "rolled-back"));
    let knows = |generation| OpenOptions { generation: Some(generation), ..options() };
    let killed = |point, known| {
        let place = place.clone();
        killed_at(point, move || open_place(place, &back_to("then", known)).err());
    };

    // Before anything in the image is changed, and after everything is: the record looks the same.
    for (point, is_there) in [(Point::Marked, false), (Point::RolledBack, true)] {
        killed(point, known);
        assert_eq!(is_then(lab, "rolled-back"), is_there, "{point:?}");
        assert!(guarded(&place), "nobody takes it for whole");
        let written = record(&place);
        assert_eq!((written.rollback.as_deref(), written.version), (Some("then"), 3));
        for options in [knows(known), OpenOptions { read_only: true, ..knows(known) }] {
            let refused = open_place(place.clone(), &options).err().expect("it is not served");
            assert!(matches!(refused, BackendError::HalfRolledBack { .. }), "{refused}");
            assert!(
                refused.to_string().contains("tidepool volume snap rollback NAME then"),
                "{refused}"
            );
        }
        let refused = open_place(place.clone(), &other()).err();
        assert!(matches!(refused, Some(BackendError::Owned { .. })), "{refused:?}");
        let dirty = OpenOptions { dirty: true, ..back_to("then", known) };
        assert!(open_place(place.clone(), &dirty).is_err(), "nothing is drained over it");
    }

    let (mut backend, generation, continuity) =
        open_place(place.clone(), &back_to("then", known)).expect("it is finished");
    assert!(!continuity.proven && generation > known, "{}", continuity.reason);
    assert!(guarded(&place) && is_then(lab, "rolled-back"));
    assert_eq!((record(&place).rollback, record(&place).superseded), (None, None));
    assert_eq!(write(&mut backend, 5), (Ok(()), false), "the handle has seen what has changed");
    assert!(!is_then(lab, "rolled-back"));
    close(backend, false);
    known = generation;

    // The record says that the rollback has ended: the content of the cache is from before,
    // whichever generation it knows.
    for point in [Point::Finished, Point::Exposed] {
        killed(point, known);
        assert!(is_then(lab, "rolled-back"), "{point:?}");
        assert_eq!(guarded(&place), point == Point::Finished);
        let (mut backend, generation, continuity) =
            open_place(place.clone(), &knows(known)).expect("it is whole");
        assert!(!continuity.proven, "{}", continuity.reason);
        assert_eq!(write(&mut backend, 5), (Ok(()), false));
        close(backend, false);
        known = generation;
    }
    let (backend, ..) = open_place(place.clone(), &knows(known)).expect("opened");
    close(backend, true);
    assert!(!guarded(&place));
}

pub(super) fn a_rollback_that_cannot_be_leaves_everything_as_it_was(lab: &Lab) {
    let place = large_place(lab, "not-rolled-back");
    let known = changed_since_snapshot(&place);
    let before = lab.rbd_checksum("not-rolled-back").expect("a checksum");
    let missing =
        open_place(place.clone(), &back_to("never", known)).err().expect("no such snapshot");
    assert!(
        missing.to_string().contains("no such snapshot; see what there is: rbd snap ls"),
        "{missing}"
    );
    let lacking = OpenOptions { dirty: true, ..back_to("then", known) };
    let refused = open_place(place.clone(), &lacking).err();
    assert!(matches!(refused, Some(BackendError::Unsupported { .. })), "{refused:?}");
    let unfit = open_place(place.clone(), &back_to("th\u{7}en", known)).err();
    assert!(matches!(unfit, Some(BackendError::Unsupported { .. })), "{unfit:?}");
    assert!(guarded(&place));
    assert_eq!(record(&place).rollback, None);
    assert_eq!(lab.rbd_checksum("not-rolled-back").expect("a checksum"), before);
    let knows = OpenOptions { generation: Some(known), ..dirty() };
    let (backend, _, continuity) =
        open_place(place.clone(), &knows).expect("dirty data is not given up");
    assert!(!continuity.overwritten, "{}", continuity.reason);
    close(backend, true);
}

/// librbd changes the image's object map to that of the snapshot before it looks at the objects,
/// and ignores objects that neither map contains.
pub(super) fn an_object_that_a_cut_rollback_has_hidden_does_not_come_back(lab: &Lab) {
    let place = large_place(lab, "hidden");
    let known = changed_since_snapshot(&place);
    let cut = place.clone();
    killed_at(Point::Marked, move || open_place(cut, &back_to("then", known)).err());
    let site = place.connect().expect("a client");
    let image = site.open(Access::Read).expect("opened");
    let (id, number) =
        (image.facts().expect("facts").id, image.snapshot_id("then").expect("a number"));
    let map = lab.dir().join("map");
    let path = map.to_str().expect("a path");
    lab.rados(&["get", &format!("rbd_object_map.{id}.{number:016x}"), path])
        .expect("the snapshot's map");
    lab.rados(&["put", &format!("rbd_object_map.{id}"), path]).expect("the image's map");
    drop(image);
    let (mut backend, generation, _) =
        open_place(place.clone(), &back_to("then", known)).expect("it is finished");
    assert!(generation > known && is_then(lab, "hidden"));
    // A write beside the remnant of an object must not make the remnant visible.
    write_at(&mut backend, (8 << 20) + 8192, 6);
    close(backend, true);
    let export = lab.dir().join("hidden");
    lab.rbd_export("hidden", &export).expect("an export");
    let content = std::fs::read(&export).expect("the export");
    assert!(
        content[8 << 20..][..8192].iter().all(|&byte| byte == 0),
        "an object from after the snapshot"
    );
    assert!(content[(8 << 20) + 8192..][..4096].iter().all(|&byte| byte == 6));
}

pub(super) fn a_rollback_brings_the_size_back_and_works_without_a_guard(lab: &Lab) {
    let place = large_place(lab, "resized-back");
    lab.rbd(&["feature", "enable", "resized-back", "journaling"]).expect("a feature");
    let known = changed_since_snapshot(&place);
    let (mut backend, known, _) =
        open_place(place.clone(), &OpenOptions { generation: Some(known), ..options() })
            .expect("opened");
    // SAFETY: a resize names no memory.
    unsafe { backend.submit(1, Transfer::Resize { size_bytes: 20 << 20 }) };
    let mut resized = false;
    while !resized {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| resized = result == Ok(()));
    }
    assert_eq!(backend.size_bytes(), 20 << 20);
    close(backend, false);
    let (mut backend, ..) =
        open_place(place.clone(), &back_to("then", known)).expect("rolled back");
    assert_eq!(backend.size_bytes(), 16 << 20);
    assert!(is_then(lab, "resized-back"));
    assert_eq!(write(&mut backend, 5), (Ok(()), false));
    close(backend, true);
}
