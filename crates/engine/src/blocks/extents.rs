//! Extents: ranges that no segment holds, of zeroes that are not drained and of lost blocks, as a
//! checkpoint names them.

use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags};
use crate::blocks::ledger::Ledger;
use crate::format::{ExtentItem, ExtentKind};
use zerocopy::little_endian::{U16, U32, U64};

/// What a checkpoint holds beside segments and volumes.
pub(crate) struct Extents {
    items: Vec<ExtentItem>,
    /// By volume: blocks that are cached inside of its zeroes.
    covered: Vec<u64>,
}

impl Extents {
    /// By volume, and by place in it.
    pub(crate) fn items(&self) -> &[ExtentItem] {
        &self.items
    }

    /// Blocks of a volume that are cached inside of its zeroes; there are none of a volume that
    /// there is not.
    pub(crate) fn covered_blocks(&self, volume: usize) -> u64 {
        self.covered.get(volume).copied().unwrap_or(0)
    }

    /// Those of them that are lost.
    pub(crate) fn lost(&self) -> usize {
        self.items.iter().filter(|item| item.kind == ExtentKind::Lost as u8).count()
    }
}

/// Extents in the order in which they are found.
#[derive(Default)]
struct List {
    items: Vec<ExtentItem>,
    /// Where the newest extent ends, in blocks of its volume.
    end: u64,
}

impl List {
    /// Adds a stretch of `blocks` blocks from `block` on; whether the newest extent was made longer
    /// for that. It is if the two touch, or if all between them is cached.
    fn push(
        &mut self,
        (volume, kind): (usize, ExtentKind),
        (block, blocks): (u64, u32),
        gap_is_cached: bool,
    ) -> bool {
        let before = std::mem::replace(&mut self.end, block + u64::from(blocks));
        let alike = |last: &&mut ExtentItem| {
            usize::from(last.volume.get()) == volume && last.kind == kind as u8
        };
        if let Some(last) = self.items.last_mut().filter(alike) {
            let joined = u64::from(last.len.get()) + (self.end - before);
            if (before == block || gap_is_cached) && joined <= u64::from(u32::MAX) {
                last.len = U32::new(joined as u32);
                return true;
            }
        }
        self.items.push(ExtentItem {
            block: U64::new(block),
            len: U32::new(blocks),
            volume: U16::new(volume as u16),
            kind: kind as u8,
            reserved: 0,
        });
        false
    }
}

/// Zero ranges that are not drained, and lost blocks. Cached blocks inside of a zero range do not
/// split it: at recovery they are put above it. How many they are is counted for each volume, so
/// that recovery knows when one is missing.
///
/// `volumes`: by their numbers, the ledger of each and whether it has failed. Of a volume that has
/// failed no lost blocks are named.
pub(crate) fn collect<'a>(
    volumes: impl ExactSizeIterator<Item = Option<(&'a Ledger, bool)>>,
) -> Extents {
    let mut all_covered = vec![0; volumes.len()];
    let mut list = List::default();
    for (v, volume) in volumes.enumerate() {
        let Some((ledger, failed)) = volume else { continue };
        let counts = ledger.blocks();
        if counts.zero == 0 && counts.lost == 0 {
            continue;
        }
        let mut covered_to = u64::MAX;
        let mut cached = 0; // Since the last zeroes.
        let covered = &mut all_covered[v];
        for object in ledger.index().objects(0) {
            let flags = ledger.flags(object);
            let zero_dirty = flags.contains(ObjectFlags::ZERO_DIRTY);
            let keep = flags.contains(ObjectFlags::ZERO_KEEP);
            let zero_kind = if keep { ExtentKind::ZeroKeep } else { ExtentKind::Zero };
            if !zero_dirty
                && counts.lost == 0
                && covered_to != u64::from(object) * OBJECT_BLOCKS as u64
            {
                covered_to = u64::MAX; // Nothing in it, and nothing that goes on in it.
                continue;
            }
            for (block, n, found) in ledger.index().runs(object) {
                match found {
                    Lookup::Zero if zero_dirty => {
                        if list.push((v, zero_kind), (block, n), covered_to == block) {
                            *covered += cached;
                        }
                        cached = 0;
                        covered_to = block + u64::from(n);
                    }
                    Lookup::Lost if failed => covered_to = u64::MAX,
                    Lookup::Lost => {
                        list.push((v, ExtentKind::Lost), (block, n), false);
                        covered_to = u64::MAX;
                    }
                    Lookup::At(_) if covered_to == block => {
                        covered_to = block + u64::from(n);
                        cached += u64::from(n);
                    }
                    _ => covered_to = u64::MAX,
                }
            }
        }
    }
    Extents { items: list.items, covered: all_covered }
}
