//! OSDs in guests: they take part, what they flush is flushed, their caches are what they are to
//! be, and nothing is left of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidepool_cluster::Scratch;
use tidepool_cluster::device::{Counts, preset};
use tidepool_lab::placement::{Arrangement, PlacementError};
use tidepool_lab::results::Results;
use tidepool_lab::testbed::{Layout, Ssds, Testbed};
use tidepool_testkit::one_at_a_time;

use super::{assert_no_traces, end, faults, lab_run, lines, start, suite};

/// Longest wait for the end of processes that were killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A testbed with a disk, an SSD in its server, and one OSD.
fn testbed(parent: &Path, placement: &str) -> Testbed {
    let arrangement = Arrangement::parse(placement).expect("a placement");
    arrangement.probe(tidepool_cluster::ceph::release()).expect("it is possible here");
    let layout = Layout {
        disk: preset::find("hdd-7200").expect("a preset"),
        disks: 1,
        osds_per_disk: 1,
        disk_bytes: 8 << 30,
        ssd: Some((preset::find("ssd-sata-plp").expect("a preset"), 1 << 30)),
        ssds: Ssds::of([&arrangement], 1),
        hypervisors: 1,
        replicas: 1,
        slowed_by: 1,
        servers: 1,
        network: true,
        delay: None,
        ssd_shares: 1,
        ceph_conf: Vec::new(),
    };
    let program = tidepool_testkit::daemon::tidepool().expect("the program");
    let testbed = Testbed::up(parent, program, &layout, &arrangement);
    testbed.expect("a cluster with its OSD in a guest")
}

/// A counter of a placement.
fn counter(testbed: &Testbed, placement: &str, name: &str) -> u64 {
    let counters = testbed.counters().expect("counters");
    counters[placement][name].as_u64().unwrap_or_else(|| panic!("{name}: {counters:?}"))
}

/// What an emulated device has done.
fn counts(testbed: &Testbed, device: &str) -> Counts {
    testbed.counts()[device]
}

/// Has whole objects of so many bytes written for some seconds, so many at a time; returns how
/// many.
fn write_objects(testbed: &Testbed, seconds: u32, bytes: u64, depth: u32) -> u64 {
    let [seconds, bytes, depth] =
        [seconds.into(), bytes, depth.into()].map(|number: u64| number.to_string());
    let words = ["bench", &seconds, "write", "-b", &bytes, "-t", &depth, "--no-cleanup"];
    let told = testbed.cluster().rados(&words).expect("a load");
    let writes =
        told.lines().find_map(|line| line.strip_prefix("Total writes made:")?.trim().parse().ok());
    writes.unwrap_or_else(|| panic!("how many it wrote: {told}"))
}

/// What an OSD says of itself.
fn metadata(testbed: &Testbed) -> Value {
    let text =
        testbed.cluster().ceph(&["osd", "metadata", "0", "--format", "json"]).expect("metadata");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_an_osd_in_a_guest_flushes_is_flushed_and_its_media_are_what_they_are() {
    let _turn = one_at_a_time();
    // Where commits go, and whether the OSD's device turns: what caches does not, but for
    // dm-writecache, which says what its disk says.
    for (placement, device, rotational) in [
        ("osd-guest", "disk0", "1"),
        ("osd-guest-on-ssd", "disk0", "0"),
        ("osd-guest-tidepool", "node0-ssd", "0"),
        ("osd-bcache", "node0-ssd", "0"),
        ("osd-dm-writecache", "node0-ssd", "1"),
    ] {
        let scratch = Scratch::new("guests").expect("a directory");
        let testbed = testbed(scratch.path(), placement);
        testbed.filled().expect("it begins");
        let proof = testbed.verify().expect("it is in place");
        assert_eq!(metadata(&testbed)["rotational"], rotational, "{placement}: {proof}");
        testbed.emulate(true);
        let before = counts(&testbed, device);
        let written = write_objects(&testbed, 4, 4096, 1);
        let done = counts(&testbed, device).since(before);
        println!("{placement}: {written} writes one at a time; {device}: {done:?}");
        testbed.emulate(false);
        // Each waits for a commit, and a commit for a flush.
        assert!(
            written > 5 && done.flushes as f64 > written as f64 * 0.9,
            "{placement}: {written} {done:?}"
        );
        testbed.holds().expect("it is as it was");
    }
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn what_is_sequential_goes_past_bcache_unless_its_cutoff_is_0_or_it_is_prepared() {
    let _turn = one_at_a_time();
    let mut parts = Vec::new();
    for placement in ["osd-bcache-default", "osd-bcache"] {
        let scratch = Scratch::new("guests").expect("a directory");
        let testbed = testbed(scratch.path(), placement);
        testbed.filled().expect("it begins to cache");
        let proof = testbed.verify().expect("it is in place");
        assert!(proof.to_string().contains("[writeback]"), "{proof}");
        let part = || {
            let before = counts(&testbed, "node0-ssd");
            let objects = write_objects(&testbed, 5, 4 << 20, 1);
            let ssd = counts(&testbed, "node0-ssd").since(before).written_bytes;
            println!("{placement}: {ssd} bytes to the SSD of {objects} objects of 4 MiB");
            assert!(objects > 0);
            ssd as f64 / (objects << 22) as f64
        };
        testbed.emulate(true);
        parts.push(part());
        testbed.holds().expect("it is as it was");
        testbed.emulate(false);
        let drained =
            testbed.drain(0.0, &|| false).expect("drained").expect("it keeps something back");
        assert_eq!(counter(&testbed, placement, "dirty_bytes"), 0, "{drained:?}");
        let mut prepared = 0.0;
        let prepare = testbed.prepare(|| {
            prepared = part();
            Ok::<(), PlacementError>(())
        });
        prepare.expect("it takes all of it");
        assert!(prepared > 0.9, "{placement}: {prepared}");
        testbed.holds().expect("it is as it was before");
    }
    assert!(parts[0] < 0.3 && parts[1] > 0.9, "{parts:?}");
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn dm_writecache_takes_writes_and_gives_them_to_the_disk() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("guests").expect("a directory");
    let placement = "osd-dm-writecache";
    let testbed = testbed(scratch.path(), placement);
    testbed.filled().expect("it begins to cache");
    testbed.verify().expect("it is in place");
    testbed.drain(0.0, &|| false).expect("drained");
    testbed.emulate(true);
    let (flushes, ssd) = (counter(&testbed, placement, "flushes"), counts(&testbed, "node0-ssd"));
    let written = write_objects(&testbed, 3, 4096, 4);
    let ssd = counts(&testbed, "node0-ssd").since(ssd);
    assert!(written > 0 && ssd.written_bytes >= written * 4096, "{written} {ssd:?}");
    assert!(counter(&testbed, placement, "flushes") > flushes);
    assert!(counter(&testbed, placement, "dirty_bytes") > 0);
    let before = counter(&testbed, placement, "disk_written_bytes");
    testbed.drain(0.0, &|| false).expect("drained").expect("it keeps something back");
    assert!(counter(&testbed, placement, "disk_written_bytes") > before);
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn an_osd_in_a_guest_takes_part_and_leaves_nothing() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("guests").expect("a directory");
    let testbed = testbed(scratch.path(), "osd-guest");
    testbed.verify().expect("it is in place");
    assert!(!testbed.is_broken(), "it answers");
    let metadata = metadata(&testbed);
    assert_eq!(metadata["bluestore_bdev_access_mode"], "blk", "{metadata}");
    let ours = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release");
    assert_ne!(metadata["kernel_version"], ours.trim(), "another kernel");
    assert!(!guests(scratch.path()).is_empty());
    drop(testbed);
    assert_gone(scratch.path());
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_run_with_guests_that_is_killed_leaves_none_and_goes_on() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("guests").expect("a directory");
    let workloads = [("write", "rw = \"randwrite\"\nset_bytes = 67108864\nsync = \"flush\"")];
    let placements = "\"osd-guest\", \"osd-bcache\", \"osd-guest-tidepool\"";
    let suite =
        suite(scratch.path(), placements, "replicas = 1\nosd_cache_bytes = 16777216", &workloads);
    let text = fs::read_to_string(&suite).expect("a file");
    let text = text.replace("baseline = \"bluestore-colocated\"", "baseline = \"osd-guest\"");
    fs::write(&suite, text.replace("disks = [2]", "disks = [1]")).expect("a file");
    let (out, part) = (scratch.join("out.json"), scratch.join("out.json.part"));
    let work = scratch.join("w");
    fs::create_dir(&work).expect("a directory");
    let lab = || lab_run(&suite, &out, &work, &["--format", "json"]);
    // In the second cluster, while its guest runs.
    let first = start(lab(), |_| lines(&part, "run") >= 1 && !guests(&work).is_empty());
    let dead = end(first, rustix::process::Signal::KILL);
    assert!(!dead.status.success());
    assert_gone(&work);
    let links = fs::read_to_string("/proc/net/dev").expect("interfaces");
    assert!(!links.contains("guest"), "{links}");
    let output = lab().output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Results = serde_json::from_slice(&output.stdout).expect("results");
    assert_eq!((results.runs.len(), results.not_run.len()), (4, 0), "the baseline twice");
    for run in &results.runs {
        assert_eq!(faults(run), "", "{}", run.cell.placement);
    }
    assert_no_traces(&work);
}

/// The processes of guests that have `directory` in their command lines, and of what serves their
/// disks.
fn guests(directory: &Path) -> Vec<PathBuf> {
    let directory = directory.to_str().expect("a name");
    let entries = fs::read_dir("/proc").expect("processes").flatten().map(|entry| entry.path());
    let is_one = |process: &PathBuf| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.contains(directory)
            && ["linux.uml", "lab-guest-disks"].iter().any(|name| line.contains(name))
    };
    entries.filter(is_one).collect()
}

/// Waits until no guest is left there.
#[track_caller]
fn assert_gone(directory: &Path) {
    let start = Instant::now();
    while !guests(directory).is_empty() {
        assert!(start.elapsed() < END_LIMIT, "{:?} still run", guests(directory));
        std::thread::sleep(Duration::from_millis(20));
    }
}
