//! How much of the cache device may hold what is not in an image, and how much of that each volume
//! may have.

use crate::api::{BLOCK_BYTES, Room};
use crate::blocks::space::Space;

/// Blocks and ranges that are promised or taken, and what volumes ask for.
#[derive(Default)]
pub(crate) struct Budget {
    /// Data blocks in records that have not taken effect.
    unpublished: u64,
    /// What owners of replicas were told and have not used, of all replicas.
    reserved: Room,
    /// Volumes that can have something dirty.
    volumes: u64,
    /// Sum of the quotas that these ask for, in bytes.
    asked: u64,
    /// Upper bound of the extents that the next checkpoint must hold.
    extents: usize,
    /// The number of extents may have become smaller than that since it was counted.
    extents_changed: bool,
}

/// What the owner of a copy was told that it may send, and what of that is on its way into the log.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reserve {
    /// What the owner was told and has not used yet.
    granted: Room,
    /// What records take that wait for the log, and what those take that the cache device does not
    /// have yet.
    pending: Room,
    unpublished: Room,
}

impl Reserve {
    /// What the owner was told and has not used yet.
    pub(crate) fn granted(&self) -> Room {
        self.granted
    }

    /// What the owner may send behind what the cache device has.
    pub(crate) fn told(&self) -> Room {
        let mut told = self.granted;
        told += self.unpublished;
        told
    }

    /// Ranges of zeroes that are kept free.
    pub(crate) fn ranges(&self) -> u64 {
        self.granted.ranges + self.pending.ranges
    }

    /// Blocks that are kept free.
    pub(crate) fn blocks(&self) -> u64 {
        (self.granted.bytes + self.pending.bytes) / BLOCK_BYTES as u64
    }

    /// The owner is told of more.
    pub(crate) fn grant(&mut self, room: Room) {
        self.granted += room;
    }

    /// The owner is not heard any more. Returns what it has not used.
    pub(crate) fn withdraw(&mut self) -> Room {
        std::mem::take(&mut self.granted)
    }

    /// A record has come that takes so much.
    pub(crate) fn begin(&mut self, room: Room) {
        self.granted -= room;
        self.pending += room;
        self.unpublished += room;
    }

    /// A record is built that takes so much.
    pub(crate) fn note_built(&mut self, room: Room) {
        self.pending -= room;
    }

    /// The cache device has a record that takes so much.
    pub(crate) fn note_published(&mut self, room: Room) {
        self.unpublished -= room;
    }

    /// What waited for the log does not wait any more. Returns what that took.
    pub(crate) fn forget_pending(&mut self) -> Room {
        let pending = std::mem::take(&mut self.pending);
        self.unpublished -= pending;
        pending
    }
}

impl Budget {
    /// Data blocks are in a record that is built.
    pub(crate) fn note_built(&mut self, blocks: u64) {
        self.unpublished += blocks;
    }

    /// They have taken effect.
    pub(crate) fn note_published(&mut self, blocks: u64) {
        self.unpublished -= blocks;
    }

    /// What has not taken effect never will.
    pub(crate) fn abandon(&mut self) {
        self.unpublished = 0;
    }

    /// The owner of a replica is told of room.
    pub(crate) fn reserve(&mut self, room: Room) {
        self.reserved += room;
    }

    /// It has used that, or is not heard any more.
    pub(crate) fn release(&mut self, room: Room) {
        self.reserved -= room;
    }

    /// Ranges of zeroes that owners of replicas were told of.
    pub(crate) fn ranges_reserved(&self) -> u64 {
        self.reserved.ranges
    }

    /// Blocks that all volumes together may still dirty, beside what owners of replicas were told.
    pub(crate) fn blocks_left(&self, space: &Space) -> u64 {
        let used =
            space.dirty_blocks() + self.unpublished + self.reserved.bytes / BLOCK_BYTES as u64;
        space.dirty_blocks_max().saturating_sub(used)
    }

    /// Volumes that can have something dirty ask for these quotas, in bytes, 0 for the default
    /// share.
    pub(crate) fn set_quotas(&mut self, space: &Space, quotas: impl Iterator<Item = u64> + Clone) {
        self.volumes = quotas.clone().count() as u64;
        self.asked = quotas.map(|quota| self.clamped(all_bytes(space), quota)).sum();
    }

    /// The quota in force of a volume that asks for `quota`, in bytes: that, or less in proportion
    /// where all volumes together were given more than the cache holds. So a volume whose backend
    /// is stopped never takes the room of another one.
    pub(crate) fn quota(&self, space: &Space, quota: u64) -> u64 {
        let all = all_bytes(space);
        let own = self.clamped(all, quota);
        if self.asked <= all {
            return own;
        }
        let share = u128::from(own) * u128::from(all) / u128::from(self.asked);
        // Less than a block would never let a write through.
        (share as u64).max(BLOCK_BYTES as u64)
    }

    /// The default share of a volume that is still to come, in bytes.
    pub(crate) fn quota_of_another(&self, space: &Space) -> u64 {
        all_bytes(space) / (self.volumes + 1).max(2)
    }

    fn clamped(&self, all: u64, quota: u64) -> u64 {
        match quota {
            0 => all / (self.volumes.max(2)),
            own => own.clamp(BLOCK_BYTES as u64, all),
        }
    }

    /// Upper bound of the extents that the next checkpoint must hold.
    pub(crate) fn extents(&self) -> usize {
        self.extents
    }

    /// There may be so many extents more.
    pub(crate) fn add_extents(&mut self, extents: usize) {
        self.extents += extents;
    }

    /// The extents have been counted.
    pub(crate) fn set_extents(&mut self, extents: usize) {
        self.extents = extents;
    }

    /// There may be fewer extents than the bound says.
    pub(crate) fn note_extents_changed(&mut self) {
        self.extents_changed = true;
    }

    /// Whether it is of use to count the extents anew; it is not, after that.
    pub(crate) fn take_extents_changed(&mut self) -> bool {
        std::mem::take(&mut self.extents_changed)
    }

    /// Ranges of zeroes that may still be logged, beside what owners of replicas were told.
    pub(crate) fn ranges_left(&self, space: &Space) -> u64 {
        let max = space.geo().extents_max() / 2;
        (max.saturating_sub(self.extents) as u64).saturating_sub(self.reserved.ranges)
    }
}

/// Bytes that may be dirty, of all volumes together.
fn all_bytes(space: &Space) -> u64 {
    space.dirty_blocks_max() * BLOCK_BYTES as u64
}
