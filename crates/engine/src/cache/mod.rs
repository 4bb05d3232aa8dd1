//! The read cache: what is kept of what was read, and how segments become free.
//!
//! | file | what it is about |
//! |---|---|
//! | `fills` | what was read from the backend goes into the read cache |
//! | `ghost` | A short memory of blocks that were evicted |
//! | `reclaim` | how segments become free: what is dropped, what is moved |

pub(crate) mod fills;
pub mod ghost;
mod reclaim;

use crate::cache::fills::Fills;
use crate::cache::ghost::Ghost;
use crate::cache::reclaim::Reclaim;

/// The read cache of a device, and reclaim.
pub(crate) struct Cache {
    ghost: Ghost,
    fills: Fills,
    reclaim: Reclaim,
}

impl Cache {
    /// For a device of so many blocks.
    pub(crate) fn new(device_blocks: usize) -> Cache {
        Cache {
            ghost: Ghost::for_device(device_blocks),
            fills: Fills::default(),
            reclaim: Reclaim::default(),
        }
    }

    /// Volumes have other content, or other numbers: what was evicted once says nothing any more.
    pub(crate) fn forget_evicted(&mut self) {
        self.ghost.clear();
    }

    /// Bytes of memory that it takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.ghost.memory_bytes()
    }
}
