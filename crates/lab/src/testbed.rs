//! A testbed: a cluster on emulated devices, with SSDs where the placements need them.

mod devices;
mod layout;
mod slow;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::access::{Access, Guests, InPlace};
use crate::collect::hops::Counters;
use crate::placement::{
    Applied, Arrangement, Base, Ground, Host, Layer, Placement, PlacementError, SsdShare,
};
use crate::results::Drained;
use devices::{Device, devices, disk, server_ssd, slots};
pub use layout::{HOSTS_MAX, Layout, Ssds};
pub use slow::{Added, Slow};
use tidepool_cluster::ceph::{Cluster, ClusterOptions, Servers};
use tidepool_cluster::device::{Counts, Emulated};
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::network::{HostNode, Namespace, Network, Transit};
use tidepool_cluster::scratch::Scratch;

/// Names of the SSDs in the hypervisors, after the hypervisors' nodes in the network.
pub(crate) const HOST_SSDS: [&str; HOSTS_MAX as usize] = ["client-ssd", "peer-ssd"];
/// Line of the clients' ceph.conf. librbd's own cache would hide the path that is measured.
pub(crate) const NO_CACHE: &str = "rbd cache = false\n";

/// A client's access to the pool of a cluster.
#[derive(Debug, Clone)]
pub struct Entrance {
    /// Path of the clients' ceph.conf.
    pub conf: PathBuf,
    /// The client's network namespace, if the cluster has its own network.
    pub client: Option<Namespace>,
}

/// A running testbed. Dropping it ends everything and removes its files.
#[derive(Debug)]
pub struct Testbed {
    // Dropped in this order: guests with clients, the placement in front of Ceph, the access path
    // to Ceph, Ceph, the placements below Ceph, the devices, the devices' files.
    guests: Option<Guests>,
    front: Option<(&'static dyn Placement, Box<dyn Applied>)>,
    path: Option<(Access, Box<dyn InPlace>)>,
    cluster: Cluster,
    below: Vec<(&'static str, Box<dyn Applied>)>,
    devices: Vec<Device>,
    ground: Ground,
    shares: SharesBytes,
    slowed_by: u32,
    delay: Option<Duration>,
    added: Option<Added>,
    scratch: Scratch,
}

/// What a placement gets of an SSD, in bytes, by the place of the SSD.
#[derive(Debug, Clone, Copy)]
struct SharesBytes {
    server: u64,
    host: u64,
}

impl Testbed {
    /// Makes the devices, puts the placements below the cluster in place and starts the cluster,
    /// all below `parent`. The devices answer at once until [`Testbed::emulate`]. `program` is the
    /// path of `tidepool`.
    ///
    /// # Errors
    /// If a part of the testbed cannot be made. Nothing remains then.
    pub fn up(
        parent: &Path,
        program: &Path,
        layout: &Layout,
        arrangement: &Arrangement,
    ) -> Result<Testbed, PlacementError> {
        let scratch =
            Scratch::new_in(parent, "testbed").map_err(failed("cannot make a directory"))?;
        let below: Vec<_> = arrangement.within(&Layer::BELOW).collect();
        let shares =
            SharesBytes { server: layout.server_share_bytes(), host: layout.host_share_bytes() };
        let devices = devices(&scratch, layout, &below, shares.server)?;
        let delay = layout.delay.map(|delay| delay * layout.slowed_by);
        let servers = layout.nodes();
        let peer = layout.hypervisors.max(layout.ssds.hosts) > 1;
        // The network is made before the cluster, because guests are in the network before the
        // cluster exists.
        let network = servers.as_ref().map(|servers| servers.network(peer, delay).map(Arc::new));
        let network = network.transpose()?;
        let mut ground = Ground {
            network: network.clone(),
            guests: BTreeMap::new(),
            program: program.into(),
            directory: scratch.path().into(),
            slots: slots(&devices, layout, &below),
            replicas: layout.replicas,
            stores: Vec::new(),
            ceph_conf: layout.ceph_conf.clone(),
            server_ssds: (0..layout.servers.max(1))
                .map_while(|server| ssd_share(&devices, &server_ssd(server), shares.server))
                .collect(),
            hosts: Vec::new(),
            hypervisors: layout.hypervisors.clamp(1, HOSTS_MAX),
            client_conf: PathBuf::new(),
            images: Vec::new(),
            gateway: None,
            uris: BTreeMap::new(),
        };
        let mut applied = Vec::new();
        for placement in below {
            applied.push((placement.name(), placement.apply(&mut ground)?));
        }
        // The placement that was applied last is removed first.
        applied.reverse();
        // Placements may have added OSDs, which are included here.
        let of_osds = ground.slots.iter().map(|slot| slot.server as u32).collect();
        let servers = servers.map(|servers| Servers { of_osds, ..servers });
        let options = ClusterOptions {
            parent: Some(parent.to_path_buf()),
            stores: ground.stores.clone(),
            replicas: layout.replicas,
            extra: ground.ceph_conf.clone(),
            servers,
            network,
            guests: ground.guests.clone(),
            peer,
            delay,
            ..ClusterOptions::default()
        };
        debug_assert_eq!(options.stores.len(), ground.slots.len());
        let mut cluster = Cluster::up(&options)?;
        // In the order from the media upwards.
        for (_, placement) in applied.iter_mut().rev() {
            placement.attach(&mut cluster)?;
        }
        let mut testbed = Testbed {
            guests: None,
            front: None,
            path: None,
            cluster,
            below: applied,
            devices,
            ground,
            shares,
            slowed_by: layout.slowed_by,
            delay: layout.delay,
            added: None,
            scratch,
        };
        testbed.open(layout.hypervisors.max(layout.ssds.hosts).clamp(1, HOSTS_MAX))?;
        Ok(testbed)
    }

    /// Tells the placements between clients and the cluster where the cluster is, and what this
    /// number of hypervisors has.
    fn open(&mut self, hosts: u32) -> Result<(), PlacementError> {
        let (cluster, ground) = (&self.cluster, &mut self.ground);
        let text = fs::read_to_string(cluster.conf()).map_err(failed("cannot read ceph.conf"))?;
        ground.client_conf = self.scratch.join("client.conf");
        let nodes: Vec<HostNode> =
            cluster.network().into_iter().flat_map(Network::hosts).map(HostNode::of).collect();
        let host = |(number, name): (usize, &&str)| Host {
            ssd: ssd_share(&self.devices, name, self.shares.host),
            node: nodes.get(number).cloned(),
        };
        ground.gateway = cluster.network().map(|network| HostNode::of(network.monitor()));
        ground.hosts = HOST_SSDS.iter().enumerate().take(hosts as usize).map(host).collect();
        fs::write(&ground.client_conf, format!("{text}\n[client]\n{NO_CACHE}"))
            .map_err(failed("cannot write the client's ceph.conf"))
    }

    /// Makes the devices as slow as they are to be, or lets them answer at once, for filling
    /// images.
    pub fn emulate(&self, slow: bool) {
        for Device { emulated, .. } in &self.devices {
            emulated.pause(!slow);
        }
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Stops Ceph from starting scrubs while something is measured.
    ///
    /// # Errors
    /// If Ceph refuses.
    pub fn calm(&self) -> Result<(), PlacementError> {
        for flag in ["noscrub", "nodeep-scrub"] {
            self.cluster.ceph(&["osd", "set", flag])?;
        }
        Ok(())
    }

    /// Whether an OSD is missing or does not answer.
    pub fn is_broken(&self) -> bool {
        let sockets = self.cluster.osd_sockets();
        sockets.len() < self.ground.slots.len()
            || sockets.iter().any(|socket| Counters::now([socket.as_path()]).is_err())
    }

    /// The cluster, to change it.
    pub fn cluster_mut(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    /// Devices by name.
    pub fn devices(&self) -> impl Iterator<Item = (&str, &Emulated)> {
        self.devices.iter().map(|device| (device.name.as_str(), &device.emulated))
    }

    /// The device on which a placement stands; the first one if several are alike.
    pub fn base(&self, arrangement: &Arrangement) -> Option<(&str, &Emulated)> {
        let wanted = match arrangement.base() {
            Base::HostSsd => HOST_SSDS[0].to_string(),
            Base::ServerSsd => server_ssd(0),
            Base::Disk => disk(0),
        };
        self.devices().find(|(name, _)| *name == wanted)
    }

    /// Gives the images back after the device of the placement in front of the cluster has died, as
    /// an operator would, with all acknowledged writes that can be recovered. Returns what was
    /// done; `None` if there is no placement in front.
    ///
    /// # Errors
    /// If the placement cannot give the images back. It is then unknown what the images lack.
    pub fn salvage(&mut self) -> Result<Option<String>, PlacementError> {
        self.front.take().map(|(_, front)| front.salvage()).transpose()
    }

    /// Transit times of packets between nodes, if they are known.
    pub fn transit(&self) -> Option<Transit> {
        self.cluster.network().and_then(Network::transit)
    }

    /// Counts of each device's commands, by the device's name.
    pub fn counts(&self) -> BTreeMap<String, Counts> {
        self.devices().map(|(name, device)| (name.to_string(), device.counts())).collect()
    }

    /// Makes an image of `bytes`. Clients have it from now on.
    ///
    /// # Errors
    /// If Ceph refuses.
    pub fn image(&mut self, name: &str, bytes: u64) -> Result<(), PlacementError> {
        self.cluster.rbd_create(name, bytes)?;
        self.ground.images.push(name.into());
        Ok(())
    }

    /// The access path of the clients.
    pub fn access(&self) -> Access {
        let path = || self.path.as_ref().map_or(Access::Librbd, |(access, _)| *access);
        self.guests.as_ref().map_or_else(path, Guests::access)
    }

    /// Switches the access path of the clients, with nothing in front of the cluster. Returns the
    /// proof, or `None` if the path is the current one.
    ///
    /// # Errors
    /// If the current path or placement cannot be removed, or the new path cannot be put in place.
    pub fn reach(&mut self, access: Access) -> Result<Option<Value>, PlacementError> {
        if self.access() == access {
            return Ok(None);
        }
        if let Some(mut guests) = self.guests.take() {
            guests.leave()?;
        }
        self.front(None)?;
        self.ground.uris.clear();
        if let Some((_, path)) = self.path.take() {
            path.undo()?;
        }
        let mut proof = Value::Null;
        if let Some(path) = access.apply(&self.ground.site())? {
            proof = path.verify()?;
            let uri = |image: &String| Some((image.clone(), path.uri(image)?));
            self.ground.uris = self.ground.images.iter().filter_map(uri).collect();
            self.path = Some((access, path));
        }
        if access.is_in_guests() {
            self.guests = Some(Guests::prepare(access, self.ground.site())?);
            proof = self.enter()?;
        }
        Ok(Some(proof))
    }

    /// Boots guests, if clients are in guests. A guest whose kernel does not map the image has its
    /// disk on the placement or the path in front of the image, if there is one. Returns the proof.
    fn enter(&mut self) -> Result<Value, PlacementError> {
        let Some(mut guests) = self.guests.take() else { return Ok(Value::Null) };
        guests.enter(&|image| Some(self.outside(image)))?;
        let proof = guests.verify()?;
        self.guests = Some(guests);
        Ok(proof)
    }

    /// Puts a placement between the clients and the cluster, in place of the current one. Returns
    /// the proof.
    ///
    /// # Errors
    /// If the current one cannot be removed, or the new one cannot be put in place.
    pub fn front(
        &mut self,
        placement: Option<&'static dyn Placement>,
    ) -> Result<Value, PlacementError> {
        if placement.is_none() && self.front.is_none() {
            return Ok(Value::Null);
        }
        if let Some(guests) = &mut self.guests {
            guests.leave()?;
        }
        if let Some((_, front)) = self.front.take() {
            front.undo()?;
        }
        let mut proof = Value::Null;
        if let Some(placement) = placement {
            let front = placement.apply(&mut self.ground)?;
            proof = front.verify(&self.cluster)?;
            self.front = Some((placement, front));
        }
        self.enter()?;
        Ok(proof)
    }

    /// Checks that the placements in front of and below the cluster, the guests and the access path
    /// have worked as they should all the time since they were put in place.
    ///
    /// # Errors
    /// If one of them has not.
    pub fn holds(&self) -> Result<(), PlacementError> {
        self.applied().try_for_each(|(_, applied)| applied.holds())?;
        self.guests.as_ref().map_or(Ok(()), Guests::holds)?;
        self.path.as_ref().map_or(Ok(()), |(_, path)| Ok(path.holds()?))
    }

    /// Starts the caches below the cluster. To be called when the images are filled.
    ///
    /// # Errors
    /// If a cache cannot start.
    pub fn filled(&self) -> Result<(), PlacementError> {
        self.below.iter().try_for_each(|(_, applied)| applied.filled())
    }

    /// Does something that brings caches into a state and is not measured. Meanwhile the caches
    /// below the cluster take all requests.
    ///
    /// # Errors
    /// If a cache refuses, or the action fails.
    pub fn prepare<E: From<PlacementError>>(
        &self,
        what: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let below =
            |begins| self.below.iter().try_for_each(|(_, applied)| applied.prepares(begins));
        below(true)?;
        what()?;
        Ok(below(false)?)
    }

    /// Returns the proof that the placements below the cluster are in place.
    ///
    /// # Errors
    /// If one of them is not in place.
    pub fn verify(&self) -> Result<Value, PlacementError> {
        let proof = self
            .below
            .iter()
            .map(|(name, applied)| Ok((name.to_string(), applied.verify(&self.cluster)?)));
        Ok(Value::Object(proof.collect::<Result<Map<_, _>, PlacementError>>()?))
    }

    /// How a client reaches an image.
    pub fn endpoint(&self, image: &str) -> Endpoint {
        let inside = self.guests.as_ref().and_then(|guests| guests.endpoint(image));
        inside.unwrap_or_else(|| self.outside(image))
    }

    /// How an image is reached from outside guests.
    pub(crate) fn outside(&self, image: &str) -> Endpoint {
        let front = self.front.as_ref().and_then(|(_, front)| front.endpoint(image));
        let path = || self.path.as_ref().and_then(|(_, path)| path.endpoint(image));
        front.or_else(path).unwrap_or_else(|| self.direct(image))
    }

    /// Images whose clients have flushed. The cache in front of the cluster remembers that; if the
    /// cache is in memory and clients are in guests, the guests' kernels have counted the flushes.
    /// `None` if nothing remembers them.
    ///
    /// # Errors
    /// If the cache or a guest does not answer.
    pub fn flushed(&self) -> Result<Option<Vec<String>>, PlacementError> {
        let Some((placement, front)) = &self.front else { return Ok(None) };
        match &self.guests {
            Some(guests) if placement.caches_in_memory() => Ok(Some(guests.flushed()?)),
            _ => front.flushed(),
        }
    }

    /// How a client reaches an image without the placement, path or guest in between.
    pub fn direct(&self, image: &str) -> Endpoint {
        let (conf, client) =
            (self.ground.client_conf.clone(), self.ground.namespace(self.ground.host_of(image)));
        Endpoint::Rbd { conf, image: image.into(), client }
    }

    /// How a client without an image reaches the pool. Clients are distributed over the hypervisors
    /// in turn, like images.
    pub fn entrance(&self, client: u32) -> Entrance {
        let host = client % self.ground.hypervisors.max(1);
        Entrance {
            conf: self.ground.client_conf.clone(),
            client: self.ground.namespace(host as usize),
        }
    }

    /// Bytes of the SSD in a server that each placement on it gets.
    pub fn server_share_bytes(&self) -> u64 {
        self.shares.server
    }

    /// Bytes of the SSD in a hypervisor that the placement on it gets.
    pub fn host_share_bytes(&self) -> u64 {
        self.shares.host
    }

    /// The counters of placements, by name, and of the access path, by its name. Placements without
    /// counters are left out.
    ///
    /// # Errors
    /// If one does not answer.
    pub fn counters(&self) -> Result<Map<String, Value>, PlacementError> {
        let mut counters = Map::new();
        if let Some((access, path)) = &self.path {
            counters.insert(access.name().into(), Value::Object(path.counters()?));
        }
        if let Some(guests) = &self.guests {
            counters.insert(guests.access().name().into(), Value::Object(guests.counters()?));
        }
        for (name, applied) in self.applied() {
            match applied.counters()? {
                Value::Null => {}
                found => drop(counters.insert(name.to_string(), found)),
            }
        }
        Ok(counters)
    }

    /// Makes caches write back what they hold back: for `limit_s` seconds in all at the devices'
    /// own speed, or until `stop` returns true, and the rest while devices answer at once. Devices
    /// go on answering at once afterwards. `None` if no placement is a cache that holds data back.
    ///
    /// # Errors
    /// If a cache cannot.
    pub fn drain(
        &self,
        limit_s: f64,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        let mut all: Option<Drained> = None;
        for (_, applied) in self.applied() {
            let spent = all.map_or(0.0, |all| all.seconds);
            let found = applied.drain((limit_s - spent).max(0.0), &|| self.emulate(false), stop);
            if found.is_err() {
                // If an OSD has ended, that is the cause.
                self.cluster.check_osds()?;
            }
            let Some(found) = found? else { continue };
            let before = all.unwrap_or(Drained { dirty_bytes: 0, seconds: 0.0, hurried_bytes: 0 });
            all = Some(Drained {
                dirty_bytes: before.dirty_bytes + found.dirty_bytes,
                seconds: before.seconds + found.seconds,
                hurried_bytes: before.hurried_bytes + found.hurried_bytes,
            });
        }
        self.emulate(false);
        for (_, applied) in self.applied() {
            applied.forget();
        }
        Ok(all)
    }

    /// Placements from the client downwards.
    fn applied(&self) -> impl Iterator<Item = (&'static str, &dyn Applied)> {
        let front =
            self.front.iter().map(|(placement, applied)| (placement.name(), applied.as_ref()));
        front.chain(self.below.iter().map(|(name, applied)| (*name, applied.as_ref())))
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // Data that is still to be written need not be written at the devices' own speed.
        self.emulate(false);
    }
}

/// A share of an SSD, by the name of its device. `None` if there is no such device.
fn ssd_share(devices: &[Device], name: &str, bytes: u64) -> Option<SsdShare> {
    let ssd = devices.iter().find(|device| device.name == name)?;
    Some(SsdShare { directory: ssd.emulated.directory().into(), bytes })
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> PlacementError {
    let what = what.into();
    |source| PlacementError::Io { what, source }
}
