//! A volume goes to another host while a guest that uses it moves there: clients are let in there
//! first, what they read is read here, and the first of them that writes has this host let go of
//! it.

use super::{Entry, Volumes, from_shard, lock};
use crate::admin::HandedOver;
use crate::service::VolumeError;
use crate::service::peers::{Caller, Leaving, PeerError, Stream, offer, record_of};
use crate::shard::ShardError;
use crate::volume::Mode;
use std::sync::Arc;
use std::time::Duration;
use tidepool_engine::api::{DrainOrder as Order, VolumeId};
use tidepool_replica::wire::{Message, one_line};
use tokio::sync::OwnedMutexGuard;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// Both sides of a moving volume say something at least this often.
pub(super) const WORD_PAUSE: Duration = Duration::from_secs(1);
/// Pause before a read that found no room is tried again, and how long such a read is tried.
const ROOM_PAUSE: Duration = Duration::from_millis(5);
const ROOM_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long the rest of the dirty data is drained before a volume goes to a host without a copy.
const REST_WAIT_MAX: Duration = Duration::from_secs(30);
/// Pause between two drains that keep the rest small.
const DRAIN_PAUSE: Duration = Duration::from_millis(200);
/// How long the drain is waited for before the volume goes to the copy.
const DRAIN_WAIT_MAX: Duration = Duration::from_millis(150);
/// How long a change of the volume that is under way is waited for before the volume goes.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(10);

/// A volume that may go at any moment.
pub(super) struct Departing {
    /// Where to.
    host: String,
    task: AbortHandle,
    /// It goes, and nobody gives that up.
    goes: bool,
}

impl Entry {
    pub(super) fn is_departing(&self) -> bool {
        lock(&self.facts).departing.as_ref().is_some_and(|departing| !departing.task.is_finished())
    }

    /// It does not go after all, unless it does so already. Returns where it would have gone to.
    pub(super) fn stay(&self) -> Option<String> {
        let mut facts = lock(&self.facts);
        let departing = facts.departing.take_if(|departing| !departing.goes)?;
        let waited = !departing.task.is_finished();
        departing.task.abort();
        waited.then_some(departing.host)
    }

    /// It goes now, unless that was given up.
    fn begin_to_go(&self) -> bool {
        lock(&self.facts).departing.as_mut().map(|departing| departing.goes = true).is_some()
    }
}

/// Where a volume goes, and how.
struct Way {
    host: String,
    /// Uuid of the cache there.
    cache: u128,
    stream: Stream,
}

/// How a volume has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    /// The copy there has everything.
    Dirty,
    /// The image has.
    Clean,
}

impl Volumes {
    /// Has another host let the clients of a volume in; it gets the volume when one of them writes.
    /// Returns when they are let in.
    ///
    /// # Errors
    /// No such host is among the peers, or it refuses. Nothing has changed then.
    pub async fn offer(
        self: &Arc<Self>,
        name: &str,
        to: Option<&str>,
    ) -> Result<HandedOver, VolumeError> {
        let entry = self.entry(name)?;
        let id = entry.attached("hand over")?;
        let _change = entry.begin_change()?;
        let refused = |why: String| VolumeError::NotHandedOver { name: name.to_owned(), why };
        if let Some(Departing { host, task, .. }) = &lock(&entry.facts).departing
            && !task.is_finished()
        {
            return Err(refused(format!(
                "it is on its way to {host} already (--cancel ends that)"
            )));
        }
        let found = self.ownership(&entry.backend).await;
        let found = found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })?;
        let found = found.ok_or_else(|| refused("its image has no ownership record".into()))?;
        let host = match (to, &found.peer) {
            (Some(to), _) => to.to_owned(),
            (None, Some(peer)) => peer.host.clone(),
            (None, None) => {
                return Err(refused("say which host is to serve it (--to HOST)".into()));
            }
        };
        let leaving = self.leaving(&entry, id, host.clone()).await?;
        let (record, image) = (record_of(&found), entry.backend.to_string());
        let caller = Caller { record: &record, host: &self.host, name, image: &image };
        let mut failures = Vec::new();
        for route in self.pairs.peers.iter() {
            match offer(route, &caller, &leaving).await {
                Ok((stream, cache)) => {
                    info!("volume {name}: goes to {host} as soon as a client writes there");
                    let way = Way { host: host.clone(), cache, stream };
                    let mut facts = lock(&entry.facts);
                    let task =
                        tokio::spawn(self.clone().depart(entry.clone(), id, way)).abort_handle();
                    facts.departing = Some(Departing { host: host.clone(), task, goes: false });
                    return Ok(HandedOver { name: name.to_owned(), host, live: true });
                }
                Err(error) => failures.push(format!("peer {route}: {error}")),
            }
        }
        if failures.is_empty() {
            failures.push("this daemon has no peers (--peer URI)".into());
        }
        Err(refused(failures.join("; ")))
    }

    /// A volume does not go after all.
    ///
    /// # Errors
    /// It was not to go, or is gone.
    pub fn stay(&self, name: &str) -> Result<HandedOver, VolumeError> {
        let entry = self.entry(name)?;
        let Some(host) = entry.stay() else {
            let why = "it is not on its way to another host, or has arrived there".to_owned();
            return Err(VolumeError::NotHandedOver { name: name.to_owned(), why });
        };
        info!("volume {name}: does not go to {host}");
        Ok(HandedOver { name: name.to_owned(), host: self.host.clone(), live: false })
    }

    /// A volume as another host has to know it.
    async fn leaving(
        &self,
        entry: &Entry,
        id: VolumeId,
        to: String,
    ) -> Result<Leaving, VolumeError> {
        let spec = self.spec_of(id).await.map_err(from_shard("hand over", &entry.name))?;
        let spec = spec.ok_or_else(|| VolumeError::Unknown(entry.name.clone()))?;
        if spec.read_only {
            let why = "it is read-only: any host can serve it as well".to_owned();
            return Err(VolumeError::NotHandedOver { name: entry.name.clone(), why });
        }
        Ok(Leaving {
            to,
            size_bytes: spec.size_bytes,
            mode: Mode::from(spec.mode),
            unordered: spec.drain == Order::Unordered,
            accept_loss: lock(&entry.facts).accept_loss,
            dirty_bytes_max: spec.dirty_bytes_max,
        })
    }

    /// Answers what clients on the other host ask, until one of them writes.
    async fn depart(self: Arc<Self>, entry: Arc<Entry>, id: VolumeId, mut way: Way) {
        let name = &entry.name;
        let answered = tokio::select! {
            answered = self.answer(&entry, id, &mut way.stream) => answered,
            () = self.keep_drained(&entry, id) => Ok(()),
        };
        match answered {
            Ok(()) if entry.begin_to_go() => self.clone().go(entry.clone(), id, way).await,
            Ok(()) => {}
            Err(error) => {
                warn!("volume {name}: stays here, {} is not ready any more: {error}", way.host)
            }
        }
    }

    /// Another volume may have this number by now.
    fn is_current(&self, entry: &Arc<Entry>, id: VolumeId) -> bool {
        self.knows(entry) && lock(&entry.facts).id == Some(id)
    }

    async fn answer(
        &self,
        entry: &Arc<Entry>,
        id: VolumeId,
        stream: &mut Stream,
    ) -> Result<(), PeerError> {
        let mut head = Vec::new();
        loop {
            let message = heard(stream, &mut head).await?;
            if !self.is_current(entry, id) {
                return Err(PeerError::Refused("it is not served here any more".into()));
            }
            match message {
                Message::Beat { time_ns } => said(stream, &Message::Beat { time_ns }, &[]).await?,
                Message::Ask { offset, len } => {
                    self.answer_one(entry, id, stream, (offset, len)).await?
                }
                Message::Take => return Ok(()),
                _ => return Err(PeerError::Unexpected),
            }
        }
    }

    async fn answer_one(
        &self,
        entry: &Arc<Entry>,
        id: VolumeId,
        stream: &mut Stream,
        (offset, len): (u64, u32),
    ) -> Result<(), PeerError> {
        let since = Instant::now();
        let told = async {
            loop {
                match self.shard.ask_for(id, offset, len).await {
                    Err(ShardError::Limit { .. }) if since.elapsed() < ROOM_WAIT_MAX => {
                        sleep(ROOM_PAUSE).await
                    }
                    // As a client here it waits until that is known.
                    Err(ShardError::Lapsed) if self.is_current(entry, id) => {
                        sleep(ROOM_PAUSE).await
                    }
                    told => break told,
                }
            }
        };
        match with_words(stream, WORD_PAUSE, told).await {
            Ok(data) => {
                let crc = tidepool_engine::format::crc32c(&data);
                let told = Message::Told { done: true, crc, data_bytes: data.len() as u32 };
                said(stream, &told, &data).await
            }
            Err(_) => {
                said(stream, &Message::Told { done: false, crc: 0, data_bytes: 0 }, &[]).await
            }
        }
    }

    /// Has most of the volume in the image at any moment. Where the other host has no copy,
    /// everything has to be in it before it can have the volume; and where it has one, it works as
    /// write-through until that is so.
    async fn keep_drained(&self, entry: &Entry, id: VolumeId) {
        loop {
            if let Err(error) = self.shard.drain(id).await {
                info!("volume {}: draining before it goes: {error}", entry.name);
            }
            sleep(DRAIN_PAUSE).await;
        }
    }

    /// Whether the other host's copy is in sync.
    async fn has_copy(&self, id: VolumeId, (host, cache): (&str, u128)) -> bool {
        let Ok(status) = self.shard.status().await else { return false };
        let volume = status.volumes.into_iter().find(|volume| volume.status.id == id);
        let pair = volume.and_then(|volume| volume.pair);
        pair.is_some_and(|pair| {
            pair.synced_with == Some(cache) && pair.host.as_deref() == Some(host)
        })
    }

    /// A client over there writes: this host lets go, and the other one serves.
    async fn go(self: Arc<Self>, entry: Arc<Entry>, id: VolumeId, mut way: Way) {
        let (name, since) = (entry.name.clone(), Instant::now());
        let generation = self.generation(id).await;
        let host = way.host.clone();
        let standing = way.stream.check_standing().map_err(|error| error.to_string());
        let letting_go = async {
            standing?;
            self.let_go_to(&entry, id, (&host, way.cache)).await
        };
        let outcome = match with_words(&mut way.stream, WORD_PAUSE, letting_go).await {
            Ok(gone) => {
                let clean = gone == Gone::Clean;
                taken(&mut way.stream, Message::LetGo { generation, clean }).await.map(|()| gone)
            }
            Err(why) => {
                // Nobody may be there to hear it.
                let _ = way.stream.send(&Message::Refused(&one_line(&why))).await;
                Err(PeerError::Refused(why))
            }
        };
        lock(&entry.facts).departing = None;
        match outcome {
            Ok(gone) => {
                info!("volume {name}: gone to {} ({} ms)", way.host, since.elapsed().as_millis());
                self.has_left(&name, &entry.backend);
                // If it is to be the copy here already, it stays.
                if gone == Gone::Clean && self.shard.forget(id).await.is_ok() {
                    lock(&self.entries).remove(&name);
                    self.doors.leave(&name);
                    return self.forget_parents();
                }
            }
            Err(error) => {
                warn!(
                    "volume {name}: has not gone to {} ({error}): it stays here if it can",
                    way.host
                )
            }
        }
        // It is served here still, or is as after a restart: then the record says whose it is.
        self.go_on(&entry, id, None).await;
    }

    async fn generation(&self, id: VolumeId) -> u64 {
        self.spec_of(id).await.ok().flatten().map_or(0, |spec| spec.generation)
    }

    /// Lets go of a volume: dirty, if the cache over there has a copy that counts, else with
    /// everything in the image.
    async fn let_go_to(
        &self,
        entry: &Arc<Entry>,
        id: VolumeId,
        to: (&str, u128),
    ) -> Result<Gone, String> {
        let _change = self.change_soon(entry).await?;
        if !self.is_current(entry, id) {
            return Err("it is not served here any more".into());
        }
        if self.has_copy(id, to).await {
            // What is dirty over there has to be in the image before a write is acknowledged there
            // as one that goes through.
            let _ = timeout(DRAIN_WAIT_MAX, self.shard.drain(id)).await;
            match self.release(entry, id, true).await {
                Ok(released) => return released.map(|()| Gone::Dirty),
                Err(ShardError::NoCopy) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        let late = |_| "its image does not take the rest in time".to_owned();
        let alone = timeout(REST_WAIT_MAX, self.alone(id)).await.map_err(late)?;
        let _alone = alone.map_err(|error| error.to_string())?;
        let drained = timeout(REST_WAIT_MAX, self.shard.drain(id)).await.map_err(late)?;
        drained.map_err(|error| error.to_string())?;
        let backend = self.shard.let_go(id, true).await.map_err(|error| error.to_string())?;
        let status = self.shard.status().await.map_err(|error| error.to_string())?;
        let clean = status
            .volumes
            .iter()
            .any(|v| v.status.id == id && !v.status.dirty && v.status.lost_blocks == 0);
        self.close_released(entry, backend, clean).await?;
        if clean { Ok(Gone::Clean) } else { Err("it was written here at the last moment".into()) }
    }

    async fn change_soon(&self, entry: &Entry) -> Result<OwnedMutexGuard<()>, String> {
        let change = timeout(CHANGE_WAIT_MAX, entry.change.clone().lock_owned()).await;
        change.map_err(|_| "it is being changed".to_owned())
    }
}

/// Says something to a side that may not listen.
async fn said(stream: &mut Stream, message: &Message<'_>, data: &[u8]) -> Result<(), PeerError> {
    timeout(stream.answer_wait(), stream.send_with(message, data))
        .await
        .map_err(|_| PeerError::Silent)?
}

/// What the other side says next, unless it says nothing for too long.
pub(super) async fn heard<'h>(
    stream: &mut Stream,
    head: &'h mut Vec<u8>,
) -> Result<Message<'h>, PeerError> {
    timeout(stream.answer_wait(), stream.receive(head)).await.map_err(|_| PeerError::Silent)?
}

/// Says that the volume is let go of, and waits until the other host serves it.
async fn taken(stream: &mut Stream, let_go: Message<'_>) -> Result<(), PeerError> {
    stream.send(&let_go).await?;
    let mut head = Vec::new();
    loop {
        match heard(stream, &mut head).await? {
            Message::Beat { .. } => {}
            Message::Taken { .. } => return Ok(()),
            Message::Refused(why) => return Err(PeerError::Refused(why.to_owned())),
            _ => return Err(PeerError::Unexpected),
        }
    }
}

/// Does something that may take long, and tells the other side after every such pause that this one
/// is there. What has begun is finished even if the other side is gone.
pub(super) async fn with_words<T>(
    stream: &mut Stream,
    pause: Duration,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            // What is said next finds out, too, that nobody is there.
            () = sleep(pause) => drop(said(stream, &Message::Beat { time_ns: 0 }, &[]).await),
        }
    }
}
