//! The numbers of the protocol, and helpers that read fields from a byte buffer and write fields
//! into a byte buffer.
//!
//! Everything on the wire is big-endian. The names follow the protocol's text without its `NBD_`
//! prefix.

/// First eight bytes of a server's greeting, "NBDMAGIC".
pub const MAGIC_GREETING: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": second word of a newstyle greeting, and first word of every option.
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// Second word of an oldstyle greeting; recognised only to report that oldstyle is not supported.
pub const MAGIC_OLDSTYLE: u64 = 0x0000_4202_8186_1253;
/// First word of a reply to an option.
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// First word of a request.
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
/// First word of a simple reply.
pub const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// First word of a structured reply chunk.
pub const MAGIC_STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Handshake flag: the sender understands options other than `EXPORT_NAME`.
pub const HANDSHAKE_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag: the 124 zeroes after the reply to `EXPORT_NAME` may be left out.
pub const HANDSHAKE_NO_ZEROES: u16 = 1 << 1;

/// Option: choose an export and start the transmission phase; the reply cannot report an error.
pub const OPT_EXPORT_NAME: u32 = 1;
/// Option: end the handshake.
pub const OPT_ABORT: u32 = 2;
/// Option: list all exports.
pub const OPT_LIST: u32 = 3;
/// Option: start TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Option: describe an export.
pub const OPT_INFO: u32 = 6;
/// Option: describe an export and start the transmission phase.
pub const OPT_GO: u32 = 7;
/// Option: use structured replies.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Option: list metadata contexts.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Option: select metadata contexts.
pub const OPT_SET_META_CONTEXT: u32 = 10;

/// Option reply: done.
pub const REP_ACK: u32 = 1;
/// Option reply: one export of a list.
pub const REP_SERVER: u32 = 2;
/// Option reply: one piece of information about an export.
pub const REP_INFO: u32 = 3;
/// Option reply: one metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// Set in every option reply that reports an error.
pub const REP_ERROR_BIT: u32 = 1 << 31;
/// Option reply: the option is unknown.
pub const REP_ERR_UNSUP: u32 = REP_ERROR_BIT | 1;
/// Option reply: the server's policy forbids the option.
pub const REP_ERR_POLICY: u32 = REP_ERROR_BIT | 2;
/// Option reply: the option is malformed.
pub const REP_ERR_INVALID: u32 = REP_ERROR_BIT | 3;
/// Option reply: not possible on this platform.
pub const REP_ERR_PLATFORM: u32 = REP_ERROR_BIT | 4;
/// Option reply: only possible with TLS.
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR_BIT | 5;
/// Option reply: no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR_BIT | 6;
/// Option reply: the server is shutting down.
pub const REP_ERR_SHUTDOWN: u32 = REP_ERROR_BIT | 7;
/// Option reply: the client must ask for the block sizes.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR_BIT | 8;
/// Option reply: the request is too large to process.
pub const REP_ERR_TOO_BIG: u32 = REP_ERROR_BIT | 9;

/// Information: size and transmission flags.
pub const INFO_EXPORT: u16 = 0;
/// Information: canonical name.
pub const INFO_NAME: u16 = 1;
/// Information: description for the user.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: size constraints.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flag: always set.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
/// Transmission flag: the export is read-only.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: `FLUSH` is supported.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: `FUA` is supported.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// Transmission flag: seeks are expensive.
pub const FLAG_ROTATIONAL: u16 = 1 << 4;
/// Transmission flag: `TRIM` is supported.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: `WRITE_ZEROES` is supported.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Transmission flag: `DF` is supported.
pub const FLAG_SEND_DF: u16 = 1 << 7;
/// Transmission flag: a flush on one connection covers the writes of all connections.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// Transmission flag: `CACHE` is supported.
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
/// Transmission flag: `FAST_ZERO` is supported.
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Command: read.
pub const CMD_READ: u16 = 0;
/// Command: write.
pub const CMD_WRITE: u16 = 1;
/// Command: disconnect; it has no reply.
pub const CMD_DISC: u16 = 2;
/// Command: make completed writes stable.
pub const CMD_FLUSH: u16 = 3;
/// Command: discard.
pub const CMD_TRIM: u16 = 4;
/// Command: read a range into the cache.
pub const CMD_CACHE: u16 = 5;
/// Command: write zeroes.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// Command: query metadata contexts.
pub const CMD_BLOCK_STATUS: u16 = 7;

/// Command flag: reply only when the data is on stable media.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// Command flag: keep the space allocated.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// Command flag: do not fragment the reply.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// Command flag: return one extent only.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Command flag: fail when writing zeroes is no faster than writing data.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

/// Chunk flag: the last chunk of its reply.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;
/// Chunk: no payload; ends a reply.
pub const REPLY_NONE: u16 = 0;
/// Chunk: data at an offset.
pub const REPLY_OFFSET_DATA: u16 = 1;
/// Chunk: zeroes at an offset.
pub const REPLY_OFFSET_HOLE: u16 = 2;
/// Chunk: extents of one metadata context.
pub const REPLY_BLOCK_STATUS: u16 = 5;
/// Set in every chunk type that reports an error.
pub const REPLY_ERROR_BIT: u16 = 1 << 15;
/// Chunk: error.
pub const REPLY_ERROR: u16 = REPLY_ERROR_BIT | 1;
/// Chunk: error at an offset.
pub const REPLY_ERROR_OFFSET: u16 = REPLY_ERROR_BIT | 2;

/// `base:allocation`: not allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: reads as zero.
pub const STATE_ZERO: u32 = 1 << 1;
/// `tidepool:dirty`: held in the cache and not yet in the backend.
pub const STATE_DIRTY: u32 = 1 << 0;
/// `tidepool:dirty`: held in the cache; always set together with `STATE_DIRTY`.
pub const STATE_CACHED: u32 = 1 << 1;

/// The port that IANA has assigned to the protocol.
pub const PORT_DEFAULT: u16 = 10809;

/// Length of a request's header in bytes.
pub const REQUEST_BYTES: usize = 28;
/// Length of a simple reply in bytes, without data.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Length of a chunk's header in bytes.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// Zeroes after the reply to `EXPORT_NAME`, unless the client set `HANDSHAKE_NO_ZEROES`.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// Longest string (export name, query, message) in bytes that the protocol allows.
pub const STRING_BYTES_MAX: usize = 4096;
/// Largest payload of one read or write in bytes.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// Takes big-endian fields off the front of a slice. A field is `None` when the slice is too short.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its 32-bit length.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Writes big-endian fields into a fixed buffer and counts the bytes.
pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    used: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut [u8]) -> Writer<'a> {
        Writer { out, used: 0 }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.out[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
        self
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn used(&self) -> usize {
        self.used
    }
}

/// The longest prefix of `text` that has at most `bytes_max` bytes and ends between characters.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
