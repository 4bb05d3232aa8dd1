//! An owner's core and its peer's, with a link between them that a test can hold.

#![allow(dead_code, reason = "each file of tests uses a part of it")]

use super::{MIB, World, spec};
use tidepool_engine::Attach;
use tidepool_engine::api::*;

pub const BLOCK: u64 = BLOCK_BYTES as u64;
pub const SIZE: u64 = 32 * MIB;

/// A pair whose client has flushed, so that writes do not wait for stable media.
pub fn paired() -> Pair {
    let mut owner = World::new(64 * MIB, &[spec("a", SIZE, Mode::WriteBack)]);
    owner.flush(0);
    Pair::new(owner)
}

pub fn fill(byte: u8, blocks: u64) -> Vec<u8> {
    vec![byte; (blocks * BLOCK) as usize]
}

/// What a peer with much room says.
pub fn have(logged: u64, stable: u64) -> Have {
    Have { logged, stable, room: Room { bytes: 64 * MIB, ranges: 1000 } }
}

/// A copy of the size of the volume that begins anew.
pub fn begin(generation: u64, size_bytes: u64, base: u64) -> Begin {
    Begin { generation, size_bytes, base, room: Room { bytes: MIB, ranges: 16 } }
}

/// Takes the replica over: it becomes a volume of the peer, with this image.
pub fn take_over(pair: Pair, image: Vec<u8>) -> World {
    let mut world = pair.peer;
    world.images = vec![image];
    let attach = Attach::again(&world.status(0).spec, true);
    let result = world.control(|engine, now, control| {
        engine.attach(now, VolumeId(0), attach, control).expect("a replica can be attached");
    });
    assert_eq!(result, Ok(()));
    world
}

/// The owner's volume is number 0 of its core, the replica is number 0 of the other.
pub struct Pair {
    pub owner: World,
    pub peer: World,
    /// How far the peer has confirmed its copy.
    pub logged: u64,
    /// Nothing goes over the link while this is set.
    pub held: bool,
    records: Vec<(u64, RequestId)>,
    flushes: Vec<RequestId>,
}

impl Pair {
    /// A volume whose owner has nothing dirty, and a replica that begins with its next record.
    pub fn new(mut owner: World) -> Pair {
        let spec = owner.status(0).spec;
        let base = owner.log().logged;
        let mut peer = World::new(64 * MIB, &[]);
        let room = peer.engine.room_to_begin(None);
        let result = peer.control(|engine, _, control| {
            engine.add_replica(spec, base, room, control).expect("a replica");
        });
        assert_eq!(result, Ok(()));
        owner.engine.set_pairing(owner.now, VolumeId(0), Pairing::Paired);
        owner.engine.peer_has(owner.now, VolumeId(0), Have { logged: base, stable: base, room });
        owner.run();
        Pair { owner, peer, logged: base, held: false, records: Vec::new(), flushes: Vec::new() }
    }

    /// Hands over what is on its way, until nothing is.
    pub fn exchange(&mut self) {
        while !self.held && !self.owner.to_peer.is_empty() {
            for (op, bytes) in std::mem::take(&mut self.owner.to_peer) {
                match op {
                    PeerOp::Record { sequence, durable, .. } => {
                        let id = self.peer.send_record(0, &bytes, durable);
                        self.records.push((sequence, id));
                    }
                    PeerOp::Block { block, crc } => self.answer_block(block, crc),
                    PeerOp::Stabilise { .. } => {
                        self.flushes.push(self.peer.request(0, Op::Flush, 0, 0, None).0);
                    }
                }
            }
            self.confirm();
        }
    }

    /// The owner hears what the copy has of a block.
    fn answer_block(&mut self, block: u64, crc: u32) {
        let offset = block * BLOCK;
        let (id, buf) = self.peer.request(0, Op::Block { crc }, offset, BLOCK, None);
        let result = self.peer.replies.remove(&id).expect("it is answered at once");
        let buf = buf.expect("it has a buffer");
        let data = result.is_ok().then(|| self.peer.engine.arena().bytes(buf).to_vec());
        self.peer.engine.arena_mut().free(buf);
        self.owner.engine.peer_block(self.owner.now, VolumeId(0), block, crc, data.as_deref());
        self.owner.run();
    }

    /// The owner hears how far the copy goes.
    pub fn confirm(&mut self) {
        let Pair { peer, records, logged, .. } = self;
        records.retain(|&(sequence, id)| match peer.replies.remove(&id) {
            Some(result) => {
                assert_eq!(result, Ok(()), "record {sequence}");
                *logged = sequence;
                false
            }
            None => true,
        });
        self.flushes.retain(|id| peer.replies.remove(id).is_none());
        let stable = self.peer.log().stable.min(self.logged);
        let room = self.peer.engine.replica_room(VolumeId(0));
        let have = Have { logged: self.logged, stable, room };
        self.owner.engine.peer_has(self.owner.now, VolumeId(0), have);
        self.owner.run();
    }

    /// The replica hears how far the owner's image is.
    pub fn tell_drained(&mut self) {
        let drained = self.owner.log().drained;
        self.peer.engine.replica_drained(VolumeId(0), drained);
        self.peer.run();
    }

    /// Lets time pass on both sides.
    pub fn pass(&mut self, ns: Nanos) {
        let step = 10_000_000;
        for _ in 0..ns / step {
            self.exchange();
            self.owner.pass(step);
            self.peer.pass(step);
        }
        self.exchange();
    }

    /// A change or flush that is answered when both have it.
    pub fn op(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
    ) -> Result<(), RequestError> {
        let (id, buf) = self.owner.request(0, op, offset, len, data);
        self.exchange();
        let reply = self.owner.replies.remove(&id).expect("both have it");
        buf.into_iter().for_each(|buf| self.owner.engine.arena_mut().free(buf));
        reply
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.op(Op::Write { fua: false }, offset, data.len() as u64, Some(data)).expect("write");
    }
}
