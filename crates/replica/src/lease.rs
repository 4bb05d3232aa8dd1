//! How long an owner that may have been taken over without knowing takes reads, and how long whoever takes over waits for that. Both
//! go by their own clock, which does not stand still while a process or a host does (`CLOCK_BOOTTIME`).

use tidepool_engine::api::Nanos;

/// Nanoseconds after its peer was last known to follow it for which an owner takes reads, by its own clock.
pub const LEASE_NS: Nanos = 500_000_000;
/// Nanoseconds after a peer has told its owner for the last time that it follows it until that one takes no more reads, by the peer's
/// clock: one of the two may run a tenth faster.
const UNFOLLOWED_NS: Nanos = LEASE_NS + LEASE_NS / 10;

/// How many nanoseconds a host that has taken a volume over still waits before it serves it, when its former owner was last told so
/// long ago that it is followed. One that has let go of the image by itself is not waited for.
pub fn serves_after(unfollowed_ns: Nanos) -> Nanos {
    if mutated!(ServesAtOnce) { 0 } else { UNFOLLOWED_NS.saturating_sub(unfollowed_ns) }
}
