//! What the cores of many lives have done, written down, so that another build can be compared with
//! it: a change of the code that is a *move* leaves both hashes of every life as they were, a
//! *reorder* the unordered one, and anything else is a *change*.
//!
//! A text: a line that names the format, and for each set of lives a line
//! `lives KIND SECONDS FIRST COUNT` with a line for each life behind it, which has its ordered and
//! its unordered hash.

pub use crate::api::Set;
use crate::jobs::{at_once, lock, unlocked};
use crate::life::{Kind, Life};
use crate::trace::{Hashes, Trace};
use std::ops::{ControlFlow, Range};
use std::sync::Mutex;

/// The first line.
const FORMAT: &str = "tidepool-sim baseline 1";
/// Most lives of a set.
const LIVES_MAX: u64 = 1_000_000;
/// The lives that a baseline has.
pub const SETS: [Set; 3] = [
    Set { kind: Kind::OneHost, seconds: 6, first: 1, count: 5000 },
    Set { kind: Kind::OneHost, seconds: 30, first: 1, count: 500 },
    Set { kind: Kind::TwoHosts, seconds: 4, first: 1, count: 2000 },
];

impl Set {
    fn life(&self, n: usize) -> Life {
        Life { kind: self.kind, seed: self.first + n as u64, seconds: self.seconds }
    }

    /// The lives of these seeds.
    pub fn within(&self, seeds: &Range<u64>) -> Set {
        let first = self.first.max(seeds.start);
        let end = (self.first + self.count).min(seeds.end);
        Set { first, count: end.saturating_sub(first), ..*self }
    }
}

/// The hashes of sets of lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Baseline {
    sets: Vec<(Set, Vec<Hashes>)>,
}

impl Baseline {
    /// Lives sets of lives, `jobs` at once.
    ///
    /// # Errors
    /// A life in which something goes wrong: what, and how it is lived again.
    pub fn of(sets: &[Set], jobs: usize) -> Result<Baseline, String> {
        let sets = sets.iter().map(|set| Ok((*set, lived(set, jobs)?)));
        Ok(Baseline { sets: sets.collect::<Result<_, String>>()? })
    }

    /// The sets, as far as they are of these seeds.
    pub fn sets_within(&self, seeds: &Range<u64>) -> Vec<Set> {
        self.sets.iter().map(|(set, _)| set.within(seeds)).collect()
    }

    /// Reads a baseline.
    ///
    /// # Errors
    /// What is wrong with the text, and in which line.
    pub fn parse(text: &str) -> Result<Baseline, String> {
        let mut lines = text.lines().zip(1..);
        match lines.next() {
            Some((FORMAT, _)) => {}
            Some((line, _)) => return Err(format!("line 1: {line:?} is not {FORMAT:?}")),
            None => return Err("it is empty".into()),
        }
        let mut sets: Vec<(Set, Vec<Hashes>)> = Vec::new();
        for (line, number) in lines {
            let wrong =
                || format!("line {number}: {line:?} is neither a set of lives nor two hashes");
            let words: Vec<&str> = line.split(' ').collect();
            if let ["lives", kind, numbers @ ..] = &words[..] {
                let numbers: Option<Vec<u64>> =
                    numbers.iter().map(|word| word.parse().ok()).collect();
                let (Some(kind), Some(&[seconds, first, count])) =
                    (Kind::of_name(kind), numbers.as_deref())
                else {
                    return Err(wrong());
                };
                if count > LIVES_MAX || first.checked_add(count).is_none() {
                    return Err(wrong());
                }
                sets.push((Set { kind, seconds, first, count }, Vec::new()));
                continue;
            }
            let hash = |word: &str| u64::from_str_radix(word, 16).map_err(|_| wrong());
            let ([ordered, unordered], Some((_, all))) = (&words[..], sets.last_mut()) else {
                return Err(wrong());
            };
            all.push(Hashes { ordered: hash(ordered)?, unordered: hash(unordered)? });
        }
        match sets.iter().find(|(set, all)| set.count != all.len() as u64) {
            Some((set, all)) => {
                Err(format!("{} lives are there in place of {}", all.len(), set.count))
            }
            None => Ok(Baseline { sets }),
        }
    }

    /// Compares these lives with those of another build; what that has not lived does not count.
    pub fn compare(&self, other: &Baseline) -> Comparison {
        let mut comparison = Comparison::default();
        for (set, was) in &self.sets {
            let same = |(other, _): &&(Set, Vec<Hashes>)| {
                other.kind == set.kind && other.seconds == set.seconds
            };
            let Some((lived, is)) = other.sets.iter().find(same) else { continue };
            for (n, is) in is.iter().enumerate() {
                let life = lived.life(n);
                let was = life.seed.checked_sub(set.first).and_then(|n| was.get(n as usize));
                if let Some(was) = was {
                    comparison.add(life, was, is);
                }
            }
        }
        comparison
    }
}

impl std::fmt::Display for Baseline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{FORMAT}")?;
        for (set, all) in &self.sets {
            writeln!(f, "lives {} {} {} {}", set.kind.name(), set.seconds, set.first, set.count)?;
            for hashes in all {
                writeln!(f, "{:016x} {:016x}", hashes.ordered, hashes.unordered)?;
            }
        }
        Ok(())
    }
}

/// What a comparison has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    equal: u64,
    reordered: Vec<Life>,
    changed: Vec<Life>,
}

impl Comparison {
    fn add(&mut self, life: Life, was: &Hashes, is: &Hashes) {
        if was == is {
            self.equal += 1;
        } else if was.unordered == is.unordered {
            self.reordered.push(life);
        } else {
            self.changed.push(life);
        }
    }

    /// Nothing differs.
    pub fn is_move(&self) -> bool {
        self.reordered.is_empty() && self.changed.is_empty()
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (reordered, changed) = (self.reordered.len() as u64, self.changed.len() as u64);
        let lives = self.equal + reordered + changed;
        let class = match (reordered, changed) {
            (0, 0) => "move",
            (_, 0) => "reorder",
            _ => "change",
        };
        write!(
            f,
            "{class}: of {lives} lives {reordered} differ in the order alone, and {changed} otherwise"
        )?;
        match self.changed.first().or(self.reordered.first()) {
            Some(first) => {
                write!(f, "; the first: tidepool-sim {} --trace FILE", first.replay_arguments())
            }
            None => Ok(()),
        }
    }
}

/// Lives the lives of a set.
fn lived(set: &Set, jobs: usize) -> Result<Vec<Hashes>, String> {
    let all = Mutex::new((vec![Hashes::default(); set.count as usize], None));
    at_once(jobs, &|n| {
        if n >= set.count || lock(&all).1.is_some() {
            return ControlFlow::Break(());
        }
        let life = set.life(n as usize);
        let outcome = life.trace(Trace::default());
        let (hashes, failure) = &mut *lock(&all);
        hashes[n as usize] = outcome.hashes;
        if let Some(what) = outcome.failure {
            failure
                .get_or_insert(format!("{what}replay: tidepool-sim {}", life.replay_arguments()));
        }
        ControlFlow::Continue(())
    });
    match unlocked(all) {
        (_, Some(what)) => Err(what),
        (hashes, None) => Ok(hashes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline(hashes: &[(u64, u64)]) -> Baseline {
        let count = hashes.len() as u64;
        let set = Set { kind: Kind::TwoHosts, seconds: 4, first: 3, count };
        let all = hashes.iter().map(|&(ordered, unordered)| Hashes { ordered, unordered });
        Baseline { sets: vec![(set, all.collect())] }
    }

    #[test]
    fn a_baseline_is_read_as_it_was_written() {
        let written = baseline(&[(1, 2), (u64::MAX, 0)]);
        assert_eq!(Baseline::parse(&written.to_string()), Ok(written));
    }

    #[test]
    fn what_is_no_baseline_is_told_on_one_line() {
        let whole = baseline(&[(1, 2)]).to_string();
        for (text, why) in [
            (String::new(), "empty"),
            ("lives one-host 6 1 1".into(), "line 1"),
            (whole.replace("two-hosts", "three-hosts"), "line 2"),
            (whole.replace(" 4 3 1", " 4 3"), "line 2"),
            (whole.replace(" 4 3 1", " 4 3 2"), "1 lives are there in place of 2"),
            (whole.replace(" 4 3 1", " 4 18446744073709551615 1"), "line 2"),
            (format!("{whole}1 x\n"), "line 4"),
            (format!("{FORMAT}\n1 2\n"), "line 2"),
        ] {
            let told = Baseline::parse(&text).expect_err("it is none");
            assert!(told.contains(why) && told.lines().count() == 1, "{told}");
        }
    }

    #[test]
    fn a_set_has_only_those_seeds_that_are_asked_for() {
        let set = Set { kind: Kind::OneHost, seconds: 6, first: 3, count: 5 };
        for (seeds, first, count) in
            [(0..u64::MAX, 3, 5), (4..6, 4, 2), (1..5, 3, 2), (7..20, 7, 1), (8..9, 8, 0)]
        {
            assert_eq!(set.within(&seeds), Set { first, count, ..set }, "{seeds:?}");
        }
    }

    #[test]
    fn a_comparison_tells_a_move_from_a_reorder_and_a_change() {
        let was = baseline(&[(1, 2), (3, 4)]);
        for (is, class) in [
            (baseline(&[(1, 2), (3, 4)]), "move: of 2 lives 0 "),
            (baseline(&[(1, 2)]), "move: of 1 lives 0 "),
            (baseline(&[(5, 2), (3, 4)]), "reorder: of 2 lives 1 "),
            (baseline(&[(5, 2), (6, 7)]), "change: of 2 lives 1 "),
        ] {
            let told = was.compare(&is).to_string();
            assert!(told.starts_with(class), "{told}");
        }
        let told = was.compare(&baseline(&[(1, 2), (6, 7)])).to_string();
        assert!(
            told.ends_with("the first: tidepool-sim --pair --seed 4 --seconds 4 --trace FILE"),
            "{told}"
        );
    }
}
