//! Clones: what an image has from its parent is read through the parent's volume, so that all clones of one parent share
//! what is cached of it.
//!
//! The parent is a snapshot, which never changes. A clone's image has an object of its own as soon as anything has been
//! written there, and then no block of that object comes from the parent any more. Who opens the image finds out which
//! objects there are; from then on nobody else writes the image, and what this core sends there it knows.

use crate::api::{BLOCK_BYTES, ControlError, Mode, VolumeId};
use crate::engine::Engine;
use crate::index::{Lookup, OBJECT_BLOCKS};
use crate::mutation::mutated;
use crate::volume::{Volume, object_of};

/// Bytes of the image for which one bit of an [`OwnObjects`] stands.
pub const OBJECT_BYTES: u64 = (OBJECT_BLOCKS * BLOCK_BYTES) as u64;

/// The objects of an image that are its own, one bit for every [`OBJECT_BYTES`]: nothing of them comes from a parent. Objects that
/// are not in it count as own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnObjects {
    words: Vec<u64>,
}

impl OwnObjects {
    /// The first `bytes` of an image have no object of its own.
    pub fn none(bytes: u64) -> OwnObjects {
        let objects = bytes / OBJECT_BYTES;
        let mut words = vec![0; objects.div_ceil(64) as usize];
        if let (Some(last), used @ 1..) = (words.last_mut(), objects % 64) {
            *last = u64::MAX << used;
        }
        OwnObjects { words }
    }

    /// Every object that has something in common with the `len` bytes at `offset` is the image's own.
    pub fn insert(&mut self, offset: u64, len: u64) {
        let end = (offset.saturating_add(len).div_ceil(OBJECT_BYTES)).min(self.words.len() as u64 * 64);
        for object in offset / OBJECT_BYTES..end {
            self.words[object as usize / 64] |= 1 << (object % 64);
        }
    }

    /// Whether the object at an offset is the image's own.
    pub fn contains(&self, offset: u64) -> bool {
        let object = offset / OBJECT_BYTES;
        self.words.get(object as usize / 64).is_none_or(|word| word >> (object % 64) & 1 == 1)
    }

    fn union(&mut self, other: &OwnObjects) {
        for (i, word) in self.words.iter_mut().enumerate() {
            let theirs = other.words.get(i).copied().unwrap_or(u64::MAX);
            *word = if mutated!(LinkForgetsWritten) { theirs } else { *word | theirs };
        }
    }
}

impl Volume {
    /// The parent from which the image has a block, and how many of the next `n` are like it.
    fn inherits(&self, block: u64, n: u32) -> (Option<VolumeId>, u32) {
        let Some(parent) = self.parent.filter(|_| self.mode != Mode::Off) else { return (None, n) };
        let left = (u64::from(object_of(block)) + 1) * OBJECT_BLOCKS as u64 - block;
        let own = self.own.contains(block * BLOCK_BYTES as u64);
        ((!own).then_some(parent), left.min(n.into()) as u32)
    }
}

impl Engine {
    /// From now on, what the image of volume `id` has from its parent is read through the volume `parent`, which is attached and
    /// read-only and has the same content there. `own` is what the image was found to have when it was opened. The parent cannot be
    /// removed while it has clones.
    ///
    /// # Errors
    /// One of them is not there or not attached; [`ControlError::NotParent`] if the one cannot be a parent of the other.
    pub fn set_parent(
        &mut self,
        id: VolumeId,
        parent: VolumeId,
        own: &OwnObjects,
    ) -> Result<(), ControlError> {
        let volume = |id: VolumeId| self.volumes.get(id.0 as usize).and_then(Option::as_ref);
        let attached = |id| match volume(id) {
            None => Err(ControlError::Gone),
            Some(volume) if !volume.attached || volume.closing => Err(ControlError::Detached),
            Some(volume) => Ok(volume),
        };
        attached(id)?;
        if !attached(parent)?.spec.read_only {
            return Err(ControlError::NotParent);
        }
        let mut ancestor = Some(parent);
        while let Some(of) = ancestor {
            if of == id {
                return Err(ControlError::NotParent);
            }
            ancestor = self.volume(of).parent;
        }
        let parent_bytes = self.volume(parent).spec.size_bytes;
        let volume = self.volume_mut(id);
        volume.own.union(own);
        volume.own.insert(parent_bytes, u64::MAX);
        volume.parent = Some(parent);
        Ok(())
    }

    /// Whether a volume is the parent of another one.
    pub(crate) fn is_parent(&self, id: VolumeId) -> bool {
        self.volumes.iter().flatten().any(|volume| volume.parent == Some(id))
    }

    /// Where a block of a volume is found, and how many of the next `n` are like it: in which volume's index, or which
    /// volume's image.
    pub(crate) fn find(&self, id: VolumeId, block: u64, n: u32) -> (VolumeId, Lookup, u32) {
        let (mut id, mut n) = (id, n);
        loop {
            let volume = self.volume(id);
            let (found, len) = volume.index.lookup_run(block, n);
            if found != Lookup::Absent {
                return (id, found, len);
            }
            let (parent, len) = volume.inherits(block, len);
            let Some(parent) = parent else { return (id, found, len) };
            (id, n) = (parent, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_to_be_inherited_is_own() {
        let mut own = OwnObjects::none(70 * OBJECT_BYTES + 1);
        assert!(!own.contains(0) && !own.contains(70 * OBJECT_BYTES - 1));
        assert!(own.contains(70 * OBJECT_BYTES) && own.contains(u64::MAX));
        own.insert(OBJECT_BYTES - 1, 2);
        assert!(own.contains(0) && own.contains(OBJECT_BYTES) && !own.contains(2 * OBJECT_BYTES));
        own.union(&OwnObjects::none(65 * OBJECT_BYTES));
        assert!(!own.contains(64 * OBJECT_BYTES) && own.contains(65 * OBJECT_BYTES));
        assert!(own.contains(70 * OBJECT_BYTES) && own.contains(0), "what both have is own as well");
        own.insert(60 * OBJECT_BYTES, u64::MAX);
        assert!(!own.contains(59 * OBJECT_BYTES) && own.contains(61 * OBJECT_BYTES));
        let even = OwnObjects::none(64 * OBJECT_BYTES);
        assert!(!even.contains(0) && !even.contains(63 * OBJECT_BYTES) && even.contains(64 * OBJECT_BYTES));
    }
}
