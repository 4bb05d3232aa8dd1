//! `rados bench` as load generator: each client is its own instance on its own objects.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::points::{self, Cut};
use super::{Client, Done, Filled, Kept, Load, LoadError, Objects, Span, Stop, Told};
use crate::results::WINDOWS;
use crate::suite::{Suite, Workload};
use crate::testbed::Entrance;
use tidepool_cluster::fio::{Measured, Pattern, Side};
use tidepool_cluster::process::Process;
use tidepool_cluster::scratch::Scratch;

/// Seconds that an instance runs beyond the window, so that its output covers the window.
const BEYOND_S: u32 = 1;
/// Time limit in seconds for instances that end when their objects are written or read.
const ENOUGH_S: u32 = 3_600;
/// Requests in flight while a measurement is prepared.
const PREPARING_DEPTH: u64 = 16;
/// Prefix of the names of all objects.
const PREFIX: &str = "benchmark_data";
/// A run name that no run has. With it, objects are found by their prefix, of all runs together.
const NO_RUN: &str = "lab-none";
/// Most objects that an instance may be told to write.
const OBJECTS_MAX: u64 = 1 << 30;

/// Instances of rados bench.
#[derive(Debug)]
pub(super) struct Instances {
    entrances: Vec<Entrance>,
    pattern: Pattern,
    depth: u32,
    object_bytes: u64,
    /// Objects of each client that exist before a measurement.
    objects: u64,
    /// Most objects that each client may write, so that the disks do not get full.
    objects_max: u64,
    /// Seconds that an instance runs.
    seconds: u32,
}

impl Instances {
    pub(super) fn new(
        suite: &Suite,
        workload: &Workload,
        depth: u32,
        entrances: Vec<Entrance>,
    ) -> Instances {
        let each =
            |bytes: u64| bytes / (entrances.len() as u64).max(1) / workload.block_bytes.max(1);
        let room = suite.objects_bytes_max().saturating_sub(workload.set_bytes);
        Instances {
            pattern: workload.job(depth).pattern,
            depth,
            object_bytes: workload.block_bytes,
            objects: each(workload.set_bytes),
            objects_max: each(room).clamp(1, OBJECTS_MAX),
            seconds: suite.ramp_s + suite.seconds + BEYOND_S,
            entrances,
        }
    }

    /// The arguments of a client that is measured.
    fn words(&self, client: u32) -> Vec<String> {
        let depth = u64::from(self.depth);
        match self.pattern {
            Pattern::Read => bench(self.seconds, "seq", depth, client),
            Pattern::RandRead => bench(self.seconds, "rand", depth, client),
            _ => self.write(self.seconds, depth, self.objects_max, client),
        }
    }

    /// The arguments for writing at most this number of objects, which remain.
    fn write(&self, seconds: u32, depth: u64, objects: u64, client: u32) -> Vec<String> {
        let mut words = bench(seconds, "write", depth, client);
        words.extend(["-b".into(), self.object_bytes.to_string()]);
        words.extend(["--max-objects".into(), objects.to_string(), "--no-cleanup".into()]);
        words
    }

    /// Runs `rados` for each of these clients to its end, side by side. Returns the outputs.
    fn run(
        &self,
        clients: &[u32],
        words: &dyn Fn(u32) -> Vec<String>,
        stop: Stop<'_>,
    ) -> Result<Vec<String>, LoadError> {
        let scratch = Scratch::new("objects").map_err(LoadError::Place)?;
        let start = |&client: &u32| {
            let entrance = &self.entrances[client as usize];
            Running::start(entrance, &words(client), scratch.path(), client)
        };
        let started = clients.iter().map(start).collect::<Result<Vec<Running>, LoadError>>()?;
        started.into_iter().map(|running| running.finish(stop)).collect()
    }
}

/// The arguments of a benchmark. Objects of a client are found again by the name of its run.
fn bench(seconds: u32, mode: &str, depth: u64, client: u32) -> Vec<String> {
    let seconds = seconds.to_string();
    let mut words: Vec<String> = ["-p", "rbd", "bench", &seconds, mode].map(String::from).into();
    words.extend(["-t".into(), depth.to_string(), "--run-name".into(), format!("lab-{client}")]);
    words.push("--show-time".into());
    words
}

/// The arguments that remove the objects of all benchmarks, including those that were killed.
fn clean_up() -> Vec<String> {
    ["-p", "rbd", "cleanup", "--prefix", PREFIX, "--run-name", NO_RUN].map(String::from).into()
}

fn command_line(entrance: &Entrance, words: &[String]) -> String {
    format!("CEPH_CONF={} rados {}", entrance.conf.display(), words.join(" "))
}

impl Load for Instances {
    fn clients(&self) -> u32 {
        self.entrances.len() as u32
    }

    fn set_bytes(&self) -> u64 {
        self.objects * self.object_bytes
    }

    fn command(&self, client: u32) -> String {
        command_line(&self.entrances[client as usize], &self.words(client))
    }

    fn fill(&self, objects: &mut Objects, stop: Stop<'_>) -> Result<Filled, LoadError> {
        let clients: Vec<u32> = (0..self.clients()).collect();
        let wanted = match self.objects {
            0 => Kept::default(),
            objects => Kept { clients: self.clients(), objects, object_bytes: self.object_bytes },
        };
        let bytes = self.set_bytes() * u64::from(self.clients());
        let found = objects.known.take();
        let mut filled = Filled { bytes, anew: false };
        if found != Some(wanted) {
            filled.anew = true;
            if found != Some(Kept::default()) {
                self.run(&[0], &|_| clean_up(), stop)?;
            }
            if self.objects > 0 {
                let depth = self.objects.min(PREPARING_DEPTH);
                let words = |client| self.write(ENOUGH_S, depth, self.objects, client);
                let said = self.run(&clients, &words, stop)?;
                let written =
                    said.iter().filter_map(|said| points::read(said)).map(|said| said.finished);
                filled.bytes = written.sum::<u64>() * self.object_bytes;
            }
        }
        // A measurement that writes leaves an unknown number of objects.
        objects.known = (!self.pattern.writes()).then_some(wanted);
        Ok(filled)
    }

    fn pass(&self, client: u32, stop: Stop<'_>) -> Result<(), LoadError> {
        if self.objects == 0 {
            return Ok(());
        }
        let depth = self.objects.min(PREPARING_DEPTH);
        self.run(&[client], &|client| bench(ENOUGH_S, "seq", depth, client), stop).map(drop)
    }

    /// Objects have no guests that could flush.
    fn flush(&self, _: Stop<'_>) -> Result<(), LoadError> {
        Ok(())
    }

    fn start(&self, client: u32, directory: &Path) -> Result<Box<dyn Client>, LoadError> {
        let entrance = &self.entrances[client as usize];
        let running = Running::start(entrance, &self.words(client), directory, client)?;
        let (writes, object_bytes) = (self.pattern.writes(), self.object_bytes);
        Ok(Box::new(Instance { running, writes, object_bytes }))
    }
}

/// A running `rados`, which is killed when this is dropped.
#[derive(Debug)]
struct Running {
    process: Process,
    command: String,
    /// Files of its output and its errors.
    files: [PathBuf; 2],
}

impl Running {
    /// Starts it. Its output goes to files in `directory` named after its client.
    fn start(
        entrance: &Entrance,
        words: &[String],
        directory: &Path,
        client: u32,
    ) -> Result<Running, LoadError> {
        let files = ["said", "errors"].map(|kind| directory.join(format!("{client}.{kind}")));
        let mut command = Command::new("rados");
        command
            .args(words)
            .env("CEPH_CONF", &entrance.conf)
            .current_dir(directory)
            .stdin(Stdio::null());
        command.stdout(File::create(&files[0]).map_err(LoadError::Place)?);
        command.stderr(File::create(&files[1]).map_err(LoadError::Place)?);
        entrance.client.iter().for_each(|client| client.enter(&mut command));
        let process = Process::spawn(command).map_err(LoadError::NoRados)?;
        Ok(Running { process, command: command_line(entrance, words), files })
    }

    /// Its output so far.
    fn said(&self) -> String {
        fs::read_to_string(&self.files[0]).unwrap_or_default()
    }

    fn failed(&self, output: impl Into<String>) -> LoadError {
        LoadError::Failed { command: self.command.clone(), output: output.into() }
    }

    /// Waits for its end and returns its output.
    fn finish(mut self, stop: Stop<'_>) -> Result<String, LoadError> {
        let status = self.process.wait_unless(stop).map_err(LoadError::NoRados)?;
        let status = status.map_err(|why| self.failed(why))?;
        if status.success() {
            return Ok(self.said());
        }
        let errors = fs::read_to_string(&self.files[1]).unwrap_or_default();
        let last = errors.lines().rfind(|line| !line.trim().is_empty());
        Err(self.failed(last.map_or_else(|| status.to_string(), str::to_string)))
    }
}

/// An instance of rados bench that is measured.
#[derive(Debug)]
struct Instance {
    running: Running,
    writes: bool,
    object_bytes: u64,
}

impl Client for Instance {
    fn begun(&self) -> Option<Instant> {
        let since_s = unix_s(SystemTime::now())? - points::begin_s(&self.running.said())?;
        Instant::now().checked_sub(Duration::try_from_secs_f64(since_s.max(0.0)).ok()?)
    }

    fn has_ended(&mut self) -> bool {
        self.running.process.try_wait().map_or(true, |status| status.is_some())
    }

    fn finish(self: Box<Self>, span: Span, stop: Stop<'_>) -> Result<Done, LoadError> {
        let Instance { running, writes, object_bytes } = *self;
        let command = running.command.clone();
        let unclear =
            |what: &str| LoadError::Failed { command: command.clone(), output: what.into() };
        let said = running.finish(stop)?;
        let said = points::read(&said).ok_or_else(|| unclear("what it says is not understood"))?;
        let now = unix_s(SystemTime::now()).ok_or_else(|| unclear("the clock is before 1970"))?;
        let at_s = |then: Instant| now - then.elapsed().as_secs_f64();
        let (begin_s, end_s) = (at_s(span.begin), at_s(span.end));
        let cut = said.cut(begin_s, end_s).ok_or_else(|| {
            unclear("it did nothing after its ramp: too slow, or nothing left to read, or no room to write")
        })?;
        let sides = |cut: &Cut| if writes { [0.0, cut.per_s()] } else { [cut.per_s(), 0.0] };
        let parts = said.parts(begin_s, end_s, WINDOWS);
        let seconds = said.seconds(begin_s, end_s);
        let told = Told {
            bytes_per_s: seconds.iter().map(|cut| cut.per_s() * object_bytes as f64).collect(),
            max_us: said.max_s * 1e6,
            min_us: said.min_s * 1e6,
        };
        let measured = match writes {
            true => Measured { writes: side(cut), ..Measured::default() },
            false => Measured { reads: side(cut), ..Measured::default() },
        };
        let rates = parts.map(|parts| parts.iter().map(sides).collect());
        Ok(Done { measured, rates, told: Some(told), report: None })
    }
}

/// Requests without a histogram, which rados bench does not report.
fn side(cut: Cut) -> Side {
    let ios = cut.finished.round();
    Side {
        ios: ios as u64,
        iops: cut.per_s(),
        total_ns: cut.total_s / cut.finished * ios * 1e9,
        ..Side::default()
    }
}

fn unix_s(time: SystemTime) -> Option<f64> {
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instances(workload: &str, clients: usize) -> Instances {
        let suite = Suite::find("rados-bench").expect("built in");
        let entrance = Entrance { conf: "/c".into(), client: None };
        let workload = suite.workload(workload).expect("a workload");
        Instances::new(&suite, workload, 16, vec![entrance; clients])
    }

    #[test]
    fn a_command_is_the_one_that_was_published_with_a_time_and_a_name_for_each_instance() {
        let suite = Suite::find("rados-bench").expect("built in");
        let seconds = suite.seconds + suite.ramp_s + BEYOND_S;
        let write = instances("4m-write", 2);
        let most = suite.objects_bytes_max() / 2 / (4 << 20);
        assert_eq!(
            write.command(1),
            format!(
                "CEPH_CONF=/c rados -p rbd bench {seconds} write -t 16 --run-name lab-1 --show-time -b 4194304 --max-objects {most} --no-cleanup"
            )
        );
        let read = instances("4m-rand", 1);
        assert_eq!(
            read.command(0),
            format!(
                "CEPH_CONF=/c rados -p rbd bench {seconds} rand -t 16 --run-name lab-0 --show-time"
            )
        );
        assert!(instances("4m-seq", 1).command(0).contains(" seq "));
    }

    #[test]
    fn objects_are_shared_out_and_what_is_there_leaves_less_room() {
        let suite = Suite::find("rados-bench").expect("built in");
        let set = suite.workload("4m-rand").expect("a workload").set_bytes;
        let (one, two) = (instances("4m-rand", 1), instances("4m-rand", 2));
        assert_eq!((one.set_bytes(), two.set_bytes() * 2), (set, set));
        let again = suite.workload("4m-write-again").expect("a workload");
        let (first, second) = (instances("4m-write", 1), instances("4m-write-again", 1));
        assert_eq!(first.objects, 0);
        assert_eq!((first.objects_max - second.objects_max) * (4 << 20), again.set_bytes);
    }

    #[test]
    fn a_set_that_is_there_is_written_once_and_nobody_knows_what_a_write_leaves() {
        let reads = instances("4m-rand", 1);
        let wanted = Kept { clients: 1, objects: reads.objects, object_bytes: 4 << 20 };
        let mut pool = Objects { known: Some(wanted) };
        let filled = reads
            .fill(&mut pool, &|| Some("nothing is to be started".into()))
            .expect("it is there");
        assert_eq!((filled.bytes, filled.anew), (reads.set_bytes(), false));
        assert_eq!(pool.known, Some(wanted));
        let mut empty = Objects::none();
        let writes = instances("4m-write", 1);
        let filled = writes
            .fill(&mut empty, &|| Some("nothing is to be started".into()))
            .expect("it is empty");
        assert_eq!((filled.bytes, filled.anew, empty.known), (0, false, None));
    }
}
