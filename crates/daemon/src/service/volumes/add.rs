//! How a volume comes that the cache knows nothing of: its name and its image have to be free, and
//! its backend is opened.

use super::turns::Turn;
use super::{Entry, Facts, OPEN_WAIT_MAX, Volumes, from_shard, is_among, lock, sockets};
use crate::admin::AddVolume;
use crate::config::VolumeConfig;
use crate::service::VolumeError;
use crate::service::plan::{Wanted, drain_order};
use crate::shard::{Image, Refused};
use crate::units::Duration;
use crate::volume::is_parent_name;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{Layout, OpenOptions, Opened, Parent, Prepared};
use tidepool_engine::api::{DrainOrder, VolumeSpec};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::info;

/// How long a volume that is to be opened waits for what the others' file systems say about their
/// images.
const LOOK_WAIT_MAX: Time = Time::from_secs(5);

impl Volumes {
    /// What the cache holds of a volume that was left out, if this is its image.
    fn left_out(&self, wanted: &Wanted) -> Option<Arc<Entry>> {
        let entry = lock(&self.entries).get(&wanted.name).cloned()?;
        let left_out = lock(&entry.facts).left_out.is_some();
        (left_out && !entry.is_wish() && entry.backend == wanted.backend).then_some(entry)
    }

    /// Adds a volume; returns when it is being served. One of this name that is configured and
    /// waits for this image is tried at once, no matter which cache had the image last.
    ///
    /// # Errors
    /// Name or image are taken, or the backend or the shard refused. Nothing has changed then.
    pub async fn add(self: &Arc<Self>, wanted: Wanted) -> Result<(), VolumeError> {
        if let Some(entry) = self.left_out(&wanted) {
            return entry.serve_again().await;
        }
        match self.configured(&wanted.name) {
            Some(waiting) if waiting.backend == wanted.backend => {
                self.add_waiting(&waiting, wanted).await
            }
            Some(_) => Err(VolumeError::Exists(wanted.name)),
            None => self.add_prepared(wanted, Prepared::default()).await,
        }
    }

    /// Adds a volume with what was made ready for its image.
    pub(super) async fn add_prepared(
        self: &Arc<Self>,
        wanted: Wanted,
        prepared: Prepared,
    ) -> Result<(), VolumeError> {
        let entry = Entry::new(&wanted.name, wanted.backend.clone(), Facts::of_new(&wanted));
        let change = entry.begin_change()?;
        let replaced = self.claim(&entry)?;
        // Also when the caller goes away in the middle, everything is as it was.
        let mut claim = Claim { volumes: self, entry: Some(&entry), replaced };
        let (opened, turn) =
            self.open_new(&entry, &wanted, prepared, (Some(OPEN_WAIT_MAX), false)).await?;
        let parent = self.serve_new(&entry, &wanted, opened).await?;
        drop(turn);
        claim.entry = None;
        drop(change);
        self.share(&entry, parent).await;
        Ok(())
    }

    /// Opens the image of a new volume, within `patience`, and only if no other cache had it last
    /// with `unless_elsewhere`.
    pub(super) async fn open_new(
        &self,
        entry: &Arc<Entry>,
        wanted: &Wanted,
        prepared: Prepared,
        (patience, unless_elsewhere): (Option<Time>, bool),
    ) -> Result<(Opened, Turn), VolumeError> {
        let wait = patience.unwrap_or(Time::MAX);
        if timeout(wait, entry.clone().look()).await.is_err() {
            return Err(entry.silent(wait));
        }
        self.refuse_shared(entry).await?;
        let (cache_uuid, read_only) = (self.cache_uuid, wanted.read_only);
        let grouped =
            DrainOrder::from(drain_order(&wanted.backend, wanted.drain)) == DrainOrder::Grouped;
        let roll_back = lock(&entry.facts).rollback.attempt();
        let options = OpenOptions {
            cache_uuid,
            read_only,
            grouped,
            unless_elsewhere: unless_elsewhere && !read_only,
            prepared,
            roll_back,
            ..OpenOptions::default()
        };
        self.open(entry, options, patience).await
    }

    /// Has the shard serve a new volume; returns what its image has for a parent.
    pub(super) async fn serve_new(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        wanted: &Wanted,
        opened: Opened,
    ) -> Result<Option<Parent>, VolumeError> {
        let spec = VolumeSpec {
            name: wanted.name.clone(),
            backend: wanted.backend.to_string(),
            size_bytes: opened.backend.size_bytes(),
            mode: wanted.mode.into(),
            drain: drain_order(&wanted.backend, wanted.drain).into(),
            dirty_bytes_max: wanted.dirty_bytes_max,
            read_only: wanted.read_only || opened.backend.read_only(),
            generation: opened.generation,
            attachment: self.attachment(entry, wanted.accept_loss, &*opened.backend)?,
        };
        let (generation, read_only) = (spec.generation, spec.read_only);
        let Layout { own, parent } = opened.layout;
        let image = Image { backend: opened.backend, own };
        self.has_not_left(&wanted.name);
        match self.shard.add_volume(spec, image, self.pairs.alone_with(wanted.accept_loss)).await {
            Ok(id) => {
                {
                    let mut facts = lock(&entry.facts);
                    (facts.id, facts.snapshot, facts.wish) = (Some(id), opened.snapshot, None);
                    facts.notes = opened.notes;
                }
                self.replicate(entry, id, generation, read_only).await;
                entry.set_served();
                info!("volume {}: added, serving {}", entry.name, entry.backend);
                Ok(parent)
            }
            Err(Refused { error, backend }) => {
                self.put_back(entry, backend, true).await;
                Err(VolumeError::Shard { what: "add", name: wanted.name.clone(), source: error })
            }
        }
    }

    /// Enters a new volume, unless its name or image is taken. One that is only configured gives
    /// way: returns how it is configured.
    ///
    /// # Errors
    /// Which of the two is taken.
    pub(super) fn claim(&self, entry: &Arc<Entry>) -> Result<Option<Wanted>, VolumeError> {
        let mut entries = lock(&self.entries);
        if entries.get(&entry.name).is_some_and(|known| !known.is_wish()) {
            return Err(VolumeError::Exists(entry.name.clone()));
        }
        // The parent of clones may be served for itself, too.
        let counts = |other: &Entry| !is_parent_name(&other.name) && !is_parent_name(&entry.name);
        if let Some(other) = entries.values().find(|other| {
            other.name != entry.name && other.backend == entry.backend && counts(other)
        }) {
            let (name, other) = (entry.name.clone(), other.name.clone());
            return Err(VolumeError::SameImage { name, other, backend: entry.backend.to_string() });
        }
        let replaced = entries.insert(entry.name.clone(), entry.clone());
        Ok(replaced.and_then(|replaced| {
            replaced.withdraw();
            lock(&replaced.facts).wish.clone()
        }))
    }

    /// Refuses an image that another volume has, whatever it is called there. One that waits for
    /// its backend counts, too: the cache may hold newer data than the image. The volume itself has
    /// been looked at and entered before, so of two that come together at least one sees the other.
    pub(super) async fn refuse_shared(&self, entry: &Arc<Entry>) -> Result<(), VolumeError> {
        let others: Vec<Arc<Entry>> = lock(&self.entries)
            .values()
            .filter(|other| other.name != entry.name)
            .cloned()
            .collect();
        let mut looks = JoinSet::new();
        for other in others.iter().filter(|other| other.is_waiting()) {
            looks.spawn(other.clone().look());
        }
        // A file system that does not answer is not the one of this image, which has answered.
        let all = async { while looks.join_next().await.is_some() {} };
        let _ = timeout(LOOK_WAIT_MAX, all).await;
        let (own, is_known) = {
            let facts = lock(&entry.facts);
            (facts.image.clone(), facts.id.is_some())
        };
        let counts = |other: &Entry| {
            // What the cache knows does not give way to what is only configured.
            let yields = is_known && other.is_wish();
            !(yields || is_parent_name(&other.name) || is_parent_name(&entry.name))
        };
        let same =
            |other: &Entry| counts(other) && own.is_some() && lock(&other.facts).image == own;
        match others.iter().find(|other| same(other)) {
            None => Ok(()),
            Some(other) => Err(VolumeError::SameImage {
                name: entry.name.clone(),
                other: other.name.clone(),
                backend: other.backend.to_string(),
            }),
        }
    }

    /// Adds a volume as the admin API asks; `accept_loss` is the daemon's.
    ///
    /// # Errors
    /// As [`Volumes::add`], and what is wrong with the request.
    pub async fn add_asked(
        self: &Arc<Self>,
        asked: AddVolume,
        accept_loss: Option<Duration>,
    ) -> Result<(), VolumeError> {
        let config = VolumeConfig {
            mode: asked.mode,
            accept_loss: asked.accept_loss,
            dirty_max: asked.dirty_max,
            read_only: asked.read_only,
            drain: asked.drain,
            socket: asked.socket,
            ..VolumeConfig::new(asked.backend.parse()?)
        };
        crate::volume::check_name(&asked.name)?;
        let wanted =
            Wanted::new(&asked.name, config, accept_loss, self.drain, self.pairs.are_wanted())
                .map_err(|failure| VolumeError::Invalid {
                    name: asked.name,
                    why: failure.to_string(),
                })?;
        let (name, socket) = (wanted.name.clone(), wanted.socket.clone());
        let waits = self.configured(&name).is_some();
        if socket.is_some()
            && !waits
            && self.contains(&name).await.map_err(from_shard("add", &name))?
        {
            return Err(VolumeError::Exists(name));
        }
        // Before the volume: what is remembered of it has the socket.
        let is_new = match socket {
            Some(socket) => self.open_door(&name, socket).await.map_err(sockets::none_of(&name))?,
            None => false,
        };
        let added = self.add(wanted).await;
        match &added {
            Ok(()) => self.doors.serve(&self.shard),
            Err(_) if is_new => self.doors.close(&name),
            Err(_) => {}
        }
        added
    }
}

/// Takes a new volume's entry away unless it is being served.
struct Claim<'a> {
    volumes: &'a Arc<Volumes>,
    entry: Option<&'a Arc<Entry>>,
    /// What has given way, and is tried on if the new one does not come.
    replaced: Option<Wanted>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Some(entry) = self.entry else { return };
        {
            let mut entries = lock(&self.volumes.entries);
            // A takeover may have entered another one meanwhile.
            if !is_among(&entries, entry) {
                return;
            }
            entries.remove(&entry.name);
        }
        if let Some(wanted) = self.replaced.take() {
            // Its image was nobody's before.
            let _ = self.volumes.begin_add(wanted, false);
        }
    }
}
