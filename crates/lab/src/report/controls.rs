//! Controls, and what limited runs from outside.

use maud::{Markup, html};

use super::Page;
use super::tables::{finding, reasons};
use crate::results::Run;
use crate::words;

/// What has to come out as equal, and what holds in one direction only.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let results = page.results;
    let controls = &page.verdict.controls;
    let again = words::again(&results.suite.baseline);
    let limited: Vec<&Run> = results.runs.iter().filter(|run| run.lower_bound.is_some()).collect();
    html! {
        p {
            "A control is what it stands beside under another name (A/A), or only hands everything on (pass-through). Where one comes out as different, there is "
            "no verdict."
        }
        @if controls.is_empty() {
            p.dim { "No control was measured." }
        } @else {
            div.scroll { table {
                thead { tr { th { "control" } th { "against" } th.n { "requests per second, ratio" } th { "finding" } } }
                tbody {
                    @for control in controls {
                        tr {
                            td.name { (control.placement) br; small { @if words::is_again(&control.placement) { "A/A" } @else { "pass-through" } } }
                            td.name { (control.against) } td.n { (control.iops) }
                            td { span class=(if control.differs() { "no" } else { "maybe" }) { (finding(control.iops.finding)) } }
                        }
                    }
                }
            } }
        }
        @if !controls.iter().any(|control| control.placement == again) {
            p { (results.suite.baseline) " was not measured twice: nothing shows that what is alike comes out alike." }
        }
        h3 { "Runs that were limited by the client or the machine: " (limited.len()) }
        @if !limited.is_empty() {
            p { "The placement may do more than they show: arrows in the charts and “≥” in the tables. A ratio to them holds in one direction only." }
            (reasons(&["placement", "workload", "depth", "repeat", "limit"], limited.iter().map(|run| (*run, run.lower_bound.clone().unwrap_or_default()))))
        }
    }
}
