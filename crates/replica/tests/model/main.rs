//! The rules of RFC 9 against everything that can happen to two hosts, a link and a witness, step
//! by step in every order.
//!
//! The model drives the very machines of the crate. Its world has one volume, two hosts with a log
//! each, one connection that may break with everything in flight, and a witness whose answers may
//! be lost. A host is killed (its log loses nothing), or loses its power (its log loses what is not
//! stable). Writes are numbers, so that a log is compared with what was promised write by write.

mod world;

use stateright::{Checker, Model, Property};
use tidepool_engine::api::Pairing;
use tidepool_replica::{Copies, Event, Owner, Phase};
use world::{Action, Bug, CAME_BACK, FETCHED, LEFT, Limits, Message, Run, SYNC, TAKEN_OVER, World};

/// What the model is of: limits, a rule that is left out, what has to be reached.
struct Rules(Limits, Bug, &'static [usize]);

const LOST_NOTHING: &str = "nothing promised is lost";

impl Model for Rules {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.0, self.1)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.bad.is_some() {
            return;
        }
        let limits = world.limits;
        for at in 0..2 {
            let host = &world.hosts[at];
            if let Run::Owner(owner) = &host.run {
                let takes = !host.failed || world.may_bypass(at);
                if limits.writes > 0 && !matches!(owner.phase(), Phase::Lost) && takes {
                    actions.push(Action::Write(at));
                }
                if at == 0 && !host.failed && limits.fails > 0 {
                    actions.push(Action::Fail(at));
                }
                let end = owner.may_acknowledge() as usize;
                let early =
                    world.bug == Bug::EarlyAck && host.log.writes.len() > world.acknowledged.len();
                if end > world.acknowledged.len() || early {
                    actions.push(Action::Acknowledge(at));
                }
                if owner.may_drain() as usize > world.flushed {
                    actions.push(Action::Flush(at));
                }
                let stable = if world.bug == Bug::EarlyDrain { host.log.stable } else { 0 };
                if !host.fenced && (owner.may_drain() as usize).max(stable) > world.image.len() {
                    actions.push(Action::Drain(at));
                }
            }
            if host.is_up() && !host.failed && host.log.stable < host.log.writes.len() {
                actions.push(Action::Stabilise(at));
            }
            if !world.mail[at].is_empty() {
                actions.push(Action::Deliver(at));
            }
            if host.is_up() && limits.kills > 0 {
                actions.push(Action::Kill(at));
            }
            if limits.powers > 0 {
                actions.push(Action::Power(at));
            }
            match host.run {
                // What nothing else has is lost with it, what the record does not say yet nobody
                // knows, and a log that is behind its image is refused without a peer.
                Run::Down if host.failed && !matches!(world.witness.copies, Copies::Peer(_)) => {}
                Run::Down => {
                    actions.extend([true, false].map(|asks| Action::Start { host: at, asks }))
                }
                Run::Peer(_) if limits.takeovers > 0 => actions.push(Action::TakeOver(at)),
                Run::Fencing { .. } => actions.push(Action::Fence(at)),
                _ => {}
            }
        }
        let pair = [&world.hosts[0].run, &world.hosts[1].run];
        let can_meet =
            matches!(pair, [Run::Owner(_), Run::Peer(_)] | [Run::Peer(_), Run::Owner(_)]);
        if !world.linked && can_meet {
            actions.push(Action::Connect);
        }
        if world.linked && limits.breaks > 0 {
            actions.push(Action::Break);
        }
        for change in 0..world.changes.len() {
            actions.push(Action::Apply { change, answered: true });
            if limits.lost_answers > 0 {
                actions.push(Action::Apply { change, answered: false });
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut w = world.clone();
        match action {
            Action::Write(at) if w.hosts[at].failed => {
                w.limits.writes -= 1;
                w.bypass(at);
            }
            Action::Fail(at) => {
                (w.limits.fails, w.powers) = (world.limits.fails - 1, world.powers + 1);
                w.hosts[at].failed = true;
                w.tell(at, Event::Failed);
            }
            Action::Write(at) => {
                w.limits.writes -= 1;
                let write = std::mem::replace(&mut w.next, world.next + 1);
                let host = &mut w.hosts[at];
                host.log.writes.push(write);
                let (generation, sequence) = (host.log.generation, host.log.end());
                let pairing = w.owner(at).expect("it writes").pairing();
                if matches!(pairing, Pairing::Filling | Pairing::Paired) && w.linked {
                    w.mail[1 - at].push(Message::Record { generation, sequence, write });
                }
                w.tell(at, Event::Logged(sequence));
            }
            Action::Stabilise(at) => w.stabilise(at),
            Action::Acknowledge(at) => w.acknowledge(at),
            Action::Flush(at) => {
                let end = world.owner(at).map(Owner::may_drain).expect("offered") as usize;
                if w.owner(at)
                    .is_some_and(|owner| owner.record().generation == w.witness.generation)
                {
                    w.flushed = end.min(w.acknowledged.len());
                }
            }
            Action::Drain(at) => w.drain(at),
            Action::Deliver(at) => w.deliver(at),
            Action::Connect => {
                w.linked = true;
                for at in 0..2 {
                    let peer = w.hosts[1 - at].party(1 - at);
                    w.tell(at, Event::PeerUp(peer));
                }
            }
            Action::Break => {
                w.limits.breaks -= 1;
                w.unlink();
            }
            Action::Apply { change, answered } => {
                w.limits.lost_answers -= u8::from(!answered);
                w.apply(change, answered);
            }
            Action::Kill(at) => {
                w.limits.kills -= 1;
                w.end(at);
            }
            Action::Power(at) => {
                (w.limits.powers, w.powers) = (world.limits.powers - 1, world.powers + 1);
                let log = &mut w.hosts[at].log;
                log.writes.truncate(log.stable);
                w.hosts[at].boot += 1;
                w.end(at);
                w.hosts[at].fenced = false;
            }
            Action::Start { host, asks } => {
                // A new client of the backend: what fenced the old one is not for it.
                w.hosts[host].fenced = false;
                w.start(host, asks);
            }
            Action::TakeOver(at) => {
                w.limits.takeovers -= 1;
                w.take_over(at);
            }
            Action::Fence(at) => {
                let Run::Fencing { after } = w.hosts[at].run else { return None };
                w.fence(at, after);
            }
        }
        (w != *world).then_some(w)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let reached: [fn(&Rules, &World) -> bool; 5] = [
            |_, w| w.seen[SYNC],
            |_, w| w.seen[TAKEN_OVER],
            |_, w| w.seen[FETCHED],
            |_, w| w.seen[LEFT],
            |_, w| w.seen[CAME_BACK],
        ];
        let names = [
            "in sync",
            "taken over",
            "fetched from the peer",
            "left the peer",
            "back on a failed device",
        ];
        let all =
            names.iter().zip(reached).map(|(name, reached)| Property::sometimes(name, reached));
        let mut properties: Vec<Property<Self>> =
            self.2.iter().map(|&at| all.clone().nth(at).expect("a name")).collect();
        properties.push(Property::always(LOST_NOTHING, |_, world: &World| world.bad.is_none()));
        properties
    }
}

/// Every order of everything within the limits: nothing is lost, and what is to be tried is
/// reached.
fn check(limits: Limits, reaches: &'static [usize]) {
    let checker = Rules(limits, Bug::None, reaches).checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!("{limits:?}: {} states", checker.unique_state_count());
}

/// With a rule left out something is lost within the limits.
fn notices(bug: Bug, limits: Limits) {
    let checker = Rules(limits, bug, &[]).checker().threads(2).spawn_bfs().join();
    let found = checker.discovery(LOST_NOTHING);
    let path = found.unwrap_or_else(|| panic!("{bug:?} is not noticed within {limits:?}"));
    let lost = path.last_state().bad.expect("a counterexample");
    println!("{bug:?}: {lost} after {} steps", path.into_actions().len());
}

#[test]
fn a_single_power_loss_takes_nothing_that_is_acknowledged() {
    let limits = Limits { writes: 2, powers: 1, breaks: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, FETCHED, LEFT]);
}

#[test]
fn a_dead_cache_device_takes_nothing_and_nothing_goes_past_it_that_a_takeover_would_lose() {
    let limits = Limits { writes: 2, fails: 1, breaks: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, LEFT]);
    let limits = Limits { writes: 2, fails: 1, kills: 1, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, LEFT, CAME_BACK]);
}

#[test]
fn two_power_losses_take_nothing_that_is_flushed() {
    let limits = Limits { writes: 1, powers: 2, takeovers: 1, ..Limits::default() };
    check(limits, &[SYNC, TAKEN_OVER, FETCHED]);
}

#[test]
fn kills_and_lost_answers_take_nothing() {
    let limits = Limits {
        writes: 1,
        kills: 1,
        breaks: 1,
        lost_answers: 1,
        takeovers: 1,
        ..Limits::default()
    };
    check(limits, &[SYNC, TAKEN_OVER, LEFT]);
}

#[test]
fn a_rule_that_is_left_out_is_noticed() {
    let limits = Limits { writes: 1, powers: 1, takeovers: 1, ..Limits::default() };
    notices(Bug::EarlyAck, limits);
    notices(Bug::EarlyDrain, limits);
    notices(Bug::UnstableTakeover, Limits { powers: 2, ..limits });
    notices(Bug::TailIgnored, limits);
    notices(Bug::UnstableLeave, Limits { breaks: 1, ..limits });
    notices(Bug::BootIgnored, Limits { powers: 2, ..limits });
    notices(Bug::PromiseIgnored, Limits { writes: 2, ..limits });
    notices(Bug::FailedLogCounts, Limits { powers: 0, fails: 1, kills: 1, ..limits });
    notices(Bug::PastThePeer, Limits { writes: 2, powers: 0, fails: 1, ..limits });
}
