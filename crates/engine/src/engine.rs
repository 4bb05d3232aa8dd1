//! The loop: which room an event goes to, in which order work is looked for, and what follows from
//! what a room has found out.

use crate::api::*;
use crate::base::consequences::Consequence;
use crate::base::flight::{DeviceFailed, Io};
use crate::base::mem::Arena;
use crate::base::mutation::mutated;
use crate::base::out::Next;
use crate::base::pools::For;
use crate::base::shared::EngineConfig;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::Lookup;
use crate::blocks::ledger::objects_of;
use crate::cache::Cache;
use crate::checkpoint::Checkpoint;
use crate::control::Control;
use crate::drain::Drain;
use crate::format::{EntryKind, Geometry, RecordKind, Stream};
use crate::front::{BadRead, Front};
use crate::ground::Ground;
use crate::log::build::{Append, Built, BuiltEntry};
use crate::peers::Peers;
use crate::peers::fetch::FETCH_BYTES;
use crate::peers::repair::Reader;

/// The core of one cache device.
pub struct Engine {
    pub(crate) ground: Ground,
    pub(crate) front: Front,
    pub(crate) cache: Cache,
    pub(crate) drain: Drain,
    pub(crate) peers: Peers,
    pub(crate) checkpoint: Checkpoint,
    /// What control keeps of its own.
    pub(crate) control: Control,
    /// When work was last looked for.
    looked_at: Nanos,
}

impl Engine {
    pub(crate) fn new(
        geo: Geometry,
        config: EngineConfig,
        durable: u64,
        epoch: u64,
        now: Nanos,
    ) -> Engine {
        Engine {
            front: Front::new(),
            cache: Cache::new(geo.device_blocks as usize),
            drain: Drain::new(config.drain_buffers),
            peers: Peers::new(),
            checkpoint: Checkpoint::new(epoch, geo.pages(), now),
            ground: Ground::new(geo, config, durable, epoch),
            control: Control::default(),
            looked_at: now,
        }
    }

    /// The cache device's name.
    pub fn uuid(&self) -> [u8; 16] {
        self.ground.geo().uuid
    }

    /// The memory of all transfers.
    pub fn arena(&self) -> &Arena {
        self.ground.arena()
    }

    /// The memory of all transfers, to fill buffers and to take and give them.
    pub fn arena_mut(&mut self) -> &mut Arena {
        self.ground.arena_mut()
    }

    /// Takes in an event. Effects come out of [`Engine::next_effect`].
    ///
    /// # Panics
    /// If an effect is reported that is not in flight, or a request breaks its contract (buffer
    /// size): both are bugs of the driver, and going on would corrupt data.
    pub fn handle(&mut self, now: Nanos, event: Event) {
        self.ground.stir();
        match event {
            Event::Request(request) => self.request(now, request),
            Event::Done { token, result } => self.done(now, token, result),
            Event::Tick => self.ground.recheck_all(),
        }
        self.settle(now);
    }

    /// The next thing to be done, `None` when there is nothing until the next event. Drivers handle
    /// all events at hand first: what arrives together is committed together.
    pub fn next_effect(&mut self, now: Nanos) -> Option<Effect> {
        loop {
            while self.ground.out_mut().wants_round() {
                self.round(now);
            }
            match self.ground.next_effect()? {
                Next::Failed(token, error) => {
                    self.handle(now, Event::Done { token, result: Err(error) })
                }
                Next::Effect(effect) => {
                    if let Effect::ControlDone { control, .. } = effect {
                        self.control.note_reported(control);
                    }
                    return Some(effect);
                }
            }
        }
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn fence(&mut self, id: VolumeId) {
        self.ground.fence(id);
        self.settle(self.looked_at);
    }

    /// When [`Event::Tick`] is due if nothing else happens before. It may have come already: what
    /// became due since the last look for work, while the driver did other things, is due still.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let (ground, now) = (&self.ground, self.looked_at);
        let drains = !ground.is_stopping();
        let times = [
            self.front.deadline(ground, now),
            self.drain.deadline(ground, now).filter(|_| drains),
            self.detach_deadline(now).filter(|_| drains),
            self.drain.group_deadline(ground, now).filter(|_| drains),
            self.stop_deadline(now),
            self.cache.fills_deadline(),
            self.peers.deadline(),
            self.checkpoint.deadline(ground.checkpoints()),
        ];
        times.into_iter().flatten().min()
    }

    /// Looks for work, in the order of urgency.
    fn round(&mut self, now: Nanos) {
        self.looked_at = now;
        let stopping = self.ground.is_stopping();
        self.front.begin_round(&mut self.ground);
        self.settle(now);
        self.peers.step(&mut self.ground, now);
        self.settle(now);
        self.front.wake_reads(&mut self.ground);
        self.front.recheck(&mut self.ground, now);
        self.settle(now);
        self.front.release(&mut self.ground, now);
        self.settle(now);
        self.front.log(&mut self.ground);
        self.sync(now);
        self.cache.issue_fills(&mut self.ground, now, stopping);
        self.cache.reclaim(&mut self.ground);
        self.checkpoint.begin(&mut self.ground, now);
        if !self.checkpoint.is_idle() && self.ground.pools().left(For::Checkpoint) > 0 {
            self.checkpoint.advance(&mut self.ground);
        }
        if !self.ground.is_stopping() {
            self.drain.group_step(&mut self.ground, now);
            self.drain.step(&mut self.ground, now);
        }
        self.drain.flush_step(&mut self.ground, now);
        self.control(now);
        // Completions may have made room for what waited, or given a lock to who waited for it.
        self.front.log(&mut self.ground);
        self.settle(now);
        if self.front.wants_round(&self.ground) {
            self.ground.stir();
        }
        if mutated!(RepliesLast) {
            self.ground.out_mut().delay_replies();
        }
    }

    /// Releases who need not wait for stable media any longer, and issues the next sync when
    /// somebody must.
    pub(crate) fn sync(&mut self, now: Nanos) {
        let dead = self.ground.is_dead();
        let mut look = self.ground.log_mut().look();
        while let Some(part) = self.ground.log_mut().next_stable_part(&mut look, dead) {
            self.drain.stable(&mut self.ground, part);
        }
        while let Some(op) = self.ground.log_mut().next_stable_op(&mut look) {
            self.front.go_on(&mut self.ground, now, op);
        }
        self.ground.end_look(look);
    }

    /// An effect has completed.
    fn done(&mut self, now: Nanos, token: Token, result: Result<(), IoError>) {
        let ground = &mut self.ground;
        match ground.out_mut().end(token) {
            Io::Append(index) => self.append_written(now, index, result),
            Io::Seal { segment, buf } => {
                let sealed = ground.seal_done(segment, buf, result);
                self.or_dead(sealed);
            }
            Io::Sync => match ground.sync_done(result) {
                Ok(()) => {
                    ground.recheck_all();
                    self.sync(now);
                }
                Err(DeviceFailed) => self.device_failed(),
            },
            Io::Cached(index) => self.cached_done(index, result),
            Io::Fetch(index) => {
                let (op, result) = self.peers.fetch_done(ground, index, result);
                self.front.complete(ground, op, result);
            }
            Io::Miss(index) => self.miss_done(now, index, result),
            Io::Direct { op } => self.front.direct_done(ground, now, op, result),
            Io::DirectFlush { op, covers } => {
                let id = self.front.volume_of(op);
                if self.front.note_flush(ground, now, (op, covers), result) {
                    self.drain.distrust(ground, id);
                    self.drain.update(ground, id);
                }
                self.front.flush_done(ground, op, result);
            }
            Io::DrainRead { piece, start, end } => {
                self.drain.read_done(ground, piece, (start, end), result)
            }
            Io::DrainWrite { piece } => self.drain.write_done(ground, now, piece, result),
            Io::DrainZeroes { drain } => self.drain.zeroes_done(ground, now, drain, result),
            Io::DrainFlush { volume, covers } => {
                self.drain.flush_done(ground, now, (volume, covers), result);
            }
            Io::ReclaimSummary => self.cache.reclaim_summary_done(ground, result),
            Io::ReclaimRead { start, end } => {
                self.cache.reclaim_read_done(ground, (start, end), result)
            }
            Io::CheckpointWrite { buf } => match self.checkpoint.write_done(ground, buf, result) {
                Ok(true) => self.sync(now),
                Ok(false) => {}
                Err(DeviceFailed) => self.device_failed(),
            },
            Io::CheckpointSync => {
                let synced = self.checkpoint.sync_done(ground, result);
                self.or_dead(synced);
            }
            Io::Verify { volume, block, blocks, buf } => {
                self.verify_done(now, volume, (block, blocks), buf, result);
            }
            Io::Disown { volume } => self.disown_done(now, volume, result),
            Io::FrameRead { frame, start, end } => {
                self.drain.frame_read_done(ground, frame, (start, end), result);
            }
            Io::FrameWrite { frame } => self.drain.frame_write_done(ground, now, frame, result),
            Io::RedoCommit { volume } => self.drain.commit_done(ground, now, volume, result),
            Io::RedoTrim { volume } => self.drain.trim_done(ground, now, volume, result),
            Io::RedoNote { volume } => self.drain.note_done(ground, now, volume, result),
            Io::Snapshot { volume } => self.snapshot_done(now, volume, result),
            Io::Resize { volume } => self.resize_done(now, volume, result),
        }
    }

    /// The backend has answered a read of what the cache lacks.
    fn miss_done(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let ground = &mut self.ground;
        let op = match self.front.miss_done(ground, now, index, result) {
            Ok(arrived) => {
                self.cache.admit(ground, now, arrived.place(), arrived.buf());
                arrived.op()
            }
            Err(op) => op,
        };
        self.front.is_nearer(ground, op);
    }

    fn or_dead(&mut self, result: Result<(), DeviceFailed>) {
        if result.is_err() {
            self.device_failed();
        }
    }

    /// The device has answered a read of a client's.
    fn cached_done(&mut self, index: u32, result: Result<(), IoError>) {
        let op = self.front.cached_done(&mut self.ground, index, result);
        while let Some(bad) = self.front.next_bad_read() {
            self.repair_for(bad);
        }
        self.front.is_nearer(&mut self.ground, op);
    }

    /// A read waits for the repair of a dirty block, or fails since the block is lost.
    fn repair_for(&mut self, bad: BadRead) {
        let (id, block, position) = (bad.volume(), bad.block(), bad.position());
        if self.peers.repair(&mut self.ground, id, block, position) {
            return self.peers.wait_for_repair(Reader::new(bad.op(), id, block, bad.buf()));
        }
        self.ground.lose_for_good(id, block, position);
        self.front.fail_read(bad.op());
        self.front.is_nearer(&mut self.ground, bad.op());
    }

    /// An append has been written: what it and those behind it have brought takes effect.
    fn append_written(&mut self, now: Nanos, index: u32, result: Result<(), IoError>) {
        let Ok(stream) = self.ground.append_written(index, result) else {
            return self.device_failed();
        };
        while let Some(append) = self.ground.log_mut().next_published(stream) {
            self.publish(now, &append);
            if mutated!(AckBeforeWritten) {
                for op in self.ground.log_mut().take_next_ops(stream) {
                    self.front.published(&mut self.ground, now, op, append.number());
                }
            }
            self.ground.put_away(append);
        }
        self.ground.write_summaries();
    }

    /// The records of an append take effect.
    fn publish(&mut self, now: Nanos, append: &Append) {
        let mut moves = false;
        for (record, entries) in append.records() {
            match record.kind() {
                RecordKind::Write => self.publish_write(now, record, entries),
                RecordKind::Fill => self.cache.fill(&mut self.ground, record, entries),
                RecordKind::Move => {
                    moves = true;
                    for &object in self.cache.moved(&mut self.ground, record, entries) {
                        self.drain.note_moved(&mut self.ground, record.volume(), object, now);
                    }
                }
            }
            self.settle(now);
        }
        if moves {
            if append.is_repair() {
                self.peers.repaired(&mut self.ground)
            } else {
                self.cache.end_move()
            }
            self.settle(now);
        }
        self.peers.note_places(&self.ground, append);
        self.ground.note_published(append);
        if append.stream() == Stream::Log {
            for &op in append.ops() {
                self.front.published(&mut self.ground, now, op, append.number());
            }
            self.sync(now);
        }
    }

    /// A record of changes takes effect.
    fn publish_write(&mut self, now: Nanos, record: &Built, entries: &[BuiltEntry]) {
        let id = record.volume();
        let mut left = entries;
        while let Some(first) = left.first() {
            let entry = first.entry();
            let n = if entry.has_data() { run_length(left) } else { 1 };
            let (run, rest) = left.split_at(n);
            left = rest;
            let blocks = if entry.has_data() { n as u64 } else { u64::from(entry.value()) };
            let range = entry.block()..entry.block() + blocks;
            let dirtied = match entry.kind() {
                Some(EntryKind::Data) => {
                    if !mutated!(WriteKeepsFills) {
                        self.ground.overtake(id, range.start, blocks);
                    }
                    self.ground.note_data_published(id, blocks);
                    let (ledger, space) = self.ground.ledger_and_space(id);
                    let crcs = run.iter().map(|built| built.entry().value());
                    ledger.write(space, now, (range.start, first.position()), crcs);
                    if mutated!(CrossingRunQueuedOnce) {
                        range.start..range.start + 1
                    } else {
                        range
                    }
                }
                Some(kind @ (EntryKind::Discard | EntryKind::WriteZeroes)) => {
                    if !mutated!(DiscardKeepsFills) {
                        self.ground.overtake(id, range.start, blocks);
                    }
                    let (ledger, space) = self.ground.ledger_and_space(id);
                    ledger.zero(space, now, range.clone(), kind == EntryKind::WriteZeroes);
                    range
                }
                Some(EntryKind::Invalidate) => {
                    self.ground.overtake(id, range.start, blocks);
                    self.ground.drop_blocks(id, range.start, blocks);
                    continue;
                }
                Some(EntryKind::Void) | None => unreachable!("not in a write record"),
            };
            self.drain.note_dirty(
                &mut self.ground,
                (id, record.sequence()),
                objects_of(dirtied),
                now,
            );
            if !entry.has_data() {
                self.ground.budget_mut().note_extents_changed();
            }
        }
        self.ground.publish(id, record.sequence(), record.header_crc());
        if !self.ground.volume(id).is_dirty() {
            self.drain.update(&mut self.ground, id);
        }
    }

    /// Acts on what rooms have found out, until there is nothing more.
    pub(crate) fn settle(&mut self, now: Nanos) {
        loop {
            if let Some(bad) = self.ground.bad_mut().next_found() {
                self.repair_or_lose(bad);
            } else if let Some((reader, is_known)) = self.peers.next_reader() {
                self.read_on(&reader, is_known);
            } else if let Some(consequence) = self.ground.next_consequence() {
                self.act(now, consequence);
            } else {
                return;
            }
        }
    }

    fn act(&mut self, now: Nanos, consequence: Consequence) {
        match consequence {
            Consequence::Fenced(id) => {
                self.answer_waiting(id, ControlError::Backend(IoError::Fenced))
            }
            Consequence::Failed(id, lost) => self.answer_waiting(id, ControlError::Lost(lost)),
            Consequence::Disown(id) => self.disown(now, id),
            Consequence::Drained(id) => self.front.release_drained(&mut self.ground, id),
        }
    }

    /// A read need not wait for a repair any longer.
    fn read_on(&mut self, reader: &Reader, is_known: bool) {
        match is_known {
            true => {
                self.front.read_blocks(&mut self.ground, reader.op(), reader.block(), reader.buf())
            }
            false => self.front.fail_read(reader.op()),
        }
        self.front.is_nearer(&mut self.ground, reader.op());
    }

    /// A dirty copy has no good content. If it is the block's current copy, the peer is asked; with
    /// none there either, the block is lost. If only a closed group needed it, the peer is not
    /// asked: the cut of that group has even older content there (docs/guarantees.md, known gaps).
    fn repair_or_lose(&mut self, bad: BadCopy) {
        let (id, block, position) = (bad.volume(), bad.block(), bad.position());
        if self.ground.volume(id).ledger().index().lookup(block) == Lookup::At(position) {
            if !self.peers.repair(&mut self.ground, id, block, position) {
                self.ground.lose_for_good(id, block, position);
            }
            return;
        }
        let (ledger, space) = self.ground.ledger_and_space(id);
        let lost = !bad.is_current_only() && ledger.lose_frozen(space, block, position);
        if lost && self.ground.is_dead() {
            // Its group would be no state that the volume ever had.
            self.ground.fail(id);
        }
    }

    /// A client's request, or one of another host's.
    fn request(&mut self, now: Nanos, request: Request) {
        let incoming = match request.op {
            Op::Record { .. } => self.peers.admit_record(&self.ground, &request).map(Some),
            _ => admit(&self.ground, &request).map(|()| None),
        };
        let incoming = match incoming {
            Ok(incoming) => incoming,
            Err(error) => {
                if let Some(volume) = self.ground.get_mut(request.volume) {
                    volume.count_mut().errors += 1;
                }
                return self.ground.out_mut().reply(request.id, Err(error));
            }
        };
        let (ground, id) = (&mut self.ground, request.volume);
        let op = self.front.admit(now, request, incoming);
        match request.op {
            Op::Record { .. } => {
                let incoming = incoming.expect("an admitted record");
                self.peers.take_record(ground, id, incoming);
                self.front.log_record(op, incoming);
            }
            Op::Flush => {
                self.drain.cut(ground, now, id, true);
                if self.front.start_flush(ground, now, op) {
                    self.sync(now);
                }
            }
            Op::Fetch { sequence } => {
                let buf = request.buf.expect("a record is read into a buffer");
                if let Err(error) = self.peers.start_fetch(ground, (id, sequence), op, buf) {
                    self.front.complete(ground, op, Err(error));
                }
            }
            _ if request.len == 0 => self.front.complete(ground, op, Ok(())),
            Op::Read | Op::Prefetch => self.front.start_read(ground, op),
            Op::Block { crc } => self.front.start_block(ground, op, crc),
            Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } => {
                self.front.start_change(ground, op);
            }
        }
    }
}

/// Whether a request that is no record may be begun.
fn admit(ground: &Ground, request: &Request) -> Result<(), RequestError> {
    let volume = ground.get(request.volume);
    let volume = volume.filter(|volume| match request.op {
        Op::Block { .. } | Op::Fetch { .. } => volume.is_copy(),
        Op::Flush => volume.is_attached() || volume.is_copy(),
        _ => volume.is_attached(),
    });
    let volume = volume.filter(|volume| !volume.is_closing() && !ground.is_stopping());
    let volume = volume.ok_or(RequestError::Shutdown)?;
    let sector = SECTOR_BYTES as u64;
    let end = request.offset.checked_add(request.len).ok_or(RequestError::Invalid)?;
    let size_bytes = match request.op {
        // The last one, too, of a volume that ends within it.
        Op::Block { .. } => volume.spec().size_bytes.next_multiple_of(BLOCK_BYTES as u64),
        _ => volume.spec().size_bytes,
    };
    if !request.offset.is_multiple_of(sector)
        || !request.len.is_multiple_of(sector)
        || end > size_bytes
    {
        return Err(RequestError::Invalid);
    }
    if request.len > RANGE_BYTES_MAX {
        return Err(RequestError::Invalid);
    }
    let changes = !matches!(
        request.op,
        Op::Read | Op::Prefetch | Op::Flush | Op::Block { .. } | Op::Fetch { .. }
    );
    if changes && volume.spec().read_only {
        return Err(RequestError::ReadOnly);
    }
    if volume.is_refusing() || ground.is_dead() && volume.is_copy() {
        return Err(RequestError::Io);
    }
    if matches!(request.op, Op::Fetch { .. }) {
        let bytes = request.buf.expect("a record is read into a buffer").len as usize;
        assert_eq!((bytes, request.len), (FETCH_BYTES, 0), "a buffer holds every record");
    }
    let carries =
        matches!(request.op, Op::Read | Op::Prefetch | Op::Write { .. } | Op::Block { .. });
    if carries && request.len > 0 {
        let buf = request.buf.expect("a read or write has a buffer");
        let bytes = buffer_bytes(request.offset, request.len);
        assert!(bytes <= REQUEST_BYTES_MAX, "front doors split requests");
        assert_eq!(buf.len as usize, bytes, "a buffer covers its blocks");
    }
    Ok(())
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
