//! How the results were measured: fairness, statistics, machine, devices, commands.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::Page;
use crate::stats;
use crate::words;

/// What is the same for every placement.
pub(super) fn fairness(page: &Page<'_>) -> Markup {
    let results = page.results;
    let ground = &results.suite.ground;
    let delay = ground.delay_us.saturating_mul(ground.slowed_by);
    let others: Vec<&str> =
        page.placements.iter().copied().filter(|name| words::class(name).is_some()).collect();
    html! {
        ul {
            li {
                "The same SSD for every placement that has one: " code { (ground.ssd) } ", one of " (words::bytes(ground.ssd_bytes)) ". "
                @if !others.is_empty() { "Except " (words::list(&others)) ", which is there to show another SSD and is not ranked." }
            }
            li {
                "The same disks: " code { (ground.disk) } ", " (words::list(&ground.disks)) " of " (words::bytes(ground.disk_bytes)) ", "
                (words::list(&ground.osds_per_disk)) " OSD(s) on each."
            }
            li {
                "Copies of each object: " (ground.replicas) "."
                @if !ground.replicas_beside.is_empty() { " What is measured with " (words::list(&ground.replicas_beside)) " stands beside it." }
                " What a placement's acknowledged writes are safe from stands beside it, and only equals are ranked with each other."
            }
            li {
                "The same delay between client, OSDs and each other: " (ground.delay_us) " µs each way"
                @if ground.slowed_by > 1 { ", " (delay) " µs slowed as the devices are" }
                ". The same memory for each OSD's cache: " (words::bytes(ground.osd_cache_bytes)) "."
            }
            @if let Some(neighbours) = ground.neighbours { li { "Beside the clients: " (neighbours) ", whose requests are in no figure." } }
            @for workload in results.suite.workloads.iter().filter(|workload| !workload.access.is_librbd()) {
                li { (workload.name) ": hypervisors reach images by " (workload.access.what()) ", whatever is in front." }
            }
            @if ground.slowed_by > 1 {
                li {
                    "All devices are slower than their class by the same factor, " (ground.slowed_by) "."
                    @if let Some(factor) = ground.second_slowed_by { " What decides is measured with " (factor) " as well; what turns between them is not measurable here." }
                }
            }
            @if !ground.ceph_conf.is_empty() { li { "Lines of ceph.conf: " code { (ground.ceph_conf.join("; ")) } } }
            @if results.suite.images() > 0 { li { "Images are filled before anything is read, " (words::bytes(ground.image_bytes)) " each." } }
            @if super::bench::is_there(page) {
                li { "Objects that rados bench reads are written before by itself, with devices that answer at once; those of earlier writes are removed." }
            }
            li { "The order of measurements is random, from the seed " (results.seed) "." }
        }
        h3 { "Statistics" }
        p {
            "A cluster gives one observation, however often it was measured: the mean of the logarithms over its runs and loads. Placements that stood on the "
            "same clusters are compared on each of them, with Student's interval; others without pairs, with Welch's. Intervals are 95 %, those of the deciding "
            "workload over all looks together: the error is spent over the looks (Lan and DeMets, 1983) and each is read at its share. “The same” is a "
            "finding only when the whole interval is within " (format!("{:.0} %", stats::EQUIVALENCE * 100.0)) " of 1; what is neither more, nor less, nor the "
            "same is inconclusive. Percentiles are read from all requests of all repeats together and are never averaged. A placement whose writes are in memory "
            "only takes part in no comparison."
        }
        p {
            "A run is sustained if requests and dirty bytes of five equal windows are stationary by SNIA's test (range at most 20 % of the mean, least-squares line "
            "at most 10 %), and absorbing otherwise."
        }
        @if !results.suite.fresh_clusters {
            p { "The repeats of a placement shared one cluster, and count as one: placements on different clusters cannot be compared." }
        }
    }
}

/// The machine, the versions, the clusters and the devices.
pub(super) fn machine(page: &Page<'_>) -> Markup {
    let results = page.results;
    let machine = &results.machine;
    html! {
        ul {
            li { (machine.cpus) " × " (machine.cpu) ", " (words::bytes(machine.memory_bytes)) ", " (machine.system) ", " (machine.kernel) ", " (machine.filesystem) }
            li { (machine.versions.join("; ")) "; commit " code { (machine.commit) } }
            li {
                "Suite " code { (results.suite.name) } @if results.quick { " in its quick form" } ", begun " (results.begun)
                ", SHA-256 " code { (results.suite_sha256) }
            }
        }
        @if !results.devices.is_empty() {
            h3 { "Device classes, frozen before the first cluster came up" }
            div.scroll { table {
                thead { tr { th { "class" } th { "SHA-256" } th { "what it can do, not slowed" } } }
                tbody {
                    @for frozen in &results.devices {
                        tr {
                            td.name { (frozen.spec.name) } td { code { (frozen.sha256) } }
                            td { details { summary { "figures" } pre { (pretty(&frozen.spec)) } } }
                        }
                    }
                }
            } }
        }
        h3 { "Clusters" }
        @for bed in &results.testbeds {
            details {
                summary {
                    "Cluster " (bed.id) ": Ceph " (bed.ceph) ", " (words::count(bed.disks as usize, "disk")) ", "
                    (words::count(bed.osds_per_disk as usize, "OSD")) " on each; " @if let Some(copies) = bed.replicas { "copies: " (copies) "; " } (bed.network)
                }
                p { "What shows that placements were in place:" }
                @for (placement, proof) in &bed.proofs { h3 { (placement) } pre { (pretty(proof)) } }
            }
        }
    }
}

fn pretty(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// The commands that repeat the measurements.
pub(super) fn commands(page: &Page<'_>) -> Markup {
    let mut cells: BTreeMap<(usize, &crate::suite::Cell), Vec<&str>> = BTreeMap::new();
    for run in &page.results.runs {
        let at = page.placements.iter().position(|name| *name == run.cell.placement);
        let commands = cells.entry((at.unwrap_or(usize::MAX), &run.cell)).or_default();
        for command in &run.commands {
            if !commands.contains(&command.as_str()) {
                commands.push(command);
            }
        }
    }
    html! {
        p { "All of it:" }
        pre { (page.results.command) }
        p { "What made the load:" }
        @for ((_, cell), commands) in &cells {
            details {
                summary {
                    (cell.placement) ", " (cell.workload) ", depth " (cell.depth) ", " (words::count(cell.clients as usize, "client"))
                    ", " (cell.disks) " × " (cell.osds_per_disk) " OSDs"
                    @if let Some(what) = cell.beside() { ", " (what) }
                }
                @for command in commands { pre { (command) } }
            }
        }
    }
}
