//! Stable media: who waits for it, and that somebody asks for it.

use crate::common::*;
use tidepool_engine::api::*;

const BLOCK: usize = BLOCK_BYTES;

/// Whether a request is answered behind a sync that was begun, or a stable write that was sent,
/// after it.
fn waits_for_stable_media(w: &mut World, op: Op, offset: u64, data: &[u8]) -> bool {
    w.run();
    let before = w.device_syncs;
    let (id, buf) = w.submit(0, op, offset, data.len() as u64, Some(data));
    while !w.replies.contains_key(&id) {
        assert!(w.step(), "nothing more happens, and there is no answer");
    }
    let waited = w.device_syncs > before;
    w.engine.arena_mut().free(buf.expect("a write has a buffer"));
    w.run();
    waited
}

#[test]
fn g3_until_the_first_flush_every_write_waits_for_stable_media_and_afterwards_only_those_that_ask()
{
    let (whole, part) = (pattern(1, BLOCK), pattern(2, 512));
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    // The drain has syncs of its own.
    w.backend_stopped = true;
    let plain = Op::Write { fua: false };
    assert!(waits_for_stable_media(&mut w, plain, 0, &whole), "aligned");
    assert!(waits_for_stable_media(&mut w, plain, 512, &part), "unaligned");
    w.flush(0);
    w.pass(1_000_000_000);
    assert!(!waits_for_stable_media(&mut w, plain, 0, &whole), "aligned, after a flush");
    assert!(!waits_for_stable_media(&mut w, plain, 512, &part), "unaligned, after a flush");
    let fua = Op::Write { fua: true };
    assert!(waits_for_stable_media(&mut w, fua, 0, &whole), "aligned, with FUA");
    assert!(waits_for_stable_media(&mut w, fua, 512, &part), "unaligned, with FUA");
}

#[test]
fn g3_a_flush_is_answered_at_once_while_the_backend_is_stopped() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.flush(0);
    // More than the drain can have in flight: it does not ask for a sync any more.
    for at in (0..8 * MIB).step_by(256 << 10) {
        w.write(0, at, &pattern(at, 256 << 10));
    }
    w.pass(1_000_000_000);
    for round in 0..3 {
        w.write(0, round * MIB, &pattern(100 + round, BLOCK));
        let (id, _) = w.request(0, Op::Flush, 0, 0, None);
        assert_eq!(w.replies.get(&id), Some(&Ok(())), "round {round}");
    }
}

#[test]
fn g3_a_flush_covers_what_is_on_its_way_to_the_device_when_others_wait_as_well() {
    let mut w = World::new(64 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let data = pattern(3, 256 << 10);
    let ids: Vec<RequestId> = (0..16)
        .flat_map(|i| {
            let write =
                w.submit(0, Op::Write { fua: i % 3 == 0 }, i * MIB, 256 << 10, Some(&data)).0;
            [write, w.submit(0, Op::Flush, 0, 0, None).0]
        })
        .collect();
    w.run();
    for id in ids {
        assert_eq!(w.replies.get(&id), Some(&Ok(())));
    }
}

#[test]
fn a_summary_is_not_written_while_records_of_its_segment_are_on_their_way() {
    const SEGMENT: u64 = 256 << 10;
    let mut w =
        World::with_segments(64 * MIB, SEGMENT as u32, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let (mut both, mut first) = (0, None);
    for i in 0..60 {
        w.hold_device_writes = true;
        for part in 0..2 {
            let at = (2 * i + part) * 49_152;
            w.submit(0, Op::Write { fua: false }, at, 49_152, Some(&pattern(at, 49_152)));
            w.run();
        }
        let held = w.held_device_writes();
        let begins = |magic: &'static [u8; 4]| {
            held.iter().filter(move |(_, bytes)| bytes.starts_with(magic))
        };
        first = first.or(begins(b"TPSG").map(|(offset, _)| offset % SEGMENT).next());
        let segment = |offset: u64| {
            (offset - first.expect("a segment begins with the first write")) / SEGMENT
        };
        let records = || begins(b"TPSG").chain(begins(b"TPRC")).map(|(offset, _)| segment(*offset));
        for (summary, _) in begins(b"TPSU") {
            assert!(
                records().all(|s| s != segment(*summary)),
                "{i}: it names what may never be there"
            );
        }
        // The end of one segment and the beginning of the next.
        both += usize::from(records().min() != records().max());
        w.release_device_writes();
    }
    assert!(both > 0, "segments came to their end with something in flight");
}
