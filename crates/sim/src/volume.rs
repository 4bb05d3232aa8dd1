//! What the simulator keeps for one volume.

use crate::backend::Backend;
use crate::checker::{Checker, SECTORS, fill};
use crate::evidence::Evidence;
use crate::plan::VolumePlan;
use crate::store::content;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::{BLOCK_BYTES, DrainOrder, Mode, Nanos, Op, SECTOR_BYTES, VolumeId};
use tidepool_engine::mem::Buf;

/// Where a volume stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Not in the cache.
    Out,
    /// Being added.
    Adding,
    /// In the cache after a restart, not attached.
    Detached,
    /// Being attached.
    Attaching,
    /// What a power loss has left is being looked at.
    Verifying,
    /// Clients use it.
    Serving,
    /// Being removed.
    Removing,
}

/// A client's request in flight.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// Its volume.
    pub volume: usize,
    /// What it asked for.
    pub op: Op,
    /// First sector and number of sectors.
    pub first: u64,
    /// Number of sectors.
    pub sectors: u64,
    /// Its buffer.
    pub buf: Option<Buf>,
    /// Tick and time at which it was sent.
    pub start: u64,
    /// When.
    pub at: Nanos,
    /// The client slot that goes on when it is answered.
    pub slot: Option<usize>,
    /// The block that is looked at after a power loss.
    pub verifies: Option<u64>,
    /// It may be refused: the volume was on its way out.
    pub closing: bool,
}

/// One volume of a run.
pub struct Vol {
    /// Its plan.
    pub plan: VolumePlan,
    /// Its name.
    pub name: String,
    /// Its image.
    pub backend: Backend,
    /// What it may hold.
    pub checker: Checker,
    /// Where it stands.
    pub place: Place,
    /// Its number while it is in the cache.
    pub id: Option<VolumeId>,
    /// Its mode as last asked for.
    pub mode: Mode,
    /// Its quota.
    pub dirty_bytes_max: u64,
    /// A flush or FUA was sent since the cache was opened.
    pub flushed: bool,
    /// Changes that were ever sent.
    pub changes: u64,
    /// Changes in flight.
    pub changing: u64,
    /// Tick of the last error that its backend returned.
    pub backend_error: u64,
    /// A flush of its backend has failed, and no flush of a client since.
    pub flush_failed: bool,
    /// When its backend last was in trouble.
    pub trouble_at: Nanos,
    /// Control operations in flight.
    pub controls: u32,
    /// After a power loss, before use: what it holds is looked at.
    pub must_verify: bool,
    /// Next block to be looked at.
    pub verify_from: u64,
    /// Looks in flight.
    pub verifying: u32,
    /// Writes that each slot has ever sent.
    pub slot_writes: Vec<u64>,
    /// Writes of others to its image.
    pub foreign_writes: u64,
    /// Slots that have nothing in flight and no event that wakes them.
    pub idle_slots: Vec<usize>,
    /// Generation that the cache knew when it was opened.
    pub recovered_generation: u64,
    /// Place of a sequential stream.
    pub cursor: u64,
    /// Attachments that a restart may find: the newest one that was confirmed, and those asked for since.
    pub attachments: Vec<Vec<u8>>,
    /// What its image had of its own when it was last opened.
    pub own_at_open: OwnObjects,
    /// The core was told of that.
    pub own_told: bool,
    /// It reads through its parent.
    pub linked: bool,
    /// What the core has written of its log, since the volume was added or the core came back from a crash.
    pub evidence: Evidence,
    /// When it was seen to have failed.
    pub failed_at: Option<Nanos>,
    /// Its size is being changed: a restart may find the old one in the cache.
    pub resizing: bool,
}

impl Vol {
    /// Clients' changes go past the cache.
    pub fn goes_direct(&self) -> bool {
        matches!(self.mode, Mode::WriteAround | Mode::Off)
    }

    /// Volume number `index` of a run.
    pub fn new(index: usize, plan: VolumePlan) -> Vol {
        // Clones have the content of their parent.
        let salt = plan.content_of.unwrap_or(index) as u64 + 1;
        let mut checker = Checker::new(salt, plan.size_bytes, plan.base_bytes);
        if plan.drain == DrainOrder::Grouped {
            checker.watch_cuts();
        }
        Vol {
            name: format!("volume-{index}"),
            backend: Backend::new(plan.size_bytes, plan.durable_backend, plan.backend_latency_ns),
            checker,
            place: Place::Out,
            id: None,
            mode: plan.mode,
            dirty_bytes_max: plan.dirty_bytes_max,
            flushed: false,
            changes: 0,
            changing: 0,
            backend_error: 0,
            flush_failed: false,
            trouble_at: 0,
            controls: 0,
            must_verify: false,
            verify_from: 0,
            verifying: 0,
            slot_writes: vec![0; plan.depth],
            foreign_writes: 0,
            idle_slots: Vec::new(),
            recovered_generation: 0,
            cursor: 0,
            attachments: Vec::new(),
            own_at_open: OwnObjects::default(),
            own_told: false,
            linked: false,
            evidence: Evidence::default(),
            failed_at: None,
            resizing: false,
            plan,
        }
    }

    /// The value that the `n`-th write of a slot, or of somebody else, leaves in every sector. No other write has it.
    pub fn value(slot: Option<usize>, n: u64) -> u64 {
        n << 8 | slot.map_or(1, |slot| slot as u64 + 2)
    }

    /// It is about to become smaller: from now on nothing is sent beyond the new end.
    pub fn begin_shrink(&mut self, size_bytes: u64, now: u64) {
        self.limit(size_bytes);
        self.checker.begin_shrink(size_bytes, now);
    }

    /// It has the size of its image.
    pub fn resized(&mut self) {
        self.limit(self.backend.size_bytes);
        self.checker.resize(self.backend.size_bytes);
    }

    fn limit(&mut self, size_bytes: u64) {
        self.plan.size_bytes = size_bytes;
        self.plan.hot_bytes = self.plan.hot_bytes.min(size_bytes);
        self.cursor = 0;
    }

    /// An attachment is confirmed: older ones must not come back.
    pub fn keep_attachment(&mut self, confirmed: &[u8]) {
        let at = self.attachments.iter().position(|a| a == confirmed).unwrap_or(0);
        self.attachments.drain(..at);
    }

    /// What makes the volume's content different from that of the others.
    pub fn salt(&self) -> u64 {
        self.checker.salt()
    }

    /// Whether the image with its redo is the volume as it once was: what is left of it without the cache.
    ///
    /// # Errors
    /// What contradicts that.
    pub fn check_cut(&mut self, whole: bool) -> Result<(), String> {
        let content = self.backend.redo.content()?;
        let backend = &self.backend;
        self.checker.check_cut(backend.store.is_stable(), whole, 0, &mut |block, out| {
            backend.read_cut(&content, block, out)
        })
    }

    /// Whether the image alone is the volume at one moment, and has all that was acknowledged before `floor`.
    ///
    /// # Errors
    /// What contradicts that.
    pub fn check_snapshot(&mut self, floor: u64) -> Result<(), String> {
        let backend = &self.backend;
        let stable = backend.store.is_stable();
        self.checker.check_cut(stable, true, floor, &mut |block, out| backend.store.read(block, out))
    }

    /// The cache is lost: brings the image to its last cut.
    ///
    /// # Errors
    /// What is wrong with the redo.
    pub fn recover_image(&mut self) -> Result<(), String> {
        let size = self.backend.size_bytes;
        let clip = |block: u64, bytes: &[u8]| {
            let left = size.saturating_sub(block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize;
            let mut bytes = bytes.to_vec();
            bytes[left..].fill(0);
            bytes
        };
        let backend = &mut self.backend;
        backend.redo.recover(&mut backend.store, &mut backend.own, clip)
    }

    /// The image is given to others as it is, who flush it.
    pub fn release_image(&mut self) {
        self.backend.redo.clear();
        self.backend.store.sync(self.backend.store.sync_point());
        let backend = &self.backend;
        self.checker.adopt_cut(&mut |block, out| backend.store.read(block, out));
    }

    /// Writes sectors of the image, durably.
    pub fn write_image(&mut self, first: u64, n: u64, value: u64) {
        let mut bytes = [0; BLOCK_BYTES];
        let salt = self.salt();
        let mut sector = first;
        while sector < first + n {
            let block = sector / SECTORS as u64;
            self.backend.store.read(block, &mut bytes);
            let end = ((block + 1) * SECTORS as u64).min(first + n);
            for s in sector..end {
                let at = (s % SECTORS as u64) as usize * SECTOR_BYTES;
                fill(&mut bytes[at..at + SECTOR_BYTES], salt, s, value);
            }
            self.backend.note_own(block, 1);
            self.backend.store.write(block, content(&bytes), true);
            sector = end;
        }
    }
}
