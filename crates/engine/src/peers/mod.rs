//! Hosts that have copies of each other's volumes: what a copy here remembers of its owner's log,
//! what is read for the other host, and blocks that are asked back from it (RFC 9).
//!
//! | file | what it is about |
//! |---|---|
//! | `fetch` | Records that an owner's log has lost with its host's power and its peer's log has (RFC 9) |
//! | `follower` | records of an owner go into this device's log |
//! | `repair` | A dirty block that does not verify any more, and whose second copy is at the peer (RFC 9) |

pub(crate) mod fetch;
mod follower;
pub(crate) mod repair;

use crate::api::VolumeId;
use crate::base::table::Table;
use crate::base::util::Slab;
use crate::peers::fetch::FetchRead;
use crate::peers::follower::Replica;
use crate::peers::repair::Repairs;

/// What is done for other hosts and asked of them.
pub(crate) struct Peers {
    /// Of volumes that are copies.
    copies: Table<Replica>,
    repairs: Repairs,
    /// Reads of records in flight.
    fetches: Slab<FetchRead>,
}

impl Peers {
    pub(crate) fn new() -> Peers {
        Peers { copies: Table::new(), repairs: Repairs::default(), fetches: Slab::with_capacity(4) }
    }

    /// A volume has come, or begins anew.
    pub(crate) fn add(&mut self, id: VolumeId) {
        self.copies.add(id);
    }

    /// A volume is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) {
        self.copies.remove(id);
    }
}
