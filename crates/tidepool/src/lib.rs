//! The command `tidepool`, as a library: the program is [`run`] with the limits of a release.

mod audit;
mod cache;
mod check;
mod cli;
mod confirm;
mod demo;
mod export;
mod lab;
mod log;
mod output;
mod recover;
mod serve;
mod snap;
mod status;
mod volume;

use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;
use tidepool_daemon::failure::Failure;
use tidepool_replica::Limits;

/// Runs the command with the arguments of this process. `limits` says how long a daemon waits for
/// other hosts.
pub fn run(limits: Limits) -> ExitCode {
    tidepool_daemon::failure::limits_are_errors();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(cli::report(&error)),
    };
    let outcome = match cli.command {
        Command::Serve(args) => {
            let status = match serve::run(*args, limits) {
                Ok(()) => {
                    log::end();
                    0
                }
                Err(failure) => {
                    log::last_words(&format!("tidepool: {failure}"));
                    failure.exit_status()
                }
            };
            tidepool_daemon::service::end_at_once(i32::from(status));
        }
        Command::Status(args) => ask(status::run(args)),
        Command::Check(args) => check::run(&args),
        Command::Volume(args) => ask(volume::run(args.command)),
        Command::Cache(args) => cache::run(args.command),
        Command::Recover(args) => recover::run(&args),
        Command::Confirm(args) => confirm::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Lab(args) => lab::run(&args.command),
    };
    ExitCode::from(tell(outcome))
}

/// Tells the user what failed; returns the exit status.
fn tell(outcome: Result<(), Failure>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("tidepool: {failure}");
            failure.exit_status()
        }
    }
}

/// Runs a command that talks to the daemon.
fn ask(command: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::failed(format!("cannot start: {e}")))?;
    runtime.block_on(command)
}
