//! What the machine did while the deciding workload ran, second by second.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use super::svg::{Scale, px, series, tick, x_axis};
use crate::collect::{Class, Sample};
use crate::results::Run;
use crate::stats::Metric;
use crate::verdict::reference_runs;

/// Width of a card.
const WIDTH: f64 = 380.0;
/// Height of one strip with its title.
const HEIGHT: f64 = 84.0;

/// All kinds of processes with their titles, in the order of their colours.
const CLASSES: [(Class, &str); 10] = [
    (Class::Osd, "osd"),
    (Class::Client, "client"),
    (Class::Tidepool, "tidepool"),
    (Class::Mon, "mon"),
    (Class::Mgr, "mgr"),
    (Class::Lab, "lab (emulated devices)"),
    (Class::Other, "other"),
    (Class::Gateway, "iSCSI gateway"),
    (Class::Exporter, "initiators, NBD servers"),
    (Class::Guest, "guest (the OSDs in it)"),
];

/// A quantity, with one line for each of a few names.
struct Strip {
    title: &'static str,
    names: Vec<String>,
    /// Value of the quantity for a name in a sample; the second argument is the length of the
    /// sample in seconds.
    value: fn(&Sample, f64, &str) -> f64,
}

/// The kind of processes with this title.
fn class(name: &str) -> Option<Class> {
    CLASSES.iter().find(|(_, title)| *title == name).map(|(class, _)| *class)
}

fn strips(runs: &[(&str, &Run)]) -> Vec<Strip> {
    let samples = || runs.iter().flat_map(|(_, run)| &run.samples);
    let seen: BTreeSet<Class> =
        samples().flat_map(|sample| sample.classes.keys().copied()).collect();
    let classes = CLASSES.iter().filter(|(class, _)| seen.contains(class));
    let classes: Vec<String> = classes.map(|(_, title)| title.to_string()).collect();
    let network: BTreeSet<String> =
        samples().flat_map(|sample| sample.network.keys().cloned()).collect();
    let devices: BTreeSet<String> =
        samples().flat_map(|sample| sample.devices.keys().cloned()).collect();
    vec![
        Strip {
            title: "processor time, % of one processor",
            names: classes.clone(),
            value: |sample, _, name| {
                class(name)
                    .and_then(|class| sample.classes.get(&class))
                    .map_or(0.0, |usage| usage.cpu_percent)
            },
        },
        Strip {
            title: "memory, MiB",
            names: classes,
            value: |sample, _, name| {
                let usage = class(name).and_then(|class| sample.classes.get(&class));
                usage.map_or(0.0, |usage| usage.pss_bytes as f64 / 1_048_576.0)
            },
        },
        Strip {
            title: "network, in and out, MB/s",
            names: network.into_iter().collect(),
            value: |sample, _, name| {
                let carried = sample.network.get(name).copied().unwrap_or_default();
                (carried.received_bytes_per_s + carried.sent_bytes_per_s) / 1e6
            },
        },
        Strip {
            title: "devices, read and written, MB/s",
            names: devices.into_iter().collect(),
            value: |sample, seconds, name| {
                let counts = sample.devices.get(name).copied().unwrap_or_default();
                (counts.read_bytes as f64 + counts.written_bytes as f64) / 1e6 / seconds
            },
        },
        Strip {
            title: "machine, % of all processors",
            names: vec!["busy".into(), "waiting for a disk (iowait)".into()],
            value: |sample, _, name| {
                if name == "busy" { sample.busy_percent } else { sample.iowait_percent }
            },
        },
    ]
}

/// The run in the middle of a placement's repeats, by requests per second.
fn middle(mut runs: Vec<&Run>) -> Option<&Run> {
    runs.retain(|run| !run.samples.is_empty());
    runs.sort_by(|one, two| {
        let iops = |run: &Run| Metric::Iops.of(run).unwrap_or(0.0);
        iops(one).total_cmp(&iops(two)).then(one.repeat.cmp(&two.repeat))
    });
    runs.get(runs.len() / 2).copied()
}

/// A card with strips for each placement. All cards have the same scales.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let deciding = &page.results.suite.deciding;
    let runs: Vec<(&str, &Run)> = page
        .placements
        .iter()
        .filter_map(|placement| {
            Some((*placement, middle(reference_runs(page.results, placement, deciding))?))
        })
        .collect();
    if runs.is_empty() {
        return html! { p.dim { "There are no samples of it." } };
    }
    let strips = strips(&runs);
    html! {
        p { "One run of each placement: the one in the middle of its repeats" (super::on(page, deciding)) ". All cards have the same scales." }
        (keys(&strips))
        div.grid {
            @for (placement, run) in &runs {
                figure.narrow {
                    figcaption { strong { (placement) } ", repeat " (run.repeat) }
                    (card(&strips, &runs, placement, run))
                }
            }
        }
    }
}

/// The legend of the lines.
fn keys(strips: &[Strip]) -> Markup {
    // The strips of processor and memory have the same lines, so one legend stands for both.
    let shown =
        strips.iter().enumerate().filter(|(index, strip)| *index != 1 && !strip.names.is_empty());
    html! {
        @for (_, strip) in shown {
            ul.keys {
                li.dim { (strip.title.split(',').next().unwrap_or_default()) @if strip.title.starts_with("processor") { ", memory" } ":" }
                @for (index, name) in strip.names.iter().enumerate() {
                    li { svg viewBox="0 0 22 12" { line class=(series(index)) x1="1" x2="21" y1="6" y2="6" {} } (name) }
                }
            }
        }
    }
}

fn card(strips: &[Strip], all: &[(&str, &Run)], placement: &str, run: &Run) -> Markup {
    let seconds =
        all.iter().filter_map(|(_, run)| run.samples.last()).map(|s| s.at_ms as f64 / 1e3);
    let x = Scale::linear(seconds.fold(1.0, f64::max), 44.0, WIDTH - 14.0);
    let height = strips.len() as f64 * HEIGHT;
    html! {
        svg viewBox={ "0 0 " (px(WIDTH)) " " (px(height + 34.0)) } role="img" aria-label={ "resources over time, " (placement) } {
            @for (index, strip) in strips.iter().enumerate() {
                (self::strip(strip, all, run, &x, index as f64 * HEIGHT))
            }
            (x_axis(&x, height - 6.0, height, "seconds since the run began"))
        }
    }
}

/// The samples of a run, each with its length in seconds.
fn timed(run: &Run) -> impl Iterator<Item = (&Sample, f64)> {
    let begins = std::iter::once(0).chain(run.samples.iter().map(|sample| sample.at_ms));
    let timed =
        |(sample, begin): (&'_ Sample, u64)| sample.at_ms.saturating_sub(begin).max(1) as f64 / 1e3;
    run.samples.iter().zip(begins).map(move |both| (both.0, timed(both)))
}

fn strip(strip: &Strip, all: &[(&str, &Run)], run: &Run, x: &Scale, top: f64) -> Markup {
    let samples = all.iter().flat_map(|(_, run)| timed(run));
    let values = samples.flat_map(|(sample, seconds)| {
        strip.names.iter().map(move |name| (strip.value)(sample, seconds, name))
    });
    let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    let y = Scale::linear(most, top + HEIGHT - 8.0, top + 18.0);
    let line = |name: &String| -> String {
        let place = |(sample, seconds): (&Sample, f64)| {
            let place =
                x.at(sample.at_ms as f64 / 1e3).zip(y.at((strip.value)(sample, seconds, name)))?;
            Some(format!("{},{}", px(place.0), px(place.1)))
        };
        timed(run).filter_map(place).collect::<Vec<String>>().join(" ")
    };
    html! {
        text.t x="4" y=(px(top + 12.0)) { (strip.title) }
        @for value in [0.0, *y.ticks().last().unwrap_or(&most)] {
            @if let Some(y) = y.at(value) {
                line.axis x1="44" x2=(px(WIDTH - 14.0)) y1=(px(y)) y2=(px(y)) {}
                text.t x="40" y=(px(y + 4.0)) text-anchor="end" { (tick(value)) }
            }
        }
        @for (index, name) in strip.names.iter().enumerate() {
            polyline class=(series(index)) points=(line(name)) {}
        }
    }
}
