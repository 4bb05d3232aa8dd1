//! What stands before the core: memory and work shared among volumes, gates, and clients that come before their volume.

pub(super) mod budget;
pub(super) mod coming;
pub(super) mod effort;
pub(super) mod gate;
pub(super) mod guests;
