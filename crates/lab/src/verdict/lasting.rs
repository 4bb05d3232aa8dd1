//! What holds for a burst, and what for good.

use std::collections::BTreeSet;

use serde::Serialize;

use super::Ranking;
use super::rank::rank;
use crate::results::{Durability, Results, Run};
use crate::stats::objections;
use crate::stats::steady::Steadiness;

/// Whether results show what lasts.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Lasting {
    /// Whether the deciding runs of each ranked placement do.
    pub placements: Vec<Held>,
    /// The rankings of sustained runs alone. Empty if there are none.
    pub for_good: Vec<Ranking>,
}

/// A placement, and whether its runs show what lasts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Held {
    /// Its name.
    pub placement: String,
    /// Of all its runs of the deciding workload together.
    pub steadiness: Steadiness,
}

impl Lasting {
    /// What results say of the placements in these rankings, given those of sustained runs alone.
    pub(super) fn of(results: &Results, rankings: &[Ranking], sustained: Option<&Results>) -> Lasting {
        let places = rankings.iter().flat_map(|ranking| &ranking.places);
        let held = places.map(|place| Held {
            placement: place.placement.clone(),
            steadiness: steadiness(results, &place.placement, &results.suite.deciding),
        });
        let for_good = sustained.map(|sustained| rank(sustained).0).unwrap_or_default();
        Lasting { placements: held.collect(), for_good }
    }

    /// Whether the runs of these show what lasts: what one of them does not sustain is not sustained.
    pub fn steadiness(&self, names: &[&str]) -> Steadiness {
        let held = self.placements.iter().filter(|held| names.contains(&held.placement.as_str()));
        held.map(|held| held.steadiness).reduce(Steadiness::and).unwrap_or(Steadiness::Unknown)
    }

    /// The ranking of sustained runs of placements with as many copies.
    pub fn ranking(&self, durability: Durability) -> Option<&Ranking> {
        self.for_good.iter().find(|ranking| ranking.durability == durability)
    }
}

/// The runs of a placement in a workload that count, with the suite's own copies and neighbours.
pub(crate) fn counted<'a>(
    results: &'a Results,
    placement: &str,
    workload: &str,
) -> impl Iterator<Item = &'a Run> {
    results.runs.iter().filter(move |run| {
        let cell = &run.cell;
        let same = cell.placement == placement && cell.workload == workload && !cell.is_beside();
        same && objections(run).is_empty()
    })
}

/// Whether the runs of a placement in a workload show what lasts.
pub(super) fn steadiness(results: &Results, placement: &str, workload: &str) -> Steadiness {
    let runs = counted(results, placement, workload).map(Steadiness::of);
    runs.reduce(Steadiness::and).unwrap_or(Steadiness::Unknown)
}

/// The same results with the sustained runs alone. None if no run says whether it is sustained.
pub(crate) fn sustained(results: &Results) -> Option<Results> {
    let known = |run: &Run| Steadiness::of(run) != Steadiness::Unknown;
    if !results.runs.iter().any(known) {
        return None;
    }
    let kept = results.runs.iter().filter(|run| Steadiness::of(run) == Steadiness::Sustained);
    Some(results.with_runs(kept.cloned().collect()))
}

/// The same results with the absorbing runs alone, of placements that have any: what a burst is like.
pub(crate) fn bursts(results: &Results) -> Results {
    let absorbs = |run: &Run| matches!(Steadiness::of(run), Steadiness::Absorbing { .. });
    let absorbing: BTreeSet<(&str, &str)> = results
        .runs
        .iter()
        .filter(|run| absorbs(run) && objections(run).is_empty())
        .map(|run| (run.cell.placement.as_str(), run.cell.workload.as_str()))
        .collect();
    let kept = results.runs.iter().filter(|run| {
        let cell = (run.cell.placement.as_str(), run.cell.workload.as_str());
        absorbs(run) || !absorbing.contains(&cell)
    });
    results.with_runs(kept.cloned().collect())
}
