//! The second copy's part in the ownership of a file: which peer the record names, and what follows
//! from that.

use crate::common::{
    Driver, OTHER, OURS, failed, frame, open, options, other_as_peer, ownership, pattern, refused,
    take_over,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tidepool_backend::{
    BackendError, Copies, INFLIGHT_MAX, OpenOptions, OwnerState, Peer, TakeOver, Transfer, recover,
};
use tidepool_engine::api::IoError;
use tidepool_engine::redo::FrameName;
use uuid::Uuid;

const EROFS: Result<(), IoError> = Err(IoError::Errno(libc::EROFS));
const EINVAL: Result<(), IoError> = Err(IoError::Errno(libc::EINVAL));

fn image() -> (TempDir, PathBuf, String) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = dir.path().join("image");
    fs::write(&path, vec![0x11; 4 << 20]).expect("an image");
    let uri = format!("file:{}", path.display());
    (dir, path, uri)
}

fn serve(uri: &str, options: OpenOptions) -> Driver {
    Driver::new(open(uri, options).expect("opened").backend)
}

/// An image whose owner was killed in sync; returns its generation.
fn killed_in_sync(uri: &str) -> u64 {
    let mut driver = serve(uri, options(OURS));
    driver.set_peer(Some(other_as_peer())).expect("named");
    ownership(uri).generation
}

/// Replaces a text in the record.
fn forge(path: &Path, from: &str, to: &str) {
    let record = path.with_extension("tidepool");
    let text = fs::read_to_string(&record).expect("a record");
    assert!(text.contains(from), "{text}");
    fs::write(record, text.replace(from, to)).expect("forged");
}

#[test]
fn a_peer_is_named_and_forgotten_and_the_record_says_so_before_anybody_is_told() {
    let (_dir, path, uri) = image();
    let mut driver = serve(&uri, options(OURS));
    let before = ownership(&uri);
    assert_eq!((before.copies, &before.peer), (Copies::Solo, &None));
    let another = Peer { host: "another.example".into(), ..other_as_peer() };
    for peer in [Some(other_as_peer()), Some(other_as_peer()), Some(another), None, None] {
        assert_eq!(driver.set_peer(peer.clone()), Ok(()));
        let record = ownership(&uri);
        assert_eq!((record.copies == Copies::Sync, &record.peer), (peer.is_some(), &peer));
        assert_eq!(
            (record.generation, record.state, record.base),
            (before.generation, before.state, before.base)
        );
    }
    let text = fs::read(path.with_extension("tidepool")).expect("a record");
    for host in ["a\nb".to_owned(), "x".repeat(20_000)] {
        assert_eq!(driver.set_peer(Some(Peer { host, ..other_as_peer() })), EINVAL);
    }
    let ours = Peer { cache_uuid: Uuid::from_bytes(OURS), ..other_as_peer() };
    assert_eq!(driver.set_peer(Some(ours)), EINVAL);
    assert_eq!(fs::read(path.with_extension("tidepool")).expect("a record"), text);
    driver.close(true).expect("closed");
    let mut reader = serve(&uri, OpenOptions { read_only: true, ..options(OTHER) });
    assert_eq!(reader.set_peer(None), EROFS);
    assert_eq!(reader.set_peer(Some(other_as_peer())), EROFS);
}

#[test]
fn a_peer_is_named_while_a_full_house_of_transfers_is_in_flight_and_the_record_is_given_up() {
    let (_dir, _path, uri) = image();
    let mut driver = serve(&uri, options(OURS));
    let reads: Vec<u64> =
        (0..INFLIGHT_MAX as u64 - 1).map(|at| driver.start_read(at % 1024 * 4096, 4096)).collect();
    let disown = driver.start_other(Transfer::Disown);
    let named = driver.start_set_peer(None);
    assert_eq!((driver.wait(disown).0, driver.wait(named).0), (Ok(()), Ok(())));
    reads.into_iter().for_each(|token| driver.wait(token).0.expect("a read"));
    assert_eq!(driver.set_peer(Some(other_as_peer())), EINVAL, "nothing in its cache counts");
    driver.close(true).expect("closed");

    let mut driver = serve(&uri, options(OURS));
    let named = driver.start_set_peer(Some(other_as_peer()));
    let disown = driver.start_other(Transfer::Disown);
    assert_eq!((driver.wait(named).0, driver.wait(disown).0), (Ok(()), Ok(())));
    let record = ownership(&uri);
    assert_eq!((&record.peer, record.superseded.is_some()), (&None, true));
}

#[test]
fn a_release_forgets_the_peer_unless_data_stays_behind() {
    let (_dir, _path, uri) = image();
    for clean in [true, false] {
        let mut driver = serve(&uri, options(OURS));
        assert_eq!(ownership(&uri).peer, None, "an open begins alone");
        driver.set_peer(Some(other_as_peer())).expect("named");
        driver.close(clean).expect("closed");
        let record = ownership(&uri);
        assert_eq!((record.peer.is_some(), record.state == OwnerState::Clean), (!clean, clean));
    }
    let third = OpenOptions { cache_uuid: [9; 16], ..OpenOptions::default() };
    let line = refused(&uri, third);
    assert!(line.ends_with("or take it over on host peer.example"), "{line}");
}

#[test]
fn a_change_that_cannot_be_written_fails_and_can_be_tried_again() {
    let (_dir, path, uri) = image();
    let mut driver = serve(&uri, options(OURS));
    // The new record cannot be written.
    let blocked = path.with_extension("tidepool.new");
    let block = || {
        fs::remove_file(&blocked).expect("the room for the next record");
        fs::create_dir(&blocked).expect("a directory");
    };
    block();
    assert!(matches!(driver.set_peer(Some(other_as_peer())), Err(IoError::Errno(_))));
    fs::remove_dir(&blocked).expect("removed");
    assert_eq!(ownership(&uri).peer, None);
    driver.set_peer(None).expect("it is written again, since nobody knows");
    driver.set_peer(Some(other_as_peer())).expect("named");
    block();
    assert!(driver.set_peer(None).is_err());
    fs::remove_dir(&blocked).expect("removed");
    driver.close(false).expect("closed");
    assert_eq!(ownership(&uri).peer, Some(other_as_peer()), "what stood there stays");
}

#[test]
fn an_owner_whose_record_was_taken_is_fenced_and_changes_nothing() {
    for (from, to) in [("\"generation\": 1", "\"generation\": 2"), ("07070707", "09090909")] {
        let (_dir, path, uri) = image();
        let mut driver = serve(&uri, options(OURS));
        forge(&path, from, to);
        let text = fs::read(path.with_extension("tidepool")).expect("a record");
        for peer in [None, Some(other_as_peer())] {
            assert_eq!(driver.set_peer(peer), Err(IoError::Fenced));
        }
        assert_eq!(fs::read(path.with_extension("tidepool")).expect("a record"), text);
    }
}

#[test]
fn a_closed_gate_holds_up_a_change_of_the_record_too() {
    let (dir, _path, uri) = image();
    let gate = dir.path().join("gate");
    for emulate in ["", "&emulate=ssd"] {
        let mut driver = serve(&format!("{uri}?gate={}{emulate}", gate.display()), options(OURS));
        fs::write(&gate, "").expect("closed");
        let named = driver.start_set_peer(Some(other_as_peer()));
        let read = driver.start_read(0, 4096);
        for _ in 0..20 {
            driver.poll(5);
        }
        assert!(!driver.finished(named) && !driver.finished(read));
        assert_eq!(ownership(&uri).peer, None);
        fs::remove_file(&gate).expect("opened");
        assert_eq!((driver.wait(named).0, driver.wait(read).0), (Ok(()), Ok(())));
        assert_eq!(ownership(&uri).peer, Some(other_as_peer()));
        driver.start_set_peer(None);
        driver.close(true).expect("closed");
    }
}

#[test]
fn g4_a_peer_takes_over_only_what_the_record_says_is_its_own() {
    let (_dir, path, uri) = image();
    let refused = |generation| {
        let before = fs::read(path.with_extension("tidepool")).ok();
        let error = take_over(&uri, generation).expect_err("another state");
        assert!(
            matches!(error, BackendError::NotPeer { .. }) && !error.to_string().contains('\n'),
            "{error}"
        );
        assert_eq!(fs::read(path.with_extension("tidepool")).ok(), before);
    };
    refused(0);
    let mut driver = serve(&uri, options(OURS));
    driver.set_peer(Some(other_as_peer())).expect("named");
    let locked = take_over(&uri, 1).expect_err("a lock is no fence");
    assert!(
        matches!(locked, BackendError::Locked { .. })
            && locked.to_string().contains("stop that first")
    );
    driver.set_peer(None).expect("forgotten");
    drop(driver);
    refused(1);
    let generation = killed_in_sync(&uri);
    refused(generation - 1);
    refused(generation + 1);
    forge(&path, &tidepool_backend::boot_id(), "another-boot");
    refused(generation);
    let how =
        TakeOver { cache_uuid: [9; 16], generation, accept_loss: true, ..TakeOver::default() };
    let parsed = uri.parse().expect("a URI");
    let third = tidepool_backend::take_over(&parsed, &how).expect_err("another cache");
    assert!(matches!(third, BackendError::NotPeer { .. }), "{third}");
    let taken = tidepool_backend::take_over(&parsed, &TakeOver { cache_uuid: OTHER, ..how })
        .expect("accepted");
    assert_eq!(taken, ownership(&uri));
    assert_eq!((taken.generation, taken.cache_uuid.as_bytes()), (generation + 1, &OTHER));
    refused(generation);
    refused(generation + 1);
}

#[test]
fn what_was_taken_over_is_opened_as_it_was_however_often_that_is_cut_short() {
    let (_dir, path, uri) = image();
    let generation = killed_in_sync(&uri);
    take_over(&uri, generation).expect("taken over");
    let knows = |known| OpenOptions {
        generation: Some(known),
        dirty: true,
        sequence: Some(7),
        ..options(OTHER)
    };
    assert!(
        refused(&uri, OpenOptions { dirty: true, ..options(OURS) })
            .contains("owned by another cache")
    );
    for forgotten in [0, generation - 1] {
        assert!(refused(&uri, knows(forgotten)).contains("has lost data"), "{forgotten}");
    }
    // Also after a restart of its host: its log was on stable media before.
    forge(&path, &tidepool_backend::boot_id(), "another-boot");
    let opened = open(&uri, knows(generation)).expect("opened");
    assert!(opened.keep_clean && opened.generation == generation + 2, "{}", opened.reason);
    let record = ownership(&uri);
    assert_eq!((record.base, &record.taken_from, record.version), (Some(generation), &None, 1));
    drop(opened);
    let opened = open(&uri, knows(generation)).expect("its device has not come to know it");
    assert!(!opened.keep_clean && opened.generation == generation + 3, "{}", opened.reason);
    drop(opened);
    Driver::new(open(&uri, knows(generation + 3)).expect("opened").backend)
        .close(true)
        .expect("closed");
    assert!(ownership(&uri).former.is_empty());
}

#[test]
fn what_a_stopped_owner_left_is_taken_over_unless_somebody_has_written_since() {
    for written in [false, true] {
        let (_dir, path, uri) = image();
        let mut driver = serve(&uri, options(OURS));
        driver.set_peer(Some(other_as_peer())).expect("named");
        driver.close(false).expect("stopped");
        let generation = ownership(&uri).generation;
        if written {
            fs::write(&path, vec![0x22; 4 << 20]).expect("somebody else");
        }
        take_over(&uri, generation).expect("taken over");
        let options = OpenOptions { generation: Some(generation), dirty: true, ..options(OTHER) };
        match written {
            true => assert!(refused(&uri, options).contains("must not be written over it")),
            false => assert!(open(&uri, options).expect("opened").keep_clean),
        }
    }
}

/// Writes and commits a group of one frame at block 100.
fn commit(driver: &mut Driver, uuid: [u8; 16], generation: u64, content: &[u8]) {
    let name = FrameName { uuid, generation, group: 1, frame: 0 };
    let token = driver.start_frame(1, 0, &frame(name, 100, content, None));
    driver.wait(token).0.expect("a frame");
    let age = Duration::from_millis(300);
    driver
        .other(Transfer::RedoCommit { first: 1, group: 1, frames: 1, sequence: 10, age })
        .expect("committed");
}

#[test]
fn g5_the_former_owners_redo_counts_until_the_peer_has_one_of_its_own() {
    let (dir, path, uri) = image();
    let grouped = |uuid| OpenOptions { grouped: true, ..options(uuid) };
    let (old, new) = (pattern(1, 32 << 10), pattern(2, 32 << 10));
    let mut driver = serve(&uri, grouped(OURS));
    let generation = ownership(&uri).generation;
    commit(&mut driver, OURS, generation, &old);
    // The owner's own log may have more on stable media than what both caches have.
    let note = Transfer::RedoNote { sequence: 20, durable: 18, bytes: 4096, bytes_max: 1 << 20 };
    driver.other(note).expect("noted");
    driver.set_peer(Some(other_as_peer())).expect("named");
    drop(driver);
    take_over(&uri, generation).expect("taken over");
    let by_peer = |sequence| OpenOptions {
        dirty: true,
        sequence: Some(sequence),
        generation: Some(generation),
        ..grouped(OTHER)
    };
    let line = refused(&uri, by_peer(9));
    assert!(line.contains("record is 9") && line.contains("record 10"), "{line}");
    let recovered =
        |look_only| recover(&uri.parse().expect("a URI"), None, look_only).expect("recovered");
    let look = recovered(true);
    assert_eq!(
        (look.exact, look.groups),
        (true, 1),
        "lost with the peer before it has opened the image"
    );
    drop(serve(&uri, by_peer(12)));
    assert_eq!(recovered(true).groups, 1, "and after that");
    let mut driver = serve(&uri, by_peer(12));
    let second = ownership(&uri).generation;
    commit(&mut driver, OTHER, second, &new);
    drop(driver);
    let frames = || {
        let names = fs::read_dir(dir.path())
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name());
        let is_frame = |name: &str| name.contains("-redo.") && !name.ends_with(".new");
        names.filter(|name| is_frame(&name.to_string_lossy())).count()
    };
    assert_eq!(frames(), 1, "the former one is gone");
    assert!(recovered(false).exact);
    assert!(fs::read(&path).expect("an image")[100 * 4096..][..32 << 10] == new);
    assert_eq!(frames(), 0);
}

#[test]
fn g5_an_image_whose_two_caches_are_lost_is_brought_to_the_former_owners_newest_group() {
    let (_dir, path, uri) = image();
    let content = pattern(1, 32 << 10);
    let mut driver = serve(&uri, OpenOptions { grouped: true, ..options(OURS) });
    commit(&mut driver, OURS, 1, &content);
    driver.set_peer(Some(other_as_peer())).expect("named");
    drop(driver);
    take_over(&uri, 1).expect("taken over");
    let done = recover(&uri.parse().expect("a URI"), None, false).expect("recovered");
    assert_eq!((done.exact, done.groups), (true, 1));
    assert!(fs::read(&path).expect("an image")[100 * 4096..][..32 << 10] == content);
    serve(&uri, options([9; 16])).close(true).expect("anybody may have it");
}

#[test]
fn g1_an_owner_in_sync_comes_back_on_the_same_boot_and_asks_its_peer_on_another() {
    let (_dir, path, uri) = image();
    let again = |whole_as_of| OpenOptions { whole_as_of, dirty: true, ..options(OURS) };
    killed_in_sync(&uri);
    let mut driver = serve(&uri, again(None));
    driver.set_peer(Some(other_as_peer())).expect("named");
    drop(driver);
    let generation = ownership(&uri).generation;
    // The peer's boot id stays as it is.
    let boot = format!("\"boot_id\": \"{}\",\n  \"time", tidepool_backend::boot_id());
    forge(&path, &boot, "\"boot_id\": \"another\",\n  \"time");
    let before = fs::read(path.with_extension("tidepool")).expect("a record");
    for whole_as_of in [None, Some(generation - 1), Some(generation + 1)] {
        let line = refused(&uri, again(whole_as_of));
        assert!(
            line.contains("this host was restarted while host peer.example held the other copy"),
            "{line}"
        );
        let report = crate::common::check(&uri, &again(whole_as_of));
        assert!(failed(&report, "ownership").contains("take the volume over there"), "{report:?}");
    }
    assert!(matches!(open(&uri, again(None)), Err(BackendError::PeerFirst { .. })));
    assert!(
        refused(&uri, OpenOptions { read_only: true, ..options(OURS) }).contains("peer.example")
    );
    assert_eq!(
        fs::read(path.with_extension("tidepool")).expect("a record"),
        before,
        "nothing is changed"
    );
    serve(&uri, again(Some(generation))).close(true).expect("its peer was asked");
    assert_eq!(ownership(&uri).peer, None);
}

#[test]
fn g4_an_owner_whose_device_has_failed_asks_its_peer_on_the_same_boot_too() {
    let (_dir, _path, uri) = image();
    let again = |whole_as_of| OpenOptions { whole_as_of, dirty: true, ..options(OURS) };
    let mut driver = serve(&uri, options(OURS));
    driver.set_peer(Some(other_as_peer())).expect("named");
    let only = Peer { only: true, ..other_as_peer() };
    driver.set_peer(Some(only.clone())).expect("conceded");
    drop(driver);
    let found = ownership(&uri);
    assert_eq!((found.copies, found.peer), (Copies::Sync, Some(only)));
    assert!(matches!(open(&uri, again(None)), Err(BackendError::PeerFirst { .. })));
    assert_eq!(ownership(&uri).generation, found.generation, "nothing is changed");
    serve(&uri, again(Some(found.generation))).close(true).expect("its peer was asked");
}
