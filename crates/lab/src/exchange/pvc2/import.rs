//! Reads records, and puts cells of ours beside them that do the same.
//!
//! Nothing is concluded from the two together. A record is one run on one cluster of which nothing is known, so that it has no interval, and to
//! make a results document of it would invent a testbed.

use serde::Serialize;
use serde_json::{Map, Value};

use super::{JOBS, Job, client};
use crate::collect::{Flow, Means, Parts};
use crate::results::Results;
use crate::stats::{self, Setting, Summary};
use crate::suite::ClusterSize;
use crate::words;

/// Formats whose jobs have fio's reports; the older one has nothing beside them.
const READABLE: [u64; 2] = [1, 2];
/// Where less than this part of what was read has come over the network, it has come from nowhere, or from the node itself.
const OVER_NETWORK_MIN: f64 = 0.1;

/// Why a text holds no records.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It is not JSON.
    #[error("{name} is not JSON: {source}")]
    NotJson {
        /// The file.
        name: String,
        /// Where it is not.
        source: serde_json::Error,
    },
    /// It is something else.
    #[error("{name} holds no records of pvc: {what}")]
    Other {
        /// The file.
        name: String,
        /// What is wrong with it.
        what: String,
    },
}

/// What records say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Imported {
    /// Each benchmark that has ended.
    pub benchmarks: Vec<Benchmark>,
    /// What was left out, a sentence each.
    pub left_out: Vec<String>,
}

/// A benchmark.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Benchmark {
    /// Its name, as the record has it.
    pub job: String,
    /// The format of the record.
    pub test_format: u64,
    /// Its jobs, in their order.
    pub jobs: Vec<JobRow>,
}

/// The figures of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobRow {
    /// Its name in the format.
    pub job: String,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// 99th percentile of the latency in microseconds, if it is told.
    pub p99_us: Option<f64>,
    /// Processors.
    pub cpu: Option<Parts>,
    /// Memory.
    pub memory: Option<Parts>,
    /// Network of one node: that of the client where it is ours.
    pub network: Option<Flow>,
    /// What makes the figure doubtful, a sentence each.
    pub remarks: Vec<String>,
}

/// Cells of ours that do what a job does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Beside {
    /// The placement.
    pub placement: String,
    /// The size of its clusters.
    pub size: ClusterSize,
    /// Its figures, means over the clusters.
    pub row: JobRow,
    /// Clusters that count.
    pub clusters: usize,
}

/// Reads records from the text of the file `name`.
///
/// # Errors
/// When it holds something else.
pub fn parse(name: &str, text: &[u8]) -> Result<Imported, ImportError> {
    let other = |what: String| ImportError::Other { name: name.into(), what };
    let value: Value =
        serde_json::from_slice(text).map_err(|source| ImportError::NotJson { name: name.into(), source })?;
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
        let why = imported.left_out.into_iter().next().unwrap_or_else(|| "the list is empty".into());
        return Err(other(why));
    }
    Ok(imported)
}

/// The jobs of a record that are known, in their order.
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

/// What a job has done. None if it has done nothing.
fn row(job: &Job, result: &Value) -> Result<Option<JobRow>, String> {
    let report = &result["jobs"][0];
    let reads = job.rw.ends_with("read");
    let side = &report[if reads { "read" } else { "write" }];
    let number = |value: &Value, path: &str| {
        let found = value.pointer(path).and_then(Value::as_f64).filter(|number| *number >= 0.0);
        found.ok_or_else(|| format!("{} is no number", path.trim_start_matches('/').replace('/', ".")))
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

/// Cells of these results that do what the jobs of the format do, with one client: those that count, by job, placement and size. None where
/// neighbours were busy beside the client.
pub fn beside(results: &Results) -> Vec<Beside> {
    let mut found = Vec::new();
    if results.suite.ground.neighbours.is_some() {
        return found;
    }
    for job in &JOBS {
        for workload in &results.suite.workloads {
            let settings = stats::settings(results, &workload.name).into_iter();
            let same = settings.filter(|setting| setting.clients == 1 && job.is(workload, setting.depth));
            for setting in same {
                let placements = crate::verdict::placements(results).into_iter();
                found.extend(placements.filter_map(|placement| ours(results, job, placement, &setting)));
            }
        }
    }
    found
}

/// What a placement has in a setting. None if no run of it counts.
fn ours(results: &Results, job: &Job, placement: &str, setting: &Setting) -> Option<Beside> {
    let runs = stats::runs(results, placement, setting);
    let Summary { iops, mean_us, p99_us, lower_bound, .. } = stats::summary(&runs);
    let (iops, mean_us) = (iops?, mean_us?);
    let counted = runs.iter().copied().filter(|run| stats::objections(run).is_empty());
    let means: Vec<Means> = counted.filter_map(|run| Means::of(&run.samples, &results.machine)).collect();
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
