//! Which placements are ranked, and in which order.

use std::collections::BTreeMap;

use super::bounds::bounded;
use super::{Compared, Place, Ranking, SecondCopy, durability, placements};
use crate::results::{Durability, NotRun, Results, Run};
use crate::stats::{self, Estimate, Finding, Metric, Setting, paired};
use crate::words;

/// Requests per second of a placement in each setting of the deciding workload with runs that
/// count.
fn deciding(results: &Results, placement: &str) -> BTreeMap<Setting, Estimate> {
    let settings = stats::settings(results, &results.suite.deciding).into_iter();
    let iops = |setting: Setting| {
        let iops = stats::summary(&stats::runs(results, placement, &setting)).iops?;
        Some((setting, iops))
    };
    settings.filter_map(iops).collect()
}

/// Why a placement is in no ranking. None if the placement is ranked.
fn unrankable(
    results: &Results,
    placement: &str,
    found: &BTreeMap<Setting, Estimate>,
) -> Option<String> {
    let deciding = &results.suite.deciding;
    if words::is_bound(placement) {
        return Some("a bound, not a place for an SSD".into());
    }
    let baseline = &results.suite.baseline;
    match (words::in_guests(placement), words::in_guests(baseline)) {
        (true, false) => {
            return Some(format!("its OSDs are in guests, and those of {baseline} are not"));
        }
        (false, true) => {
            return Some(format!("its OSDs are in no guests, as those of {baseline} are"));
        }
        _ => {}
    }
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
    if bounded(results, placement, deciding).is_some_and(|bounded| bounded.rig_fault) {
        return Some("the rig keeps it far from its bound".into());
    }
    words::class(placement)
        .filter(|class| *class != results.suite.ground.ssd)
        .map(|class| format!("it stands on another SSD than the others, {class}"))
}

pub(super) fn rank(results: &Results) -> (Vec<Ranking>, Vec<NotRun>) {
    let mut unranked = Vec::new();
    let mut classes: BTreeMap<Durability, Vec<Candidate<'_>>> = BTreeMap::new();
    for placement in placements(results) {
        if results.is_not_run(placement, &results.suite.deciding) {
            continue;
        }
        let found = deciding(results, placement);
        match (unrankable(results, placement, &found), durability(results, placement)) {
            (None, Some(durability)) => {
                classes.entry(durability).or_default().push((placement, found))
            }
            (why, _) => {
                let why = why.unwrap_or_default();
                unranked.push(NotRun::all(placement, why));
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

/// Ranks placements with the same number of copies. A placement that lacks a setting of the
/// placement with most settings is left out, because its mean would be that of other conditions.
fn ranking(
    results: &Results,
    durability: Durability,
    class: Vec<Candidate<'_>>,
) -> (Ranking, Vec<NotRun>) {
    let most = class.iter().map(|(_, found)| found.len()).max().unwrap_or(0);
    let covered = class.iter().find(|(_, found)| found.len() == most);
    let settings: Vec<Setting> =
        covered.map(|(_, found)| found.keys().cloned().collect()).unwrap_or_default();
    let (mut places, mut missing) = (Vec::new(), Vec::new());
    for (placement, found) in &class {
        if let Some(lacking) = settings.iter().find(|setting| !found.contains_key(setting)) {
            let why = format!(
                "no valid run at depth {} with {} client(s)",
                lacking.depth, lacking.clients
            );
            missing.push(NotRun::all(*placement, why));
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
        [first, second, ..] => {
            Some(compared(results, &first.placement, &second.placement, &settings))
        }
        _ => None,
    };
    (Ranking { durability, settings, places, lead }, missing)
}

fn compared(results: &Results, placement: &str, against: &str, settings: &[Setting]) -> Compared {
    let of = |metric| paired(results, placement, against, settings, metric);
    Compared {
        against: against.into(),
        iops: of(Metric::Iops),
        mean: of(Metric::Mean),
        p99: of(Metric::P99),
    }
}

/// What a second copy costs, and which placement to take where a write has to survive its host: a
/// cache on the host with a second copy, or a placement without a cache on the host.
pub(super) fn second_copy(results: &Results, rankings: &[Ranking]) -> Option<SecondCopy> {
    let places = || rankings.iter().flat_map(|ranking| &ranking.places);
    let best = |is: &dyn Fn(&Place) -> bool| {
        places().filter(|place| is(place)).max_by(|one, two| one.iops.total_cmp(&two.iops))
    };
    let copied = best(&|place| words::without_copy(&place.placement).is_some())?;
    let single = words::without_copy(&copied.placement)?;
    best(&|place| place.placement == single)?;
    let settings = stats::settings(results, &results.suite.deciding);
    let against = |other: &str| compared(results, &copied.placement, other, &settings);
    let over_others =
        best(&|place| !words::on_host(&place.placement)).map(|place| against(&place.placement));
    let recommended = match &over_others {
        None => Some(&copied.placement),
        Some(over) => match over.iops.finding {
            Finding::More => Some(&copied.placement),
            Finding::Less => Some(&over.against),
            Finding::Same | Finding::Turns | Finding::Inconclusive => None,
        },
    };
    let recommended = recommended.cloned();
    Some(SecondCopy {
        placement: copied.placement.clone(),
        cost: against(&single),
        over_others,
        recommended,
    })
}
