//! Who owns an export, and what its record says.

use super::server::Scratch;
use crate::common::{
    Driver, OTHER, OURS, a_forgetful_cache_is_refused, check, failed, open, other_as_peer, refused,
};
use tidepool_backend::{BackendError, BackendUri, INFLIGHT_MAX, OpenOptions, TakeOver, Transfer};
use tidepool_engine::api::IoError;

#[test]
fn one_cache_of_the_host_owns_an_export() {
    let scratch = Scratch::new();
    let _server = scratch.filtered(&[], &[]);
    let report = check(&scratch.uri(), &scratch.options(OURS));
    assert!(report.usable && !scratch.0.join("state").exists(), "{report:?}");
    let driver = scratch.open();
    // The same export under another name.
    let link = scratch.0.join("link");
    std::os::unix::fs::symlink(scratch.socket(), &link).expect("a link");
    let linked = format!("nbd+unix:///?socket={}", link.display());
    for uri in [scratch.uri(), linked.clone()] {
        let line = refused(&uri, scratch.options(OTHER));
        assert!(
            line.contains("in use") && line.contains(&std::process::id().to_string()),
            "{line}"
        );
        assert!(failed(&check(&uri, &scratch.options(OURS)), "lock").contains("in use"));
    }
    driver.close(false).expect("closed");
    assert!(refused(&linked, scratch.options(OTHER)).contains("owned by another cache"));
    let again = open(&scratch.uri(), scratch.options(OURS)).expect("opened");
    assert_eq!((again.generation, again.keep_clean), (2, false), "{}", again.reason);
    // As after a kill: the record stays as it is, and dirty data may be drained.
    drop(again.backend);
    let dirty = OpenOptions { dirty: true, ..scratch.options(OURS) };
    let again = open(&scratch.uri(), dirty.clone()).expect("opened");
    assert_eq!((again.generation, again.keep_clean), (3, false), "{}", again.reason);
    Driver::new(again.backend).close(true).expect("closed");
    // Since the release any client could have written, and dirty data would overwrite that.
    let line = refused(&scratch.uri(), dirty);
    assert!(line.contains("must not be written over it"), "{line}");
    let other = open(&scratch.uri(), scratch.options(OTHER)).expect("opened");
    assert_eq!((other.generation, other.keep_clean), (4, false), "{}", other.reason);
}

#[test]
fn g1_a_cache_that_has_forgotten_an_attachment_is_refused() {
    let scratch = Scratch::new();
    let _server = scratch.filtered(&[], &[]);
    a_forgetful_cache_is_refused(&scratch.uri(), &scratch.options(OURS));
}

#[test]
fn what_a_lost_cache_holds_can_be_given_up_without_its_server() {
    let scratch = Scratch::new();
    let uri: BackendUri = scratch.uri().parse().expect("a URI");
    let state = scratch.0.join("state");
    let abandon = || tidepool_backend::abandon(&uri, Some(&state));
    let server = scratch.filtered(&[], &[]);
    let driver = scratch.open();
    assert!(abandon().expect_err("the owner is there").to_string().contains("in use"));
    driver.close(false).expect("closed");
    drop(server);
    let given_up = abandon().expect("given up").expect("a record");
    assert_eq!((given_up.generation, *given_up.cache_uuid.as_bytes()), (1, OURS));
    assert_eq!(abandon().expect("nothing to give up"), None);
    let _server = scratch.filtered(&[], &[]);
    assert!(open(&scratch.uri(), scratch.options(OTHER)).is_ok());
}

#[test]
fn a_peer_is_named_and_takes_the_export_over_when_its_owner_is_gone() {
    let scratch = Scratch::new();
    let uri: BackendUri = scratch.uri().parse().expect("a URI");
    let state = scratch.0.join("state");
    let record =
        || tidepool_backend::ownership(&uri, Some(&state)).expect("readable").expect("a record");
    let how = |generation| TakeOver {
        cache_uuid: OTHER,
        generation,
        state_dir: Some(state.clone()),
        accept_loss: false,
    };
    let take_over = |generation| tidepool_backend::take_over(&uri, &how(generation));
    let server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    // A peer is named beside as many transfers as there may be, and without the server.
    let reads: Vec<u64> =
        (0..INFLIGHT_MAX as u64).map(|at| driver.start_read(at * 4096, 4096)).collect();
    for peer in [Some(other_as_peer()), Some(other_as_peer()), None, Some(other_as_peer())] {
        driver.set_peer(peer.clone()).expect("named");
        assert_eq!(record().peer, peer);
    }
    reads.into_iter().for_each(|token| driver.wait(token).0.expect("a read"));
    drop(server);
    driver.set_peer(None).expect("nothing of it needs the server");
    driver.set_peer(Some(other_as_peer())).expect("named");
    assert!(matches!(take_over(1), Err(BackendError::Locked { .. })));
    let _server = scratch.filtered(&[], &[]);
    driver.close(false).expect("closed");
    assert!(matches!(take_over(2), Err(BackendError::NotPeer { .. })));
    take_over(1).expect("taken over");
    let dirty = OpenOptions { dirty: true, generation: Some(1), ..scratch.options(OTHER) };
    let opened = open(&scratch.uri(), dirty).expect("opened");
    assert_eq!((opened.generation, opened.keep_clean), (3, false), "{}", opened.reason);
    drop(opened);
    let mut reader = Driver::new(
        open(&scratch.uri(), OpenOptions { read_only: true, ..scratch.options(OTHER) })
            .expect("opened")
            .backend,
    );
    assert_eq!(reader.set_peer(None), Err(IoError::Errno(libc::EROFS)));
}

#[test]
fn an_export_that_goes_on_without_its_cache_says_so() {
    let scratch = Scratch::new();
    let server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    // This does not need the server.
    drop(server);
    driver.other(Transfer::Disown).expect("disowned");
    driver.other(Transfer::Disown).expect("once is enough");
    let _server = scratch.filtered(&[], &[]);
    driver.close_without_cache(true).expect("closed");
    let dirty = OpenOptions { dirty: true, ..scratch.options(OURS) };
    assert!(refused(&scratch.uri(), dirty).contains("must not be written over it"));
}
