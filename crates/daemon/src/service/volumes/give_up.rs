//! A volume goes without what is dirty: its image is gone for good, or what the cache alone has of it is not wanted any more.

use super::attach::is_attached;
use super::{Entry, Volumes, close, from_shard, lock};
use crate::admin::{Freed, GaveUp, State};
use crate::failure::one_line;
use crate::service::VolumeError;
use crate::shard::ShardError;
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{Backend, BackendError, Copies, GivenUp};
use tidepool_engine::api::{ControlError, VolumeId};
use tokio::time::timeout;
use tracing::warn;

/// How long an image is waited for that is to be freed: Ceph forgets a client that has died after 30 s.
const FREE_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long an attempt to open it is waited for, which may get no answer.
const OPENING_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long a backend is waited for that is closed.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);

impl Volumes {
    /// Forgets a volume with what the cache alone has of it, and frees its image, as far as that can be reached.
    ///
    /// # Errors
    /// Something of it is dirty and the loss is not accepted, or requests wait for its image; nothing has changed then.
    pub async fn give_up(self: &Arc<Self>, name: &str, accept_loss: bool) -> Result<GaveUp, VolumeError> {
        let Ok(entry) = self.entry(name) else {
            // The copy of another host's volume is no only copy.
            let removed = self.forget_copy(name).await?;
            return Ok(GaveUp {
                name: removed.name,
                backend: removed.backend,
                bytes: 0,
                seconds: 0.0,
                freed: Freed::NotOurs,
            });
        };
        let change = entry.begin_change()?;
        self.would_lose(&entry, accept_loss).await?;
        let this = self.clone();
        let finish = tokio::spawn(async move {
            let _change = change;
            this.finish_giving_up(&entry, accept_loss).await
        });
        finish.await.unwrap_or_else(|_| {
            let why = "giving it up ended in an internal error".to_owned();
            Err(VolumeError::Invalid { name: name.to_owned(), why })
        })
    }

    /// What the cache alone has of a volume: bytes, and the age of the oldest of them in seconds.
    ///
    /// # Errors
    /// There is something, and the loss is not accepted.
    async fn would_lose(&self, entry: &Entry, accept_loss: bool) -> Result<(u64, f64), VolumeError> {
        let name = &entry.name;
        let status = self.volume_status(name).await?;
        let (bytes, seconds) = (status.exposure.bytes, status.exposure.seconds);
        // What is half rolled back is no volume.
        let is_whole = status.state != State::Failed && !lock(&entry.facts).half_rolled_back;
        let is_lossless = bytes == 0 && status.lost_blocks == 0 && is_whole;
        if !accept_loss && !is_lossless {
            let (name, backend) = (name.to_owned(), entry.backend.to_string());
            return Err(VolumeError::WouldLose { name, backend, bytes, seconds });
        }
        Ok((bytes, seconds))
    }

    async fn finish_giving_up(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        accept_loss: bool,
    ) -> Result<GaveUp, VolumeError> {
        let name = entry.name.clone();
        let shard_error = from_shard("give up", &name);
        if entry.is_wish() {
            let backend = self.forget_wish(entry).backend;
            return Ok(GaveUp { name, backend, bytes: 0, seconds: 0.0, freed: Freed::NotOurs });
        }
        let Some(id) = lock(&entry.facts).id else { return Err(VolumeError::Unknown(name)) };
        entry.stay();
        let spec = self.spec_of(id).await.map_err(shard_error)?;
        let spec = spec.ok_or_else(|| VolumeError::Unknown(name.clone()))?;
        let mut taken = self.take_backend(entry, id).await?;
        entry.set_state(Some(State::Removing), None);
        lock(&entry.facts).given_up = true;
        // Nobody opens the image meanwhile, unless somebody does so already and gets no answer.
        let opening = timeout(OPENING_WAIT_MAX, entry.opening.lock()).await;
        if opening.is_ok() && self.is_served(id).await {
            // It was opened in that moment.
            entry.set_state(None, None);
            taken = self.take_backend(entry, id).await?;
            entry.set_state(Some(State::Removing), None);
        }
        // Its clients may have written until it was closed.
        let lost = self.would_lose(entry, accept_loss).await;
        let (bytes, seconds) = match lost {
            Ok(lost) => lost,
            Err(error) => {
                drop(opening);
                return Err(self.keep(entry, id, taken, error).await);
            }
        };
        let freed = match (&opening, !spec.read_only && spec.generation > 0) {
            (_, false) => Freed::NotOurs,
            (Ok(_), true) => self.free(entry).await,
            (Err(_), true) => Freed::OutOfReach("it does not answer who opens it".into()),
        };
        let noted = match freed {
            Freed::OutOfReach(_) => self.note(entry, spec.generation, (bytes, seconds)).await,
            _ => Ok(()),
        };
        // Until it is on stable media a crash may bring the volume back.
        let given_up = match noted {
            Ok(()) => self.shard.give_up(id).await.map_err(shard_error),
            Err(source) => Err(VolumeError::Open { name: name.clone(), source }),
        };
        if let Err(error) = given_up {
            drop(opening);
            return Err(self.keep(entry, id, taken, error).await);
        }
        {
            let mut entries = lock(&self.entries);
            if super::is_among(&entries, entry) {
                entries.remove(&name);
            }
        }
        // Whoever waits for it in a handshake is told that there is no such volume.
        drop(lock(&entry.facts).announced.take());
        drop(opening);
        entry.again.notify_one();
        self.forget_parents();
        let backend = entry.backend.to_string();
        warn!(
            "volume {name}: given up with {bytes} bytes that were not in its image; {}",
            freed.text(&backend)
        );
        Ok(GaveUp { name, backend, bytes, seconds, freed })
    }

    /// The volume is not given up after all.
    async fn keep(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: VolumeId,
        taken: bool,
        error: VolumeError,
    ) -> VolumeError {
        lock(&entry.facts).given_up = false;
        entry.set_state(Some(State::Opening), None);
        match taken {
            true => drop(self.go_on(entry, id, None).await),
            // It is being tried already.
            false => entry.again.notify_one(),
        }
        error
    }

    async fn is_served(&self, id: VolumeId) -> bool {
        let known = self.shard.volumes().await.unwrap_or_default();
        known.into_iter().any(|(known, _, state)| known == id && is_attached(state))
    }

    /// Takes the backend away from a volume that has one; whether it had.
    async fn take_backend(&self, entry: &Arc<Entry>, id: VolumeId) -> Result<bool, VolumeError> {
        let shard_error = from_shard("give up", &entry.name);
        if entry.attached("give up").is_err() {
            return Ok(false);
        }
        let _alone = self.alone(id).await.map_err(shard_error)?;
        let backend = match self.shard.let_go(id, true).await {
            Err(ShardError::NoVolume(_)) => self.shard.detach_volume(id).await,
            other => other,
        };
        let backend = backend.map_err(|error| match error {
            ShardError::Control(ControlError::Backend(_)) => {
                let why = format!(
                    "requests wait for its image ({}); stop the daemon's clients of it, or restart the daemon, and give it up then",
                    one_line(&error)
                );
                VolumeError::Unreachable { what: "give up", name: entry.name.clone(), why }
            }
            error => shard_error(error),
        })?;
        if let Some(keeping) = lock(&entry.facts).keeping.take() {
            keeping.abort();
        }
        let clean = self
            .volume_status(&entry.name)
            .await
            .is_ok_and(|now| now.exposure.bytes == 0 && now.lost_blocks == 0);
        if let Some(backend) = backend
            && timeout(CLOSE_WAIT_MAX, close(backend, clean)).await.is_err()
        {
            warn!("volume {}: {} does not answer while it is closed", entry.name, entry.backend);
        }
        Ok(true)
    }

    /// Writes down what is given up, for the day on which an image comes back that is out of reach now.
    async fn note(&self, entry: &Entry, generation: u64, lost: (u64, f64)) -> Result<(), BackendError> {
        let note = GivenUp::new(self.cache_uuid, generation, (&entry.name, &entry.backend.to_string()), lost);
        let written = tokio::task::spawn_blocking(move || note.write(None)).await;
        written.unwrap_or_else(|_| Err(super::replication::internal("writing the note of what is given up")))
    }

    /// Frees the image of a volume that was given up: brings it to its newest group, if it is drained by groups.
    async fn free(&self, entry: &Entry) -> Freed {
        let (uri, cache_uuid) = (entry.backend.clone(), self.cache_uuid);
        let image = super::attach::image_of(&uri);
        let freeing = async {
            let turn = self.openings.of(&image).await;
            let freed = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                free(&uri, cache_uuid)
            });
            freed.await.unwrap_or_else(|_| Err(super::replication::internal("freeing the image")))
        };
        match timeout(FREE_WAIT_MAX, freeing).await {
            Ok(Ok(freed)) => freed,
            Ok(Err(error)) => Freed::OutOfReach(one_line(&error)),
            Err(_) => {
                let seconds = FREE_WAIT_MAX.as_secs();
                Freed::OutOfReach(format!("{} has not answered for {seconds} s", entry.backend))
            }
        }
    }

    /// A backend that has opened when its volume was given up already: the image is as it was left, and is freed.
    pub(super) async fn free_late(&self, entry: &Entry, backend: Option<Box<dyn Backend>>) {
        self.put_back(entry, backend, false).await;
        let freed = self.free(entry).await;
        warn!("volume {}: {}", entry.name, freed.text(&entry.backend.to_string()));
    }
}

/// Frees an image that is this cache's, unless a copy on another host counts, which has what is given up here.
fn free(uri: &tidepool_backend::BackendUri, cache_uuid: [u8; 16]) -> Result<Freed, BackendError> {
    let record = tidepool_backend::ownership(uri, None)?;
    let Some(record) = record.filter(|record| record.cache_uuid.as_bytes() == &cache_uuid) else {
        return Ok(Freed::NotOurs);
    };
    if let Some(peer) = record.peer.filter(|_| record.copies == Copies::Sync) {
        return Ok(Freed::CopyCounts(peer.host));
    }
    let recovered = tidepool_backend::recover(uri, None, false)?;
    Ok(Freed::Free { exact: recovered.exact })
}
