//! Detects that preparation of a measurement does not progress. Without this, an OSD or guest that
//! hangs would block it until its time limit.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::Runner;
use crate::testbed::Testbed;

/// Longest time in which devices may carry next to nothing. Devices are not slowed then, and a pass
/// takes less.
const STILL_LIMIT: Duration = Duration::from_secs(120);
/// Less than this many bytes is next to nothing. OSDs write a little by themselves.
const STILL_BYTES: u64 = 1 << 20;
/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// Watches an activity on a testbed that takes until `deadline` at most.
pub(super) struct Watch<'a> {
    runner: &'a Runner<'a>,
    testbed: &'a Testbed,
    deadline: Instant,
    looked: Cell<Instant>,
    still: Cell<Still>,
}

/// What devices had carried when they last made progress, and when that was.
#[derive(Debug, Clone, Copy)]
struct Still {
    bytes: u64,
    since: Instant,
}

impl Still {
    /// Updates with the bytes carried so far. Returns whether there has been no progress for too
    /// long.
    fn look(&mut self, bytes: u64, now: Instant) -> bool {
        if bytes.saturating_sub(self.bytes) >= STILL_BYTES {
            *self = Still { bytes, since: now };
        }
        now.duration_since(self.since) >= STILL_LIMIT
    }
}

impl<'a> Watch<'a> {
    /// Starts to watch, for at most `limit`.
    pub(super) fn new(runner: &'a Runner<'a>, testbed: &'a Testbed, limit: Duration) -> Watch<'a> {
        let now = Instant::now();
        let still = Cell::new(Still { bytes: carried(testbed), since: now });
        Watch { runner, testbed, deadline: now + limit, looked: Cell::new(now), still }
    }

    /// Why the activity should stop. `None` if it should go on.
    pub(super) fn stop(&self) -> Option<String> {
        let now = Instant::now();
        let soon = now.duration_since(self.looked.get()) < LOOK;
        let hangs = || {
            self.looked.set(now);
            let mut still = self.still.get();
            let hangs = still.look(carried(self.testbed), now);
            self.still.set(still);
            let ended = self.testbed.cluster().check_osds().err().map(|why| why.to_string());
            ended.or_else(|| {
                let seconds = STILL_LIMIT.as_secs();
                hangs.then(|| {
                    format!(
                        "no device has carried anything for {seconds} s: an OSD hangs, or its guest"
                    )
                })
            })
        };
        self.runner.stop_reason(self.deadline).or_else(|| if soon { None } else { hangs() })
    }
}

/// Bytes that the devices of a testbed have read and written.
fn carried(testbed: &Testbed) -> u64 {
    testbed.counts().values().map(|counts| counts.read_bytes + counts.written_bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_carry_next_to_nothing_for_minutes_hang() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut still = Still { bytes: 0, since: begun };
        assert!(!still.look(STILL_BYTES, at(60)) && !still.look(STILL_BYTES + 4096, at(179)));
        assert!(
            still.look(STILL_BYTES + 8192, at(180)),
            "what an OSD writes by itself is no progress"
        );
        assert!(!still.look(3 * STILL_BYTES, at(200)));
    }
}
