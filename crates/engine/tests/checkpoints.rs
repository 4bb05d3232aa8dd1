//! What a checkpoint holds comes back, it is counted when all of it is stable, and ranges wait
//! while there is no room for them in one.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::{CHECKPOINT_MAGIC, Geometry, RECORD_ENTRIES_MAX};
use tidepool_engine::status::VolumeState;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SECOND: Nanos = 1_000_000_000;
const DISCARD: Op = Op::Discard { fua: false };

fn world() -> World {
    let mut w = World::new(
        64 * MIB,
        &[spec("a", 64 * MIB, Mode::WriteBack), spec("b", MIB, Mode::WriteBack)],
    );
    w.images[0].fill(0x66);
    w.flush(0);
    w.flush(1);
    w.backend_stopped = true;
    w
}

/// Begins an operation that is complete when a checkpoint holds it.
fn record(w: &mut World, volume: u16) -> u64 {
    let control = w.fresh();
    w.engine.set_attachment(w.now, VolumeId(volume), vec![1], control);
    control
}

/// Sends discards of single blocks that are no neighbours.
fn discard(w: &mut World, from: u64, n: u64) -> Vec<RequestId> {
    (from..from + n).map(|i| w.submit(0, DISCARD, i * 2 * BLOCK, BLOCK, None).0).collect()
}

fn answered(w: &World, ids: &[RequestId]) -> usize {
    ids.iter().filter(|id| w.replies.contains_key(id)).count()
}

/// Ranges that need not wait. The last record of them may have some more.
fn room() -> usize {
    Geometry::new([9; 16], 64 * MIB, Some(256 << 10)).expect("a size").extents_max() / 2
}

/// Only the newest checkpoint is left of what the cache knew.
fn reopen(w: &mut World) {
    w.reopen();
    w.restart(true);
}

/// Writes a block in each of `n` stretches, which are lost then.
fn lose(w: &mut World, n: u64, stretch: u64) {
    let offset = |i| (i * stretch + stretch / 2) * BLOCK;
    let mut data = pattern(7, BLOCK_BYTES);
    for i in 0..n {
        data[8..16].copy_from_slice(&i.to_le_bytes());
        w.write(0, offset(i), &data);
    }
    let tag = &data[..8];
    w.device
        .0
        .chunks_exact_mut(BLOCK_BYTES)
        .filter(|b| b.starts_with(tag))
        .for_each(|b| b[100] ^= 1);
    for i in 0..n {
        assert_eq!(w.try_read(0, offset(i), BLOCK), Err(RequestError::Io));
    }
}

#[test]
fn every_range_of_a_checkpoint_with_many_comes_back() {
    let mut w = world();
    let ids = discard(&mut w, 0, 1000);
    w.run();
    assert_eq!(answered(&w, &ids), 1000);
    reopen(&mut w);
    for i in 0..1000 {
        let read = w.read(0, i * 2 * BLOCK, BLOCK);
        assert!(read.iter().all(|&byte| byte == 0), "range {i}");
    }
    w.backend_stopped = false;
    w.drain(0);
    let zeroed = |(i, block): (usize, &[u8])| {
        block.iter().all(|&b| b == if i < 2000 && i % 2 == 0 { 0 } else { 0x66 })
    };
    assert!(w.images[0].chunks(BLOCK_BYTES).enumerate().all(zeroed));
}

#[test]
fn a_long_range_with_cached_blocks_in_it_comes_back_as_long_as_it_was() {
    for first in [0, 30] {
        let mut w = world();
        let mut model = w.images[0].clone();
        let end = 3 * 1024 + 10;
        w.op(0, DISCARD, first * BLOCK, (end - first) * BLOCK).expect("discard");
        model[(first * BLOCK) as usize..(end * BLOCK) as usize].fill(0);
        for block in [100, 103, 105, 1500, 3074, end + 3] {
            let data = pattern(block, BLOCK_BYTES);
            w.write(0, block * BLOCK, &data);
            model[(block * BLOCK) as usize..][..BLOCK_BYTES].copy_from_slice(&data);
        }
        reopen(&mut w);
        w.backend_stopped = false;
        for at in (0..24 * MIB).step_by(256 << 10) {
            assert!(
                w.read(0, at, 256 << 10) == model[at as usize..][..256 << 10],
                "{at} of the one from {first}"
            );
        }
        w.drain(0);
        assert!(w.images[0] == model);
    }
}

#[test]
fn ranges_that_come_at_once_wait_as_well_when_a_checkpoint_would_have_no_room() {
    let mut w = world();
    let mut ids = discard(&mut w, 0, 1000);
    w.run();
    ids.extend(discard(&mut w, 1000, 500));
    let recorded = record(&mut w, 0);
    w.run();
    assert_eq!((answered(&w, &ids), w.controls.remove(&recorded)), (1500, Some(Ok(()))));
    ids.extend(discard(&mut w, 1500, 4000));
    w.run();
    w.pass(SECOND);
    assert!((room()..room() + RECORD_ENTRIES_MAX).contains(&answered(&w, &ids)));
    // A checkpoint alone makes no room.
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![2], c)).expect("recorded");
    w.pass(SECOND);
    assert!((room()..room() + RECORD_ENTRIES_MAX).contains(&answered(&w, &ids)));
}

#[test]
fn ranges_that_wait_go_on_as_soon_as_some_are_drained() {
    let mut w = world();
    let ids = discard(&mut w, 0, 3000);
    w.run();
    // Nothing is left that a checkpoint would be taken for.
    w.pass(30 * SECOND);
    let before = answered(&w, &ids);
    assert!((room()..room() + RECORD_ENTRIES_MAX).contains(&before));
    w.backend_stopped = false;
    w.holds = |op| matches!(op, BackendOp::Discard { offset, .. } if *offset >= 8 * MIB);
    w.run();
    w.pass(5 * SECOND);
    assert!(answered(&w, &ids) == 3000);
}

#[test]
fn g8_a_checkpoint_for_which_there_is_too_much_is_taken_when_the_image_has_some_of_it() {
    let mut w = world();
    for i in 0..1900 {
        w.op(0, DISCARD, i * 8 * BLOCK, 7 * BLOCK).expect("discard");
    }
    // Each of them cuts one in two.
    lose(&mut w, 1400, 8);
    let recorded = record(&mut w, 1);
    w.run();
    w.pass(2 * SECOND);
    assert_eq!((w.controls.get(&recorded), w.status(0).lost_blocks), (None, 1400));
    assert_eq!(w.status(0).state, VolumeState::Serving);
    w.backend_stopped = false;
    w.run();
    w.pass(2 * SECOND);
    assert_eq!(w.controls.remove(&recorded), Some(Ok(())));
}

#[test]
fn g8_a_volume_that_has_lost_more_than_a_checkpoint_can_name_fails_and_the_others_go_on() {
    let mut w = world();
    w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(0), 24 * MIB, c)).expect("a quota");
    lose(&mut w, 2 * room() as u64 + 10, 2);
    let recorded = record(&mut w, 1);
    w.run();
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&recorded), Some(Ok(())));
    assert_eq!(
        [0, 1].map(|volume| w.status(volume).state),
        [VolumeState::Failed, VolumeState::Serving]
    );
    assert!(w.status(0).lost_blocks > 2 * room() as u64);
    w.write(1, 0, &pattern(1, BLOCK_BYTES));
    reopen(&mut w);
    assert_eq!(
        [0, 1].map(|volume| w.status(volume).state),
        [VolumeState::Failed, VolumeState::Serving]
    );
    assert!(w.read(1, 0, BLOCK) == pattern(1, BLOCK_BYTES));
}

#[test]
fn a_checkpoint_counts_when_both_copies_of_its_header_are_stable() {
    let mut w = world();
    let recorded = record(&mut w, 0);
    let mut headers = Vec::new();
    let mut go_on = |w: &mut World| {
        while let Some(effect) = w.engine.next_effect(w.now) {
            match effect {
                Effect::DeviceWrite { token, buf, .. } => {
                    if w.engine.arena().bytes(buf).starts_with(&CHECKPOINT_MAGIC) {
                        headers.push(token);
                    } else {
                        w.engine.handle(w.now, Event::Done { token, result: Ok(()) });
                    }
                }
                Effect::DeviceSync { token } => {
                    w.engine.handle(w.now, Event::Done { token, result: Ok(()) })
                }
                Effect::ControlDone { control, result } => drop(w.controls.insert(control, result)),
                other => panic!("{other:?}"),
            }
        }
        headers.clone()
    };
    let headers_sent = go_on(&mut w);
    assert_eq!(headers_sent.len(), 2);
    for (token, expected) in headers_sent.into_iter().zip([None, Some(Ok(()))]) {
        w.engine.handle(w.now, Event::Done { token, result: Ok(()) });
        go_on(&mut w);
        assert_eq!(w.controls.remove(&recorded), expected);
    }
}

#[test]
fn a_checkpoint_of_more_pages_than_fit_into_a_write_is_written_whole() {
    let mut w = World::with_segments(1024 * MIB, 1 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let data = pattern(1, 256 << 10);
    w.write(0, 0, &data);
    let pages = Geometry::new([9; 16], 1024 * MIB, Some(1 << 20)).expect("a size").pages();
    assert!(pages > 500);
    for _ in 0..2 {
        reopen(&mut w);
        assert!(w.read(0, 0, 256 << 10) == data);
        let recorded = record(&mut w, 0);
        w.run();
        assert_eq!(w.controls.remove(&recorded), Some(Ok(())));
        assert!(w.read(0, 0, 256 << 10) == data);
    }
}

#[test]
fn checkpoints_and_their_syncs_are_counted() {
    let mut w = world();
    w.reopen();
    assert_eq!(w.engine.device_status().checkpoints, 1, "that of opening it");
    w.attach(true);
    let before = w.engine.device_status();
    for n in 1..=3 {
        let recorded = record(&mut w, 0);
        w.run();
        assert_eq!(w.controls.remove(&recorded), Some(Ok(())));
        let after = w.engine.device_status();
        assert_eq!((after.checkpoints - before.checkpoints, after.syncs - before.syncs), (n, n));
    }
}

#[test]
fn g2_what_was_drained_is_clean_for_a_checkpoint_where_nothing_else_has_changed() {
    let volume = VolumeSpec { dirty_bytes_max: 40 * MIB, ..spec("a", 64 * MIB, Mode::WriteBack) };
    let mut w = World::new(64 * MIB, &[volume]);
    w.flush(0);
    w.backend_stopped = true;
    for at in (0..32 * MIB).step_by(256 << 10) {
        w.write(0, at, &pattern(at + 1, 256 << 10));
    }
    // Both slots have all of it as dirty. The segments of the first page get nothing more.
    for _ in 0..2 {
        w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("recorded");
    }
    let checkpoints = w.engine.device_status().checkpoints;
    w.backend_stopped = false;
    w.drain(0);
    w.pass(5 * SECOND);
    assert_eq!(w.engine.device_status().checkpoints, checkpoints + 1);
    w.reopen();
    let status = w.status(0);
    assert_eq!((status.dirty_bytes, status.state), (0, VolumeState::Detached));
    w.attach(true);
    let reads = w.backend_reads;
    for at in (0..32 * MIB).step_by(256 << 10) {
        assert!(w.read(0, at, 256 << 10) == pattern(at + 1, 256 << 10), "{at}");
    }
    assert_eq!(w.backend_reads, reads);
}

#[test]
fn g8_a_checkpoint_waits_for_segments_that_are_being_closed_and_not_for_the_next_ones() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.hold_device_writes = true;
    // Writes without end, and a device that is never done with all of them.
    let data = pattern(1, 128 << 10);
    let (mut sent, mut n, mut control) = (Vec::new(), 0, None);
    for step in 0..160 {
        while sent.len() < 12 {
            n += 1;
            sent.push(w.submit(
                0,
                Op::Write { fua: false },
                n % 512 * (128 << 10),
                128 << 10,
                Some(&data),
            ));
        }
        w.run();
        if step == 40 {
            control = Some(record(&mut w, 0));
        }
        w.release_a_device_write();
        sent.retain(|(id, buf)| {
            let done = w.replies.remove(id).is_some();
            buf.iter().filter(|_| done).for_each(|buf| w.engine.arena_mut().free(*buf));
            !done
        });
        if control.is_some_and(|control| w.controls.contains_key(&control)) {
            return;
        }
    }
    panic!("the checkpoint does not come while {n} writes do");
}
