//! Placements below the OSDs with caches of Linux, which need a kernel that has these caches. Each
//! OSD runs in a guest with such a kernel. The placements with which these caches are compared are
//! here, too: such a guest without a cache (a control), with an SSD instead of the disk (a bound),
//! and with Tidepool in front of the disk.

mod bcache;
mod nothing;
mod tidepool;
mod writecache;

use std::fmt::Debug;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::daemon::sum;
use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed, need};
use crate::results::Drained;
use tidepool_cluster::ceph::{Cluster, InGuest};
use tidepool_cluster::guest::{self, Disk, Guest, GuestError, Setup};

pub(super) use tidepool::OSD_GUEST_TIDEPOOL;

pub(super) static OSD_GUEST: Guests = Guests { name: "osd-guest", below: &nothing::ON_DISKS };
pub(super) static OSD_GUEST_ON_SSD: Guests =
    Guests { name: "osd-guest-on-ssd", below: &nothing::ON_SSDS };
pub(super) static OSD_BCACHE: Guests = Guests { name: "osd-bcache", below: &bcache::NEVER_PAST };
pub(super) static OSD_BCACHE_DEFAULT: Guests =
    Guests { name: "osd-bcache-default", below: &bcache::AS_IT_COMES };
pub(super) static OSD_WRITECACHE: Guests =
    Guests { name: "osd-dm-writecache", below: &writecache::Writecache };

/// Memory of a guest in bytes: for an OSD and the guest's kernel.
const MEMORY_BYTES: u64 = 2 << 30;
/// How often a drain's progress is read.
const POLL: Duration = Duration::from_millis(100);
/// Longest drain with devices that answer at once.
const HURRIED_LIMIT: Duration = Duration::from_secs(300);
/// Longest run of a command that prepares a cache.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// Unit of the sizes of caches, in bytes.
const CACHE_UNIT_BYTES: u64 = 1 << 20;
/// Unit in which caches count hits and misses, in bytes.
const BLOCK_BYTES: u64 = 4096;
/// Unit in which the kernel counts what a disk has transferred, in bytes.
const SECTOR_BYTES: u64 = 512;

/// The layer between an OSD and its disk in a guest.
trait Below: Debug + Sync {
    /// A description of the layer, in a few words.
    fn what(&self) -> &'static str;
    /// A program that the layer needs, and the package that contains the program.
    fn needs(&self) -> Option<(&'static str, &'static str)> {
        None
    }
    /// Modules of the guest's kernel that the layer needs.
    fn modules(&self) -> &'static [&'static str] {
        &[]
    }
    /// Whether the layer is a cache on an SSD.
    fn caches(&self) -> bool {
        true
    }
    /// Whether the layer keeps blocks that have been read.
    fn caches_reads(&self) -> bool {
        false
    }
    /// Whether the OSDs have their data on devices of the SSD's class.
    fn disks_are_ssds(&self) -> bool {
        false
    }
    /// Sets the layer up; returns the device for the OSD. Until [`Below::begin`] no write stays in
    /// the layer, if the layer can be set so.
    fn make(&self, guest: &Guest, disk: &str, ssd: &str) -> Result<PathBuf, GuestError>;
    /// Begins to cache.
    fn begin(&self, _guest: &Guest) -> Result<(), GuestError> {
        Ok(())
    }
    /// With `all`, makes the layer take all requests from now on, also those that would bypass it.
    /// Without `all`, restores the settings that the layer had after [`Below::make`].
    fn take_all(&self, _guest: &Guest, _all: bool) -> Result<(), GuestError> {
        Ok(())
    }
    /// What the layer reports about itself; and an error message of one line if a setting or state
    /// is not as it should be.
    fn proof(&self, guest: &Guest) -> Result<(Map<String, Value>, Option<String>), GuestError>;
    /// The layer's counters.
    fn counters(&self, guest: &Guest) -> Result<Map<String, Value>, GuestError>;
    /// Dirty bytes: those that are not on the disk.
    fn dirty_bytes(&self, guest: &Guest) -> Result<u64, GuestError>;
    /// With `all`, begins to write back all dirty bytes; without, restores the usual limits.
    fn write_back(&self, guest: &Guest, all: bool) -> Result<(), GuestError>;
    /// Whether all bytes that were dirty when `write_back` began are written back.
    fn is_written_back(&self, guest: &Guest) -> Result<bool, GuestError> {
        Ok(self.dirty_bytes(guest)? == 0)
    }
}

/// A placement with OSDs in guests.
#[derive(Debug)]
pub(super) struct Guests {
    name: &'static str,
    below: &'static dyn Below,
}

impl Placement for Guests {
    fn name(&self) -> &'static str {
        self.name
    }

    fn what(&self) -> &'static str {
        self.below.what()
    }

    fn layer(&self) -> Layer {
        Layer::Device
    }

    fn ssd(&self) -> Ssd {
        if self.below.caches() { Ssd::File } else { Ssd::Unused }
    }

    fn disks_are_ssds(&self) -> bool {
        self.below.disks_are_ssds()
    }

    fn in_guests(&self) -> bool {
        true
    }

    fn caches_reads(&self) -> bool {
        self.below.caches_reads()
    }

    fn probe(&self) -> Result<(), String> {
        guest::probe()?;
        self.below.needs().map_or(Ok(()), |(program, package)| need(program, package))
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let mut inside = Inside::new(self.name, self.below);
        for osd in 0..ground.slots.len() {
            let slot = &ground.slots[osd];
            let mut disks = vec![Disk::file(&slot.data, slot.rotational)];
            if self.below.caches() {
                disks.push(Disk::file(&part_of_ssd(ground, self.name, osd)?, false));
            }
            inside.boot(ground, osd, disks)?;
        }
        Ok(Box::new(inside))
    }
}

/// Makes a file for the cache of an OSD, on the SSD of the OSD's server.
fn part_of_ssd(
    ground: &Ground,
    placement: &'static str,
    osd: usize,
) -> Result<PathBuf, PlacementError> {
    let server = ground.slots[osd].server;
    let neighbours = ground.slots.iter().filter(|other| other.server == server).count() as u64;
    let what = "there is no SSD".to_string();
    let ssd =
        ground.server_ssds.get(server).ok_or(PlacementError::NotInPlace { placement, what })?;
    let cache = ssd.directory.join(format!("osd{osd}.cache"));
    let bytes = ssd.bytes / neighbours / CACHE_UNIT_BYTES * CACHE_UNIT_BYTES;
    let made = File::create_new(&cache).and_then(|file| file.set_len(bytes));
    made.map_err(failed(format!("cannot make {}", cache.display())))?;
    Ok(cache)
}

/// Running guests, with OSDs in them.
#[derive(Debug)]
struct Inside {
    name: &'static str,
    below: &'static dyn Below,
    /// The guests, by the OSD's number, each with whether the OSD's device is rotational.
    guests: Vec<(Guest, bool)>,
}

impl Inside {
    fn new(name: &'static str, below: &'static dyn Below) -> Inside {
        Inside { name, below, guests: Vec::new() }
    }

    fn not(&self, what: impl Into<String>) -> PlacementError {
        PlacementError::NotInPlace { placement: self.name, what: what.into() }
    }

    /// Boots the guest of the next OSD with these disks: first the OSD's, then the cache's, if any.
    /// Records in `ground` the devices that the OSD has in the guest.
    fn boot(
        &mut self,
        ground: &mut Ground,
        osd: usize,
        mut disks: Vec<Disk>,
    ) -> Result<(), PlacementError> {
        let slot = &ground.slots[osd];
        // The OSD's part of the SSD for its database.
        let store_ssd = slot.ssd.as_ref().map(|ssd| {
            disks.push(Disk::file(ssd, false));
            disks.len() - 1
        });
        let network = ground.network.clone();
        let network =
            network.ok_or_else(|| self.not("a guest needs a network, with a server or more"))?;
        let number = u8::try_from(osd).unwrap_or(u8::MAX);
        let plug = network
            .plug_guest(&network.servers()[slot.server], number)
            .map_err(|error| self.not(error.to_string()))?;
        let guest = Guest::boot(&Setup {
            name: &format!("guest{osd}"),
            directory: &ground.directory,
            program: &ground.program,
            plug: &plug,
            disks: &disks,
            modules: self.below.modules(),
            memory_bytes: MEMORY_BYTES,
        })?;
        let name =
            |number: usize| guest.disk(number).unwrap_or_default().to_string_lossy().into_owned();
        let data = self.below.make(&guest, &name(0), &name(1))?;
        // The OSD reads this property from its device, too, so both must agree.
        let rotational = guest.is_rotational(&data)?;
        let slot = &mut ground.slots[osd];
        (slot.data, slot.rotational) = (data, rotational);
        slot.ssd = store_ssd.and_then(|number| guest.disk(number));
        let in_guest = InGuest { program: ground.program.clone(), address: guest.address() };
        ground.guests.insert(osd as u32, in_guest);
        self.guests.push((guest, rotational));
        Ok(())
    }

    fn each<T>(
        &self,
        of: impl FnMut(&Guest) -> Result<T, GuestError>,
    ) -> Result<Vec<T>, PlacementError> {
        Ok(self
            .guests
            .iter()
            .map(|(guest, _)| guest)
            .map(of)
            .collect::<Result<Vec<T>, GuestError>>()?)
    }

    fn dirty_bytes(&self) -> Result<u64, PlacementError> {
        Ok(self.each(|guest| self.below.dirty_bytes(guest))?.into_iter().sum())
    }

    /// Waits until all dirty bytes are written back, until `limit` is over, or until `stop` returns
    /// true. Returns whether all are written back.
    fn wait(&self, limit: Duration, stop: &dyn Fn() -> bool) -> Result<bool, PlacementError> {
        let start = Instant::now();
        loop {
            let done =
                self.each(|guest| self.below.is_written_back(guest))?.into_iter().all(|done| done);
            if done || start.elapsed() >= limit || stop() {
                return Ok(done);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Proves that each OSD takes its device for rotational exactly if the device reports so.
    fn check_media(&self, cluster: &Cluster) -> Result<(), PlacementError> {
        let metadata = cluster.ceph(&["osd", "metadata", "--format", "json"])?;
        let osds: Vec<Value> =
            serde_json::from_str(&metadata).map_err(|error| self.not(error.to_string()))?;
        for (osd, (_, turns)) in self.guests.iter().enumerate() {
            let found =
                osds.iter().find(|found| found["id"] == osd).map(|found| &found["rotational"]);
            let wanted = if *turns { "1" } else { "0" };
            if found.and_then(Value::as_str) != Some(wanted) {
                let found = found.unwrap_or(&Value::Null);
                return Err(self
                    .not(format!("OSD {osd} says rotational = {found}, and its device {wanted}")));
            }
        }
        Ok(())
    }
}

impl Applied for Inside {
    fn filled(&self) -> Result<(), PlacementError> {
        self.each(|guest| self.below.begin(guest)).map(drop)
    }

    fn prepares(&self, begins: bool) -> Result<(), PlacementError> {
        self.each(|guest| self.below.take_all(guest, begins)).map(drop)
    }

    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        self.check_media(cluster)?;
        let mut proofs = Vec::new();
        for (guest, rotational) in &self.guests {
            let (mut proof, wrong) = self.below.proof(guest)?;
            if let Some(what) = wrong {
                return Err(self.not(what));
            }
            let [release, scheduler] =
                ["/proc/sys/kernel/osrelease", "/sys/block/vda/queue/scheduler"];
            let mut told = guest.read(&[release, scheduler])?;
            proof.insert("rotational".into(), json!(rotational));
            proof.extend(told.remove(release).map(|release| ("kernel".into(), json!(release))));
            proof.extend(
                told.remove(scheduler).map(|named| ("disk_scheduler".into(), json!(named))),
            );
            proofs.push(Value::Object(proof));
        }
        Ok(json!({ "guests": proofs }))
    }

    fn holds(&self) -> Result<(), PlacementError> {
        for (guest, _) in &self.guests {
            guest.check()?;
            if let (_, Some(what)) = self.below.proof(guest)? {
                return Err(self.not(what));
            }
        }
        Ok(())
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        Ok(Value::Object(sum(self.each(|guest| self.below.counters(guest))?)))
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        if !self.below.caches() {
            return Ok(None);
        }
        let dirty_bytes = self.dirty_bytes()?;
        let start = Instant::now();
        self.each(|guest| self.below.write_back(guest, true))?;
        let ended = self.wait(Duration::from_secs_f64(limit_s.max(0.0)), stop)?;
        let seconds = start.elapsed().as_secs_f64();
        let hurried_bytes = if ended { 0 } else { self.dirty_bytes()? };
        hurry();
        if !self.wait(HURRIED_LIMIT, &|| false)? {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(failed(format!("{} does not write back what is dirty", self.name))(source));
        }
        self.each(|guest| self.below.write_back(guest, false))?;
        Ok(Some(Drained { dirty_bytes, seconds, hurried_bytes }))
    }
}

/// Bytes that a guest's disk has transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Traffic {
    read_bytes: u64,
    written_bytes: u64,
}

/// What some disks of a guest have transferred, and the content of the files `others`, read with
/// one request.
fn traffic<const N: usize>(
    guest: &Guest,
    disks: [&str; N],
    others: &[&str],
) -> Result<([Traffic; N], Vec<String>), GuestError> {
    let stats = disks.map(|disk| format!("/sys/block/{disk}/stat"));
    let paths: Vec<&str> = stats.iter().map(String::as_str).chain(others.iter().copied()).collect();
    let found = guest.read(&paths)?;
    let mut carried = [Traffic { read_bytes: 0, written_bytes: 0 }; N];
    for (path, carried) in stats.iter().zip(&mut carried) {
        let counted = found.get(path).and_then(|text| self::carried(text));
        *carried = counted.ok_or_else(|| GuestError::Refused(format!("{path} cannot be read")))?;
    }
    let others = others.iter().map(|path| found.get(*path).cloned().unwrap_or_default());
    Ok((carried, others.collect()))
}

/// Parses a disk's `stat` file. Its third and seventh figures are the sectors that were read and
/// written.
fn carried(text: &str) -> Option<Traffic> {
    let figures: Vec<u64> =
        text.split_whitespace().map_while(|figure| figure.parse().ok()).collect();
    let bytes = |at: usize| figures.get(at).map(|sectors| sectors * SECTOR_BYTES);
    Some(Traffic { read_bytes: bytes(2)?, written_bytes: bytes(6)? })
}

fn numbers<const N: usize>(of: [(&str, u64); N]) -> Map<String, Value> {
    of.into_iter().map(|(name, value)| (name.to_string(), json!(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_has_carried_is_counted_in_sectors() {
        let text = "     120        0     4096       10      30        2      512       20        0       30       30";
        assert_eq!(carried(text), Some(Traffic { read_bytes: 2 << 20, written_bytes: 256 << 10 }));
        assert_eq!(carried("1 2 3"), None);
    }
}
