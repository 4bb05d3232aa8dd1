//! Where the time of a request goes, as bars, and the load of the devices.

use maud::{Markup, html};

use super::Page;
use super::svg::{Scale, fit, px, width, x_axis};
use crate::breakdown::{Breakdown, Hops, Part, Share, Side, combined};
use crate::verdict::{reference, reference_runs};
use crate::words;

/// Width of a chart.
const WIDTH: f64 = 380.0;
/// Height of a row: label, bar and bottleneck.
const HEIGHT: f64 = 58.0;

/// Bars for reads and for writes of the deciding workload, the same figures as a table, and the
/// devices.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let deciding = &page.results.suite.deciding;
    let Some(setting) = reference(page.results, deciding) else {
        return html! { p.dim { "Nothing was measured." } };
    };
    let all: Vec<(&str, Breakdown)> = page
        .placements
        .iter()
        .map(|placement| (*placement, combined(&reference_runs(page.results, placement, deciding))))
        .filter(|(_, found)| *found != Breakdown::default())
        .collect();
    let reads =
        all.iter().filter_map(|(name, found)| Some((*name, found.reads.as_ref()?))).collect();
    let writes =
        all.iter().filter_map(|(name, found)| Some((*name, found.writes.as_ref()?))).collect();
    let sides: [(Side, Vec<(&str, &Hops)>); 2] = [(Side::Read, reads), (Side::Write, writes)];
    html! {
        p {
            (deciding) " at queue depth " (setting.depth) (super::on(page, deciding)) ", means over all repeats. The client's mean is cut into what Ceph's and the devices' "
            "counters say; what no counter says is not accounted. Below each bar: the largest part that was counted, and what was not."
        }
        @if sides.iter().all(|(_, rows)| rows.is_empty()) {
            p.dim { "No counters were recorded." }
        } @else {
            (keys(&sides))
            div.grid.two {
                @for (side, rows) in &sides {
                    @if !rows.is_empty() { (chart(*side, rows)) }
                }
            }
            details { summary { "These bars as figures" } (table(&sides)) }
        }
        (devices(&all))
    }
}

/// The fill of a part, as a CSS declaration.
fn fill(part: Part) -> String {
    let index = Part::ALL.iter().position(|other| *other == part).unwrap_or(0);
    format!("fill:var(--h{index})")
}

fn keys(sides: &[(Side, Vec<(&str, &Hops)>)]) -> Markup {
    let shown = |part: &&Part| {
        let mut all =
            sides.iter().flat_map(|(_, rows)| rows.iter().flat_map(|(_, hops)| &hops.parts));
        all.any(|share| share.part == **part)
    };
    html! {
        ul.keys {
            @for part in Part::ALL.iter().filter(shown) {
                li { svg viewBox="0 0 22 12" { rect x="1" y="0" width="20" height="12" style=(fill(*part)) {} } (part.title()) }
            }
        }
    }
}

fn chart(side: Side, rows: &[(&str, &Hops)]) -> Markup {
    let bottom = rows.len() as f64 * HEIGHT;
    let x = Scale::linear(100.0, 6.0, WIDTH - 14.0);
    let title = format!("share of a {}'s mean time, %", side.title());
    html! {
        figure.narrow {
            figcaption { strong { (if side == Side::Read { "Reads" } else { "Writes" }) } }
            svg viewBox={ "0 0 " (px(WIDTH)) " " (px(bottom + 34.0)) } role="img" aria-label=(title) {
                (x_axis(&x, bottom - 4.0, bottom, &title))
                @for (index, (placement, hops)) in rows.iter().enumerate() {
                    (bar(side, placement, hops, &x, index as f64 * HEIGHT))
                }
            }
        }
    }
}

fn bar(side: Side, placement: &str, hops: &Hops, x: &Scale, top: f64) -> Markup {
    let total: f64 = hops.parts.iter().map(|share| share.mean_us).sum();
    let mean = words::latency(hops.mean_us);
    let part = |us: f64| x.at(us / total * 100.0).unwrap_or(0.0);
    let mut segments: Vec<(&Share, f64, f64)> = Vec::new();
    let mut before_us = 0.0;
    for share in &hops.parts {
        segments.push((share, part(before_us), part(before_us + share.mean_us)));
        before_us += share.mean_us;
    }
    html! {
        text x="6" y=(px(top + 12.0)) { (fit(placement, WIDTH - width(&mean) - 24.0)) }
        text x=(px(WIDTH - 14.0)) y=(px(top + 12.0)) text-anchor="end" { (mean) }
        @for (share, begin, end) in segments {
            g {
                title { (share.part.title()) ": " (words::latency(share.mean_us)) }
                rect.seg x=(px(begin)) width=(px(end - begin)) y=(px(top + 17.0)) height="20" style=(fill(share.part)) {}
                @if width(short(share.part)) + 6.0 < end - begin {
                    text.in x=(px((begin + end) / 2.0)) y=(px(top + 31.0)) text-anchor="middle" { (short(share.part)) }
                }
            }
        }
        @if let Some(bottleneck) = hops.bottleneck(side) {
            text.t x="6" y=(px(top + 49.0)) { "most: " (bottleneck.part.title()) ", " (percent(bottleneck.share)) "; not accounted: " (percent(hops.not_accounted())) }
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// The text inside a part of a bar.
fn short(part: Part) -> &'static str {
    let title = part.title();
    title.strip_prefix("store: ").unwrap_or(title)
}

fn table(sides: &[(Side, Vec<(&str, &Hops)>)]) -> Markup {
    let parts = |hops: &Hops| -> String {
        let of =
            |share: &Share| format!("{} {}", share.part.title(), words::latency(share.mean_us));
        hops.parts.iter().map(of).collect::<Vec<String>>().join(" · ")
    };
    html! {
        div.scroll { table {
            thead { tr { th { "placement" } th { "of a" } th.n { "mean" } th.n { "not accounted" } th { "parts" } } }
            tbody {
                @for (side, rows) in sides {
                    @for (placement, hops) in rows {
                        tr { td.name { (placement) } td { (side.title()) } td.n { (words::latency(hops.mean_us)) } td.n { (percent(hops.not_accounted())) } td.text { (parts(hops)) } }
                    }
                }
            }
        } }
    }
}

/// The load of the devices. More than one command in flight on a disk means that commands wait for
/// the disk's arm.
fn devices(all: &[(&str, Breakdown)]) -> Markup {
    if all.iter().all(|(_, found)| found.devices.is_empty()) {
        return html! {};
    }
    html! {
        details { summary { "Devices meanwhile" }
        div.scroll { table {
            thead { tr {
                th { "placement" } th { "device" } th.n { "commands per second" } th.n { "time of each" } th.n { "in flight, mean" } th.n { "cache hits" }
            } }
            tbody {
                @for (placement, found) in all {
                    @for (index, load) in found.devices.iter().enumerate() {
                        tr {
                            td.name { @if index == 0 { (placement) } }
                            td.name { (load.device) }
                            td.n { (load.commands_per_s.map_or("–".into(), words::number)) }
                            td.n { (words::latency(load.command_us)) }
                            td.n { (load.in_flight.map_or("–".into(), words::number)) }
                            td.n { @if index == 0 { @if let Some(hits) = found.hit_ratio { (format!("{:.1} %", hits * 100.0)) } } }
                        }
                    }
                }
            }
        } }
        p { small { "A disk with one command in flight or more all the time has no time left; an SSD takes several at once." } }
        }
    }
}
