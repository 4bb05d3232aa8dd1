//! A core on a device and backends in memory, driven step by step: effects are executed at once and
//! in order. The simulator (`crates/sim`) does the same with delays, disorder and faults.

#![allow(dead_code, reason = "each file of tests uses a part of it")]

mod backends;
pub mod crafted;
mod devices;
pub mod pair;

pub use devices::{MemoryDevice, Overlay};

use std::collections::HashMap;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;
use tidepool_engine::{
    Attach, Engine, EngineConfig, FETCH_BYTES, FormatOptions, OpenError, format_device,
};

pub const MIB: u64 = 1 << 20;

/// A core, its device and its volumes' images.
pub struct World {
    pub engine: Engine,
    pub device: MemoryDevice,
    pub images: Vec<Vec<u8>>,
    pub now: Nanos,
    next_id: u64,
    pub replies: HashMap<RequestId, Result<(), RequestError>>,
    pub controls: HashMap<u64, Result<(), ControlError>>,
    /// Backend operations are kept back while this is set.
    pub backend_stopped: bool,
    /// Which of them are kept back while it is not.
    pub holds: fn(&BackendOp) -> bool,
    /// Volumes whose backend alone does the same.
    pub stopped: Vec<VolumeId>,
    pub device_reads: u64,
    pub device_writes: u64,
    /// Syncs of the device, and writes that are stable by themselves.
    pub device_syncs: u64,
    /// Images as snapshots have found them, by control operation.
    pub snapshots: HashMap<u64, Vec<u8>>,
    pub snapshot_result: Result<(), IoError>,
    pub resize_result: Result<(), IoError>,
    pub backend_reads: u64,
    pub backend_flushes: u64,
    pub disowned: Vec<VolumeId>,
    /// The record beside the image cannot be changed for now.
    pub disown_stopped: bool,
    /// Ranges that backends were told to write as zeroes, keeping the space.
    pub backend_zeroes: Vec<(VolumeId, u64, u64)>,
    /// What writes and syncs of the cache device, and all operations of backends, report.
    pub device_result: Result<(), IoError>,
    pub backend_result: Result<(), IoError>,
    /// Frames beside the images: volume, generation, group, number.
    frames: HashMap<(u16, u64, u64, u32), Vec<u8>>,
    /// Of each volume: generation, and the groups that count with their number of frames.
    pub committed: HashMap<u16, (u64, Vec<(u64, u32)>)>,
    /// What owners have recorded beside the images of how far they are.
    pub notes: Vec<BackendOp>,
    /// Backends lose what is not flushed: the images as the last flush left them.
    pub stable: Option<Vec<Vec<u8>>>,
    /// So many flushes fail from now on, and what was written before each of them is lost.
    pub flushes_to_fail: u32,
    waiting: Vec<(Token, VolumeId, BackendOp)>,
    /// What backends refuse, and how.
    pub refuses: fn(&BackendOp) -> Option<IoError>,
    /// Writes of the cache device that begin while this is set stay in flight until they are
    /// released.
    pub hold_device_writes: bool,
    device_waiting: Vec<(Token, u64, Buf)>,
    /// What peers were to be sent, with the bytes of records.
    pub to_peer: Vec<(PeerOp, Vec<u8>)>,
    /// Buffers of records that are not answered.
    records: HashMap<RequestId, Buf>,
    /// Reads of the cache device that begin in here stay in flight until they are released.
    pub hold_device_reads: std::ops::Range<u64>,
    device_reads_waiting: Vec<(Token, u64, Buf)>,
}

pub fn spec(name: &str, size_bytes: u64, mode: Mode) -> VolumeSpec {
    VolumeSpec {
        name: name.into(),
        backend: format!("file:/images/{name}"),
        size_bytes,
        mode,
        drain: DrainOrder::Unordered,
        dirty_bytes_max: 0,
        read_only: false,
        generation: 1,
        attachment: vec![1, 2, 3],
    }
}

impl World {
    pub fn new(cache_bytes: u64, volumes: &[VolumeSpec]) -> World {
        World::with_segments(cache_bytes, 256 << 10, volumes)
    }

    pub fn with_segments(cache_bytes: u64, segment_bytes: u32, volumes: &[VolumeSpec]) -> World {
        let mut device = MemoryDevice(vec![0; cache_bytes as usize]);
        let options = FormatOptions {
            uuid: [9; 16],
            size_bytes: cache_bytes,
            segment_bytes: Some(segment_bytes),
        };
        format_device(&mut device, &options, &mut |_, _| ()).expect("format");
        let mut world = World::on(device, Vec::new()).expect("open");
        for v in volumes {
            let control = world.fresh();
            world.images.push(vec![0; v.size_bytes as usize]);
            world.engine.add_volume(world.now, v.clone(), control).expect("add");
            world.run();
            assert_eq!(world.controls.remove(&control), Some(Ok(())));
        }
        world
    }

    /// A core on a device that is a cache already, with the images of its volumes by number; none
    /// is attached.
    pub fn on(mut device: MemoryDevice, images: Vec<Vec<u8>>) -> Result<World, OpenError> {
        let (engine, _) = Engine::open(&mut device, EngineConfig::small(), 0)?;
        Ok(World {
            engine,
            device,
            images,
            now: 0,
            next_id: 1,
            replies: HashMap::new(),
            controls: HashMap::new(),
            backend_stopped: false,
            holds: |_| false,
            stopped: Vec::new(),
            device_reads: 0,
            device_writes: 0,
            device_syncs: 0,
            snapshots: HashMap::new(),
            snapshot_result: Ok(()),
            resize_result: Ok(()),
            backend_reads: 0,
            backend_flushes: 0,
            disowned: Vec::new(),
            disown_stopped: false,
            backend_zeroes: Vec::new(),
            device_result: Ok(()),
            backend_result: Ok(()),
            frames: HashMap::new(),
            committed: HashMap::new(),
            notes: Vec::new(),
            stable: None,
            flushes_to_fail: 0,
            waiting: Vec::new(),
            refuses: |_| None,
            hold_device_writes: false,
            device_waiting: Vec::new(),
            to_peer: Vec::new(),
            records: HashMap::new(),
            hold_device_reads: 0..0,
            device_reads_waiting: Vec::new(),
        })
    }

    pub fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Executes effects until there are none.
    pub fn run(&mut self) {
        if !self.backend_stopped {
            for (token, volume, op) in std::mem::take(&mut self.waiting) {
                if self.stopped.contains(&volume) || (self.holds)(&op) {
                    self.waiting.push((token, volume, op));
                } else {
                    self.backend(token, volume, op);
                }
            }
        }
        while self.step() {}
    }

    /// Executes one effect; false if there is none.
    pub fn step(&mut self) -> bool {
        let Some(effect) = self.engine.next_effect(self.now) else { return false };
        if let Effect::DeviceRead { offset, buf, .. } | Effect::DeviceWrite { offset, buf, .. } =
            &effect
        {
            let block = BLOCK_BYTES as u64;
            assert!(
                offset.is_multiple_of(block)
                    && u64::from(buf.len).is_multiple_of(block)
                    && buf.len > 0
            );
        }
        match effect {
            Effect::DeviceRead { token, offset, buf }
                if self.hold_device_reads.contains(&offset) =>
            {
                self.device_reads_waiting.push((token, offset, buf));
            }
            Effect::DeviceRead { token, offset, buf } => self.device_read(token, offset, buf),
            Effect::DeviceWrite { token, offset, buf, .. } if self.hold_device_writes => {
                self.device_waiting.push((token, offset, buf));
            }
            Effect::DeviceWrite { token, .. } if self.device_result.is_err() => {
                self.device_writes += 1;
                self.done(token, self.device_result);
            }
            Effect::DeviceWrite { token, offset, buf, dsync } => {
                self.device_writes += 1;
                self.device_syncs += u64::from(dsync);
                self.device_write(offset, buf);
                self.done(token, Ok(()));
            }
            Effect::DeviceSync { token } => {
                self.device_syncs += 1;
                self.done(token, self.device_result);
            }
            Effect::Backend { token, volume, op } => {
                if self.backend_stopped || self.stopped.contains(&volume) || (self.holds)(&op) {
                    self.waiting.push((token, volume, op));
                } else {
                    self.backend(token, volume, op);
                }
            }
            Effect::Peer { op, .. } => {
                let bytes = match op {
                    PeerOp::Record { buf, .. } => self.engine.arena().bytes(buf).to_vec(),
                    PeerOp::Stabilise { .. } | PeerOp::Block { .. } => Vec::new(),
                };
                self.to_peer.push((op, bytes));
            }
            Effect::Reply { id, result } => {
                self.records
                    .remove(&id)
                    .into_iter()
                    .for_each(|buf| self.engine.arena_mut().free(buf));
                self.replies.insert(id, result);
            }
            Effect::ControlDone { control, result } => drop(self.controls.insert(control, result)),
        }
        true
    }

    fn done(&mut self, token: Token, result: Result<(), IoError>) {
        self.engine.handle(self.now, Event::Done { token, result });
    }

    /// Writes of the cache device that are held, in the order in which they were sent.
    pub fn held_device_writes(&self) -> Vec<(u64, Vec<u8>)> {
        let held = self.device_waiting.iter();
        held.map(|&(_, offset, buf)| (offset, self.engine.arena().bytes(buf).to_vec())).collect()
    }

    fn device_read(&mut self, token: Token, offset: u64, buf: Buf) {
        self.device_reads += 1;
        let at = offset as usize;
        let from = &self.device.0[at..at + buf.len as usize];
        self.engine.arena_mut().bytes_mut(buf).copy_from_slice(from);
        self.done(token, Ok(()));
    }

    /// How many reads of the cache device are held.
    pub fn device_reads_held(&self) -> usize {
        self.device_reads_waiting.len()
    }

    /// The oldest read of the cache device that is held completes; those that begin then are held.
    pub fn release_a_device_read(&mut self) {
        let (token, offset, buf) = self.device_reads_waiting.remove(0);
        self.device_read(token, offset, buf);
        self.run();
    }

    /// Reads of the cache device that were held complete; later ones are not held any more. Tells
    /// how many there were.
    pub fn release_device_reads(&mut self) -> usize {
        self.hold_device_reads = 0..0;
        let held = std::mem::take(&mut self.device_reads_waiting);
        let n = held.len();
        held.into_iter().for_each(|(token, offset, buf)| self.device_read(token, offset, buf));
        n
    }

    /// Those that were held fail.
    pub fn fail_device_reads(&mut self) -> usize {
        self.hold_device_reads = 0..0;
        let held = std::mem::take(&mut self.device_reads_waiting);
        let n = held.len();
        held.into_iter().for_each(|(token, ..)| self.done(token, Err(IoError::Errno(5))));
        n
    }

    /// The oldest write of the cache device that is held completes; tells whether there is one.
    pub fn release_a_device_write(&mut self) -> bool {
        let Some(&(token, offset, buf)) = self.device_waiting.first() else { return false };
        self.device_waiting.remove(0);
        self.device_write(offset, buf);
        self.done(token, Ok(()));
        self.run();
        true
    }

    /// Writes of the cache device that were held complete; later ones are not held any more.
    pub fn release_device_writes(&mut self) {
        self.hold_device_writes = false;
        for (token, offset, buf) in std::mem::take(&mut self.device_waiting) {
            if self.device_result.is_ok() {
                self.device_write(offset, buf);
            }
            self.done(token, self.device_result);
        }
        self.run();
    }

    /// Writes of the cache device that are held reach it, but the daemon dies before it learns
    /// that.
    pub fn die_with_device_writes(&mut self) {
        self.hold_device_writes = false;
        for (_, offset, buf) in std::mem::take(&mut self.device_waiting) {
            self.device_write(offset, buf);
        }
        self.reopen();
    }

    fn device_write(&mut self, offset: u64, buf: Buf) {
        let at = offset as usize;
        self.device.0[at..at + buf.len as usize].copy_from_slice(self.engine.arena().bytes(buf));
    }

    /// Lets time pass as far as `ns` with no other ticks than those that the core has asked for.
    pub fn follow_deadlines(&mut self, ns: Nanos) {
        let end = self.now + ns;
        while let Some(next) = self.engine.next_deadline().filter(|&next| next <= end) {
            assert!(next > self.now, "what is due at once needs no tick");
            self.now = next;
            self.engine.handle(self.now, Event::Tick);
            self.run();
        }
        self.now = end;
    }

    /// Lets time pass in steps, with ticks.
    pub fn pass(&mut self, ns: Nanos) {
        let end = self.now + ns;
        while self.now < end {
            let next = self.engine.next_deadline().unwrap_or(end);
            self.now = next.clamp(self.now + 1, end);
            self.engine.handle(self.now, Event::Tick);
            self.run();
        }
    }

    /// Sends a record of an owner's log to a replica.
    pub fn send_record(&mut self, volume: u16, bytes: &[u8], durable: bool) -> RequestId {
        let id = self.fresh();
        let buf = self.engine.arena_mut().alloc(bytes.len()).expect("room");
        self.engine.arena_mut().bytes_mut(buf).copy_from_slice(bytes);
        let op = Op::Record { durable };
        self.records.insert(id, buf);
        let request =
            Request { id, volume: VolumeId(volume), op, offset: 0, len: 0, buf: Some(buf) };
        self.engine.handle(self.now, Event::Request(request));
        self.run();
        id
    }

    /// How far the log of volume 0 is.
    pub fn log(&self) -> LogStatus {
        self.engine.log_status(VolumeId(0)).expect("there is a volume")
    }

    /// Sends a request; the answer, if it comes at once.
    pub fn request(
        &mut self,
        volume: u16,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
    ) -> (RequestId, Option<Buf>) {
        let sent = self.submit(volume, op, offset, len, data);
        self.run();
        sent
    }

    /// Sends a request that is taken in with others.
    pub fn submit(
        &mut self,
        volume: u16,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
    ) -> (RequestId, Option<Buf>) {
        let id = self.fresh();
        let bytes = match op {
            Op::Read | Op::Write { .. } | Op::Prefetch | Op::Block { .. } => {
                Some(buffer_bytes(offset, len))
            }
            Op::Fetch { .. } => Some(FETCH_BYTES),
            _ => None,
        };
        let buf = bytes.map(|bytes| {
            let buf = self.engine.arena_mut().alloc(bytes).expect("room");
            if let Some(data) = data {
                let at = (offset % BLOCK_BYTES as u64) as usize;
                self.engine.arena_mut().bytes_mut(buf)[at..at + data.len()].copy_from_slice(data);
            }
            buf
        });
        let request = Request { id, volume: VolumeId(volume), op, offset, len, buf };
        self.engine.handle(self.now, Event::Request(request));
        (id, buf)
    }

    /// A request that must be answered, after some time at most.
    fn answered(
        &mut self,
        volume: u16,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
    ) -> Result<Vec<u8>, RequestError> {
        let (id, buf) = self.request(volume, op, offset, len, data);
        for _ in 0..100 {
            if self.replies.contains_key(&id) {
                break;
            }
            self.pass(100_000_000);
        }
        let result = self
            .replies
            .remove(&id)
            .unwrap_or_else(|| panic!("{op:?} at {offset}+{len} is not answered"));
        let mut out = Vec::new();
        if let Some(buf) = buf {
            let at = (offset % BLOCK_BYTES as u64) as usize;
            out.extend_from_slice(&self.engine.arena().bytes(buf)[at..at + len as usize]);
            self.engine.arena_mut().free(buf);
        }
        result.map(|()| out)
    }

    pub fn write(&mut self, volume: u16, offset: u64, data: &[u8]) {
        self.answered(volume, Op::Write { fua: false }, offset, data.len() as u64, Some(data))
            .expect("write");
    }

    pub fn try_read(
        &mut self,
        volume: u16,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, RequestError> {
        self.answered(volume, Op::Read, offset, len, None)
    }

    pub fn read(&mut self, volume: u16, offset: u64, len: u64) -> Vec<u8> {
        self.try_read(volume, offset, len).expect("read")
    }

    pub fn op(&mut self, volume: u16, op: Op, offset: u64, len: u64) -> Result<(), RequestError> {
        self.answered(volume, op, offset, len, None).map(|_| ())
    }

    pub fn flush(&mut self, volume: u16) {
        self.op(volume, Op::Flush, 0, 0).expect("flush");
    }

    /// A control operation that must complete, after some time at most.
    pub fn control(
        &mut self,
        start: impl FnOnce(&mut Engine, Nanos, u64),
    ) -> Result<(), ControlError> {
        let control = self.fresh();
        start(&mut self.engine, self.now, control);
        self.run();
        for _ in 0..100 {
            if let Some(result) = self.controls.remove(&control) {
                return result;
            }
            self.pass(100_000_000);
        }
        panic!("a control operation does not complete");
    }

    pub fn drain(&mut self, volume: u16) {
        self.control(|e, now, c| e.drain(now, VolumeId(volume), c)).expect("drain");
    }

    /// The daemon dies and is started again; the volumes have no backends yet.
    pub fn reopen(&mut self) {
        self.waiting.clear();
        self.device_waiting.clear();
        self.device_reads_waiting.clear();
        let (engine, _) =
            Engine::open(&mut self.device, EngineConfig::small(), self.now).expect("open");
        self.engine = engine;
    }

    /// The daemon dies and is started again.
    pub fn restart(&mut self, keep_clean: bool) {
        self.reopen();
        self.attach(keep_clean);
    }

    /// All volumes get their backends.
    pub fn attach(&mut self, keep_clean: bool) {
        for (id, spec) in self.engine.volumes() {
            let attach = Attach::again(&spec, keep_clean);
            self.control(|e, now, c| e.attach(now, id, attach, c).expect("attach"))
                .expect("attached");
        }
    }

    /// Damages every copy of a block on the cache device; returns where they stand.
    pub fn corrupt(&mut self, content: &[u8]) -> Vec<usize> {
        assert_eq!(content.len(), BLOCK_BYTES);
        let blocks = self.device.0.chunks_exact_mut(BLOCK_BYTES).enumerate();
        let copies: Vec<usize> = blocks
            .filter(|(_, b)| *b == content)
            .map(|(i, b)| {
                b[7] ^= 1;
                i
            })
            .collect();
        assert!(!copies.is_empty(), "the block is on the device");
        copies
    }

    pub fn status(&self, volume: u16) -> tidepool_engine::status::VolumeStatus {
        self.engine.volume_status(self.now, VolumeId(volume)).expect("the volume")
    }
}

/// A volume of which something that went past the cache is not on the backend's stable media.
pub fn unflushed() -> World {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.stable = Some(vec![vec![0; 16 << 20]]);
    w
}

/// A drain that a stopped backend holds up comes to its end: the volume is fenced, or the cache
/// device fails. Returns what is told to the caller who waited for it.
pub fn end_of_drain(w: &mut World, fenced: bool) -> ControlError {
    if fenced {
        w.backend_result = Err(IoError::Fenced);
        w.backend_stopped = false;
        return ControlError::Backend(IoError::Fenced);
    }
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, MIB, 4096, Some(&pattern(2, 4096)));
    ControlError::Device
}

/// `blocks` blocks with recognisable content.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}
