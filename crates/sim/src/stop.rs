//! Stops and starts: kills, power losses, recovery, and volumes that find their images again.

use crate::backend::Trouble;
use crate::checker::BASE_VALUE;
use crate::disk::FaultsDone;
use crate::plan::{MS, Theme};
use crate::volume::{Place, Vol};
use crate::world::{Control, ControlKind, FlightKind, Happening, World};
use tidepool_engine::api::*;
use tidepool_engine::format::byte;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{AddError, Attach, Engine, FormatOptions, OpenError, OwnObjects, format_device};

/// How a life of the core ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// SIGKILL.
    Kill,
    /// Power is lost.
    Power,
    /// After an orderly shutdown.
    Orderly,
}

impl World {
    /// Lays the device out and starts everything.
    pub(crate) fn begin(&mut self) {
        for v in 0..self.vols.len() {
            let (base, size) = (self.vols[v].plan.base_bytes, self.vols[v].plan.size_bytes);
            self.vols[v].backend.own = OwnObjects::none(size);
            self.vols[v].write_image(0, base / SECTOR_BYTES as u64, BASE_VALUE);
            if self.vols[v].plan.parent.is_some() {
                self.vols[v].backend.own = OwnObjects::none(size).inheriting(base);
                if self.vols[v].plan.read_only && base > 0 {
                    // A snapshot in between has something that was written after it was cloned.
                    let some = self.rng.below(base);
                    self.vols[v].backend.own.insert(some, 1);
                }
            }
        }
        self.format();
        if self.plan.theme == Theme::Corruption {
            self.vols.iter_mut().for_each(|vol| vol.checker.damaged_from = 0);
        }
        self.disk.lies = self.plan.theme == Theme::Lies && self.rng.permille(500);
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

    fn format(&mut self) {
        self.formats += 1;
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.formats.to_le_bytes());
        self.uuid = uuid;
        let options =
            FormatOptions { uuid, size_bytes: self.plan.cache_bytes, segment_bytes: self.plan.segment_bytes };
        if let Err(error) = format_device(&mut self.disk, &options, &mut |_, _| ()) {
            self.fail(format!("format: {error}"));
        }
    }

    /// Ends the life of the core.
    pub(crate) fn stop(&mut self, how: Stop) {
        self.note("stop", how as u64, 0, 0);
        self.tick += 1;
        let tick = self.tick;
        self.count_stop(how);
        let clean = if self.is_fenced() { Vec::new() } else { self.clean_volumes() };
        let unflushed = self.unflushed_volumes();
        self.disk.rng = self.rng.fork();
        let mut flights: Vec<_> = std::mem::take(&mut self.flights).into_values().collect();
        flights.sort_unstable_by_key(|flight| flight.name);
        for flight in flights {
            match flight.kind {
                FlightKind::DeviceWrite { offset, data, .. } => self.disk.cut_at(offset, &data),
                FlightKind::Write { volume, first, data, applied: false } => {
                    let delivered = self.vols[volume].backend.trouble_now(self.now) != Trouble::Stopped;
                    if delivered {
                        self.vols[volume].backend.apply_cut(&mut self.rng, first, &data);
                    }
                }
                FlightKind::Disown { volume } if self.rng.permille(500) => {
                    self.vols[volume].backend.disowned = true;
                }
                FlightKind::RedoWrite { volume, name, bytes } if self.delivers(volume) => {
                    self.vols[volume].backend.redo.write_cut(&mut self.rng, name, &bytes);
                }
                FlightKind::RedoCommit { volume, generation, commit }
                    if self.delivers(volume) && self.rng.permille(500) =>
                {
                    self.commit(volume, generation, commit);
                    self.cover.hit("kill during commit");
                }
                FlightKind::RedoTrim { volume, first } if self.delivers(volume) && self.rng.permille(500) => {
                    self.vols[volume].backend.redo.trim(first);
                }
                FlightKind::Resize { volume, size_bytes }
                    if self.delivers(volume) && self.rng.permille(500) =>
                {
                    self.vols[volume].backend.resize(size_bytes);
                }
                _ => {}
            }
        }
        self.collect_counters();
        self.engine = None;
        self.life += 1;
        self.stopping = false;
        self.device_failed = false;
        (self.filled, self.removed) = ([0; 2], false);
        self.armed = None;
        self.controls.clear();
        self.seen.clear();
        for (_, sent) in std::mem::take(&mut self.sent) {
            if let Some(slot) = sent.slot {
                self.vols[sent.volume].idle_slots.push(slot);
            }
        }
        let corrupt = self.plan.theme == Theme::Corruption;
        if how == Stop::Kill {
            self.weigh_evidence();
        }
        for (vol, unflushed) in self.vols.iter_mut().zip(unflushed) {
            vol.forget_life();
            match how {
                Stop::Power => {}
                // A damaged block in the unsynced tail looks like a torn one: the tail may go.
                Stop::Kill if corrupt => {
                    vol.checker.power_lost(tick);
                    vol.must_verify = true;
                }
                Stop::Kill => vol.checker.killed(tick),
                Stop::Orderly => {
                    vol.checker.killed(tick);
                    if !unflushed && !self.disk.lied {
                        vol.checker.settle(tick);
                    }
                    if self.disk.lies {
                        vol.checker.unsure_from = vol.checker.unsure_from.min(tick);
                    }
                }
            }
        }
        for vol in self.vols.iter_mut().filter(|vol| vol.resizing) {
            self.cover.hit("stop during a change of size");
            vol.resized();
        }
        for v in 0..self.vols.len() {
            self.check_cut(v, false);
        }
        if how == Stop::Power {
            self.lose_power();
        }
        if self.disk.dead || self.is_fenced() {
            // The record beside the image no longer names the cache, or its data is gone with it.
            self.replace_cache(if how == Stop::Power { Vec::new() } else { clean });
        }
        let pause = self.rng.around(20 * MS);
        self.after(pause, Happening::Reopen);
    }

    /// What was sent to a backend may have arrived.
    fn delivers(&self, volume: usize) -> bool {
        let backend = &self.vols[volume].backend;
        !matches!(backend.trouble_now(self.now), Trouble::Stopped | Trouble::Fenced)
    }

    /// Which changes may be taken for a part of a torn tail.
    fn weigh_evidence(&mut self) {
        if self.plan.theme != Theme::Corruption {
            return;
        }
        for vol in &mut self.vols {
            let unsure = vol.evidence.unsure_from(&self.disk);
            vol.checker.unsure_from = vol.checker.unsure_from.min(unsure);
            vol.evidence.clear();
        }
    }

    /// What is not on stable media is lost, or not.
    pub(crate) fn lose_power(&mut self) {
        self.note("power loss", 0, 0, 0);
        let lied = self.disk.lied;
        self.disk.rng = self.rng.fork();
        self.disk.power_loss();
        self.weigh_evidence();
        self.cover.add("power loss after a lie", u64::from(lied));
        self.tick += 1;
        for vol in &mut self.vols {
            vol.backend.store.power_loss(&mut self.rng);
            vol.checker.power_lost(self.tick);
            vol.must_verify = true;
        }
        for v in 0..self.vols.len() {
            self.check_cut(v, true);
        }
    }

    /// Some volume has been taken by another owner.
    pub(crate) fn is_fenced(&self) -> bool {
        self.vols.iter().any(|v| v.backend.trouble == Trouble::Fenced)
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
        let segments = byte(self.geo.segments_first_block);
        let kinds: Vec<&'static str> = self
            .flights
            .values()
            .filter_map(|f| match &f.kind {
                FlightKind::DeviceWrite { offset, .. } if *offset < segments => {
                    Some("kill during checkpoint")
                }
                FlightKind::Write { .. } => Some("kill during drain"),
                _ => None,
            })
            .collect();
        kinds.into_iter().for_each(|k| self.cover.hit(k));
        if self.engine.as_ref().is_some_and(|e| e.device_status().reclaiming) {
            self.cover.hit("kill during reclaim");
        }
    }

    /// Whether each volume says that writes past the cache may not be on its backend's stable media. One that
    /// was not attached in this life cannot know.
    fn unflushed_volumes(&mut self) -> Vec<bool> {
        let Some(engine) = &self.engine else { return vec![true; self.vols.len()] };
        let status = |v: &Vol| v.id.and_then(|id| engine.volume_status(self.now, id));
        let unflushed =
            |v| status(v).is_some_and(|s| s.backend_unflushed || s.state == VolumeState::Detached);
        let all: Vec<bool> = self.vols.iter().map(unflushed).collect();
        self.cover.add("stopped without a flush", u64::from(all.contains(&true)));
        all
    }

    /// Volumes of which everything is in the backend.
    fn clean_volumes(&self) -> Vec<usize> {
        let Some(engine) = &self.engine else { return Vec::new() };
        let clean = |v: &usize| {
            let status = self.vols[*v].id.and_then(|id| engine.volume_status(self.now, id));
            status
                .is_some_and(|s| s.dirty_bytes == 0 && s.lost_blocks == 0 && s.sequence_drained == s.sequence)
        };
        (0..self.vols.len()).filter(clean).collect()
    }

    /// A new cache device, or the old one laid out anew. What was dirty in it is lost; `clean` volumes
    /// must have everything in their images.
    pub(crate) fn replace_cache(&mut self, clean: Vec<usize>) {
        self.cover.hit("cache lost");
        for v in 0..self.vols.len() {
            self.check_cut(v, true);
        }
        self.disk = self.new_disk();
        self.format();
        for v in 0..self.vols.len() {
            self.cover.add("redo replayed", u64::from(!self.vols[v].backend.redo.is_empty()));
            if let Err(what) = self.vols[v].recover_image() {
                return self.fail(format!("volume {v}: {what}"));
            }
            if clean.contains(&v) {
                self.check_image(v);
                self.cover.hit("image checked after device death");
            }
            let vol = &mut self.vols[v];
            // A host that takes an image over flushes it first.
            vol.backend.store.sync(vol.backend.store.sync_point());
            if vol.backend.trouble == Trouble::Fenced {
                vol.backend.heal();
            }
            let backend = &vol.backend;
            vol.checker.adopt(&mut |block, out| backend.store.read(block, out));
            vol.must_verify = false;
            vol.place = Place::Out;
            vol.id = None;
            let pause = self.rng.around(10 * MS);
            self.after(pause, Happening::Add { volume: v });
        }
    }

    /// The cache that was opened cannot be used.
    fn give_cache_up(&mut self) {
        self.collect_counters();
        self.stop(Stop::Kill);
        if !self.disk.dead {
            self.replace_cache(Vec::new());
        }
    }

    /// Looking at a cache changes nothing, and finds nothing wrong where nothing was damaged.
    fn inspect(&mut self) {
        let before = self.disk.sync_point();
        let inspected = tidepool_engine::inspect(&mut self.disk);
        let checked = tidepool_engine::check(&mut self.disk, &mut |_, _| ());
        if self.disk.sync_point() != before {
            return self.fail("looking at the cache has changed it".into());
        }
        self.cover.hit("inspected");
        if self.may_lose_data() {
            return;
        }
        match (inspected, checked) {
            (Ok(_), Ok(report)) if report.damaged.is_empty() => {}
            (Ok(_), Ok(report)) => {
                self.fail(format!("{} cached blocks are damaged without a fault", report.damaged.len()));
            }
            (Err(error), _) | (_, Err(error)) => self.fail(format!("the cache cannot be looked at: {error}")),
        }
    }

    /// The process starts: recovery, which may be stopped again and again.
    pub(crate) fn reopen(&mut self) {
        if self.engine.is_some() || self.failure.is_some() {
            return;
        }
        self.disk.rng = self.rng.fork();
        if self.life > 0 && self.rng.permille(100) {
            self.inspect();
        }
        let before = self.disk.blocks_read;
        let stops = if self.rng.permille(300) && self.life > 0 { self.rng.range(1..4) } else { 0 };
        for _ in 0..stops {
            self.disk.stop_after = Some(self.rng.below(400));
            let opened = Engine::open(&mut self.disk, self.plan.engine.clone(), self.now);
            let stopped = self.disk.stop_after == Some(0);
            self.disk.stop_after = None;
            if stopped && opened.is_err() {
                self.cover.hit("stop during recovery");
                if self.rng.permille(self.plan.power) {
                    self.lose_power();
                }
            }
        }
        match Engine::open(&mut self.disk, self.plan.engine.clone(), self.now) {
            Ok((engine, report)) => {
                self.note("opened", report.checkpoint, report.records_replayed, report.records_cut);
                self.recovery_blocks_max = self.recovery_blocks_max.max(self.disk.blocks_read - before);
                self.note("found", report.blocks_lost, report.volumes_failed, report.summaries_rebuilt);
                self.saw(&(&report, self.disk.blocks_read - before, self.disk.sync_point()));
                self.cover.add("replay with tail", u64::from(report.records_replayed > 0));
                self.cover.add("torn tail cut", u64::from(report.records_cut > 0));
                self.cover.add("summary rebuilt", report.summaries_rebuilt);
                self.cover.add("block lost", report.blocks_lost);
                self.arena_baseline = engine.device_status().arena_used_bytes;
                self.engine = Some(Box::new(engine));
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
        let engine = self.engine.as_ref().expect("opened just now");
        let known = engine.volumes();
        let failed: Vec<bool> = known
            .iter()
            .map(|(id, _)| {
                engine.volume_status(self.now, *id).is_some_and(|s| s.state == VolumeState::Failed)
            })
            .collect();
        if failed.contains(&true) {
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
                Some((id, spec)) => {
                    if was == Place::Out && self.may_lose_data() {
                        // Its removal was not stable. The image, which was given back, does not name the cache any more.
                        return self.give_cache_up();
                    }
                    if was == Place::Out {
                        return self.fail(format!("volume {v} is in the cache again after its removal"));
                    }
                    if !self.vols[v].attachments.contains(&spec.attachment) && !self.may_lose_data() {
                        return self.fail(format!("volume {v} has an attachment from its past"));
                    }
                    let size = self.vols[v].plan.size_bytes;
                    if !self.vols[v].resizing && spec.size_bytes != size && !self.may_lose_data() {
                        let found = spec.size_bytes;
                        return self.fail(format!("volume {v} has {found} bytes again, which was {size}"));
                    }
                    self.vols[v].attachments = vec![spec.attachment.clone()];
                    self.vols[v].id = Some(*id);
                    self.vols[v].place = Place::Detached;
                    self.vols[v].recovered_generation = spec.generation;
                    let (life, pause) = (self.life, self.rng.around(5 * MS));
                    self.after(pause, Happening::Attach { life, volume: v });
                }
                None if matches!(was, Place::Out | Place::Adding | Place::Removing) => {
                    self.vols[v].id = None;
                    self.vols[v].place = Place::Out;
                    self.check_image(v);
                    let pause = self.rng.around(5 * MS);
                    self.after(pause, Happening::Add { volume: v });
                }
                None if self.may_lose_data() => return self.give_cache_up(),
                None => return self.fail(format!("volume {v} is not in the cache any more (was {was:?})")),
            }
        }
    }

    /// The image of a volume that is not in the cache must hold everything.
    pub(crate) fn check_image(&mut self, v: usize) {
        self.tick += 2;
        let tick = self.tick;
        let vol = &mut self.vols[v];
        let mut bytes = [0; BLOCK_BYTES];
        let mut problem = None;
        for block in vol.checker.touched() {
            // An image may be smaller already than the volume, of which nobody has heard yet that it is.
            if vol.resizing && block * BLOCK_BYTES as u64 >= vol.backend.size_bytes {
                continue;
            }
            vol.backend.store.read(block, &mut bytes);
            if let Err(what) = vol.checker.check_image(block, &bytes, tick) {
                problem = Some(what);
                break;
            }
        }
        if vol.must_verify && problem.is_none() {
            problem = vol.checker.end_verify(tick).err();
            vol.must_verify = false;
            self.distrust(v);
        }
        if let Some(what) = problem {
            self.fail(format!("volume {v}: {what}"));
        }
    }

    /// What was seen is stable, but nothing that comes now is, as long as the device lies.
    pub(crate) fn distrust(&mut self, v: usize) {
        if self.disk.lies {
            self.vols[v].checker.unsure_from = self.tick;
        }
    }

    /// A volume of a restarted cache gets its backend.
    pub(crate) fn attach(&mut self, v: usize) {
        if self.vols[v].place != Place::Detached || self.engine.is_none() {
            return;
        }
        let vol = &self.vols[v];
        if vol.backend.is_away(self.now) {
            let life = self.life;
            return self.at(vol.backend.trouble_until + MS, Happening::Attach { life, volume: v });
        }
        let id = vol.id.expect("a detached volume has a number");
        let engine = self.engine.as_ref().expect("checked above");
        let status = engine.volume_status(self.now, id).expect("a known volume has a status");
        let forgotten = vol.backend.is_forgotten(vol.recovered_generation);
        if forgotten || vol.backend.redo.is_ahead(self.uuid, status.sequence) {
            // As an open of an image does: the cache has lost that it was given the image, or what the image or its
            // redo has got from it.
            if !self.may_lose_data() {
                return self.fail(format!("volume {v}: the cache is behind the image"));
            }
            self.cover.hit("cache behind its image");
            return self.give_cache_up();
        }
        let clean =
            status.dirty_bytes == 0 && status.lost_blocks == 0 && status.sequence_drained == status.sequence;
        let changes = !vol.plan.read_only;
        if clean && changes && !vol.must_verify && self.rng.permille(100) {
            self.foreign_write(v);
        }
        if clean && changes && !self.vols[v].must_verify && self.rng.permille(50) {
            self.resize(v);
        }
        let vol = &mut self.vols[v];
        // Proof: the record beside the image is the one that the cache knows, and nobody wrote since.
        let proof = !vol.backend.foreign && vol.backend.generation == vol.recovered_generation;
        let keep_clean = proof && !self.rng.permille(50);
        vol.backend.foreign = false;
        vol.backend.own_as(vol.recovered_generation);
        if !status.dirty {
            // As an open of an image does with what an earlier owner has left: the image is the first cut.
            vol.backend.redo.clear();
        }
        if self.plan.modes && self.rng.permille(100) {
            vol.mode = self.rng.pick(&[Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off]);
        }
        let attach = Attach {
            generation: vol.backend.generation,
            size_bytes: vol.plan.size_bytes,
            mode: vol.mode,
            drain: vol.plan.drain,
            dirty_bytes_max: vol.dirty_bytes_max,
            read_only: vol.plan.read_only,
            attachment: self.next_control.to_le_bytes().to_vec(),
            keep_clean,
        };
        vol.own_at_open = vol.backend.own.clone();
        vol.place = Place::Attaching;
        vol.attachments.push(attach.attachment.clone());
        if !keep_clean {
            self.cover.hit("clean dropped at attach");
        }
        let control = self.control(v, ControlKind::Attach);
        let now = self.now;
        let engine = self.engine.as_mut().expect("checked above");
        let attached = engine.attach(now, id, attach, control);
        if let Err(error) = attached {
            self.controls.remove(&control);
            if self.plan.theme == Theme::Lies && self.may_lose_data() && matches!(error, AddError::Shrunk(_))
            {
                // The device has lost the checkpoint without which the image would not have become smaller.
                self.cover.hit("cache behind its image");
                return self.give_cache_up();
            }
            if !self.disk.dead {
                self.fail(format!("volume {v} cannot be attached: {error}"));
            }
        }
    }

    /// A volume that is not in the cache is added.
    pub(crate) fn add(&mut self, v: usize) {
        if self.engine.is_none() || self.vols[v].place != Place::Out || self.stopping {
            if self.vols[v].place == Place::Out {
                self.after(50 * MS, Happening::Add { volume: v });
            }
            return;
        }
        if self.vols[v].backend.is_away(self.now) {
            return self.after(100 * MS, Happening::Add { volume: v });
        }
        if self.rng.permille(200) && !self.disk.dead && !self.vols[v].plan.read_only {
            self.foreign_write(v);
        }
        let vol = &mut self.vols[v];
        vol.backend.foreign = false;
        vol.backend.disowned = false;
        vol.backend.own_as(0);
        vol.backend.redo.clear();
        if self.plan.modes {
            vol.mode = self.rng.pick(&[Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off]);
        }
        let spec = VolumeSpec {
            name: vol.name.clone(),
            backend: format!("file:/sim/{}", vol.name),
            size_bytes: vol.plan.size_bytes,
            mode: vol.mode,
            drain: vol.plan.drain,
            dirty_bytes_max: vol.dirty_bytes_max,
            read_only: vol.plan.read_only,
            generation: vol.backend.generation,
            attachment: self.next_control.to_le_bytes().to_vec(),
        };
        vol.attachments = vec![spec.attachment.clone()];
        vol.own_at_open = vol.backend.own.clone();
        let control = self.control(v, ControlKind::Add);
        let now = self.now;
        let engine = self.engine.as_mut().expect("checked above");
        match engine.add_volume(now, spec, control) {
            Ok(id) => {
                self.note("add", v as u64, self.vols[v].mode as u64, control);
                self.vols[v].id = Some(id);
                // The log begins anew, and the number may be that of a volume that was removed.
                self.vols[v].evidence.clear();
                self.vols[v].place = Place::Adding;
            }
            Err(error) => {
                self.controls.remove(&control);
                if self.disk.dead {
                    self.after(100 * MS, Happening::Add { volume: v });
                } else {
                    self.fail(format!("volume {v} cannot be added: {error}"));
                }
            }
        }
    }

    /// Somebody else writes to the image of a volume while the cache has nothing dirty of it.
    fn foreign_write(&mut self, v: usize) {
        let sectors = self.vols[v].plan.size_bytes / SECTOR_BYTES as u64;
        for _ in 0..self.rng.range(1..4) {
            let first = self.rng.below(sectors);
            let n = self.rng.range(1..200).min(sectors - first);
            self.tick += 2;
            let (start, end) = (self.tick - 1, self.tick);
            let vol = &mut self.vols[v];
            vol.foreign_writes += 1;
            let value = Vol::value(None, vol.foreign_writes);
            vol.checker.start_change(start, first, n, value, false);
            vol.write_image(first, n, value);
            vol.checker.end_change(start, end, true, true);
        }
        self.vols[v].release_image();
        self.vols[v].backend.foreign = true;
        self.cover.hit("foreign write");
        self.note("foreign write", v as u64, 0, 0);
    }

    /// Somebody resizes the image of a volume that is not in use.
    fn resize(&mut self, v: usize) {
        let sector = SECTOR_BYTES as u64;
        let vol = &mut self.vols[v];
        let old = vol.plan.size_bytes;
        let size = (old / sector / 2 + self.rng.below(old / sector + 1)).max(8) * sector;
        vol.backend.resize(size);
        vol.backend.foreign = true;
        vol.resizing = true;
        vol.resized();
        vol.release_image();
        self.note("resize", v as u64, old, size);
        self.cover.hit("resize");
    }

    /// A number for a control operation.
    pub(crate) fn control(&mut self, volume: usize, kind: ControlKind) -> u64 {
        let control = self.next_control;
        self.next_control += 1;
        self.controls.insert(control, Control { volume, kind });
        self.vols[volume].controls += 1;
        control
    }

    /// Adds up what the core has counted in this life.
    pub(crate) fn collect_counters(&mut self) {
        let Some(engine) = &self.engine else { return };
        let device = engine.device_status();
        for (what, n) in self.disk.done.named() {
            self.cover.add(what, n);
        }
        self.disk.done = FaultsDone::default();
        self.cover.add("checkpoint", device.checkpoints);
        self.cover.add("reclaim", device.reclaims);
        for vol in &self.vols {
            let Some(status) = vol.id.and_then(|id| engine.volume_status(self.now, id)) else { continue };
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

impl Vol {
    /// Nothing of the core's life is left.
    fn forget_life(&mut self) {
        self.failed_at = None;
        self.flushed = false;
        (self.own_told, self.linked) = (false, false);
        self.changing = 0;
        self.controls = 0;
        self.verifying = 0;
        self.verify_from = 0;
    }
}
