//! What the device still proves of the log's end. A record that is bad is a torn one, unless some
//! other record says that it once was on stable media: on a device that loses what it has
//! acknowledged, what nobody bears witness to may go with a torn tail.

use crate::disk::Disk;
use crate::store::Content;
use tidepool_engine::format::{
    RECORD_MAGIC, RecordHeader, RecordKind, SEGMENT_MAGIC, SegmentHeader, open,
};

/// A record that the device has acknowledged.
struct Written {
    block: u64,
    header: Content,
    /// First block of its segment, and which life of that it belongs to.
    segment_block: u64,
    segment_sequence: u64,
    write: bool,
    sequence: u64,
    /// Everything up to this sequence was stable when it was built.
    durable: u64,
    /// When it was sent.
    tick: u64,
}

impl Written {
    /// A segment that was opened since the last checkpoint is known by its header or by its first
    /// record.
    fn can_be_found(&self, disk: &Disk) -> bool {
        let (first, second) =
            (disk.content(self.segment_block), disk.content(self.segment_block + 1));
        let header = first.as_ref().and_then(|bytes| open::<SegmentHeader>(&bytes[..]));
        let by_header = header.is_some_and(|h| {
            h.magic == SEGMENT_MAGIC && h.segment_sequence.get() == self.segment_sequence
        });
        let record = Evidence::header(&second).filter(|r| r.magic == RECORD_MAGIC);
        by_header || record.is_some_and(|r| r.segment_sequence.get() == self.segment_sequence)
    }
}

/// The records that the core has written for a volume since that was added, or since the core came
/// back from a crash.
#[derive(Default)]
pub struct Evidence {
    records: Vec<Written>,
}

impl Evidence {
    /// A record's header was written to `block` of the segment that begins at `segment_block`, and
    /// was sent at `tick`.
    pub fn note(
        &mut self,
        header: &RecordHeader,
        segment_block: u64,
        block: u64,
        bytes: &Content,
        tick: u64,
    ) {
        self.records.push(Written {
            block,
            header: bytes.clone(),
            segment_block,
            segment_sequence: header.segment_sequence.get(),
            write: header.kind == RecordKind::Write as u8,
            sequence: header.sequence.get(),
            durable: header.durable_sequence.get(),
            tick,
        });
    }

    /// The header of a record, if it is one.
    pub fn header(block: &Content) -> Option<RecordHeader> {
        block.as_ref().and_then(|bytes| open::<RecordHeader>(&bytes[..]))
    }

    /// Changes that completed from this tick on may be in a record for which nobody bears witness
    /// any more.
    pub fn unsure_from(&self, disk: &Disk) -> u64 {
        let there = |r: &&Written| disk.holds(r.block, &r.header) && r.can_be_found(disk);
        let durable = self.records.iter().filter(there).map(|r| r.durable).max().unwrap_or(0);
        let unsure = self.records.iter().filter(|r| r.write && r.sequence > durable);
        unsure.map(|r| r.tick).min().unwrap_or(u64::MAX)
    }

    /// What comes is of another log, or behind a crash.
    pub fn clear(&mut self) {
        self.records.clear();
    }
}
