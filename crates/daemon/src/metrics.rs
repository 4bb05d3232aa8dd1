//! Prometheus metrics, written at each scrape from one sample of the shard.

use crate::admin::{Replication, State, VolumeReport};
use crate::counters::{self, Kind, Number};
use crate::shard::{LatencyHistogram, ShardStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::fmt;

/// Media type of what [`encode`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds of the latency buckets in microseconds: from a hit in memory to a stuck backend.
const LATENCY_BOUNDS_US: [u64; 20] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 60_000_000,
];

/// What a scrape is made of.
#[derive(Debug)]
pub struct Sample {
    /// The shard's own numbers.
    shard: ShardStatus,
    /// The volumes as the control plane sees them.
    volumes: Vec<VolumeReport>,
}

/// The sample as OpenMetrics text.
///
/// # Errors
/// Never in practice: writing to a string does not fail.
pub fn encode(sample: Sample) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("tidepool");
    registry.register_collector(Box::new(sample));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Sample {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut build =
            encoder.encode_descriptor("build", "Version of the daemon", None, MetricType::Info)?;
        build.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        for number in counters::of_device(&self.shard.device) {
            single(&mut encoder, "cache", &number)?;
        }
        for number in counters::of_reactor(&self.shard.reactor) {
            single(&mut encoder, "reactor", &number)?;
        }
        self.encode_volumes(&mut encoder)?;
        self.encode_states(&mut encoder)?;
        self.encode_latencies(&mut encoder)
    }
}

/// A volume's name and one list of its numbers.
type Row<'a> = (&'a str, Vec<Number>);

impl Sample {
    /// The shard's own numbers, and the volumes as the control plane sees them, of one moment.
    pub fn new(shard: ShardStatus, volumes: Vec<VolumeReport>) -> Sample {
        Sample { shard, volumes }
    }

    /// The shard's own numbers.
    pub fn shard(&self) -> &ShardStatus {
        &self.shard
    }

    /// The volumes as the control plane sees them.
    pub fn volumes(&self) -> &[VolumeReport] {
        &self.volumes
    }

    /// The volumes alone.
    pub fn into_volumes(self) -> Vec<VolumeReport> {
        self.volumes
    }

    /// The numbers of the volumes: the format wants all samples of a metric together, so it goes
    /// metric by metric.
    fn encode_volumes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of_core = self.shard.volumes.iter().map(|volume| {
            let mut numbers = counters::of_volume(&volume.status.count);
            numbers.extend(counters::of_volume_now(volume));
            (volume.status.spec.name.as_str(), numbers)
        });
        encode_rows(encoder, &of_core.collect::<Vec<Row<'_>>>())?;
        let of_reports = self.volumes.iter().map(|volume| (volume.name.as_str(), exposure(volume)));
        encode_rows(encoder, &of_reports.collect::<Vec<Row<'_>>>())?;
        let paired = self
            .volumes
            .iter()
            .filter_map(|v| Some((v.name.as_str(), replication(v.replication.as_ref()?))));
        encode_rows(encoder, &paired.collect::<Vec<Row<'_>>>())
    }

    fn encode_states(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        if self.volumes.is_empty() {
            return Ok(());
        }
        let help = "1 for the state that the volume is in";
        let mut metric =
            encoder.encode_descriptor("volume_state", help, None, MetricType::Gauge)?;
        for volume in &self.volumes {
            for state in State::ALL {
                let labels = [("volume", volume.name.as_str()), ("state", state.as_str())];
                let value = i64::from(volume.state == state);
                ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_latencies(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        if self.shard.volumes.is_empty() {
            return Ok(());
        }
        let help = "Time from a request to its reply";
        let mut metric = encoder.encode_descriptor(
            "volume_request_duration_seconds",
            help,
            None,
            MetricType::Histogram,
        )?;
        for volume in &self.shard.volumes {
            for (operation, histogram) in [
                ("read", &volume.read_latency),
                ("write", &volume.write_latency),
                ("flush", &volume.flush_latency),
            ] {
                let labels =
                    [("volume", volume.status.spec.name.as_str()), ("operation", operation)];
                let sum = histogram.mean() * histogram.len() as f64 / 1e9;
                metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                    sum,
                    histogram.len(),
                    &buckets(histogram),
                    None,
                )?;
            }
        }
        Ok(())
    }
}

/// Of volumes that are to have a second copy.
fn replication(replication: &Replication) -> Vec<Number> {
    let flag = |value| f64::from(u8::from(value));
    vec![
        Number::gauge(
            "replica_in_sync",
            "1 while whatever is acknowledged is in the logs of two hosts",
            flag(replication.in_sync),
        ),
        Number::gauge(
            "replica_degraded",
            "1 while write-back works as write-through, or waits, since no second copy counts",
            flag(replication.degraded),
        ),
        Number::gauge(
            "replica_lag_records",
            "Records that the peer has not confirmed",
            replication.lag_records as f64,
        ),
    ]
}

fn exposure(volume: &VolumeReport) -> Vec<Number> {
    vec![
        Number::gauge(
            "exposure_seconds",
            "Age of what would be lost with the cache device",
            volume.exposure.seconds,
        ),
        Number::gauge(
            "exposure_bytes",
            "Bytes that would be lost with the cache device",
            volume.exposure.bytes as f64,
        ),
        Number::gauge(
            "exposure_exceeded",
            "1 while more would be lost than the operator accepts",
            f64::from(u8::from(volume.exposure.exceeded)),
        ),
    ]
}

fn single(encoder: &mut DescriptorEncoder<'_>, part: &str, number: &Number) -> fmt::Result {
    let name = format!("{part}_{}", number.name());
    let metric =
        encoder.encode_descriptor(&name, number.help(), None, metric_type(number.kind()))?;
    value(metric, number)
}

/// Rows of the same numbers in the same order, one row per volume.
fn encode_rows(encoder: &mut DescriptorEncoder<'_>, rows: &[Row<'_>]) -> fmt::Result {
    let Some((_, first)) = rows.first() else { return Ok(()) };
    for (column, number) in first.iter().enumerate() {
        let name = format!("volume_{}", number.name());
        let mut metric =
            encoder.encode_descriptor(&name, number.help(), None, metric_type(number.kind()))?;
        for (volume, numbers) in rows {
            value(metric.encode_family(&[("volume", *volume)])?, &numbers[column])?;
        }
    }
    Ok(())
}

fn metric_type(kind: Kind) -> MetricType {
    match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
    }
}

fn value(metric: MetricEncoder<'_>, number: &Number) -> fmt::Result {
    match number.kind() {
        Kind::Counter => ConstCounter::new(number.value()).encode(metric),
        Kind::Gauge => ConstGauge::new(number.value()).encode(metric),
    }
}

/// Requests per bucket, each counted once; the encoder adds them up as the format wants.
fn buckets(histogram: &LatencyHistogram) -> Vec<(f64, u64)> {
    let bounds = LATENCY_BOUNDS_US.iter().map(|us| us * 1000).chain([u64::MAX]);
    let mut buckets: Vec<(u64, u64)> = bounds.map(|bound| (bound, 0)).collect();
    for recorded in histogram.iter_recorded() {
        let place = buckets.partition_point(|(bound, _)| *bound < recorded.value_iterated_to());
        buckets[place].1 += recorded.count_at_value();
    }
    let seconds = |bound: u64| if bound == u64::MAX { f64::INFINITY } else { bound as f64 / 1e9 };
    buckets.into_iter().map(|(bound, count)| (seconds(bound), count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample_with;

    #[test]
    fn each_metric_has_prefix_unit_and_label() {
        let text = encode(sample_with("vm1", 3)).expect("text");
        for line in [
            "tidepool_build_info{version=\"0.1.0\"} 1",
            "# TYPE tidepool_volume_reads counter",
            "tidepool_volume_reads_total{volume=\"vm1\"} 3.0",
            "tidepool_volume_state{volume=\"vm1\",state=\"serving\"} 1",
            "tidepool_volume_state{volume=\"vm1\",state=\"fenced\"} 0",
            "# TYPE tidepool_volume_request_duration_seconds histogram",
            "tidepool_volume_request_duration_seconds_count{volume=\"vm1\",operation=\"read\"} 3",
            "tidepool_cache_failed 0.0",
            "tidepool_volume_backend_full{volume=\"vm1\"} 0.0",
            "tidepool_volume_backend_wait_seconds{volume=\"vm1\"} 0.0",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert!(text.lines().all(|l| l.starts_with("# ") || l.starts_with("tidepool_")), "{text}");
    }

    #[test]
    fn every_request_is_in_exactly_one_bucket() {
        let mut histogram = LatencyHistogram::new(3).expect("3 digits are allowed");
        for ns in [1, 10_000, 10_001, 999_999, 3_000_000_000, 200_000_000_000] {
            histogram.record(ns).expect("recorded");
        }
        let buckets = buckets(&histogram);
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), 6);
        assert_eq!(
            buckets[0],
            (10e-6, 1),
            "10 000 ns is recorded in a step that ends above the bound"
        );
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, 1)));
    }
}
