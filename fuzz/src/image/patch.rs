//! Patches: what of an image is changed, and what is made to fit again.

use super::bases::{KINDS, kind_of, twin};
use super::device::{Block, Patched};
use crate::input::Input;
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::{
    CheckpointHeader, Entry, PageHeader, RECORD_ENTRIES_MAX, RecordHeader, RecordKind, SLOT_COPIES,
    SLOTS, SegmentHeader, SummaryHeader, Superblock, crc32c, seal,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// In an input's first byte: every block is verified, too.
pub(super) const CHECK: u8 = 0x10;
/// What was opened is used.
pub(super) const LIVE: u8 = 0x40;
/// The chain of each volume's records is made to fit.
const CHAIN: u8 = 0x20;

/// Most patches of one input.
const PATCHES_MAX: usize = 24;

// In a patch's second byte.
/// The checksum is made to fit.
const SEAL: u8 = 0x80;
/// Only the first of two copies is changed.
const ONE_COPY: u8 = 0x40;
/// Of a record: the checksums of its blocks and their number are made to fit first.
const CONTENT: u8 = 0x20;

/// Applies the patches that an input consists of.
pub(super) fn apply(device: &mut Patched<'_>, flags: u8, input: &mut Input<'_>) {
    let mut pages = [false; SLOTS];
    for _ in 0..PATCHES_MAX {
        if input.is_empty() {
            break;
        }
        let (what, how) = (input.u8(), input.u8());
        let Some(number) = choose(device, what, input) else { continue };
        let mut block = device.block(number);
        change(device, &mut block, how, input);
        if how & CONTENT != 0 && kind_of(&block) == Some(4) {
            fit_content(device, number, &mut block);
        }
        if how & SEAL != 0 {
            seal_block(device, number, &mut block);
            let slot = (0..SLOTS).find(|&slot| in_pages(device, slot, number));
            slot.into_iter().for_each(|slot| pages[slot] = true);
        }
        if how & ONE_COPY == 0
            && let Some(twin) = twin(&device.geo, number)
        {
            device.put(twin, block.clone());
        }
        device.put(number, block);
    }
    if flags & CHAIN != 0 {
        fit_chains(device);
    }
    (0..SLOTS).filter(|&slot| pages[slot]).for_each(|slot| fit_pages(device, slot));
}

/// The block that a patch is for: the n-th of a kind, or any.
fn choose(device: &Patched<'_>, what: u8, input: &mut Input<'_>) -> Option<u32> {
    let n = input.u16();
    match device.base.structures.get(usize::from(what) % (KINDS + 1)) {
        Some(blocks) => blocks.get(usize::from(n) % blocks.len().max(1)).copied(),
        None => Some(u32::from(n) % device.geo.device_blocks as u32),
    }
}

fn change(device: &Patched<'_>, block: &mut Block, how: u8, input: &mut Input<'_>) {
    match how & 3 {
        // Bytes somewhere in its beginning, where headers are, or anywhere.
        0 | 1 => {
            let at = if how & 1 == 0 {
                input.u8().into()
            } else {
                usize::from(input.u16()) % BLOCK_BYTES
            };
            let len = usize::from(input.u8() % 64);
            let bytes = input.bytes(len.min(BLOCK_BYTES - at));
            block[at..at + bytes.len()].copy_from_slice(bytes);
        }
        // The content of another block.
        2 => {
            let what = input.u8();
            if let Some(from) = choose(device, what, input) {
                *block = *device.block(from);
            }
        }
        // A number, one more or less.
        _ => {
            let at = usize::from(input.u8());
            let step = u64::from(input.u8()).wrapping_sub(128);
            let number = u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"));
            block[at..at + 8].copy_from_slice(&number.wrapping_add(step).to_le_bytes());
        }
    }
}

/// Makes a block's checksum fit, whatever the block is now.
fn seal_block(device: &Patched<'_>, number: u32, block: &mut Block) {
    match kind_of(block) {
        Some(0) => seal::<Superblock>(block),
        Some(1) => seal::<CheckpointHeader>(block),
        Some(2) => seal::<PageHeader>(block),
        Some(3) => seal::<SegmentHeader>(block),
        Some(4) => seal::<RecordHeader>(block),
        Some(5) => seal_summary(device, number, block),
        _ => 0,
    };
}

/// A summary has one checksum for all its blocks.
fn seal_summary(device: &Patched<'_>, number: u32, block: &mut Block) -> u32 {
    let header = SummaryHeader::read_from_prefix(block).expect("a block has room for it").0;
    let left = device.geo.device_blocks as u32 - number;
    let mut all = block.to_vec();
    for n in 1..header.blocks.get().clamp(1, 64).min(left) {
        all.extend_from_slice(&device.block(number + n)[..]);
    }
    let crc = seal::<SummaryHeader>(&mut all);
    block.copy_from_slice(&all[..BLOCK_BYTES]);
    crc
}

/// Has a record name the blocks that stand behind it.
fn fit_content(device: &Patched<'_>, number: u32, block: &mut Block) {
    let mut header = RecordHeader::read_from_prefix(block).expect("a block has room for it").0;
    let count = usize::from(header.entries.get()).min(RECORD_ENTRIES_MAX);
    let mut blocks = 0;
    for n in 0..count {
        let at = size_of::<RecordHeader>() + n * size_of::<Entry>();
        let bytes = &mut block[at..at + size_of::<Entry>()];
        let mut entry = Entry::read_from_bytes(bytes).expect("its own size");
        let data = number + 1 + blocks;
        if entry.has_data() && u64::from(data) < device.geo.device_blocks {
            entry.crc_or_len = U32::new(crc32c(&device.block(data)[..]));
            bytes.copy_from_slice(entry.as_bytes());
            blocks += 1;
        }
    }
    header.blocks.set(blocks as u16);
    header.write_to_prefix(block).expect("a block has room for it");
}

/// Has each write record name the one before it.
fn fit_chains(device: &mut Patched<'_>) {
    let mut numbers: Vec<u32> =
        device.base.structures[4].iter().copied().chain(device.changed()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let header =
        |block: &Block| RecordHeader::read_from_prefix(block).expect("a block has room for it").0;
    let mut writes: Vec<(u16, u64, u32)> = Vec::new();
    for number in numbers {
        let block = device.block(number);
        let record = header(&block);
        if kind_of(&block) == Some(4) && record.kind == RecordKind::Write as u8 {
            writes.push((record.volume.get(), record.sequence.get(), number));
        }
    }
    writes.sort_unstable();
    for pair in writes.windows(2) {
        let ((volume, sequence, first), (next_volume, next, second)) = (pair[0], pair[1]);
        if volume != next_volume || sequence.checked_add(1) != Some(next) {
            continue;
        }
        let mut block = device.block(second);
        let chain = header(&device.block(first)).crc;
        let mut linked = header(&block);
        if linked.chain != chain {
            linked.chain = chain;
            linked.write_to_prefix(&mut block[..]).expect("a block has room for it");
            seal::<RecordHeader>(&mut block[..]);
            device.put(second, block);
        }
    }
}

fn in_pages(device: &Patched<'_>, slot: usize, number: u32) -> bool {
    let geo = &device.geo;
    let at = number.checked_sub(geo.slot_block(slot, 0) + 1);
    at.is_some_and(|at| at < geo.pages())
}

/// Has both headers of a slot name its pages.
fn fit_pages(device: &mut Patched<'_>, slot: usize) {
    let geo = device.geo;
    let first = geo.slot_block(slot, 0);
    let crcs: Vec<u8> = (0..geo.pages())
        .flat_map(|page| crc32c(&device.block(first + 1 + page)[..]).to_le_bytes())
        .collect();
    for copy in 0..SLOT_COPIES {
        let number = geo.slot_block(slot, copy);
        let mut block = device.block(number);
        let mut header =
            CheckpointHeader::read_from_prefix(&block[..]).expect("a block has room for it").0;
        header.pages_crc.set(crc32c(&crcs));
        header.write_to_prefix(&mut block[..]).expect("a block has room for it");
        seal::<CheckpointHeader>(&mut block[..]);
        device.put(number, block);
    }
}
