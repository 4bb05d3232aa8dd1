//! Backends: the storage where a volume's data is kept in the long run. A file or block device, a
//! RADOS block device image (librbd is loaded at run time), an export of an NBD server, and a file
//! with the latency of a replicated pool.
//!
//! [`open`] takes a [`BackendUri`], checks the ownership of the image, locks it, and returns a
//! [`Backend`] that executes [`Transfer`]s without blocking its caller.

mod backend;
mod changes;
mod check;
mod error;
mod file;
mod given_up;
mod identity;
mod latency;
mod mailbox;
mod nbd;
mod paced;
mod private;
mod rbd;
mod record;
mod recover;
mod redo;
mod snapshot;
mod sweep;
mod uri;

pub use backend::{
    Backend, INFLIGHT_MAX, Layout, OpenOptions, Opened, Parent, Prepared, Release, TakeOver, Transfer,
    abandon, confirm, open, ownership, ownership_by, prepare, take_over,
};
pub use check::{CheckItem, CheckReport, CheckStatus, check};
pub use error::BackendError;
pub use given_up::GivenUp;
pub use identity::{Identity, identity};
pub use private::open_private;
pub use rbd::{Client as RadosClient, FENCE_NS_MIN};
pub use record::{Copies, Fenced, ImageStamp, OwnerState, Ownership, Peer, boot_id, host_name};
pub use recover::{Recovered, progress, recover};
pub use redo::{Loss, Progress};
pub use snapshot::{Snapshot, SnapshotChange, SnapshotKind, snapshots};
pub use sweep::read_all;
pub use uri::{BackendUri, Emulation, UriError};
