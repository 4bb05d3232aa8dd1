//! The results of a run of a suite: one document that says what was measured, on which machine and
//! clusters, how, and with which figures.
//!
//! `docs/lab-results.schema.json` is the schema of the JSON form.

mod event;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::Access;
use crate::collect::Sample;
use crate::collect::hops::Stage;
use crate::suite::{Cell, ClusterSize, Neighbours, Suite, Workload};
pub use event::{Acknowledged, EventCluster, EventPoint, EventRun, EventWindow, Recovery, Scrub};
use tidepool_cluster::ceph::release_in;
use tidepool_cluster::device::{Counts, Spec};
use tidepool_cluster::fio::Figures;
use tidepool_cluster::machine::Machine;

/// Version of the format of the results.
pub const FORMAT: u32 = 1;
/// Number of equal windows of a measurement. The steady-state test compares these windows to decide
/// whether the measurement shows a speed that lasts.
pub const WINDOWS: usize = 5;

/// All results of one run of a suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Version of this format.
    pub format: u32,
    /// The suite as it ran.
    pub suite: Suite,
    /// SHA-256 of the suite in hexadecimal.
    pub suite_sha256: String,
    /// The suite ran in its quick form.
    pub quick: bool,
    /// Seed from which the random order of the measurements is drawn.
    pub seed: u64,
    /// The command that repeats the run.
    pub command: String,
    /// When the run began, UTC (RFC 3339).
    pub begun: String,
    /// The machine on which the run was made.
    pub machine: Machine,
    /// The device classes that took part, as they were before the first cluster was started.
    pub devices: Vec<Frozen>,
    /// Placements that were not measured, each with the reason.
    pub not_run: Vec<NotRun>,
    /// Cluster sizes that were not measured, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run_sizes: Vec<NotRunSize>,
    /// Numbers of clients that were not measured, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run_clients: Vec<NotRunClients>,
    /// The clusters, each with the proofs that placements were in place.
    pub testbeds: Vec<Testbed>,
    /// Every measurement, in the order in which the measurements were made.
    pub runs: Vec<Run>,
    /// Events under load, in the order in which they happened. An event is not a measurement of a
    /// speed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventRun>,
}

/// A device class, frozen before the first cluster was started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Frozen {
    /// Specification of the class, not slowed.
    pub spec: Spec,
    /// SHA-256 of `spec` as JSON, in hexadecimal.
    pub sha256: String,
}

/// A placement that was not measured, or that was not measured over one access path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRun {
    /// Name of the placement in the suite.
    pub placement: String,
    /// The reason, in words.
    pub why: String,
    /// If set, only workloads over this access path were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
}

impl NotRun {
    /// An entry for a placement over all access paths.
    pub fn all(placement: impl Into<String>, why: impl Into<String>) -> NotRun {
        NotRun { placement: placement.into(), why: why.into(), access: None }
    }

    /// This entry says that `workload` was not measured on `placement`.
    pub fn covers(&self, placement: &str, workload: &Workload) -> bool {
        self.placement == placement && self.access.is_none_or(|access| access == workload.access)
    }

    /// Name of the entry in reports: the placement, and the access path if `access` is set.
    pub fn name(&self) -> String {
        match self.access {
            None => self.placement.clone(),
            Some(access) => format!("{} over {access}", self.placement),
        }
    }
}

/// A cluster size that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRunSize {
    /// The size.
    pub size: ClusterSize,
    /// The reason, in words.
    pub why: String,
}

/// A number of clients that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotRunClients {
    /// Number of clients.
    pub clients: u32,
    /// The reason, in words.
    pub why: String,
}

/// A cluster, with the proofs that placements were in place on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Testbed {
    /// Number of the cluster, to which runs and events refer.
    pub id: u32,
    /// Disks of the cluster.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
    /// Copies of each object, if the number differs from the ground's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Ceph's version, in Ceph's own words.
    pub ceph: String,
    /// The network between clients and OSDs, in words.
    pub network: String,
    /// Proofs that placements and access paths were in place on the cluster, by name. There are
    /// three kinds of name: the parts that are below the cluster, joined by `+`; an access path;
    /// and a placement, followed by its access path unless the path is librbd, such as
    /// `host-tidepool over iscsi`.
    pub proofs: BTreeMap<String, Value>,
}

/// What an acknowledged write is safe from, worst first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Nothing: the write is in memory only.
    Volatile,
    /// The crash of a process and a power failure, but not the loss of the one device that holds
    /// the write.
    OneCopy,
    /// The loss of any one device or host that holds the write, until the write is written back to
    /// the cluster. The cluster then keeps one copy, which is as safe as `one_copy`.
    TwoCopies,
    /// The loss of any one device or host.
    Replicated,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The cell that was measured.
    pub cell: Cell,
    /// Number of the repeat, from 1.
    pub repeat: u32,
    /// Number of the cluster.
    pub testbed: u32,
    /// Number of hypervisors on which clients ran.
    #[serde(default = "one")]
    pub hypervisors: u32,
    /// What the acknowledged writes of the run are safe from.
    pub durability: Durability,
    /// Seconds since the program began to run the suite; a resumed run counts from its restart.
    pub begun_s: f64,
    /// The command line of each client.
    pub commands: Vec<String>,
    /// Reads and writes of all clients together.
    pub figures: Figures,
    /// Reads of all clients together. None if there were none.
    pub reads: Option<Figures>,
    /// Writes of all clients together. A write that is followed by a flush is complete with that
    /// flush. None if there were none.
    pub writes: Option<Figures>,
    /// Latency histogram of all requests of all clients: upper bounds in nanoseconds and counts,
    /// ascending. Empty where the load generator reports no histogram, and where a write is
    /// complete only with the flush after it.
    pub histogram: Vec<(u64, u64)>,
    /// Reasons why the run does not measure what was meant. Empty for a valid run.
    pub invalid: Vec<String>,
    /// Reason why the placement might do more than was measured: the client or the machine was the
    /// limit. None where neither was the limit.
    pub lower_bound: Option<String>,
    /// One sample for each second of the window, which lasts from the end of the last client's ramp
    /// to the end of the first client's time. `stages`, `transit_us`, `devices`, `cpu_us_per_io`
    /// and `placement` cover the same window.
    pub samples: Vec<Sample>,
    /// What was counted in the window.
    #[serde(flatten)]
    pub counted: Counted,
    /// Write-back of what the caches held after the measurement. None where nothing was left, or
    /// where the drain was not timed.
    pub drained: Option<Drained>,
    /// Figures of `rados bench` in the form in which they are published, if `rados bench` made the
    /// load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bench: Option<Bench>,
    /// The measurement without its ramp, in five equal windows, in their order. Empty where the
    /// windows were not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// fio's own report of each client, as `--output-format=json` prints it. Empty where the
    /// reports were not kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fio: Vec<Value>,
    /// What the neighbours of the clients did, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbours: Option<Crowd>,
}

/// What was counted in the window of a measurement: in Ceph, in the network, in the devices, by
/// the processors and by the placements.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Counted {
    /// Count and mean time of each stage of a request in Ceph. Empty where neighbours ran, because
    /// Ceph's counters do not tell the neighbours' requests apart.
    pub stages: Vec<Stage>,
    /// Mean time of a packet from one node to another in microseconds. None where the network does
    /// not measure it.
    #[serde(default)]
    pub transit_us: Option<f64>,
    /// Counters of each device over the window, by the name of the device.
    pub devices: BTreeMap<String, Counts>,
    /// Processor time per request in microseconds, by kind of process. Empty where neighbours ran.
    pub cpu_us_per_io: BTreeMap<String, f64>,
    /// Counters of the placements and access paths, such as cache hits: one object for each
    /// placement and path, by its name. A counter counts what happened in the window, but a counter
    /// whose name ends with `dirty_bytes` is the level at the end of the window.
    pub placement: Value,
}

/// What the neighbours of the clients did, from before the clients' ramp to after the clients'
/// time. The clients' figures do not include the neighbours' requests; the counters of devices,
/// processors and network include them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Crowd {
    /// Number and limit of the neighbours, as in the suite.
    pub of: Neighbours,
    /// Requests of all neighbours together. None where a neighbour failed.
    pub figures: Option<Figures>,
    /// Command line of the first neighbour. The other neighbours ran this command on their own
    /// images.
    pub command: String,
}

/// Figures of `rados bench`, of all instances together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bench {
    /// Bytes per second: mean, largest and smallest over the seconds of the window.
    pub bytes_per_s: Spread,
    /// Latency in microseconds: the mean in the window, and the longest and the shortest of the
    /// whole run with its ramp, because `rados bench` reports no others.
    pub latency_us: Spread,
}

/// A mean, with the largest and the smallest value.
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
    /// Requests that all clients completed in the window.
    pub requests: u64,
    /// Bytes that all clients wrote in the window.
    pub written_bytes: u64,
    /// Bytes that caches had not yet written back at the end of the window, of all caches together;
    /// 0 where there is no cache.
    pub dirty_bytes: u64,
}

/// Write-back of the dirty bytes that caches hold after a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drained {
    /// Dirty bytes after the measurement, when the drain began.
    pub dirty_bytes: u64,
    /// Seconds of the drain at the devices' own speed.
    pub seconds: f64,
    /// Dirty bytes that were left after that, and were written back with devices that answer at
    /// once.
    pub hurried_bytes: u64,
}

impl Results {
    /// The releases of Ceph of the clusters, such as 16: one release, unless the machine's Ceph was
    /// changed during the run.
    pub fn ceph_releases(&self) -> BTreeSet<u32> {
        self.testbeds.iter().filter_map(|testbed| release_in(&testbed.ceph)).collect()
    }

    /// The results give a reason why `workload` was not measured on `placement`.
    pub fn is_not_run(&self, placement: &str, workload: &str) -> bool {
        let workload = self.suite.workload(workload);
        workload.is_some_and(|workload| {
            self.not_run.iter().any(|found| found.covers(placement, workload))
        })
    }

    /// A copy of these results with `runs` in place of their own runs. The own runs are not copied.
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
    /// The run is valid: `invalid` is empty.
    pub fn is_valid(&self) -> bool {
        self.invalid.is_empty()
    }
}
