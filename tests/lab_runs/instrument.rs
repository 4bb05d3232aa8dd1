//! The lab measures itself: a time that is added to one hop is found there, and nowhere else.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tidepool_cluster::Scratch;
use tidepool_lab::breakdown::{Hops, Part, breakdown};
use tidepool_lab::results::Run;
use tidepool_lab::run::{Options, run};
use tidepool_lab::testbed::{Added, Slow};
use tidepool_testkit::one_at_a_time;

use crate::{faults, found, options, suite};

/// What is added, and by how much what is found may differ from it, in microseconds.
const ADDED: Duration = Duration::from_millis(2);
const ADDED_US: f64 = 2_000.0;
const TOLERANCE_US: f64 = 200.0;

/// What a suite of [`suite`] compares with.
const BASELINE: &str = "bluestore-colocated";

/// The parts of a request by their names, what is not accounted included.
fn parts(run: &Run, writes: bool) -> BTreeMap<&'static str, f64> {
    let found = breakdown(run);
    let hops: Hops = if writes { found.writes } else { found.reads }.expect("its way is known");
    hops.parts.iter().map(|share| (share.part.title(), share.mean_us)).collect()
}

/// Measures requests one after the other, without and with what is added to a hop, and looks where
/// it is found.
#[track_caller]
fn is_found(hop: Slow, placement: &str, workload: &str, writes: bool, wanted: Part) {
    let _turn = one_at_a_time();
    let measured = |added| {
        let scratch = Scratch::new("instrument").expect("a directory");
        let load = format!(
            "rw = \"{workload}\"\nset_bytes = 268435456\nplacements = [\"{placement}\"]\ndepth = [1]"
        );
        let names = match placement {
            BASELINE => format!("\"{BASELINE}\""),
            other => format!("\"{BASELINE}\", \"{other}\""),
        };
        let suite = suite(
            scratch.path(),
            &names,
            "replicas = 1\nosd_cache_bytes = 67108864",
            &[("one", &load)],
        );
        let stop = AtomicBool::new(false);
        let results = run(Options { added, ..options(scratch.path(), &suite, &stop) }, &|_| ());
        let results = results.expect("it runs to its end");
        let run = found(&results, placement, "one").clone();
        assert_eq!(faults(&run), "");
        parts(&run, writes)
    };
    let (before, after) = (measured(None), measured(Some(Added { hop, time: ADDED })));
    println!("{hop:?}: {before:#?} {after:#?}");
    let total = |parts: &BTreeMap<&str, f64>| parts.values().sum::<f64>();
    let grown = total(&after) - total(&before);
    assert!((grown - ADDED_US).abs() <= 2.0 * TOLERANCE_US, "clients wait {grown:.0} µs longer");
    for part in Part::ALL {
        let of = |parts: &BTreeMap<&str, f64>| parts.get(part.title()).copied().unwrap_or(0.0);
        let grown = of(&after) - of(&before);
        let added = if part == wanted { ADDED_US } else { 0.0 };
        assert!(
            (grown - added).abs() <= TOLERANCE_US,
            "{}: {grown:.0} µs: {before:#?} {after:#?}",
            part.title()
        );
    }
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_added_to_the_network_is_found_there() {
    is_found(Slow::Network, BASELINE, "randread", false, Part::Network);
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_added_to_the_disks_is_found_there() {
    is_found(Slow::Disk, BASELINE, "randread", false, Part::StoreRead);
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_added_to_the_queues_of_osds_is_found_there() {
    is_found(Slow::OsdQueue, BASELINE, "randread", false, Part::OsdQueue);
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_added_to_the_ssd_of_a_cache_is_found_there() {
    is_found(Slow::Ssd, "host-tidepool", "randwrite", true, Part::CacheSsd);
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_added_to_the_second_copy_is_found_there() {
    is_found(Slow::SecondCopy, "host-tidepool-replicated", "randwrite", true, Part::Replica);
}
