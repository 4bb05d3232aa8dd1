//! Writes the lab's results in the formats of other programs, and shows results of other programs
//! beside the lab's.

pub mod pvc2;
