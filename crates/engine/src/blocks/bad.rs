//! Blocks of the cache device that do not verify any more: found, or being repaired.
//! `Engine::repair_or_lose` decides about those that were found.

use crate::api::VolumeId;
use crate::blocks::index::Position;
use std::collections::VecDeque;
use std::ops::Range;

/// A dirty copy that does not verify, also when it was read again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BadCopy {
    volume: VolumeId,
    block: u64,
    position: Position,
    current_only: bool,
}

impl BadCopy {
    /// It matters while it is the block's current copy.
    pub(crate) fn current(volume: VolumeId, block: u64, position: Position) -> BadCopy {
        BadCopy { volume, block, position, current_only: true }
    }

    /// It matters while it is the block's current copy, or a group needs it.
    pub(crate) fn of_anybody(volume: VolumeId, block: u64, position: Position) -> BadCopy {
        BadCopy { volume, block, position, current_only: false }
    }

    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// It does not matter to a group.
    pub(crate) fn is_current_only(&self) -> bool {
        self.current_only
    }
}

/// Places of bad blocks, with the volumes that they are of.
#[derive(Default)]
pub(crate) struct Bad {
    blocks: Vec<(VolumeId, Position)>,
    found: VecDeque<BadCopy>,
}

impl Bad {
    /// A bad copy has been found: it is to be repaired, or the block is lost.
    pub(crate) fn report(&mut self, copy: BadCopy) {
        self.found.push_back(copy);
    }

    /// Takes out the next bad copy that was reported.
    pub(crate) fn next_found(&mut self) -> Option<BadCopy> {
        self.found.pop_front()
    }

    /// A bad block is going to be repaired.
    pub(crate) fn insert(&mut self, volume: VolumeId, position: Position) {
        self.blocks.push((volume, position));
    }

    /// Its repair is over.
    pub(crate) fn remove(&mut self, position: Position) {
        self.blocks.retain(|&(_, at)| at != position);
    }

    /// The block at this place is being repaired.
    pub(crate) fn has(&self, position: Position) -> bool {
        self.blocks.iter().any(|&(_, at)| at == position)
    }

    /// Something in these blocks of the device is being repaired.
    pub(crate) fn are_in(&self, positions: Range<Position>) -> bool {
        self.blocks.iter().any(|(_, at)| positions.contains(at))
    }

    /// Something of the volume is being repaired.
    pub(crate) fn are_of(&self, volume: VolumeId) -> bool {
        self.blocks.iter().any(|&(of, _)| of == volume)
    }
}
