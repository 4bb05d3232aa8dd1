//! The verdict in sentences.

use std::collections::BTreeSet;

use super::control::Control;
use super::headline::first_sentence;
use super::lasting::Lasting;
use super::standings::Standings;
use super::worth::Advice;
use super::{Compared, Ranking, SecondCopy, bottleneck, reference_runs};
use crate::results::{NotRun, NotRunClients, NotRunSize, Results, Run};
use crate::stats::looks::Looks;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Finding, Ratio, Setting};
use crate::words;

/// Shortest drain whose speed is reported, in seconds.
const DRAIN_S_MIN: f64 = 1.0;

/// The sentence about the lead of a ranking.
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
        Finding::Turns => format!(
            "No winner: {first} against {second} is {}.",
            lead.iops.why.as_deref().unwrap_or("not measurable here")
        ),
        Finding::Less | Finding::Inconclusive => format!(
            "No winner: {first} is ahead of {second} ({}), but not with certainty: {}{}.",
            lead.iops,
            lead.iops.why.as_deref().unwrap_or("the repeats do not agree"),
            lead.iops.what_would_tell().map(|needed| format!("; {needed}")).unwrap_or_default()
        ),
    }
}

/// The sentences about a second copy.
fn of_second_copy(results: &Results, found: &SecondCopy) -> Vec<String> {
    let SecondCopy { placement, cost, over_others, recommended } = found;
    let single = &cost.against;
    let costs = format!(
        "What the second copy costs: {placement} has {} the requests per second of {single}, {} the mean latency and {}.",
        cost.iops,
        cost.mean,
        tail(&cost.p99)
    );
    let runs = reference_runs(results, single, &results.suite.deciding);
    let dirty = runs.iter().filter_map(|run| run.drained.map(|drained| drained.dirty_bytes)).max();
    let dirty = dirty
        .map(|dirty| format!(", {} at the end of a run", words::bytes(dirty)))
        .unwrap_or_default();
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

/// The sentence about a ranking, with what lasts of it. A ratio of runs that only absorb never
/// stands alone.
fn lead_that_lasts(ranking: &Ranking, lasting: &Lasting) -> String {
    let lead = lead(ranking);
    let (Some(first), Some(over)) = (ranking.places.first(), &ranking.lead) else { return lead };
    match lasting.steadiness(&[&first.placement, &over.against]) {
        Steadiness::Sustained => lead,
        Steadiness::Varying | Steadiness::Unknown => {
            format!("{lead} Whether that lasts is not known.")
        }
        Steadiness::Absorbing { absorbed_bytes, .. } => {
            format!(
                "For bursts up to {}: {lead} For good: {}",
                words::bytes(absorbed_bytes),
                for_good(ranking, lasting)
            )
        }
    }
}

/// What the sustained runs show of placements with as many copies as those of a ranking.
fn for_good(ranking: &Ranking, lasting: &Lasting) -> String {
    match lasting.ranking(ranking.durability).map(|found| (found, found.places.as_slice())) {
        None | Some((_, [])) => {
            "no placement had a sustained run, so what lasts was not measured.".into()
        }
        Some((_, [only])) => {
            format!("only {} had sustained runs, so nothing is compared.", only.placement)
        }
        Some((found, _)) => lead(found),
    }
}

/// Whether the runs of ranked placements show a speed that lasts, in sentences.
fn of_lasting(lasting: &Lasting) -> Vec<String> {
    let all = |wanted: Steadiness| -> Vec<&str> {
        let of = lasting.placements.iter().filter(|held| held.steadiness == wanted);
        of.map(|held| held.placement.as_str()).collect()
    };
    let mut sentences = Vec::new();
    for held in &lasting.placements {
        if let Steadiness::Absorbing { absorbed_bytes, left_bytes } = held.steadiness {
            sentences.push(format!(
                "{} was absorbing: it took {} of writes in a run, of which {} remained to be written back.",
                held.placement,
                words::bytes(absorbed_bytes),
                words::bytes(left_bytes)
            ));
        }
    }
    let (sustained, unknown) = (all(Steadiness::Sustained), all(Steadiness::Unknown));
    if !sustained.is_empty() {
        let names = words::list(&sustained);
        sentences.push(format!("For bursts and for good, since all runs were sustained: {names}."));
    }
    if !unknown.is_empty() {
        let names = words::list(&unknown);
        sentences.push(format!(
            "The results lack the five windows that show whether a run lasts, of {names}."
        ));
    }
    sentences
}

/// What the controls show, in sentences.
pub(super) fn of_controls(results: &Results, controls: &[Control]) -> Vec<String> {
    let mut sentences: Vec<String> = controls.iter().map(Control::sentence).collect();
    let baseline = &results.suite.baseline;
    let again = words::again(baseline);
    if !results.runs.is_empty() && !controls.iter().any(|control| control.placement == again) {
        sentences.push(format!(
            "{baseline} was not measured twice: nothing shows that the same comes out as the same."
        ));
    }
    sentences
}

/// The placements that are not ranked, a sentence for each reason.
fn not_ranked(unranked: &[NotRun]) -> Vec<String> {
    let mut reasons: Vec<&str> = Vec::new();
    for NotRun { why, .. } in unranked {
        if !reasons.contains(&why.as_str()) {
            reasons.push(why);
        }
    }
    let sentence = |reason: &str| {
        let alike = unranked.iter().filter(|unranked| unranked.why == reason);
        let names: Vec<&String> = alike.map(|unranked| &unranked.placement).collect();
        format!("Not ranked: {}; {reason}.", words::list(&names))
    };
    reasons.into_iter().map(sentence).collect()
}

/// The advice, the headline, and the sentences after it.
pub(super) fn answer(results: &Results, standings: &Standings) -> (Advice, String, Vec<String>) {
    let Standings { rankings, lasting, second_copy, unranked, sizes } = standings;
    let Some(ranking) = standings.deciding() else {
        let text = format!(
            "No answer: no placement has a valid run of {} that can be ranked.",
            results.suite.deciding
        );
        return (Advice::NoVerdict, text, not_run(results));
    };
    let (advice, headline) = match sizes {
        Some(sizes) => (Advice::NoVerdict, sizes.headline(results)),
        None => first_sentence(results, ranking, lasting),
    };
    let mut answer: Vec<String> = sizes.iter().flat_map(|sizes| sizes.sentences()).collect();
    // A reader who reads nothing else must not lose writes, so this sentence comes right after the
    // headline.
    let winner = ranking.places.first().map(|place| &place.placement);
    if let Some(safe) = second_copy.as_ref().and_then(|found| found.recommended.as_ref())
        && winner != Some(safe)
    {
        answer.push(format!("Where a write has to survive its host: {safe}."));
    }
    if sizes.is_none() {
        answer.push(lead_that_lasts(ranking, lasting));
    }
    if let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) {
        answer.push(latencies(&first.placement, lead));
        if let Some(over) = first.over_baseline.as_ref().filter(|over| over.against != lead.against)
        {
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
        answer.extend(names.into_iter().filter_map(|name| written_back(results, name)));
    }
    answer.extend(of_lasting(lasting));
    answer.extend(second_copy.iter().flat_map(|found| of_second_copy(results, found)));
    answer.push(conditions(results, ranking));
    answer.push(format!(
        "All of these acknowledge a write with {}.",
        words::durability(ranking.durability)
    ));
    // A ranking of one placement has no winner. It is left out if the sentences about the second
    // copy name its placement.
    let told = |other: &&Ranking| {
        let [place] = other.places.as_slice() else { return false };
        let names = second_copy.as_ref().map(|found| [&found.placement, &found.cost.against]);
        names.is_some_and(|names| names.contains(&&place.placement))
    };
    let others = rankings.iter().filter(|other| !std::ptr::eq(*other, ranking));
    for other in others.filter(|other| !told(other)) {
        answer.push(format!(
            "With {}: {}",
            words::copies(other.durability),
            lead_that_lasts(other, lasting)
        ));
    }
    answer.extend(not_ranked(unranked));
    answer.extend(not_run(results));
    (advice, headline, answer)
}

fn latencies(first: &str, lead: &Compared) -> String {
    format!(
        "Mean latency of {first} is {} that of {}, its 99th percentile {}.",
        lead.mean,
        lead.against,
        lead.p99.known()
    )
}

/// The ratio of a placement's 99th percentile in words, if it is known.
fn tail(p99: &Ratio) -> String {
    match p99.ratio {
        Some(_) => format!("{p99} the 99th percentile"),
        None => "a 99th percentile that is not known".into(),
    }
}

/// How fast a placement wrote back what it still held after a run.
fn written_back(results: &Results, placement: &str) -> Option<String> {
    let runs = reference_runs(results, placement, &results.suite.deciding);
    let timed = |run: &&Run| run.drained.is_some_and(|drained| drained.seconds >= DRAIN_S_MIN);
    let drained = runs.iter().copied().find(timed)?.drained?;
    let done = drained.dirty_bytes.saturating_sub(drained.hurried_bytes);
    Some(format!(
        "After a run {placement} had {} to write back, and wrote back {} of it in {} s with nothing else to do.",
        words::bytes(drained.dirty_bytes),
        words::bytes(done),
        words::number(drained.seconds),
    ))
}

fn against_baseline(first: &str, over: &Compared) -> String {
    format!(
        "Against the baseline {}, {first} has {} the requests per second, {} the mean latency and {}.",
        over.against,
        over.iops,
        over.mean,
        tail(&over.p99)
    )
}

fn conditions(results: &Results, ranking: &Ranking) -> String {
    let suite = &results.suite;
    let title =
        suite.workload(&suite.deciding).map_or(suite.deciding.as_str(), |workload| &workload.title);
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
    if let Some(neighbours) = suite.ground.neighbours {
        text.push_str(&format!(", beside {neighbours}"));
    }
    let second = suite.ground.second_slowed_by.filter(|factor| {
        results
            .runs
            .iter()
            .any(|run| run.cell.workload == suite.deciding && run.cell.slowed_by == Some(*factor))
    });
    match second {
        Some(factor) => {
            text.push_str(&format!(", with devices slowed by {} and by {factor}", suite.ground.slowed_by))
        }
        None if suite.ground.slowed_by > 1 => text.push_str(
            ", at one factor by which devices are slowed, so that nobody knows whether the order turns with it",
        ),
        None => {}
    }
    let clusters = if suite.fresh_clusters { suite.repeats } else { 1 };
    let most = match Looks::of(suite).last() {
        last if last > clusters => format!(", up to {last} where the order is open"),
        _ => String::new(),
    };
    format!(
        "{text}; {} of each placement{most}, runs of {} s; a cluster counts once, intervals are 95 % over all looks.",
        words::count(clusters as usize, "cluster"),
        suite.seconds
    )
}

fn not_run(results: &Results) -> Vec<String> {
    let sentence = |not_run: &NotRun| {
        format!("{} was not run: {}.", not_run.name(), not_run.why.trim_end_matches('.'))
    };
    let of_size =
        |NotRunSize { size, why }: &NotRunSize| format!("{size}: not measured, as {why}.");
    let of_clients = |NotRunClients { clients, why }: &NotRunClients| {
        format!("{}: not measured, as {why}.", words::count(*clients as usize, "client"))
    };
    let placements = results.not_run.iter().map(sentence);
    let sizes = results.not_run_sizes.iter().map(of_size);
    placements.chain(sizes).chain(results.not_run_clients.iter().map(of_clients)).collect()
}
