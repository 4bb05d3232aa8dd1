//! `tidepool recover`: what to do with an image whose cache is lost.

use crate::audit::audited;
use crate::cli::RecoverArgs;
use crate::output;
use serde::Serialize;
use std::fmt::Write;
use tidepool_backend::{Loss, Recovered};
use tidepool_daemon::failure::{Failure, reason};
use tidepool_daemon::units::{Size, time};
use tidepool_daemon::volume::absolute_backend;

/// What was done.
#[derive(Debug, Serialize)]
struct Report {
    backend: String,
    /// More was done than to look.
    #[serde(skip)]
    accept_loss: bool,
    #[serde(flatten)]
    recovered: Recovered,
}

/// Runs the command.
pub fn run(args: &RecoverArgs) -> Result<(), Failure> {
    match args.accept_loss {
        true => audited(&["recover", &args.uri.to_string(), "--accept-loss"], || recover(args)),
        false => recover(args),
    }
}

fn recover(args: &RecoverArgs) -> Result<(), Failure> {
    let uri = absolute_backend(args.uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    let look_only = !args.accept_loss;
    let recovered = tidepool_backend::recover(&uri, None, look_only)
        .map_err(|e| Failure::failed(format!("cannot recover {uri}: {e}")))?;
    if look_only && recovered.given_up.is_some() {
        let cost = cost(&recovered);
        return Err(Failure::usage(format!(
            "recovering {uri} gives up what the cache that owns it has not drained ({cost}): say --accept-loss if that cache is lost"
        )));
    }
    let report = Report { backend: uri.to_string(), accept_loss: args.accept_loss, recovered };
    output::print(args.output.format, &report, text)
}

/// What the loss of the cache costs, in one line.
fn cost(recovered: &Recovered) -> String {
    if let Some(snapshot) = recovered.given_up.as_ref().and_then(|owner| owner.rollback.as_ref()) {
        return format!(
            "the image is half rolled back to snapshot {snapshot}: finish that with rbd object-map rebuild, then rbd snap rollback"
        );
    }
    match (&recovered.loss, recovered.exact) {
        (Some(loss), _) => loss_line(loss),
        (None, true) => "the image has been changed without it since".into(),
        (None, false) => {
            "its drain was unordered: the image is no state that the volume ever had".into()
        }
    }
}

fn loss_line(loss: &Loss) -> String {
    let size = |bytes| Size(bytes).approximate();
    let mut line = format!(
        "what was acknowledged after {}: at most {:.1} s",
        time(loss.since_unix_ms),
        loss.seconds
    );
    let _ = match loss.bytes {
        0 => write!(
            line,
            ", how much is not known (when it wrote its last note the image had everything)"
        ),
        bytes => write!(line, ", {} by its last note, and what came after that", size(bytes)),
    };
    if let Some(bytes_max) = loss.bytes_max {
        let _ = write!(line, " and never more than {} of data", size(bytes_max));
    }
    line
}

fn text(report: &Report) -> String {
    let (image, recovered) = (&report.backend, &report.recovered);
    let Some(owner) = &recovered.given_up else {
        let guard = if report.accept_loss { ", and nothing of a guard is left on it" } else { "" };
        return format!(
            "{image}: nothing to give up: no cache is known to hold newer data of it{guard}"
        );
    };
    let mut text =
        format!("{image}: free; cache {} on host {} is given up\n", owner.cache_uuid, owner.host);
    if recovered.loss.is_some() {
        let (groups, size) = (recovered.groups, Size(recovered.bytes).approximate());
        let _ = writeln!(
            text,
            "the image is one exact state of the volume ({groups} groups, {size}, were brought into it)"
        );
    }
    let _ = write!(text, "lost: {}", cost(recovered));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_not_called_nothing() {
        let mut loss = Loss { since_unix_ms: 0, seconds: 2.5, bytes: 0, bytes_max: Some(1 << 30) };
        let line = loss_line(&loss);
        assert!(line.contains("at most 2.5 s, how much is not known"), "{line}");
        assert!(
            !line.contains("nothing") && line.ends_with("never more than 1GiB of data"),
            "{line}"
        );
        loss.bytes = 4096;
        assert!(loss_line(&loss).contains("4KiB by its last note, and what came after"), "{line}");
    }
}
