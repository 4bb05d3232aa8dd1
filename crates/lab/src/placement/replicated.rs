//! A cache on the SSD of each of two hypervisors: what clients write on the first one is acknowledged when both have it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::volumes;
use super::daemon::{Daemon, Setup, text};
use super::{
    Applied, Ground, Layer, Placement, PlacementError, SecondHost, SecondNode, Ssd, failed, need, run,
};
use crate::cluster::Cluster;
use crate::fio::Endpoint;
use crate::results::Drained;

pub(super) static HOST_TIDEPOOL_REPLICATED: HostReplicated = HostReplicated;

/// Longest wait until all volumes have a second copy that counts. Nothing is copied for that, but what was written meanwhile has to
/// be in the image.
const SYNC_LIMIT: Duration = Duration::from_secs(60);
/// How often that is looked at.
const POLL: Duration = Duration::from_millis(50);
/// The port where second copies are taken in.
const PORT: u16 = 10810;
/// What the owner's log says of each volume whose second copy does not count any more.
const PARTED: &str = "without a second copy that counts";

/// Tidepool on two hypervisors.
#[derive(Debug)]
pub(super) struct HostReplicated;

impl Placement for HostReplicated {
    fn name(&self) -> &'static str {
        "host-tidepool-replicated"
    }

    fn what(&self) -> &'static str {
        "a write-back cache on the SSDs of two hypervisors, two copies"
    }

    fn layer(&self) -> Layer {
        Layer::Client
    }

    fn ssd(&self) -> Ssd {
        Ssd::File
    }

    fn ssds(&self) -> u32 {
        2
    }

    fn keeps_two_copies(&self) -> bool {
        true
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), String> {
        need("openssl", "openssl")
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let (Some((ssd, cache_bytes)), Some(second)) = (&ground.ssd, &ground.second) else {
            return Err(not("there is no second SSD".into()));
        };
        let (here, there) = options(&ground.directory, second, &ground.client_conf)?;
        let peer = Daemon::start(
            ground,
            &Setup {
                name: "peer",
                cache: second.ssd.0.join("peer.cache"),
                cache_bytes: second.ssd.1,
                volumes: &[],
                options: &there,
                namespace: second.network.as_ref().map(|node| &node.namespace),
            },
        )?;
        let owner = Daemon::start(
            ground,
            &Setup {
                name: "host",
                cache: ssd.join("host.cache"),
                cache_bytes: *cache_bytes,
                volumes: &volumes(ground),
                options: &here,
                namespace: ground.client.as_ref(),
            },
        )?;
        let mut pair = Pair { owner, peer, parted: 0 };
        pair.wait_sync()?;
        pair.parted = pair.partings();
        Ok(Box::new(pair))
    }
}

/// The options that make peers of the two: those of the first hypervisor, and those of the second one.
fn options(
    directory: &Path,
    second: &SecondHost,
    conf: &Path,
) -> Result<(Vec<String>, Vec<String>), PlacementError> {
    let Some(SecondNode { address, client, .. }) = &second.network else {
        let [here, there] =
            ["host", "peer"].map(|name| format!("unix:{}", directory.join(format!("{name}.peer")).display()));
        return Ok((peers(&there, &here), peers(&here, &there)));
    };
    let [here, there] = [client, address].map(|address| format!("tls://{address}:{PORT}"));
    let directory = directory.join("tls");
    let mut both = (peers(&there, &here), peers(&here, &there));
    for (options, name, address) in [(&mut both.0, "host", client), (&mut both.1, "peer", address)] {
        let own = certificate(&directory, name, &address.to_string())?;
        options.push(format!("--peer-tls={}", own.display()));
        options.push(format!("--peer-images=rbd:rbd?conf={}", conf.display()));
    }
    Ok(both)
}

fn peers(other: &str, own: &str) -> Vec<String> {
    vec![format!("--peer={other}"), format!("--peer-listen={own}")]
}

/// A host's directory with its certificate, made as docs/operations.md says, and made once.
fn certificate(directory: &Path, name: &str, address: &str) -> Result<PathBuf, PlacementError> {
    let (authority, own) = (directory.join("ca"), directory.join(name));
    let new =
        |path: &Path| fs::create_dir_all(path).map_err(failed(format!("cannot make {}", path.display())));
    let request = |common_name: &str, key: PathBuf, certificate: PathBuf| {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        command.arg("-subj").arg(format!("/CN={common_name}")).arg("-keyout").arg(key);
        command.arg("-out").arg(certificate);
        command
    };
    if !authority.exists() {
        new(&authority)?;
        run(&mut request("Tidepool", authority.join("ca.key"), authority.join("ca.pem")))?;
    }
    if !own.exists() {
        new(&own)?;
        let mut command = request(name, own.join("key.pem"), own.join("cert.pem"));
        command.arg("-CA").arg(authority.join("ca.pem")).arg("-CAkey").arg(authority.join("ca.key"));
        // Both are this machine by name.
        let host =
            fs::read_to_string("/proc/sys/kernel/hostname").map_err(failed("cannot read the host's name"))?;
        command.arg("-addext").arg(format!("subjectAltName=IP:{address},DNS:{}", host.trim()));
        run(command.args(["-addext", "basicConstraints=critical,CA:FALSE"]))?;
        fs::copy(authority.join("ca.pem"), own.join("ca.pem"))
            .map_err(failed("cannot copy the authority's certificate"))?;
    }
    Ok(own)
}

/// Two daemons, of which the first one serves.
#[derive(Debug)]
struct Pair {
    // Dropped in this order: an owner that still runs would say in its images that it has no second copy.
    owner: Daemon,
    peer: Daemon,
    /// How often volumes had parted with their copies when the last one came into sync.
    parted: u64,
}

impl Pair {
    /// Waits until whatever is acknowledged is in both caches, for all volumes.
    fn wait_sync(&self) -> Result<(), PlacementError> {
        let start = Instant::now();
        loop {
            match self.in_sync() {
                Err(PlacementError::NotInPlace { what, .. }) if start.elapsed() > SYNC_LIMIT => {
                    let said = self.owner.log();
                    let said = said.lines().last().unwrap_or("nothing").to_string();
                    let seconds = SYNC_LIMIT.as_secs();
                    return Err(not(format!("after {seconds} s {what}; the last that its log says: {said}")));
                }
                Err(PlacementError::NotInPlace { .. }) => std::thread::sleep(POLL),
                done => return done,
            }
        }
    }

    /// Both say of each volume that there are two copies.
    fn in_sync(&self) -> Result<(), PlacementError> {
        self.owner.is_in_mode(HOST_TIDEPOOL_REPLICATED.name(), "write-back")?;
        let copies = self.peer.volumes()?;
        for volume in self.owner.volumes()? {
            let name = text(&volume, "name");
            if volume["replication"]["in_sync"] != true {
                let phase = text(&volume["replication"], "phase");
                return Err(not(format!("{name} has no second copy that counts ({phase})")));
            }
            if !copies.iter().any(|copy| copy["name"] == volume["name"] && copy["state"] == "replica") {
                return Err(not(format!("the peer knows nothing of {name}")));
            }
        }
        Ok(())
    }

    /// How often a volume has parted with its copy. That may be over before anybody has asked for the status, so the log counts.
    fn partings(&self) -> u64 {
        self.owner.log().lines().filter(|line| line.contains(PARTED)).count() as u64
    }
}

impl Applied for Pair {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        let mut proof = self.owner.proof()?;
        proof["copies_in_sync"] = json!(true);
        proof["peer"] = self.peer.proof()?;
        Ok(proof)
    }

    fn holds(&self) -> Result<(), PlacementError> {
        self.in_sync()?;
        match self.partings() - self.parted {
            0 => Ok(()),
            times => Err(not(format!(
                "volumes were without a second copy {times} times, and wrote through to the cluster meanwhile"
            ))),
        }
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        Some(Endpoint::Nbd { socket: self.owner.socket().into(), export: image.into() })
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        let mut counters = self.owner.counters()?;
        counters.insert("partings".into(), json!(self.partings()));
        // It may have died, which is not to hide what the owner counts.
        if let Ok(peer) = self.peer.counters() {
            counters.insert("peer_dirty_bytes".into(), peer["dirty_bytes"].clone());
        }
        Ok(Value::Object(counters))
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        self.owner.drain(limit_s, hurry, stop)
    }

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        let Pair { owner, peer, .. } = *self;
        owner.drain(0.0, &|| (), &|| true)?;
        // The peer goes last, so that the owner never finds itself without.
        owner.stop()?;
        peer.stop()
    }
}

fn not(what: String) -> PlacementError {
    PlacementError::NotInPlace { placement: HOST_TIDEPOOL_REPLICATED.name(), what }
}
