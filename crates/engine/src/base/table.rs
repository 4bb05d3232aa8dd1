//! What a room keeps about each volume, by the volume's number.

use crate::api::VolumeId;

/// One `T` for each volume that there is.
pub(crate) struct Table<T> {
    parts: Vec<Option<Box<T>>>,
}

impl<T: Default> Table<T> {
    pub(crate) fn new() -> Table<T> {
        Table { parts: Vec::new() }
    }

    /// A volume has come, or begins anew.
    pub(crate) fn add(&mut self, id: VolumeId) {
        let at = usize::from(id.0);
        if self.parts.len() <= at {
            self.parts.resize_with(at + 1, || None);
        }
        self.parts[at] = Some(Box::default());
    }

    /// A volume is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) {
        if let Some(part) = self.parts.get_mut(usize::from(id.0)) {
            *part = None;
        }
    }

    /// # Panics
    /// If there is no such volume.
    pub(crate) fn of(&self, id: VolumeId) -> &T {
        self.parts[usize::from(id.0)].as_ref().expect("a room knows every volume")
    }

    /// # Panics
    /// If there is no such volume.
    pub(crate) fn of_mut(&mut self, id: VolumeId) -> &mut T {
        self.parts[usize::from(id.0)].as_mut().expect("a room knows every volume")
    }
}
