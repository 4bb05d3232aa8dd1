//! Clones: what an image has from its parent is read through the parent's volume, so that all clones of one parent share
//! what is cached of it.
//!
//! The parent is a snapshot, which never changes. A clone's image has an object of its own as soon as anything has been
//! written there, and then no block of that object comes from the parent any more. Who opens the image finds out which
//! objects there are; from then on nobody else writes the image, and what this core sends there it knows.

use crate::api::{BLOCK_BYTES, ControlError, Mode, VolumeId};
use crate::blocks::index::Lookup;
use crate::blocks::own::Source;
use crate::control::volume::Volume;
use crate::engine::Engine;

/// Where a stretch of blocks is found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// The volume whose index has it, or whose image.
    pub(crate) volume: VolumeId,
    /// What the index of that volume says.
    pub(crate) lookup: Lookup,
    /// No index has it, and no image: it reads as zero.
    pub(crate) hole: bool,
    /// How many blocks are like the first one.
    pub(crate) blocks: u32,
}

impl Volume {
    /// Where the image has a block from, and how many of the next `n` are like it.
    fn source(&self, block: u64, n: u32) -> (Source, u32) {
        if !self.own_known {
            return (Source::Own, n);
        }
        let (source, bytes) = self.own.source(block * BLOCK_BYTES as u64, u64::from(n) * BLOCK_BYTES as u64);
        (source, bytes.div_ceil(BLOCK_BYTES as u64) as u32)
    }
}

impl Engine {
    /// From now on, what the image of volume `id` has from its parent (see [`Engine::set_own`]) is read through the volume `parent`,
    /// which is attached and read-only and has the same content there. The parent cannot be removed while it has clones.
    ///
    /// # Errors
    /// One of them is not there or not attached; [`ControlError::NotParent`] if the one cannot be a parent of the other.
    pub fn set_parent(&mut self, id: VolumeId, parent: VolumeId) -> Result<(), ControlError> {
        self.check_attached(id)?;
        self.check_attached(parent)?;
        if !self.ground.volume(parent).spec.read_only {
            return Err(ControlError::NotParent);
        }
        let mut ancestor = Some(parent);
        while let Some(of) = ancestor {
            if of == id {
                return Err(ControlError::NotParent);
            }
            ancestor = self.ground.volume(of).parent;
        }
        let parent_bytes = self.ground.volume(parent).spec.size_bytes;
        let volume = self.ground.volume_mut(id);
        volume.own.inherit_within(parent_bytes);
        volume.parent = Some(parent);
        Ok(())
    }

    /// Whether a volume is the parent of another one.
    pub(crate) fn is_parent(&self, id: VolumeId) -> bool {
        self.ground.volumes.iter().flatten().any(|volume| volume.parent == Some(id))
    }

    /// Where a block of a volume is found, and how many of the next `n` are like it.
    pub(crate) fn find(&self, id: VolumeId, block: u64, n: u32) -> Found {
        let (mut id, mut n) = (id, n);
        loop {
            let volume = self.ground.volume(id);
            let (lookup, blocks) = volume.ledger.index().lookup_run(block, n);
            let found = Found { volume: id, lookup, hole: false, blocks };
            if lookup != Lookup::Absent {
                return found;
            }
            let (source, blocks) = volume.source(block, blocks);
            let parent = volume.parent.filter(|_| volume.mode != Mode::Off);
            match (source, parent) {
                (Source::Parent, Some(parent)) => (id, n) = (parent, blocks),
                _ => return Found { hole: source == Source::Hole, blocks, ..found },
            }
        }
    }
}
