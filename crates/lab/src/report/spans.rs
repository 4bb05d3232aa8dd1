//! What holds for bursts, and apart from this what holds for good: the winner's figures, every
//! placement against the baseline, and two tables.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::svg::{Row, both, rows};
use super::tables::finding;
use crate::results::{Results, Run};
use crate::stats::steady::Steadiness;
use crate::stats::{self, Metric, Ratio, objections};
use crate::verdict::{self, Lasting, Place, Ranking};
use crate::words;

/// The whole section.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let decides = page.verdict.standings.rankings.iter().find(|ranking| ranking.places.len() > 1);
    html! {
        @if let Some(ranking) = decides { (both_spans(ranking, &page.verdict.standings.lasting)) (forest(page, ranking)) }
        h3 { "For good: sustained runs" }
        (sustained(page))
        h3 { "For bursts: absorbing runs" }
        (absorbing(page))
    }
}

/// The winner's figures in bursts, and beside them the figures that last.
fn both_spans(ranking: &Ranking, lasting: &Lasting) -> Markup {
    let names: Vec<&str> = match (ranking.places.first(), &ranking.lead) {
        (Some(first), Some(lead)) => vec![&first.placement, &lead.against],
        _ => return html! {},
    };
    match lasting.steadiness(&names) {
        Steadiness::Sustained => tiles(ranking, "For bursts and for good: "),
        Steadiness::Varying | Steadiness::Unknown => {
            tiles(ranking, "In a measurement, of which nobody knows whether it lasts: ")
        }
        Steadiness::Absorbing { absorbed_bytes, .. } => html! {
            (tiles(ranking, &format!("For bursts up to {}: ", words::bytes(absorbed_bytes))))
            @match lasting.ranking(ranking.durability).filter(|found| found.lead.is_some()) {
                Some(found) => { (tiles(found, "For good: ")) }
                None => { p { "For good: no two placements had sustained runs." } }
            }
        },
    }
}

/// The winner's figures against the second best.
fn tiles(ranking: &Ranking, span: &str) -> Markup {
    let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) else {
        return html! {};
    };
    let tile = |what: &str, ratio: &Ratio| {
        let value = ratio.ratio.map_or("not known".into(), |found| {
            format!("{}{} ×", ratio.bound.words(), words::factor(found.value))
        });
        let interval = ratio.ratio.and_then(|found| found.interval);
        html! {
            div.tile {
                b { (value) } (what) br;
                small {
                    @match interval {
                        Some((low, high)) => { "95 %: " (words::factor(low)) " to " (words::factor(high)) }
                        None => { "no interval" }
                    }
                }
            }
        }
    };
    html! {
        p { (span) strong { (first.placement) } " against the second best, " strong { (lead.against) } ":" }
        div.tiles {
            (tile("the requests per second", &lead.iops))
            (tile("the mean latency", &lead.mean))
            (tile("the 99th percentile of latency", &lead.p99))
        }
    }
}

/// Ratio of each placement's requests per second to those of the baseline, including placements
/// that are not ranked.
fn forest(page: &Page<'_>, ranking: &Ranking) -> Markup {
    let results = page.results;
    let baseline = &results.suite.baseline;
    let ranked = ranking.places.iter().map(|Place { placement, .. }| placement.as_str());
    let others = page
        .placements
        .iter()
        .copied()
        .filter(|name| !ranking.places.iter().any(|p| p.placement == *name));
    let names: Vec<&str> = ranked.chain(others).collect();
    let row = |name: &&str| {
        let ratio = (*name != baseline.as_str()).then(|| {
            stats::paired(results, name, baseline, &ranking.settings, stats::Metric::Iops)
        });
        let (value, found, bound) = match &ratio {
            None => ("1 (the baseline)".to_string(), None, stats::Bound::Exact),
            Some(ratio) => (ratio.to_string(), Some(ratio.ratio?), ratio.bound),
        };
        let ranks =
            |ranking: &&Ranking| ranking.places.iter().any(|place| place.placement == *name);
        let class =
            page.verdict.standings.rankings.iter().find(ranks).map(|ranking| ranking.durability);
        Some(Row {
            label: match class {
                Some(class) if class == ranking.durability => name.to_string(),
                Some(class) => format!("{name} ({})", words::copies(class)),
                None => format!("{name} (not ranked)"),
            },
            value,
            look: page.look(name),
            dots: Vec::new(),
            center: Some(found.map_or(1.0, |found| found.value)),
            interval: found.and_then(|found| found.interval),
            stroke: None,
            bound,
        })
    };
    let all: Vec<Row> = names.iter().filter_map(row).collect();
    let axis = "requests per second, times the baseline's (logarithmic)";
    let band = (1.0 / (1.0 + stats::EQUIVALENCE), 1.0 + stats::EQUIVALENCE);
    html! {
        figure {
            (both(820.0, |width| rows(width, axis, axis, &all, Some(band))))
            figcaption {
                "All runs, bursts or not, against " (baseline) " over all loads of the deciding workload; lines are 95 % intervals. In the grey band a "
                "difference counts as none. An arrow: the truth may be further in its direction."
            }
        }
    }
}

/// The runs of one placement in the deciding workload that count.
fn deciding<'a>(results: &'a Results, placement: &str) -> Vec<&'a Run> {
    let of = |run: &&Run| {
        run.cell.placement == placement
            && run.cell.workload == results.suite.deciding
            && objections(run).is_empty()
    };
    results.runs.iter().filter(of).collect()
}

/// Requests per second, their ratio to the baseline's, and the finding of the ratio.
fn figures(results: &Results, placement: &str) -> [Markup; 3] {
    let settings = stats::settings(results, &results.suite.deciding);
    let baseline = &results.suite.baseline;
    if placement == baseline {
        let iops = |setting| stats::summary(&stats::runs(results, placement, setting)).iops;
        let logs: Vec<f64> = settings.iter().filter_map(iops).map(|iops| iops.value.ln()).collect();
        let mean = (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp());
        return [
            html! { (mean.map_or("–".into(), words::number)) },
            html! { "1" },
            html! { "the baseline" },
        ];
    }
    let ratio = stats::paired(results, placement, baseline, &settings, Metric::Iops);
    [
        html! { (ratio.first.map_or("–".into(), words::number)) },
        html! { (ratio) },
        html! { (finding(ratio.finding)) },
    ]
}

fn sustained(page: &Page<'_>) -> Markup {
    let Some(results) = verdict::sustained(page.results) else {
        return html! { p.dim { "The results lack the five windows that show whether a run lasts." } };
    };
    let row = |placement: &&str| {
        let (lasting, all) =
            (deciding(&results, placement).len(), deciding(page.results, placement).len());
        let figures = if lasting > 0 {
            figures(&results, placement)
        } else {
            ["–", "–", "not measured"].map(|text| html! { (text) })
        };
        let first = [html! { (placement) }, html! { (lasting) " of " (all) }];
        (all > 0).then(|| first.into_iter().chain(figures).collect::<Vec<Markup>>())
    };
    let rows: Vec<Vec<Markup>> = page.placements.iter().filter_map(row).collect();
    let columns = [
        ("placement", Kind::Name),
        ("sustained runs", Kind::Number),
        ("requests per second", Kind::Number),
        ("to the baseline", Kind::Number),
        ("finding", Kind::Text),
    ];
    html! {
        (stack(&columns, &rows))
        p { small { "Requests and dirty bytes were stationary: this goes on like that." } }
    }
}

fn absorbing(page: &Page<'_>) -> Markup {
    let results = verdict::bursts(page.results);
    let gib = |bytes: u64| words::factor(bytes as f64 / (1u64 << 30) as f64);
    let row = |placement: &&str| {
        let runs = deciding(&results, placement);
        let held = runs.iter().map(|run| Steadiness::of(run)).reduce(Steadiness::and)?;
        let Steadiness::Absorbing { absorbed_bytes, left_bytes } = held else { return None };
        let first = [
            html! { (placement) },
            html! { (runs.len()) " of " (deciding(page.results, placement).len()) },
            html! { (gib(absorbed_bytes)) },
            html! { (gib(left_bytes)) },
        ];
        Some(first.into_iter().chain(figures(&results, placement)).collect::<Vec<Markup>>())
    };
    let rows: Vec<Vec<Markup>> = page.placements.iter().filter_map(row).collect();
    let columns = [
        ("placement", Kind::Name),
        ("absorbing runs", Kind::Number),
        ("absorbed, GiB", Kind::Number),
        ("remained, GiB", Kind::Number),
        ("requests per second", Kind::Number),
        ("to the baseline", Kind::Number),
        ("finding", Kind::Text),
    ];
    html! {
        @if rows.is_empty() {
            p.dim { "No run of the deciding workload is known to be absorbing." }
        } @else {
            (stack(&columns, &rows))
            p { small {
                "Absorbed: what clients wrote in the run that took least; a burst of that size goes at this pace. Remained: what was still to be written back "
                "after the worst of them. Nothing here lasts."
            } }
        }
    }
}
