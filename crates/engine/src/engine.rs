//! The core itself: its parts, the dispatch of events, and the order in which work is looked for.

use crate::api::*;
use crate::base::mem::{Arena, Buf};
use crate::base::mutation::mutated;
use crate::base::out::{Next, Out};
use crate::base::pools::Pools;
use crate::base::util::Slab;
use crate::blocks::budget::Budget;
use crate::blocks::ledger::objects_of;
use crate::blocks::space::Space;
use crate::cache::ghost::Ghost;
use crate::cache::reclaim::Reclaim;
use crate::checkpoint::Checkpoint;
use crate::control::Verify;
use crate::control::volume::{ClientOp, OpId, Stage, Volume};
use crate::drain::frame::Frame;
use crate::drain::{Drain, Piece, Written};
use crate::format::{EntryKind, Geometry, Stream};
use crate::front::ack::Sync;
use crate::front::read::{CachedRead, DeviceReads, Fills, MissRead};
use crate::log::{Append, Built, BuiltEntry, Log};
use crate::peers::fetch::{FETCH_BYTES, FetchRead};
use crate::peers::repair::Repairs;
use crate::status::DeviceStatus;

/// See [`EngineConfig::stop_flush_ns_max`]: well below the time after which service managers kill.
const STOP_FLUSH_NS_MAX: Nanos = 5_000_000_000;

/// What the driver may choose.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Memory for requests and transfers, in bytes. What the core itself needs comes out of it first.
    pub arena_bytes: usize,
    /// Largest device write of the log in bytes.
    pub append_bytes: usize,
    /// Device writes of the log in flight at once.
    pub appends_in_flight: usize,
    /// Transfers of the drain in flight at once, of 256 KiB at most.
    pub drain_buffers: usize,
    /// How long a shutdown waits for backends to be flushed, in nanoseconds. It goes on without those that
    /// do not answer.
    pub stop_flush_ns_max: Nanos,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            arena_bytes: 160 << 20,
            append_bytes: 512 << 10,
            appends_in_flight: 3,
            drain_buffers: 64,
            stop_flush_ns_max: STOP_FLUSH_NS_MAX,
        }
    }
}

impl EngineConfig {
    /// A small configuration for tests and simulation.
    pub fn small() -> EngineConfig {
        EngineConfig {
            arena_bytes: 32 << 20,
            append_bytes: 128 << 10,
            appends_in_flight: 3,
            drain_buffers: 16,
            stop_flush_ns_max: STOP_FLUSH_NS_MAX,
        }
    }
}

/// What an effect in flight was for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Io {
    Append(u32),
    Seal { segment: u32, buf: Buf },
    Sync,
    Cached(CachedRead),
    Fetch(FetchRead),
    Miss(MissRead),
    Direct { op: OpId },
    DirectFlush { op: OpId, covers: u64 },
    DrainRead { piece: u32, start: u16, end: u16 },
    DrainWrite { piece: u32 },
    DrainZeroes { drain: u32 },
    DrainFlush { volume: VolumeId, covers: u64 },
    ReclaimSummary,
    ReclaimRead { start: u16, end: u16 },
    CheckpointWrite { buf: Buf },
    CheckpointSync,
    Verify { volume: VolumeId, block: u64, blocks: u32, buf: Buf },
    Disown { volume: VolumeId },
    FrameRead { frame: u32, start: u16, end: u16 },
    FrameWrite { frame: u32 },
    RedoCommit { volume: VolumeId },
    RedoTrim { volume: VolumeId },
    RedoNote { volume: VolumeId },
    Snapshot { volume: VolumeId },
    Resize { volume: VolumeId },
}

/// The core of one cache device.
pub struct Engine {
    pub(crate) geo: Geometry,
    pub(crate) config: EngineConfig,
    pub(crate) arena: Arena,
    pub(crate) pools: Pools,
    pub(crate) space: Space,
    pub(crate) ghost: Ghost,
    /// By number; no longer than needed, since every round looks at all of them.
    pub(crate) volumes: Vec<Option<Box<Volume>>>,
    pub(crate) out: Out<Io>,
    pub(crate) ops: Slab<ClientOp>,
    pub(crate) log: Log,
    pub(crate) appends: Slab<Append>,
    pub(crate) sync: Sync,
    pub(crate) fills: Fills,
    pub(crate) repairs: Repairs,
    pub(crate) drains: Slab<Drain>,
    pub(crate) pieces: Slab<Piece>,
    pub(crate) frames: Slab<Frame>,
    pub(crate) spare_written: Vec<Vec<Written>>,
    pub(crate) reclaim: Reclaim,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) device: DeviceStatus,
    /// The cache device has failed.
    pub(crate) dead: bool,
    pub(crate) budget: Budget,
    pub(crate) edge_freed: bool,
    pub(crate) parked_scratch: Vec<OpId>,
    pub(crate) device_reads: DeviceReads,
    pub(crate) next_volume: usize,
    pub(crate) next_drain: usize,
    /// Control number of a shutdown under way; [`crate::control::LAST_CHECKPOINT`] at its end.
    pub(crate) stopping: Option<u64>,
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
        let mut arena = Arena::new(config.arena_bytes);
        let pools =
            Pools::new(&mut arena, config.append_bytes, config.appends_in_flight, config.drain_buffers);
        let ghost = Ghost::for_device(geo.device_blocks as usize);
        Engine {
            geo,
            arena,
            pools,
            space: Space::new(geo, epoch),
            ghost,
            volumes: Vec::new(),
            out: Out::new(),
            ops: Slab::with_capacity(1024),
            log: Log::new(geo.segment_blocks),
            appends: Slab::with_capacity(64),
            sync: Sync::default(),
            fills: Fills::new(),
            repairs: Repairs::default(),
            drains: Slab::with_capacity(256),
            pieces: Slab::with_capacity(config.drain_buffers),
            frames: Slab::with_capacity(config.drain_buffers),
            spare_written: Vec::new(),
            reclaim: Reclaim::default(),
            checkpoint: Checkpoint::new(durable, epoch, geo.pages(), now),
            device: DeviceStatus::default(),
            dead: false,
            budget: Budget::default(),
            edge_freed: false,
            parked_scratch: Vec::with_capacity(256),
            device_reads: DeviceReads::default(),
            next_volume: 0,
            next_drain: 0,
            stopping: None,
            stop_by: 0,
            verify: Verify::default(),
            leaving: Vec::new(),
            pumped_at: now,
            config,
        }
    }

    /// The cache device's name.
    pub fn uuid(&self) -> [u8; 16] {
        self.geo.uuid
    }

    /// The memory of all transfers.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The memory of all transfers, to fill buffers and to take and give them.
    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// Takes in an event. Effects come out of [`Engine::next_effect`].
    ///
    /// # Panics
    /// If an effect is reported that is not in flight, or a request breaks its contract (buffer size):
    /// both are bugs of the driver, and going on would corrupt data.
    pub fn handle(&mut self, now: Nanos, event: Event) {
        self.out.stir();
        match event {
            Event::Request(request) => self.client_request(now, request),
            Event::Done { token, result } => self.done(now, token, result),
            Event::Tick => {
                for volume in self.volumes.iter_mut().flatten() {
                    volume.recheck = true;
                }
            }
        }
    }

    /// The next thing to be done, `None` when there is nothing until the next event. Drivers handle all
    /// events at hand first: what arrives together is committed together.
    pub fn next_effect(&mut self, now: Nanos) -> Option<Effect> {
        loop {
            while self.out.wants_round() {
                self.pump(now);
            }
            match self.out.next(self.dead)? {
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
        let holding =
            self.volumes.iter().enumerate().filter(|(_, v)| v.as_ref().is_some_and(|v| !v.held.is_empty()));
        let held = holding.filter_map(|(i, _)| self.held_due(now, VolumeId(i as u16))).min();
        let drain = if self.stopping.is_none() { self.drain_deadline(now) } else { None };
        let group = if self.stopping.is_none() { self.group_deadline(now) } else { None };
        let stop = self.stop_deadline(now);
        [held, drain, group, stop, self.fills.deadline(), self.repairs.deadline(), self.checkpoint.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Looks for work, in the order of urgency.
    fn pump(&mut self, now: Nanos) {
        self.pumped_at = now;
        if std::mem::take(&mut self.edge_freed) {
            for volume in self.volumes.iter_mut().flatten() {
                volume.recheck = true;
            }
        }
        self.pump_repairs(now);
        self.pump_waiting_reads();
        self.pump_parked(now);
        self.pump_held(now);
        self.pump_log();
        self.pump_sync(now);
        self.pump_fills(now, self.stopping.is_some());
        self.pump_reclaim();
        self.pump_checkpoint(now);
        self.advance_checkpoint_pages();
        if self.stopping.is_none() {
            self.pump_groups(now);
            self.pump_drain(now);
        }
        self.pump_backend_flush(now);
        self.pump_tasks(now);
        if self.fills.wakes() {
            self.out.stir();
        }
        // Completions may have made room for what waited, or given a lock to who waited for it.
        self.pump_log();
        if self.volumes.iter().flatten().any(|volume| volume.has_to_recheck()) {
            self.out.stir();
        }
        if mutated!(RepliesLast) {
            self.out.delay_replies();
        }
    }

    /// Does something with a volume's backend.
    pub(crate) fn backend(&mut self, io: Io, volume: VolumeId, op: BackendOp) {
        let of = self.volume_mut(volume);
        match op {
            BackendOp::Write { offset, buf } => of.own.insert(offset, buf.len.into()),
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                of.own.insert(offset, len);
            }
            // What is cut off does not come back from the parent when the image grows again.
            BackendOp::Resize { size_bytes } => of.own.insert(size_bytes, u64::MAX),
            _ => {}
        }
        let count = &mut of.count;
        match op {
            BackendOp::Read { buf, .. } => {
                count.backend_reads += 1;
                count.backend_read_bytes += u64::from(buf.len);
            }
            BackendOp::Write { buf, .. } | BackendOp::RedoWrite { buf, .. } => {
                count.backend_writes += 1;
                count.backend_written_bytes += u64::from(buf.len);
            }
            _ => {}
        }
        self.out.backend(io, volume, op);
    }

    fn done(&mut self, now: Nanos, token: Token, result: Result<(), IoError>) {
        match self.out.end(token) {
            Io::Append(index) => self.append_written(now, index, result),
            Io::Seal { segment, buf } => match result {
                Ok(()) if !self.dead => self.seal_done(segment, buf),
                _ => {
                    self.pools.summary.give(buf);
                    self.device_failed();
                }
            },
            Io::Sync => self.sync_done(now, result),
            Io::Cached(read) => self.cached_done(read, result),
            Io::Fetch(read) => self.fetch_done(read, result),
            Io::Miss(read) => self.miss_done(now, read, result),
            Io::Direct { op } => self.direct_done(now, op, result),
            Io::DirectFlush { op, covers } => self.direct_flush_done(now, op, covers, result),
            Io::DrainRead { piece, start, end } => self.drain_read_done(piece, start, end, result),
            Io::DrainWrite { piece } => self.drain_write_done(now, piece, result),
            Io::DrainZeroes { drain } => self.drain_zeroes_done(now, drain, result),
            Io::DrainFlush { volume, covers } => self.drain_flush_done(now, volume, covers, result),
            Io::ReclaimSummary => self.reclaim_summary_done(result),
            Io::ReclaimRead { start, end } => self.reclaim_read_done(start, end, result),
            Io::CheckpointWrite { buf } => self.checkpoint_write_done(now, buf, result),
            Io::CheckpointSync => self.checkpoint_sync_done(result),
            Io::Verify { volume, block, blocks, buf } => {
                self.verify_done(now, volume, block, blocks, buf, result)
            }
            Io::Disown { volume } => self.disown_done(now, volume, result),
            Io::FrameRead { frame, start, end } => self.frame_read_done(frame, start, end, result),
            Io::FrameWrite { frame } => self.frame_write_done(now, frame, result),
            Io::RedoCommit { volume } => self.redo_commit_done(now, volume, result),
            Io::RedoTrim { volume } => self.redo_trim_done(now, volume, result),
            Io::RedoNote { volume } => self.redo_note_done(now, volume, result),
            Io::Snapshot { volume } => self.snapshot_done(now, volume, result),
            Io::Resize { volume } => self.resize_done(now, volume, result),
        }
    }

    fn append_written(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        if result.is_err() || self.dead {
            let append = self.appends.remove(index);
            self.log.stream(append.stream).in_flight.retain(|&i| i != index);
            self.pools.append.give(append.buf);
            return self.device_failed();
        }
        self.append_done(now, index);
    }

    fn client_request(&mut self, now: Nanos, request: Request) {
        let incoming = match request.op {
            Op::Record { .. } => self.admit_record(&request).map(Some),
            _ => self.admit_request(&request).map(|()| None),
        };
        if let Err(error) = incoming {
            if let Some(Some(volume)) = self.volumes.get_mut(request.volume.0 as usize) {
                volume.count.errors += 1;
            }
            self.out.reply(request.id, Err(error));
            return;
        }
        let block = BLOCK_BYTES as u64;
        let first_block = request.offset / block;
        let blocks = (request.offset + request.len).div_ceil(block) - first_block;
        let fua = request.op.is_fua();
        let volume = self.volume_mut(request.volume);
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
        let volume = self.volumes.get(request.volume.0 as usize).and_then(Option::as_ref);
        let takes = |v: &Volume| match request.op {
            Op::Block { .. } | Op::Fetch { .. } => v.replica.is_some(),
            Op::Flush => v.attached || v.replica.is_some(),
            _ => v.attached,
        };
        let volume = volume.filter(|v| takes(v) && !v.closing && self.stopping.is_none());
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
        if volume.is_refusing() || self.dead && volume.replica.is_some() {
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
        let vid = record.volume;
        let mut i = 0;
        while i < entries.len() {
            let entry = entries[i].entry;
            match entry.kind() {
                Some(EntryKind::Data) => {
                    let n = run_length(&entries[i..]);
                    if !mutated!(WriteKeepsFills) {
                        self.cancel_fills(vid, entry.block(), n as u64);
                    }
                    self.budget.note_published(n as u64);
                    let (volume, space) = self.volume_and_space(vid);
                    volume.unpublished_blocks -= n as u64;
                    let crcs = entries[i..i + n].iter().map(|built| built.entry.value());
                    volume.ledger.write(space, now, (entry.block(), entries[i].position), crcs);
                    let last = entry.block() + if mutated!(CrossingRunQueuedOnce) { 0 } else { n as u64 - 1 };
                    for object in objects_of(entry.block()..last + 1) {
                        volume.note_dirty(object, record.sequence, now);
                    }
                    i += n;
                    continue;
                }
                Some(EntryKind::Discard | EntryKind::WriteZeroes) => {
                    let blocks = u64::from(entry.value());
                    if !mutated!(DiscardKeepsFills) {
                        self.cancel_fills(vid, entry.block(), blocks);
                    }
                    let (volume, space) = self.volume_and_space(vid);
                    let keep = entry.kind() == Some(EntryKind::WriteZeroes);
                    let range = entry.block()..entry.block() + blocks;
                    volume.zero(space, now, range, keep, record.sequence);
                    self.budget.note_extents_changed();
                }
                Some(EntryKind::Invalidate) => {
                    self.cancel_fills(vid, entry.block(), u64::from(entry.value()));
                    self.drop_blocks(vid, entry.block(), u64::from(entry.value()));
                }
                Some(EntryKind::Void) | None => unreachable!("not in a write record"),
            }
            i += 1;
        }
        let volume = self.volume_mut(vid);
        volume.log.publish(record.sequence, record.header_crc);
        let volume = self.volume(vid);
        if !volume.is_dirty() {
            self.update_drained(vid);
        }
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.volumes[id.0 as usize].as_ref().expect("the volume exists while something of it is in flight")
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[id.0 as usize].as_mut().expect("the volume exists while something of it is in flight")
    }

    pub(crate) fn volume_and_space(&mut self, id: VolumeId) -> (&mut Volume, &mut Space) {
        let volume = self.volumes[id.0 as usize].as_mut();
        (volume.expect("the volume exists while something of it is in flight"), &mut self.space)
    }

    /// The dirty quota in force, in bytes; see [`Budget::quota`].
    pub(crate) fn dirty_bytes_max(&self, id: VolumeId) -> u64 {
        let spec = &self.volume(id).spec;
        if spec.read_only { 0 } else { self.budget.quota(&self.space, spec.dirty_bytes_max) }
    }

    /// A volume has come or gone, or its quota has changed.
    pub(crate) fn count_quotas(&mut self) {
        let written = self.volumes.iter().flatten().filter(|volume| !volume.spec.read_only);
        self.budget.set_quotas(&self.space, written.map(|volume| volume.spec.dirty_bytes_max));
    }

    /// Zero ranges in records that are not published.
    pub(crate) fn unpublished_ranges(&self) -> usize {
        let log = &self.log.streams[Stream::Log as usize];
        let ranges = |&i: &u32| self.appends[i].entries.iter().filter(|b| !b.entry.has_data()).count();
        log.in_flight.iter().map(ranges).sum()
    }

    fn advance_checkpoint_pages(&mut self) {
        if !self.checkpoint.is_idle() && self.pools.checkpoint.available() > 0 {
            self.advance_checkpoint();
        }
    }
}

/// Data blocks at the start of `entries` that follow each other in the volume and on the device.
fn run_length(entries: &[BuiltEntry]) -> usize {
    let follows = |a: &BuiltEntry, b: &BuiltEntry| {
        b.entry.kind() == Some(EntryKind::Data)
            && b.entry.block() == a.entry.block() + 1
            && b.position == a.position + 1
    };
    1 + entries.windows(2).take_while(|w| follows(&w[0], &w[1])).count()
}
