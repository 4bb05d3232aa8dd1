//! Replay: the records that were written after the checkpoint take effect again, in log order, up
//! to the first that is torn.

use crate::api::{BLOCK_BYTES, Nanos, VolumeId};
use crate::base::device::Device;
use crate::base::mem::AlignedBuf;
use crate::base::mutation::mutated;
use crate::blocks::index::{Lookup, Position};
use crate::engine::Engine;
use crate::format::record::Record;
use crate::format::summary::decode_summary;
use crate::format::*;
use crate::ground::volume::Volume;
use crate::recovery::recover::{OpenError, read};
use crate::status::RecoveryReport;
use std::collections::{BTreeMap, HashMap, HashSet};
use zerocopy::little_endian::U16;

/// A record as read back.
pub(crate) struct FoundRecord {
    pub(super) header: RecordHeader,
    /// Block of the header within the segment.
    pub(super) first_block: u32,
    pub(super) entries: Vec<Entry>,
    /// Old positions (moves).
    olds: Vec<u32>,
    /// Whether the data of each entry verifies; true for ranges.
    good: Vec<bool>,
    /// Some of its data does not because the device could not read it.
    unreadable: bool,
}

impl FoundRecord {
    /// As a summary holds it.
    pub(crate) fn summary(&self) -> SummaryRecord {
        SummaryRecord {
            sequence: self.header.sequence,
            header_crc: self.header.crc,
            volume: self.header.volume,
            first_block: U16::new(self.first_block as u16),
            entries: U16::new(self.entries.len() as u16),
            kind: self.header.kind,
            reserved: 0,
        }
    }
}

/// All records of one segment that has no summary yet, or none that is known to be complete.
pub(crate) struct SegmentRecords {
    pub(super) segment: u32,
    pub(super) segment_sequence: u64,
    pub(super) stream: Stream,
    /// Records from this block on are not contained in the checkpoint.
    pub(super) tail_from: u32,
    pub(super) records: Vec<FoundRecord>,
    /// Newest checkpoint that was durable when something in here was written.
    pub(super) newest_checkpoint: u64,
    /// Newest epoch of its records.
    pub(super) newest_epoch: u64,
    /// The segment has a valid summary of so many blocks.
    pub(super) summary_blocks: Option<u32>,
    /// Write records that the summary knows and that are not among `records`, with their first
    /// blocks.
    missing: Vec<(u32, u16, u64, Vec<Entry>)>,
    /// Blocks that could not be read, and those of them where a record should begin: nobody knows
    /// whether one does.
    unreadable: Vec<u32>,
    hidden: Vec<u32>,
}

impl SegmentRecords {
    /// Reads a whole segment and finds its records. What cannot be read counts as damaged.
    ///
    /// # Errors
    /// A newer version has written into it: that is no torn tail, and nothing of it may be cut.
    pub(crate) fn read(
        device: &mut dyn Device,
        geo: &Geometry,
        segment: u32,
        sequence: u64,
        stream: u8,
    ) -> Result<SegmentRecords, OpenError> {
        let blocks = geo.segment_blocks as usize;
        let mut buf = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
        let mut unreadable = Vec::new();
        let first = geo.segment_block(segment);
        for (i, part) in buf.chunks_mut(64 * BLOCK_BYTES).enumerate() {
            if read(device, byte(first) + (i * 64 * BLOCK_BYTES) as u64, part).is_ok() {
                continue;
            }
            // A bad sector spoils its own block only.
            for (j, block) in part.chunks_mut(BLOCK_BYTES).enumerate() {
                let number = (i * 64 + j) as u32;
                if read(device, byte(first + number), block).is_err() {
                    block.fill(0);
                    unreadable.push(number);
                }
            }
        }
        let mut found = SegmentRecords {
            segment,
            segment_sequence: sequence,
            stream: Stream::from_number(stream).unwrap_or(Stream::Log),
            tail_from: 0,
            records: Vec::new(),
            newest_checkpoint: 0,
            newest_epoch: 0,
            summary_blocks: None,
            missing: Vec::new(),
            unreadable,
            hidden: Vec::new(),
        };
        if let Some(header) = open::<SegmentHeader>(&buf[..BLOCK_BYTES])
            && header.uuid == geo.uuid
            && header.segment_sequence.get() == sequence
        {
            if let Some(version) = newer(header.version) {
                return Err(OpenError::Version(version));
            }
            found.newest_checkpoint = header.checkpoint.get();
        }
        found.find_records(geo, &buf)?;
        found.find_summary(geo, &buf);
        Ok(found)
    }

    /// Whether records of the log may stand behind the checkpoint that the device could not read
    /// and that nothing tells of: a summary knows all records of its segment.
    pub(crate) fn hides_log(&self) -> bool {
        // Where the checkpoint ends a record begins, if there is one; block 0 is the segment's
        // header.
        let at_mark = self.tail_from > 0 && self.unreadable.contains(&self.tail_from);
        let hidden = at_mark || self.hidden.iter().any(|&block| block >= self.tail_from);
        self.stream == Stream::Log && self.summary_blocks.is_none() && hidden
    }

    /// Forgets what the checkpoint does not contain and what was not written since it: left-overs
    /// behind the end of the log, from before it went on in this segment.
    pub(crate) fn keep_epoch(&mut self, epoch: u64) {
        let tail_from = self.tail_from;
        self.records.retain(|r| r.first_block < tail_from || r.header.epoch.get() == epoch);
    }

    /// The block behind the last record, `None` if there is no record.
    pub(crate) fn next_block(&self) -> Option<u32> {
        let end = |r: &FoundRecord| r.first_block + 1 + u32::from(r.header.blocks.get());
        self.records.last().map(end).map(|end| end.max(self.tail_from))
    }

    fn find_records(&mut self, geo: &Geometry, bytes: &[u8]) -> Result<(), OpenError> {
        let block = |n: usize| &bytes[n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES];
        let blocks = bytes.len() / BLOCK_BYTES;
        let mut at = 1;
        let mut begins = true;
        while at < blocks {
            let record = decode_record(block(at)).filter(|r| {
                r.header.uuid == geo.uuid
                    && r.header.segment_sequence.get() == self.segment_sequence
                    && at + 1 + usize::from(r.header.blocks.get()) <= blocks
            });
            // Behind a damaged header the next valid one is looked for block by block.
            let Some(mut record) = record else {
                if let Some(version) = newer_record(block(at), geo, self.segment_sequence) {
                    return Err(OpenError::Version(version));
                }
                if std::mem::take(&mut begins) && self.unreadable.contains(&(at as u32)) {
                    self.hidden.push(at as u32);
                }
                at += 1;
                continue;
            };
            begins = true;
            record.first_block = at as u32;
            let mut data = at + 1;
            for entry in &record.entries {
                let mut good = true;
                if entry.has_data() {
                    good = entry.kind() == Some(EntryKind::Data)
                        && (mutated!(SkipReplayCrc) || crc32c(block(data)) == entry.value());
                    record.unreadable |= !good && self.unreadable.contains(&(data as u32));
                    data += 1;
                }
                record.good.push(good);
            }
            self.newest_checkpoint = self.newest_checkpoint.max(record.header.checkpoint.get());
            self.newest_epoch = self.newest_epoch.max(record.header.epoch.get());
            at = data;
            self.records.push(record);
        }
        Ok(())
    }

    /// Looks for the segment's summary from its end on.
    fn find_summary(&mut self, geo: &Geometry, bytes: &[u8]) {
        let blocks = bytes.len() / BLOCK_BYTES;
        for n in 1..=(SUMMARY_BLOCKS_MAX as usize).min(blocks - 1) {
            let tail = &bytes[(blocks - n) * BLOCK_BYTES..];
            if tail[..4] != SUMMARY_MAGIC {
                continue;
            }
            let Some((records, entries)) =
                decode_summary(geo, self.segment, self.segment_sequence, tail)
            else {
                continue;
            };
            self.summary_blocks = Some(n as u32);
            let mut entries = entries.into_iter();
            for record in records {
                let own: Vec<Entry> =
                    entries.by_ref().take(usize::from(record.entries.get())).collect();
                let known = self
                    .records
                    .iter()
                    .any(|r| r.first_block == u32::from(record.first_block.get()));
                if !known && record.kind == RecordKind::Write as u8 {
                    let first_block = u32::from(record.first_block.get());
                    self.missing.push((
                        first_block,
                        record.volume.get(),
                        record.sequence.get(),
                        own,
                    ));
                }
            }
            return;
        }
    }
}

/// A record's header block, if it is one.
fn decode_record(bytes: &[u8]) -> Option<FoundRecord> {
    let Record { header, entries, olds } = Record::decode(bytes)?;
    let good = Vec::with_capacity(entries.len());
    Some(FoundRecord { header, first_block: 0, entries, olds, good, unreadable: false })
}

/// The version of a block that is the header of a record of this life of the segment, if this
/// program does not know it.
fn newer_record(bytes: &[u8], geo: &Geometry, segment_sequence: u64) -> Option<u16> {
    if bytes[..4] != RECORD_MAGIC {
        return None;
    }
    let header: RecordHeader = open(bytes)?;
    let here = header.uuid == geo.uuid && header.segment_sequence.get() == segment_sequence;
    newer(header.version).filter(|_| here)
}

/// How far a volume's log reaches, and what in it is damaged.
#[derive(Default)]
struct Verdict {
    cut: u64,
    chain: u32,
    /// Durable records that are gone but whose blocks are known.
    gone: BTreeMap<u64, Vec<Entry>>,
    failed: bool,
    /// It ends with a record that may be whole: the device could not read it.
    unreadable: bool,
}

/// Applies the records of `tail`, sorted by stream and life of the segment. Returns whether the log
/// may go on with records that the device could not read: what looks like a torn tail may have been
/// durable.
pub(crate) fn replay(
    engine: &mut Engine,
    tail: &[SegmentRecords],
    report: &mut RecoveryReport,
    now: Nanos,
) -> bool {
    let moved = moved_copies(engine.ground.geo(), tail);
    let judged = |id| Some(judge(engine.ground.get(id)?, id.0, engine.ground.geo(), tail, &moved));
    let verdicts: Vec<Option<Verdict>> = engine.ground.places().map(judged).collect();
    let unreadable = tail.iter().any(SegmentRecords::hides_log)
        || verdicts.iter().flatten().any(|verdict| verdict.unreadable);
    let published = |id| engine.ground.get(id).map_or(0, |volume| volume.log().published());
    let checkpointed: Vec<u64> = engine.ground.places().map(published).collect();
    let mut r = Replay {
        engine,
        verdicts,
        checkpointed,
        voided: Vec::new(),
        bad: HashMap::new(),
        report,
        now,
    };
    for segment in tail {
        for record in segment.records.iter().filter(|r| r.first_block >= segment.tail_from) {
            let first =
                r.engine.ground.geo().segment_block(segment.segment) + record.first_block + 1;
            match RecordKind::from_number(record.header.kind) {
                Some(RecordKind::Write) => r.write(record, first),
                Some(RecordKind::Move) => r.moved(record, first),
                Some(RecordKind::Fill) => r.fill(record, first),
                None => {}
            }
        }
    }
    r.finish();
    unreadable
}

impl FoundRecord {
    /// Some of its data, which begins at `first`, does not verify. What has been moved since was
    /// whole once: it has gone bad, and the peer had another copy.
    fn is_torn(&self, first: Position, moved: &HashSet<(Position, u32)>) -> bool {
        let mut position = first;
        self.entries.iter().zip(&self.good).any(|(entry, good)| {
            let torn = !good && !moved.contains(&(position, entry.value()));
            position += u32::from(entry.has_data());
            torn
        })
    }
}

/// Where blocks stood that have another good copy, moved from there in one step or more, with their
/// CRC.
fn moved_copies(geo: &Geometry, tail: &[SegmentRecords]) -> HashSet<(Position, u32)> {
    let mut moves: HashMap<(Position, u32), (Position, bool)> = HashMap::new();
    for segment in tail {
        for record in
            segment.records.iter().filter(|record| record.first_block >= segment.tail_from)
        {
            let first = geo.segment_block(segment.segment) + record.first_block + 1;
            let entries = record.olds.iter().zip(&record.entries).zip(&record.good);
            for (position, ((&old, entry), &good)) in (first..).zip(entries) {
                moves.insert((old, entry.value()), (position, good));
            }
        }
    }
    let is_good = |&(old, crc): &(Position, u32)| {
        let mut at = old;
        // A place is moved from once, so that this ends; what is damaged may say anything.
        for _ in 0..=moves.len() {
            match moves.get(&(at, crc)) {
                Some(&(_, true)) => return true,
                Some(&(next, false)) => at = next,
                None => return false,
            }
        }
        false
    };
    moves.keys().copied().filter(is_good).collect()
}

/// Walks a volume's write records in order and finds where its log ends.
fn judge(
    volume: &Volume,
    id: u16,
    geo: &Geometry,
    tail: &[SegmentRecords],
    moved: &HashSet<(Position, u32)>,
) -> Verdict {
    let mut writes: BTreeMap<u64, (Position, &FoundRecord)> = BTreeMap::new();
    let mut durable = volume.log().published();
    for segment in tail {
        for record in segment.records.iter().filter(|r| r.first_block >= segment.tail_from) {
            let h = &record.header;
            if h.volume.get() != id || h.generation.get() != volume.spec().generation {
                continue;
            }
            durable = durable.max(h.durable_sequence.get());
            if h.kind == RecordKind::Write as u8 && h.sequence.get() > volume.log().published() {
                let first = geo.segment_block(segment.segment) + record.first_block + 1;
                writes.insert(h.sequence.get(), (first, record));
            }
        }
    }
    let missing = || {
        let all = tail.iter().flat_map(|t| t.missing.iter().map(move |m| (t, m)));
        all.filter(|(t, m)| m.0 >= t.tail_from && m.1 == id)
    };
    let mut verdict = Verdict {
        cut: volume.log().published(),
        chain: volume.log().chain(),
        ..Verdict::default()
    };
    let mut chain = Some(volume.log().chain());
    loop {
        let next = verdict.cut + 1;
        match writes.get(&next) {
            Some(&(first, record)) => {
                let torn = record.is_torn(first, moved) && !mutated!(ReplayPastTornRecord);
                let linked = chain.is_none_or(|c| c == record.header.chain.get());
                if (torn || !linked) && next > durable {
                    verdict.unreadable = record.unreadable;
                    return verdict;
                }
                if !linked {
                    verdict.failed = true;
                }
                verdict.chain = record.header.crc.get();
                chain = Some(verdict.chain);
            }
            None if next > durable => {
                verdict.unreadable =
                    missing().any(|(t, m)| m.2 == next && t.unreadable.contains(&m.0));
                return verdict;
            }
            None => {
                // It was durable and is gone: corruption, not a torn tail.
                chain = None;
                if let Some((_, known)) = missing().find(|(_, m)| m.2 == next) {
                    verdict.gone.insert(next, known.3.clone());
                } else {
                    verdict.failed = true;
                    // Nothing is known up to the next one of which there is something; a damaged
                    // number may be far off.
                    let written = writes.range(next..).next().map(|(&sequence, _)| sequence);
                    let later =
                        missing().map(|(_, m)| m.2).filter(|&sequence| sequence > next).min();
                    let known =
                        written.into_iter().chain(later).min().map_or(durable, |known| known - 1);
                    verdict.cut = known.min(durable);
                    continue;
                }
            }
        }
        verdict.cut = next;
    }
}

struct Replay<'a> {
    engine: &'a mut Engine,
    verdicts: Vec<Option<Verdict>>,
    /// Sequence of each volume at the checkpoint.
    checkpointed: Vec<u64>,
    /// Ranges that invalidations made void: volume, first block, end, sequence.
    voided: Vec<(usize, u64, u64, u64)>,
    /// Where the newest copy of a lost block is that is bad, by volume and block: it may have been
    /// repaired.
    bad: HashMap<(usize, u64), Position>,
    report: &'a mut RecoveryReport,
    now: Nanos,
}

impl Replay<'_> {
    /// The volume's number, if it exists and the record is of its present owner.
    fn volume_of(&self, record: &FoundRecord) -> Option<usize> {
        let v = usize::from(record.header.volume.get());
        let volume = self.engine.ground.get(VolumeId(v as u16))?;
        (volume.spec().generation == record.header.generation.get()).then_some(v)
    }

    fn write(&mut self, record: &FoundRecord, first: u32) {
        let Some(v) = self.volume_of(record) else { return };
        let sequence = record.header.sequence.get();
        let verdict = self.verdicts[v].as_ref().expect("every volume has a verdict");
        if sequence > verdict.cut {
            self.report.records_cut += 1;
            return;
        }
        if sequence <= self.checkpointed[v] {
            return;
        }
        self.lose_gone(v, sequence);
        self.report.records_replayed += 1;
        let mut position = first;
        for (entry, good) in record.entries.iter().zip(&record.good) {
            let (volume, space) = self.engine.ground.volume_and_space(VolumeId(v as u16));
            let len = if entry.has_data() { 1 } else { u64::from(entry.value()) };
            if len == 0 || entry.block() + len > volume.blocks() {
                position += u32::from(entry.has_data());
                continue;
            }
            match entry.kind() {
                Some(EntryKind::Data) if *good => {
                    volume.ledger_mut().write(
                        space,
                        self.now,
                        (entry.block(), position),
                        std::iter::once(entry.value()),
                    );
                    self.report.blocks_replayed += 1;
                }
                Some(EntryKind::Data) => {
                    self.lose(v, entry.block(), 1);
                    self.bad.insert((v, entry.block()), position);
                }
                Some(EntryKind::Discard | EntryKind::WriteZeroes) => {
                    let keep = entry.kind() == Some(EntryKind::WriteZeroes);
                    let range = entry.block()..entry.block() + len;
                    volume.ledger_mut().zero(space, self.now, range, keep);
                }
                Some(EntryKind::Invalidate) => {
                    self.engine.ground.drop_blocks(VolumeId(v as u16), entry.block(), len);
                    self.voided.push((v, entry.block(), entry.block() + len, sequence));
                }
                Some(EntryKind::Void) | None => {}
            }
            position += u32::from(entry.has_data());
        }
        let header = &record.header;
        self.engine.ground.volume_mut(VolumeId(v as u16)).replay(header.sequence.get());
    }

    /// Marks as lost what durable records before `sequence` held that are gone.
    fn lose_gone(&mut self, v: usize, sequence: u64) {
        loop {
            let verdict = self.verdicts[v].as_mut().expect("every volume has a verdict");
            match verdict.gone.first_key_value() {
                Some((&s, _)) if s < sequence => {}
                _ => return,
            }
            let (_, entries) = verdict.gone.pop_first().expect("looked at just now");
            for entry in entries {
                let len = if entry.has_data() { 1 } else { u64::from(entry.value()) };
                self.lose(v, entry.block(), len);
            }
        }
    }

    fn lose(&mut self, v: usize, block: u64, n: u64) {
        self.bad.retain(|&(of, bad), _| of != v || !(block..block + n).contains(&bad));
        let (volume, space) = self.engine.ground.volume_and_space(VolumeId(v as u16));
        if block + n > volume.blocks() {
            return;
        }
        volume.ledger_mut().lose_range(space, block, n);
    }

    fn moved(&mut self, record: &FoundRecord, first: u32) {
        let id = VolumeId(record.header.volume.get());
        let v = usize::from(id.0);
        let data = record.entries.iter().zip(&record.good).zip(&record.olds).enumerate();
        for (i, ((entry, good), &old)) in data {
            let Some((volume, space)) = self.engine.ground.get_with_space(id) else { return };
            let block = entry.block();
            let position = first + i as u32;
            if !good && self.bad.get(&(v, block)) == Some(&old) {
                // The repaired one has gone bad as well.
                self.bad.insert((v, block), position);
            }
            if !good || block >= volume.blocks() {
                continue;
            }
            let lost = volume.ledger().index().lookup(block) == Lookup::Lost;
            if lost && self.bad.get(&(v, block)) == Some(&old) {
                volume.ledger_mut().write(
                    space,
                    self.now,
                    (block, position),
                    std::iter::once(entry.value()),
                );
            } else {
                volume.ledger_mut().moved(space, block, (old, position), entry.value(), false);
            }
        }
    }

    fn fill(&mut self, record: &FoundRecord, first: u32) {
        let Some(v) = self.volume_of(record) else { return };
        let sequence = record.header.sequence.get();
        if sequence < self.checkpointed[v] {
            // What was decided between then and the checkpoint is not known any more.
            return;
        }
        for (i, (entry, good)) in record.entries.iter().zip(&record.good).enumerate() {
            let block = entry.block();
            let voided = self
                .voided
                .iter()
                .any(|&(w, a, b, s)| w == v && (a..b).contains(&block) && s > sequence);
            let (volume, space) = self.engine.ground.volume_and_space(VolumeId(v as u16));
            let absent =
                block < volume.blocks() && volume.ledger().index().lookup(block) == Lookup::Absent;
            if *good && absent && !voided && entry.kind() == Some(EntryKind::Data) {
                let position = first + i as u32;
                volume.ledger_mut().fill(space, block, position, entry.value());
                self.report.blocks_replayed += 1;
            }
        }
    }

    fn finish(mut self) {
        for v in 0..self.verdicts.len() {
            if self.verdicts[v].is_none() {
                continue;
            }
            self.lose_gone(v, u64::MAX);
            let verdict = self.verdicts[v].take().expect("looked at just now");
            let volume = self.engine.ground.volume_mut(VolumeId(v as u16));
            volume.end_replay(verdict.cut, verdict.chain, verdict.failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{DrainOrder, Mode, VolumeSpec};
    use zerocopy::{FromZeros, IntoBytes};

    fn block(kind: RecordKind, entries: &[Entry], change: impl Fn(&mut RecordHeader)) -> Vec<u8> {
        let mut header = RecordHeader::new_zeroed();
        (header.magic, header.kind) = (RECORD_MAGIC, kind as u8);
        header.generation.set(1);
        header.entries.set(entries.len() as u16);
        header.blocks.set(entries.iter().filter(|entry| entry.has_data()).count() as u16);
        change(&mut header);
        let mut bytes = [header.as_bytes(), entries.as_bytes()].concat();
        bytes.resize(BLOCK_BYTES, 0);
        seal::<RecordHeader>(&mut bytes);
        bytes
    }

    #[test]
    fn a_record_that_no_core_has_written_is_none() {
        let data = Entry::new(EntryKind::Data, 1, 0);
        let range = Entry::new(EntryKind::Discard, 1, 4);
        let beyond = COUNTER_MAX + 1;
        let changes: [fn(&mut RecordHeader, u64); 4] = [
            |header, n| header.sequence.set(n),
            |header, n| header.durable_sequence.set(n),
            |header, n| header.checkpoint.set(n),
            |header, n| header.segment_sequence.set(n),
        ];
        for kind in [RecordKind::Write, RecordKind::Fill, RecordKind::Move] {
            assert!(decode_record(&block(kind, &[data], |_| ())).is_some());
            let with_range = decode_record(&block(kind, &[data, range], |_| ()));
            assert_eq!(with_range.is_some(), kind == RecordKind::Write, "{kind:?}");
            for change in changes {
                assert!(
                    decode_record(&block(kind, &[data], |header| change(header, COUNTER_MAX)))
                        .is_some()
                );
                assert!(
                    decode_record(&block(kind, &[data], |header| change(header, beyond))).is_none()
                );
            }
        }
    }

    #[test]
    fn a_record_that_says_that_everything_is_durable_fails_its_volume_and_recovery_ends() {
        let volume = Volume::new(VolumeSpec {
            name: "v".into(),
            backend: "none".into(),
            size_bytes: 1 << 20,
            mode: Mode::WriteBack,
            drain: DrainOrder::Unordered,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 1,
            attachment: Vec::new(),
        });
        let bytes = block(RecordKind::Write, &[], |header| {
            header.sequence.set(5);
            header.durable_sequence.set(COUNTER_MAX);
        });
        let tail = [SegmentRecords {
            segment: 0,
            segment_sequence: 1,
            stream: Stream::Log,
            tail_from: 0,
            records: vec![decode_record(&bytes).expect("a record")],
            newest_checkpoint: 0,
            newest_epoch: 0,
            summary_blocks: None,
            missing: vec![(1, 0, 3, Vec::new())],
            unreadable: Vec::new(),
            hidden: Vec::new(),
        }];
        let geo = Geometry::new([1; 16], 64 << 20, None).expect("a device of that size");
        let verdict = judge(&volume, 0, &geo, &tail, &HashSet::new());
        assert!(verdict.failed);
        assert_eq!(verdict.cut, COUNTER_MAX);
        assert_eq!(verdict.gone.into_keys().collect::<Vec<_>>(), [3]);
    }
}
