//! A short memory of blocks that were evicted: one that comes back soon deserves a better place.
//!
//! Only fingerprints are kept, 12 bits each, ten to a bucket of 16 bytes; a bucket forgets its
//! oldest first. A block that was never evicted is taken for one with a probability of at most 10 /
//! 4,095 (0.25 %) when the memory is full; such a mistake costs a place in the cache, never data.

use crate::api::VolumeId;
use crate::base::mutation::mutated;

/// Bits of a fingerprint. Zero stands for an empty place.
const FINGERPRINT_BITS: u32 = 12;
/// Fingerprints of one bucket.
const PLACES: u32 = 10;
/// Blocks of the cache device for each one that [`Ghost::for_device`] remembers: 0.27 bytes a
/// block, which is what the memory budget of blocks cached in sequence leaves.
pub const DEVICE_BLOCKS_PER_ENTRY: usize = 6;
const FINGERPRINT_MASK: u128 = (1 << FINGERPRINT_BITS) - 1;
const BUCKET_MASK: u128 = (1 << (PLACES * FINGERPRINT_BITS)) - 1;

/// A bounded set of recently evicted blocks.
pub struct Ghost {
    /// Youngest fingerprint in the lowest bits.
    buckets: Vec<u128>,
}

impl Ghost {
    /// A ghost that befits a cache device of this many blocks.
    pub fn for_device(device_blocks: usize) -> Ghost {
        Ghost::new(device_blocks / DEVICE_BLOCKS_PER_ENTRY)
    }

    /// Room for `entries` blocks (rounded up to whole buckets, at least one), at 1.6 bytes each.
    /// The memory is touched only as it fills.
    pub fn new(entries: usize) -> Ghost {
        Ghost { buckets: vec![0; entries.div_ceil(PLACES as usize).max(1)] }
    }

    /// Remembers a block.
    pub fn insert(&mut self, volume: VolumeId, block: u64) {
        let (bucket, fingerprint) = self.place(volume, block);
        let bucket = &mut self.buckets[bucket];
        *bucket = (*bucket << FINGERPRINT_BITS | fingerprint) & BUCKET_MASK;
    }

    /// Tells whether a block is remembered, and forgets it.
    pub fn take(&mut self, volume: VolumeId, block: u64) -> bool {
        if mutated!(GhostKnowsEverything) {
            return true;
        }
        let (bucket, fingerprint) = self.place(volume, block);
        let bucket = &mut self.buckets[bucket];
        for place in 0..PLACES {
            let shift = place * FINGERPRINT_BITS;
            if *bucket >> shift & FINGERPRINT_MASK == fingerprint {
                let younger = (1 << shift) - 1;
                *bucket = *bucket & younger | *bucket >> FINGERPRINT_BITS & !younger;
                return true;
            }
        }
        false
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> usize {
        self.buckets.len() * size_of::<u128>()
    }

    /// The bucket and the fingerprint of a block, from independent bits of one hash.
    fn place(&self, volume: VolumeId, block: u64) -> (usize, u128) {
        let hash = mix(block ^ u64::from(volume.0) << 48);
        let bucket = (u128::from(hash) * self.buckets.len() as u128) >> 64;
        let fingerprint = mix(hash) % u64::from(FINGERPRINT_MASK as u32) + 1;
        (bucket as usize, u128::from(fingerprint))
    }
}

/// The finaliser of SplitMix64: every input bit reaches every output bit.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOLUME: VolumeId = VolumeId(3);

    #[test]
    fn what_was_inserted_last_is_found_once() {
        let mut ghost = Ghost::new(100_000);
        for block in 0..20_000 {
            ghost.insert(VOLUME, block);
        }
        // A fifth of the room: overflow of a bucket (more than ten where two are expected) is rare.
        let found = (0..20_000).filter(|&b| ghost.take(VOLUME, b)).count();
        assert!(found >= 19_990, "{found} of 20000 found");
        let again = (0..20_000).filter(|&b| ghost.take(VOLUME, b)).count();
        assert!(again <= 10, "{again} found twice");
    }

    #[test]
    fn a_full_memory_keeps_the_newest_and_drops_the_oldest() {
        let mut ghost = Ghost::new(10_000);
        for block in 0..100_000 {
            ghost.insert(VOLUME, block);
        }
        let newest = (97_000..100_000).filter(|&b| ghost.take(VOLUME, b)).count();
        let oldest = (0..50_000).filter(|&b| ghost.take(VOLUME, b)).count();
        assert!(newest >= 2_980, "{newest} of the newest 3000 found");
        assert!(oldest <= 50_000 / 300, "{oldest} of the oldest 50000 found");
    }

    #[test]
    fn strangers_are_taken_for_known_in_at_most_a_quarter_percent() {
        let mut ghost = Ghost::new(100_000);
        for block in 0..1_000_000 {
            ghost.insert(VOLUME, block);
        }
        let mut strangers = 0;
        for block in 0..400_000 {
            let bucket = ghost.place(VolumeId(4), block).0;
            let before = ghost.buckets[bucket];
            strangers += usize::from(ghost.take(VolumeId(4), block));
            ghost.buckets[bucket] = before;
        }
        assert!(strangers <= 400_000 * 10 / 4_095 * 11 / 10, "{strangers} of 400000 strangers");
        assert!(strangers > 0, "a full memory makes some mistakes");
    }

    proptest! {
        #[test]
        fn a_bucket_is_a_queue_of_ten(steps in prop::collection::vec((any::<bool>(), 0u64..20), 1..200)) {
            let mut ghost = Ghost::new(1);
            let mut model: Vec<u128> = Vec::new();
            for (insert, block) in steps {
                let fingerprint = ghost.place(VOLUME, block).1;
                if insert {
                    ghost.insert(VOLUME, block);
                    model.insert(0, fingerprint);
                    model.truncate(PLACES as usize);
                } else {
                    let at = model.iter().position(|&f| f == fingerprint);
                    prop_assert_eq!(ghost.take(VOLUME, block), at.is_some());
                    at.map(|i| model.remove(i));
                }
            }
            ghost.clear();
            prop_assert!((0..20).all(|b| !ghost.take(VOLUME, b)));
        }
    }
}
