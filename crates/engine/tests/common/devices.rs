//! Cache devices in memory.

use std::collections::HashMap;
use tidepool_engine::api::*;
use tidepool_engine::device::{Device, DeviceRead};

/// A device in memory.
pub struct MemoryDevice(pub Vec<u8>);

impl Device for MemoryDevice {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }
    fn read(&mut self, batch: &mut [DeviceRead<'_>]) {
        for r in batch {
            let at = r.offset as usize;
            r.buf.copy_from_slice(&self.0[at..at + r.buf.len()]);
        }
    }
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        self.0[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn sync(&mut self) -> Result<(), IoError> {
        Ok(())
    }
}

/// A device that keeps for itself what is written to it, and whose reads fail: from one of them on,
/// or in some blocks.
pub struct Overlay<'a> {
    pub content: &'a [u8],
    pub written: HashMap<u64, Vec<u8>>,
    pub reads_left: u64,
    pub unreadable: Vec<u64>,
}

impl Overlay<'_> {
    /// One on which nothing fails.
    pub fn on(content: &[u8]) -> Overlay<'_> {
        Overlay { content, written: HashMap::new(), reads_left: u64::MAX, unreadable: Vec::new() }
    }

    /// All is well again.
    pub fn heal(&mut self) {
        (self.reads_left, self.unreadable) = (u64::MAX, Vec::new());
    }
}

impl Device for Overlay<'_> {
    fn size_bytes(&self) -> u64 {
        self.content.len() as u64
    }
    fn read(&mut self, batch: &mut [DeviceRead<'_>]) {
        for read in batch {
            let blocks = read.offset..read.offset + read.buf.len() as u64;
            let bad =
                self.unreadable.iter().any(|block| blocks.contains(&(block * BLOCK_BYTES as u64)));
            if bad || self.reads_left == 0 {
                read.buf.fill(0xbd);
                read.result = Err(IoError::Errno(5));
                continue;
            }
            self.reads_left -= 1;
            for (offset, buf) in blocks.step_by(BLOCK_BYTES).zip(read.buf.chunks_mut(BLOCK_BYTES)) {
                let as_it_was = || &self.content[offset as usize..][..BLOCK_BYTES];
                buf.copy_from_slice(
                    self.written.get(&offset).map_or_else(as_it_was, Vec::as_slice),
                );
            }
        }
    }
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        for (offset, block) in (offset..).step_by(BLOCK_BYTES).zip(data.chunks(BLOCK_BYTES)) {
            self.written.insert(offset, block.to_vec());
        }
        Ok(())
    }
    fn sync(&mut self) -> Result<(), IoError> {
        Ok(())
    }
}
