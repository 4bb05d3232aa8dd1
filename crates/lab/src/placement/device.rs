//! Placements below the OSDs: a cache on the SSD in front of each disk, and its control, the same
//! path without a cache.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::mounted::{self, Mounted};
use super::under::{self, Daemons};
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed};
use crate::results::Drained;
use tidepool_cluster::ceph::{Cluster, SSD_OP_SHARDS};

pub(super) static OSD_TIDEPOOL: Under = Under { caches: true };
pub(super) static OSD_PASSTHROUGH: Under = Under { caches: false };
pub(super) static OSD_ON_SSD: OnSsd = OnSsd;

/// Tidepool between OSDs and their disks. It serves the disks over NBD, and libnbd's nbdfuse makes
/// the exports files again.
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
        let daemons = Daemons::start(ground, self.name(), self.caches)?;
        let mut below = Below { mounts: Vec::new(), daemons };
        for (osd, slot) in ground.slots.iter_mut().enumerate() {
            let volume = under::volume(osd);
            let directory = ground.directory.join(format!("{volume}.disk"));
            slot.data = below.mount(slot.server, directory, &volume)?;
            slot.rotational = below.daemons.is_rotational(slot.rotational);
        }
        Ok(Box::new(below))
    }
}

/// The daemons and mounts between OSDs and disks.
#[derive(Debug)]
struct Below {
    mounts: Vec<Mounted>,
    // Dropped after the mounts, which use the daemons.
    daemons: Daemons,
}

impl Below {
    /// Mounts the export of a volume as a file; returns the file's path.
    fn mount(
        &mut self,
        server: usize,
        directory: PathBuf,
        volume: &str,
    ) -> Result<PathBuf, PlacementError> {
        fs::create_dir(&directory)
            .map_err(failed(format!("cannot make {}", directory.display())))?;
        let file = directory.join("disk");
        let uri =
            format!("nbd+unix:///{volume}?socket={}", self.daemons.of(server)?.socket().display());
        self.mounts.push(Mounted::start(&directory, &file, &uri, || file.exists())?);
        Ok(file)
    }
}

impl Applied for Below {
    fn filled(&self) -> Result<(), PlacementError> {
        self.daemons.filled()
    }

    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.daemons.holds()?;
        self.daemons.proofs()
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.daemons.holds()
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        self.daemons.counters().map(Value::Object)
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        self.daemons.drain(limit_s, hurry, stop)
    }
}

/// OSDs that have their data on SSDs of the testbed's class instead of disks: a bound for all
/// caches on such an SSD in an OSD's server.
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

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        if ground.slots.iter().any(|slot| slot.rotational) {
            let what = "a disk that turns has the data of an OSD".to_string();
            return Err(PlacementError::NotInPlace { placement: self.name(), what });
        }
        Ok(Box::new(Bare))
    }
}

/// OSDs without a layer between them and their devices.
#[derive(Debug)]
struct Bare;

impl Applied for Bare {
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        // The number of shards of an OSD's queue shows whether the OSD takes its device for an SSD.
        let option = "osd_op_num_shards";
        let shards = cluster.ceph(&["config", "show", "osd.0", option])?;
        if shards.trim() == SSD_OP_SHARDS[0].to_string() {
            return Ok(json!({ option: shards.trim() }));
        }
        let what = format!("an OSD says {option} = {}", shards.trim());
        Err(PlacementError::NotInPlace { placement: OSD_ON_SSD.name(), what })
    }
}
