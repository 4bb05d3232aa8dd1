//! The second copy's part in the ownership: the record as witness, and an image that is taken over
//! while its owner is alive.

use super::*;
use crate::api::Peer;
use crate::record::{Copies, boot_id};

fn other_as_peer() -> Peer {
    Peer {
        cache_uuid: Uuid::from_bytes([8; 16]),
        boot_id: boot_id(),
        host: "peer.example".into(),
        only: false,
    }
}

fn outcome(backend: &mut RbdBackend) -> Result<(), IoError> {
    let mut outcome = None;
    while outcome.is_none() {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend
            .completions(&mut |_, result| assert_eq!(outcome.replace(result), None, "told twice"));
    }
    outcome.expect("just seen")
}

fn set_peer(backend: &mut RbdBackend, peer: Option<Peer>) -> Result<(), IoError> {
    backend.set_peer(77, peer);
    outcome(backend)
}

/// An owner in sync that has written a block, and its generation.
pub(super) fn in_sync(place: &Place) -> (RbdBackend, u64) {
    let (mut backend, generation, _) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(write(&mut backend, 1).0, Ok(()));
    assert_eq!(set_peer(&mut backend, Some(other_as_peer())), Ok(()));
    (backend, generation)
}

pub(super) fn take_over(
    place: &Place,
    generation: u64,
    accept_loss: bool,
) -> Result<Ownership, BackendError> {
    let site = place.connect().expect("a client");
    let how =
        TakeOver { cache_uuid: other().cache_uuid, generation, accept_loss, ..TakeOver::default() };
    super::super::peer::take_over(&site, &how)
}

pub(super) fn by_peer(generation: u64) -> OpenOptions {
    OpenOptions { generation: Some(generation), dirty: true, ..other() }
}

/// Replaces the record by a changed one.
pub(super) fn forge(place: &Place, change: impl FnOnce(Ownership) -> Ownership) {
    let site = place.connect().expect("a client");
    let mut survey = Survey::take(&site).expect("a survey");
    let record = change(survey.record.clone().expect("a record"));
    survey.owner.swap(&site.pool, &record).expect("a record");
}

/// The first byte of the image, read by a separate client.
fn first_byte(place: &Place) -> u8 {
    let (mut backend, ..) =
        open_place(place.clone(), &OpenOptions { read_only: true, ..other() }).expect("read");
    let mut data = AlignedBuf::zeroed(4096);
    // SAFETY: nothing else uses the data until the outcome is there.
    unsafe { backend.submit(1, Transfer::Read { offset: 0, ptr: data.as_mut_ptr(), len: 4096 }) };
    outcome(&mut backend).expect("a read");
    data[0]
}

pub(super) fn a_peer_is_named_and_forgotten(lab: &Lab) {
    let place = place(lab, "named");
    let (mut backend, generation) = in_sync(&place);
    for peer in [Some(other_as_peer()), Some(other_as_peer()), None, None, Some(other_as_peer())] {
        assert_eq!(set_peer(&mut backend, peer.clone()), Ok(()));
        let found = record(&place);
        assert_eq!((found.copies == Copies::Sync, &found.peer), (peer.is_some(), &peer));
        assert_eq!((found.generation, found.state), (generation, OwnerState::Open));
    }
    let unsound = Peer { host: "a\nb".into(), ..other_as_peer() };
    assert_eq!(set_peer(&mut backend, Some(unsound)), Err(IoError::Errno(libc::EINVAL)));
    // Other changes of the record keep the peer; here it is the mark of a handle that is replaced.
    refresh_handles(&place);
    assert!((0..5).all(|_| write(&mut backend, 2).0 == Ok(())));
    assert_eq!(record(&place).peer, Some(other_as_peer()));
    // Changes of both kinds at once, while a handle is replaced.
    refresh_handles(&place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let data = AlignedBuf::zeroed(4096);
    // SAFETY: the data lives unchanged until all outcomes are there.
    unsafe {
        backend.submit(1, Transfer::Write { offset: 0, ptr: data.as_ptr(), len: 4096 });
        backend.set_peer(2, None);
        backend.submit(3, Transfer::Disown);
        backend.set_peer(4, None);
    }
    let mut outcomes = Vec::new();
    while outcomes.len() < 4 {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |token, result| outcomes.push((token, result)));
    }
    assert!(outcomes.iter().all(|(_, result)| *result == Ok(())), "{outcomes:?}");
    let found = record(&place);
    assert_eq!((&found.peer, found.superseded.is_some()), (&None, true));
    assert_eq!(set_peer(&mut backend, Some(other_as_peer())), Err(IoError::Errno(libc::EINVAL)));
    close(backend, true);
    let (mut reader, ..) =
        open_place(place, &OpenOptions { read_only: true, ..options() }).expect("opened");
    assert_eq!(set_peer(&mut reader, None), Err(IoError::Errno(libc::EROFS)));
}

pub(super) fn a_release_forgets_the_peer_unless_data_stays_behind(lab: &Lab) {
    let place = place(lab, "named-released");
    for clean in [true, false] {
        let (backend, _) = in_sync(&place);
        close(backend, clean);
        let found = record(&place);
        assert_eq!((found.peer.is_some(), found.stamp.is_some()), (!clean, true), "{found:?}");
    }
    let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("its own cache may");
    assert!(continuity.proven, "{}", continuity.reason);
    assert_eq!(record(&place).peer, None, "an open begins alone");
    close(backend, true);
    // An image that was stopped with dirty data can be taken over too; a clean image cannot.
    assert!(matches!(
        take_over(&place, record(&place).generation, false),
        Err(BackendError::NotPeer { .. })
    ));
    let (backend, generation) = in_sync(&place);
    close(backend, false);
    take_over(&place, generation, false).expect("taken over");
    let (backend, _, continuity) = open_place(place.clone(), &by_peer(generation)).expect("opened");
    assert!(continuity.proven, "{}", continuity.reason);
    close(backend, true);
}

/// The outcome of a change is lost: the next change of the record continues from what the record
/// says.
pub(super) fn an_unknown_outcome_is_found_out(lab: &Lab) {
    let place = place(lab, "unknown");
    let (mut backend, _) = in_sync(&place);
    let lost =
        || BackendError::Unavailable { what: "it".into(), why: "the answer was lost".into() };
    for made in [false, true] {
        let changed = place.clone();
        at(Point::Naming, move || {
            if made {
                forge(&changed, |record| record.with_peer(None));
            }
            Err(lost())
        });
        assert_eq!(set_peer(&mut backend, None), Err(IoError::Errno(libc::EIO)));
        nothing_more();
        assert_eq!(record(&place).peer.is_some(), !made);
        // Replacing a handle must not bring the former peer back.
        refresh_handles(&place);
        assert!((0..5).all(|_| write(&mut backend, 2).0 == Ok(())));
        assert_eq!(record(&place).peer.is_some(), !made);
        if made {
            break;
        }
        assert_eq!(set_peer(&mut backend, Some(other_as_peer())), Ok(()));
    }
    close(backend, false);
    assert_eq!(record(&place).peer, None, "as it stands there");
    // Another client changes something in our record in between: the record is read again.
    let (mut backend, _) = in_sync(&place);
    let changed = place.clone();
    let mut left = 2;
    at(Point::Naming, move || {
        if left > 0 {
            left -= 1;
            forge(&changed, |record| record.renewed());
        }
        Ok(())
    });
    assert_eq!(set_peer(&mut backend, None), Ok(()));
    nothing_more();
    assert_eq!(record(&place).peer, None);
    close(backend, true);
}

pub(super) fn an_owner_whose_record_was_taken_names_nobody(lab: &Lab) {
    let place = place(lab, "named-too-late");
    for between in [false, true] {
        let (mut backend, generation) = in_sync(&place);
        match between {
            // After the change has read the record.
            true => {
                let taken = place.clone();
                at(Point::Naming, move || take_over(&taken, generation, false).map(drop));
            }
            false => drop(take_over(&place, generation, false).expect("taken over")),
        }
        assert_eq!(set_peer(&mut backend, None), Err(IoError::Fenced));
        nothing_more();
        let found = record(&place);
        assert_eq!(
            (found.cache_uuid.as_bytes(), found.generation),
            (&other().cache_uuid, generation + 1)
        );
        assert_eq!(set_peer(&mut backend, Some(other_as_peer())), Err(IoError::Fenced));
        assert_eq!(write(&mut backend, 9).0, Err(IoError::Fenced), "it knows");
        assert_eq!(record(&place), found);
        let closed = Box::new(backend).close(Release { clean: true, cache_failed: false });
        assert!(matches!(closed, Err(BackendError::Fenced { .. })), "{closed:?}");
        assert!(guarded(&place), "it is another's to lift");
        close(open_place(place.clone(), &by_peer(generation)).expect("opened").0, true);
    }
}

pub(super) fn an_owner_that_releases_cannot_be_taken_over_any_more(lab: &Lab) {
    let place = place(lab, "released-in-time");
    let (backend, generation) = in_sync(&place);
    let taken = place.clone();
    at(Point::Naming, move || take_over(&taken, generation, false).map(drop));
    let closed = Box::new(backend).close(Release { clean: true, cache_failed: false });
    nothing_more();
    assert!(matches!(closed, Err(BackendError::Fenced { .. })), "{closed:?}");
    assert!(guarded(&place), "nothing was given up");
    let (backend, ..) = open_place(place.clone(), &by_peer(generation)).expect("opened");
    close(backend, true);
}

pub(super) fn a_peer_takes_over_from_exactly_one_state(lab: &Lab) {
    let place = place(lab, "taken-over-from");
    let refused = |generation, accept_loss| {
        let before = Some(record(&place)).filter(|_| generation > 0);
        let error = take_over(&place, generation, accept_loss).expect_err("another state");
        assert!(matches!(error, BackendError::NotPeer { .. }), "{error}");
        assert!(before.is_none_or(|before| record(&place) == before));
    };
    let error = take_over(&place, 0, true).expect_err("no record").to_string();
    assert!(error.contains("no ownership record"), "{error}");
    let (mut backend, generation) = in_sync(&place);
    refused(generation - 1, true);
    refused(generation + 1, true);
    assert_eq!(set_peer(&mut backend, None), Ok(()));
    refused(generation, true);
    let another = Peer { cache_uuid: Uuid::from_bytes([9; 16]), ..other_as_peer() };
    assert_eq!(set_peer(&mut backend, Some(another)), Ok(()));
    refused(generation, true);
    let restarted = Peer { boot_id: "another".into(), ..other_as_peer() };
    assert_eq!(set_peer(&mut backend, Some(restarted)), Ok(()));
    refused(generation, false);
    let taken = take_over(&place, generation, true).expect("the loss is accepted");
    assert_eq!(taken, record(&place));
    assert_eq!(
        taken.clients.owner,
        Some(backend.held.as_ref().expect("held").claim.address.clone())
    );
    refused(generation + 1, true);
    let line = open_place(place.clone(), &dirty()).err().expect("not its own any more").to_string();
    assert!(line.contains("owned by another cache"), "{line}");
    close(open_place(place.clone(), &by_peer(generation)).expect("opened").0, true);
}

/// The owner is alive and has everything open. It is fenced, its lock is broken, and it cannot
/// write any more.
pub(super) fn what_is_taken_over_from_a_living_owner_is_fenced_from_it(lab: &Lab) {
    let place = place(lab, "taken-alive");
    for restarted in [false, true] {
        let (mut old, generation) = in_sync(&place);
        let old_address = old.held.as_ref().expect("held").claim.address.clone();
        let taken = take_over(&place, generation, false).expect("taken over");
        assert!(guarded(&place));
        if restarted {
            forge(&place, |record| Ownership { boot_id: "another".into(), ..record });
        }
        let report = crate::check(&uri(lab, &place), &by_peer(generation));
        assert!(
            report.usable
                && report.would.iter().any(|step| step.contains("fence the former owner")),
            "{report:?}"
        );
        let (mut new, third, continuity) =
            open_place(place.clone(), &by_peer(generation)).expect("opened");
        assert!(continuity.proven && third == taken.generation + 1, "{}", continuity.reason);
        let found = record(&place);
        assert_eq!((found.base, &found.taken_from), (Some(generation), &None));
        assert_eq!(write(&mut new, 5).0, Ok(()));
        assert_eq!(write(&mut old, 6).0, Err(IoError::Fenced));
        let blocklist = lab.ceph(&["osd", "blocklist", "ls"]).expect("the blocklist");
        assert!(blocklist.contains(&address::plain(&old_address)), "{blocklist}");
        assert!(matches!(
            Box::new(old).close(Release { clean: true, cache_failed: false }),
            Err(BackendError::Fenced { .. })
        ));
        assert_eq!(write(&mut new, 7).0, Ok(()));
        close(new, true);
        assert_eq!(first_byte(&place), 7);
    }
}

pub(super) fn uri(lab: &Lab, place: &Place) -> BackendUri {
    lab.uri(&place.image).parse().expect("a URI")
}

/// The fence of a former owner lasts for a year, whatever happens to the attempts to open the
/// image.
pub(super) fn an_open_after_a_takeover_can_be_cut_short_anywhere(lab: &Lab) {
    let place = place(lab, "taken-cut");
    let (mut old, generation) = in_sync(&place);
    take_over(&place, generation, false).expect("taken over");
    let site = place.connect().expect("a client");
    let survey = || Survey::take(&site).expect("a survey");
    let cut = |point: Point| {
        let place = place.clone();
        killed_at(point, move || open_place(place, &by_peer(generation)).err());
    };
    let uuid = Uuid::from_bytes(other().cache_uuid);
    assert!(survey().own_fence_s(uuid) > 364.0 * 86_400.0);
    // There are more claims than the record has room for: one is dropped, after every client was
    // fenced.
    let claims: Vec<String> = (1..=8).map(|nonce| format!("10.0.0.1:0/{nonce}")).collect();
    forge(&place, |mut record| {
        record.clients.claims = claims.clone();
        record
    });
    cut(Point::Claimed);
    let found = record(&place).clients.claims;
    assert_eq!((found.len(), found.contains(&claims[0])), (8, false));
    let blocklist = lab.ceph(&["osd", "blocklist", "ls"]).expect("the blocklist");
    assert!(claims.iter().all(|claim| blocklist.contains(claim)), "{blocklist}");
    assert_eq!(write(&mut old, 9).0, Err(IoError::Fenced), "before anything else");
    forge(&place, |mut record| {
        let surplus = record.clients.claims.len().saturating_sub(1);
        record.clients.claims.drain(..surplus);
        record
    });
    for point in [Point::Lifted, Point::Locked, Point::Guarded, Point::Bare] {
        cut(point);
        let found = record(&place);
        assert_eq!((found.taken_from.is_some(), found.base), (true, Some(generation)), "{point:?}");
        assert!(survey().own_fence_s(uuid) > 364.0 * 86_400.0);
    }
    let (mut new, _, continuity) =
        open_place(place.clone(), &by_peer(generation)).expect("nobody has written");
    assert!(!continuity.proven && !continuity.overwritten, "{}", continuity.reason);
    assert_eq!(survey().own_fence_s(uuid), 3600.0, "from now on it is its own process");
    assert_eq!((write(&mut new, 5).0, write(&mut old, 6).0), (Ok(()), Err(IoError::Fenced)));
    drop(old);
    close(new, true);
}

/// The owner that comes back and its peer open the image at the same moment.
pub(super) fn an_owner_that_comes_back_and_its_peer_do_not_both_get_the_image(lab: &Lab) {
    let place = place(lab, "both-at-once");
    for point in [Point::Claimed, Point::Lifted, Point::Guarded] {
        let (backend, generation) = in_sync(&place);
        drop(backend);
        let taken = place.clone();
        at(point, move || take_over(&taken, generation, false).map(drop));
        let late = open_place(place.clone(), &dirty()).err();
        nothing_more();
        let changed =
            matches!(late, Some(BackendError::Locked { .. } | BackendError::Fenced { .. }));
        assert!(changed, "{point:?}: {late:?}");
        let opened = open_place(place.clone(), &by_peer(generation));
        close(opened.unwrap_or_else(|e| panic!("{point:?}: {e}")).0, true);
    }
}

pub(super) fn an_owner_in_sync_comes_back_alone_only_on_the_same_boot(lab: &Lab) {
    let place = place(lab, "sync-restart");
    let (backend, _) = in_sync(&place);
    drop(backend);
    let (mut backend, generation, continuity) =
        open_place(place.clone(), &dirty()).expect("the same boot");
    assert!(!continuity.overwritten, "{}", continuity.reason);
    assert_eq!(record(&place).peer, None);
    assert_eq!(set_peer(&mut backend, Some(other_as_peer())), Ok(()));
    drop(backend);
    forge(&place, |record| Ownership { boot_id: "another".into(), ..record });
    let before = record(&place);
    for whole_as_of in [None, Some(generation + 1)] {
        let refused = open_place(place.clone(), &OpenOptions { whole_as_of, ..dirty() }).err();
        assert!(matches!(refused, Some(BackendError::PeerFirst { .. })), "{refused:?}");
        let reader = OpenOptions { read_only: true, ..options() };
        assert!(matches!(open_place(place.clone(), &reader), Err(BackendError::PeerFirst { .. })));
    }
    let report = crate::check(&uri(lab, &place), &dirty());
    assert!(!report.usable, "{report:?}");
    assert_eq!(record(&place), before, "nothing was changed");
    let asked = OpenOptions { whole_as_of: Some(generation), ..dirty() };
    close(open_place(place, &asked).expect("its peer was asked").0, true);
}

/// The peer's log must contain what the former owner has committed, otherwise the peer must not
/// have the image.
pub(super) fn the_former_owners_redo_is_looked_at_when_it_is_fenced(lab: &Lab) {
    let place = place(lab, "taken-redo");
    let grouped = |options: OpenOptions| OpenOptions { grouped: true, ..options };
    let (mut old, generation, _) = open_place(place.clone(), &grouped(options())).expect("opened");
    let commit = |backend: &mut RbdBackend, sequence| {
        let age = Duration::from_millis(1);
        let commit =
            Transfer::RedoCommit { first: 1, group: sequence / 10, frames: 0, sequence, age };
        // SAFETY: it names no memory.
        unsafe { backend.submit(1, commit) };
        outcome(backend)
    };
    assert_eq!(commit(&mut old, 10), Ok(()));
    assert_eq!(set_peer(&mut old, Some(other_as_peer())), Ok(()));
    take_over(&place, generation, false).expect("taken over");
    let holds = |sequence| grouped(OpenOptions { sequence: Some(sequence), ..by_peer(generation) });
    let behind = open_place(place.clone(), &holds(9)).err();
    assert!(matches!(behind, Some(BackendError::Behind { .. })), "{behind:?}");
    assert_eq!(commit(&mut old, 20), Ok(()), "nobody has fenced it");
    // A commit at the last moment.
    let (give, taken) = mpsc::channel();
    let mut last = Some((old, give));
    at(Point::Fencing, move || {
        if let Some((mut old, give)) = last.take() {
            assert_eq!(commit(&mut old, 30), Ok(()));
            give.send(old).expect("the test waits");
        }
        Ok(())
    });
    let behind = open_place(place.clone(), &holds(20)).err();
    nothing_more();
    assert!(matches!(behind, Some(BackendError::Behind { .. })), "{behind:?}");
    let mut old = taken.recv().expect("the old owner");
    let look = crate::recover(&uri(lab, &place), None, true).expect("a look");
    assert_eq!((look.exact, look.groups), (true, 3));
    let (mut new, ..) = open_place(place.clone(), &holds(30)).expect("opened");
    assert_eq!(commit(&mut old, 40), Err(IoError::Fenced));
    assert_eq!(commit(&mut new, 50), Ok(()));
    let look = crate::recover(&uri(lab, &place), None, true).expect("a look");
    assert_eq!((look.exact, look.groups), (true, 1), "its own");
    drop(old);
    close(new, true);
}
