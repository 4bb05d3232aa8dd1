//! Mean use of processors, memory and network, for each cell.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::Page;
use crate::collect::{Means, Parts};
use crate::stats::{self, Setting, objections};
use crate::suite::Workload;
use crate::words;

/// One table for each workload.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let tables: Vec<Markup> =
        page.results.suite.workloads.iter().filter_map(|workload| table(page, workload)).collect();
    html! {
        @if tables.is_empty() {
            p.dim { "Nothing was recorded." }
        } @else {
            p {
                "Means over the whole window of each run, and of the runs that count. Processors are in percent of all, also those of OSDs and "
                "monitor. Memory is in percent of the machine's; that of processes is the proportional set size, so that what they share is in no sum twice. "
                "Network is what each node has sent and received, in Mbit/s."
            }
            @for table in &tables { (table) }
        }
    }
}

/// Mean use by the runs of a placement in a setting that count.
fn means(page: &Page<'_>, placement: &str, setting: &Setting) -> Option<Means> {
    let runs = stats::runs(page.results, placement, setting);
    let counted = runs.into_iter().filter(|run| objections(run).is_empty());
    let means: Vec<Means> =
        counted.filter_map(|run| Means::of(&run.samples, &page.results.machine)).collect();
    Means::joined(&means)
}

/// The table of a workload. None where nothing was recorded.
fn table(page: &Page<'_>, workload: &Workload) -> Option<Markup> {
    let settings = stats::settings(page.results, &workload.name);
    let row = |setting: &Setting| {
        let found = page
            .placements
            .iter()
            .filter_map(|placement| Some((*placement, means(page, placement, setting)?)));
        found.map(|(placement, means)| (setting.clone(), placement, means)).collect::<Vec<_>>()
    };
    let rows: Vec<(Setting, &str, Means)> = settings.iter().flat_map(row).collect();
    let nodes: BTreeSet<&String> =
        rows.iter().flat_map(|(.., means)| means.network.keys()).collect();
    (!rows.is_empty()).then(|| {
        html! {
            details {
                summary { (workload.title) " (" code { (workload.name) } ")" }
                div.scroll { table {
                    thead {
                        tr {
                            th { "placement" } th.n { "disks × OSDs" } th.n { "depth" } th.n { "clients" }
                            th.n { "CPU, %" } th.n { "ceph-mon" } th.n { "ceph-osd" }
                            th.n { "memory, %" } th.n { "ceph-mon" } th.n { "ceph-osd" }
                            @for node in &nodes { th.n { (node) " sent" } th.n { "received" } th.n { "both" } }
                        }
                    }
                    tbody {
                        @for (setting, placement, means) in &rows {
                            tr {
                                td.name { (placement) } td.n { (setting.disks) " × " (setting.osds_per_disk) }
                                td.n { (setting.depth) } td.n { (setting.clients) }
                                (parts(Some(means.cpu))) (parts(means.memory))
                                @for node in &nodes { (flow(means, node)) }
                            }
                        }
                    }
                } }
            }
        }
    })
}

fn parts(parts: Option<Parts>) -> Markup {
    let shown =
        |of: fn(Parts) -> f64| parts.map_or_else(|| "–".into(), |parts| words::number(of(parts)));
    html! {
        td.n { (shown(|parts| parts.total_percent)) } td.n { (shown(|parts| parts.mon_percent)) } td.n { (shown(|parts| parts.osd_percent)) }
    }
}

fn flow(means: &Means, node: &str) -> Markup {
    let flow = means.network.get(node).copied().unwrap_or_default();
    let mbit = |bits: f64| words::number(bits / 1e6);
    html! {
        td.n { (mbit(flow.sent_bits_per_s)) } td.n { (mbit(flow.received_bits_per_s)) } td.n { (mbit(flow.total_bits_per_s())) }
    }
}
