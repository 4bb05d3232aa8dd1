//! The lock of an image: lifting the guard for a moment, taking the lock, and setting the guard.

use super::address;
use super::forbid;
use super::guard;
use super::image::{Access, Image};
use super::owner::OwnerObject;
use super::place::Site;
use super::point::{Point, reached};
use super::pool::Locker;
use crate::error::BackendError;
use crate::record::{OwnerState, Ownership};
use std::io;

/// Most attempts to allow changes of an image while other clients change its header.
const ALLOWS_MAX: u32 = 10;

/// Written into the record when other clients have used the moment in which the guard was lifted
/// for us.
pub(super) const DISTURBED: &str = "another client has changed the image while it was being opened";

/// Everything that is needed to take an image's lock, and to change the image.
pub(super) struct Spot<'a> {
    pub(super) site: &'a Site,
    /// Name of the header object.
    pub(super) header: &'a str,
    /// Address of our own client.
    pub(super) client: &'a str,
    /// The guard's feature bit is in use.
    pub(super) guarded: bool,
}

/// The state of the image in which its lock is to be taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
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
pub(super) struct Taken {
    pub(super) image: Image,
    pub(super) locker: Locker,
    /// No other client has changed the image between the lifting of its guard and its opening.
    pub(super) undisturbed: bool,
}

impl Spot<'_> {
    pub(super) fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> BackendError {
        self.site.failed(action)
    }

    /// Lifts the guard if there is one, opens the image, takes its lock, and sets the guard. Where
    /// the guard's bit is not in use, it sets only the guard's keys and forbids changes of the
    /// image. `record` is what `owner` contains.
    pub(super) fn take(
        &self,
        start: Start,
        owner: &mut OwnerObject,
        record: &Ownership,
    ) -> Result<Taken, BackendError> {
        let mut progress = Progress::default();
        let taken = match self.lift_and_lock(start, owner, record, &mut progress) {
            Ok(taken) => taken,
            Err(e) => {
                if progress.allowed && !self.guarded {
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
            if let Err(e) =
                owner.swap(&self.site.pool, &Ownership { superseded, ..record.renewed() })
            {
                // The guard stays lifted, and proves nothing in this state.
                tracing::warn!(image = %self.site.place.what, "{DISTURBED}");
                return Err(e);
            }
        }
        let guard = || {
            reached(Point::Locked)?;
            let guarded = match self.guarded {
                true => guard::set(&self.site.pool, self.header).map(drop),
                false => guard::reserve(&self.site.pool, self.header)
                    .and_then(|()| self.forbid(&taken.image)),
            };
            guarded.map_err(|e| match e.raw_os_error() {
                Some(libc::ECANCELED) => self.site.place.gone_elsewhere(),
                _ => self.failed("guard the image")(e),
            })
        };
        if let Err(e) = guard() {
            if progress.allowed && !self.guarded {
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
            if let Err(e) =
                owner.swap(&self.site.pool, &Ownership { superseded, ..record.renewed() })
            {
                tracing::warn!("{e}");
                // The guard stays lifted: then the header's version shows the next attempt that
                // another client was there.
                return;
            }
        }
        self.guard_again();
    }

    /// After a failure: sets the guard as it was, if the cluster still lets us.
    pub(super) fn guard_again(&self) {
        if let Err(e) = guard::set(&self.site.pool, self.header) {
            tracing::warn!(image = %self.site.place.what, error = %e, "the guard of the image could not be restored");
        }
    }

    /// After a failure: forbids changes again, if the cluster still lets us.
    fn forbid_again(&self) {
        if let Err(e) = forbid::set(&self.site.pool, self.header) {
            tracing::warn!(image = %self.site.place.what, error = %e, "changes of the image could not be forbidden again");
        }
    }

    /// After a failure: removes the guard, which was not there before, if the cluster still lets
    /// us.
    pub(super) fn free(&self) {
        let allowed = forbid::lift(&self.site.pool, self.header, None);
        if let Err(e) = allowed.and_then(|_| guard::free(&self.site.pool, self.header)) {
            tracing::warn!(image = %self.site.place.what, error = %e, "the guard of the image could not be taken away");
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
        let version = guard::lift(&self.site.pool, self.header, None)
            .map_err(self.failed("lift the guard of the image"))?;
        reached(Point::Bare)?;
        // After a kill before the lock is ours, it must not look as if another client had removed
        // the guard.
        let lifted = record.renewed().with_lifted(Some(version));
        if let Err(e) = owner.swap(&self.site.pool, &lifted) {
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
            match forbid::lift_and_mark(&self.site.pool, self.header, expected) {
                Ok(None) => return Ok(version),
                Ok(Some(after)) => {
                    progress.allowed = true;
                    return Ok(if expected == version { after } else { version });
                }
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::ERANGE | libc::EOVERFLOW | libc::EBUSY)
                    ) => {}
                Err(e) => return Err(self.failed("allow changes of the image")(e)),
            }
            // A client that has taken the lock since then has forbidden changes itself. They are
            // not ours to allow.
            expected = self
                .site
                .pool
                .version(self.header)
                .map_err(self.failed("read the image's header"))?;
            if let Some(locker) =
                self.site.pool.locker(self.header).map_err(self.failed("read the image's lock"))?
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
        let image = self.site.open(Access::Write);
        let image = image.map_err(self.failed("open the image"))?;
        let undisturbed =
            self.site.pool.version(self.header).map_err(self.failed(read_header))? == version;
        progress.disturbed = !undisturbed;
        let ours = |locker: &Locker| address::same(&locker.address, self.client);
        if let Err(e) = image.lock() {
            let locker = self.site.pool.locker(self.header).ok().flatten();
            let taken = locker.as_ref().is_some_and(|locker| !ours(locker));
            progress.disturbed |= taken;
            return Err(match e.raw_os_error() {
                // librbd returns EINVAL for a handle that sees the guard of another owner.
                Some(libc::EROFS | libc::EBUSY | libc::EEXIST) => self.lost(locker),
                Some(libc::EINVAL) if taken => self.lost(locker),
                _ => self.failed("take the exclusive lock")(e),
            });
        }
        match self.site.pool.locker(self.header).map_err(self.failed("read the image's lock"))? {
            Some(locker) if ours(&locker) => Ok(Taken { image, locker, undisturbed }),
            other => {
                progress.disturbed |= other.is_some();
                Err(self.lost(other))
            }
        }
    }

    /// Releases the lock with the guard lifted. The guard was lifted for a moment, or a client has
    /// not seen it. So the guard proves nothing any more, and the header's version is the proof.
    pub(super) fn expose(
        &self,
        taken: &Taken,
        owner: &mut OwnerObject,
        before: &Ownership,
    ) -> Result<(), BackendError> {
        if before.rollback.is_some() {
            // The guard is no proof here, but it keeps other clients from an image that is half
            // rolled back.
            return Ok(());
        }
        let released = self.site.pool.break_lock(self.header, &taken.locker);
        let released = released.map_err(self.failed("release the lock"))?;
        let lifted = match released
            .map(|version| guard::lift(&self.site.pool, self.header, Some(version)))
        {
            Some(Ok(version)) => Some(version),
            Some(Err(e)) if !matches!(e.raw_os_error(), Some(libc::ERANGE | libc::EOVERFLOW)) => {
                return Err(self.failed("lift the guard of the image")(e));
            }
            // Another client was faster.
            Some(Err(_)) | None => None,
        };
        let disturbed = lifted.is_none() || !taken.undisturbed;
        let superseded =
            disturbed.then(|| DISTURBED.to_owned()).or_else(|| before.superseded.clone());
        owner.swap(
            &self.site.pool,
            &Ownership { superseded, ..before.renewed() }.with_lifted(lifted),
        )
    }

    pub(super) fn expose_or_warn(
        &self,
        taken: &Taken,
        owner: &mut OwnerObject,
        before: &Ownership,
    ) {
        if let Err(e) = self.expose(taken, owner, before) {
            tracing::warn!("{e}");
        }
    }

    fn lost(&self, holder: Option<Locker>) -> BackendError {
        let holder = match holder {
            Some(Locker { client, address, .. }) => {
                format!("{client} at {address} was faster to take its lock; stop that client first")
            }
            None => "its exclusive lock could not be kept; try again".into(),
        };
        BackendError::Locked { what: self.site.place.what.clone(), holder }
    }
}
