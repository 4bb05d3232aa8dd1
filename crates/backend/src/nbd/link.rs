//! The thread that communicates with the server. It pipelines transfers, and connects again when
//! the connection breaks.
//!
//! A backend has a thread of its own because a reconnect blocks (names are looked up, servers do
//! not answer), and nothing may block the reactor. While it is connected, the thread waits in
//! `poll` for orders and for the socket. An io_uring would save it little, because the socket's
//! memory copies cost more than its system calls.
//!
//! **What a broken connection means.** All transfers in flight are requested again from their
//! beginning. No two of them overlap, so doing one twice changes nothing. Writes that had
//! *completed* and were not flushed are another matter: a server that was restarted may have lost
//! them. Such a loss is counted, and every flush fails whose submitter has not learnt of it yet.
//! The core then writes again what was not flushed.

use super::outgoing::{Outgoing, ZERO_BYTES};
use super::place::{Place, Terms};
use super::slots::{Order, SLOTS, Slots, Work, tag};
use crate::api::{INFLIGHT_MAX, Peer};
use crate::changes::Change;
use crate::error::BackendError;
use crate::mailbox::Mailbox;
use crate::record::Ownership;
use crate::sidecar::Sidecar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tidepool_engine::api::IoError;
use tidepool_nbd::client::{Negotiated, Pipeline, Stream};
use tidepool_nbd::{Command, encode_request, wire};

/// Pause before the first attempt to connect again; every further attempt doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a server may be out of reach before a close no longer waits for it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Size of the receive buffer, in bytes.
const INPUT_BYTES: usize = 256 << 10;
/// Most receive calls in a row before something is sent again.
const RECEIVE_ROUNDS: usize = 8;

const EIO: IoError = IoError::Errno(libc::EIO);

/// Phase of a backend on its way to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Phase {
    /// Transfers wait for the server as long as it takes.
    Open,
    /// Transfers fail once the server has been out of reach for [`CLOSE_PATIENCE`].
    Closing,
    /// The thread ends when nothing is in flight.
    Ended,
}

/// The outcome of a transfer.
pub(super) struct Letter {
    pub(super) token: u64,
    pub(super) result: Result<(), IoError>,
    /// Of a flush: the number of losses that its failure reports.
    pub(super) losses: u64,
}

/// What the backend and its thread share.
pub(super) struct Shared {
    pub(super) orders: Mailbox<Order>,
    pub(super) letters: Mailbox<Letter>,
    phase: AtomicU8,
    held: Mutex<Option<Held>>,
    /// The peer for a [`Work::Peer`] order.
    peer: Mutex<Option<Peer>>,
}

/// The ownership, as long as the export is open for writing.
pub(super) struct Held {
    pub(super) sidecar: Sidecar,
    pub(super) record: Ownership,
    /// The last change of the record has failed: it may have been made.
    pub(super) unsure: bool,
}

impl Held {
    fn change(&mut self, change: Change) -> Result<(), IoError> {
        let changed = self.sidecar.change(&self.record, change, self.unsure);
        self.unsure = changed.is_err();
        self.record = changed.map_err(|error| {
            tracing::warn!("{error}");
            error.errno()
        })?;
        Ok(())
    }
}

impl Shared {
    pub(super) fn new() -> rustix::io::Result<Shared> {
        Ok(Shared {
            // One more than the slots: for a change of the record, which is no transfer.
            orders: Mailbox::new(SLOTS + 1)?,
            letters: Mailbox::new(SLOTS + 1)?,
            phase: AtomicU8::new(Phase::Open as u8),
            held: Mutex::new(None),
            peer: Mutex::new(None),
        })
    }

    pub(super) fn peer(&self) -> MutexGuard<'_, Option<Peer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
        self.orders.wake();
    }

    fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Acquire) >= phase as u8
    }
}

struct Connection {
    stream: Stream,
    pipeline: Pipeline,
    out: Outgoing,
    /// The server has sent something over it.
    answered: bool,
}

impl Connection {
    fn new(stream: Stream, negotiated: &Negotiated) -> Connection {
        let pipeline = Pipeline::new(negotiated, INFLIGHT_MAX);
        Connection { stream, pipeline, out: Outgoing::new(SLOTS), answered: false }
    }
}

/// The state of the thread.
pub(super) struct Link<'a> {
    place: Place,
    shared: &'a Shared,
    /// Terms at the time when the backend was opened.
    opened: Terms,
    writable: bool,
    /// Terms of the last connection.
    terms: Terms,
    connection: Option<Connection>,
    slots: Slots,
    input: Box<[u8]>,
    /// Writes that have completed; `flushed` of them are covered by a flush.
    written: u64,
    flushed: u64,
    /// How often completed writes may have been lost.
    losses: u64,
    /// When the next attempt to connect is due; `pause` follows that attempt.
    retry_at: Instant,
    pause: Duration,
    broken_since: Instant,
    /// The last reason why connecting failed, as it was logged.
    trouble: String,
    /// The export is not the one that was opened: transfers fail instead of waiting.
    refusing: bool,
}

impl<'a> Link<'a> {
    pub(super) fn new(
        place: Place,
        shared: &'a Shared,
        (stream, negotiated): (Stream, Negotiated),
        terms: Terms,
        writable: bool,
    ) -> Link<'a> {
        let now = Instant::now();
        Link {
            place,
            shared,
            opened: terms,
            writable,
            terms,
            connection: Some(Connection::new(stream, &negotiated)),
            slots: Slots::new(),
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            written: 0,
            flushed: 0,
            losses: 0,
            retry_at: now,
            pause: PAUSE_MIN,
            broken_since: now,
            trouble: String::new(),
            refusing: false,
        }
    }

    /// Runs until the backend has ended.
    pub(super) fn run(mut self) {
        loop {
            self.take_orders();
            if self.shared.is_in(Phase::Ended) && self.slots.is_empty() {
                break;
            }
            self.reconnect();
            match self.exchange() {
                Ok(true) => continue,
                Ok(false) => self.wait(),
                Err(why) => self.broken(&why),
            }
        }
        if let Some(mut connection) = self.connection {
            // The server treats a connection that ends without this request as closed, too.
            let _ = connection.stream.write_all(&encode_request(0, wire::CMD_DISC, 0, 0, 0));
        }
    }

    fn take_orders(&mut self) {
        let shared = self.shared;
        shared.orders.drain(|order| match order.work {
            Work::Disown => {
                let result = self.disown();
                self.post(order, result);
            }
            Work::Peer => {
                let peer = shared.peer().take();
                let held = &mut *shared.held();
                let result = held.as_mut().map_or(Ok(()), |held| held.change(Change::Peer(peer)));
                self.post(order, result);
            }
            _ if self.refusing => self.post(order, Err(EIO)),
            _ => self.slots.insert(order),
        });
    }

    fn post(&self, order: Order, result: Result<(), IoError>) {
        let losses = if matches!(order.work, Work::Flush { .. }) { self.losses } else { 0 };
        let posted = self.shared.letters.post(Letter { token: order.token, result, losses });
        debug_assert!(posted, "there is room for a letter of every transfer");
    }

    /// Records that the cache's content is no longer to be trusted.
    fn disown(&self) -> Result<(), IoError> {
        let mut held = self.shared.held();
        let held = held.as_mut().filter(|held| held.record.superseded.is_none());
        held.map_or(Ok(()), |held| held.change(Change::Disown))
    }

    /// Requests, sends and receives; true when there is more to do at once.
    fn exchange(&mut self) -> Result<bool, String> {
        self.issue();
        let Some(connection) = &mut self.connection else { return Ok(false) };
        connection.out.send(&connection.stream).map_err(|e| e.to_string())?;
        let mut more = true;
        for _ in 0..RECEIVE_ROUNDS {
            more = self.receive()?;
            if !more {
                break;
            }
        }
        self.settle()?;
        let room =
            self.connection.as_ref().is_some_and(|connection| connection.pipeline.room() > 0);
        Ok(more || room && self.slots.is_waiting())
    }

    /// Turns waiting transfers into requests, as long as there is room for them.
    fn issue(&mut self) {
        while self.connection.as_ref().is_some_and(|connection| connection.pipeline.room() > 0) {
            let Some((index, order, start)) = self.slots.next_waiting() else { return };
            if let Some(result) = self.without_server(&order) {
                self.end(index, result);
                continue;
            }
            let Some(bytes) = self.request(index, &order, start) else {
                // The terms were checked before, so that the codec refuses nothing.
                self.end(index, Err(EIO));
                continue;
            };
            let covers = if matches!(order.work, Work::Flush { .. }) { self.written } else { 0 };
            self.slots.asked(index, bytes, covers);
        }
    }

    /// The outcome of a transfer that needs no request to the server.
    fn without_server(&self, order: &Order) -> Option<Result<(), IoError>> {
        match order.work {
            Work::Flush { told } if told < self.losses => Some(Err(EIO)),
            Work::Flush { .. } => (!self.terms.flush).then_some(Ok(())),
            _ => {
                let min = u64::from(self.terms.block_bytes_min.max(1));
                let whole = order.offset.is_multiple_of(min) && order.len.is_multiple_of(min);
                (!whole).then_some(Err(IoError::Errno(libc::EINVAL)))
            }
        }
    }

    /// Queues the next request of a transfer; returns its length.
    fn request(&mut self, index: u16, order: &Order, start: u64) -> Option<u64> {
        let terms = &self.terms;
        let connection = self.connection.as_mut()?;
        let left = order.len - start;
        let piece = left.min(u64::from(terms.piece_bytes_max));
        let zero = left.min(u64::from(terms.piece_bytes_max.min(ZERO_BYTES as u32)));
        let (command, bytes) = match order.work {
            Work::Read { .. } => (Command::Read { df: false }, piece),
            Work::Write { .. } => (Command::Write { fua: false }, piece),
            // A trimmed range need not read as zero afterwards; writing zeroes may free the space
            // too.
            Work::Zeroes { keep } if terms.zeroes => {
                (Command::WriteZeroes { fua: false, no_hole: keep, fast_zero: false }, piece)
            }
            Work::Zeroes { .. } => (Command::Write { fua: false }, zero),
            Work::Flush { .. } | Work::Disown | Work::Peer => (Command::Flush, left),
        };
        let (offset, len) = match command {
            Command::Flush => (0, 0),
            _ => (order.offset + start, bytes as u32),
        };
        let header = connection.pipeline.submit(tag(index, start), command, offset, len).ok()?;
        connection.out.header(header);
        match order.work {
            Work::Write { ptr } => {
                // SAFETY: `start` and `bytes` lie inside of the transfer, whose memory stays valid
                // until it is answered; an answer before all of it is sent is refused in `settle`.
                unsafe { connection.out.memory(index, ptr.add(start as usize), bytes as usize) };
            }
            Work::Zeroes { .. } if !terms.zeroes => connection.out.zeroes(bytes as usize),
            _ => {}
        }
        Some(bytes)
    }

    /// Receives what is there; false when that is all for now.
    fn receive(&mut self) -> Result<bool, String> {
        let Some(connection) = &mut self.connection else { return Ok(false) };
        let (_, len) = match recv(&connection.stream, &mut self.input[..], RecvFlags::DONTWAIT) {
            Ok(received) => received,
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::AGAIN) => return Ok(false),
            Err(e) => return Err(io::Error::from(e).to_string()),
        };
        if len == 0 {
            return Err("the server has closed it".into());
        }
        connection.answered = true;
        let received = connection.pipeline.receive(&self.input[..len], &mut self.slots);
        received.map_err(|e| e.to_string())?;
        Ok(len == self.input.len())
    }

    /// Reports the transfers whose last answer has come.
    fn settle(&mut self) -> Result<(), String> {
        let leaving = self.slots.take_leaving();
        while let Some((index, result, covers)) = self.slots.over() {
            if leaving && result == Err(IoError::Errno(libc::ESHUTDOWN)) {
                continue;
            }
            // The transfer's memory must not be given back while some of it waits to be sent.
            if self.connection.as_ref().is_some_and(|connection| connection.out.holds(index)) {
                return Err("the server answered a write before it had it".into());
            }
            if result.is_ok() {
                self.flushed = self.flushed.max(covers);
            }
            self.end(index, result);
        }
        if leaving { Err("the server is shutting down".into()) } else { Ok(()) }
    }

    fn end(&mut self, index: u16, result: Result<(), IoError>) {
        let order = self.slots.end(index);
        // A failed write may have been done in part.
        self.written += u64::from(order.work.writes());
        self.post(order, result);
    }

    /// Handles the end of a connection.
    fn broken(&mut self, why: &str) {
        let answered = self.connection.take().is_some_and(|connection| connection.answered);
        tracing::warn!("{}: the connection broke: {why}; connecting again", self.place.what);
        if self.terms.flush && self.flushed < self.written {
            self.losses += 1;
            self.flushed = self.written;
        }
        self.slots.restart();
        if answered {
            self.pause = PAUSE_MIN;
        }
        self.broken_since = Instant::now();
        self.retry_at = self.broken_since + self.pause;
    }

    /// One attempt to connect again, when it is due.
    fn reconnect(&mut self) {
        if self.connection.is_some() || Instant::now() < self.retry_at {
            return;
        }
        let attempt = self.place.connect().and_then(|(stream, negotiated)| {
            let terms = Terms::of(&self.place, &negotiated)?;
            Ok((stream, negotiated, terms))
        });
        match attempt {
            Ok((stream, negotiated, terms)) => match self.difference(&terms) {
                None => self.connected(Connection::new(stream, &negotiated), terms),
                Some(difference) => self.refuse(difference),
            },
            // The server can be reached, but it does not offer what was opened.
            Err(e @ BackendError::Unsupported { .. }) => self.refuse(e.to_string()),
            Err(e) => self.failed(e.to_string()),
        }
    }

    /// Why the export cannot take the place of the one that was opened; `None` if it can.
    fn difference(&self, terms: &Terms) -> Option<String> {
        let (was, is) = (self.opened.size_bytes, terms.size_bytes);
        let what = &self.place.what;
        if was != is {
            return Some(format!(
                "{what}: it has {is} bytes now and had {was}: its transfers fail until it has them again"
            ));
        }
        if self.writable && terms.read_only {
            return Some(format!(
                "{what}: it is read-only now: its transfers fail until it can be written"
            ));
        }
        None
    }

    fn connected(&mut self, connection: Connection, terms: Terms) {
        let away = self.broken_since.elapsed().as_secs_f64();
        tracing::info!("{}: connected again after {away:.1} s", self.place.what);
        self.trouble.clear();
        (self.connection, self.terms, self.refusing) = (Some(connection), terms, false);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    fn refuse(&mut self, why: String) {
        self.refusing = true;
        self.give_up();
        self.failed(why);
    }

    fn failed(&mut self, why: String) {
        if self.trouble != why {
            tracing::warn!("{why}");
            self.trouble = why;
        }
        if self.shared.is_in(Phase::Closing) && self.broken_since.elapsed() >= CLOSE_PATIENCE {
            self.give_up();
        }
        self.retry_at = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Fails all transfers in flight.
    fn give_up(&mut self) {
        for index in self.slots.all() {
            self.end(index, Err(EIO));
        }
        self.slots.restart();
    }

    /// Waits for orders, for the socket, or for the next attempt.
    fn wait(&self) {
        // SAFETY: the mailbox owns the descriptor and outlives this thread.
        let orders = unsafe { BorrowedFd::borrow_raw(self.shared.orders.event_fd()) };
        let mut polled = vec![PollFd::new(&orders, PollFlags::IN)];
        let mut timeout = None;
        match &self.connection {
            Some(connection) => {
                let sending =
                    if connection.out.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
                polled.push(PollFd::from_borrowed_fd(
                    connection.stream.as_fd(),
                    PollFlags::IN | sending,
                ));
            }
            None => {
                let left = self.retry_at.saturating_duration_since(Instant::now());
                timeout = Timespec::try_from(left).ok();
            }
        }
        // Whatever ends the wait, the loop looks at everything.
        let _ = poll(&mut polled, timeout.as_ref());
    }
}
