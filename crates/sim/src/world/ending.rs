//! The end of a run: everything is healed, comes to rest, and is compared, before and after a
//! restart.

use super::control::ControlKind;
use super::plan::{MS, S};
use super::stop::Stop;
use super::volume::{Place, Sender};
use super::{Happening, World};
use std::collections::VecDeque;
use tidepool_engine::api::*;

/// How long everything may take to come to rest once all is healed.
const SETTLE_NS: Nanos = 900 * S;
/// Blocks of one read of the final comparison.
const SCAN_BLOCKS: u64 = 16;
/// Reads of the final comparison in flight.
const SCAN_IN_FLIGHT: usize = 16;

/// Steps towards the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    Not,
    /// All is healed; everything in flight must complete.
    Settling,
    Draining,
    Reading,
    Stopping,
    Restarted,
    ReadingAgain,
    Over,
}

/// How far the end has come.
pub(super) struct Finale {
    step: Ending,
    since: Nanos,
    /// When it begins at the latest.
    until: Nanos,
    /// What is still to be compared: volume, first block and number of blocks.
    scan: VecDeque<(usize, u64, u64)>,
}

impl Finale {
    /// An end that begins then at the latest.
    pub(super) fn new(until: Nanos) -> Finale {
        Finale { step: Ending::Not, since: 0, until, scan: VecDeque::new() }
    }

    /// It has to begin now.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        now >= self.until
    }

    /// Nothing goes wrong any more.
    pub(super) fn has_begun(&self) -> bool {
        self.step != Ending::Not
    }

    pub(super) fn is_over(&self) -> bool {
        self.step == Ending::Over
    }

    fn begin(&mut self, now: Nanos) {
        (self.step, self.since) = (Ending::Settling, now);
    }

    fn takes_too_long(&self, now: Nanos) -> bool {
        now >= self.since + SETTLE_NS
    }

    fn is_reading(&self) -> bool {
        matches!(self.step, Ending::Reading | Ending::ReadingAgain)
    }

    /// Blocks of a volume, in order, are to be compared.
    fn scan(&mut self, v: usize, blocks: &[u64]) {
        let mut last: Option<(u64, u64)> = None;
        for &block in blocks {
            last = match last {
                Some((first, n)) if first + n == block && n < SCAN_BLOCKS => Some((first, n + 1)),
                other => {
                    self.scan.extend(other.map(|(first, n)| (v, first, n)));
                    Some((block, 1))
                }
            };
        }
        self.scan.extend(last.map(|(first, n)| (v, first, n)));
    }
}

impl World {
    /// No more requests and no more faults: everything must come to rest now.
    pub(super) fn begin_end(&mut self) {
        if self.finale.has_begun() {
            return;
        }
        let dead = self.machine.disk().is_dead();
        let stuck = dead && self.vols.iter().any(|v| v.place != Place::Serving);
        if self.is_fenced() || stuck {
            // This cache is of no use any more.
            if self.machine.is_running() {
                self.stop(Stop::Kill);
            }
            return self.after(S, Happening::Action);
        }
        self.note("end", 0, 0, 0);
        self.finale.begin(self.clock.now());
        self.clients.finish();
        self.stops.disarm();
        self.machine.disk_mut().heal();
        self.machine.backends_mut().for_each(|backend| backend.heal());
        self.after(MS, Happening::End);
        self.after(SETTLE_NS, Happening::End);
    }

    /// Once the end has begun: something is over that it may have waited for.
    pub(super) fn go_on_to_the_end(&mut self) {
        if self.finale.has_begun() {
            self.after(1, Happening::End);
        }
    }

    /// One step towards the end, if the last one is complete.
    pub(super) fn end(&mut self) {
        if self.finale.takes_too_long(self.clock.now()) {
            return self.does_not_end();
        }
        let serving =
            self.vols.iter().all(|v| v.place == Place::Serving) && self.machine.is_running();
        if self.finale.is_reading() {
            self.scan_on();
        }
        let in_flight = self.clients.in_flight() + self.controls.in_flight();
        let busy = !serving || in_flight > 0 || !self.finale.scan.is_empty();
        if busy && self.finale.step != Ending::Stopping {
            return;
        }
        let next = match self.finale.step {
            Ending::Settling => {
                self.check_invariants();
                for v in 0..self.vols.len() {
                    let changes = self.vols[v].traffic.changes();
                    self.send_control(v, ControlKind::Drain { changes, quiet: true });
                }
                Ending::Draining
            }
            Ending::Draining => {
                self.begin_scan();
                Ending::Reading
            }
            Ending::Reading if self.machine.disk().is_dead() => Ending::Over,
            Ending::Reading => {
                self.shut_down();
                Ending::Stopping
            }
            Ending::Stopping if !serving || self.stops.is_shutting_down() => return,
            Ending::Stopping => Ending::Restarted,
            Ending::Restarted => {
                self.begin_scan();
                Ending::ReadingAgain
            }
            Ending::ReadingAgain => {
                self.check_arena();
                self.collect_counters();
                Ending::Over
            }
            Ending::Not | Ending::Over => return,
        };
        self.note("ending", next as u64, 0, 0);
        self.finale.step = next;
        self.after(1, Happening::End);
    }

    /// Something that must come to rest does not.
    fn does_not_end(&mut self) {
        let waiting: Vec<_> =
            self.clients.sent().take(3).map(|(id, s)| (id, s.op, s.volume)).collect();
        if let Some(engine) = self.machine.engine() {
            let volumes = engine.volumes();
            let now = self.clock.now();
            let all: Vec<_> =
                volumes.iter().filter_map(|(id, _)| engine.volume_status(now, *id)).collect();
            eprintln!("{:#?} {all:#?}", engine.device_status());
        }
        let places: Vec<Place> = self.vols.iter().map(|v| v.place).collect();
        self.fail(format!(
            "{:?} does not end: {} requests {waiting:?}, {} controls, volumes {places:?}",
            self.finale.step,
            self.clients.in_flight(),
            self.controls.in_flight()
        ));
    }

    fn begin_scan(&mut self) {
        for (v, vol) in self.vols.iter().enumerate() {
            self.finale.scan(v, &vol.checker.touched());
        }
    }

    fn scan_on(&mut self) {
        while self.clients.in_flight() < SCAN_IN_FLIGHT {
            let Some((v, block, n)) = self.finale.scan.pop_front() else { return };
            let offset = block * BLOCK_BYTES as u64;
            let len = (n * BLOCK_BYTES as u64).min(self.vols[v].plan.size_bytes - offset);
            let serving = self.vols[v].place == Place::Serving;
            if !serving || !self.send(v, Op::Read, offset, len, Sender::Comparison) {
                self.finale.scan.push_front((v, block, n));
                return self.after(MS, Happening::End);
            }
        }
    }

    fn check_arena(&mut self) {
        let Some((used, at_first)) = self.machine.arena_bytes() else { return };
        if used != at_first {
            self.fail(format!("{used} bytes of the arena are in use at rest, {at_first} at first"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_follow_each_other_are_compared_together() {
        let mut finale = Finale::new(0);
        finale.scan(3, &[1, 2, 3, 7]);
        finale.scan(4, &(10..10 + SCAN_BLOCKS + 1).collect::<Vec<_>>());
        assert_eq!(
            finale.scan,
            [(3, 1, 3), (3, 7, 1), (4, 10, SCAN_BLOCKS), (4, 10 + SCAN_BLOCKS, 1)]
        );
    }
}
