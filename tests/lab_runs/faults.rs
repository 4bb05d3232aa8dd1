//! What happens under load: a device that dies, an OSD that stops, a scrub. What was acknowledged
//! and is not there is found.

use super::*;
use tidepool_lab::results::EventRun;

/// Clusters of three servers with an SSD each, on devices that are fast.
const SUITE: &str = "
name = \"small-faults\"
question = \"what is lost?\"
placements = [\"bluestore-colocated\", \"bluestore-dbwal\", \"host-tidepool\", \"host-tidepool-replicated\"]
baseline = \"bluestore-colocated\"
deciding = \"mixed\"
repeats = 1
seconds = 5
ramp_s = 1
[ground]
disk = \"ssd-sata-plp\"
disks = [3]
osds_per_disk = [1]
disk_bytes = 8589934592
ssd = \"nvme\"
ssd_bytes = 1073741824
replicas = 2
slowed_by = 1
servers = 3
delay_us = 10
image_bytes = 134217728
osd_cache_bytes = 16777216
ceph_conf = [\"mgr stats period = 1\", \"mgr tick period = 1\"]
[[workload]]
name = \"mixed\"
title = \"4 KiB random, half of it reads, each write with a flush\"
rw = \"randrw\"
read_percent = 50
block_bytes = 4096
depth = [4]
clients = [2]
sync = \"flush\"
access = \"nbd\"
set_bytes = 67108864
caches = \"warm\"
[[event]]
name = \"dies\"
kind = \"ssd-dies\"
workload = \"mixed\"
requests_per_s = 40
windows_before = 1
windows_after = 4
placements = [\"bluestore-dbwal\", \"host-tidepool\", \"host-tidepool-replicated\"]
[[event]]
name = \"stops\"
kind = \"osd-stops\"
workload = \"mixed\"
requests_per_s = 40
windows_before = 1
windows_after = 5
back_after = 2
placements = [\"bluestore-colocated\"]
[[event]]
name = \"scrub\"
kind = \"deep-scrub\"
workload = \"mixed\"
requests_per_s = 40
windows_before = 1
windows_after = 5
placements = [\"bluestore-colocated\"]
";

fn happened<'a>(results: &'a Results, event: &str, placement: &str) -> &'a EventRun {
    let of = |run: &&EventRun| run.event == event && run.cell.placement == placement;
    let found =
        results.events.iter().find(of).unwrap_or_else(|| panic!("{event} {placement} happened"));
    let nothing: Vec<String> = Vec::new();
    assert_eq!(found.invalid, nothing, "{event} {placement}");
    assert!(
        found.acknowledged.blocks > 50 && found.acknowledged.wrong_reads == 0,
        "{:?}",
        found.acknowledged
    );
    assert!(found.before().is_some_and(|before| before.p50_us.is_some() && before.failed == 0));
    found
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_was_acknowledged_and_is_lost_with_an_ssd_is_found_and_nothing_else_is_called_lost() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let path = scratch.join("small-faults.toml");
    fs::write(&path, SUITE).expect("a file");
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &path, &stop), &|_| ()).expect("it runs to its end");
    assert_eq!((results.not_run.len(), results.runs.len(), results.events.len()), (0, 0, 5));

    let server = happened(&results, "dies", "bluestore-dbwal");
    assert_eq!(
        server.acknowledged.lost,
        Some(0),
        "another server has a copy: {:?}",
        server.acknowledged
    );
    assert_eq!(
        (&server.what[..], &server.cluster.osds_ended[..]),
        ("node0-ssd fails every request", &[0][..])
    );
    assert!(
        server.cluster.osds_down == Some(1) && server.cluster.recovery.left_clean_s.is_some(),
        "{:?}",
        server.cluster.recovery
    );
    assert_eq!(
        server.cluster.recovery.clean_s, None,
        "nobody has replaced it, and it is not out yet"
    );

    let host = happened(&results, "dies", "host-tidepool");
    assert_eq!(host.what, "client-ssd fails every request");
    let lost = host.acknowledged.lost.expect("known");
    assert!(
        lost > 0 && lost < host.acknowledged.blocks,
        "one copy was there alone: {:?}",
        host.acknowledged
    );
    assert!(
        host.after().is_some_and(|after| after.failed > 0),
        "its guests get errors: {:?}",
        host.windows
    );
    assert_eq!(
        (host.cluster.osds_down, host.cluster.recovery.left_clean_s),
        (Some(0), None),
        "no OSD has noticed"
    );

    let pair = happened(&results, "dies", "host-tidepool-replicated");
    assert_eq!(
        pair.acknowledged.lost,
        Some(0),
        "the second hypervisor has a copy: {:?}",
        pair.acknowledged
    );
    assert!(
        pair.salvaged.is_some() && pair.cluster.recovery.left_clean_s.is_none(),
        "{:?}",
        pair.salvaged
    );

    let stops = happened(&results, "stops", "bluestore-colocated");
    assert_eq!((stops.acknowledged.lost, stops.cluster.osds_down), (Some(0), Some(1)));
    let (left, back) = (
        stops.cluster.recovery.left_clean_s.expect("it left"),
        stops.cluster.recovery.back_s.expect("it came back"),
    );
    assert!(left < back, "{:?}", stops.cluster.recovery);

    let scrub = happened(&results, "scrub", "bluestore-colocated");
    let scrubbed = scrub.cluster.scrub.expect("a scrub");
    assert!(scrubbed.groups >= 32 && scrubbed.scrubbed > 0, "{scrubbed:?}");
    assert_eq!((scrub.acknowledged.lost, scrub.cluster.osds_down), (Some(0), Some(0)));
    for event in &results.events {
        assert!(
            event.points.iter().filter(|point| point.health.is_some()).count()
                > event.points.len() / 2
        );
    }
    assert_no_traces(scratch.path());
}
