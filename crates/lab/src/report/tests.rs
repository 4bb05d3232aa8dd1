use super::*;
use crate::cost::price;
use crate::results::Durability;
use crate::synthetic;
use crate::verdict::verdict;

/// Elements that have no end.
const VOID: [&str; 3] = ["meta", "br", "!DOCTYPE"];

fn report(results: &Results) -> String {
    html(results, &verdict(results), &Prices::default())
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
    let mut results = synthetic::results(&[(nasty, &[100.0, 110.0]), ("bluestore-colocated", &[50.0, 51.0])]);
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

/// Reports to look at: the whole suite with prices, and each kind of first sentence in the quick form.
#[test]
#[ignore = "it writes reports for people to look at: TIDEPOOL_REPORTS names the directory"]
fn reports_to_look_at() {
    let directory = std::env::var_os("TIDEPOOL_REPORTS").expect("TIDEPOOL_REPORTS names a directory");
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
