//! Stops: kills, power losses and orderly ends, what they leave, and caches that are lost.

use super::odds::Odds;
use super::plan::{MS, Theme};
use super::volume::Place;
use super::{Happening, World};
use crate::machine::FlightKind;
use tidepool_engine::format::byte;
use tidepool_engine::status::{VolumeState, VolumeStatus};

/// How a life of the core ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stop {
    /// SIGKILL.
    Kill,
    /// Power is lost.
    Power,
    /// After an orderly shutdown.
    Orderly,
}

/// What a stop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    CheckpointWrite,
    Reclaim,
    DrainWrite,
    DeviceSync,
    SummaryWrite,
    Commit,
}

/// The stops that are on their way.
#[derive(Default)]
pub(super) struct Stops {
    /// The process or the machine stops as soon as this is under way.
    armed: Option<(Moment, Stop)>,
    /// The core was told to shut down.
    shutting_down: bool,
}

impl Stops {
    /// Stops as soon as this is under way.
    pub(super) fn arm(&mut self, moment: Moment, how: Stop) {
        self.armed = Some((moment, how));
    }

    pub(super) fn disarm(&mut self) {
        self.armed = None;
    }

    /// The core was told to shut down.
    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutting_down
    }

    /// The core is told to shut down.
    pub(super) fn shut_down(&mut self) {
        self.shutting_down = true;
    }
}

/// Everything of a volume is in its image.
pub(super) fn is_clean(status: &VolumeStatus) -> bool {
    status.dirty_bytes == 0 && status.lost_blocks == 0 && status.sequence_drained == status.sequence
}

impl World {
    /// The core has not been stopped often enough yet.
    pub(super) fn may_stop(&self) -> bool {
        !self.finale.has_begun() && self.machine.life() < self.plan.stops_max
    }

    pub(super) fn any_stop(&mut self) -> Stop {
        if self.rng.permille(self.plan.power) { Stop::Power } else { Stop::Kill }
    }

    /// Something is under way that a stop may have been waiting for.
    pub(super) fn moment(&mut self, moment: Moment) {
        if let Some((_, how)) = self.stops.armed.take_if(|(armed, _)| *armed == moment) {
            self.stop_soon(how);
        }
    }

    /// Stops while what was sent last is likely to be under way.
    pub(super) fn stop_soon(&mut self, how: Stop) {
        let (life, pause) = (self.machine.life(), self.rng.around(self.plan.device_ns / 2));
        self.after(pause, Happening::Stop { life, how });
    }

    /// Ends the life of the core.
    pub(super) fn stop(&mut self, how: Stop) {
        self.note("stop", how as u64, 0, 0);
        let tick = self.next_tick();
        self.count_stop(how);
        let clean = if self.is_fenced() { Vec::new() } else { self.clean_volumes() };
        let unflushed = self.unflushed_volumes();
        self.cut_flights_off();
        self.collect_counters();
        self.forget_life();
        if how == Stop::Kill {
            self.weigh_evidence();
        }
        for (v, unflushed) in unflushed.into_iter().enumerate() {
            self.expect_what_is_left(v, how, tick, unflushed);
        }
        for (v, vol) in self.vols.iter_mut().enumerate().filter(|(_, vol)| vol.past.is_resizing()) {
            self.cover.hit("stop during a change of size");
            vol.resized(self.machine.backend(v));
        }
        self.check_cuts(false);
        if how == Stop::Power {
            self.lose_power();
        }
        if self.machine.disk().is_dead() || self.is_fenced() {
            // The record beside the image no longer names the cache, or its data is gone with it.
            self.replace_cache(if how == Stop::Power { Vec::new() } else { clean });
        }
        let pause = self.rng.around(20 * MS);
        self.after(pause, Happening::Reopen);
    }

    /// What is under way has taken place, partly, or not at all.
    fn cut_flights_off(&mut self) {
        self.machine.disk_mut().draw_from(self.rng.fork());
        for flight in self.machine.interrupt() {
            let now = self.clock.now();
            match self.machine.cut_off(flight, now, &mut Odds::new(&mut self.rng, &self.plan)) {
                Ok(Some(v)) => {
                    self.committed(v);
                    self.cover.hit("kill during commit");
                }
                Ok(None) => {}
                Err(what) => self.fail(what),
            }
        }
    }

    /// Nothing is left of the core, and of what it was asked for.
    fn forget_life(&mut self) {
        self.machine.end_life();
        self.stops = Stops::default();
        self.watch.forget_life();
        self.controls.forget_life();
        for sent in self.clients.forget_life() {
            if let Some(slot) = sent.sender.slot() {
                self.vols[sent.volume].traffic.rest(slot);
            }
        }
    }

    /// What a volume may hold after a stop.
    fn expect_what_is_left(&mut self, v: usize, how: Stop, tick: u64, unflushed: bool) {
        let (vol, disk) = (&mut self.vols[v], self.machine.disk());
        vol.forget_life();
        match how {
            Stop::Power => {}
            // A damaged block in the unsynced tail looks like a torn one: the tail may go.
            Stop::Kill if self.plan.theme == Theme::Corruption => {
                vol.checker.power_lost(tick);
                vol.look.set_due(true);
            }
            Stop::Kill => vol.checker.killed(tick),
            Stop::Orderly => {
                vol.checker.killed(tick);
                if !unflushed && !disk.has_lied() {
                    vol.checker.settle(tick);
                }
                if disk.lies() {
                    vol.checker.distrust_from(tick);
                }
            }
        }
    }

    /// Which changes may be taken for a part of a torn tail.
    fn weigh_evidence(&mut self) {
        if self.plan.theme != Theme::Corruption {
            return;
        }
        for vol in &mut self.vols {
            vol.checker.distrust_from(vol.evidence.unsure_from(self.machine.disk()));
            vol.evidence.clear();
        }
    }

    /// What is not on stable media is lost, or not.
    pub(super) fn lose_power(&mut self) {
        self.note("power loss", 0, 0, 0);
        let lied = self.machine.disk().has_lied();
        self.machine.disk_mut().draw_from(self.rng.fork());
        self.machine.disk_mut().power_loss();
        self.weigh_evidence();
        self.cover.add("power loss after a lie", u64::from(lied));
        let tick = self.next_tick();
        for (vol, backend) in self.vols.iter_mut().zip(self.machine.backends_mut()) {
            backend.lose_power(&mut self.rng);
            vol.checker.power_lost(tick);
            vol.look.set_due(true);
        }
        self.check_cuts(true);
    }

    /// Some volume has been taken by another owner.
    pub(super) fn is_fenced(&self) -> bool {
        (0..self.vols.len()).any(|v| self.machine.backend(v).is_fenced())
    }

    fn count_stop(&mut self, how: Stop) {
        self.cover.hit(match how {
            Stop::Kill => "kill",
            Stop::Power => "power loss",
            Stop::Orderly => "orderly restart",
        });
        if how == Stop::Orderly {
            return;
        }
        let segments = byte(self.machine.geometry().segments_first_block);
        for flight in self.machine.flights() {
            match flight.kind() {
                FlightKind::DeviceWrite { offset, .. } if *offset < segments => {
                    self.cover.hit("kill during checkpoint");
                }
                FlightKind::Write { .. } => self.cover.hit("kill during drain"),
                _ => {}
            }
        }
        if self.machine.engine().is_some_and(|e| e.device_status().reclaiming) {
            self.cover.hit("kill during reclaim");
        }
    }

    /// Whether each volume says that writes past the cache may not be on its backend's stable
    /// media. One that was not attached in this life cannot know.
    fn unflushed_volumes(&mut self) -> Vec<bool> {
        if !self.machine.is_running() {
            return vec![true; self.vols.len()];
        }
        let now = self.clock.now();
        let unflushed = |s: VolumeStatus| s.backend_unflushed || s.state == VolumeState::Detached;
        let status = (0..self.vols.len()).map(|v| self.machine.status(v, now));
        let all: Vec<bool> = status.map(|status| status.is_some_and(unflushed)).collect();
        self.cover.add("stopped without a flush", u64::from(all.contains(&true)));
        all
    }

    /// Volumes of which everything is in the backend.
    fn clean_volumes(&self) -> Vec<usize> {
        let now = self.clock.now();
        let clean = |v: &usize| self.machine.status(*v, now).as_ref().is_some_and(is_clean);
        (0..self.vols.len()).filter(clean).collect()
    }

    /// A new cache device, or the old one laid out anew. What was dirty in it is lost; `clean`
    /// volumes must have everything in their images.
    pub(super) fn replace_cache(&mut self, clean: Vec<usize>) {
        self.cover.hit("cache lost");
        self.check_cuts(true);
        self.machine.replace_disk(self.rng.fork());
        self.format();
        for v in 0..self.vols.len() {
            let backend = self.machine.backend_mut(v);
            self.cover.add("redo replayed", u64::from(!backend.redo().is_empty()));
            if let Err(what) = backend.recover() {
                return self.fail(format!("volume {v}: {what}"));
            }
            if clean.contains(&v) {
                self.check_image(v);
                self.cover.hit("image checked after device death");
            }
            self.take_image_over(v);
            let pause = self.rng.around(10 * MS);
            self.after(pause, Happening::Add { volume: v });
        }
    }

    /// The image is all that there is of a volume.
    fn take_image_over(&mut self, v: usize) {
        let backend = self.machine.backend_mut(v);
        // A host that takes an image over flushes it first.
        backend.flush();
        if backend.is_fenced() {
            backend.heal();
        }
        let vol = &mut self.vols[v];
        vol.checker.adopt(&mut |block, out| backend.read(block, out));
        vol.look.set_due(false);
        vol.place = Place::Out;
        self.machine.mount(v, None);
    }

    /// Lays the cache out.
    pub(super) fn format(&mut self) {
        if let Err(error) = self.machine.format() {
            self.fail(format!("format: {error}"));
        }
    }

    /// Adds up what the core has counted in this life.
    pub(super) fn collect_counters(&mut self) {
        let Some(device) = self.machine.engine().map(|engine| engine.device_status()) else {
            return;
        };
        for (what, n) in self.machine.disk_mut().take_faults_done().named() {
            self.cover.add(what, n);
        }
        self.cover.add("checkpoint", device.checkpoints);
        self.cover.add("reclaim", device.reclaims);
        for v in 0..self.vols.len() {
            let Some(status) = self.machine.status(v, self.clock.now()) else { continue };
            let c = status.count;
            self.cover.add("eviction", c.evicted_blocks);
            self.cover.add("fill overtaken", c.bypass_overtaken_blocks);
            self.cover.add("quota wait", c.quota_waits);
            self.cover.add("ack held", u64::from(c.held_ns > 0));
            self.cover.add("corrupt block found", c.corrupt_blocks);
            self.cover.add("block lost", status.lost_blocks);
            self.cover.add("drained block", c.drained_blocks);
            self.cover.add("hit block", c.hit_blocks);
            self.cover.add("parent block", c.parent_blocks);
            self.cover.add("hole block", c.hole_blocks);
            self.cover.add("group forced early", c.groups_early);
            self.cover.add("miss block", c.miss_blocks);
        }
    }
}
