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

/// What every job is called.
const JOB: &str = "bench";
/// Bytes of the write before a flush: fio flushes nothing if it has not written.
const FLUSHED_BYTES: u64 = 4096;
/// What fio runs just before a job begins: the output goes to a file beside it.
const PRERUN: &str = "--exec_prerun=date +%s%N";

/// Lines of the log of rates in each part.
const LINES: usize = 10;
/// How much longer than meant the time may be that a line is for.
const LATE: f64 = 1.1;

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
        /// Where the client is, if the cluster has a network of its own.
        client: Option<Namespace>,
    },
    /// A disk of a guest, in which fio runs.
    Guest {
        /// The guest.
        vm: Arc<Vm>,
        /// The disk's name there.
        disk: String,
        /// What the guest's page cache does with its requests.
        page_cache: PageCache,
    },
}

/// What a page cache does with requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageCache {
    /// They go past it.
    Past,
    /// They go through it, and a flush has it write back what it keeps.
    Through,
    /// They go through it, and no flush is ever sent.
    Unsafe,
}

impl Endpoint {
    /// A flush after a write is dropped on its way.
    fn drops_flushes(&self) -> bool {
        matches!(self, Endpoint::Guest { page_cache: PageCache::Unsafe, .. })
    }

    /// An image of a cluster on the loopback interface.
    pub fn rbd(conf: impl Into<PathBuf>, image: impl Into<String>) -> Endpoint {
        Endpoint::Rbd { conf: conf.into(), image: image.into(), client: None }
    }
}

/// In which order a job goes where, and what it does there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Reads one place after the other.
    Read,
    /// Writes one place after the other.
    Write,
    /// Reads random places.
    RandRead,
    /// Writes random places.
    RandWrite,
    /// Both at random places, with this percentage of reads.
    RandMixed(u8),
}

impl Pattern {
    /// Something is written.
    pub fn writes(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::RandRead)
    }

    /// Something is read.
    pub fn reads(self) -> bool {
        !matches!(self, Pattern::Write | Pattern::RandWrite)
    }

    /// Places are random.
    pub fn is_random(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::Write)
    }

    /// fio's name of it.
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

/// When a write counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sync {
    /// When it is answered.
    #[default]
    None,
    /// When a flush after it is answered (`--fsync=1`).
    Flush,
    /// When it is answered, opened with O_DSYNC (`--sync=dsync`).
    Dsync,
}

/// What is measured: a constant number of requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Where requests go and what they do.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests in flight of each process.
    pub depth: u32,
    /// Processes that do it side by side.
    pub jobs: u32,
    /// When a write counts as done.
    pub sync: Sync,
}

impl Job {
    /// One process, no flushes.
    pub const fn new(pattern: Pattern, block_bytes: u64, depth: u32) -> Job {
        Job { pattern, block_bytes, depth, jobs: 1, sync: Sync::None }
    }

    /// The same with another idea of done.
    pub const fn with(self, sync: Sync) -> Job {
        Job { sync, ..self }
    }
}

/// Why fio gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum FioError {
    /// It is not there.
    #[error("cannot run fio: {0}; on Debian: apt-get install fio")]
    NotRun(std::io::Error),
    /// It failed.
    #[error("`{command}` failed: {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The last line of its error output.
        output: String,
    },
    /// The guest that it was to run in does not do what it is told.
    #[error(transparent)]
    Guest(#[from] VmError),
}

/// Figures of one run; latencies are those of a request, and with a flush after each write of the pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Figures {
    /// Reads and writes completed per second (not flushes).
    pub iops: f64,
    /// Mean latency.
    pub mean_us: f64,
    /// Median latency. None where the load generator tells no percentiles, as with the two that follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// 99.9th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_us: Option<f64>,
}

impl Figures {
    /// The figures of the same device `factor` times faster.
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

/// Arguments that every run has.
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

/// Arguments that name the endpoint.
fn endpoint(endpoint: &Endpoint) -> Vec<String> {
    match endpoint {
        Endpoint::File(path) => {
            vec!["--ioengine=io_uring".into(), "--direct=1".into(), format!("--filename={}", path.display())]
        }
        Endpoint::Nbd { socket, export } => {
            vec!["--ioengine=nbd".into(), format!("--uri=nbd+unix:///{export}?socket={}", socket.display())]
        }
        Endpoint::Rbd { image, .. } => {
            vec![
                // With --direct=1 fio turns librbd's cache off; whether it is on is for ceph.conf to say.
                "--ioengine=rbd".into(),
                "--clientname=admin".into(),
                "--pool=rbd".into(),
                format!("--rbdname={image}"),
            ]
        }
        Endpoint::Guest { disk, page_cache, .. } => {
            let direct = u8::from(*page_cache == PageCache::Past);
            vec!["--ioengine=io_uring".into(), format!("--direct={direct}"), format!("--filename={disk}")]
        }
    }
}

/// The arguments of a timed run over the first `size_bytes`.
pub fn arguments(target: &Endpoint, job: &Job, size_bytes: u64, ramp_s: u32, seconds: u32) -> Vec<String> {
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
        // Each has a part for itself: several at one place would be one write to a device with a cache.
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

/// What is done once with all of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// It is read.
    Read,
    /// It is written.
    Write,
    /// It is written, and a flush follows.
    WriteAndFlush,
}

/// The arguments of one pass over the first bytes of an image, in large requests.
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

/// The arguments of one write at the begin and a flush after it, as a guest sends when it mounts. Where flushes are dropped it is the
/// write alone.
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
        Endpoint::Guest { .. } => return format!("in a guest: fio {}", words.join(" ")),
        _ => String::new(),
    };
    format!("{environment}fio {}", words.join(" "))
}

/// Runs fio to its end and returns its report.
///
/// # Errors
/// When it fails.
pub fn run(target: &Endpoint, words: &[String]) -> Result<Value, FioError> {
    let mut reports = run_reports(target, words)?;
    Ok(reports.pop().expect("there is at least one"))
}

/// Runs fio to its end and returns all of its reports: with `--status-interval` there are several, of which there is at least one.
///
/// # Errors
/// When it fails.
pub fn run_reports(target: &Endpoint, words: &[String]) -> Result<Vec<Value>, FioError> {
    Running::start(target, words)?.finish(&|| None)
}

/// A fio that runs. Dropping it kills it, and when this process ends it ends too: it overwrites a device.
#[derive(Debug)]
pub struct Running {
    at: Place,
    command: String,
    /// Where it says when it begins, if it does.
    directory: Option<PathBuf>,
    /// It was told to end.
    interrupted: bool,
}

/// Where a fio runs.
#[derive(Debug)]
enum Place {
    /// On this machine, with what it prints and its errors.
    Here { process: Process, output: [JoinHandle<String>; 2] },
    /// In a guest.
    Guest(vm::Job),
}

impl Running {
    /// Starts fio.
    ///
    /// # Errors
    /// When it is not there.
    pub fn start(target: &Endpoint, words: &[String]) -> Result<Running, FioError> {
        Running::spawn(target, words, None)
    }

    /// Starts fio, which says when it begins ([`Running::begun`]) in `directory`, where nobody else is.
    ///
    /// # Errors
    /// When it is not there.
    pub fn start_timed(target: &Endpoint, words: &[String], directory: PathBuf) -> Result<Running, FioError> {
        Running::spawn(target, words, Some(directory))
    }

    fn spawn(target: &Endpoint, words: &[String], directory: Option<PathBuf>) -> Result<Running, FioError> {
        let at = match target {
            Endpoint::Guest { vm, .. } => Place::guest(vm, words, directory.is_some())?,
            _ => Place::here(target, words, directory.as_deref())?,
        };
        Ok(Running { at, command: command_line(target, words), directory, interrupted: false })
    }

    /// When its job has begun, which is when its ramp begins; `None` as long as it has not, or where it was not started to say so.
    pub fn begun(&self) -> Option<Instant> {
        if let Place::Guest(job) = &self.at {
            return job.begun();
        }
        let said =
            std::fs::read_to_string(self.directory.as_ref()?.join(format!("{JOB}.prerun.txt"))).ok()?;
        // Half a number has no end of a line.
        let ns = said.strip_suffix('\n')?.parse().ok()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(ns)).ok()?;
        Instant::now().checked_sub(since)
    }

    /// Where it writes down what it does, if it was started with such a place.
    pub fn directory(&self) -> Option<PathBuf> {
        self.directory.clone()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        match &self.at {
            // It is not reaped: until it is waited for its number is nobody else's, and a signal reaches no stranger.
            Place::Here { process, .. } => process.ended().map_or(true, |how| how.is_some()),
            Place::Guest(job) => job.has_ended(),
        }
    }

    /// The id of its process, or of the guest that it is in.
    pub fn id(&self) -> u32 {
        match &self.at {
            Place::Here { process, .. } => process.id(),
            Place::Guest(job) => job.guest_id(),
        }
    }

    /// Has it end now, as Ctrl-C would: its report then says what it did until then.
    ///
    /// # Errors
    /// When it cannot be told.
    pub fn interrupt(&mut self) -> Result<(), FioError> {
        self.interrupted = true;
        match &self.at {
            Place::Here { process, .. } => {
                process.signal(rustix::process::Signal::INT).map_err(FioError::NotRun)
            }
            Place::Guest(job) => Ok(job.interrupt()?),
        }
    }

    /// Waits for its end and returns its reports, of which there is at least one. `stop` is asked all the while; when it says why, fio is
    /// killed.
    ///
    /// # Errors
    /// When it fails or is stopped.
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
        // Engines print notes before the document.
        let start = text.find('{').unwrap_or(text.len());
        let reports = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let reports: Vec<Value> = reports.map_while(Result::ok).collect();
        let good = |report: &Value| report["jobs"][0]["error"] == 0;
        // Told to end, it does so with a status of its own.
        if (success || self.interrupted) && reports.last().is_some_and(good) {
            return Ok(reports);
        }
        Err(failed(errors.lines().last().unwrap_or_default().to_string()))
    }
}

impl Place {
    /// Starts fio on this machine.
    fn here(target: &Endpoint, words: &[String], directory: Option<&Path>) -> Result<Place, FioError> {
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

    /// Starts fio in a guest; it says when it begins if it is to be timed.
    fn guest(vm: &Arc<Vm>, words: &[String], timed: bool) -> Result<Place, FioError> {
        let mut all = vec!["fio".to_string()];
        all.extend(words.iter().cloned());
        if timed {
            all.push(format!("--exec_prerun={}", vm::BEGUN_PATH));
        }
        Ok(Place::Guest(vm::Job::start(vm, &all)?))
    }
}

/// The arguments with which a run of so many seconds writes down its rates; see [`rates`].
pub fn parts(seconds: u32, count: usize) -> [String; 2] {
    let line_ms = line_ms(f64::from(seconds) * 1e3, count);
    [format!("--write_iops_log={JOB}"), format!("--log_avg_msec={line_ms}")]
}

/// Milliseconds that a line of the log of rates is for.
fn line_ms(run_ms: f64, count: usize) -> f64 {
    (run_ms / (count * LINES) as f64).ceil()
}

/// Requests per second of reads and of writes in each of so many equal parts of a run of so many seconds without its ramp, in their order,
/// from the directory in which it ran; `None` where it was not asked for ([`parts`]), or where a run that is not `time_based` has ended before.
pub fn rates(directory: &Path, seconds: u32, count: usize, time_based: bool) -> Option<Vec<[f64; 2]>> {
    let log = std::fs::read_to_string(directory.join(format!("{JOB}_iops.1.log"))).ok()?;
    read_rates(&log, f64::from(seconds) * 1e3, count, time_based)
}

/// Reads fio's log of rates in a run of `run_ms`: on each line milliseconds since the ramp, requests per second in the time that the line is
/// for, 0 for reads or 1 for writes, and more. There is no line for a time without requests, the last one may be missing, and the first one
/// may come just after the ramp.
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
    // A line that is missing at the end, or a time without requests.
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

/// Everything that a pipe gives.
fn text(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The figures of a timed run.
pub fn figures(document: &Value, job: &Job) -> Figures {
    Measured::read(document).figures(job.sync == Sync::Flush)
}

/// Preallocates and writes a file, so that runs overwrite what exists.
pub fn fill_file(path: &Path, size_bytes: u64) -> Result<(), FioError> {
    let file = Endpoint::File(path.to_path_buf());
    run(&file, &pass(&file, Pass::WriteAndFlush, size_bytes)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_parts_and_none_where_one_is_missing() {
        // Three parts of a second, of which the last one has writes only, and no line at its end.
        let line = |at: usize, side: usize, rate: u32| format!("{}, {rate}, {side}, 0, 0\n", at * 100);
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
        let silent = read_rates(&log, 5e3, 5, true).expect("it has not ended, but completed nothing");
        assert_eq!(silent[4], [0.0; 2]);
        let early = format!("3, 5000, 0, 0, 0\n{log}");
        let found = parts(&early, 3e3, 3).expect("a line just after the ramp");
        assert!((found[0][0] - 800.0).abs() < 20.0, "{found:?}");
        let late = log.replace("000, ", "004, ");
        let found = parts(&late, 3e3, 3).expect("lines that come when they like");
        assert!((found[1][0] - 700.0).abs() < 10.0 && (found[2][1] - 10.0).abs() < 5.0, "{found:?}");
        for bad in ["", "999, 1, 2, 0\n", "999, x, 0, 0\n", "a\n", "0, 1, 0\n"] {
            assert_eq!(parts(bad, 1e3, 1), None, "{bad:?}");
        }
    }
}
