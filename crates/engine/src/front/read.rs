//! Reads: from the cache device, from the backend, and the admission of what was missing.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::flight::Io;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::util::Slab;
use crate::blocks::arriving::WaitingRead;
use crate::blocks::index::{Lookup, Position};
use crate::blocks::parent::Found;
use crate::engine::Engine;
use crate::format::{byte, crc32c};
use std::collections::{BTreeMap, VecDeque};

/// Reads of clients in flight to the cache device. Enough for any SSD, and few beside what a device queues: a write of the log does not
/// wait behind all that clients may ask for.
pub(crate) const DEVICE_READS_MAX: usize = 64;
/// Those of one volume while clients of other volumes are there: what these ask for waits for few of them. Enough for most of what an SSD
/// gives.
pub(crate) const DEVICE_READS_BESIDE_OTHERS_MAX: usize = 16;
/// The clients of a volume are alone after so many requests without one of another volume.
const REQUESTS_ALONE: u32 = 4096;

/// Reads of clients that wait for the cache device, by the volumes that they are of, which take turns.
pub(crate) struct DeviceReads {
    volumes: BTreeMap<VolumeId, ReadsOfVolume>,
    /// Volumes of which one waits; the first one is next. At most [`DEVICE_READS_MAX`] / [`DEVICE_READS_BESIDE_OTHERS_MAX`] of them have
    /// all in flight that they may.
    turns: VecDeque<VolumeId>,
    in_flight: Slab<CachedRead>,
    in_flight_count: usize,
    /// The volume that was asked for something last, and how many requests in a row were for it.
    asked: Option<VolumeId>,
    in_a_row: u32,
}

#[derive(Debug, Default)]
struct ReadsOfVolume {
    waiting: VecDeque<CachedRead>,
    in_flight: usize,
}

impl DeviceReads {
    pub(crate) fn new() -> DeviceReads {
        DeviceReads {
            volumes: BTreeMap::new(),
            turns: VecDeque::new(),
            in_flight: Slab::with_capacity(DEVICE_READS_MAX),
            in_flight_count: 0,
            asked: None,
            in_a_row: 0,
        }
    }

    /// A client asks for something of a volume.
    pub(crate) fn note_request(&mut self, of: VolumeId) {
        let again = self.asked.replace(of) == Some(of);
        self.in_a_row = if again { self.in_a_row.saturating_add(1) } else { 1 };
    }

    fn push(&mut self, of: VolumeId, read: CachedRead) {
        let waiting = &mut self.volumes.entry(of).or_default().waiting;
        if waiting.is_empty() {
            self.turns.push_back(of);
        }
        waiting.push_back(read);
    }

    /// Begins the next one, if that can be; tells its name too.
    fn begin(&mut self) -> Option<(u32, CachedRead)> {
        if self.in_flight_count == DEVICE_READS_MAX {
            return None;
        }
        let alone = self.in_a_row >= REQUESTS_ALONE;
        let of_one_max = if alone { DEVICE_READS_MAX } else { DEVICE_READS_BESIDE_OTHERS_MAX };
        let next = self.turns.iter().position(|of| self.volumes[of].in_flight < of_one_max)?;
        let of = self.turns.remove(next)?;
        let reads = self.volumes.get_mut(&of)?;
        let read = reads.waiting.pop_front()?;
        if !reads.waiting.is_empty() {
            self.turns.push_back(of);
        }
        reads.in_flight += 1;
        self.in_flight_count += 1;
        Some((self.in_flight.insert(read), read))
    }

    /// The device has answered one, for a request of the volume that `volume_of` tells of its operation.
    fn end(&mut self, index: u32, volume_of: impl Fn(OpId) -> VolumeId) -> CachedRead {
        let read = self.in_flight.remove(index);
        self.in_flight_count -= 1;
        let reads = self.volumes.get_mut(&volume_of(read.op)).expect("one of its reads was in flight");
        reads.in_flight -= 1;
        read
    }
}

/// A stretch of a request that is being read from the cache device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedRead {
    pub(crate) op: OpId,
    /// The volume that has it: that of the operation, or a parent of it.
    pub(crate) volume: VolumeId,
    pub(crate) block: u64,
    pub(crate) blocks: u32,
    pub(crate) position: Position,
    pub(crate) buf: Buf,
    /// The device has been asked a second time.
    pub(crate) again: bool,
}

/// A stretch of a request that is being read from the backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MissRead {
    pub(crate) op: OpId,
    /// The volume whose image is read: that of the operation, or a parent of it.
    pub(crate) volume: VolumeId,
    pub(crate) block: u64,
    pub(crate) buf: Buf,
    /// Identifies this read in [`Arriving`].
    pub(crate) fill: u32,
}

impl Engine {
    /// Begins a read or a prefetch.
    pub(crate) fn start_read(&mut self, id: OpId) {
        let op = self.ops[id];
        let buf = op.request.buf.expect("a read has a buffer");
        self.ops[id].waiting += 1; // Held until all stretches are started.
        self.read_blocks(id, op.first_block, op.blocks as u32, buf);
        self.ops[id].waiting -= 1;
        self.read_progress(id);
    }

    /// Something that an operation has waited for is over, and whatever came of that has been begun.
    pub(crate) fn read_is_nearer(&mut self, id: OpId) {
        self.ops[id].waiting -= 1;
        self.read_progress(id);
    }

    /// One stretch less to wait for.
    fn read_progress(&mut self, id: OpId) {
        let op = &self.ops[id];
        if op.waiting > 0 {
            return;
        }
        match op.request.op {
            Op::Read | Op::Prefetch | Op::Block { .. } => {
                let result = op.error.map_or(Ok(()), Err);
                self.complete(id, result);
            }
            _ => {
                let vid = op.request.volume;
                self.ground.volume_mut(vid).recheck = true;
            }
        }
    }

    /// Reads `blocks` blocks for an operation into `buf`.
    pub(crate) fn read_blocks(&mut self, id: OpId, first: u64, blocks: u32, buf: Buf) {
        let vid = self.ops[id].request.volume;
        let mut at = 0;
        while at < blocks {
            let block = first + u64::from(at);
            let Found { volume: source, lookup, hole, blocks: n } = self.find(vid, block, blocks - at);
            let part = buf.slice(at as usize * BLOCK_BYTES, n as usize * BLOCK_BYTES);
            match lookup {
                Lookup::At(_) if self.ops[id].request.op == Op::Prefetch => {}
                Lookup::At(position) => {
                    self.ground.volume_mut(vid).count.hit_blocks += u64::from(n);
                    (position..position + n).for_each(|p| self.ground.space.marks.touch(p));
                    self.ground.volume_mut(vid).count.parent_blocks +=
                        if source == vid { 0 } else { u64::from(n) };
                    self.read_cached(CachedRead {
                        op: id,
                        volume: source,
                        block,
                        blocks: n,
                        position,
                        buf: part,
                        again: false,
                    });
                }
                Lookup::Zero => {
                    self.ground.volume_mut(vid).count.hit_blocks += u64::from(n);
                    self.ground.base.arena.bytes_mut(part).fill(0);
                }
                Lookup::Lost => self.ops[id].error = Some(RequestError::Io),
                Lookup::Absent if hole => {
                    self.ground.volume_mut(vid).count.hole_blocks += u64::from(n);
                    self.ground.base.arena.bytes_mut(part).fill(0);
                }
                Lookup::Absent => self.read_missing(id, source, block, n, part),
            }
            at += n;
        }
    }

    /// Reads blocks that are not cached from an image, those that nobody is fetching already.
    fn read_missing(&mut self, op: OpId, volume: VolumeId, block: u64, blocks: u32, buf: Buf) {
        let mut at = 0;
        while at < blocks {
            let block = block + u64::from(at);
            let (pending, n) = self.ground.arriving.run(volume, block, blocks - at);
            let buf = buf.slice(at as usize * BLOCK_BYTES, n as usize * BLOCK_BYTES);
            if pending {
                self.ops[op].waiting += 1;
                self.ground.arriving.wait(WaitingRead::new(op, volume, block, n, buf));
            } else {
                self.read_image(op, volume, block, buf, true);
            }
            at += n;
        }
    }

    /// Goes on with reads for which somebody else has fetched what they want, or has failed to.
    pub(crate) fn pump_waiting_reads(&mut self) {
        if !self.ground.arriving.take_arrived() {
            return;
        }
        let mut at = 0;
        while let Some(read) = self.ground.arriving.next_arrived(&mut at) {
            self.read_after_waiting(read);
            self.read_is_nearer(read.op());
        }
    }

    /// What has been waited for in vain is not waited for again.
    fn read_after_waiting(&mut self, read: WaitingRead) {
        let (op, block, blocks, buf) = (read.op(), read.block(), read.blocks(), read.buf());
        let found = self.find(self.ops[op].request.volume, block, blocks);
        let (source, absent) = (found.volume, found.lookup == Lookup::Absent && !found.hole);
        let direct = if absent { found.blocks } else { 0 };
        let (first, rest) = (direct as usize * BLOCK_BYTES, (blocks - direct) as usize * BLOCK_BYTES);
        if direct > 0 {
            self.read_image(op, source, block, buf.slice(0, first), true);
        }
        if rest > 0 {
            self.read_blocks(op, block + u64::from(direct), blocks - direct, buf.slice(first, rest));
        }
    }

    pub(crate) fn read_cached(&mut self, read: CachedRead) {
        self.ground.space.pin(read.position);
        let op = &mut self.ops[read.op];
        op.waiting += 1;
        self.device_reads.push(op.request.volume, read);
        self.begin_device_reads();
    }

    /// Begins as many reads of the cache device as may be in flight.
    fn begin_device_reads(&mut self) {
        while let Some((index, read)) = self.device_reads.begin() {
            self.ground.base.out.read(Io::Cached(index), byte(read.position), read.buf);
        }
    }

    /// `absent`: the blocks are not in the volume's index, so that they may be admitted when they arrive.
    fn read_image(&mut self, id: OpId, source: VolumeId, block: u64, buf: Buf, absent: bool) {
        let vid = self.ops[id].request.volume;
        let blocks = buf.len / BLOCK_BYTES as u32;
        let fill = if absent {
            self.register_fill(source, block, blocks)
        } else {
            self.ground.arriving.take_number()
        };
        let count = &mut self.ground.volume_mut(vid).count;
        count.miss_blocks += u64::from(blocks);
        count.parent_blocks += if source == vid { 0 } else { u64::from(blocks) };
        self.ops[id].waiting += 1;
        let offset = block * BLOCK_BYTES as u64;
        let miss = self.misses.insert(MissRead { op: id, volume: source, block, buf, fill });
        self.ground.backend(Io::Miss(miss), source, BackendOp::Read { offset, buf });
    }

    /// Notes that a read is fetching blocks that may be admitted when they arrive.
    fn register_fill(&mut self, vid: VolumeId, block: u64, blocks: u32) -> u32 {
        let fill = self.ground.arriving.take_number();
        let volume = self.ground.volume_mut(vid);
        let end = block + u64::from(blocks);
        if volume.mode == Mode::Off || volume.locked_by(block, end, OpId::MAX).is_some() {
            volume.count.bypass_mode_blocks += u64::from(blocks);
        } else if self.ground.base.dead || !self.ground.arriving.has_room(blocks) {
            self.ground.volume_mut(vid).count.bypass_no_room_blocks += u64::from(blocks);
        } else {
            for b in block..end {
                self.ground.arriving.begin(vid, b, fill);
            }
        }
        fill
    }

    pub(crate) fn cached_done(&mut self, index: u32, result: Result<(), IoError>) {
        let ops = &self.ops;
        let read = self.device_reads.end(index, |op| ops[op].request.volume);
        self.begin_device_reads();
        self.ground.space.unpin(read.position);
        let vid = read.volume;
        for i in 0..read.blocks {
            let part = read.buf.slice(i as usize * BLOCK_BYTES, BLOCK_BYTES);
            let good = result.is_ok()
                && (mutated!(SkipReadCrc)
                    || crc32c(self.ground.base.arena.bytes(part))
                        == self.ground.space.marks.crc(read.position + i));
            if !good {
                self.bad_block(vid, read, i, part);
            }
        }
        self.read_is_nearer(read.op);
    }

    /// A cached block does not verify: fetched again when it is clean. If it is not, the peer may have a good copy; else it is
    /// lost.
    fn bad_block(&mut self, vid: VolumeId, read: CachedRead, i: u32, part: Buf) {
        let (block, position) = (read.block + u64::from(i), read.position + i);
        if matches!(self.ops[read.op].request.op, Op::Block { .. }) {
            // It is the owner's to decide what is lost.
            match read.again {
                true => self.ops[read.op].error = Some(RequestError::Io),
                false => self.read_cached(CachedRead { again: true, ..read }),
            }
            return;
        }
        let current = self.ground.volume(vid).ledger.index().lookup(block) == Lookup::At(position);
        if current && self.ground.space.marks.is_dirty(position) {
            if read.again {
                self.ground.note_corrupt(vid, position);
                if self.repair(vid, block, position) {
                    return self.wait_for_repair(read, block, part);
                }
                self.ground.lose_for_good(vid, block, position);
                self.ops[read.op].error = Some(RequestError::Io);
            } else {
                // The only copy: it may have been the transfer and not the medium.
                self.read_cached(CachedRead { block, blocks: 1, position, buf: part, again: true, ..read });
            }
            return;
        }
        if current {
            self.ground.volume_mut(vid).count.corrupt_blocks += 1;
            self.ground.forget_blocks(vid, block, 1);
        }
        // Whatever is current now (the backend, or a newer write) is read instead.
        self.read_blocks(read.op, block, 1, part);
    }

    pub(crate) fn miss_done(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let read = self.misses.remove(index);
        let (source, own) = (read.volume, self.ops[read.op].request.volume);
        self.ground.note_backend_result(now, source, result);
        match result {
            Ok(()) => {
                let what = (source, read.block, read.fill);
                self.cache.admit(&mut self.ground, now, what, read.buf);
            }
            Err(_) => {
                self.ground.settle_read(source, read.block, read.buf.len, read.fill);
                if source == own {
                    self.ops[read.op].error = Some(RequestError::Io);
                } else {
                    // The clone's image gives what its parent has, too. The clone may have been written meanwhile.
                    self.read_image(read.op, own, read.block, read.buf, false);
                }
            }
        }
        self.read_is_nearer(read.op);
    }
}
