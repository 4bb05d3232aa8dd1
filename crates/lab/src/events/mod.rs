//! Clients that record acknowledged writes, for events under load.
//!
//! Load generators report how fast something was. Here other things are needed: which writes were
//! acknowledged, how long each request took from the time when it was due, and both also if a
//! request is never answered. So these clients are part of the lab. They are NBD clients, because
//! on the access paths `nbd` and `iscsi` a hypervisor has NBD exports.

pub(crate) mod client;
pub(crate) mod course;
pub(crate) mod ledger;
