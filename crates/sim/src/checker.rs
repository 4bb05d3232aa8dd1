//! The oracle: which contents a sector of a volume may have, by the guarantees alone.
//!
//! Every change carries a value of its own in every sector (zeroes are the value 0), and every
//! start and end of a request is a tick of one counter. From these follows what a read may return,
//! what may be lost at a power loss, and what must then be lost with it.

#[cfg(test)]
mod tests;
mod value;

pub use value::{BASE_VALUE, SECTORS, fill, value_of};

use crate::cuts::Cuts;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_engine::api::{BLOCK_BYTES, SECTOR_BYTES};

/// Versions of a block that are remembered at least: on a device that loses writes it turns out
/// late that a newer one was not sure.
const VERSIONS_KEPT: usize = 24;
const ALIVE: u64 = u64::MAX;
const IN_FLIGHT: u64 = u64::MAX;
/// The value of something that may be whatever was ever there.
const ANY: u64 = u64::MAX;

/// Sectors that a change is about to alter.
#[derive(Debug)]
struct Change {
    first: u64,
    n: u64,
    /// It goes past the log.
    direct: bool,
}

/// What one change left, or is about to leave, in a block.
#[derive(Debug, Clone)]
struct Version {
    value: u64,
    start: u64,
    end: u64,
    /// It was acknowledged, without an error.
    acked: bool,
    /// Its acknowledgement promised stable media.
    durable: bool,
    /// Per sector: 0 where it does not reach, [`ALIVE`] where it may be the content now, else the
    /// tick since which it cannot be.
    until: [u64; SECTORS],
}

impl Version {
    /// It may have left this value.
    fn matches(&self, value: u64) -> bool {
        self.value == value || self.value == ANY
    }
}

/// What the sectors of a volume may hold.
pub struct Checker {
    salt: u64,
    sectors: u64,
    base_sectors: u64,
    blocks: Vec<Option<Vec<Version>>>,
    changes: BTreeMap<u64, Change>,
    reads: BTreeSet<u64>,
    /// Changes that completed before this tick are on stable media.
    floor: u64,
    /// Changes that completed from this tick on may be taken for a part of a torn tail, however
    /// often they were synced: the device has lost what would tell otherwise, or lies.
    unsure_from: u64,
    /// On a device that damages what it holds: changes that completed from this tick on may turn
    /// out to be unsure, and so what they have replaced is remembered.
    damaged_from: u64,
    /// Until when changes went past the log: those are ordered only by flushes that were sent after
    /// their completion.
    direct: u64,
    /// After a power loss: blocks whose content is to be looked at before the volume is used.
    verify: BTreeSet<u64>,
    ordered: bool,
    lost_end_min: (u64, u64),
    survivor_start_max: (u64, u64),
    /// Where the drain is grouped.
    cuts: Option<Cuts>,
}

impl Checker {
    /// A volume whose first `base_bytes` hold [`BASE_VALUE`] and whose other bytes are zero.
    pub fn new(salt: u64, size_bytes: u64, base_bytes: u64) -> Checker {
        let blocks = size_bytes.div_ceil(BLOCK_BYTES as u64) as usize;
        Checker {
            salt,
            sectors: size_bytes / SECTOR_BYTES as u64,
            base_sectors: base_bytes / SECTOR_BYTES as u64,
            blocks: vec![None; blocks],
            changes: BTreeMap::new(),
            reads: BTreeSet::new(),
            floor: 0,
            unsure_from: u64::MAX,
            damaged_from: u64::MAX,
            direct: 0,
            verify: BTreeSet::new(),
            ordered: true,
            lost_end_min: (u64::MAX, 0),
            survivor_start_max: (0, 0),
            cuts: None,
        }
    }

    /// The image and its redo are compared with cuts from now on.
    pub fn watch_cuts(&mut self) {
        self.cuts = Some(Cuts::new(self.salt, self.base_sectors));
    }

    /// Whether the image and its redo are compared with cuts.
    pub fn watches_cuts(&self) -> bool {
        self.cuts.is_some()
    }

    /// Changes that completed from this tick on, or from an earlier one that was told, may be taken
    /// for a part of a torn tail.
    pub fn distrust_from(&mut self, tick: u64) {
        self.unsure_from = self.unsure_from.min(tick);
    }

    /// Changes that completed from this tick on may be taken for a part of a torn tail, but none
    /// before.
    pub fn trust_until(&mut self, tick: u64) {
        self.unsure_from = tick;
    }

    /// The device damages what it holds. What is replaced from this tick on is remembered.
    pub fn expect_damage_from(&mut self, tick: u64) {
        self.damaged_from = tick;
    }

    /// Whether image and redo are the volume as it once was.
    ///
    /// # Errors
    /// What contradicts that.
    pub fn check_cut(
        &mut self,
        stable: bool,
        whole: bool,
        floor: u64,
        read: &mut dyn FnMut(u64, &mut [u8]),
    ) -> Result<(), String> {
        self.cuts
            .as_mut()
            .map_or(Ok(()), |cuts| cuts.check(self.sectors, stable, whole, floor, read))
    }

    /// The image has everything: the next cuts are compared with it.
    pub fn adopt_cut(&mut self, read: &mut dyn FnMut(u64, &mut [u8])) {
        if let Some(cuts) = &mut self.cuts {
            cuts.adopt(self.sectors, read);
        }
    }

    /// What makes the volume's content different from that of others.
    pub fn salt(&self) -> u64 {
        self.salt
    }

    /// Changes from `tick` on may go past the log.
    pub fn goes_direct(&mut self, tick: u64) {
        self.direct = self.direct.max(tick);
    }

    /// The volume gets another size while nothing is in flight. What was beyond the new end is
    /// gone.
    pub fn resize(&mut self, size_bytes: u64) {
        let old = std::mem::replace(&mut self.sectors, size_bytes / SECTOR_BYTES as u64);
        if let Some(cuts) = &mut self.cuts {
            cuts.resize(self.sectors);
        }
        if self.sectors == old {
            return;
        }
        let end = self.sectors.min(old);
        let last = end / SECTORS as u64;
        if (last as usize) < self.blocks.len() {
            let mut versions = self.take(last);
            let beyond = (end % SECTORS as u64) as usize..SECTORS;
            let mut until = [0; SECTORS];
            until[beyond.clone()].fill(ALIVE);
            versions.iter_mut().for_each(|v| v.until[beyond.clone()].fill(0));
            versions.push(Version {
                value: 0,
                start: 0,
                end: 0,
                acked: true,
                durable: true,
                until,
            });
            self.blocks[last as usize] = Some(versions);
        }
        self.blocks.resize(self.sectors.div_ceil(SECTORS as u64) as usize, None);
        self.verify.split_off(&(self.blocks.len() as u64));
        self.base_sectors = self.base_sectors.min(end);
    }

    /// The volume is about to become smaller, which may fail half-way: what was beyond the new end
    /// may be anything that was ever there, until it is written again.
    pub fn begin_shrink(&mut self, size_bytes: u64, now: u64) {
        let end = size_bytes / SECTOR_BYTES as u64;
        if let Some(cuts) = &mut self.cuts {
            cuts.ignore_from(end);
        }
        for block in end / SECTORS as u64..self.blocks.len() as u64 {
            let Some(versions) = &mut self.blocks[block as usize] else { continue };
            let mut until = [0; SECTORS];
            let beyond =
                (end.saturating_sub(block * SECTORS as u64) as usize).min(SECTORS)..SECTORS;
            until[beyond.clone()].fill(ALIVE);
            for v in versions.iter_mut().filter(|v| v.end < now) {
                v.until[beyond.clone()].iter_mut().filter(|u| **u == ALIVE).for_each(|u| *u = now);
            }
            versions.push(Version {
                value: ANY,
                start: now,
                end: now,
                acked: true,
                durable: true,
                until,
            });
        }
    }

    /// Forgets everything and takes the image as it is for the truth (the cache was lost).
    pub fn adopt(&mut self, read: &mut dyn FnMut(u64, &mut [u8])) {
        let mut bytes = vec![0; BLOCK_BYTES];
        for block in 0..self.blocks.len() as u64 {
            read(block, &mut bytes);
            let mut versions = Vec::new();
            for s in 0..self.sectors_of(block) {
                let sector = block * SECTORS as u64 + s as u64;
                let part = &bytes[s * SECTOR_BYTES..(s + 1) * SECTOR_BYTES];
                let value =
                    value_of(part, self.salt, sector).expect("an image holds whole sectors");
                let mut until = [0; SECTORS];
                until[s] = ALIVE;
                versions.push(Version {
                    value,
                    start: 0,
                    end: 0,
                    acked: true,
                    durable: true,
                    until,
                });
            }
            self.blocks[block as usize] = Some(versions);
        }
        self.changes.clear();
        self.reads.clear();
        self.verify.clear();
        self.adopt_cut(read);
    }

    fn sectors_of(&self, block: u64) -> usize {
        (self.sectors - block * SECTORS as u64).min(SECTORS as u64) as usize
    }

    fn base(&self, block: u64) -> Vec<Version> {
        let version = |value| Version {
            value,
            start: 0,
            end: 0,
            acked: true,
            durable: true,
            until: [0; SECTORS],
        };
        let (mut old, mut zero) = (version(BASE_VALUE), version(0));
        for s in 0..SECTORS {
            let sector = block * SECTORS as u64 + s as u64;
            if sector < self.base_sectors {
                old.until[s] = ALIVE;
            } else {
                zero.until[s] = ALIVE;
            }
        }
        [old, zero].into_iter().filter(|v| v.until.contains(&ALIVE)).collect()
    }

    /// Takes the versions of a block out, to be put back.
    fn take(&mut self, block: u64) -> Vec<Version> {
        self.blocks[block as usize].take().unwrap_or_else(|| self.base(block))
    }

    /// Blocks of a range, each with its first and one past its last sector.
    fn parts(first: u64, n: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let per_block = SECTORS as u64;
        let end = first + n;
        (first / per_block..end.div_ceil(per_block)).map(move |block| {
            let from = first.max(block * per_block) - block * per_block;
            let to = end.min((block + 1) * per_block) - block * per_block;
            (block, from as usize..to as usize)
        })
    }

    /// A change of sectors is sent; `start` is its name.
    pub fn start_change(&mut self, start: u64, first: u64, n: u64, value: u64, direct: bool) {
        self.changes.insert(start, Change { first, n, direct });
        if let Some(cuts) = &mut self.cuts {
            cuts.start(start, first, n, value);
        }
        if direct {
            self.direct = start;
        }
        for (block, range) in Self::parts(first, n) {
            let mut until = [0; SECTORS];
            until[range].fill(ALIVE);
            let mut versions = self.take(block);
            versions.push(Version {
                value,
                start,
                end: IN_FLIGHT,
                acked: false,
                durable: false,
                until,
            });
            self.blocks[block as usize] = Some(versions);
        }
    }

    /// A change is answered. After an error it may or may not have happened.
    pub fn end_change(&mut self, start: u64, now: u64, acked: bool, durable: bool) {
        let Change { first, n, direct } = self.changes.remove(&start).expect("a change ends once");
        if direct && acked {
            self.direct = now;
        }
        if let Some(cuts) = &mut self.cuts {
            cuts.end(start, now, acked, durable);
        }
        let reads_from = self.reads.first().copied().unwrap_or(now);
        for (block, range) in Self::parts(first, n) {
            let mut versions = self.take(block);
            for v in versions.iter_mut() {
                if v.start == start {
                    (v.end, v.acked, v.durable) = (now, acked, acked && durable);
                } else if acked && v.end < start {
                    let superseded = v.until[range.clone()].iter_mut().filter(|u| **u == ALIVE);
                    superseded.for_each(|u| *u = now);
                }
            }
            if versions.len() > VERSIONS_KEPT {
                self.prune(&mut versions, reads_from);
            }
            self.blocks[block as usize] = Some(versions);
        }
    }

    /// Drops versions that neither a read nor a power loss may bring back.
    fn prune(&self, versions: &mut Vec<Version>, reads_from: u64) {
        for s in 0..SECTORS {
            let durable = self.newest_durable(versions, s, self.unsure_from.min(self.damaged_from));
            for v in versions.iter_mut() {
                if v.until[s] < reads_from && v.end < durable {
                    v.until[s] = 0;
                }
            }
        }
        versions.retain(|v| v.until.iter().any(|&u| u != 0));
    }

    /// The latest start of a change of the sector that no power loss undoes, of those that are sure
    /// before `unsure_from`.
    fn newest_durable(&self, versions: &[Version], s: usize, unsure_from: u64) -> u64 {
        let sure = |v: &&Version| v.end < unsure_from && (v.durable || v.end < self.floor);
        let durable = versions.iter().filter(|v| v.until[s] != 0 && v.acked).filter(sure);
        durable.map(|v| v.start).max().unwrap_or(0)
    }

    /// A read is sent; `start` is its name.
    pub fn start_read(&mut self, start: u64) {
        self.reads.insert(start);
    }

    /// A read failed or was given up.
    pub fn forget_read(&mut self, start: u64) {
        self.reads.remove(&start);
    }

    /// A flush that was sent at `start` is complete. It is no promise on a device that may lie.
    pub fn flushed(&mut self, start: u64) {
        if self.unsure_from == u64::MAX {
            self.floor = self.floor.max(start);
        }
    }

    /// A read that was sent at `start` has returned `data`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn end_read(
        &mut self,
        start: u64,
        now: u64,
        first: u64,
        data: &[u8],
    ) -> Result<(), String> {
        self.reads.remove(&start);
        for (block, range) in Self::parts(first, (data.len() / SECTOR_BYTES) as u64) {
            let mut versions = self.take(block);
            let verifying = self.verify.contains(&block);
            for s in range.clone() {
                let sector = block * SECTORS as u64 + s as u64;
                let at = (sector - first) as usize * SECTOR_BYTES;
                let bytes = &data[at..at + SECTOR_BYTES];
                let Some(value) = value_of(bytes, self.salt, sector) else {
                    self.blocks[block as usize] = Some(versions);
                    return Err(format!(
                        "sector {sector} holds no content of this place: {:02x?}…",
                        &bytes[..16]
                    ));
                };
                let fits = |v: &Version| v.until[s] > start && v.matches(value);
                if !versions.iter().any(fits) {
                    let what = self.describe(&versions, sector, value, start);
                    self.blocks[block as usize] = Some(versions);
                    return Err(what);
                }
                if verifying {
                    self.note_evidence(&versions, s, value, sector);
                    for v in versions.iter_mut().filter(|v| !fits(v)) {
                        v.until[s] = 0;
                    }
                    continue;
                }
                for v in versions.iter_mut() {
                    // Something else was there at some time after `start`: what had ended by then
                    // is over.
                    if v.until[s] == ALIVE && !v.matches(value) && v.end < start {
                        v.until[s] = now;
                    }
                }
            }
            if verifying && range == (0..self.sectors_of(block)) {
                self.verify.remove(&block);
            }
            versions.retain(|v| v.until.iter().any(|&u| u != 0));
            self.blocks[block as usize] = Some(versions);
        }
        Ok(())
    }

    fn describe(&self, versions: &[Version], sector: u64, value: u64, start: u64) -> String {
        let s = (sector % SECTORS as u64) as usize;
        let all: Vec<String> = versions
            .iter()
            .filter(|v| v.until[s] != 0)
            .map(|v| {
                let end = if v.end == IN_FLIGHT { "…".into() } else { v.end.to_string() };
                let alive = if v.until[s] == ALIVE {
                    String::new()
                } else {
                    format!(" until {}", v.until[s])
                };
                let kind = match (v.acked, v.durable) {
                    (_, true) => " durable",
                    (true, _) => "",
                    _ => " unacknowledged",
                };
                format!("{:x} [{}..{end}]{alive}{kind}", v.value, v.start)
            })
            .collect();
        format!(
            "sector {sector} (block {}) holds {value:x}, which is not allowed for a read from {start} on; \
             floor {}, known: {}",
            sector / SECTORS as u64,
            self.floor,
            all.join(", ")
        )
    }

    /// What a look after a power loss says about the order in which writes were lost.
    fn note_evidence(&mut self, versions: &[Version], s: usize, value: u64, sector: u64) {
        let there: Vec<&Version> =
            versions.iter().filter(|v| v.until[s] == ALIVE && v.matches(value)).collect();
        if there.iter().any(|v| v.value == ANY) {
            return;
        }
        if let [v] = there[..]
            && v.start > self.survivor_start_max.0
        {
            self.survivor_start_max = (v.start, sector);
        }
        let newest_end = there.iter().map(|v| v.end).max().unwrap_or(0);
        for v in versions.iter().filter(|v| v.until[s] != 0 && v.acked && v.value != value) {
            if newest_end < v.start && v.end < self.lost_end_min.0 {
                self.lost_end_min = (v.end, sector);
            }
        }
    }

    /// The process was killed: what was in flight may or may not have happened.
    pub fn killed(&mut self, now: u64) {
        self.reads.clear();
        for start in self.changes.keys().copied().collect::<Vec<_>>() {
            self.end_change(start, now, false, false);
        }
    }

    /// Power was lost. Before the volume is used again, [`Checker::to_verify`] is to be read.
    pub fn power_lost(&mut self, now: u64) {
        self.killed(now);
        let sure = self.floor.min(self.unsure_from);
        if let Some(cuts) = &mut self.cuts {
            cuts.power_lost(sure);
        }
        self.ordered &= self.direct <= self.floor;
        if !self.verify.is_empty() {
            // Nothing was written since the last time, and what was seen then stays.
            return;
        }
        self.ordered = self.direct <= self.floor;
        self.lost_end_min = (u64::MAX, 0);
        self.survivor_start_max = (0, 0);
        for block in 0..self.blocks.len() as u64 {
            let Some(mut versions) = self.blocks[block as usize].take() else { continue };
            for s in 0..SECTORS {
                let durable = self.newest_durable(&versions, s, self.unsure_from);
                for v in versions.iter_mut() {
                    let allowed = v.until[s] != 0 && v.end >= durable;
                    v.until[s] = if allowed { ALIVE } else { 0 };
                }
            }
            versions.retain(|v| v.until.iter().any(|&u| u != 0));
            let several = |s: usize| versions.iter().filter(|v| v.until[s] != 0).count() > 1;
            if (0..SECTORS).any(several) {
                self.verify.insert(block);
            }
            self.blocks[block as usize] = Some(versions);
        }
    }

    /// The next block to be looked at.
    pub fn to_verify(&self, from: u64) -> Option<u64> {
        self.verify.range(from..).next().copied()
    }

    /// A block that cannot be looked at because it is lost.
    pub fn skip_verify(&mut self, block: u64) {
        self.verify.remove(&block);
    }

    /// All is looked at: was it a tail that was lost?
    ///
    /// # Errors
    /// What contradicts that.
    pub fn end_verify(&mut self, now: u64) -> Result<(), String> {
        let (lost, survived) = (self.lost_end_min, self.survivor_start_max);
        if self.ordered && survived.0 > lost.0 {
            return Err(format!(
                "not a tail was lost: the write at sector {} is gone that was acknowledged at {}, but the one at \
                 sector {} survived that was sent at {}",
                lost.1, lost.0, survived.1, survived.0
            ));
        }
        self.settle(now);
        Ok(())
    }

    /// Everything acknowledged before `now` is on stable media (an orderly stop).
    pub fn settle(&mut self, now: u64) {
        self.floor = now;
        self.unsure_from = u64::MAX;
        if self.damaged_from != u64::MAX {
            self.damaged_from = now;
        }
    }

    /// Compares a block of the image with what it may hold now.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_image(&mut self, block: u64, bytes: &[u8], now: u64) -> Result<(), String> {
        let n = self.sectors_of(block);
        self.start_read(now);
        self.end_read(now, now, block * SECTORS as u64, &bytes[..n * SECTOR_BYTES])
            .map_err(|e| format!("the image: {e}"))
    }

    /// Whether all sectors of a range may read as zero now.
    pub fn may_be_zero(&self, sectors: std::ops::Range<u64>) -> bool {
        let mut parts = Self::parts(sectors.start, sectors.end - sectors.start);
        parts.all(|(block, mut range)| match &self.blocks[block as usize] {
            Some(versions) => {
                range.all(|s| versions.iter().any(|v| v.until[s] == ALIVE && v.matches(0)))
            }
            None => (block * SECTORS as u64 + range.start as u64) >= self.base_sectors,
        })
    }

    /// Blocks that anything was ever sent to.
    pub fn touched(&self) -> Vec<u64> {
        (0..self.blocks.len() as u64).filter(|&b| self.blocks[b as usize].is_some()).collect()
    }
}
