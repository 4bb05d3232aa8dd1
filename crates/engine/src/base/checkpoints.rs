//! What rooms know of checkpoints, and what they ask of them.

/// Which checkpoint is durable, which one comes next, and why there should be one.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    durable: u64,
    next: u64,
    wanted: bool,
    is_held_up: bool,
    drained: bool,
    appended_bytes: u64,
}

impl Checkpoints {
    /// `durable`: number of the newest durable checkpoint.
    pub(crate) fn new(durable: u64) -> Checkpoints {
        let next = durable + 1;
        Checkpoints {
            durable,
            next,
            wanted: false,
            is_held_up: false,
            drained: false,
            appended_bytes: 0,
        }
    }

    /// Number of the newest durable checkpoint.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// Number of the first checkpoint that will hold what changes now.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// A checkpoint is to be taken as soon as possible.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// Somebody wants one as soon as possible.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// A volume has nothing dirty any more, which the newest checkpoint does not know.
    pub(crate) fn note_drained(&mut self) {
        self.drained = true;
    }

    /// Some volume has nothing dirty any more, which the newest checkpoint does not know.
    pub(crate) fn has_drained(&self) -> bool {
        self.drained
    }

    /// So many bytes more are in the log.
    pub(crate) fn note_appended(&mut self, bytes: u64) {
        self.appended_bytes += bytes;
    }

    /// Bytes that were appended since the newest checkpoint began.
    pub(crate) fn appended_bytes(&self) -> u64 {
        self.appended_bytes
    }

    /// A checkpoint is due and waits for summaries: no other segment is to be closed before it.
    pub(crate) fn is_held_up(&self) -> bool {
        self.is_held_up
    }

    /// See [`Checkpoints::is_held_up`].
    pub(crate) fn set_held_up(&mut self, is_held_up: bool) {
        self.is_held_up = is_held_up;
    }

    /// The checkpoint `number` begins: it holds everything that has changed until now.
    pub(crate) fn begin(&mut self, number: u64) {
        (self.wanted, self.drained, self.appended_bytes) = (false, false, 0);
        self.next = number + 1;
    }

    /// The checkpoint `number` is durable.
    pub(crate) fn complete(&mut self, number: u64) {
        (self.durable, self.next) = (number, number + 1);
    }

    /// There will be no other one: the device has failed.
    pub(crate) fn abandon(&mut self) {
        (self.drained, self.appended_bytes) = (false, 0);
        self.next = self.durable + 1;
    }
}
