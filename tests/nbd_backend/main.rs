//! A volume on an NBD server that is killed under load. Between two flushes the server keeps what
//! it is given in memory, so that every kill loses writes which it had completed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidepool_testkit::stamps::{Progress, WorkloadOptions};
use tidepool_testkit::{Scratch, Server, daemon, one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME, complaint, refused};

const IMAGE_BYTES: u64 = 96 * MIB;
/// Kills of the server.
const ROUNDS: usize = 8;

/// A rig whose only volume is on a server, and that server.
struct Remote {
    rig: Rig,
    server: Option<Server>,
}

impl Remote {
    fn new(extra: &[&str]) -> Remote {
        let scratch = Scratch::new("rig").expect("a directory");
        let image = scratch.join("image");
        File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
        let server = forgetful(&scratch.join("backend.sock"), &image);
        let uri = format!("nbd+unix:///?socket={}", scratch.join("backend.sock").display());
        let extra = extra.iter().chain(&["--drain=unordered"]).map(ToString::to_string).collect();
        let options =
            RigOptions { cache_bytes: 128 * MIB, volumes: vec![(VOLUME.into(), uri)], extra };
        let mut rig = Rig::within(scratch, &options).expect("a rig");
        rig.daemon.start().expect("the daemon starts");
        Remote { rig, server: Some(server) }
    }

    fn socket(&self) -> PathBuf {
        self.rig.scratch.join("backend.sock")
    }

    fn kill_server(&mut self) {
        self.server.take().expect("it runs").kill().expect("killed");
    }

    fn start_server(&mut self) {
        self.server = Some(forgetful(&self.socket(), &self.rig.image()));
    }
}

impl Drop for Remote {
    /// Records and locks of exports stand outside of the rig's directory.
    fn drop(&mut self) {
        let plain = |text: &str| -> String {
            text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
        };
        let mark = plain(&self.rig.scratch.join("").display().to_string());
        for entry in std::fs::read_dir("/var/lib/tidepool").into_iter().flatten().flatten() {
            if plain(&entry.file_name().to_string_lossy()).contains(&mark) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// nbdkit that writes to the image only what is flushed.
fn forgetful(socket: &Path, image: &Path) -> Server {
    let file = format!("file={}", image.display());
    let server = Server::nbdkit(socket, ["--filter=cache", "file", &file, "cache=writeback"]);
    server.expect("nbdkit starts")
}

#[test]
fn g2_a_server_that_is_killed_under_load_and_forgets_what_was_not_flushed_costs_nothing() {
    let _turn = one_at_a_time();
    let mut remote = Remote::new(&[]);
    let options = WorkloadOptions::new(rng::seed(71), IMAGE_BYTES);
    let mut workload = remote.rig.workload(options).expect("connect");
    for round in 0..ROUNDS {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let run = scope.spawn(|| workload.run_until(&stop));
            // The drain is under way when it has moved something.
            let drained = remote.rig.volume_number("drained_blocks");
            while remote.rig.volume_number("drained_blocks") < drained + 500 {
                assert!(!run.is_finished(), "nothing fails");
                std::thread::sleep(Duration::from_millis(10));
            }
            std::thread::sleep(Duration::from_millis(37 * (round as u64 % 4)));
            remote.kill_server();
            std::thread::sleep(Duration::from_millis(if round % 2 == 0 { 10 } else { 700 }));
            remote.start_server();
            stop.store(true, Ordering::Relaxed);
            assert_eq!(run.join().expect("no panic").expect("nothing fails"), Progress::Done);
        });
        workload.verify().expect("nothing is lost");
    }
    workload.disconnect().expect("goodbye");
    assert!(
        remote.rig.volume_number("backend_errors") > 0,
        "flushes have failed: the server has lost something"
    );
    assert_eq!(remote.rig.volume_number("errors"), 0, "no client has noticed");
    remote.rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(remote.rig.volume_number("dirty_bytes"), 0);
    // What the server has not been told to keep is not in the image.
    remote.kill_server();
    remote
        .rig
        .verify_plain(&mut workload, &remote.rig.image())
        .expect("the image is what was written");
}

#[test]
fn g2_daemon_and_server_are_killed_in_turn_and_the_volume_is_given_back() {
    let _turn = one_at_a_time();
    let mut remote = Remote::new(&[]);
    let options = WorkloadOptions::new(rng::seed(72), IMAGE_BYTES);
    let mut workload = remote.rig.workload(options).expect("connect");
    for _ in 0..3 {
        workload.run(1000).expect("a run");
        remote.rig.daemon.kill().expect("kill");
        workload.server_died();
        remote.kill_server();
        remote.start_server();
        remote.rig.daemon.start().expect("it starts again");
        workload.connect(&remote.rig.socket, VOLUME).expect("connect");
        workload.verify().expect("nothing is lost");
    }
    workload.disconnect().expect("goodbye");
    let path = format!("/v1/volumes/{VOLUME}");
    let removed = remote.rig.admin.call("DELETE", &path, None).expect("removed");
    assert_eq!(removed["verified"], true, "{removed}");
    assert!(removed["direct_use"].to_string().contains("nbdinfo"), "{removed}");
    remote.kill_server();
    remote
        .rig
        .verify_plain(&mut workload, &remote.rig.image())
        .expect("the image is what was written");
}

#[test]
fn a_write_through_volume_answers_only_what_the_server_has_kept() {
    let _turn = one_at_a_time();
    let mut remote = Remote::new(&[]);
    let change = serde_json::json!({ "mode": "write-through" });
    let path = format!("/v1/volumes/{VOLUME}");
    remote.rig.admin.call("PATCH", &path, Some(&change)).expect("changed");
    let options =
        WorkloadOptions { in_flight: 8, ..WorkloadOptions::new(rng::seed(73), IMAGE_BYTES) };
    let mut workload = remote.rig.workload(options).expect("connect");
    for _ in 0..3 {
        assert_eq!(workload.run(150).expect("a run"), Progress::Done);
        // All of it is answered: the image has it, whatever becomes of the server.
        remote.kill_server();
        workload.disconnect().expect("goodbye");
        remote
            .rig
            .verify_plain(&mut workload, &remote.rig.image())
            .expect("the image is what was written");
        remote.start_server();
        workload.connect(&remote.rig.socket, VOLUME).expect("connect");
    }
}

#[test]
fn a_volume_on_a_server_is_checked_refused_and_added() {
    let _turn = one_at_a_time();
    let mut remote = Remote::new(&[]);
    let uri =
        |name: &str| format!("nbd+unix:///?socket={}", remote.rig.scratch.join(name).display());
    let other = remote.rig.scratch.join("other");
    File::create(&other).and_then(|file| file.set_len(MIB)).expect("an image");
    let second = forgetful(&remote.rig.scratch.join("other.sock"), &other);
    let free = uri("other.sock");
    let output = daemon::run(["check", &free]).expect("tidepool runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1048576 bytes"), "{said}");
    let output = daemon::run(["check", &uri("backend.sock")]).expect("tidepool runs");
    assert!(!output.status.success(), "the daemon has it");
    assert!(String::from_utf8_lossy(&output.stderr).contains("in use"), "{output:?}");

    let cache = format!("--cache={}", remote.rig.scratch.join("second").display());
    let door =
        format!("--nbd=nbd+unix:///?socket={}", remote.rig.scratch.join("second.sock").display());
    let admin = format!("--admin={}", remote.rig.scratch.join("second.admin").display());
    let volume = format!("--volume=x={free}");
    let serve = ["serve", &cache, "--cache-size=64MiB", &door, &admin, &volume, "--accept-loss=5s"];
    let (status, line) = refused(serve);
    assert_eq!(status, 2, "{line}");
    assert!(line.contains("say --drain unordered"), "{line}");
    let output = daemon::run(["serve", "--volume=x=nbd://", &cache]).expect("tidepool runs");
    assert_eq!(complaint(&output).0, 2);

    let admin = format!("--admin={}", remote.rig.scratch.join("admin.sock").display());
    let output =
        daemon::run(["volume", "add", &format!("x={free}"), &admin]).expect("tidepool runs");
    assert!(output.status.success(), "{output:?}");
    let volume = remote.rig.admin.volume("x").expect("it is there");
    assert_eq!(
        (&volume["mode"], &volume["state"]),
        (&"write-back".into(), &"serving".into()),
        "{volume}"
    );
    let output = daemon::run(["volume", "remove", "x", &admin]).expect("tidepool runs");
    assert!(output.status.success(), "{output:?}");
    drop(second);
    assert!(remote.rig.daemon.terminate().expect("it ends").success());
}
