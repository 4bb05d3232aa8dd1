//! `lab report`, `lab compare` and `lab plan --results` as a user runs them.

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};
use tidepool_lab::suite::Suite;

fn tidepool(directory: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidepool"))
        .args(words)
        .current_dir(directory)
        .output()
        .expect("tidepool runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Results with two repeats of two placements, the cache on the host so many times faster.
fn results(times: f64) -> Value {
    let suite = Suite::find("which-side").expect("it comes with the program");
    let figures = |iops: f64| json!({"iops": iops, "mean_us": 16e6 / iops, "p50_us": 1.0, "p99_us": 9.0, "p999_us": 10.0});
    let run = |placement: &str, repeat: u32, iops: f64| {
        json!({
            "cell": {"placement": placement, "disks": 2, "osds_per_disk": 1, "workload": "4k-80-20", "depth": 16, "clients": 1},
            "repeat": repeat, "testbed": repeat, "durability": "one_copy", "begun_s": 0.0, "commands": ["fio --name=bench"],
            "figures": figures(iops), "reads": null, "writes": null, "histogram": [[1000, 10]], "invalid": [],
            "lower_bound": null, "samples": [], "stages": [], "devices": {}, "cpu_us_per_io": {}, "placement": {}, "drained": null,
        })
    };
    json!({
        "format": 1, "suite_sha256": suite.sha256(), "suite": suite, "quick": false, "seed": 1, "command": "tidepool lab run which-side",
        "begun": "2026-11-22T00:00:00Z", "not_run": [], "testbeds": [], "devices": [],
        "machine": {"cpu": "a", "cpus": 2, "memory_bytes": 1, "kernel": "b", "system": "c", "filesystem": "d", "versions": [], "commit": "e"},
        "runs": [
            run("bluestore-colocated", 1, 100.0), run("bluestore-colocated", 2, 101.0),
            run("host-tidepool", 1, 100.0 * times), run("host-tidepool", 2, 102.0 * times),
        ],
    })
}

fn write(directory: &Path, name: &str, value: &Value) {
    std::fs::write(directory.join(name), value.to_string()).expect("a file");
}

#[test]
fn a_report_is_written_beside_the_results_and_the_verdict_printed() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    write(parent, "r.json", &results(9.0));
    let printed = tidepool(parent, &["lab", "report", "r.json"]);
    let said = text(&printed.stdout);
    assert!(printed.status.success(), "{printed:?}");
    assert!(
        said.starts_with("Cache in the hypervisor: 9.0")
            && said.contains("In the hypervisor: host-tidepool wins with 9.0")
            && said.contains("The report is r.html"),
        "{said}"
    );
    let page = std::fs::read_to_string(parent.join("r.html")).expect("the report");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("host-tidepool wins with 9.0"));
    let verdict =
        tidepool(parent, &["lab", "report", "r.json", "--format", "json", "-o", "other.html"]);
    let verdict: Value = serde_json::from_slice(&verdict.stdout).expect("JSON");
    assert_eq!(verdict["rankings"][0]["places"][0]["placement"], "host-tidepool");
    assert_eq!(verdict["rankings"][0]["lead"]["iops"]["finding"], "more");
    assert_eq!(std::fs::read_to_string(parent.join("other.html")).expect("the report"), page);
}

#[test]
fn money_is_counted_at_a_price_of_an_ssd_that_there_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    write(parent, "r.json", &results(9.0));
    let report =
        |prices: &[&str]| tidepool(parent, &[&["lab", "report", "r.json"], prices].concat());
    let page = || std::fs::read_to_string(parent.join("r.html")).expect("the report");
    assert!(report(&[]).status.success());
    assert!(!page().contains("price per IOPS"));
    assert!(
        report(&["--ssd-price", "120", "--ssd-price", "ssd-sata-consumer=49.5"]).status.success()
    );
    assert!(page().contains("price per IOPS"));
    for (price, wanted) in [("nvme=3", "no placement stands on an SSD nvme"), ("-1", "no price")] {
        let refused = report(&[&format!("--ssd-price={price}")]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(text(&refused.stderr).contains(wanted), "{refused:?}");
    }
}

#[test]
fn two_results_are_compared_and_a_difference_is_no_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    let mut slower = results(3.0);
    slower["machine"]["cpu"] = "another".into();
    write(parent, "a.json", &results(9.0));
    write(parent, "b.json", &slower);
    let printed = tidepool(parent, &["lab", "compare", "a.json", "b.json"]);
    let said = text(&printed.stdout);
    assert!(printed.status.success(), "{printed:?}");
    assert!(said.contains("processor: 2 × a in the first, 2 × another in the second"), "{said}");
    assert!(
        said.lines().any(|line| line.contains("host-tidepool")
            && line.contains("0.33 ×")
            && line.contains("less")),
        "{said}"
    );
    let compared = tidepool(parent, &["lab", "compare", "a.json", "b.json", "--format", "json"]);
    let compared: Value = serde_json::from_slice(&compared.stdout).expect("JSON");
    assert_eq!(
        (compared["same_suite"].as_bool(), compared["cells"].as_array().map(Vec::len)),
        (Some(true), Some(2))
    );
}

/// Results of the suite pvc2 with one cluster of each of two sizes, on which each job was measured
/// once.
fn eight_jobs() -> Value {
    let mut results = results(1.0);
    let suite = Suite::find("pvc2").expect("it comes with the program");
    let run = results["runs"][0].clone();
    let mut runs = Vec::new();
    for (testbed, osds_per_disk) in [(1, 1), (2, 4)] {
        for workload in &suite.workloads {
            let mut run = run.clone();
            let side = if workload.writes() { "write" } else { "read" };
            let other = if workload.writes() { "read" } else { "write" };
            run["testbed"] = testbed.into();
            run["cell"] = json!({
                "placement": "bluestore-colocated", "disks": 1, "osds_per_disk": osds_per_disk, "workload": workload.name,
                "depth": workload.depth[0], "clients": 1,
            });
            run["samples"] = json!([{
                "at_ms": 1000, "busy_percent": 50.0, "iowait_percent": 0.0, "busiest_client_percent": 10.0, "memory_used_bytes": 1,
                "classes": {"mon": {"cpu_percent": 4.0, "pss_bytes": 1}, "osd": {"cpu_percent": 60.0, "pss_bytes": 1}},
                "network": {"client": {"received_bytes_per_s": 1e9, "sent_bytes_per_s": 2e6}}, "devices": {},
            }]);
            let mut report = json!({"fio version": "fio-3.33", "jobs": [{}]});
            report["jobs"][0][side] = json!({"io_bytes": 1 << 30, "iops": 1234.0 * f64::from(osds_per_disk), "bw_bytes": 5e6, "lat_ns": {"mean": 4e6}});
            report["jobs"][0][other] = json!({"io_bytes": 0});
            run["fio"] = json!([report]);
            runs.push(run);
        }
    }
    results["suite_sha256"] = suite.sha256().into();
    results["suite"] = serde_json::to_value(suite).expect("plain data");
    results["runs"] = runs.into();
    results
}

#[test]
fn records_of_another_benchmark_are_written_and_shown_beside_results() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    write(parent, "r.json", &eight_jobs());
    let export = |words: &[&str]| {
        tidepool(parent, &[&["lab", "export", "r.json", "--format", "pvc2"], words].concat())
    };
    let several = export(&[]);
    let error = text(&several.stderr);
    assert_eq!((several.status.code(), error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.contains("bluestore-colocated on 1 disk with 4 OSDs on each"), "{error}");
    let printed = export(&["--osds-per-disk", "4"]);
    assert!(printed.status.success(), "{printed:?}");
    let records: Value = serde_json::from_slice(&printed.stdout).expect("JSON alone");
    let job = &records[0]["benchmark_result"]["rand_write_4K"];
    assert_eq!(
        job["avg_cpu_util_percent"],
        json!({"total": 50.0, "ceph-mon": 2.0, "ceph-osd": 30.0})
    );
    assert_eq!(job["avg_network_util_bps"]["total"], 8.016e9);
    assert_eq!(job["jobs"][0]["write"]["iops"], 4936.0);
    assert!(export(&["--osds-per-disk", "4", "-o", "p.json"]).status.success());
    let overwritten = export(&["--osds-per-disk", "4", "-o", "r.json"]);
    assert_eq!(overwritten.status.code(), Some(2), "{overwritten:?}");
    let words =
        ["lab", "import", "p.json", "--format", "pvc2", "--beside", "r.json", "-o", "both.json"];
    let shown = tidepool(parent, &words);
    let said = text(&shown.stdout);
    assert!(shown.status.success(), "{shown:?}");
    let rows: Vec<&str> = said.lines().filter(|line| line.starts_with("rand_write_4K ")).collect();
    assert_eq!(rows.len(), 3, "the record, and two sizes of ours: {said}");
    assert!(
        rows[0].contains("_repeat-1") && rows[0].contains("4936") && rows[0].contains("4.0ms"),
        "{said}"
    );
    assert!(rows[2].contains("ours: bluestore-colocated 1×4, 1 cluster"), "{said}");
    let both: Value = serde_json::from_str(
        &std::fs::read_to_string(parent.join("both.json")).expect("it was asked for"),
    )
    .expect("JSON");
    assert_eq!(both["benchmarks"][0]["jobs"].as_array().map(Vec::len), Some(8));
    assert_eq!(both["beside"].as_array().map(Vec::len), Some(16));
    for (words, status, says) in [
        (["import", "r.json"], 1, "holds no records of pvc: it is no list"),
        (["import", "missing.json"], 1, "cannot read missing.json: no such file"),
        (["export", "p.json"], 1, "holds no results of the lab"),
    ] {
        let refused = tidepool(parent, &[&["lab"], &words[..], &["--format", "pvc2"]].concat());
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(status), "{words:?} {error}");
        assert!(error.lines().count() == 1 && error.contains(says), "{error}");
    }
}

/// An inventory of 4 KiB, 70 % reads and queue depth 16, whose OSDs are on disks.
const INVENTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/inventory.toml");

#[test]
fn a_plan_cites_what_was_measured_under_conditions_like_its_own() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    write(parent, "mine.json", &results(9.0));
    let mut other = results(2.0);
    other["suite"]["ground"]["disk"] = "nvme".into();
    write(parent, "other.json", &other);
    let words = ["lab", "plan", "--inventory", INVENTORY, "--results", "mine.json", "other.json"];
    let said = text(&tidepool(parent, &words).stdout);
    let cited: Vec<&str> = said.lines().filter(|line| line.contains("measured: ")).collect();
    assert_eq!(cited.len(), 1, "{said}");
    assert!(
        cited[0].contains("host-tidepool 9.0")
            && cited[0].ends_with("second of bluestore-colocated"),
        "{said}"
    );
    let conditions = said.lines().skip_while(|line| *line != cited[0]).nth(1).unwrap_or_default();
    assert!(
        conditions.contains("queue depth 16;") && conditions.ends_with("; mine.json"),
        "{conditions}"
    );
    assert!(said.contains("\nNot cited\n  other.json: nothing in it"), "{said}");
    let without = text(&tidepool(parent, &words[..4]).stdout);
    assert!(!without.contains("measured: ") && !without.contains("Not cited"), "{without}");
}

#[test]
fn what_is_no_results_is_told_on_one_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = directory.path();
    let mut newer = results(1.0);
    newer["format"] = 2.into();
    let mut nothing = results(1.0);
    nothing["runs"] = json!([]);
    write(parent, "good.json", &results(1.0));
    write(parent, "newer.json", &newer);
    write(parent, "nothing.json", &nothing);
    write(parent, "any.json", &json!({"blockdevices": []}));
    std::fs::write(parent.join("text.json"), "hello").expect("a file");
    for (words, status, says) in [
        (&["report", "missing.json"][..], 1, "cannot read missing.json: no such file or directory"),
        (&["report", "text.json"], 1, "text.json is not JSON"),
        (&["report", "newer.json"], 1, "newer.json has format 2, this program reads format 1"),
        (&["report", "nothing.json"], 1, "holds no runs"),
        (&["report", "good.json", "-o", "good.json"], 2, "would overwrite the results"),
        (&["report", "good.json", "-o", "./good.json"], 2, "would overwrite the results"),
        (
            &["report", "good.json", "-o", "no/such/r.html"],
            1,
            "cannot write no/such/r.html: no such file",
        ),
        (&["compare", "good.json", "text.json"], 1, "text.json is not JSON"),
        (
            &["plan", "--inventory", INVENTORY, "--results", "good.json", "text.json"],
            1,
            "text.json is not JSON",
        ),
        (
            &["plan", "--inventory", INVENTORY, "--results", "any.json"],
            1,
            "any.json holds no results of the lab",
        ),
    ] {
        let refused = tidepool(parent, &[&["lab"], words].concat());
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(status), "{words:?} {error}");
        assert!(error.lines().count() == 1 && error.contains(says), "{error}");
    }
}

#[test]
fn the_schema_is_printed_as_it_is_committed() {
    let printed = tidepool(Path::new("."), &["lab", "report", "--schema"]);
    let committed = include_str!("../../../docs/lab-results.schema.json");
    assert!(printed.status.success() && text(&printed.stdout) == committed);
}
