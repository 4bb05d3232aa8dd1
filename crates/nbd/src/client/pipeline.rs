//! The client's transmission phase without I/O: keeps the requests in flight and decodes replies.

use super::{ClientError, Negotiated};
use crate::errno::Errno;
use crate::request::{Command, Request};
use crate::wire::{self, Reader};
use std::fmt;

/// Most requests in flight on one connection.
pub const DEPTH_MAX: usize = 65_536;
/// Longest error chunk in bytes.
const ERROR_BYTES_MAX: u32 = 16 << 10;
/// Longest block status chunk in bytes: the protocol's 2^20 descriptors.
const STATUS_BYTES_MAX: u32 = 4 + (8 << 20);

/// A request that the server answered with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The error.
    pub errno: Errno,
    /// The server's message; may be empty.
    pub message: String,
    /// Byte offset in the export at which the request failed, if the server sent one.
    pub offset: Option<u64>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.errno)?;
        if let Some(offset) = self.offset {
            write!(f, " at byte {offset}")?;
        }
        if !self.message.is_empty() {
            write!(f, " ({})", self.message.escape_debug())?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Takes the content of replies. `tag` is the number that the caller gave the request. `at` is a
/// byte offset from the start of the request. The ranges of `data` and `zeroes` lie inside the
/// request.
pub trait Sink {
    /// Data of a read.
    fn data(&mut self, tag: u64, at: u32, bytes: &[u8]);
    /// Zeroes of a read.
    fn zeroes(&mut self, tag: u64, at: u32, len: u32);
    /// The next extent of a block status in the context with this id. In each context the first
    /// extent begins at the request's offset, and each further extent begins where the extent
    /// before ends. The last extent may end behind the request.
    fn status(&mut self, tag: u64, context: u32, len: u32, flags: u32);
    /// The request is complete. This is the last call for this tag.
    fn completed(&mut self, tag: u64, result: Result<(), Failure>);
}

#[derive(Debug)]
struct Slot {
    /// Upper half of the cookie, increased when the slot becomes free. It distinguishes a reply to
    /// the slot's current request from a late reply to an earlier request and from an invented
    /// reply.
    round: u32,
    tag: u64,
    request: Option<Request>,
    /// Bytes of a read that have been received.
    covered: u64,
    /// Chunks of a block status that have been received.
    chunks: u32,
    failure: Option<Failure>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// The first 16 bytes of a reply; a chunk's header has four more.
    Head,
    ChunkLen {
        flags: u16,
        kind: u16,
        slot: u32,
    },
    DataOffset {
        slot: u32,
        done: bool,
        len: u32,
    },
    Data {
        slot: u32,
        done: bool,
        at: u32,
        left: u32,
    },
    Hole {
        slot: u32,
        done: bool,
    },
    StatusContext {
        slot: u32,
        done: bool,
        len: u32,
    },
    Status {
        slot: u32,
        done: bool,
        context: u32,
        left: u32,
    },
    Error {
        slot: u32,
        done: bool,
        kind: u16,
        len: u32,
    },
    Broken,
}

/// Gives requests their cookies, and assigns replies to requests.
#[derive(Debug)]
pub struct Pipeline {
    slots: Vec<Slot>,
    free: Vec<u32>,
    state: State,
    partial: Vec<u8>,
    flags: u16,
    structured: bool,
    status: bool,
}

impl Pipeline {
    /// For up to `depth` requests in flight on a connection; `depth` is limited to 1 to
    /// [`DEPTH_MAX`].
    pub fn new(negotiated: &Negotiated, depth: usize) -> Pipeline {
        let depth = depth.clamp(1, DEPTH_MAX);
        let slot =
            |_| Slot { round: 0, tag: 0, request: None, covered: 0, chunks: 0, failure: None };
        Pipeline {
            slots: (0..depth).map(slot).collect(),
            free: (0..depth as u32).rev().collect(),
            state: State::Head,
            partial: Vec::with_capacity(wire::CHUNK_HEADER_BYTES),
            flags: negotiated.flags,
            structured: negotiated.structured,
            status: !negotiated.contexts.is_empty(),
        }
    }

    /// Requests that are not answered yet.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Number of further requests for which there is room.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Registers a request and returns the header to send. A write's payload follows the header.
    ///
    /// # Errors
    /// The server does not offer the command, or all slots are in use.
    pub fn submit(
        &mut self,
        tag: u64,
        command: Command,
        offset: u64,
        len: u32,
    ) -> Result<[u8; wire::REQUEST_BYTES], ClientError> {
        let missing = command.needs() & !self.flags != 0;
        match command {
            Command::BlockStatus { .. } if !self.status => {
                return Err(ClientError::Unsupported("the metadata contexts that were asked for"));
            }
            Command::Flush if missing => return Err(ClientError::Unsupported("flush")),
            Command::Trim { .. } if missing => return Err(ClientError::Unsupported("trim")),
            Command::WriteZeroes { .. } if missing => {
                return Err(ClientError::Unsupported("write zeroes"));
            }
            Command::Cache if missing => return Err(ClientError::Unsupported("cache")),
            Command::Read { .. } if missing => {
                return Err(ClientError::Unsupported("unfragmented reads"));
            }
            Command::Write { .. } if missing => return Err(ClientError::Unsupported("FUA")),
            _ => {}
        }
        let index = self.free.pop().ok_or(ClientError::Usage("too many requests in flight"))?;
        let slot = &mut self.slots[index as usize];
        let cookie = u64::from(slot.round) << 32 | u64::from(index);
        let request = Request { cookie, offset, len, command };
        *slot = Slot {
            round: slot.round,
            tag,
            request: Some(request),
            covered: 0,
            chunks: 0,
            failure: None,
        };
        Ok(request.encode())
    }

    /// Takes all of `input`, which may begin and end anywhere in a reply, and hands the content to
    /// `sink`.
    ///
    /// # Errors
    /// The server broke the protocol: drop the connection. Further bytes are refused.
    pub fn receive(&mut self, mut input: &[u8], sink: &mut dyn Sink) -> Result<(), ClientError> {
        while !input.is_empty() {
            match self.step(input, sink) {
                Ok(taken) => input = &input[taken..],
                Err(error) => {
                    self.state = State::Broken;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, input: &[u8], sink: &mut dyn Sink) -> Result<usize, ClientError> {
        if let State::Data { slot, done, at, left } = self.state {
            let some = (left as usize).min(input.len());
            let (tag, _) = self.active(slot)?;
            sink.data(tag, at, &input[..some]);
            self.state = State::Data { slot, done, at: at + some as u32, left: left - some as u32 };
            if left as usize == some {
                self.chunk_over(slot, done, sink)?;
            }
            return Ok(some);
        }
        let need = match self.state {
            State::Head => 16,
            State::ChunkLen { .. } | State::StatusContext { .. } => 4,
            State::DataOffset { .. } | State::Status { .. } => 8,
            State::Hole { .. } => 12,
            State::Error { len, .. } => len as usize,
            State::Data { .. } | State::Broken => {
                return Err(ClientError::Protocol("it went on after an error"));
            }
        };
        let some = (need - self.partial.len()).min(input.len());
        self.partial.extend_from_slice(&input[..some]);
        if self.partial.len() == need {
            let mut gathered = std::mem::take(&mut self.partial);
            self.gathered(&gathered, sink)?;
            gathered.clear();
            self.partial = gathered;
        }
        Ok(some)
    }

    fn gathered(&mut self, bytes: &[u8], sink: &mut dyn Sink) -> Result<(), ClientError> {
        const SHORT: ClientError = ClientError::Protocol("a reply is malformed");
        let mut reader = Reader(bytes);
        match self.state {
            State::Head => self.head(reader, sink),
            State::ChunkLen { flags, kind, slot } => self.chunk(
                slot,
                flags & wire::REPLY_FLAG_DONE != 0,
                kind,
                reader.u32().ok_or(SHORT)?,
                sink,
            ),
            State::DataOffset { slot, done, len } => {
                let at = self.cover(slot, reader.u64().ok_or(SHORT)?, len)?;
                self.state = State::Data { slot, done, at, left: len };
                Ok(())
            }
            State::Hole { slot, done } => {
                let (offset, len) = (reader.u64().ok_or(SHORT)?, reader.u32().ok_or(SHORT)?);
                let at = self.cover(slot, offset, len)?;
                sink.zeroes(self.slots[slot as usize].tag, at, len);
                self.chunk_over(slot, done, sink)
            }
            State::StatusContext { slot, done, len } => {
                let context = reader.u32().ok_or(SHORT)?;
                self.state = State::Status { slot, done, context, left: len };
                Ok(())
            }
            State::Status { slot, done, context, left } => {
                let (len, flags) = (reader.u32().ok_or(SHORT)?, reader.u32().ok_or(SHORT)?);
                if len == 0 {
                    return Err(ClientError::Protocol("an extent is empty"));
                }
                sink.status(self.slots[slot as usize].tag, context, len, flags);
                if left == 8 {
                    return self.chunk_over(slot, done, sink);
                }
                self.state = State::Status { slot, done, context, left: left - 8 };
                Ok(())
            }
            State::Error { slot, done, kind, .. } => {
                let failure = failure(kind, reader).ok_or(SHORT)?;
                self.slots[slot as usize].failure.get_or_insert(failure);
                self.chunk_over(slot, done, sink)
            }
            State::Data { .. } | State::Broken => Err(SHORT),
        }
    }

    /// Decodes the first 16 bytes: all of a simple reply, or all but 4 bytes of a chunk's header.
    fn head(&mut self, mut reader: Reader<'_>, sink: &mut dyn Sink) -> Result<(), ClientError> {
        const SHORT: ClientError = ClientError::Protocol("a reply is malformed");
        let magic = reader.u32().ok_or(SHORT)?;
        if magic == wire::MAGIC_STRUCTURED_REPLY && self.structured {
            let (flags, kind) = (reader.u16().ok_or(SHORT)?, reader.u16().ok_or(SHORT)?);
            let slot = self.find(reader.u64().ok_or(SHORT)?)?;
            self.state = State::ChunkLen { flags, kind, slot };
            return Ok(());
        }
        if magic != wire::MAGIC_SIMPLE_REPLY {
            return Err(ClientError::Protocol("a reply begins with a wrong magic number"));
        }
        let error = reader.u32().ok_or(SHORT)?;
        let slot = self.find(reader.u64().ok_or(SHORT)?)?;
        let (_, request) = self.active(slot)?;
        if let Some(errno) = Errno::from_wire(error) {
            let failure = Failure { errno, message: String::new(), offset: None };
            self.slots[slot as usize].failure.get_or_insert(failure);
            return self.chunk_over(slot, true, sink);
        }
        match request.command {
            Command::Read { .. } if self.structured => {
                Err(ClientError::Protocol("a read was answered without structure"))
            }
            Command::Read { .. } if request.len > 0 => {
                self.slots[slot as usize].covered = u64::from(request.len);
                self.state = State::Data { slot, done: true, at: 0, left: request.len };
                Ok(())
            }
            _ => self.chunk_over(slot, true, sink),
        }
    }

    /// Decodes a chunk's header, which is complete.
    fn chunk(
        &mut self,
        slot: u32,
        done: bool,
        kind: u16,
        len: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), ClientError> {
        let (_, request) = self.active(slot)?;
        let reading = matches!(request.command, Command::Read { .. });
        self.state = match kind {
            wire::REPLY_NONE if len == 0 && done => return self.chunk_over(slot, true, sink),
            wire::REPLY_OFFSET_DATA if reading && len > 8 => {
                State::DataOffset { slot, done, len: len - 8 }
            }
            wire::REPLY_OFFSET_HOLE if reading && len == 12 => State::Hole { slot, done },
            wire::REPLY_BLOCK_STATUS
                if matches!(request.command, Command::BlockStatus { .. })
                    && len >= 12
                    && len % 8 == 4
                    && len <= STATUS_BYTES_MAX =>
            {
                self.slots[slot as usize].chunks += 1;
                State::StatusContext { slot, done, len: len - 4 }
            }
            kind if kind & wire::REPLY_ERROR_BIT != 0 && (6..=ERROR_BYTES_MAX).contains(&len) => {
                State::Error { slot, done, kind, len }
            }
            _ => {
                return Err(ClientError::Protocol(
                    "a reply chunk is of an unexpected type or length",
                ));
            }
        };
        Ok(())
    }

    /// Counts `len` bytes of a read as received. Returns the bytes' offset from the start of the
    /// request.
    fn cover(&mut self, slot: u32, offset: u64, len: u32) -> Result<u32, ClientError> {
        const OUTSIDE: ClientError =
            ClientError::Protocol("a read was answered with bytes outside of it");
        let (_, request) = self.active(slot)?;
        let at = offset.checked_sub(request.offset).ok_or(OUTSIDE)?;
        let covered = self.slots[slot as usize].covered + u64::from(len);
        // `at` is compared first, so that the sum cannot overflow.
        if len == 0 || at > u64::from(request.len) || at + u64::from(len) > u64::from(request.len) {
            return Err(OUTSIDE);
        }
        if covered > u64::from(request.len) {
            return Err(ClientError::Protocol("a read was answered with overlapping chunks"));
        }
        self.slots[slot as usize].covered = covered;
        Ok(at as u32)
    }

    fn chunk_over(
        &mut self,
        index: u32,
        done: bool,
        sink: &mut dyn Sink,
    ) -> Result<(), ClientError> {
        self.state = State::Head;
        if !done {
            return Ok(());
        }
        let (tag, request) = self.active(index)?;
        let slot = &mut self.slots[index as usize];
        let result = match slot.failure.take() {
            Some(failure) => Err(failure),
            None => {
                let short = match request.command {
                    Command::Read { .. } => slot.covered != u64::from(request.len),
                    Command::BlockStatus { .. } => slot.chunks == 0,
                    _ => false,
                };
                if short {
                    return Err(ClientError::Protocol("a reply ended before all of it had come"));
                }
                Ok(())
            }
        };
        slot.request = None;
        slot.round = slot.round.wrapping_add(1);
        self.free.push(index);
        sink.completed(tag, result);
        Ok(())
    }

    fn find(&self, cookie: u64) -> Result<u32, ClientError> {
        let index = cookie as u32;
        match self.slots.get(index as usize) {
            Some(Slot { request: Some(request), .. }) if request.cookie == cookie => Ok(index),
            _ => Err(ClientError::Protocol("a reply belongs to no request")),
        }
    }

    fn active(&self, index: u32) -> Result<(u64, Request), ClientError> {
        match &self.slots[index as usize] {
            Slot { tag, request: Some(request), .. } => Ok((*tag, *request)),
            _ => Err(ClientError::Protocol("a reply belongs to no request")),
        }
    }
}

/// Decodes an error chunk's payload. Unknown error types begin with the same fields as known ones.
fn failure(kind: u16, mut reader: Reader<'_>) -> Option<Failure> {
    let errno = Errno::from_wire(reader.u32()?).unwrap_or(Errno::Inval);
    let len = reader.u16()?;
    let message = reader.bytes(usize::from(len))?;
    let message = String::from_utf8_lossy(message);
    let message = wire::cut(&message, wire::STRING_BYTES_MAX).to_owned();
    let offset = if kind == wire::REPLY_ERROR_OFFSET { Some(reader.u64()?) } else { None };
    Some(Failure { errno, message, offset })
}
