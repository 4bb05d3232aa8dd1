//! Figures of several clients that were measured at the same time, taken together: counts and rates
//! are added, histograms are merged. No percentile is an average.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Figures;

/// Requests of one kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Side {
    /// Number of completed requests.
    pub ios: u64,
    /// Completed requests per second.
    pub iops: f64,
    /// Sum of the latencies in nanoseconds.
    pub total_ns: f64,
    /// Count of requests for each latency in nanoseconds. Empty if the load generator reports none.
    pub bins: BTreeMap<u64, u64>,
}

/// Requests of a measurement.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    /// Reads.
    pub reads: Side,
    /// Writes.
    pub writes: Side,
    /// Flushes.
    pub flushes: Side,
}

impl Side {
    fn read(side: &Value) -> Side {
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let ios = number(&side["total_ios"]);
        // Reads and writes have a completion latency; a flush has only one latency.
        let latency =
            if side["clat_ns"]["bins"].is_object() { &side["clat_ns"] } else { &side["lat_ns"] };
        let bins = latency["bins"].as_object().into_iter().flatten();
        Side {
            ios: ios as u64,
            iops: number(&side["iops"]),
            total_ns: ios * number(&side["lat_ns"]["mean"]),
            bins: bins
                .filter_map(|(ns, count)| Some((ns.parse().ok()?, count.as_u64()?)))
                .collect(),
        }
    }

    /// Adds the requests that another client completed at the same time, so that rates add up.
    pub fn add(&mut self, other: &Side) {
        self.ios += other.ios;
        self.iops += other.iops;
        self.total_ns += other.total_ns;
        for (&ns, &count) in &other.bins {
            *self.bins.entry(ns).or_insert(0) += count;
        }
    }

    /// Mean latency in microseconds.
    fn mean_us(&self) -> f64 {
        if self.ios == 0 { 0.0 } else { self.total_ns / self.ios as f64 / 1e3 }
    }

    /// The latency in microseconds within which `part` of the requests completed, if there are
    /// bins.
    fn percentile_us(&self, part: f64) -> Option<f64> {
        let total: u64 = self.bins.values().sum();
        let wanted = (total as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0;
        let reached = self.bins.iter().find(|(_, count)| {
            seen += **count;
            seen >= wanted
        });
        reached.map(|(&ns, _)| ns as f64 / 1e3)
    }

    /// The histogram: upper bounds in nanoseconds, 3 % to 6 % apart above 16 ns, and counts, in
    /// ascending order.
    pub fn histogram(&self) -> Vec<(u64, u64)> {
        let mut coarse: BTreeMap<u64, u64> = BTreeMap::new();
        for (&ns, &count) in &self.bins {
            // Rounds up to a number with five significant bits.
            let below = (1u64 << (64 - ns.leading_zeros()).saturating_sub(5)) - 1;
            *coarse.entry((ns + below) & !below).or_insert(0) += count;
        }
        coarse.into_iter().collect()
    }

    /// Figures of this kind of request; `None` without requests.
    pub fn figures(&self) -> Option<Figures> {
        (self.ios > 0).then(|| Figures {
            iops: self.iops,
            mean_us: self.mean_us(),
            p50_us: self.percentile_us(0.5),
            p99_us: self.percentile_us(0.99),
            p999_us: self.percentile_us(0.999),
        })
    }
}

impl Measured {
    /// Reads fio's report.
    pub fn read(report: &Value) -> Measured {
        let job = &report["jobs"][0];
        Measured {
            reads: Side::read(&job["read"]),
            writes: Side::read(&job["write"]),
            flushes: Side::read(&job["sync"]),
        }
    }

    /// Adds the requests that another client completed at the same time.
    pub fn add(&mut self, other: &Measured) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.flushes.add(&other.flushes);
    }

    /// Reads and writes together.
    pub fn all(&self) -> Side {
        let mut all = self.reads.clone();
        all.add(&self.writes);
        all
    }

    /// The figures of writes alone, each including its flush if there is one. `None` if nothing was
    /// written.
    pub fn write_figures(&self, with_flush: bool) -> Option<Figures> {
        self.writes.figures()?;
        let alone = Measured { reads: Side::default(), ..self.clone() };
        Some(alone.figures(with_flush))
    }

    /// The figures of all requests. With `with_flush`, each write is followed by a flush and is
    /// complete with it. If nothing was read, percentiles are then the sums of the percentiles of
    /// writes and of flushes. If reads were mixed in, percentiles are not known, because nothing
    /// records which flush belongs to which write.
    pub fn figures(&self, with_flush: bool) -> Figures {
        let both = self.all().figures().unwrap_or_default();
        let Some(flush) = self.flushes.figures().filter(|_| with_flush) else { return both };
        let alone = self.reads.ios == 0;
        let sum = |one: Option<f64>, other: Option<f64>| {
            one.zip(other).filter(|_| alone).map(|(one, other)| one + other)
        };
        let writes =
            if alone { 1.0 } else { self.writes.ios as f64 / self.all().ios.max(1) as f64 };
        Figures {
            iops: both.iops,
            mean_us: both.mean_us + flush.mean_us * writes,
            p50_us: sum(both.p50_us, flush.p50_us),
            p99_us: sum(both.p99_us, flush.p99_us),
            p999_us: sum(both.p999_us, flush.p999_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_merged_by_their_histograms() {
        let report = |ns: &str, ios: u64| {
            serde_json::json!({"jobs": [{"read": {"total_ios": ios, "iops": ios, "lat_ns": {"mean": 2000.0},
                "clat_ns": {"bins": {ns: ios}}}, "write": {"total_ios": 0}, "sync": {"total_ios": 0}}]})
        };
        let mut both = Measured::read(&report("1000", 99));
        both.add(&Measured::read(&report("9000", 1)));
        let figures = both.figures(false);
        assert_eq!((figures.iops, figures.mean_us), (100.0, 2.0));
        assert_eq!(
            (figures.p50_us, figures.p99_us, figures.p999_us),
            (Some(1.0), Some(1.0), Some(9.0))
        );
        assert_eq!(both.writes.figures(), None);
        assert_eq!(both.reads.histogram(), [(1024, 99), (9216, 1)]);
    }

    #[test]
    fn a_write_and_its_flush_are_one() {
        let latency = |ns: u64| serde_json::json!({"mean": ns, "bins": {ns.to_string(): 10}});
        let report = serde_json::json!({"jobs": [{"read": {"total_ios": 0},
            "write": {"total_ios": 10, "iops": 10.0, "lat_ns": {"mean": 3000}, "clat_ns": latency(3000)},
            "sync": {"total_ios": 10, "lat_ns": latency(5000)}}]});
        let measured = Measured::read(&report);
        assert_eq!((measured.figures(false).mean_us, measured.figures(true).mean_us), (3.0, 8.0));
        assert_eq!((measured.figures(true).iops, measured.figures(true).p99_us), (10.0, Some(8.0)));
    }

    /// `ios` requests, each of which took `ns` nanoseconds.
    fn side(ios: u64, ns: f64) -> Side {
        Side { ios, iops: ios as f64, total_ns: ios as f64 * ns, bins: [(ns as u64, ios)].into() }
    }

    #[test]
    fn writes_alone_are_complete_with_their_flushes_also_beside_reads() {
        let mixed =
            Measured { reads: side(70, 1e6), writes: side(30, 2e6), flushes: side(30, 10e6) };
        let mean_us = |with_flush| mixed.write_figures(with_flush).map(|figures| figures.mean_us);
        assert_eq!((mean_us(false), mean_us(true)), (Some(2e3), Some(12e3)));
        let reads = Measured { reads: side(70, 1e6), ..Measured::default() };
        assert_eq!(reads.write_figures(true), None);
    }

    #[test]
    fn reads_beside_writes_wait_for_no_flush() {
        let mixed =
            Measured { reads: side(70, 1e6), writes: side(30, 2e6), flushes: side(30, 10e6) };
        let figures = mixed.figures(true);
        // 70 requests of 1 ms and 30 of 12 ms.
        assert!((figures.mean_us - 4_300.0).abs() < 1e-6, "{figures:?}");
        assert_eq!((figures.iops, figures.p50_us, figures.p99_us), (100.0, None, None));
        assert_eq!(mixed.figures(false).p50_us, Some(1_000.0));
    }

    #[test]
    fn what_tells_no_latencies_of_single_requests_has_no_percentiles() {
        let side = Side { ios: 10, iops: 5.0, total_ns: 30_000.0, bins: BTreeMap::new() };
        let figures = side.figures().expect("requests");
        assert_eq!(
            (figures.mean_us, figures.p50_us, figures.p99_us, figures.p999_us),
            (3.0, None, None, None)
        );
        let text = serde_json::to_string(&figures).expect("plain data");
        assert_eq!(text, r#"{"iops":5.0,"mean_us":3.0}"#);
        assert_eq!(serde_json::from_str::<Figures>(&text).expect("figures"), figures);
    }
}
