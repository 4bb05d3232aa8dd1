//! Simulated time, and what is going to happen.

use crate::rng::mix;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tidepool_engine::api::Nanos;

/// Ticks of the core without any progress of time after which it counts as spinning.
const SPIN_MAX: u32 = 10_000;

/// A clock that moves from one thing that happens to the next.
pub(super) struct Clock<T> {
    now: Nanos,
    /// All that happens has a multiple of this as its time.
    quantum: Nanos,
    /// Decides the order within an instant.
    order: u64,
    agenda: BinaryHeap<Reverse<(Nanos, u64, T)>>,
    /// Instants in which time has not moved.
    spins: u32,
    steps: u64,
}

impl<T: Copy + Ord> Clock<T> {
    pub(super) fn new(quantum: Nanos, order: u64) -> Clock<T> {
        Clock { now: 0, quantum, order, agenda: BinaryHeap::new(), spins: 0, steps: 0 }
    }

    pub(super) fn now(&self) -> Nanos {
        self.now
    }

    /// How much has happened.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// What is to happen, and when. `identity` decides what comes first at one point of time.
    pub(super) fn at(&mut self, when: Nanos, identity: u64, what: T) {
        let when = when.max(self.now).div_ceil(self.quantum) * self.quantum;
        self.agenda.push(Reverse((when, identity, what)));
    }

    /// Where in an instant something comes that has this identity.
    pub(super) fn place(&self, identity: u64) -> u64 {
        mix(self.order, identity)
    }

    /// Goes on to the next point of time: that of what is to happen next, or this deadline.
    ///
    /// # Errors
    /// Time does not go on any more.
    pub(super) fn advance(&mut self, deadline: Option<Nanos>) -> Result<(), String> {
        let due = self.agenda.peek().map(|Reverse((at, ..))| *at);
        let Some(at) = due.into_iter().chain(deadline).min() else {
            return Err("nothing is left to happen".into());
        };
        self.spins = if at > self.now { 0 } else { self.spins + 1 };
        if self.spins > SPIN_MAX {
            return Err("the core spins: its deadline passes again and again".into());
        }
        self.now = self.now.max(at);
        Ok(())
    }

    /// What happens now, with its identity, if there is anything left.
    pub(super) fn due(&mut self) -> Option<(u64, T)> {
        let &Reverse((at, identity, what)) = self.agenda.peek()?;
        if at > self.now {
            return None;
        }
        self.agenda.pop();
        self.steps += 1;
        Some((identity, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_comes_in_the_order_of_time_and_identity() {
        let mut clock = Clock::new(10, 0);
        for (when, identity, what) in [(25, 1, 'c'), (1, 3, 'b'), (9, 2, 'a')] {
            clock.at(when, identity, what);
        }
        let mut all = Vec::new();
        while clock.advance(None).is_ok() {
            while let Some((_, what)) = clock.due() {
                all.push((clock.now(), what));
            }
        }
        assert_eq!(all, [(10, 'a'), (10, 'b'), (30, 'c')]);
        assert_eq!(clock.steps(), 3);
    }

    #[test]
    fn a_clock_that_stands_still_is_told() {
        let mut clock: Clock<()> = Clock::new(1, 0);
        let moved = (0..2 * SPIN_MAX).take_while(|_| clock.advance(Some(0)).is_ok()).count();
        assert_eq!(moved as u32, SPIN_MAX);
    }
}
