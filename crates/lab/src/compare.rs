//! Two documents side by side: the differences in how they were made, and the ratios of their
//! figures.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use crate::results::{Results, Run};
use crate::stats::{self, Finding, Metric, Ratio, Setting, Summary};
use crate::suite::{Cell, Suite, Workload};
use crate::words;

/// Highest rate at which two documents of the same thing may be found different.
const ALPHA: f64 = 0.02;

/// Comparison of two documents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Both documents have the same suite, by its SHA-256.
    pub same_suite: bool,
    /// The releases of Ceph in the first and in the second document, if these differ. The figures
    /// then compare two releases of Ceph.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releases: Option<[BTreeSet<u32>; 2]>,
    /// Differences other than those of the figures, one sentence each.
    pub differences: Vec<String>,
    /// Whether the figures of the documents agree.
    pub agreement: Agreement,
    /// The cells that both documents measured, in the order of the first suite: by workload, then
    /// by placement.
    pub cells: Vec<Row>,
    /// Cells that only one document measured, and workloads that differ under one name; one
    /// sentence each.
    pub left_out: Vec<String>,
}

/// Agreement of two documents.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// No cell differs.
    Equal {
        /// Cells that could be compared.
        cells: usize,
        /// Factor that the widest interval spans to either side.
        resolved_factor: f64,
    },
    /// Some cells differ.
    Different {
        /// Number of cells that differ.
        cells: usize,
    },
    /// No cell was measured on at least two clusters in both documents.
    Unknown,
}

/// Figures of one cell in both documents. The intervals of each of the three ratios hold at 98 %
/// for all cells together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The cell that was measured.
    pub cell: Cell,
    /// Figures in the first document.
    pub first: Summary,
    /// Figures in the second document.
    pub second: Summary,
    /// Ratio of the requests per second: second document to first document.
    pub iops: Ratio,
    /// Ratio of the mean latencies: second document to first document.
    pub mean: Ratio,
    /// Ratio of the 99th percentiles of the latency: second document to first document.
    pub p99: Ratio,
}

/// Compares two documents.
///
/// Each cell is tested at [`ALPHA`] divided by the number of cells (Bonferroni; Dunn, "Multiple
/// comparisons among means", JASA 56, 1961). Two documents of the same thing are therefore found
/// different in at most two of a hundred cases, however many cells there are.
pub fn compare(first: &Results, second: &Results) -> Comparison {
    let [ours, theirs] = [cells(first), cells(second)];
    let same_suite = first.suite_sha256 == second.suite_sha256;
    let mut left_out = Vec::new();
    let alike = |cell: &&Cell| same_workload(&first.suite, &second.suite, &cell.workload);
    let both: Vec<&Cell> = ours.iter().copied().filter(|cell| theirs.contains(cell)).collect();
    let unlike: BTreeSet<&str> =
        both.iter().filter(|cell| !alike(cell)).map(|cell| cell.workload.as_str()).collect();
    for workload in unlike {
        left_out.push(format!("{workload} is not the same workload in both"));
    }
    for (name, cells, others) in [("first", &ours, &theirs), ("second", &theirs, &ours)] {
        let alone = cells.iter().filter(|cell| !others.contains(cell)).count();
        if alone > 0 {
            left_out.push(format!("{} only in the {name}", words::count(alone, "cell")));
        }
    }
    let both: Vec<&Cell> = both.into_iter().filter(alike).collect();
    let level = ALPHA / both.len().max(1) as f64;
    let cells: Vec<Row> = both.into_iter().map(|cell| row(first, second, cell, level)).collect();
    let releases = [first, second].map(Results::ceph_releases);
    Comparison {
        same_suite,
        releases: Some(releases).filter(|[first, second]| first != second),
        agreement: agreement(&cells),
        differences: differences(first, second),
        cells,
        left_out,
    }
}

/// The cells of a document, each once, in the order of its suite: by workload, then by placement.
fn cells(results: &Results) -> Vec<&Cell> {
    let mut seen = BTreeSet::new();
    let mut cells: Vec<&Cell> =
        results.runs.iter().map(|run| &run.cell).filter(|cell| seen.insert(*cell)).collect();
    // Runs are in random order; readers know the order of the suite.
    let at = |cell: &Cell| {
        let placement = results.suite.placements.iter().position(|name| *name == cell.placement);
        let workload =
            results.suite.workloads.iter().position(|workload| workload.name == cell.workload);
        (workload.unwrap_or(usize::MAX), placement.unwrap_or(usize::MAX))
    };
    cells.sort_by(|one, two| at(one).cmp(&at(two)).then_with(|| one.cmp(two)));
    cells
}

/// Both suites mean the same workload by `name`. The title, the queue depths, the numbers of
/// clients and the placements are ignored.
fn same_workload(first: &Suite, second: &Suite, name: &str) -> bool {
    let plain = |suite: &Suite| {
        let workload = suite.workload(name)?.clone();
        Some(Workload {
            title: String::new(),
            depth: vec![],
            clients: vec![],
            placements: vec![],
            ..workload
        })
    };
    plain(first) == plain(second)
}

/// Agreement of the rows, decided by requests per second.
fn agreement(rows: &[Row]) -> Agreement {
    let differs = |row: &&Row| matches!(row.iops.finding, Finding::More | Finding::Less);
    let different = rows.iter().filter(differs).count();
    if different > 0 {
        return Agreement::Different { cells: different };
    }
    let width = |row: &Row| {
        let (low, high) = row.iops.ratio?.interval?;
        Some((high / low).sqrt())
    };
    let widths: Vec<f64> = rows.iter().filter_map(width).collect();
    match widths.iter().copied().reduce(f64::max) {
        Some(resolved_factor) => Agreement::Equal { cells: widths.len(), resolved_factor },
        None => Agreement::Unknown,
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Agreement::Equal { cells, resolved_factor } => write!(
                f,
                "equal: none of {} differs; the widest interval spans a factor of {} to either side",
                words::count(*cells, "cell"),
                words::factor(*resolved_factor)
            ),
            Agreement::Different { cells } => {
                write!(f, "different, in {}", words::count(*cells, "cell"))
            }
            Agreement::Unknown => {
                write!(f, "not comparable: no cell was measured on two clusters in both")
            }
        }
    }
}

fn row(first: &Results, second: &Results, cell: &Cell, level: f64) -> Row {
    let setting = Setting::of(cell);
    let of = |results| -> Vec<&Run> { stats::runs(results, &cell.placement, &setting) };
    let [ours, theirs] = [of(first), of(second)];
    let names = ["the second document's", "the first's"];
    let ratio = |metric| stats::unpaired(names, &theirs, &ours, metric, level);
    Row {
        cell: cell.clone(),
        first: stats::summary(&ours),
        second: stats::summary(&theirs),
        iops: ratio(Metric::Iops),
        mean: ratio(Metric::Mean),
        p99: ratio(Metric::P99),
    }
}

fn differences(first: &Results, second: &Results) -> Vec<String> {
    let mut differences = Vec::new();
    let mut differ = |what: &str, one: &str, two: &str| {
        if one != two {
            differences.push(format!("{what}: {one} in the first, {two} in the second"));
        }
    };
    let form = |results: &Results| if results.quick { "quick" } else { "full" };
    let short = |hash: &str| hash.chars().take(12).collect::<String>();
    let hashes = [&first.suite_sha256, &second.suite_sha256].map(|hash| short(hash));
    let [one, two] = &hashes;
    differ(
        "suite",
        &format!("{} {one}", first.suite.name),
        &format!("{} {two}", second.suite.name),
    );
    differ("form", form(first), form(second));
    for (what, [one, two]) in grounds(&first.suite, &second.suite) {
        differ(what, &one, &two);
    }
    differ("device classes", &classes(first), &classes(second));
    for device in &first.devices {
        let other = second.devices.iter().find(|other| other.spec.name == device.spec.name);
        if let Some(other) = other {
            let name = format!("device class {}", device.spec.name);
            differ(&name, &short(&device.sha256), &short(&other.sha256));
        }
    }
    let [one, two] = [&first.machine, &second.machine];
    differ(
        "processor",
        &format!("{} × {}", one.cpus, one.cpu),
        &format!("{} × {}", two.cpus, two.cpu),
    );
    differ("memory in bytes", &one.memory_bytes.to_string(), &two.memory_bytes.to_string());
    differ("kernel", &one.kernel, &two.kernel);
    differ("system", &one.system, &two.system);
    differ("filesystem", &one.filesystem, &two.filesystem);
    differ("versions", &one.versions.join(", "), &two.versions.join(", "));
    differ("commit", &one.commit, &two.commit);
    differ("Ceph", &testbeds(first, |bed| &bed.ceph), &testbeds(second, |bed| &bed.ceph));
    differ("network", &testbeds(first, |bed| &bed.network), &testbeds(second, |bed| &bed.network));
    differences
}

fn classes(results: &Results) -> String {
    let names: BTreeSet<&str> =
        results.devices.iter().map(|device| device.spec.name.as_str()).collect();
    names.into_iter().collect::<Vec<&str>>().join(", ")
}

fn testbeds(results: &Results, of: fn(&crate::results::Testbed) -> &String) -> String {
    let values: BTreeSet<&str> = results.testbeds.iter().map(|bed| of(bed).as_str()).collect();
    values.into_iter().collect::<Vec<&str>>().join(", ")
}

/// Quantities of the suites' clusters and the lengths of runs: each with its name and its two
/// values.
fn grounds(first: &Suite, second: &Suite) -> Vec<(&'static str, [String; 2])> {
    let of =
        |what: &'static str, value: fn(&Suite) -> String| (what, [value(first), value(second)]);
    vec![
        of("class of the disks", |suite| suite.ground.disk.clone()),
        of("bytes of a disk", |suite| suite.ground.disk_bytes.to_string()),
        of("class of the SSD", |suite| suite.ground.ssd.clone()),
        of("bytes of the SSD", |suite| suite.ground.ssd_bytes.to_string()),
        of("copies of each object", |suite| suite.ground.replicas.to_string()),
        of("neighbours of the clients", |suite| {
            suite.ground.neighbours.unwrap_or_default().to_string()
        }),
        of("devices slowed by", |suite| suite.ground.slowed_by.to_string()),
        of("and where it decides by", |suite| {
            suite
                .ground
                .second_slowed_by
                .map_or_else(|| "nothing else".into(), |factor| factor.to_string())
        }),
        of("delay in µs", |suite| suite.ground.delay_us.to_string()),
        of("bytes of an image", |suite| suite.ground.image_bytes.to_string()),
        of("bytes of an OSD's cache", |suite| suite.ground.osd_cache_bytes.to_string()),
        of("lines of ceph.conf", |suite| suite.ground.ceph_conf.join("; ")),
        of("repeats", |suite| suite.repeats.to_string()),
        of("repeats of the other workloads", |suite| {
            suite.repeats_beside.unwrap_or(suite.repeats).to_string()
        }),
        of("seconds of a run", |suite| suite.seconds.to_string()),
        of("seconds of the ramp", |suite| suite.ramp_s.to_string()),
        of("fresh clusters", |suite| suite.fresh_clusters.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn what_both_measured_is_compared_and_the_rest_is_named() {
        let first = synthetic::results(&[("a", &[100.0, 101.0, 99.0]), ("b", &[50.0; 3])]);
        let second = synthetic::results(&[("a", &[200.0, 202.0, 198.0]), ("c", &[50.0; 3])]);
        let found = compare(&first, &second);
        assert!(found.same_suite && found.differences.is_empty(), "{:?}", found.differences);
        assert_eq!(found.cells.len(), 1);
        assert_eq!(found.agreement, Agreement::Different { cells: 1 });
        assert_eq!(
            (found.cells[0].iops.finding, found.cells[0].mean.finding),
            (Finding::More, Finding::Less)
        );
        assert_eq!(found.left_out, ["1 cell only in the first", "1 cell only in the second"]);
    }

    #[test]
    fn what_differs_in_how_it_was_made_is_told() {
        let first = synthetic::which_side();
        let mut second = first.clone();
        second.quick = true;
        second.suite.ground.slowed_by = 8;
        second.suite.workloads[0].block_bytes = 8192;
        second.suite_sha256 = second.suite.sha256();
        second.devices[1].sha256 = "ff".into();
        second.devices.pop();
        second.machine.versions[0] = "fio-3.39".into();
        let found = compare(&first, &second);
        assert!(!found.same_suite);
        for part in [
            "suite: which-side ",
            "form: full in the first, quick in the second",
            "devices slowed by: 4 in the first, 8 in the second",
            "device classes: ",
            "device class ssd-sata-plp: ",
            "versions: fio-3.33",
        ] {
            assert!(
                found.differences.iter().any(|text| text.starts_with(part)),
                "{part}: {:?}",
                found.differences
            );
        }
        assert_eq!(found.left_out, ["4k-80-20 is not the same workload in both"]);
        assert!(
            !found.cells.is_empty()
                && found.cells.iter().all(|row| row.cell.workload != "4k-80-20")
        );
    }

    #[test]
    fn two_releases_of_ceph_are_told_however_alike_they_are() {
        let first = synthetic::which_side();
        let mut second = first.clone();
        for testbed in &mut second.testbeds {
            testbed.ceph = "ceph version 18.2.7 (0) reef (stable)".into();
        }
        let found = compare(&first, &second);
        assert_eq!(found.releases, Some([[16].into(), [18].into()]));
        assert!(matches!(found.agreement, Agreement::Equal { .. }), "{:?}", found.agreement);
        for testbed in &mut second.testbeds {
            testbed.ceph = "ceph version 16.2.9 (0) pacific (stable)".into();
        }
        let found = compare(&first, &second);
        assert_eq!(found.releases, None, "one release, in two versions");
        assert!(
            found.differences.iter().any(|text| text.starts_with("Ceph: ")),
            "{:?}",
            found.differences
        );
    }

    #[test]
    fn a_document_is_the_same_as_itself() {
        let results = synthetic::which_side();
        let found = compare(&results, &results);
        let differs =
            |row: &&Row| row.iops.finding == Finding::More || row.iops.finding == Finding::Less;
        assert!(found.left_out.is_empty() && found.cells.iter().filter(differs).count() == 0);
        assert!(matches!(found.agreement, Agreement::Equal { .. }));
        assert_eq!(
            found.cells.len(),
            results.suite.cells().len()
                - results
                    .suite
                    .cells()
                    .iter()
                    .filter(|c| c.placement == synthetic::NOT_RUN)
                    .count()
        );
    }

    /// A document of the exact form whose clusters differ at random. One placement is faster by a
    /// factor.
    fn simulated(seed: u64, faster: (&str, f64)) -> Results {
        let mut normal = synthetic::Normal::new(seed);
        let (between, within) = synthetic::SPREADS;
        let mut results = synthetic::empty();
        let cells: Vec<Cell> = results.suite.cells();
        let placements: BTreeSet<&String> = cells.iter().map(|cell| &cell.placement).collect();
        for (at, placement) in placements.into_iter().enumerate() {
            for repeat in 1..=results.suite.repeats {
                for factor in [None, results.suite.ground.second_slowed_by] {
                    let cluster = normal.next(between);
                    let of =
                        |cell: &&Cell| cell.placement == *placement && cell.slowed_by == factor;
                    for cell in cells.iter().filter(of) {
                        let speed = if placement == faster.0 { 100.0 * faster.1 } else { 100.0 };
                        let iops = speed * (cluster + normal.next(within)).exp();
                        let mut run =
                            synthetic::run(placement, &cell.workload, cell.depth, repeat, iops);
                        run.cell = cell.clone();
                        run.testbed =
                            repeat + 100 * at as u32 + 10_000 * u32::from(factor.is_some());
                        results.runs.push(synthetic::bare(run));
                    }
                }
            }
        }
        results
    }

    /// Number of pairs, of a hundred, that are called equal. In the second document of a pair one
    /// placement is `times` times faster.
    fn called_equal(times: f64) -> usize {
        let equal = |pair: &u64| {
            let first = simulated(2 * pair, ("", 1.0));
            let second = simulated(2 * pair + 1, ("host-tidepool", times));
            let found = compare(&first, &second);
            let by_name = |row: &&Row| row.cell.placement == "host-tidepool";
            if times > 1.0 {
                assert!(
                    found.cells.iter().filter(by_name).all(|row| row.iops.finding != Finding::Less)
                );
            }
            matches!(found.agreement, Agreement::Equal { .. })
        };
        (0..100).filter(equal).count()
    }

    #[test]
    fn two_runs_of_the_same_thing_are_equal_and_a_true_difference_is_found() {
        let (same, twice, thrice) = (called_equal(1.0), called_equal(2.0), called_equal(3.0));
        println!("called equal of 100: the same {same}, 2 × {twice}, 3 × {thrice}");
        assert!(same >= 95, "{same}");
        assert!(twice <= 50 && thrice <= 2, "{twice} {thrice}");
    }

    #[test]
    fn documents_of_one_cluster_cannot_be_compared() {
        let first = synthetic::results(&[("a", &[100.0])]);
        let found = compare(&first, &synthetic::results(&[("a", &[900.0])]));
        assert_eq!(found.agreement, Agreement::Unknown);
        assert_eq!(
            found.agreement.to_string(),
            "not comparable: no cell was measured on two clusters in both"
        );
    }
}
