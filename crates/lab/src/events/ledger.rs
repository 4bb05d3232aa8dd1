//! What a client was promised of each block, and whether an image keeps it.

use std::io::{self, Read};

use crate::stamps::{self, Origin, SECTOR_BYTES, Stamp, Version};

/// A block that is written to.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// The newest version that was sent; 0 for none.
    sent: Version,
    /// The newest one that was acknowledged.
    acknowledged: Version,
    /// When it was.
    acknowledged_s: f64,
    /// When the first one was, if one was.
    first_acknowledged_s: f64,
}

/// Blocks of an image that are written to by one request at a time, so that their versions are in order.
#[derive(Debug)]
pub(crate) struct Region {
    origin: Origin,
    block_bytes: u64,
    /// The number of its first block in the image.
    first: u64,
    blocks: Vec<Block>,
    last: Version,
    writes: u64,
    wrong_reads: u64,
}

/// What an image keeps of what was promised.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Kept {
    /// Blocks of which a write was acknowledged.
    pub(crate) blocks: u64,
    /// Those of them that lack the newest one.
    pub(crate) lost: u64,
    /// When the oldest and the newest of what is lost were acknowledged.
    pub(crate) lost_from_to_s: Option<(f64, f64)>,
}

impl Region {
    /// So many blocks from one on, to which nothing was written yet.
    pub(crate) fn new(origin: Origin, block_bytes: u64, first: u64, blocks: u64) -> Region {
        let blocks = vec![Block::default(); blocks as usize];
        Region { origin, block_bytes, first, blocks, last: 0, writes: 0, wrong_reads: 0 }
    }

    /// Its blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Writes that were acknowledged.
    pub(crate) fn writes(&self) -> u64 {
        self.writes
    }

    /// Blocks of which a write was acknowledged.
    pub(crate) fn acknowledged_blocks(&self) -> u64 {
        self.blocks.iter().filter(|block| block.acknowledged > 0).count() as u64
    }

    /// Blocks of which one write was acknowledged before an event at `event_s`, and another one from then on: the image shows only whether
    /// it has the newer one.
    pub(crate) fn overwritten_blocks(&self, event_s: f64) -> u64 {
        let is_overwritten = |block: &&Block| {
            block.acknowledged > 0 && block.first_acknowledged_s < event_s && block.acknowledged_s >= event_s
        };
        self.blocks.iter().filter(is_overwritten).count() as u64
    }

    /// Reads that returned what cannot be there.
    pub(crate) fn wrong_reads(&self) -> u64 {
        self.wrong_reads
    }

    /// Where a block is in the image, in bytes.
    pub(crate) fn offset(&self, block: u64) -> u64 {
        (self.first + block) * self.block_bytes
    }

    /// A write of a block is about to be sent: makes its content.
    pub(crate) fn write(&mut self, block: u64, data: &mut [u8]) {
        self.last += 1;
        self.blocks[block as usize].sent = self.last;
        for (sector, bytes) in (self.sector(block)..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
            Stamp { origin: self.origin, sector, version: self.last }.fill(bytes);
        }
    }

    /// The write of a block that was sent last is acknowledged.
    pub(crate) fn acknowledge(&mut self, block: u64, now_s: f64) {
        let block = &mut self.blocks[block as usize];
        if block.acknowledged == 0 {
            block.first_acknowledged_s = now_s;
        }
        (block.acknowledged, block.acknowledged_s) = (block.sent, now_s);
        self.writes += 1;
    }

    /// A block was read.
    pub(crate) fn read(&mut self, block: u64, data: &[u8]) {
        self.wrong_reads += u64::from(!self.may_hold(block, data));
    }

    /// The number of a block's first sector.
    fn sector(&self, block: u64) -> u64 {
        self.offset(block) / SECTOR_BYTES as u64
    }

    /// Whether a block may hold this: what was acknowledged, or something newer. Nothing is said of a block of which nothing was
    /// acknowledged.
    fn may_hold(&self, block: u64, data: &[u8]) -> bool {
        let Block { sent, acknowledged, .. } = self.blocks[block as usize];
        let good = |(sector, bytes): (u64, &[u8])| {
            stamps::read(bytes).is_some_and(|found| {
                found.origin == self.origin
                    && found.sector == sector
                    && (acknowledged..=sent).contains(&found.version)
            })
        };
        acknowledged == 0 || (self.sector(block)..).zip(data.chunks_exact(SECTOR_BYTES)).all(good)
    }
}

/// Compares an image with all regions of it, which follow one another from its begin on.
///
/// # Errors
/// When the image cannot be read, or is too short.
pub(crate) fn compare(regions: &[Region], image: &mut dyn Read) -> io::Result<Kept> {
    let mut kept = Kept::default();
    let mut next = 0;
    for region in regions {
        debug_assert_eq!(region.first, next, "regions follow one another");
        next += region.blocks();
        let mut data = vec![0; region.block_bytes as usize];
        for (number, block) in (0..).zip(&region.blocks) {
            image.read_exact(&mut data)?;
            if block.acknowledged == 0 {
                continue;
            }
            kept.blocks += 1;
            if !region.may_hold(number, &data) {
                kept.lost += 1;
                let at = block.acknowledged_s;
                let (from, to) = kept.lost_from_to_s.unwrap_or((at, at));
                kept.lost_from_to_s = Some((from.min(at), to.max(at)));
            }
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { seed: 7, volume: 1 };
    const BLOCK_BYTES: usize = 1024;

    /// Regions of two and one blocks, and what the image holds of them.
    fn regions() -> (Vec<Region>, Vec<Vec<u8>>) {
        let regions = vec![Region::new(ORIGIN, 1024, 0, 2), Region::new(ORIGIN, 1024, 2, 1)];
        (regions, vec![vec![0xee; BLOCK_BYTES]; 3])
    }

    fn found(regions: &[Region], image: &[Vec<u8>]) -> (u64, u64) {
        let kept = compare(regions, &mut &image.concat()[..]).expect("it is long enough");
        (kept.blocks, kept.lost)
    }

    #[test]
    fn what_was_acknowledged_is_there_or_lost_and_of_the_rest_nothing_is_said() {
        let (mut regions, mut image) = regions();
        assert_eq!(found(&regions, &image), (0, 0));
        let (mut first, mut second, mut third) =
            (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
        regions[0].write(1, &mut first);
        assert_eq!(found(&regions, &image), (0, 0), "it was not acknowledged");
        regions[0].acknowledge(1, 1.0);
        assert_eq!(found(&regions, &image), (1, 1), "it is not there");
        image[1] = first.clone();
        assert_eq!(found(&regions, &image), (1, 0));
        // One that was sent and not acknowledged may be there, in part too, or not.
        regions[0].write(1, &mut second);
        assert_eq!(found(&regions, &image), (1, 0));
        image[1][..SECTOR_BYTES].copy_from_slice(&second[..SECTOR_BYTES]);
        assert_eq!(found(&regions, &image), (1, 0));
        regions[0].acknowledge(1, 2.5);
        assert_eq!(found(&regions, &image), (1, 1), "half of it is older");
        regions[1].write(0, &mut third);
        regions[1].acknowledge(0, 0.5);
        let kept = compare(&regions, &mut &image.concat()[..]).expect("it is long enough");
        assert_eq!(kept, Kept { blocks: 2, lost: 2, lost_from_to_s: Some((0.5, 2.5)) });
        (image[1], image[2]) = (second, third.clone());
        assert_eq!(found(&regions, &image), (2, 0));
        // What belongs elsewhere, or is damaged, is not what was written.
        image[1] = third.clone();
        assert_eq!(found(&regions, &image), (2, 1));
        image[2][BLOCK_BYTES - 1] ^= 1;
        assert_eq!(found(&regions, &image), (2, 2));
        assert_eq!(regions.iter().map(Region::writes).sum::<u64>(), 3);
        assert!(compare(&regions, &mut &image[0][..]).is_err(), "an image that ends tells nothing");
    }

    #[test]
    fn a_block_that_was_written_before_an_event_and_since_is_counted_by_itself() {
        let (mut regions, _) = regions();
        let mut data = vec![0; BLOCK_BYTES];
        let mut write = |region: &mut Region, block, at_s| {
            region.write(block, &mut data);
            region.acknowledge(block, at_s);
        };
        // One before and after, one twice before, one only after.
        write(&mut regions[0], 0, 1.0);
        write(&mut regions[0], 0, 5.0);
        write(&mut regions[0], 1, 1.0);
        write(&mut regions[0], 1, 2.0);
        write(&mut regions[1], 0, 4.0);
        write(&mut regions[1], 0, 6.0);
        let overwritten =
            |event_s| regions.iter().map(|region| region.overwritten_blocks(event_s)).sum::<u64>();
        assert_eq!(overwritten(3.0), 1);
        assert_eq!((overwritten(0.5), overwritten(7.0)), (0, 0), "all is since, or all is before");
        assert_eq!(overwritten(5.0), 2, "a write at the very moment is one since");
        // One that was sent again and not acknowledged is not overwritten: the image may have either.
        regions[0].write(1, &mut data);
        assert_eq!(regions[0].overwritten_blocks(3.0), 1);
    }

    #[test]
    fn a_read_of_something_older_than_what_was_acknowledged_is_wrong() {
        let (mut regions, _) = regions();
        let region = &mut regions[1];
        let (mut old, mut new) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
        region.read(0, &old);
        region.write(0, &mut old);
        region.read(0, &[0; BLOCK_BYTES]);
        region.acknowledge(0, 0.0);
        region.read(0, &old);
        region.write(0, &mut new);
        region.read(0, &old);
        region.read(0, &new);
        assert_eq!(region.wrong_reads(), 0);
        region.acknowledge(0, 1.0);
        region.read(0, &old);
        assert_eq!(region.wrong_reads(), 1);
    }
}
