//! When a comparison needs no more clusters, and at which level it is then read.
//!
//! The method is a group-sequential test that spends its error over the looks (Lan and DeMets,
//! "Discrete sequential boundaries for clinical trials", Biometrika 70, 1983), in proportion to the
//! number of clusters (the power family with exponent 1 of Kim and DeMets, Biometrika 74, 1987).
//! Each look is read at the level that is spent since the look before it. The levels add up to
//! [`ALPHA`], so Bonferroni's bound keeps the rate of errors whatever the looks have in common, and
//! however few clusters there are. Exact boundaries would be narrower, but need normal means with a
//! known variance. The looks are few, because each look that spends little has a wide interval: a
//! look comes when the clusters are half as many again as at the look before it. An interval at
//! such a level is a repeated confidence interval (Jennison and Turnbull, J. R. Statist. Soc. B 51,
//! 1989): it holds at 95 % over all looks together, also if the comparison stops early.

use std::collections::{BTreeMap, BTreeSet};

use super::{Setting, objections};
use crate::results::Results;
use crate::suite::Suite;

/// The rate of errors of a comparison, over all looks together.
pub const ALPHA: f64 = 0.05;

/// The looks at the deciding workload: one with `first` clusters of each placement, one whenever
/// there are half as many again as at the look before it, and one with `last` clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Looks {
    first: u32,
    last: u32,
}

impl Looks {
    /// The looks of a suite.
    pub fn of(suite: &Suite) -> Looks {
        let first = suite.repeats.max(1);
        // Repeats that share a cluster give one observation, so another look has nothing new.
        let last = suite.repeats_max.filter(|_| suite.fresh_clusters).unwrap_or(first);
        Looks { first, last: last.max(first) }
    }

    /// Clusters of each placement at the last look.
    pub fn last(self) -> u32 {
        self.last
    }

    /// Clusters of each placement at each look, in ascending order.
    fn sizes(self) -> impl Iterator<Item = u32> {
        let next = move |clusters: &u32| (clusters + clusters.div_ceil(2)).min(self.last);
        std::iter::successors(Some(self.first), move |clusters| {
            (*clusters < self.last).then(|| next(clusters))
        })
    }

    /// Clusters of each placement at the last look before there are so many; 0 if there is none.
    pub fn before(self, clusters: u32) -> u32 {
        self.sizes().take_while(|size| *size < clusters).last().unwrap_or(0)
    }

    /// The part of [`ALPHA`] that the look at so many clusters of each placement may spend. Before
    /// the first look this is the part of the first look.
    pub fn level(self, clusters: u32) -> f64 {
        let clusters = clusters.clamp(self.first, self.last);
        ALPHA * (f64::from(clusters - self.before(clusters)) / f64::from(self.last))
    }
}

/// The level at which a ratio over these settings is read. For the deciding workload this is the
/// level of the look. For all else, which is looked at once, it is [`ALPHA`].
pub fn level(results: &Results, settings: &[Setting]) -> f64 {
    let decides = settings.iter().any(|setting| setting.workload == results.suite.deciding);
    if decides { Looks::of(&results.suite).level(clusters(results)) } else { ALPHA }
}

/// Number of clusters on which the deciding workload was measured, of the placement that has most.
/// Only runs that count are taken, at the ground's own factor, copies and neighbours.
fn clusters(results: &Results) -> u32 {
    let mut clusters: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    let decides = |cell: &crate::suite::Cell| {
        cell.workload == results.suite.deciding && cell.slowed_by.is_none() && !cell.is_beside()
    };
    for run in results.runs.iter().filter(|run| decides(&run.cell) && objections(run).is_empty()) {
        clusters.entry(&run.cell.placement).or_default().insert(run.testbed);
    }
    clusters.values().map(|testbeds| testbeds.len() as u32).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_looks_spend_is_the_error_rate() {
        for (first, last, sizes) in [
            (3, 3, &[3][..]),
            (4, 5, &[4, 5]),
            (3, 8, &[3, 5, 8]),
            (5, 8, &[5, 8]),
            (1, 20, &[1, 2, 3, 5, 8, 12, 18, 20]),
        ] {
            let looks = Looks { first, last };
            assert_eq!(looks.sizes().collect::<Vec<_>>(), sizes);
            let spent: f64 = sizes.iter().map(|clusters| looks.level(*clusters)).sum();
            assert!((spent - ALPHA).abs() < 1e-12, "{first} {last}: {spent}");
        }
        assert_eq!(Looks { first: 3, last: 3 }.level(3), ALPHA, "one look has all of it");
    }

    #[test]
    fn a_suite_that_ended_between_two_looks_is_read_at_what_it_has_spent_since_the_last_look() {
        let looks = Looks { first: 4, last: 8 };
        assert_eq!([3, 4, 5, 6, 7].map(|clusters| looks.before(clusters)), [0, 0, 4, 4, 6]);
        assert_eq!(looks.level(5), ALPHA / 8.0);
        assert_eq!(looks.level(2), looks.level(4), "before the first look");
    }
}
