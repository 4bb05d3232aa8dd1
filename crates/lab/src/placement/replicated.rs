//! A cache on the SSD of each of two hypervisors: a write on one of them is acknowledged when both
//! caches have it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Fronts, HOST_TIDEPOOL, NAMES, SALVAGE_LIMIT, setup, volumes};
use super::daemon::{self, Daemon, Rescue, is_copy, text};
use super::mounted;
use super::shared::Shared;
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed, need, run};
use crate::access::Access;
use crate::results::Drained;
use tidepool_cluster::ceph::Cluster;
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::network::HostNode;

pub(super) static HOST_TIDEPOOL_REPLICATED: HostReplicated = HostReplicated;

/// Longest wait until all volumes have a second copy that counts. Data that was written before a
/// copy began is not copied, but has to be in the image.
const SYNC_LIMIT: Duration = Duration::from_secs(60);
/// How often the copies' state is read.
const POLL: Duration = Duration::from_millis(50);
/// The TCP port on which a daemon accepts second copies.
const PORT: u16 = 10810;
/// Part of the message that an owner logs for a volume whose second copy does not count, or not any
/// more.
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

    fn hosts_min(&self) -> u32 {
        2
    }

    fn keeps_two_copies(&self) -> bool {
        true
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn path(&self, access: Access) -> Result<Access, String> {
        if access == Access::Iscsi {
            mounted::probe()?;
        }
        HOST_TIDEPOOL.path(access)
    }

    fn mend(&self) -> &'static str {
        "`tidepool volume takeover` on the second hypervisor for each volume that has failed, and start its VM there; replace the SSD"
    }

    fn probe(&self) -> Result<(), String> {
        need("openssl", "openssl")
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let mut options = options(ground)?;
        let shared = Shared::of(ground)?;
        for options in options.iter_mut().filter(|_| shared.is_some()) {
            // A file could take groups of writes. The drain is unordered nevertheless, as with
            // `host-tidepool` on this path, so that both placements send requests of one kind to
            // Ceph.
            options.push("--drain=unordered".into());
            options.extend(shared.as_ref().map(Shared::option));
        }
        let mut daemons = Vec::new();
        // The second hypervisor's daemon, which may serve no volume, starts first: the other daemon
        // then finds its peer.
        for host in (0..options.len()).rev() {
            let mut volumes = volumes(ground, host);
            for (image, uri) in &mut volumes {
                *uri = shared.as_ref().map_or_else(|| uri.clone(), |shared| shared.uri(image));
            }
            let setup = setup(ground, host, self.name(), &volumes, &options[host])?;
            daemons.insert(0, Daemon::start(ground, &setup)?);
        }
        let (fronts, rescue) = (Fronts::of(ground), Rescue::of(ground));
        let mut pair = Pair { daemons, fronts, rescue, parted: 0, _shared: shared };
        pair.wait_sync()?;
        pair.parted = pair.partings();
        Ok(Box::new(pair))
    }
}

/// The options that make the daemons on two hypervisors peers of each other, by the hypervisor's
/// number.
fn options(ground: &Ground) -> Result<[Vec<String>; 2], PlacementError> {
    let nodes: Vec<&HostNode> = ground.hosts.iter().filter_map(|host| host.node.as_ref()).collect();
    let [first, second] = nodes.as_slice() else {
        let [here, there] = NAMES.map(|name| {
            format!("unix:{}", ground.directory.join(format!("{name}.peer")).display())
        });
        return Ok([peers(&there, &here), peers(&here, &there)]);
    };
    let addresses = [first.address, second.address];
    let [here, there] = addresses.map(|address| format!("tls://{address}:{PORT}"));
    let mut options = [peers(&there, &here), peers(&here, &there)];
    for ((options, name), address) in options.iter_mut().zip(NAMES).zip(addresses) {
        let own = certificate(&ground.directory.join("tls"), name, &address.to_string())?;
        options.push(format!("--peer-tls={}", own.display()));
        options.push(format!("--peer-images=rbd:rbd?conf={}", ground.client_conf.display()));
    }
    Ok(options)
}

fn peers(other: &str, own: &str) -> Vec<String> {
    vec![format!("--peer={other}"), format!("--peer-listen={own}")]
}

/// A directory with a host's certificate. The certificate is made as docs/operations.md says, and
/// only once.
fn certificate(directory: &Path, name: &str, address: &str) -> Result<PathBuf, PlacementError> {
    let (authority, own) = (directory.join("ca"), directory.join(name));
    let new = |path: &Path| {
        fs::create_dir_all(path).map_err(failed(format!("cannot make {}", path.display())))
    };
    let request = |common_name: &str, key: PathBuf, certificate: PathBuf| {
        let mut command = Command::new("openssl");
        command.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        ]);
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
        command
            .arg("-CA")
            .arg(authority.join("ca.pem"))
            .arg("-CAkey")
            .arg(authority.join("ca.key"));
        // Both daemons run on this machine, so both have its host name.
        let host = fs::read_to_string("/proc/sys/kernel/hostname")
            .map_err(failed("cannot read the host's name"))?;
        command.arg("-addext").arg(format!("subjectAltName=IP:{address},DNS:{}", host.trim()));
        run(command.args(["-addext", "basicConstraints=critical,CA:FALSE"]))?;
        fs::copy(authority.join("ca.pem"), own.join("ca.pem"))
            .map_err(failed("cannot copy the authority's certificate"))?;
    }
    Ok(own)
}

/// The daemons on two hypervisors. Each daemon serves the volumes of its own clients, and holds
/// copies of the other daemon's volumes.
#[derive(Debug)]
struct Pair {
    daemons: Vec<Daemon>,
    fronts: Fronts,
    rescue: Rescue,
    /// The number of partings (see `partings`) when the last volume came into sync.
    parted: u64,
    // Dropped after the daemons, which have these images open.
    _shared: Option<Shared>,
}

impl Pair {
    /// Waits until all acknowledged writes of all volumes are in both caches.
    fn wait_sync(&self) -> Result<(), PlacementError> {
        let start = Instant::now();
        loop {
            match self.in_sync() {
                Err(PlacementError::NotInPlace { what, .. }) if start.elapsed() > SYNC_LIMIT => {
                    let said = self.daemons[0].log();
                    let said = said.lines().last().unwrap_or("nothing").to_string();
                    let seconds = SYNC_LIMIT.as_secs();
                    return Err(not(format!(
                        "after {seconds} s {what}; the last that its log says: {said}"
                    )));
                }
                Err(PlacementError::NotInPlace { .. }) => std::thread::sleep(POLL),
                done => return done,
            }
        }
    }

    /// Proves that both daemons report two copies of each volume.
    fn in_sync(&self) -> Result<(), PlacementError> {
        for (host, daemon) in self.daemons.iter().enumerate() {
            daemon.is_in_mode(HOST_TIDEPOOL_REPLICATED.name(), "write-back")?;
            let copies = self.daemons[1 - host].volumes()?;
            for volume in daemon.served()? {
                let name = text(&volume, "name");
                if volume["replication"]["in_sync"] != true {
                    let phase = text(&volume["replication"], "phase");
                    return Err(not(format!("{name} has no second copy that counts ({phase})")));
                }
                if !copies.iter().any(|copy| copy["name"] == volume["name"] && is_copy(copy)) {
                    return Err(not(format!("the peer knows nothing of {name}")));
                }
            }
        }
        Ok(())
    }

    /// How often volumes have parted with their copies. A parting may be over before the status is
    /// read, so the messages in the daemons' logs are counted.
    fn partings(&self) -> u64 {
        let logs = self.daemons.iter().map(Daemon::log);
        logs.map(|log| log.lines().filter(|line| line.contains(PARTED)).count() as u64).sum()
    }
}

impl Applied for Pair {
    fn verify(&self, _cluster: &Cluster) -> Result<Value, PlacementError> {
        self.holds()?;
        Ok(json!({ "copies_in_sync": true, "hosts": daemon::proofs(&self.daemons)? }))
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
        self.fronts.endpoint(&self.daemons, image)
    }

    fn flushed(&self) -> Result<Option<Vec<String>>, PlacementError> {
        daemon::flushed(&self.daemons).map(Some)
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        // One daemon may have died; the counters of the living daemon are reported nevertheless.
        let living: Vec<_> =
            self.daemons.iter().filter_map(|daemon| daemon.counters().ok()).collect();
        let mut counters = daemon::sum(living);
        counters.insert("partings".into(), json!(self.partings()));
        Ok(Value::Object(counters))
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
        // `_shared` is bound first, so it is dropped last, after the daemons that have the images
        // open.
        let Pair { _shared, daemons, fronts, rescue, .. } = *self;
        let [owner, peer] = <[Daemon; 2]>::try_from(daemons).expect("there are two hypervisors");
        if owner.wait_drained(SALVAGE_LIMIT) {
            // Clients of the second hypervisor may have written, too.
            daemon::drain(std::slice::from_ref(&peer), 0.0, &|| (), &|| true)?;
            owner.stop()?;
            peer.stop()?;
            return Ok("everything was in the images by itself, from the second copy".into());
        }
        drop(owner);
        let mut refused = Vec::new();
        for image in fronts.images(0) {
            match peer.take_over(image) {
                Ok(()) => {}
                Err(why) if is_owner_alone(&why) => refused.push((image, why)),
                // For any other reason the copy may still count. Then the volume must not be given
                // up: how much would be lost is not known.
                Err(why) => return Err(why),
            }
        }
        if !peer.wait_drained(SALVAGE_LIMIT) {
            return Err(not(
                "the second hypervisor has taken over, and does not write all back".into()
            ));
        }
        peer.stop()?;
        let mut done = "`tidepool volume takeover` on the second hypervisor".to_string();
        for (image, why) in refused {
            rescue.recover(image)?;
            done.push_str(&format!(
                ", which was refused for {image} ({why}): `tidepool recover --accept-loss`"
            ));
        }
        Ok(done)
    }

    fn undo(self: Box<Self>) -> Result<(), PlacementError> {
        daemon::drain(&self.daemons, 0.0, &|| (), &|| true)?;
        // The second hypervisor's daemon, which may serve no volume, ends last, so that the first
        // daemon is never without its peer.
        self.daemons.into_iter().try_for_each(Daemon::stop)
    }
}

/// Part of the message of a takeover that was refused because the image's record names its owner
/// alone: the image has everything, or no copy counted any more. The exit status is the same for
/// all failures.
const OWNER_ALONE: &str = "alone has its newest data";

/// Whether a takeover was refused because only the owner may have data that the image lacks.
fn is_owner_alone(error: &PlacementError) -> bool {
    matches!(error, PlacementError::Command { output, .. } if output.contains(OWNER_ALONE))
}

fn not(what: String) -> PlacementError {
    PlacementError::NotInPlace { placement: HOST_TIDEPOOL_REPLICATED.name(), what }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    /// Salvages a pair of daemons, as after a failure of the first hypervisor's SSD; returns the
    /// result.
    fn salvaged(fake: &Fake) -> Result<String, PlacementError> {
        let ground = fake.ground();
        let host = |host: usize| {
            let volumes = volumes(&ground, host);
            Daemon::start(
                &ground,
                &setup(&ground, host, "host-tidepool-replicated", &volumes, &[])?,
            )
        };
        let daemons = (0..2).map(host).collect::<Result<_, _>>()?;
        let (fronts, rescue) = (Fronts::of(&ground), Rescue::of(&ground));
        Box::new(Pair { daemons, fronts, rescue, parted: 0, _shared: None }).salvage()
    }

    /// A fake program for a pair of daemons: the owner's volume has failed, and the second
    /// hypervisor has written everything back.
    fn struck() -> Fake {
        let fake = Fake::new();
        fake.says(0, "failed", 4096);
        fake.says(1, "serving", 0);
        fake
    }

    #[test]
    fn a_volume_is_taken_over_and_given_up_only_where_nobody_but_its_owner_has_more_than_the_image()
    {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let fake = struck();
        let done = salvaged(&fake).expect("it is taken over");
        assert_eq!(fake.asked(), ["takeover img0 on peer", "stop peer"]);
        assert!(!done.contains("recover"), "{done}");

        let fake = struck();
        fake.refuses(
            "cannot take volume img0 over: its record says that h0 alone has its newest data",
        );
        let done = salvaged(&fake).expect("the image has all that there is");
        let recovered = "recover rbd:rbd/img0?conf=ceph.conf --accept-loss";
        assert_eq!(fake.asked(), ["takeover img0 on peer", "stop peer", recovered]);
        assert!(done.contains("recover --accept-loss"), "{done}");

        for why in [
            "cannot open the backend of volume img0: rbd:rbd/img0 is locked by client.1; try again",
            "cannot take volume img0 over: its record names h1 as the holder of the other copy, on a boot that is over or with another cache",
            "cannot reach the daemon at peer.admin: nobody listens (is `tidepool serve` running? name its socket with --admin)",
            "there is no volume img0 (see `tidepool volume list`)",
        ] {
            let fake = struck();
            fake.refuses(why);
            let error = salvaged(&fake).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
            assert_eq!(fake.asked(), ["takeover img0 on peer"], "nothing is given up");
        }
    }

    #[test]
    fn what_the_second_hypervisor_has_written_is_drained_where_the_first_one_drains_by_itself() {
        let fake = struck();
        fake.says(0, "serving", 0);
        fake.says(1, "serving", 8192);
        salvaged(&fake).expect("all is given back");
        assert_eq!(fake.asked(), ["drain peer", "stop host", "stop peer"]);
    }
}
