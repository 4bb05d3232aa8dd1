//! Results in the formats of others, and those of others beside ours.

pub mod pvc2;
