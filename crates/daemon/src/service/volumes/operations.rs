//! What is done with a volume as a whole while it is served: drain, change, resize, removal.

use super::{Entry, Volumes, close, from_shard, lock, sockets};
use crate::admin::{BackendState, Removed, SetVolume, State};
use crate::direct;
use crate::service::VolumeError;
use crate::service::plan::{mode_rule, order_rule, quota_rule};
use crate::units::Size;
use crate::volume::Mode;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_engine::api::VolumeId;
use tokio::time::{Instant, timeout};
use tracing::info;

/// How often a waiting operation looks for progress.
const PROGRESS_POLL: Time = Time::from_millis(500);
/// A drain that moved nothing for this long is taken for stuck when a volume is to be removed.
const STALL_WAIT_MAX: Time = Time::from_secs(30);

impl Volumes {
    /// Returns when everything acknowledged before is in the backend.
    ///
    /// # Errors
    /// The volume has no backend, or the shard reports a failure.
    pub async fn drain(&self, name: &str) -> Result<(), VolumeError> {
        let id = self.entry(name)?.attached("drain")?;
        let shard_error = from_shard("drain", name);
        self.shard.drain(id).await.map_err(shard_error)
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
            let found = mode_rule(mode, accept_loss, self.pairs.are_wanted()).and_then(rules);
            found.map_err(|source| VolumeError::Mode { name: name.to_owned(), source })
        };
        rule(change.mode.or(Some(Mode::WriteThrough)))?;
        if change.dirty_max.is_some() {
            let quota = quota_rule(change.dirty_max);
            let quota =
                quota.map_err(|source| VolumeError::Mode { name: name.to_owned(), source })?;
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
            self.shard.set_alone(id, self.pairs.alone_with(accept_loss)).map_err(shard_error)?;
        }
        info!("volume {name}: changed as asked for");
        Ok(())
    }

    /// Gives the volume and its image another size.
    ///
    /// # Errors
    /// The size cannot be had, or the shard reports a failure.
    pub async fn resize(&self, name: &str, size: Size) -> Result<(), VolumeError> {
        let entry = self.entry(name)?;
        let _change = entry.begin_change()?;
        let id = entry.attached("resize")?;
        if entry.is_departing() {
            let why = "it may go to another host at any moment (volume handoff --cancel ends that)"
                .to_owned();
            return Err(VolumeError::Invalid { name: name.to_owned(), why });
        }
        let _alone = self.alone(id).await.map_err(from_shard("resize", name))?;
        self.shard.resize(id, size.0).await.map_err(from_shard("resize", name))
    }

    /// Gives the image back: drained, compared with the cache, unlocked. As long as it drains, a
    /// caller that goes away ends the removal and the volume goes on serving; what follows runs to
    /// its end.
    ///
    /// # Errors
    /// The volume goes on serving, unless the error says that it is removed.
    pub async fn remove(self: &Arc<Self>, name: &str) -> Result<Removed, VolumeError> {
        let Ok(entry) = self.entry(name) else {
            return self.forget_copy(name, false).await.map(|(removed, _)| removed);
        };
        let change = entry.begin_change()?;
        if entry.is_wish() {
            return Ok(self.forget_wish(&entry));
        }
        let id = entry.attached("remove")?;
        entry.stay();
        let status = self.volume_status(name).await?;
        // What only waits for room or an answer may go on while it drains.
        let waits = status.state == State::Full
            || matches!(status.backend_state, BackendState::Full | BackendState::Slow);
        if let Some(why) = status.error.filter(|_| !waits) {
            return Err(VolumeError::Unreachable { what: "remove", name: name.to_owned(), why });
        }
        self.drain_or_stall(name, id).await?;
        let this = self.clone();
        let finish = tokio::spawn(async move {
            let _change = change;
            let _alone = this.alone(id).await.map_err(from_shard("remove", &entry.name))?;
            this.finish_removal(&entry, id).await
        });
        finish.await.unwrap_or_else(|_| {
            let why = "removing it ended in an internal error".to_owned();
            Err(VolumeError::Invalid { name: name.to_owned(), why })
        })
    }

    /// Drains, and gives up when the backend takes nothing any more.
    async fn drain_or_stall(&self, name: &str, id: VolumeId) -> Result<(), VolumeError> {
        let shard_error = from_shard("remove", name);
        let drain = self.shard.drain(id);
        tokio::pin!(drain);
        let (mut drained, mut since) = (u64::MAX, Instant::now());
        loop {
            if let Ok(done) = timeout(PROGRESS_POLL, &mut drain).await {
                return done.map_err(shard_error);
            }
            let status = self.shard.status().await.map_err(shard_error)?;
            let now = status
                .volumes
                .iter()
                .find(|v| v.status.id == id)
                .map(|v| v.status.count.drained_blocks);
            if now != Some(drained) {
                (drained, since) = (now.unwrap_or(u64::MAX), Instant::now());
            } else if since.elapsed() > STALL_WAIT_MAX {
                let seconds = since.elapsed().as_secs();
                return Err(VolumeError::Stalled { name: name.to_owned(), seconds });
            }
        }
    }

    async fn finish_removal(
        self: &Arc<Self>,
        entry: &Entry,
        id: VolumeId,
    ) -> Result<Removed, VolumeError> {
        let name = entry.name.clone();
        entry.set_state(Some(State::Removing), None);
        let backend = match self.shard.remove_volume(id, true).await {
            Ok(backend) => backend,
            Err(source) => {
                entry.set_state(None, None);
                return Err(VolumeError::Shard { what: "remove", name, source });
            }
        };
        lock(&self.entries).remove(&name);
        self.doors.close(&name);
        if let Some(keeping) = lock(&entry.facts).keeping.take() {
            keeping.abort();
        }
        self.forget_parents();
        if let Some(backend) = backend {
            close(backend, true)
                .await
                .map_err(|source| VolumeError::Release { name: name.clone(), source })?;
        }
        self.has_left(&name, &entry.backend);
        info!("volume {name}: removed, {} is complete and free", entry.backend);
        Ok(Removed {
            name,
            backend: entry.backend.to_string(),
            verified: true,
            direct_use: direct::commands(&entry.backend),
        })
    }
}
