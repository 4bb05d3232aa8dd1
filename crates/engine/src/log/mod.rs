//! Append streams: building records, writing them in batches, publishing them in order.
//!
//! A record gathers the entries of one volume behind one header; an *append* is one device write of one
//! or more records, of any volumes. Appends of a stream may complete out of order on the device; they
//! are published (index updated, writes acknowledged) in the order in which they were built.

pub(crate) mod sequences;

use crate::api::{BLOCK_BYTES, Nanos, VolumeId};
use crate::base::mem::{Arena, Buf};
use crate::base::mutation::mutated;
use crate::blocks::index::Position;
use crate::blocks::space::{NONE, RESERVE_READ_CACHE, RESERVE_WRITES, SegmentState, Space};
use crate::control::volume::OpId;
use crate::engine::{Engine, Io};
use crate::format::{
    self, Entry, EntryKind, FORMAT_VERSION, Geometry, RECORD_ENTRIES_MAX, RECORD_MAGIC, RecordHeader,
    RecordKind, SEGMENT_MAGIC, SUMMARY_BLOCKS_MAX, SUMMARY_MAGIC, SegmentHeader, Stream, SummaryHeader,
    SummaryRecord, byte, crc32c,
};
use std::collections::VecDeque;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Segments whose summaries are outstanding; at more, appends wait.
const SEALING_MAX: usize = 4;

/// One entry of a built record, with what publishing needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BuiltEntry {
    pub(crate) entry: Entry,
    /// Where the data block stands (undefined for ranges).
    pub(crate) position: Position,
    /// For moves: where it stood before. For fills: the number of the copy.
    pub(crate) old: Position,
}

/// One built record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Built {
    pub(crate) volume: VolumeId,
    pub(crate) kind: RecordKind,
    pub(crate) sequence: u64,
    pub(crate) header_crc: u32,
    /// Entries of [`Append::entries`].
    pub(crate) first: u32,
    pub(crate) end: u32,
}

/// One device write of records.
pub(crate) struct Append {
    pub(crate) stream: Stream,
    pub(crate) segment: u32,
    /// First block past it in its segment.
    pub(crate) end_block: u32,
    pub(crate) buf: Buf,
    /// Number in its stream, from 1.
    pub(crate) number: u64,
    pub(crate) done: bool,
    /// Written so that it is stable when it completes.
    pub(crate) dsync: bool,
    /// It brings back a block that was bad.
    pub(crate) repairs: bool,
    pub(crate) records: Vec<Built>,
    pub(crate) entries: Vec<BuiltEntry>,
    /// Client operations that have parts in it.
    pub(crate) ops: Vec<OpId>,
}

impl Append {
    fn new(stream: Stream, buf: Buf) -> Append {
        Append {
            stream,
            segment: 0,
            end_block: 0,
            buf,
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

/// A full segment whose summary is not yet written.
struct Sealing {
    stream: Stream,
    segment: u32,
    /// Number of the last append into it.
    last: u64,
    records: Vec<SummaryRecord>,
    entries: Vec<Entry>,
    issued: bool,
}

/// One append stream.
pub(crate) struct StreamState {
    pub(crate) segment: u32,
    pub(crate) next_block: u32,
    /// Everything before this block of the open segment is published.
    pub(crate) published_block: u32,
    records: Vec<SummaryRecord>,
    entries: Vec<Entry>,
    pub(crate) in_flight: VecDeque<u32>,
    /// Number of the newest append that was issued, published, known stable.
    pub(crate) issued: u64,
    pub(crate) published: u64,
    pub(crate) stable: u64,
}

/// Builds one append. Nothing else is built in its stream meanwhile.
pub(crate) struct Builder {
    stream: Stream,
    segment: u32,
    sequence: u64,
    /// First block of the append in its segment, and the next one to be filled.
    first_block: u32,
    block: u32,
    segment_blocks: u32,
    buf: Buf,
    records: usize,
    entries: usize,
    pub(crate) append: Append,
    record: Option<OpenRecord>,
}

#[derive(Debug, Clone, Copy)]
struct OpenRecord {
    volume: VolumeId,
    kind: RecordKind,
    header_block: u32,
    first: u32,
}

/// What a record's header says beside its entries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RecordFields {
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
    pub(crate) durable_sequence: u64,
    pub(crate) chain: u32,
}

impl Builder {
    /// Whether `blocks` more blocks with `entries` more entries fit (with their share of the summary).
    fn fits(&self, blocks: u32, records: usize, entries: usize) -> bool {
        let summary = Geometry::summary_blocks(self.records + records, self.entries + entries);
        summary <= SUMMARY_BLOCKS_MAX
            && self.block + blocks + summary <= self.segment_blocks
            && (self.block + blocks - self.first_block) as usize * BLOCK_BYTES <= self.buf.len as usize
    }

    /// Room for a new record with at least one data block.
    pub(crate) fn has_room_for_record(&self) -> bool {
        self.has_room_for(1, 1)
    }

    /// Room for one more entry, with data, in the open record.
    pub(crate) fn has_room_for_entry(&self) -> bool {
        let record = self.record.expect("a record is open");
        (self.append.entries.len() - record.first as usize) < RECORD_ENTRIES_MAX && self.fits(1, 0, 1)
    }

    /// Room for a new record with so many data blocks and entries.
    pub(crate) fn has_room_for(&self, blocks: u32, entries: usize) -> bool {
        debug_assert!(self.record.is_none());
        self.fits(1 + blocks, 1, entries)
    }

    fn slot(&self, block: u32) -> Buf {
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
    pub(crate) fn push_data(&mut self, space: &Space, volume_block: u64, crc: u32, old: Position) -> Buf {
        let position = space.geo.segment_block(self.segment) + self.block;
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
    pub(crate) fn end_record(
        &mut self,
        arena: &mut Arena,
        space: &Space,
        checkpoint: u64,
        fields: RecordFields,
    ) -> u32 {
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
            uuid: space.geo.uuid,
            segment_sequence: U64::new(self.sequence),
            generation: U64::new(fields.generation),
            sequence: U64::new(fields.sequence),
            durable_sequence: U64::new(fields.durable_sequence),
            checkpoint: U64::new(checkpoint),
            chain: U32::new(fields.chain),
            epoch: U64::new(space.epoch),
            reserved3: [0; 16],
        };
        let slot = self.slot(record.header_block);
        let bytes = arena.bytes_mut(slot);
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

/// All streams and what is in flight in them.
pub(crate) struct Log {
    pub(crate) streams: [StreamState; 3],
    sealing: Vec<Sealing>,
    /// Appends with their memory, to be used again.
    spare: Vec<Append>,
    spare_summaries: Vec<(Vec<SummaryRecord>, Vec<Entry>)>,
}

impl Log {
    pub(crate) fn new(segment_blocks: u32) -> Log {
        let stream = |_| StreamState {
            segment: NONE,
            next_block: 0,
            published_block: 0,
            records: Vec::with_capacity(segment_blocks as usize / 2),
            entries: Vec::with_capacity(segment_blocks as usize),
            in_flight: VecDeque::with_capacity(64),
            issued: 0,
            published: 0,
            stable: 0,
        };
        Log {
            streams: Stream::ALL.map(stream),
            sealing: Vec::with_capacity(SEALING_MAX),
            spare: Vec::new(),
            spare_summaries: Vec::new(),
        }
    }

    pub(crate) fn stream(&mut self, stream: Stream) -> &mut StreamState {
        &mut self.streams[stream as usize]
    }

    /// The log goes on in a segment that recovery has found open.
    pub(crate) fn reopen(
        &mut self,
        segment: u32,
        next_block: u32,
        records: Vec<SummaryRecord>,
        entries: Vec<Entry>,
    ) {
        let state = self.stream(Stream::Log);
        state.segment = segment;
        (state.next_block, state.published_block) = (next_block, next_block);
        state.records.extend(records);
        state.entries.extend(entries);
    }

    /// No full segment waits for its summary: a checkpoint may be taken.
    pub(crate) fn nothing_sealing(&self) -> bool {
        self.sealing.is_empty()
    }

    /// Nothing is in flight in any stream.
    pub(crate) fn is_idle(&self) -> bool {
        self.sealing.is_empty() && self.streams.iter().all(|s| s.in_flight.is_empty())
    }
}

impl Engine {
    /// Starts an append of at least one record with so many data blocks and entries, or tells that there is no
    /// segment for it now. `moving`: for reclaim, which may use the last segments.
    pub(crate) fn begin_append(
        &mut self,
        stream: Stream,
        buf: Buf,
        (blocks, entries): (u32, usize),
        moving: bool,
    ) -> Result<Builder, Buf> {
        if self.dead {
            return Err(buf);
        }
        if stream == Stream::Log
            && !moving
            && self.space.free_count() < RESERVE_WRITES
            && !(self.reclaim.is_idle() && self.repairs.is_empty())
        {
            // Reclaim is packing into the last segments, or something is repaired: it would not get done with what writes left it.
            return Err(buf);
        }
        let state = &self.log.streams[stream as usize];
        if state.segment != NONE {
            let builder = self.builder(stream, buf);
            if builder.fits(1 + blocks, 1, entries) {
                return Ok(builder);
            }
            self.return_builder(builder);
            // A checkpoint waits until no segment is being closed; closing the next one would hold it up
            // under load until no segment is free.
            if self.log.sealing.len() >= SEALING_MAX || self.checkpoint.held_up {
                return Err(buf);
            }
            self.seal(stream);
        }
        let room_is_near = self.space.released_count() > 0;
        let reserve = match (stream, moving) {
            (Stream::Log, true) => 0,
            (Stream::Main, true) if room_is_near => RESERVE_READ_CACHE,
            (Stream::Log, false) | (Stream::Main, true) => RESERVE_WRITES,
            _ => RESERVE_READ_CACHE,
        };
        let Some(segment) = self.space.open_segment(stream, reserve) else {
            return Err(buf);
        };
        let state = self.log.stream(stream);
        state.segment = segment;
        state.next_block = 0;
        state.published_block = 0;
        let mut builder = self.builder(stream, buf);
        self.write_segment_header(&mut builder);
        Ok(builder)
    }

    fn builder(&mut self, stream: Stream, buf: Buf) -> Builder {
        let state = &self.log.streams[stream as usize];
        let mut append = self.log.spare.pop().unwrap_or_else(|| Append::new(stream, buf));
        append.stream = stream;
        append.segment = state.segment;
        append.buf = buf;
        append.done = false;
        append.dsync = false;
        append.repairs = false;
        append.records.clear();
        append.entries.clear();
        append.ops.clear();
        Builder {
            stream,
            segment: state.segment,
            sequence: self.space.segments[state.segment as usize].sequence,
            first_block: state.next_block,
            block: state.next_block,
            segment_blocks: self.geo.segment_blocks,
            buf,
            records: state.records.len(),
            entries: state.entries.len(),
            append,
            record: None,
        }
    }

    fn return_builder(&mut self, builder: Builder) {
        self.log.spare.push(builder.append);
    }

    fn write_segment_header(&mut self, builder: &mut Builder) {
        let header = SegmentHeader {
            magic: SEGMENT_MAGIC,
            crc: U32::ZERO,
            version: U16::new(FORMAT_VERSION),
            stream: builder.stream as u8,
            reserved: 0,
            segment: U32::new(builder.segment),
            uuid: self.geo.uuid,
            segment_sequence: U64::new(builder.sequence),
            checkpoint: U64::new(self.checkpoint.durable),
        };
        let bytes = self.arena.bytes_mut(builder.slot(0));
        bytes.fill(0);
        header.write_to_prefix(bytes).expect("a header is smaller than a block");
        format::seal::<SegmentHeader>(bytes);
        builder.block = 1;
    }

    /// Writes the append to the device. A builder without records is put away.
    pub(crate) fn issue_append(&mut self, builder: Builder, dsync: bool) {
        debug_assert!(builder.record.is_none() && !builder.append.records.is_empty());
        let stream = builder.stream;
        // The peer before the device: the way is longer, and until the device's turn comes nobody changes the buffer.
        self.send_records(&builder);
        let first = self.geo.segment_block(builder.segment) + builder.first_block;
        let bytes = (builder.block - builder.first_block) as usize * BLOCK_BYTES;
        let mut append = builder.append;
        append.end_block = builder.block;
        append.dsync = dsync;
        let segment_first = self.geo.segment_block(builder.segment);
        let state = self.log.stream(stream);
        let mut header = builder.first_block + u32::from(builder.first_block == 0);
        for record in &append.records {
            let entries = &append.entries[record.first as usize..record.end as usize];
            state.records.push(SummaryRecord {
                sequence: U64::new(record.sequence),
                header_crc: U32::new(record.header_crc),
                volume: U16::new(record.volume.0),
                first_block: U16::new(header as u16),
                entries: U16::new(entries.len() as u16),
                kind: record.kind as u8,
                reserved: 0,
            });
            state.entries.extend(entries.iter().map(|b| b.entry));
            let data = entries.iter().filter(|b| b.entry.has_data()).count() as u32;
            if let Some(b) = entries.iter().find(|b| b.entry.has_data()) {
                debug_assert_eq!(b.position, segment_first + header + 1);
            }
            header += 1 + data;
        }
        state.issued += 1;
        state.next_block = builder.block;
        append.number = state.issued;
        self.device.appends += 1;
        self.device.records += append.records.len() as u64;
        self.device.appended_bytes += bytes as u64;
        self.checkpoint.appended_bytes += bytes as u64;
        let buf = append.buf.slice(0, bytes);
        let index = self.appends.insert(append);
        self.log.stream(stream).in_flight.push_back(index);
        self.out.write(Io::Append(index), byte(first), buf, dsync);
    }

    /// Closes the open segment of a stream: its summary is written when all its appends are published.
    pub(crate) fn seal(&mut self, stream: Stream) {
        let spare = self.log.spare_summaries.pop().unwrap_or_default();
        let state = self.log.stream(stream);
        if state.segment == NONE {
            return;
        }
        let sealing = Sealing {
            stream,
            segment: std::mem::replace(&mut state.segment, NONE),
            last: state.issued,
            records: std::mem::replace(&mut state.records, spare.0),
            entries: std::mem::replace(&mut state.entries, spare.1),
            issued: false,
        };
        self.space.set_state(sealing.segment, SegmentState::Sealing);
        self.log.sealing.push(sealing);
        self.pump_seals();
    }

    /// Writes summaries whose segments are completely published.
    pub(crate) fn pump_seals(&mut self) {
        for i in 0..self.log.sealing.len() {
            let s = &self.log.sealing[i];
            if s.issued || self.log.streams[s.stream as usize].published < s.last {
                continue;
            }
            let Some(buf) = self.pools.summary.take() else { return };
            let blocks = Geometry::summary_blocks(s.records.len(), s.entries.len());
            let segment = s.segment;
            let bytes = blocks as usize * BLOCK_BYTES;
            let sequence = self.space.segments[segment as usize].sequence;
            encode_summary(
                &self.geo,
                segment,
                sequence,
                &s.records,
                &s.entries,
                &mut self.arena.bytes_mut(buf)[..bytes],
            );
            self.log.sealing[i].issued = true;
            self.space.set_summary_blocks(segment, blocks);
            let first = self.geo.segment_block(segment) + self.geo.segment_blocks - blocks;
            self.out.write(Io::Seal { segment, buf }, byte(first), buf.slice(0, bytes), false);
        }
    }

    pub(crate) fn seal_done(&mut self, segment: u32, buf: Buf) {
        self.pools.summary.give(buf);
        let at = self.log.sealing.iter().position(|s| s.segment == segment).expect("it is being sealed");
        let mut sealing = self.log.sealing.swap_remove(at);
        sealing.records.clear();
        sealing.entries.clear();
        self.log.spare_summaries.push((sealing.records, sealing.entries));
        self.space.set_state(segment, SegmentState::Sealed);
        self.pump_seals();
    }

    /// An append has been written: publishes it and those behind it that were waiting.
    pub(crate) fn append_done(&mut self, now: Nanos, index: u32) {
        self.appends[index].done = true;
        let stream = self.appends[index].stream;
        while let Some(&front) = self.log.streams[stream as usize].in_flight.front() {
            if !self.appends[front].done {
                break;
            }
            self.log.stream(stream).in_flight.pop_front();
            let append = self.appends.remove(front);
            self.publish(now, &append);
            if mutated!(AckBeforeWritten)
                && let Some(&next) = self.log.streams[stream as usize].in_flight.front()
            {
                for op in std::mem::take(&mut self.appends[next].ops) {
                    self.op_published(now, op, append.number);
                }
            }
            self.pools.append.give(append.buf);
            self.log.spare.push(append);
        }
        self.pump_seals();
    }

    fn publish(&mut self, now: Nanos, append: &Append) {
        for record in &append.records {
            let entries = &append.entries[record.first as usize..record.end as usize];
            match record.kind {
                RecordKind::Write => self.publish_write(now, record, entries),
                RecordKind::Fill => self.publish_fill(record, entries),
                RecordKind::Move => self.publish_move(now, record, entries),
            }
        }
        if append.records[0].kind == RecordKind::Move {
            if append.repairs { self.repaired() } else { self.reclaim_published() }
        }
        self.note_places(append);
        let state = self.log.stream(append.stream);
        assert_eq!(append.number, state.published + 1, "appends are published in order");
        let all_stable_before = state.stable == state.published;
        state.published = append.number;
        if state.segment == append.segment {
            state.published_block = append.end_block;
        }
        if append.dsync && (all_stable_before || mutated!(FuaCoversWhatIsBefore)) {
            state.stable = append.number;
            if append.stream == Stream::Log {
                for volume in self.volumes.iter_mut().flatten() {
                    volume.log.note_durable(volume.log.published());
                }
            }
        }
        if append.stream == Stream::Log {
            for &op in &append.ops {
                self.op_published(now, op, append.number);
            }
            self.pump_sync(now);
        }
    }
}

/// Writes a segment's summary into `out`, which has exactly its blocks.
pub(crate) fn encode_summary(
    geo: &Geometry,
    segment: u32,
    segment_sequence: u64,
    records: &[SummaryRecord],
    entries: &[Entry],
    out: &mut [u8],
) {
    let blocks = (out.len() / BLOCK_BYTES) as u32;
    debug_assert_eq!(blocks, Geometry::summary_blocks(records.len(), entries.len()));
    out.fill(0);
    let header = SummaryHeader {
        magic: SUMMARY_MAGIC,
        crc: U32::ZERO,
        uuid: geo.uuid,
        segment: U32::new(segment),
        blocks: U32::new(blocks),
        segment_sequence: U64::new(segment_sequence),
        records: U32::new(records.len() as u32),
        entries: U32::new(entries.len() as u32),
    };
    header.write_to_prefix(out).expect("a header is smaller than a block");
    let at = size_of::<SummaryHeader>();
    let mid = at + size_of_val(records);
    out[at..mid].copy_from_slice(records.as_bytes());
    out[mid..mid + size_of_val(entries)].copy_from_slice(entries.as_bytes());
    format::seal::<SummaryHeader>(out);
}

/// Reads a summary; `None` if it is damaged or belongs to another life of the segment.
pub(crate) fn decode_summary(
    geo: &Geometry,
    segment: u32,
    segment_sequence: u64,
    bytes: &[u8],
) -> Option<(Vec<SummaryRecord>, Vec<Entry>)> {
    let header: SummaryHeader = format::open(bytes)?;
    let (records, entries) = (header.records.get() as usize, header.entries.get() as usize);
    if header.magic != SUMMARY_MAGIC
        || header.uuid != geo.uuid
        || header.segment.get() != segment
        || header.segment_sequence.get() != segment_sequence
        || header.blocks.get() as usize * BLOCK_BYTES != bytes.len()
        || Geometry::summary_blocks(records, entries) != header.blocks.get()
    {
        return None;
    }
    let at = size_of::<SummaryHeader>();
    let mid = at + records * size_of::<SummaryRecord>();
    let end = mid + entries * size_of::<Entry>();
    use zerocopy::FromBytes;
    let records = <[SummaryRecord]>::ref_from_bytes(&bytes[at..mid]).ok()?.to_vec();
    let entries = <[Entry]>::ref_from_bytes(&bytes[mid..end]).ok()?.to_vec();
    Some((records, entries))
}

/// Copies a client's block into an append and returns its CRC.
pub(crate) fn copy_block(arena: &mut Arena, from: Buf, to: Buf) -> u32 {
    arena.copy(from, to);
    crc32c(arena.bytes(to))
}

#[cfg(test)]
mod tests;
