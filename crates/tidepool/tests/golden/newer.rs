//! What a newer version has left is refused with one line that says what to do, and nothing is
//! changed.

use super::{BACKEND, Golden, VOLUME, all, serve, serve_args};
use crate::common::Place;
use crate::raise::{self, CHECKPOINT, FRAME, Kind, RECORD, SUPERBLOCK, blocks};
use std::fs;
use std::path::PathBuf;

/// Raises the version of every block of a kind in a file, as a newer version would have written it.
fn raise(place: &Place, name: &str, kind: Kind) {
    let mut bytes = fs::read(place.path(name)).expect("a file");
    let blocks = blocks(&bytes, kind);
    assert!(!blocks.is_empty(), "{name} has one");
    blocks.into_iter().for_each(|block| raise::raise(&mut bytes, kind, block, true));
    fs::write(place.path(name), bytes).expect("written");
}

/// The killed daemon's place: there the log goes on behind the newest checkpoint.
fn killed() -> Golden {
    let mut all = all();
    all.retain(|golden| golden.directory.ends_with("killed"));
    all.pop().expect("there is one of every version")
}

/// What is said of a version that is one too new, and which is known.
macro_rules! known {
    ($version:literal) => {
        concat!(
            "and this tidepool knows versions up to ",
            $version,
            ": use the tidepool that wrote it, or a newer one (nothing was changed)"
        )
    };
}

const KNOWN: &str = known!(1);
/// The same of an ownership record.
const KNOWN_RECORD: &str = known!(3);

#[test]
fn a_cache_with_anything_of_a_newer_version_is_refused_and_left_as_it_is() {
    for kind in [SUPERBLOCK, CHECKPOINT, RECORD] {
        let place = killed().place();
        raise(&place, "cache", kind);
        let cache = place.text("cache");
        let why = format!("cache {cache}: format version 2 is on it, {KNOWN}\n");
        let read = format!("tidepool: cannot read the {why}");
        place.refused(["cache", "inspect", &cache], 1, &read);
        place.refused(["cache", "check", &cache], 1, &read);
        let out = place.text("out");
        place.refused(["cache", "export", &cache, "--volume", VOLUME, "--out", &out], 1, &read);
        place.refused(serve_args(&place), 1, &format!("tidepool: cannot use the {why}"));
    }
}

/// Runs the command, which is refused with this line; nothing but the cache, in which every start
/// takes a checkpoint, may have changed then.
fn refused_but_for_the_cache(place: &Place, args: &[String], line: &str) {
    let snapshot = || {
        let mut files = place.snapshot();
        files.remove(&place.path("cache"));
        files
    };
    let before = snapshot();
    let ended = place.run(args);
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert_eq!(ended.stderr.lines().last(), Some(line), "{ended:?}");
    let after = snapshot();
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    assert!(before == after, "something was changed: {args:?}");
}

fn words(args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| (*arg).to_owned()).collect()
}

#[test]
fn an_ownership_record_or_redo_of_a_newer_version_is_refused_and_left_as_it_is() {
    let golden = killed();
    let image = "/proc/self/cwd/image";
    let documents = [
        (
            "image.tidepool",
            "\"version\": 1",
            "\"version\": 4",
            "PLACE/image.tidepool: the ownership record has version 4".to_owned(),
            KNOWN_RECORD,
        ),
        (
            "image.tidepool-redo",
            "\"version\":1",
            "\"version\":2",
            format!("{image} (redo) has version 2"),
            KNOWN,
        ),
        (
            "image.tidepool-note",
            "\"version\":1",
            "\"version\":2",
            format!("{image} (redo) has version 2"),
            KNOWN,
        ),
    ];
    for (name, from, to, what, known) in documents {
        let place = golden.place();
        let what = what.replace(
            "PLACE",
            &place.path("").canonicalize().expect("a directory").to_string_lossy(),
        );
        let text = fs::read_to_string(place.path(name)).expect("a document");
        assert!(text.contains(from), "{text}");
        fs::write(place.path(name), text.replace(from, to)).expect("written");
        let why = format!("{what}, {known}");
        let open = format!("tidepool: cannot open the backend of volume {VOLUME}: {why}");
        refused_but_for_the_cache(&place, &serve_args(&place), &open);
        for accepted in [&["recover", BACKEND][..], &["recover", BACKEND, "--accept-loss"]] {
            let line = format!("tidepool: cannot recover {BACKEND}: {why}");
            refused_but_for_the_cache(&place, &words(accepted), &line);
        }
        // A user who goes back to the version that knows it finds everything.
        fs::write(place.path(name), text).expect("written");
        serve(&golden, &place);
    }
}

#[test]
fn a_check_names_an_ownership_record_of_a_newer_version() {
    let place = killed().place();
    let record = fs::read_to_string(place.path("image.tidepool")).expect("a record");
    fs::write(place.path("image.tidepool"), record.replace("\"version\": 1", "\"version\": 4"))
        .expect("written");
    let path = place.path("").canonicalize().expect("a directory").join("image.tidepool");
    let line = format!(
        "tidepool: cannot serve {BACKEND}: {}: the ownership record has version 4, {KNOWN_RECORD}",
        path.display()
    );
    refused_but_for_the_cache(&place, &words(&["check", BACKEND]), &line);
}

#[test]
fn frames_of_a_newer_version_are_refused_before_anything_is_recovered() {
    let place = killed().place();
    let files: Vec<PathBuf> = place.snapshot().into_keys().collect();
    let names = files.iter().filter_map(|file| file.file_name()?.to_str());
    let frames: Vec<&str> = names.filter(|name| name.starts_with("image.tidepool-redo.")).collect();
    frames.iter().for_each(|name| raise(&place, name, FRAME));
    for accepted in [&["recover", BACKEND][..], &["recover", BACKEND, "--accept-loss"]] {
        let ended = place.run(accepted);
        assert!(
            ended.stderr.contains(&format!(" of its redo) has version 2, {KNOWN}")),
            "{ended:?}"
        );
        let line = ended.stderr.trim_end();
        refused_but_for_the_cache(&place, &words(accepted), line);
    }
}
