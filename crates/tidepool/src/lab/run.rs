//! `tidepool lab run`, `lab placements`, `lab suites`.

use super::caretaker::Caretaker;
use super::release;
use crate::cli::OutputArgs;
use crate::cli::lab::LabRunArgs;
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::cell::RefCell;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use tidepool_cluster::scratch;
use tidepool_daemon::failure::Failure;
use tidepool_daemon::units::Size;
use tidepool_lab::access::Access;
use tidepool_lab::placement;
use tidepool_lab::results::{NotRunClients, NotRunSize, Results};
use tidepool_lab::run::{self, Options, Plan, Progress, RunError};
use tidepool_lab::suite::{Suite, SuiteError};
use tokio::signal::unix::{SignalKind, signal};

/// Exit status of a command that a signal has ended.
const INTERRUPTED: i32 = 130;

#[derive(Serialize)]
struct Place {
    name: &'static str,
    what: String,
    not_here: Option<String>,
}

/// Lists the placements, and the access paths.
pub fn placements(args: &OutputArgs) -> Result<(), Failure> {
    let ceph = tidepool_cluster::ceph::release();
    let place = |placement: &&dyn placement::Placement| Place {
        name: placement.name(),
        what: placement.what().into(),
        not_here: placement::probe(*placement, ceph).err(),
    };
    let path = |access: Access| Place {
        name: access.name(),
        what: format!("an access path: {}", access.what()),
        not_here: access.probe().err(),
    };
    let places: Vec<Place> =
        placement::all().iter().map(place).chain(Access::ALL.map(path)).collect();
    output::print(args.format, &places, |places| {
        let mut table = output::table(&["PLACEMENT", "WHAT", "HERE"], &[]);
        for place in places {
            table.add_row([
                place.name,
                &place.what,
                place.not_here.as_deref().unwrap_or("possible"),
            ]);
        }
        output::render(&table)
    })
}

/// Lists the suites.
pub fn suites(args: &OutputArgs) -> Result<(), Failure> {
    output::print(args.format, &Suite::built_in(), |suites| {
        let mut table = output::table(&["SUITE", "RUNS", "QUICK", "QUESTION"], &[1, 2]);
        for suite in suites {
            let runs = |suite: &Suite| suite.runs().to_string();
            table.add_row([
                &suite.name,
                &runs(suite),
                &runs(&suite.clone().quick()),
                &suite.question,
            ]);
        }
        output::render(&table)
    })
}

/// Measures a suite.
pub fn run(args: &LabRunArgs) -> Result<(), Failure> {
    let suite = Suite::find(&args.suite).map_err(Failure::usage)?;
    let suite = if args.quick { suite.quick() } else { suite };
    let suite = as_told(suite, args).map_err(Failure::usage)?;
    let elsewhere = args.release.map(release::elsewhere).transpose()?.flatten();
    if let Some(elsewhere) = elsewhere.filter(|_| !args.dry_run) {
        return release::run(args, &suite, elsewhere);
    }
    let seed = args.seed.map_or_else(random_seed, Ok)?;
    let out =
        args.out.clone().unwrap_or_else(|| run::default_out(&suite, &in_a_name(args), args.quick));
    let stop = AtomicBool::new(false);
    let options = Options {
        quick: args.quick,
        seed,
        command: command(args, seed),
        program: std::env::current_exe().map_err(Failure::failed)?,
        commit: env!("TIDEPOOL_COMMIT").into(),
        parent: args.dir.clone().unwrap_or_else(scratch::parent),
        out,
        restart: args.restart,
        release: elsewhere.map(|release| release.ceph),
        stop: &stop,
        unfilled: args.unfilled,
        added: None,
        suite,
    };
    if args.dry_run {
        let plan = run::plan(&options).map_err(failure)?;
        return output::print(args.output.format, &plan, |plan| plan_text(plan, &options));
    }
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    tidepool_cluster::Cluster::available().map_err(Failure::failed)?;
    let _caretaker = Caretaker::start(&options.parent)?;
    let path = options.out.display().to_string();
    let results = until_signal(&stop, "ending; what was measured is kept", || {
        let bar = bar();
        let last = RefCell::new(String::new());
        let results = run::run(options, &|progress| tell(&bar, progress, &last));
        bar.finish_and_clear();
        results
    })?;
    let results = results.map_err(failure)?;
    output::print(args.output.format, &results, |results| summary(results, &path))
}

/// The command that repeats what is done here.
fn command(args: &LabRunArgs, seed: u64) -> String {
    let quick = if args.quick { " --quick" } else { "" };
    let told = told(args).into_iter();
    let told: String = told.map(|(name, value)| format!(" --{name} {value}")).collect();
    format!("tidepool lab run {}{quick}{told} --seed {seed}", args.suite)
}

/// The suite with what the command line says of all of it.
fn as_told(mut suite: Suite, args: &LabRunArgs) -> Result<Suite, SuiteError> {
    if let Some(access) = args.access {
        suite = suite.over(access)?;
    }
    if !args.replicas.is_empty() {
        suite = suite.with_replicas(&args.replicas)?;
    }
    if !args.neighbours.is_empty() {
        suite = suite.with_neighbours(&args.neighbours)?;
    }
    Ok(suite)
}

/// The same in the name of a file: paths by themselves, others with their names.
fn in_a_name(args: &LabRunArgs) -> Vec<String> {
    let part = |(name, value): (&str, String)| match name {
        "access" => value,
        "release" => format!("ceph{value}"),
        _ => format!("{name}-{}", value.replace([':', ','], "-")),
    };
    told(args).into_iter().map(part).collect()
}

/// What the command line says of all of a suite.
fn told(args: &LabRunArgs) -> Vec<(&'static str, String)> {
    let list = |values: Vec<String>| (!values.is_empty()).then(|| values.join(","));
    let replicas = list(args.replicas.iter().map(u32::to_string).collect());
    let neighbours = list(args.neighbours.iter().map(|of| of.short()).collect());
    let access = args.access.map(|access| access.to_string());
    let release = args.release.map(|release| release.to_string());
    let named = [
        ("access", access),
        ("replicas", replicas),
        ("neighbours", neighbours),
        ("release", release),
    ];
    named.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn failure(error: RunError) -> Failure {
    match error {
        RunError::Suite(_) => Failure::usage(error),
        error => Failure::failed(error),
    }
}

fn random_seed() -> Result<u64, Failure> {
    // Small enough to be typed again, and exact in JSON.
    Ok(uuid::Uuid::new_v4().as_u64_pair().0 % 1_000_000)
}

/// Does something on another thread and raises `stop` when a signal comes; a second signal ends the
/// process at once, and what is left is removed by the caretaker. `says` is what the user is told
/// at the first one.
pub(super) fn until_signal<T: Send>(
    stop: &AtomicBool,
    says: &str,
    work: impl FnOnce() -> T + Send,
) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    std::thread::scope(|scope| {
        let (ended, end) = tokio::sync::oneshot::channel();
        let worker = scope.spawn(move || {
            let outcome = work();
            let _ = ended.send(());
            outcome
        });
        runtime.block_on(signals(stop, says, end)).map_err(Failure::failed)?;
        worker.join().map_err(|_| Failure::failed("the measurement broke off"))
    })
}

async fn signals(
    stop: &AtomicBool,
    says: &str,
    mut end: tokio::sync::oneshot::Receiver<()>,
) -> std::io::Result<()> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    loop {
        tokio::select! {
            _ = &mut end => return Ok(()),
            _ = interrupted.recv() => {}
            _ = terminated.recv() => {}
        }
        if stop.swap(true, Ordering::AcqRel) {
            std::process::exit(INTERRUPTED);
        }
        eprintln!("{says}");
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {msg}")
        .expect("the template is constant");
    bar.set_style(style.progress_chars("=> "));
    bar
}

/// Shows what comes next; where there is no terminal, as lines.
fn tell(bar: &ProgressBar, progress: &Progress, last: &RefCell<String>) {
    let left = format!("{:.0} min left", (progress.left_s / 60.0).ceil());
    bar.set_length(progress.total as u64);
    bar.set_position(progress.done as u64);
    bar.set_message(format!("{}; {left}", progress.what));
    if bar.is_hidden() && *last.borrow() != progress.what {
        eprintln!("[{}/{}] {}; {left}", progress.done, progress.total, progress.what);
        last.replace(progress.what.clone());
    }
}

fn plan_text(plan: &Plan, options: &Options<'_>) -> String {
    let mut text = String::new();
    for (number, testbed) in plan.testbeds.iter().enumerate() {
        text.push_str(&format!(
            "cluster {}: {}, {} disks × {} OSDs, SSDs {}\n",
            number + 1,
            testbed.below,
            testbed.disks.0,
            testbed.disks.1,
            testbed.ssd,
        ));
        for (repeat, placement, workload, command) in &testbed.runs {
            text.push_str(&format!("  repeat {repeat}  {placement}  {workload}\n    {command}\n"));
        }
    }
    for (repeat, placement, event, load) in &plan.events {
        text.push_str(&format!(
            "a cluster for {event}: repeat {repeat}  {placement}\n    {load}\n"
        ));
    }
    for not_run in &plan.not_run {
        text.push_str(&format!("not run: {}: {}\n", not_run.name(), not_run.why));
    }
    text.push_str(&left_out_text(&plan.not_run_sizes, &plan.not_run_clients));
    if let Some((ceph, bytes)) = plan.release.zip(plan.root_bytes) {
        let bytes = Size(bytes).approximate();
        let place = scratch::parent().display().to_string();
        text.push_str(&format!(
            "\nCeph {ceph} is not installed here: it takes some minutes and root to make a root directory with it and all that the lab starts, which goes again; up to {bytes} in {place}\n"
        ));
        text.extend(
            release::obstacle(ceph)
                .map(|why| format!("that is not possible as things are: {why}\n")),
        );
    }
    text.push_str(&format!(
        "\n{} runs on {} clusters, about {:.0} minutes; up to {} in {}; results in {}\n",
        plan.runs + plan.events.len(),
        plan.testbeds.len() + plan.events.len(),
        (plan.seconds / 60.0).ceil(),
        Size(plan.bytes).approximate(),
        options.parent.display(),
        options.out.display()
    ));
    text
}

fn summary(results: &Results, path: &str) -> String {
    let invalid = results.runs.iter().filter(|run| !run.is_valid()).count();
    let invalid = invalid + results.events.iter().filter(|event| !event.is_valid()).count();
    let runs = results.runs.len() + results.events.len();
    let mut text = format!("{path}: {runs} runs, {invalid} of them do not count\n");
    for not_run in &results.not_run {
        text.push_str(&format!("not run: {}: {}\n", not_run.name(), not_run.why));
    }
    text.push_str(&left_out_text(&results.not_run_sizes, &results.not_run_clients));
    text.push_str(&format!("`tidepool lab report {path}` makes the report\n"));
    text
}

/// Sizes of clusters and numbers of clients that are not measured, a line each.
fn left_out_text(sizes: &[NotRunSize], clients: &[NotRunClients]) -> String {
    let size = |NotRunSize { size, why }: &NotRunSize| format!("not run: {size}: {why}\n");
    let of_clients = |NotRunClients { clients, why }: &NotRunClients| {
        format!("not run: {clients} client{}: {why}\n", if *clients == 1 { "" } else { "s" })
    };
    sizes.iter().map(size).chain(clients.iter().map(of_clients)).collect()
}
