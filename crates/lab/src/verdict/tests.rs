use super::*;
use crate::stats::Finding;
use crate::suite::{Expect, Measure, Published};
use crate::synthetic;

fn names(verdict: &Verdict) -> Vec<&str> {
    verdict
        .standings
        .rankings
        .iter()
        .flat_map(|r| &r.places)
        .map(|place| place.placement.as_str())
        .collect()
}

fn says(verdict: &Verdict, part: &str) -> bool {
    verdict.answer.iter().any(|sentence| sentence.contains(part))
}

#[test]
fn the_verdict_names_the_winner_by_how_much_and_with_which_certainty() {
    let results = synthetic::results(&[
        ("bluestore-colocated", &[100.0, 101.0, 99.0]),
        ("osd-tidepool", &[300.0, 303.0, 297.0]),
        ("host-tidepool", &[900.0, 910.0, 890.0]),
    ]);
    let verdict = verdict(&results);
    assert!(
        verdict.headline.starts_with("Cache in the hypervisor: 3.00 × (2.9")
            && verdict.headline.ends_with(
                ") the requests per second of a cache under the OSDs, for 4 KiB 80/20 that fits the SSD."
            ),
        "{}",
        verdict.headline
    );
    assert!(verdict.headline.chars().count() <= 160);
    assert_eq!(verdict.advice, Advice::Winner);
    assert!(verdict.answer[0].starts_with("In the hypervisor: host-tidepool wins with 3.00 × ("));
    assert!(verdict.answer[0].ends_with(
        "the requests per second of osd-tidepool, the second best. Both keep one copy of a write."
    ));
    assert!(says(&verdict, "Mean latency of host-tidepool is 0.33 × (0.3"));
    assert!(says(&verdict, "Against the baseline bluestore-colocated, host-tidepool has 9.00 ×"));
    assert!(says(&verdict, "queue depth 16, at one factor by which devices are slowed"));
    assert!(says(
        &verdict,
        "; 5 clusters of each placement, up to 8 where the order is open, runs of 60 s;"
    ));
    assert!(says(&verdict, "one copy: survives a crash"));
    assert!(verdict.caveat.expect("emulated").contains("by 8: relative order only"));
    assert_eq!(verdict.standings.rankings[0].places.len(), 3);
}

#[test]
fn two_that_cannot_be_told_apart_have_no_winner() {
    let of = |speeds: [&[f64]; 2]| {
        verdict(&synthetic::results(&[("a", speeds[0]), ("b", speeds[1])])).headline
    };
    assert!(
        of([&[100.0, 140.0, 90.0], &[100.0; 3]])
            .starts_with("No winner: a is ahead of b, 1.08 × (")
    );
    assert!(
        of([&[103.0, 102.0, 104.0], &[100.0; 3]])
            .starts_with("No winner: a and b are equally fast within 15 %, 1.03 × (")
    );
    assert_eq!(
        of([&[900.0], &[100.0]]),
        "No winner: a is ahead of b, 9.00 × (one cluster), but not with certainty, for 4 KiB 80/20 that fits the SSD."
    );
    assert_eq!(
        of([&[900.0; 3], &[]]),
        "No winner: only a has valid runs that can be ranked, for 4 KiB 80/20 that fits the SSD."
    );
    let one = verdict(&synthetic::results(&[("a", &[900.0]), ("b", &[100.0])]));
    assert_eq!(one.advice, Advice::NoWinner);
    assert!(says(&one, "one cluster has no interval; two are the least."));
    assert!(
        of([&[], &[0.0, f64::NAN]])
            .starts_with("No answer: no placement has a valid run of 4k-80-20")
    );
}

#[test]
fn volatile_controls_and_other_ssds_are_shown_and_never_win() {
    let mut results = synthetic::results(&[
        ("librbd-cache", &[9_000.0; 3]),
        ("osd-passthrough", &[100.0; 3]),
        ("filestore-journal@ssd-sata-consumer", &[7_000.0; 3]),
        ("host-tidepool", &[200.0; 3]),
        ("bluestore-colocated", &[100.0; 3]),
        ("filestore-journal", &[6_000.0; 3]),
    ]);
    for run in &mut results.runs {
        match run.cell.placement.as_str() {
            "librbd-cache" => run.durability = Durability::Volatile,
            "filestore-journal" => run.invalid.push("an OSD was down".into()),
            _ => {}
        }
    }
    let verdict = verdict(&results);
    assert_eq!(names(&verdict), ["host-tidepool", "bluestore-colocated"]);
    assert!(says(
        &verdict,
        "Not ranked: librbd-cache; it acknowledges writes that are in memory only."
    ));
    assert!(says(&verdict, "Not ranked: osd-passthrough; a control"));
    assert!(says(&verdict, "on another SSD than the others, ssd-sata-consumer"));
    assert!(says(
        &verdict,
        "Not ranked: filestore-journal; no valid run of 4k-80-20: an OSD was down."
    ));
    assert_eq!((verdict.runs, verdict.invalid_runs), (18, 3));
}

#[test]
fn placements_are_ranked_among_those_with_as_many_copies() {
    let mut results = synthetic::results(&[
        ("host-tidepool", &[900.0; 3]),
        ("bluestore-colocated", &[90.0; 3]),
        ("bluestore-dbwal", &[100.0; 3]),
        ("filestore-journal", &[50.0; 3]),
    ]);
    for run in &mut results.runs {
        if run.cell.placement.starts_with("bluestore") {
            run.durability = Durability::Replicated;
        }
    }
    let verdict = verdict(&results);
    assert_eq!(
        names(&verdict),
        ["bluestore-dbwal", "bluestore-colocated", "host-tidepool", "filestore-journal"]
    );
    assert!(
        verdict.headline.starts_with("No winner: a database on the SSD and"),
        "{}",
        verdict.headline
    );
    assert!(says(&verdict, "With one copy: In the hypervisor: host-tidepool wins"));
}

#[test]
fn a_second_copy_has_its_price_and_is_advised_where_a_write_has_to_survive_its_host() {
    let of = |copied: &[f64], under: &[f64]| {
        verdict(&synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("osd-tidepool", under),
            ("host-tidepool", &[900.0, 910.0, 890.0]),
            ("host-tidepool-replicated", copied),
        ]))
    };
    let fast = [720.0, 727.0, 713.0];
    let found = of(&fast, &[300.0, 301.0, 299.0]);
    assert!(found.headline.starts_with("Cache in the hypervisor: 3.00 × ("), "{}", found.headline);
    assert_eq!(found.answer[0], "Where a write has to survive its host: host-tidepool-replicated.");
    assert!(says(&found, "What the second copy costs: host-tidepool-replicated has 0.80 × ("));
    assert!(says(&found, "host-tidepool loses with its host, or with that host's SSD, what"));
    assert!(says(
        &found,
        "survive its host: host-tidepool-replicated. host-tidepool-replicated has 2.40 × ("
    ));
    assert!(!says(&found, "With two copies"), "{:?}", found.answer);
    assert_eq!(names(&found)[0], "host-tidepool-replicated", "those with most copies come first");
    let copy = found.standings.second_copy.expect("it was measured");
    assert_eq!(
        (copy.cost.against.as_str(), copy.cost.iops.finding),
        ("host-tidepool", Finding::Inconclusive)
    );

    // A cache under the OSDs survives the host as well, so nothing is advised that may be slower.
    let found = of(&fast, &[700.0, 300.0, 1_100.0]);
    assert_eq!(found.standings.second_copy.as_ref().expect("measured").recommended, None);
    assert!(says(
        &found,
        "survive its host: host-tidepool-replicated or osd-tidepool, which keeps nothing"
    ));
    assert!(!found.answer[0].contains("survive its host"), "{}", found.answer[0]);

    let one =
        verdict(&synthetic::results(&[("host-tidepool", &[9.0; 3]), ("osd-tidepool", &[3.0; 3])]));
    assert_eq!(one.standings.second_copy, None);
}

#[test]
fn what_was_not_measured_is_told() {
    let mut results =
        synthetic::results(&[("host-tidepool", &[900.0; 3]), ("bluestore-colocated", &[90.0; 3])]);
    let why = "openssl is not installed".to_string();
    results.not_run.push(NotRun::all("host-tidepool-replicated", why));
    results.runs.extend(
        (1..=3).map(|repeat| synthetic::run("host-tidepool", "4k-80-20", 32, repeat, 950.0)),
    );
    let verdict = verdict(&results);
    assert!(says(&verdict, "host-tidepool-replicated was not run: openssl is not installed."));
    assert!(says(&verdict, "Not ranked: bluestore-colocated; no valid run at depth 32"));
    assert!(says(&verdict, "osd-tidepool and librbd-cache; 4k-80-20 was not measured on it."));
    assert_eq!(names(&verdict), ["host-tidepool"]);
}

#[test]
fn a_claim_is_reproduced_refuted_or_open() {
    let tested = |expect: Expect, ours: &[f64]| {
        let mut results =
            synthetic::results(&[("host-tidepool", ours), ("osd-tidepool", &[100.0; 3])]);
        results.suite.directions.truncate(1);
        results.suite.directions[0].expect = Some(expect);
        verdict(&results).directions.remove(0)
    };
    let (fast, slow, same, vague, open) = (
        [200.0, 201.0, 199.0],
        [50.0, 50.5, 49.5],
        [100.0, 101.0, 99.0],
        [50.0, 300.0, 90.0],
        [112.0, 118.0, 122.0],
    );
    for (expect, ours, outcome) in [
        (Expect::More, fast, Outcome::Reproduced),
        (Expect::More, slow, Outcome::NotReproduced),
        (Expect::More, same, Outcome::NotReproduced),
        (Expect::More, vague, Outcome::Inconclusive),
        (Expect::Less, slow, Outcome::Reproduced),
        (Expect::Less, fast, Outcome::NotReproduced),
        (Expect::Same, same, Outcome::Reproduced),
        (Expect::Same, fast, Outcome::NotReproduced),
        // Certainly more, but perhaps by less than what matters.
        (Expect::Same, open, Outcome::Inconclusive),
    ] {
        let found = tested(expect, &ours);
        assert_eq!(found.outcome, outcome, "{expect:?} {}", found.evidence);
    }
    let evidence = tested(Expect::More, &fast).evidence;
    assert!(evidence.starts_with("200 against 100 requests per second."), "{evidence}");
    assert!(
        evidence.contains("Largest hop of osd-tidepool: store: read (61 % of a read's time)."),
        "{evidence}"
    );
    let missing = tested(Expect::More, &[]);
    assert_eq!(missing.outcome, Outcome::Inconclusive);
    assert!(
        missing
            .evidence
            .starts_with("Nothing to compare; host-tidepool and osd-tidepool have no valid runs"),
        "{}",
        missing.evidence
    );
}

#[test]
fn a_claim_about_a_latency_is_tested_by_it_and_stands_beside_what_was_published() {
    let tested = |metric: Measure, expect: Expect, ours: [f64; 3]| {
        let mut results =
            synthetic::results(&[("host-tidepool", &ours), ("osd-tidepool", &[100.0; 3])]);
        results.suite.directions.truncate(1);
        let direction = &mut results.suite.directions[0];
        (direction.metric, direction.expect) = (metric, Some(expect));
        direction.published = vec![Published { ratio: 0.18, at: Some("40 clients".into()) }];
        verdict(&results).directions.remove(0)
    };
    let (fast, slow) = ([200.0, 201.0, 199.0], [50.0, 50.5, 49.5]);
    for metric in [Measure::Mean, Measure::P99] {
        assert_eq!(tested(metric, Expect::Less, fast).outcome, Outcome::Reproduced, "{metric:?}");
        assert_eq!(
            tested(metric, Expect::Less, slow).outcome,
            Outcome::NotReproduced,
            "{metric:?}"
        );
        assert_eq!(tested(metric, Expect::More, slow).outcome, Outcome::Reproduced, "{metric:?}");
    }
    let found = tested(Measure::P99, Expect::Less, fast);
    let ms = "320 ms against 640 ms, the 99th percentile of the latency.";
    assert!(found.evidence.starts_with(ms), "{}", found.evidence);
    assert!(found.found().starts_with("0.50 × ("), "{}", found.found());
    assert_eq!(found.published(), "0.180 × at 40 clients");
    let found = tested(Measure::Bandwidth, Expect::More, fast);
    assert_eq!(found.outcome, Outcome::Reproduced);
    let bytes = "800 KiB/s against 400 KiB/s, the bandwidth.";
    assert!(found.evidence.starts_with(bytes), "{}", found.evidence);
    // A ratio of another size than the source's changes nothing: only the direction counts.
    assert_eq!(tested(Measure::P99, Expect::Less, [1e5; 3]).outcome, Outcome::Reproduced);
    let text = serde_json::to_string(&found).expect("plain data");
    assert!(text.contains(r#""published":[{"ratio":0.18,"at":"40 clients"}]"#), "{text}");
}

#[test]
fn the_whole_suite_has_a_verdict_that_can_be_written_as_json() {
    let found = verdict(&synthetic::which_side());
    assert!(
        found.headline.contains(": cache in the hypervisor, at least 4."),
        "{}",
        found.headline
    );
    assert!(
        found.headline.starts_with("For bursts up to ")
            && found.headline.contains(" For good: cache under the OSDs, "),
        "{}",
        found.headline
    );
    assert_eq!(found.advice, Advice::Winner);
    assert!(
        found.controls.len() == 2 && !found.controls.iter().any(Control::differs),
        "{:?}",
        found.controls
    );
    assert_eq!(found.answer[0], "Where a write has to survive its host: host-tidepool-replicated.");
    assert_eq!(found.directions.len(), 13);
    let has_ratio =
        |tested: &Tested| tested.ratio.as_ref().is_some_and(|ratio| ratio.ratio.is_some());
    assert!(found.directions.iter().all(has_ratio));
    assert!(serde_json::to_string(&found).is_ok_and(|text| !text.contains("null,null")));
    let empty = verdict(&synthetic::empty());
    assert!(empty.headline.starts_with("No answer") && empty.standings.rankings.is_empty());
}

#[test]
fn what_is_the_same_and_comes_out_as_different_leaves_no_verdict() {
    let of = |again: &[f64], passed_through: &[f64]| {
        verdict(&synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("bluestore-colocated+again", again),
            ("osd-passthrough", passed_through),
            ("host-tidepool", &[900.0, 910.0, 890.0]),
        ]))
    };
    let good = [100.0, 99.0, 101.0];
    let found = of(&good, &good);
    assert!(found.headline.starts_with("Cache in the hypervisor: "), "{}", found.headline);
    assert_eq!(names(&found), ["host-tidepool", "bluestore-colocated"], "controls are not ranked");
    assert!(says(
        &found,
        "The control bluestore-colocated+again came out as equal to bluestore-colocated (1.00"
    ));
    for (again, passed_through, culprit) in [
        ([129.0, 130.0, 128.0], good, "bluestore-colocated+again"),
        (good, [129.0, 130.0, 128.0], "osd-passthrough"),
        ([70.0, 71.0, 72.0], good, "bluestore-colocated+again"),
    ] {
        let found = of(&again, &passed_through);
        let begin = format!(
            "No verdict: The control {culprit} came out as different from bluestore-colocated ("
        );
        assert!(found.headline.starts_with(&begin), "{}", found.headline);
        assert_eq!(found.advice, Advice::NoVerdict);
        assert!(
            found.standings.rankings.is_empty()
                && found.standings.second_copy.is_none()
                && found.standings.lasting == Lasting::default()
        );
        assert!(
            !found.answer.iter().any(|sentence| sentence.contains("host-tidepool")),
            "{:?}",
            found.answer
        );
        assert!(found.directions.iter().all(|tested| tested.outcome == Outcome::Inconclusive));
    }
    // A control that shows nothing is reported, and does not prevent a verdict.
    let found = of(&[60.0, 180.0, 110.0], &[]);
    assert!(found.headline.starts_with("Cache in the hypervisor"), "{}", found.headline);
    assert!(says(
        &found,
        "shows neither that it is equal to bluestore-colocated nor that it is not"
    ));
    let without = verdict(&synthetic::results(&[
        ("bluestore-colocated", &good),
        ("host-tidepool", &[9.0; 3]),
    ]));
    assert!(says(&without, "bluestore-colocated was not measured twice"));
}

#[test]
fn a_ratio_of_absorbing_runs_never_stands_alone() {
    let absorbing = |names: &[&str]| {
        let mut results = synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("osd-tidepool", &[300.0, 303.0, 297.0]),
            ("host-tidepool", &[900.0, 910.0, 890.0]),
        ]);
        for run in &mut results.runs {
            if names.contains(&run.cell.placement.as_str()) {
                synthetic::absorb(run, 1 << 30);
            }
        }
        results
    };
    let found = verdict(&absorbing(&["host-tidepool"]));
    assert!(
        found.headline.starts_with("For bursts up to 41.7 MiB: cache in the hypervisor, 3.00 ×"),
        "{}",
        found.headline
    );
    assert!(
        found.headline.contains(" For good: cache under the OSDs, 3.00 × (")
            && found.headline.ends_with(" Load: 4 KiB 80/20 that fits the SSD."),
        "{}",
        found.headline
    );
    assert!(says(
        &found,
        "For bursts up to 41.7 MiB: In the hypervisor: host-tidepool wins with 3.00 ×"
    ));
    assert!(says(&found, " For good: In the OSDs' server: osd-tidepool wins with 3.00 × ("));
    assert!(says(
        &found,
        "host-tidepool was absorbing: it took 41.7 MiB of writes in a run, of which 1 GiB remained"
    ));
    assert!(says(
        &found,
        "For bursts and for good, since all runs were sustained: osd-tidepool and bluestore"
    ));
    assert_eq!(found.standings.lasting.for_good[0].places.len(), 2);
    let claim = &found.directions[0];
    assert!(
        claim.evidence.contains("That is for bursts up to 41.7 MiB; for good: –."),
        "{}",
        claim.evidence
    );

    let nothing = verdict(&absorbing(&["host-tidepool", "osd-tidepool", "bluestore-colocated"]));
    assert!(
        nothing.headline.ends_with(
            "For good: not measured, as no run was sustained. Load: 4 KiB 80/20 that fits the SSD."
        ),
        "{}",
        nothing.headline
    );
    // On one cluster of three the placement only absorbed: what lasts rests on the other two
    // clusters.
    let mut mixed = absorbing(&[]);
    synthetic::absorb(&mut mixed.runs[8], 1 << 30);
    let mixed = verdict(&mixed);
    assert!(
        mixed.headline.starts_with("For bursts up to")
            && mixed.headline.contains("For good: cache in the hyper")
    );
    let over = mixed.standings.lasting.for_good[0]
        .lead
        .as_ref()
        .expect("two")
        .iops
        .ratio
        .expect("a ratio");
    assert_eq!(over.count, 2);
}

#[test]
fn results_without_windows_are_not_said_to_last() {
    let mut results = synthetic::results(&[
        ("host-tidepool", &[900.0, 910.0, 890.0]),
        ("osd-tidepool", &[300.0; 3]),
    ]);
    results.runs.iter_mut().for_each(|run| run.windows.clear());
    let found = verdict(&results);
    assert!(found.headline.ends_with("; whether that lasts is not known."), "{}", found.headline);
    assert!(says(
        &found,
        "lack the five windows that show whether a run lasts, of host-tidepool and osd-tidepool"
    ));
    assert!(found.standings.lasting.for_good.is_empty() && found.directions[0].for_good.is_none());
}

#[test]
fn a_winner_that_turns_with_the_factor_is_not_measurable() {
    let mut results = synthetic::results(&[
        ("host-tidepool", &[900.0, 910.0, 890.0]),
        ("osd-tidepool", &[300.0, 301.0, 299.0]),
    ]);
    results.suite.ground.second_slowed_by = Some(8);
    let second = synthetic::results(&[
        ("host-tidepool", &[30.0, 31.0, 29.0]),
        ("osd-tidepool", &[300.0; 3]),
    ]);
    results.runs.extend(second.runs.into_iter().map(|mut run| {
        (run.cell.slowed_by, run.testbed) = (Some(8), run.testbed + 10);
        run
    }));
    let found = verdict(&results);
    assert!(
        found.headline.starts_with(
            "No winner: whether a cache in the hypervisor or a cache under the OSDs is faster turns"
        ),
        "{}",
        found.headline
    );
    assert!(says(
        &found,
        "No winner: host-tidepool against osd-tidepool is not measurable here: it turns"
    ));
    assert_eq!(found.directions[0].outcome, Outcome::NotMeasurable);
    assert!(says(&found, "with devices slowed by 4 and by 8"));
    assert!(undecided(&results).is_empty(), "more clusters do not help");
}
