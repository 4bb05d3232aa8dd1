//! The reactor's clock.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since the machine was booted, including time in suspend: a lease must also expire
/// while the machine is suspended.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
