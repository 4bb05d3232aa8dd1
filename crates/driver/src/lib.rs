//! The way to the kernel: the cache device, opened, locked and preallocated, and the io_uring that the
//! reactor thread drives device, sockets and timers with.

mod cache;
mod clock;
mod device;
mod ring;
mod slab;

pub use cache::{CACHE_BYTES_MIN, CacheError, CacheFile, has_died};
pub use clock::now;
pub use device::BlockingDevice;
pub use ring::{Completion, Ring, RingError};
pub use slab::Slab;
