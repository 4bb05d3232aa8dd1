//! The read cache: what is kept, what is remembered of what was dropped, and how segments become free again.

pub mod ghost;
pub(crate) mod reclaim;
