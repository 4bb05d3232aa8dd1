//! Tidepool's core: a deterministic state machine with no I/O, threads, clock or randomness of its own.
//!
//! [`Engine`] is one cache device with its volumes. Events go in, effects come out ([`api`]); before it
//! runs, [`format_device`] lays a device out and [`Engine::open`] brings it back, through [`device`].
//! [`Contents`] reads a device on which no core runs.
//!
//! The rooms, from the bottom up (RFC 10 says which may use which):
//!
//! | room | what it is about |
//! |---|---|
//! | [`format`](mod@format) | what stands on the device, and beside an image |
//! | `base` | memory, effects on their way out, small tools |
//! | `blocks` | where each block is, and what changes that |
//! | `backend` | the backend of a volume: whether it works, and what its flushes cover |
//! | `log` | records, appends and segments that are being written |
//! | `front` | clients: changes, reads, flushes, and when they are answered |
//! | `cache` | what is kept of what was read, and how segments become free |
//! | `drain` | what is dirty goes to the image, in groups or not |
//! | `peers` | the second copy at another host |
//! | `checkpoint` | from where the next start begins |
//! | `control` | volumes come, change and go |
//! | `recovery` | a device on which no core runs yet, or none at all |

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

#[cfg(feature = "mutations")]
pub use base::mutation;
pub use base::shared::EngineConfig;
pub use base::{device, mem};
pub use blocks::own::{OBJECT_BYTES, OwnObjects, Source};
pub use blocks::{index, marks};
pub use cache::ghost;
pub use control::{AddError, Attach};
pub use engine::Engine;
pub use format::redo;

pub use peers::fetch::FETCH_BYTES;
pub use recovery::content::{Content, Contents, Stretch};
pub use recovery::init::{
    CheckReport, FormatError, FormatOptions, Inspection, check, format_device, inspect,
};
pub use recovery::recover::{OpenError, RecoveryReport};
