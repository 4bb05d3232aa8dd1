//! Snapshots of an image.

use crate::{BackendError, BackendUri, rbd};
use serde::{Deserialize, Serialize};

/// Who has made a snapshot and may remove it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// Somebody who has given it a name.
    User,
    /// A snapshot of a group of images.
    Group,
    /// It was removed while it has clones, and goes with the last of them.
    Trash,
    /// Mirroring.
    Mirror,
    /// Something that this release does not know.
    Unknown,
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number, which no other snapshot gets.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Size that the image had in bytes.
    pub size_bytes: u64,
    /// Who has made it.
    pub kind: SnapshotKind,
    /// It cannot be removed as long as it is protected.
    pub protected: bool,
    /// When it was taken, in seconds since 1970, as far as known.
    pub time_unix_s: Option<u64>,
}

/// What is done with a snapshot that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotChange {
    /// It is removed.
    Remove,
    /// It is kept from being removed.
    Protect,
    /// It can be removed again.
    Unprotect,
}

/// The snapshots of an image, of all kinds, the oldest first. Reads the image and changes nothing, also while it is served. Blocks.
///
/// # Errors
/// The image has no snapshots, cannot be found, or cannot be read.
pub fn snapshots(uri: &BackendUri) -> Result<Vec<Snapshot>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::snapshots(uri),
        BackendUri::File { .. } | BackendUri::Nbd(_) => Err(BackendError::Unsupported {
            what: uri.to_string(),
            why: "it is not in a Ceph pool, and has no snapshots".into(),
        }),
    }
}
