//! A cache device that fails: what is answered, what still reaches the image, and what a restart
//! must not believe.

use crate::common::*;
use tidepool_engine::Attach;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

#[test]
fn g8_a_failed_cache_device_leaves_no_request_without_an_answer() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 8192));
    w.backend_stopped = true;
    let write = Op::Write { fua: false };
    let (unaligned, a) = w.request(0, write, MIB + 512, 512, Some(&pattern(2, 512)));
    w.device_result = Err(IoError::Errno(5));
    let (aligned, b) = w.request(0, write, 2 * MIB, 4096, Some(&pattern(3, 4096)));
    let (flush, _) = w.request(0, Op::Flush, 0, 0, None);
    w.backend_stopped = false;
    w.run();
    w.pass(3_000_000_000);
    for (name, id) in [("unaligned", unaligned), ("aligned", aligned), ("flush", flush)] {
        assert_eq!(w.replies.remove(&id), Some(Ok(())), "{name}");
    }
    [a, b].into_iter().flatten().for_each(|buf| w.engine.arena_mut().free(buf));
    w.write(0, 3 * MIB, &pattern(4, 4096));
    w.flush(0);
    assert!(w.images[0][..8192] == pattern(1, 8192), "what was dirty is drained");
    assert!(w.images[0][MIB as usize + 512..][..512] == pattern(2, 512));
    assert!(w.images[0][2 * MIB as usize..][..4096] == pattern(3, 4096));
    assert!(w.images[0][3 * MIB as usize..][..4096] == pattern(4, 4096));
    assert!(w.engine.next_deadline().is_none_or(|at| at > w.now), "the driver can sleep");
    let mode = w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c));
    assert_eq!(mode, Err(ControlError::Device));
    w.control(|e, now, c| e.remove(now, VolumeId(0), true, c)).expect("the image is given back");
}

#[test]
fn what_was_decided_before_a_cache_device_failed_is_not_sent_to_it_any_more() {
    const PIECE: u64 = 128 << 10;
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let write = Op::Write { fua: false };
    let sent: Vec<_> = (0..16)
        .map(|i| w.submit(0, write, i * PIECE, PIECE, Some(&pattern(i, PIECE as usize))))
        .collect();
    let Some(Effect::DeviceWrite { token, .. }) = w.engine.next_effect(w.now) else {
        panic!("writes go to the log first");
    };
    w.device_result = Err(IoError::Errno(5));
    w.engine.handle(w.now, Event::Done { token, result: w.device_result });
    let writes = w.device_writes;
    w.pass(3_000_000_000);
    assert_eq!(w.device_writes, writes);
    for (i, (id, buf)) in (0..).zip(sent) {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        assert!(
            w.images[0][(i * PIECE) as usize..][..PIECE as usize] == pattern(i, PIECE as usize)
        );
        w.engine.arena_mut().free(buf.expect("it has a buffer"));
    }
}

#[test]
fn g8_a_drain_that_waits_for_what_a_failing_cache_device_was_writing_is_answered() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let (write, buf) = w.submit(0, Op::Write { fua: false }, 0, 4096, Some(&pattern(1, 4096)));
    let Some(Effect::DeviceWrite { token, .. }) = w.engine.next_effect(w.now) else {
        panic!("a write goes to the log first");
    };
    let drain = w.fresh();
    w.engine.drain(w.now, VolumeId(0), drain);
    w.device_result = Err(IoError::Errno(5));
    w.engine.handle(w.now, Event::Done { token, result: w.device_result });
    w.pass(3_000_000_000);
    assert_eq!(w.replies.remove(&write), Some(Ok(())));
    assert_eq!(w.controls.remove(&drain), Some(Ok(())));
    assert!(w.images[0][..4096] == pattern(1, 4096), "it went past the cache");
    w.engine.arena_mut().free(buf.expect("it has a buffer"));
}

#[test]
fn g1_a_lost_block_on_a_dead_cache_device_closes_its_volume_and_no_other() {
    let specs = ["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack));
    let mut w = World::new(64 * MIB, &specs);
    for v in 0..2 {
        w.flush(v);
    }
    w.backend_stopped = true;
    for v in 0..2u16 {
        (0..8).for_each(|i| w.write(v, i * MIB, &pattern(u64::from(v) * 100 + i, 4096)));
    }
    w.corrupt(&pattern(3, 4096));
    w.device_result = Err(IoError::Errno(5));
    let write = Op::Write { fua: false };
    let (first, _) = w.request(0, write, 9 * MIB, 4096, Some(&pattern(9, 4096)));
    let (flush, _) = w.request(0, Op::Flush, 0, 0, None);
    let (other, _) = w.request(1, write, 9 * MIB, 4096, Some(&pattern(109, 4096)));
    w.backend_stopped = false;
    w.run();
    w.pass(3_000_000_000);
    assert_eq!(w.replies.remove(&first), Some(Err(RequestError::Io)));
    assert_eq!(w.replies.remove(&flush), Some(Err(RequestError::Io)));
    assert_eq!(w.replies.remove(&other), Some(Ok(())));
    for i in 0..8 {
        assert_eq!(w.try_read(0, i * MIB, 4096), Err(RequestError::Io), "nothing older is served");
        let drained = w.images[0][(i * MIB) as usize..][..4096] == pattern(i, 4096);
        assert_eq!(drained, i != 3, "what verifies is drained");
        assert_eq!(w.read(1, i * MIB, 4096), pattern(100 + i, 4096));
    }
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io));
    assert_eq!(w.status(0).state, VolumeState::Failed);
    assert_eq!(w.disowned, vec![VolumeId(1)], "the image goes on naming the cache that it needs");
    let drained = w.control(|e, now, c| e.drain(now, VolumeId(0), c));
    assert_eq!(drained, Err(ControlError::Lost(1)));
    let removed = w.control(|e, now, c| e.remove(now, VolumeId(0), false, c));
    assert_eq!(removed, Err(ControlError::Lost(1)));
}

#[test]
fn g3_a_flush_on_a_dead_cache_device_waits_until_a_restart_cannot_believe_the_device() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    w.flush(0);
    // The second version is in the log, and nobody knows whether it would be after a restart.
    w.write(0, 0, &pattern(2, 4096));
    w.device_result = Err(IoError::Errno(5));
    let (flush, _) = w.request(0, Op::Flush, 0, 0, None);
    (w.backend_stopped, w.disown_stopped) = (false, true);
    w.pass(3_000_000_000);
    assert_eq!(w.images[0][..4096], pattern(2, 4096), "it is in the image");
    assert_eq!(w.replies.get(&flush), None, "a restart would drain the first version over it");
    w.disown_stopped = false;
    w.pass(3_000_000_000);
    assert_eq!((w.replies.remove(&flush), &w.disowned[..]), (Some(Ok(())), &[VolumeId(0)][..]));
}

#[test]
fn g1_a_block_that_was_lost_before_the_cache_device_died_closes_its_volume_too() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.images[0].fill(0x44);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, 4096));
    w.corrupt(&pattern(1, 4096));
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    w.write(0, MIB, &pattern(2, 4096));
    assert_eq!(w.status(0).state, VolumeState::Serving);
    w.device_result = Err(IoError::Errno(5));
    w.request(0, Op::Write { fua: true }, 2 * MIB, 4096, Some(&pattern(2, 4096)));
    w.backend_stopped = false;
    w.pass(3_000_000_000);
    assert_eq!(w.status(0).state, VolumeState::Failed);
    assert_eq!(w.try_read(0, 0, 4096), Err(RequestError::Io));
    assert!(w.disowned.is_empty());
}

/// A volume with dirty data on a cache that was killed; it has no backend yet.
fn recovered(attach_mode: Mode) -> (World, Attach) {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    for i in 0..8 {
        w.write(0, i * MIB, &pattern(i, 64 << 10));
    }
    w.flush(0);
    w.reopen();
    let attach = Attach { mode: attach_mode, ..Attach::again(&w.engine.volumes()[0].1, true) };
    (w, attach)
}

/// What was dirty reaches the image, and new writes do so past the cache.
fn goes_on_past_a_dead_device(mut w: World) {
    w.backend_stopped = false;
    w.run();
    w.pass(3_000_000_000);
    w.write(0, 8 * MIB, &pattern(100, 4096));
    w.flush(0);
    for i in 0..8 {
        assert!(
            w.images[0][(i * MIB) as usize..][..64 << 10] == pattern(i, 64 << 10),
            "dirty data {i}"
        );
    }
    assert!(w.images[0][8 * MIB as usize..][..4096] == pattern(100, 4096));
    assert_eq!(w.disowned, [VolumeId(0)], "no restart believes the device");
    assert!(w.read(0, MIB, 64 << 10) == pattern(1, 64 << 10));
}

#[test]
fn a_volume_whose_attachment_meets_a_failing_cache_device_is_drained_and_goes_on() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::Off] {
        let (mut w, attach) = recovered(mode);
        w.device_result = Err(IoError::Errno(5));
        let control = w.fresh();
        w.engine
            .attach(w.now, VolumeId(0), attach, control)
            .expect("the device has not failed yet");
        w.run();
        if mode == Mode::Off {
            // Nothing of an attachment in this mode is written before the drain is done.
            w.backend_stopped = false;
            w.run();
            w.pass(3_000_000_000);
        }
        assert_eq!(
            w.controls.remove(&control),
            Some(Ok(())),
            "{mode:?}: it has its backend, which is in use"
        );
        assert!(w.engine.device_status().failed, "{mode:?}");
        goes_on_past_a_dead_device(w);
    }
}

#[test]
fn a_volume_is_attached_to_a_dead_cache_device_to_be_drained() {
    for mode in [Mode::WriteBack, Mode::Off] {
        let (mut w, attach) = recovered(mode);
        w.device_result = Err(IoError::Errno(5));
        let control = w.fresh();
        w.engine.set_dirty_bytes_max(w.now, VolumeId(0), MIB, control);
        w.run();
        assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Device)));
        assert_eq!(
            w.control(|e, now, c| e.attach(now, VolumeId(0), attach, c).expect("attach")),
            Ok(())
        );
        goes_on_past_a_dead_device(w);
    }
}

#[test]
fn a_volume_that_a_failing_cache_device_could_not_record_is_not_there() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.device_result = Err(IoError::Errno(5));
    let added = w.control(|e, now, c| {
        e.add_volume(now, spec("b", 16 * MIB, Mode::WriteBack), c)
            .expect("the device has not failed yet");
    });
    assert_eq!(added, Err(ControlError::Device));
    let left: Vec<String> = w.engine.volumes().into_iter().map(|(_, spec)| spec.name).collect();
    assert_eq!(left, ["a"]);
    w.write(0, 0, &pattern(1, 4096));
    assert!(w.images[0][..4096] == pattern(1, 4096));
}
