//! The machines joined to the core: what an owner's volume is to know of its copy, and what a replica says of itself.

use crate::owner::{Effect, Event, Owner, Phase};
use crate::peer::{Copy, Peer};
use crate::record::{Party, Record};
use tidepool_engine::Engine;
use tidepool_engine::api::{Nanos, Pairing, VolumeId};

/// More room than this need not be told.
const ROOM_BYTES_MAX: u64 = 16 << 20;
/// Room is told in steps of so many bytes.
const ROOM_STEP: u64 = 256 << 10;

/// An owner's machine with the core that serves the volume.
#[derive(Debug)]
pub struct OwnerSession {
    volume: VolumeId,
    owner: Owner,
    pairing: Pairing,
}

impl OwnerSession {
    /// A volume that is served alone, as the record says.
    ///
    /// # Panics
    /// If the core has no such volume, or the record names a copy.
    pub fn new(engine: &Engine, volume: VolumeId, record: Record) -> OwnerSession {
        let log = engine.log_status(volume).expect("the volume is served");
        let owner = Owner::new(record, log.logged, log.drained);
        OwnerSession { volume, owner, pairing: Pairing::Alone }
    }

    /// The machine.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// A connection to a peer would be of use now.
    pub fn wants_peer(&self) -> bool {
        self.owner.phase() == Phase::Solo
    }

    /// The image has everything up to here, as the peer may be told.
    pub fn drained(&self, engine: &Engine) -> u64 {
        engine.log_status(self.volume).map_or(0, |log| log.drained)
    }

    /// Takes an event in.
    pub fn take(&mut self, engine: &mut Engine, now: Nanos, event: Event, effects: &mut Vec<Effect>) {
        self.look(engine, now, effects);
        self.owner.take(event, effects);
        self.apply(engine, now);
    }

    /// The peer has said how far its copy goes, and how much it has room for.
    pub fn has(&mut self, engine: &mut Engine, now: Nanos, have: Have, effects: &mut Vec<Effect>) {
        let Have { logged, stable, room_bytes } = have;
        let counts = !matches!(self.owner.phase(), Phase::Solo | Phase::Filling { begun: false, .. });
        // The machine before the core: what the core acknowledges on it, the machine must allow.
        self.take(engine, now, Event::Have { logged, stable }, effects);
        if counts {
            engine.peer_has(now, self.volume, (logged, stable), room_bytes);
        }
    }

    /// Looks how far the core is. To be called whenever it has done something, before anything else happens.
    pub fn look(&mut self, engine: &mut Engine, now: Nanos, effects: &mut Vec<Effect>) {
        let Some(log) = engine.log_status(self.volume) else { return };
        // What is about to be logged counts as logged: the copy gets it, or it is before the base.
        for event in [Event::Logged(log.logged), Event::Stable(log.stable), Event::Sent(log.sent)] {
            self.owner.note(event);
        }
        self.owner.acknowledged(log.acknowledged);
        self.owner.take(Event::Drained(log.drained), effects);
        self.apply(engine, now);
    }

    fn apply(&mut self, engine: &mut Engine, now: Nanos) {
        let pairing = self.owner.pairing();
        if pairing != self.pairing {
            self.pairing = pairing;
            engine.set_pairing(now, self.volume, pairing);
        }
    }
}

/// How far a copy goes, and how much more it has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Have {
    /// Newest record in the log.
    pub logged: u64,
    /// Newest record on stable media.
    pub stable: u64,
    /// Bytes of records behind `logged` that there is room for.
    pub room_bytes: u64,
}

/// What is to be done for a peer's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerEffect {
    /// Tell the owner how far the copy goes.
    Have(Have),
    /// Give the core a flush of the replica; [`PeerSession::flushed`] gets its end.
    Flush,
}

/// A peer's machine with how far the core is that logs the replica.
#[derive(Debug)]
pub struct PeerSession {
    volume: VolumeId,
    peer: Peer,
    logged: u64,
    told: Have,
    /// What the owner wants on stable media, and whether a flush is under way.
    wanted: u64,
    flushing: bool,
}

impl PeerSession {
    /// A peer on this boot with what its core has of the volume.
    pub fn new(engine: &Engine, volume: VolumeId, me: Party, promise: u64, generation: u64) -> PeerSession {
        let logged = engine.log_status(volume).map_or(0, |log| log.logged);
        let copy = Copy { generation, base: 0, logged };
        let peer = Peer::new(me, promise, Some(copy));
        PeerSession { volume, peer, logged, told: Have::default(), wanted: 0, flushing: false }
    }

    /// The machine.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The machine, for what is not about records.
    pub fn peer_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }

    /// The copy begins anew: the core is to be told, and the owner when the core has it.
    ///
    /// # Errors
    /// See [`Peer::begin`].
    pub fn begin(&mut self, generation: u64, base: u64) -> Result<(), crate::Rejected> {
        self.peer.begin(generation, base)?;
        (self.logged, self.told, self.wanted, self.flushing) = (base, Have::default(), 0, false);
        Ok(())
    }

    /// The core has logged a record.
    pub fn logged(&mut self, sequence: u64) {
        self.logged = self.logged.max(sequence);
    }

    /// The owner wants everything up to here on stable media.
    pub fn stabilise(&mut self, sequence: u64) {
        self.wanted = self.wanted.max(sequence);
    }

    /// A flush is complete.
    pub fn flushed(&mut self) {
        self.flushing = false;
    }

    /// What is to be done now; to be asked whenever the core has done something.
    pub fn look(&mut self, engine: &Engine, effects: &mut Vec<PeerEffect>) {
        let Some(log) = engine.log_status(self.volume) else { return };
        // In steps: the owner need not hear of every block.
        let room_bytes = engine.replica_room(self.volume).min(ROOM_BYTES_MAX) / ROOM_STEP * ROOM_STEP;
        let have = Have { logged: self.logged, stable: log.stable.min(self.logged), room_bytes };
        if have != self.told {
            self.told = have;
            effects.push(PeerEffect::Have(have));
        }
        // A flush covers what was answered before it.
        if self.wanted > have.stable && self.wanted <= have.logged && !self.flushing {
            self.flushing = true;
            effects.push(PeerEffect::Flush);
        }
    }
}
