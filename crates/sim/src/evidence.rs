//! What the device still proves of the log's end. A record that is bad is a torn one, unless some other record says that it once was
//! on stable media: on a device that loses what it has acknowledged, what nobody bears witness to may go with a torn tail.

use crate::disk::Disk;
use crate::store::Content;
use tidepool_engine::format::{RecordHeader, RecordKind, open};

/// A record that the device has acknowledged.
struct Written {
    block: u64,
    header: Content,
    write: bool,
    sequence: u64,
    /// Everything up to this sequence was stable when it was built.
    durable: u64,
    /// When it was sent.
    tick: u64,
}

/// The records that one life of the core has written for a volume.
#[derive(Default)]
pub struct Evidence {
    records: Vec<Written>,
}

impl Evidence {
    /// A record's header was written to `block`, and was sent at `tick`.
    pub fn note(&mut self, header: &RecordHeader, block: u64, bytes: &Content, tick: u64) {
        self.records.push(Written {
            block,
            header: bytes.clone(),
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

    /// Changes that completed from this tick on may be in a record for which nobody bears witness any more.
    pub fn unsure_from(&self, disk: &Disk) -> u64 {
        let there = |r: &&Written| disk.holds(r.block, &r.header);
        let durable = self.records.iter().filter(there).map(|r| r.durable).max().unwrap_or(0);
        let unsure = self.records.iter().filter(|r| r.write && r.sequence > durable);
        unsure.map(|r| r.tick).min().unwrap_or(u64::MAX)
    }

    /// Another life begins.
    pub fn clear(&mut self) {
        self.records.clear();
    }
}
