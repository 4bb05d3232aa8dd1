//! `tidepool demo`: what a host-side cache does for a VM on network storage, in about a minute.
//!
//! The daemon is this very program, run as a child with a cache file and the volumes; the load
//! comes over its NBD socket. "Direct" is the same load on the same backend without the daemon. The
//! emulated pools are `file:` backends with the latency model of `tidepool_backend` (its parameters
//! are documented there); with `--ceph` the backend is a real image on a throw-away cluster.

mod load;

use crate::cli::DemoArgs;
use crate::output;
use comfy_table::Cell;
use indicatif::{ProgressBar, ProgressStyle};
use load::{Direct, Load, Measured, Nbd, sweep};
use serde::Serialize;
use std::io::{BufRead, BufReader, IsTerminal};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tidepool_backend::{BackendUri, OpenOptions, Release};
use tidepool_cluster::{Cluster, ClusterOptions, Process, Scratch, Store};
use tidepool_daemon::failure::Failure;
use tidepool_nbd::NbdUri;
use tidepool_nbd::client::BlockingClient;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Size of each image in bytes; the load covers all of it.
const IMAGE_BYTES: u64 = 128 << 20;
/// Size of the cache in bytes: everything fits, and so it says nothing about caches that are too
/// small.
const CACHE_BYTES: u64 = 768 << 20;
/// Requests in flight in the mixed load.
const DEPTH: usize = 16;
/// Shortest time of one measurement.
const MEASURE_MIN: Duration = Duration::from_millis(300);
/// How long the daemon may take to get ready or to stop.
const DAEMON_LIMIT: Duration = Duration::from_secs(60);

/// One pool of the demo.
struct Pool {
    /// Name of the volume.
    name: &'static str,
    /// For people.
    title: &'static str,
    uri: BackendUri,
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Row {
    pool: &'static str,
    workload: &'static str,
    path: &'static str,
    iops: f64,
    latency_mean_us: f64,
    latency_p99_us: f64,
    latency_p999_us: f64,
    /// Against the direct path of the same pool and workload.
    ratio: f64,
}

/// The whole result.
#[derive(Debug, Serialize)]
struct Report {
    emulated: bool,
    version: &'static str,
    image_bytes: u64,
    cache_bytes: u64,
    queue_depth: usize,
    /// How the cached figures are protected.
    durability: &'static str,
    rows: Vec<Row>,
}

const MIXED: &str = "4K random 80/20";
const COMMITS: &str = "4K write + flush";
const DURABILITY: &str =
    "write-back, single copy (--accept-loss 10s): losing this SSD can lose that much";

/// How often a demo is looked at that was not interrupted so far.
const POLL: Duration = Duration::from_millis(50);
/// How long what an interrupted demo has started may take to let go of its files.
const LEFTOVERS_LIMIT: Duration = Duration::from_secs(10);

/// Runs the command: the demo itself is a child, so that an interrupt can end it in whatever it
/// does and then remove all that it made.
pub fn run(args: &DemoArgs) -> Result<(), Failure> {
    if args.inner {
        return measure(args);
    }
    let failed = |e: std::io::Error| Failure::failed(format!("cannot run the demo: {e}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).arg("--inner").stdin(Stdio::null());
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let (mut process, ended) = runtime
        .block_on(async {
            let mut interrupts = Interrupts::new()?;
            let mut process = Process::spawn(command)?;
            loop {
                tokio::select! {
                    () = interrupts.wait() => return Ok((process, None)),
                    () = tokio::time::sleep(POLL) => {
                        if let Some(status) = process.try_wait()? {
                            return Ok((process, Some(status)));
                        }
                    }
                }
            }
        })
        .map_err(failed)?;
    if let Some(status) = ended.and_then(|status| status.code()) {
        // What went wrong it has said.
        return if status == 0 { Ok(()) } else { std::process::exit(status) };
    }
    process.kill().map_err(failed)?;
    remove_leftovers(process.id());
    // A key on a terminal interrupts the child, too, and perhaps earlier.
    let asked = |signal: &i32| Interrupts::KINDS.iter().any(|kind| kind.as_raw_value() == *signal);
    match ended.and_then(|status| status.signal()).filter(|signal| !asked(signal)) {
        None => Err(Failure::failed("interrupted")),
        Some(signal) => Err(Failure::failed(format!("the demo was ended by signal {signal}"))),
    }
}

/// The signals that ask for the end.
struct Interrupts([Signal; 3]);

impl Interrupts {
    const KINDS: [SignalKind; 3] =
        [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];

    fn new() -> std::io::Result<Interrupts> {
        let [interrupt, terminate, hangup] = Interrupts::KINDS.map(signal);
        Ok(Interrupts([interrupt?, terminate?, hangup?]))
    }

    async fn wait(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Removes what a killed demo leaves. What it had started ends with it, but not in the same
/// instant.
fn remove_leftovers(id: u32) {
    let start = Instant::now();
    let parent = tidepool_cluster::scratch::parent();
    loop {
        // Making a directory removes those of processes that have ended.
        let Ok(scratch) = Scratch::new_in(&parent, "end") else { return };
        let base = scratch.path().parent().unwrap_or(&parent);
        let of_demo = |name: &str| name.contains(&format!("-{id}-"));
        let left = std::fs::read_dir(base).is_ok_and(|mut entries| {
            entries
                .any(|entry| entry.is_ok_and(|entry| of_demo(&entry.file_name().to_string_lossy())))
        });
        if !left || start.elapsed() > LEFTOVERS_LIMIT {
            return;
        }
        std::thread::sleep(POLL);
    }
}

/// The demo itself.
fn measure(args: &DemoArgs) -> Result<(), Failure> {
    let cannot = |what: &str| format!("cannot {what} for the demo");
    let parent = tidepool_cluster::scratch::parent();
    let scratch = Scratch::new_in(&parent, "demo").map_err(|e| {
        Failure::failed(format!("{} under {}: {e}", cannot("make a directory"), parent.display()))
    })?;
    let cluster = if args.ceph { Some(start_cluster()?) } else { None };
    let pools = match &cluster {
        Some(cluster) => ceph_pools(cluster)?,
        None => emulated_pools(scratch.path())?,
    };
    // Six measurements for each pool; filling and warming take about a sixth of the time.
    let each = Duration::from_secs_f64(args.seconds as f64 * 0.85 / (5 * pools.len()) as f64)
        .max(MEASURE_MIN);
    let demo = Demo { scratch: &scratch, each, bar: progress_bar(each * (5 * pools.len()) as u32) };
    let mut rows = Vec::new();
    for pool in &pools {
        let direct = demo.direct(pool)?;
        rows.extend(demo.cached(pool, direct)?);
    }
    demo.bar.finish_and_clear();
    let report = Report {
        emulated: !args.ceph,
        version: env!("CARGO_PKG_VERSION"),
        image_bytes: IMAGE_BYTES,
        cache_bytes: CACHE_BYTES,
        queue_depth: DEPTH,
        durability: DURABILITY,
        rows,
    };
    output::print(args.output.format, &report, table)
}

struct Demo<'a> {
    scratch: &'a Scratch,
    each: Duration,
    bar: ProgressBar,
}

impl Demo<'_> {
    /// Fills the image and measures it without a cache: mixed load, then commits.
    fn direct(&self, pool: &Pool) -> Result<[Measured; 2], Failure> {
        let opened = tidepool_backend::open(
            &pool.uri,
            OpenOptions { cache_uuid: [1; 16], ..OpenOptions::default() },
        )
        .map_err(Failure::failed)?;
        let mut target = Direct::new(opened.backend);
        self.say(pool, "filling the image");
        sweep(&mut target, IMAGE_BYTES, true, &|| ())?;
        self.say(pool, "direct, 80/20");
        let mix = self.timed(|tick| self.load(1).mixed(&mut target, DEPTH, tick))?;
        self.say(pool, "direct, write + flush");
        let commit = self.timed(|tick| self.load(2).commits(&mut target, tick))?;
        target
            .into_backend()
            .close(Release { clean: true, cache_failed: false })
            .map_err(Failure::failed)?;
        Ok([mix, commit])
    }

    /// Measures the same through the daemon, cold and warm.
    fn cached(&self, pool: &Pool, [mix, commit]: [Measured; 2]) -> Result<Vec<Row>, Failure> {
        self.say(pool, "starting the daemon");
        let daemon = Daemon::start(self.scratch.path(), pool)?;
        let mut target = Nbd::new(daemon.connect(pool)?);
        // A modern guest flushes: from the first flush on, writes need not wait for stable media.
        load::Target::flush(&mut target, 0)?;
        load::Target::wait(&mut target)?;
        self.say(pool, "cached and cold, 80/20");
        let cold = self.timed(|tick| self.load(3).mixed(&mut target, DEPTH, tick))?;
        self.say(pool, "warming");
        sweep(&mut target, IMAGE_BYTES, false, &|| ())?;
        std::thread::sleep(Duration::from_millis(100)); // The last admitted blocks are written in a batch.
        self.say(pool, "cached and warm, 80/20");
        let warm = self.timed(|tick| self.load(4).mixed(&mut target, DEPTH, tick))?;
        self.say(pool, "cached, write + flush");
        let cached = self.timed(|tick| self.load(5).commits(&mut target, tick))?;
        drop(target);
        daemon.stop()?;
        Ok(vec![
            row(pool, MIXED, "direct", &mix, &mix),
            row(pool, MIXED, "cached, cold", &cold, &mix),
            row(pool, MIXED, "cached, warm", &warm, &mix),
            row(pool, COMMITS, "direct", &commit, &commit),
            row(pool, COMMITS, "cached", &cached, &commit),
        ])
    }

    fn load(&self, seed: u64) -> Load {
        Load { bytes: IMAGE_BYTES, limit: self.each, seed }
    }

    fn say(&self, pool: &Pool, what: &str) {
        self.bar.set_message(format!("{}: {what}", pool.title));
    }

    /// Runs a measurement, moving the bar along with its time.
    fn timed(
        &self,
        measure: impl FnOnce(&dyn Fn()) -> Result<Measured, Failure>,
    ) -> Result<Measured, Failure> {
        let (start, from) = (Instant::now(), self.bar.position());
        let limit = self.each.as_millis() as u64;
        let result = measure(&|| {
            self.bar.set_position(from + (start.elapsed().as_millis() as u64).min(limit))
        });
        self.bar.set_position(from + limit);
        result
    }
}

/// The daemon, as a child.
struct Daemon {
    process: Process,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    fn start(dir: &Path, pool: &Pool) -> Result<Daemon, Failure> {
        let failed = |e: std::io::Error| {
            Failure::failed(format!("cannot start the daemon for the demo: {e}"))
        };
        let (socket, log) =
            (dir.join(format!("{}.sock", pool.name)), dir.join(format!("{}.log", pool.name)));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command
            .arg("serve")
            .arg("--cache")
            .arg(dir.join(format!("{}.cache", pool.name)))
            .args(["--cache-size", &CACHE_BYTES.to_string(), "--accept-loss", "10s"])
            .args(["--volume", &format!("{}={}", pool.name, pool.uri)])
            .args(["--nbd", &format!("nbd+unix:///?socket={}", socket.display())])
            .arg("--admin")
            .arg(dir.join(format!("{}.admin", pool.name)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).map_err(failed)?);
        let mut process = Process::spawn(command).map_err(failed)?;
        let stdout = process.child().stdout.take().expect("it is piped");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
        let daemon = Daemon { process, socket, log };
        if line.trim() == "ready" { Ok(daemon) } else { Err(daemon.broken("did not get ready")) }
    }

    fn connect(&self, pool: &Pool) -> Result<BlockingClient, Failure> {
        let uri = format!("nbd+unix:///{}?socket={}", pool.name, self.socket.display());
        let uri: NbdUri = uri.parse().map_err(Failure::failed)?;
        BlockingClient::connect(&uri).map_err(Failure::failed)
    }

    fn stop(mut self) -> Result<(), Failure> {
        let failed =
            |e: std::io::Error| Failure::failed(format!("cannot stop the demo's daemon: {e}"));
        self.process.signal(rustix::process::Signal::TERM).map_err(failed)?;
        match self.process.wait(DAEMON_LIMIT).map_err(failed)? {
            Some(status) if status.success() => Ok(()),
            _ => Err(self.broken("did not stop as it should")),
        }
    }

    /// What the daemon said last, as an error.
    fn broken(&self, what: &str) -> Failure {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last = log.lines().last().unwrap_or("it said nothing").to_owned();
        Failure::failed(format!("the demo's daemon {what}: {last}"))
    }
}

fn emulated_pools(dir: &Path) -> Result<Vec<Pool>, Failure> {
    [("hdd", "HDD-class pool", "hdd"), ("ssd", "SSD-class pool", "ssd")]
        .into_iter()
        .map(|(name, title, class)| {
            let path = dir.join(format!("{name}.img"));
            let make = std::fs::File::create(&path).and_then(|f| f.set_len(IMAGE_BYTES));
            make.map_err(|e| Failure::failed(format!("cannot make {}: {e}", path.display())))?;
            let uri = format!("file:{}?emulate={class}", path.display());
            Ok(Pool { name, title, uri: uri.parse().map_err(Failure::failed)? })
        })
        .collect()
}

fn start_cluster() -> Result<Cluster, Failure> {
    eprintln!("starting a throw-away Ceph cluster (one OSD) …");
    Cluster::up(&ClusterOptions { stores: vec![Store::File(4 << 30)], ..ClusterOptions::default() })
        .map_err(Failure::failed)
}

fn ceph_pools(cluster: &Cluster) -> Result<Vec<Pool>, Failure> {
    cluster.rbd_create("demo", IMAGE_BYTES).map_err(Failure::failed)?;
    let uri = format!("rbd:rbd/demo?conf={}", cluster.conf().display());
    Ok(vec![Pool {
        name: "ceph",
        title: "Ceph, one OSD",
        uri: uri.parse().map_err(Failure::failed)?,
    }])
}

fn row(
    pool: &Pool,
    workload: &'static str,
    path: &'static str,
    measured: &Measured,
    direct: &Measured,
) -> Row {
    let us = |ns: f64| ns / 1000.0;
    let quantile = |q| us(measured.latency_ns.value_at_quantile(q) as f64);
    Row {
        pool: pool.title,
        workload,
        path,
        iops: measured.iops(),
        latency_mean_us: us(measured.latency_ns.mean()),
        latency_p99_us: quantile(0.99),
        latency_p999_us: quantile(0.999),
        ratio: measured.iops() / direct.iops(),
    }
}

fn progress_bar(total: Duration) -> ProgressBar {
    let bar = ProgressBar::new(total.as_millis() as u64);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("[{bar:30}] {percent}% {msg}");
    bar.set_style(style.expect("the template is constant").progress_chars("=> "));
    bar
}

fn table(report: &Report) -> String {
    let columns = ["POOL", "WORKLOAD", "PATH", "IOPS", "MEAN", "P99", "P99.9", "RATIO"];
    let mut table = output::table(&columns, &[3, 4, 5, 6, 7]);
    for r in &report.rows {
        table.add_row(vec![
            Cell::new(r.pool),
            Cell::new(r.workload),
            Cell::new(r.path),
            Cell::new(format!("{:.0}", r.iops)),
            Cell::new(output::latency(r.latency_mean_us)),
            Cell::new(output::latency(r.latency_p99_us)),
            Cell::new(output::latency(r.latency_p999_us)),
            Cell::new(format!("{:.1}×", r.ratio)),
        ]);
    }
    let origin = if report.emulated {
        "EMULATED pools: files with the latency of a 12-device, 3-copy pool (docs/demo.md); relative order only."
    } else {
        "A real Ceph cluster, but all of it on this machine: relative order only."
    };
    format!(
        "{}\n{origin}\nThe mixed load has {} requests in flight on {} MiB, all of which fit the cache; write + flush has one.\nCached: {}.\n",
        output::render(&table),
        report.queue_depth,
        report.image_bytes >> 20,
        report.durability,
    )
}
