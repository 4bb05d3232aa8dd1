//! The slowest requests of each placement in the deciding workload.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::svg::{Row, both, rows};
use crate::breakdown::combined;
use crate::results::Run;
use crate::stats::{self, Bound, Summary, merged};
use crate::verdict::{reference, reference_runs};
use crate::words;

/// Least number of requests beyond a percentile; with fewer, the percentile is chance.
const REQUESTS_MIN: u64 = 10;

/// The tail of a placement.
struct Tail<'a> {
    placement: &'a str,
    summary: Summary,
    /// Requests slower than the 99.9th percentile. None without histograms of all runs.
    beyond: Option<u64>,
    /// The largest counted hop, and what limited the placement from outside.
    limits: Vec<String>,
}

fn tail<'a>(page: &Page<'_>, placement: &'a str) -> Option<Tail<'a>> {
    let runs = reference_runs(page.results, placement, &page.results.suite.deciding);
    let summary = stats::summary(&runs);
    summary.p50_us?;
    let requests = |runs: &[&Run]| -> Option<u64> {
        merged(runs)
            .map(|found| found.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count)))
    };
    let hop = combined(&runs).bottleneck().map(|hop| hop.to_string());
    let limits = hop.into_iter().chain(summary.lower_bound.clone()).collect();
    Some(Tail { placement, beyond: requests(&runs).map(|all| all / 1_000), limits, summary })
}

/// Percentiles of each placement, with what limits the placement.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let deciding = &page.results.suite.deciding;
    let Some(setting) = reference(page.results, deciding) else {
        return html! { p.dim { "Nothing was measured." } };
    };
    let tails: Vec<Tail<'_>> =
        page.placements.iter().filter_map(|placement| tail(page, placement)).collect();
    if tails.is_empty() {
        let counts = page
            .placements
            .iter()
            .any(|name| !reference_runs(page.results, name, deciding).is_empty());
        return html! {
            p.dim { @if counts { "Not known: the load generator tells no percentiles." } @else { "No run counts." } }
        };
    }
    let row = |tail: &Tail<'_>| {
        let Summary { p50_us, p99_us, p999_us, .. } = tail.summary;
        Row {
            label: tail.placement.into(),
            value: format!("{} · {} · {}", latency(p50_us), latency(p99_us), latency(p999_us)),
            look: page.look(tail.placement),
            dots: Vec::new(),
            center: p50_us.map(|us| us / 1e3),
            interval: p50_us.zip(p999_us).map(|(low, high)| (low / 1e3, high / 1e3)),
            stroke: p99_us.map(|us| us / 1e3),
            bound: Bound::Exact,
        }
    };
    let all: Vec<Row> = tails.iter().map(row).collect();
    let cells: Vec<Vec<Markup>> = tails.iter().map(cells).collect();
    let columns = [
        ("placement", Kind::Name),
        ("p50", Kind::Number),
        ("p99", Kind::Number),
        ("p99.9", Kind::Number),
        ("p99 to p50", Kind::Number),
        ("requests beyond p99.9", Kind::Number),
        ("limited by", Kind::Text),
    ];
    let axis = "latency, ms (logarithmic): p50, p99, p99.9";
    html! {
        p { (deciding) " at queue depth " (setting.depth) ", all requests of all repeats together." }
        figure {
            (both(820.0, |width| rows(width, axis, axis, &all, None)))
            figcaption { "Marker: median (p50); stroke: 99th percentile (p99); end of the line: 99.9th percentile (p99.9)." }
        }
        (stack(&columns, &cells))
        p { small {
            "Fewer than " (REQUESTS_MIN) " requests beyond p99.9 make it chance (few). Limited by: the largest counted hop of the mean, for counters tell no tails, and "
            "the client or the machine where one of them was the limit."
        } }
    }
}

fn latency(us: Option<f64>) -> String {
    us.map_or("–".into(), words::latency)
}

fn cells(tail: &Tail<'_>) -> Vec<Markup> {
    let Summary { p50_us, p99_us, p999_us, .. } = tail.summary;
    let spread = p99_us.zip(p50_us).map(|(p99, p50)| format!("{} ×", words::factor(p99 / p50)));
    let limits = if tail.limits.is_empty() { "no counters".into() } else { tail.limits.join("; ") };
    let texts = [latency(p50_us), latency(p99_us), latency(p999_us), spread.unwrap_or("–".into())];
    let all =
        [tail.placement.to_string()].into_iter().chain(texts).chain([beyond(tail.beyond), limits]);
    all.map(|text| html! { (text) }).collect()
}

fn beyond(requests: Option<u64>) -> String {
    match requests {
        None => "not counted, worst of the repeats".into(),
        Some(few) if few < REQUESTS_MIN => format!("{few} (few)"),
        Some(some) if some < 100 => some.to_string(),
        Some(requests) => words::number(requests as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_of_a_few_requests_is_told_to_be_chance() {
        assert_eq!((beyond(Some(9)), beyond(Some(10))), ("9 (few)".into(), "10".into()));
        assert!(beyond(None).contains("worst"));
    }
}
