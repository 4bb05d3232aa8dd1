//! Who has given a command that runs without the daemon.

use tidepool_daemon::audit;
use tidepool_daemon::failure::Failure;

/// Does what the command is for, and writes down before and afterwards that it was given: so it is
/// known, too, who has given one that is ended in the middle.
pub fn audited(words: &[&str], work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let command = audit::command(words.iter().copied());
    record(&command, "begun");
    let done = work();
    match &done {
        Ok(()) => record(&command, "done"),
        Err(failure) => record(&command, &format!("refused: {failure}")),
    }
    done
}

/// A file that cannot be written fails no command.
fn record(command: &str, result: &str) {
    if let Err(why) = audit::record(command, result) {
        eprintln!("tidepool: note: {why}");
    }
}
