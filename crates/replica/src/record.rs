//! What the witness knows, and what an owner that comes back makes of it.

/// A cache on one life of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Party {
    /// Uuid of the cache device.
    pub cache: u128,
    /// The host's boot: another one means that what was not on stable media is gone.
    pub boot: u128,
}

/// Which caches hold what the image does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Copies {
    /// The owner's alone.
    Solo,
    /// The owner's and this one's: whatever is acknowledged is in both.
    Sync(Party),
    /// This one's: the owner's cache device has failed, and may come back with less than it had.
    Peer(Party),
}

/// The ownership record, as far as the second copy is concerned. It changes by compare-and-set of the whole of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    /// Goes up with every owner, and with every return of one.
    pub generation: u64,
    /// The owner.
    pub owner: Party,
    /// Where its data is.
    pub copies: Copies,
}

impl Record {
    /// The record that makes a volume `party`'s, with one copy.
    pub fn taken_by(&self, party: Party) -> Record {
        Record { generation: self.generation + 1, owner: party, copies: Copies::Solo }
    }

    /// Who holds a copy beside the owner, on which boot.
    pub fn peer(&self) -> Option<Party> {
        match self.copies {
            Copies::Solo => None,
            Copies::Sync(peer) | Copies::Peer(peer) => Some(peer),
        }
    }

    /// The same owner, with these copies.
    pub fn with(&self, copies: Copies) -> Record {
        Record { copies, ..*self }
    }
}

/// How far a log of one generation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tail {
    /// The generation.
    pub generation: u64,
    /// Sequence of its newest record.
    pub logged: u64,
    /// Who has it, on which boot.
    pub holder: Party,
}

/// What an owner that comes back has to do before it may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Resume {
    /// Its own log has everything: make it stable, and take the record as [`Record::taken_by`] says.
    Serve,
    /// The peer's log goes further: get its records from one past this sequence to this one, and ask again.
    Fetch {
        /// Newest that is there.
        after: u64,
        /// Newest that the peer has.
        through: u64,
    },
    /// The peer's log goes further by so many records, and nobody knows what else a device has lost that has failed: it is for the peer
    /// to take over.
    Behind {
        /// How many.
        records: u64,
    },
    /// The newest data may be with the peer, which cannot be asked.
    Unreachable,
    /// Another owner has it.
    Taken,
}

/// Decides about the return of `me` to a volume whose newest record in its own log is `own`. `peer` is what the peer
/// has said of its copy: `None` if it cannot be asked or has none of this generation.
pub fn resume(me: Party, record: &Record, own: u64, peer: Option<Tail>) -> Resume {
    if record.owner.cache != me.cache {
        return Resume::Taken;
    }
    let Some(holder) = record.peer() else { return Resume::Serve };
    let failed = record.copies == Copies::Peer(holder) && !mutated!(FailedLogCounts);
    // A process that was killed has lost nothing that its log's device had taken.
    if record.owner.boot == me.boot && !failed {
        return Resume::Serve;
    }
    match peer.filter(|peer| peer.generation == record.generation && peer.holder.cache == holder.cache) {
        // Where the owner's device has failed, not even what was flushed is known to be on it.
        Some(peer)
            if (peer.holder == holder || failed)
                && peer.logged > own + u64::from(mutated!(LastRecordNotFetched))
                && !mutated!(TailNotAsked) =>
        {
            match failed {
                true => Resume::Behind { records: peer.logged - own },
                false => Resume::Fetch { after: own, through: peer.logged },
            }
        }
        // It has no more than we have, or has lost its power as well: what was flushed is in either.
        Some(_) => Resume::Serve,
        None if mutated!(TailNotAsked) => Resume::Serve,
        None => Resume::Unreachable,
    }
}
