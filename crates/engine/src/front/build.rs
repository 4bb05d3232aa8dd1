//! What clients have for the log goes into appends.

use crate::api::{Nanos, VolumeId};
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::base::pools::{BUFFERS_FOR_MOVES, For};
use crate::format::{EntryKind, RecordKind, Stream};
use crate::front::Front;
use crate::front::op::Part;
use crate::ground::Ground;
use crate::log::Want;
use crate::log::build::Builder;
use crate::log::copy::RecordRoom;

/// What the log is to be given next.
struct Pending {
    volume: usize,
    /// Its first operation waits for stable media.
    durable: bool,
    /// Data blocks and entries that an append must have room for.
    least: (u32, usize),
}

impl Front {
    /// Builds and issues appends while there is something to log and room for it.
    pub(crate) fn log(&mut self, ground: &mut Ground) {
        if ground.is_at_last_checkpoint() {
            // What is not in the last checkpoint may be lost with the power, and must not be
            // answered.
            return;
        }
        while ground.log().in_flight(Stream::Log) < ground.config().appends_in_flight {
            let Some(Pending { volume: first, durable, least }) = self.next_pending(ground) else {
                return;
            };
            let is_idle = ground.log().in_flight(Stream::Log) == 0;
            if durable && !is_idle {
                // One append that is stable by itself is cheaper than several and a sync.
                return;
            }
            if ground.pools().left(For::Append) <= BUFFERS_FOR_MOVES {
                return;
            }
            let Some(mut builder) = ground.begin_append(Want::changes(least)) else { return };
            let volumes = ground.places_count();
            for i in 0..volumes {
                self.take_from(ground, &mut builder, VolumeId(((first + i) % volumes) as u16));
            }
            self.next_volume = (first + 1) % volumes;
            let durable =
                builder.ops().iter().any(|&op| self.ops[op].durable || self.ops[op].direct);
            let alone = is_idle && ground.log().is_stable();
            let dsync = durable && (alone || mutated!(FuaCoversWhatIsBefore));
            // The peer before the device: the way is longer, and until the device's turn comes
            // nobody changes the buffer.
            ground
                .send_records(&builder, |id, sequence| self.is_waited_for(&builder, id, sequence));
            ground.issue(builder, dsync);
        }
    }

    /// Whether an operation in the append waits for a record of a volume to be on stable media.
    fn is_waited_for(&self, builder: &Builder, id: VolumeId, sequence: u64) -> bool {
        let waits = |&op: &OpId| {
            let op = &self.ops[op];
            (op.request.volume, op.sequence) == (id, sequence) && op.needs_stable()
        };
        builder.ops().iter().any(waits)
    }

    /// The next volume (in turn) that has something to log.
    fn next_pending(&mut self, ground: &mut Ground) -> Option<Pending> {
        let volumes = ground.places_count();
        for i in 0..volumes {
            let at = (self.next_volume + i) % volumes;
            let id = VolumeId(at as u16);
            let Some(volume) = ground.get(id) else { continue };
            let Some(room) = volume.record_room().filter(|_| !volume.groups_end()) else {
                continue;
            };
            let Some(&front) = self.volumes.of(id).pending.front() else { continue };
            let op = &self.ops[front];
            let durable = op.durable || op.direct;
            let sequence = volume.log().built();
            // Room was reserved for a record of an owner's.
            let least = op.incoming.map_or((1, 1), |incoming| incoming.size());
            let (data, zeroes) = match op.part(op.logged).filter(|_| op.incoming.is_none()) {
                Some(Part::Data(..)) => (true, false),
                Some(Part::Range(kind, ..)) => (false, kind != EntryKind::Invalidate),
                None => (false, false),
            };
            if data && room.blocks() == 0 || zeroes && room.ranges() == 0 {
                continue;
            }
            let full = data && ground.quota_left(id) == 0;
            let waits = full || zeroes && ground.extents_are_full();
            if !waits {
                return Some(Pending { volume: at, durable, least });
            }
            let noted = self.volumes.of_mut(id).quota_wait_noted.replace(sequence);
            ground.volume_mut(id).count_mut().quota_waits += u64::from(noted != Some(sequence));
        }
        None
    }

    /// Moves what fits of a volume's pending operations into the append.
    fn take_from(&mut self, ground: &mut Ground, builder: &mut Builder, id: VolumeId) {
        if ground.get(id).is_none_or(|volume| volume.groups_end()) {
            return;
        }
        let mut quota = ground.quota_left(id);
        loop {
            let Some(&front) = self.volumes.of(id).pending.front() else { return };
            let op = &mut self.ops[front];
            if let Some(incoming) = op.incoming {
                let buf = op.request.buf.expect("a record has a buffer");
                if !ground.take_record(builder, id, incoming, buf) {
                    return;
                }
                builder.push_op(front);
                op.unpublished += 1;
                self.volumes.of_mut(id).pending.pop_front();
                continue;
            }
            let room = ground.volume(id).record_room().filter(|_| builder.has_room_for_record());
            let Some(room) = room else { return };
            match op.part(op.logged) {
                Some(Part::Data(..)) if quota == 0 || room.blocks() == 0 => return,
                Some(Part::Range(kind, ..))
                    if kind != EntryKind::Invalidate
                        && (ground.ranges_left() == 0 || room.ranges() == 0) =>
                {
                    return;
                }
                _ => {}
            }
            builder.begin_record(id, RecordKind::Write);
            self.fill_record(ground, builder, id, &mut quota, room);
            let sequence = ground.volume(id).log().built() + 1;
            ground.end_record(builder, id, sequence);
            ground.note_built(builder);
        }
    }

    fn fill_record(
        &mut self,
        ground: &mut Ground,
        builder: &mut Builder,
        id: VolumeId,
        quota: &mut u64,
        room: RecordRoom,
    ) {
        let sequence = ground.volume(id).log().built() + 1;
        let clients = self.volumes.of_mut(id);
        let (mut blocks, mut ranges) = (room.blocks(), room.ranges());
        while let Some(&front) = clients.pending.front() {
            let op = &mut self.ops[front];
            let before = op.logged;
            while let Some(part) = op.part(op.logged) {
                let full = match part {
                    Part::Data(..) => *quota == 0 || blocks == 0,
                    Part::Range(kind, ..) => kind != EntryKind::Invalidate && ranges == 0,
                };
                if full || !builder.has_room_for_entry() {
                    break;
                }
                match part {
                    Part::Data(block, from) => {
                        ground.push_block(builder, block, 0, from);
                        *quota -= 1;
                        blocks -= 1;
                        ground.note_data_built(id, 1);
                    }
                    Part::Range(kind, block, len) => {
                        builder.push_range(kind, block, len);
                        if kind != EntryKind::Invalidate {
                            ground.budget_mut().add_extents(1);
                            ranges -= 1;
                        }
                    }
                }
                op.logged += 1;
            }
            if op.logged == before {
                return;
            }
            op.sequence = sequence;
            if builder.push_op(front) {
                op.unpublished += 1;
            }
            if op.part(op.logged).is_some() {
                return;
            }
            clients.pending.pop_front();
        }
    }

    /// The parts of an operation that were in an append have taken effect.
    pub(crate) fn published(&mut self, ground: &mut Ground, now: Nanos, id: OpId, append: u64) {
        let op = &mut self.ops[id];
        op.unpublished -= 1;
        // With an error (fenced) what is not in the log yet will never be.
        if op.unpublished > 0 || op.error.is_none() && op.part(op.logged).is_some() {
            return;
        }
        let vid = op.request.volume;
        self.volumes.of_mut(vid).published += 1;
        if let Some(incoming) = op.incoming {
            ground.volume_mut(vid).reserve_mut().note_published(incoming.room());
        }
        if op.needs_stable() {
            ground.log_mut().wait_stable(append, id);
        } else {
            self.go_on(ground, now, id);
        }
        ground.volume_mut(vid).recheck();
    }
}
