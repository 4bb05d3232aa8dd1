//! What is known about an image before it is taken, and which client holds its lock.

use super::address;
use super::forbid;
use super::guard;
use super::image::{
    FEATURE_DIRTY_CACHE, FEATURE_EXCLUSIVE_LOCK, FEATURE_MIGRATING, FEATURE_NON_PRIMARY, Facts,
    PERSISTENT_CACHE, plugins_of_pool,
};
use super::owner::OwnerObject;
use super::place::{Place, Site};
use super::pool::{LOCK_TAG_MANAGED, Locker};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{Continuity, ImageStamp, OwnerState, Ownership};
use serde::{Deserialize, Serialize};
use tidepool_engine::api::SECTOR_BYTES;
use uuid::Uuid;

/// Shortest time for which a former owner of an image is fenced, in nanoseconds.
pub const FENCE_NS_MIN: u64 = 3_600_000_000_000;
/// How long our own dead process is fenced, in seconds: it cannot come back.
pub(super) const FENCE_OWN_S: f64 = (FENCE_NS_MIN / 1_000_000_000) as f64;
/// How long a client that is not proven dead is fenced, in seconds. A paused machine that resumes
/// after its fence has expired would write over the new owner's data.
pub(super) const FENCE_FOREIGN_S: f64 = 365.0 * 86_400.0;

/// What identifies our own lock after a restart; see [`crate::Backend::attachment`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attachment {
    /// Address of the RADOS client.
    pub(super) client: String,
    /// Cookie of the exclusive lock.
    pub(super) cookie: String,
}

/// Address of the client in the attachment that a cache has kept. `None` for an attachment of
/// another backend or release: then only the record names the client.
fn attached_client(options: &OpenOptions) -> Option<String> {
    let attachment = serde_json::from_slice::<Attachment>(options.attachment.as_ref()?).ok()?;
    Some(attachment.client)
}

/// Everything about an image that decides whether it can be taken. Nothing was changed to find it
/// out.
pub(super) struct Survey {
    pub(super) facts: Facts,
    pub(super) header_version: u64,
    pub(super) locker: Option<Locker>,
    /// The tag of the lock, also while no client holds the lock.
    lock_tag: String,
    pub(super) owner: OwnerObject,
    pub(super) record: Option<Ownership>,
}

/// The holder of the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    Nobody,
    /// A client that this cache may take the lock from: a killed process of this cache, or the
    /// former owner's client, which is fenced whether it is alive or not.
    OurDead(Locker),
    /// A client that no longer watches the image. librbd would take its lock away, too.
    Gone(Locker),
    /// A client that is alive.
    Live(Locker),
    /// A lock that was made with `rbd lock add`.
    Manual(Locker),
}

impl Survey {
    pub(super) fn take(site: &Site) -> Result<Survey, BackendError> {
        let Site { place, pool, cluster } = site;
        let mut facts = site.facts()?;
        if facts.plugins.is_none() {
            let of_pool =
                plugins_of_pool(&cluster.libraries().rbd, &cluster.pool(&place.pool, "")?);
            facts.plugins = of_pool.map_err(site.failed("read the pool's settings"))?;
        }
        let header = facts.header();
        let version = pool.version(&header).map_err(site.failed("read the image's header"))?;
        let lock = pool.lock(&header).map_err(site.failed("read the image's lock"))?;
        let (locker, lock_tag) = lock;
        let (owner, record) = OwnerObject::read(&place.what, pool, &facts.owner())?;
        Ok(Survey { facts, header_version: version, locker, lock_tag, owner, record })
    }

    pub(super) fn guarded(&self) -> bool {
        self.facts.features & FEATURE_NON_PRIMARY != 0
    }

    /// Whether the guard is set and has kept other clients from writing. With journaling the bit
    /// may be left over from a moment only.
    fn guard_proves(&self) -> bool {
        self.guarded() && self.can_guard()
    }

    /// Sets the guard of an image of this cache that is half rolled back, if a kill has left the
    /// guard lifted: other clients must not use the image as if it were complete.
    pub(super) fn guard_half(&self, site: &Site, holder: &Holder, cache_uuid: Uuid) {
        let is_half = self.own_record(cache_uuid).is_some_and(|record| record.rollback.is_some());
        let is_ours = matches!(holder, Holder::Nobody | Holder::OurDead(_));
        if !is_half || !is_ours {
            return;
        }
        let (Site { place, pool, .. }, header) = (site, self.facts.header());
        let guarded = match self.can_guard() {
            true if self.guarded() => Ok(()),
            true => guard::set(pool, &header).map(drop),
            false => forbid::set(pool, &header).map(drop),
        };
        if let Err(error) = guarded {
            tracing::warn!(image = %place.what, %error, "the guard of the image, which is half rolled back, could not be set");
        }
    }

    /// The record, if it is this cache's.
    fn own_record(&self, cache_uuid: Uuid) -> Option<&Ownership> {
        self.record.as_ref().filter(|record| record.cache_uuid == cache_uuid)
    }

    /// Refuses an image that is not of a kind that can be cached.
    pub(super) fn check_kind(&self, place: &Place) -> Result<(), BackendError> {
        let unfit = |why: String| BackendError::Unsupported { what: place.what.clone(), why };
        let what = &place.what;
        if self.facts.features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(unfit(format!(
                "it has no exclusive lock; enable it: rbd feature enable {what} exclusive-lock"
            )));
        }
        if self.facts.grouped || self.facts.features & FEATURE_MIGRATING != 0 {
            return Err(place.gone_elsewhere());
        }
        if self.facts.features & FEATURE_DIRTY_CACHE != 0 {
            return Err(unfit(format!(
                "librbd's persistent cache on some host has data that the image lacks (feature dirty-cache): stop its VM there in order, \
                 or, on that host, rbd persistent-cache flush {what}"
            )));
        }
        let size = self.facts.size_bytes;
        if size == 0 {
            return Err(unfit(format!(
                "it is empty; give it a size first: rbd resize --size SIZE {what}"
            )));
        }
        if !size.is_multiple_of(SECTOR_BYTES as u64) {
            return Err(unfit(format!(
                "its size of {size} bytes is no multiple of {SECTOR_BYTES}; resize it first"
            )));
        }
        Ok(())
    }

    /// Why a rollback of a group's snapshot could bypass the cache: it changes every image of the
    /// snapshot, also images that have left the group. `None` if there is no such snapshot.
    fn group_snapshot(&self) -> Option<String> {
        let name = self.facts.of_group.as_ref()?;
        Some(format!(
            "its snapshot {name} belongs to a snapshot of a group, whose rollback would go past the cache; remove that first: \
             rbd group snap ls GROUP, then rbd group snap rm GROUP@SNAPSHOT"
        ))
    }

    /// Refuses an image that a group's rollback could change. An image for which this cache has
    /// dirty data is served all the same.
    pub(super) fn check_group_snapshots(
        &self,
        place: &Place,
        cache_uuid: Uuid,
    ) -> Result<(), BackendError> {
        let dirty =
            self.own_record(cache_uuid).is_some_and(|record| record.state != OwnerState::Clean);
        match self.group_snapshot().filter(|_| !dirty) {
            Some(why) => Err(BackendError::Unsupported { what: place.what.clone(), why }),
            None => Ok(()),
        }
    }

    /// Refuses an image of which librbd's persistent cache would hold data that no other host has.
    /// An image for which this cache has dirty data is served all the same: its settings cannot be
    /// changed meanwhile.
    pub(super) fn check_plugins(
        &self,
        place: &Place,
        cache_uuid: Uuid,
    ) -> Result<(), BackendError> {
        let dirty =
            self.own_record(cache_uuid).is_some_and(|record| record.state != OwnerState::Clean);
        match &self.facts.plugins {
            Some(plugins) if plugins.contains(PERSISTENT_CACHE) && !dirty => {
                Err(place.has_plugins())
            }
            _ => Ok(()),
        }
    }

    /// What the user of a host that caches the image should know about it, each with its subject.
    pub(super) fn notes(&self) -> Vec<(&'static str, String)> {
        let mut notes = Vec::new();
        if !self.can_guard() {
            let why = "journaling is on: others cannot change the image while a cache owns it, but they can write to it while its cache \
                       is stopped with dirty data, which is not drained over that; and rbd-mirror cannot begin a copy of it meanwhile";
            notes.push(("guard", why.to_owned()));
        }
        notes.extend(self.group_snapshot().map(|why| ("groups", why)));
        if self.facts.plugins.as_ref().is_some_and(|plugins| plugins.contains(PERSISTENT_CACHE)) {
            let why = "its settings have librbd keep data on this host (rbd_plugins with pwl_cache): what is drained may be in no other place; \
                       drain the volume, give the image back, and take the setting away";
            notes.push(("plugins", why.to_owned()));
        }
        if self.facts.mirrored_by_snapshots {
            let why = "it is mirrored by snapshots, which neither `rbd mirror image snapshot` nor Ceph's schedule can take of it while a \
                       cache owns it; take them with `tidepool volume snap mirror`";
            notes.push(("mirroring", why.to_owned()));
        }
        notes
    }

    /// Refuses to let this cache read the image if its newest data is in another cache.
    pub(super) fn check_reader(&self, place: &Place, cache_uuid: Uuid) -> Result<(), BackendError> {
        match &self.record {
            Some(record) => record.check_owner(&place.what, cache_uuid),
            None => Ok(()),
        }
    }

    /// Refuses a cache that may lack data that it once held of the image, and an image that is half
    /// rolled back.
    pub(super) fn check_whole(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        let Some(record) = &self.record else { return Ok(()) };
        record.check_rolled_back(&place.what, options)?;
        record.check_whole(&place.what, options)
    }

    /// Refuses a cache that may not own the image.
    pub(super) fn check_owner(&self, place: &Place, cache_uuid: Uuid) -> Result<(), BackendError> {
        self.check_reader(place, cache_uuid)?;
        // An attempt of this cache to open the image may have been cut short between the guard and
        // the record.
        let ours = |record: &Ownership| {
            record.state != OwnerState::Clean || !record.clients.claims.is_empty()
        };
        if !self.guarded() || self.own_record(cache_uuid).is_some_and(ours) {
            return Ok(());
        }
        let what = place.what.clone();
        let why = match self.record.as_ref().filter(|record| record.left_guard()) {
            Some(record) => format!(
                "cache {} on host {} has left its guard there, killed while it opened the image or gave it up; \
                 free it: tidepool recover URI --accept-loss",
                record.cache_uuid, record.host
            ),
            None => "it is not the primary copy (feature non-primary): promote it first (rbd mirror image promote), \
                     or find the cache that left it so"
                .into(),
        };
        Err(BackendError::Unsupported { what, why })
    }

    /// Addresses of clients of this cache, and of the owner from whom its image was taken over. The
    /// lock on the cache device proves that this cache's clients are dead; the former owner's are
    /// fenced.
    pub(super) fn own_clients(&self, options: &OpenOptions) -> Vec<String> {
        let mut clients: Vec<String> = attached_client(options).into_iter().collect();
        if let Some(record) = self.own_record(Uuid::from_bytes(options.cache_uuid)) {
            clients.extend(record.clients.named().cloned());
        }
        clients
    }

    /// Whether the holder of the lock is the client with which the cache had the image last,
    /// according to the cache's attachment.
    pub(super) fn was_attached(&self, options: &OpenOptions, locker: &Locker) -> bool {
        attached_client(options).is_some_and(|client| address::same(&client, &locker.address))
    }

    pub(super) fn holder(&self, options: &OpenOptions) -> Holder {
        let Some(locker) = self.locker.clone() else { return Holder::Nobody };
        if self.lock_tag != LOCK_TAG_MANAGED {
            return Holder::Manual(locker);
        }
        let watches =
            self.facts.watchers.iter().any(|watcher| address::same(watcher, &locker.address));
        let ours =
            self.own_clients(options).iter().any(|client| address::same(client, &locker.address));
        // The cache device may have come from another host, or two hosts may have the same name.
        // Then nothing is proven about a process on the other host that still watches the image.
        // The clients of an image that was taken over are fenced even if they are alive.
        let here = |record: &Ownership| record.is_of_this_boot() || record.taken_from.is_some();
        let here = self.record.as_ref().is_none_or(here);
        match (watches, ours) {
            (true, true) if !here => Holder::Live(locker),
            (_, true) => Holder::OurDead(locker),
            (true, false) => Holder::Live(locker),
            (false, false) => Holder::Gone(locker),
        }
    }

    /// How long a client that counts as this cache's own has to be fenced, in seconds.
    pub(super) fn own_fence_s(&self, cache_uuid: Uuid) -> f64 {
        // Only the lock on the cache device, in the boot that the record names, proves that a
        // process is dead.
        match self.own_record(cache_uuid) {
            Some(record) if record.is_of_this_boot() && record.taken_from.is_none() => FENCE_OWN_S,
            _ => FENCE_FOREIGN_S,
        }
    }

    /// Clients that have the image open for writing and do not know of a guard.
    fn strangers(&self, options: &OpenOptions) -> Vec<&str> {
        if self.guard_proves() {
            // A client that has opened the image since the guard was set sees it.
            return Vec::new();
        }
        let own = self.own_clients(options);
        let stranger = |watcher: &&str| !own.iter().any(|client| address::same(client, watcher));
        self.facts.watchers.iter().map(String::as_str).filter(stranger).collect()
    }

    /// Refuses an image that its owner still has open.
    pub(super) fn refuse_live(&self, place: &Place, owner: &Ownership) -> Result<(), BackendError> {
        let watches =
            |client: &&String| self.facts.watchers.iter().any(|w| address::same(w, client));
        let Some(client) = owner.clients.named().find(watches) else { return Ok(()) };
        let holder = format!(
            "cache {} on host {} has it open ({client}); remove the volume there first (if it has died, it is forgotten after 30 s)",
            owner.cache_uuid, owner.host
        );
        Err(BackendError::Locked { what: place.what.clone(), holder })
    }

    /// Refuses an image whose lock is held by a client that is alive, and an image that another
    /// client has open for writing: that client would take the lock as soon as it is free.
    pub(super) fn check_lock(
        &self,
        place: &Place,
        holder: &Holder,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        let what = place.what.clone();
        match holder {
            Holder::Live(locker) => {
                Err(BackendError::Locked { what, holder: self.live_holder(locker) })
            }
            Holder::Manual(locker) => {
                let Locker { client, cookie, address, .. } = locker;
                let holder = format!(
                    "{client} at {address} holds a lock made with `rbd lock add`; when it is no longer needed: \
                     rbd lock rm {what} '{cookie}' {client}"
                );
                Err(BackendError::Locked { what, holder })
            }
            Holder::Nobody | Holder::OurDead(_) | Holder::Gone(_) => {
                match &self.strangers(options)[..] {
                    [] => Ok(()),
                    strangers => {
                        let who = strangers.join(", ");
                        let holder = format!(
                            "open for writing by {who}; stop that client first (if it has died, it is forgotten after 30 s)"
                        );
                        Err(BackendError::Locked { what, holder })
                    }
                }
            }
        }
    }

    fn live_holder(&self, locker: &Locker) -> String {
        let of_record = |record: &&Ownership| {
            record
                .clients
                .owner
                .as_ref()
                .is_some_and(|client| address::same(client, &locker.address))
        };
        match self.record.as_ref().filter(of_record) {
            Some(record) => format!(
                "cache {} on host {} serves it ({} at {}); remove the volume there first (if it has died, it is forgotten after 30 s)",
                record.cache_uuid, record.host, locker.client, locker.address
            ),
            None => format!(
                "{} at {} holds its exclusive lock; stop that client (QEMU, rbd map, rbd-nbd) first",
                locker.client, locker.address
            ),
        }
    }

    /// What is known about writes of other clients since this cache had the image last.
    pub(super) fn continuity(&self, cache_uuid: Uuid, holder: &Holder) -> Continuity {
        if let Some(known) = Continuity::of_record(self.record.as_ref(), cache_uuid) {
            return known;
        }
        let Some(record) = &self.record else {
            return Continuity::unproven("the image has no ownership record");
        };
        if let Holder::Gone(locker) = holder {
            return Continuity::overwritten(format!("{} has taken the lock since", locker.client));
        }
        let unchanged = record.stamp == Some(ImageStamp::Header { version: self.header_version });
        // An attempt that was cut short has lifted the guard, and no client has taken the lock
        // since.
        let marked = self.locker.is_none() && self.lock_tag == guard::LIFTED_TAG;
        let clients = &record.clients;
        let untouched = marked || clients.lifted == Some(self.header_version);
        const CUT: &str = "this cache's last attempt to open the image was cut short";
        let (held, by_owner) = match holder {
            Holder::OurDead(locker) => {
                let owner = |client: &String| address::same(client, &locker.address);
                (
                    true,
                    !clients.claims.iter().any(owner) || clients.owner.as_ref().is_some_and(owner),
                )
            }
            _ => (false, false),
        };
        match record.state {
            OwnerState::Open if by_owner => Continuity::proven(match &record.taken_from {
                None => "this cache's lock is still in place".to_owned(),
                Some(host) => {
                    format!(
                        "the lock of host {host}, from which it is taken over, is still in place"
                    )
                }
            }),
            // A stopped owner has left the image in this state.
            OwnerState::Open if unchanged => Continuity::proven(
                "the image's header is as it was released by the owner from whom it is taken over",
            ),
            // The owner's own lock is gone, and a client of a later attempt has the lock. What
            // happened in between is not known.
            OwnerState::Open if held => Continuity::unproven(CUT),
            OwnerState::Open if self.guard_proves() => {
                Continuity::unproven("this cache's lock is no longer in place")
            }
            OwnerState::Open if untouched => Continuity::unproven(CUT),
            OwnerState::Open => Continuity::overwritten(
                "neither this cache's lock nor its guard is in place any more",
            ),
            _ if unchanged => Continuity::proven("the image's header is as this cache released it"),
            // After a kill between lock and record, it is not known what happened between release
            // and lock.
            _ if held || untouched => Continuity::unproven(CUT),
            OwnerState::Dirty if self.guard_proves() => Continuity::unproven(
                "the image's header has changed since this cache's release, under its guard",
            ),
            _ => {
                Continuity::overwritten("the image's header has changed since this cache's release")
            }
        }
    }

    /// Whether the guard can be used: with journaling, mirroring gives the same bit another
    /// meaning.
    pub(super) fn can_guard(&self) -> bool {
        self.facts.can_guard()
    }
}
