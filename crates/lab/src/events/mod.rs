//! Clients that keep account of what they were promised, for what happens under load.
//!
//! Load generators tell how fast something was. What is needed here is another thing: which writes were acknowledged, how long each
//! request took from when it was due, and both of them also where some request is never answered. So these clients are the lab's own:
//! NBD clients, since an NBD export is what a hypervisor has on every access path.

pub(crate) mod client;
pub(crate) mod course;
pub(crate) mod ledger;
