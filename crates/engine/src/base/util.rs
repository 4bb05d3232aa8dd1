//! Small tools of the core: a slab with stable indices, a deterministic hasher, runs of positions.

use std::hash::{BuildHasherDefault, Hasher};

/// Items with stable `u32` indices; freed places are used again, so a steady load allocates
/// nothing.
pub(crate) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) fn with_capacity(capacity: usize) -> Slab<T> {
        Slab { items: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    pub(crate) fn insert(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.items[index as usize] = Some(item);
                index
            }
            None => {
                self.items.push(Some(item));
                (self.items.len() - 1) as u32
            }
        }
    }

    /// Takes an item out.
    ///
    /// # Panics
    /// If there is none: an effect was reported twice, or an index was kept too long.
    pub(crate) fn remove(&mut self, index: u32) -> T {
        let item = self.items[index as usize].take().expect("the item is in the slab");
        self.free.push(index);
        item
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.items.iter_mut().enumerate().filter_map(|(i, item)| Some((i as u32, item.as_mut()?)))
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, index: u32) -> &T {
        self.items[index as usize].as_ref().expect("the item is in the slab")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        self.items[index as usize].as_mut().expect("the item is in the slab")
    }
}

/// Multiplicative hashing without a random seed: the core must not depend on chance, and its keys
/// are block numbers inside one process.
#[derive(Default, Clone, Copy)]
pub(crate) struct FixedHasher(u64);

impl Hasher for FixedHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u16(&mut self, n: u16) {
        self.write_u64(u64::from(n));
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A hash map with [`FixedHasher`].
pub(crate) type FixedMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<FixedHasher>>;

/// The runs of `n` positions in which each follows the one before, as (first, behind the last).
pub(crate) fn runs(
    n: usize,
    position: impl Fn(usize) -> u32,
) -> impl Iterator<Item = (usize, usize)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = start;
        if first == n {
            return None;
        }
        start += 1;
        while start < n && position(start) == position(start - 1) + 1 {
            start += 1;
        }
        Some((first, start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_where_a_position_does_not_follow_the_one_before() {
        let of = |positions: &[u32]| runs(positions.len(), |i| positions[i]).collect::<Vec<_>>();
        assert_eq!(of(&[5, 6, 7, 9, 10, 4]), [(0, 3), (3, 5), (5, 6)]);
        assert_eq!(of(&[3, 2, 1]), [(0, 1), (1, 2), (2, 3)]);
        assert_eq!(of(&[8, 8, 9]), [(0, 1), (1, 3)]);
        assert_eq!(of(&[]), []);
    }
}
