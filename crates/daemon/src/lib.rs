//! The daemon: configuration, volumes, the reactor that serves them, the admin API, metrics.

pub mod aborts;
pub mod admin;
pub mod audit;
pub mod cache;
pub mod config;
pub mod counters;
pub mod direct;
pub mod door;
pub mod failure;
pub mod listen;
pub mod metrics;
pub mod report;
pub mod service;
pub mod shard;
pub mod state;
pub mod text;
pub mod units;
pub mod volume;
