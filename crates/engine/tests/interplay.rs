//! Promises that hold when two things happen at once, each with the shortest sequence that tells.

use crate::common::*;
use tidepool_engine::EngineConfig;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

#[test]
fn g8_a_segment_full_of_discards_is_closed_before_its_summary_is_too_long() {
    let mut w = World::with_segments(64 * MIB, MIB as u32, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0); // From here on writes do not wait for stable media.
    w.write(0, 0, &pattern(1, 4096));
    for round in 0..60 {
        let ids: Vec<RequestId> = (0..240)
            .map(|i| {
                let id = w.fresh();
                let request = Request {
                    id,
                    volume: VolumeId(0),
                    op: Op::Discard { fua: false },
                    offset: (1 + i * 2) * 4096,
                    len: 4096,
                    buf: None,
                };
                w.engine.handle(w.now, Event::Request(request));
                id
            })
            .collect();
        w.run();
        w.pass(1_000_000);
        let answered = ids.iter().filter(|id| w.replies.remove(id) == Some(Ok(()))).count();
        assert_eq!(answered, 240, "round {round}");
    }
    for i in 0..8 {
        w.write(0, 8 * MIB + i * 262_144, &pattern(i, 262_144));
    }
    w.restart(true);
    assert_eq!(w.read(0, 0, 8192)[..4096], pattern(1, 4096));
    w.drain(0);
}

#[test]
fn g1_what_the_cache_forgot_does_not_come_back_over_a_direct_write() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c)).expect("mode");
    w.backend_stopped = false;
    w.pass(2_000_000_000);
    assert!(
        w.images[0][..MIB as usize].iter().all(|&b| b == 0),
        "the zeroes are drained and forgotten"
    );
    w.write(0, 0, &pattern(1, 4096));
    w.restart(true); // The newest checkpoint still holds the zeroes.
    assert!(w.read(0, 0, 4096) == pattern(1, 4096), "nothing older comes back");
    w.drain(0);
    assert!(w.images[0][..4096] == pattern(1, 4096), "nor is it drained over the write");
}

#[test]
fn g6_a_fenced_volume_answers_everything_with_an_error_and_the_others_go_on() {
    let mut a = spec("a", 16 * MIB, Mode::WriteBack);
    a.dirty_bytes_max = 64 << 10;
    let mut w = World::new(64 * MIB, &[a, spec("b", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let write = Op::Write { fua: false };
    w.write(0, 0, &pattern(1, 64 << 10));
    let full = w.request(0, write, MIB, 8192, Some(&pattern(2, 8192)));
    let unaligned = w.request(0, write, 5 * MIB + 512, 512, Some(&pattern(3, 512)));
    let blocked = w.request(0, write, 5 * MIB, 4096, Some(&pattern(4, 4096)));
    let miss = w.request(0, Op::Read, 8 * MIB, 4096, None);
    w.backend_stopped = false;
    w.backend_result = Err(IoError::Fenced);
    w.run();
    w.pass(2_000_000_000);
    for (name, (id, buf)) in
        [("full", full), ("unaligned", unaligned), ("blocked", blocked), ("miss", miss)]
    {
        assert_eq!(w.replies.remove(&id), Some(Err(RequestError::Io)), "{name}");
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io));
    let removed = w.control(|e, now, c| e.remove(now, VolumeId(0), false, c));
    assert_eq!(removed, Err(ControlError::Backend(IoError::Fenced)));
    w.backend_result = Ok(());
    w.write(1, 0, &pattern(5, 4096));
    w.drain(1);
    assert!(w.images[1][..4096] == pattern(5, 4096));
}

#[test]
fn volumes_are_removed_and_verified_at_the_same_time() {
    let names = ["a", "b", "c"];
    let specs = names.map(|name| spec(name, 16 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    for v in 0..3 {
        for i in 0..16 {
            w.write(v, i * MIB, &pattern(u64::from(v) * 100 + i, 64 << 10));
        }
        w.drain(v);
    }
    w.images[1][0] ^= 1;
    w.backend_stopped = true;
    let controls = [0, 1, 2].map(|v| {
        let control = w.fresh();
        w.engine.remove(w.now, VolumeId(v), true, control);
        w.run();
        control
    });
    w.backend_stopped = false;
    w.run();
    w.pass(1_000_000_000);
    let results = controls.map(|c| w.controls.remove(&c));
    assert_eq!(results, [Some(Ok(())), Some(Err(ControlError::Differs(0))), Some(Ok(()))]);
}

#[test]
fn g8_stopped_backends_leave_the_others_buffers_to_drain_and_to_write_unaligned() {
    let names: Vec<String> = (0..9).map(|v| format!("v{v}")).collect();
    let specs: Vec<VolumeSpec> =
        names.iter().map(|n| spec(n, 16 * MIB, Mode::WriteThrough)).collect();
    let mut w = World::new(256 * MIB, &specs);
    w.stopped = (0..8).map(VolumeId).collect();
    let write = Op::Write { fua: false };
    for v in 0..8u16 {
        for i in 0..24 {
            w.request(v, write, i * MIB / 2, 64 << 10, Some(&pattern(i, 64 << 10)));
        }
        for i in 0..40 {
            w.request(v, write, 14 * MIB + i * 8192 + 512, 4096, Some(&pattern(i, 4096)));
        }
    }
    w.pass(2_000_000_000);
    for i in 0..16 {
        w.write(8, i * MIB, &pattern(i, 4096)); // Acknowledged when the backend has it.
        w.write(8, i * MIB + 8192 + 512, &pattern(i, 4096));
    }
    assert!(w.images[8][MIB as usize..][..4096] == pattern(1, 4096));
}

#[test]
fn g8_more_zero_ranges_than_a_checkpoint_holds_wait_for_the_drain() {
    let mut w = World::new(64 * MIB, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x66);
    w.flush(0);
    w.backend_stopped = true;
    let before = w.engine.device_status().checkpoints;
    let ids: Vec<RequestId> = (0..8000)
        .map(|i| w.request(0, Op::Discard { fua: false }, i * 8192, 4096, None).0)
        .collect();
    w.pass(5_000_000_000);
    let answered = ids.iter().filter(|id| w.replies.contains_key(id)).count();
    assert!((1000..6000).contains(&answered), "{answered} ranges were admitted");
    assert!(w.engine.device_status().checkpoints < before + 10, "waiting takes no checkpoints");
    w.restart(true);
    let lost = ids.len() - answered; // Those were never acknowledged; the client asks again.
    w.backend_stopped = false;
    for i in (ids.len() - lost) as u64..8000 {
        w.op(0, Op::Discard { fua: false }, i * 8192, 4096).expect("discard");
    }
    w.drain(0);
    assert!(w.images[0].chunks(4096).step_by(2).take(8000).all(|b| b.iter().all(|&b| b == 0)));
    assert!(w.images[0].chunks(4096).skip(1).step_by(2).all(|b| b.iter().all(|&b| b == 0x66)));
}

#[test]
fn g3_a_flush_does_not_overtake_the_backend_flush_of_another() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_stopped = true;
    let (first, _) = w.request(0, Op::Flush, 0, 0, None);
    let (second, _) = w.request(0, Op::Flush, 0, 0, None);
    w.pass(1_000_000_000);
    assert_eq!(
        (w.replies.get(&first), w.replies.get(&second)),
        (None, None),
        "neither is stable yet"
    );
    w.backend_stopped = false;
    w.run();
    assert_eq!((w.replies.get(&first), w.replies.get(&second)), (Some(&Ok(())), Some(&Ok(()))));
}

#[test]
fn g3_a_shutdown_flushes_what_went_past_the_cache_but_waits_for_no_stopped_backend() {
    let specs = ["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteAround));
    let mut w = World::new(64 * MIB, &specs);
    for v in 0..2 {
        w.flush(v); // From here on writes do not wait for stable media.
        w.write(v, 0, &pattern(1, 4096));
        assert!(w.status(v).backend_unflushed);
    }
    let flushes = w.backend_flushes;
    w.stopped = vec![VolumeId(1)];
    let before = w.now;
    w.control(|e, now, c| e.shutdown(now, c)).expect("shutdown");
    assert!(w.now - before >= EngineConfig::small().stop_flush_ns_max, "it was given time");
    assert!(
        w.backend_flushes > flushes && !w.status(0).backend_unflushed,
        "the one that works is flushed"
    );
    assert!(w.status(1).backend_unflushed, "the other one is told");
}

#[test]
fn g3_a_write_past_the_cache_is_not_answered_behind_the_last_flush_of_a_shutdown() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteAround)]);
    w.flush(0);
    w.backend_stopped = true;
    let (write, _) = w.request(0, Op::Write { fua: false }, 0, 4096, Some(&pattern(1, 4096)));
    let control = w.fresh();
    w.engine.shutdown(w.now, control);
    w.pass(1_000_000_000);
    assert_eq!(w.controls.get(&control), None, "it waits for the write and its flush");
    w.backend_stopped = false;
    w.run();
    w.pass(1_000_000_000);
    assert_eq!((w.replies.get(&write), w.controls.get(&control)), (Some(&Ok(())), Some(&Ok(()))));
    assert!(!w.status(0).backend_unflushed);
}

#[test]
fn a_new_attachment_survives_the_death_of_the_daemon_as_soon_as_it_is_confirmed() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![7; 900], c)).expect("attachment");
    let too_long = w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![7; 1025], c));
    assert_eq!(too_long, Err(ControlError::TooLong));
    let gone = w.control(|e, now, c| e.set_attachment(now, VolumeId(3), vec![7; 10], c));
    assert_eq!(gone, Err(ControlError::Gone));
    w.reopen();
    assert_eq!(w.engine.volumes()[0].1.attachment, vec![7; 900]);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![8], c))
        .expect("of a detached volume");
    w.reopen();
    assert_eq!(w.engine.volumes()[0].1.attachment, vec![8]);
}

#[test]
fn g1_a_volume_without_a_backend_is_forgotten_only_when_the_image_has_everything() {
    let specs = ["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    w.stopped = vec![VolumeId(0)];
    w.write(0, 0, &pattern(1, 4096));
    w.read(1, 0, 4096);
    w.pass(20_000_000_000);
    w.reopen();
    for (v, verify) in [(0, true), (0, false), (1, true)] {
        let removed = w.control(|e, now, c| e.remove(now, VolumeId(v), verify, c));
        assert_eq!(removed, Err(ControlError::Detached), "volume {v}, verify {verify}");
    }
    w.control(|e, now, c| e.remove(now, VolumeId(1), false, c)).expect("nothing of it is dirty");
    w.reopen();
    assert_eq!(w.engine.volumes().len(), 1);
    w.stopped.clear();
    w.restart(true);
    assert_eq!(w.read(0, 0, 4096), pattern(1, 4096));
}

/// The write begins so many bytes before the block that is lost.
fn uncovers_nothing_older(before: u64) {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x44);
    w.backend_stopped = true;
    let lost = [before, MIB];
    (0..2).for_each(|i| w.write(0, lost[i], &pattern(i as u64, 4096)));
    (0..2).for_each(|i| drop(w.corrupt(&pattern(i as u64, 4096))));
    lost.into_iter().for_each(|at| assert_eq!(w.try_read(0, at, 4096), Err(RequestError::Io)));
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteAround, c)).expect("mode");
    w.backend_result = Err(IoError::Errno(5));
    w.backend_stopped = false;
    let len = before + 4096;
    let data = |seed| pattern(seed, len as usize);
    let (write, _) = w.request(0, Op::Write { fua: false }, 0, len, Some(&data(8)));
    w.pass(2_000_000_000);
    assert_ne!(w.try_read(0, before, 4096), Ok(vec![0x44; 4096]), "while it is tried");
    w.restart(true);
    assert_ne!(w.try_read(0, before, 4096), Ok(vec![0x44; 4096]), "after a restart");
    assert!(!w.replies.contains_key(&write), "a backend that fails makes the write wait");
    w.backend_result = Ok(());
    w.pass(2_000_000_000);
    w.write(0, 0, &data(9));
    assert_eq!(w.read(0, 0, len), data(9));
    assert_eq!(w.images[0][..len as usize], data(9));
    let direct = w.status(0).count.bypass_mode_blocks;
    w.write(0, 8 * MIB, &pattern(10, 4096));
    assert_eq!(
        w.status(0).count.bypass_mode_blocks,
        direct + 1,
        "what is not lost goes past the cache"
    );
    assert_eq!(w.try_read(0, MIB, 4096), Err(RequestError::Io), "the other one stays lost");
    w.restart(true);
    assert_eq!(w.try_read(0, MIB, 4096), Err(RequestError::Io), "over restarts, too");
}

#[test]
fn g7_a_write_past_the_cache_that_fails_uncovers_nothing_older_under_a_lost_block() {
    [0, 4096, 1 << 16].into_iter().for_each(uncovers_nothing_older);
}

#[test]
fn g8_clean_blocks_among_zeroes_make_room_while_the_backend_is_stopped() {
    let specs = ["a", "b"].map(|name| spec(name, 64 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    (0..2).for_each(|v| w.flush(v));
    for i in 0..240 {
        w.write(0, i * 262_144, &pattern(i, 262_144));
    }
    w.drain(0);
    w.backend_stopped = true;
    for object in 0..15 {
        w.op(0, Op::Discard { fua: false }, object * 4 * MIB, 4096).expect("discard");
    }
    for i in 0..75 {
        w.write(1, i * 262_144, &pattern(1000 + i, 262_144));
    }
    assert!(
        w.engine.device_status().moved_blocks < 30_000,
        "blocks are dropped, not moved in circles"
    );
    w.restart(true);
    for i in 0..75 {
        assert_eq!(w.read(1, i * 262_144, 4096), pattern(1000 + i, 262_144)[..4096]);
    }
    w.backend_stopped = false;
    w.run();
    for object in 0..15 {
        assert_eq!(w.read(0, object * 4 * MIB, 4096), vec![0; 4096]);
        assert_eq!(w.read(0, object * 4 * MIB + 4096, 4096), pattern(object * 16, 8192)[4096..]);
    }
}

#[test]
fn zeroes_that_keep_their_space_are_drained_as_such_also_after_a_restart() {
    let mut w = World::new(64 * MIB, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x33);
    w.backend_stopped = true;
    w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 0, MIB).expect("zeroes");
    w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 4 * MIB, 4 * MIB).expect("zeroes");
    w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 8 * MIB, MIB).expect("zeroes");
    w.op(0, Op::Discard { fua: false }, 8 * MIB, 4 * MIB).expect("discard");
    w.restart(true); // By replay.
    w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 12 * MIB, 4 * MIB).expect("zeroes");
    w.pass(20_000_000_000);
    w.restart(true); // By the checkpoint.
    w.backend_stopped = false;
    w.run();
    w.drain(0);
    w.backend_zeroes.sort_unstable();
    assert_eq!(w.backend_zeroes, [(VolumeId(0), 0, MIB), (VolumeId(0), 12 * MIB, 4 * MIB)]);
    assert!(w.images[0][..MIB as usize].iter().all(|&b| b == 0));
    assert!(w.images[0][4 * MIB as usize..16 * MIB as usize].iter().all(|&b| b == 0));
    w.backend_zeroes.clear();
    w.op(0, Op::Discard { fua: false }, 0, MIB).expect("discard");
    w.drain(0);
    assert!(w.backend_zeroes.is_empty(), "what was asked for once is not asked for again");
}

#[test]
fn g7_a_block_among_zeroes_that_is_not_found_again_does_not_read_as_zero() {
    let specs = ["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    for v in 0..2u16 {
        w.images[usize::from(v)] = pattern(u64::from(v), 16 * MIB as usize);
        w.read(v, 10 * 4096, 4096); // Cached, clean.
        w.pass(100_000_000);
    }
    w.backend_stopped = true;
    w.op(0, Op::Discard { fua: false }, 0, 10 * 4096).expect("discard");
    w.op(0, Op::Discard { fua: false }, 11 * 4096, 10 * 4096).expect("discard");
    w.op(1, Op::Discard { fua: false }, 11 * 4096, 10 * 4096).expect("discard");
    w.pass(20_000_000_000);
    w.restart(true);
    assert_eq!(
        w.read(0, 10 * 4096, 4096),
        w.images[0][40960..][..4096],
        "it stands above the zeroes"
    );
    let image = w.images[0][40960..][..4096].to_vec();
    for at in w.corrupt(&image) {
        // The segment cannot be read at all any more.
        let segment = at / 64 * 64;
        w.device.0[segment * 4096..(segment + 64) * 4096].fill(0);
    }
    w.reopen();
    assert_eq!(w.status(0).state, VolumeState::Failed, "one of the zeroes is none");
    assert_eq!(w.status(1).state, VolumeState::Detached, "a block beside zeroes is fetched again");
    w.backend_stopped = false;
    w.restart(true);
    assert_eq!(w.try_read(0, 10 * 4096, 4096), Err(RequestError::Io));
    assert_eq!(w.read(1, 10 * 4096, 4096), w.images[1][40960..][..4096]);
    assert_eq!(w.read(1, 11 * 4096, 4096), vec![0; 4096]);
}

#[test]
fn g8_kills_in_a_row_use_up_no_segments() {
    let mut w = World::with_segments(64 * MIB, MIB as u32, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let before = w.engine.device_status().segments_free;
    for round in 0..50 {
        w.write(0, round * 8192, &pattern(round, 4096));
        w.restart(true);
    }
    let used = before - w.engine.device_status().segments_free;
    assert!(used < 4, "{used} segments for 50 blocks");
    for i in 0..16 {
        w.write(0, 16 * MIB + i * 262_144, &pattern(100 + i, 262_144));
    }
    w.restart(true);
    for round in 0..50 {
        assert_eq!(w.read(0, round * 8192, 4096), pattern(round, 4096), "round {round}");
    }
    assert_eq!(w.read(0, 16 * MIB, 4096), pattern(100, 262_144)[..4096]);
    w.backend_stopped = false;
    w.run();
    w.drain(0);
}

#[test]
fn g8_quotas_that_add_up_to_more_than_the_cache_are_reduced_in_proportion() {
    let specs = ["a", "b", "c"].map(|name| spec(name, 64 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    let all = w.status(0).dirty_bytes_max * 3;
    for v in 0..2 {
        w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(v), 1 << 40, c)).expect("quota");
    }
    let sum: u64 = (0..3).map(|v| w.status(v).dirty_bytes_max).sum();
    assert!(sum <= all && sum > all - 3 * 4096, "{sum} of {all}");
    assert_eq!(w.status(0).spec.dirty_bytes_max, 1 << 40, "what was asked for is kept");
    (0..3).for_each(|v| w.flush(v));
    w.stopped = vec![VolumeId(0), VolumeId(1)];
    for v in 0..2 {
        let fitting = w.status(v).dirty_bytes_max / 131_072;
        (0..fitting).for_each(|i| w.write(v, i * 131_072, &pattern(i, 131_072)));
        w.request(v, Op::Write { fua: false }, 60 * MIB, 131_072, Some(&pattern(0, 131_072)));
        w.pass(1_000_000_000);
        assert_eq!(w.status(v).state, VolumeState::Full);
    }
    for i in 0..40 {
        w.write(2, i * 131_072, &pattern(i, 131_072));
    }
    w.drain(2);
    for v in 1..3 {
        w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(v), 8192, c)).expect("quota");
    }
    assert!(w.status(0).dirty_bytes_max > all * 9 / 10, "room that others gave up");
}

#[test]
fn g8_a_quota_that_others_have_filled_already_gives_no_room_that_is_not_there() {
    let mut w = World::new(64 * MIB, &["a", "b"].map(|name| spec(name, 64 * MIB, Mode::WriteBack)));
    let all = w.status(0).dirty_bytes_max + w.status(1).dirty_bytes_max;
    let quota = |w: &mut World, v, bytes| {
        w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(v), bytes, c)).expect("quota");
    };
    quota(&mut w, 1, 8192);
    quota(&mut w, 0, 1 << 40);
    (0..2).for_each(|v| w.flush(v));
    w.backend_stopped = true;
    let fitting = w.status(0).dirty_bytes_max / 131_072;
    (0..fitting).for_each(|i| w.write(0, i * 131_072, &pattern(i, 131_072)));
    quota(&mut w, 1, 1 << 40);
    assert!(w.status(1).dirty_bytes_max > all / 3, "it has a share");
    // Until one has to wait.
    let last = (0..fitting).find_map(|i| {
        let write = Op::Write { fua: false };
        let (id, _) = w.submit(1, write, i * 131_072, 131_072, Some(&pattern(i, 131_072)));
        w.pass(1_000_000);
        (!w.replies.contains_key(&id)).then_some(id)
    });
    let last = last.expect("not all of it fits");
    let dirty = w.status(0).dirty_bytes + w.status(1).dirty_bytes;
    assert!(dirty <= all, "{dirty} of {all}");
    w.backend_stopped = false;
    w.run();
    (0..40).for_each(|_| w.pass(1_000_000_000));
    assert_eq!(w.replies.get(&last), Some(&Ok(())), "in the end");
}

#[test]
fn g2_what_was_drained_is_not_dirty_again_after_a_kill() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 65_536));
    w.pass(5_000_000_000);
    assert_eq!(w.status(0).dirty_bytes, 0);
    w.reopen();
    assert_eq!(w.status(0).dirty_bytes, 0);
    w.restart(true);
    let before = w.engine.device_status().checkpoints;
    for i in 0..100 {
        w.write(0, i * 4096, &pattern(i, 4096));
        w.drain(0);
        w.pass(100_000_000);
    }
    let taken = w.engine.device_status().checkpoints - before;
    assert!((2..6).contains(&taken), "{taken} checkpoints in ten seconds of drains");
}

#[test]
fn the_status_tells_what_is_under_way() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 65_536));
    assert_eq!(w.status(0).drain_writes_in_flight, 0, "it may be written again");
    w.pass(2_000_000_000);
    assert_eq!(w.status(0).drain_writes_in_flight, 1);
    w.backend_stopped = false;
    w.run();
    assert_eq!(w.status(0).drain_writes_in_flight, 0);
    w.pass(20_000_000_000);
    assert!(!w.engine.device_status().checkpointing && !w.engine.device_status().reclaiming);
    let control = w.fresh();
    w.engine.set_attachment(w.now, VolumeId(0), vec![1], control);
    let effect = w.engine.next_effect(w.now).expect("a page of the checkpoint");
    assert!(w.engine.device_status().checkpointing);
    let Effect::DeviceWrite { token, .. } = effect else { panic!("{effect:?}") };
    w.engine.handle(w.now, Event::Done { token, result: Err(IoError::Errno(5)) });
    w.run();
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Device)));
    assert!(!w.engine.device_status().checkpointing && w.engine.device_status().failed);
}

#[test]
fn a_removed_volumes_number_is_taken_until_the_removal_is_reported() {
    let names = ["a", "b"];
    let mut w = World::new(64 * MIB, &names.map(|name| spec(name, 16 * MIB, Mode::WriteBack)));
    w.write(0, 0, &pattern(1, 4096));
    w.drain(0);
    let removal = w.fresh();
    w.engine.remove(w.now, VolumeId(0), false, removal);
    w.images.resize(64, vec![0; MIB as usize]);
    let mut steps = 0;
    // Before every single step of the removal another volume comes, as far as there is room.
    while !w.controls.contains_key(&removal) {
        let control = w.fresh();
        let spec = spec(&format!("n{steps}"), MIB, Mode::WriteBack);
        let added = w.engine.add_volume(w.now, spec, control);
        assert_ne!(
            added,
            Ok(VolumeId(0)),
            "the driver still has the removed volume under that number"
        );
        steps += 1;
        assert!(w.step(), "the removal ends");
    }
    w.images[0].fill(0);
    let added = w.control(|e, now, c| {
        let added = e.add_volume(now, spec("last", 16 * MIB, Mode::WriteBack), c);
        assert_eq!(added, Ok(VolumeId(0)), "now it is free");
    });
    assert_eq!(added, Ok(()));
    assert!(w.read(0, 0, 4096).iter().all(|&b| b == 0), "nothing of the old volume is left");
}

#[test]
fn a_status_of_blocks_looks_at_a_bounded_number_of_runs() {
    let mut w =
        World::with_segments(256 * MIB, MIB as u32, &[spec("a", 64 * MIB, Mode::WriteBack)]);
    w.flush(0);
    // In this order no two neighbours stand side by side on the device, though all are alike to a
    // client.
    for i in 0..8192u64 {
        w.write(0, i * 3001 % 8192 * 4096, &pattern(i, 4096));
    }
    w.drain(0);
    let mut extents = Vec::new();
    w.engine.block_status(VolumeId(0), 0, 32 * MIB, 16, &mut extents);
    assert_eq!(extents.len(), 1);
    assert!(extents[0].cached && !extents[0].dirty);
    assert!(extents[0].len <= 4096 * 4096, "{} bytes in one call", extents[0].len);
    // A client that goes on where the answer ends sees everything.
    let mut at = 0;
    while at < 32 * MIB {
        w.engine.block_status(VolumeId(0), at, 32 * MIB - at, 16, &mut extents);
        assert!(!extents.is_empty() && extents.iter().all(|e| e.len > 0));
        at += extents.iter().map(|e| e.len).sum::<u64>();
    }
    assert_eq!(at, 32 * MIB);
}

#[test]
fn many_changes_of_parts_of_one_block_are_made_one_after_the_other_and_others_are_not_forgotten() {
    /// More than are begun when a lock is given back.
    const CHANGES: u64 = 300;
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let mut model = pattern(3, 64 * BLOCK_BYTES);
    w.write(0, 0, &model);
    w.hold_device_reads = 0..u64::MAX;
    let mut change = |w: &mut World, seed: u64, offset: u64, len: u64| {
        let data = pattern(seed, len as usize);
        model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        w.submit(0, Op::Write { fua: false }, offset, len, Some(&data)).0
    };
    // The first one locks several blocks: some of those that wait for it want one of them, others
    // another one, or whole blocks.
    let mut ids = vec![change(&mut w, 1, 512, 8 * 4096)];
    w.run();
    for number in 0..CHANGES {
        let (block, len) = match number % 3 {
            0 => (0, 512),
            1 => (1 + number % 7, 512),
            _ => (1 + number % 7, 4096),
        };
        ids.push(change(&mut w, 10 + number, block * 4096, len));
    }
    w.run();
    assert!(ids.iter().all(|id| !w.replies.contains_key(id)), "they wait for the first one");
    w.release_device_reads();
    w.run();
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(w.replies.get(id), Some(&Ok(())), "change {number}");
    }
    let found = w.read(0, 0, model.len() as u64);
    // Which of several changes at once is the last is not said; each sector is of one of them, and
    // none is of before.
    assert!(found[16 * 4096..] == model[16 * 4096..], "what nobody has changed");
    assert!(found[..512] == model[..512], "those of one sector are made in their order");
}
