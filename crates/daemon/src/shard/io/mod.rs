//! What the core works on: the cache device, the volumes' backends, and a volume in memory for
//! measurements.
//!
//! | file | what it is about |
//! |---|---|
//! | `device` | Transfers with the cache device |
//! | `memory` | A core that keeps volumes in memory and does nothing else |
//! | `volume` | The volumes of a shard, as the reactor knows them |

pub(super) mod device;
pub mod memory;
pub(super) mod volume;
