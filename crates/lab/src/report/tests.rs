use super::*;
use crate::collect::Means;
use crate::cost::price;
use crate::results::{Durability, NotRunSize};
use crate::synthetic;
use crate::verdict::verdict;

/// Elements that have no end tag.
const VOID: [&str; 3] = ["meta", "br", "!DOCTYPE"];

fn report(results: &Results) -> String {
    html(results, &verdict(results), &Prices::default())
}

/// Asserts that every element that begins ends where it should; returns the number of elements.
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
        assert!(
            found.is_none(),
            "{part}: {:?}",
            found.map(|at| &page[at.saturating_sub(60)..at + 60])
        );
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
    results.not_run.push(crate::results::NotRun::all(text(), text()));
    let run = &mut results.runs[0];
    run.commands = vec![text()];
    run.lower_bound = Some(text());
    run.counted.cpu_us_per_io.insert(text(), 1.0);
    run.counted.devices.insert(text(), tidepool_cluster::device::Counts::default());
    run.samples[0].network.insert(text(), crate::collect::Carried::default());
    results.runs[1].invalid.push(text());
    let page = report(&results);
    elements(&page);
    assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert("));
}

#[test]
fn results_that_say_little_still_make_a_report() {
    elements(&report(&synthetic::empty()));
    let mut results = synthetic::results(&[
        ("a", &[f64::NAN, 0.0]),
        ("b", &[f64::INFINITY]),
        ("c", &[1e-300, 1e300]),
    ]);
    for run in &mut results.runs {
        (run.samples, run.counted.stages, run.histogram) = (Vec::new(), Vec::new(), Vec::new());
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

/// The text between two other texts.
fn between<'a>(page: &'a str, begin: &str, end: &str) -> &'a str {
    let rest = page.split_once(begin).unwrap_or_else(|| panic!("{begin}")).1;
    rest.split_once(end).unwrap_or_else(|| panic!("{end}")).0
}

/// The part of a report below a title.
fn section<'a>(page: &'a str, title: &str) -> &'a str {
    between(page, &format!("<h2>{title}</h2>"), "<h2>")
}

/// The cells of a placement's row in a part of a report.
fn cells<'a>(part: &'a str, placement: &str) -> Vec<&'a str> {
    let row =
        between(part, &format!("data-title=\"placement\"><span>{placement}</span></td>"), "</tr>");
    row.split("<span>").skip(1).map(|cell| cell.split_once("</span>").expect("it ends").0).collect()
}

#[test]
fn a_report_is_in_the_order_in_which_it_is_read() {
    let page = report(&synthetic::which_side());
    let mut places = vec![page.find("<p class=\"headline\">").expect("the first sentence")];
    for title in [
        "Response curves",
        "Bursts, and for good",
        "Tails",
        "Where the time goes",
        "What it costs",
        "Controls and bounds",
        "Every repeat",
        "What was published, and what was found here",
        "Placements",
        "Machine",
        "Do it again",
    ] {
        places.push(page.find(&format!("<h2>{title}</h2>")).unwrap_or_else(|| panic!("{title}")));
    }
    assert!(places.is_sorted(), "{places:?}");
    assert!(page.find("4k-80-20-large") > page.find("the workload that decides"));
}

#[test]
fn what_was_used_stands_cell_by_cell_with_each_node() {
    let results = synthetic::results(&[("bluestore-colocated", &[100.0, 101.0, 99.0])]);
    let page = report(&results);
    let part = section(&page, "Processors, memory and network");
    for title in ["lo sent", "received", "ceph-mon", "ceph-osd", "memory, %"] {
        assert!(part.contains(title), "{title}");
    }
    let rows: Vec<&str> =
        part.split("<tr>").filter(|row| row.contains("bluestore-colocated")).collect();
    let [row] = rows[..] else { panic!("one cell was measured: {part}") };
    let figures: Vec<&str> = row
        .split("<td class=\"n\">")
        .skip(1)
        .map(|cell| cell.split_once("</td>").expect("it ends").0)
        .collect();
    let means: Vec<Means> =
        results.runs.iter().filter_map(|run| Means::of(&run.samples, &results.machine)).collect();
    let means = Means::joined(&means).expect("samples");
    let (memory, flow) = (means.memory.expect("known"), means.network["lo"]);
    let wanted = [
        "2 × 1".to_string(),
        "16".into(),
        "1".into(),
        words::number(means.cpu.total_percent),
        words::number(means.cpu.mon_percent),
        words::number(means.cpu.osd_percent),
        words::number(memory.total_percent),
        words::number(memory.mon_percent),
        words::number(memory.osd_percent),
        words::number(flow.sent_bits_per_s / 1e6),
        words::number(flow.received_bits_per_s / 1e6),
        words::number(flow.total_bits_per_s() / 1e6),
    ];
    assert_eq!(figures, wanted);
}

#[test]
fn sizes_that_ran_are_listed_and_those_that_did_not_with_the_reason() {
    let mut results = synthetic::results(&[("bluestore-colocated", &[100.0, 101.0, 99.0])]);
    assert!(!report(&results).contains("Sizes of clusters"));
    let mut more: Vec<_> = results.runs.clone();
    for run in &mut more {
        (run.cell.osds_per_disk, run.testbed) = (2, run.testbed + 10);
    }
    more[0].invalid.push("an OSD has ended".into());
    results.runs.extend(more);
    let size = ClusterSize { disks: 4, osds_per_disk: 4 };
    let why = "16 OSDs on 2 processors".to_string();
    results.not_run_sizes.push(NotRunSize { size, why });
    let page = report(&results);
    let part = section(&page, "Sizes of clusters");
    let row = |size: &str| -> Vec<String> {
        let row = between(part, &format!("<span>{size}</span></td>"), "</tr>");
        row.split("<span>")
            .skip(1)
            .map(|cell| cell.split_once("</span>").expect("it ends").0.into())
            .collect()
    };
    assert_eq!(row("2 disks with 1 OSD on each")[..4], ["2", "3", "3", "0"]);
    assert_eq!(row("2 disks with 2 OSDs on each")[..4], ["4", "3", "3", "1"]);
    let missing = row("4 disks with 4 OSDs on each");
    assert_eq!((missing[1].as_str(), missing[6].as_str()), ("0", "16 OSDs on 2 processors"));
    assert!(
        section(&page, "What does not count")
            .contains("<strong>4 disks with 4 OSDs on each</strong>: 16 OSDs")
    );
    assert!(
        section(&page, "What does not count").contains("2 × 2 OSDs"),
        "the run that does not count"
    );
    assert!(section(&page, "Where the time goes").contains(" on 2 disks with 1 OSD on each"));
}

#[test]
fn saturation_is_marked_and_told_in_words() {
    let page = report(&synthetic::which_side());
    let curves = section(&page, "Response curves");
    assert!(curves.contains("class=\"ring c"));
    assert_eq!(cells(curves, "osd-tidepool")[0], "queue depth 16 with 1 client");
    assert_eq!(cells(curves, "bluestore-dbwal")[0], "not reached");
    assert!(cells(curves, "host-tidepool")[0].starts_with("not known: the client or the machine"));
    assert!(cells(curves, "host-tidepool")[1].starts_with("≥ "), "figures of the last point");
    let mut results = synthetic::which_side();
    results.runs.retain(|run| run.cell.depth == 16);
    let page = report(&results);
    assert!(section(&page, "Response curves").contains("Saturation: one point measured."));
    assert!(!page.contains("class=\"ring"));
}

#[test]
fn what_lasts_and_what_does_not_are_in_tables_of_their_own() {
    let mut results = synthetic::results(&[
        ("bluestore-colocated", &[100.0, 101.0, 99.0]),
        ("osd-tidepool", &[300.0, 303.0, 297.0]),
        ("host-tidepool", &[900.0, 910.0, 890.0]),
    ]);
    for run in results.runs.iter_mut().filter(|run| run.cell.placement == "host-tidepool") {
        synthetic::absorb(run, 3 << 29);
    }
    let page = report(&results);
    let spans = section(&page, "Bursts, and for good");
    let (lasting, bursts) = spans.split_once("For bursts: absorbing runs").expect("both");
    assert_eq!(cells(lasting, "host-tidepool"), ["0 of 3", "–", "–", "not measured"]);
    let [runs, iops, ratio, finding] = cells(lasting, "osd-tidepool")[..] else {
        panic!("four cells")
    };
    assert_eq!((runs, iops, finding), ("3 of 3", "300", "more"));
    assert!(ratio.starts_with("3.00 × ("), "{ratio}");
    assert!(!bursts.contains("<span>osd-tidepool"), "it absorbs nothing");
    let [runs, absorbed, remained, iops, ratio, _] = cells(bursts, "host-tidepool")[..] else {
        panic!("six")
    };
    assert_eq!((runs, absorbed, remained, iops), ("3 of 3", "0.041", "1.50", "900"));
    assert!(ratio.starts_with("9.00 × ("), "{ratio}");
    results.runs.iter_mut().for_each(|run| run.windows.clear());
    assert!(section(&report(&results), "Bursts, and for good").contains("lack the five windows"));
}

#[test]
fn tails_stand_with_what_limits_them() {
    let page = report(&synthetic::which_side());
    let tails = section(&page, "Tails");
    let [p50, p99, p999, spread, beyond, limit] = cells(tails, "bluestore-colocated")[..] else {
        panic!("six")
    };
    assert_eq!((p50, p99, p999, spread, beyond), ("86.0 ms", "397 ms", "695 ms", "4.62 ×", "12"));
    assert_eq!(limit, "store: read (61 % of a read's time)");
    let mut results = synthetic::results(&[("host-tidepool", &[900.0; 3])]);
    results.runs[1].lower_bound = Some("the client's processor was busy".into());
    results.runs[2].histogram.clear();
    let page = report(&results);
    let limited = cells(section(&page, "Tails"), "host-tidepool");
    assert!(limited[5].ends_with("; the client's processor was busy"), "{limited:?}");
    assert!(limited[4].contains("worst of the repeats"), "{limited:?}");
}

#[test]
fn money_is_told_only_at_a_price() {
    let results = synthetic::which_side();
    let page = report(&results);
    let without = section(&page, "What it costs");
    assert!(without.contains("No price was given") && !without.contains("price per IOPS"));
    assert_eq!(cells(without, "bluestore-colocated"), ["0", "42.0", "–", "–", "for good"]);
    assert_eq!(cells(without, "osd-tidepool"), ["2", "565", "283", "3.54", "for good"]);
    let [ssds, _, per_ssd, _, span] = cells(without, "host-tidepool-replicated")[..] else {
        panic!("five")
    };
    assert_eq!((ssds, per_ssd, span), ("2", "1,055", "bursts up to 95.1 MiB"));
    let prices =
        Prices::new(&results, &[price("120").expect("a price")]).expect("the suite's class");
    let page = html(&results, &verdict(&results), &prices);
    let with = section(&page, "What it costs");
    assert!(!with.contains("No price was given"));
    assert_eq!(cells(with, "osd-tidepool")[4..6], ["240", "0.42"]);
    assert_eq!(cells(with, "host-tidepool-replicated")[4], "240");
    assert_eq!(
        cells(with, "filestore-journal@ssd-sata-consumer")[4..6],
        ["–", "–"],
        "another class"
    );
    assert_eq!(cells(with, "bluestore-colocated")[4..6], ["–", "–"]);
}

#[test]
fn controls_and_bounds_stand_together_and_one_that_differs_is_told_on_top() {
    let page = report(&synthetic::which_side());
    let controls = section(&page, "Controls and bounds");
    for part in [
        "A/A",
        "pass-through",
        "the client's processor was busy for 97 % of the time",
        "class=\"yes\"",
    ] {
        assert!(controls.contains(part), "{part}");
    }
    assert!(!page.contains("an instrument that is off"));
    let of = |again: &[f64]| {
        report(&synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("bluestore-colocated+again", again),
        ]))
    };
    let off = of(&[130.0, 131.0, 129.0]);
    assert!(
        off.contains("an instrument that is off")
            && section(&off, "Controls and bounds").contains("class=\"no\"")
    );
    assert!(section(&of(&[]), "Controls and bounds").contains("was not measured twice"));
}

#[test]
fn every_run_has_a_row_also_one_that_does_not_count() {
    let results = synthetic::which_side();
    let page = report(&results);
    let every = section(&page, "Every repeat");
    let count = |text: &str| every.matches(text).count();
    assert_eq!(count("<td>yes</td>") + count("<td>no</td>"), results.runs.len());
    assert_eq!(count("<td>no</td>"), verdict(&results).invalid_runs);
    assert!(count("<td>absorbing</td>") > 0 && count("class=\"dot c") > 0);
}

#[test]
fn every_part_of_a_request_has_a_colour_in_light_and_in_dark_and_what_is_left_is_told() {
    for index in 0..crate::breakdown::Part::ALL.len() {
        assert_eq!(STYLE.matches(&format!("--h{index}:")).count(), 2, "{index}");
    }
    let page = report(&synthetic::which_side());
    assert!(
        section(&page, "Where the time goes")
            .contains("most: store: read, 61 %; not accounted: 8 %")
    );
}

/// Writes reports for people to look at: the whole suite with prices, and each kind of first
/// sentence in the quick form.
#[test]
#[ignore = "it writes reports for people to look at: TIDEPOOL_REPORTS names the directory"]
fn reports_to_look_at() {
    let directory =
        std::env::var_os("TIDEPOOL_REPORTS").expect("TIDEPOOL_REPORTS names a directory");
    let directory = std::path::PathBuf::from(directory);
    let write = |name: &str, page: String| {
        std::fs::write(directory.join(name).with_extension("html"), page).expect("a file")
    };
    let whole = synthetic::which_side();
    let given = ["120", "ssd-sata-consumer=49.5"].map(|text| price(text).expect("a price"));
    let prices = Prices::new(&whole, &given).expect("classes of the suite");
    write("whole", html(&whole, &verdict(&whole), &prices));
    let baseline = ("bluestore-colocated", &[100.0, 101.0, 99.0][..]);
    let again = ("bluestore-colocated+again", &[130.0, 131.0, 129.0][..]);
    let cache = |name, speeds| (name, speeds);
    for (name, speeds) in [
        ("do-not-cache", vec![baseline, cache("bluestore-dbwal", &[103.0, 102.0, 104.0][..])]),
        ("no-verdict", vec![baseline, again, cache("host-tidepool", &[900.0, 910.0, 890.0])]),
        ("winner", vec![baseline, cache("host-tidepool", &[900.0, 910.0, 890.0])]),
        (
            "no-winner",
            vec![
                baseline,
                cache("osd-tidepool", &[890.0, 880.0, 900.0]),
                cache("host-tidepool", &[900.0, 910.0, 890.0]),
            ],
        ),
    ] {
        let mut results = synthetic::results(&speeds);
        results.suite = results.suite.quick();
        results.quick = true;
        write(name, report(&results));
    }
}
