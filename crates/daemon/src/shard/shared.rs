//! What all connections of a shard share: the core, its volumes, and the front door's part of the
//! arena.

use crate::shard::control::stats::ReactorCounters;
use crate::shard::core::Core;
use crate::shard::front::budget::{Budget, Held};
use crate::shard::front::coming::Coming;
use crate::shard::front::effort::Effort;
use crate::shard::front::guests::Expected;
use crate::shard::io::volume::Volumes;
use crate::shard::limits::EXTENTS_MAX;
use crate::shard::net::places::Places;
use tidepool_engine::api::{BLOCK_BYTES, Event, Extent, Nanos, Request, VolumeId};
use tidepool_engine::mem::Buf;

pub(super) struct Shared<C> {
    pub(in crate::shard) core: C,
    pub(in crate::shard) volumes: Volumes,
    /// Volumes that are not served here yet, and whose clients are let in.
    pub(in crate::shard) expected: Vec<Expected>,
    /// Volumes that are on their way, and whose clients wait.
    pub(in crate::shard) coming: Vec<Coming>,
    /// A volume has come, or is not on its way any more, since somebody last looked.
    pub(in crate::shard) came: bool,
    pub(in crate::shard) count: ReactorCounters,
    /// Which connections are whose.
    pub(in crate::shard) places: Places,
    /// What clients have had done in this round.
    pub(in crate::shard) effort: Effort,
    /// Time of this round.
    pub(in crate::shard) now: Nanos,
    /// Reused for block status.
    pub(in crate::shard) extents: Vec<Extent>,
    /// The front door's part of the arena.
    budget: Budget,
    /// Memory was given back since somebody last looked.
    pub(in crate::shard) freed: bool,
    /// A trim or write-zeroes has ended since somebody last looked.
    pub(in crate::shard) range_ended: bool,
    /// Volumes whose gate is closed.
    pub(in crate::shard) gated: Vec<VolumeId>,
    /// A gate was opened since somebody last looked.
    pub(in crate::shard) gate_opened: bool,
    /// A volume may be read again since somebody last looked.
    pub(in crate::shard) leased: bool,
}

/// Bytes that a buffer of `len` bytes takes from the arena.
fn footprint(len: usize) -> usize {
    len.next_power_of_two().max(BLOCK_BYTES)
}

impl<C: Core> Shared<C> {
    pub(super) fn new(core: C, now: Nanos) -> Shared<C> {
        // The core has set aside what it needs itself.
        let budget = Budget::new(core.arena().free_bytes());
        let count = ReactorCounters::default();
        Shared {
            core,
            volumes: Volumes::new(),
            expected: Vec::new(),
            coming: Vec::new(),
            came: false,
            count,
            places: Places::default(),
            effort: Effort::new(),
            now,
            extents: Vec::with_capacity(EXTENTS_MAX),
            budget,
            freed: false,
            range_ended: false,
            gated: Vec::new(),
            gate_opened: false,
            leased: false,
        }
    }

    /// A client begins to use a volume.
    pub(super) fn join(&mut self, held: &mut Held, volume: VolumeId) {
        self.budget.join(held, volume);
    }

    /// A client is gone.
    pub(super) fn leave(&mut self, held: &mut Held) {
        self.budget.leave(held);
    }

    /// A buffer of the arena, or `None` when the holder has its share.
    pub(super) fn alloc(&mut self, held: &mut Held, len: usize) -> Option<Buf> {
        let taken = self.budget.take(held, footprint(len));
        self.allocate(taken, held, len)
    }

    /// A buffer for the unaligned writes of a volume: those that wait for them may have all of its
    /// share.
    pub(super) fn alloc_anyway(&mut self, held: &mut Held, len: usize) -> Option<Buf> {
        let taken = self.budget.take_anyway(held, footprint(len));
        self.allocate(taken, held, len)
    }

    fn allocate(&mut self, taken: bool, held: &mut Held, len: usize) -> Option<Buf> {
        let buf = taken.then(|| self.core.arena_mut().alloc(len))?;
        if buf.is_none() {
            self.budget.give(held, footprint(len));
        }
        buf
    }

    /// Gives a buffer back, with the length that it was allocated with.
    pub(super) fn free(&mut self, held: &mut Held, buf: Buf) {
        self.budget.give(held, footprint(buf.len as usize));
        self.freed = true;
        self.core.arena_mut().free(buf);
    }

    /// Gives back a buffer that was taken in vain a moment ago: nobody who waits for memory has
    /// more of it than before.
    pub(super) fn put_back(&mut self, held: &mut Held, buf: Buf) {
        self.budget.give(held, footprint(buf.len as usize));
        self.core.arena_mut().free(buf);
    }

    /// Hands a request to the core.
    pub(super) fn submit(&mut self, request: Request) {
        self.core.handle(self.now, Event::Request(request));
    }
}
