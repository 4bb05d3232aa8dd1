//! What placements cost in SSDs, and in money if a price is given.

use maud::{Markup, html};

use super::Page;
use super::curves::value;
use super::stack::{Kind, stack};
use crate::cost::{Cost, class, ssds};
use crate::results::Run;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Metric};
use crate::verdict::{reference, reference_runs};
use crate::words;

/// One row for each placement.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let results = page.results;
    let deciding = &results.suite.deciding;
    let Some(setting) = reference(results, deciding) else {
        return html! { p.dim { "Nothing was measured." } };
    };
    let of = |placement: &str| {
        let runs = reference_runs(results, placement, deciding);
        let summary = stats::summary(&runs);
        let (iops, ssds) = (summary.iops?.value, ssds(results, placement)?);
        let price = page.prices.of(class(results, placement)).filter(|_| ssds > 0);
        let money = price.map(|price| price * f64::from(ssds));
        Some((Cost { ssds, iops, money }, summary, span(&runs)))
    };
    let priced = !page.prices.is_empty();
    let row = |placement: &&str| {
        let (found, summary, span) = of(placement)?;
        // A lower bound of the requests per second is an upper bound of the cost of each request
        // per second.
        let bounded = |figure: Option<f64>, sign: &str| {
            let sign = if summary.lower_bound.is_some() { sign } else { "" };
            figure.map_or("–".into(), |figure| format!("{sign}{}", words::factor(figure)))
        };
        let mut texts = vec![
            placement.to_string(),
            found.ssds.to_string(),
            value(&summary, Metric::Iops),
            bounded(found.iops_per_ssd(), "≥ "),
            bounded(found.ssds_per_1000_iops(), "≤ "),
        ];
        if priced {
            texts.push(found.money.map_or("–".into(), words::number));
            texts.push(bounded(found.money_per_iops(), "≤ "));
        }
        texts.push(span);
        Some(texts.into_iter().map(|text| html! { (text) }).collect::<Vec<Markup>>())
    };
    let rows: Vec<Vec<Markup>> = page.placements.iter().filter_map(row).collect();
    let mut columns = vec![
        ("placement", Kind::Name),
        ("SSDs", Kind::Number),
        ("IOPS of the cluster", Kind::Number),
        ("IOPS per SSD", Kind::Number),
        ("SSDs per 1,000 IOPS", Kind::Number),
    ];
    if priced {
        columns.extend([("price of the SSDs", Kind::Number), ("price per IOPS", Kind::Number)]);
    }
    columns.push(("holds for", Kind::Text));
    let slowed = results.suite.ground.slowed_by > 1;
    html! {
        p { (deciding) " at queue depth " (setting.depth) " with " (words::count(setting.clients as usize, "client")) "." }
        (stack(&columns, &rows))
        p { small {
            "SSDs alone: disks, servers and memory are those of every placement."
            @if slowed { " Devices are slowed by " (results.suite.ground.slowed_by) ": compare rows, the figures themselves are those of no machine." }
            @if !priced { " No price was given (--ssd-price), so nothing is said of money." }
        } }
    }
}

/// Whether the runs of a placement show a speed that lasts, in words.
fn span(runs: &[&Run]) -> String {
    match runs.iter().map(|run| Steadiness::of(run)).reduce(Steadiness::and) {
        Some(Steadiness::Sustained) => "for good".into(),
        Some(Steadiness::Absorbing { absorbed_bytes, .. }) => {
            format!("bursts up to {}", words::bytes(absorbed_bytes))
        }
        Some(Steadiness::Varying | Steadiness::Unknown) | None => "not known".into(),
    }
}
