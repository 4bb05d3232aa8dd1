//! Tests that need access to internals: handles that turn read-only, and what librbd is called
//! with.

mod fence;
mod journaled;
mod peer;

use super::attach::{HOOK, Point};
use super::*;
use crate::api::Backend;
use crate::record::OwnerState;
use std::sync::mpsc;
use tidepool_engine::mem::AlignedBuf;
use tidepool_lab::cluster::Cluster as Lab;

fn place(lab: &Lab, image: &str) -> Place {
    lab.rbd_create(image, 8 << 20).expect("an image");
    let uri = lab.uri(image).parse().expect("a URI");
    Place::of(&uri).expect("an rbd: URI")
}

fn options() -> OpenOptions {
    OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() }
}

/// Writes a block. Returns the outcome, and whether the write met a read-only handle on its way.
fn write(backend: &mut RbdBackend, byte: u8) -> (Result<(), IoError>, bool) {
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(byte);
    let (mut outcome, mut parked) = (None, false);
    // SAFETY: the data lives unchanged until the outcome is there.
    unsafe { backend.submit(1, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 }) };
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| outcome = Some(result));
        parked |= !backend.parked.is_empty();
    }
    (outcome.expect("just seen"), parked)
}

/// Changes a snapshot and waits for the outcome.
fn change_snapshot(backend: &mut RbdBackend, name: &str, change: SnapshotChange) -> Result<(), IoError> {
    backend.change_snapshot(u64::MAX, name, change)?;
    let mut outcome = None;
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |token, result| {
            assert_eq!(token, u64::MAX);
            outcome = Some(result);
        });
    }
    outcome.expect("just seen")
}

fn take_snapshot(backend: &mut RbdBackend, name: &str) -> Result<(), IoError> {
    // SAFETY: the name lives until the outcome is there.
    unsafe { backend.submit(1, Transfer::Snapshot { ptr: name.as_ptr(), len: name.len() }) };
    let mut outcome = None;
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| outcome = Some(result));
    }
    outcome.expect("just seen")
}

/// The snapshots of an image, and whether each is protected.
fn snapshots(place: &Place) -> Vec<(String, bool)> {
    let (cluster, pool) = place.connect().expect("a client");
    let image = Image::open(&cluster.libraries().rbd, &pool, &place.image, Access::Read).expect("opened");
    let listed = image.snapshots().expect("a list").into_iter();
    listed.map(|snapshot| (snapshot.name, snapshot.protected)).collect()
}

/// Makes every handle of the image read its header again, as a lost and renewed watch does.
fn refresh_handles(place: &Place) {
    let (cluster, pool) = place.connect().expect("a second client");
    let survey = Survey::take(place, &cluster, &pool).expect("a survey");
    pool.notify_header(&survey.facts.header()).expect("every watcher answers");
}

fn break_lock(place: &Place) {
    let (cluster, pool) = place.connect().expect("a second client");
    let survey = Survey::take(place, &cluster, &pool).expect("a survey");
    pool.break_lock(&survey.facts.header(), &survey.locker.expect("a locker")).expect("broken");
}

fn guarded(place: &Place) -> bool {
    let (cluster, pool) = place.connect().expect("a second client");
    Survey::take(place, &cluster, &pool).expect("a survey").guarded()
}

fn a_refreshed_handle_goes_on_writing(lab: &Lab) {
    let place = place(lab, "refreshed");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(write(&mut backend, 1), (Ok(()), false));
    for byte in 2..5 {
        refresh_handles(&place);
        // librbd reads the header while it executes the first write, and refuses writes after that.
        let outcomes: Vec<_> = (0..5).map(|_| write(&mut backend, byte)).collect();
        assert!(outcomes.iter().all(|(result, _)| *result == Ok(())), "{outcomes:?}");
        assert_eq!(outcomes.iter().filter(|(_, parked)| *parked).count(), 1, "{outcomes:?}");
        assert!(guarded(&place), "the guard is set again");
    }
    // librbd does this with its own lock while it renews a watch.
    break_lock(&place);
    refresh_handles(&place);
    assert!((0..5).all(|_| write(&mut backend, 9).0 == Ok(())), "the guard proves that the image is ours");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    Box::new(backend)
        .close(Release { clean: false, cache_failed: false })
        .expect("a read-only handle can be closed");
    assert!(guarded(&place));
    let (backend, _, continuity) = open_place(place.clone(), &options()).expect("opened");
    assert!(continuity.proven, "{}", continuity.reason);
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
    assert!(!guarded(&place));
}

/// Overlapping reads without a pause must not keep a write waiting for its new handle.
fn a_refreshed_handle_is_replaced_under_overlapping_reads(lab: &Lab) {
    const READS: u64 = 16;
    const READS_MAX: u64 = 10 * READS;
    let place = place(lab, "read-meanwhile");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let mut memory: Vec<AlignedBuf> = (0..READS).map(|_| AlignedBuf::zeroed(4096)).collect();
    let mut read = |backend: &mut RbdBackend, token: u64| {
        let buf = &mut memory[(token % READS) as usize];
        let transfer = Transfer::Read { offset: token % READS * 4096, ptr: buf.as_mut_ptr(), len: 4096 };
        // SAFETY: each buffer has one read at a time, and nothing else uses it.
        unsafe { backend.submit(token, transfer) };
    };
    (0..READS).for_each(|token| read(&mut backend, token));
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(3);
    // SAFETY: the data lives unchanged until the outcome is there.
    unsafe { backend.submit(u64::MAX, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 }) };
    // The reads that complete while the write waits for the handle.
    let (mut outcome, mut parked, mut reads) = (None, false, 0);
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        let mut done = Vec::new();
        backend.completions(&mut |token, result| done.push((token, result)));
        parked |= !backend.parked.is_empty();
        for (token, result) in done {
            if token == u64::MAX {
                outcome = Some(result);
                continue;
            }
            assert_eq!(result, Ok(()));
            reads += u64::from(!backend.parked.is_empty());
            assert!(reads < READS_MAX, "the write waits as long as there are reads");
            read(&mut backend, token);
        }
    }
    assert_eq!((outcome, parked), (Some(Ok(())), true));
    backend.quiesce();
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
}

fn a_handle_that_turns_read_only_is_replaced_after_a_disown_too(lab: &Lab) {
    let place = place(lab, "disowned-refreshed");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(5);
    // A write that waits for a new handle, and a change of the record by which the new handle is
    // proven.
    // SAFETY: the data lives unchanged until both outcomes are there.
    unsafe {
        backend.submit(1, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 });
        backend.submit(2, Transfer::Disown);
    }
    let mut outcomes = Vec::new();
    while outcomes.len() < 2 {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |token, result| outcomes.push((token, result)));
    }
    outcomes.sort_unstable_by_key(|(token, _)| *token);
    assert_eq!(outcomes, [(1, Ok(())), (2, Ok(()))]);
    refresh_handles(&place);
    assert!(
        (0..5).all(|_| write(&mut backend, 9).0 == Ok(())),
        "the new record is the one that is looked for"
    );
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
    assert!(!guarded(&place));
}

fn a_read_only_handle_without_ownership_is_fenced(lab: &Lab) {
    let place = place(lab, "usurped");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(write(&mut backend, 1).0, Ok(()));
    let (_cluster, pool) = place.connect().expect("a second client");
    let object = backend.held.as_ref().expect("held").claim.owner.clone();
    let (mut owner, record) = OwnerObject::read(&place.what, &pool, &object).expect("the record");
    let record = Ownership { generation: 99, ..record.expect("a record") };
    owner.swap(&pool, &record).expect("another owner's record");
    refresh_handles(&place);
    let outcomes: Vec<_> = (0..5).map(|_| write(&mut backend, 2)).collect();
    assert!(outcomes.contains(&(Err(IoError::Fenced), true)), "{outcomes:?}");
    assert_eq!(write(&mut backend, 3), (Err(IoError::Fenced), false), "and stays so");
    assert!(guarded(&place), "the other owner's guard is left alone");
}

fn a_read_only_handle_whose_guard_was_lifted_is_fenced(lab: &Lab) {
    let place = place(lab, "lifted");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let (_cluster, pool) = place.connect().expect("a second client");
    guard::pause(&pool, &backend.held.as_ref().expect("held").claim.header).expect("lifted");
    assert_eq!(write(&mut backend, 1), (Err(IoError::Fenced), true));
}

fn a_record_changes_only_from_the_version_that_was_read(lab: &Lab) {
    let place = place(lab, "swapped");
    let (_cluster, pool) = place.connect().expect("a client");
    let record = Ownership::new(1, Uuid::from_bytes([7; 16]), OwnerState::Clean);
    let read = || OwnerObject::read(&place.what, &pool, "tidepool_owner.test").expect("a read");
    let (mut first, none) = read();
    assert!(none.is_none());
    let (mut second, _) = read();
    first.swap(&pool, &record).expect("the first to create it");
    assert!(matches!(second.swap(&pool, &record), Err(BackendError::Locked { .. })), "created twice");
    let (mut third, found) = read();
    assert_eq!(found, Some(record.clone()));
    third.swap(&pool, &record).expect("from the version that was read");
    assert!(matches!(first.swap(&pool, &record), Err(BackendError::Locked { .. })), "a lost update");
    third.swap(&pool, &record).expect("from the version that was written");
}

fn a_kill_between_claim_and_record_leaves_a_lock_that_is_known(lab: &Lab) {
    let place = place(lab, "claimed");
    let (backend, ..) = open_place(place.clone(), &options()).expect("opened");
    // The record just before the last step of an open: it contains the claim, and not yet the
    // client.
    let Held { claim, mut owner, .. } = {
        let mut backend = backend;
        (backend.held.take().expect("held"), std::mem::forget(backend)).0
    };
    let mut record = Ownership::new(0, Uuid::from_bytes([7; 16]), OwnerState::Clean);
    record.clients.claims = vec![claim.address.clone()];
    let (_cluster, pool) = place.connect().expect("a second client");
    owner.swap(&pool, &record).expect("a record");
    guard::pause(&pool, &claim.header).expect("not guarded yet");
    let (backend, generation, continuity) = open_place(place, &options()).expect("taken back");
    assert_eq!(generation, 1);
    assert!(!continuity.proven && !continuity.overwritten, "{}", continuity.reason);
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
}

fn dirty() -> OpenOptions {
    OpenOptions { dirty: true, ..options() }
}

fn other() -> OpenOptions {
    OpenOptions { cache_uuid: [8; 16], ..OpenOptions::default() }
}

fn close(backend: RbdBackend, clean: bool) {
    Box::new(backend).close(Release { clean, cache_failed: false }).expect("closed");
}

/// Leaves an image as a cache leaves it that is stopped with dirty data.
fn leave_dirty(place: &Place) {
    close(open_place(place.clone(), &options()).expect("opened").0, false);
}

/// Calls `act` whenever an attempt reaches this moment.
fn at(point: Point, mut act: impl FnMut() -> Result<(), BackendError> + Send + 'static) {
    let hook = move |reached| if reached == point { act() } else { Ok(()) };
    *HOOK.lock().expect("no hook panics") = Some(Box::new(hook));
}

fn nothing_more() {
    *HOOK.lock().expect("no hook panics") = None;
}

/// A process that is killed at this moment of an attempt: a thread that does not continue.
fn killed_at(point: Point, attempt: impl FnOnce() -> Option<BackendError> + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let ended = tell.clone();
    at(point, move || {
        tell.send(None).expect("the test waits");
        loop {
            std::thread::park();
        }
    });
    std::thread::spawn(move || ended.send(Some(attempt())));
    assert!(told.recv().expect("a thread").is_none(), "it has not come to that moment");
}

fn killed_open(place: &Place, point: Point) {
    let place = place.clone();
    killed_at(point, move || open_place(place, &options()).err());
}

/// A client that has the image open for writing.
fn stranger(place: &Place) -> (Image, IoCtx, Arc<Cluster>) {
    let (cluster, pool) = place.connect().expect("a client");
    let image = Image::open(&cluster.libraries().rbd, &pool, &place.image, Access::Write).expect("opened");
    (image, pool, cluster)
}

/// Another client takes the lock, as for a write, and ends.
fn visit(place: &Place) {
    stranger(place).0.lock().expect("the lock");
}

fn record(place: &Place) -> Ownership {
    let (cluster, pool) = place.connect().expect("a client");
    Survey::take(place, &cluster, &pool).expect("a survey").record.expect("a record")
}

/// Fences the clients of attempts that were cut short and waits until they are forgotten, as if
/// their processes had been killed.
fn bury(place: &Place) {
    let (cluster, pool) = place.connect().expect("a client");
    let clients = record(place).clients.claims;
    let fence = |text: &String| {
        cluster.blocklist(address::Client::of(text).expect("an address"), 600.0).expect("fenced")
    };
    clients.iter().for_each(fence);
    while !Survey::take(place, &cluster, &pool).expect("a survey").facts.watchers.is_empty() {
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn the_slower_of_two_caches_leaves_the_guard_of_the_faster_one_alone(lab: &Lab) {
    let place = place(lab, "two-at-once");
    let (give, given) = mpsc::channel();
    let faster = place.clone();
    at(Point::Claimed, move || {
        let (backend, ..) = open_place(faster.clone(), &other()).expect("the image is free");
        give.send(backend).expect("the test waits");
        Ok(())
    });
    let slower = open_place(place.clone(), &options()).err();
    nothing_more();
    assert!(matches!(slower, Some(BackendError::Locked { .. })), "{slower:?}");
    assert!(guarded(&place), "the faster one serves it");
    close(given.recv().expect("the faster one"), true);
}

fn a_kill_between_guard_and_record_locks_nobody_out(lab: &Lab) {
    let place = place(lab, "guarded-early");
    for again in 0..2 {
        killed_open(&place, Point::Guarded);
        assert!(guarded(&place));
        let (backend, generation, _) = open_place(place.clone(), &options()).expect("its own cache may");
        assert_eq!(generation, again + 1);
        close(backend, true);
    }
    killed_open(&place, Point::Guarded);
    let (cluster, pool) = place.connect().expect("a client");
    let alive = attach::abandon(&place, &cluster, &pool);
    assert!(matches!(alive, Err(BackendError::Locked { .. })), "{alive:?}");
    bury(&place);
    let line = open_place(place.clone(), &other()).err().expect("not its guard").to_string();
    assert!(line.contains("tidepool recover"), "{line}");
    assert!(attach::abandon(&place, &cluster, &pool).expect("given up").is_some());
    assert!(!guarded(&place));
    assert!(attach::abandon(&place, &cluster, &pool).expect("nothing is left").is_none());
    close(open_place(place, &other()).expect("free").0, true);
}

fn snapshots_are_changed_under_the_guard_and_what_is_refused_costs_nothing(lab: &Lab) {
    use SnapshotChange::{Protect, Remove, Unprotect};
    let place = place(lab, "rotated");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    (1..=3).for_each(|n| take_snapshot(&mut backend, &format!("s{n}")).expect("a snapshot"));
    let errno = |number| Err(IoError::Errno(number));
    for (change, name, outcome) in [
        (Protect, "s1", Ok(())),
        (Protect, "s1", errno(libc::EBUSY)),
        (Remove, "s1", errno(libc::EBUSY)),
        (Remove, "s2", Ok(())),
        (Remove, "s2", errno(libc::ENOENT)),
        (Unprotect, "s3", errno(libc::EINVAL)),
        (Unprotect, "s1", Ok(())),
        (Protect, "s3", Ok(())),
    ] {
        assert_eq!(change_snapshot(&mut backend, name, change), outcome, "{change:?} {name}");
        assert!(guarded(&place), "{change:?} {name}");
        assert_eq!(write(&mut backend, 1), (Ok(()), false), "the handle stays one that can write");
    }
    assert_eq!(snapshots(&place), [("s1".to_owned(), false), ("s3".to_owned(), true)]);
    // A handle that has turned read-only is replaced first. Changes that are requested together are
    // made one after the other.
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    backend.change_snapshot(1, "s1", Remove).expect("it is in line");
    backend.change_snapshot(2, "s3", Unprotect).expect("it is in line");
    backend.change_snapshot(3, "s3", Remove).expect("it is in line");
    let mut outcomes = Vec::new();
    while outcomes.len() < 3 {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |token, result| outcomes.push((token, result)));
    }
    assert_eq!(outcomes, [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
    assert!(guarded(&place));
    assert_eq!(snapshots(&place), []);

    // More snapshots than the first buffer has room for, and a reader, which may not change
    // anything.
    let many: Vec<(String, bool)> = (0..70).map(|n| (format!("many{n}"), false)).collect();
    many.iter().for_each(|(name, _)| take_snapshot(&mut backend, name).expect("a snapshot"));
    assert_eq!(snapshots(&place), many);
    close(backend, true);
    let (mut reader, ..) =
        open_place(place.clone(), &OpenOptions { read_only: true, ..options() }).expect("opened");
    assert_eq!(reader.change_snapshot(1, "many0", Remove), errno(libc::EROFS));
    drop(reader);
    assert_eq!(snapshots(&place).len(), many.len());
}

fn a_kill_while_a_snapshot_is_changed_costs_neither_dirty_data_nor_access(lab: &Lab) {
    for (number, change) in
        [SnapshotChange::Remove, SnapshotChange::Protect, SnapshotChange::Unprotect].into_iter().enumerate()
    {
        let place = place(lab, &format!("cut-snapshot{number}"));
        let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
        take_snapshot(&mut backend, "kept").expect("a snapshot");
        let protected = change == SnapshotChange::Unprotect;
        if protected {
            change_snapshot(&mut backend, "kept", SnapshotChange::Protect).expect("protected");
        }
        assert_eq!(write(&mut backend, 1).0, Ok(()));
        killed_at(Point::Exposed, move || {
            let _ = change_snapshot(&mut backend, "kept", change);
            None
        });
        assert!(!guarded(&place));
        assert_eq!(snapshots(&place), [("kept".to_owned(), protected)]);
        let (mut backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
        assert!(continuity.proven, "{}", continuity.reason);
        assert!(guarded(&place));
        assert_eq!(change_snapshot(&mut backend, "kept", change), Ok(()), "it is done again");
        close(backend, true);
    }
}

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

fn a_rollback_that_is_cut_short_is_told_and_finished(lab: &Lab) {
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
            assert!(refused.to_string().contains("tidepool volume snap rollback NAME then"), "{refused}");
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

fn a_rollback_that_cannot_be_leaves_everything_as_it_was(lab: &Lab) {
    let place = large_place(lab, "not-rolled-back");
    let known = changed_since_snapshot(&place);
    let before = lab.rbd_checksum("not-rolled-back").expect("a checksum");
    let missing = open_place(place.clone(), &back_to("never", known)).err().expect("no such snapshot");
    assert!(missing.to_string().contains("no such snapshot; see what there is: rbd snap ls"), "{missing}");
    let lacking = OpenOptions { dirty: true, ..back_to("then", known) };
    let refused = open_place(place.clone(), &lacking).err();
    assert!(matches!(refused, Some(BackendError::Unsupported { .. })), "{refused:?}");
    let unfit = open_place(place.clone(), &back_to("th\u{7}en", known)).err();
    assert!(matches!(unfit, Some(BackendError::Unsupported { .. })), "{unfit:?}");
    assert!(guarded(&place));
    assert_eq!(record(&place).rollback, None);
    assert_eq!(lab.rbd_checksum("not-rolled-back").expect("a checksum"), before);
    let knows = OpenOptions { generation: Some(known), ..dirty() };
    let (backend, _, continuity) = open_place(place.clone(), &knows).expect("dirty data is not given up");
    assert!(!continuity.overwritten, "{}", continuity.reason);
    close(backend, true);
}

/// librbd changes the image's object map to that of the snapshot before it looks at the objects,
/// and ignores objects that neither map contains.
fn an_object_that_a_cut_rollback_has_hidden_does_not_come_back(lab: &Lab) {
    let place = large_place(lab, "hidden");
    let known = changed_since_snapshot(&place);
    let cut = place.clone();
    killed_at(Point::Marked, move || open_place(cut, &back_to("then", known)).err());
    let (cluster, pool) = place.connect().expect("a client");
    let image = Image::open(&cluster.libraries().rbd, &pool, &place.image, Access::Read).expect("opened");
    let (id, number) = (image.facts().expect("facts").id, image.snapshot_id("then").expect("a number"));
    let map = lab.dir().join("map");
    let path = map.to_str().expect("a path");
    lab.rados(&["get", &format!("rbd_object_map.{id}.{number:016x}"), path]).expect("the snapshot's map");
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
    assert!(content[8 << 20..][..8192].iter().all(|&byte| byte == 0), "an object from after the snapshot");
    assert!(content[(8 << 20) + 8192..][..4096].iter().all(|&byte| byte == 6));
}

fn a_rollback_brings_the_size_back_and_works_without_a_guard(lab: &Lab) {
    let place = large_place(lab, "resized-back");
    lab.rbd(&["feature", "enable", "resized-back", "journaling"]).expect("a feature");
    let known = changed_since_snapshot(&place);
    let (mut backend, known, _) =
        open_place(place.clone(), &OpenOptions { generation: Some(known), ..options() }).expect("opened");
    // SAFETY: a resize names no memory.
    unsafe { backend.submit(1, Transfer::Resize { size_bytes: 20 << 20 }) };
    let mut resized = false;
    while !resized {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, result| resized = result == Ok(()));
    }
    assert_eq!(backend.size_bytes(), 20 << 20);
    close(backend, false);
    let (mut backend, ..) = open_place(place.clone(), &back_to("then", known)).expect("rolled back");
    assert_eq!(backend.size_bytes(), 16 << 20);
    assert!(is_then(lab, "resized-back"));
    assert_eq!(write(&mut backend, 5), (Ok(()), false));
    close(backend, true);
}

/// The state that an attempt to replace a handle leaves if the cluster is out of reach before the
/// guard is set again.
fn a_guard_that_could_not_be_set_again_fences_nobody(place: &Place) {
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let (_cluster, pool) = place.connect().expect("a client");
    let held = backend.held.as_mut().expect("held");
    drop(backend.io.image.take());
    let lifted = Some(guard::pause(&pool, &held.claim.header).expect("lifted"));
    held.owner.swap(&pool, &held.claim.record.clone().with_lifted(lifted)).expect("a record");
    assert_eq!(write(&mut backend, 1), (Ok(()), true));
    assert!(guarded(place));
    close(backend, false);
}

fn a_guard_that_cannot_be_set_after_the_lock_costs_no_dirty_data(place: &Place) {
    let away = || {
        let mut left = 1;
        at(Point::Locked, move || match std::mem::replace(&mut left, 0) {
            0 => Ok(()),
            _ => Err(BackendError::Unavailable { what: "it".into(), why: "no answer".into() }),
        });
    };
    away();
    let failed = open_place(place.clone(), &dirty()).err();
    assert!(matches!(failed, Some(BackendError::Unavailable { .. })), "{failed:?}");
    let (mut backend, ..) = open_place(place.clone(), &dirty()).expect("nobody has written");
    away();
    refresh_handles(place);
    assert!((0..5).all(|_| write(&mut backend, 1).0 == Ok(())), "a failed transfer");
    nothing_more();
    assert!(guarded(place));
    close(backend, false);
}

fn a_kill_while_the_guard_is_lifted_costs_no_dirty_data(lab: &Lab) {
    let place = place(lab, "cut-lifted");
    leave_dirty(&place);
    killed_open(&place, Point::Bare);
    assert!(!guarded(&place));
    let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert!(!continuity.proven, "{}", continuity.reason);
    close(backend, false);
    killed_open(&place, Point::Lifted);
    assert!(!guarded(&place));
    let (mut backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert!(!continuity.proven, "{}", continuity.reason);
    // The same kill while a read-only handle is replaced.
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    killed_at(Point::Lifted, move || {
        let _ = write(&mut backend, 1);
        None
    });
    assert!(!guarded(&place));
    let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert!(!continuity.proven, "{}", continuity.reason);
    close(backend, false);
    a_guard_that_could_not_be_set_again_fences_nobody(&place);
    a_guard_that_cannot_be_set_after_the_lock_costs_no_dirty_data(&place);
    for point in [Point::Bare, Point::Lifted] {
        killed_open(&place, point);
        visit(&place);
        for _ in 0..2 {
            let refused = open_place(place.clone(), &dirty()).err();
            assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{refused:?}");
        }
        let (cluster, pool) = place.connect().expect("a client");
        assert!(attach::abandon(&place, &cluster, &pool).expect("given up").is_some());
        leave_dirty(&place);
    }
}

/// An attempt may fail or be killed at any moment. It leaves an image with dirty data in a state in
/// which its cache may have it, and other clients may not change it.
fn a_failed_attempt_costs_no_dirty_data(lab: &Lab) {
    let features: [&[&str]; 2] = [&[], &["journaling"]];
    for (image, features) in ["fails", "fails-journaled"].into_iter().zip(features) {
        let place = place(lab, image);
        for feature in features {
            lab.rbd(&["feature", "enable", image, feature]).expect("a feature");
        }
        leave_dirty(&place);
        // Also where the guard was lifted before the attempt.
        for lifted in [false, true] {
            for (point, record_changes) in [
                (Point::Claimed, false),
                (Point::Lifted, false),
                (Point::Locked, false),
                (Point::Guarded, true),
            ] {
                let when = format!("{image}, lifted before: {lifted}, at {point:?}");
                let journaled = !features.is_empty();
                // A lifted guard only matters from the lock on.
                let early = matches!(point, Point::Claimed | Point::Lifted);
                if lifted && early || journaled && (lifted || point == Point::Lifted) {
                    continue;
                }
                if lifted {
                    killed_open(&place, Point::Lifted);
                }
                let elsewhere = place.clone();
                at(point, move || {
                    if record_changes {
                        let (cluster, pool) = elsewhere.connect().expect("a client");
                        let mut survey = Survey::take(&elsewhere, &cluster, &pool).expect("a survey");
                        let found = survey.record.clone().expect("a record");
                        survey.owner.swap(&pool, &found).expect("written again");
                        return Ok(());
                    }
                    Err(BackendError::Unavailable { what: "it".into(), why: "no answer".into() })
                });
                let failed = open_place(place.clone(), &dirty()).err();
                nothing_more();
                assert!(failed.is_some(), "{when}");
                assert!(
                    lab.rbd(&["group", "image", "add", "team", image]).is_err(),
                    "{when}: a group gets it"
                );
                match open_place(place.clone(), &dirty()) {
                    Ok((backend, ..)) => close(backend, false),
                    Err(e) => panic!("{when}: {e}"),
                }
            }
        }
        for point in [Point::Locked, Point::Guarded] {
            killed_open(&place, point);
            match open_place(place.clone(), &dirty()) {
                Ok((backend, ..)) => close(backend, false),
                Err(e) => panic!("{image}, killed at {point:?}: {e}"),
            }
        }
        let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("opened");
        assert!(continuity.proven, "{image}: {}", continuity.reason);
        close(backend, false);
        if !features.is_empty() {
            // No guard keeps other clients away, so that their visit has to be seen.
            visit(&place);
            let refused = open_place(place.clone(), &dirty()).err();
            assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{refused:?}");
        }
    }
}

/// A visit of another client between the survey and the lock is not forgotten when the attempt
/// ends.
fn a_visit_that_an_attempt_has_met_is_seen_by_the_next_one(lab: &Lab) {
    for (image, features) in [("visited", &[][..]), ("visited-journaled", &["journaling"])] {
        let place = place(lab, image);
        for feature in features {
            lab.rbd(&["feature", "enable", image, feature]).expect("a feature");
        }
        leave_dirty(&place);
        if features.is_empty() {
            killed_open(&place, Point::Lifted);
        }
        let visited = place.clone();
        at(Point::Claimed, move || {
            visit(&visited);
            Ok(())
        });
        let refused = open_place(place.clone(), &dirty()).err();
        nothing_more();
        for refused in [refused, open_place(place.clone(), &dirty()).err()] {
            assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{image}: {refused:?}");
        }
    }
}

/// A kill while the guard is being set leaves a part of it, which is removed when the image is
/// given up.
fn half_a_guard_is_taken_away(lab: &Lab) {
    let place = place(lab, "half-guarded");
    killed_open(&place, Point::Locked);
    let (cluster, pool) = place.connect().expect("a second client");
    let header = Survey::take(&place, &cluster, &pool).expect("a survey").facts.header();
    guard::reserve(&pool, &header).expect("reserved");
    let alive = attach::abandon(&place, &cluster, &pool);
    assert!(matches!(alive, Err(BackendError::Locked { .. })), "{alive:?}");
    bury(&place);
    attach::abandon(&place, &cluster, &pool).expect("given up");
    lab.rbd(&["migration", "prepare", "half-guarded", "elsewhere"]).expect("it can be moved");
    lab.rbd(&["migration", "abort", "--no-progress", "elsewhere"]).expect("it comes back");
    close(open_place(place, &other()).expect("free").0, true);
}

fn the_lock_of_an_early_cut_attempt_is_known_after_many_more(lab: &Lab) {
    let place = place(lab, "cut-often");
    leave_dirty(&place);
    killed_open(&place, Point::Guarded);
    (0..10).for_each(|_| killed_open(&place, Point::Claimed));
    assert_eq!(record(&place).clients.claims.len(), 8);
    let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert!(!continuity.proven, "{}", continuity.reason);
    assert!(record(&place).clients.claims.is_empty());
    close(backend, true);
}

fn a_process_counts_as_dead_only_on_its_own_host_since_its_last_boot(lab: &Lab) {
    let place = place(lab, "moved");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    let (cluster, pool) = place.connect().expect("a client");
    let look = || Survey::take(&place, &cluster, &pool).expect("a survey");
    let uuid = Uuid::from_bytes(options().cache_uuid);
    let survey = look();
    assert!(matches!(survey.holder(&options()), survey::Holder::OurDead(_)));
    assert_eq!(survey.own_fence_s(uuid), 3600.0);
    let held = backend.held.as_mut().expect("held");
    let ours = held.claim.record.clone();
    let elsewhere = Ownership { host: "elsewhere".into(), ..ours.clone() };
    let namesake = Ownership { boot_id: "another".into(), ..ours.clone() };
    for record in [elsewhere, namesake] {
        held.owner.swap(&pool, &record).expect("a record");
        let survey = look();
        assert!(matches!(survey.holder(&options()), survey::Holder::Live(_)), "{record:?}");
        assert!(survey.own_fence_s(uuid) > 364.0 * 86_400.0, "{record:?}");
    }
    held.owner.swap(&pool, &ours).expect("a record");
    close(backend, true);
}

fn giving_up_can_be_cut_short_and_done_again(lab: &Lab) {
    let place = place(lab, "given-up-twice");
    leave_dirty(&place);
    let abandoned = place.clone();
    killed_at(Point::Abandoned, move || {
        let (cluster, pool) = abandoned.connect().expect("a client");
        attach::abandon(&abandoned, &cluster, &pool).err()
    });
    assert!(guarded(&place));
    let line = open_place(place.clone(), &other()).err().expect("guarded").to_string();
    assert!(line.contains("tidepool recover"), "{line}");
    let (cluster, pool) = place.connect().expect("a client");
    assert!(attach::abandon(&place, &cluster, &pool).expect("given up").is_some());
    assert!(!guarded(&place));
    close(open_place(place, &other()).expect("free").0, true);
}

fn a_handle_is_replaced_once_what_stands_in_the_way_has_passed(lab: &Lab) {
    let place = place(lab, "postponed");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    let mut failures = vec![
        BackendError::Denied { what: "it".into(), why: "a right is missing".into() },
        BackendError::Unavailable { what: "it".into(), why: "no answer".into() },
        BackendError::Locked { what: "it".into(), holder: "kept from its lock".into() },
    ];
    at(Point::Lifted, move || failures.pop().map_or(Ok(()), Err));
    refresh_handles(&place);
    assert!((0..5).all(|_| write(&mut backend, 1).0 == Ok(())), "a failed transfer");
    assert!(guarded(&place));
    at(Point::Lifted, || Err(BackendError::Denied { what: "it".into(), why: "a right is missing".into() }));
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let data = AlignedBuf::zeroed(4096);
    // SAFETY: the data lives unchanged until `close` has waited for the outcome.
    unsafe { backend.submit(1, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 }) };
    close(backend, false);
    nothing_more();
    assert!(guarded(&place));
    let (backend, _, continuity) = open_place(place, &dirty()).expect("opened");
    assert!(continuity.proven, "{}", continuity.reason);
    close(backend, true);
}

fn a_client_that_comes_between_survey_and_lock_is_seen(lab: &Lab) {
    let place = place(lab, "between");
    close(open_place(place.clone(), &options()).expect("opened").0, true);
    let visited = place.clone();
    at(Point::Claimed, move || {
        visit(&visited);
        Ok(())
    });
    let (backend, _, continuity) = open_place(place.clone(), &options()).expect("opened");
    nothing_more();
    assert!(!continuity.proven, "{}", continuity.reason);
    close(backend, true);
    for (point, clean, writes) in
        [(Point::Claimed, true, true), (Point::Lifted, false, false), (Point::Lifted, false, true)]
    {
        close(open_place(place.clone(), &options()).expect("opened").0, clean);
        let (give, given) = mpsc::channel();
        let opened = place.clone();
        at(point, move || {
            give.send(stranger(&opened)).expect("the test waits");
            Ok(())
        });
        let refused = open_place(place.clone(), &OpenOptions { dirty: !clean, ..options() }).err();
        nothing_more();
        assert!(matches!(refused, Some(BackendError::Locked { .. })), "{refused:?}");
        assert!(!guarded(&place), "a guard that the stranger does not know of vouches for nothing");
        let stranger = given.recv().expect("a stranger");
        let refused = open_place(place.clone(), &options()).err().expect("it is still there").to_string();
        assert!(refused.contains("open for writing by"), "{refused}");
        if writes {
            stranger.0.lock().expect("the image is not guarded");
        }
        drop(stranger);
        let opened = open_place(place.clone(), &OpenOptions { dirty: !clean, ..options() });
        if writes && !clean {
            let refused = opened.err();
            assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{refused:?}");
            continue;
        }
        let (backend, _, continuity) = opened.expect("nothing dirty was written over");
        assert!(!continuity.proven, "{}", continuity.reason);
        close(backend, true);
    }
}

/// `rbd group` changes the members of a group, and `rbd migration` moves an image elsewhere,
/// without asking for the image's lock.
fn an_image_of_a_group_or_on_its_way_is_refused_and_a_served_one_gets_into_neither(lab: &Lab) {
    let rbd = |arguments: &[&str]| lab.rbd(arguments).map(drop).map_err(|e| e.to_string());
    let join = |image: &str| rbd(&["group", "image", "add", "team", image]);
    let leave = |image: &str| rbd(&["group", "image", "rm", "team", image]).expect("it leaves the group");
    let depart = |image: &str| rbd(&["migration", "prepare", image, "elsewhere"]);
    let come_back = || rbd(&["migration", "abort", "--no-progress", "elsewhere"]).expect("it comes back");
    let refused = |place: &Place| {
        let opened = open_place(place.clone(), &options()).err();
        let (cluster, pool) = place.connect().expect("a second client");
        let looked = Survey::take(place, &cluster, &pool).and_then(|survey| survey.check_kind(place));
        for error in [opened, looked.err()] {
            let error = error.expect("it is refused").to_string();
            assert!(error.contains("is in a group") && error.contains("rbd group image rm GROUP"), "{error}");
        }
    };
    let kept_away = |image: &str, when: &str| {
        for (what, outcome) in [("a group", join(image)), ("a migration", depart(image))] {
            let told = outcome.expect_err(&format!("{when}: {what} gets {image}"));
            assert!(
                told.contains("File exists") || told.contains("image has watchers"),
                "{when}: {what}: {told}"
            );
        }
    };
    let free = |image: &str| {
        join(image).expect("a group gets it");
        leave(image);
        depart(image).expect("it can be moved");
        come_back();
    };
    let place_of = |image: &str, features: &[&str]| {
        let place = place(lab, image);
        features.iter().for_each(|feature| rbd(&["feature", "enable", image, feature]).expect("a feature"));
        place
    };
    for (image, features) in [("guarded", &[][..]), ("journaled", &["journaling"])] {
        let place = place_of(image, features);
        join(image).expect("it is free");
        refused(&place);
        // A rollback of the group also changes an image that has left the group, and writes under
        // the guard.
        rbd(&["group", "snap", "create", "team@then"]).expect("a snapshot of the group");
        leave(image);
        let error = open_place(place.clone(), &options()).err().expect("it is refused").to_string();
        assert!(
            error.contains("belongs to a snapshot of a group") && error.contains("rbd group snap rm"),
            "{error}"
        );
        rbd(&["group", "snap", "rm", "team@then"]).expect("removed");
        depart(image).expect("it is free");
        refused(&Place { image: "elsewhere".into(), ..place.clone() });
        come_back();

        // The image is put into the group after all checks were made.
        let joins = lab.conf().to_owned();
        let name = image.to_owned();
        at(Point::Locked, move || {
            let mut command = std::process::Command::new("rbd");
            command.arg("-c").arg(&joins).args(["group", "image", "add", "team", &name]);
            assert!(command.status().expect("rbd runs").success());
            Ok(())
        });
        refused(&place);
        nothing_more();
        leave(image);
        assert!(!guarded(&place));
        free(image);

        let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
        assert_eq!(write(&mut backend, 1).0, Ok(()));
        kept_away(image, "served");
        assert_eq!(write(&mut backend, 2).0, Ok(()), "what was refused costs nothing");
        if features.is_empty() {
            close(backend, false);
            kept_away(image, "dirty");
            close(open_place(place.clone(), &options()).expect("opened").0, true);
        } else {
            close(backend, true);
        }
        free(image);

        // An older release that does not know these keys leaves them behind.
        let (cluster, pool) = place.connect().expect("a second client");
        let header = Survey::take(&place, &cluster, &pool).expect("a survey").facts.header();
        guard::reserve(&pool, &header).expect("reserved");
        kept_away(image, "left behind");
        attach::abandon(&place, &cluster, &pool).expect("given up");
        free(image);
    }
}

#[test]
fn ownership_survives_refreshed_handles_races_and_cut_attempts() {
    if let Err(e) = Lab::available() {
        println!("not run: {e}");
        return;
    }
    let lab = Lab::for_test().expect("a cluster");
    lab.rbd(&["group", "create", "team"]).expect("a group");
    // One case at a time, because they share the hook.
    let cases: [fn(&Lab); 47] = [
        self::fence::a_record_that_names_more_than_clients_fences_the_real_owner_alone,
        self::fence::an_owner_that_cannot_be_fenced_is_not_passed_over,
        self::fence::a_lock_whose_holder_cannot_be_fenced_is_not_broken,
        self::fence::a_long_fence_is_listed_and_ends_when_its_host_was_restarted,
        self::fence::a_fence_that_an_administrator_has_ended_is_told_and_listed_no_more,
        self::fence::an_own_client_of_a_former_boot_is_fenced_for_a_year,
        a_rollback_that_is_cut_short_is_told_and_finished,
        a_rollback_that_cannot_be_leaves_everything_as_it_was,
        an_object_that_a_cut_rollback_has_hidden_does_not_come_back,
        a_rollback_brings_the_size_back_and_works_without_a_guard,
        snapshots_are_changed_under_the_guard_and_what_is_refused_costs_nothing,
        a_kill_while_a_snapshot_is_changed_costs_neither_dirty_data_nor_access,
        a_refreshed_handle_goes_on_writing,
        a_refreshed_handle_is_replaced_under_overlapping_reads,
        a_handle_that_turns_read_only_is_replaced_after_a_disown_too,
        a_read_only_handle_without_ownership_is_fenced,
        a_read_only_handle_whose_guard_was_lifted_is_fenced,
        a_handle_is_replaced_once_what_stands_in_the_way_has_passed,
        a_record_changes_only_from_the_version_that_was_read,
        a_kill_between_claim_and_record_leaves_a_lock_that_is_known,
        the_slower_of_two_caches_leaves_the_guard_of_the_faster_one_alone,
        a_kill_between_guard_and_record_locks_nobody_out,
        a_kill_while_the_guard_is_lifted_costs_no_dirty_data,
        a_failed_attempt_costs_no_dirty_data,
        half_a_guard_is_taken_away,
        a_visit_that_an_attempt_has_met_is_seen_by_the_next_one,
        the_lock_of_an_early_cut_attempt_is_known_after_many_more,
        a_process_counts_as_dead_only_on_its_own_host_since_its_last_boot,
        giving_up_can_be_cut_short_and_done_again,
        an_image_of_a_group_or_on_its_way_is_refused_and_a_served_one_gets_into_neither,
        a_client_that_comes_between_survey_and_lock_is_seen,
        journaled::what_the_journal_has_of_a_change_is_done_again_by_the_next_open,
        journaled::what_others_change_in_the_moment_of_a_change_is_seen,
        journaled::a_bit_that_was_left_is_taken_away,
        journaled::a_handle_without_a_guard_is_replaced_and_a_visitor_seen,
        journaled::an_image_that_librbd_caches_is_refused,
        peer::a_peer_is_named_and_forgotten,
        peer::a_release_forgets_the_peer_unless_data_stays_behind,
        peer::an_unknown_outcome_is_found_out,
        peer::an_owner_whose_record_was_taken_names_nobody,
        peer::an_owner_that_releases_cannot_be_taken_over_any_more,
        peer::a_peer_takes_over_from_exactly_one_state,
        peer::what_is_taken_over_from_a_living_owner_is_fenced_from_it,
        peer::an_open_after_a_takeover_can_be_cut_short_anywhere,
        peer::an_owner_that_comes_back_and_its_peer_do_not_both_get_the_image,
        peer::an_owner_in_sync_comes_back_alone_only_on_the_same_boot,
        peer::the_former_owners_redo_is_looked_at_when_it_is_fenced,
    ];
    cases.iter().for_each(|case| case(&lab));
}
