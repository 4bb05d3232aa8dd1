//! The redo of a group: what a lost cache leaves beside the image.
//!
//! A group's redo is a number of *frames*, each a header block and the data blocks that it names.
//! Frames carry the cache's uuid, the owner's generation, group and number, and a checksum of
//! everything: a reader knows by them whether each is the one that was written. `docs/format.md`
//! tells the bytes in prose.

use crate::api::BLOCK_BYTES;
use crate::format::{self, Checked, Entry, EntryKind, FORMAT_VERSION, crc32c};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Start of a frame.
pub const FRAME_MAGIC: [u8; 4] = *b"TPRF";
/// Most bytes of a frame, header included.
pub const FRAME_BYTES_MAX: usize = 256 * 1024;
/// Most data blocks of a frame.
pub const FRAME_BLOCKS_MAX: usize = FRAME_BYTES_MAX / BLOCK_BYTES - 1;
/// Most entries of a frame, those without data included.
pub const FRAME_ENTRIES_MAX: usize = 256;

/// Header block of a frame; entries follow in the same block, data blocks behind it.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct FrameHeader {
    /// [`FRAME_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// [`FORMAT_VERSION`].
    pub version: U16,
    /// Entries in this header.
    pub entries: U16,
    /// Data blocks behind this header.
    pub blocks: U16,
    /// Zero.
    pub reserved: U16,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// The owner's generation.
    pub generation: U64,
    /// Number of the group in this generation, from 1.
    pub group: U64,
    /// Number of the frame in its group, from 0.
    pub frame: U32,
    /// Zero.
    pub reserved2: U32,
}

impl Checked for FrameHeader {
    const CRC_OFFSET: usize = std::mem::offset_of!(FrameHeader, crc);
}

const _: () = assert!(size_of::<FrameHeader>() == 56);
const _: () =
    assert!(size_of::<FrameHeader>() + FRAME_ENTRIES_MAX * size_of::<Entry>() <= BLOCK_BYTES);

/// Which frame of which redo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameName {
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// The owner's generation.
    pub generation: u64,
    /// Number of the group.
    pub group: u64,
    /// Number of the frame.
    pub frame: u32,
}

/// One change that a frame holds, in whole blocks of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// The block has this content.
    Data(u64, &'a [u8]),
    /// Blocks from the first on read as zero; with `true` their space is kept.
    Zeroes(u64, u32, bool),
}

/// Writes the header of a frame into its first block. Data entries name the blocks behind it, in
/// order, by the volume's block and the checksum of the content.
///
/// # Panics
/// If there are more than [`FRAME_ENTRIES_MAX`] entries.
pub fn encode_header(out: &mut [u8], name: FrameName, entries: impl Iterator<Item = Entry>) {
    out[..BLOCK_BYTES].fill(0);
    let (mut count, mut blocks) = (0, 0);
    let mut at = size_of::<FrameHeader>();
    for entry in entries {
        out[at..at + size_of::<Entry>()].copy_from_slice(entry.as_bytes());
        at += size_of::<Entry>();
        count += 1;
        blocks += u16::from(entry.has_data());
    }
    assert!(usize::from(count) <= FRAME_ENTRIES_MAX, "a frame has a limited number of entries");
    let header = FrameHeader {
        magic: FRAME_MAGIC,
        crc: U32::ZERO,
        version: U16::new(FORMAT_VERSION),
        entries: U16::new(count),
        blocks: U16::new(blocks),
        reserved: U16::ZERO,
        uuid: name.uuid,
        generation: U64::new(name.generation),
        group: U64::new(name.group),
        frame: U32::new(name.frame),
        reserved2: U32::ZERO,
    };
    header.write_to_prefix(out).expect("a header is smaller than a block");
    format::seal::<FrameHeader>(&mut out[..BLOCK_BYTES]);
}

/// Reads a frame: all of its changes, or `None` when it is not the frame of this name or damaged
/// anywhere. `bytes` may be longer than the frame.
pub fn decode(bytes: &[u8], name: FrameName) -> Option<Vec<Change<'_>>> {
    let block = bytes.get(..BLOCK_BYTES)?;
    let header: FrameHeader = format::open(block)?;
    let found = FrameName {
        uuid: header.uuid,
        generation: header.generation.get(),
        group: header.group.get(),
        frame: header.frame.get(),
    };
    let count = usize::from(header.entries.get());
    if header.magic != FRAME_MAGIC
        || header.version.get() > FORMAT_VERSION
        || found != name
        || count > FRAME_ENTRIES_MAX
    {
        return None;
    }
    let from = size_of::<FrameHeader>();
    let entries =
        <[Entry]>::ref_from_bytes(&block[from..from + count * size_of::<Entry>()]).ok()?;
    let mut changes = Vec::with_capacity(count);
    let mut data = bytes[BLOCK_BYTES..].chunks_exact(BLOCK_BYTES);
    for entry in entries {
        changes.push(match entry.kind()? {
            EntryKind::Data => {
                let block = data.next().filter(|block| crc32c(block) == entry.value())?;
                Change::Data(entry.block(), block)
            }
            EntryKind::Discard => Change::Zeroes(entry.block(), entry.value(), false),
            EntryKind::WriteZeroes => Change::Zeroes(entry.block(), entry.value(), true),
            EntryKind::Invalidate | EntryKind::Void => return None,
        });
    }
    let blocks = changes.iter().filter(|change| matches!(change, Change::Data(..))).count();
    (blocks == usize::from(header.blocks.get())).then_some(changes)
}

/// The version of a frame that a newer program has written: [`decode`] does not know it, but it is
/// not damaged.
pub fn newer_version(bytes: &[u8]) -> Option<u16> {
    let header: FrameHeader = format::open(bytes.get(..BLOCK_BYTES)?)?;
    format::newer(header.version).filter(|_| header.magic == FRAME_MAGIC)
}

/// Bytes of a frame with so many data blocks.
pub fn frame_bytes(blocks: usize) -> usize {
    (1 + blocks) * BLOCK_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: FrameName = FrameName { uuid: [7; 16], generation: 3, group: 9, frame: 2 };

    fn frame() -> Vec<u8> {
        let mut bytes = vec![0; frame_bytes(2)];
        bytes[BLOCK_BYTES..2 * BLOCK_BYTES].fill(5);
        bytes[2 * BLOCK_BYTES..].fill(6);
        let crc = |n: usize| crc32c(&bytes[n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES]);
        let entries = [
            Entry::new(EntryKind::Data, 100, crc(1)),
            Entry::new(EntryKind::WriteZeroes, 7, 3),
            Entry::new(EntryKind::Data, 1 << 35, crc(2)),
            Entry::new(EntryKind::Discard, 50, 1024),
        ];
        encode_header(&mut bytes, NAME, entries.into_iter());
        bytes
    }

    #[test]
    fn a_frame_is_read_back_as_written() {
        let bytes = frame();
        let changes = decode(&bytes, NAME).expect("the frame");
        assert_eq!(
            changes,
            [
                Change::Data(100, &[5; BLOCK_BYTES]),
                Change::Zeroes(7, 3, true),
                Change::Data(1 << 35, &[6; BLOCK_BYTES]),
                Change::Zeroes(50, 1024, false),
            ]
        );
    }

    #[test]
    fn a_header_counts_its_entries_and_the_blocks_behind_it() {
        let header: FrameHeader = format::open(&frame()[..BLOCK_BYTES]).expect("sealed");
        assert_eq!((header.entries.get(), header.blocks.get()), (4, 2));
    }

    #[test]
    fn a_header_that_counts_other_blocks_than_it_names_is_none() {
        for wrong in [1, 3] {
            let mut bytes = frame();
            let at = std::mem::offset_of!(FrameHeader, blocks);
            bytes[at..at + 2].copy_from_slice(&u16::to_le_bytes(wrong));
            format::seal::<FrameHeader>(&mut bytes[..BLOCK_BYTES]);
            assert_eq!(decode(&bytes, NAME), None, "{wrong} blocks");
        }
    }

    #[test]
    fn a_frame_holds_as_many_entries_as_its_header_has_room_for() {
        let mut bytes = vec![0; frame_bytes(0)];
        let entries = |n: usize| (0..n).map(|n| Entry::new(EntryKind::Discard, n as u64 * 8, 8));
        encode_header(&mut bytes, NAME, entries(FRAME_ENTRIES_MAX));
        assert_eq!(decode(&bytes, NAME).map(|changes| changes.len()), Some(FRAME_ENTRIES_MAX));
        let mut header: FrameHeader = format::open(&bytes).expect("sealed");
        header.entries.set(FRAME_ENTRIES_MAX as u16 + 1);
        header.write_to_prefix(&mut bytes).expect("room");
        format::seal::<FrameHeader>(&mut bytes);
        assert_eq!(decode(&bytes, NAME), None);
    }

    #[test]
    fn a_frame_of_a_newer_version_is_told_from_a_damaged_one() {
        let mut bytes = frame();
        assert_eq!(newer_version(&bytes), None);
        bytes[std::mem::offset_of!(FrameHeader, version)] += 1;
        assert_eq!(newer_version(&bytes), None, "its checksum is wrong");
        format::seal::<FrameHeader>(&mut bytes[..BLOCK_BYTES]);
        assert!(decode(&bytes, NAME).is_none());
        assert_eq!(newer_version(&bytes), Some(FORMAT_VERSION + 1));
        assert_eq!(newer_version(&bytes[..BLOCK_BYTES - 1]), None);
    }

    #[test]
    fn a_damaged_cut_or_foreign_frame_is_none() {
        let bytes = frame();
        for at in (0..bytes.len()).step_by(97) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(decode(&damaged, NAME).is_none(), "byte {at}");
        }
        assert!(decode(&bytes[..bytes.len() - 1], NAME).is_none());
        assert!(decode(&bytes[..100], NAME).is_none());
        for name in [
            FrameName { uuid: [8; 16], ..NAME },
            FrameName { generation: 4, ..NAME },
            FrameName { group: 8, ..NAME },
            FrameName { frame: 3, ..NAME },
        ] {
            assert!(decode(&bytes, name).is_none());
        }
    }
}
