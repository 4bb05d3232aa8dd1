//! One NBD client. What it sends becomes requests to the core (`requests.rs`), what the core
//! answers becomes replies (`answer.rs`).

use super::inbox::Inbox;
use super::outbox::Outbox;
use super::places::Place;
use super::requests::{Asked, Piece};
use crate::shard::core::Core;
use crate::shard::front::budget::Held;
use crate::shard::front::effort;
use crate::shard::front::guests::EXPECTED;
use crate::shard::io::volume::Offer;
use crate::shard::limits::{
    ANSWERS_BYTES_MAX, HANDSHAKE_NS_MAX, PIECES_MAX, REQUESTS_MAX, VOLUME_WAIT_NS_MAX,
};
use crate::shard::shared::Shared;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tidepool_driver::Ring;
use tidepool_engine::api::{BLOCK_BYTES, Nanos, VolumeId};
use tidepool_engine::mem::{Buf, Slab};
use tidepool_nbd::{Command, Handshake, Refusal, Session, Step};

/// What the next bytes from the client are.
pub(super) enum State {
    Handshake(Box<Handshake>),
    Header,
    /// The next piece of this request.
    Issue {
        request: u32,
    },
    /// Payload of a write.
    Payload {
        request: u32,
        buf: Buf,
        offset: u64,
        len: u32,
        filled: u32,
    },
    /// Payload of a request that was refused.
    Skip {
        refusal: Refusal,
        left: u32,
    },
    /// Its volume is not served yet: the connection goes to the control plane, see
    /// [`Connection::is_leaving`].
    Leaving,
    /// Nothing is read any more; what is under way is finished.
    Ended,
}

/// Why a client is not read any further for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::shard) enum Stall {
    /// No memory.
    Memory,
    /// An unaligned write has the volume for itself.
    Gate,
    /// Another host may own the volume.
    Lease,
    /// The volume is on its way.
    Volume,
    /// Too much is being trimmed or zeroed.
    Ranges,
    /// Too many requests under way, or too many replies unsent.
    Own,
}

/// When the reactor looks at a connection.
#[derive(Default)]
pub(in crate::shard) struct Turn {
    /// In the reactor's list of connections to look at.
    pub(in crate::shard) listed: bool,
    /// It has had its turn in this round, and has more to do.
    pub(in crate::shard) served: bool,
    /// What it has sent was put off to another round.
    pub(in crate::shard) deferred: bool,
    /// In one of the reactor's queues of connections that wait for something.
    pub(in crate::shard) waiting: bool,
    /// There is something to parse.
    pub(in crate::shard) wake: bool,
}

/// How far a connection has ended.
#[derive(Default)]
struct Ending {
    /// It is neither read nor written any more. It goes when the kernel and the core have let go of
    /// it.
    broken: bool,
    /// The shard is shutting down: what comes is not looked at.
    deaf: bool,
    /// The client has closed its side behind a good-bye: everything before that is done.
    said_goodbye: bool,
    /// The client takes no replies any more: they are dropped.
    muted: bool,
}

pub(in crate::shard) struct Connection {
    /// Its place in the reactor's table.
    pub(in crate::shard) slot: u32,
    pub(in crate::shard) fd: OwnedFd,
    pub(in crate::shard) peer: String,
    /// The only export that its listener offers.
    only: Option<Arc<str>>,
    /// What it has of the places for connections.
    pub(in crate::shard) place: Place,
    /// When it came.
    pub(super) since: Nanos,
    pub(in crate::shard) volume: Option<VolumeId>,
    pub(super) session: Option<Session>,
    pub(super) state: State,
    pub(in crate::shard) stall: Option<Stall>,
    pub(super) inbox: Inbox,
    pub(in crate::shard) outbox: Outbox,
    pub(super) requests: Slab<Asked>,
    pub(super) pieces: Slab<Piece>,
    pub(super) held: Held,
    ending: Ending,
    pub(in crate::shard) handshake_deadline: Option<Nanos>,
    /// It has asked for a volume that is on its way, and waits until then at the latest.
    pub(in crate::shard) waits_until: Option<Nanos>,
    pub(in crate::shard) turn: Turn,
}

impl Connection {
    pub(in crate::shard) fn new(
        fd: OwnedFd,
        peer: String,
        only: Option<Arc<str>>,
        place: Place,
        now: Nanos,
    ) -> Connection {
        let mut outbox = Outbox::new();
        let handshake = Handshake::new(outbox.greeting());
        Connection {
            slot: u32::MAX,
            fd,
            peer,
            only,
            place,
            since: now,
            volume: None,
            session: None,
            state: State::Handshake(Box::new(handshake)),
            stall: None,
            inbox: Inbox::new(),
            outbox,
            requests: Slab::new(REQUESTS_MAX),
            pieces: Slab::new(PIECES_MAX),
            held: Held::default(),
            ending: Ending::default(),
            handshake_deadline: Some(now + HANDSHAKE_NS_MAX),
            waits_until: None,
            turn: Turn::default(),
        }
    }

    pub(in crate::shard) fn structured(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.structured)
    }

    pub(in crate::shard) fn broken(&self) -> bool {
        self.ending.broken
    }

    /// It shakes hands, and what is missing is the client's to say.
    pub(in crate::shard) fn has_said_too_little(&self) -> bool {
        self.handshake_deadline.is_some() && self.waits_until.is_none() && !self.ending.broken
    }

    /// Reads no more; what is under way is finished and answered.
    pub(in crate::shard) fn end(&mut self) {
        if matches!(self.state, State::Payload { .. }) {
            self.break_off();
        } else {
            self.state = State::Ended;
        }
    }

    /// Whose part of a round its work counts for.
    pub(in crate::shard) fn volume(&self) -> Option<VolumeId> {
        self.volume
    }

    /// Its volume is not served here yet, and the kernel works on neither direction: it can be
    /// passed on.
    pub(in crate::shard) fn is_leaving(&self) -> bool {
        let is_there = !self.ending.broken && !self.ending.muted;
        matches!(self.state, State::Leaving)
            && is_there
            && self.outbox.is_empty()
            && self.is_quiet()
    }

    /// What the handshake has come to, and what was received behind it, if it is leaving.
    pub(in crate::shard) fn take_guest(&mut self) -> Option<(Session, Vec<u8>)> {
        let unread = self.inbox.unread().to_vec();
        self.session
            .take()
            .filter(|_| matches!(self.state, State::Leaving))
            .map(|session| (session, unread))
    }

    /// A client whose handshake was elsewhere: its volume is served here, and some of its requests
    /// have come already.
    pub(in crate::shard) fn welcome<C: Core>(
        &mut self,
        session: Session,
        unread: &[u8],
        shared: &mut Shared<C>,
    ) {
        self.outbox.greeting().clear();
        self.inbox.put(unread);
        self.enter(session, shared);
        // It may have left while it waited elsewhere; see [`Connection::process`].
        self.stall = Some(Stall::Volume);
        self.turn.wake = true;
    }

    /// Looks at nothing more that comes; what is in the core is answered.
    pub(in crate::shard) fn stop_reading(&mut self) {
        self.ending.deaf = true;
    }

    /// Gives the client up.
    pub(in crate::shard) fn break_off(&mut self) {
        self.ending.broken = true;
        // Operations in flight end now; an error means that the client is gone already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// The kernel works on neither direction.
    pub(in crate::shard) fn is_quiet(&self) -> bool {
        !self.inbox.in_flight() && !self.outbox.in_flight()
    }

    /// Nothing is left to do, and nobody uses its memory.
    pub(in crate::shard) fn is_over(&self) -> bool {
        let ended = matches!(self.state, State::Ended) && self.outbox.is_empty();
        (self.ending.broken || ended) && self.is_quiet() && self.pieces.iter().all(|(_, p)| p.done)
    }

    /// Frees what it holds; for a connection that is over.
    pub(in crate::shard) fn dismantle<C: Core>(&mut self, shared: &mut Shared<C>) {
        self.outbox.clear(shared, &mut self.held);
        if let State::Payload { buf, .. } = std::mem::replace(&mut self.state, State::Ended) {
            shared.free(&mut self.held, buf);
        }
        let slots: Vec<u32> = self.pieces.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if let Some(buf) = self.pieces.remove(slot).buf {
                shared.free(&mut self.held, buf);
            }
        }
        assert!(self.held.is_zero(), "a connection that is over holds no memory");
        shared.leave(&mut self.held);
        shared.places.give(&mut self.place);
        if let Some(volume) = self.volume.take().and_then(|id| shared.volumes.get_mut(id)) {
            volume.connections -= 1;
        }
    }

    /// Sends what the socket takes, and starts what has to wait: one receive, one send.
    pub(in crate::shard) fn arm<C: Core>(
        &mut self,
        ring: &mut Ring,
        shared: &mut Shared<C>,
        receive: u64,
        send: u64,
    ) {
        if self.ending.broken {
            return;
        }
        if !self.outbox.is_empty() && !self.outbox.in_flight() {
            if self.ending.muted || !self.outbox.send_now(self.fd.as_fd(), shared, &mut self.held) {
                self.mute(shared);
            }
            self.turn.wake |= self.stall == Some(Stall::Own);
        }
        let arena = shared.core.arena().as_ptr();
        if let Some(message) = self.outbox.next_message(arena) {
            // SAFETY: the message, heads and data stay as they are until the completion
            // (`Outbox::sent`).
            unsafe { ring.sendmsg(send, self.fd.as_fd(), message) };
        }
        // What was received is taken apart first.
        let takes = !self.turn.wake && !self.ending.deaf && self.stall.is_none();
        let reads = takes && !matches!(self.state, State::Ended | State::Leaving);
        if reads && !self.inbox.in_flight() {
            let (direct, beyond) = match &self.state {
                State::Payload { request, buf, offset, len, filled } => {
                    let at = buf.offset as usize
                        + (offset % BLOCK_BYTES as u64) as usize
                        + *filled as usize;
                    let last = self.requests.get(*request).is_none_or(|r| r.issued + len == r.len);
                    (Some((arena.wrapping_add(at), (len - filled) as usize)), last)
                }
                _ => (None, true),
            };
            let (message, drained) = self.inbox.next_message(direct, beyond);
            // SAFETY: the message, the receive buffer and the arena's buffer stay as they are until
            // the completion: the connection is kept until then (`is_over`) and its payload with
            // it.
            unsafe { ring.recvmsg(receive, self.fd.as_fd(), message, drained) };
        }
    }

    /// A receive is done.
    pub(in crate::shard) fn received<C: Core>(
        &mut self,
        result: i32,
        more: bool,
        shared: &mut Shared<C>,
    ) {
        let bytes = usize::try_from(result).unwrap_or(0);
        let direct = self.inbox.received(bytes, more);
        if let State::Payload { filled, .. } = &mut self.state {
            *filled += direct as u32;
        }
        shared.count.received_bytes += bytes as u64;
        if result > 0 {
            self.turn.wake = true;
        } else if result < 0 && !self.ending.muted {
            self.mute(shared);
        } else if result < 0 || matches!(self.state, State::Handshake(_)) {
            self.break_off();
        } else {
            self.end();
        }
    }

    /// A send is done.
    pub(in crate::shard) fn sent<C: Core>(&mut self, result: i32, shared: &mut Shared<C>) {
        let bytes = usize::try_from(result).unwrap_or(0);
        shared.count.sent_bytes += bytes as u64;
        self.outbox.sent(bytes, shared, &mut self.held);
        if result <= 0 {
            self.mute(shared);
        }
        self.turn.wake |= self.stall == Some(Stall::Own);
    }

    /// The client takes nothing any more. If it has left, what it has sent tells whether it has
    /// said good-bye; see [`Connection::process`]. One that is there, as where the kernel has no
    /// memory for an answer, is not to wait for that in vain.
    fn mute<C: Core>(&mut self, shared: &mut Shared<C>) {
        if !self.peer_has_left() {
            return self.break_off();
        }
        self.ending.muted = true;
        if !self.outbox.in_flight() {
            self.outbox.clear(shared, &mut self.held);
        }
        self.turn.wake = true;
    }

    /// Takes apart what has been received, until more is needed or something is in the way.
    pub(in crate::shard) fn process<C: Core>(&mut self, shared: &mut Shared<C>) {
        self.turn.wake = false;
        if self.ending.broken || self.ending.deaf {
            self.stall = None;
            return;
        }
        // A client that left while its requests waited here may have sent them again over a new
        // connection, and newer ones after them: these here must not overtake. A client that said
        // good-bye behind them has not.
        let waited = self.stall.is_some() || std::mem::take(&mut self.turn.deferred);
        if !self.ending.said_goodbye && (self.ending.muted || waited && self.peer_has_left()) {
            if self.inbox.in_flight() {
                // What it brings may be the good-bye.
                return;
            }
            self.ending.said_goodbye = self.says_goodbye();
            if !self.ending.said_goodbye {
                return self.break_off();
            }
        }
        self.stall = None;
        loop {
            if shared.effort.is_spent(self.volume) {
                // It goes on in the next round.
                (self.turn.wake, self.turn.served, self.turn.deferred) = (true, true, true);
                break;
            }
            let more = match &self.state {
                State::Handshake(_) => self.handshake(shared),
                State::Header => self.header(shared),
                State::Issue { request } => self.issue(*request, shared),
                State::Payload { .. } => self.payload(shared),
                State::Skip { .. } => self.skip(shared),
                State::Leaving | State::Ended => false,
            };
            if !more {
                break;
            }
        }
        if self.stall == Some(Stall::Memory) {
            shared.count.arena_stalls += 1;
        }
    }

    /// It waits for somebody else, and its client may have left meanwhile.
    pub(in crate::shard) fn may_wait_in_vain(&self) -> bool {
        self.stall.is_some()
            && !self.ending.broken
            && !self.ending.said_goodbye
            && self.peer_has_left()
    }

    fn peer_has_left(&self) -> bool {
        let mut poll = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Whether the client's good-bye is among what it has sent and nobody has taken apart. Nothing
    /// more comes from it.
    fn says_goodbye(&self) -> bool {
        let unissued = |slot: u32| {
            let asked = self
                .requests
                .get(slot)
                .filter(|asked| matches!(asked.command, Command::Write { .. }));
            asked.map_or(0, |asked| (asked.len - asked.issued) as usize)
        };
        // What of a payload is still to come before the next header.
        let payload_bytes = match &self.state {
            State::Header => 0,
            State::Skip { left, .. } => *left as usize,
            State::Issue { request } => unissued(*request),
            State::Payload { request, filled, .. } => unissued(*request) - *filled as usize,
            _ => return false,
        };
        let Some(session) = self.session.as_ref().filter(|_| !self.inbox.in_flight()) else {
            return false;
        };
        let mut sent = self.inbox.unread().to_vec();
        let waiting = rustix::io::ioctl_fionread(&self.fd).unwrap_or(0) as usize;
        let taken = sent.len();
        sent.resize(taken + waiting, 0);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked =
            rustix::net::recv(&self.fd, &mut sent[taken..], flags).map_or(0, |(peeked, _)| peeked);
        sent.truncate(taken + peeked);
        sent.get(payload_bytes..).is_some_and(|sent| session.says_goodbye(sent))
    }

    /// Always false: the caller stops here.
    pub(super) fn stall(&mut self, why: Stall) -> bool {
        self.stall = Some(why);
        false
    }

    /// The client broke the protocol.
    pub(super) fn malformed<C: Core>(
        &mut self,
        shared: &mut Shared<C>,
        error: &dyn std::fmt::Display,
    ) -> bool {
        self.count_malformed(shared, error);
        self.break_off();
        false
    }

    fn count_malformed<C: Core>(&self, shared: &mut Shared<C>, error: &dyn std::fmt::Display) {
        tracing::warn!(peer = %self.peer, "closing a connection: {error}");
        shared.count.malformed += 1;
    }

    fn handshake<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        // Answers leave together. A client that does not read them has no claim on memory.
        if self.outbox.in_flight() || self.outbox.greeting().len() >= ANSWERS_BYTES_MAX {
            return self.stall(Stall::Own);
        }
        if self.inbox.unread().is_empty() && self.waits_until.is_none() {
            return false;
        }
        let answered = self.outbox.greeting().len();
        let State::Handshake(handshake) = &mut self.state else { return false };
        let offer = Offer {
            volumes: &shared.volumes,
            expected: &shared.expected,
            coming: &shared.coming,
            patient: self.waits_until.is_none_or(|until| shared.now < until),
            only: self.only.as_deref(),
            awaited: Cell::new(None),
        };
        shared.effort.spend(None, effort::OPTION);
        match handshake.receive(self.inbox.unread(), &offer, self.outbox.greeting()) {
            Ok((taken, step)) => {
                self.inbox.take(taken);
                match step {
                    Step::Continue => return taken > 0 || self.outbox.greeting().len() > answered,
                    Step::Wait => {
                        let awaited = offer.awaited.get().map(str::to_owned);
                        if awaited.is_some_and(|name| !self.take_place(&name, shared)) {
                            return false;
                        }
                        let until =
                            *self.waits_until.get_or_insert(shared.now + VOLUME_WAIT_NS_MAX);
                        // It has taken no time of its own.
                        self.handshake_deadline = Some(until + HANDSHAKE_NS_MAX);
                        return self.stall(Stall::Volume);
                    }
                    Step::Closed => self.state = State::Ended,
                    Step::Transmission(session) => self.enter(session, shared),
                }
                true
            }
            Err(error) => {
                self.count_malformed(shared, &error);
                // What was asked before is answered.
                self.state = State::Ended;
                false
            }
        }
    }

    /// Counts for a volume from now on. If there is no place for that, the client is sent away.
    fn take_place<C: Core>(&mut self, volume: &str, shared: &mut Shared<C>) -> bool {
        if self.place.is_of(volume) {
            return true;
        }
        match shared.places.take(volume, self.only.is_some()) {
            Ok(place) => {
                shared.places.give(&mut self.place);
                self.place = place;
                true
            }
            Err(full) => {
                tracing::warn!(peer = %self.peer, "turning a client of volume {volume} away: {full}");
                shared.count.turned_away += 1;
                self.break_off();
                false
            }
        }
    }

    fn enter<C: Core>(&mut self, session: Session, shared: &mut Shared<C>) {
        self.handshake_deadline = None;
        if session.export == EXPECTED {
            self.session = Some(session);
            self.state = State::Leaving;
            return;
        }
        let id = VolumeId(session.export as u16);
        if !self.take_place(&session.name, shared) {
            return;
        }
        tracing::info!(peer = %self.peer, "a client uses volume {}", session.name);
        if let Some(volume) = shared.volumes.get_mut(id) {
            volume.connections += 1;
            self.volume = Some(id);
            shared.join(&mut self.held, id);
        }
        self.session = Some(session);
        self.state = State::Header;
    }
}
