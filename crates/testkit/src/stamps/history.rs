//! All that was ever written, to tell whether an image is the volume as it once was.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use super::content::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS, describe};
use super::model::Clock;

/// One write, discard or write of zeroes.
#[derive(Debug, Clone, Copy)]
struct Change {
    version: Version,
    first: u64,
    count: u64,
    sent: Clock,
    /// When it was answered, in the workload's time and in milliseconds since 1970.
    acked: Option<(Clock, u64)>,
}

/// All changes of a workload on a volume that read as zeros at first.
#[derive(Debug, Default)]
pub struct History {
    changes: BTreeMap<Version, Change>,
}

/// What an image lacks of a workload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost {
    /// Acknowledged changes.
    pub changes: usize,
    /// Bytes of data that the image lacks. Zeroes and discards are not counted: a cache keeps no bytes for them.
    pub bytes: u64,
    /// When the first and the last of them were acknowledged, in milliseconds since 1970.
    pub acked_unix_ms: Option<(u64, u64)>,
}

impl History {
    pub(super) fn sent(&mut self, version: Version, first: u64, count: u64, sent: Clock) {
        self.changes.insert(version, Change { version, first, count, sent, acked: None });
    }

    pub(super) fn acked(&mut self, version: Version, now: Clock) {
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
        if let Some(change) = self.changes.get_mut(&version) {
            change.acked = Some((now, unix_ms));
        }
    }

    /// Compares an image with every state that the volume has had: no change may be missing that was acknowledged
    /// before one that is there was sent.
    ///
    /// # Errors
    /// What makes it no such state.
    pub fn compare(&self, origin: Origin, image: &[u8]) -> Result<Lost, String> {
        let sectors = image.len() / SECTOR_BYTES;
        let mut of: Vec<Vec<Version>> = vec![Vec::new(); sectors];
        for change in self.changes.values() {
            for sector in change.first..(change.first + change.count).min(sectors as u64) {
                of[sector as usize].push(change.version);
            }
        }
        let (mut missing, mut bytes) = (BTreeSet::new(), 0);
        let mut newest: Option<(Clock, u64)> = None;
        for (sector, bytes_found) in (0..).zip(image.chunks_exact(SECTOR_BYTES)) {
            let here = of[sector as usize].iter().map(|version| self.changes[version]);
            let is = |version| Stamp { origin, sector, version }.matches(bytes_found);
            let there: Vec<Change> = here.clone().filter(|change| is(change.version)).collect();
            let untouched = is(ZEROS);
            if there.is_empty() && !untouched {
                return Err(format!(
                    "sector {sector} holds {}, which was never there",
                    describe(bytes_found)
                ));
            }
            // Several may have left zeroes: then it is not known which.
            if let ([change], false) = (&there[..], untouched) {
                newest = newest.max(Some((change.sent, sector)));
            }
            let end = |change: &Change| change.acked.map_or(Clock::MAX, |(ended, _)| ended);
            let latest = there.iter().map(end).max().unwrap_or(0);
            let lost =
                here.filter(|change| change.acked.is_some() && !is(change.version) && latest < change.sent);
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
        Ok(Lost { changes: missing.len(), bytes, acked_unix_ms })
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
        let lost =
            |versions| history.compare(ORIGIN, &image(versions)).map(|lost| (lost.changes, lost.bytes));
        assert_eq!(lost([3, 2]), Ok((0, 0)), "one that was not acknowledged may be there");
        assert_eq!(lost([1, 2]), Ok((0, 0)));
        assert_eq!(lost([1, ZEROS]), Ok((1, 512)));
        assert_eq!(lost([ZEROS, ZEROS]), Ok((2, 1024)));
        assert!(lost([ZEROS, 2]).is_err());
        assert!(lost([4, 2]).is_err());
        // Zeroes over it: the change is missing, and no data.
        history.sent(4 | ZEROS, 1, 1, 6);
        history.acked(4 | ZEROS, 7);
        let lost = history.compare(ORIGIN, &image([1, 2])).expect("as it once was");
        assert_eq!((lost.changes, lost.bytes), (1, 0));
    }
}
