//! What an emulated device can do, as its data sheet would say it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A duration or a moment in nanoseconds.
pub type Nanos = u64;

/// A device as its data sheet describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Short name, such as `hdd-7200`.
    pub name: String,
    /// Time that the controller adds to every command, in nanoseconds.
    pub command_ns: Nanos,
    /// What the link carries in each second, in bytes; shared by all commands.
    pub link_bytes_per_s: u64,
    /// Where the data ends up.
    pub media: Media,
    /// Memory of the device that takes writes before the media does.
    pub cache: Option<WriteCache>,
    /// What a flush costs beyond the writes that it waits for, in nanoseconds.
    pub flush_ns: Nanos,
}

/// Where data ends up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Media {
    /// Platters under one arm.
    Disk(Disk),
    /// Chips.
    Flash(Flash),
}

/// Platters under one arm. The emulated device's whole size spans the whole stroke.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Time of one turn, in nanoseconds.
    pub turn_ns: Nanos,
    /// Shortest seek, to the next track, in nanoseconds.
    pub seek_min_ns: Nanos,
    /// Seek from one end to the other, in nanoseconds. Between the two it grows with the square root of the distance.
    pub seek_max_ns: Nanos,
    /// Sustained rate at the outer edge, where a device begins, in bytes per second.
    pub outer_bytes_per_s: u64,
    /// Sustained rate at the inner edge, in bytes per second.
    pub inner_bytes_per_s: u64,
    /// Commands among which the drive picks the one that its head reaches first.
    pub queue: u32,
}

/// Chips behind a controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Flash {
    /// Reads.
    pub read: Channel,
    /// Writes.
    pub write: Channel,
    /// A part that takes writes faster until it is full.
    pub burst: Option<Burst>,
}

/// How flash serves one kind of command: each takes `latency_ns`, and so many overlap that one begins every `command_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// From the begin of a command to its end, in nanoseconds.
    pub latency_ns: Nanos,
    /// Shortest time between two commands, in nanoseconds.
    pub command_ns: Nanos,
    /// Bytes per second in large commands.
    pub bytes_per_s: u64,
}

/// Single-level cells in front of the others (an SLC cache): when they are full, writes go at the speed of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// How much they take, in bytes.
    pub bytes: u64,
    /// Bytes per second when they are full, and at which they are emptied when nothing else is to be done.
    pub bytes_per_s_after: u64,
}

/// Memory of the device that takes writes before the media does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteCache {
    /// Its size.
    pub bytes: u64,
    /// It survives a power failure, so a flush has nothing to wait for.
    pub protected: bool,
}

impl Spec {
    /// The same device, slower by `factor` in everything that takes time; sizes stay.
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

    /// Whether the media turns.
    pub fn is_rotational(&self) -> bool {
        matches!(self.media, Media::Disk(_))
    }
}

/// Time for `bytes` at `bytes_per_s`, in nanoseconds.
pub(super) fn transfer_ns(bytes: u64, bytes_per_s: u64) -> Nanos {
    (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1))) as Nanos
}
