//! Long rounds in which the cache is destroyed under load: `make lost`. Ends at the first broken
//! promise.

use std::process::ExitCode;

use clap::Parser;
use tidepool_testkit::{Cluster, ClusterOptions, rng};
use tidepool_tests::lost::Failure;
use tidepool_tests::{disk, lost, lost_postgres};

/// Destroys the cache of a volume under load again and again, recovers the image and compares it
/// with the volume's past.
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
    /// With an ext4 and a PostgreSQL on the volume, as root, instead of stamps in every sector.
    #[arg(long)]
    postgres: bool,
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

fn rounds(options: &Options) -> Result<(), Failure> {
    if options.postgres {
        disk::possible()?;
        disk::in_own_namespace()?;
    }
    let seed = options.seed.unwrap_or_else(|| rng::seed(u64::from(std::process::id())));
    let cluster = if options.file { None } else { Some(Cluster::up(&ClusterOptions::default())?) };
    let (mut worst, mut told) = (0.0f64, 0.0f64);
    for n in 0..options.rounds {
        let seed = seed.wrapping_add(n);
        eprint!("round {n}, seed {seed}: ");
        let seconds = if options.postgres {
            postgres(cluster.as_ref(), seed)?
        } else {
            stamps(cluster.as_ref(), seed)?
        };
        (worst, told) = (worst.max(seconds.0), told.max(seconds.1));
    }
    println!(
        "{} rounds: every image was an exact state; at most {worst:.1} s were lost, at most {told:.1} s told",
        options.rounds
    );
    Ok(())
}

/// A round with stamps in every sector; the seconds that were lost and told.
fn stamps(cluster: Option<&Cluster>, seed: u64) -> Result<(f64, f64), Failure> {
    let lost::Round { groups, lost, seconds } = lost::round(cluster, seed)?;
    eprintln!(
        "{groups} groups brought in; {} changes, {} bytes, {:.1} s lost, told were {:.1} s",
        lost.changes, lost.bytes, seconds.0, seconds.1
    );
    Ok(seconds)
}

/// A round with a PostgreSQL; the seconds that were lost and told.
fn postgres(cluster: Option<&Cluster>, seed: u64) -> Result<(f64, f64), Failure> {
    let lost_postgres::Round { groups, transactions, files, seconds } =
        lost_postgres::round(cluster, seed)?;
    eprintln!(
        "{groups} groups brought in; {} of {} transactions, {} of {} files, {:.1} s lost, told were {:.1} s",
        transactions.1, transactions.0, files.1, files.0, seconds.0, seconds.1
    );
    Ok(seconds)
}
