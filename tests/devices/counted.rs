//! What is cached of a disk stays over an orderly restart if the kernel has counted no write to the disk since.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tidepool_testkit::guest::{Disk, Equipment, Guest, GuestImage};
use tidepool_testkit::{Scratch, need, one_at_a_time};
use tidepool_tests::rig::MIB;

const COMMAND_MAX: Duration = Duration::from_secs(60);
const START_MAX: Duration = Duration::from_secs(180);

/// Serves the disk, reads from it, and ends the daemon in order. Whether what was cached before has stayed, by the daemon's word and by what
/// it has read from the disk.
fn stays(guest: &mut Guest) -> bool {
    let serve = "tidepool serve --cache /data/cache --cache-size 64MiB --nbd 'nbd+unix:///?socket=/tmp/nbd.sock' \
                 --admin /tmp/admin.sock --accept-loss 60m --volume vm=file:/dev/nvme1n1 </dev/null >/tmp/out 2>/tmp/log & daemon=$!";
    guest.run(serve, COMMAND_MAX).expect("started");
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

#[test]
#[ignore = "a boot of a guest that is emulated: make long"]
fn g1_what_is_cached_of_a_disk_stays_while_the_kernel_counts_no_write_to_it() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("counted").expect("a directory");
    let paths: [PathBuf; 2] = ["data", "disk"].map(|name| scratch.join(name));
    for (path, bytes) in paths.iter().zip([256 * MIB, 2 * MIB]) {
        File::create(path).and_then(|file| file.set_len(bytes)).expect("a disk");
    }
    need("mke2fs", "e2fsprogs").expect("installed");
    let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&paths[0]).status();
    assert!(made.expect("it runs").success());
    let image = GuestImage::build_equipped(Equipment {
        modules: &["nbd"],
        programs: &[("nbd-client", "nbd-client")],
        tidepool: true,
        ..Equipment::default()
    })
    .expect("a guest's image");
    let disks = [("data", &paths[0]), ("disk", &paths[1])];
    let mut guest = image
        .boot_as_metal(&disks.map(|(serial, file)| Disk { file, serial: Some(serial) }))
        .expect("the guest boots");
    for line in [
        "mkdir -p /data /var/lib/tidepool && mount -t ext4 /dev/nvme0n1 /data",
        "yes content | head -c 2097152 >/data/want && dd if=/data/want of=/dev/nvme1n1 bs=65536 conv=fsync 2>/tmp/dd",
    ] {
        guest.run(line, COMMAND_MAX).expect("the disks");
    }
    assert!(!stays(&mut guest), "nothing is cached at first");
    assert!(stays(&mut guest), "nobody has written");
    assert!(stays(&mut guest), "nobody has written");
    for (what, line) in [
        ("a write", "dd if=/data/want of=/dev/nvme1n1 bs=4096 count=1 conv=notrunc,fsync 2>/tmp/dd"),
        (
            "a discard",
            "blkdiscard -o 1048576 -l 4096 /dev/nvme1n1 && dd if=/dev/nvme1n1 of=/data/want bs=1M count=2 iflag=direct 2>/tmp/dd",
        ),
        ("a device that is not counted", "echo 0 >/sys/block/nvme1n1/queue/iostats"),
    ] {
        guest.run(line, COMMAND_MAX).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(!stays(&mut guest), "{what}");
    }
    guest.run("echo 1 >/sys/block/nvme1n1/queue/iostats", COMMAND_MAX).expect("counted again");
    assert!(!stays(&mut guest), "what was written while nothing was counted is not known");
    assert!(stays(&mut guest), "nobody has written");
}
