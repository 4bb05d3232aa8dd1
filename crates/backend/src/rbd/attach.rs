//! Taking an image: who has it, may we, and the steps until it is ours.

use super::address;
use super::cluster::{Cluster, IoCtx, LOCK_TAG_MANAGED, Locker};
use super::guard::{self, Claim};
use super::image::{FEATURE_EXCLUSIVE_LOCK, FEATURE_JOURNALING, FEATURE_NON_PRIMARY, Facts, Image};
use super::owner::OwnerObject;
use super::place::Place;
use crate::backend::OpenOptions;
use crate::error::BackendError;
use crate::record::{self, Continuity, ImageStamp, OwnerState, Ownership};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tidepool_engine::api::SECTOR_BYTES;
use uuid::Uuid;

/// How long the fence of our own dead process stands: it cannot come back.
const FENCE_OWN_S: f64 = 3600.0;
/// How long the fence of a client stands of which nobody knows that it is dead: a paused machine that
/// resumes after its fence has fallen would write over the new owner's data.
const FENCE_FOREIGN_S: f64 = 30.0 * 86_400.0;

/// What a restart finds its own lock by; see [`crate::Backend::attachment`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attachment {
    /// Address of the RADOS client.
    pub(super) client: String,
    /// Cookie of the exclusive lock.
    pub(super) cookie: String,
}

/// Everything about an image that decides whether it can be taken; nothing was changed to learn it.
pub(super) struct Survey {
    pub(super) facts: Facts,
    pub(super) header_version: u64,
    pub(super) locker: Option<Locker>,
    pub(super) owner: OwnerObject,
    pub(super) record: Option<Ownership>,
}

/// Who holds the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    Nobody,
    /// A killed process of this very cache.
    OurDead(Locker),
    /// A client that no longer watches the image, so librbd too would take its lock away.
    Gone(Locker),
    /// A client that is there.
    Live(Locker),
    /// Somebody's `rbd lock add`.
    Manual(Locker),
}

impl Survey {
    pub(super) fn take(place: &Place, cluster: &Cluster, pool: &IoCtx) -> Result<Survey, BackendError> {
        let facts = place.facts(cluster, pool)?;
        let header = facts.header();
        let version =
            pool.version(&header).map_err(|e| place.error(cluster, "read the image's header", e))?;
        let locker = pool.locker(&header).map_err(|e| place.error(cluster, "read the image's lock", e))?;
        let (owner, record) = OwnerObject::read(&place.what, pool, &facts.owner())?;
        Ok(Survey { facts, header_version: version, locker, owner, record })
    }

    pub(super) fn guarded(&self) -> bool {
        self.facts.features & FEATURE_NON_PRIMARY != 0
    }

    /// The record, if it is of this cache.
    fn own_record(&self, cache_uuid: Uuid) -> Option<&Ownership> {
        self.record.as_ref().filter(|record| record.cache_uuid == cache_uuid)
    }

    /// Whether the image is of a kind that can be cached.
    pub(super) fn check_kind(&self, place: &Place) -> Result<(), BackendError> {
        let unfit = |why: String| BackendError::Unsupported { what: place.what.clone(), why };
        if self.facts.features & FEATURE_EXCLUSIVE_LOCK == 0 {
            let what = &place.what;
            return Err(unfit(format!(
                "it has no exclusive lock; enable it: rbd feature enable {what} exclusive-lock"
            )));
        }
        if self.facts.size_bytes == 0 || !self.facts.size_bytes.is_multiple_of(SECTOR_BYTES as u64) {
            let size = self.facts.size_bytes;
            return Err(unfit(format!(
                "its size of {size} bytes is no multiple of {SECTOR_BYTES}; resize it first"
            )));
        }
        Ok(())
    }

    /// Whether this cache may own the image.
    pub(super) fn check_owner(&self, place: &Place, cache_uuid: Uuid) -> Result<(), BackendError> {
        if let Some(record) = &self.record {
            record.check_owner(&place.what, cache_uuid)?;
        }
        let ours = self.own_record(cache_uuid).is_some_and(|record| record.state != OwnerState::Clean);
        if self.guarded() && !ours {
            let why = "it is not the primary copy (feature non-primary): promote it first (rbd mirror image promote), \
                       or find the cache that left it so"
                .into();
            return Err(BackendError::Unsupported { what: place.what.clone(), why });
        }
        Ok(())
    }

    /// Addresses of clients of this cache. That they are dead follows from the lock on the cache device.
    fn own_clients(&self, options: &OpenOptions) -> Vec<String> {
        let attachment = options.attachment.as_ref();
        // An attachment of another backend or release is none: then the record has to do.
        let attachment = attachment.and_then(|bytes| serde_json::from_slice::<Attachment>(bytes).ok());
        let mut clients: Vec<String> = attachment.into_iter().map(|attachment| attachment.client).collect();
        if let Some(record) = self.own_record(Uuid::from_bytes(options.cache_uuid)) {
            clients.extend(record.client.iter().chain(&record.claim).cloned());
        }
        clients
    }

    pub(super) fn holder(&self, options: &OpenOptions) -> Holder {
        let Some(locker) = self.locker.clone() else { return Holder::Nobody };
        if locker.tag != LOCK_TAG_MANAGED {
            return Holder::Manual(locker);
        }
        let watches = self.facts.watchers.iter().any(|watcher| address::same(watcher, &locker.address));
        let ours = self.own_clients(options).iter().any(|client| address::same(client, &locker.address));
        // A cache device that has come from another host proves nothing about a process over there
        // that still watches the image.
        let elsewhere = self.record.as_ref().is_some_and(|record| record.host != record::host_name());
        match (watches, ours) {
            (true, true) if elsewhere => Holder::Live(locker),
            (_, true) => Holder::OurDead(locker),
            (true, false) => Holder::Live(locker),
            (false, false) => Holder::Gone(locker),
        }
    }

    /// Refuses an image whose lock is held by somebody who is there.
    pub(super) fn check_lock(&self, place: &Place, holder: &Holder) -> Result<(), BackendError> {
        let what = place.what.clone();
        match holder {
            Holder::Live(locker) => Err(BackendError::Locked { what, holder: self.live_holder(locker) }),
            Holder::Manual(locker) => {
                let Locker { client, cookie, address, .. } = locker;
                let holder = format!(
                    "{client} at {address} holds a lock made with `rbd lock add`; when it is no longer needed: \
                     rbd lock rm {what} '{cookie}' {client}"
                );
                Err(BackendError::Locked { what, holder })
            }
            Holder::Nobody | Holder::OurDead(_) | Holder::Gone(_) => Ok(()),
        }
    }

    fn live_holder(&self, locker: &Locker) -> String {
        let of_record = |record: &&Ownership| {
            record.client.as_ref().is_some_and(|client| address::same(client, &locker.address))
        };
        match self.record.as_ref().filter(of_record) {
            Some(record) => format!(
                "cache {} on host {} serves it ({} at {}); remove the volume there first",
                record.cache_uuid, record.host, locker.client, locker.address
            ),
            None => format!(
                "{} at {} holds its exclusive lock; stop that client (QEMU, rbd map, rbd-nbd) first",
                locker.client, locker.address
            ),
        }
    }

    /// What is known about writes of others since this cache had the image last.
    pub(super) fn continuity(&self, cache_uuid: Uuid, holder: &Holder) -> Continuity {
        let Some(record) = &self.record else {
            return Continuity::unproven("the image has no ownership record");
        };
        if record.cache_uuid != cache_uuid {
            return Continuity::unproven(format!("cache {} had the image last", record.cache_uuid));
        }
        if let Holder::Gone(locker) = holder {
            return Continuity::overwritten(format!("{} has taken the lock since", locker.client));
        }
        let held = matches!(holder, Holder::OurDead(_));
        let unchanged = record.stamp == Some(ImageStamp::Header { version: self.header_version });
        match record.state {
            OwnerState::Open if held => Continuity::proven("this cache's lock is still in place"),
            OwnerState::Open => Continuity::unproven("this cache's lock is no longer in place"),
            _ if unchanged => Continuity::proven("the image's header is as this cache released it"),
            // A kill between lock and record: what happened between release and lock is not known.
            _ if held => Continuity::unproven("this cache's last attempt to open the image was cut short"),
            OwnerState::Dirty if self.guarded() => Continuity::unproven(
                "the image's header has changed since this cache's release, under its guard",
            ),
            _ => Continuity::overwritten("the image's header has changed since this cache's release"),
        }
    }

    /// Whether the guard can be used: with journaling, mirroring gives the same bit another meaning.
    pub(super) fn can_guard(&self) -> bool {
        self.facts.features & FEATURE_JOURNALING == 0
    }
}

/// An image that has become ours.
pub(super) struct Attached {
    pub(super) image: Arc<Image>,
    pub(super) facts: Facts,
    pub(super) owner: OwnerObject,
    pub(super) record: Ownership,
    pub(super) continuity: Continuity,
    pub(super) attachment: Attachment,
    pub(super) guarded: bool,
}

/// Takes the image for the cache of `options`.
pub(super) fn attach(
    place: &Place,
    cluster: &Arc<Cluster>,
    pool: &IoCtx,
    options: &OpenOptions,
) -> Result<Attached, BackendError> {
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    let mut survey = Survey::take(place, cluster, pool)?;
    survey.check_kind(place)?;
    survey.check_owner(place, cache_uuid)?;
    let holder = survey.holder(options);
    survey.check_lock(place, &holder)?;
    cluster.check_blocklist_right()?;
    let continuity = survey.continuity(cache_uuid, &holder);
    let own_address = cluster.address().map_err(|e| place.error(cluster, "read the client's address", e))?;
    let client = address::plain(&own_address).to_owned();

    let before = claim(&mut survey, pool, cache_uuid, &client)?;
    fence(place, cluster, pool, &survey, &holder, &before)?;
    let lifted = survey.guarded();
    let taken = take_lock(place, cluster, pool, &survey, &client, continuity);
    let (image, locker, continuity) = match taken {
        Ok(taken) => taken,
        Err(e) => {
            if lifted && let Err(e) = guard::set(pool, &survey.facts.header(), true) {
                tracing::warn!(image = %place.what, error = %e, "the guard of the image could not be set again");
            }
            return Err(e);
        }
    };
    let guarded = survey.can_guard();
    if guarded {
        let set = guard::set(pool, &survey.facts.header(), true);
        set.map_err(|e| place.error(cluster, "guard the image", e))?;
    } else {
        tracing::warn!(image = %place.what, "journaling is on: the image is not guarded against other writers");
    }
    let generation = before.generation.saturating_add(1);
    let mut record = Ownership::new(generation, cache_uuid, OwnerState::Open);
    record.client = Some(client.clone());
    survey.owner.swap(pool, &record)?;
    let attachment = Attachment { client, cookie: locker.cookie };
    let Survey { facts, owner, .. } = survey;
    Ok(Attached { image, facts, owner, record, continuity, attachment, guarded })
}

/// Writes down which client is about to take the lock. Returns the record as it was before.
fn claim(
    survey: &mut Survey,
    pool: &IoCtx,
    cache_uuid: Uuid,
    client: &str,
) -> Result<Ownership, BackendError> {
    let before = match &survey.record {
        Some(record) => record.clone(),
        None => Ownership::new(0, cache_uuid, OwnerState::Clean),
    };
    let mut record = before.renewed();
    if record.cache_uuid != cache_uuid {
        record = Ownership::new(before.generation, cache_uuid, OwnerState::Clean);
    }
    record.claim = Some(client.to_owned());
    survey.owner.swap(pool, &record)?;
    Ok(before)
}

/// Makes sure that nothing arrives any more from whoever had the image, and removes a dead lock.
fn fence(
    place: &Place,
    cluster: &Cluster,
    pool: &IoCtx,
    survey: &Survey,
    holder: &Holder,
    before: &Ownership,
) -> Result<(), BackendError> {
    let locker = match holder {
        Holder::OurDead(locker) => Some((locker, FENCE_OWN_S)),
        Holder::Gone(locker) => Some((locker, FENCE_FOREIGN_S)),
        Holder::Nobody | Holder::Live(_) | Holder::Manual(_) => None,
    };
    // A dead process of ours that has lost its lock may still have requests under way.
    if let Some(client) = before.client.as_ref().filter(|_| before.state == OwnerState::Open)
        && !locker.is_some_and(|(locker, _)| address::same(client, &locker.address))
    {
        cluster.blocklist(address::plain(client), FENCE_OWN_S)?;
    }
    if let Some((locker, expire_s)) = locker {
        tracing::info!(image = %place.what, client = %locker.client, address = %locker.address, "fencing a dead owner");
        cluster.blocklist(address::plain(&locker.address), expire_s)?;
        let broken = pool.break_lock(&survey.facts.header(), locker);
        broken.map_err(|e| place.error(cluster, "break the dead owner's lock", e))?;
    }
    Ok(())
}

/// Lifts the guard, opens the image and takes its lock.
fn take_lock(
    place: &Place,
    cluster: &Cluster,
    pool: &IoCtx,
    survey: &Survey,
    client: &str,
    mut continuity: Continuity,
) -> Result<(Arc<Image>, Locker, Continuity), BackendError> {
    let header = survey.facts.header();
    let failed = |action| move |e| place.error(cluster, action, e);
    let version = if survey.guarded() {
        guard::set(pool, &header, false).map_err(failed("lift the guard of the image"))?
    } else {
        pool.version(&header).map_err(failed("read the image's header"))?
    };
    let image = Image::open(&cluster.libraries().rbd, pool, &place.image, false);
    let image = image.map_err(failed("open the image"))?;
    if pool.version(&header).map_err(failed("read the image's header"))? != version {
        // Somebody has used the moment between the guard and the lock.
        continuity =
            Continuity::overwritten("another client has changed the image while it was being opened");
    }
    let lost = |holder: Option<Locker>| {
        let holder = match holder {
            Some(Locker { client, address, .. }) => {
                format!("{client} at {address} was faster to take its lock; stop that client first")
            }
            None => "its exclusive lock could not be kept; try again".into(),
        };
        BackendError::Locked { what: place.what.clone(), holder }
    };
    if let Err(e) = image.lock() {
        return Err(match e.raw_os_error() {
            Some(libc::EROFS | libc::EBUSY | libc::EEXIST) => lost(pool.locker(&header).ok().flatten()),
            _ => place.error(cluster, "take the exclusive lock", e),
        });
    }
    match pool.locker(&header).map_err(failed("read the image's lock"))? {
        Some(locker) if address::same(&locker.address, client) => Ok((Arc::new(image), locker, continuity)),
        other => Err(lost(other)),
    }
}

impl Attached {
    /// What [`guard::regain`] works with.
    pub(super) fn claim(&self, place: &Place, cluster: &Arc<Cluster>) -> Claim {
        Claim {
            cluster: Arc::clone(cluster),
            image: Arc::clone(&self.image),
            place: place.clone(),
            header: self.facts.header(),
            owner: self.facts.owner(),
            address: self.attachment.client.clone(),
            record: self.record.clone(),
            guarded: self.guarded,
        }
    }
}
