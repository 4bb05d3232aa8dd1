//! What is cached of a disk, or of an RBD image that the kernel has mapped, stays over an orderly
//! restart if nobody has written since.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tidepool_testkit::guest::{Disk, Equipment, Guest, GuestImage};
use tidepool_testkit::{Cluster, ClusterOptions, Scratch, need, one_at_a_time};
use tidepool_tests::mapped::{self, map};
use tidepool_tests::rig::MIB;

const COMMAND_MAX: Duration = Duration::from_secs(60);
const START_MAX: Duration = Duration::from_secs(180);

/// Serves the device, reads from it, and ends the daemon in order. Whether what was cached before
/// has stayed, by the daemon's word and by what it has read from the device.
#[track_caller]
fn stays(guest: &mut Guest, device: &str) -> bool {
    let serve = format!(
        "tidepool serve --cache /data/cache --cache-size 64MiB --nbd 'nbd+unix:///?socket=/tmp/nbd.sock' \
                 --admin /tmp/admin.sock --accept-loss 60m --volume vm=file:{device} </dev/null >/tmp/out 2>/tmp/log & daemon=$!"
    );
    guest.run(&serve, COMMAND_MAX).expect("started");
    let wait = "until grep -q '^ready' /tmp/out; do [ -d /proc/$daemon ] || break; sleep 0.2; done; grep -q '^ready' /tmp/out";
    if let Err(error) = guest.run(wait, START_MAX) {
        panic!("{error}: {}", guest.run("cat /tmp/log", COMMAND_MAX).unwrap_or_default());
    }
    let read = "nbd-client -unix /tmp/nbd.sock /dev/nbd0 -N vm >/tmp/nbd 2>&1 && dd if=/dev/nbd0 of=/tmp/read bs=1M count=2 iflag=direct 2>/tmp/dd; \
                cmp /tmp/read /data/want && nbd-client -d /dev/nbd0 >/tmp/nbd 2>&1";
    guest.run(read, COMMAND_MAX).expect("what is on the disk");
    let counters = "tidepool status --format json --admin /tmp/admin.sock";
    let status: serde_json::Value =
        serde_json::from_str(&guest.run(counters, COMMAND_MAX).expect("a status")).expect("JSON");
    let missed = status["volumes"][0]["counters"]["miss_blocks"].as_u64().expect("a number");
    let log = guest.run("cat /tmp/log", COMMAND_MAX).expect("a log");
    guest.run("kill $daemon; wait $daemon", START_MAX).expect("it ends");
    let says = log.contains("volume vm: cached data stays");
    assert_eq!(says, missed == 0, "{missed} blocks were missed: {log}");
    says
}

/// A disk with a file system for the guest's own files.
fn disk_with_files(scratch: &Scratch) -> PathBuf {
    let path = scratch.join("data");
    File::create(&path).and_then(|file| file.set_len(256 * MIB)).expect("a disk");
    need("mke2fs", "e2fsprogs").expect("installed");
    let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&path).status();
    assert!(made.expect("it runs").success());
    path
}

#[test]
#[ignore = "a boot of a guest that is emulated: make long"]
fn g1_what_is_cached_of_a_disk_stays_while_the_kernel_counts_no_write_to_it() {
    const DISK: &str = "/dev/nvme1n1";
    let _turn = one_at_a_time();
    let scratch = Scratch::new("counted").expect("a directory");
    let (data, disk) = (disk_with_files(&scratch), scratch.join("disk"));
    File::create(&disk).and_then(|file| file.set_len(2 * MIB)).expect("a disk");
    let image = GuestImage::build_equipped(Equipment {
        modules: &["nbd"],
        programs: &[("nbd-client", "nbd-client")],
        tidepool: true,
        ..Equipment::default()
    })
    .expect("a guest's image");
    let disks = [("data", &data), ("disk", &disk)];
    let mut guest = image
        .boot_as_metal(&disks.map(|(serial, file)| Disk { file, serial: Some(serial) }))
        .expect("the guest boots");
    for line in [
        "mkdir -p /data /var/lib/tidepool && mount -t ext4 /dev/nvme0n1 /data",
        "yes content | head -c 2097152 >/data/want && dd if=/data/want of=/dev/nvme1n1 bs=65536 conv=fsync 2>/tmp/dd",
    ] {
        guest.run(line, COMMAND_MAX).expect("the disks");
    }
    assert!(!stays(&mut guest, DISK), "nothing is cached at first");
    assert!(stays(&mut guest, DISK), "nobody has written");
    assert!(stays(&mut guest, DISK), "nobody has written");
    for (what, line) in [
        (
            "a write",
            "dd if=/data/want of=/dev/nvme1n1 bs=4096 count=1 conv=notrunc,fsync 2>/tmp/dd",
        ),
        (
            "a discard",
            "blkdiscard -o 1048576 -l 4096 /dev/nvme1n1 && dd if=/dev/nvme1n1 of=/data/want bs=1M count=2 iflag=direct 2>/tmp/dd",
        ),
        ("a device that is not counted", "echo 0 >/sys/block/nvme1n1/queue/iostats"),
    ] {
        guest.run(line, COMMAND_MAX).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(!stays(&mut guest, DISK), "{what}");
    }
    guest.run("echo 1 >/sys/block/nvme1n1/queue/iostats", COMMAND_MAX).expect("counted again");
    assert!(!stays(&mut guest, DISK), "what was written while nothing was counted is not known");
    assert!(stays(&mut guest, DISK), "nobody has written");
}

#[test]
#[ignore = "a boot of a guest that is emulated: make long"]
fn g1_what_is_cached_of_a_mapped_image_stays_while_no_other_client_takes_its_lock() {
    const MAPPED: &str = "/dev/rbd0";
    let _turn = one_at_a_time();
    let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
    let scratch = Scratch::new("mapped").expect("a directory");
    let data = disk_with_files(&scratch);
    let libraries = ceph_libraries();
    let files: Vec<&Path> =
        libraries.iter().map(PathBuf::as_path).chain([cluster.conf()]).collect();
    let image = GuestImage::build_equipped(Equipment {
        modules: &["nbd", mapped::MODULES[0], mapped::MODULES[1]],
        programs: &[("nbd-client", "nbd-client")],
        files: &files,
        tidepool: true,
        ..Equipment::default()
    })
    .expect("a guest's image");
    let rbd = |arguments: &[&str]| drop(cluster.rbd(arguments).expect("rbd"));
    rbd(&["create", "vm", "--size", "2M", "--image-feature", "exclusive-lock"]);
    let mut guest = image
        .boot_on_network(&[Disk { file: &data, serial: Some("data") }])
        .expect("the guest boots");
    guest.join_loopback().expect("a network");
    let (said, status) = map(&mut guest, &cluster, "vm", "");
    assert_eq!(status, 0, "{said}");
    for line in [
        &format!("export CEPH_CONF={}", cluster.conf().display()),
        "mkdir -p /data /var/lib/tidepool && mount -t ext4 /dev/vda /data",
        "yes content | head -c 2097152 >/data/want && dd if=/data/want of=/dev/rbd0 bs=65536 conv=fsync 2>/tmp/dd",
    ] {
        guest.run(line, COMMAND_MAX).expect("the disks");
    }
    let look_again = |guest: &mut Guest| {
        let read = "dd if=/dev/rbd0 of=/data/want bs=1M count=2 iflag=direct 2>/tmp/dd";
        guest.run(read, COMMAND_MAX).expect("what it has now");
    };
    assert!(!stays(&mut guest, MAPPED), "nothing is cached at first");
    assert!(stays(&mut guest, MAPPED), "nobody has written");

    guest
        .run(
            "dd if=/dev/zero of=/dev/rbd0 bs=4096 count=1 conv=notrunc,fsync 2>/tmp/dd",
            COMMAND_MAX,
        )
        .expect("a write");
    look_again(&mut guest);
    assert!(!stays(&mut guest, MAPPED), "somebody on this host has written");
    assert!(stays(&mut guest, MAPPED), "nobody has written");

    rbd(&["bench", "vm", "--io-type", "write", "--io-size", "4096", "--io-total", "8192"]);
    look_again(&mut guest);
    assert!(!stays(&mut guest, MAPPED), "another client has written");
    assert!(stays(&mut guest, MAPPED), "nobody has written, nor has anybody the lock");

    rbd(&["lock", "add", "vm", "by-hand"]);
    assert!(!stays(&mut guest, MAPPED), "another client has the lock");
    assert!(!stays(&mut guest, MAPPED), "it writes without a trace");
    let holder = cluster.rbd(&["lock", "ls", "vm", "--format", "json"]).expect("rbd");
    let holder: serde_json::Value = serde_json::from_str(&holder).expect("JSON");
    rbd(&["lock", "rm", "vm", "by-hand", holder[0]["locker"].as_str().expect("a client")]);
    assert!(!stays(&mut guest, MAPPED), "it has written, as far as anybody knows");
    assert!(stays(&mut guest, MAPPED), "nobody has written");

    let (said, status) = map(&mut guest, &cluster, "vm", "");
    assert_eq!(status, 0, "{said}");
    assert!(!stays(&mut guest, MAPPED), "the host has two disks that are the image");
    mapped::unmap(&mut guest, 1);

    rbd(&["feature", "disable", "vm", "exclusive-lock"]);
    assert!(!stays(&mut guest, MAPPED), "others write without taking a lock");
    assert!(!stays(&mut guest, MAPPED), "others write without taking a lock");
}

/// Ceph's libraries, which the command loads at run time.
fn ceph_libraries() -> Vec<PathBuf> {
    let cache = Command::new("/sbin/ldconfig").arg("-p").output().expect("ldconfig runs");
    let cache = String::from_utf8_lossy(&cache.stdout).into_owned();
    let find = |name: &str| {
        let line =
            cache.lines().find(|line| line.trim().starts_with(name)).expect("installed with Ceph");
        PathBuf::from(line.rsplit(' ').next().expect("a path"))
    };
    ["librados.so.2", "librbd.so.1"].map(find).into()
}
