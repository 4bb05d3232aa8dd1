//! What this host does about second copies: where they may be, how long it waits for other hosts,
//! and what those may do here.

use crate::service::doors::Doors;
use crate::service::peers::{Hosts, Images, Route};
use crate::units::Duration;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_engine::api::Degraded;
use tidepool_replica::Limits;

/// What is to be done about second copies, and the volumes' own sockets.
#[derive(Clone, Default)]
pub struct Pairs {
    /// Where they may be, the best first.
    pub(in crate::service) peers: Arc<[Route]>,
    /// Others' may be here.
    pub(in crate::service) takes_copies: bool,
    /// They come over the network, and not from other daemons of this host alone.
    pub(in crate::service) takes_from_hosts: bool,
    /// What write-back does while there is none that counts, and no loss is accepted.
    pub(in crate::service) without_peer: Degraded,
    /// How long this host waits for others.
    pub(in crate::service) limits: Limits,
    /// Which hosts may do what here.
    pub(in crate::service) hosts: Arc<Hosts>,
    /// Images that they may name, besides those of volumes that are known here.
    pub(in crate::service) images: Vec<Images>,
    /// Accepted loss of volumes of which nothing is said.
    pub(in crate::service) accept_loss: Option<Duration>,
    /// The volumes' own sockets, as far as they are made already.
    pub(in crate::service) doors: Arc<Doors>,
}

impl Pairs {
    /// Volumes that are written here are to have second copies.
    pub(super) fn are_wanted(&self) -> bool {
        !self.peers.is_empty()
    }

    /// What write-back does while there is no second copy that counts, of a volume with this
    /// accepted loss.
    pub(super) fn alone_with(&self, accept_loss: Option<Duration>) -> Degraded {
        if accept_loss.is_some() { Degraded::No } else { self.without_peer }
    }

    /// How long an ownership record is waited for.
    pub(super) fn record_wait(&self) -> Time {
        Time::from_nanos(self.limits.record_ns)
    }
}
