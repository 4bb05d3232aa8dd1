//! Tidepool's core: a deterministic state machine with no I/O, threads, clock or randomness of its own.

pub mod api;
pub mod device;
pub mod mem;
pub mod status;
