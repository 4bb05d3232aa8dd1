//! The lab: what is measured on throw-away clusters ([`tidepool_cluster`]), and what it says about
//! where to put SSDs.
//!
//! | where | what |
//! |---|---|
//! | `placement` | where an SSD can stand |
//! | `access` | how clients reach images: librbd, NBD, an iSCSI gateway, from inside a guest |
//! | `testbed` | joins a cluster with its devices, a placement and an access path |
//! | `suite`, `run`, `load`, `collect`, `events` | what is measured, under which load, with which counters, and what happens meanwhile |
//! | `results`, `stats`, `verdict`, `cost`, `report`, `compare`, `exchange` | read what was measured, and nothing else |
//! | `plan`, `qualify` | advice from published rules; whether an SSD is fit |
//!
//! A [`plan::plan`] is advice on where SSDs should go, from published rules, an inventory, and
//! existing results. Nothing is measured for it.

pub mod access;
pub mod breakdown;
pub mod collect;
pub mod compare;
pub mod cost;
pub mod document;
mod events;
pub mod exchange;
pub mod load;
pub mod placement;
pub mod plan;
pub mod qualify;
pub mod report;
pub mod results;
pub mod run;
pub mod stats;
pub mod suite;
#[cfg(test)]
mod synthetic;
pub mod testbed;
pub mod verdict;
mod words;
