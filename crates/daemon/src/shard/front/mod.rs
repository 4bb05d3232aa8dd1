//! What stands before the core: memory and work shared among volumes, gates, and clients that come
//! before their volume.
//!
//! | file | what it is about |
//! |---|---|
//! | `budget` | Who may take how much of the arena |
//! | `coming` | Volumes that are on their way to being served |
//! | `effort` | How much clients, other hosts and the control plane get done between two looks at the ring, so that none keeps the others waiting |
//! | `gate` | Writes that begin or end inside a sector |
//! | `guests` | Clients on the way to another host |

pub(super) mod budget;
pub(super) mod coming;
pub(super) mod effort;
pub(super) mod gate;
pub(super) mod guests;
