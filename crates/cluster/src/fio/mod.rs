//! Runs fio and reads its figures.

mod histogram;
mod report;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::network::Namespace;
use crate::process::Process;
use crate::vm::{self, Vm, VmError};

pub use histogram::{Measured, Side};
pub use report::without_bins;

/// Name of every job.
const JOB: &str = "bench";
/// Bytes of the write before a flush. fio does not flush if it has not written.
const FLUSHED_BYTES: u64 = 4096;
/// Command that fio runs just before a job begins. fio writes the command's output to a file in its
/// working directory, see [`Running::begun`].
const PRERUN: &str = "--exec_prerun=date +%s%N";

/// Lines of the rate log in each part.
const LINES: usize = 10;
/// A log line may cover up to this many times its nominal interval.
const LATE: f64 = 1.1;

/// The target of fio's requests.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// A file, bypassing the page cache.
    File(PathBuf),
    /// An export of an NBD server on a Unix socket.
    Nbd {
        /// Path of the socket.
        socket: PathBuf,
        /// Name of the export.
        export: String,
    },
    /// An image of the pool `rbd`, through librbd.
    Rbd {
        /// Path of the cluster's ceph.conf.
        conf: PathBuf,
        /// Name of the image.
        image: String,
        /// The client's network namespace, if the cluster has its own network.
        client: Option<Namespace>,
    },
    /// A disk of a guest in which fio runs.
    Guest {
        /// The guest.
        vm: Arc<Vm>,
        /// Name of the disk in the guest.
        disk: String,
        /// How the guest's page cache handles fio's requests.
        page_cache: PageCache,
    },
}

/// How a page cache handles requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageCache {
    /// Requests bypass the page cache.
    Past,
    /// Requests go through the page cache, and a flush writes back what it holds.
    Through,
    /// Requests go through the page cache, and fio sends no flush after a write.
    Unsafe,
}

impl Endpoint {
    /// Whether fio is to leave out the flush after a write.
    fn drops_flushes(&self) -> bool {
        matches!(self, Endpoint::Guest { page_cache: PageCache::Unsafe, .. })
    }

    /// An image of a cluster on the loopback interface.
    pub fn rbd(conf: impl Into<PathBuf>, image: impl Into<String>) -> Endpoint {
        Endpoint::Rbd { conf: conf.into(), image: image.into(), client: None }
    }
}

/// Order and kind of a job's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Random reads and writes, with this percentage of reads.
    RandMixed(u8),
}

impl Pattern {
    /// Whether it writes.
    pub fn writes(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::RandRead)
    }

    /// Whether it reads.
    pub fn reads(self) -> bool {
        !matches!(self, Pattern::Write | Pattern::RandWrite)
    }

    /// Whether offsets are random.
    pub fn is_random(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::Write)
    }

    /// fio's name for the pattern.
    fn rw(self) -> &'static str {
        match self {
            Pattern::Read => "read",
            Pattern::Write => "write",
            Pattern::RandRead => "randread",
            Pattern::RandWrite => "randwrite",
            Pattern::RandMixed(_) => "randrw",
        }
    }
}

/// When a write counts as complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sync {
    /// When the write is answered.
    #[default]
    None,
    /// When a flush after the write is answered (`--fsync=1`).
    Flush,
    /// When the write is answered, on a file opened with O_DSYNC (`--sync=dsync`).
    Dsync,
}

/// A load with a constant number of requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Order and kind of requests.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests in flight of each thread.
    pub depth: u32,
    /// Threads with this load, side by side (fio's `--numjobs` with `--thread`).
    pub jobs: u32,
    /// When a write counts as complete.
    pub sync: Sync,
}

impl Job {
    /// A job of one thread, without flushes.
    pub const fn new(pattern: Pattern, block_bytes: u64, depth: u32) -> Job {
        Job { pattern, block_bytes, depth, jobs: 1, sync: Sync::None }
    }

    /// The job with another rule for when a write is complete.
    pub const fn with(self, sync: Sync) -> Job {
        Job { sync, ..self }
    }
}

/// Why fio gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum FioError {
    /// fio cannot be run, in most cases because it is not installed.
    #[error("cannot run fio: {0}; on Debian: apt-get install fio")]
    NotRun(std::io::Error),
    /// fio failed.
    #[error("`{command}` failed: {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The last line of fio's error output.
        output: String,
    },
    /// The guest in which fio runs, or was to run, has failed.
    #[error(transparent)]
    Guest(#[from] VmError),
}

/// Figures of one run. Latencies are those of a request, or of a write with the flush after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Figures {
    /// Completed reads and writes per second; flushes do not count.
    pub iops: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// Median latency in microseconds. Absent, like the two percentiles below, if the load
    /// generator reports no percentiles, or for a mix of reads and writes with flushes
    /// ([`Measured::figures`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile of the latency, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the latency, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_us: Option<f64>,
}

impl Figures {
    /// The figures of the same device made faster by `factor`.
    pub fn faster(self, factor: f64) -> Figures {
        let faster = |us: f64| us / factor;
        Figures {
            iops: self.iops * factor,
            mean_us: faster(self.mean_us),
            p50_us: self.p50_us.map(faster),
            p99_us: self.p99_us.map(faster),
            p999_us: self.p999_us.map(faster),
        }
    }
}

/// Arguments of every run.
fn common(size_bytes: u64) -> Vec<String> {
    vec![
        format!("--name={JOB}"),
        "--output-format=json+".into(),
        "--thread=1".into(),
        "--randrepeat=0".into(),
        "--norandommap=1".into(),
        "--random_generator=tausworthe64".into(),
        "--refill_buffers=1".into(),
        format!("--size={size_bytes}"),
    ]
}

/// Arguments that name the target.
fn endpoint(endpoint: &Endpoint) -> Vec<String> {
    match endpoint {
        Endpoint::File(path) => {
            vec![
                "--ioengine=io_uring".into(),
                "--direct=1".into(),
                format!("--filename={}", path.display()),
            ]
        }
        Endpoint::Nbd { socket, export } => {
            vec![
                "--ioengine=nbd".into(),
                format!("--uri=nbd+unix:///{export}?socket={}", socket.display()),
            ]
        }
        Endpoint::Rbd { image, .. } => {
            vec![
                // With --direct=1 fio would turn librbd's cache off. Without it, ceph.conf decides
                // whether the cache is on.
                "--ioengine=rbd".into(),
                "--clientname=admin".into(),
                "--pool=rbd".into(),
                format!("--rbdname={image}"),
            ]
        }
        Endpoint::Guest { disk, page_cache, .. } => {
            let direct = u8::from(*page_cache == PageCache::Past);
            vec![
                "--ioengine=io_uring".into(),
                format!("--direct={direct}"),
                format!("--filename={disk}"),
            ]
        }
    }
}

/// Arguments of a timed run over the first `size_bytes` of the target.
pub fn arguments(
    target: &Endpoint,
    job: &Job,
    size_bytes: u64,
    ramp_s: u32,
    seconds: u32,
) -> Vec<String> {
    let mut words = common(size_bytes);
    words.extend(endpoint(target));
    words.extend([
        format!("--rw={}", job.pattern.rw()),
        format!("--bs={}", job.block_bytes),
        format!("--iodepth={}", job.depth),
        format!("--numjobs={}", job.jobs),
        "--group_reporting=1".into(),
        "--time_based=1".into(),
        format!("--runtime={seconds}"),
    ]);
    if job.jobs > 1 {
        // Each thread gets its own part of the range. Several threads that write to one place would
        // be a single write for a device with a cache.
        let part = size_bytes / u64::from(job.jobs) / job.block_bytes * job.block_bytes;
        words.retain(|word| !word.starts_with("--size="));
        words.extend([format!("--size={part}"), format!("--offset_increment={part}")]);
    }
    if ramp_s > 0 {
        words.push(format!("--ramp_time={ramp_s}"));
    }
    if let Pattern::RandMixed(read_percent) = job.pattern {
        words.push(format!("--rwmixread={read_percent}"));
    }
    match job.sync {
        Sync::Flush if !target.drops_flushes() => words.push("--fsync=1".into()),
        Sync::None | Sync::Flush => {}
        Sync::Dsync => words.push("--sync=dsync".into()),
    }
    words
}

/// An operation done once on all of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The range is read.
    Read,
    /// The range is written.
    Write,
    /// The range is written, and a flush follows.
    WriteAndFlush,
}

/// Arguments of one pass over the first `size_bytes` of an image, in large requests.
pub fn pass(target: &Endpoint, pass: Pass, size_bytes: u64) -> Vec<String> {
    let mut words = common(size_bytes);
    words.extend(endpoint(target));
    let rw = if pass == Pass::Read { "read" } else { "write" };
    words.extend([format!("--rw={rw}"), "--bs=256k".into(), "--iodepth=16".into()]);
    if pass == Pass::WriteAndFlush {
        words.push("--end_fsync=1".into());
    }
    words
}

/// Arguments of one write at the beginning and a flush after it, as a guest sends when it mounts.
/// Only the write, if the endpoint leaves flushes out.
pub fn flush(target: &Endpoint) -> Vec<String> {
    let mut words = common(FLUSHED_BYTES);
    words.extend(endpoint(target));
    words.extend([
        "--rw=write".into(),
        format!("--bs={FLUSHED_BYTES}"),
        "--iodepth=1".into(),
        "--number_ios=1".into(),
    ]);
    if !target.drops_flushes() {
        words.push("--end_fsync=1".into());
    }
    words
}

/// Arguments of `reads` random reads. Every run reads the same offsets in the same order.
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

/// The shell line that repeats a run.
pub fn command_line(target: &Endpoint, words: &[String]) -> String {
    let environment = match target {
        Endpoint::Rbd { conf, .. } => format!("CEPH_CONF={} ", conf.display()),
        Endpoint::Guest { .. } => return format!("in a guest: fio {}", words.join(" ")),
        _ => String::new(),
    };
    format!("{environment}fio {}", words.join(" "))
}

/// Runs fio to its end and returns its report.
///
/// # Errors
/// If fio fails.
pub fn run(target: &Endpoint, words: &[String]) -> Result<Value, FioError> {
    let mut reports = run_reports(target, words)?;
    Ok(reports.pop().expect("there is at least one"))
}

/// Runs fio to its end and returns all its reports, at least one. With `--status-interval` there
/// are several.
///
/// # Errors
/// If fio fails.
pub fn run_reports(target: &Endpoint, words: &[String]) -> Result<Vec<Value>, FioError> {
    Running::start(target, words)?.finish(&|| None)
}

/// A running fio. fio is killed when this is dropped, and also when this process ends, because fio
/// overwrites a device.
#[derive(Debug)]
pub struct Running {
    at: Place,
    command: String,
    /// Directory in which fio records its rates and when it began; `None` if it was started without
    /// one.
    directory: Option<PathBuf>,
    /// Whether it was told to end.
    interrupted: bool,
}

/// Where fio runs.
#[derive(Debug)]
enum Place {
    /// On this machine; the readers collect its output and its errors.
    Here { process: Process, output: [JoinHandle<String>; 2] },
    /// In a guest.
    Guest(vm::Job),
}

impl Running {
    /// Starts fio.
    ///
    /// # Errors
    /// If fio, or the guest in which it is to run, cannot be started.
    pub fn start(target: &Endpoint, words: &[String]) -> Result<Running, FioError> {
        Running::spawn(target, words, None)
    }

    /// Starts fio with a record of when it begins ([`Running::begun`]) in `directory`, which no
    /// other run may use.
    ///
    /// # Errors
    /// If fio, or the guest in which it is to run, cannot be started.
    pub fn start_timed(
        target: &Endpoint,
        words: &[String],
        directory: PathBuf,
    ) -> Result<Running, FioError> {
        Running::spawn(target, words, Some(directory))
    }

    fn spawn(
        target: &Endpoint,
        words: &[String],
        directory: Option<PathBuf>,
    ) -> Result<Running, FioError> {
        let at = match target {
            Endpoint::Guest { vm, .. } => Place::guest(vm, words, directory.is_some())?,
            _ => Place::here(target, words, directory.as_deref())?,
        };
        Ok(Running { at, command: command_line(target, words), directory, interrupted: false })
    }

    /// When its job began, which is when its ramp began. `None` until then, or if fio was not
    /// started by [`Running::start_timed`].
    pub fn begun(&self) -> Option<Instant> {
        if let Place::Guest(job) = &self.at {
            return job.begun();
        }
        let said =
            std::fs::read_to_string(self.directory.as_ref()?.join(format!("{JOB}.prerun.txt")))
                .ok()?;
        // A number that is not completely written yet is not followed by a newline.
        let ns = said.strip_suffix('\n')?.parse().ok()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(ns)).ok()?;
        Instant::now().checked_sub(since)
    }

    /// The directory of [`Running::start_timed`], with the log of rates and the record of when fio
    /// began.
    pub fn directory(&self) -> Option<PathBuf> {
        self.directory.clone()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        match &self.at {
            // The process is not reaped here. Until it is waited for, no other process has its id,
            // so a signal reaches no other process.
            Place::Here { process, .. } => process.ended().map_or(true, |how| how.is_some()),
            Place::Guest(job) => job.has_ended(),
        }
    }

    /// Process id of fio, or of the guest that fio runs in.
    pub fn id(&self) -> u32 {
        match &self.at {
            Place::Here { process, .. } => process.id(),
            Place::Guest(job) => job.guest_id(),
        }
    }

    /// Ends fio now, as Ctrl-C would. Its report covers the time until then.
    ///
    /// # Errors
    /// If the signal cannot be sent.
    pub fn interrupt(&mut self) -> Result<(), FioError> {
        self.interrupted = true;
        match &self.at {
            Place::Here { process, .. } => {
                process.signal(rustix::process::Signal::INT).map_err(FioError::NotRun)
            }
            Place::Guest(job) => Ok(job.interrupt()?),
        }
    }

    /// Waits for its end and returns its reports, at least one. `stop` is called repeatedly. If it
    /// returns a reason, fio is killed.
    ///
    /// # Errors
    /// If fio fails or is stopped.
    pub fn finish(self, stop: &dyn Fn() -> Option<String>) -> Result<Vec<Value>, FioError> {
        let failed = |output: String| FioError::Failed { command: self.command.clone(), output };
        let (success, text, errors) = match self.at {
            Place::Here { mut process, output } => {
                let status = process.wait_unless(stop).map_err(FioError::NotRun)?;
                let status = status.map_err(failed)?;
                let [text, errors] = output.map(|reader| reader.join().unwrap_or_default());
                (status.success(), text, errors)
            }
            Place::Guest(job) => {
                let ended = job.finish(self.directory.as_deref(), stop)?.map_err(failed)?;
                (ended.status == 0, ended.output, ended.errors)
            }
        };
        // Engines print notes before the report.
        let start = text.find('{').unwrap_or(text.len());
        let reports = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let reports: Vec<Value> = reports.map_while(Result::ok).collect();
        let good = |report: &Value| report["jobs"][0]["error"] == 0;
        // An interrupted fio exits with a status of its own.
        if (success || self.interrupted) && reports.last().is_some_and(good) {
            return Ok(reports);
        }
        Err(failed(errors.lines().last().unwrap_or_default().to_string()))
    }
}

impl Place {
    /// Starts fio on this machine.
    fn here(
        target: &Endpoint,
        words: &[String],
        directory: Option<&Path>,
    ) -> Result<Place, FioError> {
        let mut command = Command::new("fio");
        command.args(words).stdin(Stdio::null());
        match directory {
            Some(directory) => command.arg(PRERUN).current_dir(directory),
            None => command.current_dir(crate::scratch::parent()),
        };
        if let Endpoint::Rbd { conf, client, .. } = target {
            command.env("CEPH_CONF", conf);
            client.iter().for_each(|client| client.enter(&mut command));
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::spawn(command).map_err(FioError::NotRun)?;
        let child = process.child();
        let output = child.stdout.take().expect("its output is piped");
        let errors = child.stderr.take().expect("its errors are piped");
        let output = [std::thread::spawn(|| text(output)), std::thread::spawn(|| text(errors))];
        Ok(Place::Here { process, output })
    }

    /// Starts fio in a guest. If `timed` is set, fio records when it begins.
    fn guest(vm: &Arc<Vm>, words: &[String], timed: bool) -> Result<Place, FioError> {
        let mut all = vec!["fio".to_string()];
        all.extend(words.iter().cloned());
        if timed {
            all.push(format!("--exec_prerun={}", vm::BEGUN_PATH));
        }
        Ok(Place::Guest(vm::Job::start(vm, &all)?))
    }
}

/// Arguments with which a run of `seconds` logs its rates for `count` equal parts; see [`rates`].
pub fn parts(seconds: u32, count: usize) -> [String; 2] {
    let line_ms = line_ms(f64::from(seconds) * 1e3, count);
    [format!("--write_iops_log={JOB}"), format!("--log_avg_msec={line_ms}")]
}

/// Nominal milliseconds of one line of the rate log.
fn line_ms(run_ms: f64, count: usize) -> f64 {
    (run_ms / (count * LINES) as f64).ceil()
}

/// Requests per second of reads and of writes in each of `count` equal parts of a run of `seconds`
/// without its ramp, in order, from the directory in which it ran. `None` if the run did not log
/// its rates ([`parts`]), or if a run that is not `time_based` ended earlier.
pub fn rates(
    directory: &Path,
    seconds: u32,
    count: usize,
    time_based: bool,
) -> Option<Vec<[f64; 2]>> {
    let log = std::fs::read_to_string(directory.join(format!("{JOB}_iops.1.log"))).ok()?;
    read_rates(&log, f64::from(seconds) * 1e3, count, time_based)
}

/// Reads fio's rate log of a run of `run_ms`. Each line holds milliseconds since the ramp, requests
/// per second in the interval of the line, 0 for reads or 1 for writes, and more. There is no line
/// for an interval without requests. The last line may be missing. The first line may come just
/// after the ramp.
fn read_rates(log: &str, run_ms: f64, count: usize, time_based: bool) -> Option<Vec<[f64; 2]>> {
    let lines = log.lines().map(|line| {
        let mut fields = line.split(',').map(str::trim);
        let (ms, rate, side) = (fields.next()?, fields.next()?, fields.next()?);
        Some((
            ms.parse::<f64>().ok()?,
            rate.parse::<f64>().ok()?,
            side.parse::<usize>().ok().filter(|side| *side < 2)?,
        ))
    });
    let lines: Vec<(f64, f64, usize)> = lines.collect::<Option<_>>()?;
    let (line_ms, part_ms) = (line_ms(run_ms, count), run_ms / count as f64);
    let last_ms = lines.iter().map(|(ms, ..)| *ms).fold(0.0, f64::max);
    if lines.is_empty() || !time_based && last_ms < run_ms - part_ms / 2.0 {
        return None;
    }
    // A gap of more than two intervals at the end is a time without requests. In a shorter gap the
    // last line may just be missing, so that the rate there is not known.
    let known_ms = if last_ms < run_ms - 2.0 * line_ms { run_ms } else { last_ms.min(run_ms) };
    let mut parts = vec![[0.0; 2]; count];
    let mut told_ms = [0.0; 2];
    for (ms, rate, side) in lines {
        let begin_ms = f64::max(told_ms[side], ms - line_ms * LATE);
        told_ms[side] = f64::max(told_ms[side], ms);
        for (at, part) in parts.iter_mut().enumerate() {
            let (from, to) = (at as f64 * part_ms, ((at + 1) as f64 * part_ms).min(known_ms));
            part[side] += rate * (ms.min(to) - begin_ms.max(from)).max(0.0) / (to - from);
        }
    }
    Some(parts)
}

/// Reads a pipe to its end.
fn text(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The figures of a timed run.
pub fn figures(document: &Value, job: &Job) -> Figures {
    Measured::read(document).figures(job.sync == Sync::Flush)
}

/// Writes and flushes a file of `size_bytes`, so that runs overwrite existing data.
pub fn fill_file(path: &Path, size_bytes: u64) -> Result<(), FioError> {
    let file = Endpoint::File(path.to_path_buf());
    run(&file, &pass(&file, Pass::WriteAndFlush, size_bytes)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_parts_and_none_where_one_is_missing() {
        // Three parts of a second. The last part has only writes, and no line at its end.
        let line =
            |at: usize, side: usize, rate: u32| format!("{}, {rate}, {side}, 0, 0\n", at * 100);
        let reads = (1..=20).map(|at| line(at, 0, if at <= 10 { 800 } else { 700 }));
        let log: String =
            reads.chain((1..=29).map(|at| line(at, 1, if at <= 20 { 200 } else { 10 }))).collect();
        let parts = |log: &str, ms, count| {
            let parts = read_rates(log, ms, count, false)?;
            Some(parts.into_iter().map(|part| part.map(f64::round)).collect::<Vec<_>>())
        };
        let wanted = vec![[800.0, 200.0], [700.0, 200.0], [0.0, 10.0]];
        assert_eq!(parts(&log, 3e3, 3), Some(wanted.clone()));
        assert_eq!(parts(&log, 5e3, 5), None, "it has ended before");
        let silent =
            read_rates(&log, 5e3, 5, true).expect("it has not ended, but completed nothing");
        assert_eq!(silent[4], [0.0; 2]);
        let early = format!("3, 5000, 0, 0, 0\n{log}");
        let found = parts(&early, 3e3, 3).expect("a line just after the ramp");
        assert!((found[0][0] - 800.0).abs() < 20.0, "{found:?}");
        let late = log.replace("000, ", "004, ");
        let found = parts(&late, 3e3, 3).expect("lines that come when they like");
        assert!(
            (found[1][0] - 700.0).abs() < 10.0 && (found[2][1] - 10.0).abs() < 5.0,
            "{found:?}"
        );
        for bad in ["", "999, 1, 2, 0\n", "999, x, 0, 0\n", "a\n", "0, 1, 0\n"] {
            assert_eq!(parts(bad, 1e3, 1), None, "{bad:?}");
        }
    }
}
