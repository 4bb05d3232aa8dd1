//! Every deliberate bug of the core is noticed, and those in the table of `docs/mutations.md` are
//! all that there are.

use tidepool_engine::mutation::{Mutation, set};
use tidepool_sim::mutants::{hunt, hunt_all, known, life};
use tidepool_sim::recording::Recording;
use tidepool_sim::trace::Trace;
use tidepool_sim::{Kind, Life, Outcome};

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
    let missed: Vec<_> =
        found.iter().filter(|(_, caught)| caught.is_none()).map(|(m, _)| m).collect();
    assert!(
        missed.is_empty(),
        "neither the seed in docs/mutations.md nor 50 more have noticed {missed:?}: find one, and renew the table: make mutations"
    );
}

#[test]
fn the_documented_bugs_are_those_that_there_are() {
    let documented: Vec<String> = known(TABLE).into_keys().collect();
    let mut all: Vec<String> =
        Mutation::ALL.iter().map(|mutation| format!("{mutation:?}")).collect();
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

/// A life with a deliberate change, and the instants without it that it has had.
fn with_and_without(mutation: Mutation, life: Life) -> [Outcome; 2] {
    set(Some(mutation));
    let with = life.trace(Trace::default());
    set(None);
    // A life that fails is shorter.
    let without = life.trace(Trace::of_first(with.instants));
    [with, without]
}

/// A comparison of two builds is blind to no deliberate bug: what the core does in some life is
/// different, and not only because that life ends early. It is mostly the life that shows the bug;
/// some lives end before the core goes on with what is wrong.
#[test]
fn every_deliberate_bug_changes_what_the_core_does() {
    let known = known(TABLE);
    for &mutation in Mutation::ALL {
        let seed = known[&format!("{mutation:?}")].expect("a seed shows it");
        let differs = |seed: u64| {
            let [with, without] = with_and_without(mutation, life(mutation, seed));
            let failed = with.failure.is_some() && !without.beyond.starts_with(&with.beyond);
            failed || with.hashes.ordered != without.hashes.ordered
        };
        assert!(std::iter::once(seed).chain(MORE_SEEDS).any(differs), "{mutation:?}");
    }
}

/// A comparison of two builds sees a counter that stands still and a wrong time in a redo's header,
/// is blind to tokens, and tells an order from anything else.
#[test]
fn a_comparison_counts_every_field_and_no_name() {
    let lives = (1..26).flat_map(|seed| {
        [(Kind::OneHost, 6), (Kind::TwoHosts, 2)].map(|(kind, seconds)| Life {
            kind,
            seed,
            seconds,
        })
    });
    let lives: Vec<Life> = lives.collect();
    for (mutation, ordered, unordered) in [
        (Mutation::OtherTokens, false, false),
        (Mutation::RepliesLast, true, false),
        (Mutation::CutTimeForgotten, true, true),
        (Mutation::CounterDead, true, true),
    ] {
        let differs: Vec<[bool; 2]> = lives
            .iter()
            .map(|&life| {
                let [with, without] = with_and_without(mutation, life);
                let (with, without) = (with.hashes, without.hashes);
                [with.ordered != without.ordered, with.unordered != without.unordered]
            })
            .collect();
        let count = |which: usize| differs.iter().filter(|differs| differs[which]).count();
        println!("{mutation:?}: of {} lives {} and {} differ", lives.len(), count(0), count(1));
        assert_eq!((count(0) > 0, count(1) > 0), (ordered, unordered), "{mutation:?}");
    }
}
