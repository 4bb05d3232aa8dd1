//! The look at what a power loss has left of a volume, before clients use it.

/// Looks in flight.
const LOOKS: u32 = 32;
/// In place of the next block to be looked at: none for a while.
const PAUSED: u64 = u64::MAX;

/// How far the look has come.
#[derive(Default)]
pub(in crate::world) struct Look {
    due: bool,
    /// Next block to be looked at.
    from: u64,
    /// Looks in flight.
    in_flight: u32,
}

impl Look {
    /// Before use, what the volume holds is looked at.
    pub(in crate::world) fn is_due(&self) -> bool {
        self.due
    }

    pub(in crate::world) fn set_due(&mut self, due: bool) {
        self.due = due;
    }

    /// The next block to be looked at, if there is room for a look.
    pub(in crate::world) fn next(&self) -> Option<u64> {
        (self.in_flight < LOOKS).then_some(self.from)
    }

    /// Blocks are being looked at; `next` is the one behind them.
    pub(in crate::world) fn begin(&mut self, next: u64) {
        self.from = next;
        self.in_flight += 1;
    }

    /// A look is over.
    pub(in crate::world) fn end(&mut self) {
        self.in_flight -= 1;
    }

    pub(in crate::world) fn is_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    pub(in crate::world) fn is_paused(&self) -> bool {
        self.from == PAUSED
    }

    /// Nothing is looked at for a while.
    pub(in crate::world) fn pause(&mut self) {
        self.from = PAUSED;
    }

    /// All that is left is looked at again.
    pub(in crate::world) fn begin_again(&mut self) {
        self.from = 0;
    }

    pub(super) fn forget_life(&mut self) {
        (self.from, self.in_flight) = (0, 0);
    }
}
