//! Runs the simulator by hand: one seed, a range of them, new ones for a given time, or a recorded
//! life; and compares what the cores of two builds do.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tidepool_sim::baseline::{Baseline, SETS};
use tidepool_sim::crowd::{Crowd, Seeds};
use tidepool_sim::recording::{Recording, headline};
use tidepool_sim::trace::Trace;
use tidepool_sim::{Kind, Life};

const USAGE: &str = "usage: tidepool-sim [--seed N | --seeds FROM..TO | --hours N] [--seconds SIMULATED] [--jobs N] [--pair] \
                     [--summary FILE] [--failures DIRECTORY] [--draws FILE] [--replay FILE] [--choose-seeds DIRECTORY] \
                     [--record FILE] [--compare FILE] [--trace FILE] \
                     [--verbose] [--mutations all|NAME [--table FILE] [--seeds FROM..TO]]";

/// Lives after which a soak must have reached everything.
const LIVES_ENOUGH: u64 = 3000;
/// Longest soak.
const HOURS_MAX: f64 = 10_000.0;
/// Simulated seconds of the lives of chosen seeds.
const CHOSEN: [(Kind, u64, &str); 2] =
    [(Kind::OneHost, 6, "one-host.txt"), (Kind::TwoHosts, 4, "two-hosts.txt")];

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(what) => {
            eprintln!("tidepool-sim: {what}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let done = if let Some(name) = &options.mutations {
        hunt(name, &options)
    } else if let Some(directory) = &options.choose {
        choose(directory)
    } else if let Some(path) = &options.replay {
        replay(path, options.verbose)
    } else if let Some(path) = &options.draws {
        draws(&options.life(), path)
    } else if let Some(path) = &options.trace {
        trace(&options.life(), path)
    } else if let Some(path) = &options.record {
        record(&options, path)
    } else if let Some(path) = &options.compare {
        compare(&options, path)
    } else if options.verbose {
        Ok(told(options.life().run(true).failure.as_deref()))
    } else {
        simulate(&options)
    };
    done.unwrap_or_else(|what| {
        eprintln!("tidepool-sim: {what}");
        ExitCode::from(2)
    })
}

struct Options {
    seeds: Option<std::ops::Range<u64>>,
    wall: Option<Duration>,
    seconds: u64,
    jobs: usize,
    summary: Option<PathBuf>,
    failures: Option<PathBuf>,
    draws: Option<PathBuf>,
    record: Option<PathBuf>,
    compare: Option<PathBuf>,
    trace: Option<PathBuf>,
    replay: Option<PathBuf>,
    choose: Option<PathBuf>,
    verbose: bool,
    kind: Kind,
    mutations: Option<String>,
    table: Option<PathBuf>,
}

impl Options {
    /// The life of the first seed.
    fn life(&self) -> Life {
        Life { kind: self.kind, seed: self.seeds().start, seconds: self.seconds }
    }

    fn seeds(&self) -> std::ops::Range<u64> {
        self.seeds.clone().unwrap_or(1..101)
    }

    /// The seeds to which the sets of a baseline are limited.
    fn seeds_of_sets(&self) -> std::ops::Range<u64> {
        self.seeds.clone().unwrap_or(0..u64::MAX)
    }
}

fn options() -> Result<Options, String> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        seeds: None,
        wall: None,
        seconds: 600,
        jobs,
        summary: None,
        failures: None,
        draws: None,
        record: None,
        compare: None,
        trace: None,
        replay: None,
        choose: None,
        verbose: false,
        kind: Kind::OneHost,
        mutations: None,
        table: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number"));
        match arg.as_str() {
            "--seed" => {
                let seed = number(&value()?)?;
                options.seeds = Some(seed..seed.checked_add(1).ok_or("that seed is too large")?);
            }
            "--seeds" => {
                let text = value()?;
                let (from, to) =
                    text.split_once("..").ok_or(format!("{text:?} is not FROM..TO"))?;
                options.seeds = Some(number(from)?..number(to)?);
            }
            "--hours" => {
                let text = value()?;
                let hours =
                    text.parse::<f64>().ok().filter(|hours| *hours > 0.0 && *hours <= HOURS_MAX);
                let hours =
                    hours.ok_or(format!("{text:?} is not a number of hours, such as 8 or 0.05"))?;
                options.wall = Some(Duration::from_secs_f64(hours * 3600.0));
            }
            "--seconds" => options.seconds = number(&value()?)?,
            "--jobs" => options.jobs = number(&value()?)?.clamp(1, 1024) as usize,
            "--summary" => options.summary = Some(value()?.into()),
            "--failures" => options.failures = Some(value()?.into()),
            "--draws" => options.draws = Some(value()?.into()),
            "--record" => options.record = Some(value()?.into()),
            "--compare" => options.compare = Some(value()?.into()),
            "--trace" => options.trace = Some(value()?.into()),
            "--replay" => options.replay = Some(value()?.into()),
            "--choose-seeds" => options.choose = Some(value()?.into()),
            "--verbose" => options.verbose = true,
            "--pair" => options.kind = Kind::TwoHosts,
            "--mutations" => options.mutations = Some(value()?),
            "--table" => options.table = Some(value()?.into()),
            _ => return Err(format!("there is no option {arg:?}")),
        }
    }
    Ok(options)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Prints what went wrong, if anything did.
fn told(failure: Option<&str>) -> ExitCode {
    match failure {
        Some(what) => {
            println!("{what}");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

/// Hunts the core's deliberate bugs, or one of them, and prints their table.
#[cfg(feature = "mutations")]
fn hunt(name: &str, options: &Options) -> Result<ExitCode, String> {
    use tidepool_engine::mutation::Mutation;
    use tidepool_sim::mutants::{SEEDS, hunt_all, known, table};
    let known = options
        .table
        .as_deref()
        .map(read)
        .transpose()?
        .map(|text| known(&text))
        .unwrap_or_default();
    let named = |mutation: &Mutation| name == "all" || format!("{mutation:?}") == name;
    let seed = |mutation: Mutation| known.get(&format!("{mutation:?}")).copied().flatten();
    let all = Mutation::ALL.iter().copied();
    let hunted: Vec<_> = all.filter(named).map(|mutation| (mutation, seed(mutation))).collect();
    if hunted.is_empty() {
        return Err(format!("there is no deliberate bug {name:?}"));
    }
    let seeds = options.seeds.clone().unwrap_or(SEEDS);
    let found = hunt_all(&hunted, &seeds, options.jobs, &|mutation, caught| {
        let what = caught.map_or("NOT NOTICED".into(), |caught| {
            format!("seed {}: {}", caught.seed, caught.what)
        });
        eprintln!("{mutation:?}: {what}");
    });
    print!("{}", table(&found));
    let all_noticed = found.iter().all(|(_, caught)| caught.is_some());
    Ok(if all_noticed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(not(feature = "mutations"))]
fn hunt(_name: &str, _options: &Options) -> Result<ExitCode, String> {
    Err("the deliberate bugs are there only with --features mutations".into())
}

/// Chooses the seeds that the tests run, and writes them down.
fn choose(directory: &Path) -> Result<ExitCode, String> {
    for (kind, seconds, file) in CHOSEN {
        let mut crowd = Crowd::new(kind, seconds);
        let (seeds, missing) = crowd.choose();
        if !missing.is_empty() {
            return Err(format!("no seed of {} reaches {missing:?}", crowd.runs()));
        }
        let mut text =
            "# Seeds whose lives reach everything together. `make seeds` chooses them anew.\n"
                .to_owned();
        seeds.iter().for_each(|seed| text.push_str(&format!("{seed}\n")));
        let path = directory.join(file);
        write(&path, &text)?;
        println!("{} of {} seeds are in {}", seeds.len(), crowd.runs(), path.display());
        if !crowd.failed().is_empty() {
            return Err(format!("these seeds failed: {:?}; live one with --seed", crowd.failed()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn draws(life: &Life, path: &Path) -> Result<ExitCode, String> {
    let (outcome, recording) = Recording::of(*life);
    write(path, &recording.to_string())?;
    Ok(told(outcome.failure.as_deref()))
}

/// Writes down what the cores of a life do, a line for each effect.
fn trace(life: &Life, path: &Path) -> Result<ExitCode, String> {
    let outcome = life.trace(Trace::told());
    write(path, &outcome.text.unwrap_or_default())?;
    Ok(told(outcome.failure.as_deref()))
}

/// Writes down the hashes of the lives with which other builds are compared, or of those with the
/// given seeds.
fn record(options: &Options, path: &Path) -> Result<ExitCode, String> {
    let sets = SETS.map(|set| set.within(&options.seeds_of_sets()));
    let baseline = Baseline::of(&sets, options.jobs)?;
    write(path, &baseline.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Compares this build with the one that has written a baseline. Only a move succeeds.
fn compare(options: &Options, path: &Path) -> Result<ExitCode, String> {
    let was =
        Baseline::parse(&read(path)?).map_err(|what| format!("{}: {what}", path.display()))?;
    let sets = was.sets_within(&options.seeds_of_sets());
    let comparison = was.compare(&Baseline::of(&sets, options.jobs)?);
    println!("{comparison}");
    Ok(if comparison.is_move() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn replay(path: &Path, verbose: bool) -> Result<ExitCode, String> {
    let recording =
        Recording::parse(&read(path)?).map_err(|what| format!("{}: {what}", path.display()))?;
    if !recording.failure.is_empty() {
        println!("what went wrong when it was recorded: {}", recording.failure);
    }
    Ok(told(recording.replay(verbose).failure.as_deref()))
}

/// Records a life that failed, for the time when its seed means something else; returns the line
/// that says where.
fn kept(directory: &Path, life: &Life) -> Result<String, String> {
    std::fs::create_dir_all(directory)
        .map_err(|error| format!("cannot make {}: {error}", directory.display()))?;
    let path = directory.join(format!("{}-{}.txt", life.kind.name(), life.seed));
    let (outcome, recording) = Recording::of(*life);
    write(&path, &recording.to_string())?;
    let what = outcome.failure.map_or("it did not fail again".into(), |text| headline(&text, life));
    Ok(format!("recorded: tidepool-sim --replay {} ({what})", path.display()))
}

fn simulate(options: &Options) -> Result<ExitCode, String> {
    let seeds = match options.wall {
        Some(wall) => Seeds::new_until(Instant::now() + wall),
        None => Seeds::range(options.seeds()),
    };
    let mut crowd = Crowd::new(options.kind, options.seconds);
    crowd.run(&seeds, options.jobs, &|life, failure| {
        println!("{failure}");
        if let Some(directory) = &options.failures {
            println!(
                "{}",
                kept(directory, &life).unwrap_or_else(|what| format!("not recorded: {what}"))
            );
        }
    });
    println!("{crowd}");
    if let Some(path) = &options.summary {
        write(path, &crowd.to_string())?;
    }
    let missing = crowd.missing();
    if options.wall.is_some() && crowd.runs() >= LIVES_ENOUGH && !missing.is_empty() {
        println!("{} lives say nothing about {missing:?}", crowd.runs());
        return Ok(ExitCode::FAILURE);
    }
    Ok(if crowd.failed().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
