//! Simulated disks, backends and clients under the real core; one seed replays a run.
//!
//! [`Life`] takes the core through a life full of faults: kills, power losses, stopped and failing
//! backends, a cache device that forgets and dies. Time, chance and all input and output are
//! simulated, so that a seed decides everything. The [`checker`] knows nothing of the core: it
//! knows the guarantees.

pub mod api;
pub mod baseline;
pub mod ceph;
pub mod checker;
pub mod coverage;
pub mod crowd;
pub mod cuts;
pub mod disk;
pub mod evidence;
mod jobs;
pub mod life;
pub mod machine;
#[cfg(feature = "mutations")]
pub mod mutants;
pub mod pair;
pub mod recording;
pub mod rng;
pub mod store;
pub mod trace;
pub mod world;

pub use life::{Kind, Life};
pub use machine::{backend, redo};
pub use world::{Outcome, World, plan, volume};
