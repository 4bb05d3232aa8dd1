//! Pieces: blocks of an object on their way from the cache device to the image.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::{For, PIECE_BLOCKS};
use crate::base::util::runs;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::{Lookup, Position};
use crate::drain::Drain;
use crate::drain::object::Written;
use crate::format::{byte, crc32c};
use crate::ground::Ground;
use crate::log::stable::Deferred;
use std::ops::Range;

/// Blocks that follow each other in the volume, on their way from the cache device to the backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    drain: u32,
    buf: Buf,
    first: u64,
    blocks: u32,
    positions: [Position; PIECE_BLOCKS],
    /// Number of the first segment that was opened after these positions were looked up: in that
    /// one or a later one they are other places.
    opened: u64,
    reads: u32,
    bad: bool,
    /// Bad blocks have been read a second time.
    again: bool,
    /// The blocks are the cut's, newer ones have superseded them.
    frozen: bool,
}

impl Piece {
    fn positions(&self) -> &[Position] {
        &self.positions[..self.blocks as usize]
    }
}

impl Drain {
    /// Reads the dirty blocks that follow each other from the first of `blocks` into one piece;
    /// false if there is no buffer for it.
    pub(super) fn read_blocks(
        &mut self,
        ground: &mut Ground,
        d: u32,
        blocks: Range<u64>,
        frozen: bool,
    ) -> bool {
        let Some(buf) = ground.pools_mut().take(For::Drain) else { return false };
        let (id, first) = (self.objects[d].volume, blocks.start);
        let mut piece = Piece {
            drain: d,
            buf,
            first,
            blocks: 0,
            positions: [0; PIECE_BLOCKS],
            opened: ground.space().next_life(),
            reads: 0,
            bad: false,
            again: false,
            frozen,
        };
        for block in blocks.take(PIECE_BLOCKS) {
            let Some(position) = self.copy_to_drain(ground, id, block, frozen) else { break };
            piece.positions[piece.blocks as usize] = position;
            piece.blocks += 1;
        }
        debug_assert!(piece.blocks > 0);
        self.objects[d].go_on_at(first + u64::from(piece.blocks));
        self.issued(id, d);
        let index = self.pieces.insert(piece);
        self.read_piece(ground, index);
        true
    }

    /// Where the drain reads a block: its dirty copy, or with `frozen` the older one that a cut
    /// needs. `None` if it has none to bring to the image now.
    fn copy_to_drain(
        &self,
        ground: &Ground,
        id: VolumeId,
        block: u64,
        frozen: bool,
    ) -> Option<Position> {
        let ledger = ground.volume(id).ledger();
        let newer = ledger.uncommitted(block, 1).0.is_some();
        let found = match (frozen, newer) {
            (false, false) => ledger.index().lookup(block),
            (true, true) => ledger.cut_index()?.lookup(block),
            _ => return None,
        };
        let Lookup::At(position) = found else { return None };
        ground.marks().is_dirty(position).then_some(position)
    }

    /// Reads a piece's blocks from the cache device, those that follow each other there at once.
    fn read_piece(&mut self, ground: &mut Ground, index: u32) {
        let piece = self.pieces[index];
        let runs = || runs(piece.blocks as usize, |i| piece.positions[i]);
        self.pieces[index].reads = runs().count() as u32;
        for (start, end) in runs() {
            let position = piece.positions[start];
            ground.space_mut().pin(position);
            let buf = piece.buf.slice(start * BLOCK_BYTES, (end - start) * BLOCK_BYTES);
            let blocks = (start as u16, end as u16);
            // What did not verify may be good on the device.
            match ground.mirrored(position, end - start).filter(|_| !piece.again) {
                Some(from) => {
                    ground.copy(from, buf);
                    self.copied_blocks += end - start;
                    self.read_done(ground, index, blocks, Ok(()));
                }
                None => {
                    let io = Io::DrainRead { piece: index, start: blocks.0, end: blocks.1 };
                    ground.read(io, byte(position), buf);
                }
            }
        }
    }

    /// The device has answered a read of blocks of a piece.
    pub(crate) fn read_done(
        &mut self,
        ground: &mut Ground,
        index: u32,
        (start, end): (u16, u16),
        result: Result<(), IoError>,
    ) {
        let piece = self.pieces[index];
        ground.space_mut().unpin(piece.positions[usize::from(start)]);
        let id = self.objects[piece.drain].volume;
        for i in usize::from(start)..usize::from(end) {
            let position = piece.positions[i];
            let bytes = ground.bytes(piece.buf.slice(i * BLOCK_BYTES, BLOCK_BYTES));
            let crc = ground.marks().crc(position);
            if result.is_ok() && (mutated!(SkipDrainCrc) || crc32c(bytes) == crc) {
                continue;
            }
            self.pieces[index].bad = true;
            if piece.again {
                ground.note_corrupt(id, position);
                let block = piece.first + i as u64;
                ground.bad_mut().report(match piece.frozen {
                    true => BadCopy::of_anybody(id, block, position),
                    false => BadCopy::current(id, block, position),
                });
            }
        }
        self.pieces[index].reads -= 1;
        let piece = self.pieces[index];
        if piece.reads > 0 {
            return;
        }
        if !piece.bad {
            self.when_stable(ground, id, Deferred::Piece(index));
        } else if !piece.again && self.is_still_there(ground, &piece) {
            self.pieces[index].again = true;
            self.pieces[index].bad = false;
            self.read_piece(ground, index);
        } else {
            // What is lost is marked; the rest of the object is drained without it.
            self.release_piece(ground, index, false);
        }
    }

    /// Whether all blocks of a piece are where they were: what has been moved meanwhile has left
    /// its place to others.
    fn is_still_there(&self, ground: &Ground, piece: &Piece) -> bool {
        let ledger = ground.volume(self.objects[piece.drain].volume).ledger();
        let Some(index) = (if piece.frozen { ledger.cut_index() } else { Some(ledger.index()) })
        else {
            return false;
        };
        let is_there = |position, block| {
            index.lookup(block) == Lookup::At(position)
                && ground.space().life_of(position) < piece.opened
        };
        piece
            .positions()
            .iter()
            .zip(piece.first..)
            .all(|(&position, block)| is_there(position, block))
    }

    /// Sends a piece to the backend.
    pub(super) fn send_piece(&mut self, ground: &mut Ground, index: u32) {
        let piece = &self.pieces[index];
        let id = self.objects[piece.drain].volume;
        let buf = piece.buf.slice(0, piece.blocks as usize * BLOCK_BYTES);
        let op = BackendOp::Write { offset: piece.first * BLOCK_BYTES as u64, buf };
        self.volumes.of_mut(id).writes += 1;
        ground.backend(Io::DrainWrite { piece: index }, id, op);
    }

    /// The backend has answered a piece.
    pub(crate) fn write_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        index: u32,
        result: Result<(), IoError>,
    ) {
        let piece = &self.pieces[index];
        let drain = &mut self.objects[piece.drain];
        let id = drain.volume;
        self.volumes.of_mut(id).writes -= 1;
        ground.note_backend_result(now, id, result);
        if result.is_ok() {
            let bytes = u64::from(piece.blocks) * BLOCK_BYTES as u64;
            ground.volume_mut(id).backend_mut().note_drained(now, bytes);
            let blocks = (piece.first..).zip(piece.positions());
            let opened = piece.opened;
            drain.note_written(blocks.map(|(block, &position)| Written {
                block,
                position,
                opened,
            }));
        }
        self.release_piece(ground, index, result.is_ok());
    }

    /// A piece is over: the backend has it, or has not.
    pub(super) fn release_piece(&mut self, ground: &mut Ground, index: u32, written: bool) {
        let piece = self.pieces.remove(index);
        ground.pools_mut().give(For::Drain, piece.buf);
        self.returned(ground, piece.drain, written);
    }
}
