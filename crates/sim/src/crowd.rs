//! Many seeds at once, on all cores, and what came of them all.

use crate::Outcome;
use crate::coverage::Coverage;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Failures after which no more seeds are begun.
const FAILURES_MAX: usize = 20;

/// Lots of fresh seeds that are run at most.
const LOTS_MAX: u32 = 4;

/// Which seeds are run.
pub struct Seeds {
    range: Range<u64>,
    until: Option<Instant>,
}

impl Seeds {
    /// These.
    pub fn of(range: Range<u64>) -> Seeds {
        Seeds { range, until: None }
    }

    /// So many that nobody has run before.
    pub fn fresh(n: u64) -> Seeds {
        let first = Seeds::first();
        Seeds { range: first..first + n, until: None }
    }

    /// Ones that nobody has run before, until a point of time.
    pub fn new_until(until: Instant) -> Seeds {
        Seeds { range: Seeds::first()..u64::MAX, until: Some(until) }
    }

    /// A second has room for some ten thousand seeds, more than a machine runs in one.
    fn first() -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        now / 100
    }

    fn is_over(&self, seed: u64) -> bool {
        seed >= self.range.end || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

/// What came of many runs.
#[derive(Debug)]
pub struct Crowd {
    run: fn(u64, u64, bool) -> Outcome,
    replay: &'static str,
    /// Most simulated seconds of one run.
    pub seconds: u64,
    /// Seeds that were run.
    pub runs: u64,
    /// The first of them.
    pub first: u64,
    /// Events handled.
    pub steps: u64,
    /// Simulated time.
    pub elapsed_ns: u128,
    /// What was reached, and which faults took place.
    pub coverage: Coverage,
    /// Blocks that the longest recovery read of its device.
    pub recovery_blocks_max: u64,
    /// Seeds that failed.
    pub failed: Vec<u64>,
}

impl Crowd {
    /// Of runs of at most `seconds` of simulated time, of one host.
    pub fn new(seconds: u64) -> Crowd {
        Crowd::of(crate::run, "tidepool-sim", seconds)
    }

    /// Of runs of two hosts with a copy each.
    pub fn of_pairs(seconds: u64) -> Crowd {
        Crowd::of(crate::pair::run, "tidepool-sim --pair", seconds)
    }

    fn of(run: fn(u64, u64, bool) -> Outcome, replay: &'static str, seconds: u64) -> Crowd {
        Crowd {
            run,
            replay,
            seconds,
            runs: 0,
            first: 0,
            steps: 0,
            elapsed_ns: 0,
            coverage: Coverage::default(),
            recovery_blocks_max: 0,
            failed: Vec::new(),
        }
    }

    /// Runs seeds on all cores; returns what went wrong.
    pub fn failures(&mut self, seeds: &Seeds) -> Vec<String> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let failures = Mutex::new(Vec::new());
        let lock = || failures.lock().unwrap_or_else(PoisonError::into_inner);
        self.run(seeds, jobs, &|failure| lock().push(failure.to_owned()));
        failures.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs so many seeds that nobody has run before, and as many again while something is `missing` of what they are to reach: what
    /// is rare is missing from one lot by chance. Returns what went wrong.
    pub fn fresh_failures<T>(&mut self, n: u64, missing: impl Fn(&Coverage) -> Vec<T>) -> Vec<String> {
        let mut failures = self.failures(&Seeds::fresh(n));
        for _ in 1..LOTS_MAX {
            if !failures.is_empty() || missing(&self.coverage).is_empty() {
                break;
            }
            failures = self.failures(&Seeds::fresh(n));
        }
        failures
    }

    /// Runs seeds, `jobs` at once; `tell` gets what went wrong, as soon as it did.
    pub fn run(&mut self, seeds: &Seeds, jobs: usize, tell: &(dyn Fn(&str) + Sync)) {
        self.first = seeds.range.start;
        let next = AtomicU64::new(seeds.range.start);
        let (seconds, run, replay) = (self.seconds, self.run, self.replay);
        let all = Mutex::new(&mut *self);
        let work = || {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                let lock = || all.lock().unwrap_or_else(PoisonError::into_inner);
                if seeds.is_over(seed) || lock().failed.len() >= FAILURES_MAX {
                    return;
                }
                let outcome = run(seed, seconds, false);
                let mut all = lock();
                all.runs += 1;
                all.steps += outcome.steps;
                all.elapsed_ns += u128::from(outcome.elapsed_ns);
                all.coverage.merge(&outcome.coverage);
                all.recovery_blocks_max = all.recovery_blocks_max.max(outcome.recovery_blocks_max);
                if let Some(what) = outcome.failure {
                    all.failed.push(seed);
                    tell(&format!("{what}replay: {replay} --seed {seed} --seconds {seconds}"));
                }
            }
        };
        std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
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
