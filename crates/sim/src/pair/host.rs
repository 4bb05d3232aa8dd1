//! One host: its disk, its core, and what it is to the volume.

use super::clock::Clock;
use super::link::{Asked, Message};
use super::neighbour::NEIGHBOURS;
use super::{LIMITS, Plan, What, World};
use crate::disk::Disk;
use crate::rng::{Rng, mix};
use crate::store::{Content, content};
use crate::trace::{Seen, fold};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Engine, EngineConfig, FormatOptions, format_device};
use tidepool_replica::wire::{Holds, Message as Plain};
use tidepool_replica::{OwnerDriver, Party, PeerDriver, Record, holds};

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
    Fetching { sequence: u64, through: u64, connection: u64, until: Nanos },
    /// It is the owner.
    Owner(Box<OwnerDriver>),
    /// It holds a copy, or may be asked to.
    Peer,
    /// It writes down that it listens to the old owner no more, to take over.
    Promising { before: Record, after: Record, control: u64 },
    /// It makes its copy stable.
    Stabilising { before: Record, after: Record, flush: RequestId },
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
            Run::Owner(driver) => format!("owner, {:?}", driver.owner().phase()),
            Run::Peer => "peer".into(),
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
        let figures = status
            .map(|s| (s.state, s.dirty_bytes, s.dirty_bytes_max, s.sequence, s.sequence_drained));
        let log = self.engine.as_ref().and_then(|engine| engine.log_status(VOLUME));
        format!("{}: {figures:?} {log:?}", self.run.name())
    }
}

/// The connection that a host believes to have.
#[derive(Default)]
pub(super) struct Link {
    /// Its number.
    pub(super) connection: Option<u64>,
    /// When something was last heard.
    pub(super) heard: Nanos,
    /// What has come over it and is not taken in, and whether that has to wait.
    pub(super) inbox: VecDeque<Message>,
    pub(super) stalled: bool,
}

/// What the drivers have under way in the core.
#[derive(Default)]
pub(super) struct Copies {
    /// Drivers of the peer's side by their connection: the last one, and those to which the core
    /// owes answers.
    pub(super) followers: BTreeMap<u64, PeerDriver>,
    /// Their requests.
    pub(super) asked: HashMap<RequestId, Asked>,
    /// Control operations that begin their copies, by their connection.
    pub(super) beginnings: HashMap<u64, u64>,
    /// Control operations that note who the peer is.
    pub(super) notes: HashSet<u64>,
}

/// What a host may do with the image.
#[derive(Default)]
pub(super) struct Standing {
    /// It knows that it is not the owner any more.
    pub(super) fenced: bool,
    /// Its clients are let in.
    pub(super) serves: bool,
    /// It is to serve although the image may have more than it: nothing that is clean in it counts.
    pub(super) is_behind: bool,
    /// The operation that takes the backend of a lost volume away.
    pub(super) detaching: Option<u64>,
    /// Generation of its client of the image.
    pub(super) generation: u64,
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
    pub(super) link: Link,
    pub(super) copies: Copies,
    pub(super) standing: Standing,
    next_id: u64,
    /// Records that it has fetched of its peer, on their way into the log.
    pub(super) records: HashMap<RequestId, (u64, Buf)>,
    /// Writes of its other volume.
    pub(super) neighbours: HashMap<RequestId, Buf>,
    /// How many there ever were.
    pub(super) neighbour_writes: u64,
    append_bytes: usize,
    /// Devices that it has had before this one.
    disks: u128,
    /// When the owner of its copy was last told that it is followed, or the process began.
    pub(super) followed_at: Nanos,
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
            link: Link::default(),
            copies: Copies::default(),
            standing: Standing::default(),
            next_id: OWN_REQUESTS,
            records: HashMap::new(),
            neighbours: HashMap::new(),
            neighbour_writes: 0,
            append_bytes: plan.append_bytes,
            disks: 0,
            followed_at: 0,
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
        if let Some(asked) = self.copies.asked.get(&id) {
            return asked.name;
        }
        match id {
            _ if self.neighbours.contains_key(&id) => fold(&(5, id)),
            _ => fold(&6),
        }
    }

    /// What a control operation is called when lives are compared.
    fn name_of_operation(&self, control: u64) -> u64 {
        match self.run {
            Run::Promising { control: promises, .. } if promises == control => fold(&7),
            Run::Attaching { control: attaches, .. } if attaches == control => fold(&8),
            _ if self.copies.beginnings.contains_key(&control) => fold(&9),
            _ if self.copies.notes.contains(&control) => fold(&12),
            _ if self.standing.detaching == Some(control) => fold(&10),
            _ => fold(&11),
        }
    }

    /// It is an owner that wants a peer now.
    pub(super) fn wants_peer(&self) -> bool {
        match (&self.run, &self.engine) {
            (Run::Owner(driver), Some(engine)) => driver.wants_peer_now(engine),
            _ => false,
        }
    }

    /// What it tells an owner that comes back.
    pub(super) fn copy(&self) -> Option<Holds> {
        holds(self.engine.as_ref()?, VOLUME, self.known()?.generation)
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
        self.link.connection = None;
        self.link.inbox.clear();
        self.copies = Copies::default();
        self.records.clear();
        self.neighbours.clear();
        (self.standing.fenced, self.standing.detaching, self.standing.serves) =
            (false, None, false);
        self.armed = 0;
    }
}

fn changes_image(op: &BackendOp) -> bool {
    matches!(
        op,
        BackendOp::Write { .. } | BackendOp::Discard { .. } | BackendOp::WriteZeroes { .. }
    )
}

/// Whose cache a party is.
pub(super) fn host_of(party: Party) -> usize {
    (party.cache % 2) as usize
}

fn new_disk(at: usize, plan: &Plan, rng: Rng) -> Disk {
    let (size_bytes, segment_bytes) = (plan.cache_bytes[at], plan.segment_bytes[at]);
    let mut disk = Disk::new(size_bytes, rng);
    let options =
        FormatOptions { uuid: [at as u8 + 1; 16], size_bytes, segment_bytes: Some(segment_bytes) };
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

    /// Lets a host do all that it can.
    pub(super) fn drive(&mut self, at: usize) {
        loop {
            while self.take_effects(at) {}
            if self.told.failure.is_some() || !self.look(at) {
                return;
            }
        }
    }

    /// Carries out what the core wants now, in an order that does not depend on that of the core;
    /// whether there was anything.
    fn take_effects(&mut self, at: usize) -> bool {
        let now = self.clock(at);
        let mut all = Vec::new();
        while let Some(effect) =
            self.hosts[at].engine.as_mut().and_then(|engine| engine.next_effect(now))
        {
            let seen = self.seen(at, &effect);
            self.trace.add(at, &seen);
            // What goes to the peer stays in its order.
            let order = if matches!(effect, Effect::Peer { .. }) { all.len() } else { usize::MAX };
            let identity = fold(&(at, seen.identity()));
            all.push((order, mix(self.draws.order, identity), identity, fold(&seen), effect));
        }
        all.sort_by_key(|&(order, shuffled, _, data, _)| (order, shuffled, data));
        let some = !all.is_empty();
        let life = self.hosts[at].life;
        for (_, _, identity, _, effect) in all {
            if self.told.failure.is_some() {
                return false;
            }
            if self.hosts[at].life != life {
                break;
            }
            let (name, rng) = self.draws.chance.named(identity);
            let before = (self.draws.effect, std::mem::replace(&mut self.draws.rng, rng));
            self.draws.effect = name;
            self.effect(at, effect);
            (self.draws.effect, self.draws.rng) = before;
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

    fn effect(&mut self, at: usize, effect: Effect) {
        let block = BLOCK_BYTES as u64;
        let host = &mut self.hosts[at];
        let engine = host.engine.as_ref().expect("it has an effect");
        let contents =
            |buf: Buf| engine.arena().bytes(buf).chunks_exact(BLOCK_BYTES).map(content).collect();
        let (token, transfer) = match effect {
            Effect::DeviceRead { token, offset, buf } => (token, Transfer::Read { offset, buf }),
            Effect::DeviceWrite { token, offset, buf, dsync } => {
                (token, Transfer::Write { offset, data: contents(buf), dsync })
            }
            Effect::DeviceSync { token } => {
                (token, Transfer::Sync { point: host.disk.sync_point() })
            }
            Effect::Backend { token, volume: NEIGHBOUR, op } => {
                let buf = if let BackendOp::Read { buf, .. } = op { Some(buf) } else { None };
                (token, Transfer::Neighbour { buf })
            }
            Effect::Backend { op, .. } if host.standing.fenced && changes_image(&op) => {
                return self.fail(format!(
                    "host {at} was told that it is not the owner, and sends {op:?}"
                ));
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
                    PeerOp::Stabilise { sequence } => Message::Plain(Plain::Flush { sequence }),
                    PeerOp::Block { block, crc } => {
                        Message::Plain(Plain::Block { block, crc, data_bytes: 0 })
                    }
                };
                return self.send(at, message);
            }
            Effect::Reply { id, result } => return self.reply(at, id, result),
            Effect::ControlDone { control, result } => {
                return self.control_done(at, control, result);
            }
        };
        let generation = host.standing.generation;
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
        if let Some(asked) = host.copies.asked.remove(&id) {
            return self.answered(at, &asked, result);
        }
        if let Some((_, buf)) = host.records.remove(&id) {
            host.engine().arena_mut().free(buf);
            if matches!(host.run, Run::Fetching { .. }) {
                host.run = Run::Waiting;
                if result == Err(RequestError::Invalid) {
                    // Another volume was promised the room meanwhile: it is tried again.
                    self.cover.hit("record without room");
                }
                self.decide(at);
            }
            return;
        }
        match host.run {
            Run::Stabilising { before, after, flush } if flush == id => match result {
                Ok(()) => self.ask(at, before, after),
                // What it has cannot be made stable: it may not take over.
                Err(_) => host.run = Run::Waiting,
            },
            _ => {}
        }
    }

    fn control_done(&mut self, at: usize, control: u64, result: Result<(), ControlError>) {
        if self.last_drain.control == Some((at, control)) {
            self.last_drain.control = None;
            // Another operation may be under way.
            self.last_drain.is_done = result.is_ok();
            return;
        }
        if control == NEIGHBOURS {
            let life = self.hosts[at].life;
            return self.after(0, What::Neighbour { at, life });
        }
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        if let Some(connection) = host.copies.beginnings.remove(&control) {
            // A former connection's copy may be begun by a newer one.
            let is_former = host.link.connection != Some(connection);
            match result {
                Ok(()) | Err(ControlError::NoRoom | ControlError::Device) => {}
                Err(ControlError::Busy) if is_former => {}
                Err(error) => return self.fail(format!("host {at} cannot begin a copy: {error}")),
            }
            let result = result.map_err(|error| error.to_string());
            self.drive_peer(at, connection, |driver, _, turns| driver.begun(result, turns));
            return;
        }
        if host.copies.notes.remove(&control) {
            self.drive_owner(at, |driver, _, _, turns| driver.noted(control, turns));
            return;
        }
        if host.standing.detaching == Some(control) {
            return self.has_let_go(at, result);
        }
        match host.run {
            Run::Promising { before, after, control: promises } if promises == control => {
                match result {
                    Ok(()) => {
                        let flush = host.fresh();
                        let request = Request {
                            id: flush,
                            volume: VOLUME,
                            op: Op::Flush,
                            offset: 0,
                            len: 0,
                            buf: None,
                        };
                        host.run = Run::Stabilising { before, after, flush };
                        host.engine().handle(now, Event::Request(request));
                    }
                    Err(_) => host.run = Run::Waiting,
                }
            }
            Run::Attaching { record, control: attaches } if attaches == control => {
                let driver =
                    OwnerDriver::new(host.engine(), VOLUME, record, LIMITS, self.plan.alone);
                host.run = Run::Owner(Box::new(driver));
                host.standing.is_behind = false;
                self.serve(at);
            }
            _ => {}
        }
    }

    /// A message arrives.
    pub(super) fn receive(&mut self, at: usize, message: Message) {
        let now = self.clock(at);
        self.hosts[at].link.heard = now;
        self.hosts[at].link.inbox.push_back(message);
        self.drive(at);
    }

    /// Of two hosts at most one takes reads, whatever their clocks show.
    pub(super) fn check_lease(&mut self, at: usize) {
        let host = &self.hosts[at];
        let taken = self.client.is_served_by(1 - at);
        if taken && host.standing.serves && !host.standing.fenced && self.is_leased(at) {
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
        self.beat_of_drivers(at);
        if self.is_owner_unawares(at) {
            self.disconnect(at);
            self.hosts[at].run = Run::Waiting;
        }
        if let Run::Fetching { until, connection, .. } = self.hosts[at].run
            && now > until
        {
            self.hosts[at].run = Run::Waiting;
            self.drive_peer(1 - at, connection, |driver, engine, _| driver.disconnected(engine));
        }
        if matches!(self.hosts[at].run, Run::Waiting) {
            self.decide(at);
        }
        self.drive(at);
    }
}
