//! How long two hosts wait for each other, as one value that owner, peer, daemon and simulator
//! share.
//!
//! Drivers measure with their host's own clock (`CLOCK_BOOTTIME`), which goes on while a process is
//! stopped or the host sleeps. It stands still while the host is a virtual machine that is paused.
//! The last wait of a takeover may use a clock that stands still while the host sleeps: then the
//! host waits longer.

use tidepool_engine::api::Nanos;

/// The shortest fence that the limits of a release have to fit: a minute, where backends fence for
/// an hour and more.
const FENCE_NS: Nanos = 60 * S;
const _: () = assert!(Limits::SHIPPED.fit(FENCE_NS) && Limits::SHIPPED.times(10).fit(FENCE_NS));

/// The lease of hosts whose `Hello` does not carry one: version 1 of the protocol.
pub const LEASE_V1_NS: Nanos = 500 * MS;

const MS: Nanos = 1_000_000;
const S: Nanos = 1_000 * MS;

/// Time limits of two hosts that keep copies for each other, in nanoseconds.
///
/// A host that takes a volume over relies on the lease of the owner. So both hosts use one lease:
/// `Hello` carries the owner's, and a peer with another one refuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Between two beats of a link.
    pub beat_ns: Nanos,
    /// Without a word the other host counts as gone after this time.
    pub silence_ns: Nanos,
    /// An owner takes reads for this time after the newest beat that its peer has echoed.
    pub lease_ns: Nanos,
    /// A connected peer may echo a beat this much later than the lease allows. Then the owner drops
    /// the peer, because reads wait.
    pub late_ns: Nanos,
    /// A peer that is behind has to confirm a record within this time.
    pub progress_ns: Nanos,
    /// The log waits this long for a copy that is incomplete and has no room.
    pub held_up_ns: Nanos,
    /// The log waits this long for a copy that has not begun.
    pub beginning_ns: Nanos,
    /// Pause before a change of the ownership record is tried again.
    pub record_retry_ns: Nanos,
    /// A connection to a peer has to come about within this time.
    pub connect_ns: Nanos,
    /// The first message of a host that has connected has to arrive within this time.
    pub hello_ns: Nanos,
    /// A peer has to answer the first message within this time. It reads the ownership record
    /// first.
    pub welcome_ns: Nanos,
    /// A peer waits this long for the ownership record when it hears a `Hello`.
    pub record_ns: Nanos,
    /// A host has to answer a question on an open connection (a record, a block of a moving volume)
    /// within this time.
    pub answer_ns: Nanos,
    /// A peer has to serve a volume that is handed over to it within this time.
    pub taken_ns: Nanos,
    /// A volume that is to be handed over waits this long for requests under way.
    pub hand_over_ns: Nanos,
    /// A hand-over waits this long for clients that are about to disconnect.
    pub clients_ns: Nanos,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::SHIPPED
    }
}

impl Limits {
    /// The limits of a release.
    pub const SHIPPED: Limits = Limits {
        beat_ns: 100 * MS,
        silence_ns: 300 * MS,
        lease_ns: LEASE_V1_NS,
        late_ns: S,
        progress_ns: 2 * S,
        held_up_ns: 100 * MS,
        beginning_ns: 300 * MS,
        record_retry_ns: 200 * MS,
        connect_ns: 2 * S,
        hello_ns: 5 * S,
        welcome_ns: 10 * S,
        record_ns: 8 * S,
        answer_ns: 5 * S,
        taken_ns: 30 * S,
        hand_over_ns: 10 * S,
        clients_ns: 500 * MS,
    };

    /// These limits, each `n` times as long, but for beats and pauses: a machine that is slow for a
    /// while shows no more than that.
    pub const fn times(self, n: u64) -> Limits {
        Limits {
            beat_ns: self.beat_ns,
            silence_ns: self.silence_ns * n,
            lease_ns: self.lease_ns * n,
            late_ns: self.late_ns * n,
            progress_ns: self.progress_ns * n,
            held_up_ns: self.held_up_ns * n,
            beginning_ns: self.beginning_ns * n,
            record_retry_ns: self.record_retry_ns,
            connect_ns: self.connect_ns * n,
            hello_ns: self.hello_ns * n,
            welcome_ns: self.welcome_ns * n,
            record_ns: self.record_ns * n,
            answer_ns: self.answer_ns * n,
            taken_ns: self.taken_ns * n,
            hand_over_ns: self.hand_over_ns * n,
            clients_ns: self.clients_ns * n,
        }
    }

    /// How long a host that takes a volume over waits, from its last echoed beat on, until it
    /// serves the volume: the owner's lease and a tenth of it, because one of the two clocks may
    /// run a tenth faster.
    pub const fn takeover_ns(&self) -> Nanos {
        self.lease_ns + self.lease_ns / 10
    }

    /// How many of these nanoseconds are left `unfollowed_ns` after the last echoed beat. Callers
    /// do not wait for an owner that has let go of the image by itself.
    pub fn serves_after(&self, unfollowed_ns: Nanos) -> Nanos {
        if mutated!(ServesAtOnce) { 0 } else { self.takeover_ns().saturating_sub(unfollowed_ns) }
    }

    /// Whether the limits fit each other, and `fence_ns`, the shortest time for which a takeover
    /// fences the former owner.
    ///
    /// An owner hears several beats before it counts its peer as gone. Its lease ends before the
    /// peer serves, whatever their clocks do, and the fence outlasts that wait. A peer's answer to
    /// the first message includes its look at the ownership record.
    pub const fn fit(&self, fence_ns: Nanos) -> bool {
        2 * self.beat_ns < self.silence_ns
            && self.silence_ns < self.lease_ns
            && self.lease_ns < self.takeover_ns()
            && self.takeover_ns() < fence_ns
            && self.record_ns < self.welcome_ns
            && self.hand_over_ns < self.taken_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_do_not_fit_are_noticed() {
        let good = Limits::SHIPPED;
        assert!(good.fit(FENCE_NS));
        assert!(!good.fit(good.takeover_ns()), "the fence ends with the wait of a takeover");
        for bad in [
            Limits { silence_ns: 2 * good.beat_ns, ..good },
            Limits { silence_ns: good.lease_ns, ..good },
            Limits { lease_ns: 9, ..good },
            Limits { lease_ns: FENCE_NS, ..good },
            Limits { record_ns: good.welcome_ns, ..good },
            Limits { hand_over_ns: good.taken_ns, ..good },
        ] {
            assert!(!bad.fit(FENCE_NS), "{bad:?}");
        }
    }

    #[test]
    fn a_takeover_waits_for_the_lease_and_for_a_clock_that_runs_a_tenth_faster() {
        let limits = Limits::SHIPPED;
        assert_eq!(limits.serves_after(0), 550 * MS);
        assert_eq!(limits.serves_after(549 * MS), MS);
        assert_eq!(limits.serves_after(S), 0);
        assert_eq!(limits.times(10).serves_after(S), 4_500 * MS);
    }
}
