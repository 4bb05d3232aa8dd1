//! How far the log of one volume is.

/// Sequences of records of one volume, each no larger than the one before: built, published,
/// durable.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sequences {
    built: u64,
    published: u64,
    durable: u64,
    /// What `durable` becomes when the sync in flight completes.
    syncing: u64,
    chain: u32,
    chain_published: u32,
}

impl Sequences {
    /// Newest record that has been built. It may still be on its way to the device.
    pub(crate) fn built(&self) -> u64 {
        self.built
    }

    /// Newest record that has taken effect.
    pub(crate) fn published(&self) -> u64 {
        self.published
    }

    /// Newest record that is known to be on stable media, with all before it.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// Header CRC of the newest record that has been built.
    pub(crate) fn chain(&self) -> u32 {
        self.chain
    }

    /// Header CRC of the newest record that has taken effect.
    pub(crate) fn chain_published(&self) -> u32 {
        self.chain_published
    }

    /// A record has been built, whose header has the CRC `chain`.
    pub(crate) fn advance_built(&mut self, sequence: u64, chain: u32) {
        assert!(sequence > self.built, "record {sequence} is built after {}", self.built);
        (self.built, self.chain) = (sequence, chain);
    }

    /// A record takes effect, whose header has the CRC `chain`.
    pub(crate) fn advance_published(&mut self, sequence: u64, chain: u32) {
        assert!(sequence <= self.built, "record {sequence} takes effect before it is built");
        (self.published, self.chain_published) = (sequence, chain);
    }

    /// A sync of the device begins, which covers what is published.
    pub(crate) fn begin_sync(&mut self) {
        self.syncing = self.published;
    }

    /// The sync has completed.
    pub(crate) fn end_sync(&mut self) {
        self.advance_durable(self.syncing);
    }

    /// Everything up to `sequence` is on stable media.
    pub(crate) fn advance_durable(&mut self, sequence: u64) {
        assert!(sequence <= self.published, "record {sequence} is durable before it takes effect");
        self.durable = self.durable.max(sequence);
    }

    /// What has not taken effect never will: the device has failed.
    pub(crate) fn abandon(&mut self) {
        self.built = self.published;
    }

    /// Replay has had a record take effect.
    pub(crate) fn replay(&mut self, sequence: u64) {
        (self.built, self.published) = (sequence, sequence);
    }

    /// Everything up to `sequence`, whose record's header has the CRC `chain`, is known and
    /// durable.
    pub(crate) fn restore(&mut self, sequence: u64, chain: u32) {
        *self = Sequences {
            built: sequence,
            published: sequence,
            durable: sequence,
            syncing: sequence,
            chain,
            chain_published: chain,
        };
    }
}
