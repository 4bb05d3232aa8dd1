//! A volume comes here from another host while a guest that uses it moves: its clients are let in
//! before it is served. What they read is read over there; the first that writes has the other host
//! let go of it, and then all of them go on as clients of this host's volume.

mod guest;

use self::guest::Stage;
use super::departure::{WORD_PAUSE, heard, with_words};
use super::{Volumes, from_shard, lock};
use crate::config::VolumeConfig;
use crate::service::VolumeError;
use crate::service::peers::{Leaving, PeerError, Stream, record_of};
use crate::service::plan::{Wanted, mode_rule};
use crate::shard::limits::places_of_others;
use crate::shard::{Counterpart, Guest, ShardHandle};
use crate::units;
use crate::volume::{DrainOrder, Mode, is_parent_name};
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{BackendError, BackendUri, Identity, Ownership, Prepared};
use tidepool_engine::api::{VolumeSpec, is_size};
use tidepool_engine::format::crc32c;
use tidepool_engine::status::VolumeState;
use tidepool_replica::wire::Message;
use tidepool_replica::{Party, Record};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, interval, timeout};
use tracing::{info, warn};

/// Clients of one volume that wait for it.
const GUESTS_MAX: usize = 64;

/// Volumes that are about to come here at once.
const ARRIVING_MAX: usize = 64;
/// And of one host.
const ARRIVING_OF_HOST_MAX: usize = ARRIVING_MAX / 2;
/// How often it is looked whether a volume that is about to come is still its host's.
const RECORD_PAUSE: Duration = Duration::from_secs(10);

/// A volume that is about to come here, for those that look for it.
pub(super) struct Pending {
    /// Lets its clients in, until it is here.
    pub(super) task: AbortHandle,
    owner: Party,
    host: String,
    image: BackendUri,
}

/// What a client wants that waits for its volume.
enum Wish {
    /// To read; or, without bytes, what was completed on stable media.
    Ask { offset: u64, len: u32, answer: oneshot::Sender<Told> },
    /// To write.
    Write,
}

/// What the other host has told.
enum Told {
    Data(Vec<u8>),
    /// It cannot be had there.
    Failed,
}

/// A volume that is about to come here.
pub(in crate::service) struct Arriving {
    volumes: Arc<Volumes>,
    name: String,
    /// The host that it comes from.
    host: String,
    image: BackendUri,
    /// The image as that host calls it.
    said: String,
    /// What that meant when the volume was offered.
    identity: Identity,
    owner: Party,
    generation: u64,
    leaving: Leaving,
    guests: mpsc::Receiver<Guest>,
    /// Lets them in.
    door: Door,
}

/// Lets no more clients in when it goes.
struct Door {
    shard: ShardHandle,
    number: u64,
}

impl Drop for Door {
    fn drop(&mut self) {
        // A reactor that has stopped lets nobody in.
        let _ = self.shard.unexpect(self.number);
    }
}

impl Volumes {
    /// Lets the clients of a volume of `host` in. `spec` is the volume as it would be here, and
    /// `said` its image as that host calls it.
    ///
    /// # Errors
    /// In one line: a volume of this name is served here, or there is no room.
    pub(in crate::service) async fn expect(
        self: &Arc<Self>,
        spec: &VolumeSpec,
        record: Record,
        leaving: Leaving,
        (host, said): (&str, &str),
    ) -> Result<Arriving, String> {
        let known = self.shard.volumes().await.map_err(|error| error.to_string())?;
        let copy = |(_, known, state): &(_, VolumeSpec, _)| {
            known.name == spec.name && *state == VolumeState::Replica
        };
        if self.is_opening(&spec.name) && !known.iter().any(copy) {
            return Err(
                "a volume of this name is here, and not as the copy of another host's".into()
            );
        }
        let status = self.shard.status().await.map_err(|error| error.to_string())?;
        let is_full = known.len() >= places_of_others(status.device.volumes_max as usize);
        if is_full && !known.iter().any(|(_, known, _)| known.name == spec.name) {
            return Err(format!("{} volumes are here already", known.len()));
        }
        if is_parent_name(&spec.name) || !is_size(leaving.size_bytes) {
            return Err(format!(
                "no volume is like that: {} with {} bytes",
                spec.name, leaving.size_bytes
            ));
        }
        let image: BackendUri =
            spec.backend.parse().map_err(|error| format!("{}: {error}", spec.backend))?;
        let identity = self.identity_of(&image).await.map_err(|error| error.to_string())?;
        {
            let mut arriving = lock(&self.arriving);
            arriving.retain(|_, pending| !pending.task.is_finished());
            let another = arriving.iter().find(|(name, pending)| match **name == spec.name {
                // Its owner may have lost the connection, and call again.
                true => pending.owner.cache != record.owner.cache || pending.image != image,
                false => pending.image == image,
            });
            if let Some((name, _)) = another {
                return Err(format!(
                    "a volume {name} is about to come here, which is not this one"
                ));
            }
            let of_host =
                arriving.values().filter(|pending| pending.host.eq_ignore_ascii_case(host)).count();
            let is_full = arriving.len() >= ARRIVING_MAX || of_host >= ARRIVING_OF_HOST_MAX;
            if is_full && !arriving.contains_key(&spec.name) {
                return Err(format!(
                    "{} volumes are about to come here already, {of_host} of them from {host}",
                    arriving.len()
                ));
            }
        }
        let (sender, guests) = mpsc::channel(GUESTS_MAX);
        let name = spec.name.clone();
        let number = self
            .shard
            .expect(&name, leaving.size_bytes, sender)
            .map_err(|error| error.to_string())?;
        let door = Door { shard: self.shard.clone(), number };
        Ok(Arriving {
            volumes: self.clone(),
            name,
            host: host.to_owned(),
            image,
            said: said.to_owned(),
            identity,
            owner: record.owner,
            generation: record.generation,
            leaving,
            guests,
            door,
        })
    }

    /// What an image is now.
    async fn identity_of(&self, image: &BackendUri) -> Result<Identity, BackendError> {
        let look = |uri: &BackendUri| Ok(tidepool_backend::identity(uri));
        self.ask_image(image, "looking which image it is", look).await
    }

    /// Serves a volume of which another host has let go with everything in the image.
    async fn take_clean(
        self: &Arc<Self>,
        name: &str,
        image: BackendUri,
        (owner, host, generation): (Party, &str, u64),
        leaving: &Leaving,
        prepared: Prepared,
    ) -> Result<(), VolumeError> {
        let is_its = |found: &Ownership| {
            let record = record_of(found);
            record.owner.cache == owner.cache && record.generation == generation
        };
        let found = self.ownership(&image).await;
        let found = found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })?;
        if let Some(found) = found.filter(|found| !is_its(found)) {
            let why = format!(
                "its record names {} as owner, not the host that it was to come from",
                found.host
            );
            return Err(VolumeError::Invalid { name: name.to_owned(), why });
        }
        let known = self.shard.volumes().await.map_err(from_shard("add", name))?;
        let counterpart = Counterpart { cache: owner.cache, host: host.to_owned() };
        self.shard.check_counterpart(name, counterpart).await.map_err(from_shard("add", name))?;
        // A copy that did not count.
        if known.iter().any(|(_, spec, state)| spec.name == name && *state == VolumeState::Replica)
        {
            self.forget_copy(name, false).await?;
        }
        let wanted = self.wanted_of(name, image, leaving).await?;
        self.add_prepared(wanted, prepared).await
    }

    /// How a volume is to be served that comes from another host: as this host's configuration has
    /// it, or as the other host has it, within what this host gives to volumes of which nothing is
    /// said.
    async fn wanted_of(
        &self,
        name: &str,
        image: BackendUri,
        leaving: &Leaving,
    ) -> Result<Wanted, VolumeError> {
        let configured = self.configured(name).and_then(|entry| lock(&entry.facts).wish.clone());
        if let Some(wanted) =
            configured.filter(|wanted| wanted.backend == image && !wanted.read_only)
        {
            return Ok(wanted);
        }
        let share_bytes =
            self.shard.status().await.map_err(from_shard("add", name))?.device.dirty_share_bytes;
        let peers = self.pairs.are_wanted();
        let (mode, accept_loss, dirty_bytes_max) =
            within(leaving, self.pairs.accept_loss, share_bytes, peers);
        if (mode, accept_loss) != (leaving.mode, leaving.accept_loss) {
            warn!(
                "volume {name}: {mode} here, {}: this host is configured so",
                accept_loss.map_or("without an accepted loss".to_owned(), |loss| format!(
                    "and a loss of {loss} is accepted"
                ))
            );
        }
        let config = VolumeConfig {
            mode: Some(mode),
            accept_loss,
            drain: leaving.unordered.then_some(DrainOrder::Unordered),
            ..VolumeConfig::new(image)
        };
        let wanted = Wanted::new(name, config, None, self.drain, peers);
        let invalid = |why: String| VolumeError::Invalid { name: name.to_owned(), why };
        let mut wanted = wanted.map_err(|failure| invalid(failure.to_string()))?;
        // Also one that would not be taken from a person any more.
        wanted.dirty_bytes_max = dirty_bytes_max;
        Ok(wanted)
    }
}

/// Mode, accepted loss and dirty quota that another host has said, as far as they count: what is
/// lost is lost here, and what a volume has of the cache others here have not.
fn within(
    said: &Leaving,
    accept_loss: Option<units::Duration>,
    share_bytes: u64,
    peers: bool,
) -> (Mode, Option<units::Duration>, u64) {
    let losses = said.accept_loss.zip(accept_loss).map(|(said, most)| said.min(most));
    let accept_loss = losses.filter(|loss| loss.as_millis() > 0);
    let mode = mode_rule(Some(said.mode), accept_loss, peers).unwrap_or(Mode::WriteThrough);
    // 0 is the share, also when that is another one later.
    let dirty_bytes_max = if said.dirty_bytes_max < share_bytes { said.dirty_bytes_max } else { 0 };
    (mode, accept_loss, dirty_bytes_max)
}

impl Arriving {
    /// Serves its clients until it is here, or does not come. What was to come under this name
    /// before does not any more.
    pub(in crate::service) fn start(self, stream: Stream) {
        let (volumes, name) = (self.volumes.clone(), self.name.clone());
        let (owner, host, image) = (self.owner, self.host.clone(), self.image.clone());
        let task = tokio::spawn(self.run(stream)).abort_handle();
        if let Some(before) =
            lock(&volumes.arriving).insert(name, Pending { task, owner, host, image })
        {
            before.task.abort();
        }
    }

    async fn run(mut self, mut stream: Stream) {
        let (stage, staged) = watch::channel(Stage::Waiting);
        let (volumes, image) = (self.volumes.clone(), self.image.clone());
        let preparing = tokio::spawn(async move {
            let prepared = volumes.prepared(&image).await;
            prepared
                .inspect_err(|error| info!("{image} cannot be made ready: {error}"))
                .unwrap_or_default()
        });
        let mut hosted = JoinSet::new();
        let outcome = self.wait(&mut stream, &mut hosted, &staged).await;
        // What is not ready by now is got ready where it is needed.
        let prepared = if preparing.is_finished() {
            preparing.await.unwrap_or_default()
        } else {
            Prepared::default()
        };
        let outcome = match outcome {
            Ok(()) => self.take(&mut stream, prepared).await,
            Err(error) => Err(error),
        };
        let Arriving { volumes, name, mut guests, door, .. } = self;
        drop(door);
        match outcome {
            Ok(()) => {
                while let Ok(guest) = guests.try_recv() {
                    // A reactor that has stopped serves nobody.
                    let _ = volumes.shard.adopt(guest);
                }
                stage.send_replace(Stage::Here);
                // They go to the reactor one by one, as soon as they have been told what they have
                // asked.
                while hosted.join_next().await.is_some() {}
            }
            Err(error) => info!("volume {name}: does not come here: {error}"),
        }
    }

    /// Answers what clients ask, until one of them writes.
    async fn wait(
        &mut self,
        stream: &mut Stream,
        hosted: &mut JoinSet<()>,
        staged: &watch::Receiver<Stage>,
    ) -> Result<(), PeerError> {
        let (wishes, mut wished) = mpsc::channel(GUESTS_MAX);
        let turn = Arc::new(Mutex::new(()));
        let mut beat = interval(WORD_PAUSE);
        let mut looked = Instant::now();
        loop {
            tokio::select! {
                guest = self.guests.recv() => match guest {
                    Some(guest) if hosted.len() < GUESTS_MAX => {
                        info!(peer = %guest.peer, "a client uses volume {}, which is about to come here", self.name);
                        let shard = self.volumes.shard.clone();
                        let way = guest::Way { wishes: wishes.clone(), stage: staged.clone(), turn: turn.clone() };
                        hosted.spawn(guest::host(guest, way, shard));
                    }
                    Some(guest) => warn!(peer = %guest.peer, "turning a client away: {GUESTS_MAX} clients wait for {}", self.name),
                    None => return Err(PeerError::Refused("somebody else offers it now".into())),
                },
                wish = wished.recv() => match wish {
                    Some(Wish::Ask { offset, len, answer }) => {
                        let told = ask(stream, offset, len).await?;
                        // The caller may be gone.
                        let _ = answer.send(told);
                    }
                    Some(Wish::Write) | None => return Ok(()),
                },
                _ = beat.tick() => {
                    stream.send(&Message::Beat { time_ns: 0 }).await?;
                    let mut head = Vec::new();
                    if !matches!(heard(stream, &mut head).await?, Message::Beat { .. }) {
                        return Err(PeerError::Unexpected);
                    }
                    if looked.elapsed() > RECORD_PAUSE {
                        looked = Instant::now();
                        self.check_owner(stream).await?;
                    }
                }
            }
            while let Some(ended) = hosted.try_join_next() {
                ended.map_err(|_| PeerError::Unexpected)?;
            }
        }
    }

    /// Looks whether the volume is still that of the host that has offered it.
    async fn check_owner(&self, stream: &mut Stream) -> Result<(), PeerError> {
        let (volumes, image) = (self.volumes.clone(), self.image.clone());
        let asked = tokio::spawn(async move { volumes.ownership(&image).await });
        let found = with_words(stream, WORD_PAUSE, asked).await;
        // What cannot be read now is read the next time.
        let Ok(Ok(Some(found))) = found else { return Ok(()) };
        let record = record_of(&found);
        match (record.owner.cache, record.generation) == (self.owner.cache, self.generation) {
            true => Ok(()),
            false => {
                stream.refuse(&format!("its record names {} as owner by now", found.host)).await
            }
        }
    }

    /// Looks whether the image is the one that was offered, and still where other hosts may name
    /// images: a host that can write to a directory could have put a link to any file of this host
    /// in its place since.
    async fn check_image(&self) -> Result<(), String> {
        let identity = self.volumes.identity_of(&self.image).await;
        if identity.ok().as_ref() != Some(&self.identity) {
            return Err("its image is not the one any more that was offered".into());
        }
        let taken = self.volumes.check_way(&self.name, &self.image.to_string()).await;
        taken.map(drop).map_err(|error| crate::failure::one_line(&error))
    }

    /// Has the other host let go, and serves the volume.
    async fn take(&self, stream: &mut Stream, prepared: Prepared) -> Result<(), PeerError> {
        let since = Instant::now();
        stream.send(&Message::Take).await?;
        let mut head = Vec::new();
        let clean = loop {
            match heard(stream, &mut head).await? {
                Message::Beat { .. } => {}
                Message::LetGo { clean, .. } => break clean,
                Message::Refused(why) => return Err(PeerError::Refused(why.to_owned())),
                _ => return Err(PeerError::Unexpected),
            }
        };
        let released = since.elapsed().as_millis();
        // What has begun is finished, also if another host offers the volume meanwhile.
        if let Err(why) = self.check_image().await {
            return self.refuse(stream, &why).await;
        }
        let (volumes, owner, generation) = (self.volumes.clone(), self.owner, self.generation);
        let (name, image, leaving) = (self.name.clone(), self.image.clone(), self.leaving.clone());
        let host = self.host.clone();
        let taking = tokio::spawn(async move {
            match clean {
                true => {
                    volumes
                        .take_clean(&name, image, (owner, &host, generation), &leaving, prepared)
                        .await
                }
                false => volumes.take_handed_over(&name, owner, generation, prepared).await,
            }
        });
        let taken = with_words(stream, WORD_PAUSE, taking).await;
        match taken
            .map_err(|_| PeerError::Refused("taking it ended in an internal error".into()))?
        {
            Ok(()) => {
                let all = since.elapsed().as_millis();
                info!(
                    "volume {}: has come here ({all} ms, {released} ms of them over there)",
                    self.name
                );
                // Who does not hear it finds it in the record.
                let _ = stream.send(&Message::Taken { generation }).await;
                Ok(())
            }
            Err(error) => self.refuse(stream, &crate::failure::one_line(&error)).await,
        }
    }

    /// Tells the other host why it does not come, without how this host reaches its image.
    async fn refuse(&self, stream: &mut Stream, why: &str) -> Result<(), PeerError> {
        let told = match stream.is_local() {
            true => why.to_owned(),
            false => why.replace(&self.image.to_string(), &self.said),
        };
        stream.refuse_with(&told, why).await
    }
}

async fn ask(stream: &mut Stream, offset: u64, len: u32) -> Result<Told, PeerError> {
    stream.send(&Message::Ask { offset, len }).await?;
    let (mut head, mut data) = (Vec::new(), Vec::new());
    loop {
        let heard = timeout(stream.answer_wait(), stream.receive_with(&mut head, &mut data)).await;
        match heard.map_err(|_| PeerError::Silent)?? {
            Message::Beat { .. } => {}
            Message::Told { done: false, .. } => return Ok(Told::Failed),
            Message::Told { crc, .. } if data.len() == len as usize && crc32c(&data) == crc => {
                return Ok(Told::Data(data));
            }
            _ => return Err(PeerError::Unexpected),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_host_says_of_its_volume_counts_within_what_this_host_gives() {
        const SHARE: u64 = 64 << 20;
        let seconds = |seconds: u64| Some(units::Duration::from_millis(seconds * 1000));
        let (back, through) = (Mode::WriteBack, Mode::WriteThrough);
        for (mode, loss, quota, accepted, peers, wanted) in [
            // Nothing is accepted here.
            (back, seconds(3600), 0, None, false, (through, None, 0)),
            (back, seconds(3600), 0, None, true, (back, None, 0)),
            // Not more than here, and not more than was said.
            (back, seconds(3600), 0, seconds(10), false, (back, seconds(10), 0)),
            (back, seconds(5), 0, seconds(10), false, (back, seconds(5), 0)),
            (back, None, 0, seconds(10), false, (through, None, 0)),
            (back, seconds(0), 0, seconds(10), false, (through, None, 0)),
            (Mode::Off, seconds(5), 0, seconds(10), true, (Mode::Off, seconds(5), 0)),
            // Not more than the share.
            (through, None, SHARE - 1, None, false, (through, None, SHARE - 1)),
            (through, None, SHARE, None, false, (through, None, 0)),
            (through, None, u64::MAX, None, true, (through, None, 0)),
        ] {
            let said = Leaving {
                to: "h2".into(),
                size_bytes: 1 << 30,
                mode,
                unordered: false,
                accept_loss: loss,
                dirty_bytes_max: quota,
            };
            assert_eq!(
                within(&said, accepted, SHARE, peers),
                wanted,
                "{said:?} {accepted:?} {peers}"
            );
        }
    }
}
