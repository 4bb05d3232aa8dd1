//! Requests: the 28-byte header, taken apart and checked against what was agreed on.

use crate::errno::Errno;
use crate::handshake::{ProtocolError, Session};
use crate::wire::{self, Reader, Writer};

/// Longest write payload above the export's maximum that is skipped with an error reply. A longer one
/// would cost more than a new connection does.
pub const WRITE_SKIP_BYTES_MAX: u32 = 2 * wire::PAYLOAD_BYTES_MAX;

/// What a client wants done. Flags that change nothing (FUA on a command that writes nothing) are
/// accepted and dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Read.
    Read {
        /// All data in one chunk, if the reply is structured.
        df: bool,
    },
    /// Write; the payload follows the header.
    Write {
        /// Reply when it is on stable media.
        fua: bool,
    },
    /// Make everything completed stable.
    Flush,
    /// Discard.
    Trim {
        /// Reply when it is on stable media.
        fua: bool,
    },
    /// Bring into the cache.
    Cache,
    /// Write zeroes.
    WriteZeroes {
        /// Reply when it is on stable media.
        fua: bool,
        /// Keep the space allocated.
        no_hole: bool,
        /// Fail with [`Errno::NotSup`] when it would be no faster than writing.
        fast_zero: bool,
    },
    /// Describe the range in every selected metadata context.
    BlockStatus {
        /// One extent only.
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
            Command::BlockStatus { one } => (wire::CMD_BLOCK_STATUS, flag(one, wire::CMD_FLAG_REQ_ONE)),
        }
    }

    /// The transmission flags without which a client must not send it.
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

    /// Does it change the export?
    pub fn writes(self) -> bool {
        matches!(self, Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. })
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The client's name for it; returned in the reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes; of a write's payload, too.
    pub len: u32,
    /// What to do.
    pub command: Command,
}

impl Request {
    /// The header as it stands on the wire.
    pub fn encode(&self) -> [u8; wire::REQUEST_BYTES] {
        let (kind, flags) = self.command.code();
        encode(flags, kind, self.cookie, self.offset, self.len)
    }
}

/// A header as it stands on the wire, of any numbers: for tests, and for `DISC`.
pub fn encode(flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) -> [u8; wire::REQUEST_BYTES] {
    let mut out = [0; wire::REQUEST_BYTES];
    Writer::new(&mut out).u32(wire::MAGIC_REQUEST).u16(flags).u16(kind).u64(cookie).u64(offset).u32(len);
    out
}

/// What a server does with a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incoming {
    /// Execute it. A write's payload of [`Request::len`] bytes follows in the stream.
    Execute(Request),
    /// Skip the payload if there is one, then answer with the error.
    Refuse(Refusal),
    /// The client says good-bye: finish what is in flight and close. There is no reply.
    Disconnect,
}

/// A request that is answered with an error at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The client's name for the request.
    pub cookie: u64,
    /// The error.
    pub errno: Errno,
    /// A line for the client's user; goes into a structured reply.
    pub message: &'static str,
    /// Bytes of payload to be skipped first.
    pub payload_bytes: u32,
}

/// An error and the line that goes with it.
type Fault = (Errno, &'static str);

impl Session {
    /// Takes a request's header apart and checks it.
    ///
    /// # Errors
    /// The stream cannot be followed any further: drop the connection.
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
            Err((errno, message)) => Incoming::Refuse(Refusal { cookie, errno, message, payload_bytes }),
        })
    }

    /// Whether what a client has sent, from the header of a request on, comes to its good-bye.
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

    /// The command, if it and all its flags are known and were offered.
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
        // FUA is valid on all commands, also where it changes nothing.
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
        if matches!(command, Command::BlockStatus { .. }) && (self.contexts.is_empty() || !self.structured) {
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
            // It carries no payload but makes the server read all of it.
            Command::Cache => Err((Errno::Overflow, TOO_LONG)),
            _ => Ok(()),
        }
    }
}
