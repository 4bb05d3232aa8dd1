//! What owner and peer say to each other, as bytes (RFC 9). All numbers are little-endian.
//!
//! A connection begins with a [`Greeting`] in each direction, whose layout never changes. Then come frames: a
//! [`Prefix`], a head, and for records and blocks the data blocks. The data is not copied here: a prefix says how long
//! it is, and the reader puts it where it belongs.

use crate::limits::LEASE_V1_NS;
use tidepool_engine::api::{
    BLOCK_BYTES, Begin, Have, Nanos, REQUEST_BYTES_MAX, Room, SECTOR_BYTES, buffer_bytes,
};
use tidepool_engine::format::{
    Entry, FORMAT_VERSION, RECORD_ENTRIES_MAX, RECORD_MAGIC, RecordHeader, RecordKind, crc32c, open,
};
use zerocopy::FromBytes;

/// The version of the protocol that this release speaks.
pub const VERSION: u16 = 1;
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 16;
/// Bytes of a frame's prefix.
pub const PREFIX_BYTES: usize = 16;
/// Longest head in bytes: that of a record with as many entries as it can have.
pub const HEAD_BYTES_MAX: usize = RECORD_HEAD_BYTES + RECORD_ENTRIES_MAX * ENTRY_BYTES;
/// Longest data in bytes.
pub const DATA_BYTES_MAX: usize = RECORD_ENTRIES_MAX * BLOCK_BYTES;
/// Longest text in bytes.
pub const TEXT_BYTES_MAX: usize = 1024;

const MAGIC: [u8; 8] = *b"TPREPLIC";
const RECORD_HEAD_BYTES: usize = size_of::<RecordHeader>();
const ENTRY_BYTES: usize = size_of::<Entry>();
const BLOCK: u32 = BLOCK_BYTES as u32;
const SECTOR: u32 = SECTOR_BYTES as u32;

/// What one [`Message::Ask`] may ask for.
fn is_askable(bytes: u32) -> bool {
    bytes.is_multiple_of(SECTOR) && bytes <= REQUEST_BYTES_MAX as u32
}

/// A text as messages take it: one line, shortened if it is too long.
pub fn one_line(text: &str) -> String {
    let mut line = text.replace(char::is_control, "?");
    while line.len() > TEXT_BYTES_MAX {
        line.pop();
    }
    line
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The other side speaks something else.
    #[error("the other side does not speak the protocol of replicas")]
    Magic,
    /// There is no version that both sides know.
    #[error(
        "the other side speaks versions {oldest} to {newest} of the protocol of replicas, this one {VERSION}: update the older one"
    )]
    Version {
        /// Oldest that it speaks.
        oldest: u16,
        /// Newest that it speaks.
        newest: u16,
    },
    /// No message is like that.
    #[error("a message of kind {0} that cannot be")]
    Shape(u8),
    /// The checksum is wrong.
    #[error("a damaged message")]
    Crc,
}

/// First bytes in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Oldest version that is spoken.
    pub oldest: u16,
    /// Newest version that is spoken.
    pub newest: u16,
}

impl Greeting {
    /// What this release says.
    pub const OURS: Greeting = Greeting { oldest: VERSION, newest: VERSION };

    /// As bytes.
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.oldest.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.newest.to_le_bytes());
        bytes
    }

    /// Reads the other side's greeting and says which version is spoken: the newest that both know.
    ///
    /// # Errors
    /// It is no greeting, or there is no such version.
    pub fn agree(bytes: &[u8; GREETING_BYTES]) -> Result<u16, Malformed> {
        if bytes[..8] != MAGIC {
            return Err(Malformed::Magic);
        }
        let oldest = u16::from_le_bytes([bytes[8], bytes[9]]);
        let newest = u16::from_le_bytes([bytes[10], bytes[11]]);
        if oldest > newest || !(oldest..=newest).contains(&VERSION) {
            return Err(Malformed::Version { oldest, newest });
        }
        Ok(VERSION)
    }
}

/// What a peer holds of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// A write record on its way: what stood in the owner's log, without the padding of its header block. The data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// The header and its entries.
    head: &'a [u8],
}

impl<'a> Record<'a> {
    /// The record whose header block is `block`.
    ///
    /// # Errors
    /// It is none: the checksum is wrong, or it says that it has more than fits.
    pub fn of_block(block: &'a [u8; BLOCK_BYTES]) -> Result<Record<'a>, Malformed> {
        let header = open::<RecordHeader>(block).ok_or(Malformed::Crc)?;
        let length = RECORD_HEAD_BYTES + usize::from(header.entries.get()) * ENTRY_BYTES;
        let bad = Malformed::Shape(Kind::Record as u8);
        let (head, padding) = block.split_at_checked(length).ok_or(bad)?;
        // The other side puts zeroes where the padding was.
        if padding.iter().any(|&byte| byte != 0) {
            return Err(bad);
        }
        Record { head }.checked(&header)
    }

    /// The record with this head, which came without the padding that its checksum covers.
    fn of_head(head: &'a [u8]) -> Result<Record<'a>, Malformed> {
        if head.len() < RECORD_HEAD_BYTES {
            return Err(Malformed::Shape(Kind::Record as u8));
        }
        let mut block = [0; BLOCK_BYTES];
        block[..head.len()].copy_from_slice(head);
        let header = open::<RecordHeader>(&block).ok_or(Malformed::Crc)?;
        Record { head }.checked(&header)
    }

    fn checked(self, header: &RecordHeader) -> Result<Record<'a>, Malformed> {
        let is_of_a_log = header.magic == RECORD_MAGIC
            && header.kind == RecordKind::Write as u8
            && header.version.get() <= FORMAT_VERSION;
        let entries = usize::from(header.entries.get());
        let length = RECORD_HEAD_BYTES + entries * ENTRY_BYTES;
        let blocks = || (0..entries).filter(|&at| self.entry(at).has_data()).count();
        let fits = is_of_a_log
            && entries <= RECORD_ENTRIES_MAX
            && length == self.head.len()
            && blocks() == usize::from(header.blocks.get());
        fits.then_some(self).ok_or(Malformed::Shape(Kind::Record as u8))
    }

    /// The header as the owner wrote it.
    pub fn header(&self) -> RecordHeader {
        RecordHeader::read_from_prefix(self.head).expect("a head begins with a header").0
    }

    /// How many entries there are.
    pub fn entries(&self) -> usize {
        (self.head.len() - RECORD_HEAD_BYTES) / ENTRY_BYTES
    }

    /// One of the entries.
    ///
    /// # Panics
    /// If there is no such entry.
    pub fn entry(&self, at: usize) -> Entry {
        let from = RECORD_HEAD_BYTES + at * ENTRY_BYTES;
        Entry::read_from_bytes(&self.head[from..from + ENTRY_BYTES]).expect("an entry is as long as it is")
    }

    /// Bytes of the data blocks that follow.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.header().blocks.get()) * BLOCK_BYTES
    }
}

/// Which owner calls, and about which volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// First message of an owner whose records are to follow.
    Hello {
        /// The owner, and the volume.
        call: Call<'a>,
        /// The owner's lease in nanoseconds. A message without one means [`LEASE_V1_NS`], as the first releases had it.
        lease_ns: Nanos,
    },
    /// First and only message of an owner that has let go of the volume: the peer is to take it over.
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
    /// Throw away what is there, promise to listen to nobody earlier; records after the base follow.
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
    /// Send a good copy of this block; or that it is here (`data_bytes` is a block), or that there is none (zero).
    Block {
        /// Block of the volume.
        block: u64,
        /// CRC-32C that the data has to have.
        crc: u32,
        /// Bytes of data that follow.
        data_bytes: u32,
    },
    /// Still here; both sides say so all the time. A peer says each beat of its owner's back, too, as long as it follows: nobody has
    /// taken over up to then.
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
    /// A client there reads; or, without bytes, wants everything that was completed to be on stable media.
    Ask {
        /// Byte offset in the volume; a multiple of a sector.
        offset: u64,
        /// Bytes; a multiple of a sector. The blocks that it touches have at most [`REQUEST_BYTES_MAX`] bytes.
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
    /// First and only message of the holder of a copy, which another host wants to replace: does the owner need it?
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

/// Kinds of messages as bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Hello = 1,
    Welcome = 2,
    Refused = 3,
    Begin = 4,
    Begun = 5,
    Record = 6,
    Have = 7,
    Flush = 8,
    Drained = 9,
    Fetch = 10,
    Block = 11,
    Beat = 12,
    HandOver = 13,
    Taken = 14,
    Offer = 15,
    Expecting = 16,
    Ask = 17,
    Told = 18,
    Take = 19,
    LetGo = 20,
    Needs = 21,
    Needed = 22,
}

/// What begins every frame: kind 1, for a record whether somebody waits for it on stable media 1, bytes of the head 2,
/// bytes of the data 4, CRC-32C over prefix (itself zero) and head 4, zero 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    kind: Kind,
    durable: bool,
    head_bytes: u16,
    data_bytes: u32,
    crc: u32,
}

impl Prefix {
    /// Reads a prefix.
    ///
    /// # Errors
    /// No message is like that.
    pub fn decode(bytes: &[u8; PREFIX_BYTES]) -> Result<Prefix, Malformed> {
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let bad = Malformed::Shape(bytes[0]);
        let kind = Kind::of(bytes[0]).ok_or(bad)?;
        let head_bytes = u16::from_le_bytes([bytes[2], bytes[3]]);
        let durable = bytes[1] == 1;
        let prefix = Prefix { kind, durable, head_bytes, data_bytes: field(4), crc: field(8) };
        let data = match kind {
            Kind::Record => {
                prefix.data_bytes.is_multiple_of(BLOCK) && prefix.data_bytes <= DATA_BYTES_MAX as u32
            }
            Kind::Block => prefix.data_bytes == BLOCK || prefix.data_bytes == 0,
            Kind::Told => is_askable(prefix.data_bytes),
            _ => prefix.data_bytes == 0,
        };
        let zero = bytes[1] <= u8::from(kind == Kind::Record) && field(12) == 0;
        (data && zero && usize::from(head_bytes) <= HEAD_BYTES_MAX).then_some(prefix).ok_or(bad)
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; PREFIX_BYTES] {
        let mut bytes = [0; PREFIX_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.durable.into();
        bytes[2..4].copy_from_slice(&self.head_bytes.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.data_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    /// The same prefix with the checksum over it and its head.
    pub fn sealed(self, head: &[u8]) -> Prefix {
        let crcs = [crc32c(&Prefix { crc: 0, ..self }.encode()), crc32c(head)];
        Prefix { crc: crc32c(&crcs.map(u32::to_le_bytes).concat()), ..self }
    }

    /// Bytes of the block that follows the head of a [`Message::Block`].
    pub fn block_bytes(&self) -> usize {
        if self.kind == Kind::Block { self.data_bytes() } else { 0 }
    }

    /// Bytes of the head that follows.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes.into()
    }

    /// Bytes of the data that follows the head.
    pub fn data_bytes(&self) -> usize {
        self.data_bytes as usize
    }

    /// The message with this head.
    ///
    /// # Errors
    /// It is damaged, or no message is like that.
    ///
    /// # Panics
    /// If the head has not [`Prefix::head_bytes`].
    pub fn message<'a>(&self, head: &'a [u8]) -> Result<Message<'a>, Malformed> {
        assert_eq!(head.len(), self.head_bytes(), "the head that belongs to the prefix");
        if self.sealed(head).crc != self.crc {
            return Err(Malformed::Crc);
        }
        let bad = Malformed::Shape(self.kind as u8);
        if self.kind == Kind::Record {
            let record = Record::of_head(head)?;
            let whole = record.data_bytes() == self.data_bytes();
            return whole.then_some(Message::Record { record, durable: self.durable }).ok_or(bad);
        }
        let mut fields = Fields(head);
        let message = self.fixed(&mut fields).ok_or(bad)?;
        fields.0.is_empty().then_some(message).ok_or(bad)
    }

    /// Every message but a record.
    fn fixed<'a>(&self, f: &mut Fields<'a>) -> Option<Message<'a>> {
        Some(match self.kind {
            Kind::Record => return None,
            Kind::Hello => {
                let call = f.call()?;
                let lease_ns = if f.0.is_empty() { LEASE_V1_NS } else { f.u64()? };
                Message::Hello { call, lease_ns }
            }
            Kind::HandOver => Message::HandOver(f.call()?),
            Kind::Taken => Message::Taken { generation: f.u64()? },
            Kind::Welcome => {
                let (cache, boot, host, room) = (f.u128()?, f.u128()?, f.text()?, f.room()?);
                let holds = if f.flag()? { Some(f.holds()?) } else { None };
                Message::Welcome { cache, boot, host, room, holds }
            }
            Kind::Refused => Message::Refused(f.text()?),
            Kind::Begin => Message::Begin(Begin {
                generation: f.u64()?,
                size_bytes: f.u64()?,
                base: f.u64()?,
                room: f.room()?,
            }),
            Kind::Begun => Message::Begun { generation: f.u64()?, base: f.u64()? },
            Kind::Have => Message::Have(Have { logged: f.u64()?, stable: f.u64()?, room: f.room()? }),
            Kind::Flush => Message::Flush { sequence: f.u64()? },
            Kind::Drained => Message::Drained { floor: f.u64()? },
            Kind::Fetch => Message::Fetch { after: f.u64()?, through: f.u64()? },
            Kind::Block => Message::Block { block: f.u64()?, crc: f.u32()?, data_bytes: self.data_bytes },
            Kind::Beat => Message::Beat { time_ns: f.u64()? },
            Kind::Offer => Message::Offer(f.offer()?),
            Kind::Expecting => Message::Expecting { cache: f.u128()? },
            Kind::Ask => {
                let (offset, len) = (f.u64()?, f.u32()?);
                let fits = offset.is_multiple_of(SECTOR.into())
                    && is_askable(len)
                    && buffer_bytes(offset % u64::from(BLOCK), len.into()) <= REQUEST_BYTES_MAX;
                fits.then_some(Message::Ask { offset, len })?
            }
            Kind::Told => {
                let (done, crc, data_bytes) = (f.flag()?, f.u32()?, self.data_bytes);
                (done || data_bytes == 0).then_some(Message::Told { done, crc, data_bytes })?
            }
            Kind::Take => Message::Take,
            Kind::LetGo => Message::LetGo { generation: f.u64()?, clean: f.flag()? },
            Kind::Needs => Message::Needs { host: f.text()?, name: f.text()?, image: f.text()? },
            Kind::Needed => Message::Needed { cache: f.u128()?, needed: f.flag()? },
        })
    }
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        use Kind::*;
        let all = [
            Hello, Welcome, Refused, Begin, Begun, Record, Have, Flush, Drained, Fetch, Block, Beat,
            HandOver, Taken, Offer, Expecting, Ask, Told, Take, LetGo, Needs, Needed,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What is left of a head.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn u128(&mut self) -> Option<u128> {
        Some(u128::from_le_bytes(self.bytes(16)?.try_into().ok()?))
    }

    fn flag(&mut self) -> Option<bool> {
        match self.bytes(1)? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    /// A text goes into messages for people: one line.
    fn text(&mut self) -> Option<&'a str> {
        let len = self.bytes(2)?;
        let len = usize::from(u16::from_le_bytes([len[0], len[1]]));
        let text = std::str::from_utf8(self.bytes(len)?).ok()?;
        (len <= TEXT_BYTES_MAX && !text.contains(char::is_control)).then_some(text)
    }

    fn call(&mut self) -> Option<Call<'a>> {
        Some(Call {
            cache: self.u128()?,
            boot: self.u128()?,
            generation: self.u64()?,
            host: self.text()?,
            name: self.text()?,
            image: self.text()?,
        })
    }

    fn offer(&mut self) -> Option<Offer<'a>> {
        let (call, to, size_bytes) = (self.call()?, self.text()?, self.u64()?);
        let (mode, unordered) = (self.text()?, self.flag()?);
        let accept_loss_ms = if self.flag()? { Some(self.u64()?) } else { None };
        let dirty_bytes_max = self.u64()?;
        Some(Offer { call, to, size_bytes, mode, unordered, accept_loss_ms, dirty_bytes_max })
    }

    fn room(&mut self) -> Option<Room> {
        Some(Room { bytes: self.u64()?, ranges: self.u64()? })
    }

    fn holds(&mut self) -> Option<Holds> {
        Some(Holds { generation: self.u64()?, base: self.u64()?, logged: self.u64()?, stable: self.u64()? })
    }
}

impl Message<'_> {
    /// Appends prefix and head to `out`. The data of a record or block is sent behind it.
    ///
    /// # Panics
    /// If a text is longer than [`TEXT_BYTES_MAX`] or has control characters.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; PREFIX_BYTES]);
        let (kind, data_bytes) = self.encode_head(out);
        let durable = matches!(self, Message::Record { durable: true, .. });
        let (prefix, head) = out[start..].split_at_mut(PREFIX_BYTES);
        let head_bytes = head.len() as u16;
        prefix
            .copy_from_slice(&Prefix { kind, durable, head_bytes, data_bytes, crc: 0 }.sealed(head).encode());
    }

    fn encode_head(&self, out: &mut Vec<u8>) -> (Kind, u32) {
        let mut numbers = |kind, numbers: &[u64]| {
            put_numbers(out, numbers);
            (kind, 0)
        };
        match *self {
            Message::Begin(Begin { generation, size_bytes, base, room }) => {
                numbers(Kind::Begin, &[generation, size_bytes, base, room.bytes, room.ranges])
            }
            Message::Begun { generation, base } => numbers(Kind::Begun, &[generation, base]),
            Message::Have(Have { logged, stable, room }) => {
                numbers(Kind::Have, &[logged, stable, room.bytes, room.ranges])
            }
            Message::Flush { sequence } => numbers(Kind::Flush, &[sequence]),
            Message::Drained { floor } => numbers(Kind::Drained, &[floor]),
            Message::Fetch { after, through } => numbers(Kind::Fetch, &[after, through]),
            Message::Record { record, .. } => {
                out.extend_from_slice(record.head);
                (Kind::Record, record.data_bytes() as u32)
            }
            Message::Block { block, crc, data_bytes } => {
                out.extend_from_slice(&block.to_le_bytes());
                out.extend_from_slice(&crc.to_le_bytes());
                (Kind::Block, data_bytes)
            }
            Message::Beat { time_ns } => numbers(Kind::Beat, &[time_ns]),
            Message::Refused(text) => {
                put_text(out, text);
                (Kind::Refused, 0)
            }
            Message::Taken { generation } => numbers(Kind::Taken, &[generation]),
            Message::Hello { call, lease_ns } => {
                put_call(out, &call, Kind::Hello);
                if lease_ns != LEASE_V1_NS {
                    put_numbers(out, &[lease_ns]);
                }
                (Kind::Hello, 0)
            }
            Message::HandOver(call) => (put_call(out, &call, Kind::HandOver), 0),
            Message::Offer(offer) => {
                put_offer(out, &offer);
                (Kind::Offer, 0)
            }
            Message::Expecting { cache } => {
                out.extend_from_slice(&cache.to_le_bytes());
                (Kind::Expecting, 0)
            }
            Message::Ask { offset, len } => {
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
                (Kind::Ask, 0)
            }
            Message::Told { done, crc, data_bytes } => {
                out.push(done.into());
                out.extend_from_slice(&crc.to_le_bytes());
                (Kind::Told, data_bytes)
            }
            Message::Take => (Kind::Take, 0),
            Message::LetGo { generation, clean } => {
                put_numbers(out, &[generation]);
                out.push(clean.into());
                (Kind::LetGo, 0)
            }
            Message::Needs { host, name, image } => {
                [host, name, image].iter().for_each(|text| put_text(out, text));
                (Kind::Needs, 0)
            }
            Message::Needed { cache, needed } => {
                out.extend_from_slice(&cache.to_le_bytes());
                out.push(needed.into());
                (Kind::Needed, 0)
            }
            Message::Welcome { cache, boot, host, room, holds } => {
                [cache, boot].iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
                put_text(out, host);
                put_numbers(out, &[room.bytes, room.ranges]);
                out.push(holds.is_some().into());
                if let Some(Holds { generation, base, logged, stable }) = holds {
                    put_numbers(out, &[generation, base, logged, stable]);
                }
                (Kind::Welcome, 0)
            }
        }
    }
}

fn put_call(out: &mut Vec<u8>, call: &Call<'_>, kind: Kind) -> Kind {
    [call.cache, call.boot].iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    put_numbers(out, &[call.generation]);
    [call.host, call.name, call.image].iter().for_each(|text| put_text(out, text));
    kind
}

fn put_offer(out: &mut Vec<u8>, offer: &Offer<'_>) {
    put_call(out, &offer.call, Kind::Offer);
    put_text(out, offer.to);
    put_numbers(out, &[offer.size_bytes]);
    put_text(out, offer.mode);
    out.extend_from_slice(&[offer.unordered.into(), offer.accept_loss_ms.is_some().into()]);
    offer.accept_loss_ms.into_iter().for_each(|ms| put_numbers(out, &[ms]));
    put_numbers(out, &[offer.dirty_bytes_max]);
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    assert!(text.len() <= TEXT_BYTES_MAX && !text.contains(char::is_control), "one short line: {text:?}");
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
