//! What `serve` is to do, checked before anything is touched.

use super::peers::{Allowed, HOSTS_MAX, Images, PEERS_MAX, PeerAddress};
use crate::config::{Config, VolumeConfig};
use crate::door::VolumeSocket;
use crate::failure::Failure;
use crate::listen::runtime_directory;
use crate::service::attachment;
use crate::shard::limits::LISTENERS_MAX;
use crate::units::{Duration, Size};
use crate::volume::{DrainOrder, Mode, WithoutPeer, absolute_backend, check_name};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc;
use std::time::{Duration as Time, Instant};
use tidepool_backend::{BackendUri, Identity};
use tidepool_engine::api::VOLUMES_MAX;
use tidepool_nbd::{NbdUri, Transport};

/// How long the check for images that are named twice waits for their file systems.
const LOOK_WAIT_MAX: Time = Time::from_secs(5);
/// Most addresses that one daemon listens on for NBD, beside the volumes' own sockets.
const FRONT_DOORS_MAX: usize = LISTENERS_MAX;

/// A checked configuration.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The cache file or block device.
    pub(super) cache: PathBuf,
    /// Its size when it has to be created.
    pub(super) cache_size: Option<Size>,
    /// The volumes that were named.
    pub(super) volumes: Vec<Wanted>,
    /// Where NBD is served.
    pub(super) front_doors: Vec<NbdUri>,
    /// The admin API's socket.
    pub(super) admin: Option<PathBuf>,
    /// Directory to be made first: that of the default sockets.
    pub(super) directory: Option<PathBuf>,
    /// Address of the metrics endpoint.
    pub(super) metrics: Option<SocketAddr>,
    /// Accepted loss of volumes for which nothing else is said.
    pub(super) accept_loss: Option<Duration>,
    /// Order of the drain of volumes for which nothing else is said.
    pub(super) drain: Option<DrainOrder>,
    /// Where second copies may be, the best first.
    pub(super) peers: Vec<PeerAddress>,
    /// Where this host takes second copies of others' volumes.
    pub(super) peer_doors: Vec<PeerAddress>,
    /// What write-back does while no second copy counts.
    pub(super) without_peer: WithoutPeer,
    /// Directory of the certificates for both.
    pub(super) peer_tls: Option<PathBuf>,
    /// Hosts that may do something here; all of the authority, where there is none.
    pub(super) peer_allow: Vec<Allowed>,
    /// Images that they may name.
    pub(super) peer_images: Vec<Images>,
}

/// A volume as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub(super) name: String,
    /// Where its image is.
    pub(super) backend: BackendUri,
    /// What to do with writes.
    pub(super) mode: Mode,
    /// Up to this much may be lost with the cache device.
    pub(super) accept_loss: Option<Duration>,
    /// Most dirty bytes; 0 for its share of the cache.
    pub(super) dirty_bytes_max: u64,
    /// Serve reads only.
    pub(super) read_only: bool,
    /// Order of the drain; what it was, or grouped, when nothing is said.
    pub(super) drain: Option<DrainOrder>,
    /// A socket of its own.
    pub(super) socket: Option<VolumeSocket>,
}

/// Write-back would be a surprise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// Neither a replica nor an accepted loss.
    #[error(
        "write-back keeps the only copy of new data on this cache device: name a host for a second one (--peer URI), say how much may be lost (--accept-loss DURATION), or use write-through"
    )]
    Surprise,
    /// No loss at all cannot be kept with one copy.
    #[error(
        "--accept-loss 0s accepts nothing: leave it out for write-through, or name a duration such as 5s"
    )]
    Nothing,
    /// An NBD server takes no groups of writes.
    #[error(
        "an nbd: backend can only be drained unordered, so that between two drains it is no consistent disk by itself: say --drain unordered, or use write-through"
    )]
    Order,
    /// Nearly each write would wait for the image.
    #[error(
        "a dirty quota of {} is too small: name at least {}, or use write-through", .0.approximate(), Size(DIRTY_BYTES_MIN).approximate()
    )]
    Quota(Size),
}

/// Least dirty quota in bytes.
const DIRTY_BYTES_MIN: u64 = 1 << 20;

/// The dirty quota that was asked for, in bytes; 0 stands for the volume's share of the cache.
///
/// # Errors
/// It is too small.
pub fn quota_rule(asked: Option<Size>) -> Result<u64, ModeError> {
    match asked {
        Some(size) if size.0 > 0 && size.0 < DIRTY_BYTES_MIN => Err(ModeError::Quota(size)),
        asked => Ok(asked.map_or(0, |size| size.0)),
    }
}

/// The order in which a volume is drained, given what was said.
pub fn drain_order(backend: &BackendUri, said: Option<DrainOrder>) -> DrainOrder {
    match backend {
        BackendUri::Nbd(_) => DrainOrder::Unordered,
        _ => said.unwrap_or(DrainOrder::Grouped),
    }
}

/// The order rule: write-back on a backend that cannot take groups of writes is only for a user who
/// says so.
///
/// # Errors
/// It was not said.
pub fn order_rule(
    backend: &BackendUri,
    mode: Mode,
    drain: Option<DrainOrder>,
) -> Result<(), ModeError> {
    match backend {
        BackendUri::Nbd(_) if mode == Mode::WriteBack && drain != Some(DrainOrder::Unordered) => {
            Err(ModeError::Order)
        }
        _ => Ok(()),
    }
}

/// The mode rule: write-back needs a peer or an accepted loss, else a volume runs write-through.
/// Without an accepted loss it does so too for as long as no copy at a peer counts.
///
/// # Errors
/// Write-back was asked for and neither is there.
pub fn mode_rule(
    mode: Option<Mode>,
    accept_loss: Option<Duration>,
    replicated: bool,
) -> Result<Mode, ModeError> {
    if accept_loss.is_some_and(|loss| loss.as_millis() == 0) {
        return Err(ModeError::Nothing);
    }
    let safe = accept_loss.is_some() || replicated;
    match mode {
        None if safe => Ok(Mode::WriteBack),
        None => Ok(Mode::WriteThrough),
        Some(Mode::WriteBack) if !safe => Err(ModeError::Surprise),
        Some(mode) => Ok(mode),
    }
}

impl Wanted {
    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A socket of its own.
    pub fn socket(&self) -> Option<&VolumeSocket> {
        self.socket.as_ref()
    }

    /// Checks one volume; the daemon's `accept_loss` holds where the volume has none of its own.
    /// `drain` is the order that was asked for. `replicated` says that there are peers.
    ///
    /// # Errors
    /// The name or the mode cannot be.
    pub fn new(
        name: &str,
        config: VolumeConfig,
        accept_loss: Option<Duration>,
        drain: Option<DrainOrder>,
        replicated: bool,
    ) -> Result<Wanted, Failure> {
        let failure =
            |e: &dyn std::fmt::Display| Failure::usage(format!("cannot serve volume {name}: {e}"));
        check_name(name).map_err(Failure::usage)?;
        let accept_loss = config.accept_loss.or(accept_loss);
        let mode = mode_rule(config.mode, accept_loss, replicated).map_err(|e| failure(&e))?;
        let drain = config.drain.or(drain);
        if !config.read_only {
            order_rule(&config.backend, mode, drain).map_err(|e| failure(&e))?;
        }
        let socket = config.socket.map(own_socket).transpose().map_err(|e| failure(&e))?;
        Ok(Wanted {
            socket,
            name: name.to_owned(),
            backend: absolute_backend(config.backend).map_err(|e| failure(&e))?,
            mode,
            accept_loss,
            dirty_bytes_max: quota_rule(config.dirty_max).map_err(|e| failure(&e))?,
            read_only: config.read_only,
            drain,
        })
    }
}

/// Checks a volume's own socket, as far as that takes no look at the system.
fn own_socket(socket: VolumeSocket) -> Result<VolumeSocket, String> {
    let shown = socket.path.display();
    let absolute =
        std::path::absolute(&socket.path).map_err(|e| format!("its socket {shown}: {e}"))?;
    if !attachment::fits(&socket) {
        return Err(format!(
            "its socket {shown} has more settings than are remembered: a shorter path or allow list does"
        ));
    }
    Ok(VolumeSocket { path: absolute, ..socket })
}

impl Plan {
    /// The volumes that were named.
    pub fn volumes(&self) -> &[Wanted] {
        &self.volumes
    }

    /// What may be lost of volumes that do not say so themselves.
    pub fn accept_loss(&self) -> Option<Duration> {
        self.accept_loss
    }

    /// Checks the settings. Nothing is opened or created.
    ///
    /// # Errors
    /// A usage failure: one line that says what to change.
    pub fn new(config: Config) -> Result<Plan, Failure> {
        refuse_unavailable(&config)?;
        let Some(cache) = config.cache else {
            return Err(Failure::usage("cannot serve without a cache: name it with --cache PATH"));
        };
        let loss = config.accept_loss;
        if loss.is_some_and(|loss| loss.as_millis() == 0) {
            return Err(Failure::usage(ModeError::Nothing));
        }
        let drain = config.drain;
        let peers = several("--peer", &config.peer, PEERS_MAX)?;
        let peer_doors = several("--peer-listen", &config.peer_listen, PEERS_MAX)?;
        let peer_tls = certificates(config.peer_tls, peers.iter().chain(&peer_doors))?;
        let replicated = !peers.is_empty();
        let volumes = config
            .volume
            .into_iter()
            .map(|(name, volume)| Wanted::new(name.as_str(), volume, loss, drain, replicated));
        let volumes = volumes.collect::<Result<Vec<_>, _>>()?;
        if volumes.len() > VOLUMES_MAX {
            return Err(Failure::usage(format!(
                "cannot serve {} volumes: at most {VOLUMES_MAX}",
                volumes.len()
            )));
        }
        refuse_shared_images(&volumes)?;
        let defaults =
            (config.nbd.is_empty() || config.admin.is_none()).then(runtime_directory).flatten();
        let front_doors =
            front_doors(&config.nbd, config.nbd_unencrypted == Some(true), defaults.as_deref())?;
        let admin = config
            .admin
            .or_else(|| defaults.as_ref().map(|directory| directory.join("admin.sock")));
        refuse_shared_sockets(&front_doors, &volumes, admin.as_deref())?;
        Ok(Plan {
            cache: std::path::absolute(cache)
                .map_err(|e| Failure::usage(format!("--cache: {e}")))?,
            cache_size: config.cache_size,
            volumes,
            front_doors,
            admin,
            directory: defaults,
            metrics: config.metrics,
            accept_loss: loss,
            drain,
            peers,
            peer_doors,
            without_peer: config.without_peer.unwrap_or_default(),
            peer_tls,
            peer_allow: several("--peer-allow", &config.peer_allow, HOSTS_MAX)?,
            peer_images: several("--peer-images", &config.peer_images, HOSTS_MAX)?,
        })
    }
}

/// Options of the contract that this version does not have.
fn refuse_unavailable(config: &Config) -> Result<(), Failure> {
    let missing = |what: &str, instead: &str| {
        Err(Failure::usage(format!("{what} is not available in this version: {instead}")))
    };
    if config.vhost.is_some() {
        return missing("--vhost", "leave it out and use --nbd");
    }
    Ok(())
}

/// What an option says that may be given several times.
fn several<T: FromStr<Err: Display>>(
    option: &str,
    texts: &[String],
    max: usize,
) -> Result<Vec<T>, Failure> {
    if texts.len() > max {
        let count = texts.len();
        return Err(Failure::usage(format!("{option} is given {count} times: at most {max}")));
    }
    let read = |text: &String| text.parse().map_err(|e| Failure::usage(format!("{option}: {e}")));
    texts.iter().map(read).collect()
}

/// Where the certificates are, which connections between hosts need.
fn certificates<'a>(
    directory: Option<PathBuf>,
    mut addresses: impl Iterator<Item = &'a PeerAddress>,
) -> Result<Option<PathBuf>, Failure> {
    let secure = addresses.find(|address| matches!(address, PeerAddress::Tls { .. }));
    match (directory, secure) {
        (None, Some(address)) => Err(Failure::usage(format!(
            "{address} needs certificates: name the directory with ca.pem, cert.pem and key.pem with --peer-tls DIR"
        ))),
        (None, None) => Ok(None),
        (Some(directory), _) => {
            let absolute = std::path::absolute(directory);
            absolute.map(Some).map_err(|e| Failure::usage(format!("--peer-tls: {e}")))
        }
    }
}

fn front_doors(
    uris: &[String],
    unencrypted: bool,
    defaults: Option<&Path>,
) -> Result<Vec<NbdUri>, Failure> {
    if uris.len() > FRONT_DOORS_MAX {
        return Err(Failure::usage(format!(
            "--nbd is given {} times: at most {FRONT_DOORS_MAX}",
            uris.len()
        )));
    }
    if uris.is_empty() {
        let Some(directory) = defaults else {
            return Err(Failure::usage(
                "cannot serve without a front door: give --nbd nbd+unix:///?socket=PATH (there is no $XDG_RUNTIME_DIR for a default)",
            ));
        };
        let transport = Transport::Unix { socket: directory.join("nbd.sock") };
        return Ok(vec![NbdUri { transport, export: String::new() }]);
    }
    uris.iter()
        .map(|text| {
            let uri: NbdUri = text.parse().map_err(|e| Failure::usage(format!("--nbd: {e}")))?;
            if !uri.export.is_empty() {
                check_name(&uri.export).map_err(|e| Failure::usage(format!("--nbd {text}: {e}")))?;
            }
            if is_open_to_others(&uri.transport) && !unencrypted {
                return Err(Failure::usage(format!(
                    "--nbd {text}: everybody who reaches this address may use the volumes, and reads along: serve on a unix socket or 127.0.0.1 (and a tunnel), or say --nbd-unencrypted"
                )));
            }
            Ok(uri)
        })
        .collect()
}

/// Other hosts may reach it. What a name stands for is not known here.
pub(super) fn is_open_to_others(transport: &Transport) -> bool {
    match transport {
        Transport::Unix { .. } => false,
        Transport::Tcp { host, .. } => {
            host != "localhost"
                && !host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
    }
}

fn refuse_shared_images(volumes: &[Wanted]) -> Result<(), Failure> {
    let mut seen = BTreeMap::new();
    for (volume, image) in volumes.iter().zip(images(volumes)) {
        let Some(image) = image else { continue }; // It is looked at again before it is opened.
        if let Some(other) = seen.insert(image, &volume.name) {
            return Err(Failure::usage(format!(
                "volumes {other} and {} name the same image {}: an image has one volume",
                volume.name, volume.backend
            )));
        }
    }
    Ok(())
}

/// Which images the volumes are, whatever they are called, as far as that is found out in time.
fn images(volumes: &[Wanted]) -> Vec<Option<Identity>> {
    let mut images = vec![None; volumes.len()];
    if volumes.len() < 2 {
        return images;
    }
    let (sender, found) = mpsc::channel();
    for (i, volume) in volumes.iter().enumerate() {
        let (sender, backend) = (sender.clone(), volume.backend.clone());
        // Nobody listens any more when it comes too late.
        std::thread::spawn(move || sender.send((i, tidepool_backend::identity(&backend))));
    }
    drop(sender);
    let deadline = Instant::now() + LOOK_WAIT_MAX;
    while let Ok((i, image)) =
        found.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    {
        images[i] = Some(image);
    }
    images
}

fn refuse_shared_sockets(
    front_doors: &[NbdUri],
    volumes: &[Wanted],
    admin: Option<&Path>,
) -> Result<(), Failure> {
    let mut paths: Vec<&Path> = admin.into_iter().collect();
    for door in front_doors {
        if let Transport::Unix { socket } = &door.transport {
            paths.push(socket);
        }
    }
    for volume in volumes {
        let Some(socket) = &volume.socket else { continue };
        if paths.contains(&socket.path.as_path()) {
            return Err(Failure::usage(format!(
                "the socket {} of volume {} is named twice; give each its own",
                socket.path.display(),
                volume.name
            )));
        }
        paths.push(&socket.path);
    }
    for (i, door) in front_doors.iter().enumerate() {
        let with_admin = matches!((&door.transport, admin), (Transport::Unix { socket }, Some(admin)) if socket == admin);
        if with_admin || front_doors[..i].iter().any(|other| other.transport == door.transport) {
            return Err(Failure::usage(format!(
                "--nbd {door}: its address is named twice; give each its own"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<Plan, Failure> {
        Plan::new(Config::parse(Path::new("t"), text).expect("valid TOML"))
    }

    const DOOR: &str = "cache = \"/c\"\nnbd = [\"nbd+unix:///?socket=/s\"]\nadmin = \"/a\"\n";

    #[test]
    fn write_back_is_never_a_surprise() {
        let loss = Some(Duration::from_millis(5_000));
        assert_eq!(mode_rule(None, None, false), Ok(Mode::WriteThrough));
        assert_eq!(mode_rule(None, None, true), Ok(Mode::WriteBack));
        assert_eq!(mode_rule(Some(Mode::WriteBack), None, true), Ok(Mode::WriteBack));
        assert_eq!(mode_rule(None, loss, false), Ok(Mode::WriteBack));
        assert_eq!(mode_rule(Some(Mode::WriteBack), None, false), Err(ModeError::Surprise));
        assert_eq!(mode_rule(Some(Mode::WriteBack), loss, false), Ok(Mode::WriteBack));
        assert_eq!(mode_rule(Some(Mode::WriteAround), loss, false), Ok(Mode::WriteAround));
        assert_eq!(mode_rule(None, Some(Duration::default()), false), Err(ModeError::Nothing));
    }

    #[test]
    fn a_volume_has_its_own_accepted_loss_or_the_daemons() {
        let text = format!(
            "{DOOR}accept-loss = \"5s\"\n[volume]\na = \"file:/a\"\n[volume.b]\nbackend = \"file:/b\"\naccept-loss = \"1s\"\n[volume.c]\nbackend = \"file:/c\"\nmode = \"write-through\"\n"
        );
        let volumes = plan(&text).expect("a plan").volumes;
        let seen: Vec<_> =
            volumes.iter().map(|v| (v.mode, v.accept_loss.map(Duration::as_millis))).collect();
        assert_eq!(
            seen,
            [
                (Mode::WriteBack, Some(5000)),
                (Mode::WriteBack, Some(1000)),
                (Mode::WriteThrough, Some(5000))
            ]
        );
    }

    #[test]
    fn other_hosts_get_in_without_encryption_only_if_that_is_said() {
        let doors = |text: &str| {
            plan(&format!("cache = \"/c\"\nadmin = \"/a\"\n{text}"))
                .map(|plan| plan.front_doors.len())
        };
        for address in ["127.0.0.1", "127.3.2.1:9", "localhost", "[::1]:10809"] {
            assert_eq!(doors(&format!("nbd = [\"nbd://{address}/\"]")), Ok(1), "{address}");
        }
        for address in ["192.0.2.1", "0.0.0.0:9", "[::]:9", "localhost.example"] {
            assert!(doors(&format!("nbd = [\"nbd://{address}/\"]")).is_err(), "{address}");
            assert_eq!(
                doors(&format!("nbd = [\"nbd://{address}/\"]\nnbd-unencrypted = true")),
                Ok(1),
                "{address}"
            );
        }
    }

    #[test]
    fn what_this_version_lacks_is_refused() {
        let failure = plan(&format!("{DOOR}vhost = \"/v\"")).expect_err("there is none");
        assert_eq!(failure.exit_status(), 2);
        assert!(
            failure.to_string().starts_with("--vhost is not available in this version"),
            "{failure}"
        );
        let drains = |text: &str| {
            let volumes = plan(&format!("{DOOR}{text}")).expect("a plan").volumes;
            volumes.iter().map(|v| v.drain).collect::<Vec<_>>()
        };
        let (grouped, unordered) = (Some(DrainOrder::Grouped), Some(DrainOrder::Unordered));
        let volumes =
            "[volume]\na = \"file:/a\"\n[volume.b]\nbackend = \"file:/b\"\ndrain = \"unordered\"\n";
        assert_eq!(drains(volumes), [None, unordered]);
        assert_eq!(drains(&format!("drain = \"grouped\"\n{volumes}")), [grouped, unordered]);
    }

    #[test]
    fn write_back_on_an_nbd_server_says_that_its_drain_is_unordered() {
        let of = |options: &str, volume: &str| {
            let uri = "nbd+unix:///disk?socket=/s";
            plan(&format!(
                "{DOOR}accept-loss = \"5s\"\n{options}\n[volume.a]\nbackend = \"{uri}\"\n{volume}"
            ))
        };
        let failure = of("", "").expect_err("nothing is said");
        assert_eq!(failure.exit_status(), 2);
        assert!(failure.to_string().contains("say --drain unordered"), "{failure}");
        assert!(of("drain = \"unordered\"", "").is_ok());
        assert!(of("", "mode = \"write-through\"").is_ok());
        assert!(of("", "read-only = true").is_ok(), "nothing is drained");
    }

    #[test]
    fn contradictions_are_refused() {
        for (text, part) in [
            ("nbd = [\"nbd://h/\"]".to_owned(), "--cache PATH"),
            (format!("{DOOR}accept-loss = \"0s\""), "accepts nothing"),
            (format!("{DOOR}[volume]\na = \"file:/a\"\nb = \"file:/a\""), "the same image"),
            (
                format!("{DOOR}[volume]\na = \"file:/a\"\nb = \"file:/a?emulate=ssd\""),
                "the same image",
            ),
            (
                format!(
                    "{DOOR}[volume]\na = \"file:/proc/version\"\nb = \"file:/proc/self/root/proc/version\""
                ),
                "the same image",
            ),
            (format!("{DOOR}[volume]\na = \"rbd:p/i\"\nb = \"rbd:p/i?id=x\""), "the same image"),
            (
                format!("{DOOR}[volume]\na = \"nbd://H/i\"\nb = \"nbd://h:10809/i\""),
                "the same image",
            ),
            (
                format!("{DOOR}[volume.a]\nbackend = \"file:/a\"\nmode = \"write-back\""),
                "--accept-loss",
            ),
            (
                "cache = \"/c\"\nnbd = [\"nbd+unix:///?socket=/s\"]\nadmin = \"/s\"".into(),
                "named twice",
            ),
            (format!("{DOOR}[volume.a]\nbackend = \"file:/a\"\nsocket = \"/s\""), "named twice"),
            (format!("{DOOR}[volume.a]\nbackend = \"file:/a\"\nsocket = \"/a\""), "named twice"),
            (
                format!(
                    "{DOOR}[volume.a]\nbackend = \"file:/a\"\nsocket = \"/v\"\n[volume.b]\nbackend = \"file:/b\"\nsocket = \"/v\""
                ),
                "the socket /v of volume b is named twice",
            ),
            (
                format!(
                    "{DOOR}[volume.a]\nbackend = \"file:/a\"\nsocket = \"/v\"\nallow = [\"cgroup:/{}\"]",
                    "x".repeat(500)
                ),
                "a shorter path or allow list does",
            ),
            (
                "cache = \"/c\"\nnbd = [\"nbd://127.0.0.1/a\", \"nbd://127.0.0.1/b\"]".into(),
                "named twice",
            ),
            ("cache = \"/c\"\nnbd = [\"nbd://0.0.0.0/\"]".into(), "say --nbd-unencrypted"),
            ("cache = \"/c\"\nnbd = [\"nbd://h/\"]".into(), "say --nbd-unencrypted"),
            ("cache = \"/c\"\nnbd = [\"http://h/\"]".into(), "not an NBD URI"),
            ("cache = \"/c\"\nnbd = [\"nbd://h/a%20b\"]".into(), "not a volume name"),
        ] {
            let failure = plan(&text).expect_err(&text);
            assert!(failure.to_string().contains(part), "{text}: {failure}");
            assert_eq!(failure.exit_status(), 2, "{text}");
        }
    }

    #[test]
    fn certificates_are_asked_for_where_they_are_needed() {
        for option in ["peer", "peer-listen"] {
            let tls = format!("{DOOR}{option} = [\"unix:/p\", \"tls://h2:10801\"]\n");
            let failure = plan(&tls).expect_err("nothing is said");
            assert_eq!(failure.exit_status(), 2);
            assert!(
                failure.to_string().starts_with("tls://h2:10801 needs certificates"),
                "{failure}"
            );
            let plan = plan(&format!("{tls}peer-tls = \"/tls\"\n")).expect("a plan");
            assert_eq!(plan.peer_tls, Some("/tls".into()));
        }
        assert!(plan(&format!("{DOOR}peer = [\"tcp://127.0.0.1:1\"]\n")).is_ok());
    }

    #[test]
    fn relative_paths_are_recorded_as_absolute_ones() {
        let plan =
            plan(&format!("{DOOR}[volume]\na = \"file:images/1?emulate=hdd\"").replace("/c", "c"))
                .expect("a plan");
        let here = std::env::current_dir().expect("a directory");
        assert_eq!(plan.cache, here.join("c"));
        let BackendUri::File { path, emulate, .. } = &plan.volumes[0].backend else {
            panic!("a file")
        };
        assert_eq!(path, &here.join("images/1"));
        assert!(emulate.is_some());
    }
}
