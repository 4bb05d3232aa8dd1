//! Attempts to take an image or to give it up that fail or are killed on the way.

use super::*;

pub(super) fn a_kill_between_claim_and_record_leaves_a_lock_that_is_known(lab: &Lab) {
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
    let site = place.connect().expect("a second client");
    owner.swap(&site.pool, &record).expect("a record");
    guard::pause(&site.pool, &claim.header).expect("not guarded yet");
    let (backend, generation, continuity) = open_place(place, &options()).expect("taken back");
    assert_eq!(generation, 1);
    assert!(!continuity.proven && !continuity.overwritten, "{}", continuity.reason);
    Box::new(backend).close(Release { clean: true, cache_failed: false }).expect("closed");
}

pub(super) fn a_kill_between_guard_and_record_locks_nobody_out(lab: &Lab) {
    let place = place(lab, "guarded-early");
    for again in 0..2 {
        killed_open(&place, Point::Guarded);
        assert!(guarded(&place));
        let (backend, generation, _) =
            open_place(place.clone(), &options()).expect("its own cache may");
        assert_eq!(generation, again + 1);
        close(backend, true);
    }
    killed_open(&place, Point::Guarded);
    let site = place.connect().expect("a client");
    let alive = abandon::abandon(&site);
    assert!(matches!(alive, Err(BackendError::Locked { .. })), "{alive:?}");
    bury(&place);
    let line = open_place(place.clone(), &other()).err().expect("not its guard").to_string();
    assert!(line.contains("tidepool recover"), "{line}");
    assert!(abandon::abandon(&site).expect("given up").is_some());
    assert!(!guarded(&place));
    assert!(abandon::abandon(&site).expect("nothing is left").is_none());
    close(open_place(place, &other()).expect("free").0, true);
}

/// The state that an attempt to replace a handle leaves if the cluster is out of reach before the
/// guard is set again.
fn a_guard_that_could_not_be_set_again_fences_nobody(place: &Place) {
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    refresh_handles(place);
    backend.io.image.as_ref().expect("a handle").sizes().expect("a refresh");
    let site = place.connect().expect("a client");
    let held = backend.held.as_mut().expect("held");
    drop(backend.io.image.take());
    let lifted = Some(guard::pause(&site.pool, &held.claim.header).expect("lifted"));
    held.owner.swap(&site.pool, &held.claim.record.clone().with_lifted(lifted)).expect("a record");
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

pub(super) fn a_kill_while_the_guard_is_lifted_costs_no_dirty_data(lab: &Lab) {
    let place = place(lab, "cut-lifted");
    leave_dirty(&place);
    killed_open(&place, Point::Bare);
    assert!(!guarded(&place));
    let (backend, _, continuity) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert!(!continuity.proven, "{}", continuity.reason);
    close(backend, false);
    killed_open(&place, Point::Lifted);
    assert!(!guarded(&place));
    let (mut backend, _, continuity) =
        open_place(place.clone(), &dirty()).expect("nobody has written");
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
        let site = place.connect().expect("a client");
        assert!(abandon::abandon(&site).expect("given up").is_some());
        leave_dirty(&place);
    }
}

/// An attempt may fail or be killed at any moment. It leaves an image with dirty data in a state in
/// which its cache may have it, and other clients may not change it.
pub(super) fn a_failed_attempt_costs_no_dirty_data(lab: &Lab) {
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
                        let site = elsewhere.connect().expect("a client");
                        let mut survey = Survey::take(&site).expect("a survey");
                        let found = survey.record.clone().expect("a record");
                        survey.owner.swap(&site.pool, &found).expect("written again");
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
pub(super) fn a_visit_that_an_attempt_has_met_is_seen_by_the_next_one(lab: &Lab) {
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
            assert!(
                matches!(refused, Some(BackendError::Overwritten { .. })),
                "{image}: {refused:?}"
            );
        }
    }
}

/// A kill while the guard is being set leaves a part of it, which is removed when the image is
/// given up.
pub(super) fn half_a_guard_is_taken_away(lab: &Lab) {
    let place = place(lab, "half-guarded");
    killed_open(&place, Point::Locked);
    let site = place.connect().expect("a second client");
    let header = Survey::take(&site).expect("a survey").facts.header();
    guard::reserve(&site.pool, &header).expect("reserved");
    let alive = abandon::abandon(&site);
    assert!(matches!(alive, Err(BackendError::Locked { .. })), "{alive:?}");
    bury(&place);
    abandon::abandon(&site).expect("given up");
    lab.rbd(&["migration", "prepare", "half-guarded", "elsewhere"]).expect("it can be moved");
    lab.rbd(&["migration", "abort", "--no-progress", "elsewhere"]).expect("it comes back");
    close(open_place(place, &other()).expect("free").0, true);
}

pub(super) fn the_lock_of_an_early_cut_attempt_is_known_after_many_more(lab: &Lab) {
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

pub(super) fn giving_up_can_be_cut_short_and_done_again(lab: &Lab) {
    let place = place(lab, "given-up-twice");
    leave_dirty(&place);
    let abandoned = place.clone();
    killed_at(Point::Abandoned, move || {
        let site = abandoned.connect().expect("a client");
        abandon::abandon(&site).err()
    });
    assert!(guarded(&place));
    let line = open_place(place.clone(), &other()).err().expect("guarded").to_string();
    assert!(line.contains("tidepool recover"), "{line}");
    let site = place.connect().expect("a client");
    assert!(abandon::abandon(&site).expect("given up").is_some());
    assert!(!guarded(&place));
    close(open_place(place, &other()).expect("free").0, true);
}
