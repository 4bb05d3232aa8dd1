//! A handle that has turned read-only: it is replaced, if the image is still ours.

use super::address;
use super::claim::Claim;
use super::guard;
use super::image::{FEATURE_NON_PRIMARY, Image};
use super::owner::OwnerObject;
use super::place::Site;
use super::pool::Locker;
use super::spot::{DISTURBED, Spot, Start};
use crate::error::BackendError;
use crate::record::Ownership;
use std::io;
use std::sync::Arc;
use tidepool_engine::api::IoError;

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

fn try_retake(
    claim: &Claim,
    old: Option<Arc<Image>>,
    read: &mut Option<OwnerObject>,
) -> Result<Image, BackendError> {
    let site = claim.site()?;
    let (Site { place, pool, .. }, header) = (&site, &claim.header);
    let read_locker = || pool.locker(header).map_err(site.failed("read the image's lock"));
    let ours = |locker: &Locker| address::same(&locker.address, &claim.address);
    let fenced = || BackendError::Fenced { what: place.what.clone() };
    let (owner, record) = OwnerObject::read(&place.what, pool, &claim.owner)?;
    let Some(record) = record.filter(|record| record.is_of(&claim.record)) else {
        return Err(fenced());
    };
    let owner = read.insert(owner);
    if record.superseded.is_some() && claim.record.superseded.is_none() {
        // An earlier attempt has found that another client has used its moment.
        return Err(fenced());
    }
    // The peer is taken from the record that was just read: if a change of the record has failed,
    // its outcome is not known.
    let mut current = claim.record.with_peer(record.peer.clone());
    let broken =
        |locker: &Locker| pool.break_lock(header, locker).map_err(site.failed("release the lock"));
    // The header's version, if no client has come since an earlier attempt lifted the guard, or
    // released the lock where there is no guard.
    let untouched = || {
        let version = pool.version(header).map_err(site.failed("read the image's header"))?;
        let (_, tag) = pool.lock(header).map_err(site.failed("read the image's lock"))?;
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
        let gone =
            || site.failed("release the lock")(io::Error::from_raw_os_error(libc::ETIMEDOUT));
        current.clients.lifted = Some(released.ok_or_else(gone)?);
        owner.swap(pool, &current.renewed())?;
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
    } else if site.facts()?.features & FEATURE_NON_PRIMARY != 0 {
        Start::Guarded
    } else {
        // An earlier attempt has lifted the guard, and could not set it again.
        Start::Unguarded(untouched()?)
    };
    let spot = Spot { site: &site, header, client: &claim.address, guarded: claim.guarded };
    let taken = spot.take(start, owner, &current)?;
    if !taken.undisturbed {
        let superseded = Some(DISTURBED.into());
        owner.swap(pool, &Ownership { superseded, ..current.renewed() })?;
        return Err(fenced());
    }
    tracing::info!(image = %place.what, "the image's handle had turned read-only; it is replaced");
    Ok(taken.image)
}
