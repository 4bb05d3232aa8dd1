//! `tidepool lab report`.

use crate::cli::Format;
use crate::cli::lab::ReportArgs;
use crate::output;
use std::path::{Path, PathBuf};
use tidepool_daemon::failure::{Failure, reason};
use tidepool_lab::cost::Prices;
use tidepool_lab::stats::Ratio;
use tidepool_lab::verdict::{Happened, Ranking, Verdict, verdict};
use tidepool_lab::{document, report};

/// Runs the command.
pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let Some(path) = &args.results else {
        return output::print(Format::Table, &(), |()| document::schema());
    };
    let out = destination(path, args)?;
    let results = super::results(path)?;
    let prices = Prices::new(&results, &args.ssd_prices).map_err(Failure::usage)?;
    let verdict = verdict(&results);
    if let Some(out) = &out {
        let written = document::write(out, &report::html(&results, &verdict, &prices));
        written.map_err(|e| {
            Failure::failed(format!("cannot write {}: {}", out.display(), reason(&e)))
        })?;
    }
    output::print(args.output.format, &verdict, |verdict| text(verdict, out.as_deref()))
}

/// Where the report goes: never over the results.
fn destination(results: &Path, args: &ReportArgs) -> Result<Option<PathBuf>, Failure> {
    let out = match &args.out {
        Some(out) => out.clone(),
        None if args.output.format == Format::Json => return Ok(None),
        None => results.with_extension("html"),
    };
    let same = out == results
        || out.canonicalize().ok().is_some_and(|out| results.canonicalize().ok() == Some(out));
    if same {
        return Err(Failure::usage(format!(
            "the report would overwrite the results {}: name another file",
            out.display()
        )));
    }
    Ok(Some(out))
}

fn text(verdict: &Verdict, out: Option<&Path>) -> String {
    let mut text = format!("{}\n\n{}\n\n", verdict.headline, verdict.question);
    for sentence in verdict.caveat.iter().chain(&verdict.answer) {
        text.push_str(&format!("  {sentence}\n"));
    }
    for (rankings, title) in [
        (&verdict.standings.rankings, ""),
        (&verdict.standings.lasting.for_good, "For good, of sustained runs alone:\n"),
    ] {
        // What was sustained throughout stands there already.
        for ranking in rankings
            .iter()
            .filter(|ranking| title.is_empty() || !verdict.standings.rankings.contains(ranking))
        {
            text.push_str(&format!("\n{title}{}", ranked(ranking)));
        }
    }
    if !verdict.directions.is_empty() {
        let mut table = output::table(&["CLAIM", "OUTCOME", "PUBLISHED", "FOUND HERE"], &[]);
        for tested in &verdict.directions {
            let (published, found) = (tested.published(), tested.found());
            table.add_row([&tested.direction.claim, tested.outcome.title(), &published, &found]);
        }
        text.push('\n');
        text.push_str(&output::render(&table));
    }
    if !verdict.events.is_empty() {
        text.push('\n');
        text.push_str(&happened(&verdict.events));
    }
    if verdict.invalid_runs > 0 {
        text.push_str(&format!(
            "\n{} of {} runs do not count; the report says why.\n",
            verdict.invalid_runs, verdict.runs
        ));
    }
    if let Some(out) = out {
        text.push_str(&format!("\nThe report is {}\n", out.display()));
    }
    text
}

/// What happened under load, a line for each cluster.
fn happened(events: &[Happened]) -> String {
    let columns = [
        "EVENT",
        "PLACEMENT",
        "LOST",
        "OF",
        "OVERWRITTEN",
        "WRONG READS",
        "NO ANSWER FOR",
        "P99 BEFORE",
        "AT",
        "AFTER",
        "CLEAN AGAIN",
    ];
    let mut table = output::table(&columns, &[2, 3, 4, 5, 6, 7, 8, 9]);
    for found in events {
        let milliseconds =
            |us: Option<f64>| us.map_or_else(|| "-".into(), |us| format!("{:.1} ms", us / 1e3));
        let [before, at, after] = found.p99_us.map(milliseconds);
        let lost = match (found.invalid.first(), found.lost) {
            (Some(_), _) => "does not count".into(),
            (None, Some(lost)) => lost.to_string(),
            (None, None) => "not known".into(),
        };
        let clean = match (found.stayed_clean, found.clean_s) {
            (true, _) => "it stayed clean".into(),
            (false, Some(clean_s)) => format!("after {clean_s:.0} s"),
            (false, None) => "no".into(),
        };
        table.add_row([
            found.event.clone(),
            found.placement.clone(),
            lost,
            found.acknowledged.to_string(),
            found.overwritten.map_or_else(|| "-".into(), |blocks| blocks.to_string()),
            found.wrong_reads.to_string(),
            format!("{:.1} s", found.gap_s),
            before,
            at,
            after,
            clean,
        ]);
    }
    output::render(&table)
}

fn ranked(ranking: &Ranking) -> String {
    let columns = ["PLACEMENT", "IOPS", "IOPS TO BASELINE", "MEAN", "P99"];
    let mut table = output::table(&columns, &[1]);
    for place in &ranking.places {
        let ratio = |of: fn(&tidepool_lab::verdict::Compared) -> &Ratio| {
            place
                .over_baseline
                .as_ref()
                .map_or_else(|| "the baseline".into(), |over| of(over).known())
        };
        table.add_row([
            place.placement.clone(),
            format!("{:.0}", place.iops),
            ratio(|over| &over.iops),
            ratio(|over| &over.mean),
            ratio(|over| &over.p99),
        ]);
    }
    output::render(&table)
}
