//! An image in memory of which a few blocks differ from what it is based on.

use super::bases::Base;
use std::collections::HashMap;
use tidepool_engine::api::{BLOCK_BYTES, IoError};
use tidepool_engine::device::{Device, DeviceRead};
use tidepool_engine::format::Geometry;

pub(super) type Block = [u8; BLOCK_BYTES];

/// A device of which only what differs is kept.
pub(super) struct Patched<'a> {
    pub(super) base: &'a Base,
    pub(super) geo: Geometry,
    changed: HashMap<u32, Box<Block>>,
    /// Blocks that were written through [`Device`].
    pub(super) writes: u64,
}

impl<'a> Patched<'a> {
    pub(super) fn new(base: &'a Base) -> Patched<'a> {
        Patched { base, geo: base.geo, changed: HashMap::new(), writes: 0 }
    }

    /// A copy of a block as it is now.
    pub(super) fn block(&self, number: u32) -> Box<Block> {
        match self.changed.get(&number) {
            Some(block) => block.clone(),
            None => {
                self.base.blocks.get(&number).cloned().unwrap_or_else(|| Box::new([0; BLOCK_BYTES]))
            }
        }
    }

    /// Changes a block behind the core's back.
    pub(super) fn put(&mut self, number: u32, block: Box<Block>) {
        self.changed.insert(number, block);
    }

    /// The blocks that differ.
    pub(super) fn changed(&self) -> impl Iterator<Item = u32> {
        self.changed.keys().copied()
    }

    fn first(&self, offset: u64, len: usize) -> u32 {
        let block = BLOCK_BYTES as u64;
        assert!(
            offset.is_multiple_of(block) && len.is_multiple_of(BLOCK_BYTES),
            "{len} bytes at {offset}"
        );
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= self.size_bytes()),
            "{len} bytes at {offset} of the device"
        );
        (offset / block) as u32
    }
}

impl Device for Patched<'_> {
    fn size_bytes(&self) -> u64 {
        self.geo.device_blocks * BLOCK_BYTES as u64
    }

    fn read(&mut self, batch: &mut [DeviceRead<'_>]) {
        for read in batch {
            let first = self.first(read.offset, read.buf.len());
            for (number, out) in (first..).zip(read.buf.chunks_exact_mut(BLOCK_BYTES)) {
                match self.changed.get(&number).or_else(|| self.base.blocks.get(&number)) {
                    Some(block) => out.copy_from_slice(&block[..]),
                    None => out.fill(0),
                }
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let first = self.first(offset, data.len());
        for (number, block) in (first..).zip(data.chunks_exact(BLOCK_BYTES)) {
            self.writes += 1;
            self.changed.insert(number, Box::new(block.try_into().expect("a whole block")));
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), IoError> {
        Ok(())
    }
}
