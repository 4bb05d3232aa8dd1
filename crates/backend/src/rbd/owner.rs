//! The ownership record of an image: a RADOS object beside it, changed by compare-and-set.

use super::cluster::IoCtx;
use crate::error::BackendError;
use crate::record::{Ownership, RECORD_BYTES_MAX};
use std::io;

/// The record's object with what was last seen in it.
pub(super) struct OwnerObject {
    what: String,
    object: String,
    /// Version of the object; `None` while there is none.
    version: Option<u64>,
}

impl OwnerObject {
    /// Reads the record.
    pub(super) fn read(
        what: &str,
        pool: &IoCtx,
        object: &str,
    ) -> Result<(OwnerObject, Option<Ownership>), BackendError> {
        let found = pool
            .read(object, RECORD_BYTES_MAX)
            .map_err(|e| BackendError::io(what, "read the ownership record", e))?;
        let (version, record) = match found {
            None => (None, None),
            Some((bytes, version)) => {
                (Some(version), Some(Ownership::from_json(&format!("{what} (object {object})"), &bytes)?))
            }
        };
        Ok((OwnerObject { what: what.into(), object: object.into(), version }, record))
    }

    /// Writes the record if nobody has changed it since this was read or written.
    pub(super) fn swap(&mut self, pool: &IoCtx, record: &Ownership) -> Result<(), BackendError> {
        let swapped = pool.swap(&self.object, self.version, &record.to_json());
        self.version = Some(swapped.map_err(|e| self.swap_error(e))?);
        Ok(())
    }

    fn swap_error(&self, e: io::Error) -> BackendError {
        let what = self.what.clone();
        match e.raw_os_error() {
            _ if is_other_version(&e) => BackendError::Locked {
                what,
                holder: "another tidepool is changing its ownership; look who, then try again".into(),
            },
            Some(libc::ESHUTDOWN) => BackendError::Fenced { what },
            _ => BackendError::io(what, "write the ownership record", e),
        }
    }
}

/// What Ceph returns for a version that is not the one asserted, and for an object that exists.
pub(super) fn is_other_version(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ERANGE | libc::EOVERFLOW | libc::EEXIST | libc::ENOENT))
}
