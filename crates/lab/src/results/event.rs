//! What happened under load, and what became of clients, of the cluster, and of what was acknowledged.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Durability;
use crate::cluster::Health;
use crate::suite::Cell;

/// An event under load, on a cluster of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventRun {
    /// Its name in the suite.
    pub event: String,
    /// To what it happened, and what clients did.
    pub cell: Cell,
    /// Which of the repeats, from 1.
    pub repeat: u32,
    /// On which cluster.
    pub testbed: u32,
    /// What acknowledged writes are safe from.
    pub durability: Durability,
    /// Seconds since the suite began.
    pub begun_s: f64,
    /// What was done, such as `client-ssd fails every request`.
    pub what: String,
    /// How much later than it was due it began to happen, in seconds. None where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_s: Option<f64>,
    /// How long it took to happen, in seconds: a command of Ceph takes its time. Times from the event on are from the end of that. None
    /// where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_s: Option<f64>,
    /// Equal windows, in their order. The event happens between two of them: what was due while it did is in none. A request is in the
    /// window in which it was due.
    pub windows: Vec<EventWindow>,
    /// Second by second, from the first window on; those in which it happened are among them.
    pub points: Vec<EventPoint>,
    /// Longest time in which a client got no answer but errors, before the event, in seconds.
    pub gap_before_s: f64,
    /// The same from when it began to happen. One that lasts to the end may be longer in truth.
    pub gap_after_s: f64,
    /// What became of acknowledged writes.
    pub acknowledged: Acknowledged,
    /// OSDs that ended by themselves, by their numbers.
    pub osds_ended: Vec<u32>,
    /// Most OSDs that the monitor had down at one time. None if it told nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osds_down: Option<u32>,
    /// When the cluster was clean again.
    pub recovery: Recovery,
    /// What was scrubbed, where that was the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<Scrub>,
    /// What an operator has to do afterwards. None where nothing has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// What was done before images were compared, so that they have all that can be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salvaged: Option<String>,
    /// Part of the machine's processors that was busy on average, in percent.
    pub busy_percent: f64,
    /// Why it is not what was meant. Empty for a good one.
    pub invalid: Vec<String>,
}

/// What clients got of the requests that were due in a window. Percentiles count a request that failed, or was not answered, as one that
/// took longer than all others; they are None where they fall on such requests, or are of fewer requests than they divide.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventWindow {
    /// Its begin in seconds from the event on; negative before it.
    pub begin_s: f64,
    /// Its end.
    pub end_s: f64,
    /// Requests that were due.
    pub due: u64,
    /// Those that were answered with an error.
    pub failed: u64,
    /// Those that were not answered at all, as long as clients ran.
    pub unanswered: u64,
    /// Median of the time from when a request was due to its answer, in microseconds.
    pub p50_us: Option<f64>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// 99.9th percentile.
    pub p999_us: Option<f64>,
    /// The longest of those that were answered without an error.
    pub longest_us: Option<f64>,
}

/// A second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventPoint {
    /// What clients got.
    pub clients: EventWindow,
    /// How the cluster was at its end. None if it told nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
}

/// What became of writes that were acknowledged with a flush, as the images in the cluster show it afterwards, past every cache.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Acknowledged {
    /// Writes that were acknowledged.
    pub writes: u64,
    /// Blocks that they went to.
    pub blocks: u64,
    /// Blocks that lack the newest write that was acknowledged. None if nobody knows, or no write was acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Why nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
    /// When the oldest and the newest of what is lost were acknowledged, in seconds from the event on; negative before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_from_to_s: Option<(f64, f64)>,
    /// Blocks of which one write was acknowledged before the event and another one from then on: nothing can be said of what they had. None
    /// where they were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overwritten: Option<u64>,
    /// Reads of clients that returned something else than what was acknowledged.
    pub wrong_reads: u64,
}

/// Whether and when all placement groups were active+clean again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// When one of them was seen not to be, first, in seconds from the event on. None where all were all the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_clean_s: Option<f64>,
    /// When all of them were again, and stayed it. None where they were not as long as it was watched, or never left it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clean_s: Option<f64>,
    /// When what had gone came back, where something did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_s: Option<f64>,
    /// How long it was watched.
    pub watched_s: f64,
    /// Why nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
}

/// What a deep scrub came to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scrub {
    /// Placement groups.
    pub groups: u64,
    /// Those that were scrubbed as long as it was watched.
    pub scrubbed: u64,
    /// When the last of them was, in seconds from the event on. None where not all were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_s: Option<f64>,
}

impl EventRun {
    /// It counts.
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

    /// The last window of all, if it is not that of the event.
    pub fn after(&self) -> Option<&EventWindow> {
        let at = self.at()?;
        self.windows.last().filter(|last| last.begin_s > at.begin_s)
    }
}

impl Acknowledged {
    /// Blocks that lack the newest write that was acknowledged. None if nobody knows: where nothing was acknowledged nothing could be lost.
    pub fn lost(&self) -> Option<u64> {
        self.lost.filter(|_| self.blocks > 0)
    }

    /// Why nobody knows what was lost. None if it is known, or nobody has said why.
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
