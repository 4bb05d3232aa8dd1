//! A dry run of opening an image: what prevents it, and what it would do. Changes nothing.

use crate::backend::OpenOptions;
use crate::error::BackendError;
use crate::file::Seen;
use crate::uri::BackendUri;
use crate::{file, nbd, rbd};
use serde::Serialize;

/// Outcome of one item of a check. The order of the variants is the order of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// Works, but an operator should know about it.
    Warning,
    /// Not checked, because an item before it failed.
    Skipped,
    /// Prevents the image from being opened.
    Failed,
}

/// One item of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckItem {
    /// Name of what was checked.
    pub name: &'static str,
    /// Its outcome.
    pub status: CheckStatus,
    /// What was found; for a failure also what to do. One line.
    pub detail: String,
}

/// The outcome of [`check`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// URI of the image that was checked.
    pub uri: String,
    /// No item has failed.
    pub usable: bool,
    /// The items, in the order in which they were checked.
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

    /// Adds the outcome of a step to the report, and returns what the step found; `None` when it
    /// failed.
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

    /// Adds what was seen of the lock; `free` says that nobody holds it.
    pub(crate) fn lock(&mut self, outcome: Result<Seen, BackendError>, free: &str) {
        match outcome {
            Ok(Seen::Nothing(why)) => self.warn("lock", why),
            seen => drop(self.step("lock", seen, |_| free.into())),
        }
    }

    /// Removes the plan if the open would be refused.
    fn finish(mut self) -> CheckReport {
        if !self.usable {
            self.would.clear();
        }
        self
    }
}

/// Checks the image, its lock and its record as [`crate::open`] does with these options, and says
/// what an open would do. What the options do not tell of the cache is not compared with the image
/// and its redo. Blocks.
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
