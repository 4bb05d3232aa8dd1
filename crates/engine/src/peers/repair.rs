//! A dirty block that does not verify any more, and whose second copy is at the peer (RFC 9): the
//! peer is asked for it, and what it sends is logged again, as a block is that reclaim moves. A
//! read of it waits for that.

use crate::api::{BLOCK_BYTES, Nanos, PeerOp, VolumeId};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::blocks::index::{Lookup, Position};
use crate::format::{RecordKind, Stream, crc32c};
use crate::ground::Ground;
use crate::ground::volume::Volume;
use crate::log::Want;
use crate::log::build::RecordFields;
use crate::peers::Peers;
use std::collections::VecDeque;

/// So long the peer is waited for, or room in the log; a peer that is alive answers in the time of
/// a device read.
const STAGE_NS_MAX: Nanos = 2_000_000_000;
/// Pause before what has taken too long is tried again.
const RETRY_NS: Nanos = 500_000_000;
/// So often it is tried: the volume's drain waits for it.
const ATTEMPTS: u32 = 3;

/// How far a repair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Others come first, and it is not begun before that.
    Queued(Nanos),
    /// The peer is asked, and waited for until then.
    Asked(Nanos),
    /// A good copy is in the repairs' buffer, and room in the log is waited for until then.
    Here(Nanos),
    /// The peer has other content. Either the peer's is newer, and its record is on its way to the
    /// log here, or the peer's is older, and the record with ours is on its way there. When both
    /// logs have everything up to this sequence, the peer is asked once more, if our copy still
    /// counts. That answer is believed.
    Unsettled(u64),
    /// It is on its way to the log.
    Logging,
}

/// How a repair ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The block is in the log again, or somewhere else by now.
    Good,
    /// There is no good copy of it.
    Lost,
    /// It is not known whether there is one: it is tried again, and who reads it does not wait for
    /// that.
    Later(Nanos),
}

/// A bad block at its place on the device, which is pinned.
#[derive(Debug, Clone, Copy)]
struct Repair {
    volume: VolumeId,
    block: u64,
    position: Position,
    crc: u32,
    stage: Stage,
    /// Attempts that have taken too long.
    attempts: u32,
    /// What was on its way when the peer had something else has arrived.
    settled: bool,
}

/// A block of a request that waits for a repair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader {
    op: OpId,
    volume: VolumeId,
    block: u64,
    buf: Buf,
}

impl Reader {
    /// The operation waits for a block of `volume`, which is its own or a parent of it.
    pub(crate) fn new(op: OpId, volume: VolumeId, block: u64, buf: Buf) -> Reader {
        Reader { op, volume, block, buf }
    }

    pub(crate) fn op(&self) -> OpId {
        self.op
    }

    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn buf(&self) -> Buf {
        self.buf
    }
}

/// Bad blocks, the first of which is being repaired.
#[derive(Default)]
pub(super) struct Repairs {
    queue: VecDeque<Repair>,
    readers: Vec<Reader>,
    /// Those that need not wait any longer, and whether it is known what they read.
    ended: VecDeque<(Reader, bool)>,
}

impl Peers {
    /// When repairs have to be looked at, if nothing else happens.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self.repairs.queue.front()?.stage {
            Stage::Queued(at) | Stage::Asked(at) | Stage::Here(at) => Some(at),
            Stage::Unsettled(_) | Stage::Logging => None,
        }
    }

    /// Has a bad dirty block repaired. False if nobody can have another copy of it: it is lost.
    pub(crate) fn repair(
        &mut self,
        ground: &mut Ground,
        volume: VolumeId,
        block: u64,
        position: Position,
    ) -> bool {
        if ground.bad().has(position) {
            return true;
        }
        if ground.is_dead() || !ground.volume(volume).is_sending() {
            return false;
        }
        let crc = ground.marks().crc(position);
        ground.space_mut().pin(position);
        let stage = Stage::Queued(0);
        let repair = Repair { volume, block, position, crc, stage, attempts: 0, settled: false };
        self.repairs.queue.push_back(repair);
        ground.bad_mut().insert(volume, position);
        ground.log_mut().set_repairs(true);
        ground.stir();
        true
    }

    /// A block of a read waits until its repair is over; see [`Peers::next_reader`].
    pub(crate) fn wait_for_repair(&mut self, reader: Reader) {
        self.repairs.readers.push(reader);
    }

    /// The next reader that need not wait any longer. With it comes whether the block can be looked
    /// for where it is now; else nobody knows yet whether there is a good copy.
    pub(crate) fn next_reader(&mut self) -> Option<(Reader, bool)> {
        self.repairs.ended.pop_front()
    }

    /// The peer says what it has of a block that it was asked for: a good copy, or none.
    pub(crate) fn answered(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        (id, block, crc): (VolumeId, u64, u32),
        data: Option<&[u8]>,
    ) {
        let Some(front) = self.repairs.queue.front_mut() else { return };
        // The answer may come too late, and be about an earlier one.
        let asked = (front.volume, front.block, front.crc) == (id, block, crc);
        if !asked || !matches!(front.stage, Stage::Asked(_)) {
            return;
        }
        let of = ground.get(id);
        let arrived = |of: &Volume| {
            let there = of.copy().map_or(0, |copy| copy.logged());
            of.log().published().min(there) >= of.log().built()
        };
        let unsettled = of.filter(|of| !front.settled && !arrived(of));
        match data.filter(|data| data.len() == BLOCK_BYTES && crc32c(data) == crc) {
            Some(data) => {
                front.stage = Stage::Here(now + STAGE_NS_MAX);
                let repair = ground.pools().repair();
                ground.bytes_mut(repair).copy_from_slice(data);
            }
            None => match unsettled {
                Some(of) => front.stage = Stage::Unsettled(of.log().built()),
                None => self.end_repair(ground, End::Lost),
            },
        }
        ground.stir();
    }

    /// Goes on with repairs.
    pub(crate) fn step(&mut self, ground: &mut Ground, now: Nanos) {
        while let Some(&Repair { volume, block, crc, stage, attempts, .. }) =
            self.repairs.queue.front()
        {
            let of = ground.get(volume);
            let (sends, published) =
                of.map_or((false, 0), |of| (of.is_sending(), of.log().published()));
            let there = of.and_then(|of| of.copy()).map_or(0, |copy| copy.logged());
            // What is not wanted any more has nothing to lose.
            if ground.is_dead() || stage != Stage::Logging && !self.is_wanted(ground) {
                self.end_repair(ground, End::Lost);
                continue;
            }
            let late = matches!(stage, Stage::Asked(until) | Stage::Here(until) if now >= until);
            match stage {
                Stage::Logging => return,
                Stage::Unsettled(sequence) if published < sequence => return,
                Stage::Here(_) if self.log_repaired(ground) => {}
                Stage::Asked(_) | Stage::Queued(_) | Stage::Unsettled(_) if !sends => {
                    self.end_repair(ground, End::Lost);
                }
                _ if late && attempts + 1 == ATTEMPTS => self.end_repair(ground, End::Lost),
                _ if late => self.end_repair(ground, End::Later(now + RETRY_NS)),
                Stage::Here(_) | Stage::Asked(_) => return,
                Stage::Queued(at) if now < at => return,
                Stage::Unsettled(sequence) if there < sequence => return,
                Stage::Queued(_) | Stage::Unsettled(_) => {
                    let front = self.repairs.queue.front_mut().expect("looked at just now");
                    front.settled |= matches!(stage, Stage::Unsettled(_));
                    front.stage = Stage::Asked(now + STAGE_NS_MAX);
                    let op = PeerOp::Block { block, crc };
                    ground.out_mut().peer(volume, op);
                }
            }
        }
    }

    /// The first bad block is the current one still, or a group needs it.
    fn is_wanted(&self, ground: &Ground) -> bool {
        let Some(&Repair { volume, block, position, .. }) = self.repairs.queue.front() else {
            return false;
        };
        let Some(of) = ground.get(volume) else { return false };
        let frozen = || of.ledger().closed_has(block, position);
        of.ledger().index().lookup(block) == Lookup::At(position)
            || ground.marks().is_dirty(position) && frozen()
    }

    /// Logs the copy that has come; false if there is no room for it now.
    fn log_repaired(&mut self, ground: &mut Ground) -> bool {
        let Some(mut builder) = ground.begin_append(Want::moves(Stream::Log)) else { return false };
        let front = self.repairs.queue.front_mut().expect("a copy has come");
        front.stage = Stage::Logging;
        let Repair { volume, block, position, crc, .. } = *front;
        builder.begin_record(volume, RecordKind::Move);
        let copy = ground.pools().repair();
        ground.push_moved(&mut builder, (block, position, crc), copy);
        ground.end_record_beside(&mut builder, RecordFields::default());
        builder.mark_repair();
        ground.issue(builder, false);
        true
    }

    /// The copy is in the log. What was flushed once is to be stable again.
    pub(crate) fn repaired(&mut self, ground: &mut Ground) {
        if let Some(front) = self.repairs.queue.front() {
            if let Some(volume) = ground.get_mut(front.volume) {
                volume.count_mut().repaired_blocks += 1;
            }
            ground.log_mut().want_stable();
            self.end_repair(ground, End::Good);
        }
    }

    /// The first repair is over, for now at least.
    fn end_repair(&mut self, ground: &mut Ground, end: End) {
        let repair = self.repairs.queue.pop_front().expect("it was being made");
        let Repair { volume, block, position, .. } = repair;
        if let End::Later(at) = end {
            let attempts = repair.attempts + 1;
            self.repairs.queue.push_back(Repair { stage: Stage::Queued(at), attempts, ..repair });
        } else {
            ground.space_mut().unpin(position);
            ground.bad_mut().remove(position);
        }
        if end == End::Lost && ground.get(volume).is_some() {
            ground.lose_for_good(volume, block, position);
        }
        ground.log_mut().set_repairs(!self.repairs.queue.is_empty());
        let mut at = 0;
        while let Some(&reader) = self.repairs.readers.get(at) {
            if (reader.volume, reader.block) != (volume, block) {
                at += 1;
                continue;
            }
            self.repairs.readers.swap_remove(at);
            // Wherever the block is now, or that it is lost, is found out as for any read.
            let is_known = !matches!(end, End::Later(_));
            self.repairs.ended.push_back((reader, is_known));
        }
        ground.stir();
    }
}
