//! What goes into a life, and what comes out.

use crate::coverage::Coverage;
use crate::life::Kind;
use crate::rng::Draws;
use tidepool_engine::api::Nanos;

/// A life that a seed decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Who is in it.
    pub kind: Kind,
    /// The seed.
    pub seed: u64,
    /// Most simulated seconds.
    pub seconds: u64,
}

/// Lives whose seeds follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Set {
    /// Who is in them.
    pub kind: Kind,
    /// Most simulated seconds of each.
    pub seconds: u64,
    /// The first seed.
    pub first: u64,
    /// How many there are.
    pub count: u64,
}

/// What came of a run.
pub struct Outcome {
    /// What its cores did, as numbers.
    pub hashes: Hashes,
    /// Instants at which anything happened.
    pub instants: u64,
    /// What its cores did after these instants, before it failed or after its trace was full.
    pub beyond: Vec<u64>,
    /// What its cores did, as a text, if it was kept.
    pub text: Option<String>,
    /// Events handled.
    pub steps: u64,
    /// Simulated time.
    pub elapsed_ns: Nanos,
    /// What it went through.
    pub coverage: Coverage,
    /// Blocks that its longest recovery read of the device.
    pub recovery_blocks_max: u64,
    /// What went wrong, with the last events before.
    pub failure: Option<String>,
}

/// The hashes of a life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hashes {
    /// Of what was done, in its order.
    pub ordered: u64,
    /// Of what was done, whatever its order within an instant.
    pub unordered: u64,
}

/// A recorded life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// Which life it was.
    pub life: Life,
    /// The first line of what went wrong; empty if nothing did.
    pub failure: String,
    /// What it has drawn.
    pub draws: Draws,
}

/// How a bug was noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caught {
    /// The seed that showed it.
    pub seed: u64,
    /// The beginning of what the checker, or the core itself, said.
    pub what: String,
}
