//! Percentiles of all requests of several runs together. Percentiles are never averaged.

use std::collections::BTreeMap;

use crate::results::Run;

/// Histogram of the requests of several runs: upper bounds of the latency in nanoseconds and
/// counts, ascending. None if a run has no histogram, because the result would not show what is
/// missing.
pub fn merged(runs: &[&Run]) -> Option<Vec<(u64, u64)>> {
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for run in runs {
        if run.histogram.iter().all(|(_, count)| *count == 0) {
            return None;
        }
        for &(bound_ns, count) in &run.histogram {
            let total = all.entry(bound_ns).or_insert(0);
            *total = total.saturating_add(count);
        }
    }
    (!all.is_empty()).then(|| all.into_iter().collect())
}

/// The latency in microseconds that `per_mille` of a thousand requests do not exceed, as the upper
/// bound of its bucket. None if there are no requests.
pub fn percentile_us(histogram: &[(u64, u64)], per_mille: u64) -> Option<f64> {
    let total: u128 = histogram.iter().map(|(_, count)| u128::from(*count)).sum();
    let rank = (total * u128::from(per_mille)).div_ceil(1000).max(1);
    let mut seen = 0u128;
    let bucket = histogram.iter().find(|(_, count)| {
        seen += u128::from(*count);
        seen >= rank
    });
    bucket.map(|(bound_ns, _)| *bound_ns as f64 / 1e3)
}
