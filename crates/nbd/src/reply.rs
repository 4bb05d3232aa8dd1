//! Replies, written into buffers of the caller. Every function returns the number of bytes written.

use crate::errno::Errno;
use crate::wire::{self, Writer, cut};

/// Longest message in an error chunk in bytes; longer messages are cut.
pub const MESSAGE_BYTES_MAX: usize = 94;
/// Largest length in bytes of a reply without its data: an error chunk with a message and an
/// offset.
pub const HEAD_BYTES_MAX: usize = wire::CHUNK_HEADER_BYTES + 6 + MESSAGE_BYTES_MAX + 8;
/// Most descriptors in one block status chunk; the protocol's limit.
pub const DESCRIPTORS_MAX: usize = 1 << 20;
/// Length of one block status descriptor in bytes.
pub const DESCRIPTOR_BYTES: usize = 8;
/// Length in bytes of a block status chunk before its descriptors.
pub const STATUS_HEAD_BYTES: usize = wire::CHUNK_HEADER_BYTES + 4;

/// Buffer for one reply without its data.
pub type Head = [u8; HEAD_BYTES_MAX];

/// A simple reply that reports success. With structured replies, it answers every command except a
/// read or a block status. Without structured replies, it answers every command; the data of a read
/// follows it.
pub fn simple(out: &mut Head, cookie: u64) -> usize {
    simple_with(out, cookie, 0)
}

fn simple_with(out: &mut Head, cookie: u64, error: u32) -> usize {
    Writer::new(out).u32(wire::MAGIC_SIMPLE_REPLY).u32(error).u64(cookie).used()
}

fn chunk<'a>(
    out: &'a mut [u8],
    done: bool,
    kind: u16,
    cookie: u64,
    payload_bytes: u32,
) -> Writer<'a> {
    let mut writer = Writer::new(out);
    let flags = if done { wire::REPLY_FLAG_DONE } else { 0 };
    writer.u32(wire::MAGIC_STRUCTURED_REPLY).u16(flags).u16(kind).u64(cookie).u32(payload_bytes);
    writer
}

/// Header in front of the data of a whole read, structured or not.
pub fn read(out: &mut Head, structured: bool, cookie: u64, offset: u64, len: u32) -> usize {
    if structured { data(out, cookie, offset, len, true) } else { simple(out, cookie) }
}

/// Ends a structured reply whose last chunk did not carry the end.
pub fn none(out: &mut Head, cookie: u64) -> usize {
    chunk(out, true, wire::REPLY_NONE, cookie, 0).used()
}

/// Header of a chunk in front of `len` bytes of data from byte `offset` of the export.
pub fn data(out: &mut Head, cookie: u64, offset: u64, len: u32, done: bool) -> usize {
    chunk(out, done, wire::REPLY_OFFSET_DATA, cookie, len.saturating_add(8)).u64(offset).used()
}

/// A chunk that stands for `len` zeroes at byte `offset` of the export, in place of data.
pub fn hole(out: &mut Head, cookie: u64, offset: u64, len: u32, done: bool) -> usize {
    chunk(out, done, wire::REPLY_OFFSET_HOLE, cookie, 12).u64(offset).u32(len).used()
}

/// Reports the failure of a request and ends the reply. A simple reply does not carry the message.
pub fn error(out: &mut Head, structured: bool, cookie: u64, errno: Errno, message: &str) -> usize {
    if !structured {
        return simple_with(out, cookie, errno.code());
    }
    let message = cut(message, MESSAGE_BYTES_MAX);
    chunk(out, true, wire::REPLY_ERROR, cookie, 6 + message.len() as u32)
        .u32(errno.code())
        .u16(message.len() as u16)
        .bytes(message.as_bytes())
        .used()
}

/// A failure that concerns one place of the export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<'a> {
    /// The error that the client gets.
    pub errno: Errno,
    /// The first byte of the export that could not be read or written.
    pub offset: u64,
    /// What a person reads about the failure.
    pub message: &'a str,
}

/// Reports a failure at one place of the export; for structured replies only.
pub fn error_at(out: &mut Head, cookie: u64, fault: &Fault<'_>, done: bool) -> usize {
    let message = cut(fault.message, MESSAGE_BYTES_MAX);
    chunk(out, done, wire::REPLY_ERROR_OFFSET, cookie, 14 + message.len() as u32)
        .u32(fault.errno.code())
        .u16(message.len() as u16)
        .bytes(message.as_bytes())
        .u64(fault.offset)
        .used()
}

/// Writes the block status chunk of one metadata context, extent by extent.
///
/// Adjacent extents with equal flags become one descriptor. When the buffer ends before the range
/// does, the chunk describes less than was requested, which the protocol allows.
#[derive(Debug)]
pub struct BlockStatus<'a> {
    out: &'a mut [u8],
    cookie: u64,
    context: u32,
    descriptors: usize,
    descriptors_max: usize,
    left: u32,
    last: Option<(u32, u32)>,
}

impl<'a> BlockStatus<'a> {
    /// Begins the chunk for a request of `len` bytes; with `one`, a single descriptor is written.
    ///
    /// # Panics
    /// If the buffer has no room for one descriptor.
    pub fn new(
        out: &'a mut [u8],
        cookie: u64,
        context: u32,
        len: u32,
        one: bool,
    ) -> BlockStatus<'a> {
        let room = out.len().saturating_sub(STATUS_HEAD_BYTES) / DESCRIPTOR_BYTES;
        assert!(
            room > 0,
            "a block status chunk needs {} bytes",
            STATUS_HEAD_BYTES + DESCRIPTOR_BYTES
        );
        let descriptors_max = if one { 1 } else { room.min(DESCRIPTORS_MAX) };
        BlockStatus { out, cookie, context, descriptors: 0, descriptors_max, left: len, last: None }
    }

    /// Adds the next extent; the part behind the request's range is cut off. Returns whether the
    /// chunk may take another extent.
    pub fn push(&mut self, len: u64, flags: u32) -> bool {
        let len = u32::try_from(len).unwrap_or(u32::MAX).min(self.left);
        if len == 0 {
            return self.left > 0;
        }
        match &mut self.last {
            Some((last_len, last_flags)) if *last_flags == flags => *last_len += len,
            _ => {
                let finished = usize::from(self.last.is_some());
                if self.descriptors + finished == self.descriptors_max {
                    return false;
                }
                self.write_last();
                self.last = Some((len, flags));
            }
        }
        self.left -= len;
        self.left > 0
    }

    fn write_last(&mut self) {
        if let Some((len, flags)) = self.last.take() {
            let at = STATUS_HEAD_BYTES + self.descriptors * DESCRIPTOR_BYTES;
            Writer::new(&mut self.out[at..]).u32(len).u32(flags);
            self.descriptors += 1;
        }
    }

    /// Writes the chunk's header; `done` marks the last chunk of the reply. Without any extent,
    /// nothing is known of the range, and the range is reported with no flag set. For
    /// `base:allocation` this is always true, because a clear flag promises nothing.
    pub fn finish(mut self, done: bool) -> usize {
        if self.last.is_none() && self.descriptors == 0 {
            self.last = Some((self.left.max(1), 0));
        }
        self.write_last();
        let payload = 4 + self.descriptors * DESCRIPTOR_BYTES;
        chunk(self.out, done, wire::REPLY_BLOCK_STATUS, self.cookie, payload as u32)
            .u32(self.context);
        wire::CHUNK_HEADER_BYTES + payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_stand_on_the_wire_as_the_protocol_says() {
        let mut out = [0; HEAD_BYTES_MAX];
        let used = simple(&mut out, 0x0102_0304_0506_0708);
        assert_eq!(out[..used], *b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
        let used = error(&mut out, false, 1, Errno::NoSpc, "ignored");
        assert_eq!(out[..used], *b"\x67\x44\x66\x98\0\0\0\x1c\0\0\0\0\0\0\0\x01");
        let used = read(&mut out, true, 2, 0x1000, 0x200);
        assert_eq!(
            out[..used],
            *b"\x66\x8e\x33\xef\0\x01\0\x01\0\0\0\0\0\0\0\x02\0\0\x02\x08\0\0\0\0\0\0\x10\0"
        );
        assert_eq!(read(&mut out, false, 2, 0x1000, 0x200), wire::SIMPLE_REPLY_BYTES);
        let used = hole(&mut out, 3, 0x1000, 0x200, false);
        assert_eq!(
            out[..used],
            *b"\x66\x8e\x33\xef\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\x02\0"
        );
        let used = none(&mut out, 4);
        assert_eq!(out[..used], *b"\x66\x8e\x33\xef\0\x01\0\0\0\0\0\0\0\0\0\x04\0\0\0\0");
        let used = error(&mut out, true, 5, Errno::Io, "no");
        assert_eq!(
            out[..used],
            *b"\x66\x8e\x33\xef\0\x01\x80\x01\0\0\0\0\0\0\0\x05\0\0\0\x08\0\0\0\x05\0\x02no"
        );
        let used =
            error_at(&mut out, 6, &Fault { errno: Errno::Io, offset: 9, message: "" }, false);
        assert_eq!(
            out[..used],
            *b"\x66\x8e\x33\xef\0\0\x80\x02\0\0\0\0\0\0\0\x06\0\0\0\x0e\0\0\0\x05\0\0\0\0\0\0\0\0\0\x09"
        );
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let mut out = [0; HEAD_BYTES_MAX];
        let long = "é".repeat(1000);
        let fault = Fault { errno: Errno::Io, offset: 0, message: &long };
        assert_eq!(error_at(&mut out, 1, &fault, true), HEAD_BYTES_MAX);
        let odd = format!("x{long}");
        let used = error(&mut out, true, 1, Errno::Io, &odd);
        let message = std::str::from_utf8(&out[26..used]).expect("whole characters");
        assert_eq!(message.len(), MESSAGE_BYTES_MAX - 1);
    }

    fn descriptors(chunk: &[u8]) -> Vec<(u32, u32)> {
        let word =
            |at: usize| u32::from_be_bytes(chunk[at..at + 4].try_into().expect("four bytes"));
        assert_eq!(word(16) as usize, chunk.len() - wire::CHUNK_HEADER_BYTES);
        (STATUS_HEAD_BYTES..chunk.len()).step_by(8).map(|at| (word(at), word(at + 4))).collect()
    }

    #[test]
    fn block_status_merges_cuts_and_never_is_empty() {
        let mut out = [0; 256];
        let mut status = BlockStatus::new(&mut out, 1, 2, 10_000, false);
        assert!(
            status.push(4096, 1) && status.push(0, 7) && status.push(1000, 1) && status.push(4, 0)
        );
        assert!(!status.push(u64::MAX, 3));
        assert!(!status.push(5, 4));
        let used = status.finish(true);
        assert_eq!(descriptors(&out[..used]), [(5096, 1), (4, 0), (4900, 3)]);

        let mut status = BlockStatus::new(&mut out, 1, 2, 10_000, true);
        assert!(status.push(100, 1) && status.push(100, 1));
        assert!(!status.push(100, 0));
        let used = status.finish(true);
        assert_eq!(descriptors(&out[..used]), [(200, 1)]);

        let used = BlockStatus::new(&mut out, 1, 2, 10_000, true).finish(false);
        assert_eq!(descriptors(&out[..used]), [(10_000, 0)]);

        let mut room = [0; STATUS_HEAD_BYTES + 3 * DESCRIPTOR_BYTES];
        let mut status = BlockStatus::new(&mut room, 1, 2, u32::MAX, false);
        let taken = (0..10).take_while(|i| status.push(512, i % 2)).count();
        assert_eq!(taken, 3);
        let used = status.finish(true);
        assert_eq!(descriptors(&room[..used]), [(512, 0), (512, 1), (512, 0)]);
    }
}
