//! What others may see of the reactor's thread without asking it: that it makes rounds.

use std::sync::atomic::{AtomicU64, Ordering};

/// Written by the reactor, read by whoever watches it.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    rounds: AtomicU64,
}

impl Pulse {
    /// A round begins.
    pub(super) fn beat(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// How many rounds there were.
    pub(super) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }
}
