//! The daemon dies: nothing that was completed is lost, nothing stale is read.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::process::Signal;
use tidepool_testkit::stamps::{Kind, Mix, Progress, Request, WorkloadOptions};
use tidepool_testkit::{one_at_a_time, rng};
use tidepool_tests::crash::{Aim, Crasher, IN_FLIGHT_MIN};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

/// Rounds of the short form; `make crash` runs long ones.
const ROUNDS: usize = 10;

#[test]
fn g2_completed_writes_survive_kills_inside_drain_reclaim_checkpoint_and_replay() {
    let _turn = one_at_a_time();
    let size_bytes = 192 * MIB;
    let rig = Rig::with_file(size_bytes, 128 * MIB).expect("the daemon starts");
    let options = WorkloadOptions::new(rng::seed(21), size_bytes);
    let mut crasher = Crasher::new(rig, options).expect("the workload connects");
    for round in 0..ROUNDS {
        crasher.round(Aim::ALL[round % Aim::ALL.len()]).expect("nothing is lost or stale");
    }
    let (rig, mut workload, tally) = crasher.finish().expect("it drains and ends");
    println!("{tally}");
    assert!(tally.in_flight_min.is_some_and(|least| least >= IN_FLIGHT_MIN), "{tally}");
    assert_eq!(tally.kills.len(), Aim::ALL.len(), "every aim was hit: {tally}");
    rig.verify_plain(&mut workload, &rig.image()).expect("the drained image is what was written");
}

#[test]
fn g2_an_orderly_end_under_load_has_status_0_and_loses_nothing() {
    let _turn = one_at_a_time();
    let size_bytes = 64 * MIB;
    let mut rig = Rig::with_file(size_bytes, 128 * MIB).expect("the daemon starts");
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(24), size_bytes)).expect("connect");
    let never = AtomicBool::new(false);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::TERM] {
        let status = std::thread::scope(|scope| {
            let before = rig.volume_number("writes");
            let run = scope.spawn(|| workload.run_until(&never));
            while rig.volume_number("writes") < before + 500 {
                std::thread::sleep(Duration::from_millis(10));
            }
            rig.daemon.signal(signal).expect("it runs");
            let status = rig.daemon.wait().expect("it ends");
            assert_eq!(
                run.join().expect("no panic").expect("no answer is wrong"),
                Progress::Disconnected
            );
            status
        });
        assert_eq!(status.code(), Some(0), "{signal:?}: {}", rig.daemon.log());
        rig.start_and_verify(&mut workload).expect("nothing is lost");
    }
}

#[test]
fn g2_unflushed_writes_survive_a_kill() {
    let _turn = one_at_a_time();
    let size_bytes = 64 * MIB;
    let mut rig = Rig::with_file(size_bytes, 128 * MIB).expect("the daemon starts");
    let mix = Mix { flushes: 0, fua_percent: 0, ..Mix::default() };
    let options = WorkloadOptions { mix, ..WorkloadOptions::new(rng::seed(22), size_bytes) };
    let mut workload = rig.workload(options).expect("connect");
    // One flush ends the time in which every write waits for stable media.
    let flush = Request { kind: Kind::Flush, sector: 0, count: 0, fua: false, connection: 0 };
    workload.run_these(&[flush]).expect("a flush");
    for _ in 0..3 {
        assert_eq!(workload.run(1500).expect("a run"), Progress::Done);
        rig.daemon.kill().expect("kill");
        rig.start_and_verify(&mut workload).expect("nothing is lost");
    }
}

#[test]
fn g2_a_second_sigterm_ends_at_once_and_loses_nothing() {
    let _turn = one_at_a_time();
    let size_bytes = 64 * MIB;
    let mut rig = Rig::with_file(size_bytes, 128 * MIB).expect("the daemon starts");
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(24), size_bytes)).expect("connect");
    let never = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&never));
        std::thread::sleep(Duration::from_millis(500));
        rig.daemon.signal(Signal::TERM).expect("a signal");
        // It may have ended after the first already.
        let _ = rig.daemon.signal(Signal::TERM);
        rig.daemon.wait().expect("it ends");
        assert_eq!(run.join().expect("no panic").expect("no violation"), Progress::Disconnected);
    });
    rig.start_and_verify(&mut workload).expect("nothing is lost");
}

#[test]
fn clean_data_is_still_warm_after_a_kill() {
    let _turn = one_at_a_time();
    let size_bytes = 64 * MIB;
    let mut rig = Rig::with_file(size_bytes, 192 * MIB).expect("the daemon starts");
    let options = WorkloadOptions::new(rng::seed(25), size_bytes);
    let mut workload = rig.workload(options).expect("connect");
    workload.run(2000).expect("a run");
    for _ in 0..2 {
        workload.verify().expect("a pass that warms the cache");
    }
    rig.admin.drain(VOLUME).expect("drain");
    let misses_before = rig.volume_number("miss_blocks");
    workload.verify().expect("a warm pass");
    let misses_warm = rig.volume_number("miss_blocks") - misses_before;
    rig.daemon.kill().expect("kill");
    rig.start_and_verify(&mut workload).expect("the same pass");
    let misses_after = rig.volume_number("miss_blocks");
    let blocks = size_bytes / 4096;
    let lost_percent = (misses_after.saturating_sub(misses_warm)) as f64 * 100.0 / blocks as f64;
    assert!(
        lost_percent <= 2.0,
        "{misses_warm} misses before, {misses_after} after, of {blocks} blocks"
    );
}

#[test]
fn g1_an_image_that_waits_for_its_volume_is_not_served_under_another_name() {
    let _turn = one_at_a_time();
    let mut rig = Rig::with_file(16 * MIB, 64 * MIB).expect("the daemon starts");
    rig.close_gate();
    let mut client = rig.client().expect("connect");
    client.write(0, &[0x4e; 4096]).expect("a write");
    client.flush().expect("a flush");
    rig.daemon.kill().expect("kill");
    rig.open_gate();
    // Somebody has the image for a moment; another volume is served meanwhile.
    let image = std::fs::File::open(rig.image()).expect("the image");
    rustix::fs::flock(&image, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    let (other, link) = (rig.scratch.join("other"), rig.scratch.join("link"));
    std::fs::File::create(&other).and_then(|file| file.set_len(16 * MIB)).expect("an image");
    std::os::unix::fs::symlink(rig.image(), &link).expect("a link");
    let mut arguments = rig.daemon.arguments().to_vec();
    arguments.retain(|argument| !argument.to_string_lossy().starts_with("--volume="));
    arguments.push(format!("--volume=other=file:{}", other.display()).into());
    rig.daemon.set_arguments(arguments.clone());
    rig.daemon.start().expect("with the other volume");
    drop(image);
    for uri in [format!("file:{}", link.display()), format!("file:{}", rig.image().display())] {
        let body = serde_json::json!({ "name": "second", "backend": uri });
        let (status, answer) =
            rig.admin.exchange("POST", "/v1/volumes", Some(&body)).expect("the daemon answers");
        assert_eq!(status, 409, "{answer}");
        assert!(
            answer["error"].as_str().is_some_and(|e| e.contains("volume vm has the image")),
            "{answer}"
        );
    }
    let drained =
        |volume: &serde_json::Value| volume["state"] == "serving" && volume["dirty_bytes"] == 0;
    rig.admin
        .wait_volume(VOLUME, Duration::from_secs(60), drained)
        .expect("the volume gets its image back");
    assert_eq!(rig.client().expect("connect").read(0, 4096).expect("a read"), [0x4e; 4096]);
    assert!(rig.daemon.terminate().expect("it ends").success());
    // Nor does the next start take it, and what the cache knows is served.
    arguments.push(format!("--volume=second=file:{}", link.display()).into());
    rig.daemon.set_arguments(arguments);
    rig.daemon.start().expect("with a second volume on the image");
    let second = rig.admin.volume("second").expect("it is configured");
    let why = second["error"].as_str().expect("an error");
    assert!(
        second["state"] == "unavailable" && why.contains("volume vm has the image"),
        "{second}"
    );
    assert_eq!(rig.client().expect("connect").read(0, 4096).expect("a read"), [0x4e; 4096]);
    assert!(rig.daemon.terminate().expect("it ends").success());
}
