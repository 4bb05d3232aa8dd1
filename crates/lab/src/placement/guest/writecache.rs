//! The device mapper's write cache (dm-writecache) in a guest. It caches writes only; a read of a
//! block in the cache is a hit.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{BLOCK_BYTES, Below, COMMAND_LIMIT, numbers, traffic};
use tidepool_cluster::guest::{Guest, GuestError};

/// The name of the mapped device, and its path.
const NAME: &str = "osd";
const DEVICE: &str = "/dev/dm-0";
/// A file in the guest's memory. Once the last command to flush has ended, the file contains the
/// exit status of that command.
const FLUSHED: &str = "/run/writecache.flushed";

/// dm-writecache with its defaults: it begins to write back when half of it is full.
#[derive(Debug)]
pub(super) struct Writecache;

/// The figures of `dmsetup status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    errors: u64,
    blocks: u64,
    free: u64,
    reads: u64,
    read_hits: u64,
    writes: u64,
    /// Blocks that were written past the cache.
    bypassed: u64,
    flushes: u64,
}

impl Status {
    /// Parses the output of `dmsetup status`: begin, length, name of the target, and the target's
    /// figures.
    fn read(text: &str) -> Option<Status> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "writecache")? + 1;
        let figure = |number: usize| words.get(at + number)?.parse().ok();
        Some(Status {
            errors: figure(0)?,
            blocks: figure(1)?,
            free: figure(2)?,
            reads: figure(4)?,
            read_hits: figure(5)?,
            writes: figure(6)?,
            bypassed: figure(9)?,
            flushes: figure(12)?,
        })
    }

    fn of(guest: &Guest) -> Result<Status, GuestError> {
        let text = guest.run(&["dmsetup", "status", NAME], COMMAND_LIMIT)?;
        let refused =
            || GuestError::Refused(format!("dm-writecache says of itself: {}", text.trim()));
        Status::read(&text).ok_or_else(refused)
    }
}

impl Status {
    /// All blocks in use are dirty: a block that is written back is free again.
    fn dirty_bytes(self) -> u64 {
        self.blocks.saturating_sub(self.free) * BLOCK_BYTES
    }
}

impl Below for Writecache {
    fn what(&self) -> &'static str {
        "dm-writecache on the SSD under each OSD, in a guest: it caches writes only"
    }

    fn needs(&self) -> Option<(&'static str, &'static str)> {
        Some(("dmsetup", "dmsetup"))
    }

    fn modules(&self) -> &'static [&'static str] {
        &["dm-writecache"]
    }

    fn make(&self, guest: &Guest, disk: &str, ssd: &str) -> Result<PathBuf, GuestError> {
        let size = format!("/sys/block/{}/size", disk.trim_start_matches("/dev/"));
        let sectors = guest.read(&[&size])?.remove(&size).unwrap_or_default();
        let table = format!("0 {sectors} writecache s {disk} {ssd} {BLOCK_BYTES} 0");
        // No udev runs in the guest, so dmsetup must not wait for udev to make device names.
        let words = ["dmsetup", "create", NAME, "--noudevsync", "--noudevrules", "--table", &table];
        guest.run(&words, COMMAND_LIMIT)?;
        Ok(DEVICE.into())
    }

    fn proof(&self, guest: &Guest) -> Result<(Map<String, Value>, Option<String>), GuestError> {
        let table = guest.run(&["dmsetup", "table", NAME], COMMAND_LIMIT)?;
        let status = Status::of(guest)?;
        let wrong =
            (status.errors > 0).then(|| "dm-writecache says that it has an error".to_string());
        let proof = [("table", json!(table.trim())), ("bytes", json!(status.blocks * BLOCK_BYTES))];
        Ok((proof.into_iter().map(|(name, value)| (name.to_string(), value)).collect(), wrong))
    }

    fn counters(&self, guest: &Guest) -> Result<Map<String, Value>, GuestError> {
        let status = Status::of(guest)?;
        let ([disk, ssd], _) = traffic(guest, ["vda", "vdb"], &[])?;
        Ok(numbers([
            ("hit_blocks", status.read_hits),
            ("miss_blocks", status.reads.saturating_sub(status.read_hits)),
            ("written_bytes", status.writes * BLOCK_BYTES),
            ("bypassed_bytes", status.bypassed * BLOCK_BYTES),
            ("flushes", status.flushes),
            ("disk_read_bytes", disk.read_bytes),
            ("disk_written_bytes", disk.written_bytes),
            ("ssd_read_bytes", ssd.read_bytes),
            ("ssd_written_bytes", ssd.written_bytes),
            ("dirty_bytes", status.dirty_bytes()),
        ]))
    }

    fn dirty_bytes(&self, guest: &Guest) -> Result<u64, GuestError> {
        Ok(Status::of(guest)?.dirty_bytes())
    }

    fn write_back(&self, guest: &Guest, all: bool) -> Result<(), GuestError> {
        if all {
            // The message is answered when everything is written back, which may take any time, so
            // the command runs in the background. Data that is written meanwhile or later stays in
            // the cache.
            let flush = format!(
                "rm -f {FLUSHED}; (dmsetup message {NAME} 0 flush; echo $? >{FLUSHED}) >/dev/null 2>&1 &"
            );
            guest.run(&["sh", "-c", &flush], COMMAND_LIMIT)?;
        }
        Ok(())
    }

    fn is_written_back(&self, guest: &Guest) -> Result<bool, GuestError> {
        match guest.read(&[FLUSHED])?.get(FLUSHED).map(String::as_str) {
            None | Some("") => Ok(false),
            Some("0") => Ok(true),
            Some(status) => Err(GuestError::Refused(format!(
                "dm-writecache does not flush: exit status {status}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_figures_are_read_by_their_places() {
        let text = "0 16777216 writecache 0 261000 260000 5 900 700 800 10 20 30 740 0 44 0\n";
        let status = Status::read(text).expect("figures");
        assert_eq!((status.errors, status.blocks, status.free), (0, 261_000, 260_000));
        assert_eq!((status.reads, status.read_hits, status.writes), (900, 700, 800));
        assert_eq!(
            (status.bypassed, status.flushes, status.dirty_bytes()),
            (30, 44, 1000 * BLOCK_BYTES)
        );
        assert_eq!(Status::read("0 16777216 linear 8:0 0"), None);
        assert_eq!(Status::read(""), None);
    }
}
