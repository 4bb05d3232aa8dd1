//! One host: its disk, its core, and what it is to the volume.

use super::neighbour::NEIGHBOURS;
use super::{Message, Plan, What, World};
use crate::disk::Disk;
use crate::rng::Rng;
use crate::store::{Content, content};
use std::collections::{HashMap, VecDeque};
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, open};
use tidepool_engine::mem::Buf;
use tidepool_engine::{Attach, Engine, EngineConfig, FormatOptions, format_device};
use tidepool_replica::{
    Copies, Effect as OwnerEffect, Event as OwnerEvent, OwnerSession, Party, PeerEffect, PeerSession, Record,
    Resume, resume,
};

/// The host's other volume.
pub(super) const NEIGHBOUR: VolumeId = VolumeId(0);
/// The volume's number in every cache that has it.
pub(super) const VOLUME: VolumeId = VolumeId(1);
/// A connection without a word for this long is given up.
pub(super) const SILENCE_NS: Nanos = 300_000_000;
/// Requests of the host itself are numbered from here on.
const OWN_REQUESTS: RequestId = 1 << 60;

/// What a host is to the volume.
pub(super) enum Run {
    /// The process does not run.
    Down,
    /// It runs and waits for its time to come.
    Waiting,
    /// It is the owner.
    Owner(OwnerSession),
    /// It holds a copy, or may be asked to.
    Peer(PeerSession),
    /// It makes its copy stable, to take over.
    Stabilising { session: PeerSession, before: Record, after: Record, flush: RequestId },
    /// It writes down that it listens to the old owner no more.
    Promising { before: Record, after: Record, control: u64 },
    /// It has asked the witness for the volume.
    Asking { before: Record, after: Record },
    /// The record is its own; whoever was the owner is being kept from the image.
    Fencing { record: Record },
    /// The core gets the image.
    Attaching { record: Record, control: u64 },
}

impl Run {
    /// For a report.
    pub(super) fn name(&self) -> String {
        match self {
            Run::Down => "down".into(),
            Run::Waiting => "waiting".into(),
            Run::Owner(session) => format!("owner, {:?}", session.owner().phase()),
            Run::Peer(session) => format!("peer, {:?}", session.peer()),
            Run::Stabilising { .. } => "stabilising".into(),
            Run::Promising { .. } => "promising".into(),
            Run::Asking { before, after } => format!("asking {before:?} {after:?}"),
            Run::Fencing { .. } => "fencing".into(),
            Run::Attaching { .. } => "attaching".into(),
        }
    }
}

impl Host {
    /// For a report.
    pub(super) fn state(&self) -> String {
        let status = self.engine.as_ref().and_then(|engine| engine.volume_status(0, VOLUME));
        let figures =
            status.map(|s| (s.state, s.dirty_bytes, s.dirty_bytes_max, s.sequence, s.sequence_drained));
        let log = self.engine.as_ref().and_then(|engine| engine.log_status(VOLUME));
        format!("{}: {figures:?} {log:?}", self.run.name())
    }
}

/// A host.
pub(super) struct Host {
    pub(super) at: usize,
    pub(super) disk: Disk,
    pub(super) engine: Option<Engine>,
    pub(super) run: Run,
    /// Counts starts of the machine, and of the process.
    pub(super) boot: u64,
    pub(super) life: u64,
    pub(super) paused_until: Nanos,
    /// The connection that it believes to have, and when it last heard something.
    pub(super) connection: Option<u64>,
    pub(super) heard: Nanos,
    next_id: u64,
    /// Records on their way into the log, and those that wait for the copy to begin.
    records: HashMap<RequestId, (u64, Buf)>,
    queue: VecDeque<(Vec<u8>, bool)>,
    /// The copy begins: control operation, generation.
    beginning: Option<(u64, u64)>,
    flush: Option<RequestId>,
    /// Writes of its other volume.
    pub(super) neighbours: HashMap<RequestId, Buf>,
    append_bytes: usize,
    /// Devices that it has had before this one.
    disks: u128,
    /// It knows that it is not the owner any more.
    pub(super) fenced: bool,
    /// It is to serve although the image may have more than it: nothing that is clean in it counts.
    pub(super) is_behind: bool,
    /// The operation that takes the backend of a lost volume away.
    pub(super) detaching: Option<u64>,
    /// Generation of its client of the image.
    generation: u64,
    told_drained: u64,
    /// When it is ticked next.
    pub(super) armed: Nanos,
}

/// What an effect in flight does when it arrives.
pub(super) enum Transfer {
    Read {
        offset: u64,
        buf: Buf,
    },
    Write {
        offset: u64,
        data: Vec<Content>,
        dsync: bool,
    },
    Sync {
        point: u64,
    },
    ImageRead {
        offset: u64,
        buf: Buf,
    },
    ImageWrite {
        first: u64,
        data: Vec<Content>,
    },
    ImageZeroes {
        first: u64,
        blocks: u64,
    },
    ImageOther,
    Disown,
    /// Something of the host's other volume.
    Neighbour {
        buf: Option<Buf>,
    },
}

impl Host {
    /// A host with a formatted cache.
    pub(super) fn new(at: usize, plan: &Plan, rng: Rng) -> Host {
        Host {
            at,
            disk: new_disk(at, plan, rng),
            engine: None,
            run: Run::Down,
            boot: 0,
            life: 0,
            paused_until: 0,
            connection: None,
            heard: 0,
            next_id: OWN_REQUESTS,
            records: HashMap::new(),
            queue: VecDeque::new(),
            beginning: None,
            flush: None,
            neighbours: HashMap::new(),
            append_bytes: plan.append_bytes,
            disks: 0,
            fenced: false,
            is_behind: false,
            detaching: None,
            generation: 0,
            told_drained: 0,
            armed: 0,
        }
    }

    /// What it is called.
    pub(super) fn party(&self) -> Party {
        Party { cache: self.disks * 2 + self.at as u128, boot: self.boot.into() }
    }

    pub(super) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("the process runs")
    }

    /// What its cache knows of the volume.
    fn known(&self) -> Option<VolumeSpec> {
        let volumes = self.engine.as_ref()?.volumes();
        volumes.into_iter().find(|(id, _)| *id == VOLUME).map(|(_, spec)| spec)
    }

    /// It gets another device, with an empty cache.
    pub(super) fn replace_disk(&mut self, plan: &Plan, rng: Rng) {
        self.disk = new_disk(self.at, plan, rng);
        self.disks += 1;
    }

    /// The process is gone.
    pub(super) fn stop(&mut self) {
        self.life += 1;
        self.engine = None;
        self.run = Run::Down;
        self.connection = None;
        self.records.clear();
        self.queue.clear();
        self.neighbours.clear();
        (self.fenced, self.detaching) = (false, None);
        (self.beginning, self.flush) = (None, None);
        self.armed = 0;
    }
}

fn changes_image(op: &BackendOp) -> bool {
    matches!(op, BackendOp::Write { .. } | BackendOp::Discard { .. } | BackendOp::WriteZeroes { .. })
}

/// Whose cache a party is.
pub(super) fn host_of(party: Party) -> usize {
    (party.cache % 2) as usize
}

fn new_disk(at: usize, plan: &Plan, rng: Rng) -> Disk {
    let (size_bytes, segment_bytes) = (plan.cache_bytes[at], plan.segment_bytes[at]);
    let mut disk = Disk::new(size_bytes, rng);
    let options = FormatOptions { uuid: [at as u8 + 1; 16], size_bytes, segment_bytes: Some(segment_bytes) };
    format_device(&mut disk, &options, &mut |_, _| ()).expect("a new disk can be formatted");
    disk
}

impl World {
    /// The process starts: it opens its cache and looks what it is to the volume.
    pub(super) fn start(&mut self, at: usize) {
        let now = self.now;
        let host = &mut self.hosts[at];
        if !matches!(host.run, Run::Down) {
            return;
        }
        let append_bytes = host.append_bytes;
        let config = EngineConfig { arena_bytes: 24 << 20, append_bytes, ..EngineConfig::small() };
        match Engine::open(&mut host.disk, config, now) {
            Ok((engine, _)) => host.engine = Some(engine),
            Err(error) => return self.fail(format!("host {at} cannot open its cache: {error}")),
        }
        self.note("start", at as u64, 0, 0);
        self.hosts[at].run = Run::Waiting;
        self.start_neighbour(at);
        self.decide(at);
        self.drive(at);
    }

    /// What a host that is nothing yet becomes.
    pub(super) fn decide(&mut self, at: usize) {
        if !matches!(self.hosts[at].run, Run::Waiting) || !self.witness_reachable(at) {
            return;
        }
        let record = self.witness;
        let tail = match &self.hosts[1 - at].run {
            Run::Peer(session) if self.link_works() && !self.is_paused(1 - at) => session.peer().tail(),
            _ => None,
        };
        let host = &mut self.hosts[at];
        let own = host.engine().log_status(VOLUME).map_or(0, |log| log.logged);
        if self.whole_image && record.copies == Copies::Solo && host_of(record.owner) == at {
            // Its device is a new one, and somebody knows that the old one had nothing of its own.
            let after = record.taken_by(host.party());
            return self.ask(at, record, after);
        }
        match resume(host.party(), &record, own, tail) {
            Resume::Serve => {
                if record.peer().is_some() {
                    self.cover.hit("owner back in sync");
                }
                let after = record.taken_by(self.hosts[at].party());
                self.ask(at, record, after);
            }
            Resume::Taken => self.become_peer(at),
            // The peer has more: it is for it to take over.
            Resume::Fetch { .. } => self.cover.hit("owner back with less than its peer"),
            Resume::Unreachable => self.cover.hit("owner back and unsure"),
        }
    }

    pub(super) fn become_peer(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let me = host.party();
        let volume = host.known();
        let status = volume.as_ref().and_then(|_| host.engine.as_ref()?.volume_status(0, VOLUME));
        let is_replica = status.is_some_and(|s| s.state == tidepool_engine::status::VolumeState::Replica);
        let generation = volume.filter(|_| is_replica).map_or(0, |spec| spec.generation);
        let session = PeerSession::new(host.engine(), Some(VOLUME), me, &self.witness, generation);
        host.run = Run::Peer(session);
    }

    /// Asks the witness for a change of the record, as an owner to be.
    pub(super) fn ask(&mut self, at: usize, before: Record, after: Record) {
        self.hosts[at].run = Run::Asking { before, after };
        self.send_change(at, before, after);
    }

    /// The peer takes the volume over.
    pub(super) fn take_over(&mut self, at: usize) {
        let record = self.witness;
        if !self.witness_reachable(at) || self.is_paused(at) {
            return;
        }
        let host = &mut self.hosts[at];
        if host.beginning.is_some() {
            return;
        }
        let Run::Peer(session) = &mut host.run else { return };
        if let Ok(after) = session.peer_mut().take_over(&record) {
            self.take_over_as(at, record, after);
        }
    }

    /// The peer makes its copy stable, to become the owner.
    pub(super) fn take_over_as(&mut self, at: usize, record: Record, after: Record) {
        self.note("take over", at as u64, after.generation, 0);
        self.hang_up(at);
        let host = &mut self.hosts[at];
        let flush = host.fresh();
        let request = Request { id: flush, volume: VOLUME, op: Op::Flush, offset: 0, len: 0, buf: None };
        let Run::Peer(session) = std::mem::replace(&mut host.run, Run::Waiting) else { unreachable!() };
        host.run = Run::Stabilising { session, before: record, after, flush };
        let now = self.now;
        self.hosts[at].engine().handle(now, Event::Request(request));
        self.drive(at);
    }

    /// The witness has answered, or is asked what stands there.
    pub(super) fn answer(&mut self, at: usize, written: Option<bool>) {
        let record = self.witness;
        match self.hosts[at].run {
            Run::Asking { before, after } => {
                if record == after {
                    self.hosts[at].run = Run::Fencing { record };
                    self.send_fence(at, record.generation);
                } else if record == before {
                    self.send_change(at, before, after);
                } else {
                    self.hosts[at].run = Run::Waiting;
                    self.decide(at);
                }
            }
            Run::Owner(_) => {
                let event = match written {
                    Some(true) => OwnerEvent::Written,
                    _ => OwnerEvent::Found(record),
                };
                self.tell(at, event);
            }
            _ => {}
        }
        self.drive(at);
    }

    /// Nobody of an earlier generation reaches the image any more.
    pub(super) fn fenced(&mut self, at: usize) {
        if let Run::Fencing { record } = self.hosts[at].run {
            self.attach(at, record);
            self.drive(at);
        }
    }

    fn attach(&mut self, at: usize, record: Record) {
        let now = self.now;
        let host = &mut self.hosts[at];
        let control = host.fresh();
        host.generation = record.generation;
        let attached = match host.known() {
            Some(spec) => {
                let keep_clean = !host.is_behind;
                let attach = Attach { generation: record.generation, ..Attach::again(&spec, keep_clean) };
                host.engine().attach(now, VOLUME, attach, control).is_ok()
            }
            None if self.whole_image => {
                let spec = self.plan.spec(record.generation);
                host.engine().add_volume(now, spec, control).expect("there is room for a second volume");
                true
            }
            None => return self.fail(format!("host {at} owns the volume and has nothing of it")),
        };
        if attached {
            host.engine().set_degraded(now, VOLUME, self.plan.alone);
        }
        host.run = match attached {
            true => Run::Attaching { record, control },
            // Something is still on its way to the log.
            false => Run::Fencing { record },
        };
        if !attached {
            self.send_fence(at, record.generation);
        }
    }

    /// The owner's machine takes an event in.
    pub(super) fn tell(&mut self, at: usize, event: OwnerEvent) {
        let now = self.now;
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        session.take(engine, now, event, &mut effects);
        self.owner_effects(at, effects);
    }

    /// The owner hears how far the copy goes.
    fn peer_has(&mut self, at: usize, have: Have) {
        let now = self.now;
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        session.has(engine, now, have, &mut effects);
        self.owner_effects(at, effects);
    }

    fn owner_effects(&mut self, at: usize, effects: Vec<OwnerEffect>) {
        for effect in effects {
            match effect {
                OwnerEffect::Begin { generation, base } => {
                    self.cover.hit("copy begun");
                    let host = &self.hosts[at];
                    let (Run::Owner(session), Some(engine)) = (&host.run, &host.engine) else { continue };
                    let begin = session.begin(engine, generation, base);
                    self.send(at, Message::Begin(begin));
                }
                OwnerEffect::Stabilise => {
                    self.cover.hit("peer left");
                    let host = &self.hosts[at];
                    let log = host.engine.as_ref().and_then(|engine| engine.log_status(VOLUME));
                    // An owner that has not noticed yet goes on acknowledging what its log has.
                    self.drained_at_leave =
                        log.is_some_and(|log| log.failed && log.drained >= log.acknowledged);
                }
                OwnerEffect::Write { before, after } => self.send_change(at, before, after),
                OwnerEffect::Close => {
                    self.cover.hit("owner closed");
                    self.hosts[at].engine().fence(VOLUME);
                    self.hosts[at].fenced = true;
                    self.let_go(at);
                }
            }
        }
    }

    /// Lets a host do all that it can.
    pub(super) fn drive(&mut self, at: usize) {
        loop {
            let now = self.now;
            while let Some(effect) = self.hosts[at].engine.as_mut().and_then(|engine| engine.next_effect(now))
            {
                self.effect(at, effect);
                if self.failure.is_some() {
                    return;
                }
            }
            if !self.look(at) {
                return;
            }
        }
    }

    /// Lets the machines look at the core; whether the core has to be driven again.
    fn look(&mut self, at: usize) -> bool {
        let now = self.now;
        let host = &mut self.hosts[at];
        let Some(engine) = &mut host.engine else { return false };
        match &mut host.run {
            Run::Owner(session) => {
                let before = session.owner().pairing();
                let mut effects = Vec::new();
                session.look(engine, now, &mut effects);
                let changed = before != session.owner().pairing();
                self.owner_effects(at, effects);
                changed
            }
            Run::Peer(session) if host.connection.is_some() => {
                let mut effects = Vec::new();
                session.look(engine, &mut effects);
                for effect in &effects {
                    match *effect {
                        PeerEffect::Have(have) => self.send(at, Message::Have(have)),
                        PeerEffect::Flush => {
                            let host = &mut self.hosts[at];
                            let id = host.fresh();
                            host.flush = Some(id);
                            let op = Op::Flush;
                            let request = Request { id, volume: VOLUME, op, offset: 0, len: 0, buf: None };
                            host.engine().handle(now, Event::Request(request));
                        }
                        PeerEffect::HangUp => self.hang_up(at),
                    }
                }
                self.feed(at) || effects.contains(&PeerEffect::Flush)
            }
            _ => false,
        }
    }

    /// Gives the core the records that have arrived; whether there was one.
    fn feed(&mut self, at: usize) -> bool {
        let now = self.now;
        let mut fed = false;
        loop {
            let host = &mut self.hosts[at];
            let Run::Peer(session) = &mut host.run else { return fed };
            let Some((bytes, durable)) = host.queue.front().filter(|_| session.takes_records()) else {
                return fed;
            };
            let engine = host.engine.as_mut().expect("the process runs");
            let Some(buf) = engine.arena_mut().alloc(bytes.len()) else { return fed };
            engine.arena_mut().bytes_mut(buf).copy_from_slice(bytes);
            let header = open::<RecordHeader>(&bytes[..BLOCK_BYTES]).expect("nothing is damaged on the way");
            let sequence = header.sequence.get();
            let op = Op::Record { durable: *durable };
            if session.peer_mut().record(header.generation.get(), sequence).is_err() {
                engine.arena_mut().free(buf);
                self.hang_up(at);
                return fed;
            }
            host.queue.pop_front();
            let id = host.fresh();
            host.records.insert(id, (sequence, buf));
            let request = Request { id, volume: VOLUME, op, offset: 0, len: 0, buf: Some(buf) };
            host.engine().handle(now, Event::Request(request));
            fed = true;
        }
    }

    fn effect(&mut self, at: usize, effect: Effect) {
        let block = BLOCK_BYTES as u64;
        let host = &mut self.hosts[at];
        let engine = host.engine.as_ref().expect("it has an effect");
        let contents = |buf: Buf| engine.arena().bytes(buf).chunks_exact(BLOCK_BYTES).map(content).collect();
        let (token, transfer) = match effect {
            Effect::DeviceRead { token, offset, buf } => (token, Transfer::Read { offset, buf }),
            Effect::DeviceWrite { token, offset, buf, dsync } => {
                (token, Transfer::Write { offset, data: contents(buf), dsync })
            }
            Effect::DeviceSync { token } => (token, Transfer::Sync { point: host.disk.sync_point() }),
            Effect::Backend { token, volume: NEIGHBOUR, op } => {
                let buf = if let BackendOp::Read { buf, .. } = op { Some(buf) } else { None };
                (token, Transfer::Neighbour { buf })
            }
            Effect::Backend { op, .. } if host.fenced && changes_image(&op) => {
                return self.fail(format!("host {at} was told that it is not the owner, and sends {op:?}"));
            }
            Effect::Backend { token, op, .. } => (
                token,
                match op {
                    BackendOp::Read { offset, buf } => Transfer::ImageRead { offset, buf },
                    BackendOp::Write { offset, buf } => {
                        Transfer::ImageWrite { first: offset / block, data: contents(buf) }
                    }
                    BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                        Transfer::ImageZeroes { first: offset / block, blocks: len / block }
                    }
                    BackendOp::Disown => Transfer::Disown,
                    _ => Transfer::ImageOther,
                },
            ),
            Effect::Peer { op, .. } => {
                let message = match op {
                    PeerOp::Record { buf, durable, .. } => {
                        Message::Record { bytes: engine.arena().bytes(buf).to_vec(), durable }
                    }
                    PeerOp::Stabilise { sequence } => Message::Stabilise { sequence },
                    // No block of theirs goes bad.
                    PeerOp::Block { block, .. } => {
                        return self.fail(format!("block {block} is bad on host {at}"));
                    }
                };
                return self.send(at, message);
            }
            Effect::Reply { id, result } => return self.reply(at, id, result),
            Effect::ControlDone { control, result } => return self.control_done(at, control, result),
        };
        let generation = host.generation;
        self.send_transfer(at, token, generation, transfer);
    }

    fn reply(&mut self, at: usize, id: RequestId, result: Result<(), RequestError>) {
        if id < OWN_REQUESTS {
            return self.client_reply(at, id, result);
        }
        let host = &mut self.hosts[at];
        if let Some(buf) = host.neighbours.remove(&id) {
            return host.engine().arena_mut().free(buf);
        }
        if let Some((sequence, buf)) = host.records.remove(&id) {
            host.engine().arena_mut().free(buf);
            if let Run::Peer(session) = &mut host.run {
                if result == Err(RequestError::Invalid) && session.takes_records() {
                    return self.fail(format!("host {at} cannot take record {sequence} of its owner"));
                }
                session.logged(sequence, result);
            }
            return;
        }
        if host.flush == Some(id) {
            host.flush = None;
            if let Run::Peer(session) = &mut host.run {
                session.flushed(result);
            }
            return;
        }
        match &host.run {
            // What it has cannot be made stable: it may not take over.
            Run::Stabilising { flush, .. } if *flush == id && result.is_err() => {
                host.run = Run::Waiting;
            }
            Run::Stabilising { session, before, after, flush } if *flush == id => {
                let (promise, before, after) = (session.peer().promise(), *before, *after);
                let host = &mut self.hosts[at];
                let control = host.fresh();
                host.run = Run::Promising { before, after, control };
                host.engine().promise(VOLUME, promise, control);
            }
            _ => {}
        }
    }

    fn control_done(&mut self, at: usize, control: u64, result: Result<(), ControlError>) {
        if self.drained_control == Some((at, control)) {
            self.drained_control = None;
            // Another operation may be under way.
            self.drain_done = result.is_ok();
            return;
        }
        if control == NEIGHBOURS {
            let life = self.hosts[at].life;
            return self.after(0, What::Neighbour { at, life });
        }
        let host = &mut self.hosts[at];
        if host.beginning.is_some_and(|(begins, _)| begins == control) {
            let (_, generation) = host.beginning.take().expect("looked at just now");
            match (result, &mut host.run) {
                (Ok(()), Run::Peer(session)) => {
                    session.begun(VOLUME);
                    self.send(at, Message::Begun { generation });
                }
                (Err(ControlError::NoRoom | ControlError::Device), _) => self.hang_up(at),
                (Err(error), _) => self.fail(format!("host {at} cannot begin a copy: {error}")),
                _ => {}
            }
            return;
        }
        if host.detaching == Some(control) {
            return self.has_let_go(at, result);
        }
        match host.run {
            Run::Promising { before, after, control: promises } if promises == control => match result {
                Ok(()) => self.ask(at, before, after),
                Err(_) => host.run = Run::Waiting,
            },
            Run::Attaching { record, control: attaches } if attaches == control => {
                let session = OwnerSession::new(host.engine(), VOLUME, record, self.plan.alone);
                host.run = Run::Owner(session);
                (host.told_drained, host.is_behind) = (0, false);
                self.serve(at);
            }
            _ => {}
        }
    }

    /// A message arrives.
    pub(super) fn receive(&mut self, at: usize, message: Message) {
        let now = self.now;
        self.hosts[at].heard = now;
        match message {
            Message::Begin(begin) => self.begin(at, begin),
            Message::Begun { generation } => {
                let is_own = matches!(&self.hosts[at].run, Run::Owner(session)
                    if session.owner().record().generation == generation);
                if is_own {
                    self.tell(at, OwnerEvent::Begun);
                }
            }
            Message::Record { bytes, durable } => self.hosts[at].queue.push_back((bytes, durable)),
            Message::Stabilise { sequence } => {
                if let Run::Peer(session) = &mut self.hosts[at].run {
                    session.stabilise(sequence);
                }
            }
            Message::Have(have) => self.peer_has(at, have),
            Message::Drained { sequence } => {
                let host = &mut self.hosts[at];
                if let (Run::Peer(session), Some(engine)) = (&host.run, &mut host.engine) {
                    session.drained(engine, sequence);
                }
            }
            Message::Beat => {
                if matches!(self.hosts[at].run, Run::Peer(_)) {
                    self.send(at, Message::Beat);
                }
            }
        }
        self.drive(at);
    }

    fn begin(&mut self, at: usize, begin: Begin) {
        let spec = VolumeSpec { size_bytes: begin.size_bytes, ..self.plan.spec(begin.generation) };
        let host = &mut self.hosts[at];
        let Run::Peer(session) = &mut host.run else { return };
        if session.begin(begin.generation, begin.base).is_err() {
            return self.hang_up(at);
        }
        let control = host.fresh();
        if host.known().is_some() {
            host.beginning = Some((control, begin.generation));
            host.engine().begin_replica(VOLUME, begin, control);
            return;
        }
        match host.engine().add_replica(spec, begin.base, begin.room, control) {
            Ok(id) => {
                assert_eq!(id, VOLUME);
                host.beginning = Some((control, begin.generation));
            }
            Err(_) => self.hang_up(at),
        }
    }

    /// Beats, looks for silence, and ticks.
    pub(super) fn beat(&mut self, at: usize) {
        let now = self.now;
        if self.hosts[at].engine.is_none() {
            return;
        }
        if self.hosts[at].connection.is_some() && now > self.hosts[at].heard + SILENCE_NS {
            self.hang_up(at);
        }
        let host = &mut self.hosts[at];
        if matches!(&host.run, Run::Owner(session) if session.is_held_up(now)) {
            self.cover.hit("copy without room given up");
            return self.hang_up(at);
        }
        if let (Run::Owner(session), Some(engine)) = (&host.run, &host.engine) {
            let drained = session.drained(engine);
            if host.connection.is_some() {
                self.send(at, Message::Beat);
                if drained > self.hosts[at].told_drained {
                    self.hosts[at].told_drained = drained;
                    self.send(at, Message::Drained { sequence: drained });
                }
            }
        }
        if self.is_owner_unawares(at) {
            self.hosts[at].run = Run::Waiting;
        }
        if matches!(self.hosts[at].run, Run::Waiting) {
            self.decide(at);
        }
        self.drive(at);
    }

    /// A takeover that a former life of the peer had asked for has come about.
    fn is_owner_unawares(&mut self, at: usize) -> bool {
        let host = &self.hosts[at];
        let own = self.witness.owner.cache == host.party().cache;
        let found = matches!(host.run, Run::Peer(_)) && own && self.witness_reachable(at);
        if found {
            self.cover.hit("owner unawares");
        }
        found
    }

    /// A host gives its connection up.
    pub(super) fn hang_up(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.connection.take().is_none() {
            return;
        }
        host.queue.clear();
        if matches!(host.run, Run::Peer(_)) && host.known().is_some() {
            host.engine().withdraw_room(VOLUME);
        }
        self.note("hang up", at as u64, 0, 0);
        self.tell(at, OwnerEvent::PeerDown);
    }

    /// The two are connected; the owner hears who the other one is.
    pub(super) fn connected(&mut self, at: usize, connection: u64) {
        let now = self.now;
        for host in &mut self.hosts {
            host.connection = Some(connection);
            host.heard = now;
            host.queue.clear();
            host.told_drained = 0;
        }
        let peer = self.hosts[1 - at].party();
        let known = self.hosts[1 - at].known().map(|_| VOLUME);
        let room = self.hosts[1 - at].engine().room_to_begin(known);
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        if !session.peer_up(engine, now, (peer, room), &mut effects) {
            self.cover.hit("peer without room");
            self.hang_up(at);
            self.hang_up(1 - at);
        }
        self.owner_effects(at, effects);
        self.drive(at);
    }
}
