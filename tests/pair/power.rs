//! Both hosts lose their power at once, on devices that lose what was not flushed.

use super::under_load;

use serde_json::Value;
use std::time::Duration;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Error, one_at_a_time};
use tidepool_tests::pair::{Pair, PairOptions};
use tidepool_tests::rig::{MIB, VOLUME};

const IMAGE_BYTES: u64 = 16 * MIB;
const ROUNDS: u64 = 3;

fn pair() -> Pair {
    let options = PairOptions {
        cache_bytes: 64 * MIB,
        image: Err(IMAGE_BYTES),
        class: Some("ssd-sata-consumer"),
        ..PairOptions::default()
    };
    Pair::new(&options).expect("two hosts in sync")
}

fn workload(pair: &Pair, seed: u64) -> Workload {
    let mix = Mix { flushes: 2, ..Mix::default() };
    let mut workload = Workload::new(WorkloadOptions {
        mix,
        ..WorkloadOptions::new(rng::seed(seed), IMAGE_BYTES)
    });
    workload.keep_history();
    workload.connect(&pair.owner().socket, VOLUME).expect("connect");
    workload
}

/// The power fails under load: that of both hosts, or of the owner alone.
fn fail(
    pair: &mut Pair,
    workload: &mut Workload,
    rng: &mut Rng,
    power: fn(&mut Pair, u64) -> Result<(), Error>,
) {
    let (ms, seed) = (20 + rng.below(600), rng.word());
    let end = under_load(workload, ms, || {
        pair.owner().wait_sync().expect("in sync");
        power(pair, seed).expect("the power fails");
    });
    assert_eq!(end, Progress::Disconnected);
    workload.server_died();
}

fn serving(pair: &Pair) {
    let served = pair.owner().wait("the volume served", |volume| volume["state"] == "serving");
    served.expect("the owner serves");
}

/// Why the owner does not serve by itself.
fn why_not_served(pair: &Pair) -> String {
    let volume = pair.owner().wait("why it does not serve", |volume| volume["error"].is_string());
    volume.expect("it does not serve by itself")["error"].to_string()
}

#[test]
fn g3_both_hosts_lose_their_power_and_the_owner_waits_for_the_word_of_its_peer() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 621);
    let mut rng = Rng::new(rng::seed(622));
    for round in 0..ROUNDS {
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power);
        let owner = pair.owner;
        let peer_first = round % 2 == 1;
        if peer_first {
            pair.hosts[1 - owner].daemon.start().expect("it starts");
            let refused = pair.peer().take_over(false).expect_err("it was restarted").to_string();
            assert!(
                refused.contains("on a boot that is over") && refused.contains("--accept-loss"),
                "{refused}"
            );
        }
        pair.hosts[owner].daemon.start().expect("it starts");
        if !peer_first {
            let alone = why_not_served(&pair);
            assert!(
                alone.contains("this host was restarted") && alone.contains("accept the loss"),
                "{alone}"
            );
            pair.hosts[1 - owner].daemon.start().expect("it starts");
        }
        serving(&pair);
        let lost = pair.compare(&mut workload, IMAGE_BYTES).expect("it is compared");
        println!("round {round}: {lost:?}");
        pair.owner().wait_sync().expect("in sync again");
    }
}

#[test]
fn g3_both_hosts_lose_their_power_and_only_the_copy_comes_back() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 623);
    let mut rng = Rng::new(rng::seed(624));
    for round in 0..ROUNDS {
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power);
        let peer = 1 - pair.owner;
        pair.hosts[peer].daemon.start().expect("it starts");
        let refused = pair.peer().take_over(false).expect_err("it was restarted").to_string();
        assert!(refused.contains("--accept-loss"), "{refused}");
        pair.peer().take_over(true).expect("a user who says so gets what was flushed");
        pair.owner = peer;
        let lost = pair.compare(&mut workload, IMAGE_BYTES).expect("it is compared");
        println!("round {round}: {lost:?}");
        // The other one comes back later, and holds the copy.
        pair.hosts[1 - peer].daemon.start().expect("it starts");
        pair.owner().wait_sync().expect("in sync again");
    }
}

#[test]
fn g3_both_hosts_lose_their_power_and_only_the_owner_comes_back() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 625);
    let mut rng = Rng::new(rng::seed(626));
    for round in 0..ROUNDS {
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power);
        let owner = pair.owner;
        pair.hosts[owner].daemon.start().expect("it starts");
        let alone = why_not_served(&pair);
        let figures = ["newest records of 20", "has all that the volume was at 20"];
        assert!(
            figures.iter().any(|figures| alone.contains(figures))
                && alone.contains("nothing of it was flushed"),
            "{alone}"
        );
        println!("round {round}: {alone}");
        let refused =
            pair.owner().take_over(false).expect_err("nobody has accepted it").to_string();
        assert!(refused.contains("--accept-loss"), "{refused}");
        pair.owner().take_over(true).expect("a user who says so gets what was flushed");
        serving(&pair);
        let lost = pair.compare(&mut workload, IMAGE_BYTES).expect("it is compared");
        println!("round {round}: {lost:?}");
        // What the other one has is the past now, whether or not it was more.
        pair.hosts[1 - owner].daemon.start().expect("it starts");
        pair.owner().wait_sync().expect("in sync again");
    }
    let whole = workload.verify().expect("every sector is read");
    assert_eq!(whole, Progress::Done, "nothing that was not there came back");
}

#[test]
fn g4_an_owner_that_has_lost_its_power_gets_from_its_peer_what_it_has_lost() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 627);
    let mut rng = Rng::new(rng::seed(628));
    let mut fetched = 0;
    for round in 0..2 * ROUNDS {
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power_of_owner);
        let host = &mut pair.hosts[pair.owner];
        if round % 3 == 2 {
            // Once more while it gets them, perhaps.
            host.daemon.start().expect("it starts");
            std::thread::sleep(Duration::from_millis(rng.below(100)));
            pair.fail_power_of_owner(rng.word()).expect("the power fails");
        }
        let host = &mut pair.hosts[pair.owner];
        host.daemon.start().expect("it starts");
        serving(&pair);
        // Not only what was flushed: all that was acknowledged.
        pair.verify(&mut workload).expect("nothing is missing");
        let log = pair.owner().daemon.log();
        let said: Vec<&str> =
            log.lines().filter(|line| line.contains("its newest records")).collect();
        fetched += said.len();
        println!("round {round}: {said:?}");
        pair.owner().wait_sync().expect("in sync again");
    }
    assert!(fetched > 0, "no power loss has taken anything with it");
}

#[test]
fn g4_what_cannot_be_got_from_the_peer_is_taken_over_there() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 629);
    let mut rng = Rng::new(rng::seed(630));
    for round in 0..20 {
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power_of_owner);
        // Where its records stand in the log the peer's daemon knows as long as it runs.
        let peer = 1 - pair.owner;
        pair.hosts[peer].daemon.kill().expect("kill");
        pair.hosts[peer].daemon.start().expect("it starts");
        let owner = pair.owner;
        pair.hosts[owner].daemon.start().expect("it starts");
        let is_known = |volume: &Value| volume["state"] == "serving" || volume["error"].is_string();
        let known = pair.owner().wait("served, or not", is_known).expect("one of the two");
        if known["state"] == "serving" {
            println!("round {round}: nothing was lost");
            pair.verify(&mut workload).expect("nothing is missing");
            pair.owner().wait_sync().expect("in sync again");
            continue;
        }
        // It says so, also after a restart that finds a copy.
        for _ in 0..2 {
            let why = why_not_served(&pair);
            assert!(why.contains("cannot be had") && why.contains("volume takeover"), "{why}");
            println!("round {round}: {why}");
            pair.hosts[owner].daemon.terminate().expect("it stops");
            pair.hosts[owner].daemon.start().expect("it starts");
        }
        // While it tries, the image is locked for a moment.
        why_not_served(&pair);
        pair.peer().take_over(false).expect("it has everything");
        pair.owner = peer;
        pair.verify(&mut workload).expect("nothing is missing");
        pair.owner().wait_sync().expect("in sync again");
        // The host that was refused holds a copy like any other, and says so.
        let former = pair.hosts[owner].wait("a copy", |volume| volume["state"] == "replica");
        assert!(former.expect("a copy")["error"].is_null());
        fail(&mut pair, &mut workload, &mut rng, Pair::fail_power_of_owner);
        pair.hosts[owner].take_over(false).expect("it has everything");
        pair.owner = owner;
        return pair.verify(&mut workload).expect("nothing is missing");
    }
    panic!("no power loss has taken anything with it");
}
