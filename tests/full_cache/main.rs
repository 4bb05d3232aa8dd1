//! The cache is full, or the backend stands still: everything gets slower and nothing fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidepool_testkit::stamps::{Mix, Progress, WorkloadOptions};
use tidepool_testkit::{one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

#[test]
fn g8_with_a_stopped_backend_hits_go_on_and_writes_are_absorbed_up_to_the_quota() {
    let _turn = one_at_a_time();
    let size_bytes = 256 * MIB;
    let rig = Rig::with_file(size_bytes, 256 * MIB).expect("the daemon starts");
    let seed = rng::seed(41);
    let options = WorkloadOptions {
        mix: Mix::aligned_writes(256 << 10),
        ..WorkloadOptions::new(seed, size_bytes)
    };
    let mut workload = rig.workload(options).expect("connect");
    workload.run(300).expect("a run");
    rig.admin.drain(VOLUME).expect("drain");
    let mut client = rig.client().expect("connect");
    let warm = client.read(0, 1 << 20).expect("read");
    rig.close_gate();
    let quota = rig.volume_number("dirty_bytes_max");
    assert!(quota > 0 && quota < size_bytes, "the test writes more than the quota of {quota}");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        // One record of the largest size may stand between the dirty bytes and the quota.
        let full = rig.admin.wait_volume(VOLUME, Duration::from_secs(120), |volume| {
            volume["dirty_bytes"].as_u64().is_some_and(|dirty| dirty + MIB >= quota)
                && volume["state"] == "full"
        });
        let full = full.expect("it absorbs up to the quota");
        assert!(full["dirty_bytes"].as_u64().is_some_and(|dirty| dirty <= quota), "{full}");
        // What fits into the rest of the quota is still acknowledged; then nothing more.
        let mut written = rig.volume_number("writes");
        loop {
            std::thread::sleep(Duration::from_millis(300));
            let now = rig.volume_number("writes");
            if now == written {
                break;
            }
            written = now;
        }
        assert_eq!(client.read(0, 1 << 20).expect("a hit needs no backend").len(), warm.len());
        assert!(!run.is_finished(), "writes wait, they do not fail");
        assert!(rig.volume_number("dirty_bytes") <= quota);
        stop.store(true, Ordering::Relaxed);
        rig.open_gate();
        assert_eq!(
            run.join().expect("no panic").expect("all completes when it returns"),
            Progress::Done
        );
    });
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
    rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(rig.volume_number("errors"), 0);
    rig.verify_plain(&mut workload, &rig.image()).expect("the image is what was written");
}

#[test]
fn g8_one_stopped_backend_does_not_stop_another_volume() {
    let _turn = one_at_a_time();
    let size_bytes = 192 * MIB;
    let scratch = tidepool_testkit::Scratch::new("rig").expect("a directory");
    let mut volumes = Vec::new();
    for name in ["stopped", "free"] {
        let image = scratch.join(name);
        std::fs::File::create(&image).and_then(|file| file.set_len(size_bytes)).expect("an image");
        let gate = scratch.join(format!("{name}.gate"));
        volumes
            .push((name.to_string(), format!("file:{}?gate={}", image.display(), gate.display())));
    }
    let options = RigOptions { cache_bytes: 192 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::within(scratch, &options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    let seed = rng::seed(42);
    // A read that misses would wait for the stopped backend and keep its place among the requests
    // in flight.
    let mix = Mix::aligned_writes(256 << 10);
    let make = |name: &str, volume: u32| {
        let options = WorkloadOptions {
            mix,
            volume,
            ..WorkloadOptions::new(seed + u64::from(volume), size_bytes)
        };
        let mut workload = tidepool_testkit::stamps::Workload::new(options);
        workload.connect(&rig.socket, name).expect("connect");
        workload
    };
    let (mut stopped, mut free) = (make("stopped", 1), make("free", 2));
    let gate = rig.scratch.join("stopped.gate");
    std::fs::File::create(&gate).expect("the gate can be closed");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| stopped.run_until(&stop));
        rig.admin
            .wait_volume("stopped", Duration::from_secs(120), |volume| volume["state"] == "full")
            .expect("the stopped volume fills its quota");
        // Far more than the cache holds: it has to be drained and reclaimed beside the stopped
        // volume's dirty data.
        assert_eq!(free.run(6000).expect("the other goes on"), Progress::Done);
        free.verify().expect("and is right");
        stop.store(true, Ordering::Relaxed);
        std::fs::remove_file(&gate).expect("the gate can be opened");
        assert_eq!(run.join().expect("no panic").expect("no failure"), Progress::Done);
    });
    stopped.verify().expect("nothing is lost");
}

#[test]
fn g8_a_volume_larger_than_the_cache_is_reclaimed_under_load_without_an_error() {
    let _turn = one_at_a_time();
    let size_bytes = 512 * MIB;
    let rig = Rig::with_file(size_bytes, 128 * MIB).expect("the daemon starts");
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(43), size_bytes)).expect("connect");
    for _ in 0..3 {
        assert_eq!(workload.run(6000).expect("a run"), Progress::Done);
        assert_eq!(workload.verify().expect("right"), Progress::Done);
    }
    assert!(rig.cache_number("reclaims") > 0, "segments were reclaimed");
    assert_eq!(rig.volume_number("errors"), 0);
}

#[test]
fn g8_a_backend_that_returns_after_the_daemon_was_killed_gets_everything() {
    let _turn = one_at_a_time();
    let size_bytes = 96 * MIB;
    let mut rig = Rig::with_file(size_bytes, 256 * MIB).expect("the daemon starts");
    let options = WorkloadOptions {
        mix: Mix::aligned_writes(128 << 10),
        ..WorkloadOptions::new(rng::seed(44), size_bytes)
    };
    let mut workload = rig.workload(options).expect("connect");
    rig.close_gate();
    workload.run(400).expect("a run");
    assert!(rig.volume_number("dirty_bytes") > 0);
    rig.daemon.kill().expect("kill");
    workload.server_died();
    rig.daemon.start().expect("it starts again, the backend still stopped");
    workload.connect(&rig.socket, VOLUME).expect("connect");
    rig.open_gate();
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
    rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(rig.volume_number("dirty_bytes"), 0);
    rig.verify_plain(&mut workload, &rig.image()).expect("the image is what was written");
}
