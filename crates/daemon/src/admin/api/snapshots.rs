//! Messages about snapshots of a volume.

use serde::{Deserialize, Serialize};
use tidepool_backend::SnapshotChange;

/// A snapshot to be taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeSnapshot {
    /// What it is to be called.
    pub snapshot: String,
}

/// A snapshot that has been taken: the volume with everything that was acknowledged before it was
/// asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The volume.
    pub volume: String,
    /// Where it is, as `rbd` spells it.
    pub snapshot: String,
    /// How long it took, the drain of what was dirty included. Clients do not wait for it.
    pub seconds: f64,
}

/// A snapshot of the image of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// Its name.
    pub name: String,
    /// Its number, which no other snapshot of the image gets.
    pub id: u64,
    /// Size that the volume had in bytes.
    pub size_bytes: u64,
    /// It cannot be removed as long as it is protected.
    pub protected: bool,
    /// When it was taken, in seconds since 1970, as far as known.
    pub time_unix_s: Option<u64>,
}

/// What is to be done with a snapshot that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotAction {
    /// Remove it.
    Remove,
    /// Keep it from being removed.
    Protect,
    /// Let it be removed again.
    Unprotect,
}

impl From<SnapshotAction> for SnapshotChange {
    fn from(action: SnapshotAction) -> SnapshotChange {
        match action {
            SnapshotAction::Remove => SnapshotChange::Remove,
            SnapshotAction::Protect => SnapshotChange::Protect,
            SnapshotAction::Unprotect => SnapshotChange::Unprotect,
        }
    }
}

/// A change of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeSnapshot {
    /// Its name.
    pub snapshot: String,
    /// What is to be done with it.
    pub action: SnapshotAction,
}

/// A snapshot that has been changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedSnapshot {
    /// The volume.
    pub volume: String,
    /// Where the snapshot is, or was, as `rbd` spells it.
    pub snapshot: String,
    /// What was done with it.
    pub action: SnapshotAction,
}

/// A volume that is to become what it was at a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollBack {
    /// The snapshot's name.
    pub snapshot: String,
}

/// A volume that has become what it was at a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The volume.
    pub volume: String,
    /// Where the snapshot is, as `rbd` spells it.
    pub snapshot: String,
    /// For how long the volume was not served.
    pub seconds: f64,
}
