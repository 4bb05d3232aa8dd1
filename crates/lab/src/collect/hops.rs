//! Time of a request inside Ceph: counters of the OSDs before and after a measurement.

use std::io;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use tidepool_cluster::ceph::socket::ask;

/// The counters that are read: section and name in `perf dump`, and the hop that they measure.
const STAGES: [(&str, &str, Hop); 16] = [
    ("osd", "op_r_latency", Hop::OsdRead),
    ("osd", "op_w_latency", Hop::OsdWrite),
    ("osd", "op_before_dequeue_op_lat", Hop::OsdQueue),
    ("osd", "subop_w_latency", Hop::Replica),
    ("bluestore", "read_lat", Hop::StoreRead),
    ("bluestore", "state_aio_wait_lat", Hop::DataDevice),
    ("bluestore", "state_prepare_lat", Hop::StorePrepare),
    ("bluestore", "state_kv_queued_lat", Hop::KvQueue),
    ("bluestore", "state_kv_commiting_lat", Hop::KvCommit),
    ("bluestore", "kv_flush_lat", Hop::KvFlush),
    ("bluestore", "kv_sync_lat", Hop::KvSync),
    ("bluestore", "commit_lat", Hop::StoreCommit),
    // Name of this counter in later releases.
    ("bluestore", "txc_commit_lat", Hop::StoreCommit),
    ("filestore", "journal_latency", Hop::Journal),
    ("filestore", "queue_transaction_latency_avg", Hop::JournalQueue),
    ("filestore", "apply_latency", Hop::Apply),
];

/// A part of a request's path inside Ceph.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Hop {
    /// A whole read inside its OSD.
    OsdRead,
    /// A whole write inside its OSD, including its replicas.
    OsdWrite,
    /// Wait in the OSD's queue.
    OsdQueue,
    /// A write in the OSD of a replica.
    Replica,
    /// Read from BlueStore.
    StoreRead,
    /// Wait for the data device in BlueStore.
    DataDevice,
    /// Preparation of a write in BlueStore.
    StorePrepare,
    /// Wait for BlueStore's thread that commits.
    KvQueue,
    /// Commit of a write by BlueStore's database.
    KvCommit,
    /// Flush of the data device before such a commit. Data that reached the device after it was
    /// acknowledged must be safe before the database forgets it.
    KvFlush,
    /// One commit of BlueStore's database, for all writes that were collected until then.
    KvSync,
    /// A whole write in BlueStore.
    StoreCommit,
    /// Time until a write is in FileStore's journal.
    Journal,
    /// Wait for room in FileStore's journal.
    JournalQueue,
    /// Time until FileStore has applied a write to its file system.
    Apply,
}

/// How often a hop was passed in a run, and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stage {
    /// The hop.
    pub hop: Hop,
    /// Number of times it was passed.
    pub count: u64,
    /// Mean time in microseconds.
    pub mean_us: f64,
}

/// Counters of all OSDs at one moment.
#[derive(Debug, Clone, Default)]
pub struct Counters(Vec<Value>);

impl Counters {
    /// Reads the counters of the OSDs with these admin sockets.
    ///
    /// # Errors
    /// If an OSD does not answer.
    pub fn now<'a>(sockets: impl IntoIterator<Item = &'a Path>) -> io::Result<Counters> {
        let dumps = sockets.into_iter().map(|socket| ask(socket, "perf dump"));
        Ok(Counters(dumps.collect::<io::Result<_>>()?))
    }

    /// The counters of several OSDs together.
    pub fn joined(all: Vec<Counters>) -> Counters {
        Counters(all.into_iter().flat_map(|counters| counters.0).collect())
    }

    /// The sum of a level over all OSDs, such as bytes in use.
    pub fn level(&self, section: &str, name: &str) -> u64 {
        self.0.iter().filter_map(|osd| osd[section][name].as_u64()).sum()
    }

    /// Count and mean time of each hop since `before`, over all OSDs.
    pub fn since(&self, before: &Counters) -> Vec<Stage> {
        let stage = |&(section, name, hop): &(&str, &str, Hop)| {
            let (mut count, mut seconds) = (0u64, 0.0);
            for (osd, now) in self.0.iter().enumerate() {
                let (now, then) =
                    (&now[section][name], before.0.get(osd).map(|then| &then[section][name]));
                let number = |value: Option<&Value>, field: &str| {
                    value.and_then(|v| v[field].as_f64()).unwrap_or(0.0)
                };
                count += (number(Some(now), "avgcount") - number(then, "avgcount")).max(0.0) as u64;
                seconds += (number(Some(now), "sum") - number(then, "sum")).max(0.0);
            }
            (count > 0).then(|| Stage { hop, count, mean_us: seconds * 1e6 / count as f64 })
        };
        STAGES.iter().filter_map(stage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_differences_weighted_by_what_each_osd_did() {
        let dump = |count: u64, sum: f64| serde_json::json!({"osd": {"op_w_latency": {"avgcount": count, "sum": sum}}});
        let before = Counters(vec![dump(10, 1.0), dump(0, 0.0)]);
        let after = Counters(vec![dump(20, 2.0), dump(30, 0.6)]);
        let stages = after.since(&before);
        assert_eq!(stages, [Stage { hop: Hop::OsdWrite, count: 40, mean_us: 40_000.0 }]);
        assert!(after.since(&after).is_empty());
        let level = |bytes: u64| serde_json::json!({"bluefs": {"slow_used_bytes": bytes}});
        assert_eq!(
            Counters(vec![level(5), level(7), dump(1, 1.0)]).level("bluefs", "slow_used_bytes"),
            12
        );
    }
}
