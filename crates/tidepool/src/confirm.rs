//! `tidepool confirm`: which record is that of an image, where nothing tells.

use crate::audit::audited;
use crate::cli::ConfirmArgs;
use crate::output;
use serde::Serialize;
use tidepool_backend::Ownership;
use tidepool_daemon::failure::{Failure, reason};
use tidepool_daemon::volume::absolute_backend;

/// What was written down.
#[derive(Debug, Serialize)]
struct Report {
    backend: String,
    record: Ownership,
}

/// Runs the command.
pub fn run(args: &ConfirmArgs) -> Result<(), Failure> {
    let (uri, record) =
        (args.uri.to_string(), args.record.as_ref().map(|path| path.to_string_lossy()));
    let mut words = vec!["confirm", &uri];
    words.extend(record.iter().flat_map(|record| ["--record", record]));
    audited(&words, || confirm(args))
}

fn confirm(args: &ConfirmArgs) -> Result<(), Failure> {
    let uri = absolute_backend(args.uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    let record = tidepool_backend::confirm(&uri, None, args.record.as_deref())
        .map_err(|e| Failure::failed(format!("cannot confirm {uri}: {e}")))?;
    output::print(args.output.format, &Report { backend: uri.to_string(), record }, text)
}

fn text(report: &Report) -> String {
    let Report { backend, record } = report;
    format!(
        "{backend} is the image of generation {} of cache {} on host {}; its volume is served again there",
        record.generation, record.cache_uuid, record.host
    )
}
