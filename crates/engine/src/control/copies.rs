//! Copies of other hosts' volumes: they come, begin anew, promise, and are told how far their
//! owner's image is (RFC 9).

use crate::api::{
    AddError, BLOCK_BYTES, Begin, ControlError, RequestError, Room, VolumeId, VolumeSpec, is_size,
};
use crate::base::mutation::mutated;
use crate::engine::Engine;
use crate::format::COUNTER_MAX;
use crate::ground::task::Task;
use crate::ground::volume::Volume;
use crate::log::copy::WINDOW_BYTES;

/// An owner is told of no more room than this, beside what it has used and not been answered yet.
const ROOM_MAX: Room = Room { bytes: 2 * WINDOW_BYTES, ranges: 128 };
/// What a copy begins with, if the cache can give as much.
const ROOM_AT_BEGIN: Room = Room { bytes: WINDOW_BYTES, ranges: 32 };

impl Engine {
    /// Adds an empty replica of another host's volume. The first record that it takes is the one
    /// after `base`, of the generation in `spec`, and its owner may send what there is `room` for.
    /// [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when it is recorded, and with
    /// it the promise to take nothing of an earlier owner.
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
        spec.check()?;
        check_begin(spec.generation, spec.size_bytes, base)
            .map_err(|_| AddError::Size(spec.size_bytes))?;
        self.ground.count_extents(room.ranges);
        if !self.has_room(room, Room::default()) {
            return Err(AddError::NoRoom);
        }
        let id = self.insert_volume(Volume::copy_of(spec, base), control)?;
        self.peers.follow(id, base, false);
        self.ground.grant(id, room);
        Ok(id)
    }

    /// Throws away what a replica holds, or a volume that is not attached since another host owns
    /// it now: it begins anew as `begin` says, and listens to its owner whatever was promised
    /// before: whether that may be is the caller's to know.
    /// [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when that is recorded;
    /// records that were not logged by now fail, and so does a beginning that is under way. Where
    /// there is no room for what the owner was told, nothing has changed. Returns whether it
    /// begins.
    pub fn begin_replica(&mut self, id: VolumeId, begin: Begin, control: u64) -> bool {
        self.ground.stir();
        if let Err(error) = check_begin(begin.generation, begin.size_bytes, begin.base) {
            self.ground.control_done(control, Err(error));
            return false;
        }
        let freed = self.room_freed(Some(id));
        if !self.has_room(begin.room, freed) {
            let result = Err(ControlError::NoRoom);
            self.ground.control_done(control, result);
            return false;
        }
        if let Some(volume) = self.ground.get_mut(id)
            && let Task::Begin { control, .. } = volume.task()
        {
            // The owner has come back meanwhile: what it says now counts.
            volume.end_task();
            self.ground.control_done(control, Err(ControlError::Busy));
        }
        let Some(volume) = self.controllable(id, control, false) else { return false };
        if volume.is_attached() {
            let result = Err(ControlError::NotReplica);
            self.ground.control_done(control, result);
            return false;
        }
        volume.become_copy();
        self.peers.follow_another(id);
        self.refuse_pending(id);
        self.ground.withdraw_room(id);
        self.ground.grant(id, begin.room);
        let volume = self.ground.volume_mut(id);
        volume.begin(Task::Begin { control, begin });
        true
    }

    /// What the owner of a copy that begins now can be told there is room for; the copy is that of
    /// the volume `id`, whose content would be thrown away, or a new one.
    pub fn room_to_begin(&mut self, id: Option<VolumeId>) -> Room {
        if self.ground.is_dead() {
            return Room::default();
        }
        let freed = self.room_freed(id);
        let quota =
            id.map_or_else(|| self.ground.quota_of_another(), |id| self.ground.dirty_bytes_max(id));
        let ranges = self.ranges_to_tell() + freed.ranges;
        Room {
            bytes: (self.ground.blocks_left() * BLOCK_BYTES as u64 + freed.bytes)
                .min(quota)
                .min(ROOM_AT_BEGIN.bytes),
            ranges: ranges.min(self.ranges_share()).min(ROOM_AT_BEGIN.ranges),
        }
    }

    /// What there is more of when the copy in this volume, if there is one, is thrown away.
    fn room_freed(&mut self, id: Option<VolumeId>) -> Room {
        self.ground.count_extents(ROOM_AT_BEGIN.ranges);
        let volume = id.and_then(|id| self.ground.get(id));
        let Some((id, volume)) = id.zip(volume) else { return Room::default() };
        Room {
            bytes: (volume.ledger().held() + volume.reserve().blocks()) * BLOCK_BYTES as u64,
            ranges: self.ground.extents_of(id) + volume.reserve().ranges(),
        }
    }

    /// Whether there is so much room beside what is held and reserved, when `freed` is free.
    fn has_room(&self, room: Room, freed: Room) -> bool {
        room.bytes <= self.ground.blocks_left() * BLOCK_BYTES as u64 + freed.bytes
            && room.ranges <= self.ranges_to_tell() + freed.ranges
    }

    /// Ranges of zeroes that owners of replicas may be told of beside what they were: never so many
    /// that others wait for ever.
    fn ranges_to_tell(&self) -> u64 {
        let all = self.ground.geo().extents_max() as u64 / 4;
        self.ground.ranges_left().min(all.saturating_sub(self.ground.budget().ranges_reserved()))
    }

    /// And of these one of them.
    fn ranges_share(&self) -> u64 {
        (self.ground.geo().extents_max() as u64 / 4 / self.ground.places_count().max(1) as u64)
            .max(1)
    }

    /// Promises that nothing of an owner before `generation` is taken any more;
    /// [`Effect::ControlDone`](crate::api::Effect::ControlDone) tells when the promise is recorded.
    pub fn promise(&mut self, id: VolumeId, generation: u64, control: u64) {
        if self.controllable_replica(id, control) {
            self.ground.volume_mut(id).promise(generation);
            self.refuse_pending(id);
            self.persist(control);
        }
    }

    /// The lowest generation that a replica listens to; `None` if the volume is none.
    pub fn promised(&self, id: VolumeId) -> Option<u64> {
        self.ground.get(id)?.promised()
    }

    /// What the owner of a replica may send behind what the cache device has (see
    /// [`LogStatus::published`](crate::api::LogStatus), and may be more than was answered): the
    /// room is kept for it from now on, until it is used or [`Engine::withdraw_room`] is called.
    pub fn replica_room(&mut self, id: VolumeId) -> Room {
        let volume = self.ground.get(id);
        let volume = volume.filter(|volume| !volume.is_closing() && volume.task() == Task::None);
        let Some(volume) = volume.filter(|volume| volume.is_copy()) else { return Room::default() };
        let mut told = volume.reserve().told();
        let wanted = ROOM_MAX.ranges.min(self.ranges_share()).saturating_sub(told.ranges);
        self.ground.count_extents(wanted);
        let left =
            if self.ground.is_dead() { 0 } else { self.ground.quota_left(id) * BLOCK_BYTES as u64 };
        let more = Room {
            bytes: left.min(ROOM_MAX.bytes.saturating_sub(told.bytes)),
            ranges: self.ranges_to_tell().min(wanted),
        };
        self.ground.grant(id, more);
        told += more;
        told
    }

    fn controllable_replica(&mut self, id: VolumeId, control: u64) -> bool {
        self.ground.stir();
        let Some(volume) = self.controllable(id, control, false) else { return false };
        let is_replica = volume.is_copy();
        if !is_replica {
            self.ground.control_done(control, Err(ControlError::NotReplica));
        }
        is_replica
    }

    /// The owner's image durably has everything up to the record `sequence`: what the replica holds
    /// of that is clean.
    pub fn replica_drained(&mut self, id: VolumeId, sequence: u64) {
        self.ground.stir();
        let sequence = sequence + u64::from(mutated!(CleanOneTooFar));
        if !self.ground.volume(id).is_copy() {
            return;
        }
        let mut drained = self.peers.drained(&self.ground, id, sequence);
        self.drain.drained_elsewhere(&mut self.ground, (id, sequence), |ledger, space, object| {
            drained.clean(ledger, space, object)
        });
        let (blocks, forgotten) = drained.result();
        self.ground.volume_mut(id).count_mut().drained_blocks += blocks;
        if forgotten {
            self.ground.note_forgotten(id);
            self.ground.budget_mut().note_extents_changed();
        }
        self.drain.update(&mut self.ground, id);
    }

    /// Fails the records that are not in the log yet: the owner may send them again.
    fn refuse_pending(&mut self, id: VolumeId) {
        for op in self.front.take_pending(id) {
            self.front.complete(&mut self.ground, op, Err(RequestError::Shutdown));
        }
        self.peers.take_again(id, self.ground.volume(id).log().built());
        self.ground.forget_pending_room(id);
    }

    /// Empties a replica and lets it begin anew, as soon as nothing of it is on its way to the log.
    pub(crate) fn pump_begin(&mut self, id: VolumeId, control: u64, begin: Begin) {
        if self.empty_replica(id) {
            self.ground.volume_mut(id).begin_anew(begin);
            self.front.restore(id, begin.base);
            self.peers.take_again(id, begin.base);
            self.checkpoint.forget_sequence(id, begin.base);
            self.persist(control);
        }
    }

    /// Drops all that a replica holds; false while something of it is on its way to the log, or not
    /// answered: no answer is to be taken for one to a record of the next copy.
    pub(crate) fn empty_replica(&mut self, id: VolumeId) -> bool {
        self.refuse_pending(id);
        if !self.front.is_idle(id) {
            return false;
        }
        let blocks = self.ground.volume(id).blocks_held();
        self.ground.forget_blocks(id, 0, blocks);
        self.ground.budget_mut().note_extents_changed();
        self.ground.volume_mut(id).throw_away();
        self.drain.clear(id);
        self.peers.forget_records(id);
        true
    }

    /// The owner of a replica is not heard any more: what it was told of room is others' again.
    pub fn withdraw_room(&mut self, id: VolumeId) {
        self.ground.withdraw_room(id);
    }

    /// Has a volume that is not attached take records again, as the copy of what it was: from one
    /// past its newest on, of the same generation. What it holds stays. Should the process end
    /// before it is attached again, it is found as a copy.
    ///
    /// # Errors
    /// There is no such volume, or something else is being done with it.
    pub fn follow_on(&mut self, id: VolumeId) -> Result<(), ControlError> {
        let volume = self.ground.get_mut(id).ok_or(ControlError::Gone)?;
        if volume.is_closing() || volume.task() != Task::None {
            return Err(ControlError::Busy);
        }
        if volume.is_attached() {
            return Err(ControlError::NotReplica);
        }
        let newest = volume.log().published();
        if !volume.is_copy() {
            volume.become_copy();
            self.peers.follow(id, newest, true);
        }
        self.peers.follow_own(id);
        Ok(())
    }
}

/// Refuses what a checkpoint could not be read with: it comes from another host.
fn check_begin(generation: u64, size_bytes: u64, base: u64) -> Result<(), ControlError> {
    // Records come after it.
    let counters = generation < COUNTER_MAX && base < COUNTER_MAX / 2;
    if is_size(size_bytes) && counters { Ok(()) } else { Err(ControlError::Size(size_bytes)) }
}
