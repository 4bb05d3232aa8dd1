//! The properties of an emulated device, as a data sheet states them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A duration or a point in time, in nanoseconds.
pub type Nanos = u64;

/// A device as its data sheet describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Short name, such as `hdd-7200`.
    pub name: String,
    /// Time that the controller adds to every command, in nanoseconds.
    pub command_ns: Nanos,
    /// Throughput of the link in bytes per second, shared by all commands.
    pub link_bytes_per_s: u64,
    /// The media that the data is stored on.
    pub media: Media,
    /// The device's write cache, if it has one.
    pub cache: Option<WriteCache>,
    /// Time of a flush besides the writes that it waits for, in nanoseconds.
    pub flush_ns: Nanos,
}

/// The media of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Media {
    /// Platters with one arm.
    Disk(Disk),
    /// Flash chips.
    Flash(Flash),
}

/// Platters with one arm. The emulated device spans the arm's whole stroke, whatever its size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Time of one turn, in nanoseconds.
    pub turn_ns: Nanos,
    /// Shortest seek, to the next track, in nanoseconds.
    pub seek_min_ns: Nanos,
    /// Seek from one end to the other, in nanoseconds. Between the shortest and the longest seek,
    /// the time grows with the square root of the distance.
    pub seek_max_ns: Nanos,
    /// Sustained rate at the outer edge, where the device's offsets begin, in bytes per second.
    pub outer_bytes_per_s: u64,
    /// Sustained rate at the inner edge, in bytes per second.
    pub inner_bytes_per_s: u64,
    /// Number of queued commands among which the drive picks the one that its head reaches first.
    pub queue: u32,
}

/// Flash chips behind a controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Flash {
    /// How reads are served.
    pub read: Channel,
    /// How writes are served.
    pub write: Channel,
    /// A part that takes writes faster until it is full, if there is one.
    pub burst: Option<Burst>,
}

/// How flash serves one kind of command: each command takes `latency_ns`, and commands overlap so
/// that one begins every `command_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// Time of a command without its transfer, in nanoseconds.
    pub latency_ns: Nanos,
    /// Shortest time between the begins of two commands, in nanoseconds.
    pub command_ns: Nanos,
    /// Throughput of large commands, in bytes per second.
    pub bytes_per_s: u64,
}

/// Single-level cells in front of the other cells (an SLC cache). When they are full, writes go at
/// the speed of the other cells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// Size of these cells in bytes.
    pub bytes: u64,
    /// Throughput of writes when these cells are full, in bytes per second. The cells are emptied
    /// at this rate while the device is idle.
    pub bytes_per_s_after: u64,
}

/// Memory of the device that takes writes before the media does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteCache {
    /// Size in bytes.
    pub bytes: u64,
    /// Whether the cache survives a power failure, so that a flush has nothing to wait for.
    pub protected: bool,
}

impl Spec {
    /// This device, slower by `factor` in everything that takes time; sizes stay.
    pub fn slowed(&self, factor: u32) -> Spec {
        let f = u64::from(factor);
        let channel = |c: Channel| Channel {
            latency_ns: c.latency_ns * f,
            command_ns: c.command_ns * f,
            bytes_per_s: c.bytes_per_s / f,
        };
        let media = match &self.media {
            Media::Disk(disk) => Media::Disk(Disk {
                turn_ns: disk.turn_ns * f,
                seek_min_ns: disk.seek_min_ns * f,
                seek_max_ns: disk.seek_max_ns * f,
                outer_bytes_per_s: disk.outer_bytes_per_s / f,
                inner_bytes_per_s: disk.inner_bytes_per_s / f,
                queue: disk.queue,
            }),
            Media::Flash(flash) => Media::Flash(Flash {
                read: channel(flash.read),
                write: channel(flash.write),
                burst: flash
                    .burst
                    .map(|burst| Burst { bytes_per_s_after: burst.bytes_per_s_after / f, ..burst }),
            }),
        };
        Spec {
            name: self.name.clone(),
            command_ns: self.command_ns * f,
            link_bytes_per_s: self.link_bytes_per_s / f,
            media,
            cache: self.cache,
            flush_ns: self.flush_ns * f,
        }
    }

    /// Whether the media is rotational.
    pub fn is_rotational(&self) -> bool {
        matches!(self.media, Media::Disk(_))
    }
}

/// Time to transfer `bytes` at `bytes_per_s`, in nanoseconds.
pub(super) fn transfer_ns(bytes: u64, bytes_per_s: u64) -> Nanos {
    (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1))) as Nanos
}
