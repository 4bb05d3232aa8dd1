//! The lab's access paths: what is written over a gateway is in Ceph, flushes arrive there, and
//! nothing of it is left.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tidepool_cluster::Scratch;
use tidepool_cluster::device::preset;
use tidepool_cluster::fio::{self, Endpoint, Job, Pattern, Sync};
use tidepool_lab::access::Access;
use tidepool_lab::breakdown::{Part, breakdown};
use tidepool_lab::placement::{Arrangement, all};
use tidepool_lab::results::{Results, Run};
use tidepool_lab::run::run;
use tidepool_lab::testbed::{Layout, Ssds, Testbed};
use tidepool_testkit::one_at_a_time;

use crate::{assert_no_traces, end, faults, found, lab_run, lines, options, start, suite};

/// Size of the images, in bytes.
const IMAGE_BYTES: u64 = 256 << 20;
/// The part of them that is written and verified, in bytes.
const SET_BYTES: u64 = 32 << 20;
/// Writes with a flush after each.
pub(crate) const FLUSHED: u64 = 50;

/// Where a testbed's cluster is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    /// In a network of its own.
    Network,
    /// On the loopback interface.
    Loopback,
}

/// A testbed with two hypervisors, and an image of each hypervisor.
pub(crate) fn testbed(directory: &Path, at: Where) -> Testbed {
    let network = at == Where::Network;
    let class = |name| preset::find(name).expect("a class");
    let layout = Layout {
        disk: class("ssd-sata-plp"),
        disks: 1,
        osds_per_disk: 1,
        disk_bytes: 8 << 30,
        ssd: Some((class("nvme"), 1 << 30)),
        ssds: Ssds { in_servers: false, hosts: 2 },
        hypervisors: 2,
        replicas: 1,
        slowed_by: 1,
        ssd_shares: 1,
        ceph_conf: Vec::new(),
        servers: u32::from(network),
        network,
        delay: network.then_some(std::time::Duration::from_micros(50)),
    };
    let program = tidepool_testkit::daemon::tidepool().expect("the program");
    let arrangement = Arrangement::parse("bluestore-colocated").expect("a placement");
    let mut testbed = Testbed::up(directory, program, &layout, &arrangement).expect("a testbed");
    for image in ["img0", "img1"] {
        testbed.image(image, IMAGE_BYTES).expect("an image");
    }
    testbed
}

/// Writes the set with checksums and reads it back, or only reads what was written so before.
pub(crate) fn verify(endpoint: &Endpoint, writes: bool) {
    let mut words = fio::pass(
        endpoint,
        if writes { fio::Pass::WriteAndFlush } else { fio::Pass::Read },
        SET_BYTES,
    );
    words
        .extend(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"].map(String::from));
    fio::run(endpoint, &words).unwrap_or_else(|why| panic!("{endpoint:?}: {why}"));
}

/// Writes with a flush after each, beyond the set.
pub(crate) fn write_and_flush(endpoint: &Endpoint) {
    let job = Job::new(Pattern::RandWrite, 4096, 1).with(Sync::Flush);
    let mut words = fio::arguments(endpoint, &job, SET_BYTES, 0, 1);
    words.retain(|word| word != "--time_based=1" && !word.starts_with("--runtime="));
    words.extend([format!("--offset={SET_BYTES}"), format!("--number_ios={FLUSHED}")]);
    fio::run(endpoint, &words).unwrap_or_else(|why| panic!("{endpoint:?}: {why}"));
}

/// Writes once, beyond the set, with FUA: the write is to be safe when it is answered.
fn write_fua(endpoint: &Endpoint) {
    let Endpoint::Nbd { socket, export } = endpoint else { panic!("no export: {endpoint:?}") };
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let write = format!("write -f -P 7 {SET_BYTES} 4k");
    let output = Command::new("qemu-io").args(["-f", "raw", "-c", &write, &uri]).output();
    let output = output.expect("qemu-io runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What somebody on the way has counted.
pub(crate) fn counted(testbed: &Testbed, who: &str, what: &str) -> u64 {
    let counters = testbed.counters().expect("counters");
    counters[who][what].as_u64().unwrap_or_else(|| panic!("{who} counts {what}: {counters:?}"))
}

#[test]
#[ignore = "it brings a cluster and a gateway up, and fills images: make long"]
fn what_is_written_over_a_gateway_is_in_ceph_and_flushes_arrive_there() {
    let _turn = one_at_a_time();
    Access::Iscsi.probe().expect("the packages of `make deps`");
    let scratch = Scratch::new("access").expect("a directory");
    let mut testbed = testbed(scratch.path(), Where::Network);
    let host =
        all().into_iter().find(|placement| placement.name() == "host-tidepool").expect("known");
    for (access, front, images) in [
        (Access::Nbd, None, ["img0", "img1"]),
        (Access::Iscsi, None, ["img0", "img1"]),
        (Access::Iscsi, Some(host), ["img1", "img0"]),
    ] {
        let who = access.name();
        if testbed.access() != access {
            let proof = testbed.reach(access).expect("the path").expect("it is another one");
            assert_eq!(
                proof["opened_by_librbd_there"],
                serde_json::json!(["img0", "img1"]),
                "{proof}"
            );
        }
        testbed.front(front).expect("the placement");
        for image in images {
            let endpoint = testbed.endpoint(image);
            let before = counted(&testbed, who, "written_bytes");
            verify(&endpoint, true);
            let flushes = |who| counted(&testbed, who, "flushes");
            let seen_by = front.map_or(who, |front| front.name());
            let earlier = flushes(seen_by);
            write_and_flush(&endpoint);
            let arrived = flushes(seen_by) - earlier;
            assert!(arrived >= FLUSHED, "{arrived} of {FLUSHED} flushes at {seen_by}");
            let earlier = flushes(who);
            if front.is_none() {
                write_fua(&endpoint);
                assert!(flushes(who) > earlier, "a write with FUA is flushed");
            }
            let earlier = flushes(who);
            testbed.drain(0.0, &|| false).expect("drained");
            let written = counted(&testbed, who, "written_bytes") - before;
            assert!(written >= SET_BYTES, "{written} bytes over {who}");
            if front.is_some() {
                assert!(flushes(who) > earlier, "what is written back is flushed in Ceph, too");
            }
        }
        testbed.holds().expect("it holds");
        let before = testbed.access();
        assert!(
            testbed.reach(access).expect("it is there").is_none(),
            "the same path is left as it is"
        );
        assert_eq!(testbed.access(), before);
        // What is in Ceph is seen without the path.
        testbed.reach(Access::Librbd).expect("it goes").expect("it was another one");
        testbed.front(None).expect("it goes");
        images.iter().for_each(|image| verify(&testbed.direct(image), false));
    }
    drop(testbed);
    assert_no_traces(scratch.path());
}

/// Two workloads over a gateway: reads and writes, and writes with a flush after each.
fn over_iscsi(directory: &Path) -> std::path::PathBuf {
    let over = "set_bytes = 67108864\naccess = \"iscsi\"\ndepth = [1]";
    suite(
        directory,
        "\"bluestore-colocated\", \"host-tidepool\", \"iscsi-null\"",
        "replicas = 1\nosd_cache_bytes = 16777216",
        &[
            ("mixed", &format!("rw = \"randrw\"\nread_percent = 80\n{over}")),
            ("flushed", &format!("rw = \"randwrite\"\nsync = \"flush\"\n{over}")),
        ],
    )
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_measurement_over_a_gateway_shows_the_gateway() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &over_iscsi(scratch.path()), &stop), &|_| ());
    let results = results.expect("it runs to its end");
    assert_eq!(results.not_run, []);
    for workload in ["mixed", "flushed"] {
        for placement in ["bluestore-colocated", "host-tidepool", "iscsi-null"] {
            let run = found(&results, placement, workload);
            assert_eq!(faults(run), "", "{placement} {workload}: {:?}", run.counted.placement);
        }
    }
    let mixed = found(&results, "bluestore-colocated", "mixed");
    let parts = |run: &Run| breakdown(run).reads.expect("its way is known").parts;
    let gateway =
        parts(mixed).into_iter().find(|share| share.part == Part::Gateway).expect("a gateway");
    assert!(gateway.mean_us > 0.0 && gateway.mean_us < mixed.figures.mean_us, "{gateway:?}");
    let flushed = found(&results, "bluestore-colocated", "flushed");
    let gateway = &flushed.counted.placement["iscsi"];
    let writes = flushed.figures.iops * 2.0;
    assert!(gateway["flushes"].as_f64().expect("a number") > writes * 0.5, "{gateway} of {writes}");
    let null = found(&results, "iscsi-null", "mixed");
    assert!(null.figures.iops > mixed.figures.iops, "{:?} {:?}", null.figures, mixed.figures);
    let proof = |name: &str| -> &Value {
        let of = |testbed: &tidepool_lab::results::Testbed| testbed.proofs.contains_key(name);
        &results.testbeds.iter().find(|testbed| of(testbed)).expect(name).proofs[name]
    };
    let initiators = &proof("iscsi")["gateway"]["targets"][0]["initiators"];
    assert_eq!(initiators[0], "10.213.0.2", "it comes from the hypervisor: {initiators}");
    let backend =
        proof("host-tidepool over iscsi")[0]["volumes"][0]["backend"].as_str().expect("a URI");
    assert!(backend.starts_with("nbd+unix:///img0"), "{backend}");
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_run_over_a_gateway_that_is_killed_goes_on_and_leaves_nothing() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("access").expect("a directory");
    let suite = over_iscsi(scratch.path());
    let (out, part) = (scratch.join("out.json"), scratch.join("out.json.part"));
    let work = scratch.join("w");
    fs::create_dir(&work).expect("a directory");
    let lab = || lab_run(&suite, &out, &work, &["--format", "json"]);
    let dead = end(start(lab(), |_| lines(&part, "run") >= 1), rustix::process::Signal::KILL);
    assert!(!dead.status.success());
    let output = lab().output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Results = serde_json::from_slice(&output.stdout).expect("results");
    assert_eq!(results.runs.len(), 7);
    assert_no_traces(&work);
}
