//! Where the mean time of a request goes, hop by hop, and which hop is the bottleneck.
//!
//! The parts of a request are subtracted from the client's mean, one after another, so that they
//! always add up to it. What remains has no counter of its own: it is *not accounted*, and never
//! the bottleneck.

mod divide;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::results::Run;
use crate::words;
pub use divide::breakdown;

/// A part of a request's path, in the order of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Not counted: the load generator, its path to the server, and everything between counters.
    NotAccounted,
    /// Daemon of a cache, including waits for room in the cache.
    CacheDaemon,
    /// Packets between nodes.
    Network,
    /// SSD of a cache on the hypervisor.
    CacheSsd,
    /// iSCSI gateway with its initiator: from the client to the gateway's librbd and back, without
    /// the network.
    Gateway,
    /// NBD server on the hypervisor: from the client to the server's librbd and back.
    NbdServer,
    /// Guest with its QEMU: from the client in the guest to QEMU's librbd and back.
    ClientGuest,
    /// Queue of the OSD.
    OsdQueue,
    /// Other work of the OSD.
    OsdOther,
    /// Read from the store.
    StoreRead,
    /// Preparation of a write in the store.
    StorePrepare,
    /// Data device of the store.
    DataDevice,
    /// Wait for the thread that commits.
    KvQueue,
    /// Flush of the data device before a commit.
    KvFlush,
    /// Commit of the database.
    KvCommit,
    /// Waiting for room in the journal.
    JournalWait,
    /// Journal.
    Journal,
    /// Extra time of second copies: of a replica over the OSD's own store or, with a second
    /// hypervisor's SSD, of that SSD over the own hypervisor's SSD.
    Replica,
}

impl Part {
    /// All parts, in the order of the path.
    pub const ALL: [Part; 18] = [
        Part::NotAccounted,
        Part::CacheDaemon,
        Part::Network,
        Part::CacheSsd,
        Part::Gateway,
        Part::NbdServer,
        Part::ClientGuest,
        Part::OsdQueue,
        Part::OsdOther,
        Part::StoreRead,
        Part::StorePrepare,
        Part::DataDevice,
        Part::KvQueue,
        Part::KvFlush,
        Part::KvCommit,
        Part::JournalWait,
        Part::Journal,
        Part::Replica,
    ];

    /// Name of the part for reports.
    pub fn title(self) -> &'static str {
        match self {
            Part::NotAccounted => "not accounted",
            Part::CacheDaemon => "cache daemon",
            Part::Network => "network",
            Part::CacheSsd => "cache SSD",
            Part::Gateway => "gateway",
            Part::NbdServer => "NBD server",
            Part::ClientGuest => "guest",
            Part::OsdQueue => "OSD queue",
            Part::OsdOther => "OSD, other",
            Part::StoreRead => "store: read",
            Part::StorePrepare => "store: prepare",
            Part::DataDevice => "store: data device",
            Part::KvQueue => "store: KV queue",
            Part::KvFlush => "store: flush before the KV commit",
            Part::KvCommit => "store: KV commit",
            Part::JournalWait => "journal: wait for room",
            Part::Journal => "journal",
            Part::Replica => "replica",
        }
    }
}

/// Time of one part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Share {
    /// The part.
    pub part: Part,
    /// Mean over all requests in microseconds.
    pub mean_us: f64,
}

/// The mean time of reads or of writes, divided into parts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hops {
    /// Requests per second.
    pub iops: f64,
    /// Mean time of a request in microseconds.
    pub mean_us: f64,
    /// The parts above 0, in the order of the path. They add up to `mean_us`.
    pub parts: Vec<Share>,
}

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

impl Side {
    /// Name of the kind for one request.
    pub fn title(self) -> &'static str {
        match self {
            Side::Read => "read",
            Side::Write => "write",
        }
    }
}

/// The largest part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bottleneck {
    /// Reads or writes: the kind for which clients wait longer in total.
    pub side: Side,
    /// The part.
    pub part: Part,
    /// Its part of the mean time of such a request, from 0 to 1.
    pub share: f64,
}

impl std::fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} ({:.0} % of a {}'s time)",
            self.part.title(),
            self.share * 100.0,
            self.side.title()
        )
    }
}

/// Load of a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Load {
    /// Name of the device.
    pub device: String,
    /// Commands per second. None if the run has no samples.
    pub commands_per_s: Option<f64>,
    /// Mean time of a command in microseconds, including its wait in the device. Flushes count as
    /// commands.
    pub command_us: f64,
    /// Mean number of commands in the device: their total time divided by the length of the run
    /// (Little's law). None if the run has no samples.
    pub in_flight: Option<f64>,
}

impl std::fmt::Display for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.device)?;
        if let Some((rate, in_flight)) = self.commands_per_s.zip(self.in_flight) {
            write!(
                f,
                "{} commands per second, {} in flight, ",
                words::number(rate),
                words::number(in_flight)
            )?;
        }
        write!(f, "{} each", words::latency(self.command_us))
    }
}

/// Breakdown of a run's time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Breakdown {
    /// Reads, if there were any and their path is known.
    pub reads: Option<Hops>,
    /// Writes, if there were any and their path is known.
    pub writes: Option<Hops>,
    /// Part of the blocks that were cache hits, from 0 to 1, if a cache counts them.
    pub hit_ratio: Option<f64>,
    /// Devices, sorted by commands in flight, largest first.
    pub devices: Vec<Load>,
}

impl Breakdown {
    /// The largest part of reads or of writes: of the kind for which clients wait longer in total.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        let sides = [(Side::Read, &self.reads), (Side::Write, &self.writes)];
        let sides = sides.into_iter().filter_map(|(side, hops)| Some((side, hops.as_ref()?)));
        let (side, hops) = sides.max_by(|(_, one), (_, two)| {
            (one.mean_us * one.iops).total_cmp(&(two.mean_us * two.iops))
        })?;
        hops.bottleneck(side)
    }
}

impl Hops {
    /// The largest of the counted parts.
    pub fn bottleneck(&self, side: Side) -> Option<Bottleneck> {
        let counted = self.parts.iter().filter(|share| share.part != Part::NotAccounted);
        let largest = counted.max_by(|one, two| one.mean_us.total_cmp(&two.mean_us))?;
        Some(Bottleneck { side, part: largest.part, share: largest.mean_us / self.mean_us })
    }

    /// The part of the mean that no counter covers, from 0 to 1.
    pub fn not_accounted(&self) -> f64 {
        let found = self.parts.iter().find(|share| share.part == Part::NotAccounted);
        found.map_or(0.0, |share| share.mean_us / self.mean_us)
    }
}

/// The breakdown of several runs of a cell: means over all their requests.
pub fn combined(runs: &[&Run]) -> Breakdown {
    let all: Vec<Breakdown> = runs.iter().map(|run| breakdown(run)).collect();
    let hits: Vec<f64> = all.iter().filter_map(|one| one.hit_ratio).collect();
    // The devices of the first run stand for all, because their names may differ between clusters.
    let devices = all.first().map(|one| one.devices.clone()).unwrap_or_default();
    Breakdown {
        reads: together(all.iter().filter_map(|one| one.reads.as_ref()).collect()),
        writes: together(all.iter().filter_map(|one| one.writes.as_ref()).collect()),
        hit_ratio: (!hits.is_empty()).then(|| hits.iter().sum::<f64>() / hits.len() as f64),
        devices,
    }
}

fn together(all: Vec<&Hops>) -> Option<Hops> {
    let total: f64 = all.iter().map(|hops| hops.iops).sum();
    if all.is_empty() || total <= 0.0 {
        return None;
    }
    let mut parts: BTreeMap<Part, f64> = BTreeMap::new();
    for hops in &all {
        for share in &hops.parts {
            *parts.entry(share.part).or_insert(0.0) += share.mean_us * hops.iops / total;
        }
    }
    Some(Hops {
        iops: total / all.len() as f64,
        mean_us: all.iter().map(|hops| hops.mean_us * hops.iops / total).sum(),
        parts: parts.into_iter().map(|(part, mean_us)| Share { part, mean_us }).collect(),
    })
}
