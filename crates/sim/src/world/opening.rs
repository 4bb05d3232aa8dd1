//! Starts: recovery, and volumes that find their images again or are added.

use super::control::ControlKind;
use super::plan::{MS, Theme};
use super::stop::{Stop, is_clean};
use super::volume::Place;
use super::{Happening, World};
use crate::checker::BASE_VALUE;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{AddError, Attach, OpenError, OwnObjects};

const MODES: [Mode; 4] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];

impl World {
    /// Lays the device out and starts everything.
    pub(super) fn begin(&mut self) {
        (0..self.vols.len()).for_each(|v| self.make_image(v));
        self.format();
        if self.plan.theme == Theme::Corruption {
            self.vols.iter_mut().for_each(|vol| vol.checker.expect_damage_from(0));
        }
        let lies = self.plan.theme == Theme::Lies && self.rng.permille(500);
        self.machine.disk_mut().set_lies(lies);
        (0..self.vols.len()).for_each(|v| self.distrust(v));
        self.reopen();
        for v in 0..self.vols.len() {
            for slot in 0..self.vols[v].plan.depth {
                self.after(MS, Happening::Client { volume: v, slot });
            }
        }
        let pause = self.rng.around(self.plan.action_ns);
        self.after(pause, Happening::Action);
    }

    /// A volume's image as it is at first.
    fn make_image(&mut self, v: usize) {
        let (vol, backend) = (&self.vols[v], self.machine.backend_mut(v));
        let (base, size) = (vol.plan.base_bytes, vol.plan.size_bytes);
        backend.set_own(OwnObjects::none(size));
        vol.write_image(backend, 0, base / SECTOR_BYTES as u64, BASE_VALUE);
        if vol.plan.parent.is_some() {
            let mut own = OwnObjects::none(size).inheriting(base);
            if vol.plan.read_only && base > 0 {
                // A snapshot in between has something that was written after it was cloned.
                own.insert(self.rng.below(base), 1);
            }
            backend.set_own(own);
        }
    }

    /// The cache that was opened cannot be used.
    fn give_cache_up(&mut self) {
        self.collect_counters();
        self.stop(Stop::Kill);
        if !self.machine.disk().is_dead() {
            self.replace_cache(Vec::new());
        }
    }

    /// Looking at a cache changes nothing, and finds nothing wrong where nothing was damaged.
    fn inspect(&mut self) {
        let before = self.machine.disk().sync_point();
        let inspected = tidepool_engine::inspect(self.machine.disk_mut());
        let checked = tidepool_engine::check(self.machine.disk_mut(), &mut |_, _| ());
        if self.machine.disk().sync_point() != before {
            return self.fail("looking at the cache has changed it".into());
        }
        self.cover.hit("inspected");
        if self.may_lose_data() {
            return;
        }
        match (inspected, checked) {
            (Ok(_), Ok(report)) if report.damaged.is_empty() => {}
            (Ok(_), Ok(report)) => {
                self.fail(format!(
                    "{} cached blocks are damaged without a fault",
                    report.damaged.len()
                ));
            }
            (Err(error), _) | (_, Err(error)) => {
                self.fail(format!("the cache cannot be looked at: {error}"))
            }
        }
    }

    /// The process starts: recovery, which may be stopped again and again.
    pub(super) fn reopen(&mut self) {
        if self.machine.is_running() || self.journal.has_failed() {
            return;
        }
        self.machine.disk_mut().draw_from(self.rng.fork());
        let lived = self.machine.life() > 0;
        if lived && self.rng.permille(100) {
            self.inspect();
        }
        let before = self.machine.disk().blocks_read();
        let stops = if self.rng.permille(300) && lived { self.rng.range(1..4) } else { 0 };
        for _ in 0..stops {
            let steps = self.rng.below(400);
            if self.machine.open_and_stop(&self.plan.engine, self.clock.now(), steps) {
                self.cover.hit("stop during recovery");
                if self.rng.permille(self.plan.power) {
                    self.lose_power();
                }
            }
        }
        match self.machine.open(&self.plan.engine, self.clock.now()) {
            Ok(report) => {
                let blocks_read = self.machine.disk().blocks_read() - before;
                self.note("opened", report.checkpoint, report.records_replayed, report.records_cut);
                self.recovery_blocks_max = self.recovery_blocks_max.max(blocks_read);
                self.note(
                    "found",
                    report.blocks_lost,
                    report.volumes_failed,
                    report.summaries_rebuilt,
                );
                self.journal.saw(&(&report, blocks_read, self.machine.disk().sync_point()));
                self.cover.add("replay with tail", u64::from(report.records_replayed > 0));
                self.cover.add("torn tail cut", u64::from(report.records_cut > 0));
                self.cover.add("summary rebuilt", report.summaries_rebuilt);
                self.cover.add("block lost", report.blocks_lost);
                self.find_volumes();
            }
            Err(error) if self.may_lose_data() && error != OpenError::NotACache => {
                self.cover.hit("cache unreadable");
                self.replace_cache(Vec::new());
                self.after(MS, Happening::Reopen);
            }
            Err(error) => self.fail(format!("the cache cannot be opened: {error}")),
        }
    }

    /// Finds out which volumes are in the cache, and attaches or adds them.
    fn find_volumes(&mut self) {
        let engine = self.machine.engine().expect("opened just now");
        let known = engine.volumes();
        let now = self.clock.now();
        let failed = |(id, _): &(VolumeId, VolumeSpec)| {
            engine.volume_status(now, *id).is_some_and(|s| s.state == VolumeState::Failed)
        };
        if known.iter().any(failed) {
            if !self.may_lose_data() {
                return self.fail("a volume has failed at recovery without a fault".into());
            }
            self.cover.hit("volume failed");
            return self.give_cache_up();
        }
        for v in 0..self.vols.len() {
            let found = known.iter().find(|(_, spec)| spec.name == self.vols[v].name);
            let was = self.vols[v].place;
            match found {
                // Its removal was not stable. The image, which was given back, does not name the
                // cache any more.
                Some(_) if was == Place::Out && self.may_lose_data() => {
                    return self.give_cache_up();
                }
                Some((id, spec)) => {
                    if let Err(what) = self.check_found(v, spec) {
                        return self.fail(what);
                    }
                    self.vols[v].past.find(spec);
                    self.machine.mount(v, Some(*id));
                    self.vols[v].place = Place::Detached;
                    let (life, pause) = (self.machine.life(), self.rng.around(5 * MS));
                    self.after(pause, Happening::Attach { life, volume: v });
                }
                None if matches!(was, Place::Out | Place::Adding | Place::Removing) => {
                    self.machine.mount(v, None);
                    self.vols[v].place = Place::Out;
                    self.check_image(v);
                    let pause = self.rng.around(5 * MS);
                    self.after(pause, Happening::Add { volume: v });
                }
                None if self.may_lose_data() => return self.give_cache_up(),
                None => {
                    return self
                        .fail(format!("volume {v} is not in the cache any more (was {was:?})"));
                }
            }
        }
    }

    /// What the cache has of a volume is what it had last.
    fn check_found(&self, v: usize, spec: &VolumeSpec) -> Result<(), String> {
        let vol = &self.vols[v];
        if vol.place == Place::Out {
            return Err(format!("volume {v} is in the cache again after its removal"));
        }
        if !vol.past.may_be(&spec.attachment) && !self.may_lose_data() {
            return Err(format!("volume {v} has an attachment from its past"));
        }
        let (found, size) = (spec.size_bytes, vol.plan.size_bytes);
        if !vol.past.is_resizing() && found != size && !self.may_lose_data() {
            return Err(format!("volume {v} has {found} bytes again, which was {size}"));
        }
        Ok(())
    }

    /// A volume of a restarted cache gets its backend.
    pub(super) fn attach(&mut self, v: usize) {
        if self.vols[v].place != Place::Detached || !self.machine.is_running() {
            return;
        }
        let now = self.clock.now();
        let backend = self.machine.backend(v);
        if backend.is_away(now) {
            let (life, until) = (self.machine.life(), backend.trouble_until());
            return self.at(until + MS, Happening::Attach { life, volume: v });
        }
        let status =
            self.machine.status(v, now).expect("a detached volume has a number and a status");
        let forgotten = backend.is_forgotten(self.vols[v].past.generation());
        if forgotten || backend.redo().is_ahead(self.machine.layout().uuid(), status.sequence) {
            // As an open of an image does: the cache has lost that it was given the image, or what
            // the image or its redo has got from it.
            if !self.may_lose_data() {
                return self.fail(format!("volume {v}: the cache is behind the image"));
            }
            self.cover.hit("cache behind its image");
            return self.give_cache_up();
        }
        if is_clean(&status) {
            self.change_unused_image(v);
        }
        let attach = self.take_image(v, status.dirty);
        let control = self.control(v, ControlKind::Attach);
        let id = self.machine.id(v).expect("a detached volume has a number");
        let engine = self.machine.engine_mut().expect("checked above");
        if let Err(error) = engine.attach(now, id, attach, control) {
            self.controls.remove(control);
            if self.plan.theme == Theme::Lies
                && self.may_lose_data()
                && matches!(error, AddError::Shrunk(_))
            {
                // The device has lost the checkpoint without which the image would not have become
                // smaller.
                self.cover.hit("cache behind its image");
                return self.give_cache_up();
            }
            if !self.machine.disk().is_dead() {
                self.fail(format!("volume {v} cannot be attached: {error}"));
            }
        }
    }

    /// Now and then somebody else writes or resizes the image of a volume of which the cache has
    /// nothing dirty.
    fn change_unused_image(&mut self, v: usize) {
        let changes = !self.vols[v].plan.read_only && !self.vols[v].look.is_due();
        if changes && self.rng.permille(100) {
            self.foreign_write(v);
        }
        if changes && self.rng.permille(50) {
            self.resize(v);
        }
    }

    /// Takes the image of a volume that is in the cache; says what the core is to be told.
    fn take_image(&mut self, v: usize, dirty: bool) -> Attach {
        let (vol, backend) = (&mut self.vols[v], self.machine.backend_mut(v));
        let known = vol.past.generation();
        // Proof: the record beside the image is the one that the cache knows, and nobody wrote
        // since.
        let keep_clean = backend.is_known(known) && !self.rng.permille(50);
        backend.own_as(known);
        if !dirty {
            // As an open of an image does with what an earlier owner has left: the image is the
            // first cut.
            backend.clear_redo();
        }
        if self.plan.modes && self.rng.permille(100) {
            vol.mode = self.rng.pick(&MODES);
        }
        let attach = Attach {
            generation: backend.generation(),
            size_bytes: vol.plan.size_bytes,
            mode: vol.mode,
            drain: vol.plan.drain,
            dirty_bytes_max: vol.dirty_bytes_max,
            read_only: vol.plan.read_only,
            attachment: self.controls.next().to_le_bytes().to_vec(),
            keep_clean,
        };
        vol.told.open(backend.own());
        vol.place = Place::Attaching;
        vol.past.ask_for(attach.attachment.clone());
        if !keep_clean {
            self.cover.hit("clean dropped at attach");
        }
        attach
    }

    /// A volume that is not in the cache is added.
    pub(super) fn add(&mut self, v: usize) {
        if self.vols[v].place != Place::Out {
            return;
        }
        if !self.machine.is_running() || self.stops.is_shutting_down() {
            return self.after(50 * MS, Happening::Add { volume: v });
        }
        let now = self.clock.now();
        if self.machine.backend(v).is_away(now) {
            return self.after(100 * MS, Happening::Add { volume: v });
        }
        let dead = self.machine.disk().is_dead();
        if self.rng.permille(200) && !dead && !self.vols[v].plan.read_only {
            self.foreign_write(v);
        }
        let spec = self.take_new_image(v);
        let control = self.control(v, ControlKind::Add);
        let engine = self.machine.engine_mut().expect("checked above");
        match engine.add_volume(now, spec, control) {
            Ok(id) => {
                self.note("add", v as u64, self.vols[v].mode as u64, control);
                self.machine.mount(v, Some(id));
                // The log begins anew, and the number may be that of a volume that was removed.
                self.vols[v].evidence.clear();
                self.vols[v].place = Place::Adding;
            }
            Err(error) => {
                self.controls.remove(control);
                if dead {
                    self.after(100 * MS, Happening::Add { volume: v });
                } else {
                    self.fail(format!("volume {v} cannot be added: {error}"));
                }
            }
        }
    }

    /// Takes the image of a volume that is not in the cache; says what the core is to be told.
    fn take_new_image(&mut self, v: usize) -> VolumeSpec {
        let (vol, backend) = (&mut self.vols[v], self.machine.backend_mut(v));
        backend.is_owned_again();
        backend.own_as(0);
        backend.clear_redo();
        if self.plan.modes {
            vol.mode = self.rng.pick(&MODES);
        }
        let spec = VolumeSpec {
            name: vol.name.clone(),
            backend: format!("file:/sim/{}", vol.name),
            size_bytes: vol.plan.size_bytes,
            mode: vol.mode,
            drain: vol.plan.drain,
            dirty_bytes_max: vol.dirty_bytes_max,
            read_only: vol.plan.read_only,
            generation: backend.generation(),
            attachment: self.controls.next().to_le_bytes().to_vec(),
        };
        vol.past.begin(spec.attachment.clone());
        vol.told.open(backend.own());
        spec
    }

    /// Somebody else writes to the image of a volume while the cache has nothing dirty of it.
    fn foreign_write(&mut self, v: usize) {
        let sectors = self.vols[v].plan.size_bytes / SECTOR_BYTES as u64;
        let backend = self.machine.backend_mut(v);
        for _ in 0..self.rng.range(1..4) {
            let first = self.rng.below(sectors);
            let n = self.rng.range(1..200).min(sectors - first);
            self.tick += 2;
            let (start, end) = (self.tick - 1, self.tick);
            let vol = &mut self.vols[v];
            let value = vol.traffic.foreign_value();
            vol.checker.start_change(start, first, n, value, false);
            vol.write_image(backend, first, n, value);
            vol.checker.end_change(start, end, true, true);
        }
        self.vols[v].release_image(backend);
        backend.belongs_to_others();
        self.cover.hit("foreign write");
        self.note("foreign write", v as u64, 0, 0);
    }

    /// Somebody resizes the image of a volume that is not in use.
    fn resize(&mut self, v: usize) {
        let sector = SECTOR_BYTES as u64;
        let (vol, backend) = (&mut self.vols[v], self.machine.backend_mut(v));
        let old = vol.plan.size_bytes;
        let size = (old / sector / 2 + self.rng.below(old / sector + 1)).max(8) * sector;
        backend.resize(size);
        backend.belongs_to_others();
        vol.past.set_resizing(true);
        vol.resized(backend);
        vol.release_image(backend);
        self.note("resize", v as u64, old, size);
        self.cover.hit("resize");
    }
}
