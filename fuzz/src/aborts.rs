//! Notes of which volume the reactor was working for when the daemon ended.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use tidepool_daemon::aborts::{OF_VOLUME_MAX, WITHIN, left_out, read};

/// The cache whose volumes are asked for.
const CACHE: &str = "c";

fn file_in_memory() -> File {
    // SAFETY: the name is a text that ends, and nobody else knows the descriptor.
    unsafe {
        let fd = libc::memfd_create(c"aborts".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "no file in memory");
        File::from_raw_fd(fd)
    }
}

/// The time in decimal, and behind a newline the file. What is read stands in one line of it. A
/// volume is left out that has ended the daemon often in a short while that is not long ago, and no
/// other.
pub(crate) fn aborts(bytes: &[u8]) {
    let at = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
    let now = std::str::from_utf8(&bytes[..at]).ok().and_then(|text| text.parse::<u64>().ok());
    let (Some(now_unix_ms), Some(content)) = (now, bytes.get(at + 1..)) else { return };
    let mut file = file_in_memory();
    file.write_all(content).expect("a file in memory");
    let aborts = read(&mut file).expect("a file in memory");
    let lines: Vec<&[u8]> = content.split(|&byte| byte == b'\n').collect();
    assert!(aborts.len() <= lines.len());
    let mut of_volume: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for abort in &aborts {
        let Value::Object(fields) = serde_json::to_value(abort).expect("plain fields") else {
            panic!("{abort:?} is no object")
        };
        let text = |name: &str| fields[name].as_str().expect("a text").to_owned();
        let time_unix_ms = fields["time_unix_ms"].as_u64().expect("a time");
        if text("cache") == CACHE && time_unix_ms <= now_unix_ms {
            of_volume.entry(text("volume")).or_default().push(time_unix_ms);
        }
        // Written, it is one line, which is read again.
        let line = serde_json::to_string(abort).expect("plain fields");
        assert!(
            !line.contains('\n') && serde_json::from_str(&line).is_ok_and(|again| *abort == again),
            "{line}"
        );
    }
    let left = left_out(&aborts, CACHE, now_unix_ms);
    let within_ms = WITHIN.as_millis();
    let mut wanted = BTreeSet::new();
    for (volume, mut times) in of_volume {
        times.sort_unstable_by(|a, b| b.cmp(a));
        let [last, ..] = times[..] else { continue };
        let recent = times.iter().filter(|time| u128::from(last - **time) <= within_ms).count();
        let is_over =
            u128::from(now_unix_ms) >= (u128::from(last) + within_ms).min(u64::MAX.into());
        if recent >= OF_VOLUME_MAX && !is_over {
            let left = left.get(&volume).unwrap_or_else(|| panic!("{volume:?} is served"));
            assert_eq!(left.last_unix_ms(), last);
            assert!(now_unix_ms < left.until_unix_ms());
            wanted.insert(volume);
        }
    }
    assert_eq!(left.into_keys().collect::<BTreeSet<_>>(), wanted);
}
