//! What cores have done, written down by one run of the program and compared by another.

use std::path::Path;
use std::process::{Command, Output};
use tidepool_sim::Kind;
use tidepool_sim::baseline::{Baseline, SETS};

/// Seeds of the lives. Each set of a baseline has them.
const SEEDS: &str = "2..3";

fn sim(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_tidepool-sim")).args(arguments).output();
    output.expect("the program starts")
}

#[test]
fn a_baseline_of_some_seeds_has_their_lives_alone() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("some-lives.txt");
    let file = path.to_str().expect("a path of letters");
    let recorded = sim(&["--record", file, "--seeds", SEEDS]);
    assert!(recorded.status.success(), "{}", String::from_utf8_lossy(&recorded.stderr));
    let text = std::fs::read_to_string(&path).expect("it was written");
    let sets = Baseline::parse(&text).expect("a baseline").sets_within(&(0..u64::MAX));
    let of_these = |set: &tidepool_sim::baseline::Set| set.first == 2 && set.count == 1;
    assert!(sets.len() == SETS.len() && sets.iter().all(of_these), "{sets:?}");
    assert!(sets.iter().any(|set| set.kind == Kind::TwoHosts));
    let compared = sim(&["--compare", file]);
    let told = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && told.starts_with("move: of 3 lives"), "{told}");
}
