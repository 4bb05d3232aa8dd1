//! Reads records, and finds the lab's cells that do the jobs of the format.
//!
//! Nothing is concluded from a record and a cell together. A record is one run on a cluster of
//! which nothing is known, so it has no interval. A results document made of it would have an
//! invented testbed.

use serde::Serialize;
use serde_json::{Map, Value};

use super::{JOBS, Job, client};
use crate::collect::{Flow, Means, Parts};
use crate::results::Results;
use crate::stats::{self, Setting, Summary};
use crate::suite::ClusterSize;
use crate::words;

/// Formats that can be read. The jobs of both have fio's reports; format 1 has nothing beside them.
const READABLE: [u64; 2] = [1, 2];
/// Least part of what was read that has to come in over the network. With less, the data came from
/// nowhere, or from the node itself.
const OVER_NETWORK_MIN: f64 = 0.1;

/// Why a text gives no records.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The text is not JSON.
    #[error("{name} is not JSON: {source}")]
    NotJson {
        /// The file.
        name: String,
        /// Where and why the text is not JSON.
        source: serde_json::Error,
    },
    /// The text is JSON, but holds no records that can be read.
    #[error("{name} holds no records of pvc: {what}")]
    Other {
        /// The file.
        name: String,
        /// What is wrong with the content.
        what: String,
    },
}

/// The content of records.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Imported {
    /// Each benchmark that has ended and has a known job.
    pub benchmarks: Vec<Benchmark>,
    /// What was left out, one sentence each.
    pub left_out: Vec<String>,
}

/// A benchmark.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Benchmark {
    /// Name of the benchmark, as the record has it.
    pub job: String,
    /// The format of the record.
    pub test_format: u64,
    /// The jobs of the benchmark, in the order of [`JOBS`].
    pub jobs: Vec<JobRow>,
}

/// The figures of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobRow {
    /// Name of the job in the format.
    pub job: String,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// 99th percentile of the latency in microseconds, if it is known.
    pub p99_us: Option<f64>,
    /// Processors that were used, in percent of all.
    pub cpu: Option<Parts>,
    /// Memory that was used, in percent of the machine's.
    pub memory: Option<Parts>,
    /// Network traffic of one node. For a cell of the lab this is the client's node.
    pub network: Option<Flow>,
    /// Why the figures are doubtful, one sentence each.
    pub remarks: Vec<String>,
}

/// Cells of the lab that do what a job does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Beside {
    /// The placement.
    pub placement: String,
    /// The size of the placement's clusters.
    pub size: ClusterSize,
    /// Figures of the cells: requests and mean latency are means over the clusters, the 99th
    /// percentile is of all repeats together, the use of resources is the mean over the runs.
    pub row: JobRow,
    /// Number of clusters that count.
    pub clusters: usize,
}

/// Reads records from the text of the file `name`.
///
/// # Errors
/// When the text is something else.
pub fn parse(name: &str, text: &[u8]) -> Result<Imported, ImportError> {
    let other = |what: String| ImportError::Other { name: name.into(), what };
    let value: Value = serde_json::from_slice(text)
        .map_err(|source| ImportError::NotJson { name: name.into(), source })?;
    let records = value.as_array().ok_or_else(|| other("it is no list of records".into()))?;
    let mut imported = Imported { benchmarks: Vec::new(), left_out: Vec::new() };
    for (number, record) in (1..).zip(records) {
        let wrong = |what: String| other(format!("record {number}: {what}"));
        let job = record["job"].as_str().ok_or_else(|| wrong("it has no job".into()))?;
        let format = record["test_format"].as_u64().unwrap_or(0);
        if !READABLE.contains(&format) {
            return Err(wrong(format!("it has test_format {format}; 1 and 2 are read")));
        }
        let Some(result) = record["benchmark_result"].as_object() else {
            imported.left_out.push(format!("{job}: it has no result, or is still running"));
            continue;
        };
        let jobs = jobs(result, &mut imported.left_out).map_err(wrong)?;
        if jobs.is_empty() {
            imported.left_out.push(format!("{job}: it has no job that is known here"));
            continue;
        }
        imported.benchmarks.push(Benchmark { job: job.into(), test_format: format, jobs });
    }
    if imported.benchmarks.is_empty() {
        let why =
            imported.left_out.into_iter().next().unwrap_or_else(|| "the list is empty".into());
        return Err(other(why));
    }
    Ok(imported)
}

/// The known jobs of a record, in the order of [`JOBS`].
fn jobs(result: &Map<String, Value>, left_out: &mut Vec<String>) -> Result<Vec<JobRow>, String> {
    let mut rows = Vec::new();
    for job in &JOBS {
        let Some(found) = result.get(job.name) else { continue };
        match row(job, found).map_err(|what| format!("{}: {what}", job.name))? {
            Some(row) => rows.push(row),
            None => left_out.push(format!("{}: nothing was read or written", job.name)),
        }
    }
    let unknown = result.keys().filter(|name| !JOBS.iter().any(|job| job.name == name.as_str()));
    left_out.extend(unknown.map(|name| format!("{name}: a job that is not known here")));
    Ok(rows)
}

/// The figures of a job. None if the job read or wrote nothing.
fn row(job: &Job, result: &Value) -> Result<Option<JobRow>, String> {
    let report = &result["jobs"][0];
    let reads = job.rw.ends_with("read");
    let side = &report[if reads { "read" } else { "write" }];
    let number = |value: &Value, path: &str| {
        let found = value.pointer(path).and_then(Value::as_f64).filter(|number| *number >= 0.0);
        found.ok_or_else(|| {
            format!("{} is no number", path.trim_start_matches('/').replace('/', "."))
        })
    };
    if number(side, "/io_bytes")? <= 0.0 {
        return Ok(None);
    }
    let parts = |name: &str| -> Option<Parts> {
        let of = |key: &str| result[name][key].as_f64();
        let (total, mon, osd) = (of("total")?, of("ceph-mon")?, of("ceph-osd")?);
        Some(Parts { total_percent: total, mon_percent: mon, osd_percent: osd })
    };
    let network = &result["avg_network_util_bps"];
    let network = network["sent"].as_f64().zip(network["recv"].as_f64());
    let mut row = JobRow {
        job: job.name.into(),
        iops: number(side, "/iops")?,
        bytes_per_s: number(side, "/bw_bytes")?,
        mean_us: number(side, "/lat_ns/mean")? / 1e3,
        p99_us: side["clat_ns"]["percentile"]["99.000000"].as_f64().map(|ns| ns / 1e3),
        cpu: parts("avg_cpu_util_percent"),
        memory: parts("avg_memory_util_percent"),
        network: network
            .map(|(sent, received)| Flow { sent_bits_per_s: sent, received_bits_per_s: received }),
        remarks: Vec::new(),
    };
    let received = row.network.map(|flow| flow.received_bits_per_s / 8.0);
    if let Some(received) =
        received.filter(|received| reads && *received < row.bytes_per_s * OVER_NETWORK_MIN)
    {
        row.remarks.push(format!(
            "{}/s were read and {}/s came in over the network: an image that was never written is read from nowhere",
            words::bytes(row.bytes_per_s as u64),
            words::bytes(received as u64)
        ));
    }
    Ok(Some(row))
}

/// Cells of these results that count and do what the jobs of the format do, with one client, in the
/// order of the jobs. Empty if the suite's ground has neighbours, which run beside the client.
pub fn beside(results: &Results) -> Vec<Beside> {
    let mut found = Vec::new();
    if results.suite.ground.neighbours.is_some() {
        return found;
    }
    for job in &JOBS {
        for workload in &results.suite.workloads {
            let settings = stats::settings(results, &workload.name).into_iter();
            let same =
                settings.filter(|setting| setting.clients == 1 && job.is(workload, setting.depth));
            for setting in same {
                let placements = crate::verdict::placements(results).into_iter();
                found.extend(
                    placements.filter_map(|placement| ours(results, job, placement, &setting)),
                );
            }
        }
    }
    found
}

/// Figures of a placement in a setting. None if no run of the placement counts.
fn ours(results: &Results, job: &Job, placement: &str, setting: &Setting) -> Option<Beside> {
    let runs = stats::runs(results, placement, setting);
    let Summary { iops, mean_us, p99_us, lower_bound, .. } = stats::summary(&runs);
    let (iops, mean_us) = (iops?, mean_us?);
    let counted = runs.iter().copied().filter(|run| stats::objections(run).is_empty());
    let means: Vec<Means> =
        counted.filter_map(|run| Means::of(&run.samples, &results.machine)).collect();
    let means = Means::joined(&means);
    Some(Beside {
        placement: placement.into(),
        size: ClusterSize { disks: setting.disks, osds_per_disk: setting.osds_per_disk },
        clusters: iops.count,
        row: JobRow {
            job: job.name.into(),
            iops: iops.value,
            bytes_per_s: iops.value * job.block_bytes as f64,
            mean_us: mean_us.value,
            p99_us,
            cpu: means.as_ref().map(|means| means.cpu),
            memory: means.as_ref().and_then(|means| means.memory),
            network: means.as_ref().and_then(client),
            remarks: lower_bound.into_iter().collect(),
        },
    })
}
