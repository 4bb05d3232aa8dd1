//! Where each block is: the index of each volume, the marks and segments of the cache device, and what changes them together.

pub(crate) mod arriving;
pub(crate) mod bad;
pub(crate) mod budget;
mod delta;
pub(crate) mod extents;
pub mod index;
pub(crate) mod ledger;
pub mod marks;
pub(crate) mod own;
pub(crate) mod space;
mod superseded;
