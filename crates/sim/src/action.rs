//! What happens beside the clients' requests: operators, failures, and the end of the run.

use crate::backend::Trouble;
use crate::disk::{Delay, DiskFaults};
use crate::plan::{MS, S, Theme};
use crate::stop::Stop;
use crate::volume::{Place, Sent};
use crate::world::{Control, ControlKind, Ending, Happening, Moment, World};
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

/// How long everything may take to come to rest once all is healed.
const SETTLE_NS: Nanos = 900 * S;
/// A request may wait this long while its backend works.
const WAIT_NS: Nanos = 120 * S;
/// Blocks of one read of the final comparison.
const SCAN_BLOCKS: u64 = 16;
/// Blocks that the ghost may mistake for others beside its usual share.
const STRANGERS: u64 = 64;
/// Blocks of the largest volume.
const SIZE_BLOCKS_MAX: u64 = 40_000;
/// Reads of the final comparison in flight.
const SCAN_IN_FLIGHT: usize = 16;

impl World {
    pub(crate) fn action(&mut self) {
        if self.ending != Ending::Not {
            return;
        }
        if self.now >= self.until {
            return self.begin_end();
        }
        let pause = self.rng.around(self.plan.action_ns);
        self.after(pause, Happening::Action);
        if self.engine.is_none() {
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
                    self.armed = Some((self.any_moment(), how));
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
            38 => self.control_volume(v, |w, _| ControlKind::Attachment(w.next_control)),
            39..=42 => self.control_volume(v, |w, _| ControlKind::Remove { verify: w.rng.permille(500) }),
            43..=64 => self.break_something(v),
            65..=69 => self.rest(v),
            70..=80 => self.read_cached(v),
            81..=84 => self.control_volume(v, |w, _| ControlKind::Snapshot { floor: w.tick }),
            85..=87 if !self.vols[v].plan.read_only => {
                self.control_volume(v, |w, v| ControlKind::Resize { size_bytes: w.another_size(v) });
            }
            _ => {}
        }
    }

    /// The core has not been stopped often enough yet.
    pub(crate) fn may_stop(&self) -> bool {
        self.ending == Ending::Not && self.life < self.plan.stops_max
    }

    pub(crate) fn any_stop(&mut self) -> Stop {
        if self.rng.permille(self.plan.power) { Stop::Power } else { Stop::Kill }
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
        for slot in std::mem::take(&mut self.vols[v].idle_slots) {
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

    fn shut_down(&mut self) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        let control = self.control(0, ControlKind::Shutdown);
        self.note("shutdown", control, 0, 0);
        let now = self.now;
        self.engine.as_mut().expect("a running core").shutdown(now, control);
    }

    fn drain(&mut self, v: usize) {
        self.control_volume(v, |w, v| ControlKind::Drain {
            changes: w.vols[v].changes,
            quiet: w.vols[v].changing == 0,
        });
    }

    fn control_volume(&mut self, v: usize, kind: impl Fn(&mut World, usize) -> ControlKind) {
        let place = self.vols[v].place;
        if place != Place::Serving || self.stopping {
            return;
        }
        let kind = kind(self, v);
        let alone = matches!(
            kind,
            ControlKind::Mode(_)
                | ControlKind::Remove { .. }
                | ControlKind::Snapshot { .. }
                | ControlKind::Resize { .. }
        );
        let stays = matches!(kind, ControlKind::Remove { .. }) && self.is_parent(v);
        if stays || alone && self.vols[v].controls > 0 {
            return;
        }
        self.send_control(v, kind);
    }

    /// Half to one and a half times of what a volume has, in whole blocks.
    fn another_size(&mut self, v: usize) -> u64 {
        let blocks = (self.vols[v].plan.size_bytes / BLOCK_BYTES as u64).max(1);
        (blocks.div_ceil(2) + self.rng.below(blocks + 1)).min(SIZE_BLOCKS_MAX) * BLOCK_BYTES as u64
    }

    pub(crate) fn send_control(&mut self, v: usize, kind: ControlKind) {
        let id = self.vols[v].id.expect("a volume in the cache has a number");
        let control = self.control(v, kind);
        let now = self.now;
        let quota = self.rng.pick(&[0, 0, 64 << 10, 1 << 20, 8 << 20, 32 << 20]);
        let engine = self.engine.as_mut().expect("a running core");
        let what = match kind {
            ControlKind::Mode(mode) => {
                self.vols[v].mode = mode;
                if self.vols[v].goes_direct() {
                    let tick = self.tick;
                    self.vols[v].checker.goes_direct(tick);
                }
                let backlog = engine.volume_status(now, id).is_some_and(|s| s.dirty_bytes > 0);
                self.cover.add("mode change with backlog", u64::from(backlog));
                engine.set_mode(now, id, mode, control);
                "set mode"
            }
            ControlKind::Quota => {
                self.vols[v].dirty_bytes_max = quota;
                engine.set_dirty_bytes_max(now, id, quota, control);
                "set quota"
            }
            ControlKind::Attachment(number) => {
                let attachment = number.to_le_bytes().to_vec();
                self.vols[v].attachments.push(attachment.clone());
                engine.set_attachment(now, id, attachment, control);
                "set attachment"
            }
            ControlKind::Drain { .. } => {
                engine.drain(now, id, control);
                "drain"
            }
            ControlKind::Snapshot { .. } => {
                engine.snapshot(now, id, control);
                "snapshot"
            }
            ControlKind::Resize { size_bytes } => {
                self.tick += 1;
                let vol = &mut self.vols[v];
                vol.resizing = true;
                if size_bytes < vol.plan.size_bytes {
                    vol.begin_shrink(size_bytes, self.tick);
                }
                engine.resize(now, id, size_bytes, control);
                "resize"
            }
            ControlKind::Remove { verify } => {
                self.vols[v].place = Place::Removing;
                for sent in self.sent.values_mut().filter(|s| s.volume == v) {
                    sent.closing = true;
                }
                engine.remove(now, id, verify, control);
                "remove"
            }
            ControlKind::Add | ControlKind::Attach | ControlKind::Shutdown => {
                unreachable!("sent elsewhere")
            }
        };
        self.removed |= matches!(kind, ControlKind::Remove { .. });
        self.note(what, v as u64, control, 0);
    }

    /// Faults, by the theme of the run.
    fn break_something(&mut self, v: usize) {
        if self.rng.permille(100) {
            return self.delay_device();
        }
        match self.plan.theme {
            Theme::Crashes => {}
            // Nothing gives a volume back that another owner has taken.
            Theme::Backends if self.vols[v].backend.trouble == Trouble::Fenced => {}
            Theme::Backends => {
                if self.rng.permille(30) {
                    return self.fence(v);
                }
                let trouble = match self.rng.below(8) {
                    0 | 1 => Trouble::Stopped,
                    7 => Trouble::Disconnected,
                    2 => Trouble::Errors(self.rng.pick(&[10, 200, 1000])),
                    3 => Trouble::Full,
                    4 | 5 => Trouble::Flushes(self.rng.pick(&[100, 500])),
                    _ => Trouble::Slow(self.rng.range(2..100)),
                };
                let long = self.rng.pick(&[100 * MS, S, 20 * S]);
                let until = self.now + self.rng.around(long);
                let backend = &mut self.vols[v].backend;
                backend.trouble = trouble;
                backend.trouble_until = until;
                self.vols[v].trouble_at = until;
                self.note("trouble", v as u64, until, 0);
                match trouble {
                    Trouble::Stopped => self.cover.hit("backend stopped"),
                    Trouble::Slow(_) => self.cover.hit("backend slow"),
                    Trouble::Disconnected => self.disconnect(v),
                    _ => {}
                }
            }
            Theme::Corruption => {
                if self.rng.permille(300) {
                    let ppm = self.rng.pick(&[0, 0, 2_000, 20_000]);
                    self.disk.faults = DiskFaults { lost_ppm: ppm, misdirected_ppm: ppm / 2 };
                } else if self.rng.permille(500) {
                    self.damage(1);
                }
            }
            Theme::Lies => {
                self.disk.lies = self.rng.permille(700);
                self.note("lies", self.disk.lies.into(), 0, 0);
                let tick = self.next_tick();
                if !self.disk.lies {
                    return;
                }
                for vol in &mut self.vols {
                    vol.checker.unsure_from = vol.checker.unsure_from.min(tick);
                }
                if self.may_stop() && self.rng.permille(600) {
                    // The image is to get what the cache then loses.
                    self.drain(v);
                    self.armed = Some((Moment::Commit, Stop::Power));
                }
            }
            Theme::DeviceDeath => {
                // What is dirty leaves a dead device soon: a single block is hardly ever one of those.
                let many = self.rng.range(1..1000);
                if self.disk.dead && self.rng.permille(500) {
                    self.damage(many);
                } else if self.rng.permille(700) && !self.disk.dead {
                    let some = self.rng.permille(400).then(|| self.rng.range(1..4) as u32);
                    self.disk.break_down(some);
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
        }
    }

    fn damage(&mut self, blocks: u64) {
        self.disk.rng = self.rng.fork();
        for block in self.disk.damage(blocks) {
            self.note("damage", block, 0, 0);
        }
    }

    /// The cache device stops for a while, or becomes slow.
    fn delay_device(&mut self) {
        let long = self.rng.pick(&[10 * MS, 200 * MS, 5 * S]);
        let until = self.now + self.rng.around(long);
        let slow = self.rng.permille(500).then(|| self.rng.range(2..50));
        self.disk.delay = slow.map_or(Delay::Stopped, Delay::Slow);
        self.disk.delay_until = until;
        for vol in &mut self.vols {
            // Whatever waits for the device may wait as long.
            vol.trouble_at = vol.trouble_at.max(until);
        }
        self.note("device delayed", until, slow.unwrap_or(0), 0);
        self.cover.hit(if slow.is_some() { "device slow" } else { "device stopped" });
    }

    /// The connection to a backend is gone for a moment, if nothing else is wrong with it.
    pub(crate) fn cut_off(&mut self, v: usize) {
        if self.vols[v].backend.trouble_now(self.now) != Trouble::None || self.ending != Ending::Not {
            return;
        }
        let until = self.now + self.rng.around(200 * MS);
        let vol = &mut self.vols[v];
        (vol.backend.trouble, vol.backend.trouble_until) = (Trouble::Disconnected, until);
        vol.trouble_at = until;
        self.note("cut off", v as u64, until, 0);
        self.disconnect(v);
    }

    /// What is in flight to a backend comes back as failed when the connection is there again, done or not.
    fn disconnect(&mut self, v: usize) {
        let lost = self.flights.values_mut().filter(|f| f.kind.backend() == Some(v));
        let lost = lost.map(|f| f.disconnected = true).count() as u64;
        self.cover.add("request of the backend lost", lost);
    }

    /// Another owner takes a volume: from now on its backend refuses everything.
    fn fence(&mut self, v: usize) {
        let backend = &mut self.vols[v].backend;
        (backend.trouble, backend.trouble_until) = (Trouble::Fenced, Nanos::MAX);
        self.vols[v].trouble_at = self.now;
        self.note("fence", v as u64, 0, 0);
        self.cover.hit("fence");
        let life = self.life;
        self.after(5 * S, Happening::Stop { life, how: Stop::Kill });
    }

    /// With a stopped backend, cached blocks must be served all the same.
    fn read_cached(&mut self, v: usize) {
        let vol = &self.vols[v];
        let Some(id) = vol.id else { return };
        if vol.place != Place::Serving
            || self.stopping
            || self.disk.dead
            || !vol.backend.is_away(self.now)
            || self.disk.delay_now(self.now) != Delay::None
            || self.may_lose_data()
        {
            return;
        }
        let engine = self.engine.as_ref().expect("a running core");
        let mut extents = Vec::new();
        let block = BLOCK_BYTES as u64;
        let from = self.rng.below(vol.plan.size_bytes.div_ceil(block)) * block;
        engine.block_status(id, from, vol.plan.size_bytes - from, 64, &mut extents);
        let mut at = from;
        for extent in extents {
            if extent.cached {
                let len = extent.len.min(16 * block);
                let request = self.next_request;
                if self.send(v, Op::Read, at, len, None, None) {
                    self.after(20 * S, Happening::MustBeAnswered { request });
                }
                return;
            }
            at += extent.len;
        }
    }

    /// What must hold at any time.
    pub(crate) fn check_invariants(&mut self) {
        let Some(engine) = &self.engine else { return };
        let device = engine.device_status();
        let usable = device.segments.saturating_sub(12) * device.segment_bytes;
        let all: Vec<_> =
            engine.volumes().iter().filter_map(|(id, _)| engine.volume_status(self.now, *id)).collect();
        let cached: u64 = all.iter().map(|s| s.cached_bytes).sum();
        if cached != device.cached_blocks * BLOCK_BYTES as u64 {
            let blocks = device.cached_blocks;
            return self.fail(format!("volumes have {cached} bytes cached, but the device {blocks} blocks"));
        }
        if all.iter().map(|s| s.dirty_bytes_max).sum::<u64>() > usable * 3 / 4 + 4096 * all.len() as u64 {
            return self.fail("the quotas add up to more than the cache holds".into());
        }
        let evicted: u64 = all.iter().map(|s| s.count.evicted_blocks).sum();
        let [new, remembered] = self.filled;
        // The ghost takes one stranger in four hundred for somebody it knows.
        if !self.removed && remembered > evicted + new / 50 + STRANGERS {
            return self.fail(format!("the ghost knows {remembered} blocks of {evicted} that were evicted"));
        }
        for s in &all {
            if s.dirty_bytes > s.cached_bytes {
                return self.fail(format!("volume {}: more is dirty than cached", s.spec.name));
            }
            if s.sequence_drained > s.sequence {
                return self.fail(format!("volume {}: drained beyond its log", s.spec.name));
            }
            if s.lost_blocks > 0 && device.failed {
                self.cover.hit("block lost on a dead device");
                if s.state != VolumeState::Failed && s.state != VolumeState::Fenced {
                    return self.fail(format!("volume {}: serves without a block that it lost", s.spec.name));
                }
            }
            if s.lost_blocks > 0 && !self.may_lose_data() {
                return self.fail(format!("volume {}: a block is lost without a fault", s.spec.name));
            }
            if s.state == VolumeState::Failed && !self.may_lose_data() {
                return self.fail(format!("volume {}: failed without a fault", s.spec.name));
            }
        }
        self.check_waits();
        self.check_extents();
    }

    /// A volume whose log is drained has no dirty blocks.
    pub(crate) fn check_drained(&mut self, v: usize) {
        let Some(engine) = &self.engine else { return };
        let status = self.vols[v].id.and_then(|id| engine.volume_status(self.now, id));
        if status.as_ref().is_some_and(|s| s.dirty_bytes > 0 && s.sequence_drained == s.sequence) {
            self.fail(format!("volume {v}: all of its log is drained, but not all blocks: {status:?}"));
        }
    }

    /// A request may wait for its own backend, but not for that of another volume.
    fn check_waits(&mut self) {
        let waits = |s: &Sent| {
            s.at + WAIT_NS < self.now && self.vols[s.volume].trouble_at.saturating_add(WAIT_NS) < self.now
        };
        // Quotas add up to no more than the cache holds: whatever the others hold, there is room.
        if let Some((id, sent)) = self.sent.iter().find(|(_, s)| waits(s)) {
            let (id, op, v) = (*id, sent.op, sent.volume);
            self.fail(format!("request {id} ({op:?}) of volume {v} waits forever"));
        }
    }

    /// What the core tells about blocks must fit the guarantees, too.
    fn check_extents(&mut self) {
        let v = self.rng.below(self.vols.len() as u64) as usize;
        let vol = &self.vols[v];
        let (Some(id), Some(engine), Place::Serving) = (vol.id, &self.engine, vol.place) else { return };
        let block = BLOCK_BYTES as u64;
        let from = self.rng.below(vol.plan.size_bytes.div_ceil(block)) * block;
        let mut extents = Vec::new();
        engine.block_status(id, from, vol.plan.size_bytes - from, 16, &mut extents);
        let mut at = from;
        for extent in &extents {
            let sectors = at / SECTOR_BYTES as u64..(at + extent.len) / SECTOR_BYTES as u64;
            if extent.zero && !vol.checker.may_be_zero(sectors) {
                return self.fail(format!("volume {v}: {} bytes at {at} are told to be zero", extent.len));
            }
            at += extent.len;
        }
        if extents.is_empty() || at > vol.plan.size_bytes {
            self.fail(format!("volume {v}: the extents from {from} on end at {at}"));
        }
    }

    /// A control operation is complete.
    pub(crate) fn control_done(&mut self, control: u64, result: Result<(), ControlError>) {
        let Some(Control { volume: v, kind }) = self.controls.remove(&control) else {
            return self.fail(format!("control operation {control} is answered that is not in flight"));
        };
        self.note("control done", control, v as u64, u64::from(result.is_err()));
        self.vols[v].controls -= 1;
        if let Err(error) = result {
            return self.control_failed(v, kind, error);
        }
        match kind {
            ControlKind::Add | ControlKind::Attach => {
                self.vols[v].keep_attachment(&control.to_le_bytes());
                self.vols[v].resizing = false;
                if self.vols[v].must_verify {
                    self.vols[v].place = Place::Verifying;
                    let life = self.life;
                    self.after(1, Happening::Verify { life, volume: v });
                } else {
                    self.serve(v);
                }
            }
            ControlKind::Mode(mode) => self.cover.add("purge", u64::from(mode == Mode::Off)),
            ControlKind::Quota => {}
            ControlKind::Snapshot { .. } => self.cover.hit("snapshot"),
            ControlKind::Resize { size_bytes } => self.resized(v, size_bytes),
            ControlKind::Attachment(number) => self.vols[v].keep_attachment(&number.to_le_bytes()),
            ControlKind::Drain { changes, quiet } => self.drained(v, changes, quiet),
            ControlKind::Remove { verify } => {
                self.cover.hit(if verify { "removal verified" } else { "removal" });
                self.vols[v].place = Place::Out;
                self.vols[v].id = None;
                (self.vols[v].own_told, self.vols[v].linked) = (false, false);
                if !self.vols[v].backend.redo.is_empty() {
                    return self.fail(format!("volume {v} was removed, but its image still has a redo"));
                }
                self.check_image(v);
                let pause = self.rng.around(100 * MS);
                self.after(pause, Happening::Add { volume: v });
            }
            ControlKind::Shutdown => {
                self.check_flushed();
                self.stop(Stop::Orderly);
                if self.rng.permille(self.plan.power) {
                    // Power is lost after the process has ended: everything is on stable media.
                    self.lose_power();
                }
            }
        }
        if self.ending != Ending::Not {
            self.after(1, Happening::End);
        }
    }

    /// The volume and its image have another size.
    fn resized(&mut self, v: usize, size_bytes: u64) {
        let vol = &mut self.vols[v];
        if vol.backend.size_bytes != size_bytes {
            return self.fail(format!("volume {v} has another size, but its image has not"));
        }
        vol.resizing = false;
        vol.resized();
        self.cover.hit("resize in use");
    }

    /// A shutdown that was given time has flushed every backend that works.
    fn check_flushed(&mut self) {
        let Some(engine) = &self.engine else { return };
        // One that is attached while the core stops is none of them.
        for vol in self.vols.iter().filter(|v| v.place == Place::Serving) {
            let status = vol.id.and_then(|id| engine.volume_status(self.now, id));
            let Some(status) = status.filter(|s| s.backend_unflushed) else { continue };
            let works = vol.trouble_at.saturating_add(WAIT_NS) < self.now || vol.trouble_at == 0;
            if works && self.plan.engine.stop_flush_ns_max >= 5 * S {
                return self
                    .fail(format!("volume {}: the shutdown has not flushed its backend", status.spec.name));
            }
        }
    }

    fn drained(&mut self, v: usize, changes: u64, quiet: bool) {
        let vol = &self.vols[v];
        if !quiet || vol.changes != changes || vol.place != Place::Serving {
            return;
        }
        let engine = self.engine.as_ref().expect("answers come from a core");
        let status = engine.volume_status(self.now, vol.id.expect("it is in the cache"));
        let dirty = status.map_or(0, |s| s.dirty_bytes);
        if dirty > 0 {
            self.fail(format!("volume {v} is drained, but {dirty} bytes are dirty"));
        }
        self.check_image(v);
        self.cover.hit("drain verified");
    }

    fn control_failed(&mut self, v: usize, kind: ControlKind, error: ControlError) {
        let explained = match error {
            ControlError::Device => self.disk.dead,
            ControlError::Backend(_) => self.plan.theme == Theme::Backends,
            ControlError::Lost(_) | ControlError::Failed => self.may_lose_data(),
            ControlError::Busy => !matches!(kind, ControlKind::Remove { .. } | ControlKind::Mode(_)),
            ControlError::Unordered => matches!(kind, ControlKind::Snapshot { .. }),
            ControlError::Differs(_) => false,
            ControlError::Gone
            | ControlError::Detached
            | ControlError::TooLong
            | ControlError::ReadOnly
            | ControlError::NotParent
            | ControlError::IsParent
            | ControlError::Size(_)
            | ControlError::Attached
            | ControlError::NotReplica
            | ControlError::Paired
            | ControlError::NoRoom => false,
        };
        if !explained {
            return self.fail(format!("{kind:?} of volume {v} failed: {error}"));
        }
        match kind {
            ControlKind::Remove { .. } => self.serve(v),
            ControlKind::Resize { .. } => {
                // The cache may remember the size that was asked for, until the volume is attached again.
                self.vols[v].resized();
                self.cover.hit("resize refused");
            }
            ControlKind::Attach | ControlKind::Add | ControlKind::Shutdown => self.stop(Stop::Kill),
            _ => {}
        }
        if self.ending != Ending::Not {
            self.after(1, Happening::End);
        }
    }

    /// No more requests and no more faults: everything must come to rest now.
    pub(crate) fn begin_end(&mut self) {
        if self.ending != Ending::Not {
            return;
        }
        let stuck = self.disk.dead && self.vols.iter().any(|v| v.place != Place::Serving);
        if self.is_fenced() || stuck {
            // This cache is of no use any more.
            if self.engine.is_some() {
                self.stop(Stop::Kill);
            }
            return self.after(S, Happening::Action);
        }
        self.note("end", 0, 0, 0);
        self.ending = Ending::Settling;
        self.ending_since = self.now;
        self.requests_left = 0;
        self.armed = None;
        self.disk.faults = DiskFaults::default();
        self.disk.delay = Delay::None;
        self.disk.lies = false;
        for vol in &mut self.vols {
            vol.backend.heal();
        }
        self.after(MS, Happening::End);
        self.at(self.now + SETTLE_NS, Happening::End);
    }

    /// One step towards the end, if the last one is complete.
    pub(crate) fn end(&mut self) {
        if self.now >= self.ending_since + SETTLE_NS {
            let waiting: Vec<_> = self.sent.iter().take(3).map(|(id, s)| (*id, s.op, s.volume)).collect();
            if let Some(engine) = &self.engine {
                let volumes = engine.volumes();
                let all: Vec<_> =
                    volumes.iter().filter_map(|(id, _)| engine.volume_status(self.now, *id)).collect();
                eprintln!("{:#?} {all:#?}", engine.device_status());
            }
            let places: Vec<Place> = self.vols.iter().map(|v| v.place).collect();
            return self.fail(format!(
                "{:?} does not end: {} requests {waiting:?}, {} controls, volumes {places:?}",
                self.ending,
                self.sent.len(),
                self.controls.len()
            ));
        }
        let serving = self.vols.iter().all(|v| v.place == Place::Serving) && self.engine.is_some();
        if self.ending == Ending::Reading || self.ending == Ending::ReadingAgain {
            self.scan_on();
        }
        let busy = !serving || !self.sent.is_empty() || !self.controls.is_empty() || !self.scan.is_empty();
        if busy && self.ending != Ending::Stopping {
            return;
        }
        let next = match self.ending {
            Ending::Settling => {
                self.check_invariants();
                for v in 0..self.vols.len() {
                    let changes = self.vols[v].changes;
                    self.send_control(v, ControlKind::Drain { changes, quiet: true });
                }
                Ending::Draining
            }
            Ending::Draining => {
                self.begin_scan();
                Ending::Reading
            }
            Ending::Reading if self.disk.dead => Ending::Over,
            Ending::Reading => {
                self.shut_down();
                Ending::Stopping
            }
            Ending::Stopping if !serving || self.stopping => return,
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
        self.ending = next;
        self.after(1, Happening::End);
    }

    fn begin_scan(&mut self) {
        for (v, vol) in self.vols.iter().enumerate() {
            let mut last: Option<(u64, u64)> = None;
            for block in vol.checker.touched() {
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

    fn scan_on(&mut self) {
        while self.sent.len() < SCAN_IN_FLIGHT {
            let Some((v, block, n)) = self.scan.pop_front() else { return };
            let offset = block * BLOCK_BYTES as u64;
            let len = (n * BLOCK_BYTES as u64).min(self.vols[v].plan.size_bytes - offset);
            if self.vols[v].place != Place::Serving || !self.send(v, Op::Read, offset, len, None, None) {
                self.scan.push_front((v, block, n));
                return self.after(MS, Happening::End);
            }
        }
    }

    fn check_arena(&mut self) {
        let Some(engine) = &self.engine else { return };
        let used = engine.device_status().arena_used_bytes;
        if used != self.arena_baseline {
            self.fail(format!(
                "{used} bytes of the arena are in use at rest, {} at first",
                self.arena_baseline
            ));
        }
    }
}
