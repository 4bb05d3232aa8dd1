//! The ownership record of an image: a RADOS object beside it, changed by compare-and-set.

use super::cluster::IoCtx;
use crate::error::BackendError;
use crate::record::{Ownership, RECORD_BYTES_MAX};
use std::io;

/// The record's object with what was last seen in it.
#[derive(Clone)]
pub(super) struct OwnerObject {
    what: String,
    object: String,
    /// Version of the object; `None` while there is none.
    version: Option<u64>,
    /// The record in that version.
    record: Option<Ownership>,
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
        let owner = OwnerObject { what: what.into(), object: object.into(), version, record: record.clone() };
        Ok((owner, record))
    }

    /// Writes the record if nobody has changed it since this was read or written.
    pub(super) fn swap(&mut self, pool: &IoCtx, record: &Ownership) -> Result<(), BackendError> {
        let swapped = pool.swap(&self.object, self.version, &record.to_json());
        self.version = Some(swapped.map_err(|e| self.swap_error(e))?);
        self.record = Some(record.clone());
        Ok(())
    }

    /// The record as it was last read or written.
    pub(super) fn seen(&self) -> Option<&Ownership> {
        self.record.as_ref()
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
