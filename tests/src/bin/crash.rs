//! Long rounds of `kill -9` under load: `make crash`. Ends at the first lost or stale sector.

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use tidepool_cluster::{Cluster, ClusterOptions};
use tidepool_testkit::stamps::WorkloadOptions;
use tidepool_testkit::{Error, rng};
use tidepool_tests::crash::{Aim, Crasher, Tally};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

/// Kills the daemon again and again under load and checks every sector after each restart.
#[derive(Debug, Parser)]
struct Options {
    /// Rounds; what the kills are aimed at changes from round to round.
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// Reproduces the sequence of requests.
    #[arg(long)]
    seed: Option<u64>,
    /// What is behind the volume; `rbd` brings a throw-away Ceph cluster up.
    #[arg(long, value_enum, default_value = "file")]
    backend: Backend,
    /// Aim at this only.
    #[arg(long, value_enum)]
    aim: Option<Aim>,
    /// Size of the volume in MiB.
    #[arg(long, default_value_t = 384)]
    volume_mib: u64,
    /// Size of the cache in MiB; less than the volume, so that segments are reclaimed.
    #[arg(long, default_value_t = 256)]
    cache_mib: u64,
    /// Leave logs, cache and image in place.
    #[arg(long)]
    keep: bool,
}

/// What is behind the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// A file.
    File,
    /// An RBD image.
    Rbd,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match rounds(&options) {
        Ok(tally) => {
            println!("nothing was lost, nothing was stale: {tally}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// All rounds.
fn rounds(options: &Options) -> Result<Tally, Box<dyn std::error::Error>> {
    let seed = options.seed.unwrap_or_else(|| rng::seed(u64::from(std::process::id())));
    let size_bytes = options.volume_mib * MIB;
    let cluster = match options.backend {
        Backend::File => None,
        Backend::Rbd => Some(Cluster::up(&ClusterOptions::default())?),
    };
    let mut rig = match &cluster {
        None => Rig::with_file(size_bytes, options.cache_mib * MIB)?,
        Some(cluster) => {
            cluster.rbd_create(VOLUME, size_bytes)?;
            let uri = format!("rbd:rbd/{VOLUME}?conf={}", cluster.conf().display());
            let volumes = vec![(VOLUME.to_string(), uri)];
            let mut rig = Rig::new(&RigOptions {
                cache_bytes: options.cache_mib * MIB,
                volumes,
                extra: Vec::new(),
            })?;
            rig.daemon.start()?;
            rig
        }
    };
    if options.keep {
        rig.scratch.keep();
        println!("files are in {}", rig.scratch.path().display());
    }
    let mut crasher = Crasher::new(rig, WorkloadOptions::new(seed, size_bytes))?;
    for round in 0..options.rounds {
        let aim = options.aim.unwrap_or(Aim::ALL[round as usize % Aim::ALL.len()]);
        crasher
            .round(aim)
            .map_err(|error| format!("round {round}, seed {seed}, aim {aim:?}: {error}"))?;
        if (round + 1) % 10 == 0 {
            println!("{}", crasher.tally());
        }
    }
    let (rig, mut workload, tally) = crasher.finish()?;
    match &cluster {
        None => rig.verify_plain(&mut workload, &rig.image())?,
        Some(cluster) => rig.verify_export(cluster, VOLUME, &mut workload)?,
    }
    Ok::<_, Error>(tally).map_err(Into::into)
}
