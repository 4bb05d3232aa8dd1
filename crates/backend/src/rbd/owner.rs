//! The ownership record of an image: a RADOS object beside it, changed by compare-and-set.

use super::pool::IoCtx;
use crate::error::BackendError;
use crate::record::{Ownership, RECORD_BYTES_MAX};
use std::io;

/// The record's object, and the record that was last read from it or written to it.
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
    /// Reads the record; `None` if there is none.
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
            Some((bytes, version)) => (
                Some(version),
                Some(Ownership::from_json(&format!("{what} (object {object})"), &bytes)?),
            ),
        };
        let owner = OwnerObject {
            what: what.into(),
            object: object.into(),
            version,
            record: record.clone(),
        };
        Ok((owner, record))
    }

    /// Writes the record, if no other client has changed it since it was read or written here.
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
                holder: "another tidepool is changing its ownership; look who, then try again"
                    .into(),
            },
            Some(libc::ESHUTDOWN) => BackendError::Fenced { what },
            _ => BackendError::io(what, "write the ownership record", e),
        }
    }
}

/// Whether an error is one that Ceph returns for an object that has another version than the
/// asserted one or is gone, or for an object that must not exist and does.
pub(super) fn is_other_version(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ERANGE | libc::EOVERFLOW | libc::EEXIST | libc::ENOENT))
}
