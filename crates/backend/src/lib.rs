//! Backends: the storage where a volume's data is kept in the long run. A file or block device, a
//! RADOS block device image (librbd is loaded at run time), an export of an NBD server, and a file
//! with the latency of a replicated pool.
//!
//! [`open`](fn@open) takes a [`BackendUri`], checks the ownership of the image, locks it, and
//! returns a [`Backend`] that executes [`Transfer`]s without blocking its caller.
//!
//! The modules from the bottom to the top. A module uses only what its row names, and nothing below
//! its row:
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `error` | why an image cannot be had | |
//! | `uri` | which image is meant | |
//! | `snapshot` | snapshots of an image | |
//! | `private` | files that no other user can read or replace | |
//! | `mailbox` | a queue of completions that wakes the reactor | |
//! | `flock` | locks of open files | `error` |
//! | `api` | [`Backend`], [`Transfer`], and how a backend is opened and closed | `error`, `uri`, `snapshot` |
//! | `record` | the ownership record | `error`, `api` |
//! | `changes` | changes of the record by an open backend | `api`, `record` |
//! | `redo` | the redo beside an image | `error`, `api`, `record` |
//! | `report` | what a check has found | `error`, `uri`, `record` |
//! | `sidecar` | record, lock and redo as files of this host | `error`, `private`, `flock`, `api`, `record`, `changes`, `redo`, `report` |
//! | `given_up` | notes on this host about data that was given up | `error`, `api`, `record`, `sidecar` |
//! | `access` | which cache may have an image by its record | `error`, `api`, `record`, `given_up` |
//! | `rbd` | images in a Ceph pool | `error`, `uri`, `snapshot`, `mailbox`, `api`, `record`, `changes`, `redo`, `report`, `access` |
//! | `file` | files and block devices | `error`, `mailbox`, `flock`, `api`, `record`, `changes`, `redo`, `report`, `sidecar`, `access`, and `rbd` for images that the kernel has mapped |
//! | `identity` | whether two URIs mean one image | `uri` |
//! | `nbd` | exports of an NBD server | `error`, `mailbox`, `api`, `record`, `changes`, `redo`, `report`, `sidecar`, `access`, `identity` |
//! | `latency` | the latency of a replicated pool | `uri` |
//! | `paced` | a backend that is slowed down | `error`, `uri`, `mailbox`, `api`, `latency` |
//! | `sweep` | reads an image from end to end | `mailbox`, `api` |
//! | `open` | opens, checks, takes over and gives up the image that a URI names | everything above |
//! | `recover` | brings an image to its newest cut without its cache | everything above |

mod access;
mod api;
mod changes;
mod error;
mod file;
mod flock;
mod given_up;
mod identity;
mod latency;
mod mailbox;
mod nbd;
mod open;
mod paced;
mod private;
mod rbd;
mod record;
mod recover;
mod redo;
mod report;
mod sidecar;
mod snapshot;
mod sweep;
mod uri;

pub use api::{
    Backend, INFLIGHT_MAX, Layout, OpenOptions, Opened, Parent, Peer, Prepared, Release, TakeOver,
    Transfer,
};
pub use error::BackendError;
pub use given_up::GivenUp;
pub use identity::{Identity, identity};
pub use open::{
    abandon, check, confirm, open, ownership, ownership_by, prepare, snapshots, take_over,
};
pub use private::open_private;
pub use rbd::{Client as RadosClient, FENCE_NS_MIN};
pub use record::{Clients, Copies, Fenced, ImageStamp, OwnerState, Ownership, boot_id, host_name};
pub use recover::{Recovered, progress, recover};
pub use redo::{Loss, Progress};
pub use report::{CheckItem, CheckReport, CheckStatus};
pub use snapshot::{Snapshot, SnapshotChange, SnapshotKind};
pub use sweep::read_all;
pub use uri::{BackendUri, Emulation, UriError};
