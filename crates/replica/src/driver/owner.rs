//! The owner's side: what its peer is told, when it is parted with, and when the ownership record
//! changes.

use super::lost::PeerLost;
use crate::api::{Copies, Party, Record};
use crate::limits::Limits;
use crate::owner::{Effect, Event, Owner, Phase};
use crate::session::OwnerSession;
use crate::wire::Message;
use tidepool_engine::Engine;
use tidepool_engine::api::{Degraded, Nanos, Room, VolumeId};

/// What an owner's host is to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnerTurn {
    /// Send this to the peer.
    Say(Message<'static>),
    /// End the connection to the peer. The driver knows already.
    HangUp(PeerLost),
    /// Note on the cache device that the host with this cache has the copy, and tell
    /// [`OwnerDriver::notes`].
    Note {
        /// Uuid of its cache.
        cache: u128,
    },
    /// Change the ownership record, if it still is `before`, and tell
    /// [`OwnerDriver::record_answered`].
    Write {
        /// What stands there.
        before: Record,
        /// What is to stand there.
        after: Record,
    },
    /// The peer is gone: what two logs had becomes stable in one. The core does that by itself.
    Parts,
    /// Another host has the volume: let no client in, and take the backend away.
    Close,
}

/// How the change of an ownership record has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordAnswer {
    /// It says what it should.
    Written,
    /// Nothing was changed: such a record cannot be had.
    Impossible,
    /// Another host has the image.
    Fenced,
    /// It was changed, or was not.
    Unknown,
}

/// The owner's side of one volume.
#[derive(Debug)]
pub struct OwnerDriver {
    volume: VolumeId,
    session: OwnerSession,
    limits: Limits,
    connected: bool,
    /// No copy is wanted for now: the volume is to be changed in a way that none can follow.
    alone: bool,
    /// The volume is about to become another host's: its record is not changed from here.
    handing_over: bool,
    /// What the record is being changed from and to.
    writing: Option<(Record, Record)>,
    /// The host was asked for that change, and has not answered.
    in_flight: bool,
    retry_at: Option<Nanos>,
    /// The number under which the peer is being noted: the record does not name it before.
    noting: Option<u64>,
    /// Reused.
    effects: Vec<Effect>,
}

impl OwnerDriver {
    /// A volume that is served alone, as its record says. `alone` is what write-back does while
    /// there is no second copy; the core has been told so.
    ///
    /// # Panics
    /// If the core has no such volume, or the record names a copy.
    pub fn new(
        engine: &Engine,
        volume: VolumeId,
        record: Record,
        limits: Limits,
        alone: Degraded,
    ) -> OwnerDriver {
        OwnerDriver {
            volume,
            session: OwnerSession::new(engine, volume, record, limits, alone),
            limits,
            connected: false,
            alone: false,
            handing_over: false,
            writing: None,
            in_flight: false,
            retry_at: None,
            noting: None,
            effects: Vec::new(),
        }
    }

    /// The machine.
    pub fn owner(&self) -> &Owner {
        self.session.owner()
    }

    /// A peer is connected.
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// A change of the record is on its way to the backend.
    pub fn changes_record(&self) -> bool {
        self.in_flight
    }

    /// Another host has the volume.
    pub fn is_lost(&self) -> bool {
        self.owner().phase() == Phase::Lost
    }

    /// Whatever is acknowledged is in both logs, and the record says so.
    pub fn is_in_sync(&self) -> bool {
        let owner = self.owner();
        matches!(owner.phase(), Phase::Sync { peer } if owner.record().copies == Copies::Sync(peer))
    }

    /// Something is to be looked at when time passes.
    pub fn needs_time(&self) -> bool {
        self.connected || self.writing.is_some()
    }

    /// A peer would be of use, as far as the core agrees.
    pub fn wants_peer(&self) -> bool {
        !self.connected && !self.alone && self.session.wants_peer()
    }

    /// A peer would be of use now.
    pub fn wants_peer_now(&self, engine: &Engine) -> bool {
        self.wants_peer() && engine.may_pair(self.volume) && engine.is_write_back(self.volume)
    }

    /// What write-back does now.
    pub fn degraded(&self) -> Degraded {
        self.session.degraded()
    }

    /// What write-back does from now on while there is no second copy.
    pub fn set_alone(&mut self, engine: &mut Engine, now: Nanos, alone: Degraded) {
        self.session.set_alone(engine, now, alone);
    }

    /// Until when reads are taken; `None` is for ever.
    pub fn leased_until(&self) -> Option<Nanos> {
        self.session.leased_until()
    }

    /// A peer with so much room is connected. False if that is too little for a copy; then the
    /// connection is given up.
    pub fn connect(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        peer: (Party, Room),
        out: &mut Vec<OwnerTurn>,
    ) -> bool {
        self.connected = true;
        let mut effects = std::mem::take(&mut self.effects);
        let up = self.session.peer_up(engine, now, peer, &mut effects);
        self.act(engine, now, effects, out);
        if up {
            // Reads wait for its answer as soon as the record may name the peer, which knows the
            // volume by what was said before.
            self.session.beats(now);
            out.push(OwnerTurn::Say(Message::Beat { time_ns: now }));
        } else {
            self.hang_up(engine, now, PeerLost::TooLittleRoom, out);
        }
        up
    }

    /// The connection to the peer has ended. Does nothing if the driver has given it up.
    pub fn disconnected(&mut self, engine: &mut Engine, now: Nanos, out: &mut Vec<OwnerTurn>) {
        if std::mem::take(&mut self.connected) {
            self.tell(engine, now, Event::PeerDown, out);
            self.give_up_note(engine, now, out);
        }
    }

    /// Gives the connection to the peer up, if there is one.
    pub fn hang_up(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        why: PeerLost,
        out: &mut Vec<OwnerTurn>,
    ) {
        if self.connected {
            out.push(OwnerTurn::HangUp(why));
            self.disconnected(engine, now, out);
        }
    }

    /// Lets the machine look at the core; whether it has moved, and the core has to be looked at
    /// again.
    pub fn look(&mut self, engine: &mut Engine, now: Nanos, out: &mut Vec<OwnerTurn>) -> bool {
        let before = self.owner().phase();
        let mut effects = std::mem::take(&mut self.effects);
        self.session.look(engine, now, &mut effects);
        let has_moved = self.owner().phase() != before;
        self.act(engine, now, effects, out);
        has_moved
    }

    /// The peer has said this. `data` is the block that came with it.
    pub fn hear(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        (message, data): (&Message<'_>, &[u8]),
        out: &mut Vec<OwnerTurn>,
    ) {
        let is_due = match *message {
            Message::Beat { time_ns: 0 } => true,
            Message::Beat { time_ns } => self.session.followed(time_ns),
            Message::Begun { generation, .. } => {
                if self.owner().record().generation == generation {
                    self.tell(engine, now, Event::Begun, out);
                }
                true
            }
            Message::Have(have) => {
                let mut effects = std::mem::take(&mut self.effects);
                let is_due = self.session.has(engine, now, have, &mut effects);
                self.act(engine, now, effects, out);
                is_due
            }
            Message::Block { block, crc, data_bytes } => {
                engine.peer_block(now, self.volume, block, crc, (data_bytes > 0).then_some(data));
                true
            }
            Message::Refused(why) => {
                return self.hang_up(engine, now, PeerLost::Refused(why.to_owned()), out);
            }
            _ => false,
        };
        if !is_due {
            self.hang_up(engine, now, PeerLost::Unexpected, out);
        }
    }

    /// It is time for a beat. The peer was last heard at `heard_at`.
    pub fn beat(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        heard_at: Nanos,
        out: &mut Vec<OwnerTurn>,
    ) {
        if self.connected {
            self.session.beats(now);
            out.push(OwnerTurn::Say(Message::Beat { time_ns: now }));
            if now > heard_at + self.limits.silence_ns {
                self.hang_up(engine, now, PeerLost::Silent, out);
            }
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.write(out);
        } else if self.connected {
            match self.session.parts_because(engine, now) {
                Some(why) => self.hang_up(engine, now, why, out),
                // Every time: what comes before the records that it is about does nothing.
                None => self.say_floor(engine, out),
            }
        }
    }

    /// Tells the peer how far the image is.
    pub fn say_floor(&self, engine: &Engine, out: &mut Vec<OwnerTurn>) {
        if self.connected && !self.owner().is_deaf() {
            out.push(OwnerTurn::Say(Message::Drained { floor: self.session.drained(engine) }));
        }
    }

    /// Ends the second copy until [`OwnerDriver::pair_again`].
    ///
    /// # Errors
    /// Only that copy counts, because the cache device has failed here.
    pub fn part(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        out: &mut Vec<OwnerTurn>,
    ) -> Result<(), PeerCopyNeeded> {
        self.look(engine, now, out);
        let phase = self.owner().phase();
        let counts =
            matches!(phase, Phase::Joining { .. } | Phase::Sync { .. } | Phase::Conceding { .. });
        if counts && engine.log_status(self.volume).is_some_and(|log| log.failed) {
            return Err(PeerCopyNeeded);
        }
        self.alone = true;
        self.hang_up(engine, now, PeerLost::VolumeChanges, out);
        self.look(engine, now, out);
        Ok(())
    }

    /// A second copy is wanted again.
    pub fn pair_again(&mut self) {
        self.alone = false;
    }

    /// The volume is about to become another host's.
    pub fn hand_over(&mut self) {
        self.handing_over = true;
    }

    /// It stays after all.
    pub fn keep(&mut self, out: &mut Vec<OwnerTurn>) {
        self.handing_over = false;
        self.write(out);
    }

    /// The host notes under this number who the peer is; `None` if that is noted already.
    pub fn notes(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        number: Option<u64>,
        out: &mut Vec<OwnerTurn>,
    ) {
        self.noting = number.or(self.noting);
        self.write(out);
        if !self.connected {
            self.give_up_note(engine, now, out);
        }
    }

    /// What was to be noted under this number is on stable media: the record may name the peer.
    pub fn noted(&mut self, number: u64, out: &mut Vec<OwnerTurn>) {
        if self.noting == Some(number) {
            self.noting = None;
            self.write(out);
        }
    }

    /// The host has answered a change of the record. False if that is to be tried again; `None` if
    /// nobody waits for it any more.
    pub fn record_answered(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        answer: RecordAnswer,
        out: &mut Vec<OwnerTurn>,
    ) -> Option<bool> {
        self.in_flight = false;
        let (before, _) = self.writing?;
        let event = match answer {
            RecordAnswer::Written => Event::Written,
            // The copy counts for nothing.
            RecordAnswer::Impossible if before.copies == Copies::Solo => {
                self.hang_up(engine, now, PeerLost::Unnameable, out);
                Event::Found(before)
            }
            RecordAnswer::Fenced => {
                let nobody = Party { cache: 0, boot: 0 };
                Event::Found(before.taken_by(nobody))
            }
            // Until that is known nothing else is done.
            RecordAnswer::Impossible | RecordAnswer::Unknown => {
                self.retry_at = Some(now + self.limits.record_retry_ns);
                return Some(false);
            }
        };
        self.writing = None;
        self.tell(engine, now, event, out);
        Some(true)
    }

    fn tell(&mut self, engine: &mut Engine, now: Nanos, event: Event, out: &mut Vec<OwnerTurn>) {
        let mut effects = std::mem::take(&mut self.effects);
        self.session.take(engine, now, event, &mut effects);
        self.act(engine, now, effects, out);
    }

    /// Does what the machine wants, and keeps the memory of `effects`.
    fn act(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        mut effects: Vec<Effect>,
        out: &mut Vec<OwnerTurn>,
    ) {
        for effect in effects.drain(..) {
            match effect {
                Effect::Begin { generation, base } => {
                    let begin = self.session.begin(engine, generation, base);
                    out.push(OwnerTurn::Say(Message::Begin(begin)));
                }
                Effect::Stabilise => out.push(OwnerTurn::Parts),
                Effect::Write { before, after } => {
                    self.writing = Some((before, after));
                    match after.peer() {
                        // Not before: until its copy counts, what is here is kept for the host
                        // whose copy did.
                        Some(peer) => out.push(OwnerTurn::Note { cache: peer.cache }),
                        None => self.write(out),
                    }
                }
                Effect::Close => {
                    // What is on its way may arrive or not: it is another's record.
                    (self.writing, self.retry_at) = (None, None);
                    out.push(OwnerTurn::Close);
                    engine.fence(self.volume);
                    self.hang_up(engine, now, PeerLost::AnotherOwner, out);
                }
            }
        }
        self.effects = effects;
    }

    /// Has the host change the record, unless something is to happen first.
    fn write(&mut self, out: &mut Vec<OwnerTurn>) {
        let waits = self.handing_over || self.in_flight;
        let Some((before, after)) = self.writing.filter(|_| !waits) else { return };
        if self.noting.is_some() && after.peer().is_some() {
            return;
        }
        (self.retry_at, self.in_flight) = (None, true);
        out.push(OwnerTurn::Write { before, after });
    }

    /// The host is gone that was to be noted before the record names it. The host was asked for
    /// nothing yet, and the guest need not wait for a checkpoint.
    fn give_up_note(&mut self, engine: &mut Engine, now: Nanos, out: &mut Vec<OwnerTurn>) {
        let (Some(_), Some((before, _))) = (self.noting, self.writing) else { return };
        if self.in_flight || !matches!(self.owner().phase(), Phase::Joining { down: true, .. }) {
            return;
        }
        // The note itself goes on: the next record that names a host waits for it.
        self.writing = None;
        self.tell(engine, now, Event::Found(before), out);
    }
}

/// The copy of the peer is the only one that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCopyNeeded;
