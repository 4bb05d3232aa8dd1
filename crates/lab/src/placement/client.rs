//! Between the client and the cluster: a cache on the hypervisor's SSD, or in its memory.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::daemon::{Daemon, Setup};
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed};
use crate::cluster::Cluster;
use crate::fio::Endpoint;
use crate::network::Namespace;
use crate::results::{Drained, Durability};
use crate::testbed::NO_CACHE;

pub(super) static HOST_TIDEPOOL: Host = Host;
pub(super) static LIBRBD_CACHE: LibrbdCache = LibrbdCache;

/// Tidepool on the hypervisor, one copy.
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

    fn probe(&self) -> Result<(), String> {
        Ok(())
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let Some((directory, bytes)) = &ground.ssd else {
            let what = "there is no SSD".to_string();
            return Err(PlacementError::NotInPlace { placement: self.name(), what });
        };
        let volumes = volumes(ground);
        let setup = Setup {
            name: "host",
            cache: directory.join("host.cache"),
            cache_bytes: *bytes,
            volumes: &volumes,
            options: &["--accept-loss=60m".into()],
            namespace: ground.client.as_ref(),
        };
        Ok(Box::new(Hosted { daemon: Daemon::start(ground, &setup)? }))
    }
}

/// The images as volumes of a cache in front of the cluster: names and URIs.
pub(super) fn volumes(ground: &Ground) -> Vec<(String, String)> {
    let conf = ground.client_conf.display();
    let uri = |image: &String| (image.clone(), format!("rbd:rbd/{image}?conf={conf}"));
    ground.images.iter().map(uri).collect()
}

#[derive(Debug)]
struct Hosted {
    daemon: Daemon,
}

impl Applied for Hosted {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        self.daemon.proof()
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.daemon.is_in_mode(HOST_TIDEPOOL.name(), "write-back")
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        Some(Endpoint::Nbd { socket: self.daemon.socket().into(), export: image.into() })
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        Ok(Value::Object(self.daemon.counters()?))
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        self.daemon.drain(limit_s, hurry, stop)
    }

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        self.daemon.drain(0.0, &|| (), &|| true)?;
        self.daemon.stop()
    }
}

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

    fn probe(&self) -> Result<(), String> {
        Ok(())
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let text =
            fs::read_to_string(&ground.client_conf).map_err(failed("cannot read the client's ceph.conf"))?;
        let conf = ground.directory.join("librbd-cache.conf");
        let text = text.replace(NO_CACHE, CACHE);
        fs::write(&conf, text).map_err(failed(format!("cannot write {}", conf.display())))?;
        let image = ground.images.first().cloned().unwrap_or_default();
        Ok(Box::new(Cached { conf, image, client: ground.client.clone() }))
    }
}

/// librbd's cache as it is unless somebody turns it off, and from the first write on, not from the first flush on.
const CACHE: &str =
    "rbd cache = true\nrbd cache policy = writeback\nrbd cache writethrough until flush = false\n";

#[derive(Debug)]
struct Cached {
    conf: PathBuf,
    /// One of the images, to ask what is in force for it.
    image: String,
    client: Option<Namespace>,
}

impl Applied for Cached {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        let mut command = Command::new("rbd");
        command.arg("-c").arg(&self.conf).args(["config", "image", "list", &self.image, "--format", "json"]);
        self.client.iter().for_each(|client| client.enter(&mut command));
        let output = command.stdin(Stdio::null()).output().map_err(failed("cannot run rbd"))?;
        let options: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let wanted =
            ["rbd_cache", "rbd_cache_policy", "rbd_cache_size", "rbd_cache_writethrough_until_flush"];
        let told =
            options.iter().filter_map(|option| Some((option["name"].as_str()?, option["value"].clone())));
        let told =
            told.filter(|(name, _)| wanted.contains(name)).map(|(name, value)| (name.to_string(), value));
        let proof: serde_json::Map<String, Value> = told.collect();
        if proof.get("rbd_cache").is_some_and(|value| value == "true") {
            return Ok(Value::Object(proof));
        }
        let what = format!("librbd says {}", Value::Object(proof));
        Err(PlacementError::NotInPlace { placement: LIBRBD_CACHE.name(), what })
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        Some(Endpoint::Rbd { conf: self.conf.clone(), image: image.into(), client: self.client.clone() })
    }
}
