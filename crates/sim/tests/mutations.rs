//! Every deliberate bug of the core is noticed, and those in the table of `docs/mutations.md` are all that there are.

use std::collections::BTreeMap;
use tidepool_engine::mutation::Mutation;
use tidepool_sim::mutants::hunt_all;

/// The table's bugs, and the seed that showed each when the table was written.
fn documented() -> BTreeMap<String, Option<u64>> {
    let text = include_str!("../../../docs/mutations.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let bugs = cells.filter(|cells| cells.len() == 4 && cells[0] != "bug");
    bugs.map(|cells| (cells[0].to_owned(), cells[2].parse().ok())).collect()
}

#[test]
fn every_deliberate_bug_is_noticed() {
    let known = documented();
    let seed = |mutation: Mutation| known.get(&format!("{mutation:?}")).copied().flatten();
    let hunted: Vec<_> = Mutation::ALL.iter().map(|&mutation| (mutation, seed(mutation))).collect();
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let found = hunt_all(&hunted, jobs, &|mutation, caught| match caught {
        Some(caught) => println!("{mutation:?}: seed {}: {}", caught.seeds, caught.what),
        None => println!("{mutation:?}: NOT NOTICED"),
    });
    let missed: Vec<_> = found.iter().filter(|(_, caught)| caught.is_none()).map(|(m, _)| m).collect();
    assert!(missed.is_empty(), "nobody has noticed {missed:?}");
}

#[test]
fn the_documented_bugs_are_those_that_there_are() {
    let documented: Vec<String> = documented().into_keys().collect();
    let mut all: Vec<String> = Mutation::ALL.iter().map(|mutation| format!("{mutation:?}")).collect();
    all.sort();
    assert_eq!(documented, all, "write the table again: make mutations");
}
