//! What every room stands on: memory, effects on their way out and in flight, and small tools.

pub(crate) mod checkpoints;
pub(crate) mod consequences;

pub mod device;
pub(crate) mod flight;
pub mod mem;
#[cfg(feature = "mutations")]
pub mod mutation;
#[cfg(not(feature = "mutations"))]
pub(crate) mod mutation;
pub(crate) mod out;
pub(crate) mod pools;
pub(crate) mod progress;
pub(crate) mod shared;
mod slab;
pub(crate) mod table;
pub(crate) mod util;
