//! A replica: the copy of another host's volume in this cache (RFC 9).
//!
//! It logs what the owner has logged, record for record, and has neither clients nor a backend until it is attached. What
//! it holds dirty becomes clean when the owner says how far its image goes. Which record a block came with is not kept: the
//! log is in the order of the records, so that its place there tells.

use crate::api::{
    BLOCK_BYTES, Begin, ControlError, RECORD_BLOCKS_MAX, Request, RequestError, Room, VolumeId, VolumeSpec,
    is_size,
};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::blocks::index::ObjectFlags;
use crate::blocks::ledger::Ledger;
use crate::blocks::ledger::{Place, objects_of};
use crate::blocks::space::Space;
use crate::control::volume::{Stage, Task, Volume};
use crate::control::{AddError, check_spec};
use crate::engine::Engine;
use crate::format::{COUNTER_MAX, EntryKind, RecordKind, crc32c};
use crate::log::build::Append;
use crate::log::build::Builder;
use crate::log::build::BuiltEntry;
use crate::log::build::RecordFields;
use crate::log::copy::{WINDOW_BYTES, is_zeroes};
use crate::recovery::replay::decode_record;
use std::collections::{BTreeMap, VecDeque};

/// Behind everything that is published.
const EVERYTHING: Place = (u64::MAX, 0);

/// An owner is told of no more room than this, beside what it has used and not been answered yet.
const ROOM_MAX: Room = Room { bytes: 2 * WINDOW_BYTES, ranges: 128 };
/// What a copy begins with, if the cache can give as much.
const ROOM_AT_BEGIN: Room = Room { bytes: WINDOW_BYTES, ranges: 32 };

/// Records whose places are remembered one by one. Of older ones, which nobody asks for any more, two and two share theirs.
const PLACES_MAX: usize = 1 << 16;

/// Where a record of the copy was logged.
#[derive(Debug, Clone, Copy)]
struct Logged {
    sequence: u64,
    /// Segment, and which life of it.
    segment: u32,
    life: u64,
    /// First block, and the first one behind it. No block where several records share the place behind them.
    first: u32,
    end: u32,
}

impl Logged {
    fn behind(&self) -> Place {
        (self.life, self.end)
    }
}

/// Has every other place of the older half stand for the one before it, too: what is clean before a place is clean before a later
/// one when the image has that record as well.
fn thin_out(places: &mut VecDeque<Logged>) {
    let half = places.len() / 2;
    let mut number = 0;
    places.retain_mut(|logged| {
        number += 1;
        if number <= half {
            logged.first = logged.end;
        }
        number > half || number % 2 == 0
    });
}

/// What is special about a volume that is a replica.
pub(crate) struct Replica {
    /// Nothing of an owner before this generation is taken.
    pub(crate) promised: u64,
    /// Newest record that was taken, perhaps not logged yet.
    pub(crate) taken: u64,
    /// It is this host's own volume, which gets back what its log has lost: what had room once has it again, whatever the quotas.
    pub(crate) own: bool,
    /// Records that the image may lack, oldest first: what the volume has before the end of one is of that record or
    /// of an earlier one.
    places: VecDeque<Logged>,
    /// Of objects with zeroes that are not in the image: the newest record that zeroed something in them.
    zeroed: BTreeMap<u32, u64>,
    /// What the owner was told and has not used yet.
    granted: Room,
    /// What records take that wait for the log, and what those take that the cache device does not have yet.
    pending: Room,
    unpublished: Room,
}

/// A record of the owner's log on its way into this one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incoming {
    pub(crate) sequence: u64,
    pub(crate) entries: u16,
    pub(crate) blocks: u16,
    /// Entries that are zeroes, which a checkpoint must have room for.
    pub(crate) ranges: u16,
}

impl Incoming {
    /// What it takes of what its owner was told.
    fn room(&self) -> Room {
        Room { bytes: (1 + u64::from(self.blocks)) * BLOCK_BYTES as u64, ranges: u64::from(self.ranges) }
    }
}

impl Volume {
    /// Blocks that are kept free for what its owner was told it may send.
    pub(crate) fn reserved_blocks(&self) -> u64 {
        let replica = self.replica.as_ref();
        replica.map_or(0, |replica| (replica.granted.bytes + replica.pending.bytes) / BLOCK_BYTES as u64)
    }
}

impl Engine {
    /// Adds an empty replica of another host's volume. The first record that it takes is the one after `base`, of the
    /// generation in `spec`, and its owner may send what there is `room` for. [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when it is
    /// recorded, and with it the promise to take nothing of an earlier owner.
    ///
    /// # Errors
    /// See [`AddError`]; nothing has changed then.
    pub fn add_replica(
        &mut self,
        spec: VolumeSpec,
        base: u64,
        room: Room,
        control: u64,
    ) -> Result<VolumeId, AddError> {
        check_spec(&spec)?;
        check_begin(spec.generation, spec.size_bytes, base).map_err(|_| AddError::Size(spec.size_bytes))?;
        self.ground.count_extents(room.ranges);
        if !self.has_room(room, Room::default()) {
            return Err(AddError::NoRoom);
        }
        let mut volume = Volume::new(spec);
        let promised = volume.spec.generation;
        volume.replica = Some(Box::new(Replica::new(promised)));
        volume.set_sequence(base, 0);
        volume.progress.restore_drained(base);
        let id = self.insert_volume(volume, control)?;
        self.grant(id, room);
        Ok(id)
    }

    /// Throws away what a replica holds, or a volume that is not attached since another host owns it now: it begins anew
    /// as `begin` says, and listens to its owner whatever was promised before: whether that may be is the caller's to know.
    /// [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when that is recorded; records that were not logged by now fail, and
    /// so does a beginning that is under way. Where there is no room for what the owner was told, nothing has changed. Returns whether it
    /// begins.
    pub fn begin_replica(&mut self, id: VolumeId, begin: Begin, control: u64) -> bool {
        self.ground.base.out.stir();
        if let Err(error) = check_begin(begin.generation, begin.size_bytes, begin.base) {
            self.ground.base.out.control_done(control, Err(error));
            return false;
        }
        let freed = self.room_freed(Some(id));
        if !self.has_room(begin.room, freed) {
            let result = Err(ControlError::NoRoom);
            self.ground.base.out.control_done(control, result);
            return false;
        }
        if let Some(Some(volume)) = self.ground.volumes.get_mut(id.0 as usize)
            && let Task::Begin { control, .. } = volume.task
        {
            // The owner has come back meanwhile: what it says now counts.
            volume.task = Task::None;
            self.ground.base.out.control_done(control, Err(ControlError::Busy));
        }
        let Some(volume) = self.controllable(id, control, false) else { return false };
        if volume.attached {
            let result = Err(ControlError::NotReplica);
            self.ground.base.out.control_done(control, result);
            return false;
        }
        let promised = volume.spec.generation;
        volume.replica.get_or_insert_with(|| Box::new(Replica::new(promised))).own = false;
        self.refuse_pending(id);
        self.withdraw_room(id);
        self.grant(id, begin.room);
        let volume = self.ground.volume_mut(id);
        volume.task = Task::Begin { control, begin };
        true
    }

    /// What the owner of a copy that begins now can be told there is room for; the copy is that of the volume `id`, whose
    /// content would be thrown away, or a new one.
    pub fn room_to_begin(&mut self, id: Option<VolumeId>) -> Room {
        if self.ground.base.dead {
            return Room::default();
        }
        let freed = self.room_freed(id);
        let quota = id.map_or_else(
            || self.ground.budget.quota_of_another(&self.ground.space),
            |id| self.ground.dirty_bytes_max(id),
        );
        let ranges = self.ranges_to_tell() + freed.ranges;
        Room {
            bytes: (self.blocks_left() * BLOCK_BYTES as u64 + freed.bytes)
                .min(quota)
                .min(ROOM_AT_BEGIN.bytes),
            ranges: ranges.min(self.ranges_share()).min(ROOM_AT_BEGIN.ranges),
        }
    }

    /// What there is more of when the copy in this volume, if there is one, is thrown away.
    fn room_freed(&mut self, id: Option<VolumeId>) -> Room {
        self.ground.count_extents(ROOM_AT_BEGIN.ranges);
        let volume = id.and_then(|id| self.ground.volumes.get(id.0 as usize)?.as_ref());
        let Some((id, volume)) = id.zip(volume) else { return Room::default() };
        let replica = volume.replica.as_ref();
        let told = replica.map_or(0, |replica| replica.granted.ranges + replica.pending.ranges);
        Room {
            bytes: (volume.ledger.held() + volume.reserved_blocks()) * BLOCK_BYTES as u64,
            ranges: self.ground.extents_of(id) + told,
        }
    }

    /// Whether there is so much room beside what is held and reserved, when `freed` is free.
    fn has_room(&self, room: Room, freed: Room) -> bool {
        room.bytes <= self.blocks_left() * BLOCK_BYTES as u64 + freed.bytes
            && room.ranges <= self.ranges_to_tell() + freed.ranges
    }

    /// Ranges of zeroes that owners of replicas may be told of beside what they were: never so many that others wait for ever.
    fn ranges_to_tell(&self) -> u64 {
        let all = self.ground.base.geo.extents_max() as u64 / 4;
        self.ground.ranges_left().min(all.saturating_sub(self.ground.budget.ranges_reserved()))
    }

    /// And of these one of them.
    fn ranges_share(&self) -> u64 {
        (self.ground.base.geo.extents_max() as u64 / 4 / self.ground.volumes.len().max(1) as u64).max(1)
    }

    fn grant(&mut self, id: VolumeId, room: Room) {
        self.ground.budget.reserve(room);
        self.ground.volume_mut(id).replica.as_mut().expect("a replica's owner is told").granted += room;
    }

    /// The owner of a replica is not heard any more: what it was told of room is others' again.
    pub fn withdraw_room(&mut self, id: VolumeId) {
        let volume = self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        if let Some(replica) = volume.and_then(|volume| volume.replica.as_mut()) {
            let granted = std::mem::take(&mut replica.granted);
            self.ground.budget.release(granted);
            self.ground.base.out.stir();
        }
    }

    /// Promises that nothing of an owner before `generation` is taken any more; [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when the
    /// promise is recorded.
    pub fn promise(&mut self, id: VolumeId, generation: u64, control: u64) {
        if self.controllable_replica(id, control) {
            let replica = self.ground.volume_mut(id).replica.as_mut().expect("checked just now");
            replica.promised = replica.promised.max(generation);
            self.refuse_pending(id);
            self.persist(control);
        }
    }

    /// The lowest generation that a replica listens to; `None` if the volume is none.
    pub fn promised(&self, id: VolumeId) -> Option<u64> {
        Some(self.ground.volumes.get(id.0 as usize)?.as_ref()?.replica.as_ref()?.promised)
    }

    /// What the owner of a replica may send behind what the cache device has (see [`LogStatus::published`](crate::api::LogStatus), and
    /// may be more than was answered): the room is kept for it from now on, until it is used
    /// or [`Engine::withdraw_room`] is called.
    pub fn replica_room(&mut self, id: VolumeId) -> Room {
        let volume = self.ground.volumes.get(id.0 as usize).and_then(Option::as_ref);
        let volume = volume.filter(|volume| !volume.closing && volume.task == Task::None);
        let Some(replica) = volume.and_then(|volume| volume.replica.as_ref()) else { return Room::default() };
        let mut told = replica.granted;
        told += replica.unpublished;
        let wanted = ROOM_MAX.ranges.min(self.ranges_share()).saturating_sub(told.ranges);
        self.ground.count_extents(wanted);
        let left = if self.ground.base.dead { 0 } else { self.quota_left(id) * BLOCK_BYTES as u64 };
        let more = Room {
            bytes: left.min(ROOM_MAX.bytes.saturating_sub(told.bytes)),
            ranges: self.ranges_to_tell().min(wanted),
        };
        self.grant(id, more);
        told += more;
        told
    }

    /// The cache device has a record.
    pub(crate) fn record_published(&mut self, id: VolumeId, incoming: Incoming) {
        let replica = self.ground.volume_mut(id).replica.as_mut().expect("a replica takes records");
        replica.unpublished -= incoming.room();
    }

    fn controllable_replica(&mut self, id: VolumeId, control: u64) -> bool {
        self.ground.base.out.stir();
        let Some(volume) = self.controllable(id, control, false) else { return false };
        let is_replica = volume.replica.is_some();
        if !is_replica {
            self.ground.base.out.control_done(control, Err(ControlError::NotReplica));
        }
        is_replica
    }

    /// The owner's image durably has everything up to the record `sequence`: what the replica holds of that is clean.
    pub fn replica_drained(&mut self, id: VolumeId, sequence: u64) {
        self.ground.base.out.stir();
        let sequence = sequence + u64::from(mutated!(CleanOneTooFar));
        let next = self.ground.base.checkpoints.next();
        let volume = self.ground.volume_mut(id);
        let Some(mut replica) = volume.replica.take() else { return };
        let mut place = (0, 0);
        while let Some(logged) = replica.places.front().filter(|logged| logged.sequence <= sequence) {
            place = logged.behind();
            replica.places.pop_front();
        }
        if sequence >= volume.log.published() {
            place = EVERYTHING;
        }
        let (mut drained, mut forgotten) = (0, false);
        let is_clean = |ledger: &mut Ledger, space: &mut Space, object| {
            let newest = replica.zeroed.get(&object).copied();
            let zeroes_done = place == EVERYTHING || newest.is_some_and(|newest| newest <= sequence);
            if ledger.flags(object).contains(ObjectFlags::ZERO_DIRTY) && zeroes_done {
                ledger.forget_zeroes(object);
                replica.zeroed.remove(&object);
                forgotten = true;
            }
            let (cleaned, is_dirty) = ledger.clean_before(space, object, place);
            drained += cleaned;
            !is_dirty && !ledger.flags(object).contains(ObjectFlags::ZERO_DIRTY)
        };
        self.drain.drained_elsewhere(&mut self.ground, (id, sequence), is_clean);
        let volume = self.ground.volume_mut(id);
        volume.count.drained_blocks += drained;
        volume.replica = Some(replica);
        if forgotten {
            volume.forgotten_until = next;
            self.ground.budget.note_extents_changed();
        }
        self.drain.update(&mut self.ground, id);
    }

    /// What the request brings, if it is the next record of the copy.
    pub(crate) fn admit_record(&self, request: &Request) -> Result<Incoming, RequestError> {
        let volume = self.ground.volumes.get(request.volume.0 as usize).and_then(Option::as_ref);
        let volume =
            volume.filter(|v| !v.closing && v.task == Task::None && self.ground.base.stopping.is_none());
        let volume = volume.ok_or(RequestError::Shutdown)?;
        let replica = volume.replica.as_ref().ok_or(RequestError::Invalid)?;
        if self.ground.base.dead || volume.is_refusing() {
            return Err(RequestError::Io);
        }
        if (request.offset, request.len) != (0, 0) {
            return Err(RequestError::Invalid);
        }
        let buf = request.buf.expect("a record has a buffer");
        let (block, data) = self.ground.base.arena.bytes(buf).split_at(BLOCK_BYTES);
        let record = decode_record(block).ok_or(RequestError::Invalid)?;
        let header = &record.header;
        let generation = header.generation.get();
        let incoming = Incoming {
            sequence: header.sequence.get(),
            entries: header.entries.get(),
            blocks: header.blocks.get(),
            ranges: record.entries.iter().filter(|entry| is_zeroes(entry.kind())).count() as u16,
        };
        let room = incoming.room();
        let has_room = match replica.own {
            true => {
                room.bytes <= self.blocks_left() * BLOCK_BYTES as u64
                    && room.ranges <= self.ground.ranges_left()
            }
            false => room.bytes <= replica.granted.bytes && room.ranges <= replica.granted.ranges,
        };
        let expected = header.kind == RecordKind::Write as u8
            && generation == volume.spec.generation
            && generation >= replica.promised
            && incoming.sequence == replica.taken + 1
            && has_room
            && usize::from(incoming.blocks) <= RECORD_BLOCKS_MAX
            && usize::from(incoming.blocks) * BLOCK_BYTES == data.len();
        let inside = record.entries.iter().all(|entry| {
            let len = if entry.has_data() { 1 } else { u64::from(entry.value()) };
            let known = !matches!(entry.kind(), None | Some(EntryKind::Void));
            known && len > 0 && entry.block() + len <= volume.blocks()
        });
        let mut blocks = data.chunks(BLOCK_BYTES);
        let mut with_data = record.entries.iter().filter(|entry| entry.has_data());
        let whole = with_data.all(|entry| blocks.next().is_some_and(|bytes| crc32c(bytes) == entry.value()));
        if expected && inside && whole { Ok(incoming) } else { Err(RequestError::Invalid) }
    }

    /// Begins to log a record of the owner's.
    pub(crate) fn start_record(&mut self, id: OpId, incoming: Incoming) {
        let op = &mut self.ops[id];
        op.stage = Stage::InLog;
        op.sequence = incoming.sequence;
        let vid = op.request.volume;
        if self.ground.volume(vid).replica.as_ref().is_some_and(|replica| replica.own) {
            self.grant(vid, incoming.room());
        }
        let volume = self.ground.volume_mut(vid);
        let replica = volume.replica.as_mut().expect("a replica takes records");
        replica.taken = incoming.sequence;
        replica.granted -= incoming.room();
        replica.pending += incoming.room();
        replica.unpublished += incoming.room();
        volume.pending.push_back(id);
        volume.entered += 1;
    }

    /// Puts a record of the owner's into an append as it is; false when there is no room for the whole of it.
    pub(crate) fn take_record(&mut self, builder: &mut Builder, id: OpId, incoming: Incoming) -> bool {
        let Incoming { sequence, entries, blocks, .. } = incoming;
        let (vid, buf) = (self.ops[id].request.volume, self.ops[id].request.buf);
        let buf = buf.expect("a record has a buffer");
        if !builder.has_room_for(u32::from(blocks), usize::from(entries)) {
            return false;
        }
        let record =
            decode_record(self.ground.base.arena.bytes(header_of(buf))).expect("it was read when it came");
        builder.begin_record(vid, RecordKind::Write);
        let mut from = BLOCK_BYTES;
        for entry in record.entries {
            if entry.has_data() {
                let to = builder.push_data(&self.ground.space, entry.block(), entry.value(), 0);
                self.ground.base.arena.copy(buf.slice(from, BLOCK_BYTES), to);
                from += BLOCK_BYTES;
                continue;
            }
            let kind = entry.kind().expect("it was looked at when it came");
            builder.push_range(kind, entry.block(), entry.value());
            self.ground.budget.add_extents(usize::from(is_zeroes(Some(kind))));
        }
        self.ground.budget.note_built(u64::from(blocks));
        let volume = self.ground.volumes[vid.0 as usize].as_mut().expect("its record is at hand");
        volume.unpublished_blocks += u64::from(blocks);
        volume.replica.as_mut().expect("a replica takes records").pending -= incoming.room();
        self.ground.budget.release(incoming.room());
        let fields = RecordFields::next(volume.spec.generation, sequence, &volume.log);
        let chain = builder.end_record(&mut self.ground.base, &self.ground.space, fields);
        volume.log.build(sequence, chain);
        volume.pending.pop_front();
        builder.push_op(id);
        self.ops[id].unpublished += 1;
        true
    }

    /// Remembers what of an append's records the owner's word about its image will be measured by.
    pub(crate) fn note_places(&mut self, append: &Append) {
        let (segment, life) =
            (append.segment(), self.ground.space.segments[append.segment() as usize].sequence);
        let blocks_of = |entries: &[BuiltEntry]| {
            1 + entries.iter().filter(|built| built.entry().has_data()).count() as u32
        };
        let mut end =
            append.end_block() - append.records().map(|(_, entries)| blocks_of(entries)).sum::<u32>();
        for (record, entries) in append.records() {
            let first = end;
            end += blocks_of(entries);
            let Some(Some(volume)) = self.ground.volumes.get_mut(record.volume().0 as usize) else {
                continue;
            };
            let Some(replica) = volume.replica.as_mut().filter(|_| record.kind() == RecordKind::Write) else {
                continue;
            };
            replica.note_zeroes(record.sequence(), entries);
            if replica.places.len() == PLACES_MAX {
                thin_out(&mut replica.places);
            }
            replica.places.push_back(Logged { sequence: record.sequence(), segment, life, first, end });
        }
    }

    /// Fails the records that are not in the log yet.
    fn refuse_pending(&mut self, id: VolumeId) {
        for op in std::mem::take(&mut self.ground.volume_mut(id).pending) {
            self.ground.volume_mut(id).published += 1;
            self.complete(op, Err(RequestError::Shutdown));
        }
        let volume = self.ground.volume_mut(id);
        let built = volume.log.built();
        // The owner may send them again.
        volume.replica.as_mut().expect("a replica takes records").taken = built;
        self.forget_pending_room(id);
    }

    /// What waited for the log of a replica does not wait any more.
    pub(crate) fn forget_pending_room(&mut self, id: VolumeId) {
        let volume = self.ground.volumes[id.0 as usize].as_mut();
        if let Some(replica) = volume.and_then(|volume| volume.replica.as_mut()) {
            let pending = std::mem::take(&mut replica.pending);
            replica.unpublished -= pending;
            self.ground.budget.release(pending);
        }
    }

    /// Empties a replica and lets it begin anew, as soon as nothing of it is on its way to the log.
    pub(crate) fn pump_begin(&mut self, id: VolumeId, control: u64, begin: Begin) {
        let Begin { generation, size_bytes, base, .. } = begin;
        if self.empty_replica(id) {
            let volume = self.ground.volume_mut(id);
            volume.spec.generation = generation;
            volume.spec.size_bytes = size_bytes;
            volume.replica.as_mut().expect("a replica begins").promised = generation;
            volume.set_sequence(base, 0);
            volume.progress.restore_drained(base);
            volume.task = Task::None;
            self.checkpoint.forget_sequence(id, base);
            self.persist(control);
        }
    }

    /// Drops all that a replica holds; false while something of it is on its way to the log, or not answered: no answer is to
    /// be taken for one to a record of the next copy.
    pub(crate) fn empty_replica(&mut self, id: VolumeId) -> bool {
        self.refuse_pending(id);
        let volume = self.ground.volume(id);
        if volume.published < volume.entered || volume.requests > 0 {
            return false;
        }
        let blocks = volume.blocks_held();
        self.ground.forget_blocks(id, 0, blocks);
        self.ground.budget.note_extents_changed();
        let volume = self.ground.volume_mut(id);
        volume.ledger.reset();
        self.drain.clear(id);
        volume.failed = false;
        let replica = volume.replica.as_mut().expect("it is a replica");
        replica.places.clear();
        replica.zeroed.clear();
        true
    }
}

impl Replica {
    pub(crate) fn new(promised: u64) -> Replica {
        let none = Room::default();
        Replica {
            promised,
            taken: 0,
            own: false,
            places: VecDeque::new(),
            zeroed: BTreeMap::new(),
            granted: none,
            pending: none,
            unpublished: none,
        }
    }

    /// Where a record was logged, if that is remembered and the image is not known to have it: segment, life of that, first block and
    /// how many.
    pub(crate) fn place_of_record(&self, sequence: u64) -> Option<(u32, u64, u32, u32)> {
        let at = self.places.binary_search_by_key(&sequence, |logged| logged.sequence).ok()?;
        let Logged { segment, life, first, end, .. } = self.places[at];
        (first < end).then_some((segment, life, first, end - first))
    }

    fn note_zeroes(&mut self, sequence: u64, entries: &[BuiltEntry]) {
        for entry in entries.iter().map(|built| built.entry()).filter(|entry| is_zeroes(entry.kind())) {
            for object in objects_of(entry.block()..entry.block() + u64::from(entry.value())) {
                self.zeroed.insert(object, sequence);
            }
        }
    }
}

/// Refuses what a checkpoint could not be read with: it comes from another host.
fn check_begin(generation: u64, size_bytes: u64, base: u64) -> Result<(), ControlError> {
    // Records come after it.
    let counters = generation < COUNTER_MAX && base < COUNTER_MAX / 2;
    if is_size(size_bytes) && counters { Ok(()) } else { Err(ControlError::Size(size_bytes)) }
}

/// The header block of a record in a buffer.
fn header_of(buf: Buf) -> Buf {
    buf.slice(0, BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_are_shared_are_those_of_the_newer_record() {
        let logged = |sequence: u64| {
            let first = sequence as u32 * 2;
            Logged { sequence, segment: 0, life: 9, first, end: first + 2 }
        };
        let mut replica = Replica::new(1);
        replica.places = (1..=8).map(logged).collect();
        thin_out(&mut replica.places);
        let left: Vec<_> = replica.places.iter().map(|logged| (logged.sequence, logged.behind())).collect();
        assert_eq!(left, [2, 4, 5, 6, 7, 8].map(|n| (n, (9, n as u32 * 2 + 2))));
        assert_eq!([1, 2, 4].map(|n| replica.place_of_record(n)), [None; 3]);
        assert_eq!(replica.place_of_record(5), Some((0, 9, 10, 2)));
    }
}
