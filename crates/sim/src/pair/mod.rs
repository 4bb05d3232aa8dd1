//! Two hosts with a copy of one volume each (RFC 9): the real core and the real machines on both, a
//! link, a witness, and an image that both can reach. Hosts die, pause, lose their power or their
//! cache device, the link and the way to the witness break, answers are lost, the mode changes,
//! another volume wants the caches' room, and a peer takes over whenever the record lets it.
//!
//! | file | what it is about |
//! |---|---|
//! | `agenda` | What is to happen, and in which order |
//! | `client` | the client that follows the volume, and what it checks |
//! | `clock` | The hosts' clocks |
//! | `fault` | What goes wrong, and the end of it |
//! | `fetch` | An owner that comes back with less than its peer gets from it what it has lost |
//! | `host` | a host: its disk, its core, and what it is to the volume |
//! | `link` | The two hosts' drivers, what they say to each other, and what their hosts do for them |
//! | `neighbour` | Each host's other volume, which has no copy and wants its part of the cache |
//! | `plan` | What a life is like |
//! | `rot` | Blocks of an owner's cache go bad while it is in sync with its peer, which has another copy of what is dirty among them, unless those go bad, too |
//! | `taking` | Whose the volume is |

mod agenda;
mod client;
mod clock;
mod fault;
mod fetch;
mod host;
mod link;
mod neighbour;
mod plan;
mod rot;
mod taking;

use crate::ceph::Ceph;
use crate::checker::Checker;
use crate::coverage::Coverage;
use crate::rng::{Chance, Draws, Rng};
use crate::store::Store;
use crate::trace::Trace;
use crate::world::Outcome;
use agenda::What;
use client::Client;
use clock::Clock;
use host::{Host, Run, Transfer};
use link::Message;
use plan::Plan;
use rot::Rot;
use std::collections::{BTreeMap, VecDeque};
use tidepool_engine::Engine;
use tidepool_engine::api::*;
use tidepool_replica::{Copies, Limits, Record};

const MS: Nanos = 1_000_000;
const S: Nanos = 1_000_000_000;
/// How long the hosts wait for each other: as those of a release.
const LIMITS: Limits = Limits::SHIPPED;
/// After the last fault everything must have come to its end within this time.
const LIVENESS_NS: Nanos = 120 * S;
/// Events from the first fault to the last.
const STEPS_MAX: u64 = 8_000;
const NOTES_MAX: usize = 300;

/// What stands between the hosts.
#[derive(Default)]
struct Net {
    /// Until when a host does not reach the witness, and until when what it sends to the other one
    /// gets lost.
    away_until: [Nanos; 2],
    hole_until: [Nanos; 2],
    /// Connections that there ever were.
    connections: u64,
    /// A connection of which something was lost: nothing more comes over it.
    broken: u64,
    last_delivery: [Nanos; 2],
}

/// What is known of the volume's data.
struct Fate {
    /// Both copies of what was acknowledged and not flushed are gone.
    lost: bool,
    /// The image has everything, and no cache has anything that counts: so it is at first, and when
    /// an owner's dead device is no longer named.
    whole_image: bool,
    /// The image had everything when an owner with a dead device left its peer.
    drained_at_leave: bool,
}

/// How far the life is.
struct Course {
    /// Nothing has gone wrong yet.
    calm: bool,
    end: Nanos,
    /// After so many events nothing goes wrong any more.
    steps_max: u64,
    healing: bool,
    /// Until then the next fault waits for the two to be in sync.
    patience_until: Nanos,
}

struct Note {
    now: Nanos,
    what: &'static str,
    numbers: [u64; 3],
}

/// What chance decides.
struct Draw {
    seed: u64,
    /// Where further streams come from: a new disk has its own.
    chance: Chance,
    /// Decides the order within an instant.
    order: u64,
    /// The stream of what happens now.
    rng: Rng,
    /// The name of the effect that is carried out now.
    effect: u64,
}

/// The drain at the end.
#[derive(Default)]
struct LastDrain {
    /// Host and control operation of the one that is under way.
    control: Option<(usize, u64)>,
    is_done: bool,
}

/// What is said of the life.
struct Report {
    notes: VecDeque<Note>,
    verbose: bool,
    failure: Option<String>,
}

/// The world of a seed.
struct World {
    draws: Draw,
    plan: Plan,
    now: Nanos,
    /// By time, name, and order.
    queue: BTreeMap<(Nanos, u64, u64), What>,
    queued: u64,
    step: u64,
    tick: u64,
    trace: Trace,
    hosts: [Host; 2],
    ceph: Ceph,
    net: Net,
    checker: Checker,
    client: Client,
    fate: Fate,
    course: Course,
    /// Since when nobody serves the volume.
    unserved_since: Option<Nanos>,
    last_drain: LastDrain,
    /// In some lives blocks go bad.
    rot: Option<Rot>,
    cover: Coverage,
    told: Report,
}

/// Lives a life of at most `seconds` of simulated time, and then until everything is quiet. What it
/// has drawn is beside the outcome, if it is kept.
pub(crate) fn live(chance: Chance, seconds: u64, verbose: bool, trace: Trace) -> (Outcome, Draws) {
    let mut world = World::new(chance, seconds, verbose, trace);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    if result.is_ok() && world.told.failure.is_none() {
        let mut trace = std::mem::take(&mut world.trace);
        trace.end(world.cores().into_iter());
        world.trace = trace;
    }
    if let Err(panic) = result {
        let what = panic.downcast_ref::<String>().map(String::as_str);
        let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
        world.fail(format!("panic: {what}"));
    }
    let outcome = Outcome {
        hashes: world.trace.hashes(),
        instants: world.trace.instants(),
        beyond: world.trace.beyond(),
        text: world.trace.text(),
        steps: world.step,
        elapsed_ns: world.now,
        recovery_blocks_max: 0,
        failure: world.told.failure.as_ref().map(|what| world.report(what)),
        coverage: world.cover,
    };
    (outcome, world.draws.chance.draws())
}

impl World {
    fn new(mut chance: Chance, seconds: u64, verbose: bool, trace: Trace) -> World {
        let mut plan = Plan::new(&mut chance.stream("plan"));
        let rot = Rot::of(&mut chance.stream("rot"));
        if rot.as_ref().is_some_and(Rot::is_on_both) {
            // What is lost counts after some time in sync, and when the owner's host goes then.
            (plan.fault_ns, plan.takes_over) = (S, true);
        }
        let mut clocks = chance.stream("clocks");
        let mut rng = chance.stream("begin");
        let mut host = |at: usize| Host::new(at, &plan, rng.fork(), Clock::new(&mut clocks));
        let hosts = [host(0), host(1)];
        let first = hosts[0].party();
        let base_bytes = plan.size_bytes / 2;
        let checker = Checker::new(7, plan.size_bytes, base_bytes);
        let mut image = Store::default();
        client::fill_base(&mut image, 7, base_bytes);
        World {
            draws: Draw { seed: chance.seed(), order: chance.order(), rng, effect: 0, chance },
            client: Client::new(plan.slots),
            rot,
            now: 0,
            queue: BTreeMap::new(),
            queued: 0,
            step: 0,
            tick: 1,
            trace,
            hosts,
            ceph: Ceph::new(Record { generation: 1, owner: first, copies: Copies::Solo }, image),
            net: Net::default(),
            checker,
            fate: Fate { lost: false, whole_image: true, drained_at_leave: false },
            course: Course {
                calm: true,
                end: seconds * S,
                steps_max: u64::MAX,
                healing: false,
                patience_until: 0,
            },
            unserved_since: None,
            last_drain: LastDrain::default(),
            cover: Coverage::default(),
            told: Report { notes: VecDeque::new(), verbose, failure: None },
            plan,
        }
    }

    fn report(&self, what: &str) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for n in &self.told.notes {
            let [a, b, c] = n.numbers;
            let _ = writeln!(text, "{:>14.6} ms  {} {a} {b} {c}", n.now as f64 / 1e6, n.what);
        }
        let _ = writeln!(
            text,
            "pair seed {}: {what}\n  at step {}, {:.6} ms",
            self.draws.seed,
            self.step,
            self.now as f64 / 1e6
        );
        text
    }

    fn fail(&mut self, what: String) {
        self.told.failure.get_or_insert(what);
    }

    fn note(&mut self, what: &'static str, a: u64, b: u64, c: u64) {
        if self.told.notes.len() == NOTES_MAX {
            self.told.notes.pop_front();
        }
        self.told.notes.push_back(Note { now: self.now, what, numbers: [a, b, c] });
        if self.told.verbose {
            eprintln!("{:>14.6} ms {:>8}  {what} {a} {b} {c}", self.now as f64 / 1e6, self.tick);
        }
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    fn at(&mut self, time: Nanos, what: What) {
        self.queued += 1;
        self.queue.insert((time.max(self.now), what.identity(), self.queued), what);
    }

    fn after(&mut self, ns: Nanos, what: What) {
        self.at(self.now + ns, what);
    }

    /// The time that a host's clock shows.
    fn clock(&self, at: usize) -> Nanos {
        self.hosts[at].clock.read(self.now)
    }

    fn is_paused(&self, at: usize) -> bool {
        self.hosts[at].paused_until > self.now
    }

    fn witness_reachable(&self, at: usize) -> bool {
        self.net.away_until[at] <= self.now
    }

    fn link_works(&self) -> bool {
        self.net.hole_until.iter().all(|&until| until <= self.now)
    }

    fn run(&mut self) {
        for at in 0..2 {
            self.start(at);
            self.after(LIMITS.beat_ns, What::Beat(at));
        }
        let first = self.draws.rng.around(self.plan.fault_ns);
        self.after(first, What::Fault);
        self.after(100 * MS, What::Mode);
        while self.told.failure.is_none() {
            let Some(((time, identity, order), what)) = self.queue.pop_first() else { return };
            if let Some(until) =
                what.host().map(|at| self.hosts[at].paused_until).filter(|&until| until > time)
            {
                self.queue.insert((until, identity, order), what);
                continue;
            }
            self.begin_instant(time);
            self.step += 1;
            self.draws.rng = self.draws.chance.keyed(identity);
            self.happen(what);
            if self.course.calm && self.step >= 2 * STEPS_MAX {
                self.end_calm();
            }
            if !self.course.calm
                && (self.now >= self.course.end || self.step >= self.course.steps_max)
                && !self.course.healing
            {
                self.course.end = self.now;
                self.heal();
            }
            if self.course.healing && self.is_over() {
                return;
            }
            if self.now > self.course.end.max(LIVENESS_NS) + LIVENESS_NS {
                let runs: Vec<String> = self.hosts.iter().map(Host::state).collect();
                self.fail(format!(
                    "nothing more happens: {runs:?}, {:?}, {}",
                    self.ceph.record(),
                    self.client.state()
                ));
            }
        }
    }

    /// What happens now happens at `time`.
    fn begin_instant(&mut self, time: Nanos) {
        if time > self.now {
            let mut trace = std::mem::take(&mut self.trace);
            trace.end_instant(self.cores().into_iter());
            trace.begin_instant(time);
            (self.trace, self.now) = (trace, time);
        }
    }

    /// The cores that run, each with the time of its host's clock.
    fn cores(&self) -> [(Nanos, Option<&Engine>); 2] {
        [0, 1].map(|at| (self.clock(at), self.hosts[at].engine.as_ref()))
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Fault => self.fault(),
            What::Beat(at) => self.beats(at),
            What::Tick { at, life } if self.hosts[at].life == life => {
                let now = self.clock(at);
                if let Some(engine) = &mut self.hosts[at].engine {
                    engine.handle(now, Event::Tick);
                }
                self.drive(at);
            }
            What::Start(at) => self.start(at),
            What::Closed { at, life } if self.hosts[at].life == life => self.kill(at, false),
            What::Arrive { at, life, token, name, generation, transfer } => {
                self.arrive(at, life, (token, name), generation, transfer);
            }
            What::Done { at, life, token, result, into, .. } if self.hosts[at].life == life => {
                let now = self.clock(at);
                let engine = self.hosts[at].engine.as_mut().expect("this life runs");
                if let Some((buf, bytes)) = into {
                    engine.arena_mut().bytes_mut(buf).copy_from_slice(&bytes);
                }
                engine.handle(now, Event::Done { token, result });
                self.drive(at);
            }
            What::Deliver { to, connection, message }
                if self.hosts[to].link.connection == Some(connection) =>
            {
                self.receive(to, message);
            }
            What::Connected { owner, connection } => self.connected_now(owner, connection),
            What::Change { at, life, before, after } => self.change(at, life, before, after),
            What::Answer { at, life, stands } if self.hosts[at].life == life => {
                if self.witness_reachable(at) {
                    self.answer(at, stands);
                } else {
                    let until = self.net.away_until[at];
                    self.at(until, What::Answer { at, life, stands: None });
                }
            }
            What::Fence { at, life, generation } => {
                self.note("fence", generation, 0, 0);
                self.ceph.fence(generation);
                let ns = self.draws.rng.around(MS);
                self.after(ns, What::Fenced { at, life });
            }
            What::Fenced { at, life } if self.hosts[at].life == life => self.fenced(at),
            What::Think(slot) => self.think(slot),
            What::Mode => self.change_mode(),
            What::Strike { at, power } => self.kill(at, power),
            What::Neighbour { at, life } if self.hosts[at].life == life => self.neighbour(at),
            _ => {}
        }
        for at in 0..2 {
            self.arm(at);
        }
    }

    /// A host beats, and whoever watches the volume looks at it.
    fn beats(&mut self, at: usize) {
        self.check_rot(at);
        self.beat(at);
        self.connect();
        self.decay(at);
        if self.course.healing {
            self.replace_dead(at);
        }
        self.look_after();
        if (self.course.healing || self.plan.takes_over)
            && self.client.is_unserved()
            && matches!(self.hosts[at].run, Run::Peer)
        {
            self.take_over(at);
        }
        self.after(LIMITS.beat_ns, What::Beat(at));
    }

    /// Makes sure that a core is ticked when it asked to be.
    fn arm(&mut self, at: usize) {
        let (now, host) = (self.now, &self.hosts[at]);
        let due = host.engine.as_ref().and_then(|engine| engine.next_deadline());
        let due = due.map(|due| host.clock.when(due));
        if let Some(due) =
            due.map(|due| due.max(now + 1)).filter(|&due| due < host.armed || host.armed <= now)
        {
            let life = host.life;
            self.hosts[at].armed = due;
            self.at(due, What::Tick { at, life });
        }
    }

    /// Something goes on its way to a disk or to the image.
    fn send_transfer(&mut self, at: usize, token: Token, generation: u64, transfer: Transfer) {
        let mean = match transfer {
            Transfer::Sync { .. } | Transfer::Write { dsync: true, .. } => {
                self.plan.latency.sync_ns
            }
            Transfer::Read { .. } | Transfer::Write { .. } => self.plan.latency.device_ns,
            _ => self.plan.latency.image_ns,
        };
        let ns = self.draws.rng.around(mean);
        let (life, name) = (self.hosts[at].life, self.draws.effect);
        self.after(ns, What::Arrive { at, life, token, name, generation, transfer });
    }

    fn arrive(
        &mut self,
        at: usize,
        life: u64,
        (token, name): (Token, u64),
        generation: u64,
        transfer: Transfer,
    ) {
        let host = &mut self.hosts[at];
        host.disk.draw_from(self.draws.rng.fork());
        let alive = host.life == life;
        let mut into = None;
        let result = match transfer {
            Transfer::Read { offset, buf } => {
                let mut bytes = vec![0; buf.len as usize];
                let read = host.disk.read_at(offset, &mut bytes);
                into = Some((buf, bytes));
                read
            }
            Transfer::Write { offset, data, dsync } => host.disk.write_at(offset, &data, dsync),
            Transfer::Sync { .. } if !alive => return,
            Transfer::Sync { point } => host.disk.sync_to(point),
            Transfer::Neighbour { buf } => {
                into = buf.map(|buf| (buf, vec![0; buf.len as usize]));
                Ok(())
            }
            _ if self.ceph.reach(generation).is_err() => {
                self.cover.hit("fenced transfer");
                self.ceph.reach(generation)
            }
            Transfer::ImageRead { offset, buf } => {
                let mut bytes = vec![0; buf.len as usize];
                let first = offset / BLOCK_BYTES as u64;
                for (block, out) in (first..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
                    self.ceph.read(block, out);
                }
                into = Some((buf, bytes));
                Ok(())
            }
            Transfer::ImageWrite { first, data } => {
                (first..).zip(data).for_each(|(block, content)| self.ceph.write(block, content));
                Ok(())
            }
            Transfer::ImageZeroes { first, blocks } => {
                (first..first + blocks).for_each(|block| self.ceph.write(block, None));
                Ok(())
            }
            Transfer::ImageOther => Ok(()),
            Transfer::Disown => {
                self.cover.hit("dead device disowned");
                self.fate.whole_image = true;
                Ok(())
            }
        };
        if alive {
            self.at(self.now, What::Done { at, life, token, name, result, into });
        }
    }

    /// Something goes over the link.
    fn send(&mut self, from: usize, message: Message) {
        let Some(connection) = self.hosts[from].link.connection else { return };
        self.trace.add(from, &message.told());
        if self.net.hole_until[from] > self.now || self.net.broken == connection {
            self.net.broken = connection;
            return;
        }
        let ns = self.draws.rng.around(self.plan.latency.link_ns);
        // One behind the other, as over a socket.
        let time = (self.now + ns).max(self.net.last_delivery[from] + 1);
        self.net.last_delivery[from] = time;
        self.at(time, What::Deliver { to: 1 - from, connection, message });
    }

    /// An owner and a peer that can hear each other get connected.
    fn connect(&mut self) {
        let free = self.hosts.iter().all(|host| host.link.connection.is_none());
        let wants = Host::wants_peer;
        let owner = self.hosts.iter().position(wants);
        let Some(owner) = owner.filter(|_| free && self.link_works()) else { return };
        if matches!(self.hosts[1 - owner].run, Run::Peer) {
            self.net.connections += 1;
            let connection = self.net.connections;
            let ns = self.draws.rng.around(self.plan.latency.link_ns);
            self.after(ns, What::Connected { owner, connection });
        }
    }

    fn connected_now(&mut self, owner: usize, connection: u64) {
        let roles =
            self.hosts[owner].wants_peer() && matches!(self.hosts[1 - owner].run, Run::Peer);
        let free = self.hosts.iter().all(|host| host.link.connection.is_none());
        if roles && free && self.link_works() && !self.is_paused(1 - owner) {
            self.connected(owner, connection);
        }
    }

    /// A change of the record goes to the witness.
    fn send_change(&mut self, at: usize, before: Record, after: Record) {
        self.trace.add(at, &(before, after));
        let ns = self.draws.rng.around(self.plan.latency.image_ns)
            + self.net.away_until[at].saturating_sub(self.now);
        let life = self.hosts[at].life;
        self.after(ns, What::Change { at, life, before, after });
    }

    fn change(&mut self, at: usize, life: u64, before: Record, after: Record) {
        let written = self.ceph.change(before, after);
        if written {
            self.note(
                "record",
                after.generation,
                after.owner.cache as u64,
                u64::from(after.copies != Copies::Solo),
            );
            self.cover.hit(match (after.copies, after.generation > before.generation) {
                (Copies::Sync(_), _) => "record in sync",
                (Copies::Peer(_), _) => "record without the owner's copy",
                (Copies::Solo, false) => "record solo again",
                (Copies::Solo, true) if before.owner.cache != after.owner.cache => {
                    "record taken over"
                }
                (Copies::Solo, true) => "record taken back",
            });
            let parted = after.generation == before.generation && after.copies == Copies::Solo;
            if parted && (!self.hosts[at].disk.is_dead() || self.fate.drained_at_leave) {
                // What two logs had is on stable media, or in the image.
                let tick = self.next_tick();
                self.checker.settle(tick);
                if !self.course.healing && self.draws.rng.permille(500) {
                    self.cover.hit("power loss of an owner that has just parted");
                    let ns = self.draws.rng.around(MS);
                    self.after(ns, What::Strike { at, power: true });
                }
            }
            if matches!(after.copies, Copies::Peer(_))
                && !self.course.healing
                && self.draws.rng.permille(500)
            {
                let ns = self.draws.rng.around(MS);
                self.after(ns, What::Strike { at, power: false });
            }
            self.fate.whole_image |= after.generation == before.generation
                && after.copies == Copies::Solo
                && std::mem::take(&mut self.fate.drained_at_leave);
        }
        // A change that is asked for once more has been made.
        let stands = self.ceph.record() == after;
        let lost = !self.course.healing && self.draws.rng.permille(self.plan.lost_answers);
        if lost {
            self.cover.hit("lost answer");
        }
        let ns = self.draws.rng.around(self.plan.latency.image_ns) + if lost { S } else { 0 };
        self.after(ns, What::Answer { at, life, stands: (!lost).then_some(stands) });
    }

    fn send_fence(&mut self, at: usize, generation: u64) {
        self.trace.add(at, &generation);
        let ns = self.draws.rng.around(self.plan.latency.image_ns);
        let life = self.hosts[at].life;
        self.after(ns, What::Fence { at, life, generation });
    }
}
