//! The daemon as a whole: what it binds, in which order it starts, and how it ends.

use super::doors::{Doors, NoDoor};
use super::monitor;
use super::neighbours::Neighbours;
use super::peers::PeerAddress;
use super::plan::{self, Plan, Wanted};
use super::volumes::{self, Volumes};
use super::watchdog::{self, Watchdog};
use crate::aborts::Aborts;
use crate::admin::server::{self, Context};
use crate::audit::Audit;
use crate::cache;
use crate::config::Config;
use crate::failure::{Failure, reason};
use crate::listen::{Listening, SocketFile};
use crate::shard::{self, ShardConfig, ShardHandle, StartError};
use crate::state;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tidepool_backend::{CheckStatus, OpenOptions};
use tidepool_engine::{EngineConfig, OpenError, RecoveryReport};
use tidepool_nbd::{NbdUri, Transport};
use tidepool_replica::Limits;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;
use tracing::{error, info, warn};
use uuid::Uuid;

/// How often the log says that the check of an image takes its time.
const CHECK_NOTE: Duration = Duration::from_secs(10);
/// How long a first start waits for the checks of its images before it serves those that have
/// answered.
const CHECK_WAIT_MAX: Duration = Duration::from_secs(300);
/// Names a path in the environment: while there is a file, the drain is paused. For measurements.
const DRAIN_SWITCH: &str = "TIDEPOOL_DRAIN_SWITCH";
/// How often it is looked whether there is a file.
const DRAIN_SWITCH_LOOK: Duration = Duration::from_millis(20);

/// What the command shows while the daemon starts.
pub trait Console: Send + Sync + 'static {
    /// So many bytes of so many are formatted.
    fn formatting(&self, done_bytes: u64, total_bytes: u64);
    /// The daemon accepts connections.
    fn ready(&self);
}

/// Serves until a signal asks for the end. `limits` says how long this host waits for others.
///
/// # Errors
/// One line: what failed, on what, what to do.
pub async fn serve(
    config: Config,
    limits: Limits,
    console: Arc<dyn Console>,
) -> Result<(), Failure> {
    assert!(
        limits.fit(tidepool_backend::FENCE_NS_MIN),
        "limits that do not fit each other: {limits:?}"
    );
    let plan = Plan::new(config)?;
    let neighbours = Neighbours::new(&plan, limits)?;
    let mut stop = StopSignals::new()
        .map_err(|e| Failure::failed(format!("cannot catch signals: {}", reason(&e))))?;
    allow_many_files();
    let sockets = Sockets::bind(&plan)?;
    let doors = Closing(sockets.volumes.clone());
    let shard = OnceLock::new();
    let watchdog = Watchdog::start();
    let daemon = tokio::select! {
        daemon = start(&plan, neighbours, sockets, &shard, console.clone()) => match daemon {
            Ok(daemon) => daemon,
            Err(failure) => {
                stop_shard(shard.get(), &mut stop).await;
                return Err(failure);
            }
        },
        () = stop.wait() => {
            info!("asked to end while starting");
            let _ = std::fs::remove_file(cache::unfinished_path(&plan.cache));
            return end_of(stop_shard(shard.get(), &mut stop).await);
        }
    };
    console.ready();
    watchdog.watch(daemon.volumes.shard().clone(), daemon.aborts.clone());
    notify(NotifyState::Ready);
    let ended = tokio::select! {
        () = stop.wait() => Ok(()),
        failure = daemon.watch() => Err(failure),
    };
    watchdog.rest();
    notify(NotifyState::Stopping);
    info!("stopping: flush and checkpoint");
    let stopped = stop_shard(shard.get(), &mut stop).await;
    drop((daemon, doors));
    ended.and_then(|()| end_of(stopped))
}

/// Lets this process have as many files open as it may: clients, images and their redo are files.
fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        warn!("cannot raise the limit of open files: {}", reason(&error.into()));
    }
}

/// The volumes' own sockets, whose files go away when the daemon ends, whatever still knows of
/// them.
struct Closing(Arc<Doors>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close_all();
    }
}

/// Makes the sockets of configured volumes. What stands in the place of one keeps its volume's
/// clients out, and nobody else.
fn open_doors(plan: &Plan) -> Result<Arc<Doors>, Failure> {
    let doors = Doors::default();
    for volume in &plan.volumes {
        let Some(socket) = &volume.socket else { continue };
        match doors.open(&volume.name, socket, true) {
            Ok(_) => {}
            Err(NoDoor::Trouble(why)) => doors.keep(&volume.name, socket.clone(), true, why),
            Err(NoDoor::Refused(why)) => {
                return Err(Failure::failed(format!("cannot serve volume {}: {why}", volume.name)));
            }
        }
    }
    Ok(Arc::new(doors))
}

/// What the command says of how the shard ended.
fn end_of(stopped: Option<End>) -> Result<(), Failure> {
    match stopped {
        Some(End::Failed) => Err(Failure::failed(
            "the cache device has failed: give its volumes a new cache; what was not drained can only be read from the old one",
        )),
        Some(End::Unflushed) => Err(Failure::failed(
            "cannot flush the cache device (what was acknowledged is recovered at the next start, as after a kill)",
        )),
        Some(End::Clean) | None => Ok(()),
    }
}

/// The sockets, bound before anything else happens.
struct Sockets {
    front_doors: Vec<(NbdUri, OwnedFd)>,
    admin: Option<OwnedFd>,
    metrics: Option<TcpListener>,
    peers: Vec<(PeerAddress, OwnedFd)>,
    /// The volumes' own.
    volumes: Arc<Doors>,
    files: Vec<SocketFile>,
}

impl Sockets {
    fn bind(plan: &Plan) -> Result<Sockets, Failure> {
        if let Some(directory) = &plan.directory {
            make_directory(directory)?;
        }
        let mut sockets = Sockets {
            front_doors: Vec::new(),
            admin: None,
            metrics: None,
            peers: Vec::new(),
            volumes: Arc::default(),
            files: Vec::new(),
        };
        if let Some(path) = &plan.admin {
            let (socket, file) =
                Listening::bind_private(path).map_err(Failure::failed)?.into_parts();
            sockets.admin = Some(socket);
            sockets.files.extend(file);
        }
        for uri in &plan.front_doors {
            let (socket, file) =
                Listening::bind(&uri.transport).map_err(Failure::failed)?.into_parts();
            sockets.front_doors.push((uri.clone(), socket));
            sockets.files.extend(file);
        }
        for address in &plan.peer_doors {
            let listening = match address {
                PeerAddress::Unix(path) => Listening::bind_private(path),
                PeerAddress::Tcp(address) => Listening::bind_address(*address).map(Listening::from),
                PeerAddress::Tls { host, port } => {
                    Listening::bind(&Transport::Tcp { host: host.to_str().into(), port: *port })
                }
            };
            let (socket, file) = listening.map_err(Failure::failed)?.into_parts();
            sockets.peers.push((address.clone(), socket));
            sockets.files.extend(file);
        }
        sockets.metrics = plan.metrics.map(bind_metrics).transpose()?;
        sockets.volumes = open_doors(plan)?;
        Ok(sockets)
    }
}

fn make_directory(directory: &Path) -> Result<(), Failure> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.map_err(|e| {
        Failure::failed(format!("cannot create {}: {}", directory.display(), reason(&e)))
    })
}

fn bind_metrics(address: SocketAddr) -> Result<TcpListener, Failure> {
    let listener = Listening::bind_address(address).map_err(Failure::failed)?;
    let ready = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
    ready.map_err(|e| Failure::failed(format!("cannot serve metrics on {address}: {}", reason(&e))))
}

/// A daemon that serves.
struct Daemon {
    volumes: Arc<Volumes>,
    admin: tokio::task::JoinHandle<()>,
    metrics: Option<tokio::task::JoinHandle<()>>,
    /// What goes on beside: the listeners for other hosts, a look at certificates, another at
    /// sockets.
    tasks: Vec<tokio::task::JoinHandle<()>>,
    aborts: Aborts,
    /// The files of the sockets go away with the daemon.
    _files: Vec<SocketFile>,
}

impl Daemon {
    /// Runs until something ends that should not.
    async fn watch(&self) -> Failure {
        let error = monitor::watch(&self.volumes).await;
        Failure::failed(format!(
            "cannot go on serving: {error} (start again: nothing acknowledged is lost)"
        ))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.admin.abort();
        if let Some(metrics) = &self.metrics {
            metrics.abort();
        }
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Says what the cache has less of than was written to it.
fn warn_of_recovery(found: &RecoveryReport) {
    if found.records_cut > 0 {
        warn!(
            "the newest {} records of the cache's log are cut off, because one of them is damaged and nothing says that it was \
             flushed: a power failure does that; if there was none, the SSD loses data",
            found.records_cut
        );
    }
    if found.blocks_lost > 0 || found.volumes_failed > 0 {
        warn!(
            "the cache has lost {} blocks that no image has, and {} volumes of which nobody knows what is lost: tidepool status names them",
            found.blocks_lost, found.volumes_failed
        );
    }
}

async fn start(
    plan: &Plan,
    neighbours: Neighbours,
    sockets: Sockets,
    running: &OnceLock<ShardHandle>,
    console: Arc<dyn Console>,
) -> Result<Daemon, Failure> {
    let Sockets { front_doors, admin, metrics, peers, volumes: doors, files } = sockets;
    if !plan.cache.exists() {
        check_images(&plan.volumes, !plan.peer_doors.is_empty()).await?;
    }
    let shard = start_shard(plan, neighbours.limits, console).await?;
    let shard = running.get_or_init(|| shard).clone();
    let opened = shard.opened();
    warn_of_recovery(&opened.recovery);
    let host = host_name();
    let pairs = neighbours.pairs(plan, &doors);
    let volumes = Volumes::new(shard.clone(), opened.uuid, host.clone(), plan.drain, pairs);
    let mut tasks = neighbours.take_owners_in(peers, &volumes, &host)?;
    tasks.extend(neighbours.watch_certificates(&host, &shard));
    tasks.push(tokio::spawn(volumes.clone().ask_for_kept_copies()));
    let aborts =
        Aborts::new(state::directory(), Uuid::from_bytes(opened.uuid).to_string(), shard.clone());
    aborts.note_panics();
    let noted = aborts.clone();
    let left_out = tokio::task::spawn_blocking(move || noted.left_out()).await.unwrap_or_default();
    volumes.leave_out(left_out);
    let starting = volumes.start(plan.volumes.clone()).await.map_err(Failure::failed)?;
    doors.serve(&shard);
    tasks.push(tokio::spawn(doors.clone().mend(shard.clone())));
    if let Some(switch) = std::env::var_os(DRAIN_SWITCH) {
        warn!(
            "{DRAIN_SWITCH} is set: nothing goes to the images while there is a file {}",
            switch.display()
        );
        tasks.push(tokio::spawn(obey_drain_switch(switch.into(), shard.clone())));
    }
    listen(front_doors, &volumes).await?;
    let context = Arc::new(Context::new(
        volumes.clone(),
        (plan.cache.clone(), Uuid::from_bytes(opened.uuid)),
        host,
        plan.accept_loss,
        Arc::new(Audit::start(state::directory())),
    ));
    let admin = admin.map(admin_listener).transpose()?;
    let admin = tokio::spawn({
        let context = context.clone();
        async move {
            match admin {
                Some(listener) => server::serve_admin(listener, context).await,
                None => std::future::pending().await,
            }
        }
    });
    let metrics = metrics.map(|listener| tokio::spawn(server::serve_metrics(listener, context)));
    // Those that are open are served meanwhile.
    let daemon = Daemon { volumes, admin, metrics, tasks, aborts, _files: files };
    starting.tried().await.map_err(Failure::failed)?;
    for uri in &plan.front_doors {
        info!("listening on {uri}");
        if plan::is_open_to_others(&uri.transport) {
            warn!("{uri} is not encrypted, and everybody who reaches it may use the volumes");
        }
    }
    Ok(daemon)
}

/// Pauses the drain as long as there is a file at this path.
async fn obey_drain_switch(switch: PathBuf, shard: ShardHandle) {
    let mut paused = false;
    loop {
        let wanted = switch.exists();
        if wanted != paused && shard.pause_drain(wanted).await.is_err() {
            return;
        }
        paused = wanted;
        tokio::time::sleep(DRAIN_SWITCH_LOOK).await;
    }
}

/// Begins to take clients in at the front doors. One that is for a volume needs that volume.
async fn listen(front_doors: Vec<(NbdUri, OwnedFd)>, volumes: &Volumes) -> Result<(), Failure> {
    for (uri, socket) in front_doors {
        let volume = Some(uri.export.clone()).filter(|name| !name.is_empty());
        if let Some(name) = &volume
            && !volumes.contains(name).await.map_err(Failure::failed)?
        {
            return Err(Failure::failed(format!(
                "cannot offer volume {name} on {uri}: there is none of this name (add it with --volume {name}=URI)"
            )));
        }
        let listening = volumes.shard().listen(socket, volume).await;
        listening.map_err(|e| Failure::failed(format!("cannot listen on {uri}: {e}")))?;
    }
    Ok(())
}

fn admin_listener(socket: OwnedFd) -> Result<UnixListener, Failure> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    let ready = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
    ready.map_err(|e| Failure::failed(format!("cannot serve the admin socket: {}", reason(&e))))
}

/// Looks at the images of volumes before a cache is made for them: that none of them can be served
/// is then known while nothing is touched. One that cannot be served does not keep the others
/// waiting; it is told and tried again as at any start.
async fn check_images(volumes: &[Wanted], takes_copies: bool) -> Result<(), Failure> {
    let mut refused = Vec::new();
    let checks: Vec<_> = volumes
        .iter()
        .cloned()
        .map(|volume| {
            tokio::task::spawn_blocking(move || {
                let options = OpenOptions { read_only: volume.read_only, ..OpenOptions::default() };
                (tidepool_backend::check(&volume.backend, &options), volume.name)
            })
        })
        .collect();
    let start = Instant::now();
    for (check, volume) in checks.into_iter().zip(volumes) {
        let mut check = check;
        let answered = loop {
            match timeout(CHECK_NOTE, &mut check).await {
                Ok(Ok(outcome)) => break Some(outcome),
                Ok(Err(_)) => {
                    return Err(Failure::failed(
                        "cannot check the images: an internal error occurred",
                    ));
                }
                Err(_) if start.elapsed() >= CHECK_WAIT_MAX => break None,
                Err(_) => {
                    let waited = start.elapsed().as_secs();
                    warn!(
                        "volume {}: still waiting for {} ({waited} s)",
                        volume.name, volume.backend
                    );
                }
            }
        };
        // It may be served once it answers.
        let Some((report, name)) = answered else { continue };
        if let Some(failed) = report.items.iter().find(|item| item.status == CheckStatus::Failed) {
            refused.push(format!("cannot serve volume {name}: {}", failed.detail));
        }
    }
    match refused.pop() {
        Some(why) if refused.len() + 1 == volumes.len() && !takes_copies => {
            Err(Failure::failed(why))
        }
        _ => Ok(()),
    }
}

/// Makes the cache if it is missing, recovers it and starts its reactor.
async fn start_shard(
    plan: &Plan,
    limits: Limits,
    console: Arc<dyn Console>,
) -> Result<ShardHandle, Failure> {
    let (path, size) = (plan.cache.clone(), plan.cache_size);
    let task = tokio::task::spawn_blocking(move || {
        cache::ensure(&path, size, &mut |done, total| console.formatting(done, total))
            .map_err(Failure::failed)?;
        let config =
            ShardConfig { cache: path, engine: EngineConfig::default(), cpu: None, limits };
        shard::start(config).map_err(start_failure)
    });
    task.await.unwrap_or_else(|_| Err(Failure::failed("cannot start: an internal error occurred")))
}

fn start_failure(error: StartError) -> Failure {
    match error {
        StartError::Cache(_) => Failure::failed(format!("cannot use the cache {error}")),
        StartError::Recover { source: OpenError::NotACache, .. } => Failure::failed(format!(
            "cannot use the cache {error} (name another path, or give up what is there with `tidepool cache format --force`)"
        )),
        StartError::Recover { .. } => Failure::failed(format!("cannot use the cache {error}")),
        StartError::Ring(_) | StartError::System { .. } => Failure::failed(error),
    }
}

/// How a shard ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Flushed, with a last checkpoint.
    Clean,
    /// Without: the next start recovers as after a kill.
    Unflushed,
    /// On a cache device that has failed.
    Failed,
}

/// Flush, checkpoint, release the backends. `None` when there is no shard.
/// A second signal ends the process on the spot, which loses nothing that was acknowledged.
async fn stop_shard(shard: Option<&ShardHandle>, stop: &mut StopSignals) -> Option<End> {
    let shard = shard?;
    let orderly = async {
        let stopped = match shard.shutdown().await {
            Ok(stopped) => stopped,
            Err(e) => {
                error!("cannot stop the reactor in order: {e}");
                return End::Unflushed;
            }
        };
        let end = match &stopped.outcome {
            _ if stopped.device_failed => End::Failed,
            Ok(()) => End::Clean,
            Err(e) => {
                error!("cannot write the last checkpoint: {e}");
                End::Unflushed
            }
        };
        volumes::close_all(stopped).await;
        end
    };
    tokio::select! {
        end = orderly => Some(end),
        () = stop.wait() => {
            warn!("asked a second time: ending at once");
            end_at_once(1);
        }
    }
}

/// Ends the process without its exit handlers: those of a backend's libraries would wait for
/// threads that hang in a call, or pull the ground from under them.
pub fn end_at_once(status: i32) -> ! {
    // SAFETY: no preconditions; nothing of this process is used any more.
    unsafe { libc::_exit(status) }
}

/// The signals that ask for an orderly end.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<StopSignals> {
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

/// Tells the service manager, if there is one. If it does not read at the moment a thread waits for
/// it.
fn notify(state: NotifyState<'static>) {
    if watchdog::tell(std::slice::from_ref(&state)) {
        return;
    }
    let wait = move || {
        if let Err(e) = sd_notify::notify(&[state]) {
            warn!("cannot notify the service manager: {}", reason(&e));
        }
    };
    if let Err(e) = std::thread::Builder::new().name("notify".into()).spawn(wait) {
        warn!("cannot notify the service manager: {}", reason(&e));
    }
}

/// Name of this host.
fn host_name() -> String {
    let name = tidepool_backend::host_name();
    if name.trim().is_empty() { "localhost".to_owned() } else { name }
}
