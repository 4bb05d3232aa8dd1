//! What needs a look inside: handles that turn read-only, and what librbd was told.

use super::*;
use crate::backend::Backend;
use crate::record::OwnerState;
use std::ptr;
use tidepool_engine::mem::AlignedBuf;
use tidepool_lab::cluster::{Cluster as Lab, ClusterOptions};

fn place(lab: &Lab, image: &str) -> Place {
    lab.rbd_create(image, 8 << 20).expect("an image");
    let uri = format!("rbd:rbd/{image}?conf={}", lab.conf().display()).parse().expect("a URI");
    Place::of(&uri).expect("an rbd: URI")
}

fn options() -> OpenOptions {
    OpenOptions { cache_uuid: [7; 16], ..OpenOptions::default() }
}

/// Writes a block; the outcome, and whether the write met a read-only handle on its way.
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

/// Makes every handle of the image read its header again, as a lost and renewed watch does.
fn refresh_handles(place: &Place) {
    let (cluster, pool) = place.connect().expect("a second client");
    let survey = Survey::take(place, &cluster, &pool).expect("a survey");
    // librbd's NotifyMessage, version 6 compatible to 1, four bytes of content: operation 3, HeaderUpdate.
    const MESSAGE: [u8; 10] = [6, 1, 4, 0, 0, 0, 3, 0, 0, 0];
    let name = cluster::c_string(&survey.facts.header());
    let (mut reply, mut len) = (ptr::null_mut(), 0);
    // SAFETY: a valid pool, a C string, a message with its length, valid out pointers.
    let notified = unsafe {
        let notify = cluster.libraries().rados.rados_notify2;
        notify(pool.handle(), name.as_ptr(), MESSAGE.as_ptr().cast(), 10, 5000, &raw mut reply, &raw mut len)
    };
    drop(cluster.take_buffer(reply, len));
    cluster::check(notified).expect("every watcher answers");
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
        // librbd looks at the header while it executes the first write, and refuses from the next one on.
        let outcomes: Vec<_> = (0..5).map(|_| write(&mut backend, byte)).collect();
        assert!(outcomes.iter().all(|(result, _)| *result == Ok(())), "{outcomes:?}");
        assert_eq!(outcomes.iter().filter(|(_, parked)| *parked).count(), 1, "{outcomes:?}");
        assert!(guarded(&place), "the guard is set again");
    }
    // What librbd does with its own lock while it renews a watch.
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

/// Reads that overlap without a pause must not keep a write waiting for its new handle.
fn a_refreshed_handle_is_replaced_under_overlapping_reads(lab: &Lab) {
    const READS: u64 = 16;
    const READS_MAX: u64 = 20_000;
    let place = place(lab, "read-meanwhile");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let mut memory: Vec<AlignedBuf> = (0..READS).map(|_| AlignedBuf::zeroed(4096)).collect();
    let mut read = |backend: &mut RbdBackend, token: u64| {
        let buf = &mut memory[(token % READS) as usize];
        let transfer = Transfer::Read { offset: token % READS * 4096, ptr: buf.as_mut_ptr(), len: 4096 };
        // SAFETY: each buffer has one read at a time, and nobody looks at it.
        unsafe { backend.submit(token, transfer) };
    };
    (0..READS).for_each(|token| read(&mut backend, token));
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(3);
    // SAFETY: the data lives unchanged until the outcome is there.
    unsafe { backend.submit(u64::MAX, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 }) };
    let (mut outcome, mut reads) = (None, 0);
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        let mut done = Vec::new();
        backend.completions(&mut |token, result| done.push((token, result)));
        for (token, result) in done {
            if token == u64::MAX {
                outcome = Some(result);
                continue;
            }
            assert_eq!(result, Ok(()));
            reads += 1;
            assert!(reads < READS_MAX, "the write waits as long as there are reads");
            read(&mut backend, token);
        }
    }
    assert_eq!(outcome, Some(Ok(())));
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
    // A write that waits for a new handle, and a change of the record that the new handle is proven by.
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
    guard::set(&pool, &backend.held.as_ref().expect("held").claim.header, false).expect("lifted");
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
    // What the record says just before the last step of an open: the claim, not yet the client.
    let Held { claim, mut owner, .. } = {
        let mut backend = backend;
        (backend.held.take().expect("held"), std::mem::forget(backend)).0
    };
    let mut record = Ownership::new(0, Uuid::from_bytes([7; 16]), OwnerState::Clean);
    record.claim = Some(claim.address.clone());
    let (_cluster, pool) = place.connect().expect("a second client");
    owner.swap(&pool, &record).expect("a record");
    guard::set(&pool, &claim.header, false).expect("not guarded yet");
    let (backend, generation, continuity) = open_place(place, &options()).expect("taken back");
    assert_eq!(generation, 1);
    assert!(!continuity.proven && !continuity.overwritten, "{}", continuity.reason);
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
}

#[test]
fn ownership_survives_refreshed_handles_races_and_cut_opens() {
    if let Err(e) = Lab::available() {
        println!("not run: {e}");
        return;
    }
    let lab = Lab::up(&ClusterOptions::default()).expect("a cluster");
    a_refreshed_handle_goes_on_writing(&lab);
    a_refreshed_handle_is_replaced_under_overlapping_reads(&lab);
    a_handle_that_turns_read_only_is_replaced_after_a_disown_too(&lab);
    a_read_only_handle_without_ownership_is_fenced(&lab);
    a_read_only_handle_whose_guard_was_lifted_is_fenced(&lab);
    a_record_changes_only_from_the_version_that_was_read(&lab);
    a_kill_between_claim_and_record_leaves_a_lock_that_is_known(&lab);
}
