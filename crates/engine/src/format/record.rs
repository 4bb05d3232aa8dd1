//! A record's header block, as it is read back.

use super::{
    COUNTER_MAX, Entry, FORMAT_VERSION, RECORD_ENTRIES_MAX, RECORD_MAGIC, RecordHeader, RecordKind,
    open,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// What a record's header block says.
pub(crate) struct Record {
    pub(crate) header: RecordHeader,
    pub(crate) entries: Vec<Entry>,
    /// Of moves: where each block stood before.
    pub(crate) olds: Vec<u32>,
}

impl Record {
    /// `None` if the block is no header of a record that a core of this version has written.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Record> {
        if bytes[..4] != RECORD_MAGIC {
            return None;
        }
        let header: RecordHeader = open(bytes)?;
        let kind = RecordKind::from_number(header.kind)?;
        let n = usize::from(header.entries.get());
        if header.version.get() > FORMAT_VERSION || n > RECORD_ENTRIES_MAX {
            return None;
        }
        let at = size_of::<RecordHeader>();
        let end = at + n * size_of::<Entry>();
        let entries = <[Entry]>::ref_from_bytes(&bytes[at..end]).ok()?.to_vec();
        let data = entries.iter().filter(|e| e.has_data()).count();
        if entries.iter().any(|e| e.kind().is_none()) || data != usize::from(header.blocks.get()) {
            return None;
        }
        // Only writes have ranges: what is filled or moved are blocks, one behind the other.
        if kind != RecordKind::Write && data != n {
            return None;
        }
        let counters =
            [header.sequence, header.durable_sequence, header.checkpoint, header.segment_sequence];
        if counters.iter().any(|counter| counter.get() > COUNTER_MAX) {
            return None;
        }
        let mut olds = Vec::new();
        if kind == RecordKind::Move {
            let raw = <[U32]>::ref_from_bytes(&bytes[end..end + n * 4]).ok()?;
            olds.extend(raw.iter().map(|o| o.get()));
        }

        Some(Record { header, entries, olds })
    }
}
