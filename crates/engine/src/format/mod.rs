//! The bytes on the cache device (`docs/format.md` tells the same in prose).
//!
//! Everything is little-endian, in 4 KiB blocks, and carries the cache's uuid and a CRC-32C; what
//! can be left over from an earlier life of a segment also carries the segment's sequence.

pub(crate) mod record;
pub mod redo;
pub(crate) mod summary;

use crate::api::BLOCK_BYTES;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the format; a cache device with anything of a higher one is refused.
pub const FORMAT_VERSION: u16 = 1;
/// The version in a checkpoint's header. Version 1 had no such field: zero stands for it.
pub const CHECKPOINT_VERSION: u16 = if FORMAT_VERSION == 1 { 0 } else { FORMAT_VERSION };
/// Smallest cache device in bytes.
pub const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Largest cache device in bytes: positions are 32-bit block numbers, and two are reserved.
pub const CACHE_BYTES_MAX: u64 = 8 << 40;
/// Most data blocks and entries in one record.
pub const RECORD_ENTRIES_MAX: usize = 240;
/// Most blocks of a summary: a segment is closed early when ranges without data would make it
/// longer.
pub const SUMMARY_BLOCKS_MAX: u32 = 32;

/// Nothing that the core counts (checkpoints, epochs, sequences) comes anywhere near this. What
/// stands on a device and is larger was not written by it.
pub const COUNTER_MAX: u64 = 1 << 62;

/// First block of the superblock's copies.
pub const SUPERBLOCKS: [u32; 2] = [0, 256];
/// First block of the checkpoint slots.
const SLOTS_FIRST_BLOCK: u32 = 512;
/// Checkpoint slots, written in turn.
pub const SLOTS: usize = 2;
/// Copies of each slot.
pub const SLOT_COPIES: usize = 2;

/// "TIDEPOOL".
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"TIDEPOOL";
/// Start of a segment's header.
pub const SEGMENT_MAGIC: [u8; 4] = *b"TPSG";
/// Start of a record's header.
pub const RECORD_MAGIC: [u8; 4] = *b"TPRC";
/// Start of a segment's summary.
pub const SUMMARY_MAGIC: [u8; 4] = *b"TPSU";
/// Start of a checkpoint's header.
pub const CHECKPOINT_MAGIC: [u8; 4] = *b"TPCK";
/// Start of a checkpoint's page.
pub const PAGE_MAGIC: [u8; 4] = *b"TPPG";

/// CRC-32C (Castagnoli) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Identity and geometry of the cache device; written once, at format.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct Superblock {
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: [u8; 8],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// [`FORMAT_VERSION`].
    pub version: U16,
    /// Zero.
    pub reserved: U16,
    /// The cache's name; in everything else on the device.
    pub uuid: [u8; 16],
    /// Blocks of the device that are used.
    pub device_blocks: U64,
    /// Blocks of one segment.
    pub segment_blocks: U32,
    /// Number of segments.
    pub segments: U32,
    /// First block of segment 0.
    pub segments_first_block: U32,
    /// Blocks of one copy of a checkpoint slot.
    pub slot_blocks: U32,
    /// Volume pages of a slot, which is the most volumes.
    pub volume_pages: U32,
    /// Extent pages of a slot.
    pub extent_pages: U32,
}

/// First block of a segment in use.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct SegmentHeader {
    /// [`SEGMENT_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// [`FORMAT_VERSION`].
    pub version: U16,
    /// [`Stream`] as a number.
    pub stream: u8,
    /// Zero.
    pub reserved: u8,
    /// Which segment.
    pub segment: U32,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// Which life of the segment: no two openings of segments share a number.
    pub segment_sequence: U64,
    /// Newest checkpoint that was durable when the segment was opened.
    pub checkpoint: U64,
}

/// Header block of a record; entries follow in the same block, data blocks behind it.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct RecordHeader {
    /// [`RECORD_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// [`FORMAT_VERSION`].
    pub version: U16,
    /// [`RecordKind`] as a number.
    pub kind: u8,
    /// Zero.
    pub reserved: u8,
    /// The volume's number on this device.
    pub volume: U16,
    /// Entries in this header.
    pub entries: U16,
    /// Data blocks behind this header.
    pub blocks: U16,
    /// Zero.
    pub reserved2: U16,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// As in the segment's header.
    pub segment_sequence: U64,
    /// The owner's generation of the volume.
    pub generation: U64,
    /// Write records: number of the record in the volume's log, without gaps. Fill records:
    /// everything up to this sequence is contained in the data. Move records: zero.
    pub sequence: U64,
    /// Everything up to this sequence of the volume was durable when this record was built.
    pub durable_sequence: U64,
    /// Newest checkpoint that was durable when this record was built.
    pub checkpoint: U64,
    /// Header CRC of the volume's previous write record (write records).
    pub chain: U32,
    /// How often the cache had been opened when the record was built. A segment may be appended to
    /// in several of these epochs: what a later one finds behind its own records is not of its log.
    pub epoch: U64,
    /// Zero.
    pub reserved3: [u8; 16],
}

/// One entry of a record's header or of a summary: a data block, or a range without data.
#[derive(
    FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, PartialEq, Eq, Debug,
)]
#[repr(C)]
pub struct Entry {
    /// Block of the volume (low 48 bits) and [`EntryKind`] (high 8 bits).
    pub block_and_kind: U64,
    /// CRC-32C of the data block, or the number of blocks of a range.
    pub crc_or_len: U32,
}

/// What an entry says about its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum EntryKind {
    /// A data block follows in the record.
    Data = 0,
    /// The range reads as zero; space may be given back.
    Discard = 1,
    /// The range reads as zero; space is kept.
    WriteZeroes = 2,
    /// Cached copies of the range are void: the backend is being written past the cache.
    Invalidate = 3,
    /// A data block that could not be read when it was to be moved: takes its place, says nothing.
    Void = 4,
}

impl Entry {
    /// An entry for `block`.
    pub fn new(kind: EntryKind, block: u64, crc_or_len: u32) -> Entry {
        debug_assert!(block < 1 << 48);
        Entry {
            block_and_kind: U64::new(block | (kind as u64) << 56),
            crc_or_len: U32::new(crc_or_len),
        }
    }

    /// The (first) block of the volume.
    pub fn block(&self) -> u64 {
        self.block_and_kind.get() & ((1 << 48) - 1)
    }

    /// CRC-32C of the data, or blocks of the range.
    pub fn value(&self) -> u32 {
        self.crc_or_len.get()
    }

    /// The kind, `None` if unknown.
    pub fn kind(&self) -> Option<EntryKind> {
        Some(match self.block_and_kind.get() >> 56 {
            0 => EntryKind::Data,
            1 => EntryKind::Discard,
            2 => EntryKind::WriteZeroes,
            3 => EntryKind::Invalidate,
            4 => EntryKind::Void,
            _ => return None,
        })
    }

    /// Whether a data block of the record belongs to the entry.
    pub fn has_data(&self) -> bool {
        matches!(self.kind(), Some(EntryKind::Data | EntryKind::Void))
    }
}

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// Part of a volume's log.
    Write = 1,
    /// Clean blocks fetched from the backend.
    Fill = 2,
    /// Blocks moved by reclaim; old positions follow the entries. Valid only where the index still
    /// has the old position.
    Move = 3,
}

impl RecordKind {
    /// The kind of a header's number.
    pub fn from_number(number: u8) -> Option<RecordKind> {
        match number {
            1 => Some(RecordKind::Write),
            2 => Some(RecordKind::Fill),
            3 => Some(RecordKind::Move),
            _ => None,
        }
    }
}

/// The append streams. Each has at most one open segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stream {
    /// The write log, and blocks that reclaim moved because it must not drop them.
    Log = 0,
    /// Read cache, newcomers: miss fills on probation.
    Fill = 1,
    /// Read cache, blocks that were used again.
    Main = 2,
}

impl Stream {
    /// All streams, in the order of their numbers.
    pub const ALL: [Stream; 3] = [Stream::Log, Stream::Fill, Stream::Main];

    /// The stream of a header's number.
    pub fn from_number(number: u8) -> Option<Stream> {
        Stream::ALL.get(number as usize).copied()
    }
}

/// Start of a segment's summary: the copy of its records' headers at the segment's end.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct SummaryHeader {
    /// [`SUMMARY_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the summary's blocks with this field zero.
    pub crc: U32,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// Which segment.
    pub segment: U32,
    /// Blocks of the summary.
    pub blocks: U32,
    /// As in the segment's header.
    pub segment_sequence: U64,
    /// Records.
    pub records: U32,
    /// Entries of all records.
    pub entries: U32,
}

/// One record in a summary; the entries of all records follow behind the last one.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct SummaryRecord {
    /// Sequence of the record's header.
    pub sequence: U64,
    /// CRC of the record's header.
    pub header_crc: U32,
    /// The volume's number.
    pub volume: U16,
    /// Block of the record's header within the segment.
    pub first_block: U16,
    /// Entries.
    pub entries: U16,
    /// Kind.
    pub kind: u8,
    /// Zero.
    pub reserved: u8,
}

/// Header block of a checkpoint; the last block of it that is written.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct CheckpointHeader {
    /// [`CHECKPOINT_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// Number of the checkpoint; the highest valid one counts.
    pub checkpoint: U64,
    /// Number of times that the cache was opened.
    pub epoch: U64,
    /// The next segment that is opened gets this sequence or a higher one.
    pub next_segment_sequence: U64,
    /// CRC-32C over the CRCs of all pages, as little-endian numbers, in order.
    pub pages_crc: U32,
    /// Open segment of each stream, [`NO_SEGMENT`] if none.
    pub open_segment: [U32; 3],
    /// First block of each open segment that is not covered by the checkpoint.
    pub open_block: [U32; 3],
    /// [`CHECKPOINT_VERSION`]: a daemon that opens a cache of an older version takes a checkpoint before it writes
    /// anything else, and from then on the older version refuses the cache.
    pub version: U16,
}

impl CheckpointHeader {
    /// The format's version of this checkpoint.
    pub fn format_version(&self) -> u16 {
        self.version.get().max(1)
    }
}

/// "No segment" in [`CheckpointHeader::open_segment`].
pub const NO_SEGMENT: u32 = u32::MAX;

/// Start of every checkpoint page.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct PageHeader {
    /// [`PAGE_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// Position of the page in the slot.
    pub page: U32,
    /// Items in the page.
    pub items: U32,
}

/// One segment in a checkpoint's segment page; its live bits and dirty bits follow.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct SegmentItem {
    /// Sequence of the segment's life; zero when free.
    pub segment_sequence: U64,
    /// Stream.
    pub stream: u8,
    /// 1 when in use.
    pub used: u8,
    /// Blocks of the summary; zero while the segment is open.
    pub summary_blocks: U16,
    /// Zero.
    pub reserved: U32,
}

/// A volume's page in a checkpoint.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct VolumeItem {
    /// Bytes.
    pub size_bytes: U64,
    /// The owner's generation.
    pub generation: U64,
    /// Newest record that is contained in the checkpoint.
    pub sequence: U64,
    /// Header CRC of that record.
    pub chain: U32,
    /// Mode as a number.
    pub mode: u8,
    /// 1 when read-only.
    pub read_only: u8,
    /// 1 when data is lost that cannot be named.
    pub failed: u8,
    /// 1 when the drain is unordered, 0 when it is grouped.
    pub unordered: u8,
    /// Everything up to here is in the backend.
    pub sequence_drained: U64,
    /// Dirty quota as configured; zero for the default.
    pub dirty_bytes_max: U64,
    /// Dirty blocks at the checkpoint.
    pub dirty_blocks: U64,
    /// Cached blocks inside of the volume's zero extents. Were one of them not found again, the
    /// extent would make it read as zero.
    pub covered_blocks: U64,
    /// Length of the name.
    pub name_len: U16,
    /// Length of the backend's URI.
    pub backend_len: U16,
    /// Length of the attachment.
    pub attachment_len: U16,
    /// 1 when it is the copy of another host's volume.
    pub replica: u8,
    /// Zero.
    pub reserved: u8,
    /// The name.
    pub name: [u8; 64],
    /// The backend's URI.
    pub backend: [u8; 1024],
    /// The attachment.
    pub attachment: [u8; 1024],
    /// Of a replica: nothing of an owner before this generation is taken.
    pub promised: U64,
}

/// A range in a checkpoint's extent page.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct ExtentItem {
    /// First block of the volume.
    pub block: U64,
    /// Blocks.
    pub len: U32,
    /// The volume's number.
    pub volume: U16,
    /// [`ExtentKind`] as a number.
    pub kind: u8,
    /// Zero.
    pub reserved: u8,
}

/// What an extent of a checkpoint says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExtentKind {
    /// Reads as zero, not yet drained; cached blocks inside of it stand above it.
    Zero = 1,
    /// The only copy is lost.
    Lost = 2,
    /// As [`ExtentKind::Zero`], and the backend keeps the space.
    ZeroKeep = 3,
}

/// A block of the format: a struct at the start of 4 KiB whose `crc` field covers the whole block.
pub trait Checked: FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned {
    /// Byte offset of the CRC field.
    const CRC_OFFSET: usize;
}

macro_rules! checked {
    ($($name:ty),*) => { $(impl Checked for $name { const CRC_OFFSET: usize = std::mem::offset_of!($name, crc); })* };
}
checked!(Superblock, SegmentHeader, RecordHeader, SummaryHeader, CheckpointHeader, PageHeader);

/// Computes the CRC of `block`, whose CRC field counts as zero.
pub fn block_crc<T: Checked>(block: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&block[..T::CRC_OFFSET]);
    digest.update(&[0; 4]);
    digest.update(&block[T::CRC_OFFSET + 4..]);
    digest.finalize() as u32
}

/// Writes the CRC into a block that is otherwise complete, and returns it.
pub fn seal<T: Checked>(block: &mut [u8]) -> u32 {
    let crc = block_crc::<T>(block);
    block[T::CRC_OFFSET..T::CRC_OFFSET + 4].copy_from_slice(&crc.to_le_bytes());
    crc
}

/// The struct at the start of `block` if the block's CRC is right.
pub fn open<T: Checked + Copy>(block: &[u8]) -> Option<T> {
    let (head, _) = T::read_from_prefix(block).ok()?;
    let stored = u32::from_le_bytes(block[T::CRC_OFFSET..T::CRC_OFFSET + 4].try_into().ok()?);
    (stored == block_crc::<T>(block)).then_some(head)
}

const _: () = assert!(size_of::<RecordHeader>() == 104 && size_of::<Entry>() == 12);
const _: () = assert!(size_of::<RecordHeader>() + RECORD_ENTRIES_MAX * 16 <= BLOCK_BYTES);
const _: () = assert!(size_of::<SummaryHeader>() == 48 && size_of::<SummaryRecord>() == 20);
const _: () = assert!(std::mem::offset_of!(CheckpointHeader, version) == 76);
const _: () = assert!(size_of::<PageHeader>() + size_of::<VolumeItem>() <= BLOCK_BYTES);
const _: () = assert!(size_of::<SegmentItem>() == 16 && size_of::<ExtentItem>() == 16);

/// The version that a verified structure carries, if it is newer than what this program knows.
pub fn newer(version: U16) -> Option<u16> {
    Some(version.get()).filter(|&version| version > FORMAT_VERSION)
}

/// Where things stand on the device; follows from the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The cache's name.
    pub uuid: [u8; 16],
    /// Blocks used.
    pub device_blocks: u64,
    /// Blocks of one segment.
    pub segment_blocks: u32,
    /// Segments.
    pub segments: u32,
    /// First block of segment 0.
    pub segments_first_block: u32,
    /// Blocks of one copy of a checkpoint slot.
    pub slot_blocks: u32,
    /// Volume pages of a slot.
    pub volume_pages: u32,
    /// Extent pages of a slot.
    pub extent_pages: u32,
}

impl Geometry {
    /// The geometry of a device of `size_bytes`; `None` when it is too small or too large for the
    /// segment size (which is chosen by size where not given).
    pub fn new(uuid: [u8; 16], size_bytes: u64, segment_bytes: Option<u32>) -> Option<Geometry> {
        if !(CACHE_BYTES_MIN..=CACHE_BYTES_MAX).contains(&size_bytes) {
            return None;
        }
        let device_blocks = size_bytes / BLOCK_BYTES as u64;
        let segment_blocks = match segment_bytes {
            Some(bytes) => bytes / BLOCK_BYTES as u32,
            None if size_bytes < 1 << 30 => 256,
            None if size_bytes < 8 << 30 => 1024,
            None => 2048,
        };
        if !segment_blocks.is_power_of_two() || !(64..=4096).contains(&segment_blocks) {
            return None;
        }
        let small = size_bytes < 1 << 30;
        let mut geometry = Geometry {
            uuid,
            device_blocks,
            segment_blocks,
            segments: (device_blocks / u64::from(segment_blocks)) as u32,
            segments_first_block: 0,
            slot_blocks: 0,
            volume_pages: if small { 16 } else { crate::api::VOLUMES_MAX as u32 },
            extent_pages: if small { 16 } else { 256 },
        };
        geometry.slot_blocks = 1 + geometry.pages();
        let first = SLOTS_FIRST_BLOCK + geometry.slot_blocks * (SLOTS * SLOT_COPIES) as u32;
        geometry.segments_first_block = first.div_ceil(segment_blocks) * segment_blocks;
        let left = device_blocks.checked_sub(u64::from(geometry.segments_first_block))?;
        geometry.segments = (left / u64::from(segment_blocks)) as u32;
        (geometry.segments >= 24).then_some(geometry)
    }

    /// The geometry that a superblock names, if it is consistent.
    pub fn from_superblock(sb: &Superblock) -> Option<Geometry> {
        let bytes = sb.device_blocks.get().checked_mul(BLOCK_BYTES as u64)?;
        let segment_bytes = sb.segment_blocks.get().checked_mul(BLOCK_BYTES as u32)?;
        let geometry = Geometry::new(sb.uuid, bytes, Some(segment_bytes))?;
        // The number of pages belongs to the geometry of the version that formatted the device.
        (geometry.segments == sb.segments.get()
            && geometry.segments_first_block == sb.segments_first_block.get()
            && geometry.slot_blocks == sb.slot_blocks.get()
            && geometry.volume_pages == sb.volume_pages.get()
            && geometry.extent_pages == sb.extent_pages.get())
        .then_some(geometry)
    }

    /// The superblock of this geometry, as a sealed block.
    pub fn superblock(&self) -> [u8; BLOCK_BYTES] {
        let sb = Superblock {
            magic: SUPERBLOCK_MAGIC,
            crc: U32::ZERO,
            version: U16::new(FORMAT_VERSION),
            reserved: U16::ZERO,
            uuid: self.uuid,
            device_blocks: U64::new(self.device_blocks),
            segment_blocks: U32::new(self.segment_blocks),
            segments: U32::new(self.segments),
            segments_first_block: U32::new(self.segments_first_block),
            slot_blocks: U32::new(self.slot_blocks),
            volume_pages: U32::new(self.volume_pages),
            extent_pages: U32::new(self.extent_pages),
        };
        let mut block = [0; BLOCK_BYTES];
        sb.write_to_prefix(&mut block).expect("a superblock is smaller than a block");
        seal::<Superblock>(&mut block);
        block
    }

    /// Segments described by one page of a checkpoint.
    pub fn segments_per_page(&self) -> u32 {
        ((BLOCK_BYTES - size_of::<PageHeader>()) / self.segment_item_bytes()) as u32
    }

    /// Bytes of one segment's item with its two bitmaps.
    pub fn segment_item_bytes(&self) -> usize {
        size_of::<SegmentItem>() + 2 * (self.segment_blocks as usize / 8)
    }

    /// Pages for the segment table.
    pub fn segment_pages(&self) -> u32 {
        self.segments.div_ceil(self.segments_per_page())
    }

    /// All pages of a slot: segment table, volumes, extents.
    pub fn pages(&self) -> u32 {
        self.segment_pages() + self.volume_pages + self.extent_pages
    }

    /// First block of a copy of a slot.
    pub fn slot_block(&self, slot: usize, copy: usize) -> u32 {
        SLOTS_FIRST_BLOCK + (slot * SLOT_COPIES + copy) as u32 * self.slot_blocks
    }

    /// First block of a segment.
    pub fn segment_block(&self, segment: u32) -> u32 {
        self.segments_first_block + segment * self.segment_blocks
    }

    /// The segment that a position belongs to.
    pub fn segment_of(&self, position: u32) -> u32 {
        (position - self.segments_first_block) / self.segment_blocks
    }

    /// Blocks that a summary of so many records and entries takes.
    pub fn summary_blocks(records: usize, entries: usize) -> u32 {
        let bytes = size_of::<SummaryHeader>()
            + records * size_of::<SummaryRecord>()
            + entries * size_of::<Entry>();
        bytes.div_ceil(BLOCK_BYTES) as u32
    }

    /// Most extents that one checkpoint holds.
    pub fn extents_max(&self) -> usize {
        self.extent_pages as usize * EXTENTS_PER_PAGE
    }
}

/// Extents in one page.
pub const EXTENTS_PER_PAGE: usize =
    (BLOCK_BYTES - size_of::<PageHeader>()) / size_of::<ExtentItem>();

/// Byte offset of a block on the device.
pub fn byte(block: u32) -> u64 {
    u64::from(block) * BLOCK_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometry_fits_the_device_and_survives_the_superblock() {
        for size in [64 << 20, 100 << 20, 1 << 30, 4u64 << 30, 1 << 40, 8 << 40] {
            let g = Geometry::new([7; 16], size, None).expect("a valid size");
            let end = u64::from(g.segments_first_block)
                + u64::from(g.segments) * u64::from(g.segment_blocks);
            assert!(end <= g.device_blocks, "{g:?}");
            let sb: Superblock = open(&g.superblock()).expect("sealed");
            assert_eq!(Geometry::from_superblock(&sb), Some(g));
            assert!(g.segments_per_page() >= 3);
        }
        assert_eq!(Geometry::new([7; 16], (64 << 20) - 1, None), None);
    }

    #[test]
    fn a_flipped_bit_anywhere_is_noticed() {
        let g = Geometry::new([7; 16], 64 << 20, None).expect("a valid size");
        for bit in 0..BLOCK_BYTES * 8 {
            let mut block = g.superblock();
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(open::<Superblock>(&block).is_none(), "bit {bit}");
        }
    }
}
