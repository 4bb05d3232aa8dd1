//! Sockets: the clients' connections, and the links to other hosts.

pub(super) mod answer;
pub(super) mod connection;
pub(super) mod inbox;
pub(super) mod link;
pub(super) mod listener;
pub(super) mod message;
pub(super) mod outbox;
pub(super) mod places;
pub(super) mod requests;
pub(super) mod secure;
