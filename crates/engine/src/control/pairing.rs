//! The owner's side of a second copy (RFC 9): what it counts for, and how far it is.
//!
//! Who the peer is, when its copy is whole, and what the ownership record says is not decided here:
//! the driver of the core tells by [`Engine::set_pairing`] what the copy counts for, and by
//! [`Engine::peer_has`] how far it goes.

use crate::api::{Have, LogStatus, Mode, Nanos, Pairing, PeerOp, VolumeId};
use crate::engine::Engine;
use crate::ground::task::Task;
use crate::ground::volume::Volume;

impl Engine {
    /// Says what the volume's second copy counts for from now on; nothing of one that has no
    /// backend. Where none was, and one begins, it gets every record after [`LogStatus::logged`] as
    /// it is now; the log waits until [`Engine::peer_has`] tells of room for them. With
    /// [`Pairing::Paired`] the peer is asked to bring what it has to stable media, with
    /// [`Pairing::Parting`] our own log is.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn set_pairing(&mut self, now: Nanos, id: VolumeId, pairing: Pairing) {
        self.ground.stir();
        if !self.ground.volume(id).is_attached() {
            return;
        }
        let volume = self.ground.volume_mut(id);
        let built = volume.log().built();
        volume.pair(pairing);
        if pairing == Pairing::Parting {
            self.ground.log_mut().want_stable();
        }
        if pairing == Pairing::Paired {
            self.ground.stabilise_copy(id, built);
        }
        self.pump_peer(now, id);
        let volume = self.ground.volume_mut(id);
        volume.recheck();
        if pairing == Pairing::Alone {
            volume.forget_copy();
        }
    }

    /// The peer says how far its copy goes (see [`Engine::replica_room`]).
    pub fn peer_has(&mut self, now: Nanos, id: VolumeId, have: Have) {
        self.ground.stir();
        let volume = self.ground.get_mut(id);
        let Some(copy) = volume.and_then(|volume| volume.copy_mut()) else { return };
        if let Some(sequence) = copy.confirm(have) {
            self.ground.out_mut().peer(id, PeerOp::Stabilise { sequence });
        }
        self.pump_peer(now, id);
    }

    /// A second copy of the volume may begin: it is served, and neither its size nor its place is
    /// about to change. Nor has it lost anything: a copy would take what the image has instead for
    /// what the volume is.
    pub fn may_pair(&self, id: VolumeId) -> bool {
        let volume = self.ground.get(id);
        let idle = |volume: &Volume| {
            volume.is_attached() && !volume.is_closing() && volume.task() == Task::None
        };
        !self.ground.is_dead()
            && volume.is_some_and(|volume| {
                idle(volume) && !volume.is_fenced() && volume.loss().is_none()
            })
    }

    /// The volume has lost something since its copy began: that one is to be parted with, and what
    /// is there of it does not count as clean before.
    pub fn has_loss(&self, id: VolumeId) -> bool {
        self.ground.get(id).is_some_and(Volume::has_loss)
    }

    /// The volume is to work in write-back; `false` if there is no such volume.
    pub fn is_write_back(&self, id: VolumeId) -> bool {
        let volume = self.ground.get(id);
        volume.is_some_and(|volume| volume.spec().mode == Mode::WriteBack)
    }

    /// Bytes that clients of the volume may address; `None` if there is no such volume.
    pub fn size_bytes(&self, id: VolumeId) -> Option<u64> {
        Some(self.ground.get(id)?.spec().size_bytes)
    }

    /// The volume has its backend, or is about to get it.
    pub fn is_attached(&self, id: VolumeId) -> bool {
        self.ground.get(id).is_some_and(|volume| volume.is_attached())
    }

    /// How far the volume is; `None` if there is no such volume.
    pub fn log_status(&self, id: VolumeId) -> Option<LogStatus> {
        let volume = self.ground.get(id)?;
        Some(LogStatus {
            logged: volume.log().built(),
            published: volume.log().published(),
            stable: volume.log().durable(),
            sent: volume.progress().sent(),
            drained: volume.sequence_whole(),
            acknowledged: self.front.acknowledged(id),
            failed: self.ground.is_dead(),
            held_up: self.front.is_held_up(&self.ground, id),
            peer_asked: volume.copy().map_or(0, |copy| copy.asked()),
            peer_stable: volume.copy().map_or(0, |copy| copy.stable()),
            fenced: volume.is_fenced(),
        })
    }

    /// The peer says what it has of a block that it was asked for: a good copy, or none.
    pub fn peer_block(
        &mut self,
        now: Nanos,
        id: VolumeId,
        block: u64,
        crc: u32,
        data: Option<&[u8]>,
    ) {
        self.peers.answered(&mut self.ground, now, (id, block, crc), data);
    }

    /// Goes on with what the peer has now.
    fn pump_peer(&mut self, now: Nanos, id: VolumeId) {
        let Some(copy) = self.ground.volume_mut(id).copy_mut() else { return };
        let (ops, parts) = copy.take_waiting();
        parts.into_iter().for_each(|part| self.drain.stable(&mut self.ground, part));
        for op in ops {
            self.front.go_on(&mut self.ground, now, op);
        }
    }
}
