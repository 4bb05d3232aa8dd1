//! Three daemons, each on a host of its own with a name, a network namespace and a certificate: a
//! volume's owner, its peer, and the next peer in order of preference. Their network can be cut
//! anywhere, in either direction.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidepool_cluster::ceph::Servers;
use tidepool_cluster::network::{Namespace, Network, Node};
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::{Mix, Workload, WorkloadOptions};
use tidepool_testkit::{Admin, Cluster, ClusterOptions, Daemon, Error, Scratch, rng};

use crate::pair::Host;
use crate::rig::{MIB, VOLUME};

/// Hosts with a daemon.
const HOSTS: usize = 3;
/// Where peers listen.
pub const PORT: u16 = 10810;
/// Size of the volume; a workload leaves its last MiB to probes.
pub const IMAGE_BYTES: u64 = WORKLOAD_BYTES + MIB;
/// What a workload uses of it.
pub const WORKLOAD_BYTES: u64 = 32 * MIB;
/// Longest wait for a copy in sync.
const SYNC_MAX: Duration = Duration::from_secs(60);
/// Longest wait of a probe for an answer. A host that answers later than that serves nobody.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The same of one on the host that is to serve: its first answer waits until the image has what
/// only the logs had.
const PATIENCE: Duration = Duration::from_secs(60);
/// The manual, whose commands make the certificates.
const MANUAL: &str = include_str!("../../docs/operations.md");

/// What a host's way to another one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// What the one sends arrives nowhere; what the other one sends arrives.
    OneWay {
        /// Who is not heard.
        from: usize,
        /// By whom.
        to: usize,
    },
    /// The host's cable is pulled: it reaches nobody, and nobody reaches it.
    Cable(usize),
}

/// What carries everything.
#[derive(Debug)]
enum Net {
    /// A network of hosts only; the image is a file that all of them reach.
    Bare(Network),
    /// The one of a cluster, whose monitor and OSD have nodes of their own.
    Ceph(Box<Cluster>),
}

/// Three hosts under test. Everything goes when it is dropped.
#[derive(Debug)]
pub struct Trio {
    /// They are called h0, h1 and h2, and prefer each other as peers in that order.
    pub hosts: Vec<Host>,
    /// Which of them owns the volume.
    pub owner: usize,
    net: Net,
    /// The directory with all of that.
    pub scratch: Scratch,
}

fn io(source: std::io::Error) -> Error {
    Error::Io { what: "cannot make three hosts".into(), source }
}

impl Trio {
    /// Three hosts on a file; h0 serves the volume, and h1 has a copy in sync.
    pub fn on_file() -> Result<Trio, Error> {
        Trio::on_a_file(false)
    }

    /// The same, where the hosts wait ten times as long for each other, so that a busy machine does
    /// not matter.
    pub fn patient_on_file() -> Result<Trio, Error> {
        Trio::on_a_file(true)
    }

    fn on_a_file(patient: bool) -> Result<Trio, Error> {
        let scratch = Scratch::new("trio").map_err(io)?;
        let image = scratch.join("image");
        File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).map_err(io)?;
        let network =
            Network::up(HOSTS as u32, false, None).map_err(std::io::Error::other).map_err(io)?;
        let images = format!("file:{}", scratch.path().display());
        Trio::start(
            scratch,
            Net::Bare(network),
            (&format!("file:{}", image.display()), &images),
            patient,
        )
    }

    /// The same on an image of a real cluster, whose monitor and OSD are nodes of the same network.
    pub fn on_ceph() -> Result<Trio, Box<dyn std::error::Error>> {
        let servers = Servers { count: HOSTS as u32 + 1, of_osds: vec![HOSTS as u32] };
        let cluster =
            Cluster::up(&ClusterOptions { servers: Some(servers), ..ClusterOptions::for_tests() })?;
        cluster.rbd_create(VOLUME, IMAGE_BYTES)?;
        let uri = cluster.uri(VOLUME);
        let images = format!("rbd:{}?conf={}", cluster.pool(), cluster.conf().display());
        Ok(Trio::start(
            Scratch::new("trio")?,
            Net::Ceph(Box::new(cluster)),
            (&uri, &images),
            false,
        )?)
    }

    fn start(
        scratch: Scratch,
        net: Net,
        (uri, images): (&str, &str),
        patient: bool,
    ) -> Result<Trio, Error> {
        let mut trio = Trio { hosts: Vec::new(), owner: 0, net, scratch };
        manual(&trio.scratch, 0, "")?;
        for at in 0..HOSTS {
            let mut host = trio.host(at, images)?;
            if patient {
                host.daemon.use_long_limits()?;
            }
            trio.hosts.push(host);
        }
        for host in trio.hosts.iter_mut().rev() {
            host.daemon.start()?;
        }
        let volume = json!({ "name": VOLUME, "backend": uri });
        trio.owner().admin.call("POST", "/v1/volumes", Some(&volume))?;
        trio.owner().wait_sync()?;
        Ok(trio)
    }

    /// Has a host serve one more volume, on a new file of this size, and waits until it has a
    /// second copy. Returns its report.
    ///
    /// # Errors
    /// It is not served, or has no copy in time.
    pub fn add(&self, host: usize, name: &str, bytes: u64) -> Result<Value, Error> {
        let image = self.scratch.join(name);
        File::create(&image).and_then(|file| file.set_len(bytes)).map_err(io)?;
        let admin = &self.hosts[host].admin;
        let volume = json!({ "name": name, "backend": format!("file:{}", image.display()) });
        admin.call("POST", "/v1/volumes", Some(&volume))?;
        admin.wait_volume(name, SYNC_MAX, in_sync)
    }

    /// A host that does not run yet.
    fn host(&self, at: usize, images: &str) -> Result<Host, Error> {
        let place = |what: &str| self.scratch.join(format!("{what}{at}"));
        let address = |at: usize| format!("tls://{}:{PORT}", self.node(at).address());
        let names = format!("DNS:h{at},IP:{}", self.node(at).address());
        manual(&self.scratch, 1, &names)?;
        let certificates = place("tls");
        fs::rename(self.scratch.join("tls"), &certificates).map_err(io)?;
        let mut arguments = vec![
            "serve".to_string(),
            format!("--cache={}", place("cache").display()),
            format!("--cache-size={}", 192 * MIB),
            format!("--nbd=nbd+unix:///?socket={}", place("nbd").display()),
            format!("--admin={}", place("admin").display()),
            format!("--peer-listen={}", address(at)),
            format!("--peer-tls={}", certificates.display()),
            format!("--peer-images={images}"),
        ];
        let others = (0..HOSTS).filter(|other| *other != at);
        arguments.extend(others.map(|other| format!("--peer={}", address(other))));
        let mut daemon = Daemon::new(arguments, place("log"))?;
        daemon.set_host(&format!("h{at}"));
        daemon.set_network(self.node(at).namespace().clone());
        Ok(Host::new(
            daemon,
            Admin::new(place("admin")),
            place("nbd"),
            place("cache"),
            place("boot"),
        ))
    }

    fn network(&self) -> &Network {
        match &self.net {
            Net::Bare(network) => network,
            Net::Ceph(cluster) => cluster.network().expect("it was made with one"),
        }
    }

    /// Where host `at` is in the network.
    pub fn address(&self, at: usize) -> std::net::Ipv4Addr {
        self.node(at).address()
    }

    /// The network namespace of host `at`.
    pub fn namespace(&self, at: usize) -> &Namespace {
        self.node(at).namespace()
    }

    /// The directory with the certificate of host `at`.
    pub fn certificates(&self, at: usize) -> PathBuf {
        self.scratch.join(format!("tls{at}"))
    }

    fn node(&self, at: usize) -> &Node {
        &self.network().servers()[at]
    }

    /// The cluster, if there is one.
    pub fn cluster(&self) -> Option<&Cluster> {
        match &self.net {
            Net::Bare(_) => None,
            Net::Ceph(cluster) => Some(cluster),
        }
    }

    /// Loses a way, or gives it back.
    pub fn set(&self, loss: Loss, works: bool) {
        let done = match loss {
            Loss::OneWay { from, to } => self.network().lead(self.node(from), self.node(to), works),
            Loss::Cable(at) => self.network().plug(self.node(at), works),
        };
        done.expect("the network changes");
    }

    /// The one that serves the volume.
    pub fn owner(&self) -> &Host {
        &self.hosts[self.owner]
    }

    /// The one whose copy counts, as the owner says, when there is one.
    pub fn holder(&self) -> Result<usize, Error> {
        self.owner().holder()
    }

    /// A workload's daemon is gone, and `to` takes the volume over with everything.
    pub fn fail_over(&mut self, to: usize, workload: &mut Workload) -> Result<(), Error> {
        self.hosts[to].take_over(false)?;
        self.follow(to, workload)
    }

    /// A workload's daemon is gone, and `to` has taken the volume over with everything.
    pub fn follow(&mut self, to: usize, workload: &mut Workload) -> Result<(), Error> {
        workload.server_died();
        self.owner = to;
        self.verify(workload)
    }

    /// A workload on the owner, with flushes among its writes.
    ///
    /// # Panics
    /// If the owner does not let it in.
    pub fn workload(&self, seed: u64) -> Workload {
        let mix = Mix { flushes: 1, ..Mix::default() };
        let options =
            WorkloadOptions { mix, ..WorkloadOptions::new(rng::seed(seed), WORKLOAD_BYTES) };
        let mut workload = Workload::new(options);
        workload.connect(&self.owner().socket, VOLUME).expect("connect");
        workload
    }

    /// Connects a workload to the owner and checks every sector.
    pub fn verify(&self, workload: &mut Workload) -> Result<(), Error> {
        self.owner().verify(workload)
    }

    /// The hosts that acknowledge a write now. All are asked at the same moment.
    pub fn serving(&self) -> Vec<usize> {
        let serves = |socket: &Path| Probe::new(socket).is_some_and(|mut probe| probe.write(0));
        std::thread::scope(|scope| {
            let sockets = self.hosts.iter().map(|host| host.socket.as_path());
            let asked: Vec<_> = sockets.map(|socket| scope.spawn(move || serves(socket))).collect();
            let answers = asked.into_iter().map(|asked| asked.join().expect("no panic"));
            (0..HOSTS).zip(answers).filter_map(|(at, serves)| serves.then_some(at)).collect()
        })
    }

    /// Waits for the only host that acknowledges writes.
    ///
    /// # Errors
    /// None does in a minute, or several do.
    pub fn wait_one_serving(&self) -> Result<usize, Error> {
        let (start, limit) = (Instant::now(), Duration::from_secs(60));
        loop {
            match *self.serving() {
                [at] => return Ok(at),
                [] if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(50)),
                ref serving => {
                    return Err(Error::Protocol(format!(
                        "hosts {serving:?} serve at the same moment"
                    )));
                }
            }
        }
    }
}

/// A client that looks whether a host serves, in a block that workloads do not use.
#[derive(Debug)]
pub struct Probe(Client);

impl Probe {
    /// Connects; nothing where nobody is let in.
    pub fn new(socket: &Path) -> Option<Probe> {
        Probe::with_limit(socket, PROBE_TIMEOUT)
    }

    /// Connects to the host that is known to have the volume.
    pub fn patient(socket: &Path) -> Option<Probe> {
        Probe::with_limit(socket, PATIENCE)
    }

    fn with_limit(socket: &Path, limit: Duration) -> Option<Probe> {
        let client = Client::connect(socket, VOLUME).ok()?;
        client.give_up_after(limit).ok()?;
        Some(Probe(client))
    }

    /// Whether a write of this byte is acknowledged.
    pub fn write(&mut self, byte: u8) -> bool {
        self.0.write(WORKLOAD_BYTES, &[byte; 4096]).is_ok()
    }

    /// The byte that the block reads as; nothing where nobody answers.
    pub fn read(&mut self) -> Option<u8> {
        self.0.read(WORKLOAD_BYTES, 4096).ok().map(|block| block[0])
    }
}

/// Runs the manual's commands for certificates: the first ones make the authority, the next ones a
/// host's certificate for `names`.
fn manual(scratch: &Scratch, block: usize, names: &str) -> Result<(), Error> {
    let section = MANUAL.split("\n## Second copies").nth(1).expect("the section");
    let block = section.split("```sh\n").nth(1 + block).expect("a block");
    let commands = block[..block.find("```").expect("its end")]
        .replace("/mnt/ca", &scratch.join("ca").display().to_string())
        .replace("/var/lib/tidepool/tls", &scratch.join("tls").display().to_string())
        .replace("DNS:h1,IP:10.0.0.1", names);
    let output =
        Command::new("sh").args(["-euc", &commands]).stdin(Stdio::null()).output().map_err(io)?;
    if output.status.success() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Ended { program: "openssl".into(), status: output.status.to_string(), log })
}
