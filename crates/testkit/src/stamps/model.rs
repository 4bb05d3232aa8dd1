//! The versions that a read of each sector may return, given what was sent and answered so far.
//!
//! The rule for each sector: a completed write replaces every write that had ended before the
//! completed write was sent. Writes that overlap in time may take effect in either order. A write
//! that was not answered because the server died may have taken effect or not; the first read
//! afterwards shows which, and later reads must agree.

use std::collections::{BTreeSet, HashMap};

use super::history::{History, Lost};
use tidepool_cluster::stamps::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS, describe};

/// Logical time: one tick per request sent or answered.
pub type Clock = u64;

/// Marks a sector whose candidates are in [`Model::open`].
const OPEN: Version = Version::MAX;

/// A write whose content a read may return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    version: Version,
    sent: Clock,
    /// When the write was answered, or when its server was known to be dead; `None` while the write
    /// is in flight.
    ended: Option<Clock>,
}

/// A version that was replaced at `replaced`, while reads were in flight that may still return the
/// version.
#[derive(Debug, Clone, Copy)]
struct Replaced {
    version: Version,
    replaced: Clock,
}

/// When there are more replaced versions than this, those that no read can return are dropped.
const REPLACED_MAX: usize = 1 << 16;

/// A read in flight.
#[derive(Debug)]
pub struct Snapshot {
    first: u64,
    sent: Clock,
}

/// A sector with a content that the sector must not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} (byte {}) holds {found}; it may hold {allowed}", sector * SECTOR_BYTES as u64)]
pub struct Violation {
    /// Number of the sector.
    pub sector: u64,
    /// The content that was read.
    pub found: String,
    /// The contents that are allowed.
    pub allowed: String,
}

/// The candidates of every sector of a volume.
#[derive(Debug)]
pub struct Model {
    origin: Origin,
    clock: Clock,
    settled: Vec<Version>,
    open: HashMap<u64, Vec<Candidate>>,
    reads: BTreeSet<Clock>,
    replaced: HashMap<u64, Vec<Replaced>>,
    replaced_count: usize,
    /// The history of all changes, if it is kept.
    pub(super) history: Option<History>,
}

impl Model {
    /// A volume of `sectors` sectors that reads as zeros.
    pub fn new(origin: Origin, sectors: u64) -> Model {
        Model {
            origin,
            clock: 0,
            settled: vec![ZEROS; sectors as usize],
            open: HashMap::new(),
            reads: BTreeSet::new(),
            replaced: HashMap::new(),
            replaced_count: 0,
            history: None,
        }
    }

    /// The next moment of the logical time.
    fn tick(&mut self) -> Clock {
        self.clock += 1;
        self.clock
    }

    /// A write of `version` to `count` sectors from `first` is about to be sent.
    pub fn write_sent(&mut self, version: Version, first: u64, count: u64) {
        let sent = self.tick();
        if let Some(history) = &mut self.history {
            history.sent(version, first, count, sent);
        }
        for sector in first..first + count {
            let settled = &mut self.settled[sector as usize];
            let before = *settled;
            *settled = OPEN;
            let candidates = self.open.entry(sector).or_default();
            if before != OPEN {
                // The settled version ended before anything that is sent from now on.
                candidates.push(Candidate { version: before, sent: 0, ended: Some(0) });
            }
            candidates.push(Candidate { version, sent, ended: None });
        }
    }

    /// The write of `version` was answered with success.
    pub fn write_completed(&mut self, version: Version, first: u64, count: u64) {
        let now = self.tick();
        if let Some(history) = &mut self.history {
            history.acked(version, now);
        }
        for sector in first..first + count {
            let Some(candidates) = self.open.get_mut(&sector) else { continue };
            let Some(write) = candidates.iter_mut().find(|candidate| candidate.version == version)
            else {
                // A later write that is complete has replaced this version already.
                continue;
            };
            write.ended = Some(now);
            let sent = write.sent;
            self.replace(sector, |candidate| candidate.ended.is_some_and(|ended| ended < sent));
        }
    }

    /// Removes the candidates of an open sector that `gone` selects. Reads in flight may still
    /// return them.
    fn replace(&mut self, sector: u64, gone: impl Fn(&Candidate) -> bool) {
        let Some(candidates) = self.open.get_mut(&sector) else { return };
        if !self.reads.is_empty() {
            let replaced = self.replaced.entry(sector).or_default();
            let before = replaced.len();
            let now = self.clock;
            replaced.extend(
                candidates
                    .iter()
                    .filter(|candidate| gone(candidate))
                    .map(|candidate| Replaced { version: candidate.version, replaced: now }),
            );
            self.replaced_count += replaced.len() - before;
        }
        candidates.retain(|candidate| !gone(candidate));
        self.settle(sector);
        if self.replaced_count > REPLACED_MAX {
            self.forget_replaced();
        }
    }

    /// Drops the replaced versions that no read in flight can return.
    fn forget_replaced(&mut self) {
        let oldest = self.reads.first().copied().unwrap_or(self.clock);
        self.replaced.retain(|_, replaced| {
            replaced.retain(|replaced| replaced.replaced > oldest);
            !replaced.is_empty()
        });
        self.replaced_count = self.replaced.values().map(Vec::len).sum();
    }

    /// A flush, or a write with FUA, is about to be sent.
    pub fn flush_sent(&mut self) -> Clock {
        if let Some(history) = &mut self.history {
            history.flush_sent();
        }
        self.tick()
    }

    /// The flush that was sent at `sent` was answered with success.
    pub fn flush_completed(&mut self, sent: Clock) {
        if let Some(history) = &mut self.history {
            history.flushed(sent);
        }
    }

    /// The write of `version`, which had FUA, was answered with success.
    pub fn write_stable(&mut self, version: Version) {
        if let Some(history) = &mut self.history {
            history.stable(version);
        }
    }

    /// The power has failed and the server was started again: checks what the volume reads as, and
    /// takes this content as the state of the volume.
    ///
    /// # Errors
    /// What is missing although it must be there, or is there although it must not be.
    ///
    /// # Panics
    /// Without a history, or while a read is in flight.
    pub fn power_lost(&mut self, image: &[u8]) -> Result<Lost, String> {
        assert!(self.reads.is_empty(), "the server is dead");
        let history = self.history.as_mut().expect("a history is kept");
        let lost = history.compare_stable(self.origin, image)?;
        self.settled = history.adopt(self.origin, image);
        self.open.clear();
        self.replaced.clear();
        self.replaced_count = 0;
        Ok(lost)
    }

    /// The write of `version` will never be answered, because its server is dead: the write has
    /// taken effect, or never will.
    pub fn write_abandoned(&mut self, version: Version, first: u64, count: u64) {
        let now = self.tick();
        for sector in first..first + count {
            let candidates = self.open.get_mut(&sector).into_iter().flatten();
            for write in candidates.filter(|candidate| candidate.version == version) {
                write.ended = Some(now);
            }
        }
    }

    /// Settles an open sector that can hold one version only.
    fn settle(&mut self, sector: u64) {
        if let Some([Candidate { version, ended: Some(_), .. }]) =
            self.open.get(&sector).map(Vec::as_slice)
        {
            self.settled[sector as usize] = *version;
            self.open.remove(&sector);
        }
    }

    /// A read that begins at sector `first` is about to be sent.
    pub fn read_sent(&mut self, first: u64) -> Snapshot {
        let sent = self.tick();
        self.reads.insert(sent);
        Snapshot { first, sent }
    }

    /// A read will never be answered.
    pub fn read_abandoned(&mut self, snapshot: &Snapshot) {
        self.reads.remove(&snapshot.sent);
    }

    /// A read was answered with `data`: checks `data`, and drops the versions that the read shows
    /// to be overwritten.
    pub fn read_completed(&mut self, snapshot: &Snapshot, data: &[u8]) -> Result<(), Violation> {
        self.tick();
        self.reads.remove(&snapshot.sent);
        for (sector, bytes) in (snapshot.first..).zip(data.chunks_exact(SECTOR_BYTES)) {
            let settled = self.settled[sector as usize];
            if settled == OPEN || !self.stamp(sector, settled).matches(bytes) {
                self.check(snapshot, sector, bytes)?;
            }
        }
        if self.reads.is_empty() {
            self.forget_replaced();
        }
        Ok(())
    }

    /// Checks a sector that is open, or that does not hold its settled version.
    fn check(&mut self, snapshot: &Snapshot, sector: u64, bytes: &[u8]) -> Result<(), Violation> {
        let replaced = self.replaced.get(&sector).into_iter().flatten();
        let mut allowed: Vec<Version> = replaced
            .filter(|replaced| replaced.replaced > snapshot.sent)
            .map(|replaced| replaced.version)
            .collect();
        match self.open.get(&sector) {
            Some(candidates) => {
                allowed.extend(candidates.iter().map(|candidate| candidate.version))
            }
            None => allowed.push(self.settled[sector as usize]),
        }
        let seen: Vec<Version> = allowed
            .iter()
            .copied()
            .filter(|version| self.stamp(sector, *version).matches(bytes))
            .collect();
        if seen.is_empty() {
            return Err(self.violation(sector, bytes, &allowed));
        }
        self.learn(snapshot.sent, sector, &seen);
        Ok(())
    }

    /// A read that was sent at `sent` returned one of the versions `seen`. All other versions whose
    /// writes had ended before `sent` are overwritten for good.
    fn learn(&mut self, sent: Clock, sector: u64, seen: &[Version]) {
        let Some(candidates) = self.open.get(&sector) else { return };
        let ended = |candidate: &Candidate| candidate.ended.is_some_and(|ended| ended < sent);
        let is_seen = |candidate: &Candidate| seen.contains(&candidate.version);
        let present = candidates.iter().filter(|candidate| is_seen(candidate)).count();
        let all_ended = candidates.iter().filter(|candidate| is_seen(candidate)).all(ended);
        // A write without an answer may be read and still be lost with its server, so it replaces
        // nothing yet.
        if present == seen.len() && all_ended {
            self.replace(sector, |candidate| ended(candidate) && !is_seen(candidate));
        }
    }

    /// The stamp of a version in a sector.
    fn stamp(&self, sector: u64, version: Version) -> Stamp {
        Stamp { origin: self.origin, sector, version }
    }

    /// The violation of a sector that holds none of the `allowed` versions.
    fn violation(&self, sector: u64, bytes: &[u8], allowed: &[Version]) -> Violation {
        let mut words: Vec<String> = allowed
            .iter()
            .map(|version| match version & ZEROS {
                0 => format!("version {version}"),
                _ => "zeros".to_string(),
            })
            .collect();
        words.dedup();
        Violation { sector, found: describe(bytes), allowed: words.join(" or ") }
    }

    /// Number of sectors of the volume.
    pub fn sectors(&self) -> u64 {
        self.settled.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { seed: 1, volume: 1 };

    fn content(version: Version) -> [u8; SECTOR_BYTES] {
        let mut bytes = [0; SECTOR_BYTES];
        Stamp { origin: ORIGIN, sector: 0, version }.fill(&mut bytes);
        bytes
    }

    fn read(model: &mut Model, version: Version) -> Result<(), Violation> {
        let snapshot = model.read_sent(0);
        model.read_completed(&snapshot, &content(version))
    }

    #[test]
    fn a_completed_write_must_be_read_and_an_older_one_must_not() {
        let mut model = Model::new(ORIGIN, 1);
        read(&mut model, ZEROS).expect("untouched");
        model.write_sent(1, 0, 1);
        read(&mut model, ZEROS).expect("not yet");
        read(&mut model, 1).expect("already");
        read(&mut model, ZEROS).expect("an unanswered write proves nothing");
        model.write_completed(1, 0, 1);
        read(&mut model, 1).expect("the newest");
        assert!(read(&mut model, ZEROS).is_err(), "a lost write is noticed");
        model.write_sent(2, 0, 1);
        model.write_completed(2, 0, 1);
        assert!(read(&mut model, 1).is_err(), "a stale read is noticed");
        assert!(model.open.is_empty(), "nothing stays open");
    }

    #[test]
    fn overlapping_writes_may_land_in_either_order_but_then_stay() {
        for winner in [1, 2] {
            let mut model = Model::new(ORIGIN, 1);
            model.write_sent(1, 0, 1);
            model.write_sent(2, 0, 1);
            model.write_completed(2, 0, 1);
            model.write_completed(1, 0, 1);
            assert!(read(&mut model, ZEROS).is_err());
            read(&mut model, winner).expect("either");
            assert!(read(&mut model, 3 - winner).is_err(), "the order is fixed by the first read");
        }
    }

    #[test]
    fn a_write_cut_off_by_a_crash_is_there_or_not_for_good() {
        for outcome in [ZEROS, 1] {
            let mut model = Model::new(ORIGIN, 1);
            model.write_sent(1, 0, 1);
            read(&mut model, 1).expect("seen before the crash");
            model.write_abandoned(1, 0, 1);
            read(&mut model, outcome).expect("either");
            let other = if outcome == 1 { ZEROS } else { 1 };
            assert!(read(&mut model, other).is_err(), "no later change of mind");
        }
    }

    #[test]
    fn a_read_may_return_what_was_current_while_it_was_under_way_only() {
        let mut model = Model::new(ORIGIN, 1);
        model.write_sent(1, 0, 1);
        model.write_completed(1, 0, 1);
        let early = model.read_sent(0);
        model.write_sent(2, 0, 1);
        model.write_completed(2, 0, 1);
        model.read_completed(&early, &content(1)).expect("current when it was sent");
        let late = model.read_sent(0);
        for version in [3, 4] {
            model.write_sent(version, 0, 1);
            model.write_completed(version, 0, 1);
        }
        model
            .read_completed(&late, &content(3))
            .expect("came and went while the read was under way");
        let late = model.read_sent(0);
        assert!(model.read_completed(&late, &content(3)).is_err());
        assert_eq!(model.replaced_count, 0, "nothing replaced is kept without a read under way");
    }

    #[test]
    fn discards_read_as_zeros_whatever_was_there() {
        let mut model = Model::new(ORIGIN, 1);
        model.write_sent(1, 0, 1);
        model.write_completed(1, 0, 1);
        model.write_sent(2 | ZEROS, 0, 1);
        model.write_completed(2 | ZEROS, 0, 1);
        read(&mut model, ZEROS).expect("zeros");
        assert!(read(&mut model, 1).is_err());
    }
}
