//! `tidepool recover`: what to do with an image whose cache is lost.

use crate::cli::RecoverArgs;
use crate::output;
use serde::Serialize;
use tidepool_backend::Ownership;
use tidepool_daemon::failure::{Failure, reason};
use tidepool_daemon::volume::absolute_backend;

/// What was done.
#[derive(Debug, Serialize)]
struct Recovered {
    backend: String,
    /// The ownership that was given up; none if the image held everything.
    given_up: Option<Ownership>,
}

/// Runs the command.
pub fn run(args: &RecoverArgs) -> Result<(), Failure> {
    let uri = absolute_backend(args.uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    if !args.accept_loss {
        return Err(Failure::usage(format!(
            "recovering {uri} gives up what the cache that owns it has not drained (`tidepool check {uri}` says which it is): say --accept-loss if that cache is lost"
        )));
    }
    let given_up = tidepool_backend::abandon(&uri, None)
        .map_err(|e| Failure::failed(format!("cannot recover {uri}: {e}")))?;
    output::print(args.output.format, &Recovered { backend: uri.to_string(), given_up }, text)
}

fn text(recovered: &Recovered) -> String {
    let image = &recovered.backend;
    match &recovered.given_up {
        None => format!("{image}: nothing to give up, the image holds everything"),
        Some(owner) => format!(
            "{image}: what cache {} on host {} had not drained is given up; the image is free as it is",
            owner.cache_uuid, owner.host
        ),
    }
}
