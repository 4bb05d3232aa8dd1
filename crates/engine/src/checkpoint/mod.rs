//! Checkpoints: the segment table, the volumes, and ranges that no segment holds.
//!
//! A checkpoint does not hold the index: that is rebuilt from the segments' summaries and the live
//! bits. Two slots are written in turn, each as two copies, and only the pages that changed since
//! the slot was last written. The header, written last and stable, makes the checkpoint valid.

mod pages;

pub(crate) use pages::combined_crc;

use crate::api::{BLOCK_BYTES, ControlError, IoError, Nanos, VolumeId};
use crate::base::checkpoints::Checkpoints;
use crate::base::device::Device;
use crate::base::flight::{DeviceFailed, Io};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::For;
use crate::blocks::extents::Extents;
use crate::blocks::space::RESERVE_READ_CACHE;
use crate::checkpoint::pages::{Pages, encode_extents, encode_segments, encode_volume};
use crate::format::{
    CHECKPOINT_MAGIC, CHECKPOINT_VERSION, CheckpointHeader, EXTENTS_PER_PAGE, SLOT_COPIES, SLOTS,
    Stream, byte,
};
use crate::ground::Ground;
use zerocopy::little_endian::{U16, U32, U64};

/// A checkpoint is taken when so much was appended since the last one: it bounds the replay.
const APPENDED_BYTES: u64 = 256 << 20;
/// A checkpoint is taken when the last one is this old and something has changed.
const INTERVAL_NS: Nanos = 10_000_000_000;

/// A checkpoint follows when a volume has been drained completely, so that a crash does not make
/// clean blocks dirty again; under a load that drains again and again, no more often than this.
const DRAINED_NS: Nanos = 3_000_000_000;

/// Pause before a checkpoint is tried again that had no room for all extents.
const POSTPONED_NS: Nanos = 500_000_000;

/// What checkpoints need to remember between them.
pub(crate) struct Checkpoint {
    epoch: u64,
    /// Until then there are more extents than it could hold; the drain makes them fewer.
    postponed_until: Nanos,
    last: Nanos,
    /// CRC of every page as it stands in each slot; `None` if unknown.
    page_crcs: [Vec<Option<u32>>; SLOTS],
    run: Option<Run>,
    /// Buffers in flight and how many writes still use each.
    users: Vec<(Buf, u32)>,
    /// Control operations that are complete when the next checkpoint that is begun is durable.
    waiters: Vec<Waiter>,
}

/// A control operation that waits for a durable checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiter {
    control: u64,
    /// Its answer if the device fails before.
    on_failure: Result<(), ControlError>,
    /// A volume that is gone again if the device fails before.
    added: Option<VolumeId>,
}

impl Waiter {
    /// It is answered with `on_failure` if the device fails before.
    pub(crate) fn new(control: u64, on_failure: Result<(), ControlError>) -> Waiter {
        Waiter { control, on_failure, added: None }
    }

    /// It adds a volume, which is gone again if the device fails before.
    pub(crate) fn adding(control: u64, id: VolumeId) -> Waiter {
        Waiter { control, on_failure: Err(ControlError::Device), added: Some(id) }
    }

    /// The operation's control number.
    pub(crate) fn control(&self) -> u64 {
        self.control
    }

    /// Its answer when the device has failed.
    pub(crate) fn on_failure(&self) -> Result<(), ControlError> {
        self.on_failure
    }

    /// The volume that is gone again when the device has failed.
    pub(crate) fn added(&self) -> Option<VolumeId> {
        self.added
    }
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

impl Checkpoint {
    /// `pages`: how many a slot has.
    pub(crate) fn new(epoch: u64, pages: u32, now: Nanos) -> Checkpoint {
        Checkpoint {
            epoch,
            postponed_until: 0,
            last: now,
            page_crcs: [vec![None; pages as usize], vec![None; pages as usize]],
            run: None,
            users: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// A control operation is complete when the next checkpoint that begins is durable.
    pub(crate) fn wait(&mut self, waiter: Waiter) {
        self.waiters.push(waiter);
    }

    /// The volume in this place begins anew behind `base`: a checkpoint of what it was says nothing
    /// about what comes.
    pub(crate) fn forget_sequence(&mut self, id: VolumeId, base: u64) {
        let run = self.run.as_mut();
        if let Some(sequence) = run.and_then(|run| run.sequences.get_mut(id.0 as usize)) {
            *sequence = base.min(*sequence);
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.run.is_none()
    }

    /// When it has to be looked at, if nothing else happens.
    pub(crate) fn deadline(&self, known: &Checkpoints) -> Option<Nanos> {
        if self.run.is_some() || known.is_held_up() {
            return None;
        }
        if self.postponed_until > 0 {
            return Some(self.postponed_until);
        }
        let drained = known.has_drained().then_some(self.last + DRAINED_NS);
        drained.or((known.appended_bytes() > 0).then_some(self.last + INTERVAL_NS))
    }

    /// Begins a checkpoint when one is due.
    pub(crate) fn begin(&mut self, ground: &mut Ground, now: Nanos) {
        if self.run.is_some() || ground.is_dead() || now < self.postponed_until {
            return;
        }
        let due = self.is_due(ground, now);
        // Summaries must be written before a checkpoint says that their segments have them.
        let is_held_up = due && !ground.log().nothing_sealing();
        ground.checkpoints_mut().set_held_up(is_held_up);
        if !due || is_held_up {
            return;
        }
        let Some(extents) = ground.extents_that_fit() else {
            self.postponed_until = now + POSTPONED_NS;
            return;
        };
        let number = ground.checkpoints().durable() + 1;
        let pages = self.encode(ground, number, &extents);
        let released = ground.space().released();
        let sequence = |id| ground.get(id).map_or(0, |volume| volume.log().published());
        let sequences = ground.places().map(sequence).collect();
        ground.checkpoints_mut().begin(number);
        self.postponed_until = 0;
        self.last = now;
        self.run = Some(Run {
            number,
            phase: Phase::Pages,
            pages,
            next: 0,
            writes: 0,
            released,
            waiters: std::mem::take(&mut self.waiters),
            appended: ground.log().published(Stream::Log),
            sequences,
        });
        self.advance(ground);
    }

    fn is_due(&self, ground: &Ground, now: Nanos) -> bool {
        let known = ground.checkpoints();
        let old = known.appended_bytes() > 0 && now >= self.last + INTERVAL_NS;
        let drained = known.has_drained() && now >= self.last + DRAINED_NS;
        let full = known.appended_bytes() >= APPENDED_BYTES;
        let short = ground.space().free_count() <= RESERVE_READ_CACHE
            && ground.space().released_count() > 0;
        short || known.is_wanted() || !self.waiters.is_empty() || full || old || drained
    }

    /// Encodes what the state is now.
    fn encode(&mut self, ground: &mut Ground, number: u64, extents: &Extents) -> Pages {
        let slot = (number % SLOTS as u64) as usize;
        let crcs = &mut self.page_crcs[slot];
        let mut pages = Pages::new(slot);
        let geo = *ground.geo();
        let segment_pages = geo.segment_pages();
        for page in ground.space_mut().take_changed_pages(slot) {
            pages.push(page, encode_segments(ground.space(), page), crcs);
        }
        for v in 0..geo.volume_pages {
            let volume = ground.get(VolumeId(v as u16));
            let item = volume.map(|volume| volume.to_item(extents.covered_blocks(v as usize)));
            pages.push(segment_pages + v, encode_volume(&geo.uuid, segment_pages + v, item), crcs);
        }
        let first = segment_pages + geo.volume_pages;
        for e in 0..geo.extent_pages {
            let items = extents.items();
            let from = (e as usize * EXTENTS_PER_PAGE).min(items.len());
            let to = (from + EXTENTS_PER_PAGE).min(items.len());
            pages.push(first + e, encode_extents(&geo.uuid, first + e, &items[from..to]), crcs);
        }
        let open = ground.log().open_places();
        pages.set_header(CheckpointHeader {
            magic: CHECKPOINT_MAGIC,
            crc: U32::ZERO,
            uuid: geo.uuid,
            checkpoint: U64::new(number),
            epoch: U64::new(self.epoch),
            next_segment_sequence: U64::new(ground.space().next_life()),
            pages_crc: U32::new(combined_crc(&self.page_crcs[slot])),
            open_segment: open.map(|(segment, _)| U32::new(segment)),
            open_block: open.map(|(_, block)| U32::new(block)),
            version: U16::new(CHECKPOINT_VERSION),
        });
        pages
    }

    /// Goes on with the checkpoint as far as buffers allow.
    pub(crate) fn advance(&mut self, ground: &mut Ground) {
        let Some(run) = &self.run else { return };
        match run.phase {
            Phase::Pages => {
                while self.run.as_ref().is_some_and(|run| run.next < run.pages.len()) {
                    if !self.write_pages(ground) {
                        return;
                    }
                }
                let run = self.run.as_mut().expect("a run advances");
                if run.writes == 0 && mutated!(HeaderBeforePages) {
                    run.phase = Phase::Synced;
                    return self.advance(ground);
                }
                if run.writes == 0 {
                    run.phase = Phase::Sync;
                    ground.sync(Io::CheckpointSync);
                }
            }
            Phase::Synced => {
                let Some(buf) = ground.pools_mut().take(For::Checkpoint) else { return };
                let run = self.run.as_mut().expect("a run advances");
                run.phase = Phase::Header;
                run.writes = SLOT_COPIES as u32;
                self.users.push((buf, SLOT_COPIES as u32));
                ground.bytes_mut(buf)[..BLOCK_BYTES].copy_from_slice(run.pages.header());
                for copy in 0..SLOT_COPIES {
                    let offset = byte(ground.geo().slot_block(run.pages.slot(), copy));
                    let io = Io::CheckpointWrite { buf };
                    ground.write(io, offset, buf.slice(0, BLOCK_BYTES), true);
                }
            }
            Phase::Sync | Phase::Header => {}
        }
    }

    /// Writes the next pages of the list that follow each other, to both copies of the slot.
    fn write_pages(&mut self, ground: &mut Ground) -> bool {
        let Some(buf) = ground.pools_mut().take(For::Checkpoint) else { return false };
        let run = self.run.as_mut().expect("a run writes pages");
        let (first, bytes) = run.pages.stretch(run.next, buf.len as usize);
        let len = bytes.len();
        ground.bytes_mut(buf)[..len].copy_from_slice(bytes);
        run.next += len / BLOCK_BYTES;
        run.writes += SLOT_COPIES as u32;
        self.users.push((buf, SLOT_COPIES as u32));
        for copy in 0..SLOT_COPIES {
            let offset = byte(ground.geo().slot_block(run.pages.slot(), copy) + 1 + first);
            ground.write(Io::CheckpointWrite { buf }, offset, buf.slice(0, len), false);
        }
        true
    }

    /// A write of the checkpoint has completed. Tells whether the checkpoint is durable now.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn write_done(
        &mut self,
        ground: &mut Ground,
        buf: Buf,
        result: Result<(), IoError>,
    ) -> Result<bool, DeviceFailed> {
        let at = self.users.iter().position(|(b, _)| *b == buf).expect("the buffer is in use");
        self.users[at].1 -= 1;
        if self.users[at].1 == 0 {
            self.users.swap_remove(at);
            ground.pools_mut().give(For::Checkpoint, buf);
        }
        result.map_err(|_| DeviceFailed)?;
        let Some(run) = &mut self.run else { return Ok(false) };
        run.writes -= 1;
        if run.phase == Phase::Header && run.writes == 0 {
            self.end(ground);
            return Ok(true);
        }
        self.advance(ground);
        Ok(false)
    }

    /// The pages of the checkpoint are stable.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn sync_done(
        &mut self,
        ground: &mut Ground,
        result: Result<(), IoError>,
    ) -> Result<(), DeviceFailed> {
        result.map_err(|_| DeviceFailed)?;
        if let Some(run) = &mut self.run {
            run.phase = Phase::Synced;
        }
        self.advance(ground);
        Ok(())
    }

    /// The checkpoint is durable.
    fn end(&mut self, ground: &mut Ground) {
        let run = self.run.take().expect("a run ends");
        ground.complete_checkpoint(run.number);
        for segment in run.released {
            ground.space_mut().free_released(segment);
        }
        ground.note_checkpointed(run.appended, &run.sequences);
        for waiter in run.waiters {
            ground.control_done(waiter.control, Ok(()));
        }
        ground.stir();
    }

    /// The device failed: the checkpoint will never be durable. Returns who has waited for it, or
    /// for the next one.
    pub(crate) fn abandon(&mut self, known: &mut Checkpoints) -> Vec<Waiter> {
        known.abandon();
        self.postponed_until = 0;
        let mut waiters = std::mem::take(&mut self.waiters);
        if let Some(run) = self.run.take() {
            waiters.extend(run.waiters);
        }
        waiters
    }

    /// Writes a checkpoint of the state now, blocking: at the end of recovery and at format.
    ///
    /// # Errors
    /// The device failed, or it has no room for all extents.
    pub(crate) fn write_blocking(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
    ) -> Result<(), IoError> {
        let number = ground.checkpoints().durable() + 1;
        // Replay adds no more ranges than were admitted beside those of the last checkpoint.
        let extents = ground.extents_that_fit().ok_or(IoError::Full)?;
        let pages = self.encode(ground, number, &extents);
        pages.write_blocking(ground.geo(), device)?;
        ground.complete_checkpoint(number);
        for segment in ground.space().released() {
            ground.space_mut().free_released(segment);
        }
        Ok(())
    }
}
