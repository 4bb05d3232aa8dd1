//! Changes of the ownership record that an open backend makes: one at a time, in the order of their
//! requests.

use crate::api::Peer;
use crate::record::Ownership;
use std::collections::VecDeque;
use tidepool_engine::api::IoError;

/// A change of the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// See [`crate::Transfer::Disown`].
    Disown,
    /// See [`crate::Backend::set_peer`].
    Peer(Option<Peer>),
}

/// The changes of one record. A change blocks, so the backend makes it on a thread of its own.
#[derive(Default)]
pub(crate) struct Changes {
    waiting: VecDeque<(u64, Change)>,
    /// Token of the change that is being made.
    running: Option<u64>,
    /// Outcomes that are not fetched yet.
    ended: Vec<(u64, Result<(), IoError>)>,
    /// The last change has failed: it may or may not have been made.
    unsure: bool,
}

impl Changes {
    pub(crate) fn order(&mut self, token: u64, change: Change) {
        self.waiting.push_back((token, change));
    }

    /// Completes a request with an error, without a change.
    pub(crate) fn refuse(&mut self, token: u64, error: IoError) {
        self.ended.push((token, Err(error)));
    }

    /// Completes all waiting requests with an error.
    pub(crate) fn refuse_all(&mut self, error: IoError) {
        self.ended.extend(self.waiting.drain(..).map(|(token, _)| (token, Err(error))));
    }

    /// The next change that has to be made. `record` is the record as last known: if it is
    /// superseded already, a request to disown completes at once.
    pub(crate) fn start(&mut self, record: &Ownership) -> Option<Change> {
        if self.running.is_some() {
            return None;
        }
        while let Some((token, change)) = self.waiting.pop_front() {
            if change == Change::Disown && record.superseded.is_some() {
                self.ended.push((token, Ok(())));
                continue;
            }
            self.running = Some(token);
            return Some(change);
        }
        None
    }

    /// Ends the change that was started. Without `begun` it was not attempted, and the record is as
    /// it was.
    pub(crate) fn finish(&mut self, result: Result<(), IoError>, begun: bool) {
        if begun {
            self.unsure = result.is_err();
        }
        self.ended.extend(self.running.take().map(|token| (token, result)));
    }

    /// Whether the record may differ from the one last known.
    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure
    }

    /// Whether a change is being made.
    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether there are outcomes to fetch.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Whether no request waits, no change is being made, and no outcome is left to fetch.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_none() && self.waiting.is_empty() && self.ended.is_empty()
    }

    pub(crate) fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        self.ended.drain(..).for_each(|(token, result)| done(token, result));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::OwnerState;
    use uuid::Uuid;

    #[test]
    fn changes_are_made_one_after_the_other_and_each_is_answered_once() {
        let mut record = Ownership::new(1, Uuid::from_bytes([3; 16]), OwnerState::Open);
        let mut changes = Changes::default();
        for (token, change) in [(1, Change::Disown), (2, Change::Disown), (3, Change::Peer(None))] {
            changes.order(token, change);
        }
        assert_eq!(changes.start(&record), Some(Change::Disown));
        assert_eq!(changes.start(&record), None, "one at a time");
        changes.finish(Err(IoError::Errno(libc::EIO)), true);
        assert!(changes.is_unsure() && !changes.is_running());
        assert_eq!(changes.start(&record), Some(Change::Disown), "the second one tries again");
        changes.finish(Ok(()), true);
        record = record.disowned();
        changes.order(4, Change::Disown);
        assert_eq!(changes.start(&record), Some(Change::Peer(None)));
        changes.finish(Err(IoError::Errno(libc::EAGAIN)), false);
        assert!(!changes.is_unsure());
        assert_eq!(changes.start(&record), None, "once is enough");
        changes.order(5, Change::Peer(None));
        changes.refuse_all(IoError::Fenced);
        let mut outcomes = Vec::new();
        changes.completions(&mut |token, result| outcomes.push((token, result.is_ok())));
        assert_eq!(outcomes, [(1, false), (2, true), (3, false), (4, true), (5, false)]);
        assert!(changes.is_idle());
    }
}
