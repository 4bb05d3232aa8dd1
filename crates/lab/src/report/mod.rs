//! Results as one HTML file: the verdict first, then what it rests on. It needs nothing else, no network and no scripts,
//! and is the same for the same results.
//!
//! maud writes it: its templates are Rust, it escapes every text that a document brings, and it has no dependencies at run
//! time.

mod curves;
mod hops;
mod method;
mod strips;
mod svg;
mod tables;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::results::Results;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Ratio};
use crate::verdict::{self, Lasting, Place, Ranking, Verdict};
use crate::words;
use svg::{Look, Row, both, rows};

/// The page's style.
const STYLE: &str = include_str!("style.css");

/// What all parts of the page are made of.
struct Page<'a> {
    results: &'a Results,
    verdict: &'a Verdict,
    placements: Vec<&'a str>,
}

impl Page<'_> {
    /// How a placement is drawn.
    fn look(&self, placement: &str) -> Look {
        let index = self.placements.iter().position(|name| *name == placement).unwrap_or(0);
        Look::new(index, verdict::durability(self.results, placement))
    }
}

/// The report on results of which this is the verdict.
pub fn html(results: &Results, verdict: &Verdict) -> String {
    let page = Page { results, verdict, placements: verdict::placements(results) };
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
            @if !page.verdict.directions.is_empty() {
                h2 { "What was published, and what was found here" }
                (tables::directions(page))
            }
            h2 { "Placements" }
            (legend(page))
            h2 { "Latency and throughput" }
            @for workload in &page.results.suite.workloads { (curves::workload(page, workload)) }
            h2 { "Where the time goes" }
            (hops::section(page))
            h2 { "What the machine did meanwhile" }
            (strips::section(page))
            h2 { "Processor time" }
            (tables::processor(page))
            h2 { "Drains" }
            (tables::drains(page))
            h2 { "Every measurement" }
            details open[page.results.runs.len() < 60] { summary { "All cells" } (tables::cells(page)) }
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

/// The verdict.
fn head(page: &Page<'_>) -> Markup {
    let verdict = page.verdict;
    let decides = verdict.rankings.iter().find(|ranking| ranking.places.len() > 1);
    html! {
        p.headline { (unbroken(&verdict.headline)) }
        h1 { (verdict.question) " " small { "(" (verdict.suite) @if verdict.quick { ", quick form" } ")" } }
        @if let Some(caveat) = &verdict.caveat { p.caveat { (caveat) } }
        @if verdict.quick { p.caveat { "The quick form: short runs and small sets, a look and no measurement." } }
        @if let Some(ranking) = decides { (both_spans(ranking, &verdict.lasting)) (forest(page, ranking)) }
        ul { @for sentence in &verdict.answer { li { (unbroken(sentence)) } } }
    }
}

/// A sentence whose factors stay on the line of their number.
fn unbroken(sentence: &str) -> String {
    sentence.replace(" ×", "\u{a0}×")
}

/// The winner's figures in bursts, and beside them those that last.
fn both_spans(ranking: &Ranking, lasting: &Lasting) -> Markup {
    let names: Vec<&str> = match (ranking.places.first(), &ranking.lead) {
        (Some(first), Some(lead)) => vec![&first.placement, &lead.against],
        _ => return html! {},
    };
    match lasting.steadiness(&names) {
        Steadiness::Sustained => tiles(ranking, "For bursts and for good: "),
        Steadiness::Unknown => tiles(ranking, "In a measurement, of which nobody knows whether it lasts: "),
        Steadiness::Absorbing { absorbed_bytes, .. } => html! {
            (tiles(ranking, &format!("For bursts up to {}: ", words::bytes(absorbed_bytes))))
            @match lasting.ranking(ranking.durability).filter(|found| found.lead.is_some()) {
                Some(found) => { (tiles(found, "For good: ")) }
                None => { p { "For good: no two placements had sustained runs." } }
            }
        },
    }
}

/// The winner's figures against the second best.
fn tiles(ranking: &Ranking, span: &str) -> Markup {
    let (Some(first), Some(lead)) = (ranking.places.first(), &ranking.lead) else { return html! {} };
    let tile = |what: &str, ratio: &Ratio| {
        let value = ratio
            .ratio
            .map_or("–".into(), |found| format!("{}{} ×", ratio.bound.words(), words::factor(found.value)));
        let interval = ratio.ratio.and_then(|found| found.interval);
        html! {
            div.tile {
                b { (value) } (what) br;
                small {
                    @match interval {
                        Some((low, high)) => { "95 %: " (words::factor(low)) " to " (words::factor(high)) }
                        None => { "no interval" }
                    }
                }
            }
        }
    };
    html! {
        p { (span) strong { (first.placement) } " against the second best, " strong { (lead.against) } ":" }
        div.tiles {
            (tile("the requests per second", &lead.iops))
            (tile("the mean latency", &lead.mean))
            (tile("the 99th percentile of latency", &lead.p99))
        }
    }
}

/// Each placement's requests per second to the baseline's, those that are not ranked too.
fn forest(page: &Page<'_>, ranking: &Ranking) -> Markup {
    let results = page.results;
    let baseline = &results.suite.baseline;
    let ranked = ranking.places.iter().map(|Place { placement, .. }| placement.as_str());
    let others =
        page.placements.iter().copied().filter(|name| !ranking.places.iter().any(|p| p.placement == *name));
    let names: Vec<&str> = ranked.chain(others).collect();
    let row = |name: &&str| {
        let ratio = (*name != baseline.as_str())
            .then(|| stats::paired(results, name, baseline, &ranking.settings, stats::Metric::Iops));
        let (value, found, bound) = match &ratio {
            None => ("1 (the baseline)".to_string(), None, stats::Bound::Exact),
            Some(ratio) => (ratio.to_string(), Some(ratio.ratio?), ratio.bound),
        };
        let ranks = |ranking: &&Ranking| ranking.places.iter().any(|place| place.placement == *name);
        let class = page.verdict.rankings.iter().find(ranks).map(|ranking| ranking.durability);
        Some(Row {
            label: match class {
                Some(class) if class == ranking.durability => name.to_string(),
                Some(class) => format!("{name} ({})", words::copies(class)),
                None => format!("{name} (not ranked)"),
            },
            value,
            look: page.look(name),
            dots: Vec::new(),
            center: Some(found.map_or(1.0, |found| found.value)),
            interval: found.and_then(|found| found.interval),
            stroke: None,
            bound,
        })
    };
    let all: Vec<Row> = names.iter().filter_map(row).collect();
    let axis = "requests per second, times the baseline's (logarithmic)";
    let band = (1.0 / (1.0 + stats::EQUIVALENCE), 1.0 + stats::EQUIVALENCE);
    html! {
        figure {
            (both(820.0, |width| rows(width, axis, axis, &all, Some(band))))
            figcaption {
                "Against " (baseline) " over all loads of the deciding workload; lines are 95 % intervals. In the grey band a difference counts as none. "
                "An arrow: the truth may be further in its direction."
            }
        }
    }
}

/// What markers stand for.
fn legend(page: &Page<'_>) -> Markup {
    let measured =
        page.placements.iter().filter_map(|name| Some((*name, verdict::durability(page.results, name)?)));
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
            p { "Not run: " @for not_run in &page.results.not_run { strong { (not_run.placement) } " (" (not_run.why) ") " } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Durability;
    use crate::synthetic;
    use crate::verdict::verdict;

    /// Elements that have no end.
    const VOID: [&str; 3] = ["meta", "br", "!DOCTYPE"];

    fn report(results: &Results) -> String {
        html(results, &verdict(results))
    }

    /// Every element that begins ends where it should; returns how many there are.
    fn elements(html: &str) -> usize {
        let (mut open, mut count) = (Vec::new(), 0);
        let body = html.replace(STYLE, "");
        for tag in body.split('<').skip(1) {
            let (inside, _) = tag.split_once('>').expect("a tag ends");
            assert_eq!(inside.matches('"').count() % 2, 0, "{inside}");
            let name = inside.split([' ', '/']).find(|word| !word.is_empty()).expect("a name");
            if inside.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "an end of another element");
            } else if !VOID.contains(&name) {
                open.push(name);
                count += 1;
            }
        }
        assert!(open.is_empty(), "{open:?} do not end");
        count
    }

    #[test]
    fn a_report_is_well_formed_needs_nothing_else_and_is_the_same_every_time() {
        let results = synthetic::which_side();
        let page = report(&results);
        assert!(elements(&page) > 1_000);
        assert_eq!(page, report(&results));
        for part in ["http", "src=", "<script", "@import", "url(", "NaN", "inf"] {
            let found = page.replace("information", "").find(part);
            assert!(found.is_none(), "{part}: {:?}", found.map(|at| &page[at.saturating_sub(60)..at + 60]));
        }
        for part in [
            "Emulated devices, slowed by 4 and, where it decides, by 8: relative order only.",
            "host-tidepool-replicated (two copies)",
            "peer-ssd",
            "an OSD was marked down meanwhile",
            "busy for 97 % of the time",
            "not reproduced",
            "tidepool lab run which-side --seed 7",
            "CEPH_CONF=/tmp/ceph.conf fio",
            "requests per second (logarithmic)",
            "mean latency, ms (logarithmic)",
            "seconds since the run began",
            &results.suite_sha256,
            &results.devices[0].sha256,
        ] {
            assert!(page.contains(part), "{part}");
        }
    }

    #[test]
    fn no_text_of_a_document_becomes_an_element() {
        let nasty = "<script>alert('\"&')</script>";
        let mut results =
            synthetic::results(&[(nasty, &[100.0, 110.0]), ("bluestore-colocated", &[50.0, 51.0])]);
        let text = || nasty.to_string();
        results.suite.placements.push(text());
        (results.suite.question, results.command, results.begun) = (text(), text(), text());
        results.suite.ground.ceph_conf.push(text());
        results.suite.workloads[0].title = text();
        results.suite.directions[0].claim = text();
        (results.machine.cpu, results.machine.commit) = (text(), text());
        results.devices[0].spec.name = text();
        results.testbeds[0].network = text();
        results.testbeds[0].proofs = [(text(), serde_json::json!({ nasty: nasty }))].into();
        results.not_run.push(crate::results::NotRun { placement: text(), why: text() });
        let run = &mut results.runs[0];
        run.commands = vec![text()];
        run.lower_bound = Some(text());
        run.cpu_us_per_io.insert(text(), 1.0);
        run.devices.insert(text(), crate::device::Counts::default());
        run.samples[0].network.insert(text(), crate::collect::Carried::default());
        results.runs[1].invalid.push(text());
        let page = report(&results);
        elements(&page);
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert("));
    }

    #[test]
    fn results_that_say_little_still_make_a_report() {
        elements(&report(&synthetic::empty()));
        let mut results =
            synthetic::results(&[("a", &[f64::NAN, 0.0]), ("b", &[f64::INFINITY]), ("c", &[1e-300, 1e300])]);
        for run in &mut results.runs {
            (run.samples, run.stages, run.histogram) = (Vec::new(), Vec::new(), Vec::new());
            (run.reads, run.writes) = (None, None);
            run.durability = Durability::Replicated;
        }
        results.suite.workloads.truncate(2);
        results.testbeds.clear();
        results.devices.clear();
        let page = report(&results);
        elements(&page);
        assert!(!page.contains("NaN") && !page.contains("inf,"), "coordinates are numbers");
        assert!(!page.contains("Emulated devices"));
    }
}
