//! What results say: which placement wins, by how much and with what certainty, and what of the published claims holds.
//!
//! Placements are ranked among those with as many copies of an acknowledged write, by requests per second in the deciding
//! workload. One whose writes are in memory only is never ranked, nor is a control, nor one that stands on another SSD.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::breakdown::{Bottleneck, combined};
use crate::results::{Durability, NotRun, Results, Run};
use crate::stats::{self, Estimate, Finding, Metric, Ratio, Setting, paired};
use crate::suite::{Direction, Expect};
use crate::words;

/// Seconds of a drain below which nothing is said about its pace.
const DRAIN_S_MIN: f64 = 1.0;

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
    /// The answer in one sentence.
    pub headline: String,
    /// More of the answer, in sentences.
    pub answer: Vec<String>,
    /// The placements in order, those with most copies first.
    pub rankings: Vec<Ranking>,
    /// What a second copy of a cache on the host costs, and who needs it. None where it was not measured with and without one.
    pub second_copy: Option<SecondCopy>,
    /// Placements that were measured and are not ranked.
    pub unranked: Vec<NotRun>,
    /// What became of the published claims.
    pub directions: Vec<Tested>,
    /// Placements that were not measured.
    pub not_run: Vec<NotRun>,
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
    /// Nobody knows.
    Inconclusive,
}

impl Outcome {
    /// In words.
    pub fn title(self) -> &'static str {
        match self {
            Outcome::Reproduced => "reproduced",
            Outcome::NotReproduced => "not reproduced",
            Outcome::Inconclusive => "inconclusive",
        }
    }
}

/// A published claim, tested.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tested {
    /// The claim.
    #[serde(flatten)]
    pub direction: Direction,
    /// What became of it.
    pub outcome: Outcome,
    /// Requests per second of its placement to those of the other.
    pub iops: Ratio,
    /// What the ratio rests on and where the time goes in both, in sentences.
    pub evidence: String,
    /// The placement's largest hop.
    pub bottleneck: Option<Bottleneck>,
    /// That of the other.
    pub against_bottleneck: Option<Bottleneck>,
}

/// What these results say.
pub fn verdict(results: &Results) -> Verdict {
    let suite = &results.suite;
    let (rankings, unranked) = rank(results);
    let second_copy = second_copy(results, &rankings);
    let (headline, answer) = answer(results, &rankings, second_copy.as_ref(), &unranked);
    Verdict {
        suite: suite.name.clone(),
        suite_sha256: results.suite_sha256.clone(),
        question: suite.question.clone(),
        quick: results.quick,
        caveat: caveat(results),
        headline,
        answer,
        rankings,
        second_copy,
        unranked,
        directions: suite.directions.iter().map(|direction| test(results, direction)).collect(),
        not_run: results.not_run.clone(),
        runs: results.runs.len(),
        invalid_runs: results.runs.iter().filter(|run| !stats::objections(run).is_empty()).count(),
    }
}

fn caveat(results: &Results) -> Option<String> {
    let slowed = results.suite.ground.slowed_by;
    (!results.devices.is_empty()).then(|| {
        let speed = if slowed == 1 { String::new() } else { format!(", slowed by {slowed}") };
        format!("Emulated devices{speed}: relative order only. The figures are those of no machine.")
    })
}

/// Whether a direction's claim holds.
fn outcome(expect: Expect, ratio: &Ratio) -> Outcome {
    let beyond =
        |(low, high): (f64, f64)| low > 1.0 + stats::EQUIVALENCE || high < 1.0 / (1.0 + stats::EQUIVALENCE);
    match (expect, ratio.finding) {
        (Expect::More, Finding::More) | (Expect::Less, Finding::Less) | (Expect::Same, Finding::Same) => {
            Outcome::Reproduced
        }
        (_, Finding::Inconclusive) => Outcome::Inconclusive,
        // A difference that may still be a small one is no evidence against "the same".
        (Expect::Same, _) if !ratio.ratio.and_then(|ratio| ratio.interval).is_some_and(beyond) => {
            Outcome::Inconclusive
        }
        _ => Outcome::NotReproduced,
    }
}

fn test(results: &Results, direction: &Direction) -> Tested {
    let Direction { placement, against, workload, .. } = direction;
    let settings = stats::settings(results, workload);
    let iops = paired(results, placement, against, &settings, Metric::Iops);
    let outcome = outcome(direction.expect, &iops);
    let bottlenecks = [placement, against].map(|name| bottleneck(results, name, workload));
    let mut evidence = match (iops.ratio, iops.first.zip(iops.second)) {
        (Some(_), Some((first, second))) => {
            format!("{} against {} requests per second", words::number(first), words::number(second))
        }
        _ => "Nothing to compare".to_string(),
    };
    if let Some(why) = &iops.why {
        evidence.push_str(&format!("; {why}"));
    } else if outcome == Outcome::Inconclusive {
        evidence.push_str("; not the same, and perhaps not by much");
    } else if outcome == Outcome::NotReproduced && iops.finding == Finding::Same {
        evidence.push_str("; a difference that small counts as none");
    }
    evidence.push('.');
    let [ours, theirs] = &bottlenecks;
    for (name, bottleneck) in [(placement, ours), (against, theirs)] {
        if let Some(bottleneck) = bottleneck {
            evidence.push_str(&format!(" Largest hop of {name}: {bottleneck}."));
        }
    }
    let [bottleneck, against_bottleneck] = bottlenecks;
    Tested { direction: direction.clone(), outcome, iops, evidence, bottleneck, against_bottleneck }
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

/// What a placement's acknowledged writes are safe from, at worst. None if no run of it counts.
pub fn durability(results: &Results, placement: &str) -> Option<Durability> {
    let counted = results.runs.iter().filter(|run| run.cell.placement == placement);
    counted.filter(|run| stats::objections(run).is_empty()).map(|run| run.durability).min()
}

/// The requests per second of a placement in each setting of the deciding workload in which it has them.
fn deciding(results: &Results, placement: &str) -> BTreeMap<Setting, Estimate> {
    let settings = stats::settings(results, &results.suite.deciding).into_iter();
    let iops = |setting: Setting| {
        let iops = stats::summary(&stats::runs(results, placement, &setting)).iops?;
        Some((setting, iops))
    };
    settings.filter_map(iops).collect()
}

/// Why a placement is in no ranking.
fn unrankable(results: &Results, placement: &str, found: &BTreeMap<Setting, Estimate>) -> Option<String> {
    let deciding = &results.suite.deciding;
    if found.is_empty() {
        let of = |run: &&Run| run.cell.placement == placement && run.cell.workload == *deciding;
        let why = results.runs.iter().filter(of).flat_map(stats::objections).next();
        return Some(match why {
            Some(why) => format!("no valid run of {deciding}: {why}"),
            None => format!("{deciding} was not measured on it"),
        });
    }
    if durability(results, placement) == Some(Durability::Volatile) {
        return Some("it acknowledges writes that are in memory only".into());
    }
    if words::is_control(placement) {
        return Some("a control, not a place for an SSD".into());
    }
    words::class(placement)
        .filter(|class| *class != results.suite.ground.ssd)
        .map(|class| format!("it stands on another SSD than the others, {class}"))
}

fn rank(results: &Results) -> (Vec<Ranking>, Vec<NotRun>) {
    let mut unranked = Vec::new();
    let mut classes: BTreeMap<Durability, Vec<Candidate<'_>>> = BTreeMap::new();
    for placement in placements(results) {
        if results.not_run.iter().any(|not_run| not_run.placement == placement) {
            continue;
        }
        let found = deciding(results, placement);
        match (unrankable(results, placement, &found), durability(results, placement)) {
            (None, Some(durability)) => classes.entry(durability).or_default().push((placement, found)),
            (why, _) => {
                let why = why.unwrap_or_default();
                unranked.push(NotRun { placement: placement.into(), why });
            }
        }
    }
    let mut rankings = Vec::new();
    for (durability, class) in classes.into_iter().rev() {
        let (ranking, missing) = ranking(results, durability, class);
        rankings.push(ranking);
        unranked.extend(missing);
    }
    (rankings, unranked)
}

/// A placement with its requests per second in each setting of the deciding workload.
type Candidate<'a> = (&'a str, BTreeMap<Setting, Estimate>);

/// Ranks placements of as many copies. One that lacks a setting of the best covered is left out, for its mean would be that
/// of other conditions.
fn ranking(results: &Results, durability: Durability, class: Vec<Candidate<'_>>) -> (Ranking, Vec<NotRun>) {
    let most = class.iter().map(|(_, found)| found.len()).max().unwrap_or(0);
    let covered = class.iter().find(|(_, found)| found.len() == most);
    let settings: Vec<Setting> =
        covered.map(|(_, found)| found.keys().cloned().collect()).unwrap_or_default();
    let (mut places, mut missing) = (Vec::new(), Vec::new());
    for (placement, found) in &class {
        if let Some(lacking) = settings.iter().find(|setting| !found.contains_key(setting)) {
            let why = format!("no valid run at depth {} with {} client(s)", lacking.depth, lacking.clients);
            missing.push(NotRun { placement: (*placement).into(), why });
            continue;
        }
        let logs = settings.iter().map(|setting| found[setting].value.ln());
        let iops = (logs.sum::<f64>() / settings.len() as f64).exp();
        let baseline = &results.suite.baseline;
        let over_baseline =
            (placement != baseline).then(|| compared(results, placement, baseline, &settings));
        places.push(Place { placement: (*placement).into(), iops, over_baseline });
    }
    places.sort_by(|one, two| two.iops.total_cmp(&one.iops));
    let lead = match places.as_slice() {
        [first, second, ..] => Some(compared(results, &first.placement, &second.placement, &settings)),
        _ => None,
    };
    (Ranking { durability, settings, places, lead }, missing)
}

fn compared(results: &Results, placement: &str, against: &str, settings: &[Setting]) -> Compared {
    let of = |metric| paired(results, placement, against, settings, metric);
    Compared { against: against.into(), iops: of(Metric::Iops), mean: of(Metric::Mean), p99: of(Metric::P99) }
}

/// The sentence about a ranking.
fn lead(ranking: &Ranking) -> String {
    let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) else {
        let only = ranking.places.first().map_or("nothing", |place| place.placement.as_str());
        return format!("No winner: only {only} has valid runs that can be ranked.");
    };
    let (first, second) = (&first.placement, &lead.against);
    match lead.iops.finding {
        Finding::More => format!(
            "{}: {first} wins with {} the requests per second of {second}, the second best. Both keep {} of a write.",
            words::side(first),
            lead.iops,
            words::copies(ranking.durability)
        ),
        Finding::Same => format!(
            "No winner: {first} and {second} are equally fast, within {:.0} % ({}).",
            stats::EQUIVALENCE * 100.0,
            lead.iops
        ),
        _ => format!(
            "No winner: {first} is ahead of {second} ({}), but not with certainty: {}.",
            lead.iops,
            lead.iops.why.as_deref().unwrap_or("the repeats do not agree")
        ),
    }
}

/// What a second copy costs, and what to take where a write has to survive its host: what has two copies in caches, or what has
/// none there.
fn second_copy(results: &Results, rankings: &[Ranking]) -> Option<SecondCopy> {
    let places = || rankings.iter().flat_map(|ranking| &ranking.places);
    let best = |is: &dyn Fn(&Place) -> bool| {
        places().filter(|place| is(place)).max_by(|one, two| one.iops.total_cmp(&two.iops))
    };
    let copied = best(&|place| words::without_copy(&place.placement).is_some())?;
    let single = words::without_copy(&copied.placement)?;
    best(&|place| place.placement == single)?;
    let settings = stats::settings(results, &results.suite.deciding);
    let against = |other: &str| compared(results, &copied.placement, other, &settings);
    let over_others = best(&|place| !words::on_host(&place.placement)).map(|place| against(&place.placement));
    let recommended = match &over_others {
        None => Some(&copied.placement),
        Some(over) => match over.iops.finding {
            Finding::More => Some(&copied.placement),
            Finding::Less => Some(&over.against),
            Finding::Same | Finding::Inconclusive => None,
        },
    };
    let recommended = recommended.cloned();
    Some(SecondCopy { placement: copied.placement.clone(), cost: against(&single), over_others, recommended })
}

/// The sentences about a second copy.
fn of_second_copy(results: &Results, found: &SecondCopy) -> Vec<String> {
    let SecondCopy { placement, cost, over_others, recommended } = found;
    let single = &cost.against;
    let costs = format!(
        "What the second copy costs: {placement} has {} the requests per second of {single}, {} the mean latency and {} the 99th percentile.",
        cost.iops, cost.mean, cost.p99
    );
    let runs = reference_runs(results, single, &results.suite.deciding);
    let dirty = runs.iter().filter_map(|run| run.drained.map(|drained| drained.dirty_bytes)).max();
    let dirty =
        dirty.map(|dirty| format!(", {} at the end of a run", words::bytes(dirty))).unwrap_or_default();
    let lost = format!(
        "{single} loses with its host, or with that host's SSD, what it has not written back{dirty}."
    );
    let needed = "Where an acknowledged write has to survive its host";
    let advice = match (recommended, over_others) {
        (Some(name), None) => format!("{needed}: {name}; nothing else that does was ranked."),
        (Some(name), Some(over)) => {
            let Compared { against, iops, .. } = over;
            let than = format!("{placement} has {iops} the requests per second of {against}");
            format!("{needed}: {name}. {than}, the best that keeps nothing on the host.")
        }
        (None, over) => {
            let over = over.as_ref().map(|over| {
                let Compared { against, iops, .. } = over;
                let why = iops.why.as_deref().unwrap_or("they are equally fast");
                format!("{placement} or {against}, which keeps nothing on the host ({iops}: {why})")
            });
            format!("{needed}: {}.", over.unwrap_or_default())
        }
    };
    vec![costs, lost, advice]
}

/// The headline, and the sentences after it.
fn answer(
    results: &Results,
    rankings: &[Ranking],
    second_copy: Option<&SecondCopy>,
    unranked: &[NotRun],
) -> (String, Vec<String>) {
    let decides = rankings.iter().find(|ranking| ranking.places.len() > 1).or(rankings.first());
    let Some(ranking) = decides else {
        let text = format!(
            "No answer: no placement has a valid run of {} that can be ranked.",
            results.suite.deciding
        );
        return (text, not_run(results));
    };
    let mut answer = Vec::new();
    if let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) {
        answer.push(latencies(&first.placement, lead));
        if let Some(over) = first.over_baseline.as_ref().filter(|over| over.against != lead.against) {
            answer.push(against_baseline(&first.placement, over));
        }
        let waits = [&first.placement, &lead.against].map(|name| {
            let found = bottleneck(results, name, &results.suite.deciding)?;
            Some(format!("Largest hop of {name}: {found}"))
        });
        let waits: Vec<String> = waits.into_iter().flatten().collect();
        if !waits.is_empty() {
            answer.push(format!("{}.", waits.join(". ")));
        }
        let names = [first.placement.as_str(), lead.against.as_str()];
        answer.extend(names.into_iter().filter_map(|name| absorbed(results, name)));
    }
    answer.extend(second_copy.into_iter().flat_map(|found| of_second_copy(results, found)));
    answer.push(conditions(results, ranking));
    answer.push(format!("All of these acknowledge a write with {}.", words::durability(ranking.durability)));
    // What is alone among its like and was told of with its second copy has nothing to win.
    let told = |other: &&Ranking| {
        let [place] = other.places.as_slice() else { return false };
        second_copy.is_some_and(|found| [&found.placement, &found.cost.against].contains(&&place.placement))
    };
    let others = rankings.iter().filter(|other| !std::ptr::eq(*other, ranking));
    for other in others.filter(|other| !told(other)) {
        answer.push(format!("With {}: {}", words::copies(other.durability), lead(other)));
    }
    let mut reasons: Vec<&str> = Vec::new();
    for NotRun { why, .. } in unranked {
        if !reasons.contains(&why.as_str()) {
            reasons.push(why);
        }
    }
    for reason in reasons {
        let same = unranked.iter().filter(|unranked| unranked.why == reason);
        let names: Vec<&String> = same.map(|unranked| &unranked.placement).collect();
        answer.push(format!("Not ranked: {}; {reason}.", words::list(&names)));
    }
    answer.extend(not_run(results));
    let mut headline = lead(ranking);
    // A user who reads nothing else is not to lose writes for that.
    let winner = ranking.places.first().map(|place| &place.placement);
    if let Some(safe) = second_copy.and_then(|found| found.recommended.as_ref())
        && winner != Some(safe)
    {
        headline.push_str(&format!(" Where a write has to survive its host: {safe}."));
    }
    (headline, answer)
}

fn latencies(first: &str, lead: &Compared) -> String {
    format!(
        "Mean latency of {first} is {} that of {}, its 99th percentile {}.",
        lead.mean, lead.against, lead.p99
    )
}

/// What a placement had still to write back when it was measured, and how fast that goes: a burst is not what lasts.
fn absorbed(results: &Results, placement: &str) -> Option<String> {
    let runs = reference_runs(results, placement, &results.suite.deciding);
    let timed = |run: &&Run| run.drained.is_some_and(|drained| drained.seconds >= DRAIN_S_MIN);
    let drained = runs.iter().copied().find(timed)?.drained?;
    let done = drained.dirty_bytes.saturating_sub(drained.hurried_bytes);
    Some(format!(
        "{placement} took in more than it wrote back: {} were left after {} s, of which it wrote back {} in {} s. What lasts for good is what the disks take.",
        words::bytes(drained.dirty_bytes),
        results.suite.seconds + results.suite.ramp_s,
        words::bytes(done),
        words::number(drained.seconds),
    ))
}

fn against_baseline(first: &str, over: &Compared) -> String {
    format!(
        "Against the baseline {}, {first} has {} the requests per second, {} the mean latency and {} the 99th percentile.",
        over.against, over.iops, over.mean, over.p99
    )
}

fn conditions(results: &Results, ranking: &Ranking) -> String {
    let suite = &results.suite;
    let title = suite.workload(&suite.deciding).map_or(suite.deciding.as_str(), |workload| &workload.title);
    let axis = |of: fn(&Setting) -> u32| ranking.settings.iter().map(of).collect::<BTreeSet<u32>>();
    let depths: Vec<u32> = axis(|setting| setting.depth).into_iter().collect();
    let mut text = format!("Decided by {title}, queue depth {}", words::list(&depths));
    type Axis = (&'static str, fn(&Setting) -> u32);
    let others: [Axis; 3] = [
        ("clients", |setting| setting.clients),
        ("disks", |setting| setting.disks),
        ("OSDs on each disk", |setting| setting.osds_per_disk),
    ];
    for (name, of) in others {
        let values: Vec<u32> = axis(of).into_iter().collect();
        if values.len() > 1 {
            text.push_str(&format!(", {name} {}", words::list(&values)));
        }
    }
    format!(
        "{text}; {} of {} s, ratios paired by repeat, with 95 % intervals.",
        words::count(suite.repeats as usize, "repeat"),
        suite.seconds
    )
}

fn not_run(results: &Results) -> Vec<String> {
    let sentence = |NotRun { placement, why }: &NotRun| {
        format!("{placement} was not run: {}.", why.trim_end_matches('.'))
    };
    results.not_run.iter().map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    fn names(verdict: &Verdict) -> Vec<&str> {
        verdict.rankings.iter().flat_map(|r| &r.places).map(|place| place.placement.as_str()).collect()
    }

    fn says(verdict: &Verdict, part: &str) -> bool {
        verdict.answer.iter().any(|sentence| sentence.contains(part))
    }

    #[test]
    fn the_verdict_names_the_winner_by_how_much_and_with_which_certainty() {
        let results = synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("osd-tidepool", &[300.0, 303.0, 297.0]),
            ("host-tidepool", &[900.0, 910.0, 890.0]),
        ]);
        let verdict = verdict(&results);
        assert!(
            verdict.headline.starts_with("In the hypervisor: host-tidepool wins with 3.00 × ("),
            "{}",
            verdict.headline
        );
        assert!(verdict.headline.ends_with(
            "the requests per second of osd-tidepool, the second best. Both keep one copy of a write."
        ));
        assert!(says(&verdict, "Mean latency of host-tidepool is 0.33 × (0.3"));
        assert!(says(&verdict, "Against the baseline bluestore-colocated, host-tidepool has 9.00 ×"));
        assert!(says(&verdict, "queue depth 16; 5 repeats of 60 s"));
        assert!(says(&verdict, "one copy: survives a crash"));
        assert!(verdict.caveat.expect("emulated").contains("slowed by 4: relative order only"));
        assert_eq!(verdict.rankings[0].places.len(), 3);
    }

    #[test]
    fn two_that_cannot_be_told_apart_have_no_winner() {
        let of = |speeds: [&[f64]; 2]| {
            verdict(&synthetic::results(&[("a", speeds[0]), ("b", speeds[1])])).headline
        };
        assert!(of([&[100.0, 140.0, 90.0], &[100.0; 3]]).starts_with("No winner: a is ahead of b (1.08 ×"));
        assert!(
            of([&[103.0, 102.0, 104.0], &[100.0; 3]])
                .starts_with("No winner: a and b are equally fast, within 15 %")
        );
        assert!(of([&[900.0], &[100.0]]).ends_with("one valid pair has no interval; two are the least."));
        assert_eq!(of([&[900.0; 3], &[]]), "No winner: only a has valid runs that can be ranked.");
        assert!(
            of([&[], &[0.0, f64::NAN]]).starts_with("No answer: no placement has a valid run of 4k-80-20")
        );
    }

    #[test]
    fn volatile_controls_and_other_ssds_are_shown_and_never_win() {
        let mut results = synthetic::results(&[
            ("librbd-cache", &[9_000.0; 3]),
            ("osd-passthrough", &[8_000.0; 3]),
            ("filestore-journal@ssd-sata-consumer", &[7_000.0; 3]),
            ("host-tidepool", &[200.0; 3]),
            ("bluestore-colocated", &[100.0; 3]),
            ("filestore-journal", &[6_000.0; 3]),
        ]);
        for run in &mut results.runs {
            match run.cell.placement.as_str() {
                "librbd-cache" => run.durability = Durability::Volatile,
                "filestore-journal" => run.invalid.push("an OSD was down".into()),
                _ => {}
            }
        }
        let verdict = verdict(&results);
        assert_eq!(names(&verdict), ["host-tidepool", "bluestore-colocated"]);
        assert!(says(&verdict, "Not ranked: librbd-cache; it acknowledges writes that are in memory only."));
        assert!(says(&verdict, "Not ranked: osd-passthrough; a control"));
        assert!(says(&verdict, "on another SSD than the others, ssd-sata-consumer"));
        assert!(says(&verdict, "Not ranked: filestore-journal; no valid run of 4k-80-20: an OSD was down."));
        assert_eq!((verdict.runs, verdict.invalid_runs), (18, 3));
    }

    #[test]
    fn placements_are_ranked_among_those_with_as_many_copies() {
        let mut results = synthetic::results(&[
            ("host-tidepool", &[900.0; 3]),
            ("bluestore-colocated", &[90.0; 3]),
            ("bluestore-dbwal", &[100.0; 3]),
            ("filestore-journal", &[50.0; 3]),
        ]);
        for run in &mut results.runs {
            if run.cell.placement.starts_with("bluestore") {
                run.durability = Durability::Replicated;
            }
        }
        let verdict = verdict(&results);
        assert_eq!(
            names(&verdict),
            ["bluestore-dbwal", "bluestore-colocated", "host-tidepool", "filestore-journal"]
        );
        assert!(verdict.headline.starts_with("No winner: bluestore-dbwal and"), "{}", verdict.headline);
        assert!(says(&verdict, "With one copy: In the hypervisor: host-tidepool wins"));
    }

    #[test]
    fn a_second_copy_has_its_price_and_is_advised_where_a_write_has_to_survive_its_host() {
        let of = |copied: &[f64], under: &[f64]| {
            verdict(&synthetic::results(&[
                ("bluestore-colocated", &[100.0, 101.0, 99.0]),
                ("osd-tidepool", under),
                ("host-tidepool", &[900.0, 910.0, 890.0]),
                ("host-tidepool-replicated", copied),
            ]))
        };
        let fast = [720.0, 727.0, 713.0];
        let found = of(&fast, &[300.0, 301.0, 299.0]);
        assert!(found.headline.starts_with("In the hypervisor: host-tidepool wins with 3.00 × ("));
        assert!(
            found.headline.ends_with("Where a write has to survive its host: host-tidepool-replicated."),
            "{}",
            found.headline
        );
        assert!(says(&found, "What the second copy costs: host-tidepool-replicated has 0.80 × ("));
        assert!(says(&found, "host-tidepool loses with its host, or with that host's SSD, what"));
        assert!(says(
            &found,
            "survive its host: host-tidepool-replicated. host-tidepool-replicated has 2.40 × ("
        ));
        assert!(!says(&found, "With two copies"), "{:?}", found.answer);
        assert_eq!(names(&found)[0], "host-tidepool-replicated", "those with most copies come first");
        let copy = found.second_copy.expect("it was measured");
        assert_eq!(
            (copy.cost.against.as_str(), copy.cost.iops.finding),
            ("host-tidepool", Finding::Inconclusive)
        );

        // A cache under the OSDs survives the host as well: nothing is advised that may be slower.
        let found = of(&fast, &[700.0, 300.0, 1_100.0]);
        assert_eq!(found.second_copy.as_ref().expect("measured").recommended, None);
        assert!(says(
            &found,
            "survive its host: host-tidepool-replicated or osd-tidepool, which keeps nothing"
        ));
        assert!(!found.headline.contains("survive its host"), "{}", found.headline);

        let one = verdict(&synthetic::results(&[("host-tidepool", &[9.0; 3]), ("osd-tidepool", &[3.0; 3])]));
        assert_eq!(one.second_copy, None);
    }

    #[test]
    fn what_was_not_measured_is_told() {
        let mut results =
            synthetic::results(&[("host-tidepool", &[900.0; 3]), ("bluestore-colocated", &[90.0; 3])]);
        let why = "openssl is not installed".to_string();
        results.not_run.push(NotRun { placement: "host-tidepool-replicated".into(), why });
        results
            .runs
            .extend((1..=3).map(|repeat| synthetic::run("host-tidepool", "4k-80-20", 32, repeat, 950.0)));
        let verdict = verdict(&results);
        assert!(says(&verdict, "host-tidepool-replicated was not run: openssl is not installed."));
        assert!(says(&verdict, "Not ranked: bluestore-colocated; no valid run at depth 32"));
        assert!(says(&verdict, "osd-tidepool and librbd-cache; 4k-80-20 was not measured on it."));
        assert_eq!(names(&verdict), ["host-tidepool"]);
    }

    #[test]
    fn a_claim_is_reproduced_refuted_or_open() {
        let tested = |expect: Expect, ours: &[f64]| {
            let mut results = synthetic::results(&[("host-tidepool", ours), ("osd-tidepool", &[100.0; 3])]);
            results.suite.directions.truncate(1);
            results.suite.directions[0].expect = expect;
            verdict(&results).directions.remove(0)
        };
        let (fast, slow, same, vague, open) = (
            [200.0, 201.0, 199.0],
            [50.0, 50.5, 49.5],
            [100.0, 101.0, 99.0],
            [50.0, 300.0, 90.0],
            [112.0, 118.0, 122.0],
        );
        for (expect, ours, outcome) in [
            (Expect::More, fast, Outcome::Reproduced),
            (Expect::More, slow, Outcome::NotReproduced),
            (Expect::More, same, Outcome::NotReproduced),
            (Expect::More, vague, Outcome::Inconclusive),
            (Expect::Less, slow, Outcome::Reproduced),
            (Expect::Less, fast, Outcome::NotReproduced),
            (Expect::Same, same, Outcome::Reproduced),
            (Expect::Same, fast, Outcome::NotReproduced),
            // More with certainty, but perhaps by less than what matters.
            (Expect::Same, open, Outcome::Inconclusive),
        ] {
            let found = tested(expect, &ours);
            assert_eq!(found.outcome, outcome, "{expect:?} {}", found.evidence);
        }
        let evidence = tested(Expect::More, &fast).evidence;
        assert!(evidence.starts_with("200 against 100 requests per second."), "{evidence}");
        assert!(
            evidence.contains("Largest hop of osd-tidepool: store: read (61 % of a read's time)."),
            "{evidence}"
        );
        let missing = tested(Expect::More, &[]);
        assert_eq!(missing.outcome, Outcome::Inconclusive);
        assert!(
            missing.evidence.starts_with("Nothing to compare; no repeat has a valid run of"),
            "{}",
            missing.evidence
        );
    }

    #[test]
    fn the_whole_suite_has_a_verdict_that_can_be_written_as_json() {
        let found = verdict(&synthetic::which_side());
        assert!(found.headline.contains("host-tidepool wins with at least 4."), "{}", found.headline);
        assert!(
            found.headline.ends_with(" Where a write has to survive its host: host-tidepool-replicated."),
            "{}",
            found.headline
        );
        assert_eq!(found.directions.len(), 11);
        assert!(found.directions.iter().all(|tested| tested.iops.ratio.is_some()));
        assert!(serde_json::to_string(&found).is_ok_and(|text| !text.contains("null,null")));
        let empty = verdict(&synthetic::empty());
        assert!(empty.headline.starts_with("No answer") && empty.rankings.is_empty());
    }
}
