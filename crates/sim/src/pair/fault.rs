//! What goes wrong, and the end of it.

use super::host::{Host, Run, Transfer, VOLUME, host_of};
use super::{LIMITS, MS, S, STEPS_MAX, What, World};
use tidepool_engine::api::*;
use tidepool_replica::{Copies, Party, Phase};

impl World {
    /// From here on something may go wrong.
    pub(super) fn end_calm(&mut self) {
        self.course.calm = false;
        (self.course.end, self.course.steps_max) =
            (self.now + self.course.end, self.step + STEPS_MAX);
    }

    /// The next thing goes wrong.
    pub(super) fn fault(&mut self) {
        if self.course.healing {
            return;
        }
        if self.course.calm {
            let in_sync = self.ceph.record().copies != Copies::Solo;
            if self.plan.sync_first && !in_sync {
                return self.after(LIMITS.beat_ns, What::Fault);
            }
            self.end_calm();
        }
        if self.plan.patient && !self.is_in_sync() && self.now < self.course.patience_until {
            return self.after(LIMITS.beat_ns / 2, What::Fault);
        }
        let owner = self.hosts.iter().position(|host| matches!(host.run, Run::Owner(_)));
        let at = owner
            .filter(|_| self.draws.rng.permille(300))
            .unwrap_or(self.draws.rng.below(2) as usize);
        let until = self.now + self.draws.rng.around(S);
        match self.draws.rng.below(16) {
            0 => self.kill(at, false),
            1 => self.kill(at, true),
            2 if self.draws.rng.permille(400) => (0..2).for_each(|at| self.kill(at, true)),
            2 if self.draws.rng.permille(300) => {
                (0..2).for_each(|host| self.kill(host, host == at))
            }
            2 => (0..2).for_each(|at| self.kill(at, false)),
            3 => {
                self.note("pause", at as u64, until, 0);
                self.cover.hit("host paused");
                self.hosts[at].paused_until = until;
            }
            4 => {
                self.cover.hit("link cut one way");
                self.net.hole_until[at] = until;
            }
            5 => {
                self.cover.hit("link cut");
                self.net.hole_until = [until; 2];
            }
            6 => {
                self.cover.hit("witness away");
                self.net.away_until[at] = until;
            }
            7 => self.kill_device(at),
            8 => self.lose_owner_and_power(),
            _ => {
                let peer = self.hosts.iter().position(|host| matches!(host.run, Run::Peer));
                peer.into_iter().for_each(|at| self.take_over(at));
            }
        }
        // Now and then one comes on top of the other.
        if self.draws.rng.permille(700) {
            self.course.patience_until = self.now + 3 * S;
        }
        let ns = self.draws.rng.around(self.plan.fault_ns);
        self.after(ns, What::Fault);
    }

    fn is_in_sync(&self) -> bool {
        let owner = |host: &Host| matches!(&host.run, Run::Owner(driver) if matches!(driver.owner().phase(), Phase::Sync { .. }));
        self.hosts.iter().any(owner)
    }

    pub(super) fn kill(&mut self, at: usize, power: bool) {
        let dead = self.hosts[at].disk.is_dead();
        if dead && !self.can_do_without(at) {
            return;
        }
        self.note(if power { "power loss" } else { "kill" }, at as u64, 0, 0);
        self.cover.hit(if power { "host power loss" } else { "host kill" });
        // The record may say that the owner's copy counts before it is back. Its image's redo tells
        // then that it is behind.
        let parting = matches!(&self.hosts[at].run,
            Run::Owner(driver) if matches!(driver.owner().phase(), Phase::Leaving { writing: true, .. }));
        self.hosts[at].stop();
        self.hosts[at].disk.draw_from(self.draws.rng.fork());
        self.end_writes(at);
        self.mend_device(at);
        self.hosts[at].paused_until = 0;
        self.client.left(at);
        let conceded = matches!(self.ceph.record().copies, Copies::Peer(_))
            && host_of(self.ceph.record().owner) == at;
        if dead && !power && conceded && !parting && self.draws.rng.permille(700) {
            self.cover.hit("failed device back");
            self.hosts[at].disk.come_back();
        } else if power || dead {
            let members = self.members();
            let was = !self.fate.whole_image && members.contains(&self.hosts[at].party());
            self.hosts[at].boot += 1;
            self.hosts[at].clock.restart(self.now);
            if dead {
                self.cover.hit("device replaced");
                let rng = self.draws.rng.fork();
                self.hosts[at].replace_disk(&self.plan, rng);
            } else {
                self.hosts[at].disk.power_loss();
            }
            // A device that has died, and may come back, is no copy, even before its owner has
            // noticed.
            let is_left = |party: &Party| {
                let host = &self.hosts[host_of(*party)];
                host.party() == *party && !host.disk.is_dead()
            };
            let left = members.iter().any(is_left);
            if was && !left {
                self.cover.hit("last copy lost its power");
                self.fate.lost = true;
            }
        }
        let ns = self.draws.rng.around(300 * MS);
        self.after(ns, What::Start(at));
    }

    /// What a process had sent to its disk arrives before the disk is another's, whole or in parts.
    fn end_writes(&mut self, at: usize) {
        let is_write = |what: &What| matches!(what, What::Arrive { at: of, transfer: Transfer::Write { .. }, .. } if *of == at);
        let sent: Vec<_> =
            self.queue.iter().filter(|(_, what)| is_write(what)).map(|(&key, _)| key).collect();
        for key in sent {
            let what = self.queue.remove(&key);
            let disk = &mut self.hosts[at].disk;
            if let Some(What::Arrive { transfer: Transfer::Write { offset, data, .. }, .. }) = what
            {
                disk.cut_at(offset, &data);
            }
        }
    }

    /// Who has everything that is acknowledged.
    pub(super) fn members(&self) -> Vec<tidepool_replica::Party> {
        match self.ceph.record().copies {
            Copies::Solo => vec![self.ceph.record().owner],
            Copies::Sync(peer) => vec![self.ceph.record().owner, peer],
            Copies::Peer(peer) => vec![peer],
        }
    }

    /// No more faults: from here on everything must come to its end.
    pub(super) fn heal(&mut self) {
        self.course.healing = true;
        self.note("heal", 0, 0, 0);
        self.net.away_until = [0; 2];
        self.net.hole_until = [0; 2];
        for at in 0..2 {
            let now = self.now;
            self.hosts[at].paused_until = self.hosts[at].paused_until.min(now);
            self.after(MS, What::Start(at));
        }
        self.client.stop_after = Some(self.now + 20 * MS);
    }

    /// The cache device of a host dies: whatever is written to it fails from now on.
    fn kill_device(&mut self, at: usize) {
        let is_peer = matches!(self.hosts[at].run, Run::Peer);
        if !is_peer && !matches!(self.hosts[at].run, Run::Owner(_)) {
            return;
        }
        let members = self.members();
        let there = |party: &Party| {
            let host = &self.hosts[host_of(*party)];
            host.engine.is_some() && host.party() == *party && !host.disk.is_dead()
        };
        // Alone with what it has, its death would be a loss that two copies do not prevent.
        let alone = members == [self.hosts[at].party()];
        // What is bad, and then on a dead device whose peer is lost as well, only `recover` ends.
        let rots = self.rot.is_some();
        if self.hosts[at].engine.is_none() || alone || rots || !members.iter().all(there) {
            return;
        }
        self.note("device dies", at as u64, 0, 0);
        self.cover.hit(if is_peer { "peer's device died" } else { "owner's device died" });
        self.mend_device(at);
        self.hosts[at].disk.break_down(None);
        self.checker.goes_direct(self.tick);
    }

    /// The owner's host is gone with its device, and its peer loses its power.
    fn lose_owner_and_power(&mut self) {
        let Some(peer) = self.ceph.record().peer() else { return };
        let (owner, other) = (host_of(self.ceph.record().owner), host_of(peer));
        let there = self.hosts[owner].party() == self.ceph.record().owner
            && self.hosts[other].party() == peer;
        let dead = self.hosts.iter().any(|host| host.disk.is_dead());
        let serves = matches!(self.hosts[owner].run, Run::Owner(_));
        if !there || dead || !serves || self.rot.is_some() {
            return;
        }
        self.cover.hit("owner lost, and its peer's power");
        self.hosts[owner].disk.break_down(None);
        self.kill(owner, true);
        self.kill(other, true);
    }

    /// Whether a host whose device is dead can be started with a new one: what it alone has is in
    /// the image.
    fn can_do_without(&self, at: usize) -> bool {
        if let Run::Owner(driver) = &self.hosts[at].run
            && matches!(driver.owner().phase(), Phase::Leaving { .. })
        {
            return self.fate.drained_at_leave || self.fate.whole_image;
        }
        self.fate.whole_image || self.members() != [self.hosts[at].party()]
    }

    /// Somebody sees that nobody serves the volume, and that this does not change by itself.
    pub(super) fn look_after(&mut self) {
        if !self.client.is_unserved() {
            self.unserved_since = None;
            return;
        }
        let since = *self.unserved_since.get_or_insert(self.now);
        let up = self.hosts.iter().all(|host| host.engine.is_some());
        if up && self.now > since + if self.course.healing { 30 * S } else { 5 * S } {
            self.unserved_since = None;
            self.accept_loss();
        }
    }

    /// Nobody serves, and nobody may by himself: the cache that was flushed to last is made the
    /// volume, whatever else is missing.
    pub(super) fn accept_loss(&mut self) {
        let record = self.ceph.record();
        let owner = host_of(record.owner);
        let host = &mut self.hosts[owner];
        if matches!(host.run, Run::Waiting) && host.party().cache == record.owner.cache {
            self.cover.hit("loss accepted by the owner");
            self.fate.lost = true;
            // The image may have more than a device that has come back.
            self.hosts[owner].standing.is_behind = matches!(record.copies, Copies::Peer(_));
            let after = record.taken_by(self.hosts[owner].party());
            return self.ask(owner, record, after);
        }
        let Some(peer) = record.peer() else { return };
        let at = host_of(peer);
        if self.take_over_if_may(at, record, true) {
            self.cover.hit("loss accepted by the peer");
            self.fate.lost = true;
        }
    }

    /// A host that has lost the volume takes its backend away, or is started again.
    pub(super) fn let_go(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.standing.detaching.is_none() && self.draws.rng.permille(700) {
            let control = host.fresh();
            host.standing.detaching = Some(control);
            let now = self.clock(at);
            return self.hosts[at].engine().detach(now, VOLUME, u64::MAX, control);
        }
        let life = host.life;
        let ns = self.draws.rng.around(200_000_000);
        self.after(ns, What::Closed { at, life });
    }

    /// The backend of a lost volume is gone, or something else is being done with the volume.
    pub(super) fn has_let_go(&mut self, at: usize, result: Result<(), ControlError>) {
        if result.is_err() {
            return self.let_go(at);
        }
        self.cover.hit("volume let go of");
        let host = &mut self.hosts[at];
        (host.standing.detaching, host.standing.fenced, host.standing.serves) =
            (None, false, false);
        host.run = Run::Waiting;
        self.client.left(at);
        self.decide(at);
    }

    /// A host whose device is dead gets a new one as soon as it can do without the old one.
    pub(super) fn replace_dead(&mut self, at: usize) {
        let log = self.hosts[at].engine.as_ref().and_then(|engine| engine.log_status(VOLUME));
        let alone = matches!(&self.hosts[at].run, Run::Owner(driver) if driver.owner().phase() == Phase::Solo);
        // Without a request there is no reason to disown a dead device that has nothing of its own.
        self.fate.whole_image |= alone
            && self.client.is_idle()
            && log.is_some_and(|log| log.failed && log.drained >= log.published);
        let serves = matches!(&self.hosts[at].run, Run::Owner(_)) && !self.fate.whole_image;
        if self.hosts[at].disk.is_dead() && !serves {
            self.kill(at, false);
        }
    }

    /// Somebody changes the volume's mode.
    pub(super) fn change_mode(&mut self) {
        let ns = self.draws.rng.around(400 * MS);
        self.after(ns, What::Mode);
        let owner = self.hosts.iter().position(|host| matches!(host.run, Run::Owner(_)));
        let Some(at) = owner.filter(|&at| self.plan.modes && !self.is_paused(at)) else { return };
        let mode = match self.course.healing {
            true => Mode::WriteBack,
            false => self.draws.rng.pick(&[
                Mode::WriteBack,
                Mode::WriteThrough,
                Mode::WriteAround,
                Mode::Off,
            ]),
        };
        self.note("mode", at as u64, mode as u64, 0);
        self.cover.hit("mode changed");
        if matches!(mode, Mode::WriteAround | Mode::Off) {
            self.checker.goes_direct(self.tick);
        }
        let now = self.clock(at);
        let control = self.hosts[at].fresh();
        self.hosts[at].engine().set_mode(now, VOLUME, mode, control);
        self.drive(at);
    }
}
