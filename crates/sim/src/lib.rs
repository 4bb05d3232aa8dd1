//! Simulated disks, backends and clients under the real core; one seed replays a run.
//!
//! [`Life`] takes the core through a life full of faults: kills, power losses, stopped and failing
//! backends, a cache device that forgets and dies. Time, chance and all input and output are simulated, so
//! that a seed decides everything. The [`checker`] knows nothing of the core: it knows the guarantees.

mod action;
pub mod backend;
pub mod baseline;
pub mod ceph;
pub mod checker;
mod client;
pub mod coverage;
pub mod crowd;
pub mod cuts;
pub mod disk;
pub mod evidence;
mod family;
mod jobs;
pub mod life;
#[cfg(feature = "mutations")]
pub mod mutants;
pub mod pair;
pub mod plan;
pub mod recording;
pub mod redo;
pub mod rng;
mod stop;
pub mod store;
pub mod trace;
pub mod volume;
pub mod world;

pub use life::{Kind, Life};
pub use world::{Outcome, World};
