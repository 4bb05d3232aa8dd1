//! The world of a run: simulated time, the core, and the execution of its effects.

mod completions;
mod images;
mod watch;

use crate::backend::Trouble;
use crate::checker::SECTORS;
use crate::coverage::Coverage;
use crate::disk::Disk;
use crate::plan::{Plan, S, Theme};
use crate::redo::Commit;
use crate::rng::{Chance, Draws, Rng, mix};
use crate::stop::Stop;
use crate::store::{Content, content};
use crate::trace::{Hashes, Seen, Trace, fold};
use crate::volume::{Sent, Vol};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use tidepool_engine::Engine;
use tidepool_engine::api::*;
use tidepool_engine::format::{Geometry, SUMMARY_MAGIC, byte};
use tidepool_engine::mem::Buf;

/// Events that a failure shows.
const NOTES_MAX: usize = 400;
/// Ticks of the core without any progress of time after which it counts as spinning.
const SPIN_MAX: u32 = 10_000;

/// Commits during which the connection goes away, in parts per thousand.
const COMMITS_CUT_OFF: u64 = 300;
/// Client requests for each simulated second that a life may last: a short one is one of few requests, too.
const REQUESTS_PER_S: u64 = 150;

/// What happens at a point of simulated time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Happening {
    /// An effect of a life of the core completes.
    Done {
        life: u64,
        token: u64,
    },
    /// A slot of a client may send its next request.
    Client {
        volume: usize,
        slot: usize,
    },
    /// Something that is no client request.
    Action,
    /// The process or the machine stops.
    Stop {
        life: u64,
        how: Stop,
    },
    /// The process is started again.
    Reopen,
    /// A volume's backend is opened.
    Attach {
        life: u64,
        volume: usize,
    },
    /// A volume that is not in the cache is added.
    Add {
        volume: usize,
    },
    /// Looking at what a power loss has left goes on.
    Verify {
        life: u64,
        volume: usize,
    },
    VerifyAgain {
        life: u64,
        volume: usize,
    },
    /// A read of cached blocks must be answered by now.
    MustBeAnswered {
        request: RequestId,
    },
    /// The next step towards the end.
    End,
}

/// What a stop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    CheckpointWrite,
    Reclaim,
    DrainWrite,
    DeviceSync,
    SummaryWrite,
    Commit,
}

/// An effect in flight.
pub(crate) struct Flight {
    /// A number that nothing else in this life has, and that does not depend on what the core calls it.
    pub(crate) name: u64,
    pub(crate) kind: FlightKind,
    pub(crate) buf: Option<Buf>,
    /// Memory is written (by a read).
    pub(crate) fills: bool,
    /// The connection that it was sent over is gone.
    pub(crate) disconnected: bool,
}

pub(crate) enum FlightKind {
    DeviceRead { offset: u64 },
    DeviceWrite { offset: u64, data: Vec<Content>, dsync: bool, tick: u64 },
    DeviceSync { point: u64 },
    Read { volume: usize, offset: u64, early: Option<Vec<Content>> },
    Write { volume: usize, first: u64, data: Vec<Content>, applied: bool },
    Flush { volume: usize, point: u64 },
    Disown { volume: usize },
    RedoWrite { volume: usize, name: (u64, u64, u32), bytes: Vec<u8> },
    RedoCommit { volume: usize, generation: u64, commit: Commit },
    RedoTrim { volume: usize, first: u64 },
    RedoNote { volume: usize, durable: u64 },
    Snapshot { volume: usize, floor: u64 },
    Resize { volume: usize, size_bytes: u64 },
}

impl FlightKind {
    /// The volume whose backend it is for.
    pub(crate) fn backend(&self) -> Option<usize> {
        match *self {
            FlightKind::DeviceRead { .. }
            | FlightKind::DeviceWrite { .. }
            | FlightKind::DeviceSync { .. } => None,
            FlightKind::Read { volume, .. }
            | FlightKind::Write { volume, .. }
            | FlightKind::Flush { volume, .. }
            | FlightKind::Disown { volume }
            | FlightKind::RedoWrite { volume, .. }
            | FlightKind::RedoCommit { volume, .. }
            | FlightKind::RedoTrim { volume, .. }
            | FlightKind::RedoNote { volume, .. }
            | FlightKind::Snapshot { volume, .. }
            | FlightKind::Resize { volume, .. } => Some(volume),
        }
    }
}

/// A control operation in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Control {
    pub(crate) volume: usize,
    pub(crate) kind: ControlKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlKind {
    Add,
    Attach,
    Mode(Mode),
    Quota,
    Attachment(u64),
    Drain {
        changes: u64,
        quiet: bool,
    },
    Remove {
        verify: bool,
    },
    /// Everything acknowledged before this tick is to be in it.
    Snapshot {
        floor: u64,
    },
    /// Another size.
    Resize {
        size_bytes: u64,
    },
    Shutdown,
}

#[derive(Debug, Clone, Copy)]
struct Note {
    now: Nanos,
    what: &'static str,
    a: u64,
    b: u64,
    c: u64,
}

/// Steps towards the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
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

/// A run.
pub struct World {
    pub(crate) seed: u64,
    /// Where further streams come from: a new disk has its own.
    chance: Chance,
    /// Decides the order within an instant.
    order: u64,
    /// The stream of what happens now.
    pub(crate) rng: Rng,
    /// The name of the effect that is carried out now.
    effect: u64,
    pub(crate) now: Nanos,
    pub(crate) tick: u64,
    step: u64,
    agenda: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    pub(crate) plan: Plan,
    pub(crate) quantum: Nanos,
    pub(crate) disk: Disk,
    pub(crate) geo: Geometry,
    pub(crate) engine: Option<Box<Engine>>,
    pub(crate) life: u64,
    pub(crate) vols: Vec<Vol>,
    pub(crate) flights: BTreeMap<u64, Flight>,
    pub(crate) sent: BTreeMap<RequestId, Sent>,
    pub(crate) next_request: RequestId,
    pub(crate) controls: BTreeMap<u64, Control>,
    pub(crate) next_control: u64,
    pub(crate) requests_left: u64,
    pub(crate) stopping: bool,
    pub(crate) ending: Ending,
    pub(crate) ending_since: Nanos,
    pub(crate) scan: VecDeque<(usize, u64, u64)>,
    pub(crate) until: Nanos,
    /// The process or the machine stops as soon as this is under way.
    pub(crate) armed: Option<(Moment, Stop)>,
    /// Streams of the segments that were opened.
    streams: BTreeMap<u32, u8>,
    pub(crate) formats: u64,
    /// The cache's name.
    pub(crate) uuid: [u8; 16],
    pub(crate) arena_baseline: u64,
    /// Blocks that misses brought into the cache in this life: new ones, and those that the ghost remembers.
    pub(crate) filled: [u64; 2],
    /// A volume was removed in this life, and with it its counters.
    pub(crate) removed: bool,
    /// The core has been told that a write or sync of the device failed.
    pub(crate) device_failed: bool,
    pub(crate) seen: BTreeMap<usize, tidepool_engine::status::VolumeCounters>,
    spins: u32,
    trace: Trace,
    notes: VecDeque<Note>,
    verbose: bool,
    pub(crate) failure: Option<String>,
    pub(crate) cover: Coverage,
    pub(crate) recovery_blocks_max: u64,
}

/// What came of a run.
pub struct Outcome {
    /// What its cores did, as numbers.
    pub hashes: Hashes,
    /// Instants at which anything happened.
    pub instants: u64,
    /// What its cores did after these instants, before it failed or after its trace was full.
    pub beyond: Vec<u64>,
    /// What its cores did, as a text, if it was kept.
    pub text: Option<String>,
    /// Events handled.
    pub steps: u64,
    /// Simulated time.
    pub elapsed_ns: Nanos,
    /// What it went through.
    pub coverage: Coverage,
    /// Blocks that its longest recovery read of the device.
    pub recovery_blocks_max: u64,
    /// What went wrong, with the last events before.
    pub failure: Option<String>,
}

impl World {
    /// The world of a life, which ends after `seconds` of simulated time at the latest.
    pub fn new(mut chance: Chance, seconds: u64, verbose: bool, trace: Trace) -> World {
        let mut plan = Plan::new(&mut chance.stream("plan"));
        plan.make_family(&mut chance.stream("family"));
        let mut rng = chance.stream("begin");
        let disk = Disk::new(plan.cache_bytes, rng.fork());
        let vols = plan.volumes.iter().enumerate().map(|(i, p)| Vol::new(i, p.clone())).collect();
        let quantum = rng.pick(&[1, 10_000, 100_000]);
        let geo = Geometry::new([0; 16], plan.cache_bytes, plan.segment_bytes).expect("a possible size");
        World {
            seed: chance.seed(),
            order: chance.order(),
            rng,
            effect: 0,
            chance,
            now: 0,
            tick: 10,
            step: 0,
            agenda: BinaryHeap::new(),
            requests_left: plan.requests.min(seconds * REQUESTS_PER_S),
            plan,
            quantum,
            disk,
            geo,
            engine: None,
            life: 0,
            vols,
            flights: BTreeMap::new(),
            sent: BTreeMap::new(),
            next_request: 1,
            controls: BTreeMap::new(),
            next_control: 1,
            stopping: false,
            ending: Ending::Not,
            ending_since: 0,
            scan: VecDeque::new(),
            until: seconds * S,
            armed: None,
            streams: BTreeMap::new(),
            formats: 0,
            uuid: [0; 16],
            arena_baseline: 0,
            filled: [0; 2],
            removed: false,
            device_failed: false,
            seen: BTreeMap::new(),
            spins: 0,
            trace,
            notes: VecDeque::new(),
            verbose,
            failure: None,
            cover: Coverage::default(),
            recovery_blocks_max: 0,
        }
    }

    /// A disk with nothing on it.
    pub(crate) fn new_disk(&mut self) -> Disk {
        Disk::new(self.plan.cache_bytes, self.rng.fork())
    }

    /// What was drawn so far, if it is kept.
    pub fn draws(&self) -> Draws {
        self.chance.draws()
    }

    /// Runs to the end or to the first failure.
    pub fn run(&mut self) -> Outcome {
        if self.verbose {
            eprintln!("{:#?}", self.plan);
        }
        self.begin();
        while self.failure.is_none() && self.ending != Ending::Over {
            self.advance();
        }
        if self.failure.is_none() {
            self.trace.end([(self.now, self.engine.as_deref())].into_iter());
        }
        let failure = self.failure.as_ref().map(|what| self.report(what));
        self.outcome(failure)
    }

    fn outcome(&mut self, failure: Option<String>) -> Outcome {
        Outcome {
            hashes: self.trace.hashes(),
            instants: self.trace.instants(),
            beyond: self.trace.beyond(),
            text: self.trace.text(),
            steps: self.step,
            elapsed_ns: self.now,
            coverage: self.cover.clone(),
            recovery_blocks_max: self.recovery_blocks_max,
            failure,
        }
    }

    /// A failure with what led to it; also for a panic of the core.
    pub fn report(&self, what: &str) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for n in &self.notes {
            let _ = writeln!(text, "{:>14.6} ms  {} {} {} {}", n.now as f64 / 1e6, n.what, n.a, n.b, n.c);
        }
        let _ = writeln!(
            text,
            "seed {}: {what}\n  at step {}, tick {}, {:.6} ms, theme {:?}",
            self.seed,
            self.step,
            self.tick,
            self.now as f64 / 1e6,
            self.plan.theme
        );
        text
    }

    /// The outcome of a run in which the core panicked.
    pub(crate) fn after_panic(&mut self, what: &str) -> Outcome {
        let failure = self.report(what);
        self.outcome(Some(failure))
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    pub(crate) fn note(&mut self, what: &'static str, a: u64, b: u64, c: u64) {
        if self.notes.len() == NOTES_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back(Note { now: self.now, what, a, b, c });
        if self.verbose {
            eprintln!("{:>14.6} ms {:>8}  {what} {a} {b} {c}", self.now as f64 / 1e6, self.tick);
        }
    }

    /// The next number of the order in which requests begin and end.
    pub(crate) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    pub(crate) fn at(&mut self, when: Nanos, what: Happening) {
        let when = when.max(self.now).div_ceil(self.quantum) * self.quantum;
        let identity = self.identity(what);
        self.agenda.push(Reverse((when, identity, what)));
    }

    /// What names a happening: it decides what comes first at one point of time, and what is drawn then.
    fn identity(&self, what: Happening) -> u64 {
        match what {
            // An effect's name is not its token: the core is free to choose that.
            Happening::Done { token, .. } => self.flights.get(&token).map_or(0, |flight| mix(1, flight.name)),
            Happening::Client { volume, slot } => fold(&(2, volume, slot)),
            Happening::Action => fold(&3),
            Happening::Stop { .. } => fold(&4),
            Happening::Reopen => fold(&5),
            Happening::Attach { volume, .. } => fold(&(6, volume)),
            Happening::Add { volume } => fold(&(7, volume)),
            Happening::Verify { volume, .. } => fold(&(8, volume)),
            Happening::VerifyAgain { volume, .. } => fold(&(9, volume)),
            Happening::MustBeAnswered { request } => fold(&(10, request)),
            Happening::End => fold(&11),
        }
    }

    pub(crate) fn after(&mut self, pause: Nanos, what: Happening) {
        self.at(self.now + pause, what);
    }

    /// One point of time: everything that is due, then the core's effects.
    fn advance(&mut self) {
        let due = self.agenda.peek().map(|Reverse((at, ..))| *at);
        let deadline = self.engine.as_ref().and_then(|e| e.next_deadline());
        let Some(at) = due.into_iter().chain(deadline).min() else {
            return self.fail("nothing is left to happen".into());
        };
        self.spins = if at > self.now { 0 } else { self.spins + 1 };
        if self.spins > SPIN_MAX {
            return self.fail("the core spins: its deadline passes again and again".into());
        }
        self.now = self.now.max(at);
        self.trace.begin_instant(self.now);
        while let Some(&Reverse((at, identity, what))) = self.agenda.peek() {
            if at > self.now || self.failure.is_some() {
                break;
            }
            self.agenda.pop();
            self.step += 1;
            self.rng = self.chance.keyed(identity);
            self.happen(what);
        }
        if deadline.is_some_and(|at| at <= self.now) {
            let now = self.now;
            if let Some(engine) = &mut self.engine {
                engine.handle(now, Event::Tick);
            }
        }
        self.take_effects();
        if self.disk.dead {
            self.note_failures();
        }
        // An instant in which something goes wrong is not whole.
        if self.failure.is_none() {
            self.trace.end_instant([(self.now, self.engine.as_deref())].into_iter());
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Done { life, token } if life == self.life => self.complete(token),
            Happening::Client { volume, slot } => self.client(volume, slot),
            Happening::Action => self.action(),
            Happening::Stop { life, how } if life == self.life && self.engine.is_some() => self.stop(how),
            Happening::Reopen => self.reopen(),
            Happening::Attach { life, volume } if life == self.life => self.attach(volume),
            Happening::Add { volume } => self.add(volume),
            Happening::Verify { life, volume } if life == self.life => self.verify(volume),
            Happening::VerifyAgain { life, volume } if life == self.life => self.verify_again(volume),
            Happening::MustBeAnswered { request } if self.sent.contains_key(&request) => {
                self.fail(format!("request {request} for cached blocks waits for a stopped backend"));
            }
            Happening::End => self.end(),
            _ => {}
        }
    }

    /// Carries out what the core wants at this point of time, in an order that does not depend on that of the core.
    fn take_effects(&mut self) {
        loop {
            let mut all = self.effects_at_hand();
            if all.is_empty() {
                return;
            }
            all.sort_by_cached_key(|(seen, effect)| {
                // What ends with a control operation has its answers.
                let last = matches!(effect, Effect::ControlDone { .. });
                (last, mix(self.order, self.identity_of(seen, effect)), fold(seen))
            });
            let life = self.life;
            for (seen, effect) in all {
                if self.failure.is_some() {
                    return;
                }
                if self.life != life {
                    break;
                }
                let identity = self.identity_of(&seen, &effect);
                (self.effect, self.rng) = self.chance.named(identity);
                self.execute(effect);
            }
        }
    }

    /// What names an effect: it decides when it is carried out among those of one point of time, and what is drawn then.
    fn identity_of(&self, seen: &Seen, effect: &Effect) -> u64 {
        match *effect {
            Effect::Reply { id, .. } => {
                self.sent.get(&id).map_or(0, |sent| fold(&(20, sent.volume, sent.slot, sent.verifies)))
            }
            Effect::ControlDone { control, .. } => self
                .controls
                .get(&control)
                .map_or(0, |control| fold(&(21, control.volume, std::mem::discriminant(&control.kind)))),
            _ => seen.identity(),
        }
    }

    /// Something counts when lives are compared.
    pub(crate) fn saw(&mut self, what: &(impl std::hash::Hash + std::fmt::Debug)) {
        self.trace.add(0, what);
    }

    fn effects_at_hand(&mut self) -> Vec<(Seen, Effect)> {
        let mut all = Vec::new();
        while let Some(engine) = &mut self.engine
            && let Some(effect) = engine.next_effect(self.now)
        {
            let mut seen = Seen::of(&effect, engine.arena());
            if let Effect::Reply { id, result: Ok(()) } = effect
                && let Some(Sent { op: Op::Read, buf: Some(buf), first, sectors, .. }) = self.sent.get(&id)
            {
                let skip = (*first as usize % SECTORS) * SECTOR_BYTES;
                let data = &engine.arena().bytes(*buf)[skip..skip + *sectors as usize * SECTOR_BYTES];
                seen = seen.with_data(data);
            }
            self.trace.add(0, &seen);
            all.push((seen, effect));
        }
        all
    }

    fn execute(&mut self, effect: Effect) {
        if self.device_failed && matches!(effect, Effect::DeviceWrite { .. } | Effect::DeviceSync { .. }) {
            return self.fail("the core goes on writing to a device that has failed".into());
        }
        match effect {
            Effect::DeviceRead { token, offset, buf } => {
                self.note("device read", offset, buf.len.into(), token.0);
                self.look_at_reclaim();
                let latency = self.device_latency();
                self.fly(token, FlightKind::DeviceRead { offset }, Some(buf), true, latency);
            }
            Effect::DeviceWrite { token, offset, buf, dsync } => {
                self.note("device write", offset, buf.len.into(), u64::from(dsync));
                let data = self.contents(buf);
                self.look_at_records(offset, &data);
                if offset < byte(self.geo.segments_first_block) {
                    self.moment(Moment::CheckpointWrite);
                } else if data[0].as_ref().is_some_and(|d| d[..4] == SUMMARY_MAGIC) {
                    self.moment(Moment::SummaryWrite);
                }
                let sync = if dsync { self.rng.around(self.plan.sync_ns) } else { 0 };
                let latency = self.device_latency() + sync;
                let kind = FlightKind::DeviceWrite { offset, data, dsync, tick: self.tick };
                self.fly(token, kind, Some(buf), false, latency);
            }
            Effect::DeviceSync { token } => {
                self.note("device sync", token.0, 0, 0);
                self.moment(Moment::DeviceSync);
                let point = self.disk.sync_point();
                let latency = self.rng.around(self.plan.sync_ns);
                self.fly(token, FlightKind::DeviceSync { point }, None, false, latency);
            }
            Effect::Backend { token, volume, op } => self.backend(token, volume, op),
            Effect::Peer { .. } => unreachable!("no volume has a peer"),
            Effect::Reply { id, result } => self.reply(id, result),
            Effect::ControlDone { control, result } => self.control_done(control, result),
        }
    }

    /// Something is under way that a stop may have been waiting for.
    fn moment(&mut self, moment: Moment) {
        if let Some((_, how)) = self.armed.take_if(|(armed, _)| *armed == moment) {
            self.stop_soon(how);
        }
    }

    /// Stops while what was sent last is likely to be under way.
    fn stop_soon(&mut self, how: Stop) {
        let (life, pause) = (self.life, self.rng.around(self.plan.device_ns / 2));
        self.after(pause, Happening::Stop { life, how });
    }

    fn device_latency(&mut self) -> Nanos {
        let outlier = if self.rng.permille(10) { 20 } else { 1 };
        1 + self.rng.around(self.plan.device_ns) * outlier
    }

    /// The blocks of a buffer of the core.
    fn contents(&self, buf: Buf) -> Vec<Content> {
        let engine = self.engine.as_ref().expect("effects come from a core");
        engine.arena().bytes(buf).chunks_exact(BLOCK_BYTES).map(content).collect()
    }

    fn fly(&mut self, token: Token, kind: FlightKind, buf: Option<Buf>, fills: bool, latency: Nanos) {
        if let Some(new) = buf {
            let overlaps = |b: Buf| b.offset < new.offset + new.len && new.offset < b.offset + b.len;
            let clash = self
                .flights
                .iter()
                .find(|(_, f)| (f.fills || fills) && f.buf.is_some_and(overlaps))
                .map(|(t, _)| *t);
            if let Some(other) = clash {
                self.fail(format!("effect {} uses memory of effect {other}: {new:?}", token.0));
            }
        }
        let flight = Flight { name: self.effect, kind, buf, fills, disconnected: false };
        if self.flights.insert(token.0, flight).is_some() {
            self.fail(format!("token {} is used twice", token.0));
        }
        let life = self.life;
        self.after(latency + 1, Happening::Done { life, token: token.0 });
    }

    fn backend(&mut self, token: Token, volume: VolumeId, op: BackendOp) {
        let Some(v) = self.vols.iter().position(|v| v.id == Some(volume)) else {
            return self.fail(format!("an operation for the backend of volume {}, which is none", volume.0));
        };
        let block = BLOCK_BYTES as u64;
        let latency = self.rng.around(self.vols[v].backend.latency_ns) + 1;
        let backend = &mut self.vols[v].backend;
        if backend.disowned && !matches!(op, BackendOp::Disown) {
            self.cover.hit("backend without cache");
        }
        if op == BackendOp::Disown {
            let status = self.engine.as_ref().and_then(|e| e.volume_status(self.now, volume));
            if status.is_some_and(|s| s.dirty_bytes > 0 || s.lost_blocks > 0) {
                return self.fail(format!("volume {v}: the image disowns a cache that it needs"));
            }
        }
        let (kind, buf, fills) = match op {
            BackendOp::Read { offset, buf } => {
                let early = self.rng.permille(300).then(|| {
                    let first = offset / block;
                    (first..first + u64::from(buf.len) / block).map(|b| backend.store.get(b)).collect()
                });
                (FlightKind::Read { volume: v, offset, early }, Some(buf), true)
            }
            BackendOp::Write { offset, buf } => {
                if self.vols[v].goes_direct() {
                    self.cover.hit("direct write");
                }
                let backend = &mut self.vols[v].backend;
                let engine = self.engine.as_ref().expect("effects come from a core");
                let first = offset / block;
                let bytes = engine.arena().bytes(buf).chunks_exact(BLOCK_BYTES);
                let data: Vec<Content> =
                    bytes.zip(first..).map(|(bytes, b)| backend.clip(b, bytes)).collect();
                if offset + (data.len() as u64 - 1) * block >= backend.size_bytes {
                    let size = backend.size_bytes;
                    return self
                        .fail(format!("volume {v}: a write at {offset} beyond the image's {size} bytes"));
                }
                let applied = self.rng.permille(300) && backend.trouble_now(self.now) == Trouble::None;
                if applied {
                    backend.apply(first, &data);
                }
                (FlightKind::Write { volume: v, first, data, applied }, Some(buf), false)
            }
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                if offset % block != 0 || len % block != 0 || len == 0 {
                    return self.fail(format!("zeroes of {len} bytes at {offset} for the backend"));
                }
                let data = vec![None; (len / block) as usize];
                (FlightKind::Write { volume: v, first: offset / block, data, applied: false }, None, false)
            }
            BackendOp::Flush => {
                let point = backend.store.sync_point();
                (FlightKind::Flush { volume: v, point }, None, false)
            }
            BackendOp::Disown => (FlightKind::Disown { volume: v }, None, false),
            BackendOp::RedoWrite { group, frame, buf } => {
                let name = (backend.generation, group, frame);
                let bytes =
                    self.engine.as_ref().expect("effects come from a core").arena().bytes(buf).to_vec();
                (FlightKind::RedoWrite { volume: v, name, bytes }, Some(buf), false)
            }
            BackendOp::RedoCommit { first, group, frames, sequence, .. } => {
                let generation = backend.generation;
                let commit = Commit { first, group, frames, sequence };
                (FlightKind::RedoCommit { volume: v, generation, commit }, None, false)
            }
            BackendOp::RedoTrim { first } => (FlightKind::RedoTrim { volume: v, first }, None, false),
            BackendOp::RedoNote { durable, .. } => (FlightKind::RedoNote { volume: v, durable }, None, false),
            BackendOp::Resize { size_bytes } => (FlightKind::Resize { volume: v, size_bytes }, None, false),
            BackendOp::Snapshot { control } => {
                let Some(Control { kind: ControlKind::Snapshot { floor }, .. }) = self.controls.get(&control)
                else {
                    return self.fail(format!("a snapshot for operation {control}, which is none"));
                };
                (FlightKind::Snapshot { volume: v, floor: *floor }, None, false)
            }
        };
        let (what, offset, len) = match op {
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
        };
        self.note(what, v as u64, offset, len);
        match what {
            "backend write" => self.moment(Moment::DrainWrite),
            "redo commit" => self.moment(Moment::Commit),
            _ => {}
        }
        let commit = matches!(kind, FlightKind::RedoCommit { .. });
        // What depends on a redo being there or not should have time to go wrong.
        let slow = matches!(kind, FlightKind::RedoTrim { .. }) && self.rng.permille(300);
        self.fly(token, kind, buf, fills, if slow { 20 * latency } else { latency });
        if commit && self.plan.theme == Theme::Backends && self.rng.permille(COMMITS_CUT_OFF) {
            self.cut_off(v);
        }
    }
}
