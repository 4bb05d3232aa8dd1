//! What a seed decides before the run begins.

use crate::rng::Rng;
use tidepool_engine::EngineConfig;
use tidepool_engine::api::{BLOCK_BYTES, DrainOrder, Mode, Nanos};

/// One millisecond.
pub const MS: Nanos = 1_000_000;
/// One second.
pub const S: Nanos = 1_000_000_000;

/// What kind of trouble a run is about. Kills, power losses and orderly restarts are in all of
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Theme {
    /// Parts stop, but none of them breaks.
    Crashes,
    /// Backends stop, are slow, full, or fail.
    Backends,
    /// The cache device forgets, swaps and damages blocks.
    Corruption,
    /// Writes or syncs of the cache device fail.
    DeviceDeath,
    /// The cache device says that it has synced, and has not.
    Lies,
}

/// One volume.
#[derive(Debug, Clone)]
pub struct VolumePlan {
    /// Bytes.
    pub(super) size_bytes: u64,
    /// Bytes of the image that are not zero at first.
    pub(super) base_bytes: u64,
    /// Mode at first.
    pub(super) mode: Mode,
    /// Order of the drain.
    pub(super) drain: DrainOrder,
    /// Quota at first.
    pub(super) dirty_bytes_max: u64,
    /// Completed writes of the backend are durable.
    pub(super) durable_backend: bool,
    /// Usual time of a backend operation.
    pub(super) backend_latency_ns: Nanos,
    /// Requests in flight.
    pub(super) depth: usize,
    /// Mean pause between requests.
    pub(super) think_ns: Nanos,
    /// Share of unaligned requests, in parts per thousand.
    pub(super) unaligned: u64,
    /// Share of reads.
    pub(super) reads: u64,
    /// Share of flushes.
    pub(super) flushes: u64,
    /// Share of FUA among changes.
    pub(super) fua: u64,
    /// Share of discards and zeroes.
    pub(super) discards: u64,
    /// Share of requests in the hot part.
    pub(super) hot: u64,
    /// Bytes of the hot part.
    pub(super) hot_bytes: u64,
    /// Share of large requests.
    pub(super) large: u64,
    /// Number of the volume whose clone it is.
    pub(super) parent: Option<usize>,
    /// Number of the volume whose content it has at first.
    pub(super) content_of: Option<usize>,
    /// It is never written.
    pub(super) read_only: bool,
}

/// A run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Kind of trouble.
    pub(super) theme: Theme,
    /// Bytes of the cache device.
    pub(super) cache_bytes: u64,
    /// Bytes of a segment.
    pub(super) segment_bytes: Option<u32>,
    /// The core's configuration.
    pub(super) engine: EngineConfig,
    /// The volumes.
    pub(super) volumes: Vec<VolumePlan>,
    /// Client requests until the run ends.
    pub(super) requests: u64,
    /// Mean pause between two actions that are no client requests.
    pub(super) action_ns: Nanos,
    /// Usual time of a device read or write.
    pub(super) device_ns: Nanos,
    /// Usual time of a device sync.
    pub(super) sync_ns: Nanos,
    /// Modes are changed.
    pub(super) modes: bool,
    /// Most stops of the process.
    pub(super) stops_max: u64,
    /// Probability that a stop is a power loss, in parts per thousand.
    pub(super) power: u64,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(rng: &mut Rng) -> Plan {
        let theme = match rng.below(20) {
            0..=7 => Theme::Crashes,
            8..=11 => Theme::Backends,
            12..=15 => Theme::Corruption,
            16..=17 => Theme::DeviceDeath,
            _ => Theme::Lies,
        };
        let cache_bytes = rng.pick(&[64u64, 64, 64, 72, 96]) << 20;
        let segment_bytes = rng.pick(&[Some(256 << 10), Some(512 << 10), Some(1 << 20), None]);
        let engine = EngineConfig {
            arena_bytes: rng.pick(&[16usize, 18, 20, 32]) << 20,
            append_bytes: rng.pick(&[64usize, 128, 256, 512]) << 10,
            appends_in_flight: rng.range(1..5) as usize,
            drain_buffers: rng.pick(&[4, 8, 16]),
            stop_flush_ns_max: rng.pick(&[0, 100 * MS, 5 * S]),
            mirror_bytes: 0,
        };
        // What a change past the log has made void in the cache may be back if the device lies:
        // nothing beside the image tells.
        let modes = rng.permille(500) && theme != Theme::Lies;
        let mut volumes: Vec<VolumePlan> =
            (0..rng.range(1..5)).map(|_| VolumePlan::new(rng, modes)).collect();
        let pressure = rng.permille(300);
        if pressure {
            // More than the cache holds, written fast and drained slowly.
            let v = &mut volumes[0];
            (v.size_bytes, v.base_bytes, v.large, v.flushes) =
                (150 << 20, 20 << 20, 700, v.flushes.min(5));
            (v.reads, v.dirty_bytes_max, v.hot, v.depth) =
                (rng.pick(&[100, 500]), 256 << 20, 500, 8);
            (v.hot_bytes, v.think_ns) = (rng.pick(&[8u64, 30, 60]) << 20, 100_000);
            v.backend_latency_ns = rng.pick(&[1_000_000, 50_000_000]);
        }
        if theme == Theme::Lies {
            // Beside an image that is drained without groups, nothing tells how far the cache once
            // was.
            for v in &mut volumes {
                v.drain = DrainOrder::Grouped;
                // Much is committed, so that the cache falls behind its image.
                v.dirty_bytes_max = rng.pick(&[0, 64 << 10, 1 << 20]);
            }
        }
        Plan {
            theme,
            cache_bytes,
            segment_bytes,
            engine,
            volumes,
            requests: rng.range(2_000..9_000),
            action_ns: rng.pick(&[20, 50, 200, 1_000]) * MS * if pressure { 2 } else { 1 },
            device_ns: rng.pick(&[20_000, 100_000, 1_000_000]),
            sync_ns: rng.pick(&[50_000, 1_000_000, 5_000_000]),
            modes,
            stops_max: rng.pick(&[5, 20, 40]),
            power: if theme == Theme::Lies { 700 } else { rng.pick(&[0, 300, 500, 1000]) },
        }
    }
}

impl VolumePlan {
    fn new(rng: &mut Rng, modes: bool) -> VolumePlan {
        let block = BLOCK_BYTES as u64;
        let size = match rng.below(6) {
            0 => rng.range(1..4) * block,
            1 => rng.range(4..64) * block,
            2 | 3 => rng.range(64..4096) * block,
            4 => rng.range(4096..12_000) * block,
            _ => rng.range(24_000..40_000) * block,
        };
        // Sometimes the last block is only a part of one.
        let size_bytes = size + if rng.permille(400) { rng.range(1..8) * 512 } else { 0 };
        let all =
            [Mode::WriteBack, Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];
        let some = rng.below(size_bytes) / 512 * 512;
        let base_bytes = rng.pick(&[0, size_bytes, some]).min(20 << 20);
        VolumePlan {
            size_bytes,
            base_bytes,
            mode: if modes { rng.pick(&all) } else { Mode::WriteBack },
            drain: rng.pick(&[DrainOrder::Grouped, DrainOrder::Grouped, DrainOrder::Unordered]),
            dirty_bytes_max: rng.pick(&[0, 0, 0, 64 << 10, 1 << 20, 8 << 20]),
            durable_backend: rng.permille(500),
            backend_latency_ns: rng.pick(&[200_000, 1_000_000, 10_000_000]),
            depth: rng.pick(&[1, 2, 8, 24, 64]),
            think_ns: rng.pick(&[10_000, 100_000, 1_000_000, 20_000_000]),
            unaligned: rng.pick(&[0, 50, 500]),
            reads: rng.pick(&[100, 300, 500, 800]),
            flushes: rng.pick(&[0, 5, 50, 200]),
            fua: rng.pick(&[0, 20, 500]),
            discards: rng.pick(&[0, 20, 200]),
            hot: rng.pick(&[0, 500, 950]),
            hot_bytes: (rng.pick(&[4u64, 64, 512, 4096]) << 10).min(size_bytes),
            large: rng.pick(&[0, 50, 300, 900]),
            parent: None,
            content_of: None,
            read_only: false,
        }
    }
}
