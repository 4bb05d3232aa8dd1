//! Runs the simulator by hand: one seed, a range of them, or new ones for a given time.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tidepool_sim::crowd::{Crowd, Seeds};

const USAGE: &str = "usage: tidepool-sim [--seed N | --seeds FROM..TO | --for WALL_SECONDS] [--seconds SIMULATED] [--jobs N] \
                     [--pair] [--summary FILE] [--verbose] [--mutations all|NAME]";

fn main() -> ExitCode {
    match options() {
        Ok(options) => simulate(&options),
        Err(what) => {
            eprintln!("tidepool-sim: {what}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

struct Options {
    seeds: std::ops::Range<u64>,
    wall: Option<Duration>,
    seconds: u64,
    jobs: usize,
    summary: Option<PathBuf>,
    verbose: bool,
    pair: bool,
    mutations: Option<String>,
}

fn options() -> Result<Options, String> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        seeds: 1..101,
        wall: None,
        seconds: 600,
        jobs,
        summary: None,
        verbose: false,
        pair: false,
        mutations: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number"));
        match arg.as_str() {
            "--seed" => {
                let seed = number(&value()?)?;
                options.seeds = seed..seed.checked_add(1).ok_or("that seed is too large")?;
            }
            "--seeds" => {
                let text = value()?;
                let (from, to) = text.split_once("..").ok_or(format!("{text:?} is not FROM..TO"))?;
                options.seeds = number(from)?..number(to)?;
            }
            "--for" => options.wall = Some(Duration::from_secs(number(&value()?)?)),
            "--seconds" => options.seconds = number(&value()?)?,
            "--jobs" => options.jobs = number(&value()?)?.clamp(1, 1024) as usize,
            "--summary" => options.summary = Some(value()?.into()),
            "--verbose" => options.verbose = true,
            "--pair" => options.pair = true,
            "--mutations" => options.mutations = Some(value()?),
            _ => return Err(format!("there is no option {arg:?}")),
        }
    }
    Ok(options)
}

/// Prints the table of the core's deliberate bugs, or of one of them.
#[cfg(feature = "mutations")]
fn hunt(name: &str, jobs: usize) -> ExitCode {
    use tidepool_engine::mutation::Mutation;
    use tidepool_sim::mutants::{hunt_all, table};
    let all = Mutation::ALL.iter().copied();
    let hunted = all.filter(|m| name == "all" || format!("{m:?}") == name).map(|m| (m, None));
    let hunted: Vec<_> = hunted.collect();
    if hunted.is_empty() {
        eprintln!("tidepool-sim: there is no deliberate bug {name:?}");
        return ExitCode::from(2);
    }
    let found = hunt_all(&hunted, jobs, &|mutation, caught| {
        eprintln!(
            "{mutation:?}: {}",
            caught.map_or("NOT NOTICED".into(), |c| format!("{} seeds: {}", c.seeds, c.what))
        );
    });
    print!("{}", table(&found));
    if found.iter().any(|(_, caught)| caught.is_none()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[cfg(not(feature = "mutations"))]
fn hunt(_name: &str, _jobs: usize) -> ExitCode {
    eprintln!("tidepool-sim: the deliberate bugs are there only with --features mutations");
    ExitCode::from(2)
}

fn simulate(options: &Options) -> ExitCode {
    if let Some(name) = &options.mutations {
        return hunt(name, options.jobs);
    }
    if options.verbose {
        let run = if options.pair { tidepool_sim::pair::run } else { tidepool_sim::run };
        let outcome = run(options.seeds.start, options.seconds, true);
        return match outcome.failure {
            Some(what) => {
                println!("{what}");
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        };
    }
    let seeds = match options.wall {
        Some(wall) => Seeds::new_until(Instant::now() + wall),
        None => Seeds::of(options.seeds.clone()),
    };
    let seconds = options.seconds;
    let mut crowd = if options.pair { Crowd::of_pairs(seconds) } else { Crowd::new(seconds) };
    crowd.run(&seeds, options.jobs, &|failure| println!("{failure}"));
    println!("{crowd}");
    if let Some(path) = &options.summary
        && let Err(error) = std::fs::write(path, crowd.to_string())
    {
        eprintln!("tidepool-sim: cannot write the summary to {}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    if crowd.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
