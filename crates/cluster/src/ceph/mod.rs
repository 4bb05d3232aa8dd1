//! Throw-away clusters of real Ceph: monitor, manager and OSDs on files, on the loopback interface
//! or in a network of their own.

mod config;
mod daemons;
mod health;
mod image;
mod librados;
mod manager;
mod options;
mod release;
mod servers;
pub mod socket;
mod store;

pub use health::Health;
pub use image::checksum;
pub use options::{ClusterOptions, InGuest, OSDS_MAX};
pub use release::release;
pub use release::release_in;
pub use servers::Servers;
pub use store::SSD_OP_SHARDS;
pub use store::Store;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::daemons::Daemon;
use self::librados::To;
use crate::network::{Network, NetworkError};
use crate::process::{self, Process};
use crate::scratch::Scratch;

/// Longest wait for a new cluster to be active+clean.
const UP_TIMEOUT: Duration = Duration::from_secs(180);
/// Longest run of one Ceph command, in seconds.
const COMMAND_TIMEOUT_S: u32 = 60;
/// Monitor ports are taken from this range, below the range that Linux gives to outgoing
/// connections.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// Environment variable with the path of the configuration of the cluster that tests share.
const SHARED: &str = "TIDEPOOL_TEST_CLUSTER";

/// The pool of a new cluster, and the number of its placement groups: in general, and in a prompt
/// cluster with one OSD.
const POOL: &str = "rbd";
const POOL_GROUPS: u32 = 32;
const POOL_GROUPS_PROMPT: u32 = 8;

/// The programs that a cluster needs, each with the Debian package that brings it.
const PROGRAMS: [(&str, &str); 8] = [
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("rados", "ceph-common"),
    ("rbd", "ceph-common"),
    ("monmaptool", "ceph-base"),
];

/// Why a cluster could not be had or used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Programs of Ceph are missing.
    #[error(
        "Ceph's programs are not installed here ({programs} not found); on Debian: apt-get install {packages}"
    )]
    Missing {
        /// The missing programs, separated by commas.
        programs: String,
        /// The packages with these programs, separated by spaces.
        packages: String,
    },
    /// The numbers of OSDs and replicas are not possible.
    #[error(
        "a cluster of {osds} OSDs with {replicas} replicas is not possible: use 1 to {OSDS_MAX} OSDs and no more replicas than OSDs"
    )]
    Shape {
        /// OSDs that were asked for.
        osds: u32,
        /// Replicas that were asked for.
        replicas: u32,
    },
    /// A command failed.
    #[error("`{command}` failed ({status}): {stderr}")]
    Command {
        /// The command line.
        command: String,
        /// How the command ended.
        status: String,
        /// The last lines of the command's error output.
        stderr: String,
    },
    /// A daemon ended.
    #[error("{daemon} ended with {status}: {log}")]
    Ended {
        /// The daemon.
        daemon: String,
        /// How the daemon ended.
        status: String,
        /// The reason that the daemon's output gives, or else the output's last lines.
        log: String,
    },
    /// The cluster did not become healthy in time.
    #[error("the cluster was not active+clean after {seconds} s; its last state: {state}")]
    NotUp {
        /// Seconds until the wait was given up.
        seconds: u64,
        /// The last state: the output of `ceph pg stat`, or why there is none.
        state: String,
    },
    /// An operation on a file, directory, port or process failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The cluster has no network, or the network cannot be made.
    #[error("{0}")]
    Network(NetworkError),
    /// The cluster has no running OSD of that number.
    #[error("the cluster has no running OSD {0}")]
    NoOsd(u32),
    /// The cluster was joined: others use its daemons.
    #[error("the cluster is shared: its daemons are not this program's to stop")]
    Joined,
}

/// Turns an I/O error into a [`ClusterError`] that says what was tried.
fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> ClusterError {
    let what = what.into();
    move |source| ClusterError::Io { what, source }
}

/// A running cluster with a pool for images. Dropping it ends the daemons and removes the cluster's
/// directory. A cluster that was joined runs on; dropping this value removes only the pool from it.
#[derive(Debug)]
pub struct Cluster {
    // Fields drop in this order: OSDs first, the directory last.
    osds: Vec<Option<Process>>,
    manager: Option<Process>,
    /// The cluster that the pool is in, if it has to run as long as this value exists.
    _host: Option<Arc<Cluster>>,
    /// `None` in a cluster that was joined.
    monitor: Option<Process>,
    pool: String,
    /// Keeps these ports from other clusters of this machine that are about to come up.
    _port: Option<UnixListener>,
    /// The network, with the server of each OSD.
    network: Option<(Arc<Network>, Servers)>,
    guests: BTreeMap<u32, InGuest>,
    conf: PathBuf,
    cephx: bool,
    scratch: Scratch,
}

impl Cluster {
    /// Checks that all of Ceph's programs are here; else fails with [`ClusterError::Missing`],
    /// which names those that are missing.
    pub fn available() -> Result<(), ClusterError> {
        let missing: Vec<_> =
            PROGRAMS.iter().filter(|(program, _)| process::find(program).is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mut packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
        packages.dedup();
        let programs: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
        Err(ClusterError::Missing { programs: programs.join(", "), packages: packages.join(" ") })
    }

    /// Brings a cluster up, and waits until all of its placement groups are active+clean.
    pub fn up(options: &ClusterOptions) -> Result<Cluster, ClusterError> {
        Cluster::available()?;
        let osds = u32::try_from(options.stores.len()).unwrap_or(u32::MAX);
        if !(1..=OSDS_MAX).contains(&osds) || !(1..=osds).contains(&options.replicas) {
            return Err(ClusterError::Shape { osds, replicas: options.replicas });
        }
        let parent = options.parent.clone().unwrap_or_else(crate::scratch::parent);
        let scratch = Scratch::new_in(&parent, "ceph")
            .map_err(io("cannot make a directory for the cluster"))?;
        let network = match &options.servers {
            Some(servers) => {
                let made = || servers.network(options.peer, options.delay).map(Arc::new);
                Some((options.network.clone().map_or_else(made, Ok)?, servers.clone()))
            }
            None if options.delay.is_some() => {
                return Err(ClusterError::Network(NetworkError::None));
            }
            None => None,
        };
        let (port, reserved) = match options.port {
            Some(port) => (port, None),
            None if network.is_some() => (PORTS.start, None),
            None => free_port().map(|(port, reserved)| (port, Some(reserved)))?,
        };
        let fsid = random_uuid()?;
        let place = config::Place::new(network.as_ref().map(|(network, _)| network.as_ref()), port);
        let conf = config::write(scratch.path(), options, &fsid, &place)?;
        config::keys(&conf, scratch.path(), options)?;
        config::monitor_store(&conf, scratch.path(), &fsid, &place)?;
        let monitor = Daemon::new("ceph-mon", "a").on(place.inside).start(&conf, scratch.path())?;
        let manager = match options.manager || osds > 1 {
            true => {
                manager::make_modules(&scratch.join("modules"))?;
                Some(Daemon::new("ceph-mgr", "x").on(place.inside).start(&conf, scratch.path())?)
            }
            false => None,
        };
        let mut cluster = Cluster {
            osds: Vec::new(),
            manager,
            _host: None,
            monitor: Some(monitor),
            pool: POOL.into(),
            _port: reserved,
            network,
            guests: options.guests.clone(),
            conf,
            cephx: options.cephx,
            scratch,
        };
        for number in 0..osds {
            cluster.osd_add(number, &options.stores[number as usize])?;
        }
        // With several OSDs, each OSD gets its share only if there are many groups.
        let few = options.prompt && osds == 1;
        cluster.pool_create(if few { POOL_GROUPS_PROMPT } else { POOL_GROUPS })?;
        // A client that finds no OSD looks for an OSD again only after five seconds.
        cluster.wait_active()?;
        cluster.pool_init()?;
        cluster.wait_clean()?;
        Ok(cluster)
    }

    /// A pool of its own for a test, in the cluster that all tests share; if there is none, in a
    /// cluster that the tests of this process share. For tests that stop no daemon of the cluster
    /// and change nothing that other pools see. Clients authenticate.
    ///
    /// # Errors
    /// When no cluster can be used or brought up.
    pub fn for_test() -> Result<Cluster, ClusterError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        static OWN: Mutex<Weak<Cluster>> = Mutex::new(Weak::new());
        let pool = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        if let Some(conf) = std::env::var_os(SHARED) {
            return Cluster::join(conf.as_ref(), &pool, None);
        }
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        let host = match own.upgrade() {
            Some(host) => host,
            None => Arc::new(Cluster::up(&ClusterOptions {
                cephx: true,
                ..ClusterOptions::for_tests()
            })?),
        };
        *own = Arc::downgrade(&host);
        Cluster::join(host.conf(), &pool, Some(host.clone()))
    }

    /// Makes a pool with one placement group in a running cluster whose configuration is at `conf`.
    /// The returned value keeps `host`. The cluster's daemons cannot be stopped through the
    /// returned value. Dropping it removes the pool.
    ///
    /// # Errors
    /// When the cluster does not answer, or has a pool of that name.
    fn join(conf: &Path, pool: &str, host: Option<Arc<Cluster>>) -> Result<Cluster, ClusterError> {
        Cluster::available()?;
        let scratch =
            Scratch::new("pool").map_err(io("cannot make a directory for the configuration"))?;
        let text =
            fs::read_to_string(conf).map_err(io(format!("cannot read {}", conf.display())))?;
        let own = scratch.join("ceph.conf");
        fs::write(&own, text.clone() + &config::joined(scratch.path(), pool))
            .map_err(io("cannot write a configuration"))?;
        let keyring = config::setting(&text, "keyring").unwrap_or_default();
        fs::copy(keyring, scratch.join("keyring"))
            .map_err(io(format!("cannot copy the keyring {keyring}")))?;
        let cluster = Cluster {
            osds: Vec::new(),
            manager: None,
            _host: host,
            monitor: None,
            pool: pool.into(),
            _port: None,
            network: None,
            guests: BTreeMap::new(),
            conf: own,
            cephx: config::setting(&text, "auth client required") == Some("cephx"),
            scratch,
        };
        cluster.pool_create(1)?;
        cluster.pool_init()?;
        Ok(cluster)
    }

    fn pool_create(&self, groups: u32) -> Result<(), ClusterError> {
        self.tell(
            To::Monitor,
            &json!({
                "prefix": "osd pool create", "pool": self.pool, "pg_num": groups, "pgp_num": groups, "autoscale_mode": "off",
            }),
        )
        .map(drop)
    }

    fn pool_init(&self) -> Result<(), ClusterError> {
        self.rbd(&["pool", "init", &self.pool]).map(drop)
    }

    /// The pool that images are in unless another one is named.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// The URI under which Tidepool reaches `image` (`NAME` or `NAMESPACE/NAME`) in the pool.
    pub fn uri(&self, image: &str) -> String {
        format!("rbd:{}/{image}?conf={}", self.pool, self.conf.display())
    }

    /// The path of the cluster's ceph.conf.
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// The cluster's directory; for a cluster that was joined, the directory of the clients'
    /// configuration.
    pub fn dir(&self) -> &Path {
        self.scratch.path()
    }

    /// Runs `ceph` with `arguments` and returns its output.
    pub fn ceph(&self, arguments: &[&str]) -> Result<String, ClusterError> {
        self.command("ceph", arguments)
    }

    /// Runs `rados` with `arguments` in the pool and returns its output.
    pub fn rados(&self, arguments: &[&str]) -> Result<String, ClusterError> {
        self.command("rados", &[&["-p", &self.pool], arguments].concat())
    }

    /// Runs `rbd` with `arguments` and returns its output. Images in `arguments` are in the
    /// cluster's pool unless another pool is named.
    pub fn rbd(&self, arguments: &[&str]) -> Result<String, ClusterError> {
        self.command("rbd", arguments)
    }

    /// The network, if the cluster has one.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref().map(|(network, _)| network.as_ref())
    }

    /// Makes `command` start in the clients' namespace, if the cluster has a network. Clients
    /// elsewhere cannot reach such a cluster.
    pub fn as_client(&self, command: &mut Command) {
        if let Some(network) = self.network() {
            network.client().namespace().enter(command);
        }
    }

    /// Sends a command from the clients' namespace, as `ceph` would; returns the output.
    fn tell(&self, to: To, command: &Value) -> Result<String, ClusterError> {
        let send = || librados::send(&self.conf, to, command);
        let result = match self.network() {
            Some(network) => {
                network.client().namespace().within(send).map_err(io("cannot enter a network"))?
            }
            None => send(),
        };
        result.map_err(|stderr| ClusterError::Command {
            command: command.to_string(),
            status: "no success".into(),
            stderr,
        })
    }

    /// Runs a program with `-c CONF` and `arguments`.
    fn command(&self, program: &str, arguments: &[&str]) -> Result<String, ClusterError> {
        let mut command = Command::new("timeout");
        command
            .arg(COMMAND_TIMEOUT_S.to_string())
            .arg(program)
            .arg("-c")
            .arg(&self.conf)
            .args(arguments);
        self.as_client(&mut command);
        let output = run(&mut command)?;
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_string())
    }

    /// Makes a client `client.NAME` with the given capabilities (pairs such as
    /// `("osd", "allow rwx pool=rbd")`) and puts the client's key into the cluster's keyring, so
    /// that `id=NAME` works. The capabilities take effect on clusters with cephx.
    pub fn client_add(
        &self,
        name: &str,
        capabilities: &[(&str, &str)],
    ) -> Result<(), ClusterError> {
        let entity = format!("client.{name}");
        let mut arguments = vec!["auth", "get-or-create", &entity];
        for (service, capability) in capabilities {
            arguments.extend([*service, *capability]);
        }
        let key = self.ceph(&arguments)?;
        let path = self.dir().join("keyring");
        let mut keyring = fs::read_to_string(&path).map_err(io("cannot read the keyring"))?;
        keyring.push_str(&key);
        keyring.push('\n');
        fs::write(&path, keyring).map_err(io("cannot write the keyring"))
    }

    /// Whether clients authenticate.
    pub fn cephx(&self) -> bool {
        self.cephx
    }

    /// Waits until every placement group is active+clean. A cluster that was brought up without a
    /// manager has one OSD: its placement groups are active+clean as soon as this OSD is active.
    /// For a cluster that was joined, there is no wait.
    pub fn wait_clean(&mut self) -> Result<(), ClusterError> {
        self.wait_active()?;
        if self.manager.is_none() {
            return Ok(());
        }
        let stat = json!({ "prefix": "pg stat", "format": "json", "target": ["mon-mgr", ""] });
        self.wait_until(Duration::from_millis(200), |cluster| {
            // A command that reaches the manager before the manager is ready may get no answer.
            let state = cluster.tell(To::Manager, &stat).unwrap_or_else(|error| error.to_string());
            if all_clean(&state) { Ok(()) } else { Err(state) }
        })
    }

    /// Waits until every running OSD is active.
    fn wait_active(&mut self) -> Result<(), ClusterError> {
        self.wait_until(Duration::from_millis(50), |cluster| {
            let active = cluster.osd_sockets().iter().all(|socket| is_active(socket));
            if active { Ok(()) } else { Err("not all OSDs are active".into()) }
        })
    }

    /// Checks every `pause` whether the cluster is ready; if it is not, `ready` returns its state.
    /// An OSD that has ended is an error.
    fn wait_until(
        &mut self,
        pause: Duration,
        ready: impl Fn(&Cluster) -> Result<(), String>,
    ) -> Result<(), ClusterError> {
        let start = Instant::now();
        loop {
            self.check_osds()?;
            let Err(state) = ready(self) else { return Ok(()) };
            if start.elapsed() > UP_TIMEOUT {
                return Err(ClusterError::NotUp { seconds: UP_TIMEOUT.as_secs(), state });
            }
            std::thread::sleep(pause);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.monitor.is_none() {
            let pool = &self.pool;
            // The cluster may be gone by now, and the pool with it.
            let _ = self.tell(
                To::Monitor,
                &json!({ "prefix": "osd pool delete", "pool": pool, "pool2": pool, "yes_i_really_really_mean_it": true }),
            );
        }
    }
}

/// Whether the OSD with this admin socket is active in the cluster.
fn is_active(socket: &Path) -> bool {
    socket::ask(socket, "status").is_ok_and(|status| status["state"] == "active")
}

/// Runs a command to its end. A failure is an error with the end of the command's error output.
fn run(command: &mut Command) -> Result<Output, ClusterError> {
    let line = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .fold(command.get_program().to_string_lossy().into_owned(), |line, word| {
            line + " " + &word
        });
    let output =
        command.stdin(Stdio::null()).output().map_err(io(format!("cannot run `{line}`")))?;
    if output.status.success() {
        return Ok(output);
    }
    let stderr = last_lines(&String::from_utf8_lossy(&output.stderr));
    Err(ClusterError::Command { command: line, status: output.status.to_string(), stderr })
}

/// The last three lines of a text that are not empty, joined to one line.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" / ")
}

/// Whether `ceph pg stat --format json` shows placement groups, all of them active+clean.
fn all_clean(stat: &str) -> bool {
    let Ok(stat) = serde_json::from_str::<Value>(stat) else { return false };
    let summary = &stat["pg_summary"];
    let total = summary["num_pgs"].as_u64().unwrap_or(0);
    let clean: u64 = summary["num_pg_by_state"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|state| state["name"] == "active+clean")
        .filter_map(|state| state["num"].as_u64())
        .sum();
    total > 0 && clean == total
}

/// A port that is free, as is the next one, and an abstract socket that reserves both ports. The
/// socket's name contains the port, and is taken in the same network namespace as the port. The
/// socket ends with its process.
fn free_port() -> Result<(u16, UnixListener), ClusterError> {
    let first = u64::from(std::process::id()) * 2;
    let count = u64::from(PORTS.end - PORTS.start);
    for step in 0..count / 2 {
        let port = PORTS.start + ((first + step * 2) % count) as u16;
        let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        let reserved = SocketAddr::from_abstract_name(format!("tidepool-cluster-{port}"))
            .and_then(|name| UnixListener::bind_addr(&name));
        if let Ok(reserved) = reserved
            && free(port)
            && free(port + 1)
        {
            return Ok((port, reserved));
        }
    }
    Err(ClusterError::Io {
        what: format!("no two free TCP ports in {PORTS:?}"),
        source: std::io::ErrorKind::AddrInUse.into(),
    })
}

/// A new random UUID from the kernel.
fn random_uuid() -> Result<String, ClusterError> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid")
        .map_err(io("cannot read /proc/sys/kernel/random/uuid"))?;
    Ok(text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_that_come_up_together_have_ports_of_their_own() {
        let (first, _reserved) = free_port().expect("a port");
        let (second, _too) = free_port().expect("another");
        assert!(first.abs_diff(second) >= 2, "{first} and {second}");
    }

    #[test]
    fn a_cluster_is_clean_only_when_every_group_is() {
        let stat = |clean, total| {
            format!(
                r#"{{"pg_ready":true,"pg_summary":{{"num_pg_by_state":[{{"name":"active+clean","num":{clean}}}],"num_pgs":{total}}}}}"#
            )
        };
        assert!(all_clean(&stat(33, 33)));
        assert!(!all_clean(&stat(32, 33)));
        assert!(!all_clean(&stat(0, 0)));
        assert!(!all_clean("not json"));
    }

    #[test]
    fn impossible_shapes_are_refused_before_anything_starts() {
        if Cluster::available().is_err() {
            return;
        }
        let options = ClusterOptions { replicas: 2, ..ClusterOptions::default() };
        assert!(matches!(Cluster::up(&options), Err(ClusterError::Shape { osds: 1, replicas: 2 })));
    }
}
