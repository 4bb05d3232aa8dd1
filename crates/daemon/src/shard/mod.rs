//! The shard: one reactor thread that joins the core, its cache device, the backends of its volumes
//! and the NBD clients through one io_uring.
//!
//! Nothing on the way of a request takes a lock or allocates: tables have a fixed size, payloads
//! travel in the core's arena, and the control plane talks to the thread through a queue of
//! commands.

mod api;
mod control;
mod core;
mod front;
mod io;
pub mod limits;
mod net;
mod pair;
mod pulse;
mod reactor;
mod shared;

pub use self::core::Core;
pub use api::{
    Connected, Counterpart, Guest, Hello, Image, Newest, Opened, Refused, ShardError, Socket,
    Stopped, StoppedVolume, Wants,
};
pub use control::handle::ShardHandle;
pub use control::stats::{
    CopiesStatus, FollowedStatus, LatencyHistogram, PairStatus, ReactorCounters, ShardStatus,
    ShardVolumeStatus,
};
pub use front::coming::Announcement;
pub use io::memory;
pub use pair::counterpart::{counterpart, without_counterpart};

use pulse::Pulse;
use reactor::Reactor;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use tidepool_driver::{CacheFile, Ring};
use tidepool_engine::Engine;
pub use tidepool_engine::{AddError, Attach, EngineConfig, OpenError};
use tidepool_replica::Limits;

/// How to start a shard.
#[derive(Debug, Clone)]
pub struct ShardConfig {
    /// The cache file or block device; formatted before.
    pub cache: PathBuf,
    /// The core's own settings.
    pub engine: EngineConfig,
    /// The processor that the reactor thread is bound to; `None` leaves it to the scheduler.
    pub cpu: Option<usize>,
    /// How long this host waits for others.
    pub limits: Limits,
}

/// Why a shard did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The cache device could not be opened.
    #[error(transparent)]
    Cache(#[from] tidepool_driver::CacheError),
    /// What is on the cache device could not be recovered.
    #[error("{}: {source}", .path.display())]
    Recover {
        /// The cache device.
        path: PathBuf,
        /// What the core says.
        source: OpenError,
    },
    /// The kernel refused an io_uring.
    #[error("cannot start the reactor: {0}")]
    Ring(#[from] tidepool_driver::RingError),
    /// The kernel refused something else.
    #[error("cannot start the reactor: {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> StartError {
    move |source| StartError::System { what, source }
}

/// Opens and locks the cache, recovers what is on it, and starts the reactor thread. Blocks until
/// the shard takes commands. A panic of the reactor aborts the process: what was acknowledged is in
/// the log, and a restart serves it; a daemon without its reactor would serve nobody.
///
/// # Errors
/// See [`StartError`]; nothing has been changed then.
pub fn start(config: ShardConfig) -> Result<ShardHandle, StartError> {
    let ShardConfig { cache: path, engine, cpu, limits } = config;
    start_with(cpu, limits, move || {
        let cache = CacheFile::open(&path)?;
        for told in cache.drawbacks() {
            tracing::warn!("{}: {told}", path.display());
        }
        let opened = Engine::open(&mut cache.blocking(), engine, tidepool_driver::now());
        let (engine, recovery) = opened.map_err(|source| StartError::Recover { path, source })?;
        let opened = Opened { uuid: engine.uuid(), recovery };
        Ok((engine, Some(cache), opened))
    })
}

/// Starts a reactor thread with the core that `open` makes there, on the cache that it returns.
///
/// # Errors
/// What `open` says, or the kernel refused a ring or a thread.
pub fn start_with<C, F>(
    cpu: Option<usize>,
    limits: Limits,
    open: F,
) -> Result<ShardHandle, StartError>
where
    C: Core,
    F: FnOnce() -> Result<(C, Option<CacheFile>, Opened), StartError> + Send + 'static,
{
    let bell = rustix::event::eventfd(
        0,
        rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
    )
    .map_err(|e| system("make an eventfd")(e.into()))?;
    let bell: Arc<OwnedFd> = Arc::new(bell);
    let (sender, commands) = mpsc::channel();
    let (started, outcome) = mpsc::sync_channel(1);
    let reactor_bell = Arc::clone(&bell);
    let pulse = Arc::<Pulse>::default();
    let reactor_pulse = Arc::clone(&pulse);
    let body = move || {
        // A ring belongs to the thread that makes it.
        let made = open().and_then(|made| Ok((made, Ring::new()?)));
        match made {
            Ok(((core, cache, opened), mut ring)) => {
                bind(cpu);
                ring.begin_elsewhere(cache.as_ref().is_some_and(CacheFile::has_writers_wait));
                let _ = started.send(Ok(opened));
                Reactor::new(ring, core, cache, (commands, reactor_bell, reactor_pulse), limits)
                    .run();
            }
            Err(error) => {
                let _ = started.send(Err(error));
            }
        }
    };
    let abort_on_panic = move || {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err() {
            // The panic's message is on stderr already.
            std::process::abort();
        }
    };
    std::thread::Builder::new()
        .name("reactor".into())
        .spawn(abort_on_panic)
        .map_err(system("start a thread"))?;
    match outcome.recv() {
        Ok(Ok(opened)) => Ok(ShardHandle::new(sender, bell, pulse, opened)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(system("start a thread")(std::io::Error::other("it ended at once"))),
    }
}

/// Binds the calling thread to a processor.
fn bind(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!("the reactor is not bound to processor {cpu}: {error}");
    }
}
