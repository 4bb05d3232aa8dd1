//! Two hosts, what is on its way between them, and what happens to them.

use tidepool_replica::{
    Copies, Copy, Effect, Event, Owner, Party, Peer, Phase, Record, Resume, Tail, resume,
};

/// How often what happens, at most.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Limits {
    pub(super) writes: u8,
    pub(super) kills: u8,
    pub(super) powers: u8,
    pub(super) breaks: u8,
    pub(super) lost_answers: u8,
    pub(super) takeovers: u8,
    /// Of the first owner's cache device.
    pub(super) fails: u8,
}

/// A rule that is left out, to see that it matters.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash)]
pub(super) enum Bug {
    None,
    /// Acknowledged when our own log has it.
    EarlyAck,
    /// A peer takes over although its host was restarted.
    BootIgnored,
    /// A peer takes over with a log that is not stable.
    UnstableTakeover,
    /// The record says solo while our log is not stable.
    UnstableLeave,
    /// An owner comes back without asking the peer what it holds.
    TailIgnored,
    /// A peer that takes over goes on taking the old owner's records.
    PromiseIgnored,
    /// Drained as soon as our own log is stable.
    EarlyDrain,
    /// An owner whose cache device has failed comes back and takes what is on it for everything.
    FailedLogCounts,
    /// An owner whose cache device is dead writes to the image while its record names a copy.
    PastThePeer,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Message {
    Begin { generation: u64, base: u64 },
    Record { generation: u64, sequence: u64, write: u8 },
    Begun,
    Have { logged: u64, stable: u64 },
}

/// A log: numbers of writes, those before `base` are in the image only.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Log {
    pub(super) generation: u64,
    pub(super) base: usize,
    pub(super) writes: Vec<u8>,
    pub(super) stable: usize,
}

impl Log {
    pub(super) fn end(&self) -> u64 {
        (self.base + self.writes.len()) as u64
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Run {
    Down,
    Owner(Owner),
    Peer(Peer),
    /// It has asked the witness for the volume.
    Taking {
        peer: Peer,
        before: Record,
        after: Record,
    },
    /// The record names it; the old owner is still to be fenced.
    Fencing {
        after: Record,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Host {
    pub(super) boot: u8,
    pub(super) life: u8,
    /// Nothing that this life sends to the backend arrives any more.
    pub(super) fenced: bool,
    /// Its cache device is dead.
    pub(super) failed: bool,
    pub(super) log: Log,
    pub(super) run: Run,
}

/// A change of the record that is on its way: from which life of which host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Change {
    pub(super) host: usize,
    pub(super) life: u8,
    pub(super) before: Record,
    pub(super) after: Record,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) limits: Limits,
    pub(super) bug: Bug,
    pub(super) witness: Record,
    pub(super) hosts: [Host; 2],
    pub(super) linked: bool,
    /// What is on its way to each host.
    pub(super) mail: [Vec<Message>; 2],
    pub(super) changes: Vec<Change>,
    pub(super) image: Vec<u8>,
    pub(super) next: u8,
    pub(super) acknowledged: Vec<u8>,
    /// So many of them were flushed; so many were promised to survive any single fault.
    pub(super) flushed: usize,
    pub(super) safe: usize,
    pub(super) powers: u8,
    pub(super) bad: Option<&'static str>,
    pub(super) seen: [bool; 5],
}

/// What is to be reached, so that nothing passes because nothing happens: places in
/// [`World::seen`].
pub(super) const SYNC: usize = 0;
pub(super) const TAKEN_OVER: usize = 1;
pub(super) const FETCHED: usize = 2;
pub(super) const LEFT: usize = 3;
pub(super) const CAME_BACK: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Write(usize),
    Stabilise(usize),
    Acknowledge(usize),
    Flush(usize),
    Drain(usize),
    Deliver(usize),
    Connect,
    Break,
    Apply { change: usize, answered: bool },
    Kill(usize),
    Power(usize),
    Fail(usize),
    Start { host: usize, asks: bool },
    TakeOver(usize),
    Fence(usize),
}

impl Host {
    pub(super) fn party(&self, at: usize) -> Party {
        Party { cache: at as u128, boot: self.boot.into() }
    }

    pub(super) fn is_up(&self) -> bool {
        self.run != Run::Down
    }
}

impl World {
    pub(super) fn new(limits: Limits, bug: Bug) -> World {
        let host = |run| Host {
            boot: 0,
            life: 0,
            fenced: false,
            failed: false,
            log: Log { generation: 1, ..Log::default() },
            run,
        };
        let first = Party { cache: 0, boot: 0 };
        let witness = Record { generation: 1, owner: first, copies: Copies::Solo };
        let owner = Run::Owner(Owner::new(witness, 0, 0));
        let peer = Run::Peer(Peer::new(Party { cache: 1, boot: 0 }, &witness, None));
        World {
            limits,
            bug,
            witness,
            hosts: [host(owner), host(peer)],
            linked: false,
            mail: [vec![], vec![]],
            changes: vec![],
            image: vec![],
            next: 1,
            acknowledged: vec![],
            flushed: 0,
            safe: 0,
            powers: 0,
            bad: None,
            seen: [false; 5],
        }
    }

    pub(super) fn owner(&self, at: usize) -> Option<&Owner> {
        match &self.hosts[at].run {
            Run::Owner(owner) => Some(owner),
            _ => None,
        }
    }

    /// The owner takes an event in, and what it wants is done.
    pub(super) fn tell(&mut self, at: usize, event: Event) {
        let mut effects = Vec::new();
        let Run::Owner(owner) = &mut self.hosts[at].run else { return };
        let before = owner.phase();
        owner.take(event, &mut effects);
        self.seen[SYNC] |= matches!(owner.phase(), Phase::Sync { .. });
        self.seen[LEFT] |= matches!(before, Phase::Leaving { .. }) && owner.phase() == Phase::Solo;
        for effect in effects {
            match effect {
                Effect::Begin { generation, base } => {
                    self.mail[1 - at].push(Message::Begin { generation, base });
                }
                Effect::Stabilise if self.bug == Bug::UnstableLeave => {
                    let end = self.hosts[at].log.end();
                    self.tell(at, Event::Stable(end));
                }
                Effect::Stabilise => {}
                Effect::Write { before, after } => self.change(at, before, after),
                Effect::Close => self.end(at),
            }
        }
    }

    pub(super) fn change(&mut self, host: usize, before: Record, after: Record) {
        let life = self.hosts[host].life;
        assert!(
            !self.changes.iter().any(|c| c.host == host && c.life == life),
            "one change at a time: {self:?}"
        );
        self.changes.push(Change { host, life, before, after });
    }

    pub(super) fn end(&mut self, at: usize) {
        self.hosts[at].run = Run::Down;
        self.hosts[at].life += 1;
        self.unlink();
    }

    pub(super) fn unlink(&mut self) {
        if std::mem::take(&mut self.linked) {
            self.mail = [vec![], vec![]];
            (0..2).for_each(|at| self.tell(at, Event::PeerDown));
        }
    }

    /// A host begins to serve what is in its log.
    pub(super) fn serve(&mut self, at: usize, record: Record) {
        let host = &mut self.hosts[at];
        host.log.generation = record.generation;
        host.log.stable = host.log.writes.len();
        let (log, drained) = (host.log.writes.clone(), self.image.len() as u64);
        host.run = Run::Owner(Owner::new(record, log.len() as u64, drained));
        let missing = |promised: usize| !log.starts_with(&self.acknowledged[..promised]);
        if !log.starts_with(&self.image) {
            self.bad = Some("the image has what its owner does not have");
        } else if missing(self.flushed) {
            self.bad = Some("what was flushed is lost");
        } else if self.powers <= 1 && missing(self.safe) {
            self.bad = Some("what was acknowledged in two logs is lost by a single fault");
        }
        (self.flushed, self.safe) = (log.len(), log.len());
        self.acknowledged = log;
    }

    /// Whether a host has these writes, in the image or in its log: the host that has the volume
    /// now must have what an earlier owner does.
    pub(super) fn has(&self, at: usize, writes: &[u8]) -> bool {
        let log = &self.hosts[at].log;
        self.image[..log.base].iter().chain(&log.writes).take(writes.len()).eq(writes)
    }

    pub(super) fn acknowledge(&mut self, at: usize) {
        let Run::Owner(owner) = &mut self.hosts[at].run else { return };
        // While the peer joins the record may still say solo: then nothing is promised yet that two
        // logs have to keep.
        let two = matches!(owner.phase(), Phase::Sync { .. });
        let through = match self.bug {
            Bug::EarlyAck if two => self.hosts[at].log.writes.len(),
            _ => {
                let through = owner.may_acknowledge();
                owner.acknowledged(through);
                through as usize
            }
        };
        let generation = owner.record().generation;
        let writes = &self.hosts[at].log.writes[..through];
        if generation < self.witness.generation {
            if !self.has(1 - at, writes) {
                self.bad = Some("acknowledged by somebody who is not the owner any more");
            }
        } else {
            self.acknowledged = writes.to_vec();
            if two {
                self.safe = through;
            }
        }
    }

    pub(super) fn drain(&mut self, at: usize) {
        let Some(owner) = self.owner(at) else { return };
        let through = match self.bug {
            Bug::EarlyDrain => self.hosts[at].log.stable,
            _ => owner.may_drain() as usize,
        };
        let writes = &self.hosts[at].log.writes[..through];
        if owner.record().generation < self.witness.generation && !self.has(1 - at, writes) {
            self.bad = Some("an image is ahead of its owner");
        }
        self.image = writes.to_vec();
        self.tell(at, Event::Sent(through as u64));
        self.tell(at, Event::Drained(through as u64));
    }

    /// An owner on a dead device may write to the image: what it has is there, and nobody else has
    /// older.
    pub(super) fn may_bypass(&self, at: usize) -> bool {
        let alone = self.owner(at).is_some_and(|owner| owner.phase() == Phase::Solo);
        let drained = self.image.len() == self.hosts[at].log.writes.len();
        drained && (alone || self.bug == Bug::PastThePeer)
    }

    /// A write past a dead device.
    pub(super) fn bypass(&mut self, at: usize) {
        let write = self.next;
        self.next += 1;
        if self.hosts[at].fenced {
            return;
        }
        self.hosts[at].log.writes.push(write);
        self.image.push(write);
        self.acknowledged = self.image.clone();
        (self.flushed, self.safe) = (self.image.len(), self.image.len());
    }

    pub(super) fn deliver(&mut self, at: usize) {
        let message = self.mail[at].remove(0);
        let host = &mut self.hosts[at];
        let (peer, is_taking) = match &mut host.run {
            Run::Peer(peer) => (peer, false),
            Run::Taking { peer, .. } => (peer, true),
            _ => {
                return match message {
                    Message::Begun => self.tell(at, Event::Begun),
                    Message::Have { logged, stable } => {
                        self.tell(at, Event::Have { logged, stable })
                    }
                    _ => {}
                };
            }
        };
        let answer = match message {
            Message::Begin { generation, base } => peer.begin(generation, base).map(|()| {
                host.log = Log { generation, base: base as usize, ..Log::default() };
                Message::Begun
            }),
            Message::Record { generation, sequence, write } => {
                let mut taken = peer.record(generation, sequence);
                if is_taking && self.bug == Bug::PromiseIgnored && sequence == host.log.end() + 1 {
                    taken = Ok(());
                }
                taken.map(|()| {
                    host.log.writes.push(write);
                    let stable = (host.log.base + host.log.stable) as u64;
                    Message::Have { logged: sequence, stable }
                })
            }
            Message::Begun | Message::Have { .. } => return,
        };
        match answer {
            Ok(answer) => self.mail[1 - at].push(answer),
            Err(_) => self.unlink(),
        }
    }

    pub(super) fn stabilise(&mut self, at: usize) {
        let log = &mut self.hosts[at].log;
        log.stable = log.writes.len();
        let end = log.end();
        if self.owner(at).is_some() {
            self.tell(at, Event::Stable(end));
        } else if self.linked {
            self.mail[1 - at].push(Message::Have { logged: end, stable: end });
        }
    }

    /// A change reaches the witness.
    pub(super) fn apply(&mut self, change: usize, answered: bool) {
        let Change { host, life, before, after } = self.changes.remove(change);
        let written = self.witness == before;
        if written {
            self.witness = after;
        }
        if self.hosts[host].life != life {
            return;
        }
        if matches!(self.hosts[host].run, Run::Owner(_)) {
            let event =
                if written && answered { Event::Written } else { Event::Found(self.witness) };
            return self.tell(host, event);
        }
        let Run::Taking { peer, .. } = self.hosts[host].run else { return };
        let me = self.hosts[host].party(host);
        self.hosts[host].run = match self.witness == after {
            true => Run::Fencing { after },
            false => Run::Peer(Peer::new(me, &self.witness, peer.copy())),
        };
    }

    pub(super) fn start(&mut self, at: usize, asks: bool) {
        let (me, mut record) = (self.hosts[at].party(at), self.witness);
        if self.hosts[at].failed {
            self.seen[CAME_BACK] = true;
            let log = &mut self.hosts[at].log;
            log.writes.truncate(log.stable);
            if let (Copies::Peer(peer), Bug::FailedLogCounts) = (record.copies, self.bug) {
                record.copies = Copies::Sync(peer);
            }
        }
        let other = &self.hosts[1 - at];
        let tail = match &other.run {
            Run::Peer(_) if asks => Some(Tail {
                generation: other.log.generation,
                logged: other.log.end(),
                holder: other.party(1 - at),
            }),
            _ => None,
        };
        let resumed = match resume(me, &record, self.hosts[at].log.writes.len() as u64, tail) {
            Resume::Unreachable | Resume::Behind { .. } | Resume::Fetch { .. }
                if self.bug == Bug::TailIgnored =>
            {
                Resume::Serve
            }
            resumed => resumed,
        };
        match resumed {
            Resume::Unreachable | Resume::Behind { .. } => {}
            Resume::Taken => {
                let log = &self.hosts[at].log;
                let copy =
                    Copy { generation: log.generation, base: log.base as u64, logged: log.end() };
                // What it has as an owner of the past is no copy of anything.
                let copy = Some(copy).filter(|copy| copy.generation == record.generation);
                self.hosts[at].run = Run::Peer(Peer::new(me, &record, copy));
            }
            Resume::Fetch { after, through } => {
                let other = &self.hosts[1 - at].log;
                let from = after as usize - other.base;
                let more = other.writes[from..through as usize - other.base].to_vec();
                self.hosts[at].log.writes.extend(more);
                self.seen[FETCHED] = true;
                self.open(at, record.taken_by(me));
            }
            // It was stopped between taking the record and fencing the old owner.
            Resume::Serve if self.hosts[at].log.generation < record.generation => {
                self.witness = record.taken_by(me);
                self.hosts[at].run = Run::Fencing { after: self.witness };
            }
            Resume::Serve => self.open(at, record.taken_by(me)),
        }
    }

    /// An owner comes back: its log is stable, then the record is its own again.
    pub(super) fn open(&mut self, at: usize, record: Record) {
        self.hosts[at].failed = false;
        self.witness = record;
        self.serve(at, record);
    }

    pub(super) fn take_over(&mut self, at: usize) {
        let bug = self.bug;
        let host = &mut self.hosts[at];
        let Run::Peer(mut peer) = host.run else { return };
        let mut record = self.witness;
        if bug == Bug::BootIgnored
            && let Copies::Sync(party) = &mut record.copies
        {
            party.boot = host.boot.into();
        }
        let Ok(after) = peer.take_over(&record) else { return };
        if bug != Bug::UnstableTakeover {
            host.log.stable = host.log.writes.len();
        }
        let before = self.witness;
        host.run = Run::Taking { peer, before, after };
        self.change(at, before, after);
    }

    /// The old owner reaches nothing any more, and the new one serves.
    pub(super) fn fence(&mut self, at: usize, after: Record) {
        self.hosts[1 - at].fenced = true;
        let host = &mut self.hosts[at];
        if self.image.len() < host.log.base {
            self.bad = Some("a copy counts although the image lacks what was before it");
            return;
        }
        let mut writes = self.image[..host.log.base].to_vec();
        writes.append(&mut host.log.writes);
        self.seen[TAKEN_OVER] |= !writes.is_empty();
        host.log = Log { generation: after.generation, base: 0, writes, stable: 0 };
        self.serve(at, after);
    }
}
