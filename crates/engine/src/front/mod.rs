//! What clients ask for: changes, reads, flushes, and when each of them is answered.

pub(crate) mod ack;
pub(crate) mod change;
pub(crate) mod read;
