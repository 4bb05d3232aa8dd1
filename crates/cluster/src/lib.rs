//! What measurements and tests run against: throw-away real Ceph clusters, on the loopback
//! interface or in a network of their own ([`network`]), emulated devices, and guests.
//!
//! A [`ceph::Cluster`] is a monitor, a manager and a few OSDs on files. It is up in seconds. It is
//! gone when it is dropped, and also when the process that started it is killed: its daemons carry
//! a parent-death signal ([`process`]), and its directory is swept by the next process that needs a
//! directory ([`scratch`]).
//!
//! | where | what |
//! |---|---|
//! | `process`, `scratch`, `mounts` | children that end with their parent, and directories that nothing outlives |
//! | `network`, `switch` | nodes in namespaces, and the delay between them |
//! | `device` | emulated disks and SSDs: `model` in simulated time, `server` over FUSE, `faults` what goes wrong |
//! | `ceph`, `release` | Ceph, and another release of it in a root of its own |
//! | `vm`, `guest`, `qemu` | QEMU guests with Debian's kernel; an OSD under a kernel of its own |
//! | `fio`, `nbd`, `stamps`, `random` | loads, and blocks that show by whom and when they were written |
//! | `machine` | what a result says of the machine that it was measured on |
//!
//! Nothing here knows what is measured, or why.

pub mod ceph;
pub mod device;
pub mod fio;
pub mod guest;
pub mod machine;
pub mod mounts;
pub mod nbd;
pub mod network;
pub mod process;
pub mod qemu;
pub mod random;
pub mod release;
pub mod scratch;
pub mod stamps;
mod switch;
pub mod vm;

pub use ceph::{Cluster, ClusterError, ClusterOptions, Store};
pub use process::Process;
pub use scratch::Scratch;
