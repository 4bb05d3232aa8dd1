//! All changes of a volume, to check whether an image equals a state that the volume has had.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use tidepool_cluster::stamps::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS, describe};

use super::model::Clock;

/// One write, discard or write of zeroes.
#[derive(Debug, Clone, Copy)]
struct Change {
    version: Version,
    first: u64,
    count: u64,
    sent: Clock,
    /// When the change was acknowledged: in the workload's logical time, and in milliseconds since
    /// 1970. `None` without an answer.
    acked: Option<(Clock, u64)>,
    /// The answer promised that the change is on stable media.
    stable: bool,
}

/// All changes of a workload on a volume since the history began.
#[derive(Debug, Default)]
pub struct History {
    changes: BTreeMap<Version, Change>,
    /// Versions of the sectors that were not zero when the history began. All other sectors were
    /// zero.
    base: HashMap<u64, Version>,
    /// All changes that were acknowledged before this time are on stable media.
    stable_before: Clock,
    /// The client has sent a flush or a FUA change. Until then the server acknowledges a change
    /// only when it is on stable media.
    flushes: bool,
}

/// The acknowledged changes that an image lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost {
    /// Number of acknowledged changes that are missing, at least in part.
    pub changes: usize,
    /// Bytes of data that are missing. Zeroes and discards are not counted, because a cache keeps
    /// no bytes for them.
    pub bytes: u64,
    /// When the first and the last of the missing changes were acknowledged, in milliseconds since
    /// 1970.
    pub acked_unix_ms: Option<(u64, u64)>,
}

impl History {
    pub(super) fn sent(&mut self, version: Version, first: u64, count: u64, sent: Clock) {
        self.changes
            .insert(version, Change { version, first, count, sent, acked: None, stable: false });
    }

    pub(super) fn acked(&mut self, version: Version, now: Clock) {
        let unix_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
        if let Some(change) = self.changes.get_mut(&version) {
            change.acked = Some((now, unix_ms));
            if !self.flushes {
                change.stable = true;
                self.stable_before = self.stable_before.max(change.sent);
            }
        }
    }

    /// A flush, or a change with FUA, was sent.
    pub(super) fn flush_sent(&mut self) {
        self.flushes = true;
    }

    /// A flush that was sent at `sent` was answered: what was acknowledged before `sent` is on
    /// stable media.
    pub(super) fn flushed(&mut self, sent: Clock) {
        self.stable_before = self.stable_before.max(sent);
    }

    /// A change with FUA was answered: the change is on stable media, and so is what was
    /// acknowledged before the change was sent.
    pub(super) fn stable(&mut self, version: Version) {
        if let Some(change) = self.changes.get_mut(&version) {
            change.stable = true;
            self.stable_before = self.stable_before.max(change.sent);
        }
    }

    /// Starts a new history from an image in which [`History::compare`] has found no error, after a
    /// restart of the server. Returns the version of every sector.
    pub(super) fn adopt(&mut self, origin: Origin, image: &[u8]) -> Vec<Version> {
        let of = self.by_sector(image.len() / SECTOR_BYTES);
        let found: Vec<Version> = (0..)
            .zip(image.chunks_exact(SECTOR_BYTES))
            .map(|(sector, bytes)| {
                let is =
                    |version: &Version| Stamp { origin, sector, version: *version }.matches(bytes);
                of[sector as usize].iter().copied().find(is).unwrap_or_else(|| self.base_of(sector))
            })
            .collect();
        let base = (0..).zip(&found).filter(|(_, version)| **version & ZEROS == 0);
        *self = History {
            base: base.map(|(sector, &version)| (sector, version)).collect(),
            ..Default::default()
        };
        found
    }

    /// The version of a sector when the history began.
    fn base_of(&self, sector: u64) -> Version {
        self.base.get(&sector).copied().unwrap_or(ZEROS)
    }

    /// The versions of the changes of each sector.
    fn by_sector(&self, sectors: usize) -> Vec<Vec<Version>> {
        let mut of: Vec<Vec<Version>> = vec![Vec::new(); sectors];
        for change in self.changes.values() {
            for sector in change.first..(change.first + change.count).min(sectors as u64) {
                of[sector as usize].push(change.version);
            }
        }
        of
    }

    /// Compares an image with all states that the volume has had. When change A is in the image, no
    /// change that was acknowledged before A was sent may be missing. A change that a later change
    /// has overwritten does not count as missing.
    ///
    /// # Errors
    /// The reason why the image equals none of these states.
    pub fn compare(&self, origin: Origin, image: &[u8]) -> Result<Lost, String> {
        self.find_missing(origin, image).map(|(lost, _)| lost)
    }

    /// Compares as [`History::compare`] does, for the content of a volume after a power loss: no
    /// change that is on stable media according to the answers may be missing either.
    ///
    /// # Errors
    /// The reason why the image equals none of these states, or a missing change.
    pub fn compare_stable(&self, origin: Origin, image: &[u8]) -> Result<Lost, String> {
        let (lost, missing) = self.find_missing(origin, image)?;
        let is_stable = |change: &&Change| {
            change.stable || change.acked.is_some_and(|(ended, _)| ended < self.stable_before)
        };
        match missing.iter().find(is_stable) {
            None => Ok(lost),
            Some(change) => Err(format!(
                "the change {} of {} sectors from {} on is missing in part, which was sent at {} and is on stable media by what was \
                 answered (everything before {} is)",
                change.version & !ZEROS,
                change.count,
                change.first,
                change.sent,
                self.stable_before
            )),
        }
    }

    /// Finds the changes that an image lacks.
    fn find_missing(&self, origin: Origin, image: &[u8]) -> Result<(Lost, Vec<Change>), String> {
        let of = self.by_sector(image.len() / SECTOR_BYTES);
        let (mut missing, mut bytes) = (BTreeSet::new(), 0);
        let mut newest: Option<(Clock, u64)> = None;
        for (sector, bytes_found) in (0..).zip(image.chunks_exact(SECTOR_BYTES)) {
            let here = of[sector as usize].iter().map(|version| self.changes[version]);
            let is = |version| Stamp { origin, sector, version }.matches(bytes_found);
            let there: Vec<Change> = here.clone().filter(|change| is(change.version)).collect();
            let untouched = is(self.base_of(sector));
            if there.is_empty() && !untouched {
                return Err(format!(
                    "sector {sector} holds {}, which was never there",
                    describe(bytes_found)
                ));
            }
            // When several changes match, or the sector matches its state before the history, the
            // change that the sector holds is unknown.
            if let ([change], false) = (&there[..], untouched) {
                newest = newest.max(Some((change.sent, sector)));
            }
            let end = |change: &Change| change.acked.map_or(Clock::MAX, |(ended, _)| ended);
            let latest = there.iter().map(end).max().unwrap_or(0);
            let lost = here.filter(|change| {
                change.acked.is_some() && !is(change.version) && latest < change.sent
            });
            let lost: Vec<Change> = lost.collect();
            let is_data = |change: &Change| change.version & ZEROS == 0;
            let data = lost.iter().max_by_key(|change| change.sent).is_some_and(is_data);
            bytes += u64::from(data) * SECTOR_BYTES as u64;
            missing.extend(lost.iter().map(|change| change.version));
        }
        let missing: Vec<Change> = missing.iter().map(|version| self.changes[version]).collect();
        let first = missing
            .iter()
            .filter_map(|change| change.acked.map(|(ended, _)| (ended, change)))
            .min_by_key(|m| m.0);
        if let (Some((ended, change)), Some((sent, sector))) = (first, newest)
            && sent > ended
        {
            return Err(format!(
                "the change of sector {} that was acknowledged at {ended} is missing, but that of sector {sector} is there which \
                 was sent at {sent}",
                change.first
            ));
        }
        let times = missing.iter().filter_map(|change| change.acked.map(|(_, unix_ms)| unix_ms));
        let acked_unix_ms = times.clone().min().zip(times.max());
        Ok((Lost { changes: missing.len(), bytes, acked_unix_ms }, missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { seed: 1, volume: 1 };

    fn image(versions: [Version; 2]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR_BYTES];
        for (sector, part) in (0..).zip(image.chunks_exact_mut(SECTOR_BYTES)) {
            Stamp { origin: ORIGIN, sector, version: versions[sector as usize] }.fill(part);
        }
        image
    }

    #[test]
    fn an_image_lacks_a_tail_or_is_no_state_of_the_volume() {
        let mut history = History::default();
        history.sent(1, 0, 1, 1);
        history.acked(1, 2);
        history.sent(2, 1, 1, 3);
        history.acked(2, 4);
        history.sent(3, 0, 1, 5);
        let lost = |versions| {
            history.compare(ORIGIN, &image(versions)).map(|lost| (lost.changes, lost.bytes))
        };
        assert_eq!(lost([3, 2]), Ok((0, 0)), "one that was not acknowledged may be there");
        assert_eq!(lost([1, 2]), Ok((0, 0)));
        assert_eq!(lost([1, ZEROS]), Ok((1, 512)));
        assert_eq!(lost([ZEROS, ZEROS]), Ok((2, 1024)));
        assert!(lost([ZEROS, 2]).is_err());
        assert!(lost([4, 2]).is_err());
        // Zeroes are written over the sector: the zeroes are missing, but no data.
        history.sent(4 | ZEROS, 1, 1, 6);
        history.acked(4 | ZEROS, 7);
        let lost = history.compare(ORIGIN, &image([1, 2])).expect("as it once was");
        assert_eq!((lost.changes, lost.bytes), (1, 0));
    }

    #[test]
    fn what_was_said_to_be_stable_may_not_be_missing() {
        let lost = |history: &History, versions| {
            history.compare_stable(ORIGIN, &image(versions)).map(|lost| lost.changes)
        };
        let mut history = History::default();
        history.sent(1, 0, 1, 1);
        history.acked(1, 2);
        assert!(
            lost(&history, [ZEROS, ZEROS]).is_err(),
            "before the first flush every write waits for stable media"
        );
        history.flush_sent();
        history.sent(2, 1, 1, 3);
        history.acked(2, 4);
        assert_eq!(lost(&history, [1, ZEROS]), Ok(1));
        history.flushed(4);
        assert_eq!(lost(&history, [1, ZEROS]), Ok(1), "the flush was sent before the answer");
        history.flushed(5);
        assert!(lost(&history, [1, ZEROS]).is_err());
        history.sent(3, 0, 1, 6);
        history.acked(3, 8);
        history.sent(4, 1, 1, 7);
        history.acked(4, 9);
        assert_eq!(lost(&history, [1, 2]), Ok(2));
        history.stable(4);
        assert!(lost(&history, [1, 2]).is_err());
        assert_eq!(lost(&history, [1, 4]), Ok(1), "they overlapped in time");
        // The history goes on from what was found.
        assert_eq!(history.adopt(ORIGIN, &image([1, 4])), [1, 4]);
        assert_eq!(lost(&history, [1, 4]), Ok(0));
        assert!(lost(&history, [3, 4]).is_err(), "what is gone does not come back");
        assert!(lost(&history, [ZEROS, 4]).is_err());
    }
}
