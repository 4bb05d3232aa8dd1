//! The command `tidepool`.

use std::process::ExitCode;
use tidepool_replica::Limits;

fn main() -> ExitCode {
    tidepool::run(Limits::SHIPPED)
}
