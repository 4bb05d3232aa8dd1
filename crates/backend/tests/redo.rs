//! The redo beside an image, and what is recovered from it when the cache is lost.

use crate::common::{Driver, OTHER, OURS, frame, open, options, pattern, refused};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tidepool_backend::{OpenOptions, Recovered, Transfer, recover};
use tidepool_engine::api::IoError;
use tidepool_engine::redo::FrameName;

const MIB: usize = 1 << 20;

fn image() -> (TempDir, PathBuf, String) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = dir.path().join("image");
    fs::write(&path, vec![0x11; 4 * MIB]).expect("an image");
    let uri = format!("file:{}", path.display());
    (dir, path, uri)
}

fn grouped(cache_uuid: [u8; 16]) -> OpenOptions {
    OpenOptions { grouped: true, ..options(cache_uuid) }
}

fn serve(uri: &str, options: OpenOptions) -> (Driver, u64) {
    let opened = open(uri, options).expect("opened");
    (Driver::new(opened.backend), opened.generation)
}

/// Writes and commits a group of two frames: blocks from 100 on, and zeroes.
fn commit(driver: &mut Driver, generation: u64, group: u64, first: u64, content: &[u8]) {
    let name = |frame| FrameName { uuid: OURS, generation, group, frame };
    let half = content.len() / 2;
    let second = frame(name(1), 100 + (half / 4096) as u64, &content[half..], Some((0, 16)));
    let tokens = [
        driver.start_frame(group, 1, &second),
        driver.start_frame(group, 0, &frame(name(0), 100, &content[..half], None)),
    ];
    tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a frame"));
    let age = Duration::from_millis(300);
    let commit = Transfer::RedoCommit { first, group, frames: 2, sequence: 10 * group, age };
    driver.other(commit).expect("committed");
}

fn recovered(uri: &str, look_only: bool) -> Recovered {
    recover(&uri.parse().expect("a URI"), None, look_only).expect("recovered")
}

/// Whether it is a file with frames, and not the room that is kept for the next header.
fn is_group(name: &str) -> bool {
    name.contains("redo.") && !name.ends_with(".new")
}

fn leftovers(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| name.contains("redo") || name.contains("note"));
    names.sort();
    names
}

#[test]
fn g5_a_lost_cache_leaves_the_image_at_its_newest_committed_group() {
    let (dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    let (old, new) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    commit(&mut driver, generation, 1, 1, &old);
    commit(&mut driver, generation, 2, 1, &new);
    driver
        .other(Transfer::RedoNote { sequence: 25, durable: 24, bytes: 8192, bytes_max: 1 << 20 })
        .expect("noted");
    // A third group, which is written and not committed, is ignored.
    let name = FrameName { uuid: OURS, generation, group: 3, frame: 0 };
    let token = driver.start_frame(3, 0, &frame(name, 100, &pattern(3, 8192), None));
    driver.wait(token).0.expect("a frame");
    drop(driver);

    let before = fs::read(&path).expect("an image");
    let look = recovered(&uri, true);
    assert_eq!((look.exact, look.groups, look.bytes), (true, 2, 2 * (128 << 10)));
    let loss = look.loss.expect("a loss");
    assert_eq!((loss.bytes, loss.bytes_max), (8192, Some(1 << 20)));
    assert!(loss.seconds >= 2.3, "from the cut on: {loss:?}");
    assert!(fs::read(&path).expect("an image") == before, "it only looked");

    let done = recovered(&uri, false);
    assert!(done.given_up.is_some_and(|owner| owner.generation == generation));
    let after = fs::read(&path).expect("an image");
    assert!(after[100 * 4096..][..64 << 10] == new, "the newest group");
    assert!(after[..16 * 4096].iter().all(|&b| b == 0), "its zeroes");
    assert!(after[16 * 4096..100 * 4096] == before[16 * 4096..100 * 4096]);
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
    assert!(recovered(&uri, false).given_up.is_none(), "a second time there is nothing left");
    // Any cache may have the image now, and the lost cache is too late.
    let late = OpenOptions { dirty: true, generation: Some(generation), ..grouped(OURS) };
    assert!(refused(&uri, late).contains("must not be written over it"));
    serve(&uri, grouped(OTHER)).0.close(true).expect("closed");
}

#[test]
fn whatever_the_umask_nobody_else_reads_what_stands_beside_an_image() {
    let (dir, _, uri) = image();
    rustix::process::umask(rustix::fs::Mode::empty());
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 2 * 4096));
    let names = fs::read_dir(dir.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name());
    let own: Vec<String> = names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.contains(".tidepool"))
        .collect();
    assert!(own.iter().any(|name| is_group(name)) && own.len() > 2, "{own:?}");
    for name in own {
        let mode = fs::metadata(dir.path().join(&name)).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name} is the daemon's own");
    }
    drop(driver);
}

#[test]
fn g7_a_damaged_redo_is_not_applied_at_all() {
    let (dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    drop(driver);
    let before = fs::read(&path).expect("an image");
    let redo = dir.path().join(format!("image.tidepool-redo.{generation}.1"));
    let mut bytes = fs::read(&redo).expect("a redo");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&redo, &bytes).expect("damaged");
    for look_only in [true, false] {
        let line = recover(&uri.parse().expect("a URI"), None, look_only)
            .expect_err("damaged")
            .to_string();
        assert!(
            line.contains("frame 1 of group 1") && line.contains("nothing was changed"),
            "{line}"
        );
    }
    assert!(fs::read(&path).expect("an image") == before);
    bytes[last] ^= 1;
    fs::write(&redo, &bytes).expect("repaired");
    assert_eq!(recovered(&uri, false).groups, 1);
}

#[test]
fn what_is_in_the_image_leaves_the_redo_and_a_release_leaves_nothing() {
    let (dir, _, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    commit(&mut driver, generation, 2, 2, &pattern(2, 64 << 10));
    let groups = |dir: &Path| leftovers(dir).iter().filter(|name| is_group(name)).count();
    assert_eq!(groups(dir.path()), 1, "the first group is not needed any more");
    driver.other(Transfer::RedoTrim { first: 3 }).expect("trimmed");
    assert_eq!(groups(dir.path()), 0);
    assert_eq!(recovered_groups(&uri, driver), 0);

    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(3, 64 << 10));
    driver.close(true).expect("released");
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

/// Number of groups that would be found if the cache were lost now.
fn recovered_groups(uri: &str, driver: Driver) -> usize {
    drop(driver);
    recovered(uri, true).groups
}

#[test]
fn a_new_generation_keeps_the_old_redo_until_its_own_first_group() {
    let (dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    let (old, new) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    commit(&mut driver, generation, 1, 1, &old);
    drop(driver);
    let again = || OpenOptions { dirty: true, sequence: Some(10), ..grouped(OURS) };
    let (driver, second) = serve(&uri, again());
    assert!(second > generation);
    assert_eq!(recovered_groups(&uri, driver), 1);
    let (mut driver, third) = serve(&uri, again());
    commit(&mut driver, third, 1, 1, &new);
    drop(driver);
    assert_eq!(leftovers(dir.path()).iter().filter(|name| is_group(name)).count(), 1);
    assert_eq!(recovered(&uri, false).groups, 1);
    assert!(fs::read(&path).expect("an image")[100 * 4096..][..64 << 10] == new);
}

#[test]
fn g1_a_cache_that_has_lost_what_its_redo_holds_is_refused() {
    let (_dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    drop(driver);
    let before = fs::read(path.with_extension("tidepool")).expect("a record");
    let behind = OpenOptions { dirty: true, sequence: Some(9), ..grouped(OURS) };
    let line = refused(&uri, behind);
    assert!(
        line.contains("record is 9") && line.contains("record 10") && line.contains("recover"),
        "{line}"
    );
    assert!(
        fs::read(path.with_extension("tidepool")).expect("a record") == before,
        "nothing is touched"
    );
}

#[test]
fn without_groups_a_redo_is_removed_and_none_is_taken() {
    let (dir, _, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    drop(driver);
    let (mut driver, _) = serve(&uri, OpenOptions { dirty: true, ..options(OURS) });
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
    assert_eq!(driver.other(Transfer::RedoTrim { first: 1 }), Err(IoError::Errno(libc::ENOTSUP)));
    drop(driver);
    let look = recovered(&uri, true);
    assert!(!look.exact && look.loss.is_none() && look.given_up.is_some());
}

#[test]
fn an_image_that_others_have_written_to_is_freed_as_it_is() {
    let (dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    driver.close(false).expect("closed");
    let theirs = vec![0x22; 4 * MIB];
    fs::write(&path, &theirs).expect("written");
    let dirty = OpenOptions { dirty: true, generation: Some(generation), ..grouped(OURS) };
    assert!(refused(&uri, dirty).contains("must not be written over it"));
    let freed = recovered(&uri, false);
    assert!(!freed.exact && freed.given_up.is_some() && freed.groups == 0, "{freed:?}");
    assert!(fs::read(&path).expect("an image") == theirs, "its redo does not go over it");
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
    serve(&uri, grouped(OTHER)).0.close(true).expect("anybody may have it");
}

#[test]
fn a_clean_attach_leaves_no_redo_that_could_take_the_image_back() {
    let (dir, _, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    drop(driver);
    // The cache has nothing dirty, but the redo was not trimmed before the kill.
    let (driver, _) = serve(&uri, grouped(OURS));
    assert_eq!(leftovers(dir.path()).iter().filter(|name| is_group(name)).count(), 0);
    assert_eq!(recovered_groups(&uri, driver), 0);
}

#[test]
fn frames_of_groups_that_were_only_begun_are_removed_by_the_next_owner() {
    let (dir, _, uri) = image();
    let begin = |driver: &mut Driver, generation, group| {
        let name = FrameName { uuid: OURS, generation, group, frame: 0 };
        let token = driver.start_frame(group, 0, &frame(name, 100, &pattern(3, 8192), None));
        driver.wait(token).0.expect("a frame");
    };
    let (mut driver, first) = serve(&uri, grouped(OURS));
    commit(&mut driver, first, 1, 1, &pattern(1, 64 << 10));
    driver.other(Transfer::RedoTrim { first: 2 }).expect("trimmed");
    begin(&mut driver, first, 2);
    drop(driver);
    let (mut driver, second) = serve(&uri, OpenOptions { dirty: true, ..grouped(OURS) });
    begin(&mut driver, second, 1);
    drop(driver);
    let groups =
        || leftovers(dir.path()).into_iter().filter(|name| is_group(name)).collect::<Vec<_>>();
    assert_eq!(groups().len(), 2);
    serve(&uri, grouped(OURS)).0.close(true).expect("released");
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

#[test]
fn frames_whose_removal_failed_are_removed_by_the_next_owner() {
    let (dir, _, uri) = image();
    let groups =
        || leftovers(dir.path()).into_iter().filter(|name| is_group(name)).collect::<Vec<_>>();
    let path =
        |generation, group| dir.path().join(format!("image.tidepool-redo.{generation}.{group}"));
    let aside = dir.path().join("aside");
    // A directory in the place of the frames cannot be removed as a file.
    let obstruct = |group: &Path| {
        fs::rename(group, &aside).expect("moved");
        fs::create_dir(group).expect("a directory");
    };
    let clear = |group: &Path| {
        fs::remove_dir(group).expect("removed");
        fs::rename(&aside, group).expect("moved back");
    };
    for next in [grouped(OURS), options(OURS)] {
        let (mut driver, generation) = serve(&uri, grouped(OURS));
        commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
        let group = path(generation, 1);
        obstruct(&group);
        let told = driver.close(true).expect_err("they cannot be removed").to_string();
        assert!(told.contains("remove its redo"), "{told}");
        clear(&group);
        assert_eq!(
            leftovers(dir.path()),
            [format!("image.tidepool-redo.{generation}.1")],
            "no header"
        );
        let (driver, _) = serve(&uri, next);
        assert_eq!(groups(), Vec::<String>::new());
        driver.close(true).expect("released");
        assert_eq!(leftovers(dir.path()), Vec::<String>::new());
    }
    // The groups before those that its header names go also while the cache has dirty data.
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    obstruct(&path(generation, 1));
    commit(&mut driver, generation, 2, 2, &pattern(2, 64 << 10));
    clear(&path(generation, 1));
    let name = FrameName { uuid: OURS, generation, group: 3, frame: 0 };
    let token = driver.start_frame(3, 0, &frame(name, 100, &pattern(3, 8192), None));
    driver.wait(token).0.expect("a frame");
    drop(driver);
    assert_eq!(groups().len(), 3);
    let foreign =
        [dir.path().join("image.tidepool-redo.1.x"), dir.path().join("image.tidepool-redo.01.1")];
    foreign.iter().for_each(|path| fs::write(path, "of somebody else").expect("written"));
    let (driver, _) = serve(&uri, OpenOptions { dirty: true, sequence: Some(20), ..grouped(OURS) });
    assert!(
        !path(generation, 1).exists()
            && path(generation, 2).exists()
            && path(generation, 3).exists()
    );
    assert_eq!(recovered_groups(&uri, driver), 1);
    serve(&uri, grouped(OURS)).0.close(true).expect("released");
    assert!(foreign.iter().all(|path| path.exists()), "these are no groups");
    foreign.iter().for_each(|path| fs::remove_file(path).expect("removed"));
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

#[test]
fn a_group_whose_number_comes_again_is_written_where_it_is_found() {
    let (_dir, path, uri) = image();
    let (mut driver, generation) = serve(&uri, grouped(OURS));
    commit(&mut driver, generation, 1, 1, &pattern(1, 64 << 10));
    driver.other(Transfer::RedoTrim { first: 2 }).expect("trimmed");
    commit(&mut driver, generation, 1, 1, &pattern(2, 64 << 10));
    drop(driver);
    assert_eq!(recovered(&uri, false).groups, 1);
    assert!(fs::read(&path).expect("an image")[100 * 4096..][..64 << 10] == pattern(2, 64 << 10));
}
