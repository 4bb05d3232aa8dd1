//! Whose the volume is: what a host becomes that looks at the record, how a peer takes over, and
//! what an owner to be waits for.

use super::host::{Run, VOLUME, host_of};
use super::{LIMITS, What, World};
use tidepool_engine::Attach;
use tidepool_replica::wire::Holds;
use tidepool_replica::{Copies, Record, Resume, Tail, may_take_over, resume};

impl World {
    /// What a host that is nothing yet becomes.
    pub(super) fn decide(&mut self, at: usize) {
        if !matches!(self.hosts[at].run, Run::Waiting) || !self.witness_reachable(at) {
            return;
        }
        let record = self.ceph.record();
        let other = &self.hosts[1 - at];
        let is_asked =
            matches!(other.run, Run::Peer) && self.link_works() && !self.is_paused(1 - at);
        let copy = if is_asked { other.copy() } else { None };
        let tail = copy.map(|Holds { generation, logged, .. }| Tail {
            generation,
            logged,
            holder: other.party(),
        });
        let is_missed = self.is_missed(at);
        let host = &mut self.hosts[at];
        let own = host.engine().log_status(VOLUME).map_or(0, |log| log.logged);
        if is_missed {
            let after = record.taken_by(host.party());
            return self.ask(at, record, after);
        }
        match resume(host.party(), &record, own, tail) {
            Resume::Serve => {
                if record.peer().is_some() {
                    self.cover.hit("owner back in sync");
                }
                let after = record.taken_by(self.hosts[at].party());
                self.ask(at, record, after);
            }
            Resume::Taken => self.hosts[at].run = Run::Peer,
            Resume::Fetch { after, through } => {
                self.cover.hit("owner back with less than its peer");
                self.fetch(at, after + 1, through);
            }
            // It is for the peer to take over.
            Resume::Behind { .. } => self.cover.hit("failed device has less than the peer"),
            Resume::Unreachable => self.cover.hit("owner back and unsure"),
        }
    }

    /// Asks the witness for a change of the record, as an owner to be.
    pub(super) fn ask(&mut self, at: usize, before: Record, after: Record) {
        self.hosts[at].run = Run::Asking { before, after };
        self.send_change(at, before, after);
    }

    /// The peer takes the volume over.
    pub(super) fn take_over(&mut self, at: usize) {
        let record = self.ceph.record();
        if !self.witness_reachable(at) || self.is_paused(at) {
            return;
        }
        self.take_over_if_may(at, record, false);
    }

    /// The peer takes the volume over, if the record or somebody who accepts a loss lets it; false
    /// if not.
    pub(super) fn take_over_if_may(
        &mut self,
        at: usize,
        record: Record,
        accepts_loss: bool,
    ) -> bool {
        let host = &mut self.hosts[at];
        let me = host.party();
        let generation = host.known().filter(|_| host.has_copy()).map_or(0, |spec| spec.generation);
        let may = matches!(host.run, Run::Peer)
            .then(|| may_take_over(host.engine(), (VOLUME, generation), me, &record, accepts_loss));
        let Some(Ok(promise)) = may else { return false };
        self.note("take over", at as u64, promise.after.generation, 0);
        self.end_following(at);
        let host = &mut self.hosts[at];
        let control = host.fresh();
        host.run = Run::Promising { before: record, after: promise.after, control };
        host.engine().promise(VOLUME, promise.generation, control);
        self.drive(at);
        true
    }

    /// The witness has answered, or is asked what stands there.
    pub(super) fn answer(&mut self, at: usize, stands: Option<bool>) {
        let record = self.ceph.record();
        match self.hosts[at].run {
            Run::Asking { before, after } => {
                if record == after {
                    self.hosts[at].run = Run::Fencing { record };
                    self.send_fence(at, record.generation);
                } else if record == before {
                    self.send_change(at, before, after);
                } else {
                    self.hosts[at].run = Run::Waiting;
                    self.decide(at);
                }
            }
            Run::Owner(_) => self.record_answered(at, stands),
            _ => {}
        }
        self.drive(at);
    }

    /// Nobody of an earlier generation reaches the image any more.
    pub(super) fn fenced(&mut self, at: usize) {
        let Run::Fencing { record } = self.hosts[at].run else { return };
        // What the cache has is a copy: its former owner may take reads yet.
        let host = &self.hosts[at];
        let now = self.clock(at);
        let wait = if host.has_copy() {
            LIMITS.serves_after(now.saturating_sub(host.followed_at))
        } else {
            0
        };
        if wait > 0 {
            self.cover.hit("former owner's lease waited for");
            let (life, when) = (host.life, host.clock.when(now + wait));
            return self.at(when, What::Fenced { at, life });
        }
        self.attach(at, record);
        self.drive(at);
    }

    fn attach(&mut self, at: usize, record: Record) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let control = host.fresh();
        host.standing.generation = record.generation;
        let attached = match host.known() {
            Some(spec) => {
                let keep_clean = !host.standing.is_behind;
                let attach =
                    Attach { generation: record.generation, ..Attach::again(&spec, keep_clean) };
                host.engine().attach(now, VOLUME, attach, control).is_ok()
            }
            None if self.fate.whole_image => {
                let spec = self.plan.spec(record.generation);
                host.engine()
                    .add_volume(now, spec, control)
                    .expect("there is room for a second volume");
                true
            }
            None => return self.fail(format!("host {at} owns the volume and has nothing of it")),
        };
        if attached {
            host.engine().set_degraded(now, VOLUME, self.plan.alone);
        }
        host.run = match attached {
            true => Run::Attaching { record, control },
            // Something is still on its way to the log.
            false => Run::Fencing { record },
        };
        if !attached {
            self.send_fence(at, record.generation);
        }
    }

    /// The record names a device that a host had before, and somebody knows that it had nothing of
    /// its own.
    fn is_missed(&self, at: usize) -> bool {
        self.fate.whole_image
            && self.ceph.record().copies == Copies::Solo
            && host_of(self.ceph.record().owner) == at
    }

    /// A takeover that a former life of the peer had asked for has come about.
    pub(super) fn is_owner_unawares(&mut self, at: usize) -> bool {
        let host = &self.hosts[at];
        let own = self.ceph.record().owner.cache == host.party().cache || self.is_missed(at);
        let found = matches!(host.run, Run::Peer) && own && self.witness_reachable(at);
        if found {
            self.cover.hit("owner unawares");
        }
        found
    }
}
