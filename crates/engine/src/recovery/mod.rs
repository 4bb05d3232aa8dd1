//! A cache device before a core runs on it, and without one: layout, opening, replay, inspection.
//!
//! | file | what it is about |
//! |---|---|
//! | `content` | What a cache device holds of its volumes, read while no engine runs on it |
//! | `init` | Laying out a cache device, and looking at one without changing it |
//! | `recover` | opening a cache device: checkpoint, summaries, then replay |
//! | `replay` | the log's tail: where it ends, what is torn, what is corrupt |

pub(crate) mod content;
pub(crate) mod init;
pub(crate) mod recover;
pub(crate) mod replay;
