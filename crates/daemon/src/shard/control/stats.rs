//! What a shard tells about itself.

use tidepool_engine::api::{Degraded, IoError, Nanos};
use tidepool_engine::status::{DeviceStatus, VolumeStatus};

/// Latencies in nanoseconds, from a request fully received to its reply queued.
pub type LatencyHistogram = hdrhistogram::Histogram<u64>;

/// Longest latency that a histogram tells apart, in nanoseconds; longer ones count as this.
pub const LATENCY_NS_MAX: u64 = 1_000_000_000 << 8;

/// State of one volume.
#[derive(Debug, Clone)]
pub struct ShardVolumeStatus {
    /// What the core says.
    pub status: VolumeStatus,
    /// For how long the backend has not answered the transfer that waits longest; 0 when it has
    /// answered all.
    pub backend_wait_ns: Nanos,
    /// What of the backend has failed just now.
    pub backend_error: Option<IoError>,
    /// Read requests.
    pub read_latency: LatencyHistogram,
    /// Write, discard and write-zeroes requests.
    pub write_latency: LatencyHistogram,
    /// Flushes.
    pub flush_latency: LatencyHistogram,
    /// Open client connections.
    pub connections: u64,
    /// The second copy of a volume that is to have one and is owned here.
    pub pair: Option<PairStatus>,
    /// For the copy of another host's volume: its owner, while that is connected.
    pub followed: Option<FollowedStatus>,
}

/// A volume and its second copy, without what is measured.
#[derive(Debug, Clone)]
pub struct CopiesStatus {
    /// What the core says.
    pub status: VolumeStatus,
    /// The second copy, as [`ShardVolumeStatus::pair`].
    pub pair: Option<PairStatus>,
}

/// The owner of a volume of which a copy is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowedStatus {
    /// Its host.
    pub host: String,
    /// For how long nothing has been received of it.
    pub silence_ns: Nanos,
}

/// The second copy of a volume that is owned here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairStatus {
    /// Where it stands (RFC 9).
    pub phase: &'static str,
    /// The host that has it, or is about to.
    pub host: Option<String>,
    /// Whatever is acknowledged is in both logs, and the record says so.
    pub in_sync: bool,
    /// Uuid of the cache of which that is true.
    pub synced_with: Option<u128>,
    /// What write-back does instead, because there is no copy that counts.
    pub degraded: Degraded,
    /// Records that the peer has not confirmed.
    pub lag_records: u64,
}

impl PairStatus {
    /// Another host has the volume, or its image takes nothing from this one.
    pub fn is_lost(&self) -> bool {
        self.phase == LOST
    }
}

/// The phase of an owner that is none any more.
pub(in crate::shard) const LOST: &str = "lost";

/// State of a shard at one moment.
#[derive(Debug, Clone)]
pub struct ShardStatus {
    /// The cache device.
    pub device: DeviceStatus,
    /// Its volumes.
    pub volumes: Vec<ShardVolumeStatus>,
    /// The reactor itself.
    pub reactor: ReactorCounters,
}

/// Counters of the reactor since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReactorCounters {
    /// Rounds of the loop; each enters the kernel once.
    pub rounds: u64,
    /// The most that clients had done in one round, in units of about a block of the index.
    pub round_effort_max: u64,
    /// Completions taken from the ring.
    pub completions: u64,
    /// Client requests received.
    pub requests: u64,
    /// Client requests that were answered with an error.
    pub request_errors: u64,
    /// Bytes received from clients.
    pub received_bytes: u64,
    /// Bytes sent to clients.
    pub sent_bytes: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections turned away because there were too many.
    pub turned_away: u64,
    /// Connections refused because a volume's allow list does not have the process.
    pub denied: u64,
    /// Connections closed because the client broke the protocol.
    pub malformed: u64,
    /// Times that a socket was left unread because the arena had no room.
    pub arena_stalls: u64,
    /// Writes that were not sector-aligned and took a read first.
    pub unaligned_writes: u64,
}
