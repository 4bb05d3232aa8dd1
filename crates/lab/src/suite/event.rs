//! Events under load: a device dies, an OSD leaves and returns, Ceph scrubs. What clients see is
//! reported separately. An event does not measure a placement's speed and is never ranked.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CELLS_MAX, Caches, Cell, ClusterSize, Suite, Tool, Workload};
use crate::access::Access;
use crate::placement::Arrangement;
use crate::words;
use tidepool_cluster::fio::Sync;

/// Most windows before, and most windows after, an event.
const WINDOWS_MAX: u32 = 1_000;
/// Most requests per second of one client.
const REQUESTS_PER_S_MAX: u32 = 1_000;
/// Longest load of an event in seconds, including the ramp. The points of the course, one for each
/// second, are kept in memory.
const LOAD_S_MAX: u32 = 24 * 3_600;
// The loads of a suite, in seconds, are added in 32 bits.
const _: () = assert!(CELLS_MAX as u64 * LOAD_S_MAX as u64 <= u32::MAX as u64);
/// Most requests of all clients of an event. Each request is kept in memory until the end.
const REQUESTS_MAX: u64 = 2_000_000;
/// Most blocks of all clients of an event. The newest acknowledged write of each block is kept in
/// memory.
const BLOCKS_MAX: u64 = 4 << 20;
/// Most requests in flight of all clients of an event. Each request in flight has its own thread.
const IN_FLIGHT_MAX: u64 = 1_024;
/// Largest block of an event's clients, in bytes. Larger requests need an NBD server that announces
/// a larger limit.
const BLOCK_BYTES_MAX: u64 = 32 << 20;
/// Most bytes in flight of all clients of an event.
const IN_FLIGHT_BYTES_MAX: u64 = 1 << 30;

/// An event under load.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Its name in results, such as `ssd-dies`.
    pub name: String,
    /// The kind of event.
    pub kind: Happening,
    /// The workload of the clients. It is not measured by itself.
    pub workload: String,
    /// Requests of each client that are due in a second, whether earlier requests are answered or
    /// not.
    pub requests_per_s: u32,
    /// Windows before the event, each as long as a measurement of the suite (`seconds`).
    pub windows_before: u32,
    /// Windows from the event on.
    pub windows_after: u32,
    /// Number of windows after the event at which the OSD returns. Only for events in which an OSD
    /// leaves and returns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_after: Option<u32>,
    /// Placements with this event; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<String>,
}

/// A kind of event.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Happening {
    /// The SSD that a placement stands on fails every request from the event on. If a placement
    /// stands on no SSD, a disk fails instead.
    SsdDies,
    /// An OSD is marked out (`ceph osd out`) and gives its data to the others. Later it is marked
    /// in.
    OsdOut,
    /// An OSD is killed, and later started again.
    OsdStops,
    /// All placement groups are scrubbed, with their data read.
    DeepScrub,
}

impl Happening {
    /// Title, such as `the SSD dies`.
    pub fn title(self) -> &'static str {
        match self {
            Happening::SsdDies => "the SSD dies",
            Happening::OsdOut => "an OSD goes out and comes back",
            Happening::OsdStops => "an OSD stops and is started again",
            Happening::DeepScrub => "Ceph scrubs all data",
        }
    }

    /// Whether an OSD leaves and returns.
    pub fn comes_back(self) -> bool {
        matches!(self, Happening::OsdOut | Happening::OsdStops)
    }
}

impl Event {
    /// Seconds of load before the event, without the ramp.
    pub fn before_s(&self, suite: &Suite) -> u32 {
        self.windows_before.saturating_mul(suite.seconds)
    }

    /// Seconds of load from the event on.
    pub fn after_s(&self, suite: &Suite) -> u32 {
        self.windows_after.saturating_mul(suite.seconds)
    }

    /// Seconds that clients run, including the ramp. At most a day in a valid suite.
    pub fn load_s(&self, suite: &Suite) -> u32 {
        suite.ramp_s.saturating_add(self.before_s(suite)).saturating_add(self.after_s(suite))
    }

    /// Checks the event in a suite; an error says what is wrong.
    pub(super) fn check(&self, suite: &Suite) -> Result<(), String> {
        let Some(workload) = suite.workload(&self.workload) else {
            return Err(format!("{} is none of the workloads", self.workload));
        };
        if let Some(unknown) = self.placements.iter().find(|name| !suite.placements.contains(name))
        {
            return Err(format!("{unknown} is none of the placements"));
        }
        let windows = 1..=WINDOWS_MAX;
        if !windows.contains(&self.windows_before) || !windows.contains(&self.windows_after) {
            return Err(format!("windows_before and windows_after are 1 to {WINDOWS_MAX}"));
        }
        if !(1..=REQUESTS_PER_S_MAX).contains(&self.requests_per_s) {
            return Err(format!("requests_per_s is 1 to {REQUESTS_PER_S_MAX}"));
        }
        match (self.kind.comes_back(), self.back_after) {
            (true, Some(after)) if (1..self.windows_after).contains(&after) => {}
            (true, _) => return Err("back_after is at least 1 and below windows_after".into()),
            (false, Some(_)) => {
                return Err("nothing comes back, so that it has no back_after".into());
            }
            (false, None) => {}
        }
        let osds = suite.sizes().into_iter().map(ClusterSize::osds).min().unwrap_or(0);
        if self.kind == Happening::OsdOut && osds <= suite.ground.replicas {
            return Err("an OSD goes out where there are more OSDs than replicas".into());
        }
        clients(workload).map_err(|what| format!("the workload {}: {what}", workload.name))?;
        self.check_bounds(suite, workload)?;
        if self.kind == Happening::SsdDies && !workload.writes() {
            return Err(format!(
                "the workload {} writes nothing, so that nothing could be lost: take one that writes",
                workload.name
            ));
        }
        let bound = suite.placements.iter().filter(|name| self.is_on(suite, name)).find(|name| {
            let is_bound = Arrangement::parse(name).is_ok_and(|found| found.asks_no_device());
            words::is_bound(name) || is_bound
        });
        match bound {
            Some(name) => Err(format!("{name} has no image behind it that could be compared")),
            None => Ok(()),
        }
    }

    /// Checks that the event stays within its limits of time and memory.
    fn check_bounds(&self, suite: &Suite, workload: &Workload) -> Result<(), String> {
        let load_s = self.load_s(suite);
        if load_s > LOAD_S_MAX {
            return Err(format!(
                "its clients run for {load_s} s, at most {LOAD_S_MAX} s: take fewer windows, or a smaller ramp_s or seconds"
            ));
        }
        let clients = workload.clients.iter().copied().max().map_or(0, u64::from);
        let requests = u64::from(load_s) * u64::from(self.requests_per_s) * clients;
        if requests > REQUESTS_MAX {
            return Err(format!(
                "its clients send {requests} requests, at most {REQUESTS_MAX}: take a smaller requests_per_s, or less time"
            ));
        }
        let named = |what: String| Err(format!("the workload {}: {what}", workload.name));
        if workload.block_bytes > BLOCK_BYTES_MAX {
            return named(format!(
                "block_bytes is at most {BLOCK_BYTES_MAX} for clients of an event"
            ));
        }
        let blocks = (workload.set_bytes / workload.block_bytes.max(1)).saturating_mul(clients);
        if blocks > BLOCKS_MAX {
            return named(format!(
                "the sets of an event's clients have {blocks} blocks, at most {BLOCKS_MAX}: take a smaller set_bytes"
            ));
        }
        let depth = workload.depth.iter().copied().max().map_or(0, u64::from);
        let in_flight = clients.saturating_mul(depth);
        if in_flight > IN_FLIGHT_MAX
            || in_flight.saturating_mul(workload.block_bytes) > IN_FLIGHT_BYTES_MAX
        {
            return named(format!(
                "an event's clients have at most {IN_FLIGHT_MAX} requests and {} in flight: take a smaller depth",
                words::bytes(IN_FLIGHT_BYTES_MAX)
            ));
        }
        Ok(())
    }

    /// Whether the event happens to this placement of a suite.
    pub fn is_on(&self, suite: &Suite, placement: &str) -> bool {
        let named =
            self.placements.is_empty() || self.placements.iter().any(|name| name == placement);
        let measured =
            suite.workload(&self.workload).is_some_and(|workload| workload.is_on(placement));
        named && measured && !suite.without.iter().any(|name| name == placement)
    }
}

/// Checks a workload for clients that record acknowledged writes.
fn clients(workload: &Workload) -> Result<(), String> {
    if workload.tool != Tool::Fio {
        return Err("clients of an event have images".into());
    }
    if !matches!(workload.access, Access::Nbd | Access::Iscsi) {
        return Err("clients of an event are NBD clients: access is nbd or iscsi".into());
    }
    let is_random = workload.pattern().is_some_and(|pattern| pattern.is_random());
    if !is_random || workload.jobs != 1 || workload.caches == Caches::Cold {
        return Err("clients of an event have a random rw, one job and warm caches".into());
    }
    if workload.writes() && workload.sync != Sync::Flush {
        return Err("each write of an event's clients is flushed: sync = \"flush\"".into());
    }
    let ([depth], [_]) = (&workload.depth[..], &workload.clients[..]) else {
        return Err("an event has one depth and one number of clients".into());
    };
    if workload.set_bytes / u64::from(*depth).max(1) < workload.block_bytes {
        return Err("set_bytes is at least a block for each request in flight".into());
    }
    Ok(())
}

impl Suite {
    /// Whether a workload belongs to events and is not measured by itself.
    pub fn is_of_event(&self, workload: &str) -> bool {
        self.events.iter().any(|event| event.workload == workload)
    }

    /// All events, each with each cell it happens to, in the suite's order.
    pub fn happenings(&self) -> Vec<(&Event, Cell)> {
        let mut found = Vec::new();
        for event in &self.events {
            let Some(workload) = self.workload(&event.workload) else { continue };
            if self.without.contains(&workload.name) {
                continue;
            }
            for placement in self.placements.iter().filter(|name| event.is_on(self, name)) {
                found.extend(self.sizes().into_iter().map(|size| {
                    let cell = Cell {
                        placement: placement.clone(),
                        disks: size.disks,
                        osds_per_disk: size.osds_per_disk,
                        workload: workload.name.clone(),
                        depth: workload.depth[0],
                        clients: workload.clients[0],
                        slowed_by: None,
                        replicas: None,
                        neighbours: None,
                    };
                    (event, cell)
                }));
            }
        }
        found
    }

    /// Checks the suite's events.
    pub(super) fn check_events(&self) -> Result<(), String> {
        super::check::unique("event", self.events.iter().map(|event| &event.name))?;
        if !self.events.is_empty()
            && (self.ground.neighbours_max() > 0 || !self.ground.replicas_beside.is_empty())
        {
            return Err(
                "an event has no neighbours, and no other copies than the ground's: leave out its [[event]], or neighbours, neighbours_beside and replicas_beside".into(),
            );
        }
        let grounds = self.placements.len().saturating_mul(self.sizes().len());
        let clusters =
            grounds.saturating_mul(self.events.len()).saturating_mul(self.repeats as usize);
        if clusters > CELLS_MAX {
            return Err(format!(
                "its events take more than {CELLS_MAX} clusters: take fewer repeats, or fewer events"
            ));
        }
        self.events.iter().try_for_each(|event| {
            event.check(self).map_err(|what| format!("the event {}: {what}", event.name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = include_str!("../suites/faults.toml");

    #[test]
    fn events_happen_to_their_placements_and_their_workload_is_not_measured_by_itself() {
        let suite = Suite::find("faults").expect("it comes with the program");
        assert!(suite.cells().is_empty(), "nothing of it is ranked");
        let quick = suite.clone().quick();
        for suite in [&suite, &quick] {
            let found = suite.happenings();
            let on = |kind: Happening| {
                found
                    .iter()
                    .filter(move |(event, _)| event.kind == kind)
                    .map(|(_, cell)| &cell.placement)
            };
            assert!(on(Happening::SsdDies).count() >= 6);
            let each = [
                "filestore-journal",
                "bluestore-dbwal",
                "osd-bcache",
                "osd-tidepool",
                "host-tidepool",
                "host-tidepool-replicated",
            ];
            for placement in each {
                for kind in [Happening::SsdDies, Happening::OsdOut] {
                    assert!(on(kind).any(|name| name == placement), "{placement} {kind:?}");
                }
            }
            assert!(on(Happening::DeepScrub).any(|name| name == "host-tidepool"));
            assert!(on(Happening::DeepScrub).count() >= 2);
        }
        let seconds = |suite: &Suite| {
            let each = suite.happenings();
            let each = each.iter().map(|(event, _)| event.before_s(suite) + event.after_s(suite));
            each.sum::<u32>() * suite.repeats
        };
        assert!(
            seconds(&quick) < 25 * 60,
            "{} s of load, and clusters come up beside it",
            seconds(&quick)
        );
        let mut without = quick.clone();
        without.without.push("osd-tidepool".into());
        assert_eq!(without.happenings().len() + 2, quick.happenings().len());
    }

    #[test]
    fn an_event_that_makes_no_sense_is_told_in_one_line() {
        for (from, to, wanted) in [
            ("kind = \"osd-out\"", "kind = \"osd-melts\"", "line "),
            ("kind = \"osd-out\"", "kind = \"deep-scrub\"", "has no back_after"),
            ("back_after = 3", "back_after = 99", "below windows_after"),
            ("back_after = 3", "", "below windows_after"),
            ("windows_before = 1", "windows_before = 0", "windows_before and"),
            ("requests_per_s = 20", "requests_per_s = 0", "requests_per_s is 1"),
            ("name = \"osd-out\"", "name = \"ssd-dies\"", "twice"),
            ("access = \"nbd\"\n", "", "NBD clients"),
            ("sync = \"flush\"\n", "", "is flushed"),
            ("rw = \"randrw\"\nread_percent = 50", "rw = \"write\"", "random rw"),
            ("rw = \"randrw\"\nread_percent = 50", "rw = \"randread\"", "4k-50-50 writes nothing"),
            ("depth = [4]", "depth = [4, 8]", "one depth"),
            ("clients = [2]", "clients = [1, 2]", "one depth and one number"),
            ("replicas = 2", "replicas = 3", "more OSDs than replicas"),
            ("workload = \"4k-50-50\"", "workload = \"x\"", "x is none of the workloads"),
            (
                "placements = [\"bluestore-colocated\",",
                "placements = [\"osd-passthrough\",",
                "osd-passthrough",
            ),
        ] {
            assert!(TEXT.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &TEXT.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{from}: {error}");
        }
        let bound =
            TEXT.replace("\"bluestore-dbwal\",\n", "\"bluestore-dbwal\",\n    \"ssd-raw\",\n");
        let error = Suite::parse("s.toml", &bound).expect_err("a bound").to_string();
        assert!(error.contains("ssd-raw has no image behind it"), "{error}");
    }

    #[test]
    fn a_suite_with_events_has_no_neighbours_and_no_further_copies() {
        let suite = || Suite::find("faults").expect("it comes with the program");
        for line in
            ["neighbours = \"2\"", "neighbours_beside = [\"1:100\"]", "replicas_beside = [3]"]
        {
            let text = TEXT.replacen("slowed_by = 1\n", &format!("slowed_by = 1\n{line}\n"), 1);
            let error = Suite::parse("s.toml", &text).expect_err(line).to_string();
            assert!(
                error.contains("no neighbours, and no other copies") && !error.contains('\n'),
                "{line}: {error}"
            );
        }
        let none = TEXT.replacen("slowed_by = 1\n", "slowed_by = 1\nneighbours = \"0\"\n", 1);
        Suite::parse("s.toml", &none).expect("nobody is no neighbour");
        suite().with_replicas(&[2, 3]).expect_err("the command line says so");
        suite()
            .with_neighbours(&["2".parse().expect("neighbours")])
            .expect_err("the command line says so");
    }

    #[test]
    fn an_event_that_takes_too_long_or_too_much_memory_is_told_in_one_line() {
        let often = "requests_per_s = 1000\nwindows_before = 1\nwindows_after = 60";
        let small = TEXT.replacen("block_bytes = 4096", "block_bytes = 512", 1);
        for (text, from, to, wanted) in [
            (TEXT, "repeats = 3", "repeats = 1000", "more than 10000 clusters"),
            (TEXT, "ramp_s = 10", "ramp_s = 604800", "run for 605010 s, at most 86400 s"),
            (TEXT, "seconds = 30", "seconds = 604800", "run for 4233610 s, at most 86400 s"),
            (
                TEXT,
                "requests_per_s = 20\nwindows_before = 1\nwindows_after = 6",
                often,
                "send 3680000 requests, at most 2000000",
            ),
            (
                TEXT,
                "block_bytes = 4096",
                "block_bytes = 67108864",
                "block_bytes is at most 33554432",
            ),
            (TEXT, "depth = [4]", "depth = [1024]", "at most 1024 requests"),
            (&small, "set_bytes = 1073741824", "set_bytes = 2147483648", "have 8388608 blocks"),
        ] {
            assert!(text.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &text.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{from}: {error}");
        }
        let mut longest = Suite::find("faults").expect("it comes with the program");
        (longest.seconds, longest.ramp_s) = (u32::MAX, u32::MAX);
        assert_eq!(
            longest.events[0].load_s(&longest),
            u32::MAX,
            "no sum overflows, whatever it says"
        );
    }
}
