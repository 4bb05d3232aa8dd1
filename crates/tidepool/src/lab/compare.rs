//! `tidepool lab compare`.

use crate::cli::lab::CompareArgs;
use crate::output;
use std::collections::BTreeSet;
use tidepool_daemon::failure::Failure;
use tidepool_lab::compare::{Comparison, compare};
use tidepool_lab::stats::{Finding, Summary};

/// Runs the command. A difference is no failure.
pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let first = super::results(&args.first)?;
    let second = super::results(&args.second)?;
    output::print(args.output.format, &compare(&first, &second), text)
}

fn text(comparison: &Comparison) -> String {
    let of = match &comparison.releases {
        Some(releases) => {
            let [first, second] = releases.each_ref().map(ceph);
            format!("of two releases of Ceph, {first} in A and {second} in B, and ")
        }
        None => String::new(),
    };
    let mut text = format!("The two are {of}{}.\n", comparison.agreement);
    if comparison.releases.is_some() {
        text.push_str("What differs below, or does not, may be the release's doing.\n");
    }
    if !comparison.same_suite {
        text.push_str("The suites are not the same; only what both measured is compared.\n");
    }
    for difference in &comparison.differences {
        text.push_str(&format!("  {difference}\n"));
    }
    text.push('\n');
    if comparison.cells.is_empty() {
        text.push_str("They have no cell in common.\n");
    } else {
        text.push_str(&table(comparison));
        text.push_str("\nB to A, intervals without pairs (Welch, on logarithms) that hold with 98 % for all cells together.\n");
    }
    for left_out in &comparison.left_out {
        text.push_str(&format!("Left out: {left_out}.\n"));
    }
    text
}

/// Releases of Ceph in words.
fn ceph(releases: &BTreeSet<u32>) -> String {
    let numbers: Vec<String> = releases.iter().map(u32::to_string).collect();
    if numbers.is_empty() { "an unknown one".into() } else { numbers.join(" and ") }
}

fn table(comparison: &Comparison) -> String {
    let columns = [
        "WORKLOAD",
        "PLACEMENT",
        "DISKS×OSDS",
        "CLIENTS",
        "DEPTH",
        "IOPS A",
        "IOPS B",
        "B/A",
        "FOUND",
        "MEAN B/A",
        "P99 B/A",
    ];
    let mut table = output::table(&columns, &[2, 3, 4, 5, 6]);
    let iops = |summary: &Summary| {
        summary.iops.map_or_else(|| "-".into(), |iops| format!("{:.0}", iops.value))
    };
    for row in &comparison.cells {
        let found = match row.iops.finding {
            Finding::More => "more",
            Finding::Less => "less",
            Finding::Same => "the same",
            Finding::Turns | Finding::Inconclusive => "no difference found",
        };
        table.add_row([
            row.cell.workload.clone(),
            row.cell.beside().map_or_else(
                || row.cell.placement.clone(),
                |what| format!("{}, {what}", row.cell.placement),
            ),
            format!("{}×{}", row.cell.disks, row.cell.osds_per_disk),
            row.cell.clients.to_string(),
            row.cell.depth.to_string(),
            iops(&row.first),
            iops(&row.second),
            row.iops.to_string(),
            found.into(),
            row.mean.to_string(),
            row.p99.known(),
        ]);
    }
    output::render(&table)
}
