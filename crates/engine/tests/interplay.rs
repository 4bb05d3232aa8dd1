//! Promises that hold when two things happen at once, each with the shortest sequence that tells.

mod common;
use common::*;
use tidepool_engine::api::*;

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
    assert!(w.images[0][..MIB as usize].iter().all(|&b| b == 0), "the zeroes are drained and forgotten");
    w.write(0, 0, &pattern(1, 4096));
    w.restart(true); // The newest checkpoint still holds the zeroes.
    assert!(w.read(0, 0, 4096) == pattern(1, 4096), "nothing older comes back");
    w.drain(0);
    assert!(w.images[0][..4096] == pattern(1, 4096), "nor is it drained over the write");
}
