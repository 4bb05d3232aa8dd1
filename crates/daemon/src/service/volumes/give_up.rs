//! A volume goes without what is dirty: its image is gone for good, or what the cache alone has of
//! it is not wanted any more.

use super::attach::is_attached;
use super::{Entry, Volumes, from_shard, lock};
use crate::admin::{Freed, GaveUp, Removed, State};
use crate::failure::one_line;
use crate::service::VolumeError;
use crate::shard::ShardError;
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{Backend, BackendError, Copies, GivenUp};
use tidepool_engine::api::{ControlError, VolumeId};
use tokio::time::timeout;
use tracing::warn;

/// How long an image is waited for that is to be freed: Ceph forgets a client that has died after
/// 30 s.
const FREE_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long an attempt to open it is waited for, which may get no answer.
const OPENING_WAIT_MAX: Duration = Duration::from_secs(10);

impl Volumes {
    /// Forgets a volume with what the cache alone has of it, and frees its image, as far as that
    /// can be reached.
    ///
    /// # Errors
    /// Something of it is dirty, or it is another host's second copy that counts, and the loss is
    /// not accepted; or requests wait for its image. Nothing has changed then.
    pub async fn give_up(
        self: &Arc<Self>,
        name: &str,
        accept_loss: bool,
    ) -> Result<GaveUp, VolumeError> {
        let Ok(entry) = self.entry(name) else {
            let (removed, freed) = self.forget_copy(name, accept_loss).await?;
            return Ok(GaveUp { freed, ..nothing_lost(removed) });
        };
        let _change = entry.begin_change()?;
        self.would_lose(&entry, accept_loss).await?;
        self.has_not_left(name);
        if entry.is_wish() {
            return Ok(nothing_lost(self.forget_wish(&entry)));
        }
        let Some(id) = lock(&entry.facts).id else {
            return Err(VolumeError::Unknown(name.to_owned()));
        };
        entry.stay();
        lock(&entry.facts).given_up = true;
        // Nobody opens the image meanwhile, unless somebody does so already and gets no answer.
        let opening = timeout(OPENING_WAIT_MAX, entry.opening.lock()).await.ok();
        let taken = self.is_served(id).await;
        let ended = match taken {
            true => self.take_backend(&entry, id).await,
            false => Ok(()),
        };
        if let Err(error) = ended {
            lock(&entry.facts).given_up = false;
            return Err(error);
        }
        let outcome = self.forget_closed(&entry, id, accept_loss, opening.is_some()).await;
        drop(opening);
        if outcome.is_err() {
            lock(&entry.facts).given_up = false;
            entry.set_state(Some(State::Opening), None);
            if taken {
                drop(self.go_on(&entry, id, None).await);
                return outcome;
            }
        }
        // It is being tried already, or is not any more.
        entry.again.notify_one();
        outcome
    }

    /// What the cache alone has of a volume: bytes, and the age of the oldest of them in seconds.
    ///
    /// # Errors
    /// There is something, and the loss is not accepted.
    async fn would_lose(
        &self,
        entry: &Entry,
        accept_loss: bool,
    ) -> Result<(u64, f64), VolumeError> {
        let name = &entry.name;
        let status = self.volume_status(name).await?;
        let (bytes, seconds) = (status.exposure.bytes, status.exposure.seconds);
        // What is half rolled back is no volume.
        let is_whole = status.state != State::Failed && !lock(&entry.facts).rollback.is_half_done();
        let is_lossless = bytes == 0 && status.lost_blocks == 0 && is_whole;
        if !accept_loss && !is_lossless {
            let (name, backend) = (name.to_owned(), entry.backend.to_string());
            return Err(VolumeError::WouldLose { name, backend, bytes, seconds });
        }
        Ok((bytes, seconds))
    }

    /// Forgets a volume that has no backend, and frees its image, if it is known that nobody opens
    /// that.
    async fn forget_closed(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: VolumeId,
        accept_loss: bool,
        is_still: bool,
    ) -> Result<GaveUp, VolumeError> {
        let name = entry.name.clone();
        let shard_error = from_shard("give up", &name);
        entry.set_state(Some(State::Removing), None);
        let spec = self.spec_of(id).await.map_err(shard_error)?;
        let spec = spec.ok_or_else(|| VolumeError::Unknown(name.clone()))?;
        // Its clients may have written until it was closed.
        let (bytes, seconds) = self.would_lose(entry, accept_loss).await?;
        let freed = match (is_still, !spec.read_only && spec.generation > 0) {
            (_, false) => Freed::NotOurs,
            (true, true) => self.free(entry).await,
            (false, true) => Freed::OutOfReach("it does not answer who opens it".into()),
        };
        if let Freed::OutOfReach(_) = freed {
            let noted = self.note(entry, spec.generation, (bytes, seconds)).await;
            noted.map_err(|source| VolumeError::Open { name: name.clone(), source })?;
        }
        // Until it is on stable media a crash may bring the volume back.
        self.shard.give_up(id).await.map_err(shard_error)?;
        {
            let mut entries = lock(&self.entries);
            if super::is_among(&entries, entry) {
                entries.remove(&name);
            }
        }
        self.doors.close(&name);
        // A client that waits for it in a handshake is told that there is no such volume.
        drop(lock(&entry.facts).announced.take());
        self.forget_parents();
        let backend = entry.backend.to_string();
        warn!(
            "volume {name}: given up with {bytes} bytes that were not in its image; {}",
            freed.text(&backend)
        );
        Ok(GaveUp { name, backend, bytes, seconds, freed })
    }

    async fn is_served(&self, id: VolumeId) -> bool {
        let known = self.shard.volumes().await.unwrap_or_default();
        known.into_iter().any(|(known, _, state)| known == id && is_attached(state))
    }

    /// Takes the backend away from a volume that has one.
    async fn take_backend(&self, entry: &Arc<Entry>, id: VolumeId) -> Result<(), VolumeError> {
        let shard_error = from_shard("give up", &entry.name);
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
        let clean = self
            .volume_status(&entry.name)
            .await
            .is_ok_and(|now| now.exposure.bytes == 0 && now.lost_blocks == 0);
        // A backend that is fenced, or does not answer, is let go of, too.
        if let Err(why) = self.close_released(entry, backend, clean).await {
            warn!("volume {}: {why}", entry.name);
        }
        Ok(())
    }

    /// Writes down what is given up, for the day on which an image comes back that is out of reach
    /// now.
    async fn note(
        &self,
        entry: &Entry,
        generation: u64,
        lost: (u64, f64),
    ) -> Result<(), BackendError> {
        let note = GivenUp::new(
            self.cache_uuid,
            generation,
            (&entry.name, &entry.backend.to_string()),
            lost,
        );
        let written = tokio::task::spawn_blocking(move || note.write(None)).await;
        written.unwrap_or_else(|_| {
            Err(super::replication::internal("writing the note of what is given up"))
        })
    }

    /// Frees the image of a volume that was given up: brings it to its newest group, if it is
    /// drained by groups.
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

    /// A backend that has opened when its volume was given up already: the image is as it was left,
    /// and is freed.
    pub(super) async fn free_late(&self, entry: &Entry, backend: Option<Box<dyn Backend>>) {
        self.put_back(entry, backend, false).await;
        let freed = self.free(entry).await;
        warn!("volume {}: {}", entry.name, freed.text(&entry.backend.to_string()));
    }
}

/// A volume of which nothing was in this cache alone.
fn nothing_lost(Removed { name, backend, .. }: Removed) -> GaveUp {
    GaveUp { name, backend, bytes: 0, seconds: 0.0, freed: Freed::NotOurs }
}

/// Frees an image that is this cache's, unless a copy on another host counts, which has what is
/// given up here.
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
