//! Golden material of everything that a daemon leaves, and what this version makes of it: cache,
//! image, ownership record, redo.
//!
//! Each directory `vN/NAME` is what version N has left in one place. Its files stand there as they
//! were, but for those in `golden.json`'s `packed`: they are packed by gzip twice, without the
//! zeroes at their end. The backend was `file:/proc/self/cwd/image`, so that the volume finds its
//! image in whatever directory the daemon is started. `golden.json` also says what a client must
//! read (`served`) and what is left without the cache (`recovered`). docs/format.md says how
//! another one is added.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../engine/tests/golden/content.rs"]
mod content;
mod make;
mod newer;
#[path = "../../../engine/tests/golden/raise.rs"]
mod raise;

use common::{Daemon, Place};
use content::{PACKED, Stretch, unpack};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::FORMAT_VERSION;
use tidepool_nbd::client::BlockingClient;

/// The volume of all golden places.
const VOLUME: &str = "vm1";
/// Its image, wherever the daemon is started.
const BACKEND: &str = "file:/proc/self/cwd/image";

/// What `golden.json` says.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    /// How it came about.
    about: String,
    /// The version of the format that it was made with.
    format_version: u16,
    /// Packed files and their bytes.
    packed: BTreeMap<String, u64>,
    /// What the volume holds: `FIRST-LAST: CONTENT`, in blocks; everything else is zero.
    served: Vec<Stretch>,
    /// What the image holds when it was recovered without the cache.
    recovered: Vec<Stretch>,
}

/// A directory of golden files.
struct Golden {
    directory: PathBuf,
    manifest: Manifest,
}

fn directory(version: u16) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{version}"))
}

fn all() -> Vec<Golden> {
    let mut all = Vec::new();
    for version in 1..=FORMAT_VERSION {
        let entries = fs::read_dir(directory(version)).expect("every version has golden places");
        let before = all.len();
        for directory in entries.map(|entry| entry.expect("an entry").path()) {
            let text = fs::read_to_string(directory.join("golden.json")).expect("a manifest");
            let manifest: Manifest = serde_json::from_str(&text)
                .unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
            assert_eq!(manifest.format_version, version, "{}", directory.display());
            all.push(Golden { directory, manifest });
        }
        assert!(all.len() > before, "there is nothing golden of version {version}");
    }
    all
}

/// The blocks of an image in which these stand.
fn bytes(stretches: &[Stretch], len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for stretch in stretches {
        for block in stretch.first..=stretch.last {
            let content = stretch.holds.content(block);
            bytes[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&content);
        }
    }
    bytes
}

impl Golden {
    fn name(&self) -> String {
        self.directory.display().to_string()
    }

    /// Puts everything into a new place.
    fn place(&self) -> Place {
        let place = Place::new();
        for entry in fs::read_dir(&self.directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_str().expect("ASCII").to_owned();
            match name.strip_suffix(PACKED) {
                Some(name) => {
                    let len = self.manifest.packed.get(name);
                    let len =
                        len.unwrap_or_else(|| panic!("{name} has no length in {}", self.name()));
                    fs::write(place.path(name), unpack(&path, *len)).expect("unpacked");
                }
                None if name == "golden.json" => {}
                None => drop(fs::copy(&path, place.path(&name)).expect("copied")),
            }
        }
        for name in self.manifest.packed.keys() {
            assert!(
                self.directory.join(format!("{name}{PACKED}")).exists(),
                "{name} of {}",
                self.name()
            );
        }
        keep_stamp(&place);
        place
    }

    fn served(&self) -> Vec<u8> {
        bytes(&self.manifest.served, self.manifest.packed["image"])
    }

    fn recovered(&self) -> Vec<u8> {
        bytes(&self.manifest.recovered, self.manifest.packed["image"])
    }
}

/// A released image is known by its inode and time: the copy gets that time, and the record the
/// copy's inode.
fn keep_stamp(place: &Place) {
    use std::os::unix::fs::MetadataExt;
    let record = place.path("image.tidepool");
    let text = fs::read_to_string(&record).expect("an ownership record");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let Some(stamp) = value.get("stamp") else { return };
    let number = |name: &str| stamp["file"][name].as_u64().expect("a number");
    let image = File::options().write(true).open(place.path("image")).expect("an image");
    image.set_modified(UNIX_EPOCH + Duration::from_nanos(number("mtime_ns"))).expect("its time");
    let inode = image.metadata().expect("its attributes").ino();
    let (from, to) = (format!("\"inode\": {}", number("inode")), format!("\"inode\": {inode}"));
    assert!(text.contains(&from));
    fs::write(record, text.replace(&from, &to)).expect("written");
}

/// The daemon on the cache as it is, with the volumes that the cache knows.
fn serve_args(place: &Place) -> Vec<String> {
    let door = format!("nbd+unix:///?socket={}", place.text("nbd.sock"));
    ["serve", "--cache", &place.text("cache"), "--nbd", &door, "--admin", &place.text("admin.sock")]
        .map(String::from)
        .into()
}

fn client(place: &Place) -> BlockingClient {
    let uri = format!("nbd+unix:///{VOLUME}?socket={}", place.text("nbd.sock"));
    BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection")
}

/// Serves the place and compares all of its volume with what it must hold, before and after it is
/// drained.
fn serve(golden: &Golden, place: &Place) {
    let daemon = Daemon::start(serve_args(place), &place.path("log"));
    let served = golden.served();
    let mut found = vec![0; served.len()];
    client(place).read(0, &mut found).expect("read");
    assert!(found == served, "{}: what clients read", golden.name());
    place.run(["volume", "drain", VOLUME, "--admin", &place.text("admin.sock")]).done();
    assert!(
        fs::read(place.path("image")).expect("an image") == served,
        "{}: the image",
        golden.name()
    );
    assert_eq!(daemon.terminate(), Some(0));
    let log = fs::read_to_string(place.path("log")).expect("a log");
    assert!(log.contains("cached data stays"), "{}: {log}", golden.name());
}

#[test]
fn what_an_earlier_version_has_left_is_served_and_drained() {
    for golden in all() {
        let place = golden.place();
        place.run(["cache", "check", &place.text("cache")]).done();
        serve(&golden, &place);
    }
}

#[test]
fn what_an_earlier_version_has_left_is_recovered_without_its_cache() {
    for golden in all() {
        let place = golden.place();
        fs::remove_file(place.path("cache")).expect("a lost cache");
        let ended = place.run(["recover", BACKEND, "--accept-loss"]);
        assert!(
            ended.done().contains("one exact state of the volume"),
            "{}: {ended:?}",
            golden.name()
        );
        let image = fs::read(place.path("image")).expect("an image");
        assert!(image == golden.recovered(), "{}: the image", golden.name());
        let left: Vec<PathBuf> = place.snapshot().into_keys().collect();
        assert_eq!(
            left,
            ["image", "image.tidepool"].map(|name| place.path(name)),
            "{}",
            golden.name()
        );
        assert!(
            place.run(["recover", BACKEND]).done().contains("no cache is known to hold newer data")
        );
    }
}
