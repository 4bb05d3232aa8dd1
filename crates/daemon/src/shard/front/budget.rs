//! Who may take how much of the arena: volumes, and within a volume its connections.
//!
//! A part of it is reserved, the same for each volume that has clients: a volume goes on however
//! many others have backends that stand still. Of the rest a volume gets at most twice what is left
//! afterwards for the others (dynamic thresholds), so that alone it can use a lot. Of a volume's
//! share, in turn, a connection gets at most what is left afterwards for the volume's others:
//! clients that never take their replies leave room for one more that does.

use crate::shard::limits::{RESERVE_BYTES_MAX, RESERVE_SHARE};
use tidepool_engine::api::{VOLUMES_MAX, VolumeId};

/// What one holder (a connection, or the unaligned writes of a volume) has of the arena.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::shard) struct Held {
    bytes: usize,
    volume: Option<VolumeId>,
}

impl Held {
    /// A holder for a volume; it does not count among the volume's clients.
    pub(in crate::shard) fn of(volume: VolumeId) -> Held {
        Held { bytes: 0, volume: Some(volume) }
    }

    pub(in crate::shard) fn is_zero(&self) -> bool {
        self.bytes == 0
    }
}

/// One volume's part.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    held: usize,
    clients: u32,
}

/// The front door's part of the arena.
pub(in crate::shard) struct Budget {
    total: usize,
    room: usize,
    shares: Box<[Share]>,
    /// What is reserved for each volume with clients.
    reserve: usize,
    /// What all volumes have beyond their reserves.
    excess: usize,
}

impl Budget {
    pub(in crate::shard) fn new(total: usize) -> Budget {
        let shares = vec![Share::default(); VOLUMES_MAX].into_boxed_slice();
        Budget { total, room: total, shares, reserve: 0, excess: 0 }
    }

    /// The holder becomes a client of a volume.
    pub(in crate::shard) fn join(&mut self, held: &mut Held, volume: VolumeId) {
        assert!(held.is_zero() && held.volume.is_none(), "a client belongs to one volume");
        held.volume = Some(volume);
        self.shares[usize::from(volume.0)].clients += 1;
        self.divide();
    }

    /// The holder is no client any more.
    pub(in crate::shard) fn leave(&mut self, held: &mut Held) {
        assert!(held.is_zero(), "what a client holds is given back before it leaves");
        if let Some(volume) = held.volume.take() {
            let share = &mut self.shares[usize::from(volume.0)];
            share.clients = share.clients.checked_sub(1).expect("a client leaves once");
            self.divide();
        }
    }

    fn divide(&mut self) {
        let volumes = self.shares.iter().filter(|share| share.clients > 0).count().max(1);
        self.reserve = (self.total / RESERVE_SHARE / volumes).min(RESERVE_BYTES_MAX);
        self.excess = self.shares.iter().map(|share| share.held.saturating_sub(self.reserve)).sum();
    }

    /// Takes `bytes` for a holder, unless it has its share.
    pub(in crate::shard) fn take(&mut self, held: &mut Held, bytes: usize) -> bool {
        let Some(volume) = held.volume else { return false };
        let share = self.shares[usize::from(volume.0)];
        let others = self.excess - share.held.saturating_sub(self.reserve);
        let common = (self.total - self.total / RESERVE_SHARE).saturating_sub(others);
        let cap = self.reserve + common / 3 * 2;
        if held.bytes + share.held + bytes > cap {
            return false;
        }
        self.take_anyway(held, bytes)
    }

    /// Takes `bytes` for a holder whatever its share is, if they are there.
    pub(in crate::shard) fn take_anyway(&mut self, held: &mut Held, bytes: usize) -> bool {
        let Some(volume) = held.volume.filter(|_| bytes <= self.room) else { return false };
        held.bytes += bytes;
        self.room -= bytes;
        self.change(volume, |share| share.held += bytes);
        true
    }

    /// Gives `bytes` back.
    pub(in crate::shard) fn give(&mut self, held: &mut Held, bytes: usize) {
        let volume = held.volume.expect("a connection that holds memory belongs to a volume");
        held.bytes -= bytes;
        self.room += bytes;
        self.change(volume, |share| share.held -= bytes);
    }

    fn change(&mut self, volume: VolumeId, change: impl FnOnce(&mut Share)) {
        let share = &mut self.shares[usize::from(volume.0)];
        self.excess -= share.held.saturating_sub(self.reserve);
        change(share);
        self.excess += share.held.saturating_sub(self.reserve);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;
    const PIECE: usize = 512 << 10;

    fn client(budget: &mut Budget, volume: u16) -> Held {
        let mut held = Held::default();
        budget.join(&mut held, VolumeId(volume));
        held
    }

    /// Takes until no more is given; returns the bytes.
    fn fill(budget: &mut Budget, held: &mut Held) -> usize {
        while budget.take(held, PIECE) {}
        held.bytes
    }

    #[test]
    fn volumes_that_take_all_they_get_leave_room_for_one_more() {
        // With many volumes, those that come late must wait for memory to be divided anew.
        for (volumes, comes_late) in [(1u16, true), (2, true), (10, true), (60, false)] {
            let mut budget = Budget::new(144 * MIB);
            if !comes_late {
                for volume in 0..=volumes {
                    client(&mut budget, volume);
                }
            }
            for volume in 0..volumes {
                for _ in 0..20 {
                    let mut greedy = client(&mut budget, volume);
                    fill(&mut budget, &mut greedy);
                }
            }
            let mut last = client(&mut budget, volumes);
            assert!(fill(&mut budget, &mut last) >= PIECE, "{volumes} greedy volumes");
        }
    }

    #[test]
    fn clients_that_take_all_they_get_leave_room_for_one_more_of_their_volume() {
        let mut budget = Budget::new(144 * MIB);
        for _ in 0..4 {
            let mut greedy = client(&mut budget, 0);
            fill(&mut budget, &mut greedy);
        }
        let mut last = client(&mut budget, 0);
        assert!(budget.take(&mut last, PIECE));
    }

    #[test]
    fn alone_a_client_can_use_a_quarter() {
        let mut budget = Budget::new(144 * MIB);
        let mut held = client(&mut budget, 3);
        assert!(fill(&mut budget, &mut held) >= 36 * MIB);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_taken_twice(steps in prop::collection::vec((0u16..5, 0usize..4, any::<bool>()), 1..300)) {
            let total = 8 * MIB;
            let mut budget = Budget::new(total);
            let mut clients: Vec<Held> = Vec::new();
            for (volume, size, grow) in steps {
                let bytes = 4096 << (size * 2);
                if grow && clients.len() < 12 {
                    clients.push(client(&mut budget, volume));
                }
                let index = usize::from(volume) % clients.len().max(1);
                match clients.get_mut(index) {
                    Some(held) if grow => { budget.take(held, bytes); }
                    Some(held) if held.bytes >= bytes => budget.give(held, bytes),
                    Some(held) if held.is_zero() => {
                        budget.leave(held);
                        clients.swap_remove(index);
                    }
                    _ => {}
                }
                let taken: usize = clients.iter().map(|held| held.bytes).sum();
                prop_assert_eq!(budget.room + taken, total);
                let beyond = |share: &Share| share.held.saturating_sub(budget.reserve);
                prop_assert_eq!(budget.excess, budget.shares.iter().map(beyond).sum::<usize>());
            }
        }
    }
}
