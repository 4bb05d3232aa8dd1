//! Whether a cache, a journal or a database on an SSD is worth it at all, against a baseline that
//! has none.

use serde::Serialize;

use super::lasting::{bursts, counted};
use super::rank::rank;
use super::{Lasting, Place};
use crate::placement::{Arrangement, Ssd};
use crate::results::{Durability, Results};
use crate::stats::steady::Steadiness;
use crate::stats::{Bound, EQUIVALENCE, Estimate, Finding, Ratio};

/// The advice that results give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// A placement is ahead of all others with certainty, in bursts or for good.
    Winner,
    /// A cache is worth it in bursts, but not for good.
    OnlyBursts,
    /// No cache is worth it.
    DoNotCache,
    /// The first two placements are equally fast, or it is not known which one is faster.
    NoWinner,
    /// A control came out as different, or nothing can be ranked. Also for a suite of one placement
    /// that was measured with several cluster sizes, which are reported instead.
    NoVerdict,
}

/// No cache is worth it, or only for bursts.
#[derive(Debug, Clone)]
pub(super) struct Unworthy {
    /// The best cache, in bursts if there were any.
    pub best: Place,
    /// The cache is worth it in bursts.
    pub in_bursts: bool,
}

/// Gain of a placement over the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gain {
    /// The placement has more.
    Something,
    /// The placement has no more than what makes no difference.
    Nothing,
    /// The gain is not known.
    Open,
}

/// The placement keeps data on an SSD or in memory, so that it is faster than the disks.
pub(super) fn caches(placement: &str) -> bool {
    let uses = |found: Arrangement| {
        let mut parts = found.placements.iter();
        parts.any(|part| part.ssd() != Ssd::Unused || part.durability() == Durability::Volatile)
    };
    Arrangement::parse(placement).is_ok_and(uses)
}

fn gain(ratio: &Ratio, limited: bool) -> Gain {
    let small =
        |estimate: &Estimate| estimate.interval.is_some_and(|(_, high)| high <= 1.0 + EQUIVALENCE);
    let small = ratio.ratio.as_ref().is_some_and(small)
        && ratio.at_second_factor.as_ref().is_none_or(small);
    let known = !limited && matches!(ratio.bound, Bound::Exact | Bound::AtMost);
    match ratio.finding {
        Finding::More => Gain::Something,
        Finding::Turns => Gain::Open,
        _ if small && known => Gain::Nothing,
        _ => Gain::Open,
    }
}

/// Whether results show that no cache is worth it, or only for bursts. None where a cache is worth
/// it, or this is not known.
pub(super) fn unworthy(results: &Results, lasting: &Lasting) -> Option<Unworthy> {
    let rankings = rank(&bursts(results)).0;
    let suite = &results.suite;
    let limited =
        |name: &str| counted(results, name, &suite.deciding).any(|run| run.lower_bound.is_some());
    let gain = |place: &Place| match &place.over_baseline {
        Some(over) => gain(&over.iops, limited(&place.placement)),
        None => Gain::Open,
    };
    let caching = |place: &&Place| caches(&place.placement);
    let places: Vec<(&Place, Gain)> = rankings
        .iter()
        .flat_map(|ranking| &ranking.places)
        .filter(caching)
        .map(|place| (place, gain(place)))
        .collect();
    let for_good: Vec<(&str, Gain)> = lasting
        .for_good
        .iter()
        .flat_map(|ranking| &ranking.places)
        .filter(caching)
        .map(|place| (place.placement.as_str(), gain(place)))
        .collect();
    if caches(&suite.baseline) || for_good.iter().any(|(_, gain)| *gain == Gain::Something) {
        return None;
    }
    let ratio = |place: &Place| place.over_baseline.as_ref()?.iops.ratio.map(|ratio| ratio.value);
    let best = |wanted: Gain| {
        let found = places.iter().filter(|(_, gain)| *gain == wanted).map(|(place, _)| *place);
        found.max_by(|one, two| ratio(one).unwrap_or(0.0).total_cmp(&ratio(two).unwrap_or(0.0)))
    };
    if places.iter().all(|(_, gain)| *gain == Gain::Nothing) {
        return best(Gain::Nothing).map(|best| Unworthy { best: best.clone(), in_bursts: false });
    }
    // The advice to cache only for bursts needs proof: a cache that gains in bursts must be shown
    // to gain nothing for good.
    let only_then = |place: &Place| {
        let held = lasting.steadiness(&[&place.placement, &suite.baseline]);
        matches!(held, Steadiness::Absorbing { .. })
            && for_good.contains(&(place.placement.as_str(), Gain::Nothing))
    };
    let mut gaining = places.iter().filter(|(_, gain)| *gain == Gain::Something);
    let none_for_good = for_good.iter().all(|(_, gain)| *gain == Gain::Nothing);
    (none_for_good && gaining.all(|(place, _)| only_then(place)))
        .then(|| best(Gain::Something))
        .flatten()
        .map(|best| Unworthy { best: best.clone(), in_bursts: true })
}
