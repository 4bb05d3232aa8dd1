//! A volume lets go of its backend while it is in use.

use crate::common::{MIB, World, pattern, spec, unflushed};
use tidepool_engine::Attach;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

const WRITE: Op = Op::Write { fua: false };
const V: VolumeId = VolumeId(0);
const S: Nanos = 1_000_000_000;
const KIB: u64 = 1 << 10;
const SIZE: u64 = 16 * MIB;

fn volume(mode: Mode, drain: DrainOrder) -> World {
    let mut w = World::new(64 * MIB, &[VolumeSpec { drain, ..spec("a", SIZE, mode) }]);
    w.flush(0);
    w
}

/// Begins to take the backend away; the number of the operation.
fn detach(w: &mut World) -> u64 {
    let control = w.fresh();
    w.engine.detach(w.now, V, 60 * S, control);
    w.run();
    control
}

/// It ends, and from then on nothing is sent to the backend.
fn end(w: &mut World, control: u64) {
    w.backend_stopped = false;
    w.run();
    w.pass(S);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    w.refuses = |op| panic!("{op:?} although the backend is gone");
    w.pass(10 * S);
    assert_eq!(w.status(0).state, VolumeState::Detached);
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Shutdown));
    w.refuses = |_| None;
}

/// What has come until the volume let go is there when it is attached again, and gets into the
/// image.
fn check(w: &mut World, model: &[u8], keep_clean: bool) {
    w.attach(keep_clean);
    for (at, expected) in model.chunks(256 << 10).enumerate() {
        assert!(w.read(0, (at as u64) << 18, 256 << 10) == expected, "what is read");
    }
    w.drain(0);
    assert!(w.images[0] == model, "what is in the image");
    let status = w.status(0);
    assert_eq!((status.dirty, status.dirty_bytes), (false, 0));
}

/// Steps of a generator of numbers.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn what_a_volume_in_use_holds_when_it_lets_go_is_there_when_it_is_attached_again() {
    for seed in 1..30u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut roll = |n: u64| random(&mut state) % n;
        let mode = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround]
            [roll(5).saturating_sub(2) as usize];
        let drain = if roll(2) == 0 { DrainOrder::Grouped } else { DrainOrder::Unordered };
        let mut w = volume(mode, drain);
        let mut model = vec![0; SIZE as usize];
        for life in 0..2 {
            for step in 0..roll(120) {
                w.backend_stopped &= mode == Mode::WriteBack;
                // The edges of what is not aligned are read from the image.
                let unit = if w.backend_stopped { 4 * KIB } else { KIB };
                let (offset, len) = (roll(SIZE / unit - 16) * unit, (1 + roll(16)) * unit);
                let range = offset as usize..(offset + len) as usize;
                match roll(12) {
                    0 => {
                        w.op(0, Op::WriteZeroes { fua: false, no_hole: false }, offset, len)
                            .expect("zeroes");
                        model[range].fill(0);
                    }
                    1 => w.flush(0),
                    2 => w.pass(roll(S)),
                    3 => w.backend_stopped = !w.backend_stopped,
                    // Many to the same place, so that groups need what others have superseded.
                    4 | 5 if !w.backend_stopped => drop(w.read(0, offset, len)),
                    _ => {
                        let data = pattern(seed << 20 | life << 10 | step, len as usize);
                        w.write(0, offset, &data);
                        model[range].copy_from_slice(&data);
                    }
                }
            }
            let asked = (0..roll(3)).map(|at| {
                let data = pattern(seed + at, 8192);
                let (id, _) = w.request(0, WRITE, at * 8192, 8192, Some(&data));
                model[at as usize * 8192..][..8192].copy_from_slice(&data);
                id
            });
            let asked: Vec<RequestId> = asked.collect();
            let control = detach(&mut w);
            end(&mut w, control);
            for id in asked {
                assert_eq!(w.replies.remove(&id), Some(Ok(())), "it was sent before (seed {seed})");
            }
            match roll(3) {
                0 => w.reopen(),
                1 => w.pass(S),
                _ => {}
            }
            println!("seed {seed}, {mode:?}, {drain:?}, life {life}");
            let keep_clean = roll(2) == 0;
            match life {
                0 => w.attach(keep_clean),
                _ => check(&mut w, &model, keep_clean),
            }
        }
    }
}

#[test]
fn what_is_on_its_way_to_the_backend_is_waited_for_and_stays_dirty() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = volume(Mode::WriteBack, drain);
        let mut model = vec![0; SIZE as usize];
        model[..256 * KIB as usize].copy_from_slice(&pattern(1, 256 * KIB as usize));
        w.write(0, 0, &model[..256 * KIB as usize]);
        w.backend_stopped = true;
        w.pass(3 * S);
        let control = detach(&mut w);
        w.pass(3 * S);
        assert_eq!(w.controls.get(&control), None, "writes are in flight");
        end(&mut w, control);
        assert!(w.status(0).dirty);
        check(&mut w, &model, true);
    }
}

#[test]
fn a_fenced_volume_lets_go_and_begins_as_a_copy() {
    for drain in [DrainOrder::Grouped, DrainOrder::Unordered] {
        let mut w = volume(Mode::WriteBack, drain);
        w.write(0, 0, &pattern(1, 256 * KIB as usize));
        w.backend_stopped = true;
        w.pass(3 * S);
        w.write(0, 0, &pattern(2, 256 * KIB as usize));
        w.engine.fence(V);
        let control = detach(&mut w);
        w.backend_result = Err(IoError::Fenced);
        end(&mut w, control);
        w.backend_result = Ok(());
        let room = w.engine.room_to_begin(Some(V));
        let begin = Begin { generation: 9, size_bytes: SIZE, base: 700, room };
        w.control(|e, _, c| {
            e.begin_replica(V, begin, c);
        })
        .expect("it begins");
        let status = w.status(0);
        assert_eq!(
            (status.state, status.dirty_bytes, w.log().logged),
            (VolumeState::Replica, 0, 700)
        );
        w.control(|e, now, c| e.remove(now, V, false, c)).expect("it is forgotten");
    }
}

#[test]
fn g3_what_went_past_the_cache_is_flushed_before_the_backend_is_let_go_of() {
    let mut w = unflushed();
    let control = detach(&mut w);
    end(&mut w, control);
    assert!(w.stable.as_ref().expect("as it began")[0][..4096] == pattern(1, 4096));
}

#[test]
fn a_caller_who_waits_for_the_drain_is_told_and_nothing_else_is_done_meanwhile() {
    let mut w = volume(Mode::WriteBack, DrainOrder::Grouped);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_stopped = true;
    let drain = w.fresh();
    w.engine.drain(w.now, V, drain);
    w.pass(3 * S);
    let control = detach(&mut w);
    assert_eq!(w.controls.remove(&drain), Some(Err(ControlError::Detached)));
    assert_eq!(w.control(|e, now, c| e.detach(now, V, S, c)), Err(ControlError::Busy));
    assert_eq!(w.control(|e, now, c| e.set_mode(now, V, Mode::Off, c)), Err(ControlError::Busy));
    let attach = Attach::again(&w.engine.volumes()[0].1, true);
    assert!(w.engine.attach(w.now, V, attach, 77).is_err());
    end(&mut w, control);
    assert_eq!(w.control(|e, now, c| e.detach(now, V, S, c)), Err(ControlError::Detached));
    assert_eq!(w.control(|e, now, c| e.detach(now, VolumeId(3), S, c)), Err(ControlError::Gone));
}

#[test]
fn g8_a_volume_whose_backend_does_not_answer_goes_on_after_a_while() {
    let mut w = volume(Mode::WriteBack, DrainOrder::Grouped);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_stopped = true;
    w.pass(3 * S);
    let control = w.fresh();
    w.engine.detach(w.now, V, 2 * S, control);
    w.run();
    w.pass(3 * S);
    assert!(matches!(w.controls.remove(&control), Some(Err(ControlError::Backend(_)))));
    w.write(0, 4096, &pattern(2, 4096));
    w.backend_stopped = false;
    w.drain(0);
    assert!(w.images[0][..4096] == pattern(1, 4096) && w.images[0][4096..8192] == pattern(2, 4096));
}

#[test]
fn g3_a_volume_that_has_lost_writes_past_the_cache_stays_and_the_next_flush_says_so() {
    let mut w = unflushed();
    w.flushes_to_fail = 1;
    let control = detach(&mut w);
    w.pass(S);
    assert!(matches!(w.controls.remove(&control), Some(Err(ControlError::Backend(_)))));
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io));
    let control = detach(&mut w);
    end(&mut w, control);
}

#[test]
fn g4_a_volume_in_sync_lets_go_when_its_copy_has_everything_on_stable_media() {
    let mut w = volume(Mode::WriteBack, DrainOrder::Grouped);
    w.engine.set_pairing(w.now, V, Pairing::Paired);
    let room = Room { bytes: 64 << 20, ranges: 100 };
    let have = |w: &mut World, stable: u64| {
        let logged = w.log().logged;
        w.engine.peer_has(w.now, V, Have { logged, stable, room });
        w.run();
    };
    have(&mut w, 0);
    let (id, _) = w.request(0, WRITE, 0, 8192, Some(&pattern(1, 8192)));
    w.pass(S);
    let control = detach(&mut w);
    w.pass(S);
    assert_eq!(
        (w.replies.get(&id), w.controls.get(&control)),
        (None, None),
        "the peer does not have it"
    );
    have(&mut w, 0);
    w.pass(S);
    assert_eq!(
        (w.replies.remove(&id), w.controls.get(&control)),
        (Some(Ok(())), None),
        "not on stable media"
    );
    let asked = w.to_peer.iter().any(|(op, _)| matches!(op, PeerOp::Stabilise { .. }));
    assert!(asked);
    let logged = w.log().logged;
    have(&mut w, logged);
    end(&mut w, control);
    let mut model = vec![0; SIZE as usize];
    model[..8192].copy_from_slice(&pattern(1, 8192));
    // The host that kept the copy has not heard of it yet.
    w.engine.set_pairing(w.now, V, Pairing::Parting);
    w.engine.fence(V);
    check(&mut w, &model, true);
    w.write(0, 0, &pattern(2, 4096));
}

#[test]
fn a_volume_that_loses_its_peer_while_it_lets_go_goes_on_by_itself() {
    let mut w = volume(Mode::WriteBack, DrainOrder::Grouped);
    w.engine.set_pairing(w.now, V, Pairing::Paired);
    let (id, _) = w.request(0, WRITE, 0, 8192, Some(&pattern(1, 8192)));
    let control = detach(&mut w);
    w.pass(S);
    w.engine.set_pairing(w.now, V, Pairing::Parting);
    w.pass(S);
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Paired)));
    w.engine.set_pairing(w.now, V, Pairing::Alone);
    w.pass(S);
    assert_eq!(w.replies.remove(&id), Some(Ok(())));
    w.write(0, 8192, &pattern(2, 4096));
    w.drain(0);
    assert!(
        w.images[0][..8192] == pattern(1, 8192) && w.images[0][8192..12288] == pattern(2, 4096)
    );
}

#[test]
fn a_volume_with_a_peer_or_on_a_device_that_fails_stays() {
    let mut w = volume(Mode::WriteBack, DrainOrder::Grouped);
    w.engine.set_pairing(w.now, V, Pairing::Filling);
    assert_eq!(w.control(|e, now, c| e.detach(now, V, S, c)), Err(ControlError::Paired));
    w.engine.set_pairing(w.now, V, Pairing::Alone);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_stopped = true;
    w.pass(3 * S);
    let control = detach(&mut w);
    w.device_result = Err(IoError::Errno(5));
    w.engine.set_attachment(w.now, V, vec![1], 99);
    w.pass(S);
    w.backend_stopped = false;
    w.pass(S);
    assert_eq!(w.controls.remove(&control), Some(Err(ControlError::Device)));
    // Requests are refused for a moment only.
    w.write(0, 4096, &pattern(2, 4096));
    w.pass(3 * S);
    assert!(w.images[0][..4096] == pattern(1, 4096) && w.images[0][4096..8192] == pattern(2, 4096));
}
