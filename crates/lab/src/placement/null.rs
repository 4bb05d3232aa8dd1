//! The gateway's path without anything behind it: what no placement is faster than over iSCSI.

use serde_json::Value;

use super::{Applied, Ground, Layer, Placement, PlacementError};
use crate::access::{self, Access, InPlace};
use crate::cluster::Cluster;
use crate::fio::Endpoint;
use crate::results::Durability;

pub(super) static ISCSI_NULL: Null = Null;

/// Initiators and a gateway that answers at once and keeps nothing.
#[derive(Debug)]
pub(super) struct Null;

impl Placement for Null {
    fn name(&self) -> &'static str {
        "iscsi-null"
    }

    fn what(&self) -> &'static str {
        "a bound: the iSCSI gateway, which answers at once and keeps nothing"
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
        // It has a gateway of its own, and reaches no image.
        Ok(Access::Librbd)
    }

    fn probe(&self) -> Result<(), String> {
        Access::Iscsi.probe()
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        Ok(Box::new(Answering(access::nothing(&ground.site())?)))
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

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        Ok(self.0.undo()?)
    }
}
