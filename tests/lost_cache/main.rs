//! The cache is destroyed under load: the image, without it, is one exact state of the volume.
//! `make lost` does this for long.

use std::fs::{self, File};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use tidepool_testkit::{Cluster, Process, Scratch, daemon, one_at_a_time, rng};
use tidepool_tests::disk;
use tidepool_tests::lost::round;

/// Longest run of a round with a database: a minute on two cores.
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn g5_a_destroyed_cache_leaves_a_file_as_it_once_was() {
    let _turn = one_at_a_time();
    for seed in 0..3 {
        println!(
            "{:?}",
            round(None, rng::seed(500 + seed)).expect("an exact state, and a loss that is bounded")
        );
    }
}

#[test]
fn g5_a_destroyed_cache_leaves_an_rbd_image_as_it_once_was() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let round =
        round(Some(&cluster), rng::seed(510)).expect("an exact state, and a loss that is bounded");
    println!("{round:?}");
}

#[test]
fn g5_a_destroyed_cache_leaves_a_filesystem_and_a_database_that_recover() {
    let _turn = one_at_a_time();
    if let Err(why) = disk::possible() {
        // Written past the capture of a test's output: who runs the tests is to see it.
        let _ = writeln!(std::io::stderr(), "skipped, no PostgreSQL on a lost cache: {why}");
        return;
    }
    let seed = rng::seed(520);
    let scratch = Scratch::new("lost").expect("a directory");
    let output = File::create(scratch.join("log")).expect("a log");
    // A process of its own, because the round has mounts of its own.
    let mut command = Command::new(env!("CARGO_BIN_EXE_lost"));
    command.args(["--postgres", "--rounds=1", &format!("--seed={seed}")]);
    command.env("TIDEPOOL_BIN", daemon::tidepool().expect("tidepool")).stdin(Stdio::null());
    command.stdout(output.try_clone().expect("a log")).stderr(output);
    let mut process = Process::spawn(command).expect("the round starts");
    let status = process.wait(LIMIT).expect("wait");
    let log = fs::read_to_string(scratch.join("log")).expect("the log");
    assert!(status.is_some_and(|status| status.success()), "{status:?}:\n{log}");
    println!("{log}");
}
