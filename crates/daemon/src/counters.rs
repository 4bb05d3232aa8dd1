//! The counters of the core and the reactor by name: one list for status and metrics. Units are
//! base units and stand last in a name.

use crate::admin::BackendState;
use crate::health::backend_state;
use crate::shard::{ReactorCounters, ShardVolumeStatus};
use serde_json::Number as Json;
use std::collections::BTreeMap;
use tidepool_engine::status::{DeviceStatus, VolumeCounters};

/// A number that only grows, or one that goes both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Grows until the daemon ends.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// One number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Number {
    /// Its name, without prefix and without `_total`.
    name: &'static str,
    /// What it counts.
    help: &'static str,
    /// What it is.
    kind: Kind,
    /// Its value.
    value: f64,
}

impl Number {
    /// A number that goes up and down.
    pub const fn gauge(name: &'static str, help: &'static str, value: f64) -> Number {
        Number { name, help, kind: Kind::Gauge, value }
    }

    /// Its name, without prefix and without `_total`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it counts.
    pub fn help(&self) -> &'static str {
        self.help
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its value.
    pub fn value(&self) -> f64 {
        self.value
    }
}

/// The numbers by name.
pub fn by_name(numbers: Vec<Number>) -> BTreeMap<String, Json> {
    numbers.into_iter().map(|number| (number.name.to_owned(), json(number.value))).collect()
}

/// A whole number without a point where the value is one.
fn json(value: f64) -> Json {
    if value >= 0.0 && value.fract() == 0.0 && value < (1u64 << 53) as f64 {
        Json::from(value as u64)
    } else {
        Json::from_f64(value).unwrap_or_else(|| Json::from(0))
    }
}

const fn counter(name: &'static str, help: &'static str, value: u64) -> Number {
    Number { name, help, kind: Kind::Counter, value: value as f64 }
}

const fn gauge(name: &'static str, help: &'static str, value: u64) -> Number {
    Number::gauge(name, help, value as f64)
}

const fn seconds(kind: Kind, name: &'static str, help: &'static str, ns: u64) -> Number {
    Number { name, help, kind, value: ns as f64 / 1e9 }
}

/// What a volume has counted since the daemon began to serve.
pub fn of_volume(count: &VolumeCounters) -> Vec<Number> {
    let mut numbers = of_requests(count);
    numbers.extend(of_backend(count));
    numbers
}

/// What clients have asked for, and what the cache did about it.
fn of_requests(count: &VolumeCounters) -> Vec<Number> {
    vec![
        counter("reads", "Read requests completed", count.reads),
        counter("writes", "Write requests completed", count.writes),
        counter("flushes", "Flushes completed", count.flushes),
        counter("discards", "Discards and write-zeroes completed", count.discards),
        counter("read_bytes", "Bytes that clients read", count.read_bytes),
        counter("written_bytes", "Bytes that clients wrote", count.written_bytes),
        counter("hit_blocks", "Blocks of reads found in the cache", count.hit_blocks),
        counter("miss_blocks", "Blocks of reads fetched from the backend", count.miss_blocks),
        counter("hole_blocks", "Blocks of reads where the image has nothing", count.hole_blocks),
        counter("errors", "Requests that failed", count.errors),
        counter(
            "parent_blocks",
            "Blocks of reads that came through the volume of a clone's parent",
            count.parent_blocks,
        ),
        counter("admitted_blocks", "Blocks admitted to the read cache", count.admitted_blocks),
        counter(
            "evicted_blocks",
            "Clean blocks that left the cache for want of room",
            count.evicted_blocks,
        ),
        counter(
            "bypass_overtaken_blocks",
            "Miss blocks not admitted because a write, discard or fill overtook them",
            count.bypass_overtaken_blocks,
        ),
        counter(
            "bypass_no_room_blocks",
            "Miss blocks not admitted because segments were short",
            count.bypass_no_room_blocks,
        ),
        counter(
            "bypass_mode_blocks",
            "Blocks that went past the cache because of the mode",
            count.bypass_mode_blocks,
        ),
    ]
}

/// What has gone to the backend, and what has kept the volume from going on.
fn of_backend(count: &VolumeCounters) -> Vec<Number> {
    vec![
        counter("backend_reads", "Read operations sent to the backend", count.backend_reads),
        counter("backend_read_bytes", "Bytes read from the backend", count.backend_read_bytes),
        counter("backend_writes", "Write operations sent to the backend", count.backend_writes),
        counter(
            "backend_written_bytes",
            "Bytes written to the backend",
            count.backend_written_bytes,
        ),
        counter("backend_errors", "Backend operations that failed", count.backend_errors),
        counter("groups", "Groups of the drain that were ended", count.groups),
        counter("redo_bytes", "Bytes of redo written beside the image", count.redo_bytes),
        counter("drained_blocks", "Dirty blocks drained", count.drained_blocks),
        counter(
            "corrupt_blocks",
            "Cached blocks whose checksum did not match",
            count.corrupt_blocks,
        ),
        counter(
            "repaired_blocks",
            "Dirty blocks among them that came back from the second copy",
            count.repaired_blocks,
        ),
        counter(
            "quota_waits",
            "Writes that waited because the dirty quota was reached",
            count.quota_waits,
        ),
        seconds(
            Kind::Counter,
            "held_seconds",
            "Time for which acknowledgements were held back",
            count.held_ns,
        ),
    ]
}

/// What a volume is like now.
pub fn of_volume_now(volume: &ShardVolumeStatus) -> Vec<Number> {
    let status = &volume.status;
    let backend = backend_state(volume);
    vec![
        gauge("size_bytes", "Size of the volume", status.spec.size_bytes),
        gauge("dirty_bytes", "Bytes of data not yet in the backend", status.dirty_bytes),
        gauge(
            "dirty_zero_bytes",
            "Bytes discarded or zeroed that are not yet so in the backend",
            status.dirty_zero_bytes,
        ),
        gauge("dirty_max_bytes", "Dirty bytes that are allowed", status.dirty_bytes_max),
        seconds(
            Kind::Gauge,
            "dirty_age_seconds",
            "Age of the oldest byte that is not in the backend",
            status.dirty_age_ns,
        ),
        gauge(
            "exposed_bytes",
            "Bytes that would be lost if the cache device died now",
            status.exposed_bytes,
        ),
        seconds(
            Kind::Gauge,
            "exposed_seconds",
            "Age of the oldest byte that would be lost if the cache device died now",
            status.exposed_age_ns,
        ),
        gauge("cached_bytes", "Bytes in the cache, dirty and clean", status.cached_bytes),
        gauge(
            "lost_blocks",
            "Blocks that read as errors because no good copy is left",
            status.lost_blocks,
        ),
        gauge(
            "drain_writes_in_flight",
            "Writes of the drain that the backend has not answered",
            status.drain_writes_in_flight,
        ),
        gauge(
            "backend_failing",
            "1 while backend operations fail, for want of room or otherwise",
            u64::from(matches!(backend, BackendState::Failing | BackendState::Full)),
        ),
        gauge(
            "backend_full",
            "1 while the backend has no room",
            u64::from(backend == BackendState::Full),
        ),
        gauge(
            "backend_slow",
            "1 while the backend has not answered for seconds",
            u64::from(backend == BackendState::Slow),
        ),
        seconds(
            Kind::Gauge,
            "backend_wait_seconds",
            "For how long the backend has not answered the transfer that waits longest",
            volume.backend_wait_ns,
        ),
        gauge("connections", "Open client connections", volume.connections),
    ]
}

/// The cache device.
pub fn of_device(device: &DeviceStatus) -> Vec<Number> {
    vec![
        gauge("failed", "1 when the cache device has failed", u64::from(device.failed)),
        gauge("size_bytes", "Size of the cache device", device.size_bytes),
        gauge("segment_bytes", "Size of one segment", device.segment_bytes),
        gauge("segments", "Segments in all", device.segments),
        gauge("segments_free", "Segments that hold nothing", device.segments_free),
        gauge("segments_dirty", "Segments that hold dirty blocks", device.segments_dirty),
        gauge("reclaiming", "1 while a segment is being reclaimed", u64::from(device.reclaiming)),
        gauge(
            "checkpointing",
            "1 while a checkpoint is being written",
            u64::from(device.checkpointing),
        ),
        counter("records", "Records written", device.records),
        counter("appends", "Device writes, each of one or more records", device.appends),
        counter("appended_bytes", "Bytes written to the cache device", device.appended_bytes),
        counter("syncs", "Syncs of the cache device", device.syncs),
        counter("checkpoints", "Checkpoints completed", device.checkpoints),
        counter("reclaims", "Segments reclaimed", device.reclaims),
        counter(
            "moved_blocks",
            "Blocks that reclaim moved because they were dirty or hot",
            device.moved_blocks,
        ),
        gauge("index_bytes", "Memory of the index", device.index_bytes),
        gauge("cached_blocks", "Blocks cached", device.cached_blocks),
        gauge("arena_used_bytes", "Memory for requests in use", device.arena_used_bytes),
        gauge("arena_bytes", "Memory for requests", device.arena_bytes),
    ]
}

/// The reactor.
pub fn of_reactor(reactor: &ReactorCounters) -> Vec<Number> {
    vec![
        counter("rounds", "Rounds of the reactor's loop", reactor.rounds),
        gauge(
            "round_effort_max",
            "The most work that clients had done in one round, in blocks and nodes of the index",
            reactor.round_effort_max,
        ),
        counter("completions", "Completions taken from the ring", reactor.completions),
        counter("requests", "Client requests received", reactor.requests),
        counter("request_errors", "Client requests answered with an error", reactor.request_errors),
        counter("received_bytes", "Bytes received from clients", reactor.received_bytes),
        counter("sent_bytes", "Bytes sent to clients", reactor.sent_bytes),
        counter("connections_accepted", "Connections accepted", reactor.accepted),
        counter("connections_refused", "Connections turned away: too many", reactor.turned_away),
        counter(
            "connections_denied",
            "Connections refused: the process is not in the allow list of the volume's socket",
            reactor.denied,
        ),
        counter(
            "connections_malformed",
            "Connections closed because the client broke the protocol",
            reactor.malformed,
        ),
        counter(
            "arena_stalls",
            "Times that a socket was left unread for want of memory for requests",
            reactor.arena_stalls,
        ),
        counter(
            "unaligned_writes",
            "Writes that were not sector-aligned and took a read first",
            reactor.unaligned_writes,
        ),
    ]
}
