//! The peer's side: what it takes, what it promises, and when it may take over.

use crate::api::{Copy, Party, Record, Tail};

/// Why a peer does not do as it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rejected {
    /// It has promised to listen to a later owner only.
    Promised(u64),
    /// What comes is not the next record of its copy.
    Gap,
    /// The record does not name it, on this boot and with its generation, as the holder of the
    /// other copy.
    NotInSync,
}

/// A peer with what it has on stable media; what is in its log and not stable is the business of
/// its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    me: Party,
    promise: u64,
    copy: Option<Copy>,
}

impl Peer {
    /// A peer with the copy that it has found in its log, which takes nothing of an owner before
    /// the one in `record`.
    ///
    /// A promise for a takeover that did not come about need not be kept. A new copy is begun only
    /// by an owner whose record says that it is alone. With that record the compare-and-set of the
    /// old takeover fails for ever.
    pub fn new(me: Party, record: &Record, copy: Option<Copy>) -> Peer {
        Peer { me, promise: record.generation, copy }
    }

    /// The lowest generation that it listens to.
    pub fn promise(&self) -> u64 {
        self.promise
    }

    /// What it holds.
    pub fn copy(&self) -> Option<Copy> {
        self.copy
    }

    /// What it tells an owner that comes back.
    pub fn tail(&self) -> Option<Tail> {
        self.copy.map(|Copy { generation, logged, .. }| Tail {
            generation,
            logged,
            holder: self.me,
        })
    }

    /// An owner begins: what was there is thrown away. The promise and the empty copy have to be on
    /// stable media before the owner is told.
    ///
    /// # Errors
    /// It is an earlier owner.
    pub fn begin(&mut self, generation: u64, base: u64) -> Result<(), Rejected> {
        if generation < self.promise {
            return Err(Rejected::Promised(self.promise));
        }
        self.promise = generation;
        self.copy = Some(Copy { generation, base, logged: base });
        Ok(())
    }

    /// A record arrives. It has to be in the log before the owner is told.
    ///
    /// # Errors
    /// It is of another owner, or not the next one.
    pub fn record(&mut self, generation: u64, sequence: u64) -> Result<(), Rejected> {
        if generation < self.promise {
            return Err(Rejected::Promised(self.promise));
        }
        match &mut self.copy {
            Some(copy) if copy.generation == generation && copy.logged + 1 == sequence => {
                copy.logged = sequence;
                Ok(())
            }
            _ => Err(Rejected::Gap),
        }
    }

    /// Whether it may take the volume over while `record` stands. Then it writes its promise down,
    /// makes its log stable, changes the record to what is returned, fences the old owner and only
    /// then serves.
    ///
    /// # Errors
    /// The record does not say that it holds everything.
    pub fn take_over(&mut self, record: &Record) -> Result<Record, Rejected> {
        if record.peer() != Some(self.me) && !mutated!(RestartedCopyTakesOver) {
            return Err(Rejected::NotInSync);
        }
        self.accept_loss(record)
    }

    /// The same for a copy that was whole before its host lost its power, on the word of somebody
    /// who knows that the owner's log is lost: whatever was flushed is in the copy, and of what was
    /// not the newest may be missing.
    ///
    /// # Errors
    /// The record does not say that it held everything.
    pub fn accept_loss(&mut self, record: &Record) -> Result<Record, Rejected> {
        let holds = self.copy.is_some_and(|copy| copy.generation == record.generation);
        let counts = record.peer().is_some_and(|party| party.cache == self.me.cache);
        if !holds || !counts {
            return Err(Rejected::NotInSync);
        }
        self.promise = self.promise.max(record.generation + 1);
        Ok(record.taken_by(self.me))
    }
}
