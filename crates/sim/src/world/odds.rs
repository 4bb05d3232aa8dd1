//! How long things take in a life, and how often what is under way has luck.

use super::plan::Plan;
use crate::machine::Policy;
use crate::rng::Rng;
use tidepool_engine::api::Nanos;

/// Reads and writes of a device that take much longer, in parts per thousand, and how many times
/// longer.
const OUTLIERS: u64 = 10;
const OUTLIER_TIMES: Nanos = 20;
/// Operations of a backend that take effect when they are sent, in parts per thousand.
const EARLY: u64 = 300;
/// Removals of redo that come late, in parts per thousand.
const TRIMS_LATE: u64 = 300;
/// Operations that have to wait for a slow backend or device, in parts per thousand.
const SLOW: u64 = 800;
/// What was sent over a connection that broke, or by a process that was killed, and has arrived, in
/// parts per thousand.
const ARRIVED: u64 = 500;

/// The policy of a life, with the stream of what happens now.
pub(super) struct Odds<'a> {
    rng: &'a mut Rng,
    device_ns: Nanos,
    sync_ns: Nanos,
}

impl Odds<'_> {
    pub(super) fn new<'a>(rng: &'a mut Rng, plan: &Plan) -> Odds<'a> {
        Odds { rng, device_ns: plan.device_ns, sync_ns: plan.sync_ns }
    }
}

impl Policy for Odds<'_> {
    fn rng(&mut self) -> &mut Rng {
        self.rng
    }

    fn device_latency_ns(&mut self) -> Nanos {
        let times = if self.rng.permille(OUTLIERS) { OUTLIER_TIMES } else { 1 };
        1 + self.rng.around(self.device_ns) * times
    }

    fn sync_latency_ns(&mut self) -> Nanos {
        self.rng.around(self.sync_ns)
    }

    fn backend_latency_ns(&mut self, usual_ns: Nanos) -> Nanos {
        self.rng.around(usual_ns)
    }

    fn is_early(&mut self) -> bool {
        self.rng.permille(EARLY)
    }

    fn is_trim_late(&mut self) -> bool {
        self.rng.permille(TRIMS_LATE)
    }

    fn waits_for_the_slow(&mut self) -> bool {
        self.rng.permille(SLOW)
    }

    fn has_arrived(&mut self) -> bool {
        self.rng.permille(ARRIVED)
    }
}
