//! Records that an owner has lost with its host's power (RFC 9). The follower reads them from its copy; the owner's control plane
//! hands them to its core before the volume is served.

use super::core::Core;
use super::follower::FETCH;
use super::handle::{Answer, ShardError};
use super::reactor::Reactor;
use super::replication::{Role, request_id};
use tidepool_engine::FETCH_BYTES;
use tidepool_engine::api::{BLOCK_BYTES, Op, Request, RequestError, VolumeId};
use tidepool_replica::wire::{Message, Record as WireRecord, one_line};

/// No further record is read while so much waits to be sent.
const UNSENT_BYTES_MAX: usize = 1 << 20;

impl<C: Core> Reactor<C> {
    /// The owner of a copy wants records that it does not have any more; false if it should not have asked.
    pub(super) fn fetch(&mut self, slot: u32, after: u64, through: u64) -> bool {
        let checked = self.check_follower(slot);
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        if let Err(error) = checked {
            link.push(&Message::Refused(&one_line(&error.to_string())));
            return true;
        }
        let Some(volume) = follower.volume().filter(|_| !follower.has_begun()) else { return false };
        if !std::mem::replace(&mut follower.joined, true) {
            self.shared.join(&mut follower.held, volume);
        }
        follower.wanted = after.saturating_add(1)..through.saturating_add(1);
        true
    }

    /// Reads the next record that is wanted, when the last one is on its way. Whether the core has been given something.
    pub(super) fn read_record(&mut self, slot: u32) -> bool {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        let busy = follower.fetched.is_some() || link.broken() || link.unsent_bytes() > UNSENT_BYTES_MAX;
        let (Some(volume), false, false) = (follower.volume(), busy, follower.wanted.is_empty()) else {
            return false;
        };
        let Some(buf) = self.shared.alloc(&mut follower.held, FETCH_BYTES) else { return false };
        let sequence = follower.wanted.start;
        follower.fetched = Some((sequence, buf));
        let op = Op::Fetch { sequence };
        let id = request_id(slot, FETCH);
        self.shared.submit(Request { id, volume, op, offset: 0, len: 0, buf: Some(buf) });
        true
    }

    /// It has been read, or is not here any more.
    pub(super) fn record_read(&mut self, slot: u32, result: Result<(), RequestError>) {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        let Some((sequence, buf)) = follower.fetched.take() else { return };
        let (block, data) = self.shared.core.arena().bytes(buf).split_at(BLOCK_BYTES);
        let block = block.first_chunk().expect("a header block");
        match result.is_ok().then(|| WireRecord::of_block(block)) {
            Some(Ok(record)) => {
                let data = &data[..record.data_bytes()];
                link.push_with(&Message::Record { record, durable: false }, data);
                follower.wanted.start = sequence + 1;
            }
            _ => {
                follower.forget_wanted();
                let why = format!("record {sequence} cannot be read here any more");
                link.push(&Message::Refused(&one_line(&why)));
            }
        }
        self.shared.free(&mut follower.held, buf);
        self.read_record(slot);
    }

    /// Has a volume that is not served take records of its own log again.
    pub(super) fn follow_on(&mut self, id: VolumeId) -> Result<(), ShardError> {
        let served = self.shared.volumes.get(id).is_some();
        match self.shared.core.engine().filter(|_| !served) {
            Some(engine) => Ok(engine.follow_on(id)?),
            None => Err(ShardError::Attached(id)),
        }
    }

    /// Gives the core such a record, header block and data. With `durable` the answer comes when everything is on stable media.
    pub(super) fn log_record(&mut self, id: VolumeId, bytes: &[u8], durable: bool, answer: Answer<Vec<u8>>) {
        let Some((number, buf)) = self.begin_ask(id, bytes.len(), (0, 0), answer) else { return };
        let buf = buf.expect("a record has bytes");
        self.shared.core.arena_mut().bytes_mut(buf).copy_from_slice(bytes);
        let op = Op::Record { durable };
        self.shared.submit(Request { id: number, volume: id, op, offset: 0, len: 0, buf: Some(buf) });
    }
}
