//! Placements between the client and the cluster: a cache on the hypervisor's SSD, or in its
//! memory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::daemon::{self, Daemon, Rescue, Setup};
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed};
use crate::access::Access;
use crate::results::{Drained, Durability};
use crate::testbed::{HOSTS_MAX, NO_CACHE};
use tidepool_cluster::ceph::Cluster;
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::network::Namespace;

pub(super) static HOST_TIDEPOOL: Host = Host;
pub(super) static LIBRBD_CACHE: LibrbdCache = LibrbdCache;
pub(super) static SSD_RAW: Raw = Raw;

/// Tidepool on the hypervisor, with one copy of the data.
#[derive(Debug)]
pub(super) struct Host;

impl Placement for Host {
    fn name(&self) -> &'static str {
        "host-tidepool"
    }

    fn what(&self) -> &'static str {
        "a write-back cache on the SSD in the hypervisor, one copy"
    }

    fn layer(&self) -> Layer {
        Layer::Client
    }

    fn ssd(&self) -> Ssd {
        Ssd::File
    }

    fn durability(&self) -> Durability {
        Durability::OneCopy
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn path(&self, access: Access) -> Result<Access, String> {
        match access {
            // The cache is itself an NBD server on the hypervisor that uses librbd.
            Access::Nbd => Ok(Access::Librbd),
            access if access.maps() => Err(format!(
                "a kernel that maps an image goes past the cache on the hypervisor: none over {access}"
            )),
            other => Ok(other),
        }
    }

    fn mend(&self) -> &'static str {
        "stop the VMs, `tidepool recover IMAGE --accept-loss` for each image, replace the SSD"
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let hosts = 0..ground.hypervisors as usize;
        let mut options = vec!["--accept-loss=60m".to_string()];
        if !ground.uris.is_empty() {
            // An image behind an NBD export cannot take groups of writes.
            options.push("--drain=unordered".into());
        }
        let daemons = hosts.map(|host| {
            Daemon::start(
                ground,
                &setup(ground, host, self.name(), &volumes(ground, host), &options)?,
            )
        });
        let daemons = daemons.collect::<Result<_, _>>()?;
        Ok(Box::new(Hosted { daemons, fronts: Fronts::of(ground), rescue: Rescue::of(ground) }))
    }
}

/// The parameters of the daemon on a hypervisor.
pub(super) fn setup<'a>(
    ground: &Ground,
    host: usize,
    placement: &'static str,
    volumes: &'a [(String, String)],
    options: &'a [String],
) -> Result<Setup<'a>, PlacementError> {
    let ssd = ground.host_ssd(host, placement)?;
    let (directory, cache_bytes) = (ssd.directory.clone(), ssd.bytes);
    Ok(Setup {
        name: NAMES[host],
        directory,
        cache_bytes,
        volumes,
        options,
        namespace: ground.namespace(host),
        // The daemon's records of exports are then removed with the run, and do not stay on the
        // machine.
        state: (!ground.uris.is_empty())
            .then(|| ground.directory.join(format!("{}.state", NAMES[host]))),
    })
}

/// Prefixes of the file names of the daemons on hypervisors, by the hypervisor's number.
pub(super) const NAMES: [&str; HOSTS_MAX as usize] = ["host", "peer"];

/// The images of a hypervisor's clients as volumes of a cache on that hypervisor: names and URIs.
pub(super) fn volumes(ground: &Ground, host: usize) -> Vec<(String, String)> {
    ground.images_of(host).map(|image| (image.clone(), ground.uri(image))).collect()
}

/// For each image, the number of the hypervisor whose clients use it.
#[derive(Debug)]
pub(super) struct Fronts(BTreeMap<String, usize>);

impl Fronts {
    pub(super) fn of(ground: &Ground) -> Fronts {
        Fronts(ground.images.iter().map(|image| (image.clone(), ground.host_of(image))).collect())
    }

    /// The images of a hypervisor's clients.
    pub(super) fn images(&self, host: usize) -> impl Iterator<Item = &String> {
        self.0.iter().filter(move |(_, of)| **of == host).map(|(image, _)| image)
    }

    /// How clients reach an image through the daemon of their hypervisor.
    pub(super) fn endpoint(&self, daemons: &[Daemon], image: &str) -> Option<Endpoint> {
        let daemon = daemons.get(*self.0.get(image)?)?;
        Some(Endpoint::Nbd { socket: daemon.socket().into(), export: image.into() })
    }
}

#[derive(Debug)]
struct Hosted {
    /// By the hypervisor's number.
    daemons: Vec<Daemon>,
    fronts: Fronts,
    rescue: Rescue,
}

impl Applied for Hosted {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        daemon::proofs(&self.daemons)
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.daemons
            .iter()
            .try_for_each(|daemon| daemon.is_in_mode(HOST_TIDEPOOL.name(), "write-back"))
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        self.fronts.endpoint(&self.daemons, image)
    }

    fn flushed(&self) -> Result<Option<Vec<String>>, PlacementError> {
        daemon::flushed(&self.daemons).map(Some)
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        daemon::counters(&self.daemons).map(Value::Object)
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        daemon::drain(&self.daemons, limit_s, hurry, stop)
    }

    fn salvage(self: Box<Self>) -> Result<String, PlacementError> {
        let Hosted { mut daemons, fronts, rescue } = *self;
        // The SSD that has failed is the first hypervisor's; those of other hypervisors work.
        let well = daemons.split_off(1.min(daemons.len()));
        let mut done = Vec::new();
        for daemon in daemons {
            done.push(if daemon.wait_drained(SALVAGE_LIMIT) {
                daemon.stop()?;
                "everything was in the images by itself"
            } else {
                drop(daemon);
                fronts.images(0).try_for_each(|image| rescue.recover(image))?;
                "`tidepool recover --accept-loss`"
            });
        }
        if !well.is_empty() {
            give_back(well)?;
            done.push("a drain as ever on the other hypervisor");
        }
        Ok(done.join(", "))
    }

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        give_back(self.daemons)
    }
}

/// Drains and ends daemons whose SSDs work. The images have all data then.
fn give_back(daemons: Vec<Daemon>) -> Result<(), PlacementError> {
    daemon::drain(&daemons, 0.0, &|| (), &|| true)?;
    daemons.into_iter().try_for_each(Daemon::stop)
}

/// Longest wait until a daemon whose SSD has failed has written everything to the images, with
/// devices that answer at once.
pub(super) const SALVAGE_LIMIT: Duration = Duration::from_secs(30);

/// librbd's own cache in the memory of the hypervisor, in write-back.
#[derive(Debug)]
pub(super) struct LibrbdCache;

impl Placement for LibrbdCache {
    fn name(&self) -> &'static str {
        "librbd-cache"
    }

    fn what(&self) -> &'static str {
        "librbd's write-back cache in the hypervisor's memory"
    }

    fn layer(&self) -> Layer {
        Layer::Client
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn caches_in_memory(&self) -> bool {
        true
    }

    fn path(&self, access: Access) -> Result<Access, String> {
        match access {
            Access::Librbd | Access::Guest => Ok(access),
            other => Err(format!(
                "librbd's cache is one of a client that has librbd itself, not over {other}"
            )),
        }
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let text = fs::read_to_string(&ground.client_conf)
            .map_err(failed("cannot read the client's ceph.conf"))?;
        let conf = ground.directory.join("librbd-cache.conf");
        let text = text.replace(NO_CACHE, CACHE);
        fs::write(&conf, text).map_err(failed(format!("cannot write {}", conf.display())))?;
        let clients = ground
            .images
            .iter()
            .map(|image| (image.clone(), ground.namespace(ground.host_of(image))));
        Ok(Box::new(Cached { conf, clients: clients.collect() }))
    }
}

/// librbd's cache in write-back. librbd writes through until the first flush; fio sends a flush
/// when it opens an image.
const CACHE: &str = "rbd cache = true\nrbd cache policy = writeback\n";

#[derive(Debug)]
struct Cached {
    conf: PathBuf,
    /// The images, each with the network namespace of its clients.
    clients: BTreeMap<String, Option<Namespace>>,
}

impl Applied for Cached {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        // The configuration is the same for all images, so one image is checked.
        let (image, client) =
            self.clients.first_key_value().map_or(("", None), |(image, at)| (image, at.as_ref()));
        let mut command = Command::new("rbd");
        command
            .arg("-c")
            .arg(&self.conf)
            .args(["config", "image", "list", image, "--format", "json"]);
        client.iter().for_each(|client| client.enter(&mut command));
        let output = command.stdin(Stdio::null()).output().map_err(failed("cannot run rbd"))?;
        let options: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let wanted = ["rbd_cache", "rbd_cache_policy", "rbd_cache_size"];
        let told = options
            .iter()
            .filter_map(|option| Some((option["name"].as_str()?, option["value"].clone())));
        let told = told
            .filter(|(name, _)| wanted.contains(name))
            .map(|(name, value)| (name.to_string(), value));
        let proof: serde_json::Map<String, Value> = told.collect();
        if proof.get("rbd_cache").is_some_and(|value| value == "true") {
            return Ok(Value::Object(proof));
        }
        let what = format!("librbd says {}", Value::Object(proof));
        Err(PlacementError::NotInPlace { placement: LIBRBD_CACHE.name(), what })
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        let client = self.clients.get(image).cloned().flatten();
        Some(Endpoint::Rbd { conf: self.conf.clone(), image: image.into(), client })
    }
}

/// The hypervisor's SSD without a cache or Ceph: a bound for all caches on that SSD.
#[derive(Debug)]
pub(super) struct Raw;

impl Placement for Raw {
    fn name(&self) -> &'static str {
        "ssd-raw"
    }

    fn what(&self) -> &'static str {
        "a bound: the SSD in the hypervisor, without Ceph"
    }

    fn layer(&self) -> Layer {
        Layer::Client
    }

    fn ssd(&self) -> Ssd {
        Ssd::File
    }

    fn durability(&self) -> Durability {
        Durability::OneCopy
    }

    fn path(&self, _access: Access) -> Result<Access, String> {
        // The placement does not reach Ceph.
        Ok(Access::Librbd)
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let mut files = BTreeMap::new();
        for host in 0..ground.hypervisors as usize {
            let ssd = ground.host_ssd(host, self.name())?;
            let bytes = ssd.bytes / ground.images_of(host).count().max(1) as u64 / RAW_UNIT_BYTES
                * RAW_UNIT_BYTES;
            for image in ground.images_of(host) {
                let path = ssd.directory.join(format!("{image}.raw"));
                fill(&path, bytes).map_err(failed(format!("cannot fill {}", path.display())))?;
                files.insert(image.clone(), path);
            }
        }
        Ok(Box::new(RawFiles(files)))
    }
}

/// Makes a file and writes all of it: a read of space that was never written would not reach the
/// SSD.
fn fill(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let unit = vec![0x5a; RAW_UNIT_BYTES as usize];
    (0..bytes / RAW_UNIT_BYTES).try_for_each(|_| file.write_all(&unit))?;
    file.sync_all()
}

/// Unit of the sizes of files on a raw SSD, in bytes.
const RAW_UNIT_BYTES: u64 = 1 << 20;

/// Files on the SSDs, by the names of the images that they stand for.
#[derive(Debug)]
struct RawFiles(BTreeMap<String, PathBuf>);

impl Applied for RawFiles {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        Ok(json!(self.0))
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        Some(Endpoint::File(self.0.get(image)?.clone()))
    }
}

impl Drop for RawFiles {
    fn drop(&mut self) {
        for path in self.0.values() {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    #[test]
    fn the_cache_of_a_hypervisor_whose_ssd_is_well_is_drained_and_not_given_up() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let fake = Fake::new();
        let ground = fake.ground();
        fake.says(0, "failed", 4096);
        fake.says(1, "serving", 8192);
        let host = |host: usize| {
            let volumes = volumes(&ground, host);
            Daemon::start(
                &ground,
                &setup(&ground, host, "host-tidepool", &volumes, &[]).expect("an SSD"),
            )
        };
        let daemons = (0..2).map(host).collect::<Result<_, _>>().expect("they serve");
        let (fronts, rescue) = (Fronts::of(&ground), Rescue::of(&ground));
        let done =
            Box::new(Hosted { daemons, fronts, rescue }).salvage().expect("all is given back");
        assert_eq!(
            fake.asked(),
            ["recover rbd:rbd/img0?conf=ceph.conf --accept-loss", "drain peer", "stop peer"]
        );
        assert_eq!(
            done,
            "`tidepool recover --accept-loss`, a drain as ever on the other hypervisor"
        );
    }
}
