//! What the tests with real parts share: a daemon with its files in a directory of its own, rounds
//! of kills, and machines for the commands of documents.

pub mod crash;
pub mod disk;
pub mod document;
pub mod failover;
pub mod faulty;
pub mod killed;
pub mod lost;
pub mod lost_postgres;
pub mod mapped;
pub mod migration;
pub mod pair;
pub mod postgres;
pub mod rig;
pub mod trio;
pub mod wire;

pub use rig::{Rig, RigOptions};
