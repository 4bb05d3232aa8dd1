//! The machines joined to the core: what an owner's volume is to know of its copy, and what a
//! replica says of itself.

use crate::api::Copy;
use crate::api::{Party, Record};
use crate::driver::PeerLost;
use crate::limits::Limits;
use crate::owner::{Effect, Event, Owner, Phase};
use crate::peer::Peer;
use tidepool_engine::Engine;
use tidepool_engine::api::{Begin, Degraded, Have, Nanos, Pairing, RequestError, Room, VolumeId};

/// Room is told in steps of so many bytes.
const ROOM_STEP: u64 = 256 << 10;
/// A copy does not begin where there is less room than this: the owner's log would wait for it at
/// once.
const ROOM_LEAST: Room = Room { bytes: 1 << 20, ranges: 4 };

/// How far something is that a peer owes, and since when it has not gone on.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    at: u64,
    since: Option<Nanos>,
}

impl Progress {
    /// For how long it has been `at` this record although the peer `owes` more.
    fn stuck_ns(&mut self, now: Nanos, at: u64, owes: bool) -> Nanos {
        if at != self.at || !owes {
            (self.at, self.since) = (at, None);
        }
        if owes { now - *self.since.get_or_insert(now) } else { 0 }
    }
}

/// An owner's machine with the core that serves the volume.
#[derive(Debug)]
pub struct OwnerSession {
    volume: VolumeId,
    owner: Owner,
    limits: Limits,
    pairing: Pairing,
    /// What the peer had room for when it was connected.
    room: Room,
    /// Since when the log has been waiting for room at the peer.
    held_up_since: Option<Nanos>,
    /// When the newest beat was sent that the peer has said back on this connection; 0 before the
    /// first.
    followed_at: Nanos,
    /// When the newest beat was sent on this connection; 0 before the first.
    beat_at: Nanos,
    /// Since when there is this connection.
    connected_at: Nanos,
    /// What the peer has said last.
    said: Have,
    /// The newest record that the peer has confirmed, while it is behind.
    confirming: Progress,
    /// The newest record that the peer has on stable media, while it was asked for more.
    stabilising: Progress,
    /// The newest record here, while the next one waits for room at the peer although the image has
    /// everything.
    making_room: Progress,
    /// What write-back does without a copy.
    alone: Degraded,
}

impl OwnerSession {
    /// A volume that is served alone, as the record says. `alone` is what write-back does while
    /// there is no second copy, which the core has been told for the time before.
    ///
    /// # Panics
    /// If the core has no such volume, or the record names a copy.
    pub fn new(
        engine: &Engine,
        volume: VolumeId,
        record: Record,
        limits: Limits,
        alone: Degraded,
    ) -> OwnerSession {
        let log = engine.log_status(volume).expect("the volume is served");
        let owner = Owner::new(record, log.logged, log.drained);
        let (pairing, room) = (Pairing::Alone, Room::default());
        OwnerSession {
            volume,
            owner,
            limits,
            pairing,
            room,
            held_up_since: None,
            followed_at: 0,
            beat_at: 0,
            connected_at: 0,
            said: Have::default(),
            confirming: Progress::default(),
            stabilising: Progress::default(),
            making_room: Progress::default(),
            alone,
        }
    }

    /// What write-back does now, which only in sync has two logs that count.
    pub fn degraded(&self) -> Degraded {
        if matches!(self.owner.phase(), Phase::Sync { .. }) { Degraded::No } else { self.alone }
    }

    /// What write-back does from now on while there is no second copy.
    pub fn set_alone(&mut self, engine: &mut Engine, now: Nanos, alone: Degraded) {
        self.alone = alone;
        engine.set_degraded(now, self.volume, self.degraded());
    }

    /// The machine.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// A connection to a peer would be of use now.
    pub fn wants_peer(&self) -> bool {
        self.owner.wants_peer()
    }

    /// A peer with so much room is connected; false if that is not enough for a copy, or the volume
    /// is about to change its size or to go.
    pub fn peer_up(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        (peer, room): (Party, Room),
        effects: &mut Vec<Effect>,
    ) -> bool {
        let too_little = room.bytes < ROOM_LEAST.bytes || room.ranges < ROOM_LEAST.ranges;
        if too_little || !engine.may_pair(self.volume) {
            return false;
        }
        // What another one has said back, or this one earlier, is no word of it that it will wait.
        (self.room, self.followed_at, self.beat_at, self.connected_at) = (room, 0, 0, now);
        self.said = Have::default();
        for progress in [&mut self.confirming, &mut self.stabilising, &mut self.making_room] {
            *progress = Progress::default();
        }
        self.take(engine, now, Event::PeerUp(peer), effects);
        true
    }

    /// A beat is sent at this time.
    pub fn beats(&mut self, now: Nanos) {
        self.beat_at = now;
    }

    /// The peer has said back a beat that was sent at this time; false if none was sent so late.
    pub fn followed(&mut self, sent_at: Nanos) -> bool {
        let is_sent = sent_at <= self.beat_at;
        if is_sent {
            self.followed_at = self.followed_at.max(sent_at);
        }
        is_sent
    }

    /// Until when reads are taken; `None` is for ever. Where the record names a peer, or may, that
    /// one may be the owner as soon as it does not follow any more. What is lost for this host the
    /// core refuses by itself.
    pub fn leased_until(&self) -> Option<Nanos> {
        let alone = matches!(
            self.owner.phase(),
            Phase::Solo | Phase::Filling { .. } | Phase::Catching { .. } | Phase::Lost
        );
        (!alone && !mutated!(LeaseForgotten))
            .then_some(self.followed_at.saturating_add(self.limits.lease_ns))
    }

    /// Why the connection is to be given up, and a peer to be tried again later.
    pub fn parts_because(&mut self, engine: &Engine, now: Nanos) -> Option<PeerLost> {
        let log = engine.log_status(self.volume);
        let (confirmed, limit) = (self.owner.peer_has().0, self.limits.progress_ns);
        if self.confirming.stuck_ns(now, confirmed, confirmed < self.owner.logged()) > limit {
            return Some(PeerLost::ConfirmsNothing);
        }
        if let Some(log) = log {
            let owes = log.peer_stable < log.peer_asked;
            if self.stabilising.stuck_ns(now, log.peer_stable, owes) > limit {
                return Some(PeerLost::StabilisesNothing);
            }
            // What the image has it needs to keep no longer.
            let owes = log.held_up && log.drained >= log.logged;
            if self.making_room.stuck_ns(now, log.logged, owes) > limit {
                return Some(PeerLost::MakesNoRoom);
            }
        }
        let has_failed = log.is_some_and(|log| log.failed);
        // Where the device has failed the peer's copy is the one that counts, and has what is lost
        // here.
        if engine.has_loss(self.volume) && !has_failed {
            return Some(PeerLost::Loss);
        }
        let followed = self.followed_at.max(self.connected_at);
        if matches!(self.owner.phase(), Phase::Sync { .. })
            && !has_failed
            && now > followed + self.limits.lease_ns + self.limits.late_ns
        {
            return Some(PeerLost::EchoesLate);
        }
        // The copy counts for nothing yet and the log has to wait for it.
        let limit = match self.owner.phase() {
            Phase::Filling { begun: false, .. } => self.limits.beginning_ns,
            Phase::Filling { .. } | Phase::Catching { .. } => self.limits.held_up_ns,
            _ => return None,
        };
        let held_up = self.held_up_since.is_some_and(|since| now >= since + limit);
        held_up.then_some(PeerLost::NoRoom)
    }

    /// What the peer is to be told when the machine wants it to begin with the record after `base`.
    ///
    /// # Panics
    /// If the core has no such volume.
    pub fn begin(&self, engine: &Engine, generation: u64, base: u64) -> Begin {
        let size_bytes = engine.size_bytes(self.volume).expect("the volume is served");
        Begin { generation, size_bytes, base, room: self.room }
    }

    /// The image has everything up to here, as the peer may be told.
    pub fn drained(&self, engine: &Engine) -> u64 {
        engine.log_status(self.volume).map_or(0, |log| log.drained)
    }

    /// Takes an event in.
    pub fn take(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        event: Event,
        effects: &mut Vec<Effect>,
    ) {
        self.look(engine, now, effects);
        self.owner.take(event, effects);
        self.apply(engine, now);
    }

    /// The peer has said how far its copy goes, and how much it has room for; false, and nothing is
    /// changed, if it says that it has what was never logged here.
    pub fn has(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        have: Have,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Have { logged, stable, .. } = have;
        self.look(engine, now, effects);
        let counts = !self.owner.is_deaf();
        if counts && (logged > self.owner.logged() || stable > logged) {
            return false;
        }
        // The machine before the core: what the core acknowledges on it, the machine must allow.
        self.take(engine, now, Event::Have { logged, stable }, effects);
        if counts {
            let has_more = logged > self.said.logged
                || have.room.bytes > self.said.room.bytes
                || have.room.ranges > self.said.room.ranges;
            if has_more {
                self.held_up_since = None;
            }
            self.said = have;
            engine.peer_has(now, self.volume, have);
        }
        true
    }

    /// Looks how far the core is. To be called whenever it has done something, before anything else
    /// happens.
    pub fn look(&mut self, engine: &mut Engine, now: Nanos, effects: &mut Vec<Effect>) {
        // One that has let go of its backend is no owner's any more.
        let Some(log) = engine.log_status(self.volume).filter(|_| engine.is_attached(self.volume))
        else {
            return;
        };
        // What is about to be logged counts as logged: the copy gets it, or it is before the base.
        self.held_up_since = log.held_up.then(|| self.held_up_since.unwrap_or(now));
        self.owner.note(Event::Logged(log.logged));
        self.owner.note(Event::Stable(log.stable));
        if log.failed {
            self.owner.note(Event::Failed);
        }
        self.owner.sent(log.sent);
        self.owner.acknowledged(log.acknowledged);
        self.owner.take(Event::Drained(log.drained), effects);
        if log.failed {
            self.owner.take(Event::Failed, effects);
        }
        if log.fenced {
            self.owner.take(Event::Fenced, effects);
        }
        self.apply(engine, now);
    }

    fn apply(&mut self, engine: &mut Engine, now: Nanos) {
        if !engine.is_attached(self.volume) {
            return;
        }
        engine.set_degraded(now, self.volume, self.degraded());
        let pairing = self.owner.pairing();
        if pairing != self.pairing {
            let begins = self.pairing == Pairing::Alone;
            self.pairing = pairing;
            engine.set_pairing(now, self.volume, pairing);
            if let Phase::Filling { base, .. } = self.owner.phase()
                && begins
            {
                engine.peer_has(
                    now,
                    self.volume,
                    Have { logged: base, stable: base, room: self.room },
                );
            }
        }
    }
}

/// What is to be done for a peer's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerEffect {
    /// Tell the owner how far the copy goes.
    Have(Have),
    /// Give the core a flush of the replica; [`PeerSession::flushed`] gets its end.
    Flush,
    /// Give the connection up: nothing more can be taken.
    HangUp,
}

/// A peer's machine with how far the core is that logs the replica.
#[derive(Debug)]
pub struct PeerSession {
    /// `None` until a copy begins in a cache that knows nothing of the volume.
    volume: Option<VolumeId>,
    peer: Peer,
    logged: u64,
    told: Have,
    /// What the owner wants on stable media, and whether a flush is under way.
    wanted: u64,
    flushing: bool,
    /// The copy's beginning is not on stable media: what is heard of records is about an earlier
    /// one.
    beginning: bool,
    failed: bool,
}

impl PeerSession {
    /// A peer on this boot with what its core has of the volume, of the owner with this generation.
    /// Its own takeover, if it has tried one, is known not to be what `record` says.
    pub fn new(
        engine: &Engine,
        volume: Option<VolumeId>,
        me: Party,
        record: &Record,
        generation: u64,
    ) -> PeerSession {
        // What is still on its way to the log may never get there.
        let logged =
            volume.and_then(|volume| engine.log_status(volume)).map_or(0, |log| log.published);
        let copy = Copy { generation, base: 0, logged };
        PeerSession {
            volume,
            peer: Peer::new(me, record, Some(copy)),
            logged,
            told: Have::default(),
            wanted: 0,
            flushing: false,
            beginning: false,
            failed: false,
        }
    }

    /// The machine.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The machine, for what is not about records.
    pub fn peer_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }

    /// The copy begins anew: the core is to be told, and the owner when the core has it. No record
    /// is to be given to the core before [`PeerSession::begun`].
    ///
    /// # Errors
    /// See [`Peer::begin`].
    pub fn begin(&mut self, generation: u64, base: u64) -> Result<(), crate::Rejected> {
        self.peer.begin(generation, base)?;
        (self.logged, self.told, self.wanted, self.flushing) = (base, Have::default(), 0, false);
        (self.beginning, self.failed) = (true, false);
        Ok(())
    }

    /// The beginning is on stable media: records may be given to the core, for this volume.
    pub fn begun(&mut self, volume: VolumeId) {
        self.volume = Some(volume);
        self.beginning = false;
    }

    /// Whether records may be given to the core.
    pub fn takes_records(&self) -> bool {
        !self.beginning && !self.failed
    }

    /// The core has answered a record.
    pub fn logged(&mut self, sequence: u64, result: Result<(), RequestError>) {
        match result {
            _ if self.beginning => {}
            Ok(()) => self.logged = self.logged.max(sequence),
            Err(_) => self.failed = true,
        }
    }

    /// The owner wants everything up to here on stable media.
    pub fn stabilise(&mut self, sequence: u64) {
        self.wanted = self.wanted.max(sequence);
    }

    /// The owner's image has everything up to here.
    pub fn drained(&self, engine: &mut Engine, sequence: u64) {
        if let Some(volume) = self.volume.filter(|_| self.takes_records()) {
            engine.replica_drained(volume, sequence);
        }
    }

    /// A flush is complete.
    pub fn flushed(&mut self, result: Result<(), RequestError>) {
        if !self.beginning {
            self.flushing = false;
            self.failed |= result.is_err();
        }
    }

    /// What is to be done now; to be asked whenever the core has done something.
    pub fn look(&mut self, engine: &mut Engine, effects: &mut Vec<PeerEffect>) {
        let Some(volume) = self.volume.filter(|_| !self.beginning) else { return };
        let Some(log) = engine.log_status(volume) else { return };
        if self.failed || log.failed {
            return effects.push(PeerEffect::HangUp);
        }
        let mut room = engine.replica_room(volume);
        // In steps: the owner need not hear of every block.
        if room.bytes > ROOM_STEP {
            room.bytes = room.bytes / ROOM_STEP * ROOM_STEP;
        }
        let have = Have { logged: self.logged, stable: log.stable.min(self.logged), room };
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
