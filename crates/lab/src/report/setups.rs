//! Set-ups that were published side by side, and the placement that stands for each of them here.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use crate::results::Run;
use crate::stats::{self, objections};
use crate::suite::Setup;
use crate::words;
use tidepool_cluster::fio::Figures;

/// One row for each set-up.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let suite = &page.results.suite;
    let columns = [
        ("set-up", Kind::Name),
        ("published", Kind::Text),
        ("stands for it here", Kind::Name),
        ("read", Kind::Number),
        ("written", Kind::Number),
        ("a write is safe", Kind::Text),
        ("not measured, as", Kind::Text),
    ];
    let row = |setup: &Setup| {
        let workload = setup.workload.as_ref().unwrap_or(&suite.deciding);
        let runs =
            setup.placement.as_ref().map(|name| counted(page, name, workload)).unwrap_or_default();
        let access = suite
            .workload(workload)
            .map(|workload| workload.access)
            .filter(|access| !access.is_librbd());
        let stands = setup.placement.as_ref().map_or_else(
            || "–".into(),
            |name| match access {
                Some(access) => format!("{name} over {access}"),
                None => name.clone(),
            },
        );
        let durability = runs.iter().map(|run| run.durability).min();
        vec![
            html! { (setup.name) },
            html! { (setup.published.as_deref().unwrap_or("–")) },
            html! { (stands) },
            html! { (rate(page, &runs, |run| run.reads)) },
            html! { (rate(page, &runs, |run| run.writes)) },
            html! { (durability.map_or("–", words::durability)) },
            html! { (setup.not_run(suite).unwrap_or_default()) },
        ]
    };
    let rows: Vec<Vec<Markup>> = suite.setups.iter().map(row).collect();
    html! {
        p { "Bytes per second of " (suite.deciding) ", or of what differs from it in the access path alone, geometric means of all runs that count. Figures here are of other devices than the published ones." }
        (stack(&columns, &rows))
    }
}

/// Runs of a workload on a placement that count, with the ground's factor, copies and neighbours.
fn counted<'a>(page: &Page<'a>, placement: &str, workload: &str) -> Vec<&'a Run> {
    let settings = stats::settings(page.results, workload);
    let runs = settings.iter().flat_map(|setting| stats::runs(page.results, placement, setting));
    runs.filter(|run| objections(run).is_empty()).collect()
}

/// Bytes per second of the reads or the writes of these runs, in words.
fn rate(page: &Page<'_>, runs: &[&Run], side: fn(&Run) -> Option<Figures>) -> String {
    let suite = &page.results.suite;
    let block_bytes = suite.workload(&suite.deciding).map_or(0, |workload| workload.block_bytes);
    let logs: Vec<f64> = runs
        .iter()
        .filter_map(|run| side(run))
        .filter(|of| of.iops > 0.0)
        .map(|of| of.iops.ln())
        .collect();
    if logs.is_empty() {
        return "–".into();
    }
    let iops = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    format!("{}/s", words::bytes((iops * block_bytes as f64) as u64))
}

#[cfg(test)]
mod tests {
    use crate::cost::Prices;
    use crate::results::Durability;
    use crate::suite::Suite;
    use crate::synthetic;
    use crate::verdict::{Outcome, durability, verdict};

    #[test]
    fn each_published_set_up_stands_in_the_report_and_what_is_not_possible_is_not_claimed() {
        let mut results = synthetic::empty();
        results.suite = Suite::find("diskspd-256k").expect("it comes with the program");
        for (placement, workload, iops) in [
            ("filestore-journal", "256k-70-30", 60.0),
            ("bluestore-dbwal", "256k-70-30", 20.0),
            ("filestore-journal", "256k-70-30-guest", 40.0),
            ("filestore-journal", "256k-70-30-krbd", 56.0),
            ("filestore-journal", "256k-70-30-krbd-unsafe", 560.0),
        ] {
            for repeat in 1..=3 {
                let speed = iops * (1.0 + f64::from(repeat) / 100.0);
                let mut run = synthetic::run(placement, workload, 8, repeat, speed);
                run.durability = match workload.ends_with("unsafe") {
                    true => Durability::Volatile,
                    false => Durability::Replicated,
                };
                results.runs.push(run);
            }
        }
        let found = verdict(&results);
        let safe = durability(&results, "filestore-journal");
        assert_eq!(
            safe,
            Some(Durability::Replicated),
            "a path that drops flushes is none of the placement's"
        );
        let of = |part: &str| {
            let tested =
                found.directions.iter().find(|tested| tested.direction.claim.contains(part));
            tested.expect("the claim").clone()
        };
        assert_eq!(of("database and log on the SSD alone").outcome, Outcome::Reproduced);
        // The claim compares two access paths of one placement.
        let krbd = of("KRBD reads");
        let ratio = krbd.ratio.and_then(|ratio| ratio.ratio).expect("both were measured").value;
        assert!(
            krbd.outcome == Outcome::Reproduced && (ratio - 1.4).abs() < 0.01,
            "{ratio}: {}",
            krbd.evidence
        );
        let back = of("Write-back in the host's page cache");
        assert!(
            back.outcome == Outcome::Inconclusive && back.evidence.contains("Nothing to compare")
        );
        let page = crate::report::html(&results, &found, &Prices::default());
        for setup in &results.suite.setups {
            assert!(page.contains(&setup.name), "{}", setup.name);
        }
        assert!(page.contains("read 4611 to 5098") && page.contains("a kernel with bcache"));
        assert!(page.contains("filestore-journal over krbd"), "the path is named");
        // There are 40 requests per second of 256 KiB, and four of five requests of a synthetic run
        // are reads.
        assert!(page.contains("8.2 MiB/s"), "reads of what stands for a set-up");
    }
}
