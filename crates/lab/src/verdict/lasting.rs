//! What holds for a burst, and what holds for good.

use std::collections::BTreeSet;

use serde::Serialize;

use super::Ranking;
use super::rank::rank;
use crate::results::{Durability, Results, Run};
use crate::stats::objections;
use crate::stats::steady::Steadiness;

/// Whether results show a speed that lasts.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Lasting {
    /// Each ranked placement, and whether its deciding runs show a speed that lasts.
    pub placements: Vec<Held>,
    /// The rankings of sustained runs alone. Empty if there are none.
    pub for_good: Vec<Ranking>,
}

/// A placement, and whether its runs show a speed that lasts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Held {
    /// Name of the placement.
    pub placement: String,
    /// Steadiness of all runs of the placement in the deciding workload together.
    pub steadiness: Steadiness,
}

impl Lasting {
    /// What results show of the placements in these rankings; `sustained` holds the results of
    /// sustained runs alone.
    pub(super) fn of(
        results: &Results,
        rankings: &[Ranking],
        sustained: Option<&Results>,
    ) -> Lasting {
        let places = rankings.iter().flat_map(|ranking| &ranking.places);
        let held = places.map(|place| Held {
            placement: place.placement.clone(),
            steadiness: steadiness(results, &place.placement, &results.suite.deciding),
        });
        let for_good = sustained.map(|sustained| rank(sustained).0).unwrap_or_default();
        Lasting { placements: held.collect(), for_good }
    }

    /// Steadiness of these placements together: sustained only if each placement is sustained.
    pub fn steadiness(&self, names: &[&str]) -> Steadiness {
        let held = self.placements.iter().filter(|held| names.contains(&held.placement.as_str()));
        held.map(|held| held.steadiness).reduce(Steadiness::and).unwrap_or(Steadiness::Unknown)
    }

    /// The ranking of sustained runs for this durability.
    pub fn ranking(&self, durability: Durability) -> Option<&Ranking> {
        self.for_good.iter().find(|ranking| ranking.durability == durability)
    }
}

/// The runs of a placement in a workload that count, with the ground's copies and neighbours.
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

/// Steadiness of all runs of a placement in a workload that count.
pub(super) fn steadiness(results: &Results, placement: &str, workload: &str) -> Steadiness {
    let runs = counted(results, placement, workload).map(Steadiness::of);
    runs.reduce(Steadiness::and).unwrap_or(Steadiness::Unknown)
}

/// These results with the sustained runs alone. None if no run shows whether it is sustained.
pub(crate) fn sustained(results: &Results) -> Option<Results> {
    let known = |run: &Run| Steadiness::of(run) != Steadiness::Unknown;
    if !results.runs.iter().any(known) {
        return None;
    }
    let kept = results.runs.iter().filter(|run| Steadiness::of(run) == Steadiness::Sustained);
    Some(results.with_runs(kept.cloned().collect()))
}

/// These results as bursts show them: where a placement has absorbing runs of a workload that
/// count, only its absorbing runs of that workload are kept.
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
