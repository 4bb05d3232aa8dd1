//! `tidepool check`.

use crate::cli::CheckArgs;
use tidepool_daemon::failure::Failure;

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let _ = (&args.uri, args.output.format);
    Err(Failure::failed("check is not built yet"))
}
