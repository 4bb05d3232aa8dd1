//! The owner's side: when a write may be acknowledged and drained, and what becomes of the
//! ownership record when the peer comes and goes.

use crate::api::{Copies, Party, Record};
use tidepool_engine::api::Pairing;

/// Where the second copy stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// There is none, and the record says so. Only here one may begin.
    Solo,
    /// A peer gets every record from `base` on; it is whole when the image has everything before.
    Filling {
        /// Who.
        peer: Party,
        /// Newest sequence that it does not get.
        base: u64,
        /// It has thrown away what it had, and promised to take nothing of an earlier owner.
        begun: bool,
    },
    /// It counts for whatever comes, and is whole as soon as it has on stable media what was logged
    /// before it did: that may be acknowledged, and be in the image, without it. The record says
    /// that there is none.
    Catching {
        /// Who.
        peer: Party,
        /// Newest sequence of that.
        through: u64,
    },
    /// It is whole; the record is being changed. It may say either.
    Joining {
        /// Who.
        peer: Party,
        /// The connection is gone.
        down: bool,
    },
    /// The record says that whatever is acknowledged is in both, or that it is in the peer's since
    /// our cache device has failed.
    Sync {
        /// Who.
        peer: Party,
    },
    /// The cache device has failed, and the record is being changed to say that only the peer's
    /// copy counts.
    Conceding {
        /// Who.
        peer: Party,
        /// The connection is gone.
        down: bool,
    },
    /// The peer is gone, and the record does not say so yet.
    Leaving {
        /// Who.
        peer: Party,
        /// Our log is stable, and the record is being changed.
        writing: bool,
    },
    /// Another owner has the volume.
    Lost,
}

/// What happens to an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Our log goes up to here.
    Logged(u64),
    /// It is on stable media up to here.
    Stable(u64),
    /// Something of up to here was sent to the backend.
    Sent(u64),
    /// The image has everything up to here.
    Drained(u64),
    /// The cache device has failed: nothing more becomes stable on it, nor is logged.
    Failed,
    /// Nothing of ours reaches the image any more: another host has it.
    Fenced,
    /// A peer is connected.
    PeerUp(Party),
    /// The connection is gone, or silent for too long.
    PeerDown,
    /// The peer has begun its copy.
    Begun,
    /// How far the peer's copy goes.
    Have {
        /// In its log.
        logged: u64,
        /// On its stable media.
        stable: u64,
    },
    /// The record was changed as asked for.
    Written,
    /// It may have been changed or not: this is what stands there now.
    Found(Record),
}

/// What an owner wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Tell the peer to begin: records after `base` follow.
    Begin {
        /// Of this owner.
        generation: u64,
        /// Newest sequence that does not come.
        base: u64,
    },
    /// Bring the log to stable media.
    Stabilise,
    /// Change the record, if it still is `before`. Nothing else is asked for until the outcome is
    /// known.
    Write {
        /// What stands there.
        before: Record,
        /// What shall.
        after: Record,
    },
    /// Stop serving: the volume is another's.
    Close,
}

/// An owner that serves a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    record: Record,
    phase: Phase,
    logged: u64,
    stable: u64,
    sent: u64,
    drained: u64,
    peer_logged: u64,
    peer_stable: u64,
    acknowledged: u64,
    failed: bool,
}

impl Owner {
    /// An owner whose record stands and says that it is alone. Its log goes up to `logged` and is
    /// stable.
    ///
    /// # Panics
    /// If the record says otherwise.
    pub fn new(record: Record, logged: u64, drained: u64) -> Owner {
        assert_eq!(record.copies, Copies::Solo, "an owner begins alone");
        Owner {
            record,
            phase: Phase::Solo,
            logged,
            stable: logged,
            sent: logged,
            drained,
            peer_logged: 0,
            peer_stable: 0,
            acknowledged: logged,
            failed: false,
        }
    }

    /// A peer would be of use now.
    pub fn wants_peer(&self) -> bool {
        self.phase == Phase::Solo && !self.failed
    }

    /// Where the second copy stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The record as it was last known.
    pub fn record(&self) -> Record {
        self.record
    }

    /// Newest sequence in our log.
    pub fn logged(&self) -> u64 {
        self.logged
    }

    /// Newest sequences in the peer's log and on its stable media, as it has said.
    pub fn peer_has(&self) -> (u64, u64) {
        (self.peer_logged, self.peer_stable)
    }

    /// What the copy counts for, as the core is to be told.
    pub fn pairing(&self) -> Pairing {
        match self.phase {
            Phase::Solo => Pairing::Alone,
            Phase::Filling { .. } => Pairing::Filling,
            Phase::Catching { .. }
            | Phase::Joining { down: false, .. }
            | Phase::Sync { .. }
            | Phase::Conceding { down: false, .. } => Pairing::Paired,
            Phase::Joining { down: true, .. }
            | Phase::Conceding { down: true, .. }
            | Phase::Leaving { .. }
            | Phase::Lost => Pairing::Parting,
        }
    }

    /// Newest sequence that may be acknowledged. When the peer is gone it is what has been: all of
    /// that is to be stable before the record says so.
    pub fn may_acknowledge(&self) -> u64 {
        let limit = match self.pairing() {
            Pairing::Alone | Pairing::Filling => self.logged,
            Pairing::Paired => self.logged.min(self.peer_logged),
            Pairing::Parting => 0,
        };
        let before = match self.phase {
            Phase::Catching { through, .. } => through,
            _ => 0,
        };
        limit.max(before).max(self.acknowledged)
    }

    /// Newest sequence of which a flush may say that it is stable, and that may go to the backend:
    /// never what the copy that may take over does not have.
    pub fn may_drain(&self) -> u64 {
        // On a dead device nothing becomes stable: what can be read of it goes to the image while
        // it can.
        let own = if self.failed { self.logged } else { self.stable };
        match self.pairing() {
            Pairing::Alone | Pairing::Filling => own,
            _ if self.phase == Phase::Lost => 0,
            Pairing::Paired | Pairing::Parting => own.min(self.peer_stable),
        }
    }

    /// Everything up to `sequence` was acknowledged.
    ///
    /// # Panics
    /// If it may not.
    pub fn acknowledged(&mut self, sequence: u64) {
        assert!(sequence <= self.may_acknowledge(), "{sequence} may not be acknowledged: {self:?}");
        self.acknowledged = self.acknowledged.max(sequence);
    }

    /// Something of up to `sequence` may have been sent to the backend.
    ///
    /// # Panics
    /// If it may not.
    pub(crate) fn sent(&mut self, sequence: u64) {
        assert!(
            sequence <= self.may_drain().max(self.sent),
            "{sequence} may not be in the image: {self:?}"
        );
        self.sent = self.sent.max(sequence);
    }

    /// Takes in how far its log is, without taking the steps that this makes possible: others are
    /// to be told first.
    pub(crate) fn note(&mut self, event: Event) {
        match event {
            Event::Logged(sequence) => self.logged = self.logged.max(sequence),
            Event::Stable(sequence) => self.stable = self.stable.max(sequence),
            Event::Sent(sequence) => self.sent = self.sent.max(sequence),
            Event::Drained(sequence) => self.drained = self.drained.max(sequence),
            Event::Failed => self.failed = true,
            _ => {}
        }
    }

    /// Takes an event in; what is to be done goes to `effects`.
    pub fn take(&mut self, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Logged(_) | Event::Stable(_) | Event::Sent(_) | Event::Drained(_) => {
                self.note(event)
            }
            Event::Failed => self.fail(),
            Event::Fenced => self.lose(effects),
            Event::PeerUp(peer) => self.peer_up(peer, effects),
            Event::PeerDown => self.peer_down(effects),
            Event::Begun => {
                if let Phase::Filling { begun, .. } = &mut self.phase {
                    *begun = true;
                }
            }
            // Before it has begun it may speak of a copy from an earlier time.
            Event::Have { .. } if self.is_deaf() => {}
            Event::Have { logged, stable } => {
                self.peer_logged = self.peer_logged.max(logged);
                self.peer_stable = self.peer_stable.max(stable);
            }
            Event::Written => self.written(effects),
            Event::Found(record) => self.found(record, effects),
        }
        self.advance(effects);
    }

    /// What the peer says of a copy is not about the one that begins.
    pub fn is_deaf(&self) -> bool {
        matches!(self.phase, Phase::Solo | Phase::Filling { begun: false, .. })
    }

    fn peer_up(&mut self, peer: Party, effects: &mut Vec<Effect>) {
        if self.wants_peer() {
            let base = self.logged;
            (self.peer_logged, self.peer_stable) = (base, base);
            self.phase = Phase::Filling { peer, base, begun: false };
            effects.push(Effect::Begin { generation: self.record.generation, base });
        }
    }

    fn peer_down(&mut self, effects: &mut Vec<Effect>) {
        match self.phase {
            Phase::Filling { .. } | Phase::Catching { .. } => self.phase = Phase::Solo,
            Phase::Joining { peer, .. } => self.phase = Phase::Joining { peer, down: true },
            Phase::Conceding { peer, .. } => self.phase = Phase::Conceding { peer, down: true },
            Phase::Sync { peer } => self.leave(peer, effects),
            Phase::Solo | Phase::Leaving { .. } | Phase::Lost => {}
        }
    }

    fn lose(&mut self, effects: &mut Vec<Effect>) {
        if self.phase != Phase::Lost {
            self.phase = Phase::Lost;
            effects.push(Effect::Close);
        }
    }

    /// A copy that does not count yet never will: what it would get is not logged any more. One
    /// that counts has everything, and stays until the image has that too.
    fn fail(&mut self) {
        self.failed = true;
        if matches!(self.phase, Phase::Filling { .. } | Phase::Catching { .. }) {
            self.phase = Phase::Solo;
        }
    }

    fn leave(&mut self, peer: Party, effects: &mut Vec<Effect>) {
        self.phase = Phase::Leaving { peer, writing: false };
        effects.push(Effect::Stabilise);
    }

    /// What the change that is under way makes of the record.
    fn after(&self) -> Option<Record> {
        match self.phase {
            Phase::Joining { peer, .. } => Some(self.record.with(Copies::Sync(peer))),
            Phase::Conceding { peer, .. } => Some(self.record.with(Copies::Peer(peer))),
            Phase::Leaving { writing: true, .. } => Some(self.record.with(Copies::Solo)),
            _ => None,
        }
    }

    fn written(&mut self, effects: &mut Vec<Effect>) {
        let Some(after) = self.after() else { return };
        self.record = after;
        match self.phase {
            Phase::Joining { peer, down: true } | Phase::Conceding { peer, down: true } => {
                self.leave(peer, effects);
            }
            Phase::Joining { peer, down: false } | Phase::Conceding { peer, down: false } => {
                self.phase = Phase::Sync { peer };
            }
            _ => self.phase = Phase::Solo,
        }
    }

    fn found(&mut self, record: Record, effects: &mut Vec<Effect>) {
        let Some(after) = self.after() else { return };
        if record == after || mutated!(OutcomeIgnored) {
            return self.written(effects);
        }
        if record != self.record {
            return self.lose(effects);
        }
        if matches!(self.phase, Phase::Joining { down: true, .. }) {
            // The peer that was to join is gone, and nobody has been told of it.
            self.phase = Phase::Solo;
            return;
        }
        effects.push(Effect::Write { before: record, after });
    }

    /// Takes the steps for which nothing is missing any more.
    fn advance(&mut self, effects: &mut Vec<Effect>) {
        match self.phase {
            // What is logged from here on is not acknowledged or sent before it has it: what is
            // missing gets no more.
            Phase::Filling { peer, base, begun: true } if self.drained >= base => {
                self.phase = Phase::Catching { peer, through: self.logged };
                return self.advance(effects);
            }
            // A copy that may take over lacks nothing that was promised, and nothing that the image
            // may have.
            Phase::Catching { peer, through } if self.peer_stable >= through => {
                self.phase = Phase::Joining { peer, down: false };
            }
            // The image has everything: what goes past the dead device from now on the peer would
            // not have.
            Phase::Sync { peer } if self.failed && self.drained >= self.acknowledged => {
                self.leave(peer, effects);
                return self.advance(effects);
            }
            // A restart must not take what the device has then for everything.
            Phase::Sync { peer } if self.failed && self.record.copies == Copies::Sync(peer) => {
                self.phase = Phase::Conceding { peer, down: false };
            }
            // What was promised as long as two logs had it is in one from now on. With the peer
            // gone as well, a dead device gets no better by waiting.
            Phase::Leaving { peer, writing: false }
                if self.stable >= self.acknowledged
                    || self.failed
                    || mutated!(SoloBeforeStable) =>
            {
                self.phase = Phase::Leaving { peer, writing: true };
            }
            _ => return,
        }
        let after = self.after().expect("a change begins");
        effects.push(Effect::Write { before: self.record, after });
    }
}
