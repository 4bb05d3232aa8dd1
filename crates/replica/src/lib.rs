//! Who may do what while a volume has a second copy: the rules of RFC 9 as state machines without I/O.
//!
//! Events go in, effects come out, and what stands in the ownership record changes by compare-and-set only. The
//! rules are tried against crashes, restarts, lost messages and lost answers by a model (`tests/model.rs`), which
//! drives these very machines.

mod owner;
mod peer;
mod record;

pub use owner::{Effect, Event, Owner, Phase};
pub use peer::{Copy, Peer, Rejected};
pub use record::{Copies, Party, Record, Resume, Tail, resume};
