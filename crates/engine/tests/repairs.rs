//! Dirty blocks that go bad on the owner's device and come back from its peer (RFC 9).

use crate::common::pair::*;
use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::crc32c;

const SECOND: Nanos = 1_000_000_000;

/// A pair whose image takes nothing, so that what is written stays dirty, with eight blocks of
/// which all are different.
fn dirty() -> (Pair, Vec<u8>) {
    let mut pair = paired();
    pair.owner.backend_stopped = true;
    let data = pattern(7, 8 * BLOCK as usize);
    pair.write(0, &data);
    (pair, data)
}

fn block(data: &[u8], at: usize) -> &[u8] {
    &data[at * BLOCK_BYTES..][..BLOCK_BYTES]
}

/// Reads while the two go on.
fn read(pair: &mut Pair, offset: u64, len: u64) -> Result<Vec<u8>, RequestError> {
    let (id, buf) = pair.owner.request(0, Op::Read, offset, len, None);
    for _ in 0..400 {
        if pair.owner.replies.contains_key(&id) {
            break;
        }
        pair.pass(10_000_000);
    }
    let buf = buf.expect("a read has a buffer");
    let data = pair.owner.engine.arena().bytes(buf).to_vec();
    pair.owner.engine.arena_mut().free(buf);
    pair.owner.replies.remove(&id).expect("it is answered").map(|()| data)
}

#[test]
fn g7_a_bad_dirty_block_comes_back_from_the_peer() {
    let (mut pair, data) = dirty();
    for at in [2, 3, 6] {
        pair.owner.corrupt(block(&data, at));
    }
    assert!(read(&mut pair, 0, 8 * BLOCK) == Ok(data.clone()), "as if nothing had been");
    let status = pair.owner.status(0);
    assert_eq!((status.count.corrupt_blocks, status.count.repaired_blocks), (3, 3));
    assert_eq!((status.lost_blocks, status.dirty_bytes), (0, 8 * BLOCK));
    // It is good on the device again, also without the peer.
    pair.held = true;
    assert!(pair.owner.try_read(0, 0, 8 * BLOCK) == Ok(data.clone()));
    assert_eq!(pair.owner.status(0).count.corrupt_blocks, 3);
    // A restart finds it, too, although what it replays is bad where the block was written first.
    pair.owner.backend_stopped = false;
    pair.owner.reopen();
    pair.owner.attach(true);
    assert!(pair.owner.try_read(0, 0, 8 * BLOCK) == Ok(data.clone()));
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
    pair.owner.drain(0);
    assert!(pair.owner.images[0][..data.len()] == data);
}

#[test]
fn g7_what_the_drain_finds_bad_comes_back_too() {
    let mut pair = paired();
    let data = pattern(7, 8 * BLOCK as usize);
    pair.write(0, &data);
    pair.owner.corrupt(block(&data, 5));
    pair.pass(5 * SECOND);
    assert!(pair.owner.images[0][..data.len()] == data, "the image has what was written");
    let status = pair.owner.status(0);
    assert_eq!((status.count.corrupt_blocks, status.count.repaired_blocks), (1, 1));
    assert_eq!((status.lost_blocks, status.dirty_bytes), (0, 0));
}

#[test]
fn g7_a_block_of_which_the_peer_has_no_good_copy_is_lost_and_said_to_be() {
    // It is bad there, too; the peer says nothing; it goes; or what it sends is something else.
    for case in 0..4 {
        let (mut pair, data) = dirty();
        pair.owner.corrupt(block(&data, 2));
        match case {
            0 => drop(pair.peer.corrupt(block(&data, 2))),
            _ => pair.held = true,
        }
        let (id, buf) = pair.owner.request(0, Op::Read, 2 * BLOCK, BLOCK, None);
        if case == 2 {
            pair.owner.engine.set_pairing(pair.owner.now, VolumeId(0), Pairing::Parting);
        }
        if case == 3 {
            let asked = pair.owner.to_peer.iter().find_map(|(op, _)| match op {
                PeerOp::Block { block, crc } => Some((*block, *crc)),
                _ => None,
            });
            let (at, crc) = asked.expect("it asks");
            assert_eq!(at, 2);
            let now = pair.owner.now;
            pair.owner.engine.peer_block(now, VolumeId(0), at, crc, Some(block(&data, 3)));
        }
        // It is asked three times.
        for _ in 0..9 {
            pair.pass(SECOND);
        }
        assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Io)), "case {case}");
        pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
        assert_eq!(pair.owner.status(0).lost_blocks, 1, "case {case}");
        // The rest is read, and what is written anew.
        pair.held = false;
        if case != 2 {
            pair.write(2 * BLOCK, block(&data, 2));
            assert!(read(&mut pair, 0, 8 * BLOCK) == Ok(data), "case {case}");
        }
    }
}

#[test]
fn g1_what_is_lost_here_is_not_taken_for_what_the_image_has_by_the_peer() {
    let mut pair = paired();
    let data = pattern(7, 8 * BLOCK as usize);
    pair.write(0, &data);
    pair.owner.corrupt(block(&data, 2));
    pair.held = true;
    for _ in 0..9 {
        pair.pass(SECOND);
    }
    assert_eq!(pair.owner.status(0).lost_blocks, 1);
    pair.held = false;
    pair.exchange();
    // The image gets the rest, and whatever is written.
    for at in [3, 4, 5] {
        pair.write(at * BLOCK, &fill(9, 1));
    }
    pair.pass(5 * SECOND);
    let drained = pair.owner.log().drained;
    assert_eq!(pair.owner.status(0).dirty_bytes, 0);
    assert!(!pair.owner.engine.may_pair(VolumeId(0)), "a new copy would lack it");
    pair.peer.engine.replica_drained(VolumeId(0), drained);
    pair.peer.run();
    let image = pair.owner.images[0].clone();
    let mut world = take_over(pair, image);
    assert!(world.try_read(0, 2 * BLOCK, BLOCK) == Ok(block(&data, 2).to_vec()), "the peer has it");
    world.drain(0);
    assert!(world.images[0][2 * BLOCK_BYTES..][..BLOCK_BYTES] == *block(&data, 2));
}

#[test]
fn g1_what_was_lost_counts_until_its_copy_is_parted_with() {
    let (mut pair, data) = dirty();
    pair.owner.corrupt(block(&data, 2));
    pair.peer.corrupt(block(&data, 2));
    assert_eq!(read(&mut pair, 2 * BLOCK, BLOCK), Err(RequestError::Io));
    let (id, lost) = (VolumeId(0), pair.owner.log().drained);
    pair.owner.backend_stopped = false;
    pair.write(2 * BLOCK, &fill(9, 1));
    pair.pass(5 * SECOND);
    // The peer need not have the new block yet.
    assert!(pair.owner.engine.has_loss(id) && pair.owner.log().drained == lost);
    pair.owner.engine.set_pairing(pair.owner.now, id, Pairing::Alone);
    assert!(!pair.owner.engine.has_loss(id) && pair.owner.engine.may_pair(id));
    assert_eq!(pair.owner.log().drained, pair.owner.log().logged);
}

#[test]
fn what_is_lost_can_be_overwritten_also_where_nothing_is_written_without_a_copy() {
    let (mut pair, data) = dirty();
    let id = VolumeId(0);
    pair.owner.engine.set_pairing(pair.owner.now, id, Pairing::Alone);
    pair.owner.engine.set_degraded(pair.owner.now, id, Degraded::Stopped);
    let logged = pair.owner.log().logged;
    let (waits, buf) = pair.owner.request(0, Op::Write { fua: false }, 0, BLOCK, Some(&fill(8, 1)));
    pair.owner.pass(SECOND / 2);
    assert!(
        !pair.owner.replies.contains_key(&waits) && pair.owner.log().logged == logged,
        "for a copy"
    );
    pair.owner.corrupt(block(&data, 2));
    assert!(pair.owner.try_read(0, 2 * BLOCK, BLOCK) == Err(RequestError::Io));
    pair.owner.backend_stopped = false;
    pair.owner.write(0, 2 * BLOCK, &fill(9, 1));
    assert_eq!(pair.owner.replies.remove(&waits), Some(Ok(())));
    pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
    assert!(
        pair.owner.images[0][2 * BLOCK_BYTES..][..BLOCK_BYTES] == fill(9, 1),
        "it is in the image"
    );
    assert!(pair.owner.engine.may_pair(id));
}

#[test]
fn a_volume_that_had_lost_a_block_may_have_a_copy_when_it_is_overwritten() {
    let (mut pair, data) = dirty();
    pair.owner.corrupt(block(&data, 2));
    pair.owner.engine.set_pairing(pair.owner.now, VolumeId(0), Pairing::Alone);
    assert_eq!(pair.owner.try_read(0, 2 * BLOCK, BLOCK), Err(RequestError::Io));
    pair.owner.backend_stopped = false;
    pair.owner.pass(5 * SECOND);
    assert!(!pair.owner.engine.may_pair(VolumeId(0)));
    let before = pair.owner.log();
    assert!(before.drained < before.logged, "{before:?}");
    pair.owner.write(0, 2 * BLOCK, &fill(9, 1));
    pair.owner.drain(0);
    assert!(pair.owner.engine.may_pair(VolumeId(0)));
    let after = pair.owner.log();
    assert_eq!(after.drained, after.logged);
}

#[test]
fn g7_a_peer_that_says_nothing_is_asked_again_and_nothing_is_lost_until_it_does() {
    let (mut pair, data) = dirty();
    for at in [2, 5] {
        pair.owner.corrupt(block(&data, at));
    }
    pair.held = true;
    let (id, buf) = pair.owner.request(0, Op::Read, 0, 8 * BLOCK, None);
    assert_eq!(pair.owner.replies.get(&id), None, "it waits");
    for _ in 0..5 {
        pair.pass(SECOND);
    }
    assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Io)), "not for ever");
    pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
    // What was asked long ago is answered first, and is of no use any more.
    pair.held = false;
    pair.pass(5 * SECOND);
    assert!(read(&mut pair, 0, 8 * BLOCK) == Ok(data));
    let status = pair.owner.status(0);
    assert_eq!((status.count.repaired_blocks, status.lost_blocks), (2, 0));
}

#[test]
fn g7_a_repaired_block_that_goes_bad_again_is_repaired_again_also_for_a_restart() {
    let (mut pair, data) = dirty();
    for round in 1..=3 {
        pair.owner.corrupt(block(&data, 2));
        assert!(read(&mut pair, 0, 8 * BLOCK) == Ok(data.clone()), "round {round}");
        assert_eq!(pair.owner.status(0).count.repaired_blocks, round);
    }
    pair.owner.backend_stopped = false;
    pair.owner.reopen();
    pair.owner.attach(true);
    assert!(pair.owner.try_read(0, 0, 8 * BLOCK) == Ok(data));
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
}

#[test]
fn g7_a_write_overtakes_the_repair_of_what_it_overwrites() {
    let (mut pair, data) = dirty();
    pair.owner.corrupt(block(&data, 2));
    pair.held = true;
    let (id, buf) = pair.owner.request(0, Op::Read, BLOCK, 2 * BLOCK, None);
    let new = fill(9, 1);
    let (written, with) =
        pair.owner.request(0, Op::Write { fua: false }, 2 * BLOCK, BLOCK, Some(&new));
    pair.held = false;
    pair.pass(SECOND);
    for (id, buf) in [(id, buf), (written, with)] {
        assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
        pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
    }
    let expected = [block(&data, 1), &new, block(&data, 3)].concat();
    assert!(read(&mut pair, BLOCK, 3 * BLOCK) == Ok(expected));
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
    assert_eq!(pair.peer.status(0).lost_blocks, 0);
}

/// The peer has a newer block already, which is still on its way to the owner's own device: nothing
/// is lost.
#[test]
fn g7_a_bad_block_that_the_peer_has_overwritten_before_its_owner_is_not_lost() {
    let (mut pair, data) = dirty();
    pair.owner.corrupt(block(&data, 2));
    pair.owner.hold_device_writes = true;
    let new = fill(9, 1);
    let (written, with) =
        pair.owner.request(0, Op::Write { fua: false }, 2 * BLOCK, BLOCK, Some(&new));
    pair.pass(10_000_000);
    let (id, buf) = pair.owner.request(0, Op::Read, BLOCK, 2 * BLOCK, None);
    pair.pass(10_000_000);
    assert!(!pair.owner.replies.contains_key(&id), "it waits for what is on its way");
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
    pair.owner.release_device_writes();
    pair.pass(10_000_000);
    for (id, buf) in [(id, buf), (written, with)] {
        assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
        pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
    }
    assert!(read(&mut pair, BLOCK, 2 * BLOCK) == Ok([block(&data, 1), &new].concat()));
    assert!(!pair.owner.engine.has_loss(VolumeId(0)));
}

/// The record with the block is still on its way to the peer's log.
#[test]
fn g7_a_bad_block_that_the_peer_has_not_logged_yet_is_waited_for() {
    let (mut pair, _) = dirty();
    pair.peer.hold_device_writes = true;
    let new = fill(9, 1);
    let (written, with) =
        pair.owner.request(0, Op::Write { fua: false }, 2 * BLOCK, BLOCK, Some(&new));
    pair.pass(10_000_000);
    pair.owner.corrupt(&new);
    let (id, buf) = pair.owner.request(0, Op::Read, 2 * BLOCK, BLOCK, None);
    pair.pass(10_000_000);
    assert!(!pair.owner.replies.contains_key(&id), "it waits for the peer's log");
    assert_eq!(pair.owner.status(0).lost_blocks, 0);
    pair.peer.release_device_writes();
    pair.peer.run();
    pair.confirm();
    pair.pass(10_000_000);
    for (id, buf) in [(id, buf), (written, with)] {
        assert_eq!(pair.owner.replies.remove(&id), Some(Ok(())));
        pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
    }
    assert!(read(&mut pair, 2 * BLOCK, BLOCK) == Ok(new));
    assert_eq!(
        (pair.owner.status(0).lost_blocks, pair.owner.status(0).count.repaired_blocks),
        (0, 1)
    );
}

#[test]
fn a_copy_gives_the_block_that_is_meant_and_no_other() {
    let (mut pair, data) = dirty();
    let good = crc32c(block(&data, 2));
    for (at, crc, expected) in [
        (2, good, Ok(())),
        (2, good ^ 1, Err(RequestError::Invalid)),
        (3, good, Err(RequestError::Invalid)),
        (100, good, Err(RequestError::Invalid)),
    ] {
        let (id, buf) = pair.peer.request(0, Op::Block { crc }, at * BLOCK, BLOCK, None);
        assert_eq!(pair.peer.replies.remove(&id), Some(expected), "block {at}");
        pair.peer.engine.arena_mut().free(buf.expect("a buffer"));
    }
    // A volume that is served has clients, and they have reads.
    let (id, _) = pair.owner.request(0, Op::Block { crc: good }, 2 * BLOCK, BLOCK, None);
    assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Shutdown)));
}
