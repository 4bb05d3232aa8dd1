//! The two hosts' drivers, what they say to each other, and what their hosts do for them.

use super::host::{Run, VOLUME};
use super::{LIMITS, World};
use crate::trace::fold;
use tidepool_engine::Engine;
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, crc32c, open};
use tidepool_replica::wire::{Message as Plain, Record as WireRecord};
use tidepool_replica::{
    Arrived, OwnerDriver, OwnerTurn, PeerDriver, PeerLost, PeerTurn, RecordAnswer, Submit,
};

/// What the hosts say to each other.
pub(super) enum Message {
    /// Something without data.
    Plain(Plain<'static>),
    Refused(String),
    Record {
        bytes: Vec<u8>,
        durable: bool,
    },
    Block {
        block: u64,
        crc: u32,
        data: Vec<u8>,
    },
}

/// A message as it is compared.
#[derive(Debug, Hash)]
pub(super) enum Told<'a> {
    Plain(&'a Plain<'static>),
    Refused(&'a str),
    Record { data: u32, durable: bool },
    Block { block: u64, crc: u32, data: u32 },
}

impl Message {
    pub(super) fn told(&self) -> Told<'_> {
        match self {
            Message::Plain(message) => Told::Plain(message),
            Message::Refused(why) => Told::Refused(why),
            Message::Record { bytes, durable } => {
                Told::Record { data: crc32c(bytes), durable: *durable }
            }
            Message::Block { block, crc, data } => {
                Told::Block { block: *block, crc: *crc, data: crc32c(data) }
            }
        }
    }

    /// As a driver hears it, with the block that comes with it. Records come another way.
    fn heard(&self) -> (Plain<'_>, &[u8]) {
        match self {
            Message::Plain(message) => (*message, &[]),
            Message::Refused(why) => (Plain::Refused(why), &[]),
            &Message::Block { block, crc, ref data } => {
                (Plain::Block { block, crc, data_bytes: data.len() as u32 }, data)
            }
            Message::Record { .. } => unreachable!("a record goes to the log"),
        }
    }
}

/// A request of a driver that the core has not answered.
pub(super) struct Asked {
    connection: u64,
    number: u32,
    /// What it is called when lives are compared.
    pub(super) name: u64,
}

impl World {
    /// Calls the owner's driver and takes its turns; `None` where there is none.
    pub(super) fn drive_owner<R>(
        &mut self,
        at: usize,
        call: impl FnOnce(&mut OwnerDriver, &mut Engine, Nanos, &mut Vec<OwnerTurn>) -> R,
    ) -> Option<R> {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let (Run::Owner(driver), Some(engine)) = (&mut host.run, &mut host.engine) else {
            return None;
        };
        let mut turns = Vec::new();
        let result = call(driver, engine, now, &mut turns);
        turns.into_iter().for_each(|turn| self.take_owner_turn(at, turn));
        Some(result)
    }

    fn take_owner_turn(&mut self, at: usize, turn: OwnerTurn) {
        match turn {
            OwnerTurn::Say(message) => {
                if matches!(message, Plain::Begin(_)) {
                    self.cover.hit("copy begun");
                }
                self.send(at, Message::Plain(message));
            }
            OwnerTurn::HangUp(why) => self.hang_up(at, &why),
            OwnerTurn::Note { cache } => {
                let now = self.clock(at);
                let host = &mut self.hosts[at];
                let noted = cache.to_be_bytes().to_vec();
                let known = host.known().is_some_and(|spec| spec.attachment == noted);
                let number = (!known).then(|| host.fresh());
                if let Some(number) = number {
                    host.copies.notes.insert(number);
                    host.engine().set_attachment(now, VOLUME, noted, number);
                }
                self.drive_owner(at, |driver, engine, now, turns| {
                    driver.notes(engine, now, number, turns)
                });
            }
            OwnerTurn::Write { before, after } => self.send_change(at, before, after),
            OwnerTurn::Parts => {
                self.cover.hit("peer left");
                let host = &self.hosts[at];
                let log = host.engine.as_ref().and_then(|engine| engine.log_status(VOLUME));
                // An owner that has not noticed yet goes on acknowledging what its log has.
                self.fate.drained_at_leave =
                    log.is_some_and(|log| log.failed && log.drained >= log.acknowledged);
            }
            OwnerTurn::Close => {
                self.cover.hit("owner closed");
                self.hosts[at].standing.fenced = true;
                self.let_go(at);
            }
        }
    }

    /// Calls the driver of a connection at the peer's side and takes its turns; whether the core
    /// was given something.
    pub(super) fn drive_peer(
        &mut self,
        at: usize,
        connection: u64,
        call: impl FnOnce(&mut PeerDriver, &mut Engine, &mut Vec<PeerTurn>),
    ) -> bool {
        let mut turns = Vec::new();
        let host = &mut self.hosts[at];
        let (Some(driver), Some(engine)) =
            (host.copies.followers.get_mut(&connection), &mut host.engine)
        else {
            return false;
        };
        call(driver, engine, &mut turns);
        let mut is_given = self.take_peer_turns(at, connection, &mut turns);
        let host = &mut self.hosts[at];
        if let (Some(driver), Some(engine)) =
            (host.copies.followers.get_mut(&connection), &mut host.engine)
        {
            driver.read(0, &mut |bytes| engine.arena_mut().alloc(bytes), &mut turns);
            is_given |= self.take_peer_turns(at, connection, &mut turns);
        }
        let over = |driver: &PeerDriver| !driver.is_connected() && driver.is_idle();
        if self.hosts[at].copies.followers.get(&connection).is_some_and(over) {
            self.hosts[at].copies.followers.remove(&connection);
        }
        is_given
    }

    fn take_peer_turns(&mut self, at: usize, connection: u64, turns: &mut Vec<PeerTurn>) -> bool {
        let is_given = turns.iter().any(|turn| matches!(turn, PeerTurn::Submit(_)));
        turns.drain(..).for_each(|turn| self.take_peer_turn(at, connection, turn));
        is_given
    }

    fn take_peer_turn(&mut self, at: usize, connection: u64, turn: PeerTurn) {
        let now = self.clock(at);
        let is_connected = self.hosts[at].link.connection == Some(connection);
        let message = match turn {
            PeerTurn::Say(message) => Message::Plain(message),
            PeerTurn::Echo { time_ns } => {
                self.hosts[at].followed_at = now;
                Message::Plain(Plain::Beat { time_ns })
            }
            PeerTurn::Refuse(why) if !is_connected => {
                return self.fetched(at, connection, Err(why));
            }
            PeerTurn::Refuse(why) => {
                self.cover.hit("copy refused");
                Message::Refused(why)
            }
            PeerTurn::SayRecord(buf) => {
                let bytes = self.hosts[at].engine().arena().bytes(buf);
                let (_, data) = WireRecord::with_data(bytes).expect("the driver has looked at it");
                let record = bytes[..BLOCK_BYTES + data.len()].to_vec();
                return self.fetched(at, connection, Ok(record));
            }
            PeerTurn::SayBlock { block, crc, buf } => {
                let data = self.hosts[at].engine().arena().bytes(buf).to_vec();
                Message::Block { block, crc, data }
            }
            PeerTurn::Begin(begin) => return self.begin(at, connection, begin),
            PeerTurn::Submit(submit) => return self.submit(at, connection, submit),
            PeerTurn::Unfit { sequence } => {
                return self.fail(format!("host {at} cannot take record {sequence} of its owner"));
            }
            PeerTurn::Free(buf) => return self.hosts[at].engine().arena_mut().free(buf),
            PeerTurn::HangUp(why) => return self.hang_up(at, &why),
        };
        if is_connected {
            self.send(at, message);
        }
    }

    fn submit(&mut self, at: usize, connection: u64, submit: Submit) {
        let Submit { number, volume, op, offset, len, buf } = submit;
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let name = match (op, buf) {
            (Op::Record { .. }, Some(buf)) => {
                let bytes = &host.engine().arena().bytes(buf)[..BLOCK_BYTES];
                let header = open::<RecordHeader>(bytes).expect("nothing is damaged on the way");
                fold(&(2, header.sequence.get()))
            }
            (Op::Block { crc }, _) => fold(&(3, offset, crc)),
            (Op::Fetch { sequence }, _) => fold(&(4, sequence)),
            _ => fold(&6),
        };
        let id = host.fresh();
        host.copies.asked.insert(id, Asked { connection, number, name });
        host.engine().handle(now, Event::Request(Request { id, volume, op, offset, len, buf }));
    }

    /// The core has answered a request of a driver.
    pub(super) fn answered(&mut self, at: usize, asked: &Asked, result: Result<(), RequestError>) {
        self.drive_peer(at, asked.connection, |driver, engine, turns| {
            driver.answered(engine.arena(), asked.number, result, turns);
        });
    }

    fn begin(&mut self, at: usize, connection: u64, begin: Begin) {
        let spec = VolumeSpec { size_bytes: begin.size_bytes, ..self.plan.spec(begin.generation) };
        let host = &mut self.hosts[at];
        let control = host.fresh();
        host.copies.beginnings.insert(control, connection);
        if host.known().is_some() {
            host.engine().begin_replica(VOLUME, begin, control);
            return;
        }
        match host.engine().add_replica(spec, begin.base, begin.room, control) {
            Ok(id) => {
                assert_eq!(id, VOLUME);
                self.drive_peer(at, connection, |driver, _, _| driver.is_volume(id));
            }
            Err(error) => {
                host.copies.beginnings.remove(&control);
                self.drive_peer(at, connection, |driver, _, turns| {
                    driver.begun(Err(error.to_string()), turns)
                });
            }
        }
    }

    /// Takes in what has come; whether there was anything.
    pub(super) fn listen(&mut self, at: usize) -> bool {
        let mut given = false;
        loop {
            let host = &mut self.hosts[at];
            host.link.stalled = false;
            let (Some(connection), Some(message)) = (host.link.connection, host.link.inbox.front())
            else {
                return given;
            };
            if let (Message::Record { bytes, durable }, Run::Peer) = (message, &host.run) {
                let Some(driver) = host.copies.followers.get_mut(&connection) else { return given };
                let engine = host.engine.as_mut().expect("it is connected");
                let may = match driver.may_take_record() {
                    Ok(may) => may,
                    Err(why) => {
                        self.drive_peer(at, connection, |driver, engine, turns| {
                            driver.hang_up(engine, why, turns);
                        });
                        return given;
                    }
                };
                let Some(buf) = may.then(|| engine.arena_mut().alloc(bytes.len())).flatten() else {
                    host.link.stalled = true;
                    return given;
                };
                engine.arena_mut().bytes_mut(buf).copy_from_slice(bytes);
                let header = open::<RecordHeader>(&bytes[..BLOCK_BYTES])
                    .expect("nothing is damaged on the way");
                let (sequence, generation) = (header.sequence.get(), header.generation.get());
                let arrived = Arrived { sequence, generation, durable: *durable, buf };
                host.link.inbox.pop_front();
                self.drive_peer(at, connection, |driver, engine, turns| {
                    driver.record(engine, arrived, turns)
                });
            } else {
                let message = host.link.inbox.pop_front().expect("looked at just now");
                self.hear(at, connection, &message);
            }
            given = true;
        }
    }

    fn hear(&mut self, at: usize, connection: u64, message: &Message) {
        match &self.hosts[at].run {
            Run::Owner(_) => {
                let (plain, data) = message.heard();
                if let Plain::Block { data_bytes, .. } = plain {
                    self.block_comes(at, data_bytes > 0);
                }
                self.drive_owner(at, |driver, engine, now, turns| {
                    driver.hear(engine, now, (&plain, data), turns);
                });
            }
            Run::Peer => {
                let (plain, _) = message.heard();
                self.drive_peer(at, connection, |driver, engine, turns| {
                    driver.hear(engine, &plain, turns)
                });
            }
            _ => {}
        }
    }

    /// Lets the drivers look at the core, and at what has come; whether the core has to be driven
    /// again.
    pub(super) fn look(&mut self, at: usize) -> bool {
        if self.hosts[at].engine.is_none() {
            return false;
        }
        let given = self.listen(at);
        let moved = match (&self.hosts[at].run, self.hosts[at].link.connection) {
            (Run::Owner(_), _) => self.drive_owner(at, OwnerDriver::look) == Some(true),
            (Run::Peer, Some(connection)) => {
                self.drive_peer(at, connection, |driver, engine, turns| driver.look(engine, turns))
            }
            _ => false,
        };
        given || moved
    }

    /// The drivers' part of a beat.
    pub(super) fn beat_of_drivers(&mut self, at: usize) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        if host.link.stalled {
            // What the other one says waits here.
            host.link.heard = now;
        }
        let heard = host.link.heard;
        match (&host.run, host.link.connection) {
            (Run::Owner(_), _) => {
                self.drive_owner(at, |driver, engine, now, turns| {
                    driver.beat(engine, now, heard, turns)
                });
            }
            (Run::Peer, Some(connection)) => {
                let times = (now, heard, LIMITS.silence_ns);
                self.drive_peer(at, connection, |driver, engine, turns| {
                    driver.beat(engine, times, turns)
                });
            }
            _ => {}
        }
    }

    /// A host gives its connection up.
    fn hang_up(&mut self, at: usize, why: &PeerLost) {
        match why {
            PeerLost::Loss => self.cover.hit("copy parted with for a loss"),
            PeerLost::NoRoom | PeerLost::MakesNoRoom => {
                self.cover.hit("copy without room given up")
            }
            PeerLost::ConfirmsNothing => self.cover.hit("copy that confirms nothing given up"),
            PeerLost::StabilisesNothing => self.cover.hit("copy that becomes not stable given up"),
            PeerLost::EchoesLate => self.cover.hit("late echo"),
            PeerLost::TooLittleRoom => self.cover.hit("peer without room"),
            PeerLost::Refused(_) => self.cover.hit("refused by the peer"),
            PeerLost::Unexpected | PeerLost::NotNext | PeerLost::UntimelyRecord => {
                self.fail(format!(
                    "host {at} hears of its other one what that should not say: {why}"
                ));
            }
            _ => {}
        }
        self.disconnect(at);
    }

    /// The connection of a host has ended.
    pub(super) fn disconnect(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let Some(connection) = host.link.connection.take() else { return };
        host.link.inbox.clear();
        self.note("hang up", at as u64, 0, 0);
        self.drive_owner(at, OwnerDriver::disconnected);
        self.drive_peer(at, connection, |driver, engine, _| driver.disconnected(engine));
    }

    /// Ends what is left of former connections to a host: its owner connects again.
    pub(super) fn end_other_connections(&mut self, at: usize) {
        self.disconnect(at);
        let others: Vec<u64> = self.hosts[at].copies.followers.keys().copied().collect();
        for connection in others {
            self.drive_peer(at, connection, |driver, engine, _| driver.disconnected(engine));
        }
    }

    /// Gives up the connection over which records of a copy come, before it becomes this host's
    /// own.
    pub(super) fn end_following(&mut self, at: usize) {
        if let Some(connection) = self.hosts[at].link.connection {
            self.drive_peer(at, connection, |driver, engine, turns| {
                driver.hang_up(engine, PeerLost::TakenOver, turns);
            });
        }
    }

    /// An owner and a peer that can hear each other get connected, if the peer finds the owner in
    /// the record.
    pub(super) fn connected(&mut self, at: usize, connection: u64) {
        let (record, peer) = (self.ceph.record(), 1 - at);
        let Run::Owner(driver) = &self.hosts[at].run else { return };
        let is_owner = record.owner.cache == self.hosts[at].party().cache
            && record.generation == driver.owner().record().generation;
        if !is_owner || !self.witness_reachable(peer) {
            return;
        }
        self.end_other_connections(peer);
        for host in &mut self.hosts {
            host.link.connection = Some(connection);
            host.link.heard = host.clock.read(self.now);
            host.link.inbox.clear();
        }
        let host = &mut self.hosts[peer];
        let (me, known) = (host.party(), host.known().map(|spec| (VOLUME, spec.generation)));
        let (driver, room, _) = PeerDriver::new(host.engine(), known, me, &record);
        host.copies.followers.insert(connection, driver);
        let up = self.drive_owner(at, |driver, engine, now, turns| {
            driver.connect(engine, now, (me, room), turns)
        });
        if up == Some(false) {
            self.disconnect(peer);
        }
        self.drive(at);
    }

    /// The witness has answered an owner: what it asked for stands there, or something else; `None`
    /// if the answer is lost.
    pub(super) fn record_answered(&mut self, at: usize, stands: Option<bool>) {
        let answer = match stands {
            Some(true) => RecordAnswer::Written,
            Some(false) => RecordAnswer::Fenced,
            None => RecordAnswer::Unknown,
        };
        let known = self.drive_owner(at, |driver, engine, now, turns| {
            driver.record_answered(engine, now, answer, turns)
        });
        if known.flatten() == Some(false) {
            self.cover.hit("record tried again");
        }
    }
}
