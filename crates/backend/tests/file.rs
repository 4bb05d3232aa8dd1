//! Guarantees of a file backend.

mod slowed;

use crate::common::{
    Driver, OTHER, OURS, a_forgetful_cache_is_refused, check, failed, open, options, pattern,
    refused,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tidepool_backend::{INFLIGHT_MAX, OpenOptions, Transfer};
use tidepool_engine::api::IoError;

const MIB: usize = 1 << 20;

/// A directory that is removed with the test: on the disk, or on tmpfs for access through the page
/// cache.
struct Scratch(PathBuf);

impl Scratch {
    fn new(base: &Path) -> Scratch {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = base.join(format!("tidepool-backend-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a scratch directory");
        Scratch(dir)
    }

    fn image(&self, bytes: u64) -> PathBuf {
        let path = self.0.join("image");
        fs::File::create(&path).expect("an image").set_len(bytes).expect("a size");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn scratches() -> Vec<Scratch> {
    let mut all = vec![Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")))];
    if Path::new("/dev/shm").is_dir() {
        all.push(Scratch::new(Path::new("/dev/shm")));
    }
    all
}

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn serve(path: &Path) -> Driver {
    Driver::new(open(&uri(path), options(OURS)).expect("opened").backend)
}

#[test]
fn the_file_holds_exactly_what_was_written() {
    for scratch in scratches() {
        let path = scratch.image(64 * MIB as u64);
        let mut model = vec![0u8; 64 * MIB];
        let mut driver = serve(&path);
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let mut tokens = Vec::new();
        // Disjoint writes in flight together, of every length up to 256 KiB, at sector granularity.
        for slot in 0..256u64 {
            let start = slot * 262_144 + random(64) * 512;
            let len = 512 * (1 + random(448)) as usize;
            let data = pattern(slot + 1, len);
            model[start as usize..][..len].copy_from_slice(&data);
            tokens.push(driver.start_write(start, &data));
        }
        tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
        // Punched and zeroed ranges: aligned, unaligned, and larger than one write of zeroes.
        for (offset, len) in [
            (0u64, 4096u64),
            (1_000_448, 512),
            (2 * MIB as u64 + 512, 5 * MIB as u64),
            (16 * MIB as u64, 9 * MIB as u64),
        ] {
            driver.other(Transfer::Discard { offset, len }).expect("a discard");
            model[offset as usize..][..len as usize].fill(0);
            let offset = offset + 32 * MIB as u64;
            driver.other(Transfer::WriteZeroes { offset, len }).expect("zeroes");
            model[offset as usize..][..len as usize].fill(0);
        }
        driver.flush().expect("a flush");
        for at in (0..64 * MIB).step_by(MIB) {
            assert!(driver.read(at as u64, MIB) == model[at..][..MIB], "read at {at}");
        }
        driver.close(true).expect("closed");
        assert!(
            fs::read(&path).expect("the image") == model,
            "the file differs from what was written"
        );
    }
}

#[test]
fn what_lies_past_the_end_reads_as_zero_and_cannot_be_written() {
    for scratch in scratches() {
        let size = MIB as u64 + 512 * 3;
        let path = scratch.image(size);
        let mut driver = serve(&path);
        assert_eq!(driver.backend().size_bytes(), size);
        let data = pattern(5, 8192);
        driver.write(MIB as u64 - 4096, &data).expect("a write across the end");
        let mut expected = data.clone();
        expected[4096 + 1536..].fill(0);
        assert!(driver.read(MIB as u64 - 4096, 8192) == expected);
        assert!(driver.read(MIB as u64 + 4096, 4096) == vec![0; 4096]);
        driver.write(2 * MIB as u64, &data).expect("a write past the end is dropped");
        driver
            .other(Transfer::Discard { offset: MIB as u64, len: 1 << 40 })
            .expect("a discard across the end");
        driver
            .other(Transfer::WriteZeroes { offset: size, len: 4096 })
            .expect("zeroes past the end");
        driver.close(true).expect("closed");
        assert_eq!(fs::metadata(&path).expect("the image").len(), size);
        let file = fs::read(&path).expect("the image");
        assert!(file[MIB - 4096..MIB] == data[..4096] && file[MIB..].iter().all(|b| *b == 0));
    }
}

#[test]
fn discard_gives_space_back() {
    use std::os::unix::fs::MetadataExt;
    for scratch in scratches() {
        let path = scratch.image(8 * MIB as u64);
        let mut driver = serve(&path);
        driver.write(0, &pattern(1, 4 * MIB)).expect("a write");
        driver.flush().expect("a flush");
        let full = fs::metadata(&path).expect("the image").blocks();
        driver.other(Transfer::Discard { offset: 0, len: 4 * MIB as u64 }).expect("a discard");
        assert!(fs::metadata(&path).expect("the image").blocks() < full / 2);
    }
}

#[test]
fn a_full_house_of_transfers_completes() {
    for scratch in scratches() {
        let path = scratch.image(16 * MIB as u64);
        let mut driver = serve(&path);
        for _ in 0..4 {
            let tokens: Vec<u64> = (0..INFLIGHT_MAX as u64)
                .map(|i| driver.start_write(i * 4096, &pattern(i, 4096)))
                .collect();
            tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
        }
        for i in 0..INFLIGHT_MAX as u64 {
            assert!(driver.read(i * 4096, 4096) == pattern(i, 4096));
        }
    }
}

#[test]
fn a_second_opener_is_refused_and_told_who_holds_the_lock() {
    for scratch in scratches() {
        let path = scratch.image(MIB as u64);
        let first = serve(&path);
        let line = refused(&uri(&path), options(OTHER));
        assert!(
            line.contains("in use") && line.contains(&std::process::id().to_string()),
            "{line}"
        );
        let line = refused(&uri(&path), OpenOptions { read_only: true, ..options(OURS) });
        assert!(line.contains("in use"), "{line}");
        first.close(true).expect("closed");
        serve(&path).close(true).expect("closed");
    }
}

#[test]
fn a_file_that_cannot_be_an_image_is_refused_with_the_reason() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let odd = scratch.image(1000);
    for (path, why) in [
        (scratch.0.join("absent"), "create it first"),
        (scratch.0.clone(), "a directory"),
        (PathBuf::from("/dev/null"), "neither a file nor a block device"),
        (odd.clone(), "multiple of 512"),
    ] {
        let line = refused(&uri(&path), options(OURS));
        assert!(line.contains(why) && line.contains(path.to_str().expect("UTF-8")), "{line}");
    }
    fs::File::create(&odd).expect("an empty file");
    assert!(refused(&uri(&odd), options(OURS)).contains("empty"));
    assert!(!scratch.0.join("image.tidepool").exists(), "a refused image got an ownership record");
}

#[test]
fn the_generation_rises_with_every_owner() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    for generation in 1..5 {
        let opened = open(&uri(&path), options(if generation % 2 == 0 { OURS } else { OTHER }))
            .expect("opened");
        assert_eq!(opened.generation, generation);
        assert!(!opened.keep_clean, "another cache had it last");
        Driver::new(opened.backend).close(true).expect("closed");
    }
}

#[test]
fn an_image_whose_newest_data_is_in_another_cache_is_refused() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    for killed in [false, true] {
        let driver = serve(&path);
        if killed {
            drop(driver);
        } else {
            driver.close(false).expect("closed");
        }
        for read_only in [false, true] {
            let line = refused(&uri(&path), OpenOptions { read_only, ..options(OTHER) });
            assert!(line.contains("owned by another cache") && line.contains("07070707"), "{line}");
        }
        serve(&path).close(true).expect("closed");
        open(&uri(&path), options(OTHER))
            .expect("a clean image")
            .backend
            .close(tidepool_backend::Release { clean: true, cache_failed: false })
            .expect("closed");
    }
}

#[test]
fn clean_data_is_kept_only_while_nobody_else_wrote() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    for clean in [true, false] {
        let mut driver = serve(&path);
        driver.write(0, &pattern(1, 4096)).expect("a write");
        driver.close(clean).expect("closed");
        let again = open(&uri(&path), options(OURS)).expect("opened");
        assert!(again.keep_clean, "{}", again.reason);
        let mut driver = Driver::new(again.backend);
        driver.write(0, &pattern(2, 4096)).expect("a write");
        driver.close(clean).expect("closed");
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("the image")
            .write_at(b"x", 0)
            .expect("a foreign write");
        let after = open(&uri(&path), options(OURS)).expect("opened");
        assert!(!after.keep_clean, "{}", after.reason);
    }
    let killed = open(&uri(&path), options(OURS)).expect("opened");
    assert!(killed.keep_clean, "the owner was killed and owns it still: {}", killed.reason);
}

/// Options of a cache that holds data that is not drained.
fn dirty(cache_uuid: [u8; 16]) -> OpenOptions {
    OpenOptions { dirty: true, ..options(cache_uuid) }
}

#[test]
fn dirty_data_never_goes_over_the_writes_of_others_at_the_second_start_neither() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let record = scratch.0.join("image.tidepool");
    let overwrite = || {
        let image = fs::OpenOptions::new().write(true).open(&path).expect("the image");
        image.write_at(b"foreign", 0).expect("a foreign write");
    };
    let give_to_another = || {
        Driver::new(open(&uri(&path), options(OTHER)).expect("clean").backend)
            .close(true)
            .expect("closed")
    };
    let give_up = || {
        tidepool_backend::abandon(&uri(&path).parse().expect("a URI"), None).expect("given up");
    };
    let lose_the_record = || fs::remove_file(&record).expect("removed");
    let events: [(bool, &dyn Fn()); 5] = [
        (false, &overwrite),
        (true, &overwrite),
        (true, &give_to_another),
        (false, &give_up),
        (false, &lose_the_record),
    ];
    for (clean, event) in events {
        Driver::new(open(&uri(&path), options(OURS)).expect("free").backend)
            .close(clean)
            .expect("closed");
        let again = open(&uri(&path), dirty(OURS)).expect("nobody wrote").backend;
        Driver::new(again).close(clean).expect("closed");
        event();
        let before = (fs::read(&path).expect("the image"), fs::read(&record).ok());
        for _ in 0..2 {
            let line = refused(&uri(&path), dirty(OURS));
            assert!(line.contains("must not be written over it"), "{line}");
            assert!(
                (fs::read(&path).expect("the image"), fs::read(&record).ok()) == before,
                "touched"
            );
        }
        let opened =
            open(&uri(&path), options(OURS)).expect("without dirty data nothing is at stake");
        assert!(!opened.keep_clean, "{}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
    }
    drop(serve(&path));
    open(&uri(&path), dirty(OURS)).expect("after a kill the image is still this cache's");
}

#[test]
fn a_disowned_cache_is_never_believed_again_while_its_process_goes_on_serving() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    // Killed, stopped with dirty data, and released with everything in the image.
    for end in [None, Some(false), Some(true)] {
        let mut driver = serve(&path);
        driver.write(0, &pattern(1, 4096)).expect("a write");
        let tokens = [(); 3].map(|()| driver.start_other(Transfer::Disown));
        for token in tokens {
            assert_eq!(driver.wait(token).0, Ok(()));
        }
        assert_eq!(driver.other(Transfer::Disown), Ok(()), "once is enough");
        assert!(refused(&uri(&path), options(OTHER)).contains("in use"), "it stays locked");
        driver.write(0, &pattern(2, 4096)).expect("it goes on serving");
        assert!(driver.read(0, 4096) == pattern(2, 4096));
        match end {
            None => drop(driver),
            Some(clean) => driver.close(clean).expect("closed"),
        }
        for _ in 0..2 {
            let line = refused(&uri(&path), dirty(OURS));
            assert!(line.contains("the cache device had failed"), "{line}");
        }
        if end == Some(true) {
            let opened = open(&uri(&path), options(OTHER)).expect("the image is complete");
            Driver::new(opened.backend).close(true).expect("closed");
        } else {
            assert!(refused(&uri(&path), options(OTHER)).contains("owned by another cache"));
        }
        let opened =
            open(&uri(&path), options(OURS)).expect("without dirty data nothing is at stake");
        assert!(!opened.keep_clean, "{}", opened.reason);
        let mut driver = Driver::new(opened.backend);
        assert!(driver.read(0, 4096) == pattern(2, 4096));
        driver.close(true).expect("closed");
        let opened = open(&uri(&path), dirty(OURS)).expect("what is cached from now on counts");
        assert!(opened.keep_clean, "{}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
    }
    serve(&path).close_without_cache(true).expect("closed");
    assert!(refused(&uri(&path), dirty(OURS)).contains("the cache device had failed"));
    serve(&path).close_without_cache(false).expect("closed");
    open(&uri(&path), dirty(OURS)).expect("what the failed device still has is not given up");
}

#[test]
fn a_disown_that_cannot_be_written_down_fails_and_can_be_tried_again() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let mut driver = serve(&path);
    // A directory in the place of the temporary file makes the write fail.
    let obstacle = scratch.0.join("image.tidepool.new");
    fs::remove_file(&obstacle).expect("the room for the next record");
    fs::create_dir(&obstacle).expect("a directory");
    assert!(matches!(driver.other(Transfer::Disown), Err(IoError::Errno(_))));
    fs::remove_dir(&obstacle).expect("removed");
    assert_eq!(driver.other(Transfer::Disown), Ok(()));
    driver.close(true).expect("closed");
    let opened = open(&uri(&path), OpenOptions { read_only: true, ..options(OURS) })
        .expect("without ownership");
    assert_eq!(
        Driver::new(opened.backend).other(Transfer::Disown),
        Ok(()),
        "nothing to write down"
    );
}

#[test]
fn an_open_that_was_cut_short_proves_nothing() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    serve(&path).close(true).expect("closed");
    let image = fs::OpenOptions::new().write(true).open(&path).expect("the image");
    image.write_at(b"foreign", 0).expect("a foreign write");
    let knows = |generation| OpenOptions { generation: Some(generation), ..options(OURS) };
    // The process is killed, or closes the backend, before the cache has dropped its outdated data.
    for end in [None, Some(true), Some(false)] {
        let opened = open(&uri(&path), knows(1)).expect("opened");
        assert!(!opened.keep_clean, "{}", opened.reason);
        match end {
            None => drop(opened),
            Some(clean) => Driver::new(opened.backend).close(clean).expect("closed"),
        }
    }
    let opened = open(&uri(&path), knows(1)).expect("opened");
    assert!(!opened.keep_clean, "{}", opened.reason);
    let generation = opened.generation;
    drop(opened);
    let opened = open(&uri(&path), knows(generation)).expect("opened");
    assert!(opened.keep_clean, "the cache has acted on it, then it was killed: {}", opened.reason);
}

#[test]
fn g1_a_cache_that_has_forgotten_an_attachment_is_refused() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    a_forgetful_cache_is_refused(&uri(&scratch.image(MIB as u64)), &options(OURS));
}

#[test]
fn dirty_data_never_goes_over_what_a_use_wrote_that_its_volume_knows_nothing_of() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    drop(serve(&path)); // The volume of generation 1 is killed with dirty data.
    // The same cache has the image as another volume.
    let mut other = serve(&path);
    other.write(0, &pattern(1, 4096)).expect("a write");
    other.close(true).expect("closed");
    let knows =
        |generation, dirty| OpenOptions { generation: Some(generation), dirty, ..options(OURS) };
    for _ in 0..2 {
        let line = refused(&uri(&path), knows(1, true));
        assert!(line.contains("must not be written over it"), "{line}");
    }
    Driver::new(open(&uri(&path), knows(2, true)).expect("its own release").backend)
        .close(false)
        .expect("closed");
    open(&uri(&path), knows(2, true)).expect("refused by the core in between, with its dirty data");
}

#[test]
fn an_image_is_the_same_under_every_name() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let identity = |uri: &str| tidepool_backend::identity(&uri.parse().expect("a URI"));
    let (soft, hard) = (scratch.0.join("soft"), scratch.0.join("hard"));
    std::os::unix::fs::symlink(&path, &soft).expect("a link");
    fs::hard_link(&path, &hard).expect("a link");
    let own = identity(&uri(&path));
    assert_eq!(own, identity(&uri(&soft)));
    assert_eq!(own, identity(&uri(&hard)));
    assert_eq!(
        own,
        identity(&uri(&scratch.0.join("./../").join(scratch.0.file_name().unwrap()).join("image")))
    );
    assert_eq!(own, identity(&format!("{}?gate=/g", uri(&path))));
    assert_eq!(own, identity(&format!("{}?emulate=ssd&seed=3", uri(&path))));
    let other = scratch.0.join("other");
    fs::write(&other, "x").expect("a file");
    assert_ne!(own, identity(&uri(&other)));
    // A file that does not exist is identified by its path.
    let missing = scratch.0.join("missing");
    let linked = scratch.0.join("linked");
    std::os::unix::fs::symlink(&scratch.0, &linked).expect("a link");
    assert_eq!(identity(&uri(&missing)), identity(&uri(&linked.join("missing"))));
    assert_ne!(identity(&uri(&missing)), identity(&uri(&scratch.0.join("lost"))));
    assert_eq!(identity("rbd:p/i"), identity("rbd:p/i?id=x&conf=/etc/ceph/b.conf"));
    for other in ["rbd:p/n/i", "rbd:q/i", "rbd:p/j"] {
        assert_ne!(identity("rbd:p/i"), identity(other));
    }
}

#[test]
fn an_unreadable_record_is_no_licence() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let record = scratch.0.join("image.tidepool");
    for content in ["", "{", "{\"version\": 9}", "null", &"x".repeat(100_000)] {
        fs::write(&record, content).expect("a record");
        let line = refused(&uri(&path), options(OURS));
        assert!(line.contains("ownership record") && line.contains("image.tidepool"), "{line}");
        assert_eq!(
            fs::read_to_string(&record).expect("the record"),
            content,
            "the record was touched"
        );
    }
}

#[test]
fn a_symbolic_link_leads_to_the_same_record() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let link = scratch.0.join("link");
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    serve(&link).close(false).expect("closed");
    assert!(refused(&uri(&path), options(OTHER)).contains("owned by another cache"));
}

#[test]
fn a_read_only_image_is_read_and_never_changed() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    fs::write(&path, pattern(3, MIB)).expect("content");
    let read_only = || OpenOptions { read_only: true, ..options(OURS) };
    let opened = open(&uri(&path), read_only()).expect("opened");
    assert!(!opened.keep_clean && opened.generation == 0);
    let second = open(&uri(&path), read_only()).expect("two may read");
    assert!(refused(&uri(&path), options(OURS)).contains("in use"));
    let mut driver = Driver::new(opened.backend);
    assert!(driver.backend().read_only());
    assert!(driver.read(0, MIB) == pattern(3, MIB));
    let denied = Err(IoError::Errno(libc::EROFS));
    assert_eq!(driver.write(0, &[1; 4096]), denied);
    assert_eq!(driver.other(Transfer::Discard { offset: 0, len: 4096 }), denied);
    assert_eq!(driver.other(Transfer::WriteZeroes { offset: 0, len: 4096 }), denied);
    driver.flush().expect("a flush");
    driver.close(true).expect("closed");
    Driver::new(second.backend).close(true).expect("closed");
    assert!(fs::read(&path).expect("the image") == pattern(3, MIB));
    assert!(!scratch.0.join("image.tidepool").exists());
}

#[test]
fn a_check_tells_what_would_be_done_and_changes_nothing() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let fresh = check(&uri(&path), &options(OURS));
    assert!(
        fresh.usable && fresh.would.iter().any(|step| step.contains("generation 1")),
        "{fresh:?}"
    );
    assert_eq!(
        fs::read_dir(&scratch.0).expect("the directory").count(),
        1,
        "a check left something behind"
    );
    let driver = serve(&path);
    assert!(failed(&check(&uri(&path), &options(OURS)), "lock").contains("in use"));
    driver.close(false).expect("closed");
    let record = fs::read(scratch.0.join("image.tidepool")).expect("the record");
    let theirs = check(&uri(&path), &options(OTHER));
    assert!(failed(&theirs, "ownership").contains("owned by another cache"));
    let ours = check(&uri(&path), &options(OURS));
    assert!(ours.would.iter().any(|step| step.contains("keep clean cached data")), "{ours:?}");
    assert_eq!(fs::read(scratch.0.join("image.tidepool")).expect("the record"), record);
    let absent = check(&uri(&scratch.0.join("absent")), &options(OURS));
    assert!(failed(&absent, "image").contains("create it first"));
    assert!(absent.items.iter().any(|item| item.status == tidepool_backend::CheckStatus::Skipped));
    let emulated = check(&format!("{}?emulate=hdd", uri(&path)), &options(OURS));
    assert!(emulated.items.iter().any(|item| item.detail.contains("emulated")), "{emulated:?}");
}

/// A loop device over a file, removed with the test. `None` where this user may not make one.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path, sector_bytes: u32) -> Option<Loop> {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector_bytes.to_string()])
            .arg(file)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Loop(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())))
            }
            other => {
                println!("not run: no loop device can be made here ({other:?})");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_block_device_is_served_like_a_file_whatever_its_sector_size() {
    for sector_bytes in [512, 4096] {
        let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
        let path = scratch.image(16 * MIB as u64);
        let Some(device) = Loop::new(&path, sector_bytes) else { return };
        let state = scratch.0.join("state/tidepool");
        let with = |uuid| OpenOptions { state_dir: Some(state.clone()), ..options(uuid) };
        let report = check(&uri(&device.0), &with(OURS));
        assert!(report.usable && !state.exists(), "{report:?}");
        let mut model = vec![0u8; 16 * MIB];
        let mut driver = Driver::new(open(&uri(&device.0), with(OURS)).expect("opened").backend);
        assert_eq!(driver.backend().size_bytes(), 16 * MIB as u64);
        for (i, (offset, len)) in
            [(0, 2 * MIB), (3 * MIB + 512, 1536), (5 * MIB, 4096)].into_iter().enumerate()
        {
            let data = pattern(i as u64 + 1, len);
            driver.write(offset as u64, &data).expect("a write");
            model[offset..][..len].copy_from_slice(&data);
        }
        for (offset, len) in [(4096, 8192), (MIB + 512, 1024), (MIB + MIB / 2, 4 * MIB)] {
            driver
                .other(Transfer::Discard { offset: offset as u64, len: len as u64 })
                .expect("a discard");
            model[offset..][..len].fill(0);
        }
        driver.other(Transfer::WriteZeroes { offset: 512, len: 512 }).expect("zeroes");
        model[512..1024].fill(0);
        driver.flush().expect("a flush");
        for at in (0..16 * MIB).step_by(MIB) {
            assert!(driver.read(at as u64, MIB) == model[at..][..MIB], "read at {at}");
        }
        assert!(refused(&uri(&device.0), with(OTHER)).contains("in use"));
        driver.close(false).expect("closed");
        assert!(refused(&uri(&device.0), with(OTHER)).contains("owned by another cache"));
        let again = open(&uri(&device.0), with(OURS)).expect("opened");
        assert!(!again.keep_clean, "{}", again.reason);
        assert_eq!(again.generation, 2);
        Driver::new(again.backend).close(true).expect("closed");
        assert!(fs::read(&path).expect("the image") == model);
    }
}

#[test]
fn what_a_lost_cache_holds_can_be_given_up() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let abandon = || tidepool_backend::abandon(&uri(&path).parse().expect("a URI"), None);
    assert_eq!(abandon().expect("nothing to give up"), None);
    let driver = serve(&path);
    assert!(abandon().expect_err("the owner is there").to_string().contains("in use"));
    driver.close(false).expect("closed");
    let given_up = abandon().expect("given up").expect("a record");
    assert_eq!((given_up.generation, *given_up.cache_uuid.as_bytes()), (1, OURS));
    let opened = open(&uri(&path), options(OTHER)).expect("free");
    assert_eq!((opened.generation, opened.keep_clean), (3, false));
}

#[test]
fn an_image_is_read_from_end_to_end_until_its_reader_has_enough() {
    for scratch in scratches() {
        let path = scratch.image(11 * MIB as u64 + 512);
        let model = pattern(9, 11 * MIB + 512);
        fs::write(&path, &model).expect("written");
        let options = OpenOptions { read_only: true, ..options(OURS) };
        let mut backend = open(&uri(&path), options).expect("opened").backend;
        let mut image = vec![0; model.len()];
        let read = tidepool_backend::read_all(&mut *backend, &mut |offset, data| {
            image[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        });
        read.expect("read");
        assert!(image == model);
        let mut pieces = 0;
        let read = tidepool_backend::read_all(&mut *backend, &mut |_, _| {
            pieces += 1;
            Err(std::io::Error::other("enough"))
        });
        assert_eq!((read.expect_err("it failed").to_string().as_str(), pieces), ("enough", 1));
        let read = tidepool_backend::read_all(&mut *backend, &mut |_, _| Ok(()));
        read.expect("nothing of the failed one is left in flight");
    }
}
