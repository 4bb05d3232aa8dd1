//! Opening a cache device: superblock, checkpoint, summaries, replay of the log's tail.
//!
//! Nothing is written before the very end (summaries of segments that were open, then a
//! checkpoint), and what is written does not change what a second recovery would find: a crash in
//! here is harmless.

use crate::api::{BLOCK_BYTES, IoError, Nanos, VolumeId};
use crate::base::device::{Device, DeviceRead};
use crate::base::mem::AlignedBuf;
use crate::base::mutation::mutated;
use crate::base::shared::EngineConfig;
use crate::blocks::space::{NONE, Segment};
use crate::checkpoint::combined_crc;
use crate::engine::Engine;
use crate::format::summary::decode_summary;
use crate::format::summary::encode_summary;
use crate::format::*;
use crate::ground::volume::Volume;
use crate::recovery::replay::{SegmentRecords, replay};
use crate::status::RecoveryReport;
use zerocopy::FromBytes;

/// Segments whose summaries are read at once.
const SUMMARY_BATCH: usize = 64;
/// Segment headers read at once.
const HEADER_BATCH: usize = 256;

/// Why a cache device cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// No superblock of ours.
    #[error("it is not a Tidepool cache")]
    NotACache,
    /// A newer version has written it, or something on it.
    #[error(
        "format version {0} is on it, and this tidepool knows versions up to {FORMAT_VERSION}: use the tidepool that wrote it, or a newer one (nothing was changed)"
    )]
    Version(u16),
    /// Both superblocks are damaged, or make no sense.
    #[error("both copies of its superblock are damaged")]
    Superblock,
    /// Smaller than it was when it was formatted.
    #[error("it has {found} bytes, but was formatted with {expected}: it has been truncated")]
    Truncated {
        /// Bytes at format.
        expected: u64,
        /// Bytes now.
        found: u64,
    },
    /// No checkpoint is valid, or the newest one is known to be lost.
    #[error("its newest checkpoint is damaged in both copies: what it holds cannot be known")]
    Checkpoint,
    /// The device cannot read where the log would go on. Another time it may, and what was written
    /// from here on would make an end of it.
    #[error(
        "it cannot be read where its log ends, so that what was written last is not known; nothing was changed: \
         try again, or save what is there with `tidepool cache export`"
    )]
    LogEnd,
    /// The device failed.
    #[error("the device failed while it was {0} ({1:?})")]
    Device(&'static str, IoError),
}

/// A checkpoint as read from the device.
pub(crate) struct Loaded {
    pub(super) header: CheckpointHeader,
    pub(super) pages: Vec<u8>,
}

/// Reads and verifies both copies of the superblock: one of a newer version counts even beside an
/// older one.
///
/// # Errors
/// See [`OpenError`].
pub fn read_superblock(device: &mut dyn Device) -> Result<Geometry, OpenError> {
    let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
    let (mut ours, mut unreadable, mut found) = (false, None, None);
    for block in SUPERBLOCKS {
        if byte(block) + BLOCK_BYTES as u64 > device.size_bytes() {
            continue;
        }
        if let Err(error) = read(device, byte(block), &mut buf) {
            unreadable = Some(error);
            continue;
        }
        ours |= buf[..8] == SUPERBLOCK_MAGIC;
        let Some(sb) = open::<Superblock>(&buf) else { continue };
        if sb.magic != SUPERBLOCK_MAGIC {
            continue;
        }
        if let Some(version) = newer(sb.version) {
            return Err(OpenError::Version(version));
        }
        found = found.or_else(|| Geometry::from_superblock(&sb));
    }
    let none = match unreadable {
        // A user who is told that it is no cache may make one of it.
        Some(error) => OpenError::Device("read (superblock)", error),
        None if ours => OpenError::Superblock,
        None => OpenError::NotACache,
    };
    let geometry = found.ok_or(none)?;
    let expected = geometry.device_blocks * BLOCK_BYTES as u64;
    if device.size_bytes() < expected {
        return Err(OpenError::Truncated { expected, found: device.size_bytes() });
    }
    Ok(geometry)
}

pub(crate) fn read(device: &mut dyn Device, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
    let mut batch = [DeviceRead { offset, buf, result: Ok(()) }];
    device.read(&mut batch);
    batch[0].result
}

/// Finds the newest valid checkpoint. One of a newer version is never passed over for an older one
/// beside it.
pub(crate) fn load_checkpoint(
    device: &mut dyn Device,
    geo: &Geometry,
) -> Result<Loaded, OpenError> {
    let mut best: Option<(CheckpointHeader, usize)> = None;
    let mut unreadable = None;
    let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
    for slot in 0..SLOTS {
        for copy in 0..SLOT_COPIES {
            if let Err(error) = read(device, byte(geo.slot_block(slot, copy)), &mut buf) {
                unreadable = Some(error);
                continue;
            }
            let Some(header) = open::<CheckpointHeader>(&buf) else { continue };
            if header.magic != CHECKPOINT_MAGIC || header.uuid != geo.uuid {
                continue;
            }
            if let Some(version) = newer(header.version) {
                return Err(OpenError::Version(version));
            }
            let counters = [header.checkpoint, header.epoch, header.next_segment_sequence];
            let valid = header.checkpoint.get() % SLOTS as u64 == slot as u64
                && counters.iter().all(|counter| counter.get() <= COUNTER_MAX)
                && open_blocks(&header).iter().all(|&(_, block)| block <= geo.segment_blocks);
            let later = best.is_none_or(|(b, _)| header.checkpoint.get() > b.checkpoint.get());
            if valid && later {
                best = Some((header, slot));
            }
        }
    }
    let (header, slot) = best.ok_or_else(|| lost_checkpoint(unreadable))?;
    let pages = load_pages(device, geo, &header, slot)?;
    Ok(Loaded { header, pages })
}

/// Why there is no checkpoint: it is damaged, or the device could not read it.
fn lost_checkpoint(unreadable: Option<IoError>) -> OpenError {
    unreadable.map_or(OpenError::Checkpoint, |error| OpenError::Device("read (checkpoint)", error))
}

/// Reads the pages of a slot, each from whichever copy is good.
fn load_pages(
    device: &mut dyn Device,
    geo: &Geometry,
    header: &CheckpointHeader,
    slot: usize,
) -> Result<Vec<u8>, OpenError> {
    const BATCH: usize = 256;
    let count = geo.pages() as usize;
    let mut pages = vec![0; count * BLOCK_BYTES];
    let mut crcs: Vec<Option<u32>> = vec![None; count];
    let mut unreadable = None;
    let mut buf = AlignedBuf::zeroed(BATCH * BLOCK_BYTES);
    for copy in 0..SLOT_COPIES {
        let mut at = 0;
        while at < count {
            let n = BATCH.min(count - at);
            let missing = crcs[at..at + n].iter().any(Option::is_none);
            let offset = byte(geo.slot_block(slot, copy) + 1 + at as u32);
            let found =
                if missing { read(device, offset, &mut buf[..n * BLOCK_BYTES]) } else { Ok(()) };
            unreadable = unreadable.or(found.err());
            if missing && found.is_ok() {
                for i in 0..n {
                    let bytes = &buf[i * BLOCK_BYTES..(i + 1) * BLOCK_BYTES];
                    let good = open::<PageHeader>(bytes).is_some_and(|p| {
                        p.magic == PAGE_MAGIC
                            && p.uuid == geo.uuid
                            && p.page.get() as usize == at + i
                    });
                    if good && crcs[at + i].is_none() {
                        crcs[at + i] = Some(crc32c(bytes));
                        pages[(at + i) * BLOCK_BYTES..(at + i + 1) * BLOCK_BYTES]
                            .copy_from_slice(bytes);
                    }
                }
            }
            at += n;
        }
        if crcs.iter().all(Option::is_some) && combined_crc(&crcs) == header.pages_crc.get() {
            return Ok(pages);
        }
        if copy == 0 && crcs.iter().all(Option::is_some) {
            // Every page of the first copy is valid but some are of another time: look at the
            // second.
            crcs.fill(None);
        }
    }
    Err(lost_checkpoint(unreadable))
}

/// A segment that the checkpoint names, with its marks.
struct Named {
    segment: u32,
    item: SegmentItem,
    live: Vec<u8>,
    dirty: Vec<u8>,
}

/// What was found on a device, before anything is changed.
pub(crate) struct Rebuilt {
    pub(super) engine: Engine,
    pub(super) report: RecoveryReport,
    tail: Vec<SegmentRecords>,
    /// The log may go on with records that the device could not read.
    pub(super) unreadable: bool,
}

fn bit(bits: &[u8], n: u32) -> bool {
    bits[n as usize / 8] >> (n % 8) & 1 == 1
}

impl Engine {
    /// Opens a formatted cache device: rebuilds the index, replays the log's tail, and takes a
    /// checkpoint, so that the next recovery starts from here.
    ///
    /// # Errors
    /// See [`OpenError`]; then the device has not been changed in any way that matters.
    pub fn open(
        device: &mut dyn Device,
        config: EngineConfig,
        now: Nanos,
    ) -> Result<(Engine, RecoveryReport), OpenError> {
        let geo = read_superblock(device)?;
        let loaded = load_checkpoint(device, &geo)?;
        let Rebuilt { mut engine, report, tail, unreadable } =
            Engine::rebuild(device, geo, &loaded, config, now)?;
        if unreadable {
            return Err(OpenError::LogEnd);
        }
        let failed = |what| move |error| OpenError::Device(what, error);
        let open = engine.reopen_log(&tail);
        for segment in tail.iter().filter(|t| Some(t.segment) != open) {
            engine.write_missing_summary(device, segment).map_err(failed("written (summary)"))?;
        }
        engine.ground.space_mut().rebuild_queues();
        engine
            .checkpoint
            .write_blocking(&mut engine.ground, device)
            .map_err(failed("written (checkpoint)"))?;
        Ok((engine, report))
    }

    /// Everything of [`Engine::open`] that only reads.
    pub(crate) fn rebuild(
        device: &mut dyn Device,
        geo: Geometry,
        loaded: &Loaded,
        config: EngineConfig,
        now: Nanos,
    ) -> Result<Rebuilt, OpenError> {
        let header = &loaded.header;
        let number = header.checkpoint.get();
        let mut engine = Engine::new(geo, config, number, header.epoch.get() + 1, now);
        // Every free segment may have been opened since. One whose first append was torn is not
        // found, but records deeper in it may stand: no later life of a segment may share its
        // sequence.
        let next = header.next_segment_sequence.get() + u64::from(geo.segments);
        engine.ground.space_mut().begin_lives_at(next);
        let mut report = RecoveryReport { checkpoint: number, ..RecoveryReport::default() };
        let expected = engine.load_volumes(loaded)?;
        engine.load_extents(loaded);
        let named = engine.load_segments(loaded)?;
        report.segments = named.len() as u64;
        let open_blocks = open_blocks(header);
        let (open, sealed): (Vec<_>, Vec<_>) =
            named.into_iter().partition(|n| open_blocks.iter().any(|&(s, _)| s == n.segment));
        engine.load_summaries(device, &sealed, &mut report)?;
        let mut tail = Vec::new();
        for n in &open {
            let sequence = n.item.segment_sequence.get();
            let mut records =
                SegmentRecords::read(device, &geo, n.segment, sequence, n.item.stream)?;
            records.tail_from = open_blocks.iter().find(|o| o.0 == n.segment).map_or(0, |o| o.1);
            records.keep_epoch(header.epoch.get());
            engine.place_records(n, &records);
            tail.push(records);
        }
        engine.check_blocks(&expected);
        let used = engine.ground.space().segments().map(Segment::is_used).collect::<Vec<_>>();
        let (new, mut unreadable) = find_new_segments(device, &geo, &used, header);
        for (segment, sequence, stream) in new {
            let mut records = SegmentRecords::read(device, &geo, segment, sequence, stream)?;
            records.keep_epoch(header.epoch.get());
            let space = engine.ground.space_mut();
            space.begin_lives_at(sequence + 1);
            space.restore_segment(segment, sequence, records.stream, 0);
            tail.push(records);
        }
        // Nothing is appended before the checkpoint that begins an epoch is durable.
        let later = |t: &SegmentRecords| {
            t.newest_checkpoint > number || t.newest_epoch > header.epoch.get()
        };
        if tail.iter().any(later) {
            return Err(OpenError::Checkpoint);
        }
        tail.sort_by_key(|t| (t.stream as u8, t.segment_sequence));
        unreadable |= replay(&mut engine, &tail, &mut report, now);
        let ids: Vec<VolumeId> = engine.ground.ids().collect();
        for id in ids {
            let published = engine.ground.volume(id).log().published();
            engine.front.add(id, published);
            engine.peers.add(id);
            engine.peers.follow(id, published, false);
            engine.drain.restore(&mut engine.ground, id, now);
            let volume = engine.ground.volume_mut(id);
            report.blocks_lost += volume.ledger().blocks().lost;
            report.volumes_failed += u64::from(volume.is_failed());
            if !volume.is_dirty() {
                volume.begin_drained();
            }
        }
        Ok(Rebuilt { engine, report, tail, unreadable })
    }

    /// Puts the checkpoint's volumes in place; returns how many dirty blocks each must have, and
    /// how many cached ones inside of zeroes.
    fn load_volumes(&mut self, loaded: &Loaded) -> Result<Vec<(u64, u64)>, OpenError> {
        let first = self.ground.geo().segment_pages() as usize;
        let volumes = self.ground.geo().volume_pages as usize;
        let mut expected = vec![(0, 0); volumes];
        let mut found: Vec<Option<Volume>> = (0..volumes).map(|_| None).collect();
        for (v, expected) in expected.iter_mut().enumerate() {
            let page = page_bytes(loaded, first + v);
            let (header, rest) =
                PageHeader::read_from_prefix(page).map_err(|_| OpenError::Checkpoint)?;
            if header.items.get() == 0 {
                continue;
            }
            let (item, _) =
                VolumeItem::read_from_prefix(rest).map_err(|_| OpenError::Checkpoint)?;
            *expected = (item.dirty_blocks.get(), item.covered_blocks.get());
            let volume = Volume::from_item(&item).ok_or(OpenError::Checkpoint)?;
            if found.iter().flatten().any(|other| other.spec().name == volume.spec().name) {
                return Err(OpenError::Checkpoint);
            }
            found[v] = Some(volume);
        }
        self.ground.restore_volumes(found);
        Ok(expected)
    }

    fn load_extents(&mut self, loaded: &Loaded) {
        let first = (self.ground.geo().segment_pages() + self.ground.geo().volume_pages) as usize;
        for e in 0..self.ground.geo().extent_pages as usize {
            let page = page_bytes(loaded, first + e);
            let Ok((header, mut rest)) = PageHeader::read_from_prefix(page) else { continue };
            for _ in 0..header.items.get() {
                let Ok((item, left)) = ExtentItem::read_from_prefix(rest) else { break };
                rest = left;
                let Some(volume) = self.ground.get_mut(VolumeId(item.volume.get())) else {
                    continue;
                };
                let (block, n) = (item.block.get(), u64::from(item.len.get()));
                if n == 0 || block.checked_add(n).is_none_or(|end| end > volume.blocks()) {
                    continue;
                }
                let range = block..block + n;
                match item.kind == ExtentKind::Lost as u8 {
                    true => volume.ledger_mut().restore_lost(range),
                    false => volume
                        .ledger_mut()
                        .restore_zero(range, item.kind == ExtentKind::ZeroKeep as u8),
                }
            }
        }
    }

    /// Registers the segments that the checkpoint names.
    fn load_segments(&mut self, loaded: &Loaded) -> Result<Vec<Named>, OpenError> {
        let mut named = Vec::new();
        let bitmap = self.ground.geo().segment_blocks as usize / 8;
        let item_bytes = self.ground.geo().segment_item_bytes();
        for page in 0..self.ground.geo().segment_pages() {
            let bytes = &page_bytes(loaded, page as usize)[size_of::<PageHeader>()..];
            for (segment, bytes) in
                self.ground.space().segments_of_page(page).zip(bytes.chunks_exact(item_bytes))
            {
                let (item, bits) =
                    SegmentItem::read_from_prefix(bytes).map_err(|_| OpenError::Checkpoint)?;
                if item.used == 0 {
                    continue;
                }
                let stream = Stream::from_number(item.stream).ok_or(OpenError::Checkpoint)?;
                if u32::from(item.summary_blocks.get()) > SUMMARY_BLOCKS_MAX
                    || item.segment_sequence.get() > COUNTER_MAX
                {
                    return Err(OpenError::Checkpoint);
                }
                let (life, summary_blocks) =
                    (item.segment_sequence.get(), item.summary_blocks.get());
                self.ground.space_mut().restore_segment(segment, life, stream, summary_blocks);
                let (live, dirty) = (bits[..bitmap].to_vec(), bits[bitmap..2 * bitmap].to_vec());
                named.push(Named { segment, item, live, dirty });
            }
        }
        Ok(named)
    }

    /// Reads the summaries of full segments and puts their live blocks into the index.
    fn load_summaries(
        &mut self,
        device: &mut dyn Device,
        sealed: &[Named],
        report: &mut RecoveryReport,
    ) -> Result<(), OpenError> {
        for chunk in sealed.chunks(SUMMARY_BATCH) {
            let mut bufs: Vec<AlignedBuf> = chunk
                .iter()
                .map(|n| {
                    AlignedBuf::zeroed(
                        usize::from(n.item.summary_blocks.get()).max(1) * BLOCK_BYTES,
                    )
                })
                .collect();
            let geo = *self.ground.geo();
            let mut batch: Vec<DeviceRead<'_>> = chunk
                .iter()
                .zip(&mut bufs)
                .map(|(n, buf)| {
                    let blocks = buf.len() as u32 / BLOCK_BYTES as u32;
                    let first = geo.segment_block(n.segment) + geo.segment_blocks - blocks;
                    DeviceRead { offset: byte(first), buf: &mut buf[..], result: Ok(()) }
                })
                .collect();
            device.read(&mut batch);
            let results: Vec<_> = batch.iter().map(|r| r.result).collect();
            drop(batch);
            for ((n, buf), result) in chunk.iter().zip(&bufs).zip(results) {
                let sequence = n.item.segment_sequence.get();
                match result.ok().and_then(|()| decode_summary(&geo, n.segment, sequence, buf)) {
                    Some((records, entries)) => self.place_summary(n, &records, &entries),
                    None => {
                        report.summaries_rebuilt += 1;
                        let records =
                            SegmentRecords::read(device, &geo, n.segment, sequence, n.item.stream)?;
                        self.place_records(n, &records);
                    }
                }
            }
        }
        Ok(())
    }

    fn place_summary(&mut self, n: &Named, records: &[SummaryRecord], entries: &[Entry]) {
        let mut entries = entries.iter();
        for record in records {
            let own = entries.by_ref().take(usize::from(record.entries.get()));
            let data = own.filter(|e| e.has_data());
            for (i, entry) in data.enumerate() {
                let offset = u32::from(record.first_block.get()) + 1 + i as u32;
                self.place_named(n, offset, record.volume.get(), entry);
            }
        }
    }

    fn place_records(&mut self, n: &Named, records: &SegmentRecords) {
        for record in &records.records {
            let data = record.entries.iter().filter(|e| e.has_data());
            for (i, entry) in data.enumerate() {
                let offset = record.first_block + 1 + i as u32;
                self.place_named(n, offset, record.header.volume.get(), entry);
            }
        }
    }

    /// Puts one block into the index if the checkpoint says that it is live.
    fn place_named(&mut self, n: &Named, offset: u32, volume: u16, entry: &Entry) {
        if offset >= self.ground.geo().segment_blocks || !bit(&n.live, offset) {
            return;
        }
        let (block, position) =
            (entry.block(), self.ground.geo().segment_block(n.segment) + offset);
        let Some((volume, space)) = self.ground.get_with_space(VolumeId(volume)) else { return };
        if block >= volume.blocks() || space.marks().is_live(position) {
            return;
        }
        let dirty = bit(&n.dirty, offset);
        volume.ledger_mut().restore(space, (block, position), entry.value(), dirty);
    }

    /// A volume with fewer dirty blocks than its checkpoint counted has lost some that cannot be
    /// named. With fewer blocks inside of its zeroes, one of the zeroes is none, and nobody knows
    /// which.
    fn check_blocks(&mut self, expected: &[(u64, u64)]) {
        for (id, &(dirty, covered)) in self.ground.places().zip(expected) {
            let Some(volume) = self.ground.get_mut(id) else { continue };
            if volume.ledger().dirty() != dirty || volume.ledger().covered() < covered {
                volume.fail();
            }
        }
    }

    /// Goes on in the segment of the log that was open last, so that restarts use up none. What was
    /// cut stays in front of the checkpoint's mark; what may be left behind it is of an earlier
    /// epoch.
    fn reopen_log(&mut self, tail: &[SegmentRecords]) -> Option<u32> {
        let logs = tail.iter().filter(|t| t.stream == Stream::Log);
        let last =
            logs.max_by_key(|t| t.segment_sequence).filter(|t| t.summary_blocks.is_none())?;
        let next_block = last.next_block()?;
        let records: Vec<SummaryRecord> = last.records.iter().map(|r| r.summary()).collect();
        let entries: Vec<Entry> = last.records.iter().flat_map(|r| &r.entries).copied().collect();
        let summary = Geometry::summary_blocks(records.len() + 1, entries.len() + 1);
        if summary > SUMMARY_BLOCKS_MAX
            || next_block + 2 + summary > self.ground.geo().segment_blocks
        {
            return None;
        }
        self.ground.space_mut().reopen_segment(last.segment);
        self.ground.log_mut().reopen(last.segment, next_block, records, entries);
        Some(last.segment)
    }

    /// Gives a segment that was open its summary.
    fn write_missing_summary(
        &mut self,
        device: &mut dyn Device,
        tail: &SegmentRecords,
    ) -> Result<(), IoError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut records = Vec::new();
        for r in &tail.records {
            records.push(r.summary());
            entries.extend(&r.entries);
        }
        let needed = Geometry::summary_blocks(records.len(), entries.len());
        let blocks = match tail.summary_blocks {
            // It was sealed after the checkpoint: what it has is at least as good.
            Some(blocks) => blocks,
            // No core lets it come to that. Without a summary its records are read.
            None if needed > SUMMARY_BLOCKS_MAX => 0,
            None => {
                let blocks = needed;
                let mut buf = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES);
                encode_summary(
                    self.ground.geo(),
                    (tail.segment, tail.segment_sequence),
                    &records,
                    &entries,
                    &mut buf,
                );
                let first = self.ground.geo().segment_block(tail.segment)
                    + self.ground.geo().segment_blocks
                    - blocks;
                device.write(byte(first), &buf)?;
                blocks
            }
        };
        self.ground.space_mut().set_summary_blocks(tail.segment, blocks);
        Ok(())
    }
}

fn page_bytes(loaded: &Loaded, page: usize) -> &[u8] {
    &loaded.pages[page * BLOCK_BYTES..(page + 1) * BLOCK_BYTES]
}

/// Open segments at the checkpoint and how far it covers them.
fn open_blocks(header: &CheckpointHeader) -> Vec<(u32, u32)> {
    let all = header.open_segment.iter().zip(&header.open_block);
    all.map(|(s, b)| (s.get(), b.get())).filter(|&(s, _)| s != NONE).collect()
}

/// Segments that were free at the checkpoint and have been opened since: (segment, sequence,
/// stream). And whether there may be more that could not be read.
fn find_new_segments(
    device: &mut dyn Device,
    geo: &Geometry,
    used: &[bool],
    header: &CheckpointHeader,
) -> (Vec<(u32, u64, u8)>, bool) {
    const PROBE: usize = 2 * BLOCK_BYTES;
    let (mut found, mut unreadable) = (Vec::new(), false);
    let free: Vec<u32> = (0..geo.segments).filter(|&s| !used[s as usize]).collect();
    let mut buf = AlignedBuf::zeroed(HEADER_BATCH * PROBE);
    for chunk in free.chunks(HEADER_BATCH) {
        let mut batch: Vec<DeviceRead<'_>> = chunk
            .iter()
            .zip(buf.chunks_exact_mut(PROBE))
            .map(|(&s, buf)| DeviceRead { offset: byte(geo.segment_block(s)), buf, result: Ok(()) })
            .collect();
        device.read(&mut batch);
        let bad: Vec<bool> = batch.iter().map(|r| r.result.is_err()).collect();
        drop(batch);
        for ((&segment, probe), bad) in chunk.iter().zip(buf.chunks_exact_mut(PROBE)).zip(bad) {
            let mut lost = 0;
            for (i, block) in probe.chunks_mut(BLOCK_BYTES).enumerate() {
                // A bad sector spoils its own block only.
                if bad && read(device, byte(geo.segment_block(segment) + i as u32), block).is_err()
                {
                    block.fill(0);
                    lost += 1;
                }
            }
            // One of the two is enough to know a segment that holds anything whole.
            unreadable |= lost == 2;
            if let Some((sequence, stream)) = segment_life(geo, segment, probe)
                && sequence
                    >= header.next_segment_sequence.get()
                        + u64::from(mutated!(FirstNewSegmentForgotten))
            {
                found.push((segment, sequence, stream));
            }
        }
    }
    (found, unreadable)
}

/// Sequence and stream of a segment, by its header or its first record, whichever is newer: a
/// damaged header must not hide the records behind it, nor one whose write was lost so that the
/// header of an earlier life stands.
fn segment_life(geo: &Geometry, segment: u32, bytes: &[u8]) -> Option<(u64, u8)> {
    let (first, second) = bytes.split_at(BLOCK_BYTES);
    let header = open::<SegmentHeader>(first)
        .filter(|h| h.magic == SEGMENT_MAGIC && h.uuid == geo.uuid && h.segment.get() == segment)
        .map(|h| (h.segment_sequence.get(), h.stream))
        .filter(|life| life.0 <= COUNTER_MAX);
    let record = open::<RecordHeader>(second)
        .filter(|r| r.magic == RECORD_MAGIC && r.uuid == geo.uuid)
        .map(|r| {
            let stream = if r.kind == RecordKind::Fill as u8 { Stream::Fill } else { Stream::Log };
            (r.segment_sequence.get(), stream as u8)
        })
        .filter(|life| life.0 <= COUNTER_MAX);
    match (header, record) {
        (Some(header), Some(record)) if record.0 > header.0 => Some(record),
        (header, record) => header.or(record),
    }
}
