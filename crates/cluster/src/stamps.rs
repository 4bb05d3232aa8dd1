//! The content of stamped sectors: a read sector shows where it came from.

use crate::random::mix;

/// Bytes of one stamped sector: the smallest unit that a client can write.
pub const SECTOR_BYTES: usize = 512;
/// First word of every stamped sector.
const MAGIC: u64 = u64::from_le_bytes(*b"tidestmp");
/// Words of a stamp's header. The filler after the header depends on them.
const HEADER_WORDS: usize = 5;

/// Number of a write within its run: unique, and larger for later writes. 0 is the content before
/// the first write.
pub type Version = u32;

/// Flag of a version whose content is zeros: a discard, a write of zeroes, or an untouched sector.
pub const ZEROS: Version = 1 << 31;

/// Identity of one run's sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The seed of the run.
    pub seed: u64,
    /// Number of the volume: shows when one volume holds another volume's data.
    pub volume: u32,
}

/// The origin, place and version that a sector carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Run and volume of the write.
    pub origin: Origin,
    /// Sector number within the volume.
    pub sector: u64,
    /// The write's version.
    pub version: Version,
}

impl Stamp {
    /// The words of the header: magic, seed, volume and version, sector, checksum.
    fn header(&self) -> [u64; HEADER_WORDS] {
        let place = u64::from(self.origin.volume) << 32 | u64::from(self.version);
        let sum = mix(mix(mix(MAGIC ^ self.origin.seed) ^ place) ^ self.sector);
        [MAGIC, self.origin.seed, place, self.sector, sum]
    }

    /// The sector's words, header and filler.
    fn words(&self) -> impl Iterator<Item = u64> {
        let header = self.header();
        let filler = (HEADER_WORDS..SECTOR_BYTES / 8).map(move |index| {
            header[4].wrapping_add(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        header.into_iter().chain(filler)
    }

    /// Writes the sector's content; a version marked [`ZEROS`] gives zeros.
    pub fn fill(&self, sector: &mut [u8]) {
        assert_eq!(sector.len(), SECTOR_BYTES);
        if self.version & ZEROS != 0 {
            sector.fill(0);
            return;
        }
        for (bytes, word) in sector.chunks_exact_mut(8).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Whether `sector` holds exactly this stamp's content.
    pub fn matches(&self, sector: &[u8]) -> bool {
        assert_eq!(sector.len(), SECTOR_BYTES);
        if self.version & ZEROS != 0 {
            return sector.iter().all(|&byte| byte == 0);
        }
        sector.chunks_exact(8).zip(self.words()).all(|(bytes, word)| bytes == word.to_le_bytes())
    }
}

/// The word of a sector with this number.
fn word(sector: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(sector[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
}

/// The stamp in a sector's header, or `None` if the sector does not begin with a stamp. The rest of
/// the sector may be damaged.
fn header(sector: &[u8]) -> Option<Stamp> {
    let place = word(sector, 2);
    (word(sector, 0) == MAGIC).then(|| Stamp {
        origin: Origin { seed: word(sector, 1), volume: (place >> 32) as u32 },
        sector: word(sector, 3),
        version: place as u32,
    })
}

/// The stamp that a sector holds, complete and undamaged. `None` if the sector holds something
/// else, such as zeros.
pub fn read(sector: &[u8]) -> Option<Stamp> {
    header(sector).filter(|stamp| stamp.version & ZEROS == 0 && stamp.matches(sector))
}

/// What a sector holds, in words, for the report of a violation.
pub fn describe(sector: &[u8]) -> String {
    if sector.iter().all(|&byte| byte == 0) {
        return "zeros".into();
    }
    let Some(Stamp { origin: Origin { seed, volume }, sector: place, version }) = header(sector)
    else {
        return format!("bytes of no stamp, beginning with {:02x?}", &sector[..16]);
    };
    match read(sector) {
        Some(_) => format!("version {version} of sector {place} of volume {volume}, seed {seed}"),
        None => {
            format!(
                "a damaged stamp (version {version} of sector {place} of volume {volume}, seed {seed})"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_matches_only_its_own_origin_place_and_version() {
        let stamp = Stamp { origin: Origin { seed: 7, volume: 1 }, sector: 9, version: 3 };
        let mut sector = [0xaa; SECTOR_BYTES];
        stamp.fill(&mut sector);
        assert!(stamp.matches(&sector));
        for other in [
            Stamp { version: 4, ..stamp },
            Stamp { sector: 10, ..stamp },
            Stamp { origin: Origin { seed: 8, volume: 1 }, ..stamp },
            Stamp { origin: Origin { seed: 7, volume: 2 }, ..stamp },
            Stamp { version: ZEROS, ..stamp },
        ] {
            assert!(!other.matches(&sector));
        }
        assert_eq!(describe(&sector), "version 3 of sector 9 of volume 1, seed 7");
        assert_eq!(read(&sector), Some(stamp));
        sector[SECTOR_BYTES - 1] ^= 1;
        assert!(!stamp.matches(&sector), "the last byte counts");
        assert_eq!(read(&sector), None);
        assert!(describe(&sector).starts_with("a damaged stamp"));
        Stamp { version: ZEROS, ..stamp }.fill(&mut sector);
        assert_eq!(describe(&sector), "zeros");
    }
}
