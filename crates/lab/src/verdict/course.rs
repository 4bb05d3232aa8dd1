//! Claims along an axis: whether a figure rises, falls or stays level.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::Outcome;
use super::claims::{figure, metric};
use super::plateau::Plateau;
use crate::results::Results;
use crate::stats::{self, Finding, Ratio, Setting, Stretch, paired};
use crate::suite::{Along, Axis, Direction, Trend};
use crate::words;

/// A placement along an axis, alone or relative to another placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Course {
    /// The axis.
    pub along: Along,
    /// The points of the axis, in ascending order.
    pub points: Vec<Point>,
    /// The steps from each point to the next one; their intervals hold together at 95 %.
    pub steps: Vec<Step>,
    /// Ratio of the last point to the first point. None where there are fewer than two points.
    pub change: Option<Ratio>,
    /// What was busiest where the claim expects a level figure. None where the claim expects none,
    /// or nothing was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plateau: Option<Plateau>,
}

/// Fewest processors on which clusters of different sizes are compared. On fewer, OSDs wait for
/// each other's processors and do not show how they scale.
pub(super) const CPUS_MIN: usize = 16;

/// Why nothing can be concluded along an axis on this machine. None for an axis that is not one of
/// OSDs, and on a machine with enough processors.
pub(super) fn hindrance(results: &Results, along: Along) -> Option<String> {
    let cpus = results.machine.cpus;
    let scales = matches!(along, Along::Osds | Along::OsdsPerNode);
    (scales && cpus < CPUS_MIN).then(|| {
        let has = words::count(cpus, "processor");
        format!("clients and OSDs share {has}, and how OSDs scale takes at least {CPUS_MIN}")
    })
}

/// A point of an axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Position on the axis.
    pub at: u32,
    /// The placement's figure in the direction's metric: requests or bytes per second, or
    /// microseconds.
    pub figure: f64,
    /// Ratio to the other placement. None where the placement is followed alone.
    pub ratio: Option<Ratio>,
}

/// The step from a point of an axis to the next one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// Position of the earlier point.
    pub from: u32,
    /// Position of the later point.
    pub to: u32,
    /// Ratio of the later point to the earlier point.
    pub ratio: Ratio,
}

/// Position of a setting on an axis.
fn place(results: &Results, along: Along, setting: &Setting) -> u32 {
    let osds = setting.disks.saturating_mul(setting.osds_per_disk);
    match along {
        Along::Depth => setting.depth,
        Along::Clients => setting.clients,
        Along::Osds => osds,
        Along::OsdsPerNode => osds / results.suite.ground.servers.max(1),
        Along::Replicas => setting.replicas.unwrap_or(results.suite.ground.replicas),
        Along::Neighbours => {
            setting.neighbours.or(results.suite.ground.neighbours).map_or(0, |found| found.count)
        }
    }
}

/// The parts of a setting that have to stay the same along an axis.
fn rest(along: Along, setting: &Setting) -> [u32; 4] {
    match along {
        Along::Depth => [setting.disks, setting.osds_per_disk, setting.clients, 0],
        Along::Clients => [setting.disks, setting.osds_per_disk, setting.depth, 0],
        Along::Osds | Along::OsdsPerNode => [setting.depth, setting.clients, 0, 0],
        Along::Replicas | Along::Neighbours => {
            [setting.disks, setting.osds_per_disk, setting.depth, setting.clients]
        }
    }
}

/// The settings that may be points of an axis: those with the ground's copies and neighbours, and
/// along an axis of copies or neighbours also the others.
fn measured(results: &Results, workload: &str, along: Along) -> Vec<Setting> {
    let mut settings = match along {
        Along::Replicas | Along::Neighbours => stats::settings_beside(results, workload),
        _ => return stats::settings(results, workload),
    };
    let other_axis = |of: &Setting| match along {
        Along::Replicas => of.neighbours.is_some(),
        _ => of.replicas.is_some(),
    };
    settings.retain(|setting| !other_axis(setting));
    settings
}

/// The settings at each point of an axis that were measured on all placements of the direction. The
/// points differ in nothing else.
fn points(results: &Results, direction: &Direction, along: Along) -> BTreeMap<u32, Vec<Setting>> {
    let metric = metric(direction.metric);
    let names = [Some(&direction.placement), direction.against.as_ref()];
    let counts = |setting: &Setting| {
        names.into_iter().flatten().all(|name| {
            stats::runs(results, name, setting).iter().any(|run| metric.of(run).is_some())
        })
    };
    let mut points: BTreeMap<u32, Vec<Setting>> = BTreeMap::new();
    let of_claim =
        |setting: &Setting| direction.counts(setting.clients, setting.disks) && counts(setting);
    for setting in measured(results, &direction.workload, along).into_iter().filter(of_claim) {
        points.entry(place(results, along, &setting)).or_default().push(setting);
    }
    let rests = points.values().map(|settings| settings.iter().map(|of| rest(along, of)).collect());
    let everywhere: Option<BTreeSet<[u32; 4]>> = rests.reduce(|one: BTreeSet<_>, two| &one & &two);
    let everywhere = everywhere.unwrap_or_default();
    points
        .values_mut()
        .for_each(|settings| settings.retain(|of| everywhere.contains(&rest(along, of))));
    points.retain(|_, settings| !settings.is_empty());
    points
}

impl Course {
    /// The course of a direction along its axis.
    pub(super) fn of(results: &Results, direction: &Direction, along: Along) -> Course {
        let Direction { placement, against, .. } = direction;
        let (metric, against) = (metric(direction.metric), against.as_deref());
        let found: Vec<(u32, Vec<Setting>)> =
            points(results, direction, along).into_iter().collect();
        let change = |from: &[Setting], to: &[Setting], intervals: usize| {
            stats::change(results, placement, against, Stretch { from, to, intervals }, metric)
        };
        let steps = found.windows(2).map(|pair| {
            let [(from, earlier), (to, later)] = pair else { unreachable!("a window of two") };
            Step { from: *from, to: *to, ratio: change(earlier, later, found.len() - 1) }
        });
        let point = |(at, settings): &(u32, Vec<Setting>)| {
            let ratio = against.map(|other| paired(results, placement, other, settings, metric));
            let own = || figure(results, direction, placement, settings);
            Some(Point { at: *at, figure: own()?, ratio })
        };
        let level = direction.axis.and_then(|axis| axis.plateau_beyond);
        let level = level.and_then(|point| found.iter().find(|(at, _)| *at >= point));
        Course {
            along,
            plateau: level
                .and_then(|(at, settings)| Plateau::of(results, direction, *at, settings, metric)),
            steps: steps.collect(),
            points: found.iter().filter_map(point).collect(),
            change: match found.as_slice() {
                [(_, first), .., (_, last)] => Some(change(first, last, 1)),
                _ => None,
            },
        }
    }

    /// The outcome of the claim, and the reason for it; the reason is empty if the claim holds.
    pub(super) fn outcome(&self, axis: Axis, is_latency: bool) -> (Outcome, String) {
        let Some(change) = &self.change else {
            let points = if self.points.is_empty() { "no point" } else { "one point" };
            return (Outcome::Inconclusive, format!("measured at {points} of the axis only"));
        };
        match (axis.trend, axis.plateau_beyond) {
            (Some(trend), _) => of_trend(trend, change),
            (None, Some(point)) => self.of_plateau(point, is_latency),
            (None, None) => (Outcome::Inconclusive, "nothing is claimed along the axis".into()),
        }
    }

    /// The claim holds if no step beyond the point makes a difference, and at least one step up to
    /// the point is better.
    fn of_plateau(&self, point: u32, is_latency: bool) -> (Outcome, String) {
        let before: Vec<&Step> = self.steps.iter().filter(|step| step.to <= point).collect();
        let beyond: Vec<&Step> = self.steps.iter().filter(|step| step.from >= point).collect();
        let along = self.along.title();
        if before.is_empty() || beyond.is_empty() {
            let side = if beyond.is_empty() { "beyond" } else { "up to" };
            return (Outcome::Inconclusive, format!("no step {side} {point} {along} was measured"));
        }
        let turns = |step: &&&Step| step.ratio.finding == Finding::Turns;
        if before.iter().chain(&beyond).find(turns).is_some() {
            return (
                Outcome::NotMeasurable,
                "a step turns with the factor by which devices are slowed".into(),
            );
        }
        let better = if is_latency { Finding::Less } else { Finding::More };
        let rises = before.iter().any(|step| step.ratio.finding == better);
        let level = |step: &&Step| step.ratio.finding == Finding::Same;
        if let Some(step) = beyond.iter().find(|step| is_beyond(&step.ratio)) {
            let Step { from, to, ratio } = step;
            return (
                Outcome::NotReproduced,
                format!("from {from} to {to} {along} it changes ({ratio})"),
            );
        }
        let open = |step: &&&Step| step.ratio.finding == Finding::Inconclusive;
        match (rises, beyond.iter().all(level), before.iter().find(open)) {
            (true, true, _) => (Outcome::Reproduced, String::new()),
            (false, _, None) => {
                (Outcome::NotReproduced, format!("no step up to {point} {along} is better"))
            }
            (false, _, Some(step)) => (Outcome::Inconclusive, unsure(step, along)),
            (true, false, _) => {
                let step = beyond.iter().find(|step| !level(step)).expect("not all are level");
                (Outcome::Inconclusive, unsure(step, along))
            }
        }
    }

    /// The points in words: figures or ratios.
    pub(super) fn words(&self, direction: &Direction) -> String {
        let point = |point: &Point| match &point.ratio {
            Some(ratio) => format!("{ratio} at {}", point.at),
            None => {
                format!("{} at {}", super::claims::amount(direction.metric, point.figure), point.at)
            }
        };
        let points: Vec<String> = self.points.iter().map(point).collect();
        if points.is_empty() {
            "–".into()
        } else {
            format!("{} ({})", words::list(&points), self.along.title())
        }
    }
}

fn unsure(step: &Step, along: &str) -> String {
    let Step { from, to, ratio } = step;
    let why = ratio.why.as_deref().unwrap_or("not the same, and perhaps not by much");
    format!("from {from} to {to} {along} it is open ({ratio}: {why})")
}

/// The whole interval lies outside of the band that counts as the same, at both factors if there
/// are two.
pub(super) fn is_beyond(ratio: &Ratio) -> bool {
    matches!(ratio.finding, Finding::More | Finding::Less)
        && ratio.ratio.is_some_and(|ratio| ratio.is_apart())
        && ratio.at_second_factor.is_none_or(|ratio| ratio.is_apart())
}

fn of_trend(trend: Trend, change: &Ratio) -> (Outcome, String) {
    let wanted = match trend {
        Trend::Rises => Finding::More,
        Trend::Falls => Finding::Less,
    };
    let why = change.why.clone().unwrap_or_default();
    match change.finding {
        Finding::Turns => (Outcome::NotMeasurable, why),
        Finding::Inconclusive => (Outcome::Inconclusive, why),
        Finding::Same => (Outcome::NotReproduced, "a change that small counts as none".into()),
        found if found != wanted => (Outcome::NotReproduced, "it goes the other way".into()),
        _ if is_beyond(change) => (Outcome::Reproduced, String::new()),
        _ => (Outcome::Inconclusive, "not the same, and perhaps not by much".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{Measure, Published};
    use crate::synthetic;
    use crate::verdict::{Tested, verdict};

    /// A placement, its OSDs on each of two disks, the queue depth, and the requests per second on
    /// each cluster.
    type Speeds<'a> = (&'a str, u32, u32, &'a [f64]);

    /// Results of a workload that does not decide, with one direction.
    fn results(speeds: &[Speeds<'_>], against: Option<&str>, axis: Axis) -> Results {
        let mut results = synthetic::empty();
        for (placement, osds_per_disk, depth, repeats) in speeds {
            for (repeat, &iops) in (1..).zip(repeats.iter()) {
                let mut run = synthetic::run(placement, "4k-randwrite", *depth, repeat, iops);
                run.cell.osds_per_disk = *osds_per_disk;
                run.testbed += 100 * osds_per_disk;
                results.runs.push(run);
            }
        }
        results.suite.directions.truncate(1);
        let direction = &mut results.suite.directions[0];
        direction.workload = "4k-randwrite".into();
        (direction.placement, direction.against) = ("a".into(), against.map(String::from));
        (direction.expect, direction.axis) = (None, Some(axis));
        direction.published = vec![
            Published { ratio: 2.62, at: Some("queue depth 6".into()) },
            Published { ratio: 1.3, at: Some("queue depth 64".into()) },
        ];
        results
    }

    fn tested(results: &Results) -> Tested {
        verdict(results).directions.remove(0)
    }

    const FALLS: Axis =
        Axis { along: Along::Depth, trend: Some(Trend::Falls), plateau_beyond: None };
    const RISES: Axis =
        Axis { along: Along::Depth, trend: Some(Trend::Rises), plateau_beyond: None };

    /// Results in which the ratio of `a` to `b` at two depths has these values on the clusters.
    fn trend(axis: Axis, first: &[f64], last: &[f64]) -> Results {
        let same = [100.0; 3];
        let speeds =
            [("a", 1, 6, first), ("a", 1, 64, last), ("b", 1, 6, &same), ("b", 1, 64, &same)];
        results(&speeds, Some("b"), axis)
    }

    #[test]
    fn a_trend_is_reproduced_refuted_or_open() {
        let (high, low) = ([262.0, 265.0, 259.0], [130.0, 131.0, 129.0]);
        for (axis, first, last, outcome, why) in [
            (FALLS, high, low, Outcome::Reproduced, "first one."),
            (RISES, low, high, Outcome::Reproduced, "first one."),
            (FALLS, low, high, Outcome::NotReproduced, "goes the other way"),
            (RISES, high, low, Outcome::NotReproduced, "goes the other way"),
            (FALLS, low, [129.0, 131.0, 130.0], Outcome::NotReproduced, "counts as none"),
            // Certainly less, but perhaps by less than what matters.
            (FALLS, [100.0; 3], [80.0, 88.0, 84.0], Outcome::Inconclusive, "perhaps not by much"),
            (FALLS, high, [20.0, 400.0, 90.0], Outcome::Inconclusive, "both more and less"),
        ] {
            let found = tested(&trend(axis, &first, &last));
            assert_eq!(found.outcome, outcome, "{axis:?} {first:?} {last:?}: {}", found.evidence);
            assert!(found.evidence.contains(why), "{}", found.evidence);
        }
        let found = tested(&trend(FALLS, &high, &low));
        assert!(found.found().starts_with("2.62 × (2.5"), "{}", found.found());
        assert!(found.found().ends_with(" at 64 (queue depth)"), "{}", found.found());
        assert_eq!(found.published(), "2.62 × at queue depth 6 and 1.30 × at queue depth 64");
        assert_eq!(found.direction.expected(), "falls with the queue depth");
    }

    #[test]
    fn an_axis_with_one_point_says_nothing() {
        let mut results = trend(FALLS, &[262.0, 265.0, 259.0], &[130.0, 131.0, 129.0]);
        // The other placement has one depth only, so only this depth can be compared.
        results.runs.retain(|run| run.cell.placement == "a" || run.cell.depth == 6);
        let found = tested(&results);
        assert_eq!((found.outcome, found.ratio.is_none()), (Outcome::Inconclusive, true));
        let why = "Nothing to compare; measured at one point of the axis only.";
        assert!(found.evidence.starts_with(why), "{}", found.evidence);
        results.runs.clear();
        assert!(tested(&results).evidence.contains("measured at no point of the axis"));
    }

    #[test]
    fn a_trend_of_a_latency_goes_the_other_way_than_that_of_requests() {
        let mut results = trend(RISES, &[262.0, 265.0, 259.0], &[130.0, 131.0, 129.0]);
        for metric in [Measure::Mean, Measure::P99] {
            results.suite.directions[0].metric = metric;
            let found = tested(&results);
            assert_eq!(found.outcome, Outcome::Reproduced, "{metric:?} {}", found.evidence);
        }
        results.suite.directions[0].metric = Measure::Bandwidth;
        assert_eq!(tested(&results).outcome, Outcome::NotReproduced);
    }

    #[test]
    fn points_differ_in_nothing_but_the_axis() {
        let mut results = trend(FALLS, &[262.0, 265.0, 259.0], &[130.0, 131.0, 129.0]);
        // Eight clients were measured at one depth only, which would look like a trend.
        let more: Vec<_> =
            results.runs.iter().filter(|run| run.cell.depth == 64).cloned().collect();
        results.runs.extend(more.into_iter().map(|mut run| {
            run.cell.clients = 8;
            run.figures.iops *= if run.cell.placement == "a" { 40.0 } else { 1.0 };
            run
        }));
        assert_eq!(tested(&results).outcome, Outcome::Reproduced);
    }

    #[test]
    fn a_trend_that_turns_with_the_factor_is_not_measurable() {
        let (high, low) = ([262.0, 265.0, 259.0], [130.0, 131.0, 129.0]);
        let mut results = trend(FALLS, &high, &low);
        let there = trend(FALLS, &low, &high);
        results.suite.ground.second_slowed_by = Some(8);
        results.runs.extend(there.runs.into_iter().map(|mut run| {
            (run.cell.slowed_by, run.testbed) = (Some(8), run.testbed + 10);
            run
        }));
        assert_eq!(tested(&results).outcome, Outcome::NotMeasurable);
    }

    /// One placement with 1, 2, 4 and 8 OSDs on each of two disks.
    fn plateau(speeds: [&[f64]; 4], metric: Measure) -> Tested {
        let axis = Axis { along: Along::Osds, trend: None, plateau_beyond: Some(4) };
        let speeds: Vec<Speeds<'_>> = [1, 2, 4, 8]
            .into_iter()
            .zip(speeds)
            .map(|(osds, speeds)| ("a", osds, 16, speeds))
            .collect();
        let mut results = results(&speeds, None, axis);
        results.machine.cpus = CPUS_MIN;
        results.suite.directions[0].metric = metric;
        tested(&results)
    }

    #[test]
    fn a_plateau_is_level_beyond_its_point_and_rises_before() {
        let (one, two, level) =
            ([100.0, 101.0, 99.0], [180.0, 181.0, 179.0], [182.0, 180.0, 181.0]);
        for metric in [Measure::Iops, Measure::Bandwidth, Measure::Mean, Measure::P99] {
            let found = plateau([&one, &two, &level, &two], metric);
            assert_eq!(found.outcome, Outcome::Reproduced, "{metric:?} {}", found.evidence);
        }
        let found = plateau([&one, &two, &level, &two], Measure::Iops);
        assert_eq!(found.found(), "100/s at 2, 180/s at 4, 181/s at 8 and 180/s at 16 (OSDs)");
        assert_eq!(found.direction.expected(), "level beyond 4 OSDs");
        let again = [300.0, 301.0, 299.0];
        let vague = [100.0, 300.0, 200.0];
        for (speeds, outcome, why) in [
            ([&one, &two, &two, &again], Outcome::NotReproduced, "from 8 to 16 OSDs it changes"),
            ([&two, &two, &level, &two], Outcome::NotReproduced, "no step up to 4 OSDs is better"),
            ([&one, &two, &level, &vague], Outcome::Inconclusive, "from 8 to 16 OSDs it is open"),
            ([&vague, &two, &level, &two], Outcome::Inconclusive, "from 2 to 4 OSDs it is open"),
        ] {
            let found = plateau(speeds.map(|speeds| speeds.as_slice()), Measure::Iops);
            assert_eq!(found.outcome, outcome, "{speeds:?} {}", found.evidence);
            assert!(found.evidence.contains(why), "{}", found.evidence);
        }
        for along in [Along::Osds, Along::OsdsPerNode] {
            let axis = Axis { along, trend: Some(Trend::Rises), plateau_beyond: None };
            let mut results = results(&[("a", 1, 16, &one), ("a", 2, 16, &two)], None, axis);
            results.machine.cpus = CPUS_MIN - 1;
            let found = tested(&results);
            assert_eq!(found.outcome, Outcome::NotMeasurable, "{}", found.evidence);
            let why = "clients and OSDs share 15 processors, and how OSDs scale takes at least 16";
            assert!(found.evidence.contains(why), "{}", found.evidence);
            results.machine.cpus = CPUS_MIN;
            assert_eq!(tested(&results).outcome, Outcome::Reproduced);
        }
        let nothing = plateau([&one, &two, &[], &[]], Measure::Iops);
        assert_eq!(nothing.outcome, Outcome::Inconclusive);
        assert!(
            nothing.evidence.contains("no step beyond 4 OSDs was measured"),
            "{}",
            nothing.evidence
        );
    }
}
