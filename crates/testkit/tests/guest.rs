//! A guest must survive the death of its server, find its files after a crash of the guest itself,
//! and notice a lost version.

use std::time::Duration;

use tidepool_testkit::guest::GuestImage;
use tidepool_testkit::{Scratch, Server, one_at_a_time};

const MINUTE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "two and a half minutes: make long"]
fn a_guest_rides_out_restarts_of_its_server_and_finds_its_files_after_a_crash() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("guest-test").expect("a directory");
    let disk = scratch.join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(64 << 20)).expect("a disk");
    let serve = || {
        let file = format!("file={}", disk.display());
        Server::nbdkit(&scratch.join("nbd.sock"), ["file", &file]).expect("nbdkit serves a file")
    };
    let image = GuestImage::build().expect("a guest's image");
    let server = serve();
    let mut guest = image.boot(server.socket(), "").expect("the guest boots");
    guest
        .run("/sbin/mke2fs -q -t ext4 /dev/vda && mount /dev/vda /mnt", MINUTE)
        .expect("a filesystem");
    guest.run("verifier run /mnt 5 1000000 &", MINUTE).expect("the verifier starts");
    guest.wait_for("synced", MINUTE).expect("it writes");
    server.kill().expect("kill");
    std::thread::sleep(Duration::from_millis(500));
    let server = serve();
    for _ in 0..5 {
        guest.wait_for("synced", MINUTE).expect("it goes on");
    }
    guest.check_kernel_log().expect("no error was seen");
    let synced = guest.synced();
    guest.kill().expect("kill");
    server.kill().expect("kill");

    let server = serve();
    let mut guest = image.boot(server.socket(), "").expect("the guest boots again");
    guest.run("mount /dev/vda /mnt", MINUTE).expect("the journal is replayed");
    assert!(guest.run("dmesg", MINUTE).expect("dmesg").contains("recovery complete"));
    guest
        .run(&format!("verifier check /mnt 5 {synced}"), MINUTE)
        .expect("what was synced is there");
    let (_, status) =
        guest.run_status("verifier check /mnt 5 0:1000000", MINUTE).expect("the verifier runs");
    assert_eq!(status, 1, "a lost version is noticed");
    guest
        .run("umount /mnt && /sbin/e2fsck -f -n /dev/vda", MINUTE)
        .expect("the filesystem is clean");
    drop(server);
}
