//! Clusters of different sizes beside each other, in a suite of one placement: the gain of more
//! OSDs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::course::hindrance;
use crate::results::Results;
use crate::stats::{self, Finding, Metric, Ratio, Setting, Stretch};
use crate::suite::{Along, ClusterSize};
use crate::words;

/// Cluster sizes in ascending order of their OSDs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sizes {
    /// The placement.
    pub placement: String,
    /// Figures of each size.
    pub points: Vec<SizePoint>,
    /// Why this machine allows no conclusion from the sizes. None where it does.
    pub hindrance: Option<String>,
}

/// Figures of clusters of one size in the deciding workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SizePoint {
    /// The size.
    pub size: ClusterSize,
    /// Requests per second: geometric mean over the runs that count.
    pub iops: f64,
    /// Ratio to the requests per second of the smallest size. None for the smallest size.
    pub over_smallest: Option<Ratio>,
}

impl Sizes {
    /// The sizes of the only placement of a suite. None if the suite has several placements, or the
    /// placement was measured with one size.
    pub(super) fn of(results: &Results) -> Option<Sizes> {
        let [placement] = results.suite.placements.as_slice() else { return None };
        let counts = |setting: &Setting| {
            stats::runs(results, placement, setting)
                .iter()
                .any(|run| stats::objections(run).is_empty())
        };
        let mut sizes: BTreeMap<(u32, ClusterSize), Vec<Setting>> = BTreeMap::new();
        for setting in stats::settings(results, &results.suite.deciding).into_iter().filter(counts)
        {
            let size = ClusterSize { disks: setting.disks, osds_per_disk: setting.osds_per_disk };
            sizes.entry((size.osds(), size)).or_default().push(setting);
        }
        let found: Vec<(ClusterSize, Vec<Setting>)> =
            sizes.into_iter().map(|((_, size), settings)| (size, settings)).collect();
        let (_, smallest) = found.first().filter(|_| found.len() > 1)?;
        let point = |(at, (size, settings)): (usize, &(ClusterSize, Vec<Setting>))| {
            let runs = settings.iter().flat_map(|setting| stats::runs(results, placement, setting));
            let logs: Vec<f64> = runs.filter_map(|run| Metric::Iops.of(run)).map(f64::ln).collect();
            let stretch = Stretch { from: smallest, to: settings, intervals: found.len() - 1 };
            SizePoint {
                size: *size,
                iops: (logs.iter().sum::<f64>() / logs.len() as f64).exp(),
                over_smallest: (at > 0)
                    .then(|| stats::change(results, placement, None, stretch, Metric::Iops)),
            }
        };
        Some(Sizes {
            placement: placement.clone(),
            points: found.iter().enumerate().map(point).collect(),
            hindrance: hindrance(results, Along::Osds),
        })
    }

    /// The size with most requests per second.
    fn best(&self) -> Option<&SizePoint> {
        self.points.iter().max_by(|one, two| one.iops.total_cmp(&two.iops))
    }

    /// The conclusion in one sentence.
    pub(super) fn headline(&self, results: &Results) -> String {
        let suite = &results.suite;
        let load =
            suite.workload(&suite.deciding).map_or(suite.deciding.as_str(), |found| &found.title);
        if let Some(why) = &self.hindrance {
            return format!("Not measurable here: {why}. Load: {load}.");
        }
        let smallest = self.points.first().map(|point| point.size.to_string()).unwrap_or_default();
        let over = |point: &SizePoint| point.over_smallest.clone();
        match self.best().and_then(|best| Some((best, over(best)?))) {
            Some((best, ratio)) if ratio.finding == Finding::More => format!(
                "{}: {ratio} the requests per second of {smallest}, for {load}.",
                words::capital(&best.size.to_string())
            ),
            Some((best, ratio)) => {
                let why = ratio.why.as_deref().unwrap_or("a difference that small counts as none");
                format!(
                    "No size is better than {smallest}: at most {} has {ratio}, {why}; for {load}.",
                    best.size
                )
            }
            None => format!("No size is better than {smallest}, for {load}."),
        }
    }

    /// Each size in a sentence.
    pub(super) fn sentences(&self) -> Vec<String> {
        let sentence = |point: &SizePoint| {
            let over = point.over_smallest.as_ref();
            let over = over.map(|over| format!(", {over} of the smallest")).unwrap_or_default();
            format!("{}: {} requests per second{over}.", point.size, words::number(point.iops))
        };
        self.points.iter().map(sentence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::NotRunSize;
    use crate::synthetic;
    use crate::verdict::{Advice, verdict};

    /// Results of one placement with one, four and eight OSDs on a disk, on a machine with `cpus`
    /// processors.
    fn results(speeds: [f64; 3], cpus: usize) -> Results {
        let mut results = synthetic::empty();
        results.machine.cpus = cpus;
        results.suite.placements.truncate(1);
        results.suite.directions.clear();
        let name = results.suite.placements[0].clone();
        for (osds_per_disk, iops) in [1, 4, 8].into_iter().zip(speeds) {
            for repeat in 1..=3 {
                let spread = 1.0 + f64::from(repeat) / 100.0;
                let mut run = synthetic::run(&name, "4k-80-20", 16, repeat, iops * spread);
                (run.cell.disks, run.cell.osds_per_disk) = (1, osds_per_disk);
                run.testbed += 10 * osds_per_disk;
                results.runs.push(run);
            }
        }
        results
    }

    #[test]
    fn the_best_size_stands_in_the_first_sentence() {
        let found = verdict(&results([100.0, 300.0, 290.0], 16));
        assert!(
            found.headline.starts_with("1 disk with 4 OSDs on each: 3.00 × ("),
            "{}",
            found.headline
        );
        assert_eq!(found.advice, Advice::NoVerdict);
        assert_eq!(found.answer[0], "1 disk with 1 OSD on each: 102 requests per second.");
        assert!(
            !found.answer.iter().any(|sentence| sentence.starts_with("No winner")),
            "{:?}",
            found.answer
        );
        let found = verdict(&results([100.0, 101.0, 99.0], 16));
        assert!(
            found.headline.starts_with("No size is better than 1 disk with 1 OSD"),
            "{}",
            found.headline
        );
        let found = verdict(&results([100.0, 50.0, 40.0], 16));
        assert!(
            found.headline.starts_with("No size is better than 1 disk with 1 OSD"),
            "{}",
            found.headline
        );
    }

    #[test]
    fn on_few_processors_nothing_is_concluded_and_what_was_not_measured_is_told() {
        let mut few = results([100.0, 300.0, 290.0], 2);
        let size = ClusterSize { disks: 4, osds_per_disk: 4 };
        few.not_run_sizes.push(NotRunSize { size, why: "16 OSDs on 2 processors".into() });
        let found = verdict(&few);
        assert!(
            found.headline.starts_with("Not measurable here: clients and OSDs share 2"),
            "{}",
            found.headline
        );
        let told = "4 disks with 4 OSDs on each: not measured, as 16 OSDs on 2 processors.";
        assert!(found.answer.iter().any(|sentence| sentence == told), "{:?}", found.answer);
        assert_eq!(verdict(&synthetic::which_side()).standings.sizes, None);
    }
}
