//! Each run as a dot and as a row of a table.

use maud::{Markup, html};

use super::{Page, curves};
use crate::results::Run;
use crate::stats::objections;
use crate::stats::steady::Steadiness;
use crate::suite::Workload;
use crate::verdict::reference;
use crate::words;

/// The runs of all workloads.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let reference = reference(page.results, &page.results.suite.deciding);
    html! {
        @if let Some(setting) = reference {
            p { (setting.workload) " at queue depth " (setting.depth) (super::on(page, &setting.workload)) ". Each small dot is a run; strokes: 99th percentile of all requests." }
            (curves::repeats(page, &setting))
        }
        @for workload in &page.results.suite.workloads { (table(page, workload)) }
    }
}

fn table(page: &Page<'_>, workload: &Workload) -> Markup {
    let at = |run: &Run| page.placements.iter().position(|name| *name == run.cell.placement);
    let mut runs: Vec<&Run> =
        page.results.runs.iter().filter(|run| run.cell.workload == workload.name).collect();
    runs.sort_by_key(|run| (at(run), &run.cell, run.repeat));
    if runs.is_empty() {
        return html! {};
    }
    let slowed = runs.iter().any(|run| run.cell.slowed_by.is_some());
    let many = super::sizes::are_several(page);
    html! {
        details {
            summary { (workload.title) " (" code { (workload.name) } "): " (words::count(runs.len(), "run")) }
            div.scroll.low { table {
                thead { tr {
                    th { "placement" } @if many { th.n { "disks × OSDs" } } @if slowed { th.n { "slowed by" } } th.n { "depth" } th.n { "clients" } th.n { "repeat" } th.n { "cluster" }
                    th.n { "IOPS" } th.n { "mean" } th.n { "p50" } th.n { "p99" } th.n { "p99.9" } th { "run" } th { "counts" }
                } }
                tbody { @for run in &runs { (row(page, run, (many, slowed))) } }
            } }
        }
    }
}

fn row(page: &Page<'_>, run: &Run, (many, slowed): (bool, bool)) -> Markup {
    let figures = &run.figures;
    let kind = match Steadiness::of(run) {
        Steadiness::Sustained => "sustained",
        Steadiness::Varying => "varying",
        Steadiness::Absorbing { .. } => "absorbing",
        Steadiness::Unknown => "–",
    };
    let least = if run.lower_bound.is_some() { "≥ " } else { "" };
    html! {
        tr {
            td.name { (run.cell.placement) @if let Some(what) = run.cell.beside() { br; small { (what) } } } @if many { td.n { (run.cell.disks) " × " (run.cell.osds_per_disk) } }
            @if slowed { td.n { (run.cell.slowed_by.unwrap_or(page.results.suite.ground.slowed_by)) } }
            td.n { (run.cell.depth) } td.n { (run.cell.clients) } td.n { (run.repeat) } td.n { (run.testbed) }
            td.n { (least) (words::number(figures.iops)) } td.n { (words::latency(figures.mean_us)) } td.n { (words::known(figures.p50_us)) }
            td.n { (words::known(figures.p99_us)) } td.n { (words::known(figures.p999_us)) } td { (kind) }
            td { @if objections(run).is_empty() { "yes" } @else { "no" } }
        }
    }
}
