//! Tests that need access to internals: handles that turn read-only, and what librbd is called
//! with.

mod cut;
mod fence;
mod handle;
mod journaled;
mod peer;
mod rollback;

use super::image::Image;
use super::point::{HOOK, Point};
use super::*;
use crate::api::{Backend, Release, Transfer};
use crate::mailbox;
use crate::record::OwnerState;
use crate::snapshot::SnapshotChange;
use std::sync::mpsc;
use std::time::Duration;
use tidepool_cluster::ceph::Cluster as Lab;
use tidepool_engine::api::IoError;
use tidepool_engine::mem::AlignedBuf;

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
fn change_snapshot(
    backend: &mut RbdBackend,
    name: &str,
    change: SnapshotChange,
) -> Result<(), IoError> {
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
    let site = place.connect().expect("a client");
    let image = site.open(Access::Read).expect("opened");
    let listed = image.snapshots().expect("a list").into_iter();
    listed.map(|snapshot| (snapshot.name, snapshot.protected)).collect()
}

/// Makes every handle of the image read its header again, as a lost and renewed watch does.
fn refresh_handles(place: &Place) {
    let site = place.connect().expect("a second client");
    let survey = Survey::take(&site).expect("a survey");
    site.pool.notify_header(&survey.facts.header()).expect("every watcher answers");
}

fn break_lock(place: &Place) {
    let site = place.connect().expect("a second client");
    let survey = Survey::take(&site).expect("a survey");
    site.pool
        .break_lock(&survey.facts.header(), &survey.locker.expect("a locker"))
        .expect("broken");
}

fn guarded(place: &Place) -> bool {
    let site = place.connect().expect("a second client");
    Survey::take(&site).expect("a survey").guarded()
}

fn a_record_changes_only_from_the_version_that_was_read(lab: &Lab) {
    let place = place(lab, "swapped");
    let site = place.connect().expect("a client");
    let record = Ownership::new(1, Uuid::from_bytes([7; 16]), OwnerState::Clean);
    let read =
        || OwnerObject::read(&place.what, &site.pool, "tidepool_owner.test").expect("a read");
    let (mut first, none) = read();
    assert!(none.is_none());
    let (mut second, _) = read();
    first.swap(&site.pool, &record).expect("the first to create it");
    assert!(
        matches!(second.swap(&site.pool, &record), Err(BackendError::Locked { .. })),
        "created twice"
    );
    let (mut third, found) = read();
    assert_eq!(found, Some(record.clone()));
    third.swap(&site.pool, &record).expect("from the version that was read");
    assert!(
        matches!(first.swap(&site.pool, &record), Err(BackendError::Locked { .. })),
        "a lost update"
    );
    third.swap(&site.pool, &record).expect("from the version that was written");
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
fn stranger(place: &Place) -> (Image, Site) {
    let site = place.connect().expect("a client");
    let image = site.open(Access::Write).expect("opened");
    (image, site)
}

/// Another client takes the lock, as for a write, and ends.
fn visit(place: &Place) {
    stranger(place).0.lock().expect("the lock");
}

fn record(place: &Place) -> Ownership {
    let site = place.connect().expect("a client");
    Survey::take(&site).expect("a survey").record.expect("a record")
}

/// Fences the clients of attempts that were cut short and waits until they are forgotten, as if
/// their processes had been killed.
fn bury(place: &Place) {
    let site = place.connect().expect("a client");
    let clients = record(place).clients.claims;
    let fence = |text: &String| {
        site.cluster
            .blocklist(address::Client::of(text).expect("an address"), 600.0)
            .expect("fenced")
    };
    clients.iter().for_each(fence);
    while !Survey::take(&site).expect("a survey").facts.watchers.is_empty() {
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
        [SnapshotChange::Remove, SnapshotChange::Protect, SnapshotChange::Unprotect]
            .into_iter()
            .enumerate()
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
        let (mut backend, _, continuity) =
            open_place(place.clone(), &dirty()).expect("nobody has written");
        assert!(continuity.proven, "{}", continuity.reason);
        assert!(guarded(&place));
        assert_eq!(change_snapshot(&mut backend, "kept", change), Ok(()), "it is done again");
        close(backend, true);
    }
}

fn a_process_counts_as_dead_only_on_its_own_host_since_its_last_boot(lab: &Lab) {
    let place = place(lab, "moved");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    let site = place.connect().expect("a client");
    let look = || Survey::take(&site).expect("a survey");
    let uuid = Uuid::from_bytes(options().cache_uuid);
    let survey = look();
    assert!(matches!(survey.holder(&options()), survey::Holder::OurDead(_)));
    assert_eq!(survey.own_fence_s(uuid), 3600.0);
    let held = backend.held.as_mut().expect("held");
    let ours = held.claim.record.clone();
    let elsewhere = Ownership { host: "elsewhere".into(), ..ours.clone() };
    let namesake = Ownership { boot_id: "another".into(), ..ours.clone() };
    for record in [elsewhere, namesake] {
        held.owner.swap(&site.pool, &record).expect("a record");
        let survey = look();
        assert!(matches!(survey.holder(&options()), survey::Holder::Live(_)), "{record:?}");
        assert!(survey.own_fence_s(uuid) > 364.0 * 86_400.0, "{record:?}");
    }
    held.owner.swap(&site.pool, &ours).expect("a record");
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
        let refused =
            open_place(place.clone(), &options()).err().expect("it is still there").to_string();
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
    let leave =
        |image: &str| rbd(&["group", "image", "rm", "team", image]).expect("it leaves the group");
    let depart = |image: &str| rbd(&["migration", "prepare", image, "elsewhere"]);
    let come_back =
        || rbd(&["migration", "abort", "--no-progress", "elsewhere"]).expect("it comes back");
    let refused = |place: &Place| {
        let opened = open_place(place.clone(), &options()).err();
        let site = place.connect().expect("a second client");
        let looked = Survey::take(&site).and_then(|survey| survey.check_kind(place));
        for error in [opened, looked.err()] {
            let error = error.expect("it is refused").to_string();
            assert!(
                error.contains("is in a group") && error.contains("rbd group image rm GROUP"),
                "{error}"
            );
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
        features
            .iter()
            .for_each(|feature| rbd(&["feature", "enable", image, feature]).expect("a feature"));
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
            error.contains("belongs to a snapshot of a group")
                && error.contains("rbd group snap rm"),
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
        let site = place.connect().expect("a second client");
        let header = Survey::take(&site).expect("a survey").facts.header();
        guard::reserve(&site.pool, &header).expect("reserved");
        kept_away(image, "left behind");
        abandon::abandon(&site).expect("given up");
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
        rollback::a_rollback_that_is_cut_short_is_told_and_finished,
        rollback::a_rollback_that_cannot_be_leaves_everything_as_it_was,
        rollback::an_object_that_a_cut_rollback_has_hidden_does_not_come_back,
        rollback::a_rollback_brings_the_size_back_and_works_without_a_guard,
        snapshots_are_changed_under_the_guard_and_what_is_refused_costs_nothing,
        a_kill_while_a_snapshot_is_changed_costs_neither_dirty_data_nor_access,
        handle::a_refreshed_handle_goes_on_writing,
        handle::a_refreshed_handle_is_replaced_under_overlapping_reads,
        handle::a_handle_that_turns_read_only_is_replaced_after_a_disown_too,
        handle::a_read_only_handle_without_ownership_is_fenced,
        handle::a_read_only_handle_whose_guard_was_lifted_is_fenced,
        handle::a_handle_is_replaced_once_what_stands_in_the_way_has_passed,
        a_record_changes_only_from_the_version_that_was_read,
        cut::a_kill_between_claim_and_record_leaves_a_lock_that_is_known,
        the_slower_of_two_caches_leaves_the_guard_of_the_faster_one_alone,
        cut::a_kill_between_guard_and_record_locks_nobody_out,
        cut::a_kill_while_the_guard_is_lifted_costs_no_dirty_data,
        cut::a_failed_attempt_costs_no_dirty_data,
        cut::half_a_guard_is_taken_away,
        cut::a_visit_that_an_attempt_has_met_is_seen_by_the_next_one,
        cut::the_lock_of_an_early_cut_attempt_is_known_after_many_more,
        a_process_counts_as_dead_only_on_its_own_host_since_its_last_boot,
        cut::giving_up_can_be_cut_short_and_done_again,
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
