//! How far the drain of one volume is.

/// Sequences of records of one volume, as far as the backend is concerned.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    drained: u64,
    /// `drained` as long as nothing was lost; it stands still while something is.
    whole: u64,
    sent: u64,
}

impl Progress {
    /// The backend has what every record up to this one has left, apart from what is lost.
    pub(crate) fn drained(&self) -> u64 {
        self.drained
    }

    /// The same, as it was before anything was lost.
    pub(crate) fn whole(&self) -> u64 {
        self.whole
    }

    /// The backend may have been sent something of every record up to this one.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// The backend has everything up to `sequence`, of a log that has taken effect up to `published`. While something is `lost`, that is
    /// not the whole of it.
    pub(crate) fn note_drained(&mut self, sequence: u64, published: u64, lost: bool) {
        assert!(sequence <= published, "record {sequence} is drained before it takes effect");
        self.drained = self.drained.max(sequence);
        if !lost {
            self.whole = self.drained;
        }
    }

    /// Something of a record may be on its way to the backend.
    pub(crate) fn note_sent(&mut self, sequence: u64) {
        self.sent = self.sent.max(sequence);
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
