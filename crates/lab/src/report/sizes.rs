//! Which cluster sizes were measured, which were not and why, and the gain of more OSDs.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use crate::results::Run;
use crate::stats::objections;
use crate::suite::ClusterSize;
use crate::words;

/// Cluster sizes that were measured, and cluster sizes that are listed as not measured, in
/// ascending order of their OSDs.
fn sizes(page: &Page<'_>) -> Vec<ClusterSize> {
    let results = page.results;
    let ran = results.runs.iter().map(size);
    let not_run = results.not_run_sizes.iter().map(|found| found.size);
    let all: BTreeSet<(u32, ClusterSize)> =
        ran.chain(not_run).map(|size| (size.osds(), size)).collect();
    all.into_iter().map(|(_, size)| size).collect()
}

fn size(run: &Run) -> ClusterSize {
    ClusterSize { disks: run.cell.disks, osds_per_disk: run.cell.osds_per_disk }
}

/// The page is about more than one cluster size.
pub(super) fn are_several(page: &Page<'_>) -> bool {
    sizes(page).len() > 1
}

/// One row for each size.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let results = page.results;
    let columns = [
        ("cluster", Kind::Name),
        ("OSDs", Kind::Number),
        ("clusters", Kind::Number),
        ("runs", Kind::Number),
        ("of them do not count", Kind::Number),
        ("requests per second", Kind::Number),
        ("to those of the smallest", Kind::Number),
        ("not measured, as", Kind::Text),
    ];
    let row = |of: &ClusterSize| {
        let runs: Vec<&Run> = results.runs.iter().filter(|run| size(run) == *of).collect();
        let beds: BTreeSet<u32> = runs.iter().map(|run| run.testbed).collect();
        let bad = runs.iter().filter(|run| !objections(run).is_empty()).count();
        let why = results
            .not_run_sizes
            .iter()
            .find(|found| found.size == *of)
            .map(|found| found.why.clone());
        let mut points = page.verdict.standings.sizes.iter().flat_map(|sizes| &sizes.points);
        let point = points.find(|point| point.size == *of);
        let over = point.and_then(|point| point.over_smallest.as_ref());
        vec![
            html! { (of) },
            html! { (of.osds()) },
            html! { (beds.len()) },
            html! { (runs.len()) },
            html! { (bad) },
            html! { (point.map_or_else(|| "–".into(), |point| words::number(point.iops))) },
            html! { (over.map_or_else(|| "–".into(), ToString::to_string)) },
            html! { (why.unwrap_or_default()) },
        ]
    };
    let rows: Vec<Vec<Markup>> = sizes(page).iter().map(row).collect();
    html! {
        @if let Some(why) = page.verdict.standings.sizes.as_ref().and_then(|sizes| sizes.hindrance.as_ref()) {
            p.caveat { "How OSDs scale is not measurable here: " (why) "." }
        }
        p { "Figures are those of " (results.suite.deciding) ", means over its loads. Each cell of a size stands below, in \"Every cell\"." }
        (stack(&columns, &rows))
    }
}
