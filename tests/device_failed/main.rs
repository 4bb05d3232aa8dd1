//! The cache device returns errors: what still verifies is drained, the volume goes on past it, and
//! what is left on it is never believed again.
//!
//! The failure is real: the kernel refuses the daemon's writes beyond a file size that the test
//! lowers while it runs. The image is smaller than that, the cache larger.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_testkit::{one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

const IMAGE_BYTES: u64 = 8 * MIB;
const CACHE_BYTES: u64 = 64 * MIB;
/// Writes beyond this fail.
const LIMIT_BYTES: u64 = 12 * MIB;

/// A daemon whose cache device has failed while it held dirty data; the workload has gone on past
/// it.
fn failed_rig(seed: u64) -> (Rig, Workload) {
    let rig = Rig::with_file(IMAGE_BYTES, CACHE_BYTES).expect("the daemon starts");
    let mut workload = rig
        .workload(WorkloadOptions::new(rng::seed(seed), IMAGE_BYTES))
        .expect("the workload connects");
    workload.run(500).expect("a run");
    rig.admin.drain(VOLUME).expect("drain");
    let pid = rig.daemon.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    let limit = Rlimit { current: Some(LIMIT_BYTES), maximum: None };
    prlimit(Some(pid), Resource::Fsize, limit).expect("the limit is set");
    while rig.admin.status().expect("status")["cache"]["failed"] != true {
        assert_eq!(workload.run(200).expect("nothing fails"), Progress::Done);
    }
    assert_eq!(workload.run(1000).expect("it goes on past the cache"), Progress::Done);
    (rig, workload)
}

/// The ownership record beside the image.
fn record(rig: &Rig) -> String {
    std::fs::read_to_string(rig.scratch.join("image.tidepool")).expect("a record")
}

/// Waits until nothing is left to drain.
fn wait_drained(rig: &Rig) {
    let drained = |volume: &serde_json::Value| volume["dirty_bytes"] == 0;
    rig.admin
        .wait_volume(VOLUME, Duration::from_secs(60), drained)
        .expect("all that verifies is drained");
}

#[test]
fn a_failed_cache_loses_nothing_that_it_can_still_read_and_another_takes_its_place() {
    let _turn = one_at_a_time();
    let (mut rig, mut workload) = failed_rig(91);
    workload.verify().expect("what was acknowledged is what is read");
    assert_eq!(rig.volume_number("errors"), 0);
    wait_drained(&rig);
    workload.disconnect().expect("goodbye");
    rig.verify_plain(&mut workload, &rig.image()).expect("the image is what was written");
    assert!(record(&rig).contains("the cache device had failed"), "{}", record(&rig));

    let status = rig.daemon.terminate().expect("it ends");
    assert_eq!(status.code(), Some(1));
    assert!(rig.daemon.log().contains("the cache device has failed: give its volumes a new cache"));
    // The image holds everything, so a new cache may have it.
    std::fs::rename(&rig.cache, rig.scratch.join("failed-cache")).expect("renamed");
    rig.daemon.start().expect("on a new cache");
    workload.connect(&rig.socket, VOLUME).expect("connect");
    workload.verify().expect("nothing is lost");
    workload.run(300).expect("a run");
    workload.disconnect().expect("goodbye");
    assert!(rig.daemon.terminate().expect("it ends").success());
}

#[test]
fn what_is_left_on_a_failed_cache_is_never_served_or_drained_again() {
    let _turn = one_at_a_time();
    let (mut rig, mut workload) = failed_rig(92);
    wait_drained(&rig);
    rig.daemon.kill().expect("kill");
    workload.server_died();
    rig.verify_plain(&mut workload, &rig.image()).expect("the image is what was written");
    // The same cache, which can be written again, as if nothing had happened.
    let image = std::fs::read(rig.image()).expect("the image");
    for _ in 0..2 {
        rig.daemon.start().expect("it holds what may be given up");
        let told = |volume: &Value| {
            volume["error"]
                .as_str()
                .is_some_and(|error| error.contains("the cache device had failed"))
        };
        let volume =
            rig.admin.wait_volume(VOLUME, Duration::from_secs(60), told).expect("it is refused");
        assert_eq!(volume["state"], "unavailable");
        rig.daemon.terminate().expect("it ends");
        assert!(std::fs::read(rig.image()).expect("the image") == image, "the image is untouched");
    }
    // What the refusal says to do.
    rig.daemon.start().expect("it starts again");
    let path = format!("/v1/volumes/{VOLUME}/give-up");
    rig.admin.call("POST", &path, Some(&json!({}))).expect_err("something would be lost");
    let done =
        rig.admin.call("POST", &path, Some(&json!({ "accept_loss": true }))).expect("given up");
    assert_eq!(done["freed"], json!({ "free": { "exact": true } }), "{done}");
    rig.daemon.terminate().expect("it ends");
    rig.daemon.start().expect("it starts again");
    workload.connect(&rig.socket, VOLUME).expect("connect");
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
}

#[test]
fn without_a_backend_a_failed_cache_makes_writes_wait_and_none_fail() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(IMAGE_BYTES, CACHE_BYTES).expect("the daemon starts");
    let options = WorkloadOptions {
        mix: Mix::aligned_writes(64 << 10),
        ..WorkloadOptions::new(rng::seed(93), IMAGE_BYTES)
    };
    let mut workload = rig.workload(options).expect("the workload connects");
    rig.close_gate();
    let pid = rig.daemon.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: Some(LIMIT_BYTES), maximum: None })
        .expect("the limit is set");
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run(3000));
        while rig.admin.status().expect("status")["cache"]["failed"] != true {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!run.is_finished(), "writes wait for the backend");
        assert!(
            !record(&rig).contains("the cache device had failed"),
            "nothing has gone past the cache"
        );
        rig.open_gate();
        assert_eq!(run.join().expect("no panic").expect("all completes"), Progress::Done);
    });
    workload.verify().expect("nothing is lost");
    assert_eq!(rig.volume_number("errors"), 0);
    workload.disconnect().expect("goodbye");
}

#[test]
fn a_volume_whose_image_comes_back_as_the_cache_fails_is_drained_and_takes_nobody_down() {
    let _turn = one_at_a_time();
    let mut rig = Rig::with_file(IMAGE_BYTES, CACHE_BYTES).expect("the daemon starts");
    // Nothing is read, which would wait for the image.
    let options = WorkloadOptions {
        mix: Mix::aligned_writes(16 << 10),
        ..WorkloadOptions::new(rng::seed(94), IMAGE_BYTES)
    };
    let mut workload = rig.workload(options).expect("the workload connects");
    rig.close_gate();
    workload.run(300).expect("a run");
    rig.daemon.kill().expect("kill");
    workload.server_died();
    // Somebody has the image for a while. Another volume is served meanwhile.
    let image = std::fs::File::open(rig.image()).expect("the image");
    rustix::fs::flock(&image, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    let other = rig.scratch.join("other");
    std::fs::File::create(&other).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
    let mut arguments = rig.daemon.arguments().to_vec();
    arguments.push(format!("--volume=other=file:{}", other.display()).into());
    rig.daemon.set_arguments(arguments);
    rig.daemon.start().expect("with the other volume");
    // Not even a checkpoint can be written from now on, nor the image.
    let pid = rig.daemon.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    let limit = |current| prlimit(Some(pid), Resource::Fsize, Rlimit { current, maximum: None });
    limit(Some(4096)).expect("the limit is set");
    rig.open_gate();
    drop(image);
    while rig.admin.status().expect("it goes on")["cache"]["failed"] != true {
        std::thread::sleep(Duration::from_millis(20));
    }
    limit(None).expect("the limit is lifted");
    wait_drained(&rig);
    workload.connect(&rig.socket, VOLUME).expect("connect");
    workload.verify().expect("nothing is lost");
    assert_eq!(workload.run(300).expect("it goes on past the cache"), Progress::Done);
    workload.disconnect().expect("goodbye");
    rig.verify_plain(&mut workload, &rig.image()).expect("the image is what was written");
    tidepool_testkit::nbd::Client::connect(&rig.socket, "other")
        .and_then(|mut other| other.write(0, &[7; 4096]))
        .expect("the other volume goes on, too");
}
