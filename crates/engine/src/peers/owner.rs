//! The owner's side of a second copy (RFC 9): what the peer is sent, and what waits until it has it.
//!
//! Who the peer is, when its copy is whole, and what the ownership record says is not decided here: the driver of the
//! core tells by [`Engine::set_pairing`] what the copy counts for, and by [`Engine::peer_has`] how far it goes.

use crate::api::{
    BLOCK_BYTES, Degraded, Have, LogStatus, Mode, Nanos, Pairing, PeerOp, RECORD_BLOCKS_MAX, Room, VolumeId,
};
use crate::base::mutation::mutated;
use crate::control::volume::{OpId, Task, Volume};
use crate::engine::Engine;
use crate::format::RecordKind;
use crate::front::ack::Waiting;
use crate::log::Builder;
use crate::peers::follower::room_of;
use std::collections::VecDeque;

/// Bytes of records that the peer has not confirmed, of one volume; at more, its log waits. A peer that does not read stops
/// acknowledgements of its volume, not memory and not the other volumes.
pub(crate) const WINDOW_BYTES: u64 = 8 << 20;
/// With room for fewer ranges of zeroes than this at the peer the drain is in a hurry.
const RANGES_SHORT: u64 = 8;

/// The copy of one volume at its peer.
#[derive(Default)]
pub(crate) struct Peer {
    /// Records are sent.
    sends: bool,
    /// Acknowledgements and drain wait for it.
    counts: bool,
    /// Newest record in its log, and on its stable media.
    logged: u64,
    stable: u64,
    /// What it was asked to bring to stable media, and what it will be asked for when it has done so.
    asked: u64,
    wanted: u64,
    /// Records that it has not confirmed, with the room that they take, and their sum.
    in_flight: VecDeque<(u64, Room)>,
    on_the_way: Room,
    /// What it has room for behind what it has confirmed.
    room: Room,
    /// Changes and flushes that wait for it.
    waiting: Vec<OpId>,
    /// Parts of the drain that wait for its stable media.
    drains: Vec<Waiting>,
    /// Something was lost here that it may have.
    pub(crate) lost: bool,
}

impl Peer {
    /// Whatever is acknowledged is in it.
    pub(crate) fn is_whole(&self) -> bool {
        self.counts && self.sends
    }

    /// Whether the copy goes as far as it has to.
    pub(crate) fn has(&self, sequence: u64, stable: bool) -> bool {
        !self.counts || sequence <= if stable { self.stable } else { self.logged }
    }

    /// The newest record in its log, whatever that counts for.
    pub(crate) fn logged(&self) -> u64 {
        self.logged
    }

    /// Takes out what waits for it.
    pub(crate) fn take_waiting(&mut self) -> (Vec<OpId>, Vec<Waiting>) {
        (std::mem::take(&mut self.waiting), std::mem::take(&mut self.drains))
    }
}

/// What one record may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordRoom {
    /// Data blocks.
    pub(crate) blocks: u64,
    /// Ranges of zeroes.
    pub(crate) ranges: u64,
}

impl Volume {
    /// What its next record may have, so that the peer keeps up and has room for all that is sent: without that rule it might
    /// be full of what gets clean only by what it has no room for. `None` if there is to be no record now.
    pub(crate) fn record_room(&self) -> Option<RecordRoom> {
        if self.is_stopped() {
            return None;
        }
        let Some(peer) = self.peer.as_ref().filter(|peer| peer.sends) else {
            return Some(RecordRoom { blocks: u64::MAX, ranges: u64::MAX });
        };
        if mutated!(RoomIgnored) {
            return Some(RecordRoom { blocks: RECORD_BLOCKS_MAX as u64, ranges: u64::MAX });
        }
        let left = peer.room.bytes.min(WINDOW_BYTES).saturating_sub(peer.on_the_way.bytes);
        let blocks = (left / BLOCK_BYTES as u64).checked_sub(1)?;
        let ranges = peer.room.ranges.saturating_sub(peer.on_the_way.ranges);
        Some(RecordRoom { blocks: blocks.min(RECORD_BLOCKS_MAX as u64), ranges })
    }

    /// Changes wait until there is a second copy that counts.
    fn is_stopped(&self) -> bool {
        // What is about to change or to go waits for what has come before.
        let idle = !self.closing && matches!(self.task, Task::None | Task::Snapshot { .. });
        // Nothing can have a copy before what is lost is overwritten.
        let whole = self.loss().is_none();
        self.degraded == Degraded::Stopped && self.spec.mode == Mode::WriteBack && idle && whole
    }

    /// The peer gets every record, and may have what is bad here.
    pub(crate) fn is_sending(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.sends)
    }

    /// The peer will soon have no room any more.
    pub(crate) fn peer_is_short(&self) -> bool {
        let short = |room: Room| room.bytes < WINDOW_BYTES || room.ranges < RANGES_SHORT;
        self.peer.as_ref().is_some_and(|peer| peer.sends && short(peer.room))
    }
}

impl Engine {
    /// Says what the volume's second copy counts for from now on; nothing of one that has no backend. Where none was, and one begins, it gets every record
    /// after [`LogStatus::logged`] as it is now; the log waits until [`Engine::peer_has`] tells of room for them. With
    /// [`Pairing::Paired`] the peer is asked to bring what it has to stable media, with [`Pairing::Parting`] our own log is.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn set_pairing(&mut self, now: Nanos, id: VolumeId, pairing: Pairing) {
        self.out.stir();
        if !self.volume(id).attached {
            return;
        }
        let volume = self.volume_mut(id);
        let base = volume.log.built();
        let begins = volume.peer.as_ref().is_none_or(|peer| !peer.sends);
        let peer = volume.peer.get_or_insert_default();
        peer.sends = matches!(pairing, Pairing::Filling | Pairing::Paired);
        peer.counts = matches!(pairing, Pairing::Paired | Pairing::Parting);
        if peer.sends && begins {
            (peer.logged, peer.stable, peer.asked, peer.wanted) = (base, base, base, base);
        }
        if begins || !peer.sends {
            peer.in_flight.clear();
            (peer.on_the_way, peer.room) = (Room::default(), Room::default());
        }
        if pairing == Pairing::Parting {
            self.sync.wanted = true;
        }
        if pairing == Pairing::Paired {
            self.stabilise_peer(id, base);
        }
        self.pump_peer(now, id);
        let volume = self.volume_mut(id);
        volume.recheck = true;
        if pairing == Pairing::Alone {
            volume.peer = None;
        }
    }

    /// The peer says how far its copy goes (see [`Engine::replica_room`]).
    pub fn peer_has(&mut self, now: Nanos, id: VolumeId, have: Have) {
        self.out.stir();
        let volume = self.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        let Some(peer) = volume.and_then(|volume| volume.peer.as_mut()) else { return };
        peer.logged = peer.logged.max(have.logged);
        peer.stable = peer.stable.max(have.stable);
        peer.room = have.room;
        let confirmed = |&&(sequence, _): &&(u64, Room)| sequence <= have.logged;
        while let Some(&(_, room)) = peer.in_flight.front().filter(confirmed) {
            peer.in_flight.pop_front();
            peer.on_the_way -= room;
        }
        let wanted = std::mem::take(&mut peer.wanted);
        self.stabilise_peer(id, wanted);
        self.pump_peer(now, id);
    }

    /// A second copy of the volume may begin: it is served, and neither its size nor its place is about to change. Nor has it lost
    /// anything: a copy would take what the image has instead for what the volume is.
    pub fn may_pair(&self, id: VolumeId) -> bool {
        let volume = self.volumes.get(id.0 as usize).and_then(Option::as_ref);
        let idle = |volume: &Volume| volume.attached && !volume.closing && volume.task == Task::None;
        !self.dead && volume.is_some_and(|volume| idle(volume) && !volume.fenced && volume.loss().is_none())
    }

    /// The volume has lost something since its copy began: that one is to be parted with, and what is there of it does not count as
    /// clean before.
    pub fn has_loss(&self, id: VolumeId) -> bool {
        self.volumes.get(id.0 as usize).and_then(Option::as_ref).is_some_and(|volume| volume.has_loss())
    }

    /// The volume is to work in write-back; `false` if there is no such volume.
    pub fn is_write_back(&self, id: VolumeId) -> bool {
        let volume = self.volumes.get(id.0 as usize).and_then(Option::as_ref);
        volume.is_some_and(|volume| volume.spec.mode == Mode::WriteBack)
    }

    /// Bytes that clients of the volume may address; `None` if there is no such volume.
    pub fn size_bytes(&self, id: VolumeId) -> Option<u64> {
        Some(self.volumes.get(id.0 as usize)?.as_ref()?.spec.size_bytes)
    }

    /// The volume has its backend, or is about to get it.
    pub fn is_attached(&self, id: VolumeId) -> bool {
        self.volumes.get(id.0 as usize).and_then(Option::as_ref).is_some_and(|volume| volume.attached)
    }

    /// How far the volume is; `None` if there is no such volume.
    pub fn log_status(&self, id: VolumeId) -> Option<LogStatus> {
        let volume = self.volumes.get(id.0 as usize)?.as_ref()?;
        Some(LogStatus {
            logged: volume.log.built(),
            published: volume.log.published(),
            stable: volume.log.durable(),
            sent: volume.progress.sent(),
            drained: volume.sequence_whole(),
            acknowledged: volume.sequence_acknowledged,
            failed: self.dead,
            held_up: self.is_held_up(volume),
            peer_asked: volume.peer.as_ref().map_or(0, |peer| peer.asked),
            peer_stable: volume.peer.as_ref().map_or(0, |peer| peer.stable),
            fenced: volume.fenced,
        })
    }

    /// Whether the volume's next change waits for room at its peer.
    fn is_held_up(&self, volume: &Volume) -> bool {
        let Some(&front) = volume.pending.front().filter(|_| !volume.is_stopped()) else { return false };
        let room = volume.record_room();
        let (blocks, ranges) = self.ops[front].needs_room();
        room.is_none_or(|room| room.blocks < blocks || room.ranges < ranges)
    }

    /// A record of the volume has been built, which is going to be sent.
    pub(crate) fn note_record(&mut self, builder: &Builder) {
        let (record, room) =
            builder.last_record().map(|(record, entries)| (record, room_of(entries))).expect("it was built");
        let volume = self.volume_mut(record.volume);
        if let Some(peer) = volume.peer.as_deref_mut().filter(|peer| peer.sends) {
            peer.in_flight.push_back((record.sequence, room));
            peer.on_the_way += room;
        }
    }

    /// Sends the records of an append that is about to be written to the device.
    pub(crate) fn send_records(&mut self, builder: &Builder) {
        for (record, buf) in builder.records() {
            let volume = self.volumes[record.volume.0 as usize].as_mut();
            let peer = volume.and_then(|volume| volume.peer.as_deref_mut()).filter(|peer| peer.sends);
            let Some(peer) = peer.filter(|_| record.kind == RecordKind::Write) else { continue };
            let waits = |&op: &OpId| {
                let op = &self.ops[op];
                (op.request.volume, op.sequence) == (record.volume, record.sequence) && op.needs_stable()
            };
            let durable = builder.append.ops.iter().any(waits);
            if durable {
                peer.asked = record.sequence;
            }
            let op = PeerOp::Record { sequence: record.sequence, buf, durable };
            self.out.peer(record.volume, op);
        }
    }

    /// Asks the peer to bring everything up to `sequence` to stable media, unless it has or is about to. What is asked
    /// for meanwhile is asked for together.
    pub(crate) fn stabilise_peer(&mut self, id: VolumeId, sequence: u64) {
        let Some(peer) = self.volume_mut(id).peer.as_deref_mut().filter(|peer| peer.sends) else { return };
        if sequence <= peer.asked.max(peer.stable) {
            return;
        }
        if peer.asked > peer.stable {
            peer.wanted = peer.wanted.max(sequence);
            return;
        }
        peer.asked = sequence;
        self.out.peer(id, PeerOp::Stabilise { sequence });
    }

    /// Whether the copy at the peer has what the operation has left in the log; if not, it waits until then.
    pub(crate) fn has_copy(&mut self, id: OpId) -> bool {
        let op = self.ops[id];
        let stable = op.needs_stable();
        let volume = self.volume_mut(op.request.volume);
        let refusing = volume.is_refusing();
        let Some(peer) = &mut volume.peer else { return true };
        // Whatever was acknowledged has to be stable when the record says that the peer is gone: nothing comes on top.
        let parting = peer.counts && !peer.sends;
        let has = !parting && peer.has(op.sequence, stable && !mutated!(PeersStableIgnored));
        // A volume that refuses answers at once.
        if refusing || has || mutated!(AckBeforePeer) {
            return true;
        }
        peer.waiting.push(id);
        if stable {
            self.stabilise_peer(op.request.volume, op.sequence);
        }
        false
    }

    /// Whether the copy at the peer has, on stable media, what this part of the drain takes to the backend; if not, it waits
    /// until then.
    pub(crate) fn has_drained_copy(&mut self, waiting: Waiting) -> bool {
        let Waiting { volume: id, sequence, .. } = waiting;
        let volume = self.volume_mut(id);
        let has =
            volume.peer.as_ref().is_none_or(|peer| peer.has(sequence, true)) || mutated!(DrainBeforePeer);
        if has {
            volume.progress.note_sent(sequence);
            return true;
        }
        let peer = volume.peer.as_mut().expect("what is waited for");
        peer.drains.push(waiting);
        self.stabilise_peer(id, sequence);
        false
    }

    /// Goes on with what the peer has now.
    fn pump_peer(&mut self, now: Nanos, id: VolumeId) {
        let Some(peer) = &mut self.volume_mut(id).peer else { return };
        let (ops, parts) = peer.take_waiting();
        parts.into_iter().for_each(|part| self.drain_stable(part));
        for op in ops {
            self.go_on(now, op);
        }
    }

    /// Takes out the operations of all volumes that wait for their peers.
    pub(crate) fn all_waiting_for_peers(&mut self) -> Vec<OpId> {
        let peers = self.volumes.iter_mut().flatten().filter_map(|volume| volume.peer.as_mut());
        peers.flat_map(|peer| std::mem::take(&mut peer.waiting)).collect()
    }
}
