//! Records that an owner's log has lost with its host's power and its peer's log has (RFC 9): the peer reads them as it has logged
//! them, and the owner logs them as the records of a copy, before it serves again.

use crate::api::{BLOCK_BYTES, ControlError, IoError, RECORD_BLOCKS_MAX, RequestError, VolumeId};
use crate::base::flight::Io;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::blocks::index::Position;
use crate::control::volume::Task;
use crate::engine::Engine;
use crate::format::{RecordKind, byte, crc32c};
use crate::peers::follower::Replica;
use crate::recovery::replay::{FoundRecord, decode_record};

/// Size of the buffer of an [`Op::Fetch`](crate::api::Op::Fetch), in bytes: the longest record.
pub const FETCH_BYTES: usize = (1 + RECORD_BLOCKS_MAX) * BLOCK_BYTES;

/// A record of a copy that is being read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchRead {
    op: OpId,
    sequence: u64,
    position: Position,
    /// The life of the segment in which it was logged.
    life: u64,
    /// The part of the operation's buffer that the record fills.
    buf: Buf,
}

impl Engine {
    /// Has a volume that is not attached take records again, as the copy of what it was: from one past its newest on, of the same
    /// generation. What it holds stays. Should the process end before it is attached again, it is found as a copy.
    ///
    /// # Errors
    /// There is no such volume, or something else is being done with it.
    pub fn follow_on(&mut self, id: VolumeId) -> Result<(), ControlError> {
        let volume =
            self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut).ok_or(ControlError::Gone)?;
        if volume.closing || volume.task != Task::None {
            return Err(ControlError::Busy);
        }
        if volume.attached {
            return Err(ControlError::NotReplica);
        }
        let (generation, newest) = (volume.spec.generation, volume.log.published());
        let replica = volume.replica.get_or_insert_with(|| {
            let mut replica = Replica::new(generation);
            replica.taken = newest;
            Box::new(replica)
        });
        replica.own = true;
        Ok(())
    }

    /// Reads a record of a copy, if it still stands where it was logged.
    pub(crate) fn start_fetch(&mut self, id: OpId, sequence: u64) {
        let op = self.ops[id];
        let replica = self.ground.volume(op.request.volume).replica.as_ref();
        let found = replica.and_then(|replica| replica.place_of_record(sequence));
        let stands = |&(segment, life, ..): &(u32, u64, u32, u32)| {
            self.ground.space.segments[segment as usize].sequence == life
        };
        let Some((segment, life, first, blocks)) = found.filter(stands) else {
            return self.complete(id, Err(RequestError::Invalid));
        };
        let position = self.ground.base.geo.segment_block(segment) + first;
        let buf = op.request.buf.expect("a read has a buffer").slice(0, blocks as usize * BLOCK_BYTES);
        self.ground.space.pin(position);
        let fetch = self.fetches.insert(FetchRead { op: id, sequence, position, life, buf });
        self.ground.base.out.read(Io::Fetch(fetch), byte(position), buf);
    }

    /// It has been read: it is sent only if nothing is wrong with it.
    pub(crate) fn fetch_done(&mut self, index: u32, result: Result<(), IoError>) {
        let read = self.fetches.remove(index);
        self.ground.space.unpin(read.position);
        let id = self.ops[read.op].request.volume;
        let generation = self.ground.volume(id).spec.generation;
        let (block, data) = self.ground.base.arena.bytes(read.buf).split_at(BLOCK_BYTES);
        let is_meant = |record: &FoundRecord| {
            let header = &record.header;
            header.kind == RecordKind::Write as u8
                && (header.uuid, header.volume.get()) == (self.ground.base.geo.uuid, id.0)
                && header.segment_sequence.get() == read.life
                && (header.generation.get(), header.sequence.get()) == (generation, read.sequence)
                && usize::from(header.blocks.get()) * BLOCK_BYTES == data.len()
        };
        let mut blocks = data.chunks(BLOCK_BYTES);
        let is_whole = |record: FoundRecord| {
            let mut with_data = record.entries.iter().filter(|entry| entry.has_data());
            with_data.all(|entry| blocks.next().is_some_and(|bytes| crc32c(bytes) == entry.value()))
        };
        let good = result.is_ok() && decode_record(block).filter(is_meant).is_some_and(is_whole);
        self.complete(read.op, if good { Ok(()) } else { Err(RequestError::Io) });
    }
}
