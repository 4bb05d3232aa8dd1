//! Requests: decodes the 28-byte header and checks it against the session.

use crate::errno::Errno;
use crate::handshake::{ProtocolError, Session};
use crate::wire::{self, Reader, Writer};

/// Longest payload in bytes of a refused write that is skipped and answered with an error. A longer
/// payload ends the connection, because to skip the payload would cost more than a new connection
/// does.
pub const WRITE_SKIP_BYTES_MAX: u32 = 2 * wire::PAYLOAD_BYTES_MAX;

/// A command of a client. FUA on a command that writes nothing is accepted and dropped, if FUA was
/// offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Read the range.
    Read {
        /// Send all data in one chunk; offered with structured replies only.
        df: bool,
    },
    /// Write the payload, which follows the header.
    Write {
        /// Reply only when the data is on stable media.
        fua: bool,
    },
    /// Make all completed writes stable.
    Flush,
    /// Discard the range.
    Trim {
        /// Reply only when the discard is on stable media.
        fua: bool,
    },
    /// Read the range into the cache.
    Cache,
    /// Write zeroes.
    WriteZeroes {
        /// Reply only when the zeroes are on stable media.
        fua: bool,
        /// Keep the space allocated.
        no_hole: bool,
        /// Fail with [`Errno::NotSup`] when writing zeroes would be no faster than writing data.
        fast_zero: bool,
    },
    /// Describe the range in every selected metadata context.
    BlockStatus {
        /// Return one extent only.
        one: bool,
    },
}

impl Command {
    /// The command's number and flags on the wire.
    pub(crate) fn code(self) -> (u16, u16) {
        let flag = |set: bool, flag: u16| if set { flag } else { 0 };
        match self {
            Command::Read { df } => (wire::CMD_READ, flag(df, wire::CMD_FLAG_DF)),
            Command::Write { fua } => (wire::CMD_WRITE, flag(fua, wire::CMD_FLAG_FUA)),
            Command::Flush => (wire::CMD_FLUSH, 0),
            Command::Trim { fua } => (wire::CMD_TRIM, flag(fua, wire::CMD_FLAG_FUA)),
            Command::Cache => (wire::CMD_CACHE, 0),
            Command::WriteZeroes { fua, no_hole, fast_zero } => (
                wire::CMD_WRITE_ZEROES,
                flag(fua, wire::CMD_FLAG_FUA)
                    | flag(no_hole, wire::CMD_FLAG_NO_HOLE)
                    | flag(fast_zero, wire::CMD_FLAG_FAST_ZERO),
            ),
            Command::BlockStatus { one } => {
                (wire::CMD_BLOCK_STATUS, flag(one, wire::CMD_FLAG_REQ_ONE))
            }
        }
    }

    /// The transmission flags that a server must have offered before a client may send the command.
    pub(crate) fn needs(self) -> u16 {
        let fua = |fua: bool| if fua { wire::FLAG_SEND_FUA } else { 0 };
        match self {
            Command::Read { df: true } => wire::FLAG_SEND_DF,
            Command::Read { df: false } | Command::BlockStatus { .. } => 0,
            Command::Write { fua: set } => fua(set),
            Command::Flush => wire::FLAG_SEND_FLUSH,
            Command::Trim { fua: set } => wire::FLAG_SEND_TRIM | fua(set),
            Command::Cache => wire::FLAG_SEND_CACHE,
            Command::WriteZeroes { fua: set, fast_zero, .. } => {
                let fast = if fast_zero { wire::FLAG_SEND_FAST_ZERO } else { 0 };
                wire::FLAG_SEND_WRITE_ZEROES | fast | fua(set)
            }
        }
    }

    /// Whether the command changes the export.
    pub fn writes(self) -> bool {
        matches!(self, Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. })
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The number that the client gave the request; the reply returns it.
    pub cookie: u64,
    /// Byte offset of the range.
    pub offset: u64,
    /// Length of the range in bytes; for a write, also the length of the payload.
    pub len: u32,
    /// The command.
    pub command: Command,
}

impl Request {
    /// The header in wire format.
    pub fn encode(&self) -> [u8; wire::REQUEST_BYTES] {
        let (kind, flags) = self.command.code();
        encode(flags, kind, self.cookie, self.offset, self.len)
    }
}

/// A header in wire format with any numbers: for tests, and for `DISC`.
pub fn encode(
    flags: u16,
    kind: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; wire::REQUEST_BYTES] {
    let mut out = [0; wire::REQUEST_BYTES];
    Writer::new(&mut out)
        .u32(wire::MAGIC_REQUEST)
        .u16(flags)
        .u16(kind)
        .u64(cookie)
        .u64(offset)
        .u32(len);
    out
}

/// What a server does with a request header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incoming {
    /// Execute the request. The payload of a write, [`Request::len`] bytes, follows in the stream.
    Execute(Request),
    /// Skip the payload if there is one, then answer with the error.
    Refuse(Refusal),
    /// The client disconnects: finish the requests in flight and close the connection. There is no
    /// reply.
    Disconnect,
}

/// A request that is answered with an error at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The number that the client gave the request.
    pub cookie: u64,
    /// The error.
    pub errno: Errno,
    /// A message for the client's user; sent in a structured reply.
    pub message: &'static str,
    /// Bytes of payload to skip before the reply.
    pub payload_bytes: u32,
}

/// An error and its message.
type Fault = (Errno, &'static str);

impl Session {
    /// Decodes a request's header and checks it.
    ///
    /// # Errors
    /// The stream cannot be decoded any further: drop the connection.
    pub fn request(&self, header: &[u8; wire::REQUEST_BYTES]) -> Result<Incoming, ProtocolError> {
        let mut reader = Reader(header);
        let magic = reader.u32().unwrap_or_default();
        if magic != wire::MAGIC_REQUEST {
            return Err(ProtocolError::RequestMagic(magic));
        }
        let flags = reader.u16().unwrap_or_default();
        let kind = reader.u16().unwrap_or_default();
        let cookie = reader.u64().unwrap_or_default();
        let offset = reader.u64().unwrap_or_default();
        let len = reader.u32().unwrap_or_default();
        if kind == wire::CMD_DISC {
            return Ok(Incoming::Disconnect);
        }
        let payload_bytes = if kind == wire::CMD_WRITE { len } else { 0 };
        if payload_bytes > WRITE_SKIP_BYTES_MAX {
            return Err(ProtocolError::PayloadTooLong(payload_bytes));
        }
        let checked = self.command(kind, flags).and_then(|command| {
            let request = Request { cookie, offset, len, command };
            self.check(&request).map(|()| request)
        });
        Ok(match checked {
            Ok(request) => Incoming::Execute(request),
            Err((errno, message)) => {
                Incoming::Refuse(Refusal { cookie, errno, message, payload_bytes })
            }
        })
    }

    /// Whether `sent`, which begins with a request's header, contains a `DISC` after any number of
    /// whole requests. The payloads of writes are skipped.
    pub fn says_goodbye(&self, mut sent: &[u8]) -> bool {
        while let Some((header, rest)) = sent.split_first_chunk() {
            let payload_bytes = match self.request(header) {
                Ok(Incoming::Execute(Request { command: Command::Write { .. }, len, .. })) => len,
                Ok(Incoming::Execute(_)) => 0,
                Ok(Incoming::Refuse(refusal)) => refusal.payload_bytes,
                Ok(Incoming::Disconnect) => return true,
                Err(_) => return false,
            };
            let Some(rest) = rest.get(payload_bytes as usize..) else { return false };
            sent = rest;
        }
        false
    }

    /// Returns the command if the command and all its flags are known and were offered. A command
    /// that writes to a read-only export is refused.
    fn command(&self, kind: u16, flags: u16) -> Result<Command, Fault> {
        let has = |flag: u16| flags & flag != 0;
        let fua = has(wire::CMD_FLAG_FUA);
        let (command, allowed) = match kind {
            wire::CMD_READ => (Command::Read { df: has(wire::CMD_FLAG_DF) }, wire::CMD_FLAG_DF),
            wire::CMD_WRITE => (Command::Write { fua }, 0),
            wire::CMD_FLUSH => (Command::Flush, 0),
            wire::CMD_TRIM => (Command::Trim { fua }, 0),
            wire::CMD_CACHE => (Command::Cache, 0),
            wire::CMD_WRITE_ZEROES => (
                Command::WriteZeroes {
                    fua,
                    no_hole: has(wire::CMD_FLAG_NO_HOLE),
                    fast_zero: has(wire::CMD_FLAG_FAST_ZERO),
                },
                wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO,
            ),
            wire::CMD_BLOCK_STATUS => {
                (Command::BlockStatus { one: has(wire::CMD_FLAG_REQ_ONE) }, wire::CMD_FLAG_REQ_ONE)
            }
            _ => return Err((Errno::Inval, "unknown command")),
        };
        // FUA is valid on every command, also where FUA changes nothing.
        if flags & !(allowed | wire::CMD_FLAG_FUA) != 0 {
            return Err((Errno::Inval, "the flags do not fit the command"));
        }
        if self.flags & wire::FLAG_READ_ONLY != 0 && command.writes() {
            return Err((Errno::Perm, "the export is read-only"));
        }
        let fua_offered = self.flags & wire::FLAG_SEND_FUA != 0;
        if command.needs() & !self.flags != 0 || (fua && !fua_offered) {
            return Err((Errno::Inval, "the command or a flag of it was not offered"));
        }
        Ok(command)
    }

    fn check(&self, request: &Request) -> Result<(), Fault> {
        let Request { offset, len, command, .. } = *request;
        if command == Command::Flush {
            if offset != 0 || len != 0 {
                return Err((Errno::Inval, "a flush has no range"));
            }
            return Ok(());
        }
        if matches!(command, Command::BlockStatus { .. })
            && (self.contexts.is_empty() || !self.structured)
        {
            return Err((Errno::Inval, "no metadata context was selected"));
        }
        if len == 0 {
            return Err((Errno::Inval, "the range is empty"));
        }
        self.check_size(command, len)?;
        if offset.checked_add(u64::from(len)).is_none_or(|end| end > self.size_bytes) {
            let errno = match command {
                Command::Write { .. } | Command::WriteZeroes { .. } => Errno::NoSpc,
                _ => Errno::Inval,
            };
            return Err((errno, "the range ends behind the export"));
        }
        let min = u64::from(self.block_sizes.min_bytes.max(1));
        if offset % min != 0 || u64::from(len) % min != 0 {
            return Err((Errno::Inval, "the range is not aligned to the minimum block size"));
        }
        Ok(())
    }

    fn check_size(&self, command: Command, len: u32) -> Result<(), Fault> {
        const TOO_LONG: &str = "the range is longer than the maximum payload";
        if len <= self.block_sizes.payload_bytes_max {
            return Ok(());
        }
        match command {
            Command::Read { .. } if self.structured => Err((Errno::Overflow, TOO_LONG)),
            Command::Read { .. } | Command::Write { .. } => Err((Errno::Inval, TOO_LONG)),
            // `CACHE` carries no payload, but makes the server read the whole range.
            Command::Cache => Err((Errno::Overflow, TOO_LONG)),
            _ => Ok(()),
        }
    }
}
