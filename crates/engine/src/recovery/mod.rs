//! A cache device before a core runs on it, and without one: layout, opening, replay, inspection.

pub(crate) mod content;
pub(crate) mod init;
pub(crate) mod recover;
pub(crate) mod replay;
