//! Below the OSDs: a cache on the SSD in front of each disk, and its control, the same way without a cache.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::daemon::{self, Daemon, Setup};
use super::mounted::{self, Mounted};
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed};
use crate::cluster::{Cluster, SSD_OP_SHARDS};
use crate::results::Drained;

pub(super) static OSD_TIDEPOOL: Under = Under { caches: true };
pub(super) static OSD_PASSTHROUGH: Under = Under { caches: false };
pub(super) static OSD_ON_SSD: OnSsd = OnSsd;

/// Size of a cache that is not used, in bytes: the smallest.
const UNUSED_CACHE_BYTES: u64 = 64 << 20;

/// Tidepool between OSDs and their disks. It serves the disks over NBD, and libnbd's nbdfuse makes files of them again.
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
        mounted::probe()
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        // As a cache that knows nothing of Ceph would: in its own order, and the disk alone is nothing while data is dirty.
        let options: &[&str] = if self.caches { &["--accept-loss=60m", "--drain=unordered"] } else { &[] };
        let options: Vec<String> = options.iter().map(|option| option.to_string()).collect();
        let mut below =
            Below { placement: self.name(), caches: self.caches, mounts: Vec::new(), daemons: Vec::new() };
        let servers = ground.slots.iter().map(|slot| slot.server + 1).max().unwrap_or(0);
        for server in 0..servers {
            let volumes = volumes(ground, server);
            let ssd = ground.server_ssds.get(server).filter(|_| self.caches);
            let setup = Setup {
                name: &format!("osd-node{server}"),
                directory: ssd.map_or(&ground.directory, |ssd| &ssd.directory).clone(),
                cache_bytes: ssd.map_or(UNUSED_CACHE_BYTES, |ssd| ssd.bytes),
                volumes: &volumes,
                options: &options,
                namespace: None,
                state: None,
            };
            let daemon = Daemon::start(ground, &setup)?;
            // Until the disks are filled nothing that is written stays in the cache.
            let mode = if self.caches { "write-around" } else { "off" };
            let mut slots = ground.slots.iter_mut().filter(|slot| slot.server == server);
            for (volume, _) in &volumes {
                daemon.set_mode(volume, mode)?;
                let directory = ground.directory.join(format!("{volume}.disk"));
                let file = below.mount(&daemon, directory, volume)?;
                let slot = slots.next().expect("a volume for each slot");
                // As the kernel's caches do, it says that it does not turn: else an OSD reads five blocks at a time, cached or not.
                (slot.data, slot.rotational) = (file, slot.rotational && !self.caches);
            }
            below.daemons.push(daemon);
        }
        Ok(Box::new(below))
    }
}

/// The disks of a server as volumes of a cache in front of them: names and URIs.
fn volumes(ground: &Ground, server: usize) -> Vec<(String, String)> {
    let slots = ground.slots.iter().enumerate().filter(|(_, slot)| slot.server == server);
    slots.map(|(osd, slot)| (format!("osd{osd}"), format!("file:{}", slot.data.display()))).collect()
}

/// What is between OSDs and disks.
#[derive(Debug)]
struct Below {
    placement: &'static str,
    caches: bool,
    mounts: Vec<Mounted>,
    // Dropped after the mounts that need them: one in each server.
    daemons: Vec<Daemon>,
}

impl Below {
    /// Makes a file of an export; returns its path.
    fn mount(
        &mut self,
        daemon: &Daemon,
        directory: PathBuf,
        volume: &str,
    ) -> Result<PathBuf, PlacementError> {
        fs::create_dir(&directory).map_err(failed(format!("cannot make {}", directory.display())))?;
        let file = directory.join("disk");
        let uri = format!("nbd+unix:///{volume}?socket={}", daemon.socket().display());
        self.mounts.push(Mounted::start(&directory, &file, &uri, || file.exists())?);
        Ok(file)
    }
}

impl Applied for Below {
    fn filled(&self) -> Result<(), PlacementError> {
        for daemon in self.daemons.iter().filter(|_| self.caches) {
            for volume in daemon.served()? {
                daemon.set_mode(daemon::text(&volume, "name"), "write-back")?;
            }
        }
        Ok(())
    }

    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        daemon::proofs(&self.daemons)
    }

    fn holds(&self) -> Result<(), PlacementError> {
        let mode = if self.caches { "write-back" } else { "off" };
        self.daemons.iter().try_for_each(|daemon| daemon.is_in_mode(self.placement, mode))
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        daemon::counters(&self.daemons).map(Value::Object)
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        if self.caches { daemon::drain(&self.daemons, limit_s, hurry, stop) } else { Ok(None) }
    }
}

/// OSDs whose disks are SSDs of the ground's class: what no cache on such an SSD, in an OSD's server, is faster than.
#[derive(Debug)]
pub(super) struct OnSsd;

impl Placement for OnSsd {
    fn name(&self) -> &'static str {
        "osd-on-ssd"
    }

    fn what(&self) -> &'static str {
        "a bound: OSDs that have SSDs in the place of disks"
    }

    fn layer(&self) -> Layer {
        Layer::Device
    }

    fn disks_are_ssds(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), String> {
        Ok(())
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        if ground.slots.iter().any(|slot| slot.rotational) {
            let what = "a disk that turns has the data of an OSD".to_string();
            return Err(PlacementError::NotInPlace { placement: self.name(), what });
        }
        Ok(Box::new(Bare))
    }
}

/// OSDs without anything in between.
#[derive(Debug)]
struct Bare;

impl Applied for Bare {
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        // Whether an OSD takes its disk for an SSD: so many shards has its queue then.
        let option = "osd_op_num_shards";
        let shards = cluster.ceph(&["config", "show", "osd.0", option])?;
        if shards.trim() == SSD_OP_SHARDS[0].to_string() {
            return Ok(json!({ option: shards.trim() }));
        }
        let what = format!("an OSD says {option} = {}", shards.trim());
        Err(PlacementError::NotInPlace { placement: OSD_ON_SSD.name(), what })
    }
}
