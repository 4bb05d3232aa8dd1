//! What a record contains.

use super::clients::FENCED_MAX;
use super::*;
use crate::redo::{self, Header, Note};
use proptest::prelude::*;

pub(crate) fn record(state: OwnerState) -> Ownership {
    Ownership::new(7, Uuid::from_bytes([3; 16]), state)
}

#[test]
fn a_record_is_read_back_as_written() {
    let mut record = record(OwnerState::Dirty);
    record.stamp = Some(ImageStamp::File {
        size_bytes: 1 << 40,
        inode: 7,
        mtime_ns: 1_700_000_000_000_000_001,
    });
    record.clients.owner = Some("10.0.0.1:0/77".into());
    assert_eq!(Ownership::from_json("x", &record.to_json()).expect("own record"), record);
    record.stamp = Some(ImageStamp::Header { version: 9 });
    assert_eq!(Ownership::from_json("x", &record.to_json()).expect("own record"), record);
}

#[test]
fn a_record_with_a_generation_that_cannot_be_is_refused() {
    let of = |generation| Ownership { generation, ..record(OwnerState::Open) }.to_json();
    assert!(Ownership::from_json("i", &of(u64::MAX - 1)).is_ok());
    let told = Ownership::from_json("i", &of(u64::MAX)).expect_err("refused").to_string();
    assert!(told.contains("a generation that no cache has come to"), "{told}");
}

#[test]
fn a_record_of_a_later_format_is_refused() {
    let text = String::from_utf8(record(OwnerState::Clean).to_json()).expect("JSON");
    let text = text.replace("\"version\": 1", "\"version\": 4");
    let error = Ownership::from_json("img", text.as_bytes()).expect_err("version 4");
    assert!(matches!(error, BackendError::Newer { version: 4, known: VERSION, .. }), "{error}");
    assert!(error.to_string().starts_with("img: the ownership record has version 4, "), "{error}");
    let text = text.replace("\"version\": 4", "\"version\": 0");
    assert!(Ownership::from_json("img", text.as_bytes()).is_err(), "there is no version 0");
}

/// Reads a document of an earlier version and writes it again: everything in it must still be
/// there.
fn read_again<T: DeserializeOwned + Serialize>(name: &str, bytes: &[u8], known: u32) {
    let document: T = parse(name, bytes, known).unwrap_or_else(|e| panic!("{e}"));
    let again = serde_json::to_value(document).expect("plain fields");
    let golden: serde_json::Value = serde_json::from_slice(bytes).expect("JSON");
    for (field, value) in
        golden.as_object().expect("an object").iter().filter(|(f, _)| *f != "version")
    {
        // Version 1 had room for a name there, which no release has written.
        if field != "peer" || !value.is_string() {
            assert_eq!(again.get(field), Some(value), "{name}: {field}");
        }
    }
}

#[test]
fn documents_of_every_version_are_read() {
    for version in 1..=VERSION.max(redo::VERSION) {
        let directory = format!("{}/tests/golden/v{version}", env!("CARGO_MANIFEST_DIR"));
        let entries = std::fs::read_dir(&directory).expect("golden documents of every version");
        let mut kinds = [0; 3];
        for path in entries.map(|entry| entry.expect("an entry").path()) {
            let bytes = std::fs::read(&path).expect("a document");
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            match name.split('-').next() {
                Some("record") => {
                    read_again::<Ownership>(&name, &bytes, VERSION);
                    let record =
                        Ownership::from_json(&name, &bytes).unwrap_or_else(|e| panic!("{e}"));
                    let again: Ownership =
                        Ownership::from_json(&name, &record.to_json()).expect("its own");
                    assert_eq!(
                        (record.version, &again),
                        (version, &record),
                        "it is written as it was read"
                    );
                }
                Some("redo") => read_again::<Header>(&name, &bytes, redo::VERSION),
                Some("note") => read_again::<Note>(&name, &bytes, redo::VERSION),
                _ => panic!("nobody knows what {name} is"),
            }
            let kind = ["record", "redo", "note"].iter().position(|kind| name.starts_with(kind));
            kinds[kind.expect("matched above")] += 1;
        }
        let newest = [VERSION, redo::VERSION, redo::VERSION];
        let missing = kinds.iter().zip(newest).any(|(&n, newest)| n == 0 && version <= newest);
        assert!(!missing, "golden documents of version {version}: {kinds:?}");
    }
}

#[test]
fn a_record_is_written_byte_by_byte_as_it_was_read() {
    for name in [
        "v1/record-rbd-open",
        "v2/record-rbd-sync",
        "v2/record-rbd-taken-over",
        "v3/record-rbd-rolling-back",
    ] {
        let path = format!("{}/tests/golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let golden = std::fs::read_to_string(path).expect("a document");
        let record =
            Ownership::from_json(name, golden.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(String::from_utf8(record.to_json()).expect("JSON"), golden, "{name}");
    }
}

#[test]
fn a_record_of_a_rollback_is_one_that_older_releases_refuse() {
    let begun = record(OwnerState::Open).rolling_back("then");
    let read = Ownership::from_json("x", &begun.to_json()).expect("own record");
    assert_eq!((read.version, read.rollback.as_deref()), (3, Some("then")));
    // No change of the record on the way to the next attempt removes the mark.
    for kept in [read.renewed(), read.with_peer(None), read.disowned()] {
        assert_eq!((kept.version, kept.rollback.as_deref()), (3, Some("then")), "{kept:?}");
    }
    let reader = OpenOptions { cache_uuid: [3; 16], ..OpenOptions::default() };
    let refused = read.check_rolled_back("img", &reader).expect_err("half rolled back").to_string();
    assert!(
        refused.contains("snapshot then was cut short") && !refused.contains('\n'),
        "{refused}"
    );
    let again = OpenOptions { roll_back: Some("other".into()), ..reader.clone() };
    assert!(read.check_rolled_back("img", &again).is_ok(), "any snapshot makes it whole");
    let known = Continuity::of_record(Some(&read), Uuid::from_bytes([3; 16]))
        .expect("what is cached is of before");
    assert!(known.overwritten, "{}", known.reason);
    let done = read.rolled_back();
    assert_eq!((done.version, &done.rollback, &done.superseded), (1, &None, &None));
    assert!(done.check_rolled_back("img", &reader).is_ok());
    for (name, fits) in
        [("then", true), ("a\nb", false), (&*"x".repeat(255), true), (&*"x".repeat(256), false)]
    {
        assert_eq!(Ownership::can_name(name), fits, "{name:?}");
    }
}

#[test]
fn what_a_record_says_is_one_line() {
    let text = String::from_utf8(record(OwnerState::Dirty).to_json()).expect("JSON");
    let host = format!("\"host\": \"{}\"", host_name());
    assert!(text.contains(&host), "{text}");
    let owner = Uuid::from_bytes([3; 16]).to_string();
    for foreign in [text.replace(&host, "\"host\": \"a\\nb\""), text.replace(&owner, "\\n\\u001b")]
    {
        let line =
            Ownership::from_json("img", foreign.as_bytes()).expect_err("not ours").to_string();
        assert!(!line.contains(char::is_control), "{line:?}");
    }
    assert_eq!(printable("a\nb\u{1b}ä"), "a?b?ä");
}

pub(crate) const OWNER: [u8; 16] = [3; 16];
pub(crate) const PEER: [u8; 16] = [4; 16];

fn peer() -> Peer {
    Peer {
        cache_uuid: Uuid::from_bytes(PEER),
        boot_id: boot_id(),
        host: "elsewhere".into(),
        only: false,
    }
}

pub(crate) fn paired() -> Ownership {
    let claims = vec!["10.0.0.1:0/78".into()];
    let owner = Some("10.0.0.1:0/77".into());
    let clients = Clients { owner, claims, lifted: Some(9), ..Clients::default() };
    Ownership { clients, ..record(OwnerState::Open) }.with_peer(Some(peer()))
}

fn by_peer() -> TakeOver {
    TakeOver { cache_uuid: PEER, generation: 7, ..TakeOver::default() }
}

#[test]
fn only_a_record_that_concerns_a_second_copy_is_of_the_newer_version() {
    let version = |record: &Ownership| {
        let written: serde_json::Value = serde_json::from_slice(&record.to_json()).expect("JSON");
        let read = Ownership::from_json("x", &record.to_json()).expect("own record");
        assert_eq!(read, Ownership { version: read.version, ..record.clone() });
        assert_eq!(
            (read.copies == Copies::Sync, written["version"].as_u64()),
            (read.peer.is_some(), Some(read.version.into()))
        );
        read.version
    };
    let paired = paired();
    let taken = paired.taken_over("x", &by_peer()).expect("its peer");
    assert_eq!((version(&record(OwnerState::Open)), version(&paired), version(&taken)), (1, 2, 2));
    let options = OpenOptions { cache_uuid: PEER, ..OpenOptions::default() };
    assert_eq!(version(&Ownership::taken(Some(&taken), &options)), 1);
    assert_eq!(version(&paired.with_peer(None)), 1);
    assert_eq!(version(&paired.disowned()), 1);
    let released = |clean| paired.released(Release { clean, cache_failed: false }, None);
    assert_eq!((version(&released(true)), released(true).peer), (1, None));
    assert_eq!(
        (version(&released(false)), released(false).peer),
        (2, Some(peer())),
        "its cache and that one have it"
    );
}

#[test]
fn a_peer_is_told_in_one_line_or_not_at_all() {
    let text = String::from_utf8(paired().to_json()).expect("JSON");
    let read = |text: &str| Ownership::from_json("x", text.as_bytes());
    assert!(read(&text).is_ok());
    let foreign = [
        text.replace("elsewhere", "else\\nwhere"),
        text.replace("\"sync\"", "\"solo\""),
        text.replace("\"peer\"", "\"pear\""),
        text.replace("\"host\": \"elsewhere\"", "\"x\": 1"),
    ];
    for foreign in foreign {
        let line = read(&foreign).expect_err("not ours").to_string();
        assert!(!line.contains(char::is_control), "{line:?}");
    }
    assert_eq!(read(&text.replace("\"version\": 2", "\"version\": 1")).expect("read").peer, None);
    let unsound = [
        Peer { host: "a\nb".into(), ..peer() },
        Peer { boot_id: "x".repeat(300), ..peer() },
        Peer { cache_uuid: Uuid::nil(), ..peer() },
        Peer { cache_uuid: Uuid::from_bytes(OWNER), ..peer() },
    ];
    for peer in unsound {
        let refused = paired().check_peer("x", Some(&peer)).expect_err("unsound").errno();
        assert_eq!(refused, tidepool_engine::api::IoError::Errno(libc::EINVAL));
    }
    assert!(
        paired().disowned().check_peer("x", Some(&peer())).is_err(),
        "its cache counts for nothing"
    );
    assert!(
        paired().check_peer("x", Some(&peer())).is_ok() && paired().check_peer("x", None).is_ok()
    );
    let line =
        paired().check_owner("x", Uuid::from_bytes([5; 16])).expect_err("not ours").to_string();
    assert!(line.ends_with("remove the volume, or take it over on host elsewhere"), "{line}");
}

#[test]
fn an_image_is_taken_over_from_exactly_one_state() {
    let paired = paired();
    let taken = paired.taken_over("x", &by_peer()).expect("its peer");
    assert_eq!(
        (taken.generation, taken.base, taken.state, taken.copies),
        (8, Some(7), OwnerState::Open, Copies::Solo)
    );
    assert_eq!(
        (taken.cache_uuid.as_bytes(), &taken.peer, &taken.taken_from),
        (&PEER, &None, &Some(host_name()))
    );
    assert_eq!((&taken.clients, taken.clients.lifted), (&paired.clients, Some(9)));
    assert!(
        taken.owns_redo_of(Uuid::from_bytes(OWNER)) && taken.owns_redo_of(Uuid::from_bytes(PEER))
    );
    let refused = |record: &Ownership, how: TakeOver| {
        let error = record.taken_over("x", &how).expect_err("another state");
        assert!(matches!(error, BackendError::NotPeer { .. }), "{error}");
    };
    for generation in [6, 8] {
        refused(&paired, TakeOver { generation, accept_loss: true, ..by_peer() });
    }
    refused(&paired, TakeOver { cache_uuid: [5; 16], accept_loss: true, ..by_peer() });
    refused(&paired.with_peer(None), TakeOver { accept_loss: true, ..by_peer() });
    refused(&taken, TakeOver { generation: 8, accept_loss: true, ..by_peer() });
    for boot_id in ["another", ""] {
        let restarted = paired.with_peer(Some(Peer { boot_id: boot_id.into(), ..peer() }));
        refused(&restarted, by_peer());
        let accepted = TakeOver { accept_loss: true, ..by_peer() };
        assert_eq!(
            restarted.taken_over("x", &accepted).expect("the loss is accepted").generation,
            8
        );
    }
    // There and back, a second time: each former owner is listed once.
    let open = OpenOptions { cache_uuid: PEER, generation: Some(7), ..OpenOptions::default() };
    let opened = Ownership::taken(Some(&taken), &open);
    assert_eq!((opened.generation, opened.base, &opened.taken_from), (9, Some(7), &None));
    assert!(opened.owns_redo_of(Uuid::from_bytes(OWNER)));
    let back = opened.with_peer(Some(Peer { cache_uuid: Uuid::from_bytes(OWNER), ..peer() }));
    let back = back
        .taken_over("x", &TakeOver { cache_uuid: OWNER, generation: 9, ..by_peer() })
        .expect("its peer");
    assert_eq!(back.former, [Uuid::from_bytes(PEER)]);
    assert!(opened.released(Release { clean: true, cache_failed: false }, None).former.is_empty());
}

#[test]
fn what_was_taken_over_is_what_the_peer_knew() {
    let taken = paired().taken_over("x", &by_peer()).expect("its peer");
    let knows = |generation| OpenOptions {
        cache_uuid: PEER,
        generation,
        dirty: true,
        ..OpenOptions::default()
    };
    for (known, fits) in
        [(Some(7), true), (Some(8), true), (None, true), (Some(6), false), (Some(0), false)]
    {
        assert_eq!(taken.check_known("x", &knows(known)).is_ok(), fits, "{known:?}");
        let proven = Continuity::proven("").of_generation(Some(&taken), &knows(known)).proven;
        assert_eq!(proven, fits, "{known:?}");
    }
}

fn fenced(number: u64, until_unix_s: u64) -> Fenced {
    let host = format!("host{number}");
    Fenced { address: format!("10.0.0.1:0/{number}"), host, boot_id: "a boot".into(), until_unix_s }
}

/// A record that lists these fences.
fn listing(fenced: Vec<Fenced>) -> Ownership {
    let clients = Clients { fenced, ..Clients::default() };
    Ownership { clients, ..record(OwnerState::Open) }
}

#[test]
fn fences_are_listed_until_they_fall() {
    let later = unix_s() + 1000;
    let list = |numbers: std::ops::Range<u64>| -> Vec<Fenced> {
        numbers.map(|number| fenced(number, later + number)).collect()
    };
    let record = record(OwnerState::Open).with_fences(&list(1..4));
    assert_eq!(record.clients.fenced, list(1..4));
    assert_eq!(record.version, VERSION_ALONE, "an older release may ignore them");
    // Ceph does not prolong a fence. Its host may become known later.
    let unknown = Fenced { host: String::new(), boot_id: String::new(), ..fenced(9, later) };
    let again = record.clone().with_fences(&[fenced(2, later + 500), unknown]);
    assert_eq!(again.clients.fenced[1..], list(1..4)[..]);
    assert_eq!(
        again.clone().with_fences(&[fenced(9, later + 500)]).clients.fenced[0],
        fenced(9, later)
    );
    let fallen = listing(vec![fenced(1, 5), fenced(2, later)]);
    assert_eq!(fallen.clients.standing_fences().count(), 1);
    assert_eq!(fallen.with_fences(&[]).clients.fenced, [fenced(2, later)]);
    // The fences that expire first make room.
    assert_eq!(record.clone().with_fences(&list(1..20)).clients.fenced, list(4..20));
    assert_eq!(record.clone().without_fences(&list(1..3), &list(2..3)).clients.fenced, list(2..4));

    let how = Release { clean: true, cache_failed: false };
    let by = |cache_uuid| OpenOptions { cache_uuid, ..OpenOptions::default() };
    let next = [
        Ownership::taken(Some(&record), &by([3; 16])),
        Ownership::taken(Some(&record), &by([4; 16])),
        record.released(how, None),
        record.abandoned(),
        record.disowned(),
        record.with_peer(None),
        Ownership::from_json("x", &record.to_json()).expect("own record"),
    ];
    assert!(next.iter().all(|next| next.clients.fenced == record.clients.fenced), "{next:?}");
    let taken =
        paired().with_fences(&record.clients.fenced).taken_over("x", &by_peer()).expect("its peer");
    assert_eq!(taken.clients.fenced, record.clients.fenced);
}

#[test]
fn what_a_record_says_of_fences_is_bounded_and_may_be_missing() {
    let later = unix_s() + 1000;
    let many: Vec<Fenced> = (0..40).map(|number| fenced(number, later)).collect();
    let forged = listing(many);
    assert_eq!(
        Ownership::from_json("x", &forged.to_json()).expect("cut").clients.fenced.len(),
        FENCED_MAX
    );
    for text in ["a\nb", "\u{7f}", "\0"] {
        for change in [0, 1, 2] {
            let mut one = fenced(1, later);
            *[&mut one.address, &mut one.host, &mut one.boot_id][change] = text.into();
            let forged = listing(vec![one]);
            assert!(Ownership::from_json("x", &forged.to_json()).is_err(), "{text:?}");
        }
    }
    let plain = record(OwnerState::Open);
    let text = String::from_utf8(plain.to_json()).expect("JSON");
    assert!(!text.contains("fenced"), "{text}");
    let newer = text.replacen('{', "{\"of_a_later_release\": [1],", 1);
    assert_eq!(Ownership::from_json("x", newer.as_bytes()).expect("an unknown field"), plain);
    // The largest record that we write fits.
    let (long, boot_id) = ("h".repeat(64), "b".repeat(36));
    let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:0/4294967295".to_owned();
    let of = |number| Fenced {
        address: format!("{address}{number}"),
        host: long.clone(),
        boot_id: boot_id.clone(),
        until_unix_s: u64::MAX,
    };
    let largest = Ownership {
        clients: Clients {
            owner: Some(address.clone()),
            claims: vec![address.clone(); CLAIMS_MAX],
            fenced: (0..FENCED_MAX).map(of).collect(),
            lifted: None,
        },
        former: vec![Uuid::max(); FORMER_MAX],
        rollback: Some("s".repeat(ROLLBACK_BYTES_MAX)),
        ..plain
    };
    assert!(largest.to_json().len() < RECORD_BYTES_MAX / 2, "{}", largest.to_json().len());
}

#[test]
fn a_former_boot_is_one_of_this_host_that_is_over() {
    let of = |host: &str, boot_id: &str| {
        Fenced { host: host.into(), boot_id: boot_id.into(), ..fenced(1, 0) }.is_of_former_boot()
    };
    assert!(of(&host_name(), "another"));
    assert!(!of(&host_name(), &boot_id()) && !of(&host_name(), ""));
    assert!(!of("elsewhere", "another") && !of("", "another"));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Ownership::from_json("x", &bytes).is_err());
    }
}
