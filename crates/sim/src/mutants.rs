//! Whether the checker notices the core's deliberate bugs.

pub use crate::api::Caught;
use crate::jobs::{at_once, lock, unlocked};
use crate::life::{Kind, Life};
use crate::recording::headline;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::{ControlFlow, Range};
use std::sync::Mutex;
use tidepool_engine::mutation::{Mutation, set};

/// Seeds that are tried on one bug when its known seed shows nothing.
pub const SEEDS: Range<u64> = 1..801;
/// Most simulated seconds of one life.
pub const SECONDS: u64 = 30;
/// The same of two hosts.
pub const PAIR_SECONDS: u64 = 6;
/// What is kept of a message: some tell all that the core knows.
const WHAT_CHARACTERS: usize = 120;

/// The life of a seed in which a bug is looked for.
pub fn life(mutation: Mutation, seed: u64) -> Life {
    match mutation.needs_two_hosts() {
        true => Life { kind: Kind::TwoHosts, seed, seconds: PAIR_SECONDS },
        false => Life { kind: Kind::OneHost, seed, seconds: SECONDS },
    }
}

/// Runs seeds with a bug in force until one of them fails: first `known`, if there is one, then
/// `seeds`.
pub fn hunt(mutation: Mutation, known: Option<u64>, seeds: Range<u64>) -> Option<Caught> {
    set(Some(mutation));
    let failure = |seed| {
        let life = life(mutation, seed);
        let text = life.run(false).failure?;
        Some(Caught { seed, what: headline(&text, &life).chars().take(WHAT_CHARACTERS).collect() })
    };
    let found = known.into_iter().chain(seeds).find_map(failure);
    set(None);
    found
}

/// The bugs of a table that [`table`] has written, each with the seed that showed it.
pub fn known(table: &str) -> BTreeMap<String, Option<u64>> {
    let rows = table.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let bugs = cells.filter(|cells| cells.len() == 4 && cells[0] != "bug");
    bugs.map(|cells| (cells[0].to_owned(), cells[2].parse().ok())).collect()
}

/// Hunts bugs, each with a known seed or without and with `seeds` besides, `jobs` at once, and
/// tells of each when it is over. In the order of `hunted`.
pub fn hunt_all(
    hunted: &[(Mutation, Option<u64>)],
    seeds: &Range<u64>,
    jobs: usize,
    tell: &(dyn Fn(Mutation, Option<&Caught>) + Sync),
) -> Vec<(Mutation, Option<Caught>)> {
    let found =
        Mutex::new(hunted.iter().map(|&(mutation, _)| (mutation, None)).collect::<Vec<_>>());
    at_once(jobs, &|n| {
        let Some(&(mutation, known)) = hunted.get(n as usize) else {
            return ControlFlow::Break(());
        };
        let caught = hunt(mutation, known, seeds.clone());
        tell(mutation, caught.as_ref());
        lock(&found)[n as usize].1 = caught;
        ControlFlow::Continue(())
    });
    unlocked(found)
}

/// A table of bugs and what came of the hunt.
pub fn table(found: &[(Mutation, Option<Caught>)]) -> String {
    let mut text = String::from(
        "| bug | what is wrong | seed that shows it | what noticed it |\n|---|---|---|---|\n",
    );
    for (mutation, caught) in found {
        let (seeds, what) = match caught {
            Some(caught) => (caught.seed.to_string(), plain(&caught.what)),
            None => ("none".into(), String::new()),
        };
        let _ = writeln!(text, "| {mutation:?} | {} | {seeds} | {what} |", mutation.what());
    }
    text
}

/// A message without its numbers.
fn plain(what: &str) -> String {
    let mut text = String::new();
    for c in what.chars() {
        match c {
            '0'..='9' if text.ends_with('N') => {}
            '0'..='9' => text.push('N'),
            '|' => text.push('/'),
            c => text.push(c),
        }
    }
    text
}
