//! A second copy on another host: nothing acknowledged is lost with one of the two.

mod ceph;
mod failover;
mod killed;
mod managers;
mod migration;
mod network;
mod power;
mod zombie;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::json;
use tidepool_replica::Limits;
use tidepool_testkit::daemon::tidepool;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Error, Scratch, one_at_a_time};
use tidepool_tests::failover::{Ended, ended};
use tidepool_tests::pair::{Host, Pair, PairOptions};
use tidepool_tests::rig::{MIB, VOLUME};
use tidepool_tests::wire::WireMode;

const IMAGE_BYTES: u64 = 32 * MIB;
/// How long an owner answers reads after its peer was heard for the last time
/// (docs/rfcs/0009-replica.md).
const LEASE: Duration = Duration::from_nanos(Limits::SHIPPED.lease_ns);
/// Rounds of the short form.
const ROUNDS: usize = 3;

fn pair() -> Pair {
    hosts(false)
}

/// Two hosts in sync that wait for each other as long as a release does: for what they do without
/// each other's word.
fn pair_as_shipped() -> Pair {
    let options =
        PairOptions { image: Err(IMAGE_BYTES), shipped_limits: true, ..PairOptions::default() };
    Pair::new(&options).expect("two hosts in sync")
}

/// Two hosts in sync, and a third one beside them.
fn hosts(third: bool) -> Pair {
    let options = PairOptions {
        cache_bytes: 192 * MIB,
        image: Err(IMAGE_BYTES),
        third,
        ..PairOptions::default()
    };
    Pair::new(&options).expect("two hosts in sync")
}

fn workload(pair: &Pair, seed: u64) -> Workload {
    workload_on(pair, seed, IMAGE_BYTES)
}

fn workload_on(pair: &Pair, seed: u64, bytes: u64) -> Workload {
    let mix = Mix { flushes: 1, ..Mix::default() };
    let options = WorkloadOptions { mix, ..WorkloadOptions::new(rng::seed(seed), bytes) };
    let mut workload = Workload::new(options);
    workload.connect(&pair.owner().socket, VOLUME).expect("connect");
    workload
}

/// Has a load end, also when what is done meanwhile panics.
struct EndsLoad<'a>(&'a AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something after a random time under load, and has the load go on for as long; how the load
/// has ended.
fn under_load(workload: &mut Workload, ms: u64, what: impl FnOnce()) -> Progress {
    load_during(workload, ms, what).expect("no request fails")
}

/// The same, where requests may fail.
fn load_during(workload: &mut Workload, ms: u64, what: impl FnOnce()) -> Result<Progress, Error> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        let ends = EndsLoad(&stop);
        std::thread::sleep(Duration::from_millis(ms));
        what();
        std::thread::sleep(Duration::from_millis(ms));
        drop(ends);
        run.join().expect("no panic")
    })
}

/// The owner is killed under load, with a copy in sync: a busy machine may have had the two part
/// for a moment. Returns which host that was.
fn kill_owner(pair: &mut Pair, workload: &mut Workload, ms: u64) -> usize {
    let owner = pair.owner;
    let hosts = &mut pair.hosts;
    let end = under_load(workload, ms, || {
        hosts[owner].wait_sync().expect("in sync");
        hosts[owner].daemon.kill().expect("kill");
    });
    assert_eq!(end, Progress::Disconnected);
    owner
}

/// The owner is killed under load, its peer takes over with everything, and the old owner comes
/// back as the peer of the new one.
fn lose_owner(pair: &mut Pair, workload: &mut Workload, rng: &mut Rng) {
    let owner = kill_owner(pair, workload, 50 + rng.below(800));
    let took = pair.fail_over(workload).expect("nothing is lost");
    println!("taken over in {} ms", took.as_millis());
    pair.hosts[owner].daemon.start().expect("it starts");
    pair.owner().wait_sync().expect("in sync again");
    let copy = pair.peer().volume().expect("a status").expect("a copy");
    assert_eq!(copy["state"], "replica");
}

/// The owner loses its peer under load and gets it back: no request fails and none hangs, and
/// nothing is lost.
fn lose_peer(
    pair: &mut Pair,
    workload: &mut Workload,
    lose: impl FnOnce(&mut Pair),
    give_back: impl FnOnce(&mut Pair),
) {
    let end = under_load(workload, 600, || lose(pair));
    assert_eq!(end, Progress::Done);
    pair.owner().wait_degraded().expect("write-through");
    give_back(pair);
    pair.owner().wait_sync().expect("in sync again");
    workload.verify().expect("nothing is lost");
}

#[test]
fn g4_what_was_acknowledged_survives_its_host() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 601);
    let mut rng = Rng::new(rng::seed(602));
    for _ in 0..ROUNDS {
        lose_owner(&mut pair, &mut workload, &mut rng);
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g2_an_owner_that_was_killed_goes_on_where_it_was() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 603);
    for _ in 0..3 {
        kill_owner(&mut pair, &mut workload, 300);
        pair.hosts[0].daemon.start().expect("it starts");
        workload.server_died();
        pair.verify(&mut workload).expect("nothing is lost");
        pair.owner().wait_sync().expect("in sync again");
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g8_without_its_peer_a_volume_goes_on_as_write_through() {
    let _turn = one_at_a_time();
    let mut pair = pair_as_shipped();
    let mut workload = workload(&pair, 604);
    for _ in 0..2 {
        let killed = |pair: &mut Pair| pair.hosts[1].daemon.kill().expect("kill");
        let started = |pair: &mut Pair| {
            pair.hosts[1].daemon.start().expect("it starts");
        };
        lose_peer(&mut pair, &mut workload, killed, started);
        let stopped =
            |pair: &mut Pair| pair.hosts[1].daemon.signal(Signal::STOP).expect("it stops");
        let goes_on =
            |pair: &mut Pair| pair.hosts[1].daemon.signal(Signal::CONT).expect("it goes on");
        lose_peer(&mut pair, &mut workload, stopped, goes_on);
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g8_a_link_that_is_cut_or_swallows_everything_costs_no_request() {
    let _turn = one_at_a_time();
    let mut pair = pair_as_shipped();
    let mut workload = workload(&pair, 607);
    for mode in [WireMode::Hole, WireMode::Cut, WireMode::Hole] {
        let set = |mode| move |pair: &mut Pair| pair.set_link(mode);
        lose_peer(&mut pair, &mut workload, set(mode), set(WireMode::Works));
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g4_a_link_that_flaps_loses_nothing() {
    let _turn = one_at_a_time();
    let mut pair = pair_as_shipped();
    let mut workload = workload(&pair, 608);
    let mut rng = Rng::new(rng::seed(609));
    let end = under_load(&mut workload, 200, || {
        for _ in 0..6 {
            pair.set_link(if rng.chance(50) { WireMode::Hole } else { WireMode::Cut });
            std::thread::sleep(Duration::from_millis(20 + rng.below(500)));
            pair.set_link(WireMode::Works);
            std::thread::sleep(Duration::from_millis(20 + rng.below(2500)));
        }
    });
    assert_eq!(end, Progress::Done);
    pair.owner().wait_sync().expect("in sync in the end");
    // What the peer has now is everything.
    pair.hosts[0].daemon.kill().expect("kill");
    pair.fail_over(&mut workload).expect("nothing is lost");
    workload.disconnect().expect("goodbye");
}

/// A host that takes over relies on the lease of the owner: half a second here, five seconds there.
#[test]
fn g6_hosts_with_different_leases_keep_no_copies_for_each_other() {
    let _turn = one_at_a_time();
    let mut pair = pair_as_shipped();
    let mut workload = workload(&pair, 662);
    workload.run(200).expect("a run");
    let peer = &mut pair.hosts[1].daemon;
    peer.kill().expect("kill");
    peer.use_long_limits().expect("another program");
    peer.start().expect("it starts");
    pair.owner().daemon.wait_log("both hosts need releases with one lease").expect("it says why");
    pair.owner().wait_degraded().expect("no copy");
    workload.run(200).expect("a run");
    let alone = pair.peer().take_over(false).expect_err("it has no copy that counts").to_string();
    assert!(alone.contains("alone has its newest data") || alone.contains("in use"), "{alone}");
    let peer = &mut pair.hosts[1].daemon;
    peer.kill().expect("kill");
    peer.use_shipped_limits().expect("the program of a release");
    peer.start().expect("it starts");
    pair.owner().wait_sync().expect("in sync again");
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
}

#[test]
fn g4_a_copy_that_does_not_count_is_not_taken_over() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 605);
    pair.owner().wait_sync().expect("in sync");
    let alive = pair.peer().take_over(false).expect_err("the owner lives").to_string();
    assert!(alive.contains("in use"), "{alive}");
    pair.owner().wait_sync().expect("it is in sync again after the attempt");
    pair.hosts[1].daemon.kill().expect("kill");
    pair.owner().wait_degraded().expect("alone");
    under_load(&mut workload, 200, || ());
    pair.hosts[0].daemon.kill().expect("kill");
    pair.hosts[1].daemon.start().expect("it starts");
    let alone = pair.peer().take_over(false).expect_err("it is not in sync").to_string();
    assert!(alone.contains("alone has its newest data"), "{alone}");
    pair.hosts[0].daemon.start().expect("it starts");
    workload.server_died();
    pair.verify(&mut workload).expect("nothing is lost");
}

/// What a client that reads the first blocks is told.
fn read(pair: &Pair) -> String {
    let output = reader(pair).wait_with_output().expect("qemu-io ends");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// A client that reads them.
fn reader(pair: &Pair) -> Child {
    let uri = format!("nbd+unix:///{VOLUME}?socket={}", pair.owner().socket.display());
    let mut reader = Command::new("qemu-io");
    reader.args(["-r", "-f", "raw", "-c", "read -P 7 0 64k", &uri]);
    let reader = reader.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    reader.spawn().expect("qemu-io runs (qemu-utils)")
}

/// An owner that is cut off from its peer and from its image does not know whether the peer has
/// taken over.
#[test]
fn g1_an_owner_that_is_cut_off_from_everybody_answers_no_reads_until_it_knows() {
    let _turn = one_at_a_time();
    let pair = pair_as_shipped();
    let uri = format!("nbd+unix:///{VOLUME}?socket={}", pair.owner().socket.display());
    let written =
        Command::new("qemu-io").args(["-f", "raw", "-c", "write -P 7 0 64k", &uri]).status();
    assert!(written.expect("qemu-io runs (qemu-utils)").success());
    pair.set_link(WireMode::Hole);
    pair.owner().wait_degraded().expect("the record says that it is alone");
    std::thread::sleep(2 * LEASE);
    assert!(read(&pair).contains("read 65536/65536"), "alone it answers as long as it likes");
    pair.set_link(WireMode::Works);
    pair.owner().wait_sync().expect("in sync again");

    std::fs::write(pair.scratch.join("gate"), "").expect("the gate is closed");
    pair.set_link(WireMode::Hole);
    // The peer does not hear its beats any more, and may have taken over.
    std::thread::sleep(LEASE);
    let mut reader = reader(&pair);
    std::thread::sleep(4 * LEASE);
    assert!(reader.try_wait().expect("a status").is_none(), "nobody knows what it is to be told");
    std::fs::remove_file(pair.scratch.join("gate")).expect("the gate is open");
    let output = reader.wait_with_output().expect("qemu-io ends");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("read 65536/65536"), "it is the owner: {told}");
    pair.owner().wait_degraded().expect("the record says that it is alone");
}

/// Runs `tidepool volume drain --all` on a host.
fn drain_all(host: &Host) -> Ended {
    let mut command = Command::new(tidepool().expect("the program"));
    command
        .args(["volume", "drain", "--all", "--format", "json", "--admin"])
        .arg(host.admin.socket());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    ended(command.spawn().expect("it starts")).expect("it ends")
}

#[test]
fn all_volumes_of_a_host_are_drained_but_not_the_copies_that_it_has_of_others() {
    let _turn = one_at_a_time();
    let pair = pair();
    let mut workload = workload(&pair, 61);
    workload.run(200).expect("a run");
    let copy = pair.peer().volume().expect("a status").expect("it has a copy");
    assert_eq!(copy["state"], "replica");
    let drained = |ended: Ended| {
        assert_eq!((ended.status, ended.error.as_str()), (0, ""), "{}", ended.output);
        serde_json::from_str::<serde_json::Value>(&ended.output).expect("JSON")
    };
    assert_eq!(drained(drain_all(pair.peer())), json!([]), "a copy is drained by its owner");
    assert_eq!(drained(drain_all(pair.owner()))[0]["name"], VOLUME);
    let owned = pair.owner().volume().expect("a status").expect("it serves the volume");
    assert_eq!(owned["dirty_bytes"], 0);
}

/// Writes of a host's daemon behind so many bytes of a file fail from here on.
fn writes_fail(host: &Host, bytes: u64) {
    let pid = host.daemon.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    let limit = Rlimit { current: Some(bytes), maximum: None };
    prlimit(Some(pid), Resource::Fsize, limit).expect("a limit");
}

/// The first host's daemon starts on a device that has what it had long before, does not serve the
/// volume, and says why.
fn comes_back_on(pair: &mut Pair, old: &Path, why: &str) {
    let host = &mut pair.hosts[0];
    std::fs::copy(old, &host.cache).expect("what the device has then");
    let refused = host.daemon.start();
    let volume = host.volume().ok().flatten();
    assert!(volume.is_none_or(|volume| volume["state"] != "serving"), "{refused:?}");
    host.daemon.wait_log(why).expect("it says why");
}

/// The owner's cache device fails, the daemon dies, and the device comes back with what it had long
/// before.
#[test]
fn g4_an_owner_whose_device_had_failed_does_not_go_on_with_less() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("image").expect("a directory");
    let image = scratch.join("image");
    // Slow, so that the image does not have everything at once; and small, since it is read as a
    // whole.
    let bytes = 3 * MIB;
    File::create(&image).and_then(|file| file.set_len(bytes)).expect("an image");
    let uri = format!("file:{}?emulate=hdd", image.display());
    let options = PairOptions { cache_bytes: 192 * MIB, image: Ok(uri), ..PairOptions::default() };
    let mut pair = Pair::new(&options).expect("two hosts in sync");
    let mut workload = workload_on(&pair, 610, bytes);
    let old = scratch.join("old");
    std::fs::copy(&pair.owner().cache, &old).expect("a copy of the cache");
    let record = || std::fs::read_to_string(scratch.join("image.tidepool")).expect("a record");
    let hosts = &mut pair.hosts;
    let end = under_load(&mut workload, 1500, || {
        writes_fail(&hosts[0], MIB);
        let since = Instant::now();
        while !record().contains("\"only\": true") {
            assert!(since.elapsed() < Duration::from_secs(30), "{}", record());
            std::thread::sleep(Duration::from_millis(1));
        }
        // Nothing that somebody asks for ends the only copy that counts.
        let path = format!("/v1/volumes/{VOLUME}");
        let asked = hosts[0].admin.call("PATCH", &path, Some(&json!({ "mode": "write-through" })));
        let why = asked.expect_err("the mode stays").to_string();
        assert!(why.contains("409") && why.contains("only the copy on"), "{why}");
        assert!(record().contains("\"only\": true"), "{}", record());
        hosts[0].daemon.kill().expect("kill");
    });
    assert_eq!(end, Progress::Disconnected);
    comes_back_on(&mut pair, &old, "newer records");
    pair.fail_over(&mut workload).expect("nothing is lost");
    workload.disconnect().expect("goodbye");
}

/// The owner's cache device fails, the image gets everything, the two part, and the image goes on
/// without either. Then the daemon dies, and the device comes back with what it had long before.
fn parted_from_a_failed_device(seed: u64, drain: &str) {
    let options = PairOptions {
        cache_bytes: 192 * MIB,
        image: Err(8 * MIB),
        extra: vec![format!("--drain={drain}")],
        ..PairOptions::default()
    };
    let mut pair = Pair::new(&options).expect("two hosts in sync");
    let mut workload = workload_on(&pair, seed, 8 * MIB);
    under_load(&mut workload, 300, || ());
    let old = pair.scratch.join("old");
    std::fs::copy(&pair.owner().cache, &old).expect("a copy of the cache");
    // The image is no larger.
    under_load(&mut workload, 300, || writes_fail(pair.owner(), 8 * MIB));
    pair.owner()
        .wait("the two part", |volume| volume["replication"]["phase"] == "solo")
        .expect("drained");
    workload.disconnect().expect("goodbye");
    pair.hosts[0].daemon.kill().expect("kill");
    comes_back_on(&mut pair, &old, "the cache device had failed");
    let image = pair.image();
    pair.verify_plain(&mut workload, &image).expect("the image has everything");
}

#[test]
fn g1_a_failed_device_that_comes_back_after_the_two_have_parted_is_not_believed() {
    let _turn = one_at_a_time();
    parted_from_a_failed_device(660, "grouped");
    parted_from_a_failed_device(661, "unordered");
}

#[test]
fn g4_a_volume_is_handed_over_and_back_and_nothing_is_lost() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 614);
    for round in 0..ROUNDS {
        under_load(&mut workload, 300, || ());
        let clients = pair.hand_over(&mut workload).expect_err("somebody is connected").to_string();
        assert!(clients.contains("are connected: stop them first"), "{clients}");
        workload.disconnect().expect("goodbye");
        let took = pair.hand_over(&mut workload).expect("it is handed over with everything");
        println!("round {round}: handed over in {} ms", took.as_millis());
        // The one that has handed it over holds the copy, without being started again.
        pair.owner().wait_sync().expect("in sync again");
    }
    // What was handed over counts as any other: its peer takes over from it.
    kill_owner(&mut pair, &mut workload, 300);
    pair.fail_over(&mut workload).expect("nothing is lost");
}

#[test]
fn a_volume_that_cannot_be_handed_over_stays_where_it_is() {
    let _turn = one_at_a_time();
    let mut pair = pair_as_shipped();
    let mut workload = workload(&pair, 615);
    let path = format!("/v1/volumes/{VOLUME}/handoff");
    let hand_over = |pair: &Pair, how: serde_json::Value| {
        pair.owner().admin.call("POST", &path, Some(&how)).expect_err("it cannot be").to_string()
    };
    let elsewhere = hand_over(&pair, serde_json::json!({ "to": "h3" }));
    assert!(elsewhere.contains("not on h3"), "{elsewhere}");
    under_load(&mut workload, 300, || ());
    // The peer does not answer when it is asked, and by then this host has let go.
    pair.hosts[1].daemon.signal(Signal::STOP).expect("it stops");
    let silent = hand_over(&pair, serde_json::json!({ "disconnect": true }));
    assert!(silent.contains("cannot hand volume"), "{silent}");
    pair.hosts[1].daemon.signal(Signal::CONT).expect("it goes on");
    pair.owner().wait_sync().expect("in sync again");
    workload.server_died();
    pair.verify(&mut workload).expect("nothing is lost");
    pair.hosts[1].daemon.kill().expect("kill");
    pair.owner().wait_degraded().expect("alone");
    let alone = hand_over(&pair, serde_json::json!({ "disconnect": true }));
    assert!(alone.contains("it has no second copy in sync"), "{alone}");
    workload.run(500).expect("its clients have not noticed");
    workload.verify().expect("nothing is lost");
}

#[test]
fn a_volume_with_a_second_copy_is_changed_and_removed_like_any_other() {
    let _turn = one_at_a_time();
    let pair = pair();
    let mut workload = workload(&pair, 606);
    workload.run(2000).expect("a run");
    let path = format!("/v1/volumes/{VOLUME}");
    let admin = &pair.owner().admin;
    let set = |mode: &str| admin.call("PATCH", &path, Some(&serde_json::json!({ "mode": mode })));
    set("write-around").expect("another mode");
    assert_eq!(
        pair.owner().volume().expect("a status").expect("it")["replication"]["phase"],
        "solo"
    );
    set("write-back").expect("write-back again");
    pair.owner().wait_sync().expect("in sync again");
    workload.run(2000).expect("a run");
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
    let needed =
        pair.peer().admin.call("DELETE", &path, None).expect_err("the copy counts").to_string();
    assert!(needed.contains("and counts"), "{needed}");
    let removed = admin.call("DELETE", &path, None).expect("it is removed");
    assert_eq!(removed["verified"], true);
    pair.peer().admin.call("DELETE", &path, None).expect("the copy is forgotten");
    assert_eq!(pair.peer().volume().expect("a status"), None);
}
