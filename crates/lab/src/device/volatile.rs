//! A write cache that forgets when the power fails: what is on the media, and what of the rest gets there.
//!
//! What a reader gets is in the device's file. Here is, sector by sector, what the media holds instead, and in which order the writes
//! came that it does not have for sure.

use std::collections::{BTreeMap, HashMap};

use crate::random::Random;

/// What the media takes as a whole or not at all, in bytes.
pub(super) const SECTOR_BYTES: usize = 512;
/// Parts of the writes that a power failure takes, in percent: one of them, by chance.
const LOST_PERCENT: [u64; 6] = [0, 3, 20, 50, 90, 100];
/// Part of the others that it tears, in percent.
const TORN_PERCENT: u64 = 15;

/// A write, in the order in which they came, from 1 on.
pub(super) type Number = u64;

/// The content of one sector.
pub(super) type Sector = Box<[u8; SECTOR_BYTES]>;

/// Whole sectors of the device, before a write and after it.
#[derive(Debug)]
pub(super) struct Piece {
    /// Number of the first.
    pub(super) sector: u64,
    /// What they held.
    pub(super) before: Vec<u8>,
    /// What they hold now; as many bytes.
    pub(super) after: Vec<u8>,
}

/// What a power failure made of the writes that were not stable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    /// Writes that are on the media as they were sent.
    pub kept: u64,
    /// Writes of which a part of the sectors is there.
    pub torn: u64,
    /// Writes of which nothing is there.
    pub lost: u64,
}

/// A write that the media may not have.
#[derive(Debug)]
struct Write {
    /// Numbers of first sectors, and what they hold.
    pieces: Vec<(u64, Vec<u8>)>,
    /// It is over, so that the next flush is to cover it.
    over: bool,
    /// The flush that was to cover it has failed, and the next one knows nothing of it.
    forsaken: bool,
}

/// A sector of the media that may be older than what a reader gets.
#[derive(Debug)]
struct Stable {
    content: Sector,
    /// The write that it is of; 0 for what was there before any that is known here.
    number: Number,
    /// Writes in the cache that are to change it.
    writes: u32,
}

/// A volatile write cache.
#[derive(Debug, Default)]
pub(super) struct Volatile {
    writes: BTreeMap<Number, Write>,
    media: HashMap<u64, Stable>,
    last: Number,
}

impl Write {
    fn sectors(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let of = |(first, bytes): &'_ (u64, Vec<u8>)| *first..*first + (bytes.len() / SECTOR_BYTES) as u64;
        self.pieces.iter().flat_map(move |piece| of(piece).zip(piece.1.chunks_exact(SECTOR_BYTES)))
    }
}

impl Volatile {
    /// Takes a write into the cache.
    pub(super) fn write(&mut self, pieces: Vec<Piece>) -> Number {
        self.last += 1;
        let mut write = Write { pieces: Vec::with_capacity(pieces.len()), over: false, forsaken: false };
        for Piece { sector, before, after } in pieces {
            for (sector, was) in (sector..).zip(before.chunks_exact(SECTOR_BYTES)) {
                let on_media = || Box::new(was.try_into().expect("chunks of a sector"));
                let known = || Stable { content: on_media(), number: 0, writes: 0 };
                self.media.entry(sector).or_insert_with(known).writes += 1;
            }
            write.pieces.push((sector, after));
        }
        self.writes.insert(self.last, write);
        self.last
    }

    /// A write was answered.
    pub(super) fn answered(&mut self, number: Number) {
        if let Some(write) = self.writes.get_mut(&number) {
            write.over = true;
        }
    }

    /// Nothing is under way any more: what is in the cache of writes that were never answered is covered by the next flush, too. The
    /// next process reads it, and takes it for what it is.
    pub(super) fn all_over(&mut self) {
        self.writes.values_mut().for_each(|write| write.over = true);
    }

    /// The writes that a flush which comes now makes stable.
    pub(super) fn flushable(&self) -> Vec<Number> {
        let due = self.writes.iter().filter(|(_, write)| write.over && !write.forsaken);
        due.map(|(&number, _)| number).collect()
    }

    /// A flush of these writes has failed. As after a failed fsync of Linux, no later one makes up for it.
    pub(super) fn forsake(&mut self, numbers: &[Number]) {
        for number in numbers {
            if let Some(write) = self.writes.get_mut(number) {
                write.forsaken = true;
            }
        }
    }

    /// These writes are on the media.
    pub(super) fn stable(&mut self, numbers: &[Number]) {
        for number in numbers {
            let Some(write) = self.writes.remove(number) else { continue };
            for (sector, bytes) in write.sectors() {
                let on_media = self.media.get_mut(&sector).expect("known as long as a write is to change it");
                // An older write that is still in the cache must not come back over it.
                if on_media.number < *number {
                    on_media.content.copy_from_slice(bytes);
                    on_media.number = *number;
                }
                on_media.writes -= 1;
                if on_media.writes == 0 {
                    self.media.remove(&sector);
                }
            }
        }
    }

    /// The power fails: any of the writes may be on the media, in part or not at all, whatever the order in which they came.
    /// Returns sectors with what they hold from now on.
    pub(super) fn lose(&mut self, random: &mut Random) -> (Vec<(u64, Sector)>, Losses) {
        let mut losses = Losses::default();
        let mut media = std::mem::take(&mut self.media);
        let lost_percent = LOST_PERCENT[random.below(LOST_PERCENT.len() as u64) as usize];
        for (number, write) in std::mem::take(&mut self.writes) {
            let sectors = write.sectors().count();
            let (count, kept) = if random.below(100) < lost_percent {
                (&mut losses.lost, vec![false; sectors])
            } else if lost_percent > 0 && random.below(100) < TORN_PERCENT {
                (&mut losses.torn, tear(sectors, random))
            } else {
                (&mut losses.kept, vec![true; sectors])
            };
            *count += 1;
            for ((sector, bytes), _) in write.sectors().zip(kept).filter(|(_, kept)| *kept) {
                let on_media = media.get_mut(&sector).expect("known as long as a write is to change it");
                if on_media.number < number {
                    on_media.content.copy_from_slice(bytes);
                }
            }
        }
        (media.into_iter().map(|(sector, on_media)| (sector, on_media.content)).collect(), losses)
    }
}

/// Which of so many sectors a write has reached that was cut off: the first ones, the last ones, or any.
pub(super) fn tear(sectors: usize, random: &mut Random) -> Vec<bool> {
    let cut = 1 + random.below((sectors.max(2) - 1) as u64) as usize;
    match random.below(3) {
        0 => (0..sectors).map(|sector| sector < cut).collect(),
        1 => (0..sectors).map(|sector| sector >= cut).collect(),
        _ => (0..sectors).map(|_| random.below(2) == 0).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The device's file, as its server keeps it.
    struct Disk {
        sectors: Vec<u8>,
        cache: Volatile,
    }

    impl Disk {
        fn new() -> Disk {
            Disk { sectors: vec![0; 8], cache: Volatile::default() }
        }

        /// Writes `value` to so many sectors.
        fn write(&mut self, first: usize, count: usize, value: u8) -> Number {
            let content = |values: &[u8]| values.iter().flat_map(|&v| [v; SECTOR_BYTES]).collect::<Vec<u8>>();
            let before = content(&self.sectors[first..first + count]);
            self.sectors[first..first + count].fill(value);
            let after = content(&self.sectors[first..first + count]);
            self.cache.write(vec![Piece { sector: first as u64, before, after }])
        }

        fn flush(&mut self) {
            let due = self.cache.flushable();
            self.cache.stable(&due);
        }

        fn lose(&mut self, seed: u64) -> Losses {
            let (found, losses) = self.cache.lose(&mut Random::new(seed));
            for (sector, content) in found {
                self.sectors[sector as usize] = content[0];
            }
            losses
        }
    }

    #[test]
    fn what_was_flushed_stays_and_of_the_rest_anything_may_be_there() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..300 {
            let mut disk = Disk::new();
            let (first, second) = (disk.write(0, 2, 1), disk.write(1, 2, 2));
            disk.cache.answered(first);
            disk.cache.answered(second);
            disk.flush();
            assert!(disk.cache.media.is_empty(), "nothing is left to be lost");
            let third = disk.write(2, 1, 3);
            disk.cache.answered(third);
            disk.write(3, 1, 4);
            disk.lose(seed);
            assert_eq!(disk.sectors[..2], [1, 2], "seed {seed}");
            assert!([2, 3].contains(&disk.sectors[2]) && [0, 4].contains(&disk.sectors[3]), "seed {seed}");
            seen.insert((disk.sectors[2], disk.sectors[3]));
        }
        assert_eq!(seen.len(), 4, "also the later one without the earlier one: {seen:?}");
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_came_and_a_failed_one_is_not_made_up_for() {
        let (mut in_flight, mut failed) = (0, 0);
        for seed in 0..100 {
            let mut disk = Disk::new();
            disk.write(0, 1, 1);
            disk.flush();
            disk.lose(seed);
            in_flight += u32::from(disk.sectors[0] == 0);

            let mut disk = Disk::new();
            let number = disk.write(0, 1, 1);
            disk.cache.answered(number);
            let due = disk.cache.flushable();
            disk.cache.forsake(&due);
            disk.flush();
            disk.lose(seed);
            failed += u32::from(disk.sectors[0] == 0);
        }
        assert!(in_flight > 20 && failed > 20, "{in_flight} and {failed} of 100 are lost");
    }

    #[test]
    fn a_write_that_nobody_waits_for_any_more_is_covered_by_the_next_flush() {
        for seed in 0..100 {
            let mut disk = Disk::new();
            disk.write(0, 1, 1);
            disk.cache.all_over();
            disk.flush();
            disk.lose(seed);
            assert_eq!(disk.sectors[0], 1, "seed {seed}");
        }
    }

    #[test]
    fn an_older_write_does_not_come_back_over_one_that_is_on_the_media() {
        for seed in 0..100 {
            let mut disk = Disk::new();
            disk.write(0, 1, 1);
            let newer = disk.write(0, 1, 2);
            disk.cache.stable(&[newer]);
            disk.lose(seed);
            assert_eq!(disk.sectors[0], 2, "seed {seed}");
        }
    }

    #[test]
    fn writes_are_torn_at_sectors_and_one_seed_gives_one_outcome() {
        let mut torn = 0;
        for seed in 0..200 {
            let outcome = |seed| {
                let mut disk = Disk::new();
                disk.write(0, 8, 1);
                (disk.lose(seed), disk.sectors)
            };
            let (losses, sectors) = outcome(seed);
            assert_eq!(losses.kept + losses.torn + losses.lost, 1);
            assert_eq!(outcome(seed), (losses, sectors.clone()));
            torn += u32::from(sectors.contains(&0) && sectors.contains(&1));
        }
        assert!(torn > 5, "{torn} of 200 are torn");
    }
}
