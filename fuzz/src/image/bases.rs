//! The images that are mutated: what the real core leaves on a device of the smallest size when it
//! is killed.

use super::device::Block;
use super::world::{MIB, World, pattern, spec};
use std::collections::HashMap;
use std::sync::OnceLock;
use tidepool_engine::api::{BLOCK_BYTES, BackendOp, DrainOrder, Mode, Op, VolumeId, VolumeSpec};
use tidepool_engine::format::{
    CHECKPOINT_MAGIC, Geometry, PAGE_MAGIC, RECORD_MAGIC, SEGMENT_MAGIC, SLOT_COPIES, SLOTS,
    SUMMARY_MAGIC, SUPERBLOCK_MAGIC, SUPERBLOCKS,
};

/// Images.
pub(super) const COUNT: u8 = 4;
/// Smallest cache device, and smallest segments.
const CACHE_BYTES: u64 = 64 * MIB;
const SEGMENT_BYTES: u32 = 256 << 10;

/// Kinds of blocks that mean something.
pub(super) const KINDS: usize = 6;

/// An image.
pub(super) struct Base {
    pub(super) geo: Geometry,
    pub(super) blocks: HashMap<u32, Box<Block>>,
    /// Blocks by what they are: superblocks, headers and pages of checkpoints (of each the first
    /// copy), headers of segments, records and summaries.
    pub(super) structures: [Vec<u32>; KINDS],
}

impl Base {
    /// The image that an input's first byte chooses.
    pub(super) fn of(flags: u8) -> &'static Base {
        static BASES: [OnceLock<Base>; COUNT as usize] =
            [const { OnceLock::new() }; COUNT as usize];
        let number = (flags & 0x0f) % COUNT;
        BASES[usize::from(number)].get_or_init(|| match number {
            0 => Base::read(World::with_segments(CACHE_BYTES, SEGMENT_BYTES, &[])),
            1 => Base::read(busy()),
            2 => Base::read(reclaimed()),
            _ => Base::read(shrinking()),
        })
    }

    fn read(world: World) -> Base {
        let bytes = world.device.0;
        let chunks = bytes.chunks_exact(BLOCK_BYTES).enumerate();
        let used = chunks.filter(|(_, block)| block.iter().any(|&byte| byte != 0));
        let block =
            |bytes: &[u8]| -> Box<Block> { Box::new(bytes.try_into().expect("a whole block")) };
        let blocks: HashMap<u32, Box<Block>> =
            used.map(|(n, bytes)| (n as u32, block(bytes))).collect();
        let geo = Geometry::new([9; 16], bytes.len() as u64, Some(SEGMENT_BYTES))
            .expect("as it was formatted");
        let mut structures: [Vec<u32>; KINDS] = Default::default();
        let mut numbers: Vec<u32> = blocks.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            if second_copy(&geo, number).is_none()
                && let Some(kind) = kind_of(&blocks[&number])
            {
                structures[kind].push(number);
            }
        }
        Base { geo, blocks, structures }
    }
}

/// What a block is, by its first bytes.
pub(super) fn kind_of(block: &Block) -> Option<usize> {
    if block[..8] == SUPERBLOCK_MAGIC {
        return Some(0);
    }
    let magics = [CHECKPOINT_MAGIC, PAGE_MAGIC, SEGMENT_MAGIC, RECORD_MAGIC, SUMMARY_MAGIC];
    magics.iter().position(|magic| block[..4] == *magic).map(|at| at + 1)
}

/// The first copy of a block that is a second one.
fn second_copy(geo: &Geometry, number: u32) -> Option<u32> {
    if number == SUPERBLOCKS[1] {
        return Some(SUPERBLOCKS[0]);
    }
    (0..SLOTS).find_map(|slot| {
        let at = number.checked_sub(geo.slot_block(slot, 1)).filter(|at| *at < geo.slot_blocks)?;
        Some(geo.slot_block(slot, 0) + at)
    })
}

/// The other copy of a block that has two.
pub(super) fn twin(geo: &Geometry, number: u32) -> Option<u32> {
    if number == SUPERBLOCKS[0] {
        return Some(SUPERBLOCKS[1]);
    }
    (0..SLOTS).find_map(|slot| {
        let at = number.checked_sub(geo.slot_block(slot, 0)).filter(|at| *at < geo.slot_blocks)?;
        Some(geo.slot_block(slot, SLOT_COPIES - 1) + at)
    })
}

fn grouped(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, size_bytes, Mode::WriteBack) }
}

/// Volumes of each kind with everything that a log can say: before the newest checkpoint and behind
/// it, open segments and full ones, data, zeroes, blocks of the read cache, invalidations.
fn busy() -> World {
    let volumes = [
        spec("a", 8 * MIB + 512, Mode::WriteBack),
        grouped("b", 32 * MIB),
        spec("c", MIB, Mode::WriteThrough),
    ];
    let mut w = World::with_segments(CACHE_BYTES, SEGMENT_BYTES, &volumes);
    for quarter in 0..4 {
        w.write(0, quarter * (256 << 10), &pattern(quarter, 256 << 10));
    }
    w.drain(0);
    w.write(1, 0, &pattern(9, 128 << 10));
    w.op(1, Op::Discard { fua: false }, 16 * MIB, 4 * MIB).expect("a discard");
    w.read(2, 0, 64 << 10);
    w.read(0, 8 * MIB, 512);
    // Until it is in the read cache.
    w.pass(100_000_000);
    w.backend_stopped = true;
    w.write(0, 4 * MIB, &pattern(10, 64 << 10));
    w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 5 * MIB, MIB).expect("zeroes");
    // With this comes a checkpoint.
    w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(0), 32 * MIB, c)).expect("recorded");
    w.write(0, 64 << 10, &pattern(2, 128 << 10));
    w.op(0, Op::Discard { fua: false }, 6 * MIB, MIB).expect("a discard");
    w.write(0, 8 * MIB, &pattern(3, 512));
    w.write(1, 18 * MIB, &pattern(11, 16 << 10));
    w.flush(0);
    w.write(0, 0, &pattern(12, 8 << 10));
    w.backend_stopped = false;
    w.run();
    w.read(2, 512 << 10, 32 << 10);
    w.pass(100_000_000);
    w.control(|e, now, c| e.set_mode(now, VolumeId(2), Mode::WriteAround, c)).expect("changed");
    w.write(2, 512 << 10, &pattern(13, 4 << 10));
    w
}

/// A device that was full: segments have been reclaimed, and blocks that were in use moved. What is
/// in them is zero, which keeps the image small.
fn reclaimed() -> World {
    let mut w =
        World::with_segments(CACHE_BYTES, SEGMENT_BYTES, &[spec("a", 96 * MIB, Mode::WriteBack)]);
    let zeroes = vec![0; 256 << 10];
    for n in 0..360 {
        w.write(0, n * (256 << 10), &zeroes);
        if n % 8 < 7 {
            continue;
        }
        w.drain(0);
        for _ in 0..3 {
            w.read(0, 0, 64 << 10);
        }
    }
    w.pass(100_000_000);
    // What is left of it is soon read: cores are opened several times for each input.
    w.op(0, Op::Discard { fua: false }, MIB, 89 * MIB).expect("a discard");
    w.drain(0);
    w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(0), 32 * MIB, c)).expect("recorded");
    w
}

/// Volumes that were becoming smaller: of one the checkpoint knows it and the log does not, the
/// other has begun.
fn shrinking() -> World {
    let volumes = [spec("a", 16 * MIB, Mode::WriteBack), grouped("b", 16 * MIB)];
    let mut w = World::with_segments(CACHE_BYTES, SEGMENT_BYTES, &volumes);
    w.stopped = vec![VolumeId(1)];
    w.holds = |op| matches!(op, BackendOp::Resize { .. });
    for volume in 0..2 {
        w.write(volume, 0, &pattern(20, 64 << 10));
        w.write(volume, 4 * MIB - 4096, &pattern(21, 64 << 10));
        w.write(volume, 12 * MIB, &pattern(22, 64 << 10));
    }
    w.pass(100_000_000);
    for volume in [1, 0] {
        let control = w.fresh();
        w.engine.resize(w.now, VolumeId(volume), 4 * MIB, control);
        w.run();
    }
    w.pass(2_000_000_000);
    w.write(0, MIB, &pattern(23, 64 << 10));
    w
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_engine::format::{Entry, EntryKind, RecordHeader, RecordKind};
    use zerocopy::FromBytes;

    #[test]
    fn the_images_have_everything_that_can_stand_on_a_device() {
        let (mut kinds, mut entries) = (Vec::new(), Vec::new());
        for flags in 0..COUNT {
            let base = Base::of(flags);
            for number in &base.structures[4] {
                let block = &base.blocks[number];
                let (header, rest) =
                    RecordHeader::read_from_prefix(&block[..]).expect("a block has room for it");
                kinds.push(header.kind);
                for entry in rest.chunks_exact(12).take(header.entries.get().into()) {
                    entries.push(Entry::read_from_bytes(entry).expect("twelve bytes").kind());
                }
            }
        }
        for kind in [RecordKind::Write, RecordKind::Fill, RecordKind::Move] {
            assert!(kinds.contains(&(kind as u8)), "{kind:?}");
        }
        use EntryKind::{Data, Discard, Invalidate, WriteZeroes};
        for kind in [Data, Discard, WriteZeroes, Invalidate] {
            assert!(entries.contains(&Some(kind)), "{kind:?}");
        }
        let busy = Base::of(1);
        assert!(busy.structures.iter().all(|blocks| !blocks.is_empty()));
    }
}
