//! Many lives at once, on all cores, and what came of them all.

use crate::Kind;
use crate::coverage::Coverage;
use crate::jobs::{at_once, lock, unlocked};
use crate::life::Life;
use crate::world::Outcome;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Failures after which no more lives are begun.
const FAILURES_MAX: usize = 20;
/// Lives that are lived at most in search of what a set of seeds has missed, and how many of them
/// between two looks.
const SEARCH_MAX: u64 = 600;
const SEARCH_STEP: u64 = 20;
/// Lives from which a set of seeds is chosen, at first; and at most, while something is not
/// reached.
const CANDIDATES: u64 = 400;
const CANDIDATES_MAX: u64 = 4000;
/// How many seeds of a chosen set reach each label, where there are so many.
const TIMES_REACHED: u64 = 2;
/// Seeds of a chosen set, if it does not need more to reach everything.
const SET_SEEDS: usize = 40;

/// Which seeds are run.
pub enum Seeds {
    /// These.
    Of(Vec<u64>),
    /// From one on, until a point of time.
    Until(u64, Instant),
}

impl Seeds {
    /// Those of a range.
    pub fn range(range: std::ops::Range<u64>) -> Seeds {
        Seeds::Of(range.collect())
    }

    /// Ones that nobody has run before, until a point of time. A second has room for some ten
    /// thousand seeds, more than a machine runs in one.
    pub fn new_until(until: Instant) -> Seeds {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        Seeds::Until(now / 100, until)
    }

    /// Those of a file: one in a line, beside lines that begin with `#`.
    ///
    /// # Errors
    /// The line that is none.
    pub fn parse(text: &str) -> Result<Vec<u64>, String> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.map(|line| line.parse().map_err(|_| format!("{line:?} is not a seed"))).collect()
    }

    fn at(&self, index: u64) -> Option<u64> {
        match self {
            Seeds::Of(seeds) => seeds.get(usize::try_from(index).ok()?).copied(),
            Seeds::Until(first, until) => {
                (Instant::now() < *until).then(|| first.checked_add(index)).flatten()
            }
        }
    }
}

/// What came of many lives.
#[derive(Debug)]
pub struct Crowd {
    /// Who is in them.
    kind: Kind,
    /// Most simulated seconds of one life.
    seconds: u64,
    /// Lives.
    runs: u64,
    /// The seed of the first of them.
    first: u64,
    /// Events handled.
    steps: u64,
    /// Simulated time.
    elapsed_ns: u128,
    /// What was reached, and which faults took place.
    coverage: Coverage,
    /// Blocks that the longest recovery read of its device.
    recovery_blocks_max: u64,
    /// Seeds that failed.
    failed: Vec<u64>,
    /// What each life reached, with its seed, if that is kept.
    each: Option<Vec<(u64, Coverage)>>,
}

impl Crowd {
    /// Of lives of at most `seconds` of simulated time.
    pub fn new(kind: Kind, seconds: u64) -> Crowd {
        Crowd {
            kind,
            seconds,
            runs: 0,
            first: 0,
            steps: 0,
            elapsed_ns: 0,
            coverage: Coverage::default(),
            recovery_blocks_max: 0,
            failed: Vec::new(),
            each: None,
        }
    }

    /// The life of a seed.
    pub fn life(&self, seed: u64) -> Life {
        Life { kind: self.kind, seed, seconds: self.seconds }
    }

    /// Lives that were lived.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Events that were handled.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Seeds that failed.
    pub fn failed(&self) -> &[u64] {
        &self.failed
    }

    /// What must be reached and was not.
    pub fn missing(&self) -> Vec<&'static str> {
        match self.kind {
            Kind::OneHost => self.coverage.missing(1),
            Kind::TwoHosts => self.coverage.missing_of_pairs(1),
        }
    }

    /// Lives the lives of these seeds on all cores; returns what went wrong.
    pub fn failures(&mut self, seeds: &Seeds) -> Vec<String> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let failures = Mutex::new(Vec::new());
        self.run(seeds, jobs, &|_, failure| lock(&failures).push(failure.to_owned()));
        unlocked(failures)
    }

    /// Lives further lives, from seed 1 on, until nothing is missing of what must be reached, but
    /// not for ever. Returns what went wrong.
    pub fn search(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        for first in (1..SEARCH_MAX).step_by(SEARCH_STEP as usize) {
            if self.missing().is_empty() || !failures.is_empty() {
                break;
            }
            failures = self.failures(&Seeds::range(first..first + SEARCH_STEP));
        }
        failures
    }

    /// Chooses seeds, from 1 on, that reach everything; and what is not reached by any.
    pub fn choose(&mut self) -> (Vec<u64>, Vec<&'static str>) {
        self.each = Some(Vec::new());
        let mut end = 1;
        while end < CANDIDATES || (end < CANDIDATES_MAX && !self.missing().is_empty()) {
            self.failures(&Seeds::range(end..end + CANDIDATES));
            end += CANDIDATES;
        }
        let mut each = self.each.take().unwrap_or_default();
        each.sort_unstable_by_key(|(seed, _)| *seed);
        let labels = match self.kind {
            Kind::OneHost => Coverage::default().missing(1),
            Kind::TwoHosts => Coverage::default().missing_of_pairs(1),
        };
        let reached = |chosen: &[usize], label: &str| {
            chosen.iter().filter(|&&at| each[at].1.count(label) > 0).count() as u64
        };
        let mut chosen = Vec::new();
        loop {
            let open: Vec<_> =
                labels.iter().filter(|label| reached(&chosen, label) < TIMES_REACHED).collect();
            let gain =
                |at: &usize| open.iter().filter(|label| each[*at].1.count(label) > 0).count();
            let others = (0..each.len()).filter(|at| !chosen.contains(at));
            // The first of those that reach most.
            match others.rev().max_by_key(gain).filter(|at| gain(at) > 0) {
                Some(best) => chosen.push(best),
                None => break,
            }
        }
        let mut seeds: BTreeSet<u64> = chosen.iter().map(|&at| each[at].0).collect();
        let mut more = each.iter().map(|(seed, _)| *seed);
        while seeds.len() < SET_SEEDS {
            let Some(seed) = more.next() else { break };
            seeds.insert(seed);
        }
        (seeds.into_iter().collect(), self.missing())
    }

    /// Lives the lives of these seeds, `jobs` at once; `tell` gets the life in which something went
    /// wrong, and what, as soon as it did.
    pub fn run(&mut self, seeds: &Seeds, jobs: usize, tell: &(dyn Fn(Life, &str) + Sync)) {
        self.first = seeds.at(0).unwrap_or_default();
        let (kind, seconds) = (self.kind, self.seconds);
        let all = Mutex::new(&mut *self);
        at_once(jobs, &|n| {
            let Some(seed) = seeds.at(n).filter(|_| lock(&all).failed.len() < FAILURES_MAX) else {
                return ControlFlow::Break(());
            };
            let life = Life { kind, seed, seconds };
            let outcome = life.run(false);
            let failure = lock(&all).add(seed, outcome);
            if let Some(what) = failure {
                tell(life, &format!("{what}replay: tidepool-sim {}", life.replay_arguments()));
            }
            ControlFlow::Continue(())
        });
    }

    /// Counts a life; returns what went wrong in it.
    fn add(&mut self, seed: u64, outcome: Outcome) -> Option<String> {
        self.runs += 1;
        self.steps += outcome.steps;
        self.elapsed_ns += u128::from(outcome.elapsed_ns);
        self.coverage.merge(&outcome.coverage);
        self.recovery_blocks_max = self.recovery_blocks_max.max(outcome.recovery_blocks_max);
        if let Some(each) = &mut self.each {
            each.push((seed, outcome.coverage));
        }
        if outcome.failure.is_some() {
            self.failed.push(seed);
        }
        outcome.failure
    }
}

impl std::fmt::Display for Crowd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.coverage)?;
        writeln!(f, "longest recovery: {} blocks of the device read", self.recovery_blocks_max)?;
        writeln!(
            f,
            "{} seeds from {} on, {} events, {} simulated hours, failed: {:?}",
            self.runs,
            self.first,
            self.steps,
            self.elapsed_ns / 3_600_000_000_000,
            self.failed
        )
    }
}
