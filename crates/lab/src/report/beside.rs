//! Measurements with other numbers of copies, or other neighbours of the clients, than the
//! ground's.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::tables::finding;
use crate::words;

/// One row for each placement at each point.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let ground = &page.results.suite.ground;
    let columns = [
        ("workload", Kind::Name),
        ("placement", Kind::Name),
        ("what differs", Kind::Text),
        ("copies", Kind::Number),
        ("a write is safe", Kind::Text),
        ("requests per second", Kind::Number),
        ("to the ground's", Kind::Number),
        ("finding", Kind::Text),
        ("of the neighbours", Kind::Number),
    ];
    let rows: Vec<Vec<Markup>> = page
        .verdict
        .beside
        .iter()
        .map(|of| {
            vec![
                html! { (of.workload) },
                html! { (of.placement) },
                html! { (of.what) },
                html! { (of.replicas) },
                html! { (words::durability(of.durability)) },
                html! { (words::number(of.iops)) },
                html! { (of.to_ground) },
                html! { (finding(of.to_ground.finding)) },
                html! { (of.neighbours_iops.map_or_else(|| "–".into(), words::number)) },
            ]
        })
        .collect();
    html! {
        p {
            "Everything else in this report is of " (words::beside(Some(ground.replicas), None).unwrap_or_default())
            @if let Some(neighbours) = ground.neighbours { ", beside " (neighbours) }
            ". Figures are means over loads and clusters. Requests of neighbours are in none but the last column."
        }
        (stack(&columns, &rows))
    }
}
