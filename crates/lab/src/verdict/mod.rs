//! What results say: which placement wins, by how much and with what certainty, and what of the published claims holds.
//!
//! Placements are ranked among those with as many copies of an acknowledged write, by requests per second in the deciding
//! workload. One whose writes are in memory only is never ranked, nor is a control, a bound, one that stands on another SSD, or a cache
//! under the OSDs that the rig keeps far from its bound.

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
mod worth;

use std::collections::BTreeSet;

use serde::Serialize;

use crate::breakdown::{Bottleneck, combined};
use crate::results::{Durability, NotRun, NotRunClients, NotRunSize, Results, Run};
use crate::stats::{self, Ratio, Setting};
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
use rank::{rank, second_copy};
pub use sizes::{SizePoint, Sizes};
pub use worth::Advice;

/// What results say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The suite's name.
    pub suite: String,
    /// SHA-256 of the suite in hexadecimal.
    pub suite_sha256: String,
    /// What it asks.
    pub question: String,
    /// It ran in its quick form.
    pub quick: bool,
    /// What the figures are no measure of. None where nothing was emulated.
    pub caveat: Option<String>,
    /// What it comes to.
    pub advice: Advice,
    /// The answer in one sentence, of which the second half says what lasts where that is something else.
    pub headline: String,
    /// More of the answer, in sentences.
    pub answer: Vec<String>,
    /// What is the same, and how it came out.
    pub controls: Vec<Control>,
    /// Caches beside what they cannot be faster than.
    pub bounds: Vec<Bounded>,
    /// The placements in order, those with most copies first: what they do in a measurement, be it a burst. Empty where a control came out as
    /// different.
    pub rankings: Vec<Ranking>,
    /// What of it lasts.
    pub lasting: Lasting,
    /// What a second copy of a cache on the host costs, and who needs it. None where it was not measured with and without one.
    pub second_copy: Option<SecondCopy>,
    /// Placements that were measured and are not ranked.
    pub unranked: Vec<NotRun>,
    /// Clusters of different sizes beside each other. None in a suite with several placements, or where one size was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<Sizes>,
    /// What placements do with other copies or neighbours than the ground's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// What became of the published claims.
    pub directions: Vec<Tested>,
    /// What happened under load, which ranks nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Happened>,
    /// Placements that were not measured.
    pub not_run: Vec<NotRun>,
    /// Sizes of clusters that were not measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_run_sizes: Vec<NotRunSize>,
    /// Numbers of clients with which nothing was measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_run_clients: Vec<NotRunClients>,
    /// Runs in all.
    pub runs: usize,
    /// Those that do not count.
    pub invalid_runs: usize,
}

/// Placements with as many copies of a write, the best first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranking {
    /// What their acknowledged writes are safe from.
    pub durability: Durability,
    /// Where they were measured.
    pub settings: Vec<Setting>,
    /// The placements.
    pub places: Vec<Place>,
    /// The first against the second.
    pub lead: Option<Compared>,
}

/// A placement among others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Place {
    /// Its name in the suite.
    pub placement: String,
    /// Its requests per second: geometric mean over settings and repeats.
    pub iops: f64,
    /// Against the baseline; None for the baseline itself.
    pub over_baseline: Option<Compared>,
}

/// A placement against another one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// The other one.
    pub against: String,
    /// Requests per second.
    pub iops: Ratio,
    /// Mean latency.
    pub mean: Ratio,
    /// 99th percentile of the latency.
    pub p99: Ratio,
}

/// A cache on the host whose writes are on a second host, too.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SecondCopy {
    /// The placement.
    pub placement: String,
    /// Against the same with one copy, which is lost with its host.
    pub cost: Compared,
    /// Against the best of those that keep no acknowledged write on the host at all.
    pub over_others: Option<Compared>,
    /// What to take where an acknowledged write has to survive its host. None where it is not certain.
    pub recommended: Option<String>,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It holds here too.
    Reproduced,
    /// It does not.
    NotReproduced,
    /// It turns with the factor by which devices are slowed, rests on what the rig does, or takes more processors than there are.
    NotMeasurable,
    /// Nobody knows.
    Inconclusive,
}

impl Outcome {
    /// In words.
    pub fn title(self) -> &'static str {
        match self {
            Outcome::Reproduced => "reproduced",
            Outcome::NotReproduced => "not reproduced",
            Outcome::NotMeasurable => "not measurable here",
            Outcome::Inconclusive => "inconclusive",
        }
    }
}

/// What these results say.
pub fn verdict(results: &Results) -> Verdict {
    let suite = &results.suite;
    let controls = control::controls(results);
    let bounds = bounds::bounds(results);
    let sustained = lasting::sustained(results);
    let (mut rankings, unranked) = rank(results);
    let mut lasting = Lasting::of(results, &rankings, sustained.as_ref());
    let mut second_copy = second_copy(results, &rankings);
    let test = |direction| test(results, sustained.as_ref(), &bounds, direction);
    let mut directions: Vec<Tested> = suite.directions.iter().map(test).collect();
    let mut sizes = Sizes::of(results);
    let mut beside = beside::beside(results);
    let (mut advice, mut headline, mut answer) =
        answer::answer(results, &rankings, &lasting, second_copy.as_ref(), &unranked, sizes.as_ref());
    answer.extend(beside::sentences(results, &beside));
    answer.extend(answer::of_controls(results, &controls));
    answer.extend(bounds.iter().filter(|bounded| bounded.rig_fault).map(Bounded::sentence));
    if let Some(control) = controls.iter().find(|control| control.differs()) {
        // What the instrument says of the same is wrong, so that nothing else that it says counts.
        headline = format!("No verdict: {}", control.sentence());
        answer = answer::of_controls(results, &controls);
        advice = Advice::NoVerdict;
        (rankings, second_copy, sizes, lasting) = (Vec::new(), None, None, Lasting::default());
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
        // Nothing was to be ranked.
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
        rankings,
        lasting,
        second_copy,
        unranked,
        sizes,
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

/// Placements whose order is open, and more clusters may decide it: the first two of each ranking, of all runs and of the sustained ones;
/// and a control that shows nothing, with what it is to be the same as.
pub fn undecided(results: &Results) -> BTreeSet<String> {
    let sustained = lasting::sustained(results);
    let rankings = [Some(results), sustained.as_ref()].into_iter().flatten().flat_map(|of| rank(of).0);
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
        format!("Emulated devices{speed}: relative order only. The figures are those of no machine.")
    })
}

/// The setting of a workload that details are shown of: the first cluster and number of clients, and the depth that the
/// suite's quick form keeps, else the largest.
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

/// Runs of a placement that count, in the setting that details are shown of.
pub fn reference_runs<'a>(results: &'a Results, placement: &str, workload: &str) -> Vec<&'a Run> {
    let Some(setting) = reference(results, workload) else { return Vec::new() };
    let runs = stats::runs(results, placement, &setting);
    runs.into_iter().filter(|run| stats::objections(run).is_empty()).collect()
}

fn bottleneck(results: &Results, placement: &str, workload: &str) -> Option<Bottleneck> {
    combined(&reference_runs(results, placement, workload)).bottleneck()
}

/// The suite's placements, and after them what else was measured.
pub fn placements(results: &Results) -> Vec<&str> {
    let mut names: Vec<&str> = results.suite.placements.iter().map(String::as_str).collect();
    let measured: BTreeSet<&str> = results.runs.iter().map(|run| run.cell.placement.as_str()).collect();
    let others: Vec<&str> = measured.into_iter().filter(|name| !names.contains(name)).collect();
    names.extend(others);
    names
}

/// What a placement's acknowledged writes are safe from, at worst. None if no run of it counts. A path that drops flushes says nothing of
/// the placement, unless all is decided over it.
pub fn durability(results: &Results, placement: &str) -> Option<Durability> {
    let suite = &results.suite;
    let of_path = |name: &str| suite.workload(name).is_some_and(|workload| workload.access.is_volatile());
    let tells = |workload: &str| !of_path(workload) || of_path(&suite.deciding);
    let counted = results.runs.iter().filter(|run| run.cell.placement == placement && !run.cell.is_beside());
    let counted = counted.filter(|run| stats::objections(run).is_empty() && tells(&run.cell.workload));
    let counted = counted.map(|run| run.durability);
    let events = results.events.iter().filter(|run| run.cell.placement == placement && run.is_valid());
    counted.chain(events.map(|run| run.durability)).min()
}

#[cfg(test)]
mod campaigns;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod worth_tests;
