//! Published claims, tested.

use serde::Serialize;

use super::bounds::Bounded;
use super::course::{Course, hindrance, is_beyond};
use super::lasting::steadiness;
use super::{Outcome, bottleneck};
use crate::breakdown::Bottleneck;
use crate::results::Results;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Finding, Metric, Ratio, Setting, paired};
use crate::suite::{Direction, Expect, Measure, Published};
use crate::words;

/// A published claim, tested.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tested {
    /// The claim.
    #[serde(flatten)]
    pub direction: Direction,
    /// The outcome.
    pub outcome: Outcome,
    /// Ratio of the placement's figure to that of the other placement. Along an axis: ratio of the
    /// last point to the first point. None where an axis has fewer than two points, and where the
    /// claim was not tested.
    pub ratio: Option<Ratio>,
    /// The ratio over sustained runs alone. None where no run shows whether it is sustained.
    pub for_good: Option<Ratio>,
    /// What was found along the axis, if the claim has one.
    pub course: Option<Course>,
    /// The evidence for the outcome, and where the time goes in both placements, in sentences.
    pub evidence: String,
    /// Largest hop of the placement.
    pub bottleneck: Option<Bottleneck>,
    /// Largest hop of the other placement.
    pub against_bottleneck: Option<Bottleneck>,
}

impl Tested {
    /// What was found, as ratios with their intervals, or as the figures of a placement alone.
    pub fn found(&self) -> String {
        match (&self.course, &self.ratio) {
            (Some(course), _) => course.words(&self.direction),
            (None, Some(ratio)) => ratio.to_string(),
            (None, None) => "–".into(),
        }
    }

    /// The ratios that the source gives, or a dash where it gives none.
    pub fn published(&self) -> String {
        let one = |Published { ratio, at }: &Published| {
            let at = at.as_ref().map(|at| format!(" at {at}")).unwrap_or_default();
            format!("{} ×{at}", words::factor(*ratio))
        };
        let ratios: Vec<String> = self.direction.published.iter().map(one).collect();
        if ratios.is_empty() { "–".into() } else { words::list(&ratios) }
    }
}

/// The figure by which placements are compared. Bandwidth is compared as requests per second,
/// because all requests have one size.
pub(super) fn metric(measure: Measure) -> Metric {
    match measure {
        Measure::Iops | Measure::Bandwidth => Metric::Iops,
        Measure::Mean => Metric::Mean,
        Measure::P99 => Metric::P99,
    }
}

/// An amount of a measure with its unit.
pub(super) fn amount(measure: Measure, value: f64) -> String {
    match measure {
        Measure::Iops => format!("{}/s", words::number(value)),
        Measure::Bandwidth => format!("{}/s", words::bytes(value as u64)),
        Measure::Mean | Measure::P99 => words::latency(value),
    }
}

/// A value of [`metric`] in the measure of a direction.
fn measured(results: &Results, direction: &Direction, value: f64) -> f64 {
    let block_bytes =
        results.suite.workload(&direction.workload).map_or(0, |workload| workload.block_bytes);
    if direction.metric == Measure::Bandwidth { value * block_bytes as f64 } else { value }
}

/// Figure of a placement in these settings, in the measure of the direction: the geometric mean of
/// all runs that count.
pub(super) fn figure(
    results: &Results,
    direction: &Direction,
    placement: &str,
    settings: &[Setting],
) -> Option<f64> {
    let metric = metric(direction.metric);
    let runs = settings.iter().flat_map(|setting| stats::runs(results, placement, setting));
    let logs: Vec<f64> = runs.filter_map(|run| metric.of(run)).map(f64::ln).collect();
    let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    (!logs.is_empty()).then(|| measured(results, direction, mean))
}

/// The outcome of a ratio, by what is expected of it.
fn outcome(expect: Expect, ratio: &Ratio) -> Outcome {
    match (expect, ratio.finding) {
        (Expect::More, Finding::More)
        | (Expect::Less, Finding::Less)
        | (Expect::Same, Finding::Same) => Outcome::Reproduced,
        (_, Finding::Turns) => Outcome::NotMeasurable,
        (_, Finding::Inconclusive) => Outcome::Inconclusive,
        // A difference that may still be small is no evidence against "the same".
        (Expect::Same, _) if !is_beyond(ratio) => Outcome::Inconclusive,
        _ => Outcome::NotReproduced,
    }
}

/// The outcome of a ratio, and the evidence for it.
fn of_ratio(
    direction: &Direction,
    expect: Expect,
    ratio: &Ratio,
    results: &Results,
) -> (Outcome, String) {
    let outcome = outcome(expect, ratio);
    let mut evidence = match (ratio.ratio, ratio.first.zip(ratio.second)) {
        (Some(_), Some(both)) => {
            let [first, second] = [both.0, both.1].map(|value| measured(results, direction, value));
            match direction.metric {
                Measure::Iops => {
                    format!(
                        "{} against {} requests per second",
                        words::number(first),
                        words::number(second)
                    )
                }
                metric => format!(
                    "{} against {}, the {}",
                    amount(metric, first),
                    amount(metric, second),
                    metric.title()
                ),
            }
        }
        _ => "Nothing to compare".to_string(),
    };
    if let Some(why) = &ratio.why {
        evidence.push_str(&format!("; {why}"));
    } else if outcome == Outcome::Inconclusive {
        evidence.push_str("; not the same, and perhaps not by much");
    } else if outcome == Outcome::NotReproduced && ratio.finding == Finding::Same {
        evidence.push_str("; a difference that small counts as none");
    }
    if outcome == Outcome::Inconclusive {
        let needed = match expect {
            Expect::Same => ratio.what_would_tell_whether_same(),
            Expect::More | Expect::Less => ratio.what_would_tell(),
        };
        needed.into_iter().for_each(|needed| evidence.push_str(&format!("; {needed}")));
    }
    (outcome, evidence)
}

/// Results and a direction for a claim that compares two workloads. The other placement's runs in
/// the other workload are moved to the direction's own workload, under a name with the access path.
/// `None` where both placements are in one workload.
fn beside(results: &Results, direction: &Direction) -> Option<(Results, Direction)> {
    let (other, against) = (direction.against_workload.as_ref()?, direction.against.as_ref()?);
    let access = results.suite.workload(other)?.access;
    let name = format!("{against} over {access}");
    let mut all = results.clone();
    for run in all
        .runs
        .iter_mut()
        .filter(|run| run.cell.workload == *other && run.cell.placement == *against)
    {
        (run.cell.workload, run.cell.placement) = (direction.workload.clone(), name.clone());
    }
    Some((all, Direction { against: Some(name), against_workload: None, ..direction.clone() }))
}

/// A claim that is not tested, because it needs something that is not there.
fn untested(direction: &Direction, needs: &str) -> Tested {
    Tested {
        direction: direction.clone(),
        outcome: Outcome::NotMeasurable,
        ratio: None,
        for_good: None,
        course: None,
        evidence: format!("It needs {needs}."),
        bottleneck: None,
        against_bottleneck: None,
    }
}

/// The outcome of what was found, and the evidence for it: of the course along the claim's axis, or
/// of the ratio.
fn judged(
    results: &Results,
    direction: &Direction,
    course: Option<&Course>,
    ratio: Option<&Ratio>,
) -> (Outcome, String) {
    match (course, direction.axis, direction.expect, ratio) {
        (Some(course), Some(axis), ..) => {
            let (outcome, why) = course.outcome(axis, direction.metric.is_latency());
            let whole = match &course.change {
                Some(change) => format!("The last point has {change} of the first one"),
                None => "Nothing to compare".to_string(),
            };
            (outcome, if why.is_empty() { whole } else { format!("{whole}; {why}") })
        }
        (_, _, Some(expect), Some(ratio)) => of_ratio(direction, expect, ratio, results),
        _ => (Outcome::Inconclusive, "Nothing to compare".to_string()),
    }
}

/// The placements that a claim compares: its own, and the other one if there is one.
fn compared(direction: &Direction) -> impl Iterator<Item = &String> {
    std::iter::once(&direction.placement).chain(&direction.against)
}

/// Why the claim cannot be measured on this rig. Empty if it can.
fn obstacles(results: &Results, bounds: &[Bounded], direction: &Direction) -> Vec<String> {
    let at_fault = |bounded: &&Bounded| {
        let compares = compared(direction).any(|name| *name == bounded.placement);
        bounded.rig_fault && bounded.workload == direction.workload && compares
    };
    let far = bounds.iter().find(at_fault).map(|Bounded { placement, bound, .. }| {
        format!("the rig keeps {placement} far from {bound}, its bound")
    });
    far.into_iter().chain(direction.axis.and_then(|axis| hindrance(results, axis.along))).collect()
}

/// Tests a direction. `sustained` holds the results of sustained runs alone, `bounds` the
/// placements with their bounds.
pub(super) fn test(
    results: &Results,
    sustained: Option<&Results>,
    bounds: &[Bounded],
    direction: &Direction,
) -> Tested {
    if let Some(needs) = &direction.needs {
        return untested(direction, needs);
    }
    if let Some((all, about)) = beside(results, direction) {
        let sustained = sustained.and_then(|sustained| Some(beside(sustained, direction)?.0));
        return Tested {
            direction: direction.clone(),
            ..test(&all, sustained.as_ref(), bounds, &about)
        };
    }
    let Direction { placement, against, workload, .. } = direction;
    let course =
        |results: &Results| direction.axis.map(|axis| Course::of(results, direction, axis.along));
    let found = course(results);
    let of = |results: &Results, course: Option<Course>| match (course, against) {
        (Some(course), _) => course.change,
        (None, Some(against)) => {
            let mut settings = stats::settings(results, workload);
            settings.retain(|setting| direction.counts(setting.clients, setting.disks));
            Some(paired(results, placement, against, &settings, metric(direction.metric)))
        }
        (None, None) => None,
    };
    let ratio = of(results, found.clone());
    let for_good = sustained.and_then(|sustained| of(sustained, course(sustained)));
    let (mut outcome, mut evidence) = judged(results, direction, found.as_ref(), ratio.as_ref());
    for why in obstacles(results, bounds, direction) {
        outcome = Outcome::NotMeasurable;
        evidence.push_str(&format!("; {why}"));
    }
    evidence.push('.');
    if let Some((course, plateau)) =
        found.as_ref().and_then(|course| Some((course, course.plateau.as_ref()?)))
    {
        evidence.push_str(&format!(" {}", plateau.sentence(course.along.title())));
    }
    let held =
        compared(direction).map(|name| steadiness(results, name, workload)).reduce(Steadiness::and);
    if let (Some(Steadiness::Absorbing { absorbed_bytes, .. }), Some(for_good)) = (held, &for_good)
    {
        let bytes = words::bytes(absorbed_bytes);
        evidence.push_str(&format!(" That is for bursts up to {bytes}; for good: {for_good}."));
    }
    let hop = |name: &String| bottleneck(results, name, workload);
    let (ours, theirs) = (hop(placement), against.as_ref().and_then(hop));
    for (name, bottleneck) in compared(direction).zip([&ours, &theirs]) {
        if let Some(bottleneck) = bottleneck {
            evidence.push_str(&format!(" Largest hop of {name}: {bottleneck}."));
        }
    }
    Tested {
        direction: direction.clone(),
        outcome,
        ratio,
        for_good,
        course: found,
        evidence,
        bottleneck: ours,
        against_bottleneck: theirs,
    }
}
