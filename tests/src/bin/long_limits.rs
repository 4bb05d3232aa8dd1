//! The command `tidepool` whose daemon waits ten times as long for other hosts: for tests of two
//! hosts that are not about these limits, on a machine that may be busy.

use std::process::ExitCode;
use tidepool_replica::Limits;

/// How much longer than a release it waits.
const TIMES: u64 = 10;

fn main() -> ExitCode {
    tidepool::run(Limits::SHIPPED.times(TIMES))
}
