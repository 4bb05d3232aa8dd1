//! `tidepool lab`.

mod caretaker;
mod cluster;
mod compare;
mod devices;
mod exchange;
mod guest;
mod plan;
mod qualify;
mod release;
mod report;
mod run;

use crate::cli::lab::LabCommand;
use std::path::Path;
use tidepool_cluster::device::{Preset, preset};
use tidepool_cluster::fio::{Job, Pattern, Sync};
use tidepool_daemon::failure::{Failure, reason};
use tidepool_lab::document::{self, DocumentError};
use tidepool_lab::results::Results;

/// Runs the command.
pub fn run(command: &LabCommand) -> Result<(), Failure> {
    match command {
        LabCommand::Devices(args) => devices::run(args),
        LabCommand::Qualify(args) => qualify::run(args),
        LabCommand::Cluster(args) => cluster::run(&args.command),
        LabCommand::Placements(args) => run::placements(args),
        LabCommand::Suites(args) => run::suites(args),
        LabCommand::Run(args) => run::run(args),
        LabCommand::Plan(args) => plan::run(args),
        LabCommand::Report(args) => report::run(args),
        LabCommand::Compare(args) => compare::run(args),
        LabCommand::Export(args) => exchange::export(args),
        LabCommand::Import(args) => exchange::import(args),
        LabCommand::Guest(args) => guest::run(&args.command),
        LabCommand::Root(args) => release::root(args),
        LabCommand::Caretaker(args) => caretaker::run(args),
    }
}

/// The class of devices of that name.
fn class(name: &str) -> Result<Preset, Failure> {
    preset::find(name).ok_or_else(|| {
        let names: Vec<String> = preset::all().into_iter().map(|preset| preset.spec.name).collect();
        Failure::usage(format!("no class {name} of devices; there are {}", names.join(", ")))
    })
}

/// The results in a file.
fn results(path: &Path) -> Result<Results, Failure> {
    document::read(path).map_err(|error| match error {
        DocumentError::Read { path, source } => {
            Failure::failed(format!("cannot read {path}: {}", reason(&source)))
        }
        other => Failure::failed(other),
    })
}

/// A load in a few words.
fn load(job: &Job) -> String {
    let size = match job.block_bytes {
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes => format!("{}K", bytes >> 10),
    };
    let what = match job.pattern {
        Pattern::Read => "read",
        Pattern::Write => "write",
        Pattern::RandRead => "random read",
        Pattern::RandWrite => "random write",
        Pattern::RandMixed(_) => "random mix",
    };
    let sync = match job.sync {
        Sync::None => "",
        Sync::Flush => " + flush",
        Sync::Dsync => " dsync",
    };
    let writers = if job.jobs == 1 { String::new() } else { format!(" × {}", job.jobs) };
    format!("{size} {what}{sync} QD{}{writers}", job.depth)
}
