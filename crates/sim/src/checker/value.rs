//! The content of a sector: the value of the change that has left it, and its place.

use tidepool_engine::api::{BLOCK_BYTES, SECTOR_BYTES};

/// Sectors of a block.
pub const SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
/// The value of what was in the image before the run.
pub const BASE_VALUE: u64 = 1;

/// Fills a sector with its value.
pub fn fill(out: &mut [u8], salt: u64, sector: u64, value: u64) {
    if value == 0 {
        return out.fill(0);
    }
    let step = (value ^ salt << 32 ^ sector << 13).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = value;
    for chunk in out.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(step);
    }
}

/// The value of a sector, `None` when it is no sector of ours, not for this place, or torn.
pub fn value_of(bytes: &[u8], salt: u64, sector: u64) -> Option<u64> {
    let value = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let mut expected = [0; SECTOR_BYTES];
    fill(&mut expected, salt, sector, value);
    (expected == bytes).then_some(value)
}
