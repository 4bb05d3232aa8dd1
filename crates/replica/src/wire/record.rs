//! A record of the log on its way.

use super::Malformed;
use super::frame::{ENTRY_BYTES, Kind, RECORD_HEAD_BYTES};
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::{
    Entry, FORMAT_VERSION, RECORD_ENTRIES_MAX, RECORD_MAGIC, RecordHeader, RecordKind, open,
};
use zerocopy::FromBytes;

/// A write record on its way: what stood in the owner's log, without the padding of its header
/// block. The data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record<'a> {
    /// The header and its entries.
    pub(super) head: &'a [u8],
}

impl<'a> Record<'a> {
    /// The record whose header block is `block`.
    ///
    /// # Errors
    /// It is none: the checksum is wrong, or it says that it has more than fits.
    pub fn of_block(block: &'a [u8; BLOCK_BYTES]) -> Result<Record<'a>, Malformed> {
        let header = open::<RecordHeader>(block).ok_or(Malformed::Crc)?;
        let length = RECORD_HEAD_BYTES + usize::from(header.entries.get()) * ENTRY_BYTES;
        let bad = Malformed::Shape(Kind::Record as u8);
        let (head, padding) = block.split_at_checked(length).ok_or(bad)?;
        // The other side puts zeroes where the padding was.
        if padding.iter().any(|&byte| byte != 0) {
            return Err(bad);
        }
        Record { head }.checked(&header)
    }

    /// The record that `bytes` begin with, a header block and the data behind it, and that data.
    ///
    /// # Errors
    /// See [`Record::of_block`]; or its data is not there as a whole.
    pub fn with_data(bytes: &'a [u8]) -> Result<(Record<'a>, &'a [u8]), Malformed> {
        let bad = Malformed::Shape(Kind::Record as u8);
        let (block, rest) = bytes.split_first_chunk().ok_or(bad)?;
        let record = Record::of_block(block)?;
        Ok((record, rest.get(..record.data_bytes()).ok_or(bad)?))
    }

    /// The record with this head, which came without the padding that its checksum covers.
    pub(super) fn of_head(head: &'a [u8]) -> Result<Record<'a>, Malformed> {
        if head.len() < RECORD_HEAD_BYTES {
            return Err(Malformed::Shape(Kind::Record as u8));
        }
        let mut block = [0; BLOCK_BYTES];
        block[..head.len()].copy_from_slice(head);
        let header = open::<RecordHeader>(&block).ok_or(Malformed::Crc)?;
        Record { head }.checked(&header)
    }

    fn checked(self, header: &RecordHeader) -> Result<Record<'a>, Malformed> {
        let is_of_a_log = header.magic == RECORD_MAGIC
            && header.kind == RecordKind::Write as u8
            && header.version.get() <= FORMAT_VERSION;
        let entries = usize::from(header.entries.get());
        let length = RECORD_HEAD_BYTES + entries * ENTRY_BYTES;
        let blocks = || (0..entries).filter(|&at| self.entry(at).has_data()).count();
        let fits = is_of_a_log
            && entries <= RECORD_ENTRIES_MAX
            && length == self.head.len()
            && blocks() == usize::from(header.blocks.get());
        fits.then_some(self).ok_or(Malformed::Shape(Kind::Record as u8))
    }

    /// The header as the owner wrote it.
    pub fn header(&self) -> RecordHeader {
        RecordHeader::read_from_prefix(self.head).expect("a head begins with a header").0
    }

    /// How many entries there are.
    pub fn entries(&self) -> usize {
        (self.head.len() - RECORD_HEAD_BYTES) / ENTRY_BYTES
    }

    /// One of the entries.
    ///
    /// # Panics
    /// If there is no such entry.
    pub fn entry(&self, at: usize) -> Entry {
        let from = RECORD_HEAD_BYTES + at * ENTRY_BYTES;
        Entry::read_from_bytes(&self.head[from..from + ENTRY_BYTES])
            .expect("an entry is as long as it is")
    }

    /// Bytes of the data blocks that follow.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.header().blocks.get()) * BLOCK_BYTES
    }
}
