//! A client's requests on their way into the core, piece by piece.

use super::connection::{Connection, Stall, State};
use crate::shard::core::Core;
use crate::shard::front::effort;
use crate::shard::front::gate::{self, PieceName, Unaligned};
use crate::shard::io::volume::Volume;
use crate::shard::limits::EXTENTS_MAX;
use crate::shard::shared::Shared;
use tidepool_engine::api::{
    BLOCK_BYTES, Nanos, Op, REQUEST_BYTES_MAX, Request, RequestId, SECTOR_BYTES, VolumeId,
    buffer_bytes,
};
use tidepool_engine::mem::Buf;
use tidepool_nbd::{Command, Context, Errno, Incoming, reply, wire};

const SECTOR: u64 = SECTOR_BYTES as u64;

/// A client's request between its header and its reply.
pub(in crate::shard) struct Asked {
    pub(super) cookie: u64,
    pub(super) command: Command,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) received_ns: Nanos,
    /// Bytes of the range that are in pieces already.
    pub(super) issued: u32,
    /// Pieces in the core.
    pub(super) pieces: u32,
    /// The first error of a piece.
    pub(super) error: Option<Errno>,
    /// Bytes of an ordered read that are in the outbox.
    pub(super) queued: u32,
}

/// A part of a request that is in the core, or waits for its turn in an ordered read.
pub(in crate::shard) struct Piece {
    pub(super) request: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) buf: Option<Buf>,
    /// It counts at the gate of its volume.
    pub(super) gated: bool,
    /// Read, but the pieces before it are not.
    pub(super) done: bool,
    /// It counts among the trims and write-zeroes of this volume, of which the connection may know
    /// no more when it ends.
    pub(super) range_of: Option<VolumeId>,
}

impl Connection {
    /// Room for one more request or piece, and for the replies of all that are under way.
    fn has_room(&self) -> bool {
        let open = self.requests.len() + self.pieces.len();
        !self.requests.is_full() && !self.pieces.is_full() && self.outbox.room() > open + 1
    }

    pub(super) fn header<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        let Some(header) = self.inbox.unread().first_chunk::<{ wire::REQUEST_BYTES }>() else {
            return false;
        };
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
        let slot =
            self.requests.insert(asked).expect("room was checked before the header was taken");
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
    pub(super) fn issue<C: Core>(&mut self, slot: u32, shared: &mut Shared<C>) -> bool {
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
    pub(in crate::shard) fn issuing(&self) -> Option<u32> {
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
    pub(super) fn payload<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
        let State::Payload { request, buf, offset, len, filled } = &mut self.state else {
            return false;
        };
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
            Piece {
                request,
                offset,
                len,
                buf: Some(buf),
                gated: false,
                done: false,
                range_of: None,
            },
            shared,
        );
        true
    }

    pub(super) fn skip<C: Core>(&mut self, shared: &mut Shared<C>) -> bool {
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
            let mut status =
                reply::BlockStatus::new(out, request.cookie, context.id(), request.len, one);
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
pub(in crate::shard) fn piece_of(id: RequestId) -> PieceName {
    PieceName { connection: (id >> 32) as u32, piece: id as u32 }
}
