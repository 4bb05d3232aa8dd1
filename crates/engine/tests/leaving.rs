//! The end: removals, what they leave behind, and what is refused while something ends.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::{Engine, EngineConfig};

const SECOND: Nanos = 1_000_000_000;
const WRITE: Op = Op::Write { fua: false };

fn remove(w: &mut World, volume: u16, verify: bool) -> u64 {
    let control = w.fresh();
    w.engine.remove(w.now, VolumeId(volume), verify, control);
    w.run();
    control
}

#[test]
fn g3_a_volume_leaves_when_all_that_was_written_is_on_its_backends_stable_media() {
    let mut w = unflushed();
    w.holds = |op| matches!(op, BackendOp::Flush);
    let control = remove(&mut w, 0, false);
    assert_eq!(w.controls.get(&control), None);
    w.holds = |_| false;
    w.pass(SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.stable.as_ref().expect("set")[0][..4096] == pattern(1, 4096));
}

#[test]
fn g3_a_volume_does_not_leave_behind_a_flush_that_has_failed() {
    let mut w = unflushed();
    w.stable = None;
    w.flushes_to_fail = 1;
    let control = remove(&mut w, 0, false);
    assert_eq!(w.controls.get(&control), None);
    w.pass(SECOND);
    assert_eq!((w.controls.remove(&control), w.flushes_to_fail), (Some(Ok(())), 0));
}

#[test]
fn g3_a_shutdown_waits_for_what_the_log_is_being_given() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.hold_device_writes = true;
    let (id, _) = w.request(0, WRITE, 0, 4096, Some(&pattern(1, 4096)));
    w.hold_device_writes = false;
    w.engine.shutdown(w.now, 1);
    w.pass(10 * SECOND);
    assert_eq!((w.replies.get(&id), w.controls.get(&1)), (None, None));
    w.release_device_writes();
    assert_eq!((w.replies.get(&id), w.controls.get(&1)), (Some(&Ok(())), Some(&Ok(()))));
}

#[test]
fn requests_that_come_too_early_or_too_late_are_refused() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 4096));
    w.reopen();
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Shutdown), "it has no backend yet");
    w.attach(true);
    w.backend_stopped = true;
    let control = remove(&mut w, 0, false);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Shutdown), "it is being removed");
    w.restart(true);
    w.controls.remove(&control);
    assert!(w.read(0, 0, 4096) == pattern(1, 4096));
    w.engine.shutdown(w.now, control);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Shutdown), "the daemon stops");
}

#[test]
fn without_a_backend_a_volume_is_not_forgotten_of_which_something_is_lost() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 4096));
    w.corrupt(&pattern(1, 4096));
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    w.pass(20 * SECOND);
    w.control(|e, now, c| e.shutdown(now, c)).expect("shutdown");
    w.reopen();
    assert!(!w.status(0).dirty);
    let control = remove(&mut w, 0, false);
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Detached)));
}

/// Two volumes; of the second, which is clean, 4 MiB are cached.
fn cached() -> World {
    let mut w = World::new(
        64 * MIB,
        &[spec("a", 96 * MIB, Mode::WriteBack), spec("b", 16 * MIB, Mode::WriteBack)],
    );
    for at in (0..4 * MIB).step_by(128 << 10) {
        w.write(1, at, &pattern(at, 128 << 10));
    }
    w.drain(1);
    w
}

#[test]
fn a_comparison_is_at_its_end_when_nothing_of_it_is_on_its_way() {
    let mut w = cached();
    w.holds = |op| matches!(op, BackendOp::Read { offset, .. } if *offset > 0);
    w.images[1][0] ^= 1;
    let control = remove(&mut w, 1, true);
    assert_eq!(w.controls.get(&control), None, "other reads of it are in flight");
    w.holds = |_| false;
    w.run();
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Differs(0))));
    w.images[1][0] ^= 1;
    let control = remove(&mut w, 1, true);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
}

#[test]
fn g8_a_comparison_with_a_stopped_backend_leaves_the_others_buffers_to_drain() {
    let mut w = cached();
    w.stopped.push(VolumeId(1));
    remove(&mut w, 1, true);
    w.write(0, 0, &pattern(1, 4096));
    w.drain(0);
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn g8_a_comparison_with_a_stopped_backend_does_not_keep_the_others_from_making_room() {
    let mut w = cached();
    w.stopped.push(VolumeId(1));
    remove(&mut w, 1, true);
    for at in (0..96 * MIB).step_by(256 << 10) {
        w.write(0, at, &pattern(at, 256 << 10));
    }
}

#[test]
fn g8_a_volume_leaves_while_another_keeps_reclaim_busy() {
    let mut w = cached();
    let data = pattern(1, 256 << 10);
    let mut n = 0;
    let mut load = |w: &mut World| {
        let at = n % 384 * (256 << 10);
        n += 1;
        let (id, buf) = w.submit(0, WRITE, at, 256 << 10, Some(&data));
        (id, buf.expect("a buffer"))
    };
    let mut sent = Vec::new();
    let mut control = None;
    for step in 0..20_000 {
        while sent.len() < 16 {
            sent.push(load(&mut w));
        }
        w.step();
        w.now += 20_000;
        sent.retain(|&(id, buf)| {
            let waits = !w.replies.contains_key(&id);
            if !waits {
                w.engine.arena_mut().free(buf);
            }
            waits
        });
        if step == 5000 {
            control = Some(w.fresh());
            w.engine.remove(w.now, VolumeId(1), false, control.expect("set"));
        }
        if control.is_some_and(|control| w.controls.contains_key(&control)) {
            assert!(w.engine.device_status().reclaims > 20);
            return;
        }
    }
    panic!("it is not removed");
}

#[test]
fn every_block_of_a_long_stretch_is_compared() {
    let mut w = World::with_segments(64 * MIB, 1 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    let config = EngineConfig { append_bytes: 512 << 10, ..EngineConfig::small() };
    w.engine = Engine::open(&mut w.device, config, w.now).expect("open").0;
    w.attach(true);
    // Stretches that are longer than what is read at once, on the device and in the volume.
    let stretches = [0u64, 200];
    for first in stretches {
        w.submit(0, WRITE, first * 4096, 256 << 10, Some(&pattern(first, 256 << 10)));
        w.submit(0, WRITE, (first + 64) * 4096, 36 * 4096, Some(&pattern(first + 1, 36 * 4096)));
    }
    w.run();
    w.drain(0);
    for block in stretches.into_iter().flat_map(|first| first..first + 100) {
        w.images[0][block as usize * 4096] ^= 1;
        let control = remove(&mut w, 0, true);
        assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Differs(block * 4096))));
        w.images[0][block as usize * 4096] ^= 1;
    }
}

/// A volume is given up at every moment of the device: after a crash it is there as it was, or
/// gone; the other volume has everything.
#[test]
fn g1_what_is_given_up_of_a_volume_costs_the_other_one_nothing_whenever_the_device_stops() {
    const BLOCKS: u64 = 64;
    for crash_after in 0..12 {
        let mut w = World::new(
            64 * MIB,
            &[spec("a", 16 * MIB, Mode::WriteBack), spec("b", 16 * MIB, Mode::WriteBack)],
        );
        w.backend_stopped = true;
        let data = |volume: u16, block: u64| pattern(u64::from(volume) << 32 | block, 4096);
        for block in 0..BLOCKS {
            (0..2).for_each(|volume| w.write(volume, block * 4096, &data(volume, block)));
        }
        w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, 8 * MIB, 4 * MIB).expect("zeroes");
        (0..2).for_each(|volume| w.flush(volume));
        let refused = w.control(|e, now, c| e.give_up(now, VolumeId(0), c));
        assert_eq!(refused, Err(ControlError::Attached));
        w.backend_stopped = false;
        w.reopen();
        w.hold_device_writes = true;
        let control = w.fresh();
        w.engine.give_up(w.now, VolumeId(0), control);
        w.pass(SECOND);
        let ended = (0..crash_after).any(|_| !w.release_a_device_write());
        w.pass(SECOND);
        let done = w.controls.remove(&control);
        assert!(done.is_none_or(|done| done == Ok(())), "{done:?}");
        assert!(done.is_some() || !ended, "nothing is left to be written");
        w.hold_device_writes = false;
        w.reopen();
        let there = w.engine.volumes().iter().any(|(_, spec)| spec.name == "a");
        assert!(!there || done.is_none(), "it has come back");
        w.attach(true);
        for volume in if there { 0..2 } else { 1..2 } {
            for block in 0..BLOCKS {
                assert!(
                    w.read(volume, block * 4096, 4096) == data(volume, block),
                    "{volume}: block {block}"
                );
            }
            w.drain(volume);
        }
        if there {
            continue;
        }
        // Its room and its number are free, and the next volume that gets them finds nothing.
        let control = w.fresh();
        let id = w
            .engine
            .add_volume(w.now, spec("c", 16 * MIB, Mode::WriteBack), control)
            .expect("there is room");
        w.run();
        assert_eq!((id, w.controls.remove(&control)), (VolumeId(0), Some(Ok(()))));
    }
}
