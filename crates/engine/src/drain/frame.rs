//! Frames: the parts in which a group's redo is read from the cache device and written beside the image.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::util::runs;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::{Lookup, Position};
use crate::drain::group::Closed;
use crate::engine::Engine;
use crate::format::redo::{FRAME_BLOCKS_MAX, FRAME_ENTRIES_MAX, FrameName, encode_header, frame_bytes};
use crate::format::{Entry, EntryKind, byte, crc32c};
use crate::log::stable::Deferred;

/// A part of a group's redo on its way from the cache device to the backend.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
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
    /// Of the content that was read. The position may hold something else by the time the frame is complete.
    crc: u32,
}

impl Engine {
    /// Begins the next frame of the closed group; false when there is none, or no buffer for it.
    pub(crate) fn redo_next(&mut self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        let Some(closed) = volume.groups.as_ref().and_then(|groups| groups.closed.as_ref()) else {
            return false;
        };
        if closed.again.is_empty() && volume.ledger.is_gathered() {
            return false;
        }
        let Some(buf) = self.ground.base.pools.drain.take() else { return false };
        let again = self.closed_mut(id).again.pop();
        let frame = match again {
            Some(frame) => Some(self.refresh_frame(frame, buf)),
            None => self.fill_frame(id, buf),
        };
        let Some(frame) = frame else {
            // Nothing is left to gather: the group can be committed.
            self.ground.base.pools.drain.give(buf);
            self.ground.base.out.stir();
            return false;
        };
        self.closed_mut(id).in_flight += 1;
        self.ground.volume_mut(id).drain_in_flight += 1;
        let index = self.frames.insert(frame);
        self.read_frame(index);
        true
    }

    fn closed_mut(&mut self, id: VolumeId) -> &mut Closed {
        let groups = self.ground.volume_mut(id).groups.as_mut().expect("a volume with groups");
        groups.closed.as_mut().expect("a group is closed")
    }

    /// Gathers what fits into a frame of what is in none.
    fn fill_frame(&mut self, id: VolumeId, buf: Buf) -> Option<Frame> {
        let volume = self.ground.volume_mut(id);
        let blocks_end = volume.blocks_held();
        let closed = volume.groups.as_mut().and_then(|g| g.closed.as_mut()).expect("a group is closed");
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
        volume.ledger.gather_blocks(FRAME_BLOCKS_MAX, &mut |block, position| {
            frame.blocks.push(FrameBlock { block, position, crc: 0 });
        });
        if frame.blocks.len() < FRAME_BLOCKS_MAX {
            let room = FRAME_ENTRIES_MAX - frame.blocks.len();
            let mut take = |block, n, keep| frame.zeroes.push((block, n, keep));
            volume.ledger.gather_zeroes(room, blocks_end, &mut take);
        }
        if frame.blocks.is_empty() && frame.zeroes.is_empty() {
            return None;
        }
        closed.frames += 1;
        Some(frame)
    }

    /// The frame again, in another buffer: its blocks may have been moved or lost meanwhile.
    fn refresh_frame(&mut self, mut frame: Frame, buf: Buf) -> Frame {
        let index = self.ground.volume(frame.volume).ledger.closed_index().expect("a group is closed");
        frame.blocks.retain_mut(|part| match index.lookup(part.block) {
            Lookup::At(position) => {
                part.position = position;
                true
            }
            _ => false,
        });
        Frame { buf, reads: 0, bad: false, ..frame }
    }

    /// Reads a frame's blocks from the cache device, those that follow each other there at once.
    fn read_frame(&mut self, index: u32) {
        let frame = &mut self.frames[index];
        let positions = |i: usize| frame.blocks[i].position;
        let spans: Vec<_> =
            runs(frame.blocks.len(), positions).map(|(start, end)| (start, end, positions(start))).collect();
        let buf = frame.buf;
        frame.reads = spans.len() as u32;
        if spans.is_empty() {
            return self.seal_frame(index);
        }
        for (start, end, position) in spans {
            self.ground.space.pin(position);
            let buf = buf.slice(frame_bytes(start), (end - start) * BLOCK_BYTES);
            self.ground.base.out.read(
                Io::FrameRead { frame: index, start: start as u16, end: end as u16 },
                byte(position),
                buf,
            );
        }
    }

    pub(crate) fn frame_read_done(&mut self, index: u32, start: u16, end: u16, result: Result<(), IoError>) {
        let (first, id) = (self.frames[index].blocks[usize::from(start)].position, self.frames[index].volume);
        self.ground.space.unpin(first);
        let mut lost = Vec::new();
        let frame = &mut self.frames[index];
        for i in usize::from(start)..usize::from(end) {
            let FrameBlock { block, position, .. } = frame.blocks[i];
            let crc = crc32c(self.ground.base.arena.bytes(frame.buf.slice(frame_bytes(i), BLOCK_BYTES)));
            frame.blocks[i].crc = crc;
            let verifies = crc == self.ground.space.marks.crc(position);
            if result.is_err() || !verifies && !mutated!(SkipDrainCrc) {
                frame.bad = true;
                if frame.second {
                    lost.push((block, position));
                }
            }
        }
        frame.reads -= 1;
        for (block, position) in lost {
            self.ground.note_corrupt(id, position);
            self.ground.bad.report(BadCopy::of_anybody(id, block, position));
        }
        let frame = &mut self.frames[index];
        if frame.reads > 0 {
            return;
        }
        if frame.bad {
            // Once more, and then without what is lost. Where the blocks are has to be looked up again.
            frame.second = true;
            self.give_back_frame(index);
        } else {
            self.seal_frame(index);
        }
    }

    /// All blocks are in the buffer: the header goes in front of them, and the frame to the backend.
    fn seal_frame(&mut self, index: u32) {
        let frame = &self.frames[index];
        let id = frame.volume;
        let volume = self.ground.volume(id);
        let group = volume.groups.as_ref().and_then(|g| g.closed.as_ref()).expect("a group is closed").group;
        let name = FrameName {
            uuid: self.ground.base.geo.uuid,
            generation: volume.spec.generation,
            group,
            frame: frame.number,
        };
        let data = frame.blocks.iter().map(|part| Entry::new(EntryKind::Data, part.block, part.crc));
        let zeroes = frame.zeroes.iter().map(|&(block, n, keep)| {
            Entry::new(if keep { EntryKind::WriteZeroes } else { EntryKind::Discard }, block, n)
        });
        let header = frame.buf.slice(0, BLOCK_BYTES);
        encode_header(self.ground.base.arena.bytes_mut(header), name, data.chain(zeroes));
        self.when_stable(id, Deferred::Frame(index));
    }

    /// A frame whose content the log holds on stable media goes to the backend.
    pub(crate) fn send_frame(&mut self, index: u32) {
        let frame = &self.frames[index];
        let (id, number) = (frame.volume, frame.number);
        let buf = frame.buf.slice(0, frame_bytes(frame.blocks.len()));
        let group = self.closed_mut(id).group;
        self.ground.volume_mut(id).drain_writes += 1;
        self.ground.backend(
            Io::FrameWrite { frame: index },
            id,
            BackendOp::RedoWrite { group, frame: number, buf },
        );
    }

    pub(crate) fn frame_write_done(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let id = self.frames[index].volume;
        self.ground.volume_mut(id).drain_writes -= 1;
        self.ground.note_backend_result(now, id, result);
        if result.is_err() {
            return self.give_back_frame(index);
        }
        let frame = self.frames.remove(index);
        let bytes = frame_bytes(frame.blocks.len());
        self.ground.base.pools.drain.give(frame.buf);
        let volume = self.ground.volume_mut(id);
        volume.drain_in_flight -= 1;
        volume.count.redo_bytes += bytes as u64;
        self.closed_mut(id).in_flight -= 1;
    }

    /// The frame is to be made again.
    pub(crate) fn give_back_frame(&mut self, index: u32) {
        let frame = self.frames.remove(index);
        if !mutated!(FailedFrameKeepsBuffer) {
            self.ground.base.pools.drain.give(frame.buf);
        }
        let id = frame.volume;
        self.ground.volume_mut(id).drain_in_flight -= 1;
        let closed = self.closed_mut(id);
        closed.in_flight -= 1;
        closed.again.push(frame);
    }
}
