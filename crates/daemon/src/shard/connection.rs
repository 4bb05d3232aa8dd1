//! One NBD client: what it sends becomes requests to the core, piece by piece; what the core answers
//! becomes replies (see `answer.rs`).

use super::budget::Held;
use super::core::Core;
use super::effort;
use super::gate::{self, PieceName, Unaligned};
use super::guests::EXPECTED;
use super::inbox::Inbox;
use super::limits::{
    ANSWERS_BYTES_MAX, EXTENTS_MAX, HANDSHAKE_NS_MAX, PIECES_MAX, REQUESTS_MAX, VOLUME_WAIT_NS_MAX,
};
use super::outbox::Outbox;
use super::places::Place;
use super::shared::Shared;
use super::volume::{Offer, Volume};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tidepool_driver::{Ring, Slab};
use tidepool_engine::api::{
    BLOCK_BYTES, Nanos, Op, REQUEST_BYTES_MAX, Request, RequestId, SECTOR_BYTES, VolumeId, buffer_bytes,
};
use tidepool_engine::mem::Buf;
use tidepool_nbd::{Command, Context, Errno, Handshake, Incoming, Refusal, Session, Step, reply, wire};

const SECTOR: u64 = SECTOR_BYTES as u64;

/// A client's request between its header and its reply.
pub(super) struct Asked {
    pub cookie: u64,
    pub command: Command,
    pub offset: u64,
    pub len: u32,
    pub received_ns: Nanos,
    /// Bytes of the range that are in pieces already.
    pub issued: u32,
    /// Pieces in the core.
    pub pieces: u32,
    /// The first error of a piece.
    pub error: Option<Errno>,
    /// Bytes of an ordered read that are in the outbox.
    pub queued: u32,
}

/// A part of a request that is in the core, or waits for its turn in an ordered read.
pub(super) struct Piece {
    pub request: u32,
    pub offset: u64,
    pub len: u32,
    pub buf: Option<Buf>,
    /// It counts at the gate of its volume.
    pub gated: bool,
    /// Read, but the pieces before it are not.
    pub done: bool,
    /// It counts among the trims and write-zeroes of this volume, of which the connection may know no more when it ends.
    pub range_of: Option<VolumeId>,
}

/// What the next bytes from the client are.
enum State {
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
    /// Its volume is not served yet: the connection goes to the control plane, see [`Connection::is_leaving`].
    Leaving,
    /// Nothing is read any more; what is under way is finished.
    Ended,
}

/// Why a client is not read any further for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stall {
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

pub(super) struct Connection {
    /// Its place in the reactor's table.
    pub slot: u32,
    pub fd: OwnedFd,
    pub peer: String,
    /// The only export that its listener offers.
    only: Option<Arc<str>>,
    /// What it has of the places for connections.
    pub place: Place,
    /// When it came.
    pub since: Nanos,
    pub volume: Option<VolumeId>,
    session: Option<Session>,
    state: State,
    pub stall: Option<Stall>,
    inbox: Inbox,
    pub outbox: Outbox,
    pub requests: Slab<Asked>,
    pub pieces: Slab<Piece>,
    pub held: Held,
    /// Neither read nor written any more; it goes when the kernel and the core have let go of it.
    broken: bool,
    /// The last receive has emptied the socket.
    drained: bool,
    /// The shard is shutting down: what comes is not looked at.
    deaf: bool,
    /// The client has closed its side behind a good-bye: everything before that is done.
    said_goodbye: bool,
    /// The client takes no replies any more: they are dropped.
    muted: bool,
    pub handshake_deadline: Option<Nanos>,
    /// It has asked for a volume that is on its way, and waits until then at the latest.
    pub waits_until: Option<Nanos>,
    /// In the reactor's list of connections to look at.
    pub listed: bool,
    /// It has had its turn in this round, and has more to do.
    pub served: bool,
    /// What it has sent was put off to another round.
    pub deferred: bool,
    /// In the reactor's queue of connections that wait for memory, a gate or a lease.
    pub waiting: bool,
    /// There is something to parse.
    pub wake: bool,
}

impl Connection {
    pub(super) fn new(
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
            broken: false,
            drained: false,
            deaf: false,
            said_goodbye: false,
            muted: false,
            handshake_deadline: Some(now + HANDSHAKE_NS_MAX),
            waits_until: None,
            listed: false,
            served: false,
            deferred: false,
            waiting: false,
            wake: false,
        }
    }

    pub(super) fn structured(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.structured)
    }

    pub(super) fn broken(&self) -> bool {
        self.broken
    }

    /// It shakes hands, and what is missing is the client's to say.
    pub(super) fn has_said_too_little(&self) -> bool {
        self.handshake_deadline.is_some() && self.waits_until.is_none() && !self.broken
    }

    /// Reads no more; what is under way is finished and answered.
    pub(super) fn end(&mut self) {
        if matches!(self.state, State::Payload { .. }) {
            self.break_off();
        } else {
            self.state = State::Ended;
        }
    }

    /// Whose part of a round its work counts for.
    pub(super) fn volume(&self) -> Option<VolumeId> {
        self.volume
    }

    /// Its volume is not served here yet, and the kernel works on neither direction: it can be passed on.
    pub(super) fn is_leaving(&self) -> bool {
        let is_there = !self.broken && !self.muted;
        matches!(self.state, State::Leaving) && is_there && self.outbox.is_empty() && self.is_quiet()
    }

    /// What the handshake has come to, and what was received behind it, if it is leaving.
    pub(super) fn take_guest(&mut self) -> Option<(Session, Vec<u8>)> {
        let unread = self.inbox.unread().to_vec();
        self.session.take().filter(|_| matches!(self.state, State::Leaving)).map(|session| (session, unread))
    }

    /// A client whose handshake was elsewhere: its volume is served here, and some of its requests have come already.
    pub(super) fn welcome<C: Core>(&mut self, session: Session, unread: &[u8], shared: &mut Shared<C>) {
        self.outbox.greeting().clear();
        self.inbox.put(unread);
        self.enter(session, shared);
        // It may have left while it waited elsewhere; see [`Connection::process`].
        self.stall = Some(Stall::Volume);
        self.wake = true;
    }

    /// Looks at nothing more that comes; what is in the core is answered.
    pub(super) fn stop_reading(&mut self) {
        self.deaf = true;
    }

    /// Gives the client up.
    pub(super) fn break_off(&mut self) {
        self.broken = true;
        // Operations in flight end now; an error means that the client is gone already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// The kernel works on neither direction.
    pub(super) fn is_quiet(&self) -> bool {
        !self.inbox.in_flight() && !self.outbox.in_flight()
    }

    /// Nothing is left to do, and nobody uses its memory.
    pub(super) fn is_over(&self) -> bool {
        let ended = matches!(self.state, State::Ended) && self.outbox.is_empty();
        (self.broken || ended) && self.is_quiet() && self.pieces.iter().all(|(_, p)| p.done)
    }

    /// Frees what it holds; for a connection that is over.
    pub(super) fn dismantle<C: Core>(&mut self, shared: &mut Shared<C>) {
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
    pub(super) fn arm<C: Core>(&mut self, ring: &mut Ring, shared: &mut Shared<C>, receive: u64, send: u64) {
        if self.broken {
            return;
        }
        if !self.outbox.is_empty() && !self.outbox.in_flight() {
            if self.muted || !self.outbox.send_now(self.fd.as_fd(), shared, &mut self.held) {
                self.mute(shared);
            }
            self.wake |= self.stall == Some(Stall::Own);
        }
        let arena = shared.core.arena().as_ptr();
        if let Some(message) = self.outbox.next_message(arena) {
            // SAFETY: the message, heads and data stay as they are until the completion (`Outbox::sent`).
            unsafe { ring.sendmsg(send, self.fd.as_fd(), message) };
        }
        // What was received is taken apart first.
        let takes = !self.wake && !self.deaf && self.stall.is_none();
        let reads = takes && !matches!(self.state, State::Ended | State::Leaving);
        if reads && !self.inbox.in_flight() {
            let (direct, beyond) = match &self.state {
                State::Payload { request, buf, offset, len, filled } => {
                    let at = buf.offset as usize + (offset % BLOCK_BYTES as u64) as usize + *filled as usize;
                    let last = self.requests.get(*request).is_none_or(|r| r.issued + len == r.len);
                    (Some((arena.wrapping_add(at), (len - filled) as usize)), last)
                }
                _ => (None, true),
            };
            let message = self.inbox.next_message(direct, beyond);
            // SAFETY: the message, the receive buffer and the arena's buffer stay as they are until the
            // completion: the connection is kept until then (`is_over`) and its payload with it.
            unsafe { ring.recvmsg(receive, self.fd.as_fd(), message, self.drained) };
        }
    }

    /// A receive is done.
    pub(super) fn received<C: Core>(&mut self, result: i32, more: bool, shared: &mut Shared<C>) {
        self.drained = !more;
        let bytes = usize::try_from(result).unwrap_or(0);
        let direct = self.inbox.received(bytes);
        if let State::Payload { filled, .. } = &mut self.state {
            *filled += direct as u32;
        }
        shared.count.received_bytes += bytes as u64;
        if result > 0 {
            self.wake = true;
        } else if result < 0 && !self.muted {
            self.mute(shared);
        } else if result < 0 || matches!(self.state, State::Handshake(_)) {
            self.break_off();
        } else {
            self.end();
        }
    }

    /// A send is done.
    pub(super) fn sent<C: Core>(&mut self, result: i32, shared: &mut Shared<C>) {
        let bytes = usize::try_from(result).unwrap_or(0);
        shared.count.sent_bytes += bytes as u64;
        self.outbox.sent(bytes, shared, &mut self.held);
        if result <= 0 {
            self.mute(shared);
        }
        self.wake |= self.stall == Some(Stall::Own);
    }

    /// The client takes nothing any more. If it has left, what it has sent tells whether it has said good-bye; see [`Connection::process`].
    /// One that is there, as where the kernel has no memory for an answer, is not to wait for that in vain.
    fn mute<C: Core>(&mut self, shared: &mut Shared<C>) {
        if !self.peer_has_left() {
            return self.break_off();
        }
        self.muted = true;
        if !self.outbox.in_flight() {
            self.outbox.clear(shared, &mut self.held);
        }
        self.wake = true;
    }

    /// Takes apart what has been received, until more is needed or something is in the way.
    pub(super) fn process<C: Core>(&mut self, shared: &mut Shared<C>) {
        self.wake = false;
        if self.broken || self.deaf {
            self.stall = None;
            return;
        }
        // A client that left while its requests waited here may have sent them again over a new connection, and
        // newer ones after them: these here must not overtake. A client that said good-bye behind them has not.
        let waited = self.stall.is_some() || std::mem::take(&mut self.deferred);
        if !self.said_goodbye && (self.muted || waited && self.peer_has_left()) {
            if self.inbox.in_flight() {
                // What it brings may be the good-bye.
                return;
            }
            self.said_goodbye = self.says_goodbye();
            if !self.said_goodbye {
                return self.break_off();
            }
        }
        self.stall = None;
        loop {
            if shared.effort.is_spent(self.volume) {
                // It goes on in the next round.
                (self.wake, self.served, self.deferred) = (true, true, true);
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
    pub(super) fn may_wait_in_vain(&self) -> bool {
        self.stall.is_some() && !self.broken && !self.said_goodbye && self.peer_has_left()
    }

    fn peer_has_left(&self) -> bool {
        let mut poll = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Whether the client's good-bye is among what it has sent and nobody has taken apart. Nothing more comes from it.
    fn says_goodbye(&self) -> bool {
        let unissued = |slot: u32| {
            let asked =
                self.requests.get(slot).filter(|asked| matches!(asked.command, Command::Write { .. }));
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
        let Some(session) = self.session.as_ref().filter(|_| !self.inbox.in_flight()) else { return false };
        let mut sent = self.inbox.unread().to_vec();
        let waiting = rustix::io::ioctl_fionread(&self.fd).unwrap_or(0) as usize;
        let taken = sent.len();
        sent.resize(taken + waiting, 0);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&self.fd, &mut sent[taken..], flags).map_or(0, |(peeked, _)| peeked);
        sent.truncate(taken + peeked);
        sent.get(payload_bytes..).is_some_and(|sent| session.says_goodbye(sent))
    }

    /// Always false: the caller stops here.
    fn stall(&mut self, why: Stall) -> bool {
        self.stall = Some(why);
        false
    }

    /// The client broke the protocol.
    fn malformed<C: Core>(&mut self, shared: &mut Shared<C>, error: &dyn std::fmt::Display) -> bool {
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
                        let until = *self.waits_until.get_or_insert(shared.now + VOLUME_WAIT_NS_MAX);
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

    /// Room for one more request or piece, and for the replies of all that are under way.
    fn has_room(&self) -> bool {
        let open = self.requests.len() + self.pieces.len();
        !self.requests.is_full() && !self.pieces.is_full() && self.outbox.room() > open + 1
    }

    fn header<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        let Some(header) = self.inbox.unread().first_chunk::<{ wire::REQUEST_BYTES }>() else { return false };
        if !self.has_room() {
            return self.stall(Stall::Own);
        }
        shared.effort.spend(self.volume, effort::REQUEST);
        let session = self.session.as_ref().expect("requests follow the handshake");
        let incoming = match session.request(header) {
            Ok(incoming) => incoming,
            Err(error) => return self.malformed(shared, &error),
        };
        match incoming {
            Incoming::Execute(request) => {
                if !request.command.writes() && !self.is_leased(shared) {
                    return self.stall(Stall::Lease);
                }
                if let Command::BlockStatus { one } = request.command {
                    return self.block_status(&request, one, shared);
                }
                self.inbox.take(wire::REQUEST_BYTES);
                shared.count.requests += 1;
                self.begin(&request, shared);
            }
            Incoming::Refuse(refusal) => {
                self.inbox.take(wire::REQUEST_BYTES);
                shared.count.requests += 1;
                self.state = State::Skip { refusal, left: refusal.payload_bytes };
            }
            Incoming::Disconnect => {
                self.inbox.take(wire::REQUEST_BYTES);
                self.state = State::Ended;
            }
        }
        true
    }

    fn begin<C: Core>(&mut self, request: &tidepool_nbd::Request, shared: &mut Shared<C>) {
        let (mut offset, mut len) = (request.offset, request.len);
        if matches!(request.command, Command::Trim { .. }) {
            // A discard is a wish: what it covers of a sector only in part stays.
            let end = (offset + u64::from(len)) / SECTOR * SECTOR;
            offset = offset.next_multiple_of(SECTOR);
            len = end.saturating_sub(offset) as u32;
        }
        let asked = Asked {
            cookie: request.cookie,
            command: request.command,
            offset,
            len,
            received_ns: shared.now,
            issued: 0,
            pieces: 0,
            error: None,
            queued: 0,
        };
        let slot = self.requests.insert(asked).expect("room was checked before the header was taken");
        if matches!(request.command, Command::Flush) {
            self.submit(
                slot,
                Piece {
                    request: slot,
                    offset: 0,
                    len: 0,
                    buf: None,
                    gated: false,
                    done: false,
                    range_of: None,
                },
                shared,
            );
        } else if len == 0 {
            self.finish(slot, shared);
        } else {
            self.state = State::Issue { request: slot };
        }
    }

    /// Issues the next piece of a request, or starts to receive it.
    fn issue<C: Core>(&mut self, slot: u32, shared: &mut Shared<C>) -> bool {
        // It is gone when it is answered already.
        let Some(asked) = self.requests.get(slot) else {
            self.state = State::Header;
            return true;
        };
        if asked.issued == asked.len {
            if asked.queued > 0 {
                // Its reply has begun: no other may come into being before it has ended.
                return self.stall(Stall::Own);
            }
            self.state = State::Header;
            return true;
        }
        let command = asked.command;
        let offset = asked.offset + u64::from(asked.issued);
        let end = asked.offset + u64::from(asked.len);
        let is_range = matches!(command, Command::Trim { .. } | Command::WriteZeroes { .. });
        let piece = if is_range { effort::RANGE_PIECE_BYTES } else { REQUEST_BYTES_MAX as u64 };
        let len = (end.min((offset + 1).next_multiple_of(piece)) - offset) as u32;
        if !self.has_room() {
            return self.stall(Stall::Own);
        }
        if command.writes() && self.gate_is_closed(shared) {
            return self.stall(Stall::Gate);
        }
        let mut buf = None;
        let range_of = self.volume.filter(|_| is_range);
        if is_range {
            shared.effort.spend(self.volume, effort::REQUEST);
            if !shared.effort.begin_range(self.volume, len.into()) {
                return self.stall(Stall::Ranges);
            }
            shared.effort.spend(self.volume, effort::blocks(len.into()) as u32);
        } else {
            buf = shared.alloc(&mut self.held, buffer_bytes(offset, u64::from(len)));
            if buf.is_none() {
                self.stall = Some(Stall::Memory);
                self.stalled(slot, shared);
                return false;
            }
            shared.effort.spend(self.volume, effort::BLOCK * effort::blocks(len.into()) as u32);
        }
        match (command, buf) {
            (Command::Write { .. }, Some(buf)) => {
                self.state = State::Payload { request: slot, buf, offset, len, filled: 0 };
            }
            _ => self.submit(
                slot,
                Piece { request: slot, offset, len, buf, gated: false, done: false, range_of },
                shared,
            ),
        }
        true
    }

    /// The request that is being issued, if any.
    pub(super) fn issuing(&self) -> Option<u32> {
        match self.state {
            State::Issue { request } => Some(request),
            _ => None,
        }
    }

    fn gate_is_closed<C: Core>(&self, shared: &Shared<C>) -> bool {
        self.volume.and_then(|id| shared.volumes.get(id)).is_some_and(|v| v.gate.is_closed())
    }

    fn is_leased<C: Core>(&self, shared: &Shared<C>) -> bool {
        self.volume.and_then(|id| shared.volumes.get(id)).is_none_or(Volume::is_leased)
    }

    /// Takes payload from the receive buffer; submits the piece when it is complete.
    fn payload<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        let State::Payload { request, buf, offset, len, filled } = &mut self.state else { return false };
        let (request, buf, offset, len) = (*request, *buf, *offset, *len);
        let unread = self.inbox.unread();
        let some = unread.len().min((len - *filled) as usize);
        if some > 0 {
            let at = (offset % BLOCK_BYTES as u64) as usize + *filled as usize;
            shared.core.arena_mut().bytes_mut(buf.slice(at, some)).copy_from_slice(&unread[..some]);
            *filled += some as u32;
            self.inbox.take(some);
        }
        let State::Payload { filled, .. } = &self.state else { return false };
        if *filled < len {
            return false;
        }
        if self.gate_is_closed(shared) {
            return self.stall(Stall::Gate);
        }
        self.state = State::Issue { request };
        self.submit(
            request,
            Piece { request, offset, len, buf: Some(buf), gated: false, done: false, range_of: None },
            shared,
        );
        true
    }

    fn skip<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        let State::Skip { left, .. } = &mut self.state else { return false };
        let some = self.inbox.unread().len().min(*left as usize);
        *left -= some as u32;
        self.inbox.take(some);
        let State::Skip { refusal, left: 0 } = &self.state else { return false };
        let refusal = *refusal;
        self.state = State::Header;
        shared.count.request_errors += 1;
        let structured = self.structured();
        self.outbox.push(None, None, |head| {
            reply::error(head, structured, refusal.cookie, refusal.errno, refusal.message)
        });
        true
    }

    /// Hands a piece to the core, or to the gate of its volume.
    fn submit<C: Core>(&mut self, request: u32, mut piece: Piece, shared: &mut Shared<C>) {
        let asked = self.requests.get_mut(request).expect("a piece belongs to a request");
        asked.pieces += 1;
        asked.issued += piece.len;
        let command = asked.command;
        let (start, end) = (piece.offset, piece.offset + u64::from(piece.len));
        let aligned = start % SECTOR == 0 && end % SECTOR == 0;
        let op = match command {
            Command::Read { .. } => Op::Read,
            Command::Write { fua } => Op::Write { fua },
            Command::Flush => Op::Flush,
            Command::Trim { fua } => Op::Discard { fua },
            Command::WriteZeroes { fua, no_hole, .. } => Op::WriteZeroes { fua, no_hole },
            Command::Cache | Command::BlockStatus { .. } => Op::Prefetch,
        };
        let id = self.volume.unwrap_or(VolumeId(u16::MAX));
        let gate = shared.volumes.get_mut(id).filter(|_| command.writes()).map(|v| &mut v.gate);
        let (buf, unaligned) = (piece.buf, command.writes() && !aligned);
        if let Some(gate) = gate.filter(|_| !unaligned) {
            gate.enter();
            piece.gated = true;
        }
        let (offset, len) = (piece.offset, u64::from(piece.len));
        let slot = self.pieces.insert(piece).expect("room was checked before the piece was made");
        if unaligned {
            let name = PieceName { connection: self.slot, piece: slot };
            let (fua, no_hole) = match op {
                Op::Write { fua } => (fua, false),
                Op::WriteZeroes { fua, no_hole } => (fua, no_hole),
                _ => unreachable!("discards are made of whole sectors"),
            };
            return gate::push(shared, id, Unaligned { name, offset, len, buf, fua, no_hole });
        }
        let (start, end) = (start / SECTOR * SECTOR, end.next_multiple_of(SECTOR));
        shared.submit(Request {
            id: request_id(self.slot, slot),
            volume: id,
            op,
            offset: start,
            len: end - start,
            buf,
        });
    }

    fn block_status<C: Core>(
        &mut self,
        request: &tidepool_nbd::Request,
        one: bool,
        shared: &mut Shared<C>,
    ) -> bool {
        let (contexts, structured) = match &self.session {
            Some(session) => (session.contexts, session.structured),
            None => return false,
        };
        let count = contexts.iter().count();
        debug_assert!(structured && count > 0, "checked with the header");
        if self.outbox.room() < self.requests.len() + self.pieces.len() + count {
            return self.stall(Stall::Own);
        }
        let mut bufs = [None; Context::ALL.len()];
        for buf in bufs.iter_mut().take(count) {
            *buf = shared.alloc(&mut self.held, BLOCK_BYTES);
        }
        if bufs.iter().flatten().count() < count {
            bufs.into_iter().flatten().for_each(|buf| shared.put_back(&mut self.held, buf));
            return self.stall(Stall::Memory);
        }
        self.inbox.take(wire::REQUEST_BYTES);
        shared.count.requests += 1;
        let start = request.offset / SECTOR * SECTOR;
        let end = (request.offset + u64::from(request.len)).next_multiple_of(SECTOR);
        let mut extents = std::mem::take(&mut shared.extents);
        // The buffer has what was told of another volume last.
        extents.clear();
        if let Some(id) = self.volume {
            let cost = shared.core.block_status(id, start, end - start, EXTENTS_MAX, &mut extents);
            shared.effort.spend(Some(id), u32::try_from(cost).unwrap_or(u32::MAX));
        }
        for (index, (context, buf)) in contexts.iter().zip(bufs.into_iter().flatten()).enumerate() {
            let out = shared.core.arena_mut().bytes_mut(buf);
            let mut status = reply::BlockStatus::new(out, request.cookie, context.id(), request.len, one);
            let mut before = request.offset - start;
            for extent in &extents {
                let len = extent.len.saturating_sub(before);
                before = before.saturating_sub(extent.len);
                if len > 0 && !status.push(len, flags(context, extent)) {
                    break;
                }
            }
            let used = status.finish(index + 1 == count);
            self.outbox.push(Some(buf.slice(0, used)), Some(buf), |_| 0);
        }
        shared.extents = extents;
        true
    }
}

/// An extent as a metadata context shows it. All that is not known to be zero counts as data.
fn flags(context: Context, extent: &tidepool_engine::api::Extent) -> u32 {
    match context {
        Context::Allocation if extent.zero => wire::STATE_HOLE | wire::STATE_ZERO,
        Context::Allocation => 0,
        Context::Dirty => {
            let dirty = if extent.dirty { wire::STATE_DIRTY } else { 0 };
            dirty | if extent.cached || extent.dirty { wire::STATE_CACHED } else { 0 }
        }
    }
}

/// A connection's name for a piece in the core.
fn request_id(connection: u32, piece: u32) -> RequestId {
    u64::from(connection) << 32 | u64::from(piece)
}

/// The reverse.
pub(super) fn piece_of(id: RequestId) -> PieceName {
    PieceName { connection: (id >> 32) as u32, piece: id as u32 }
}
