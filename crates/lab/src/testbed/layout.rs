//! Layout of a testbed: its devices, and their places and sizes.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::failed;
use crate::placement::{Arrangement, Layer, Placement, PlacementError, Ssd};
use tidepool_cluster::ceph::Servers;
use tidepool_cluster::device::Preset;

/// Bytes of each device that no partition uses: room for small files beside them.
const UNPARTITIONED_BYTES: u64 = 64 << 20;
/// Smallest part of an SSD, in bytes, that is used for a database or a journal.
pub(super) const PARTITION_BYTES_MIN: u64 = 256 << 20;
/// Size of a journal that shares the OSD's disk, in bytes. Ceph's documentation says 5 GB for real
/// disks.
pub(super) const DISK_JOURNAL_BYTES: u64 = 512 << 20;
/// Partitions are multiples of this many bytes.
pub(super) const PARTITION_UNIT_BYTES: u64 = 1 << 20;
/// Most hypervisors.
pub const HOSTS_MAX: u32 = 2;

/// Layout of a testbed.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Class of the emulated disks.
    pub disk: Preset,
    /// Number of disks.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// Size of a disk in bytes.
    pub disk_bytes: u64,
    /// Class and size in bytes of each SSD.
    pub ssd: Option<(Preset, u64)>,
    /// Places of the SSDs.
    pub ssds: Ssds,
    /// Hypervisors with clients, at most [`HOSTS_MAX`]. Images are distributed over them in turn.
    pub hypervisors: u32,
    /// Copies of each object.
    pub replicas: u32,
    /// Factor by which devices are slower than their class, and packets slower than `delay`, until
    /// [`super::Testbed::slow`] changes it.
    pub slowed_by: u32,
    /// Number of equal parts into which an SSD in a server is divided, for the placements that
    /// share it. The SSD in a hypervisor has one user.
    pub ssd_shares: u32,
    /// Lines for the `[global]` section of ceph.conf.
    pub ceph_conf: Vec<String>,
    /// Servers among which the disks are distributed, and of which each has its SSD. 0: one server
    /// without a network.
    pub servers: u32,
    /// Whether servers and hypervisors have a network of their own. Otherwise everything is on the
    /// loopback interface. It needs servers.
    pub network: bool,
    /// Delay of a packet from one node to another, before the slowing factor is applied. It needs
    /// the network.
    pub delay: Option<Duration>,
}

/// Places of a testbed's SSDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ssds {
    /// Whether each server with OSDs has an SSD.
    pub in_servers: bool,
    /// Number of hypervisors with an SSD, 0 to [`HOSTS_MAX`].
    pub hosts: u32,
}

impl Ssds {
    /// The SSDs that a testbed for all these placements needs, with clients on this number of
    /// hypervisors.
    pub fn of<'a>(
        arrangements: impl IntoIterator<Item = &'a Arrangement>,
        hypervisors: u32,
    ) -> Ssds {
        let mut ssds = Ssds::default();
        for arrangement in arrangements {
            let uses = |layers: &[Layer]| {
                arrangement.within(layers).find(|placement| placement.ssd() != Ssd::Unused)
            };
            ssds.in_servers |= uses(&Layer::BELOW).is_some();
            let hosts =
                uses(&[Layer::Client]).map_or(0, |front| front.hosts_min().max(hypervisors));
            ssds.hosts = ssds.hosts.max(hosts);
        }
        ssds
    }

    /// Number of SSDs, with OSDs on this number of servers.
    pub fn count(self, servers: u32) -> u32 {
        self.hosts + if self.in_servers { servers.max(1) } else { 0 }
    }
}

impl Layout {
    /// The servers as nodes of a network, if there is one. All OSDs of a disk are on the same
    /// server.
    pub(crate) fn nodes(&self) -> Option<Servers> {
        let of_osds = (0..self.osds()).map(|osd| self.server(osd)).collect();
        (self.network && self.servers > 0).then_some(Servers { count: self.servers, of_osds })
    }

    /// Bytes of an SSD that its users have. None without SSDs.
    fn ssd_usable_bytes(&self) -> Option<u64> {
        self.ssd.as_ref().map(|(_, bytes)| bytes.saturating_sub(UNPARTITIONED_BYTES))
    }

    /// Bytes of the SSD in a server that each placement on it gets.
    pub(crate) fn server_share_bytes(&self) -> u64 {
        self.ssd_usable_bytes().unwrap_or(0) / u64::from(self.ssd_shares.max(1))
    }

    /// Bytes of the SSD in a hypervisor that its one user gets, whatever stands in the servers.
    pub(crate) fn host_share_bytes(&self) -> u64 {
        self.ssd_usable_bytes().unwrap_or(0)
    }

    /// Numbers of the servers that have an SSD.
    pub(crate) fn servers_with_ssd(&self) -> Range<u32> {
        0..if self.ssds.in_servers { self.servers.max(1) } else { 0 }
    }

    pub(super) fn osds(&self) -> u32 {
        self.disks * self.osds_per_disk
    }

    /// The server of an OSD.
    pub(super) fn server(&self, osd: u32) -> u32 {
        osd % self.disks % self.servers.max(1)
    }

    /// The OSDs of a server, in ascending order.
    pub(super) fn osds_of(&self, server: u32) -> impl Iterator<Item = u32> {
        (0..self.osds()).filter(move |osd| self.server(*osd) == server)
    }

    /// The class of the devices that hold the OSDs' data.
    pub(super) fn data_media(&self, below: &[&'static dyn Placement]) -> &Preset {
        let on_ssd =
            self.ssd.as_ref().filter(|_| below.iter().any(|placement| placement.disks_are_ssds()));
        on_ssd.map_or(&self.disk, |(preset, _)| preset)
    }
}

/// Sizes of a disk's partitions: the journal, if there is one, and the data, of each OSD in turn.
pub(super) fn disk_parts(
    layout: &Layout,
    below: &[&'static dyn Placement],
) -> Result<Vec<u64>, PlacementError> {
    let each =
        layout.disk_bytes.saturating_sub(UNPARTITIONED_BYTES) / u64::from(layout.osds_per_disk);
    let journal = if below.iter().any(|placement| placement.journal_on_disk()) {
        DISK_JOURNAL_BYTES
    } else {
        0
    };
    let data = each.saturating_sub(journal) / PARTITION_UNIT_BYTES * PARTITION_UNIT_BYTES;
    if data < 2 * PARTITION_BYTES_MIN {
        return Err(too_small("a disk", "1 GiB for each OSD"));
    }
    let parts = [journal, data].into_iter().filter(|&bytes| bytes > 0);
    Ok(parts.collect::<Vec<_>>().repeat(layout.osds_per_disk as usize))
}

pub(super) fn too_small(what: &str, least: &str) -> PlacementError {
    let source = io::Error::new(io::ErrorKind::InvalidInput, format!("it needs {least}"));
    failed(format!("{what} is too small"))(source)
}
