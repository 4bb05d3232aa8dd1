//! The volumes of the daemon: each one's way from its URI to being served, through changes, and back
//! to a plain image.

mod arrival;
mod attach;
mod clones;
mod counterpart;
mod departure;
mod failover;
mod give_up;
mod handoff;
mod operations;
mod replication;
mod snapshots;
mod sockets;
mod start;
mod turns;
mod whole;

use super::doors::Doors;
use super::error::VolumeError;
use super::peers::{Hosts, Images, Route};
use super::plan::{Wanted, drain_order, mode_rule, order_rule, quota_rule};
use crate::aborts::{self, LeftOut};
use crate::admin::{AddVolume, SetVolume, State, VolumeReport};
use crate::config::VolumeConfig;
use crate::metrics::Sample;
use crate::report::{self, Known};
use crate::shard::{
    Announcement, Image, Refused, ShardError, ShardHandle, ShardStatus, ShardVolumeStatus, Stopped,
};
use crate::units::{Duration, time};
use crate::volume::{self, Mode, is_parent_name};
use attach::Taking;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration as Time;
use tidepool_backend::{
    Backend, BackendError, BackendUri, Identity, Layout, OpenOptions, Opened, Parent, Prepared, Release,
};
use tidepool_engine::api::{Degraded, DrainOrder, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::Limits;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};
use turns::{Turn, Turns};

/// How long a backend that was never open before is waited for.
const OPEN_WAIT_MAX: Time = Time::from_secs(60);
/// How long a volume that is to be opened waits for what the others' file systems say about their images.
const LOOK_WAIT_MAX: Time = Time::from_secs(5);
/// How long backends are waited for that are to be released: at the end of the daemon all together, at a handover one.
const CLOSE_WAIT_MAX: Time = Time::from_secs(10);

/// All volumes of one shard.
pub struct Volumes {
    shard: ShardHandle,
    cache_uuid: [u8; 16],
    host: String,
    /// The order that was asked for of all volumes.
    drain: Option<volume::DrainOrder>,
    /// Accepted loss of volumes of which nothing is said.
    accept_loss: Option<Duration>,
    since: Instant,
    /// Where second copies may be, the best first.
    peers: Arc<[Route]>,
    /// Others' second copies may be here.
    takes_copies: bool,
    /// They come from other hosts, whose word for the way to an image is not taken.
    takes_from_hosts: bool,
    /// The images that the configuration names.
    configured: Mutex<Vec<BackendUri>>,
    /// What write-back does while there is no second copy that counts.
    without_peer: Degraded,
    limits: Limits,
    hosts: Arc<Hosts>,
    images_of_others: Vec<Images>,
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

/// What is to be done about second copies, and the volumes' own sockets.
#[derive(Clone, Default)]
pub struct Pairs {
    /// Where they may be, the best first.
    pub peers: Vec<Route>,
    /// Others' may be here.
    pub takes_copies: bool,
    /// They come over the network, and not from other daemons of this host alone.
    pub takes_from_hosts: bool,
    /// What write-back does while there is none that counts, and no loss is accepted.
    pub without_peer: Degraded,
    /// How long this host waits for others.
    pub limits: Limits,
    /// Which hosts may do what here.
    pub hosts: Arc<Hosts>,
    /// Images that they may name, besides those of volumes that are known here.
    pub images: Vec<Images>,
    /// Accepted loss of volumes of which nothing is said.
    pub accept_loss: Option<Duration>,
    /// The sockets that are made already.
    pub doors: Arc<Doors>,
}

/// One volume as the control plane knows it.
struct Entry {
    name: String,
    backend: BackendUri,
    facts: Mutex<Facts>,
    /// Held while the volume is added, changed or removed.
    change: Arc<AsyncMutex<()>>,
    /// Held while it is found out which image the URI means: never more than one thread hangs in that.
    look: Arc<AsyncMutex<()>>,
    /// Held while its backend is being opened.
    opening: AsyncMutex<()>,
    /// Has its backend tried again at once.
    again: Notify,
}

#[derive(Default)]
struct Facts {
    /// The core's number, once it serves or has recovered the volume.
    id: Option<VolumeId>,
    /// How it is to be served, while it is only configured: the cache holds nothing of it, and its image could not be opened yet.
    wish: Option<Wanted>,
    /// Somebody has asked for it: the next attempt serves it, no matter which cache had its image last.
    asked_for: bool,
    /// Has its clients wait.
    announced: Option<Announcement>,
    accept_loss: Option<Duration>,
    /// The order of the drain, as far as it was said.
    drain: Option<volume::DrainOrder>,
    /// State above the core's.
    state: Option<State>,
    error: Option<String>,
    /// Which image it is, as far as known.
    image: Option<Identity>,
    /// What is to be known of its image, a line each.
    notes: Vec<String>,
    /// The volume through which it reads what it has from its parent.
    parent: Option<String>,
    /// Which snapshot its backend has open, if it is one.
    snapshot: Option<String>,
    /// It is to be served although the cache takes it for a copy: it is being taken over, or gets back what its log has lost.
    takes_over: bool,
    /// Its record was this cache's.
    was_ours: bool,
    /// For the first attempt to open its backend.
    taking: Taking,
    /// What keeps a peer connected.
    keeping: Option<AbortHandle>,
    /// It is not served because its peer may have more than this cache, as the record of this generation says.
    waits_as_of: Option<u64>,
    /// With the next attempt it is served all the same, if the record is of this generation.
    whole_as_of: Option<u64>,
    /// With the next attempt its image is rolled back to this snapshot.
    roll_back: Option<String>,
    /// It is not served because a rollback of its image was cut short.
    half_rolled_back: bool,
    /// Who wants to know how the next attempt to open its backend ends.
    asking: Option<oneshot::Sender<Result<(), VolumeError>>>,
    /// It was given up while its image was being opened.
    given_up: bool,
    /// It is not served for a while, since the daemon was ended while it worked for it.
    left_out: Option<LeftOut>,
    /// It may go to another host.
    departing: Option<departure::Departing>,
}

/// What the shard refused to do with a volume.
fn from_shard(what: &'static str, name: &str) -> impl Fn(ShardError) -> VolumeError + Copy {
    move |source| VolumeError::Shard { what, name: name.to_owned(), source }
}

/// The lock of plain data that no panic leaves half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Facts {
    /// Of a volume of which the cache holds nothing yet.
    fn of_new(wanted: &Wanted) -> Facts {
        let Wanted { accept_loss, drain, .. } = *wanted;
        Facts { accept_loss, drain, state: Some(State::Opening), ..Facts::default() }
    }

    /// A rollback that was asked for with the last attempt is not made with a later one.
    fn forget_rollback(&mut self) {
        if self.asking.is_none() {
            self.roll_back = None;
        }
    }

    /// What a report tells of it.
    fn known(&self) -> Known {
        Known {
            accept_loss: self.accept_loss,
            state: self.state,
            error: self.error.clone(),
            notes: self.notes.clone(),
            parent: self.parent.clone(),
            ..Known::default()
        }
    }
}

impl Entry {
    fn new(name: &str, backend: BackendUri, facts: Facts) -> Arc<Entry> {
        Arc::new(Entry {
            name: name.to_owned(),
            backend,
            facts: Mutex::new(facts),
            change: Arc::default(),
            look: Arc::default(),
            opening: AsyncMutex::default(),
            again: Notify::new(),
        })
    }

    /// The core's number of a volume that has its backend.
    fn attached(&self, what: &'static str) -> Result<VolumeId, VolumeError> {
        let facts = lock(&self.facts);
        match (facts.id, facts.state) {
            (Some(id), None) => Ok(id),
            (_, Some(State::Removing)) => Err(VolumeError::Busy(self.name.clone())),
            _ => {
                let why = facts.error.clone().unwrap_or_else(|| "it is still being opened".into());
                Err(VolumeError::Unreachable { what, name: self.name.clone(), why })
            }
        }
    }

    /// Finds out which image it is now; takes as long as its file system does.
    async fn look(self: Arc<Entry>) {
        let turn = self.look.clone().lock_owned().await;
        let look = tokio::task::spawn_blocking(move || {
            let image = tidepool_backend::identity(&self.backend);
            lock(&self.facts).image = Some(image);
            drop(turn);
        });
        // It has no way to fail but a panic, which leaves what was known before.
        let _ = look.await;
    }

    /// Has no backend yet: its path may mean another image than when it was looked at.
    fn is_waiting(&self) -> bool {
        matches!(lock(&self.facts).state, Some(State::Opening | State::Unavailable))
    }

    /// It is only configured.
    fn is_wish(&self) -> bool {
        lock(&self.facts).wish.is_some()
    }

    /// Its backend has not answered for so long.
    fn silent(&self, waited: Time) -> VolumeError {
        let (name, backend) = (self.name.clone(), self.backend.to_string());
        VolumeError::Silent { name, backend, seconds: waited.as_secs() }
    }

    /// Refuses to serve it while it is left out.
    fn refuse_left_out(&self) -> Result<(), VolumeError> {
        let left_out = lock(&self.facts).left_out;
        let Some(LeftOut { last_unix_ms, until_unix_ms }) = left_out else { return Ok(()) };
        if aborts::now_unix_ms() >= until_unix_ms {
            return Ok(());
        }
        Err(VolumeError::LeftOut {
            name: self.name.clone(),
            backend: self.backend.to_string(),
            times: aborts::OF_VOLUME_MAX,
            minutes: aborts::WITHIN.as_secs() / 60,
            last: time(last_unix_ms),
            until: time(until_unix_ms),
        })
    }

    /// Has its backend tried at once for who is asking; returns the outcome.
    async fn try_again(
        &self,
        outcome: oneshot::Receiver<Result<(), VolumeError>>,
    ) -> Result<(), VolumeError> {
        self.again.notify_one();
        match timeout(OPEN_WAIT_MAX, outcome).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(VolumeError::Busy(self.name.clone())),
            Err(_) => Err(self.silent(OPEN_WAIT_MAX)),
        }
    }

    /// It is not waited for any more.
    fn withdraw(&self) {
        lock(&self.facts).announced = None;
        self.again.notify_one();
    }

    /// It is served from now on.
    fn set_served(&self) {
        let mut facts = lock(&self.facts);
        (facts.state, facts.error, facts.announced) = (None, None, None);
    }

    /// Its backend could not be opened; returns what to say of it. Its clients wait on if it may come soon: where another host has the
    /// volume they are to look there.
    fn set_unavailable(&self, error: &VolumeError) -> String {
        use BackendError::{Locked, NotFound, Unavailable};
        let may_come = match error {
            VolumeError::Open { source, .. } => matches!(source, Locked { .. } | Unavailable { .. }),
            error => matches!(error, VolumeError::Silent { .. }),
        };
        let mut text = crate::failure::one_line(error);
        let mut facts = lock(&self.facts);
        if facts.id.is_some() && matches!(error, VolumeError::Open { source: NotFound { .. }, .. }) {
            text.push_str(&report::if_gone(&self.name));
        }
        (facts.state, facts.error) = (Some(State::Unavailable), Some(text.clone()));
        if let Some(announced) = &facts.announced {
            // A reactor that has stopped has no clients.
            let _ = announced.set_awaited(may_come);
        }
        text
    }

    /// Serves it although it was left out, as it was before.
    async fn serve_again(&self) -> Result<(), VolumeError> {
        let (asking, outcome) = oneshot::channel();
        {
            let mut facts = lock(&self.facts);
            (facts.left_out, facts.asking) = (None, Some(asking));
        }
        self.try_again(outcome).await
    }

    fn begin_change(&self) -> Result<OwnedMutexGuard<()>, VolumeError> {
        self.change.clone().try_lock_owned().map_err(|_| VolumeError::Busy(self.name.clone()))
    }

    fn set_state(&self, state: Option<State>, error: Option<String>) {
        let mut facts = lock(&self.facts);
        (facts.state, facts.error) = (state, error);
    }
}

impl Volumes {
    /// The volumes of `shard`; none is known yet. Second copies of them may be at peers, and others' may be here.
    pub fn new(
        shard: ShardHandle,
        cache_uuid: [u8; 16],
        host: String,
        drain: Option<volume::DrainOrder>,
        pairs: Pairs,
    ) -> Arc<Volumes> {
        let Pairs {
            peers,
            takes_copies,
            takes_from_hosts,
            without_peer,
            limits,
            hosts,
            images,
            accept_loss,
            doors,
        } = pairs;
        Arc::new(Volumes {
            shard,
            cache_uuid,
            host,
            drain,
            accept_loss,
            since: Instant::now(),
            peers: peers.into(),
            takes_copies,
            takes_from_hosts,
            configured: Mutex::default(),
            without_peer,
            limits,
            hosts,
            images_of_others: images,
            entries: Mutex::default(),
            parents: AsyncMutex::default(),
            takeovers: Turns::default(),
            images: Turns::default(),
            openings: Turns::default(),
            doors,
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

    /// What the cache holds of a volume that was left out, if this is its image.
    fn left_out(&self, wanted: &Wanted) -> Option<Arc<Entry>> {
        let entry = lock(&self.entries).get(&wanted.name).cloned()?;
        let left_out = lock(&entry.facts).left_out.is_some();
        (left_out && !entry.is_wish() && entry.backend == wanted.backend).then_some(entry)
    }

    /// The shard that serves them.
    pub fn shard(&self) -> &ShardHandle {
        &self.shard
    }

    /// Which hosts may do what here.
    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Images that other hosts may name, besides those of volumes that are known here.
    pub(super) fn images_of_others(&self) -> &[Images] {
        &self.images_of_others
    }

    /// Names and images of all volumes that are to be served here, also of those that are not open.
    pub(super) fn wanted_images(&self) -> Vec<(String, BackendUri)> {
        lock(&self.entries).values().map(|entry| (entry.name.clone(), entry.backend.clone())).collect()
    }

    /// How long this host waits for others.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
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
        Ok(lock(&self.entries).contains_key(name) || known.iter().any(|(_, spec, _)| spec.name == name))
    }

    /// Whether a volume of this name is served here, or is being opened. One that is only configured may be another host's.
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

    /// Adds a volume; returns when it is being served. One of this name that is configured and waits for this image is tried at once,
    /// no matter which cache had the image last.
    ///
    /// # Errors
    /// Name or image are taken, or the backend or the shard refused. Nothing has changed then.
    pub async fn add(self: &Arc<Self>, wanted: Wanted) -> Result<(), VolumeError> {
        if let Some(entry) = self.left_out(&wanted) {
            return entry.serve_again().await;
        }
        match self.configured(&wanted.name) {
            Some(waiting) if waiting.backend == wanted.backend => self.add_waiting(&waiting, wanted).await,
            Some(_) => Err(VolumeError::Exists(wanted.name)),
            None => self.add_prepared(wanted, Prepared::default()).await,
        }
    }

    /// Adds a volume with what was made ready for its image.
    async fn add_prepared(self: &Arc<Self>, wanted: Wanted, prepared: Prepared) -> Result<(), VolumeError> {
        let entry = Entry::new(&wanted.name, wanted.backend.clone(), Facts::of_new(&wanted));
        let change = entry.begin_change()?;
        let replaced = self.claim(&entry)?;
        // Also when the caller goes away in the middle, everything is as it was.
        let mut claim = Claim { volumes: self, entry: Some(&entry), replaced };
        let (opened, turn) = self.open_new(&entry, &wanted, prepared, (Some(OPEN_WAIT_MAX), false)).await?;
        let parent = self.serve_new(&entry, &wanted, opened).await?;
        drop(turn);
        claim.entry = None;
        drop(change);
        self.share(&entry, parent).await;
        Ok(())
    }

    /// Opens the image of a new volume, within `patience`, and only if no other cache had it last with `unless_elsewhere`.
    async fn open_new(
        &self,
        entry: &Arc<Entry>,
        wanted: &Wanted,
        prepared: Prepared,
        (patience, unless_elsewhere): (Option<Time>, bool),
    ) -> Result<(Opened, Turn), VolumeError> {
        let wait = patience.unwrap_or(Time::MAX);
        if timeout(wait, entry.clone().look()).await.is_err() {
            return Err(entry.silent(wait));
        }
        self.refuse_shared(entry).await?;
        let (cache_uuid, read_only) = (self.cache_uuid, wanted.read_only);
        let grouped = DrainOrder::from(drain_order(&wanted.backend, wanted.drain)) == DrainOrder::Grouped;
        let roll_back = lock(&entry.facts).roll_back.take();
        let options = OpenOptions {
            cache_uuid,
            read_only,
            grouped,
            unless_elsewhere: unless_elsewhere && !read_only,
            prepared,
            roll_back,
            ..OpenOptions::default()
        };
        self.open(entry, options, patience).await
    }

    /// Has the shard serve a new volume; returns what its image has for a parent.
    async fn serve_new(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        wanted: &Wanted,
        opened: Opened,
    ) -> Result<Option<Parent>, VolumeError> {
        let spec = VolumeSpec {
            name: wanted.name.clone(),
            backend: wanted.backend.to_string(),
            size_bytes: opened.backend.size_bytes(),
            mode: wanted.mode.into(),
            drain: drain_order(&wanted.backend, wanted.drain).into(),
            dirty_bytes_max: wanted.dirty_bytes_max,
            read_only: wanted.read_only || opened.backend.read_only(),
            generation: opened.generation,
            attachment: self.attachment(entry, wanted.accept_loss, &*opened.backend)?,
        };
        let (generation, read_only) = (spec.generation, spec.read_only);
        let Layout { own, parent } = opened.layout;
        let image = Image { backend: opened.backend, own };
        self.has_not_left(&wanted.name);
        match self.shard.add_volume(spec, image, self.alone_with(wanted.accept_loss)).await {
            Ok(id) => {
                {
                    let mut facts = lock(&entry.facts);
                    (facts.id, facts.snapshot, facts.wish) = (Some(id), opened.snapshot, None);
                    facts.notes = opened.notes;
                }
                self.replicate(entry, id, generation, read_only).await;
                entry.set_served();
                info!("volume {}: added, serving {}", entry.name, entry.backend);
                Ok(parent)
            }
            Err(Refused { error, backend }) => {
                self.put_back(entry, backend, true).await;
                Err(VolumeError::Shard { what: "add", name: wanted.name.clone(), source: error })
            }
        }
    }

    /// Enters a new volume, unless its name or image is taken. One that is only configured gives way: returns how it is configured.
    ///
    /// # Errors
    /// Which of the two is taken.
    fn claim(&self, entry: &Arc<Entry>) -> Result<Option<Wanted>, VolumeError> {
        let mut entries = lock(&self.entries);
        if entries.get(&entry.name).is_some_and(|known| !known.is_wish()) {
            return Err(VolumeError::Exists(entry.name.clone()));
        }
        // The parent of clones may be served for itself, too.
        let counts = |other: &Entry| !is_parent_name(&other.name) && !is_parent_name(&entry.name);
        if let Some(other) = entries
            .values()
            .find(|other| other.name != entry.name && other.backend == entry.backend && counts(other))
        {
            let (name, other) = (entry.name.clone(), other.name.clone());
            return Err(VolumeError::SameImage { name, other, backend: entry.backend.to_string() });
        }
        let replaced = entries.insert(entry.name.clone(), entry.clone());
        Ok(replaced.and_then(|replaced| {
            replaced.withdraw();
            lock(&replaced.facts).wish.clone()
        }))
    }

    /// Refuses an image that another volume has, whatever it is called there. One that waits for its backend
    /// counts, too: the cache may hold newer data than the image. The volume itself has been looked at and entered
    /// before, so of two that come together at least one sees the other.
    async fn refuse_shared(&self, entry: &Arc<Entry>) -> Result<(), VolumeError> {
        let others: Vec<Arc<Entry>> =
            lock(&self.entries).values().filter(|other| other.name != entry.name).cloned().collect();
        let mut looks = JoinSet::new();
        for other in others.iter().filter(|other| other.is_waiting()) {
            looks.spawn(other.clone().look());
        }
        // A file system that does not answer is not the one of this image, which has answered.
        let all = async { while looks.join_next().await.is_some() {} };
        let _ = timeout(LOOK_WAIT_MAX, all).await;
        let (own, is_known) = {
            let facts = lock(&entry.facts);
            (facts.image.clone(), facts.id.is_some())
        };
        let counts = |other: &Entry| {
            // What the cache knows does not give way to what is only configured.
            let yields = is_known && other.is_wish();
            !(yields || is_parent_name(&other.name) || is_parent_name(&entry.name))
        };
        let same = |other: &Entry| counts(other) && own.is_some() && lock(&other.facts).image == own;
        match others.iter().find(|other| same(other)) {
            None => Ok(()),
            Some(other) => Err(VolumeError::SameImage {
                name: entry.name.clone(),
                other: other.name.clone(),
                backend: other.backend.to_string(),
            }),
        }
    }

    /// Adds a volume as the admin API asks; `accept_loss` is the daemon's.
    ///
    /// # Errors
    /// As [`Volumes::add`], and what is wrong with the request.
    pub async fn add_asked(
        self: &Arc<Self>,
        asked: AddVolume,
        accept_loss: Option<Duration>,
    ) -> Result<(), VolumeError> {
        let config = VolumeConfig {
            mode: asked.mode,
            accept_loss: asked.accept_loss,
            dirty_max: asked.dirty_max,
            read_only: asked.read_only,
            drain: asked.drain,
            socket: asked.socket,
            ..VolumeConfig::new(asked.backend.parse()?)
        };
        crate::volume::check_name(&asked.name)?;
        let wanted = Wanted::new(&asked.name, config, accept_loss, self.drain, !self.peers.is_empty())
            .map_err(|failure| VolumeError::Invalid { name: asked.name, why: failure.to_string() })?;
        let (name, socket) = (wanted.name.clone(), wanted.socket.clone());
        let waits = self.configured(&name).is_some();
        if socket.is_some() && !waits && self.contains(&name).await.map_err(from_shard("add", &name))? {
            return Err(VolumeError::Exists(name));
        }
        // Before the volume: what is remembered of it has the socket.
        let is_new = match socket {
            Some(socket) => self.open_door(&name, socket).await.map_err(sockets::none_of(&name))?,
            None => false,
        };
        let added = self.add(wanted).await;
        match &added {
            Ok(()) => self.doors.serve(&self.shard),
            Err(_) if is_new => self.doors.close(&name),
            Err(_) => {}
        }
        added
    }

    /// Changes a volume; returns when the change is in force.
    ///
    /// # Errors
    /// The change is not allowed, or the shard refused.
    pub async fn set(&self, name: &str, change: SetVolume) -> Result<(), VolumeError> {
        let entry = self.entry(name)?;
        let _change = entry.begin_change()?;
        let id = entry.attached("change")?;
        let shard_error = from_shard("change", name);
        let accept_loss = change.accept_loss.or(lock(&entry.facts).accept_loss);
        let drain = lock(&entry.facts).drain;
        let rule = |mode| {
            let rules = |mode| order_rule(&entry.backend, mode, drain).map(|()| mode);
            let found = mode_rule(mode, accept_loss, !self.peers.is_empty()).and_then(rules);
            found.map_err(|source| VolumeError::Mode { name: name.to_owned(), source })
        };
        rule(change.mode.or(Some(Mode::WriteThrough)))?;
        if change.dirty_max.is_some() {
            let quota = quota_rule(change.dirty_max);
            let quota = quota.map_err(|source| VolumeError::Mode { name: name.to_owned(), source })?;
            self.shard.set_dirty_bytes_max(id, quota).await.map_err(shard_error)?;
        }
        if let Some(mode) = change.mode {
            let _alone = match mode {
                Mode::WriteBack => None,
                _ => Some(self.alone(id).await.map_err(shard_error)?),
            };
            self.shard.set_mode(id, rule(Some(mode))?.into()).await.map_err(shard_error)?;
        }
        if change.accept_loss.is_some() || change.socket.is_some() {
            let socket = change.socket.clone().or_else(|| self.socket_of(name));
            let remembered = self.remembered(id, name, accept_loss, socket.as_ref()).await?;
            if let Some(socket) = change.socket {
                let changed = self.change_door(name, socket).await;
                self.doors.serve(&self.shard);
                changed.map_err(sockets::none_of(name))?;
            }
            self.shard.set_attachment(id, remembered).await.map_err(shard_error)?;
        }
        if change.accept_loss.is_some() {
            lock(&entry.facts).accept_loss = accept_loss;
            self.shard.set_alone(id, self.alone_with(accept_loss)).map_err(shard_error)?;
        }
        info!("volume {name}: changed as asked for");
        Ok(())
    }

    /// What the core knows of a volume.
    async fn spec_of(&self, id: VolumeId) -> Result<Option<VolumeSpec>, ShardError> {
        let volumes = self.shard.volumes().await?;
        Ok(volumes.into_iter().find(|(known, ..)| *known == id).map(|(_, spec, _)| spec))
    }

    /// One volume's report.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn volume_status(&self, name: &str) -> Result<VolumeReport, VolumeError> {
        let shard_error = from_shard("look at", name);
        let sample = self.sample().await.map_err(shard_error)?;
        let found = sample.volumes.into_iter().find(|volume| volume.name == name);
        found.ok_or_else(|| VolumeError::Unknown(name.to_owned()))
    }

    /// The numbers of this moment.
    ///
    /// # Errors
    /// The shard has stopped.
    pub async fn sample(&self) -> Result<Sample, ShardError> {
        let shard = self.shard.status().await?;
        let volumes = self.reports(&shard);
        Ok(Sample { shard, volumes })
    }

    fn reports(&self, shard: &ShardStatus) -> Vec<VolumeReport> {
        let entries = lock(&self.entries);
        let report = |status: &ShardVolumeStatus| {
            let mut known = Known::default();
            let name = &status.status.spec.name;
            let own = status.status.state != VolumeState::Replica;
            if let Some(entry) = entries.get(name).filter(|entry| own || lock(&entry.facts).takes_over) {
                known = lock(&entry.facts).known();
            }
            report::volume(status, self.with_socket(name, Known { host: self.host.clone(), ..known }))
        };
        let mut reports: Vec<VolumeReport> = shard.volumes.iter().map(report).collect();
        let is_known = |name: &str| shard.volumes.iter().any(|known| known.status.spec.name == name);
        for entry in entries.values().filter(|entry| !is_known(&entry.name)) {
            let facts = lock(&entry.facts);
            if let Some(wish) = &facts.wish {
                reports.push(report::configured(wish, self.with_socket(&entry.name, facts.known())));
            }
        }
        reports.sort_by(|a, b| a.name.cmp(&b.name));
        reports
    }
}

/// Releases the backends of a stopped shard. What stays dirty keeps its guard on the image. A backend that
/// is out of reach is waited for only so long; the caller ends the process soon, which leaves lock,
/// record and guard as a kill does.
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
            Ok(Err(_)) => warn!("volume {name}: cannot release its image: an internal error occurred"),
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
        // A release may still come to its end. Until the process does, nobody else may take this cache's
        // lock for proof that it is dead.
        std::mem::forget(stopped.cache);
    }
}

/// The volume is still the one of its name.
fn is_among(entries: &BTreeMap<String, Arc<Entry>>, entry: &Arc<Entry>) -> bool {
    entries.get(&entry.name).is_some_and(|known| Arc::ptr_eq(known, entry))
}

/// Takes a new volume's entry away unless it is being served.
struct Claim<'a> {
    volumes: &'a Arc<Volumes>,
    entry: Option<&'a Arc<Entry>>,
    /// What has given way, and is tried on if the new one does not come.
    replaced: Option<Wanted>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Some(entry) = self.entry else { return };
        {
            let mut entries = lock(&self.volumes.entries);
            // A takeover may have entered another one meanwhile.
            if !is_among(&entries, entry) {
                return;
            }
            entries.remove(&entry.name);
        }
        if let Some(wanted) = self.replaced.take() {
            // Its image was nobody's before.
            let _ = self.volumes.begin_add(wanted, false);
        }
    }
}

/// Closes a backend on a thread that may block.
async fn close(backend: Box<dyn Backend>, clean: bool) -> Result<(), BackendError> {
    match tokio::task::spawn_blocking(move || backend.close(Release { clean, cache_failed: false })).await {
        Ok(outcome) => outcome,
        Err(_) => Err(BackendError::Unavailable {
            what: "the backend".into(),
            why: "closing it ended in an internal error".into(),
        }),
    }
}
