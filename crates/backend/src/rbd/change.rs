//! Changing an image of ours with its open handle. The guard, or the bit that stands for it, forbids that to everybody, so it is lifted
//! for that moment.

use super::address;
use super::attach::{Attached, Claim, Point, Spot, reached};
use super::forbid;
use super::guard;
use super::image::{FEATURE_OBJECT_MAP, Facts, Image};
use super::owner::OwnerObject;
use crate::error::BackendError;
use crate::record::{Continuity, Ownership};
use crate::redo;
use crate::snapshot::{Snapshot, SnapshotChange, SnapshotKind};
use std::io;
use std::time::Duration;
use tidepool_engine::api::IoError;

/// How often the guard is set again after a change of the image before that is given up, and the pause between.
const REGUARDS_MAX: u32 = 60;
const REGUARD_PAUSE: Duration = Duration::from_secs(1);

/// A change of the image that the guard forbids.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// A snapshot of this name.
    Snapshot(String),
    /// A snapshot that mirroring sends to the other cluster.
    MirrorSnapshot,
    /// Of the snapshot of this name.
    OfSnapshot(SnapshotChange, String),
    /// Another size in bytes.
    Size(u64),
}

/// Changes the image with its open handle. The guard forbids it to everybody, so it is lifted for that moment, which
/// the lock that we hold makes safe: librbd takes it from nobody who is there. `EROFS` if the handle sees the guard, or
/// lock and record do not say that the image is ours at this moment; [`super::attach::retake`] finds out which.
pub(super) fn change(claim: &Claim, image: &Image, what: &Change) -> Result<(), IoError> {
    try_change(claim, image, what).map_err(|e| {
        tracing::warn!(image = %claim.place.what, change = ?what, error = %e, "the image was not changed");
        e.errno()
    })
}

fn action(change: SnapshotChange) -> &'static str {
    match change {
        SnapshotChange::Remove => "remove the snapshot",
        SnapshotChange::Protect => "protect the snapshot",
        SnapshotChange::Unprotect => "unprotect the snapshot",
    }
}

fn try_change(claim: &Claim, image: &Image, what: &Change) -> Result<(), BackendError> {
    let Claim { cluster, place, header, .. } = claim;
    let failed = |action: &'static str| move |e: io::Error| place.error(cluster, action, e);
    let fenced = || BackendError::Fenced { what: place.what.clone() };
    let pool = cluster.pool(&place.pool, &place.namespace)?;
    let (mut owner, record) = OwnerObject::read(&place.what, &pool, &claim.owner)?;
    if !record.is_some_and(|record| record.is_of(&claim.record)) {
        return Err(fenced());
    }
    let locker = pool.locker(header).map_err(failed("read the image's lock"))?;
    if !locker.is_some_and(|locker| address::same(&locker.address, &claim.address)) {
        return Err(failed("change the image")(io::Error::from_raw_os_error(libc::EROFS)));
    }
    let change = || match what {
        Change::Snapshot(name) => image.snapshot(name).map_err(failed("take a snapshot")),
        Change::MirrorSnapshot => image
            .mirror_snapshot()
            .map_err(|e| BackendError::io(&place.what, "take a snapshot for mirroring", e)),
        // The caller is told what the error means for a snapshot.
        Change::OfSnapshot(change, name) => image
            .change_snapshot(*change, name)
            .map_err(|e| BackendError::io(format!("{}@{name}", place.what), action(*change), e)),
        Change::Size(size_bytes) => image.resize(*size_bytes).map_err(failed("resize the image")),
    };
    let spot = Spot { place, cluster, pool: &pool, header, client: &claim.address };
    let done = spot.unguarded(image, claim.guarded, what, change);
    if let Err(BackendError::Overwritten { why, .. }) = &done {
        tracing::error!(image = %place.what, "{why}: nothing more of it is served");
        let superseded = Some(why.clone());
        if let Err(error) = owner.swap(&pool, &Ownership { superseded, ..claim.record.renewed() }) {
            tracing::error!("{error}");
        }
        return Err(fenced());
    }
    done
}

/// What others can change of an image while that is allowed.
struct Seen {
    size_bytes: u64,
    features: u64,
    snapshots: Vec<Snapshot>,
}

impl Seen {
    /// What others have done between `self` and `after`, beside our own change; without one the image was rolled back.
    fn foreign(&self, after: &Seen, own: Option<&Change>) -> Vec<String> {
        let mut found = Vec::new();
        if self.features != after.features {
            found.push(format!("the features from {:#x} to {:#x}", self.features, after.features));
        }
        if self.is_resized(after, own) {
            found.push(format!("the size from {} to {} bytes", self.size_bytes, after.size_bytes));
        }
        let is_own = |snapshot: &Snapshot| match own {
            Some(Change::Snapshot(name) | Change::OfSnapshot(_, name)) => &snapshot.name == name,
            Some(Change::MirrorSnapshot) => snapshot.kind == SnapshotKind::Mirror,
            Some(Change::Size(_)) | None => false,
        };
        let missing = |from: &[Snapshot], among: &[Snapshot]| -> Vec<String> {
            let is_there = |snapshot: &&Snapshot| among.iter().any(|other| other.id == snapshot.id);
            let missing = from.iter().filter(|snapshot| !is_there(snapshot) && !is_own(snapshot));
            missing.map(|snapshot| snapshot.name.clone()).collect()
        };
        let come = missing(&after.snapshots, &self.snapshots).into_iter();
        found.extend(
            come.map(|name| format!("the snapshots: {name} has come, and lacks what is in the cache alone")),
        );
        let gone = missing(&self.snapshots, &after.snapshots).into_iter();
        found.extend(gone.map(|name| format!("the snapshots: {name} is gone")));
        found
    }

    /// The image has another size, which we have not given it.
    fn is_resized(&self, after: &Seen, own: Option<&Change>) -> bool {
        match own {
            Some(Change::Size(size_bytes)) => ![self.size_bytes, *size_bytes].contains(&after.size_bytes),
            Some(_) => self.size_bytes != after.size_bytes,
            None => false,
        }
    }
}

impl Spot<'_> {
    /// What the handle finds when it has read the header again.
    fn read_again(&self, image: &Image) -> Result<Facts, BackendError> {
        image.sizes().map_err(self.failed("read the image's header"))?;
        image.facts().map_err(self.failed("read the image's header"))
    }

    fn seen(&self, image: &Image) -> Result<Seen, BackendError> {
        let Facts { size_bytes, features, .. } = self.read_again(image)?;
        let snapshots = image.snapshots().map_err(self.failed("list the image's snapshots"))?;
        Ok(Seen { size_bytes, features, snapshots })
    }

    /// Does something with an image of ours that is forbidden to everybody: what forbids it is lifted for that moment, which the lock
    /// that we hold makes safe. `own`: what it is.
    fn unguarded<T>(
        &self,
        image: &Image,
        guarded: bool,
        own: &Change,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if guarded { self.bare(image, work) } else { self.allowed(image, Some(own), work) }
    }

    /// Lifts the guard for a moment. Nobody who opens the image meanwhile goes on without having seen it.
    fn bare<T>(
        &self,
        image: &Image,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let watchers = || image.watchers().map_err(self.failed("list who has the image open"));
        let before = watchers()?;
        guard::pause(self.pool, self.header).map_err(self.failed("lift the guard of the image"))?;
        reached(Point::Exposed)?;
        let done = work();
        self.until_done("guard the image again", || guard::set(self.pool, self.header).map(drop))?;
        let is_known = |watcher: &String| before.iter().any(|known| address::same(known, watcher));
        if !watchers().is_ok_and(|after| after.iter().all(is_known)) {
            // A client that has opened the image in that moment has not seen the guard, and reads the header again when told to. So does our own
            // handle, which is replaced then.
            if let Err(e) = self.pool.notify_header(self.header) {
                tracing::warn!(image = %self.place.what, error = %e, "a client that has just opened the image may not see its guard");
            }
        }
        done
    }

    /// Does something that works under the guard, with a handle that has not read the header since the guard was set.
    fn under_guard<T>(
        &self,
        image: &Image,
        guarded: bool,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if guarded { work() } else { self.allowed(image, None, work) }
    }

    /// Has the handle see what has become of the image. Without a guard it may do so at any time.
    fn look(&self, image: &Image, guarded: bool) -> Result<Facts, BackendError> {
        if guarded { self.bare(image, || self.read_again(image)) } else { self.read_again(image) }
    }

    /// Forbids changes of the image, of which our handle is to know: others have it make theirs.
    pub(super) fn forbid(&self, image: &Image) -> io::Result<()> {
        if forbid::set(self.pool, self.header)? {
            self.tell_handles()?;
        }
        image.sizes().map(drop)
    }

    /// Has every handle of the image read its header again. One of a client that has died answers nothing, and the others are told all
    /// the same.
    fn tell_handles(&self) -> io::Result<()> {
        self.pool.notify_header(self.header).or_else(|e| match e.raw_os_error() {
            Some(libc::ETIMEDOUT) => Ok(()),
            _ => Err(e),
        })
    }

    /// Does something with an image of ours without a guard: our own change, or else a rollback. Everybody may change it for that moment.
    /// What has come of that is looked at; `Overwritten` if others have given it another size.
    fn allowed<T>(
        &self,
        image: &Image,
        own: Option<&Change>,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let before = self.seen(image)?;
        forbid::lift(self.pool, self.header, None).map_err(self.failed("allow changes of the image"))?;
        reached(Point::Exposed)?;
        const TELL: &str = "have the image's handle read its header";
        let done = self.tell_handles().map_err(self.failed(TELL)).and_then(|()| work());
        // Each for itself: a bit that is set already tells nobody.
        let forbidden = self
            .until_done("forbid changes of the image again", || forbid::set(self.pool, self.header).map(drop))
            .and_then(|()| self.until_done(TELL, || self.tell_handles()));
        let what = &self.place.what;
        if let Err(error) = forbidden {
            // What was done is done.
            tracing::error!(image = %what, %error, "others can change the image until the cache changes it next, or releases it");
        }
        match self.seen(image) {
            Ok(after) => {
                for foreign in before.foreign(&after, own) {
                    tracing::error!(image = %what, "another client has changed {foreign}, while changes were allowed for a moment");
                }
                if before.is_resized(&after, own) {
                    let why = "another client has given the image another size".to_owned();
                    return Err(BackendError::Overwritten { what: what.clone(), why });
                }
            }
            Err(error) => {
                tracing::warn!(image = %what, %error, "whether others have changed the image is not known")
            }
        }
        done
    }

    /// Does what must be done, if the cluster lets us within sixty attempts.
    fn until_done(
        &self,
        action: &'static str,
        work: impl Fn() -> io::Result<()>,
    ) -> Result<(), BackendError> {
        let mut attempts = 0;
        while let Err(e) = work() {
            attempts += 1;
            if attempts == REGUARDS_MAX || e.raw_os_error() == Some(libc::ESHUTDOWN) {
                return Err(self.failed(action)(e));
            }
            std::thread::sleep(REGUARD_PAUSE);
        }
        Ok(())
    }
}

impl Attached {
    /// Makes the image what it was at a snapshot. Its record says that this is under way, and the guard stands meanwhile: whatever becomes
    /// of this process, nobody takes the image for whole. `again`: an earlier attempt was cut short.
    pub(super) fn roll_back(
        &mut self,
        spot: &Spot<'_>,
        snapshot: &str,
        again: bool,
    ) -> Result<(), BackendError> {
        self.change_back(spot, snapshot, again).map_err(|error| {
            let what = spot.place.what.clone();
            tracing::error!(image = %what, snapshot, %error, "the rollback is cut short");
            BackendError::HalfRolledBack { what, snapshot: snapshot.to_owned() }
        })?;
        reached(Point::Finished)?;
        self.facts = spot.look(&self.image, self.guarded)?;
        self.continuity = Continuity::unproven(format!("the image is rolled back to snapshot {snapshot}"));
        Ok(())
    }

    fn change_back(&mut self, spot: &Spot<'_>, snapshot: &str, again: bool) -> Result<(), BackendError> {
        let Spot { place, cluster, pool, .. } = *spot;
        // All of it is in the image, and must not go over what that becomes.
        let shelf = super::shelf(place, cluster, &self.facts.id)?;
        redo::clear(&place.what, &shelf, self.record.generation)?;
        cluster.wait_forever().map_err(|e| BackendError::io(&place.what, "wait for the cluster", e))?;
        reached(Point::Marked)?;
        let image = &self.image;
        if again && self.facts.features & FEATURE_OBJECT_MAP != 0 {
            // librbd leaves objects alone that neither the image's map has nor the snapshot's. It changes the one to the other before it
            // looks at the objects, so that after a kill in between the image's map lacks those that have come since the snapshot.
            let rebuild = || image.rebuild_object_map().map_err(spot.failed("rebuild the object map"));
            spot.under_guard(image, self.guarded, rebuild)?;
            spot.look(image, self.guarded)?;
        }
        tracing::info!(image = %place.what, snapshot, "the image is being rolled back");
        let roll_back = || image.roll_back(snapshot).map_err(spot.failed("roll the image back"));
        spot.under_guard(image, self.guarded, roll_back)?;
        reached(Point::RolledBack)?;
        self.record = self.record.rolled_back();
        self.owner.swap(pool, &self.record)
    }
}
