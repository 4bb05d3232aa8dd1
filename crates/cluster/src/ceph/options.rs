//! What a cluster is made of.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Servers, Store};
use crate::network::Network;

/// Most OSDs in a cluster: with more, the machine would be measured and not Ceph.
pub const OSDS_MAX: u32 = 16;
/// Size of an OSD's file in bytes, unless another size is asked for; the file is sparse.
const OSD_BYTES: u64 = 10 << 30;

/// The options of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Parent of the cluster's directory; [`crate::scratch::parent`] by default.
    pub parent: Option<PathBuf>,
    /// What each OSD keeps its data on, by the OSD's number.
    pub stores: Vec<Store>,
    /// Copies of each object.
    pub replicas: u32,
    /// The monitor's port (v1; v2 is the next one); a free port by default.
    pub port: Option<u16>,
    /// Whether clients and daemons authenticate.
    pub cephx: bool,
    /// The servers of a cluster with a network of its own; without them the cluster is on the
    /// loopback interface.
    pub servers: Option<Servers>,
    /// The servers' network, if it exists already, for example with guests in it. Otherwise it is
    /// made.
    pub network: Option<Arc<Network>>,
    /// OSDs that run in guests, by the OSD's number. Their stores are on disks of the guest.
    pub guests: BTreeMap<u32, InGuest>,
    /// Whether the network has a second host for clients, which is called `peer`.
    pub peer: bool,
    /// Time that each packet takes from one node of the network to another.
    pub delay: Option<Duration>,
    /// Whether the monitor decides at once instead of once a second, dead clients are soon
    /// forgotten, and the pool of a single OSD has few placement groups: for tests, which measure
    /// nothing.
    pub prompt: bool,
    /// Whether there is a manager. The manager counts what pools hold: without it no quota is
    /// enforced, and nothing gets full. A cluster of several OSDs has a manager in any case: only
    /// the manager reports when all copies are in their places.
    pub manager: bool,
    /// Lines added to `[global]` of the configuration.
    pub extra: Vec<String>,
}

/// The guest that an OSD runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InGuest {
    /// The program `tidepool`, which runs commands in the guest.
    pub program: PathBuf,
    /// The guest's address in the cluster's network.
    pub address: Ipv4Addr,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        ClusterOptions {
            parent: None,
            stores: vec![Store::File(OSD_BYTES)],
            replicas: 1,
            port: None,
            cephx: false,
            servers: None,
            network: None,
            guests: BTreeMap::new(),
            peer: false,
            delay: None,
            prompt: false,
            manager: true,
            extra: Vec::new(),
        }
    }
}

impl ClusterOptions {
    /// The default for a test: the cluster does everything as soon as possible, and has no manager.
    pub fn for_tests() -> ClusterOptions {
        ClusterOptions { prompt: true, manager: false, ..ClusterOptions::default() }
    }

    /// A cluster with this number of OSDs on files.
    pub fn with_osds(osds: usize) -> ClusterOptions {
        ClusterOptions { stores: vec![Store::File(OSD_BYTES); osds], ..ClusterOptions::default() }
    }
}
