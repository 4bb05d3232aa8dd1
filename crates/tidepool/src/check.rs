//! `tidepool check`.

use crate::cli::CheckArgs;
use crate::output;
use tidepool_backend::{CheckReport, CheckStatus, OpenOptions};
use tidepool_daemon::failure::{Failure, one_line, reason};
use tidepool_daemon::volume::absolute_backend;

/// Runs the command. An image that cannot be served is a failure, also for scripts.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let uri = absolute_backend(args.uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    let report = tidepool_backend::check(&uri, &OpenOptions::default());
    output::print(args.output.format, &report, text)?;
    if report.usable {
        return Ok(());
    }
    let failed = report.items.iter().find(|item| item.status == CheckStatus::Failed);
    let why = failed.map_or_else(String::new, |item| format!(": {}", one_line(&item.detail)));
    Err(Failure::failed(format!("cannot serve {}{why}", report.uri)))
}

fn text(report: &CheckReport) -> String {
    let mut table = output::table(&["CHECK", "RESULT", "DETAIL"], &[]);
    for item in &report.items {
        let status = match item.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Warning => "warning",
            CheckStatus::Skipped => "skipped",
            CheckStatus::Failed => "FAILED",
        };
        table.add_row([item.name, status, &one_line(&item.detail)]);
    }
    let mut text = format!("{}\n{}", report.uri, output::render(&table));
    if !report.would.is_empty() {
        text.push_str("serving it would:\n");
        for step in &report.would {
            text.push_str(&format!("  {}\n", one_line(step)));
        }
    }
    text
}
