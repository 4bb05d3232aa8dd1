//! Ceph's cache tier.

use std::sync::atomic::AtomicBool;

use tidepool_cluster::Scratch;
use tidepool_lab::run::run;

use super::{assert_no_traces, faults, found, options, suite};

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_cache_tier_stands_in_front_of_the_pool_keeps_what_is_warm_and_is_written_back() {
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let lines = "set_bytes = 67108864\nplacements = [\"cache-tier\", \"bluestore-colocated\"]";
    let suite = suite(
        scratch.path(),
        "\"bluestore-colocated\", \"cache-tier\"",
        "replicas = 1\nosd_cache_bytes = 16777216",
        &[
            ("write", &format!("rw = \"randwrite\"\n{lines}")),
            ("mixed", &format!("rw = \"randrw\"\nread_percent = 80\n{lines}")),
        ],
    );
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &suite, &stop), &|_| ()).expect("it runs to its end");
    let mut proofs = results.testbeds.iter().flat_map(|testbed| testbed.proofs.values());
    let proof = proofs.find_map(|proof| proof.get("cache-tier")).expect("a proof");
    assert_eq!((&proof["cache_mode"], &proof["size"]), (&"writeback".into(), &1.into()), "{proof}");
    assert_eq!(proof["osds"], serde_json::json!([2]), "beside those of two disks");
    for workload in ["write", "mixed"] {
        let run = found(&results, "cache-tier", workload);
        assert_eq!(faults(run), "", "{workload}");
        let counted = &run.counted.placement["cache-tier"];
        assert!(
            counted["hit_blocks"].as_u64() > counted["miss_blocks"].as_u64(),
            "it was warm: {counted}"
        );
        let carried = |device: &str| match workload {
            "write" => run.counted.devices[device].written_bytes,
            _ => run.counted.devices[device].read_bytes,
        };
        assert!(
            carried("node0-ssd") > carried("disk0") + carried("disk1"),
            "{:?}",
            run.counted.devices
        );
    }
    let written =
        found(&results, "cache-tier", "write").drained.expect("what was dirty is written back");
    assert!(written.dirty_bytes >= written.hurried_bytes && written.dirty_bytes > 0, "{written:?}");
    let (tier, disks) =
        (found(&results, "cache-tier", "write"), found(&results, "bluestore-colocated", "write"));
    let (tier, disks) = (&tier.counted.devices, &disks.counted.devices);
    assert!(!tier.is_empty() && !disks.contains_key("node0-ssd"), "{disks:?}");
    assert_no_traces(scratch.path());
}
