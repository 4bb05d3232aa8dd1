//! Emulated devices under fio: their figures and their data.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use tidepool_cluster::Scratch;
use tidepool_cluster::device::calibrate::calibrate;
use tidepool_cluster::device::{Emulated, Preset, preset};

/// Factor by which a device is slower here than its class, and seconds of a figure. The factor is
/// large enough for two cores that also do something else. A disk, which is slow by itself, is
/// measured long enough for some hundred requests.
fn pace(preset: &Preset) -> (u32, u32) {
    if preset.spec.is_rotational() { (2, 3) } else { (16, 1) }
}

/// How much a device may exceed its class in such a short time. A busy machine slows a device by
/// any amount, so there is no lower bound here: `make calibrate`, which needs the machine for
/// itself, has one. A test in simulated time shows that the model has the figures of its class.
const OVER_MAX: f64 = 0.4;

/// Most times a device is measured that seems to be faster than its class. A device that is faster
/// seems so each time. A device that is not faster seems so only when the machine stood still while
/// its cache was filled.
const ATTEMPTS: usize = 3;

#[test]
#[ignore = "it measures: make long"]
fn no_preset_is_faster_under_fio_than_its_class() {
    for preset in preset::all() {
        let scratch = Scratch::new("calibrate").expect("a directory");
        let (factor, seconds) = pace(&preset);
        let mut seen = Vec::new();
        let classed = (0..ATTEMPTS).any(|_| {
            let rows = calibrate(&preset, factor, scratch.path(), seconds).expect("figures");
            let ratios: Vec<f64> = rows.iter().filter_map(|row| row.ratio()).collect();
            assert!(ratios.len() >= 4, "{rows:?}");
            seen.push(rows);
            ratios.iter().all(|&ratio| ratio > 0.0 && ratio < 1.0 + OVER_MAX)
        });
        assert!(classed, "{}: {seen:?}", preset.spec.name);
    }
}

#[test]
fn a_device_keeps_what_is_written_under_many_requests_at_once() {
    let scratch = Scratch::new("device").expect("a directory");
    let spec = preset::find("nvme").expect("a preset").spec.slowed(2);
    let device = Emulated::start(
        spec.clone(),
        64 << 20,
        &[],
        &scratch.join("backing"),
        &scratch.join("device"),
    )
    .expect("a device");
    let fio = Command::new("fio")
        .args([
            "--name=verify",
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--iodepth=32",
            "--ioengine=libaio",
        ])
        .args(["--direct=1", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"])
        .arg(format!("--filename={}", device.path().display()))
        .current_dir(scratch.path())
        .output()
        .expect("fio runs");
    assert!(fio.status.success(), "{}", String::from_utf8_lossy(&fio.stdout));
    let counts = device.counts();
    assert_eq!(counts.written_bytes, 64 << 20, "{counts:?}");

    let path = device.path();
    let file = OpenOptions::new().write(true).open(&path).expect("open");
    file.write_all_at(b"end", (64 << 20) - 3).expect("up to the end");
    assert!(file.write_all_at(b"end", (64 << 20) - 2).is_err(), "and not beyond");
    file.sync_all().expect("a flush");
    drop(file);
    drop(device);
    assert!(!is_mounted(&scratch.join("device")), "it is unmounted");

    let device = Emulated::start(
        spec,
        64 << 20,
        &[16 << 20, 48 << 20],
        &scratch.join("backing"),
        &scratch.join("device"),
    )
    .expect("again");
    let mut buf = vec![0u8; 8192];
    let skip = buf.as_ptr().align_offset(4096);
    for (path, bytes) in [(device.path(), 64 << 20), (device.part(2), 48 << 20)] {
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).expect("open");
        file.read_exact_at(&mut buf[skip..skip + 4096], bytes - 4096).expect("read");
        assert_eq!(&buf[skip + 4093..skip + 4096], b"end", "its content is kept");
    }
}

/// Environment variable that makes a child of the next test create a device and leave it behind.
const LEFT_BEHIND: &str = "TIDEPOOL_TEST_LEFT_BEHIND";

#[test]
fn a_device_whose_process_was_killed_is_gone_with_the_next_directory() {
    if let Some(parent) = std::env::var_os(LEFT_BEHIND) {
        let scratch = Scratch::new_in(Path::new(&parent), "left").expect("a directory");
        let spec = preset::find("nvme").expect("a preset").spec;
        let _device =
            Emulated::start(spec, 1 << 20, &[], &scratch.join("backing"), &scratch.join("device"))
                .expect("a device");
        println!("up");
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
    let outer = Scratch::new("device").expect("a directory");
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "--nocapture",
            "a_device_whose_process_was_killed_is_gone_with_the_next_directory",
        ])
        .env(LEFT_BEHIND, outer.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts again");
    let lines = std::io::BufReader::new(child.stdout.take().expect("piped"));
    assert!(std::io::BufRead::lines(lines).any(|line| line.expect("a line").ends_with("up")));
    child.kill().expect("kill");
    child.wait().expect("its end");
    let mounts = || std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let left = |mounts: String| {
        mounts.lines().any(|line| line.contains(outer.path().to_str().expect("a path")))
    };
    assert!(left(mounts()), "the mount outlives its server");
    let next = Scratch::new_in(outer.path(), "next").expect("the next directory");
    assert!(!left(mounts()), "{}", mounts());
    let beside = next.path().parent().expect("a parent");
    assert_eq!(
        std::fs::read_dir(beside).expect("a directory").count(),
        2,
        "the next one and its lock"
    );
}

#[test]
fn a_synchronous_write_costs_a_flush() {
    let scratch = Scratch::new("device").expect("a directory");
    let spec = preset::find("ssd-sata-consumer").expect("a preset").spec.slowed(8);
    let device =
        Emulated::start(spec, 64 << 20, &[], &scratch.join("backing"), &scratch.join("device"))
            .expect("a device");
    let flushes = |flags: i32| {
        let before = device.counts().flushes;
        let file =
            OpenOptions::new().write(true).custom_flags(flags).open(device.path()).expect("open");
        file.write_all_at(&[1; 4096], 0).expect("written");
        device.counts().flushes - before
    };
    assert_eq!([flushes(0), flushes(libc::O_DSYNC), flushes(libc::O_SYNC)], [0, 1, 1]);
}

fn is_mounted(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    mounts.lines().any(|line| line.split(' ').nth(1) == path.to_str())
}
