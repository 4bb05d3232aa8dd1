//! What cannot be done is answered with the reason, and with that alone.

use crate::common::*;
use tidepool_engine::Engine;
use tidepool_engine::api::*;

const BLOCK: u64 = BLOCK_BYTES as u64;
const FENCED: ControlError = ControlError::Backend(IoError::Fenced);

type Operation = fn(&mut Engine, Nanos, u64);

/// Everything that an operator may ask of a volume.
const OPERATIONS: [(&str, Operation); 7] = [
    ("set_mode", |e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c)),
    ("set_dirty_bytes_max", |e, now, c| e.set_dirty_bytes_max(now, VolumeId(0), MIB, c)),
    ("drain", |e, now, c| e.drain(now, VolumeId(0), c)),
    ("remove", |e, now, c| e.remove(now, VolumeId(0), false, c)),
    ("remove and verify", |e, now, c| e.remove(now, VolumeId(0), true, c)),
    ("snapshot", |e, now, c| e.snapshot(now, VolumeId(0), c)),
    ("resize", |e, now, c| e.resize(now, VolumeId(0), 8 * MIB, c)),
];

/// The answer, if it comes at once.
fn at_once(w: &mut World, operation: Operation) -> Option<Result<(), ControlError>> {
    let control = w.fresh();
    operation(&mut w.engine, w.now, control);
    w.run();
    w.controls.remove(&control)
}

fn grouped() -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec("a", 16 * MIB, Mode::WriteBack) }
}

#[test]
fn a_volume_that_is_not_there_is_gone() {
    let mut w = World::new(64 * MIB, &[]);
    for (name, operation) in OPERATIONS {
        assert_eq!(at_once(&mut w, operation), Some(Err(ControlError::Gone)), "{name}");
    }
}

#[test]
fn on_a_volume_that_is_being_drained_to_be_removed_nothing_else_begins() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_stopped = true;
    let removal = w.fresh();
    w.engine.remove(w.now, VolumeId(0), false, removal);
    for (name, operation) in OPERATIONS {
        assert_eq!(at_once(&mut w, operation), Some(Err(ControlError::Busy)), "{name}");
    }
    w.backend_stopped = false;
    w.run();
    w.pass(5_000_000_000);
    assert_eq!(w.controls.remove(&removal), Some(Ok(())));
    assert!(w.images[0][..4096] == pattern(1, 4096));
}

#[test]
fn without_a_backend_only_what_needs_none_is_done() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.write(0, 0, &pattern(1, 4096));
    w.reopen();
    for (name, operation) in OPERATIONS {
        let refused = at_once(&mut w, operation) == Some(Err(ControlError::Detached));
        assert_eq!(
            refused,
            !["set_mode", "set_dirty_bytes_max", "drain"].contains(&name),
            "{name}"
        );
    }
}

#[test]
fn a_dead_cache_device_records_nothing_but_lets_go_of_its_volumes() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, 0, BLOCK, Some(&pattern(1, 4096)));
    w.run();
    assert!(w.engine.device_status().failed);
    for (name, operation) in OPERATIONS {
        if !["drain", "remove", "remove and verify"].contains(&name) {
            assert_eq!(at_once(&mut w, operation), Some(Err(ControlError::Device)), "{name}");
        }
    }
    w.control(OPERATIONS[2].1).expect("drain");
    w.control(OPERATIONS[3].1).expect("remove");
}

#[test]
fn what_a_dead_cache_device_cannot_record_is_not_done() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, 0, BLOCK, Some(&pattern(1, 4096)));
    w.run();
    let before = w.status(0);
    let larger: Operation = |e, now, c| e.resize(now, VolumeId(0), 32 * MIB, c);
    for operation in [OPERATIONS[0].1, OPERATIONS[1].1, OPERATIONS[5].1, larger] {
        assert_eq!(at_once(&mut w, operation), Some(Err(ControlError::Device)));
    }
    let after = w.status(0);
    assert_eq!((after.spec, after.mode, after.state), (before.spec, before.mode, before.state));
    assert_eq!(w.images[0].len() as u64, 16 * MIB);
}

#[test]
fn requests_for_nothing_are_answered_and_do_nothing() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    let before = w.engine.device_status().records;
    let ops = [
        Op::Read,
        Op::Prefetch,
        Op::Write { fua: false },
        Op::Discard { fua: false },
        Op::WriteZeroes { fua: false, no_hole: true },
    ];
    for op in ops {
        for offset in [0, 512, 16 * MIB] {
            let id = w.fresh();
            let request = Request { id, volume: VolumeId(0), op, offset, len: 0, buf: None };
            w.engine.handle(w.now, Event::Request(request));
            w.run();
            assert_eq!(w.replies.remove(&id), Some(Ok(())), "{op:?} at {offset}");
        }
    }
    let status = w.status(0);
    assert_eq!(
        (w.engine.device_status().records, status.dirty, w.backend_reads),
        (before, false, 0)
    );
}

#[test]
#[should_panic(expected = "a buffer covers its blocks")]
fn a_request_whose_buffer_is_too_small_goes_no_further() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    let buf = w.engine.arena_mut().alloc(4096);
    let request = Request { id: 1, volume: VolumeId(0), op: Op::Read, offset: 512, len: 4096, buf };
    w.engine.handle(w.now, Event::Request(request));
}

#[test]
fn a_fenced_volume_says_who_refuses() {
    let mut w = World::new(64 * MIB, &[grouped()]);
    w.write(0, 0, &pattern(1, 4096));
    w.backend_result = Err(IoError::Fenced);
    w.pass(10_000_000_000);
    for (name, operation) in OPERATIONS {
        if !name.starts_with("remove") {
            assert_eq!(at_once(&mut w, operation), Some(Err(FENCED)), "{name}");
        }
    }
    assert_eq!(w.status(0).state, tidepool_engine::status::VolumeState::Fenced);
    assert_eq!(w.try_read(0, 0, BLOCK), Err(RequestError::Io));
    assert_eq!(w.op(0, Op::Flush, 0, 0), Err(RequestError::Io));
}

#[test]
fn a_size_must_be_one_that_can_be_served_and_an_image_that_is_only_read_keeps_its_own() {
    let mut w = World::new(
        64 * MIB,
        &[grouped(), VolumeSpec { read_only: true, name: "b".into(), ..grouped() }],
    );
    for size in [0, 512, 4095, (1 << 50) + BLOCK] {
        let result = w.control(|e, now, c| e.resize(now, VolumeId(0), size, c));
        assert_eq!(result, Err(ControlError::Size(size)));
    }
    let result = w.control(|e, now, c| e.resize(now, VolumeId(1), 8 * MIB, c));
    assert_eq!(result, Err(ControlError::ReadOnly));
    assert_eq!((w.status(0).spec.size_bytes, w.status(1).spec.size_bytes), (16 * MIB, 16 * MIB));
    for size in [8 * MIB, 8 * MIB, 24 * MIB] {
        w.control(|e, now, c| e.resize(now, VolumeId(0), size, c)).expect("resize");
        assert_eq!((w.status(0).spec.size_bytes, w.images[0].len() as u64), (size, size));
    }
}

#[test]
fn between_two_writes_of_an_unordered_drain_there_is_no_snapshot() {
    let unordered = VolumeSpec { drain: DrainOrder::Unordered, ..grouped() };
    let reader = VolumeSpec { read_only: true, name: "b".into(), ..unordered.clone() };
    let mut w = World::new(64 * MIB, &[unordered, reader]);
    let snapshot = |id| move |e: &mut Engine, now, c| e.snapshot(now, VolumeId(id), c);
    assert_eq!(w.control(snapshot(0)), Err(ControlError::Unordered));
    assert_eq!(w.control(snapshot(1)), Ok(()), "nothing of it is drained");
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c)).expect("the mode");
    assert_eq!(w.control(snapshot(0)), Ok(()));
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_largest_that_do_are_not() {
    let reader = VolumeSpec { read_only: true, name: "b".into(), ..grouped() };
    let large = VolumeSpec { name: "c".into(), size_bytes: 4 << 40, ..reader.clone() };
    let mut w = World::new(64 * MIB, &[grouped(), reader]);
    w.images.push(Vec::new());
    let added =
        w.control(|e, now, c| drop(e.add_volume(now, VolumeSpec { read_only: false, ..large }, c)));
    assert_eq!(added, Ok(()));
    let mut send = |volume, op, offset, len| {
        let before = w.status(volume).count.errors;
        let id = w.request(volume, op, offset, len, None).0;
        let result = w.replies.remove(&id);
        assert_eq!(
            w.status(volume).count.errors - before,
            u64::from(matches!(result, Some(Err(_))))
        );
        result
    };
    let discard = Op::Discard { fua: false };
    for (offset, len) in
        [(1, 512), (0, 511), (16 * MIB, 512), (16 * MIB - 512, 1024), (u64::MAX - 511, 512)]
    {
        assert_eq!(
            send(0, discard, offset, len),
            Some(Err(RequestError::Invalid)),
            "{offset} {len}"
        );
    }
    assert_eq!(send(0, discard, 16 * MIB - 512, 512), Some(Ok(())), "up to the end");
    assert_eq!(send(0, discard, 16 * MIB, 0), Some(Ok(())), "nothing, at the end");
    assert_eq!(send(1, discard, 0, BLOCK), Some(Err(RequestError::ReadOnly)));
    assert_eq!(send(1, Op::Flush, 0, 0), Some(Ok(())));
    assert_eq!(send(2, discard, 0, RANGE_BYTES_MAX + 512), Some(Err(RequestError::Invalid)));
    assert_eq!(send(2, discard, 0, RANGE_BYTES_MAX), Some(Ok(())));
}

#[test]
fn g8_changes_that_a_fence_ends_before_they_got_buffers_give_none_back() {
    let mut w = World::new(
        64 << 20,
        &[spec("a", 16 * MIB, Mode::WriteBack), spec("b", 16 * MIB, Mode::WriteBack)],
    );
    w.flush(0);
    w.flush(1);
    w.stopped = vec![VolumeId(0), VolumeId(1)];
    let unaligned = |w: &mut World, volume, n: u64| -> Vec<RequestId> {
        let data = pattern(volume, 512);
        let write = |i| {
            w.submit(volume as u16, Op::Write { fua: false }, i * 8192 + 512, 512, Some(&data)).0
        };
        (0..n).map(write).collect()
    };
    // More than there are buffers for the blocks' old content: most of them wait.
    let fenced = unaligned(&mut w, 0, 400);
    w.run();
    w.backend_result = Err(IoError::Fenced);
    w.stopped = vec![VolumeId(1)];
    w.run();
    assert!(fenced.iter().all(|id| w.replies.remove(id) == Some(Err(RequestError::Io))));
    let served = unaligned(&mut w, 1, 400);
    w.run();
    w.backend_result = Ok(());
    w.stopped = Vec::new();
    w.run();
    assert!(served.iter().all(|id| w.replies.remove(id) == Some(Ok(()))));
    for i in 0..400 {
        assert_eq!(w.read(1, i * 8192 + 512, 512), pattern(1, 512));
    }
}
