//! What a medium holds: blocks as a reader sees them, and what of them a power loss would leave.

use crate::rng::Rng;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;
use tidepool_engine::api::{BLOCK_BYTES, SECTOR_BYTES};

/// Content of a block; `None` stands for zeroes.
pub type Content = Option<Rc<[u8; BLOCK_BYTES]>>;

/// Block numbers need no more than this; the order of a map never matters here.
#[derive(Default, Clone, Copy)]
pub struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(u64::from(b)));
    }
    fn write_u64(&mut self, n: u64) {
        let x = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ (x >> 29);
    }
}

/// Something for each of some blocks.
pub type BlockMap<T> = HashMap<u64, T, BuildHasherDefault<BlockHasher>>;

type Blocks = BlockMap<Rc<[u8; BLOCK_BYTES]>>;

/// How much of a write survives when it is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// All of it.
    All,
    /// Nothing.
    None,
    /// Each sector or not.
    Sectors,
    /// The first sectors.
    Front,
}

impl Cut {
    /// Any of them.
    pub fn random(rng: &mut Rng) -> Cut {
        rng.pick(&[Cut::All, Cut::All, Cut::None, Cut::None, Cut::Sectors, Cut::Front])
    }
}

/// A sparse medium of blocks with a volatile write cache.
#[derive(Default)]
pub struct Store {
    visible: Blocks,
    stable: Blocks,
    /// Completed writes that are not durable, oldest first, with their numbers.
    pending: BTreeMap<u64, Vec<(u64, Content)>>,
    completed: u64,
}

/// `None` for zeroes.
pub fn content(bytes: &[u8]) -> Content {
    let bytes: &[u8; BLOCK_BYTES] = bytes.try_into().expect("a block");
    (*bytes != [0; BLOCK_BYTES]).then(|| Rc::new(*bytes))
}

fn put(blocks: &mut Blocks, block: u64, content: &Content) {
    match content {
        Some(bytes) => drop(blocks.insert(block, bytes.clone())),
        None => drop(blocks.remove(&block)),
    }
}

impl Store {
    /// What a reader sees.
    pub fn get(&self, block: u64) -> Content {
        self.visible.get(&block).cloned()
    }

    /// Copies what a reader sees into `out`, which is one block long.
    pub fn read(&self, block: u64, out: &mut [u8]) {
        match self.visible.get(&block) {
            Some(bytes) => out.copy_from_slice(&bytes[..]),
            None => out.fill(0),
        }
    }

    /// A completed write.
    pub fn write(&mut self, block: u64, content: Content, durable: bool) {
        if content.is_none()
            && !self.visible.contains_key(&block)
            && !self.stable.contains_key(&block)
        {
            // Zeroes over zeroes, unless something else is on its way to the medium.
            if !self.pending.contains_key(&block) {
                return;
            }
        }
        put(&mut self.visible, block, &content);
        self.completed += 1;
        if durable {
            put(&mut self.stable, block, &content);
            self.pending.remove(&block);
        } else {
            self.pending.entry(block).or_default().push((self.completed, content));
        }
    }

    /// Writes only some sectors of a block.
    pub fn write_sectors(&mut self, block: u64, content: &Content, sectors: u8, durable: bool) {
        let mut bytes = [0; BLOCK_BYTES];
        self.read(block, &mut bytes);
        mix_sectors(&mut bytes, content, sectors);
        self.write(block, self::content(&bytes), durable);
    }

    /// A write that was cut off by a kill of its sender.
    pub fn write_cut(&mut self, block: u64, content: &Content, sectors: u8) {
        match sectors {
            0 => {}
            0xff => self.write(block, content.clone(), false),
            _ => self.write_sectors(block, content, sectors, false),
        }
    }

    /// A power loss would change nothing.
    pub fn is_stable(&self) -> bool {
        self.pending.is_empty()
    }

    /// Everything that a sync issued now is going to cover.
    pub fn sync_point(&self) -> u64 {
        self.completed
    }

    /// A sync that was issued at `point` has completed.
    pub fn sync(&mut self, point: u64) {
        let stable = &mut self.stable;
        self.pending.retain(|&block, versions| {
            let covered = versions.iter().take_while(|v| v.0 <= point).count();
            if covered > 0 {
                put(stable, block, &versions[covered - 1].1);
                versions.drain(..covered);
            }
            !versions.is_empty()
        });
    }

    /// Power is lost: of what was not durable, any subset is left, by sectors.
    pub fn power_loss(&mut self, rng: &mut Rng) {
        let style = Cut::random(rng);
        for (block, versions) in std::mem::take(&mut self.pending) {
            let cut = if rng.permille(300) { Cut::random(rng) } else { style };
            match cut {
                Cut::None => {}
                Cut::All => put(&mut self.stable, block, &versions[versions.len() - 1].1),
                Cut::Sectors | Cut::Front => {
                    let mut bytes = [0; BLOCK_BYTES];
                    if let Some(old) = self.stable.get(&block) {
                        bytes = **old;
                    }
                    for (_, content) in &versions {
                        mix_sectors(&mut bytes, content, rng.bits() as u8);
                    }
                    put(&mut self.stable, block, &content(&bytes));
                }
            }
            match self.stable.get(&block) {
                Some(bytes) => drop(self.visible.insert(block, bytes.clone())),
                None => drop(self.visible.remove(&block)),
            }
        }
    }

    /// Changes the medium behind everybody's back.
    pub fn damage(&mut self, block: u64, content: Content) {
        put(&mut self.visible, block, &content);
        put(&mut self.stable, block, &content);
        self.pending.remove(&block);
    }

    /// Blocks that are not zero, in order.
    pub fn used(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.visible.keys().copied().collect();
        all.sort_unstable();
        all
    }
}

/// Which sectors of the `n`-th of `blocks` blocks survive.
pub fn cut_mask(rng: &mut Rng, cut: Cut, n: usize, blocks: usize, front: u64) -> u8 {
    match cut {
        Cut::All => 0xff,
        Cut::None => 0,
        Cut::Sectors => rng.bits() as u8,
        Cut::Front => {
            let per_block = (BLOCK_BYTES / SECTOR_BYTES) as u64;
            let first = n as u64 * per_block;
            let left = (front % (blocks as u64 * per_block)).saturating_sub(first).min(per_block);
            ((1u32 << left) - 1) as u8
        }
    }
}

fn mix_sectors(bytes: &mut [u8; BLOCK_BYTES], content: &Content, sectors: u8) {
    for s in (0..8).filter(|s| sectors >> s & 1 == 1) {
        let at = s * SECTOR_BYTES;
        let part = &mut bytes[at..at + SECTOR_BYTES];
        match content {
            Some(new) => part.copy_from_slice(&new[at..at + SECTOR_BYTES]),
            None => part.fill(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(byte: u8) -> Content {
        content(&[byte; BLOCK_BYTES])
    }

    #[test]
    fn a_sync_covers_what_was_complete_when_it_was_issued() {
        for seed in 0..50 {
            let mut store = Store::default();
            store.write(1, block(1), false);
            let point = store.sync_point();
            store.write(1, block(2), false);
            store.write(2, block(2), false);
            store.sync(point);
            store.power_loss(&mut Rng::new(seed));
            let one = store.get(1).expect("the first write is durable");
            assert!(one.iter().all(|&b| b == 1 || b == 2));
            assert!(store.get(2).is_none_or(|two| two.iter().all(|&b| b == 0 || b == 2)));
        }
    }

    #[test]
    fn power_loss_takes_any_subset_of_what_was_not_synced() {
        let outcomes: std::collections::BTreeSet<(bool, bool)> = (0..200)
            .map(|seed| {
                let mut store = Store::default();
                store.write(1, block(1), false);
                store.write(2, block(1), false);
                store.power_loss(&mut Rng::new(seed));
                (store.get(1) == block(1), store.get(2) == block(1))
            })
            .collect();
        assert_eq!(outcomes.len(), 4, "{outcomes:?}");
    }
}
