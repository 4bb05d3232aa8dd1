//! Events under load: what was done, and the effects on clients, on the cluster and on acknowledged
//! writes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Durability;
use crate::suite::Cell;
use tidepool_cluster::ceph::Health;

/// An event under load, on a cluster of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventRun {
    /// Name of the event in the suite.
    pub event: String,
    /// The placement to which the event happened, and the load of the clients.
    pub cell: Cell,
    /// Number of the repeat, from 1.
    pub repeat: u32,
    /// Number of the cluster.
    pub testbed: u32,
    /// What acknowledged writes are safe from.
    pub durability: Durability,
    /// Seconds since the program began to run the suite; a resumed run counts from its restart.
    pub begun_s: f64,
    /// What was done, such as `client-ssd fails every request`.
    pub what: String,
    /// Seconds from the time when the event was due to the time when it began. None where this was
    /// not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_s: Option<f64>,
    /// Seconds from the start of the event to its end, because a command of Ceph takes time. Times
    /// since the event are counted from this end. None where this was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_s: Option<f64>,
    /// Equal windows, in their order. The event takes place between two windows; requests that were
    /// due while it took place are in no window. A request belongs to the window in which it was
    /// due.
    pub windows: Vec<EventWindow>,
    /// One point for each second from the first window on. The seconds in which the event took
    /// place are included.
    pub points: Vec<EventPoint>,
    /// Longest time in which a client got no successful answer, in seconds, from the start of the
    /// first window to the start of the event.
    pub gap_before_s: f64,
    /// Longest time in which a client got no successful answer, in seconds, from the start of the
    /// event to the end of the last window. A gap that lasts to that end may have been longer.
    pub gap_after_s: f64,
    /// What became of acknowledged writes.
    pub acknowledged: Acknowledged,
    /// What became of the cluster.
    #[serde(flatten)]
    pub cluster: EventCluster,
    /// What an operator has to do afterwards. Set only where a device died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// What was done before the images were compared, so that the images hold all data that can be
    /// recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salvaged: Option<String>,
    /// Mean share of the machine's processors that was busy, in percent.
    pub busy_percent: f64,
    /// Reasons why the event is not what was meant. Empty for a valid event.
    pub invalid: Vec<String>,
}

/// What became of the cluster after an event.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventCluster {
    /// Numbers of the OSDs that ended by themselves.
    pub osds_ended: Vec<u32>,
    /// Largest number of OSDs that the monitor reported as down at one time after the event. None
    /// if the monitor reported nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osds_down: Option<u32>,
    /// When the cluster was clean again.
    pub recovery: Recovery,
    /// What was scrubbed, if the event was a deep scrub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<Scrub>,
}

/// Answers to the requests of clients that were due in a window. A percentile counts a request that
/// failed or was not answered as longer than all others. A percentile is None where it falls on
/// such a request, and where too few requests were due: fewer than 2 for the median, 100 for the
/// 99th and 1,000 for the 99.9th percentile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventWindow {
    /// Start of the window in seconds from the event on; negative before the event.
    pub begin_s: f64,
    /// End of the window in seconds from the event on.
    pub end_s: f64,
    /// Requests that were due in the window.
    pub due: u64,
    /// Requests of the window that were answered with an error.
    pub failed: u64,
    /// Requests of the window that were not answered before the clients stopped.
    pub unanswered: u64,
    /// Median of the time from when a request was due to its answer, in microseconds.
    pub p50_us: Option<f64>,
    /// 99th percentile of the time from when a request was due to its answer, in microseconds.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the time from when a request was due to its answer, in microseconds.
    pub p999_us: Option<f64>,
    /// Longest time from when a request was due to an answer without an error, in microseconds.
    pub longest_us: Option<f64>,
}

/// One second of the load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventPoint {
    /// Answers to the requests that were due in this second.
    pub clients: EventWindow,
    /// The last state that the cluster reported, at most 3 s before the end of the second. None if
    /// there is no such report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
}

/// What became of writes that were acknowledged with a flush. The images are read back from the
/// cluster afterwards, past every cache, and compared with these writes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Acknowledged {
    /// Writes that were acknowledged.
    pub writes: u64,
    /// Blocks to which acknowledged writes went.
    pub blocks: u64,
    /// Blocks that lack the newest acknowledged write. None if this is not known, or no write was
    /// acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Why `lost` is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
    /// When the oldest and the newest of the lost writes were acknowledged, in seconds from the
    /// event on; negative before the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_from_to_s: Option<(f64, f64)>,
    /// Blocks of which one write was acknowledged before the event began, and another one from then
    /// on. The image shows only whether it has the newer write, so nothing can be said of the older
    /// one. None where these blocks were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overwritten: Option<u64>,
    /// Reads of clients that returned neither the newest acknowledged data nor newer data.
    pub wrong_reads: u64,
}

/// Whether and when all placement groups were active+clean again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// When a placement group was first seen not to be active+clean, in seconds from the event on.
    /// None where every report since the event had all placement groups active+clean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_clean_s: Option<f64>,
    /// When all placement groups were active+clean again and stayed so, in seconds from the event
    /// on. None where they did not become active+clean while the cluster was watched, or always
    /// were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clean_s: Option<f64>,
    /// When the OSD that was stopped or out was brought back, in seconds from the event on. None
    /// where the event takes no OSD away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_s: Option<f64>,
    /// Seconds for which the cluster was watched after the event.
    pub watched_s: f64,
    /// Why nothing is known of the recovery. None if the monitor reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
}

/// Progress of a deep scrub.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scrub {
    /// Placement groups.
    pub groups: u64,
    /// Placement groups that were scrubbed while the cluster was watched.
    pub scrubbed: u64,
    /// When the last placement group was scrubbed, in seconds from the event on. None where not all
    /// placement groups were scrubbed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_s: Option<f64>,
}

impl EventRun {
    /// The event is valid: `invalid` is empty.
    pub fn is_valid(&self) -> bool {
        self.invalid.is_empty()
    }

    /// The last window before the event.
    pub fn before(&self) -> Option<&EventWindow> {
        self.windows.iter().rfind(|window| window.begin_s < 0.0)
    }

    /// The first window from the event on.
    pub fn at(&self) -> Option<&EventWindow> {
        self.windows.iter().find(|window| window.begin_s >= 0.0)
    }

    /// The last window, if it is not the first one from the event on.
    pub fn after(&self) -> Option<&EventWindow> {
        let at = self.at()?;
        self.windows.last().filter(|last| last.begin_s > at.begin_s)
    }
}

impl Acknowledged {
    /// Blocks that lack the newest acknowledged write. None if this is not known, and where no
    /// write was acknowledged, because then nothing can be lost.
    pub fn lost(&self) -> Option<u64> {
        self.lost.filter(|_| self.blocks > 0)
    }

    /// Why it is not known what was lost. None if it is known, or no reason was recorded.
    pub fn why_not_known(&self) -> Option<&str> {
        let nothing = (self.blocks == 0).then_some("no write was acknowledged");
        self.not_known.as_deref().or(nothing)
    }
}

impl EventWindow {
    /// Requests that were answered without an error.
    pub fn answered(&self) -> u64 {
        self.due.saturating_sub(self.failed).saturating_sub(self.unanswered)
    }
}
