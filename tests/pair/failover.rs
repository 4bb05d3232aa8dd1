//! A program that watches the hosts has the volumes of a dead one served by its peer:
//! `tidepool volume failover`.

use super::*;
use serde_json::{Value, json};
use tidepool_cluster::device::faults::{Act, Remains};
use tidepool_cluster::device::{Emulated, preset};
use tidepool_testkit::Admin;
use tidepool_testkit::admin::in_sync;
use tidepool_tests::failover::{Ended, ended, fail_over, start_failover};

/// What a record says beside the time: it must not change where a failover is refused.
pub(super) fn record(pair: &Pair) -> String {
    std::fs::read_to_string(pair.scratch.join("image.tidepool")).expect("a record")
}

/// What is refused says why in one line, names the owner, and changes nothing.
#[track_caller]
fn refused(pair: &Pair, host: usize, arguments: &[&str], owner: Option<&str>, why: &str) {
    let before = record(pair);
    let ended = fail_over(&pair.hosts[host], arguments).expect("it runs");
    assert_eq!(ended.status, 1, "{ended:?}");
    let report = ended.volume();
    assert_eq!(report["outcome"], "refused", "{ended:?}");
    assert_eq!(report["owner"].as_str(), owner, "{ended:?}");
    assert!(ended.error.contains(why) && ended.error.lines().count() == 1, "{ended:?}");
    assert_eq!(format!("tidepool: {}", report["why"].as_str().unwrap_or_default()), ended.error);
    assert_eq!(record(pair), before);
}

#[track_caller]
fn done(ended: &Ended, outcome: &str) {
    assert_eq!(ended.status, 0, "{ended:?}");
    assert_eq!(ended.volume()["outcome"], outcome, "{ended:?}");
}

/// The volume is served by another host: the workload, whose server is gone, goes on there with all
/// that it was told.
pub(super) fn goes_on(pair: &mut Pair, workload: &mut Workload, owner: usize) {
    pair.owner = owner;
    workload.server_died();
    pair.verify(workload).expect("nothing is lost");
}

/// The host that holds the copy of a volume in sync.
pub(super) fn holder(pair: &Pair) -> usize {
    pair.owner().holder().expect("in sync")
}

#[test]
fn g4_the_volumes_of_a_fenced_host_are_served_by_its_peer_with_everything() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 640);
    for round in 0..2 {
        let to = holder(&pair);
        let owner = kill_owner(&mut pair, &mut workload, 200);
        let fenced = format!("h{owner}");
        let named = [VOLUME, "--fenced", &fenced];
        // By name, or all of that host's.
        let arguments = if round % 2 == 0 { &named[..] } else { &named[1..] };
        let since = Instant::now();
        let taken = fail_over(&pair.hosts[to], arguments).expect("it runs");
        println!("round {round}: failed over in {} ms", since.elapsed().as_millis());
        done(&taken, "taken-over");
        assert_eq!(taken.volume()["owner"], format!("h{to}"), "{taken:?}");
        assert_eq!(taken.volume()["why"], format!("from {fenced}"), "{taken:?}");
        // A hook is called at each start of a guest.
        done(&fail_over(&pair.hosts[to], &named).expect("it runs"), "here");
        done(&fail_over(&pair.hosts[to], &[VOLUME]).expect("it runs"), "here");
        let none = fail_over(&pair.hosts[to], &named[1..]).expect("it runs");
        assert_eq!(
            (none.status, none.output.trim()),
            (0, "[]"),
            "nothing of that host is left: {none:?}"
        );
        goes_on(&mut pair, &mut workload, to);
        pair.hosts[owner].daemon.start().expect("it starts");
        pair.owner().wait_sync().expect("in sync again");
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g6_a_host_that_is_alive_is_not_failed_over_whatever_is_said_of_its_fence() {
    let _turn = one_at_a_time();
    let pair = hosts(true);
    let mut workload = workload(&pair, 641);
    let (to, third) = (holder(&pair), 3 - holder(&pair));
    under_load(&mut workload, 200, || {
        // What is refused is refused as long as the two are in sync.
        let refused = |host, arguments: &[&str], owner, why| {
            pair.owner().wait_sync().expect("in sync");
            refused(&pair, host, arguments, owner, why);
        };
        // It is a decision, and not tried again.
        refused(
            to,
            &[VOLUME, "--fenced", "h0", "--wait", "60m"],
            Some("h0"),
            "host h0 is alive: its daemon was heard",
        );
        refused(to, &["--fenced", "h0"], Some("h0"), "host h0 is alive");
        refused(
            to,
            &[VOLUME],
            Some("h0"),
            "host h0 may still be running; confirm that it is fenced",
        );
        refused(to, &[VOLUME, "--fenced", "h7"], Some("h0"), "host h0 owns it, not h7");
        refused(third, &[VOLUME, "--fenced", "h0"], None, "no copy of it is in this cache");
        let nothing = fail_over(&pair.hosts[to], &["--fenced", "h7"]).expect("it runs");
        assert_eq!((nothing.status, nothing.output.trim()), (0, "[]"), "{nothing:?}");
        done(&fail_over(pair.owner(), &[VOLUME, "--fenced", "h7"]).expect("it runs"), "here");
    });
    pair.owner().wait_sync().expect("in sync");
    let follows = |copy: &Value| copy["followed"]["host"] == "h0" && copy["owner"]["host"] == "h0";
    pair.hosts[to].wait("a copy that follows its owner", follows).expect("h0 is the owner");
    workload.verify().expect("nothing is lost");
}

#[test]
fn a_dead_host_is_not_failed_over_before_it_is_said_to_be_fenced() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 642);
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 200);
    let why = "host h0 may still be running; confirm that it is fenced with --fenced h0";
    refused(&pair, to, &[VOLUME], Some("h0"), why);
    refused(
        &pair,
        to,
        &[VOLUME, "--fenced", "h1.example"],
        Some("h0"),
        "host h0 owns it, not h1.example",
    );
    let copy = pair.hosts[to].volume().expect("a status").expect("a copy");
    assert_eq!(
        (&copy["state"], &copy["owner"]["host"]),
        (&"replica".into(), &"unknown".into()),
        "{copy}"
    );
    done(&fail_over(&pair.hosts[to], &[VOLUME, "--fenced", "h0"]).expect("it runs"), "taken-over");
    goes_on(&mut pair, &mut workload, to);
}

#[test]
fn g4_a_copy_that_does_not_count_is_not_failed_over() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 643);
    let to = holder(&pair);
    // No host holds a copy that counts from here on.
    for at in [1, 2] {
        pair.hosts[at].daemon.kill().expect("kill");
    }
    pair.owner().wait_degraded().expect("alone");
    under_load(&mut workload, 200, || ());
    pair.hosts[0].daemon.kill().expect("kill");
    pair.hosts[to].daemon.start().expect("it starts");
    refused(&pair, to, &[VOLUME, "--fenced", "h0"], Some("h0"), "h0 alone has its newest data");
    pair.hosts[0].daemon.start().expect("it starts");
    goes_on(&mut pair, &mut workload, 0);
}

#[test]
fn g4_a_host_that_was_restarted_since_loses_nothing_by_itself() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 648);
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 200);
    pair.hosts[to].reboot(649).expect("it comes back");
    let why = format!(
        "`tidepool volume takeover {VOLUME} --accept-loss` takes what this cache has of it"
    );
    refused(&pair, to, &[VOLUME, "--fenced", "h0"], Some("h0"), &why);
    pair.hosts[0].daemon.start().expect("it starts");
    goes_on(&mut pair, &mut workload, 0);
}

#[test]
fn two_that_ask_at_once_are_both_served() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 644);
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 200);
    let arguments = [VOLUME, "--fenced", "h0"];
    let both = [(); 2].map(|()| start_failover(&pair.hosts[to], &arguments).expect("it starts"));
    let mut outcomes = both.map(|child| {
        let ended = ended(child).expect("it ends");
        assert_eq!(ended.status, 0, "{ended:?}");
        ended.volume()["outcome"].as_str().expect("an outcome").to_owned()
    });
    outcomes.sort();
    assert_eq!(outcomes, ["here", "taken-over"]);
    goes_on(&mut pair, &mut workload, to);
}

/// One more volume of the owner's, with a copy in sync.
pub(super) fn add_volume(pair: &Pair, name: &str, image: &str) {
    let body = json!({ "name": name, "backend": image });
    let admin = &pair.owner().admin;
    admin.call("POST", "/v1/volumes", Some(&body)).expect("it is served");
    wait_in_sync(pair, name);
}

/// Waits until a volume of the owner's has a copy in sync.
pub(super) fn wait_in_sync(pair: &Pair, name: &str) {
    pair.owner().admin.wait_volume(name, Duration::from_secs(60), in_sync).expect("in sync");
}

/// The image of one volume does not answer while its host's volumes are taken over: the others are
/// not held up by it.
#[test]
fn g8_an_image_that_does_not_answer_holds_up_its_own_volume_alone() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 649);
    let spec = preset::find("ssd-sata-consumer").expect("a class of the lab").spec;
    let place = |what: &str| pair.scratch.join(what);
    let device = Emulated::start(spec, 64 * MIB, &[], &place("backing"), &place("device"))
        .expect("a device");
    let image = device.directory().join("image");
    File::create(&image).and_then(|file| file.set_len(16 * MIB)).expect("an image");
    add_volume(&pair, "stuck", &format!("file:{}", image.display()));
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 100);
    device.faults().plan(|_| Act::Hold(Remains::Nothing));
    let path = "/v1/volumes/stuck/takeover";
    let admin = Admin::new(pair.hosts[to].admin.socket());
    let stuck = std::thread::spawn(move || {
        admin.call("POST", path, Some(&json!({ "accept_loss": false })))
    });
    assert!(device.faults().wait_held(Duration::from_secs(60)), "nothing is asked of its image");
    let both = fail_over(&pair.hosts[to], &["--fenced", "h0", "--wait", "15s"]).expect("it runs");
    let outcome =
        |volume: &Value| format!("{} {}", volume["name"], volume["outcome"]).replace('"', "");
    let outcomes: Vec<_> = both.volumes().iter().map(outcome).collect();
    assert_eq!(outcomes, ["stuck refused", "vm taken-over"], "{both:?}");
    goes_on(&mut pair, &mut workload, to);
    // However often somebody asks.
    let threads = || {
        let daemon = pair.hosts[to].daemon.id().expect("it runs");
        std::fs::read_dir(format!("/proc/{daemon}/task")).expect("its threads").count()
    };
    let before = threads();
    let arguments = ["stuck", "--fenced", "h0", "--wait", "0s"];
    let all = [(); 8].map(|()| start_failover(&pair.hosts[to], &arguments).expect("it starts"));
    for child in all {
        let ended = ended(child).expect("it ends");
        assert_eq!(ended.status, 1, "{ended:?}");
    }
    assert!(threads() < before + 4, "{before} threads, then {}", threads());
    assert!(!stuck.is_finished());
    device.faults().disconnect();
    // What its image answers now is an error; that it is there again is found without asking again.
    let _ = stuck.join().expect("no panic");
    device.faults().reconnect();
    let arguments = ["stuck", "--fenced", "h0"];
    done(&fail_over(&pair.hosts[to], &arguments).expect("it runs"), "taken-over");
}

/// The daemon that takes over is killed in the middle, at any moment of it, and started again: the
/// hook is called again.
#[test]
fn g4_a_failover_that_is_cut_short_is_finished_by_the_next() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 645);
    let mut rng = Rng::new(rng::seed(646));
    for _ in 0..ROUNDS {
        let to = holder(&pair);
        let owner = kill_owner(&mut pair, &mut workload, 100);
        let fenced = format!("h{owner}");
        let first =
            start_failover(&pair.hosts[to], &[VOLUME, "--fenced", &fenced]).expect("it starts");
        std::thread::sleep(Duration::from_millis(rng.below(60)));
        pair.hosts[to].daemon.kill().expect("kill");
        ended(first).expect("it ends");
        pair.hosts[to].daemon.start().expect("it starts");
        let again = fail_over(&pair.hosts[to], &[VOLUME, "--fenced", &fenced]).expect("it runs");
        assert_eq!(again.status, 0, "{again:?}; log: {}", pair.hosts[to].daemon.log_tail());
        println!("{}", again.volume()["outcome"]);
        goes_on(&mut pair, &mut workload, to);
        pair.hosts[owner].daemon.start().expect("it starts");
        pair.owner().wait_sync().expect("in sync again");
    }
    workload.disconnect().expect("goodbye");
}

/// What is in the way may pass: an owner that was only stopped still holds the lock of its image.
#[test]
fn what_may_pass_is_tried_again_for_as_long_as_is_said() {
    let _turn = one_at_a_time();
    let mut pair = hosts(true);
    let mut workload = workload(&pair, 647);
    let to = holder(&pair);
    under_load(&mut workload, 100, || ());
    pair.owner().wait_sync().expect("in sync");
    pair.hosts[0].daemon.signal(Signal::STOP).expect("it stops");
    let since = Instant::now();
    refused(&pair, to, &[VOLUME, "--fenced", "h0", "--wait", "1s"], Some("h0"), "in use");
    assert!(since.elapsed() >= Duration::from_secs(1));
    let waiting = start_failover(&pair.hosts[to], &[VOLUME, "--fenced", "h0"]).expect("it starts");
    std::thread::sleep(Duration::from_secs(2));
    pair.hosts[0].daemon.kill().expect("kill");
    done(&ended(waiting).expect("it ends"), "taken-over");
    goes_on(&mut pair, &mut workload, to);
}

/// The hook of a guest that arrives by a live migration finds that its volume comes with it.
#[test]
fn a_volume_that_arrives_with_a_running_guest_is_no_failover() {
    let _turn = one_at_a_time();
    let pair = hosts(true);
    let to = holder(&pair);
    refused(&pair, to, &[VOLUME], Some("h0"), "may still be running");
    let offered = pair.offer(Some(to)).expect("clients are let in over there");
    assert_eq!(offered["live"], true, "{offered}");
    done(&fail_over(&pair.hosts[to], &[VOLUME]).expect("it runs"), "arriving");
    assert_eq!(pair.hosts[to].volume().expect("a status").expect("a copy")["state"], "replica");
}
