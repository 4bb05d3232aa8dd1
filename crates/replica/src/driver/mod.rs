//! The two sides of a second copy as a host runs them, without I/O.
//!
//! A driver joins a machine to the core, to what comes over the connection, and to time. It answers
//! with turns, which its host takes in their order. A daemon takes them with sockets and a backend,
//! the simulator with its own.

mod lost;
mod owner;
mod peer;

pub use lost::PeerLost;
pub use owner::{OwnerDriver, OwnerTurn, PeerCopyNeeded, RecordAnswer};
pub use peer::{PeerDriver, PeerTurn, holds, may_take_over};
