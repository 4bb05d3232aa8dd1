//! The oracle of the grouped drain: whether an image with its redo is the volume as it once was.
//!
//! It remembers every change since the last cut that was looked at. At a cut each sector holds what
//! it held at the last one or what a change since has left, and no change is missing that was
//! acknowledged before one that is there was sent.

use crate::checker::{BASE_VALUE, SECTORS, value_of};
use crate::store::BlockMap;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_engine::api::{BLOCK_BYTES, SECTOR_BYTES};

const IN_FLIGHT: u64 = u64::MAX;

#[derive(Debug, Clone, Copy)]
struct Change {
    first: u64,
    n: u64,
    value: u64,
    end: u64,
    /// An image that has something later has this.
    counts: bool,
    durable: bool,
}

/// What a sector held at the last cut.
#[derive(Debug, Clone, Copy, Default)]
struct Base {
    value: u64,
    /// Start of the first change that may have left it there, end of the last.
    start: u64,
    end: u64,
}

/// What the cuts of one volume may hold.
pub struct Cuts {
    salt: u64,
    base_sectors: u64,
    /// Of blocks that were changed: what their sectors held, as far as it is another content than
    /// at first.
    base: BlockMap<[Option<Base>; SECTORS]>,
    changes: BTreeMap<u64, Change>,
    /// From this sector on, nothing is known.
    known: u64,
}

impl Cuts {
    /// The image of a volume whose first sectors hold [`BASE_VALUE`].
    pub fn new(salt: u64, base_sectors: u64) -> Cuts {
        Cuts {
            salt,
            base_sectors,
            base: BlockMap::default(),
            changes: BTreeMap::new(),
            known: u64::MAX,
        }
    }

    /// A change is sent.
    pub fn start(&mut self, start: u64, first: u64, n: u64, value: u64) {
        let change = Change { first, n, value, end: IN_FLIGHT, counts: false, durable: false };
        self.changes.insert(start, change);
    }

    /// A change is answered.
    pub fn end(&mut self, start: u64, end: u64, acked: bool, durable: bool) {
        if let Some(change) = self.changes.get_mut(&start) {
            (change.end, change.counts, change.durable) = (end, acked, acked && durable);
        }
    }

    /// Power is lost: what was not durable at `floor` may be gone.
    pub fn power_lost(&mut self, floor: u64) {
        for change in self.changes.values_mut().filter(|c| !c.durable && c.end >= floor) {
            change.counts = false;
        }
    }

    /// What is beyond a sector may be anything, until the volume's size changes or the image is
    /// adopted.
    pub fn ignore_from(&mut self, sector: u64) {
        self.known = self.known.min(sector);
    }

    /// The volume has another size: what was beyond it is gone.
    pub fn resize(&mut self, sectors: u64) {
        if self.known < sectors {
            return;
        }
        self.known = u64::MAX;
        self.base.retain(|&block, bases| {
            let first = block * SECTORS as u64;
            let kept = (sectors.saturating_sub(first) as usize).min(SECTORS);
            bases[kept..].fill(None);
            kept > 0
        });
        self.base_sectors = self.base_sectors.min(sectors);
        self.changes.retain(|_, c| c.first < sectors);
        self.changes.values_mut().for_each(|c| c.n = c.n.min(sectors - c.first));
    }

    /// The image as it is becomes the cut that everything is compared with.
    pub fn adopt(&mut self, sectors: u64, read: &mut dyn FnMut(u64, &mut [u8])) {
        self.base.clear();
        self.changes.clear();
        self.base_sectors = 0;
        self.known = u64::MAX;
        let mut bytes = [0; BLOCK_BYTES];
        for block in 0..sectors.div_ceil(SECTORS as u64) {
            read(block, &mut bytes);
            if bytes.iter().all(|&b| b == 0) {
                continue;
            }
            for (s, part) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
                let sector = block * SECTORS as u64 + s as u64;
                let value = value_of(part, self.salt, sector).unwrap_or(0);
                if value != 0 && sector < sectors {
                    self.base.entry(block).or_default()[s] =
                        Some(Base { value, ..Base::default() });
                }
            }
        }
    }

    /// The changes, each with when it was sent, block by block; with `whole` also blocks that have
    /// only something at first.
    fn by_block(&self, whole: bool) -> Vec<(u64, Option<(u64, Change)>)> {
        let mut all = Vec::new();
        for (&start, &change) in &self.changes {
            let last = (change.first + change.n - 1) / SECTORS as u64;
            all.extend(
                (change.first / SECTORS as u64..=last).map(|block| (block, Some((start, change)))),
            );
        }
        if whole {
            all.extend(self.base.keys().map(|&block| (block, None)));
        }
        // Those of a block stay in the order in which they were sent.
        all.sort_by_key(|&(block, _)| block);
        all
    }

    /// Compares an image, its redo applied, with what a cut may be; if the image is `stable`, cuts
    /// only go forward from then on. With `whole`, what nobody has changed since the last cut is
    /// looked at, too. What was acknowledged before `floor` is there.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(
        &mut self,
        sectors: u64,
        stable: bool,
        whole: bool,
        floor: u64,
        read: &mut dyn FnMut(u64, &mut [u8]),
    ) -> Result<(), String> {
        let mut finding = Finding::default();
        let mut bytes = [0; BLOCK_BYTES];
        let mut here: Vec<(u64, Change)> = Vec::new();
        for changes in self.by_block(whole).chunk_by(|a, b| a.0 == b.0) {
            let block = changes[0].0;
            let bases = self.base.get(&block).copied().unwrap_or_default();
            read(block, &mut bytes);
            for (s, part) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
                let sector = block * SECTORS as u64 + s as u64;
                if sector >= sectors.min(self.known) {
                    continue;
                }
                let covers = |c: &Change| c.first <= sector && sector < c.first + c.n;
                here.clear();
                here.extend(
                    changes.iter().filter_map(|&(_, change)| change).filter(|(_, c)| covers(c)),
                );
                if here.is_empty() && !(whole && bases[s].is_some()) {
                    continue;
                }
                let Some(value) = value_of(part, self.salt, sector) else {
                    return Err(format!("sector {sector} of a cut holds no content of this place"));
                };
                let first = if sector < self.base_sectors { BASE_VALUE } else { 0 };
                let base = bases[s].unwrap_or(Base { value: first, ..Base::default() });
                finding.add(sector, value, base, &here)?;
            }
        }
        finding.judge(floor)?;
        if stable {
            self.go_forward(finding);
        }
        Ok(())
    }

    /// The next cuts are compared with what was found in this one.
    fn go_forward(&mut self, finding: Finding) {
        let Finding { missing, found, .. } = finding;
        self.changes.retain(|start, c| missing.contains(start) || c.end == IN_FLIGHT);
        for (sector, now) in found {
            let (block, s) = (sector / SECTORS as u64, (sector % SECTORS as u64) as usize);
            self.base.entry(block).or_default()[s] = Some(now);
        }
    }
}

/// What was found in a cut.
struct Finding {
    /// When the first change that is missing was acknowledged, and its sector.
    lost: (u64, u64),
    /// When the last change that is there was sent, and its sector.
    survived: (u64, u64),
    /// Changes that may come yet.
    missing: BTreeSet<u64>,
    /// What the sectors hold.
    found: Vec<(u64, Base)>,
}

impl Default for Finding {
    fn default() -> Finding {
        Finding {
            lost: (u64::MAX, 0),
            survived: (0, 0),
            missing: BTreeSet::new(),
            found: Vec::new(),
        }
    }
}

impl Finding {
    /// A sector holds `value`; at the last cut it held `base`, and `here` are the changes of it
    /// since then.
    fn add(
        &mut self,
        sector: u64,
        value: u64,
        base: Base,
        here: &[(u64, Change)],
    ) -> Result<(), String> {
        let there = || here.iter().filter(|(_, c)| c.value == value);
        let is_base = base.value == value;
        let candidates = there().count() + usize::from(is_base);
        if candidates == 0 {
            return Err(format!(
                "sector {sector} of a cut holds {value:x}, known are {base:x?} and {here:x?}"
            ));
        }
        let left = is_base.then_some((base.start, base.end));
        let all = there().map(|(start, c)| (*start, c.end)).chain(left);
        // Several changes may have left a zero: nothing is concluded from which it was.
        let (start, end) = all.fold((u64::MAX, 0), |a, b| (a.0.min(b.0), a.1.max(b.1)));
        let now = Base { value, start, end };
        if candidates > 1 {
            self.missing.extend(there().map(|(start, _)| *start));
        } else if !is_base {
            self.survived = self.survived.max((start, sector));
        }
        for (start, c) in here.iter().filter(|(_, c)| c.value != value) {
            if c.end > now.start {
                // It may come yet: it is later, or was on its way together with what is there.
                self.missing.insert(*start);
            }
            if c.counts && now.end < *start {
                self.lost = self.lost.min((c.end, sector));
            }
        }
        self.found.push((sector, now));
        Ok(())
    }

    /// Nothing is missing that was acknowledged before something that is there was sent, or before
    /// `floor`.
    fn judge(&self, floor: u64) -> Result<(), String> {
        let (lost, survived) = (self.lost, self.survived);
        if lost.0 < floor {
            return Err(format!(
                "sector {} lacks a write acknowledged at {}, before {floor}",
                lost.1, lost.0
            ));
        }
        if survived.0 > lost.0 {
            return Err(format!(
                "no cut: sector {} lacks a write acknowledged at {}, sector {} has one sent at {}",
                lost.1, lost.0, survived.1, survived.0
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::fill;

    /// An image of one sector in each of two blocks.
    fn look(cuts: &mut Cuts, values: [u64; 2]) -> Result<(), String> {
        cuts.check(2 * SECTORS as u64, true, true, 0, &mut |block, out| {
            out.fill(0);
            fill(&mut out[..SECTOR_BYTES], 7, block * SECTORS as u64, values[block as usize]);
        })
    }

    fn two_writes() -> Cuts {
        let mut cuts = Cuts::new(7, 0);
        cuts.start(10, 0, 1, 10);
        cuts.end(10, 11, true, false);
        cuts.start(20, SECTORS as u64, 1, 20);
        cuts.end(20, 21, true, false);
        cuts
    }

    #[test]
    fn a_cut_is_a_state_that_the_volume_once_had() {
        for (values, good) in [([0, 0], true), ([10, 0], true), ([10, 20], true), ([0, 20], false)]
        {
            assert_eq!(look(&mut two_writes(), values).is_ok(), good, "{values:?}");
        }
        assert!(look(&mut two_writes(), [30, 0]).is_err(), "a value that nobody wrote");
    }

    #[test]
    fn cuts_go_forward_only() {
        let mut cuts = two_writes();
        look(&mut cuts, [10, 0]).expect("a cut");
        assert!(look(&mut cuts, [0, 0]).is_err());
        look(&mut cuts, [10, 20]).expect("a later cut");
        assert!(look(&mut cuts, [10, 0]).is_err());
    }

    #[test]
    fn a_cut_has_what_was_acknowledged_before_its_floor() {
        let empty = |floor| {
            two_writes()
                .check(2 * SECTORS as u64, true, true, floor, &mut |_, out: &mut [u8]| out.fill(0))
        };
        assert!(empty(11).is_ok());
        assert!(empty(12).is_err());
    }

    #[test]
    fn what_a_power_loss_may_take_is_not_missed() {
        let mut cuts = two_writes();
        cuts.power_lost(5);
        assert!(look(&mut cuts, [0, 20]).is_ok());
        let mut cuts = two_writes();
        cuts.power_lost(12);
        assert!(look(&mut cuts, [0, 20]).is_err(), "the first was flushed");
    }

    #[test]
    fn a_change_that_another_one_beside_it_has_overwritten_is_not_missing_later() {
        let mut cuts = Cuts::new(7, 0);
        cuts.start(10, 0, 1, 10);
        cuts.start(11, 0, 1, 11);
        cuts.end(11, 20, true, false);
        cuts.end(10, 21, true, false);
        look(&mut cuts, [10, 0]).expect("the first came last");
        cuts.start(30, SECTORS as u64, 1, 30);
        cuts.end(30, 31, true, false);
        assert!(look(&mut cuts, [10, 30]).is_ok());
    }

    #[test]
    fn changes_in_flight_together_come_in_any_order() {
        let mut cuts = Cuts::new(7, 0);
        cuts.start(10, 0, 1, 10);
        cuts.start(11, SECTORS as u64, 1, 11);
        cuts.end(10, 20, true, false);
        cuts.end(11, 21, true, false);
        assert!(look(&mut cuts, [0, 11]).is_ok());
    }
}
