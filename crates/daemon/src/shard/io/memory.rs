//! A core that keeps volumes in memory and does nothing else: for tests of the front door, and to
//! measure what the front door costs by itself.

use crate::shard::core::Core;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use tidepool_backend::{Backend, BackendError, Peer, Release, Transfer};
use tidepool_engine::api::{
    BLOCK_BYTES, ControlError, Effect, Event, Extent, IoError, Mode, Nanos, Op, Request,
    RequestError, SECTOR_BYTES, VOLUMES_MAX, VolumeId, VolumeSpec, buffer_bytes,
};
use tidepool_engine::mem::Arena;
use tidepool_engine::status::{DeviceStatus, VolumeCounters, VolumeState, VolumeStatus};
use tidepool_engine::{AddError, Attach, OwnObjects};

/// Sectors that one volume's memory has written, one bit each.
struct MemoryVolume {
    spec: VolumeSpec,
    bytes: Vec<u8>,
    /// Per block: something was written since it was last zeroed.
    written: Vec<bool>,
    count: VolumeCounters,
}

/// How a [`MemoryCore`] behaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Bytes of the arena.
    pub arena_bytes: usize,
    /// Reads and writes touch no data: what is left is the front door.
    pub null: bool,
    /// Requests are answered later and in an order that this seed decides; 0 answers at once.
    pub shuffle: u64,
    /// Reads that touch this byte of a volume fail.
    pub bad_byte: Option<u64>,
}

/// Volumes in memory.
pub struct MemoryCore {
    options: MemoryOptions,
    arena: Arena,
    volumes: Vec<Option<MemoryVolume>>,
    effects: VecDeque<Effect>,
    /// Requests that wait for their turn when answers are shuffled.
    waiting: Vec<Request>,
    random: u64,
    /// Control number of a shutdown under way.
    stopping: bool,
}

/// A backend for volumes that need none; every transfer fails.
pub struct NoBackend {
    event: OwnedFd,
    failed: Vec<u64>,
}

impl NoBackend {
    /// One for a volume of a [`MemoryCore`].
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> std::io::Result<NoBackend> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(NoBackend { event, failed: Vec::new() })
    }
}

impl NoBackend {
    fn fail(&mut self, token: u64) {
        self.failed.push(token);
        // As with any eventfd, a full counter is one that rings already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl Backend for NoBackend {
    fn size_bytes(&self) -> u64 {
        0
    }

    fn read_only(&self) -> bool {
        false
    }

    unsafe fn submit(&mut self, token: u64, _transfer: Transfer) {
        self.fail(token);
    }

    fn set_peer(&mut self, token: u64, _peer: Option<Peer>) {
        self.fail(token);
    }

    fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.failed.drain(..).for_each(|token| done(token, Err(IoError::Errno(libc::ENODEV))));
    }

    fn attachment(&self) -> Vec<u8> {
        Vec::new()
    }

    fn close(self: Box<Self>, _how: Release) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Requests that a shuffling core holds back at most.
const WAITING_MAX: usize = 64;
/// Bytes of a volume that one status of blocks looks at: the rest is asked for again.
pub const STATUS_BYTES_MAX: u64 = 64 << 20;

impl MemoryCore {
    /// A core without volumes.
    pub fn new(options: MemoryOptions) -> MemoryCore {
        MemoryCore {
            options,
            arena: Arena::new(options.arena_bytes),
            volumes: (0..VOLUMES_MAX).map(|_| None).collect(),
            effects: VecDeque::with_capacity(1024),
            waiting: Vec::with_capacity(WAITING_MAX),
            random: options.shuffle,
            stopping: false,
        }
    }

    fn random(&mut self) -> u64 {
        // xorshift64: any order will do, as long as the seed repeats it.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn volume(&self, id: VolumeId) -> Option<&MemoryVolume> {
        self.volumes.get(id.0 as usize)?.as_ref()
    }

    fn answer(&mut self, request: Request) {
        let result = self.perform(&request);
        self.effects.push_back(Effect::Reply { id: request.id, result });
    }

    fn answer_one_of(&mut self) {
        let index = self.random() as usize % self.waiting.len();
        let request = self.waiting.swap_remove(index);
        self.answer(request);
    }

    fn perform(&mut self, request: &Request) -> Result<(), RequestError> {
        let Request { op, offset, len, buf, .. } = *request;
        let volume = self.volumes.get_mut(request.volume.0 as usize).and_then(Option::as_mut);
        let volume = volume.ok_or(RequestError::Shutdown)?;
        let end = offset.checked_add(len).filter(|end| *end <= volume.spec.size_bytes);
        let end = end.ok_or(RequestError::Invalid)? as usize;
        let sector = SECTOR_BYTES as u64;
        if offset % sector != 0 || len % sector != 0 {
            return Err(RequestError::Invalid);
        }
        let carries = matches!(op, Op::Read | Op::Write { .. } | Op::Prefetch);
        assert_eq!(
            buf.map(|b| b.len as usize),
            carries.then(|| buffer_bytes(offset, len)),
            "the buffer fits"
        );
        let range = offset as usize..end;
        let blocks = range.start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let data = buf.map(|b| b.slice(range.start % BLOCK_BYTES, range.len()));
        if self
            .options
            .bad_byte
            .is_some_and(|bad| range.contains(&(bad as usize)) && op == Op::Read)
        {
            return Err(RequestError::Io);
        }
        match (op, data) {
            _ if self.options.null => {}
            (Op::Read, Some(data)) => {
                self.arena.bytes_mut(data).copy_from_slice(&volume.bytes[range])
            }
            (Op::Write { .. }, Some(data)) => {
                volume.bytes[range].copy_from_slice(self.arena.bytes(data));
                volume.written[blocks].fill(true);
            }
            (Op::Discard { .. } | Op::WriteZeroes { .. }, _) => {
                volume.bytes[range.clone()].fill(0);
                volume.written[range.start.div_ceil(BLOCK_BYTES)
                    ..(end / BLOCK_BYTES).max(range.start.div_ceil(BLOCK_BYTES))]
                    .fill(false);
            }
            _ => {}
        }
        match op {
            Op::Read => volume.count.reads += 1,
            Op::Write { .. } => volume.count.writes += 1,
            Op::Flush => volume.count.flushes += 1,
            Op::Discard { .. } | Op::WriteZeroes { .. } => volume.count.discards += 1,
            Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
        }
        Ok(())
    }

    fn done(&mut self, control: u64) {
        self.effects.push_back(Effect::ControlDone { control, result: Ok(()) });
    }
}

impl Core for MemoryCore {
    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    fn handle(&mut self, _now: Nanos, event: Event) {
        match event {
            Event::Request(request) if self.options.shuffle != 0 => {
                self.waiting.push(request);
                if self.waiting.len() >= WAITING_MAX {
                    self.answer_one_of();
                }
            }
            Event::Request(request) => self.answer(request),
            Event::Tick if !self.waiting.is_empty() => self.answer_one_of(),
            Event::Tick | Event::Done { .. } => {}
        }
    }

    fn next_effect(&mut self, _now: Nanos) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn next_deadline(&self) -> Option<Nanos> {
        (!self.waiting.is_empty()).then_some(0)
    }

    fn volumes(&self) -> Vec<(VolumeId, VolumeSpec)> {
        let known = self.volumes.iter().enumerate();
        known.filter_map(|(id, v)| Some((VolumeId(id as u16), v.as_ref()?.spec.clone()))).collect()
    }

    fn add_volume(
        &mut self,
        _now: Nanos,
        spec: VolumeSpec,
        control: u64,
    ) -> Result<VolumeId, AddError> {
        let id = self
            .volumes
            .iter()
            .position(Option::is_none)
            .ok_or(AddError::TooMany(VOLUMES_MAX as u32))?;
        let bytes = if self.options.null { 0 } else { spec.size_bytes as usize };
        let blocks = (spec.size_bytes as usize).div_ceil(BLOCK_BYTES);
        let volume = MemoryVolume {
            bytes: vec![0; bytes],
            written: vec![false; blocks],
            count: VolumeCounters::default(),
            spec,
        };
        self.volumes[id] = Some(volume);
        self.done(control);
        Ok(VolumeId(id as u16))
    }

    fn attach(
        &mut self,
        _now: Nanos,
        _id: VolumeId,
        _attach: Attach,
        control: u64,
    ) -> Result<(), AddError> {
        self.done(control);
        Ok(())
    }

    fn set_own(&mut self, _: VolumeId, _: &OwnObjects) -> Result<(), ControlError> {
        Ok(())
    }

    fn set_parent(&mut self, _: VolumeId, _: VolumeId) -> Result<(), ControlError> {
        Err(ControlError::NotParent)
    }

    fn set_mode(&mut self, _now: Nanos, id: VolumeId, mode: Mode, control: u64) {
        if let Some(volume) = self.volumes[id.0 as usize].as_mut() {
            volume.spec.mode = mode;
        }
        self.done(control);
    }

    fn set_dirty_bytes_max(&mut self, _now: Nanos, _id: VolumeId, _bytes: u64, control: u64) {
        self.done(control);
    }

    fn set_attachment(&mut self, _now: Nanos, id: VolumeId, attachment: Vec<u8>, control: u64) {
        if let Some(volume) = self.volumes[id.0 as usize].as_mut() {
            volume.spec.attachment = attachment;
        }
        self.done(control);
    }

    fn drain(&mut self, _now: Nanos, _id: VolumeId, control: u64) {
        self.done(control);
    }

    fn pause_drain(&mut self, _paused: bool) {}

    fn snapshot(&mut self, _now: Nanos, _id: VolumeId, control: u64) {
        self.done(control);
    }

    fn resize(&mut self, _now: Nanos, _id: VolumeId, _size_bytes: u64, control: u64) {
        self.done(control);
    }

    fn remove(&mut self, _now: Nanos, id: VolumeId, _verify: bool, control: u64) {
        self.volumes[id.0 as usize] = None;
        self.done(control);
    }

    fn give_up(&mut self, now: Nanos, id: VolumeId, control: u64) {
        self.remove(now, id, false, control);
    }

    fn shutdown(&mut self, _now: Nanos, control: u64) {
        while !self.waiting.is_empty() {
            self.answer_one_of();
        }
        self.stopping = true;
        self.done(control);
    }

    fn volume_status(&self, _now: Nanos, id: VolumeId) -> Option<VolumeStatus> {
        let volume = self.volume(id)?;
        Some(VolumeStatus {
            id,
            spec: volume.spec.clone(),
            mode: volume.spec.mode,
            state: VolumeState::Serving,
            dirty: false,
            dirty_bytes: 0,
            dirty_zero_bytes: 0,
            dirty_bytes_max: volume.spec.dirty_bytes_max,
            dirty_age_ns: 0,
            exposed_bytes: 0,
            exposed_age_ns: 0,
            cached_bytes: 0,
            lost_blocks: 0,
            sequence: 0,
            sequence_drained: 0,
            backend_error: None,
            flushes: volume.count.flushes > 0,
            drain_writes_in_flight: 0,
            backend_unflushed: false,
            count: volume.count,
        })
    }

    fn device_status(&self) -> DeviceStatus {
        let used = self.arena.len_bytes() - self.arena.free_bytes();
        let arena_bytes = self.arena.len_bytes() as u64;
        DeviceStatus { arena_used_bytes: used as u64, arena_bytes, ..DeviceStatus::default() }
    }

    fn block_status(
        &self,
        id: VolumeId,
        offset: u64,
        len: u64,
        extents_max: usize,
        out: &mut Vec<Extent>,
    ) -> u64 {
        out.clear();
        let Some(volume) = self.volume(id) else { return 0 };
        let (mut at, end) = (offset, offset + len.min(STATUS_BYTES_MAX));
        while at < end && out.len() < extents_max {
            let block = at as usize / BLOCK_BYTES;
            let next = ((block + 1) * BLOCK_BYTES) as u64;
            let written = volume.written[block];
            let bytes = next.min(end) - at;
            match out.last_mut() {
                Some(last) if last.dirty == written => last.len += bytes,
                _ => {
                    out.push(Extent { len: bytes, dirty: written, zero: !written, cached: written })
                }
            }
            at += bytes;
        }
        end.saturating_sub(offset) / BLOCK_BYTES as u64
    }
}
