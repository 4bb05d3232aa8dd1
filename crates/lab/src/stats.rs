//! What repeated measurements say: ratios with intervals, and percentiles of all requests together.
//!
//! Ratios are paired: each repeat gives one, from two runs that stood under the same conditions. They are averaged as
//! geometric means, so that the ratio of A to B is the inverse of that of B to A (Fleming and Wallace, "How not to lie
//! with statistics", CACM 29(3), 1986), and their interval is Student's on the logarithms (Georges, Buytaert and Eeckhout,
//! "Statistically rigorous Java performance evaluation", OOPSLA 2007). Two documents have no pairs; there the interval is
//! Welch's, again on the logarithms (Biometrika 34, 1947). "The same" is shown, not assumed: the whole interval has to lie
//! in a band around 1 (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987, there with 90 %; 95 % asks for more).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::results::{Durability, Results, Run};
use crate::suite::Cell;
use crate::words;

/// A ratio within this part of 1, on either side, makes no difference.
pub const EQUIVALENCE: f64 = 0.15;
/// Fewer pairs have no interval.
const PAIRS_MIN: usize = 2;
/// The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// The same for more degrees: from so many on.
const T_BEYOND: [(f64, f64); 3] = [(120.0, 1.980), (60.0, 2.000), (40.0, 2.021)];

/// Under which conditions a placement was measured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Setting {
    /// The workload's name.
    pub workload: String,
    /// Disks of the cluster.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// Clients.
    pub clients: u32,
    /// Requests in flight of each client.
    pub depth: u32,
}

impl Setting {
    /// That of a cell.
    pub fn of(cell: &Cell) -> Setting {
        Setting {
            workload: cell.workload.clone(),
            disks: cell.disks,
            osds_per_disk: cell.osds_per_disk,
            clients: cell.clients,
            depth: cell.depth,
        }
    }

    /// Whether that cell was measured under it.
    pub fn holds(&self, cell: &Cell) -> bool {
        self.workload == cell.workload
            && (self.disks, self.osds_per_disk, self.clients, self.depth)
                == (cell.disks, cell.osds_per_disk, cell.clients, cell.depth)
    }
}

/// Settings of a workload in which something was measured, in ascending order.
pub fn settings(results: &Results, workload: &str) -> Vec<Setting> {
    let cells = results.runs.iter().map(|run| &run.cell).filter(|cell| cell.workload == workload);
    cells.map(Setting::of).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Runs of a placement in a setting, also those that do not count.
pub fn runs<'a>(results: &'a Results, placement: &str, setting: &Setting) -> Vec<&'a Run> {
    let same = |run: &&Run| run.cell.placement == placement && setting.holds(&run.cell);
    results.runs.iter().filter(same).collect()
}

/// Why a run does not count; empty if it does.
pub fn objections(run: &Run) -> Vec<String> {
    let mut objections = run.invalid.clone();
    let figures = [run.figures.iops, run.figures.mean_us];
    if objections.is_empty() && !figures.iter().all(|figure| figure.is_finite() && *figure > 0.0) {
        objections.push("no request was completed".into());
    }
    objections
}

/// A figure that placements are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests per second.
    Iops,
    /// Mean latency.
    Mean,
    /// 99th percentile of the latency.
    P99,
}

impl Metric {
    /// Its value in a run that counts, in requests per second or microseconds.
    pub fn of(self, run: &Run) -> Option<f64> {
        let value = match self {
            Metric::Iops => run.figures.iops,
            Metric::Mean => run.figures.mean_us,
            Metric::P99 => percentile_us(&run.histogram, 990).unwrap_or(run.figures.p99_us),
        };
        (objections(run).is_empty() && value.is_finite() && value > 0.0).then_some(value)
    }

    /// What a limit outside of the placement makes of its value in this run.
    fn bound(self, run: &Run) -> Bound {
        match (&run.lower_bound, self) {
            (None, _) => Bound::Exact,
            (Some(_), Metric::Iops) => Bound::AtLeast,
            (Some(_), Metric::Mean | Metric::P99) => Bound::AtMost,
        }
    }
}

/// Which side of a figure the truth may be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// It is the figure.
    Exact,
    /// The figure or more.
    AtLeast,
    /// The figure or less.
    AtMost,
    /// Anything: both of what was compared were limited.
    Unknown,
}

impl Bound {
    /// That of a quotient's divisor, seen from the quotient.
    fn inverse(self) -> Bound {
        match self {
            Bound::AtLeast => Bound::AtMost,
            Bound::AtMost => Bound::AtLeast,
            other => other,
        }
    }

    /// That of what is made of two.
    fn and(self, other: Bound) -> Bound {
        match (self, other) {
            (Bound::Exact, bound) | (bound, Bound::Exact) => bound,
            (one, two) if one == two => one,
            _ => Bound::Unknown,
        }
    }

    /// What stands before a figure, with a space.
    pub fn words(self) -> &'static str {
        match self {
            Bound::Exact | Bound::Unknown => "",
            Bound::AtLeast => "at least ",
            Bound::AtMost => "at most ",
        }
    }
}

/// What a ratio says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The first has more.
    More,
    /// The first has less.
    Less,
    /// The difference, if there is one, is below [`EQUIVALENCE`].
    Same,
    /// Nothing can be said.
    Inconclusive,
}

/// A geometric mean of repeats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Its 95 % interval, from two values on.
    pub interval: Option<(f64, f64)>,
    /// How many values; of two sides without pairs, those of the smaller.
    pub count: usize,
}

/// A ratio of two placements, or of two documents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratio {
    /// The first to the second.
    pub ratio: Option<Estimate>,
    /// Geometric mean of the first's values in what the ratio is made of.
    pub first: Option<f64>,
    /// Geometric mean of the second's.
    pub second: Option<f64>,
    /// What the truth may be, seen from the ratio.
    pub bound: Bound,
    /// What it says.
    pub finding: Finding,
    /// Why it says nothing.
    pub why: Option<String>,
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ratio) = self.ratio else { return write!(f, "–") };
        write!(f, "{}{} ×", self.bound.words(), words::factor(ratio.value))?;
        match ratio.interval {
            Some((low, high)) => write!(f, " ({}–{})", words::factor(low), words::factor(high)),
            None => write!(f, " (one pair)"),
        }
    }
}

/// The quantile of Student's t that a 95 % interval needs. Between the degrees of the table, that of the fewer, whose
/// interval is wider.
fn t(degrees: f64) -> f64 {
    if let Some((_, t)) = T_BEYOND.iter().find(|(from, _)| degrees >= *from) {
        return *t;
    }
    T[(degrees.floor().max(1.0) as usize).min(T.len()) - 1]
}

/// Mean, and variance of a value.
fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, squares / (count - 1.0).max(1.0))
}

fn estimate(log_mean: f64, half_width: Option<f64>, count: usize) -> Estimate {
    let interval = half_width.map(|half| ((log_mean - half).exp(), (log_mean + half).exp()));
    Estimate { value: log_mean.exp(), interval, count }
}

/// The geometric mean of values above 0, given as logarithms. None if there are none.
fn of_logs(logs: &[f64]) -> Option<Estimate> {
    let count = logs.len();
    if count == 0 {
        return None;
    }
    let (mean, variance) = moments(logs);
    let half = t(count as f64 - 1.0) * (variance / count as f64).sqrt();
    Some(estimate(mean, (count >= PAIRS_MIN).then_some(half), count))
}

/// The geometric mean of values; those that are not above 0 do not count. None if none does.
pub fn geometric(values: &[f64]) -> Option<Estimate> {
    let logs: Vec<f64> = values.iter().filter(|v| v.is_finite() && **v > 0.0).map(|v| v.ln()).collect();
    of_logs(&logs)
}

/// The ratio of two geometric means without pairs; values are above 0.
fn welch(first: &[f64], second: &[f64]) -> Option<Estimate> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let logs = |values: &[f64]| values.iter().map(|value| value.ln()).collect::<Vec<f64>>();
    let sides = [logs(first), logs(second)];
    let [(mean, variance), (other_mean, other_variance)] = [moments(&sides[0]), moments(&sides[1])];
    let [a, b] = [variance / first.len() as f64, other_variance / second.len() as f64];
    let spread = |part: f64, count: usize| part.powi(2) / (count as f64 - 1.0).max(1.0);
    let degrees = (a + b).powi(2) / (spread(a, first.len()) + spread(b, second.len()));
    let half = if a + b > 0.0 { t(degrees) * (a + b).sqrt() } else { 0.0 };
    let count = first.len().min(second.len());
    Some(estimate(mean - other_mean, (count >= PAIRS_MIN).then_some(half), count))
}

/// A run of each of two, under the same conditions and of the same repeat.
struct Pair {
    repeat: u32,
    first: f64,
    second: f64,
    bound: Bound,
    durability: [Durability; 2],
}

/// Pairs of a setting; of runs that were made twice, the first that counts.
fn pairs(results: &Results, placement: &str, against: &str, setting: &Setting, metric: Metric) -> Vec<Pair> {
    let by_repeat = |placement: &str| {
        let mut found: BTreeMap<u32, (&Run, f64)> = BTreeMap::new();
        for run in runs(results, placement, setting) {
            if let Some(value) = metric.of(run) {
                found.entry(run.repeat).or_insert((run, value));
            }
        }
        found
    };
    let (ours, theirs) = (by_repeat(placement), by_repeat(against));
    let pair = |(repeat, (run, first)): (u32, (&Run, f64))| {
        let &(other, second) = theirs.get(&repeat)?;
        Some(Pair {
            repeat,
            first,
            second,
            bound: metric.bound(run).and(metric.bound(other).inverse()),
            durability: [run.durability, other.durability],
        })
    };
    ours.into_iter().filter_map(pair).collect()
}

/// How much more of `metric` a placement has than another one, over these settings.
///
/// A repeat counts where every setting that has pairs at all has one, and gives one value, the mean over the settings:
/// measurements of a repeat may share a cluster, repeats are what is independent.
pub fn paired(
    results: &Results,
    placement: &str,
    against: &str,
    settings: &[Setting],
    metric: Metric,
) -> Ratio {
    let of = |setting| pairs(results, placement, against, setting, metric);
    let found: Vec<Vec<Pair>> = settings.iter().map(of).filter(|pairs| !pairs.is_empty()).collect();
    let mut repeats: BTreeMap<u32, Vec<&Pair>> = BTreeMap::new();
    for pair in found.iter().flatten() {
        repeats.entry(pair.repeat).or_default().push(pair);
    }
    repeats.retain(|_, pairs| pairs.len() == found.len());
    let logs = |value: fn(&Pair) -> f64| -> Vec<f64> {
        let of =
            |pairs: &Vec<&Pair>| pairs.iter().map(|pair| value(pair).ln()).sum::<f64>() / found.len() as f64;
        repeats.values().map(of).collect()
    };
    let (first, second) = (logs(|pair| pair.first), logs(|pair| pair.second));
    let differences: Vec<f64> = first.iter().zip(&second).map(|(one, two)| one - two).collect();
    let used = || repeats.values().flatten();
    let worst = |side: usize| used().map(|pair| pair.durability[side]).min();
    let bound = used().fold(Bound::Exact, |bound, pair| bound.and(pair.bound));
    let center = |logs: &[f64]| of_logs(logs).map(|estimate| estimate.value);
    judge(
        [placement, against],
        of_logs(&differences),
        [center(&first), center(&second)],
        bound,
        [worst(0), worst(1)],
    )
}

/// How much more of `metric` runs have than others that are not paired with them.
pub fn unpaired(names: [&str; 2], first: &[&Run], second: &[&Run], metric: Metric) -> Ratio {
    let counted = |runs: &[&Run]| -> Vec<(f64, Bound, Durability)> {
        let of = |run: &&Run| Some((metric.of(run)?, metric.bound(run), run.durability));
        runs.iter().filter_map(of).collect()
    };
    let sides = [counted(first), counted(second)];
    let values = |side: usize| sides[side].iter().map(|(value, ..)| *value).collect::<Vec<f64>>();
    let bound = |side: usize| sides[side].iter().fold(Bound::Exact, |bound, (_, other, _)| bound.and(*other));
    let worst = |side: usize| sides[side].iter().map(|(.., durability)| *durability).min();
    let center = |side: usize| geometric(&values(side)).map(|estimate| estimate.value);
    judge(
        names,
        welch(&values(0), &values(1)),
        [center(0), center(1)],
        bound(0).and(bound(1).inverse()),
        [worst(0), worst(1)],
    )
}

/// What a ratio says.
fn judge(
    names: [&str; 2],
    ratio: Option<Estimate>,
    [first, second]: [Option<f64>; 2],
    bound: Bound,
    durability: [Option<Durability>; 2],
) -> Ratio {
    let (finding, why) = match find(names, ratio, bound, durability) {
        Ok(finding) => (finding, None),
        Err(why) => (Finding::Inconclusive, Some(why)),
    };
    Ratio { ratio, first, second, bound, finding, why }
}

/// What a ratio says, or why it says nothing.
fn find(
    names: [&str; 2],
    ratio: Option<Estimate>,
    bound: Bound,
    durability: [Option<Durability>; 2],
) -> Result<Finding, String> {
    let (Some(ratio), [Some(ours), Some(theirs)]) = (ratio, durability) else {
        return Err(format!("no repeat has a valid run of {} and of {}", names[0], names[1]));
    };
    let Some((low, high)) = ratio.interval else {
        return Err("one valid pair has no interval; two are the least".into());
    };
    if let Some((name, _)) = names.iter().zip(durability).find(|(_, d)| *d == Some(Durability::Volatile)) {
        return Err(format!(
            "{name} acknowledges writes that are in memory only, and takes part in no comparison"
        ));
    }
    let same = low >= 1.0 / (1.0 + EQUIVALENCE) && high <= 1.0 + EQUIVALENCE;
    let finding = match bound {
        Bound::Unknown => return Err("both were limited by the client or the machine".into()),
        Bound::Exact if same => Finding::Same,
        Bound::Exact | Bound::AtLeast if low > 1.0 && !same => Finding::More,
        Bound::Exact | Bound::AtMost if high < 1.0 && !same => Finding::Less,
        Bound::Exact => return Err("the interval has both more and less".into()),
        Bound::AtLeast => {
            return Err("the client or the machine was a limit: the truth is this ratio or more".into());
        }
        Bound::AtMost => {
            return Err("the client or the machine was a limit: the truth is this ratio or less".into());
        }
    };
    // The safer one may win over the other, for it does more; not the other way round.
    let winner_is_less_safe = match finding {
        Finding::More => ours < theirs,
        Finding::Less => theirs < ours,
        _ => ours != theirs,
    };
    if winner_is_less_safe {
        return Err(format!(
            "not comparable: {} has {} of a write, {} has {}",
            names[0],
            words::copies(ours),
            names[1],
            words::copies(theirs)
        ));
    }
    Ok(finding)
}

/// Requests of several runs by their latency: upper bounds in nanoseconds and counts, ascending. None if a run does not
/// say, for what is missing would not be seen in the result.
pub fn merged(runs: &[&Run]) -> Option<Vec<(u64, u64)>> {
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for run in runs {
        if run.histogram.iter().all(|(_, count)| *count == 0) {
            return None;
        }
        for &(bound_ns, count) in &run.histogram {
            let total = all.entry(bound_ns).or_insert(0);
            *total = total.saturating_add(count);
        }
    }
    (!all.is_empty()).then(|| all.into_iter().collect())
}

/// The latency in microseconds that so many of a thousand requests do not exceed, as the upper bound of its bucket. None
/// if there are no requests.
pub fn percentile_us(histogram: &[(u64, u64)], per_mille: u64) -> Option<f64> {
    let total: u128 = histogram.iter().map(|(_, count)| u128::from(*count)).sum();
    let rank = (total * u128::from(per_mille)).div_ceil(1000).max(1);
    let mut seen = 0u128;
    let bucket = histogram.iter().find(|(_, count)| {
        seen += u128::from(*count);
        seen >= rank
    });
    bucket.map(|(bound_ns, _)| *bound_ns as f64 / 1e3)
}

/// What the repeats of one cell come to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Runs that count.
    pub valid: usize,
    /// Runs that do not.
    pub invalid: usize,
    /// Requests per second.
    pub iops: Option<Estimate>,
    /// Mean latency in microseconds.
    pub mean_us: Option<Estimate>,
    /// Median of all requests of all repeats, in microseconds.
    pub p50_us: Option<f64>,
    /// 99th percentile of all requests of all repeats, in microseconds.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of all requests of all repeats, in microseconds.
    pub p999_us: Option<f64>,
    /// Why the placement might do more.
    pub lower_bound: Option<String>,
    /// The worst of its runs.
    pub durability: Option<Durability>,
}

/// What these repeats of one cell come to.
pub fn summary(runs: &[&Run]) -> Summary {
    let counted: Vec<&Run> = runs.iter().copied().filter(|run| objections(run).is_empty()).collect();
    let of =
        |metric: Metric| geometric(&counted.iter().filter_map(|run| metric.of(run)).collect::<Vec<f64>>());
    let histogram = merged(&counted).unwrap_or_default();
    // Without histograms that could be merged it is the worst of the repeats: no percentile is an average.
    let percentile = |part: u64, of: &dyn Fn(&Run) -> f64| {
        percentile_us(&histogram, part).or_else(|| counted.iter().map(|run| of(run)).reduce(f64::max))
    };
    Summary {
        valid: counted.len(),
        invalid: runs.len() - counted.len(),
        iops: of(Metric::Iops),
        mean_us: of(Metric::Mean),
        p50_us: percentile(500, &|run| run.figures.p50_us),
        p99_us: percentile(990, &|run| run.figures.p99_us),
        p999_us: percentile(999, &|run| run.figures.p999_us),
        lower_bound: counted.iter().find_map(|run| run.lower_bound.clone()),
        durability: counted.iter().map(|run| run.durability).min(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    fn near(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 1e-3
    }

    fn ratio(results: &Results, placement: &str, against: &str) -> Ratio {
        let settings = settings(results, "4k-80-20");
        paired(results, placement, against, &settings, Metric::Iops)
    }

    #[test]
    fn the_interval_is_students_on_the_logarithms() {
        // Ratios 2, 4, 8: logarithms 1, 2, 3 times ln 2; mean 2, deviation 1, t for 2 degrees 4.303.
        let results = synthetic::results(&[("a", &[200.0, 400.0, 800.0]), ("b", &[100.0, 100.0, 100.0])]);
        let found = ratio(&results, "a", "b");
        let estimate = found.ratio.expect("a ratio");
        let half = 4.303 / 3f64.sqrt();
        let (low, high) = estimate.interval.expect("an interval");
        assert!(near(estimate.value, 4.0) && estimate.count == 3);
        assert!(near(low, 2f64.powf(2.0 - half)) && near(high, 2f64.powf(2.0 + half)), "{low} {high}");
        assert_eq!(found.finding, Finding::Inconclusive, "three that far apart say nothing");
        assert!(near(found.first.expect("a") / found.second.expect("b"), 4.0));
    }

    #[test]
    fn quantiles_between_those_of_the_table_are_the_wider() {
        for (degrees, wanted) in [
            (0.2, 12.706),
            (1.0, 12.706),
            (4.0, 2.776),
            (4.9, 2.776),
            (30.0, 2.042),
            (39.0, 2.042),
            (40.0, 2.021),
            (1e9, 1.980),
            (f64::NAN, 12.706),
        ] {
            assert_eq!(t(degrees), wanted, "{degrees}");
        }
    }

    #[test]
    fn more_less_and_the_same_are_findings_of_the_whole_interval() {
        for (ours, finding) in [
            ([200.0, 202.0, 198.0, 201.0], Finding::More),
            ([50.0, 51.0, 49.0, 50.0], Finding::Less),
            ([101.0, 99.0, 100.0, 103.0], Finding::Same),
            ([90.0, 130.0, 80.0, 140.0], Finding::Inconclusive),
            ([112.0, 118.0, 122.0, 113.0], Finding::More),
            // More with certainty, and too little to matter.
            ([105.0, 105.1, 105.0, 105.1], Finding::Same),
        ] {
            let results = synthetic::results(&[("a", &ours), ("b", &[100.0; 4])]);
            let found = ratio(&results, "a", "b");
            assert_eq!(found.finding, finding, "{ours:?} {found}");
            assert_eq!(found.why.is_some(), finding == Finding::Inconclusive);
        }
    }

    #[test]
    fn a_pair_is_of_one_repeat_and_fewer_than_two_say_nothing() {
        let mut results = synthetic::results(&[("a", &[200.0, 210.0, 1.0]), ("b", &[100.0, 105.0, 100.0])]);
        results.runs.retain(|run| run.cell.placement == "a" || run.repeat != 3);
        let found = ratio(&results, "a", "b");
        assert_eq!(
            (found.ratio.expect("one").count, found.finding),
            (2, Finding::More),
            "the third has no partner"
        );
        results.runs.retain(|run| run.repeat == 1);
        let found = ratio(&results, "a", "b");
        assert!(found.why.expect("why").contains("two are the least"));
        assert_eq!(found.ratio.and_then(|ratio| ratio.interval), None);
        let nothing = ratio(&results, "a", "c");
        assert!(nothing.ratio.is_none() && nothing.why.expect("why").contains("valid run of a and of c"));
    }

    #[test]
    fn runs_that_are_invalid_or_did_nothing_never_count() {
        let mut results =
            synthetic::results(&[("a", &[200.0, 200.0, 9_000.0, 0.0, f64::NAN]), ("b", &[100.0; 5])]);
        results.runs[2].invalid.push("an OSD was down".into());
        let found = ratio(&results, "a", "b");
        assert_eq!(
            (found.ratio.map(|ratio| (ratio.value.round(), ratio.count)), found.finding),
            (Some((2.0, 2)), Finding::More)
        );
        let all: Vec<&Run> = results.runs.iter().filter(|run| run.cell.placement == "a").collect();
        let summary = summary(&all);
        assert_eq!((summary.valid, summary.invalid), (2, 3));
        assert_eq!(objections(all[3]), ["no request was completed"]);
        assert_eq!(geometric(&[f64::NAN, 0.0, -1.0, f64::INFINITY]), None);
    }

    #[test]
    fn a_limit_from_outside_leaves_one_direction() {
        let limited = |ours: f64, placement: &str| {
            let mut results = synthetic::results(&[("a", &[ours; 3]), ("b", &[100.0; 3])]);
            let runs = results.runs.iter_mut().filter(|run| run.cell.placement == placement);
            runs.for_each(|run| run.lower_bound = Some("the client".into()));
            ratio(&results, "a", "b")
        };
        let found = limited(200.0, "a");
        assert_eq!((found.bound, found.finding), (Bound::AtLeast, Finding::More));
        assert_eq!(found.to_string(), "at least 2.00 × (2.00–2.00)");
        assert_eq!(limited(50.0, "a").finding, Finding::Inconclusive, "it might have been more");
        assert_eq!(limited(100.0, "a").finding, Finding::Inconclusive, "nor is it the same");
        assert_eq!((limited(50.0, "b").bound, limited(50.0, "b").finding), (Bound::AtMost, Finding::Less));
        assert_eq!(limited(200.0, "b").finding, Finding::Inconclusive);
        let mut results = synthetic::results(&[("a", &[200.0; 3]), ("b", &[100.0; 3])]);
        results.runs.iter_mut().for_each(|run| run.lower_bound = Some("the client".into()));
        let found = ratio(&results, "a", "b");
        assert_eq!((found.bound, found.finding), (Bound::Unknown, Finding::Inconclusive));
        results
            .runs
            .iter_mut()
            .filter(|run| run.cell.placement == "b")
            .for_each(|run| run.lower_bound = None);
        let latency = paired(&results, "a", "b", &settings(&results, "4k-80-20"), Metric::Mean);
        assert_eq!(
            (latency.bound, latency.finding),
            (Bound::AtMost, Finding::Less),
            "latency goes the other way"
        );
    }

    #[test]
    fn nothing_wins_by_having_fewer_copies() {
        let found = |ours: Durability, theirs: Durability, iops: f64| {
            let mut results = synthetic::results(&[("a", &[iops; 3]), ("b", &[100.0; 3])]);
            for run in &mut results.runs {
                run.durability = if run.cell.placement == "a" { ours } else { theirs };
            }
            ratio(&results, "a", "b")
        };
        use Durability::{OneCopy, Replicated, Volatile};
        assert!(
            found(Volatile, OneCopy, 900.0)
                .why
                .expect("why")
                .contains("a acknowledges writes that are in memory only")
        );
        assert_eq!(found(Volatile, Volatile, 900.0).finding, Finding::Inconclusive);
        assert_eq!(found(OneCopy, Volatile, 50.0).finding, Finding::Inconclusive);
        assert!(found(OneCopy, Replicated, 900.0).why.expect("why").contains("a has one copy of a write"));
        assert_eq!(found(OneCopy, Replicated, 100.0).finding, Finding::Inconclusive);
        assert_eq!(found(Replicated, OneCopy, 900.0).finding, Finding::More, "safer and faster");
        assert_eq!(found(OneCopy, Replicated, 50.0).finding, Finding::Less);
    }

    #[test]
    fn over_several_loads_a_repeat_counts_once_and_only_if_it_is_whole() {
        let mut results = synthetic::results(&[("a", &[200.0, 200.0, 200.0]), ("b", &[100.0; 3])]);
        for (placement, iops) in [("a", 800.0), ("b", 100.0)] {
            results
                .runs
                .extend((1..=3).map(|repeat| synthetic::run(placement, "4k-80-20", 32, repeat, iops)));
        }
        let found = ratio(&results, "a", "b").ratio.expect("a ratio");
        assert!(near(found.value, 4.0) && found.count == 3, "{found:?}");
        results.runs.pop();
        let found = ratio(&results, "a", "b").ratio.expect("a ratio");
        assert!(near(found.value, 4.0) && found.count == 2, "the third repeat lacks a depth: {found:?}");
    }

    #[test]
    fn without_pairs_the_interval_is_welchs() {
        // Variances of the logarithms 1 and 0, three each: two degrees of freedom.
        let e = std::f64::consts::E;
        let runs = |speeds: [f64; 3]| speeds.map(|iops| synthetic::run("a", "4k-80-20", 1, 1, iops));
        let (first, second) = (runs([100.0, 100.0 * e, 100.0 * e * e]), runs([100.0; 3]));
        let found = unpaired(["b", "a"], &first.each_ref(), &second.each_ref(), Metric::Iops);
        let estimate = found.ratio.expect("a ratio");
        let half = 4.303 / 3f64.sqrt();
        assert!(near(estimate.value, e) && near(estimate.interval.expect("one").1, (1.0 + half).exp()));
        let same = unpaired(["b", "a"], &second.each_ref(), &second.each_ref(), Metric::Iops);
        assert_eq!((same.finding, same.ratio.expect("one").interval), (Finding::Same, Some((1.0, 1.0))));
        let one = unpaired(["b", "a"], &[&first[0]], &second.each_ref(), Metric::Iops);
        assert_eq!(one.finding, Finding::Inconclusive);
        assert_eq!(unpaired(["b", "a"], &[], &[], Metric::Iops).ratio, None);
    }

    #[test]
    fn percentiles_are_those_of_all_requests_together() {
        let mut runs = [1, 2].map(|repeat| synthetic::run("a", "4k-80-20", 1, repeat, 100.0));
        // 900 fast requests in one run, 100 slow ones in the other: the median is fast, the 99th percentile slow.
        runs[0].histogram = vec![(1_000, 890), (2_000, 10)];
        runs[1].histogram = vec![(2_000, 10), (9_000_000, 90)];
        let both = merged(&runs.each_ref()).expect("both say");
        assert_eq!(both, [(1_000, 890), (2_000, 20), (9_000_000, 90)]);
        assert_eq!(
            (percentile_us(&both, 500), percentile_us(&both, 890), percentile_us(&both, 891)),
            (Some(1.0), Some(1.0), Some(2.0))
        );
        assert_eq!((percentile_us(&both, 990), percentile_us(&both, 1000)), (Some(9_000.0), Some(9_000.0)));
        assert_eq!((percentile_us(&[], 500), percentile_us(&[(5, 0)], 500)), (None, None));
        assert_eq!(percentile_us(&[(1, u64::MAX), (2_000, u64::MAX)], 990), Some(2.0));
        runs[0].histogram.clear();
        assert_eq!(merged(&runs.each_ref()), None, "what is missing would not be seen");
        let worst = runs.each_ref().map(|run| run.figures.p99_us).into_iter().reduce(f64::max);
        assert_eq!(summary(&runs.each_ref()).p99_us, worst, "the worst repeat, and no average");
    }
}
