//! A small random number generator that one seed reproduces.

/// SplitMix64: every seed is usable, and the state is one word.
#[derive(Debug, Clone)]
pub struct Rng(u64);

/// One step of mixing; also a cheap hash of a word.
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..bound`; `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "a range holds at least one number");
        // The high half of the product is uniform except for a bias of at most 2^-64 * bound, which
        // no test can notice.
        ((u128::from(self.word()) * u128::from(bound)) >> 64) as u64
    }

    /// True with a probability of `percent` per cent.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The seed of a test run: `TIDEPOOL_SEED` if it is set to a number, else `default`. The seed is
/// printed, so that a failure can be replayed.
pub fn seed(default: u64) -> u64 {
    let seed =
        std::env::var("TIDEPOOL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    println!("seed {seed} (replay with TIDEPOOL_SEED={seed})");
    seed
}
