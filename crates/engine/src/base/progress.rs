//! How far the drain of one volume is, and what may be acknowledged ahead of it.

use crate::api::BLOCK_BYTES;

/// Sequences of records of one volume, as far as the backend is concerned.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    drained: u64,
    /// `drained` as long as nothing was lost; it stands still while something is.
    whole: u64,
    sent: u64,
    /// `None` where the drain is unordered.
    committed: Option<u64>,
    wanted: u64,
}

impl Progress {
    /// The backend has what every record up to this one has left, apart from what is lost.
    pub(crate) fn drained(&self) -> u64 {
        self.drained
    }

    /// [`Progress::drained`] as it was before anything was lost.
    pub(crate) fn whole(&self) -> u64 {
        self.whole
    }

    /// The backend may have been sent something of every record up to this one.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Where the drain is grouped: everything up to this record is in the image or its redo.
    pub(crate) fn committed(&self) -> Option<u64> {
        self.committed
    }

    /// The drain goes by groups.
    pub(crate) fn is_grouped(&self) -> bool {
        self.committed.is_some()
    }

    /// Up to this record a loss of the cache costs nothing.
    pub(crate) fn safe(&self) -> u64 {
        self.committed.unwrap_or(0).max(self.drained)
    }

    /// What records up to this one have left may go to the image.
    pub(crate) fn drainable(&self) -> u64 {
        self.committed.unwrap_or(u64::MAX)
    }

    /// The drain is in a hurry until everything up to this record is drained.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted
    }

    /// Everything up to `sequence` is to be drained soon.
    pub(crate) fn want(&mut self, sequence: u64) {
        self.wanted = self.wanted.max(sequence);
    }

    /// Everything up to `sequence` is to be drained soon, and nothing more.
    pub(crate) fn want_only(&mut self, sequence: u64) {
        self.wanted = sequence;
    }

    /// The backend has everything up to `sequence`, of a log that has taken effect up to
    /// `published`. While something is `lost`, that is not the whole of it.
    pub(crate) fn advance_drained(&mut self, sequence: u64, published: u64, lost: bool) {
        assert!(sequence <= published, "record {sequence} is drained before it takes effect");
        self.drained = self.drained.max(sequence);
        if !lost {
            self.whole = self.drained;
        }
    }

    /// Something of a record may be on its way to the backend.
    pub(crate) fn advance_sent(&mut self, sequence: u64) {
        self.sent = self.sent.max(sequence);
    }

    /// Everything up to `sequence` is in the image or its redo.
    pub(crate) fn advance_committed(&mut self, sequence: u64) {
        self.committed = Some(sequence);
    }

    /// A group that ends with `sequence` is not committed, even if one was that ended with it:
    /// nothing came into the log since.
    pub(crate) fn uncommit(&mut self, sequence: u64) {
        self.committed = self.committed.map(|committed| committed.min(sequence.saturating_sub(1)));
    }

    /// The drain does not go by groups any more.
    pub(crate) fn end_groups(&mut self) {
        self.committed = None;
    }

    /// The log begins anew behind `sequence`, or goes on there after a start.
    pub(crate) fn restore_sent(&mut self, sequence: u64) {
        self.sent = sequence;
    }

    /// What is known of the backend, from before a start or from another host.
    pub(crate) fn restore_drained(&mut self, sequence: u64) {
        self.drained = sequence;
    }
}

/// What was acknowledged in write-back and is still to be drained after the mode has changed: until
/// then a part of what is drained may be acknowledged ahead of the drain.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backlog {
    sequence: u64,
    credit_bytes: u64,
}

impl Backlog {
    /// The record up to which the backlog reaches.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// It reaches up to `sequence`.
    pub(crate) fn begin(&mut self, sequence: u64) {
        (self.sequence, self.credit_bytes) = (sequence, 0);
    }

    /// It reaches up to `sequence`; what may be acknowledged ahead may be still.
    pub(crate) fn extend(&mut self, sequence: u64) {
        self.sequence = sequence;
    }

    /// So many blocks were drained, and everything up to `safe` is safe.
    pub(crate) fn note_drained(&mut self, blocks: u64, safe: u64) {
        if safe < self.sequence {
            self.credit_bytes += blocks * BLOCK_BYTES as u64 / 2;
        }
    }

    /// Everything up to `safe` is safe.
    pub(crate) fn note_safe(&mut self, safe: u64) {
        if safe >= self.sequence {
            self.credit_bytes = 0;
        }
    }

    /// Takes so many bytes of what may be acknowledged ahead of the drain; false if there are
    /// fewer.
    pub(crate) fn take_credit(&mut self, bytes: u64) -> bool {
        let has = self.credit_bytes >= bytes;
        if has {
            self.credit_bytes -= bytes;
        }
        has
    }
}
