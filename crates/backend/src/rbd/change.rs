//! Changing an image of ours with its open handle. The guard, or the bit that takes its place,
//! forbids changes to every client, so it is lifted while the change is made.

use super::address;
use super::attach::Attached;
use super::claim::Claim;
use super::forbid;
use super::guard;
use super::image::{FEATURE_OBJECT_MAP, Facts, Image};
use super::owner::OwnerObject;
use super::place::Site;
use super::point::{Point, reached};
use super::spot::Spot;
use crate::error::BackendError;
use crate::record::{Continuity, Ownership};
use crate::redo;
use crate::snapshot::{Snapshot, SnapshotChange, SnapshotKind};
use std::io;
use std::time::Duration;
use tidepool_engine::api::IoError;

/// Most attempts to set the guard again after a change of the image, and the pause between them.
const REGUARDS_MAX: u32 = 60;
const REGUARD_PAUSE: Duration = Duration::from_secs(1);

/// A change of the image that the guard forbids.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// Take a snapshot of this name.
    Snapshot(String),
    /// Take a snapshot that mirroring sends to the other cluster.
    MirrorSnapshot,
    /// Change the snapshot of this name.
    OfSnapshot(SnapshotChange, String),
    /// Set another size, in bytes.
    Size(u64),
}

/// Changes the image with its open handle. The guard forbids changes to every client, so it is
/// lifted while the change is made. The lock that we hold makes that safe: librbd takes a lock from
/// no client that is alive. Returns `EROFS` if the handle sees the guard or the lock is not ours at
/// this moment; [`super::retake::retake`] finds out which. Returns `Fenced` if the record is no
/// longer ours.
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
    let site = claim.site()?;
    let (Site { place, pool, .. }, header) = (&site, &claim.header);
    let failed = |action: &'static str| site.failed(action);
    let fenced = || BackendError::Fenced { what: place.what.clone() };
    let (mut owner, record) = OwnerObject::read(&place.what, pool, &claim.owner)?;
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
        // The error number is kept: it tells the caller what is wrong with the snapshot.
        Change::OfSnapshot(change, name) => image
            .change_snapshot(*change, name)
            .map_err(|e| BackendError::io(format!("{}@{name}", place.what), action(*change), e)),
        Change::Size(size_bytes) => image.resize(*size_bytes).map_err(failed("resize the image")),
    };
    let spot = Spot { site: &site, header, client: &claim.address, guarded: claim.guarded };
    let done = spot.unguarded(image, what, change);
    if let Err(BackendError::Overwritten { why, .. }) = &done {
        tracing::error!(image = %place.what, "{why}: nothing more of it is served");
        let superseded = Some(why.clone());
        if let Err(error) = owner.swap(pool, &Ownership { superseded, ..claim.record.renewed() }) {
            tracing::error!("{error}");
        }
        return Err(fenced());
    }
    done
}

/// What other clients can change in an image while changes are allowed.
struct Seen {
    size_bytes: u64,
    features: u64,
    snapshots: Vec<Snapshot>,
}

impl Seen {
    /// What other clients have changed between `self` and `after`, beside our own change; without
    /// `own` the image was rolled back.
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
        found.extend(come.map(|name| {
            format!("the snapshots: {name} has come, and lacks what is in the cache alone")
        }));
        let gone = missing(&self.snapshots, &after.snapshots).into_iter();
        found.extend(gone.map(|name| format!("the snapshots: {name} is gone")));
        found
    }

    /// Whether the image has another size that we have not given it.
    fn is_resized(&self, after: &Seen, own: Option<&Change>) -> bool {
        match own {
            Some(Change::Size(size_bytes)) => {
                ![self.size_bytes, *size_bytes].contains(&after.size_bytes)
            }
            Some(_) => self.size_bytes != after.size_bytes,
            None => false,
        }
    }
}

impl Spot<'_> {
    /// What the handle finds after it has read the header again.
    fn read_again(&self, image: &Image) -> Result<Facts, BackendError> {
        image.sizes().map_err(self.failed("read the image's header"))?;
        image.facts().map_err(self.failed("read the image's header"))
    }

    fn seen(&self, image: &Image) -> Result<Seen, BackendError> {
        let Facts { size_bytes, features, .. } = self.read_again(image)?;
        let snapshots = image.snapshots().map_err(self.failed("list the image's snapshots"))?;
        Ok(Seen { size_bytes, features, snapshots })
    }

    /// Changes an image of ours. What forbids changes is lifted meanwhile; the lock that we hold
    /// makes that safe. `own` is the change that `work` makes.
    fn unguarded<T>(
        &self,
        image: &Image,
        own: &Change,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if self.guarded { self.bare(image, work) } else { self.allowed(image, Some(own), work) }
    }

    /// Does `work` while the guard is lifted. A client that opens the image meanwhile is made to
    /// see the guard afterwards.
    fn bare<T>(
        &self,
        image: &Image,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let watchers = || image.watchers().map_err(self.failed("list who has the image open"));
        let before = watchers()?;
        guard::pause(&self.site.pool, self.header)
            .map_err(self.failed("lift the guard of the image"))?;
        reached(Point::Exposed)?;
        let done = work();
        self.until_done("guard the image again", || {
            guard::set(&self.site.pool, self.header).map(drop)
        })?;
        let is_known = |watcher: &String| before.iter().any(|known| address::same(known, watcher));
        if !watchers().is_ok_and(|after| after.iter().all(is_known)) {
            // A client that has opened the image in that moment has not seen the guard; a
            // notification makes the client read the header again. Our own handle reads it too, and
            // is replaced then.
            if let Err(e) = self.site.pool.notify_header(self.header) {
                tracing::warn!(image = %self.site.place.what, error = %e, "a client that has just opened the image may not see its guard");
            }
        }
        done
    }

    /// Does `work`, which is possible under the guard with a handle that has not read the header
    /// since the guard was set. Without a guard, changes are allowed meanwhile.
    fn under_guard<T>(
        &self,
        image: &Image,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if self.guarded { work() } else { self.allowed(image, None, work) }
    }

    /// Makes the handle read the image's header again, while the guard is lifted. Without a guard
    /// the handle may read the header at any time.
    fn look(&self, image: &Image) -> Result<Facts, BackendError> {
        if self.guarded {
            self.bare(image, || self.read_again(image))
        } else {
            self.read_again(image)
        }
    }

    /// Forbids changes of the image, and makes our handle read that, because other clients pass
    /// their changes to our handle.
    pub(super) fn forbid(&self, image: &Image) -> io::Result<()> {
        if forbid::set(&self.site.pool, self.header)? {
            self.tell_handles()?;
        }
        image.sizes().map(drop)
    }

    /// Makes every handle of the image read its header again. The handle of a client that has died
    /// does not answer; the others are notified all the same.
    fn tell_handles(&self) -> io::Result<()> {
        self.site.pool.notify_header(self.header).or_else(|e| match e.raw_os_error() {
            Some(libc::ETIMEDOUT) => Ok(()),
            _ => Err(e),
        })
    }

    /// Does `work` with an image of ours that has no guard: our own change `own`, or a rollback
    /// without `own`. Every client may change the image meanwhile, so the image is compared
    /// afterwards. `Overwritten` if another client has given it another size.
    fn allowed<T>(
        &self,
        image: &Image,
        own: Option<&Change>,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let before = self.seen(image)?;
        forbid::lift(&self.site.pool, self.header, None)
            .map_err(self.failed("allow changes of the image"))?;
        reached(Point::Exposed)?;
        const TELL: &str = "have the image's handle read its header";
        let done = self.tell_handles().map_err(self.failed(TELL)).and_then(|()| work());
        // The two steps are repeated separately: `forbid` would notify no handle in a repetition
        // that finds the bit set already.
        let forbidden = self
            .until_done("forbid changes of the image again", || {
                forbid::set(&self.site.pool, self.header).map(drop)
            })
            .and_then(|()| self.until_done(TELL, || self.tell_handles()));
        let what = &self.site.place.what;
        if let Err(error) = forbidden {
            // The change itself has been made.
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

    /// Repeats `work` until it succeeds, sixty times at most. Stops at once if this client is
    /// fenced.
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
    /// Makes the image what it was at a snapshot. Meanwhile the record says that the rollback is
    /// under way, and the guard is set where the image can have one. So whatever happens to this
    /// process, the image is not used as if it were complete. `again`: an earlier attempt was cut
    /// short.
    pub(super) fn roll_back(
        &mut self,
        spot: &Spot<'_>,
        snapshot: &str,
        again: bool,
    ) -> Result<(), BackendError> {
        self.change_back(spot, snapshot, again).map_err(|error| {
            let what = spot.site.place.what.clone();
            tracing::error!(image = %what, snapshot, %error, "the rollback is cut short");
            BackendError::HalfRolledBack { what, snapshot: snapshot.to_owned() }
        })?;
        reached(Point::Finished)?;
        self.facts = spot.look(&self.image)?;
        self.continuity =
            Continuity::unproven(format!("the image is rolled back to snapshot {snapshot}"));
        Ok(())
    }

    fn change_back(
        &mut self,
        spot: &Spot<'_>,
        snapshot: &str,
        again: bool,
    ) -> Result<(), BackendError> {
        let Site { place, pool, cluster } = spot.site;
        // All data is in the image, and the redo must not be written over the image after the
        // rollback.
        let shelf = spot.site.shelf(&self.facts.id)?;
        redo::clear(&place.what, &shelf, self.record.generation)?;
        cluster
            .wait_forever()
            .map_err(|e| BackendError::io(&place.what, "wait for the cluster", e))?;
        reached(Point::Marked)?;
        let image = &self.image;
        if again && self.facts.features & FEATURE_OBJECT_MAP != 0 {
            // librbd ignores objects that neither the image's map nor the snapshot's map contains.
            // It changes the image's map to the snapshot's before it looks at the objects. So after
            // a kill in between, the image's map lacks the objects that were created since the
            // snapshot.
            let rebuild =
                || image.rebuild_object_map().map_err(spot.failed("rebuild the object map"));
            spot.under_guard(image, rebuild)?;
            spot.look(image)?;
        }
        tracing::info!(image = %place.what, snapshot, "the image is being rolled back");
        let roll_back = || image.roll_back(snapshot).map_err(spot.failed("roll the image back"));
        spot.under_guard(image, roll_back)?;
        reached(Point::RolledBack)?;
        self.record = self.record.rolled_back();
        self.owner.swap(pool, &self.record)
    }
}
