//! The backend of one volume, as far as the core knows it: whether it works, and which direct
//! writes are on its stable media.

pub(crate) mod rate;

use crate::api::{IoError, Nanos};
use crate::backend::rate::DrainRate;

/// Pause before a backend that failed is tried again.
const RETRY_NS: Nanos = 500_000_000;

/// A volume's backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backend {
    /// What its last operation failed with.
    error: Option<IoError>,
    /// Nothing is sent before.
    retry_at: Nanos,
    /// Direct writes that have completed, and how many of them a completed flush covers. The first
    /// stands for those before an attachment.
    written: u64,
    flushed: u64,
    /// A flush has failed that no client had asked for: direct writes may be lost, and the next
    /// flush of a client says so.
    lost: bool,
    /// A flush is to be sent although no drain waits for it.
    flush_wanted: bool,
    /// A flush is in flight that no client has asked for.
    flushing: bool,
    /// The image's record no longer names this cache.
    disowned: bool,
    disowning: bool,
    rate: DrainRate,
}

impl Backend {
    /// How fast the drain has been.
    pub(crate) fn rate(&self) -> &DrainRate {
        &self.rate
    }

    /// The drain, which had nothing in flight, goes on.
    pub(crate) fn begin_drain(&mut self, now: Nanos) {
        self.rate.begin(now);
    }

    /// The drain has moved something.
    pub(crate) fn note_drained(&mut self, now: Nanos, bytes: u64) {
        self.rate.note(now, bytes);
    }

    pub(crate) fn new() -> Backend {
        Backend {
            error: None,
            retry_at: 0,
            written: 1,
            flushed: 1,
            lost: false,
            flush_wanted: false,
            flushing: false,
            disowned: false,
            disowning: false,
            rate: DrainRate::default(),
        }
    }

    /// It is attached: writes that went past the cache before a restart may still stand in its
    /// write cache.
    pub(crate) fn attach(&mut self) {
        (self.flushed, self.flush_wanted) = (0, true);
    }

    /// What its last operation failed with.
    pub(crate) fn error(&self) -> Option<IoError> {
        self.error
    }

    /// Something may be sent now: it has not failed just now.
    pub(crate) fn may_send(&self, now: Nanos) -> bool {
        self.retry_at <= now
    }

    /// When something may be sent.
    pub(crate) fn retry_at(&self) -> Nanos {
        self.retry_at
    }

    /// An operation has completed.
    pub(crate) fn note_result(&mut self, now: Nanos, result: Result<(), IoError>) {
        self.error = result.err();
        if result.is_err() {
            self.retry_at = now + RETRY_NS;
        }
    }

    /// A direct write has completed.
    pub(crate) fn note_written(&mut self) {
        self.written += 1;
    }

    /// Direct writes are not known to be on stable media.
    pub(crate) fn is_dirty(&self) -> bool {
        self.flushed < self.written
    }

    /// What a flush covers that is sent now.
    pub(crate) fn covers(&self) -> u64 {
        self.written
    }

    /// A flush that covers so much has completed.
    pub(crate) fn note_flushed(&mut self, covers: u64) {
        self.flushed = self.flushed.max(covers);
    }

    /// A flush has failed. Writes from before an attachment are in the log, where the volume is
    /// `logged`.
    pub(crate) fn note_flush_failed(&mut self, logged: bool) {
        let direct = self.written > 1 || !logged;
        self.lost |= direct && self.is_dirty();
    }

    /// Direct writes may be lost, which no client has been told of.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost
    }

    /// The same; a client is told now.
    pub(crate) fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// A flush is to be sent although no drain waits for it.
    pub(crate) fn wants_flush(&self) -> bool {
        self.flush_wanted
    }

    /// Has a flush sent although no drain waits for it.
    pub(crate) fn want_flush(&mut self) {
        self.flush_wanted = true;
    }

    /// A flush is in flight that no client has asked for.
    pub(crate) fn is_flushing(&self) -> bool {
        self.flushing
    }

    /// Sends a flush that no client has asked for; tells what it covers.
    pub(crate) fn begin_flush(&mut self) -> u64 {
        (self.flushing, self.flush_wanted) = (true, false);
        self.covers()
    }

    /// That flush has completed, or failed. See [`Backend::note_flush_failed`].
    pub(crate) fn end_flush(&mut self, covers: u64, ok: bool, logged: bool) {
        self.flushing = false;
        if ok {
            self.note_flushed(covers);
        } else {
            self.flush_wanted = self.is_dirty();
            self.note_flush_failed(logged);
        }
    }

    /// The image's record no longer names this cache.
    pub(crate) fn is_disowned(&self) -> bool {
        self.disowned
    }

    /// The record is being changed so that it no longer names this cache.
    pub(crate) fn is_disowning(&self) -> bool {
        self.disowning
    }

    pub(crate) fn begin_disown(&mut self) {
        self.disowning = true;
    }

    pub(crate) fn end_disown(&mut self, ok: bool) {
        (self.disowning, self.disowned) = (false, ok);
    }
}
