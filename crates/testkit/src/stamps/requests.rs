//! The sequence of requests that one seed gives.

use crate::rng::Rng;
use tidepool_cluster::stamps::SECTOR_BYTES;

/// Sectors of a 4 KiB block.
const BLOCK_SECTORS: u64 = 8;
/// Divisor of the size of the volume. On average at least 70 % of the requests with a range begin
/// in the first part of the volume, which is one sixteenth, so that requests overlap.
const HOT_SHARE: u64 = 16;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Reads and checks the content.
    Read,
    /// Writes stamps.
    Write,
    /// Discards.
    Discard,
    /// Writes zeroes.
    Zeroes,
    /// Flushes.
    Flush,
}

/// One request of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What the request does.
    pub kind: Kind,
    /// First sector.
    pub sector: u64,
    /// Number of sectors; 0 for a flush.
    pub count: u64,
    /// Whether the request carries FUA.
    pub fua: bool,
    /// The number of the connection that sends the request.
    pub connection: usize,
}

/// How often each kind of request comes, in parts of the sum of all kinds, and how large requests
/// are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Discards.
    pub discards: u64,
    /// Writes of zeroes.
    pub zeroes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Percentage of the writes, discards and writes of zeroes that carry FUA.
    pub fua_percent: u64,
    /// Largest request in bytes.
    pub bytes_max: u64,
    /// Whether requests may be unaligned to 4 KiB blocks.
    pub unaligned: bool,
}

impl Default for Mix {
    fn default() -> Self {
        Mix {
            reads: 30,
            writes: 60,
            discards: 4,
            zeroes: 4,
            flushes: 2,
            fua_percent: 3,
            bytes_max: 512 << 10,
            unaligned: true,
        }
    }
}

impl Mix {
    /// Writes of whole blocks only, of at most `bytes_max` bytes.
    pub fn aligned_writes(bytes_max: u64) -> Mix {
        Mix {
            reads: 0,
            writes: 100,
            discards: 0,
            zeroes: 0,
            flushes: 0,
            fua_percent: 0,
            bytes_max,
            unaligned: false,
        }
    }
}

/// An endless sequence of requests; equal for equal seeds and options.
#[derive(Debug, Clone)]
pub struct Requests {
    rng: Rng,
    mix: Mix,
    sectors: u64,
    connections: u64,
}

impl Requests {
    /// The sequence of `seed` for a volume of `sectors` sectors and this number of connections.
    pub fn new(seed: u64, mix: Mix, sectors: u64, connections: usize) -> Requests {
        assert!(
            sectors >= BLOCK_SECTORS && connections > 0,
            "a volume of a block, and a connection to it"
        );
        Requests { rng: Rng::new(seed), mix, sectors, connections: connections as u64 }
    }

    /// The kind of the next request.
    fn kind(&mut self) -> Kind {
        let Mix { reads, writes, discards, zeroes, flushes, .. } = self.mix;
        let parts = [
            (reads, Kind::Read),
            (writes, Kind::Write),
            (discards, Kind::Discard),
            (zeroes, Kind::Zeroes),
            (flushes, Kind::Flush),
        ];
        let mut point = self.rng.below(parts.iter().map(|(part, _)| part).sum());
        for (part, kind) in parts {
            if point < part {
                return kind;
            }
            point -= part;
        }
        unreachable!("the point lies below the sum of the parts")
    }

    /// Number of sectors of the next request: mostly small, sometimes as large as the mix allows.
    fn count(&mut self) -> u64 {
        let largest = (self.mix.bytes_max / SECTOR_BYTES as u64).clamp(BLOCK_SECTORS, self.sectors);
        let bound = match self.rng.below(100) {
            0..45 => BLOCK_SECTORS,
            45..85 => 16 * BLOCK_SECTORS,
            85..97 => 64 * BLOCK_SECTORS,
            _ => largest,
        };
        let count = 1 + self.rng.below(bound.min(largest));
        if self.mix.unaligned && self.rng.chance(30) {
            return count;
        }
        count.next_multiple_of(BLOCK_SECTORS).min(largest / BLOCK_SECTORS * BLOCK_SECTORS)
    }

    /// First sector of a request of `count` sectors.
    fn place(&mut self, count: u64) -> u64 {
        let room = self.sectors - count;
        let reach = if self.rng.chance(70) { (self.sectors / HOT_SHARE).min(room) } else { room };
        let sector = self.rng.below(reach + 1);
        if count.is_multiple_of(BLOCK_SECTORS) {
            sector / BLOCK_SECTORS * BLOCK_SECTORS
        } else {
            sector
        }
    }
}

impl Iterator for Requests {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let kind = self.kind();
        let connection = self.rng.below(self.connections) as usize;
        if kind == Kind::Flush {
            return Some(Request { kind, sector: 0, count: 0, fua: false, connection });
        }
        let count = self.count();
        let sector = self.place(count);
        let fua = kind != Kind::Read && self.rng.chance(self.mix.fua_percent);
        Some(Request { kind, sector, count, fua, connection })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_gives_one_sequence_within_the_volume() {
        let sectors = 100_000;
        let make = |seed| Requests::new(seed, Mix::default(), sectors, 3).take(20_000);
        assert!(make(1).eq(make(1)));
        assert!(!make(1).eq(make(2)));
        let mut seen = std::collections::HashMap::new();
        let mut unaligned = 0;
        for request in make(1) {
            *seen.entry(request.kind).or_insert(0) += 1;
            assert!(request.sector + request.count <= sectors && request.connection < 3);
            assert_eq!(request.count == 0, request.kind == Kind::Flush);
            unaligned += u64::from(request.sector % 8 != 0 || request.count % 8 != 0);
        }
        assert_eq!(seen.len(), 5, "every kind comes: {seen:?}");
        assert!(unaligned > 1000);
        let mix = Mix::aligned_writes(64 << 10);
        assert!(Requests::new(1, mix, sectors, 1).take(5000).all(|request| {
            request.kind == Kind::Write
                && request.sector % 8 == 0
                && request.count % 8 == 0
                && request.count <= 128
        }));
    }
}
