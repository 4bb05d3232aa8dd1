//! What a run tells of itself: the trace of what its core does, the last events, and what went
//! wrong.

use crate::trace::Trace;
use std::collections::VecDeque;
use std::fmt::Write;
use tidepool_engine::Engine;
use tidepool_engine::api::Nanos;

/// Events that a failure shows.
const NOTES_MAX: usize = 400;

#[derive(Debug, Clone, Copy)]
struct Note {
    now: Nanos,
    what: &'static str,
    numbers: [u64; 3],
}

/// What a run tells.
pub(super) struct Journal {
    trace: Trace,
    notes: VecDeque<Note>,
    verbose: bool,
    failure: Option<String>,
}

impl Journal {
    pub(super) fn new(trace: Trace, verbose: bool) -> Journal {
        Journal { trace, notes: VecDeque::new(), verbose, failure: None }
    }

    pub(super) fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Something happens.
    pub(super) fn note(&mut self, now: Nanos, tick: u64, what: &'static str, numbers: [u64; 3]) {
        if self.notes.len() == NOTES_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back(Note { now, what, numbers });
        if self.verbose {
            let [a, b, c] = numbers;
            eprintln!("{:>14.6} ms {tick:>8}  {what} {a} {b} {c}", now as f64 / 1e6);
        }
    }

    /// Something goes wrong. What went wrong first counts.
    pub(super) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// The last events, a line for each.
    pub(super) fn told(&self) -> String {
        let mut text = String::new();
        for Note { now, what, numbers: [a, b, c] } in &self.notes {
            let _ = writeln!(text, "{:>14.6} ms  {what} {a} {b} {c}", *now as f64 / 1e6);
        }
        text
    }

    pub(super) fn begin_instant(&mut self, now: Nanos) {
        self.trace.begin_instant(now);
    }

    /// The core does something, or something else counts when lives are compared.
    pub(super) fn saw(&mut self, what: &(impl std::hash::Hash + std::fmt::Debug)) {
        self.trace.add(0, what);
    }

    /// An instant is over. One in which something went wrong is not whole.
    pub(super) fn end_instant(&mut self, now: Nanos, engine: Option<&Engine>) {
        if !self.has_failed() {
            self.trace.end_instant([(now, engine)].into_iter());
        }
    }

    /// The run is over.
    pub(super) fn end(&mut self, now: Nanos, engine: Option<&Engine>) {
        if !self.has_failed() {
            self.trace.end([(now, engine)].into_iter());
        }
    }

    /// What the core has done.
    pub(super) fn trace(&mut self) -> &mut Trace {
        &mut self.trace
    }
}
