//! Whether other clients have written to an image since its cache had it last.

use super::{OwnerState, Ownership};
use crate::api::OpenOptions;
use crate::error::BackendError;
use uuid::Uuid;

/// What is known about writes of other clients since this cache had the image last.
#[derive(Debug, Clone)]
pub(crate) struct Continuity {
    /// No other client has written.
    pub(crate) proven: bool,
    /// Another client has written, or the image was given to other clients.
    pub(crate) overwritten: bool,
    /// The reason, for the log.
    pub(crate) reason: String,
}

impl Continuity {
    pub(crate) fn unproven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: false, overwritten: false, reason: reason.into() }
    }

    pub(crate) fn proven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: true, overwritten: false, reason: reason.into() }
    }

    /// Refuses an image if the cache has dirty data that must not be drained to it.
    pub(crate) fn check_dirty(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        if options.dirty && self.overwritten {
            return Err(BackendError::Overwritten { what: what.into(), why: self.reason.clone() });
        }
        Ok(())
    }

    /// The proof is valid only for content that the cache has brought to the record's generation.
    /// If the cache does not know a generation in which the image was released clean, the image had
    /// another use in between: whatever dirty data the cache holds is older.
    pub(crate) fn of_generation(
        self,
        record: Option<&Ownership>,
        options: &OpenOptions,
    ) -> Continuity {
        let later = |record: &&Ownership| {
            record.state == OwnerState::Clean
                && options.generation.is_some_and(|known| known < record.generation)
        };
        if let Some(record) = record.filter(later).filter(|_| !self.overwritten) {
            let reason = format!(
                "the image was used and released since, as generation {}",
                record.generation
            );
            return Continuity::overwritten(reason);
        }
        let known_later =
            |(known, record): &(u64, &Ownership)| *known > record.generation && !self.overwritten;
        if let Some((known, record)) = options.generation.zip(record).filter(known_later) {
            let reason = format!(
                "the cache has had the image as generation {known}, and its record says {}: somebody has put back an older state",
                record.generation
            );
            return Continuity::overwritten(reason);
        }
        // After a takeover, the peer knows the generation before it.
        let is_of = |(known, record): (u64, &Ownership)| {
            known == record.generation || record.taken_from.is_some() && record.base == Some(known)
        };
        let known = options.generation.zip(record).is_none_or(is_of);
        if known || !self.proven {
            return self;
        }
        Continuity::unproven("an earlier attempt to open the image was cut short")
    }

    /// What the record alone says; `None` when the image has to be examined.
    pub(crate) fn of_record(record: Option<&Ownership>, cache_uuid: Uuid) -> Option<Continuity> {
        let Some(record) = record else {
            return Some(Continuity::overwritten("the image has no ownership record"));
        };
        if record.cache_uuid.is_nil() {
            return Some(Continuity::overwritten("what a cache held for it was given up"));
        }
        if record.cache_uuid != cache_uuid {
            let reason = format!("cache {} had the image last", record.cache_uuid);
            return Some(Continuity::overwritten(reason));
        }
        record.superseded.as_deref().map(Continuity::overwritten)
    }

    /// The consequence for the cached data, as a step of a plan.
    pub(crate) fn plan(&self) -> String {
        match (self.proven, self.overwritten) {
            (true, _) => format!("keep clean cached data: {}", self.reason),
            (false, true) => {
                format!("drop clean cached data, and refuse if any is dirty: {}", self.reason)
            }
            (false, false) => format!("drop clean cached data: {}", self.reason),
        }
    }

    pub(crate) fn overwritten(reason: impl Into<String>) -> Continuity {
        Continuity { proven: false, overwritten: true, reason: reason.into() }
    }
}
