//! What placements cost in SSDs, and in money if somebody says what an SSD costs.

use maud::{Markup, html};

use super::Page;
use super::curves::value;
use crate::cost::{Cost, class, ssds};
use crate::results::Run;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Metric, Summary};
use crate::verdict::{reference, reference_runs};
use crate::words;

/// A row for each placement.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let results = page.results;
    let deciding = &results.suite.deciding;
    let Some(setting) = reference(results, deciding) else {
        return html! { p.dim { "Nothing was measured." } };
    };
    let of = |placement: &&'_ str| {
        let runs = reference_runs(results, placement, deciding);
        let summary = stats::summary(&runs);
        let (iops, ssds) = (summary.iops?.value, ssds(results, placement)?);
        let money = page.prices.of(class(results, placement)).map(|price| price * f64::from(ssds));
        Some((Cost { ssds, iops, money }, summary, span(&runs)))
    };
    let rows: Vec<(&str, (Cost, Summary, String))> =
        page.placements.iter().filter_map(|placement| Some((*placement, of(placement)?))).collect();
    let (priced, slowed) = (!page.prices.is_empty(), results.suite.ground.slowed_by > 1);
    // What is a lower bound of requests is an upper bound of what each of them costs.
    let cost = |figure: Option<f64>, summary: &Summary, sign: &str| {
        let sign = if summary.lower_bound.is_some() { sign } else { "" };
        figure.map_or("–".into(), |figure| format!("{sign}{}", words::factor(figure)))
    };
    html! {
        p { (deciding) " at queue depth " (setting.depth) " with " (words::count(setting.clients as usize, "client")) "." }
        div.scroll { table {
            thead { tr {
                th { "placement" } th.n { "SSDs" } th.n { "requests per second, cluster" } th.n { "per SSD" } th.n { "SSDs per 1,000 IOPS" }
                @if priced { th.n { "price of the SSDs" } th.n { "per IOPS" } }
                th { "for" }
            } }
            tbody {
                @for (placement, (found, summary, span)) in &rows {
                    tr {
                        td.name { (placement) } td.n { (found.ssds) } td.n { (value(summary, Metric::Iops)) }
                        td.n { (cost(found.iops_per_ssd(), summary, "≥ ")) } td.n { (cost(found.ssds_per_1000_iops(), summary, "≤ ")) }
                        @if priced { td.n { (found.money.map_or("–".into(), words::number)) } td.n { (cost(found.money_per_iops(), summary, "≤ ")) } }
                        td.name { (span) }
                    }
                }
            }
        } }
        p { small {
            "SSDs alone: disks, servers and memory are those of every placement."
            @if slowed { " Devices are slowed by " (results.suite.ground.slowed_by) ": compare rows, the figures themselves are those of no machine." }
            @if !priced { " No price was given (--ssd-price), so nothing is said of money." }
        } }
    }
}

/// Whether the runs of a placement show what lasts.
fn span(runs: &[&Run]) -> String {
    match runs.iter().map(|run| Steadiness::of(run)).reduce(Steadiness::and) {
        Some(Steadiness::Sustained) => "good".into(),
        Some(Steadiness::Absorbing { absorbed_bytes, .. }) => {
            format!("bursts up to {}", words::bytes(absorbed_bytes))
        }
        Some(Steadiness::Unknown) | None => "not known".into(),
    }
}
