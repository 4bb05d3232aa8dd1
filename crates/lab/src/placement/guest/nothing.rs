//! No cache between the OSD and its disk in a guest: the control for caches in guests.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{Below, numbers, traffic};
use tidepool_cluster::guest::{Guest, GuestError};

/// OSDs on disks.
pub(super) static ON_DISKS: Nothing = Nothing { on_ssds: false };
/// OSDs on SSDs instead of disks.
pub(super) static ON_SSDS: Nothing = Nothing { on_ssds: true };

#[derive(Debug)]
pub(super) struct Nothing {
    on_ssds: bool,
}

impl Below for Nothing {
    fn what(&self) -> &'static str {
        if self.on_ssds {
            "a bound for caches in guests: OSDs in guests that have SSDs in the place of disks"
        } else {
            "each OSD in a guest with a kernel of its own, without a cache: what those with one are compared with"
        }
    }

    fn caches(&self) -> bool {
        false
    }

    fn disks_are_ssds(&self) -> bool {
        self.on_ssds
    }

    fn make(&self, _guest: &Guest, disk: &str, _ssd: &str) -> Result<PathBuf, GuestError> {
        Ok(disk.into())
    }

    fn proof(&self, _guest: &Guest) -> Result<(Map<String, Value>, Option<String>), GuestError> {
        Ok((Map::new(), None))
    }

    fn counters(&self, guest: &Guest) -> Result<Map<String, Value>, GuestError> {
        let ([disk], _) = traffic(guest, ["vda"], &[])?;
        Ok(numbers([
            ("disk_read_bytes", disk.read_bytes),
            ("disk_written_bytes", disk.written_bytes),
        ]))
    }

    fn dirty_bytes(&self, _guest: &Guest) -> Result<u64, GuestError> {
        Ok(0)
    }

    fn write_back(&self, _guest: &Guest, _all: bool) -> Result<(), GuestError> {
        Ok(())
    }
}
