//! Images with journaling: a bit of the header forbids changes of them, in place of the guard.

use super::*;
use std::time::{Duration, Instant};

/// Longest wait for an open that must not hang.
const WAIT_MAX: Duration = Duration::from_secs(60);

fn journaled(lab: &Lab, image: &str) -> Place {
    let place = place(lab, image);
    lab.rbd(&["feature", "enable", image, "journaling"]).expect("a feature");
    place
}

fn forbidden(place: &Place) -> bool {
    let site = place.connect().expect("a second client");
    Survey::take(&site).expect("a survey").facts.forbidden
}

/// The journal repeats a change whose end was not recorded, through a handle that may change the
/// image.
pub(super) fn what_the_journal_has_of_a_change_is_done_again_by_the_next_open(lab: &Lab) {
    const IMAGE: &str = "replayed";
    let pool = format!("{}-data", lab.pool());
    let of_pool = |settings: &[[&str; 2]]| {
        for [what, value] in settings {
            let mut line = vec!["osd", "pool", "set", &pool, what, value];
            line.extend((*what == "size").then_some("--yes-i-really-mean-it"));
            lab.ceph(&line).expect("a setting");
        }
    };
    lab.ceph(&["osd", "pool", "create", &pool, "1"]).expect("a pool");
    lab.ceph(&["osd", "pool", "application", "enable", &pool, "rbd"]).expect("a pool of images");
    lab.rbd(&["create", "--size", "8M", "--data-pool", &pool, IMAGE]).expect("an image");
    lab.rbd(&["feature", "enable", IMAGE, "journaling"]).expect("a feature");
    lab.rbd(&["snap", "create", "--no-progress", &format!("{IMAGE}@then")]).expect("a snapshot");
    let place = Place::of(&lab.uri(IMAGE).parse().expect("a URI")).expect("an rbd: URI");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(write(&mut backend, 1), (Ok(()), false));

    // The image's data can no longer be written, but its header can. So the journal has a write
    // that does not end before the change that follows it.
    of_pool(&[["size", "2"], ["min_size", "2"]]);
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(2);
    let data = Box::leak(Box::new(data));
    // SAFETY: the data lives unchanged to the end of the process.
    unsafe { backend.submit(2, Transfer::Write { offset: 4096, ptr: data.as_ptr(), len: 4096 }) };
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(change_snapshot(&mut backend, "then", SnapshotChange::Protect), Ok(()));
    assert_eq!(backend.io.inflight(), 1, "the write waits");
    assert!(forbidden(&place));
    // As after a kill: the process's client can do nothing more once it is fenced.
    std::mem::forget(backend);
    of_pool(&[["size", "1"]]);

    let (tell, told) = mpsc::channel();
    let again = place.clone();
    std::thread::spawn(move || drop(tell.send(open_place(again, &dirty()))));
    let (mut backend, ..) = told.recv_timeout(WAIT_MAX).expect("it does not hang").expect("opened");
    assert!(forbidden(&place), "changes are forbidden again");
    assert_eq!(write(&mut backend, 3), (Ok(()), false));
    assert_eq!(change_snapshot(&mut backend, "then", SnapshotChange::Unprotect), Ok(()));
    close(backend, true);
    assert!(!forbidden(&place));
}

/// Changes that other clients make while changes are allowed are seen, and an image that they have
/// damaged is no longer served.
pub(super) fn what_others_change_in_the_moment_of_a_change_is_seen(lab: &Lab) {
    for (image, resizes) in [("joined", false), ("cut-short", true)] {
        let place = journaled(lab, image);
        let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
        assert_eq!(write(&mut backend, 1), (Ok(()), false));
        let (_site, other) = {
            let (image, site) = stranger(&place);
            (site, Arc::new(image))
        };
        let (visited, guest) = (place.clone(), Arc::clone(&other));
        at(Point::Exposed, move || {
            refresh_handles(&visited);
            match resizes {
                true => guest.resize(4 << 20).expect("our handle does it"),
                false => guest.snapshot("theirs").expect("our handle does it"),
            }
            Ok(())
        });
        let taken = take_snapshot(&mut backend, "ours");
        nothing_more();
        if resizes {
            assert_eq!(taken, Err(IoError::Fenced));
            assert_eq!(write(&mut backend, 2).0, Err(IoError::Fenced), "it is served no more");
            let closed = Box::new(backend).close(Release { clean: false, cache_failed: false });
            assert!(matches!(closed, Err(BackendError::Fenced { .. })), "{closed:?}");
            drop(other);
            let refused = open_place(place.clone(), &dirty()).err();
            assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{refused:?}");
        } else {
            assert_eq!(taken, Ok(()), "theirs is told in the log alone");
            assert_eq!(write(&mut backend, 2), (Ok(()), false));
            let names: Vec<String> = snapshots(&place).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["theirs", "ours"]);
            drop(other);
            close(backend, true);
        }
    }
}

/// A bit that an image does not need any more is removed by the next open. Giving up the image
/// removes it too.
pub(super) fn a_bit_that_was_left_is_taken_away(lab: &Lab) {
    let place = place(lab, "left-forbidden");
    let site = place.connect().expect("a second client");
    let header = Survey::take(&site).expect("a survey").facts.header();
    let leave = || {
        forbid::set(&site.pool, &header).expect("forbidden");
        assert!(lab.rbd(&["snap", "create", "--no-progress", "left-forbidden@new"]).is_err());
    };
    leave();
    abandon::abandon(&site).expect("there is nothing to give up");
    assert!(!forbidden(&place), "without a record");
    leave();
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    assert_eq!(take_snapshot(&mut backend, "ours"), Ok(()));
    close(backend, true);
    assert!(!forbidden(&place), "after a clean release");
    leave();
    abandon::abandon(&site).expect("there is nothing to give up");
    assert!(!forbidden(&place), "with a clean record");
    lab.rbd(&["snap", "create", "--no-progress", "left-forbidden@new"]).expect("everybody may");
}

/// A handle without a guard is replaced, also after an attempt that failed. A client that takes the
/// lock in between is seen.
pub(super) fn a_handle_without_a_guard_is_replaced_and_a_visitor_seen(lab: &Lab) {
    let away = || BackendError::Unavailable { what: "it".into(), why: "no answer".into() };
    let place = journaled(lab, "replaced");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("opened");
    for byte in 1..5 {
        assert_eq!(write(&mut backend, byte), (Ok(()), false));
        if byte > 2 {
            let mut left = 2;
            at(Point::Locked, move || {
                left -= 1;
                if left >= 0 { Err(away()) } else { Ok(()) }
            });
        }
        backend.stale = true;
        backend.start_retake();
        let start = Instant::now();
        while backend.retake.is_some() || backend.stale {
            assert!(start.elapsed() < WAIT_MAX, "it does not hang");
            mailbox::wait_readable(backend.event_fd(), 1000);
            backend.completions(&mut |_, _| {});
        }
        nothing_more();
        assert!(forbidden(&place) && !backend.fenced);
    }
    close(backend, false);

    // A kill after an attempt has allowed changes, and before it has the lock.
    let cut = place.clone();
    killed_at(Point::Permitted, move || open_place(cut, &dirty()).err());
    let (mut backend, ..) = open_place(place.clone(), &dirty()).expect("nobody has written");
    assert_eq!(write(&mut backend, 9), (Ok(()), false));
    close(backend, false);
    let cut = place.clone();
    killed_at(Point::Permitted, move || open_place(cut, &dirty()).err());
    visit(&place);
    let refused = open_place(place, &dirty()).err();
    assert!(matches!(refused, Some(BackendError::Overwritten { .. })), "{refused:?}");
}

/// librbd's own persistent cache would hold data that no other host has.
pub(super) fn an_image_that_librbd_caches_is_refused(lab: &Lab) {
    let place = place(lab, "cached");
    lab.rbd(&["image-meta", "set", "cached", "conf_rbd_plugins", "parent_cache,pwl_cache"])
        .expect("a setting");
    let refused = open_place(place.clone(), &options()).err().expect("it is refused").to_string();
    assert!(refused.contains("rbd config image remove") && !refused.contains('\n'), "{refused}");
    // Where librbd has no such plugin, `rbd` cannot open the image to remove the setting.
    let site = place.connect().expect("a client");
    let id = site.image_id().expect("an id");
    let header = format!("rbd_header.{id}");
    let key = "metadata_conf_rbd_plugins";
    lab.rados(&["--pool", lab.pool(), "rmomapkey", &header, key]).expect("no setting");
    close(open_place(place, &options()).expect("opened").0, true);
}
