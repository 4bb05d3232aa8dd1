//! Records that an owner's log has lost with its host's power and its peer's log has (RFC 9): the
//! peer reads them as it has logged them, and the owner logs them as the records of a copy, before
//! it serves again.

use crate::api::{BLOCK_BYTES, IoError, RECORD_BLOCKS_MAX, RequestError, VolumeId};
use crate::base::flight::{Io, OpId};
use crate::base::mem::Buf;
use crate::blocks::index::Position;
use crate::format::record::Record;
use crate::format::{RecordKind, byte, crc32c};
use crate::ground::Ground;
use crate::peers::Peers;

/// Size of the buffer of an [`Op::Fetch`](crate::api::Op::Fetch), in bytes: the longest record.
pub const FETCH_BYTES: usize = (1 + RECORD_BLOCKS_MAX) * BLOCK_BYTES;

/// A record of a copy that is being read.
#[derive(Debug, Clone, Copy)]
pub(super) struct FetchRead {
    volume: VolumeId,
    op: OpId,
    sequence: u64,
    position: Position,
    /// The life of the segment in which it was logged.
    life: u64,
    /// The part of the operation's buffer that the record fills.
    buf: Buf,
}

impl Peers {
    /// Begins to read a record of a copy for the operation `op` into its buffer.
    ///
    /// # Errors
    /// It does not stand where it was logged any more.
    pub(crate) fn start_fetch(
        &mut self,
        ground: &mut Ground,
        (id, sequence): (VolumeId, u64),
        op: OpId,
        buf: Buf,
    ) -> Result<(), RequestError> {
        let found =
            if ground.volume(id).is_copy() { self.place_of_record(id, sequence) } else { None };
        let stands = |&(segment, life, ..): &(u32, u64, u32, u32)| {
            ground.space().segment(segment).life() == life
        };
        let (segment, life, first, blocks) = found.filter(stands).ok_or(RequestError::Invalid)?;
        let position = ground.geo().segment_block(segment) + first;
        let buf = buf.slice(0, blocks as usize * BLOCK_BYTES);
        ground.space_mut().pin(position);
        let fetch =
            self.fetches.insert(FetchRead { volume: id, op, sequence, position, life, buf });
        ground.read(Io::Fetch(fetch), byte(position), buf);
        Ok(())
    }

    /// A record has been read: it is sent only if nothing is wrong with it. Tells the operation,
    /// and its result.
    pub(crate) fn fetch_done(
        &mut self,
        ground: &mut Ground,
        index: u32,
        result: Result<(), IoError>,
    ) -> (OpId, Result<(), RequestError>) {
        let read = self.fetches.remove(index);
        ground.space_mut().unpin(read.position);
        let generation = ground.volume(read.volume).spec().generation;
        let (block, data) = ground.bytes(read.buf).split_at(BLOCK_BYTES);
        let is_meant = |record: &Record| {
            let header = &record.header;
            header.kind == RecordKind::Write as u8
                && (header.uuid, header.volume.get()) == (ground.geo().uuid, read.volume.0)
                && header.segment_sequence.get() == read.life
                && (header.generation.get(), header.sequence.get()) == (generation, read.sequence)
                && usize::from(header.blocks.get()) * BLOCK_BYTES == data.len()
        };
        let mut blocks = data.chunks(BLOCK_BYTES);
        let is_whole = |record: Record| {
            let mut with_data = record.entries.iter().filter(|entry| entry.has_data());
            with_data.all(|entry| blocks.next().is_some_and(|bytes| crc32c(bytes) == entry.value()))
        };
        let good = result.is_ok() && Record::decode(block).filter(is_meant).is_some_and(is_whole);
        (read.op, if good { Ok(()) } else { Err(RequestError::Io) })
    }
}
