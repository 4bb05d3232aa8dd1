use super::*;
use crate::synthetic;

fn near(value: f64, wanted: f64) -> bool {
    (value / wanted - 1.0).abs() < 1e-3
}

fn ratio(results: &Results, placement: &str, against: &str) -> Ratio {
    let settings = settings(results, "4k-80-20");
    paired(results, placement, against, &settings, Metric::Iops)
}

#[test]
fn the_interval_is_students_on_the_logarithms() {
    // Ratios 2, 4, 8: logarithms 1, 2, 3 times ln 2; mean 2, deviation 1, t for 2 degrees 4.3027.
    let mut results =
        synthetic::results(&[("a", &[200.0, 400.0, 800.0]), ("b", &[100.0, 100.0, 100.0])]);
    results.suite.repeats_max = None;
    let found = ratio(&results, "a", "b");
    let estimate = found.ratio.expect("a ratio");
    let half = 4.302_653 / 3f64.sqrt();
    let (low, high) = estimate.interval.expect("an interval");
    assert!(near(estimate.value, 4.0) && estimate.count == 3);
    assert!(near(low, 2f64.powf(2.0 - half)) && near(high, 2f64.powf(2.0 + half)), "{low} {high}");
    assert_eq!(found.finding, Finding::Inconclusive, "three that far apart say nothing");
    assert!(near(found.first.expect("a") / found.second.expect("b"), 4.0));
}

#[test]
fn more_less_and_the_same_are_findings_of_the_whole_interval() {
    for (ours, finding) in [
        ([200.0, 202.0, 198.0, 201.0], Finding::More),
        ([50.0, 51.0, 49.0, 50.0], Finding::Less),
        ([101.0, 99.0, 100.0, 103.0], Finding::Same),
        ([90.0, 130.0, 80.0, 140.0], Finding::Inconclusive),
        ([112.0, 118.0, 122.0, 113.0], Finding::More),
        // Certainly more, but too little to matter.
        ([105.0, 105.1, 105.0, 105.1], Finding::Same),
    ] {
        let results = synthetic::results(&[("a", &ours), ("b", &[100.0; 4])]);
        let found = ratio(&results, "a", "b");
        assert_eq!(found.finding, finding, "{ours:?} {found}");
        assert_eq!(found.why.is_some(), finding == Finding::Inconclusive);
    }
}

#[test]
fn a_pair_is_of_one_cluster_and_fewer_than_two_say_nothing() {
    let mut results =
        synthetic::results(&[("a", &[200.0, 210.0, 1.0]), ("b", &[100.0, 105.0, 100.0])]);
    // The third cluster has no run of `b`.
    results.runs.retain(|run| run.cell.placement == "a" || run.repeat != 3);
    let found = ratio(&results, "a", "b");
    assert_eq!(
        (found.ratio.expect("one").count, found.finding),
        (2, Finding::More),
        "the third has no partner"
    );
    results.runs.retain(|run| run.repeat == 1);
    let found = ratio(&results, "a", "b");
    assert!(found.why.expect("why").contains("one cluster has no interval"));
    assert_eq!(found.ratio.and_then(|ratio| ratio.interval), None);
    let nothing = ratio(&results, "a", "c");
    assert!(
        nothing.ratio.is_none() && nothing.why.expect("why").contains("a and c have no valid runs")
    );
}

#[test]
fn runs_that_are_invalid_or_did_nothing_never_count() {
    let mut results =
        synthetic::results(&[("a", &[200.0, 200.0, 9_000.0, 0.0, f64::NAN]), ("b", &[100.0; 5])]);
    results.runs[2].invalid.push("an OSD was down".into());
    let found = ratio(&results, "a", "b");
    assert_eq!(
        (found.ratio.map(|ratio| (ratio.value.round(), ratio.count)), found.finding),
        (Some((2.0, 2)), Finding::More)
    );
    let all: Vec<&Run> = results.runs.iter().filter(|run| run.cell.placement == "a").collect();
    let summary = summary(&all);
    assert_eq!((summary.valid, summary.invalid), (2, 3));
    assert_eq!(objections(all[3]), ["no request was completed"]);
    assert_eq!(super::summary(&[all[3], all[4]]).iops, None);
}

#[test]
fn a_limit_from_outside_leaves_one_direction() {
    let limited = |ours: f64, placement: &str| {
        let mut results = synthetic::results(&[("a", &[ours; 3]), ("b", &[100.0; 3])]);
        let runs = results.runs.iter_mut().filter(|run| run.cell.placement == placement);
        runs.for_each(|run| run.lower_bound = Some("the client".into()));
        ratio(&results, "a", "b")
    };
    let found = limited(200.0, "a");
    assert_eq!((found.bound, found.finding), (Bound::AtLeast, Finding::More));
    assert_eq!(found.to_string(), "at least 2.00 × (2.00–2.00)");
    assert_eq!(limited(50.0, "a").finding, Finding::Inconclusive, "it might have been more");
    assert_eq!(limited(100.0, "a").finding, Finding::Inconclusive, "nor is it the same");
    assert_eq!(
        (limited(50.0, "b").bound, limited(50.0, "b").finding),
        (Bound::AtMost, Finding::Less)
    );
    assert_eq!(limited(200.0, "b").finding, Finding::Inconclusive);
    let mut results = synthetic::results(&[("a", &[200.0; 3]), ("b", &[100.0; 3])]);
    results.runs.iter_mut().for_each(|run| run.lower_bound = Some("the client".into()));
    let found = ratio(&results, "a", "b");
    assert_eq!((found.bound, found.finding), (Bound::Unknown, Finding::Inconclusive));
    results
        .runs
        .iter_mut()
        .filter(|run| run.cell.placement == "b")
        .for_each(|run| run.lower_bound = None);
    let latency = paired(&results, "a", "b", &settings(&results, "4k-80-20"), Metric::Mean);
    assert_eq!(
        (latency.bound, latency.finding),
        (Bound::AtMost, Finding::Less),
        "latency goes the other way"
    );
}

#[test]
fn nothing_wins_by_having_fewer_copies() {
    let found = |ours: Durability, theirs: Durability, iops: f64| {
        let mut results = synthetic::results(&[("a", &[iops; 3]), ("b", &[100.0; 3])]);
        for run in &mut results.runs {
            run.durability = if run.cell.placement == "a" { ours } else { theirs };
        }
        ratio(&results, "a", "b")
    };
    use Durability::{OneCopy, Replicated, Volatile};
    assert!(
        found(Volatile, OneCopy, 900.0)
            .why
            .expect("why")
            .contains("a acknowledges writes that are in memory only")
    );
    assert_eq!(found(Volatile, Volatile, 900.0).finding, Finding::Inconclusive);
    assert_eq!(found(OneCopy, Volatile, 50.0).finding, Finding::Inconclusive);
    assert!(
        found(OneCopy, Replicated, 900.0).why.expect("why").contains("a has one copy of a write")
    );
    assert_eq!(found(OneCopy, Replicated, 100.0).finding, Finding::Inconclusive);
    assert_eq!(found(Replicated, OneCopy, 900.0).finding, Finding::More, "safer and faster");
    assert_eq!(found(OneCopy, Replicated, 50.0).finding, Finding::Less);
}

#[test]
fn over_several_loads_a_cluster_counts_once_and_only_if_it_is_whole() {
    let mut results = synthetic::results(&[("a", &[200.0, 200.0, 200.0]), ("b", &[100.0; 3])]);
    for (placement, iops) in [("a", 800.0), ("b", 100.0)] {
        results
            .runs
            .extend((1..=3).map(|repeat| synthetic::run(placement, "4k-80-20", 32, repeat, iops)));
    }
    let found = ratio(&results, "a", "b").ratio.expect("a ratio");
    assert!(near(found.value, 4.0) && found.count == 3, "{found:?}");
    results.runs.pop();
    let found = ratio(&results, "a", "b").ratio.expect("a ratio");
    assert!(
        near(found.value, 4.0) && found.count == 2,
        "the third cluster lacks a depth: {found:?}"
    );
}

#[test]
fn without_pairs_the_interval_is_welchs() {
    // The variances of the logarithms are 1 and 0, with three values each: two degrees of freedom.
    let e = std::f64::consts::E;
    let of = |placement: &str, speeds: [f64; 3], from: u32| {
        let run =
            |(at, iops)| Run { testbed: at, ..synthetic::run(placement, "4k-80-20", 1, 1, iops) };
        (from..).zip(speeds).map(run).collect::<Vec<Run>>()
    };
    let (first, second) = (of("b", [100.0, 100.0 * e, 100.0 * e * e], 1), of("a", [100.0; 3], 11));
    let of_two = |one: &[Run], two: &[Run], alpha: f64| {
        let [one, two] = [one, two].map(|runs| runs.iter().collect::<Vec<&Run>>());
        unpaired(["b", "a"], &one, &two, Metric::Iops, alpha)
    };
    let found = of_two(&first, &second, 0.05);
    let estimate = found.ratio.expect("a ratio");
    let half = 4.302_653 / 3f64.sqrt();
    assert!(near(estimate.value, e) && near(estimate.interval.expect("one").1, (1.0 + half).exp()));
    let narrower = of_two(&first, &second, 0.2).ratio.expect("a ratio").interval.expect("one");
    assert!(narrower.1 < estimate.interval.expect("one").1, "the level is heeded");
    // Placements of one document on different clusters have no pairs either.
    let results = synthetic::empty().with_runs([first.clone(), second.clone()].concat());
    let within = ratio(&results, "b", "a").ratio.expect("a ratio");
    let widest = |found: &Estimate| found.interval.expect("one").1;
    assert!(near(within.value, estimate.value), "{within}");
    assert!(
        widest(&within) > widest(&estimate),
        "the first look of several has a part of the error"
    );
    let same = of_two(&second, &second, 0.05);
    assert_eq!(
        (same.finding, same.ratio.expect("one").interval),
        (Finding::Same, Some((1.0, 1.0)))
    );
    assert_eq!(of_two(&first[..1], &second, 0.05).finding, Finding::Inconclusive);
    assert_eq!(of_two(&[], &[], 0.05).ratio, None);
}

#[test]
fn repeats_on_one_cluster_count_as_one() {
    let mut results =
        synthetic::results(&[("a", &[200.0, 205.0, 195.0, 210.0]), ("b", &[100.0; 4])]);
    for run in &mut results.runs {
        run.testbed = if run.cell.placement == "a" { 1 } else { 2 };
    }
    let found = ratio(&results, "a", "b");
    assert_eq!(
        (found.finding, found.ratio.and_then(|found| found.interval)),
        (Finding::Inconclusive, None)
    );
    // Two clusters with two runs each give two observations: the means of the logarithms.
    for run in &mut results.runs {
        run.testbed += 10 * (run.repeat % 2);
    }
    let estimate = ratio(&results, "a", "b").ratio.expect("a ratio");
    assert_eq!(estimate.count, 2);
    assert!(near(estimate.value, (200.0f64 * 205.0 * 195.0 * 210.0).powf(0.25) / 100.0));
    let runs: Vec<&Run> = results.runs.iter().filter(|run| run.cell.placement == "a").collect();
    assert_eq!(summary(&runs).iops.expect("a figure").count, 2);
}

#[test]
fn a_direction_counts_only_if_it_is_found_at_both_factors() {
    let at = |here: [f64; 3], there: [f64; 3]| {
        let mut results = synthetic::results(&[("a", &here), ("b", &[100.0; 3])]);
        results.suite.ground.second_slowed_by = Some(8);
        let mut second = synthetic::results(&[("a", &there), ("b", &[100.0; 3])]);
        for run in &mut second.runs {
            (run.cell.slowed_by, run.testbed) = (Some(8), run.testbed + 10);
        }
        results.runs.extend(second.runs);
        ratio(&results, "a", "b")
    };
    let (more, less, same, vague) =
        ([200.0, 202.0, 198.0], [50.0, 51.0, 49.0], [100.0, 101.0, 99.0], [60.0, 150.0, 110.0]);
    for (here, there, finding, says) in [
        (more, more, Finding::More, None),
        (less, less, Finding::Less, None),
        (same, same, Finding::Same, None),
        (more, less, Finding::Turns, Some("not measurable here: it turns")),
        (less, more, Finding::Turns, Some("not measurable here: it turns")),
        (more, same, Finding::Inconclusive, Some("slowed by 4 (2.00")),
        (more, vague, Finding::Inconclusive, Some("and not with devices slowed by 8")),
        (vague, more, Finding::Inconclusive, Some("the interval has both")),
    ] {
        let found = at(here, there);
        assert_eq!(found.finding, finding, "{here:?} {there:?}");
        assert_eq!(found.ratio.map(|found| found.count), Some(3), "the factors are not mixed");
        assert!(found.at_second_factor.is_some());
        assert_eq!(found.why.is_some(), says.is_some());
        assert!(
            says.is_none_or(|says| found.why.as_ref().is_some_and(|why| why.contains(says))),
            "{found:?}"
        );
    }
}

#[test]
fn percentiles_are_those_of_all_requests_together() {
    let mut runs = [1, 2].map(|repeat| synthetic::run("a", "4k-80-20", 1, repeat, 100.0));
    // One run has 900 fast requests, the other run has 90 slow requests of 100. The median is fast,
    // the 99th percentile slow.
    runs[0].histogram = vec![(1_000, 890), (2_000, 10)];
    runs[1].histogram = vec![(2_000, 10), (9_000_000, 90)];
    let both = merged(&runs.each_ref()).expect("both say");
    assert_eq!(both, [(1_000, 890), (2_000, 20), (9_000_000, 90)]);
    assert_eq!(
        (percentile_us(&both, 500), percentile_us(&both, 890), percentile_us(&both, 891)),
        (Some(1.0), Some(1.0), Some(2.0))
    );
    assert_eq!(
        (percentile_us(&both, 990), percentile_us(&both, 1000)),
        (Some(9_000.0), Some(9_000.0))
    );
    assert_eq!((percentile_us(&[], 500), percentile_us(&[(5, 0)], 500)), (None, None));
    assert_eq!(percentile_us(&[(1, u64::MAX), (2_000, u64::MAX)], 990), Some(2.0));
    runs[0].histogram.clear();
    assert_eq!(merged(&runs.each_ref()), None, "what is missing would not be seen");
    let worst =
        runs.each_ref().map(|run| run.figures.p99_us).into_iter().flatten().reduce(f64::max);
    assert_eq!(summary(&runs.each_ref()).p99_us, worst, "the worst repeat, and no average");
}
