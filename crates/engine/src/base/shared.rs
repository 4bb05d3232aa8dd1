//! What the core works with: the memory of transfers, effects, and what is true of the cache device.

use crate::api::Nanos;
use crate::base::checkpoints::Checkpoints;
use crate::base::consequences::Consequences;
use crate::base::mem::Arena;
use crate::base::out::Out;
use crate::base::pools::Pools;
use crate::format::Geometry;
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

/// What every room works with.
pub(crate) struct Base {
    pub(crate) geo: Geometry,
    pub(crate) config: EngineConfig,
    pub(crate) arena: Arena,
    pub(crate) pools: Pools,
    pub(crate) out: Out,
    /// What is known of checkpoints, and asked of them.
    pub(crate) checkpoints: Checkpoints,
    /// What the loop has to act on.
    pub(crate) consequences: Consequences,
    /// Counters of the device.
    pub(crate) device: DeviceStatus,
    /// The cache device has failed.
    pub(crate) dead: bool,
    /// Control number of a shutdown under way; [`LAST_CHECKPOINT`] at its end.
    pub(crate) stopping: Option<u64>,
}

/// In [`Base::stopping`]: the checkpoint that ends a shutdown has begun.
pub(crate) const LAST_CHECKPOINT: u64 = u64::MAX;

impl Base {
    /// `durable`: number of the newest durable checkpoint.
    pub(crate) fn new(geo: Geometry, config: EngineConfig, durable: u64) -> Base {
        let mut arena = Arena::new(config.arena_bytes);
        let pools =
            Pools::new(&mut arena, config.append_bytes, config.appends_in_flight, config.drain_buffers);
        Base {
            geo,
            config,
            arena,
            pools,
            out: Out::new(),
            checkpoints: Checkpoints::new(durable),
            consequences: Consequences::default(),
            device: DeviceStatus::default(),
            dead: false,
            stopping: None,
        }
    }
}
