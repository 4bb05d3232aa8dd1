//! The verdict on results: which placement wins, by how much and with what certainty, and which of
//! the published claims hold.
//!
//! Placements with the same number of copies of an acknowledged write are ranked together, by
//! requests per second in the deciding workload. Never ranked are a placement whose writes are in
//! memory only, a control, a bound, a placement on another SSD, a placement whose OSDs are in
//! guests while those of the baseline are not (or the reverse), and a cache under the OSDs that the
//! rig keeps far from its bound.

mod answer;
mod beside;
mod bounds;
mod claims;
mod control;
mod course;
mod events;
mod headline;
mod lasting;
mod plateau;
mod rank;
mod sizes;
mod standings;
mod worth;

use std::collections::BTreeSet;

use serde::Serialize;

use crate::breakdown::{Bottleneck, combined};
use crate::results::{Durability, NotRun, NotRunClients, NotRunSize, Results, Run};
use crate::stats::{self, Setting};
pub use beside::Beside;
pub use bounds::Bounded;
pub use claims::Tested;
use claims::test;
pub use control::Control;
pub use course::{Course, Point, Step};
pub use events::Happened;
pub use lasting::{Held, Lasting};
pub(crate) use lasting::{bursts, sustained};
pub use plateau::{Limit, MoreClients, Plateau};
use rank::rank;
pub use sizes::{SizePoint, Sizes};
pub use standings::{Compared, Place, Ranking, SecondCopy, Standings};
pub use worth::Advice;

/// The verdict on results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The suite's name.
    pub suite: String,
    /// SHA-256 of the suite in hexadecimal.
    pub suite_sha256: String,
    /// The question of the suite.
    pub question: String,
    /// The suite ran in its quick form.
    pub quick: bool,
    /// What the figures do not measure. None where nothing was emulated.
    pub caveat: Option<String>,
    /// The advice.
    pub advice: Advice,
    /// The answer in one sentence. The second half says what lasts, where that differs.
    pub headline: String,
    /// Further sentences of the answer.
    pub answer: Vec<String>,
    /// The controls, and how they came out.
    pub controls: Vec<Control>,
    /// Placements with a cache, each with its bound.
    pub bounds: Vec<Bounded>,
    /// How the placements stand to each other.
    #[serde(flatten)]
    pub standings: Standings,
    /// What placements do with other copies or neighbours than the ground's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// The published claims, tested.
    pub directions: Vec<Tested>,
    /// Events under load, which rank nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Happened>,
    /// Placements that were not measured, each with the reason.
    pub not_run: Vec<NotRun>,
    /// Cluster sizes that were not measured, each with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_run_sizes: Vec<NotRunSize>,
    /// Numbers of clients that were not measured, each with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_run_clients: Vec<NotRunClients>,
    /// Number of runs.
    pub runs: usize,
    /// Number of runs that do not count.
    pub invalid_runs: usize,
}

/// The outcome of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The claim holds here, too.
    Reproduced,
    /// The claim does not hold here.
    NotReproduced,
    /// The claim cannot be tested here. It turns with the factor by which devices are slowed, the
    /// rig keeps a cache far from its bound, the axis takes more processors than there are, or the
    /// claim needs something that is not there.
    NotMeasurable,
    /// The results do not decide.
    Inconclusive,
}

impl Outcome {
    /// The outcome in words.
    pub fn title(self) -> &'static str {
        match self {
            Outcome::Reproduced => "reproduced",
            Outcome::NotReproduced => "not reproduced",
            Outcome::NotMeasurable => "not measurable here",
            Outcome::Inconclusive => "inconclusive",
        }
    }
}

/// The verdict on these results.
pub fn verdict(results: &Results) -> Verdict {
    let suite = &results.suite;
    let controls = control::controls(results);
    let bounds = bounds::bounds(results);
    let sustained = lasting::sustained(results);
    let mut standings = Standings::of(results, sustained.as_ref());
    let test = |direction| test(results, sustained.as_ref(), &bounds, direction);
    let mut directions: Vec<Tested> = suite.directions.iter().map(test).collect();
    let mut beside = beside::beside(results);
    let (mut advice, mut headline, mut answer) = answer::answer(results, &standings);
    answer.extend(beside::sentences(results, &beside));
    answer.extend(answer::of_controls(results, &controls));
    answer.extend(bounds.iter().filter(|bounded| bounded.rig_fault).map(Bounded::sentence));
    if let Some(control) = controls.iter().find(|control| control.differs()) {
        // The instrument finds a difference between equal placements, so none of its other results
        // counts.
        headline = format!("No verdict: {}", control.sentence());
        answer = answer::of_controls(results, &controls);
        advice = Advice::NoVerdict;
        standings.take_back();
        beside = Vec::new();
        for tested in &mut directions {
            tested.outcome = Outcome::Inconclusive;
            tested.evidence = headline.clone();
        }
    }
    let mut told = events::sentences(results).into_iter();
    if results.runs.is_empty()
        && let Some(first) = told.next()
    {
        // Results of events alone have nothing to rank.
        (headline, answer, advice) = (first, Vec::new(), Advice::NoVerdict);
    }
    answer.extend(told);
    Verdict {
        suite: suite.name.clone(),
        suite_sha256: results.suite_sha256.clone(),
        question: suite.question.clone(),
        quick: results.quick,
        caveat: caveat(results),
        advice,
        headline,
        answer,
        controls,
        bounds,
        standings,
        beside,
        directions,
        events: events::happened(results),
        not_run: results.not_run.clone(),
        not_run_sizes: results.not_run_sizes.clone(),
        not_run_clients: results.not_run_clients.clone(),
        runs: results.runs.len(),
        invalid_runs: results.runs.iter().filter(|run| !stats::objections(run).is_empty()).count(),
    }
}

/// Placements whose order is open and may be decided by more clusters: the first two of each
/// ranking, of all runs and of the sustained runs. A control that shows nothing is included, with
/// the placement that it has to equal.
pub fn undecided(results: &Results) -> BTreeSet<String> {
    let sustained = lasting::sustained(results);
    let rankings =
        [Some(results), sustained.as_ref()].into_iter().flatten().flat_map(|of| rank(of).0);
    let open = rankings.filter_map(|ranking| {
        let lead = ranking.lead.filter(|lead| lead.iops.is_open())?;
        Some([ranking.places.first()?.placement.clone(), lead.against])
    });
    let controls = control::controls(results);
    let silent = controls.into_iter().filter(|control| control.iops.is_open());
    let silent = silent.flat_map(|control| [control.placement, control.against]);
    open.flatten().chain(silent).collect()
}

fn caveat(results: &Results) -> Option<String> {
    let ground = &results.suite.ground;
    let speed = match (ground.slowed_by, ground.second_slowed_by) {
        (1, None) => String::new(),
        (one, None) => format!(", slowed by {one}"),
        (one, Some(two)) => format!(", slowed by {one} and, where it decides, by {two}"),
    };
    (!results.devices.is_empty()).then(|| {
        format!(
            "Emulated devices{speed}: relative order only. The figures are those of no machine."
        )
    })
}

/// The setting of a workload for which details are shown: the first cluster size and number of
/// clients, and the depth nearest to that of the suite's quick form, or the largest depth if the
/// suite has no quick form.
pub fn reference(results: &Results, workload: &str) -> Option<Setting> {
    let settings = stats::settings(results, workload);
    let first = settings.first()?.clone();
    let alike = |setting: &&Setting| {
        (setting.disks, setting.osds_per_disk, setting.clients)
            == (first.disks, first.osds_per_disk, first.clients)
    };
    let wanted = results.suite.quick.as_ref().map_or(u32::MAX, |quick| quick.depth);
    settings.iter().filter(alike).min_by_key(|setting| setting.depth.abs_diff(wanted)).cloned()
}

/// Runs of a placement that count, in the setting for which details are shown.
pub fn reference_runs<'a>(results: &'a Results, placement: &str, workload: &str) -> Vec<&'a Run> {
    let Some(setting) = reference(results, workload) else { return Vec::new() };
    let runs = stats::runs(results, placement, &setting);
    runs.into_iter().filter(|run| stats::objections(run).is_empty()).collect()
}

fn bottleneck(results: &Results, placement: &str, workload: &str) -> Option<Bottleneck> {
    combined(&reference_runs(results, placement, workload)).bottleneck()
}

/// The suite's placements, and after them the other placements that were measured.
pub fn placements(results: &Results) -> Vec<&str> {
    let mut names: Vec<&str> = results.suite.placements.iter().map(String::as_str).collect();
    let measured: BTreeSet<&str> =
        results.runs.iter().map(|run| run.cell.placement.as_str()).collect();
    let others: Vec<&str> = measured.into_iter().filter(|name| !names.contains(name)).collect();
    names.extend(others);
    names
}

/// What a placement's acknowledged writes are safe from, at worst. None if no run or event of the
/// placement counts. An access path that drops flushes says nothing of the placement, unless the
/// deciding workload uses such a path.
pub fn durability(results: &Results, placement: &str) -> Option<Durability> {
    let suite = &results.suite;
    let of_path =
        |name: &str| suite.workload(name).is_some_and(|workload| workload.access.is_volatile());
    let tells = |workload: &str| !of_path(workload) || of_path(&suite.deciding);
    let counted =
        results.runs.iter().filter(|run| run.cell.placement == placement && !run.cell.is_beside());
    let counted =
        counted.filter(|run| stats::objections(run).is_empty() && tells(&run.cell.workload));
    let counted = counted.map(|run| run.durability);
    let events =
        results.events.iter().filter(|run| run.cell.placement == placement && run.is_valid());
    counted.chain(events.map(|run| run.durability)).min()
}

#[cfg(test)]
mod campaigns;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod worth_tests;
