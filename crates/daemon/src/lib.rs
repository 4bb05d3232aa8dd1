//! The daemon: configuration, volumes, the reactor that serves them, the admin API, metrics.

pub mod config;
pub mod failure;
pub mod listen;
pub mod units;
pub mod volume;
