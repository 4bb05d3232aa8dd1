//! Second copies (RFC 9): what a peer is sent and has, and what the owner of a copy that is here
//! may send.

use crate::api::{BLOCK_BYTES, PeerOp, Room, VolumeId};
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::format::RecordKind;
use crate::format::record::Record;
use crate::ground::Ground;
use crate::log::build::{Builder, BuiltEntry};
use crate::log::copy::{Incoming, is_zeroes, room_of};
use crate::log::stable::Waiting;

impl Ground {
    /// A record of a volume is built.
    pub(crate) fn note_built(&mut self, builder: &Builder) {
        let (record, entries) = builder.last_record().expect("it was built");
        let room = room_of(entries.iter().map(BuiltEntry::entry));
        let (id, sequence) = (record.volume(), record.sequence());
        if let Some(copy) = self.volume_mut(id).copy_mut() {
            copy.note_built(sequence, room);
        }
    }

    /// Sends the records of an append that is about to be written to the device, each to the peer
    /// of its volume. `durable` says of a record of a volume whether somebody waits for it to be on
    /// stable media.
    pub(crate) fn send_records(
        &mut self,
        builder: &Builder,
        durable: impl Fn(VolumeId, u64) -> bool,
    ) {
        for (record, buf) in builder.records() {
            let (id, sequence) = (record.volume(), record.sequence());
            let volume = self.volumes[id.0 as usize].as_mut();
            let copy = volume.and_then(|volume| volume.copy_mut()).filter(|copy| copy.sends());
            let Some(copy) = copy.filter(|_| record.kind() == RecordKind::Write) else { continue };
            let durable = durable(id, sequence);
            if durable {
                copy.note_asked(sequence);
            }
            self.base.out_mut().peer(id, PeerOp::Record { sequence, buf, durable });
        }
    }

    /// Asks the peer to bring everything up to `sequence` to stable media, unless it has or is
    /// about to.
    pub(crate) fn stabilise_copy(&mut self, id: VolumeId, sequence: u64) {
        let copy = self.volume_mut(id).copy_mut();
        if let Some(sequence) = copy.and_then(|copy| copy.ask(sequence)) {
            self.base.out_mut().peer(id, PeerOp::Stabilise { sequence });
        }
    }

    /// Whether the copy at the peer has what an operation has left in the log up to the record
    /// `sequence`, on `stable` media if that is needed; if not, the operation waits until then.
    pub(crate) fn has_copy(&mut self, id: VolumeId, op: OpId, sequence: u64, stable: bool) -> bool {
        let volume = self.volume_mut(id);
        let refuses = volume.is_refusing();
        let Some(copy) = volume.copy_mut() else { return true };
        // Nothing comes on top of what has to be stable when the record says that the peer is gone.
        let has = !copy.is_parting() && copy.has(sequence, stable && !mutated!(PeersStableIgnored));
        // A volume that refuses answers at once.
        if refuses || has || mutated!(AckBeforePeer) {
            return true;
        }
        copy.wait(op);
        if stable {
            self.stabilise_copy(id, sequence);
        }
        false
    }

    /// Whether the copy at the peer has, on stable media, what this part of the drain takes to the
    /// backend; if not, the part waits until then.
    pub(crate) fn has_drained_copy(&mut self, part: Waiting) -> bool {
        let (id, sequence) = (part.volume(), part.sequence());
        let volume = self.volume_mut(id);
        let has =
            volume.copy().is_none_or(|copy| copy.has(sequence, true)) || mutated!(DrainBeforePeer);
        if has {
            volume.progress_mut().advance_sent(sequence);
            return true;
        }
        volume.copy_mut().expect("what is waited for").defer(part);
        self.stabilise_copy(id, sequence);
        false
    }

    /// The owner of a copy is told that it may send so much more.
    pub(crate) fn grant(&mut self, id: VolumeId, room: Room) {
        self.budget.reserve(room);
        self.volume_mut(id).reserve_mut().grant(room);
    }

    /// The owner of a copy is not heard any more: what it was told of room is others' again.
    pub(crate) fn withdraw_room(&mut self, id: VolumeId) {
        if let Some(volume) = self.get_mut(id).filter(|volume| volume.is_copy()) {
            let withdrawn = volume.reserve_mut().withdraw();
            self.budget.release(withdrawn);
            self.base.stir();
        }
    }

    /// What waited for the log of a copy does not wait any more.
    pub(crate) fn forget_pending_room(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes[id.0 as usize].as_mut() {
            self.budget.release(volume.reserve_mut().forget_pending());
        }
    }

    /// Puts a record of the owner's, which is in `buf`, into an append as it is; false when there
    /// is no room for the whole of it.
    pub(crate) fn take_record(
        &mut self,
        builder: &mut Builder,
        id: VolumeId,
        incoming: Incoming,
        buf: Buf,
    ) -> bool {
        let (blocks, entries) = incoming.size();
        if !builder.has_room_for(blocks, entries) {
            return false;
        }
        let header = buf.slice(0, BLOCK_BYTES);
        let record = Record::decode(self.base.bytes(header)).expect("it was read when it came");
        builder.begin_record(id, RecordKind::Write);
        let mut from = BLOCK_BYTES;
        for entry in record.entries {
            if entry.has_data() {
                let to = builder.push_data(entry.block(), entry.value(), 0);
                self.base.copy(buf.slice(from, BLOCK_BYTES), to);
                from += BLOCK_BYTES;
                continue;
            }
            let kind = entry.kind().expect("it was looked at when it came");
            builder.push_range(kind, entry.block(), entry.value());
            self.budget.add_extents(usize::from(is_zeroes(Some(kind))));
        }
        self.note_data_built(id, u64::from(blocks));
        let volume = self.volume_mut(id);
        volume.reserve_mut().note_built(incoming.room());
        self.budget.release(incoming.room());
        self.end_record(builder, id, incoming.sequence());
        true
    }
}
