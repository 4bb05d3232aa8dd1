//! What the witness knows, and what an owner that comes back makes of it.

use crate::api::{Copies, Party, Record, Tail};

/// What an owner that comes back has to do before it may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Resume {
    /// Its own log has everything: make it stable, and take the record as [`Record::taken_by`]
    /// says.
    Serve,
    /// The peer's log goes further: get its records from one past this sequence to this one, and
    /// ask again.
    Fetch {
        /// Newest that is there.
        after: u64,
        /// Newest that the peer has.
        through: u64,
    },
    /// The peer's log goes further by so many records, and nobody knows what else a device has lost
    /// that has failed: it is for the peer to take over.
    Behind {
        /// How many.
        records: u64,
    },
    /// The newest data may be with the peer, which cannot be asked.
    Unreachable,
    /// Another owner has it.
    Taken,
}

/// Decides about the return of `me` to a volume whose newest record in its own log is `own`. `peer`
/// is what the peer has said of its copy: `None` if it cannot be asked or has none of this
/// generation.
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
    match peer
        .filter(|peer| peer.generation == record.generation && peer.holder.cache == holder.cache)
    {
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
        // It has no more than we have, or has lost its power as well: what was flushed is in
        // either.
        Some(_) => Resume::Serve,
        None if mutated!(TailNotAsked) => Resume::Serve,
        None => Resume::Unreachable,
    }
}
