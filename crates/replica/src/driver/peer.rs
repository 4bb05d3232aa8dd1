//! The peer's side: an owner's records on their way into this host's log, and what the owner wants
//! back of them.

use super::lost::PeerLost;
use crate::api::{Arrived, Copies, Party, Promise, Record, Submit};
use crate::peer::Rejected;
use crate::session::{PeerEffect, PeerSession};
use crate::wire::{Holds, Message, Record as WireRecord};
use std::ops::Range;
use tidepool_engine::api::{BLOCK_BYTES, Begin, Nanos, Op, RequestError, Room, VolumeId};
use tidepool_engine::mem::{Arena, Buf, Slab};
use tidepool_engine::{Engine, FETCH_BYTES};

/// Records of one owner that are in the core at once: as many as an owner is told of room for.
const RECORDS_MAX: usize = 4096;
/// No further record is read for the owner while so many bytes wait to be sent to it.
const UNSENT_BYTES_MAX: usize = 1 << 20;
/// The number of the flush among the requests.
const FLUSH: u32 = u32::MAX;
/// The number of the block that is read for the owner.
const BLOCK: u32 = u32::MAX - 1;
/// The number of the record that is read for the owner.
const FETCH: u32 = u32::MAX - 2;

/// What a peer's host is to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerTurn {
    /// Send this to the owner.
    Say(Message<'static>),
    /// Send the beat back, and remember when: a takeover waits for what the owner was told last.
    Echo {
        /// Of the owner's clock, in nanoseconds.
        time_ns: Nanos,
    },
    /// Tell the owner that it does not get what it asks for.
    Refuse(String),
    /// Send the record that is in this buffer: its header block, then its data.
    SayRecord(Buf),
    /// Send this block of the volume, whose data is in the buffer.
    SayBlock {
        /// Number of the block in the volume.
        block: u64,
        /// CRC-32C of the data.
        crc: u32,
        /// The data.
        buf: Buf,
    },
    /// Have the core begin the copy; tell [`PeerDriver::is_volume`] at once, and
    /// [`PeerDriver::begun`] when it is on stable media.
    Begin(Begin),
    /// Give the core a request; [`PeerDriver::answered`] gets its end.
    Submit(Submit),
    /// The core has refused this record: it does not fit the copy.
    Unfit {
        /// Its sequence.
        sequence: u64,
    },
    /// Free a buffer.
    Free(Buf),
    /// End the connection. The driver knows already.
    HangUp(PeerLost),
}

/// The peer's side of one connection.
#[derive(Debug)]
pub struct PeerDriver {
    session: PeerSession,
    volume: Option<VolumeId>,
    connected: bool,
    /// The record says that the owner has no other copy, so that one may begin.
    may_begin: bool,
    has_begun: bool,
    /// The copy begins: the generation and base that it was asked for with.
    beginning: Option<(u64, u64)>,
    /// Records in the core.
    records: Slab<(u64, Buf)>,
    flushing: bool,
    /// The block that is read for the owner, and its CRC-32C.
    block: Option<(u64, u32, Buf)>,
    /// The block that is read next: the owner does not wait for the answer about what it has
    /// overwritten meanwhile.
    next_block: Option<(u64, u32)>,
    /// Sequences of records that the owner has lost and wants, and the record that is read for it.
    wanted: Range<u64>,
    fetched: Option<(u64, Buf)>,
    /// Reused.
    effects: Vec<PeerEffect>,
}

impl PeerDriver {
    /// An owner is connected, whose ownership record is `record`. `volume` is what the core has of
    /// its volume, and the generation of that. Returns what the owner is told of it, too.
    pub fn new(
        engine: &mut Engine,
        volume: Option<(VolumeId, u64)>,
        me: Party,
        record: &Record,
    ) -> (PeerDriver, Room, Option<Holds>) {
        let id = volume.map(|(id, _)| id);
        let holds = volume.and_then(|(id, generation)| holds(engine, id, generation));
        let generation = holds.map_or(0, |holds| holds.generation);
        let session = PeerSession::new(engine, id, me, record, generation);
        let driver = PeerDriver {
            session,
            volume: id,
            connected: true,
            may_begin: record.copies == Copies::Solo,
            has_begun: false,
            beginning: None,
            records: Slab::new(RECORDS_MAX),
            flushing: false,
            block: None,
            next_block: None,
            wanted: 0..0,
            fetched: None,
            effects: Vec::new(),
        };
        (driver, engine.room_to_begin(id), holds)
    }

    /// The copy, or what the core has instead; `None` if it knows nothing of the volume.
    pub fn volume(&self) -> Option<VolumeId> {
        self.volume
    }

    /// The core owes it no answer.
    pub fn is_idle(&self) -> bool {
        let reads = self.block.is_some() || self.fetched.is_some();
        self.records.is_empty() && !self.flushing && !reads && self.beginning.is_none()
    }

    /// The owner is connected.
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// The connection to the owner has ended: what it was told of room is others' again. Does
    /// nothing if the driver has given it up.
    pub fn disconnected(&mut self, engine: &mut Engine) {
        if std::mem::take(&mut self.connected)
            && let Some(volume) = self.volume
        {
            engine.withdraw_room(volume);
        }
    }

    /// Gives the connection up, if there is one.
    pub fn hang_up(&mut self, engine: &mut Engine, why: PeerLost, out: &mut Vec<PeerTurn>) {
        if self.connected {
            out.push(PeerTurn::HangUp(why));
            self.disconnected(engine);
        }
    }

    /// The owner has said this, which is no record.
    pub fn hear(&mut self, engine: &mut Engine, message: &Message<'_>, out: &mut Vec<PeerTurn>) {
        let is_due = match *message {
            Message::Beat { time_ns } => {
                // What is not remembered is not said.
                if self.volume.is_some() {
                    out.push(PeerTurn::Echo { time_ns });
                }
                true
            }
            Message::Flush { sequence } if self.has_begun => {
                self.session.stabilise(sequence);
                true
            }
            Message::Drained { floor } if self.has_begun => {
                self.session.drained(engine, floor);
                true
            }
            Message::Block { block, crc, data_bytes: 0 } if self.has_begun => {
                self.next_block = Some((block, crc));
                true
            }
            Message::Fetch { after, through } if self.volume.is_some() && !self.has_begun => {
                self.wanted = after.saturating_add(1)..through.saturating_add(1);
                true
            }
            Message::Begin(begin) => self.begin(begin, out),
            _ => false,
        };
        if !is_due {
            self.hang_up(engine, PeerLost::Unexpected, out);
        }
    }

    /// The owner begins; false if it may not.
    fn begin(&mut self, begin: Begin, out: &mut Vec<PeerTurn>) -> bool {
        let may = self.beginning.is_none() && self.may_begin;
        if !may || self.session.begin(begin.generation, begin.base).is_err() {
            return false;
        }
        self.has_begun = true;
        self.wanted = 0..0;
        self.beginning = Some((begin.generation, begin.base));
        out.push(PeerTurn::Begin(begin));
        true
    }

    /// The copy that begins is this volume of the core.
    pub fn is_volume(&mut self, volume: VolumeId) {
        self.volume = Some(volume);
    }

    /// The copy has begun, or cannot for this reason.
    pub fn begun(&mut self, result: Result<(), String>, out: &mut Vec<PeerTurn>) {
        let Some((generation, base)) = self.beginning.take() else { return };
        match (result, self.volume) {
            (Err(why), _) => out.push(PeerTurn::Refuse(why)),
            (Ok(()), Some(volume)) if self.connected => {
                self.session.begun(volume);
                out.push(PeerTurn::Say(Message::Begun { generation, base }));
            }
            (Ok(()), _) => {}
        }
    }

    /// Whether a record may come now, or has to wait.
    ///
    /// # Errors
    /// No copy has begun.
    pub fn may_take_record(&self) -> Result<bool, PeerLost> {
        if !self.has_begun {
            return Err(PeerLost::UntimelyRecord);
        }
        Ok(self.session.takes_records() && !self.records.is_full())
    }

    /// A record is here. [`PeerDriver::may_take_record`] has said that it may come.
    pub fn record(&mut self, engine: &mut Engine, arrived: Arrived, out: &mut Vec<PeerTurn>) {
        let Arrived { sequence, generation, durable, buf } = arrived;
        let next = self.session.peer_mut().record(generation, sequence);
        let (Ok(()), Some(volume)) = (next, self.volume) else {
            out.push(PeerTurn::Free(buf));
            return self.hang_up(engine, PeerLost::NotNext, out);
        };
        let number = self.records.insert((sequence, buf)).expect("room was looked for");
        let op = Op::Record { durable };
        out.push(PeerTurn::Submit(Submit {
            number,
            volume,
            op,
            offset: 0,
            len: 0,
            buf: Some(buf),
        }));
    }

    /// The core has answered a request.
    pub fn answered(
        &mut self,
        arena: &Arena,
        number: u32,
        result: Result<(), RequestError>,
        out: &mut Vec<PeerTurn>,
    ) {
        match number {
            FLUSH => {
                self.flushing = false;
                self.session.flushed(result);
            }
            BLOCK => self.block_answered(result, out),
            FETCH => self.record_read(arena, result, out),
            number => {
                let (sequence, buf) = self.records.remove(number);
                out.push(PeerTurn::Free(buf));
                if result == Err(RequestError::Invalid) && self.session.takes_records() {
                    out.push(PeerTurn::Unfit { sequence });
                }
                self.session.logged(sequence, result);
            }
        }
    }

    /// Says what the owner is to know.
    pub fn look(&mut self, engine: &mut Engine, out: &mut Vec<PeerTurn>) {
        if !self.connected {
            return;
        }
        let mut effects = std::mem::take(&mut self.effects);
        self.session.look(engine, &mut effects);
        for effect in effects.drain(..) {
            match effect {
                PeerEffect::Have(have) => out.push(PeerTurn::Say(Message::Have(have))),
                PeerEffect::Flush if self.flushing => {}
                PeerEffect::Flush => {
                    let volume = self.volume.expect("a copy that has begun is a volume");
                    self.flushing = true;
                    let (number, op) = (FLUSH, Op::Flush);
                    out.push(PeerTurn::Submit(Submit {
                        number,
                        volume,
                        op,
                        offset: 0,
                        len: 0,
                        buf: None,
                    }));
                }
                PeerEffect::HangUp => self.hang_up(engine, PeerLost::CannotTake, out),
            }
        }
        self.effects = effects;
    }

    /// Reads what the owner wants next, if there is memory. `unsent_bytes` wait to be sent to it.
    /// To be called when the driver was called otherwise.
    pub fn read(
        &mut self,
        unsent_bytes: usize,
        alloc: &mut dyn FnMut(usize) -> Option<Buf>,
        out: &mut Vec<PeerTurn>,
    ) {
        let Some(volume) = self.volume.filter(|_| self.connected) else { return };
        if let (Some((block, crc)), None) = (self.next_block, &self.block) {
            let offset = block.checked_mul(BLOCK_BYTES as u64);
            let buf = offset.and_then(|_| alloc(BLOCK_BYTES));
            if let (Some(offset), Some(buf)) = (offset, buf) {
                self.next_block = None;
                self.block = Some((block, crc, buf));
                let (number, op, len) = (BLOCK, Op::Block { crc }, BLOCK_BYTES as u64);
                out.push(PeerTurn::Submit(Submit {
                    number,
                    volume,
                    op,
                    offset,
                    len,
                    buf: Some(buf),
                }));
            }
        }
        let busy = self.fetched.is_some() || unsent_bytes > UNSENT_BYTES_MAX;
        if !busy
            && !self.wanted.is_empty()
            && let Some(buf) = alloc(FETCH_BYTES)
        {
            let sequence = self.wanted.start;
            self.fetched = Some((sequence, buf));
            let (number, op) = (FETCH, Op::Fetch { sequence });
            out.push(PeerTurn::Submit(Submit {
                number,
                volume,
                op,
                offset: 0,
                len: 0,
                buf: Some(buf),
            }));
        }
    }

    /// The block has been read, or is not here.
    fn block_answered(&mut self, result: Result<(), RequestError>, out: &mut Vec<PeerTurn>) {
        let Some((block, crc, buf)) = self.block.take() else { return };
        match result {
            Ok(()) => out.push(PeerTurn::SayBlock { block, crc, buf }),
            // Another one is here, or a bad one.
            Err(RequestError::Invalid | RequestError::Io) => {
                out.push(PeerTurn::Say(Message::Block { block, crc, data_bytes: 0 }));
            }
            // That cannot be found out: the owner asks again.
            Err(_) => {}
        }
        out.push(PeerTurn::Free(buf));
    }

    /// The record has been read, or is not here any more.
    fn record_read(
        &mut self,
        arena: &Arena,
        result: Result<(), RequestError>,
        out: &mut Vec<PeerTurn>,
    ) {
        let Some((sequence, buf)) = self.fetched.take() else { return };
        if result.is_ok() && WireRecord::with_data(arena.bytes(buf)).is_ok() {
            // The owner may have begun meanwhile, and wants none any more.
            self.wanted.start = self.wanted.start.max(sequence + 1);
            out.push(PeerTurn::SayRecord(buf));
        } else {
            self.wanted = 0..0;
            out.push(PeerTurn::Refuse(format!("record {sequence} cannot be read here any more")));
        }
        out.push(PeerTurn::Free(buf));
    }

    /// It is time for a beat. The owner was last heard at `heard_at`.
    pub fn beat(
        &mut self,
        engine: &mut Engine,
        (now, heard_at, silence_ns): (Nanos, Nanos, Nanos),
        out: &mut Vec<PeerTurn>,
    ) {
        if self.connected {
            out.push(PeerTurn::Say(Message::Beat { time_ns: 0 }));
            if now > heard_at + silence_ns {
                self.hang_up(engine, PeerLost::Silent, out);
            }
        }
    }
}

/// What this host has of another one's volume, whose owner has this generation; `None` if it has no
/// copy.
pub fn holds(engine: &Engine, volume: VolumeId, generation: u64) -> Option<Holds> {
    engine.promised(volume)?;
    let log = engine.log_status(volume)?;
    Some(Holds { generation, base: 0, logged: log.published, stable: log.stable })
}

/// Whether the copy `volume`, of an owner with this generation, may become this host's own while
/// `record` stands. With `accepts_loss`, somebody knows that the owner's log is lost.
///
/// # Errors
/// The record does not say that the copy holds everything.
pub fn may_take_over(
    engine: &Engine,
    (volume, generation): (VolumeId, u64),
    me: Party,
    record: &Record,
    accepts_loss: bool,
) -> Result<Promise, Rejected> {
    let mut session = PeerSession::new(engine, Some(volume), me, record, generation);
    let after = match accepts_loss {
        true => session.peer_mut().accept_loss(record),
        false => session.peer_mut().take_over(record),
    }?;
    Ok(Promise { generation: session.peer().promise(), after })
}
