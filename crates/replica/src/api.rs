//! Values that owner, peer and their hosts tell each other.

use tidepool_engine::api::{Op, VolumeId};
use tidepool_engine::mem::Buf;

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

/// The ownership record, as far as the second copy is concerned. It changes by compare-and-set of
/// the whole of it.
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

/// A copy of an owner's volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Copy {
    /// The owner's generation.
    pub generation: u64,
    /// Newest sequence that it does not hold: the image has everything up to there before the copy
    /// counts.
    pub base: u64,
    /// Newest sequence in its log.
    pub logged: u64,
}

/// A request to the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submit {
    /// Names it among the requests of this driver.
    pub number: u32,
    /// The copy.
    pub volume: VolumeId,
    /// What is to be done.
    pub op: Op,
    /// Byte offset in the volume.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the data is, or goes to.
    pub buf: Option<Buf>,
}

/// A record that has come whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Its sequence.
    pub sequence: u64,
    /// Its owner's generation.
    pub generation: u64,
    /// Somebody waits until it is on stable media.
    pub durable: bool,
    /// Its header block, then its data.
    pub buf: Buf,
}

/// What a copy promises before this host may take its volume over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// Nothing of an owner before this generation is taken any more, once the core has recorded it.
    pub generation: u64,
    /// What the ownership record is to say when, after that, everything of the copy is on stable
    /// media.
    pub after: Record,
}
