//! Volumes on RBD images of a real, throw-away Ceph cluster.

mod rights;
mod trouble;

use std::process::{Command, Stdio};
use std::time::Duration;

use tidepool_cluster::ceph::checksum;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::WorkloadOptions;
use tidepool_testkit::{Cluster, ClusterOptions, Process, one_at_a_time};
use tidepool_tests::crash::{Aim, Crasher};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME, refused};

/// A running daemon with one volume on a new image.
fn rig(cluster: &Cluster, image: &str, image_bytes: u64, cache_bytes: u64) -> Rig {
    cluster.rbd_create(image, image_bytes).expect("an image");
    let volumes = vec![(VOLUME.to_string(), cluster.uri(image))];
    let mut rig = Rig::new(&RigOptions { cache_bytes, volumes, extra: Vec::new() }).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    rig
}

/// What `serve` says about an image that it cannot have.
fn refused_serve(scratch: &tidepool_testkit::Scratch, uri: &str) -> (i32, String) {
    let line = refused(serve(scratch, uri));
    assert!(!scratch.join("other-cache").exists(), "nothing is left behind");
    line
}

/// A daemon of its own for an image.
fn serve(scratch: &tidepool_testkit::Scratch, uri: &str) -> [String; 6] {
    [
        "serve".to_string(),
        format!("--cache={}", scratch.join("other-cache").display()),
        "--cache-size=64MiB".to_string(),
        format!("--volume={VOLUME}={uri}"),
        format!("--nbd=nbd+unix:///?socket={}", scratch.join("other.sock").display()),
        format!("--admin={}", scratch.join("other-admin.sock").display()),
    ]
}

#[test]
fn a_converted_disk_image_is_what_rbd_export_gives_after_the_drain() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let size_bytes = 96 * MIB;
    let rig = rig(&cluster, "convert", size_bytes, 128 * MIB);
    let source = rig.scratch.join("disk");
    let mut rng = Rng::new(rng::seed(81));
    let mut data = vec![0u8; size_bytes as usize];
    // Three quarters data, one quarter zeros.
    for chunk in data.chunks_mut(64 << 10) {
        if rng.chance(75) {
            chunk
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&rng.word().to_le_bytes()));
        }
    }
    std::fs::write(&source, &data).expect("a disk image");
    let status = Command::new("qemu-img")
        .args(["convert", "-n", "-f", "raw", "-O", "raw"])
        .arg(&source)
        .arg(rig.uri())
        .status()
        .expect("qemu-img runs");
    assert!(status.success());
    rig.admin.drain(VOLUME).expect("drain");
    let expected = checksum(&mut data.as_slice()).expect("a checksum");
    assert_eq!(cluster.rbd_checksum("convert").expect("rbd export"), expected);
}

#[test]
fn g2_kills_under_load_lose_nothing_on_an_rbd_image() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let size_bytes = 96 * MIB;
    let rig = rig(&cluster, "crash", size_bytes, 64 * MIB);
    let options = WorkloadOptions::new(rng::seed(82), size_bytes);
    let mut crasher = Crasher::new(rig, options).expect("the workload connects");
    for round in 0..6 {
        crasher.round(Aim::ALL[round % Aim::ALL.len()]).expect("nothing is lost or stale");
    }
    let (rig, mut workload, tally) = crasher.finish().expect("it drains and ends");
    println!("{tally}");
    rig.verify_export(&cluster, "crash", &mut workload).expect("the image is what was written");
}

#[test]
fn with_a_stopped_osd_the_daemon_ends_in_time_and_the_next_start_takes_the_image_back() {
    let _turn = one_at_a_time();
    let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
    let size_bytes = 64 * MIB;
    let mut rig = rig(&cluster, "unreleased", size_bytes, 64 * MIB);
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(86), size_bytes)).expect("connect");
    workload.run(200).expect("a run");
    rig.admin.drain(VOLUME).expect("drain");
    workload.disconnect().expect("goodbye");
    cluster.osd_stop(0).expect("the OSD is stopped");
    rig.client().expect("connect").write(0, &[7; 65536]).expect("absorbed");
    assert!(rig.daemon.terminate().expect("it ends").success());
    let log = rig.daemon.log();
    assert!(log.contains("stopped without releasing rbd:rbd/unreleased"), "{log}");
    cluster.osd_continue(0).expect("the OSD goes on");
    // As after a kill: locked by the dead client, guarded, and free for its own cache alone.
    // An OSD that stood still may leave a client without an answer until it gives up.
    let locks = (0..3).find_map(|_| cluster.rbd(&["lock", "ls", "unreleased"]).ok());
    assert_ne!(locks.expect("rbd lock ls"), "");
    cluster
        .rbd(&["bench", "--io-type", "write", "--io-total", "4K", "unreleased"])
        .expect_err("guarded");
    rig.daemon.start().expect("its own cache takes it back");
    let data = rig.client().expect("connect").read(0, 65536).expect("read");
    assert!(data.iter().all(|byte| *byte == 7), "nothing is lost");
    rig.admin.drain(VOLUME).expect("drain");
    assert!(rig.daemon.terminate().expect("it ends").success());
}

#[test]
fn a_removed_volume_is_a_plain_image_that_others_can_write() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let size_bytes = 64 * MIB;
    let mut rig = rig(&cluster, "plain", size_bytes, 64 * MIB);
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(84), size_bytes)).expect("connect");
    workload.run(500).expect("a run");
    workload.disconnect().expect("goodbye");
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
    rig.verify_export(&cluster, "plain", &mut workload).expect("the image is what was written");
    let locks = cluster.rbd(&["lock", "ls", "plain"]).expect("rbd lock ls");
    assert_eq!(locks, "", "no lock is left");
    cluster
        .rbd(&["bench", "--io-type", "write", "--io-total", "1M", "plain"])
        .expect("anybody can write");
    assert!(rig.daemon.terminate().expect("it ends").success());
}

#[test]
fn an_image_in_use_by_another_client_is_refused_on_one_line() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let rig = rig(&cluster, "used", 64 * MIB, 64 * MIB);
    // By another daemon.
    let (status, line) = refused_serve(&rig.scratch, &cluster.uri("used"));
    assert_eq!(status, 1);
    assert!(line.contains(&format!("{}/used", cluster.pool())), "{line}");
    // By a writer of another kind: an export of qemu-nbd that has written.
    cluster.rbd_create("taken", 64 * MIB).expect("an image");
    let socket = rig.scratch.join("qemu.sock");
    let mut command = Command::new("qemu-nbd");
    command
        .args(["--persistent", "--format", "raw", "--socket"])
        .arg(&socket)
        .arg(format!("rbd:{}/taken:conf={}", cluster.pool(), cluster.conf().display()))
        .stdin(Stdio::null());
    let _holder: Process = Process::spawn(command).expect("qemu-nbd starts");
    let mut client = None;
    for _ in 0..200 {
        match tidepool_testkit::nbd::Client::connect(&socket, "") {
            Ok(connected) => {
                client = Some(connected);
                break;
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    client.as_mut().expect("qemu-nbd serves").write(0, &[1; 4096]).expect("a write takes the lock");
    let (status, line) = refused_serve(&rig.scratch, &cluster.uri("taken"));
    assert_eq!(status, 1);
    assert!(line.contains(&format!("{}/taken", cluster.pool())) && line.contains("lock"), "{line}");
    client
        .as_mut()
        .expect("connected")
        .write(4096, &[2; 4096])
        .expect("the holder is not disturbed");
}

#[test]
fn images_that_are_not_there_are_refused_on_one_line() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let scratch = tidepool_testkit::Scratch::new("rig").expect("a directory");
    let (status, line) = refused_serve(&scratch, &cluster.uri("absent"));
    assert_eq!(status, 1);
    assert!(line.contains("absent"), "{line}");
    let elsewhere = cluster.uri("absent").replace(cluster.pool(), "no-such-pool");
    let (status, line) = refused_serve(&scratch, &elsewhere);
    assert_eq!(status, 1);
    assert!(line.contains("no-such-pool"), "{line}");
    let output =
        tidepool_testkit::daemon::run(["check", &cluster.uri("absent")]).expect("tidepool runs");
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("absent"), "{told}");
}

#[test]
fn a_killed_daemon_takes_its_image_back_from_its_own_dead_client() {
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let size_bytes = 64 * MIB;
    let mut rig = rig(&cluster, "again", size_bytes, 64 * MIB);
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(85), size_bytes)).expect("connect");
    for _ in 0..3 {
        workload.run(200).expect("a run");
        rig.daemon.kill().expect("kill");
        let ready =
            rig.start_and_verify(&mut workload).expect("it takes the image back, nothing is lost");
        println!("ready after {ready:?}");
    }
}

/// Bytes that an image takes in its pool.
fn used_bytes(cluster: &Cluster, image: &str) -> u64 {
    let du = cluster.rbd(&["du", "--format", "json", image]).expect("rbd du");
    let du: serde_json::Value = serde_json::from_str(&du).expect("JSON");
    du["images"][0]["used_size"].as_u64().expect("a size")
}

/// Runs commands as a guest would that has the volume as its disk, with its file system mounted in
/// the directory `disk`. Everything is gone when they end.
fn in_guest(rig: &Rig, commands: &str) {
    let script = format!(
        r#"cd "$1"
        mkdir -p fuse disk
        nbdfuse fuse/volume "$2" &
        until [ -e fuse/volume ]; do sleep 0.05; done
        device=$(losetup --find --show fuse/volume)
        trap 'umount disk; losetup --detach "$device"; kill %1' EXIT
        [ -e formatted ] || mkfs.ext4 -q -b 4096 -E nodiscard "$device"
        touch formatted
        mount "$device" disk
        {commands}
        sync"#
    );
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"])
        .args(["timeout", "120", "bash", "-euo", "pipefail", "-c", &script, "guest"])
        .arg(rig.scratch.path())
        .arg(rig.uri())
        .status();
    assert!(status.expect("unshare runs").success(), "{commands}");
}

#[test]
fn what_a_guest_trims_is_given_back_to_the_pool() {
    if let Err(why) = tidepool_tests::disk::possible() {
        return println!("not tested: {why}");
    }
    let (cluster, _turn) = (Cluster::for_test().expect("a cluster"), one_at_a_time());
    let rig = rig(&cluster, "trimmed", 512 * MIB, 128 * MIB);
    in_guest(&rig, "head -c 96M /dev/urandom > disk/large; head -c 1M /dev/urandom > disk/small");
    rig.admin.drain(VOLUME).expect("drain");
    let full = used_bytes(&cluster, "trimmed");
    assert!(full >= 96 * MIB, "{full} bytes are used");
    in_guest(&rig, "sha256sum disk/small > before; rm disk/large; sync; fstrim disk");
    rig.admin.drain(VOLUME).expect("drain");
    let trimmed = used_bytes(&cluster, "trimmed");
    assert!(trimmed + 80 * MIB <= full, "of {full} bytes {trimmed} are left");
    in_guest(&rig, "sha256sum --check --quiet before");
}
