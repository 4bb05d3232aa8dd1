//! Reads: from the cache device and from images.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::flight::{Io, OpId};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::blocks::arriving::WaitingRead;
use crate::blocks::index::{Lookup, Position};
use crate::format::{byte, crc32c};
use crate::front::Front;
use crate::front::device_reads::CachedRead;
use crate::ground::Ground;

/// A stretch of a request that is being read from the backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct MissRead {
    op: OpId,
    /// The volume whose image is read: that of the operation, or a parent of it.
    volume: VolumeId,
    block: u64,
    buf: Buf,
    /// Its number among the reads that bring blocks into the read cache.
    number: u32,
}

/// A dirty block of a read that does not verify, also when it was read again. The operation waits
/// for what becomes of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BadRead {
    op: OpId,
    volume: VolumeId,
    block: u64,
    position: Position,
    buf: Buf,
}

impl BadRead {
    pub(crate) fn op(&self) -> OpId {
        self.op
    }

    /// The volume that has the block: that of the operation, or a parent of it.
    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn position(&self) -> Position {
        self.position
    }

    pub(crate) fn buf(&self) -> Buf {
        self.buf
    }
}

/// What a read of an image has brought.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    op: OpId,
    volume: VolumeId,
    block: u64,
    buf: Buf,
    number: u32,
}

impl Arrived {
    pub(crate) fn op(&self) -> OpId {
        self.op
    }

    /// The volume whose image was read, the first block, and the number of the read.
    pub(crate) fn place(&self) -> (VolumeId, u64, u32) {
        (self.volume, self.block, self.number)
    }

    pub(crate) fn buf(&self) -> Buf {
        self.buf
    }
}

impl Front {
    /// Begins a read or a prefetch.
    pub(crate) fn start_read(&mut self, ground: &mut Ground, id: OpId) {
        let op = &mut self.ops[id];
        let (first, buf) = (op.first_block, op.request.buf.expect("a read has a buffer"));
        op.waiting += 1; // Held until all stretches are started.
        let buf = buf.slice(0, op.blocks as usize * BLOCK_BYTES);
        self.read_blocks(ground, id, first, buf);
        self.is_nearer(ground, id);
    }

    /// A peer whose copy this is asked for a block: reads it, if it is the one that is meant.
    pub(crate) fn start_block(&mut self, ground: &mut Ground, id: OpId, crc: u32) {
        let op = &self.ops[id];
        let (volume, block) = (op.request.volume, op.first_block);
        match ground.volume(volume).ledger().index().lookup(block) {
            Lookup::At(position)
                if op.blocks == 1
                    && ground.marks().crc(position) == crc
                    && !mutated!(BlockNotGiven) =>
            {
                let buf = op.request.buf.expect("a read has a buffer");
                self.read_cached(
                    ground,
                    CachedRead { op: id, volume, block, position, buf, again: false },
                );
            }
            _ => self.complete(ground, id, Err(RequestError::Invalid)),
        }
    }

    /// Something that an operation has waited for is over, and whatever came of that has been
    /// begun.
    pub(crate) fn is_nearer(&mut self, ground: &mut Ground, id: OpId) {
        let op = &mut self.ops[id];
        op.waiting -= 1;
        if op.waiting > 0 {
            return;
        }
        match op.request.op {
            Op::Read | Op::Prefetch | Op::Block { .. } => {
                let result = op.error.map_or(Ok(()), Err);
                self.complete(ground, id, result);
            }
            _ => ground.volume_mut(op.request.volume).recheck(),
        }
    }

    /// A block of an operation cannot be read.
    pub(crate) fn fail_read(&mut self, id: OpId) {
        self.ops[id].error = Some(RequestError::Io);
    }

    /// Reads blocks from `first` on for an operation; they fill `buf`.
    pub(crate) fn read_blocks(&mut self, ground: &mut Ground, id: OpId, first: u64, buf: Buf) {
        let vid = self.ops[id].request.volume;
        let prefetch = self.ops[id].request.op == Op::Prefetch;
        let blocks = buf.len / BLOCK_BYTES as u32;
        let mut at = 0;
        while at < blocks {
            let block = first + u64::from(at);
            let found = ground.find(vid, block, blocks - at);
            let (source, n) = (found.volume(), found.blocks());
            let part = buf.slice(at as usize * BLOCK_BYTES, n as usize * BLOCK_BYTES);
            let count = ground.volume_mut(vid).count_mut();
            match found.lookup() {
                Lookup::At(_) if prefetch => {}
                Lookup::At(position) => {
                    count.hit_blocks += u64::from(n);
                    count.parent_blocks += if source == vid { 0 } else { u64::from(n) };
                    (position..position + n).for_each(|p| ground.space_mut().touch(p));
                    if !is_read_from_memory(ground, position, part) {
                        let (volume, again) = (source, false);
                        self.read_cached(
                            ground,
                            CachedRead { op: id, volume, block, position, buf: part, again },
                        );
                    }
                }
                Lookup::Zero => {
                    count.hit_blocks += u64::from(n);
                    ground.bytes_mut(part).fill(0);
                }
                Lookup::Lost => self.fail_read(id),
                Lookup::Absent if found.is_hole() => {
                    count.hole_blocks += u64::from(n);
                    ground.bytes_mut(part).fill(0);
                }
                Lookup::Absent => self.read_missing(ground, id, (source, block), part),
            }
            at += n;
        }
    }

    /// Reads blocks that are not cached from an image, those that nobody is fetching already.
    fn read_missing(
        &mut self,
        ground: &mut Ground,
        op: OpId,
        (volume, block): (VolumeId, u64),
        buf: Buf,
    ) {
        let blocks = buf.len / BLOCK_BYTES as u32;
        let mut at = 0;
        while at < blocks {
            let block = block + u64::from(at);
            let (pending, n) = ground.arriving().run(volume, block, blocks - at);
            let buf = buf.slice(at as usize * BLOCK_BYTES, n as usize * BLOCK_BYTES);
            if pending {
                self.ops[op].waiting += 1;
                ground.arriving_mut().wait(WaitingRead::new(op, volume, block, n, buf));
            } else {
                self.read_image(ground, op, (volume, block), buf, true);
            }
            at += n;
        }
    }

    /// Goes on with reads for which somebody else has fetched what they want, or has failed to.
    pub(crate) fn wake_reads(&mut self, ground: &mut Ground) {
        if !ground.arriving_mut().take_arrived() {
            return;
        }
        let mut at = 0;
        while let Some(read) = ground.arriving_mut().next_arrived(&mut at) {
            self.read_after_waiting(ground, read);
            self.is_nearer(ground, read.op());
        }
    }

    /// What has been waited for in vain is not waited for again.
    fn read_after_waiting(&mut self, ground: &mut Ground, read: WaitingRead) {
        let (op, block, blocks, buf) = (read.op(), read.block(), read.blocks(), read.buf());
        let found = ground.find(self.ops[op].request.volume, block, blocks);
        let absent = found.lookup() == Lookup::Absent && !found.is_hole();
        let direct = if absent { found.blocks() } else { 0 };
        let (first, rest) =
            (direct as usize * BLOCK_BYTES, (blocks - direct) as usize * BLOCK_BYTES);
        if direct > 0 {
            self.read_image(ground, op, (found.volume(), block), buf.slice(0, first), true);
        }
        if rest > 0 {
            self.read_blocks(ground, op, block + u64::from(direct), buf.slice(first, rest));
        }
    }

    fn read_cached(&mut self, ground: &mut Ground, read: CachedRead) {
        ground.space_mut().pin(read.position);
        let op = &mut self.ops[read.op];
        op.waiting += 1;
        self.reads.push(op.request.volume, read);
        self.begin_device_reads(ground);
    }

    /// Begins as many reads of the cache device as may be in flight.
    fn begin_device_reads(&mut self, ground: &mut Ground) {
        while let Some((index, read)) = self.reads.begin() {
            ground.read(Io::Cached(index), byte(read.position), read.buf);
        }
    }

    /// `absent`: the blocks are not in the volume's index, so that they may be admitted when they
    /// arrive.
    fn read_image(
        &mut self,
        ground: &mut Ground,
        id: OpId,
        (volume, block): (VolumeId, u64),
        buf: Buf,
        absent: bool,
    ) {
        let vid = self.ops[id].request.volume;
        let blocks = buf.len / BLOCK_BYTES as u32;
        let number = ground.arriving_mut().take_number();
        if absent {
            self.announce(ground, (volume, block), blocks, number);
        }
        let count = ground.volume_mut(vid).count_mut();
        count.miss_blocks += u64::from(blocks);
        count.parent_blocks += if volume == vid { 0 } else { u64::from(blocks) };
        self.ops[id].waiting += 1;
        let miss = self.misses.insert(MissRead { op: id, volume, block, buf, number });
        let offset = block * BLOCK_BYTES as u64;
        ground.backend(Io::Miss(miss), volume, BackendOp::Read { offset, buf });
    }

    /// Notes that a read is fetching blocks that may be admitted when they arrive.
    fn announce(
        &self,
        ground: &mut Ground,
        (id, block): (VolumeId, u64),
        blocks: u32,
        number: u32,
    ) {
        let end = block + u64::from(blocks);
        let locked = self.volumes.of(id).locked_by(block, end, OpId::MAX).is_some();
        let full = ground.is_dead() || !ground.arriving().has_room(blocks);
        let volume = ground.volume_mut(id);
        if volume.mode() == Mode::Off || locked {
            volume.count_mut().bypass_mode_blocks += u64::from(blocks);
        } else if full {
            volume.count_mut().bypass_no_room_blocks += u64::from(blocks);
        } else {
            (block..end).for_each(|block| ground.arriving_mut().begin(id, block, number));
        }
    }

    /// The device has answered a read. What is bad of it is told by [`Front::next_bad_read`]; then
    /// [`Front::is_nearer`] is due for the operation, which is returned.
    pub(crate) fn cached_done(
        &mut self,
        ground: &mut Ground,
        index: u32,
        result: Result<(), IoError>,
    ) -> OpId {
        let ops = &self.ops;
        let read = self.reads.end(index, |op| ops[op].request.volume);
        self.begin_device_reads(ground);
        ground.space_mut().unpin(read.position);
        for i in 0..read.buf.len / BLOCK_BYTES as u32 {
            let part = read.buf.slice(i as usize * BLOCK_BYTES, BLOCK_BYTES);
            let position = read.position + i;
            let crc = ground.marks().crc(position);
            let verifies = mutated!(SkipReadCrc) || crc32c(ground.bytes(part)) == crc;
            if result.is_err() || !verifies {
                let block = read.block + u64::from(i);
                self.bad_block(ground, read, CachedRead { block, position, buf: part, ..read });
            }
        }
        read.op
    }

    /// The next bad block of a read whose repair or loss is to be decided.
    pub(crate) fn next_bad_read(&mut self) -> Option<BadRead> {
        self.bad.pop_front()
    }

    /// A cached block of a read does not verify: fetched again when it is clean. If it is not, the
    /// peer may have a good copy; else it is lost.
    fn bad_block(&mut self, ground: &mut Ground, read: CachedRead, bad: CachedRead) {
        let CachedRead { op, volume, block, position, buf, again } = bad;
        if matches!(self.ops[op].request.op, Op::Block { .. }) {
            // It is the owner's to decide what is lost.
            match again {
                true => self.fail_read(op),
                false => self.read_cached(ground, CachedRead { again: true, ..read }),
            }
            return;
        }
        let current = ground.volume(volume).ledger().index().lookup(block) == Lookup::At(position);
        if current && ground.marks().is_dirty(position) {
            if again {
                ground.note_corrupt(volume, position);
                self.ops[op].waiting += 1;
                self.bad.push_back(BadRead { op, volume, block, position, buf });
            } else {
                // The only copy: it may have been the transfer and not the medium.
                self.read_cached(ground, CachedRead { again: true, ..bad });
            }
            return;
        }
        if current {
            ground.volume_mut(volume).count_mut().corrupt_blocks += 1;
            ground.forget_blocks(volume, block, 1);
        }
        // Whatever is current now (the backend, or a newer write) is read instead.
        self.read_blocks(ground, op, block, buf);
    }

    /// The backend has answered a read. What it has brought may be admitted; then
    /// [`Front::is_nearer`] is due for the operation. `Err` has the operation where it has brought
    /// nothing.
    pub(crate) fn miss_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        index: u32,
        result: Result<(), IoError>,
    ) -> Result<Arrived, OpId> {
        let MissRead { op, volume, block, buf, number } = self.misses.remove(index);
        let own = self.ops[op].request.volume;
        ground.note_backend_result(now, volume, result);
        if result.is_ok() {
            return Ok(Arrived { op, volume, block, buf, number });
        }
        ground.settle_read(volume, block, buf.len, number);
        if volume == own {
            self.fail_read(op);
        } else {
            // The clone's image gives what its parent has, too. The clone may have been written
            // meanwhile.
            self.read_image(ground, op, (own, block), buf, false);
        }
        Err(op)
    }
}

/// Copies blocks from the newest segments of the log, if they are there and verify.
fn is_read_from_memory(ground: &mut Ground, position: Position, buf: Buf) -> bool {
    let blocks = buf.len as usize / BLOCK_BYTES;
    let Some(from) = ground.mirrored(position, blocks) else { return false };
    ground.copy(from, buf);
    (0..blocks).all(|i| {
        let part = buf.slice(i * BLOCK_BYTES, BLOCK_BYTES);
        let crc = ground.marks().crc(position + i as u32);
        mutated!(SkipReadCrc) || crc32c(ground.bytes(part)) == crc
    })
}
