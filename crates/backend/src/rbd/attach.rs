//! Taking an image, with all steps until the image is ours.

use super::address;
use super::claim::Claim;
use super::fence::{self, Fences};
use super::image::{FEATURE_DIRTY_CACHE, FEATURE_MIGRATING, Facts, Image};
use super::owner::OwnerObject;
use super::peer;
use super::place::Site;
use super::point::{Point, reached};
use super::pool::IoCtx;
use super::spot::{DISTURBED, Spot, Start, Taken};
use super::survey::{Attachment, FENCE_FOREIGN_S, Holder, Survey};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{Continuity, OwnerState, Ownership};
use crate::redo;
use std::io;
use std::sync::Arc;
use uuid::Uuid;

/// An image that was taken.
pub(super) struct Attached {
    pub(super) image: Image,
    pub(super) facts: Facts,
    pub(super) owner: OwnerObject,
    pub(super) record: Ownership,
    pub(super) continuity: Continuity,
    pub(super) attachment: Attachment,
    pub(super) guarded: bool,
    /// What the user of the volume should know about the image.
    pub(super) notes: Vec<String>,
}

impl Attached {
    /// What the owner of the image needs from now on.
    pub(super) fn claim(&self, site: &Site) -> Claim {
        Claim {
            cluster: Arc::clone(&site.cluster),
            place: site.place.clone(),
            header: self.facts.header(),
            owner: self.facts.owner(),
            id: self.facts.id.clone(),
            address: self.attachment.client.clone(),
            record: self.record.clone(),
            guarded: self.guarded,
        }
    }
}

/// An image that the cache may have, and what is known about it before it is taken.
struct Examined {
    survey: Survey,
    holder: Holder,
    continuity: Continuity,
    /// Address of our own client.
    client: String,
    fences: Fences,
}

/// Takes the image for the cache of `options`, with a client that has an owner's rights.
pub(super) fn attach(site: &Site, options: &OpenOptions) -> Result<Attached, BackendError> {
    let Examined { mut survey, holder, continuity, client, fences } = examine(site, options)?;
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    reached(Point::Fencing)?;
    // The clients in a record that was taken over may be alive.
    fences.set_former(site)?;
    let listed = fences.others(survey.record.as_ref());
    let (before, claimed) = claim(&mut survey, &site.pool, cache_uuid, &client, &fences)?;
    reached(Point::Claimed)?;
    let version = fences.shut_out(site, &survey, &holder)?;
    if before.taken_from.is_some() {
        // The former owner may have committed more until it was fenced.
        check_cache(site, &survey, &before, options)?;
    }
    let guarded = survey.can_guard();
    let notes: Vec<String> = survey.notes().into_iter().map(|(_, note)| note).collect();
    for note in &notes {
        tracing::warn!(image = %site.place.what, "{note}");
    }
    let header = survey.facts.header();
    let spot = Spot { site, header: &header, client: &client, guarded };
    let before = before.without_fences(&listed, &fence::end_former_boots(site, &client, &listed));
    let start = if survey.guarded() { Start::Guarded } else { Start::Unguarded(version) };
    let taken = spot.take(start, &mut survey.owner, &claimed)?;
    match spot.settle(&taken, &mut survey, options, continuity, &before) {
        Ok((record, continuity)) => {
            let attachment = Attachment { client: client.clone(), cookie: taken.locker.cookie };
            let Survey { facts, owner, .. } = survey;
            let mut attached = Attached {
                image: taken.image,
                facts,
                owner,
                record,
                continuity,
                attachment,
                guarded,
                notes,
            };
            if let Some(snapshot) = &options.roll_back {
                attached.roll_back(&spot, snapshot, before.rollback.is_some() || before.hides)?;
            }
            Ok(attached)
        }
        Err(e) => {
            spot.step_back(&taken, &mut survey, &before);
            Err(e)
        }
    }
}

/// Makes all checks that need no lock, and plans whom to fence. Changes at most the record, of an
/// image that is taken over.
fn examine(site: &Site, options: &OpenOptions) -> Result<Examined, BackendError> {
    let place = &site.place;
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    let mut survey = Survey::take(site)?;
    survey.check_kind(place)?;
    survey.drop_unfit_claims(place);
    if options
        .roll_back
        .as_ref()
        .is_some_and(|snapshot| options.dirty || !Ownership::can_name(snapshot))
    {
        let why = "to be rolled back it must have everything in the image, and the snapshot a printable name";
        return Err(BackendError::Unsupported { what: place.what.clone(), why: why.into() });
    }
    if let Some(how) = &options.take_over {
        peer::take_first(&mut survey, site, how)?;
    }
    if let Some(record) = &survey.record {
        record.check_elsewhere(&place.what, options)?;
    }
    survey.check_owner(place, cache_uuid)?;
    survey.check_group_snapshots(place, cache_uuid)?;
    survey.check_plugins(place, cache_uuid)?;
    let holder = survey.holder(options);
    if let Err(e) = survey.check_whole(place, options) {
        survey.guard_half(site, &holder, cache_uuid);
        return Err(e);
    }
    survey.check_lock(place, &holder, options)?;
    redo::check_version(&place.what, &site.shelf(&survey.facts.id)?)?;
    if let Some(record) = &survey.record {
        if options.recover {
            survey.refuse_live(place, record)?;
        }
        record.check_known(&place.what, options)?;
        check_cache(site, &survey, record, options)?;
    }
    let continuity =
        survey.continuity(cache_uuid, &holder).of_generation(survey.record.as_ref(), options);
    continuity.check_dirty(&place.what, options)?;
    let own_address = site.cluster.address().map_err(site.failed("read the client's address"))?;
    let client = address::plain(&own_address);
    // Without the lock on the cache device nothing proves that its process is dead.
    let fence_s = if options.recover { FENCE_FOREIGN_S } else { survey.own_fence_s(cache_uuid) };
    let fences = Fences::of_open(place, &survey, &holder, options, fence_s)?;
    Ok(Examined { survey, holder, continuity, client, fences })
}

/// Writes into the record which client is about to take the lock. Returns the record as it was
/// before, and as it is now.
fn claim(
    survey: &mut Survey,
    pool: &IoCtx,
    cache_uuid: Uuid,
    client: &str,
    fences: &Fences,
) -> Result<(Ownership, Ownership), BackendError> {
    let before = match &survey.record {
        Some(record) => record.clone(),
        None => Ownership::new(0, cache_uuid, OwnerState::Clean),
    };
    let before = before.with_fences(&fences.listed());
    let mut record = before.renewed();
    if record.cache_uuid != cache_uuid {
        let clients = record.clients.kept_away();
        record = Ownership {
            clients,
            ..Ownership::new(before.generation, cache_uuid, OwnerState::Clean)
        };
    }
    // The claim of the client that holds the lock must stay in the record.
    let locks = |claim: &str| {
        survey.locker.as_ref().is_some_and(|locker| address::same(&locker.address, claim))
    };
    record.clients.claim(client, locks);
    survey.owner.swap(pool, &record)?;
    Ok((before, record))
}

impl Spot<'_> {
    /// With the lock taken: the last checks, and the record that makes the image ours.
    fn settle(
        &self,
        taken: &Taken,
        survey: &mut Survey,
        options: &OpenOptions,
        continuity: Continuity,
        before: &Ownership,
    ) -> Result<(Ownership, Continuity), BackendError> {
        let continuity = match taken.undisturbed {
            true => continuity,
            false => Continuity::overwritten(DISTURBED),
        };
        if let Err(e) = continuity.check_dirty(&self.site.place.what, options) {
            // The next attempt would not see any more that another client was there.
            let superseded = Some(DISTURBED.into());
            survey.owner.swap(&self.site.pool, &Ownership { superseded, ..before.renewed() })?;
            return Err(e);
        }
        // A client that had the image in between may have changed it.
        let found = taken.image.facts().map_err(self.failed("read the image's header"))?;
        if found.can_guard() != self.guarded {
            let holder = "another client has changed its features just now; try again".to_owned();
            return Err(BackendError::Locked { what: self.site.place.what.clone(), holder });
        }
        survey.facts.size_bytes = found.size_bytes;
        survey.facts.features |= found.features & (FEATURE_DIRTY_CACHE | FEATURE_MIGRATING);
        survey.facts.grouped |= found.grouped;
        survey.check_kind(&self.site.place)?;
        if self.guarded
            && let Err(e) = self.check_newcomers(&taken.image, survey, options)
        {
            if survey.guarded() || before.state != OwnerState::Clean {
                self.expose(taken, &mut survey.owner, before)?;
            }
            return Err(e);
        }
        let mut record = Ownership::taken(Some(before), options);
        record.clients.owner = Some(self.client.to_owned());
        if let Some(snapshot) = &options.roll_back {
            // A rollback that has begun can only be finished, so its snapshot has to exist.
            taken.image.snapshot_id(snapshot).map_err(|e| self.no_snapshot(snapshot, e))?;
            record = record.rolling_back(snapshot);
        }
        survey.owner.swap(&self.site.pool, &record)?;
        Ok((record, continuity))
    }

    /// Refuses the image if a client has opened it for writing just before the guard was set. Such
    /// a client does not know of the guard, and would write as soon as our lock is released.
    fn check_newcomers(
        &self,
        image: &Image,
        survey: &Survey,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        let own = survey.own_clients(options);
        // A client that had the image open before has seen the guard, or would have been refused.
        let known =
            own.iter().chain(&survey.facts.watchers).map(String::as_str).chain([self.client]);
        let watchers = image.watchers().map_err(self.failed("list who has the image open"))?;
        let newcomer =
            |watcher: &&String| !known.clone().any(|client| address::same(client, watcher));
        let newcomers: Vec<&str> = watchers.iter().filter(newcomer).map(String::as_str).collect();
        if newcomers.is_empty() {
            return Ok(());
        }
        let who = newcomers.join(", ");
        let holder = format!(
            "just opened for writing by {who}; stop that client, or try again when it has ended"
        );
        Err(BackendError::Locked { what: self.site.place.what.clone(), holder })
    }

    fn no_snapshot(&self, snapshot: &str, e: io::Error) -> BackendError {
        if e.raw_os_error() != Some(libc::ENOENT) {
            return self.failed("look for the snapshot")(e);
        }
        let why =
            format!("no such snapshot; see what there is: rbd snap ls {}", self.site.place.head);
        BackendError::NotFound { what: format!("{}@{snapshot}", self.site.place.what), why }
    }

    /// After a failure with the lock taken: restores the former state while the lock is still ours.
    fn step_back(&self, taken: &Taken, survey: &mut Survey, before: &Ownership) {
        match (survey.guarded(), before.state) {
            (true, _) if !self.guarded => self.guard_again(),
            (false, OwnerState::Clean) => self.free(),
            // No guard tells other clients that the newest data is in the cache, or a client was
            // there while it was lifted. From now on the header's version shows what other clients
            // do.
            (false, _) if !self.guarded || !taken.undisturbed => {
                self.expose_or_warn(taken, &mut survey.owner, before);
            }
            // The guard is set.
            _ => {}
        }
    }
}

/// Refuses a cache that has lost records which the image's redo names.
pub(super) fn check_cache(
    site: &Site,
    survey: &Survey,
    record: &Ownership,
    options: &OpenOptions,
) -> Result<(), BackendError> {
    let uuid = Uuid::from_bytes(options.cache_uuid);
    let Some(sequence) = options.sequence.filter(|_| record.cache_uuid == uuid) else {
        return Ok(());
    };
    redo::check_cache(&site.place.what, &site.shelf(&survey.facts.id)?, record, sequence)
}
