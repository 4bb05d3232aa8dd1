//! Faults of the cache device and of the backends, by the theme of the run.

use super::plan::{MS, S, Theme};
use super::stop::{Moment, Stop};
use super::{Happening, World};
use crate::disk::{Delay, DiskFaults};
use crate::machine::backend::Trouble;
use tidepool_engine::api::Nanos;

impl World {
    /// Faults, by the theme of the run.
    pub(super) fn break_something(&mut self, v: usize) {
        if self.rng.permille(100) {
            return self.delay_device();
        }
        match self.plan.theme {
            Theme::Crashes => {}
            // Nothing gives a volume back that another owner has taken.
            Theme::Backends if self.machine.backend(v).is_fenced() => {}
            Theme::Backends if self.rng.permille(30) => self.fence(v),
            Theme::Backends => self.trouble(v),
            Theme::Corruption => {
                if self.rng.permille(300) {
                    let ppm = self.rng.pick(&[0, 0, 2_000, 20_000]);
                    self.machine.disk_mut().set_faults(DiskFaults::new(ppm, ppm / 2));
                } else if self.rng.permille(500) {
                    self.damage(1);
                }
            }
            Theme::Lies => self.lie(v),
            Theme::DeviceDeath => self.fail_device(),
        }
    }

    /// Something is wrong with a backend for some time.
    fn trouble(&mut self, v: usize) {
        let trouble = match self.rng.below(8) {
            0 | 1 => Trouble::Stopped,
            7 => Trouble::Disconnected,
            2 => Trouble::Errors(self.rng.pick(&[10, 200, 1000])),
            3 => Trouble::Full,
            4 | 5 => Trouble::Flushes(self.rng.pick(&[100, 500])),
            _ => Trouble::Slow(self.rng.range(2..100)),
        };
        let long = self.rng.pick(&[100 * MS, S, 20 * S]);
        let until = self.clock.now() + self.rng.around(long);
        self.machine.backend_mut(v).set_trouble(trouble, until);
        self.vols[v].excuses.set_trouble(until);
        self.note("trouble", v as u64, until, 0);
        match trouble {
            Trouble::Stopped => self.cover.hit("backend stopped"),
            Trouble::Slow(_) => self.cover.hit("backend slow"),
            Trouble::Disconnected => self.disconnect(v),
            _ => {}
        }
    }

    /// The device begins to lie about syncs, or stops doing so.
    fn lie(&mut self, v: usize) {
        let lies = self.rng.permille(700);
        self.machine.disk_mut().set_lies(lies);
        self.note("lies", lies.into(), 0, 0);
        let tick = self.next_tick();
        if !lies {
            return;
        }
        for vol in &mut self.vols {
            vol.checker.distrust_from(tick);
        }
        if self.may_stop() && self.rng.permille(600) {
            // The image is to get what the cache then loses.
            self.drain(v);
            self.stops.arm(Moment::Commit, Stop::Power);
        }
    }

    /// Writes and syncs of the device fail, for good or for a moment; what it holds is damaged.
    fn fail_device(&mut self) {
        // What is dirty leaves a dead device soon: a single block is hardly ever one of those.
        let many = self.rng.range(1..1000);
        let dead = self.machine.disk().is_dead();
        if dead && self.rng.permille(500) {
            self.damage(many);
        } else if self.rng.permille(700) && !dead {
            let some = self.rng.permille(400).then(|| self.rng.range(1..4) as u32);
            self.machine.disk_mut().break_down(some);
            self.note("device dies", some.unwrap_or(0).into(), 0, 0);
            if self.rng.permille(500) {
                self.damage(many);
            }
            self.cover.hit(if some.is_some() {
                "device failed for a moment"
            } else {
                "device death"
            });
        }
    }

    fn damage(&mut self, blocks: u64) {
        self.machine.disk_mut().draw_from(self.rng.fork());
        for block in self.machine.disk_mut().damage(blocks) {
            self.note("damage", block, 0, 0);
        }
    }

    /// The cache device stops for a while, or becomes slow.
    fn delay_device(&mut self) {
        let long = self.rng.pick(&[10 * MS, 200 * MS, 5 * S]);
        let until = self.clock.now() + self.rng.around(long);
        let slow = self.rng.permille(500).then(|| self.rng.range(2..50));
        self.machine.disk_mut().set_delay(slow.map_or(Delay::Stopped, Delay::Slow), until);
        for vol in &mut self.vols {
            // Whatever waits for the device may wait as long.
            vol.excuses.may_wait(until);
        }
        self.note("device delayed", until, slow.unwrap_or(0), 0);
        self.cover.hit(if slow.is_some() { "device slow" } else { "device stopped" });
    }

    /// The connection to a backend is gone for a moment, if nothing else is wrong with it.
    pub(super) fn cut_off(&mut self, v: usize) {
        let now = self.clock.now();
        if self.machine.backend(v).trouble_now(now) != Trouble::None || self.finale.has_begun() {
            return;
        }
        let until = now + self.rng.around(200 * MS);
        self.machine.backend_mut(v).set_trouble(Trouble::Disconnected, until);
        self.vols[v].excuses.set_trouble(until);
        self.note("cut off", v as u64, until, 0);
        self.disconnect(v);
    }

    /// What is in flight to a backend comes back as failed when the connection is there again, done
    /// or not.
    fn disconnect(&mut self, v: usize) {
        let lost = self.machine.disconnect(v);
        self.cover.add("request of the backend lost", lost);
    }

    /// Another owner takes a volume: from now on its backend refuses everything.
    fn fence(&mut self, v: usize) {
        self.machine.backend_mut(v).set_trouble(Trouble::Fenced, Nanos::MAX);
        self.vols[v].excuses.set_trouble(self.clock.now());
        self.note("fence", v as u64, 0, 0);
        self.cover.hit("fence");
        let life = self.machine.life();
        self.after(5 * S, Happening::Stop { life, how: Stop::Kill });
    }
}
