use serde_json::{Value, json};

use super::*;
use crate::results::{Results, Run};
use crate::suite::Suite;
use crate::synthetic;

/// A report of fio for a job with `iops` requests per second, with the fields that readers of the
/// format use.
fn report(job: &Job, iops: f64) -> Value {
    let bytes_per_s = iops * job.block_bytes as f64;
    let mean_ns = f64::from(job.depth) / iops * 1e9;
    let done = json!({
        "io_bytes": bytes_per_s * 60.0, "bw_bytes": bytes_per_s, "iops": iops, "bw_min": 1, "bw_max": 2, "bw_mean": 1.5, "bw_dev": 0.5,
        "bw_samples": 120, "iops_min": 1, "iops_max": 2, "iops_mean": 1.5, "iops_stddev": 0.5, "iops_samples": 120,
        "lat_ns": {"min": 1, "max": 2, "mean": mean_ns, "stddev": 1.0},
        "clat_ns": {"percentile": {"99.000000": mean_ns * 4.0}},
    });
    let nothing = json!({"io_bytes": 0, "iops": 0.0});
    let reads = job.rw.ends_with("read");
    let (read, write) = if reads { (done, nothing) } else { (nothing, done) };
    json!({"fio version": "fio-3.33", "jobs": [{"jobname": "bench", "error": 0, "read": read, "write": write, "job_runtime": 60000,
        "usr_cpu": 1.0, "sys_cpu": 1.0, "ctx": 1, "majf": 0, "minf": 1, "latency_ns": {}, "latency_us": {}, "latency_ms": {"2": 100.0}}]})
}

/// Requests per second of a job on a cluster.
fn speed(job: &Job, repeat: u32) -> f64 {
    let index = JOBS.iter().position(|other| other == job).expect("a job") as f64;
    (100.0 + index) * (1.0 + f64::from(repeat) / 100.0)
}

/// Results of the suite in which each job was measured on two clusters of each of two sizes.
fn results() -> Results {
    let mut results = synthetic::empty();
    results.suite = Suite::find("pvc2").expect("it comes with the program").quick();
    for (osds_per_disk, testbeds) in [(1, 0), (4, 10)] {
        for repeat in 1..=2 {
            for job in &JOBS {
                let iops = speed(job, repeat) * f64::from(osds_per_disk);
                let mut run: Run =
                    synthetic::run("bluestore-colocated", job.name, job.depth, repeat, iops);
                (run.cell.disks, run.cell.osds_per_disk) = (1, osds_per_disk);
                run.testbed += testbeds;
                run.fio = vec![report(job, iops)];
                for sample in &mut run.samples {
                    let carried = sample.network.remove("lo").expect("recorded");
                    sample.network.insert(CLIENT.into(), carried);
                }
                results.runs.push(run);
            }
        }
    }
    results
}

fn wanted(osds_per_disk: u32) -> Wanted {
    Wanted { osds_per_disk: Some(osds_per_disk), ..Wanted::default() }
}

fn run<'a>(results: &'a Results, job: &Job, repeat: u32, osds_per_disk: u32) -> &'a Run {
    let of = |run: &&Run| {
        (run.cell.workload.as_str(), run.repeat, run.cell.osds_per_disk)
            == (job.name, repeat, osds_per_disk)
    };
    results.runs.iter().find(of).expect("it was measured")
}

#[test]
fn what_is_written_and_read_again_has_the_figures() {
    let results = results();
    let exported = export(&results, &wanted(4)).expect("records");
    assert_eq!(exported.records.len(), 2, "a record for each cluster");
    let text = serde_json::to_vec(&exported.records).expect("plain data");
    let found = parse("r.json", &text).expect("as it was written");
    assert!(found.left_out.is_empty(), "{:?}", found.left_out);
    for (repeat, benchmark) in (1..).zip(&found.benchmarks) {
        assert_eq!((benchmark.test_format, benchmark.jobs.len()), (TEST_FORMAT, JOBS.len()));
        assert_eq!(
            benchmark.job,
            format!("2026-11-22T08:00:00Z_bluestore-colocated_1x4_repeat-{repeat}")
        );
        for (row, job) in benchmark.jobs.iter().zip(&JOBS) {
            let run = run(&results, job, repeat, 4);
            let means = crate::collect::Means::of(&run.samples, &results.machine).expect("samples");
            let is =
                |one: f64, other: f64| assert!((one / other - 1.0).abs() < 1e-9, "{one} {other}");
            assert_eq!(row.job, job.name);
            is(row.iops, run.figures.iops);
            is(row.bytes_per_s, run.figures.iops * job.block_bytes as f64);
            is(row.mean_us, run.figures.mean_us);
            is(row.p99_us.expect("told"), run.figures.p99_us.expect("told"));
            let (ours, theirs) = (row.memory.expect("told"), means.memory.expect("known"));
            is(ours.total_percent, theirs.total_percent);
            is(ours.osd_percent, theirs.osd_percent);
            is(row.cpu.expect("told").mon_percent, means.cpu.mon_percent);
            let (ours, theirs) = (row.network.expect("told"), means.network[CLIENT]);
            is(ours.sent_bits_per_s, theirs.sent_bits_per_s);
            is(ours.total_bits_per_s(), theirs.total_bits_per_s());
        }
    }
}

#[test]
fn a_record_has_what_readers_of_the_format_look_at() {
    let results = results();
    let records = export(&results, &wanted(1)).expect("records").records;
    let record = records[0].as_object().expect("an object");
    let keys: Vec<&str> = record.keys().map(String::as_str).collect();
    assert!(
        ["benchmark_result", "id", "job", "test_format"].iter().all(|key| keys.contains(key)),
        "{keys:?}"
    );
    assert_eq!((keys.len(), &record["id"], &record["test_format"]), (4, &json!(1), &json!(2)));
    let result = record["benchmark_result"].as_object().expect("an object");
    assert_eq!(result.len(), JOBS.len(), "readers go over all that is there");
    for job in &JOBS {
        let found = &result[job.name];
        for name in ["avg_cpu_util_percent", "avg_memory_util_percent"] {
            for key in ["total", "ceph-mon", "ceph-osd"] {
                assert!(found[name][key].is_f64(), "{} {name} {key}", job.name);
            }
        }
        let network = &found["avg_network_util_bps"];
        let of = |key: &str| network[key].as_f64().expect("a number");
        assert!((of("sent") + of("recv") - of("total")).abs() < 1e-6);
        assert_eq!(found["jobs"], run(&results, job, 1, 1).fio[0]["jobs"], "fio's report is whole");
        assert_eq!(found["fio version"], "fio-3.33");
    }
}

#[test]
fn what_is_not_certain_is_refused_with_what_there_is() {
    let results = results();
    let refused = |results: &Results, wanted: &Wanted| {
        export(results, wanted).expect_err("refused").to_string()
    };
    let both = refused(&results, &Wanted::default());
    assert!(
        both.contains("--osds-per-disk among bluestore-colocated on 1 disk with 1 OSD on each; "),
        "{both}"
    );
    assert!(both.ends_with("bluestore-colocated on 1 disk with 4 OSDs on each"), "{both}");
    let none = refused(&results, &wanted(2));
    assert!(
        none.starts_with("nothing of that was measured; there are bluestore-colocated on"),
        "{none}"
    );
    let mut old = results.clone();
    old.runs.iter_mut().for_each(|run| run.fio.clear());
    assert!(refused(&old, &wanted(1)).contains("no reports of fio"));
    let other = synthetic::which_side();
    let why = refused(&other, &Wanted::default());
    assert!(
        why.contains("the suite which-side does not measure all jobs") && why.contains("seq_read"),
        "{why}"
    );
    assert!([both, none, why].iter().all(|line| !line.contains('\n')));
}

#[test]
fn a_cluster_that_lacks_a_job_has_no_record_and_that_is_told() {
    let mut results = results();
    let bad = |run: &&mut Run| run.cell.workload == "rand_read_4K" && run.repeat == 1;
    results.runs.iter_mut().filter(bad).for_each(|run| run.invalid.push("an OSD has ended".into()));
    let exported = export(&results, &wanted(4)).expect("the other cluster");
    assert_eq!(exported.records.len(), 1);
    let told = |part: &str| exported.notes.iter().any(|note| note.contains(part));
    assert!(told("lacks rand_read_4K: an OSD has ended"), "{:?}", exported.notes);
    assert!(told("devices were emulated") && !told("the limit"), "{:?}", exported.notes);
    results.runs.iter_mut().for_each(|run| run.lower_bound = Some("a thread".into()));
    let notes = export(&results, &wanted(4)).expect("the other cluster").notes;
    assert!(notes.iter().any(|note| note.contains("the limit of some runs")), "{notes:?}");
    results.runs.retain(|run| run.repeat == 1);
    let why = export(&results, &wanted(4)).expect_err("none is whole").to_string();
    assert!(
        why.contains("no cluster has a run that counts of every job")
            && why.contains("rand_read_4K"),
        "{why}"
    );
}

#[test]
fn what_came_from_nowhere_is_doubted() {
    let results = results();
    let mut records = export(&results, &wanted(1)).expect("records").records;
    let network = &mut records[0]["benchmark_result"]["seq_read"]["avg_network_util_bps"];
    *network = json!({"sent": 1000.0, "recv": 1000.0, "total": 2000.0});
    let found =
        parse("r.json", &serde_json::to_vec(&records).expect("plain data")).expect("records");
    let remarks = |record: usize, job: usize| &found.benchmarks[record].jobs[job].remarks;
    assert!(remarks(0, 0)[0].contains("never written is read from nowhere"), "{:?}", remarks(0, 0));
    // Samples here carry no more than 4 KiB requests need, so reads of 4 MiB are doubted as well,
    // and writes never.
    assert!(remarks(0, 4).is_empty() && remarks(0, 1).is_empty());
}

#[test]
fn cells_of_ours_stand_beside_the_job_that_they_do() {
    let rows = beside(&results());
    assert_eq!(rows.len(), JOBS.len() * 2);
    for Beside { row, placement, size, clusters } in &rows {
        let job = JOBS.iter().find(|job| job.name == row.job).expect("a job");
        let mean = (speed(job, 1) * speed(job, 2)).sqrt() * f64::from(size.osds_per_disk);
        assert!((row.iops / mean - 1.0).abs() < 1e-9, "{row:?}");
        assert_eq!((placement.as_str(), *clusters), ("bluestore-colocated", 2));
    }
    // Another suite does some of the jobs under other names. With a guest that never flushes, no
    // workload does a job.
    let mut other = synthetic::which_side();
    let doing: Vec<String> = beside(&other).into_iter().map(|found| found.row.job).collect();
    assert!(
        !doing.is_empty() && doing.iter().all(|job| job.ends_with("_4K_lowdepth")),
        "{doing:?}"
    );
    other.suite.workloads.iter_mut().for_each(|workload| workload.guest = Guest::NeverFlushes);
    assert!(beside(&other).is_empty());
}

#[test]
fn what_holds_no_records_is_told_in_one_line() {
    let good = serde_json::to_value(export(&results(), &wanted(1)).expect("records").records)
        .expect("plain data");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        value.to_string()
    };
    for (text, wanted) in [
        ("hello".to_string(), "is not JSON"),
        ("{}".into(), "no list of records"),
        ("[]".into(), "the list is empty"),
        ("[1]".into(), "record 1: it has no job"),
        (with(&|value| value[1]["test_format"] = 0.into()), "record 2: it has test_format 0"),
        (
            with(&|value| value[0]["benchmark_result"]["seq_read"]["jobs"] = json!([])),
            "seq_read: io_bytes is no number",
        ),
        (
            with(&|value| {
                value[0]["benchmark_result"]["seq_read"]["jobs"][0]["read"]["lat_ns"] =
                    json!({"mean": "x"})
            }),
            "record 1: seq_read: lat_ns.mean is no number",
        ),
        (
            "[{\"job\": \"a\", \"test_format\": 2, \"benchmark_result\": \"Running\"}]".into(),
            "still running",
        ),
        (
            "[{\"job\": \"a\", \"test_format\": 2, \"benchmark_result\": {\"x\": 1}}]".into(),
            "not known here",
        ),
    ] {
        let error = parse("r.json", text.as_bytes()).expect_err(wanted).to_string();
        assert!(
            error.starts_with("r.json") && error.contains(wanted) && !error.contains('\n'),
            "{error}"
        );
    }
    let running = with(&|value| value[0]["benchmark_result"] = "Running".into());
    let found = parse("r.json", running.as_bytes()).expect("the other one");
    assert_eq!((found.benchmarks.len(), found.left_out.len()), (1, 1));
}
