//! The world of a run: one machine, its clients and operators, what goes wrong, and the oracle that
//! looks on.

mod clients;
mod clock;
mod control;
mod effects;
mod ending;
mod family;
mod faults;
mod images;
mod invariants;
mod journal;
mod odds;
mod opening;
mod operator;
pub mod plan;
mod stop;
mod verify;
pub mod volume;
mod watch;

pub use crate::api::Outcome;
use crate::coverage::Coverage;
use crate::machine::backend::Backend;
use crate::machine::{Layout, Machine};
use crate::rng::{Chance, Draws, Rng, mix};
use crate::trace::{Trace, fold};
use clients::Clients;
use clock::Clock;
use control::Controls;
use ending::Finale;
use journal::Journal;
use plan::{Plan, S};
use stop::{Stop, Stops};
use tidepool_engine::api::*;
use volume::Vol;
use watch::Watch;

/// Client requests for each simulated second that a life may last: a short one is one of few
/// requests, too.
const REQUESTS_PER_S: u64 = 150;

/// What happens at a point of simulated time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// An effect of a life of the core completes.
    Done {
        life: u64,
        token: u64,
    },
    /// A slot of a client may send its next request.
    Client {
        volume: usize,
        slot: usize,
    },
    /// Something that is no client request.
    Action,
    /// The process or the machine stops.
    Stop {
        life: u64,
        how: Stop,
    },
    /// The process is started again.
    Reopen,
    /// A volume's backend is opened.
    Attach {
        life: u64,
        volume: usize,
    },
    /// A volume that is not in the cache is added.
    Add {
        volume: usize,
    },
    /// Looking at what a power loss has left goes on.
    Verify {
        life: u64,
        volume: usize,
    },
    VerifyAgain {
        life: u64,
        volume: usize,
    },
    /// A read of cached blocks must be answered by now.
    MustBeAnswered {
        request: RequestId,
    },
    /// The next step towards the end.
    End,
}

/// A run.
pub struct World {
    /// Where further streams come from.
    chance: Chance,
    /// The stream of what happens now.
    rng: Rng,
    clock: Clock<Happening>,
    /// The order in which requests begin and end.
    tick: u64,
    plan: Plan,
    machine: Machine,
    vols: Vec<Vol>,
    clients: Clients,
    controls: Controls,
    stops: Stops,
    finale: Finale,
    watch: Watch,
    journal: Journal,
    cover: Coverage,
    recovery_blocks_max: u64,
}

impl World {
    /// The world of a life, which ends after `seconds` of simulated time at the latest.
    pub fn new(mut chance: Chance, seconds: u64, verbose: bool, trace: Trace) -> World {
        let mut plan = Plan::new(&mut chance.stream("plan"));
        plan.make_family(&mut chance.stream("family"));
        let mut rng = chance.stream("begin");
        let disk = rng.fork();
        let quantum = rng.pick(&[1, 10_000, 100_000]);
        let layout = Layout::new(plan.cache_bytes, plan.segment_bytes);
        let backend = |p: &plan::VolumePlan| {
            Backend::new(p.size_bytes, p.durable_backend, p.backend_latency_ns)
        };
        let machine = Machine::new(layout, disk, plan.volumes.iter().map(backend));
        let vols = plan.volumes.iter().enumerate().map(|(i, p)| Vol::new(i, p.clone())).collect();
        World {
            clock: Clock::new(quantum, chance.order()),
            rng,
            chance,
            tick: 10,
            clients: Clients::new(plan.requests.min(seconds * REQUESTS_PER_S)),
            plan,
            machine,
            vols,
            controls: Controls::default(),
            stops: Stops::default(),
            finale: Finale::new(seconds * S),
            watch: Watch::default(),
            journal: Journal::new(trace, verbose),
            cover: Coverage::default(),
            recovery_blocks_max: 0,
        }
    }

    /// What was drawn so far, if it is kept.
    pub fn draws(&self) -> Draws {
        self.chance.draws()
    }

    /// Runs to the end or to the first failure.
    pub fn run(&mut self) -> Outcome {
        if self.journal.is_verbose() {
            eprintln!("{:#?}", self.plan);
        }
        self.begin();
        while !self.journal.has_failed() && !self.finale.is_over() {
            self.advance();
        }
        self.journal.end(self.clock.now(), self.machine.engine());
        let failure = self.journal.failure().map(|what| self.report(what));
        self.outcome(failure)
    }

    fn outcome(&mut self, failure: Option<String>) -> Outcome {
        let trace = self.journal.trace();
        Outcome {
            hashes: trace.hashes(),
            instants: trace.instants(),
            beyond: trace.beyond(),
            text: trace.text(),
            steps: self.clock.steps(),
            elapsed_ns: self.clock.now(),
            coverage: self.cover.clone(),
            recovery_blocks_max: self.recovery_blocks_max,
            failure,
        }
    }

    /// A failure with what led to it; also for a panic of the core.
    pub fn report(&self, what: &str) -> String {
        format!(
            "{}seed {}: {what}\n  at step {}, tick {}, {:.6} ms, theme {:?}\n",
            self.journal.told(),
            self.chance.seed(),
            self.clock.steps(),
            self.tick,
            self.clock.now() as f64 / 1e6,
            self.plan.theme
        )
    }

    /// The outcome of a run in which the core panicked.
    pub(crate) fn after_panic(&mut self, what: &str) -> Outcome {
        let failure = self.report(what);
        self.outcome(Some(failure))
    }

    fn fail(&mut self, what: String) {
        self.journal.fail(what);
    }

    fn note(&mut self, what: &'static str, a: u64, b: u64, c: u64) {
        self.journal.note(self.clock.now(), self.tick, what, [a, b, c]);
    }

    /// The next number of the order in which requests begin and end.
    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    fn at(&mut self, when: Nanos, what: Happening) {
        let identity = self.identity(what);
        self.clock.at(when, identity, what);
    }

    fn after(&mut self, pause: Nanos, what: Happening) {
        self.at(self.clock.now() + pause, what);
    }

    /// What names a happening: it decides what comes first at one point of time, and what is drawn
    /// then.
    fn identity(&self, what: Happening) -> u64 {
        match what {
            // An effect's name is not its token: the core is free to choose that.
            Happening::Done { token, .. } => {
                self.machine.name_of(token).map_or(0, |name| mix(1, name))
            }
            Happening::Client { volume, slot } => fold(&(2, volume, slot)),
            Happening::Action => fold(&3),
            Happening::Stop { .. } => fold(&4),
            Happening::Reopen => fold(&5),
            Happening::Attach { volume, .. } => fold(&(6, volume)),
            Happening::Add { volume } => fold(&(7, volume)),
            Happening::Verify { volume, .. } => fold(&(8, volume)),
            Happening::VerifyAgain { volume, .. } => fold(&(9, volume)),
            Happening::MustBeAnswered { request } => fold(&(10, request)),
            Happening::End => fold(&11),
        }
    }

    /// One point of time: everything that is due, then the core's effects.
    fn advance(&mut self) {
        let deadline = self.machine.engine().and_then(|e| e.next_deadline());
        if let Err(what) = self.clock.advance(deadline) {
            return self.fail(what);
        }
        self.journal.begin_instant(self.clock.now());
        while !self.journal.has_failed()
            && let Some((identity, what)) = self.clock.due()
        {
            self.rng = self.chance.keyed(identity);
            self.happen(what);
        }
        let now = self.clock.now();
        if deadline.is_some_and(|at| at <= now)
            && let Some(engine) = self.machine.engine_mut()
        {
            engine.handle(now, Event::Tick);
        }
        self.take_effects();
        if self.machine.disk().is_dead() {
            self.note_failures();
        }
        self.journal.end_instant(now, self.machine.engine());
    }

    fn happen(&mut self, what: Happening) {
        let current = self.machine.life();
        match what {
            Happening::Done { life, token } if life == current => self.complete(token),
            Happening::Client { volume, slot } => self.client(volume, slot),
            Happening::Action => self.action(),
            Happening::Stop { life, how } if life == current && self.machine.is_running() => {
                self.stop(how)
            }
            Happening::Reopen => self.reopen(),
            Happening::Attach { life, volume } if life == current => self.attach(volume),
            Happening::Add { volume } => self.add(volume),
            Happening::Verify { life, volume } if life == current => self.verify(volume),
            Happening::VerifyAgain { life, volume } if life == current => self.verify_again(volume),
            Happening::MustBeAnswered { request } if self.clients.get(request).is_some() => {
                self.fail(format!(
                    "request {request} for cached blocks waits for a stopped backend"
                ));
            }
            Happening::End => self.end(),
            _ => {}
        }
    }

    /// Something has happened that may have cost the only copy of a block.
    fn may_lose_data(&self) -> bool {
        self.machine.disk().may_have_lost()
    }
}
