//! Measures a suite: brings testbeds up, puts placements in place, lets clients work, and records
//! the results.

mod events;
pub mod journal;
mod layout;
mod measure;
mod planned;
mod prepare;
pub mod schedule;
mod size;
mod stand;
pub mod validity;
mod watch;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::load::LoadError;
use crate::placement::{Arrangement, PlacementError};
use crate::results::{FORMAT, Frozen, NotRun, Results, Run};
use crate::suite::{Cell, Suite};
use crate::testbed::Added;
use journal::Journal;
pub use planned::{Plan, PlannedTestbed, plan};
use schedule::{Block, Clock};
use size::{is_left_out, not_run_clients, not_run_sizes};
use tidepool_cluster::ceph;
use tidepool_cluster::device::{Preset, preset};
use tidepool_cluster::machine;
use tidepool_cluster::network::Network;

/// Seconds of a drain at the devices' own speed that are measured: in the quick form, and in the
/// exact form.
const DRAIN_S: (f64, f64) = (10.0, 600.0);

/// Most attempts at any part of a suite: a cluster that broke is replaced once.
const ATTEMPTS: u32 = 2;
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
    #[error(
        "not all was measured; the same command tries the rest again; the first thing that failed: {0}"
    )]
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

/// The placements that have a repeat, for each repeat that not all placements have.
type Wanted = BTreeMap<u32, BTreeSet<String>>;

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
    let runner = Runner::new(options, progress, &journal.results)?;
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
    runner.measurements(&not_run, &mut journal, &mut clock)?;
    runner.events(&not_run, &mut journal, &mut clock)?;
    if journal.results.runs.is_empty() && journal.results.events.is_empty() {
        return Err(RunError::Nothing(why_nothing(&runner.suite, not_run, &journal.results)));
    }
    let out = runner.options.out.clone();
    journal.finish(&out)
}

/// Why nothing of a suite was measured: the first reason that is not the suite's own choice.
fn why_nothing(suite: &Suite, not_run: Vec<NotRun>, results: &Results) -> String {
    let why = not_run.into_iter().find(|found| !suite.without.contains(&found.placement));
    let size = results.not_run_sizes.first().map(|found| found.why.clone());
    let clients = results.not_run_clients.first().map(|found| found.why.clone());
    why.map(|found| found.why).or(size).or(clients).unwrap_or_default()
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
    let machine =
        machine::look(&options.parent, &[&program, "fio", "ceph"], options.commit.clone());
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

/// Placements and workloads that the suite leaves out, set-ups that it does not measure, and
/// placements that are not possible here with release `ceph` (or, if that is `None`, the installed
/// release).
fn not_run(suite: &Suite, ceph: Option<u32>) -> Result<Vec<NotRun>, RunError> {
    let ceph = ceph.or_else(ceph::release);
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
        let failing =
            wanted.iter().filter_map(|access| Some((*access, arrangement.path(*access).err()?)));
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
    workload
        .is_some_and(|workload| not_run.iter().any(|found| found.covers(&cell.placement, workload)))
}

impl<'a> Runner<'a> {
    /// A run that goes on from these results.
    ///
    /// # Errors
    /// If the results were measured with a network, and there is none now.
    fn new(
        options: Options<'a>,
        progress: &'a dyn Fn(&Progress),
        results: &Results,
    ) -> Result<Runner<'a>, RunError> {
        let suite = options.suite.clone();
        let no_network = match suite.ground.servers {
            0 => None,
            _ => Network::available(layout::delay(&suite)).err().map(|why| why.to_string()),
        };
        if let Some(why) = &no_network
            && results.testbeds.iter().any(|testbed| !testbed.network.starts_with(LOOPBACK))
        {
            return Err(RunError::NoNetwork(why.clone()));
        }
        Ok(Runner {
            suite,
            options,
            progress,
            begun: Instant::now(),
            cpus: results.machine.cpus,
            no_network,
            failed: RefCell::new(None),
        })
    }

    /// Makes the measurements of all repeats. Placements of the deciding workload whose order is
    /// open get more repeats than the others.
    fn measurements(
        &self,
        not_run: &[NotRun],
        journal: &mut Journal,
        clock: &mut Clock,
    ) -> Result<(), RunError> {
        let mut wanted: Wanted = BTreeMap::new();
        for repeats in self.suite.repeats.. {
            if repeats > self.suite.repeats {
                let contenders = schedule::contenders(&journal.results, repeats);
                if contenders.is_empty() {
                    break;
                }
                wanted.insert(repeats, contenders);
            }
            for attempt in 0..=ATTEMPTS {
                let blocks = self.left(repeats, not_run, &wanted, &journal.results)?;
                if blocks.is_empty() {
                    break;
                }
                if attempt == ATTEMPTS {
                    // A block whose OSDs stopped answering ends early without recording a failure.
                    let broke = || format!("an OSD ended in each of {ATTEMPTS} attempts");
                    self.failed.borrow_mut().get_or_insert_with(broke);
                    break;
                }
                self.failed.take();
                for (at, block) in blocks.iter().enumerate() {
                    self.block(block, &blocks[at + 1..], journal, clock)?;
                }
            }
            if let Some(failed) = self.failed.take() {
                return Err(RunError::Failed(failed));
            }
        }
        Ok(())
    }

    /// The measurements of the first `repeats` repeats that are still to be made, testbed by
    /// testbed.
    fn left(
        &self,
        repeats: u32,
        not_run: &[NotRun],
        wanted: &Wanted,
        results: &Results,
    ) -> Result<Vec<Block>, RunError> {
        let done = |cell: &Cell, repeat: u32| {
            let made = |run: &Run| run.cell == *cell && run.repeat == repeat;
            let decides = || cell.workload == self.suite.deciding;
            let contends = |names: &BTreeSet<String>| decides() && names.contains(&cell.placement);
            is_not_run(&self.suite, not_run, cell)
                || is_left_out(results, cell)
                || !wanted.get(&repeat).is_none_or(contends)
                || results.runs.iter().any(made)
        };
        schedule::blocks(&self.suite, repeats, results.seed, &done).map_err(RunError::Suite)
    }

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
            (self.progress)(&Progress {
                done: total.saturating_sub(left + later_runs),
                total,
                left_s,
                what,
            });
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
        let given_back =
            stand.testbed.front(None).and_then(|_| stand.testbed.reach(Access::Librbd));
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
}

/// The results file if none is named. `told` are the options that apply to the whole suite, such as
/// an access path.
pub fn default_out(suite: &Suite, told: &[String], quick: bool) -> PathBuf {
    let name = Path::new(&suite.name)
        .file_stem()
        .map_or_else(|| "suite".into(), |name| name.to_string_lossy());
    let told: String = told.iter().map(|told| format!("-{told}")).collect();
    PathBuf::from(format!("{name}{told}{}.json", if quick { "-quick" } else { "" }))
}
