//! Where each block is: the index of each volume, the marks and segments of the cache device, and
//! what changes them together.
//!
//! | file | what it is about |
//! |---|---|
//! | `arriving` | Blocks that are on their way from an image into the read cache, and the reads that wait for them |
//! | `bad` | Blocks of the cache device that do not verify any more |
//! | `budget` | How much of the cache device may hold what is not in an image, and how much of that each volume may have |
//! | `delta` | What a range of a volume's log has changed |
//! | `extents` | ranges that a checkpoint has to write out |
//! | `index` | where each block of a volume is |
//! | `ledger` | what changes index, marks, counts and deltas together |
//! | `marks` | What is known about each block of the cache device itself |
//! | `own` | what a clone's image has itself, and not its parent |
//! | `space` | The segments of the cache device |
//! | `superseded` | Copies that are not current any more |

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
