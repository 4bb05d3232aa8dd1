//! A dry run: what stands in the way of serving an image, and what would be done. Changes nothing.

use crate::backend::OpenOptions;
use crate::error::BackendError;
use crate::uri::BackendUri;
use crate::{file, nbd, rbd};
use serde::Serialize;

/// How one item of a check came out; the order is the order of gravity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// Works, but somebody should know.
    Warning,
    /// Not looked at, because something before it failed or does not apply.
    Skipped,
    /// Stands in the way.
    Failed,
}

/// One item of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckItem {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: CheckStatus,
    /// What was found; for a failure also what to do. One line.
    pub detail: String,
}

/// The outcome of [`check`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// What was checked.
    pub uri: String,
    /// Nothing stands in the way.
    pub usable: bool,
    /// One line for each thing that was looked at.
    pub items: Vec<CheckItem>,
    /// What an open would do now, step by step; empty when it would be refused.
    pub would: Vec<String>,
}

impl CheckReport {
    pub(crate) fn new(uri: &BackendUri) -> CheckReport {
        CheckReport { uri: uri.to_string(), usable: true, items: Vec::new(), would: Vec::new() }
    }

    pub(crate) fn ok(&mut self, name: &'static str, detail: impl Into<String>) {
        self.items.push(CheckItem { name, status: CheckStatus::Ok, detail: detail.into() });
    }

    pub(crate) fn warn(&mut self, name: &'static str, detail: impl Into<String>) {
        self.items.push(CheckItem { name, status: CheckStatus::Warning, detail: detail.into() });
    }

    pub(crate) fn skip(&mut self, names: &[&'static str], why: &str) {
        let skipped =
            |name: &&'static str| CheckItem { name, status: CheckStatus::Skipped, detail: why.into() };
        self.items.extend(names.iter().map(skipped));
    }

    /// Notes the outcome of a step and passes on what it found.
    pub(crate) fn step<T>(
        &mut self,
        name: &'static str,
        outcome: Result<T, BackendError>,
        detail: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        match outcome {
            Ok(found) => {
                self.ok(name, detail(&found));
                Some(found)
            }
            Err(e) => {
                self.usable = false;
                self.items.push(CheckItem { name, status: CheckStatus::Failed, detail: e.to_string() });
                None
            }
        }
    }

    /// Drops the plan of an open that would be refused.
    fn finish(mut self) -> CheckReport {
        if !self.usable {
            self.would.clear();
        }
        self
    }
}

/// Looks at everything that [`crate::open`] would look at, and tells what it would do. Blocks.
pub fn check(uri: &BackendUri, options: &OpenOptions) -> CheckReport {
    let mut report = CheckReport::new(uri);
    match uri {
        BackendUri::File { path, emulate, gate } => {
            file::check(path, options, &mut report);
            if emulate.is_some() {
                report
                    .warn("latency", "emulated: the file plays a replicated pool and survives no power loss");
            }
            if let Some(gate) = gate {
                report.warn("gate", format!("stopped while {} exists; a facility for tests", gate.display()));
            }
        }
        BackendUri::Rbd { .. } => rbd::check(uri, options, &mut report),
        BackendUri::Nbd(uri) => nbd::check(uri, options, &mut report),
    }
    report.finish()
}
