use super::*;
use crate::synthetic;

/// The verdict on placements with requests per second in bursts and, unless there are none, in
/// sustained runs on clusters of their own.
fn of(speeds: &[(&str, &[f64], &[f64])]) -> Verdict {
    let bursts: Vec<(&str, &[f64])> =
        speeds.iter().map(|(name, bursts, _)| (*name, *bursts)).collect();
    let mut results = synthetic::results(&bursts);
    for run in &mut results.runs {
        synthetic::absorb(run, 1 << 30);
    }
    for (placement, _, lasting) in speeds {
        for (repeat, &iops) in (11..).zip(lasting.iter()) {
            results.runs.push(synthetic::run(placement, "4k-80-20", 16, repeat, iops));
        }
    }
    verdict(&results)
}

const BASELINE: [f64; 3] = [100.0, 101.0, 99.0];

fn sustained(placement: &str, speeds: &[f64]) -> Verdict {
    verdict(&synthetic::results(&[("bluestore-colocated", &BASELINE), (placement, speeds)]))
}

#[test]
fn no_cache_is_advised_where_none_is_better_than_no_ssd() {
    for (speeds, ratio) in [
        ([103.0, 102.0, 104.0], "1.03 × ("),
        ([70.0, 71.0, 69.0], "0.70 × ("),
        ([100.0, 98.0, 102.0], "1.00 × ("),
    ] {
        let found = sustained("bluestore-dbwal", &speeds);
        let begin = format!("Do not cache: at best, a database on the SSD has {ratio}");
        assert!(found.headline.starts_with(&begin), "{}", found.headline);
        let end = "the requests per second of BlueStore without an SSD, for 4 KiB 80/20 that fits the SSD.";
        assert!(found.headline.ends_with(end), "{}", found.headline);
        assert!(found.headline.chars().count() <= 180, "{}", found.headline);
        assert_eq!(found.advice, Advice::DoNotCache);
    }
}

#[test]
fn what_may_be_better_is_no_reason_not_to_cache() {
    // A cache that is better, or that may be better.
    for (speeds, advice) in [
        ([130.0, 131.0, 129.0], Advice::Winner),
        ([90.0, 160.0, 120.0], Advice::NoWinner),
        ([100.0, 95.0, 105.0], Advice::NoWinner),
        ([113.0, 118.0, 121.0], Advice::Winner),
    ] {
        assert_eq!(sustained("bluestore-dbwal", &speeds).advice, advice, "{speeds:?}");
    }
    // One cluster shows nothing, and neither does a run that the client limited.
    assert_eq!(sustained("bluestore-dbwal", &[90.0]).advice, Advice::NoWinner);
    let mut limited =
        synthetic::results(&[("bluestore-colocated", &BASELINE), ("host-tidepool", &BASELINE)]);
    limited.runs.iter_mut().filter(|run| run.cell.placement == "host-tidepool").for_each(|run| {
        run.lower_bound = Some("the client's processor was busy".into());
    });
    assert_eq!(verdict(&limited).advice, Advice::NoWinner);
    // The client may have been the limit only with devices slowed by the second factor.
    let mut second =
        synthetic::results(&[("bluestore-colocated", &BASELINE), ("host-tidepool", &BASELINE)]);
    second.suite.ground.second_slowed_by = Some(8);
    let mut slower = second.runs.clone();
    for run in &mut slower {
        (run.cell.slowed_by, run.testbed) = (Some(8), run.testbed + 10);
    }
    second.runs.extend(slower);
    assert_eq!(verdict(&second).advice, Advice::DoNotCache);
    for run in second.runs.iter_mut().filter(|run| run.cell.slowed_by.is_some()) {
        if run.cell.placement == "host-tidepool" {
            run.lower_bound = Some("the client's processor was busy".into());
        }
    }
    assert_eq!(verdict(&second).advice, Advice::NoWinner);
    // One cache of several that is worth it is enough.
    let one = verdict(&synthetic::results(&[
        ("bluestore-colocated", &BASELINE),
        ("bluestore-dbwal", &BASELINE),
        ("osd-tidepool", &[200.0, 201.0, 199.0]),
    ]));
    assert!(one.headline.starts_with("Cache under the OSDs: "), "{}", one.headline);
    // Where no cache was measured, there is nothing to be said against a cache.
    assert_eq!(sustained("filestore-colocated", &[50.0, 51.0, 49.0]).advice, Advice::Winner);
    // A baseline on an SSD shows nothing about a cluster without an SSD.
    let mut on_ssd = synthetic::results(&[
        ("bluestore-dbwal", &BASELINE),
        ("osd-tidepool", &[50.0, 51.0, 49.0]),
    ]);
    on_ssd.suite.baseline = "bluestore-dbwal".into();
    assert_eq!(verdict(&on_ssd).advice, Advice::Winner);
}

#[test]
fn what_is_better_in_bursts_alone_is_advised_for_bursts_alone() {
    let (fast, four) = ([3_000.0, 3_030.0, 2_970.0], [100.0, 101.0, 99.0, 100.0]);
    let measured = |lasting: &[f64]| {
        of(&[("bluestore-colocated", &[], &four), ("host-tidepool", &fast, lasting)])
    };
    let found = measured(&[101.0, 102.0, 100.0, 101.0]);
    let begin = "Cache only for bursts: up to 139.2 MiB a cache in the hypervisor has 30.0 × (";
    assert!(found.headline.starts_with(begin), "{}", found.headline);
    let end = "), for 4 KiB 80/20 that fits the SSD.";
    assert!(
        found.headline.contains("BlueStore without an SSD, for good 1.01 × (1."),
        "{}",
        found.headline
    );
    assert!(found.headline.ends_with(end), "{}", found.headline);
    assert_eq!(found.advice, Advice::OnlyBursts);

    let slower = measured(&[71.0, 72.0, 70.0, 71.0]);
    assert_eq!(slower.advice, Advice::OnlyBursts, "{}", slower.headline);
    assert!(slower.headline.contains(", for good 0.71 × ("), "{}", slower.headline);
    for (lasting, why) in [
        (&[][..], "what lasts was not measured"),
        (&[100.0], "one cluster does not show that nothing lasts"),
        (&[200.0, 201.0, 199.0, 200.0], "it is better for good as well"),
        (&[70.0, 160.0, 100.0, 130.0], "it may be better for good"),
    ] {
        let found = measured(lasting);
        assert_ne!(found.advice, Advice::OnlyBursts, "{why}: {}", found.headline);
        assert_ne!(found.advice, Advice::DoNotCache, "{why}: {}", found.headline);
    }
    // If another cache is worth it for good, the advice is to take it.
    let other = of(&[
        ("bluestore-colocated", &[], &four),
        ("host-tidepool", &fast, &[101.0, 102.0, 100.0, 101.0]),
        ("osd-tidepool", &[], &[300.0, 303.0, 297.0, 300.0]),
    ]);
    assert_eq!(other.advice, Advice::Winner, "{}", other.headline);
    // If another cache may be worth it, the advice is not that none is.
    let open = of(&[
        ("bluestore-colocated", &[], &four),
        ("host-tidepool", &fast, &[101.0, 102.0, 100.0, 101.0]),
        ("osd-tidepool", &[], &[70.0, 160.0, 100.0, 130.0]),
    ]);
    assert_ne!(open.advice, Advice::OnlyBursts, "{}", open.headline);
}

#[test]
fn a_cache_that_is_no_better_in_its_bursts_is_not_advised_for_them() {
    let found = of(&[
        ("bluestore-colocated", &[], &[100.0, 101.0, 99.0, 100.0]),
        ("host-tidepool", &[102.0, 103.0, 101.0], &[]),
    ]);
    assert!(
        found.headline.starts_with("Do not cache, not even for bursts: up to "),
        "{}",
        found.headline
    );
    assert!(
        found.headline.contains(", for good nobody has measured it, for 4 KiB"),
        "{}",
        found.headline
    );
    assert_eq!(found.advice, Advice::DoNotCache);
}

#[test]
fn two_caches_that_are_equally_fast_are_still_said_to_be_faster_than_none() {
    let of = |second: &[f64]| {
        verdict(&synthetic::results(&[
            ("bluestore-colocated", &BASELINE),
            ("osd-tidepool", &[300.0, 303.0, 297.0]),
            ("host-tidepool", second),
        ]))
    };
    let found = of(&[306.0, 309.0, 303.0]);
    assert!(found.headline.starts_with("No winner: a cache in the hypervisor and a cache under the OSDs are equally fast within 15 %, 1.02 × ("), "{}", found.headline);
    assert!(
        found.headline.contains("); both are faster than no SSD, for 4 KiB 80/20"),
        "{}",
        found.headline
    );
    assert_eq!(found.advice, Advice::NoWinner);
    let open = of(&[250.0, 700.0, 300.0]);
    assert!(
        open.headline.contains("is ahead of a cache under the OSDs, 1.25 × ("),
        "{}",
        open.headline
    );
}
