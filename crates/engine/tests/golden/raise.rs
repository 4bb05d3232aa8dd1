//! Raises the version of what stands in golden files, as if a newer version had written it.
//!
//! The offsets here are those that no version ever moves (docs/format.md, Versions): a newer
//! version is told by them.

#![allow(dead_code, reason = "each test uses a part of it")]

use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::{FORMAT_VERSION, crc32c};

/// A kind of block that carries a version: how it begins, and where its checksum and its version
/// stand.
#[derive(Clone, Copy)]
pub struct Kind {
    magic: &'static [u8],
    crc: usize,
    version: usize,
}

pub const SUPERBLOCK: Kind = Kind { magic: b"TIDEPOOL", crc: 8, version: 12 };
pub const SEGMENT: Kind = Kind { magic: b"TPSG", crc: 4, version: 8 };
pub const RECORD: Kind = Kind { magic: b"TPRC", crc: 4, version: 8 };
pub const CHECKPOINT: Kind = Kind { magic: b"TPCK", crc: 4, version: 76 };
pub const FRAME: Kind = Kind { magic: b"TPRF", crc: 4, version: 8 };

fn crc(kind: Kind, block: &[u8]) -> [u8; 4] {
    let mut block = block.to_vec();
    block[kind.crc..kind.crc + 4].fill(0);
    crc32c(&block).to_le_bytes()
}

/// The numbers of all blocks of a kind that verify.
pub fn blocks(bytes: &[u8], kind: Kind) -> Vec<usize> {
    let blocks = bytes.chunks_exact(BLOCK_BYTES).enumerate();
    let verifies = |block: &[u8]| {
        block.starts_with(kind.magic) && block[kind.crc..kind.crc + 4] == crc(kind, block)
    };
    blocks.filter(|(_, block)| verifies(block)).map(|(number, _)| number).collect()
}

/// Raises the version of one block by one above what is known; its checksum is right only if it is
/// `sealed`.
pub fn raise(bytes: &mut [u8], kind: Kind, number: usize, sealed: bool) {
    let block = &mut bytes[number * BLOCK_BYTES..][..BLOCK_BYTES];
    block[kind.version..kind.version + 2].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    if sealed {
        let crc = crc(kind, block);
        block[kind.crc..kind.crc + 4].copy_from_slice(&crc);
    }
}
