//! A real guest with a real filesystem on the volume, the daemon dying under it.

use std::time::Duration;

use tidepool_testkit::guest::GuestImage;
use tidepool_testkit::{one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

const MINUTE: Duration = Duration::from_secs(60);
/// Kills that the running guest has to ride out.
const KILLS: usize = 10;

#[test]
fn g2_a_guest_killed_together_with_the_daemon_finds_its_files_and_a_clean_filesystem() {
    let _turn = one_at_a_time();
    let seed = rng::seed(71);
    let mut rig = Rig::with_file(192 * MIB, 128 * MIB).expect("the daemon starts");
    let image = GuestImage::build().expect("a guest's image");
    let mut guest = image.boot(&rig.socket, VOLUME).expect("the guest boots");
    guest.run("/sbin/mke2fs -q -t ext4 /dev/vda && mount /dev/vda /mnt", MINUTE).expect("a filesystem");
    guest.run(&format!("verifier run /mnt {seed} 1000000 &"), MINUTE).expect("the verifier starts");
    for _ in 0..40 {
        guest.wait_for("synced", MINUTE).expect("it writes");
    }
    rig.daemon.kill().expect("kill");
    let synced = guest.synced();
    guest.kill().expect("kill");

    rig.daemon.start().expect("the daemon starts again");
    let mut guest = image.boot(&rig.socket, VOLUME).expect("the guest boots again");
    guest.run("mount /dev/vda /mnt", MINUTE).expect("the journal is replayed");
    assert!(guest.run("dmesg", MINUTE).expect("dmesg").contains("recovery complete"));
    guest.run(&format!("verifier check /mnt {seed} {synced}"), MINUTE).expect("what was synced is there");
    guest.run("umount /mnt && /sbin/e2fsck -f -n /dev/vda", MINUTE).expect("the filesystem is clean");
}

#[test]
fn g2_a_running_guest_rides_out_ten_kills_of_the_daemon_without_an_error() {
    let _turn = one_at_a_time();
    let seed = rng::seed(72);
    let mut rig = Rig::with_file(192 * MIB, 128 * MIB).expect("the daemon starts");
    let image = GuestImage::build().expect("a guest's image");
    let mut guest = image.boot(&rig.socket, VOLUME).expect("the guest boots");
    guest.run("/sbin/mke2fs -q -t ext4 /dev/vda && mount /dev/vda /mnt", MINUTE).expect("a filesystem");
    guest.run(&format!("verifier run /mnt {seed} 1000000 &"), MINUTE).expect("the verifier starts");
    for _ in 0..KILLS {
        for _ in 0..5 {
            guest.wait_for("synced", 2 * MINUTE).expect("it writes, or goes on writing");
        }
        rig.daemon.kill().expect("kill");
        rig.daemon.start().expect("the daemon starts again");
    }
    guest.wait_for("synced", 2 * MINUTE).expect("it goes on");
    // Waited for by the guest's shell: what the verifier says last may come before the status of a command and after it.
    guest.run("touch /tmp/stop; wait", 2 * MINUTE).expect("stop");
    assert!(guest.console().contains("verifier-done"), "the verifier ended early: {}", guest.console());
    assert!(!guest.console().contains("verifier-failed"), "the verifier complains: {}", guest.console());
    guest.check_kernel_log().expect("a pause each, and no error");
    guest.run("umount /mnt && /sbin/e2fsck -f -n /dev/vda", MINUTE).expect("the filesystem is clean");
}
