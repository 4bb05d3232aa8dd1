//! Events under load: what was lost, what clients saw before, at and after the event, and when the
//! cluster was clean again.

use maud::{Markup, html};

use super::Page;
use super::stack::{Kind, stack};
use super::svg::{Look, Scale, both, px, x_axis, y_axis};
use crate::results::{EventRun, EventWindow, Recovery};
use crate::suite::{ClusterSize, Event, Happening};
use crate::words;

/// Least number of requests of a window for which there is a 99th percentile.
const P99_OF: u64 = 100;
const P999_OF: u64 = 1_000;
/// Shown in the place of a percentile of too few requests.
const TOO_FEW: &str = "too few";

/// There were events.
pub(super) fn are_there(page: &Page<'_>) -> bool {
    !page.results.events.is_empty()
}

/// A table of devices that died, a table of all other events, and charts of each event.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let (dies, others): (Vec<&Event>, Vec<&Event>) =
        page.results.suite.events.iter().partition(|event| event.kind == Happening::SsdDies);
    html! {
        p {
            "Clients send requests when they are due, whether those before are answered or not. A time is that from when a request was due to its answer; "
            "a request that failed, or was not answered, took longer than all others. Each row is one cluster, and nothing here is ranked."
        }
        @if let Some(busy) = busy(page) { p.caveat { (busy) } }
        @if dies.iter().any(|event| !runs(page, event).is_empty()) { h3 { "A device dies" } (deaths(page, &dies)) }
        @if others.iter().any(|event| !runs(page, event).is_empty()) { h3 { "Ceph recovers or scrubs" } (tails(page, &others)) }
        @if page.results.events.iter().any(|run| run.is_valid() && run.acknowledged.overwritten > Some(0)) {
            p { small {
                "Overwritten since: blocks of which one write was acknowledged before the event, and another one from then on. The image shows only whether it "
                "has the newer one: nothing can be said of what they had."
            } }
        }
        @for event in &page.results.suite.events { (charts(page, event)) }
        (invalid(page))
    }
}

/// Share in percent from which on the machine's processors limit clients and Ceph.
const SATURATED_PERCENT: f64 = 95.0;

/// Says that the machine's processors were saturated, where they were.
fn busy(page: &Page<'_>) -> Option<String> {
    let events = &page.results.events;
    let saturated = events.iter().filter(|run| run.busy_percent >= SATURATED_PERCENT).count();
    (saturated > 0).then(|| {
        format!(
            "The machine's processors were saturated in {saturated} of {}: clients, Ceph and the devices waited for them, and times are longer than the \
             placements' own.",
            words::count(events.len(), "event")
        )
    })
}

/// The runs of an event that count, in the order of the placements.
fn runs<'a>(page: &'a Page<'_>, event: &Event) -> Vec<&'a EventRun> {
    let counts = |run: &&EventRun| run.event == event.name && run.is_valid();
    let mut runs: Vec<&EventRun> = page.results.events.iter().filter(counts).collect();
    runs.sort_by_key(|run| (place(page, run), run.cell.clone(), run.repeat));
    runs
}

fn place(page: &Page<'_>, run: &EventRun) -> Option<usize> {
    page.placements.iter().position(|name| *name == run.cell.placement)
}

fn look(page: &Page<'_>, run: &EventRun) -> Look {
    page.look(&run.cell.placement)
}

/// The name in the first column of a row.
fn name(page: &Page<'_>, run: &EventRun) -> String {
    let repeat =
        if page.results.suite.repeats > 1 { format!(" ({})", run.repeat) } else { String::new() };
    format!("{}{repeat}", run.cell.placement)
}

fn deaths(page: &Page<'_>, events: &[&Event]) -> Markup {
    let columns = [
        ("placement", Kind::Name),
        ("what died", Kind::Text),
        ("acknowledged blocks lost", Kind::Text),
        ("median: before, at, after", Kind::Text),
        ("99 %: before, at, after", Kind::Text),
        ("99.9 %: before, at, after", Kind::Text),
        ("99 % at worst", Kind::Number),
        ("longest without an answer", Kind::Number),
        ("OSDs that ended", Kind::Number),
        ("clean again", Kind::Text),
        ("what an operator does", Kind::Text),
    ];
    let row = |run: &EventRun| {
        let size = ClusterSize { disks: run.cell.disks, osds_per_disk: run.cell.osds_per_disk };
        let [p50, p99, p999] = percentiles(run);
        let salvaged = run.salvaged.as_ref().filter(|salvaged| *salvaged != "nothing");
        vec![
            html! { (name(page, run)) },
            html! { (run.what) },
            lost(run),
            html! { (p50) },
            html! { (p99) },
            html! { (p999) },
            html! { (worst(run)) },
            html! { (words::latency(run.gap_after_s * 1e6)) },
            html! {
                (run.cluster.osds_ended.len()) " of " (size.osds())
                @if let Some(down) = run.cluster.osds_down.filter(|down| *down as usize != run.cluster.osds_ended.len()) { br; small { (down) " down" } }
            },
            html! { (clean(&run.cluster.recovery)) },
            html! {
                (run.operator.as_deref().unwrap_or("nothing"))
                @if let Some(salvaged) = salvaged { br; small { "Before the images were compared: " (salvaged) } }
            },
        ]
    };
    let rows: Vec<Vec<Markup>> =
        events.iter().flat_map(|event| runs(page, event)).map(row).collect();
    html! {
        (stack(&columns, &rows))
        p { small {
            "Lost: blocks of which the newest write that was acknowledged with a flush is not in the image, which was read back from the cluster, past every cache. "
            "At: the " (page.results.suite.seconds) " seconds from the event on; before: as many before it; after: the last ones that were watched. Clean again: all "
            "placement groups are active and clean, after the event. At worst: of any such window since."
        } }
    }
}

fn tails(page: &Page<'_>, events: &[&Event]) -> Markup {
    let columns = [
        ("placement", Kind::Name),
        ("what happened", Kind::Text),
        ("median: before, at, after", Kind::Text),
        ("99 %: before, at, after", Kind::Text),
        ("99.9 %: before, at, after", Kind::Text),
        ("99 % at worst", Kind::Number),
        ("longest without an answer: before, since", Kind::Number),
        ("until it was over", Kind::Text),
        ("acknowledged blocks lost", Kind::Text),
    ];
    let row = |run: &EventRun| {
        let [p50, p99, p999] = percentiles(run);
        let gap = |s: f64| words::latency(s * 1e6);
        vec![
            html! { (name(page, run)) },
            html! { (run.what) },
            html! { (p50) },
            html! { (p99) },
            html! { (p999) },
            html! { (worst(run)) },
            html! { (gap(run.gap_before_s)) ", " (gap(run.gap_after_s)) },
            html! { (over(run)) },
            lost(run),
        ]
    };
    let rows: Vec<Vec<Markup>> =
        events.iter().flat_map(|event| runs(page, event)).map(row).collect();
    html! { (stack(&columns, &rows)) }
}

/// Median, 99th and 99.9th percentile, each before, at and after the event.
fn percentiles(run: &EventRun) -> [String; 3] {
    let three = |of: fn(&EventWindow) -> Option<f64>, least: u64| {
        let told = |window: Option<&EventWindow>| {
            window.map_or("–".into(), |window| time(window, of(window), least))
        };
        let mut all = [run.before(), run.at(), run.after()].map(told).to_vec();
        if all.iter().all(|one| *one == TOO_FEW) {
            all.truncate(1);
        }
        all.join(", ")
    };
    [
        three(|window| window.p50_us, 2),
        three(|window| window.p99_us, P99_OF),
        three(|window| window.p999_us, P999_OF),
    ]
}

/// A percentile of a window in words, or the reason why there is none.
fn time(window: &EventWindow, us: Option<f64>, least: u64) -> String {
    match us {
        Some(us) => words::latency(us),
        None if window.due < least => TOO_FEW.into(),
        None if window.failed > window.unanswered => "failed".into(),
        None => "no answer".into(),
    }
}

/// The worst 99th percentile of the windows from the event on.
fn worst(run: &EventRun) -> String {
    let since = run.windows.iter().filter(|window| window.begin_s >= 0.0 && window.due >= P99_OF);
    let key = |window: &&EventWindow| window.p99_us.unwrap_or(f64::INFINITY);
    let worst = since.max_by(|one, other| key(one).total_cmp(&key(other)));
    worst.map_or(TOO_FEW.into(), |window| time(window, window.p99_us, P99_OF))
}

/// The acknowledged blocks that were lost, in words.
fn lost(run: &EventRun) -> Markup {
    let found = &run.acknowledged;
    html! {
        @match found.lost() {
            Some(0) => { "0 of " (words::whole(found.blocks)) }
            Some(lost) => {
                span.no { (words::whole(lost)) " of " (words::whole(found.blocks)) }
                @if let Some((from, to)) = found.lost_from_to_s { br; small { "acknowledged " (moment(from)) " to " (moment(to)) } }
            }
            None => { "not known" @if let Some(why) = found.why_not_known() { br; small { (why) } } }
        }
        @if let Some(overwritten) = found.overwritten.filter(|blocks| *blocks > 0) {
            br; small { (words::whole(overwritten)) " overwritten since" }
        }
        @if found.wrong_reads > 0 { br; span.no { (words::count(found.wrong_reads as usize, "read")) " returned something older" } }
    }
}

fn moment(at_s: f64) -> String {
    if at_s < 0.0 { format!("{:.1} s before", -at_s) } else { format!("{at_s:.1} s after") }
}

/// When all placement groups were clean again, in words.
fn clean(recovery: &Recovery) -> String {
    let Recovery { left_clean_s, clean_s, back_s, watched_s, not_known } = recovery;
    match (not_known, left_clean_s, clean_s) {
        (Some(why), ..) => format!("not known: {why}"),
        (None, None, _) => "it stayed clean".into(),
        (None, Some(_), None) => format!("not within {watched_s:.0} s"),
        (None, Some(_), Some(clean)) => match back_s.filter(|back| back <= clean) {
            Some(back) => format!("{:.0} s after it came back", clean - back),
            None => format!("after {clean:.0} s"),
        },
    }
}

/// When a scrub was over, in words; for other events when the cluster was clean again.
fn over(run: &EventRun) -> String {
    match &run.cluster.scrub {
        None => clean(&run.cluster.recovery),
        Some(scrub) => match scrub.finished_s {
            Some(finished) => format!("{finished:.0} s, all {} groups", scrub.groups),
            None => format!(
                "not within {:.0} s: {} of {} groups",
                run.cluster.recovery.watched_s, scrub.scrubbed, scrub.groups
            ),
        },
    }
}

/// Charts of latency over time for an event: the median and the longest of each second.
fn charts(page: &Page<'_>, event: &Event) -> Markup {
    let runs = runs(page, event);
    if runs.is_empty() {
        return html! {};
    }
    let (median, longest) =
        (|window: &EventWindow| window.p50_us, |window: &EventWindow| window.longest_us);
    html! {
        h3 { (event.name) ": latency over time" }
        ul.keys {
            @for run in runs.iter().filter(|run| run.repeat == 1) {
                li { svg viewBox="0 0 22 12" { (look(page, run).marker(11.0, 6.0, 4.0)) } (run.cell.placement) }
            }
        }
        div.grid.two {
            figure { (both(420.0, |width| chart(page, &runs, width, "median of each second, ms (logarithmic)", median)))
                figcaption { "The dashed line: " (event.kind.title()) ". A gap: nothing of that second was answered well, or nothing was due." } }
            figure { (both(420.0, |width| chart(page, &runs, width, "longest of each second, ms (logarithmic)", longest)))
                figcaption { "A stroke at the top: requests that were due in that second failed, or were not answered." } }
        }
    }
}

fn chart(
    page: &Page<'_>,
    runs: &[&EventRun],
    width: f64,
    title: &str,
    of: fn(&EventWindow) -> Option<f64>,
) -> Markup {
    const HEIGHT: f64 = 220.0;
    const TOP: f64 = 26.0;
    const LEFT: f64 = 46.0;
    let all = || runs.iter().flat_map(|run| &run.points).map(|point| &point.clients);
    let first = all().map(|window| window.begin_s).fold(0.0, f64::min);
    let last = all().map(|window| window.end_s).fold(0.0, f64::max);
    let x = Scale::linear(last - first, LEFT, width - 12.0);
    let y = Scale::logarithmic(all().filter_map(of).map(|us| us / 1e3), HEIGHT, TOP);
    html! {
        svg viewBox={ "0 0 " (px(width)) " " (px(HEIGHT + 36.0)) } role="img" aria-label=(title) {
            (y_axis(&y, LEFT, width - 12.0, title))
            (x_axis(&x, TOP, HEIGHT, "seconds since the first window"))
            @if let Some(at) = x.at(-first) {
                line.one x1=(px(at)) x2=(px(at)) y1=(px(TOP)) y2=(px(HEIGHT)) {}
            }
            @for run in runs {
                @let look = look(page, run);
                g {
                    title { (name(page, run)) }
                    @for d in lines(run, first, &x, &y, of) { path class=(look.line()) d=(d) {} }
                    @for at in run.points.iter().filter(|point| point.clients.failed + point.clients.unanswered > 0) {
                        @if let Some(at) = x.at(at.clients.begin_s - first + 0.5) {
                            line class={ "tail " (look.colour()) } x1=(px(at)) x2=(px(at)) y1=(px(TOP)) y2=(px(TOP + 6.0)) {}
                        }
                    }
                }
            }
        }
    }
}

/// The lines of a run. A line is broken where a second has no such latency; a second alone is a
/// short stroke.
fn lines(
    run: &EventRun,
    first: f64,
    x: &Scale,
    y: &Scale,
    of: fn(&EventWindow) -> Option<f64>,
) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut is_open = false;
    for point in &run.points {
        let window = &point.clients;
        let at = of(window).and_then(|us| y.at(us / 1e3)).zip(x.at(window.begin_s - first + 0.5));
        match (at, lines.last_mut().filter(|_| is_open)) {
            (Some((y, x)), Some(line)) => line.push_str(&format!("L{},{}", px(x), px(y))),
            (Some((y, x)), None) => lines.push(format!("M{},{}h1", px(x), px(y))),
            (None, _) => {}
        }
        is_open = at.is_some();
    }
    lines
}

/// The events that do not count.
fn invalid(page: &Page<'_>) -> Markup {
    let bad: Vec<&EventRun> = page.results.events.iter().filter(|run| !run.is_valid()).collect();
    html! {
        @if !bad.is_empty() {
            h3 { "Events that do not count: " (bad.len()) " of " (page.results.events.len()) }
            ul { @for run in bad { li { strong { (run.event) ", " (run.cell.placement) ", repeat " (run.repeat) } ": " (run.invalid.join("; ")) } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::Prices;
    use crate::report::html;
    use crate::results::Results;
    use crate::synthetic;
    use crate::verdict::verdict;

    fn page(results: &Results) -> String {
        html(results, &verdict(results), &Prices::default())
    }

    /// The cells of a placement's row in the table below a title.
    fn cells(page: &str, title: &str, placement: &str) -> Vec<String> {
        let part = page.split_once(&format!("<h3>{title}</h3>")).expect("the table").1;
        let row = part.split_once(&format!("<span>{placement}</span></td>")).expect("its row").1;
        let row = row.split_once("</tr>").expect("its end").0;
        let cell = |text: &str| {
            let mut plain = String::new();
            let mut inside = true;
            for letter in text.chars() {
                match letter {
                    '<' => inside = false,
                    '>' => inside = true,
                    letter if inside => plain.push(letter),
                    _ => {}
                }
            }
            plain
        };
        row.split("<td").skip(1).map(|text| cell(&format!("<{text}"))).collect()
    }

    #[test]
    fn a_death_and_a_recovery_have_a_table_each_and_a_chart() {
        let results = synthetic::events();
        let page = page(&results);
        assert!(page.contains("<h2>What happened under load</h2>"));
        assert!(!page.contains("<h2>Response curves</h2>"), "nothing was measured");
        let lost = cells(&page, "A device dies", "host-tidepool");
        assert!(
            lost.iter()
                .any(|cell| cell.contains("120 of 1,000acknowledged 4.0 s before to 1.0 s after")),
            "{lost:?}"
        );
        assert!(lost.iter().any(|cell| cell == "it stayed clean"), "{lost:?}");
        assert!(lost.iter().any(|cell| cell == "9.0 ms, failed, failed"), "{lost:?}");
        let safe = cells(&page, "A device dies", "bluestore-dbwal");
        assert!(safe.iter().any(|cell| cell == "0 of 1,000"), "{safe:?}");
        assert!(
            safe.iter().any(|cell| cell == "1 of 3")
                && safe.iter().any(|cell| cell == "after 42 s"),
            "{safe:?}"
        );
        assert!(safe.iter().any(|cell| cell == "12.0 s"), "{safe:?}");
        let again = cells(&page, "A device dies", "host-tidepool-replicated");
        assert!(again.iter().any(|cell| cell == "0 of 1,00083 overwritten since"), "{again:?}");
        assert!(page.contains("nothing can be said of what they had"));
        let unknown = cells(&page, "A device dies", "osd-tidepool");
        assert!(
            unknown.iter().any(|cell| cell.starts_with("not knownan image could not")),
            "{unknown:?}"
        );
        let tail = cells(&page, "Ceph recovers or scrubs", "host-tidepool");
        assert!(tail.iter().any(|cell| cell == "12 s after it came back"), "{tail:?}");
        assert!(tail.iter().any(|cell| cell == "9.0 ms, 20.0 ms, 9.0 ms"), "{tail:?}");
        assert!(page.contains("not within 60 s: 20 of 33 groups"));
        assert!(page.contains("ssd-dies: latency over time") && page.contains("class=\"one\""));
        assert!(page.contains("Events that do not count: 1 of"));
        assert!(!page.contains("processors were saturated"));
        let mut busy = results.clone();
        busy.events[0].busy_percent = 99.0;
        assert!(self::page(&busy).contains("processors were saturated in 1 of 7 events"));
        assert!(!page.contains("NaN") && !page.contains("inf,"));
    }

    #[test]
    fn a_cluster_of_more_osds_than_can_be_counted_is_told_all_the_same() {
        let mut results = synthetic::events();
        for run in &mut results.events {
            (run.cell.disks, run.cell.osds_per_disk) = (u32::MAX, u32::MAX);
        }
        let many = cells(&page(&results), "A device dies", "bluestore-dbwal");
        assert!(many.iter().any(|cell| cell == "1 of 4294967295"), "{many:?}");
    }

    #[test]
    fn where_no_write_was_acknowledged_it_is_not_known_what_was_lost() {
        let mut results = synthetic::events();
        let acknowledged = results.events.iter_mut().map(|run| &mut run.acknowledged);
        acknowledged.for_each(|found| (found.writes, found.blocks) = (0, 0));
        let page = page(&results);
        let none = cells(&page, "A device dies", "bluestore-dbwal");
        assert!(none.iter().any(|cell| cell == "not knownno write was acknowledged"), "{none:?}");
    }

    #[test]
    fn events_stand_beside_measurements_and_survive_being_written_and_read() {
        let events = synthetic::events();
        let mut results = synthetic::which_side();
        assert!(!page(&results).contains("What happened under load"));
        (results.suite.events, results.events) = (events.suite.events.clone(), events.events);
        let both = page(&results);
        assert!(both.contains("What happened under load") && both.contains("Response curves"));
        let text = serde_json::to_vec(&results).expect("plain data");
        let back = crate::document::parse("r.json", &text).expect("results");
        assert_eq!(back.events, results.events);
        results.events.clear();
        let text = serde_json::to_string(&results).expect("plain data");
        assert!(!text.contains("\"events\""), "results without any are what they were");
    }
}
