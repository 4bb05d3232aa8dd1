//! Two documents side by side: what differs in how they were made, and by how much in what came out.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::results::{Results, Run};
use crate::stats::{self, Metric, Ratio, Setting, Summary};
use crate::suite::{Cell, Suite, Workload};

/// Two documents side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Both ran the same suite.
    pub same_suite: bool,
    /// What else than the figures is not the same, a sentence each.
    pub differences: Vec<String>,
    /// What both measured, in the first's order.
    pub cells: Vec<Row>,
    /// What only one of them measured, or under one name is two things.
    pub left_out: Vec<String>,
}

/// What came out of one cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What was measured.
    pub cell: Cell,
    /// In the first document.
    pub first: Summary,
    /// In the second.
    pub second: Summary,
    /// Requests per second of the second to those of the first.
    pub iops: Ratio,
    /// Mean latencies.
    pub mean: Ratio,
    /// 99th percentiles.
    pub p99: Ratio,
}

/// Compares two documents.
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
            left_out.push(format!("{} only in the {name}", crate::words::count(alone, "cell")));
        }
    }
    Comparison {
        same_suite,
        differences: differences(first, second),
        cells: both.into_iter().filter(alike).map(|cell| row(first, second, cell)).collect(),
        left_out,
    }
}

/// Cells in the order in which the document has them first.
fn cells(results: &Results) -> Vec<&Cell> {
    let mut seen = BTreeSet::new();
    let mut cells: Vec<&Cell> =
        results.runs.iter().map(|run| &run.cell).filter(|cell| seen.insert(*cell)).collect();
    // Runs are in random order; the suite's is the one that people know.
    let at = |cell: &Cell| {
        let placement = results.suite.placements.iter().position(|name| *name == cell.placement);
        let workload = results.suite.workloads.iter().position(|workload| workload.name == cell.workload);
        (workload.unwrap_or(usize::MAX), placement.unwrap_or(usize::MAX))
    };
    cells.sort_by(|one, two| at(one).cmp(&at(two)).then_with(|| one.cmp(two)));
    cells
}

/// Whether both mean the same by a workload's name. How many depths or placements there are besides makes no difference.
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

fn row(first: &Results, second: &Results, cell: &Cell) -> Row {
    let setting = Setting::of(cell);
    let of = |results| -> Vec<&Run> { stats::runs(results, &cell.placement, &setting) };
    let [ours, theirs] = [of(first), of(second)];
    let names = ["the second document's", "the first's"];
    let ratio = |metric| stats::unpaired(names, &theirs, &ours, metric);
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
    differ("suite", &format!("{} {one}", first.suite.name), &format!("{} {two}", second.suite.name));
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
    differ("processor", &format!("{} × {}", one.cpus, one.cpu), &format!("{} × {}", two.cpus, two.cpu));
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
    let names: BTreeSet<&str> = results.devices.iter().map(|device| device.spec.name.as_str()).collect();
    names.into_iter().collect::<Vec<&str>>().join(", ")
}

fn testbeds(results: &Results, of: fn(&crate::results::Testbed) -> &String) -> String {
    let values: BTreeSet<&str> = results.testbeds.iter().map(|bed| of(bed).as_str()).collect();
    values.into_iter().collect::<Vec<&str>>().join(", ")
}

/// What the suites' clusters and lengths are, each with its name.
fn grounds(first: &Suite, second: &Suite) -> Vec<(&'static str, [String; 2])> {
    let of = |what: &'static str, value: fn(&Suite) -> String| (what, [value(first), value(second)]);
    vec![
        of("class of the disks", |suite| suite.ground.disk.clone()),
        of("bytes of a disk", |suite| suite.ground.disk_bytes.to_string()),
        of("class of the SSD", |suite| suite.ground.ssd.clone()),
        of("bytes of the SSD", |suite| suite.ground.ssd_bytes.to_string()),
        of("copies of each object", |suite| suite.ground.replicas.to_string()),
        of("devices slowed by", |suite| suite.ground.slowed_by.to_string()),
        of("delay in µs", |suite| suite.ground.delay_us.to_string()),
        of("bytes of an image", |suite| suite.ground.image_bytes.to_string()),
        of("bytes of an OSD's cache", |suite| suite.ground.osd_cache_bytes.to_string()),
        of("lines of ceph.conf", |suite| suite.ground.ceph_conf.join("; ")),
        of("repeats", |suite| suite.repeats.to_string()),
        of("seconds of a run", |suite| suite.seconds.to_string()),
        of("seconds of the ramp", |suite| suite.ramp_s.to_string()),
        of("fresh clusters", |suite| suite.fresh_clusters.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Finding;
    use crate::synthetic;

    #[test]
    fn what_both_measured_is_compared_and_the_rest_is_named() {
        let first = synthetic::results(&[("a", &[100.0, 101.0, 99.0]), ("b", &[50.0; 3])]);
        let second = synthetic::results(&[("a", &[200.0, 202.0, 198.0]), ("c", &[50.0; 3])]);
        let found = compare(&first, &second);
        assert!(found.same_suite && found.differences.is_empty(), "{:?}", found.differences);
        assert_eq!(found.cells.len(), 1);
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
        assert!(!found.cells.is_empty() && found.cells.iter().all(|row| row.cell.workload != "4k-80-20"));
    }

    #[test]
    fn a_document_is_the_same_as_itself() {
        let results = synthetic::which_side();
        let found = compare(&results, &results);
        let differs = |row: &&Row| row.iops.finding == Finding::More || row.iops.finding == Finding::Less;
        assert!(found.left_out.is_empty() && found.cells.iter().filter(differs).count() == 0);
        assert_eq!(
            found.cells.len(),
            results.suite.cells().len()
                - results.suite.cells().iter().filter(|c| c.placement == synthetic::NOT_RUN).count()
        );
    }
}
