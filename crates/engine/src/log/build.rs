//! An append while it is built: records of any volumes, each a header and its data blocks.

use crate::api::{BLOCK_BYTES, VolumeId};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::shared::Base;
use crate::blocks::index::Position;
use crate::format::{
    self, Entry, EntryKind, FORMAT_VERSION, Geometry, RECORD_ENTRIES_MAX, RECORD_MAGIC,
    RecordHeader, RecordKind, SUMMARY_BLOCKS_MAX, Stream, crc32c,
};
use crate::log::sequences::Sequences;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// One entry of a built record, with what publishing needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BuiltEntry {
    pub(super) entry: Entry,
    /// Where the data block stands (undefined for ranges).
    pub(super) position: Position,
    /// For moves: where it stood before. For fills: the number of the copy.
    pub(super) old: Position,
}

/// One built record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Built {
    pub(super) volume: VolumeId,
    pub(super) kind: RecordKind,
    pub(super) sequence: u64,
    pub(super) header_crc: u32,
    /// Entries of [`Append::entries`].
    pub(super) first: u32,
    pub(super) end: u32,
}

/// One device write of records.
pub(crate) struct Append {
    pub(super) stream: Stream,
    pub(super) segment: u32,
    /// First block past it in its segment.
    pub(super) end_block: u32,
    pub(super) buf: Buf,
    /// The buffer is a part of the mirror.
    pub(super) is_mirrored: bool,
    /// Number in its stream, from 1.
    pub(super) number: u64,
    pub(super) done: bool,
    /// Written so that it is stable when it completes.
    pub(super) dsync: bool,
    /// It brings back a block that was bad.
    pub(super) repairs: bool,
    pub(super) records: Vec<Built>,
    pub(super) entries: Vec<BuiltEntry>,
    /// Client operations that have parts in it.
    pub(super) ops: Vec<OpId>,
}

impl Append {
    pub(super) fn new(stream: Stream, buf: Buf) -> Append {
        Append {
            stream,
            segment: 0,
            end_block: 0,
            buf,
            is_mirrored: false,
            number: 0,
            done: false,
            dsync: false,
            repairs: false,
            records: Vec::with_capacity(16),
            entries: Vec::with_capacity(RECORD_ENTRIES_MAX),
            ops: Vec::with_capacity(RECORD_ENTRIES_MAX),
        }
    }
}

impl BuiltEntry {
    /// Kind, block and checksum or length, as the record has them.
    pub(crate) fn entry(&self) -> Entry {
        self.entry
    }

    /// Where the data block stands; of no meaning for a range.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Of a move: where the block stood before. Of a fill: the number of the copy.
    pub(crate) fn old(&self) -> Position {
        self.old
    }
}

impl Built {
    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    pub(crate) fn kind(&self) -> RecordKind {
        self.kind
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn header_crc(&self) -> u32 {
        self.header_crc
    }
}

impl Append {
    /// Its records, each with its entries.
    pub(crate) fn records(&self) -> impl Iterator<Item = (&Built, &[BuiltEntry])> {
        self.records
            .iter()
            .map(|record| (record, &self.entries[record.first as usize..record.end as usize]))
    }

    /// Operations that have parts in it.
    pub(crate) fn ops(&self) -> &[OpId] {
        &self.ops
    }

    /// Number in its stream, from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    pub(crate) fn segment(&self) -> u32 {
        self.segment
    }

    /// First block past it in its segment.
    pub(crate) fn end_block(&self) -> u32 {
        self.end_block
    }

    /// It brings back a block that was bad.
    pub(crate) fn is_repair(&self) -> bool {
        self.repairs
    }

    /// Puts it back as it was, to be filled again.
    pub(super) fn reset(&mut self, stream: Stream, segment: u32, buf: Buf, is_mirrored: bool) {
        (self.stream, self.segment) = (stream, segment);
        (self.buf, self.is_mirrored) = (buf, is_mirrored);
        (self.done, self.dsync, self.repairs) = (false, false, false);
        self.records.clear();
        self.entries.clear();
        self.ops.clear();
    }
}

/// Builds one append. Nothing else is built in its stream meanwhile.
pub(crate) struct Builder {
    pub(super) stream: Stream,
    pub(super) segment: u32,
    pub(super) sequence: u64,
    pub(super) epoch: u64,
    /// Where the segment begins.
    pub(super) segment_first: Position,
    /// First block of the append in its segment, and the next one to be filled.
    pub(super) first_block: u32,
    pub(super) block: u32,
    pub(super) segment_blocks: u32,
    pub(super) buf: Buf,
    pub(super) records: usize,
    pub(super) entries: usize,
    pub(super) append: Append,
    pub(super) record: Option<OpenRecord>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct OpenRecord {
    volume: VolumeId,
    kind: RecordKind,
    header_block: u32,
    first: u32,
}

/// What a record's header says beside its entries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RecordFields {
    generation: u64,
    sequence: u64,
    durable_sequence: u64,
    chain: u32,
}

impl RecordFields {
    /// Of the next record of a volume: its generation, the record's sequence, and how far the
    /// volume's log is.
    pub(crate) fn next(generation: u64, sequence: u64, log: &Sequences) -> RecordFields {
        RecordFields { generation, sequence, durable_sequence: log.durable(), chain: log.chain() }
    }

    /// Of a record that takes no sequence: everything up to what the log has published had its say
    /// in it.
    pub(crate) fn beside(generation: u64, log: &Sequences) -> RecordFields {
        let (sequence, durable_sequence) = (log.published(), log.durable());
        RecordFields { generation, sequence, durable_sequence, chain: 0 }
    }
}

impl Builder {
    /// Entries of the records that are built, and of the open one.
    pub(crate) fn entries(&self) -> usize {
        self.append.entries.len()
    }

    /// Operations that have parts in it.
    pub(crate) fn ops(&self) -> &[OpId] {
        &self.append.ops
    }

    /// An operation has a part in the open record. Tells whether it has had none before in this
    /// append.
    pub(crate) fn push_op(&mut self, op: OpId) -> bool {
        let is_new = self.append.ops.last() != Some(&op);
        if is_new {
            self.append.ops.push(op);
        }
        is_new
    }

    /// What it has is a block that was bad.
    pub(crate) fn mark_repair(&mut self) {
        self.append.repairs = true;
    }

    /// Whether `blocks` more blocks with `entries` more entries fit (with their share of the
    /// summary).
    pub(super) fn fits(&self, blocks: u32, records: usize, entries: usize) -> bool {
        let summary = Geometry::summary_blocks(self.records + records, self.entries + entries);
        summary <= SUMMARY_BLOCKS_MAX
            && self.block + blocks + summary <= self.segment_blocks
            && (self.block + blocks - self.first_block) as usize * BLOCK_BYTES
                <= self.buf.len as usize
    }

    /// Room for a new record with at least one data block.
    pub(crate) fn has_room_for_record(&self) -> bool {
        self.has_room_for(1, 1)
    }

    /// Room for one more entry, with data, in the open record.
    pub(crate) fn has_room_for_entry(&self) -> bool {
        let record = self.record.expect("a record is open");
        (self.append.entries.len() - record.first as usize) < RECORD_ENTRIES_MAX
            && self.fits(1, 0, 1)
    }

    /// Room for a new record with so many data blocks and entries.
    pub(crate) fn has_room_for(&self, blocks: u32, entries: usize) -> bool {
        debug_assert!(self.record.is_none());
        self.fits(1 + blocks, 1, entries)
    }

    pub(super) fn slot(&self, block: u32) -> Buf {
        self.buf.slice((block - self.first_block) as usize * BLOCK_BYTES, BLOCK_BYTES)
    }

    pub(crate) fn begin_record(&mut self, volume: VolumeId, kind: RecordKind) {
        debug_assert!(self.has_room_for(0, 0));
        let first = self.append.entries.len() as u32;
        self.record = Some(OpenRecord { volume, kind, header_block: self.block, first });
        self.block += 1;
        self.records += 1;
    }

    /// Adds a data block and returns the buffer that it must be in before the append is issued.
    pub(crate) fn push_data(&mut self, volume_block: u64, crc: u32, old: Position) -> Buf {
        let position = self.segment_first + self.block;
        let entry = Entry::new(EntryKind::Data, volume_block, crc);
        self.append.entries.push(BuiltEntry { entry, position, old });
        let slot = self.slot(self.block);
        self.block += 1;
        self.entries += 1;
        slot
    }

    /// Sets the CRC of the data block that was pushed last.
    pub(crate) fn set_last_crc(&mut self, crc: u32) {
        let last = self.append.entries.last_mut().expect("a data block was pushed");
        last.entry.crc_or_len = U32::new(crc);
    }

    /// Makes entries of the open record void, by their block and number.
    pub(crate) fn void_entries(&mut self, is_void: impl Fn(u64, u32) -> bool) {
        let record = self.record.expect("a record is open");
        for built in &mut self.append.entries[record.first as usize..] {
            if is_void(built.entry.block(), built.old) {
                built.entry = Entry::new(EntryKind::Void, built.entry.block(), built.entry.value());
            }
        }
    }

    /// Adds a range without data.
    pub(crate) fn push_range(&mut self, kind: EntryKind, volume_block: u64, blocks: u32) {
        let entry = Entry::new(kind, volume_block, blocks);
        self.append.entries.push(BuiltEntry { entry, position: 0, old: 0 });
        self.entries += 1;
    }

    /// The records that are built, each with its part of the buffer: header block and data blocks.
    pub(crate) fn records(&self) -> impl Iterator<Item = (&Built, Buf)> {
        let mut block = self.first_block + u32::from(self.first_block == 0);
        self.append.records.iter().map(move |record| {
            let entries = &self.append.entries[record.first as usize..record.end as usize];
            let blocks = 1 + entries.iter().filter(|built| built.entry.has_data()).count();
            let at = (block - self.first_block) as usize * BLOCK_BYTES;
            block += blocks as u32;
            (record, self.buf.slice(at, blocks * BLOCK_BYTES))
        })
    }

    /// The record that was built last, with its entries.
    pub(crate) fn last_record(&self) -> Option<(&Built, &[BuiltEntry])> {
        let record = self.append.records.last()?;
        Some((record, &self.append.entries[record.first as usize..record.end as usize]))
    }

    /// Writes the header of the open record; returns its CRC.
    pub(crate) fn end_record(&mut self, base: &mut Base, fields: RecordFields) -> u32 {
        let record = self.record.take().expect("a record is open");
        let built = &self.append.entries[record.first as usize..];
        let blocks = built.iter().filter(|b| b.entry.has_data()).count() as u16;
        let header = RecordHeader {
            magic: RECORD_MAGIC,
            crc: U32::ZERO,
            version: U16::new(FORMAT_VERSION),
            kind: record.kind as u8,
            reserved: 0,
            volume: U16::new(record.volume.0),
            entries: U16::new(built.len() as u16),
            blocks: U16::new(blocks),
            reserved2: U16::ZERO,
            uuid: base.geo().uuid,
            segment_sequence: U64::new(self.sequence),
            generation: U64::new(fields.generation),
            sequence: U64::new(fields.sequence),
            durable_sequence: U64::new(fields.durable_sequence),
            checkpoint: U64::new(base.checkpoints().durable()),
            chain: U32::new(fields.chain),
            epoch: U64::new(self.epoch),
            reserved3: [0; 16],
        };
        let slot = self.slot(record.header_block);
        let bytes = base.bytes_mut(slot);
        bytes.fill(0);
        header.write_to_prefix(bytes).expect("a header is smaller than a block");
        let mut at = size_of::<RecordHeader>();
        for b in built {
            bytes[at..at + 12].copy_from_slice(b.entry.as_bytes());
            at += 12;
        }
        if record.kind == RecordKind::Move {
            for b in built {
                bytes[at..at + 4].copy_from_slice(&b.old.to_le_bytes());
                at += 4;
            }
        }
        let crc = format::seal::<RecordHeader>(bytes);
        self.append.records.push(Built {
            volume: record.volume,
            kind: record.kind,
            sequence: fields.sequence,
            header_crc: crc,
            first: record.first,
            end: self.append.entries.len() as u32,
        });
        crc
    }
}

/// Copies a client's block into an append and returns its CRC.
pub(crate) fn copy_block(base: &mut Base, from: Buf, to: Buf) -> u32 {
    base.copy(from, to);
    crc32c(base.bytes(to))
}

#[cfg(test)]
mod tests;
