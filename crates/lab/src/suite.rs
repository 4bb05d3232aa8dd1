//! What is measured: a suite names placements, workloads, the number of repeats, and published
//! claims to test.
//!
//! Published suites come with the program. Other suites are TOML files of the same form.

mod bench;
mod beside;
mod clients;
mod direction;
mod event;
mod setup;
mod size;

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::cluster::OSDS_MAX;
use crate::device::preset;
use crate::fio::{Job, Pattern, Sync};
use crate::placement::{Arrangement, Layer};
use crate::results::Durability;
use crate::testbed::HOSTS_MAX;
use crate::words;
pub use bench::Tool;
pub use beside::Neighbours;
pub use direction::{Along, Axis, Direction, Expect, Measure, Published, Trend};
pub use event::{Event, Happening};
pub use setup::Setup;
pub use size::ClusterSize;

/// Longest measurement, in seconds.
const SECONDS_MAX: u32 = 7 * 24 * 3600;
/// Most repeats of a measurement.
const REPEATS_MAX: u32 = 1_000;
/// Largest factor by which devices are slowed.
const SLOWED_BY_MAX: u32 = 1_000;
/// Longest delay of a packet, in microseconds.
const DELAY_US_MAX: u32 = 1_000_000;
/// Limits of the size of a device or an image, in bytes.
const SIZE_BYTES_MIN: u64 = 64 << 20;
const SIZE_BYTES_MAX: u64 = 16 << 40;
/// Most requests in flight of one client.
const DEPTH_MAX: u32 = 1_024;
/// Most clients, and most jobs of one client.
const CLIENTS_MAX: u32 = 64;
/// Most cells of a suite. Each cell takes its time on a cluster.
pub const CELLS_MAX: usize = 10_000;

/// Name and text of each suite that comes with the program.
const BUILT_IN: &[(&str, &str)] = &[
    ("which-side", include_str!("suites/which-side.toml")),
    ("iometer-8020", include_str!("suites/iometer-8020.toml")),
    ("micron", include_str!("suites/micron.toml")),
    ("journal", include_str!("suites/journal.toml")),
    ("pvc2", include_str!("suites/pvc2.toml")),
    ("rados-bench", include_str!("suites/rados-bench.toml")),
    ("diskspd-256k", include_str!("suites/diskspd-256k.toml")),
    ("faults", include_str!("suites/faults.toml")),
    ("bcache", include_str!("suites/bcache.toml")),
];

/// A suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// Name of the suite, such as `which-side`.
    pub name: String,
    /// The question that the suite answers, in one sentence.
    pub question: String,
    /// The cluster that all placements stand on.
    pub ground: Ground,
    /// Placements, each as `NAME[+NAME…][@CLASS]`: the placement of each layer, and the class of
    /// the SSD if it is not the ground's.
    pub placements: Vec<String>,
    /// The placement that the others are compared with.
    pub baseline: String,
    /// The deciding workload. Figures of other workloads are shown beside its figures.
    pub deciding: String,
    /// The workloads.
    #[serde(rename = "workload")]
    pub workloads: Vec<Workload>,
    /// Repeats of each measurement.
    pub repeats: u32,
    /// Most repeats of a measurement of the deciding workload, for placements that are not told
    /// apart yet. `repeats` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats_max: Option<u32>,
    /// Repeats of a measurement of the other workloads. `repeats` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats_beside: Option<u32>,
    /// Length of a measurement in seconds, without the ramp; for an event the length of each
    /// window.
    pub seconds: u32,
    /// Seconds of the ramp, before a measurement counts.
    pub ramp_s: u32,
    /// Each repeat has its own clusters. Otherwise the repeats of a placement share a cluster and
    /// count as one observation.
    #[serde(default)]
    pub fresh_clusters: bool,
    /// Published claims to test.
    #[serde(default, rename = "direction", skip_serializing_if = "Vec::is_empty")]
    pub directions: Vec<Direction>,
    /// Set-ups that a publication measured side by side.
    #[serde(default, rename = "setup", skip_serializing_if = "Vec::is_empty")]
    pub setups: Vec<Setup>,
    /// Events under load.
    #[serde(default, rename = "event", skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
    /// Settings of the quick form (`--quick`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quick: Option<Quick>,
    /// Placements and workloads that are left out to save time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// Cluster sizes that are left out to save time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_sizes: Vec<ClusterSize>,
}

/// The cluster that all placements stand on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ground {
    /// Class of the disks.
    pub disk: String,
    /// Numbers of disks. Each number is measured.
    pub disks: Vec<u32>,
    /// Numbers of OSDs on each disk. Each number is measured.
    pub osds_per_disk: Vec<u32>,
    /// Largest number of OSDs on each processor of the machine. Larger clusters are not measured,
    /// and are listed with that reason. No limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osds_per_processor_max: Option<u32>,
    /// Largest number of clients on each processor of the machine. Cells with more clients are not
    /// measured, and are listed with that reason. No limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients_per_processor_max: Option<u32>,
    /// Size of a disk in bytes.
    pub disk_bytes: u64,
    /// Class of the SSDs. A placement has one in each server with OSDs, or one in each hypervisor.
    pub ssd: String,
    /// Size of each SSD in bytes.
    pub ssd_bytes: u64,
    /// Copies of each object.
    pub replicas: u32,
    /// Other numbers of copies. Each is measured in addition, and shown beside the results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas_beside: Vec<u32>,
    /// Virtual machines beside the measured clients, as `N` or `N:IOPS`. Their requests are in no
    /// figure. None if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbours: Option<Neighbours>,
    /// Other neighbours. Each is measured in addition, and shown beside the results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours_beside: Vec<Neighbours>,
    /// Factor by which the devices are slower than their class.
    pub slowed_by: u32,
    /// A second factor: the deciding workload is also measured with devices slowed by this factor.
    /// A result that changes with the factor is not measurable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_slowed_by: Option<u32>,
    /// Servers among which the disks are distributed, each in a network namespace. 0 for one
    /// machine with a loopback interface.
    #[serde(default)]
    pub servers: u32,
    /// Hypervisors. Clients are distributed over them in turn.
    #[serde(default = "just_one")]
    pub hypervisors: u32,
    /// Delay of a packet in microseconds, each way, between clients and servers and between
    /// servers, before the slowing factor is applied. It has no effect without servers.
    #[serde(default)]
    pub delay_us: u32,
    /// Size of each image in bytes.
    pub image_bytes: u64,
    /// Bytes of memory that each OSD may use to cache data. It should be small compared with the
    /// sets.
    pub osd_cache_bytes: u64,
    /// Lines for the `[global]` section of ceph.conf.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ceph_conf: Vec<String>,
}

/// What clients do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Short name of the workload, such as `4k-80-20`.
    pub name: String,
    /// Title for reports, such as `4 KiB random, 80 % reads`.
    pub title: String,
    /// The load generator.
    #[serde(default, skip_serializing_if = "Tool::is_default")]
    pub tool: Tool,
    /// `read`, `write`, `randread`, `randwrite` or `randrw`, as in fio. For rados bench `write`,
    /// `read` (its seq) or `randread` (its rand).
    pub rw: String,
    /// Percentage of reads, for `randrw`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_percent: Option<u8>,
    /// Bytes of a request; for rados bench the bytes of an object.
    pub block_bytes: u64,
    /// Requests in flight of each client. Each number is measured.
    pub depth: Vec<u32>,
    /// Numbers of clients. Each client has its own image, or is an instance of rados bench. Each
    /// number is measured.
    #[serde(default = "one")]
    pub clients: Vec<u32>,
    /// Jobs of one client, each with its own part of the set.
    #[serde(default = "just_one")]
    pub jobs: u32,
    /// When a write counts as complete.
    #[serde(default)]
    pub sync: Sync,
    /// Whether clients flush.
    #[serde(default)]
    pub guest: Guest,
    /// Bytes from the beginning of each image that requests go to. For rados bench the bytes of the
    /// objects, of all clients together, that exist beforehand: those that are read, or those that
    /// exist when others are written.
    pub set_bytes: u64,
    /// Contents of the caches before a measurement.
    pub caches: Caches,
    /// How hypervisors reach the images.
    #[serde(default, skip_serializing_if = "Access::is_librbd")]
    pub access: Access,
    /// Placements with this workload; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<String>,
}

fn one() -> Vec<u32> {
    vec![1]
}

fn just_one() -> u32 {
    1
}

/// Whether clients send flushes. A cache treats a guest that has never flushed as a guest that
/// never flushes: each write of the guest waits until the write is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Guest {
    /// Each client sent one flush before, as any guest of today does when it mounts.
    #[default]
    Flushes,
    /// No flush is ever sent.
    NeverFlushes,
}

/// Contents of the caches before a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Caches {
    /// Nothing of the set.
    Cold,
    /// The set, as much of it as fits.
    Warm,
}

/// Settings of the quick form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Quick {
    /// `repeats` of the quick form.
    pub repeats: u32,
    /// `repeats_max` of the quick form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats_max: Option<u32>,
    /// `repeats_beside` of the quick form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats_beside: Option<u32>,
    /// `seconds` of the quick form.
    pub seconds: u32,
    /// `ramp_s` of the quick form.
    pub ramp_s: u32,
    /// Images, sets, SSDs and disks are smaller by this factor.
    pub smaller: u64,
    /// Size of each SSD in bytes, if it is not to be divided by `smaller`: what OSDs write beside
    /// the data does not get smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssd_bytes: Option<u64>,
    /// Each workload keeps only the depth nearest to this one.
    pub depth: u32,
    /// Each workload keeps only these numbers of clients. A workload that has none of them keeps
    /// all of its own. All numbers are kept if the list is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<u32>,
    /// Placements and workloads that the quick form leaves out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// Cluster sizes that the quick form leaves out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_sizes: Vec<ClusterSize>,
}

/// Why a text is not a suite.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The suite is neither built in nor a file.
    #[error("no suite {name}; there are {known}, and files whose names end with .toml")]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The names of the built-in suites, separated by commas.
        known: String,
    },
    /// The file cannot be read.
    #[error("cannot read the suite {path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// The error.
        source: std::io::Error,
    },
    /// The text is not a valid suite.
    #[error("the suite {name}: {what}")]
    Invalid {
        /// Name or file of the suite.
        name: String,
        /// What is wrong with it, in one line.
        what: String,
    },
}

/// One cell: conditions that are measured several times.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// The placement, as the suite names it.
    pub placement: String,
    /// Disks of the cluster.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// The workload's name.
    pub workload: String,
    /// Requests in flight of each client.
    pub depth: u32,
    /// Clients.
    pub clients: u32,
    /// Factor by which the devices are slowed, if it is not the ground's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_by: Option<u32>,
    /// Copies of each object, if their number is not the ground's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Neighbours of the clients, if they are not the ground's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbours: Option<Neighbours>,
}

impl Suite {
    /// The built-in suite with this name, or the suite in this file.
    ///
    /// # Errors
    /// If there is no such suite, or it is not valid.
    pub fn find(name: &str) -> Result<Suite, SuiteError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Suite::parse(name, text);
        }
        if !name.ends_with(".toml") {
            let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            return Err(SuiteError::Unknown { name: name.into(), known: known.join(", ") });
        }
        let text = std::fs::read_to_string(name);
        let text = text.map_err(|source| SuiteError::Read { path: name.into(), source })?;
        Suite::parse(name, &text)
    }

    /// All built-in suites.
    pub fn built_in() -> Vec<Suite> {
        let parse = |(name, text): &(&str, &str)| Suite::parse(name, text);
        BUILT_IN.iter().map(parse).collect::<Result<_, _>>().expect("tests read them all")
    }

    /// Reads a suite from `text`. `name` is its name or file, for errors.
    ///
    /// # Errors
    /// If the text is not a valid suite.
    pub fn parse(name: &str, text: &str) -> Result<Suite, SuiteError> {
        let invalid = |what: String| SuiteError::Invalid { name: name.into(), what };
        let suite: Suite = toml::from_str(text).map_err(|e| {
            let line = e.span().map(|span| text[..span.start].lines().count().max(1));
            let at = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            invalid(format!("{at}{}", e.message().lines().next().unwrap_or_default()))
        })?;
        suite.check().map_err(invalid)?;
        suite.check_quick_clients().map_err(invalid)?;
        // The quick form may have fewer points. Its verdict says so.
        for direction in &suite.directions {
            let named = |what: String| invalid(format!("the direction \"{}\": {what}", direction.claim));
            direction.has_points(&suite).map_err(named)?;
        }
        if suite.quick.is_some() {
            suite.clone().quick().check().map_err(|what| invalid(format!("in its quick form: {what}")))?;
        }
        Ok(suite)
    }

    /// Checks the suite; an error says what is wrong.
    fn check(&self) -> Result<(), String> {
        let workload = |name: &str| self.workloads.iter().any(|workload| workload.name == name);
        let placement = |name: &String| self.placements.contains(name);
        if self.repeats == 0 || self.seconds == 0 {
            return Err("repeats and seconds are at least 1".into());
        }
        if self.repeats_max.is_some_and(|most| !(self.repeats..=REPEATS_MAX).contains(&most)) {
            return Err(format!("repeats_max is at least repeats and at most {REPEATS_MAX}"));
        }
        if self.repeats_beside.is_some_and(|beside| !(1..=self.repeats).contains(&beside)) {
            return Err("repeats_beside is at least 1 and at most repeats".into());
        }
        if !placement(&self.baseline) {
            return Err(format!("the baseline {} is none of its placements", self.baseline));
        }
        if !workload(&self.deciding) {
            return Err(format!("the deciding workload {} is none of its workloads", self.deciding));
        }
        if self.seconds > SECONDS_MAX || self.ramp_s > SECONDS_MAX || self.repeats > REPEATS_MAX {
            return Err(format!("at most {SECONDS_MAX} seconds and {REPEATS_MAX} repeats"));
        }
        if self.quick.as_ref().is_some_and(|quick| quick.smaller == 0) {
            return Err("the quick form is at least 1 times smaller".into());
        }
        let mut left_out = self.without.iter().chain(self.quick.iter().flat_map(|quick| &quick.without));
        let needed = |name: &String| *name == self.baseline || *name == self.deciding;
        if let Some(wrong) = left_out.find(|name| needed(name) || !placement(name) && !workload(name)) {
            return Err(format!(
                "it cannot be without {wrong}: that decides, or is none of its placements and workloads"
            ));
        }
        self.ground.check()?;
        unique("placement", &self.placements)?;
        unique("workload", self.workloads.iter().map(|workload| &workload.name))?;
        for placement in &self.placements {
            let arrangement = Arrangement::parse(placement)?;
            if arrangement.in_guests() && self.ground.servers == 0 {
                return Err(format!(
                    "{placement}: its OSDs are in guests, which need a network: servers is at least 1"
                ));
            }
            arrangement.ssd.map_or(Ok(()), |ssd| class(&ssd))?;
        }
        for found in &self.workloads {
            found.check(&self.ground).map_err(|what| format!("the workload {}: {what}", found.name))?;
            let placements = if found.placements.is_empty() { &self.placements } else { &found.placements };
            let below = placements.iter().find(|placement| {
                let arrangement = Arrangement::parse(placement);
                arrangement
                    .is_ok_and(|found| found.within(&[Layer::Device, Layer::Tier]).any(|p| p.caches_reads()))
            });
            if let Some(below) = below.filter(|_| found.caches == Caches::Cold) {
                return Err(format!("the workload {}: the cache of {below} is never cold", found.name));
            }
            let in_memory = placements
                .iter()
                .find(|name| Arrangement::parse(name).is_ok_and(|found| found.caches_in_memory()));
            let always_flushed = found.guest == Guest::NeverFlushes && found.access == Access::Librbd;
            if let Some(name) = in_memory.filter(|_| always_flushed) {
                return Err(format!(
                    "the workload {}: {name} always sees a flush over librbd, which fio sends when it opens an image; a client in a guest sends none (access = \"guest\")",
                    found.name
                ));
            }
            let has_librbd = matches!(found.access, Access::Librbd | Access::Guest);
            if let Some(name) = in_memory.filter(|_| !has_librbd) {
                return Err(format!(
                    "the workload {}: {name} is a cache of who has librbd itself, not over {}; leave it out of the workload's placements",
                    found.name, found.access
                ));
            }
            if let Some(unknown) = found.placements.iter().find(|name| !placement(name)) {
                return Err(format!("the workload {}: {unknown} is none of the placements", found.name));
            }
            self.check_objects(found, placements)
                .map_err(|what| format!("the workload {}: {what}", found.name))?;
            let most = found.clients.iter().copied().max().unwrap_or(1);
            if placements.iter().any(|name| name == words::HOST_BOUND) && !self.ground.fits(found, most) {
                return Err(format!(
                    "the workload {}: {} has whole sets on the SSD, which does not hold those of {most} clients; leave it out of the workload's placements",
                    found.name,
                    words::HOST_BOUND
                ));
            }
        }
        let grounds = self.ground.disks.len() * self.ground.osds_per_disk.len() * self.placements.len();
        let loads: usize = self.workloads.iter().map(|found| found.depth.len() * found.clients.len()).sum();
        let points = 1 + self.ground.replicas_beside.len() + self.ground.neighbours_beside.len();
        if grounds.saturating_mul(loads).saturating_mul(points) > CELLS_MAX {
            return Err(format!("it measures more than {CELLS_MAX} things: take fewer numbers"));
        }
        self.check_setups()?;
        self.check_sizes()?;
        self.check_beside()?;
        self.check_room()?;
        self.check_events()?;
        for direction in &self.directions {
            let named = |what: String| format!("the direction \"{}\": {what}", direction.claim);
            direction.check(self).map_err(named)?;
        }
        Ok(())
    }

    /// The quick form: shorter runs, smaller sets, fewer depths. The suite itself if it has no
    /// quick form.
    pub fn quick(mut self) -> Suite {
        let Some(quick) = self.quick.take() else { return self };
        (self.repeats, self.seconds, self.ramp_s) = (quick.repeats, quick.seconds, quick.ramp_s);
        (self.repeats_max, self.repeats_beside) = (quick.repeats_max, quick.repeats_beside);
        self.without.extend(quick.without.iter().cloned());
        self.without_sizes.extend(&quick.without_sizes);
        let ground = &mut self.ground;
        for bytes in [&mut ground.disk_bytes, &mut ground.ssd_bytes, &mut ground.image_bytes] {
            *bytes /= quick.smaller;
        }
        ground.ssd_bytes = quick.ssd_bytes.unwrap_or(ground.ssd_bytes);
        for workload in &mut self.workloads {
            workload.set_bytes /= quick.smaller;
            let nearest = workload.depth.iter().copied().min_by_key(|depth| depth.abs_diff(quick.depth));
            workload.depth = nearest.into_iter().collect();
            workload.clients = quick.kept(&workload.clients);
        }
        self
    }

    /// The suite with this access path in all workloads.
    ///
    /// # Errors
    /// If the suite is not valid with this path, such as when a placement cannot stand on it on any
    /// machine.
    pub fn over(mut self, access: Access) -> Result<Suite, SuiteError> {
        self.workloads.iter_mut().for_each(|workload| workload.access = access);
        self.checked()
    }

    /// The suite, if it is valid.
    fn checked(self) -> Result<Suite, SuiteError> {
        match self.check() {
            Ok(()) => Ok(self),
            Err(what) => Err(SuiteError::Invalid { name: self.name, what }),
        }
    }

    /// Identity of the suite: the SHA-256 of its JSON form, in hexadecimal.
    pub fn sha256(&self) -> String {
        let text = serde_json::to_vec(self).expect("a suite is plain data");
        Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The placements that are measured, and after them the baseline again under another name:
    /// equal placements must give equal results.
    pub fn measured(&self) -> Vec<String> {
        let mut placements = self.placements.clone();
        placements.retain(|placement| !self.without.contains(placement));
        let again = words::again(&self.baseline);
        if !placements.contains(&again) {
            placements.push(again);
        }
        placements
    }

    /// All cells, in the suite's order. Workloads of events have none.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for placement in self.measured() {
            for ClusterSize { disks, osds_per_disk } in self.sizes() {
                let by_itself =
                    |found: &&Workload| !self.without.contains(&found.name) && !self.is_of_event(&found.name);
                for workload in self.workloads.iter().filter(by_itself) {
                    let own = self.factors(&placement, workload).into_iter();
                    let beside = self.points_beside(&placement, workload).into_iter();
                    let own = own.map(|slowed_by| (slowed_by, None, None));
                    let points = own.chain(beside.map(|(replicas, neighbours)| (None, replicas, neighbours)));
                    for (slowed_by, replicas, neighbours) in points {
                        for &depth in &workload.depth {
                            cells.extend(workload.clients.iter().map(|&clients| Cell {
                                placement: placement.clone(),
                                disks,
                                osds_per_disk,
                                workload: workload.name.clone(),
                                depth,
                                clients,
                                slowed_by,
                                replicas,
                                neighbours,
                            }));
                        }
                    }
                }
            }
        }
        cells
    }

    /// Repeats of a workload, before the deciding workload gets more.
    pub fn repeats_of(&self, workload: &str) -> u32 {
        self.repeats_beside.filter(|_| workload != self.deciding).unwrap_or(self.repeats)
    }

    /// Number of measurements and events, before the deciding workload gets more repeats.
    pub fn runs(&self) -> usize {
        let runs: usize = self.cells().iter().map(|cell| self.repeats_of(&cell.workload) as usize).sum();
        runs + self.happenings().len() * self.repeats as usize
    }

    /// The factors at which a workload is measured on a placement (`None` for the ground's), or
    /// nothing if it is not measured there.
    fn factors(&self, placement: &str, workload: &Workload) -> Vec<Option<u32>> {
        let on = |name: &str| workload.is_on(name);
        let decides = workload.name == self.deciding;
        if !self.placements.iter().any(|name| name == placement) {
            return if decides && on(&self.baseline) { vec![None] } else { vec![] };
        }
        if !on(placement) {
            return vec![];
        }
        let second = self.ground.second_slowed_by.filter(|_| decides && self.may_win(placement));
        let mut factors = vec![None];
        factors.extend(second.map(Some));
        factors
    }

    /// Whether a placement is ranked once it has been measured.
    fn may_win(&self, placement: &str) -> bool {
        let access = self.workload(&self.deciding).map_or(Access::Librbd, |workload| workload.access);
        let safe = Arrangement::parse(placement)
            .is_ok_and(|found| found.durability(self.ground.replicas, access) != Durability::Volatile);
        let elsewhere = words::in_guests(placement) != words::in_guests(&self.baseline);
        let aside = words::is_control(placement) || words::is_bound(placement) || elsewhere;
        safe && !aside && words::class(placement).is_none()
    }

    /// The access path of a measurement.
    pub fn access(&self, cell: &Cell) -> Access {
        self.workload(&cell.workload).map_or(Access::Librbd, |workload| workload.access)
    }

    /// The workload of that name.
    pub fn workload(&self, name: &str) -> Option<&Workload> {
        self.workloads.iter().find(|workload| workload.name == name)
    }
}

impl Ground {
    /// Whether the sets of this number of clients fit each SSD. An SSD in a hypervisor holds the
    /// sets of its clients; an SSD in a server holds its part of all copies.
    pub fn fits(&self, workload: &Workload, clients: u32) -> bool {
        let copies = workload.all_sets_bytes(clients).saturating_mul(self.replicas.into());
        let of_one = clients.div_ceil(self.hypervisors.max(1));
        // Hypervisors do not hold the objects of rados bench.
        let in_hypervisor = if workload.tool == Tool::Fio { workload.all_sets_bytes(of_one) } else { 0 };
        in_hypervisor.max(copies / u64::from(self.servers.max(1))) <= self.ssd_bytes
    }

    fn check(&self) -> Result<(), String> {
        let axes = [&self.disks, &self.osds_per_disk];
        if axes.iter().any(|axis| axis.is_empty() || axis.contains(&0)) {
            return Err("disks and osds_per_disk are lists of numbers above 0".into());
        }
        let most = |axis: &[u32]| axis.iter().copied().max().map_or(0, u64::from);
        let least = |axis: &[u32]| axis.iter().copied().min().map_or(0, u64::from);
        if most(&self.disks) * most(&self.osds_per_disk) > u64::from(OSDS_MAX) {
            return Err(format!("a cluster has at most {OSDS_MAX} OSDs"));
        }
        if [self.osds_per_processor_max, self.clients_per_processor_max].contains(&Some(0)) {
            return Err("osds_per_processor_max and clients_per_processor_max are at least 1".into());
        }
        if u64::from(self.servers) > least(&self.disks) {
            return Err("there are no more servers than disks".into());
        }
        if !(1..=HOSTS_MAX).contains(&self.hypervisors) {
            return Err(format!("there are 1 to {HOSTS_MAX} hypervisors"));
        }
        if self
            .second_slowed_by
            .is_some_and(|factor| factor == self.slowed_by || !(1..=SLOWED_BY_MAX).contains(&factor))
        {
            return Err(format!(
                "second_slowed_by is 1 to {SLOWED_BY_MAX} and another factor than slowed_by"
            ));
        }
        if !(1..=SLOWED_BY_MAX).contains(&self.slowed_by) || self.delay_us > DELAY_US_MAX {
            return Err(format!("slowed_by is 1 to {SLOWED_BY_MAX}, delay_us at most {DELAY_US_MAX}"));
        }
        let sizes = [self.disk_bytes, self.ssd_bytes, self.image_bytes];
        if sizes.iter().any(|bytes| !(SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(bytes)) {
            return Err("disks, SSD and images have 64 MiB to 16 TiB".into());
        }
        if self.ceph_conf.iter().any(|line| line.contains('\n') || line.trim_start().starts_with('[')) {
            return Err("ceph_conf has lines of the global section only".into());
        }
        if self.disk.starts_with(NVME) && (self.slowed_by != 1 || self.second_slowed_by.is_some()) {
            return Err("OSDs on NVMe are never slowed (slowed_by = 1, without second_slowed_by): there Ceph's own code takes the time, which stays as fast as it is".into());
        }
        class(&self.disk)?;
        class(&self.ssd)
    }
}

/// Images take at most this percentage of the disks.
const DISKS_PERCENT_MAX: u64 = 60;
/// Bytes that each OSD needs beside the images. When small writes come faster than a disk takes
/// them, BlueStore's database was seen to grow to 2 GB. An OSD that finds no room for its database
/// ends.
const OSD_ROOM_BYTES: u64 = 4 << 30;

/// Beginning of the names of device classes that are as fast as Ceph's code, or faster.
const NVME: &str = "nvme";

/// Fails if there is no class of devices with this name.
fn class(name: &str) -> Result<(), String> {
    let names = || preset::all().into_iter().map(|preset| preset.spec.name).collect::<Vec<_>>().join(", ");
    preset::find(name).map(drop).ok_or_else(|| format!("no class {name} of devices; there are {}", names()))
}

/// Fails if a name occurs twice.
fn unique<'a>(what: &str, names: impl IntoIterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let again = names.into_iter().find(|name| !seen.insert(*name));
    again.map_or(Ok(()), |name| Err(format!("the {what} {name} is named twice")))
}

impl Workload {
    fn check(&self, ground: &Ground) -> Result<(), String> {
        if self.tool == Tool::RadosBench {
            self.check_bench()?;
        }
        self.pattern()
            .ok_or_else(|| format!("\"{}\" is nothing that fio does, or lacks read_percent", self.rw))?;
        if self.block_bytes == 0 || !self.block_bytes.is_multiple_of(512) {
            return Err("block_bytes is a multiple of 512".into());
        }
        let fits_image = self.set_bytes / u64::from(self.jobs.max(1)) >= self.block_bytes
            && self.set_bytes <= ground.image_bytes;
        if self.tool == Tool::Fio && !fits_image {
            return Err("set_bytes is at least one block for each job and at most the image".into());
        }
        if self.sync == Sync::Dsync {
            return Err(
                "fio opens no image with O_DSYNC: write sync = \"flush\", a flush after each write".into()
            );
        }
        if self.guest == Guest::NeverFlushes && self.sync != Sync::None {
            return Err("a guest that never flushes has no sync".into());
        }
        let axes = [(&self.depth, DEPTH_MAX), (&self.clients, CLIENTS_MAX), (&vec![self.jobs], CLIENTS_MAX)];
        if axes.iter().any(|(axis, most)| axis.is_empty() || axis.iter().any(|n| !(1..=*most).contains(n))) {
            return Err(format!("depth is 1 to {DEPTH_MAX}, clients and jobs are 1 to {CLIENTS_MAX}"));
        }
        Ok(())
    }

    /// Whether the workload is measured on this placement, if the suite has it.
    pub fn is_on(&self, placement: &str) -> bool {
        self.placements.is_empty() || self.placements.iter().any(|name| name == placement)
    }

    /// The access pattern of the workload. `None` if `rw` and `read_percent` give none.
    pub fn pattern(&self) -> Option<Pattern> {
        Some(match (self.rw.as_str(), self.read_percent) {
            ("read", None) => Pattern::Read,
            ("write", None) => Pattern::Write,
            ("randread", None) => Pattern::RandRead,
            ("randwrite", None) => Pattern::RandWrite,
            ("randrw", Some(percent @ 1..=99)) => Pattern::RandMixed(percent),
            _ => return None,
        })
    }

    /// Whether the caches may hold other blocks of the set after a measurement: blocks that are
    /// written, or read for the first time, take the place of others.
    pub fn changes_caches(&self) -> bool {
        self.writes() || self.caches == Caches::Cold
    }

    /// Whether a measurement always ends after its time. A cold measurement may end earlier, with
    /// its set: what was read once is no longer cold.
    pub fn is_time_based(&self) -> bool {
        self.caches != Caches::Cold
    }

    /// Whether the workload writes.
    pub fn writes(&self) -> bool {
        !matches!(self.pattern(), Some(Pattern::Read | Pattern::RandRead))
    }

    /// The job of one client at this depth. The workload must be part of a valid suite.
    pub fn job(&self, depth: u32) -> Job {
        let pattern = self.pattern().expect("it was checked when it was read");
        Job { pattern, block_bytes: self.block_bytes, depth, jobs: self.jobs, sync: self.sync }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_that_comes_with_the_program_makes_sense_also_in_its_quick_form() {
        for suite in Suite::built_in() {
            let quick = suite.clone().quick();
            quick.check().expect("the quick form");
            assert!(quick.cells().len() <= suite.cells().len());
            assert_ne!(quick.sha256(), suite.sha256());
        }
    }

    #[test]
    fn the_quick_form_leaves_out_what_it_is_without() {
        let suite = Suite::find("which-side").expect("it comes with the program");
        let quick = suite.clone().quick();
        let measures = |suite: &Suite, name: &str| {
            suite.cells().iter().any(|cell| cell.placement == name || cell.workload == name)
        };
        assert!(!quick.without.is_empty());
        for name in suite.placements.iter().chain(suite.workloads.iter().map(|found| &found.name)) {
            assert!(measures(&suite, name), "{name}");
            assert_eq!(measures(&quick, name), !quick.without.contains(name), "{name}");
        }
    }

    #[test]
    fn a_suite_goes_over_another_path_and_is_another_one_then() {
        let suite = Suite::find("journal").expect("it comes with the program");
        let over = |access| suite.clone().over(access).expect("all of it can");
        assert_eq!(over(Access::Librbd).sha256(), suite.sha256(), "that is what it has");
        let iscsi = over(Access::Iscsi);
        assert!(iscsi.workloads.iter().all(|workload| workload.access == Access::Iscsi));
        let text = toml::to_string(&iscsi).expect("TOML");
        assert_eq!(Suite::parse("s.toml", &text).expect("a suite"), iscsi);
        assert!(!toml::to_string(&suite).expect("TOML").contains("access"), "what has none says nothing");
        let told = Suite::find("which-side").expect("it comes with the program").over(Access::Iscsi);
        let told = told.expect_err("librbd's cache is in it").to_string();
        assert!(told.contains("librbd-cache") && !told.contains('\n'), "{told}");
    }

    #[test]
    fn a_direction_that_cannot_be_tested_is_told_in_one_line() {
        let good = Suite::find("micron").map(|_| include_str!("suites/micron.toml")).expect("it is built in");
        let axis = "axis = { along = \"depth\", trend = \"falls\" }";
        for (from, to, wanted) in [
            (axis, "axis = { along = \"clients\", trend = \"falls\" }", "has one point of the axis clients"),
            (axis, "axis = { along = \"osds\", plateau_beyond = 4 }", "has one point of the axis OSDs"),
            (axis, "axis = { along = \"weather\", trend = \"falls\" }", "line "),
            (axis, "axis = { along = \"depth\" }", "either trend or plateau_beyond"),
            (axis, "axis = { along = \"depth\", trend = \"rises\", plateau_beyond = 4 }", "either trend or"),
            (axis, "axis = { along = \"depth\", plateau_beyond = 0 }", "at least 1"),
            (axis, "", "either expect or axis"),
            (axis, "axis = { along = \"depth\", trend = \"falls\" }\nexpect = \"more\"", "either expect or"),
            ("against = \"bluestore-colocated+alloc-16k\"\nexpect", "expect", "needs against"),
            ("ratio = 1.71", "ratio = 0", "above 0"),
            ("metric = \"p99\"", "metric = \"p98\"", "line "),
            (
                "placement = \"bluestore-dbwal+alloc-16k\"\n",
                "placement = \"osd-tidepool\"\n",
                "does not have",
            ),
            (
                "placement = \"bluestore-dbwal+alloc-16k\"\nagainst = \"bluestore-colocated+alloc-16k\"\nmetric = \"bandwidth\"",
                "placement = \"host-tidepool+alloc-16k\"\nagainst = \"bluestore-colocated+alloc-16k\"\nmetric = \"bandwidth\"",
                "host-tidepool+alloc-16k is not measured in 4m-write",
            ),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        // The quick form keeps one depth. That is no error of the suite: the verdict reports it.
        assert_eq!(Suite::parse("s.toml", good).expect("a suite").quick().directions.len(), 8);
        let uneven = good.replacen(axis, "axis = { along = \"osds_per_node\", plateau_beyond = 4 }", 1);
        let uneven = uneven.replacen("disks = [2]", "disks = [2, 3]", 1);
        let error = Suite::parse("s.toml", &uneven).expect_err("two servers").to_string();
        assert!(error.contains("as many disks each"), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_told_in_one_line() {
        let good = BUILT_IN[0].1;
        for (from, to, wanted) in [
            ("baseline = \"bluestore-colocated\"", "baseline = \"nothing\"", "baseline nothing"),
            ("rw = \"randwrite\"", "rw = \"randwritten\"", "nothing that fio does"),
            ("repeats = ", "repeated = ", "line "),
            ("deciding = \"4k-80-20\"", "deciding = \"x\"", "workload x"),
            ("replicas = 2", "replicas = 3", "replicas"),
            ("hypervisors = 2", "hypervisors = 3", "1 to 2 hypervisors"),
            ("disks = [2]", "disks = []", "disks"),
            ("image_bytes = 4294967296", "image_bytes = 17179869184", "at most 60 %"),
            ("disk_bytes = 68719476736", "disk_bytes = 34359738368", "in its quick form: 3 images"),
            ("osds_per_disk = [1]", "osds_per_disk = [4000000000]", "at most 16"),
            ("smaller = 8", "smaller = 0", "at least 1"),
            ("\nslowed_by = 4", "\nslowed_by = 0", "slowed_by"),
            ("second_slowed_by = 8", "second_slowed_by = 4", "another factor"),
            ("repeats_max = 8", "repeats_max = 2", "repeats_max is at least repeats"),
            ("ssd = \"ssd-sata-plp\"", "ssd = \"floppy\"", "no class floppy"),
            ("disk = \"hdd-7200\"", "disk = \"nvme\"", "OSDs on NVMe are never slowed"),
            ("\"osd-passthrough\"", "\"osd-magic\"", "no placement osd-magic"),
            ("depth = [1, 4, 16, 32]", "depth = [0]", "depth"),
            ("name = \"4k-randwrite\"", "name = \"4k-80-20\"", "twice"),
            ("guest = \"never_flushes\"", "guest = \"never_flushes\"\nsync = \"flush\"", "has no sync"),
            ("sync = \"flush\"", "sync = \"dsync\"", "no image with O_DSYNC"),
            ("guest = \"never_flushes\"", "guest = \"sleeps\"", "line "),
            ("caches = \"warm\"", "caches = \"warm\"\naccess = \"fibre-channel\"", "line "),
            (
                "    \"host-tidepool-replicated\",\n]\n\n[[dir",
                "    \"librbd-cache\",\n]\n\n[[dir",
                "always sees a flush",
            ),
            ("without = [", "without = [\"bluestore-colocated\", ", "without bluestore-colocated"),
            ("without = [", "without = [\"nothing\", ", "without nothing"),
            ("without = [", "without = [\"4k-80-20\", ", "without 4k-80-20"),
            ("repeats_beside = 2", "repeats_beside = 9", "in its quick form: repeats_beside"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let guests = include_str!("suites/bcache.toml");
        let alone =
            guests.replacen("servers = 1", "servers = 0", 1).replacen("delay_us = 50", "delay_us = 0", 1);
        let error = Suite::parse("s.toml", &alone).expect_err("no network").to_string();
        assert!(error.contains("OSDs are in guests, which need a network"), "{error}");
        assert!(Suite::find("nothing").is_err());
        assert!(Suite::find("/nonexistent/s.toml").is_err());
    }
}
