//! The rules of RFC 9 against everything that can happen to two hosts, a link and a witness, step by step in every order.
//!
//! The model drives the very machines of the crate. Its world has one volume, two hosts with a log each, one connection that may break with
//! everything in flight, and a witness whose answers may be lost. A host is killed (its log loses nothing), or loses its power (its log loses
//! what is not stable). Writes are numbers, so that a log is compared with what was promised write by write.

use stateright::{Checker, Model, Property};
use tidepool_engine::api::Pairing;
use tidepool_replica::{
    Copies, Copy, Effect, Event, Owner, Party, Peer, Phase, Record, Resume, Tail, resume,
};

/// How often what happens, at most.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash, Default)]
struct Limits {
    writes: u8,
    kills: u8,
    powers: u8,
    breaks: u8,
    lost_answers: u8,
    takeovers: u8,
    /// Of the first owner's cache device.
    fails: u8,
}

/// A rule that is left out, to see that it matters.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash)]
enum Bug {
    None,
    /// Acknowledged when our own log has it.
    EarlyAck,
    /// A peer takes over although its host was restarted.
    BootIgnored,
    /// A peer takes over with a log that is not stable.
    UnstableTakeover,
    /// The record says solo while our log is not stable.
    UnstableLeave,
    /// An owner comes back without asking the peer what it holds.
    TailIgnored,
    /// A peer that takes over goes on taking the old owner's records.
    PromiseIgnored,
    /// Drained as soon as our own log is stable.
    EarlyDrain,
    /// An owner whose cache device has failed comes back and takes what is on it for everything.
    FailedLogCounts,
    /// An owner whose cache device is dead writes to the image while its record names a copy.
    PastThePeer,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Message {
    Begin { generation: u64, base: u64 },
    Record { generation: u64, sequence: u64, write: u8 },
    Begun,
    Have { logged: u64, stable: u64 },
}

/// A log: numbers of writes, those before `base` are in the image only.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Log {
    generation: u64,
    base: usize,
    writes: Vec<u8>,
    stable: usize,
}

impl Log {
    fn end(&self) -> u64 {
        (self.base + self.writes.len()) as u64
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Run {
    Down,
    Owner(Owner),
    Peer(Peer),
    /// It has asked the witness for the volume.
    Taking {
        peer: Peer,
        before: Record,
        after: Record,
    },
    /// The record names it; the old owner is still to be fenced.
    Fencing {
        after: Record,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Host {
    boot: u8,
    life: u8,
    /// Nothing that this life sends to the backend arrives any more.
    fenced: bool,
    /// Its cache device is dead.
    failed: bool,
    log: Log,
    run: Run,
}

/// A change of the record that is on its way: from which life of which host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Change {
    host: usize,
    life: u8,
    before: Record,
    after: Record,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    limits: Limits,
    bug: Bug,
    witness: Record,
    hosts: [Host; 2],
    linked: bool,
    /// What is on its way to each host.
    mail: [Vec<Message>; 2],
    changes: Vec<Change>,
    image: Vec<u8>,
    next: u8,
    acknowledged: Vec<u8>,
    /// So many of them were flushed; so many were promised to survive any single fault.
    flushed: usize,
    safe: usize,
    powers: u8,
    bad: Option<&'static str>,
    seen: [bool; 5],
}

/// What is to be reached, so that nothing passes because nothing happens: places in [`World::seen`].
const SYNC: usize = 0;
const TAKEN_OVER: usize = 1;
const FETCHED: usize = 2;
const LEFT: usize = 3;
const CAME_BACK: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Action {
    Write(usize),
    Stabilise(usize),
    Acknowledge(usize),
    Flush(usize),
    Drain(usize),
    Deliver(usize),
    Connect,
    Break,
    Apply { change: usize, answered: bool },
    Kill(usize),
    Power(usize),
    Fail(usize),
    Start { host: usize, asks: bool },
    TakeOver(usize),
    Fence(usize),
}

/// What the model is of: limits, a rule that is left out, what has to be reached.
struct Rules(Limits, Bug, &'static [usize]);

const LOST_NOTHING: &str = "nothing promised is lost";

impl Host {
    fn party(&self, at: usize) -> Party {
        Party { cache: at as u128, boot: self.boot.into() }
    }

    fn is_up(&self) -> bool {
        self.run != Run::Down
    }
}

impl World {
    fn new(limits: Limits, bug: Bug) -> World {
        let host = |run| Host {
            boot: 0,
            life: 0,
            fenced: false,
            failed: false,
            log: Log { generation: 1, ..Log::default() },
            run,
        };
        let first = Party { cache: 0, boot: 0 };
        let witness = Record { generation: 1, owner: first, copies: Copies::Solo };
        let owner = Run::Owner(Owner::new(witness, 0, 0));
        let peer = Run::Peer(Peer::new(Party { cache: 1, boot: 0 }, &witness, None));
        World {
            limits,
            bug,
            witness,
            hosts: [host(owner), host(peer)],
            linked: false,
            mail: [vec![], vec![]],
            changes: vec![],
            image: vec![],
            next: 1,
            acknowledged: vec![],
            flushed: 0,
            safe: 0,
            powers: 0,
            bad: None,
            seen: [false; 5],
        }
    }

    fn owner(&self, at: usize) -> Option<&Owner> {
        match &self.hosts[at].run {
            Run::Owner(owner) => Some(owner),
            _ => None,
        }
    }

    /// The owner takes an event in, and what it wants is done.
    fn tell(&mut self, at: usize, event: Event) {
        let mut effects = Vec::new();
        let Run::Owner(owner) = &mut self.hosts[at].run else { return };
        let before = owner.phase();
        owner.take(event, &mut effects);
        self.seen[SYNC] |= matches!(owner.phase(), Phase::Sync { .. });
        self.seen[LEFT] |= matches!(before, Phase::Leaving { .. }) && owner.phase() == Phase::Solo;
        for effect in effects {
            match effect {
                Effect::Begin { generation, base } => {
                    self.mail[1 - at].push(Message::Begin { generation, base });
                }
                Effect::Stabilise if self.bug == Bug::UnstableLeave => {
                    let end = self.hosts[at].log.end();
                    self.tell(at, Event::Stable(end));
                }
                Effect::Stabilise => {}
                Effect::Write { before, after } => self.change(at, before, after),
                Effect::Close => self.end(at),
            }
        }
    }

    fn change(&mut self, host: usize, before: Record, after: Record) {
        let life = self.hosts[host].life;
        assert!(
            !self.changes.iter().any(|c| c.host == host && c.life == life),
            "one change at a time: {self:?}"
        );
        self.changes.push(Change { host, life, before, after });
    }

    fn end(&mut self, at: usize) {
        self.hosts[at].run = Run::Down;
        self.hosts[at].life += 1;
        self.unlink();
    }

    fn unlink(&mut self) {
        if std::mem::take(&mut self.linked) {
            self.mail = [vec![], vec![]];
            (0..2).for_each(|at| self.tell(at, Event::PeerDown));
        }
    }

    /// A host begins to serve what is in its log.
    fn serve(&mut self, at: usize, record: Record) {
        let host = &mut self.hosts[at];
        host.log.generation = record.generation;
        host.log.stable = host.log.writes.len();
        let (log, drained) = (host.log.writes.clone(), self.image.len() as u64);
        host.run = Run::Owner(Owner::new(record, log.len() as u64, drained));
        let missing = |promised: usize| !log.starts_with(&self.acknowledged[..promised]);
        if !log.starts_with(&self.image) {
            self.bad = Some("the image has what its owner does not have");
        } else if missing(self.flushed) {
            self.bad = Some("what was flushed is lost");
        } else if self.powers <= 1 && missing(self.safe) {
            self.bad = Some("what was acknowledged in two logs is lost by a single fault");
        }
        (self.flushed, self.safe) = (log.len(), log.len());
        self.acknowledged = log;
    }

    /// Whether a host has these writes, in the image or in its log: the host that has the volume now must have what an earlier owner does.
    fn has(&self, at: usize, writes: &[u8]) -> bool {
        let log = &self.hosts[at].log;
        self.image[..log.base].iter().chain(&log.writes).take(writes.len()).eq(writes)
    }

    fn acknowledge(&mut self, at: usize) {
        let Run::Owner(owner) = &mut self.hosts[at].run else { return };
        // While the peer joins the record may still say solo: then nothing is promised yet that two logs have to keep.
        let two = matches!(owner.phase(), Phase::Sync { .. });
        let through = match self.bug {
            Bug::EarlyAck if two => self.hosts[at].log.writes.len(),
            _ => {
                let through = owner.may_acknowledge();
                owner.acknowledged(through);
                through as usize
            }
        };
        let generation = owner.record().generation;
        let writes = &self.hosts[at].log.writes[..through];
        if generation < self.witness.generation {
            if !self.has(1 - at, writes) {
                self.bad = Some("acknowledged by somebody who is not the owner any more");
            }
        } else {
            self.acknowledged = writes.to_vec();
            if two {
                self.safe = through;
            }
        }
    }

    fn drain(&mut self, at: usize) {
        let Some(owner) = self.owner(at) else { return };
        let through = match self.bug {
            Bug::EarlyDrain => self.hosts[at].log.stable,
            _ => owner.may_drain() as usize,
        };
        let writes = &self.hosts[at].log.writes[..through];
        if owner.record().generation < self.witness.generation && !self.has(1 - at, writes) {
            self.bad = Some("an image is ahead of its owner");
        }
        self.image = writes.to_vec();
        self.tell(at, Event::Sent(through as u64));
        self.tell(at, Event::Drained(through as u64));
    }

    /// An owner on a dead device may write to the image: what it has is there, and nobody else has older.
    fn may_bypass(&self, at: usize) -> bool {
        let alone = self.owner(at).is_some_and(|owner| owner.phase() == Phase::Solo);
        let drained = self.image.len() == self.hosts[at].log.writes.len();
        drained && (alone || self.bug == Bug::PastThePeer)
    }

    /// A write past a dead device.
    fn bypass(&mut self, at: usize) {
        let write = self.next;
        self.next += 1;
        if self.hosts[at].fenced {
            return;
        }
        self.hosts[at].log.writes.push(write);
        self.image.push(write);
        self.acknowledged = self.image.clone();
        (self.flushed, self.safe) = (self.image.len(), self.image.len());
    }

    fn deliver(&mut self, at: usize) {
        let message = self.mail[at].remove(0);
        let host = &mut self.hosts[at];
        let (peer, is_taking) = match &mut host.run {
            Run::Peer(peer) => (peer, false),
            Run::Taking { peer, .. } => (peer, true),
            _ => {
                return match message {
                    Message::Begun => self.tell(at, Event::Begun),
                    Message::Have { logged, stable } => self.tell(at, Event::Have { logged, stable }),
                    _ => {}
                };
            }
        };
        let answer = match message {
            Message::Begin { generation, base } => peer.begin(generation, base).map(|()| {
                host.log = Log { generation, base: base as usize, ..Log::default() };
                Message::Begun
            }),
            Message::Record { generation, sequence, write } => {
                let mut taken = peer.record(generation, sequence);
                if is_taking && self.bug == Bug::PromiseIgnored && sequence == host.log.end() + 1 {
                    taken = Ok(());
                }
                taken.map(|()| {
                    host.log.writes.push(write);
                    let stable = (host.log.base + host.log.stable) as u64;
                    Message::Have { logged: sequence, stable }
                })
            }
            Message::Begun | Message::Have { .. } => return,
        };
        match answer {
            Ok(answer) => self.mail[1 - at].push(answer),
            Err(_) => self.unlink(),
        }
    }

    fn stabilise(&mut self, at: usize) {
        let log = &mut self.hosts[at].log;
        log.stable = log.writes.len();
        let end = log.end();
        if self.owner(at).is_some() {
            self.tell(at, Event::Stable(end));
        } else if self.linked {
            self.mail[1 - at].push(Message::Have { logged: end, stable: end });
        }
    }

    /// A change reaches the witness.
    fn apply(&mut self, change: usize, answered: bool) {
        let Change { host, life, before, after } = self.changes.remove(change);
        let written = self.witness == before;
        if written {
            self.witness = after;
        }
        if self.hosts[host].life != life {
            return;
        }
        if matches!(self.hosts[host].run, Run::Owner(_)) {
            let event = if written && answered { Event::Written } else { Event::Found(self.witness) };
            return self.tell(host, event);
        }
        let Run::Taking { peer, .. } = self.hosts[host].run else { return };
        let me = self.hosts[host].party(host);
        self.hosts[host].run = match self.witness == after {
            true => Run::Fencing { after },
            false => Run::Peer(Peer::new(me, &self.witness, peer.copy())),
        };
    }

    fn start(&mut self, at: usize, asks: bool) {
        let (me, mut record) = (self.hosts[at].party(at), self.witness);
        if self.hosts[at].failed {
            self.seen[CAME_BACK] = true;
            let log = &mut self.hosts[at].log;
            log.writes.truncate(log.stable);
            if let (Copies::Peer(peer), Bug::FailedLogCounts) = (record.copies, self.bug) {
                record.copies = Copies::Sync(peer);
            }
        }
        let other = &self.hosts[1 - at];
        let tail = match &other.run {
            Run::Peer(_) if asks => Some(Tail {
                generation: other.log.generation,
                logged: other.log.end(),
                holder: other.party(1 - at),
            }),
            _ => None,
        };
        let resumed = match resume(me, &record, self.hosts[at].log.writes.len() as u64, tail) {
            Resume::Unreachable | Resume::Behind { .. } | Resume::Fetch { .. }
                if self.bug == Bug::TailIgnored =>
            {
                Resume::Serve
            }
            resumed => resumed,
        };
        match resumed {
            Resume::Unreachable | Resume::Behind { .. } => {}
            Resume::Taken => {
                let log = &self.hosts[at].log;
                let copy = Copy { generation: log.generation, base: log.base as u64, logged: log.end() };
                // What it has as an owner of the past is no copy of anything.
                let copy = Some(copy).filter(|copy| copy.generation == record.generation);
                self.hosts[at].run = Run::Peer(Peer::new(me, &record, copy));
            }
            Resume::Fetch { after, through } => {
                let other = &self.hosts[1 - at].log;
                let from = after as usize - other.base;
                let more = other.writes[from..through as usize - other.base].to_vec();
                self.hosts[at].log.writes.extend(more);
                self.seen[FETCHED] = true;
                self.open(at, record.taken_by(me));
            }
            // It was stopped between taking the record and fencing the old owner.
            Resume::Serve if self.hosts[at].log.generation < record.generation => {
                self.witness = record.taken_by(me);
                self.hosts[at].run = Run::Fencing { after: self.witness };
            }
            Resume::Serve => self.open(at, record.taken_by(me)),
        }
    }

    /// An owner comes back: its log is stable, then the record is its own again.
    fn open(&mut self, at: usize, record: Record) {
        self.hosts[at].failed = false;
        self.witness = record;
        self.serve(at, record);
    }

    fn take_over(&mut self, at: usize) {
        let bug = self.bug;
        let host = &mut self.hosts[at];
        let Run::Peer(mut peer) = host.run else { return };
        let mut record = self.witness;
        if bug == Bug::BootIgnored
            && let Copies::Sync(party) = &mut record.copies
        {
            party.boot = host.boot.into();
        }
        let Ok(after) = peer.take_over(&record) else { return };
        if bug != Bug::UnstableTakeover {
            host.log.stable = host.log.writes.len();
        }
        let before = self.witness;
        host.run = Run::Taking { peer, before, after };
        self.change(at, before, after);
    }

    /// The old owner reaches nothing any more, and the new one serves.
    fn fence(&mut self, at: usize, after: Record) {
        self.hosts[1 - at].fenced = true;
        let host = &mut self.hosts[at];
        if self.image.len() < host.log.base {
            self.bad = Some("a copy counts although the image lacks what was before it");
            return;
        }
        let mut writes = self.image[..host.log.base].to_vec();
        writes.append(&mut host.log.writes);
        self.seen[TAKEN_OVER] |= !writes.is_empty();
        host.log = Log { generation: after.generation, base: 0, writes, stable: 0 };
        self.serve(at, after);
    }
}

impl Model for Rules {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.0, self.1)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.bad.is_some() {
            return;
        }
        let limits = world.limits;
        for at in 0..2 {
            let host = &world.hosts[at];
            if let Run::Owner(owner) = &host.run {
                let takes = !host.failed || world.may_bypass(at);
                if limits.writes > 0 && !matches!(owner.phase(), Phase::Lost) && takes {
                    actions.push(Action::Write(at));
                }
                if at == 0 && !host.failed && limits.fails > 0 {
                    actions.push(Action::Fail(at));
                }
                let end = owner.may_acknowledge() as usize;
                let early = world.bug == Bug::EarlyAck && host.log.writes.len() > world.acknowledged.len();
                if end > world.acknowledged.len() || early {
                    actions.push(Action::Acknowledge(at));
                }
                if owner.may_drain() as usize > world.flushed {
                    actions.push(Action::Flush(at));
                }
                let stable = if world.bug == Bug::EarlyDrain { host.log.stable } else { 0 };
                if !host.fenced && (owner.may_drain() as usize).max(stable) > world.image.len() {
                    actions.push(Action::Drain(at));
                }
            }
            if host.is_up() && !host.failed && host.log.stable < host.log.writes.len() {
                actions.push(Action::Stabilise(at));
            }
            if !world.mail[at].is_empty() {
                actions.push(Action::Deliver(at));
            }
            if host.is_up() && limits.kills > 0 {
                actions.push(Action::Kill(at));
            }
            if limits.powers > 0 {
                actions.push(Action::Power(at));
            }
            match host.run {
                // What nothing else has is lost with it, what the record does not say yet nobody knows, and a log that is behind
                // its image is refused without a peer.
                Run::Down if host.failed && !matches!(world.witness.copies, Copies::Peer(_)) => {}
                Run::Down => actions.extend([true, false].map(|asks| Action::Start { host: at, asks })),
                Run::Peer(_) if limits.takeovers > 0 => actions.push(Action::TakeOver(at)),
                Run::Fencing { .. } => actions.push(Action::Fence(at)),
                _ => {}
            }
        }
        let pair = [&world.hosts[0].run, &world.hosts[1].run];
        let can_meet = matches!(pair, [Run::Owner(_), Run::Peer(_)] | [Run::Peer(_), Run::Owner(_)]);
        if !world.linked && can_meet {
            actions.push(Action::Connect);
        }
        if world.linked && limits.breaks > 0 {
            actions.push(Action::Break);
        }
        for change in 0..world.changes.len() {
            actions.push(Action::Apply { change, answered: true });
            if limits.lost_answers > 0 {
                actions.push(Action::Apply { change, answered: false });
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut w = world.clone();
        match action {
            Action::Write(at) if w.hosts[at].failed => {
                w.limits.writes -= 1;
                w.bypass(at);
            }
            Action::Fail(at) => {
                (w.limits.fails, w.powers) = (world.limits.fails - 1, world.powers + 1);
                w.hosts[at].failed = true;
                w.tell(at, Event::Failed);
            }
            Action::Write(at) => {
                w.limits.writes -= 1;
                let write = std::mem::replace(&mut w.next, world.next + 1);
                let host = &mut w.hosts[at];
                host.log.writes.push(write);
                let (generation, sequence) = (host.log.generation, host.log.end());
                let pairing = w.owner(at).expect("it writes").pairing();
                if matches!(pairing, Pairing::Filling | Pairing::Paired) && w.linked {
                    w.mail[1 - at].push(Message::Record { generation, sequence, write });
                }
                w.tell(at, Event::Logged(sequence));
            }
            Action::Stabilise(at) => w.stabilise(at),
            Action::Acknowledge(at) => w.acknowledge(at),
            Action::Flush(at) => {
                let end = world.owner(at).map(Owner::may_drain).expect("offered") as usize;
                if w.owner(at).is_some_and(|owner| owner.record().generation == w.witness.generation) {
                    w.flushed = end.min(w.acknowledged.len());
                }
            }
            Action::Drain(at) => w.drain(at),
            Action::Deliver(at) => w.deliver(at),
            Action::Connect => {
                w.linked = true;
                for at in 0..2 {
                    let peer = w.hosts[1 - at].party(1 - at);
                    w.tell(at, Event::PeerUp(peer));
                }
            }
            Action::Break => {
                w.limits.breaks -= 1;
                w.unlink();
            }
            Action::Apply { change, answered } => {
                w.limits.lost_answers -= u8::from(!answered);
                w.apply(change, answered);
            }
            Action::Kill(at) => {
                w.limits.kills -= 1;
                w.end(at);
            }
            Action::Power(at) => {
                (w.limits.powers, w.powers) = (world.limits.powers - 1, world.powers + 1);
                let log = &mut w.hosts[at].log;
                log.writes.truncate(log.stable);
                w.hosts[at].boot += 1;
                w.end(at);
                w.hosts[at].fenced = false;
            }
            Action::Start { host, asks } => {
                // A new client of the backend: what fenced the old one is not for it.
                w.hosts[host].fenced = false;
                w.start(host, asks);
            }
            Action::TakeOver(at) => {
                w.limits.takeovers -= 1;
                w.take_over(at);
            }
            Action::Fence(at) => {
                let Run::Fencing { after } = w.hosts[at].run else { return None };
                w.fence(at, after);
            }
        }
        (w != *world).then_some(w)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let reached: [fn(&Rules, &World) -> bool; 5] = [
            |_, w| w.seen[SYNC],
            |_, w| w.seen[TAKEN_OVER],
            |_, w| w.seen[FETCHED],
            |_, w| w.seen[LEFT],
            |_, w| w.seen[CAME_BACK],
        ];
        let names =
            ["in sync", "taken over", "fetched from the peer", "left the peer", "back on a failed device"];
        let all = names.iter().zip(reached).map(|(name, reached)| Property::sometimes(name, reached));
        let mut properties: Vec<Property<Self>> =
            self.2.iter().map(|&at| all.clone().nth(at).expect("a name")).collect();
        properties.push(Property::always(LOST_NOTHING, |_, world: &World| world.bad.is_none()));
        properties
    }
}

/// Every order of everything within the limits: nothing is lost, and what is to be tried is reached.
fn check(limits: Limits, reaches: &'static [usize]) {
    let checker = Rules(limits, Bug::None, reaches).checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!("{limits:?}: {} states", checker.unique_state_count());
}

/// With a rule left out something is lost within the limits.
fn notices(bug: Bug, limits: Limits) {
    let checker = Rules(limits, bug, &[]).checker().threads(2).spawn_bfs().join();
    let found = checker.discovery(LOST_NOTHING);
    let path = found.unwrap_or_else(|| panic!("{bug:?} is not noticed within {limits:?}"));
    let lost = path.last_state().bad.expect("a counterexample");
    println!("{bug:?}: {lost} after {} steps", path.into_actions().len());
}

#[test]
fn a_single_power_loss_takes_nothing_that_is_acknowledged() {
    let limits = Limits { writes: 2, powers: 1, breaks: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, FETCHED, LEFT]);
}

#[test]
fn a_dead_cache_device_takes_nothing_and_nothing_goes_past_it_that_a_takeover_would_lose() {
    let limits = Limits { writes: 2, fails: 1, breaks: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, LEFT]);
    let limits = Limits { writes: 2, fails: 1, kills: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, LEFT, CAME_BACK]);
}

#[test]
fn two_power_losses_take_nothing_that_is_flushed() {
    let limits = Limits { writes: 1, powers: 2, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, FETCHED]);
}

#[test]
fn kills_and_lost_answers_take_nothing() {
    let limits =
        Limits { writes: 1, kills: 1, breaks: 1, lost_answers: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, LEFT]);
}

#[test]
fn a_rule_that_is_left_out_is_noticed() {
    let limits = Limits { writes: 1, powers: 1, takeovers: 1, ..Limits::default() };
    notices(Bug::EarlyAck, limits);
    notices(Bug::EarlyDrain, limits);
    notices(Bug::UnstableTakeover, Limits { powers: 2, ..limits });
    notices(Bug::TailIgnored, limits);
    notices(Bug::UnstableLeave, Limits { breaks: 1, ..limits });
    notices(Bug::BootIgnored, Limits { powers: 2, ..limits });
    notices(Bug::PromiseIgnored, Limits { writes: 2, ..limits });
    notices(Bug::FailedLogCounts, Limits { powers: 0, fails: 1, kills: 1, ..limits });
    notices(Bug::PastThePeer, Limits { writes: 2, powers: 0, fails: 1, ..limits });
}
