//! The first sentence: whether to cache, where, for which load, and how certain this is. Everything
//! else is in the sentences after it.

use super::worth::{Advice, Unworthy, caches, unworthy};
use super::{Lasting, Ranking};
use crate::results::Results;
use crate::stats::steady::Steadiness;
use crate::stats::{EQUIVALENCE, Finding, Ratio};
use crate::words::{self, a};

/// Short form of "requests per second", for a sentence with two halves.
const SHORT: &str = "IOPS";

/// What a ranking shows: which placement is first, and by how much.
struct Clause {
    advice: Advice,
    /// The winner, or that there is no winner.
    head: String,
    /// The winner's ratio, or the reason why there is no winner.
    rest: String,
}

impl Clause {
    fn none(rest: String) -> Clause {
        Clause { advice: Advice::NoWinner, head: "no winner".into(), rest }
    }

    /// The clause as a whole sentence, with the load.
    fn alone(&self, load: &str) -> String {
        format!("{}: {}, for {load}", words::capital(&self.head), self.rest)
    }
}

impl std::fmt::Display for Clause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.head, self.rest)
    }
}

/// The clause about a ranking; `figure` is the name of what is compared.
fn clause(ranking: &Ranking, figure: &str) -> Clause {
    let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) else {
        let only = ranking.places.first().map_or("nothing".into(), |place| a(&place.placement));
        return Clause::none(format!("only {only} has valid runs that can be ranked"));
    };
    let (head, second) = (&first.placement, a(&lead.against));
    let first = a(head);
    match lead.iops.finding {
        Finding::More => Clause {
            advice: Advice::Winner,
            head: words::noun(head),
            rest: format!("{} the {figure} of {second}", lead.iops),
        },
        Finding::Same => Clause::none(format!(
            "{first} and {second} are equally fast within {:.0} %, {}{}",
            EQUIVALENCE * 100.0,
            lead.iops,
            also_faster(ranking)
        )),
        Finding::Turns => Clause::none(format!(
            "whether {first} or {second} is faster turns with the factor by which devices are slowed{}",
            also_faster(ranking)
        )),
        Finding::Less | Finding::Inconclusive => Clause::none(format!(
            "{first} is ahead of {second}, {}, but not with certainty{}",
            lead.iops,
            also_faster(ranking)
        )),
    }
}

/// Says that the first two placements are caches, and that both are faster than a baseline without
/// a cache: a cache is worth it, only its place is open.
fn also_faster(ranking: &Ranking) -> &'static str {
    let faster = |place: &super::Place| {
        let over = place.over_baseline.as_ref();
        caches(&place.placement)
            && over.is_some_and(|over| over.iops.finding == Finding::More && !caches(&over.against))
    };
    let both = ranking.places.get(..2).is_some_and(|two| two.iter().all(faster));
    if both { "; both are faster than no SSD" } else { "" }
}

/// What sustained runs show of placements with as many copies as those of the ranking.
fn for_good(ranking: &Ranking, lasting: &Lasting) -> (Option<Advice>, String) {
    match lasting.ranking(ranking.durability) {
        None => (None, "not measured, as no run was sustained".into()),
        Some(found) if found.lead.is_none() => {
            let only = found.places.first().map_or("nothing".into(), |place| a(&place.placement));
            (None, format!("nothing to compare, as only {only} had sustained runs"))
        }
        Some(found) => {
            let found = clause(found, SHORT);
            (Some(found.advice), found.to_string())
        }
    }
}

/// Ratio of a placement to the baseline over sustained runs alone.
fn ratio_for_good<'a>(lasting: &'a Lasting, placement: &str) -> Option<&'a Ratio> {
    let mut places = lasting.for_good.iter().flat_map(|ranking| &ranking.places);
    let found = places.find(|place| place.placement == placement)?.over_baseline.as_ref()?;
    found.iops.ratio.is_some().then_some(&found.iops)
}

/// The sentence for the case that a cache is not worth it.
fn not_worth_it(results: &Results, found: &Unworthy, lasting: &Lasting, load: &str) -> String {
    let Unworthy { best, in_bursts } = found;
    let baseline = &results.suite.baseline;
    let (name, without) = (a(&best.placement), a(baseline));
    let ratio = best.over_baseline.as_ref().map(|over| over.iops.to_string()).unwrap_or_default();
    let good = ratio_for_good(lasting, &best.placement)
        .map_or("nobody has measured it".into(), |ratio| ratio.to_string());
    match lasting.steadiness(&[&best.placement, baseline]) {
        Steadiness::Absorbing { absorbed_bytes, .. } => {
            let begin = if *in_bursts {
                "Cache only for bursts"
            } else {
                "Do not cache, not even for bursts"
            };
            format!(
                "{begin}: up to {} {name} has {ratio} the requests per second of {without}, for good {good}, for {load}.",
                words::bytes(absorbed_bytes)
            )
        }
        held => {
            let lasts = held == Steadiness::Sustained;
            let unknown = if lasts { "" } else { "; whether that lasts is not known" };
            format!(
                "Do not cache: at best, {name} has {ratio} the requests per second of {without}, for {load}{unknown}."
            )
        }
    }
}

/// The first sentence, and its advice. A ratio of runs that only absorb never stands alone in it.
pub(super) fn first_sentence(
    results: &Results,
    decides: &Ranking,
    lasting: &Lasting,
) -> (Advice, String) {
    let load = words::load(&results.suite);
    if let Some(found) = unworthy(results, lasting) {
        let advice = if found.in_bursts { Advice::OnlyBursts } else { Advice::DoNotCache };
        return (advice, not_worth_it(results, &found, lasting, &load));
    }
    let now = clause(decides, "requests per second");
    let held = match (decides.places.first(), &decides.lead) {
        (Some(first), Some(lead)) => lasting.steadiness(&[&first.placement, &lead.against]),
        _ => Steadiness::Sustained,
    };
    match held {
        Steadiness::Sustained => (now.advice, format!("{}.", now.alone(&load))),
        Steadiness::Varying | Steadiness::Unknown => {
            (now.advice, format!("{}; whether that lasts is not known.", now.alone(&load)))
        }
        Steadiness::Absorbing { absorbed_bytes, .. } => {
            let (advice, good) = for_good(decides, lasting);
            let wins = advice == Some(Advice::Winner) || now.advice == Advice::Winner;
            let advice = if wins { Advice::Winner } else { Advice::NoWinner };
            let (burst, now) = (words::bytes(absorbed_bytes), clause(decides, SHORT));
            (advice, format!("For bursts up to {burst}: {now}. For good: {good}. Load: {load}."))
        }
    }
}
