//! Who is fenced, and who is not: what others have written into record and lock.

use super::peer::{by_peer, forge, in_sync, take_over, uri};
use super::*;
use crate::check::CheckStatus;
use crate::record::host_name;

/// What fences more than one client, another one than it seems to, or nobody. The last one is well formed but for its port.
const UNFIT: [&str; 7] = [
    "127.0.0.1:0/0",
    "v1:127.0.0.1:0/0",
    "127.0.0.1:0/4294967296",
    "127.0.0.0/24",
    "127.0.0.1",
    "[v2:127.0.0.1:0/4243,v1:127.0.0.9:0/4244]",
    "127.0.0.1:6800/4242",
];

fn client_of(backend: &RbdBackend) -> String {
    backend.held.as_ref().expect("held").claim.address.clone()
}

/// Everybody who is fenced, and until when.
fn blocklist(lab: &Lab) -> Vec<(String, String)> {
    let text = lab.ceph(&["osd", "blocklist", "ls", "--format", "json"]).expect("the blocklist");
    // Ceph writes a second list, of ranges, behind the first.
    let lists = serde_json::Deserializer::from_str(&text).into_iter::<Vec<serde_json::Value>>();
    let list = lists.flat_map(|list| list.expect("a list in JSON"));
    let text = |entry: &serde_json::Value, key| entry[key].as_str().expect("a text").to_owned();
    list.map(|entry| (text(&entry, "addr"), text(&entry, "until"))).collect()
}

/// When the fence of a client falls, in a text that can be compared; `None` if there is none.
fn fenced_until(lab: &Lab, client: &str) -> Option<String> {
    blocklist(lab).into_iter().find(|(address, _)| address::same(address, client)).map(|(_, until)| until)
}

/// Nothing but single clients is fenced, and none of those that are named by what is unfit.
fn nothing_else_is_fenced(lab: &Lab) {
    for (address, _) in blocklist(lab) {
        // Daemons may be there too: Ceph fences its own.
        let client = address::Client::of(&address);
        assert!(client.is_ok(), "{address}: {client:?}");
        let named = ["/24", "/4242", "/4243", "/4244"].iter().any(|end| address.ends_with(end));
        assert!(!named, "{address}");
    }
}

fn with_unfit_claims(record: Ownership) -> Ownership {
    let claims = record.claims.into_iter().chain(UNFIT.map(str::to_owned)).collect();
    Ownership { claims, ..record }
}

/// Whoever can write to the pool can write the record.
pub(super) fn a_record_that_names_more_than_clients_fences_the_real_owner_alone(lab: &Lab) {
    let place = place(lab, "forged-claims");
    // Back after a kill.
    let (mut old, ..) = open_place(place.clone(), &options()).expect("opened");
    forge(&place, with_unfit_claims);
    let report = crate::check(&uri(lab, &place), &options());
    let told =
        report.items.iter().filter(|item| item.name == "claims" && item.status == CheckStatus::Warning);
    assert!(report.usable && told.count() == UNFIT.len(), "{report:?}");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!((write(&mut old, 2).0, write(&mut backend, 3).0), (Err(IoError::Fenced), Ok(())));
    drop(old);
    close(backend, true);

    // Taken over.
    let (mut old, generation) = in_sync(&place);
    forge(&place, with_unfit_claims);
    let taken = take_over(&place, generation, false).expect("taken over");
    assert_eq!(taken.claims, Vec::<String>::new());
    forge(&place, with_unfit_claims);
    let (mut backend, ..) = open_place(place.clone(), &by_peer(generation)).expect("opened");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!((write(&mut old, 2).0, write(&mut backend, 3).0), (Err(IoError::Fenced), Ok(())));
    drop(old);
    close(backend, false);

    // Given up.
    killed_open_by_other(&place);
    let claims = record(&place).claims;
    assert_eq!(claims.len(), 1);
    bury(&place);
    lab.ceph(&["osd", "blocklist", "rm", &claims[0]]).expect("fenced no more");
    forge(&place, with_unfit_claims);
    let (cluster, pool) = place.connect().expect("a client");
    assert!(attach::abandon(&place, &cluster, &pool).expect("given up").is_some());
    assert!(fenced_until(lab, &claims[0]).is_some(), "whoever was about to take it");
    nothing_else_is_fenced(lab);
    assert!(!guarded(&place));
}

fn killed_open_by_other(place: &Place) {
    let place = place.clone();
    killed_at(Point::Guarded, move || open_place(place, &other()).err());
}

/// Whoever is named so may be a real owner whose record is damaged: its image is not opened without a fence.
pub(super) fn an_owner_that_cannot_be_fenced_is_not_passed_over(lab: &Lab) {
    let place = place(lab, "forged-owner");
    // The cache knows its last client, which has the lock.
    let (mut old, _) = in_sync(&place);
    forge(&place, |record| Ownership { client: Some(UNFIT[0].into()), ..record });
    let known = OpenOptions { attachment: Some(old.attachment.clone()), ..options() };
    assert!(crate::check(&uri(lab, &place), &known).usable);
    let (backend, ..) = open_place(place.clone(), &known).expect("taken back");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!(write(&mut old, 2).0, Err(IoError::Fenced));
    drop(old);
    close(backend, true);

    // Nothing else tells who it was.
    let (mut old, generation) = in_sync(&place);
    let known = OpenOptions { attachment: Some(old.attachment.clone()), ..options() };
    let real = client_of(&old);
    break_lock(&place);
    for unfit in UNFIT {
        forge(&place, |record| Ownership { client: Some(unfit.into()), ..record });
        let (before, listed) = (record(&place), blocklist(lab));
        let (cluster, pool) = place.connect().expect("a client");
        let lines = [
            open_place(place.clone(), &options()).err(),
            open_place(place.clone(), &known).err(),
            take_over(&place, generation, true).err(),
            attach::abandon(&place, &cluster, &pool).err(),
        ];
        for line in lines.map(|error| error.expect("it is refused").to_string()) {
            assert!(
                line.contains(&format!("names `{unfit}` as its owner's client")) && !line.contains('\n'),
                "{line}"
            );
            assert!(line.contains("tidepool_owner.") && line.contains(&host_name()), "{line}");
        }
        let report = crate::check(&uri(lab, &place), &options());
        assert!(!report.usable, "{report:?}");
        assert_eq!((record(&place), blocklist(lab)), (before, listed), "{unfit}");
    }
    assert_eq!(write(&mut old, 4).0, Ok(()), "nobody was fenced");
    forge(&place, |record| Ownership { client: Some(real), ..record });
    let (backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    assert_eq!(write(&mut old, 5).0, Err(IoError::Fenced));
    drop(old);
    close(backend, true);
}

/// The lock is no better than the record: it can be written by the same people.
pub(super) fn a_lock_whose_holder_cannot_be_fenced_is_not_broken(lab: &Lab) {
    let place = place(lab, "forged-lock");
    let (backend, ..) = open_place(place.clone(), &options()).expect("opened");
    let (cluster, pool) = place.connect().expect("a client");
    let mut survey = Survey::take(&place, &cluster, &pool).expect("a survey");
    for unfit in UNFIT {
        survey.locker.as_mut().expect("a locker").address = unfit.into();
        survey.record = None;
        let holder = survey.holder(&options());
        assert!(matches!(holder, survey::Holder::Gone(_)), "{unfit}: {holder:?}");
        let refused = crate::rbd::fence::Fences::plan(&place, &survey, &holder, &options(), 1.0, false);
        let line = refused.expect_err("it is refused").to_string();
        assert!(line.contains(unfit) && line.contains("rbd lock rm"), "{line}");
    }
    close(backend, true);
}
