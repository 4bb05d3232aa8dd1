//! A fixed set of lives of the core, full of faults, that reach everything. New ones are lived by
//! `make soak`.

use tidepool_sim::crowd::{Crowd, Seeds};
use tidepool_sim::recording::Recording;
use tidepool_sim::{Kind, Life};

/// Simulated seconds of one life of one host, and of two.
const SECONDS: u64 = 6;
const PAIR_SECONDS: u64 = 4;
/// What the lives of one host come to at least.
const EVENTS: u64 = 200_000;

/// Lives the lives of a set of seeds, and further ones in search of what the set has missed,
/// because the simulator has changed since its seeds were chosen.
fn lived(kind: Kind, seconds: u64, set: &str) -> Crowd {
    let mut crowd = Crowd::new(kind, seconds);
    let seeds = Seeds::parse(set).expect("a set of seeds");
    let mut failures = crowd.failures(&Seeds::Of(seeds));
    let missing = crowd.missing();
    if !missing.is_empty() {
        println!(
            "the set of {} seeds says nothing about {missing:?}: `make seeds` renews it",
            kind.name()
        );
        failures.extend(crowd.search());
    }
    println!("{crowd}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let missing = crowd.missing();
    assert!(
        missing.is_empty(),
        "nothing is said about {missing:?}: make it more likely, or renew the set: make seeds"
    );
    crowd
}

#[test]
fn g1_g2_g3_g5_g7_g8_hold_in_every_life() {
    let crowd = lived(Kind::OneHost, SECONDS, include_str!("../seeds/one-host.txt"));
    assert!(crowd.steps() >= EVENTS, "only {} events", crowd.steps());
}

#[test]
fn g4_g6_hold_whatever_happens_to_two_hosts_and_their_link() {
    lived(Kind::TwoHosts, PAIR_SECONDS, include_str!("../seeds/two-hosts.txt"));
}

#[test]
fn a_seed_replays_to_the_last_event() {
    for (kind, seconds) in [(Kind::OneHost, SECONDS), (Kind::TwoHosts, PAIR_SECONDS)] {
        for seed in [1001, 1002, 1003] {
            let life = Life { kind, seed, seconds };
            let (first, second) = (life.run(false), life.run(false));
            assert_eq!((first.steps, first.hashes), (second.steps, second.hashes), "{life:?}");
        }
    }
}

#[test]
fn a_recorded_life_is_lived_again_without_its_seed() {
    for (kind, seconds) in [(Kind::OneHost, SECONDS), (Kind::TwoHosts, PAIR_SECONDS)] {
        let (outcome, recording) = Recording::of(Life { kind, seed: 1001, seconds });
        let mut read =
            Recording::parse(&recording.to_string()).expect("what was written can be read");
        assert_eq!(read, recording);
        // Everything comes from what was drawn.
        read.life.seed = 5;
        let again = read.replay(false);
        assert_eq!((again.steps, again.hashes), (outcome.steps, outcome.hashes), "{kind:?}");
    }
}

#[test]
fn what_is_no_recording_is_told_on_one_line() {
    let whole = Recording::of(Life { kind: Kind::TwoHosts, seed: 1, seconds: 0 }).1.to_string();
    let with = |from: &str, to: &str| whole.replacen(from, to, 1);
    for (text, why) in [
        (String::new(), "not a recording"),
        ("seed 5".into(), "not a recording"),
        (with("recording 2", "recording 1"), "another version"),
        (with("two-hosts", "three-hosts"), "line 2: there is no kind"),
        (with("seed 1", "seed x"), "line 3: \"x\" is not a number"),
        (with("seed 1\n", ""), "no line says the seed"),
        (whole[..whole.len() / 2].to_owned(), ""),
        (with("end", "end\nend"), "more behind the end"),
    ] {
        let told = Recording::parse(&text).expect_err("it is none");
        assert!(told.contains(why) && told.lines().count() == 1, "{told}");
    }
}

/// Lives that once showed a bug, and one of each kind, so that what was recorded stays readable.
#[test]
fn recorded_lives_go_well() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/recordings");
    let mut lived = 0;
    for entry in std::fs::read_dir(directory).expect("the recordings") {
        let path = entry.expect("a recording").path();
        let text = std::fs::read_to_string(&path).expect("a text");
        let recording =
            Recording::parse(&text).unwrap_or_else(|what| panic!("{}: {what}", path.display()));
        let failure = recording.replay(false).failure;
        assert!(failure.is_none(), "{}: {}", path.display(), failure.unwrap_or_default());
        lived += 1;
    }
    assert!(lived > 0, "there is none");
}
