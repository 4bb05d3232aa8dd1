//! Reads of what is not in the cache: fetched once, answered with what is newest, and kept.

mod common;
use common::*;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECOND: Nanos = 1_000_000_000;

/// A volume whose image has content, and what that is.
fn world() -> (World, Vec<u8>) {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let image = pattern(77, 16 << 20);
    w.images[0].copy_from_slice(&image);
    (w, image)
}

fn ask(w: &mut World, offset: u64, len: u64) -> (RequestId, Buf) {
    let (id, buf) = w.request(0, Op::Read, offset, len, None);
    (id, buf.expect("a read has a buffer"))
}

/// What a request was answered with; it must have been.
fn answer(w: &mut World, (id, buf): (RequestId, Buf), len: u64) -> Vec<u8> {
    assert_eq!(w.replies.remove(&id), Some(Ok(())));
    let bytes = w.engine.arena().bytes(buf)[..len as usize].to_vec();
    w.engine.arena_mut().free(buf);
    bytes
}

fn at(image: &[u8], offset: u64, len: u64) -> &[u8] {
    &image[offset as usize..(offset + len) as usize]
}

#[test]
fn a_block_that_many_want_at_once_is_fetched_once() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let whole = ask(&mut w, 0, 8 * BLOCK);
    let same = ask(&mut w, 0, 8 * BLOCK);
    let overlap = ask(&mut w, 4 * BLOCK, 8 * BLOCK);
    assert!(w.replies.is_empty());
    w.holds = |_| false;
    w.run();
    assert!(answer(&mut w, whole, 8 * BLOCK) == at(&image, 0, 8 * BLOCK));
    // The others find it where it has been put, without waiting for time to pass.
    assert!(answer(&mut w, same, 8 * BLOCK) == at(&image, 0, 8 * BLOCK));
    assert!(answer(&mut w, overlap, 8 * BLOCK) == at(&image, 4 * BLOCK, 8 * BLOCK));
    let count = w.status(0).count;
    assert_eq!((count.backend_reads, count.backend_read_bytes), (2, 12 * BLOCK));
    assert_eq!((count.miss_blocks, count.hit_blocks), (12, 12));
    w.pass(SECOND);
    assert_eq!(w.status(0).count.admitted_blocks, 12);
}

#[test]
fn a_block_that_was_fetched_just_now_is_read_again_at_once_and_from_the_cache() {
    let (mut w, image) = world();
    let first = ask(&mut w, 0, BLOCK);
    assert!(answer(&mut w, first, BLOCK) == at(&image, 0, BLOCK));
    assert_eq!(w.status(0).cached_bytes, 0, "it waits for company");
    let again = ask(&mut w, 0, BLOCK);
    assert!(answer(&mut w, again, BLOCK) == at(&image, 0, BLOCK));
    assert_eq!((w.backend_reads, w.status(0).cached_bytes), (1, BLOCK));
}

#[test]
fn what_was_fetched_is_written_to_the_cache_soon_and_at_once_when_there_is_much_of_it() {
    let (mut w, _) = world();
    w.read(0, 0, BLOCK);
    w.pass(19_000_000);
    assert_eq!(w.status(0).cached_bytes, 0);
    w.pass(2_000_000);
    assert_eq!(w.status(0).cached_bytes, BLOCK);
    w.read(0, MIB, 8 * BLOCK);
    assert_eq!(w.status(0).cached_bytes, BLOCK);
    w.read(0, 2 * MIB, 64 * BLOCK);
    assert!(w.status(0).cached_bytes > 32 * BLOCK, "without a wait");
}

#[test]
fn what_is_written_while_it_is_fetched_is_not_overwritten_in_the_cache() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let read = ask(&mut w, 0, 8 * BLOCK);
    let waits = ask(&mut w, 2 * BLOCK, 2 * BLOCK);
    let new = pattern(1, 4096);
    w.write(0, 3 * BLOCK, &new);
    w.op(0, Op::Discard { fua: false }, 5 * BLOCK, BLOCK).expect("discard");
    w.holds = |_| false;
    w.run();
    answer(&mut w, read, 8 * BLOCK);
    let seen = answer(&mut w, waits, 2 * BLOCK);
    assert!(seen[..4096] == *at(&image, 2 * BLOCK, BLOCK));
    w.pass(SECOND);
    let mut expected = at(&image, 0, 8 * BLOCK).to_vec();
    expected[3 * 4096..4 * 4096].copy_from_slice(&new);
    expected[5 * 4096..6 * 4096].fill(0);
    assert!(w.read(0, 0, 8 * BLOCK) == expected);
    let count = w.status(0).count;
    assert_eq!((count.bypass_overtaken_blocks, count.admitted_blocks), (2, 6));
}

#[test]
fn who_waits_for_another_reads_fetch_is_answered_if_the_cache_device_dies() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let first = ask(&mut w, 0, BLOCK);
    let second = ask(&mut w, 0, BLOCK);
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, MIB, BLOCK, Some(&pattern(1, 4096)));
    w.run();
    assert!(w.engine.device_status().failed);
    w.holds = |_| false;
    w.run();
    for read in [first, second] {
        assert!(answer(&mut w, read, BLOCK) == at(&image, 0, BLOCK));
    }
    assert_eq!(w.status(0).cached_bytes, 0);
}

#[test]
fn who_waits_for_a_fetch_that_fails_tries_for_itself() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let first = ask(&mut w, 0, BLOCK);
    let second = ask(&mut w, 0, BLOCK);
    w.fail_reads(VolumeId(0));
    w.holds = |_| false;
    w.run();
    assert_eq!(w.replies.remove(&first.0), Some(Err(RequestError::Io)));
    assert!(answer(&mut w, second, BLOCK) == at(&image, 0, BLOCK));
}

#[test]
fn a_prefetch_brings_what_is_missing_and_reads_nothing_that_is_there() {
    let (mut w, image) = world();
    w.op(0, Op::Prefetch, 0, 32 * BLOCK).expect("prefetch");
    w.pass(SECOND);
    assert_eq!((w.backend_reads, w.status(0).cached_bytes), (1, 32 * BLOCK));
    let (reads, hits) = (w.device_reads, w.status(0).count.hit_blocks);
    w.op(0, Op::Prefetch, 0, 32 * BLOCK).expect("prefetch");
    assert_eq!((w.device_reads, w.backend_reads, w.status(0).count.hit_blocks), (reads, 1, hits));
    assert!(w.read(0, 0, 32 * BLOCK) == at(&image, 0, 32 * BLOCK));
    assert_eq!((w.backend_reads, w.status(0).count.hit_blocks), (1, hits + 32));
}

#[test]
fn nothing_is_kept_of_what_is_read_in_mode_off() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::Off)]);
    for n in 1..=2 {
        w.read(0, 0, 8 * BLOCK);
        w.pass(SECOND);
        let count = w.status(0).count;
        assert_eq!((count.bypass_mode_blocks, count.backend_reads), (8 * n, n));
        assert_eq!((w.status(0).cached_bytes, count.admitted_blocks), (0, 0));
    }
}
