//! An owner that comes back with less than its peer gets from it what it has lost.

use super::host::{Run, VOLUME};
use super::{LIMITS, World};
use tidepool_engine::FETCH_BYTES;
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, open};
use tidepool_engine::mem::Buf;

impl World {
    /// Asks the peer for the next record. Where that cannot be, it is asked again later.
    pub(super) fn fetch(&mut self, at: usize, sequence: u64, through: u64) {
        if self.hosts[at].engine().follow_on(VOLUME).is_err() {
            return;
        }
        let peer = &mut self.hosts[1 - at];
        let Some(buf) = peer.engine().arena_mut().alloc(FETCH_BYTES) else { return };
        let id = peer.fresh();
        peer.fetches.insert(id, buf);
        let op = Op::Fetch { sequence };
        let request = Request { id, volume: VOLUME, op, offset: 0, len: 0, buf: Some(buf) };
        let peers_now = self.clock(1 - at);
        self.hosts[1 - at].engine().handle(peers_now, Event::Request(request));
        self.hosts[at].run = Run::Fetching { sequence, through, until: self.clock(at) + LIMITS.answer_ns };
        self.cover.hit("record fetched");
        self.drive(1 - at);
    }

    /// The core of the peer has answered.
    pub(super) fn fetched(&mut self, at: usize, buf: Buf, result: Result<(), RequestError>) {
        let arena = self.hosts[at].engine().arena_mut();
        let bytes = arena.bytes(buf).to_vec();
        arena.free(buf);
        let owner = 1 - at;
        let heard = self.link_works() && !self.is_paused(owner) && !self.is_paused(at);
        let Run::Fetching { sequence, through, .. } = self.hosts[owner].run else { return };
        if !heard {
            return;
        }
        if result.is_err() {
            self.cover.hit("record that cannot be fetched");
            return;
        }
        let header = open::<RecordHeader>(&bytes[..BLOCK_BYTES]).expect("the core looks at what it gives");
        // It may be the answer to an earlier question.
        if header.sequence.get() != sequence {
            return;
        }
        let record = &bytes[..(1 + usize::from(header.blocks.get())) * BLOCK_BYTES];
        // The last one has all of them on stable media.
        let durable = sequence == through || self.rng.permille(200);
        let now = self.clock(owner);
        let host = &mut self.hosts[owner];
        let engine = host.engine.as_mut().expect("it asks");
        let Some(buf) = engine.arena_mut().alloc(record.len()) else { return };
        engine.arena_mut().bytes_mut(buf).copy_from_slice(record);
        let id = host.fresh();
        host.records.insert(id, (sequence, buf));
        let op = Op::Record { durable };
        let request = Request { id, volume: VOLUME, op, offset: 0, len: 0, buf: Some(buf) };
        host.engine().handle(now, Event::Request(request));
        self.drive(owner);
    }
}
