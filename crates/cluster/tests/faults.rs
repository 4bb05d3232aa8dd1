//! Emulated devices that lose power, return errors and hold requests back.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use tidepool_cluster::device::faults::{Act, Remains, Times};
use tidepool_cluster::device::model::Kind;
use tidepool_cluster::device::{Emulated, preset};
use tidepool_cluster::{Scratch, scratch};

const MIB: u64 = 1 << 20;
/// Longest wait for something that comes at once.
const LIMIT: Duration = Duration::from_secs(30);

struct Bench {
    // Dropped before its directory.
    device: Emulated,
    _scratch: Scratch,
}

impl Bench {
    fn new() -> Bench {
        let scratch = Scratch::new("faults").expect("a directory");
        let spec = preset::find("nvme").expect("a preset").spec;
        let device =
            Emulated::start(spec, 8 * MIB, &[], &scratch.join("backing"), &scratch.join("device"))
                .expect("a device");
        Bench { device, _scratch: scratch }
    }

    fn open(&self, flags: i32) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
        options.open(self.device.directory().join("file")).expect("open")
    }
}

fn read(file: &File, offset: u64) -> io::Result<u8> {
    let mut buf = [0; 512];
    file.read_exact_at(&mut buf, offset).map(|()| buf[0])
}

#[test]
fn what_was_flushed_or_written_durably_is_there_after_a_power_loss_and_the_rest_may_not_be() {
    let mut lost = 0;
    let bench = Bench::new();
    bench.device.faults().volatile(true);
    for seed in 0..40 {
        // Opened without O_DIRECT. The page cache holds nothing of the device anyway.
        let file = bench.open(0);
        let durable = bench.open(libc::O_DSYNC);
        let value = seed as u8 + 1;
        file.write_all_at(&[value; 4096], 0).expect("written");
        file.sync_data().expect("flushed");
        file.write_all_at(&[value; 4096], MIB).expect("written");
        durable.write_all_at(&[value; 4096], 2 * MIB).expect("written");
        assert_eq!(read(&file, MIB).expect("read"), value, "a read gets the newest");
        bench.device.lose_power(seed).expect("lost");
        assert_eq!(read(&file, 0).expect("read"), value);
        assert_eq!(read(&durable, 2 * MIB).expect("read"), value);
        lost += u64::from(read(&file, MIB).expect("read") != value);
    }
    assert!((3..38).contains(&lost), "{lost} of 40 are lost");
}

#[test]
fn a_failed_flush_is_not_made_up_for_by_the_next() {
    let mut lost = 0;
    for seed in 0..10 {
        let bench = Bench::new();
        bench.device.faults().volatile(true);
        let file = bench.open(0);
        bench.device.faults().fail(Kind::Flush, 1, Times::Once, Remains::Nothing);
        file.write_all_at(&[1; 4096], 0).expect("written");
        file.sync_data().expect_err("it fails");
        file.sync_data().expect("the next one says that all is well");
        bench.device.lose_power(seed).expect("lost");
        lost += u32::from(read(&file, 0).expect("read") == 0);
    }
    assert!(lost > 0);
}

#[test]
fn the_nth_operation_of_a_kind_fails_once_or_from_then_on() {
    let bench = Bench::new();
    let faults = bench.device.faults();
    let file = bench.open(0);
    file.write_all_at(&[7; 4096], 0).expect("written");
    for (kind, times) in [
        (Kind::Write, Times::Once),
        (Kind::Write, Times::Always),
        (Kind::Read, Times::Once),
        (Kind::Read, Times::Always),
        (Kind::Flush, Times::Once),
        (Kind::Flush, Times::Always),
    ] {
        faults.fail(kind, 2, times, Remains::Nothing);
        let outcomes: Vec<bool> = (0..4)
            .map(|_| match kind {
                Kind::Write => file.write_all_at(&[8; 4096], MIB).map_err(|e| e.raw_os_error()),
                Kind::Read => read(&file, 0).map(drop).map_err(|e| e.raw_os_error()),
                _ => file.sync_data().map_err(|e| e.raw_os_error()),
            })
            .map(|outcome| outcome.inspect_err(|errno| assert_eq!(*errno, Some(libc::EIO))).is_ok())
            .collect();
        let again = times == Times::Once;
        assert_eq!(outcomes, [true, false, again, again], "{kind:?} {times:?}");
        assert_eq!(faults.seen(kind), 4);
        faults.reconnect();
        assert_eq!(read(&file, 0).expect("all is well again"), 7);
    }
}

#[test]
fn a_trim_fails_as_planned_and_a_device_that_has_died_takes_none() {
    let bench = Bench::new();
    let faults = bench.device.faults();
    let file = bench.open(0);
    let punch = |offset| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, offset, 4096)
    };
    file.write_all_at(&[7; 8192], 0).expect("written");
    for (remains, left) in [(Remains::Nothing, 7), (Remains::Part, 7), (Remains::All, 0)] {
        file.write_all_at(&[7; 4096], 0).expect("written");
        faults.fail(Kind::Trim, 2, Times::Once, remains);
        punch(4096).expect("the first one");
        assert_eq!(punch(0), Err(Errno::IO), "{remains:?}");
        assert_eq!(faults.seen(Kind::Trim), 2);
        faults.reconnect();
        assert_eq!(
            [read(&file, 0), read(&file, 4096)].map(|byte| byte.expect("read")),
            [left, 0],
            "{remains:?}"
        );
    }
    file.write_all_at(&[7; 4096], 0).expect("written");
    faults.disconnect();
    let before = faults.refused();
    assert_eq!(punch(0), Err(Errno::IO));
    assert!(faults.refused() > before);
    faults.reconnect();
    assert_eq!(read(&file, 0).expect("read"), 7);
}

#[test]
fn what_remains_of_a_failed_write_is_nothing_a_part_or_all() {
    let bench = Bench::new();
    let file = bench.open(0);
    for (number, (remains, sectors)) in
        (1..).zip([(Remains::Nothing, 0..=0), (Remains::Part, 1..=127), (Remains::All, 128..=128)])
    {
        file.write_all_at(&[0; 65536], 0).expect("written");
        bench.device.faults().fail(Kind::Write, 1, Times::Once, remains);
        file.write_all_at(&[number; 65536], 0).expect_err("it fails");
        let mut found = vec![0; 65536];
        file.read_exact_at(&mut found, 0).expect("read");
        let whole = found.chunks(512).filter(|sector| **sector == [number; 512]).count();
        let none = found.chunks(512).filter(|sector| **sector == [0; 512]).count();
        assert_eq!(whole + none, 128, "{remains:?}: a sector is one or the other");
        assert!(sectors.contains(&whole), "{remains:?}: {whole} sectors");
    }
}

#[test]
fn an_operation_that_is_held_has_taken_effect_or_not_and_nothing_comes_behind_it() {
    for (remains, found) in [(Remains::Nothing, [0, 0]), (Remains::All, [1, 0])] {
        let bench = Bench::new();
        let faults = bench.device.faults();
        let file = bench.open(0);
        file.write_all_at(&[0; 4096], 2 * MIB).expect("as long as it gets");
        faults.plan(move |operation| {
            let hit =
                operation.kind == Kind::Write && operation.file == "file" && operation.data[0] == 1;
            if hit { Act::Hold(remains) } else { Act::Pass }
        });
        assert!(!faults.wait_held(Duration::ZERO));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| file.write_all_at(&[1; 4096], 0));
            assert!(faults.wait_held(LIMIT), "{remains:?}");
            let second = scope.spawn(|| file.write_all_at(&[2; 4096], MIB));
            assert!(!first.is_finished());
            faults.disconnect();
            assert!(
                first.join().expect("no panic").is_err()
                    && second.join().expect("no panic").is_err()
            );
        });
        faults.reconnect();
        assert_eq!(
            [read(&file, 0).expect("read"), read(&file, MIB).expect("read")],
            found,
            "{remains:?}"
        );
    }
}

#[test]
fn a_device_that_is_cut_off_answers_nothing_any_more() {
    let bench = Bench::new();
    let faults = bench.device.faults();
    let file = bench.open(0);
    file.write_all_at(&[1; 4096], 0).expect("written");
    faults.cut();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write_all_at(&[2; 4096], 0));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!write.is_finished());
        faults.disconnect();
        assert!(write.join().expect("no panic").is_err());
    });
    faults.reconnect();
    assert_eq!(read(&file, 0).expect("read"), 1);
}

#[test]
fn a_device_that_has_died_fails_every_request_and_counts_them() {
    let bench = Bench::new();
    let faults = bench.device.faults();
    let file = bench.open(0);
    file.write_all_at(&[1; 4096], 0).expect("written");
    assert_eq!(faults.refused(), 0);
    faults.disconnect();
    file.write_all_at(&[2; 4096], 0).expect_err("it is dead");
    read(&file, 0).expect_err("it is dead");
    file.sync_all().expect_err("it is dead");
    assert!(faults.refused() >= 3, "{}", faults.refused());
}

#[test]
fn a_device_that_holds_something_can_be_dropped() {
    let bench = Bench::new();
    let file = bench.open(0);
    bench.device.faults().plan(|_| Act::Hold(Remains::Nothing));
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write_all_at(&[2; 4096], 0));
        assert!(bench.device.faults().wait_held(LIMIT));
        drop(bench);
        assert!(write.join().expect("no panic").is_err());
    });
}

/// Environment variable with the parent of the child's directory.
const PARENT: &str = "TIDEPOOL_TEST_PARENT";

/// A child process that a test starts and kills. It waits for a device that it serves itself.
#[test]
#[ignore = "a test starts it"]
fn child_that_waits_for_its_own_device() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let scratch = Scratch::new_in(parent.as_ref(), "waits").expect("a directory");
    let spec = preset::find("nvme").expect("a preset").spec;
    let device =
        Emulated::start(spec, 8 * MIB, &[], &scratch.join("backing"), &scratch.join("device"));
    let bench = Bench { device: device.expect("a device"), _scratch: scratch };
    let file = bench.open(libc::O_DIRECT);
    bench.device.faults().plan(|_| Act::Hold(Remains::Nothing));
    std::thread::scope(|scope| {
        scope.spawn(|| file.sync_all());
        assert!(bench.device.faults().wait_held(LIMIT));
        println!("held");
        std::thread::sleep(LIMIT * 10);
    });
}

#[test]
fn a_killed_process_that_waits_for_its_own_device_ends_and_what_it_has_left_goes() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("not looked at: only root ends the connection of a mount to its server");
    }
    let outer = Scratch::new("killed").expect("a directory");
    let mut child = std::process::Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", "child_that_waits_for_its_own_device", "--ignored", "--nocapture"])
        .env(PARENT, outer.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let said = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    assert!({ said }.any(|line| line.ends_with("held")), "it waits for its device");
    child.kill().expect("it is ours");
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        child.try_wait().expect("a child").is_none(),
        "it hangs in the kernel: else there is nothing to show"
    );
    scratch::clear_after(child.id(), outer.path());
    let begun = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        assert!(begun.elapsed() < LIMIT, "it hangs still");
        std::thread::sleep(Duration::from_millis(20));
    }
    let base = outer.join(scratch::base().file_name().expect("a name"));
    assert_eq!(std::fs::read_dir(base).expect("a directory").count(), 0, "all of it is gone");
}
