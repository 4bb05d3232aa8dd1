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
