//! What the core works with: the memory of transfers, effects, and what is true of the cache
//! device.

use crate::api::{BLOCK_BYTES, ControlError, Nanos};
use crate::base::checkpoints::Checkpoints;
use crate::base::consequences::{Consequence, Consequences};
use crate::base::flight::Io;
use crate::base::mem::{Arena, Buf};
use crate::base::out::{Next, Out};
use crate::base::pools::Pools;
use crate::format::Geometry;
use crate::status::DeviceStatus;

/// See [`EngineConfig::stop_flush_ns_max`]: well below the time after which service managers kill.
const STOP_FLUSH_NS_MAX: Nanos = 5_000_000_000;

/// What the driver may choose.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Memory for requests and transfers, in bytes. What the core itself needs comes out of it
    /// first.
    pub arena_bytes: usize,
    /// Largest device write of the log in bytes.
    pub append_bytes: usize,
    /// Device writes of the log in flight at once.
    pub appends_in_flight: usize,
    /// Transfers of the drain in flight at once, of 256 KiB at most.
    pub drain_buffers: usize,
    /// How long a shutdown waits for backends to be flushed, in nanoseconds. It goes on without
    /// those that do not answer.
    pub stop_flush_ns_max: Nanos,
    /// Memory for the newest segments of the log, beside `arena_bytes`: what the drain finds there
    /// it does not read from the device. Less than a segment is nothing.
    pub mirror_bytes: usize,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            arena_bytes: 160 << 20,
            append_bytes: 512 << 10,
            appends_in_flight: 3,
            drain_buffers: 64,
            stop_flush_ns_max: STOP_FLUSH_NS_MAX,
            mirror_bytes: 0,
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
            mirror_bytes: 0,
        }
    }
}

/// What every room works with.
pub(crate) struct Base {
    geo: Geometry,
    config: EngineConfig,
    arena: Arena,
    pools: Pools,
    out: Out,
    checkpoints: Checkpoints,
    consequences: Consequences,
    counters: DeviceStatus,
    /// The cache device has failed.
    dead: bool,
    stop: Stop,
}

/// How far a shutdown is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    No,
    /// Asked for under this control number: what is under way is to end.
    Asked(u64),
    /// The last checkpoint has begun. What is not in it may be lost with the power, and must not be
    /// answered.
    LastCheckpoint,
}

impl Base {
    /// `durable`: number of the newest durable checkpoint.
    pub(crate) fn new(geo: Geometry, config: EngineConfig, durable: u64) -> Base {
        let segment_bytes = geo.segment_blocks as usize * BLOCK_BYTES;
        let mirror_bytes = config.mirror_bytes / segment_bytes * segment_bytes;
        let mut arena = Arena::new(config.arena_bytes + mirror_bytes);
        let mirror = arena.set_aside(mirror_bytes);
        let pools = Pools::new(&mut arena, &config, (mirror, segment_bytes));
        Base {
            geo,
            config,
            arena,
            pools,
            out: Out::new(),
            checkpoints: Checkpoints::new(durable),
            consequences: Consequences::default(),
            counters: DeviceStatus::default(),
            dead: false,
            stop: Stop::No,
        }
    }

    /// Identity and layout of the cache device.
    pub(crate) fn geo(&self) -> &Geometry {
        &self.geo
    }

    /// What the driver has chosen.
    pub(crate) fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The cache device has failed.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead
    }

    /// The cache device has failed: nothing is written to it any more.
    pub(crate) fn die(&mut self) {
        self.dead = true;
    }

    /// The core is to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop != Stop::No
    }

    /// The last checkpoint of a shutdown has begun: nothing is answered any more.
    pub(crate) fn is_at_last_checkpoint(&self) -> bool {
        self.stop == Stop::LastCheckpoint
    }

    /// Control number of a shutdown whose last checkpoint has not begun.
    pub(crate) fn stop_asked(&self) -> Option<u64> {
        match self.stop {
            Stop::Asked(control) => Some(control),
            Stop::No | Stop::LastCheckpoint => None,
        }
    }

    /// The core is to stop, under this control number.
    pub(crate) fn ask_to_stop(&mut self, control: u64) {
        self.stop = Stop::Asked(control);
    }

    /// The last checkpoint of a shutdown begins.
    pub(crate) fn begin_last_checkpoint(&mut self) {
        self.stop = Stop::LastCheckpoint;
    }

    /// The memory of all transfers.
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The memory of all transfers, to fill buffers and to take and give them.
    pub(crate) fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// What is in a buffer.
    pub(crate) fn bytes(&self, buf: Buf) -> &[u8] {
        self.arena.bytes(buf)
    }

    /// What is in a buffer, to be changed.
    pub(crate) fn bytes_mut(&mut self, buf: Buf) -> &mut [u8] {
        self.arena.bytes_mut(buf)
    }

    /// Copies what is in a buffer to another one of its size.
    pub(crate) fn copy(&mut self, from: Buf, to: Buf) {
        self.arena.copy(from, to);
    }

    /// The buffers that the core uses itself.
    pub(crate) fn pools(&self) -> &Pools {
        &self.pools
    }

    /// The buffers that the core uses itself, to take and give them.
    pub(crate) fn pools_mut(&mut self) -> &mut Pools {
        &mut self.pools
    }

    /// What is known of checkpoints, and asked of them.
    pub(crate) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// What is known of checkpoints, to ask for one, and for what makes them to tell.
    pub(crate) fn checkpoints_mut(&mut self) -> &mut Checkpoints {
        &mut self.checkpoints
    }

    /// The checkpoint `number` is durable.
    pub(crate) fn complete_checkpoint(&mut self, number: u64) {
        self.checkpoints.complete(number);
        self.counters.checkpoints += 1;
    }

    /// The loop has to act on something.
    pub(crate) fn tell(&mut self, consequence: Consequence) {
        self.consequences.push(consequence);
    }

    /// What the loop has to act on next.
    pub(crate) fn next_consequence(&mut self) -> Option<Consequence> {
        self.consequences.pop()
    }

    /// Effects on their way out.
    pub(crate) fn out_mut(&mut self) -> &mut Out {
        &mut self.out
    }

    /// There is something to look for.
    pub(crate) fn stir(&mut self) {
        self.out.stir();
    }

    /// The next effect; see [`Out::next`].
    pub(crate) fn next_effect(&mut self) -> Option<Next> {
        self.out.next(self.dead)
    }

    /// Reads `buf.len` bytes of the cache device at byte `offset`.
    pub(crate) fn read(&mut self, io: Io, offset: u64, buf: Buf) {
        self.out.read(io, offset, buf);
    }

    /// Writes `buf` to the cache device at byte `offset`; with `dsync` it is stable when it
    /// completes.
    pub(crate) fn write(&mut self, io: Io, offset: u64, buf: Buf, dsync: bool) {
        self.out.write(io, offset, buf, dsync);
    }

    /// Writes an append of so many records, as [`Base::write`] does.
    pub(crate) fn write_append(
        &mut self,
        io: Io,
        offset: u64,
        buf: Buf,
        records: usize,
        dsync: bool,
    ) {
        self.counters.appends += 1;
        self.counters.records += records as u64;
        self.counters.appended_bytes += u64::from(buf.len);
        self.checkpoints.note_appended(u64::from(buf.len));
        self.out.write(io, offset, buf, dsync);
    }

    /// Makes all completed writes of the cache device stable.
    pub(crate) fn sync(&mut self, io: Io) {
        self.counters.syncs += 1;
        self.out.sync(io);
    }

    /// A control operation is complete.
    pub(crate) fn control_done(&mut self, control: u64, result: Result<(), ControlError>) {
        self.out.control_done(control, result);
    }

    /// A segment is free again, or will be when the next checkpoint is durable.
    pub(crate) fn note_reclaimed(&mut self) {
        self.counters.reclaims += 1;
    }

    /// Reclaim has moved a block.
    pub(crate) fn note_moved(&mut self) {
        self.counters.moved_blocks += 1;
    }

    /// What was counted of the device.
    pub(crate) fn counters(&self) -> DeviceStatus {
        self.counters
    }
}
