//! Latency over throughput, or both by placement where there is one load only.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::svg::{Look, Row, Scale, both, px, rows, x_axis, y_axis};
use crate::results::Run;
use crate::stats::saturation::{self, Saturation};
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

impl Curve<'_> {
    fn saturation(&self) -> Saturation {
        let point = |point: &Point<'_>| {
            Some(saturation::Point {
                in_flight: in_flight(point.setting),
                iops: point.summary.iops?.value,
                mean_us: point.summary.mean_us?.value,
                is_limited: point.summary.lower_bound.is_some(),
            })
        };
        let points: Option<Vec<saturation::Point>> = self.points.iter().map(point).collect();
        points.map_or(Saturation::OnePoint, |points| Saturation::of(&points))
    }
}

/// Requests in flight of all clients together.
fn in_flight(setting: &Setting) -> u32 {
    setting.depth.saturating_mul(setting.clients)
}

/// The curves of the deciding workload, and those of the other workloads in parts that can be
/// opened.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let deciding = &page.results.suite.deciding;
    let (decides, others): (Vec<&Workload>, Vec<&Workload>) =
        page.results.suite.workloads.iter().partition(|found| found.name == *deciding);
    html! {
        (keys(page))
        @for found in decides { (workload(page, found)) }
        @for found in others.into_iter().filter(|found| !stats::settings(page.results, &found.name).is_empty()) {
            details { summary { (found.title) " (" code { (found.name) } ")" } (workload(page, found)) }
        }
    }
}

/// The marker of each placement.
fn keys(page: &Page<'_>) -> Markup {
    let measured =
        |placement: &&&str| page.results.runs.iter().any(|run| run.cell.placement == ***placement);
    html! {
        ul.keys {
            @for placement in page.placements.iter().filter(measured) {
                li { svg viewBox="0 0 22 12" { (page.look(placement).marker(11.0, 6.0, 4.0)) } (placement) }
            }
        }
    }
}

/// The charts of a workload.
fn workload(page: &Page<'_>, workload: &Workload) -> Markup {
    let settings = stats::settings(page.results, &workload.name);
    let clusters: BTreeSet<(u32, u32)> =
        settings.iter().map(|setting| (setting.disks, setting.osds_per_disk)).collect();
    let decides = workload.name == page.results.suite.deciding;
    html! {
        @if decides { h3 { (workload.title) " (" code { (workload.name) } "), the workload that decides" } }
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
                    @if tells(&curves, Metric::P99) { (plane(&curves, Metric::P99, decides)) }
                }
                @if !tells(&curves, Metric::P99) { p.dim { "99th percentile: not known." } }
                p { small {
                    "Points of a line: " (loads(&here)) ". Right and low is good. Large markers: all repeats, with the 95 % interval of the throughput; "
                    "small dots: each repeat. A ring: saturated from here on."
                } }
                (saturations(&curves))
            } @else {
                div.grid.two { (dots(&curves, Metric::Iops)) (dots(&curves, Metric::Mean)) }
                p { small {
                    "At " (loads(&here)) ". Throughput: right is good; latency: left is good. Markers and lines: means and their 95 % intervals; small dots: "
                    "each repeat; strokes: 99th percentile of all requests."
                } }
                p { "Saturation: one point measured." }
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
        let mut points: Vec<Point<'a>> = settings.iter().filter_map(point).collect();
        points.sort_by_key(|point| in_flight(point.setting));
        (!points.is_empty()).then(|| Curve { placement, look: page.look(placement), points })
    };
    page.placements.iter().filter_map(curve).collect()
}

/// Any point has this figure. Not every load generator reports percentiles.
fn tells(curves: &[Curve<'_>], metric: Metric) -> bool {
    curves
        .iter()
        .flat_map(|curve| &curve.points)
        .any(|point| metric.drawn(&point.summary).is_some())
}

/// Where each placement is saturated, in words.
fn saturations(curves: &[Curve<'_>]) -> Markup {
    let told = |curve: &Curve<'_>| -> (String, Option<usize>) {
        let last = curve.points.len().checked_sub(1);
        match curve.saturation() {
            Saturation::OnePoint => ("one point measured".into(), last),
            Saturation::NotReached => ("not reached".into(), last),
            Saturation::At(index) => (loads(&[curve.points[index].setting]), Some(index)),
            Saturation::Limited(_) => {
                ("not known: the client or the machine was the limit".into(), last)
            }
        }
    };
    let row = |curve: &Curve<'_>| {
        let (words, index) = told(curve);
        let point = index.and_then(|index| curve.points.get(index));
        let figure = |metric| point.map_or("–".into(), |point| value(&point.summary, metric));
        let figures = [Metric::Iops, Metric::Mean, Metric::P99].map(figure);
        let texts = [curve.placement.to_string(), words].into_iter().chain(figures);
        texts.map(|text| html! { (text) }).collect::<Vec<Markup>>()
    };
    let rows: Vec<Vec<Markup>> = curves.iter().map(row).collect();
    let columns = [
        ("placement", Kind::Name),
        ("saturated from", Kind::Text),
        ("requests per second there", Kind::Number),
        ("mean", Kind::Number),
        ("p99", Kind::Number),
    ];
    html! {
        p {
            "Saturation: from that load on requests per second grow by less than " (format!("{:.0} %", stats::EQUIVALENCE * 100.0))
            ", and more load only makes requests wait longer. Where there is none, the figures are those of the last point."
        }
        (stack(&columns, &rows))
    }
}

/// The loads, in words.
fn loads(settings: &[&Setting]) -> String {
    let axis = |of: fn(&Setting) -> u32| {
        settings.iter().map(|s| of(s)).collect::<BTreeSet<u32>>().into_iter().collect()
    };
    let (depths, clients): (Vec<u32>, Vec<u32>) = (axis(|s| s.depth), axis(|s| s.clients));
    let one = |values: &[u32]| if values == [1] { "client" } else { "clients" };
    format!("queue depth {} with {} {}", words::list(&depths), words::list(&clients), one(&clients))
}

impl Metric {
    /// Title of the metric's axis. Latencies are in milliseconds on an axis.
    fn axis(self) -> &'static str {
        match self {
            Metric::Iops => "requests per second (logarithmic)",
            Metric::Mean => "mean latency, ms (logarithmic)",
            Metric::P99 => "99th percentile of latency, ms (logarithmic)",
        }
    }

    /// Value of the metric in a summary, in the unit of its axis.
    fn drawn(self, summary: &Summary) -> Option<f64> {
        let value = |estimate: Option<Estimate>| estimate.map(|estimate| estimate.value);
        match self {
            Metric::Iops => value(summary.iops),
            Metric::Mean => value(summary.mean_us).map(|us| us / 1e3),
            Metric::P99 => summary.p99_us.map(|us| us / 1e3),
        }
    }
}

/// Charts of latency over requests per second.
fn plane(curves: &[Curve<'_>], metric: Metric, large: bool) -> Markup {
    let draw =
        |width: f64| plane_of(curves, metric, width, if width > 500.0 { 330.0 } else { 280.0 });
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
    let y = Scale::logarithmic(
        latencies.chain(points().filter_map(|p| metric.drawn(&p.summary))),
        bottom,
        top,
    );
    html! {
        svg viewBox={ "0 0 " (px(width)) " " (px(height)) } role="img" aria-label={ (metric.axis()) " over requests per second" } {
            (y_axis(&y, left, right, metric.axis()))
            (x_axis(&x, top, bottom, Metric::Iops.axis()))
            @for curve in curves { (line(curve, metric, &x, &y)) }
            @for curve in curves {
                @if let Saturation::At(index) = curve.saturation() { (ring(curve, &curve.points[index], metric, &x, &y)) }
                @for point in &curve.points { (mark(curve, point, metric, &x, &y)) }
            }
        }
    }
}

fn line(curve: &Curve<'_>, metric: Metric, x: &Scale, y: &Scale) -> Markup {
    let places = curve.points.iter().filter_map(|point| place(point, metric, x, y));
    let places: Vec<String> = places.map(|(x, y)| format!("{},{}", px(x), px(y))).collect();
    html! {
        @for run in curve.points.iter().flat_map(|point| &point.runs) {
            @if let Some((x, y)) = Metric::Iops.of(run).and_then(|v| x.at(v)).zip(metric.of(run).and_then(|us| y.at(us / 1e3))) {
                circle class={ "dot " (curve.look.colour()) } cx=(px(x)) cy=(px(y)) r="2" {}
            }
        }
        polyline class=(curve.look.line()) points=(places.join(" ")) {}
    }
}

/// Position of a point in a chart.
fn place(point: &Point<'_>, metric: Metric, x: &Scale, y: &Scale) -> Option<(f64, f64)> {
    let x = x.at(Metric::Iops.drawn(&point.summary)?)?;
    Some((x, y.at(metric.drawn(&point.summary)?)?))
}

/// The ring that marks saturation.
fn ring(curve: &Curve<'_>, point: &Point<'_>, metric: Metric, x: &Scale, y: &Scale) -> Markup {
    html! {
        @if let Some((x, y)) = place(point, metric, x, y) {
            circle class={ "ring " (curve.look.colour()) } cx=(px(x)) cy=(px(y)) r="9.5" {}
        }
    }
}

fn mark(curve: &Curve<'_>, point: &Point<'_>, metric: Metric, x: &Scale, y: &Scale) -> Markup {
    let iops = point.summary.iops;
    let place = place(point, metric, x, y);
    let interval =
        iops.and_then(|iops| iops.interval).and_then(|(low, high)| x.at(low).zip(x.at(high)));
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

/// Where the true throughput of a summary may lie.
pub(super) fn bound(summary: &Summary) -> Bound {
    if summary.lower_bound.is_some() { Bound::AtLeast } else { Bound::Exact }
}

/// A figure in words, with `≥` before a lower bound of the throughput.
pub(super) fn value(summary: &Summary, metric: Metric) -> String {
    let latency = |us: Option<f64>| us.map_or_else(|| "–".into(), words::latency);
    match (metric, summary.iops) {
        (Metric::Iops, None) => "–".into(),
        (Metric::Iops, Some(iops)) => {
            let most = if summary.lower_bound.is_some() { "≥ " } else { "" };
            format!("{most}{}", words::number(iops.value))
        }
        (Metric::Mean, _) => latency(summary.mean_us.map(|mean| mean.value)),
        (Metric::P99, _) => words::known(summary.p99_us),
    }
}

/// The dots of every repeat at one load.
pub(super) fn repeats(page: &Page<'_>, setting: &Setting) -> Markup {
    let curves = curves(page, &[setting]);
    html! { div.grid.two { (dots(&curves, Metric::Iops)) (dots(&curves, Metric::Mean)) } }
}

/// A chart with a row for each placement: throughput, or mean latency with the 99th percentile as a
/// stroke.
fn dots(curves: &[Curve<'_>], metric: Metric) -> Markup {
    let scaled = |us: f64| if metric == Metric::Iops { us } else { us / 1e3 };
    let row = |curve: &Curve<'_>| {
        let point = curve.points.first()?;
        let estimate =
            if metric == Metric::Iops { point.summary.iops } else { point.summary.mean_us };
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
            interval: estimate
                .and_then(|e| e.interval)
                .map(|(low, high)| (scaled(low), scaled(high))),
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
