//! Makes the golden places of this version that do not exist, with the real daemon:
//! `cargo test --release -p tidepool --test golden -- --ignored make`.

use super::{BACKEND, Manifest, VOLUME, client, directory, keep_stamp, serve_args};
use crate::common::{Daemon, IMAGE_BYTES, Place};
use crate::content::{Holds, PACKED, Stretch, pack, push};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::FORMAT_VERSION;

/// Blocks of the image.
const BLOCKS: u64 = (IMAGE_BYTES / BLOCK_BYTES) as u64;
/// Changes that are sent, with a pause between two of them: several groups, and still a small
/// cache.
const CHANGES: u32 = 500;
const PAUSE: Duration = Duration::from_millis(10);
/// How often it is tried to end the daemon when its redo holds a group.
const TRIES: u32 = 30;

/// The numbered change of a client.
fn change(number: u32) -> (Range<u64>, Holds) {
    let first = u64::from(number) * 37 % (BLOCKS - 64);
    match number % 16 {
        5 | 9 => (first..first + 32, Holds::Zero),
        _ => (first..first + 1 + u64::from(number) % 4, Holds::Stamp(number)),
    }
}

/// What the volume holds after so many changes.
fn after(changes: u32) -> Vec<Holds> {
    let mut blocks = vec![Holds::Fill(0x5a5a_5a5a); BLOCKS as usize];
    for number in 1..=changes {
        let (range, holds) = change(number);
        blocks[range.start as usize..range.end as usize].fill(holds);
    }
    blocks
}

fn send(place: &Place) {
    let mut vm = client(place);
    // From here on a write does not wait for stable media.
    vm.flush().expect("flushed");
    for number in 1..=CHANGES {
        let (blocks, holds) = change(number);
        let (offset, len) =
            (blocks.start * BLOCK_BYTES as u64, (blocks.end - blocks.start) * BLOCK_BYTES as u64);
        match holds {
            Holds::Zero if number % 16 == 5 => vm.trim(offset, len).expect("absorbed"),
            Holds::Zero => vm.zeroes(offset, len, true).expect("absorbed"),
            _ => {
                let bytes: Vec<u8> = blocks.flat_map(|block| holds.content(block)).collect();
                vm.write(offset, &bytes).expect("absorbed");
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether there is something to be recovered.
fn has_redo(place: &Place) -> bool {
    let Ok(text) = fs::read_to_string(place.path("image.tidepool-redo")) else { return false };
    let header: Value = serde_json::from_str(&text).expect("JSON");
    header["groups"].as_array().expect("a list").iter().any(|group| group["frames"] != 0)
}

/// Writes under load and ends the daemon in a moment in which its redo holds a group and its cache
/// has more.
fn leave(end: impl Fn(Daemon)) -> Place {
    for _ in 0..TRIES {
        let place = Place::new();
        let mut args = serve_args(&place);
        args.extend(["--cache-size", "64MiB", "--accept-loss", "60s"].map(String::from));
        args.extend(["--volume".into(), format!("{VOLUME}={BACKEND}")]);
        let daemon = Daemon::start(args, &place.path("log"));
        send(&place);
        end(daemon);
        if has_redo(&place) && recovered(&place).0 < CHANGES {
            return place;
        }
    }
    panic!("the redo was always empty, or had everything");
}

fn holds(image: &[u8]) -> Vec<Holds> {
    let blocks = (0..).zip(image.chunks(BLOCK_BYTES));
    blocks
        .map(|(block, bytes)| Holds::of(bytes, block).expect("nothing else was written"))
        .collect()
}

/// What `recover` makes of a copy of the place: after how many changes the volume was like that.
fn recovered(place: &Place) -> (u32, Vec<Holds>) {
    let copy = Place::new();
    for (path, bytes) in place.snapshot() {
        let name = path.file_name().expect("a name").to_str().expect("ASCII");
        if name.starts_with("image") {
            fs::write(copy.path(name), bytes.expect("a file")).expect("copied");
        }
    }
    keep_stamp(&copy);
    copy.run(["recover", BACKEND, "--accept-loss"]).done();
    let found = holds(&fs::read(copy.path("image")).expect("an image"));
    let changes = (0..=CHANGES).rev().find(|&changes| after(changes) == found);
    (changes.expect("a state that the volume once had"), found)
}

fn stretches(blocks: &[Holds]) -> Vec<Stretch> {
    let mut list = Vec::new();
    for (block, &holds) in (0..).zip(blocks).filter(|(_, holds)| **holds != Holds::Zero) {
        push(&mut list, block, None, holds);
    }
    list
}

/// The record without the name of this machine.
fn anonymous(record: &str) -> String {
    let value: Value = serde_json::from_str(record).expect("JSON");
    let text = |name: &str| value[name].as_str().expect("a text").to_owned();
    let record = record.replace(&format!("\"{}\"", text("host")), "\"host.example\"");
    record.replace(&text("boot_id"), "00000000-0000-4000-8000-000000000000")
}

fn save(to: &Path, about: &str, place: &Place) {
    let (changes, recovered) = recovered(place);
    println!("{}: {changes} of {CHANGES} changes without the cache", to.display());
    fs::create_dir_all(to).expect("a directory");
    let mut packed = BTreeMap::new();
    for (path, bytes) in place.snapshot() {
        let name = path.file_name().expect("a name").to_str().expect("ASCII").to_owned();
        let Some(bytes) = bytes.filter(|_| name != "log") else { continue };
        if name == "cache" || name == "image" || name.starts_with("image.tidepool-redo.") {
            pack(&bytes, &to.join(format!("{name}{PACKED}")));
            packed.insert(name, bytes.len() as u64);
        } else {
            let text = String::from_utf8(bytes).expect("a document");
            let text = if name == "image.tidepool" { anonymous(&text) } else { text };
            fs::write(to.join(name), text).expect("written");
        }
    }
    let (about, served) = (about.to_owned(), stretches(&after(CHANGES)));
    let recovered = stretches(&recovered);
    let manifest = Manifest { about, format_version: FORMAT_VERSION, packed, served, recovered };
    let mut text = serde_json::to_string_pretty(&manifest).expect("plain data");
    text.push('\n');
    fs::write(to.join("golden.json"), text).expect("written");
}

#[test]
#[ignore = "makes the golden places of this version that do not exist"]
fn make() {
    let to = |name| Some(directory(FORMAT_VERSION).join(name)).filter(|to| !to.exists());
    if let Some(to) = to("killed") {
        save(
            &to,
            "A daemon that was killed under load, with a grouped drain.",
            &leave(Daemon::kill),
        );
    }
    if let Some(to) = to("stopped") {
        let end = |daemon: Daemon| {
            daemon.signal(Signal::TERM);
            assert_eq!(daemon.wait(), Some(0));
        };
        save(
            &to,
            "A daemon that was stopped in order under load, with dirty data in its cache.",
            &leave(end),
        );
    }
}
