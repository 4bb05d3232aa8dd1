//! A write cache that loses its content in a power failure: what is on the media, and which of the
//! cached writes get there.
//!
//! The device's file has what a reader gets. The state here has, sector by sector, what the media
//! holds instead, and the order of the writes that may not be on the media.

use std::collections::{BTreeMap, HashMap};

use crate::random::Random;

/// Size of a sector in bytes. The media takes a sector as a whole or not at all.
pub(super) const SECTOR_BYTES: usize = 512;
/// Parts of the writes that a power failure loses, in percent. One of them is picked by chance.
const LOST_PERCENT: [u64; 6] = [0, 3, 20, 50, 90, 100];
/// Part of the remaining writes that the power failure tears, in percent. It tears none if 0 was
/// picked from [`LOST_PERCENT`].
const TORN_PERCENT: u64 = 15;

/// The number of a write, in the order in which writes arrive, from 1.
pub(super) type Number = u64;

/// The content of one sector.
pub(super) type Sector = Box<[u8; SECTOR_BYTES]>;

/// Whole sectors of the device, with their content before and after a write.
#[derive(Debug)]
pub(super) struct Piece {
    /// Number of the first sector.
    pub(super) sector: u64,
    /// Content of the sectors before the write.
    pub(super) before: Vec<u8>,
    /// Content of the sectors after the write; as many bytes as before.
    pub(super) after: Vec<u8>,
}

/// What a power failure did to the writes that were not stable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    /// Writes that are on the media as a whole.
    pub kept: u64,
    /// Torn writes: any of their sectors may be on the media.
    pub torn: u64,
    /// Writes of which no sector is on the media.
    pub lost: u64,
}

/// A write that may not be on the media.
#[derive(Debug)]
struct Write {
    /// Numbers of first sectors, each with the content from there on.
    pieces: Vec<(u64, Vec<u8>)>,
    /// Whether the write is over, so that the next flush has to cover it.
    over: bool,
    /// Whether a flush that should have covered the write has failed. Later flushes do not cover
    /// it.
    forsaken: bool,
}

/// A sector's content on the media, which may be older than what a reader gets.
#[derive(Debug)]
struct Stable {
    content: Sector,
    /// The number of the write that the content is from; 0 for content from before all known
    /// writes.
    number: Number,
    /// Number of writes in the cache that change this sector.
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
        let of = |(first, bytes): &'_ (u64, Vec<u8>)| {
            *first..*first + (bytes.len() / SECTOR_BYTES) as u64
        };
        self.pieces.iter().flat_map(move |piece| of(piece).zip(piece.1.chunks_exact(SECTOR_BYTES)))
    }
}

impl Volatile {
    /// Takes a write into the cache; returns its number.
    pub(super) fn write(&mut self, pieces: Vec<Piece>) -> Number {
        self.last += 1;
        let mut write =
            Write { pieces: Vec::with_capacity(pieces.len()), over: false, forsaken: false };
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

    /// Records that a write was answered.
    pub(super) fn answered(&mut self, number: Number) {
        if let Some(write) = self.writes.get_mut(&number) {
            write.over = true;
        }
    }

    /// Records that no write is under way any more. The next flush then also covers writes that
    /// were never answered, because the next process can read their data from the cache.
    pub(super) fn all_over(&mut self) {
        self.writes.values_mut().for_each(|write| write.over = true);
    }

    /// The writes that a flush makes stable if it arrives now.
    pub(super) fn flushable(&self) -> Vec<Number> {
        let due = self.writes.iter().filter(|(_, write)| write.over && !write.forsaken);
        due.map(|(&number, _)| number).collect()
    }

    /// Records that a flush of these writes has failed. As after a failed fsync of Linux, no later
    /// flush makes up for it.
    pub(super) fn forsake(&mut self, numbers: &[Number]) {
        for number in numbers {
            if let Some(write) = self.writes.get_mut(number) {
                write.forsaken = true;
            }
        }
    }

    /// Puts these writes on the media.
    pub(super) fn stable(&mut self, numbers: &[Number]) {
        for number in numbers {
            let Some(write) = self.writes.remove(number) else { continue };
            for (sector, bytes) in write.sectors() {
                let on_media =
                    self.media.get_mut(&sector).expect("known as long as a write is to change it");
                // An older write that is still in the cache must not overwrite a newer one.
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

    /// Fails the power: any of the cached writes may be on the media, in part or not at all,
    /// whatever the order in which they arrived. Returns the sectors that they changed, with their
    /// content from now on, and the losses.
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
                let on_media =
                    media.get_mut(&sector).expect("known as long as a write is to change it");
                if on_media.number < number {
                    on_media.content.copy_from_slice(bytes);
                }
            }
        }
        (media.into_iter().map(|(sector, on_media)| (sector, on_media.content)).collect(), losses)
    }
}

/// Which sectors of a torn write are on the media: the first ones, the last ones, or any.
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

    /// The sectors of a device's file, as its server keeps them, and the device's cache.
    struct Disk {
        sectors: Vec<u8>,
        cache: Volatile,
    }

    impl Disk {
        fn new() -> Disk {
            Disk { sectors: vec![0; 8], cache: Volatile::default() }
        }

        /// Writes `value` to `count` sectors.
        fn write(&mut self, first: usize, count: usize, value: u8) -> Number {
            let content =
                |values: &[u8]| values.iter().flat_map(|&v| [v; SECTOR_BYTES]).collect::<Vec<u8>>();
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
            assert!(
                [2, 3].contains(&disk.sectors[2]) && [0, 4].contains(&disk.sectors[3]),
                "seed {seed}"
            );
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
