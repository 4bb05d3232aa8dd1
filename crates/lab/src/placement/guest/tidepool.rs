//! Tidepool in front of the disk of an OSD that is in a guest: the guest's disk is an export of
//! Tidepool's daemon. So Tidepool and the caches in a guest's kernel are compared under equal OSDs:
//! in equal guests.

use serde_json::{Value, json};

use super::super::under::{self, Daemons};
use super::nothing::ON_DISKS;
use super::{Applied, Ground, Inside, Layer, Placement, PlacementError, Ssd};
use crate::results::Drained;
use tidepool_cluster::ceph::Cluster;
use tidepool_cluster::guest::{self, Disk, Source};

pub(in crate::placement) static OSD_GUEST_TIDEPOOL: Tidepool = Tidepool;

#[derive(Debug)]
pub(in crate::placement) struct Tidepool;

impl Placement for Tidepool {
    fn name(&self) -> &'static str {
        "osd-guest-tidepool"
    }

    fn what(&self) -> &'static str {
        "Tidepool's write-back cache on the SSD under each OSD, which is in a guest"
    }

    fn layer(&self) -> Layer {
        Layer::Device
    }

    fn ssd(&self) -> Ssd {
        Ssd::File
    }

    fn in_guests(&self) -> bool {
        true
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), String> {
        guest::probe()
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let daemons = Daemons::start(ground, self.name(), true)?;
        let mut cached = Cached { inside: Inside::new(self.name(), &ON_DISKS), daemons };
        for osd in 0..ground.slots.len() {
            let slot = &ground.slots[osd];
            let socket = cached.daemons.of(slot.server)?.socket().to_path_buf();
            let rotational = cached.daemons.is_rotational(slot.rotational);
            let disk =
                Disk { source: Source::Nbd { socket, export: under::volume(osd) }, rotational };
            cached.inside.boot(ground, osd, vec![disk])?;
        }
        Ok(Box::new(cached))
    }
}

/// Guests whose disks are cached.
#[derive(Debug)]
struct Cached {
    // Dropped first: the guests use disks that the daemons serve.
    inside: Inside,
    daemons: Daemons,
}

impl Applied for Cached {
    fn filled(&self) -> Result<(), PlacementError> {
        self.daemons.filled()
    }

    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        self.daemons.holds()?;
        let mut proof = self.inside.verify(cluster)?;
        proof["daemons"] = json!(self.daemons.proofs()?);
        Ok(proof)
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.inside.holds()?;
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
