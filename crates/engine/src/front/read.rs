//! Reads: from the cache device, from the backend, and the admission of what was missing.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, Op, RequestError, VolumeId};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::BUFFERS_FOR_MOVES;
use crate::base::util::FixedMap;
use crate::blocks::index::{Lookup, Position};
use crate::blocks::parent::Found;
use crate::control::volume::OpId;
use crate::engine::{Engine, Io};
use crate::format::{RecordKind, Stream, byte, crc32c};
use crate::log::{Builder, Built, BuiltEntry, RecordFields, copy_block};
use std::collections::{BTreeMap, VecDeque};

/// Most blocks that are on their way into the read cache; beyond, misses are not admitted.
const FILLS_MAX: usize = 16 * 1024;
/// How long admitted blocks wait for company before they are written.
const FILL_DELAY_NS: Nanos = 20_000_000;
/// A fill append with this many blocks is written at once.
const FILL_BLOCKS_FULL: usize = 96;

/// Reads of clients in flight to the cache device. Enough for any SSD, and few beside what a device queues: a write of the log does not
/// wait behind all that clients may ask for.
pub(crate) const DEVICE_READS_MAX: usize = 64;
/// Those of one volume while clients of other volumes are there: what these ask for waits for few of them. Enough for most of what an SSD
/// gives.
pub(crate) const DEVICE_READS_BESIDE_OTHERS_MAX: usize = 16;
/// The clients of a volume are alone after so many requests without one of another volume.
const REQUESTS_ALONE: u32 = 4096;

/// Reads of clients that wait for the cache device, by the volumes that they are of, which take turns.
#[derive(Debug, Default)]
pub(crate) struct DeviceReads {
    volumes: BTreeMap<VolumeId, ReadsOfVolume>,
    /// Volumes of which one waits; the first one is next. At most [`DEVICE_READS_MAX`] / [`DEVICE_READS_BESIDE_OTHERS_MAX`] of them have
    /// all in flight that they may.
    turns: VecDeque<VolumeId>,
    in_flight: usize,
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

    /// The next one, if it can be begun.
    fn pop(&mut self) -> Option<CachedRead> {
        if self.in_flight == DEVICE_READS_MAX {
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
        self.in_flight += 1;
        Some(read)
    }

    fn ended(&mut self, of: VolumeId) {
        self.in_flight -= 1;
        let reads = self.volumes.get_mut(&of).expect("one of its reads was in flight");
        reads.in_flight -= 1;
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
    /// Identifies this read in [`Fills::pending`].
    pub(crate) fill: u32,
}

/// A stretch of a request whose first block is on its way into the read cache already: it waits for that instead of
/// fetching the block a second time.
#[derive(Debug, Clone, Copy)]
struct WaitingRead {
    op: OpId,
    /// As in [`MissRead`].
    volume: VolumeId,
    block: u64,
    blocks: u32,
    buf: Buf,
}

/// Blocks on their way from the backend into the read cache.
pub(crate) struct Fills {
    /// Which read or staged copy is going to bring a block. A change of the block takes it out: the
    /// bytes that are on their way are then not the newest any more.
    pending: FixedMap<(VolumeId, u64), u32>,
    /// The number of the next read or staged copy. It may wrap: only what is pending must differ.
    next: u32,
    /// Appends being filled, by stream: newcomers and blocks that the ghost remembers.
    open: [Option<Builder>; 3],
    since: Nanos,
    /// The volume whose record is open, by stream.
    record: [Option<VolumeId>; 3],
    waiting: Vec<WaitingRead>,
    /// Something that reads may be waiting for is not pending any more.
    arrived: bool,
    /// A read waits for something that is in an open append.
    wanted: bool,
}

impl Fills {
    pub(crate) fn new() -> Fills {
        let mut pending = FixedMap::default();
        pending.reserve(FILLS_MAX);
        let open = [None, None, None];
        let waiting = Vec::with_capacity(256);
        Fills { pending, next: 1, open, since: 0, record: [None; 3], waiting, arrived: false, wanted: false }
    }

    /// Nothing brings anything into the read cache any more; who has waited for it looks elsewhere.
    pub(crate) fn abandon(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        *self = Fills { waiting, arrived: true, ..Fills::new() };
    }

    /// Reads that have waited for a block can go on.
    pub(crate) fn wakes(&self) -> bool {
        self.arrived && !self.waiting.is_empty()
    }

    /// The block is in the read cache, or is not going to be.
    fn settle(&mut self, id: VolumeId, block: u64) {
        self.arrived |= self.pending.remove(&(id, block)).is_some();
    }

    /// Whether a read waits for a block.
    fn waited_for(&self, id: VolumeId, block: u64) -> bool {
        self.waiting.iter().any(|read| (read.volume, read.block) == (id, block))
    }

    /// Whether a block is on its way, and how many of the `n` from it on are like it.
    fn pending_run(&self, id: VolumeId, block: u64, n: u32) -> (bool, u32) {
        let pending = |i: u32| self.pending.contains_key(&(id, block + u64::from(i)));
        let first = !self.pending.is_empty() && pending(0);
        let like = |&i: &u32| !self.pending.is_empty() && pending(i) == first;
        let len = if self.pending.is_empty() { n } else { (0..n).take_while(like).count() as u32 };
        (first, len)
    }

    fn take_number(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    pub(crate) fn has_open(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }

    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.has_open().then_some(self.since + FILL_DELAY_NS)
    }
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
                self.volume_mut(vid).recheck = true;
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
                    self.volume_mut(vid).count.hit_blocks += u64::from(n);
                    (position..position + n).for_each(|p| self.space.marks.touch(p));
                    self.volume_mut(vid).count.parent_blocks += if source == vid { 0 } else { u64::from(n) };
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
                    self.volume_mut(vid).count.hit_blocks += u64::from(n);
                    self.arena.bytes_mut(part).fill(0);
                }
                Lookup::Lost => self.ops[id].error = Some(RequestError::Io),
                Lookup::Absent if hole => {
                    self.volume_mut(vid).count.hole_blocks += u64::from(n);
                    self.arena.bytes_mut(part).fill(0);
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
            let (pending, n) = self.fills.pending_run(volume, block, blocks - at);
            let buf = buf.slice(at as usize * BLOCK_BYTES, n as usize * BLOCK_BYTES);
            if pending {
                self.ops[op].waiting += 1;
                self.fills.waiting.push(WaitingRead { op, volume, block, blocks: n, buf });
                // It may be in an open append already.
                self.fills.wanted |= self.fills.has_open();
            } else {
                self.read_image(op, volume, block, buf, true);
            }
            at += n;
        }
    }

    /// Goes on with reads for which somebody else has fetched what they want, or has failed to.
    pub(crate) fn pump_waiting_reads(&mut self) {
        if !std::mem::take(&mut self.fills.arrived) {
            return;
        }
        let mut i = 0;
        while let Some(&read) = self.fills.waiting.get(i) {
            if self.fills.pending.contains_key(&(read.volume, read.block)) {
                i += 1;
                continue;
            }
            self.fills.waiting.swap_remove(i);
            self.read_after_waiting(read);
            self.read_is_nearer(read.op);
        }
    }

    /// What has been waited for in vain is not waited for again.
    fn read_after_waiting(&mut self, read: WaitingRead) {
        let WaitingRead { op, block, blocks, buf, .. } = read;
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
        self.space.pin(read.position);
        let op = &mut self.ops[read.op];
        op.waiting += 1;
        self.device_reads.push(op.request.volume, read);
        self.begin_device_reads();
    }

    /// Begins as many reads of the cache device as may be in flight.
    fn begin_device_reads(&mut self) {
        while let Some(read) = self.device_reads.pop() {
            self.out.read(Io::Cached(read), byte(read.position), read.buf);
        }
    }

    /// `absent`: the blocks are not in the volume's index, so that they may be admitted when they arrive.
    fn read_image(&mut self, id: OpId, source: VolumeId, block: u64, buf: Buf, absent: bool) {
        let vid = self.ops[id].request.volume;
        let blocks = buf.len / BLOCK_BYTES as u32;
        let fill = if absent { self.register_fill(source, block, blocks) } else { self.fills.take_number() };
        let count = &mut self.volume_mut(vid).count;
        count.miss_blocks += u64::from(blocks);
        count.parent_blocks += if source == vid { 0 } else { u64::from(blocks) };
        self.ops[id].waiting += 1;
        let offset = block * BLOCK_BYTES as u64;
        self.backend(
            Io::Miss(MissRead { op: id, volume: source, block, buf, fill }),
            source,
            BackendOp::Read { offset, buf },
        );
    }

    /// Notes that a read is fetching blocks that may be admitted when they arrive.
    fn register_fill(&mut self, vid: VolumeId, block: u64, blocks: u32) -> u32 {
        let fill = self.fills.take_number();
        let volume = self.volume_mut(vid);
        let end = block + u64::from(blocks);
        if volume.mode == Mode::Off || volume.locked_by(block, end, OpId::MAX).is_some() {
            volume.count.bypass_mode_blocks += u64::from(blocks);
        } else if self.dead || self.fills.pending.len() + blocks as usize > FILLS_MAX {
            self.volume_mut(vid).count.bypass_no_room_blocks += u64::from(blocks);
        } else {
            for b in block..end {
                self.fills.pending.entry((vid, b)).or_insert(fill);
            }
        }
        fill
    }

    /// The blocks have changed: what is on its way into the read cache is not the newest any more.
    /// Returns how many there were.
    pub(crate) fn cancel_fills(&mut self, vid: VolumeId, first: u64, blocks: u64) -> u64 {
        let pending = &mut self.fills.pending;
        if pending.is_empty() {
            return 0;
        }
        let before = pending.len();
        if blocks > pending.len() as u64 {
            pending.retain(|&(v, b), _| v != vid || b < first || b >= first + blocks);
        } else {
            for block in first..first + blocks {
                pending.remove(&(vid, block));
            }
        }
        let overtaken = (before - pending.len()) as u64;
        self.fills.arrived |= overtaken > 0;
        self.volume_mut(vid).count.bypass_overtaken_blocks += overtaken;
        overtaken
    }

    pub(crate) fn cached_done(&mut self, read: CachedRead, result: Result<(), IoError>) {
        self.device_reads.ended(self.ops[read.op].request.volume);
        self.begin_device_reads();
        self.space.unpin(read.position);
        let vid = read.volume;
        for i in 0..read.blocks {
            let part = read.buf.slice(i as usize * BLOCK_BYTES, BLOCK_BYTES);
            let good = result.is_ok()
                && (mutated!(SkipReadCrc)
                    || crc32c(self.arena.bytes(part)) == self.space.marks.crc(read.position + i));
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
        let current = self.volume(vid).ledger.index().lookup(block) == Lookup::At(position);
        if current && self.space.marks.is_dirty(position) {
            if read.again {
                self.note_corrupt(vid, position);
                if self.repair(vid, block, position) {
                    return self.wait_for_repair(read, block, part);
                }
                self.lose_for_good(vid, block, position);
                self.ops[read.op].error = Some(RequestError::Io);
            } else {
                // The only copy: it may have been the transfer and not the medium.
                self.read_cached(CachedRead { block, blocks: 1, position, buf: part, again: true, ..read });
            }
            return;
        }
        if current {
            self.volume_mut(vid).count.corrupt_blocks += 1;
            self.forget_blocks(vid, block, 1);
        }
        // Whatever is current now (the backend, or a newer write) is read instead.
        self.read_blocks(read.op, block, 1, part);
    }

    /// A dirty block has no good copy here; with none at the peer either it is lost.
    pub(crate) fn lose_block(&mut self, vid: VolumeId, block: u64, position: Position) {
        let current = self.volume(vid).ledger.index().lookup(block) == Lookup::At(position);
        if current && !self.repair(vid, block, position) {
            self.lose_for_good(vid, block, position);
        }
    }

    /// The only copy of a dirty block is lost: it reads EIO until it is overwritten.
    pub(crate) fn lose_for_good(&mut self, vid: VolumeId, block: u64, position: Position) {
        if self.volume(vid).ledger.index().lookup(block) != Lookup::At(position) {
            return;
        }
        let (volume, space) = self.volume_and_space(vid);
        volume.ledger.lose(space, block, position);
        if let Some(peer) = &mut volume.peer {
            peer.lost = true;
        }
        self.checkpoint.wanted = true;
        if self.dead {
            self.fail_volume(vid);
        }
    }

    /// Drops what the cache holds of a range, without a record that says so: a crash may bring it back
    /// until the next checkpoint.
    pub(crate) fn forget_blocks(&mut self, vid: VolumeId, first: u64, blocks: u64) {
        self.note_forgotten(vid);
        self.drop_blocks(vid, first, blocks);
    }

    pub(crate) fn note_forgotten(&mut self, vid: VolumeId) {
        let next = self.checkpoint.next_number();
        self.volume_mut(vid).forgotten_until = next;
    }

    /// Drops what the cache holds of a range, as a record says. Dirty blocks go too: the caller knows why.
    pub(crate) fn drop_blocks(&mut self, vid: VolumeId, first: u64, blocks: u64) {
        let (volume, space) = self.volume_and_space(vid);
        volume.ledger.forget(space, first, blocks);
    }

    pub(crate) fn miss_done(&mut self, now: Nanos, read: MissRead, result: Result<(), IoError>) {
        let (source, own) = (read.volume, self.ops[read.op].request.volume);
        self.note_backend_result(now, source, result);
        match result {
            Ok(()) => self.admit(now, source, read),
            Err(_) => {
                self.cancel_read_fills(source, read);
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

    fn cancel_read_fills(&mut self, vid: VolumeId, read: MissRead) {
        for block in read.block..read.block + u64::from(read.buf.len) / BLOCK_BYTES as u64 {
            if self.fills.pending.get(&(vid, block)) == Some(&read.fill) {
                self.fills.settle(vid, block);
            }
        }
    }

    /// Copies the blocks of a miss that nobody has changed meanwhile into the read cache's appends.
    fn admit(&mut self, now: Nanos, vid: VolumeId, read: MissRead) {
        if self.volume(vid).backend.is_dirty() {
            // The image may hold what a power loss takes back; a clean copy must not outlive that.
            let volume = self.volume_mut(vid);
            volume.backend.want_flush();
            volume.count.bypass_mode_blocks += u64::from(read.buf.len) / BLOCK_BYTES as u64;
            return self.cancel_read_fills(vid, read);
        }
        for i in 0..read.buf.len as usize / BLOCK_BYTES {
            let block = read.block + i as u64;
            if self.fills.pending.get(&(vid, block)) != Some(&read.fill) {
                continue;
            }
            let absent = self.volume(vid).ledger.index().lookup(block) == Lookup::Absent;
            let stream = if self.ghost.take(vid, block) { Stream::Main } else { Stream::Fill };
            let from = read.buf.slice(i * BLOCK_BYTES, BLOCK_BYTES);
            match if absent { self.stage_fill(now, vid, block, stream, from) } else { None } {
                Some(record) => {
                    self.fills.pending.insert((vid, block), record);
                    self.fills.wanted |= self.fills.waited_for(vid, block);
                }
                None => {
                    self.fills.settle(vid, block);
                    self.volume_mut(vid).count.bypass_no_room_blocks += u64::from(absent);
                }
            }
        }
    }

    /// Puts a block into the open append of a stream; returns the copy's number.
    fn stage_fill(
        &mut self,
        now: Nanos,
        vid: VolumeId,
        block: u64,
        stream: Stream,
        from: Buf,
    ) -> Option<u32> {
        let s = stream as usize;
        if let (Some(builder), Some(volume)) = (&self.fills.open[s], self.fills.record[s])
            && (volume != vid || !builder.has_room_for_entry())
        {
            self.end_fill_record(s);
        }
        if self.fills.open[s]
            .as_ref()
            .is_some_and(|b| self.fills.record[s].is_none() && !b.has_room_for_record())
        {
            self.issue_fill(s);
        }
        if self.fills.open[s].is_none() {
            // The last append buffers belong to the log.
            if self.pools.append.available() <= self.config.appends_in_flight + BUFFERS_FOR_MOVES {
                return None;
            }
            let buf = self.pools.append.take()?;
            match self.begin_append(stream, buf, (1, 1), false) {
                Ok(builder) => self.fills.open[s] = Some(builder),
                Err(buf) => {
                    self.pools.append.give(buf);
                    return None;
                }
            }
            self.fills.since = now;
        }
        let builder = self.fills.open[s].as_mut().expect("open by now");
        if self.fills.record[s].is_none() {
            builder.begin_record(vid, RecordKind::Fill);
            self.fills.record[s] = Some(vid);
        }
        let number = self.fills.take_number();
        let builder = self.fills.open[s].as_mut().expect("open by now");
        let to = builder.push_data(&self.space, block, 0, number);
        let crc = copy_block(&mut self.arena, from, to);
        builder.set_last_crc(crc);
        Some(number)
    }

    fn end_fill_record(&mut self, s: usize) {
        let Some(vid) = self.fills.record[s].take() else { return };
        let pending = &self.fills.pending;
        let builder = self.fills.open[s].as_mut().expect("a record is open in it");
        // What was overtaken since it was staged must not come back at replay.
        builder.void_entries(|block, number| pending.get(&(vid, block)) != Some(&number));
        let volume = self.volumes[vid.0 as usize].as_ref();
        let fields = RecordFields {
            generation: volume.map_or(0, |v| v.spec.generation),
            // Everything up to here had its say in whether the blocks were still wanted.
            sequence: volume.map_or(0, |v| v.log.published()),
            durable_sequence: volume.map_or(0, |v| v.log.durable()),
            chain: 0,
        };
        let builder = self.fills.open[s].as_mut().expect("a record is open in it");
        builder.end_record(&mut self.arena, &self.space, self.checkpoint.durable, fields);
    }

    fn issue_fill(&mut self, s: usize) {
        self.end_fill_record(s);
        self.fills.wanted &=
            self.fills.open.iter().enumerate().any(|(other, open)| other != s && open.is_some());
        if let Some(builder) = self.fills.open[s].take() {
            self.issue_append(builder, false);
        }
    }

    /// Writes the open fill appends that are full enough or have waited long enough.
    pub(crate) fn pump_fills(&mut self, now: Nanos, all: bool) {
        for s in 0..self.fills.open.len() {
            let Some(builder) = &self.fills.open[s] else { continue };
            let due = all
                || now >= self.fills.since + FILL_DELAY_NS
                || builder.append.entries.len() >= FILL_BLOCKS_FULL
                || self.fills.wanted;
            if due {
                self.issue_fill(s);
            }
        }
    }

    /// Writes the open append of a stream because somebody else wants to append to it.
    pub(crate) fn yield_stream(&mut self, stream: Stream) {
        self.issue_fill(stream as usize);
    }

    pub(crate) fn publish_fill(&mut self, record: &Built, entries: &[BuiltEntry]) {
        let vid = record.volume;
        for built in entries {
            let block = built.entry.block();
            if self.fills.pending.get(&(vid, block)) != Some(&built.old) {
                continue;
            }
            self.fills.settle(vid, block);
            let (volume, space) = self.volume_and_space(vid);
            volume.ledger.fill(space, block, built.position, built.entry.value());
            volume.count.admitted_blocks += 1;
        }
    }
}
