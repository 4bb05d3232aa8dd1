//! What every room stands on: memory, effects on their way out and in flight, and small tools.
//!
//! | file | what it is about |
//! |---|---|
//! | `checkpoints` | What rooms know of checkpoints, and what they ask of them |
//! | `consequences` | What somebody has found out and everybody has to hear of |
//! | `device` | Blocking access to the cache device, for format, recovery and inspection |
//! | `flight` | What each effect in flight is for |
//! | `mem` | The memory that requests, log appends and drains travel in |
//! | `mutation` | Deliberate bugs, for the test of those who look for bugs |
//! | `out` | What comes out of the core |
//! | `pools` | Buffers that the core uses itself, set aside when it is opened |
//! | `progress` | How far the drain of one volume is, and what may be acknowledged ahead of it |
//! | `shared` | What the core works with |
//! | `slab` | A table of operations in flight, with a fixed capacity |
//! | `table` | What a room keeps about each volume, by the volume's number |
//! | `util` | Small tools of the core |

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
