//! Results as one HTML file: the verdict first, then its evidence. The file needs nothing else, no
//! network and no scripts, and is the same for the same results.
//!
//! maud writes the file: its templates are Rust, it escapes every text that comes from a document,
//! and it has no dependencies at run time.

mod bench;
mod beside;
mod controls;
mod costs;
mod curves;
mod events;
mod every;
mod hops;
mod inside;
mod method;
mod resources;
mod setups;
mod sizes;
mod spans;
mod stack;
mod strips;
mod svg;
mod tables;
mod tails;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::cost::Prices;
use crate::results::Results;
use crate::suite::ClusterSize;
use crate::verdict::{self, Control, Verdict};
use crate::words;
use svg::Look;

/// The style of the page.
const STYLE: &str = include_str!("style.css");

/// Number of sentences that are shown below the first one. The others can be opened.
const SENTENCES: usize = 3;

/// What all parts of the page are made from.
struct Page<'a> {
    results: &'a Results,
    verdict: &'a Verdict,
    placements: Vec<&'a str>,
    prices: &'a Prices,
}

impl Page<'_> {
    /// How a placement is drawn.
    fn look(&self, placement: &str) -> Look {
        let index = self.placements.iter().position(|name| *name == placement).unwrap_or(0);
        Look::new(index, verdict::durability(self.results, placement))
    }
}

/// The report on `results` with their `verdict`, and with the prices of SSDs, if any are given.
pub fn html(results: &Results, verdict: &Verdict, prices: &Prices) -> String {
    let page = Page { results, verdict, placements: verdict::placements(results), prices };
    let document = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (verdict.suite) ": " (verdict.headline) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body(&page)) }
        }
    };
    document.into_string()
}

fn body(page: &Page<'_>) -> Markup {
    html! {
        header { (head(page)) }
        main {
            @if sizes::are_several(page) {
                h2 { "Sizes of clusters" }
                (sizes::section(page))
            }
            @if !page.verdict.beside.is_empty() {
                h2 { "Copies and neighbours" }
                (beside::section(page))
            }
            @if events::are_there(page) {
                h2 { "What happened under load" }
                (events::section(page))
            }
            // A suite of events alone has no measurements.
            @let is_measured = !page.results.runs.is_empty() || !events::are_there(page);
            @if is_measured { (measured(page)) }
            h2 { "Placements" }
            (legend(page))
            @if is_measured {
                h2 { "What the machine did meanwhile" }
                (strips::section(page))
                h2 { "Processors, memory and network" }
                (resources::section(page))
                h2 { "Processor time" }
                (tables::processor(page))
                h2 { "Drains" }
                (tables::drains(page))
                h2 { "Every cell" }
                details open[page.results.runs.len() < 60] { summary { "All cells" } (tables::cells(page)) }
            }
            h2 { "What does not count" }
            (tables::left_out(page))
            h2 { "Fairness" }
            (method::fairness(page))
            h2 { "Machine" }
            (method::machine(page))
            h2 { "Do it again" }
            (method::commands(page))
        }
    }
}

/// The parts of the page that show measurements.
fn measured(page: &Page<'_>) -> Markup {
    html! {
        h2 { "Response curves" }
        (curves::section(page))
        h2 { "Bursts, and for good" }
        (spans::section(page))
        h2 { "Tails" }
        (tails::section(page))
        @if bench::is_there(page) {
            h2 { "What rados bench tells" }
            (bench::section(page))
        }
        h2 { "Where the time goes" }
        (hops::section(page))
        @if inside::are_there(page.results) {
            h2 { "Clients in guests" }
            (inside::section(page))
        }
        h2 { "What it costs" }
        (costs::section(page))
        h2 { "Controls and bounds" }
        (controls::section(page))
        h2 { "Every repeat" }
        (every::section(page))
        @if !page.verdict.directions.is_empty() {
            h2 { "What was published, and what was found here" }
            (tables::directions(page))
        }
        @if !page.results.suite.setups.is_empty() {
            h2 { "Set-ups as published" }
            (setups::section(page))
        }
    }
}

/// The top of the page, with the verdict.
fn head(page: &Page<'_>) -> Markup {
    let verdict = page.verdict;
    html! {
        p.headline { (unbroken(&verdict.headline)) }
        h1 { (verdict.question) " " small { "(" (verdict.suite) @if verdict.quick { ", quick form" } ")" } }
        @if let Some(caveat) = &verdict.caveat { p.caveat { (caveat) } }
        @if verdict.quick { p.caveat { "The quick form: short runs and small sets, a look and no measurement." } }
        @if verdict.controls.iter().any(Control::differs) {
            p.caveat { "What follows was measured on an instrument that is off: no ratio of it counts." }
        }
        @let others: Vec<&String> = verdict.answer.iter().filter(|sentence| !verdict.headline.ends_with(*sentence)).collect();
        @let (first, rest) = others.split_at(others.len().min(SENTENCES));
        (sentences(first))
        @if !rest.is_empty() { details { summary { (words::count(rest.len(), "more sentence")) } (sentences(rest)) } }
    }
}

/// Words for the cluster size on which the shown figures of a workload were measured. Empty where
/// there is one size only.
fn on(page: &Page<'_>, workload: &str) -> String {
    let setting = verdict::reference(page.results, workload).filter(|_| sizes::are_several(page));
    let size = setting.map(|of| ClusterSize { disks: of.disks, osds_per_disk: of.osds_per_disk });
    size.map(|size| format!(" on {size}")).unwrap_or_default()
}

fn sentences(sentences: &[&String]) -> Markup {
    html! { ul { @for sentence in sentences { li { (unbroken(sentence)) } } } }
}

/// A sentence in which each × stays on the line of its number.
fn unbroken(sentence: &str) -> String {
    sentence.replace(" ×", "\u{a0}×")
}

/// What the markers stand for.
fn legend(page: &Page<'_>) -> Markup {
    let measured = page
        .placements
        .iter()
        .filter_map(|name| Some((*name, verdict::durability(page.results, name)?)));
    let not_run = |name: &str| page.results.not_run.iter().any(|not_run| not_run.placement == name);
    html! {
        ul.legend {
            @for (placement, durability) in measured {
                li {
                    svg viewBox="0 0 22 22" { (page.look(placement).marker(11.0, 11.0, 6.0)) }
                    div { strong { (placement) } br; small { (words::placement(placement)) "; " (words::durability(durability)) } }
                }
            }
        }
        p { small {
            "A hollow marker has one copy of an acknowledged write, a full one has two or more, a red cross has none that is safe and is never compared."
        } }
        @if page.placements.iter().any(|name| not_run(name)) {
            p { "Not run: " @for not_run in &page.results.not_run { strong { (not_run.name()) } " (" (not_run.why) ") " } }
        }
    }
}

#[cfg(test)]
mod tests;
