//! `tidepool lab guest`: for the lab itself, not for people.

use crate::cli::lab::GuestCommand;
use tidepool_cluster::guest::{self, Boot, Exec};
use tidepool_daemon::failure::Failure;

/// Runs the command. A command in a guest ends this process with its own exit status.
pub fn run(command: &GuestCommand) -> Result<(), Failure> {
    match command {
        GuestCommand::Init { address, modules } => {
            let boot = Boot { address: *address, modules: modules.clone() };
            guest::init(&boot).map(|never| match never {}).map_err(Failure::failed)
        }
        GuestCommand::Exec { address, share, socket_here, socket_there, words } => {
            let command = Exec {
                address: *address,
                share: share.clone(),
                socket: socket_here.clone().zip(socket_there.clone()),
                words: words.clone(),
            };
            let status = guest::exec(&command).map_err(Failure::failed)?;
            std::process::exit(status)
        }
    }
}
