//! The hosts' clocks. None of them is right: one is a little faster than the other, and each begins
//! when its host does.

use crate::rng::Rng;
use tidepool_engine::api::Nanos;

/// So much of a thousand nanoseconds a clock shows at least, and at most. Two hosts' clocks may
/// differ by a tenth.
const RATES: [u64; 3] = [960, 1000, 1040];
/// Longest time for which a host has been running when it is first looked at.
const UPTIME_NS: Nanos = 3_600_000_000_000;

/// The clock of a host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    permille: u64,
    /// What it showed when.
    showed: Nanos,
    at: Nanos,
}

impl Clock {
    pub(super) fn new(rng: &mut Rng) -> Clock {
        Clock { permille: rng.pick(&RATES), showed: rng.below(UPTIME_NS), at: 0 }
    }

    /// The host is started again.
    pub(super) fn restart(&mut self, now: Nanos) {
        (self.showed, self.at) = (0, now);
    }

    /// What it shows.
    pub(super) fn read(&self, now: Nanos) -> Nanos {
        self.showed + (now - self.at) * self.permille / 1000
    }

    /// When it shows so much, or somewhat later.
    pub(super) fn when(&self, shown: Nanos) -> Nanos {
        let shown = u128::from(shown.saturating_sub(self.showed));
        let passed = (shown * 1000).div_ceil(self.permille.into());
        self.at.saturating_add(Nanos::try_from(passed).unwrap_or(Nanos::MAX))
    }
}
