//! The guard of an image whose newest data is in a cache.
//!
//! An image with dirty data in a cache looks like any other. If plain librbd or a kernel wrote to it,
//! for instance after the cache's host has died and its lock has fallen, the volume would fork. So
//! while a cache owns an image, the feature bit `non-primary` is set in its header: every other client
//! then refuses to write, snapshot or resize with EROFS, and still reads and exports. The bit is set
//! through the class method `rbd.set_features` and without telling watchers: the owner's own handle
//! does not learn of it and goes on writing.
//!
//! If the handle refreshes its view of the header nevertheless (its watch was lost and renewed because
//! an OSD was away), its writes fail with EROFS. [`regain`] then proves that lock and ownership are still
//! ours, lifts the bit, makes the handle refresh, and sets the bit again.

use super::address;
use super::cluster::{Cluster, IoCtx};
use super::image::{FEATURE_NON_PRIMARY, Image};
use super::owner::OwnerObject;
use super::place::Place;
use crate::error::BackendError;
use crate::record::Ownership;
use std::io;
use std::sync::Arc;
use tidepool_engine::api::IoError;

/// Sets or lifts the guard. Returns the header object's version after it: whoever takes the lock
/// later changes it.
pub(super) fn set(pool: &IoCtx, header: &str, on: bool) -> io::Result<u64> {
    let features = if on { FEATURE_NON_PRIMARY } else { 0 };
    let mut input = [0u8; 16];
    input[..8].copy_from_slice(&features.to_le_bytes());
    input[8..].copy_from_slice(&FEATURE_NON_PRIMARY.to_le_bytes());
    pool.exec(header, c"rbd", c"set_features", &input)
}

/// What [`regain`] works with; everything in it outlives the backend's transfers.
#[derive(Clone)]
pub(super) struct Claim {
    pub(super) cluster: Arc<Cluster>,
    pub(super) image: Arc<Image>,
    pub(super) place: Place,
    pub(super) header: String,
    pub(super) owner: String,
    pub(super) address: String,
    pub(super) record: Ownership,
    /// The guard is in use; without it only the handle is refreshed.
    pub(super) guarded: bool,
}

/// Makes a handle that has turned read-only writable again, if the image is still ours. Blocks.
pub(super) fn regain(claim: &Claim) -> Result<(), IoError> {
    let what = &claim.place.what;
    let errno = |e: &io::Error| match e.raw_os_error() {
        Some(libc::ESHUTDOWN) | None => IoError::Fenced,
        Some(errno) => IoError::Errno(errno),
    };
    let pool = claim.cluster.pool(&claim.place.pool, &claim.place.namespace).map_err(|_| IoError::Fenced)?;
    let locker = pool.locker(&claim.header).map_err(|e| errno(&e))?;
    if !locker.is_some_and(|locker| address::same(&locker.address, &claim.address)) {
        tracing::error!(image = %what, "another client has taken the image's lock: the volume is fenced");
        return Err(IoError::Fenced);
    }
    match OwnerObject::read(what, &pool, &claim.owner) {
        Ok((_, Some(record)))
            if record.generation == claim.record.generation
                && record.cache_uuid == claim.record.cache_uuid => {}
        Ok(_) => {
            tracing::error!(image = %what, "another cache owns the image: the volume is fenced");
            return Err(IoError::Fenced);
        }
        Err(BackendError::Io { source, .. }) => return Err(errno(&source)),
        Err(_) => return Err(IoError::Fenced),
    }
    let reopened = (|| {
        set(&pool, &claim.header, false)?;
        // A watcher that does not answer in time is no reason to give up: ours has either answered or refreshes
        // with its next call.
        if let Err(e) = pool.notify_header_update(&claim.header) {
            tracing::debug!(image = %what, error = %e, "not every watcher answered a header update");
        }
        claim.image.sizes()?;
        set(&pool, &claim.header, claim.guarded)
    })();
    match reopened {
        Ok(_) => {
            tracing::info!(image = %what, "the image's handle had turned read-only; it is writable again");
            Ok(())
        }
        Err(e) => Err(errno(&e)),
    }
}
