//! Making room: what is dropped, what stays, and that nothing is lost on the way.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::SUMMARY_MAGIC;
use tidepool_engine::mem::Buf;

const PIECE: u64 = 64 << 10;
const SECOND: Nanos = 1_000_000_000;

pub fn world(drain: DrainOrder) -> World {
    let mut w =
        World::new(64 * MIB, &[VolumeSpec { drain, ..spec("a", 256 * MIB, Mode::WriteBack) }]);
    w.flush(0);
    w
}

/// Reads a stretch that nobody wants again.
pub fn read_once(w: &mut World, from: u64, len: u64) {
    for at in (from..from + len).step_by(2 * PIECE as usize) {
        w.read(0, at, 2 * PIECE);
    }
}

/// Blocks of a stretch that are in the cache.
pub fn cached(w: &World, offset: u64, len: u64) -> u64 {
    let (mut extents, mut told, mut found) = (Vec::new(), 0, 0);
    // One call looks at a part of the index.
    while told < len {
        w.engine.block_status(VolumeId(0), offset + told, len - told, 100_000, &mut extents);
        told += extents.iter().map(|e| e.len).sum::<u64>();
        found += extents.iter().filter(|e| e.cached).map(|e| e.len).sum::<u64>();
    }
    found / BLOCK_BYTES as u64
}

/// Damages all summaries of segments.
fn damage_summaries(w: &mut World) -> usize {
    let blocks = w.device.0.chunks_exact_mut(BLOCK_BYTES);
    blocks.filter(|block| block.starts_with(&SUMMARY_MAGIC)).map(|block| block[9] ^= 1).count()
}

/// Dirty blocks in segments of which half is superseded, while the drain stands still; returns what
/// each piece holds.
fn half_dead_segments(w: &mut World) -> Vec<Vec<u8>> {
    w.holds = |op| matches!(op, BackendOp::Write { .. } | BackendOp::RedoWrite { .. });
    let mut content: Vec<Vec<u8>> = (0..160).map(|i| pattern(i, PIECE as usize)).collect();
    for (i, data) in content.iter().enumerate() {
        w.write(0, i as u64 * PIECE, data);
    }
    for i in (0..160).step_by(2) {
        content[i] = pattern(1000 + i as u64, PIECE as usize);
        w.write(0, i as u64 * PIECE, &content[i]);
    }
    content
}

fn everything_is_there(w: &mut World, content: &[Vec<u8>]) {
    for (i, data) in content.iter().enumerate() {
        assert!(w.read(0, i as u64 * PIECE, PIECE) == *data, "piece {i} is read back");
    }
    w.holds = |_| false;
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0, "no copy is left behind");
    let cut = w.cut(0);
    for (i, data) in content.iter().enumerate() {
        assert!(
            w.images[0][i * PIECE as usize..][..PIECE as usize] == data[..],
            "piece {i} in the image"
        );
        assert!(cut[i * PIECE as usize..][..PIECE as usize] == data[..], "piece {i} with the redo");
    }
}

fn dirty_blocks_move(drain: DrainOrder) {
    let volume =
        VolumeSpec { drain, dirty_bytes_max: 40 * MIB, ..spec("a", 64 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[volume]);
    w.flush(0);
    w.holds = nothing_is_in_the_redo;
    write_scattered(&mut w, 0..300, 0);
    w.pass(2 * SECOND);
    let mut pieces = 300;
    while w.engine.device_status().segments_free > 4 {
        write_scattered(&mut w, pieces..pieces + 1, 0);
        pieces += 1;
    }
    assert_eq!(
        w.engine.device_status().moved_blocks,
        0,
        "as long as there is room beside them they stay"
    );
    write_scattered(&mut w, pieces..480, 0);
    let device = w.engine.device_status();
    assert!(device.moved_blocks > 1000, "{device:?}");
    let content: Vec<Vec<u8>> = (0..480).map(|i| pattern(i, PIECE as usize)).collect();
    everything_is_there(&mut w, &content);
    w.restart(true);
    for (i, data) in content.iter().enumerate() {
        assert!(w.read(0, i as u64 * PIECE, PIECE) == *data, "piece {i} after a restart");
    }
}

fn summaries_are_damaged(drain: DrainOrder) {
    let mut w = world(drain);
    let content = half_dead_segments(&mut w);
    read_once(&mut w, 64 * MIB, 32 * MIB);
    assert!(damage_summaries(&mut w) > 20);
    let before = w.status(0).count.evicted_blocks;
    let mut at = 96 * MIB;
    while w.status(0).count.evicted_blocks == before {
        read_once(&mut w, at, 2 * PIECE);
        at += 2 * PIECE;
    }
    let evicted = w.status(0).count.evicted_blocks - before;
    assert!(evicted < 256, "{evicted} blocks where there is too little room by a segment or two");
    read_once(&mut w, at, 160 * MIB - at);
    assert!(w.status(0).count.evicted_blocks > before + 4000);
    assert_eq!(cached(&w, 64 * MIB, 24 * MIB), 0, "nothing is left of what their segments held");
    let device = w.engine.device_status();
    assert_eq!(device.cached_blocks * BLOCK_BYTES as u64, w.status(0).cached_bytes);
    assert_eq!(cached(&w, 0, 256 * MIB), device.cached_blocks);
    everything_is_there(&mut w, &content);
}

#[test]
fn g8_dirty_blocks_move_out_of_the_way_while_the_drain_stands_still() {
    dirty_blocks_move(DrainOrder::Unordered);
}

#[test]
fn g5_what_moves_out_of_the_way_is_in_its_group_all_the_same() {
    dirty_blocks_move(DrainOrder::Grouped);
}

#[test]
fn g2_what_moves_while_it_is_being_drained_is_drained_again() {
    let volume =
        |name, max| VolumeSpec { dirty_bytes_max: max, ..spec(name, 64 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[volume("a", 2 * MIB), volume("b", 40 * MIB)]);
    w.flush(0);
    w.flush(1);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 4096));
    w.pass(2 * SECOND);
    assert_eq!(w.status(0).drain_writes_in_flight, 1);
    // Its segment is the first one that is worth the trouble.
    w.write(1, 0, &pattern(1, 2 * PIECE as usize));
    for i in 0.. {
        w.write(1, 0, &pattern(1000 + i, 2 * PIECE as usize));
        w.write(1, MIB + i * PIECE, &pattern(i, PIECE as usize));
        if w.engine.device_status().moved_blocks > 0 {
            break;
        }
    }
    w.stopped = vec![VolumeId(1)];
    w.holds = |_| false;
    w.run();
    let status = w.status(0);
    assert!(status.sequence_drained <= status.sequence, "{status:?}");
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0);
    assert!(w.images[0][..4096] == pattern(1, 4096));
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, MIB, &pattern(2, 4096));
    let control = w.fresh();
    w.engine.drain(w.now, VolumeId(0), control);
    w.pass(SECOND);
    assert!(!w.controls.contains_key(&control), "what has come since is not in the image");
}

/// Writes pieces, each with something beside it in its segment that is superseded soon.
fn write_scattered(w: &mut World, pieces: std::ops::Range<u64>, seed: u64) {
    for i in pieces {
        w.write(0, i * PIECE, &pattern(seed + i, PIECE as usize));
        w.write(0, 60 * MIB, &pattern(100_000 + i, PIECE as usize));
    }
}

/// A volume that is drained in groups and whose client has flushed; what is held is not done.
fn grouped(holds: fn(&BackendOp) -> bool) -> World {
    let volume = VolumeSpec {
        drain: DrainOrder::Grouped,
        dirty_bytes_max: 40 * MIB,
        ..spec("a", 64 * MIB, Mode::WriteBack)
    };
    let mut w = World::new(64 * MIB, &[volume]);
    w.flush(0);
    w.holds = holds;
    w
}

/// A volume of which a group has just been cut, with the first `pieces` in it, and what is held is
/// not done.
fn cut_group(pieces: u64, holds: fn(&BackendOp) -> bool) -> World {
    let mut w = grouped(holds);
    write_scattered(&mut w, 0..pieces, 0);
    w.pass(2 * SECOND);
    assert_eq!(w.status(0).count.groups, 1);
    w
}

/// The group is what it was when it was cut, and the newest content reaches the image.
fn group_is_whole(w: &mut World, pieces: u64, changed: std::ops::Range<u64>, end: u64) {
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.run();
    assert_eq!(w.status(0).count.groups, 1);
    let cut = w.cut(0);
    let is = |image: &[u8], i: u64, seed: u64| {
        image[(i * PIECE) as usize..][..PIECE as usize] == pattern(seed, PIECE as usize)
    };
    for i in 0..pieces {
        assert!(is(&cut, i, i), "piece {i} of the group");
    }
    w.holds = |_| false;
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0, "no copy is left behind");
    for i in 0..end {
        assert!(
            is(&w.images[0], i, if changed.contains(&i) { 1000 + i } else { i }),
            "piece {i} in the image"
        );
    }
    assert_eq!((w.status(0).lost_blocks, w.status(0).count.corrupt_blocks), (0, 0));
}

/// A group of eight MiB, of which four have changed since, is packed into other segments.
fn group_is_packed(holds: fn(&BackendOp) -> bool) {
    let mut w = cut_group(128, holds);
    let redo_bytes = w.status(0).count.redo_bytes;
    write_scattered(&mut w, 64..128, 1000);
    write_scattered(&mut w, 128..400, 0);
    for i in 0..400 {
        w.write(0, 60 * MIB, &pattern(200_000 + i, PIECE as usize));
    }
    let moved = w.engine.device_status().moved_blocks;
    assert!(moved > 1500, "{moved} blocks have been moved");
    assert_eq!(w.status(0).count.redo_bytes, redo_bytes);
    group_is_whole(&mut w, 128, 64..128, 400);
}

fn nothing_is_in_the_redo(op: &BackendOp) -> bool {
    matches!(op, BackendOp::Write { .. } | BackendOp::RedoWrite { .. })
}

#[test]
fn g5_what_moves_before_it_is_in_its_groups_redo_gets_there_all_the_same() {
    group_is_packed(nothing_is_in_the_redo);
}

#[test]
fn what_moves_when_it_is_in_its_groups_redo_is_not_written_there_again() {
    group_is_packed(|op| matches!(op, BackendOp::Write { .. } | BackendOp::RedoCommit { .. }));
}

#[test]
fn g8_older_copies_that_a_group_needs_make_room_without_summaries_too() {
    let mut w = cut_group(300, nothing_is_in_the_redo);
    assert!(damage_summaries(&mut w) > 100);
    // There is no room for as much again beside what is superseded.
    for i in 0..300 {
        w.write(0, i * PIECE, &pattern(1000 + i, PIECE as usize));
        w.write(0, 60 * MIB, &pattern(200_000 + i, PIECE as usize));
    }
    let moved = w.engine.device_status().moved_blocks;
    assert!(moved > 1500, "{moved} blocks have been moved");
    group_is_whole(&mut w, 300, 0..300, 300);
}

#[test]
fn g7_segments_whose_summaries_are_damaged_are_reclaimed_by_what_the_index_knows() {
    summaries_are_damaged(DrainOrder::Unordered);
}

#[test]
fn g7_what_only_a_group_needs_is_found_without_summaries_too() {
    summaries_are_damaged(DrainOrder::Grouped);
}

/// A cache full of dirty blocks, of which many were written again, and the seeds of what its pieces
/// hold. Writes come `at_once`.
fn full_cache(segment_bytes: u32, at_once: u64) -> (World, Vec<u64>) {
    full_cache_of(64 * MIB, segment_bytes, at_once)
}

fn full_cache_of(bytes: u64, segment_bytes: u32, at_once: u64) -> (World, Vec<u64>) {
    let spec = VolumeSpec { dirty_bytes_max: bytes, ..spec("a", 2 * bytes, Mode::WriteBack) };
    let mut w = World::with_segments(bytes, segment_bytes, &[spec]);
    w.flush(0);
    read_once(&mut w, bytes, bytes);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    // What is on its way counts as well.
    let pieces = w.status(0).dirty_bytes_max / PIECE - 2 * at_once;
    let mut content: Vec<u64> = (0..pieces).collect();
    let begun = w.now;
    for i in 0..pieces {
        w.write(0, i * PIECE, &pattern(i, PIECE as usize));
    }
    let mut random = 88172645463325252u64;
    for n in 0..1500 / at_once {
        let mut sent = Vec::new();
        for k in 0..at_once {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (i, seed) = (random % pieces, 1000 + n * at_once + k);
            content[i as usize] = seed;
            let data = pattern(seed, PIECE as usize);
            sent.push(w.submit(0, Op::Write { fua: false }, i * PIECE, PIECE, Some(&data)));
            // The next one comes in the middle of what this one brings about.
            (0..3).for_each(|_| _ = w.step());
        }
        w.run();
        for (id, buf) in sent {
            assert_eq!(w.replies.remove(&id), Some(Ok(())), "round {n}");
            w.engine.arena_mut().free(buf.expect("it has a buffer"));
        }
    }
    assert!(w.now - begun < SECOND, "nobody waits");
    let device = w.engine.device_status();
    assert!(
        (1000..1 << 20).contains(&device.moved_blocks) && device.reclaims < 1 << 16,
        "{device:?}"
    );
    (w, content)
}

fn a_full_cache_goes_on(segment_bytes: u32, at_once: u64) {
    let (mut w, content) = full_cache(segment_bytes, at_once);
    w.restart(true);
    for (i, &seed) in (0..).zip(&content) {
        assert!(w.read(0, i * PIECE, PIECE) == pattern(seed, PIECE as usize), "piece {i}");
    }
    w.holds = |_| false;
    w.drain(0);
    for (i, &seed) in content.iter().enumerate() {
        let at = i * PIECE as usize;
        assert!(w.images[0][at..][..PIECE as usize] == pattern(seed, PIECE as usize), "piece {i}");
    }
}

#[test]
fn g8_a_cache_full_of_dirty_blocks_takes_whatever_does_not_make_them_more() {
    a_full_cache_goes_on(256 << 10, 1);
}

#[test]
fn g8_large_segments_are_emptied_in_parts_while_writes_go_on() {
    a_full_cache_goes_on(1 << 20, 32);
}

#[test]
fn g8_a_cache_device_that_dies_while_room_is_made_lets_go_of_its_volumes() {
    let mut w = world(DrainOrder::Unordered);
    read_once(&mut w, 0, 60 * MIB);
    let mut reads = Vec::new();
    while !w.engine.device_status().reclaiming {
        if !w.step() {
            let at = 64 * MIB + reads.len() as u64 * PIECE;
            reads.push(w.submit(0, Op::Read, at, PIECE, None));
        }
    }
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, 0, 4096, Some(&pattern(1, 4096)));
    w.pass(SECOND);
    assert!(w.engine.device_status().failed);
    w.control(|e, now, c| e.remove(now, VolumeId(0), false, c)).expect("it is removed");
}

#[test]
fn g2_a_restart_finds_what_stands_in_every_page_of_the_segment_table() {
    let mut w = world(DrainOrder::Unordered);
    for i in 0..640 {
        w.write(0, i * PIECE, &pattern(i, PIECE as usize));
    }
    w.drain(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    // Each checkpoint has something new in the last page alone.
    for round in 0..4 {
        for i in 640 + round * 16..656 + round * 16 {
            w.write(0, i * PIECE, &pattern(i, PIECE as usize));
        }
        w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("recorded");
    }
    w.restart(true);
    let before = w.backend_reads;
    for i in 0..704 {
        assert!(w.read(0, i * PIECE, PIECE) == pattern(i, PIECE as usize), "piece {i}");
    }
    assert_eq!(w.backend_reads, before, "all of it is cached");
    w.holds = |_| false;
    w.drain(0);
    for i in 640..704 {
        assert!(
            w.images[0][(i * PIECE) as usize..][..PIECE as usize] == pattern(i, PIECE as usize)
        );
    }
}

#[test]
fn g8_copies_that_groups_have_kept_for_a_while_take_no_room_for_ever() {
    let mut w = world(DrainOrder::Grouped);
    let data: Vec<_> = (0..2).map(|i| pattern(i, PIECE as usize)).collect();
    for round in 0..40 {
        for data in &data {
            for i in 0..24 {
                w.write(0, i * PIECE, data);
            }
            // The second time the first copies are those of a group that is being written.
            w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
            w.pass(3 * SECOND);
        }
        w.holds = |_| false;
        w.drain(0);
        let device = w.engine.device_status();
        assert!(
            device.segments_free > 4 && device.cached_blocks == 384,
            "round {round}: {device:?}"
        );
    }
}

#[test]
fn g8_what_is_discarded_while_its_segment_is_emptied_is_let_go() {
    let (mut w, content) = full_cache(1 << 20, 32);
    let (mut sent, mut steps) = (Vec::new(), 0);
    // In the middle of what it reads.
    while steps < 20 {
        steps = if w.engine.device_status().reclaiming { steps + 1 } else { 0 };
        if !w.step() {
            let at = sent.len() as u64 * 5 % 32 * PIECE;
            let data = pattern(sent.len() as u64, PIECE as usize);
            sent.push(w.submit(0, Op::Write { fua: false }, at, PIECE, Some(&data)));
        }
    }
    let all = content.len() as u64 * PIECE;
    w.op(0, Op::Discard { fua: false }, 0, all).expect("a discard");
    for (id, buf) in sent {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
    for i in 0..content.len() as u64 {
        assert!(w.read(0, i * PIECE, PIECE).iter().all(|&b| b == 0));
    }
    w.holds = |_| false;
    w.drain(0);
    read_once(&mut w, 64 * MIB, 64 * MIB);
    let (status, device) = (w.status(0), w.engine.device_status());
    assert_eq!((status.dirty_bytes, device.segments_dirty), (0, 0));
    assert_eq!((status.count.corrupt_blocks, status.lost_blocks), (0, 0));
    assert!(w.images[0][..all as usize].iter().all(|&b| b == 0));
}

/// Writes come between any two reads of what is moved, as many as there is memory for, and none
/// makes more dirty.
fn writes_beside_moves(full: (World, Vec<u64>)) {
    let (mut w, mut content) = full;
    let mut random = 88172645463325252u64;
    let mut sent: Vec<(RequestId, Option<tidepool_engine::mem::Buf>)> = Vec::new();
    let (mut emptied, mut n) = (0, 0u64);
    while n < 2800 || !sent.is_empty() {
        n += 1;
        assert!(n < 4000, "{} writes wait for ever: {:?}", sent.len(), w.engine.device_status());
        while n < 2800 && sent.len() < 48 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (i, seed) = (random % content.len() as u64, random % 1_000_000);
            content[i as usize] = seed;
            let data = pattern(seed, PIECE as usize);
            sent.push(w.submit(0, Op::Write { fua: false }, i * PIECE, PIECE, Some(&data)));
        }
        w.hold_device_reads = 0..u64::MAX;
        w.run();
        emptied += w.release_device_reads();
        sent.retain(|(id, buf)| {
            let waits = w.replies.remove(id).is_none();
            buf.iter().filter(|_| !waits).for_each(|buf| w.engine.arena_mut().free(*buf));
            waits
        });
    }
    assert!(emptied > 1000, "{emptied} reads");
    w.release_device_reads();
    w.run();
    for (i, &seed) in (0..).zip(&content) {
        assert!(w.read(0, i * PIECE, PIECE) == pattern(seed, PIECE as usize), "piece {i}");
    }
}

#[test]
fn g8_writes_do_not_take_the_room_that_a_segment_needs_to_be_emptied() {
    writes_beside_moves(full_cache(1 << 20, 32));
    writes_beside_moves(full_cache_of(128 * MIB, 512 << 10, 8));
}

#[test]
fn g8_no_write_waits_for_a_segment_that_is_being_emptied_while_others_are_free() {
    let (mut w, content) = full_cache(1 << 20, 32);
    let (mut at_once, mut later) = (0, 0);
    let mut random = 88172645463325252u64;
    for n in 0..3000 {
        w.hold_device_reads = 0..u64::MAX;
        let before = w.engine.device_status();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = random % content.len() as u64 * PIECE;
        let (id, buf) =
            w.request(0, Op::Write { fua: false }, at, PIECE, Some(&pattern(n, PIECE as usize)));
        if before.reclaiming && before.segments_free > 2 {
            *(if w.replies.contains_key(&id) { &mut at_once } else { &mut later }) += 1;
        }
        // What is moved is read from time to time, and when a write waits for that.
        let mut rounds = 0;
        while !w.replies.contains_key(&id) || rounds < n % 2 {
            rounds += 1;
            assert!(rounds < 1000, "write {n} waits for ever");
            w.release_device_reads();
            w.hold_device_reads = 0..u64::MAX;
            w.run();
        }
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
    assert!(at_once > 1000 && later == 0, "{at_once} at once, {later} later");
}

#[test]
fn g7_a_dirty_block_that_does_not_verify_when_it_is_moved_is_counted_and_lost() {
    let mut w = grouped(nothing_is_in_the_redo);
    // The first segment has less to be moved than any other.
    (0..2).for_each(|_| w.write(0, 60 * MIB, &pattern(1, PIECE as usize)));
    write_scattered(&mut w, 0..1, 0);
    w.corrupt(&pattern(0, 4096));
    write_scattered(&mut w, 1..480, 0);
    assert!(w.engine.device_status().moved_blocks > 0);
    let status = w.status(0);
    assert_eq!((status.lost_blocks, status.count.corrupt_blocks), (1, 1));
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    assert!(w.read(0, 4096, 4096) == pattern(0, PIECE as usize)[4096..8192]);
}

#[test]
fn g7_a_clean_block_that_does_not_verify_when_it_is_moved_is_counted_and_fetched_again() {
    let mut w = world(DrainOrder::Unordered);
    let block = pattern(1, 4096);
    w.images[0][..4096].copy_from_slice(&block);
    (0..2).for_each(|_| read_once(&mut w, 0, MIB));
    w.pass(SECOND);
    w.corrupt(&block);
    read_once(&mut w, 8 * MIB, 64 * MIB);
    let status = w.status(0);
    assert_eq!((status.lost_blocks, status.count.corrupt_blocks), (0, 1));
    assert!(w.engine.device_status().moved_blocks > 0);
    assert!(w.read(0, 0, 4096) == block);
}

#[test]
fn copies_that_only_a_group_needs_count_as_moved() {
    let mut w = cut_group(300, nothing_is_in_the_redo);
    assert_eq!(w.engine.device_status().moved_blocks, 0);
    // Of what this fills segments with, nothing has to be moved.
    for i in 0..300 {
        w.write(0, i * PIECE, &pattern(1000 + i, PIECE as usize));
    }
    let moved = w.engine.device_status().moved_blocks;
    assert!((100..10_000).contains(&moved), "{moved} blocks have been moved");
    group_is_whole(&mut w, 300, 0..300, 300);
}

pub fn answered(w: &mut World, sent: impl IntoIterator<Item = (RequestId, Option<Buf>)>) {
    for (id, buf) in sent {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
}

/// Reads until a segment is being emptied, and on until its blocks that are to be kept are being
/// read: these reads are held. Returns up to where it has read.
pub fn hold_what_is_kept(w: &mut World, volume: u16, from: u64) -> u64 {
    let mut at = from;
    loop {
        let (mut sent, before) = (None, w.device_reads);
        while !w.engine.device_status().reclaiming {
            if w.step() {
                continue;
            }
            answered(w, sent.take());
            sent = Some(w.submit(volume, Op::Read, at, PIECE, None));
            at += PIECE;
        }
        while w.device_reads == before {
            assert!(w.step(), "it reads the summary");
        }
        w.hold_device_reads = 0..u64::MAX;
        w.run();
        answered(w, sent);
        if w.engine.device_status().reclaiming {
            return at;
        }
        w.hold_device_reads = 0..0;
    }
}

/// Writes until one has to wait for a segment, lets go of what is held, and has it answered without
/// any other event.
pub fn writes_find_room(w: &mut World, volume: u16, from: u64) -> u64 {
    let mut at = from;
    let data = pattern(1, PIECE as usize);
    loop {
        let (id, buf) = w.request(volume, Op::Write { fua: false }, at, PIECE, Some(&data));
        at += PIECE;
        if w.replies.contains_key(&id) {
            answered(w, [(id, buf)]);
            continue;
        }
        assert_eq!(w.engine.device_status().segments_free, 2);
        w.release_device_reads();
        w.run();
        answered(w, [(id, buf)]);
        return at;
    }
}

#[test]
fn g8_what_was_to_be_kept_goes_when_writes_have_taken_the_room_for_it() {
    let mut w = world(DrainOrder::Unordered);
    (0..2).for_each(|_| read_once(&mut w, 0, 4 * MIB));
    hold_what_is_kept(&mut w, 0, 8 * MIB);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    writes_find_room(&mut w, 0, 128 * MIB);
    assert_eq!(cached(&w, 0, 2 * PIECE), 0);
}

#[test]
fn what_is_wanted_again_is_kept_when_it_has_to_wait_for_a_moment() {
    let volume = spec("a", 256 * MIB, Mode::WriteBack);
    let mut w = World::with_segments(64 * MIB, 1 << 20, &[volume]);
    w.flush(0);
    w.write(0, 128 * MIB, &pattern(1, 4096));
    (0..2).for_each(|_| read_once(&mut w, 0, 4 * MIB));
    hold_what_is_kept(&mut w, 0, 8 * MIB);
    w.hold_device_writes = true;
    // All buffers are in use: misses leave some to writes, which leave one to moves.
    let mut sent = Vec::new();
    for i in 0..12 {
        sent.push(w.request(0, Op::Read, 128 * MIB + i * PIECE, 4096, None));
        w.pass(SECOND / 40);
    }
    for i in 0..4 {
        let data = pattern(i, 4096);
        sent.push(w.request(0, Op::Write { fua: false }, 192 * MIB + i * PIECE, 4096, Some(&data)));
    }
    w.release_device_reads();
    w.run();
    assert!(w.engine.device_status().reclaiming, "the rest of what is kept waits for a buffer");
    w.release_device_writes();
    answered(&mut w, sent);
    let device = w.engine.device_status();
    assert_eq!(
        device.moved_blocks,
        device.reclaims * 128,
        "half of what its segments have room for"
    );
}

#[test]
fn g2_what_is_written_while_the_segment_of_older_copies_is_emptied_stays() {
    let mut w = World::with_segments(64 * MIB, 1 << 20, &[spec("a", 256 * MIB, Mode::WriteBack)]);
    w.flush(0);
    (0..2).for_each(|_| read_once(&mut w, 0, 4 * MIB));
    hold_what_is_kept(&mut w, 0, 8 * MIB);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    // These are what is being read, and what has not been decided on.
    for i in 0..16 {
        w.write(0, i * PIECE, &pattern(i, PIECE as usize));
    }
    w.release_device_reads();
    w.run();
    assert_eq!(w.status(0).dirty_bytes, MIB);
    for _ in 0..2 {
        for i in 0..16 {
            assert!(w.read(0, i * PIECE, PIECE) == pattern(i, PIECE as usize), "piece {i}");
        }
        w.restart(true);
    }
}
