//! The owner's side of a second copy (RFC 9): what the peer is sent, and what waits until it has it.
//!
//! Who the peer is, when its copy is whole, and what the ownership record says is not decided here: whoever drives the
//! core tells by [`Engine::set_pairing`] what the copy counts for, and by [`Engine::peer_has`] how far it goes.

use crate::ack::Waiting;
use crate::api::{Effect, LogStatus, Nanos, Pairing, PeerOp, VolumeId};
use crate::engine::Engine;
use crate::format::RecordKind;
use crate::log::Builder;
use crate::volume::{OpId, Volume};
use std::collections::VecDeque;

/// Bytes of records that the peer has not confirmed, of one volume; at more, its log waits. A peer that does not read stops
/// acknowledgements of its volume, not memory and not the other volumes.
const WINDOW_BYTES: u64 = 8 << 20;
/// Data blocks of one record that is sent: what the peer's log finds room for whatever the sizes of its appends and segments.
pub(crate) const RECORD_BLOCKS_MAX: usize = 32;

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
    /// Sequence and bytes of records on their way, and their sum.
    in_flight: VecDeque<(u64, u64)>,
    in_flight_bytes: u64,
    /// Bytes that it has room for behind what it has confirmed.
    room_bytes: u64,
    /// Changes and flushes that wait for it.
    waiting: Vec<OpId>,
    /// Parts of the drain that wait for its stable media.
    drains: Vec<Waiting>,
}

impl Peer {
    /// Whether the copy goes as far as it has to.
    fn has(&self, sequence: u64, stable: bool) -> bool {
        !self.counts || sequence <= if stable { self.stable } else { self.logged }
    }

    /// Takes out the operations that wait for it.
    pub(crate) fn take_waiting(&mut self) -> Vec<OpId> {
        std::mem::take(&mut self.waiting)
    }
}

impl Volume {
    /// Its log may grow: the peer keeps up, and has room for what is sent. Without that rule it might be full of what gets
    /// clean only by what it has no room for.
    pub(crate) fn peer_keeps_up(&self) -> bool {
        self.peer.as_ref().is_none_or(|peer| peer.in_flight_bytes < peer.room_bytes.min(WINDOW_BYTES))
    }

    /// The peer will soon have no room any more.
    pub(crate) fn peer_is_short(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.sends && peer.room_bytes < WINDOW_BYTES)
    }

    /// Data blocks that its next record may have.
    pub(crate) fn record_blocks_max(&self) -> usize {
        if self.peer.is_some() { RECORD_BLOCKS_MAX } else { usize::MAX }
    }
}

impl Engine {
    /// Says what the volume's second copy counts for from now on. Where none was, and one begins, it gets every record
    /// after [`LogStatus::logged`] as it is now. With [`Pairing::Paired`] the peer is asked
    /// to bring what it has to stable media, with [`Pairing::Parting`] our own log is.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn set_pairing(&mut self, now: Nanos, id: VolumeId, pairing: Pairing) {
        self.stir();
        let volume = self.volume_mut(id);
        let base = volume.sequence_built;
        let begins = volume.peer.as_ref().is_none_or(|peer| !peer.sends);
        let peer = volume.peer.get_or_insert_default();
        peer.sends = matches!(pairing, Pairing::Filling | Pairing::Paired);
        peer.counts = matches!(pairing, Pairing::Paired | Pairing::Parting);
        if peer.sends && begins {
            (peer.logged, peer.stable, peer.asked, peer.wanted) = (base, base, base, base);
            peer.room_bytes = WINDOW_BYTES;
        }
        if !peer.sends {
            peer.in_flight.clear();
            peer.in_flight_bytes = 0;
        }
        if pairing == Pairing::Parting {
            self.sync.wanted = true;
        }
        if pairing == Pairing::Paired {
            self.stabilise_peer(id, base);
        }
        self.pump_peer(now, id);
        if pairing == Pairing::Alone {
            self.volume_mut(id).peer = None;
        }
    }

    /// The peer's copy goes up to `logged`, and on stable media up to `stable`; behind `logged` it has room for so many
    /// bytes of records (see [`Engine::replica_room`]).
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn peer_has(&mut self, now: Nanos, id: VolumeId, (logged, stable): (u64, u64), room_bytes: u64) {
        self.stir();
        let Some(peer) = &mut self.volume_mut(id).peer else { return };
        peer.logged = peer.logged.max(logged);
        peer.stable = peer.stable.max(stable);
        peer.room_bytes = room_bytes;
        while let Some(&(_, bytes)) = peer.in_flight.front().filter(|&&(sequence, _)| sequence <= logged) {
            peer.in_flight.pop_front();
            peer.in_flight_bytes -= bytes;
        }
        let wanted = std::mem::take(&mut peer.wanted);
        self.stabilise_peer(id, wanted);
        self.pump_peer(now, id);
    }

    /// How far the volume is; `None` if there is no such volume.
    pub fn log_status(&self, id: VolumeId) -> Option<LogStatus> {
        let volume = self.volumes.get(id.0 as usize)?.as_ref()?;
        Some(LogStatus {
            logged: volume.sequence_built,
            stable: volume.sequence_durable,
            sent: volume.sequence_sent,
            drained: volume.sequence_drained,
            acknowledged: volume.sequence_acknowledged,
        })
    }

    /// Sends the records of an append that is about to be written to the device.
    pub(crate) fn send_records(&mut self, builder: &Builder) {
        for (record, buf) in builder.records() {
            let volume = self.volumes[record.volume.0 as usize].as_mut();
            let peer = volume.and_then(|volume| volume.peer.as_deref_mut()).filter(|peer| peer.sends);
            let Some(peer) = peer.filter(|_| record.kind == RecordKind::Write) else { continue };
            peer.in_flight.push_back((record.sequence, u64::from(buf.len)));
            peer.in_flight_bytes += u64::from(buf.len);
            let waits = |&op: &OpId| {
                let op = &self.ops[op];
                (op.request.volume, op.sequence) == (record.volume, record.sequence) && op.needs_stable()
            };
            let durable = builder.append.ops.iter().any(waits);
            if durable {
                peer.asked = record.sequence;
            }
            let op = PeerOp::Record { sequence: record.sequence, buf, durable };
            self.effects.push_back(Effect::Peer { volume: record.volume, op });
        }
    }

    /// Asks the peer to bring everything up to `sequence` to stable media, unless it has or is about to. What is asked
    /// for meanwhile is asked for together.
    fn stabilise_peer(&mut self, id: VolumeId, sequence: u64) {
        let Some(peer) = self.volume_mut(id).peer.as_deref_mut().filter(|peer| peer.sends) else { return };
        if sequence <= peer.asked.max(peer.stable) {
            return;
        }
        if peer.asked > peer.stable {
            peer.wanted = peer.wanted.max(sequence);
            return;
        }
        peer.asked = sequence;
        self.effects.push_back(Effect::Peer { volume: id, op: PeerOp::Stabilise { sequence } });
    }

    /// Whether the copy at the peer has what the operation has left in the log; if not, it waits until then.
    pub(crate) fn has_copy(&mut self, id: OpId) -> bool {
        let op = self.ops[id];
        let stable = op.needs_stable();
        let volume = self.volume_mut(op.request.volume);
        let Some(peer) = &mut volume.peer else { return true };
        if peer.has(op.sequence, stable) {
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
        let has = volume.peer.as_ref().is_none_or(|peer| peer.has(sequence, true));
        if has {
            volume.sequence_sent = volume.sequence_sent.max(sequence);
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
        let drains = std::mem::take(&mut peer.drains);
        let waiting = peer.take_waiting();
        drains.into_iter().for_each(|waiting| self.drain_stable(waiting));
        for op in waiting {
            self.go_on(now, op);
        }
    }

    /// Takes out the operations of all volumes that wait for their peers.
    pub(crate) fn all_waiting_for_peers(&mut self) -> Vec<OpId> {
        let peers = self.volumes.iter_mut().flatten().filter_map(|volume| volume.peer.as_mut());
        peers.flat_map(|peer| peer.take_waiting()).collect()
    }
}
