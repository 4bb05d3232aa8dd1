//! What the core works on: the cache device, the volumes' backends, and a volume in memory for measurements.

pub(super) mod device;
pub mod memory;
pub(super) mod volume;
