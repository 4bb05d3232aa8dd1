//! The same on images of a real cluster, whose owners can be fenced.

use super::failover::{add_volume, goes_on, holder, wait_in_sync};
use super::{IMAGE_BYTES, kill_owner, lose_owner, under_load, workload};

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Progress, Workload};
use tidepool_testkit::{Cluster, ClusterOptions, one_at_a_time};
use tidepool_tests::failover::{ended, fail_over, start_failover};
use tidepool_tests::pair::{Pair, PairOptions};
use tidepool_tests::rig::{MIB, VOLUME};

/// Rounds of the short form.
const ROUNDS: u64 = 2;

fn pair_on(cluster: &Cluster, image: &str) -> Pair {
    hosts_on(cluster, image, false)
}

/// Two hosts in sync, and a third one beside them, which have names then.
fn hosts_on(cluster: &Cluster, image: &str, third: bool) -> Pair {
    cluster.rbd_create(image, IMAGE_BYTES).expect("an image");
    let options = PairOptions {
        cache_bytes: 192 * MIB,
        image: Ok(cluster.uri(image)),
        third,
        ..PairOptions::default()
    };
    Pair::new(&options).expect("two hosts in sync")
}

/// The address of the client that has an image's lock.
fn lock_address(cluster: &Cluster, image: &str) -> String {
    let locks = cluster.rbd(&["lock", "ls", "--format", "json", image]).expect("rbd lock ls");
    let locks: serde_json::Value = serde_json::from_str(&locks).expect("JSON");
    locks[0]["address"]
        .as_str()
        .unwrap_or_else(|| panic!("nobody has the lock: {locks}"))
        .to_owned()
}

/// The image alone is what was written, when everything is drained.
fn check_image(cluster: &Cluster, image: &str, pair: &Pair, workload: &mut Workload) {
    let removed = pair.owner().admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None);
    assert_eq!(removed.expect("it is removed")["verified"], true);
    let export = pair.scratch.join("export");
    cluster.rbd_export(image, &export).expect("an export");
    pair.verify_plain(workload, &export).expect("the image is what was written");
}

#[test]
fn g4_the_peer_of_a_dead_host_goes_on_in_a_moment() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = pair_on(&cluster, "killed");
    let mut workload = workload(&pair, 611);
    let mut rng = Rng::new(rng::seed(612));
    for _ in 0..ROUNDS {
        lose_owner(&mut pair, &mut workload, &mut rng);
    }
    workload.disconnect().expect("goodbye");
    check_image(&cluster, "killed", &pair, &mut workload);
}

/// All volumes of a host are taken over together, and each has what only the two logs had.
#[test]
fn g4_everything_that_a_dead_host_has_served_is_failed_over_at_once() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = hosts_on(&cluster, "many", true);
    let mut workload = workload(&pair, 650);
    let to = holder(&pair);
    let names: Vec<_> = (1..=6).map(|at| format!("many-{at}")).collect();
    for name in &names {
        cluster.rbd_create(name, 8 * MIB).expect("an image");
        add_volume(&pair, name, &cluster.uri(name));
    }
    // Each has its own content at its own place.
    let content = |at: usize| (at as u64 * 65_536, [1 + at as u8; 65_536]);
    for (at, name) in names.iter().enumerate() {
        let mut client = Client::connect(&pair.owner().socket, name).expect("connect");
        let (offset, data) = content(at);
        client.write(offset, &data).expect("acknowledged");
    }
    for name in &names {
        wait_in_sync(&pair, name);
    }
    kill_owner(&mut pair, &mut workload, 100);
    let since = Instant::now();
    let all = fail_over(&pair.hosts[to], &["--fenced", "h0"]).expect("it runs");
    println!("{} volumes failed over in {} ms", names.len() + 1, since.elapsed().as_millis());
    assert_eq!(all.status, 0, "{all:?}");
    let volumes = all.volumes();
    assert_eq!(volumes.len(), names.len() + 1, "{all:?}");
    assert!(volumes.iter().all(|volume| volume["outcome"] == "taken-over"), "{all:?}");
    for (at, name) in names.iter().enumerate() {
        let mut client = Client::connect(&pair.hosts[to].socket, name).expect("connect");
        let (offset, data) = content(at);
        assert!(client.read(offset, data.len()).expect("an answer") == data, "{name}");
    }
    goes_on(&mut pair, &mut workload, to);
}

/// A rollback gives the second copy up, and a new one begins: what the peer takes over later is the
/// snapshot and what came after it.
#[test]
fn g4_what_a_peer_takes_over_after_a_rollback_is_of_after_it() {
    const PLACES: u64 = 16;
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = pair_on(&cluster, "back");
    let write = |pair: &Pair, places: std::ops::Range<u64>, byte: u8| {
        let mut client = Client::connect(&pair.owner().socket, VOLUME).expect("connect");
        places.for_each(|at| client.write(at * MIB, &[byte; 65536]).expect("acknowledged"));
        client.flush().expect("a flush");
    };
    let call = |pair: &Pair, what: &str| {
        let body = serde_json::json!({ "snapshot": "then" });
        let answer =
            pair.owner().admin.call("POST", &format!("/v1/volumes/{VOLUME}/{what}"), Some(&body));
        answer.expect("it is done")
    };
    write(&pair, 0..PLACES, 1);
    call(&pair, "snapshots");
    write(&pair, 0..PLACES, 2);
    pair.owner().admin.drain(VOLUME).expect("drain");
    call(&pair, "rollback");
    pair.owner().wait_sync().expect("there is a copy again");
    write(&pair, 0..4, 3);
    let owner = pair.owner;
    pair.hosts[owner].daemon.kill().expect("kill");
    pair.peer().take_over(false).expect("it is taken over");
    pair.owner = 1 - owner;
    let mut client = Client::connect(&pair.owner().socket, VOLUME).expect("connect");
    for at in 0..PLACES {
        let expected = if at < 4 { 3 } else { 1 };
        let content = client.read(at * MIB, 65536).expect("a read");
        assert!(
            content.iter().all(|&byte| byte == expected),
            "at {at} MiB: {} for {expected}",
            content[0]
        );
    }
}

#[test]
fn g4_a_volume_is_handed_over_with_its_lock_and_its_guard() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = pair_on(&cluster, "handed");
    let mut owners = Vec::new();
    let mut workload = workload(&pair, 616);
    for _ in 0..ROUNDS {
        under_load(&mut workload, 300, || ());
        workload.disconnect().expect("goodbye");
        owners.push(lock_address(&cluster, "handed"));
        let took = pair.hand_over(&mut workload).expect("it is handed over with everything");
        println!("handed over in {} ms", took.as_millis());
        pair.owner().wait_sync().expect("in sync again");
    }
    workload.disconnect().expect("goodbye");
    let fenced = cluster.ceph(&["osd", "blocklist", "ls"]).expect("a list");
    assert!(
        owners.iter().all(|address| !fenced.contains(address)),
        "nobody is fenced: {owners:?}\n{fenced}"
    );
    check_image(&cluster, "handed", &pair, &mut workload);
}

#[test]
fn g6_an_owner_that_was_stopped_writes_nothing_when_it_goes_on() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = pair_on(&cluster, "stopped");
    let mut workload = workload(&pair, 613);
    for _ in 0..2 {
        let owner = pair.owner;
        let (hosts, gauge) = (&pair.hosts, workload.gauge());
        let end = under_load(&mut workload, 500, || {
            hosts[owner].wait_sync().expect("in sync");
            hosts[owner].daemon.signal(Signal::STOP).expect("it stops");
            // Nobody answers its clients any more.
            std::thread::sleep(Duration::from_millis(500));
            gauge.give_up();
        });
        assert_eq!(end, Progress::Disconnected);
        let took = pair.fail_over(&mut workload).expect("nothing is lost");
        println!("taken over from a stopped owner in {} ms", took.as_millis());
        workload.run(500).expect("a run");
        // With all that it had in flight, and whatever it wants to drain.
        pair.hosts[owner].daemon.signal(Signal::CONT).expect("it goes on");
        let copy = pair.hosts[owner].wait("the other copy", |volume| volume["state"] == "replica");
        copy.expect(
            "it knows that it is not the owner, and keeps the copy without being started again",
        );
        pair.hosts[owner].daemon.wait_log("it is closed here").expect("it says so");
        workload.run(500).expect("a run");
        workload.verify().expect("nothing of the old owner is in the image");
        pair.owner().wait_sync().expect("in sync again");
    }
    workload.disconnect().expect("goodbye");
    check_image(&cluster, "stopped", &pair, &mut workload);
}

/// A manager that was wrong about its fence: the owner was stopped, goes on, and finds itself
/// fenced by the failover.
#[test]
fn g6_a_host_that_was_not_fenced_after_all_writes_nothing_after_a_failover() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let mut pair = hosts_on(&cluster, "fenced", true);
    let mut workload = workload(&pair, 617);
    let to = holder(&pair);
    let (hosts, gauge) = (&pair.hosts, workload.gauge());
    let end = under_load(&mut workload, 500, || {
        let alive = fail_over(&hosts[to], &[VOLUME, "--fenced", "h0"]).expect("it runs");
        assert!(alive.status == 1 && alive.error.contains("host h0 is alive"), "{alive:?}");
        hosts[0].wait_sync().expect("in sync");
        hosts[0].daemon.signal(Signal::STOP).expect("it stops");
        // At once, while it was heard a moment ago.
        let since = Instant::now();
        let mut taken = fail_over(&hosts[to], &["--fenced", "h0"]).expect("it runs");
        if taken.error.contains("is alive") {
            // On a busy machine what it had sent before is heard late.
            taken = fail_over(&hosts[to], &["--fenced", "h0"]).expect("it runs");
        }
        println!("failed over from a stopped owner in {} ms", since.elapsed().as_millis());
        assert_eq!(
            (taken.status, &taken.volume()["outcome"]),
            (0, &"taken-over".into()),
            "{taken:?}"
        );
        gauge.give_up();
    });
    assert_eq!(end, Progress::Disconnected);
    goes_on(&mut pair, &mut workload, to);
    workload.run(500).expect("a run");
    pair.hosts[0].daemon.signal(Signal::CONT).expect("it goes on");
    let asked = fail_over(&pair.hosts[0], &[VOLUME]).expect("it runs");
    assert_ne!(asked.volume()["outcome"], "here", "whether it knows already or not: {asked:?}");
    let copy = pair.hosts[0].wait("another host's volume", |volume| volume["state"] != "serving");
    copy.expect("it knows that it is not the owner");
    workload.run(500).expect("a run");
    workload.verify().expect("nothing of the old owner is in the image");
    pair.owner().wait_sync().expect("in sync again");
    workload.disconnect().expect("goodbye");
    check_image(&cluster, "fenced", &pair, &mut workload);
}

/// The monitors do not answer while the host fails: a failover that finds nobody to ask tries
/// again.
#[test]
fn g4_a_failover_waits_for_a_cluster_that_does_not_answer_for_a_while() {
    let _turn = one_at_a_time();
    let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
    let mut pair = hosts_on(&cluster, "away", true);
    let mut workload = workload(&pair, 618);
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 500);
    cluster.ceph(&["osd", "pause"]).expect("nothing is read or written");
    let early =
        fail_over(&pair.hosts[to], &[VOLUME, "--fenced", "h0", "--wait", "1s"]).expect("it runs");
    assert!(early.status == 1 && early.error.contains("ask again"), "{early:?}");
    let waiting = start_failover(&pair.hosts[to], &[VOLUME, "--fenced", "h0", "--wait", "2m"])
        .expect("it starts");
    std::thread::sleep(Duration::from_secs(3));
    cluster.ceph(&["osd", "unpause"]).expect("as before");
    let taken = ended(waiting).expect("it ends");
    assert_eq!(taken.status, 0, "{taken:?}");
    goes_on(&mut pair, &mut workload, to);
    workload.disconnect().expect("goodbye");
}
