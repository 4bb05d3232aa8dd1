//! bcache in a guest.
//!
//! bcache updates its own counters (hits, misses, bypassed requests) only every 14 seconds. So
//! these counters are out of date, and are not reported. Hits and misses in blocks come from the
//! kernel's counters of the disks: what was read from bcache's device and not from the disk below
//! it is a hit, and what was read from that disk is a miss. Nothing else reads from that disk:
//! blocks that are written back are read from the SSD.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::{BLOCK_BYTES, Below, COMMAND_LIMIT, numbers, traffic};
use tidepool_cluster::guest::{Guest, GuestError};

/// bcache with its defaults: sequential requests bypass the cache, and all requests do when bcache
/// finds its SSD slow.
pub(super) static AS_IT_COMES: Bcache = Bcache { never_past: false };
/// Nothing bypasses the cache, as `lab plan` configures bcache.
pub(super) static NEVER_PAST: Bcache = Bcache { never_past: true };

/// bcache's device, and the directory with its settings.
const DEVICE: &str = "/dev/bcache0";
const SETTINGS: &str = "/sys/block/bcache0/bcache";
/// The file by which devices are registered.
const REGISTER: &str = "/sys/fs/bcache/register";
/// Settings that have to be 0 so that nothing bypasses the cache, each with its default: bytes of a
/// sequential stream, and latencies of the SSD in microseconds.
const PAST: [(&str, u64); 3] = [
    ("sequential_cutoff", 4 << 20),
    ("cache/congested_read_threshold_us", 2_000),
    ("cache/congested_write_threshold_us", 20_000),
];
/// Other settings that the proof contains.
const TOLD: [&str; 5] = [
    "cache_mode",
    "state",
    "writeback_percent",
    "writeback_delay",
    "cache/cache0/cache_replacement_policy",
];
/// Seconds that bcache pauses after it has written everything back. The default is 30 seconds, for
/// which each drain would have to wait.
const REST_S: &str = "1";
/// bcache's default: the part of the cache in percent that may be dirty before bcache writes back
/// faster than at its least rate.
const DIRTY_PERCENT: &str = "10";
/// Longest wait for bcache's device.
const APPEAR_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Bcache {
    never_past: bool,
}

impl Bcache {
    /// The wanted value of a setting of [`PAST`] with the default `usual`.
    fn wanted(&self, usual: u64) -> u64 {
        if self.never_past { 0 } else { usual }
    }

    /// An error message for the first setting of [`PAST`] that does not have its wanted value.
    fn lets_past(&self, told: &HashMap<String, String>) -> Option<String> {
        let of = |name: &str| told.get(name).map(String::as_str).unwrap_or("nothing");
        let wrong = PAST.iter().find(|(name, usual)| human(of(name)) != Some(self.wanted(*usual)));
        wrong.map(|(name, usual)| {
            format!("bcache has {name} = {} and not {}", of(name), self.wanted(*usual))
        })
    }
}

fn path(setting: &str) -> String {
    format!("{SETTINGS}/{setting}")
}

/// The values of some settings, by name.
fn settings(guest: &Guest, names: &[&str]) -> Result<HashMap<String, String>, GuestError> {
    let paths: Vec<String> = names.iter().map(|name| path(name)).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let found = guest.read(&paths)?;
    let name = |path: &str| path.trim_start_matches(SETTINGS).trim_start_matches('/').to_string();
    Ok(found.into_iter().map(|(path, text)| (name(&path), text)).collect())
}

impl Below for Bcache {
    fn what(&self) -> &'static str {
        if self.never_past {
            "bcache on the SSD under each OSD, in a guest: write-back, and nothing goes past it"
        } else {
            "the same as it comes: sequential requests go past it, and others when it finds the SSD slow"
        }
    }

    fn needs(&self) -> Option<(&'static str, &'static str)> {
        Some(("make-bcache", "bcache-tools"))
    }

    fn modules(&self) -> &'static [&'static str] {
        &["bcache"]
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn make(&self, guest: &Guest, disk: &str, ssd: &str) -> Result<PathBuf, GuestError> {
        guest.run(&["make-bcache", "--bdev", disk, "--cache", ssd], COMMAND_LIMIT)?;
        for device in [ssd, disk] {
            guest.write(REGISTER, device)?;
        }
        let start = Instant::now();
        let attached = || {
            Ok(settings(guest, &["state"])?.get("state").is_some_and(|state| state != "no cache"))
        };
        while !attached()? {
            if start.elapsed() > APPEAR_LIMIT {
                return Err(GuestError::Refused(format!(
                    "{DEVICE} does not appear with its cache"
                )));
            }
            std::thread::sleep(POLL);
        }
        if self.never_past {
            self.take_all(guest, true)?;
        } else if let Some(what) = self.lets_past(&settings(guest, &PAST.map(|(name, _)| name))?) {
            // bcache's defaults differ from those in `PAST`.
            return Err(GuestError::Refused(what));
        }
        guest.write(&path("writeback_delay"), REST_S)?;
        // Until the disks are filled, no write stays in the cache.
        guest.write(&path("cache_mode"), "writearound")?;
        Ok(DEVICE.into())
    }

    fn begin(&self, guest: &Guest) -> Result<(), GuestError> {
        guest.write(&path("cache_mode"), "writeback")
    }

    fn take_all(&self, guest: &Guest, all: bool) -> Result<(), GuestError> {
        PAST.iter().try_for_each(|(setting, usual)| {
            let value = if all { 0 } else { self.wanted(*usual) };
            guest.write(&path(setting), &value.to_string())
        })
    }

    fn proof(&self, guest: &Guest) -> Result<(Map<String, Value>, Option<String>), GuestError> {
        let told =
            settings(guest, &[PAST.map(|(name, _)| name).as_slice(), TOLD.as_slice()].concat())?;
        let wrong = fault(&told).or_else(|| self.lets_past(&told));
        Ok((told.into_iter().map(|(name, value)| (name, json!(value))).collect(), wrong))
    }

    fn counters(&self, guest: &Guest) -> Result<Map<String, Value>, GuestError> {
        let levels = ["dirty_data", "state"].map(path);
        let levels = levels.each_ref().map(String::as_str);
        let ([cached, disk, ssd], told) = traffic(guest, ["bcache0", "vda", "vdb"], &levels)?;
        let mut counters = numbers([
            ("hit_blocks", cached.read_bytes.saturating_sub(disk.read_bytes) / BLOCK_BYTES),
            ("miss_blocks", disk.read_bytes / BLOCK_BYTES),
            ("written_bytes", cached.written_bytes),
            ("disk_read_bytes", disk.read_bytes),
            ("disk_written_bytes", disk.written_bytes),
            ("ssd_read_bytes", ssd.read_bytes),
            ("ssd_written_bytes", ssd.written_bytes),
        ]);
        counters.insert("dirty_bytes".into(), json!(dirty(&told[0], &told[1])?));
        Ok(counters)
    }

    fn dirty_bytes(&self, guest: &Guest) -> Result<u64, GuestError> {
        let told = settings(guest, &["dirty_data", "state"])?;
        let of = |name: &str| told.get(name).map(String::as_str).unwrap_or_default();
        dirty(of("dirty_data"), of("state"))
    }

    fn write_back(&self, guest: &Guest, all: bool) -> Result<(), GuestError> {
        guest.write(&path("writeback_percent"), if all { "0" } else { DIRTY_PERCENT })
    }
}

/// Dirty bytes. At least 1 until bcache's state is `clean`: only then does the disk's superblock
/// say that nothing is dirty.
fn dirty(dirty_data: &str, state: &str) -> Result<u64, GuestError> {
    let bytes = human(dirty_data)
        .ok_or_else(|| GuestError::Refused("bcache does not say how much is dirty".into()))?;
    Ok(if state == "clean" { bytes } else { bytes.max(1) })
}

/// An error message if bcache's mode or state is wrong for a cache in write-back.
fn fault(told: &HashMap<String, String>) -> Option<String> {
    let of = |name: &str| told.get(name).map(String::as_str).unwrap_or("nothing");
    let mode = of("cache_mode").split('[').nth(1).and_then(|rest| rest.split(']').next());
    if mode != Some("writeback") {
        return Some(format!("bcache's mode is {}", mode.unwrap_or("nothing")));
    }
    let state = of("state");
    (!["clean", "dirty"].contains(&state)).then(|| format!("bcache's state is {state}"))
}

/// Parses a number of bytes as bcache prints it, such as `4.0M`. The result is exact to the digits
/// that are printed.
fn human(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    let value: f64 = digits.parse().ok()?;
    (value >= 0.0).then(|| (value * (1u64 << shift) as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_bcache_writes_them() {
        let read = ["0", "0.0k", "4.0M", "1.5G", "512", "12", "2000"].map(human);
        let bytes = [0, 0, 4 << 20, 3 << 29, 512, 12, 2000];
        assert_eq!(read, bytes.map(Some));
        assert_eq!(["", "nothing", "1.0X", "-1k"].map(human), [None; 4]);
    }

    #[test]
    fn a_mode_a_state_or_a_cutoff_that_is_another_one_is_told() {
        let good: HashMap<String, String> = [
            ("cache_mode", "writethrough [writeback] writearound none"),
            ("state", "dirty"),
            ("sequential_cutoff", "0.0k"),
            ("cache/congested_read_threshold_us", "0"),
            ("cache/congested_write_threshold_us", "0"),
        ]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .into();
        let found =
            |told: &HashMap<String, String>| fault(told).or_else(|| NEVER_PAST.lets_past(told));
        assert_eq!(found(&good), None);
        for (name, value, wanted) in [
            ("cache_mode", "[writethrough] writeback writearound none", "writethrough"),
            ("state", "inconsistent", "inconsistent"),
            ("sequential_cutoff", "4.0M", "sequential_cutoff = 4.0M and not 0"),
            ("cache/congested_read_threshold_us", "2000", "2000 and not 0"),
        ] {
            let mut bad = good.clone();
            bad.insert(name.into(), value.into());
            assert!(found(&bad).is_some_and(|what| what.contains(wanted)), "{name}");
        }
        let mut usual = good;
        for (name, value) in
            ["4.0M", "2000", "20000"].into_iter().zip(PAST).map(|(value, (name, _))| (name, value))
        {
            assert!(
                AS_IT_COMES.lets_past(&usual).is_some_and(|what| what.contains(name)),
                "{name}"
            );
            usual.insert(name.into(), value.into());
        }
        assert_eq!(AS_IT_COMES.lets_past(&usual), None);
    }
}
