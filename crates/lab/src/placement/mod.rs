//! The places where an SSD can be used. Each place is a [`Placement`]: it reports whether it is
//! possible on this machine, puts itself in place, proves that it is in place, and removes itself
//! again.
//!
//! Placements are in layers ([`Layer`]), and an arrangement combines at most one placement of each
//! layer: between OSDs and their data devices, a cache tier inside the cluster, the OSDs' store,
//! the format of that store, and between client and cluster.

mod alloc;
mod arrangement;
mod client;
mod daemon;
mod device;
#[cfg(test)]
mod fake;
mod guest;
mod mounted;
mod null;
mod replicated;
mod shared;
mod store;
mod tier;
mod under;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::access::{Access, AccessError, Image, Site};
use crate::results::{Drained, Durability};
pub use arrangement::{AGAIN, Arrangement};
use tidepool_cluster::ceph::{Cluster, ClusterError, InGuest, Store};
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::guest::GuestError;
use tidepool_cluster::network::{HostNode, Namespace, Network};
use tidepool_cluster::process::need;

/// The layer of a placement, in order from the media up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// Between an OSD and its data device.
    Device,
    /// Between the images' pool and its clients, inside the cluster.
    Tier,
    /// How OSDs keep their data.
    Store,
    /// A property that the OSDs' store gets when it is made, and keeps.
    Format,
    /// Between the client and the cluster.
    Client,
}

impl Layer {
    /// All layers below the client. Placements in these layers are put in place before the cluster
    /// is started.
    pub const BELOW: [Layer; 4] = [Layer::Device, Layer::Tier, Layer::Store, Layer::Format];
}

/// How a placement uses the SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ssd {
    /// The placement does not use the SSD.
    Unused,
    /// The SSD has a partition for each OSD.
    Partitions,
    /// The placement gets a share of the SSD's bytes, in which it makes files.
    File,
}

/// The device on which an arrangement depends: if the device fails, an operator has to act
/// ([`Arrangement::mend`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The SSD in a hypervisor.
    HostSsd,
    /// The SSD in a server with OSDs.
    ServerSsd,
    /// The disk of an OSD: no placement of the arrangement uses an SSD ([`Placement::ssd`]).
    Disk,
}

/// A way to use an SSD in or before a cluster, or something to compare such a way with: a control
/// or a bound.
pub trait Placement: Debug + Sync {
    /// The placement's name in suites.
    fn name(&self) -> &'static str;
    /// A description of the placement, in a few words.
    fn what(&self) -> &'static str;
    /// The placement's layer.
    fn layer(&self) -> Layer;
    /// How the placement uses the SSD.
    fn ssd(&self) -> Ssd {
        Ssd::Unused
    }
    /// Least number of hypervisors that the placement needs.
    fn hosts_min(&self) -> u32 {
        1
    }
    /// Whether the OSDs use BlueStore.
    fn is_bluestore(&self) -> bool {
        false
    }
    /// Whether the OSDs keep their data on devices of the SSD's class instead of disks: a bound for
    /// what an SSD in a server can do.
    fn disks_are_ssds(&self) -> bool {
        false
    }
    /// Whether each write is on two hosts until the cluster has the write.
    fn keeps_two_copies(&self) -> bool {
        false
    }
    /// Whether each OSD's journal is on the disk that has the OSD's data.
    fn journal_on_disk(&self) -> bool {
        false
    }
    /// An upper limit for the durability of writes through the placement.
    fn durability(&self) -> Durability {
        Durability::Replicated
    }
    /// Whether OSDs run in guests. Guests need a network.
    fn in_guests(&self) -> bool {
        false
    }
    /// Whether this machine's kernel mounts the OSDs' data devices: then no OSD can run in a guest.
    fn mounts_disks(&self) -> bool {
        false
    }
    /// Whether the placement keeps blocks that have been read.
    fn caches_reads(&self) -> bool {
        false
    }
    /// Whether the placement keeps, in memory, blocks that have been read: a read hit then needs no
    /// device.
    fn caches_in_memory(&self) -> bool {
        false
    }
    /// Whether reads through the placement need no device.
    fn asks_no_device(&self) -> bool {
        self.caches_in_memory()
    }
    /// The access path by which the placement reaches images when a workload asks for `access`:
    /// `access` itself, or [`Access::Librbd`] where the placement replaces that path or reaches no
    /// image.
    ///
    /// # Errors
    /// The placement is not possible on that path: the reason, in one line.
    fn path(&self, access: Access) -> Result<Access, String> {
        Ok(access)
    }
    /// What an operator has to do when the SSD on which the placement depends has failed.
    fn mend(&self) -> &'static str {
        "replace the SSD, and make each OSD anew that stood on it"
    }
    /// Checks whether the placement is possible on this machine.
    ///
    /// # Errors
    /// The reason why it is not, in one line.
    fn probe(&self) -> Result<(), String> {
        Ok(())
    }
    /// Checks whether a release of Ceph has what the placement needs.
    ///
    /// # Errors
    /// The reason why the release cannot be used, in one line.
    fn probe_release(&self, _ceph: u32) -> Result<(), String> {
        Ok(())
    }
    /// Puts the placement in place.
    ///
    /// # Errors
    /// When that fails; nothing of the placement is left then.
    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError>;
}

/// What a placement finds, and may change, when it is put in place.
#[derive(Debug)]
pub struct Ground {
    /// The program `tidepool`.
    pub program: PathBuf,
    /// A directory for the placements' files. It is on no emulated device.
    pub directory: PathBuf,
    /// The OSDs of the cluster to be; a placement with OSDs of its own adds them here.
    pub slots: Vec<Slot>,
    /// Copies of each object.
    pub replicas: u32,
    /// What each OSD keeps its data on, in the order of `slots`; the store placement fills this in.
    pub stores: Vec<Store>,
    /// Lines for the global section of ceph.conf.
    pub ceph_conf: Vec<String>,
    /// The network of the cluster to be, if it has one.
    pub network: Option<Arc<Network>>,
    /// OSDs that are to run in guests, by the number of the OSD; a placement below the OSDs fills
    /// this in.
    pub guests: BTreeMap<u32, InGuest>,
    /// The SSD of each server with OSDs, if servers have any.
    pub server_ssds: Vec<SsdShare>,
    /// The hypervisors, once the cluster is up.
    pub hosts: Vec<Host>,
    /// Number of hypervisors with clients: images are assigned to them in turn.
    pub hypervisors: u32,
    /// ceph.conf for clients, once the cluster is up.
    pub client_conf: PathBuf,
    /// The images, once the cluster is up.
    pub images: Vec<String>,
    /// The monitor's node, on which gateways run; `None` where there is no network.
    pub gateway: Option<HostNode>,
    /// URIs of the NBD exports by which a cache on the hypervisor reaches images, by the image's
    /// name. Empty where the cache uses librbd itself.
    pub uris: BTreeMap<String, String>,
}

/// An SSD, and the share of it that a placement may use.
#[derive(Debug, Clone)]
pub struct SsdShare {
    /// The directory with the SSD's files.
    pub directory: PathBuf,
    /// Size of the share, in bytes.
    pub bytes: u64,
}

/// A hypervisor.
#[derive(Debug, Clone)]
pub struct Host {
    /// The hypervisor's SSD, if there is one.
    pub ssd: Option<SsdShare>,
    /// The hypervisor's node in the cluster's network, if there is a network.
    pub node: Option<HostNode>,
}

impl Ground {
    /// The number of the hypervisor whose clients use an image.
    pub fn host_of(&self, image: &str) -> usize {
        let number = self.images.iter().position(|known| known == image).unwrap_or(0);
        number % self.hypervisors.max(1) as usize
    }

    /// The images that a hypervisor's clients use.
    pub fn images_of(&self, host: usize) -> impl Iterator<Item = &String> {
        self.images.iter().filter(move |image| self.host_of(image) == host)
    }

    /// The SSD of a hypervisor, for a placement.
    ///
    /// # Errors
    /// The hypervisor has no SSD.
    fn host_ssd(&self, host: usize, placement: &'static str) -> Result<&SsdShare, PlacementError> {
        let what = || format!("there is no SSD in hypervisor {host}");
        let ssd = self.hosts.get(host).and_then(|host| host.ssd.as_ref());
        ssd.ok_or_else(|| PlacementError::NotInPlace { placement, what: what() })
    }

    /// The URI under which a cache on the hypervisor reaches an image.
    fn uri(&self, image: &str) -> String {
        let direct = || format!("rbd:rbd/{image}?conf={}", self.client_conf.display());
        self.uris.get(image).cloned().unwrap_or_else(direct)
    }

    /// The images, and where they are reached, for an access path.
    pub(crate) fn site(&self) -> Site {
        let image = |name: &String| {
            let host = self.host_of(name);
            Image {
                name: name.clone(),
                host,
                node: self.hosts.get(host).and_then(|host| host.node.clone()),
            }
        };
        Site {
            directory: self.directory.clone(),
            conf: self.client_conf.clone(),
            gateway: self.gateway.clone(),
            images: self.images.iter().map(image).collect(),
        }
    }

    /// The network namespace of a hypervisor's programs; `None` for the machine's own network.
    pub fn namespace(&self, host: usize) -> Option<Namespace> {
        Some(self.hosts.get(host)?.node.as_ref()?.namespace.clone())
    }
}

/// The devices of one OSD.
#[derive(Debug, Clone)]
pub struct Slot {
    /// The OSD's partition of the disk.
    pub data: PathBuf,
    /// A partition of the same disk for the OSD's journal, if the store puts the journal on the
    /// disk.
    pub journal: Option<PathBuf>,
    /// The OSD's partition of the SSD, if the store uses one.
    pub ssd: Option<PathBuf>,
    /// Size of the journal or of the SSD's partition in bytes.
    pub fast_bytes: u64,
    /// Whether the disk is rotational.
    pub rotational: bool,
    /// The number of the server that the OSD is in.
    pub server: usize,
}

/// A placement that is in place. Dropping it removes it.
pub trait Applied: Debug {
    /// Changes the cluster for the placement. The cluster is up, and has no images yet.
    ///
    /// # Errors
    /// When Ceph refuses.
    fn attach(&mut self, _cluster: &mut Cluster) -> Result<(), PlacementError> {
        Ok(())
    }
    /// Proves that the placement is in place; returns what its parts report about themselves.
    ///
    /// # Errors
    /// When it is not in place.
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError>;
    /// Proves that the placement has worked since it was put in place. Called after each
    /// measurement, before anything else is done.
    ///
    /// # Errors
    /// When the placement does not work now, or did not for a while.
    fn holds(&self) -> Result<(), PlacementError> {
        Ok(())
    }
    /// Images are filled, and measurements come next: a cache below the OSDs begins to cache only
    /// now, as a new cache in front of old disks does.
    ///
    /// # Errors
    /// When the cache cannot begin.
    fn filled(&self) -> Result<(), PlacementError> {
        Ok(())
    }
    /// With `true`: requests from now on bring the caches into a state and are not measured. A
    /// cache that lets some requests bypass it takes all of them until a call with `false`.
    ///
    /// # Errors
    /// When the cache cannot be set so.
    fn prepares(&self, _begins: bool) -> Result<(), PlacementError> {
        Ok(())
    }
    /// The endpoint by which clients reach an image through the placement, if the placement is
    /// between clients and the cluster.
    fn endpoint(&self, _image: &str) -> Option<Endpoint> {
        None
    }
    /// Images whose clients have flushed since the placement was put in place. `None` for a
    /// placement whose behaviour does not depend on flushes.
    ///
    /// # Errors
    /// When a part of the placement does not answer.
    fn flushed(&self) -> Result<Option<Vec<String>>, PlacementError> {
        Ok(None)
    }
    /// The placement's counters, which only grow, and its levels.
    ///
    /// # Errors
    /// When a part of the placement does not answer.
    fn counters(&self) -> Result<Value, PlacementError> {
        Ok(Value::Null)
    }
    /// Writes back all dirty data. For at most `limit_s` seconds, or until `stop` returns true, the
    /// devices keep their own speed. Then `hurry` is called, which makes them answer at once.
    /// `None` when the placement keeps no dirty data.
    ///
    /// # Errors
    /// When not all dirty data can be written back.
    fn drain(
        &self,
        _limit_s: f64,
        _hurry: &dyn Fn(),
        _stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        Ok(None)
    }
    /// Drops data that is cached in the machine's memory without being a part of the placement,
    /// such as FileStore's files in the page cache.
    fn forget(&self) {}
    /// Removes the placement after the SSD on which it depends has failed, as an operator would:
    /// afterwards the images have as much of the acknowledged writes as can be had. Returns what
    /// was done.
    ///
    /// # Errors
    /// When the placement cannot be removed.
    fn salvage(self: Box<Self>) -> Result<String, PlacementError> {
        self.undo().map(|()| "nothing".into())
    }
    /// Removes the placement; the images then have all acknowledged writes.
    ///
    /// # Errors
    /// When the placement cannot be removed.
    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        Ok(())
    }
}

/// Why a placement is not in place.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// A file or a process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A command failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The end of the command's error output.
        output: String,
    },
    /// The placement, or a part of it, reports that it is not what it should be.
    #[error("{placement} is not in place: {what}")]
    NotInPlace {
        /// The placement's name.
        placement: &'static str,
        /// What was found instead.
        what: String,
    },
    /// A guest did not do what it was asked for.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The cluster failed, or did not answer.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The access path to the images failed.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// All placements.
pub fn all() -> [&'static dyn Placement; 22] {
    [
        &store::BLUESTORE_COLOCATED,
        &store::BLUESTORE_DBWAL,
        &store::FILESTORE_COLOCATED,
        &store::FILESTORE_JOURNAL,
        &alloc::ALLOC_4K,
        &alloc::ALLOC_16K,
        &tier::CACHE_TIER,
        &device::OSD_PASSTHROUGH,
        &device::OSD_TIDEPOOL,
        &guest::OSD_GUEST,
        &guest::OSD_BCACHE,
        &guest::OSD_BCACHE_DEFAULT,
        &guest::OSD_WRITECACHE,
        &guest::OSD_GUEST_TIDEPOOL,
        &guest::OSD_GUEST_ON_SSD,
        &device::OSD_ON_SSD,
        &client::HOST_TIDEPOOL,
        &replicated::HOST_TIDEPOOL_REPLICATED,
        &client::LIBRBD_CACHE,
        &client::SSD_RAW,
        &null::ISCSI_NULL,
        &null::GUEST_NULL,
    ]
}

/// Checks whether a placement is possible on this machine, and with a release of Ceph if one is
/// given.
///
/// # Errors
/// The reason why it is not, in one line.
pub fn probe(placement: &dyn Placement, ceph: Option<u32>) -> Result<(), String> {
    ceph.map_or(Ok(()), |ceph| placement.probe_release(ceph))?;
    placement.probe()
}

/// Runs a command to its end.
fn run(command: &mut std::process::Command) -> Result<(), PlacementError> {
    let line = format!("{command:?}").replace('"', "");
    let output = command.stdin(std::process::Stdio::null()).output();
    let output = output.map_err(failed(format!("cannot run `{line}`")))?;
    if output.status.success() {
        return Ok(());
    }
    let errors =
        String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string();
    Err(PlacementError::Command { command: line, output: errors })
}

/// Turns an I/O error into a [`PlacementError`] that says what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> PlacementError {
    let what = what.into();
    |source| PlacementError::Io { what, source }
}

/// Waits until `there` returns true, for at most 30 seconds.
fn wait(what: &Path, mut there: impl FnMut() -> bool) -> Result<(), PlacementError> {
    let start = std::time::Instant::now();
    while !there() {
        if start.elapsed() > std::time::Duration::from_secs(30) {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(failed(format!("{} does not appear", what.display()))(source));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
}
