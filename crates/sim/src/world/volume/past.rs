//! What a restart may find of a volume, and what the core was told of its image.

use tidepool_engine::OwnObjects;
use tidepool_engine::api::VolumeSpec;

/// What a restart may find in the cache.
#[derive(Default)]
pub(in crate::world) struct Past {
    /// Attachments: the newest one that was confirmed, and those asked for since.
    attachments: Vec<Vec<u8>>,
    /// Generation that the cache knew when it was opened.
    generation: u64,
    /// The volume's size is being changed: a restart may find the old one.
    resizing: bool,
}

impl Past {
    /// The volume is in the cache as it stands there.
    pub(in crate::world) fn find(&mut self, spec: &VolumeSpec) {
        self.begin(spec.attachment.clone());
        self.generation = spec.generation;
    }

    /// The volume is in the cache with this attachment.
    pub(in crate::world) fn begin(&mut self, attachment: Vec<u8>) {
        self.attachments = vec![attachment];
    }

    /// Another attachment is asked for.
    pub(in crate::world) fn ask_for(&mut self, attachment: Vec<u8>) {
        self.attachments.push(attachment);
    }

    /// An attachment is confirmed: older ones must not come back.
    pub(in crate::world) fn confirm(&mut self, attachment: &[u8]) {
        let at = self.attachments.iter().position(|a| a == attachment).unwrap_or(0);
        self.attachments.drain(..at);
    }

    /// A restart may find this attachment.
    pub(in crate::world) fn may_be(&self, attachment: &Vec<u8>) -> bool {
        self.attachments.contains(attachment)
    }

    /// Generation that the cache knew when it was opened.
    pub(in crate::world) fn generation(&self) -> u64 {
        self.generation
    }

    pub(in crate::world) fn is_resizing(&self) -> bool {
        self.resizing
    }

    pub(in crate::world) fn set_resizing(&mut self, resizing: bool) {
        self.resizing = resizing;
    }
}

/// What the core was told of an image.
#[derive(Default)]
pub(in crate::world) struct Told {
    /// What the image had of its own when it was last opened.
    own_at_open: OwnObjects,
    own_told: bool,
    /// The volume reads through its parent.
    linked: bool,
}

impl Told {
    /// The image is opened.
    pub(in crate::world) fn open(&mut self, own: &OwnObjects) {
        self.own_at_open = own.clone();
    }

    /// What the image had of its own when it was last opened.
    pub(in crate::world) fn own(&self) -> &OwnObjects {
        &self.own_at_open
    }

    /// The core was told what the image has of its own.
    pub(in crate::world) fn knows_own(&self) -> bool {
        self.own_told
    }

    pub(in crate::world) fn set_knows_own(&mut self) {
        self.own_told = true;
    }

    /// The volume reads through its parent.
    pub(in crate::world) fn is_linked(&self) -> bool {
        self.linked
    }

    pub(in crate::world) fn set_linked(&mut self) {
        self.linked = true;
    }

    /// The core knows nothing any more.
    pub(in crate::world) fn forget(&mut self) {
        (self.own_told, self.linked) = (false, false);
    }
}
