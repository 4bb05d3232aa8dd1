//! From the core's answers to NBD replies.
//!
//! A read in several pieces is answered in whatever order they come when the client takes
//! structured replies. Otherwise (or when it asked for one chunk) the reply is one stream: the
//! pieces wait for their turn, and no other reply can come between them. It begins when all of them
//! are there, so that an error can still be told. Only when memory for the rest is short, and
//! nothing else of the connection is under way that could free some, it begins earlier; an error
//! then ends the connection, as the protocol demands.

use crate::shard::core::Core;
use crate::shard::io::volume::Kind;
use crate::shard::net::connection::{Connection, Stall};
use crate::shard::net::requests::Asked;
use crate::shard::shared::Shared;
use tidepool_engine::api::{BLOCK_BYTES, RequestError};
use tidepool_engine::mem::Buf;
use tidepool_nbd::{Command, Errno, reply};

fn errno(error: RequestError) -> Errno {
    match error {
        RequestError::Invalid => Errno::Inval,
        RequestError::ReadOnly => Errno::Perm,
        RequestError::Io => Errno::Io,
        RequestError::Shutdown => Errno::Shutdown,
    }
}

/// A line for the client's user.
fn message(errno: Errno) -> &'static str {
    match errno {
        Errno::Io => "the data cannot be read or written; see the daemon's log",
        Errno::Shutdown => "the volume is going away",
        Errno::Perm => "the volume is read-only",
        _ => "the request does not fit the volume",
    }
}

impl Asked {
    /// All of it has been handed to the core and has come back.
    fn is_complete(&self) -> bool {
        self.issued == self.len && self.pieces == 0
    }

    fn in_several_pieces(&self, len: u32) -> bool {
        len < self.len
    }
}

/// The client's bytes in a piece's buffer.
fn payload(buf: Buf, offset: u64, len: u32) -> Buf {
    buf.slice((offset % BLOCK_BYTES as u64) as usize, len as usize)
}

impl Connection {
    /// The core is done with a piece.
    pub(in crate::shard) fn piece_done<C: Core>(
        &mut self,
        slot: u32,
        result: Result<(), RequestError>,
        shared: &mut Shared<C>,
    ) {
        let piece = self.pieces.get_mut(slot).expect("the core answers every request once");
        let (request, offset, len, buf) = (piece.request, piece.offset, piece.len, piece.buf);
        if buf.is_none() && len > 0 {
            shared.effort.end_range(piece.range_of, len.into());
            shared.range_ended = true;
        }
        if std::mem::take(&mut piece.gated)
            && let Some(volume) = self.volume.and_then(|id| shared.volumes.get_mut(id))
        {
            volume.gate.leave();
        }
        self.turn.wake |= self.stall == Some(Stall::Own);
        let structured = self.structured();
        if result == Err(RequestError::Shutdown) {
            // The daemon or the volume comes again: a client asks again then, and would hand an
            // error on to its guest.
            self.break_off();
        }
        if self.broken() {
            return self.drop_piece(slot, shared);
        }
        let asked = self.requests.get_mut(request).expect("it stays until its pieces are done");
        asked.pieces -= 1;
        let read = match asked.command {
            Command::Read { df } => Some(df),
            _ => None,
        };
        let failed = result.err().map(errno);
        match (read, buf) {
            (Some(df), Some(_)) if asked.in_several_pieces(len) && (df || !structured) => {
                asked.error = asked.error.or(failed);
                piece_waits(self, slot, failed.is_some(), shared);
                self.advance(request, shared);
            }
            (Some(_), Some(buf)) if structured => {
                self.pieces.remove(slot);
                self.chunk(request, (offset, len, buf), failed, shared);
            }
            (Some(_), Some(buf)) if failed.is_none() => {
                self.pieces.remove(slot);
                let cookie = asked.cookie;
                self.outbox.push(Some(payload(buf, offset, len)), Some(buf), |head| {
                    reply::simple(head, cookie)
                });
                self.record(request, shared);
            }
            _ => {
                asked.error = asked.error.or(failed);
                let complete = asked.is_complete();
                self.drop_piece(slot, shared);
                if complete {
                    self.finish(request, shared);
                }
            }
        }
    }

    fn drop_piece<C: Core>(&mut self, slot: u32, shared: &mut Shared<C>) {
        if let Some(buf) = self.pieces.remove(slot).buf {
            shared.free(&mut self.held, buf);
        }
    }

    /// Answers a piece of a structured read.
    fn chunk<C: Core>(
        &mut self,
        request: u32,
        piece: (u64, u32, Buf),
        failed: Option<Errno>,
        shared: &mut Shared<C>,
    ) {
        let (offset, len, buf) = piece;
        let Some(asked) = self.requests.get_mut(request) else { return };
        let (cookie, last) = (asked.cookie, asked.is_complete());
        asked.error = asked.error.or(failed);
        match failed {
            None => self.outbox.push(Some(payload(buf, offset, len)), Some(buf), |head| {
                reply::data(head, cookie, offset, len, last)
            }),
            Some(errno) => {
                let fault = reply::Fault { errno, offset, message: message(errno) };
                self.outbox
                    .push(None, Some(buf), |head| reply::error_at(head, cookie, &fault, last));
            }
        }
        if last {
            self.record(request, shared);
        }
    }

    /// Moves the pieces of an ordered read whose turn it is to the outbox.
    fn advance<C: Core>(&mut self, request: u32, shared: &mut Shared<C>) {
        let (structured, alone) = (self.structured(), self.requests.len() == 1);
        let Some(asked) = self.requests.get_mut(request) else { return };
        if asked.error.is_some() {
            return self.give_up_ordered(request, shared);
        }
        // What would wait for the rest while the rest waits for its memory must leave.
        let stuck = self.stall.is_some() && alone;
        if !asked.is_complete() && asked.queued == 0 && !stuck {
            return;
        }
        loop {
            let Some(asked) = self.requests.get_mut(request) else { return };
            let turn = asked.offset + u64::from(asked.queued);
            let next = self
                .pieces
                .iter()
                .find(|(_, p)| p.request == request && p.done && p.offset == turn);
            let Some((slot, _)) = next else { break };
            let piece = self.pieces.remove(slot);
            let Some(buf) = piece.buf else { break };
            let (cookie, offset, len, first) =
                (asked.cookie, asked.offset, asked.len, asked.queued == 0);
            asked.queued += piece.len;
            self.outbox.push(Some(payload(buf, piece.offset, piece.len)), Some(buf), |head| {
                if first { reply::read(head, structured, cookie, offset, len) } else { 0 }
            });
        }
        if self.requests.get(request).is_some_and(|a| a.queued == a.len) {
            self.record(request, shared);
        }
    }

    /// The rest of a request has to wait: the beginning of an ordered read must not wait for it.
    pub(in crate::shard) fn stalled<C: Core>(&mut self, request: u32, shared: &mut Shared<C>) {
        let structured = self.structured();
        let ordered = |a: &&Asked| matches!(a.command, Command::Read { df } if df || !structured);
        if self.requests.get(request).filter(ordered).is_some() {
            self.advance(request, shared);
        }
    }

    /// An ordered read has failed: say so, if nothing of it has been sent.
    fn give_up_ordered<C: Core>(&mut self, request: u32, shared: &mut Shared<C>) {
        loop {
            let done = self
                .pieces
                .iter()
                .find(|(_, p)| p.request == request && p.done)
                .map(|(slot, _)| slot);
            let Some(slot) = done else { break };
            self.drop_piece(slot, shared);
        }
        let Some(asked) = self.requests.get_mut(request) else { return };
        asked.issued = asked.len;
        if asked.queued > 0 {
            tracing::warn!(peer = %self.peer, "closing a connection: a read failed whose reply had begun");
            self.break_off();
        } else if asked.pieces == 0 {
            self.finish(request, shared);
        }
    }

    /// Answers a request that needs no data in its reply, or has failed.
    pub(in crate::shard) fn finish<C: Core>(&mut self, request: u32, shared: &mut Shared<C>) {
        let structured = self.structured();
        let Some(asked) = self.requests.get(request) else { return };
        let (cookie, error) = (asked.cookie, asked.error);
        self.outbox.push(None, None, |head| match error {
            None => reply::simple(head, cookie),
            Some(errno) => reply::error(head, structured, cookie, errno, message(errno)),
        });
        self.record(request, shared);
    }

    /// A request is answered: it counts, and its place is free.
    fn record<C: Core>(&mut self, request: u32, shared: &mut Shared<C>) {
        let asked = self.requests.remove(request);
        if self.stall.is_some()
            && let Some(next) = self.issuing()
        {
            self.stalled(next, shared);
        }
        if asked.error.is_some() {
            shared.count.request_errors += 1;
        }
        let kind = match asked.command {
            Command::Read { .. } => Kind::Read,
            Command::Flush => Kind::Flush,
            Command::Cache | Command::BlockStatus { .. } => return,
            _ => Kind::Write,
        };
        if let Some(volume) = self.volume.and_then(|id| shared.volumes.get_mut(id)) {
            volume.record(kind, shared.now.saturating_sub(asked.received_ns));
        }
    }
}

/// A piece of an ordered read has come back; a failed one is of no use any more.
fn piece_waits<C: Core>(
    connection: &mut Connection,
    slot: u32,
    failed: bool,
    shared: &mut Shared<C>,
) {
    if failed {
        connection.drop_piece(slot, shared);
    } else if let Some(piece) = connection.pieces.get_mut(slot) {
        piece.done = true;
    }
}
