//! A real guest with a real filesystem on the volume, the daemon dying under it.

use std::time::Duration;

use tidepool_testkit::guest::GuestImage;
use tidepool_testkit::{one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

const MINUTE: Duration = Duration::from_secs(60);
/// Kills of the daemon that the running guest has to ride out.
const KILLS: usize = 6;

#[test]
fn g2_a_guest_rides_out_kills_of_the_daemon_and_finds_its_files_when_it_is_killed_with_it() {
    let _turn = one_at_a_time();
    let seed = rng::seed(71);
    let mut rig = Rig::with_file(192 * MIB, 128 * MIB).expect("the daemon starts");
    let image = GuestImage::build().expect("a guest's image");
    let mut guest = image.boot(&rig.socket, VOLUME).expect("the guest boots");
    guest
        .run("/sbin/mke2fs -q -t ext4 /dev/vda && mount /dev/vda /mnt", MINUTE)
        .expect("a filesystem");
    guest.run(&format!("verifier run /mnt {seed} 1000000 &"), MINUTE).expect("the verifier starts");
    for _ in 0..KILLS {
        for _ in 0..5 {
            guest.wait_for("synced", 2 * MINUTE).expect("it writes, or goes on writing");
        }
        rig.daemon.kill().expect("kill");
        rig.daemon.start().expect("the daemon starts again");
    }
    guest.wait_for("synced", 2 * MINUTE).expect("it goes on");
    guest.check_kernel_log().expect("a pause each, and no error");
    assert!(
        !guest.console().contains("verifier-"),
        "the verifier writes to the end: {}",
        guest.console()
    );

    rig.daemon.kill().expect("kill");
    let synced = guest.synced();
    guest.kill().expect("kill");
    rig.daemon.start().expect("the daemon starts again");
    let mut guest = image.boot(&rig.socket, VOLUME).expect("the guest boots again");
    guest.run("mount /dev/vda /mnt", MINUTE).expect("the journal is replayed");
    assert!(guest.run("dmesg", MINUTE).expect("dmesg").contains("recovery complete"));
    guest
        .run(&format!("verifier check /mnt {seed} {synced}"), MINUTE)
        .expect("what was synced is there");
    guest
        .run("umount /mnt && /sbin/e2fsck -f -n /dev/vda", MINUTE)
        .expect("the filesystem is clean");
}
