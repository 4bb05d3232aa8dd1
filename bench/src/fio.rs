//! Runs fio and reads its figures.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Failure;

/// Where fio sends its requests.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// A file, past the page cache.
    File(PathBuf),
    /// An export of an NBD server on a unix socket.
    Nbd {
        /// The socket.
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
    /// An image of the pool `rbd`, through librbd.
    Rbd {
        /// The cluster's ceph.conf.
        conf: PathBuf,
        /// The image.
        image: String,
    },
}

/// A workload, named as in the table of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// fio's `rw`.
    pub rw: &'static str,
    /// Percentage of reads of a mixed workload.
    pub read_percent: u32,
    /// Size of a request.
    pub block_bytes: u32,
    /// Requests in flight.
    pub depth: u32,
    /// A flush follows every write.
    pub flush: bool,
    /// It works on the part of the image that fits into the cache, warmed up before.
    pub warm: bool,
}

const WRITE: Row = Row {
    name: "",
    rw: "randwrite",
    read_percent: 0,
    block_bytes: 4096,
    depth: 1,
    flush: false,
    warm: false,
};
const READ: Row = Row { rw: "randread", read_percent: 100, warm: true, ..WRITE };

/// All workloads.
pub const ROWS: [Row; 9] = [
    Row { name: "4K randwrite QD1", ..WRITE },
    Row { name: "4K randwrite + flush QD1", flush: true, ..WRITE },
    Row { name: "4K randwrite QD64", depth: 64, ..WRITE },
    Row { name: "64K randwrite QD16", block_bytes: 64 << 10, depth: 16, ..WRITE },
    Row { name: "1M randwrite QD4", block_bytes: 1 << 20, depth: 4, ..WRITE },
    Row { name: "4K randread QD1", ..READ },
    Row { name: "4K randread QD32", depth: 32, ..READ },
    Row { name: "4K randread QD64", depth: 64, ..READ },
    Row { name: "4K 80/20 QD32", rw: "randrw", read_percent: 80, depth: 32, ..READ },
];

/// Figures of one run; latencies are those of a request, and with a flush after each write of the pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Reads and writes completed per second (not flushes).
    pub iops: f64,
    /// Mean latency.
    pub mean_us: f64,
    /// Median latency of the slower of reads and writes.
    pub p50_us: f64,
    /// 99th percentile of the slower of reads and writes.
    pub p99_us: f64,
    /// 99.9th percentile of the slower of reads and writes.
    pub p999_us: f64,
}

/// Arguments that every run has.
fn common(size_bytes: u64) -> Vec<String> {
    vec![
        "--name=bench".into(),
        "--output-format=json".into(),
        "--thread=1".into(),
        "--numjobs=1".into(),
        "--randrepeat=0".into(),
        "--norandommap=1".into(),
        "--random_generator=tausworthe64".into(),
        "--refill_buffers=1".into(),
        "--direct=1".into(),
        format!("--size={size_bytes}"),
    ]
}

/// Arguments that name the endpoint.
fn endpoint(endpoint: &Endpoint) -> Vec<String> {
    match endpoint {
        Endpoint::File(path) => vec!["--ioengine=io_uring".into(), format!("--filename={}", path.display())],
        Endpoint::Nbd { socket, export } => {
            vec!["--ioengine=nbd".into(), format!("--uri=nbd+unix:///{export}?socket={}", socket.display())]
        }
        Endpoint::Rbd { image, .. } => {
            vec![
                "--ioengine=rbd".into(),
                "--clientname=admin".into(),
                "--pool=rbd".into(),
                format!("--rbdname={image}"),
            ]
        }
    }
}

/// The arguments of a timed run.
pub fn arguments(target: &Endpoint, row: &Row, size_bytes: u64, ramp_s: u32, seconds: u32) -> Vec<String> {
    let mut words = common(size_bytes);
    words.extend(endpoint(target));
    words.extend([
        format!("--rw={}", row.rw),
        format!("--bs={}", row.block_bytes),
        format!("--iodepth={}", row.depth),
        "--time_based=1".into(),
        format!("--runtime={seconds}"),
    ]);
    if ramp_s > 0 {
        words.push(format!("--ramp_time={ramp_s}"));
    }
    if row.rw == "randrw" {
        words.push(format!("--rwmixread={}", row.read_percent));
    }
    if row.flush {
        words.push("--fsync=1".into());
    }
    words
}

/// The arguments of a pass over the first `size_bytes` in order: `write` fills, `read` warms.
pub fn pass(target: &Endpoint, rw: &str, size_bytes: u64) -> Vec<String> {
    let mut words = common(size_bytes);
    words.extend(endpoint(target));
    words.extend([format!("--rw={rw}"), "--bs=256k".into(), "--iodepth=16".into()]);
    if rw == "write" {
        words.push("--end_fsync=1".into());
    }
    words
}

/// The arguments of `reads` random reads, the same ones every time.
pub fn trace(target: &Endpoint, size_bytes: u64, reads: u32) -> Vec<String> {
    let mut words = common(size_bytes);
    words.retain(|word| word != "--randrepeat=0");
    words.extend(endpoint(target));
    words.extend([
        "--rw=randread".into(),
        "--bs=4k".into(),
        "--iodepth=32".into(),
        "--randrepeat=1".into(),
        format!("--number_ios={reads}"),
    ]);
    words
}

/// A shell line that repeats a run.
pub fn command_line(target: &Endpoint, words: &[String]) -> String {
    let environment = match target {
        Endpoint::Rbd { conf, .. } => format!("CEPH_CONF={} ", conf.display()),
        _ => String::new(),
    };
    format!("{environment}fio {}", words.join(" "))
}

/// Runs fio.
pub fn run(target: &Endpoint, words: &[String]) -> Result<Value, Failure> {
    let mut command = Command::new("fio");
    command.args(words).stdin(Stdio::null()).current_dir(tidepool_lab::scratch::parent());
    if let Endpoint::Rbd { conf, .. } = target {
        command.env("CEPH_CONF", conf);
    }
    let output = command.output().map_err(|source| Failure::Io { what: "cannot run fio".into(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    // Engines print notes before the document.
    let document = text.find('{').and_then(|start| serde_json::from_str::<Value>(&text[start..]).ok());
    match document {
        Some(document) if output.status.success() && document["jobs"][0]["error"] == 0 => Ok(document),
        _ => Err(Failure::Fio {
            command: command_line(target, words),
            output: String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string(),
        }),
    }
}

/// The figures of a timed run.
pub fn figures(document: &Value, row: &Row) -> Figures {
    let job = &document["jobs"][0];
    let sides = [&job["read"], &job["write"]];
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let iops: f64 = sides.iter().map(|side| number(&side["iops"])).sum();
    let total: f64 = sides.iter().map(|side| number(&side["total_ios"])).sum();
    let sum: f64 =
        sides.iter().map(|side| number(&side["total_ios"]) * number(&side["lat_ns"]["mean"])).sum();
    let percentile = |name: &str| {
        let of = |side: &&Value| number(&side["clat_ns"]["percentile"][name]);
        sides.iter().map(of).fold(0.0, f64::max) / 1e3
    };
    let flush =
        |name: &str| if row.flush { number(&job["sync"]["lat_ns"]["percentile"][name]) / 1e3 } else { 0.0 };
    let flush_mean = if row.flush { number(&job["sync"]["lat_ns"]["mean"]) / 1e3 } else { 0.0 };
    Figures {
        iops,
        mean_us: if total > 0.0 { sum / total / 1e3 + flush_mean } else { 0.0 },
        p50_us: percentile("50.000000") + flush("50.000000"),
        p99_us: percentile("99.000000") + flush("99.000000"),
        p999_us: percentile("99.900000") + flush("99.900000"),
    }
}

/// Preallocates and writes a file, so that runs overwrite what exists.
pub fn fill_file(path: &Path, size_bytes: u64) -> Result<(), Failure> {
    let file = Endpoint::File(path.to_path_buf());
    run(&file, &pass(&file, "write", size_bytes)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_add_reads_and_writes_and_pair_a_write_with_its_flush() {
        let side = |iops: f64, ios: u64, mean: f64| {
            serde_json::json!({"iops": iops, "total_ios": ios, "lat_ns": {"mean": mean},
                "clat_ns": {"percentile": {"50.000000": mean, "99.000000": mean * 2.0, "99.900000": mean * 3.0}}})
        };
        let document = serde_json::json!({"jobs": [{"read": side(80.0, 800, 1e5), "write": side(20.0, 200, 3e5),
            "sync": {"lat_ns": {"mean": 5e5, "percentile": {"99.000000": 7e5}}}}]});
        let mixed = figures(&document, &ROWS[8]);
        assert_eq!((mixed.iops, mixed.mean_us, mixed.p99_us), (100.0, 140.0, 600.0));
        let mut flushed = ROWS[1];
        flushed.flush = true;
        assert_eq!(figures(&document, &flushed).mean_us, 640.0);
    }
}
