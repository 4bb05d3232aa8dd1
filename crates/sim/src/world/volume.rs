//! What the simulator keeps for one volume.

mod excuses;
mod look;
mod past;
mod traffic;

use super::plan::VolumePlan;
use crate::checker::{Checker, SECTORS, fill};
use crate::evidence::Evidence;
use crate::machine::backend::Backend;
use excuses::Excuses;
use look::Look;
use past::{Past, Told};
use tidepool_engine::api::{BLOCK_BYTES, DrainOrder, Mode, Nanos, Op, SECTOR_BYTES};
use tidepool_engine::mem::Buf;
use traffic::Traffic;

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

/// Who sends a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// A client's slot, which goes on when it is answered.
    Slot(usize),
    /// The look at what a power loss has left, at this block.
    Look(u64),
    /// The simulator, to compare.
    Comparison,
}

impl Sender {
    pub(super) fn slot(self) -> Option<usize> {
        if let Sender::Slot(slot) = self { Some(slot) } else { None }
    }

    pub(super) fn looks_at(self) -> Option<u64> {
        if let Sender::Look(block) = self { Some(block) } else { None }
    }
}

/// A client's request in flight.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    pub(super) volume: usize,
    /// What it asks for.
    pub(super) op: Op,
    pub(super) first_sector: u64,
    pub(super) sectors: u64,
    pub(super) buf: Option<Buf>,
    /// The tick at which it was sent.
    pub(super) start: u64,
    pub(super) sent_at: Nanos,
    pub(super) sender: Sender,
    /// It may be refused: the volume was on its way out.
    pub(super) closing: bool,
}

/// One volume of a run. The machine has its image.
pub struct Vol {
    pub(super) plan: VolumePlan,
    pub(super) name: String,
    /// What it may hold.
    pub(super) checker: Checker,
    pub(super) place: Place,
    /// Its mode as last asked for.
    pub(super) mode: Mode,
    /// Its quota.
    pub(super) dirty_bytes_max: u64,
    /// What its clients have sent.
    pub(super) traffic: Traffic,
    /// Why requests may fail or wait.
    pub(super) excuses: Excuses,
    /// Control operations in flight.
    pub(super) controls: u32,
    /// The look at what a power loss has left.
    pub(super) look: Look,
    /// What a restart may find.
    pub(super) past: Past,
    /// What the core was told of its image.
    pub(super) told: Told,
    /// What the core has written of its log, since the volume was added or the core came back from
    /// a crash.
    pub(super) evidence: Evidence,
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
            checker,
            place: Place::Out,
            mode: plan.mode,
            dirty_bytes_max: plan.dirty_bytes_max,
            traffic: Traffic::new(plan.depth),
            excuses: Excuses::default(),
            controls: 0,
            look: Look::default(),
            past: Past::default(),
            told: Told::default(),
            evidence: Evidence::default(),
            plan,
        }
    }

    /// The value that the `n`-th write of a slot, or of somebody else, leaves in every sector. No
    /// other write has it.
    pub fn value(slot: Option<usize>, n: u64) -> u64 {
        n << 8 | slot.map_or(1, |slot| slot as u64 + 2)
    }

    /// It is about to become smaller: from now on nothing is sent beyond the new end.
    pub fn begin_shrink(&mut self, size_bytes: u64, now: u64) {
        self.limit(size_bytes);
        self.checker.begin_shrink(size_bytes, now);
    }

    /// It has the size of its image.
    pub fn resized(&mut self, backend: &Backend) {
        self.limit(backend.size_bytes());
        self.checker.resize(backend.size_bytes());
    }

    fn limit(&mut self, size_bytes: u64) {
        self.plan.size_bytes = size_bytes;
        self.plan.hot_bytes = self.plan.hot_bytes.min(size_bytes);
        self.traffic.begin_stream();
    }

    /// What makes the volume's content different from that of the others.
    pub fn salt(&self) -> u64 {
        self.checker.salt()
    }

    /// Whether the image with its redo is the volume as it once was: what is left of it without the
    /// cache.
    ///
    /// # Errors
    /// What contradicts that.
    pub fn check_cut(&mut self, backend: &Backend, whole: bool) -> Result<(), String> {
        let content = backend.redo().content()?;
        self.checker.check_cut(backend.is_stable(), whole, 0, &mut |block, out| {
            backend.read_cut(&content, block, out)
        })
    }

    /// Whether the image alone is the volume at one moment, and has all that was acknowledged
    /// before `floor`.
    ///
    /// # Errors
    /// What contradicts that.
    pub fn check_snapshot(&mut self, backend: &Backend, floor: u64) -> Result<(), String> {
        self.checker
            .check_cut(backend.is_stable(), true, floor, &mut |block, out| backend.read(block, out))
    }

    /// The image is given to others as it is, who flush it.
    pub fn release_image(&mut self, backend: &mut Backend) {
        backend.clear_redo();
        backend.flush();
        self.checker.adopt_cut(&mut |block, out| backend.read(block, out));
    }

    /// Writes sectors of the image, durably.
    pub fn write_image(&self, backend: &mut Backend, first: u64, n: u64, value: u64) {
        let mut bytes = [0; BLOCK_BYTES];
        let salt = self.salt();
        let mut sector = first;
        while sector < first + n {
            let block = sector / SECTORS as u64;
            backend.read(block, &mut bytes);
            let end = ((block + 1) * SECTORS as u64).min(first + n);
            for s in sector..end {
                let at = (s % SECTORS as u64) as usize * SECTOR_BYTES;
                fill(&mut bytes[at..at + SECTOR_BYTES], salt, s, value);
            }
            backend.write(block, &bytes);
            sector = end;
        }
    }

    /// Nothing of the core's life is left.
    pub(super) fn forget_life(&mut self) {
        self.excuses.forget_life();
        self.told.forget();
        self.traffic.forget_life();
        self.look.forget_life();
        self.controls = 0;
    }
}
