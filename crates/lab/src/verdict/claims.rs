//! What became of what was published.

use super::lasting::steadiness;
use super::{Outcome, Tested, bottleneck};
use crate::results::Results;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Finding, Metric, Ratio, paired};
use crate::suite::{Direction, Expect};
use crate::words;

/// Whether a direction's claim holds.
fn outcome(expect: Expect, ratio: &Ratio) -> Outcome {
    let beyond =
        |(low, high): (f64, f64)| low > 1.0 + stats::EQUIVALENCE || high < 1.0 / (1.0 + stats::EQUIVALENCE);
    match (expect, ratio.finding) {
        (Expect::More, Finding::More) | (Expect::Less, Finding::Less) | (Expect::Same, Finding::Same) => {
            Outcome::Reproduced
        }
        (_, Finding::Turns) => Outcome::NotMeasurable,
        (_, Finding::Inconclusive) => Outcome::Inconclusive,
        // A difference that may still be a small one is no evidence against "the same".
        (Expect::Same, _) if !ratio.ratio.and_then(|ratio| ratio.interval).is_some_and(beyond) => {
            Outcome::Inconclusive
        }
        _ => Outcome::NotReproduced,
    }
}

/// What became of a direction; `sustained` are the results of sustained runs alone.
pub(super) fn test(results: &Results, sustained: Option<&Results>, direction: &Direction) -> Tested {
    let Direction { placement, against, workload, .. } = direction;
    let settings = stats::settings(results, workload);
    let of = |results: &Results| paired(results, placement, against, &settings, Metric::Iops);
    let (iops, for_good) = (of(results), sustained.map(of));
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
    let both = [placement, against].map(|name| steadiness(results, name, workload));
    if let (Steadiness::Absorbing { absorbed_bytes, .. }, Some(for_good)) = (both[0].and(both[1]), &for_good)
    {
        let bytes = words::bytes(absorbed_bytes);
        evidence.push_str(&format!(" That is for bursts up to {bytes}; for good: {for_good}."));
    }
    let [ours, theirs] = &bottlenecks;
    for (name, bottleneck) in [(placement, ours), (against, theirs)] {
        if let Some(bottleneck) = bottleneck {
            evidence.push_str(&format!(" Largest hop of {name}: {bottleneck}."));
        }
    }
    let [bottleneck, against_bottleneck] = bottlenecks;
    Tested { direction: direction.clone(), outcome, iops, for_good, evidence, bottleneck, against_bottleneck }
}
