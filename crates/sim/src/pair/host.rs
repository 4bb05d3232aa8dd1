//! One host: its disk, its core, and what it is to the volume.

use super::clock::Clock;
use super::neighbour::NEIGHBOURS;
use super::{LIMITS, Message, Plan, What, World};
use crate::disk::Disk;
use crate::rng::{Rng, mix};
use crate::store::{Content, content};
use crate::trace::{Seen, fold};
use std::collections::{HashMap, VecDeque};
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, open};
use tidepool_engine::mem::Buf;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Engine, EngineConfig, FormatOptions, format_device};
use tidepool_replica::{
    Effect as OwnerEffect, Event as OwnerEvent, OwnerSession, Party, PeerEffect, PeerSession, Record,
};

/// The host's other volume.
pub(super) const NEIGHBOUR: VolumeId = VolumeId(0);
/// The volume's number in every cache that has it.
pub(super) const VOLUME: VolumeId = VolumeId(1);
/// Requests of the host itself are numbered from here on.
const OWN_REQUESTS: RequestId = 1 << 60;

/// What a host is to the volume.
pub(super) enum Run {
    /// The process does not run.
    Down,
    /// It runs and waits for its time to come.
    Waiting,
    /// It gets a record from its peer that it has lost, or gives up at that time.
    Fetching { sequence: u64, through: u64, until: Nanos },
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
    /// The record is its own; the former owner is being kept from the image.
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
            Run::Fetching { sequence, .. } => format!("fetching {sequence}"),
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
    pub(super) clock: Clock,
    pub(super) paused_until: Nanos,
    /// The connection that it believes to have, and when it last heard something.
    pub(super) connection: Option<u64>,
    pub(super) heard: Nanos,
    next_id: u64,
    /// Records on their way into the log, and those that wait for the copy to begin.
    pub(super) records: HashMap<RequestId, (u64, Buf)>,
    /// Records that are read for the owner, and blocks, with their CRC-32C.
    pub(super) fetches: HashMap<RequestId, Buf>,
    pub(super) blocks: HashMap<RequestId, (u64, u32, Buf)>,
    queue: VecDeque<(Vec<u8>, bool)>,
    /// The copy begins: control operation, generation.
    pub(super) beginning: Option<(u64, u64)>,
    flush: Option<RequestId>,
    /// Writes of its other volume.
    pub(super) neighbours: HashMap<RequestId, Buf>,
    /// How many there ever were.
    pub(super) neighbour_writes: u64,
    append_bytes: usize,
    /// Devices that it has had before this one.
    disks: u128,
    /// It knows that it is not the owner any more.
    pub(super) fenced: bool,
    /// Its clients are let in.
    pub(super) serves: bool,
    /// When the owner of its copy was last told that it is followed, or the process began.
    pub(super) followed_at: Nanos,
    /// It is to serve although the image may have more than it: nothing that is clean in it counts.
    pub(super) is_behind: bool,
    /// The operation that takes the backend of a lost volume away.
    pub(super) detaching: Option<u64>,
    /// Generation of its client of the image.
    pub(super) generation: u64,
    pub(super) told_drained: u64,
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
    pub(super) fn new(at: usize, plan: &Plan, rng: Rng, clock: Clock) -> Host {
        Host {
            at,
            disk: new_disk(at, plan, rng),
            engine: None,
            run: Run::Down,
            boot: 0,
            life: 0,
            clock,
            paused_until: 0,
            connection: None,
            heard: 0,
            next_id: OWN_REQUESTS,
            records: HashMap::new(),
            fetches: HashMap::new(),
            blocks: HashMap::new(),
            queue: VecDeque::new(),
            beginning: None,
            flush: None,
            neighbours: HashMap::new(),
            neighbour_writes: 0,
            append_bytes: plan.append_bytes,
            disks: 0,
            fenced: false,
            serves: false,
            followed_at: 0,
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
    pub(super) fn known(&self) -> Option<VolumeSpec> {
        let volumes = self.engine.as_ref()?.volumes();
        volumes.into_iter().find(|(id, _)| *id == VOLUME).map(|(_, spec)| spec)
    }

    /// What its cache has of the volume is a copy of another host's.
    pub(super) fn has_copy(&self) -> bool {
        let status = self.engine.as_ref().and_then(|engine| engine.volume_status(0, VOLUME));
        status.is_some_and(|status| status.state == VolumeState::Replica)
    }

    /// What a request of its own is called when lives are compared.
    fn name_of_request(&self, id: RequestId) -> u64 {
        if let Some((sequence, _)) = self.records.get(&id) {
            return fold(&(2, sequence));
        }
        if let Some((block, crc, _)) = self.blocks.get(&id) {
            return fold(&(3, block, crc));
        }
        match id {
            _ if self.fetches.contains_key(&id) => fold(&4),
            _ if self.neighbours.contains_key(&id) => fold(&(5, id)),
            _ => fold(&6),
        }
    }

    /// What a control operation is called when lives are compared.
    fn name_of_operation(&self, control: u64) -> u64 {
        match self.run {
            Run::Promising { control: promises, .. } if promises == control => fold(&7),
            Run::Attaching { control: attaches, .. } if attaches == control => fold(&8),
            _ if self.beginning.is_some_and(|(begins, _)| begins == control) => fold(&9),
            _ if self.detaching == Some(control) => fold(&10),
            _ => fold(&11),
        }
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
        self.fetches.clear();
        self.blocks.clear();
        self.queue.clear();
        self.neighbours.clear();
        (self.fenced, self.detaching, self.serves) = (false, None, false);
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
        let now = self.clock(at);
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
        (self.hosts[at].run, self.hosts[at].followed_at) = (Run::Waiting, now);
        self.start_neighbour(at);
        self.decide(at);
        self.drive(at);
    }

    /// The owner's machine takes an event in.
    pub(super) fn tell(&mut self, at: usize, event: OwnerEvent) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        session.take(engine, now, event, &mut effects);
        self.owner_effects(at, effects);
    }

    /// The owner hears how far the copy goes.
    fn peer_has(&mut self, at: usize, have: Have) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        assert!(session.has(engine, now, have, &mut effects), "a peer has what it was sent: {have:?}");
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
            while self.take_effects(at) {}
            if self.failure.is_some() || !self.look(at) {
                return;
            }
        }
    }

    /// Carries out what the core wants now, in an order that does not depend on that of the core; whether there was anything.
    fn take_effects(&mut self, at: usize) -> bool {
        let now = self.clock(at);
        let mut all = Vec::new();
        while let Some(effect) = self.hosts[at].engine.as_mut().and_then(|engine| engine.next_effect(now)) {
            let seen = self.seen(at, &effect);
            self.trace.add(at, &seen);
            // What goes to the peer stays in its order.
            let order = if matches!(effect, Effect::Peer { .. }) { all.len() } else { usize::MAX };
            let identity = fold(&(at, seen.identity()));
            all.push((order, mix(self.order, identity), identity, fold(&seen), effect));
        }
        all.sort_by_key(|&(order, shuffled, _, data, _)| (order, shuffled, data));
        let some = !all.is_empty();
        let life = self.hosts[at].life;
        for (_, _, identity, _, effect) in all {
            if self.failure.is_some() {
                return false;
            }
            if self.hosts[at].life != life {
                break;
            }
            let (name, rng) = self.chance.named(identity);
            let before = (self.effect, std::mem::replace(&mut self.rng, rng));
            self.effect = name;
            self.effect(at, effect);
            (self.effect, self.rng) = before;
        }
        some
    }

    /// An effect as it is compared: requests and operations by what they are for.
    fn seen(&self, at: usize, effect: &Effect) -> Seen {
        let host = &self.hosts[at];
        let arena = host.engine.as_ref().expect("it has an effect").arena();
        let seen = Seen::of(effect, arena);
        match *effect {
            Effect::Reply { id, result } if id < OWN_REQUESTS => {
                let Some((slot, read)) = self.client.of_request(id) else { return seen };
                let seen = seen.called(fold(&(1, slot)));
                let read = read.filter(|_| result.is_ok() && self.client.is_served_by(at));
                read.map_or(seen, |buf| seen.with_data(arena.bytes(buf)))
            }
            Effect::Reply { id, .. } => seen.called(host.name_of_request(id)),
            Effect::ControlDone { control, .. } => seen.called(host.name_of_operation(control)),
            _ => seen,
        }
    }

    /// Lets the machines look at the core; whether the core has to be driven again.
    fn look(&mut self, at: usize) -> bool {
        let now = self.clock(at);
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
        let now = self.clock(at);
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
                    PeerOp::Block { block, crc } => Message::AskBlock { block, crc },
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
        if let Some(buf) = host.fetches.remove(&id) {
            return self.fetched(at, buf, result);
        }
        if let Some(asked) = host.blocks.remove(&id) {
            return self.block_read(at, asked, result);
        }
        if let Some((sequence, buf)) = host.records.remove(&id) {
            host.engine().arena_mut().free(buf);
            if matches!(host.run, Run::Fetching { .. }) {
                host.run = Run::Waiting;
                if result == Err(RequestError::Invalid) {
                    // Another volume was promised the room meanwhile: it is tried again.
                    self.cover.hit("record without room");
                }
                return self.decide(at);
            }
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
                let session = OwnerSession::new(host.engine(), VOLUME, record, LIMITS, self.plan.alone);
                host.run = Run::Owner(session);
                (host.told_drained, host.is_behind) = (0, false);
                self.serve(at);
            }
            _ => {}
        }
    }

    /// A message arrives.
    pub(super) fn receive(&mut self, at: usize, message: Message) {
        let now = self.clock(at);
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
            Message::AskBlock { block, crc } => self.asked_for_block(at, block, crc),
            Message::Block { block, crc, data } => self.block_came(at, block, crc, data.as_deref()),
            Message::Beat { time_ns } => match &mut self.hosts[at].run {
                Run::Peer(_) => {
                    self.hosts[at].followed_at = now;
                    self.send(at, Message::Beat { time_ns });
                }
                Run::Owner(session) => {
                    assert!(session.followed(time_ns), "a beat that was sent");
                }
                _ => {}
            },
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

    /// Of two hosts at most one takes reads, whatever their clocks show.
    pub(super) fn check_lease(&mut self, at: usize) {
        let host = &self.hosts[at];
        let taken = self.client.is_served_by(1 - at);
        if taken && host.serves && !host.fenced && self.is_leased(at) {
            self.fail(format!("host {at} takes reads of a volume that is served by the other one"));
        }
    }

    /// Beats, looks for silence, and ticks.
    pub(super) fn beat(&mut self, at: usize) {
        let now = self.clock(at);
        if self.hosts[at].engine.is_none() {
            return;
        }
        self.check_lease(at);
        if self.hosts[at].connection.is_some() && now > self.hosts[at].heard + LIMITS.silence_ns {
            self.hang_up(at);
        }
        let host = &mut self.hosts[at];
        if let (Run::Owner(session), Some(engine), Some(_)) = (&mut host.run, &host.engine, host.connection)
            && session.parts_because(engine, now).is_some()
        {
            let lost = engine.has_loss(VOLUME);
            self.cover.hit(if lost { "copy parted with for a loss" } else { "copy without room given up" });
            return self.hang_up(at);
        }
        if let (Run::Owner(session), Some(engine)) = (&mut host.run, &host.engine) {
            let drained = session.drained(engine);
            if host.connection.is_some() {
                session.beats(now);
                self.send(at, Message::Beat { time_ns: now });
                if drained > self.hosts[at].told_drained {
                    self.hosts[at].told_drained = drained;
                    self.send(at, Message::Drained { sequence: drained });
                }
            }
        }
        if self.is_owner_unawares(at) {
            self.hosts[at].run = Run::Waiting;
        }
        if matches!(self.hosts[at].run, Run::Fetching { until, .. } if now > until) {
            self.hosts[at].run = Run::Waiting;
        }
        if matches!(self.hosts[at].run, Run::Waiting) {
            self.decide(at);
        }
        self.drive(at);
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
        let now = self.clock(at);
        for host in &mut self.hosts {
            host.connection = Some(connection);
            host.heard = host.clock.read(self.now);
            host.queue.clear();
            host.told_drained = 0;
        }
        let peer = self.hosts[1 - at].party();
        let known = self.hosts[1 - at].known().map(|_| VOLUME);
        let room = self.hosts[1 - at].engine().room_to_begin(known);
        let host = &mut self.hosts[at];
        let (Run::Owner(session), Some(engine)) = (&mut host.run, &mut host.engine) else { return };
        let mut effects = Vec::new();
        let up = session.peer_up(engine, now, (peer, room), &mut effects);
        session.beats(now);
        if !up {
            self.cover.hit("peer without room");
            self.hang_up(at);
            self.hang_up(1 - at);
        }
        self.owner_effects(at, effects);
        self.send(at, Message::Beat { time_ns: now });
        self.drive(at);
    }
}
