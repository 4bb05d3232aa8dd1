//! Clones: what an image has from its parent is read through the parent's volume, so that all
//! clones of one parent share what is cached of it.
//!
//! The parent is a snapshot, which never changes. A clone's image has an object of its own as soon
//! as anything has been written there, and then no block of that object comes from the parent any
//! more. Who opens the image finds out which objects there are; from then on nobody else writes the
//! image, and what this core sends there it knows.

use crate::api::{ControlError, VolumeId};
use crate::blocks::own::OwnObjects;
use crate::engine::Engine;

impl Engine {
    /// From now on it is known what the image of volume `id` has of its own: `found` is what it had
    /// when it was opened. Before that, everything counts as own.
    ///
    /// # Errors
    /// The volume is not there or not attached.
    pub fn set_own(&mut self, id: VolumeId, found: &OwnObjects) -> Result<(), ControlError> {
        self.check_attached(id)?;
        self.ground.volume_mut(id).find_own(found);
        Ok(())
    }

    /// The volume is there and has its backend.
    pub(crate) fn check_attached(&self, id: VolumeId) -> Result<(), ControlError> {
        match self.ground.get(id) {
            None => Err(ControlError::Gone),
            Some(volume) if !volume.is_attached() || volume.is_closing() => {
                Err(ControlError::Detached)
            }
            Some(_) => Ok(()),
        }
    }

    /// From now on, what the image of volume `id` has from its parent (see [`Engine::set_own`]) is
    /// read through the volume `parent`, which is attached and read-only and has the same content
    /// there. The parent cannot be removed while it has clones.
    ///
    /// # Errors
    /// One of them is not there or not attached; [`ControlError::NotParent`] if the one cannot be a
    /// parent of the other.
    pub fn set_parent(&mut self, id: VolumeId, parent: VolumeId) -> Result<(), ControlError> {
        self.check_attached(id)?;
        self.check_attached(parent)?;
        if !self.ground.volume(parent).spec().read_only {
            return Err(ControlError::NotParent);
        }
        let mut ancestor = Some(parent);
        while let Some(of) = ancestor {
            if of == id {
                return Err(ControlError::NotParent);
            }
            ancestor = self.ground.volume(of).parent();
        }
        let parent_bytes = self.ground.volume(parent).spec().size_bytes;
        self.ground.volume_mut(id).read_through(parent, parent_bytes);
        Ok(())
    }

    /// Whether a volume is the parent of another one.
    pub(crate) fn is_parent(&self, id: VolumeId) -> bool {
        self.ground.volumes().any(|volume| volume.parent() == Some(id))
    }
}
