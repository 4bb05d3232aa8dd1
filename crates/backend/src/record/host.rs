//! This host and the present time, as records name them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of this host, as it is written into records.
pub fn host_name() -> String {
    // A name may be any bytes, and a record with control characters would be refused when it is
    // read again.
    printable(&rustix::system::uname().nodename().to_string_lossy())
}

/// The text with every control character replaced, so that it stays on one line.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// The kernel's id of this boot of the host, as it is written into records; empty where there is
/// none.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// Whether the boot id of a record or peer is that of this boot. `false` where it is empty.
pub(crate) fn is_this_boot(id: &str) -> bool {
    !id.is_empty() && id == boot_id()
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// How long ago `time_unix_s` was, for messages.
pub(crate) fn age(time_unix_s: u64) -> String {
    match unix_s().saturating_sub(time_unix_s) {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}
