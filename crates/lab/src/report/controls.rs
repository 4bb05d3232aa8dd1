//! Controls, bounds, and runs that were limited from outside of the placement.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::tables::{finding, reasons};
use crate::results::Run;
use crate::stats::Finding;
use crate::verdict::{Bounded, Control};
use crate::words;

/// The row of a placement with its bound.
fn bound(bounded: &Bounded) -> Vec<Markup> {
    let (class, finding) =
        if bounded.rig_fault { ("no", "fault of the rig") } else { ("dim", "–") };
    vec![
        html! { (bounded.placement) },
        html! { (bounded.bound) },
        html! { (bounded.workload) },
        html! { (bounded.iops) },
        html! { span class=(class) { (finding) } },
    ]
}

/// The controls, the bounds, and the runs whose figures hold in one direction only.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let results = page.results;
    let controls = &page.verdict.controls;
    let again = words::again(&results.suite.baseline);
    let limited: Vec<&Run> = results.runs.iter().filter(|run| run.lower_bound.is_some()).collect();
    let row = |control: &Control| {
        let kind = if words::is_again(&control.placement) { "A/A" } else { "pass-through" };
        let class = match control.iops.finding {
            Finding::Same => "yes",
            _ if control.differs() => "no",
            _ => "maybe",
        };
        vec![
            html! { (control.placement) },
            html! { (kind) },
            html! { (control.against) },
            html! { (control.iops) },
            html! { span class=(class) { (finding(control.iops.finding)) } },
        ]
    };
    let rows: Vec<Vec<Markup>> = controls.iter().map(row).collect();
    let columns = [
        ("control", Kind::Name),
        ("kind", Kind::Text),
        ("against", Kind::Text),
        ("ratio of requests per second", Kind::Number),
        ("finding", Kind::Text),
    ];
    let bounds: Vec<Vec<Markup>> = page.verdict.bounds.iter().map(bound).collect();
    let bound_columns = [
        ("placement", Kind::Name),
        ("bound", Kind::Text),
        ("workload", Kind::Text),
        ("ratio of requests per second", Kind::Number),
        ("finding", Kind::Text),
    ];
    html! {
        p {
            "A control is what it stands beside under another name (A/A), or only hands everything on (pass-through). Where one comes out as different, there is "
            "no verdict."
        }
        @if controls.is_empty() {
            p.dim { "No control was measured." }
        } @else {
            (stack(&columns, &rows))
        }
        @if !controls.iter().any(|control| control.placement == again) {
            p { (results.suite.baseline) " was not measured twice: nothing shows that what is alike comes out alike." }
        }
        @if !bounds.is_empty() {
            h3 { "Bounds" }
            p {
                "A cache under the OSDs is beside OSDs that are on such an SSD, a cache in the hypervisor beside its SSD without anything else. Where no disk is "
                "in the way, a cache under the OSDs that has less than half of its bound is a fault of the rig, and is not ranked."
            }
            (stack(&bound_columns, &bounds))
        }
        h3 { "Runs that were limited by the client or the machine: " (limited.len()) }
        @if !limited.is_empty() {
            p { "The placement may do more than they show: arrows in the charts and “≥” in the tables. A ratio to them holds in one direction only." }
            (reasons(&["placement", "workload", "depth", "repeat", "limit"], limited.iter().map(|run| (*run, run.lower_bound.clone().unwrap_or_default()))))
        }
    }
}
