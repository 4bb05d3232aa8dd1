//! Runs the simulator by hand: one seed, or a range of them.

use std::process::ExitCode;
use tidepool_sim::coverage::Coverage;
use tidepool_sim::run;

const USAGE: &str = "usage: tidepool-sim [--seed N | --seeds FROM..TO] [--seconds N] [--verbose]";

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
    seconds: u64,
    verbose: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options { seeds: 1..101, seconds: 600, verbose: false };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number"));
        match arg.as_str() {
            "--seed" => {
                let seed = number(&value()?)?;
                options.seeds = seed..seed + 1;
            }
            "--seeds" => {
                let text = value()?;
                let (from, to) = text.split_once("..").ok_or(format!("{text:?} is not FROM..TO"))?;
                options.seeds = number(from)?..number(to)?;
            }
            "--seconds" => options.seconds = number(&value()?)?,
            "--verbose" => options.verbose = true,
            _ => return Err(format!("there is no option {arg:?}")),
        }
    }
    Ok(options)
}

fn simulate(options: &Options) -> ExitCode {
    let mut cover = Coverage::default();
    let (mut steps, mut seconds, mut failed) = (0, 0, Vec::new());
    for seed in options.seeds.clone() {
        let outcome = run(seed, options.seconds, options.verbose);
        cover.merge(&outcome.coverage);
        steps += outcome.steps;
        seconds += outcome.elapsed_ns / 1_000_000_000;
        if let Some(what) = outcome.failure {
            failed.push(seed);
            println!("{what}  replay: tidepool-sim --seed {seed} --seconds {}", options.seconds);
        }
    }
    println!("{cover}");
    let runs = options.seeds.end.saturating_sub(options.seeds.start);
    println!("{runs} seeds, {steps} events, {seconds} simulated seconds, failed: {failed:?}");
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
