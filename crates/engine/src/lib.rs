//! Tidepool's core: a deterministic state machine with no I/O, threads, clock or randomness of its
//! own.
//!
//! [`Engine`] is one cache device with its volumes. Events go in, effects come out ([`api`]);
//! before it runs, [`format_device`] lays a device out and [`Engine::open`] brings it back, through
//! [`device`]. [`Contents`] reads a device on which no core runs.
//!
//! The rooms, from the bottom up, and which may use which, by path and by method (RFC 10 says why,
//! `make tidy` whether it is so):
//!
//! | room | what it is about | may use |
//! |---|---|---|
//! | [`api`] | what goes into the core, and what comes out | nothing; everybody above may use it |
//! | [`format`](mod@format) | what stands on the device, and beside an image | nothing |
//! | [`status`] | what is said of a device and its volumes | `format`; everybody above may use it |
//! | `base` | memory, effects on their way out, small tools | `format` |
//! | `blocks` | where each block is, and what changes that | `base`, `format` |
//! | `backend` | the backend of a volume: whether it works, and what its flushes cover | `base` |
//! | `log` | records, appends and segments that are being written | `base`, `format`, `blocks` |
//! | `ground` | what rooms share: memory, places, the log, and what is true of each volume | `base`, `format`, `blocks`, `log`, `backend` |
//! | `front` | clients: changes, reads, flushes, and when they are answered | `base`, `format`, `blocks`, `log`, `backend`, `ground` |
//! | `cache` | what is kept of what was read, and how segments become free | `base`, `format`, `blocks`, `log`, `backend`, `ground` |
//! | `drain` | what is dirty goes to the image, in groups or not | `base`, `format`, `blocks`, `log`, `backend`, `ground` |
//! | `peers` | copies of other hosts' volumes, and blocks that are asked back | `base`, `format`, `blocks`, `log`, `backend`, `ground` |
//! | `checkpoint` | from where the next start begins | `base`, `format`, `blocks`, `log`, `backend`, `ground` |
//! | `control` | volumes come, change and go | everything above |
//! | `recovery` | a device on which no core runs yet, or none at all | everything above |
//! | `engine` | the loop, of which `control` and `recovery` are parts | everything |

pub mod api;
mod backend;
mod base;
mod blocks;
mod cache;
mod checkpoint;
mod control;
mod drain;
mod engine;
pub mod format;
mod front;
mod ground;
mod log;
mod peers;
mod recovery;
pub mod status;

pub use api::{AddError, Attach};
#[cfg(feature = "mutations")]
pub use base::mutation;
pub use base::shared::EngineConfig;
pub use base::{device, mem};
pub use blocks::own::{OBJECT_BYTES, OwnObjects, Source};
pub use blocks::{index, marks};
pub use cache::ghost;
pub use engine::Engine;
pub use format::redo;

pub use peers::fetch::FETCH_BYTES;
pub use recovery::content::Contents;
pub use recovery::init::{CheckReport, FormatError, FormatOptions, check, format_device, inspect};
pub use recovery::recover::OpenError;
pub use status::{Content, Inspection, RecoveryReport, Stretch};
