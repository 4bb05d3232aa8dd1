//! Three hosts in network namespaces, over TLS with certificates of both sides: black holes, ways
//! that lose one direction only, and cables that are pulled and plugged in again and again.

use super::{load_during, under_load};

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Progress, Workload};
use tidepool_testkit::{Error, one_at_a_time};
use tidepool_tests::trio::{Loss, Probe, Trio};

/// What a client is told whose volume another host has taken over.
const EIO: u32 = 5;
/// Losses of a way while a link flaps.
const FLAPS: u64 = 8;
/// Moments of the two-way race on Ceph: how long after the way was lost the peer is told to take
/// over.
const RACES_MS: [u64; 3] = [0, 150, 320];

/// Waits under load until the owner's report of the volume is as wanted.
fn wait_under_load(trio: &Trio, workload: &mut Workload, what: &str, is: impl Fn(&Value) -> bool) {
    let (stop, owner) = (AtomicBool::new(false), trio.owner());
    let (end, found) = std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        let found = owner.wait(what, is);
        stop.store(true, Ordering::Relaxed);
        (run.join().expect("no panic"), found)
    });
    found.expect("the state comes while clients write");
    assert_eq!(end.expect("no request fails"), Progress::Done);
}

/// The owner dies and the holder of the copy goes on with everything; nobody else could have.
fn lose_the_owner(trio: &mut Trio, workload: &mut Workload) {
    let (owner, holder) = (trio.owner, trio.holder().expect("two in sync"));
    assert_eq!(trio.wait_one_serving().expect("one"), owner);
    let hosts = &mut trio.hosts;
    let end = under_load(workload, 300, || {
        hosts[owner].wait_sync().expect("in sync");
        hosts[owner].daemon.kill().expect("kill");
    });
    assert_eq!(end, Progress::Disconnected);
    let stranger = 3 - owner - holder;
    trio.hosts[stranger].take_over(false).expect_err("its copy does not count, if it has one");
    trio.fail_over(holder, workload).expect("nothing is lost");
    assert_eq!(trio.wait_one_serving().expect("one"), holder);
}

/// The holder of the copy is lost under load for good, and the other one gets it.
fn lose_the_holder(trio: &Trio, workload: &mut Workload, lost: impl Fn(usize) -> Loss) {
    let holder = trio.holder().expect("two in sync");
    let next = 3 - trio.owner - holder;
    let loss = lost(holder);
    under_load(workload, 200, || ());
    trio.set(loss, false);
    // Otherwise the next one is asked first, and has the copy in a moment.
    if holder < next {
        wait_under_load(trio, workload, "write-through without a second copy", |volume| {
            volume["replication"]["phase"] == "solo" && volume["mode"] == "write-through"
        });
    }
    wait_under_load(trio, workload, "a copy on the next peer in order", |volume| {
        in_sync(volume) && volume["mode"] == "write-back" && volume["peer"] == format!("h{next}")
    });
    workload.verify().expect("nothing is lost");
    // The one that was lost still has its copy, which does not count any more.
    let old = loop {
        let old = trio.hosts[holder].take_over(false).expect_err("it is not in sync").to_string();
        // On a busy machine the next one may lose its place for a moment.
        if !old.contains("h0 alone") && !old.contains("h1 alone") && !old.contains("h2 alone") {
            break old;
        }
        wait_under_load(trio, workload, "a copy on the next peer in order again", in_sync);
    };
    assert!(old.contains(&format!("h{next} as the holder")), "{old}");
    trio.set(loss, true);
    under_load(workload, 300, || ());
    assert_eq!(trio.holder().expect("in sync"), next, "a copy stays where it is");
}

#[test]
fn g8_behind_a_black_hole_the_next_peer_in_order_gets_the_copy() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(640);
    assert_eq!(trio.holder().expect("in sync"), 1, "the first peer in order");
    let owner = trio.owner;
    lose_the_holder(&trio, &mut workload, Loss::Cable);
    lose_the_holder(&trio, &mut workload, |holder| Loss::OneWay { from: owner, to: holder });
    lose_the_holder(&trio, &mut workload, |holder| Loss::OneWay { from: holder, to: owner });
    lose_the_owner(&mut trio, &mut workload);
    trio.hosts[owner].daemon.start().expect("it starts");
    trio.owner().wait_sync().expect("in sync again");
    workload.verify().expect("nothing is lost");
}

/// Whether a client of the old owner reads what the new one has overwritten before.
fn reads_what_was(probe: &mut Probe, old: u8) -> bool {
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        match probe.read() {
            Some(byte) if byte == old => return true,
            Some(_) => std::thread::sleep(Duration::from_millis(1)),
            // Held until the old owner knows, or refused.
            None => return false,
        }
    }
    false
}

/// A way is lost under load, and `after_ms` later the peer is told to take over. One of the two
/// serves then, with everything that either has acknowledged. Returns what has come of it.
fn race(trio: &mut Trio, workload: &mut Workload, loss: Loss, after_ms: u64) -> String {
    let (owner, holder) = (trio.owner, trio.holder().expect("two in sync"));
    let mut probe = Probe::new(&trio.owner().socket).expect("it serves");
    assert!(probe.write(1), "it serves");
    let (hosts, gauge) = (&trio.hosts, workload.gauge());
    let (mut taken, mut stale) = (None, false);
    let set = |works| trio.set(loss, works);
    let end = load_during(workload, 300, || {
        hosts[owner].wait_sync().expect("in sync");
        set(false);
        std::thread::sleep(Duration::from_millis(after_ms));
        let took = hosts[holder].take_over(false);
        if took.is_ok() {
            let mut new = Probe::patient(&hosts[holder].socket).expect("it serves");
            assert!(new.write(2), "it serves");
            stale = reads_what_was(&mut probe, 1);
            assert_eq!(new.read(), Some(2), "what it has acknowledged");
            gauge.give_up();
        }
        taken = Some(took);
    });
    assert!(!stale, "the old owner has answered a read after the new one had acknowledged a write");
    let taken = taken.expect("it was told to");
    let told = match &taken {
        Ok(took) => {
            workload.server_died();
            // One answer for each connection.
            for told in [end, workload.run(0)] {
                let over = matches!(
                    told,
                    Ok(Progress::Disconnected) | Err(Error::Refused { errno: EIO, .. })
                );
                assert!(over, "the old owner goes on for nobody: {told:?}");
            }
            trio.follow(holder, workload).expect("nothing is lost");
            format!("taken over in {} ms", took.as_millis())
        }
        Err(error) => {
            let error = error.to_string();
            assert_eq!(end.expect("no request fails"), Progress::Done, "{error}");
            format!("stays: {error}")
        }
    };
    assert_eq!(trio.wait_one_serving().expect("one"), trio.owner, "{told}");
    workload.run(300).expect("it is written right afterwards");
    workload.verify().expect("nothing is lost");
    assert_eq!(
        (taken.is_ok(), trio.owner),
        (trio.owner == holder, if taken.is_ok() { holder } else { owner })
    );
    trio.set(loss, true);
    trio.owner().wait_sync().expect("in sync again");
    assert_eq!(trio.wait_one_serving().expect("one"), trio.owner);
    told
}

#[test]
fn g6_of_two_that_cannot_hear_each_other_one_serves() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_ceph().expect("three hosts and a cluster");
    let mut workload = trio.workload(641);
    for after_ms in RACES_MS {
        for direction in 0..2 {
            let (owner, holder) = (trio.owner, trio.holder().expect("two in sync"));
            let (from, to) = if direction == 0 { (owner, holder) } else { (holder, owner) };
            let told = race(&mut trio, &mut workload, Loss::OneWay { from, to }, after_ms);
            println!(
                "h{to} does not hear h{from}, owner h{owner}, asked after {after_ms} ms: {told}"
            );
        }
    }
    // Without a cable the owner reaches nobody who could tell it that it has been taken over.
    let owner = trio.owner;
    let told = race(&mut trio, &mut workload, Loss::Cable(owner), 700);
    assert_ne!(trio.owner, owner, "{told}");
    println!("the cable of h{owner} is pulled: {told}");
    lose_the_owner(&mut trio, &mut workload);
}

/// Loses a way between the owner and one of the others, or the cable of one of the two, for a
/// moment.
fn flap(trio: &Trio, rng: &mut Rng) {
    let owner = trio.owner;
    let other = (owner + 1 + rng.below(2) as usize) % 3;
    let loss = match rng.below(4) {
        0 => Loss::OneWay { from: owner, to: other },
        1 => Loss::OneWay { from: other, to: owner },
        2 => Loss::Cable(owner),
        _ => Loss::Cable(other),
    };
    trio.set(loss, false);
    std::thread::sleep(Duration::from_millis(50 + rng.below(650)));
    trio.set(loss, true);
    std::thread::sleep(Duration::from_millis(50 + rng.below(650)));
}

#[test]
fn g4_cables_that_are_pulled_again_and_again_lose_nothing() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(642);
    let mut rng = Rng::new(rng::seed(643));
    let end = under_load(&mut workload, 200, || (0..FLAPS).for_each(|_| flap(&trio, &mut rng)));
    assert_eq!(end, Progress::Done, "no request fails");
    workload.verify().expect("nothing is lost");
    lose_the_owner(&mut trio, &mut workload);
}

/// Cables are pulled while a daemon is killed and started again. The host that serves then has
/// everything.
fn lose_while_flapping(trio: &mut Trio, workload: &mut Workload, rng: &mut Rng, victim: usize) {
    let owner = trio.owner;
    let before = 1 + rng.below(4);
    let end = under_load(workload, 100, || {
        (0..before).for_each(|_| flap(trio, rng));
        trio.set(Loss::Cable(owner), false);
        std::thread::sleep(Duration::from_millis(rng.below(400)));
        trio.hosts[victim].daemon.kill().expect("kill");
        trio.set(Loss::Cable(owner), true);
        flap(trio, rng);
    });
    assert_eq!(end, if victim == owner { Progress::Disconnected } else { Progress::Done });
    if victim == owner {
        // Whether a copy counted at that moment is for the record to say.
        let taken =
            (1..3).map(|by| (owner + by) % 3).find(|by| trio.hosts[*by].take_over(false).is_ok());
        trio.hosts[victim].daemon.start().expect("it starts");
        trio.owner = trio.wait_one_serving().expect("one");
        assert_eq!(trio.owner, taken.unwrap_or(owner), "who has taken it over has it");
        workload.server_died();
        trio.verify(workload).expect("nothing is lost");
        println!("h{owner} was killed, h{} serves", trio.owner);
    } else {
        trio.hosts[victim].daemon.start().expect("it starts");
    }
    under_load(workload, 100, || flap(trio, rng));
    trio.owner().wait_sync().expect("in sync in the end");
    workload.verify().expect("nothing is lost");
}

#[test]
fn g4_hosts_that_die_while_cables_are_pulled_lose_nothing() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(644);
    let mut rng = Rng::new(rng::seed(645));
    for round in 0..2 {
        let victim = if round % 2 == 0 { trio.holder().expect("two in sync") } else { trio.owner };
        lose_while_flapping(&mut trio, &mut workload, &mut rng, victim);
    }
    lose_the_owner(&mut trio, &mut workload);
}
