//! The core itself: its parts, the dispatch of events, and the order in which work is looked for.

use crate::api::*;
use crate::base::flight::OpId;
use crate::base::flight::{DeviceFailed, Io};
use crate::base::mem::Arena;
use crate::base::mutation::mutated;
use crate::base::out::Next;
use crate::base::shared::EngineConfig;
use crate::base::util::Slab;
use crate::blocks::ledger::objects_of;
use crate::cache::Cache;
use crate::checkpoint::Checkpoint;
use crate::control::Verify;
use crate::control::volume::{ClientOp, Stage, Volume};
use crate::drain::Drain;
use crate::format::{EntryKind, Geometry, RecordKind, Stream};
use crate::front::read::{DeviceReads, MissRead};
use crate::ground::Ground;

use crate::log::build::BuiltEntry;
use crate::log::build::{Append, Built};
use crate::peers::fetch::{FETCH_BYTES, FetchRead};
use crate::peers::repair::Repairs;

/// The core of one cache device.
pub struct Engine {
    pub(crate) ground: Ground,
    pub(crate) cache: Cache,
    pub(crate) ops: Slab<ClientOp>,
    pub(crate) repairs: Repairs,
    pub(crate) drain: Drain,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) edge_freed: bool,
    pub(crate) parked_scratch: Vec<OpId>,
    pub(crate) device_reads: DeviceReads,
    /// Reads of images in flight for requests.
    pub(crate) misses: Slab<MissRead>,
    /// Reads of records in flight.
    pub(crate) fetches: Slab<FetchRead>,
    pub(crate) next_volume: usize,
    /// Until then it waits for backends to be flushed.
    pub(crate) stop_by: Nanos,
    /// The comparison of a volume that is being removed.
    pub(crate) verify: Verify,
    /// Removed volumes whose removal has not been reported, by its control number: their numbers are taken.
    pub(crate) leaving: Vec<(u64, VolumeId)>,
    /// When work was last looked for.
    pumped_at: Nanos,
}

impl Engine {
    pub(crate) fn new(geo: Geometry, config: EngineConfig, durable: u64, epoch: u64, now: Nanos) -> Engine {
        let drain_buffers = config.drain_buffers;
        Engine {
            ground: Ground::new(geo, config, durable, epoch),
            cache: Cache::new(geo.device_blocks as usize),
            ops: Slab::with_capacity(1024),
            repairs: Repairs::default(),
            drain: Drain::new(drain_buffers),
            checkpoint: Checkpoint::new(epoch, geo.pages(), now),
            edge_freed: false,
            parked_scratch: Vec::with_capacity(256),
            device_reads: DeviceReads::new(),
            misses: Slab::with_capacity(256),
            fetches: Slab::with_capacity(4),
            next_volume: 0,
            stop_by: 0,
            verify: Verify::default(),
            leaving: Vec::new(),
            pumped_at: now,
        }
    }

    /// The cache device's name.
    pub fn uuid(&self) -> [u8; 16] {
        self.ground.base.geo.uuid
    }

    /// The memory of all transfers.
    pub fn arena(&self) -> &Arena {
        &self.ground.base.arena
    }

    /// The memory of all transfers, to fill buffers and to take and give them.
    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.ground.base.arena
    }

    /// Takes in an event. Effects come out of [`Engine::next_effect`].
    ///
    /// # Panics
    /// If an effect is reported that is not in flight, or a request breaks its contract (buffer size):
    /// both are bugs of the driver, and going on would corrupt data.
    pub fn handle(&mut self, now: Nanos, event: Event) {
        self.ground.base.out.stir();
        match event {
            Event::Request(request) => self.client_request(now, request),
            Event::Done { token, result } => self.done(now, token, result),
            Event::Tick => {
                for volume in self.ground.volumes.iter_mut().flatten() {
                    volume.recheck = true;
                }
            }
        }
        self.settle();
    }

    /// The next thing to be done, `None` when there is nothing until the next event. Drivers handle all
    /// events at hand first: what arrives together is committed together.
    pub fn next_effect(&mut self, now: Nanos) -> Option<Effect> {
        loop {
            while self.ground.base.out.wants_round() {
                self.pump(now);
            }
            match self.ground.base.out.next(self.ground.base.dead)? {
                Next::Failed(token, error) => self.handle(now, Event::Done { token, result: Err(error) }),
                Next::Effect(effect) => {
                    if let Effect::ControlDone { control, .. } = effect {
                        self.leaving.retain(|&(removal, _)| removal != control);
                    }
                    return Some(effect);
                }
            }
        }
    }

    /// When [`Event::Tick`] is due if nothing else happens before. It may have come already: what became due since the last look for
    /// work, while the driver did other things, is due still.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let now = self.pumped_at;
        let holding = self
            .ground
            .volumes
            .iter()
            .enumerate()
            .filter(|(_, v)| v.as_ref().is_some_and(|v| !v.held.is_empty()));
        let held = holding.filter_map(|(i, _)| self.held_due(now, VolumeId(i as u16))).min();
        let drain = if self.ground.base.stopping.is_none() {
            self.drain.deadline(&self.ground, now).into_iter().chain(self.detach_deadline(now)).min()
        } else {
            None
        };
        let group = if self.ground.base.stopping.is_none() {
            self.drain.group_deadline(&self.ground, now)
        } else {
            None
        };
        let stop = self.stop_deadline(now);
        [
            held,
            drain,
            group,
            stop,
            self.cache.fills_deadline(),
            self.repairs.deadline(),
            self.checkpoint.deadline(&self.ground.base.checkpoints),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Looks for work, in the order of urgency.
    fn pump(&mut self, now: Nanos) {
        self.pumped_at = now;
        if std::mem::take(&mut self.edge_freed) {
            for volume in self.ground.volumes.iter_mut().flatten() {
                volume.recheck = true;
            }
        }
        self.settle();
        self.pump_repairs(now);
        self.settle();
        self.pump_waiting_reads();
        self.pump_parked(now);
        self.pump_held(now);
        self.pump_log();
        self.pump_sync(now);
        let stopping = self.ground.base.stopping.is_some();
        self.cache.issue_fills(&mut self.ground, now, stopping);
        self.cache.reclaim(&mut self.ground);
        self.checkpoint.begin(&mut self.ground, now);
        self.advance_checkpoint_pages();
        if self.ground.base.stopping.is_none() {
            self.drain.group_step(&mut self.ground, now);
            self.drain.step(&mut self.ground, now);
        }
        self.drain.flush_step(&mut self.ground, now);
        self.pump_tasks(now);
        if self.ground.arriving.wakes() {
            self.ground.base.out.stir();
        }
        self.settle();
        // Completions may have made room for what waited, or given a lock to who waited for it.
        self.pump_log();
        if self.ground.volumes.iter().flatten().any(|volume| volume.has_to_recheck()) {
            self.ground.base.out.stir();
        }
        if mutated!(RepliesLast) {
            self.ground.base.out.delay_replies();
        }
    }

    fn done(&mut self, now: Nanos, token: Token, result: Result<(), IoError>) {
        match self.ground.base.out.end(token) {
            Io::Append(index) => self.append_written(now, index, result),
            Io::Seal { segment, buf } => {
                let Ground { base, space, log, .. } = &mut self.ground;
                if log.seal_done(base, space, (segment, buf), result).is_err() {
                    self.device_failed();
                }
            }
            Io::Sync => self.sync_done(now, result),
            Io::Cached(read) => self.cached_done(read, result),
            Io::Fetch(read) => self.fetch_done(read, result),
            Io::Miss(read) => self.miss_done(now, read, result),
            Io::Direct { op } => self.direct_done(now, op, result),
            Io::DirectFlush { op, covers } => self.direct_flush_done(now, op, covers, result),
            Io::DrainRead { piece, start, end } => {
                self.drain.read_done(&mut self.ground, piece, (start, end), result);
            }
            Io::DrainWrite { piece } => self.drain.write_done(&mut self.ground, now, piece, result),
            Io::DrainZeroes { drain } => self.drain.zeroes_done(&mut self.ground, now, drain, result),
            Io::DrainFlush { volume, covers } => {
                self.drain.flush_done(&mut self.ground, now, (volume, covers), result);
            }
            Io::ReclaimSummary => self.cache.reclaim_summary_done(&mut self.ground, result),
            Io::ReclaimRead { start, end } => {
                self.cache.reclaim_read_done(&mut self.ground, (start, end), result);
            }
            Io::CheckpointWrite { buf } => match self.checkpoint.write_done(&mut self.ground, buf, result) {
                Ok(true) => self.pump_sync(now),
                Ok(false) => {}
                Err(DeviceFailed) => self.device_failed(),
            },
            Io::CheckpointSync => {
                if self.checkpoint.sync_done(&mut self.ground, result).is_err() {
                    self.device_failed();
                }
            }
            Io::Verify { volume, block, blocks, buf } => {
                self.verify_done(now, volume, block, blocks, buf, result)
            }
            Io::Disown { volume } => self.disown_done(now, volume, result),
            Io::FrameRead { frame, start, end } => {
                self.drain.frame_read_done(&mut self.ground, frame, (start, end), result);
            }
            Io::FrameWrite { frame } => self.drain.frame_write_done(&mut self.ground, now, frame, result),
            Io::RedoCommit { volume } => self.drain.commit_done(&mut self.ground, now, volume, result),
            Io::RedoTrim { volume } => self.drain.trim_done(&mut self.ground, now, volume, result),
            Io::RedoNote { volume } => self.drain.note_done(&mut self.ground, now, volume, result),
            Io::Snapshot { volume } => self.snapshot_done(now, volume, result),
            Io::Resize { volume } => self.resize_done(now, volume, result),
        }
    }

    /// An append has been written: what it and those behind it have brought takes effect.
    fn append_written(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let Ok(stream) = self.ground.log.written(&mut self.ground.base, index, result) else {
            return self.device_failed();
        };
        while let Some(append) = self.ground.log.next_published(stream) {
            self.publish(now, &append);
            if mutated!(AckBeforeWritten) {
                for op in self.ground.log.take_next_ops(stream) {
                    self.op_published(now, op, append.number());
                }
            }
            self.ground.log.put_away(&mut self.ground.base, append);
        }
        self.ground.log.write_summaries(&mut self.ground.base, &mut self.ground.space);
    }

    fn publish(&mut self, now: Nanos, append: &Append) {
        let mut moves = false;
        for (record, entries) in append.records() {
            match record.kind() {
                RecordKind::Write => self.publish_write(now, record, entries),
                RecordKind::Fill => self.cache.fill(&mut self.ground, record, entries),
                RecordKind::Move => {
                    for &object in self.cache.moved(&mut self.ground, record, entries) {
                        self.drain.note_moved(&mut self.ground, record.volume(), object, now);
                    }
                }
            }
            moves |= record.kind() == RecordKind::Move;
            self.settle();
        }
        if moves {
            if append.is_repair() { self.repaired() } else { self.cache.end_move() }
        }
        self.note_places(append);
        self.ground.note_published(append);
        if append.stream() == Stream::Log {
            for &op in append.ops() {
                self.op_published(now, op, append.number());
            }
            self.pump_sync(now);
        }
    }

    fn client_request(&mut self, now: Nanos, request: Request) {
        let incoming = match request.op {
            Op::Record { .. } => self.admit_record(&request).map(Some),
            _ => self.admit_request(&request).map(|()| None),
        };
        if let Err(error) = incoming {
            if let Some(Some(volume)) = self.ground.volumes.get_mut(request.volume.0 as usize) {
                volume.count.errors += 1;
            }
            self.ground.base.out.reply(request.id, Err(error));
            return;
        }
        let block = BLOCK_BYTES as u64;
        let first_block = request.offset / block;
        let blocks = (request.offset + request.len).div_ceil(block) - first_block;
        let fua = request.op.is_fua();
        let volume = self.ground.volume_mut(request.volume);
        volume.requests += 1;
        volume.flushes |= fua;
        self.device_reads.note_request(request.volume);
        let id = self.ops.insert(ClientOp {
            request,
            first_block,
            blocks,
            edges: [None, None],
            stage: Stage::Waiting,
            error: None,
            waiting: 0,
            logged: 0,
            unpublished: 0,
            sequence: 0,
            locked: false,
            direct: false,
            invalidated: false,
            barrier: 0,
            durable: fua,
            held_since: now,
            incoming: incoming.unwrap_or_default(),
        });
        match request.op {
            Op::Record { .. } => self.start_record(id, incoming.expect("checked").expect("a record")),
            Op::Flush => self.start_flush(now, id),
            Op::Fetch { sequence } => self.start_fetch(id, sequence),
            _ if request.len == 0 => self.complete(id, Ok(())),
            Op::Read | Op::Prefetch => self.start_read(id),
            Op::Block { crc } => self.start_block(id, crc),
            Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } => self.start_change(id),
        }
    }

    fn admit_request(&self, request: &Request) -> Result<(), RequestError> {
        let volume = self.ground.volumes.get(request.volume.0 as usize).and_then(Option::as_ref);
        let takes = |v: &Volume| match request.op {
            Op::Block { .. } | Op::Fetch { .. } => v.replica.is_some(),
            Op::Flush => v.attached || v.replica.is_some(),
            _ => v.attached,
        };
        let volume = volume.filter(|v| takes(v) && !v.closing && self.ground.base.stopping.is_none());
        let volume = volume.ok_or(RequestError::Shutdown)?;
        let sector = SECTOR_BYTES as u64;
        let end = request.offset.checked_add(request.len).ok_or(RequestError::Invalid)?;
        let size_bytes = match request.op {
            // The last one, too, of a volume that ends within it.
            Op::Block { .. } => volume.spec.size_bytes.next_multiple_of(BLOCK_BYTES as u64),
            _ => volume.spec.size_bytes,
        };
        if !request.offset.is_multiple_of(sector) || !request.len.is_multiple_of(sector) || end > size_bytes {
            return Err(RequestError::Invalid);
        }
        if request.len > RANGE_BYTES_MAX {
            return Err(RequestError::Invalid);
        }
        let changes =
            !matches!(request.op, Op::Read | Op::Prefetch | Op::Flush | Op::Block { .. } | Op::Fetch { .. });
        if changes && volume.spec.read_only {
            return Err(RequestError::ReadOnly);
        }
        if volume.is_refusing() || self.ground.base.dead && volume.replica.is_some() {
            return Err(RequestError::Io);
        }
        if matches!(request.op, Op::Fetch { .. }) {
            let bytes = request.buf.expect("a record is read into a buffer").len as usize;
            assert_eq!((bytes, request.len), (FETCH_BYTES, 0), "a buffer holds every record");
        }
        let carries = matches!(request.op, Op::Read | Op::Prefetch | Op::Write { .. } | Op::Block { .. });
        if carries && request.len > 0 {
            let buf = request.buf.expect("a read or write has a buffer");
            let bytes = buffer_bytes(request.offset, request.len);
            assert!(bytes <= REQUEST_BYTES_MAX, "front doors split requests");
            assert_eq!(buf.len as usize, bytes, "a buffer covers its blocks");
        }
        Ok(())
    }

    /// A record of the log takes effect.
    pub(crate) fn publish_write(&mut self, now: Nanos, record: &Built, entries: &[BuiltEntry]) {
        let vid = record.volume();
        let mut i = 0;
        while i < entries.len() {
            let entry = entries[i].entry();
            match entry.kind() {
                Some(EntryKind::Data) => {
                    let n = run_length(&entries[i..]);
                    if !mutated!(WriteKeepsFills) {
                        self.ground.overtake(vid, entry.block(), n as u64);
                    }
                    self.ground.budget.note_published(n as u64);
                    let (volume, space) = self.ground.volume_and_space(vid);
                    volume.unpublished_blocks -= n as u64;
                    let crcs = entries[i..i + n].iter().map(|built| built.entry().value());
                    volume.ledger.write(space, now, (entry.block(), entries[i].position()), crcs);
                    let last = entry.block() + if mutated!(CrossingRunQueuedOnce) { 0 } else { n as u64 - 1 };
                    let objects = objects_of(entry.block()..last + 1);
                    self.drain.note_dirty(&mut self.ground, (vid, record.sequence()), objects, now);
                    i += n;
                    continue;
                }
                Some(EntryKind::Discard | EntryKind::WriteZeroes) => {
                    let blocks = u64::from(entry.value());
                    if !mutated!(DiscardKeepsFills) {
                        self.ground.overtake(vid, entry.block(), blocks);
                    }
                    let (volume, space) = self.ground.volume_and_space(vid);
                    let keep = entry.kind() == Some(EntryKind::WriteZeroes);
                    let range = entry.block()..entry.block() + blocks;
                    volume.ledger.zero(space, now, range.clone(), keep);
                    let what = (vid, record.sequence());
                    self.drain.note_dirty(&mut self.ground, what, objects_of(range), now);
                    self.ground.budget.note_extents_changed();
                }
                Some(EntryKind::Invalidate) => {
                    self.ground.overtake(vid, entry.block(), u64::from(entry.value()));
                    self.ground.drop_blocks(vid, entry.block(), u64::from(entry.value()));
                }
                Some(EntryKind::Void) | None => unreachable!("not in a write record"),
            }
            i += 1;
        }
        let volume = self.ground.volume_mut(vid);
        volume.log.publish(record.sequence(), record.header_crc());
        let volume = self.ground.volume(vid);
        if !volume.is_dirty() {
            self.drain.update(&mut self.ground, vid);
        }
    }

    fn advance_checkpoint_pages(&mut self) {
        if !self.checkpoint.is_idle() && self.ground.base.pools.checkpoint.available() > 0 {
            self.checkpoint.advance(&mut self.ground);
        }
    }
}

/// Data blocks at the start of `entries` that follow each other in the volume and on the device.
fn run_length(entries: &[BuiltEntry]) -> usize {
    let follows = |a: &BuiltEntry, b: &BuiltEntry| {
        b.entry().kind() == Some(EntryKind::Data)
            && b.entry().block() == a.entry().block() + 1
            && b.position() == a.position() + 1
    };
    1 + entries.windows(2).take_while(|w| follows(&w[0], &w[1])).count()
}
