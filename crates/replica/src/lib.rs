//! A second copy of a volume, without I/O (RFC 9): who may do what as state machines, and what the
//! two hosts say to each other as bytes ([`wire`]).
//!
//! Events go in, effects come out, and what stands in the ownership record changes by
//! compare-and-set only. The rules are tried against crashes, restarts, lost messages and lost
//! answers by a model (`tests/model/`), which drives these very machines.

/// As the core's: whether the deliberate bug is in force.
macro_rules! mutated {
    ($name:ident) => {{
        #[cfg(feature = "mutations")]
        let mutated = tidepool_engine::mutation::is(tidepool_engine::mutation::Mutation::$name);
        #[cfg(not(feature = "mutations"))]
        let mutated = false;
        mutated
    }};
}

mod api;
mod driver;
mod limits;
mod owner;
mod peer;
mod record;
mod session;
pub mod wire;

pub use api::{Arrived, Copies, Copy, Party, Promise, Record, Submit, Tail};
pub use driver::{
    OwnerDriver, OwnerTurn, PeerCopyNeeded, PeerDriver, PeerLost, PeerTurn, RecordAnswer, holds,
    may_take_over,
};
pub use limits::{LEASE_V1_NS, Limits};
pub use owner::{Effect, Event, Owner, Phase};
pub use peer::{Peer, Rejected};
pub use record::{Resume, resume};
