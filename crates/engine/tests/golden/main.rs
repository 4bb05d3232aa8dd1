//! Golden images: caches that earlier versions have written and every later one must read, with
//! everything in them.
//!
//! `vN/NAME.gz.gz` is a cache device as version N of the format has left it, packed by gzip twice
//! and without the zeroes at its end; `vN/NAME.json` says what is in it.
//! `zcat NAME.gz.gz | zcat >cache && truncate -s DEVICE_BYTES cache` makes a file for
//! `tidepool cache inspect`. Whatever stands in the directory is read. A committed image is never
//! made anew: docs/format.md says how another one is added.

#[path = "../common/mod.rs"]
mod common;
mod content;
mod make;
mod manifest;
mod newer;
mod raise;

use common::{MemoryDevice, World};
use content::{Holds, PACKED, Stretch, push};
use manifest::{Golden, Recovery, Volume};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use tidepool_engine::api::{BLOCK_BYTES, ControlError, Op, RequestError, RequestId, VolumeId};
use tidepool_engine::format::FORMAT_VERSION;
use tidepool_engine::mem::Buf;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Content, Contents, OBJECT_BYTES, OwnObjects};

/// Blocks that one request reads.
const READ_BLOCKS: u64 = 64;

/// Every golden image that there is.
fn all() -> Vec<Golden> {
    let mut images = Vec::new();
    for version in 1..=FORMAT_VERSION {
        let directory = manifest::directory(version);
        let entries = fs::read_dir(&directory).expect("every version has golden images");
        let text = |name: OsString| name.into_string().expect("ASCII");
        let files: BTreeSet<_> =
            entries.map(|entry| text(entry.expect("an entry").file_name())).collect();
        let name = |file: &String| file.split('.').next().map(str::to_owned);
        let names: BTreeSet<_> = files.iter().filter_map(name).collect();
        assert!(!names.is_empty(), "there is no golden image of version {version}");
        let both = |name: &String| [PACKED, ".json"].map(|ending| format!("{name}{ending}"));
        let expected: BTreeSet<_> = names.iter().flat_map(both).collect();
        assert_eq!(files, expected, "an image and its manifest belong together");
        for name in names {
            let golden = Golden::read(version, &name);
            assert_eq!(golden.manifest.format_version, version, "{}", golden.name);
            images.push(golden);
        }
    }
    let directories = fs::read_dir(manifest::root()).expect("a directory");
    let directories =
        directories.filter(|entry| entry.as_ref().expect("an entry").path().is_dir()).count();
    assert_eq!(
        directories,
        usize::from(FORMAT_VERSION),
        "there are images of a version that nobody reads"
    );
    images
}

/// What a cache device is found to hold of a volume.
fn found(contents: &Contents, device: &mut MemoryDevice, id: VolumeId) -> Vec<Stretch> {
    let mut list = Vec::new();
    let Ok(()) = contents.read(device, id, &mut |stretch| {
        let blocks = stretch.len.div_ceil(BLOCK_BYTES as u64);
        let first = stretch.offset / BLOCK_BYTES as u64;
        for i in 0..blocks {
            let holds = match stretch.content {
                Content::Zero => Holds::Zero,
                Content::Lost => Holds::Lost,
                Content::Damaged => panic!("block {} does not verify", first + i),
                Content::Data(bytes) => {
                    let bytes = &bytes[i as usize * BLOCK_BYTES..];
                    let bytes = &bytes[..bytes.len().min(BLOCK_BYTES)];
                    Holds::of(bytes, first + i)
                        .unwrap_or_else(|| panic!("block {} is no block", first + i))
                }
            };
            push(&mut list, first + i, Some(stretch.dirty), holds);
        }
        Ok::<(), Infallible>(())
    });
    list
}

fn recovery(contents: &Contents) -> Recovery {
    let report = contents.recovery();
    Recovery {
        records_replayed: report.records_replayed,
        records_cut: report.records_cut,
        blocks_lost: report.blocks_lost,
        volumes_failed: report.volumes_failed,
    }
}

#[test]
fn every_golden_image_holds_what_is_documented_beside_it() {
    for Golden { name, manifest, device } in all() {
        let mut device = MemoryDevice(device);
        let before = device.0.clone();
        let contents = Contents::open(&mut device).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(contents.format_version(), manifest.format_version, "{name}");
        assert_eq!(recovery(&contents), manifest.recovery, "{name}");
        let volumes = contents.volumes();
        let numbers: Vec<u16> = volumes.iter().map(|volume| volume.id.0).collect();
        let documented: Vec<u16> = manifest.volumes.iter().map(|volume| volume.number).collect();
        assert_eq!(numbers, documented, "{name}");
        for (volume, documented) in volumes.iter().zip(&manifest.volumes) {
            let what = format!("{name}, volume {}", documented.name);
            assert_eq!(volume.spec, documented.spec(), "{what}");
            assert_eq!(volume.state == VolumeState::Failed, documented.failed, "{what}");
            let found = found(&contents, &mut device, volume.id);
            for (found, documented) in found.iter().zip(&documented.cache) {
                assert_eq!(found, documented, "{what}");
            }
            assert_eq!(found.len(), documented.cache.len(), "{what}");
        }
        assert!(device.0 == before, "{name}: looking changes nothing");
    }
}

/// A core on a golden image, with the images of its volumes.
fn bring_up(golden: &Golden) -> World {
    let mut images = Vec::new();
    for volume in &golden.manifest.volumes {
        images.resize_with(usize::from(volume.number) + 1, Vec::new);
        images[usize::from(volume.number)] = volume.image();
    }
    let device = MemoryDevice(golden.device.clone());
    World::on(device, images).unwrap_or_else(|e| panic!("{}: {e}", golden.name))
}

fn attach(w: &mut World, volumes: &[Volume]) {
    w.attach(true);
    for volume in volumes {
        let Some(parent) = volume.parent else { continue };
        let mut own = OwnObjects::none(volume.size_bytes);
        let (image, base) = (&w.images[usize::from(volume.number)], &w.images[usize::from(parent)]);
        let objects = image.chunks(OBJECT_BYTES as usize).zip(base.chunks(OBJECT_BYTES as usize));
        for (i, _) in objects.enumerate().filter(|(_, (image, base))| image != base) {
            own.insert(i as u64 * OBJECT_BYTES, 1);
        }
        let id = VolumeId(volume.number);
        w.engine.set_own(id, &own.inheriting(base.len() as u64)).expect("a volume");
        w.engine.set_parent(id, VolumeId(parent)).expect("a parent");
    }
}

/// Reads blocks as a client does and compares them; lost ones fail alone.
fn read(w: &mut World, volume: &Volume, expected: &[Option<Vec<u8>>], first: u64, last: u64) {
    let mut at = first;
    while at <= last {
        let block = |block: u64| expected[block as usize].as_ref();
        let n = (at..=last).take(READ_BLOCKS as usize).take_while(|&b| block(b).is_some()).count()
            as u64;
        let offset = at * BLOCK_BYTES as u64;
        if n == 0 {
            let found = w.try_read(volume.number, offset, BLOCK_BYTES as u64);
            assert_eq!(found, Err(RequestError::Io), "{}: block {at} is lost", volume.name);
        } else {
            let bytes: Vec<u8> =
                (at..at + n).flat_map(|b| block(b).expect("not lost")).copied().collect();
            let found = w.read(volume.number, offset, bytes.len() as u64);
            assert!(found == bytes, "{}: blocks {at} to {}", volume.name, at + n - 1);
        }
        at += n.max(1);
    }
}

/// What is cached is read without a backend, and what is cached of a parent by its clone. Where
/// room is short, opening goes on with reclaim, which drops clean blocks: the others are most of
/// them.
fn read_cached(w: &mut World, volumes: &[Volume]) {
    w.backend_stopped = true;
    let (mut clean, mut waiting) = (0, Vec::new());
    for volume in volumes.iter().filter(|volume| !volume.failed) {
        let expected = volume.expected();
        for stretch in volume.cache.iter().filter(|stretch| stretch.dirty == Some(true)) {
            read(w, volume, &expected, stretch.first, stretch.last);
        }
        let clone = volumes.iter().find(|clone| clone.parent == Some(volume.number));
        let through = clone.unwrap_or(volume);
        let expected = through.expected();
        for stretch in volume.cache.iter().filter(|stretch| stretch.dirty == Some(false)) {
            let blocks: Vec<u64> = (stretch.first..=stretch.last).collect();
            clean += blocks.len();
            for blocks in blocks.chunks(READ_BLOCKS as usize) {
                let bytes = blocks
                    .iter()
                    .map(|&block| expected[block as usize].as_ref().expect("not lost"));
                let bytes: Vec<u8> = bytes.flatten().copied().collect();
                let offset = blocks[0] * BLOCK_BYTES as u64;
                let (id, buf) =
                    w.request(through.number, Op::Read, offset, bytes.len() as u64, None);
                waiting.push((id, buf.expect("a buffer"), bytes));
                waiting = answered(w, waiting);
            }
        }
    }
    let missed: usize = waiting.iter().map(|(_, _, bytes)| bytes.len().div_ceil(BLOCK_BYTES)).sum();
    assert!(missed <= clean / 4, "{missed} of {clean} clean blocks are not cached any more");
    w.backend_stopped = false;
    w.run();
    assert!(answered(w, waiting).is_empty());
}

/// Reads that a client has sent, with what they must return.
type Sent = Vec<(RequestId, Buf, Vec<u8>)>;

/// Checks those that are answered, and returns the others.
fn answered(w: &mut World, sent: Sent) -> Sent {
    let mut left = Vec::new();
    for (id, buf, bytes) in sent {
        match w.replies.remove(&id) {
            None => left.push((id, buf, bytes)),
            Some(result) => {
                assert_eq!(result, Ok(()));
                assert!(
                    w.engine.arena().bytes(buf)[..bytes.len()] == bytes,
                    "a clean block is another"
                );
                w.engine.arena_mut().free(buf);
            }
        }
    }
    left
}

fn read_all(w: &mut World, volumes: &[Volume]) {
    for volume in volumes {
        if volume.failed {
            let found = w.try_read(volume.number, 0, BLOCK_BYTES as u64);
            assert_eq!(found, Err(RequestError::Io), "{}: nobody knows what is lost", volume.name);
        } else {
            read(w, volume, &volume.expected(), 0, volume.blocks() - 1);
        }
    }
}

/// What has been drained left the space of the zeroes for which that was asked.
fn keeps_space(w: &World, volume: &Volume) {
    for block in volume.kept.iter().flat_map(|stretch| stretch.first..=stretch.last) {
        let at = block * BLOCK_BYTES as u64;
        let mut zeroes = w.backend_zeroes.iter().filter(|(of, ..)| of.0 == volume.number);
        let kept = zeroes.any(|(_, offset, len)| (*offset..offset + len).contains(&at));
        assert!(kept, "{}: the space of block {block} is given back", volume.name);
    }
}

#[test]
fn every_golden_image_is_served_and_drained_as_if_it_were_of_today() {
    for golden in all() {
        println!("{}", golden.name);
        let volumes = &golden.manifest.volumes;
        let mut w = bring_up(&golden);
        attach(&mut w, volumes);
        read_cached(&mut w, volumes);
        read_all(&mut w, volumes);
        for volume in volumes.iter().filter(|volume| !volume.read_only && !volume.failed) {
            // Where blocks are lost, the drain goes on without them and says so.
            let lost = volume.expected().iter().filter(|block| block.is_none()).count() as u64;
            let drained = w.control(|e, now, c| e.drain(now, VolumeId(volume.number), c));
            assert_eq!(drained, if lost == 0 { Ok(()) } else { Err(ControlError::Lost(lost)) });
            assert_eq!(w.status(volume.number).dirty_bytes, 0);
            assert_eq!(w.status(volume.number).lost_blocks, lost);
            keeps_space(&w, volume);
            let image = w.images[usize::from(volume.number)].chunks(BLOCK_BYTES);
            for (i, (image, expected)) in image.zip(volume.expected()).enumerate() {
                let same = expected.is_none_or(|expected| image == expected);
                assert!(same, "{}, volume {}: block {i} in the image", golden.name, volume.name);
            }
        }
        // What this version makes of the cache is a cache, too.
        w.reopen();
        attach(&mut w, volumes);
        read_all(&mut w, volumes);
    }
}
