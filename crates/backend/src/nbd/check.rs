//! The dry run of opening an export.

use super::owner;
use super::place::{Place, Terms};
use crate::api::OpenOptions;
use crate::report::{self, CheckReport};
use tidepool_nbd::NbdUri;

/// Checks the export, its lock and its ownership record, and adds to the report what was found.
pub(crate) fn check(uri: &NbdUri, options: &OpenOptions, report: &mut CheckReport) {
    let place = Place::new(uri);
    let agreed = place.connect().and_then(|(_, negotiated)| {
        let terms = Terms::of(&place, &negotiated)?;
        terms.check_writable(&place, options)?;
        Ok(terms)
    });
    let Some(terms) = report.step("export", agreed, describe) else {
        report.skip(&["lock", "ownership"], "the export cannot be opened");
        return;
    };
    if !options.read_only {
        features(&terms, report);
    }
    let sidecar = owner::sidecar(uri, options.state_dir.as_deref());
    report.lock(sidecar.check_lock(&place.what, options.read_only), "free on this host");
    let read = sidecar.read().and_then(|record| {
        let continuity = owner::check(&place.what, record.as_ref(), options)?;
        if !options.read_only {
            sidecar.check_writable()?;
        }
        Ok((record, continuity))
    });
    let found = report.step("ownership", read, |(record, _)| report::describe(record.as_ref()));
    let Some((record, continuity)) = found else { return };
    if options.read_only {
        report.would.push("lock the export on this host, shared, and only read it".into());
        return;
    }
    let generation = record.as_ref().map_or(1, |record| record.generation.saturating_add(1));
    report.would.push("lock the export on this host; the server keeps no other client away".into());
    report.would.push(format!("write generation {generation} to {}", sidecar.path().display()));
    report.would.push(continuity.plan());
}

fn describe(terms: &Terms) -> String {
    let Terms { size_bytes, piece_bytes_max, read_only, .. } = terms;
    let access = if *read_only { ", read-only" } else { "" };
    format!("{size_bytes} bytes, at most {piece_bytes_max} in one request{access}")
}

/// Reports which features the server lacks, and what follows from that.
fn features(terms: &Terms, report: &mut CheckReport) {
    match terms.flush {
        true => report.ok("flush", "offered"),
        false => {
            report.warn("flush", "not offered: what the server has answered counts as durable")
        }
    }
    match terms.zeroes {
        true => report.ok("zeroes", "offered"),
        false => report
            .warn("zeroes", "not offered: discards are written as zeroes and give no space back"),
    }
}
