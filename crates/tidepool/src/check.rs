//! `tidepool check`.

use crate::cli::CheckArgs;
use crate::output;
use tidepool_backend::{CheckItem, CheckReport, CheckStatus, OpenOptions};
use tidepool_daemon::failure::{Failure, one_line, reason};
use tidepool_daemon::volume::absolute_backend;
use tidepool_driver::Ring;

/// Runs the command. An image that cannot be served is a failure, also for scripts.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let uri = absolute_backend(args.uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    let mut report = tidepool_backend::check(&uri, &OpenOptions::default());
    look_at_the_kernel(&mut report);
    output::print(args.output.format, &report, text)?;
    if report.usable {
        return Ok(());
    }
    let failed = report.items.iter().find(|item| item.status == CheckStatus::Failed);
    let why = failed.map_or_else(String::new, |item| format!(": {}", one_line(&item.detail)));
    Err(Failure::failed(format!("cannot serve {}{why}", report.uri)))
}

/// Whether the daemon gets from the kernel here what it transfers everything with.
fn look_at_the_kernel(report: &mut CheckReport) {
    let (status, detail) = match Ring::new() {
        Ok(_) => (CheckStatus::Ok, "the kernel allows it".to_owned()),
        Err(error) => (CheckStatus::Failed, error.to_string()),
    };
    if status == CheckStatus::Failed {
        report.usable = false;
        report.would.clear();
    }
    report.items.push(CheckItem { name: "io_uring", status, detail });
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
