//! The log: append streams, in which records are written in batches and take effect in order.
//!
//! A record gathers the entries of one volume behind one header; an *append* is one device write of
//! one or more records, of any volumes. Appends of a stream may complete out of order on the
//! device; they take effect (index updated, writes acknowledged) in the order in which they were
//! built.
//!
//! | file | what it is about |
//! |---|---|
//! | `build` | An append while it is built |
//! | `copy` | The second copy of a volume's log at its peer, as the owner knows it (RFC 9) |
//! | `mirror` | The newest segments in memory |
//! | `sequences` | How far the log of one volume is |
//! | `stable` | What of the log is on stable media, and who waits for that |

pub(crate) mod build;
pub(crate) mod copy;
mod mirror;
pub(crate) mod sequences;
pub(crate) mod stable;

use crate::api::{BLOCK_BYTES, IoError};
use crate::base::flight::{DeviceFailed, Io, OpId};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::For;
use crate::base::shared::Base;
use crate::base::util::Slab;
use crate::blocks::index::Position;
use crate::blocks::space::{NONE, RESERVE_READ_CACHE, RESERVE_WRITES, Space};
use crate::format::summary::encode_summary;
use crate::format::{
    self, Entry, FORMAT_VERSION, Geometry, SEGMENT_MAGIC, SegmentHeader, Stream, SummaryRecord,
    byte,
};
use crate::log::build::{Append, Builder, BuiltEntry};
use crate::log::mirror::Mirror;
use crate::log::stable::Stable;
use std::collections::VecDeque;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Segments whose summaries are outstanding; at more, appends wait.
const SEALING_MAX: usize = 4;

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
struct StreamState {
    segment: u32,
    next_block: u32,
    /// Everything before this block of the open segment is published.
    published_block: u32,
    records: Vec<SummaryRecord>,
    entries: Vec<Entry>,
    in_flight: VecDeque<u32>,
    /// Number of the newest append that was issued, published, known stable.
    issued: u64,
    published: u64,
    stable: u64,
}

/// All streams and what is in flight in them.
pub(crate) struct Log {
    streams: [StreamState; 3],
    appends: Slab<Append>,
    sealing: Vec<Sealing>,
    /// Appends with their memory, to be used again.
    spare: Vec<Append>,
    spare_summaries: Vec<(Vec<SummaryRecord>, Vec<Entry>)>,
    stable: Stable,
    mirror: Mirror,
    /// A segment is being packed into the last free ones, or a block is being repaired: writes must
    /// leave room for that.
    reclaims: bool,
    repairs: bool,
}

/// What an append is begun for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    stream: Stream,
    /// Data blocks and entries that its first record has at least.
    least: (u32, usize),
    /// Reclaim or a repair wants it, which may use the last segments.
    moves: bool,
}

impl Want {
    /// For changes, the first record of which has at least so many data blocks and entries.
    pub(crate) fn changes(least: (u32, usize)) -> Want {
        Want { stream: Stream::Log, least, moves: false }
    }

    /// For blocks that come into the read cache.
    pub(crate) fn fills(stream: Stream) -> Want {
        Want { stream, least: (1, 1), moves: false }
    }

    /// For blocks that reclaim moves or a repair brings back.
    pub(crate) fn moves(stream: Stream) -> Want {
        Want { stream, least: (1, 1), moves: true }
    }
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
            appends: Slab::with_capacity(64),
            sealing: Vec::with_capacity(SEALING_MAX),
            spare: Vec::new(),
            spare_summaries: Vec::new(),
            stable: Stable::default(),
            mirror: Mirror::default(),
            reclaims: false,
            repairs: false,
        }
    }

    fn stream(&mut self, stream: Stream) -> &mut StreamState {
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

    /// Zero ranges in records that are not published.
    pub(crate) fn unpublished_ranges(&self) -> usize {
        let log = &self.streams[Stream::Log as usize];
        let ranges =
            |&i: &u32| self.appends[i].entries.iter().filter(|b| !b.entry.has_data()).count();
        log.in_flight.iter().map(ranges).sum()
    }

    /// Nothing is in flight in any stream.
    pub(crate) fn is_idle(&self) -> bool {
        self.sealing.is_empty() && self.streams.iter().all(|s| s.in_flight.is_empty())
    }

    /// A segment is being reclaimed, or not any more.
    pub(crate) fn set_reclaims(&mut self, reclaims: bool) {
        self.reclaims = reclaims;
    }

    /// Blocks are being repaired, or not any more.
    pub(crate) fn set_repairs(&mut self, repairs: bool) {
        self.repairs = repairs;
    }

    /// Appends of a stream that the device has not completed.
    pub(crate) fn in_flight(&self, stream: Stream) -> usize {
        self.streams[stream as usize].in_flight.len()
    }

    /// The newest append of a stream that has taken effect.
    pub(crate) fn published(&self, stream: Stream) -> u64 {
        self.streams[stream as usize].published
    }

    /// By stream: the open segment, and the first block of it that has not taken effect.
    pub(crate) fn open_places(&self) -> [(u32, u32); 3] {
        self.streams.each_ref().map(|s| (s.segment, s.published_block))
    }

    /// Starts an append of at least one record, or gives the buffer back where there is no segment
    /// for it now.
    pub(crate) fn begin(
        &mut self,
        base: &mut Base,
        space: &mut Space,
        want: Want,
        buf: Buf,
    ) -> Result<Builder, Buf> {
        let Want { stream, least: (blocks, entries), moves } = want;
        if base.is_dead() {
            return Err(buf);
        }
        let is_short = space.free_count() < RESERVE_WRITES;
        if stream == Stream::Log && !moves && is_short && (self.reclaims || self.repairs) {
            return Err(buf);
        }
        if self.streams[stream as usize].segment != NONE {
            let builder = self.builder(base, space, stream, buf);
            if builder.fits(1 + blocks, 1, entries) {
                return Ok(give_unused(base, builder, buf));
            }
            self.spare.push(builder.append);
            // A checkpoint waits until no segment is being closed; closing the next one would hold
            // it up under load until no segment is free.
            if self.sealing.len() >= SEALING_MAX || base.checkpoints().is_held_up() {
                return Err(buf);
            }
            self.seal(base, space, stream);
        }
        let room_is_near = space.released_count() > 0;
        let reserve = match (stream, moves) {
            (Stream::Log, true) => 0,
            (Stream::Main, true) if room_is_near => RESERVE_READ_CACHE,
            (Stream::Log, false) | (Stream::Main, true) => RESERVE_WRITES,
            _ => RESERVE_READ_CACHE,
        };
        let Some(segment) = space.open_segment(stream, reserve) else {
            return Err(buf);
        };
        let state = self.stream(stream);
        (state.segment, state.next_block, state.published_block) = (segment, 0, 0);
        self.mirror_segment(base, stream, segment);
        let mut builder = self.builder(base, space, stream, buf);
        write_segment_header(base, &mut builder);
        Ok(give_unused(base, builder, buf))
    }

    /// A segment begins: one of the log is mirrored, if there is memory for it.
    fn mirror_segment(&mut self, base: &mut Base, stream: Stream, segment: u32) {
        let pools = base.pools_mut();
        let before = self.mirror.forget(segment);
        before.into_iter().for_each(|buf| pools.give(For::Mirror, buf));
        if stream != Stream::Log {
            return;
        }
        // What is in flight is written from there.
        let sealing = &self.sealing;
        let in_use = |segment| sealing.iter().any(|sealing| sealing.segment == segment);
        let buf = pools.take(For::Mirror).or_else(|| self.mirror.evict(in_use));
        buf.into_iter().for_each(|buf| self.mirror.open(segment, buf));
    }

    /// `n` blocks that follow each other on the device, if they are in memory as they were written.
    pub(crate) fn mirrored(&self, geo: &Geometry, position: Position, n: usize) -> Option<Buf> {
        let segment = geo.segment_of(position);
        self.mirror.blocks(segment, position - geo.segment_block(segment), n)
    }

    fn builder(&mut self, base: &Base, space: &Space, stream: Stream, buf: Buf) -> Builder {
        let state = &self.streams[stream as usize];
        let mut append = self.spare.pop().unwrap_or_else(|| Append::new(stream, buf));
        let mirror = (stream == Stream::Log)
            .then(|| self.mirror.rest(state.segment, state.next_block))
            .flatten()
            .map(|rest| rest.slice(0, rest.len.min(buf.len) as usize));
        append.reset(stream, state.segment, mirror.unwrap_or(buf), mirror.is_some());
        let buf = append.buf;
        Builder {
            stream,
            segment: state.segment,
            sequence: space.segment(state.segment).life(),
            epoch: space.epoch(),
            segment_first: base.geo().segment_block(state.segment),
            first_block: state.next_block,
            block: state.next_block,
            segment_blocks: base.geo().segment_blocks,
            buf,
            records: state.records.len(),
            entries: state.entries.len(),
            append,
            record: None,
        }
    }

    /// Writes an append of at least one record to the device.
    pub(crate) fn issue(&mut self, base: &mut Base, builder: Builder, dsync: bool) {
        debug_assert!(builder.record.is_none() && !builder.append.records.is_empty());
        let stream = builder.stream;
        let segment_first = builder.segment_first;
        let bytes = (builder.block - builder.first_block) as usize * BLOCK_BYTES;
        let mut append = builder.append;
        append.end_block = builder.block;
        append.dsync = dsync;
        let state = self.stream(stream);
        let mut header = builder.first_block + u32::from(builder.first_block == 0);
        for (record, entries) in append.records() {
            state.records.push(SummaryRecord {
                sequence: U64::new(record.sequence()),
                header_crc: U32::new(record.header_crc()),
                volume: U16::new(record.volume().0),
                first_block: U16::new(header as u16),
                entries: U16::new(entries.len() as u16),
                kind: record.kind() as u8,
                reserved: 0,
            });
            state.entries.extend(entries.iter().map(BuiltEntry::entry));
            let mut data = entries.iter().filter(|built| built.entry().has_data());
            if let Some(first) = data.clone().next() {
                debug_assert_eq!(first.position(), segment_first + header + 1);
            }
            header += 1 + data.by_ref().count() as u32;
        }
        state.issued += 1;
        state.next_block = builder.block;
        append.number = state.issued;
        let records = append.records.len();
        let buf = append.buf.slice(0, bytes);
        let index = self.appends.insert(append);
        self.stream(stream).in_flight.push_back(index);
        let offset = byte(segment_first + builder.first_block);
        base.write_append(Io::Append(index), offset, buf, records, dsync);
    }

    /// The device has completed an append; see [`Log::next_published`].
    ///
    /// # Errors
    /// The device has failed: what the append was to bring will never take effect.
    pub(crate) fn written(
        &mut self,
        base: &mut Base,
        index: u32,
        result: Result<(), IoError>,
    ) -> Result<Stream, DeviceFailed> {
        if result.is_err() || base.is_dead() {
            let append = self.appends.remove(index);
            self.stream(append.stream).in_flight.retain(|&i| i != index);
            give_back(base, &append);
            return Err(DeviceFailed);
        }
        self.appends[index].done = true;
        Ok(self.appends[index].stream)
    }

    /// Takes out the next append of a stream that takes effect: appends do in the order in which
    /// they were built.
    pub(crate) fn next_published(&mut self, stream: Stream) -> Option<Append> {
        let &front = self.streams[stream as usize].in_flight.front()?;
        if !self.appends[front].done {
            return None;
        }
        self.stream(stream).in_flight.pop_front();
        Some(self.appends.remove(front))
    }

    /// Takes out the operations of the oldest append in flight, for a deliberate bug.
    pub(crate) fn take_next_ops(&mut self, stream: Stream) -> Vec<OpId> {
        let front = self.streams[stream as usize].in_flight.front();
        front.map(|&next| std::mem::take(&mut self.appends[next].ops)).unwrap_or_default()
    }

    /// The records of an append have taken effect. Tells whether everything in its stream is on
    /// stable media with it.
    pub(crate) fn note_published(&mut self, append: &Append) -> bool {
        let state = self.stream(append.stream);
        assert_eq!(append.number, state.published + 1, "appends are published in order");
        let all_stable_before = state.stable == state.published;
        state.published = append.number;
        if state.segment == append.segment {
            state.published_block = append.end_block;
        }
        let is_stable = append.dsync && (all_stable_before || mutated!(FuaCoversWhatIsBefore));
        if is_stable {
            state.stable = append.number;
        }
        is_stable
    }

    /// Nobody needs an append any more.
    pub(crate) fn put_away(&mut self, base: &mut Base, append: Append) {
        give_back(base, &append);
        self.spare.push(append);
    }

    /// The device has failed: nothing that is in flight takes effect.
    pub(crate) fn abandon(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.in_flight.clear());
    }

    /// Closes the open segment of a stream: its summary is written when all its appends have taken
    /// effect.
    fn seal(&mut self, base: &mut Base, space: &mut Space, stream: Stream) {
        let spare = self.spare_summaries.pop().unwrap_or_default();
        let state = self.stream(stream);
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
        space.begin_seal(sealing.segment);
        self.sealing.push(sealing);
        self.write_summaries(base, space);
    }

    /// Writes summaries whose segments have taken effect completely.
    pub(crate) fn write_summaries(&mut self, base: &mut Base, space: &mut Space) {
        for i in 0..self.sealing.len() {
            let s = &self.sealing[i];
            if s.issued || self.streams[s.stream as usize].published < s.last {
                continue;
            }
            let Some(buf) = base.pools_mut().take(For::Summary) else { return };
            let blocks = Geometry::summary_blocks(s.records.len(), s.entries.len());
            let segment = s.segment;
            let bytes = blocks as usize * BLOCK_BYTES;
            let life = space.segment(segment).life();
            let geo = *base.geo();
            let out = &mut base.bytes_mut(buf)[..bytes];
            encode_summary(&geo, (segment, life), &s.records, &s.entries, out);
            self.sealing[i].issued = true;
            space.set_summary_blocks(segment, blocks);
            let first = geo.segment_block(segment) + geo.segment_blocks - blocks;
            base.write(Io::Seal { segment, buf }, byte(first), buf.slice(0, bytes), false);
        }
    }

    /// A summary has been written.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn seal_done(
        &mut self,
        base: &mut Base,
        space: &mut Space,
        (segment, buf): (u32, Buf),
        result: Result<(), IoError>,
    ) -> Result<(), DeviceFailed> {
        base.pools_mut().give(For::Summary, buf);
        if result.is_err() || base.is_dead() {
            return Err(DeviceFailed);
        }
        let at =
            self.sealing.iter().position(|s| s.segment == segment).expect("it is being sealed");
        let mut sealing = self.sealing.swap_remove(at);
        sealing.records.clear();
        sealing.entries.clear();
        self.spare_summaries.push((sealing.records, sealing.entries));
        space.end_seal(segment);
        self.write_summaries(base, space);
        Ok(())
    }
}

/// The append is built in the mirror, or else in `buf`, which is given back if it is not needed.
fn give_unused(base: &mut Base, builder: Builder, buf: Buf) -> Builder {
    if builder.append.is_mirrored {
        base.pools_mut().give(For::Append, buf);
    }
    builder
}

/// Nobody needs the memory of an append any more. What is in the mirror stays there.
fn give_back(base: &mut Base, append: &Append) {
    if !append.is_mirrored {
        base.pools_mut().give(For::Append, append.buf);
    }
}

fn write_segment_header(base: &mut Base, builder: &mut Builder) {
    let header = SegmentHeader {
        magic: SEGMENT_MAGIC,
        crc: U32::ZERO,
        version: U16::new(FORMAT_VERSION),
        stream: builder.stream as u8,
        reserved: 0,
        segment: U32::new(builder.segment),
        uuid: base.geo().uuid,
        segment_sequence: U64::new(builder.sequence),
        checkpoint: U64::new(base.checkpoints().durable()),
    };
    let bytes = base.bytes_mut(builder.slot(0));
    bytes.fill(0);
    header.write_to_prefix(bytes).expect("a header is smaller than a block");
    format::seal::<SegmentHeader>(bytes);
    builder.block = 1;
}
