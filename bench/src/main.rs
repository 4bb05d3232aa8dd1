//! `make bench`: the raw device, an NBD server that does nothing, Tidepool, and the uncached image
//! through librbd, measured side by side by fio in one run.

mod drain;
mod latency;
mod neighbours;
mod report;
mod restart;
mod rows;
mod targets;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use report::{Point, Results};
use rows::{ROWS, Row};
use targets::{Target, Targets};
use tidepool_cluster::ClusterError;
use tidepool_cluster::{fio, machine};

/// Measures Tidepool beside the raw device, an empty NBD server and the uncached image.
#[derive(Debug, Parser)]
struct Options {
    /// A few seconds per run, one repeat, small sizes: to see that everything works.
    #[arg(long)]
    quick: bool,
    /// Repeats of every run: one number, or one for each of the lengths.
    #[arg(long, value_delimiter = ',')]
    repeats: Vec<u32>,
    /// Lengths of the runs in seconds; those of more than 30 s begin with as long a ramp as brings
    /// dirty data to its steady level.
    #[arg(long, value_delimiter = ',')]
    seconds: Vec<u32>,
    /// Only these targets.
    #[arg(long, value_delimiter = ',', value_parser = target)]
    targets: Vec<Target>,
    /// Only rows whose name contains this.
    #[arg(long)]
    row: Option<String>,
    /// Leave out the restart after a kill.
    #[arg(long)]
    no_restart: bool,
    /// Leave out what a client notices of the clients of another volume.
    #[arg(long)]
    no_neighbours: bool,
    /// Measure that alone, and put it into the report that is there.
    #[arg(long, conflicts_with = "no_neighbours")]
    only_neighbours: bool,
    /// Measure what a client notices of the drain, and put that into the report that is there.
    #[arg(long, conflicts_with_all = ["no_neighbours", "only_neighbours"])]
    only_drain: bool,
    /// Pairs of slices, the drain paused and not, of which that is made.
    #[arg(long, default_value_t = 20)]
    pairs: u32,
    /// Where the files of the measurement go; the cache, the raw file and the OSD share its disk.
    #[arg(long, default_value_os_t = tidepool_cluster::scratch::parent())]
    dir: PathBuf,
    /// Where the OSD's files go instead, a directory in memory for instance: with all on one disk
    /// its writes take from the cache's.
    #[arg(long)]
    osd_dir: Option<PathBuf>,
    /// Where the report goes; RESULTS.md and results.json are written there.
    #[arg(long, default_value = "bench")]
    out: PathBuf,
}

/// Sizes of what is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Sizes {
    /// Each image.
    image_bytes: u64,
    /// The cache.
    cache_bytes: u64,
    /// What reads and mixed workloads touch; fits into the cache.
    work_bytes: u64,
}

/// Why the benchmark ended early.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Something of the tests' machinery failed.
    #[error(transparent)]
    Kit(#[from] tidepool_testkit::Error),
    /// The cluster failed.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// fio gave no figures.
    #[error(transparent)]
    Fio(#[from] fio::FioError),
    /// A file could not be used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Runs longer than this reach a steady level of dirty data first.
const ABSORBING_SECONDS_MAX: u32 = 30;
/// How long such a run works before it is measured.
const RAMP_SECONDS: u32 = 30;

/// A target's name on the command line.
fn target(text: &str) -> Result<Target, String> {
    serde_json::from_value(serde_json::Value::String(text.into())).map_err(|_| {
        "use raw, null, tidepool, tidepool-unordered, tidepool-replicated or librbd".to_string()
    })
}

fn main() -> ExitCode {
    match bench(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Runs everything and writes the report.
fn bench(options: &Options) -> Result<(), Failure> {
    if options.only_neighbours {
        return only(options, |results| {
            results.neighbours = Some(neighbours(options)?);
            Ok(())
        });
    }
    if options.only_drain {
        return only(options, |results| {
            results.drain = Some(disturbance(options)?);
            Ok(())
        });
    }
    tidepool_testkit::need("fio", "fio")?;
    let sizes = match options.quick {
        true => Sizes { image_bytes: 1 << 30, cache_bytes: 2 << 30, work_bytes: 512 << 20 },
        false => Sizes { image_bytes: 8 << 30, cache_bytes: 6 << 30, work_bytes: 2 << 30 },
    };
    let lengths = match (&options.seconds[..], options.quick) {
        ([], true) => vec![3],
        ([], false) => vec![10, 60],
        (chosen, _) => chosen.to_vec(),
    };
    let wanted =
        if options.targets.is_empty() { Target::ALL.to_vec() } else { options.targets.clone() };
    let rows = ROWS
        .iter()
        .filter(|row| options.row.as_ref().is_none_or(|part| row.name.contains(part.as_str())));
    let rows: Vec<&Row> = rows.collect();
    let targets = Targets::start(
        &wanted,
        sizes,
        &options.dir,
        options.osd_dir.as_ref().unwrap_or(&options.dir),
    )?;
    // Which binary is measured, for the targets that are served by it.
    let tidepool =
        wanted.iter().any(|target| target.is_cached()).then(tidepool_testkit::daemon::tidepool);
    let tidepool = tidepool.transpose()?.unwrap_or(Path::new("tidepool"));
    let programs = [&*tidepool.to_string_lossy(), "fio", "nbdkit", "ceph", "rustc"];
    let mut results = Results {
        format: 1,
        machine: machine::look(&options.dir, &programs, machine::commit_here()),
        sizes,
        points: Vec::new(),
        restarts: Vec::new(),
        neighbours: None,
        drain: None,
    };
    for (at, &seconds) in lengths.iter().enumerate() {
        let repeats = options.repeats.get(at).or(options.repeats.last());
        for repeat in 1..=*repeats.unwrap_or(if options.quick { &1 } else { &3 }) {
            for row in &rows {
                // Every repeat begins with another target, so that what changes with time favours
                // none.
                let first = repeat as usize % wanted.len();
                for &target in wanted[first..].iter().chain(&wanted[..first]) {
                    let steady = seconds > ABSORBING_SECONDS_MAX;
                    let bare = matches!(target, Target::Raw | Target::Null);
                    if bare && (steady || row.job.block_bytes > 4096) {
                        // Nothing in them changes with the length of a run, and large requests only
                        // show the device.
                        continue;
                    }
                    let variant =
                        matches!(target, Target::TidepoolUnordered | Target::TidepoolReplicated);
                    if variant && (steady || !row.job.pattern.writes()) {
                        // A read meets neither drain nor peer, and a steady level is the image's
                        // speed with any of them.
                        continue;
                    }
                    let point = measure(&targets, row, target, sizes, seconds, repeat)?;
                    eprintln!(
                        "{:>3} s, repeat {repeat}: {:<26} {:<20} {:>9.0} IOPS, mean {:>8.0} µs, p99 {:>8.0} µs",
                        seconds,
                        row.name,
                        target.title(),
                        point.figures.iops,
                        point.figures.mean_us,
                        point.figures.p99_us.unwrap_or(f64::NAN)
                    );
                    results.points.push(point);
                    write(options, &results)?;
                }
            }
        }
    }
    if wanted.contains(&Target::Tidepool) && !options.no_restart {
        let cached_bytes = if options.quick { 512 << 20 } else { 4 << 30 };
        for conf in [None, Some(targets.restart_image(cached_bytes)?)] {
            eprintln!("restart after a kill with {} MiB cached", cached_bytes >> 20);
            results.restarts.push(restart::measure(conf, cached_bytes, &options.dir)?);
            write(options, &results)?;
        }
    }
    if wanted.contains(&Target::Tidepool) && !options.no_neighbours {
        results.neighbours = Some(neighbours(options)?);
        write(options, &results)?;
    }
    println!("{}", results.markdown());
    Ok(())
}

/// What a client notices of the clients of another volume.
fn neighbours(options: &Options) -> Result<neighbours::Neighbours, Failure> {
    let tidepool = tidepool_testkit::daemon::tidepool()?;
    let machine = machine::look(
        &options.dir,
        &[&*tidepool.to_string_lossy(), "rustc"],
        machine::commit_here(),
    );
    let (seconds, repeats) = if options.quick { (5, 1) } else { (10, 3) };
    let seconds = options.seconds.first().copied().unwrap_or(seconds);
    neighbours::measure(machine, (seconds, repeats), &options.dir)
}

/// What a client notices of the drain.
fn disturbance(options: &Options) -> Result<drain::Disturbance, Failure> {
    let tidepool = tidepool_testkit::daemon::tidepool()?;
    let programs = [&*tidepool.to_string_lossy(), "rustc"];
    let machine = machine::look(&options.dir, &programs, machine::commit_here());
    let seconds = options.seconds.first().copied().unwrap_or(if options.quick { 2 } else { 10 });
    drain::measure(machine, (seconds, options.pairs), &options.dir)
}

/// Measures something alone, and puts it into the report that is there.
fn only(
    options: &Options,
    measure: impl FnOnce(&mut Results) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let path = options.out.join("results.json");
    let read =
        std::fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice::<Results>(&bytes)?));
    let what = format!("cannot read the report {}", path.display());
    let mut results = read.map_err(|source| Failure::Io { what, source })?;
    measure(&mut results)?;
    write(options, &results)
}

/// One run.
fn measure(
    targets: &Targets,
    row: &Row,
    target: Target,
    sizes: Sizes,
    seconds: u32,
    repeat: u32,
) -> Result<Point, Failure> {
    let endpoint = targets.endpoint(target);
    let size_bytes = match (row.warm, target) {
        (true, _) | (_, Target::Raw) => sizes.work_bytes,
        _ => sizes.image_bytes,
    };
    if row.warm {
        targets.warm(target, sizes)?;
    }
    if seconds > ABSORBING_SECONDS_MAX && !row.warm {
        // A run of its own instead of fio's ramp, so that the dirty level at its end is known.
        fio::run(&endpoint, &fio::arguments(&endpoint, &row.job, size_bytes, 0, RAMP_SECONDS))?;
    }
    let words = fio::arguments(&endpoint, &row.job, size_bytes, 0, seconds);
    let dirty_before = targets.dirty_bytes(target)?;
    let reads_before = targets.hits_and_misses(target)?;
    let document = fio::run(&endpoint, &words)?;
    targets.check_copy(target)?;
    let dirty_after = targets.dirty_bytes(target)?;
    let reads_after = targets.hits_and_misses(target)?;
    let hit_ratio = reads_before.zip(reads_after).and_then(|(before, after)| {
        let (hits, misses) = (after.0 - before.0, after.1 - before.1);
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    });
    let drained = if !row.job.pattern.writes() { None } else { targets.settle(target)? };
    Ok(Point {
        row: row.name.into(),
        target,
        seconds,
        repeat,
        figures: fio::figures(&document, &row.job),
        dirty_bytes: dirty_before.zip(dirty_after),
        drain_seconds: drained.map(|time| time.as_secs_f64()),
        hit_ratio,
        command: fio::command_line(&endpoint, &words),
    })
}

/// Writes both forms of the report.
fn write(options: &Options, results: &Results) -> Result<(), Failure> {
    let put = |name: &str, text: String| {
        let path = options.out.join(name);
        let what = format!("cannot write {}", path.display());
        std::fs::write(path, text).map_err(|source| Failure::Io { what, source })
    };
    std::fs::create_dir_all(&options.out).map_err(|source| Failure::Io {
        what: format!("cannot make {}", options.out.display()),
        source,
    })?;
    put(
        "results.json",
        serde_json::to_string_pretty(results).expect("results are plain data") + "\n",
    )?;
    put("RESULTS.md", results.markdown())
}
