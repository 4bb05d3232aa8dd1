//! What the image of a volume has of its own, and what is read through its parent.

use crate::api::{BLOCK_BYTES, BackendOp, VolumeId};
use crate::blocks::own::{OwnObjects, Source};

/// What the image of a volume has.
pub(super) struct Image {
    /// The volume of its parent, if it is read through that.
    parent: Option<VolumeId>,
    /// Objects that have been written to, or are known to be there.
    own: OwnObjects,
    /// It was looked at what the image had when it was opened.
    own_is_known: bool,
}

impl Image {
    /// Of an image of so many bytes nothing is known: all of it counts as own.
    pub(super) fn unknown(size_bytes: u64) -> Image {
        Image { parent: None, own: OwnObjects::none(size_bytes), own_is_known: false }
    }

    /// It is opened anew, with so many bytes: what it has of its own is to be found out again.
    pub(super) fn open_again(&mut self, size_bytes: u64) {
        (self.own, self.own_is_known) = (OwnObjects::none(size_bytes), false);
    }

    /// The volume of its parent, if it is read through that.
    pub(super) fn parent(&self) -> Option<VolumeId> {
        self.parent
    }

    /// It is known what it had of its own when it was opened.
    pub(super) fn find(&mut self, found: &OwnObjects) {
        self.own.find(found);
        self.own_is_known = true;
    }

    /// What it has from a parent of so many bytes is read through the volume `parent`.
    pub(super) fn read_through(&mut self, parent: VolumeId, parent_bytes: u64) {
        self.own.inherit_within(parent_bytes);
        self.parent = Some(parent);
    }

    /// Something is sent to the backend, after which the image may have more of its own.
    pub(super) fn note_op(&mut self, op: &BackendOp) {
        match *op {
            BackendOp::Write { offset, buf } => self.own.insert(offset, buf.len.into()),
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                self.own.insert(offset, len);
            }
            // What is cut off does not come back from the parent when the image grows again.
            BackendOp::Resize { size_bytes } => self.own.insert(size_bytes, u64::MAX),
            _ => {}
        }
    }

    /// Where it has a block from, and how many of the next `n` are like it.
    pub(super) fn source(&self, block: u64, n: u32) -> (Source, u32) {
        if !self.own_is_known {
            return (Source::Own, n);
        }
        let (source, bytes) =
            self.own.source(block * BLOCK_BYTES as u64, u64::from(n) * BLOCK_BYTES as u64);
        (source, bytes.div_ceil(BLOCK_BYTES as u64) as u32)
    }
}
