//! An access path without anything behind it: a bound for all placements over iSCSI, or for all
//! clients in guests.

use serde_json::Value;

use super::{Applied, Ground, Layer, Placement, PlacementError};
use crate::access::{self, Access, AccessError, InPlace, Site};
use crate::results::Durability;
use tidepool_cluster::ceph::Cluster;
use tidepool_cluster::fio::Endpoint;

pub(super) static ISCSI_NULL: Null = Null {
    name: "iscsi-null",
    what: "a bound: the iSCSI gateway, which answers at once and keeps nothing",
    access: Access::Iscsi,
    start: |site| access::nothing(&site),
};
pub(super) static GUEST_NULL: Null = Null {
    name: "guest-null",
    what: "a bound: guests whose disks answer at once and keep nothing",
    access: Access::Guest,
    start: access::nothing_in_guests,
};

/// An access path whose end answers at once and keeps nothing.
#[derive(Debug)]
pub(super) struct Null {
    name: &'static str,
    what: &'static str,
    access: Access,
    start: fn(Site) -> Result<Box<dyn InPlace>, AccessError>,
}

impl Placement for Null {
    fn name(&self) -> &'static str {
        self.name
    }

    fn what(&self) -> &'static str {
        self.what
    }

    fn layer(&self) -> Layer {
        Layer::Client
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn asks_no_device(&self) -> bool {
        true
    }

    fn path(&self, _access: Access) -> Result<Access, String> {
        // The placement includes its own access path, and reaches no image.
        Ok(Access::Librbd)
    }

    fn probe(&self) -> Result<(), String> {
        self.access.probe()
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        Ok(Box::new(Answering((self.start)(ground.site())?)))
    }
}

#[derive(Debug)]
struct Answering(Box<dyn InPlace>);

impl Applied for Answering {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        Ok(self.0.verify()?)
    }

    fn holds(&self) -> Result<(), PlacementError> {
        Ok(self.0.holds()?)
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        self.0.endpoint(image)
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        let counters = self.0.counters()?;
        Ok(if counters.is_empty() { Value::Null } else { Value::Object(counters) })
    }

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        Ok(self.0.undo()?)
    }
}
