//! The unit in which BlueStore allocates space. An OSD keeps the unit that it was made with, so the
//! unit is a part of an arrangement.

use serde_json::{Value, json};

use super::{Applied, Ground, Layer, Placement, PlacementError};
use tidepool_cluster::ceph::Cluster;

/// Ceph's option, and the name of its value in an OSD's metadata.
const OPTION: &str = "bluestore_min_alloc_size";

/// Ceph's default for all media since 14.2.8 (SSDs) and 16.2.0 (disks).
pub(super) static ALLOC_4K: Alloc = Alloc {
    name: "alloc-4k",
    what: "BlueStore allocates units of 4 KiB, as of today",
    bytes: 4096,
};
/// Ceph's earlier default for SSDs.
pub(super) static ALLOC_16K: Alloc = Alloc {
    name: "alloc-16k",
    what: "BlueStore allocates units of 16 KiB, as on SSDs before Ceph 14.2.8",
    bytes: 16384,
};

/// OSDs that are made with allocation units of this size.
#[derive(Debug)]
pub(super) struct Alloc {
    name: &'static str,
    what: &'static str,
    bytes: u64,
}

impl Placement for Alloc {
    fn name(&self) -> &'static str {
        self.name
    }

    fn what(&self) -> &'static str {
        self.what
    }

    fn layer(&self) -> Layer {
        Layer::Format
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        ground.ceph_conf.push(format!("{} = {}", OPTION.replace('_', " "), self.bytes));
        Ok(Box::new(Made { placement: self.name, bytes: self.bytes }))
    }
}

/// OSDs that were made with this allocation unit.
#[derive(Debug)]
struct Made {
    placement: &'static str,
    bytes: u64,
}

impl Applied for Made {
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        let not = |what: String| PlacementError::NotInPlace { placement: self.placement, what };
        let read =
            |text: String| serde_json::from_str::<Value>(&text).map_err(|e| not(e.to_string()));
        let metadata = read(cluster.ceph(&["osd", "metadata", "--format", "json"])?)?;
        let mut osds = Vec::new();
        for osd in metadata.as_array().into_iter().flatten() {
            let (id, told) = (&osd["id"], osd[OPTION].as_str());
            // The metadata of some releases lacks the unit that an OSD was made with. There the
            // configured value is read.
            let told = match told {
                Some(told) => told.to_string(),
                None => {
                    let set = read(cluster.ceph(&[
                        "tell",
                        &format!("osd.{id}"),
                        "config",
                        "get",
                        OPTION,
                    ])?)?;
                    set[OPTION].as_str().unwrap_or_default().to_string()
                }
            };
            if told != self.bytes.to_string() {
                return Err(not(format!("OSD {id} says {OPTION} = {told}")));
            }
            osds.push(json!({ "id": id, OPTION: told }));
        }
        if osds.is_empty() {
            return Err(not("no OSD tells of itself".into()));
        }
        Ok(json!({ "osds": osds }))
    }
}
