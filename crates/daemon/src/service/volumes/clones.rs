//! Clones: what images have from their parent, a snapshot, is read through one volume for all of
//! them.
//!
//! The parent's volume is added with the first clone and goes with the last one. Its name begins
//! with `@`, which no other name does. Nothing depends on it: a clone whose parent cannot be opened
//! is read from its own image.

use super::{Entry, Volumes, close, from_shard, lock};
use crate::admin::State;
use crate::service::VolumeError;
use crate::service::plan::Wanted;
use crate::volume::{Mode, is_parent_name};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{BackendError, Parent};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// How long a caller who adds a clone waits for it to share what is cached.
const SHARE_WAIT_MAX: Time = Time::from_secs(5);
/// How long a parent that the cache device knows may take to be opened after a restart.
const PARENT_WAIT_MAX: Time = Time::from_secs(60);
/// How often it is looked at meanwhile.
const PARENT_POLL: Time = Time::from_millis(50);

type Background = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Volumes {
    /// Has a volume that is being served read what it has from its parent through the parent's
    /// volume. It may take longer than this call; what goes wrong is only logged.
    pub(super) async fn share(self: &Arc<Self>, entry: &Arc<Entry>, parent: Option<Parent>) {
        let Some(parent) = parent else { return };
        let task = tokio::spawn(self.clone().link(entry.clone(), parent));
        if !is_parent_name(&entry.name) {
            let _ = timeout(SHARE_WAIT_MAX, task).await;
        }
    }

    // Adding the parent may lead to a parent of its own, so the type must not contain itself.
    fn link(self: Arc<Self>, entry: Arc<Entry>, parent: Parent) -> Background {
        Box::pin(async move {
            let (name, uri) = (entry.name.clone(), parent.uri.to_string());
            match self.try_link(&entry, parent).await {
                Ok(Some(through)) => {
                    info!("volume {name}: reads what it has from {uri} through volume {through}");
                }
                Ok(None) => self.forget_parents(),
                Err(error) => {
                    let error = crate::failure::one_line(&error);
                    self.forget_parents();
                    warn!(
                        "volume {name}: shares nothing of what is cached of its parent {uri}: {error}"
                    );
                }
            }
        })
    }

    /// The name of the parent's volume; `None` when the clone has gone meanwhile.
    async fn try_link(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        parent: Parent,
    ) -> Result<Option<String>, VolumeError> {
        let _turn = self.parents.lock().await;
        if !self.knows(entry) {
            return Ok(None);
        }
        let found = self.parent_entry(&parent).await?;
        // Holding these keeps the volumes, and with them what is known of their images.
        let _stays = found.change.lock().await;
        let parent_id = found.attached("read through")?;
        let same = lock(&found.facts).snapshot.as_ref() == Some(&parent.name);
        if !self.knows(&found) || !same {
            let (name, why) = (found.name.clone(), "it is not that snapshot".to_owned());
            return Err(VolumeError::Unreachable { what: "read through", name, why });
        }
        let _change = entry.change.lock().await;
        let id = entry.attached("share").ok().filter(|_| self.knows(entry));
        let Some(id) = id else { return Ok(None) };
        let shard_error = from_shard("share the parent of", &entry.name);
        self.shard.set_parent(id, parent_id).await.map_err(shard_error)?;
        lock(&entry.facts).parent = Some(found.name.clone());
        Ok(Some(found.name.clone()))
    }

    /// The volume of a parent: one that serves that snapshot, whatever its name is, or a new one.
    /// One that a restart has found may still be on its way.
    async fn parent_entry(self: &Arc<Self>, parent: &Parent) -> Result<Arc<Entry>, VolumeError> {
        let until = Instant::now() + PARENT_WAIT_MAX;
        loop {
            let entries = lock(&self.entries).clone();
            let serves = |entry: &&Arc<Entry>| {
                lock(&entry.facts).snapshot.as_ref() == Some(&parent.name)
                    && entry.attached("read through").is_ok()
            };
            if let Some(found) = entries.values().find(serves) {
                return Ok(found.clone());
            }
            match entries.get(&parent.name) {
                Some(known) if known.is_waiting() && Instant::now() < until => {
                    sleep(PARENT_POLL).await
                }
                Some(known) => return Ok(known.clone()),
                None => break,
            }
        }
        let wanted = Wanted {
            name: parent.name.clone(),
            backend: parent.uri.clone(),
            mode: Mode::WriteThrough,
            accept_loss: None,
            dirty_bytes_max: 0,
            read_only: true,
            drain: None,
            socket: None,
        };
        self.add(wanted).await?;
        self.entry(&parent.name)
    }

    /// A volume is gone: the parents that nobody reads through any more go, too.
    pub(super) fn forget_parents(self: &Arc<Self>) {
        let this = self.clone();
        let work: Background = Box::pin(async move {
            let _turn = this.parents.lock().await;
            while let Some(parent) = this.unused_parent() {
                if let Err(error) = this.remove_parent(&parent).await {
                    return warn!(
                        "volume {}: stays: {}",
                        parent.name,
                        crate::failure::one_line(&error)
                    );
                }
                info!("volume {}: removed, it has no clones any more", parent.name);
            }
        });
        tokio::spawn(work);
    }

    /// A parent that was added for clones of which none is left.
    fn unused_parent(&self) -> Option<Arc<Entry>> {
        let entries = lock(&self.entries);
        let used = |name: &str| {
            entries.values().any(|entry| {
                let facts = lock(&entry.facts);
                // One that is not open yet may turn out to be a clone. One that was never open was
                // none.
                facts.parent.as_deref() == Some(name)
                    || facts.state.is_some() && facts.wish.is_none() && !is_parent_name(&entry.name)
            })
        };
        let parents = entries.values().filter(|entry| is_parent_name(&entry.name));
        parents
            .into_iter()
            .find(|entry| entry.attached("remove").is_ok() && !used(&entry.name))
            .cloned()
    }

    async fn remove_parent(&self, parent: &Entry) -> Result<(), VolumeError> {
        let _change = parent.begin_change()?;
        let id = parent.attached("remove")?;
        parent.set_state(Some(State::Removing), None);
        // Its image never changes: there is nothing to compare.
        match self.shard.remove_volume(id, false).await {
            Ok(backend) => {
                lock(&self.entries).remove(&parent.name);
                let Some(backend) = backend else { return Ok(()) };
                let name = parent.name.clone();
                close(backend, true).await.map_err(|source| VolumeError::Release { name, source })
            }
            Err(source) => {
                parent.set_state(None, None);
                Err(from_shard("remove", &parent.name)(source))
            }
        }
    }

    /// A parent that is gone is forgotten; tells whether this volume was one.
    pub(super) async fn forget_if_gone(&self, entry: &Entry, error: &VolumeError) -> bool {
        let gone = matches!(error, VolumeError::Open { source: BackendError::NotFound { .. }, .. });
        if !gone || !is_parent_name(&entry.name) {
            return false;
        }
        let Some(id) = lock(&entry.facts).id else { return false };
        let removed = self.shard.remove_volume(id, false).await.is_ok();
        if removed {
            lock(&self.entries).remove(&entry.name);
            entry.set_state(Some(State::Removing), None);
            info!("volume {}: removed, {} is gone", entry.name, entry.backend);
        }
        removed
    }
}
