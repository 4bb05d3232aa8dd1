//! What a life is like.

use super::MS;
use crate::rng::Rng;
use tidepool_engine::api::*;

/// Mean times of what a host waits for.
#[derive(Debug, Clone)]
pub(super) struct Latency {
    pub(super) device_ns: Nanos,
    pub(super) sync_ns: Nanos,
    pub(super) link_ns: Nanos,
    pub(super) image_ns: Nanos,
}

/// What a run is like.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) size_bytes: u64,
    pub(super) cache_bytes: [u64; 2],
    pub(super) segment_bytes: [u32; 2],
    pub(super) append_bytes: usize,
    pub(super) drain: DrainOrder,
    pub(super) slots: usize,
    pub(super) think_ns: Nanos,
    pub(super) reads: u64,
    pub(super) flushes: u64,
    pub(super) fua: u64,
    pub(super) zeroes: u64,
    pub(super) latency: Latency,
    /// Mean time from one fault to the next.
    pub(super) fault_ns: Nanos,
    pub(super) lost_answers: u64,
    /// What goes wrong next waits until the two are in sync again, for some time.
    pub(super) patient: bool,
    /// Somebody watches the owner and lets its peer take over.
    pub(super) takes_over: bool,
    /// Nothing goes wrong before the two are in sync.
    pub(super) sync_first: bool,
    /// The volume's mode changes now and then.
    pub(super) modes: bool,
    /// What write-back does with one copy.
    pub(super) alone: Degraded,
    /// Writes of each host's other volume that are in flight at once.
    pub(super) neighbour: usize,
}

impl Plan {
    pub(super) fn new(rng: &mut Rng) -> Plan {
        Plan {
            size_bytes: rng.pick(&[1 << 20, 8 << 20, 24 << 20]),
            cache_bytes: [0; 2].map(|_| rng.pick(&[64 << 20, 64 << 20, 128 << 20])),
            segment_bytes: [0; 2].map(|_| rng.pick(&[256 << 10, 512 << 10, 2 << 20])),
            append_bytes: rng.pick(&[128 << 10, 512 << 10]),
            drain: rng.pick(&[DrainOrder::Grouped, DrainOrder::Unordered]),
            slots: rng.pick(&[1, 4, 4, 16]),
            think_ns: rng.pick(&[200_000, MS, 10 * MS]),
            reads: rng.pick(&[100, 400]),
            flushes: rng.pick(&[0, 20, 150]),
            fua: rng.pick(&[0, 50]),
            zeroes: rng.pick(&[0, 40]),
            latency: Latency {
                device_ns: rng.pick(&[20_000, 200_000, 2 * MS]),
                sync_ns: rng.pick(&[200_000, 4 * MS, 100 * MS]),
                link_ns: rng.pick(&[20_000, 200_000, 3 * MS]),
                image_ns: rng.pick(&[200_000, 2 * MS, 30 * MS]),
            },
            fault_ns: rng.pick(&[30 * MS, 150 * MS, 600 * MS]),
            lost_answers: rng.pick(&[0, 100, 400]),
            patient: rng.permille(700),
            takes_over: rng.permille(500),
            sync_first: rng.permille(700),
            modes: rng.permille(300),
            neighbour: rng.pick(&[0, 0, 1, 8]),
            alone: rng.pick(&[
                Degraded::No,
                Degraded::No,
                Degraded::No,
                Degraded::WriteThrough,
                Degraded::Stopped,
            ]),
        }
    }

    /// The volume as an owner of this generation adds it.
    pub(super) fn spec(&self, generation: u64) -> VolumeSpec {
        VolumeSpec {
            name: "volume".into(),
            backend: "file:/image".into(),
            size_bytes: self.size_bytes,
            mode: Mode::WriteBack,
            drain: self.drain,
            dirty_bytes_max: 0,
            read_only: false,
            generation,
            attachment: Vec::new(),
        }
    }
}
