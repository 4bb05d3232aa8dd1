//! Taking an image, with all steps until the image is ours, and giving it up.

use super::address;
use super::cluster::{Cluster, IoCtx, Locker};
use super::fence::{self, Fences};
use super::forbid;
use super::guard;
use super::image::{Access, FEATURE_DIRTY_CACHE, FEATURE_MIGRATING, FEATURE_NON_PRIMARY, Facts, Image};
use super::owner::OwnerObject;
use super::peer;
use super::place::Place;
use super::rights;
use super::survey::{Attachment, FENCE_FOREIGN_S, Holder, Survey};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{Continuity, OwnerState, Ownership};
use crate::redo;
use std::io;
use std::sync::Arc;
use tidepool_engine::api::IoError;
use uuid::Uuid;

/// Most attempts to allow changes of an image while other clients change its header.
const ALLOWS_MAX: u32 = 10;

/// Written into the record when other clients have used the moment in which the guard was lifted
/// for us.
const DISTURBED: &str = "another client has changed the image while it was being opened";

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

/// Takes the image for the cache of `options`, with a client that has an owner's rights.
pub(super) fn attach(
    place: &Place,
    cluster: &Arc<Cluster>,
    pool: &IoCtx,
    options: &OpenOptions,
) -> Result<Attached, BackendError> {
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    let mut survey = Survey::take(place, cluster, pool)?;
    survey.check_kind(place)?;
    survey.drop_unfit_claims(place);
    if options.roll_back.as_ref().is_some_and(|snapshot| options.dirty || !Ownership::can_name(snapshot)) {
        let why = "to be rolled back it must have everything in the image, and the snapshot a printable name";
        return Err(BackendError::Unsupported { what: place.what.clone(), why: why.into() });
    }
    if let Some(how) = &options.take_over {
        peer::take_first(&mut survey, place, cluster, pool, how)?;
    }
    if let Some(record) = &survey.record {
        record.check_elsewhere(&place.what, options)?;
    }
    survey.check_owner(place, cache_uuid)?;
    survey.check_group_snapshots(place, cache_uuid)?;
    survey.check_plugins(place, cache_uuid)?;
    let holder = survey.holder(options);
    if let Err(e) = survey.check_whole(place, options) {
        survey.guard_half(place, pool, &holder, cache_uuid);
        return Err(e);
    }
    survey.check_lock(place, &holder, options)?;
    redo::check_version(&place.what, &super::shelf(place, cluster, &survey.facts.id)?)?;
    if let Some(record) = &survey.record {
        if options.recover {
            refuse_live(place, &survey, record)?;
        }
        record.check_known(&place.what, options)?;
        check_cache(place, cluster, &survey, record, options)?;
    }
    let continuity = survey.continuity(cache_uuid, &holder).of_generation(survey.record.as_ref(), options);
    continuity.check_dirty(&place.what, options)?;
    let own_address = cluster.address().map_err(|e| place.error(cluster, "read the client's address", e))?;
    let client = address::plain(&own_address);
    // Without the lock on the cache device nothing proves that its process is dead.
    let fence_s = if options.recover { FENCE_FOREIGN_S } else { survey.own_fence_s(cache_uuid) };
    let fences = Fences::plan(place, &survey, &holder, options, fence_s, false)?;

    reached(Point::Fencing)?;
    // The clients in a record that was taken over may be alive.
    fences.set_former(place, cluster)?;
    let listed = fences.others(survey.record.as_ref());
    let (before, claimed) = claim(&mut survey, pool, cache_uuid, &client, &fences)?;
    reached(Point::Claimed)?;
    let version = fence(place, cluster, pool, &survey, &holder, &fences)?;
    if before.taken_from.is_some() {
        // The former owner may have committed more until it was fenced.
        check_cache(place, cluster, &survey, &before, options)?;
    }
    let guarded = survey.can_guard();
    let notes: Vec<String> = survey.notes().into_iter().map(|(_, note)| note).collect();
    for note in &notes {
        tracing::warn!(image = %place.what, "{note}");
    }
    let header = survey.facts.header();
    let spot = Spot { place, cluster, pool, header: &header, client: &client };
    let before = before.without_fences(&listed, &fence::end_former_boots(place, cluster, &client, &listed));
    let start = if survey.guarded() { Start::Guarded } else { Start::Unguarded(version) };
    let taken = spot.take(start, guarded, &mut survey.owner, &claimed)?;
    match spot.settle(&taken, guarded, &mut survey, options, continuity, &before) {
        Ok((record, continuity)) => {
            let attachment = Attachment { client: client.clone(), cookie: taken.locker.cookie };
            let Survey { facts, owner, .. } = survey;
            let mut attached =
                Attached { image: taken.image, facts, owner, record, continuity, attachment, guarded, notes };
            if let Some(snapshot) = &options.roll_back {
                attached.roll_back(&spot, snapshot, before.rollback.is_some() || before.hides)?;
            }
            Ok(attached)
        }
        Err(e) => {
            // Restores the former state while the lock is still ours.
            match (survey.guarded(), before.state) {
                (true, _) if !guarded => spot.guard_again(),
                (false, OwnerState::Clean) => spot.free(),
                // No guard tells other clients that the newest data is in the cache, or a client
                // was there while it was lifted. From now on the header's version shows what other
                // clients do.
                (false, _) if !guarded || !taken.undisturbed => {
                    spot.expose_or_warn(&taken, &mut survey.owner, &before);
                }
                // The guard is set.
                _ => {}
            }
            Err(e)
        }
    }
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
        record = Ownership { clients, ..Ownership::new(before.generation, cache_uuid, OwnerState::Clean) };
    }
    // The claim of the client that holds the lock must stay in the record.
    let locks =
        |claim: &str| survey.locker.as_ref().is_some_and(|locker| address::same(&locker.address, claim));
    record.clients.claim(client, locks);
    survey.owner.swap(pool, &record)?;
    Ok((before, record))
}

/// Makes sure that nothing arrives any more from clients that had the image, and removes the lock
/// of a dead client. Returns the version that the image's header has if no other client has changed
/// it since the survey.
fn fence(
    place: &Place,
    cluster: &Cluster,
    pool: &IoCtx,
    survey: &Survey,
    holder: &Holder,
    fences: &Fences,
) -> Result<u64, BackendError> {
    // A dead process of ours that has lost its lock may still have requests in flight, too.
    fences.set_dead(place, cluster)?;
    let mut version = survey.header_version;
    if let Holder::OurDead(locker) | Holder::Gone(locker) = holder {
        tracing::info!(image = %place.what, client = %locker.client, address = %locker.address, "a dead owner is fenced");
        let broken = pool.break_lock(&survey.facts.header(), locker);
        let broken = broken.map_err(|e| place.error(cluster, "break the dead owner's lock", e))?;
        // If there was no lock to break, another client was faster. Then the header is not as the
        // survey saw it.
        version = broken.unwrap_or(version);
    }
    Ok(version)
}

/// Everything that is needed to take an image's lock, and to change the image.
pub(super) struct Spot<'a> {
    pub(super) place: &'a Place,
    pub(super) cluster: &'a Arc<Cluster>,
    pub(super) pool: &'a IoCtx,
    pub(super) header: &'a str,
    /// Address of our own client.
    pub(super) client: &'a str,
}

/// The state of the image in which its lock is to be taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The guard is set and has to be lifted for a moment.
    Guarded,
    /// The guard is not set. As long as the header has this version, no other client has written
    /// since that version was read.
    Unguarded(u64),
}

/// What an attempt to take the lock has done so far, also when the attempt fails.
#[derive(Default)]
struct Progress {
    /// We have lifted a guard that is ours.
    lifted: bool,
    /// Another client has taken the lock or changed the image since its guard was lifted.
    disturbed: bool,
    /// Changes of the image were forbidden, and we have allowed them.
    allowed: bool,
}

/// An open image whose lock is ours.
struct Taken {
    image: Image,
    locker: Locker,
    /// No other client has changed the image between the lifting of its guard and its opening.
    undisturbed: bool,
}

impl Spot<'_> {
    pub(super) fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> BackendError {
        move |e| self.place.error(self.cluster, action, e)
    }

    /// Lifts the guard if there is one, opens the image, takes its lock, and sets the guard. With
    /// `guarded_after` false, it sets only the guard's keys and forbids changes of the image.
    /// `record` is what `owner` contains.
    fn take(
        &self,
        start: Start,
        guarded_after: bool,
        owner: &mut OwnerObject,
        record: &Ownership,
    ) -> Result<Taken, BackendError> {
        let mut progress = Progress::default();
        let taken = match self.lift_and_lock(start, owner, record, &mut progress) {
            Ok(taken) => taken,
            Err(e) => {
                if progress.allowed && !guarded_after {
                    self.forbid_again();
                }
                // A guard that another client has set since then is not ours.
                if progress.lifted {
                    self.relent(owner, record, progress.disturbed);
                }
                return Err(e);
            }
        };
        if !taken.undisturbed && record.state != OwnerState::Clean {
            // The guard that is set now will look as if it had been set all the time.
            let superseded = Some(DISTURBED.into());
            if let Err(e) = owner.swap(self.pool, &Ownership { superseded, ..record.renewed() }) {
                // The guard stays lifted, and proves nothing in this state.
                tracing::warn!(image = %self.place.what, "{DISTURBED}");
                return Err(e);
            }
        }
        let guard = || {
            reached(Point::Locked)?;
            let guarded = match guarded_after {
                true => guard::set(self.pool, self.header).map(drop),
                false => guard::reserve(self.pool, self.header).and_then(|()| self.forbid(&taken.image)),
            };
            guarded.map_err(|e| match e.raw_os_error() {
                Some(libc::ECANCELED) => self.place.gone_elsewhere(),
                _ => self.failed("guard the image")(e),
            })
        };
        if let Err(e) = guard() {
            if progress.allowed && !guarded_after {
                self.forbid_again();
            }
            match progress.lifted || record.state != OwnerState::Clean {
                // The missing guard must not look as if another client had removed it.
                true => self.expose_or_warn(&taken, owner, record),
                false => self.free(),
            }
            return Err(e);
        }
        reached(Point::Guarded)?;
        Ok(taken)
    }

    /// After a failure with the guard lifted: sets the guard again. If `disturbed`, first records
    /// that another client has used the moment.
    fn relent(&self, owner: &mut OwnerObject, record: &Ownership, disturbed: bool) {
        if disturbed {
            let superseded = Some(DISTURBED.into());
            if let Err(e) = owner.swap(self.pool, &Ownership { superseded, ..record.renewed() }) {
                tracing::warn!("{e}");
                // The guard stays lifted: then the header's version shows the next attempt that
                // another client was there.
                return;
            }
        }
        self.guard_again();
    }

    /// After a failure: sets the guard as it was, if the cluster still lets us.
    fn guard_again(&self) {
        if let Err(e) = guard::set(self.pool, self.header) {
            tracing::warn!(image = %self.place.what, error = %e, "the guard of the image could not be restored");
        }
    }

    /// After a failure: forbids changes again, if the cluster still lets us.
    fn forbid_again(&self) {
        if let Err(e) = forbid::set(self.pool, self.header) {
            tracing::warn!(image = %self.place.what, error = %e, "changes of the image could not be forbidden again");
        }
    }

    /// After a failure: removes the guard, which was not there before, if the cluster still lets
    /// us.
    fn free(&self) {
        let allowed = forbid::lift(self.pool, self.header, None);
        if let Err(e) = allowed.and_then(|_| guard::free(self.pool, self.header)) {
            tracing::warn!(image = %self.place.what, error = %e, "the guard of the image could not be taken away");
        }
    }

    /// Lifts the guard. Returns the header's version after that.
    fn lift(
        &self,
        owner: &mut OwnerObject,
        record: &Ownership,
        progress: &mut Progress,
    ) -> Result<u64, BackendError> {
        progress.lifted = true;
        let version =
            guard::lift(self.pool, self.header, None).map_err(self.failed("lift the guard of the image"))?;
        reached(Point::Bare)?;
        // After a kill before the lock is ours, it must not look as if another client had removed
        // the guard.
        let lifted = record.renewed().with_lifted(Some(version));
        if let Err(e) = owner.swap(self.pool, &lifted) {
            // The client that has changed the record since then decides about the guard.
            progress.lifted = !matches!(e, BackendError::Locked { .. });
            return Err(e);
        }
        reached(Point::Lifted)?;
        Ok(version)
    }

    /// Allows changes of the image if they are forbidden, before its lock is taken; see [`forbid`].
    /// Returns the header's version after that. If another client has changed the header meanwhile,
    /// returns `version`, which the header then no longer has.
    fn allow(&self, version: u64, progress: &mut Progress) -> Result<u64, BackendError> {
        let mut expected = version;
        for _ in 0..ALLOWS_MAX {
            // After a kill before the lock is ours, it must not look as if another client had
            // changed the header.
            match forbid::lift_and_mark(self.pool, self.header, expected) {
                Ok(None) => return Ok(version),
                Ok(Some(after)) => {
                    progress.allowed = true;
                    return Ok(if expected == version { after } else { version });
                }
                Err(e) if matches!(e.raw_os_error(), Some(libc::ERANGE | libc::EOVERFLOW | libc::EBUSY)) => {}
                Err(e) => return Err(self.failed("allow changes of the image")(e)),
            }
            // A client that has taken the lock since then has forbidden changes itself. They are
            // not ours to allow.
            expected = self.pool.version(self.header).map_err(self.failed("read the image's header"))?;
            if let Some(locker) =
                self.pool.locker(self.header).map_err(self.failed("read the image's lock"))?
            {
                return Err(self.lost(Some(locker)));
            }
        }
        Err(self.failed("allow changes of the image")(io::Error::from_raw_os_error(libc::EAGAIN)))
    }

    fn lift_and_lock(
        &self,
        start: Start,
        owner: &mut OwnerObject,
        record: &Ownership,
        progress: &mut Progress,
    ) -> Result<Taken, BackendError> {
        let read_header = "read the image's header";
        let version = match start {
            Start::Guarded => self.lift(owner, record, progress)?,
            Start::Unguarded(version) => version,
        };
        let version = self.allow(version, progress)?;
        reached(Point::Permitted)?;
        let image = Image::open(&self.cluster.libraries().rbd, self.pool, &self.place.image, Access::Write);
        let image = image.map_err(self.failed("open the image"))?;
        let undisturbed = self.pool.version(self.header).map_err(self.failed(read_header))? == version;
        progress.disturbed = !undisturbed;
        let ours = |locker: &Locker| address::same(&locker.address, self.client);
        if let Err(e) = image.lock() {
            let locker = self.pool.locker(self.header).ok().flatten();
            let taken = locker.as_ref().is_some_and(|locker| !ours(locker));
            progress.disturbed |= taken;
            return Err(match e.raw_os_error() {
                // librbd returns EINVAL for a handle that sees the guard of another owner.
                Some(libc::EROFS | libc::EBUSY | libc::EEXIST) => self.lost(locker),
                Some(libc::EINVAL) if taken => self.lost(locker),
                _ => self.place.error(self.cluster, "take the exclusive lock", e),
            });
        }
        match self.pool.locker(self.header).map_err(self.failed("read the image's lock"))? {
            Some(locker) if ours(&locker) => Ok(Taken { image, locker, undisturbed }),
            other => {
                progress.disturbed |= other.is_some();
                Err(self.lost(other))
            }
        }
    }

    /// With the lock taken: the last checks, and the record that makes the image ours.
    fn settle(
        &self,
        taken: &Taken,
        guarded: bool,
        survey: &mut Survey,
        options: &OpenOptions,
        continuity: Continuity,
        before: &Ownership,
    ) -> Result<(Ownership, Continuity), BackendError> {
        let continuity = match taken.undisturbed {
            true => continuity,
            false => Continuity::overwritten(DISTURBED),
        };
        if let Err(e) = continuity.check_dirty(&self.place.what, options) {
            // The next attempt would not see any more that another client was there.
            let superseded = Some(DISTURBED.into());
            survey.owner.swap(self.pool, &Ownership { superseded, ..before.renewed() })?;
            return Err(e);
        }
        // A client that had the image in between may have changed it.
        let found = taken.image.facts().map_err(self.failed("read the image's header"))?;
        if found.can_guard() != guarded {
            let holder = "another client has changed its features just now; try again".to_owned();
            return Err(BackendError::Locked { what: self.place.what.clone(), holder });
        }
        survey.facts.size_bytes = found.size_bytes;
        survey.facts.features |= found.features & (FEATURE_DIRTY_CACHE | FEATURE_MIGRATING);
        survey.facts.grouped |= found.grouped;
        survey.check_kind(self.place)?;
        if guarded && let Err(e) = self.check_newcomers(&taken.image, survey, options) {
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
        survey.owner.swap(self.pool, &record)?;
        Ok((record, continuity))
    }

    /// Releases the lock with the guard lifted. The guard was lifted for a moment, or a client has
    /// not seen it. So the guard proves nothing any more, and the header's version is the proof.
    fn expose(&self, taken: &Taken, owner: &mut OwnerObject, before: &Ownership) -> Result<(), BackendError> {
        if before.rollback.is_some() {
            // The guard is no proof here, but it keeps other clients from an image that is half
            // rolled back.
            return Ok(());
        }
        let released = self.pool.break_lock(self.header, &taken.locker);
        let released = released.map_err(self.failed("release the lock"))?;
        let lifted = match released.map(|version| guard::lift(self.pool, self.header, Some(version))) {
            Some(Ok(version)) => Some(version),
            Some(Err(e)) if !matches!(e.raw_os_error(), Some(libc::ERANGE | libc::EOVERFLOW)) => {
                return Err(self.failed("lift the guard of the image")(e));
            }
            // Another client was faster.
            Some(Err(_)) | None => None,
        };
        let disturbed = lifted.is_none() || !taken.undisturbed;
        let superseded = disturbed.then(|| DISTURBED.to_owned()).or_else(|| before.superseded.clone());
        owner.swap(self.pool, &Ownership { superseded, ..before.renewed() }.with_lifted(lifted))
    }

    fn expose_or_warn(&self, taken: &Taken, owner: &mut OwnerObject, before: &Ownership) {
        if let Err(e) = self.expose(taken, owner, before) {
            tracing::warn!("{e}");
        }
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
        let known = own.iter().chain(&survey.facts.watchers).map(String::as_str).chain([self.client]);
        let watchers = image.watchers().map_err(self.failed("list who has the image open"))?;
        let newcomer = |watcher: &&String| !known.clone().any(|client| address::same(client, watcher));
        let newcomers: Vec<&str> = watchers.iter().filter(newcomer).map(String::as_str).collect();
        if newcomers.is_empty() {
            return Ok(());
        }
        let who = newcomers.join(", ");
        let holder =
            format!("just opened for writing by {who}; stop that client, or try again when it has ended");
        Err(BackendError::Locked { what: self.place.what.clone(), holder })
    }

    fn no_snapshot(&self, snapshot: &str, e: io::Error) -> BackendError {
        if e.raw_os_error() != Some(libc::ENOENT) {
            return self.failed("look for the snapshot")(e);
        }
        let why = format!("no such snapshot; see what there is: rbd snap ls {}", self.place.head);
        BackendError::NotFound { what: format!("{}@{snapshot}", self.place.what), why }
    }

    fn lost(&self, holder: Option<Locker>) -> BackendError {
        let holder = match holder {
            Some(Locker { client, address, .. }) => {
                format!("{client} at {address} was faster to take its lock; stop that client first")
            }
            None => "its exclusive lock could not be kept; try again".into(),
        };
        BackendError::Locked { what: self.place.what.clone(), holder }
    }
}

/// Refuses a cache that has lost records which the image's redo names.
pub(super) fn check_cache(
    place: &Place,
    cluster: &Arc<Cluster>,
    survey: &Survey,
    record: &Ownership,
    options: &OpenOptions,
) -> Result<(), BackendError> {
    let uuid = Uuid::from_bytes(options.cache_uuid);
    let Some(sequence) = options.sequence.filter(|_| record.cache_uuid == uuid) else { return Ok(()) };
    let shelf = super::shelf(place, cluster, &survey.facts.id)?;
    redo::check_cache(&place.what, &shelf, record, sequence)
}

/// Refuses an image that its owner or another client still has open or locked.
pub(super) fn check_abandoned(place: &Place, survey: &Survey) -> Result<(), BackendError> {
    let Some(record) = survey.record.as_ref().filter(|record| record.state != OwnerState::Clean) else {
        return Ok(());
    };
    refuse_live(place, survey, record)?;
    survey.check_lock(place, &survey.holder(&OpenOptions::default()), &OpenOptions::default())
}

/// Refuses an image that its owner still has open.
fn refuse_live(place: &Place, survey: &Survey, owner: &Ownership) -> Result<(), BackendError> {
    let watches = |client: &&String| survey.facts.watchers.iter().any(|w| address::same(w, client));
    let Some(client) = owner.clients.named().find(watches) else { return Ok(()) };
    let holder = format!(
        "cache {} on host {} has it open ({client}); remove the volume there first (if it has died, it is forgotten after 30 s)",
        owner.cache_uuid, owner.host
    );
    Err(BackendError::Locked { what: place.what.clone(), holder })
}

/// Gives up what a lost cache holds; see [`crate::abandon`].
pub(super) fn abandon(
    place: &Place,
    cluster: &Arc<Cluster>,
    pool: &IoCtx,
) -> Result<Option<Ownership>, BackendError> {
    rights::check(place, cluster, pool, false)?;
    let mut survey = Survey::take(place, cluster, pool)?;
    survey.drop_unfit_claims(place);
    // Without the uuid of a cache, no process counts as dead: a client that watches the image
    // counts as alive.
    let holder = survey.holder(&OpenOptions::default());
    let unlocked = survey.check_lock(place, &holder, &OpenOptions::default());
    // What an earlier attempt to open the image, or to give it up, has left when it was killed.
    let is_left = survey.guarded() || survey.facts.forbidden;
    let left = |record: &Ownership| {
        record.state != OwnerState::Clean
            || record.left_guard() && (is_left || !record.clients.claims.is_empty())
    };
    let Some(before) = survey.record.clone().filter(left) else {
        // An older release does not know these parts of the guard, and has left them.
        if survey.facts.forbidden || unlocked.is_ok() {
            unlocked?;
            // This fails if another client has changed the header since the survey.
            allow(pool, &survey.facts, Some(survey.header_version))
                .and_then(|()| guard::unreserve(pool, &survey.facts.header()))
                .map_err(|e| place.error(cluster, "take away the guard of the image", e))?;
        }
        return Ok(None);
    };
    unlocked?;
    refuse_live(place, &survey, &before)?;
    let shelf = super::shelf(place, cluster, &survey.facts.id)?;
    redo::check_version(&place.what, &shelf)?;
    // The owner is not proven dead, so its fence lasts as long as that of a foreign client.
    let fences = Fences::plan(place, &survey, &holder, &OpenOptions::default(), FENCE_FOREIGN_S, true)?;
    let before = before.with_fences(&fences.listed());
    // The fences are listed before they are set, so that a kill leaves no fence that no record
    // lists.
    survey.owner.swap(pool, &before)?;
    fences.set_former(place, cluster)?;
    fence(place, cluster, pool, &survey, &holder, &fences)?;
    // The record is written first: an owner that comes back in between must not find its guard
    // gone. A kill in between leaves a record that lets the next attempt lift the guard.
    survey.owner.swap(pool, &before.abandoned())?;
    redo::clear(&place.what, &shelf, before.generation)?;
    reached(Point::Abandoned)?;
    allow(pool, &survey.facts, None)
        .and_then(|()| guard::free(pool, &survey.facts.header()))
        .map_err(|e| place.error(cluster, "lift the guard of the image", e))?;
    Ok(Some(before))
}

/// Allows changes of an image if a cache has forbidden them and the header still has this version
/// (`None`: any).
fn allow(pool: &IoCtx, facts: &Facts, expected: Option<u64>) -> io::Result<()> {
    if facts.forbidden { forbid::lift(pool, &facts.header(), expected).map(drop) } else { Ok(()) }
}

/// What [`retake`], a change of the image or its record, and a release need.
#[derive(Clone)]
pub(super) struct Claim {
    pub(super) cluster: Arc<Cluster>,
    pub(super) place: Place,
    pub(super) header: String,
    pub(super) owner: String,
    /// The image's id.
    pub(super) id: String,
    /// Address of our client.
    pub(super) address: String,
    pub(super) record: Ownership,
    /// The guard's feature bit is in use.
    pub(super) guarded: bool,
}

impl Attached {
    pub(super) fn claim(&self, place: &Place, cluster: &Arc<Cluster>) -> Claim {
        Claim {
            cluster: Arc::clone(cluster),
            place: place.clone(),
            header: self.facts.header(),
            owner: self.facts.owner(),
            id: self.facts.id.clone(),
            address: self.attachment.client.clone(),
            record: self.record.clone(),
            guarded: self.guarded,
        }
    }
}

/// The outcome of an attempt to replace a handle.
pub(super) struct Retaken {
    pub(super) image: Result<Image, Failed>,
    /// The record's object, if the attempt has read or written it.
    pub(super) owner: Option<OwnerObject>,
}

impl Retaken {
    /// The outcome of an attempt that was not made.
    pub(super) fn failed(errno: i32) -> Retaken {
        Retaken { image: Err(Failed::For(IoError::Errno(errno))), owner: None }
    }
}

/// Why a handle was not replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failed {
    /// A further attempt may succeed.
    Yet(IoError),
    /// The transfers that wait for the new handle fail.
    For(IoError),
}

/// Replaces a handle that has turned read-only (see [`guard`]) by a new one, if the image is still
/// ours.
///
/// The lock proves nothing here: librbd itself releases it, and takes it again, when its watch was
/// lost. The guard proves that no other client has written, because it was set all the time. Only
/// the opening itself must not see the guard; afterwards we check whether another client has used
/// that moment.
pub(super) fn retake(claim: &Claim, old: Option<Arc<Image>>) -> Retaken {
    let mut owner = None;
    let image = try_retake(claim, old, &mut owner).map_err(|e| {
        let image = &claim.place.what;
        match e.errno() {
            IoError::Fenced => {
                tracing::error!(%image, error = %e, "the volume is fenced: its image is no longer ours");
                Failed::For(IoError::Fenced)
            }
            // A right is missing, the cluster is out of reach, or another client has the lock or is
            // changing the record. This may pass.
            _ if matches!(
                e,
                BackendError::Denied { .. } | BackendError::Unavailable { .. } | BackendError::Locked { .. }
            ) =>
            {
                tracing::warn!(%image, error = %e, "a read-only handle could not be replaced yet");
                Failed::Yet(e.errno())
            }
            errno => {
                tracing::warn!(%image, error = %e, "a read-only handle could not be replaced");
                Failed::For(errno)
            }
        }
    });
    Retaken { image, owner }
}

/// Records that the cache's content is no longer to be trusted; see [`crate::Transfer::Disown`].
pub(super) fn disown(claim: &Claim) -> Result<(OwnerObject, Ownership), BackendError> {
    let Claim { cluster, place, .. } = claim;
    let pool = cluster.pool(&place.pool, &place.namespace)?;
    let (mut owner, record) = OwnerObject::read(&place.what, &pool, &claim.owner)?;
    if !record.is_some_and(|record| record.is_of(&claim.record)) {
        return Err(BackendError::Fenced { what: place.what.clone() });
    }
    let record = claim.record.disowned();
    owner.swap(&pool, &record)?;
    Ok((owner, record))
}

fn try_retake(
    claim: &Claim,
    old: Option<Arc<Image>>,
    read: &mut Option<OwnerObject>,
) -> Result<Image, BackendError> {
    let Claim { cluster, place, header, .. } = claim;
    let pool = cluster.pool(&place.pool, &place.namespace)?;
    let read_locker = || pool.locker(header).map_err(|e| place.error(cluster, "read the image's lock", e));
    let ours = |locker: &Locker| address::same(&locker.address, &claim.address);
    let fenced = || BackendError::Fenced { what: place.what.clone() };
    let (owner, record) = OwnerObject::read(&place.what, &pool, &claim.owner)?;
    let Some(record) = record.filter(|record| record.is_of(&claim.record)) else { return Err(fenced()) };
    let owner = read.insert(owner);
    if record.superseded.is_some() && claim.record.superseded.is_none() {
        // An earlier attempt has found that another client has used its moment.
        return Err(fenced());
    }
    // The peer is taken from the record that was just read: if a change of the record has failed,
    // its outcome is not known.
    let mut current = claim.record.with_peer(record.peer.clone());
    let broken = |locker: &Locker| {
        pool.break_lock(header, locker).map_err(|e| place.error(cluster, "release the lock", e))
    };
    // The header's version, if no client has come since an earlier attempt lifted the guard, or
    // released the lock where there is no guard.
    let untouched = || {
        let version = pool.version(header).map_err(|e| place.error(cluster, "read the image's header", e))?;
        let (_, tag) = pool.lock(header).map_err(|e| place.error(cluster, "read the image's lock", e))?;
        let is_known = record.clients.lifted == Some(version) || tag == guard::LIFTED_TAG;
        if is_known { Ok(version) } else { Err(fenced()) }
    };
    // The header's version after the release of our lock. Without a guard, it shows later whether
    // another client has come.
    let mut released = None;
    if !claim.guarded {
        released = match read_locker()? {
            Some(locker) if ours(&locker) => broken(&locker)?,
            Some(_) => return Err(fenced()),
            None => Some(untouched()?),
        };
        // The lock was no longer the one just read: try again later.
        let gone = || place.error(cluster, "release the lock", io::Error::from_raw_os_error(libc::ETIMEDOUT));
        current.clients.lifted = Some(released.ok_or_else(gone)?);
        owner.swap(&pool, &current.renewed())?;
    }
    // Closing waits for whatever librbd does with the lock at this moment, and releases the lock.
    drop(old);
    match read_locker()? {
        Some(locker) if ours(&locker) => released = broken(&locker)?.or(released),
        Some(_) => return Err(fenced()),
        None => {}
    }
    let start = if let Some(version) = released.filter(|_| !claim.guarded) {
        Start::Unguarded(version)
    } else if place.facts(cluster, &pool)?.features & FEATURE_NON_PRIMARY != 0 {
        Start::Guarded
    } else {
        // An earlier attempt has lifted the guard, and could not set it again.
        Start::Unguarded(untouched()?)
    };
    let spot = Spot { place, cluster, pool: &pool, header, client: &claim.address };
    let taken = spot.take(start, claim.guarded, owner, &current)?;
    if !taken.undisturbed {
        let superseded = Some(DISTURBED.into());
        owner.swap(&pool, &Ownership { superseded, ..current.renewed() })?;
        return Err(fenced());
    }
    tracing::info!(image = %place.what, "the image's handle had turned read-only; it is replaced");
    Ok(taken.image)
}

/// Moments of taking and giving up an image at which tests can intervene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// All checks were made.
    Fencing,
    /// The claim is in the record.
    Claimed,
    /// The guard is lifted; the record does not say so yet.
    Bare,
    /// The guard is lifted, and the record says so.
    Lifted,
    /// Changes of the image, if they were forbidden, are allowed; its lock is not taken.
    Permitted,
    /// The lock is ours; the guard is not set.
    Locked,
    /// Lock and guard are ours; the record does not say so yet.
    Guarded,
    /// The record says that the image is given up; the guard is still set.
    Abandoned,
    /// The guard is lifted for a change of the image.
    Exposed,
    /// The record says that the image is being rolled back; the rollback has not begun.
    Marked,
    /// The image is rolled back; the record does not say so yet.
    RolledBack,
    /// The record says that the image is rolled back; the handle has not read the header again.
    Finished,
    /// The record is about to name another peer.
    Naming,
}

#[cfg(not(test))]
pub(super) fn reached(_: Point) -> Result<(), BackendError> {
    Ok(())
}

/// What a test does at these moments.
#[cfg(test)]
pub(super) type Hook = Box<dyn FnMut(Point) -> Result<(), BackendError> + Send>;

#[cfg(test)]
pub(super) static HOOK: std::sync::Mutex<Option<Hook>> = std::sync::Mutex::new(None);

#[cfg(test)]
pub(super) fn reached(point: Point) -> Result<(), BackendError> {
    // The hook is taken out, so that a hook that never returns does not block the next one.
    let hook = HOOK.lock().expect("no hook panics").take();
    let Some(mut hook) = hook else { return Ok(()) };
    let outcome = hook(point);
    HOOK.lock().expect("no hook panics").get_or_insert(hook);
    outcome
}
