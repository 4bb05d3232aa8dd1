//! How results are printed.

use crate::cli::Format;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::text::plain;

/// Prints a result: as JSON, or as the text that `table` makes of it.
pub fn print<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let text = match format {
        Format::Table => shown(&table(value)),
        Format::Json => serde_json::to_string_pretty(value)
            .map_err(|e| Failure::failed(format!("cannot print the result: {e}")))?,
    };
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        // The reader has seen enough, as with `| head`.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure::failed(format!("cannot print the result: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// A text as a terminal may show it: names in it may be those of somebody else.
fn shown(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

/// A table with these columns; those named in `right` hold numbers.
pub fn table(columns: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().copied());
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The table as text without spaces at the ends of its lines.
pub fn render(table: &Table) -> String {
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Microseconds for people.
pub fn latency(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{us:.0}µs"),
        us if us < 1e5 => format!("{:.1}ms", us / 1e3),
        us if us < 1e6 => format!("{:.0}ms", us / 1e3),
        us => format!("{:.1}s", us / 1e6),
    }
}

/// A bar of bytes on a terminal; nothing elsewhere.
pub fn bytes_bar(what: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template(
        "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    );
    bar.set_style(style.expect("the template is constant").progress_chars("=> "));
    bar.set_message(what.to_owned());
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_short() {
        for (us, text) in
            [(0.4, "0µs"), (85.0, "85µs"), (1234.0, "1.2ms"), (123_456.0, "123ms"), (2.5e6, "2.5s")]
        {
            assert_eq!(latency(us), text);
        }
    }

    #[test]
    fn names_in_a_table_are_no_commands_to_the_terminal() {
        assert_eq!(shown("a  b\n\u{1b}[2J\u{9b}2J  c\u{202e}\n"), "a  b\n?[2J?2J  c?\n");
    }

    #[test]
    fn a_table_has_no_spaces_at_the_ends_of_its_lines() {
        let mut table = table(&["NAME", "BYTES"], &[1]);
        table.add_row(["a", "1"]);
        let text = render(&table);
        assert_eq!(text.lines().count(), 2);
        assert!(text.lines().all(|line| line == line.trim_end()), "{text:?}");
    }
}
