//! Pages of a checkpoint: how the segment table, the volumes and the extents stand in them, and
//! which of them have to be written.

use crate::api::{BLOCK_BYTES, IoError};
use crate::base::device::Device;
use crate::base::mem::AlignedBuf;
use crate::blocks::space::Space;
use crate::format::{
    self, CheckpointHeader, ExtentItem, Geometry, PAGE_MAGIC, PageHeader, SLOT_COPIES, SegmentItem,
    VolumeItem, byte, crc32c,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The pages of a checkpoint that must be written, and its header.
pub(super) struct Pages {
    slot: usize,
    list: Vec<u32>,
    bytes: Vec<u8>,
    header: [u8; BLOCK_BYTES],
}

impl Pages {
    pub(super) fn new(slot: usize) -> Pages {
        Pages { slot, list: Vec::new(), bytes: Vec::new(), header: [0; BLOCK_BYTES] }
    }

    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn header(&self) -> &[u8; BLOCK_BYTES] {
        &self.header
    }

    pub(super) fn set_header(&mut self, header: CheckpointHeader) {
        header.write_to_prefix(&mut self.header).expect("a header is smaller than a block");
        format::seal::<CheckpointHeader>(&mut self.header);
    }

    /// Adds a page, unless the slot has it as it is; `crcs` says what the slot has.
    pub(super) fn push(&mut self, page: u32, bytes: [u8; BLOCK_BYTES], crcs: &mut [Option<u32>]) {
        let crc = crc32c(&bytes);
        if crcs[page as usize] != Some(crc) {
            crcs[page as usize] = Some(crc);
            self.list.push(page);
            self.bytes.extend_from_slice(&bytes);
        }
    }

    /// The pages from place `at` of the list on that follow each other in the slot, in at most
    /// `bytes_max` bytes: the first one, and what is in all of them.
    pub(super) fn stretch(&self, at: usize, bytes_max: usize) -> (u32, &[u8]) {
        let left = &self.list[at..];
        let follow = left.iter().take(bytes_max / BLOCK_BYTES).zip(left[0]..);
        let n = follow.take_while(|&(&page, expected)| page == expected).count();
        (left[0], &self.bytes[at * BLOCK_BYTES..(at + n) * BLOCK_BYTES])
    }

    /// Writes them and makes them stable, then the header.
    pub(super) fn write_blocking(
        &self,
        geo: &Geometry,
        device: &mut dyn Device,
    ) -> Result<(), IoError> {
        const BATCH: usize = 64;
        let mut buf = AlignedBuf::zeroed(BATCH * BLOCK_BYTES);
        let mut at = 0;
        while at < self.len() {
            let (first, bytes) = self.stretch(at, BATCH * BLOCK_BYTES);
            let len = bytes.len();
            buf[..len].copy_from_slice(bytes);
            for copy in 0..SLOT_COPIES {
                let block = geo.slot_block(self.slot, copy) + 1 + first;
                device.write(byte(block), &buf[..len])?;
            }
            at += len / BLOCK_BYTES;
        }
        device.sync()?;
        buf[..BLOCK_BYTES].copy_from_slice(&self.header);
        for copy in 0..SLOT_COPIES {
            device.write(byte(geo.slot_block(self.slot, copy)), &buf[..BLOCK_BYTES])?;
        }
        device.sync()
    }
}

fn page(
    uuid: &[u8; 16],
    page: u32,
    items: usize,
    fill: impl FnOnce(&mut [u8]),
) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    let header = PageHeader {
        magic: PAGE_MAGIC,
        crc: U32::ZERO,
        uuid: *uuid,
        page: U32::new(page),
        items: U32::new(items as u32),
    };
    header.write_to_prefix(&mut bytes).expect("a header is smaller than a block");
    fill(&mut bytes[size_of::<PageHeader>()..]);
    format::seal::<PageHeader>(&mut bytes);
    bytes
}

pub(super) fn encode_segments(space: &Space, number: u32) -> [u8; BLOCK_BYTES] {
    let segments = space.segments_of_page(number);
    let geo = space.geo();
    let bitmap = geo.segment_blocks as usize / 8;
    page(&geo.uuid, number, segments.len(), |out| {
        for (segment, out) in segments.zip(out.chunks_exact_mut(geo.segment_item_bytes())) {
            let s = space.segment(segment);
            if !s.is_used() {
                continue;
            }
            let item = SegmentItem {
                segment_sequence: U64::new(s.life()),
                stream: s.stream() as u8,
                used: 1,
                summary_blocks: U16::new(s.summary_blocks()),
                reserved: U32::ZERO,
            };
            item.write_to_prefix(out).expect("an item has its size");
            let first = geo.segment_block(segment);
            let range = first..first + geo.segment_blocks;
            let (live, dirty) = out[size_of::<SegmentItem>()..].split_at_mut(bitmap);
            space.marks().live().copy_out(range.clone(), live);
            space.marks().dirty().copy_out(range, dirty);
        }
    })
}

pub(super) fn encode_volume(
    uuid: &[u8; 16],
    number: u32,
    item: Option<VolumeItem>,
) -> [u8; BLOCK_BYTES] {
    page(uuid, number, usize::from(item.is_some()), |out| {
        if let Some(item) = item {
            item.write_to_prefix(out).expect("a volume fits into a page");
        }
    })
}

pub(super) fn encode_extents(
    uuid: &[u8; 16],
    number: u32,
    extents: &[ExtentItem],
) -> [u8; BLOCK_BYTES] {
    page(uuid, number, extents.len(), |out| {
        let bytes = extents.as_bytes();
        out[..bytes.len()].copy_from_slice(bytes);
    })
}

/// CRC-32C over the CRCs of all pages.
pub(crate) fn combined_crc(crcs: &[Option<u32>]) -> u32 {
    let bytes: Vec<u8> =
        crcs.iter().flat_map(|c| c.expect("every page has been written").to_le_bytes()).collect();
    crc32c(&bytes)
}
