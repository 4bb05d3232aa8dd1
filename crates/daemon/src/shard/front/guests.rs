//! Clients on the way to another host. Here they come from: what they read there is read here. And
//! here they go to: they are let in before the volume is served, and stay with the control plane
//! until it is.

use crate::shard::api::{Guest, ShardError};
use crate::shard::control::command::Answer;
use crate::shard::core::Core;
use crate::shard::front::budget::Held;
use crate::shard::io::volume::Volume;
use crate::shard::limits::ASKS_MAX;
use crate::shard::net::connection::Connection;
use crate::shard::pair::replication::{ASK_SLOT, request_id};
use crate::shard::reactor::Reactor;
use tidepool_engine::api::{
    BLOCK_BYTES, Op, REQUEST_BYTES_MAX, Request, RequestError, RequestId, VolumeId, buffer_bytes,
};
use tidepool_engine::mem::{Buf, Slab};
use tidepool_nbd::{Export, Session};
use tokio::sync::mpsc::Sender;

/// [`Export::id`] of volumes that are not served yet: no volume has this number.
pub(in crate::shard) const EXPECTED: u64 = 1 << 32;

/// A volume whose clients are let in before it is served.
pub(in crate::shard) struct Expected {
    /// Which: another one of this name may follow.
    number: u64,
    pub(in crate::shard) name: String,
    size_bytes: u64,
    guests: Sender<Guest>,
}

impl Expected {
    pub(in crate::shard) fn export(&self) -> Export<'_> {
        Export::new(EXPECTED, &self.name, self.size_bytes)
    }
}

/// What a client on another host has asked for.
struct Ask {
    held: Held,
    buf: Option<Buf>,
    /// Where the data begins in the buffer, and its length.
    data: (usize, usize),
    answer: Answer<Vec<u8>>,
}

/// Requests of clients on other hosts that are in the core.
pub(in crate::shard) struct Asks(Slab<Ask>);

impl Asks {
    pub(in crate::shard) fn new() -> Asks {
        Asks(Slab::new(ASKS_MAX))
    }
}

impl<C: Core> Reactor<C> {
    /// Lets clients of a volume in that is not served here yet. What was expected under this name
    /// before is not any more.
    pub(in crate::shard) fn expect(
        &mut self,
        number: u64,
        name: String,
        size_bytes: u64,
        guests: Sender<Guest>,
    ) {
        self.shared.expected.retain(|expected| expected.name != name);
        self.shared.expected.push(Expected { number, name, size_bytes, guests });
        self.shared.came = true;
    }

    /// Lets no more of them in.
    pub(in crate::shard) fn unexpect(&mut self, number: u64) {
        self.shared.expected.retain(|expected| expected.number != number);
    }

    /// A client that uses a volume which is not served yet goes to the task that expects it.
    pub(in crate::shard) fn pass_on(&mut self, slot: u32) {
        let mut connection = self.connections.remove(slot);
        let (guest, own) = (connection.take_guest(), connection.place.is_own());
        connection.dismantle(&mut self.shared);
        let Some((session, unread)) = guest else { return };
        let Connection { fd, peer, .. } = *connection;
        let expected = self.shared.expected.iter().find(|expected| expected.name == session.name);
        let guest = Guest { fd, peer, session, unread, own };
        match expected {
            // Without anybody who waits for it, or with too many waiting, the connection ends.
            Some(expected) => drop(expected.guests.try_send(guest)),
            // It may have come meanwhile.
            None => self.adopt(guest),
        }
    }

    /// The volume of a client is served now. Where it is not, the connection ends.
    pub(in crate::shard) fn adopt(&mut self, guest: Guest) {
        let volume = self.shared.volumes.iter().find(|v| v.serving && v.name == guest.session.name);
        let Some((id, size_bytes)) = volume.map(|volume| (volume.id, volume.size_bytes)) else {
            return;
        };
        if self.stopping.is_some() || self.connections.is_full() {
            return;
        }
        let Guest { fd, peer, session, unread, own } = guest;
        let place = match self.shared.places.take(&session.name, own) {
            Ok(place) => place,
            Err(full) => return self.turn_away(&peer, full),
        };
        let mut connection = Box::new(Connection::new(fd, peer, None, place, self.shared.now));
        let session = Session { export: u64::from(id.0), size_bytes, ..session };
        connection.welcome(session, &unread, &mut self.shared);
        let slot = self.connections.insert(connection).expect("it is not full");
        self.connections.get_mut(slot).expect("just inserted").slot = slot;
        self.list(slot);
    }

    /// Reads for a client on another host; without bytes it wants what was completed on stable
    /// media.
    pub(in crate::shard) fn ask(
        &mut self,
        id: VolumeId,
        offset: u64,
        len: u32,
        answer: Answer<Vec<u8>>,
    ) {
        let size =
            self.shared.volumes.get(id).filter(|volume| volume.serving).map(|v| v.size_bytes);
        let Some(size) = size else { return drop(answer.send(Err(ShardError::NoVolume(id)))) };
        // As for a client here.
        if !self.shared.volumes.get(id).is_some_and(Volume::is_leased) {
            return drop(answer.send(Err(ShardError::Lapsed)));
        }
        let inside = offset.checked_add(len.into()).is_some_and(|end| end <= size);
        if !inside || buffer_bytes(offset, len.into()) > REQUEST_BYTES_MAX {
            return drop(answer.send(Err(ShardError::Request(RequestError::Invalid))));
        }
        let data = ((offset % BLOCK_BYTES as u64) as usize, len as usize);
        let bytes = if len > 0 { buffer_bytes(offset, len.into()) } else { 0 };
        let Some((name, buf)) = self.begin_ask(id, bytes, data, answer) else { return };
        let op = if len > 0 { Op::Read } else { Op::Flush };
        self.shared.submit(Request { id: name, volume: id, op, offset, len: len.into(), buf });
    }

    /// Remembers who is to be answered, with a buffer of so many bytes, and the part of it that is
    /// the answer. `None` if there is no room, which has been answered then.
    pub(in crate::shard) fn begin_ask(
        &mut self,
        id: VolumeId,
        bytes: usize,
        data: (usize, usize),
        answer: Answer<Vec<u8>>,
    ) -> Option<(RequestId, Option<Buf>)> {
        let mut held = Held::of(id);
        let room = !self.asks.0.is_full();
        let buf = (room && bytes > 0).then(|| self.shared.alloc(&mut held, bytes)).flatten();
        if !room || bytes > 0 && buf.is_none() {
            let limit = ShardError::Limit { what: "request of another host", limit: ASKS_MAX };
            let _ = answer.send(Err(limit));
            return None;
        }
        let number =
            self.asks.0.insert(Ask { held, buf, data, answer }).expect("room was looked for");
        Some((request_id(ASK_SLOT, number), buf))
    }

    /// The core has answered.
    pub(in crate::shard) fn asked(&mut self, number: u32, result: Result<(), RequestError>) {
        let Ask { mut held, buf, data: (from, len), answer } = self.asks.0.remove(number);
        let told = result.map(|()| {
            buf.map(|buf| self.shared.core.arena().bytes(buf.slice(from, len)).to_vec())
                .unwrap_or_default()
        });
        if let Some(buf) = buf {
            self.shared.free(&mut held, buf);
        }
        let _ = answer.send(told.map_err(ShardError::Request));
    }
}
