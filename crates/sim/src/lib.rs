//! Simulated disks, backends and clients under the real core; one seed replays a run.
//!
//! [`run`] takes the core through a life full of faults: kills, power losses, stopped and failing
//! backends, a cache device that forgets and dies. Time, chance and all input and output are simulated, so
//! that a seed decides everything. The [`checker`] knows nothing of the core: it knows the guarantees.

mod action;
pub mod backend;
pub mod ceph;
pub mod checker;
mod client;
pub mod coverage;
pub mod crowd;
pub mod cuts;
pub mod disk;
pub mod evidence;
mod family;
#[cfg(feature = "mutations")]
pub mod mutants;
pub mod pair;
pub mod plan;
pub mod redo;
pub mod rng;
mod stop;
pub mod store;
pub mod volume;
pub mod world;

pub use world::{Outcome, World};

/// Runs a seed for at most `seconds` of simulated time. A panic of the core is an outcome, too.
pub fn run(seed: u64, seconds: u64, verbose: bool) -> Outcome {
    let mut world = World::new(seed, seconds, verbose);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    result.unwrap_or_else(|panic| {
        let what = panic.downcast_ref::<String>().map(String::as_str);
        let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
        world.after_panic(&format!("panic: {what}"))
    })
}
