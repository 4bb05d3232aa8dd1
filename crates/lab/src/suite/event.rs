//! What happens while clients work: a device dies, an OSD goes and comes back, Ceph scrubs. What clients see of it is told by itself: it
//! is no speed of a placement, and never ranked.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Caches, Cell, Suite, Tool, Workload};
use crate::access::Access;
use crate::fio::Sync;
use crate::placement::Arrangement;
use crate::words;

/// Most windows before or after an event.
const WINDOWS_MAX: u32 = 1_000;
/// Most requests per second of a client.
const REQUESTS_PER_S_MAX: u32 = 1_000;

/// Something that happens under load.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Its name in results, such as `ssd-dies`.
    pub name: String,
    /// What happens.
    pub kind: Happening,
    /// What clients do meanwhile: a workload, which is not measured by itself then.
    pub workload: String,
    /// Requests of each client that are due in a second, whether the ones before are answered or not.
    pub requests_per_s: u32,
    /// Windows before it happens, each as long as a measurement of the suite (`seconds`).
    pub windows_before: u32,
    /// Windows that clients and cluster are watched from then on.
    pub windows_after: u32,
    /// After how many of these comes back what has gone, where something has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_after: Option<u32>,
    /// Only for these placements; for all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<String>,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Happening {
    /// The SSD that a placement stands on fails every request from then on; a disk where it stands on no SSD.
    SsdDies,
    /// An OSD is told to give its data to the others (`ceph osd out`), and later to take it again.
    OsdOut,
    /// An OSD is killed, and later started again.
    OsdStops,
    /// All placement groups are scrubbed, with their data read.
    DeepScrub,
}

impl Happening {
    /// In words, such as `the SSD dies`.
    pub fn title(self) -> &'static str {
        match self {
            Happening::SsdDies => "the SSD dies",
            Happening::OsdOut => "an OSD goes out and comes back",
            Happening::OsdStops => "an OSD stops and is started again",
            Happening::DeepScrub => "Ceph scrubs all data",
        }
    }

    /// What has gone comes back.
    pub fn comes_back(self) -> bool {
        matches!(self, Happening::OsdOut | Happening::OsdStops)
    }
}

impl Event {
    /// Seconds of load before it happens, the ramp not included.
    pub fn before_s(&self, suite: &Suite) -> u32 {
        self.windows_before * suite.seconds
    }

    /// Seconds that are watched from then on.
    pub fn after_s(&self, suite: &Suite) -> u32 {
        self.windows_after * suite.seconds
    }

    /// What is wrong with it in a suite.
    pub(super) fn check(&self, suite: &Suite) -> Result<(), String> {
        let Some(workload) = suite.workload(&self.workload) else {
            return Err(format!("{} is none of the workloads", self.workload));
        };
        if let Some(unknown) = self.placements.iter().find(|name| !suite.placements.contains(name)) {
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
            (false, Some(_)) => return Err("nothing comes back, so that it has no back_after".into()),
            (false, None) => {}
        }
        let osds = suite.sizes().into_iter().map(|size| size.osds()).min().unwrap_or(0);
        if self.kind == Happening::OsdOut && osds <= suite.ground.replicas {
            return Err("an OSD goes out where there are more OSDs than replicas".into());
        }
        clients(workload).map_err(|what| format!("the workload {}: {what}", workload.name))?;
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

    /// It happens to this placement of a suite.
    pub fn is_on(&self, suite: &Suite, placement: &str) -> bool {
        let named = self.placements.is_empty() || self.placements.iter().any(|name| name == placement);
        let measured = suite.workload(&self.workload).is_some_and(|workload| workload.is_on(placement));
        named && measured && !suite.without.iter().any(|name| name == placement)
    }
}

/// What is wrong with a workload for clients that keep account of what was acknowledged.
fn clients(workload: &Workload) -> Result<(), String> {
    if workload.tool != Tool::Fio {
        return Err("clients of an event have images".into());
    }
    if workload.access == Access::Librbd {
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
    /// A workload is that of events, and not measured by itself.
    pub fn is_of_event(&self, workload: &str) -> bool {
        self.events.iter().any(|event| event.workload == workload)
    }

    /// Everything that happens, each event with what it happens to, in the suite's order.
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

    /// What is wrong with its events.
    pub(super) fn check_events(&self) -> Result<(), String> {
        super::unique("event", self.events.iter().map(|event| &event.name))?;
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
                found.iter().filter(move |(event, _)| event.kind == kind).map(|(_, cell)| &cell.placement)
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
        assert!(seconds(&quick) < 25 * 60, "{} s of load, and clusters come up beside it", seconds(&quick));
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
            let error = Suite::parse("s.toml", &TEXT.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{from}: {error}");
        }
        let bound = TEXT.replace("\"bluestore-dbwal\",\n", "\"bluestore-dbwal\",\n    \"ssd-raw\",\n");
        let error = Suite::parse("s.toml", &bound).expect_err("a bound").to_string();
        assert!(error.contains("ssd-raw has no image behind it"), "{error}");
    }
}
