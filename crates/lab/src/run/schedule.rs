//! The order of a suite's measurements: by testbed, because testbeds take long to come up, and
//! otherwise random, so that changes over time favour no placement.

use std::collections::BTreeSet;

use crate::placement::{AGAIN, Arrangement, Layer};
use crate::results::Results;
use crate::stats::looks::Looks;
use crate::suite::{Cell, Suite};
use crate::testbed::Ssds;
use crate::verdict;
use tidepool_cluster::random::Random;

/// Seconds for a testbed with filled images to come up, until measured times are known.
const TESTBED_S: f64 = 45.0;
/// Seconds around a measurement, until measured times are known.
const AROUND_S: f64 = 3.0;

/// What placements on one testbed have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// Names of the placements below the cluster, joined by `+`.
    pub below: String,
    /// Class of the SSD.
    pub ssd: String,
    /// Number of parts into which an SSD in a server is divided.
    pub ssd_shares: u32,
    /// Disks of the cluster.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// Copies of each object.
    pub replicas: u32,
}

/// Measurements on one testbed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The testbed.
    pub shape: Shape,
    /// The steps in their order: the placement in front of the cluster, and its measurements.
    pub steps: Vec<Step>,
}

/// Measurements of one placement and one repeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The placement, as the suite names it.
    pub placement: String,
    /// Number of the repeat, from 1.
    pub repeat: u32,
    /// The measurements.
    pub cells: Vec<Cell>,
}

impl Block {
    /// Places of the SSDs of a testbed for this block, with clients on this number of hypervisors.
    ///
    /// # Errors
    /// If a placement's name is not valid.
    pub fn ssds(&self, hypervisors: u32) -> Result<Ssds, String> {
        let found = self.steps.iter().map(|step| Arrangement::parse(&step.placement));
        Ok(Ssds::of(&found.collect::<Result<Vec<_>, _>>()?, hypervisors))
    }
}

impl Shape {
    /// The shape of a testbed for this cell.
    ///
    /// # Errors
    /// If the placement's name is not valid.
    pub fn of(suite: &Suite, cell: &Cell) -> Result<Shape, String> {
        let arrangement = Arrangement::parse(&cell.placement)?;
        let below = arrangement.within(&Layer::BELOW);
        let mut names: Vec<&str> = below.map(|placement| placement.name()).collect();
        if arrangement.again {
            names.push(AGAIN);
        }
        Ok(Shape {
            below: names.join("+"),
            ssd: arrangement.ssd.clone().unwrap_or_else(|| suite.ground.ssd.clone()),
            ssd_shares: arrangement.ssd_shares(),
            disks: cell.disks,
            osds_per_disk: cell.osds_per_disk,
            replicas: suite.replicas(cell),
        })
    }
}

/// The blocks of a suite's first `repeats` repeats, in the order of `seed`, without the cells and
/// repeats for which `done` is true.
///
/// # Errors
/// If a placement is not valid.
pub fn blocks(
    suite: &Suite,
    repeats: u32,
    seed: u64,
    done: &dyn Fn(&Cell, u32) -> bool,
) -> Result<Vec<Block>, String> {
    let mut random = Random::new(seed);
    let cells = suite.cells();
    let shapes = cells.iter().map(|cell| Shape::of(suite, cell)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<u32> = (1..=repeats).collect();
    let rounds: Vec<Vec<u32>> = if suite.fresh_clusters {
        all.into_iter().map(|repeat| vec![repeat]).collect()
    } else {
        vec![all]
    };
    let mut blocks = Vec::new();
    for repeats in rounds {
        let mut order: Vec<&Shape> = shapes.iter().collect::<BTreeSet<_>>().into_iter().collect();
        random.shuffle(&mut order);
        for shape in order {
            let on_it = || {
                cells.iter().zip(&shapes).filter(|(_, found)| *found == shape).map(|(cell, _)| cell)
            };
            let mut steps = Vec::new();
            for &repeat in &repeats {
                let mut placements: Vec<&String> = on_it()
                    .map(|cell| &cell.placement)
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .collect();
                random.shuffle(&mut placements);
                // Writes through a cache in front of the cluster change the OSDs. So the cluster is
                // measured without such a cache first.
                placements.sort_by_key(|placement| has_front(placement));
                for placement in placements {
                    let mut cells: Vec<Cell> =
                        on_it().filter(|cell| cell.placement == *placement).cloned().collect();
                    random.shuffle(&mut cells);
                    // After many writes, a cache regains only a part of the blocks that it had
                    // read, especially after a set that was too large. Another access path takes
                    // time and makes caches cold. Neighbours also change caches and OSDs.
                    cells.sort_by_key(|cell| {
                        let beside = cell.neighbours.is_some();
                        (
                            cell.workload != suite.deciding,
                            suite.access(cell),
                            !fits(suite, cell),
                            beside,
                        )
                    });
                    // Left out only now, so that the other cells keep the order of the seed.
                    let wanted = |cell: &Cell| {
                        cell.workload == suite.deciding
                            || repeat <= suite.repeats_of(&cell.workload)
                    };
                    cells.retain(|cell| wanted(cell) && !done(cell, repeat));
                    if !cells.is_empty() {
                        steps.push(Step { placement: placement.clone(), repeat, cells });
                    }
                }
            }
            if !steps.is_empty() {
                blocks.push(Block { shape: shape.clone(), steps });
            }
        }
    }
    Ok(blocks)
}

/// Whether something stands between a placement's clients and the cluster.
fn has_front(placement: &str) -> bool {
    Arrangement::parse(placement).is_ok_and(|arrangement| arrangement.front().is_some())
}

/// Whether the sets of a measurement fit the SSDs.
fn fits(suite: &Suite, cell: &Cell) -> bool {
    let images = cell.clients + suite.neighbours(cell).map_or(0, |neighbours| neighbours.count);
    suite.workload(&cell.workload).is_some_and(|workload| suite.ground.fits(workload, images))
}

/// Placements for which the deciding workload gets repeat number `repeat`, beyond the suite's:
/// those that the repeats up to the look before it do not tell apart. Empty once all placements are
/// told apart, or once the maximum of repeats is reached.
pub fn contenders(results: &Results, repeat: u32) -> BTreeSet<String> {
    let looks = Looks::of(&results.suite);
    if repeat > looks.last() {
        return BTreeSet::new();
    }
    let look = looks.before(repeat);
    let before = results.runs.iter().filter(|run| run.repeat <= look).cloned().collect();
    verdict::undecided(&results.with_runs(before))
}

/// Estimates the time left.
#[derive(Debug, Clone)]
pub struct Clock {
    testbeds: (u32, f64),
    runs: (u32, f64),
    first_testbed_s: f64,
    first_run_s: f64,
}

impl Clock {
    /// A clock before the first measurement.
    pub fn new(suite: &Suite) -> Clock {
        Clock {
            testbeds: (0, 0.0),
            runs: (0, 0.0),
            first_testbed_s: TESTBED_S,
            first_run_s: f64::from(suite.seconds + suite.ramp_s) + AROUND_S,
        }
    }

    /// Records that a testbed came up in `seconds`.
    pub fn testbed(&mut self, seconds: f64) {
        self.testbeds = (self.testbeds.0 + 1, self.testbeds.1 + seconds);
    }

    /// Records that a measurement, with everything around it, took `seconds`.
    pub fn run(&mut self, seconds: f64) {
        self.runs = (self.runs.0 + 1, self.runs.1 + seconds);
    }

    /// Estimated seconds for this number of testbeds and measurements.
    pub fn left_s(&self, testbeds: usize, runs: usize) -> f64 {
        let mean = |(count, sum): (u32, f64), first: f64| {
            if count == 0 { first } else { sum / f64::from(count) }
        };
        mean(self.testbeds, self.first_testbed_s) * testbeds as f64
            + mean(self.runs, self.first_run_s) * runs as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use std::collections::BTreeMap;

    fn suite() -> Suite {
        Suite { without: Vec::new(), ..Suite::find("which-side").expect("built in").quick() }
    }

    #[test]
    fn everything_is_measured_as_often_as_it_should_and_on_as_few_testbeds_as_possible() {
        let suite = suite();
        let blocks = blocks(&suite, suite.repeats, 7, &|_, _| false).expect("blocks");
        let runs: usize =
            blocks.iter().flat_map(|block| &block.steps).map(|step| step.cells.len()).sum();
        let wanted: u32 = suite.cells().iter().map(|cell| suite.repeats_of(&cell.workload)).sum();
        assert_eq!(runs, wanted as usize);
        // Placements in front of the cluster have the same shape of testbed as the cluster without
        // them.
        let with = |name: &str| {
            let of = |block: &&Block| block.steps.iter().any(|step| step.placement == name);
            blocks.iter().filter(of).map(|block| block.shape.clone()).collect::<Vec<_>>()
        };
        assert_eq!(with("host-tidepool"), with("bluestore-colocated"));
        assert_eq!(with("host-tidepool-replicated"), with("host-tidepool"));
        let ssds = |name: &str| {
            let block = blocks.iter().find(|block| block.shape == with(name)[0]).expect("one");
            block.ssds(suite.ground.hypervisors).expect("known")
        };
        assert_eq!(ssds("osd-tidepool"), Ssds { in_servers: true, hosts: 0 });
        assert_eq!(ssds("host-tidepool"), Ssds { in_servers: false, hosts: 2 });
        // Both slowing factors are measured on the same cluster.
        assert_eq!(with("filestore-journal").len(), suite.repeats as usize);
        assert_ne!(with("filestore-journal"), with("filestore-journal@ssd-sata-consumer"));
        let (baseline, again) = (with("bluestore-colocated"), with("bluestore-colocated+again"));
        assert!(
            again.len() == suite.repeats as usize
                && !baseline.iter().any(|shape| again.contains(shape)),
            "{again:?}"
        );
    }

    /// Number of clusters with the first size on which a suite measures its deciding workload, for
    /// each placement and factor.
    fn deciding_clusters(suite: &Suite) -> BTreeMap<(String, u32), usize> {
        let mut clusters = BTreeMap::new();
        let first = suite.sizes()[0];
        for block in blocks(suite, suite.repeats, 1, &|_, _| false).expect("blocks") {
            if (block.shape.disks, block.shape.osds_per_disk) != (first.disks, first.osds_per_disk)
            {
                continue;
            }
            let cells = block.steps.iter().flat_map(|step| &step.cells);
            let deciding = cells.filter(|cell| cell.workload == suite.deciding);
            let factor = |cell: &Cell| cell.slowed_by.unwrap_or(suite.ground.slowed_by);
            let found: BTreeSet<_> =
                deciding.map(|cell| (cell.placement.clone(), factor(cell))).collect();
            found.into_iter().for_each(|found| *clusters.entry(found).or_default() += 1);
        }
        clusters
    }

    #[test]
    fn every_suite_decides_on_several_clusters_at_two_factors_and_measures_its_baseline_twice() {
        // A suite with events only ranks nothing.
        for exact in Suite::built_in().into_iter().filter(|suite| !suite.cells().is_empty()) {
            for (suite, least) in [(exact.clone().quick(), 3), (exact, 5)] {
                let clusters = deciding_clusters(&suite);
                assert!(
                    clusters.values().all(|count| *count >= least),
                    "{} {clusters:?}",
                    suite.name
                );
                let (ground, baseline) = (&suite.ground, &suite.baseline);
                if ground.disk == "nvme" {
                    // A slowed NVMe device is not what it should be: Ceph's own code takes the time
                    // there.
                    assert_eq!(
                        (ground.slowed_by, ground.second_slowed_by),
                        (1, None),
                        "{}",
                        suite.name
                    );
                } else {
                    let second = ground.second_slowed_by.expect("a second factor");
                    for name in [baseline, &suite.placements[1]] {
                        assert!(
                            clusters.contains_key(&(name.clone(), second)),
                            "{} {name}",
                            suite.name
                        );
                    }
                }
                assert!(clusters.contains_key(&(format!("{baseline}+again"), ground.slowed_by)));
            }
        }
    }

    #[test]
    fn what_decides_comes_first_and_sets_that_do_not_fit_come_last() {
        let suite = suite();
        let blocks = blocks(&suite, suite.repeats, 5, &|_, _| false).expect("blocks");
        let steps: Vec<&Step> = blocks.iter().flat_map(|block| &block.steps).collect();
        let sorted = |step: &&&Step| {
            let key = |cell: &Cell| (cell.workload != suite.deciding, !fits(&suite, cell));
            step.cells.is_sorted_by_key(key)
        };
        assert_eq!(steps.iter().filter(sorted).count(), steps.len());
        assert!(steps.iter().any(|step| step.cells.iter().any(|cell| !fits(&suite, cell))));
    }

    #[test]
    fn a_cluster_is_measured_before_anything_stands_in_front_of_it() {
        let suite = suite();
        let blocks = blocks(&suite, suite.repeats, 5, &|_, _| false).expect("blocks");
        let fronts: Vec<Vec<bool>> = blocks
            .iter()
            .map(|block| block.steps.iter().map(|step| has_front(&step.placement)).collect())
            .collect();
        assert!(fronts.iter().all(|fronts| fronts.is_sorted()), "{fronts:?}");
        assert!(fronts.iter().any(|fronts| fronts.contains(&true) && fronts.contains(&false)));
    }

    #[test]
    fn only_what_is_not_told_apart_gets_more_clusters_and_not_without_end() {
        let results = synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("osd-tidepool", &[300.0, 500.0, 220.0]),
            ("host-tidepool", &[400.0, 260.0, 600.0]),
        ]);
        let names = |repeat| contenders(&results, repeat).into_iter().collect::<Vec<String>>();
        assert_eq!(names(6), ["host-tidepool", "osd-tidepool"]);
        assert_eq!(names(results.suite.repeats_max.expect("it may go on") + 1), [""; 0]);
        let decided = synthetic::results(&[
            ("osd-tidepool", &[300.0; 3]),
            ("host-tidepool", &[900.0, 910.0, 890.0]),
        ]);
        assert!(contenders(&decided, 6).is_empty());
    }

    #[test]
    fn what_is_done_is_left_out_and_the_rest_keeps_its_order() {
        let suite = suite();
        let flat = |done: &dyn Fn(&Cell, u32) -> bool| {
            let blocks = blocks(&suite, suite.repeats, 3, done).expect("blocks");
            let steps = blocks.into_iter().flat_map(|block| block.steps);
            steps
                .flat_map(|step| step.cells.into_iter().map(move |cell| (cell, step.repeat)))
                .collect::<Vec<_>>()
        };
        let all = flat(&|_, _| false);
        let (first, rest) = all.split_at(40);
        let left = flat(&|cell, repeat| first.contains(&(cell.clone(), repeat)));
        assert_eq!(left, rest);
        let mut other = suite.clone();
        other.fresh_clusters = false;
        let blocks_of =
            |suite: &Suite| blocks(suite, suite.repeats, 3, &|_, _| false).expect("blocks").len();
        assert_eq!(blocks_of(&suite), blocks_of(&other) * suite.repeats as usize);
    }
}
