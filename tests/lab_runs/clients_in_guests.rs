//! Clients in guests: what they write is in Ceph, flushes of their kernels arrive, their clocks are
//! the machine's, and nothing of them is left.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use rustix::process::Signal;
use tidepool_cluster::Scratch;
use tidepool_cluster::fio::{self, Endpoint, Job, Pattern};
use tidepool_lab::access::Access;
use tidepool_lab::breakdown::{Part, breakdown};
use tidepool_lab::placement::all;
use tidepool_lab::results::Results;
use tidepool_lab::run::run;
use tidepool_testkit::one_at_a_time;

use crate::access::{FLUSHED, Where, counted, testbed, verify, write_and_flush};
use crate::{assert_no_traces, end, faults, found, lab_run, lines, options, start, suite};

#[test]
#[ignore = "it brings a cluster and guests up, and fills images: make long"]
fn what_is_written_in_a_guest_is_in_ceph_and_flushes_arrive_there() {
    let _turn = one_at_a_time();
    Access::Guest.probe().expect("the packages of `make deps`");
    Access::Krbd.probe().expect("the packages of `make deps`");
    let scratch = Scratch::new("access").expect("a directory");
    let mut testbed = testbed(scratch.path(), Where::Network);
    let known = |name| all().into_iter().find(|placement| placement.name() == name).expect(name);
    let (host, cached) = (known("host-tidepool"), known("librbd-cache"));
    // Each writes over what the one before has written, with checksums of its own.
    for (access, front, images) in [
        (Access::Guest, None, ["img0", "img1"]),
        (Access::Guest, Some(host), ["img1", "img0"]),
        (Access::Krbd, None, ["img0", "img1"]),
        (Access::KrbdWriteback, None, ["img1", "img0"]),
        (Access::Guest, Some(cached), ["img0", "img1"]),
        (Access::KrbdUnsafe, None, ["img1", "img0"]),
    ] {
        let proof = testbed.reach(access).expect("the path");
        let proof = proof.unwrap_or_else(|| panic!("{access} is another path"));
        assert_eq!(proof["guests"].as_array().expect("guests").len(), 2, "{proof}");
        testbed.front(front).expect("the placement");
        for image in images {
            let endpoint = testbed.endpoint(image);
            assert!(matches!(endpoint, Endpoint::Guest { .. }), "{endpoint:?}");
            verify(&endpoint, true);
            let of_it = front.filter(|front| !front.caches_in_memory()).map(|front| front.name());
            let Some(who) = of_it.or((access == Access::Guest).then_some("guest")) else {
                // What the kernel's client has written is answered when Ceph has it: nothing is to
                // be flushed.
                write_and_flush(&endpoint);
                continue;
            };
            let earlier = counted(&testbed, who, "flushes");
            write_and_flush(&endpoint);
            let arrived = counted(&testbed, who, "flushes") - earlier;
            // fio leaves out the one after the last write of a file.
            assert!(arrived >= FLUSHED - 1, "{arrived} of {FLUSHED} flushes at {who}");
        }
        let spent = counted(&testbed, access.name(), "cpu_us");
        assert!(spent > 0 && counted(&testbed, access.name(), "cpu_busy_us") <= spent, "{spent}");
        testbed.holds().expect("it holds");
        testbed.drain(0.0, &|| false).expect("drained");
        // What is in Ceph is seen without guests.
        testbed.reach(Access::Librbd).expect("it goes").expect("it was another one");
        images.iter().for_each(|image| verify(&testbed.direct(image), false));
    }
    drop(testbed);
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it brings a cluster and guests up, and fills images: make long"]
fn librbds_cache_under_a_guest_is_told_by_the_guests_kernel_whether_there_was_a_flush() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let mut testbed = testbed(scratch.path(), Where::Loopback);
    let proof = testbed.reach(Access::Guest).expect("the path").expect("it is another one");
    assert_eq!(proof["rbd_cache"], "false", "{proof}");
    let cached =
        all().into_iter().find(|placement| placement.name() == "librbd-cache").expect("known");
    for _ in 0..2 {
        // Others in front of it have guests of their own, which remember nothing.
        testbed.front(Some(cached)).expect("the placement");
        assert_eq!(testbed.flushed().expect("an answer"), Some(vec![]));
        let endpoint = testbed.endpoint("img0");
        let job = Job::new(Pattern::RandWrite, 4096, 4);
        fio::run(&endpoint, &fio::arguments(&endpoint, &job, 1 << 20, 0, 1)).expect("it writes");
        assert_eq!(testbed.flushed().expect("an answer"), Some(vec![]), "nobody has flushed");
        write_and_flush(&endpoint);
        assert_eq!(testbed.flushed().expect("an answer"), Some(vec!["img0".to_string()]));
    }
    testbed.reach(Access::Librbd).expect("it goes").expect("it was another one");
    drop(testbed);
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it brings a cluster and guests up, and fills images: make long"]
fn a_guest_maps_images_of_a_cluster_on_the_loopback_interface() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let mut testbed = testbed(scratch.path(), Where::Loopback);
    testbed.reach(Access::Krbd).expect("the path").expect("it is another one");
    verify(&testbed.endpoint("img0"), true);
    testbed.reach(Access::Librbd).expect("it goes").expect("it was another one");
    verify(&testbed.direct("img0"), false);
    drop(testbed);
    assert_no_traces(scratch.path());
}

/// Reads and writes of a client in a guest.
fn in_guests(directory: &Path) -> std::path::PathBuf {
    let over = "set_bytes = 67108864\ndepth = [4]\nrw = \"randrw\"\nread_percent = 80";
    suite(
        directory,
        "\"bluestore-colocated\", \"host-tidepool\", \"guest-null\"",
        "replicas = 1\nosd_cache_bytes = 16777216",
        &[
            ("inside", &format!("{over}\naccess = \"guest\"")),
            (
                "mapped",
                &format!("{over}\naccess = \"krbd\"\nplacements = [\"bluestore-colocated\"]"),
            ),
        ],
    )
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_measurement_in_guests_shows_the_guest_and_its_wait_for_the_disk() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &in_guests(scratch.path()), &stop), &|_| ());
    let results = results.expect("it runs to its end");
    assert_eq!(results.not_run, []);
    for (placement, workload) in [
        ("bluestore-colocated", "inside"),
        ("host-tidepool", "inside"),
        ("guest-null", "inside"),
        ("bluestore-colocated", "mapped"),
    ] {
        let run = found(&results, placement, workload);
        assert_eq!(faults(run), "", "{placement} {workload}: {:?}", run.counted.placement);
        assert!(run.commands[0].starts_with("in a guest: fio "), "{:?}", run.commands);
        assert!(!run.windows.is_empty(), "fio's log of rates comes out of the guest");
        assert!(
            run.samples.iter().any(|sample| sample.busiest_client_percent > 0.0),
            "the guest is the client"
        );
    }
    let inside = found(&results, "bluestore-colocated", "inside");
    let guest = &inside.counted.placement["guest"];
    let us = |what: &str| guest[what].as_f64().unwrap_or_else(|| panic!("{what}: {guest}"));
    // One processor, for as long as the window at most: what a busy machine keeps from it is
    // counted by nobody.
    let window_us = 2e6;
    assert!(us("cpu_us") > 0.25 * window_us && us("cpu_us") < 1.25 * window_us, "{guest}");
    assert!(us("cpu_iowait_us") > 0.1 * us("cpu_us"), "slowed disks are waited for: {guest}");
    let parts = breakdown(inside).reads.expect("its way is known").parts;
    let share =
        parts.iter().find(|share| share.part == Part::ClientGuest).expect("the guest's part");
    assert!(share.mean_us > 0.0 && share.mean_us < inside.figures.mean_us, "{share:?}");
    let null = found(&results, "guest-null", "inside");
    assert!(null.figures.iops > inside.figures.iops, "{:?} {:?}", null.figures, inside.figures);
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_run_in_guests_that_is_killed_goes_on_and_leaves_nothing() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let suite = in_guests(scratch.path());
    let (out, part) = (scratch.join("out.json"), scratch.join("out.json.part"));
    let work = scratch.join("w");
    fs::create_dir(&work).expect("a directory");
    let lab = || lab_run(&suite, &out, &work, &["--format", "json"]);
    let dead = end(start(lab(), |_| lines(&part, "run") >= 1), Signal::KILL);
    assert!(!dead.status.success());
    let output = lab().output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Results = serde_json::from_slice(&output.stdout).expect("results");
    assert_eq!(results.runs.len(), 5);
    assert_no_traces(&work);
}
