//! How a figure of a placement, or the ratio of two placements, changes from one point of an axis
//! to another point.
//!
//! At a point there is one logarithm for each cluster. The change is a sum of two or four signed
//! means of these logarithms: the placement's mean at the later point minus its mean at the earlier
//! point. Relative to another placement, the other placement's difference is subtracted from this
//! difference. Values of the same cluster are subtracted on that cluster first, because they have
//! the cluster in common. The interval is that of a sum of independent means (Welch, Biometrika 34,
//! 1947, for any number of means; Satterthwaite, Biometrics Bulletin 2, 1946), which is Student's
//! interval where one mean is left.

use std::collections::{BTreeMap, BTreeSet};

use super::student::quantile;
use super::{
    CLUSTERS_MIN, Estimate, Metric, Observation, Ratio, Setting, at_both_factors, estimate, judge,
    looks, moments, observations, runs,
};
use crate::results::{Results, Run};

/// A group of terms: its sign, and for each cluster the signed sum of the terms.
type Group = (f64, Vec<f64>);

/// The two points between which something changes.
#[derive(Debug, Clone, Copy)]
pub struct Stretch<'a> {
    /// Settings of the earlier point.
    pub from: &'a [Setting],
    /// Settings of the later point.
    pub to: &'a [Setting],
    /// Number of intervals that have to hold together (Bonferroni); 1 for a single interval.
    pub intervals: usize,
}

/// Quotient of a placement's `metric`: later point to earlier point. With `against`, the quotient
/// of the placement's ratios to `against` at these points. If the second factor was measured as
/// well, a finding has to hold at both factors.
pub fn change(
    results: &Results,
    placement: &str,
    against: Option<&str>,
    stretch: Stretch<'_>,
    metric: Metric,
) -> Ratio {
    let level = looks::level(results, stretch.from) / stretch.intervals.max(1) as f64;
    let here = at_one_factor(results, (placement, against), stretch, metric, level);
    let Some(factor) = results.suite.ground.second_slowed_by else { return here };
    let slowed = |settings: &[Setting]| -> Vec<Setting> {
        settings.iter().map(|of| Setting { slowed_by: Some(factor), ..of.clone() }).collect()
    };
    let (from, to) = (slowed(stretch.from), slowed(stretch.to));
    let there = Stretch { from: &from, to: &to, ..stretch };
    let there = at_one_factor(results, (placement, against), there, metric, level);
    at_both_factors(here, there, [results.suite.ground.slowed_by, factor])
}

fn at_one_factor(
    results: &Results,
    (placement, against): (&str, Option<&str>),
    stretch: Stretch<'_>,
    metric: Metric,
    level: f64,
) -> Ratio {
    let at = |name: &str, settings: &[Setting]| {
        let found: Vec<&Run> =
            settings.iter().flat_map(|setting| runs(results, name, setting)).collect();
        observations(&found, settings, metric)
    };
    let mut terms = Vec::new();
    for (name, sign) in [(Some(placement), 1.0), (against, -1.0)] {
        let Some(name) = name else { continue };
        terms.push((sign, at(name, stretch.to)));
        terms.push((-sign, at(name, stretch.from)));
    }
    let ratio = sum(&groups(&mut terms), level);
    // A term that makes the quotient larger belongs to the quotient's first side.
    let side = |wanted: f64| {
        let of = terms.iter().filter(|(sign, _)| *sign == wanted);
        of.flat_map(|(_, found)| found.values().copied()).collect::<Vec<Observation>>()
    };
    let mut sides = [side(1.0), side(-1.0)];
    // A trend has no winner, so a difference in copies must not make it incomparable.
    if let Some(worst) = sides.iter().flatten().map(|found| found.durability).min() {
        sides.iter_mut().flatten().for_each(|found| found.durability = worst);
    }
    let mean = |index: usize| {
        let logs: Vec<f64> = terms.get(index)?.1.values().map(|found| found.log).collect();
        (!logs.is_empty()).then(|| moments(&logs).0)
    };
    let value = |ours: usize, theirs: usize| {
        let log = mean(ours)? - if against.is_some() { mean(theirs)? } else { 0.0 };
        Some(log.exp())
    };
    let [first, second] = [value(0, 2), value(1, 3)];
    let names = [placement, against.unwrap_or(placement)];
    Ratio { first, second, ..judge(names, metric, ratio, sides) }
}

/// Joins the terms that were measured on the same clusters, and drops the observations on other
/// clusters from these terms.
fn groups(terms: &mut [(f64, BTreeMap<u32, Observation>)]) -> Vec<Group> {
    // The choices, best first: all terms together; each placement over both points; both placements
    // at each point; each term alone.
    let ways: &[&[&[usize]]] = match terms.len() {
        2 => &[&[&[0, 1]], &[&[0], &[1]]],
        _ => {
            &[&[&[0, 1, 2, 3]], &[&[0, 1], &[2, 3]], &[&[0, 2], &[1, 3]], &[&[0], &[1], &[2], &[3]]]
        }
    };
    let shared = |part: &[usize]| -> BTreeSet<u32> {
        let everywhere = |id: &u32| part.iter().all(|&index| terms[index].1.contains_key(id));
        terms[part[0]].1.keys().copied().filter(everywhere).collect()
    };
    let joined = |way: &&[&[usize]]| way.iter().all(|part| shared(part).len() >= CLUSTERS_MIN);
    let last = ways.last().expect("there is more than one");
    let way = ways.iter().copied().find(joined).unwrap_or(last);
    let kept: Vec<(&[usize], BTreeSet<u32>)> =
        way.iter().map(|part| (*part, shared(part))).collect();
    let mut groups = Vec::new();
    for (part, clusters) in kept {
        let sign = terms[part[0]].0;
        for &index in part {
            terms[index].1.retain(|id, _| clusters.contains(id));
        }
        let log = |id: &u32| {
            part.iter().map(|&index| terms[index].0 * terms[index].1[id].log).sum::<f64>() * sign
        };
        groups.push((sign, clusters.iter().map(log).collect()));
    }
    groups
}

/// The signed sum of the means of these groups, as a ratio. None if a group is empty.
fn sum(groups: &[Group], alpha: f64) -> Option<Estimate> {
    let count = groups.iter().map(|(_, logs)| logs.len()).min().filter(|count| *count > 0)?;
    let (mut mean, mut variance, mut spread) = (0.0, 0.0, 0.0);
    for (sign, logs) in groups {
        let of = moments(logs);
        let part = of.1 / logs.len() as f64;
        mean += sign * of.0;
        variance += part;
        spread += part.powi(2) / (logs.len() as f64 - 1.0).max(1.0);
    }
    let half = || {
        if variance > 0.0 {
            quantile(alpha, variance.powi(2) / spread) * variance.sqrt()
        } else {
            0.0
        }
    };
    Some(estimate(mean, (count >= CLUSTERS_MIN).then(half), count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Finding;
    use crate::synthetic;

    fn near(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 1e-3
    }

    /// Two placements at two depths, with the requests per second on each cluster.
    fn results(speeds: [(&str, u32, [f64; 3]); 4]) -> Results {
        let mut results = synthetic::empty();
        for (placement, depth, repeats) in speeds {
            for (repeat, iops) in (1..).zip(repeats) {
                results.runs.push(synthetic::run(placement, "4k-randwrite", depth, repeat, iops));
            }
        }
        results
    }

    fn found(results: &Results, against: Option<&str>, intervals: usize) -> Ratio {
        let settings = super::super::settings(results, "4k-randwrite");
        let at = |depth: u32| {
            settings.iter().filter(|of| of.depth == depth).cloned().collect::<Vec<_>>()
        };
        let stretch = Stretch { from: &at(1), to: &at(16), intervals };
        change(results, "a", against, stretch, Metric::Iops)
    }

    /// Clusters that differ by far more than the change that is looked for.
    fn unlike() -> Results {
        results([
            ("a", 1, [100.0, 1_000.0, 10_000.0]),
            ("a", 16, [200.0, 4_000.0, 80_000.0]),
            ("b", 1, [10.0, 100.0, 1_000.0]),
            ("b", 16, [10.0, 100.0, 1_000.0]),
        ])
    }

    #[test]
    fn what_clusters_have_in_common_is_no_part_of_a_change() {
        // Changes of 2, 4 and 8: logarithms 1, 2, 3 times ln 2; mean 2, deviation 1, t for 2
        // degrees 4.3027.
        let half = 4.302_653 / 3f64.sqrt();
        for against in [None, Some("b")] {
            let change = found(&unlike(), against, 1).ratio.expect("a ratio");
            let (low, high) = change.interval.expect("an interval");
            assert!(near(change.value, 4.0) && change.count == 3);
            assert!(
                near(low, 2f64.powf(2.0 - half)) && near(high, 2f64.powf(2.0 + half)),
                "{low} {high}"
            );
        }
        let change = found(&unlike(), Some("b"), 1);
        assert!(
            near(change.first.expect("last"), 40.0) && near(change.second.expect("first"), 10.0)
        );
    }

    #[test]
    fn placements_on_clusters_of_their_own_have_pairs_within_each() {
        let mut results = unlike();
        let others = results.runs.iter_mut().filter(|run| run.cell.placement == "b");
        others.for_each(|run| run.testbed += 100);
        // The other placement does not change at all, so its clusters add nothing to the interval.
        let (apart, together) = (found(&results, Some("b"), 1), found(&unlike(), Some("b"), 1));
        let interval =
            |ratio: &Ratio| ratio.ratio.and_then(|ratio| ratio.interval).expect("an interval");
        assert!(near(interval(&apart).0, interval(&together).0));
        // Points on clusters of their own have no pairs, and the differences between clusters hide
        // the change.
        results
            .runs
            .iter_mut()
            .filter(|run| run.cell.depth == 16)
            .for_each(|run| run.testbed += 1_000);
        let scattered = found(&results, Some("b"), 1);
        assert!(near(scattered.ratio.expect("a ratio").value, 4.0));
        assert!(interval(&scattered).1 > 10.0 * interval(&apart).1, "{scattered}");
        assert_eq!(scattered.finding, Finding::Inconclusive);
    }

    #[test]
    fn intervals_that_hold_together_are_wider_and_one_cluster_has_none() {
        let mut results = unlike();
        let width = |ratio: Ratio| {
            ratio.ratio.and_then(|ratio| ratio.interval).map(|(low, high)| high / low)
        };
        assert!(width(found(&results, None, 3)) > width(found(&results, None, 1)));
        results.runs.retain(|run| run.repeat == 1);
        let one = found(&results, Some("b"), 1);
        assert!(one.why.expect("why").contains("one cluster has no interval"));
        assert_eq!(found(&results, Some("c"), 1).ratio, None);
    }

    #[test]
    fn a_limit_from_outside_leaves_one_direction() {
        let limited = |placement: &str, depth: u32| {
            let mut results = unlike();
            let of = |run: &&mut Run| run.cell.placement == placement && run.cell.depth == depth;
            results
                .runs
                .iter_mut()
                .filter(of)
                .for_each(|run| run.lower_bound = Some("the client".into()));
            found(&results, Some("b"), 1).to_string()
        };
        for (placement, depth, words) in
            [("a", 16, "at least"), ("a", 1, "at most"), ("b", 16, "at most"), ("b", 1, "at least")]
        {
            assert!(limited(placement, depth).starts_with(words), "{placement} {depth}");
        }
    }
}
