//! The report of a dry run of opening an image: what prevents the open, and what it would do.

use crate::error::BackendError;
use crate::record::{OwnerState, Ownership};
use crate::uri::BackendUri;
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

/// The outcome of [`crate::check`].
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

/// What a check sees of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Nobody holds it.
    Free,
    /// It is not known whether somebody holds it, and why.
    Nothing(String),
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
        let skipped = |name: &&'static str| CheckItem {
            name,
            status: CheckStatus::Skipped,
            detail: why.into(),
        };
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
                self.items.push(CheckItem {
                    name,
                    status: CheckStatus::Failed,
                    detail: e.to_string(),
                });
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
    pub(crate) fn finish(mut self) -> CheckReport {
        if !self.usable {
            self.would.clear();
        }
        self
    }
}

/// The record in one line.
pub(crate) fn describe(record: Option<&Ownership>) -> String {
    match record {
        None => "never owned by a cache".into(),
        Some(record) => {
            let state = match record.state {
                OwnerState::Clean => "released, everything is in the image",
                OwnerState::Dirty => "stopped with dirty data",
                OwnerState::Open => "open, or killed while it was",
            };
            let copy = record.peer.as_ref().map(|peer| {
                format!("; the other copy is in cache {} on host {}", peer.cache_uuid, peer.host)
            });
            let taken = record
                .taken_from
                .as_ref()
                .map(|host| format!("; just taken over from host {host}"));
            format!(
                "generation {}, cache {} on host {}: {state}{}",
                record.generation,
                record.cache_uuid,
                record.host,
                copy.or(taken).unwrap_or_default()
            )
        }
    }
}
