//! Blocking access to the cache device, for format, recovery and inspection: the work that is done
//! before (or without) the reactor. The running core uses effects instead.

use crate::api::IoError;

pub use crate::api::DeviceRead;

/// A cache device that one caller uses at a time.
pub trait Device {
    /// Bytes.
    fn size_bytes(&self) -> u64;
    /// Executes all reads, in any order or at once; the outcome of each is in its `result`.
    fn read(&mut self, batch: &mut [DeviceRead<'_>]);
    /// Writes `data` (block-aligned in memory, offset and length).
    ///
    /// # Errors
    /// What the device reported. The content of the range is then unknown.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError>;
    /// Makes all earlier writes stable.
    ///
    /// # Errors
    /// What the device reported. Which writes are stable is then unknown.
    fn sync(&mut self) -> Result<(), IoError>;
}
