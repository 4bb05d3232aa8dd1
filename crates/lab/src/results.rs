//! What a run of a suite leaves: one document that says what was measured, on what, how, and what came out.
//!
//! `docs/lab-results.schema.json` is the schema of the JSON form.

mod event;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::Access;
use crate::cluster::release_in;
use crate::collect::Sample;
use crate::collect::hops::Stage;
use crate::device::{Counts, Spec};
use crate::fio::Figures;
use crate::machine::Machine;
use crate::suite::{Cell, ClusterSize, Neighbours, Suite, Workload};
pub use event::{Acknowledged, EventPoint, EventRun, EventWindow, Recovery, Scrub};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// Equal windows of a measurement by which it is seen whether it shows what lasts.
pub const WINDOWS: usize = 5;

/// Everything of one run of a suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Version of this format.
    pub format: u32,
    /// The suite as it ran.
    pub suite: Suite,
    /// Its SHA-256.
    pub suite_sha256: String,
    /// It ran in its quick form.
    pub quick: bool,
    /// What the order of the measurements was drawn from.
    pub seed: u64,
    /// The command that repeats it.
    pub command: String,
    /// When it began, UTC (RFC 3339).
    pub begun: String,
    /// What it ran on.
    pub machine: Machine,
    /// The classes of devices that took part, as they were before the first cluster came up.
    pub devices: Vec<Frozen>,
    /// Placements that were not measured, and why.
    pub not_run: Vec<NotRun>,
    /// Sizes of clusters that were not measured, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run_sizes: Vec<NotRunSize>,
    /// Numbers of clients with which nothing was measured, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run_clients: Vec<NotRunClients>,
    /// The clusters, with what stood where.
    pub testbeds: Vec<Testbed>,
    /// Every measurement, in the order in which they were made.
    pub runs: Vec<Run>,
    /// What happened under load, in the order in which it did. None of it is a measurement of a speed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventRun>,
}

/// A class of devices, frozen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Frozen {
    /// What it can do, not slowed.
    pub spec: Spec,
    /// SHA-256 of that in hexadecimal.
    pub sha256: String,
}

/// A placement that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRun {
    /// Its name in the suite.
    pub placement: String,
    /// What is missing.
    pub why: String,
    /// Only workloads over this access path were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
}

impl NotRun {
    /// A placement of which nothing was measured.
    pub fn all(placement: impl Into<String>, why: impl Into<String>) -> NotRun {
        NotRun { placement: placement.into(), why: why.into(), access: None }
    }

    /// A workload was not measured on a placement for that.
    pub fn covers(&self, placement: &str, workload: &Workload) -> bool {
        self.placement == placement && self.access.is_none_or(|access| access == workload.access)
    }

    /// Its name in reports.
    pub fn name(&self) -> String {
        match self.access {
            None => self.placement.clone(),
            Some(access) => format!("{} over {access}", self.placement),
        }
    }
}

/// A size of clusters that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRunSize {
    /// The size.
    pub size: ClusterSize,
    /// What is missing.
    pub why: String,
}

/// A number of clients with which nothing was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRunClients {
    /// Clients.
    pub clients: u32,
    /// What is missing.
    pub why: String,
}

/// A cluster, and what stood where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Testbed {
    /// Its number; runs refer to it.
    pub id: u32,
    /// Disks.
    pub disks: u32,
    /// OSDs on each.
    pub osds_per_disk: u32,
    /// Copies of each object, if not as many as the ground has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Ceph's version, as it tells it.
    pub ceph: String,
    /// The network between clients and OSDs, in words.
    pub network: String,
    /// For each placement that was applied on it, by its name in the suite: what shows that it was in place. An access path has its own
    /// name, and a placement that stands on one that of both: `host-tidepool over iscsi`.
    pub proofs: BTreeMap<String, Value>,
}

/// What a write is safe from once it is acknowledged, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Nothing: it is in memory.
    Volatile,
    /// The death of a process, and of power; not of the one device that holds it.
    OneCopy,
    /// The death of any one device or host that holds it before the cluster has it, and there, in one copy, what `one_copy` says.
    TwoCopies,
    /// The death of any one device or host.
    Replicated,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// What was measured.
    pub cell: Cell,
    /// Which of the repeats, from 1.
    pub repeat: u32,
    /// On which cluster.
    pub testbed: u32,
    /// Hypervisors that had clients.
    #[serde(default = "one")]
    pub hypervisors: u32,
    /// What its acknowledged writes are safe from.
    pub durability: Durability,
    /// Seconds since the suite began.
    pub begun_s: f64,
    /// The commands of all clients.
    pub commands: Vec<String>,
    /// All requests of all clients.
    pub figures: Figures,
    /// Reads alone.
    pub reads: Option<Figures>,
    /// Writes alone, each complete with the flush after it if there is one.
    pub writes: Option<Figures>,
    /// How many requests took how long: upper bounds in nanoseconds and counts, ascending, all clients. Empty where a write is complete
    /// with a flush after it.
    pub histogram: Vec<(u64, u64)>,
    /// Why the figures are not those of what was meant. Empty for a good run.
    pub invalid: Vec<String>,
    /// The client or the machine was the limit, so that the placement might do more: why.
    pub lower_bound: Option<String>,
    /// Second by second, in the window of the clients, as all that follows: from the end of their ramp to the end of their time.
    pub samples: Vec<Sample>,
    /// Ceph's stages.
    pub stages: Vec<Stage>,
    /// Mean time of a packet from one node to another in microseconds, where the network is one that knows.
    #[serde(default)]
    pub transit_us: Option<f64>,
    /// What each device did.
    pub devices: BTreeMap<String, Counts>,
    /// Processor time per request in microseconds, by kind of process.
    pub cpu_us_per_io: BTreeMap<String, f64>,
    /// What its placements count themselves, such as hits of a cache: an object for each, by its name.
    pub placement: Value,
    /// What was left to be written back afterwards.
    pub drained: Option<Drained>,
    /// What `rados bench` tells as it is published, where that made the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bench: Option<Bench>,
    /// The measurement without its ramp in five equal windows, in their order. Empty where that was not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// fio's own report of each client, as its `--output-format=json` prints it. Empty where that was not kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fio: Vec<Value>,
    /// What the neighbours of the clients did, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbours: Option<Crowd>,
}

/// What neighbours of the clients did: from before the clients' ramp to after their time. None of it is in the clients' figures, and all
/// of it is in what devices, processors and network did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Crowd {
    /// As the suite has them.
    pub of: Neighbours,
    /// All of them together. None where one failed.
    pub figures: Option<Figures>,
    /// What each of them ran, on its own image.
    pub command: String,
}

/// What `rados bench` tells, of all instances together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bench {
    /// Bytes per second, second by second of the window.
    pub bytes_per_s: Spread,
    /// Latency in microseconds: its mean in the window; the longest and the shortest of the whole run with its ramp, for no others are told.
    pub latency_us: Spread,
}

/// A mean, and what it lies between.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The largest.
    pub max: f64,
    /// The smallest.
    pub min: f64,
}

fn one() -> u32 {
    1
}

/// One of the equal windows of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Requests that all clients had completed in it.
    pub requests: u64,
    /// Bytes that all clients wrote in it.
    pub written_bytes: u64,
    /// Bytes at its end that caches had not yet written back, of all caches; 0 where there is none.
    pub dirty_bytes: u64,
}

/// Bringing what a cache has not written back to where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drained {
    /// Dirty bytes at the end of the measurement.
    pub dirty_bytes: u64,
    /// Seconds at the devices' own speed.
    pub seconds: f64,
    /// Bytes that were left after that, and went with devices that answer at once.
    pub hurried_bytes: u64,
}

impl Results {
    /// The releases of Ceph that its clusters were of, such as 16: one, unless the machine's was changed meanwhile.
    pub fn ceph_releases(&self) -> BTreeSet<u32> {
        self.testbeds.iter().filter_map(|testbed| release_in(&testbed.ceph)).collect()
    }

    /// A workload was not measured on a placement, for a reason that is told.
    pub fn is_not_run(&self, placement: &str, workload: &str) -> bool {
        let workload = self.suite.workload(workload);
        workload.is_some_and(|workload| self.not_run.iter().any(|found| found.covers(placement, workload)))
    }

    /// The same with these runs in the place of its own, of which nothing is copied.
    pub fn with_runs(&self, runs: Vec<Run>) -> Results {
        Results {
            format: self.format,
            suite: self.suite.clone(),
            suite_sha256: self.suite_sha256.clone(),
            quick: self.quick,
            seed: self.seed,
            command: self.command.clone(),
            begun: self.begun.clone(),
            machine: self.machine.clone(),
            devices: self.devices.clone(),
            not_run: self.not_run.clone(),
            not_run_sizes: self.not_run_sizes.clone(),
            not_run_clients: self.not_run_clients.clone(),
            testbeds: self.testbeds.clone(),
            runs,
            events: self.events.clone(),
        }
    }
}

impl Run {
    /// Its figures count.
    pub fn is_valid(&self) -> bool {
        self.invalid.is_empty()
    }
}
