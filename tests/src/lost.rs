//! Rounds in which the cache is destroyed under load and the image recovered without it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use tidepool_testkit::rng::Rng;
use tidepool_testkit::stamps::{Lost, WorkloadOptions};
use tidepool_testkit::{Cluster, Error, daemon};

use crate::rig::{MIB, Rig, RigOptions, VOLUME};

/// Size of the volume.
const VOLUME_BYTES: u64 = 96 * MIB;
/// Size of the cache: less, so that it fills up and reclaim works.
const CACHE_BYTES: u64 = 64 * MIB;
/// How long the load goes on before the cache is lost, in milliseconds.
const LOAD_MS: std::ops::Range<u64> = 500..9_000;

/// What `tidepool recover` said.
#[derive(Debug, Clone, Deserialize)]
struct Report {
    exact: bool,
    groups: usize,
    loss: Loss,
}

#[derive(Debug, Clone, Deserialize)]
struct Loss {
    since_unix_ms: u64,
    seconds: f64,
    bytes_max: u64,
}

/// What a round has shown.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Groups that were brought into the image.
    pub groups: usize,
    /// What is really gone.
    pub lost: Lost,
    /// Time of acknowledgements over which something is really gone, in seconds, and the bound that was told.
    pub seconds: (f64, f64),
}

/// Destroys the cache of a volume under load, recovers its image and compares it with every state that the volume has had.
///
/// # Errors
/// When a part fails.
///
/// # Panics
/// When a promise is broken.
pub fn round(cluster: Option<&Cluster>, seed: u64) -> Result<Round, Box<dyn std::error::Error>> {
    let mut rng = Rng::new(seed);
    let image = format!("lost{seed}");
    let mut rig = match cluster {
        None => Rig::with_file(VOLUME_BYTES, CACHE_BYTES)?,
        Some(cluster) => {
            cluster.rbd_create(&image, VOLUME_BYTES)?;
            let uri = format!("rbd:rbd/{image}?conf={}", cluster.conf().display());
            let volumes = vec![(VOLUME.to_string(), uri)];
            let mut rig = Rig::new(&RigOptions { cache_bytes: CACHE_BYTES, volumes, extra: Vec::new() })?;
            rig.daemon.start()?;
            rig
        }
    };
    let uri = match cluster {
        None => format!("file:{}", rig.image().display()),
        Some(cluster) => format!("rbd:rbd/{image}?conf={}", cluster.conf().display()),
    };
    let mut workload = rig.workload(WorkloadOptions::new(seed, VOLUME_BYTES))?;
    workload.keep_history();
    let never = AtomicBool::new(false);
    let load = Duration::from_millis(LOAD_MS.start + rng.below(LOAD_MS.end - LOAD_MS.start));
    std::thread::scope(|scope| -> Result<(), Error> {
        let run = scope.spawn(|| workload.run_until(&never));
        std::thread::sleep(load);
        rig.daemon.kill()?;
        never.store(true, Ordering::Relaxed);
        run.join().expect("no panic")?;
        Ok(())
    })?;
    workload.server_died();
    std::fs::remove_file(&rig.cache)?;
    let report = recover(&uri)?;
    let content = match cluster {
        None => std::fs::read(rig.image())?,
        Some(cluster) => {
            let export = rig.scratch.join("export");
            cluster.rbd_export(&image, &export)?;
            std::fs::read(export)?
        }
    };
    let lost = workload.compare(&content[..VOLUME_BYTES as usize])?;
    assert!(report.exact, "a grouped drain leaves an exact state");
    let since = report.loss.since_unix_ms;
    let mut seconds = 0.0;
    if let Some((first, last)) = lost.acked_unix_ms {
        assert!(first >= since, "what was acknowledged {} ms before the cut is gone", since - first);
        seconds = (last - since) as f64 / 1e3;
    }
    assert!(seconds <= report.loss.seconds, "{seconds} s are gone, told were {}", report.loss.seconds);
    let bytes_max = report.loss.bytes_max;
    assert!(lost.bytes <= bytes_max, "{} bytes are gone, told were {bytes_max}", lost.bytes);
    if let Some(cluster) = cluster {
        cluster.rbd(&["bench", "--io-type", "write", "--io-total", "1M", &image])?;
        cluster.rbd(&["rm", "--no-progress", &image])?;
    }
    Ok(Round { groups: report.groups, lost, seconds: (seconds, report.loss.seconds) })
}

fn recover(uri: &str) -> Result<Report, Box<dyn std::error::Error>> {
    let arguments = ["recover", uri, "--accept-loss", "--format", "json"];
    let output = daemon::run(arguments)?;
    if !output.status.success() {
        return Err(format!("recover {uri}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
