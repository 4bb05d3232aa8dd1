//! Below the OSDs: a cache on the SSD in front of each disk, and its control, the same way without a cache.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::daemon::{Daemon, Setup};
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed, need, wait};
use crate::cluster::Cluster;
use crate::mounts::unmount_below;
use crate::process::Process;
use crate::results::Drained;

pub(super) static OSD_TIDEPOOL: Under = Under { caches: true };
pub(super) static OSD_PASSTHROUGH: Under = Under { caches: false };

/// Size of a cache that is not used, in bytes: the smallest.
const UNUSED_CACHE_BYTES: u64 = 64 << 20;

/// Tidepool between OSDs and their disks. It serves the disks over NBD, and libnbd's nbdfuse makes files of them again, which carries
/// ten requests of an OSD at a time.
#[derive(Debug)]
pub(super) struct Under {
    caches: bool,
}

impl Placement for Under {
    fn name(&self) -> &'static str {
        if self.caches { "osd-tidepool" } else { "osd-passthrough" }
    }

    fn what(&self) -> &'static str {
        if self.caches {
            "a write-back cache on the SSD under each OSD"
        } else {
            "the way of that cache, without the cache: a control"
        }
    }

    fn layer(&self) -> Layer {
        Layer::Device
    }

    fn ssd(&self) -> Ssd {
        if self.caches { Ssd::File } else { Ssd::Unused }
    }

    fn caches_reads(&self) -> bool {
        self.caches
    }

    fn probe(&self) -> Result<(), String> {
        need("nbdfuse", "libnbd-bin")?;
        need("fusermount3", "fuse3")
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let (cache, cache_bytes) = match &ground.ssd {
            Some((directory, bytes)) if self.caches => (directory.join("osd.cache"), *bytes),
            _ => (ground.directory.join("osd.cache"), UNUSED_CACHE_BYTES),
        };
        let volumes: Vec<(String, String)> = ground
            .slots
            .iter()
            .enumerate()
            .map(|(number, slot)| (format!("osd{number}"), format!("file:{}", slot.data.display())))
            .collect();
        // As a cache that knows nothing of Ceph would: in its own order, and the disk alone is nothing while data is dirty.
        let options: &[&str] = if self.caches { &["--accept-loss=60m", "--drain=unordered"] } else { &[] };
        let options: Vec<String> = options.iter().map(|option| option.to_string()).collect();
        let (volumes, options) = (&volumes[..], &options[..]);
        let setup = Setup { name: "osd", cache, cache_bytes, volumes, options, namespace: None };
        let daemon = Daemon::start(ground, &setup)?;
        // Until the disks are filled nothing that is written stays in the cache.
        let mode = if self.caches { "write-around" } else { "off" };
        for (volume, _) in volumes {
            daemon.set_mode(volume, mode)?;
        }
        let names = volumes.iter().map(|(volume, _)| volume.clone()).collect();
        let mut below =
            Below { placement: self.name(), caches: self.caches, names, mounts: Vec::new(), daemon };
        for (slot, (volume, _)) in ground.slots.iter_mut().zip(volumes) {
            slot.data = below.mount(ground.directory.join(format!("{volume}.disk")), volume)?;
        }
        Ok(Box::new(below))
    }
}

/// What is between OSDs and disks.
#[derive(Debug)]
struct Below {
    placement: &'static str,
    caches: bool,
    names: Vec<String>,
    mounts: Vec<(PathBuf, Process)>,
    // After the mounts that need it.
    daemon: Daemon,
}

impl Below {
    /// Makes a file of an export; returns its path.
    fn mount(&mut self, directory: PathBuf, volume: &str) -> Result<PathBuf, PlacementError> {
        fs::create_dir(&directory).map_err(failed(format!("cannot make {}", directory.display())))?;
        let file = directory.join("disk");
        let mut command = Command::new("nbdfuse");
        command.arg(&file).arg(format!("nbd+unix:///{volume}?socket={}", self.daemon.socket().display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Process::spawn(command).map_err(failed("cannot run nbdfuse"))?;
        self.mounts.push((directory, process));
        wait(&file, || file.exists())?;
        Ok(file)
    }
}

impl Applied for Below {
    fn filled(&self) -> Result<(), PlacementError> {
        let mut names = self.names.iter().filter(|_| self.caches);
        names.try_for_each(|name| self.daemon.set_mode(name, "write-back"))
    }

    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        self.daemon.proof()
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.daemon.is_in_mode(self.placement, if self.caches { "write-back" } else { "off" })
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        Ok(Value::Object(self.daemon.counters()?))
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        if self.caches { self.daemon.drain(limit_s, hurry, stop) } else { Ok(None) }
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        for (directory, process) in self.mounts.drain(..) {
            unmount_below(&directory);
            drop(process);
        }
    }
}
