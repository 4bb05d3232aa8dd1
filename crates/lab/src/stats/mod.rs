//! Statistics of repeated measurements: ratios with intervals, and percentiles of all requests
//! together.
//!
//! A cluster gives one observation: the mean of the logarithms of everything that was measured on
//! the cluster. Repeats on one cluster have its disks, its images and its OSDs in common, so they
//! are no evidence about the next cluster (Kalibera and Jones, "Rigorous benchmarking in reasonable
//! time", ISMM 2013: the highest level that varies is the one to repeat).
//!
//! Means are geometric, so the ratio of A to B is the inverse of the ratio of B to A (Fleming and
//! Wallace, "How not to lie with statistics", CACM 29(3), 1986). Two placements on the same
//! clusters have a difference on each cluster, and the interval is Student's on the logarithms
//! (Georges, Buytaert and Eeckhout, "Statistically rigorous Java performance evaluation", OOPSLA
//! 2007). Placements on different clusters, and two documents, have no pairs; their interval is
//! Welch's, again on the logarithms (Biometrika 34, 1947). "The same" is shown, not assumed: the
//! whole interval has to lie in a band around 1 (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987,
//! there with 90 %; 95 % is stricter). [`looks`] gives the level at which an interval is read.

mod change;
mod latency;
pub mod looks;
mod outlook;
pub mod saturation;
pub mod steady;
mod student;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::results::{Durability, Results, Run};
use crate::suite::{Cell, Neighbours};
use crate::words;
pub use change::{Stretch, change};
pub use latency::{merged, percentile_us};
use looks::ALPHA;
use outlook::Outlook;
use student::quantile;

/// A ratio from 1 / (1 + this) to 1 + this makes no difference.
pub const EQUIVALENCE: f64 = 0.15;
/// Least number of clusters for which there is an interval.
const CLUSTERS_MIN: usize = 2;

/// Conditions under which a placement was measured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Setting {
    /// The workload's name.
    pub workload: String,
    /// Disks of the cluster.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// Number of clients.
    pub clients: u32,
    /// Requests in flight of each client.
    pub depth: u32,
    /// Factor by which the devices were slowed, if not the ground's factor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowed_by: Option<u32>,
    /// Copies of each object, if the number differs from the ground's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Neighbours of the clients, if they differ from the ground's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neighbours: Option<Neighbours>,
}

impl Setting {
    /// The setting of a cell.
    pub fn of(cell: &Cell) -> Setting {
        Setting {
            workload: cell.workload.clone(),
            disks: cell.disks,
            osds_per_disk: cell.osds_per_disk,
            clients: cell.clients,
            depth: cell.depth,
            slowed_by: cell.slowed_by,
            replicas: cell.replicas,
            neighbours: cell.neighbours,
        }
    }

    /// This setting with the ground's copies and neighbours.
    pub fn on_ground(&self) -> Setting {
        Setting { replicas: None, neighbours: None, ..self.clone() }
    }

    /// The copies and neighbours that differ from the ground's, in words. None where neither
    /// differs.
    pub fn beside(&self) -> Option<String> {
        words::beside(self.replicas, self.neighbours)
    }

    /// The cell was measured in this setting.
    pub fn holds(&self, cell: &Cell) -> bool {
        *self == Setting::of(cell)
    }
}

/// Settings of a workload in which something was measured, in ascending order. Only settings with
/// the ground's factor, copies and neighbours.
pub fn settings(results: &Results, workload: &str) -> Vec<Setting> {
    let mut settings = settings_beside(results, workload);
    settings.retain(|setting| *setting == setting.on_ground());
    settings
}

/// Settings of a workload in which something was measured, in ascending order. Only settings with
/// the ground's factor, but with any copies and neighbours.
pub fn settings_beside(results: &Results, workload: &str) -> Vec<Setting> {
    let mut settings = all_settings(results, workload);
    settings.retain(|setting| setting.slowed_by.is_none());
    settings
}

/// All settings of a workload in which something was measured, in ascending order, also those at
/// the second factor.
pub fn all_settings(results: &Results, workload: &str) -> Vec<Setting> {
    let cells = results.runs.iter().map(|run| &run.cell).filter(|cell| cell.workload == workload);
    cells.map(Setting::of).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Runs of a placement in a setting, including runs that do not count.
pub fn runs<'a>(results: &'a Results, placement: &str, setting: &Setting) -> Vec<&'a Run> {
    let same = |run: &&Run| run.cell.placement == placement && setting.holds(&run.cell);
    results.runs.iter().filter(same).collect()
}

/// Reasons why a run does not count; empty if the run counts.
pub fn objections(run: &Run) -> Vec<String> {
    let mut objections = run.invalid.clone();
    let figures = [run.figures.iops, run.figures.mean_us];
    if objections.is_empty() && !figures.iter().all(|figure| figure.is_finite() && *figure > 0.0) {
        objections.push("no request was completed".into());
    }
    objections
}

/// A figure by which placements are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests per second.
    Iops,
    /// Mean latency in microseconds.
    Mean,
    /// 99th percentile of the latency in microseconds.
    P99,
}

impl Metric {
    /// Value of the metric in a run, in requests per second or microseconds. None if the run does
    /// not count, or has no such value.
    pub fn of(self, run: &Run) -> Option<f64> {
        let value = match self {
            Metric::Iops => run.figures.iops,
            Metric::Mean => run.figures.mean_us,
            Metric::P99 => percentile_us(&run.histogram, 990).or(run.figures.p99_us)?,
        };
        (objections(run).is_empty() && value.is_finite() && value > 0.0).then_some(value)
    }

    /// Where the true value may lie: beyond the figure if the client or the machine limited the
    /// run, otherwise `Exact`.
    fn bound(self, run: &Run) -> Bound {
        match (&run.lower_bound, self) {
            (None, _) => Bound::Exact,
            (Some(_), Metric::Iops) => Bound::AtLeast,
            (Some(_), Metric::Mean | Metric::P99) => Bound::AtMost,
        }
    }
}

/// Where the true value may lie relative to a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The true value is the figure.
    Exact,
    /// The true value is the figure or more.
    AtLeast,
    /// The true value is the figure or less.
    AtMost,
    /// The true value may lie on either side: both sides of the comparison were limited.
    Unknown,
}

impl Bound {
    /// The bound of a quotient whose divisor has this bound.
    fn inverse(self) -> Bound {
        match self {
            Bound::AtLeast => Bound::AtMost,
            Bound::AtMost => Bound::AtLeast,
            other => other,
        }
    }

    /// The bound of a figure that is made of two figures with these bounds.
    fn and(self, other: Bound) -> Bound {
        match (self, other) {
            (Bound::Exact, bound) | (bound, Bound::Exact) => bound,
            (one, two) if one == two => one,
            _ => Bound::Unknown,
        }
    }

    /// Words that stand before a figure, with a space after them. Empty for `Exact` and `Unknown`.
    pub fn words(self) -> &'static str {
        match self {
            Bound::Exact | Bound::Unknown => "",
            Bound::AtLeast => "at least ",
            Bound::AtMost => "at most ",
        }
    }
}

/// The finding of a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The first side has more.
    More,
    /// The first side has less.
    Less,
    /// The difference, if there is one, is within [`EQUIVALENCE`].
    Same,
    /// More at one factor by which devices are slowed, less at the other factor: not measurable
    /// here.
    Turns,
    /// The ratio shows nothing.
    Inconclusive,
}

/// A geometric mean over clusters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// The interval, from two clusters on: at 95 % unless the caller asks for another level. In
    /// [`paired`] and [`change()`] over the deciding workload, it holds at 95 % over all looks
    /// together ([`looks`]).
    pub interval: Option<(f64, f64)>,
    /// Number of clusters; of two sides without pairs, the number of the smaller side.
    pub count: usize,
}

impl Estimate {
    /// The whole interval lies outside of the band that counts as the same.
    pub fn is_apart(&self) -> bool {
        self.interval.is_some_and(outlook::is_apart)
    }
}

/// A ratio of two placements, or of two documents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratio {
    /// Ratio of the first side to the second side.
    pub ratio: Option<Estimate>,
    /// Geometric mean of the values of the first side in the ratio.
    pub first: Option<f64>,
    /// Geometric mean of the values of the second side in the ratio.
    pub second: Option<f64>,
    /// Where the true ratio may lie.
    pub bound: Bound,
    /// The finding.
    pub finding: Finding,
    /// Why the finding is `Inconclusive` or `Turns`; None for any other finding.
    pub why: Option<String>,
    /// The ratio with the devices slowed by the second factor, if it was measured there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_second_factor: Option<Estimate>,
    /// What more clusters would show, at each factor. Empty where they would not help.
    #[serde(skip)]
    outlooks: Vec<Outlook>,
}

impl Ratio {
    /// The finding is inconclusive, and more clusters may decide it.
    pub fn is_open(&self) -> bool {
        self.finding == Finding::Inconclusive && self.bound == Bound::Exact && self.ratio.is_some()
    }

    /// How many clusters would tell whether there is more, less or the same, in words. None where
    /// the clusters are not what keeps the answer open.
    pub fn what_would_tell(&self) -> Option<String> {
        outlook::sentence(&self.outlooks, &outlook::shows)
    }

    /// How many clusters would tell whether the two are the same, in words. None where the clusters
    /// are not what keeps the answer open.
    pub fn what_would_tell_whether_same(&self) -> Option<String> {
        outlook::sentence(&self.outlooks, &outlook::shows_whether_same)
    }

    /// The ratio in words; `not known` where there is none, because not every load generator
    /// reports percentiles.
    pub fn known(&self) -> String {
        self.ratio.map_or_else(|| "not known".into(), |_| self.to_string())
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ratio) = self.ratio else { return write!(f, "–") };
        write!(f, "{}{ratio}", self.bound.words())
    }
}

/// Printed as a factor with its interval.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ×", words::factor(self.value))?;
        match self.interval {
            Some((low, high)) => write!(f, " ({}–{})", words::factor(low), words::factor(high)),
            None => write!(f, " (one cluster)"),
        }
    }
}

/// Mean and sample variance of these values; the variance of one value is 0.
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

/// The geometric mean of values above 0, given as logarithms, with its interval at the level
/// `alpha`. None if there are no values.
fn of_logs(logs: &[f64], alpha: f64) -> Option<Estimate> {
    let count = logs.len();
    if count == 0 {
        return None;
    }
    let (mean, variance) = moments(logs);
    let half = || quantile(alpha, count as f64 - 1.0) * (variance / count as f64).sqrt();
    Some(estimate(mean, (count >= CLUSTERS_MIN).then(half), count))
}

/// The ratio of two geometric means without pairs, given as logarithms, with Welch's interval at
/// the level `alpha`. None if a side is empty.
fn welch(first: &[f64], second: &[f64], alpha: f64) -> Option<Estimate> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let [(mean, variance), (other_mean, other_variance)] = [moments(first), moments(second)];
    let [a, b] = [variance / first.len() as f64, other_variance / second.len() as f64];
    let spread = |part: f64, count: usize| part.powi(2) / (count as f64 - 1.0).max(1.0);
    let degrees = (a + b).powi(2) / (spread(a, first.len()) + spread(b, second.len()));
    let half = || if a + b > 0.0 { quantile(alpha, degrees) * (a + b).sqrt() } else { 0.0 };
    let count = first.len().min(second.len());
    Some(estimate(mean - other_mean, (count >= CLUSTERS_MIN).then(half), count))
}

/// What one cluster shows of a placement.
#[derive(Debug, Clone, Copy)]
struct Observation {
    /// Mean of the logarithms: over the settings, and in each setting over the runs.
    log: f64,
    bound: Bound,
    durability: Durability,
}

/// One observation for each cluster. Of `settings`, those with the cluster's disks, OSDs, factor,
/// copies and neighbours matter. A cluster has an observation only if each of them has a run that
/// counts.
fn observations(runs: &[&Run], settings: &[Setting], metric: Metric) -> BTreeMap<u32, Observation> {
    let mut clusters: BTreeMap<u32, Vec<(&Run, f64)>> = BTreeMap::new();
    for &run in runs {
        if let Some(value) = metric.of(run) {
            clusters.entry(run.testbed).or_default().push((run, value.ln()));
        }
    }
    let observe = |(testbed, found): (u32, Vec<(&Run, f64)>)| {
        let mean = |setting: &Setting| {
            let logs: Vec<f64> = found
                .iter()
                .filter(|(run, _)| setting.holds(&run.cell))
                .map(|(_, log)| *log)
                .collect();
            (!logs.is_empty()).then(|| moments(&logs).0)
        };
        let ground =
            |of: &Setting| (of.disks, of.osds_per_disk, of.slowed_by, of.replicas, of.neighbours);
        let here = ground(&Setting::of(&found.first()?.0.cell));
        let own = settings.iter().filter(|of| ground(of) == here);
        let means =
            own.map(mean).collect::<Option<Vec<f64>>>().filter(|means| !means.is_empty())?;
        let bound = found.iter().fold(Bound::Exact, |bound, (run, _)| bound.and(metric.bound(run)));
        let durability = found.iter().map(|(run, _)| run.durability).min()?;
        Some((testbed, Observation { log: moments(&means).0, bound, durability }))
    };
    clusters.into_iter().filter_map(observe).collect()
}

/// Ratio of a placement's `metric` to that of `against`, over these settings. If the second factor
/// was measured as well, a finding has to hold at both factors.
///
/// A cluster counts if it has runs in every setting in which both placements have runs that count.
/// Placements that share at least two clusters are compared on these clusters, all others without
/// pairs.
pub fn paired(
    results: &Results,
    placement: &str,
    against: &str,
    settings: &[Setting],
    metric: Metric,
) -> Ratio {
    let level = looks::level(results, settings);
    let names = [placement, against];
    let here = at_one_factor(results, names, settings, metric, level);
    let Some(factor) = results.suite.ground.second_slowed_by else { return here };
    let of = |setting: &Setting| Setting { slowed_by: Some(factor), ..setting.clone() };
    let there: Vec<Setting> = settings.iter().map(of).collect();
    if there == settings {
        return here;
    }
    let there = at_one_factor(results, names, &there, metric, level);
    at_both_factors(here, there, [results.suite.ground.slowed_by, factor])
}

/// Ratio of a control's requests per second to those of the placement that it has to equal. The
/// level is [`ALPHA`] whatever the look, because a fault of the instrument has to be noticed.
pub fn of_control(results: &Results, control: &str, wrapped: &str, settings: &[Setting]) -> Ratio {
    at_one_factor(results, [control, wrapped], settings, Metric::Iops, ALPHA)
}

fn at_one_factor(
    results: &Results,
    names: [&str; 2],
    settings: &[Setting],
    metric: Metric,
    alpha: f64,
) -> Ratio {
    let of = |name: &str, setting: &Setting| runs(results, name, setting);
    let counts =
        |name, setting: &Setting| of(name, setting).iter().any(|run| metric.of(run).is_some());
    let both = |setting: &&Setting| names.iter().all(|name| counts(name, setting));
    let settings: Vec<Setting> = settings.iter().filter(both).cloned().collect();
    let mut sides = names.map(|name| {
        let runs: Vec<&Run> = settings.iter().flat_map(|setting| of(name, setting)).collect();
        observations(&runs, &settings, metric)
    });
    let shared: BTreeSet<u32> =
        sides[0].keys().filter(|id| sides[1].contains_key(id)).copied().collect();
    let paired = shared.len() >= CLUSTERS_MIN;
    if paired {
        sides.iter_mut().for_each(|side| side.retain(|id, _| shared.contains(id)));
    }
    let logs =
        sides.each_ref().map(|side| side.values().map(|found| found.log).collect::<Vec<f64>>());
    let (ratio, outlook) = if paired {
        let differences: Vec<f64> =
            logs[0].iter().zip(&logs[1]).map(|(one, two)| one - two).collect();
        (of_logs(&differences, alpha), Outlook::of_pairs(&differences, alpha))
    } else {
        (welch(&logs[0], &logs[1], alpha), Outlook::of_sides(&logs[0], &logs[1], alpha))
    };
    let durable = sides
        .iter()
        .flat_map(BTreeMap::values)
        .all(|found| found.durability != Durability::Volatile);
    let sides = sides.each_ref().map(|side| side.values().copied().collect());
    let found = judge(names, metric, ratio, sides);
    let has_interval = found.ratio.is_some_and(|ratio| ratio.interval.is_some());
    let helps = found.bound == Bound::Exact && durable && has_interval;
    Ratio { outlooks: helps.then_some(outlook).into_iter().collect(), ..found }
}

/// The ratio at two factors: a finding counts only if it holds at both. Devices and network are
/// slowed and Ceph's code is not, so a factor favours the placement that computes more.
fn at_both_factors(here: Ratio, there: Ratio, factors: [u32; 2]) -> Ratio {
    let Some(second) = there.ratio else { return here };
    let outlooks = here.outlooks.iter().chain(&there.outlooks).copied().collect();
    let here = Ratio { outlooks, ..here };
    let [one, two] = factors;
    let verdict = match (here.finding, there.finding) {
        (first, other) if first == other || first == Finding::Inconclusive => None,
        (Finding::More, Finding::Less) | (Finding::Less, Finding::More) => Some((
            Finding::Turns,
            format!(
                "not measurable here: it turns with the factor by which devices are slowed, {here} at {one} and {there} at {two}"
            ),
        )),
        _ => Some((
            Finding::Inconclusive,
            format!(
                "shown with devices slowed by {one} ({here}) and not with devices slowed by {two} ({there})"
            ),
        )),
    };
    match verdict {
        None => Ratio { at_second_factor: Some(second), ..here },
        Some((finding, why)) => {
            Ratio { finding, why: Some(why), at_second_factor: Some(second), ..here }
        }
    }
}

/// Ratio of `metric`, first to second: `first` holds runs of one cell, `second` runs of this cell
/// in another document. The interval is Welch's at the level `alpha`.
pub fn unpaired(
    names: [&str; 2],
    first: &[&Run],
    second: &[&Run],
    metric: Metric,
    alpha: f64,
) -> Ratio {
    let sides = [first, second].map(|runs| {
        let settings: BTreeSet<Setting> = runs.iter().map(|run| Setting::of(&run.cell)).collect();
        let found = observations(runs, &settings.into_iter().collect::<Vec<_>>(), metric);
        found.into_values().collect::<Vec<Observation>>()
    });
    let logs =
        sides.each_ref().map(|side| side.iter().map(|found| found.log).collect::<Vec<f64>>());
    judge(names, metric, welch(&logs[0], &logs[1], alpha), sides)
}

/// The ratio of these observations, with its finding.
fn judge(
    names: [&str; 2],
    metric: Metric,
    ratio: Option<Estimate>,
    sides: [Vec<Observation>; 2],
) -> Ratio {
    let [first, second] = sides.each_ref().map(|side| {
        let logs: Vec<f64> = side.iter().map(|found| found.log).collect();
        (!logs.is_empty()).then(|| moments(&logs).0.exp())
    });
    let [ours, theirs] = sides
        .each_ref()
        .map(|side| side.iter().fold(Bound::Exact, |bound, found| bound.and(found.bound)));
    let bound = ours.and(theirs.inverse());
    let worst = sides.each_ref().map(|side| side.iter().map(|found| found.durability).min());
    let (finding, why) = match find(names, metric, ratio, bound, worst) {
        Ok(finding) => (finding, None),
        Err(why) => (Finding::Inconclusive, Some(why)),
    };
    Ratio {
        ratio,
        first,
        second,
        bound,
        finding,
        why,
        at_second_factor: None,
        outlooks: Vec::new(),
    }
}

/// The finding of a ratio, or the reason why there is none.
fn find(
    names: [&str; 2],
    metric: Metric,
    ratio: Option<Estimate>,
    bound: Bound,
    durability: [Option<Durability>; 2],
) -> Result<Finding, String> {
    let (Some(ratio), [Some(ours), Some(theirs)]) = (ratio, durability) else {
        let what = if metric == Metric::P99 { "valid runs with percentiles" } else { "valid runs" };
        return Err(format!("{} and {} have no {what} that can be compared", names[0], names[1]));
    };
    let Some((low, high)) = ratio.interval else {
        return Err("one cluster has no interval; two are the least".into());
    };
    if let Some((name, _)) =
        names.iter().zip(durability).find(|(_, d)| *d == Some(Durability::Volatile))
    {
        return Err(format!(
            "{name} acknowledges writes that are in memory only, and takes part in no comparison"
        ));
    }
    let same = outlook::is_same((low, high));
    let finding = match bound {
        Bound::Unknown => return Err("both were limited by the client or the machine".into()),
        Bound::Exact if same => Finding::Same,
        Bound::Exact | Bound::AtLeast if low > 1.0 && !same => Finding::More,
        Bound::Exact | Bound::AtMost if high < 1.0 && !same => Finding::Less,
        Bound::Exact => return Err("the interval has both more and less".into()),
        Bound::AtLeast => {
            return Err(
                "the client or the machine was a limit: the truth is this ratio or more".into()
            );
        }
        Bound::AtMost => {
            return Err(
                "the client or the machine was a limit: the truth is this ratio or less".into()
            );
        }
    };
    // The safer placement may win over the less safe one, because it does more; not the other way
    // round. Equal speed is a finding only between equally safe placements.
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

/// Figures of the runs of one cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Number of runs that count.
    pub valid: usize,
    /// Number of runs that do not count.
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
    /// Why the placement might do more than was measured.
    pub lower_bound: Option<String>,
    /// The worst durability of the runs that count.
    pub durability: Option<Durability>,
}

/// Figures of these runs, which are of one cell.
pub fn summary(runs: &[&Run]) -> Summary {
    let counted: Vec<&Run> =
        runs.iter().copied().filter(|run| objections(run).is_empty()).collect();
    let settings: Vec<Setting> =
        runs.first().map(|run| Setting::of(&run.cell)).into_iter().collect();
    let of = |metric: Metric| {
        let found = observations(&counted, &settings, metric);
        of_logs(&found.values().map(|found| found.log).collect::<Vec<f64>>(), ALPHA)
    };
    let histogram = merged(&counted).unwrap_or_default();
    // If the histograms cannot be merged, the percentile is that of the worst repeat, because
    // percentiles are never averaged.
    let percentile = |part: u64, of: &dyn Fn(&Run) -> Option<f64>| {
        let worst = || counted.iter().map(|run| of(run)).collect::<Option<Vec<f64>>>();
        percentile_us(&histogram, part).or_else(|| worst()?.into_iter().reduce(f64::max))
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
mod tests;
