//! Reads of what is not in the cache: fetched once, answered with what is newest, and kept.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;
use tidepool_engine::{Engine, EngineConfig};

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

#[test]
fn who_waits_alone_for_a_block_does_not_wait_for_its_company() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let first = ask(&mut w, 0, BLOCK);
    let second = ask(&mut w, 0, BLOCK);
    w.holds = |_| false;
    w.run();
    for read in [first, second] {
        assert!(answer(&mut w, read, BLOCK) == at(&image, 0, BLOCK));
    }
    assert_eq!((w.backend_reads, w.status(0).cached_bytes), (1, BLOCK));
    // What comes later, for which nobody waits, is gathered again.
    w.read(0, MIB, BLOCK);
    assert_eq!(w.status(0).cached_bytes, BLOCK);
    let due = w.engine.next_deadline().expect("it is not gathered for ever");
    assert!(due <= w.now + 20_000_000);
    w.pass(20_000_000);
    assert_eq!(w.status(0).cached_bytes, 2 * BLOCK);
}

#[test]
fn a_read_that_begins_before_what_is_being_fetched_fetches_only_what_is_missing() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let first = ask(&mut w, 4 * BLOCK, 4 * BLOCK);
    let around = ask(&mut w, 0, 12 * BLOCK);
    w.holds = |_| false;
    w.run();
    assert!(answer(&mut w, first, 4 * BLOCK) == at(&image, 4 * BLOCK, 4 * BLOCK));
    assert!(answer(&mut w, around, 12 * BLOCK) == at(&image, 0, 12 * BLOCK));
    assert_eq!(w.status(0).count.backend_read_bytes, 12 * BLOCK);
}

#[test]
fn g8_who_waits_is_not_kept_by_others_whose_blocks_are_still_on_their_way() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let slow = [ask(&mut w, 0, BLOCK), ask(&mut w, 0, BLOCK)];
    let fast = [ask(&mut w, MIB, BLOCK), ask(&mut w, MIB, BLOCK)];
    w.holds = |op| matches!(op, BackendOp::Read { offset: 0, .. });
    w.run();
    for read in fast {
        assert!(answer(&mut w, read, BLOCK) == at(&image, MIB, BLOCK));
    }
    w.holds = |_| false;
    w.run();
    for read in slow {
        assert!(answer(&mut w, read, BLOCK) == at(&image, 0, BLOCK));
    }
}

#[test]
fn g8_who_waits_for_a_block_has_what_is_written_there_meanwhile_and_does_not_need_the_backend() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let first = ask(&mut w, 0, BLOCK);
    let second = ask(&mut w, 0, BLOCK);
    let new = pattern(1, 4096);
    w.write(0, 0, &new);
    assert!(answer(&mut w, second, BLOCK) == new[..], "while the backend stands still");
    w.holds = |_| false;
    w.run();
    let seen = answer(&mut w, first, BLOCK);
    assert!(seen == new || seen == *at(&image, 0, BLOCK), "it was asked for before the write");
    assert!(w.read(0, 0, BLOCK) == new);
}

#[test]
fn a_change_overtakes_what_is_fetched_of_its_blocks_and_nothing_beside_them() {
    let mut w = World::new(64 * MIB, &["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack)));
    let images = [pattern(5, 16 << 20), pattern(6, 16 << 20)];
    w.images = images.to_vec();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    for (volume, block) in [(0, 9), (0, 10), (0, 19), (0, 20), (1, 12)] {
        w.request(volume, Op::Read, block * BLOCK, BLOCK, None);
    }
    w.op(0, Op::Discard { fua: false }, 10 * BLOCK, 10 * BLOCK).expect("discard");
    w.holds = |_| false;
    w.run();
    w.pass(SECOND);
    let counts = [0, 1].map(|volume| {
        let count = w.status(volume).count;
        (count.bypass_overtaken_blocks, count.admitted_blocks)
    });
    assert_eq!(counts, [(2, 2), (0, 1)]);
    let mut expected = at(&images[0], 8 * BLOCK, 16 * BLOCK).to_vec();
    expected[2 * 4096..12 * 4096].fill(0);
    assert!(w.read(0, 8 * BLOCK, 16 * BLOCK) == expected);
    assert!(w.read(1, 8 * BLOCK, 16 * BLOCK) == at(&images[1], 8 * BLOCK, 16 * BLOCK));
}

#[test]
fn what_is_fetched_while_the_cache_is_given_up_is_answered_and_not_kept() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let reads = [ask(&mut w, 0, BLOCK), ask(&mut w, 0, BLOCK)];
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::Off, c)).expect("the mode");
    w.holds = |_| false;
    w.run();
    for read in reads {
        assert!(answer(&mut w, read, BLOCK) == at(&image, 0, BLOCK));
    }
    w.pass(SECOND);
    assert_eq!((w.status(0).cached_bytes, w.status(0).count.admitted_blocks), (0, 0));
}

#[test]
fn blocks_that_read_as_zero_are_hits() {
    let (mut w, _) = world();
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    let before = w.status(0).count.hit_blocks;
    assert!(w.read(0, 4 * BLOCK, 3 * BLOCK).iter().all(|&b| b == 0));
    assert!(w.read(0, 64 * BLOCK, 2 * BLOCK).iter().all(|&b| b == 0));
    assert_eq!(w.status(0).count.hit_blocks, before + 5);
}

#[test]
fn every_block_that_was_missing_is_kept_or_counted_as_one_for_which_there_was_no_room() {
    let (mut w, image) = world();
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let len = 64 * BLOCK;
    let reads: Vec<_> = (0..16).map(|i| (i * len, ask(&mut w, i * len, len))).collect();
    // All of them arrive before anything can be written to the cache device.
    w.holds = |_| false;
    w.run();
    for (offset, read) in reads {
        assert!(answer(&mut w, read, len) == at(&image, offset, len));
    }
    w.pass(SECOND);
    let count = w.status(0).count;
    assert!(count.admitted_blocks > 0 && count.bypass_no_room_blocks > 0, "{count:?}");
    assert_eq!(count.admitted_blocks + count.bypass_no_room_blocks, 16 * 64);
    assert_eq!(w.status(0).cached_bytes, count.admitted_blocks * BLOCK);
}

#[test]
fn no_more_than_64_mib_is_on_its_way_into_the_cache() {
    let mut w = World::new(64 * MIB, &[spec("a", 80 * MIB, Mode::WriteBack)]);
    w.reopen();
    // Room for as much at once.
    let config = EngineConfig::default();
    let engine = Engine::open(&mut w.device, config, w.now).expect("open").0;
    w.engine = engine;
    w.attach(true);
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    for offset in (0..64 * MIB).step_by(REQUEST_BYTES_MAX) {
        ask(&mut w, offset, REQUEST_BYTES_MAX as u64);
    }
    assert_eq!(w.status(0).count.bypass_no_room_blocks, 0);
    ask(&mut w, 70 * MIB, 3 * BLOCK);
    ask(&mut w, 71 * MIB, BLOCK);
    assert_eq!(w.status(0).count.bypass_no_room_blocks, 4);
}

#[test]
fn what_the_image_may_still_lose_is_not_kept_and_is_counted() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Flush);
    w.write(0, 0, &pattern(1, 4096));
    let before = w.status(0).count.bypass_mode_blocks;
    w.read(0, 0, 3 * BLOCK);
    w.read(0, MIB, 4 * BLOCK);
    w.pass(SECOND);
    let count = w.status(0).count;
    assert_eq!((count.bypass_mode_blocks, count.admitted_blocks), (before + 7, 0));
}

#[test]
fn g1_what_a_write_past_the_cache_has_overtaken_does_not_come_back_after_a_crash() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.images[0].copy_from_slice(&pattern(77, 16 << 20));
    let before = w.images[0].clone();
    // On its way to the cache, together with what nobody changes.
    w.read(0, 0, 4 * BLOCK);
    let new = pattern(1, 4096);
    w.write(0, BLOCK, &new);
    w.flush(0);
    w.pass(100_000_000);
    assert_eq!(w.status(0).cached_bytes, 3 * BLOCK);
    w.restart(true);
    assert_eq!(w.status(0).cached_bytes, 3 * BLOCK, "what was written to the cache is found again");
    assert!(w.read(0, BLOCK, BLOCK) == new);
    assert!(w.read(0, 0, BLOCK) == at(&before, 0, BLOCK));
}

#[test]
fn g1_a_clean_block_that_could_not_be_read_once_does_not_come_back_behind_a_write_past_the_cache() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.images[0].copy_from_slice(&pattern(77, 16 << 20));
    let old = w.read(0, 0, BLOCK);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("a checkpoint");
    w.pass(SECOND);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![2], c)).expect("a checkpoint");
    assert_eq!(w.status(0).cached_bytes, BLOCK);
    let copies = w.corrupt(&old);
    w.holds = |op| matches!(op, BackendOp::Read { .. });
    let again = ask(&mut w, 0, BLOCK);
    assert_eq!(w.status(0).count.corrupt_blocks, 1);
    // The device has it after all.
    copies.into_iter().for_each(|block| w.device.0[block * 4096 + 7] ^= 1);
    w.fail_reads(VolumeId(0));
    w.holds = |_| false;
    w.run();
    assert_eq!(w.replies.remove(&again.0), Some(Err(RequestError::Io)));
    let new = pattern(1, 4096);
    w.write(0, 0, &new);
    w.flush(0);
    w.restart(true);
    assert!(w.read(0, 0, BLOCK) == new);
}

/// Damages the one copy of a block on the device.
fn damaged(w: &mut World, content: &[u8]) -> usize {
    let copies = w.corrupt(content);
    assert_eq!(copies.len(), 1);
    copies[0] * 4096 + 7
}

#[test]
fn g7_one_bad_block_in_the_middle_of_a_stretch_is_the_one_that_is_lost_or_fetched_again() {
    for dirty in [false, true] {
        let (mut w, _) = world();
        let data = pattern(1, 8 * 4096);
        w.backend_stopped = dirty;
        w.write(0, 16 * BLOCK, &data);
        if !dirty {
            w.drain(0);
        }
        damaged(&mut w, &data[5 * 4096..6 * 4096]);
        let seen = w.try_read(0, 16 * BLOCK, 8 * BLOCK);
        assert_eq!(w.status(0).count.corrupt_blocks, 1);
        if dirty {
            assert_eq!(seen, Err(RequestError::Io));
            assert_eq!(w.status(0).lost_blocks, 1);
            assert_eq!(w.try_read(0, 21 * BLOCK, BLOCK), Err(RequestError::Io));
            assert!(w.read(0, 16 * BLOCK, 5 * BLOCK) == data[..5 * 4096]);
            assert!(w.read(0, 22 * BLOCK, 2 * BLOCK) == data[6 * 4096..]);
        } else {
            assert!(seen == Ok(data));
            assert_eq!(w.status(0).lost_blocks, 0);
        }
    }
}

#[test]
fn g7_a_dirty_block_that_is_read_wrongly_once_is_read_again_into_its_place() {
    let (mut w, _) = world();
    w.backend_stopped = true;
    let data = pattern(1, 8 * 4096);
    w.write(0, 16 * BLOCK, &data);
    let bad = damaged(&mut w, &data[5 * 4096..6 * 4096]);
    let (id, buf) = w.submit(0, Op::Read, 16 * BLOCK, 8 * BLOCK, None);
    let before = w.device_reads;
    while w.device_reads == before {
        assert!(w.step());
    }
    w.device.0[bad] ^= 1;
    w.run();
    assert!(answer(&mut w, (id, buf.expect("a read has a buffer")), 8 * BLOCK) == data);
    assert_eq!((w.status(0).count.corrupt_blocks, w.status(0).lost_blocks), (0, 0));
}

#[test]
fn what_is_dropped_is_not_dirty_any_more_also_when_the_log_is_replayed() {
    let (mut w, _) = world();
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4 * 4096));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c)).expect("the mode");
    assert_eq!(w.status(0).dirty_bytes, 4 * BLOCK);
    w.backend_stopped = false;
    w.write(0, BLOCK, &pattern(2, 4096));
    assert_eq!(w.images[0][4096..8192], pattern(2, 4096));
    // The last checkpoint says of all four that they are dirty, and the log that one is void.
    w.reopen();
    assert_eq!((w.status(0).dirty_bytes, w.status(0).cached_bytes), (3 * BLOCK, 3 * BLOCK));
}

#[test]
fn g1_a_discard_that_is_not_in_the_image_yet_holds_while_a_write_past_the_cache_waits_for_it() {
    const OBJECT: u64 = 4 * MIB;
    let (mut w, _) = world();
    w.images[0].fill(0x11);
    w.backend_result = Err(IoError::Errno(5));
    w.op(0, Op::Discard { fua: true }, OBJECT, BLOCK).expect("discard");
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c)).expect("the mode");
    w.request(0, Op::Write { fua: false }, OBJECT, BLOCK, Some(&pattern(1, 4096)));
    w.backend_result = Ok(());
    w.holds = |op| matches!(op, BackendOp::Write { .. } | BackendOp::Discard { .. });
    w.pass(SECOND);
    assert!(w.read(0, OBJECT, BLOCK).iter().all(|&b| b == 0), "neither has arrived");
    w.holds = |_| false;
    w.pass(SECOND);
    assert!(w.read(0, OBJECT, BLOCK) == pattern(1, 4096));
}

/// Two volumes with a mebibyte in the cache, and the reads of the cache device are held.
fn two_volumes_with_reads_held() -> World {
    let mut w = World::new(64 * MIB, &["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack)));
    for volume in [0, 1] {
        for (piece, data) in
            pattern(volume.into(), MIB as usize).chunks(REQUEST_BYTES_MAX).enumerate()
        {
            w.write(volume, (piece * REQUEST_BYTES_MAX) as u64, data);
        }
    }
    w.hold_device_reads = 0..u64::MAX;
    w
}

#[test]
fn a_volume_beside_others_has_few_reads_at_the_cache_device_and_others_begin_theirs_at_once() {
    /// See `DEVICE_READS_BESIDE_OTHERS_MAX`.
    const BESIDE_OTHERS_MAX: usize = 16;
    let mut w = two_volumes_with_reads_held();
    let storm: Vec<_> = (0..400).map(|i| ask(&mut w, i % 256 * BLOCK, BLOCK)).collect();
    assert_eq!(w.device_reads_held(), BESIDE_OTHERS_MAX);
    w.write(1, 2 * MIB, &pattern(5, BLOCK as usize));
    let (other, buf) = w.request(1, Op::Read, 4 * BLOCK, BLOCK, None);
    assert_eq!(w.device_reads_held(), BESIDE_OTHERS_MAX + 1);
    w.release_a_device_read();
    assert_eq!(w.device_reads_held(), BESIDE_OTHERS_MAX + 1);
    w.release_device_reads();
    w.run();
    let found = answer(&mut w, (other, buf.expect("a read has a buffer")), BLOCK);
    assert!(found == at(&pattern(1, MIB as usize), 4 * BLOCK, BLOCK));
    for (i, read) in storm.into_iter().enumerate() {
        let found = answer(&mut w, read, BLOCK);
        assert!(found == at(&pattern(0, MIB as usize), i as u64 % 256 * BLOCK, BLOCK), "read {i}");
    }
}

#[test]
fn a_volume_that_is_alone_has_more_reads_at_the_cache_device_until_another_one_comes() {
    /// See `DEVICE_READS_MAX`.
    const ALONE_MAX: usize = 64;
    /// See `DEVICE_READS_BESIDE_OTHERS_MAX`.
    const BESIDE_OTHERS_MAX: usize = 16;
    /// See `REQUESTS_ALONE`.
    const REQUESTS_ALONE: usize = 4096;
    let mut w = two_volumes_with_reads_held();
    w.hold_device_reads = 0..0;
    (0..REQUESTS_ALONE).for_each(|_| drop(w.read(0, 0, BLOCK)));
    w.hold_device_reads = 0..u64::MAX;
    let storm: Vec<_> = (0..200).map(|i| ask(&mut w, i * BLOCK, BLOCK)).collect();
    assert_eq!(w.device_reads_held(), ALONE_MAX);
    let (other, buf) = w.request(1, Op::Read, 4 * BLOCK, BLOCK, None);
    // The next one that ends gives its place to the other volume; the places of those behind it
    // stay free.
    for held in std::iter::once(ALONE_MAX).chain((BESIDE_OTHERS_MAX + 1..ALONE_MAX).rev()) {
        w.release_a_device_read();
        assert_eq!(w.device_reads_held(), held);
    }
    w.release_a_device_read();
    assert_eq!(w.device_reads_held(), BESIDE_OTHERS_MAX + 1, "there is one for each that ends");
    w.release_device_reads();
    w.run();
    answer(&mut w, (other, buf.expect("a read has a buffer")), BLOCK);
    storm.into_iter().for_each(|read| drop(answer(&mut w, read, BLOCK)));
}
