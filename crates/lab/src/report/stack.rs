//! Tables of a few columns. In a narrow window each row becomes a block with the titles of the
//! columns inside.

use maud::{Markup, html};

/// How a column is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// What the row is about; in a narrow window the title of the block.
    Name,
    /// A figure.
    Number,
    /// Text.
    Text,
}

impl Kind {
    fn class(self) -> &'static str {
        match self {
            Kind::Name => "name",
            Kind::Number => "n",
            Kind::Text => "words",
        }
    }
}

/// A table of these rows; each row has a cell for each column.
pub(super) fn stack(columns: &[(&str, Kind)], rows: &[Vec<Markup>]) -> Markup {
    html! {
        div.scroll { table.stack {
            thead { tr { @for (title, kind) in columns { th class=(kind.class()) { (title) } } } }
            tbody {
                @for row in rows {
                    tr {
                        @for ((title, kind), cell) in columns.iter().zip(row) {
                            td class=(kind.class()) data-title=(title) { span { (cell) } }
                        }
                    }
                }
            }
        } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_brings_the_title_of_its_column() {
        let columns = [("placement", Kind::Name), ("SSDs", Kind::Number)];
        let table = stack(&columns, &[vec![html! { "a" }, html! { (1) }]]).into_string();
        assert!(
            table.contains("<td class=\"name\" data-title=\"placement\"><span>a</span></td>"),
            "{table}"
        );
        assert!(
            table.contains("<td class=\"n\" data-title=\"SSDs\"><span>1</span></td>"),
            "{table}"
        );
    }
}
