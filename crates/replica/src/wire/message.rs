//! What the two hosts say.

use super::record::Record;
use tidepool_engine::api::{Begin, Have, Nanos, Room};

/// What a peer holds of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holds {
    /// The owner's generation.
    pub generation: u64,
    /// Newest sequence that it does not hold.
    pub base: u64,
    /// Newest sequence in its log.
    pub logged: u64,
    /// Newest sequence on its stable media.
    pub stable: u64,
}

/// Which owner calls, and about which volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call<'a> {
    /// Uuid of the owner's cache.
    pub cache: u128,
    /// Its host's boot.
    pub boot: u128,
    /// Generation of its ownership.
    pub generation: u64,
    /// Name of its host, for people.
    pub host: &'a str,
    /// The volume's name.
    pub name: &'a str,
    /// URI of its image.
    pub image: &'a str,
}

/// A volume whose clients are about to move to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Offer<'a> {
    /// Its owner.
    pub call: Call<'a>,
    /// The host that is meant.
    pub to: &'a str,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// What its owner does with writes, as its users call that.
    pub mode: &'a str,
    /// It is drained in no order.
    pub unordered: bool,
    /// Milliseconds of accepted loss, if one is.
    pub accept_loss_ms: Option<u64>,
    /// Its dirty quota in bytes; 0 for its share of the cache.
    pub dirty_bytes_max: u64,
}

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message<'a> {
    /// First message of an owner whose records are to follow.
    Hello {
        /// The owner, and the volume.
        call: Call<'a>,
        /// The owner's lease in nanoseconds. A message without one means [`LEASE_V1_NS`], as the
        /// first releases had it.
        lease_ns: Nanos,
    },
    /// First and only message of an owner that has let go of the volume: the peer is to take it
    /// over.
    HandOver(Call<'a>),
    /// The volume is taken over, and served.
    Taken {
        /// The former owner's generation.
        generation: u64,
    },
    /// First message of a peer.
    Welcome {
        /// Uuid of its cache.
        cache: u128,
        /// Its host's boot.
        boot: u128,
        /// Name of its host, for people.
        host: &'a str,
        /// What a copy that begins now would have room for.
        room: Room,
        /// What it holds of that volume.
        holds: Option<Holds>,
    },
    /// A peer that does not do as it is asked, and why; it hangs up.
    Refused(&'a str),
    /// Throw away what is there, promise to listen to nobody earlier; records after the base
    /// follow.
    Begin(Begin),
    /// The promise is on stable media.
    Begun {
        /// The owner's generation.
        generation: u64,
        /// As it was asked for.
        base: u64,
    },
    /// A record of the log.
    Record {
        /// The record.
        record: Record<'a>,
        /// Somebody waits until it is on stable media.
        durable: bool,
    },
    /// How far the peer's log goes, and what it has room for.
    Have(Have),
    /// Bring everything up to this sequence to stable media.
    Flush {
        /// The sequence.
        sequence: u64,
    },
    /// The image has everything up to this sequence.
    Drained {
        /// The sequence.
        floor: u64,
    },
    /// Send the records from one past `after` on.
    Fetch {
        /// Newest that is there.
        after: u64,
        /// Newest that is wanted.
        through: u64,
    },
    /// Send a good copy of this block; or that it is here (`data_bytes` is a block), or that there
    /// is none (zero).
    Block {
        /// Block of the volume.
        block: u64,
        /// CRC-32C that the data has to have.
        crc: u32,
        /// Bytes of data that follow.
        data_bytes: u32,
    },
    /// Still here; both sides say so all the time. A peer says each beat of its owner's back, too,
    /// as long as it follows: nobody has taken over up to then.
    Beat {
        /// Of the owner's clock; 0 in a peer's own beats.
        time_ns: u64,
    },
    /// First message of an owner whose clients are about to move: the other host is to let them in.
    Offer(Offer<'a>),
    /// Clients are let in there; what they ask follows.
    Expecting {
        /// Uuid of the other host's cache.
        cache: u128,
    },
    /// A client there reads; or, without bytes, wants everything that was completed to be on stable
    /// media.
    Ask {
        /// Byte offset in the volume; a multiple of a sector.
        offset: u64,
        /// Bytes; a multiple of a sector. The blocks that it touches have at most
        /// [`REQUEST_BYTES_MAX`] bytes.
        len: u32,
    },
    /// How that has ended.
    Told {
        /// It has succeeded. Else there is no data.
        done: bool,
        /// CRC-32C of the data.
        crc: u32,
        /// Bytes of data that follow.
        data_bytes: u32,
    },
    /// A client there writes: the owner is to let go.
    Take,
    /// The owner has let go.
    LetGo {
        /// Its generation.
        generation: u64,
        /// The image has everything, and is nobody's. If not, the copy there is to be taken over.
        clean: bool,
    },
    /// First and only message of the holder of a copy, which another host wants to replace: does
    /// the owner need it?
    Needs {
        /// The holder.
        host: &'a str,
        /// The volume's name.
        name: &'a str,
        /// URI of its image.
        image: &'a str,
    },
    /// The answer.
    Needed {
        /// Uuid of the owner's cache.
        cache: u128,
        /// The image may lack something that the copy has.
        needed: bool,
    },
}
