//! A second copy at another host (RFC 9): what waits for it, and what it holds.

use crate::common::pair::*;
use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::status::VolumeState;

#[test]
fn g4_a_write_is_acknowledged_when_the_peer_has_it() {
    let mut pair = paired();
    let (id, _) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(7, 1)));
    assert!(!pair.owner.replies.contains_key(&id), "only one has it");
    pair.owner.pass(10_000_000_000);
    assert!(!pair.owner.replies.contains_key(&id), "time does not make a second copy");
    pair.exchange();
    assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
    let mut world = take_over(pair, vec![0; SIZE as usize]);
    assert_eq!(world.read(0, 0, BLOCK), fill(7, 1));
}

#[test]
fn g3_a_flush_is_answered_when_both_have_everything_on_stable_media() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    pair.peer.device_syncs = 0;
    let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
    assert!(!pair.owner.replies.contains_key(&flush), "the peer has not made it stable");
    pair.exchange();
    assert_eq!(pair.owner.replies.remove(&flush), Some(Ok(())));
    assert_eq!(pair.peer.device_syncs, 1);
    assert_eq!(pair.peer.log().stable, pair.owner.log().logged);
    // Nothing has changed since: nobody has to be asked.
    let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
    assert_eq!(pair.owner.replies.remove(&flush), Some(Ok(())));
    assert!(pair.owner.to_peer.is_empty());
}

#[test]
fn g3_a_write_with_fua_is_answered_when_it_is_stable_at_both_without_being_asked_for_twice() {
    let mut pair = paired();
    pair.peer.device_syncs = 0;
    let (id, _) = pair.owner.request(0, Op::Write { fua: true }, 0, BLOCK, Some(&fill(1, 1)));
    assert!(!pair.owner.replies.contains_key(&id));
    let sent: Vec<PeerOp> = pair.owner.to_peer.iter().map(|(op, _)| *op).collect();
    assert!(matches!(sent[..], [PeerOp::Record { durable: true, .. }]), "{sent:?}");
    pair.exchange();
    assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
    assert_eq!(pair.peer.device_syncs, 1);
}

#[test]
fn flushes_that_come_while_the_peer_is_busy_with_one_ask_it_together() {
    let mut pair = paired();
    let mut flushes = Vec::new();
    for n in 0..5 {
        pair.owner.request(0, Op::Write { fua: false }, n * BLOCK, BLOCK, Some(&fill(1, 1)));
        flushes.push(pair.owner.request(0, Op::Flush, 0, 0, None).0);
    }
    let asked = |pair: &Pair| {
        pair.owner.to_peer.iter().filter(|(op, _)| matches!(op, PeerOp::Stabilise { .. })).count()
    };
    assert_eq!(asked(&pair), 1);
    pair.peer.device_syncs = 0;
    pair.exchange();
    assert!(flushes.iter().all(|id| pair.owner.replies.remove(id) == Some(Ok(()))));
    assert!(pair.peer.device_syncs <= 2, "{} syncs", pair.peer.device_syncs);
}

#[test]
fn g5_nothing_goes_to_the_image_that_the_peer_does_not_have_on_stable_media() {
    for drain in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let volume = VolumeSpec { drain, ..spec("a", SIZE, Mode::WriteBack) };
        let mut owner = World::new(64 * MIB, &[volume]);
        owner.flush(0);
        let mut pair = Pair::new(owner);
        pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(9, 1)));
        pair.owner.pass(10_000_000_000);
        assert_eq!(pair.owner.cut(0)[0], 0, "{drain:?}: the peer has nothing");
        // The record arrives, but nobody has asked for stable media yet.
        let (record, bytes) = pair.owner.to_peer.remove(0);
        let PeerOp::Record { sequence, .. } = record else { panic!("{record:?}") };
        pair.peer.send_record(0, &bytes, false);
        pair.owner.engine.peer_has(pair.owner.now, VolumeId(0), have(sequence, sequence - 1));
        pair.owner.pass(10_000_000_000);
        assert_eq!(pair.owner.cut(0)[0], 0, "{drain:?}: a power loss could take it from the peer");
        assert!(pair.owner.log().sent < sequence);
        pair.owner.engine.peer_has(pair.owner.now, VolumeId(0), have(sequence, sequence));
        pair.owner.pass(10_000_000_000);
        assert_eq!(pair.owner.images[0][0], 9, "{drain:?}");
        assert_eq!(
            (pair.owner.log().sent, pair.owner.log().drained),
            (sequence, sequence),
            "{drain:?}"
        );
    }
}

#[test]
fn while_a_copy_is_being_filled_nothing_waits_for_it() {
    let mut owner = World::new(64 * MIB, &[spec("a", SIZE, Mode::WriteBack)]);
    owner.flush(0);
    owner.engine.set_pairing(owner.now, VolumeId(0), Pairing::Filling);
    owner.engine.peer_has(owner.now, VolumeId(0), have(0, 0));
    owner.write(0, 0, &fill(1, 1));
    owner.flush(0);
    owner.pass(10_000_000_000);
    assert_eq!(owner.images[0][0], 1);
    let records =
        owner.to_peer.iter().filter(|(op, _)| matches!(op, PeerOp::Record { .. })).count();
    assert_eq!(records, 1);
}

#[test]
fn g8_when_the_peer_is_gone_what_waited_for_it_goes_on() {
    let mut pair = paired();
    let (write, _) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    let (flush, _) = pair.owner.request(0, Op::Flush, 0, 0, None);
    let (durable, _) =
        pair.owner.request(0, Op::Write { fua: true }, BLOCK, BLOCK, Some(&fill(2, 1)));
    pair.owner.pass(5_000_000_000);
    pair.owner.to_peer.clear();
    pair.owner.engine.set_pairing(pair.owner.now, VolumeId(0), Pairing::Parting);
    pair.owner.run();
    let (late, _) =
        pair.owner.request(0, Op::Write { fua: false }, 2 * BLOCK, BLOCK, Some(&fill(3, 1)));
    pair.owner.pass(5_000_000_000);
    assert!(pair.owner.to_peer.is_empty(), "nobody is there to be sent something");
    assert!([write, flush, durable, late].iter().all(|id| !pair.owner.replies.contains_key(id)));
    assert!(pair.owner.log().stable >= pair.owner.log().logged - 1, "our own log was made stable");
    assert_eq!(pair.owner.images[0][0], 0);
    pair.owner.engine.set_pairing(pair.owner.now, VolumeId(0), Pairing::Alone);
    pair.owner.run();
    for id in [write, flush, durable, late] {
        assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
    }
    pair.owner.pass(10_000_000_000);
    assert_eq!(pair.owner.images[0][0], 1);
}

#[test]
fn g8_a_peer_that_does_not_read_stops_its_volume_and_no_other() {
    let volumes = [spec("a", SIZE, Mode::WriteBack), spec("b", SIZE, Mode::WriteBack)];
    let mut owner = World::new(256 * MIB, &volumes);
    owner.flush(0);
    owner.flush(1);
    owner.engine.set_pairing(owner.now, VolumeId(0), Pairing::Paired);
    owner.engine.peer_has(owner.now, VolumeId(0), have(0, 0));
    for n in 0..128 {
        owner.submit(0, Op::Write { fua: false }, n * 32 * BLOCK, 32 * BLOCK, Some(&fill(1, 32)));
        owner.run();
    }
    let sent: usize = owner.to_peer.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!((7 * MIB..9 * MIB).contains(&(sent as u64)), "{sent} bytes are on their way");
    owner.write(1, 0, &fill(2, 8));
}

#[test]
fn a_replica_logs_what_the_owner_has_logged_and_nothing_else() {
    let mut pair = paired();
    pair.write(0, &fill(1, 40));
    pair.owner.to_peer.clear();
    let (id, _) = pair.owner.request(0, Op::Write { fua: false }, BLOCK, BLOCK, Some(&fill(2, 1)));
    let (_, good) = pair.owner.to_peer.remove(0);
    let refused = |pair: &mut Pair, bytes: &[u8]| {
        let id = pair.peer.send_record(0, bytes, false);
        pair.peer.replies.remove(&id)
    };
    // Damaged in its header, in its data, cut short.
    for at in [9, 40, 60, BLOCK_BYTES + 17] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert_eq!(refused(&mut pair, &bad), Some(Err(RequestError::Invalid)), "byte {at}");
    }
    assert_eq!(refused(&mut pair, &good[..BLOCK_BYTES]), Some(Err(RequestError::Invalid)));
    let before = pair.peer.log();
    assert_eq!(refused(&mut pair, &good), Some(Ok(())));
    assert_eq!(refused(&mut pair, &good), Some(Err(RequestError::Invalid)), "once is enough");
    assert_eq!(pair.peer.log().logged, before.logged + 1);
    pair.owner.engine.peer_has(pair.owner.now, VolumeId(0), have(before.logged + 1, 0));
    pair.owner.run();
    assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
    // One that leaves a gap.
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(3, 1)));
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(4, 1)));
    let (_, second) = pair.owner.to_peer.pop().expect("two are sent");
    assert_eq!(refused(&mut pair, &second), Some(Err(RequestError::Invalid)));
    // A volume that is served takes no records, a replica no requests.
    let id = pair.owner.send_record(0, &second, false);
    assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Invalid)));
    for op in [Op::Read, Op::Write { fua: false }, Op::Prefetch] {
        let (id, _) = pair.peer.request(0, op, 0, BLOCK, None);
        assert_eq!(pair.peer.replies.remove(&id), Some(Err(RequestError::Shutdown)), "{op:?}");
    }
    assert_eq!(pair.peer.status(0).state, VolumeState::Replica);
}

/// Writes, zeroes and discards in every size, and what the volume holds then.
fn much(pair: &mut Pair) -> Vec<u8> {
    let mut model = vec![0; SIZE as usize];
    let mut seed = 88172645463325252u64;
    let mut random = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    for n in 0..400u64 {
        let first = random(SIZE / BLOCK - 64);
        let blocks = 1 + random(64);
        let (offset, len) = (first * BLOCK, blocks * BLOCK);
        let range = offset as usize..(offset + len) as usize;
        let op = match random(10) {
            0 => Op::Discard { fua: false },
            1 => Op::WriteZeroes { fua: false, no_hole: true },
            2 => Op::Write { fua: true },
            _ => Op::Write { fua: false },
        };
        let data = matches!(op, Op::Write { .. }).then(|| fill(n as u8 | 1, blocks));
        model[range].copy_from_slice(data.as_ref().unwrap_or(&fill(0, blocks)));
        pair.op(op, offset, len, data.as_deref()).expect("a change");
        if n % 20 == 0 {
            pair.pass(300_000_000);
            pair.tell_drained();
        }
    }
    model
}

#[test]
fn g4_a_replica_that_takes_over_holds_everything_with_the_image() {
    for drain in [DrainOrder::Unordered, DrainOrder::Grouped] {
        let volume = VolumeSpec { drain, ..spec("a", SIZE, Mode::WriteBack) };
        let mut owner = World::new(64 * MIB, &[volume]);
        owner.flush(0);
        let mut pair = Pair::new(owner);
        let model = much(&mut pair);
        let dirty = pair.peer.status(0).dirty_bytes;
        assert!(dirty < SIZE / 2, "{drain:?}: much of it is in the image: {dirty}");
        assert!(
            pair.owner.status(0).dirty_bytes <= dirty,
            "{drain:?}: what is not in the image is dirty"
        );
        let image = pair.owner.images[0].clone();
        let mut world = take_over(pair, image);
        for at in (0..SIZE).step_by(MIB as usize / 4) {
            assert_eq!(
                world.read(0, at, MIB / 4),
                model[at as usize..][..MIB as usize / 4],
                "{drain:?} {at}"
            );
        }
        // And it drains to the same.
        world.flush(0);
        assert_eq!(
            world.control(|engine, now, control| engine.drain(now, VolumeId(0), control)),
            Ok(())
        );
        assert!(world.images[0] == model, "{drain:?}");
    }
}

#[test]
fn g2_a_replica_is_still_one_after_a_restart_with_all_that_it_had() {
    let mut pair = paired();
    let model = much(&mut pair);
    let (before, log) = (pair.peer.status(0), pair.peer.log());
    pair.peer.reopen();
    let after = pair.peer.status(0);
    assert_eq!(after.state, VolumeState::Replica);
    assert_eq!((after.sequence, after.spec), (before.sequence, before.spec));
    assert_eq!(pair.peer.log().logged, log.logged);
    // It goes on where it was, as soon as its owner has heard of room.
    pair.confirm();
    pair.write(0, &fill(200, 1));
    let image = pair.owner.images[0].clone();
    let mut world = take_over(pair, image);
    assert_eq!(world.read(0, 0, BLOCK), fill(200, 1));
    assert!(world.read(0, MIB, MIB / 4) == model[MIB as usize..][..MIB as usize / 4]);
}

#[test]
fn g3_until_its_own_first_flush_a_client_of_a_replica_that_took_over_waits_for_stable_media() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    pair.op(Op::Flush, 0, 0, None).expect("flush");
    let mut world = take_over(pair, vec![0; SIZE as usize]);
    world.device_syncs = 0;
    world.write(0, 0, &fill(2, 1));
    assert_eq!(world.device_syncs, 1);
    world.flush(0);
    world.device_syncs = 0;
    world.write(0, 0, &fill(3, 1));
    assert_eq!(world.device_syncs, 0);
}

#[test]
fn what_the_owners_image_has_is_clean_in_the_replica_and_stays_for_reads() {
    let mut pair = paired();
    for n in 0..100 {
        pair.write(n * 7 * BLOCK, &fill(n as u8, 3));
    }
    pair.op(Op::Discard { fua: false }, 20 * MIB, MIB, None).expect("discard");
    let held = pair.peer.status(0).cached_bytes;
    assert_eq!(pair.peer.status(0).dirty_bytes, held);
    let half = pair.owner.log().logged - 50;
    pair.peer.engine.replica_drained(VolumeId(0), half);
    let status = pair.peer.status(0);
    assert!(
        status.dirty_bytes > 0 && status.dirty_bytes < held,
        "{} of {held}",
        status.dirty_bytes
    );
    assert!(status.dirty_zero_bytes > 0);
    assert_eq!(status.sequence_drained, half);
    let newest = pair.peer.log().logged;
    pair.peer.engine.replica_drained(VolumeId(0), newest);
    let status = pair.peer.status(0);
    assert_eq!((status.dirty_bytes, status.dirty_zero_bytes, status.dirty), (0, 0, false));
    assert_eq!(status.sequence_drained, newest);
    assert!(status.cached_bytes >= held);
}

#[test]
fn a_replica_that_begins_anew_has_nothing_of_its_first_life_even_after_a_restart() {
    let mut pair = paired();
    let _ = much(&mut pair);
    let spec = pair.peer.status(0).spec;
    let anew = |engine: &mut tidepool_engine::Engine, _: Nanos, control| {
        engine.begin_replica(VolumeId(0), begin(5, SIZE / 2, 1000), control);
    };
    assert_eq!(pair.peer.control(anew), Ok(()));
    for restarted in [false, true] {
        if restarted {
            pair.peer.reopen();
        }
        let status = pair.peer.status(0);
        assert_eq!((status.dirty_bytes, status.dirty_zero_bytes, status.cached_bytes), (0, 0, 0));
        assert_eq!((status.sequence, status.sequence_drained), (1000, 1000));
        assert_eq!((status.spec.generation, status.spec.size_bytes), (5, SIZE / 2));
        assert_eq!(
            (status.spec.name.clone(), status.state),
            (spec.name.clone(), VolumeState::Replica)
        );
    }
    // The first owner is not listened to any more.
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    let id = pair.peer.send_record(0, &bytes, false);
    assert_eq!(pair.peer.replies.remove(&id), Some(Err(RequestError::Invalid)));
}

#[test]
fn an_owner_that_comes_back_while_its_copy_begins_begins_again() {
    let mut pair = paired();
    pair.peer.hold_device_writes = true;
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(1, 1)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    pair.peer.send_record(0, &bytes, false);
    // The record is on its way to the log: nothing begins before it is there.
    let controls = [pair.peer.fresh(), pair.peer.fresh()];
    for (base, control) in (7..).zip(controls) {
        pair.peer.engine.begin_replica(VolumeId(0), begin(2, SIZE, base), control);
        pair.peer.run();
    }
    pair.peer.release_device_writes();
    pair.peer.run();
    assert_eq!(pair.peer.controls[&controls[0]], Err(ControlError::Busy));
    assert_eq!(pair.peer.controls[&controls[1]], Ok(()));
    assert_eq!(pair.peer.log().logged, 8);
}

#[test]
fn g6_a_promise_to_a_later_owner_outlives_a_restart() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    let generation = pair.peer.status(0).spec.generation;
    let promise = |engine: &mut tidepool_engine::Engine, _: Nanos, control| {
        engine.promise(VolumeId(0), generation + 1, control);
    };
    assert_eq!(pair.peer.control(promise), Ok(()));
    pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(2, 1)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    for _ in 0..2 {
        let id = pair.peer.send_record(0, &bytes, false);
        assert_eq!(pair.peer.replies.remove(&id), Some(Err(RequestError::Invalid)));
        pair.peer.reopen();
    }
    // What was there before the promise is there still.
    let mut world = take_over(pair, vec![0; SIZE as usize]);
    assert_eq!(world.read(0, 0, BLOCK), fill(1, 1));
}

#[test]
fn a_replica_can_be_removed_with_what_it_holds() {
    let mut pair = paired();
    pair.write(0, &fill(1, 8));
    let remove = |engine: &mut tidepool_engine::Engine, now: Nanos, control| {
        engine.remove(now, VolumeId(0), false, control);
    };
    assert_eq!(pair.peer.control(remove), Ok(()));
    assert_eq!(pair.peer.engine.volumes(), []);
    assert_eq!(pair.peer.engine.device_status().cached_blocks, 0);
    pair.peer.reopen();
    assert_eq!(pair.peer.engine.volumes(), []);
}

#[test]
fn g4_a_replica_on_a_device_that_fails_confirms_nothing_any_more() {
    let mut pair = paired();
    pair.write(0, &fill(1, 1));
    pair.peer.device_result = Err(IoError::Errno(5));
    let (id, _) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(2, 1)));
    let (_, bytes) = pair.owner.to_peer.remove(0);
    for _ in 0..2 {
        let record = pair.peer.send_record(0, &bytes, false);
        assert_eq!(pair.peer.replies.remove(&record), Some(Err(RequestError::Io)));
    }
    let (flush, _) = pair.peer.request(0, Op::Flush, 0, 0, None);
    assert_eq!(pair.peer.replies.remove(&flush), Some(Err(RequestError::Io)));
    assert!(!pair.owner.replies.contains_key(&id));
}
