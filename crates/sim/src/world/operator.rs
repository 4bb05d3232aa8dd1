//! What happens beside the clients' requests: what operators do, and when something breaks.

use super::control::ControlKind;
use super::plan::{MS, S};
use super::stop::Moment;
use super::volume::{Place, Sender};
use super::{Happening, World};
use crate::disk::Delay;
use tidepool_engine::api::*;

/// Blocks of the largest volume.
const SIZE_BLOCKS_MAX: u64 = 40_000;

impl World {
    pub(super) fn action(&mut self) {
        if self.finale.has_begun() {
            return;
        }
        if self.finale.is_due(self.clock.now()) {
            return self.begin_end();
        }
        let pause = self.rng.around(self.plan.action_ns);
        self.after(pause, Happening::Action);
        if !self.machine.is_running() {
            return;
        }
        self.check_invariants();
        self.tell_of_images();
        if self.vols.iter().any(|v| v.place == Place::Verifying) && self.rng.permille(800) {
            // Mostly, what a power loss has left is looked at before the next thing happens.
            return;
        }
        let v = self.rng.below(self.vols.len() as u64) as usize;
        let may_stop = self.may_stop();
        match self.rng.below(100) {
            0..=16 if !may_stop => {}
            0..=13 => {
                let how = self.any_stop();
                if self.rng.permille(600) {
                    let moment = self.any_moment();
                    self.stops.arm(moment, how);
                } else {
                    self.stop(how);
                }
            }
            14..=16 => self.shut_down(),
            17..=26 => self.drain(v),
            27..=34 if self.plan.modes => self.control_volume(v, |w, _| {
                let all = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];
                ControlKind::Mode(w.rng.pick(&all))
            }),
            35..=37 => self.control_volume(v, |_, _| ControlKind::Quota),
            38 => self.control_volume(v, |w, _| ControlKind::Attachment(w.controls.next())),
            39..=42 => {
                self.control_volume(v, |w, _| ControlKind::Remove { verify: w.rng.permille(500) })
            }
            43..=64 => self.break_something(v),
            65..=69 => self.rest(v),
            70..=80 => self.read_cached(v),
            81..=84 => self.control_volume(v, |w, _| ControlKind::Snapshot { floor: w.tick }),
            85..=87 if !self.vols[v].plan.read_only => {
                self.control_volume(v, |w, v| ControlKind::Resize {
                    size_bytes: w.another_size(v),
                });
            }
            _ => {}
        }
    }

    /// What a stop is to wait for.
    fn any_moment(&mut self) -> Moment {
        self.rng.pick(&[
            Moment::CheckpointWrite,
            Moment::Reclaim,
            Moment::DrainWrite,
            Moment::DeviceSync,
            Moment::SummaryWrite,
            Moment::Commit,
        ])
    }

    /// The clients of a volume pause for some seconds, so that timers get their turn.
    fn rest(&mut self, v: usize) {
        let pause = self.rng.around(3 * S);
        for slot in self.vols[v].traffic.take_idle() {
            self.after(pause, Happening::Client { volume: v, slot });
        }
        let all = self.rng.permille(200);
        for vol in &mut self.vols {
            vol.plan.think_ns = match vol.plan.think_ns {
                n if all && n < 100 * MS => n * 10,
                n if n > MS => n / 10,
                n => n,
            };
        }
    }

    pub(super) fn drain(&mut self, v: usize) {
        self.control_volume(v, |w, v| ControlKind::Drain {
            changes: w.vols[v].traffic.changes(),
            quiet: w.vols[v].traffic.is_quiet(),
        });
    }

    /// Half to one and a half times of what a volume has, in whole blocks.
    fn another_size(&mut self, v: usize) -> u64 {
        let blocks = (self.vols[v].plan.size_bytes / BLOCK_BYTES as u64).max(1);
        (blocks.div_ceil(2) + self.rng.below(blocks + 1)).min(SIZE_BLOCKS_MAX) * BLOCK_BYTES as u64
    }

    /// With a stopped backend, cached blocks must be served all the same.
    fn read_cached(&mut self, v: usize) {
        let (vol, disk, now) = (&self.vols[v], self.machine.disk(), self.clock.now());
        let Some(id) = self.machine.id(v) else { return };
        if vol.place != Place::Serving
            || self.stops.is_shutting_down()
            || disk.is_dead()
            || !self.machine.backend(v).is_away(now)
            || disk.delay_now(now) != Delay::None
            || self.may_lose_data()
        {
            return;
        }
        let engine = self.machine.engine().expect("a running core");
        let mut extents = Vec::new();
        let block = BLOCK_BYTES as u64;
        let from = self.rng.below(vol.plan.size_bytes.div_ceil(block)) * block;
        engine.block_status(id, from, vol.plan.size_bytes - from, 64, &mut extents);
        let mut at = from;
        for extent in extents {
            if extent.cached {
                let len = extent.len.min(16 * block);
                let request = self.clients.next_request();
                if self.send(v, Op::Read, at, len, Sender::Comparison) {
                    self.after(20 * S, Happening::MustBeAnswered { request });
                }
                return;
            }
            at += extent.len;
        }
    }
}
