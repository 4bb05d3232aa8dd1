//! The core's promises, each in its simplest form. Disorder and faults are the simulator's
//! business.

use crate::common::*;
use tidepool_engine::api::*;

const KIB: usize = 1024;

#[test]
fn g1_a_read_returns_the_newest_write_wherever_it_is() {
    let mut w = World::new(64 * MIB, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    assert_eq!(w.read(0, 4096, 8192), vec![0x11; 8192], "from the backend");
    w.write(0, 8192, &pattern(1, 16 * KIB));
    assert_eq!(w.read(0, 8192, 16 << 10), pattern(1, 16 * KIB), "from the log");
    w.write(0, 12288, &pattern(2, 4096));
    let mut expected = pattern(1, 16 * KIB);
    expected[4096..8192].copy_from_slice(&pattern(2, 4096));
    assert_eq!(w.read(0, 8192, 16 << 10), expected);
    w.drain(0);
    assert_eq!(w.status(0).dirty_bytes, 0);
    assert_eq!(w.images[0][8192..8192 + 16 * KIB], expected, "drained");
    assert_eq!(w.read(0, 8192, 16 << 10), expected, "from the clean cache");
}

#[test]
fn g1_unaligned_writes_keep_what_is_around_them() {
    let mut w = World::new(64 * MIB, &[spec("a", MIB + 1536, Mode::WriteBack)]);
    w.images[0].fill(0x22);
    let mut model = w.images[0].clone();
    for (i, (offset, len)) in
        [(512, 512), (3584, 1024), (4096, 512), (7680, 9216), (MIB + 512, 1024), (MIB - 512, 2048)]
            .into_iter()
            .enumerate()
    {
        let data = pattern(i as u64 + 1, len);
        w.write(0, offset, &data);
        model[offset as usize..offset as usize + len].copy_from_slice(&data);
        assert_eq!(w.read(0, 0, 64 << 10), model[..64 * KIB]);
    }
    w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 1024, 20 << 10).expect("zeroes");
    model[1024..1024 + 20 * KIB].fill(0);
    assert_eq!(w.read(0, 0, 64 << 10), model[..64 * KIB]);
    assert_eq!(w.read(0, MIB, 1536), model[MIB as usize..]);
    w.drain(0);
    assert!(w.images[0] == model, "the image equals the model");
}

#[test]
fn g1_discarded_blocks_read_as_zero_at_once_and_in_the_image() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x33);
    w.write(0, MIB, &pattern(1, 64 * KIB));
    w.op(0, Op::Discard { fua: false }, 0, 12 * MIB).expect("discard");
    w.write(0, 2 * MIB, &pattern(2, 4096));
    assert_eq!(w.read(0, MIB, 4096), vec![0; 4096]);
    assert_eq!(w.read(0, 2 * MIB, 4096), pattern(2, 4096));
    assert_eq!(w.read(0, 12 * MIB, 4096), vec![0x33; 4096]);
    w.restart(true);
    assert_eq!(w.read(0, MIB, 4096), vec![0; 4096]);
    assert_eq!(w.read(0, 2 * MIB, 4096), pattern(2, 4096));
    w.drain(0);
    assert!(w.images[0][..2 * MIB as usize].iter().all(|&b| b == 0));
    assert_eq!(w.images[0][2 * MIB as usize..2 * MIB as usize + 4096], pattern(2, 4096));
    assert_eq!(w.read(0, 3 * MIB, 4096), vec![0; 4096]);
}

#[test]
fn g2_completed_writes_survive_the_death_of_the_daemon() {
    let mut w = World::new(
        64 * MIB,
        &[spec("a", 32 * MIB, Mode::WriteBack), spec("b", 32 * MIB, Mode::WriteBack)],
    );
    w.flush(0); // From here on writes do not wait for stable media.
    w.backend_stopped = true;
    for round in 0..3u64 {
        for i in 0..200u64 {
            w.write((i % 2) as u16, i * 40960, &pattern(round * 1000 + i, 8192));
        }
        w.restart(true);
        for i in 0..200u64 {
            assert_eq!(
                w.read((i % 2) as u16, i * 40960, 8192),
                pattern(round * 1000 + i, 8192),
                "round {round} write {i}"
            );
        }
    }
    w.backend_stopped = false;
    w.run();
    w.drain(0);
    assert_eq!(w.images[0][0..8192], pattern(2000, 8192));
}

#[test]
fn g2_clean_blocks_stay_warm_over_a_restart_with_proof_and_are_dropped_without() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0] = pattern(5, 16 * MIB as usize);
    for i in 0..64 {
        w.read(0, i * 65536, 65536);
    }
    w.pass(50_000_000);
    let before = w.backend_reads;
    w.restart(true);
    for i in 0..64 {
        assert_eq!(w.read(0, i * 65536, 65536), w.images[0][i as usize * 65536..][..65536]);
    }
    assert_eq!(w.backend_reads, before, "all hits");
    w.write(0, 0, &pattern(6, 4096));
    w.images[0][8192..12288].fill(0x77);
    w.restart(false);
    assert_eq!(w.read(0, 0, 4096), pattern(6, 4096), "dirty data stays");
    assert_eq!(w.read(0, 8192, 4096), vec![0x77; 4096], "clean data is fetched again");
}

#[test]
fn g8_a_cache_smaller_than_the_working_set_reclaims_and_goes_on() {
    let mut w = World::new(64 * MIB, &[spec("a", 192 * MIB, Mode::WriteBack)]);
    w.flush(0);
    for round in 0..3u64 {
        for i in 0..(192 * 16) {
            w.write(0, i * 65536, &pattern(round << 32 | i, 65536));
        }
    }
    for i in (0..192 * 16).step_by(7) {
        assert_eq!(w.read(0, i * 65536, 65536), pattern(2 << 32 | i, 65536), "write {i}");
    }
    assert!(w.engine.device_status().reclaims > 100);
    assert!(w.engine.device_status().checkpoints > 3);
    w.drain(0);
    for i in 0..192 * 16 {
        assert_eq!(w.images[0][i as usize * 65536..][..65536], pattern(2 << 32 | i, 65536));
    }
}

#[test]
fn g8_with_the_backend_stopped_writes_are_absorbed_up_to_the_quota_then_wait_then_complete() {
    let mut a = spec("a", 64 * MIB, Mode::WriteBack);
    a.dirty_bytes_max = 8 * MIB;
    let mut w = World::new(64 * MIB, &[a, spec("b", 64 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let mut waiting = Vec::new();
    let mut absorbed = 0u64;
    for i in 0..200u64 {
        let (id, buf) =
            w.request(0, Op::Write { fua: false }, i * 65536, 65536, Some(&pattern(i, 65536)));
        w.pass(10_000_000);
        match w.replies.remove(&id) {
            Some(result) => {
                result.expect("absorbed");
                w.engine.arena_mut().free(buf.expect("a write's buffer"));
                absorbed += 65536;
            }
            None => waiting.push((id, buf.expect("a write's buffer"))),
        }
    }
    assert_eq!(absorbed, 8 * MIB, "exactly the quota is absorbed");
    assert_eq!(w.read(0, 0, 65536), pattern(0, 65536), "hits go on");
    w.write(1, 0, &pattern(1, 4096)); // The other volume is not disturbed.
    w.backend_stopped = false;
    w.run();
    w.pass(3_000_000_000);
    for (id, buf) in waiting {
        assert_eq!(w.replies.remove(&id), Some(Ok(())), "what waited completes");
        w.engine.arena_mut().free(buf);
    }
    w.drain(0);
    for i in 0..200 {
        assert_eq!(w.images[0][i as usize * 65536..][..65536], pattern(i, 65536));
    }
}

#[test]
fn g5_write_through_that_is_asked_for_again_acknowledges_nothing_ahead_of_the_image() {
    const APART: u64 = 4 * MIB;
    let mut w = World::new(64 * MIB, &[spec("a", 32 * MIB, Mode::WriteThrough)]);
    w.flush(0);
    w.backend_stopped = true;
    let write = Op::Write { fua: false };
    for i in 0..4 {
        w.request(0, write, i * APART, 64 << 10, Some(&pattern(i, 64 << 10)));
    }
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("it is recorded");
    let (last, _) = w.request(0, write, 4 * APART, 4096, Some(&pattern(4, 4096)));
    // Of the five, the image gets the first three.
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= 3 * APART);
    w.backend_stopped = false;
    w.pass(100_000_000);
    assert!(w.images[0][..64 << 10] == pattern(0, 64 << 10), "the image goes on");
    assert_eq!(w.replies.get(&last), None, "it is not in the image");
    w.holds = |_| false;
    w.pass(100_000_000);
    assert_eq!(w.replies.remove(&last), Some(Ok(())));
    assert!(w.images[0][4 * APART as usize..][..4096] == pattern(4, 4096));
}

#[test]
fn modes_write_through_around_and_off_keep_the_image_up_to_date() {
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, mode)]);
        w.images[0].fill(0x44);
        w.read(0, 0, 65536);
        w.pass(50_000_000);
        for i in 0..20u64 {
            let data = pattern(i, 3 * 512);
            w.write(0, i * 2560, &data);
            assert_eq!(
                w.images[0][i as usize * 2560..][..1536],
                data,
                "{mode:?}: acknowledged, so it is in the image"
            );
            assert_eq!(w.read(0, i * 2560, 1536), data);
        }
        w.flush(0);
        w.op(0, Op::Discard { fua: true }, 0, 8192).expect("discard");
        assert_eq!(w.images[0][..8192], vec![0; 8192]);
        let image = w.images[0].clone();
        w.restart(true);
        assert_eq!(w.read(0, 0, 65536), image[..65536], "{mode:?}: nothing stale after a restart");
    }
}

#[test]
fn modes_change_while_running() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let mut model = vec![0; 16 * MIB as usize];
    let order = [
        Mode::WriteThrough,
        Mode::WriteBack,
        Mode::WriteAround,
        Mode::WriteBack,
        Mode::Off,
        Mode::WriteBack,
    ];
    for (round, mode) in order.into_iter().enumerate() {
        for i in 0..50u64 {
            let data = pattern(round as u64 * 100 + i, 4096);
            let at = (i * 7919 % 4000) * 4096;
            w.write(0, at, &data);
            model[at as usize..at as usize + 4096].copy_from_slice(&data);
        }
        w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("mode");
        assert_eq!(w.status(0).mode, mode);
        if mode == Mode::Off {
            assert_eq!(w.status(0).cached_bytes, 0);
        }
    }
    w.drain(0);
    assert!(w.images[0] == model);
}

#[test]
fn volumes_are_removed_verified_and_their_place_is_used_again() {
    let mut w = World::new(
        64 * MIB,
        &[spec("a", 16 * MIB, Mode::WriteBack), spec("b", 16 * MIB, Mode::WriteBack)],
    );
    w.write(0, 0, &pattern(1, 256 * KIB));
    w.write(1, 0, &pattern(2, 4096));
    w.drain(0);
    w.images[0][5000] ^= 1;
    let differs = w.control(|e, now, c| e.remove(now, VolumeId(0), true, c));
    assert_eq!(differs, Err(ControlError::Differs(4096)), "somebody else wrote to the image");
    w.images[0][5000] ^= 1;
    w.write(0, 4096, &pattern(3, 4096));
    w.control(|e, now, c| e.remove(now, VolumeId(0), true, c)).expect("removed");
    assert_eq!(w.images[0][4096..8192], pattern(3, 4096));
    assert_eq!(w.engine.volumes().len(), 1);
    assert_eq!(w.try_read(0, 0, 512), Err(RequestError::Shutdown));
    let control = w.fresh();
    w.engine.add_volume(w.now, spec("c", 8 * MIB, Mode::WriteBack), control).expect("add");
    w.run();
    w.images[0] = vec![0x55; 8 * MIB as usize];
    assert_eq!(w.read(0, 0, 8192), vec![0x55; 8192], "nothing of the old volume shows");
    w.restart(true);
    assert_eq!(w.read(0, 4096, 4096), vec![0x55; 4096]);
    assert_eq!(w.read(1, 0, 4096), pattern(2, 4096));
}

#[test]
fn g7_a_corrupted_block_is_never_served() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 8192));
    w.drain(0);
    w.backend_stopped = true;
    w.write(0, 65536, &pattern(2, 8192));
    corrupt(&mut w, &pattern(1, 8192)[..4096]);
    corrupt(&mut w, &pattern(2, 8192)[..4096]);
    w.backend_stopped = false;
    assert_eq!(w.read(0, 0, 8192), pattern(1, 8192), "a clean block is fetched again");
    assert_eq!(
        w.try_read(0, 65536, 4096),
        Err(RequestError::Io),
        "a dirty block is lost, and says so"
    );
    assert_eq!(w.read(0, 65536 + 4096, 4096), pattern(2, 8192)[4096..], "its neighbour is not");
    assert_eq!(w.status(0).lost_blocks, 1);
    assert_eq!(w.status(0).count.corrupt_blocks, 2);
    w.pass(20_000_000_000);
    w.restart(true);
    assert_eq!(w.try_read(0, 65536, 4096), Err(RequestError::Io), "still after a restart");
    w.write(0, 65536, &pattern(3, 4096));
    assert_eq!(w.read(0, 65536, 4096), pattern(3, 4096), "until it is overwritten");
    w.drain(0);
    assert_eq!(w.images[0][65536..65536 + 4096], pattern(3, 4096));
}

/// Flips a bit in the cached copy of `block`.
fn corrupt(w: &mut World, block: &[u8]) {
    let at = w.device.0.chunks_exact(4096).position(|c| c == block).expect("it is cached");
    w.device.0[at * 4096 + 100] ^= 4;
}

#[test]
fn g2_what_a_backend_loses_with_a_failed_flush_is_drained_again_also_from_objects_half_way() {
    let size = 24 * MIB;
    let mut w = World::new(128 * MIB, &[spec("a", size, Mode::WriteBack)]);
    w.flush(0);
    w.stable = Some(w.images.clone());
    let mut model = vec![0; size as usize];
    // A small object beside large ones: its flush is under way while they are half drained.
    for round in 0..4u64 {
        for object in 0..6u64 {
            let len = if object % 2 == 0 { 4096 } else { 3 << 20 };
            let data = pattern(1 + round * 6 + object, len);
            for (i, part) in data.chunks(256 << 10).enumerate() {
                w.write(0, object * (4 << 20) + ((i as u64) << 18), part);
            }
            model[(object as usize) << 22..][..len].copy_from_slice(&data);
        }
        w.flushes_to_fail = 1 + round as u32 % 2;
        w.drain(0);
        assert_eq!(w.flushes_to_fail, 0, "they have failed");
        assert!(
            w.stable.as_ref().expect("it is kept")[0] == model,
            "round {round}: drained, and not there"
        );
    }
}

#[test]
fn g3_a_client_is_told_when_writes_past_the_cache_are_lost_behind_its_back() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    // A read that misses makes the core flush, so that it can keep what it has read.
    w.flushes_to_fail = 1;
    w.read(0, MIB, 4096);
    w.pass(2_000_000_000);
    assert_eq!(w.flushes_to_fail, 0, "it has failed, and another one has not");
    assert!(!w.status(0).backend_unflushed);
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io));
    w.flush(0);
}

#[test]
fn g3_a_fua_write_covers_what_went_past_the_cache_before_it() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    assert!(w.status(0).backend_unflushed);
    w.holds = |op| *op == BackendOp::Flush;
    let (write, _) = w.submit(0, Op::Write { fua: true }, MIB, 4096, Some(&pattern(2, 4096)));
    w.run();
    assert!(!w.replies.contains_key(&write), "the first write is not on stable media");
    w.write(0, 2 * MIB, &pattern(3, 4096));
    w.holds = |_| false;
    w.run();
    assert_eq!(w.replies.remove(&write), Some(Ok(())));
    assert!(!w.status(0).backend_unflushed);
}

#[test]
fn g1_zeroes_up_to_the_end_of_a_volume_reach_the_image() {
    let mut w = World::new(64 * MIB, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    w.op(0, Op::Discard { fua: false }, 2 * MIB, 6 * MIB).expect("discard");
    w.drain(0);
    assert!(w.images[0][2 << 20..].iter().all(|&byte| byte == 0));
    assert!(!w.status(0).dirty);
}

#[test]
fn zeroes_keep_their_space_beside_others_and_give_it_back_with_their_whole_object() {
    let keeping = Op::WriteZeroes { fua: false, no_hole: true };
    // The object, what else of it is discarded, and whether what was to keep its space still does.
    for (object, from, len, keeps) in [
        (0, 0, MIB, true),
        (0, 3 * MIB, MIB, true),
        (1, 0, MIB, true),
        (1, 2 * MIB, 2 * MIB, true),
        (1, 0, 4 * MIB, false),
        (2, 0, 4 * MIB, false),
    ] {
        let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
        w.images[0].fill(0x11);
        w.backend_stopped = true;
        w.op(0, keeping, object * 4 * MIB + MIB, MIB).expect("zeroes");
        w.op(0, Op::Discard { fua: false }, object * 4 * MIB + from, len).expect("discard");
        w.backend_stopped = false;
        w.drain(0);
        let kept = w.backend_zeroes.iter().any(|&(_, offset, _)| offset <= object * 4 * MIB + MIB);
        assert_eq!(kept, keeps, "object {object}: {len} bytes from {from}");
    }
    // Up to the end of an object, it is none of the next one's business.
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 4 * MIB, 2 * MIB).expect("discard");
    w.op(0, keeping, 3 * MIB, MIB).expect("zeroes");
    w.backend_stopped = false;
    w.drain(0);
    assert_eq!(w.backend_zeroes, [(VolumeId(0), 3 * MIB, MIB)]);
}

#[test]
fn a_drain_after_a_restart_waits_for_what_was_dirty_before() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    w.restart(true);
    let control = w.fresh();
    w.engine.drain(w.now, VolumeId(0), control);
    w.run();
    w.pass(3_000_000_000);
    assert_eq!((w.controls.get(&control), w.status(0).sequence_drained), (None, 0));
    w.backend_stopped = false;
    w.run();
    w.pass(1_000_000_000);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn what_only_takes_something_out_of_the_cache_leaves_nothing_to_drain() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.read(0, 0, 4096);
    w.pass(1_000_000_000);
    w.write(0, 0, &pattern(1, 4096));
    let status = w.status(0);
    assert!(status.sequence > 0 && status.sequence_drained == status.sequence && !status.dirty);
    w.drain(0);
}

#[test]
fn blocks_that_are_logged_together_are_found_each_at_its_place() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let mut model = w.images[0].clone();
    // Backwards, forwards, over the end of an object, up to the end of the volume, and with gaps.
    for (block, n) in [
        (9, 1),
        (8, 1),
        (7, 1),
        (20, 3),
        (23, 2),
        (2046, 5),
        (1020, 1),
        (1021, 8),
        (500, 1),
        (3000, 1),
        (4094, 2),
    ] {
        let data = pattern(block, n * 4096);
        w.submit(0, Op::Write { fua: false }, block * 4096, data.len() as u64, Some(&data));
        model[block as usize * 4096..][..data.len()].copy_from_slice(&data);
    }
    w.run();
    for at in (0..16 * MIB).step_by(256 << 10) {
        assert!(w.read(0, at, 256 << 10) == model[at as usize..][..256 << 10], "{at}");
    }
    w.drain(0);
    assert!(w.images[0] == model);
    for (block, n) in [(3000, 1), (2046, 5), (4094, 2)] {
        let data = pattern(10_000 + block, n * 4096);
        w.write(0, block * 4096, &data);
        model[block as usize * 4096..][..data.len()].copy_from_slice(&data);
        w.drain(0);
        assert!(w.images[0] == model, "block {block} alone");
    }
}

#[test]
fn g3_a_client_is_told_what_was_lost_past_the_cache_in_any_mode_and_nothing_that_the_log_has() {
    // Whether the volume has been attached just now, or written past the cache, and whether it is
    // in write-back when the flush fails.
    let cases = [(true, true), (true, false), (false, true), (false, false)];
    for case in cases {
        let (attached, back) = case;
        let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
        let set = |w: &mut World, mode| {
            w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("the mode");
        };
        if attached {
            set(&mut w, if back { Mode::WriteBack } else { Mode::WriteAround });
            w.reopen();
            w.holds = |op| *op == BackendOp::Flush;
            w.attach(true);
        } else {
            w.flush(0);
            w.write(0, 0, &pattern(1, 4096));
            w.write(0, 8192, &pattern(1, 4096));
        }
        if back {
            set(&mut w, Mode::WriteBack);
            // What is in the log is not lost with a flush of the backend, which its drain asks for.
            w.write(0, MIB, &pattern(2, 4096));
        }
        w.flushes_to_fail = 1;
        w.holds = |_| false;
        // One that misses makes the core flush where nothing else does.
        w.read(0, 2 * MIB, 4096);
        w.pass(5_000_000_000);
        assert_eq!((w.flushes_to_fail, w.status(0).backend_unflushed), (0, false), "{case:?}");
        let told = if !attached || !back { Err(RequestError::Io) } else { Ok(()) };
        assert_eq!(w.op(0, Op::Flush, 0, 0), told, "{case:?}");
        w.flush(0);
    }
}

#[test]
fn a_write_that_the_log_has_is_not_taken_for_lost_when_a_flush_of_the_backend_fails() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.write(0, 0, &pattern(1, 4096));
    w.flush(0);
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("the mode");
    // Nothing has gone past the cache since the last flush of the backend.
    w.flushes_to_fail = 1;
    w.write(0, MIB, &pattern(2, 4096));
    w.drain(0);
    assert_eq!(w.flushes_to_fail, 0);
    w.flush(0);
}

#[test]
fn g3_a_client_is_told_when_the_first_write_of_a_new_volume_past_the_cache_is_lost_and_the_mode_has_changed()
 {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    // The only one that goes past the cache: the volume was added, and not attached, so that it
    // counts as the first of an attachment.
    w.write(0, 0, &pattern(1, 4096));
    w.stable = Some(vec![vec![0; 16 << 20]]);
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    w.flushes_to_fail = 1;
    // One that misses makes the core flush.
    w.read(0, 2 * MIB, 4096);
    w.pass(5_000_000_000);
    assert_eq!((w.flushes_to_fail, w.status(0).backend_unflushed), (0, false));
    assert_eq!(w.images[0][..4096], vec![0; 4096], "it is lost");
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io), "and the client is told");
}
