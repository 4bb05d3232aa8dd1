//! A cache drains only into the file or device that the data belongs to, whatever that image is
//! called now.

use crate::common::{Driver, OTHER, OURS, open, options, refused};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tidepool_backend::{BackendUri, OpenOptions, OwnerState, abandon, confirm};

const MIB: u64 = 1 << 20;

/// A directory for images, and a directory for the records of devices.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"))
    }

    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::File::create(&path).expect("a file").set_len(bytes).expect("a size");
        path
    }

    fn state(&self) -> PathBuf {
        self.0.path().join("state")
    }

    /// Confirms that a device is the one of a record.
    fn confirm(&self, path: &Path, record: Option<&Path>) -> Result<(), String> {
        let uri: BackendUri = uri(path).parse().expect("a URI");
        confirm(&uri, Some(&self.state()), record).map(drop).map_err(|e| e.to_string())
    }

    /// Options of a cache that holds nothing dirty.
    fn clean(&self, cache_uuid: [u8; 16]) -> OpenOptions {
        OpenOptions { state_dir: Some(self.state()), ..options(cache_uuid) }
    }

    fn dirty(&self, cache_uuid: [u8; 16]) -> OpenOptions {
        OpenOptions { dirty: true, ..self.clean(cache_uuid) }
    }

    /// The cache opens the image and ends as `end` says: with dirty data, clean, or by a kill.
    fn has(&self, path: &Path, how: OpenOptions, end: End) {
        let opened = open(&uri(path), how).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        match end {
            End::Clean => Driver::new(opened.backend).close(true).expect("closed"),
            End::Dirty => Driver::new(opened.backend).close(false).expect("closed"),
            End::Killed => drop(opened),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Clean,
    Dirty,
    Killed,
}

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Repeats `done` for two seconds at most; returns whether it succeeded.
fn soon(mut done: impl FnMut() -> bool) -> bool {
    (0..100).any(|attempt| {
        if attempt > 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        done()
    })
}

/// Asks the kernel to add a loop device of this number, or to remove it.
fn loop_control(number: u32, request: libc::Ioctl) -> bool {
    let Ok(control) = fs::File::open("/dev/loop-control") else { return false };
    // SAFETY: an open file; the request takes a number.
    unsafe { libc::ioctl(control.as_raw_fd(), request, libc::c_long::from(number)) >= 0 }
}

/// A loop device over a part of a file, removed with the test. Its number is one at which no
/// program looks for a free device.
struct Loop(PathBuf, u32);

impl Loop {
    const ADD: libc::Ioctl = 0x4c80;
    const REMOVE: libc::Ioctl = 0x4c81;

    /// `None` where this user may not make one.
    fn over(file: &Path, offset: u64, bytes: u64) -> Option<Loop> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = 1000 + std::process::id() % 60_000 * 16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if !loop_control(number, Loop::ADD) {
            println!("not run: no loop device can be made here");
            return None;
        }
        let made = Loop(format!("/dev/loop{number}").into(), number);
        made.attach(file, offset, bytes);
        Some(made)
    }

    /// Attaches another part of a file under the name of this device.
    fn becomes(&self, file: &Path, offset: u64, bytes: u64) {
        run("losetup", &["--detach", &self.0.to_string_lossy()]).expect("detached");
        self.attach(file, offset, bytes);
    }

    fn attach(&self, file: &Path, offset: u64, bytes: u64) {
        let name = self.0.to_string_lossy().into_owned();
        let (file, offset, bytes) = (file.to_string_lossy(), offset.to_string(), bytes.to_string());
        // The kernel detaches it when its last user has closed it, which may be a moment later.
        let attached = soon(|| {
            run("losetup", &["--offset", &offset, "--sizelimit", &bytes, &name, &file]).is_some()
        });
        assert!(attached, "{name} cannot be attached");
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.0.to_string_lossy()]);
        // The device is free a moment after its last user has closed it.
        let _ = soon(|| loop_control(self.1, Loop::REMOVE));
    }
}

/// A memory disk, which has no lasting name. Removed with the test.
struct MemoryDisk(String);

impl MemoryDisk {
    fn new(bytes: u64) -> Option<MemoryDisk> {
        let Ok(number) = fs::read_to_string("/sys/class/zram-control/hot_add") else {
            println!("not run: this kernel or user makes no zram devices");
            return None;
        };
        let disk = MemoryDisk(number.trim().to_owned());
        fs::write(format!("/sys/block/zram{}/disksize", disk.0), bytes.to_string())
            .expect("a size");
        Some(disk)
    }

    fn path(&self) -> PathBuf {
        format!("/dev/zram{}", self.0).into()
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        let _ = fs::write("/sys/class/zram-control/hot_remove", &self.0);
    }
}

#[test]
fn two_parts_of_a_file_are_two_devices_and_each_is_known_again_under_another_name() {
    let place = Place::new();
    let file = place.file("disk", 32 * MIB);
    let Some(first) = Loop::over(&file, 0, 8 * MIB) else { return };
    let Some(second) = Loop::over(&file, 8 * MIB, 8 * MIB) else { return };
    place.has(&first.0, place.clean(OURS), End::Dirty);
    place.has(&second.0, place.clean(OTHER), End::Dirty);
    for (device, stranger) in [(&first, OTHER), (&second, OURS)] {
        let told = refused(&uri(&device.0), place.clean(stranger));
        assert!(told.contains("owned by another cache"), "{told}");
    }
    // Each device has the name of the other device now.
    first.becomes(&file, 8 * MIB, 8 * MIB);
    second.becomes(&file, 0, 8 * MIB);
    place.has(&first.0, place.dirty(OTHER), End::Dirty);
    place.has(&second.0, place.dirty(OURS), End::Killed);
    place.has(&second.0, place.dirty(OURS), End::Dirty);
    // A third part of the file under both names.
    for device in [&first, &second] {
        device.becomes(&file, 16 * MIB, 8 * MIB);
        let told = refused(&uri(&device.0), place.dirty(OURS));
        assert!(told.contains("its names are not those of the device"), "{told}");
    }
}

#[test]
fn a_device_that_is_reached_in_two_ways_is_one() {
    let place = Place::new();
    let file = place.file("disk", 8 * MIB);
    let Some(one) = Loop::over(&file, 0, 8 * MIB) else { return };
    let Some(other) = Loop::over(&file, 0, 8 * MIB) else { return };
    let opened = open(&uri(&one.0), place.clean(OURS)).expect("opened");
    // Also for the same cache, which opens it as another volume.
    for how in [place.clean(OURS), place.dirty(OURS), place.clean(OTHER)] {
        let told = refused(&uri(&other.0), how);
        assert!(told.contains("holds its lock"), "{told}");
    }
    let report = crate::common::check(&uri(&other.0), &place.clean(OURS));
    assert!(!report.usable, "{report:?}");
    let told = abandon(&uri(&other.0).parse().expect("a URI"), Some(&place.state()))
        .expect_err("it is served");
    assert!(told.to_string().contains("holds its lock"), "{told}");
    Driver::new(opened.backend).close(false).expect("closed");
    place.has(&other.0, place.dirty(OURS), End::Killed);
    place.has(&one.0, place.dirty(OURS), End::Clean);
}

#[test]
fn a_device_whose_names_have_changed_is_the_one_that_its_operator_names() {
    let place = Place::new();
    let (file, moved) = (place.file("disk", 8 * MIB), place.file("moved", 8 * MIB));
    let Some(device) = Loop::over(&file, 0, 8 * MIB) else { return };
    let Some(moved) = Loop::over(&moved, 0, 8 * MIB) else { return };
    place.has(&device.0, place.clean(OURS), End::Dirty);
    let told = refused(&uri(&moved.0), place.dirty(OURS));
    let record =
        told.split("--record ").nth(1).unwrap_or_else(|| panic!("no record: {told}")).to_owned();
    let record = Path::new(record.split_whitespace().next().expect("a path"));
    let told = place.confirm(&moved.0, None).expect_err("no name says so");
    assert!(told.contains(&*record.to_string_lossy()), "{told}");
    // While the device of the record is served, no other device can be that device.
    let opened = open(&uri(&device.0), place.dirty(OURS)).expect("opened");
    let told = refused(&uri(&moved.0), place.dirty(OURS));
    assert!(!told.contains("--record"), "{told}");
    let told = place.confirm(&moved.0, Some(record)).expect_err("it is served");
    assert!(told.contains("holds its lock"), "{told}");
    Driver::new(opened.backend).close(false).expect("closed");
    place.confirm(&moved.0, Some(record)).expect("it is said");
    let told = refused(&uri(&device.0), place.dirty(OURS));
    assert!(told.contains("--record"), "it is another device now: {told}");
    place.has(&moved.0, place.dirty(OURS), End::Clean);
}

#[test]
fn a_record_that_was_put_back_proves_nothing() {
    let place = Place::new();
    let (path, record) = (place.file("image", 8 * MIB), place.0.path().join("image.tidepool"));
    let knows = |generation| OpenOptions { generation: Some(generation), ..place.dirty(OURS) };
    place.has(&path, place.clean(OURS), End::Killed);
    let earlier = fs::read(&record).expect("a record");
    place.has(&path, knows(1), End::Killed);
    place.has(&path, knows(2), End::Killed);
    fs::write(&record, earlier).expect("put back");
    let told = refused(&uri(&path), knows(3));
    assert!(told.contains("put back an older state"), "{told}");
    let opened =
        open(&uri(&path), OpenOptions { dirty: false, ..knows(3) }).expect("nothing is dirty");
    assert!(!opened.keep_clean, "{}", opened.reason);
}

#[test]
fn files_whose_paths_an_earlier_release_could_not_tell_apart_are_two() {
    let place = Place::new();
    let [one, other] = ["vm/1.img", "vm_1.img"].map(|name| place.file(name, 8 * MIB));
    let Some(one) = Loop::over(&one, 0, 8 * MIB) else { return };
    let Some(other) = Loop::over(&other, 0, 8 * MIB) else { return };
    place.has(&one.0, place.clean(OURS), End::Dirty);
    place.has(&other.0, place.clean(OTHER), End::Dirty);
    place.has(&one.0, place.dirty(OURS), End::Dirty);
    place.has(&other.0, place.dirty(OTHER), End::Dirty);
}

#[test]
fn a_device_without_a_lasting_name_is_known_while_it_is_there_and_then_has_to_be_confirmed() {
    let place = Place::new();
    let Some(disk) = MemoryDisk::new(16 * MIB) else { return };
    place.has(&disk.path(), place.clean(OURS), End::Dirty);
    place.has(&disk.path(), place.dirty(OURS), End::Killed);
    place.has(&disk.path(), place.dirty(OURS), End::Dirty);
    let report = crate::common::check(&uri(&disk.path()), &place.clean(OURS));
    assert!(
        report.items.iter().any(|item| item.detail.contains("no name that it keeps")),
        "{report:?}"
    );
    let path = disk.path();
    drop(disk);
    let Some(disk) = MemoryDisk::new(16 * MIB) else { return };
    assert_eq!(disk.path(), path, "another disk has its name");

    let told = refused(&uri(&path), place.dirty(OURS));
    assert!(
        told.contains("nothing tells whether this is the device") && !told.contains('\n'),
        "{told}"
    );
    let record = told.rsplit("--record ").next().expect("a record").to_owned();
    // A cache that holds nothing dirty of the device takes it for a new one.
    place.has(&path, place.clean(OTHER), End::Clean);
    let confirmed = |record: Option<&Path>| place.confirm(&path, record);
    let told = confirmed(None).expect_err("it has a record now");
    assert!(told.contains("nothing to confirm"), "{told}");
    drop(disk);
    let Some(_disk) = MemoryDisk::new(16 * MIB) else { return };
    let told = confirmed(Some(Path::new("/nowhere"))).expect_err("that is none");
    assert!(told.contains("does not come into question") && told.contains(&record), "{told}");
    confirmed(Some(Path::new(&record))).expect("it is said");
    let uri: BackendUri = uri(&path).parse().expect("a URI");
    let found = tidepool_backend::ownership(&uri, Some(&place.state()))
        .expect("readable")
        .expect("a record");
    assert_eq!((found.state, found.cache_uuid.as_bytes()), (OwnerState::Dirty, &OURS));
    place.has(&path, place.dirty(OURS), End::Clean);
}

#[test]
fn a_file_that_was_replaced_is_another_one() {
    let place = Place::new();
    for (end, how) in
        [(End::Dirty, "copied"), (End::Killed, "copied"), (End::Killed, "put back in place")]
    {
        let path = place.file("image", 8 * MIB);
        place.has(&path, place.clean(OURS), end);
        match how {
            "copied" => {
                let copy = place.file("copy", 8 * MIB);
                fs::rename(&copy, &path).expect("replaced");
            }
            _ => {
                let path = path.to_string_lossy().into_owned();
                run("touch", &["--date", "2020-01-01", &path]).expect("an older time");
            }
        }
        let told = refused(&uri(&path), place.dirty(OURS));
        assert!(told.contains("must not be written over it"), "{how}: {told}");
        let opened = open(&uri(&path), place.clean(OURS)).expect("nothing is dirty");
        assert!(!opened.keep_clean, "{how}: {}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
        fs::remove_file(place.0.path().join("image.tidepool")).expect("the record");
    }
    // A clock that was ahead looks the same; the operator confirms the image.
    let path = place.file("image", 8 * MIB);
    run("touch", &["--date", "2100-01-01", &path.to_string_lossy()]).expect("a time to come");
    place.has(&path, place.clean(OURS), End::Killed);
    run("touch", &[&path.to_string_lossy()]).expect("the time of now");
    let told = refused(&uri(&path), place.dirty(OURS));
    assert!(told.contains("tidepool confirm"), "{told}");
    confirm(&uri(&path).parse().expect("a URI"), None, None).expect("it is said");
    place.has(&path, place.dirty(OURS), End::Killed);
    place.has(&path, place.dirty(OURS), End::Clean);
    fs::remove_file(place.0.path().join("image.tidepool")).expect("the record");
    // A user who knows that a copy is the image confirms it.
    let path = place.file("image", 8 * MIB);
    place.has(&path, place.clean(OURS), End::Dirty);
    fs::rename(place.file("copy", 8 * MIB), &path).expect("replaced");
    confirm(&uri(&path).parse().expect("a URI"), None, None).expect("it is said");
    place.has(&path, place.dirty(OURS), End::Clean);
}

/// Changes a record, as if another file system or an earlier release had written it.
fn rewrite(record: &Path, change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
    let text = fs::read(record).expect("a record");
    let mut said: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    change(said.as_object_mut().expect("an object"));
    fs::write(record, said.to_string()).expect("written");
}

#[test]
fn a_file_that_was_replaced_is_another_one_also_where_its_file_system_has_no_name() {
    let place = Place::new();
    let (path, record) = (place.file("image", 8 * MIB), place.0.path().join("image.tidepool"));
    let nameless = || {
        rewrite(&record, |said| {
            let image = said["image"].as_object_mut().expect("an identity");
            image.remove("lasting");
            image.remove("sequence");
        });
    };
    place.has(&path, place.clean(OURS), End::Killed);
    nameless();
    place.has(&path, place.dirty(OURS), End::Killed);
    nameless();
    fs::rename(place.file("copy", 8 * MIB), &path).expect("replaced");
    let told = refused(&uri(&path), place.dirty(OURS));
    assert!(told.contains("another file") && told.contains("tidepool confirm"), "{told}");
    confirm(&uri(&path).parse().expect("a URI"), None, None).expect("it is said");
    place.has(&path, place.dirty(OURS), End::Clean);
}

#[test]
fn a_device_that_an_earlier_release_has_recorded_is_known_on_and_on_once_it_is_confirmed() {
    let place = Place::new();
    let file = place.file("disk", 8 * MIB);
    let Some(device) = Loop::over(&file, 0, 8 * MIB) else { return };
    place.has(&device.0, place.clean(OURS), End::Dirty);
    // That release named the record after the file below, and did not write which device it was.
    let found = fs::read_dir(place.state())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path());
    let records = found.filter(|path| path.extension().is_some_and(|name| name == "tidepool"));
    let [record] = &records.collect::<Vec<_>>()[..] else { panic!("one record") };
    rewrite(record, |said| drop(said.remove("image")));
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let below: String = file.to_string_lossy().chars().map(plain).collect();
    let earlier = place.state().join(format!("{below}.tidepool"));
    fs::rename(record, &earlier).expect("renamed");
    let told = refused(&uri(&device.0), place.dirty(OURS));
    assert!(told.contains(&*earlier.to_string_lossy()), "{told}");
    place.confirm(&device.0, Some(&earlier)).expect("it is said");
    for end in [End::Killed, End::Dirty, End::Killed] {
        place.has(&device.0, place.dirty(OURS), end);
    }
    let told = refused(&uri(&device.0), place.clean(OTHER));
    assert!(told.contains("owned by another cache"), "{told}");
}

#[test]
fn a_file_goes_by_all_of_its_names_or_is_refused() {
    let place = Place::new();
    let path = place.file("image", 8 * MIB);
    place.has(&path, place.clean(OURS), End::Dirty);
    let link = place.0.path().join("link");
    fs::hard_link(&path, &link).expect("a second name");
    let told = refused(&uri(&link), place.clean(OTHER));
    assert!(told.contains("2 names (hard links)"), "{told}");
    place.has(&path, place.dirty(OURS), End::Dirty);
    fs::remove_file(&link).expect("removed");
    // Together with its record the file may be moved.
    let moved = place.0.path().join("moved");
    fs::rename(&path, &moved).expect("moved");
    let told = refused(&uri(&moved), place.dirty(OURS));
    assert!(told.contains("must not be written over it"), "{told}");
    fs::rename(place.0.path().join("image.tidepool"), place.0.path().join("moved.tidepool"))
        .expect("moved");
    place.has(&moved, place.dirty(OURS), End::Clean);
}

/// Runs `work` with mounts that no other process sees and that end with it. `None` where this user
/// may not mount.
fn with_own_mounts<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let own = || {
        // SAFETY: the thread shares nothing with others except its mounts, which it does not share
        // from now on.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.ok()?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).ok()?;
        Some(work())
    };
    let done = std::thread::scope(|scope| {
        scope.spawn(own).join().unwrap_or_else(|e| std::panic::resume_unwind(e))
    });
    if done.is_none() {
        println!("not run: this user may not mount");
    }
    done
}

#[test]
fn a_file_that_is_mounted_by_itself_is_refused_where_its_record_cannot_be_seen() {
    let place = Place::new();
    let [path, elsewhere] = ["vm/image", "other/image"].map(|name| place.file(name, 8 * MIB));
    with_own_mounts(|| {
        let told_of = |path: &Path, how: OpenOptions| {
            let told = refused(&uri(path), how);
            assert!(
                told.contains("mounted here from another place") && told.contains("/vm/image on "),
                "{told}"
            );
        };
        place.has(&path, place.clean(OURS), End::Dirty);
        mount_bind(&path, &elsewhere).expect("mounted");
        for how in [place.clean(OURS), place.dirty(OURS), place.clean(OTHER)] {
            told_of(&elsewhere, how);
        }
        let report = crate::common::check(&uri(&elsewhere), &place.clean(OTHER));
        assert!(!report.usable, "{report:?}");
        // Under its own name it is the same image, also where it is mounted over itself, and
        // another cache learns who owns it.
        mount_bind(&path, &path).expect("mounted");
        let told = refused(&uri(&path), place.clean(OTHER));
        assert!(told.contains("owned by another cache"), "{told}");
        place.has(&path, place.dirty(OURS), End::Clean);
        fs::remove_file(place.0.path().join("vm/image.tidepool")).expect("its record");
        told_of(&path, place.clean(OURS));

        // Another file is mounted over its name.
        let image = place.file("vm/second", 8 * MIB);
        place.has(&image, place.clean(OURS), End::Dirty);
        mount_bind(&path, &image).expect("mounted");
        let told = refused(&uri(&image), place.dirty(OURS));
        assert!(told.contains("must not be written over it"), "{told}");

        // With its directory, its record is there too.
        let dir = place.0.path().join("whole");
        fs::create_dir(&dir).expect("a directory");
        mount_bind(path.parent().expect("a directory"), &dir).expect("mounted");
        place.has(&dir.join("image"), place.clean(OURS), End::Dirty);
        place.has(&dir.join("image"), place.dirty(OURS), End::Clean);
    });
}

#[test]
fn a_copy_that_shares_its_blocks_is_another_file() {
    for (system, make, bytes) in
        [("xfs", "mkfs.xfs", 320 * MIB), ("btrfs", "mkfs.btrfs", 256 * MIB)]
    {
        let place = Place::new();
        let (disk, dir) = (place.file("disk", bytes), place.0.path().join("mounted"));
        fs::create_dir(&dir).expect("a directory");
        if run(make, &["-q", &disk.to_string_lossy()]).is_none() {
            println!("not run: {make} does not work here (it is in the package {system}progs)");
            continue;
        }
        with_own_mounts(|| {
            let mount = ["-o", "loop", &disk.to_string_lossy(), &dir.to_string_lossy()];
            if run("mount", &mount).is_none() {
                println!("not run: {system} cannot be mounted here");
                return;
            }
            let path = place.file("mounted/image", 8 * MIB);
            fs::write(&path, vec![7; 8 * MIB as usize]).expect("content");
            let [name, copy] =
                [&path, &dir.join("copy")].map(|path| path.to_string_lossy().into_owned());
            for end in [End::Dirty, End::Killed] {
                place.has(&path, place.clean(OURS), end);
                run("cp", &["--reflink=always", "--preserve=all", &name, &copy])
                    .expect("a reflink");
                let told = refused(&uri(Path::new(&copy)), place.dirty(OURS));
                assert!(told.contains("must not be written over it"), "{system}: {told}");
                fs::rename(&path, dir.join("kept")).expect("renamed");
                fs::rename(&copy, &path).expect("renamed");
                let told = refused(&uri(&path), place.dirty(OURS));
                assert!(told.contains("must not be written over it"), "{system}: {told}");
                fs::rename(dir.join("kept"), &path).expect("renamed");
                place.has(&path, place.dirty(OURS), End::Clean);
                fs::remove_file(dir.join("image.tidepool")).expect("its record");
            }
            run("umount", &[&dir.to_string_lossy()]).expect("unmounted");
        });
    }
}

/// Disks change their names between opens. If an open of a volume with dirty data succeeds, the
/// disk under the name is the one to which the data belongs.
#[test]
fn among_two_hundred_swaps_nothing_dirty_goes_to_another_device() {
    const DISKS: u64 = 4;
    let place = Place::new();
    let file = place.file("disks", DISKS * 4 * MIB);
    let part = |disk: u64| (disk * 4 * MIB, 4 * MIB);
    let Some(devices) =
        (0..2).map(|n| Loop::over(&file, part(n).0, part(n).1)).collect::<Option<Vec<_>>>()
    else {
        return;
    };
    let mut state = 88_172_645_463_325_252u64;
    let mut roll = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    // `under`: the disk under each name. `dirty`: the disk whose data the volume of that name
    // holds, if any is dirty.
    let mut under = [0, 1];
    let mut dirty: [Option<u64>; 2] = [None, None];
    let (mut accepted, mut turned_away) = (0, 0);
    for _ in 0..200 {
        let name = roll(2) as usize;
        if roll(2) == 0 {
            let other = under[1 - name];
            let free: Vec<u64> = (0..DISKS).filter(|disk| *disk != other).collect();
            under[name] = free[roll(DISKS - 1) as usize];
            let (offset, bytes) = part(under[name]);
            devices[name].becomes(&file, offset, bytes);
        }
        // Each volume has a cache of its own.
        let uuid = [name as u8 + 1; 16];
        let how = match dirty[name] {
            Some(_) => place.dirty(uuid),
            None => place.clean(uuid),
        };
        match open(&uri(&devices[name].0), how) {
            Ok(opened) => {
                accepted += 1;
                assert!(
                    dirty[name].is_none_or(|disk| disk == under[name]),
                    "dirty data goes to another disk"
                );
                let clean = roll(2) == 0;
                dirty[name] = (!clean).then_some(under[name]);
                match roll(3) {
                    0 if !clean => drop(opened),
                    _ => Driver::new(opened.backend).close(clean).expect("closed"),
                }
            }
            Err(e) => {
                turned_away += 1;
                let foreign = dirty[1 - name] == Some(under[name]);
                assert!(foreign || dirty[name].is_some_and(|disk| disk != under[name]), "{e}");
            }
        }
    }
    assert!(accepted > 30 && turned_away > 30, "{accepted} accepted, {turned_away} turned away");
}
