//! Long rounds in which the cache is destroyed under load: `make lost`. Ends at the first broken promise.

use std::process::ExitCode;

use clap::Parser;
use tidepool_testkit::{Cluster, ClusterOptions, rng};
use tidepool_tests::lost::{Round, round};

/// Destroys the cache of a volume under load again and again, recovers the image and compares it with the volume's past.
#[derive(Debug, Parser)]
struct Options {
    /// Rounds.
    #[arg(long, default_value_t = 30)]
    rounds: u64,
    /// The first round's seed; the others follow.
    #[arg(long)]
    seed: Option<u64>,
    /// On a file instead of an image of a throw-away Ceph cluster.
    #[arg(long)]
    file: bool,
}

fn main() -> ExitCode {
    match rounds(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn rounds(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let seed = options.seed.unwrap_or_else(|| rng::seed(u64::from(std::process::id())));
    let cluster = if options.file { None } else { Some(Cluster::up(&ClusterOptions::default())?) };
    let (mut worst, mut told) = (0.0f64, 0.0f64);
    for n in 0..options.rounds {
        let done @ Round { groups, lost, seconds } = round(cluster.as_ref(), seed.wrapping_add(n))?;
        eprintln!(
            "round {n}: {groups} groups brought in; {} changes, {} bytes, {:.1} s lost, told were {:.1} s",
            lost.changes, lost.bytes, seconds.0, seconds.1
        );
        (worst, told) = (worst.max(done.seconds.0), told.max(done.seconds.1));
    }
    println!(
        "{} rounds: every image was an exact state; at most {worst:.1} s were lost, at most {told:.1} s told",
        options.rounds
    );
    Ok(())
}
