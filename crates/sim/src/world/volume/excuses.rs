//! Why requests for a volume may fail or wait.

use tidepool_engine::api::Nanos;

/// What has gone wrong beside the core.
#[derive(Default)]
pub(in crate::world) struct Excuses {
    /// Tick of the last error that its backend returned.
    backend_error: u64,
    /// A flush of its backend has failed, and no flush of a client since.
    flush_failed: bool,
    /// When its backend last was in trouble.
    trouble_at: Nanos,
    /// When it was seen to have failed.
    failed_at: Option<Nanos>,
}

impl Excuses {
    /// Its backend returns an error at this tick.
    pub(in crate::world) fn backend_fails(&mut self, tick: u64) {
        self.backend_error = tick;
    }

    /// Its backend has returned an error after this tick.
    pub(in crate::world) fn backend_failed_after(&self, tick: u64) -> bool {
        self.backend_error > tick
    }

    /// A flush of its backend fails, which no client may have asked for.
    pub(in crate::world) fn flush_fails(&mut self) {
        self.flush_failed = true;
    }

    /// A flush of its backend has failed since this was asked last.
    pub(in crate::world) fn take_flush_failure(&mut self) -> bool {
        std::mem::take(&mut self.flush_failed)
    }

    /// Its backend is in trouble until then.
    pub(in crate::world) fn set_trouble(&mut self, until: Nanos) {
        self.trouble_at = until;
    }

    /// It may wait until then, if not longer.
    pub(in crate::world) fn may_wait(&mut self, until: Nanos) {
        self.trouble_at = self.trouble_at.max(until);
    }

    /// When its backend last was in trouble, 0 for never.
    pub(in crate::world) fn trouble_at(&self) -> Nanos {
        self.trouble_at
    }

    /// When it was seen to have failed.
    pub(in crate::world) fn failed_at(&self) -> Option<Nanos> {
        self.failed_at
    }

    /// It is seen to have failed.
    pub(in crate::world) fn set_failed(&mut self, at: Nanos) {
        self.failed_at = Some(at);
    }

    pub(super) fn forget_life(&mut self) {
        self.failed_at = None;
    }
}
