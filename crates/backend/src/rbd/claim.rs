//! What an owner knows about the image that it holds.

use super::cluster::Cluster;
use super::owner::OwnerObject;
use super::place::{Place, Site};
use crate::error::BackendError;
use crate::record::Ownership;
use std::sync::Arc;

/// What the owner of an image needs to replace its handle, to change the image or its record, and
/// to release it.
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

impl Claim {
    /// The image's place, with a pool handle of its own.
    pub(super) fn site(&self) -> Result<Site, BackendError> {
        Site::new(self.place.clone(), Arc::clone(&self.cluster))
    }
}

/// Records that the cache's content is no longer to be trusted; see [`crate::Transfer::Disown`].
pub(super) fn disown(claim: &Claim) -> Result<(OwnerObject, Ownership), BackendError> {
    let Site { place, pool, .. } = &claim.site()?;
    let (mut owner, record) = OwnerObject::read(&place.what, pool, &claim.owner)?;
    if !record.is_some_and(|record| record.is_of(&claim.record)) {
        return Err(BackendError::Fenced { what: place.what.clone() });
    }
    let record = claim.record.disowned();
    owner.swap(pool, &record)?;
    Ok((owner, record))
}
