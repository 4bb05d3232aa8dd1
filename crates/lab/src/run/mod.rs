//! Measures a suite: brings testbeds up, puts placements in place, lets clients work, and records
//! the results.

mod events;
pub mod journal;
mod layout;
mod measure;
pub mod schedule;
mod size;
pub mod validity;
mod watch;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::cluster::{self, ClusterError};
use crate::device::{Preset, preset};
use crate::fio::{self, Endpoint, Pass, Running};
use crate::load::{self, LoadError, Objects, Reach};
use crate::machine;
use crate::network::Network;
use crate::placement::{Arrangement, Placement, PlacementError};
use crate::release::ROOT_BYTES;
use crate::results::{FORMAT, Frozen, NotRun, NotRunClients, NotRunSize, Results, Run, Testbed as Described};
use crate::suite::{Cell, Suite, Tool};
use crate::testbed::{Added, Entrance, Testbed};
use crate::words;
use journal::Journal;
use measure::{PASS_LIMIT, Stand};
use schedule::{Block, Clock};
use size::{is_left_out, not_run_clients, not_run_sizes};
use watch::Watch;

/// Seconds of a drain at the devices' own speed that are measured: in the quick form, and in the
/// exact form.
const DRAIN_S: (f64, f64) = (10.0, 600.0);

/// Most attempts at any part of a suite: a cluster that broke is replaced once.
const ATTEMPTS: u32 = 2;
/// Fills of new caches write a multiple of this many bytes to each image.
const AGED_UNIT_BYTES: u64 = 1 << 20;
/// The network between clients and OSDs when the cluster has no network of its own.
const LOOPBACK: &str = "the loopback interface";

/// The suite to run and how to run it.
#[derive(Debug)]
pub struct Options<'a> {
    /// The suite, in the form in which it runs.
    pub suite: Suite,
    /// Whether this is the quick form.
    pub quick: bool,
    /// The seed from which the order of measurements is drawn.
    pub seed: u64,
    /// The command line that repeats the run, with its seed.
    pub command: String,
    /// Path of the program `tidepool`.
    pub program: PathBuf,
    /// The commit from which `tidepool` was built.
    pub commit: String,
    /// Directory below which testbeds are made.
    pub parent: PathBuf,
    /// File to which the results are written.
    pub out: PathBuf,
    /// Begin anew: discard the journal of an unfinished run, and replace existing results.
    pub restart: bool,
    /// The release of Ceph for which placements are probed. `None`: the installed release.
    pub release: Option<u32>,
    /// Set when the user wants the run to end.
    pub stop: &'a AtomicBool,
    /// Images are not filled before they are measured. This shows that such runs are found invalid.
    pub unfilled: bool,
    /// A time that is added to a hop while clients run. This shows that the measurement finds it in
    /// that hop.
    pub added: Option<Added>,
}

/// State of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Measurements and events that are done.
    pub done: usize,
    /// All measurements and events.
    pub total: usize,
    /// Estimated seconds left.
    pub left_s: f64,
    /// The next step, in words.
    pub what: String,
}

/// Why a suite did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The user has interrupted it.
    #[error("interrupted; the same command, without --restart, goes on where it was")]
    Interrupted,
    /// A results file exists already.
    #[error("{}: it has run already; choose another --out, or --restart", .0.display())]
    Finished(PathBuf),
    /// The journal (`OUT.part`) cannot be read as a journal.
    #[error("{}: no run in the making; remove it, or --restart", .0.display())]
    NoJournal(PathBuf),
    /// The journal (`OUT.part`) belongs to another suite, or to other devices or programs.
    #[error(
        "{}: a run of another suite, or with other devices or programs; choose another --out, or --restart",
        .0.display()
    )]
    Other(PathBuf),
    /// The measurements so far were made with other processors: their number, and their model. How
    /// many clients and OSDs are measured depends on the number.
    #[error(
        "{}: begun with {} processors ({}), and there are {} ({}) now; go on with as many, choose another --out, or --restart",
        .path.display(), .then.0, .then.1, .now.0, .now.1
    )]
    OtherMachine {
        /// The journal.
        path: PathBuf,
        /// The processors of the machine on which it was begun.
        then: (usize, String),
        /// The processors of this machine.
        now: (usize, String),
    },
    /// Another process is writing the journal.
    #[error("{}: another run is writing it", .0.display())]
    UnderWay(PathBuf),
    /// The measurements so far were made with a network, and now there is none.
    #[error("what was measured so far had a network, and now there is none: {0}")]
    NoNetwork(String),
    /// A part of the suite could not be measured.
    #[error("not all was measured; the same command tries the rest again; the first thing that failed: {0}")]
    Failed(String),
    /// Nothing of the suite can run here.
    #[error("nothing of it can run here; {0}")]
    Nothing(String),
    /// The suite names something that does not exist.
    #[error("the suite: {0}")]
    Suite(String),
    /// A placement or its testbed failed.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// A load generator failed outside of a measurement.
    #[error(transparent)]
    Load(LoadError),
    /// A file operation failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl RunError {
    fn io(what: String) -> impl FnOnce(io::Error) -> RunError {
        |source| RunError::Io { what, source }
    }
}

/// A suite while it is being run.
struct Runner<'a> {
    suite: Suite,
    options: Options<'a>,
    progress: &'a dyn Fn(&Progress),
    begun: Instant,
    /// Processors that could be used when the journal was begun.
    cpus: usize,
    /// Why clusters cannot have the network that the suite wants.
    no_network: Option<String>,
    /// The first failure of this attempt.
    failed: RefCell<Option<String>>,
}

/// Measures a suite and returns its results, which are then also in [`Options::out`]. `progress` is
/// called with the next step.
///
/// # Errors
/// If the suite cannot begin, is interrupted, cannot be measured completely, or its results cannot
/// be written. Finished measurements are kept for the next run.
pub fn run(options: Options<'_>, progress: &dyn Fn(&Progress)) -> Result<Results, RunError> {
    let header = header(&options)?;
    let (mut journal, resumed) = Journal::open(&options.out, header, options.restart)?;
    let seed = journal.results.seed;
    let suite = options.suite.clone();
    let mut runner = Runner {
        suite,
        options,
        progress,
        begun: Instant::now(),
        cpus: journal.results.machine.cpus,
        no_network: None,
        failed: RefCell::new(None),
    };
    if runner.suite.ground.servers > 0 {
        runner.no_network = Network::available(layout::delay(&runner.suite)).err().map(|why| why.to_string());
    }
    if let Some(why) = &runner.no_network
        && journal.results.testbeds.iter().any(|testbed| !testbed.network.starts_with(LOOPBACK))
    {
        return Err(RunError::NoNetwork(why.clone()));
    }
    if resumed {
        let done = journal.results.runs.len() + journal.results.events.len();
        progress(&Progress {
            done,
            total: runner.suite.runs(),
            left_s: 0.0,
            what: format!("{done} runs are there already"),
        });
    }
    let not_run = not_run(&runner.suite, runner.options.release)?;
    for found in &not_run {
        journal.not_run(found.clone())?;
    }
    let mut clock = Clock::new(&runner.suite);
    let mut wanted: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for repeats in runner.suite.repeats.. {
        if repeats > runner.suite.repeats {
            let contenders = schedule::contenders(&journal.results, repeats);
            if contenders.is_empty() {
                break;
            }
            wanted.insert(repeats, contenders);
        }
        for attempt in 0..=ATTEMPTS {
            let known = journal.results.runs.clone();
            let left_out = journal.results.with_runs(Vec::new());
            let done = |cell: &Cell, repeat: u32| {
                let made = |run: &Run| run.cell == *cell && run.repeat == repeat;
                let decides = || cell.workload == runner.suite.deciding;
                let contends = |names: &BTreeSet<String>| decides() && names.contains(&cell.placement);
                is_not_run(&runner.suite, &not_run, cell)
                    || is_left_out(&left_out, cell)
                    || !wanted.get(&repeat).is_none_or(contends)
                    || known.iter().any(made)
            };
            let blocks = schedule::blocks(&runner.suite, repeats, seed, &done).map_err(RunError::Suite)?;
            if blocks.is_empty() {
                break;
            }
            if attempt == ATTEMPTS {
                // A block whose OSDs stopped answering ends early without recording a failure.
                let broke = || format!("an OSD ended in each of {ATTEMPTS} attempts");
                runner.failed.borrow_mut().get_or_insert_with(broke);
                break;
            }
            runner.failed.take();
            for (at, block) in blocks.iter().enumerate() {
                runner.block(block, &blocks[at + 1..], &mut journal, &mut clock)?;
            }
        }
        if let Some(failed) = runner.failed.take() {
            return Err(RunError::Failed(failed));
        }
    }
    runner.events(&not_run, &mut journal, &mut clock)?;
    if journal.results.runs.is_empty() && journal.results.events.is_empty() {
        let why = not_run.into_iter().find(|found| !runner.suite.without.contains(&found.placement));
        let size = journal.results.not_run_sizes.first().map(|found| found.why.clone());
        let clients = journal.results.not_run_clients.first().map(|found| found.why.clone());
        let why = why.map(|found| found.why).or(size).or(clients);
        return Err(RunError::Nothing(why.unwrap_or_default()));
    }
    let out = runner.options.out.clone();
    journal.finish(&out)
}

/// The results before the first measurement.
fn header(options: &Options<'_>) -> Result<Results, RunError> {
    let suite = &options.suite;
    let mut classes = vec![suite.ground.disk.clone(), suite.ground.ssd.clone()];
    for placement in &suite.placements {
        classes.extend(Arrangement::parse(placement).map_err(RunError::Suite)?.ssd);
    }
    classes.sort();
    classes.dedup();
    let frozen = classes.iter().map(|name| Ok(Frozen::of(&class(name)?)));
    let program = options.program.to_string_lossy();
    let machine = machine::look(&options.parent, &[&program, "fio", "ceph"], options.commit.clone());
    Ok(Results {
        format: FORMAT,
        suite: suite.clone(),
        suite_sha256: suite.sha256(),
        quick: options.quick,
        seed: options.seed,
        command: options.command.clone(),
        begun: machine::now(),
        not_run_sizes: not_run_sizes(suite, machine.cpus),
        not_run_clients: not_run_clients(suite, machine.cpus),
        machine,
        devices: frozen.collect::<Result<_, RunError>>()?,
        not_run: Vec::new(),
        testbeds: Vec::new(),
        runs: Vec::new(),
        events: Vec::new(),
    })
}

fn class(name: &str) -> Result<Preset, RunError> {
    preset::find(name).ok_or_else(|| RunError::Suite(format!("no class {name} of devices")))
}

impl Frozen {
    /// The class as it is now, with the SHA-256 of its specification.
    pub fn of(preset: &Preset) -> Frozen {
        let text = serde_json::to_vec(&preset.spec).expect("a spec is plain data");
        let sha256 = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
        Frozen { spec: preset.spec.clone(), sha256 }
    }
}

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

/// Returns what [`run`] would do, without doing it.
///
/// # Errors
/// If the suite names something that does not exist.
pub fn plan(options: &Options<'_>) -> Result<Plan, RunError> {
    let suite = &options.suite;
    let left_out = header(options)?;
    let not_run = not_run(suite, options.release)?;
    let impossible = |cell: &Cell, _| is_not_run(suite, &not_run, cell) || is_left_out(&left_out, cell);
    let blocks =
        schedule::blocks(suite, suite.repeats, options.seed, &impossible).map_err(RunError::Suite)?;
    let (hypervisors, servers) = (suite.ground.hypervisors, suite.ground.servers);
    let ssds = blocks.iter().map(|block| Ok(block.ssds(hypervisors)?.count(servers)));
    let ssds = ssds.collect::<Result<Vec<u32>, _>>().map_err(RunError::Suite)?;
    let ssds = u64::from(ssds.into_iter().max().unwrap_or(1));
    let testbeds: Vec<PlannedTestbed> = blocks.iter().map(|block| planned(suite, block)).collect();
    let runs = testbeds.iter().map(|testbed| testbed.runs.len()).sum();
    let (disks, ssd) = (suite.ground.disks.iter().max().copied().unwrap_or(1), suite.ground.ssd_bytes);
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
        bytes: (written + (1 << 30) * u64::from(disks)).min(suite.ground.disk_bytes * u64::from(disks))
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

/// Placements and workloads that the suite leaves out, set-ups that it does not measure, and
/// placements that are not possible here with release `ceph` (or, if that is `None`, the installed
/// release).
fn not_run(suite: &Suite, ceph: Option<u32>) -> Result<Vec<NotRun>, RunError> {
    let ceph = ceph.or_else(cluster::release);
    let mut not_run = Vec::new();
    for placement in &suite.without {
        not_run.push(NotRun::all(placement, "the quick form leaves it out"));
    }
    for setup in &suite.setups {
        not_run.extend(setup.not_run(suite).map(|why| NotRun::all(&setup.name, why)));
    }
    let mut cells = suite.cells();
    cells.extend(suite.happenings().into_iter().map(|(_, cell)| cell));
    for placement in suite.measured() {
        let arrangement = Arrangement::parse(&placement).map_err(RunError::Suite)?;
        if let Err(why) = arrangement.probe(ceph) {
            not_run.push(NotRun::all(placement, why));
            continue;
        }
        let of_it = cells.iter().filter(|cell| cell.placement == placement);
        let wanted: BTreeSet<Access> = of_it.map(|cell| suite.access(cell)).collect();
        let failing = wanted.iter().filter_map(|access| Some((*access, arrangement.path(*access).err()?)));
        let failing: Vec<(Access, String)> = failing.collect();
        let nothing_left = failing.len() == wanted.len();
        not_run.extend(failing.into_iter().map(|(access, why)| NotRun {
            placement: placement.clone(),
            why,
            access: (!nothing_left).then_some(access),
        }));
    }
    Ok(not_run)
}

/// Whether a measurement is left out or not possible here.
fn is_not_run(suite: &Suite, not_run: &[NotRun], cell: &Cell) -> bool {
    let workload = suite.workload(&cell.workload);
    workload.is_some_and(|workload| not_run.iter().any(|found| found.covers(&cell.placement, workload)))
}

fn planned(suite: &Suite, block: &Block) -> PlannedTestbed {
    let runs = block.steps.iter().flat_map(|step| {
        step.cells.iter().map(|cell| {
            let workload = suite.workload(&cell.workload).expect("a suite's cells are of its workloads");
            let image = |client| (Endpoint::rbd("CONF", format!("img{client}")), 0);
            let pool = |_| Entrance { conf: "CONF".into(), client: None };
            let reach = Reach { image: &image, pool: &pool };
            let clients = load::of(suite, workload, cell.depth, cell.clients, &reach);
            let slowed = cell.slowed_by.map(|by| format!(", slowed by {by}")).unwrap_or_default();
            let beside = cell.beside().map(|what| format!(", {what}")).unwrap_or_default();
            let name = format!("{} QD{} × {}{slowed}{beside}", cell.workload, cell.depth, cell.clients);
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

fn planned_event(suite: &Suite, due: &events::Due) -> (u32, String, String, String) {
    let events::Due { event, cell, repeat } = due;
    let what = format!(
        "{} with {} requests per second each for {} s, event after {} s",
        words::count(cell.clients as usize, "client"),
        event.requests_per_s,
        event.load_s(suite),
        suite.ramp_s + event.before_s(suite)
    );
    (*repeat, cell.placement.clone(), event.name.clone(), what)
}

impl Runner<'_> {
    /// Fails once the user wants the run to end.
    fn interrupted(&self) -> Result<(), RunError> {
        if self.options.stop.load(Ordering::Acquire) { Err(RunError::Interrupted) } else { Ok(()) }
    }

    fn drain_limit_s(&self) -> f64 {
        if self.options.quick { DRAIN_S.0 } else { DRAIN_S.1 }
    }

    /// Makes all measurements on one testbed. If the testbed does not come up, its measurements are
    /// not made in this attempt.
    fn block(
        &self,
        block: &Block,
        later: &[Block],
        journal: &mut Journal,
        clock: &mut Clock,
    ) -> Result<(), RunError> {
        self.interrupted()?;
        let later_runs =
            later.iter().flat_map(|block| &block.steps).map(|step| step.cells.len()).sum::<usize>();
        let mut left = block.steps.iter().map(|step| step.cells.len()).sum::<usize>();
        let tell = |what: String, clock: &Clock, testbeds: usize, left: usize| {
            let total = self.suite.runs();
            let left_s = clock.left_s(testbeds, left + later_runs);
            (self.progress)(&Progress { done: total.saturating_sub(left + later_runs), total, left_s, what });
        };
        tell(format!("a cluster with {}", block.shape.below), clock, later.len() + 1, left);
        let start = Instant::now();
        let stand = self.stand(block, journal);
        let Some(mut stand) = self.attempt(stand)? else { return Ok(()) };
        clock.testbed(start.elapsed().as_secs_f64());
        for step in &block.steps {
            for (at, cell) in step.cells.iter().enumerate() {
                self.interrupted()?;
                let path = self.path(cell)?;
                if at == 0 || stand.testbed.access() != path {
                    let placed = self.place(&mut stand, cell, path, journal);
                    if self.attempt(placed)?.is_none() {
                        return Ok(());
                    }
                }
                let beside = cell.beside().map(|what| format!(", {what}")).unwrap_or_default();
                let what = format!(
                    "{} {} QD{}{beside}, repeat {}",
                    cell.placement, cell.workload, cell.depth, step.repeat
                );
                tell(what, clock, later.len(), left);
                let start = Instant::now();
                let run = self.measure(&mut stand, cell, step.repeat);
                let Some(run) = self.attempt(run)? else { return Ok(()) };
                journal.run(run)?;
                clock.run(start.elapsed().as_secs_f64());
                left -= 1;
                if stand.testbed.is_broken() {
                    // The next attempt makes the rest of the block on a new cluster.
                    return Ok(());
                }
            }
        }
        // Removing the placement gives the images back with everything that was written to them.
        let given_back = stand.testbed.front(None).and_then(|_| stand.testbed.reach(Access::Librbd));
        self.attempt(given_back.map_err(RunError::Placement)).map(drop)
    }

    /// Remembers the failure of one testbed. The failure ends the work on that testbed, not the
    /// suite.
    fn attempt<T>(&self, outcome: Result<T, RunError>) -> Result<Option<T>, RunError> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error @ (RunError::Placement(_) | RunError::Load(_))) => {
                self.interrupted()?;
                self.failed.borrow_mut().get_or_insert_with(|| error.to_string());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Brings a testbed up, fills its images, and fills the caches below the cluster.
    fn stand(&self, block: &Block, journal: &mut Journal) -> Result<Stand, RunError> {
        let (ground, shape) = (&self.suite.ground, &block.shape);
        let arrangement = Arrangement::parse(&shape.below).map_err(RunError::Suite)?;
        let layout = layout::of(&self.suite, block, self.no_network.is_none())?;
        let (parent, program) = (&self.options.parent, &self.options.program);
        let mut testbed = Testbed::up(parent, program, &layout, &arrangement).map_err(RunError::Placement)?;
        testbed.calm().map_err(RunError::Placement)?;
        let written_bytes = if self.options.unfilled { 0 } else { ground.image_bytes };
        let mut images = Vec::new();
        for number in 0..self.suite.images_on(self.cpus) {
            let name = format!("img{number}");
            testbed.image(&name, ground.image_bytes).map_err(RunError::Placement)?;
            images.push((name, written_bytes));
        }
        self.pass_over(
            &testbed,
            Pass::WriteAndFlush,
            images.iter().map(|(image, bytes)| (testbed.direct(image), *bytes)),
        )?;
        let id = journal.results.testbeds.iter().map(|testbed| testbed.id + 1).max().unwrap_or(1);
        let ceph =
            testbed.cluster().ceph(&["version"]).map_err(|e: ClusterError| RunError::Placement(e.into()))?;
        testbed.filled().map_err(RunError::Placement)?;
        // Caches are filled through images. A suite with only rados bench workloads measures caches
        // that were never full.
        if !images.is_empty() && arrangement.caches_below() {
            let caches_bytes = testbed.server_share_bytes() * u64::from(ground.servers.max(1));
            let copies = u64::from(shape.replicas) * images.len() as u64;
            let bytes = caches_bytes / copies;
            self.age(&testbed, images.iter().map(|(image, _)| (testbed.direct(image), bytes)))?;
        }
        let proof = testbed.verify().map_err(RunError::Placement)?;
        journal.testbed(Described {
            id,
            disks: shape.disks,
            osds_per_disk: shape.osds_per_disk,
            replicas: Some(shape.replicas).filter(|copies| *copies != ground.replicas),
            ceph,
            network: self.network(&testbed),
            proofs: BTreeMap::from([(shape.below.clone(), proof)]),
        })?;
        Ok(Stand { testbed, id, images, objects: Objects::none(), warm: None })
    }

    /// Passes over several images at the same time: over the given number of bytes of each, from
    /// its beginning.
    fn pass_over(
        &self,
        testbed: &Testbed,
        pass: Pass,
        images: impl Iterator<Item = (Endpoint, u64)>,
    ) -> Result<(), RunError> {
        let some = images.filter(|(_, bytes)| *bytes > 0);
        let passes = some.map(|(image, bytes)| Running::start(&image, &fio::pass(&image, pass, bytes)));
        let passes = passes.collect::<Result<Vec<_>, _>>().map_err(|e| RunError::Load(e.into()))?;
        let watch = Watch::new(self, testbed, PASS_LIMIT);
        for pass in passes {
            pass.finish(&|| watch.stop()).map_err(|e| RunError::Load(e.into()))?;
        }
        Ok(())
    }

    /// Writes through new caches as many bytes as they hold, over the images several times if
    /// needed. A cache that was never full would take writes in at no cost.
    fn age(&self, testbed: &Testbed, images: impl Iterator<Item = (Endpoint, u64)>) -> Result<(), RunError> {
        if self.options.unfilled {
            return Ok(());
        }
        let most = self.suite.ground.image_bytes;
        let whole = |bytes: u64| bytes.min(most) / AGED_UNIT_BYTES * AGED_UNIT_BYTES;
        let mut left: Vec<(Endpoint, u64)> = images.collect();
        testbed.prepare(|| {
            while left.iter().any(|(_, bytes)| whole(*bytes) > 0) {
                // This pass sends no flush: a cache remembers that its guest has flushed, and the
                // guests of some workloads never flush.
                self.pass_over(
                    testbed,
                    Pass::Write,
                    left.iter().map(|(image, bytes)| (image.clone(), whole(*bytes))),
                )?;
                left.iter_mut().for_each(|(_, bytes)| *bytes = bytes.saturating_sub(most));
            }
            Ok::<_, RunError>(())
        })?;
        testbed.drain(0.0, &|| self.interrupted().is_err()).map(drop).map_err(RunError::Placement)
    }

    /// The network between clients and OSDs, in words.
    fn network(&self, testbed: &Testbed) -> String {
        let loopback = || match &self.no_network {
            None => LOOPBACK.to_string(),
            Some(why) => format!("{LOOPBACK}, without a delay: {why}"),
        };
        testbed.cluster().network().map_or_else(loopback, Network::describe)
    }

    /// The access path by which a measurement's hypervisors reach images.
    fn path(&self, cell: &Cell) -> Result<Access, RunError> {
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        arrangement.path(self.suite.access(cell)).map_err(RunError::Suite)
    }

    /// Puts the placement of a measurement in front of the cluster, on its access path.
    fn place(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        path: Access,
        journal: &mut Journal,
    ) -> Result<(), RunError> {
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        stand.testbed.emulate(false);
        if let Some(proof) = stand.testbed.reach(path).map_err(RunError::Placement)? {
            note(stand, journal, path.name().into(), proof)?;
        }
        let proof = self.front(stand, arrangement.front())?;
        note(stand, journal, on_path(&cell.placement, path), proof)
    }

    /// Puts a new placement in front of the cluster, or none. A cache that keeps reads, and is not
    /// in memory, is then written full. Returns the proof.
    fn front(&self, stand: &mut Stand, front: Option<&'static dyn Placement>) -> Result<Value, RunError> {
        stand.warm = None;
        let proof = stand.testbed.front(front).map_err(RunError::Placement)?;
        if front.is_some_and(|front| front.caches_reads() && !front.caches_in_memory()) {
            let on_host = stand.images.len().div_ceil(self.suite.ground.hypervisors.max(1) as usize);
            let bytes = stand.testbed.host_share_bytes() / on_host.max(1) as u64;
            // Caches are filled without the guests in between, because requests through a guest are
            // slow.
            let image = |(image, _): &(String, u64)| (stand.testbed.outside(image), bytes);
            self.age(&stand.testbed, stand.images.iter().map(image))?;
        }
        Ok(proof)
    }
}

/// Records the proof that something is in place on a testbed, under a name.
fn note(stand: &Stand, journal: &mut Journal, name: String, proof: Value) -> Result<(), RunError> {
    let known = journal.results.testbeds.iter().find(|testbed| testbed.id == stand.id);
    let Some(mut testbed) = known.cloned().filter(|_| !proof.is_null()) else { return Ok(()) };
    let changed = testbed.proofs.insert(name, proof.clone()) != Some(proof);
    if changed { journal.testbed(testbed) } else { Ok(()) }
}

/// The name of a placement on an access path.
fn on_path(placement: &str, access: Access) -> String {
    if access.is_librbd() { placement.into() } else { format!("{placement} over {access}") }
}

/// The results file if none is named. `told` are the options that apply to the whole suite, such as
/// an access path.
pub fn default_out(suite: &Suite, told: &[String], quick: bool) -> PathBuf {
    let name =
        Path::new(&suite.name).file_stem().map_or_else(|| "suite".into(), |name| name.to_string_lossy());
    let told: String = told.iter().map(|told| format!("-{told}")).collect();
    PathBuf::from(format!("{name}{told}{}.json", if quick { "-quick" } else { "" }))
}
