//! A fixed range of seeds, each a life of the core full of faults. `tidepool-sim --seeds FROM..TO` runs others.

use tidepool_sim::coverage::Coverage;
use tidepool_sim::run;

/// Simulated seconds of one life.
const SECONDS: u64 = 60;

/// One of the few lives in which a block is lost on a dead device before it is drained.
const RARE: u64 = 1202;

#[test]
fn g1_g2_g3_g7_g8_hold_in_every_life() {
    let mut coverage = Coverage::default();
    let mut failed = Vec::new();
    for seed in (1000..1100).chain([RARE]) {
        let outcome = run(seed, SECONDS, false);
        coverage.merge(&outcome.coverage);
        if let Some(what) = outcome.failure {
            failed.push(format!("{what}\nreplay: tidepool-sim --seed {seed} --seconds {SECONDS}"));
        }
    }
    println!("{coverage}");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let missing = coverage.missing();
    assert!(missing.is_empty(), "nothing is said about {missing:?}: take more seeds, or make it more likely");
}

#[test]
fn a_seed_replays_to_the_last_event() {
    for seed in [1001, 1002, 1003] {
        let (first, second) = (run(seed, SECONDS, false), run(seed, SECONDS, false));
        assert_eq!((first.steps, first.hash), (second.steps, second.hash), "seed {seed}");
    }
}
