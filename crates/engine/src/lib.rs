//! Tidepool's core: a deterministic state machine with no I/O, threads, clock or randomness of its own.
//!
//! [`Engine`] is one cache device with its volumes. Events go in, effects come out ([`api`]); before it
//! runs, [`format_device`] lays a device out and [`Engine::open`] brings it back, through [`device`].
//!
//! Where to look: a write goes through `change` (admission, unaligned and direct writes), `log` (records,
//! appends), `publish` (index), `ack` (flush, write-through, back-pressure) and later `drain` (whole groups first, by `group` and `frame`); a read
//! through `read`, which also admits misses. `reclaim` makes room, `checkpoint`, `recover` and `replay`
//! survive a crash, `space` and `index` say what is where, [`format`](mod@format) how it looks on the device.
//! [`Contents`] reads a device on which no core runs.

mod ack;
pub mod api;
mod base;
mod change;
mod checkpoint;
mod content;
mod control;
mod detach;
mod drain;
mod engine;
mod failure;
mod fetch;
pub mod format;
mod frame;
pub mod ghost;
mod group;
pub mod index;
mod init;
mod log;
pub mod marks;
mod mode;
mod own;
mod parent;
mod peer;
mod publish;
mod read;
mod reclaim;
mod recover;
pub mod redo;
mod repair;
mod replay;
mod replica;
mod resize;
mod snapshot;
mod space;
pub mod status;
mod volume;

#[cfg(feature = "mutations")]
pub use base::mutation;
pub use base::{device, mem};
pub use content::{Content, Contents, Stretch};
pub use control::{AddError, Attach};
pub use engine::{Engine, EngineConfig};
pub use fetch::FETCH_BYTES;
pub use init::{CheckReport, FormatError, FormatOptions, Inspection, check, format_device, inspect};
pub use own::{OBJECT_BYTES, OwnObjects, Source};
pub use recover::{OpenError, RecoveryReport};
