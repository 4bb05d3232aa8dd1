//! Where an SSD can stand. Each place is a [`Placement`]: it says whether it is possible here, puts itself in place, shows that
//! it is, and goes again.
//!
//! They lie in layers, and one of each layer goes together with the others: below the OSDs' data devices, as the OSDs' store, in what that
//! was made with, and between client and cluster.

mod alloc;
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
use crate::cluster::{Cluster, ClusterError, InGuest, Store};
use crate::fio::Endpoint;
use crate::guest::GuestError;
use crate::network::{HostNode, Namespace, Network};
use crate::process::need;
use crate::results::{Drained, Durability};

/// The layer that a placement is in, from the media up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// Between an OSD and its data device.
    Device,
    /// Between the images' pool and its clients, inside the cluster.
    Tier,
    /// How OSDs keep their data.
    Store,
    /// What their store was made with, and keeps.
    Format,
    /// Between the client and the cluster.
    Client,
}

impl Layer {
    /// Those below the cluster.
    pub const BELOW: [Layer; 4] = [Layer::Device, Layer::Tier, Layer::Store, Layer::Format];
}

/// How a placement wants the SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ssd {
    /// Not at all.
    Unused,
    /// A partition for each OSD.
    Partitions,
    /// Room for one file.
    File,
}

/// The device that a placement stands on, and falls with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The SSD in a hypervisor.
    HostSsd,
    /// The SSD in a server with OSDs.
    ServerSsd,
    /// A disk of an OSD: it stands on no SSD.
    Disk,
}

/// A place for an SSD.
pub trait Placement: Debug + Sync {
    /// Its name in suites.
    fn name(&self) -> &'static str;
    /// What it is, in a few words.
    fn what(&self) -> &'static str;
    /// Where it is.
    fn layer(&self) -> Layer;
    /// What it wants of the SSD.
    fn ssd(&self) -> Ssd {
        Ssd::Unused
    }
    /// Least number of hypervisors that it needs.
    fn hosts_min(&self) -> u32 {
        1
    }
    /// OSDs have BlueStore.
    fn is_bluestore(&self) -> bool {
        false
    }
    /// OSDs have their data on the SSD's class: a bound of what an SSD in a server can do.
    fn disks_are_ssds(&self) -> bool {
        false
    }
    /// Until the cluster has a write it is on two hosts.
    fn keeps_two_copies(&self) -> bool {
        false
    }
    /// Wants the OSD's journal on its data disk.
    fn journal_on_disk(&self) -> bool {
        false
    }
    /// What is written through it is safer from nothing than this.
    fn durability(&self) -> Durability {
        Durability::Replicated
    }
    /// OSDs are in guests, which need a network.
    fn in_guests(&self) -> bool {
        false
    }
    /// It mounts what OSDs have their data on, so that OSDs can be nowhere else.
    fn mounts_disks(&self) -> bool {
        false
    }
    /// It keeps blocks that have been read.
    fn caches_reads(&self) -> bool {
        false
    }
    /// It does so in memory, so that no device is asked for them.
    fn caches_in_memory(&self) -> bool {
        false
    }
    /// What clients read through it is read by no device.
    fn asks_no_device(&self) -> bool {
        self.caches_in_memory()
    }
    /// The path by which it reaches images where a workload asks for `access`: that one, unless it stands on a way of its own.
    ///
    /// # Errors
    /// It cannot stand on that path: why, in one line.
    fn path(&self, access: Access) -> Result<Access, String> {
        Ok(access)
    }
    /// What an operator has to do when the SSD that it stands on has died.
    fn mend(&self) -> &'static str {
        "replace the SSD, and make each OSD anew that stood on it"
    }
    /// Says in one line why it is not possible on this machine.
    ///
    /// # Errors
    /// That line.
    fn probe(&self) -> Result<(), String> {
        Ok(())
    }
    /// Says in one line why that release of Ceph does not have it.
    ///
    /// # Errors
    /// That line.
    fn probe_release(&self, _ceph: u32) -> Result<(), String> {
        Ok(())
    }
    /// Puts itself in place.
    ///
    /// # Errors
    /// When it cannot; nothing is left of it then.
    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError>;
}

/// What a placement finds, and changes, when it is put in place.
#[derive(Debug)]
pub struct Ground {
    /// The program `tidepool`.
    pub program: PathBuf,
    /// A directory for its files, on no emulated device.
    pub directory: PathBuf,
    /// The OSDs to be; a placement that has more of them adds its own.
    pub slots: Vec<Slot>,
    /// Copies of each object.
    pub replicas: u32,
    /// How they keep their data, in the order of `slots`; a store placement fills this in.
    pub stores: Vec<Store>,
    /// Lines for the global section of ceph.conf.
    pub ceph_conf: Vec<String>,
    /// The network of the cluster to be, if it has one.
    pub network: Option<Arc<Network>>,
    /// OSDs that are to run in guests, by their numbers; a placement below them fills this in.
    pub guests: BTreeMap<u32, InGuest>,
    /// The SSD of each server with OSDs, if servers have any.
    pub server_ssds: Vec<SsdShare>,
    /// The hypervisors, once the cluster is up.
    pub hosts: Vec<Host>,
    /// How many of them have clients: images are dealt round them.
    pub hypervisors: u32,
    /// ceph.conf for clients, once the cluster is up.
    pub client_conf: PathBuf,
    /// The images, once the cluster is up.
    pub images: Vec<String>,
    /// The machine of the monitor, where gateways are; `None` where there is no network.
    pub gateway: Option<HostNode>,
    /// URIs under which a cache on the hypervisor reaches images, by these, where the path to them is another one than librbd's.
    pub uris: BTreeMap<String, String>,
}

/// An SSD, and what of it is for a placement.
#[derive(Debug, Clone)]
pub struct SsdShare {
    /// Its directory.
    pub directory: PathBuf,
    /// Bytes for the placement.
    pub bytes: u64,
}

/// A hypervisor.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its SSD, if it has one.
    pub ssd: Option<SsdShare>,
    /// Its place in the cluster's network, if that has one.
    pub node: Option<HostNode>,
}

impl Ground {
    /// The number of the hypervisor whose clients have an image.
    pub fn host_of(&self, image: &str) -> usize {
        let number = self.images.iter().position(|known| known == image).unwrap_or(0);
        number % self.hypervisors.max(1) as usize
    }

    /// The images of a hypervisor's clients.
    pub fn images_of(&self, host: usize) -> impl Iterator<Item = &String> {
        self.images.iter().filter(move |image| self.host_of(image) == host)
    }

    /// A hypervisor's SSD, for a placement.
    ///
    /// # Errors
    /// It has none.
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

    /// What an access path finds here.
    pub(crate) fn site(&self) -> Site {
        let image = |name: &String| {
            let host = self.host_of(name);
            Image { name: name.clone(), host, node: self.hosts.get(host).and_then(|host| host.node.clone()) }
        };
        Site {
            directory: self.directory.clone(),
            conf: self.client_conf.clone(),
            gateway: self.gateway.clone(),
            images: self.images.iter().map(image).collect(),
        }
    }

    /// Where a hypervisor's programs run, if not in the machine's own network.
    pub fn namespace(&self, host: usize) -> Option<Namespace> {
        Some(self.hosts.get(host)?.node.as_ref()?.namespace.clone())
    }
}

/// What an OSD gets.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Its part of the disk.
    pub data: PathBuf,
    /// A part of the same disk for its journal, if its store wants that.
    pub journal: Option<PathBuf>,
    /// Its partition of the SSD, if its store wants one.
    pub ssd: Option<PathBuf>,
    /// Size of the journal or of the SSD's partition in bytes.
    pub fast_bytes: u64,
    /// The disk turns.
    pub rotational: bool,
    /// The server that it is in.
    pub server: usize,
}

/// A placement that is in place. It ends when it is dropped.
pub trait Applied: Debug {
    /// The cluster is up, and has no images yet: does to it what belongs to the placement.
    ///
    /// # Errors
    /// When Ceph refuses.
    fn attach(&mut self, _cluster: &mut Cluster) -> Result<(), PlacementError> {
        Ok(())
    }
    /// Shows that it is in place: what the parts say of themselves.
    ///
    /// # Errors
    /// When it is not.
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError>;
    /// Shows that it works as it did when it was put in place: asked after each measurement, before anything else is done.
    ///
    /// # Errors
    /// When it does not, or did not for a while.
    fn holds(&self) -> Result<(), PlacementError> {
        Ok(())
    }
    /// Images are filled and what is measured comes next: a cache begins only now, as one that is new in front of old disks.
    ///
    /// # Errors
    /// When it cannot begin.
    fn filled(&self) -> Result<(), PlacementError> {
        Ok(())
    }
    /// What is read or written from now on, until the same is said with `false`, brings the caches into a state and is not measured: one that
    /// lets some requests past it takes them all meanwhile.
    ///
    /// # Errors
    /// When it cannot.
    fn prepares(&self, _begins: bool) -> Result<(), PlacementError> {
        Ok(())
    }
    /// How clients reach an image through it, if it is between them and the cluster.
    fn endpoint(&self, _image: &str) -> Option<Endpoint> {
        None
    }
    /// Images whose clients have flushed since it was put in place, where it remembers that and acts upon it.
    ///
    /// # Errors
    /// When it does not answer.
    fn flushed(&self) -> Result<Option<Vec<String>>, PlacementError> {
        Ok(None)
    }
    /// What it counts; numbers that only grow, and levels.
    ///
    /// # Errors
    /// When it does not answer.
    fn counters(&self) -> Result<Value, PlacementError> {
        Ok(Value::Null)
    }
    /// Writes back what it has not yet written back; for `limit_s` seconds as fast as the devices are, then, or when `stop` says so,
    /// `hurry` is called, which makes them fast. `None` when it keeps nothing back.
    ///
    /// # Errors
    /// When it cannot.
    fn drain(
        &self,
        _limit_s: f64,
        _hurry: &dyn Fn(),
        _stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        Ok(None)
    }
    /// Forgets what it has only in memory of the machine, such as a page cache that nobody has named.
    fn forget(&self) {}
    /// The SSD that it stands on has died. Takes it out of the way, as an operator would, so that the images have what can be had of all that
    /// was acknowledged. Returns what was done.
    ///
    /// # Errors
    /// When it does not go.
    fn salvage(self: Box<Self>) -> Result<String, PlacementError> {
        self.undo().map(|()| "nothing".into())
    }
    /// Takes it out of the way; the images then have everything.
    ///
    /// # Errors
    /// When it does not go.
    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        Ok(())
    }
}

/// Why a placement is not in place.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// A file or a process could not be had.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A command failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The end of its error output.
        output: String,
    },
    /// It says of itself that it is something else.
    #[error("{placement} is not in place: {what}")]
    NotInPlace {
        /// The placement.
        placement: &'static str,
        /// What was seen instead.
        what: String,
    },
    /// A guest did not do what it was to.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The cluster did not answer.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The path to the images is not there.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// What makes another name of a placement: `NAME+again` is the same, on clusters of its own.
pub const AGAIN: &str = "again";

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

/// One placement of each layer, and the class of the SSD: what a suite writes as `NAME[+NAME…][@CLASS]`.
#[derive(Debug, Clone)]
pub struct Arrangement {
    /// From the media up; the store is always among them.
    pub placements: Vec<&'static dyn Placement>,
    /// Class of the SSD, if it is not the usual one.
    pub ssd: Option<String>,
    /// It is there to be compared with itself.
    pub again: bool,
}

impl Arrangement {
    /// Reads it from a suite.
    ///
    /// # Errors
    /// One line that says what is wrong.
    pub fn parse(text: &str) -> Result<Arrangement, String> {
        let (names, ssd) = match text.split_once('@') {
            Some((names, ssd)) => (names, Some(ssd.to_string())),
            None => (text, None),
        };
        let mut placements = Vec::new();
        let again = names.split('+').any(|name| name == AGAIN);
        for name in names.split('+').filter(|name| *name != AGAIN) {
            let found = all().into_iter().find(|placement| placement.name() == name).ok_or_else(|| {
                let known: Vec<&str> = all().iter().map(|placement| placement.name()).collect();
                format!("no placement {name}; there are {}", known.join(", "))
            })?;
            placements.push(found);
        }
        if !placements.iter().any(|placement| placement.layer() == Layer::Store) {
            placements.push(&store::BLUESTORE_COLOCATED);
        }
        placements.sort_by_key(|placement| placement.layer());
        if let Some(pair) = placements.windows(2).find(|pair| pair[0].layer() == pair[1].layer()) {
            return Err(format!("{text}: {} and {} are in the same place", pair[0].name(), pair[1].name()));
        }
        if let Some(format) = placements.iter().find(|placement| placement.layer() == Layer::Format)
            && !placements.iter().any(|placement| placement.is_bluestore())
        {
            return Err(format!("{text}: only BlueStore has {}", format.name()));
        }
        let tier = placements.iter().find(|placement| placement.layer() == Layer::Tier);
        let other = placements.iter().find(|placement| {
            let parts = placement.layer() == Layer::Store && placement.ssd() != Ssd::Unused;
            placement.in_guests() || placement.mounts_disks() || parts
        });
        if let Some((tier, other)) = tier.zip(other) {
            return Err(format!(
                "{text}: {} has OSDs of its own, of BlueStore, and those of {} are others",
                tier.name(),
                other.name()
            ));
        }
        let guests = placements.iter().find(|placement| placement.in_guests());
        let mounts = placements.iter().find(|placement| placement.mounts_disks());
        if let Some((guests, mounts)) = guests.zip(mounts) {
            return Err(format!(
                "{text}: {} is mounted by this machine's kernel, and with {} OSDs are in guests",
                mounts.name(),
                guests.name()
            ));
        }
        Ok(Arrangement { placements, ssd, again })
    }

    /// The ones in some layers.
    pub fn within(&self, layers: &[Layer]) -> impl Iterator<Item = &'static dyn Placement> {
        self.placements.iter().copied().filter(move |placement| layers.contains(&placement.layer()))
    }

    /// How many of its placements share an SSD: those in a server, for a hypervisor's SSD has one user.
    pub fn ssd_shares(&self) -> u32 {
        let below = self.within(&Layer::BELOW);
        (below.filter(|placement| placement.ssd() != Ssd::Unused).count() as u32).max(1)
    }

    /// Says in one line why it is not possible here with that release of Ceph, if there is one.
    ///
    /// # Errors
    /// That line.
    pub fn probe(&self, ceph: Option<u32>) -> Result<(), String> {
        self.placements.iter().try_for_each(|placement| probe(*placement, ceph))
    }

    /// What a write through all of them over a path is safe from, with so many copies in the cluster.
    pub fn durability(&self, replicas: u32, access: Access) -> Durability {
        if access.is_volatile() {
            return Durability::Volatile;
        }
        let cluster = if replicas > 1 { Durability::Replicated } else { Durability::OneCopy };
        let found = self.placements.iter().map(|placement| placement.durability()).fold(cluster, Ord::min);
        match found {
            Durability::OneCopy if self.placements.iter().any(|placement| placement.keeps_two_copies()) => {
                Durability::TwoCopies
            }
            found => found,
        }
    }

    /// It has a cache on an SSD in the servers.
    pub fn caches_below(&self) -> bool {
        self.within(&[Layer::Device, Layer::Tier]).any(|below| below.ssd() == Ssd::File)
    }

    /// Its OSDs are in guests.
    pub fn in_guests(&self) -> bool {
        self.placements.iter().any(|placement| placement.in_guests())
    }

    /// The one between client and cluster.
    pub fn front(&self) -> Option<&'static dyn Placement> {
        self.within(&[Layer::Client]).next()
    }

    /// The path by which it reaches images where a workload asks for `access`.
    ///
    /// # Errors
    /// It cannot stand on that path, or the path is not possible here: why, in one line.
    pub fn path(&self, access: Access) -> Result<Access, String> {
        let path = self.front().map_or(Ok(access), |front| front.path(access))?;
        path.probe().map(|()| path)
    }

    /// The device that it stands on, and falls with: the nearest to its clients.
    pub fn base(&self) -> Base {
        match self.on_ssd().map(|placement| placement.layer()) {
            Some(Layer::Client) => Base::HostSsd,
            Some(Layer::Device | Layer::Tier | Layer::Store | Layer::Format) => Base::ServerSsd,
            None => Base::Disk,
        }
    }

    /// What an operator has to do when that device has died.
    pub fn mend(&self) -> &'static str {
        self.on_ssd().map_or("replace the disk, and make its OSD anew", |placement| placement.mend())
    }

    /// The part that stands on an SSD, the nearest to its clients.
    fn on_ssd(&self) -> Option<&'static dyn Placement> {
        let layers = [Layer::Client, Layer::Tier, Layer::Device, Layer::Store];
        layers.iter().find_map(|layer| self.within(&[*layer]).find(|part| part.ssd() != Ssd::Unused))
    }

    /// Whether what clients read is read by no device.
    pub fn asks_no_device(&self) -> bool {
        self.placements.iter().any(|placement| placement.asks_no_device())
    }

    /// Whether something of it keeps in memory what was read.
    pub fn caches_in_memory(&self) -> bool {
        self.placements.iter().any(|placement| placement.caches_in_memory())
    }

    /// Whether something of it keeps what was read.
    pub fn caches_reads(&self) -> bool {
        self.placements.iter().any(|placement| placement.caches_reads())
    }
}

/// Says in one line why a placement is not possible here with that release of Ceph, if there is one.
///
/// # Errors
/// That line.
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
    let errors = String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string();
    Err(PlacementError::Command { command: line, output: errors })
}

/// An error of the system, with what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> PlacementError {
    let what = what.into();
    |source| PlacementError::Io { what, source }
}

/// Waits until `there` is true, for at most half a minute.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_each_layer_goes_together() {
        let names = |text: &str| {
            let arrangement = Arrangement::parse(text).expect(text);
            arrangement.placements.iter().map(|placement| placement.name()).collect::<Vec<_>>()
        };
        assert_eq!(names("host-tidepool"), ["bluestore-colocated", "host-tidepool"]);
        assert_eq!(
            names("host-tidepool+filestore-journal+osd-tidepool"),
            ["osd-tidepool", "filestore-journal", "host-tidepool"]
        );
        assert_eq!(Arrangement::parse("filestore-journal@x").expect("a class").ssd.as_deref(), Some("x"));
        assert_eq!(names("host-tidepool+again"), names("host-tidepool"));
        assert_eq!(
            names("host-tidepool+alloc-16k+bluestore-dbwal"),
            ["bluestore-dbwal", "alloc-16k", "host-tidepool"]
        );
        let shares = |text: &str| Arrangement::parse(text).expect(text).ssd_shares();
        assert_eq!(
            [
                "librbd-cache",
                "host-tidepool+osd-tidepool",
                "filestore-journal+osd-tidepool",
                "cache-tier+osd-tidepool"
            ]
            .map(shares),
            [1, 1, 2, 2]
        );
        for (text, wanted) in [
            ("nothing", "no placement"),
            ("host-tidepool+librbd-cache", "same place"),
            ("alloc-4k+alloc-16k", "same place"),
            ("filestore-journal+alloc-16k", "only BlueStore has alloc-16k"),
            ("", "no placement"),
            ("filestore-journal+osd-bcache", "OSDs are in guests"),
            ("filestore-colocated+cache-tier", "has OSDs of its own"),
            ("osd-guest+cache-tier", "has OSDs of its own"),
            ("bluestore-dbwal+cache-tier", "has OSDs of its own"),
        ] {
            let error = Arrangement::parse(text).expect_err(text);
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_release_that_lacks_a_part_has_none_of_the_arrangement() {
        let probe = |text: &str, ceph| Arrangement::parse(text).expect(text).probe(Some(ceph));
        let refused = probe("host-tidepool+filestore-journal", 18).expect_err("18 has no FileStore");
        assert!(refused.contains("Ceph 18 has no FileStore"), "{refused}");
        assert!(!probe("filestore-journal", 17).is_err_and(|why| why.contains("Ceph")));
        assert_eq!(probe("bluestore-dbwal", 18), Ok(()));
    }

    #[test]
    fn a_placement_falls_with_the_device_that_it_stands_on() {
        for (text, base, mend) in [
            ("bluestore-colocated", Base::Disk, "replace the disk"),
            ("osd-passthrough", Base::Disk, "replace the disk"),
            ("librbd-cache", Base::Disk, "replace the disk"),
            ("bluestore-dbwal", Base::ServerSsd, "OSD anew"),
            ("filestore-journal", Base::ServerSsd, "OSD anew"),
            ("osd-tidepool", Base::ServerSsd, "OSD anew"),
            ("cache-tier", Base::ServerSsd, "OSD anew"),
            ("host-tidepool", Base::HostSsd, "tidepool recover"),
            ("host-tidepool-replicated", Base::HostSsd, "replace the SSD"),
            ("host-tidepool+osd-tidepool", Base::HostSsd, "tidepool recover"),
        ] {
            let arrangement = Arrangement::parse(text).expect(text);
            assert_eq!(arrangement.base(), base, "{text}");
            assert!(arrangement.mend().contains(mend), "{text}: {}", arrangement.mend());
        }
    }

    #[test]
    fn the_weakest_part_decides_what_a_write_is_safe_from() {
        let over =
            |text: &str, replicas, access| Arrangement::parse(text).expect(text).durability(replicas, access);
        assert_eq!(over("filestore-journal", 3, Access::KrbdWriteback), Durability::Replicated);
        assert_eq!(over("filestore-journal", 3, Access::KrbdUnsafe), Durability::Volatile);
        let durability = |text: &str, replicas| over(text, replicas, Access::Librbd);
        assert_eq!(durability("bluestore-dbwal", 1), Durability::OneCopy);
        assert_eq!(durability("bluestore-dbwal", 2), Durability::Replicated);
        assert_eq!(durability("host-tidepool", 2), Durability::OneCopy);
        assert_eq!(durability("host-tidepool-replicated", 1), Durability::TwoCopies);
        assert_eq!(durability("host-tidepool-replicated+osd-tidepool", 2), Durability::Replicated);
        assert_eq!(durability("librbd-cache", 2), Durability::Volatile);
        assert_eq!(durability("osd-tidepool", 3), Durability::Replicated);
    }
}
