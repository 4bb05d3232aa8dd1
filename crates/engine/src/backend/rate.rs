//! How fast a volume's backend takes what the drain has for it.

use crate::api::Nanos;

/// How fast the drain has been while it was at work, as a decaying mean; for back-pressure.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DrainRate {
    bytes_per_s: f64,
    /// Since when the drain has been at work without a pause.
    busy_since: Nanos,
    /// For how long it was before, and what it has moved, since the rate was last taken.
    busy_ns: Nanos,
    bytes: u64,
    /// When it last moved something.
    last: Nanos,
}

/// Work over which the drain's rate is taken.
const RATE_WINDOW_NS: Nanos = 250_000_000;
/// A drain without progress for this long counts as stopped.
const STALE_NS: Nanos = 2_000_000_000;

impl DrainRate {
    /// The drain, which had nothing in flight, goes on.
    pub(crate) fn begin(&mut self, now: Nanos) {
        self.busy_ns += self.last.saturating_sub(self.busy_since);
        self.busy_since = now;
    }

    /// It has moved something.
    pub(crate) fn note(&mut self, now: Nanos, bytes: u64) {
        // What completes together counts together: the rate is taken up to the last time that
        // something did.
        let busy_ns = self.busy_ns + self.last.saturating_sub(self.busy_since);
        if now > self.last && busy_ns >= RATE_WINDOW_NS {
            let rate = self.bytes as f64 * 1e9 / busy_ns as f64;
            let keep =
                if busy_ns > 8 * RATE_WINDOW_NS || self.bytes_per_s == 0.0 { 0.0 } else { 0.7 };
            self.bytes_per_s = keep * self.bytes_per_s + (1.0 - keep) * rate;
            (self.busy_since, self.busy_ns, self.bytes) = (self.last.max(self.busy_since), 0, 0);
        }
        self.bytes += bytes;
        self.last = now;
    }

    /// Nothing has been drained for so long that the rate says nothing about now.
    pub(crate) fn is_stale(&self, now: Nanos) -> bool {
        self.bytes_per_s == 0.0 || now.saturating_sub(self.last) > STALE_NS
    }

    /// Bytes per second; never below 64 KiB so that a hold always ends.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.bytes_per_s.max(65536.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drains_rate_is_that_of_its_work_however_long_it_pauses() {
        const MIB: u64 = 1 << 20;
        let mut rate = DrainRate::default();
        let mut now = 0;
        for _ in 0..100 {
            // A hundredth of a second at 100 MiB a second, then a pause.
            rate.begin(now);
            now += 10_000_000;
            rate.note(now, MIB);
            now += 1_500_000_000;
            assert!(rate.bytes_per_s == 0.0 || (rate.bytes_per_s / MIB as f64 - 100.0).abs() < 1.0);
        }
        assert!(rate.bytes_per_s > 0.0 && !rate.is_stale(now));
        assert!(rate.is_stale(now + STALE_NS));
    }
}
