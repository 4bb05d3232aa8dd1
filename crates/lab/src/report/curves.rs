//! Latency over throughput, or both by placement where there is one depth only.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use super::svg::{Look, Row, Scale, both, px, rows, x_axis, y_axis};
use crate::results::Run;
use crate::stats::{self, Bound, Estimate, Metric, Setting, Summary};
use crate::suite::Workload;
use crate::words;

/// A placement at one load.
struct Point<'a> {
    setting: &'a Setting,
    runs: Vec<&'a Run>,
    summary: Summary,
}

/// A placement over all loads.
struct Curve<'a> {
    placement: &'a str,
    look: Look,
    points: Vec<Point<'a>>,
}

/// The charts of a workload.
pub(super) fn workload(page: &Page<'_>, workload: &Workload) -> Markup {
    let settings = stats::settings(page.results, &workload.name);
    let clusters: BTreeSet<(u32, u32)> =
        settings.iter().map(|setting| (setting.disks, setting.osds_per_disk)).collect();
    let decides = workload.name == page.results.suite.deciding;
    html! {
        h3 { (workload.title) " (" code { (workload.name) } ")" @if decides { ", the workload that decides" } }
        @if settings.is_empty() {
            p.dim { "Nothing was measured." }
        }
        @for (disks, osds) in &clusters {
            @let here: Vec<&Setting> = settings.iter().filter(|s| (s.disks, s.osds_per_disk) == (*disks, *osds)).collect();
            @let curves = curves(page, &here);
            @if clusters.len() > 1 {
                p { (words::count(*disks as usize, "disk")) ", " (words::count(*osds as usize, "OSD")) " on each" }
            }
            @if curves.is_empty() {
                p.dim { "No run counts." }
            } @else if here.len() > 1 {
                div.grid.two {
                    (plane(&curves, Metric::Mean, decides))
                    (plane(&curves, Metric::P99, decides))
                }
                p { small {
                    "Points of a line: " (loads(&here)) ". Right and low is good. Large markers: all repeats, with the 95 % interval of the throughput; "
                    "small dots: each repeat."
                } }
            } @else {
                div.grid.two { (dots(&curves, Metric::Iops)) (dots(&curves, Metric::Mean)) }
                p { small {
                    "At " (loads(&here)) ". Throughput: right is good; latency: left is good. Markers and lines: means and their 95 % intervals; small dots: "
                    "each repeat; strokes: 99th percentile of all requests."
                } }
            }
        }
    }
}

fn curves<'a>(page: &'a Page<'_>, settings: &[&'a Setting]) -> Vec<Curve<'a>> {
    let curve = |&placement: &&'a str| {
        let point = |setting: &&'a Setting| {
            let runs = stats::runs(page.results, placement, setting);
            let summary = stats::summary(&runs);
            (summary.valid > 0).then_some(Point { setting, runs, summary })
        };
        let points: Vec<Point<'a>> = settings.iter().filter_map(point).collect();
        (!points.is_empty()).then(|| Curve { placement, look: page.look(placement), points })
    };
    page.placements.iter().filter_map(curve).collect()
}

/// Which loads there are, in words.
fn loads(settings: &[&Setting]) -> String {
    let axis = |of: fn(&Setting) -> u32| {
        settings.iter().map(|s| of(s)).collect::<BTreeSet<u32>>().into_iter().collect()
    };
    let (depths, clients): (Vec<u32>, Vec<u32>) = (axis(|s| s.depth), axis(|s| s.clients));
    let one = |values: &[u32]| if values == [1] { "client" } else { "clients" };
    format!("queue depth {} with {} {}", words::list(&depths), words::list(&clients), one(&clients))
}

impl Metric {
    /// The title of its axis; latencies are in milliseconds there.
    fn axis(self) -> &'static str {
        match self {
            Metric::Iops => "requests per second (logarithmic)",
            Metric::Mean => "mean latency, ms (logarithmic)",
            Metric::P99 => "99th percentile of latency, ms (logarithmic)",
        }
    }

    /// Its value in a summary, as it stands on an axis.
    fn drawn(self, summary: &Summary) -> Option<f64> {
        let value = |estimate: Option<Estimate>| estimate.map(|estimate| estimate.value);
        match self {
            Metric::Iops => value(summary.iops),
            Metric::Mean => value(summary.mean_us).map(|us| us / 1e3),
            Metric::P99 => summary.p99_us.map(|us| us / 1e3),
        }
    }
}

/// Latency over requests per second.
fn plane(curves: &[Curve<'_>], metric: Metric, large: bool) -> Markup {
    let draw = |width: f64| plane_of(curves, metric, width, if width > 500.0 { 330.0 } else { 280.0 });
    html! {
        figure.wide[large].narrow[!large] {
            @if large { (both(820.0, draw)) } @else { (draw(380.0)) }
        }
    }
}

fn plane_of(curves: &[Curve<'_>], metric: Metric, width: f64, height: f64) -> Markup {
    let (left, right, top, bottom) = (50.0, width - 24.0, 26.0, height - 40.0);
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let runs = || points().flat_map(|point| point.runs.iter().copied());
    let x = Scale::logarithmic(runs().filter_map(|run| Metric::Iops.of(run)), left, right);
    let latencies = runs().filter_map(|run| metric.of(run)).map(|us| us / 1e3);
    let y =
        Scale::logarithmic(latencies.chain(points().filter_map(|p| metric.drawn(&p.summary))), bottom, top);
    html! {
        svg viewBox={ "0 0 " (px(width)) " " (px(height)) } role="img" aria-label={ (metric.axis()) " over requests per second" } {
            (y_axis(&y, left, right, metric.axis()))
            (x_axis(&x, top, bottom, Metric::Iops.axis()))
            @for curve in curves { (line(curve, metric, &x, &y)) }
            @for curve in curves {
                @for point in &curve.points { (mark(curve, point, metric, &x, &y)) }
            }
        }
    }
}

fn line(curve: &Curve<'_>, metric: Metric, x: &Scale, y: &Scale) -> Markup {
    let place = |point: &Point<'_>| {
        let x = x.at(Metric::Iops.drawn(&point.summary)?)?;
        Some(format!("{},{}", px(x), px(y.at(metric.drawn(&point.summary)?)?)))
    };
    let places: Vec<String> = curve.points.iter().filter_map(place).collect();
    html! {
        @for run in curve.points.iter().flat_map(|point| &point.runs) {
            @if let Some((x, y)) = Metric::Iops.of(run).and_then(|v| x.at(v)).zip(metric.of(run).and_then(|us| y.at(us / 1e3))) {
                circle class={ "dot " (curve.look.colour()) } cx=(px(x)) cy=(px(y)) r="2" {}
            }
        }
        polyline class=(curve.look.line()) points=(places.join(" ")) {}
    }
}

fn mark(curve: &Curve<'_>, point: &Point<'_>, metric: Metric, x: &Scale, y: &Scale) -> Markup {
    let iops = point.summary.iops;
    let place = Metric::Iops.drawn(&point.summary).and_then(|v| x.at(v));
    let place = place.zip(metric.drawn(&point.summary).and_then(|v| y.at(v)));
    let interval = iops.and_then(|iops| iops.interval).and_then(|(low, high)| x.at(low).zip(x.at(high)));
    html! {
        @if let Some((x, y)) = place {
            g {
                title {
                    (curve.placement) ", depth " (point.setting.depth) ", " (words::count(point.setting.clients as usize, "client")) ": "
                    (value(&point.summary, Metric::Iops)) " requests per second, " (value(&point.summary, metric))
                }
                @if let Some((low, high)) = interval {
                    line class={ "span " (curve.look.colour()) } x1=(px(low)) x2=(px(high)) y1=(px(y)) y2=(px(y)) {}
                }
                (curve.look.marker(x, y, 4.5))
                (curve.look.arrow(bound(&point.summary), x, y))
            }
        }
    }
}

/// What the truth about a summary's throughput may be.
pub(super) fn bound(summary: &Summary) -> Bound {
    if summary.lower_bound.is_some() { Bound::AtLeast } else { Bound::Exact }
}

/// A figure in words, with what the truth may be.
pub(super) fn value(summary: &Summary, metric: Metric) -> String {
    let latency = |us: Option<f64>| us.map_or_else(|| "–".into(), words::latency);
    match (metric, summary.iops) {
        (Metric::Iops, None) => "–".into(),
        (Metric::Iops, Some(iops)) => {
            let most = if summary.lower_bound.is_some() { "≥ " } else { "" };
            format!("{most}{}", words::number(iops.value))
        }
        (Metric::Mean, _) => latency(summary.mean_us.map(|mean| mean.value)),
        (Metric::P99, _) => latency(summary.p99_us),
    }
}

/// A row for each placement: throughput, or mean latency with the 99th percentile as a stroke.
fn dots(curves: &[Curve<'_>], metric: Metric) -> Markup {
    let scaled = |us: f64| if metric == Metric::Iops { us } else { us / 1e3 };
    let row = |curve: &Curve<'_>| {
        let point = curve.points.first()?;
        let estimate = if metric == Metric::Iops { point.summary.iops } else { point.summary.mean_us };
        let stroke = if metric == Metric::Iops { None } else { Metric::P99.drawn(&point.summary) };
        let mean = value(&point.summary, metric);
        Some(Row {
            label: curve.placement.into(),
            value: if stroke.is_some() {
                format!("{mean}, p99 {}", value(&point.summary, Metric::P99))
            } else {
                mean
            },
            look: curve.look,
            dots: point.runs.iter().filter_map(|run| metric.of(run)).map(scaled).collect(),
            center: metric.drawn(&point.summary),
            interval: estimate.and_then(|e| e.interval).map(|(low, high)| (scaled(low), scaled(high))),
            stroke,
            bound: if metric == Metric::Iops { bound(&point.summary) } else { Bound::Exact },
        })
    };
    let all: Vec<Row> = curves.iter().filter_map(row).collect();
    html! {
        figure.narrow {
            (rows(380.0, metric.axis(), metric.axis(), &all, None))
        }
    }
}
