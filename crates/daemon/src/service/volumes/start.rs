//! The start: what the cache holds and what is configured, each volume on its own. A configured
//! volume of which the cache holds nothing is tried again for as long as it is configured.

use super::attach::Attempts;
use super::{Entry, Facts, Volumes, from_shard, lock};
use crate::admin::Removed;
use crate::service::VolumeError;
use crate::service::attachment;
use crate::service::plan::Wanted;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{BackendError, Prepared};
use tidepool_engine::api::VolumeSpec;
use tidepool_engine::status::{VolumeState, VolumeStatus};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

/// How long the start waits for the first attempts.
const START_WAIT_MAX: Time = Time::from_secs(30);

/// Volumes that are being opened for the first time since the daemon has started.
pub(in crate::service) struct Starting {
    firsts: Vec<oneshot::Receiver<Result<(), VolumeError>>>,
    failures: Vec<VolumeError>,
    /// The daemon has something to do without any volume of its own.
    takes_copies: bool,
    /// Something of a volume of its own is not in the image.
    holds_data: bool,
}

impl Volumes {
    /// Enters what the cache device knows and what is wanted besides, and begins to open all of it:
    /// no volume waits for another.
    ///
    /// # Errors
    /// What is wanted contradicts itself, or what the cache holds.
    pub(in crate::service) async fn start(
        self: &Arc<Self>,
        wanted: Vec<Wanted>,
    ) -> Result<Starting, VolumeError> {
        let mut wanted: BTreeMap<String, Wanted> =
            wanted.into_iter().map(|w| (w.name.clone(), w)).collect();
        *lock(&self.configured) = wanted.values().map(|wanted| wanted.backend.clone()).collect();
        let status = self.shard.status().await.map_err(from_shard("list", "*"))?;
        let mut recovered = Vec::new();
        for status in status.volumes.into_iter().map(|volume| volume.status) {
            let asked = wanted.remove(&status.spec.name);
            match asked {
                Some(asked)
                    if status.state != VolumeState::Replica
                        && asked.backend.to_string() != status.spec.backend =>
                {
                    self.replace_image(&status, &asked).await?;
                    wanted.insert(asked.name.clone(), asked);
                }
                asked => recovered.push((status, asked)),
            }
        }
        let holds_data =
            |status: &VolumeStatus| status.state != VolumeState::Replica && status.dirty;
        let mut starting = Starting {
            firsts: Vec::new(),
            failures: Vec::new(),
            takes_copies: self.pairs.takes_copies,
            holds_data: recovered.iter().any(|(status, _)| holds_data(status)),
        };
        for (status, _) in recovered.iter().filter(|(_, asked)| asked.is_none()) {
            self.open_kept_door(&status.spec).await;
        }
        for (status, asked) in recovered {
            if status.state == VolumeState::Replica {
                info!("volume {}: a copy of another host's is here", status.spec.name);
                tokio::spawn(self.clone().finish_takeover(status.spec.name, asked));
                continue;
            }
            match self.begin_attach(status.id, status.spec, asked, (None, None)) {
                Ok(first) => starting.firsts.push(first),
                Err(error) => starting.failures.push(error),
            }
        }
        for wanted in wanted.into_values() {
            starting.firsts.push(self.begin_add(wanted, true)?);
        }
        // A volume that comes later was asked for.
        lock(&self.left_out).clear();
        Ok(starting)
    }

    /// A volume that no configuration names has the socket that it was added with. One that cannot
    /// be made keeps the volume from nobody else.
    async fn open_kept_door(&self, spec: &VolumeSpec) {
        let kept = attachment::decode(&spec.attachment).unwrap_or_default();
        let Some(socket) = kept.socket else { return };
        if let Err(why) = self.open_door(&spec.name, socket.clone()).await {
            self.doors.keep(&spec.name, socket, false, why.why());
        }
    }

    /// A volume that is wanted on another image than recorded: allowed when nothing is left to
    /// drain.
    async fn replace_image(
        &self,
        status: &VolumeStatus,
        asked: &Wanted,
    ) -> Result<(), VolumeError> {
        let (name, spec) = (status.spec.name.clone(), &status.spec);
        if status.dirty {
            let (recorded, wanted) = (spec.backend.clone(), asked.backend.to_string());
            let dirty_bytes = status.dirty_bytes + status.dirty_zero_bytes;
            return Err(VolumeError::OtherImage { name, recorded, wanted, dirty_bytes });
        }
        info!("volume {name}: forgetting {}, nothing of it is dirty", spec.backend);
        let removed = self.shard.remove_volume(status.id, false).await;
        removed.map(drop).map_err(from_shard("remove", &name))
    }

    /// Starts to open the backend of a configured volume of which the cache holds nothing; the
    /// receiver gets the outcome of the first attempt, which, if it is `asked_for`, may take an
    /// image that another cache had last.
    ///
    /// # Errors
    /// Another configured volume has its image.
    pub(super) fn begin_add(
        self: &Arc<Self>,
        wanted: Wanted,
        asked_for: bool,
    ) -> Result<oneshot::Receiver<Result<(), VolumeError>>, VolumeError> {
        let announced = self.announce(&wanted.name);
        let left_out = lock(&self.left_out).remove(&wanted.name);
        let facts =
            Facts { announced, wish: Some(wanted.clone()), left_out, ..Facts::of_new(&wanted) };
        let entry = Entry::new(&wanted.name, wanted.backend, facts);
        // Nothing of this name can be configured twice.
        let _ = self.claim(&entry)?;
        let (first, outcome) = oneshot::channel();
        tokio::spawn(self.clone().add_until_done(entry, asked_for, first));
        Ok(outcome)
    }

    async fn add_until_done(
        self: Arc<Self>,
        entry: Arc<Entry>,
        mut asked_for: bool,
        first: oneshot::Sender<Result<(), VolumeError>>,
    ) {
        let mut attempts = Attempts::new(first);
        loop {
            let opening = entry.opening.lock().await;
            let wish = {
                let mut facts = lock(&entry.facts);
                let waits = facts.asking.as_ref().is_some_and(|asking| !asking.is_closed());
                asked_for |= std::mem::take(&mut facts.asked_for) && waits;
                facts.wish.clone()
            };
            attempts.take_asking(&entry);
            let Some(wish) = wish.filter(|_| self.knows(&entry)) else { return };
            // The volume may have come from another host, or its copy.
            if self.is_in_cache(&entry.name).await {
                info!("volume {}: not tried any more, it has come from another host", entry.name);
                return self.drop_wish(&entry);
            }
            let outcome = self.add_once(&entry, &wish, asked_for).await;
            drop(opening);
            {
                let mut facts = lock(&entry.facts);
                facts.rollback.ended(&outcome);
                facts.forget_rollback();
            }
            asked_for = false;
            match outcome {
                Ok(()) => {
                    attempts.take_asking(&entry);
                    return attempts.succeeded();
                }
                Err(_) if !self.knows(&entry) => return,
                Err(error) => {
                    let text = entry.set_unavailable(&error);
                    attempts.failed(error, text);
                }
            }
            attempts.pause(&entry).await;
        }
    }

    /// Tries to serve a configured volume. An attempt that nobody asked for leaves an image alone
    /// that another cache had last.
    async fn add_once(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        wish: &Wanted,
        asked_for: bool,
    ) -> Result<(), VolumeError> {
        let name = || entry.name.clone();
        entry.refuse_left_out()?;
        let opened = self.open_new(entry, wish, Prepared::default(), (None, !asked_for)).await;
        let (opened, turn) = opened.map_err(|error| match error {
            VolumeError::Open { name, source: BackendError::Elsewhere { host, .. } } => {
                VolumeError::Elsewhere { name, backend: entry.backend.to_string(), host }
            }
            error => error,
        })?;
        let change = entry.change.clone().lock_owned().await;
        let is_wanted = lock(&entry.facts).wish.as_ref() == Some(wish);
        if !self.knows(entry) || !is_wanted {
            // It is forgotten meanwhile, or somebody wants it in another way, and has asked for the
            // next attempt.
            self.put_back(entry, Some(opened.backend), true).await;
            return Err(VolumeError::Busy(name()));
        }
        let parent = self.serve_new(entry, wish, opened).await?;
        drop((turn, change));
        self.share(entry, parent).await;
        Ok(())
    }

    /// Whether the cache holds something of a volume.
    async fn is_in_cache(&self, name: &str) -> bool {
        let known = self.shard.volumes().await.unwrap_or_default();
        known.iter().any(|(_, spec, _)| spec.name == name)
    }

    /// A configured volume is not waited for any more.
    fn drop_wish(&self, entry: &Arc<Entry>) {
        let mut entries = lock(&self.entries);
        if super::is_among(&entries, entry) && entry.is_wish() {
            entries.remove(&entry.name);
            entry.withdraw();
        }
    }

    /// The entry of a volume that is only configured.
    pub(super) fn configured(&self, name: &str) -> Option<Arc<Entry>> {
        lock(&self.entries).get(name).filter(|entry| entry.is_wish()).cloned()
    }

    /// Has a configured volume tried at once, as it is wanted now; returns when it is served.
    ///
    /// # Errors
    /// Why it is not. It is tried on.
    pub(super) async fn add_waiting(
        &self,
        entry: &Entry,
        wanted: Wanted,
    ) -> Result<(), VolumeError> {
        let (asking, outcome) = oneshot::channel();
        {
            let mut facts = lock(&entry.facts);
            (facts.accept_loss, facts.drain) = (wanted.accept_loss, wanted.drain);
            (facts.wish, facts.asked_for, facts.asking) = (Some(wanted), true, Some(asking));
            facts.left_out = None;
        }
        entry.try_again(outcome).await
    }

    /// Forgets a volume that is only configured, until the next start.
    pub(super) fn forget_wish(self: &Arc<Self>, entry: &Arc<Entry>) -> Removed {
        self.drop_wish(entry);
        self.doors.close(&entry.name);
        self.forget_parents();
        info!(
            "volume {}: is not tried any more (until the next start, if it stays configured)",
            entry.name
        );
        Removed {
            name: entry.name.clone(),
            backend: entry.backend.to_string(),
            verified: false,
            direct_use: Vec::new(),
        }
    }
}

impl Starting {
    /// Waits until each volume was tried once, for half a minute at most. What cannot be opened is
    /// told, and tried again.
    ///
    /// # Errors
    /// This daemon has nothing to do: no volume could be opened, and trying again would not help.
    pub(in crate::service) async fn tried(self) -> Result<(), VolumeError> {
        let Starting { firsts, mut failures, takes_copies, holds_data } = self;
        let deadline = Instant::now() + START_WAIT_MAX;
        let mut may_serve = 0;
        for first in firsts {
            match timeout_at(deadline, first).await {
                Ok(Ok(Err(error))) => failures.push(error),
                // Served, or still being opened, which the log says.
                _ => may_serve += 1,
            }
        }
        let lasting = failures
            .iter()
            .all(|error| error.is_decision() || matches!(error, VolumeError::Invalid { .. }));
        // What is to be done about it, this daemon is asked for.
        let is_asked_for = |error: &VolumeError| {
            use BackendError::{NotFound, Overwritten, Unrecognised};
            matches!(
                error,
                VolumeError::Open {
                    source: Overwritten { .. } | Unrecognised { .. } | NotFound { .. },
                    ..
                }
            )
        };
        if may_serve == 0
            && lasting
            && !takes_copies
            && !(holds_data && failures.iter().any(is_asked_for))
            && let Some(error) = failures.pop()
        {
            return Err(error);
        }
        failures.iter().for_each(|error| warn!("{}", crate::failure::one_line(error)));
        Ok(())
    }
}
