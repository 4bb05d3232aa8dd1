//! A dirty block that does not verify any more, and whose second copy is at the peer (RFC 9): the peer is asked for it, and what it
//! sends is logged again, as a block is that reclaim moves. A read of it waits for that.

use crate::api::{BLOCK_BYTES, Nanos, PeerOp, RequestError, VolumeId};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::blocks::index::{Lookup, Position};
use crate::control::volume::Volume;
use crate::engine::Engine;
use crate::format::{RecordKind, Stream, crc32c};
use crate::front::read::CachedRead;
use crate::log::build::RecordFields;
use std::collections::VecDeque;

/// So long the peer is waited for, or room in the log; a peer that is alive answers in the time of a device read.
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
    /// The peer has something else, which may be a newer one that is on its way to the log here, or an older one while the record with
    /// this one is on its way there: it is asked again when both have everything up to this sequence, if the block counts by then.
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
    /// It is not known whether there is one: it is tried again, and who reads it does not wait for that.
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
struct Reader {
    op: OpId,
    /// The volume that has the block: that of the operation, or a parent of it.
    volume: VolumeId,
    block: u64,
    buf: Buf,
}

/// Bad blocks, the first of which is being repaired.
#[derive(Default)]
pub(crate) struct Repairs {
    queue: VecDeque<Repair>,
    readers: Vec<Reader>,
}

impl Repairs {
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self.queue.front()?.stage {
            Stage::Queued(at) | Stage::Asked(at) | Stage::Here(at) => Some(at),
            Stage::Unsettled(_) | Stage::Logging => None,
        }
    }
}

impl Engine {
    /// Has a bad dirty block repaired. False if nobody can have another copy of it: it is lost.
    pub(crate) fn repair(&mut self, volume: VolumeId, block: u64, position: Position) -> bool {
        if self.ground.bad.has(position) {
            return true;
        }
        if self.ground.base.dead || !self.ground.volume(volume).is_sending() {
            return false;
        }
        let crc = self.ground.space.marks.crc(position);
        self.ground.space.pin(position);
        self.repairs.queue.push_back(Repair {
            volume,
            block,
            position,
            crc,
            stage: Stage::Queued(0),
            attempts: 0,
            settled: false,
        });
        self.ground.bad.insert(volume, position);
        self.ground.log.set_repairs(true);
        self.ground.base.out.stir();
        true
    }

    /// A block of a read waits until its repair is over.
    pub(crate) fn wait_for_repair(&mut self, read: CachedRead, block: u64, buf: Buf) {
        self.ops[read.op].waiting += 1;
        self.repairs.readers.push(Reader { op: read.op, volume: read.volume, block, buf });
    }

    /// The peer says what it has of a block that it was asked for: a good copy, or none.
    pub fn peer_block(&mut self, now: Nanos, id: VolumeId, block: u64, crc: u32, data: Option<&[u8]>) {
        let Some(front) = self.repairs.queue.front_mut() else { return };
        // The answer may come too late, and be about an earlier one.
        if (front.volume, front.block, front.crc) != (id, block, crc)
            || !matches!(front.stage, Stage::Asked(_))
        {
            return;
        }
        let of = self.ground.volumes[id.0 as usize].as_ref();
        let arrived = |of: &Volume| {
            let there = of.copy.as_ref().map_or(0, |copy| copy.logged());
            of.log.published().min(there) >= of.log.built()
        };
        let unsettled = of.filter(|of| !front.settled && !arrived(of));
        match data.filter(|data| data.len() == BLOCK_BYTES && crc32c(data) == crc) {
            Some(data) => {
                front.stage = Stage::Here(now + STAGE_NS_MAX);
                self.ground.base.arena.bytes_mut(self.ground.base.pools.repair).copy_from_slice(data);
            }
            None => match unsettled {
                Some(of) => front.stage = Stage::Unsettled(of.log.built()),
                None => self.end_repair(End::Lost),
            },
        }
        self.ground.base.out.stir();
    }

    pub(crate) fn pump_repairs(&mut self, now: Nanos) {
        while let Some(&Repair { volume, block, crc, stage, attempts, .. }) = self.repairs.queue.front() {
            let of = self.ground.volumes[volume.0 as usize].as_ref();
            let (sends, published) = of.map_or((false, 0), |of| (of.is_sending(), of.log.published()));
            let there = of.and_then(|of| of.copy.as_ref()).map_or(0, |copy| copy.logged());
            // What is not wanted any more has nothing to lose.
            if self.ground.base.dead || stage != Stage::Logging && !self.is_wanted() {
                self.end_repair(End::Lost);
                continue;
            }
            let late = matches!(stage, Stage::Asked(until) | Stage::Here(until) if now >= until);
            match stage {
                Stage::Logging => return,
                Stage::Unsettled(sequence) if published < sequence => return,
                Stage::Here(_) if self.log_repaired() => {}
                Stage::Asked(_) | Stage::Queued(_) | Stage::Unsettled(_) if !sends => {
                    self.end_repair(End::Lost);
                }
                _ if late && attempts + 1 == ATTEMPTS => self.end_repair(End::Lost),
                _ if late => self.end_repair(End::Later(now + RETRY_NS)),
                Stage::Here(_) | Stage::Asked(_) => return,
                Stage::Queued(at) if now < at => return,
                Stage::Unsettled(sequence) if there < sequence => return,
                Stage::Queued(_) | Stage::Unsettled(_) => {
                    let front = self.repairs.queue.front_mut().expect("looked at just now");
                    front.settled |= matches!(stage, Stage::Unsettled(_));
                    front.stage = Stage::Asked(now + STAGE_NS_MAX);
                    let op = PeerOp::Block { block, crc };
                    self.ground.base.out.peer(volume, op);
                }
            }
        }
    }

    /// The first bad block is the current one still, or a group needs it.
    fn is_wanted(&self) -> bool {
        let Some(&Repair { volume, block, position, .. }) = self.repairs.queue.front() else { return false };
        let Some(of) = &self.ground.volumes[volume.0 as usize] else { return false };
        let frozen = || of.ledger.closed_has(block, position);
        of.ledger.index().lookup(block) == Lookup::At(position)
            || self.ground.space.marks.is_dirty(position) && frozen()
    }

    /// Logs the copy that has come; false if there is no room for it now.
    fn log_repaired(&mut self) -> bool {
        let Some(mut builder) = self.ground.begin_move(Stream::Log) else { return false };
        let front = self.repairs.queue.front_mut().expect("a copy has come");
        front.stage = Stage::Logging;
        let Repair { volume, block, position, crc, .. } = *front;
        builder.begin_record(volume, RecordKind::Move);
        let to = builder.push_data(&self.ground.space, block, crc, position);
        self.ground.base.arena.copy(self.ground.base.pools.repair, to);
        builder.end_record(&mut self.ground.base, &self.ground.space, RecordFields::default());
        builder.mark_repair();
        self.ground.log.issue(&mut self.ground.base, builder, false);
        true
    }

    /// The copy is in the log. What was flushed once is to be stable again.
    pub(crate) fn repaired(&mut self) {
        if let Some(front) = self.repairs.queue.front() {
            let id = front.volume;
            if let Some(volume) = &mut self.ground.volumes[id.0 as usize] {
                volume.count.repaired_blocks += 1;
            }
            self.ground.log.want_stable();
            self.end_repair(End::Good);
        }
    }

    /// The first repair is over, for now at least.
    fn end_repair(&mut self, end: End) {
        let repair = self.repairs.queue.pop_front().expect("it was being made");
        let Repair { volume, block, position, .. } = repair;
        match end {
            End::Later(at) => {
                let attempts = repair.attempts + 1;
                self.repairs.queue.push_back(Repair { stage: Stage::Queued(at), attempts, ..repair });
            }
            End::Good => {
                self.ground.space.unpin(position);
                self.ground.bad.remove(position);
            }
            End::Lost => {
                self.ground.space.unpin(position);
                self.ground.bad.remove(position);
                if self.ground.volumes[volume.0 as usize].is_some() {
                    self.ground.lose_for_good(volume, block, position);
                }
            }
        }
        self.ground.log.set_repairs(!self.repairs.queue.is_empty());
        let mut at = 0;
        while let Some(&reader) = self.repairs.readers.get(at) {
            if (reader.volume, reader.block) != (volume, block) {
                at += 1;
                continue;
            }
            self.repairs.readers.swap_remove(at);
            match end {
                End::Later(_) => self.ops[reader.op].error = Some(RequestError::Io),
                // Wherever the block is now, or that it is lost, is found out as for any read.
                End::Good | End::Lost => self.read_blocks(reader.op, block, 1, reader.buf),
            }
            self.read_is_nearer(reader.op);
        }
        self.ground.base.out.stir();
    }

    /// A peer whose copy this is asked for a block: reads it, if it is the one that is meant.
    pub(crate) fn start_block(&mut self, id: OpId, crc: u32) {
        let op = self.ops[id];
        let (volume, block) = (op.request.volume, op.first_block);
        match self.ground.volume(volume).ledger.index().lookup(block) {
            Lookup::At(position)
                if op.blocks == 1
                    && self.ground.space.marks.crc(position) == crc
                    && !mutated!(BlockNotGiven) =>
            {
                let buf = op.request.buf.expect("a read has a buffer");
                self.read_cached(CachedRead {
                    op: id,
                    volume,
                    block,
                    blocks: 1,
                    position,
                    buf,
                    again: false,
                });
            }
            _ => self.complete(id, Err(RequestError::Invalid)),
        }
    }
}
