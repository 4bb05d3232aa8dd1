//! The volumes of the daemon: each one's way from its URI to being served, through changes, and
//! back to a plain image.
//!
//! | file | what it is about |
//! |---|---|
//! | `add` | How a volume comes that the cache knows nothing of |
//! | `arrival` | A volume comes here from another host while a guest that uses it moves |
//! | `attach` | How a volume that is known gets its backend |
//! | `clones` | volumes of the parents of clones |
//! | `counterpart` | What a host keeps of a volume for the host that had the other copy of it, and whether that one needs it |
//! | `departure` | A volume goes to another host while a guest that uses it moves there |
//! | `entry` | One volume as the control plane knows it, from its URI to its end |
//! | `failover` | a takeover that a manager of hosts asks for |
//! | `give_up` | A volume goes without what is dirty |
//! | `handoff` | A volume leaves this host |
//! | `operations` | What is done with a volume as a whole while it is served |
//! | `pairs` | What this host does about second copies |
//! | `replication` | Second copies of volumes (RFC 9) |
//! | `reports` | What is told of the volumes at a moment |
//! | `snapshots` | Snapshots of a volume's image, which nobody else can take, remove or protect while a cache owns it |
//! | `sockets` | The volumes' own sockets, and what the cache remembers of them |
//! | `start` | all volumes of a start, side by side |
//! | `takeover` | A copy becomes this host's volume |
//! | `turns` | One at a time of the same name |
//! | `whole` | whether the cache has everything, or the peer has to be asked first |

mod add;
mod arrival;
mod attach;
mod clones;
mod counterpart;
mod departure;
mod entry;
mod failover;
mod give_up;
mod handoff;
mod operations;
mod pairs;
mod replication;
mod reports;
mod snapshots;
mod sockets;
mod start;
mod takeover;
mod turns;
mod whole;

use super::doors::Doors;
use super::error::VolumeError;
use super::peers::{Hosts, Images};
use crate::aborts::LeftOut;
use crate::shard::{ShardError, ShardHandle, Stopped};
use crate::volume;
use entry::{Entry, Facts};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration as Time;
use tidepool_backend::{Backend, BackendError, BackendUri, Release};
use tidepool_engine::api::{VolumeId, VolumeSpec};
use tidepool_replica::Limits;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;
use tracing::warn;
use turns::Turns;

pub use pairs::Pairs;

/// How long a backend that was never open before is waited for.
const OPEN_WAIT_MAX: Time = Time::from_secs(60);
/// How long backends are waited for that are to be released: at the end of the daemon all together,
/// at a handover one.
const CLOSE_WAIT_MAX: Time = Time::from_secs(10);

/// All volumes of one shard.
pub struct Volumes {
    shard: ShardHandle,
    cache_uuid: [u8; 16],
    host: String,
    /// The order that was asked for of all volumes.
    drain: Option<volume::DrainOrder>,
    since: Instant,
    /// What this host does about second copies.
    pairs: Pairs,
    /// The images that the configuration names.
    configured: Mutex<Vec<BackendUri>>,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
    /// Held while a parent of clones is looked for, added or removed.
    parents: AsyncMutex<()>,
    /// Held while a copy of another host's volume becomes this host's.
    takeovers: Turns,
    /// Held by a thread that asks an image something, under the image's name.
    images: Turns,
    /// Held while an image is opened, until its backend is in the shard or closed.
    openings: Turns,
    /// The volumes' own sockets.
    doors: Arc<Doors>,
    /// Volumes that the start does not serve, until it has entered them.
    left_out: Mutex<BTreeMap<String, LeftOut>>,
    /// Held while the counterpart of a copy is asked whether it needs that.
    counterparts: Turns,
    /// Volumes that have left this host with everything in their images.
    left: Mutex<counterpart::Left>,
    /// Volumes that are to come here, with what lets their clients in.
    arriving: Mutex<BTreeMap<String, arrival::Pending>>,
}

/// What the shard refused to do with a volume.
fn from_shard(what: &'static str, name: &str) -> impl Fn(ShardError) -> VolumeError + Copy {
    move |source| VolumeError::Shard { what, name: name.to_owned(), source }
}

/// The lock of plain data that no panic leaves half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Volumes {
    /// The volumes of `shard`; none is known yet. Second copies of them may be at peers, and
    /// others' may be here.
    pub fn new(
        shard: ShardHandle,
        cache_uuid: [u8; 16],
        host: String,
        drain: Option<volume::DrainOrder>,
        pairs: Pairs,
    ) -> Arc<Volumes> {
        Arc::new(Volumes {
            shard,
            cache_uuid,
            host,
            drain,
            since: Instant::now(),
            doors: pairs.doors.clone(),
            pairs,
            configured: Mutex::default(),
            entries: Mutex::default(),
            parents: AsyncMutex::default(),
            takeovers: Turns::default(),
            images: Turns::default(),
            openings: Turns::default(),
            left_out: Mutex::default(),
            counterparts: Turns::default(),
            left: Mutex::default(),
            arriving: Mutex::default(),
        })
    }

    /// These are not served by the start that follows, unless somebody asks for it.
    pub(super) fn leave_out(&self, volumes: BTreeMap<String, LeftOut>) {
        *lock(&self.left_out) = volumes;
    }

    /// The shard that serves them.
    pub fn shard(&self) -> &ShardHandle {
        &self.shard
    }

    /// Which hosts may do what here.
    pub(super) fn hosts(&self) -> &Hosts {
        &self.pairs.hosts
    }

    /// Images that other hosts may name, besides those of volumes that are known here.
    pub(super) fn images_of_others(&self) -> &[Images] {
        &self.pairs.images
    }

    /// Names and images of all volumes that are to be served here, also of those that are not open.
    pub(super) fn wanted_images(&self) -> Vec<(String, BackendUri)> {
        lock(&self.entries)
            .values()
            .map(|entry| (entry.name.clone(), entry.backend.clone()))
            .collect()
    }

    /// How long this host waits for others.
    pub(super) fn limits(&self) -> &Limits {
        &self.pairs.limits
    }

    fn knows(&self, entry: &Arc<Entry>) -> bool {
        is_among(&lock(&self.entries), entry)
    }

    fn entry(&self, name: &str) -> Result<Arc<Entry>, VolumeError> {
        lock(&self.entries).get(name).cloned().ok_or_else(|| VolumeError::Unknown(name.to_owned()))
    }

    /// Whether a volume of this name is here, is to be, or is here as the copy of another host's.
    ///
    /// # Errors
    /// The shard has stopped.
    pub async fn contains(&self, name: &str) -> Result<bool, ShardError> {
        let known = self.shard.volumes().await?;
        Ok(lock(&self.entries).contains_key(name)
            || known.iter().any(|(_, spec, _)| spec.name == name))
    }

    /// Whether a volume of this name is served here, or is being opened. One that is only
    /// configured may be another host's.
    fn is_opening(&self, name: &str) -> bool {
        lock(&self.entries).get(name).is_some_and(|entry| !entry.is_wish())
    }

    /// Closes a backend that the shard did not take.
    async fn put_back(&self, entry: &Entry, backend: Option<Box<dyn Backend>>, clean: bool) {
        let Some(backend) = backend else { return };
        if let Err(error) = close(backend, clean).await {
            warn!("volume {}: {error}", entry.name);
        }
    }

    /// What the core knows of a volume.
    async fn spec_of(&self, id: VolumeId) -> Result<Option<VolumeSpec>, ShardError> {
        let volumes = self.shard.volumes().await?;
        Ok(volumes.into_iter().find(|(known, ..)| *known == id).map(|(_, spec, _)| spec))
    }
}

/// Releases the backends of a stopped shard. What stays dirty keeps its guard on the image. A
/// backend that is out of reach is waited for only so long; the caller ends the process soon, which
/// leaves lock, record and guard as a kill does.
pub async fn close_all(stopped: Stopped) {
    let cache_failed = stopped.device_failed;
    let closing = stopped.volumes.into_iter().filter_map(|volume| {
        let backend = volume.backend?;
        if volume.unflushed {
            warn!(
                "volume {}: {} has not flushed the last writes in time; if it loses power now it may lose them",
                volume.spec.name, volume.spec.backend
            );
        }
        let release = Release { clean: volume.clean, cache_failed };
        Some((volume.spec, tokio::task::spawn_blocking(move || backend.close(release))))
    });
    let closing: Vec<_> = closing.collect();
    let deadline = Instant::now() + CLOSE_WAIT_MAX;
    let mut hangs = false;
    for (VolumeSpec { name, backend, .. }, task) in closing {
        match tokio::time::timeout_at(deadline, task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => warn!("volume {name}: cannot release its image: {error}"),
            Ok(Err(_)) => {
                warn!("volume {name}: cannot release its image: an internal error occurred")
            }
            Err(_) => {
                hangs = true;
                warn!(
                    "stopped without releasing {backend}: it has not answered for {} s (the next start takes it back as after a kill)",
                    CLOSE_WAIT_MAX.as_secs()
                );
            }
        }
    }
    if hangs {
        // A release may still come to its end. Until the process does, nobody else may take this
        // cache's lock for proof that it is dead.
        std::mem::forget(stopped.cache);
    }
}

/// The volume is still the one of its name.
fn is_among(entries: &BTreeMap<String, Arc<Entry>>, entry: &Arc<Entry>) -> bool {
    entries.get(&entry.name).is_some_and(|known| Arc::ptr_eq(known, entry))
}

/// Closes a backend on a thread that may block.
async fn close(backend: Box<dyn Backend>, clean: bool) -> Result<(), BackendError> {
    match tokio::task::spawn_blocking(move || backend.close(Release { clean, cache_failed: false }))
        .await
    {
        Ok(outcome) => outcome,
        Err(_) => Err(BackendError::Unavailable {
            what: "the backend".into(),
            why: "closing it ended in an internal error".into(),
        }),
    }
}
