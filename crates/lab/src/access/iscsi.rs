//! The iSCSI access path: a gateway has the images, and each hypervisor has an initiator for each
//! image of its clients.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::exporter::{self, Exporter};
use super::gateway::{self, Gateway, Store, UNIT};
use super::{Access, AccessError, Image, InPlace, Site};
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::qemu::quoted;

/// A gateway and its initiators.
#[derive(Debug)]
pub(super) struct Iscsi {
    // Dropped before the gateway, to which the initiators are connected.
    initiators: Vec<Exporter>,
    gateway: Gateway,
    store: Store,
    images: BTreeSet<String>,
}

impl Iscsi {
    /// Starts the gateway, with targets that keep their data on `store`, and then the initiators.
    pub(super) fn start(site: &Site, store: Store) -> Result<Iscsi, AccessError> {
        let gateway = Gateway::start(site, store)?;
        let initiator = |image: &Image| Exporter::start(site, image, &blockdev(&gateway, image));
        let initiators = site.images.iter().map(initiator).collect::<Result<_, _>>()?;
        let images = site.images.iter().map(|image| image.name.clone()).collect();
        Ok(Iscsi { initiators, gateway, store, images })
    }
}

/// QEMU's option for the block device of an image's initiator.
fn blockdev(gateway: &Gateway, image: &Image) -> String {
    let (portal, target) = (gateway.portal(), quoted(&gateway::name(image)));
    let initiator = format!("{target}-host{}", image.host);
    format!(
        "driver=iscsi,transport=tcp,portal={portal},target={target},lun={UNIT},initiator-name={initiator}"
    )
}

impl InPlace for Iscsi {
    fn verify(&self) -> Result<Value, AccessError> {
        self.holds()?;
        let proof = self.gateway.verify()?;
        if self.store == Store::Null {
            return Ok(json!({ "gateway": proof }));
        }
        let opened = self.gateway.counted()?.images;
        if opened != self.images {
            let what = format!("librbd in the gateway has {opened:?} open, not {:?}", self.images);
            return Err(AccessError::NotInPlace { access: Access::Iscsi, what });
        }
        Ok(json!({ "gateway": proof, "opened_by_librbd_there": opened }))
    }

    fn holds(&self) -> Result<(), AccessError> {
        self.gateway.holds()?;
        self.initiators.iter().try_for_each(|initiator| initiator.holds(Access::Iscsi))
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        exporter::of(&self.initiators, image).map(Exporter::endpoint)
    }

    fn uri(&self, image: &str) -> Option<String> {
        exporter::of(&self.initiators, image).map(Exporter::uri)
    }

    fn counters(&self) -> Result<Map<String, Value>, AccessError> {
        match self.store {
            Store::Rbd => Ok(self.gateway.counted()?.counters),
            Store::Null => Ok(Map::new()),
        }
    }

    fn undo(self: Box<Self>) -> Result<(), AccessError> {
        self.initiators.into_iter().try_for_each(Exporter::stop)?;
        self.gateway.stop()
    }
}
