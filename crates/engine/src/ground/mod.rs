//! What all rooms stand on: memory and effects, where blocks are, the log, and what is true of each
//! volume.
//!
//! | file | what it is about |
//! |---|---|
//! | `appends` | Appends, from the first block that is put into one until what it has brought is on stable media |
//! | `copies` | what the ground does for second copies |
//! | `task` | What is being done to a volume as a whole |
//! | `volume` | One volume, as all rooms know it |

mod appends;
mod copies;
pub(crate) mod task;
pub(crate) mod volume;

use crate::api::*;
use crate::base::consequences::Consequence;
use crate::base::flight::Io;
use crate::base::shared::{Base, EngineConfig};
use crate::blocks::arriving::Arriving;
use crate::blocks::bad::Bad;
use crate::blocks::budget::Budget;
use crate::blocks::extents::{self, Extents};
use crate::blocks::index::{Lookup, Position, VolumeIndex};
use crate::blocks::ledger::Ledger;
use crate::blocks::marks::Marks;
use crate::blocks::own::Source;
use crate::blocks::space::Space;
use crate::format::Geometry;
use crate::ground::volume::Volume;
use crate::log::Log;
use std::ops::{Deref, DerefMut, Range};

/// Where a stretch of blocks is found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    volume: VolumeId,
    lookup: Lookup,
    hole: bool,
    blocks: u32,
}

impl Found {
    /// The volume whose index has it, or whose image.
    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// What the index of that volume says.
    pub(crate) fn lookup(&self) -> Lookup {
        self.lookup
    }

    /// No index has it, and no image: it reads as zero.
    pub(crate) fn is_hole(&self) -> bool {
        self.hole
    }

    /// How many blocks are like the first one.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// What the rooms of one cache device share.
pub(crate) struct Ground {
    base: Base,
    space: Space,
    budget: Budget,
    arriving: Arriving,
    bad: Bad,
    log: Log,
    /// By number; no longer than needed, since every round looks at all of them.
    volumes: Vec<Option<Box<Volume>>>,
}

/// What the floor below has, the ground has: memory, effects on their way out, and what is true of
/// the device.
impl Deref for Ground {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

impl DerefMut for Ground {
    fn deref_mut(&mut self) -> &mut Base {
        &mut self.base
    }
}

impl Ground {
    pub(crate) fn new(geo: Geometry, config: EngineConfig, durable: u64, epoch: u64) -> Ground {
        Ground {
            base: Base::new(geo, config, durable),
            space: Space::new(geo, epoch),
            budget: Budget::default(),
            arriving: Arriving::new(),
            bad: Bad::default(),
            log: Log::new(geo.segment_blocks),
            volumes: Vec::new(),
        }
    }

    /// Does something with a volume's backend.
    pub(crate) fn backend(&mut self, io: Io, volume: VolumeId, op: BackendOp) {
        self.volume_mut(volume).note_backend_op(&op);
        self.base.out_mut().backend(io, volume, op);
    }

    /// Where blocks are, and which segments are free.
    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    /// Where blocks are, and which segments are free, to pin blocks and to change what segments are
    /// used for.
    pub(crate) fn space_mut(&mut self) -> &mut Space {
        &mut self.space
    }

    /// What is known of each block of the device.
    pub(crate) fn marks(&self) -> &Marks {
        self.space.marks()
    }

    /// How much of the device may still be used.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// How much of the device may still be used, to tell what has changed.
    pub(crate) fn budget_mut(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// Blocks on their way into the read cache.
    pub(crate) fn arriving(&self) -> &Arriving {
        &self.arriving
    }

    /// Blocks on their way into the read cache, to tell what becomes of them.
    pub(crate) fn arriving_mut(&mut self) -> &mut Arriving {
        &mut self.arriving
    }

    /// Blocks of which the copy is bad.
    pub(crate) fn bad(&self) -> &Bad {
        &self.bad
    }

    /// Blocks of which the copy is bad, to tell of one.
    pub(crate) fn bad_mut(&mut self) -> &mut Bad {
        &mut self.bad
    }

    /// The append streams.
    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// The append streams, to wait for them, and to say what goes on beside them.
    pub(crate) fn log_mut(&mut self) -> &mut Log {
        &mut self.log
    }

    /// Numbers that volumes may have: of some there may be no volume.
    pub(crate) fn places(&self) -> impl Iterator<Item = VolumeId> + use<> {
        (0..self.volumes.len() as u16).map(VolumeId)
    }

    /// How many numbers volumes may have.
    pub(crate) fn places_count(&self) -> usize {
        self.volumes.len()
    }

    /// All volumes.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = &Volume> {
        self.volumes.iter().flatten().map(|volume| &**volume)
    }

    /// All volumes, to be changed.
    pub(crate) fn volumes_mut(&mut self) -> impl Iterator<Item = &mut Volume> {
        self.volumes.iter_mut().flatten().map(|volume| &mut **volume)
    }

    /// The volume of this number, if there is one.
    pub(crate) fn get(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(usize::from(id.0))?.as_deref()
    }

    /// The volume of this number, if there is one, to be changed.
    pub(crate) fn get_mut(&mut self, id: VolumeId) -> Option<&mut Volume> {
        self.volumes.get_mut(usize::from(id.0))?.as_deref_mut()
    }

    /// The volume of this number, if there is one, and where blocks are.
    pub(crate) fn get_with_space(&mut self, id: VolumeId) -> Option<(&mut Volume, &mut Space)> {
        let volume = self.volumes.get_mut(usize::from(id.0))?.as_deref_mut()?;
        Some((volume, &mut self.space))
    }

    /// There is a volume with this name.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.volumes().any(|volume| volume.spec().name == name)
    }

    /// Gives a volume the lowest number that is free, and that `is_taken` does not say is
    /// another's, if there is one.
    pub(crate) fn insert(
        &mut self,
        volume: Volume,
        is_taken: impl Fn(VolumeId) -> bool,
    ) -> Option<VolumeId> {
        let is_free = |id: &VolumeId| self.get(*id).is_none() && !is_taken(*id);
        let next = VolumeId(self.volumes.len() as u16);
        let id = self.places().find(is_free).unwrap_or(next);
        if u32::from(id.0) == self.base.geo().volume_pages {
            return None;
        }
        if id == next {
            self.volumes.push(None);
        }
        self.volumes[usize::from(id.0)] = Some(Box::new(volume));
        self.count_quotas();
        Some(id)
    }

    /// A volume is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) {
        self.volumes[usize::from(id.0)] = None;
    }

    /// Recovery has found these volumes, by number.
    pub(crate) fn restore_volumes(&mut self, found: Vec<Option<Volume>>) {
        self.volumes = found.into_iter().map(|volume| volume.map(Box::new)).collect();
        while self.volumes.last().is_some_and(Option::is_none) {
            self.volumes.pop();
        }
        self.count_quotas();
    }

    /// The volumes that there are.
    pub(crate) fn ids(&self) -> impl Iterator<Item = VolumeId> + use<'_> {
        let volumes = self.volumes.iter().enumerate();
        volumes.filter(|(_, volume)| volume.is_some()).map(|(number, _)| VolumeId(number as u16))
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.volumes[id.0 as usize]
            .as_ref()
            .expect("the volume exists while something of it is in flight")
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[id.0 as usize]
            .as_mut()
            .expect("the volume exists while something of it is in flight")
    }

    /// Where the blocks of a volume are, to be changed.
    pub(crate) fn ledger_and_space(&mut self, id: VolumeId) -> (&mut Ledger, &mut Space) {
        let (volume, space) = self.volume_and_space(id);
        (volume.ledger_mut(), space)
    }

    pub(crate) fn volume_and_space(&mut self, id: VolumeId) -> (&mut Volume, &mut Space) {
        let volume = self.volumes[id.0 as usize].as_mut();
        (volume.expect("the volume exists while something of it is in flight"), &mut self.space)
    }

    /// The dirty quota in force, in bytes; see [`Budget::quota`].
    pub(crate) fn dirty_bytes_max(&self, id: VolumeId) -> u64 {
        let spec = self.volume(id).spec();
        if spec.read_only { 0 } else { self.budget.quota(&self.space, spec.dirty_bytes_max) }
    }

    /// A volume has come or gone, or its quota has changed.
    pub(crate) fn count_quotas(&mut self) {
        let written = self.volumes.iter().flatten().filter(|volume| !volume.spec().read_only);
        self.budget.set_quotas(&self.space, written.map(|volume| volume.spec().dirty_bytes_max));
    }

    fn extents(&self) -> Extents {
        let volumes = self.volumes.iter();
        extents::collect(
            volumes.map(|v| v.as_ref().map(|volume| (volume.ledger(), volume.is_failed()))),
        )
    }

    /// The extents of a checkpoint of the state now; `None` while there are too many of them.
    ///
    /// Ranges are limited when they are admitted, but a drain in the wrong order can split one into
    /// many. Lost blocks that are too many to be named make their volume fail as a whole.
    pub(crate) fn extents_that_fit(&mut self) -> Option<Extents> {
        let max = self.base.geo().extents_max();
        loop {
            let extents = self.extents();
            self.budget.set_extents(extents.items().len() + self.log.unpublished_ranges());
            if extents.items().len() <= max {
                return Some(extents);
            }
            if extents.lost() <= max / 2 {
                return None;
            }
            let whole = self.volumes_mut().filter(|v| !v.is_failed());
            whole.max_by_key(|v| v.ledger().blocks().lost)?.fail();
        }
    }

    /// Whether new ranges must wait for room in checkpoints. What is pending is an upper bound; it
    /// is counted only when somebody would have to wait, and once for each change of the real
    /// number.
    pub(crate) fn extents_are_full(&mut self) -> bool {
        self.count_extents(1);
        self.ranges_left() == 0
    }

    /// Counts the extents anew if fewer than `wanted` more seem to be possible.
    pub(crate) fn count_extents(&mut self, wanted: u64) {
        if self.ranges_left() < wanted && self.budget.take_extents_changed() {
            let extents = self.extents().items().len() + self.log.unpublished_ranges();
            self.budget.set_extents(extents);
        }
    }

    /// Extents that the checkpoint has of one volume.
    pub(crate) fn extents_of(&self, id: VolumeId) -> u64 {
        self.extents().items().iter().filter(|extent| extent.volume.get() == id.0).count() as u64
    }

    /// Ranges of zeroes that may still be logged, beside what owners of replicas were told.
    pub(crate) fn ranges_left(&self) -> u64 {
        self.budget.ranges_left(&self.space)
    }

    /// The default share of a volume that is still to come, in bytes.
    pub(crate) fn quota_of_another(&self) -> u64 {
        self.budget.quota_of_another(&self.space)
    }

    /// Drops what the cache holds of a range, as a record says. Dirty blocks go too: the caller
    /// knows why.
    pub(crate) fn drop_blocks(&mut self, id: VolumeId, first: u64, blocks: u64) {
        let (ledger, space) = self.ledger_and_space(id);
        ledger.forget(space, first, blocks);
    }

    /// Drops what the cache holds of a range, without a record that says so: a crash may bring it
    /// back until the next checkpoint.
    pub(crate) fn forget_blocks(&mut self, id: VolumeId, first: u64, blocks: u64) {
        self.note_forgotten(id);
        self.drop_blocks(id, first, blocks);
    }

    /// Something of the volume is dropped without a record that says so.
    pub(crate) fn note_forgotten(&mut self, id: VolumeId) {
        let next = self.base.checkpoints().next();
        self.volume_mut(id).forget_until(next);
    }

    /// Blocks have changed: what of them is on its way into the read cache is not the newest any
    /// more. Returns how many blocks were.
    pub(crate) fn overtake(&mut self, id: VolumeId, first: u64, blocks: u64) -> u64 {
        let overtaken = self.arriving.overtake(id, first, blocks);
        if overtaken > 0 {
            self.volume_mut(id).count_mut().bypass_overtaken_blocks += overtaken;
        }
        overtaken
    }

    /// The read `number` of `bytes` brings nothing into the read cache.
    pub(crate) fn settle_read(&mut self, id: VolumeId, first: u64, bytes: u32, number: u32) {
        for block in first..first + u64::from(bytes) / BLOCK_BYTES as u64 {
            if self.arriving.brings(id, block, number) {
                self.arriving.settle(id, block);
            }
        }
    }

    /// A cached block does not verify, also when it was read again.
    pub(crate) fn note_corrupt(&mut self, id: VolumeId, position: Position) {
        // Until it is repaired it may be found bad many times.
        if !self.bad.has(position) {
            self.volume_mut(id).count_mut().corrupt_blocks += 1;
        }
    }

    /// The only copy of a dirty block is lost: it reads EIO until it is overwritten.
    pub(crate) fn lose_for_good(&mut self, id: VolumeId, block: u64, position: Position) {
        if self.volume(id).ledger().index().lookup(block) != Lookup::At(position) {
            return;
        }
        let (volume, space) = self.volume_and_space(id);
        volume.ledger_mut().lose(space, block, position);
        if let Some(copy) = volume.copy_mut() {
            copy.note_lost();
        }
        self.base.checkpoints_mut().want();
        if self.base.is_dead() {
            self.fail(id);
        }
    }

    /// A dirty block has no good copy left and the cache device cannot record that. The volume
    /// answers nothing any more: what the image holds is older than what its clients have seen. It
    /// keeps its place in the image's record (see [`Engine::disown`](crate::Engine::disown)), so
    /// that a restart does not serve the image either.
    pub(crate) fn fail(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if volume.fail() {
            let lost = volume.ledger().blocks().lost;
            self.base.tell(Consequence::Failed(id, lost));
        }
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    pub(crate) fn fence(&mut self, id: VolumeId) {
        if self.volume_mut(id).fence() {
            self.base.tell(Consequence::Fenced(id));
        }
    }

    /// Remembers whether the backend works.
    pub(crate) fn note_backend_result(
        &mut self,
        now: Nanos,
        id: VolumeId,
        result: Result<(), IoError>,
    ) {
        let volume = self.volume_mut(id);
        volume.backend_mut().note_result(now, result);
        volume.count_mut().backend_errors += u64::from(result.is_err());
        if result == Err(IoError::Fenced) {
            self.fence(id);
        }
    }

    /// Of what may fail without the backend failing, only that another owner has the image.
    pub(crate) fn note_fence(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        if result == Err(IoError::Fenced) {
            self.note_backend_result(now, id, result);
        }
    }

    /// Blocks that the volume may still dirty.
    pub(crate) fn quota_left(&self, id: VolumeId) -> u64 {
        let volume = self.volume(id);
        let used = volume.blocks_used() + volume.reserve().blocks();
        let own = (self.dirty_bytes_max(id) / BLOCK_BYTES as u64).saturating_sub(used);
        own.min(self.blocks_left())
    }

    /// Blocks that all volumes together may still dirty, beside what owners of replicas were told.
    pub(crate) fn blocks_left(&self) -> u64 {
        self.budget.blocks_left(&self.space)
    }

    /// Whether any of the blocks is dirty. What is on its way to the image stays so until it is
    /// flushed there, and zeroes are forgotten then.
    pub(crate) fn has_dirty(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let volume = self.volume(id);
        if volume.ledger().dirty() == 0 && !volume.is_dirty() {
            return false;
        }
        let is_dirty = |found, n| match found {
            Lookup::At(position) => (position..position + n).any(|p| self.marks().is_dirty(p)),
            Lookup::Zero => true,
            Lookup::Absent | Lookup::Lost => false,
        };
        any(volume.ledger().index(), first..end, is_dirty)
    }

    /// Whether the only copy of any of the blocks is lost.
    pub(crate) fn has_lost(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let index = self.volume(id).ledger().index();
        index.blocks().lost > 0 && any(index, first..end, |found, _| found == Lookup::Lost)
    }

    /// Whether the index knows anything about the blocks.
    pub(crate) fn is_known(&self, id: VolumeId, first: u64, end: u64) -> bool {
        any(self.volume(id).ledger().index(), first..end, |found, _| found != Lookup::Absent)
    }

    /// Where a block of a volume is found, and how many of the next `n` are like it.
    pub(crate) fn find(&self, id: VolumeId, block: u64, n: u32) -> Found {
        let (mut id, mut n) = (id, n);
        loop {
            let volume = self.volume(id);
            let (lookup, blocks) = volume.ledger().index().lookup_run(block, n);
            let found = Found { volume: id, lookup, hole: false, blocks };
            if lookup != Lookup::Absent {
                return found;
            }
            let (source, blocks) = volume.source(block, blocks);
            let parent = volume.parent().filter(|_| volume.mode() != Mode::Off);
            match (source, parent) {
                (Source::Parent, Some(parent)) => (id, n) = (parent, blocks),
                _ => return Found { hole: source == Source::Hole, blocks, ..found },
            }
        }
    }

    /// Something has changed for operations of all volumes that wait in the front.
    pub(crate) fn recheck_all(&mut self) {
        self.volumes_mut().for_each(|volume| volume.recheck());
    }
}

/// Whether `is` holds of any stretch of the blocks: it is told what is known of a stretch, and how
/// many blocks that has.
fn any(index: &VolumeIndex, blocks: Range<u64>, is: impl Fn(Lookup, u32) -> bool) -> bool {
    let mut at = blocks.start;
    while at < blocks.end {
        let (found, n) = index.lookup_run(at, (blocks.end - at).min(1 << 20) as u32);
        if is(found, n) {
            return true;
        }
        at += u64::from(n);
    }
    false
}
