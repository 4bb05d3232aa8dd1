//! Tidepool's core: a deterministic state machine with no I/O, threads, clock or randomness of its own.

pub mod api;
pub mod device;
pub mod ghost;
pub mod index;
pub mod marks;
pub mod mem;
pub mod status;
