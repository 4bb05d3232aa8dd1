//! Tidepool in front of the OSDs' disks, with one daemon in each server. Used below OSDs on this
//! machine, and below OSDs in guests.

use serde_json::{Map, Value};

use super::daemon::{self, Daemon, Setup};
use super::{Ground, PlacementError, SsdShare};
use crate::results::Drained;

/// Size of a cache that is not used, in bytes: the smallest that Tidepool accepts.
const UNUSED_CACHE_BYTES: u64 = 64 << 20;

/// The daemons of all servers. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Daemons {
    placement: &'static str,
    /// Whether the daemons cache; otherwise they pass all requests on.
    caches: bool,
    /// One daemon for each server, by the server's number.
    daemons: Vec<Daemon>,
}

impl Daemons {
    /// Starts the daemons, with the disk of each OSD as a volume. Until [`Daemons::filled`] no
    /// write stays in a cache.
    pub(super) fn start(
        ground: &Ground,
        placement: &'static str,
        caches: bool,
    ) -> Result<Daemons, PlacementError> {
        // Unordered, as in a cache that knows nothing of Ceph: while data is dirty, the disk alone
        // is not consistent.
        let options: &[&str] =
            if caches { &["--accept-loss=60m", "--drain=unordered"] } else { &[] };
        let options: Vec<String> = options.iter().map(|option| option.to_string()).collect();
        let servers = ground.slots.iter().map(|slot| slot.server + 1).max().unwrap_or(0);
        let mut started = Daemons { placement, caches, daemons: Vec::new() };
        for server in 0..servers {
            let of_server =
                ground.slots.iter().enumerate().filter(|(_, slot)| slot.server == server);
            let volumes: Vec<(String, String)> = of_server
                .map(|(osd, slot)| (volume(osd), format!("file:{}", slot.data.display())))
                .collect();
            let ssd: Option<&SsdShare> = ground.server_ssds.get(server).filter(|_| caches);
            let daemon = Daemon::start(
                ground,
                &Setup {
                    name: &format!("osd-node{server}"),
                    directory: ssd.map_or(&ground.directory, |ssd| &ssd.directory).clone(),
                    cache_bytes: ssd.map_or(UNUSED_CACHE_BYTES, |ssd| ssd.bytes),
                    volumes: &volumes,
                    options: &options,
                    namespace: None,
                    state: None,
                },
            )?;
            for (volume, _) in &volumes {
                daemon.set_mode(volume, if caches { "write-around" } else { "off" })?;
            }
            started.daemons.push(daemon);
        }
        Ok(started)
    }

    /// The daemon of a server.
    pub(super) fn of(&self, server: usize) -> Result<&Daemon, PlacementError> {
        let what = || format!("there is no daemon in server {server}");
        let missing = || PlacementError::NotInPlace { placement: self.placement, what: what() };
        self.daemons.get(server).ok_or_else(missing)
    }

    /// Whether the device that an OSD gets reports itself as rotational; `disk` is whether the
    /// OSD's disk is. A device with a cache never does, as with the kernel's caches: otherwise an
    /// OSD would read five blocks at a time, cached or not.
    pub(super) fn is_rotational(&self, disk: bool) -> bool {
        disk && !self.caches
    }

    pub(super) fn filled(&self) -> Result<(), PlacementError> {
        for daemon in self.daemons.iter().filter(|_| self.caches) {
            for volume in daemon.served()? {
                daemon.set_mode(daemon::text(&volume, "name"), "write-back")?;
            }
        }
        Ok(())
    }

    pub(super) fn proofs(&self) -> Result<Value, PlacementError> {
        daemon::proofs(&self.daemons)
    }

    pub(super) fn holds(&self) -> Result<(), PlacementError> {
        let mode = if self.caches { "write-back" } else { "off" };
        self.daemons.iter().try_for_each(|daemon| daemon.is_in_mode(self.placement, mode))
    }

    pub(super) fn counters(&self) -> Result<Map<String, Value>, PlacementError> {
        daemon::counters(&self.daemons)
    }

    pub(super) fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        if self.caches { daemon::drain(&self.daemons, limit_s, hurry, stop) } else { Ok(None) }
    }
}

/// The volume's name for the disk of an OSD.
pub(super) fn volume(osd: usize) -> String {
    format!("osd{osd}")
}
