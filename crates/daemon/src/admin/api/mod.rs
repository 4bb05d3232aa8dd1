//! The messages of the admin API, as its JSON has them; `snapshots` has those about snapshots.

mod snapshots;

pub use snapshots::{
    ChangeSnapshot, ChangedSnapshot, RollBack, RolledBack, Snapshot, SnapshotAction,
    SnapshotReport, TakeSnapshot,
};

use crate::door::VolumeSocket;
use crate::units::{Duration, Size};
use crate::volume::{DrainOrder, Mode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Deref;

/// The daemon, its cache device and its volumes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Name of the host.
    pub host: String,
    /// Seconds since the daemon began to serve.
    pub uptime_seconds: f64,
    /// The cache device.
    pub cache: CacheReport,
    /// The volumes, by name.
    pub volumes: Vec<VolumeReport>,
    /// Counters of the reactor.
    pub reactor: BTreeMap<String, serde_json::Number>,
}

/// The cache device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheReport {
    /// Its path.
    pub path: String,
    /// Its uuid.
    pub uuid: String,
    /// It has failed: nothing is written to it any more.
    pub failed: bool,
    /// Bytes.
    pub size_bytes: u64,
    /// Bytes in use by cached blocks of all volumes.
    pub cached_bytes: u64,
    /// Bytes not yet in a backend, all volumes.
    pub dirty_bytes: u64,
    /// Further numbers, as in the metrics.
    pub counters: BTreeMap<String, serde_json::Number>,
}

/// What a volume is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its backend is being opened.
    Opening,
    /// Its backend could not be opened; it is tried again.
    Unavailable,
    /// The copy of another host's volume; nothing is served.
    Replica,
    /// Serving.
    Serving,
    /// Draining on request.
    Draining,
    /// Writes wait: the dirty quota is reached.
    Full,
    /// Another owner has it: nothing is served any more.
    Fenced,
    /// Data is lost that cannot be named block by block; every read fails.
    Failed,
    /// It is being removed.
    Removing,
}

impl State {
    /// All states.
    pub const ALL: [State; 9] = [
        State::Opening,
        State::Unavailable,
        State::Replica,
        State::Serving,
        State::Draining,
        State::Full,
        State::Fenced,
        State::Failed,
        State::Removing,
    ];

    /// Its spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Opening => "opening",
            State::Unavailable => "unavailable",
            State::Replica => "replica",
            State::Serving => "serving",
            State::Draining => "draining",
            State::Full => "full",
            State::Fenced => "fenced",
            State::Failed => "failed",
            State::Removing => "removing",
        }
    }
}

/// How a volume's backend does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendState {
    /// As it should.
    #[default]
    Ok,
    /// It has not answered for seconds.
    Slow,
    /// It has no room, or a quota is used up.
    Full,
    /// What is sent to it fails, and is tried again.
    Failing,
}

/// One volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// URI of its backend.
    pub backend: String,
    /// Bytes.
    pub size_bytes: u64,
    /// Only reads are served.
    pub read_only: bool,
    /// The mode in force.
    pub mode: Mode,
    /// The mode asked for; differs during a change and after a fault.
    pub mode_wanted: Mode,
    /// What it is doing.
    pub state: State,
    /// How its backend does.
    #[serde(default)]
    pub backend_state: BackendState,
    /// What is wrong, if anything is.
    pub error: Option<String>,
    /// What is to be known of its image although nothing is wrong, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Its own socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// What would be lost if the cache device died now.
    pub exposure: Exposure,
    /// What the cache holds of it, and how its clients are served.
    #[serde(flatten)]
    pub numbers: VolumeNumbers,
    /// The host that has the second copy, or is about to; none where there is none.
    pub peer: Option<String>,
    /// The second copy, where there is to be one and this host is the owner.
    #[serde(default)]
    pub replication: Option<Replication>,
    /// The owner, where this is the copy of another host's volume and that host is connected.
    #[serde(default)]
    pub followed: Option<Followed>,
    /// For a clone: the volume through which it reads what it has from its parent, so that all
    /// clones share what is cached.
    #[serde(default)]
    pub parent: Option<String>,
    /// Who serves the volume.
    pub owner: Owner,
    /// Further numbers, as in the metrics.
    pub counters: BTreeMap<String, serde_json::Number>,
}

/// What the cache holds of a volume, and how its clients are served. In JSON these stand among the
/// fields of the [`VolumeReport`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeNumbers {
    /// Bytes of data not yet in the backend.
    pub dirty_bytes: u64,
    /// Bytes that were discarded or zeroed and are not yet so in the backend; they take no room.
    #[serde(default)]
    pub dirty_zero_bytes: u64,
    /// The most dirty bytes that are allowed.
    pub dirty_bytes_max: u64,
    /// Bytes in the cache, dirty and clean.
    pub cached_bytes: u64,
    /// Blocks that read as errors because no good copy is left.
    pub lost_blocks: u64,
    /// Writes of the drain that the backend has not answered.
    #[serde(default)]
    pub drain_writes_in_flight: u64,
    /// Part of the blocks read that came from the cache; nothing before the first read.
    pub hit_ratio: Option<f64>,
    /// Latency of reads.
    pub read_latency: Latency,
    /// Latency of writes, discards and write-zeroes.
    pub write_latency: Latency,
    /// Latency of flushes.
    pub flush_latency: Latency,
    /// Open client connections.
    pub connections: u64,
    /// A client has sent a flush; until then every write waits for stable media.
    pub flushes: bool,
}

impl Deref for VolumeReport {
    type Target = VolumeNumbers;

    /// A report is read as its JSON is: as if the numbers were its own fields.
    fn deref(&self) -> &VolumeNumbers {
        &self.numbers
    }
}

/// The second copy of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replication {
    /// Where it stands: `solo`, `filling`, `catching`, `joining`, `sync`, `leaving` or `lost`.
    pub phase: String,
    /// Whatever is acknowledged is in the logs of both hosts.
    pub in_sync: bool,
    /// Write-back works as write-through, because no copy counts.
    pub degraded: bool,
    /// Records that the peer has not confirmed.
    pub lag_records: u64,
}

/// The owner of a volume of which a copy is here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Followed {
    /// Its host.
    pub host: String,
    /// Milliseconds since something was last received of it.
    pub silence_ms: u64,
}

/// What would be lost if the only copy of the cache died now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Exposure {
    /// Age of the oldest byte that is not in the backend.
    pub seconds: f64,
    /// Bytes that are not in the backend.
    pub bytes: u64,
    /// What the operator accepts to lose, in seconds.
    pub accepted_seconds: Option<f64>,
    /// More than that would be lost.
    pub exceeded: bool,
}

/// Latencies since the daemon began to serve, from request to reply, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Requests measured.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Half of the requests took at most this long.
    pub p50_us: f64,
    /// 99 % of them.
    pub p99_us: f64,
    /// 99.9 % of them.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Who serves a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Name of the host; `unknown` for the copy of another host's volume while that host is not
    /// connected.
    pub host: String,
    /// Generation of the ownership; 0 where none is taken.
    pub generation: u64,
}

/// A volume to be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddVolume {
    /// Its name.
    pub name: String,
    /// URI of its backend.
    pub backend: String,
    /// What to do with writes; the mode rule decides when it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Write-back on a single copy is wanted; up to this much may be lost with the cache device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_loss: Option<Duration>,
    /// Most dirty bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<Size>,
    /// Serve reads only.
    #[serde(default)]
    pub read_only: bool,
    /// Order in which dirty data reaches the image; the daemon's, or grouped, when it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainOrder>,
    /// A socket of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<VolumeSocket>,
}

/// Changes to a volume; what is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetVolume {
    /// What to do with writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// As in [`AddVolume`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_loss: Option<Duration>,
    /// Most dirty bytes; 0 for its share of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<Size>,
    /// A socket of its own, in the place of the one that it may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<VolumeSocket>,
}

/// Another size for a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// A multiple of 4 KiB. What lies beyond the end of a smaller volume is lost.
    pub size: Size,
}

/// How the copy of another host's volume becomes this host's volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeVolume {
    /// Also where this host was restarted since the copy counted: the newest of what was not
    /// flushed may be lost.
    #[serde(default)]
    pub accept_loss: bool,
}

/// To whom a volume is handed over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandOver {
    /// The host, which holds the second copy; whichever does if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Clients that are connected lose the connection.
    #[serde(default)]
    pub disconnect: bool,
    /// Only when a client writes there, as that of a guest does that has moved; until then it is
    /// served here, and clients are let in there. The host need not hold a copy.
    #[serde(default)]
    pub live: bool,
    /// What was begun with `live` is given up.
    #[serde(default)]
    pub cancel: bool,
}

/// A volume that another host serves now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOver {
    /// The volume.
    pub name: String,
    /// The host.
    pub host: String,
    /// Not yet: as soon as a client writes there.
    #[serde(default)]
    pub live: bool,
}

/// Volumes of a host that has failed, which are to be served here from their copies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailOver {
    /// The volumes; without any, all of which there is a copy here and whose ownership record names
    /// the fenced host.
    #[serde(default)]
    pub volumes: Vec<String>,
    /// The host that is known to be off, or cut off from the storage for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced: Option<String>,
    /// For how long what may pass by itself is tried again.
    pub wait: Duration,
}

/// How the failover of a volume has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailoverOutcome {
    /// It was served here already.
    Here,
    /// It is served here from now on.
    TakenOver,
    /// It is about to come here with a guest that moves while it runs: its clients are let in.
    Arriving,
    /// It is not served here.
    Refused,
}

impl FailoverOutcome {
    /// Its spelling for people.
    pub fn as_str(self) -> &'static str {
        match self {
            FailoverOutcome::Here => "here",
            FailoverOutcome::TakenOver => "taken over",
            FailoverOutcome::Arriving => "arriving",
            FailoverOutcome::Refused => "refused",
        }
    }
}

/// What became of one volume in a failover.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedOver {
    /// The volume.
    pub name: String,
    /// How it has ended.
    pub outcome: FailoverOutcome,
    /// Its owner's host, as the ownership record has it now; none if that could not be found out.
    pub owner: Option<String>,
    /// One line: from whom it was taken over, or why it is not served here.
    pub why: Option<String>,
}

/// A volume that has been removed: its image is complete and free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// Its name.
    pub name: String,
    /// URI of the image.
    pub backend: String,
    /// The image was compared with what the cache held.
    pub verified: bool,
    /// How to use the image directly: one command per line.
    pub direct_use: Vec<String>,
}

/// Asks to forget a volume with what the cache alone has of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GiveUp {
    /// What is not in the image may be lost.
    #[serde(default)]
    pub accept_loss: bool,
}

/// A volume that was given up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GaveUp {
    /// Its name.
    pub name: String,
    /// URI of its image.
    pub backend: String,
    /// Bytes that the cache alone had.
    pub bytes: u64,
    /// Age of the oldest of them, in seconds.
    pub seconds: f64,
    /// What has become of the image.
    pub freed: Freed,
}

/// What has become of the image of a volume that was given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Freed {
    /// Anybody may use it; `exact` if it is a state that the volume once had.
    Free {
        /// See above.
        exact: bool,
    },
    /// It could not be reached, for this reason. Its record says that its newest data is here,
    /// until somebody frees it.
    OutOfReach(String),
    /// Its record says that the copy on this host counts.
    CopyCounts(String),
    /// It is this host's, of which the second copy was here, and counted.
    CopyGone(String),
    /// This cache did not own it.
    NotOurs,
}

impl Freed {
    /// What it means for an image, and what to do, as one line.
    pub fn text(&self, image: &str) -> String {
        match self {
            Freed::Free { exact: true } => {
                format!("{image} is free, as one state that the volume once had")
            }
            Freed::Free { exact: false } => {
                format!(
                    "{image} is free; it is no state that the volume ever had: check what is on it"
                )
            }
            Freed::OutOfReach(why) => format!(
                "{image} could not be freed ({why}); should it come back: tidepool recover {image} --accept-loss"
            ),
            Freed::CopyCounts(host) => format!(
                "host {host} has a copy with everything: serve it there (tidepool volume takeover), or give that up, too: \
                 tidepool recover {image} --accept-loss"
            ),
            Freed::CopyGone(host) => format!(
                "{image} is left as it is: host {host} has what is not in it, which was here as the second copy"
            ),
            Freed::NotOurs => format!("{image} is left as it is"),
        }
    }
}

/// What went wrong, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The line.
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A volume of which each field has a value of its own.
    fn report() -> VolumeReport {
        let latency = |count: u64| Latency {
            count,
            mean_us: 1.5,
            p50_us: 2.0,
            p99_us: 3.0,
            p999_us: 4.0,
            max_us: 5.0,
        };
        VolumeReport {
            name: "vm1".into(),
            backend: "file:/a".into(),
            size_bytes: 1,
            read_only: false,
            mode: Mode::WriteThrough,
            mode_wanted: Mode::WriteBack,
            state: State::Serving,
            backend_state: BackendState::Slow,
            error: Some("slow".into()),
            notes: vec!["a note".into()],
            socket: Some("/s".into()),
            exposure: Exposure {
                seconds: 2.5,
                bytes: 2,
                accepted_seconds: Some(5.0),
                exceeded: false,
            },
            numbers: VolumeNumbers {
                dirty_bytes: 3,
                dirty_zero_bytes: 4,
                dirty_bytes_max: 5,
                cached_bytes: 6,
                lost_blocks: 7,
                drain_writes_in_flight: 8,
                hit_ratio: Some(0.75),
                read_latency: latency(9),
                write_latency: latency(10),
                flush_latency: latency(11),
                connections: 12,
                flushes: true,
            },
            peer: Some("h2".into()),
            replication: Some(Replication {
                phase: "sync".into(),
                in_sync: true,
                degraded: false,
                lag_records: 13,
            }),
            followed: Some(Followed { host: "h3".into(), silence_ms: 14 }),
            parent: Some("@p".into()),
            owner: Owner { host: "h1".into(), generation: 15 },
            counters: BTreeMap::from([("reads".to_owned(), 16.into())]),
        }
    }

    /// That volume in JSON.
    const REPORT: &str = r#"{"name":"vm1","backend":"file:/a","size_bytes":1,"read_only":false,"mode":"write-through","mode_wanted":"write-back","state":"serving","backend_state":"slow","error":"slow","notes":["a note"],"socket":"/s","exposure":{"seconds":2.5,"bytes":2,"accepted_seconds":5.0,"exceeded":false},"dirty_bytes":3,"dirty_zero_bytes":4,"dirty_bytes_max":5,"cached_bytes":6,"lost_blocks":7,"drain_writes_in_flight":8,"hit_ratio":0.75,"read_latency":{"count":9,"mean_us":1.5,"p50_us":2.0,"p99_us":3.0,"p999_us":4.0,"max_us":5.0},"write_latency":{"count":10,"mean_us":1.5,"p50_us":2.0,"p99_us":3.0,"p999_us":4.0,"max_us":5.0},"flush_latency":{"count":11,"mean_us":1.5,"p50_us":2.0,"p99_us":3.0,"p999_us":4.0,"max_us":5.0},"connections":12,"flushes":true,"peer":"h2","replication":{"phase":"sync","in_sync":true,"degraded":false,"lag_records":13},"followed":{"host":"h3","silence_ms":14},"parent":"@p","owner":{"host":"h1","generation":15},"counters":{"reads":16}}"#;

    #[test]
    fn the_fields_of_a_volume_stand_side_by_side_and_in_this_order() {
        assert_eq!(serde_json::to_string(&report()).expect("JSON"), REPORT);
        assert_eq!(serde_json::from_str::<VolumeReport>(REPORT).expect("a report"), report());
        assert_eq!(report().dirty_bytes, 3);
    }

    #[test]
    fn what_an_older_daemon_does_not_say_is_nothing() {
        let mut said: serde_json::Value = serde_json::from_str(REPORT).expect("JSON");
        let fields = said.as_object_mut().expect("an object");
        let later = [
            "backend_state",
            "notes",
            "socket",
            "dirty_zero_bytes",
            "drain_writes_in_flight",
            "replication",
        ];
        for field in later.into_iter().chain(["followed", "parent"]) {
            fields.remove(field).expect("it is there");
        }
        let read: VolumeReport = serde_json::from_value(said).expect("a report");
        assert_eq!(
            (read.dirty_zero_bytes, read.drain_writes_in_flight, read.dirty_bytes),
            (0, 0, 3)
        );
        assert_eq!(
            (read.backend_state, read.notes.len(), read.replication),
            (BackendState::Ok, 0, None)
        );
        let without = REPORT.replacen("\"dirty_bytes\":3,", "", 1);
        let error = serde_json::from_str::<VolumeReport>(&without).expect_err("a field is missing");
        assert!(error.to_string().contains("missing field `dirty_bytes`"), "{error}");
    }
}
