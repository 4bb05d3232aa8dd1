//! What a newer version has written is refused, wherever it stands, and nothing is changed.

use crate::all;
use crate::common::MemoryDevice;
use crate::manifest::Golden;
use crate::raise::{CHECKPOINT, Kind, RECORD, SEGMENT, SUPERBLOCK, blocks, raise};
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::FORMAT_VERSION;
use tidepool_engine::{Contents, Engine, EngineConfig, OpenError, check, inspect};

/// Where the headers of segments and records say which checkpoint was the newest one.
const SEGMENT_CHECKPOINT: usize = 40;
const RECORD_CHECKPOINT: usize = 68;

fn number(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"))
}

/// Every way to open the device refuses it and leaves it as it is.
fn refused(golden: &Golden, kind: Kind, block: usize) {
    let what = format!("{}: block {block}", golden.name);
    let mut device = MemoryDevice(golden.device.clone());
    raise(&mut device.0, kind, block, true);
    let before = device.0.clone();
    let expected = Some(OpenError::Version(FORMAT_VERSION + 1));
    assert_eq!(Engine::open(&mut device, EngineConfig::small(), 0).err(), expected, "{what}");
    assert_eq!(Contents::open(&mut device).err(), expected, "{what}");
    assert_eq!(inspect(&mut device).err(), expected, "{what}");
    assert_eq!(check(&mut device, &mut |_, _| ()).err(), expected, "{what}");
    assert!(device.0 == before, "{what}: something was changed");
}

/// The newest checkpoint that an image has.
fn newest_checkpoint(golden: &Golden) -> u64 {
    let contents = Contents::open(&mut MemoryDevice(golden.device.clone())).expect("a cache");
    contents.recovery().checkpoint
}

#[test]
fn a_superblock_or_checkpoint_of_a_newer_version_is_refused_in_whichever_copy_it_stands() {
    for golden in all() {
        for (kind, copies) in [(SUPERBLOCK, 2), (CHECKPOINT, 4)] {
            let blocks = blocks(&golden.device, kind);
            assert_eq!(blocks.len(), copies, "{}: all copies are there", golden.name);
            for block in blocks {
                refused(&golden, kind, block);
            }
        }
    }
}

#[test]
fn a_record_of_a_newer_version_is_refused_and_never_cut_as_a_torn_tail() {
    let (mut segments, mut records) = (0, 0);
    for golden in all() {
        let newest = newest_checkpoint(&golden);
        for (kind, checkpoint) in [(SEGMENT, SEGMENT_CHECKPOINT), (RECORD, RECORD_CHECKPOINT)] {
            let block = |i: usize| &golden.device[i * BLOCK_BYTES..][..BLOCK_BYTES];
            let behind = |&i: &usize| number(block(i), checkpoint) == newest;
            let tail: Vec<usize> =
                blocks(&golden.device, kind).into_iter().filter(behind).collect();
            *(if checkpoint == RECORD_CHECKPOINT { &mut records } else { &mut segments }) +=
                tail.len();
            let some = [tail.first(), tail.get(tail.len() / 2), tail.last()];
            for &block in some.into_iter().flatten() {
                refused(&golden, kind, block);
            }
        }
    }
    assert!(segments > 0 && records > 0, "no image has anything behind its newest checkpoint");
}

#[test]
fn a_version_that_does_not_verify_is_damage_like_any_other() {
    for golden in all() {
        let mut device = MemoryDevice(golden.device.clone());
        for (kind, n) in [(SUPERBLOCK, 1), (CHECKPOINT, 1)] {
            for block in blocks(&golden.device, kind).into_iter().take(n) {
                raise(&mut device.0, kind, block, false);
            }
        }
        let contents =
            Contents::open(&mut device).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        assert_eq!(contents.recovery().checkpoint, newest_checkpoint(&golden), "{}", golden.name);
    }
}

#[test]
fn the_refusal_is_one_line_that_says_what_to_do() {
    let line = OpenError::Version(7).to_string();
    assert_eq!(
        line,
        "format version 7 is on it, and this tidepool knows versions up to 1: use the tidepool that wrote it, or a newer one (nothing was changed)"
    );
}
