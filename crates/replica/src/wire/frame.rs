//! Messages as frames: a prefix, a head, and for some the data behind them.

use super::message::{Call, Holds, Message, Offer};
use super::record::Record;
use super::{DATA_BYTES_MAX, HEAD_BYTES_MAX, Malformed, PREFIX_BYTES, TEXT_BYTES_MAX};
use crate::limits::LEASE_V1_NS;
use tidepool_engine::api::{
    BLOCK_BYTES, Begin, Have, REQUEST_BYTES_MAX, Room, SECTOR_BYTES, buffer_bytes,
};
use tidepool_engine::format::{Entry, RecordHeader, crc32c};

pub(super) const RECORD_HEAD_BYTES: usize = size_of::<RecordHeader>();
pub(super) const ENTRY_BYTES: usize = size_of::<Entry>();
const BLOCK: u32 = BLOCK_BYTES as u32;
const SECTOR: u32 = SECTOR_BYTES as u32;

/// What one [`Message::Ask`] may ask for.
fn is_askable(bytes: u32) -> bool {
    bytes.is_multiple_of(SECTOR) && bytes <= REQUEST_BYTES_MAX as u32
}

/// Kinds of messages as bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
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

/// What begins every frame: kind 1, for a record whether somebody waits for it on stable media 1,
/// bytes of the head 2, bytes of the data 4, CRC-32C over prefix (itself zero) and head 4, zero 4.
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
        let field =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let bad = Malformed::Shape(bytes[0]);
        let kind = Kind::of(bytes[0]).ok_or(bad)?;
        let head_bytes = u16::from_le_bytes([bytes[2], bytes[3]]);
        let durable = bytes[1] == 1;
        let prefix = Prefix { kind, durable, head_bytes, data_bytes: field(4), crc: field(8) };
        let data = match kind {
            Kind::Record => {
                prefix.data_bytes.is_multiple_of(BLOCK)
                    && prefix.data_bytes <= DATA_BYTES_MAX as u32
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
            Kind::Have => {
                Message::Have(Have { logged: f.u64()?, stable: f.u64()?, room: f.room()? })
            }
            Kind::Flush => Message::Flush { sequence: f.u64()? },
            Kind::Drained => Message::Drained { floor: f.u64()? },
            Kind::Fetch => Message::Fetch { after: f.u64()?, through: f.u64()? },
            Kind::Block => {
                Message::Block { block: f.u64()?, crc: f.u32()?, data_bytes: self.data_bytes }
            }
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
            Hello, Welcome, Refused, Begin, Begun, Record, Have, Flush, Drained, Fetch, Block,
            Beat, HandOver, Taken, Offer, Expecting, Ask, Told, Take, LetGo, Needs, Needed,
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
        Some(Holds {
            generation: self.u64()?,
            base: self.u64()?,
            logged: self.u64()?,
            stable: self.u64()?,
        })
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
        self.put_head(out);
        let (kind, data_bytes) = (self.kind(), self.data_bytes());
        let durable = matches!(self, Message::Record { durable: true, .. });
        let (prefix, head) = out[start..].split_at_mut(PREFIX_BYTES);
        let head_bytes = head.len() as u16;
        prefix.copy_from_slice(
            &Prefix { kind, durable, head_bytes, data_bytes, crc: 0 }.sealed(head).encode(),
        );
    }

    fn kind(&self) -> Kind {
        match self {
            Message::Hello { .. } => Kind::Hello,
            Message::Welcome { .. } => Kind::Welcome,
            Message::Refused(_) => Kind::Refused,
            Message::Begin(_) => Kind::Begin,
            Message::Begun { .. } => Kind::Begun,
            Message::Record { .. } => Kind::Record,
            Message::Have(_) => Kind::Have,
            Message::Flush { .. } => Kind::Flush,
            Message::Drained { .. } => Kind::Drained,
            Message::Fetch { .. } => Kind::Fetch,
            Message::Block { .. } => Kind::Block,
            Message::Beat { .. } => Kind::Beat,
            Message::HandOver(_) => Kind::HandOver,
            Message::Taken { .. } => Kind::Taken,
            Message::Offer(_) => Kind::Offer,
            Message::Expecting { .. } => Kind::Expecting,
            Message::Ask { .. } => Kind::Ask,
            Message::Told { .. } => Kind::Told,
            Message::Take => Kind::Take,
            Message::LetGo { .. } => Kind::LetGo,
            Message::Needs { .. } => Kind::Needs,
            Message::Needed { .. } => Kind::Needed,
        }
    }

    /// Bytes of the data that follows the head.
    fn data_bytes(&self) -> u32 {
        match *self {
            Message::Record { record, .. } => record.data_bytes() as u32,
            Message::Block { data_bytes, .. } | Message::Told { data_bytes, .. } => data_bytes,
            _ => 0,
        }
    }

    fn put_head(&self, out: &mut Vec<u8>) {
        match *self {
            Message::Take => {}
            Message::Refused(text) => put_text(out, text),
            Message::Begun { generation, base } => put_numbers(out, &[generation, base]),
            Message::Flush { sequence } => put_numbers(out, &[sequence]),
            Message::Drained { floor } => put_numbers(out, &[floor]),
            Message::Fetch { after, through } => put_numbers(out, &[after, through]),
            Message::Beat { time_ns } => put_numbers(out, &[time_ns]),
            Message::Taken { generation } => put_numbers(out, &[generation]),
            Message::Begin(Begin { generation, size_bytes, base, room }) => {
                put_numbers(out, &[generation, size_bytes, base, room.bytes, room.ranges]);
            }
            Message::Have(Have { logged, stable, room }) => {
                put_numbers(out, &[logged, stable, room.bytes, room.ranges]);
            }
            Message::Record { record, .. } => out.extend_from_slice(record.head),
            Message::Block { block, crc, .. } => {
                put_numbers(out, &[block]);
                out.extend_from_slice(&crc.to_le_bytes());
            }
            Message::Hello { call, lease_ns } => {
                put_call(out, &call);
                put_numbers(
                    out,
                    if lease_ns == LEASE_V1_NS { &[] } else { std::slice::from_ref(&lease_ns) },
                );
            }
            Message::HandOver(call) => put_call(out, &call),
            Message::Offer(offer) => put_offer(out, &offer),
            Message::Expecting { cache } => out.extend_from_slice(&cache.to_le_bytes()),
            Message::Ask { offset, len } => {
                put_numbers(out, &[offset]);
                out.extend_from_slice(&len.to_le_bytes());
            }
            Message::Told { done, crc, .. } => {
                out.push(done.into());
                out.extend_from_slice(&crc.to_le_bytes());
            }
            Message::LetGo { generation, clean } => {
                put_numbers(out, &[generation]);
                out.push(clean.into());
            }
            Message::Needs { host, name, image } => {
                [host, name, image].iter().for_each(|text| put_text(out, text));
            }
            Message::Needed { cache, needed } => {
                out.extend_from_slice(&cache.to_le_bytes());
                out.push(needed.into());
            }
            Message::Welcome { cache, boot, host, room, holds } => {
                [cache, boot].iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
                put_text(out, host);
                put_numbers(out, &[room.bytes, room.ranges]);
                put_holds(out, holds);
            }
        }
    }
}

fn put_holds(out: &mut Vec<u8>, holds: Option<Holds>) {
    out.push(holds.is_some().into());
    if let Some(Holds { generation, base, logged, stable }) = holds {
        put_numbers(out, &[generation, base, logged, stable]);
    }
}

fn put_call(out: &mut Vec<u8>, call: &Call<'_>) {
    [call.cache, call.boot].iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    put_numbers(out, &[call.generation]);
    [call.host, call.name, call.image].iter().for_each(|text| put_text(out, text));
}

fn put_offer(out: &mut Vec<u8>, offer: &Offer<'_>) {
    put_call(out, &offer.call);
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
    assert!(
        text.len() <= TEXT_BYTES_MAX && !text.contains(char::is_control),
        "one short line: {text:?}"
    );
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
