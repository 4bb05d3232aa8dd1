//! Two hosts with a copy of a volume each, through faults that nobody has seen before.

use tidepool_sim::crowd::Crowd;
use tidepool_sim::pair;

/// Simulated seconds of one life.
const SECONDS: u64 = 4;
/// Lives.
const SEEDS: u64 = 1_000;

#[test]
fn g4_g6_hold_whatever_happens_to_two_hosts_and_their_link() {
    let mut crowd = Crowd::of_pairs(SECONDS);
    let failures = crowd.fresh_failures(SEEDS, |coverage| coverage.missing_of_pairs(1));
    println!("{crowd}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let missing = crowd.coverage.missing_of_pairs(1);
    assert!(missing.is_empty(), "nothing is said about {missing:?}: take more seeds, or make it more likely");
}

#[test]
fn a_seed_replays_to_the_last_event() {
    for seed in [1, 2, 3] {
        let (first, second) = (pair::run(seed, SECONDS, false), pair::run(seed, SECONDS, false));
        assert_eq!((first.steps, first.hash), (second.steps, second.hash), "seed {seed}");
    }
}
