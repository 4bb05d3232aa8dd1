//! Turns the shard's numbers into the admin API's reports.

use crate::admin::{
    BackendState, Exposure, Followed, Latency, Owner, Replication, State, VolumeNumbers,
    VolumeReport,
};
use crate::counters::{self, by_name};
use crate::health::backend_state;
use crate::shard::{LatencyHistogram, ShardVolumeStatus};
use crate::units::Duration;
use crate::volume;
use std::collections::BTreeMap;
use tidepool_backend::BackendUri;
use tidepool_engine::api::{Degraded, IoError, Mode};
use tidepool_engine::status::VolumeState;

/// What the control plane knows about a volume beyond the core's status.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The volume's loss that the operator accepts.
    accept_loss: Option<Duration>,
    /// State that stands above the core's: opening, unavailable, removing.
    state: Option<State>,
    /// Why the backend could not be opened.
    error: Option<String>,
    /// What is to be known of its image, a line each.
    notes: Vec<String>,
    /// Its own socket.
    socket: Option<String>,
    /// This host.
    host: String,
    /// The volume through which it reads what it has from its parent.
    parent: Option<String>,
}

impl Known {
    /// Nothing yet but the name of this host.
    pub fn on(host: &str) -> Known {
        Known { host: host.to_owned(), ..Known::default() }
    }

    /// The operator accepts to lose so much of it.
    pub fn accepting(self, accept_loss: Option<Duration>) -> Known {
        Known { accept_loss, ..self }
    }

    /// It is in a state that stands above the core's, and this is why.
    pub fn in_state(self, state: Option<State>, error: Option<String>) -> Known {
        Known { state, error, ..self }
    }

    /// That is to be known of it, too, a line each.
    pub fn noting(mut self, notes: impl IntoIterator<Item = String>) -> Known {
        self.notes.extend(notes);
        self
    }

    /// It has a socket of its own at this path.
    pub fn at_socket(self, socket: Option<String>) -> Known {
        Known { socket, ..self }
    }

    /// It is a clone, and reads what it has from its parent through this volume.
    pub fn cloned_through(self, parent: Option<String>) -> Known {
        Known { parent, ..self }
    }
}

/// The report of one volume.
pub fn volume(volume: &ShardVolumeStatus, known: Known) -> VolumeReport {
    let status = &volume.status;
    let state = known.state.unwrap_or(match status.state {
        VolumeState::Detached => State::Opening,
        VolumeState::Replica => State::Replica,
        VolumeState::Serving => State::Serving,
        VolumeState::Draining => State::Draining,
        VolumeState::Full => State::Full,
        VolumeState::Fenced => State::Fenced,
        VolumeState::Failed => State::Failed,
    });
    let seconds = status.exposed_age_ns as f64 / 1e9;
    // What one host loses the other one has.
    let in_sync = volume.pair.as_ref().is_some_and(|pair| pair.in_sync);
    let exposure = Exposure {
        seconds,
        bytes: status.exposed_bytes,
        accepted_seconds: known.accept_loss.map(Duration::as_seconds),
        exceeded: !in_sync
            && known.accept_loss.is_some_and(|accepted| seconds > accepted.as_seconds()),
    };
    VolumeReport {
        name: status.spec.name.clone(),
        backend: status.spec.backend.clone(),
        size_bytes: status.spec.size_bytes,
        read_only: status.spec.read_only,
        mode: status.mode.into(),
        mode_wanted: status.spec.mode.into(),
        state,
        backend_state: backend_state(volume),
        error: known.error.or_else(|| trouble(volume)),
        notes: known.notes,
        socket: known.socket,
        exposure,
        numbers: numbers(volume),
        peer: volume.pair.as_ref().and_then(|pair| pair.host.clone()),
        replication: volume.pair.as_ref().map(|pair| Replication {
            phase: pair.phase.to_owned(),
            in_sync: pair.in_sync,
            degraded: pair.degraded != Degraded::No && status.spec.mode == Mode::WriteBack,
            lag_records: pair.lag_records,
        }),
        followed: volume.followed.as_ref().map(|followed| Followed {
            host: followed.host.clone(),
            silence_ms: followed.silence_ns / 1_000_000,
        }),
        parent: known.parent,
        owner: Owner { host: owner_host(volume, known.host), generation: status.spec.generation },
        counters: by_name(counters::of_volume(&status.count)),
    }
}

/// What the cache holds of a volume, and how its clients are served.
fn numbers(volume: &ShardVolumeStatus) -> VolumeNumbers {
    let status = &volume.status;
    let blocks = status.count.hit_blocks + status.count.miss_blocks;
    VolumeNumbers {
        dirty_bytes: status.dirty_bytes,
        dirty_zero_bytes: status.dirty_zero_bytes,
        dirty_bytes_max: status.dirty_bytes_max,
        cached_bytes: status.cached_bytes,
        lost_blocks: status.lost_blocks,
        drain_writes_in_flight: status.drain_writes_in_flight,
        hit_ratio: (blocks > 0).then(|| status.count.hit_blocks as f64 / blocks as f64),
        read_latency: latency(&volume.read_latency),
        write_latency: latency(&volume.write_latency),
        flush_latency: latency(&volume.flush_latency),
        connections: volume.connections,
        flushes: status.flushes,
    }
}

/// The report of a volume that is only configured.
pub fn configured(
    name: &str,
    backend: &BackendUri,
    mode: volume::Mode,
    read_only: bool,
    known: Known,
) -> VolumeReport {
    VolumeReport {
        name: name.to_owned(),
        backend: backend.to_string(),
        size_bytes: 0,
        read_only,
        mode,
        mode_wanted: mode,
        state: known.state.unwrap_or(State::Opening),
        backend_state: BackendState::Ok,
        error: known.error,
        notes: known.notes,
        socket: known.socket,
        exposure: Exposure {
            accepted_seconds: known.accept_loss.map(Duration::as_seconds),
            ..Exposure::default()
        },
        numbers: VolumeNumbers::default(),
        peer: None,
        replication: None,
        followed: None,
        parent: None,
        owner: Owner { host: "unknown".into(), generation: 0 },
        counters: BTreeMap::new(),
    }
}

/// Whose volume it is, as far as that is known without its ownership record.
fn owner_host(volume: &ShardVolumeStatus, host: String) -> String {
    match &volume.followed {
        Some(followed) => followed.host.clone(),
        None if volume.status.state == VolumeState::Replica => "unknown".into(),
        None => host,
    }
}

/// Why nothing arrives at the image.
fn fenced(volume: &ShardVolumeStatus) -> String {
    match volume.pair.as_ref().is_some_and(|pair| pair.is_lost()) {
        true => "another owner has taken the image over".into(),
        false => {
            "this client is blocklisted, or another owner has taken the image over: nobody knows yet".into()
        }
    }
}

/// What is to be done, at the end of a message, about a volume whose image is missing.
pub fn if_gone(volume: &str) -> String {
    format!(
        "; if it is gone for good, tidepool volume remove {volume} --give-up says what is lost with it, and how to save that first"
    )
}

/// What is wrong with a volume that is attached.
fn trouble(volume: &ShardVolumeStatus) -> Option<String> {
    let status = &volume.status;
    match (status.state, volume.backend_error) {
        (VolumeState::Fenced, _) => Some(fenced(volume)),
        (VolumeState::Failed, _) => Some("data is lost that cannot be named block by block".into()),
        (_, Some(IoError::Full)) => {
            Some("the backend is full: it takes nothing until there is room".into())
        }
        (_, Some(IoError::Fenced)) => Some(fenced(volume)),
        (_, Some(IoError::Errno(errno))) => {
            let error = std::io::Error::from_raw_os_error(errno);
            let way_out =
                if errno == libc::ENOENT { if_gone(&status.spec.name) } else { String::new() };
            Some(format!("the backend fails: {}{way_out}", crate::failure::reason(&error)))
        }
        (_, None) if status.lost_blocks > 0 => {
            let copy = volume
                .pair
                .as_ref()
                .map(|_| ", and there is no second copy before they are overwritten");
            Some(format!(
                "{} blocks are lost and read as errors{}",
                status.lost_blocks,
                copy.unwrap_or_default()
            ))
        }
        (_, None) if backend_state(volume) == BackendState::Slow => {
            Some("the backend has not answered for seconds".into())
        }
        _ => None,
    }
}

fn latency(histogram: &LatencyHistogram) -> Latency {
    if histogram.is_empty() {
        return Latency::default();
    }
    let us = |ns: u64| ns as f64 / 1e3;
    Latency {
        count: histogram.len(),
        mean_us: (histogram.mean() / 100.0).round() / 10.0,
        p50_us: us(histogram.value_at_quantile(0.5)),
        p99_us: us(histogram.value_at_quantile(0.99)),
        p999_us: us(histogram.value_at_quantile(0.999)),
        max_us: us(histogram.max()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::health::SLOW_NS;
    use crate::metrics::Sample;
    use crate::shard::{PairStatus, ReactorCounters, ShardStatus};
    use tidepool_engine::api::{DrainOrder, Mode, VolumeId, VolumeSpec};
    use tidepool_engine::status::{DeviceStatus, VolumeCounters, VolumeStatus};

    /// A volume that has answered `reads` reads, three of four blocks from the cache.
    pub(crate) fn status_with(name: &str, reads: u64) -> ShardVolumeStatus {
        let mut read_latency = LatencyHistogram::new(3).expect("3 digits are allowed");
        (0..reads).for_each(|i| read_latency.record(1000 * (i + 1)).expect("recorded"));
        let empty = LatencyHistogram::new(3).expect("3 digits are allowed");
        let count = VolumeCounters {
            reads,
            hit_blocks: 3 * reads,
            miss_blocks: reads,
            ..VolumeCounters::default()
        };
        let spec = VolumeSpec {
            name: name.into(),
            backend: "file:/images/1".into(),
            size_bytes: 1 << 30,
            mode: Mode::WriteBack,
            drain: DrainOrder::Unordered,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 7,
            attachment: Vec::new(),
        };
        let status = VolumeStatus {
            id: VolumeId(0),
            spec,
            mode: Mode::WriteThrough,
            state: VolumeState::Serving,
            dirty: true,
            dirty_bytes: 4096,
            dirty_zero_bytes: 0,
            dirty_bytes_max: 1 << 20,
            dirty_age_ns: 2_500_000_000,
            exposed_bytes: 4096,
            exposed_age_ns: 2_500_000_000,
            cached_bytes: 8192,
            lost_blocks: 0,
            sequence: 9,
            sequence_drained: 8,
            backend_error: None,
            flushes: true,
            drain_writes_in_flight: 0,
            backend_unflushed: false,
            count,
        };
        ShardVolumeStatus {
            status,
            backend_wait_ns: 0,
            backend_error: None,
            read_latency,
            write_latency: empty.clone(),
            flush_latency: empty,
            connections: 2,
            pair: None,
            followed: None,
        }
    }

    /// A scrape of one such volume.
    pub(crate) fn sample_with(name: &str, reads: u64) -> Sample {
        let status = status_with(name, reads);
        let volumes = vec![volume(&status, Known::default())];
        let shard = ShardStatus {
            device: DeviceStatus::default(),
            volumes: vec![status],
            reactor: ReactorCounters::default(),
        };
        Sample::new(shard, volumes)
    }

    #[test]
    fn what_two_hosts_have_does_not_count_as_exceeding() {
        let known = Known { accept_loss: Some(Duration::from_millis(2_000)), ..Known::default() };
        let mut status = status_with("v", 4);
        status.pair = Some(PairStatus {
            phase: "sync",
            host: Some("h2".into()),
            in_sync: true,
            synced_with: None,
            degraded: Degraded::No,
            lag_records: 3,
        });
        let report = volume(&status, known);
        assert!(!report.exposure.exceeded);
        assert_eq!(report.peer.as_deref(), Some("h2"));
        let replication = report.replication.expect("it has a second copy");
        assert_eq!(
            (replication.in_sync, replication.degraded, replication.lag_records),
            (true, false, 3)
        );
    }

    #[test]
    fn a_report_says_what_would_be_lost() {
        let known = |millis| Known { accept_loss: millis, host: "h".into(), ..Known::default() };
        let report = volume(&status_with("v", 4), known(Some(Duration::from_millis(2_000))));
        assert_eq!((report.exposure.seconds, report.exposure.bytes), (2.5, 4096));
        assert!(report.exposure.exceeded);
        assert_eq!(report.hit_ratio, Some(0.75));
        assert_eq!(report.owner, Owner { host: "h".into(), generation: 7 });
        assert!(
            !volume(&status_with("v", 4), known(Some(Duration::from_millis(3_000))))
                .exposure
                .exceeded
        );
        assert!(!volume(&status_with("v", 4), known(None)).exposure.exceeded);
        assert_eq!(volume(&status_with("v", 0), known(None)).hit_ratio, None);
    }

    #[test]
    fn trouble_is_named() {
        let mut status = status_with("v", 0);
        status.backend_wait_ns = SLOW_NS;
        let report = volume(&status, Known::default());
        assert_eq!(report.backend_state, BackendState::Slow);
        assert!(report.error.is_some_and(|e| e.contains("has not answered")));
        status.backend_error = Some(IoError::Full);
        let report = volume(&status, Known::default());
        assert_eq!(report.backend_state, BackendState::Full);
        assert!(report.error.is_some_and(|e| e.contains("the backend is full")));
        status.backend_error = Some(IoError::Errno(5));
        let report = volume(&status, Known::default());
        assert_eq!(report.backend_state, BackendState::Failing);
        assert_eq!(report.error.as_deref(), Some("the backend fails: input/output error"));
        status.status.state = VolumeState::Fenced;
        let report = volume(&status, Known::default());
        assert_eq!(report.state, State::Fenced);
        assert!(report.error.is_some_and(|e| e.contains("another owner")));
    }

    #[test]
    fn reports_survive_the_wire() {
        let report = volume(&status_with("v", 10), Known::default());
        let text = serde_json::to_string(&report).expect("json");
        assert!(text.contains("\"reads\":10,"), "whole numbers stay whole: {text}");
        assert_eq!(serde_json::from_str::<VolumeReport>(&text).expect("read back"), report);
    }
}
