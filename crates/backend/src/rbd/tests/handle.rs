//! Handles that turn read-only, and what they are replaced by.

use super::*;

pub(super) fn a_refreshed_handle_goes_on_writing(lab: &Lab) {
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
    assert!(
        (0..5).all(|_| write(&mut backend, 9).0 == Ok(())),
        "the guard proves that the image is ours"
    );
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
pub(super) fn a_refreshed_handle_is_replaced_under_overlapping_reads(lab: &Lab) {
    const READS: u64 = 16;
    const READS_MAX: u64 = 10 * READS;
    let place = place(lab, "read-meanwhile");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let mut memory: Vec<AlignedBuf> = (0..READS).map(|_| AlignedBuf::zeroed(4096)).collect();
    let mut read = |backend: &mut RbdBackend, token: u64| {
        let buf = &mut memory[(token % READS) as usize];
        let transfer =
            Transfer::Read { offset: token % READS * 4096, ptr: buf.as_mut_ptr(), len: 4096 };
        // SAFETY: each buffer has one read at a time, and nothing else uses it.
        unsafe { backend.submit(token, transfer) };
    };
    (0..READS).for_each(|token| read(&mut backend, token));
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(3);
    // SAFETY: the data lives unchanged until the outcome is there.
    unsafe {
        backend.submit(u64::MAX, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 })
    };
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

pub(super) fn a_handle_that_turns_read_only_is_replaced_after_a_disown_too(lab: &Lab) {
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

pub(super) fn a_read_only_handle_without_ownership_is_fenced(lab: &Lab) {
    let place = place(lab, "usurped");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(write(&mut backend, 1).0, Ok(()));
    let site = place.connect().expect("a second client");
    let object = backend.held.as_ref().expect("held").claim.owner.clone();
    let (mut owner, record) =
        OwnerObject::read(&place.what, &site.pool, &object).expect("the record");
    let record = Ownership { generation: 99, ..record.expect("a record") };
    owner.swap(&site.pool, &record).expect("another owner's record");
    refresh_handles(&place);
    let outcomes: Vec<_> = (0..5).map(|_| write(&mut backend, 2)).collect();
    assert!(outcomes.contains(&(Err(IoError::Fenced), true)), "{outcomes:?}");
    assert_eq!(write(&mut backend, 3), (Err(IoError::Fenced), false), "and stays so");
    assert!(guarded(&place), "the other owner's guard is left alone");
}

pub(super) fn a_read_only_handle_whose_guard_was_lifted_is_fenced(lab: &Lab) {
    let place = place(lab, "lifted");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let site = place.connect().expect("a second client");
    guard::pause(&site.pool, &backend.held.as_ref().expect("held").claim.header).expect("lifted");
    assert_eq!(write(&mut backend, 1), (Err(IoError::Fenced), true));
}

pub(super) fn a_handle_is_replaced_once_what_stands_in_the_way_has_passed(lab: &Lab) {
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
    at(Point::Lifted, || {
        Err(BackendError::Denied { what: "it".into(), why: "a right is missing".into() })
    });
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
