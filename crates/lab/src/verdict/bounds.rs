//! Bounds: speeds that a cache cannot exceed. A cache under the OSDs that is much slower than its
//! bound shows a fault of the rig.

use serde::Serialize;

use super::lasting::{counted, steadiness};
use crate::results::Results;
use crate::stats::steady::Steadiness;
use crate::stats::{self, Ratio};
use crate::suite::Caches;
use crate::words;

/// The least part of its bound that a cache under the OSDs reaches, unless the rig is at fault.
const BOUND_PART_MIN: f64 = 0.5;
/// Largest part of the blocks read that a warm cache misses. A slowed disk takes hundreds of times
/// as long as a hit, so with more misses the disks bound the speed.
const MISSES_MAX: f64 = 0.005;

/// A placement with its bound.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bounded {
    /// The placement.
    pub placement: String,
    /// The bound: OSDs on SSDs, in guests if the placement's OSDs are in guests, or the
    /// hypervisor's SSD alone.
    pub bound: String,
    /// The workload.
    pub workload: String,
    /// Ratio of the placement's requests per second to those of the bound.
    pub iops: Ratio,
    /// The rig is at fault: a cache under the OSDs has less than half of its bound, although no
    /// disk is in its way and no request goes past it.
    pub rig_fault: bool,
}

impl Bounded {
    /// The sentence about a fault of the rig.
    pub(super) fn sentence(&self) -> String {
        let Bounded { placement, bound, workload, iops, .. } = self;
        format!(
            "A fault of the rig: in {workload} {placement} has {iops} the requests per second of {bound}, its bound."
        )
    }
}

/// Every placement with a cache and its bound, for each workload with warm caches in which both
/// were measured.
pub(super) fn bounds(results: &Results) -> Vec<Bounded> {
    let mut found = Vec::new();
    for workload in
        results.suite.workloads.iter().filter(|workload| workload.caches == Caches::Warm)
    {
        let placements = super::placements(results).into_iter();
        found
            .extend(placements.filter_map(|placement| bounded(results, placement, &workload.name)));
    }
    found
}

/// A placement with its bound in a workload. None where the placement has no bound, or where one of
/// the two was not measured.
pub(super) fn bounded(results: &Results, placement: &str, workload: &str) -> Option<Bounded> {
    let bound = match (words::under_osds(placement), words::on_host(placement)) {
        (true, false) if words::in_guests(placement) => words::GUEST_BOUND,
        (true, false) => words::OSD_BOUND,
        (false, true) => words::HOST_BOUND,
        _ => return None,
    };
    let settings = stats::settings(results, workload);
    let iops = stats::of_control(results, placement, bound, &settings);
    let part = iops.ratio?.value;
    // The disks bound a speed that lasts and a cache that misses, but not reads of cached data. A
    // request that goes past a cache is no fault of the rig.
    let found = results.suite.workload(workload)?;
    let misses = misses(results, placement, workload).is_some_and(|part| part > MISSES_MAX);
    let past_the_disks = !misses
        && match steadiness(results, placement, workload) {
            Steadiness::Absorbing { .. } => words::takes_all(placement, found.reads()),
            Steadiness::Sustained | Steadiness::Varying | Steadiness::Unknown => {
                !found.writes() && words::takes_all(placement, true)
            }
        };
    let rig_fault = past_the_disks && part < BOUND_PART_MIN;
    Some(Bounded {
        placement: placement.into(),
        bound: bound.into(),
        workload: workload.into(),
        iops,
        rig_fault,
    })
}

/// The part of the blocks read that the caches of a placement missed, over all runs that count.
/// None where the caches count nothing.
fn misses(results: &Results, placement: &str, workload: &str) -> Option<f64> {
    let found =
        counted(results, placement, workload).filter_map(|run| run.counted.placement.as_object());
    let (mut hits, mut missed) = (0.0, 0.0);
    for counters in found.flat_map(|placements| placements.values()) {
        hits += counters["hit_blocks"].as_f64().unwrap_or(0.0);
        missed += counters["miss_blocks"].as_f64().unwrap_or(0.0);
    }
    (hits + missed > 0.0).then(|| missed / (hits + missed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use crate::verdict::{Outcome, verdict};
    use serde_json::json;

    /// Results in which a cache under the OSDs has `under` requests per second and its bound has
    /// 1,000.
    fn results(under: f64, absorbs: bool) -> Results {
        let mut results = synthetic::results(&[
            ("bluestore-colocated", &[90.0; 3]),
            ("osd-tidepool", &[under; 3]),
            ("osd-on-ssd", &[1_000.0; 3]),
        ]);
        count(&mut results, 0);
        if absorbs {
            let under = results.runs.iter_mut().filter(|run| run.cell.placement == "osd-tidepool");
            under.for_each(|run| synthetic::absorb(run, 64 << 20));
        }
        results
    }

    /// Sets the counters of the cache under the OSDs: of 1,000 blocks read it missed `missed`.
    fn count(results: &mut Results, missed: u64) {
        let counted =
            json!({ "osd-tidepool": { "hit_blocks": 1_000 - missed, "miss_blocks": missed } });
        let under = results.runs.iter_mut().filter(|run| run.cell.placement == "osd-tidepool");
        under.for_each(|run| run.counted.placement = counted.clone());
    }

    #[test]
    fn a_cache_that_is_far_from_its_bound_is_a_fault_of_the_rig_unless_disks_bound_it() {
        for (under, absorbs, fault) in
            [(400.0, true, true), (600.0, true, false), (400.0, false, false)]
        {
            let found = verdict(&results(under, absorbs));
            assert_eq!(found.bounds.len(), 1, "{:?}", found.bounds);
            assert_eq!(found.bounds[0].rig_fault, fault, "{under} {absorbs}");
            let ranked = found.standings.rankings.iter().flat_map(|ranking| &ranking.places);
            let ranked: Vec<&str> = ranked.map(|place| place.placement.as_str()).collect();
            assert_eq!(ranked.contains(&"osd-tidepool"), !fault, "{ranked:?}");
            assert!(!ranked.contains(&"osd-on-ssd"), "{ranked:?}");
            let told = found
                .answer
                .iter()
                .any(|sentence| sentence.starts_with("A fault of the rig: in 4k-80-20"));
            assert_eq!(told, fault, "{:?}", found.answer);
            let against = found.directions.iter().find(|tested| {
                tested.direction.against.as_deref() == Some("osd-tidepool")
                    && tested.direction.workload == "4k-80-20"
            });
            let against = against.expect("a claim against it");
            assert_eq!(against.outcome == Outcome::NotMeasurable, fault, "{}", against.evidence);
            assert_eq!(
                against.evidence.contains("the rig keeps osd-tidepool"),
                fault,
                "{}",
                against.evidence
            );
        }
    }

    #[test]
    fn a_cache_that_misses_has_disks_in_its_way() {
        for (misses, fault) in [(4, true), (6, false)] {
            let mut found = results(400.0, true);
            count(&mut found, misses);
            assert_eq!(verdict(&found).bounds[0].rig_fault, fault, "{misses} of 1,000 missed");
        }
    }

    #[test]
    fn a_cache_in_a_guest_has_a_bound_in_a_guest_and_what_it_lets_past_is_no_fault() {
        let fault = |placement: &str, workload: &str| {
            let mut found = synthetic::results(&[
                (placement, &[400.0; 3]),
                ("osd-on-ssd", &[500.0; 3]),
                ("osd-guest-on-ssd", &[1_000.0; 3]),
            ]);
            for run in &mut found.runs {
                run.cell.workload = workload.into();
                run.counted.placement = serde_json::Value::Null;
                synthetic::absorb(run, 64 << 20);
            }
            let bounds = bounds(&found);
            let [bounded] = &bounds[..] else { panic!("one: {bounds:?}") };
            assert_eq!(bounded.bound, "osd-guest-on-ssd");
            bounded.rig_fault
        };
        assert!(fault("osd-bcache", "4k-80-20") && fault("osd-guest-tidepool", "4k-randwrite"));
        assert!(!fault("osd-bcache-default", "4k-80-20"), "it is made so");
        assert!(
            fault("osd-dm-writecache", "4k-randwrite") && !fault("osd-dm-writecache", "4k-80-20")
        );
    }

    #[test]
    fn reads_of_what_is_cached_wait_for_no_disk() {
        let mut found = results(400.0, false);
        for run in &mut found.runs {
            run.cell.workload = "4k-randread".into();
            run.writes = None;
        }
        let [bounded] = &bounds(&found)[..] else { panic!("one") };
        assert!(bounded.rig_fault, "{bounded:?}");
    }

    #[test]
    fn a_cache_in_the_hypervisor_is_beside_the_ssd_itself_and_never_a_fault() {
        let found =
            synthetic::results(&[("host-tidepool", &[100.0; 3]), ("ssd-raw", &[1_000.0; 3])]);
        let [bounded] = &bounds(&found)[..] else { panic!("one") };
        assert_eq!((bounded.bound.as_str(), bounded.rig_fault), ("ssd-raw", false));
    }
}
