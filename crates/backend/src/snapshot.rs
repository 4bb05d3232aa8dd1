//! Snapshots of an image.

use serde::{Deserialize, Serialize};

/// The origin of a snapshot, which decides what may remove it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// A user, who has given it a name.
    User,
    /// A snapshot of a group of images.
    Group,
    /// It was removed while it had clones, and goes with the last of them.
    Trash,
    /// Mirroring.
    Mirror,
    /// An origin that this release does not know.
    Unknown,
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Number of the snapshot; no other snapshot of the image gets it.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Size in bytes that the image had.
    pub size_bytes: u64,
    /// Its origin.
    pub kind: SnapshotKind,
    /// While it is protected it cannot be removed.
    pub protected: bool,
    /// When it was taken, in seconds since 1970; `None` if it is not known.
    pub time_unix_s: Option<u64>,
}

/// A change of an existing snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotChange {
    /// The snapshot is removed.
    Remove,
    /// The snapshot is protected from removal.
    Protect,
    /// The protection is removed.
    Unprotect,
}
