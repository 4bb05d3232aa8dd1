//! How a cache is laid out on its device.

use crate::disk::Disk;
use tidepool_engine::format::Geometry;
use tidepool_engine::{FormatError, FormatOptions, format_device};

/// How a cache is laid out, and how often it was.
pub struct Layout {
    size_bytes: u64,
    segment_bytes: Option<u32>,
    geometry: Geometry,
    formats: u64,
    /// The cache's name.
    uuid: [u8; 16],
}

impl Layout {
    /// Of a device of this size. It has to be a possible one.
    pub fn new(size_bytes: u64, segment_bytes: Option<u32>) -> Layout {
        let geometry = Geometry::new([0; 16], size_bytes, segment_bytes).expect("a possible size");
        Layout { size_bytes, segment_bytes, geometry, formats: 0, uuid: [0; 16] }
    }

    /// Bytes of the device.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Where things are.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The cache's name.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Lays a device out; each time the cache has another name.
    pub(super) fn format(&mut self, disk: &mut Disk) -> Result<(), FormatError> {
        self.formats += 1;
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.formats.to_le_bytes());
        self.uuid = uuid;
        let options =
            FormatOptions { uuid, size_bytes: self.size_bytes, segment_bytes: self.segment_bytes };
        format_device(disk, &options, &mut |_, _| ()).map(drop)
    }
}
