//! A copy becomes this host's volume: what there is to remember of that until its image is open.

use tidepool_backend::{Prepared, TakeOver};
use tokio::time::Instant;

/// How a backend is opened that was another host's.
#[derive(Default)]
pub(super) struct Taking {
    /// What was made ready for that.
    pub(super) prepared: Prepared,
    /// It has to be taken over first.
    pub(super) take_over: Option<TakeOver>,
    /// Its former owner may answer reads until then: nothing is acknowledged here before.
    pub(super) serve_from: Option<Instant>,
}

/// Whether a volume is to be served although the cache takes it for a copy: it is being taken over,
/// or gets back what its log has lost.
#[derive(Default)]
pub(super) struct Takeover {
    is_under_way: bool,
    /// Its record was this cache's.
    was_ours: bool,
    /// For the first attempt to open its backend.
    taking: Taking,
}

impl Takeover {
    /// Of a volume whose backend is about to be opened, in this way if it is taken over.
    pub(super) fn new(taking: Option<Taking>) -> Takeover {
        let is_under_way = taking.is_some();
        let taking = taking.unwrap_or_default();
        Takeover { is_under_way, was_ours: is_under_way && taking.take_over.is_none(), taking }
    }

    /// The cache takes the volume for a copy, and it is to be served all the same.
    pub(super) fn is_under_way(&self) -> bool {
        self.is_under_way
    }

    /// A volume of this host's own gets back what its log has lost.
    pub(super) fn begin_own(&mut self) {
        (self.is_under_way, self.was_ours) = (true, true);
    }

    /// Its image could not be opened, and its record says whether it is this cache's. If it was and
    /// is not any more, another host serves the volume.
    pub(super) fn note(&mut self, is_ours: bool) {
        self.is_under_way &= is_ours || !self.was_ours;
        self.was_ours |= is_ours;
    }

    /// How the next attempt opens the backend. Also a later one has to wait for the last moment of
    /// the former owner.
    pub(super) fn attempt(&mut self) -> Taking {
        Taking {
            prepared: std::mem::take(&mut self.taking.prepared),
            take_over: self.taking.take_over.take(),
            serve_from: self.taking.serve_from,
        }
    }
}
