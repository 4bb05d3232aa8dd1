//! Frames: the parts in which a group's redo is read from the cache device and written beside the
//! image.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::For;
use crate::base::util::runs;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::{Lookup, Position};
use crate::drain::Drain;
use crate::drain::group::Closed;
use crate::format::redo::{
    FRAME_BLOCKS_MAX, FRAME_ENTRIES_MAX, FrameName, encode_header, frame_bytes,
};
use crate::format::{Entry, EntryKind, byte, crc32c};
use crate::ground::Ground;
use crate::log::stable::Deferred;

/// A part of a group's redo on its way from the cache device to the backend.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    volume: VolumeId,
    number: u32,
    buf: Buf,
    blocks: Vec<FrameBlock>,
    zeroes: Vec<(u64, u32, bool)>,
    reads: u32,
    bad: bool,
    /// It is being read a second time: what is still bad is lost.
    second: bool,
}

/// A data block of a frame.
#[derive(Debug, Clone, Copy)]
struct FrameBlock {
    block: u64,
    position: Position,
    /// Of the content that was read. The position may hold something else by the time the frame is
    /// complete.
    crc: u32,
}

impl Drain {
    /// Begins the next frame of the closed group; false when there is none, or no buffer for it.
    pub(super) fn redo_next(&mut self, ground: &mut Ground, id: VolumeId) -> bool {
        let Some(closed) = self.closed(id) else { return false };
        if closed.again.is_empty() && ground.volume(id).ledger().is_gathered() {
            return false;
        }
        let Some(buf) = ground.pools_mut().take(For::Drain) else { return false };
        let again = self.closed_mut(id).again.pop();
        let frame = match again {
            Some(frame) => Some(refresh_frame(ground, frame, buf)),
            None => self.fill_frame(ground, id, buf),
        };
        let Some(frame) = frame else {
            // Nothing is left to gather: the group can be committed.
            ground.pools_mut().give(For::Drain, buf);
            ground.stir();
            return false;
        };
        self.closed_mut(id).in_flight += 1;
        self.volumes.of_mut(id).in_flight += 1;
        let index = self.frames.insert(frame);
        self.read_frame(ground, index);
        true
    }

    fn closed(&self, id: VolumeId) -> Option<&Closed> {
        self.volumes.of(id).groups.as_ref()?.closed.as_ref()
    }

    fn closed_mut(&mut self, id: VolumeId) -> &mut Closed {
        let groups = self.volumes.of_mut(id).groups.as_mut().expect("a volume with groups");
        groups.closed.as_mut().expect("a group is closed")
    }

    /// Gathers what fits into a frame of what is in none.
    fn fill_frame(&mut self, ground: &mut Ground, id: VolumeId, buf: Buf) -> Option<Frame> {
        let volume = ground.volume_mut(id);
        let blocks_end = volume.blocks_held();
        let closed = self.closed_mut(id);
        let mut frame = Frame {
            volume: id,
            number: closed.frames,
            buf,
            blocks: Vec::with_capacity(FRAME_BLOCKS_MAX),
            zeroes: Vec::new(),
            reads: 0,
            bad: false,
            second: false,
        };
        volume.ledger_mut().gather_blocks(FRAME_BLOCKS_MAX, &mut |block, position| {
            frame.blocks.push(FrameBlock { block, position, crc: 0 });
        });
        if frame.blocks.len() < FRAME_BLOCKS_MAX {
            let room = FRAME_ENTRIES_MAX - frame.blocks.len();
            let mut take = |block, n, keep| frame.zeroes.push((block, n, keep));
            volume.ledger_mut().gather_zeroes(room, blocks_end, &mut take);
        }
        if frame.blocks.is_empty() && frame.zeroes.is_empty() {
            return None;
        }
        closed.frames += 1;
        Some(frame)
    }

    /// Reads a frame's blocks from the cache device, those that follow each other there at once.
    fn read_frame(&mut self, ground: &mut Ground, index: u32) {
        let frame = &mut self.frames[index];
        let positions = |i: usize| frame.blocks[i].position;
        let spans: Vec<_> = runs(frame.blocks.len(), positions)
            .map(|(start, end)| (start, end, positions(start)))
            .collect();
        let (buf, second) = (frame.buf, frame.second);
        frame.reads = spans.len() as u32;
        if spans.is_empty() {
            return self.seal_frame(ground, index);
        }
        for (start, end, position) in spans {
            ground.space_mut().pin(position);
            let buf = buf.slice(frame_bytes(start), (end - start) * BLOCK_BYTES);
            let blocks = (start as u16, end as u16);
            // What did not verify may be good on the device.
            match ground.mirrored(position, end - start).filter(|_| !second) {
                Some(from) => {
                    ground.copy(from, buf);
                    self.copied_blocks += end - start;
                    self.frame_read_done(ground, index, blocks, Ok(()));
                }
                None => {
                    let io = Io::FrameRead { frame: index, start: blocks.0, end: blocks.1 };
                    ground.read(io, byte(position), buf);
                }
            }
        }
    }

    /// The device has answered a read of blocks of a frame.
    pub(crate) fn frame_read_done(
        &mut self,
        ground: &mut Ground,
        index: u32,
        (start, end): (u16, u16),
        result: Result<(), IoError>,
    ) {
        let frame = &mut self.frames[index];
        let id = frame.volume;
        ground.space_mut().unpin(frame.blocks[usize::from(start)].position);
        for i in usize::from(start)..usize::from(end) {
            let FrameBlock { block, position, .. } = frame.blocks[i];
            let crc = crc32c(ground.bytes(frame.buf.slice(frame_bytes(i), BLOCK_BYTES)));
            frame.blocks[i].crc = crc;
            let verifies = crc == ground.marks().crc(position);
            if result.is_err() || !verifies && !mutated!(SkipDrainCrc) {
                frame.bad = true;
                if frame.second {
                    ground.note_corrupt(id, position);
                    ground.bad_mut().report(BadCopy::of_anybody(id, block, position));
                }
            }
        }
        frame.reads -= 1;
        if frame.reads > 0 {
            return;
        }
        if frame.bad {
            // It is read once more, and `refresh_frame` leaves out what is lost by then. Blocks may
            // stand elsewhere now.
            frame.second = true;
            self.give_back_frame(ground, index);
        } else {
            self.seal_frame(ground, index);
        }
    }

    /// All blocks are in the buffer: the header goes in front of them, and the frame to the
    /// backend.
    fn seal_frame(&mut self, ground: &mut Ground, index: u32) {
        let frame = &self.frames[index];
        let id = frame.volume;
        let name = FrameName {
            uuid: ground.geo().uuid,
            generation: ground.volume(id).spec().generation,
            group: self.closed(id).expect("a group is closed").group,
            frame: frame.number,
        };
        let data =
            frame.blocks.iter().map(|part| Entry::new(EntryKind::Data, part.block, part.crc));
        let zeroes = frame.zeroes.iter().map(|&(block, n, keep)| {
            Entry::new(if keep { EntryKind::WriteZeroes } else { EntryKind::Discard }, block, n)
        });
        let header = frame.buf.slice(0, BLOCK_BYTES);
        encode_header(ground.bytes_mut(header), name, data.chain(zeroes));
        self.when_stable(ground, id, Deferred::Frame(index));
    }

    /// A frame whose content the log holds on stable media goes to the backend.
    pub(super) fn send_frame(&mut self, ground: &mut Ground, index: u32) {
        let frame = &self.frames[index];
        let (id, number) = (frame.volume, frame.number);
        let buf = frame.buf.slice(0, frame_bytes(frame.blocks.len()));
        let group = self.closed(id).expect("a group is closed").group;
        self.volumes.of_mut(id).writes += 1;
        ground.backend(
            Io::FrameWrite { frame: index },
            id,
            BackendOp::RedoWrite { group, frame: number, buf },
        );
    }

    /// The backend has answered a frame.
    pub(crate) fn frame_write_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        index: u32,
        result: Result<(), IoError>,
    ) {
        let id = self.frames[index].volume;
        self.volumes.of_mut(id).writes -= 1;
        ground.note_backend_result(now, id, result);
        if result.is_err() {
            return self.give_back_frame(ground, index);
        }
        let frame = self.frames.remove(index);
        ground.pools_mut().give(For::Drain, frame.buf);
        ground.volume_mut(id).count_mut().redo_bytes += frame_bytes(frame.blocks.len()) as u64;
        self.volumes.of_mut(id).in_flight -= 1;
        self.closed_mut(id).in_flight -= 1;
    }

    /// The frame is to be made again.
    pub(super) fn give_back_frame(&mut self, ground: &mut Ground, index: u32) {
        let frame = self.frames.remove(index);
        if !mutated!(FailedFrameKeepsBuffer) {
            ground.pools_mut().give(For::Drain, frame.buf);
        }
        self.volumes.of_mut(frame.volume).in_flight -= 1;
        let closed = self.closed_mut(frame.volume);
        closed.in_flight -= 1;
        closed.again.push(frame);
    }
}

/// The frame again, in another buffer: its blocks may have been moved or lost meanwhile.
fn refresh_frame(ground: &Ground, mut frame: Frame, buf: Buf) -> Frame {
    let index = ground.volume(frame.volume).ledger().closed_index().expect("a group is closed");
    frame.blocks.retain_mut(|part| match index.lookup(part.block) {
        Lookup::At(position) => {
            part.position = position;
            true
        }
        _ => false,
    });
    Frame { buf, reads: 0, bad: false, ..frame }
}
