//! What is measured: each target is running before the first measurement and stays until the last.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidepool_cluster::{Cluster, ClusterOptions, Scratch, Store};
use tidepool_testkit::admin::{in_sync, number};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Admin, Daemon, Error, Server};

use crate::{Failure, Sizes};
use tidepool_cluster::fio::{self, Endpoint};

/// Most passes over the part of the image that is to be warm.
const WARM_PASSES_MAX: u32 = 5;
/// It is warm when a pass misses less than this part of it.
const WARM_MISSES_MAX: f64 = 0.002;
/// Longest wait for a second copy that counts.
const SYNC_TIMEOUT: Duration = Duration::from_secs(60);

/// One thing that is measured.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// A file on the file system of the cache, past the page cache.
    Raw,
    /// An NBD server that does nothing.
    Null,
    /// A volume on an RBD image.
    Tidepool,
    /// The same, its drain without groups.
    TidepoolUnordered,
    /// A volume with a second copy, which another daemon keeps on the same machine and disk.
    TidepoolReplicated,
    /// The image itself.
    Librbd,
}

impl Target {
    /// All of them, in the order of the table.
    pub const ALL: [Target; 6] = [
        Target::Raw,
        Target::Null,
        Target::Tidepool,
        Target::TidepoolUnordered,
        Target::TidepoolReplicated,
        Target::Librbd,
    ];

    /// Its name in the table.
    pub fn title(self) -> &'static str {
        match self {
            Target::Raw => "raw device",
            Target::Null => "empty NBD server",
            Target::Tidepool => "Tidepool",
            Target::TidepoolUnordered => "Tidepool, unordered",
            Target::TidepoolReplicated => "Tidepool, two copies",
            Target::Librbd => "librbd, uncached",
        }
    }

    /// Its image on the cluster, and its volume's name if it has one.
    fn image(self) -> Option<&'static str> {
        match self {
            Target::Raw | Target::Null => None,
            Target::Tidepool => Some("cached"),
            Target::TidepoolUnordered => Some("unordered"),
            Target::TidepoolReplicated => Some("replicated"),
            Target::Librbd => Some("plain"),
        }
    }

    /// A daemon serves it.
    pub fn is_cached(self) -> bool {
        matches!(self, Target::Tidepool | Target::TidepoolUnordered | Target::TidepoolReplicated)
    }
}

/// A daemon with one volume.
#[derive(Debug)]
struct Served {
    target: Target,
    _daemon: Daemon,
    /// The daemon that keeps the second copy.
    _peer: Option<Daemon>,
    admin: Admin,
    socket: PathBuf,
}

/// Everything that runs during the measurements.
#[derive(Debug)]
pub struct Targets {
    raw: PathBuf,
    null: Option<Server>,
    cached: Vec<Served>,
    // Fields drop in this order: the daemon before its cluster, the directory last.
    cluster: Option<Cluster>,
    conf: PathBuf,
    _scratch: Scratch,
}

impl Targets {
    /// Starts what `wanted` names, its files below `parent`, those of the OSD below `osd_parent`.
    pub fn start(
        wanted: &[Target],
        sizes: Sizes,
        parent: &Path,
        osd_parent: &Path,
    ) -> Result<Targets, Failure> {
        let scratch = Scratch::new_in(parent, "bench").map_err(|source| Failure::Io {
            what: "cannot make a directory for the benchmark".into(),
            source,
        })?;
        let mut targets = Targets {
            raw: scratch.join("raw"),
            null: None,
            cached: Vec::new(),
            cluster: None,
            conf: PathBuf::new(),
            _scratch: scratch,
        };
        if wanted.contains(&Target::Raw) {
            eprintln!("writing the raw file");
            fio::fill_file(&targets.raw, sizes.work_bytes)?;
        }
        if wanted.contains(&Target::Null) {
            let socket = targets._scratch.join("null.sock");
            let size = format!("size={}", sizes.image_bytes);
            targets.null = Some(Server::nbdkit(&socket, ["null", &size])?);
        }
        if wanted.iter().any(|target| target.image().is_some()) {
            targets.start_cluster(wanted, sizes, osd_parent)?;
        }
        for target in
            Target::ALL.into_iter().filter(|target| target.is_cached() && wanted.contains(target))
        {
            targets.start_tidepool(target, sizes)?;
        }
        Ok(targets)
    }

    /// Brings a cluster of one OSD up and fills the images.
    fn start_cluster(
        &mut self,
        wanted: &[Target],
        sizes: Sizes,
        parent: &Path,
    ) -> Result<(), Failure> {
        eprintln!("bringing a Ceph cluster of one OSD up");
        let options = ClusterOptions {
            parent: Some(parent.to_path_buf()),
            stores: vec![Store::File(sizes.image_bytes * 5 + (14 << 30))],
            ..ClusterOptions::default()
        };
        let cluster = Cluster::up(&options)?;
        // librbd's own cache in memory would hide the path that is measured.
        let text = std::fs::read_to_string(cluster.conf()).unwrap_or_default()
            + "\n[client]\nrbd cache = false\n";
        self.conf = self._scratch.join("ceph.conf");
        std::fs::write(&self.conf, text).map_err(|source| Failure::Io {
            what: "cannot write the client's ceph.conf".into(),
            source,
        })?;
        for image in wanted.iter().filter_map(|target| target.image()) {
            eprintln!("filling the image {image}");
            cluster.rbd_create(image, sizes.image_bytes)?;
            let endpoint = Endpoint::rbd(&self.conf, image);
            fio::run(
                &endpoint,
                &fio::pass(&endpoint, fio::Pass::WriteAndFlush, sizes.image_bytes),
            )?;
        }
        self.cluster = Some(cluster);
        Ok(())
    }

    /// Starts a daemon, and the one that keeps its second copy.
    fn start_tidepool(&mut self, target: Target, sizes: Sizes) -> Result<(), Failure> {
        let cluster = self.cluster.as_ref().expect("the cluster is started first");
        let volume = target.image().expect("a cached target has an image");
        let file = |what: &str| self._scratch.join(format!("{volume}.{what}"));
        let (socket, admin) = (file("nbd.sock"), Admin::new(file("admin.sock")));
        let uri = format!("rbd:rbd/{volume}?conf={}", cluster.conf().display());
        let mut options = vec![
            format!("--volume={volume}={uri}"),
            format!("--nbd=nbd+unix:///?socket={}", socket.display()),
        ];
        let replicated = target == Target::TidepoolReplicated;
        if replicated {
            options.extend(self.peers(volume, "host", "peer"));
        } else {
            options.push("--accept-loss=60m".to_string());
        }
        if target == Target::TidepoolUnordered {
            options.push("--drain=unordered".to_string());
        }
        let peer = replicated.then(|| {
            let options = self.peers(volume, "peer", "host");
            self.serve(&format!("{volume}.peer"), sizes, options.into())
        });
        let peer = peer.transpose()?;
        let daemon = self.serve(volume, sizes, options)?;
        // Until its first flush a client is taken for one that never flushes, and every write waits
        // for stable media. Any guest of this century flushes when it mounts.
        Client::connect(&socket, volume)?.flush()?;
        if replicated {
            admin.wait_volume(volume, SYNC_TIMEOUT, in_sync)?;
        }
        self.cached.push(Served { target, _daemon: daemon, _peer: peer, admin, socket });
        Ok(())
    }

    /// What one of two daemons that keep copies for each other is told of the other one.
    fn peers(&self, volume: &str, own: &str, other: &str) -> [String; 2] {
        let address =
            |name: &str| self._scratch.join(format!("{volume}.{name}.sock")).display().to_string();
        [format!("--peer-listen=unix:{}", address(own)), format!("--peer=unix:{}", address(other))]
    }

    /// A running daemon whose files are called `name`.
    fn serve(&self, name: &str, sizes: Sizes, options: Vec<String>) -> Result<Daemon, Failure> {
        let file = |what: &str| self._scratch.join(format!("{name}.{what}"));
        let mut arguments = vec![
            "serve".to_string(),
            format!("--cache={}", file("cache").display()),
            format!("--cache-size={}", sizes.cache_bytes),
            format!("--admin={}", file("admin.sock").display()),
        ];
        arguments.extend(options);
        eprintln!("starting tidepool {}", arguments.join(" "));
        let mut daemon = Daemon::new(arguments, file("log"))?;
        daemon.start()?;
        Ok(daemon)
    }

    /// Makes the image for a restart; returns the client's ceph.conf.
    pub fn restart_image(&self, size_bytes: u64) -> Result<&Path, Failure> {
        let cluster = self.cluster.as_ref().expect("the cluster is started with Tidepool");
        cluster.rbd_create(crate::restart::VOLUME, size_bytes)?;
        Ok(&self.conf)
    }

    /// Where fio reaches a target.
    pub fn endpoint(&self, target: Target) -> Endpoint {
        match target {
            Target::Raw => Endpoint::File(self.raw.clone()),
            Target::Null => {
                let server = self.null.as_ref().expect("the empty server was started");
                Endpoint::Nbd { socket: server.socket().into(), export: String::new() }
            }
            Target::Librbd => {
                let image = target.image().expect("librbd has an image");
                Endpoint::rbd(&self.conf, image)
            }
            cached => {
                let (served, volume) = self.served(cached).expect("the daemon was started");
                Endpoint::Nbd { socket: served.socket.clone(), export: volume.into() }
            }
        }
    }

    /// The daemon of a target and the name of its volume.
    fn served(&self, target: Target) -> Option<(&Served, &'static str)> {
        self.cached.iter().find(|served| served.target == target).zip(target.image())
    }

    /// Whether a target that is to have a second copy has it: without one it works as
    /// write-through.
    pub fn check_copy(&self, target: Target) -> Result<(), Failure> {
        let served = self.served(target).filter(|_| target == Target::TidepoolReplicated);
        let Some((served, volume)) = served else { return Ok(()) };
        let volume = served.admin.volume(volume)?;
        match in_sync(&volume) {
            true => Ok(()),
            false => {
                Err(Error::Protocol(format!("the second copy was lost in a run: {volume}")).into())
            }
        }
    }

    /// Dirty bytes of a target that has some.
    pub fn dirty_bytes(&self, target: Target) -> Result<Option<f64>, Failure> {
        let Some((served, volume)) = self.served(target) else { return Ok(None) };
        Ok(number(&served.admin.volume(volume)?, "dirty_bytes"))
    }

    /// Blocks that the volume has read from the cache and from the backend.
    pub fn hits_and_misses(&self, target: Target) -> Result<Option<(f64, f64)>, Failure> {
        let Some((served, volume)) = self.served(target) else { return Ok(None) };
        let volume = served.admin.volume(volume)?;
        Ok(number(&volume, "hit_blocks").zip(number(&volume, "miss_blocks")))
    }

    /// Empties what a target has to catch up with; returns how long that took.
    pub fn settle(&self, target: Target) -> Result<Option<Duration>, Failure> {
        let Some((served, volume)) = self.served(target) else { return Ok(None) };
        let start = std::time::Instant::now();
        served.admin.drain(volume)?;
        Ok(Some(start.elapsed()))
    }

    /// Reads the part of the image that warm rows work on, until a cache holds nearly all of it.
    pub fn warm(&self, target: Target, sizes: Sizes) -> Result<(), Failure> {
        let endpoint = self.endpoint(target);
        for _ in 0..WARM_PASSES_MAX {
            let Some((_, misses_before)) = self.hits_and_misses(target)? else { return Ok(()) };
            fio::run(&endpoint, &fio::pass(&endpoint, fio::Pass::Read, sizes.work_bytes))?;
            let Some((_, misses)) = self.hits_and_misses(target)? else { return Ok(()) };
            if (misses - misses_before) * 4096.0 < sizes.work_bytes as f64 * WARM_MISSES_MAX {
                break;
            }
        }
        Ok(())
    }
}
