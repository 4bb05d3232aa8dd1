//! Rounds in which the cache is destroyed under load and the image recovered without it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use tidepool_testkit::rng::Rng;
use tidepool_testkit::stamps::{Lost, WorkloadOptions};
use tidepool_testkit::{Cluster, Error, daemon};

use crate::rig::{MIB, Rig, RigOptions, VOLUME};

/// Why a round could not be played to its end.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Size of the volume.
const VOLUME_BYTES: u64 = 96 * MIB;
/// Size of the cache: less, so that it fills up and reclaim works.
const CACHE_BYTES: u64 = 64 * MIB;
/// How long the load goes on before the cache is lost, in milliseconds.
const LOAD_MS: std::ops::Range<u64> = 500..9_000;

/// What `tidepool recover` said.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Report {
    pub(crate) exact: bool,
    pub(crate) groups: usize,
    pub(crate) loss: Loss,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Loss {
    pub(crate) since_unix_ms: u64,
    pub(crate) seconds: f64,
    bytes_max: Option<u64>,
}

/// The image of a round: a file, or one of a throw-away cluster.
pub(crate) struct Image<'a> {
    cluster: Option<&'a Cluster>,
    name: String,
}

impl<'a> Image<'a> {
    pub(crate) fn new(cluster: Option<&'a Cluster>, name: String) -> Image<'a> {
        Image { cluster, name }
    }

    /// Makes the image and a running daemon that serves it.
    pub(crate) fn serve(&self, volume_bytes: u64, cache_bytes: u64) -> Result<Rig, Failure> {
        let Some(cluster) = self.cluster else {
            return Ok(Rig::with_file(volume_bytes, cache_bytes)?);
        };
        cluster.rbd_create(&self.name, volume_bytes)?;
        let volumes = vec![(VOLUME.to_string(), self.rbd_uri(cluster))];
        let mut rig = Rig::new(&RigOptions { cache_bytes, volumes, extra: Vec::new() })?;
        rig.daemon.start()?;
        Ok(rig)
    }

    fn rbd_uri(&self, cluster: &Cluster) -> String {
        cluster.uri(&self.name)
    }

    /// What a host does that has the image and no cache any more.
    pub(crate) fn recover(&self, rig: &Rig) -> Result<Report, Failure> {
        let uri = match self.cluster {
            None => format!("file:{}", rig.image().display()),
            Some(cluster) => self.rbd_uri(cluster),
        };
        let output = daemon::run(["recover", &uri, "--accept-loss", "--format", "json"])?;
        if !output.status.success() {
            return Err(
                format!("recover {uri}: {}", String::from_utf8_lossy(&output.stderr)).into()
            );
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The image as a plain file.
    pub(crate) fn plain(&self, rig: &Rig) -> Result<PathBuf, Failure> {
        let Some(cluster) = self.cluster else { return Ok(rig.image()) };
        let export = rig.scratch.join("export");
        cluster.rbd_export(&self.name, &export)?;
        Ok(export)
    }

    /// Shows that any client may write to the image again, and removes it.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        if let Some(cluster) = self.cluster {
            cluster.rbd(&["bench", "--io-type", "write", "--io-total", "1M", &self.name])?;
            cluster.rbd_remove(&self.name)?;
        }
        Ok(())
    }
}

/// What a round has shown.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Groups that were brought into the image.
    pub groups: usize,
    /// What is really gone.
    pub lost: Lost,
    /// Time of acknowledgements over which something is really gone, in seconds, and the bound that
    /// was told.
    pub seconds: (f64, f64),
}

/// Destroys the cache of a volume under load, recovers its image and compares it with every state
/// that the volume has had.
///
/// # Errors
/// When a part fails.
///
/// # Panics
/// When a promise is broken.
pub fn round(cluster: Option<&Cluster>, seed: u64) -> Result<Round, Failure> {
    let mut rng = Rng::new(seed);
    let image = Image::new(cluster, format!("lost{seed}"));
    let mut rig = image.serve(VOLUME_BYTES, CACHE_BYTES)?;
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
    let report = image.recover(&rig)?;
    let content = std::fs::read(image.plain(&rig)?)?;
    let lost = workload.compare(&content[..VOLUME_BYTES as usize])?;
    assert!(report.exact, "a grouped drain leaves an exact state");
    let since = report.loss.since_unix_ms;
    let mut seconds = 0.0;
    if let Some((first, last)) = lost.acked_unix_ms {
        assert!(
            first >= since,
            "what was acknowledged {} ms before the cut is gone",
            since - first
        );
        seconds = (last - since) as f64 / 1e3;
    }
    assert!(
        seconds <= report.loss.seconds,
        "{seconds} s are gone, told were {}",
        report.loss.seconds
    );
    let bytes_max = report.loss.bytes_max.expect("a note after half a second and more");
    assert!(lost.bytes <= bytes_max, "{} bytes are gone, told were {bytes_max}", lost.bytes);
    image.finish()?;
    Ok(Round { groups: report.groups, lost, seconds: (seconds, report.loss.seconds) })
}
