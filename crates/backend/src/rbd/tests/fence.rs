//! Which clients are fenced and which are not: what other clients have written into record and
//! lock, and fences that end early.

use super::peer::{by_peer, forge, in_sync, take_over, uri};
use super::*;
use crate::record::{Fenced, boot_id, host_name};
use crate::report::CheckStatus;

/// Texts that fence more than one client, another client than they seem to, or none. The last one
/// is well formed except for its port.
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

/// All fences: the address, and when it expires.
fn blocklist(lab: &Lab) -> Vec<(String, String)> {
    let text = lab.ceph(&["osd", "blocklist", "ls", "--format", "json"]).expect("the blocklist");
    // Ceph writes a second list, of ranges, behind the first.
    let lists = serde_json::Deserializer::from_str(&text).into_iter::<Vec<serde_json::Value>>();
    let list = lists.flat_map(|list| list.expect("a list in JSON"));
    let text = |entry: &serde_json::Value, key| entry[key].as_str().expect("a text").to_owned();
    list.map(|entry| (text(&entry, "addr"), text(&entry, "until"))).collect()
}

/// When the fence of a client expires, as a text that can be compared; `None` if there is none.
fn fenced_until(lab: &Lab, client: &str) -> Option<String> {
    blocklist(lab)
        .into_iter()
        .find(|(address, _)| address::same(address, client))
        .map(|(_, until)| until)
}

/// Asserts that only single clients are fenced, and no client that an unfit text names.
fn nothing_else_is_fenced(lab: &Lab) {
    for (address, _) in blocklist(lab) {
        // Daemons may be in the list too: Ceph fences its own.
        let client = address::Client::of(&address);
        assert!(client.is_ok(), "{address}: {client:?}");
        let named = ["/24", "/4242", "/4243", "/4244"].iter().any(|end| address.ends_with(end));
        assert!(!named, "{address}");
    }
}

fn with_unfit_claims(mut record: Ownership) -> Ownership {
    record.clients.claims.extend(UNFIT.map(str::to_owned));
    record
}

/// Makes the record name another client of its owner.
fn forge_owner(place: &Place, client: &str) {
    forge(place, |mut record| {
        record.clients.owner = Some(client.to_owned());
        record
    });
}

/// A client that can write to the pool can write the record.
pub(super) fn a_record_that_names_more_than_clients_fences_the_real_owner_alone(lab: &Lab) {
    let place = place(lab, "forged-claims");
    // An open after a kill.
    let (mut old, ..) = open_place(place.clone(), &options()).expect("opened");
    forge(&place, with_unfit_claims);
    let report = crate::check(&uri(lab, &place), &options());
    let told = report
        .items
        .iter()
        .filter(|item| item.name == "claims" && item.status == CheckStatus::Warning);
    assert!(report.usable && told.count() == UNFIT.len(), "{report:?}");
    let (mut backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!((write(&mut old, 2).0, write(&mut backend, 3).0), (Err(IoError::Fenced), Ok(())));
    drop(old);
    close(backend, true);

    // A takeover.
    let (mut old, generation) = in_sync(&place);
    forge(&place, with_unfit_claims);
    let taken = take_over(&place, generation, false).expect("taken over");
    assert_eq!(taken.clients.claims, Vec::<String>::new());
    forge(&place, with_unfit_claims);
    let (mut backend, ..) = open_place(place.clone(), &by_peer(generation)).expect("opened");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!((write(&mut old, 2).0, write(&mut backend, 3).0), (Err(IoError::Fenced), Ok(())));
    drop(old);
    close(backend, false);

    // An abandonment.
    killed_open_by_other(&place);
    let claims = record(&place).clients.claims;
    assert_eq!(claims.len(), 1);
    bury(&place);
    lab.ceph(&["osd", "blocklist", "rm", &claims[0]]).expect("fenced no more");
    forge(&place, with_unfit_claims);
    let site = place.connect().expect("a client");
    assert!(abandon::abandon(&site).expect("given up").is_some());
    assert!(fenced_until(lab, &claims[0]).is_some(), "the one that was about to take it");
    nothing_else_is_fenced(lab);
    assert!(!guarded(&place));
}

fn killed_open_by_other(place: &Place) {
    let place = place.clone();
    killed_at(Point::Guarded, move || open_place(place, &other()).err());
}

/// The named client may be a real owner whose record is damaged: its image is not opened without a
/// fence.
pub(super) fn an_owner_that_cannot_be_fenced_is_not_passed_over(lab: &Lab) {
    let place = place(lab, "forged-owner");
    // The cache knows its last client, which has the lock.
    let (mut old, _) = in_sync(&place);
    forge_owner(&place, UNFIT[0]);
    let known = OpenOptions { attachment: Some(old.attachment.clone()), ..options() };
    assert!(crate::check(&uri(lab, &place), &known).usable);
    let (backend, ..) = open_place(place.clone(), &known).expect("taken back");
    assert!(fenced_until(lab, &client_of(&old)).is_some(), "the owner itself");
    nothing_else_is_fenced(lab);
    assert_eq!(write(&mut old, 2).0, Err(IoError::Fenced));
    drop(old);
    close(backend, true);

    // Nothing else tells which client it was.
    let (mut old, generation) = in_sync(&place);
    let known = OpenOptions { attachment: Some(old.attachment.clone()), ..options() };
    let real = client_of(&old);
    break_lock(&place);
    for unfit in UNFIT {
        forge_owner(&place, unfit);
        let before = record(&place);
        let site = place.connect().expect("a client");
        let lines = [
            open_place(place.clone(), &options()).err(),
            open_place(place.clone(), &known).err(),
            take_over(&place, generation, true).err(),
            abandon::abandon(&site).err(),
        ];
        for line in lines.map(|error| error.expect("it is refused").to_string()) {
            assert!(
                line.contains(&format!("names `{unfit}` as its owner's client"))
                    && !line.contains('\n'),
                "{line}"
            );
            assert!(line.contains("tidepool_owner.") && line.contains(&host_name()), "{line}");
        }
        let report = crate::check(&uri(lab, &place), &options());
        assert!(!report.usable, "{report:?}");
        assert_eq!(record(&place), before, "{unfit}");
        assert_eq!(fenced_until(lab, &real), None, "{unfit}");
        nothing_else_is_fenced(lab);
    }
    assert_eq!(write(&mut old, 4).0, Ok(()), "nobody was fenced");
    forge_owner(&place, &real);
    let (backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    assert_eq!(write(&mut old, 5).0, Err(IoError::Fenced));
    drop(old);
    close(backend, true);
}

/// The lock is no better than the record: the same clients can write it.
pub(super) fn a_lock_whose_holder_cannot_be_fenced_is_not_broken(lab: &Lab) {
    let place = place(lab, "forged-lock");
    let (backend, ..) = open_place(place.clone(), &options()).expect("opened");
    let site = place.connect().expect("a client");
    let mut survey = Survey::take(&site).expect("a survey");
    for unfit in UNFIT {
        survey.locker.as_mut().expect("a locker").address = unfit.into();
        survey.record = None;
        let holder = survey.holder(&options());
        assert!(matches!(holder, survey::Holder::Gone(_)), "{unfit}: {holder:?}");
        let refused = crate::rbd::fence::Fences::of_open(&place, &survey, &holder, &options(), 1.0);
        let line = refused.expect_err("it is refused").to_string();
        assert!(line.contains(unfit) && line.contains("rbd lock rm"), "{line}");
    }
    close(backend, true);
}

fn fence_by_hand(lab: &Lab, client: &str) {
    lab.ceph(&["osd", "blocklist", "add", client, "86400"]).expect("fenced");
}

fn until(seconds: u64) -> u64 {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    now.as_secs() + seconds
}

/// A fence lasts for as long as nothing proves that its client is dead. A restart of the client's
/// host proves it.
pub(super) fn a_long_fence_is_listed_and_ends_when_its_host_was_restarted(lab: &Lab) {
    const DAY: u64 = 86_400;
    let place = place(lab, "fenced-long");
    let (old, generation) = in_sync(&place);
    let client = client_of(&old);
    take_over(&place, generation, false).expect("taken over");
    let listed = record(&place).clients.fenced;
    let found = (&listed[0].address, &listed[0].host, &listed[0].boot_id);
    assert_eq!((listed.len(), found), (1, (&client, &host_name(), &boot_id())));
    assert!((until(364 * DAY)..until(366 * DAY)).contains(&listed[0].until_unix_s), "{listed:?}");
    let (backend, ..) = open_place(place.clone(), &by_peer(generation)).expect("opened");
    drop(old);
    let long = fenced_until(lab, &client).expect("it is fenced");
    close(backend, true);
    assert_eq!(record(&place).clients.fenced, listed, "a release keeps them");
    let report = crate::check(&uri(lab, &place), &options());
    let told = report.items.iter().find(|item| item.name == "fences").expect("they are listed");
    assert!(told.detail.contains(&client) && told.detail.contains("for 365 more days"), "{told:?}");

    // Nothing proves that its process is dead: the boot is this one, the host is another one, or
    // nothing is known.
    let keep = |change: &dyn Fn(&mut Fenced)| {
        forge(&place, |mut record| {
            record.clients.fenced = listed.clone();
            record.clients.fenced[0].until_unix_s -= 3601;
            change(&mut record.clients.fenced[0]);
            record
        });
        let before = record(&place).clients.fenced;
        close(open_place(place.clone(), &options()).expect("free").0, true);
        assert_eq!(record(&place).clients.fenced, before);
        assert_eq!(fenced_until(lab, &client).as_ref(), Some(&long));
    };
    keep(&|_| ());
    keep(&|fenced| (fenced.host, fenced.boot_id) = ("elsewhere".into(), "another".into()));
    keep(&|fenced| fenced.boot_id = String::new());
    keep(&|fenced| (fenced.host, fenced.boot_id) = (String::new(), "another".into()));
    // Another host with this host's name.
    fence_by_hand(lab, "10.0.0.1:0/77");
    keep(&|fenced| (fenced.address, fenced.boot_id) = ("10.0.0.1:0/77".into(), "another".into()));
    // Requests that the client has sent may still be under way.
    keep(&|fenced| {
        (fenced.until_unix_s, fenced.boot_id) = (fenced.until_unix_s + 60, "another".into())
    });

    fence_by_hand(lab, "10.0.0.2:0/78");
    let elsewhere =
        Fenced { address: "10.0.0.2:0/78".into(), host: "elsewhere".into(), ..listed[0].clone() };
    // A fence that Ceph does not have: the address is no client's, and would stand for all clients
    // of this host.
    let nobody =
        Fenced { address: "127.0.0.1:0/0".into(), boot_id: "another".into(), ..listed[0].clone() };
    forge(&place, |mut record| {
        let (until_unix_s, boot_id) = (listed[0].until_unix_s - 3601, "another".into());
        let former = Fenced { until_unix_s, boot_id, ..listed[0].clone() };
        record.clients.fenced = vec![former, elsewhere.clone(), Fenced { until_unix_s, ..nobody }];
        record
    });
    let before = blocklist(lab);
    // Without the right to end a fence, the fence stays, and everything else is as usual.
    let osd = format!("profile rbd pool={}", lab.pool());
    let name = format!("adds-{}", lab.pool());
    lab.client_add(&name, &[("mon", "profile rbd"), ("osd", &osd)]).expect("a client");
    let by_least = format!("{}&id={name}", lab.uri(&place.image)).parse().expect("a URI");
    let least = Place::of(&by_least).expect("an rbd: URI");
    close(open_place(least.clone(), &options()).expect("free").0, true);
    // Tests that run beside this one fence their own clients.
    let is_there = |before: &[(String, String)]| {
        let now = blocklist(lab);
        before.iter().all(|(address, _)| now.iter().any(|(fenced, _)| fenced == address))
    };
    assert_eq!((is_there(&before), record(&place).clients.fenced.len()), (true, 2));
    let site = least.connect().expect("a client");
    let refused = site
        .cluster
        .unblocklist(address::Client::of(&client).expect("an address"))
        .expect_err("no right");
    assert_eq!(refused.errno(), IoError::Errno(libc::EACCES));

    let (backend, ..) = open_place(place.clone(), &options()).expect("free");
    let others: Vec<_> =
        before.into_iter().filter(|(address, _)| !address::same(address, &client)).collect();
    assert_eq!((is_there(&others), fenced_until(lab, &client)), (true, None));
    assert_eq!(record(&place).clients.fenced, vec![elsewhere]);
    close(backend, true);
}

/// The record does not name the host of an open that was cut short. So no restart of a host proves
/// anything, and only an administrator ends the fence of its client.
pub(super) fn a_fence_that_an_administrator_has_ended_is_told_and_listed_no_more(lab: &Lab) {
    const CLAIM: &str = "127.0.0.1:0/4711";
    let place = place(lab, "fenced-ended");
    let (old, generation) = in_sync(&place);
    let owner = client_of(&old);
    forge(&place, |mut record| {
        record.clients.claims.push(CLAIM.into());
        record
    });
    take_over(&place, generation, false).expect("taken over");
    // A fence that is about to be set is not reported as one that stands.
    assert_eq!((fences_told(lab, &place), record(&place).clients.fenced.len()), (None, 2));
    close(open_place(place.clone(), &by_peer(generation)).expect("opened").0, true);
    drop(old);
    let told = fences_told(lab, &place).expect("they are told");
    assert!(told.contains(&format!("{CLAIM} of an unknown host for 365 more days")), "{told}");
    assert!(told.contains(&owner) && told.ends_with("ceph osd blocklist rm ADDRESS"), "{told}");
    // A fence is reported with the time for which the cluster has it.
    lab.ceph(&["osd", "blocklist", "rm", CLAIM]).expect("fenced no more");
    fence_by_hand(lab, CLAIM);
    let told = fences_told(lab, &place).expect("they are told");
    assert!(told.contains(&format!("{CLAIM} of an unknown host for 1 more days")), "{told}");

    let listed =
        |place: &Place| record(place).clients.fenced.into_iter().map(|fenced| fenced.address);
    for (ended, left) in [(CLAIM, vec![owner.clone()]), (owner.as_str(), vec![])] {
        lab.ceph(&["osd", "blocklist", "rm", ended]).expect("fenced no more");
        assert!(!fences_told(lab, &place).unwrap_or_default().contains(ended));
        assert!(listed(&place).any(|address| address == ended));
        close(open_place(place.clone(), &options()).expect("free").0, true);
        assert_eq!(listed(&place).collect::<Vec<_>>(), left);
    }
    assert_eq!(fences_told(lab, &place), None);
}

/// What `check` reports about fences.
fn fences_told(lab: &Lab, place: &Place) -> Option<String> {
    let report = crate::check(&uri(lab, place), &options());
    report.items.into_iter().find(|item| item.name == "fences").map(|item| item.detail)
}

/// A client that cannot be proved dead is fenced for a year, and the record lists the fence also
/// after a restart of its host.
pub(super) fn an_own_client_of_a_former_boot_is_fenced_for_a_year(lab: &Lab) {
    let place = place(lab, "fenced-boot");
    let (old, ..) = open_place(place.clone(), &options()).expect("opened");
    let client = client_of(&old);
    break_lock(&place);
    forge(&place, |record| Ownership { boot_id: "another".into(), ..record });
    let (backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    let found = record(&place).clients.fenced;
    let told = (found[0].address.as_str(), found[0].boot_id.as_str());
    assert_eq!((found.len(), told), (1, (client.as_str(), "another")));
    let entry = fenced_until(lab, &client).expect("fenced");
    let year = entry[..4].parse::<u64>().expect("a year");
    assert!(year > 1970 + until(0) / 31_556_952, "{entry}");
    drop(old);
    close(backend, true);
    // The proof of a restart counts only once nothing can be under way any more.
    close(open_place(place.clone(), &options()).expect("free").0, true);
    assert_eq!((record(&place).clients.fenced, fenced_until(lab, &client)), (found, Some(entry)));

    // Ceph neither prolongs nor shortens a fence.
    let site = place.connect().expect("a client");
    let short = address::Client::to_fence("10.0.0.3:0/79").expect("an address");
    for expire_s in [3600.0, 86_400.0, 60.0] {
        site.cluster.blocklist(short, expire_s).expect("fenced");
    }
    let entry = cluster_entry(&place, "10.0.0.3:0/79");
    assert!((until(3000) as i64..until(3700) as i64).contains(&entry), "{entry}");

    // A client whose process is certainly dead is fenced for an hour.
    let (old, ..) = open_place(place.clone(), &options()).expect("opened");
    let (client, listed) = (client_of(&old), record(&place).clients.fenced);
    let (backend, ..) = open_place(place.clone(), &options()).expect("taken back");
    assert_eq!(record(&place).clients.fenced, listed);
    let entry = cluster_entry(&place, &client);
    assert!((until(3000) as i64..until(3700) as i64).contains(&entry), "{entry}");
    drop(old);
    close(backend, true);
}

/// When the fence of a client expires, as [`cluster::Blocklisted`] reads it.
fn cluster_entry(place: &Place, client: &str) -> i64 {
    let site = place.connect().expect("a client");
    let listed = site.cluster.blocklisted().expect("a list");
    let entry =
        listed.iter().find(|entry| address::same(&entry.address, client)).expect("it is fenced");
    entry.until_unix_s().expect("a time")
}
