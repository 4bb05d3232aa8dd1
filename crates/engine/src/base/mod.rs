//! What every room stands on: memory, effects on their way out and in flight, and small tools.

pub mod device;
pub mod mem;
#[cfg(feature = "mutations")]
pub mod mutation;
#[cfg(not(feature = "mutations"))]
pub(crate) mod mutation;
pub(crate) mod out;
pub(crate) mod pools;
pub(crate) mod util;
