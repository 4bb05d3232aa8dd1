//! A cache device that cannot be read when the cache is opened, in part or not at all.

use crate::common::*;
use std::convert::Infallible;
use tidepool_engine::api::*;
use tidepool_engine::device::Device;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Content, Contents, Engine, EngineConfig, OpenError};

const EIO: IoError = IoError::Errno(5);
/// Writes, each of four blocks, and how far they are apart.
const WRITES: u64 = 20;
const WRITE_BYTES: usize = 16 << 10;
const STRIDE: u64 = 64 << 10;

/// A cache with writes that are on stable media, of which no checkpoint knows: each before the next
/// one was sent, or all of them by one flush.
fn flushed(by_one: bool) -> World {
    let mut w = World::new(64 * MIB, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    if by_one {
        // Until a client's first flush every write waits for stable media.
        w.flush(0);
    }
    for n in 0..WRITES {
        w.write(0, n * STRIDE, &pattern(n, WRITE_BYTES));
    }
    w.flush(0);
    w
}

/// What is wrong with what a device holds of those writes; nothing if it says so itself.
fn missing(device: &mut dyn Device) -> Option<u64> {
    let contents = Contents::open(device).expect("it can be read");
    let volume = &contents.volumes()[0];
    if volume.state == VolumeState::Failed || volume.lost_blocks > 0 {
        return None;
    }
    let mut found = vec![0; 8 * MIB as usize];
    let Ok(()) = contents.read(device, volume.id, &mut |stretch| {
        if let Content::Data(data) = stretch.content {
            found[stretch.offset as usize..][..data.len()].copy_from_slice(data);
        }
        Ok::<(), Infallible>(())
    });
    (0..WRITES).find(|n| found[(n * STRIDE) as usize..][..WRITE_BYTES] != pattern(*n, WRITE_BYTES))
}

/// Opens the cache on a device, which must be unchanged when that fails; then finds everything, or
/// is told that it is not there. Returns why it was not opened.
fn open(device: &mut Overlay<'_>, what: &str) -> Option<OpenError> {
    let refused = Engine::open(device, EngineConfig::small(), 0).err();
    if refused.is_some() {
        assert!(device.written.is_empty(), "{what}: something was written");
        return refused;
    }
    device.heal();
    assert_eq!(missing(device), None, "{what}");
    None
}

#[test]
fn g3_reads_that_fail_from_one_on_while_the_cache_is_opened_hide_nothing_that_was_flushed() {
    let w = flushed(false);
    let mut whole = Overlay::on(&w.device.0);
    Engine::open(&mut whole, EngineConfig::small(), 0).expect("it can be read");
    let reads = u64::MAX - whole.reads_left;
    assert!(reads > 5);
    for reads_left in 0..reads {
        let mut device = Overlay { reads_left, ..Overlay::on(&w.device.0) };
        match open(&mut device, &format!("after {reads_left} reads")) {
            None | Some(OpenError::Device(_, EIO) | OpenError::LogEnd) => {}
            Some(error) => panic!("after {reads_left} reads it says that {error}"),
        }
    }
}

/// Opens the cache without each of the blocks in its segments; returns how often that was done, and
/// how often refused.
fn without_each_block(mut w: World) -> (u64, u64) {
    let (mut opened, mut refused) = (0, 0);
    let geometry = *Contents::open(&mut w.device).expect("a cache").geometry();
    for block in u64::from(geometry.segments_first_block)..geometry.device_blocks {
        // But those that nobody has ever written.
        if w.device.0[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].iter().all(|&byte| byte == 0) {
            continue;
        }
        let mut device = Overlay { unreadable: vec![block], ..Overlay::on(&w.device.0) };
        match open(&mut device, &format!("block {block} is unreadable")) {
            None => opened += 1,
            Some(OpenError::LogEnd) => {
                refused += 1;
                // For a rescue it is shown all the same, and not as if it were all.
                assert_eq!(missing(&mut device), None, "block {block} is unreadable");
            }
            Some(error) => panic!("without block {block} it says that {error}"),
        }
    }
    (opened, refused)
}

#[test]
fn g3_a_block_that_cannot_be_read_while_the_cache_is_opened_hides_nothing_that_was_flushed() {
    let (opened, refused) = without_each_block(flushed(false));
    assert!(refused > 0 && refused < opened / 4, "{opened} are opened and {refused} refused");
}

#[test]
fn g3_a_block_that_cannot_be_read_hides_nothing_that_the_last_flush_alone_has_covered() {
    let (opened, refused) = without_each_block(flushed(true));
    assert!(
        refused > opened,
        "any of it may be a torn tail: {opened} are opened and {refused} refused"
    );
}
