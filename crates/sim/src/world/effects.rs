//! The effects of the core: in which order they are carried out, and what is looked at when they
//! begin and when they arrive.

use super::control::ControlKind;
use super::odds::Odds;
use super::plan::Theme;
use super::stop::Moment;
use super::volume::Sent;
use super::{Happening, World};
use crate::checker::SECTORS;
use crate::machine::{Arrival, Flight, FlightKind, News};
use crate::trace::{Seen, fold};
use tidepool_engine::api::*;
use tidepool_engine::format::{SUMMARY_MAGIC, byte};

/// Commits during which the connection goes away, in parts per thousand.
const COMMITS_CUT_OFF: u64 = 300;
/// Commits, writes past the cache and removals of redo after which the image is looked at, in parts
/// per thousand.
const COMMITS_CHECKED: u64 = 300;
const DIRECT_WRITES_CHECKED: u64 = 300;
const TRIMS_CHECKED: u64 = 200;

impl World {
    /// Carries out what the core wants at this point of time, in an order that does not depend on
    /// that of the core.
    pub(super) fn take_effects(&mut self) {
        loop {
            let mut all = self.effects_at_hand();
            if all.is_empty() {
                return;
            }
            all.sort_by_cached_key(|(identity, seen, effect)| {
                // What ends with a control operation has its answers.
                let last = matches!(effect, Effect::ControlDone { .. });
                (last, self.clock.place(*identity), fold(seen))
            });
            let life = self.machine.life();
            for (identity, _, effect) in all {
                if self.journal.has_failed() {
                    return;
                }
                if self.machine.life() != life {
                    break;
                }
                let (name, rng) = self.chance.named(identity);
                self.rng = rng;
                self.execute(name, effect);
            }
        }
    }

    /// What the core wants now, each effect with its identity.
    fn effects_at_hand(&mut self) -> Vec<(u64, Seen, Effect)> {
        let mut all = Vec::new();
        let now = self.clock.now();
        while let Some(engine) = self.machine.engine_mut()
            && let Some(effect) = engine.next_effect(now)
        {
            let mut seen = Seen::of(&effect, engine.arena());
            if let Effect::Reply { id, result: Ok(()) } = effect
                && let Some(Sent { op: Op::Read, buf: Some(buf), first_sector, sectors, .. }) =
                    self.clients.get(id)
            {
                let skip = (*first_sector as usize % SECTORS) * SECTOR_BYTES;
                let data =
                    &engine.arena().bytes(*buf)[skip..skip + *sectors as usize * SECTOR_BYTES];
                seen = seen.with_data(data);
            }
            self.journal.saw(&seen);
            all.push((self.identity_of(&seen, &effect), seen, effect));
        }
        all
    }

    /// What names an effect: it decides when it is carried out among those of one point of time,
    /// and what is drawn then.
    fn identity_of(&self, seen: &Seen, effect: &Effect) -> u64 {
        match *effect {
            Effect::Reply { id, .. } => self.clients.get(id).map_or(0, |sent| {
                fold(&(20, sent.volume, sent.sender.slot(), sent.sender.looks_at()))
            }),
            Effect::ControlDone { control, .. } => {
                self.controls.get(control).map_or(0, |control| {
                    fold(&(21, control.volume, std::mem::discriminant(&control.kind)))
                })
            }
            _ => seen.identity(),
        }
    }

    fn execute(&mut self, name: u64, effect: Effect) {
        match effect {
            Effect::Reply { id, result } => return self.reply(id, result),
            Effect::ControlDone { control, result } => return self.control_done(control, result),
            Effect::Backend { volume, op, .. } => self.look_at_request(volume, op),
            Effect::DeviceRead { .. } | Effect::DeviceWrite { .. } | Effect::DeviceSync { .. } => {}
            Effect::Peer { .. } => unreachable!("no volume has a peer"),
        }
        if self.journal.has_failed() {
            return;
        }
        let now = self.clock.now();
        let prepared =
            self.machine.prepare(&effect, now, &mut Odds::new(&mut self.rng, &self.plan));
        let flight = match prepared {
            Ok(flight) => flight.expect("all other effects are input or output"),
            Err(what) => return self.fail(what),
        };
        let Some(mark) = self.mark_of(&effect) else { return };
        let token = flight.token();
        self.note_effect(&effect, flight.kind());
        self.look_at_departure(&effect, &flight);
        let commits = match flight.kind() {
            FlightKind::RedoCommit { volume, .. } => Some(*volume),
            _ => None,
        };
        let odds = &mut Odds::new(&mut self.rng, &self.plan);
        match self.machine.launch(name, flight.marked(mark), odds) {
            Ok(latency_ns) => {
                let life = self.machine.life();
                self.after(latency_ns, Happening::Done { life, token });
            }
            Err(what) => self.fail(what),
        }
        if let Some(v) = commits
            && self.plan.theme == Theme::Backends
            && self.rng.permille(COMMITS_CUT_OFF)
        {
            self.cut_off(v);
        }
    }

    /// What the core asks of a backend.
    fn look_at_request(&mut self, volume: VolumeId, op: BackendOp) {
        let Some(v) = self.machine.image_of(volume) else { return };
        match op {
            BackendOp::Disown => {
                let status = self.machine.status(v, self.clock.now());
                if status.is_some_and(|s| s.dirty_bytes > 0 || s.lost_blocks > 0) {
                    self.fail(format!("volume {v}: the image disowns a cache that it needs"));
                }
                return;
            }
            BackendOp::Write { .. } if self.vols[v].goes_direct() => self.cover.hit("direct write"),
            _ => {}
        }
        if self.machine.backend(v).is_disowned() {
            self.cover.hit("backend without cache");
        }
    }

    /// What is to be known of an effect when it arrives: the tick of a write of the device, and
    /// what a snapshot has to have.
    fn mark_of(&mut self, effect: &Effect) -> Option<u64> {
        match *effect {
            Effect::DeviceWrite { .. } => Some(self.tick),
            Effect::Backend { op: BackendOp::Snapshot { control }, .. } => {
                let kind = self.controls.get(control).map(|control| control.kind);
                if let Some(ControlKind::Snapshot { floor }) = kind {
                    return Some(floor);
                }
                self.fail(format!("a snapshot for operation {control}, which is none"));
                None
            }
            _ => Some(0),
        }
    }

    /// Notes an effect that is input or output.
    fn note_effect(&mut self, effect: &Effect, kind: &FlightKind) {
        let v = kind.backend().unwrap_or_default() as u64;
        let (what, a, b, c) = match *effect {
            Effect::DeviceRead { token, offset, buf } => {
                ("device read", offset, buf.len.into(), token.0)
            }
            Effect::DeviceWrite { offset, buf, dsync, .. } => {
                ("device write", offset, buf.len.into(), u64::from(dsync))
            }
            Effect::DeviceSync { token } => ("device sync", token.0, 0, 0),
            Effect::Backend { op, .. } => {
                let (what, offset, len) = told(op);
                (what, v, offset, len)
            }
            Effect::Peer { .. } | Effect::Reply { .. } | Effect::ControlDone { .. } => {
                unreachable!("no input or output")
            }
        };
        self.note(what, a, b, c);
    }

    /// Looks at what is about to be under way.
    fn look_at_departure(&mut self, effect: &Effect, flight: &Flight) {
        match (flight.kind(), effect) {
            (FlightKind::DeviceRead { .. }, _) => self.look_at_reclaim(),
            (FlightKind::DeviceWrite { offset, data, .. }, _) => {
                self.look_at_records(*offset, data);
                if *offset < byte(self.machine.geometry().segments_first_block) {
                    self.moment(Moment::CheckpointWrite);
                } else if data[0].as_ref().is_some_and(|d| d[..4] == SUMMARY_MAGIC) {
                    self.moment(Moment::SummaryWrite);
                }
            }
            (FlightKind::DeviceSync { .. }, _) => self.moment(Moment::DeviceSync),
            (_, Effect::Backend { op: BackendOp::Write { .. }, .. }) => {
                self.moment(Moment::DrainWrite)
            }
            (FlightKind::RedoCommit { .. }, _) => self.moment(Moment::Commit),
            _ => {}
        }
    }

    /// An effect completes: it takes place, and the core is told.
    pub(super) fn complete(&mut self, token: u64) {
        let now = self.clock.now();
        let mut odds = Odds::new(&mut self.rng, &self.plan);
        if let Some(until) = self.machine.delay_of(token, now, &mut odds) {
            let life = self.machine.life();
            return self.at(until, Happening::Done { life, token });
        }
        let Some(mut arrival) = self.machine.arrive(token, now, &mut odds) else { return };
        if let Some(what) = arrival.complaint() {
            self.fail(what);
        }
        self.look_at_arrival(&arrival);
        self.note("done", token, u64::from(arrival.result().is_err()), 0);
        self.machine.tell(&arrival, now);
        if let FlightKind::Flush { volume, .. } = arrival.flight().kind() {
            self.check_drained(*volume);
        }
    }

    /// Looks at what has taken place, or has failed.
    fn look_at_arrival(&mut self, arrival: &Arrival) {
        let done = arrival.result().is_ok();
        match *arrival.flight().kind() {
            FlightKind::DeviceWrite { offset, ref data, .. }
                if self.plan.theme == Theme::Corruption =>
            {
                self.note_records(offset, data, arrival.flight().mark());
            }
            FlightKind::Write { volume, .. } => {
                let redo = self.machine.backend(volume).redo();
                let beside_redo = !redo.is_empty() && self.vols[volume].goes_direct();
                if beside_redo && self.rng.permille(DIRECT_WRITES_CHECKED) {
                    self.check_cut(volume, false);
                }
            }
            FlightKind::Flush { volume, .. } if !done => self.vols[volume].excuses.flush_fails(),
            FlightKind::RedoTrim { volume, .. } if done => {
                self.cover.hit("redo trimmed");
                if self.rng.permille(TRIMS_CHECKED) {
                    self.check_cut(volume, false);
                }
            }
            FlightKind::Snapshot { volume } if done => {
                self.check_snapshot(volume, arrival.flight().mark())
            }
            _ => {}
        }
        let Some(v) = arrival.flight().kind().backend() else { return };
        match arrival.news() {
            Some(News::Committed { unsure }) => {
                self.committed(v);
                self.cover.add("commit without an answer", u64::from(unsure));
            }
            Some(News::UnflushedLost) => self.cover.hit("unflushed writes lost"),
            None => {}
        }
        if let Err(error) = arrival.result() {
            let tick = self.next_tick();
            self.vols[v].excuses.backend_fails(tick);
            self.cover.hit(if error == IoError::Full { "backend full" } else { "backend error" });
        }
    }

    /// A group is committed: from now on the image and its redo are the volume without the cache.
    pub(super) fn committed(&mut self, v: usize) {
        self.cover.hit("group committed");
        if self.rng.permille(COMMITS_CHECKED) {
            self.check_cut(v, false);
        }
    }
}

/// What a request of a backend is called, and two of its numbers.
fn told(op: BackendOp) -> (&'static str, u64, u64) {
    match op {
        BackendOp::Read { offset, buf } => ("backend read", offset, buf.len.into()),
        BackendOp::Write { offset, buf } => ("backend write", offset, buf.len.into()),
        BackendOp::Discard { offset, len } => ("backend discard", offset, len),
        BackendOp::WriteZeroes { offset, len } => ("backend zeroes", offset, len),
        BackendOp::Flush => ("backend flush", 0, 0),
        BackendOp::Disown => ("backend disown", 0, 0),
        BackendOp::RedoWrite { group, frame, .. } => ("redo write", group, frame.into()),
        BackendOp::RedoCommit { first, group, .. } => ("redo commit", first, group),
        BackendOp::RedoTrim { first } => ("redo trim", first, 0),
        BackendOp::RedoNote { sequence, bytes, .. } => ("redo note", sequence, bytes),
        BackendOp::Snapshot { control } => ("backend snapshot", control, 0),
        BackendOp::Resize { size_bytes } => ("backend resize", size_bytes, 0),
    }
}
