//! What is measured: a suite names placements, workloads, the number of repeats, and published
//! claims to test.
//!
//! Published suites come with the program. Other suites are TOML files of the same form.

mod bench;
mod beside;
mod check;
mod clients;
mod direction;
mod event;
mod setup;
mod size;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::placement::Arrangement;
use crate::results::Durability;
use crate::words;
pub use bench::Tool;
pub use beside::Neighbours;
pub use direction::{Along, Axis, Direction, Expect, Measure, Published, Trend};
pub use event::{Event, Happening};
pub use setup::Setup;
pub use size::ClusterSize;
use tidepool_cluster::fio::{Job, Pattern, Sync};

/// Most clients, and most jobs of one client.
const CLIENTS_MAX: u32 = 64;
/// Images take at most this percentage of the disks.
const DISKS_PERCENT_MAX: u64 = 60;
/// Bytes that each OSD needs beside the images. When small writes come faster than a disk takes
/// them, BlueStore's database was seen to grow to 2 GB. An OSD that finds no room for its database
/// ends.
const OSD_ROOM_BYTES: u64 = 4 << 30;
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
#[derive(
    Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
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
            let named =
                |what: String| invalid(format!("the direction \"{}\": {what}", direction.claim));
            direction.has_points(&suite).map_err(named)?;
        }
        if suite.quick.is_some() {
            suite
                .clone()
                .quick()
                .check()
                .map_err(|what| invalid(format!("in its quick form: {what}")))?;
        }
        Ok(suite)
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
            let nearest =
                workload.depth.iter().copied().min_by_key(|depth| depth.abs_diff(quick.depth));
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
                let by_itself = |found: &&Workload| {
                    !self.without.contains(&found.name) && !self.is_of_event(&found.name)
                };
                for workload in self.workloads.iter().filter(by_itself) {
                    let own = self.factors(&placement, workload).into_iter();
                    let beside = self.points_beside(&placement, workload).into_iter();
                    let own = own.map(|slowed_by| (slowed_by, None, None));
                    let points = own
                        .chain(beside.map(|(replicas, neighbours)| (None, replicas, neighbours)));
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
        let runs: usize =
            self.cells().iter().map(|cell| self.repeats_of(&cell.workload) as usize).sum();
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
        let access =
            self.workload(&self.deciding).map_or(Access::Librbd, |workload| workload.access);
        let safe = Arrangement::parse(placement).is_ok_and(|found| {
            found.durability(self.ground.replicas, access) != Durability::Volatile
        });
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
        let in_hypervisor =
            if workload.tool == Tool::Fio { workload.all_sets_bytes(of_one) } else { 0 };
        in_hypervisor.max(copies / u64::from(self.servers.max(1))) <= self.ssd_bytes
    }
}

impl Workload {
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
        assert!(
            !toml::to_string(&suite).expect("TOML").contains("access"),
            "what has none says nothing"
        );
        let told =
            Suite::find("which-side").expect("it comes with the program").over(Access::Iscsi);
        let told = told.expect_err("librbd's cache is in it").to_string();
        assert!(told.contains("librbd-cache") && !told.contains('\n'), "{told}");
    }
}
