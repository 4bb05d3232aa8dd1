//! What a run would do, without doing it.

use super::events::{self, Due};
use super::schedule::{self, Block, Clock};
use super::size::is_left_out;
use super::{Options, RunError, header, is_not_run, not_run};
use crate::load::{self, Reach};
use crate::results::{NotRun, NotRunClients, NotRunSize};
use crate::suite::{Cell, Suite, Tool};
use crate::testbed::Entrance;
use crate::words;
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::release::ROOT_BYTES;

/// The steps of a suite, without running it.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Plan {
    /// Testbeds in their order, each with its measurements.
    pub testbeds: Vec<PlannedTestbed>,
    /// Placements and set-ups that are not measured or not possible here, and workloads that are
    /// left out, with the reasons.
    pub not_run: Vec<NotRun>,
    /// Sizes of clusters that are not measured, and why.
    pub not_run_sizes: Vec<NotRunSize>,
    /// Numbers of clients with which nothing is measured, and why.
    pub not_run_clients: Vec<NotRunClients>,
    /// Number of measurements.
    pub runs: usize,
    /// The events under load, each on a cluster of its own: repeat, placement, event, and what
    /// clients do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<(u32, String, String, String)>,
    /// Estimated duration in seconds.
    pub seconds: f64,
    /// Most bytes on this machine's disk at one time.
    pub bytes: u64,
    /// The release of Ceph, if it is not the installed one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<u32>,
    /// Bytes, in addition to `bytes`, for a root directory with that release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_bytes: Option<u64>,
}

/// One testbed of a plan.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlannedTestbed {
    /// The names of the placements below the cluster.
    pub below: String,
    /// The class of the SSD.
    pub ssd: String,
    /// Disks, and OSDs on each.
    pub disks: (u32, u32),
    /// Measurements in their order: repeat, placement, workload and the load generator's arguments.
    pub runs: Vec<(u32, String, String, String)>,
}

/// Returns what [`super::run`] would do, without doing it.
///
/// # Errors
/// If the suite names something that does not exist.
pub fn plan(options: &Options<'_>) -> Result<Plan, RunError> {
    let suite = &options.suite;
    let left_out = header(options)?;
    let not_run = not_run(suite, options.release)?;
    let impossible =
        |cell: &Cell, _| is_not_run(suite, &not_run, cell) || is_left_out(&left_out, cell);
    let blocks = schedule::blocks(suite, suite.repeats, options.seed, &impossible)
        .map_err(RunError::Suite)?;
    let (hypervisors, servers) = (suite.ground.hypervisors, suite.ground.servers);
    let ssds = blocks.iter().map(|block| Ok(block.ssds(hypervisors)?.count(servers)));
    let ssds = ssds.collect::<Result<Vec<u32>, _>>().map_err(RunError::Suite)?;
    let ssds = u64::from(ssds.into_iter().max().unwrap_or(1));
    let testbeds: Vec<PlannedTestbed> = blocks.iter().map(|block| planned(suite, block)).collect();
    let runs = testbeds.iter().map(|testbed| testbed.runs.len()).sum();
    let (disks, ssd) =
        (suite.ground.disks.iter().max().copied().unwrap_or(1), suite.ground.ssd_bytes);
    let has_objects = suite.workloads.iter().any(|workload| workload.tool == Tool::RadosBench);
    let objects = if has_objects { suite.objects_bytes_max() } else { 0 };
    let images = suite.ground.image_bytes * u64::from(suite.images_on(left_out.machine.cpus));
    let written = (images + objects) * u64::from(suite.ground.replicas_max());
    let due = events::due(suite, options.seed, &|due| impossible(&due.cell, 0));
    let load_s: u32 = due.iter().map(|due| due.event.load_s(suite)).sum();
    // An event's SSDs are in all servers or in up to two hypervisors, depending on the placement.
    // Count the larger number.
    let ssds = if due.is_empty() { ssds } else { ssds.max(u64::from(servers.max(1)).max(2)) };
    Ok(Plan {
        seconds: Clock::new(suite).left_s(blocks.len() + due.len(), runs) + f64::from(load_s),
        events: due.iter().map(|due| planned_event(suite, due)).collect(),
        bytes: (written + (1 << 30) * u64::from(disks))
            .min(suite.ground.disk_bytes * u64::from(disks))
            + ssd * ssds,
        testbeds,
        not_run,
        release: options.release,
        root_bytes: options.release.map(|_| ROOT_BYTES),
        not_run_sizes: left_out.not_run_sizes,
        not_run_clients: left_out.not_run_clients,
        runs,
    })
}

fn planned(suite: &Suite, block: &Block) -> PlannedTestbed {
    let runs = block.steps.iter().flat_map(|step| {
        step.cells.iter().map(|cell| {
            let workload =
                suite.workload(&cell.workload).expect("a suite's cells are of its workloads");
            let image = |client| (Endpoint::rbd("CONF", format!("img{client}")), 0);
            let pool = |_| Entrance { conf: "CONF".into(), client: None };
            let reach = Reach { image: &image, pool: &pool };
            let clients = load::of(suite, workload, cell.depth, cell.clients, &reach);
            let slowed = cell.slowed_by.map(|by| format!(", slowed by {by}")).unwrap_or_default();
            let beside = cell.beside().map(|what| format!(", {what}")).unwrap_or_default();
            let name =
                format!("{} QD{} × {}{slowed}{beside}", cell.workload, cell.depth, cell.clients);
            (step.repeat, step.placement.clone(), name, clients.command(0))
        })
    });
    PlannedTestbed {
        below: block.shape.below.clone(),
        ssd: block.shape.ssd.clone(),
        disks: (block.shape.disks, block.shape.osds_per_disk),
        runs: runs.collect(),
    }
}

fn planned_event(suite: &Suite, due: &Due) -> (u32, String, String, String) {
    let Due { event, cell, repeat } = due;
    let what = format!(
        "{} with {} requests per second each for {} s, event after {} s",
        words::count(cell.clients as usize, "client"),
        event.requests_per_s,
        event.load_s(suite),
        suite.ramp_s + event.before_s(suite)
    );
    (*repeat, cell.placement.clone(), event.name.clone(), what)
}
