//! Figures of `rados bench` in the form in which they are published: bandwidth and latency of each
//! placement, each with its largest and smallest value.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use crate::results::{Bench, Run, Spread};
use crate::stats::{self, Setting};
use crate::suite::{Tool, Workload};
use crate::words;

/// Bytes of the unit of bandwidths, which rados bench calls a MB.
const MIB: f64 = (1u64 << 20) as f64;

/// The suite has a workload of rados bench.
pub(super) fn is_there(page: &Page<'_>) -> bool {
    page.results.suite.workloads.iter().any(|workload| workload.tool == Tool::RadosBench)
}

/// One table for each workload of rados bench.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let workloads =
        page.results.suite.workloads.iter().filter(|found| found.tool == Tool::RadosBench);
    html! {
        p {
            "Bandwidth of each second of a window, of all instances together; mean latency of the window. The longest and the shortest latency are those of "
            "whole runs with their ramps, for rados bench tells no others. It tells no percentiles: none is known."
        }
        @for workload in workloads { (table(page, workload)) }
    }
}

fn table(page: &Page<'_>, workload: &Workload) -> Markup {
    let columns = [
        ("placement", Kind::Name),
        ("load", Kind::Text),
        ("runs", Kind::Number),
        ("MiB/s avg", Kind::Number),
        ("MiB/s max", Kind::Number),
        ("MiB/s min", Kind::Number),
        ("latency avg", Kind::Number),
        ("latency max", Kind::Number),
        ("latency min", Kind::Number),
    ];
    let mut rows = Vec::new();
    for setting in stats::all_settings(page.results, &workload.name) {
        let of = |placement: &&str| row(page, placement, &setting);
        rows.extend(page.placements.iter().filter_map(of));
    }
    html! {
        h3 { (workload.title) " (" code { (workload.name) } ")" }
        @if rows.is_empty() { p.dim { "No run counts." } } @else { (stack(&columns, &rows)) }
    }
}

/// The row of a placement at one load. None if no run with such figures counts.
fn row(page: &Page<'_>, placement: &str, setting: &Setting) -> Option<Vec<Markup>> {
    let runs = stats::runs(page.results, placement, setting);
    let counted = runs.into_iter().filter(|run| stats::objections(run).is_empty());
    let told: Vec<Bench> = counted.filter_map(|run: &Run| run.bench).collect();
    if told.is_empty() {
        return None;
    }
    let rates = together(told.iter().map(|bench| bench.bytes_per_s));
    let latencies = together(told.iter().map(|bench| bench.latency_us));
    let rate = |bytes: f64| words::number(bytes / MIB);
    let texts = [
        placement.to_string(),
        load(page, setting),
        told.len().to_string(),
        rate(rates.mean),
        rate(rates.max),
        rate(rates.min),
        words::latency(latencies.mean),
        words::latency(latencies.max),
        words::latency(latencies.min),
    ];
    Some(texts.into_iter().map(|text| html! { (text) }).collect())
}

/// The geometric mean of the means of all runs, with the largest and the smallest value of all
/// runs.
fn together(spreads: impl Iterator<Item = Spread> + Clone) -> Spread {
    let count = spreads.clone().count().max(1) as f64;
    Spread {
        mean: (spreads.clone().map(|spread| spread.mean.ln()).sum::<f64>() / count).exp(),
        max: spreads.clone().map(|spread| spread.max).fold(f64::MIN, f64::max),
        min: spreads.map(|spread| spread.min).fold(f64::MAX, f64::min),
    }
}

/// A load in words, with the conditions that differ between the settings of the suite.
fn load(page: &Page<'_>, setting: &Setting) -> String {
    let ground = &page.results.suite.ground;
    let mut parts = vec![format!(
        "{} × {} in flight",
        words::count(setting.clients as usize, "instance"),
        setting.depth
    )];
    if ground.second_slowed_by.is_some() {
        parts.push(format!("slowed by {}", setting.slowed_by.unwrap_or(ground.slowed_by)));
    }
    if ground.disks.len() * ground.osds_per_disk.len() > 1 {
        parts.push(format!("{} disks × {} OSDs", setting.disks, setting.osds_per_disk));
    }
    parts.extend(setting.beside());
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Prices;
    use crate::report::html;
    use crate::results::Results;
    use crate::suite::Suite;
    use crate::synthetic;
    use crate::verdict::verdict;

    /// Results of a workload that writes objects of 4 MiB; each figure is the objects per second of
    /// a repeat.
    fn results() -> Results {
        let mut results = synthetic::results(&[
            ("bluestore-colocated", &[10.0, 10.2, 9.8]),
            ("osd-tidepool", &[30.0, 30.6, 29.4]),
        ]);
        results.suite = Suite::find("rados-bench").expect("built in");
        for run in &mut results.runs {
            run.cell.workload = "4m-write".into();
            run.histogram.clear();
            (run.figures.p50_us, run.figures.p99_us, run.figures.p999_us) = (None, None, None);
            (run.reads, run.writes) = (None, Some(run.figures));
            let mean = run.figures.iops * 4.0 * MIB;
            run.bench = Some(Bench {
                bytes_per_s: Spread { mean, max: mean * 1.25, min: mean / 2.0 },
                latency_us: Spread { mean: run.figures.mean_us, max: 2e6, min: 9e3 },
            });
        }
        results
    }

    fn page(results: &Results) -> String {
        html(results, &verdict(results), &Prices::default())
    }

    #[test]
    fn what_rados_bench_tells_has_a_table_of_its_own() {
        let page = page(&results());
        let part = page.split_once("<h2>What rados bench tells</h2>").expect("the part").1;
        let part = part.split_once("<h2>").expect("another part").0;
        let row = part.split_once("<span>osd-tidepool</span>").expect("its row").1;
        let row = row.split_once("</tr>").expect("its end").0;
        let cells: Vec<&str> = row
            .split("<span>")
            .skip(1)
            .filter_map(|cell| Some(cell.split_once("</span>")?.0))
            .collect();
        assert_eq!(
            cells,
            [
                "1 instance × 16 in flight, slowed by 2",
                "3",
                "120",
                "153",
                "58.8",
                "533 ms",
                "2.0 s",
                "9.0 ms"
            ]
        );
        assert!(part.contains("No run counts."), "of the other workloads nothing was measured");
        let without =
            html(&synthetic::which_side(), &verdict(&synthetic::which_side()), &Prices::default());
        assert!(!without.contains("What rados bench tells"));
    }

    #[test]
    fn percentiles_that_nobody_tells_are_not_known() {
        let results = results();
        let found = verdict(&results);
        let lead = found.standings.rankings[0].lead.as_ref().expect("two placements");
        assert_eq!((lead.p99.ratio, lead.p99.known().as_str()), (None, "not known"));
        assert!(
            lead.p99.why.as_ref().is_some_and(|why| why.contains("runs with percentiles")),
            "{:?}",
            lead.p99
        );
        assert!(lead.iops.ratio.is_some() && lead.mean.ratio.is_some());
        let told: Vec<&String> =
            found.answer.iter().filter(|text| text.contains("99th percentile")).collect();
        assert!(!told.is_empty() && told.iter().all(|text| text.contains("not known")), "{told:?}");
        let page = page(&results);
        for part in [
            "Not known: the load generator tells no percentiles.",
            "<td class=\"n\">not known</td>",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(!page.contains("NaN"));
        let text = serde_json::to_string(&results).expect("plain data");
        assert!(!text.contains("p99_us"));
        let back = crate::document::parse("r.json", text.as_bytes()).expect("results");
        assert_eq!(back.runs[0].bench.map(|bench| bench.bytes_per_s.min > 0.0), Some(true));
    }
}
