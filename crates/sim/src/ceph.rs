//! What two hosts share: an image, and the ownership record beside it, as a Ceph cluster keeps
//! them. The record changes by compare-and-set, and a host of an earlier generation than the fence
//! reaches the image no more. `crates/backend/tests/conformance.rs` tries whether a real cluster
//! does the same.

use crate::store::{Content, Store};
use tidepool_engine::api::IoError;
use tidepool_replica::Record;

/// An image and its ownership record.
pub struct Ceph {
    record: Record,
    image: Store,
    /// Nobody of an earlier generation reaches the image.
    fence: u64,
}

impl Ceph {
    /// An image with a record.
    pub fn new(record: Record, image: Store) -> Ceph {
        Ceph { record, image, fence: 0 }
    }

    /// What stands in the record.
    pub fn record(&self) -> Record {
        self.record
    }

    /// Whether the record was as expected; then it is changed.
    pub fn change(&mut self, before: Record, after: Record) -> bool {
        let as_expected = self.record == before;
        if as_expected {
            self.record = after;
        }
        as_expected
    }

    /// From now on nobody of an earlier generation reaches the image.
    pub fn fence(&mut self, generation: u64) {
        self.fence = self.fence.max(generation);
    }

    /// Looks whether an owner of this generation still reaches the image.
    ///
    /// # Errors
    /// It is fenced.
    pub fn reach(&self, generation: u64) -> Result<(), IoError> {
        if generation < self.fence { Err(IoError::Fenced) } else { Ok(()) }
    }

    /// Reads a block of the image.
    pub fn read(&self, block: u64, out: &mut [u8]) {
        self.image.read(block, out);
    }

    /// Writes a block of the image.
    pub fn write(&mut self, block: u64, content: Content) {
        self.image.write(block, content, true);
    }
}
