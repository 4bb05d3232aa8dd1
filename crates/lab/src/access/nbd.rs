//! The access path through an NBD server on the hypervisor that has librbd. The initiator of the
//! iSCSI path is such an NBD server, too, but without librbd. So the iSCSI path differs from this
//! path only by iSCSI and the gateway.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::exporter::{self, Exporter};
use super::librbd::{self, Counted};
use super::{Access, AccessError, Image, InPlace, Site};
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::qemu::quoted;

/// Prefix of the names of the servers' ceph.conf and admin sockets.
const NAME: &str = "export";

/// The servers, one for each image.
#[derive(Debug)]
pub(super) struct Nbd {
    servers: Vec<Exporter>,
    directory: PathBuf,
}

impl Nbd {
    /// Starts a server for each image.
    pub(super) fn start(site: &Site) -> Result<Nbd, AccessError> {
        let conf = quoted(&librbd::conf(&site.conf, &site.directory, NAME)?.display().to_string());
        let server = |image: &Image| {
            let name = quoted(&image.name);
            Exporter::start(site, image, &format!("driver=rbd,pool=rbd,image={name},conf={conf}"))
        };
        let servers = site.images.iter().map(server).collect::<Result<_, _>>()?;
        Ok(Nbd { servers, directory: site.directory.clone() })
    }

    fn counted(&self) -> Result<Counted, AccessError> {
        let processes: Vec<u32> = self.servers.iter().map(Exporter::id).collect();
        Counted::now(&self.directory, NAME, &processes)
    }
}

impl InPlace for Nbd {
    fn verify(&self) -> Result<Value, AccessError> {
        self.holds()?;
        let opened = self.counted()?.images;
        let wanted: BTreeSet<String> =
            self.servers.iter().map(|server| server.image().to_string()).collect();
        if opened != wanted {
            let what = format!("librbd in the servers has {opened:?} open, not {wanted:?}");
            return Err(AccessError::NotInPlace { access: Access::Nbd, what });
        }
        let exports: Vec<String> = self.servers.iter().map(Exporter::uri).collect();
        Ok(json!({ "exports": exports, "opened_by_librbd_there": opened }))
    }

    fn holds(&self) -> Result<(), AccessError> {
        self.servers.iter().try_for_each(|server| server.holds(Access::Nbd))
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        exporter::of(&self.servers, image).map(Exporter::endpoint)
    }

    fn uri(&self, image: &str) -> Option<String> {
        exporter::of(&self.servers, image).map(Exporter::uri)
    }

    fn counters(&self) -> Result<Map<String, Value>, AccessError> {
        Ok(self.counted()?.counters)
    }

    fn undo(self: Box<Self>) -> Result<(), AccessError> {
        self.servers.into_iter().try_for_each(Exporter::stop)
    }
}
