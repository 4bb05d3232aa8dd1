//! The real daemon on a cache device that loses its power, returns errors, and stops in the middle
//! of what it is asked for.
//!
//! The device is emulated: every operation of the daemon can be looked at, held, failed or lost.
//! The power failures and errors of the simulator are the same for the core alone; here they go
//! through the kernel, io_uring and the daemon's process.

mod every_operation;
mod killed_at;
mod neighbour;
mod power_lost;
