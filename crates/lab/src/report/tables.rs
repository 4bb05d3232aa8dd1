//! Tables: claims, every cell, processor time, drains, and what does not count.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use super::curves::value;
use crate::results::Run;
use crate::stats::{self, Estimate, Finding, Metric, Setting};
use crate::verdict::{Outcome, Tested, reference, reference_runs};
use crate::words;

/// The published claims, with their outcomes.
pub(super) fn directions(page: &Page<'_>) -> Markup {
    html! {
        div.scroll { table.cards {
            thead { tr { th { "outcome" } th { "claim" } th { "placement, against" } th { "published" } th.n { "found here" } th { "evidence" } } }
            tbody {
                @for tested in &page.verdict.directions {
                    @let Tested { direction, outcome, for_good, evidence, .. } = tested;
                    tr {
                        td.name { span class=(class(*outcome)) { (sign(*outcome)) " " (outcome.title()) } br; small { "expected: " (direction.expected()) } }
                        td.text {
                            (direction.claim) br; small { (direction.source) }
                            @if let Some(quotation) = &direction.quotation { br; small { "“" (quotation) "”" } }
                        }
                        td.name {
                            (direction.placement)
                            @if let Some(against) = &direction.against { br; small { "against " (against) } }
                            br; small { (direction.metric.title()) " in " (direction.workload) @if let Some(disks) = direction.disks { ", " (words::count(disks as usize, "disk")) } }
                        }
                        td.text { (tested.published()) }
                        td.n[tested.course.is_none()].text[tested.course.is_some()] { (tested.found()) @if let Some(for_good) = for_good { br; small { "for good: " (for_good) } } }
                        td.text { (evidence) }
                    }
                }
            }
        } }
        p { small {
            "Ratios with their 95 % intervals. More or less: the whole interval is above or below 1. The same: the whole "
            "interval is within " (format!("{:.0} %", stats::EQUIVALENCE * 100.0)) " of 1. Rises or falls: the whole interval of the last point to "
            "the first one is beyond that. Anything else is inconclusive. Only directions are compared with what was published, not sizes: these "
            "are other devices."
        } }
    }
}

fn class(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Reproduced => "yes",
        Outcome::NotReproduced => "no",
        Outcome::NotMeasurable | Outcome::Inconclusive => "maybe",
    }
}

fn sign(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Reproduced => "✓",
        Outcome::NotReproduced => "✗",
        Outcome::NotMeasurable => "–",
        Outcome::Inconclusive => "?",
    }
}

/// Every cell, with its repeats and with its ratio to the baseline.
pub(super) fn cells(page: &Page<'_>) -> Markup {
    let results = page.results;
    let many = results.suite.ground.disks.len() * results.suite.ground.osds_per_disk.len() > 1;
    let factors = results.suite.ground.second_slowed_by.is_some();
    html! {
        @for workload in &results.suite.workloads {
            h3 { (workload.title) " (" code { (workload.name) } ")" }
            div.scroll { table {
                thead { tr {
                    @if many { th.n { "disks × OSDs" } }
                    @if factors { th.n { "slowed by" } }
                    th.n { "depth" } th.n { "clients" } th { "placement" } th.n { "IOPS" } th.n { "95 % interval" } th.n { "mean" }
                    th.n { "p50" } th.n { "p99" } th.n { "p99.9" } th.n { "IOPS to baseline" } th { "finding" } th { "each repeat, IOPS" }
                } }
                tbody {
                    @for setting in stats::all_settings(results, &workload.name) {
                        @for placement in &page.placements {
                            (cell(page, placement, &setting, (many, factors)))
                        }
                    }
                }
            } }
        }
        p { small {
            "IOPS and mean latency are geometric means of the clusters; percentiles are those of all requests of all repeats together. The baseline is "
            (results.suite.baseline) ". * does not count."
        } }
    }
}

fn cell(
    page: &Page<'_>,
    placement: &str,
    setting: &Setting,
    (many, factors): (bool, bool),
) -> Markup {
    let runs = stats::runs(page.results, placement, setting);
    if runs.is_empty() {
        return html! {};
    }
    let summary = stats::summary(&runs);
    let interval =
        |estimate: Option<Estimate>| match estimate.and_then(|estimate| estimate.interval) {
            Some((low, high)) => format!("{}–{}", words::number(low), words::number(high)),
            None => "–".into(),
        };
    let baseline = &page.results.suite.baseline;
    let ratio = (placement != baseline).then(|| {
        stats::paired(
            page.results,
            placement,
            baseline,
            std::slice::from_ref(setting),
            Metric::Iops,
        )
    });
    html! {
        tr {
            @if many { td.n { (setting.disks) " × " (setting.osds_per_disk) } }
            @if factors { td.n { (setting.slowed_by.unwrap_or(page.results.suite.ground.slowed_by)) } }
            td.n { (setting.depth) } td.n { (setting.clients) }
            td.name { (placement) @if let Some(what) = setting.beside() { br; small { (what) } } }
            td.n { (value(&summary, Metric::Iops)) } td.n { (interval(summary.iops)) } td.n { (value(&summary, Metric::Mean)) }
            td.n { (words::known(summary.p50_us)) } td.n { (words::known(summary.p99_us)) } td.n { (words::known(summary.p999_us)) }
            @match &ratio {
                Some(ratio) => { td.n { (ratio) } td { (finding(ratio.finding)) } }
                None => { td.n { "1" } td { "the baseline" } }
            }
            td.name { (repeats(&runs)) }
        }
    }
}

/// The name of a finding in a table.
pub(super) fn finding(finding: Finding) -> &'static str {
    match finding {
        Finding::More => "more",
        Finding::Less => "less",
        Finding::Same => "the same",
        Finding::Turns => "not measurable here",
        Finding::Inconclusive => "inconclusive",
    }
}

/// The requests per second of each run, with a star where the run does not count.
fn repeats(runs: &[&Run]) -> String {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| run.repeat);
    let of = |run: &&Run| {
        let star = if stats::objections(run).is_empty() { "" } else { "*" };
        format!("{}{star}", words::number(run.figures.iops))
    };
    runs.iter().map(of).collect::<Vec<String>>().join(" · ")
}

/// Processor time of a request, by kind of process.
pub(super) fn processor(page: &Page<'_>) -> Markup {
    let results = page.results;
    let deciding = &results.suite.deciding;
    let runs: Vec<(&str, Vec<&Run>)> = page
        .placements
        .iter()
        .map(|placement| (*placement, reference_runs(results, placement, deciding)))
        .filter(|(_, runs)| runs.iter().any(|run| !run.counted.cpu_us_per_io.is_empty()))
        .collect();
    let kinds: BTreeSet<&str> = runs
        .iter()
        .flat_map(|(_, runs)| runs)
        .flat_map(|run| run.counted.cpu_us_per_io.keys())
        .map(String::as_str)
        .collect();
    let mean = |runs: &[&Run], kind: &str| -> Option<f64> {
        let values: Vec<f64> =
            runs.iter().filter_map(|run| run.counted.cpu_us_per_io.get(kind).copied()).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let depth = reference(results, deciding).map_or(0, |setting| setting.depth);
    html! {
        @if runs.is_empty() {
            p.dim { "Nothing was recorded." }
        } @else {
            p { "Microseconds of processor time for each request of " (deciding) " at queue depth " (depth) (super::on(page, deciding)) ", means of the repeats." }
            div.scroll { table {
                thead { tr { th { "placement" } @for kind in &kinds { th.n { (kind) ", µs" } } th.n { "all, µs" } } }
                tbody {
                    @for (placement, runs) in &runs {
                        tr {
                            td.name { (placement) }
                            @for kind in &kinds { td.n { (mean(runs, kind).map_or("–".into(), words::number)) } }
                            td.n { (words::number(kinds.iter().filter_map(|kind| mean(runs, kind)).sum::<f64>())) }
                        }
                    }
                }
            } }
        }
    }
}

/// How long the write-back of dirty bytes took after a run.
pub(super) fn drains(page: &Page<'_>) -> Markup {
    let drained = |run: &&Run| run.drained.is_some();
    let mut runs: Vec<&Run> = page.results.runs.iter().filter(drained).collect();
    runs.sort_by(|one, two| (&one.cell, one.repeat).cmp(&(&two.cell, two.repeat)));
    html! {
        @if runs.is_empty() {
            p.dim { "No placement had anything left to write back." }
        } @else {
            p { "After a run, with nothing else to do. What is written with the devices hurried says nothing about time." }
            details { summary { (words::count(runs.len(), "drain")) }
                div.scroll { table {
                    thead { tr { th { "placement" } th { "workload" } th.n { "depth" } th.n { "repeat" } th.n { "dirty" } th.n { "drained after, s" } th.n { "of it hurried" } } }
                    tbody {
                        @for (run, drained) in runs.iter().filter_map(|run| Some((run, run.drained?))) {
                            tr {
                                td.name { (run.cell.placement) } td.name { (run.cell.workload) } td.n { (run.cell.depth) } td.n { (run.repeat) }
                                td.n { (words::bytes(drained.dirty_bytes)) } td.n { (words::number(drained.seconds)) } td.n { (words::bytes(drained.hurried_bytes)) }
                            }
                        }
                    }
                } }
            }
            (drain_means(page, &runs))
        }
    }
}

/// The longest drain for each placement and workload.
fn drain_means(page: &Page<'_>, runs: &[&Run]) -> Markup {
    let keys: BTreeSet<(&str, &str)> =
        runs.iter().map(|run| (run.cell.placement.as_str(), run.cell.workload.as_str())).collect();
    let at = |name: &str| page.placements.iter().position(|placement| *placement == name);
    let mut keys: Vec<(&str, &str)> = keys.into_iter().collect();
    keys.sort_by_key(|(placement, workload)| (at(placement), *workload));
    let longest = |placement: &str, workload: &str| {
        let of = runs
            .iter()
            .filter(|run| run.cell.placement == placement && run.cell.workload == workload);
        of.filter_map(|run| run.drained).max_by(|one, two| one.seconds.total_cmp(&two.seconds))
    };
    html! {
        div.scroll { table {
            thead { tr { th { "placement" } th { "workload" } th.n { "longest drain, s" } th.n { "of dirty" } } }
            tbody {
                @for (placement, workload) in keys {
                    @if let Some(drained) = longest(placement, workload) {
                        tr { td.name { (placement) } td.name { (workload) } td.n { (words::number(drained.seconds)) } td.n { (words::bytes(drained.dirty_bytes)) } }
                    }
                }
            }
        } }
    }
}

/// Placements that were not run, and runs that do not count.
pub(super) fn left_out(page: &Page<'_>) -> Markup {
    let results = page.results;
    let invalid: Vec<(&Run, Vec<String>)> = results
        .runs
        .iter()
        .map(|run| (run, stats::objections(run)))
        .filter(|(_, objections)| !objections.is_empty())
        .collect();
    html! {
        h3 { "Placements not run" }
        @if results.not_run.is_empty() { p.dim { "None." } }
        ul { @for not_run in &results.not_run { li { strong { (not_run.name()) } ": " (not_run.why) } } }
        @if !results.not_run_sizes.is_empty() {
            h3 { "Sizes of clusters not measured" }
            ul { @for not_run in &results.not_run_sizes { li { strong { (not_run.size) } ": " (not_run.why) } } }
        }
        @if !results.not_run_clients.is_empty() {
            h3 { "Numbers of clients not measured" }
            ul { @for not_run in &results.not_run_clients { li { strong { (words::count(not_run.clients as usize, "client")) } ": " (not_run.why) } } }
        }
        h3 { "Runs that do not count: " (invalid.len()) " of " (results.runs.len()) }
        @if !invalid.is_empty() {
            (reasons(&["placement", "workload", "depth", "repeat", "why"], invalid.iter().map(|(run, why)| (*run, why.join("; ")))))
        }
    }
}

/// Runs, each with a reason.
pub(super) fn reasons<'a>(
    columns: &[&str; 5],
    rows: impl Iterator<Item = (&'a Run, String)>,
) -> Markup {
    html! {
        div.scroll.low { table {
            thead { tr { @for (index, column) in columns.iter().enumerate() { th.n[index == 2 || index == 3] { (column) } } } }
            tbody {
                @for (run, why) in rows {
                    tr {
                        td.name {
                            (run.cell.placement) br; small { (run.cell.disks) " × " (run.cell.osds_per_disk) " OSDs" }
                            @if let Some(what) = run.cell.beside() { br; small { (what) } }
                        }
                        td.name { (run.cell.workload) } td.n { (run.cell.depth) } td.n { (run.repeat) }
                        td.text { (why) }
                    }
                }
            }
        } }
    }
}
