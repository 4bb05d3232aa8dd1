//! Access to the kernel: the cache device, which is opened, locked and preallocated here, and the
//! io_uring through which the reactor thread drives the device, sockets and timers.

mod cache;
mod clock;
mod device;
mod ring;

pub use cache::{CACHE_BYTES_MIN, CacheError, CacheFile, has_died};
pub use clock::now;
pub use device::BlockingDevice;
pub use ring::{Completion, Ring, RingError};
