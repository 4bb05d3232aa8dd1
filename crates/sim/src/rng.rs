//! Chance, from one seed: everything that a life does follows from it.
//!
//! A life draws from many streams. Some have a name (`plan`). All others belong to one thing that
//! happens, and its identity names them ([`Chance::keyed`]): one more draw in one of them, or
//! another order, changes nothing in the others. What was drawn can be kept and drawn again
//! ([`Chance::recorded`], [`Chance::replayed`]).

use crate::store::BlockMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What was drawn, by the stream's name, in order.
pub type Draws = BTreeMap<String, Vec<u64>>;

/// Where the streams of one life come from.
#[derive(Debug, Default)]
pub struct Chance {
    seed: u64,
    /// How often each identity has happened.
    counts: BlockMap<u64>,
    played: Draws,
    taken: Option<BTreeMap<String, Arc<Mutex<Vec<u64>>>>>,
}

impl Chance {
    /// The streams of `seed`.
    pub fn of(seed: u64) -> Chance {
        Chance { seed, ..Chance::default() }
    }

    /// The streams of `seed`; what they give is kept.
    pub fn recorded(seed: u64) -> Chance {
        Chance { seed, taken: Some(BTreeMap::new()), ..Chance::default() }
    }

    /// Streams that give what others have given, and go on as those of `seed` when that is used up.
    pub fn replayed(seed: u64, draws: Draws) -> Chance {
        Chance { seed, played: draws, ..Chance::default() }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// What decides the order within an instant: the seed, or that of the life that is lived again.
    pub fn order(&mut self) -> u64 {
        let played = self.played.remove("order").and_then(|played| played.first().copied());
        let order = played.unwrap_or(self.seed);
        if let Some(taken) = &mut self.taken {
            let taken = taken.entry("order".to_owned()).or_default();
            taken.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        }
        order
    }

    /// A stream. Its name belongs to nothing else in this life.
    pub fn stream(&mut self, name: &str) -> Rng {
        // FNV-1a: names that differ in one letter make streams that have nothing in common.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        self.of_name(Rng::new(self.seed ^ hash), name)
    }

    /// The stream of something that happens. What has the same identity and happens again has
    /// another stream.
    pub fn keyed(&mut self, identity: u64) -> Rng {
        self.named(identity).1
    }

    /// The stream of something that happens, behind a number that nothing else in this life has.
    pub fn named(&mut self, identity: u64) -> (u64, Rng) {
        let count = self.counts.entry(identity).or_insert(0);
        *count += 1;
        let name = mix(identity, *count);
        let rng = Rng::new(self.seed ^ name);
        if self.played.is_empty() && self.taken.is_none() {
            return (name, rng);
        }
        let rng = self.of_name(rng, &format!("{name:016x}"));
        (name, rng)
    }

    /// Lets a stream give what was given once, and keeps what it gives.
    fn of_name(&mut self, mut rng: Rng, name: &str) -> Rng {
        rng.played = self.played.remove(name).unwrap_or_default().into_iter();
        rng.taken =
            self.taken.as_mut().map(|taken| taken.entry(name.to_owned()).or_default().clone());
        rng
    }

    /// What all streams have given so far, if it is kept.
    pub fn draws(&self) -> Draws {
        let draws = |taken: &Arc<Mutex<Vec<u64>>>| {
            taken.lock().unwrap_or_else(PoisonError::into_inner).clone()
        };
        let all = self.taken.iter().flatten().map(|(name, taken)| (name.clone(), draws(taken)));
        all.filter(|(_, draws)| !draws.is_empty()).collect()
    }
}

/// Two numbers as one, of which every bit depends on all of theirs (the finaliser of SplitMix64).
pub fn mix(one: u64, other: u64) -> u64 {
    let z = one.rotate_left(25) ^ other.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of random numbers: xoshiro256**, seeded through SplitMix64.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
    played: std::vec::IntoIter<u64>,
    taken: Option<Arc<Mutex<Vec<u64>>>>,
}

impl Rng {
    /// A stream of its own for `seed`.
    pub fn new(seed: u64) -> Rng {
        let mut x = seed;
        let state = std::array::from_fn(|_| split_mix(&mut x));
        Rng { state, played: Vec::new().into_iter(), taken: None }
    }

    /// A stream of its own that follows from the next draw.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.bits())
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let drawn = self.played.next().unwrap_or_else(|| self.step());
        self.keep(drawn)
    }

    /// A number below `end`, which must not be zero.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "a range has at least one number");
        let drawn = match self.played.next() {
            // What was drawn from a larger range is a draw, too.
            Some(played) => played % end,
            None => ((u128::from(self.step()) * u128::from(end)) >> 64) as u64,
        };
        self.keep(drawn)
    }

    /// A number of a range.
    pub fn range(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// True with a probability in parts per thousand.
    pub fn permille(&mut self, n: u64) -> bool {
        self.below(1000) < n
    }

    /// One of the items.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// An exponentially distributed number around `mean`, at most eleven times it.
    pub fn around(&mut self, mean: u64) -> u64 {
        const STEPS: u64 = 1 << 16;
        let unit = self.below(STEPS) as f64 / STEPS as f64;
        (mean as f64 * -(1.0 - unit).ln()) as u64
    }

    fn keep(&mut self, drawn: u64) -> u64 {
        if let Some(taken) = &self.taken {
            taken.lock().unwrap_or_else(PoisonError::into_inner).push(drawn);
        }
        drawn
    }

    fn step(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }
}

fn split_mix(x: &mut u64) -> u64 {
    *x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*x ^ (*x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stream_says_nothing_about_another_one() {
        let (mut one, mut other) = (Chance::of(7), Chance::of(7));
        one.stream("disk").below(10);
        let draws = |chance: &mut Chance| [(); 8].map(|()| chance.stream("clients").bits());
        assert_eq!(draws(&mut one), draws(&mut other));
        assert_ne!(Chance::of(7).stream("a").bits(), Chance::of(7).stream("b").bits());
        assert_ne!(Chance::of(7).stream("a").bits(), Chance::of(8).stream("a").bits());
    }

    #[test]
    fn what_happens_draws_the_same_in_any_order() {
        let draw = |order: [u64; 3]| {
            let mut chance = Chance::of(7);
            order.map(|identity| (identity, chance.keyed(identity).bits()))
        };
        let (mut one, mut other) = (draw([1, 2, 3]), draw([3, 1, 2]));
        one.sort_unstable();
        other.sort_unstable();
        assert_eq!(one, other);
        let [first, second, third] = draw([1, 1, 1]).map(|(_, drawn)| drawn);
        assert!(first != second && second != third, "each time has a stream of its own");
    }

    #[test]
    fn what_was_drawn_is_drawn_again_and_then_the_seed_goes_on() {
        let mut chance = Chance::recorded(3);
        let mut rng = chance.stream("a");
        let first = (rng.below(1000), rng.around(500), rng.pick(&[1, 2, 3]), rng.bits());
        let mut again = Chance::replayed(4, chance.draws());
        let mut replayed = again.stream("a");
        assert_eq!(
            first,
            (
                replayed.below(1000),
                replayed.around(500),
                replayed.pick(&[1, 2, 3]),
                replayed.bits()
            )
        );
        assert_eq!(replayed.below(1 << 40), Chance::of(4).stream("a").below(1 << 40));
        let mut smaller = Chance::replayed(4, chance.draws()).stream("a");
        assert_eq!(
            smaller.below(10),
            first.0 % 10,
            "a range that has become smaller still holds it"
        );
    }
}
