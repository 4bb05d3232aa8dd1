//! How the placements stand to each other.

use serde::Serialize;

use super::lasting::Lasting;
use super::rank::{rank, second_copy};
use super::sizes::Sizes;
use crate::results::{Durability, NotRun, Results};
use crate::stats::{Ratio, Setting};

/// What the measurements show of the placements, beside each other.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Standings {
    /// The rankings, the one with most copies first: what placements do in a measurement, be it a
    /// burst. Empty where a control came out as different.
    pub rankings: Vec<Ranking>,
    /// Whether the ranked placements show speeds that last, and the rankings of sustained runs
    /// alone.
    pub lasting: Lasting,
    /// What a second copy of a cache on the host costs, and whether to take it. None where the
    /// cache was not measured with and without the copy.
    pub second_copy: Option<SecondCopy>,
    /// Placements that were measured and are not ranked, each with the reason.
    pub unranked: Vec<NotRun>,
    /// Clusters of different sizes beside each other. None in a suite with several placements, or
    /// where one size was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<Sizes>,
}

/// Placements with the same number of copies of a write, the best first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranking {
    /// What the acknowledged writes of these placements are safe from.
    pub durability: Durability,
    /// The settings in which the placements were measured.
    pub settings: Vec<Setting>,
    /// The placements, by descending requests per second.
    pub places: Vec<Place>,
    /// The first placement against the second one. None where there is one placement only.
    pub lead: Option<Compared>,
}

/// A placement in a ranking.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Place {
    /// Name of the placement in the suite.
    pub placement: String,
    /// Requests per second: geometric mean over settings and clusters.
    pub iops: f64,
    /// Ratios to the baseline. None for the baseline itself.
    pub over_baseline: Option<Compared>,
}

/// A placement against another placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// The other placement.
    pub against: String,
    /// Ratio of the requests per second.
    pub iops: Ratio,
    /// Ratio of the mean latencies.
    pub mean: Ratio,
    /// Ratio of the 99th percentiles of the latency.
    pub p99: Ratio,
}

/// A cache on the host whose writes are also on a second host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SecondCopy {
    /// The placement.
    pub placement: String,
    /// Against the same cache with one copy, which is lost with its host.
    pub cost: Compared,
    /// Against the best placement without a cache on the host. None where no such placement is
    /// ranked.
    pub over_others: Option<Compared>,
    /// The placement to take where an acknowledged write has to survive its host. None where this
    /// is not certain.
    pub recommended: Option<String>,
}

impl Standings {
    /// What results show; `sustained` holds the results of sustained runs alone.
    pub(super) fn of(results: &Results, sustained: Option<&Results>) -> Standings {
        let (rankings, unranked) = rank(results);
        Standings {
            lasting: Lasting::of(results, &rankings, sustained),
            second_copy: second_copy(results, &rankings),
            sizes: Sizes::of(results),
            rankings,
            unranked,
        }
    }

    /// The ranking that decides: the first one with several placements, or else the first one.
    pub(super) fn deciding(&self) -> Option<&Ranking> {
        self.rankings.iter().find(|ranking| ranking.places.len() > 1).or(self.rankings.first())
    }

    /// Takes everything back that does not count where the instrument is at fault: all but the list
    /// of placements that are not ranked.
    pub(super) fn take_back(&mut self) {
        *self = Standings { unranked: std::mem::take(&mut self.unranked), ..Standings::default() };
    }
}
