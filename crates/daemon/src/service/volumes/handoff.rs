//! A volume leaves this host: its peer has it, or is to have it.

use super::{CLOSE_WAIT_MAX, Entry, Volumes, close, from_shard, lock};
use crate::admin::{HandedOver, State};
use crate::service::VolumeError;
use crate::service::peers::{Caller, hand_over, record_of};
use crate::shard::ShardError;
use crate::volume::is_parent_name;
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{Backend, OwnerState, Ownership, Prepared};
use tidepool_engine::api::{ControlError, VolumeId};
use tidepool_engine::status::VolumeState;
use tidepool_replica::Party;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// How the first try to open the image of a volume has ended, some time.
type Attached = oneshot::Receiver<Result<(), VolumeError>>;

/// Pause between two looks at whether clients that may have hung up just now are gone.
const CLIENTS_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a volume that is being changed is asked again to let go of its backend.
const LET_GO_PAUSE: Duration = Duration::from_millis(300);
/// Pause before a volume that cannot let go of its backend is looked at again.
const LET_GO_WAIT: Duration = Duration::from_secs(30);

impl Volumes {
    /// Has the peer of a volume serve it from its copy: this host lets go of the image with
    /// everything in both logs, and holds the other copy from then on. `to` is the peer's host, if
    /// it was said; where clients are connected here, they lose the connection with `disconnect`.
    ///
    /// # Errors
    /// There is no copy in sync, or it is on another host, or clients are connected; nothing has
    /// changed then. Or the peer does not take the volume: it is served here again, if the image
    /// can be opened.
    pub async fn hand_over(
        self: &Arc<Self>,
        name: &str,
        to: Option<&str>,
        disconnect: bool,
    ) -> Result<HandedOver, VolumeError> {
        let entry = self.entry(name)?;
        let id = entry.attached("hand over")?;
        let change = entry.begin_change()?;
        let refused = |why: String| VolumeError::NotHandedOver { name: name.to_owned(), why };
        let found = self.ownership(&entry.backend).await;
        let found = found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })?;
        let Some((found, peer)) =
            found.and_then(|found| found.peer.clone().map(|peer| (found, peer)))
        else {
            return Err(refused(ShardError::NoCopy.to_string()));
        };
        if let Some(to) = to.filter(|to| *to != peer.host) {
            return Err(refused(format!("its second copy is on host {}, not on {to}", peer.host)));
        }
        entry.stay();
        let released = self.without_clients(|| self.release(&entry, id, disconnect)).await;
        let released = released.map_err(|error| match error {
            ShardError::NoCopy | ShardError::Connected(_) => refused(error.to_string()),
            ShardError::Control(ControlError::Paired) => {
                refused("its peer was lost meanwhile; it is served here as before".into())
            }
            ShardError::Control(ControlError::Backend(_)) => {
                refused("its image does not answer; it is served here as before".into())
            }
            error => from_shard("hand over", name)(error),
        })?;
        let taken = match released {
            Ok(()) => self.call_peer(&entry, &found).await,
            Err(why) => Err(why),
        };
        drop(change);
        if taken.is_ok() {
            self.has_left(name, &entry.backend);
        }
        let again = self.go_on(&entry, id, None).await;
        match (taken, again) {
            (Ok(()), _) => {
                info!("volume {name}: handed over to {}", peer.host);
                Ok(HandedOver { name: name.to_owned(), host: peer.host, live: false })
            }
            (Err(why), None) => Err(refused(why)),
            (Err(why), Some(again)) => Err(match again.await {
                Ok(Ok(())) => refused(format!("{why}; it is served here again")),
                Ok(Err(error)) => {
                    refused(format!("{why}; and here: {}", crate::failure::one_line(&error)))
                }
                Err(_) => refused(why),
            }),
        }
    }

    /// Does something that is refused while clients are connected. Those that have hung up just now
    /// are waited for.
    pub(super) async fn without_clients<T, F: Future<Output = Result<T, ShardError>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<T, ShardError> {
        let since = Instant::now();
        loop {
            match attempt().await {
                Err(ShardError::Connected(_))
                    if since.elapsed() < Duration::from_nanos(self.pairs.limits.clients_ns) =>
                {
                    sleep(CLIENTS_PAUSE).await
                }
                outcome => return outcome,
            }
        }
    }

    /// Lets go of a volume's image with everything in both logs; what the outcome of that is.
    ///
    /// # Errors
    /// The volume is served as before.
    pub(super) async fn release(
        &self,
        entry: &Entry,
        id: VolumeId,
        disconnect: bool,
    ) -> Result<Result<(), String>, ShardError> {
        let backend = self.shard.hand_over(id, disconnect).await?;
        Ok(self.close_released(entry, backend, false).await)
    }

    /// Closes the image of a volume that another host is to serve.
    pub(super) async fn close_released(
        &self,
        entry: &Entry,
        backend: Option<Box<dyn Backend>>,
        clean: bool,
    ) -> Result<(), String> {
        entry.set_state(Some(State::Opening), None);
        if let Some(keeping) = lock(&entry.facts).keeping.take() {
            keeping.abort();
        }
        let Some(backend) = backend else { return Ok(()) };
        let closed = timeout(CLOSE_WAIT_MAX, close(backend, clean)).await;
        let closed = closed.map_err(|_| "it does not answer".to_owned());
        let closed = closed.and_then(|closed| closed.map_err(|error| error.to_string()));
        closed.map_err(|why| format!("its image cannot be let go of: {why}"))
    }

    /// A volume that has let go of its image goes on as after a restart: the record says whose it
    /// is. Nothing is done where it has become another's copy, or this host's again, meanwhile. Its
    /// image is rolled back to a snapshot first, if one is named.
    pub(super) async fn go_on(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: VolumeId,
        roll_back: Option<String>,
    ) -> Option<Attached> {
        let _takeover = self.takeovers.of(&entry.name).await;
        let current = self.knows(entry);
        let known = self.shard.volumes().await.unwrap_or_default();
        let known = known.into_iter().find(|(known, ..)| *known == id);
        match known {
            Some((_, spec, VolumeState::Detached | VolumeState::Failed)) if current => {
                let begun = self.begin_attach(id, spec, None, (None, roll_back));
                begun.inspect_err(|error| warn!("volume {}: {error}", entry.name)).ok()
            }
            Some((.., VolumeState::Replica)) if current => {
                lock(&self.entries).remove(&entry.name);
                None
            }
            _ => None,
        }
    }

    /// Asks the holder of the other copy to take the volume over.
    async fn call_peer(&self, entry: &Entry, found: &Ownership) -> Result<(), String> {
        let (record, image) = (record_of(found), entry.backend.to_string());
        let caller = Caller { record: &record, host: &self.host, name: &entry.name, image: &image };
        let to = found.peer.as_ref().map_or("", |peer| &peer.host);
        let mut failures = Vec::new();
        for route in self.pairs.peers.iter() {
            match hand_over(route, &caller, to).await {
                Ok(()) => return Ok(()),
                Err(error) => failures.push(format!("peer {route}: {error}")),
            }
        }
        Err(failures.join("; "))
    }

    /// Takes over a volume of which `owner`, in this generation, has let go.
    ///
    /// # Errors
    /// It has not, or as for a takeover.
    pub async fn take_handed_over(
        self: &Arc<Self>,
        name: &str,
        owner: Party,
        generation: u64,
        prepared: Prepared,
    ) -> Result<(), VolumeError> {
        let let_go = |found: &Ownership| {
            let record = record_of(found);
            let is_so = (record.owner.cache, record.generation) == (owner.cache, generation)
                && found.state == OwnerState::Dirty;
            is_so.then_some(()).ok_or_else(|| "its owner has not let go of it".to_owned())
        };
        self.take_over_if(name, false, (prepared, None), let_go).await
    }

    /// Nothing of a volume arrives at its image any more: another owner has that, or the cluster
    /// has blocklisted this client. Lets go of it, and goes on as after a restart, which finds out.
    pub(in crate::service) fn find_owner(self: &Arc<Self>, name: &str) {
        let Some(entry) = lock(&self.entries).get(name).filter(|_| !is_parent_name(name)).cloned()
        else {
            return;
        };
        let id = {
            let mut facts = lock(&entry.facts);
            let Some(id) = facts.id.filter(|_| facts.state.is_none()) else { return };
            facts.state = Some(State::Opening);
            facts.error = Some(
                "its image takes nothing from this client any more; whose it is, is being found out".into(),
            );
            id
        };
        warn!(
            "volume {name}: {} takes nothing from this client any more; looking whose it is",
            entry.backend
        );
        tokio::spawn(self.clone().let_go(entry, id));
    }

    /// Another host has the image of a volume that was served here: lets go of it, so that this
    /// cache can hold the other copy.
    pub(super) async fn let_go(self: Arc<Self>, entry: Arc<Entry>, id: VolumeId) {
        let name = &entry.name;
        entry.stay();
        let backend = loop {
            let removing = lock(&entry.facts).state == Some(State::Removing);
            match self.shard.detach_volume(id).await {
                Ok(backend) => break backend,
                // Another operation on it ends soon, or has removed it.
                Err(ShardError::Control(ControlError::Busy)) => sleep(LET_GO_PAUSE).await,
                // It has let go in another way.
                Err(ShardError::Attached(_) | ShardError::Control(ControlError::Detached)) => {
                    return;
                }
                Err(_) if removing => return,
                Err(error) => {
                    warn!("volume {name}: it cannot let go of its image yet: {error}");
                    sleep(LET_GO_WAIT).await;
                    // The next that finds it fenced tries again.
                    return entry.set_state(None, None);
                }
            }
        };
        if let Some(backend) = backend {
            match timeout(CLOSE_WAIT_MAX, close(backend, false)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => info!("volume {name}: its image is let go of ({error})"),
                Err(_) => {
                    warn!("volume {name}: {} does not answer while it is closed", entry.backend)
                }
            }
        }
        self.go_on(&entry, id, None).await;
    }
}
