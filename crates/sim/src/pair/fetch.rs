//! An owner that comes back with less than its peer gets from it what it has lost.

use super::host::{Run, VOLUME};
use super::{LIMITS, World};
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, open};
use tidepool_replica::PeerDriver;
use tidepool_replica::wire::Message as Plain;

impl World {
    /// Asks the peer for the next record. Where that cannot be, it is asked again later.
    pub(super) fn fetch(&mut self, at: usize, sequence: u64, through: u64) {
        let (record, peer) = (self.ceph.record(), 1 - at);
        let known = self.hosts[peer].known().map(|spec| (VOLUME, spec.generation));
        if known.is_none() || self.hosts[at].engine().follow_on(VOLUME).is_err() {
            return;
        }
        self.net.connections += 1;
        let connection = self.net.connections;
        self.end_other_connections(peer);
        let host = &mut self.hosts[peer];
        let me = host.party();
        let (driver, _, _) = PeerDriver::new(host.engine(), known, me, &record);
        host.copies.followers.insert(connection, driver);
        let until = self.clock(at) + LIMITS.answer_ns;
        self.hosts[at].run = Run::Fetching { sequence, through, connection, until };
        self.cover.hit("record fetched");
        let message = Plain::Fetch { after: sequence - 1, through: sequence };
        self.drive_peer(peer, connection, |driver, engine, turns| {
            driver.hear(engine, &message, turns)
        });
        self.drive(peer);
    }

    /// The peer has answered over this connection: with a record, or with why it has none.
    pub(super) fn fetched(&mut self, peer: usize, from: u64, answer: Result<Vec<u8>, String>) {
        let owner = 1 - peer;
        self.drive_peer(peer, from, |driver, engine, _| driver.disconnected(engine));
        let heard = self.link_works() && !self.is_paused(owner) && !self.is_paused(peer);
        let Run::Fetching { sequence, through, connection, .. } = self.hosts[owner].run else {
            return;
        };
        if !heard || connection != from {
            return;
        }
        let Ok(record) = answer else {
            return self.cover.hit("record that cannot be fetched");
        };
        let header = open::<RecordHeader>(&record[..BLOCK_BYTES])
            .expect("the driver looks at what it gives");
        assert_eq!(header.sequence.get(), sequence, "the record that was asked for");
        // The last one has all of them on stable media.
        let durable = sequence == through || self.draws.rng.permille(200);
        let now = self.clock(owner);
        let host = &mut self.hosts[owner];
        let engine = host.engine.as_mut().expect("it asks");
        let Some(buf) = engine.arena_mut().alloc(record.len()) else { return };
        engine.arena_mut().bytes_mut(buf).copy_from_slice(&record);
        let id = host.fresh();
        host.records.insert(id, (sequence, buf));
        let op = Op::Record { durable };
        let request = Request { id, volume: VOLUME, op, offset: 0, len: 0, buf: Some(buf) };
        host.engine().handle(now, Event::Request(request));
        self.drive(owner);
    }
}
