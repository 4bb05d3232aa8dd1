//! Checkpoints: the segment table, the volumes, and ranges that no segment holds.
//!
//! A checkpoint does not hold the index: that is rebuilt from the segments' summaries and the live
//! bits. Two slots are written in turn, each as two copies, and only the pages that changed since the
//! slot was last written. The header, written last and stable, makes the checkpoint valid.

use crate::api::{BLOCK_BYTES, ControlError, IoError, Nanos, VolumeId};
use crate::base::device::Device;
use crate::base::mem::{AlignedBuf, Buf};
use crate::base::mutation::mutated;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags};
use crate::blocks::space::{RESERVE_READ_CACHE, SegmentState, Space};
use crate::control::volume::Volume;
use crate::engine::{Engine, Io};
use crate::format::{
    self, CHECKPOINT_MAGIC, CHECKPOINT_VERSION, CheckpointHeader, EXTENTS_PER_PAGE, ExtentItem, ExtentKind,
    PAGE_MAGIC, PageHeader, SLOT_COPIES, SLOTS, SegmentItem, VolumeItem, byte, crc32c,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// A checkpoint is taken when so much was appended since the last one: it bounds the replay.
const APPENDED_BYTES: u64 = 256 << 20;
/// A checkpoint is taken when the last one is this old and something has changed.
const INTERVAL_NS: Nanos = 10_000_000_000;

/// A checkpoint follows when a volume has been drained completely, so that a crash does not make clean blocks dirty
/// again; under a load that drains again and again, no more often than this.
const DRAINED_NS: Nanos = 3_000_000_000;

/// Pause before a checkpoint is tried again that had no room for all extents.
const POSTPONED_NS: Nanos = 500_000_000;

/// What checkpoints need to remember between them.
pub(crate) struct Checkpoint {
    /// Number of the newest durable one.
    pub(crate) durable: u64,
    pub(crate) epoch: u64,
    /// One is to be taken as soon as possible.
    pub(crate) wanted: bool,
    /// One is due and waits for summaries: no other segment is to be closed before it.
    pub(crate) held_up: bool,
    /// Until then there are more extents than it could hold; the drain makes them fewer.
    postponed_until: Nanos,
    pub(crate) appended_bytes: u64,
    /// A volume has nothing dirty any more, which the last checkpoint does not know.
    pub(crate) drained: bool,
    last: Nanos,
    /// CRC of every page as it stands in each slot; `None` if unknown.
    page_crcs: [Vec<Option<u32>>; SLOTS],
    run: Option<Run>,
    /// Buffers in flight and how many writes still use each.
    users: Vec<(Buf, u32)>,
    /// Control operations that are complete when the next checkpoint that is begun is durable.
    pub(crate) waiters: Vec<Waiter>,
}

/// A control operation that waits for a durable checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiter {
    pub(crate) control: u64,
    /// Its answer if the device fails before.
    pub(crate) on_failure: Result<(), ControlError>,
    /// A volume that is gone again if the device fails before.
    pub(crate) added: Option<VolumeId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Pages,
    /// The pages are being made stable: the header must not reach the medium before them.
    Sync,
    Synced,
    Header,
}

/// The checkpoint that is being written.
struct Run {
    number: u64,
    phase: Phase,
    pages: Pages,
    /// Next page of the list to be written, and writes in flight.
    next: usize,
    writes: u32,
    /// Segments that are free once it is durable.
    released: Vec<u32>,
    waiters: Vec<Waiter>,
    /// Log append that it contains.
    appended: u64,
    sequences: Vec<u64>,
}

/// The pages of a checkpoint that must be written, and its header.
pub(crate) struct Pages {
    slot: usize,
    list: Vec<u32>,
    bytes: Vec<u8>,
    header: [u8; BLOCK_BYTES],
}

impl Checkpoint {
    pub(crate) fn new(durable: u64, epoch: u64, pages: u32, now: Nanos) -> Checkpoint {
        Checkpoint {
            durable,
            epoch,
            wanted: false,
            held_up: false,
            postponed_until: 0,
            appended_bytes: 0,
            drained: false,
            last: now,
            page_crcs: [vec![None; pages as usize], vec![None; pages as usize]],
            run: None,
            users: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// Number of the first checkpoint that will hold what changes now.
    pub(crate) fn next_number(&self) -> u64 {
        self.run.as_ref().map_or(self.durable, |run| run.number) + 1
    }

    /// The volume in this place begins anew behind `base`: a checkpoint of what it was says nothing about what comes.
    pub(crate) fn forget_sequence(&mut self, id: VolumeId, base: u64) {
        let run = self.run.as_mut();
        if let Some(sequence) = run.and_then(|run| run.sequences.get_mut(id.0 as usize)) {
            *sequence = base.min(*sequence);
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.run.is_none()
    }

    pub(crate) fn deadline(&self) -> Option<Nanos> {
        if self.run.is_some() || self.held_up {
            return None;
        }
        if self.postponed_until > 0 {
            return Some(self.postponed_until);
        }
        let drained = self.drained.then_some(self.last + DRAINED_NS);
        drained.or((self.appended_bytes > 0).then_some(self.last + INTERVAL_NS))
    }
}

impl Engine {
    /// Begins a checkpoint when one is due.
    pub(crate) fn pump_checkpoint(&mut self, now: Nanos) {
        let c = &self.checkpoint;
        if c.run.is_some() || self.dead || now < c.postponed_until {
            return;
        }
        let old =
            c.appended_bytes > 0 && now >= c.last + INTERVAL_NS || c.drained && now >= c.last + DRAINED_NS;
        let short = self.space.free_count() <= RESERVE_READ_CACHE && self.space.released_count() > 0;
        let due = short || c.wanted || !c.waiters.is_empty() || c.appended_bytes >= APPENDED_BYTES || old;
        // Summaries must be written before a checkpoint says that their segments have them.
        self.checkpoint.held_up = due && !self.log.nothing_sealing();
        if !due || self.checkpoint.held_up {
            return;
        }
        let Some((extents, covered)) = self.extents_that_fit() else {
            self.checkpoint.postponed_until = now + POSTPONED_NS;
            return;
        };
        let number = self.checkpoint.durable + 1;
        let pages = self.encode_checkpoint(number, &extents, &covered);
        let released = (0..self.geo.segments)
            .filter(|&s| self.space.segments[s as usize].state == SegmentState::Released)
            .collect();
        let sequences = self.volumes.iter().map(|v| v.as_ref().map_or(0, |v| v.log.published())).collect();
        let c = &mut self.checkpoint;
        c.wanted = false;
        c.drained = false;
        c.postponed_until = 0;
        c.appended_bytes = 0;
        c.last = now;
        c.run = Some(Run {
            number,
            phase: Phase::Pages,
            pages,
            next: 0,
            writes: 0,
            released,
            waiters: std::mem::take(&mut c.waiters),
            appended: self.log.streams[0].published,
            sequences,
        });
        self.advance_checkpoint();
    }

    /// The extents of a checkpoint of the state now, and how many cached blocks of each volume stand inside of
    /// zeroes; `None` while there are too many of them.
    ///
    /// Ranges are limited when they are admitted, but a drain in the wrong order can split one into many.
    /// Lost blocks that are too many to be named make their volume fail as a whole.
    fn extents_that_fit(&mut self) -> Option<(Vec<ExtentItem>, Vec<u64>)> {
        let max = self.geo.extents_max();
        loop {
            let (extents, covered) = collect_extents(&self.volumes);
            self.budget.set_extents(extents.len() + self.unpublished_ranges());
            if extents.len() <= max {
                return Some((extents, covered));
            }
            let lost = extents.iter().filter(|e| e.kind == ExtentKind::Lost as u8).count();
            if lost <= max / 2 {
                return None;
            }
            let whole = self.volumes.iter_mut().flatten().filter(|v| !v.failed);
            whole.max_by_key(|v| v.ledger.blocks().lost)?.failed = true;
        }
    }

    /// Encodes what the state is now.
    fn encode_checkpoint(&mut self, number: u64, extents: &[ExtentItem], covered: &[u64]) -> Pages {
        let slot = (number % SLOTS as u64) as usize;
        let crcs = &mut self.checkpoint.page_crcs[slot];
        let mut pages = Pages { slot, list: Vec::new(), bytes: Vec::new(), header: [0; BLOCK_BYTES] };
        let segment_pages = self.geo.segment_pages();
        for page in self.space.take_changed_pages(slot) {
            pages.push(page, encode_segments(&self.space, page), crcs);
        }
        for v in 0..self.geo.volume_pages {
            let volume = self.volumes.get(v as usize).and_then(Option::as_ref);
            let item = volume.map(|volume| volume.to_item(covered[v as usize]));
            pages.push(segment_pages + v, encode_volume(&self.geo.uuid, segment_pages + v, item), crcs);
        }
        let first = segment_pages + self.geo.volume_pages;
        for e in 0..self.geo.extent_pages {
            let from = (e as usize * EXTENTS_PER_PAGE).min(extents.len());
            let to = (from + EXTENTS_PER_PAGE).min(extents.len());
            pages.push(first + e, encode_extents(&self.geo.uuid, first + e, &extents[from..to]), crcs);
        }
        let open = self.log.streams.each_ref();
        let header = CheckpointHeader {
            magic: CHECKPOINT_MAGIC,
            crc: U32::ZERO,
            uuid: self.geo.uuid,
            checkpoint: U64::new(number),
            epoch: U64::new(self.checkpoint.epoch),
            next_segment_sequence: U64::new(self.space.next_sequence),
            pages_crc: U32::new(combined_crc(&self.checkpoint.page_crcs[slot])),
            open_segment: open.map(|s| U32::new(s.segment)),
            open_block: open.map(|s| U32::new(s.published_block)),
            version: U16::new(CHECKPOINT_VERSION),
        };
        header.write_to_prefix(&mut pages.header).expect("a header is smaller than a block");
        format::seal::<CheckpointHeader>(&mut pages.header);
        pages
    }

    /// Goes on with the checkpoint as far as buffers allow.
    pub(crate) fn advance_checkpoint(&mut self) {
        let Some(run) = &self.checkpoint.run else { return };
        let slot = run.pages.slot;
        match run.phase {
            Phase::Pages => {
                while self.checkpoint.run.as_ref().is_some_and(|r| r.next < r.pages.list.len()) {
                    if !self.write_pages(slot) {
                        return;
                    }
                }
                let run = self.checkpoint.run.as_mut().expect("a run advances");
                if run.writes == 0 && mutated!(HeaderBeforePages) {
                    run.phase = Phase::Synced;
                    return self.advance_checkpoint();
                }
                if run.writes == 0 {
                    run.phase = Phase::Sync;
                    self.device.syncs += 1;
                    self.out.sync(Io::CheckpointSync);
                }
            }
            Phase::Synced => {
                let Some(buf) = self.pools.checkpoint.take() else { return };
                let run = self.checkpoint.run.as_mut().expect("a run advances");
                run.phase = Phase::Header;
                run.writes = SLOT_COPIES as u32;
                self.checkpoint.users.push((buf, SLOT_COPIES as u32));
                self.arena.bytes_mut(buf)[..BLOCK_BYTES].copy_from_slice(&run.pages.header);
                for copy in 0..SLOT_COPIES {
                    let offset = byte(self.geo.slot_block(slot, copy));
                    self.out.write(Io::CheckpointWrite { buf }, offset, buf.slice(0, BLOCK_BYTES), true);
                }
            }
            Phase::Sync | Phase::Header => {}
        }
    }

    /// Writes the next pages of the list that follow each other, to both copies of the slot.
    fn write_pages(&mut self, slot: usize) -> bool {
        let Some(buf) = self.pools.checkpoint.take() else { return false };
        let run = self.checkpoint.run.as_mut().expect("a run writes pages");
        let max = buf.len as usize / BLOCK_BYTES;
        let first = run.pages.list[run.next];
        let left = &run.pages.list[run.next..];
        let n = left.iter().take(max).zip(first..).take_while(|&(&page, expected)| page == expected).count();
        let bytes = n * BLOCK_BYTES;
        let from = run.next * BLOCK_BYTES;
        self.arena.bytes_mut(buf)[..bytes].copy_from_slice(&run.pages.bytes[from..from + bytes]);
        run.next += n;
        run.writes += SLOT_COPIES as u32;
        self.checkpoint.users.push((buf, SLOT_COPIES as u32));
        for copy in 0..SLOT_COPIES {
            let offset = byte(self.geo.slot_block(slot, copy) + 1 + first);
            self.out.write(Io::CheckpointWrite { buf }, offset, buf.slice(0, bytes), false);
        }
        true
    }

    pub(crate) fn checkpoint_write_done(&mut self, now: Nanos, buf: Buf, result: Result<(), IoError>) {
        let users = &mut self.checkpoint.users;
        let at = users.iter().position(|(b, _)| *b == buf).expect("the buffer is in use");
        users[at].1 -= 1;
        if users[at].1 == 0 {
            users.swap_remove(at);
            self.pools.checkpoint.give(buf);
        }
        if result.is_err() {
            return self.device_failed();
        }
        let Some(run) = &mut self.checkpoint.run else { return };
        run.writes -= 1;
        if run.phase == Phase::Header && run.writes == 0 {
            self.checkpoint_durable(now);
        } else {
            self.advance_checkpoint();
        }
    }

    pub(crate) fn checkpoint_sync_done(&mut self, result: Result<(), IoError>) {
        if result.is_err() {
            return self.device_failed();
        }
        if let Some(run) = &mut self.checkpoint.run {
            run.phase = Phase::Synced;
        }
        self.advance_checkpoint();
    }

    fn checkpoint_durable(&mut self, now: Nanos) {
        let run = self.checkpoint.run.take().expect("a run ends");
        self.checkpoint.durable = run.number;
        self.device.checkpoints += 1;
        for segment in run.released {
            self.space.free_released(segment);
        }
        let log = &mut self.log.streams[0];
        log.stable = log.stable.max(run.appended);
        for (volume, sequence) in self.volumes.iter_mut().zip(run.sequences) {
            if let Some(volume) = volume {
                let published = volume.log.published();
                let sequence = if mutated!(CheckpointCoversLater) { published } else { sequence };
                volume.log.note_durable(sequence);
            }
        }
        for waiter in run.waiters {
            self.out.control_done(waiter.control, Ok(()));
        }
        self.out.stir();
        self.pump_sync(now);
    }

    /// The device failed: the checkpoint will never be durable.
    pub(crate) fn abandon_checkpoint(&mut self) -> Vec<Waiter> {
        self.checkpoint.appended_bytes = 0;
        self.checkpoint.drained = false;
        self.checkpoint.postponed_until = 0;
        let mut waiters = std::mem::take(&mut self.checkpoint.waiters);
        if let Some(run) = self.checkpoint.run.take() {
            waiters.extend(run.waiters);
        }
        waiters
    }

    /// Writes a checkpoint of the state now, blocking: at the end of recovery and at format.
    pub(crate) fn checkpoint_blocking(&mut self, device: &mut dyn Device) -> Result<(), IoError> {
        let number = self.checkpoint.durable + 1;
        // Replay adds no more ranges than were admitted beside those of the last checkpoint.
        let (extents, covered) = self.extents_that_fit().ok_or(IoError::Full)?;
        let pages = self.encode_checkpoint(number, &extents, &covered);
        pages.write_blocking(&self.space, device)?;
        self.checkpoint.durable = number;
        self.device.checkpoints += 1;
        for segment in 0..self.geo.segments {
            if self.space.segments[segment as usize].state == SegmentState::Released {
                self.space.free_released(segment);
            }
        }
        Ok(())
    }

    /// Whether new ranges must wait for room in checkpoints. What is pending is an upper bound; it is
    /// counted only when somebody would have to wait, and once for each change of the real number.
    pub(crate) fn extents_are_full(&mut self) -> bool {
        self.count_extents(1);
        self.ranges_left() == 0
    }

    /// Counts the extents anew if fewer than `wanted` more seem to be possible.
    pub(crate) fn count_extents(&mut self, wanted: u64) {
        if self.ranges_left() < wanted && self.budget.take_extents_changed() {
            let extents = collect_extents(&self.volumes).0.len() + self.unpublished_ranges();
            self.budget.set_extents(extents);
        }
    }

    /// Extents that the checkpoint has of one volume.
    pub(crate) fn extents_of(&self, id: VolumeId) -> u64 {
        collect_extents(&self.volumes).0.iter().filter(|extent| extent.volume.get() == id.0).count() as u64
    }

    /// Ranges of zeroes that may still be logged, beside what owners of replicas were told.
    pub(crate) fn ranges_left(&self) -> u64 {
        self.budget.ranges_left(&self.space)
    }
}

impl Pages {
    fn push(&mut self, page: u32, bytes: [u8; BLOCK_BYTES], crcs: &mut [Option<u32>]) {
        let crc = crc32c(&bytes);
        if crcs[page as usize] != Some(crc) {
            crcs[page as usize] = Some(crc);
            self.list.push(page);
            self.bytes.extend_from_slice(&bytes);
        }
    }

    fn write_blocking(&self, space: &Space, device: &mut dyn Device) -> Result<(), IoError> {
        const BATCH: usize = 64;
        let mut buf = AlignedBuf::zeroed(BATCH * BLOCK_BYTES);
        let mut at = 0;
        while at < self.list.len() {
            let left = &self.list[at..];
            let n = left.iter().take(BATCH).zip(left[0]..).take_while(|&(&p, e)| p == e).count();
            let bytes = n * BLOCK_BYTES;
            buf[..bytes].copy_from_slice(&self.bytes[at * BLOCK_BYTES..at * BLOCK_BYTES + bytes]);
            for copy in 0..SLOT_COPIES {
                let block = space.geo.slot_block(self.slot, copy) + 1 + left[0];
                device.write(byte(block), &buf[..bytes])?;
            }
            at += n;
        }
        device.sync()?;
        buf[..BLOCK_BYTES].copy_from_slice(&self.header);
        for copy in 0..SLOT_COPIES {
            device.write(byte(space.geo.slot_block(self.slot, copy)), &buf[..BLOCK_BYTES])?;
        }
        device.sync()
    }
}

/// CRC-32C over the CRCs of all pages.
pub(crate) fn combined_crc(crcs: &[Option<u32>]) -> u32 {
    let bytes: Vec<u8> =
        crcs.iter().flat_map(|c| c.expect("every page has been written").to_le_bytes()).collect();
    crc32c(&bytes)
}

fn page(uuid: &[u8; 16], page: u32, items: usize, fill: impl FnOnce(&mut [u8])) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    let header = PageHeader {
        magic: PAGE_MAGIC,
        crc: U32::ZERO,
        uuid: *uuid,
        page: U32::new(page),
        items: U32::new(items as u32),
    };
    header.write_to_prefix(&mut bytes).expect("a header is smaller than a block");
    fill(&mut bytes[size_of::<PageHeader>()..]);
    format::seal::<PageHeader>(&mut bytes);
    bytes
}

fn encode_segments(space: &Space, number: u32) -> [u8; BLOCK_BYTES] {
    let segments = space.segments_of_page(number);
    let bitmap = space.geo.segment_blocks as usize / 8;
    page(&space.geo.uuid, number, segments.len(), |out| {
        for (segment, out) in segments.zip(out.chunks_exact_mut(space.geo.segment_item_bytes())) {
            let s = &space.segments[segment as usize];
            if matches!(s.state, SegmentState::Free | SegmentState::Released) {
                continue;
            }
            let item = SegmentItem {
                segment_sequence: U64::new(s.sequence),
                stream: s.stream as u8,
                used: 1,
                summary_blocks: U16::new(s.summary_blocks),
                reserved: U32::ZERO,
            };
            item.write_to_prefix(out).expect("an item has its size");
            let first = space.geo.segment_block(segment);
            let range = first..first + space.geo.segment_blocks;
            let (live, dirty) = out[size_of::<SegmentItem>()..].split_at_mut(bitmap);
            space.marks.live().copy_out(range.clone(), live);
            space.marks.dirty().copy_out(range, dirty);
        }
    })
}

fn encode_volume(uuid: &[u8; 16], number: u32, item: Option<VolumeItem>) -> [u8; BLOCK_BYTES] {
    page(uuid, number, usize::from(item.is_some()), |out| {
        if let Some(item) = item {
            item.write_to_prefix(out).expect("a volume fits into a page");
        }
    })
}

fn encode_extents(uuid: &[u8; 16], number: u32, extents: &[ExtentItem]) -> [u8; BLOCK_BYTES] {
    page(uuid, number, extents.len(), |out| {
        let bytes = extents.as_bytes();
        out[..bytes.len()].copy_from_slice(bytes);
    })
}

/// Zero ranges that are not drained, and lost blocks. Cached blocks inside of a zero range do not split
/// it: at recovery they are put above it. How many they are is counted for each volume, so that
/// recovery knows when one is missing.
fn collect_extents(volumes: &[Option<Box<Volume>>]) -> (Vec<ExtentItem>, Vec<u64>) {
    let mut all_covered = vec![0; volumes.len()];
    let mut list: Vec<ExtentItem> = Vec::new();
    let mut end = 0;
    let mut last_kind = 0;
    for (v, volume) in volumes.iter().enumerate() {
        let Some(volume) = volume else { continue };
        let counts = volume.ledger.blocks();
        if counts.zero == 0 && counts.lost == 0 {
            continue;
        }
        let mut push = |kind: ExtentKind, block: u64, n: u32, gap_is_cached: bool| {
            let same = |last: &&mut ExtentItem| last.volume.get() as usize == v && last_kind == kind as u8;
            if let Some(last) = list.last_mut().filter(same) {
                let joined = u64::from(last.len.get()) + (block + u64::from(n) - end);
                if (end == block || gap_is_cached) && joined <= u64::from(u32::MAX) {
                    last.len = U32::new(joined as u32);
                    end = block + u64::from(n);
                    return true;
                }
            }
            last_kind = kind as u8;
            end = block + u64::from(n);
            list.push(ExtentItem {
                block: U64::new(block),
                len: U32::new(n),
                volume: U16::new(v as u16),
                kind: kind as u8,
                reserved: 0,
            });
            false
        };
        let mut covered_to = u64::MAX;
        let mut cached = 0; // Since the last zeroes.
        let covered = &mut all_covered[v];
        for object in volume.ledger.index().objects(0) {
            let flags = volume.ledger.flags(object);
            let zero_dirty = flags.contains(ObjectFlags::ZERO_DIRTY);
            let keep = flags.contains(ObjectFlags::ZERO_KEEP);
            let zero_kind = if keep { ExtentKind::ZeroKeep } else { ExtentKind::Zero };
            if !zero_dirty && counts.lost == 0 && covered_to != u64::from(object) * OBJECT_BLOCKS as u64 {
                covered_to = u64::MAX; // Nothing in it, and nothing that goes on in it.
                continue;
            }
            for (block, n, found) in volume.ledger.index().runs(object) {
                match found {
                    Lookup::Zero if zero_dirty => {
                        if push(zero_kind, block, n, covered_to == block) {
                            *covered += cached;
                        }
                        cached = 0;
                        covered_to = block + u64::from(n);
                    }
                    Lookup::Lost if volume.failed => covered_to = u64::MAX,
                    Lookup::Lost => {
                        push(ExtentKind::Lost, block, n, false);
                        covered_to = u64::MAX;
                    }
                    Lookup::At(_) if covered_to == block => {
                        covered_to = block + u64::from(n);
                        cached += u64::from(n);
                    }
                    _ => covered_to = u64::MAX,
                }
            }
        }
    }
    (list, all_covered)
}
