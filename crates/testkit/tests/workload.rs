//! The checker must pass a server that keeps its promises, and catch a server that does not.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tidepool_testkit::stamps::{Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Error, Scratch, Server, one_at_a_time, rng};

const SIZE_BYTES: u64 = 32 << 20;

fn file_server(scratch: &Scratch, image: &Path) -> Server {
    let file = format!("file={}", image.display());
    // nbdkit executes one request at a time, over all connections. Otherwise a read of a file in
    // the page cache beside a write may return half of a sector, which no disk does.
    let words = ["--filter=noparallel", "file", &file, "serialize=all-requests"];
    Server::nbdkit(&scratch.join("nbd.sock"), words).expect("nbdkit serves a file")
}

fn image(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.join("image");
    std::fs::File::create(&path).and_then(|file| file.set_len(SIZE_BYTES)).expect("an image file");
    path
}

/// Runs the workload in the background and kills the server meanwhile.
fn kill_under_load(workload: &mut Workload, server: Server, after: Duration) {
    let never = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&never));
        std::thread::sleep(after);
        server.kill().expect("the server is killed");
        assert_eq!(
            run.join().expect("the workload runs").expect("no violation"),
            Progress::Disconnected
        );
    });
    workload.server_died();
}

#[test]
fn a_server_that_keeps_completed_writes_passes_kill_after_kill() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("workload").expect("a directory");
    let image = image(&scratch);
    let mut workload = Workload::new(WorkloadOptions::new(rng::seed(1), SIZE_BYTES));
    for round in 0..5 {
        let server = file_server(&scratch, &image);
        workload.connect(server.socket(), "").expect("connect");
        assert_eq!(workload.verify().expect("nothing is lost"), Progress::Done);
        kill_under_load(&mut workload, server, Duration::from_millis(100 + 50 * round));
    }
    let server = file_server(&scratch, &image);
    workload.connect(server.socket(), "").expect("connect");
    workload.run(500).expect("a run that ends");
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
    let summary = workload.summary();
    assert!(summary.abandoned > 0 && summary.in_flight_max >= 16, "{summary:?}");
    assert!(summary.reads > 0 && summary.writes > 0 && summary.flushes > 0, "{summary:?}");
}

#[test]
fn a_server_that_forgets_is_caught() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("workload").expect("a directory");
    let mut workload = Workload::new(WorkloadOptions::new(rng::seed(2), SIZE_BYTES));
    let size = SIZE_BYTES.to_string();
    for _ in 0..2 {
        let server = Server::nbdkit(&scratch.join("nbd.sock"), ["memory", &size]).expect("nbdkit");
        workload.connect(server.socket(), "").expect("connect");
        match workload.verify() {
            Ok(Progress::Done) => {
                kill_under_load(&mut workload, server, Duration::from_millis(200))
            }
            Err(Error::Violation { violation, .. }) => {
                assert_eq!(violation.found, "zeros");
                return;
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("the memory of a killed server cannot have survived");
}

#[test]
fn one_stale_sector_is_caught() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("workload").expect("a directory");
    let image = image(&scratch);
    let mut workload = Workload::new(WorkloadOptions::new(rng::seed(3), SIZE_BYTES));
    let server = file_server(&scratch, &image);
    workload.connect(server.socket(), "").expect("connect");
    workload.run(300).expect("a run");
    let before = std::fs::read(&image).expect("the image");
    workload.run(300).expect("a run");
    workload.verify().expect("right so far");
    let after = std::fs::read(&image).expect("the image");
    let changed =
        before.chunks(512).zip(after.chunks(512)).position(|(before, after)| before != after);
    let place = changed.expect("the second run changed something") * 512;
    let file = std::fs::OpenOptions::new().write(true).open(&image).expect("open");
    std::os::unix::fs::FileExt::write_all_at(&file, &before[place..place + 512], place as u64)
        .expect("write");
    match workload.verify() {
        Err(Error::Violation { violation, .. }) => {
            assert_eq!(violation.sector as usize, place / 512)
        }
        other => panic!("{other:?}"),
    }
}
