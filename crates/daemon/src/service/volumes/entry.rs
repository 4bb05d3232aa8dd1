//! One volume as the control plane knows it, from its URI to its end.

use super::snapshots::Rollback;
use super::takeover::Takeover;
use super::whole::PeerFirst;
use super::{OPEN_WAIT_MAX, departure, lock};
use crate::aborts::{self, LeftOut};
use crate::admin::State;
use crate::report::{self, Known};
use crate::service::VolumeError;
use crate::service::plan::Wanted;
use crate::shard::Announcement;
use crate::units::{Duration, time};
use crate::volume;
use std::sync::{Arc, Mutex};
use std::time::Duration as Time;
use tidepool_backend::{BackendError, BackendUri, Identity};
use tidepool_engine::api::VolumeId;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// One volume as the control plane knows it.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) backend: BackendUri,
    pub(super) facts: Mutex<Facts>,
    /// Held while the volume is added, changed or removed.
    pub(super) change: Arc<AsyncMutex<()>>,
    /// Held while it is found out which image the URI means: never more than one thread hangs in
    /// that.
    pub(super) look: Arc<AsyncMutex<()>>,
    /// Held while its backend is being opened.
    pub(super) opening: AsyncMutex<()>,
    /// Has its backend tried again at once.
    pub(super) again: Notify,
}

/// What is known of it at the moment.
#[derive(Default)]
pub(super) struct Facts {
    /// The core's number, once it serves or has recovered the volume.
    pub(super) id: Option<VolumeId>,
    /// How it is to be served, while it is only configured: the cache holds nothing of it, and its
    /// image could not be opened yet.
    pub(super) wish: Option<Wanted>,
    /// Somebody has asked for it: the next attempt serves it, no matter which cache had its image
    /// last.
    pub(super) asked_for: bool,
    /// Has its clients wait.
    pub(super) announced: Option<Announcement>,
    pub(super) accept_loss: Option<Duration>,
    /// The order of the drain, as far as it was said.
    pub(super) drain: Option<volume::DrainOrder>,
    /// State above the core's.
    pub(super) state: Option<State>,
    pub(super) error: Option<String>,
    /// Which image it is, as far as known.
    pub(super) image: Option<Identity>,
    /// What is to be known of its image, a line each.
    pub(super) notes: Vec<String>,
    /// The volume through which it reads what it has from its parent.
    pub(super) parent: Option<String>,
    /// Which snapshot its backend has open, if it is one.
    pub(super) snapshot: Option<String>,
    /// Whether it is served although the cache takes it for a copy.
    pub(super) takeover: Takeover,
    /// What keeps a peer connected.
    pub(super) keeping: Option<AbortHandle>,
    /// Whether it is not served because its peer may have more than this cache.
    pub(super) peer_first: PeerFirst,
    /// What its image is to go back to, or has not gone back to completely.
    pub(super) rollback: Rollback,
    /// Who wants to know how the next attempt to open its backend ends.
    pub(super) asking: Option<oneshot::Sender<Result<(), VolumeError>>>,
    /// It was given up while its image was being opened.
    pub(super) given_up: bool,
    /// It is not served for a while, since the daemon was ended while it worked for it.
    pub(super) left_out: Option<LeftOut>,
    /// It may go to another host.
    pub(super) departing: Option<departure::Departing>,
}

impl Facts {
    /// Of a volume of which the cache holds nothing yet.
    pub(super) fn of_new(wanted: &Wanted) -> Facts {
        let Wanted { accept_loss, drain, .. } = *wanted;
        Facts { accept_loss, drain, state: Some(State::Opening), ..Facts::default() }
    }

    /// A rollback that was asked for with the last attempt is not made with a later one.
    pub(super) fn forget_rollback(&mut self) {
        if self.asking.is_none() {
            self.rollback.forget();
        }
    }

    /// What a report of `host` tells of it.
    pub(super) fn known(&self, host: &str) -> Known {
        Known::on(host)
            .accepting(self.accept_loss)
            .in_state(self.state, self.error.clone())
            .noting(self.notes.clone())
            .cloned_through(self.parent.clone())
    }
}

impl Entry {
    /// A volume of which this is known.
    pub(super) fn new(name: &str, backend: BackendUri, facts: Facts) -> Arc<Entry> {
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
    pub(super) fn attached(&self, what: &'static str) -> Result<VolumeId, VolumeError> {
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
    pub(super) async fn look(self: Arc<Entry>) {
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
    pub(super) fn is_waiting(&self) -> bool {
        matches!(lock(&self.facts).state, Some(State::Opening | State::Unavailable))
    }

    /// It is only configured.
    pub(super) fn is_wish(&self) -> bool {
        lock(&self.facts).wish.is_some()
    }

    /// Its backend has not answered for so long.
    pub(super) fn silent(&self, waited: Time) -> VolumeError {
        let (name, backend) = (self.name.clone(), self.backend.to_string());
        VolumeError::Silent { name, backend, seconds: waited.as_secs() }
    }

    /// Refuses to serve it while it is left out.
    pub(super) fn refuse_left_out(&self) -> Result<(), VolumeError> {
        let left_out = lock(&self.facts).left_out;
        let Some(left_out) = left_out.filter(|left| aborts::now_unix_ms() < left.until_unix_ms())
        else {
            return Ok(());
        };
        Err(VolumeError::LeftOut {
            name: self.name.clone(),
            backend: self.backend.to_string(),
            times: aborts::OF_VOLUME_MAX,
            minutes: aborts::WITHIN.as_secs() / 60,
            last: time(left_out.last_unix_ms()),
            until: time(left_out.until_unix_ms()),
        })
    }

    /// Has its backend tried at once for who is asking; returns the outcome.
    pub(super) async fn try_again(
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
    pub(super) fn withdraw(&self) {
        lock(&self.facts).announced = None;
        self.again.notify_one();
    }

    /// It is served from now on.
    pub(super) fn set_served(&self) {
        let mut facts = lock(&self.facts);
        (facts.state, facts.error, facts.announced) = (None, None, None);
    }

    /// Its backend could not be opened; returns what to say of it. Its clients wait on if it may
    /// come soon: where another host has the volume they are to look there.
    pub(super) fn set_unavailable(&self, error: &VolumeError) -> String {
        use BackendError::{Locked, NotFound, Unavailable};
        let may_come = match error {
            VolumeError::Open { source, .. } => {
                matches!(source, Locked { .. } | Unavailable { .. })
            }
            error => matches!(error, VolumeError::Silent { .. }),
        };
        let mut text = crate::failure::one_line(error);
        let mut facts = lock(&self.facts);
        if facts.id.is_some() && matches!(error, VolumeError::Open { source: NotFound { .. }, .. })
        {
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
    pub(super) async fn serve_again(&self) -> Result<(), VolumeError> {
        let (asking, outcome) = oneshot::channel();
        {
            let mut facts = lock(&self.facts);
            (facts.left_out, facts.asking) = (None, Some(asking));
        }
        self.try_again(outcome).await
    }

    /// Begins to add, change or remove it.
    pub(super) fn begin_change(&self) -> Result<OwnedMutexGuard<()>, VolumeError> {
        self.change.clone().try_lock_owned().map_err(|_| VolumeError::Busy(self.name.clone()))
    }

    /// Puts it into a state above the core's, for this reason; or into none.
    pub(super) fn set_state(&self, state: Option<State>, error: Option<String>) {
        let mut facts = lock(&self.facts);
        (facts.state, facts.error) = (state, error);
    }
}
