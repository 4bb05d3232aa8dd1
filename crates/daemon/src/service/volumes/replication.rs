//! Second copies of volumes (RFC 9): which volumes are to have one, and how a copy becomes a
//! volume.

use super::takeover::Taking;
use super::{Entry, Volumes, from_shard, lock};
use crate::admin::{Freed, Removed};
use crate::failure::one_line;
use crate::service::VolumeError;
use crate::service::peers::{
    Replicated, check_place, is_way_of_this_host, me, not_taken, record_of,
};
use crate::service::plan::Wanted;
use crate::shard::ShardError;
use crate::volume::is_parent_name;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{BackendError, BackendUri, OwnerState, Ownership, Prepared, TakeOver};
use tidepool_engine::api::{VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::{Copies, Record};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// Pause before a record that cannot be read is read again.
const RECORD_PAUSE: Time = Time::from_secs(5);

/// How long a record is waited for before its copy is forgotten.
const RECORD_WAIT_MAX: Time = Time::from_secs(10);

/// A volume is without a second copy as long as this is there.
pub(super) struct Alone<'a> {
    volumes: &'a Volumes,
    id: VolumeId,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        // A reactor that has stopped keeps no copies.
        let _ = self.volumes.shard.pair_again(self.id);
    }
}

impl Volumes {
    /// Has the core keep a second copy of a volume that is served, if there is to be one.
    pub(super) async fn replicate(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: VolumeId,
        generation: u64,
        read_only: bool,
    ) {
        if !self.pairs.are_wanted() || read_only || is_parent_name(&entry.name) {
            return;
        }
        let record = Record { generation, owner: me(self.cache_uuid), copies: Copies::Solo };
        let alone = self.pairs.alone_with(lock(&entry.facts).accept_loss);
        let wanted = Arc::new(Notify::new());
        if let Err(error) = self.shard.own(id, record, alone, wanted.clone()).await {
            return warn!("volume {}: no second copy is kept: {error}", entry.name);
        }
        let replicated = Replicated {
            id,
            name: entry.name.clone(),
            image: entry.backend.to_string(),
            record,
            host: self.host.clone(),
            peers: self.pairs.peers.clone(),
        };
        let (volumes, kept) = (self.clone(), entry.clone());
        let keeping = tokio::spawn(async move {
            if replicated.keep(&volumes.shard, wanted).await {
                // On its own: what it does ends this task, as any end of the volume does.
                tokio::spawn(volumes.let_go(kept, id));
            }
        });
        if let Some(before) = lock(&entry.facts).keeping.replace(keeping.abort_handle()) {
            before.abort();
        }
    }

    /// Ends the second copy of a volume for as long as the caller keeps what is returned.
    pub(super) async fn alone(&self, id: VolumeId) -> Result<Alone<'_>, ShardError> {
        let alone = Alone { volumes: self, id };
        self.shard.part(id).await?;
        Ok(alone)
    }

    /// The record says that this cache owns the image.
    pub(super) fn owns(&self, found: &Ownership) -> bool {
        found.cache_uuid.as_bytes() == &self.cache_uuid
    }

    /// The record says that this cache holds the other copy.
    pub(super) fn has_copy_of(&self, found: &Ownership) -> bool {
        found.peer.as_ref().is_some_and(|peer| peer.cache_uuid.as_bytes() == &self.cache_uuid)
    }

    /// The ownership record of an image, as it is now.
    pub(super) async fn ownership(
        &self,
        uri: &BackendUri,
    ) -> Result<Option<Ownership>, BackendError> {
        self.ask_image(uri, "reading the ownership record", |uri| {
            tidepool_backend::ownership(uri, None)
        })
        .await
    }

    /// Makes the copy of another host's volume that is in this cache the volume, and serves it. The
    /// host that was the owner is fenced. With `accept_loss` also where this host was restarted
    /// since the copy counted, and a volume of this host's that waits for the word of its peer:
    /// what was flushed is here, the newest of what was not may be lost.
    ///
    /// # Errors
    /// There is no such copy, or the ownership record does not say that it counts; nothing has
    /// changed then. Or the image cannot be opened yet: that goes on in the background.
    pub async fn take_over(
        self: &Arc<Self>,
        name: &str,
        accept_loss: bool,
    ) -> Result<(), VolumeError> {
        if let Some(waiting) = self.waiting(name) {
            return self.serve_alone(&waiting, accept_loss).await;
        }
        let uri = self.copy_of("take over", name).await?.2;
        let prepared = self.prepared(&uri).await;
        let open = |source| VolumeError::Open { name: name.to_owned(), source };
        self.take_over_if(name, accept_loss, (prepared.map_err(open)?, None), |_| Ok(())).await
    }

    /// What opening an image needs.
    pub(super) async fn prepared(&self, uri: &BackendUri) -> Result<Prepared, BackendError> {
        self.ask_image(uri, "connecting to its image", tidepool_backend::prepare).await
    }

    /// Asks something of an image on a thread that may block. Never more than one thread hangs in
    /// an image that does not answer, however often it is asked.
    pub(in crate::service) async fn ask_image<T: Send + 'static>(
        &self,
        uri: &BackendUri,
        what: &str,
        ask: impl FnOnce(&BackendUri) -> Result<T, BackendError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let (turn, uri) = (self.images.of(&uri.to_string()).await, uri.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            ask(&uri)
        });
        asked.await.unwrap_or_else(|_| Err(internal(what)))
    }

    /// Takes a volume over as [`Volumes::take_over`] does, if `wanted` accepts the record, with
    /// what was made ready and the settings that are asked for. Only the record that `wanted` has
    /// seen is changed: one of another generation by then is left as it is.
    pub(super) async fn take_over_if(
        self: &Arc<Self>,
        name: &str,
        accept_loss: bool,
        (prepared, asked): (Prepared, Option<Wanted>),
        wanted: impl Fn(&Ownership) -> Result<(), String>,
    ) -> Result<(), VolumeError> {
        let shard_error = from_shard("take over", name);
        let _takeover = self.takeovers.of(name).await;
        // This host may have been the owner, and still try to be.
        let former = lock(&self.entries).get(name).cloned();
        let _opening = match &former {
            Some(former) => Some(former.opening.lock().await),
            None => None,
        };
        let (id, spec, uri, found) = self.copy("take over", name, &prepared).await?;
        let found = found.ok_or_else(|| VolumeError::Invalid {
            name: name.to_owned(),
            why: format!("{uri} has no ownership record"),
        })?;
        wanted(&found).map_err(|why| VolumeError::NotInSync { name: name.to_owned(), why })?;
        let is_elsewhere = found.peer.as_ref().is_some_and(|peer| peer.host != self.host);
        if self.has_copy_of(&found) && is_elsewhere && !accept_loss {
            return Err(self.not_in_sync(name, id, &uri, &found).await);
        }
        let (me, record) = (me(self.cache_uuid), record_of(&found));
        // A takeover that was cut short has made the record this cache's already.
        let mut take_over = None;
        if !self.owns(&found) {
            match self.shard.prepare(id, me, record, accept_loss).await {
                Err(ShardError::NotInSync(_)) => {
                    return Err(self.not_in_sync(name, id, &uri, &found).await);
                }
                prepared => prepared.map_err(shard_error)?,
            }
            let (cache_uuid, generation) = (self.cache_uuid, record.generation);
            take_over =
                Some(TakeOver { cache_uuid, generation, accept_loss, ..TakeOver::default() });
        }
        // It is not followed any more. One that has let go of the image serves nothing.
        let unfollowed = self.shard.unfollowed_for(id).await.map_err(shard_error)?;
        let unfollowed = unfollowed.unwrap_or_else(|| self.since.elapsed());
        let left = Time::from_nanos(
            self.pairs
                .limits
                .serves_after(u64::try_from(unfollowed.as_nanos()).unwrap_or(u64::MAX)),
        );
        let serve_from = (found.state == OwnerState::Open).then(|| Instant::now() + left);
        let taking = Taking { prepared, take_over, serve_from };
        self.has_not_left(name);
        let first = self.begin_attach(id, spec, asked, (Some(taking), None))?.await;
        let outcome = first.unwrap_or_else(|_| Err(VolumeError::Busy(name.to_owned())));
        if outcome.is_err() && !self.owns(&found) {
            // The record may have been changed all the same: then its image is tried on and on.
            let found = self.ownership(&uri).await.ok().flatten();
            if found.is_some_and(|found| !self.owns(&found)) {
                lock(&self.entries).remove(name);
            }
        }
        outcome.inspect(|()| info!("volume {name}: taken over from {}", found.host))
    }

    /// Forgets the copy of another host's volume, unless it counts; with `accept_loss` whatever its
    /// record says. Others write that record, and the copy has a name here that another volume may
    /// need. Returns what it means for the image, too.
    pub(super) async fn forget_copy(
        &self,
        name: &str,
        accept_loss: bool,
    ) -> Result<(Removed, Freed), VolumeError> {
        let _takeover = self.takeovers.of(name).await;
        let (id, spec) = self.forgettable_copy(name).await?;
        let record = async {
            let uri = self.check_way(name, &spec.backend).await?;
            let found = self.ownership(&uri).await;
            found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })
        };
        let found = match accept_loss {
            // An image that is gone or silent keeps nobody from forgetting a copy of it.
            true => timeout(RECORD_WAIT_MAX, record).await.ok().and_then(|read| read.ok()?),
            false => record.await?,
        };
        let counts = found.filter(|found| self.owns(found) || self.has_copy_of(found));
        if let Some(found) = counts.as_ref().filter(|_| !accept_loss) {
            let why = self.cost_of_copy(name, id, found).await;
            return Err(VolumeError::NotForgotten { name: name.to_owned(), why });
        }
        self.shard.remove_volume(id, false).await.map_err(from_shard("remove", name))?;
        self.doors.close(name);
        let freed = match counts {
            Some(found) if self.owns(&found) => {
                Freed::OutOfReach("its record says that it is this cache's".into())
            }
            Some(found) => Freed::CopyGone(found.host),
            None => Freed::NotOurs,
        };
        match freed {
            Freed::NotOurs => info!("volume {name}: the copy of another host's is forgotten"),
            _ => warn!(
                "volume {name}: the copy of another host's is forgotten, which counted; {}",
                freed.text(&spec.backend)
            ),
        }
        let removed = Removed {
            name: name.to_owned(),
            backend: spec.backend,
            verified: false,
            direct_use: Vec::new(),
        };
        Ok((removed, freed))
    }

    /// What is lost with a copy that counts, and what to do instead.
    async fn cost_of_copy(&self, name: &str, id: VolumeId, found: &Ownership) -> String {
        let known = self.shard.status().await.ok().into_iter().flat_map(|status| status.volumes);
        let status = known.map(|volume| volume.status).find(|status| status.id == id);
        let bytes = status.map_or(0, |status| status.dirty_bytes + status.dirty_zero_bytes);
        let anyway = format!(
            "to forget it all the same: tidepool volume remove {name} --give-up --accept-loss"
        );
        match self.owns(found) {
            true => format!(
                "its record says that it is this host's, so that what is not in its image ({bytes} bytes at most) is lost with it; \
                 tidepool volume takeover {name} serves it; {anyway}"
            ),
            false => format!(
                "it is the second copy of a volume of {host}, and counts: what is not in its image ({bytes} bytes at most) is lost if \
                 {host} is lost, too; name another --peer there, or remove the volume there, first; {anyway}",
                host = found.host
            ),
        }
    }

    /// Forgets a copy of an image that was begun in a way that is not this host's, unless it
    /// counts. The record is read in this host's way, `uri`. The volume keeps its socket, since its
    /// copy begins anew.
    pub(in crate::service) async fn forget_old_copy(
        &self,
        name: &str,
        uri: &BackendUri,
    ) -> Result<(), VolumeError> {
        let _takeover = self.takeovers.of(name).await;
        let (id, spec) = self.known_copy("remove", name).await?;
        let found = self.ownership(uri).await;
        let found = found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })?;
        if let Some(found) = found.filter(|found| self.owns(found) || self.has_copy_of(found)) {
            let why = format!(
                "its record says by now that it counts, or is this host's; {} owns it",
                found.host
            );
            return Err(VolumeError::NotForgotten { name: name.to_owned(), why });
        }
        self.shard.remove_volume(id, false).await.map_err(from_shard("remove", name))?;
        info!(
            "volume {name}: its copy begins anew as {uri}, since another host had said {}",
            spec.backend
        );
        Ok(())
    }

    /// Images in the way that an operator of this host takes to them: those of its own volumes,
    /// also of those that are not open or only configured. The copies among the volumes that are
    /// `known` are others' where it is said which images those may name. Else each of them may be a
    /// volume of this host that is served elsewhere for a while, and is to come back.
    pub(in crate::service) fn own_images(
        &self,
        known: &[(VolumeId, VolumeSpec, VolumeState)],
    ) -> Vec<BackendUri> {
        let is_any = self.pairs.images.is_empty();
        let served = known.iter().filter(|(_, _, state)| is_any || *state != VolumeState::Replica);
        let served = served.filter_map(|(_, spec, _)| spec.backend.parse().ok());
        let wanted = self.wanted_images().into_iter().map(|(_, image)| image);
        served.chain(wanted).chain(lock(&self.configured).iter().cloned()).collect()
    }

    /// Looks whether this host takes the way to its image that was written down with a copy. What
    /// another daemon of this host has said is taken. Returns the image.
    ///
    /// # Errors
    /// It does not: that is for an operator to decide.
    pub(super) async fn check_way(
        &self,
        name: &str,
        recorded: &str,
    ) -> Result<BackendUri, VolumeError> {
        let uri: BackendUri = recorded.parse()?;
        if !self.pairs.takes_from_hosts {
            return Ok(uri);
        }
        let known = self.shard.volumes().await.map_err(from_shard("look at", name))?;
        let (own, listed) = (self.own_images(&known), self.images_of_others().to_vec());
        let refused = |uri: &BackendUri| {
            let source = BackendError::Unsupported { what: uri.to_string(), why: not_taken(uri) };
            VolumeError::Open { name: name.to_owned(), source }
        };
        if !is_way_of_this_host(&uri, &own, &listed) {
            return Err(refused(&uri));
        }
        if !matches!(uri, BackendUri::File { .. }) {
            return Ok(uri);
        }
        let look = move |uri: &BackendUri| Ok(check_place(uri, &own, &listed).is_ok());
        let is_in_place = self.ask_image(&uri, "looking where its image is", look).await;
        match is_in_place.map_err(|source| VolumeError::Open { name: name.to_owned(), source })? {
            true => Ok(uri),
            false => Err(refused(&uri)),
        }
    }

    /// A copy that is found at the start may be this host's volume already: a takeover was cut
    /// short then, or an owner that was getting from its peer what it had lost.
    pub(super) async fn finish_takeover(self: Arc<Self>, name: String, asked: Option<Wanted>) {
        let mut said = String::new();
        loop {
            let Err(error) = self.finish_if_owned(&name, asked.clone()).await else { return };
            let text = one_line(&error);
            if said != text {
                warn!("{text}");
            }
            // What is being opened is tried on and on there; else its record cannot be read for
            // now.
            let passes = matches!(error, VolumeError::Open { .. }) && !error.is_decision();
            if !passes || self.is_opening(&name) {
                return;
            }
            said = text;
            sleep(RECORD_PAUSE).await;
        }
    }

    async fn finish_if_owned(
        self: &Arc<Self>,
        name: &str,
        asked: Option<Wanted>,
    ) -> Result<(), VolumeError> {
        let (_, spec, uri, found) = self.copy("take over", name, &Prepared::default()).await?;
        if !found.is_some_and(|found| self.owns(&found)) {
            return Ok(());
        }
        let open = |source| VolumeError::Open { name: name.to_owned(), source };
        let prepared = self.prepared(&uri).await.map_err(open)?;
        let asked = asked.filter(|asked| asked.backend.to_string() == spec.backend);
        self.take_over_if(name, false, (prepared, asked), |_| Ok(())).await
    }

    /// A copy of another host's volume, its image, and the ownership record of that.
    async fn copy(
        &self,
        what: &'static str,
        name: &str,
        prepared: &Prepared,
    ) -> Result<(VolumeId, VolumeSpec, BackendUri, Option<Ownership>), VolumeError> {
        let (id, spec, uri) = self.copy_of(what, name).await?;
        let prepared = prepared.clone();
        let read = move |uri: &BackendUri| tidepool_backend::ownership_by(uri, &prepared);
        let found = self.ask_image(&uri, "reading its ownership record", read).await;
        let found = found.map_err(|source| VolumeError::Open { name: name.to_owned(), source })?;
        Ok((id, spec, uri, found))
    }

    /// A copy of another host's volume, and its image, if this host takes that way to it.
    async fn copy_of(
        &self,
        what: &'static str,
        name: &str,
    ) -> Result<(VolumeId, VolumeSpec, BackendUri), VolumeError> {
        let (id, spec) = self.known_copy(what, name).await?;
        let uri = self.check_way(name, &spec.backend).await?;
        Ok((id, spec, uri))
    }

    /// A copy of another host's volume, as it was written down.
    pub(super) async fn known_copy(
        &self,
        what: &'static str,
        name: &str,
    ) -> Result<(VolumeId, VolumeSpec), VolumeError> {
        self.known_if(what, name, |state| state == VolumeState::Replica).await
    }

    /// A copy that is to be forgotten, which may have failed. A volume of this host's own that has
    /// failed has an entry.
    async fn forgettable_copy(&self, name: &str) -> Result<(VolumeId, VolumeSpec), VolumeError> {
        let has_entry = lock(&self.entries).contains_key(name);
        let is_copy =
            |state| state == VolumeState::Replica || state == VolumeState::Failed && !has_entry;
        self.known_if("remove", name, is_copy).await
    }

    async fn known_if(
        &self,
        what: &'static str,
        name: &str,
        is_copy: impl Fn(VolumeState) -> bool,
    ) -> Result<(VolumeId, VolumeSpec), VolumeError> {
        let volumes = self.shard.volumes().await.map_err(from_shard(what, name))?;
        let (id, spec, state) = volumes
            .into_iter()
            .find(|(_, spec, _)| spec.name == name)
            .ok_or_else(|| VolumeError::Unknown(name.to_owned()))?;
        if !is_copy(state) {
            let why = "it is this host's own, not the copy of another host's".to_owned();
            return Err(VolumeError::Invalid { name: name.to_owned(), why });
        }
        Ok((id, spec))
    }
}

pub(super) fn internal(what: &str) -> BackendError {
    let why = "an internal error occurred".to_owned();
    BackendError::Unavailable { what: what.to_owned(), why }
}
