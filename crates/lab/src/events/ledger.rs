//! Acknowledged writes of each block, and whether an image holds them.

use std::io::{self, Read};

use tidepool_cluster::stamps::{self, Origin, SECTOR_BYTES, Stamp, Version};

/// A block that is written to.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Newest version that was sent; 0 if none.
    sent: Version,
    /// Newest version that was acknowledged; 0 if none.
    acknowledged: Version,
    /// When the newest version was acknowledged.
    acknowledged_s: f64,
    /// When the first version was acknowledged, if one was.
    first_acknowledged_s: f64,
}

/// Blocks of an image to which one request at a time is sent, so that their versions are in order.
#[derive(Debug)]
pub(crate) struct Region {
    origin: Origin,
    block_bytes: u64,
    /// Number of its first block in the image.
    first: u64,
    blocks: Vec<Block>,
    last: Version,
    writes: u64,
    wrong_reads: u64,
}

/// What an image holds of the acknowledged writes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Kept {
    /// Blocks with an acknowledged write.
    pub(crate) blocks: u64,
    /// Blocks among them that lack the newest acknowledged write.
    pub(crate) lost: u64,
    /// When the oldest and the newest lost writes were acknowledged.
    pub(crate) lost_from_to_s: Option<(f64, f64)>,
}

impl Region {
    /// `blocks` blocks from `first` on, without writes so far.
    pub(crate) fn new(origin: Origin, block_bytes: u64, first: u64, blocks: u64) -> Region {
        let blocks = vec![Block::default(); blocks as usize];
        Region { origin, block_bytes, first, blocks, last: 0, writes: 0, wrong_reads: 0 }
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Number of acknowledged writes.
    pub(crate) fn writes(&self) -> u64 {
        self.writes
    }

    /// Number of blocks with an acknowledged write.
    pub(crate) fn acknowledged_blocks(&self) -> u64 {
        self.blocks.iter().filter(|block| block.acknowledged > 0).count() as u64
    }

    /// Blocks with one write acknowledged before an event at `event_s` and another from then on.
    /// The image can show only whether it holds the newer write.
    pub(crate) fn overwritten_blocks(&self, event_s: f64) -> u64 {
        let is_overwritten = |block: &&Block| {
            block.acknowledged > 0
                && block.first_acknowledged_s < event_s
                && block.acknowledged_s >= event_s
        };
        self.blocks.iter().filter(is_overwritten).count() as u64
    }

    /// Number of reads that returned data that cannot be there.
    pub(crate) fn wrong_reads(&self) -> u64 {
        self.wrong_reads
    }

    /// Offset of a block in the image in bytes.
    pub(crate) fn offset(&self, block: u64) -> u64 {
        (self.first + block) * self.block_bytes
    }

    /// Fills `data` with the content of a block's next version, which is about to be sent.
    pub(crate) fn write(&mut self, block: u64, data: &mut [u8]) {
        self.last += 1;
        self.blocks[block as usize].sent = self.last;
        for (sector, bytes) in (self.sector(block)..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
            Stamp { origin: self.origin, sector, version: self.last }.fill(bytes);
        }
    }

    /// Records that the last write of a block was acknowledged.
    pub(crate) fn acknowledge(&mut self, block: u64, now_s: f64) {
        let block = &mut self.blocks[block as usize];
        if block.acknowledged == 0 {
            block.first_acknowledged_s = now_s;
        }
        (block.acknowledged, block.acknowledged_s) = (block.sent, now_s);
        self.writes += 1;
    }

    /// Checks data that was read from a block.
    pub(crate) fn read(&mut self, block: u64, data: &[u8]) {
        self.wrong_reads += u64::from(!self.may_hold(block, data));
    }

    /// Number of a block's first sector.
    fn sector(&self, block: u64) -> u64 {
        self.offset(block) / SECTOR_BYTES as u64
    }

    /// Whether a block may hold this data: the acknowledged version or a newer one. True if no
    /// write of the block was acknowledged.
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

/// Compares an image with its regions, which follow one another from the beginning of the image.
///
/// # Errors
/// If the image cannot be read, or is too short.
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

    /// Regions of two blocks and of one block, and the image's blocks.
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
        // A write that was sent but not acknowledged may be there, in part, or not at all.
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
        // Data that belongs elsewhere, or is damaged, is not what was written.
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
        // One block written before and after the event, one twice before, one only after.
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
        // A block that was sent again, and not acknowledged, does not count as overwritten: the
        // image may hold either version.
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
