//! Measurements with other numbers of copies, or other neighbours of the clients, than the
//! ground's.

use std::collections::BTreeMap;

use serde::Serialize;

use super::placements;
use crate::results::{Durability, Results, Run};
use crate::stats::{self, Metric, Ratio, Setting, Stretch};
use crate::suite::Neighbours;
use crate::words;

/// Figures of a placement in a workload with other copies or neighbours than the ground's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Beside {
    /// The workload's name.
    pub workload: String,
    /// The placement.
    pub placement: String,
    /// Copies of each object.
    pub replicas: u32,
    /// Neighbours of the clients. None if there are none.
    pub neighbours: Option<Neighbours>,
    /// What the placement's acknowledged writes are safe from.
    pub durability: Durability,
    /// Requests per second of the clients: geometric mean over the runs that count.
    pub iops: f64,
    /// Ratio to the requests per second with the ground's copies and neighbours.
    pub to_ground: Ratio,
    /// Requests per second of the neighbours: mean over the runs that count. None without figures
    /// of neighbours.
    pub neighbours_iops: Option<f64>,
    /// What differs from the ground, in words.
    #[serde(skip)]
    pub what: String,
}

/// Each placement at each point that is not the ground's, by workload.
pub(super) fn beside(results: &Results) -> Vec<Beside> {
    let mut found = Vec::new();
    for workload in &results.suite.workloads {
        let mut points: BTreeMap<(Option<u32>, Option<Neighbours>), Vec<Setting>> = BTreeMap::new();
        for setting in stats::settings_beside(results, &workload.name) {
            points.entry((setting.replicas, setting.neighbours)).or_default().push(setting);
        }
        for (point, settings) in
            points.iter().filter(|((copies, of), _)| copies.is_some() || of.is_some())
        {
            let of = |placement| at(results, placement, &workload.name, *point, settings);
            found.extend(placements(results).into_iter().filter_map(of));
        }
    }
    found
}

/// A placement at a point. None where no run of the placement counts.
fn at(
    results: &Results,
    placement: &str,
    workload: &str,
    (replicas, neighbours): (Option<u32>, Option<Neighbours>),
    settings: &[Setting],
) -> Option<Beside> {
    let runs: Vec<&Run> =
        settings.iter().flat_map(|setting| stats::runs(results, placement, setting)).collect();
    let counted: Vec<&Run> =
        runs.into_iter().filter(|run| stats::objections(run).is_empty()).collect();
    let logs: Vec<f64> = counted.iter().map(|run| run.figures.iops.ln()).collect();
    let ground: Vec<Setting> = settings.iter().map(Setting::on_ground).collect();
    let stretch = Stretch { from: &ground, to: settings, intervals: 1 };
    let suite = &results.suite;
    let crowds: Vec<f64> =
        counted.iter().filter_map(|run| Some(run.neighbours.as_ref()?.figures?.iops)).collect();
    Some(Beside {
        workload: workload.into(),
        placement: placement.into(),
        replicas: replicas.unwrap_or(suite.ground.replicas),
        neighbours: neighbours.or(suite.ground.neighbours).filter(|of| of.count > 0),
        durability: counted.iter().map(|run| run.durability).min()?,
        iops: (logs.iter().sum::<f64>() / logs.len() as f64).exp(),
        to_ground: stats::change(results, placement, None, stretch, Metric::Iops),
        neighbours_iops: (!crowds.is_empty())
            .then(|| crowds.iter().sum::<f64>() / crowds.len() as f64),
        what: words::beside(replicas, neighbours)?,
    })
}

/// What the deciding workload does at each of these points, in sentences.
pub(super) fn sentences(results: &Results, found: &[Beside]) -> Vec<String> {
    let decides: Vec<&Beside> =
        found.iter().filter(|found| found.workload == results.suite.deciding).collect();
    let mut points: Vec<&str> = Vec::new();
    for beside in &decides {
        if !points.contains(&beside.what.as_str()) {
            points.push(&beside.what);
        }
    }
    let sentence = |what: &&str| {
        let here = decides.iter().filter(|found| found.what == **what);
        let each: Vec<String> = here
            .map(|found| {
                let copies = if found.replicas == results.suite.ground.replicas {
                    String::new()
                } else {
                    format!(" ({})", words::copies(found.durability))
                };
                format!("{} {}{copies}", found.placement, found.to_ground)
            })
            .collect();
        let what =
            if what.starts_with("beside") { words::capital(what) } else { format!("With {what}") };
        format!("{what}, requests per second to those without that change: {}.", words::list(&each))
    };
    points.iter().map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{Along, Axis, Trend};
    use crate::synthetic;
    use crate::verdict::{Outcome, verdict};

    /// Two placements with one copy, alone and beside two neighbours, and with two copies on
    /// clusters of their own.
    fn results() -> Results {
        let mut results = synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("host-tidepool", &[400.0, 404.0, 396.0]),
        ]);
        results.suite.ground.replicas_beside = vec![2];
        let two: Neighbours = "2:100".parse().expect("two");
        results.suite.ground.neighbours_beside = vec![two];
        for mut run in results.runs.clone() {
            let part = if run.cell.placement == "host-tidepool" { 0.9 } else { 0.5 };
            run.cell.neighbours = Some(two);
            run.figures.iops *= part;
            let figures = Some(tidepool_cluster::fio::Figures { iops: 150.0, ..run.figures });
            run.neighbours =
                Some(crate::results::Crowd { of: two, figures, command: "fio".into() });
            results.runs.push(run.clone());
            run.cell.neighbours = None;
            run.neighbours = None;
            run.cell.replicas = Some(2);
            run.testbed += 100;
            run.figures.iops *= 0.5;
            if run.cell.placement == "bluestore-colocated" {
                run.durability = Durability::Replicated;
            }
            results.runs.push(run);
        }
        results
    }

    #[test]
    fn other_copies_and_neighbours_stand_beside_and_change_no_ranking() {
        let mut results = results();
        let found = verdict(&results);
        let told: Vec<(&str, u32, f64, Durability, Option<f64>)> = found
            .beside
            .iter()
            .map(|of| {
                (
                    of.placement.as_str(),
                    of.replicas,
                    of.iops.round(),
                    of.durability,
                    of.neighbours_iops,
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                ("bluestore-colocated", 1, 50.0, Durability::OneCopy, Some(150.0)),
                ("host-tidepool", 1, 360.0, Durability::OneCopy, Some(150.0)),
                ("bluestore-colocated", 2, 25.0, Durability::Replicated, None),
                ("host-tidepool", 2, 180.0, Durability::OneCopy, None),
            ]
        );
        let ratio = found.beside[0].to_ground.ratio.expect("a ratio");
        assert!((ratio.value - 0.5).abs() < 1e-9 && ratio.interval.is_some(), "{ratio:?}");
        let told = found
            .answer
            .iter()
            .find(|sentence| sentence.starts_with("Beside 2 neighbours of at most 100"));
        assert!(told.expect("neighbours are told").contains("host-tidepool 0.90 ×"), "{told:?}");
        let told = found.answer.iter().find(|sentence| sentence.starts_with("With 2 copies"));
        assert!(told.expect("copies are told").contains("two copies or more"), "{told:?}");
        results.runs.retain(|run| !run.cell.is_beside());
        let alone = verdict(&results);
        assert_eq!(
            (alone.standings.rankings, alone.headline, alone.beside),
            (found.standings.rankings, found.headline, vec![])
        );
    }

    #[test]
    fn a_claim_goes_along_copies_and_along_neighbours() {
        let mut results = results();
        results.suite.directions.truncate(1);
        for (along, ends) in [(Along::Replicas, ["1", "2"]), (Along::Neighbours, ["0", "2"])] {
            let direction = &mut results.suite.directions[0];
            direction.workload = "4k-80-20".into();
            (direction.placement, direction.against) = ("bluestore-colocated".into(), None);
            (direction.expect, direction.axis) =
                (None, Some(Axis { along, trend: Some(Trend::Falls), plateau_beyond: None }));
            let tested = verdict(&results).directions.remove(0);
            assert_eq!(tested.outcome, Outcome::Reproduced, "{}", tested.evidence);
            let at: Vec<String> = tested
                .course
                .expect("a course")
                .points
                .iter()
                .map(|point| point.at.to_string())
                .collect();
            assert_eq!(at, ends);
        }
    }
}
