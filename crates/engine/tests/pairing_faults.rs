//! A second copy at another host (RFC 9): parts that fail, room that ends, and requests that take
//! other ways than the log.

use crate::common::pair::*;
use crate::common::*;
use tidepool_engine::Engine;
use tidepool_engine::api::*;

const SECOND: Nanos = 1_000_000_000;
const VOLUME: VolumeId = VolumeId(0);

#[test]
fn g4_the_peer_hears_of_what_goes_past_the_cache_although_the_owner_holds_nothing_of_it() {
    for op in [
        Op::Write { fua: false },
        Op::WriteZeroes { fua: false, no_hole: true },
        Op::Discard { fua: true },
    ] {
        let mut pair = paired();
        pair.write(0, &fill(1, 4));
        pair.pass(5 * SECOND);
        pair.tell_drained();
        assert_eq!(pair.peer.status(0).dirty_bytes, 0);
        // What was drained leaves the owner's cache; the peer keeps it.
        let control = pair.owner.fresh();
        pair.owner.engine.set_mode(pair.owner.now, VOLUME, Mode::Off, control);
        pair.pass(SECOND);
        assert_eq!(pair.owner.controls.remove(&control), Some(Ok(())));
        assert_eq!(
            (pair.owner.status(0).cached_bytes, pair.peer.status(0).cached_bytes),
            (0, 4 * BLOCK)
        );
        let data = matches!(op, Op::Write { .. }).then(|| fill(2, 2));
        pair.op(op, BLOCK, 2 * BLOCK, data.as_deref()).expect("a change");
        let image = pair.owner.images[0].clone();
        let mut world = take_over(pair, image);
        let expected = [fill(1, 1), data.unwrap_or(fill(0, 2)), fill(1, 1)].concat();
        assert!(world.read(0, 0, 4 * BLOCK) == expected, "{op:?}");
    }
}

#[test]
fn the_owner_sends_no_more_than_the_peer_has_told_of() {
    let room = Room { bytes: MIB, ranges: 16 };
    let mut owner = World::new(256 * MIB, &[spec("a", 128 * MIB, Mode::WriteBack)]);
    owner.flush(0);
    owner.engine.set_pairing(owner.now, VOLUME, Pairing::Paired);
    let sent =
        |owner: &World| owner.to_peer.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    assert!(!owner.log().held_up, "nothing waits");
    let (early, _) = owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    assert_eq!(sent(&owner), 0, "no room has been told of");
    assert!(owner.log().held_up);
    let base = owner.log().logged;
    owner.engine.peer_has(owner.now, VOLUME, Have { logged: base, stable: base, room });
    // All at once, so that one append could have many records.
    for n in 0..16 {
        owner.submit(0, Op::Write { fua: false }, n * MIB, 32 * BLOCK, Some(&fill(1, 32)));
    }
    owner.run();
    assert!((MIB * 3 / 4..=MIB).contains(&sent(&owner)), "{} bytes", sent(&owner));
    assert!(owner.log().held_up);
    let newest = owner.log().logged;
    owner.engine.peer_has(owner.now, VOLUME, Have { logged: newest, stable: newest, room });
    owner.run();
    assert_eq!(owner.replies.remove(&early), Some(Ok(())));
    assert!((MIB * 7 / 4..=2 * MIB).contains(&sent(&owner)), "{} bytes", sent(&owner));
}

#[test]
fn the_owner_sends_no_more_zeroes_than_the_peer_has_told_of() {
    let mut owner = World::new(256 * MIB, &[spec("a", 128 * MIB, Mode::WriteBack)]);
    owner.flush(0);
    owner.engine.set_pairing(owner.now, VOLUME, Pairing::Paired);
    let base = owner.log().logged;
    let room = Room { bytes: 8 * MIB, ranges: 16 };
    owner.engine.peer_has(owner.now, VOLUME, Have { logged: base, stable: base, room });
    let discards: Vec<RequestId> = (0..40)
        .map(|n| owner.submit(0, Op::Discard { fua: false }, 2 * n * BLOCK, BLOCK, None).0)
        .collect();
    owner.run();
    let answered =
        |owner: &World| discards.iter().filter(|id| owner.replies.contains_key(id)).count();
    for expected in [16, 32, 40] {
        assert!(answered(&owner) < expected);
        assert_eq!(owner.log().held_up, expected < 40);
        let newest = owner.log().logged;
        owner.engine.peer_has(owner.now, VOLUME, Have { logged: newest, stable: newest, room });
        owner.run();
        assert_eq!(answered(&owner), expected);
    }
}

#[test]
fn what_an_owner_was_told_of_room_is_kept_for_it() {
    let mut pair = paired();
    // Another volume of the peer's takes all that it can.
    let control = pair.peer.fresh();
    pair.peer.images.push(vec![]);
    pair.peer.images.push(vec![0; 128 << 20]);
    let other = VolumeSpec { dirty_bytes_max: 1 << 40, ..spec("b", 128 * MIB, Mode::WriteBack) };
    let now = pair.peer.now;
    let other = pair.peer.engine.add_volume(now, other, control).expect("a second volume").0;
    pair.peer.run();
    pair.peer.flush(other);
    pair.confirm();
    pair.peer.backend_stopped = true;
    let mut at = 0;
    loop {
        let data = fill(9, 64);
        let (id, buf) =
            pair.peer.request(other, Op::Write { fua: false }, at, 64 * BLOCK, Some(&data));
        pair.peer.pass(SECOND);
        if pair.peer.replies.remove(&id).is_none() {
            break;
        }
        pair.peer.engine.arena_mut().free(buf.expect("a write has one"));
        at += 64 * BLOCK;
    }
    assert!(at > 8 * MIB, "{at} bytes");
    let told = pair.peer.engine.replica_room(VOLUME);
    assert!(told.bytes >= 4 * MIB, "{told:?}");
    let mut sent = 0;
    while sent + 17 * BLOCK <= told.bytes {
        // Answered by the peer, whatever else it holds; the pair's owner hears nothing of more
        // room.
        let data = fill(3, 16);
        let (_, buf) =
            pair.owner.request(0, Op::Write { fua: false }, sent, 16 * BLOCK, Some(&data));
        let records = std::mem::take(&mut pair.owner.to_peer);
        for (op, bytes) in records {
            let PeerOp::Record { sequence, .. } = op else { continue };
            let id = pair.peer.send_record(0, &bytes, false);
            assert_eq!(
                pair.peer.replies.remove(&id),
                Some(Ok(())),
                "after {sent} bytes of {told:?}"
            );
            sent += bytes.len() as u64;
            let room = Room { bytes: 8 * MIB, ranges: 0 };
            pair.owner.engine.peer_has(
                pair.owner.now,
                VOLUME,
                Have { logged: sequence, stable: 0, room },
            );
            pair.owner.run();
        }
        pair.owner.engine.arena_mut().free(buf.expect("a write has one"));
    }
    // And beyond it nothing is taken.
    pair.owner.request(0, Op::Write { fua: false }, 0, 32 * BLOCK, Some(&fill(3, 32)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    let id = pair.peer.send_record(0, &bytes, false);
    assert_eq!(pair.peer.replies.remove(&id), Some(Err(RequestError::Invalid)));
}

#[test]
fn a_copy_that_cannot_be_given_the_room_does_not_begin_and_nothing_has_changed() {
    let mut pair = paired();
    pair.write(0, &fill(1, 8));
    let before = pair.peer.status(0);
    let room = Room { bytes: 1 << 40, ranges: 0 };
    let anew = Begin { generation: 9, size_bytes: SIZE, base: 1000, room };
    let begun = pair.peer.control(|engine, _, control| {
        engine.begin_replica(VOLUME, anew, control);
    });
    assert_eq!(begun, Err(ControlError::NoRoom));
    let after = pair.peer.status(0);
    assert_eq!((after.sequence, after.cached_bytes), (before.sequence, before.cached_bytes));
    assert_eq!(after.spec, before.spec);
    let spec = VolumeSpec { name: "b".into(), ..after.spec };
    let refused = pair.peer.engine.add_replica(spec, 0, room, 77);
    assert_eq!(refused, Err(tidepool_engine::AddError::NoRoom));
    pair.write(BLOCK, &fill(2, 1));
}

#[test]
fn g3_a_checkpoint_of_an_earlier_life_says_nothing_of_what_is_stable() {
    let mut pair = paired();
    for n in 0..20 {
        pair.write(n * BLOCK, &fill(1, 1));
    }
    let newest = pair.peer.log().logged;
    pair.peer.hold_device_writes = true;
    let checkpoint = pair.peer.fresh();
    pair.peer.engine.set_attachment(pair.peer.now, VOLUME, vec![1], checkpoint);
    pair.peer.run();
    let generation = pair.peer.status(0).spec.generation;
    let base = newest - 10;
    let room = Room { bytes: MIB, ranges: 0 };
    let anew = Begin { generation, size_bytes: SIZE, base, room };
    let begun = pair.peer.fresh();
    pair.peer.engine.begin_replica(VOLUME, anew, begun);
    pair.peer.run();
    assert!(!pair.peer.controls.contains_key(&checkpoint));
    pair.peer.release_device_writes();
    pair.peer.run();
    assert_eq!(pair.peer.controls.remove(&begun), Some(Ok(())));
    assert_eq!((pair.peer.log().logged, pair.peer.log().stable), (base, base));
}

#[test]
fn g4_on_a_dead_device_nothing_goes_past_the_peer_before_the_two_have_parted() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    pair.pass(5 * SECOND);
    pair.owner.device_result = Err(IoError::Errno(5));
    let (write, _) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(2, 1)));
    let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
    pair.pass(10 * SECOND);
    assert!(pair.owner.log().failed);
    assert!(pair.owner.disowned.is_empty() && pair.owner.images[0][0] == 1);
    assert!(!pair.owner.replies.contains_key(&write));
    // What was completed before it is stable in both logs.
    assert_eq!(pair.owner.replies.remove(&flush), Some(Ok(())));
    let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Parting);
    pair.owner.pass(10 * SECOND);
    assert!(pair.owner.disowned.is_empty() && pair.owner.images[0][0] == 1);
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Alone);
    pair.owner.pass(10 * SECOND);
    assert_eq!(pair.owner.disowned, [VOLUME]);
    assert_eq!(pair.owner.images[0][0], 2);
    assert_eq!(pair.owner.replies.remove(&write), Some(Ok(())));
    assert_eq!(pair.owner.replies.remove(&flush), Some(Ok(())));
}

#[test]
fn a_dead_device_is_drained_as_far_as_the_peer_has_it() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    pair.held = true;
    // In our log, and not at the peer.
    pair.owner.request(0, Op::Write { fua: false }, 4 * MIB, BLOCK, Some(&fill(2, 1)));
    pair.owner.device_result = Err(IoError::Errno(5));
    pair.owner.request(0, Op::Write { fua: true }, 8 * MIB, BLOCK, Some(&fill(3, 1)));
    pair.owner.pass(10 * SECOND);
    assert!(pair.owner.log().failed);
    assert_eq!((pair.owner.images[0][0], pair.owner.images[0][4 << 20]), (0, 0));
    pair.held = false;
    pair.pass(10 * SECOND);
    assert_eq!((pair.owner.images[0][0], pair.owner.images[0][4 << 20]), (1, 2));
}

#[test]
fn g4_nothing_is_acknowledged_while_the_two_part() {
    let mut pair = paired();
    pair.owner.hold_device_writes = true;
    let (id, _) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    pair.exchange();
    assert!(!pair.owner.replies.contains_key(&id), "only the peer has it");
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Parting);
    pair.owner.run();
    pair.owner.release_device_writes();
    pair.owner.run();
    assert!(
        !pair.owner.replies.contains_key(&id),
        "it may not be stable when the record says that there is one log"
    );
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Alone);
    pair.owner.run();
    assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
}

#[test]
fn g6_a_fenced_owner_answers_what_waited_for_the_peer_and_sends_nothing_more_to_the_image() {
    for drain in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let volume = VolumeSpec { drain, ..spec("a", SIZE, Mode::WriteBack) };
        let mut owner = World::new(64 * MIB, &[volume]);
        owner.flush(0);
        let mut pair = Pair::new(owner);
        let free = pair.owner.engine.arena().free_bytes();
        let (write, a) =
            pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
        let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
        pair.owner.pass(5 * SECOND);
        assert!(!pair.owner.replies.contains_key(&write));
        pair.owner.hold_device_writes = true;
        let (late, b) =
            pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(2, 1)));
        pair.owner.engine.fence(VOLUME);
        pair.owner.run();
        pair.owner.release_device_writes();
        pair.exchange();
        pair.owner.pass(5 * SECOND);
        for id in [write, flush, late] {
            assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Io)), "{drain:?}");
        }
        assert_eq!(pair.owner.cut(0)[0], 0, "{drain:?}: the peer may have the image now");
        [a, b].into_iter().flatten().for_each(|buf| pair.owner.engine.arena_mut().free(buf));
        assert_eq!(pair.owner.engine.arena().free_bytes(), free);
    }
}

#[test]
fn a_volume_with_a_second_copy_changes_neither_its_size_nor_its_cache() {
    let mut pair = paired();
    let resized =
        pair.owner.control(|engine, now, control| engine.resize(now, VOLUME, 2 * SIZE, control));
    assert_eq!(resized, Err(ControlError::Paired));
    let removed =
        pair.owner.control(|engine, now, control| engine.remove(now, VOLUME, false, control));
    assert_eq!(removed, Err(ControlError::Paired));
    pair.write(0, &fill(1, 1));
}

#[test]
fn records_that_were_refused_can_be_sent_again() {
    let mut pair = paired();
    pair.held = true;
    for n in 0..12 {
        pair.owner.request(0, Op::Write { fua: false }, n * BLOCK, BLOCK, Some(&fill(n as u8, 1)));
    }
    let records = std::mem::take(&mut pair.owner.to_peer);
    pair.peer.hold_device_writes = true;
    let ids: Vec<RequestId> =
        records.iter().map(|(_, bytes)| pair.peer.send_record(0, bytes, false)).collect();
    let generation = pair.peer.status(0).spec.generation;
    let promise =
        |engine: &mut Engine, _: Nanos, control| engine.promise(VOLUME, generation, control);
    let control = pair.peer.fresh();
    promise(&mut pair.peer.engine, 0, control);
    pair.peer.run();
    pair.peer.release_device_writes();
    pair.peer.run();
    let refused = |pair: &Pair| {
        ids.iter()
            .position(|id| pair.peer.replies[id] == Err(RequestError::Shutdown))
            .expect("some waited")
    };
    let first = refused(&pair);
    assert!(first > 0, "and some did not");
    for (_, bytes) in &records[first..] {
        let id = pair.peer.send_record(0, bytes, false);
        assert_eq!(pair.peer.replies.remove(&id), Some(Ok(())));
    }
    assert_eq!(pair.peer.log().logged, pair.owner.log().logged);
}

#[test]
fn a_record_that_is_more_than_a_buffer_is_refused() {
    let mut pair = paired();
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    for (offset, len) in [(BLOCK, 0), (0, BLOCK), (u64::MAX, 0), (0, u64::MAX)] {
        let engine = &mut pair.peer.engine;
        let buf = engine.arena_mut().alloc(bytes.len()).expect("room");
        engine.arena_mut().bytes_mut(buf).copy_from_slice(&bytes);
        let op = Op::Record { durable: false };
        let request = Request { id: 1 << 40, volume: VOLUME, op, offset, len, buf: Some(buf) };
        engine.handle(pair.peer.now, Event::Request(request));
        pair.peer.run();
        assert_eq!(
            pair.peer.replies.remove(&(1 << 40)),
            Some(Err(RequestError::Invalid)),
            "{offset} {len}"
        );
        pair.peer.engine.arena_mut().free(buf);
    }
}

#[test]
fn idle_copies_leave_zeroes_and_room_to_the_other_volumes() {
    let mut w = World::new(256 * MIB, &[spec("served", 16 * MIB, Mode::WriteBack)]);
    w.flush(0);
    let mut copies = 0;
    loop {
        let room = w.engine.room_to_begin(None);
        if room.ranges < 4 || room.bytes < MIB || copies == 40 {
            break;
        }
        let spec = spec(&format!("copy-{copies}"), 16 * MIB, Mode::WriteBack);
        let added = w.control(|engine, _, control| {
            engine.add_replica(spec, 0, room, control).expect("it was offered");
        });
        assert_eq!(added, Ok(()));
        copies += 1;
        for id in 1..=copies {
            w.engine.replica_room(VolumeId(id));
        }
    }
    assert!(copies > 3, "{copies} copies");
    for n in 0..200 {
        w.op(0, Op::Discard { fua: false }, 2 * n * BLOCK, BLOCK).expect("a discard");
    }
    w.write(0, 0, &fill(1, 64));
    // What they were told is others' again when they go.
    for id in 1..=copies {
        w.engine.withdraw_room(VolumeId(id));
    }
    assert_eq!(w.engine.room_to_begin(None).bytes, w.engine.room_to_begin(Some(VolumeId(1))).bytes);
}

#[test]
fn g4_a_change_that_waits_for_the_backends_flush_is_not_acknowledged_while_the_two_part() {
    let mut pair = paired();
    let set_mode = |pair: &mut Pair, mode| {
        let control = pair.owner.fresh();
        pair.owner.engine.set_mode(pair.owner.now, VOLUME, mode, control);
        pair.pass(SECOND);
        assert_eq!(pair.owner.controls.remove(&control), Some(Ok(())));
    };
    set_mode(&mut pair, Mode::WriteAround);
    pair.owner.holds = |op| *op == BackendOp::Flush;
    pair.write(0, &fill(1, 1));
    set_mode(&mut pair, Mode::WriteBack);
    let (id, _) = pair.owner.request(0, Op::Write { fua: true }, BLOCK, BLOCK, Some(&fill(2, 1)));
    pair.pass(SECOND);
    assert!(!pair.owner.replies.contains_key(&id), "what went past the cache is not flushed");
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Parting);
    let before = pair.owner.log().acknowledged;
    pair.owner.holds = |_| false;
    pair.owner.pass(SECOND);
    assert!(!pair.owner.replies.contains_key(&id));
    assert_eq!(pair.owner.log().acknowledged, before);
    pair.owner.engine.set_pairing(pair.owner.now, VOLUME, Pairing::Alone);
    pair.owner.pass(SECOND);
    assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
}
