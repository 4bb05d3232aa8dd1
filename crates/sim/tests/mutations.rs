//! Every deliberate bug of the core is noticed, and those in the table of `docs/mutations.md` are all that there are.

use tidepool_engine::mutation::{Mutation, set};
use tidepool_sim::mutants::{hunt, hunt_all, known, life};
use tidepool_sim::recording::Recording;

/// The table of the bugs, each with the seed that shows it.
const TABLE: &str = include_str!("../../../docs/mutations.md");
/// Seeds that are tried when that one shows nothing any more.
const MORE_SEEDS: std::ops::Range<u64> = 1..51;
/// A bug that many lives show.
const COMMON: Mutation = Mutation::SkipReadCrc;

#[test]
fn every_deliberate_bug_is_noticed() {
    let known = known(TABLE);
    let seed = |mutation: Mutation| known.get(&format!("{mutation:?}")).copied().flatten();
    let hunted: Vec<_> = Mutation::ALL.iter().map(|&mutation| (mutation, seed(mutation))).collect();
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let found = hunt_all(&hunted, &MORE_SEEDS, jobs, &|mutation, caught| match caught {
        Some(caught) if Some(caught.seed) == seed(mutation) => {
            println!("{mutation:?}: seed {}: {}", caught.seed, caught.what);
        }
        Some(caught) => println!(
            "{mutation:?}: seed {}, no longer that of docs/mutations.md (`make mutations` renews the table): {}",
            caught.seed, caught.what
        ),
        None => println!("{mutation:?}: NOT NOTICED"),
    });
    let missed: Vec<_> = found.iter().filter(|(_, caught)| caught.is_none()).map(|(m, _)| m).collect();
    assert!(
        missed.is_empty(),
        "neither the seed in docs/mutations.md nor 50 more have noticed {missed:?}: find one, and renew the table: make mutations"
    );
}

#[test]
fn the_documented_bugs_are_those_that_there_are() {
    let documented: Vec<String> = known(TABLE).into_keys().collect();
    let mut all: Vec<String> = Mutation::ALL.iter().map(|mutation| format!("{mutation:?}")).collect();
    all.sort();
    assert_eq!(documented, all, "write the table again: make mutations");
}

/// What a soak finds is found again in its recording.
#[test]
fn a_recorded_life_shows_its_bug_again() {
    let caught = hunt(COMMON, known(TABLE)[&format!("{COMMON:?}")], MORE_SEEDS).expect("noticed");
    set(Some(COMMON));
    let (outcome, recording) = Recording::of(life(COMMON, caught.seed));
    let again = recording.replay(false);
    assert_eq!(again.failure, outcome.failure, "it is lived again as it was");
    set(None);
    assert!(recording.replay(false).failure.is_none(), "without the bug it goes well");
}
