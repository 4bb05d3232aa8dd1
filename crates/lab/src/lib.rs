//! What measurements and tests run against: throw-away real Ceph clusters, on the loopback
//! interface or in a network of their own ([`network`]), and emulated devices.
//!
//! A [`cluster::Cluster`] is a monitor, a manager and a few OSDs on files. It is up in seconds. It
//! is gone when it is dropped, and also when the process that started it is killed: its daemons
//! carry a parent-death signal ([`process`]), and its directory is swept by the next process that
//! needs a directory ([`scratch`]).
//!
//! | where | what |
//! |---|---|
//! | `device` | emulated disks and SSDs: `model` in simulated time, `server` over FUSE, `faults` what goes wrong |
//! | `cluster`, `network`, `release` | Ceph, its nodes in namespaces, another release of it in a root of its own |
//! | `guest`, `vm` | an OSD under a kernel of its own; QEMU guests with Debian's kernel |
//! | `placement` | where an SSD can stand |
//! | `access` | how clients reach images: librbd, NBD, an iSCSI gateway, from inside a guest |
//! | `testbed` | joins these |
//! | `suite`, `run`, `load`, `collect`, `events` | what is measured, under which load, with which counters, and what happens meanwhile |
//! | `results`, `stats`, `verdict`, `cost`, `report`, `compare`, `exchange` | read what was measured, and nothing else |
//! | `plan`, `qualify` | advice from published rules; whether an SSD is fit |
//!
//! A [`plan::plan`] is advice on where SSDs should go, from published rules, an inventory, and
//! existing results. Nothing is measured for it.

pub mod access;
pub mod breakdown;
pub mod cluster;
pub mod collect;
pub mod compare;
pub mod cost;
pub mod device;
pub mod document;
mod events;
pub mod exchange;
pub mod fio;
pub mod guest;
pub mod load;
pub mod machine;
mod mounts;
pub mod nbd;
pub mod network;
pub mod placement;
pub mod plan;
pub mod process;
mod qemu;
pub mod qualify;
mod random;
pub mod release;
pub mod report;
pub mod results;
pub mod run;
pub mod scratch;
pub mod stamps;
pub mod stats;
pub mod suite;
mod switch;
#[cfg(test)]
mod synthetic;
pub mod testbed;
pub mod verdict;
pub mod vm;
mod words;

pub use cluster::{Cluster, ClusterError, ClusterOptions, Store};
pub use process::Process;
pub use scratch::Scratch;
