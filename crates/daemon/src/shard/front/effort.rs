//! How much clients, other hosts and the control plane get done between two looks at the ring, so
//! that none keeps the others waiting.
//!
//! Work is counted where it is done, in units of about what it takes to touch one block or one node
//! of the index. What one round has room for is divided among the volumes that have something to
//! do; a volume that has used its part goes on in the next round, and its connections take turns. A
//! single request may go past the rest of its volume's part, so no request may be large:
//!
//! | command | units |
//! |---|---|
//! | an option of the handshake, which may list all volumes | [`OPTION`] |
//! | any request | [`REQUEST`] |
//! | the payload of a write, answers of reads | [`BLOCK`] for each block, at most what is received at once |
//! | block status | what was looked at ([`tidepool_engine::Engine::block_status`]) |
//! | trim, write-zeroes | 1 for each block, in pieces of [`RANGE_PIECE_BYTES`] |
//!
//! A connection with another host has a part of its own, by the number of those:
//!
//! | message of another host | units |
//! |---|---|
//! | any (a beat, what it has, a flush, a request for a block or for records) | [`REQUEST`] |
//! | a record, a block | [`BLOCK`] for each block besides |
//! | what it is sent for that | one block or record at a time, and none while more than a bounded number of bytes waits to be sent |
//!
//! The control plane, which serves the admin API and the metrics, gets [`COMMANDS_MAX`] commands
//! done:
//!
//! | command | units |
//! |---|---|
//! | status, and the list of volumes | [`STATUS`] |
//! | any other: it begins something that goes on as the work of the core, which has bounds of its own | [`REQUEST`] |
//!
//! What trims and write-zeroes cost when the log has them comes later: so there is a bound to those
//! that are under way, [`RANGE_BLOCKS_MAX`].

use tidepool_engine::api::{BLOCK_BYTES, VOLUMES_MAX, VolumeId};

/// An option of a handshake.
pub(in crate::shard) const OPTION: u32 = 2 * VOLUMES_MAX as u32;
/// A request.
pub(in crate::shard) const REQUEST: u32 = 4;
/// A block that is copied.
pub(in crate::shard) const BLOCK: u32 = 8;

/// A look at all volumes.
pub(in crate::shard) const STATUS: u32 = 4 * VOLUMES_MAX as u32;
/// Commands of the control plane in one round.
pub(in crate::shard) const COMMANDS_MAX: usize = 16;

/// What is done in one round, by all clients, and as much again by all other hosts.
pub(in crate::shard) const ROUND_MAX: u32 = 8 * 1024;
/// The least that a volume gets done in a round.
const SHARE_MIN: u32 = 512;

/// Trims and write-zeroes reach the core in pieces of this many bytes at most.
pub(in crate::shard) const RANGE_PIECE_BYTES: u64 = 64 << 20;
/// Blocks of trims and write-zeroes of all clients that are in the core at once; one piece more may
/// begin below it, and a volume that has none may begin one, however long those of others stay:
/// their backends may stand still.
pub(in crate::shard) const RANGE_BLOCKS_MAX: u64 = 16 * RANGE_PIECE_BYTES / BLOCK_BYTES as u64;

/// The work of a round.
pub(in crate::shard) struct Effort {
    /// By volume, and that of clients which have none yet.
    spent: Box<[u32]>,
    total: u64,
    share: u32,
    /// Blocks of trims and write-zeroes under way, by volume, and those of all.
    ranges_of: Box<[u64]>,
    ranges: u64,
}

fn index(of: Option<VolumeId>) -> usize {
    of.map_or(VOLUMES_MAX, |id| usize::from(id.0).min(VOLUMES_MAX))
}

impl Effort {
    pub(in crate::shard) fn new() -> Effort {
        let spent = vec![0; VOLUMES_MAX + 1].into_boxed_slice();
        let ranges_of = vec![0; VOLUMES_MAX + 1].into_boxed_slice();
        Effort { spent, total: 0, share: ROUND_MAX, ranges_of, ranges: 0 }
    }

    /// The ring was looked at. Returns what was done since it was looked at before.
    pub(in crate::shard) fn next_round(&mut self) -> u64 {
        if self.total > 0 {
            self.spent.fill(0);
        }
        self.share = ROUND_MAX;
        std::mem::take(&mut self.total)
    }

    /// Divides what the round has room for among these volumes.
    pub(in crate::shard) fn divide(&mut self, active: impl Iterator<Item = Option<VolumeId>>) {
        let mut seen = [false; VOLUMES_MAX + 1];
        active.for_each(|of| seen[index(of)] = true);
        let active = seen.iter().filter(|&&seen| seen).count().max(1) as u32;
        self.share = (ROUND_MAX / active).max(SHARE_MIN);
    }

    pub(in crate::shard) fn spend(&mut self, of: Option<VolumeId>, units: u32) {
        let spent = &mut self.spent[index(of)];
        *spent = spent.saturating_add(units);
        self.total += u64::from(units);
    }

    /// Something is done that is no client's.
    pub(in crate::shard) fn count(&mut self, units: u32) {
        self.total += u64::from(units);
    }

    /// The part of each of so many connections with other hosts.
    pub(in crate::shard) fn share_of_links(links: usize) -> u32 {
        (ROUND_MAX / links.clamp(1, ROUND_MAX as usize) as u32).max(SHARE_MIN)
    }

    /// It has had its part of this round.
    pub(in crate::shard) fn is_spent(&self, of: Option<VolumeId>) -> bool {
        self.spent[index(of)] >= self.share
    }

    /// A trim or write-zeroes of so many bytes may begin.
    pub(in crate::shard) fn begin_range(&mut self, of: Option<VolumeId>, bytes: u64) -> bool {
        let own = &mut self.ranges_of[index(of)];
        let fits = self.ranges < RANGE_BLOCKS_MAX || *own == 0;
        if fits {
            *own += blocks(bytes);
            self.ranges += blocks(bytes);
        }
        fits
    }

    pub(in crate::shard) fn end_range(&mut self, of: Option<VolumeId>, bytes: u64) {
        const BALANCED: &str = "what ends has begun";
        let own = &mut self.ranges_of[index(of)];
        *own = own.checked_sub(blocks(bytes)).expect(BALANCED);
        self.ranges = self.ranges.checked_sub(blocks(bytes)).expect(BALANCED);
    }
}

/// Blocks that a range may touch.
pub(in crate::shard) fn blocks(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES as u64) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_gets_its_part_of_a_round() {
        let mut effort = Effort::new();
        let volumes =
            [Some(VolumeId(3)), None, Some(VolumeId(3)), Some(VolumeId(9)), Some(VolumeId(4))];
        effort.divide(volumes.into_iter());
        effort.spend(volumes[0], ROUND_MAX / 4 - 1);
        assert!(!effort.is_spent(volumes[0]));
        effort.spend(volumes[0], 5000);
        assert!(
            effort.is_spent(volumes[0])
                && !effort.is_spent(volumes[1])
                && !effort.is_spent(volumes[3])
        );
        assert_eq!(effort.next_round(), u64::from(ROUND_MAX / 4 - 1 + 5000));
        assert!(!effort.is_spent(volumes[0]));
        assert_eq!(effort.next_round(), 0);
    }

    #[test]
    fn ranges_under_way_are_bounded_and_those_of_one_volume_do_not_stop_another() {
        let mut effort = Effort::new();
        let (silent, other) = (Some(VolumeId(1)), Some(VolumeId(2)));
        let begun = (0..100).filter(|_| effort.begin_range(silent, RANGE_PIECE_BYTES)).count();
        assert_eq!(begun, 16);
        assert!(effort.begin_range(other, RANGE_PIECE_BYTES), "its own first one");
        assert!(!effort.begin_range(other, 1));
        effort.end_range(other, RANGE_PIECE_BYTES);
        effort.end_range(silent, RANGE_PIECE_BYTES);
        assert!(effort.begin_range(silent, RANGE_PIECE_BYTES) && !effort.begin_range(silent, 1));
    }
}
