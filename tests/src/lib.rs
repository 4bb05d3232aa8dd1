//! What the tests with real parts share: a daemon with its files in a directory of its own, and rounds of kills.

pub mod crash;
pub mod disk;
pub mod lost;
pub mod lost_postgres;
pub mod postgres;
pub mod rig;

pub use rig::{Rig, RigOptions};
