//! Writes that begin or end inside a sector.
//!
//! The core takes whole sectors, so such a write reads the sectors at its edges first, completes
//! them and writes whole sectors. Between the read and the write nobody else may change those
//! sectors, or an acknowledged write would be undone. Such writes are rare (a guest's disk has
//! sectors of its own), so the rule is coarse: the gate of the volume closes, no further write
//! enters the core, those inside finish, and one unaligned write after the other runs alone. Reads
//! go on.

use crate::shard::core::Core;
use crate::shard::front::budget::Held;
use crate::shard::shared::Shared;
use std::collections::VecDeque;
use tidepool_engine::api::{
    BLOCK_BYTES, Op, Request, RequestError, RequestId, SECTOR_BYTES, VolumeId, buffer_bytes,
};
use tidepool_engine::mem::Buf;

const SECTOR: u64 = SECTOR_BYTES as u64;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Marks a request of a gate among those of connections: no connection has this number.
const GATE_MARK: u64 = (u32::MAX as u64) << 32;
/// The part of an unaligned write between its edges, or all of it.
const WHOLE: usize = 2;

/// The piece of a connection's request that an unaligned write is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::shard) struct PieceName {
    pub(in crate::shard) connection: u32,
    pub(in crate::shard) piece: u32,
}

/// An unaligned write or write-zeroes.
#[derive(Debug, Clone, Copy)]
pub(in crate::shard) struct Unaligned {
    pub(in crate::shard) name: PieceName,
    pub(in crate::shard) offset: u64,
    pub(in crate::shard) len: u64,
    /// The payload where the core wants it; none for zeroes.
    pub(in crate::shard) buf: Option<Buf>,
    pub(in crate::shard) fua: bool,
    pub(in crate::shard) no_hole: bool,
}

impl Unaligned {
    fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// The sectors that are written in part: one at the beginning, one at the end.
    fn edges(&self) -> [Option<u64>; 2] {
        let first = self.offset / SECTOR * SECTOR;
        let last = self.end() / SECTOR * SECTOR;
        let head = (!self.offset.is_multiple_of(SECTOR)).then_some(first);
        let tail = (!self.end().is_multiple_of(SECTOR) && head != Some(last)).then_some(last);
        [head, tail]
    }

    /// Completes the payload with what the edge sector holds outside of it, or the edge sector with
    /// zeroes.
    fn merge<C: Core>(&self, shared: &mut Shared<C>, sector: u64, scratch: Buf) {
        let arena = shared.core.arena_mut();
        let edge = scratch.slice((sector % BLOCK) as usize, SECTOR_BYTES);
        let (from, to) = (self.offset.max(sector), self.end().min(sector + SECTOR));
        let (from, to) = ((from - sector) as usize, (to - sector) as usize);
        match self.buf {
            None => arena.bytes_mut(edge)[from..to].fill(0),
            Some(buf) => {
                let base = self.offset / BLOCK * BLOCK;
                let whole = buf.slice((sector - base) as usize, SECTOR_BYTES);
                arena.copy(edge.slice(0, from), whole.slice(0, from));
                arena.copy(edge.slice(to, SECTOR_BYTES - to), whole.slice(to, SECTOR_BYTES - to));
            }
        }
    }
}

/// An unaligned write that has the volume for itself.
struct Active {
    write: Unaligned,
    scratch: [Option<Buf>; 2],
    writing: bool,
    /// Requests in the core.
    pending: u32,
    result: Result<(), RequestError>,
}

/// The gate of one volume.
#[derive(Default)]
pub(in crate::shard) struct Gate {
    /// Writes, discards and write-zeroes in the core.
    writes: u32,
    queue: VecDeque<Unaligned>,
    active: Option<Active>,
    held: Held,
}

impl Gate {
    /// The gate of a volume, open.
    pub(in crate::shard) fn of(volume: VolumeId) -> Gate {
        Gate { held: Held::of(volume), ..Gate::default() }
    }

    /// No further write may enter the core.
    pub(in crate::shard) fn is_closed(&self) -> bool {
        self.active.is_some() || !self.queue.is_empty()
    }

    /// A write enters the core.
    pub(in crate::shard) fn enter(&mut self) {
        assert!(!self.is_closed(), "a write went past a closed gate");
        self.writes += 1;
    }

    /// A write that entered is complete.
    pub(in crate::shard) fn leave(&mut self) {
        self.writes = self.writes.checked_sub(1).expect("a write leaves once");
    }

    /// Gives up the writes that have not begun.
    pub(in crate::shard) fn abandon(&mut self) -> Vec<PieceName> {
        self.queue.drain(..).map(|write| write.name).collect()
    }
}

/// Is this the reply to a gate's request? Then whose, and which part.
pub(in crate::shard) fn of_gate(id: RequestId) -> Option<(VolumeId, usize)> {
    (id & GATE_MARK == GATE_MARK).then_some((VolumeId((id >> 8) as u16), (id & 0xff) as usize))
}

fn request_id(volume: VolumeId, part: usize) -> RequestId {
    GATE_MARK | u64::from(volume.0) << 8 | part as u64
}

/// Queues an unaligned write and closes the gate of its volume. A connection waits at a closed
/// gate, so there is at most one per connection.
pub(in crate::shard) fn push<C: Core>(shared: &mut Shared<C>, id: VolumeId, write: Unaligned) {
    let Some(volume) = shared.volumes.get_mut(id) else { return };
    if !volume.gate.is_closed() {
        shared.gated.push(id);
    }
    volume.gate.queue.push_back(write);
}

/// Starts the next unaligned write of a volume if nothing is in its way; says whether it did.
pub(in crate::shard) fn advance<C: Core>(shared: &mut Shared<C>, id: VolumeId) -> bool {
    let Some(volume) = shared.volumes.get_mut(id) else { return false };
    if volume.gate.active.is_some() || volume.gate.writes > 0 {
        return false;
    }
    let Some(write) = volume.gate.queue.front().copied() else { return false };
    let mut held = std::mem::take(&mut volume.gate.held);
    let edges = write.edges();
    let scratch = edges.map(|edge| edge.and_then(|_| shared.alloc_anyway(&mut held, BLOCK_BYTES)));
    let short = edges.iter().zip(&scratch).any(|(edge, buf)| edge.is_some() && buf.is_none());
    if short {
        scratch.into_iter().flatten().for_each(|buf| shared.put_back(&mut held, buf));
    }
    let Some(volume) = shared.volumes.get_mut(id) else { return false };
    volume.gate.held = held;
    if short {
        return false;
    }
    volume.gate.queue.pop_front();
    let pending = edges.iter().flatten().count() as u32;
    volume.gate.active = Some(Active { write, scratch, writing: false, pending, result: Ok(()) });
    shared.count.unaligned_writes += 1;
    for (part, sector) in edges.into_iter().enumerate() {
        if let (Some(offset), Some(buf)) = (sector, scratch[part]) {
            let id_of_part = request_id(id, part);
            shared.submit(Request {
                id: id_of_part,
                volume: id,
                op: Op::Read,
                offset,
                len: SECTOR,
                buf: Some(buf),
            });
        }
    }
    true
}

/// A request of the volume's gate is complete. Returns the unaligned write when that ends it; the
/// gate is open again then, unless others wait.
pub(in crate::shard) fn done<C: Core>(
    shared: &mut Shared<C>,
    id: VolumeId,
    result: Result<(), RequestError>,
) -> Option<(PieceName, Result<(), RequestError>)> {
    let active = shared.volumes.get_mut(id).and_then(|v| v.gate.active.as_mut());
    let active = active.expect("a gate's reply comes while its write is active");
    active.pending -= 1;
    active.result = active.result.and(result);
    if active.pending > 0 {
        return None;
    }
    if !active.writing && active.result.is_ok() {
        active.writing = true;
        let (write, scratch) = (active.write, active.scratch);
        let pending = write_parts(shared, id, &write, scratch);
        let active = shared.volumes.get_mut(id).and_then(|v| v.gate.active.as_mut());
        active.expect("nothing has completed yet").pending = pending;
        return None;
    }
    let volume = shared.volumes.get_mut(id).expect("looked up above");
    let active = volume.gate.active.take().expect("looked up above");
    let mut held = std::mem::take(&mut volume.gate.held);
    active.scratch.into_iter().flatten().for_each(|buf| shared.free(&mut held, buf));
    assert!(held.is_zero(), "a gate keeps no memory between writes");
    if let Some(volume) = shared.volumes.get_mut(id) {
        volume.gate.held = held;
    }
    if shared.volumes.get(id).is_some_and(|v| !v.gate.is_closed()) {
        shared.gated.retain(|gated| *gated != id);
        shared.gate_opened = true;
    }
    Some((active.write.name, active.result))
}

/// Merges and submits what an unaligned write consists of; returns the number of requests.
fn write_parts<C: Core>(
    shared: &mut Shared<C>,
    id: VolumeId,
    write: &Unaligned,
    scratch: [Option<Buf>; 2],
) -> u32 {
    let edges = write.edges();
    for (sector, buf) in edges.iter().zip(scratch) {
        if let (Some(sector), Some(buf)) = (sector, buf) {
            write.merge(shared, *sector, buf);
        }
    }
    let mut parts: [Option<Request>; 3] = [None; 3];
    let fua = write.fua;
    let request = |part, op, offset, len, buf| Request {
        id: request_id(id, part),
        volume: id,
        op,
        offset,
        len,
        buf,
    };
    if write.buf.is_some() {
        let (start, end) = (write.offset / SECTOR * SECTOR, write.end().next_multiple_of(SECTOR));
        parts[WHOLE] = Some(request(WHOLE, Op::Write { fua }, start, end - start, write.buf));
    } else {
        for part in 0..2 {
            parts[part] =
                edges[part].map(|at| request(part, Op::Write { fua }, at, SECTOR, scratch[part]));
        }
        let (start, end) = (write.offset.next_multiple_of(SECTOR), write.end() / SECTOR * SECTOR);
        if start < end {
            let op = Op::WriteZeroes { fua, no_hole: write.no_hole };
            parts[WHOLE] = Some(request(WHOLE, op, start, end - start, None));
        }
    }
    debug_assert!(scratch.iter().flatten().all(|b| b.len as usize == buffer_bytes(0, SECTOR)));
    let count = parts.iter().flatten().count() as u32;
    parts.into_iter().flatten().for_each(|part| shared.submit(part));
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(offset: u64, len: u64) -> [Option<u64>; 2] {
        let name = PieceName { connection: 0, piece: 0 };
        Unaligned { name, offset, len, buf: None, fua: false, no_hole: false }.edges()
    }

    #[test]
    fn the_sectors_written_in_part_are_the_edges() {
        assert_eq!(edges(512, 1024), [None, None]);
        assert_eq!(edges(513, 1), [Some(512), None]);
        assert_eq!(edges(513, 511), [Some(512), None]);
        assert_eq!(edges(512, 1), [None, Some(512)]);
        assert_eq!(edges(511, 2), [Some(0), Some(512)]);
        assert_eq!(edges(1, 4096), [Some(0), Some(4096)]);
        assert_eq!(edges(1, 511 + 512), [Some(0), None]);
    }

    #[test]
    fn gate_requests_are_told_from_those_of_connections() {
        assert_eq!(of_gate(request_id(VolumeId(255), 2)), Some((VolumeId(255), 2)));
        assert_eq!(of_gate(511 << 32 | 77), None);
    }
}
