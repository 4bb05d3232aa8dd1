//! An owner whose log has lost its newest records with its host's power gets them from its peer's
//! log (RFC 9).

use crate::common::pair::*;
use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::{RecordHeader, open};

const A: VolumeId = VolumeId(0);
/// Where the volume is written, in blocks.
const WRITTEN: [(u64, u64); 3] = [(0, 40), (100, 8), (200, 64)];

/// A pair whose image takes nothing; what the owner's device is left with when its host loses its
/// power; and what the volume holds.
fn parted() -> (Pair, Vec<u8>, Vec<u8>) {
    let mut pair = paired();
    pair.owner.backend_stopped = true;
    pair.write(0, &pattern(7, 40 * BLOCK as usize));
    pair.write(100 * BLOCK, &fill(9, 8));
    pair.op(Op::Flush, 0, 0, None).expect("a flush");
    let left = pair.owner.device.0.clone();
    // Over what is there, beside it, more than a record holds, and zeroes of both kinds.
    pair.write(3 * BLOCK + 512, &pattern(8, 5 * BLOCK as usize));
    pair.write(200 * BLOCK, &pattern(9, 64 * BLOCK as usize));
    pair.op(Op::Discard { fua: false }, 101 * BLOCK, 2 * BLOCK, None).expect("a discard");
    pair.op(Op::WriteZeroes { fua: false, no_hole: true }, 10 * BLOCK, 4 * BLOCK, None)
        .expect("zeroes");
    pair.write(11 * BLOCK, &fill(5, 1));
    let all = content(&mut pair);
    (pair, left, all)
}

/// What was written, which is all in the cache.
fn content(pair: &mut Pair) -> Vec<u8> {
    WRITTEN.map(|(at, blocks)| pair.owner.read(0, at * BLOCK, blocks * BLOCK)).concat()
}

fn lose_power(pair: &mut Pair, left: Vec<u8>) {
    pair.owner.device.0 = left;
    pair.owner.reopen();
    pair.owner.to_peer.clear();
}

/// What the peer gives of a record.
fn fetch(pair: &mut Pair, sequence: u64) -> Result<Vec<u8>, RequestError> {
    let (id, buf) = pair.peer.request(0, Op::Fetch { sequence }, 0, 0, None);
    let result = pair.peer.replies.remove(&id).expect("it is answered at once");
    let buf = buf.expect("it has a buffer");
    let bytes = pair.peer.engine.arena().bytes(buf).to_vec();
    pair.peer.engine.arena_mut().free(buf);
    result.map(|()| {
        let header = open::<RecordHeader>(&bytes[..BLOCK_BYTES]).expect("a record");
        bytes[..(1 + usize::from(header.blocks.get())) * BLOCK_BYTES].to_vec()
    })
}

/// The owner gets one record, and everything up to it on stable media.
fn take(pair: &mut Pair, bytes: &[u8]) -> Result<(), RequestError> {
    let id = pair.owner.send_record(0, bytes, true);
    pair.owner.run();
    pair.owner.replies.remove(&id).expect("it is answered")
}

fn serve_again(pair: &mut Pair) -> Vec<u8> {
    pair.owner.attach(true);
    content(pair)
}

#[test]
fn g4_records_that_were_lost_come_back_from_the_peer() {
    let (mut pair, left, all) = parted();
    let newest = pair.owner.log().logged;
    lose_power(&mut pair, left);
    let own = pair.owner.log().logged;
    assert!(own + 4 < newest && pair.logged == newest, "{own} {newest}");
    pair.owner.engine.follow_on(A).expect("it is not served");
    for sequence in own + 1..=newest {
        let record = fetch(&mut pair, sequence).expect("the peer has it");
        assert_eq!(take(&mut pair, &record), Ok(()), "{sequence}");
    }
    let log = pair.owner.log();
    assert_eq!((log.logged, log.stable), (newest, newest));
    assert!(serve_again(&mut pair) == all);
    // Also for a restart, and for the image.
    pair.owner.reopen();
    assert!(serve_again(&mut pair) == all);
    pair.owner.backend_stopped = false;
    pair.owner.drain(0);
    let image = &pair.owner.images[0];
    assert!(
        WRITTEN
            .map(|(at, blocks)| &image[(at * BLOCK) as usize..][..(blocks * BLOCK) as usize])
            .concat()
            == all
    );
}

#[test]
fn an_owner_that_is_cut_short_while_it_gets_records_goes_on_where_it_was() {
    let (mut pair, left, all) = parted();
    let newest = pair.owner.log().logged;
    lose_power(&mut pair, left);
    let mut own = pair.owner.log().logged;
    while own < newest {
        pair.owner.engine.follow_on(A).expect("it is not served");
        pair.owner.engine.follow_on(A).expect("a second time, too");
        let record = fetch(&mut pair, own + 1).expect("the peer has it");
        assert_eq!(take(&mut pair, &record), Ok(()));
        pair.owner.reopen();
        own += 1;
        assert_eq!(pair.owner.log().logged, own);
    }
    assert!(serve_again(&mut pair) == all);
}

#[test]
fn only_the_next_record_is_taken_and_only_by_who_is_not_served() {
    let (mut pair, left, _) = parted();
    assert_eq!(pair.owner.engine.follow_on(A), Err(ControlError::NotReplica));
    assert_eq!(pair.owner.engine.follow_on(VolumeId(3)), Err(ControlError::Gone));
    lose_power(&mut pair, left);
    let own = pair.owner.log().logged;
    let second = fetch(&mut pair, own + 2).expect("the peer has it");
    let first = fetch(&mut pair, own + 1).expect("the peer has it");
    let same = fetch(&mut pair, own).expect("the peer has it");
    pair.owner.engine.follow_on(A).expect("it is not served");
    for bytes in [&second, &same] {
        assert_eq!(take(&mut pair, bytes), Err(RequestError::Invalid));
    }
    assert_eq!(take(&mut pair, &first), Ok(()));
    assert_eq!(pair.owner.log().logged, own + 1);
}

#[test]
fn g7_a_peer_gives_only_records_that_are_good() {
    let (mut pair, ..) = parted();
    let newest = pair.owner.log().logged;
    assert_eq!(fetch(&mut pair, newest + 1), Err(RequestError::Invalid));
    pair.peer.corrupt(&fill(5, 1));
    assert_eq!(fetch(&mut pair, newest), Err(RequestError::Io), "its data is bad");
    let good = fetch(&mut pair, newest - 1).expect("that is good");
    pair.peer.corrupt(&good[..BLOCK_BYTES]);
    assert_eq!(fetch(&mut pair, newest - 1), Err(RequestError::Io), "its header is bad");
    // What the image has nobody needs.
    pair.owner.backend_stopped = false;
    pair.pass(5_000_000_000);
    pair.tell_drained();
    assert_eq!(fetch(&mut pair, newest - 2), Err(RequestError::Invalid));
    // A volume that is served is nobody's copy.
    let (id, buf) = pair.owner.request(0, Op::Fetch { sequence: newest }, 0, 0, None);
    assert_eq!(pair.owner.replies.remove(&id), Some(Err(RequestError::Shutdown)));
    pair.owner.engine.arena_mut().free(buf.expect("a buffer"));
}

#[test]
fn what_had_room_once_gets_it_back_whatever_the_quota_is_by_now() {
    let (mut pair, left, all) = parted();
    let newest = pair.owner.log().logged;
    lose_power(&mut pair, left);
    // Less than the volume holds dirty already.
    pair.owner.engine.set_dirty_bytes_max(0, A, BLOCK, 77);
    pair.owner.run();
    pair.owner.engine.follow_on(A).expect("it is not served");
    for sequence in pair.owner.log().logged + 1..=newest {
        let record = fetch(&mut pair, sequence).expect("the peer has it");
        assert_eq!(take(&mut pair, &record), Ok(()), "{sequence}");
    }
    assert!(serve_again(&mut pair) == all);
}
